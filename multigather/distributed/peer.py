"""Rows read from the other ranks' memory directly, where the GPUs of one host can do so.

Every rank's rows lie in a slab of symmetric memory, which torch maps into every process. A gather
then needs no collective and no work of the owner: one kernel reads own and remote rows alike. It is
the ordinary gather from a buffer that begins at the lowest of the slabs' addresses, whose "rows"
are 16 bytes apart: the number of a row in it is its address, divided by 16, whoever owns it. Only
rows of slabs are asked for, so what lies between them, which is mostly not mapped, is not touched.
The CUDA C kernel makes such numbers of the caller's indices itself; where it is not, operations of
torch do so before.
"""

from __future__ import annotations

import dataclasses
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from .. import api, dispatch
from ..backends._cupy import MOST_RANKS
from ..containers import Buffers
from ..errors import UnsupportedError
from ..executable import Executable
from ..request import Ranks, Request, field_of
from ..slab import UNIT, Column, RowLayout
from .agreement import named
from .repeated import Repeated
from .shards import Shards, bounds_of_rows

# The attribute by which a tensor is known to be a field of a symmetric slab. Slices lack it: their
# first row is not the slab's.
MARK = "_multigather_symmetric"


@dataclass(frozen=True)
class SymmetricSlab:
    """A rank's slab that the other ranks can read.

    Attributes:
        layout: of its rows.
        addresses: of every rank's slab, in this process.
        keep: what keeps the mapping alive.
    """

    layout: RowLayout
    addresses: tuple[int, ...]
    keep: Any


def slab_of(tensors: Sequence[torch.Tensor]) -> SymmetricSlab | None:
    """The slab whose fields these tensors are, all of them in order; None if they are not."""
    marks: list[Any] = [getattr(tensor, MARK, None) for tensor in tensors]
    if None in marks:
        return None
    slab: SymmetricSlab = marks[0][0]
    whole = [(slab, number) for number in range(len(slab.layout.columns))]
    # Rows of no bytes have no place in memory to be read from.
    return slab if marks == whole and slab.layout.stride else None


class PeerReads:
    """Transport by reads of the other ranks' memory.

    Args:
        shards: how the rows are divided; their layout is the slabs'.
        addresses: of every rank's slab.
        local: gathers from this rank's own rows.
        bounds: the bounds mode.
        backend: as for `multigather.gather`.
    """

    name = "peer"
    may_miss = False

    def __init__(
        self,
        shards: Shards,
        addresses: Sequence[int],
        local: Executable,
        bounds: str,
        backend: str | None,
    ) -> None:
        layout, device = shards.layout, local.request.device
        # Rows of a sector or less have a power of two of bytes, longer ones a multiple of 16.
        unit = min(UNIT, layout.stride)
        steps = layout.stride // unit
        origin = min(addresses)
        if any((address - origin) % unit for address in addresses):
            raise ValueError(f"slabs must lie a multiple of {unit} bytes apart")
        ends = [
            address + rows * layout.stride
            for address, rows in zip(addresses, shards.rows, strict=True)
        ]
        self._spans = [
            _span(column, origin + offset, max(ends) - origin - offset, unit, device)
            for column, offset in zip(layout.columns, layout.offsets, strict=True)
        ]
        self._site = local.site
        # Row i of rank k has the number starts[k] + i * steps.
        starts = [
            (address - origin) // unit - offset * steps
            for address, offset in zip(addresses, shards.offsets, strict=False)
        ]
        self._ranks = Ranks(shards.offsets[:-1], tuple(starts), steps)
        self._total, self._bounds = shards.total, bounds
        self._backend = backend
        kernel = dispatch.cuda_backend(backend, device)
        self.takes_indices = kernel is not None and len(addresses) <= MOST_RANKS
        if not self.takes_indices:
            # Bad indices have rank -1's.
            self._first_of = torch.tensor([*starts, 0], device=device)
            self._ends = torch.tensor(shards.offsets[1:], device=device)
        # By the type of what the kernel takes: the caller's indices, or numbers in the spans.
        self._gathers: dict[torch.dtype, Repeated] = {}
        self._latest: Repeated | None = None

    def __call__(
        self,
        rows: torch.Tensor,
        shape: torch.Size,
        sources: Sequence[torch.Tensor],
        outs: Sequence[torch.Tensor] | None,
    ) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """See `sharding.Transport`; the others need not take part."""
        if not self.takes_indices:
            asked = rows
            owners = torch.searchsorted(self._ends, asked, right=True)
            rows = torch.add(self._first_of[owners], asked, alpha=self._ranks.steps)
            if bounds_of_rows(self._bounds) == "fill":
                rows = torch.where(asked < self._total, rows, -1)
        gather = self._gathers.get(rows.dtype)
        if gather is None:
            gather = self._gathers[rows.dtype] = self._gather_of(rows.dtype)
        self._latest = gather
        return gather(rows, shape, outs), None

    def again(self, indices: Any) -> tuple[torch.Tensor, ...] | None:
        """Gather by indices like those of the last call, the short way; of any others None."""
        if not self.takes_indices or self._latest is None:
            return None
        return self._latest.again(indices)

    def _gather_of(self, index_dtype: torch.dtype) -> Repeated:
        fields = tuple(map(field_of, self._spans))
        device = self._spans[0].device
        if not self.takes_indices:
            bounds = bounds_of_rows(self._bounds)
            request = Request(device, False, index_dtype, 0, bounds, fields)
            return Repeated(Executable(request, self._backend, self._site.labels), self._spans)
        fields = tuple(dataclasses.replace(field, rows=self._total) for field in fields)
        request = Request(device, False, index_dtype, 0, self._bounds, fields, self._ranks)
        return Repeated(Executable(request, "cupy", self._site.labels), self._spans)

    def explain(self) -> list[str]:
        """See `sharding.Transport`."""
        return [
            "one kernel reads own and remote rows in place; no collective, the owner does nothing"
        ]


