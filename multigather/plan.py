"""`plan`: everything about a gather that does not depend on the indices, resolved once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from . import api, containers
from .autograd import detached
from .containers import Buffers
from .nvtx import ranged
from .shortcut import OutShortcut, Shortcut, guard

# Sets of outputs that a plan remembers having checked; a ring of a few is what people use.
KEPT_OUTPUTS = 64


class Plan:
    """A gather from fixed buffers: ``plan(indices)`` is ``tuple(b[indices] for b in bufs)``.

    Made by `plan`. It cannot be changed, may be called by any number of threads, and keeps its
    buffers alive. Values written into the buffers are seen by the next call, as always; a buffer
    that was resized, re-strided or moved to other memory is refused, because the plan would no
    longer be for what the caller has.
    """

    def __init__(self, bufs: tuple[Any, ...], bounds: str, backend: str | None) -> None:
        # The containers are the plan's own: what their owner changes later is no concern of it.
        self._buffers = buffers = Buffers(containers.copied(bufs))
        self._bounds = bounds
        self._backend = backend
        self._tensors = tuple(buffers.tensors)
        self._flat = len(self._tensors) == len(bufs) and all(
            isinstance(buf, torch.Tensor) for buf in bufs
        )
        self._shortcuts: dict[torch.dtype, Shortcut] = {}
        self._latest: Shortcut | None = None
        self._into: dict[int, OutShortcut] = {}
        # Refuses what no gather could take, before the first indices come.
        first = self._tensors[0] if self._tensors else None
        device = first.device if isinstance(first, torch.Tensor) else "cpu"
        none = torch.empty(0, dtype=torch.int64, device=device)
        api.gather_checked(none, buffers, None, bounds, backend)
        self._layouts = tuple(map(_layout, self._tensors))

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of a plan, in another process too, is a plan made for the copied buffers."""
        return Plan, (self._buffers.arguments, self._bounds, self._backend)

    @ranged("multigather.plan")
    def __call__(self, indices: torch.Tensor, out: Sequence[Any] | None = None) -> tuple[Any, ...]:
        """Gather rows ``indices`` of the plan's buffers.

        Args:
            indices: as for `multigather.gather`.
            out: as for `multigather.gather`.

        Returns:
            What ``multigather.gather(indices, *bufs, out=out)`` returns.

        Raises:
            ValueError: a buffer was resized, re-strided or moved since the plan was made.
            TypeError, ValueError, IndexError, UnsupportedError: as `multigather.gather`.
        """
        if is_dynamo_compiling():
            return api.in_graph(indices, self._buffers, out, self._bounds, self._backend)
        results: tuple[Any, ...] | None
        if forward_ad._current_level >= 0:
            pass  # a buffer may have a tangent now, which no guard looks at
        elif out is None:
            # Mostly the indices are of the last call's type: to ask for it takes longer.
            shortcut = self._latest
            results = shortcut.run(indices, self._tensors) if shortcut is not None else None
            if results is None:
                results = self._run_another(indices)
            if results is None and self._latest is not None:
                results = self._latest.run_otherwise(indices, self._tensors)
            if results is not None:
                if self._flat:
                    return results
                return self._buffers.mirrored(results, indices.shape)
        else:
            known = self._into.get(id(out[0])) if isinstance(out, (tuple, list)) and out else None
            results = known.run(indices, self._tensors, out) if known is not None else None
            if results is not None:
                return results
        if not isinstance(indices, torch.Tensor):
            array, indices = indices, containers.as_indices(indices)
            if indices is not array:
                return self(indices, out)
        for number, (tensor, layout) in enumerate(zip(self._tensors, self._layouts, strict=True)):
            if _layout(tensor) != layout:
                raise ValueError(
                    f"tensor {number} of the plan has changed: it had {_text(layout)} when the "
                    f"plan was made and has {_text(_layout(tensor))} now; make a new plan"
                )
        results, executable = api.gather_checked(
            indices, self._buffers, out, self._bounds, self._backend
        )
        if executable is not None and out is None:
            self._learn(indices, executable)
        elif executable is not None and out and self._flat and api.only_tensors(*out):
            if len(self._into) >= KEPT_OUTPUTS:
                self._into = {}
            self._into[id(out[0])] = OutShortcut(indices, self._tensors, results, executable)
        return results

    def explain(self, indices: torch.Tensor) -> Any:
        """As `multigather.explain` for the plan's buffers."""
        indices = containers.as_indices(indices)
        return api.explain_buffers(indices, self._buffers, self._bounds, self._backend)

    def _run_another(self, indices: Any) -> tuple[torch.Tensor, ...] | None:
        """Run the shortcut for the indices' type, if it is not the latest."""
        shortcut = self._shortcuts.get(getattr(indices, "dtype", torch.bool))
        if shortcut is None or shortcut is self._latest:
            return None
        self._latest = shortcut
        return shortcut.run(indices, self._tensors)

    def _learn(self, indices: torch.Tensor, executable: Any) -> None:
        shortcut = self._shortcuts.get(indices.dtype)
        if shortcut is None or not shortcut.knows(indices, self._tensors):
            check = guard(indices, detached(self._tensors))
            if check is None:
                return
            shortcut = Shortcut(check, executable, detached(self._tensors), fixed=True)
            self._shortcuts[indices.dtype] = self._latest = shortcut
        shortcut.learn(indices, self._tensors)


def plan(*bufs: Any, bounds: str = "raise", backend: str | None = None) -> Plan:
    """Resolve a gather from fixed buffers once; calling the plan is the cheapest gather there is.

    Args:
        *bufs: as for `multigather.gather`; they are kept alive.
        bounds: as for `multigather.gather`.
        backend: as for `multigather.gather`.

    Returns:
        A `Plan`; ``plan(*bufs)(indices)`` equals ``gather(indices, *bufs)``.

    Raises:
        TypeError, ValueError, UnsupportedError: as `multigather.gather` for the same buffers.
    """
    return Plan(bufs, bounds, backend)


Layout = tuple[int, torch.Size, tuple[int, ...], torch.dtype]


def _layout(tensor: torch.Tensor) -> Layout:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _text(layout: Layout) -> str:
    address, shape, stride, dtype = layout
    return f"{dtype} {list(shape)} with strides {list(stride)} at {address:#x}"
