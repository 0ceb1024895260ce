"""A gather made ready for one layout of buffers, and the memory of those that were made."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import torch

from . import dispatch, faults
from .backends.base import Runner
from .cache import record, store
from .fork import cached_property, no_fork
from .request import Request, Site, bucket_of

_plan_numbers = itertools.count(1)


class Executable:
    """Runs every gather of one layout: same devices, types, shapes, strides, mode and backend.

    The number of indices may differ from call to call; configs are chosen per power of two.

    Attributes:
        request: the gather; its ``count`` is 0.
        site: names of the buffers.
        name: the backend that the caller asked for, or None.
        on_cuda: whether it runs on a CUDA device.
        by_address: whether a runner relies on how the buffers' addresses are aligned.
        runners: those made so far, by `bucket_of` the count.
        shortcut: the `shortcut.Shortcut` of a plain call, kept here by `api`.

    Args:
        request: the gather; its ``count`` is ignored.
        name: the backend that the caller asked for, or None.
        labels: names of the buffers.
    """

    def __init__(self, request: Request, name: str | None, labels: tuple[str, ...]) -> None:
        self.request = request
        self.on_cuda = request.device.type == "cuda"
        self.by_address = False
        self.name = name
        self.site = Site(next(_plan_numbers), tuple(range(len(labels))), labels)
        faults.plans[self.site.plan] = self.site
        self.runners: dict[int, Runner] = {}
        self.shortcut: Any = None

    def __call__(
        self,
        indices: torch.Tensor,
        shape: torch.Size,
        sources: Sequence[torch.Tensor],
        outs: Sequence[torch.Tensor] | None,
    ) -> list[torch.Tensor]:
        """Gather; the arguments are those of `backends.base.Runner`."""
        count = shape.numel()
        bucket = bucket_of(count)
        runner = self.runners.get(bucket) or self._prepare(bucket, count)
        return runner(indices, shape, sources, outs)

    @cached_property
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

    def _prepare(self, bucket: int, count: int) -> Runner:
        """Choose and make the runner for the counts of a bucket; ``count`` is the first of them."""
        request = self.request.with_count(1 << bucket)
        # While a CUDA graph is being captured nothing is read, written or measured.
        capturing = self.on_cuda and torch.cuda.is_current_stream_capturing()
        # A plan asks for 0 rows to check its buffers: nobody's gather.
        if count:
            record.note(self.request.with_count(count), may_write=not capturing)
        if count and store.mode() == "online" and not capturing:
            with no_fork:
                from .tuner.online import tune_if_missing

            tune_if_missing(request, self.name)
        selection = dispatch.select(
            request, self.name, self.site, reading=not capturing, strictly=count > 0
        )
        parts = []
        for pick in selection.picks:
            if pick.backend.by_address:
                self.by_address = True
            site = dataclasses.replace(self.site, numbers=pick.fields)
            runner = pick.backend.prepare(request.subset(pick.fields), pick.config, site)
            parts.append((runner, pick.fields))
        runner = parts[0][0] if len(parts) == 1 else _Parts(parts)
        if selection.settled and (count or store.mode() != "strict"):
            return self.runners.setdefault(bucket, runner)
        return runner


class _Parts:
    """Several runners that share the buffers of one gather.

    Args:
        parts: each runner with the numbers of its buffers; every buffer has exactly one runner.
    """

    def __init__(self, parts: list[tuple[Runner, tuple[int, ...]]]) -> None:
        self._parts = parts

    def __call__(
        self,
        indices: torch.Tensor,
        shape: torch.Size,
        sources: Sequence[torch.Tensor],
        outs: Sequence[torch.Tensor] | None,
    ) -> list[torch.Tensor]:
        """See `backends.base.Runner`."""
        results: list[torch.Tensor | None] = [None] * len(sources)
        for runner, numbers in self._parts:
            some = runner(
                indices,
                shape,
                [sources[number] for number in numbers],
                None if outs is None else [outs[number] for number in numbers],
            )
            for number, result in zip(numbers, some, strict=True):
                results[number] = result
        return results  # type: ignore[return-value]  # every field has exactly one runner