def _span(column: Column, address: int, size: int, unit: int, device: torch.device) -> torch.Tensor:
    """A field whose rows begin every ``unit`` bytes from an address on, however long they are."""
    inner = [1]
    for each in reversed(column.row_shape[1:]):
        inner.insert(0, inner[0] * each)
    rows = max(0, (size - column.row_bytes) // unit + 1)
    strides = (unit // column.dtype.itemsize, *inner[: len(column.row_shape)])
    # The only way to describe memory that no allocation of this process has; nothing reads it here.
    storage: Any = torch._C._construct_storage_from_data_pointer(address, device, size)
    empty = torch.empty(0, dtype=column.dtype, device=device)
    return empty.set_(storage, 0, (rows, *column.row_shape), strides)


def symmetric(*local_bufs: Any, group: dist.ProcessGroup | None = None) -> tuple[Any, ...]:
    """Copy this rank's rows to memory that the other ranks' GPUs can read; a collective call.

    `shard` then reads rows directly. The copies lie together row by row in one slab of torch's
    symmetric memory, so drop the originals and use the copies. Values written into the copies are
    seen by the other ranks' calls that run after the writes: put a barrier between them.

    Args:
        *local_bufs: as for `shard`.
        group: the ranks, whose GPUs are different ones of one host; None for all.

    Returns:
        The copies, in the structure of ``local_bufs``. All of them together, in this order, are
        what `shard` takes.

    Raises:
        UnsupportedError: the ranks are on several hosts or share a GPU, their GPUs cannot read each
            other's memory, the buffers are on a CPU, or this torch has no symmetric memory; says
            which.
        TypeError, ValueError: as `shard`.
    """
    from .plan import Options, Part, agreed, group_of, local_executable

    group = group_of(group)
    taken: list[Buffers] = []

    def own_part() -> Part:
        taken[:] = [Buffers(local_bufs)]
        return Part(local_executable(taken[0], "raise", None))

    part, offers = agreed(group, own_part, Options())
    (buffers,) = taken
    tensors = buffers.tensors
    rows = [offer.rows for offer in offers]
    request = part.local.request
    device = request.device
    places: list[Any] = [None] * group.size()
    place = socket.gethostname(), str(device), ""
    if device.type == "cuda":
        place = (*place[:2], str(torch.cuda.get_device_properties(device).uuid))
    with named("agreeing on symmetric memory (all_gather_object)", group):
        dist.all_gather_object(places, place, group=group)
    reasons = why_not(places)
    if reasons:
        raise UnsupportedError("no symmetric memory: " + "; ".join(reasons))
    from torch.distributed import _symmetric_memory

    layout = RowLayout.of([Column(each.dtype, each.row_shape) for each in request.fields])
    # Plain access is all that is used; a multicast object would take resources of the switch.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    shape = (max(1, *rows), max(1, layout.stride))
    memory = _symmetric_memory.empty(shape, dtype=torch.uint8, device=device)
    with named("making memory symmetric (rendezvous)", group):
        handle = _symmetric_memory.rendezvous(memory, group)
    # Unlike `get_buffer` this knows where in its allocation the tensor is.
    slabs = [handle.get_remote_tensor(rank, shape, torch.uint8) for rank in range(group.size())]
    slab = SymmetricSlab(layout, tuple(each.data_ptr() for each in slabs), (memory, handle))
    count = rows[group.rank()]
    copies = layout.views(memory[:count, : layout.stride])
    numbers = torch.arange(count, device=device)
    api.gather(numbers, *tensors, out=copies, bounds="unchecked")
    for number, copied in enumerate(copies):
        setattr(copied, MARK, (slab, number))
    first_rows: list[Any] = [None] * group.size()
    own = memory[0].tolist()  # after the copies
    with named("waiting for all copies (all_gather_object)", group):
        dist.all_gather_object(first_rows, own, group=group)
    # The addresses are used unchecked from here on, and torch's interface to them is not public.
    seen = [each[0].tolist() for each in slabs]
    if seen != first_rows:
        wrong = next(rank for rank, row in enumerate(seen) if row != first_rows[rank])
        raise RuntimeError(f"symmetric memory of rank {wrong} does not show what rank {wrong} has")
    return buffers.mirrored(copies, torch.Size((count,)))


def why_not(places: Sequence[tuple[str, str, str]]) -> list[str]:
    """Reasons why ranks cannot read each other's memory, from host, device and GPU of each."""
    reasons = []
    hosts = sorted({host for host, _, _ in places})
    if len(hosts) > 1:
        reasons.append(f"the ranks are on {len(hosts)} hosts ({', '.join(hosts[:4])})")
    devices = [device for _, device, _ in places]
    if not all(device.startswith("cuda") for device in devices):
        reasons.append(f"the buffers are on {', '.join(sorted(set(devices)))}")
    elif len(hosts) == 1:
        if len({gpu for _, _, gpu in places}) < len(places):
            reasons.append("several ranks have the same GPU")
        numbers = sorted({int(device.partition(":")[2]) for device in devices})
        reasons += [
            f"GPU {a} cannot read the memory of GPU {b}"
            for a in numbers
            for b in numbers
            if a != b and not torch.cuda.can_device_access_peer(a, b)
        ]
    try:
        from torch.distributed import _symmetric_memory  # noqa: F401
    except ImportError as error:
        reasons.append(f"this torch has no symmetric memory ({error})")
    return reasons
