"""One call on sharded buffers: checks, transport, bad indices."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from .. import api, containers, faults
from ..executable import Executable
from ..request import INDEX_DTYPES, Request, field_of
from .shards import Shards, wanted_rows

# The outputs that a caller brings for indices on the buffers' device, or None; refuses what does
# not fit the request.
TakeOutputs = Callable[[torch.Tensor, Request], "list[torch.Tensor] | None"]


class CapacityError(RuntimeError):
    """A rank asked another for more rows than the plan's capacity; they came back as zeros."""


class Transport(Protocol):
    """A way to bring rows to the ranks that want them."""

    name: str
    may_miss: bool
    # Whether it takes the indices as they are and reports bad ones, in place of row numbers.
    takes_indices: bool

    def __call__(
        self,
        rows: torch.Tensor,
        shape: torch.Size,
        sources: Sequence[torch.Tensor],
        outs: Sequence[torch.Tensor] | None,
    ) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """Gather; every rank of the group must take part.

        Args:
            rows: int64 row numbers, 1-d; the number of all ranks' rows asks for zeros. Or indices.
            shape: of the indices.
            sources: this rank's own rows.
            outs: tensors to write, or None to make them.

        Returns:
            The outputs; and, where ``may_miss``, how many rows were not fetched, on the device.
        """
        ...

    def explain(self) -> list[str]:
        """What it does, a line each."""
        ...


class Sharding:
    """Gathers from buffers whose rows the ranks of a group share.

    Attributes:
        shards: how the rows are divided.
        transport: what moves them.

    Args:
        shards: see the attributes.
        transport: see the attributes.
        local: executable of a gather from this rank's own rows.
        bounds: as for `multigather.gather`.
    """

    def __init__(
        self, shards: Shards, transport: Transport, local: Executable, bounds: str
    ) -> None:
        self.shards, self.transport = shards, transport
        self._local, self._bounds = local, bounds
        self._device = local.request.device
        fields = tuple(
            dataclasses.replace(field, rows=shards.total) for field in local.request.fields
        )
        whole = dataclasses.replace(local.request, bounds=bounds, fields=fields)
        self._requests = {
            dtype: dataclasses.replace(whole, index_dtype=dtype) for dtype in INDEX_DTYPES
        }
        self._missed = Missed(self._device) if transport.may_miss else None
        # Rows without bytes: a gather of them checks the indices, by the contract, and copies
        # nothing.
        self._no_bytes = torch.empty((shards.total, 0), dtype=torch.uint8, device=self._device)
        self._checks: dict[torch.dtype, Executable] = {}

    def __call__(
        self, indices: Any, sources: Sequence[torch.Tensor], take_outputs: TakeOutputs
    ) -> tuple[list[torch.Tensor], torch.Size]:
        """Gather; every rank of the group must take part, and does, whatever its arguments are.

        Returns:
            The outputs, and the shape of the indices.
        """
        error: Exception | None = None
        outs = None
        try:
            indices = self._on_device(indices)
            shape, flat = indices.shape, indices.reshape(-1)
            if len(flat) and not self.shards.total and self._bounds != "fill":
                raise self._local.empty_buffer_error(len(flat))
            outs = take_outputs(indices, self._requests[indices.dtype])
            if self._missed is not None:
                self._missed.raise_seen()
            if self._device.type == "cuda":
                faults.raise_pending(self._device)
            if self.transport.takes_indices:
                rows = flat.contiguous()
            else:
                rows, checked = wanted_rows(flat, self.shards.total, self._bounds)
                if self._bounds == "raise" and not checked:
                    self._check(flat, shape)
        except (TypeError, ValueError, IndexError, RuntimeError) as caught:
            # The others wait for this rank in the collectives: it asks for nothing there, serves
            # what they ask, and raises afterwards.
            error, outs, shape = caught, None, torch.Size((0,))
            rows = torch.empty(0, dtype=torch.int64, device=self._device)
        results, missed = self.transport(rows, shape, sources, outs)
        if error is not None:
            raise error
        if self._missed is not None and missed is not None:
            self._missed.add(missed)
        if faults.synchronous and self._bounds == "raise" and self._device.type == "cuda":
            api._synchronise(self._device)
        return results, shape

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the buffers."""
        return self._local.site.labels

    def explain(self) -> str:
        """The transport and why, rows per rank, bytes per row."""
        rows, layout = self.shards.rows, self.shards.layout
        lines = [
            f"gather from {self.shards.total} rows on {len(rows)} ranks, "
            f"bounds={self._bounds!r}, on {self._device}",
            f"  rows per rank: {', '.join(map(str, rows[:16]))}{', ...' if len(rows) > 16 else ''}",
            f"  a row of all {len(layout.columns)} buffers together has {layout.stride} bytes",
            f"  transport: {self.transport.name}",
            *(f"    {line}" for line in self.transport.explain()),
        ]
        return "\n".join(lines)

    def _on_device(self, indices: Any) -> torch.Tensor:
        """The indices, checked, on the buffers' device."""
        tensor: torch.Tensor = containers.as_indices(indices)
        api.check_options(tensor, self._bounds, None)
        if tensor.device == self._device:
            return tensor
        if tensor.device.type != "cpu":
            raise ValueError(
                f"indices are on {tensor.device} and the rows on {self._device}; move the indices "
                f"with .to({str(self._device)!r})"
            )
        return tensor.to(self._device)

    def _check(self, indices: torch.Tensor, shape: torch.Size) -> None:
        """Raise or report bad indices, whichever the device has it."""
        check = self._checks.get(indices.dtype)
        if check is None:
            request = Request(
                self._device, False, indices.dtype, 0, "raise", (field_of(self._no_bytes),)
            )
            check = Executable(request, None, self._local.site.labels[:1])
            self._checks[indices.dtype] = check
        check(indices, shape, [self._no_bytes], None)


class Missed:
    """How many rows found no room in a plan's capacity.

    On a GPU the number is copied to pinned host memory by every call, graphs included, and looked
    at without a wait by the next one; `multigather.check` waits for it.

    Attributes:
        device: where the rows are missed.
    """

    @torch.inference_mode(False)  # what was made in that mode could not be written outside it
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._count = torch.zeros((), dtype=torch.int64, device=device)
        self._seen = torch.zeros(
            (), dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda"
        )
        self._told = 0
        faults.board_of(device)  # `check` visits devices that have one
        faults.watched.add(self)

    def add(self, missed: torch.Tensor) -> None:
        """Count, and on a CPU raise at once."""
        self._count.add_(missed)
        self._seen.copy_(self._count, non_blocking=True)
        if self.device.type == "cpu":
            self.raise_seen()

    def raise_seen(self) -> None:
        """Raise for what has arrived on the host and was not told yet.

        Raises:
            CapacityError: says how many rows it is.
        """
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return
        number = int(self._seen) - self._told
        if number:
            self._told += number
            raise CapacityError(
                f"{number} rows were not fetched, because a rank asked another for more rows than "
                "the plan's capacity; the outputs have zeros there. Make the plan with a larger "
                "capacity, or without one"
            )
