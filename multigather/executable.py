"""A gather made ready for one layout of buffers, and the memory of those that were made."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import threading
from collections.abc import Sequence

import torch

from . import dispatch, faults
from .backends.base import Runner
from .request import Request, Site

_plan_numbers = itertools.count(1)


class Executable:
    """Runs every gather of one layout: same devices, types, shapes, strides, mode and backend.

    The number of indices may differ from call to call; configs are chosen per power of two.

    Args:
        request: the gather; its ``count`` is ignored.
        name: the backend that the caller asked for, or None.
        labels: names of the buffers.
    """

    def __init__(self, request: Request, name: str | None, labels: tuple[str, ...]) -> None:
        self.request = request
        self._name = name
        self.site = Site(next(_plan_numbers), tuple(range(len(labels))), labels)
        faults.plans[self.site.plan] = self.site
        self._runners: dict[int, list[tuple[Runner, tuple[int, ...]]]] = {}
        self._lock = threading.Lock()

    def __call__(
        self,
        indices: torch.Tensor,
        shape: torch.Size,
        sources: Sequence[torch.Tensor],
        outs: Sequence[torch.Tensor] | None,
    ) -> list[torch.Tensor]:
        """Gather; the arguments are those of `backends.base.Runner`."""
        count = indices.shape[0]
        bucket = (count * count).bit_length() // 2
        runners = self._runners.get(bucket) or self._prepare(bucket)
        if len(runners) == 1:
            return runners[0][0](indices, shape, sources, outs)
        results: list[torch.Tensor | None] = [None] * len(sources)
        for runner, numbers in runners:
            some = runner(
                indices,
                shape,
                [sources[number] for number in numbers],
                None if outs is None else [outs[number] for number in numbers],
            )
            for number, result in zip(numbers, some, strict=True):
                results[number] = result
        return results  # type: ignore[return-value]  # every field has exactly one runner

    @functools.cached_property
    def has_empty_buffer(self) -> bool:
        """Whether a buffer has no rows at all."""
        return any(field.rows == 0 for field in self.request.fields)

    def empty_buffer_error(self, count: int) -> IndexError:
        """The error for indices into a buffer without rows."""
        number = next(n for n, field in enumerate(self.request.fields) if field.rows == 0)
        return IndexError(
            f"{self.site.label(number)} has 0 rows, so none of the {count} indices is valid; "
            'bounds="fill" would give rows of zeros'
        )

    def _prepare(self, bucket: int) -> list[tuple[Runner, tuple[int, ...]]]:
        """Choose and make the runners for counts whose nearest power of two is ``2**bucket``."""
        with self._lock:
            if bucket not in self._runners:
                request = self.request.with_count(1 << bucket)
                runners = []
                for pick in dispatch.select(request, self._name, self.site)[0]:
                    site = dataclasses.replace(self.site, numbers=pick.fields)
                    # The fault board finds the labels by the plan's number while a runner lives.
                    runner = pick.backend.prepare(request.subset(pick.fields), pick.config, site)
                    runners.append((runner, pick.fields))
                self._runners[bucket] = runners
            return self._runners[bucket]
