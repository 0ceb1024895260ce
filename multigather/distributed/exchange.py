"""Rows by exchange: indices go to the ranks that have the rows, the rows come back packed.

Three collectives a call, whatever the number of buffers: how many rows each rank asks of each
other, their row numbers, the rows. With a fixed capacity the first, and with it the only wait for
the device, is left out.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from .. import api
from ..backends._route import Router
from ..backends.base import KernelRunner
from ..executable import Executable
from ..request import Request, bucket_of, dtype_name, field_of
from .agreement import named
from .repeated import Repeated
from .shards import Shards

# Room for a quarter more rows than asked for, so that calls of varying size soon allocate nothing.
SPARE = 4


class Slab:
    """Memory for rows of all fields together.

    Attributes:
        memory: uint8, shape ``[room, stride]``.
        fields: the buffers, as views of it.
        gather: gathers from them.
    """

    @torch.inference_mode(False)  # what was made in that mode could not be written outside it
    def __init__(
        self, shards: Shards, room: int, bounds: str, local: Executable, backend: str | None
    ) -> None:
        device = local.request.device
        self.memory = torch.empty((room, shards.layout.stride), dtype=torch.uint8, device=device)
        self.fields = shards.layout.views(self.memory)
        fields = tuple(map(field_of, self.fields))
        request = Request(device, False, torch.int64, 0, bounds, fields)
        self.gather = Repeated(Executable(request, backend, local.site.labels), self.fields)


class Exchange:
    """Transport by collectives of torch.distributed.

    Args:
        group: of the ranks.
        shards: how the rows are divided.
        local: gathers from this rank's own rows; unchecked, with a capacity in mode "fill".
        bounds: "unchecked" if each index is promised to have a row, else "fill".
        deduplicate: whether a row that is asked for repeatedly is sent once.
        capacity: most rows that a rank asks of another one; None for any number.
        backend: as for `multigather.gather`.
        reason: why this transport and not the other one.
        router: finds out where rows are; without it torch's operations do, and only they know
            which rows are asked for repeatedly.
    """

    name = "exchange"

    def __init__(
        self,
        group: dist.ProcessGroup,
        shards: Shards,
        local: Executable,
        bounds: str,
        deduplicate: bool,
        capacity: int | None,
        backend: str | None,
        reason: str,
        router: Router | None,
    ) -> None:
        self._router = router
        self.takes_indices = router is not None
        self._group, self._shards, self._local = group, shards, local
        self._deduplicate, self._capacity = deduplicate, capacity
        self._backend, self._reason = backend, reason
        self._bounds = bounds if capacity is None else "fill"
        self.may_miss = capacity is not None
        self._first_row = shards.offsets[group.rank()]
        self._offsets = torch.tensor(shards.offsets, device=local.request.device)
        room = 0 if capacity is None else capacity * group.size()
        self._outgoing, self._incoming = self._slab(room), self._slab(room)

    def __call__(
        self,
        rows: torch.Tensor,
        shape: torch.Size,
        sources: Sequence[torch.Tensor],
        outs: Sequence[torch.Tensor] | None,
    ) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """See `sharding.Transport`."""
        if self._router is not None:
            return self._routed(self._router, rows, shape, sources, outs)
        # Shards are ranges of rows: sorted by row is sorted by rank, and what is left behind the
        # last rank's rows are the bad ones. The owner then reads in order, too.
        ordered, order = rows.sort()
        starts = torch.searchsorted(ordered, self._offsets)
        asked = ordered
        if self._deduplicate:
            new = torch.ones(len(ordered) + 1, dtype=torch.int64, device=ordered.device)
            new[1:-1] = ordered[1:] != ordered[:-1]
            numbers = new.cumsum(0).sub_(1)
            starts, numbers = numbers[starts], numbers[:-1]
            asked = torch.empty_like(ordered).scatter_(0, numbers, ordered)
        else:
            numbers = torch.arange(len(ordered), device=ordered.device)
        if self._capacity is None:
            missed = None
            counts = starts.diff()
            self._fetch(asked, torch.stack((counts, counts)), sources)
            if self._bounds == "fill":
                numbers = torch.where(ordered < self._shards.total, numbers, -1)
        else:
            numbers, requests, missed = self._placed(starts, ordered, numbers)
            self._fetch_fixed(requests, sources)
        places = torch.empty_like(order).scatter_(0, order, numbers)
        return self._incoming.gather(places, shape, outs), missed

    def _routed(
        self,
        router: Router,
        indices: torch.Tensor,
        shape: torch.Size,
        sources: Sequence[torch.Tensor],
        outs: Sequence[torch.Tensor] | None,
    ) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """`__call__` for indices, with a router."""
        places, numbers, counts, missed = router.requests(indices)
        if self._capacity is None:
            self._fetch(numbers, counts, sources)
        else:
            self._fetch_fixed(numbers, sources)
        return self._incoming.gather(places, shape, outs), missed

    def explain(self) -> list[str]:
        """See `sharding.Transport`."""
        dtype = dtype_name(self._shards.index_dtype)
        backend = dist.get_backend(self._group)
        lines = [f"three collectives a call ({backend}): counts, row numbers ({dtype}), rows"]
        if self._capacity is not None:
            lines = [
                f"two collectives a call ({backend}): row numbers ({dtype}), rows; each rank sends "
                f"{self._capacity} rows to each other, asked for or not"
            ]
        times = "once" if self._deduplicate else "as often as asked for"
        return [*lines, f"a row that is asked for repeatedly is sent {times}", self._reason]

    def _fetch(
        self, numbers: torch.Tensor, counts: torch.Tensor, sources: Sequence[torch.Tensor]
    ) -> None:
        """Fetch rows into the incoming slab, in their order.

        Args:
            numbers: of the rows: at their ranks from a router, else among all ranks' rows.
            counts: how many of them each rank has, in the first of two rows.
            sources: this rank's own rows.
        """
        with named("exchanging counts (all_to_all_single 1 of 3)", self._group):
            dist.all_to_all_single(counts[1], counts[0], group=self._group)
        mine, theirs = counts.tolist()  # the one wait for the device
        in_rows, out_rows = sum(mine), sum(theirs)
        if in_rows > len(self._incoming.memory):
            self._incoming = self._slab(in_rows + in_rows // SPARE)
        if out_rows > len(self._outgoing.memory):
            self._outgoing = self._slab(out_rows + out_rows // SPARE)
        requests = numbers[:in_rows].to(self._shards.index_dtype)
        wanted = requests.new_empty(out_rows)
        with named("exchanging row numbers (all_to_all_single 2 of 3)", self._group):
            dist.all_to_all_single(wanted, requests, theirs, mine, group=self._group)
        self._pack(wanted if self._router else wanted.sub_(self._first_row), sources)
        outgoing, incoming = self._outgoing.memory[:out_rows], self._incoming.memory[:in_rows]
        with named("exchanging rows (all_to_all_single 3 of 3)", self._group):
            dist.all_to_all_single(incoming, outgoing, mine, theirs, group=self._group)

    def _placed(
        self, starts: torch.Tensor, ordered: torch.Tensor, numbers: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """``capacity`` places for each rank's rows, and the rows that have one.

        Returns:
            For each sorted row its place, -1 for none; for each place its row's number, -1 for
            none; and how many found no room.
        """
        assert self._capacity is not None
        capacity, total = self._capacity, self._shards.total
        places = capacity * self._group.size()
        owners = torch.searchsorted(self._offsets[1:], ordered, right=True)
        within = numbers - starts[owners]
        fits = (within < capacity) & (ordered < total)
        numbers = torch.where(fits, owners * capacity + within, -1)
        # Rows without a place all go to one behind the others; rows of a place are the same row.
        requests = torch.full((places + 1,), -1, device=ordered.device)
        requests.scatter_(0, torch.where(fits, numbers, places), ordered)
        missed = (starts.diff() - capacity).clamp_(min=0).sum()
        return numbers, requests[:places].to(self._shards.index_dtype), missed

    def _fetch_fixed(self, requests: torch.Tensor, sources: Sequence[torch.Tensor]) -> None:
        """As `_fetch`, with ``capacity`` places for each rank's rows; no wait, all sizes fixed."""
        wanted = torch.empty_like(requests)
        with named("exchanging row numbers (all_to_all_single 1 of 2)", self._group):
            dist.all_to_all_single(wanted, requests, group=self._group)
        if not self._router:
            wanted = torch.where(wanted < 0, -1, wanted - self._first_row)
        self._pack(wanted, sources)
        with named("exchanging rows (all_to_all_single 2 of 2)", self._group):
            dist.all_to_all_single(self._incoming.memory, self._outgoing.memory, group=self._group)

    def _slab(self, room: int) -> Slab:
        return Slab(self._shards, room, self._bounds, self._local, self._backend)

    def _pack(self, wanted: torch.Tensor, sources: Sequence[torch.Tensor]) -> None:
        """Gather own rows into the outgoing slab."""
        fields: Sequence[torch.Tensor] = self._outgoing.fields
        # A kernel takes from them where rows begin, and writes as many as are wanted. To slice them
        # costs 2 microseconds each.
        if not isinstance(self._local.runners.get(bucket_of(len(wanted))), KernelRunner):
            fields = [field[: len(wanted)] for field in fields]
        api._run(self._local, wanted, wanted.shape, sources, fields)


class Local:
    """Transport for a group of one rank, which has all rows itself.

    Args:
        local: gathers from its rows, in mode "fill" or unchecked.
    """

    name = "none"
    may_miss = False
    takes_indices = False

    def __init__(self, local: Executable) -> None:
        self._local = local

    def explain(self) -> list[str]:
        """See `sharding.Transport`."""
        return ["the group has one rank, which has all rows"]

    def __call__(
        self,
        rows: torch.Tensor,
        shape: torch.Size,
        sources: Sequence[torch.Tensor],
        outs: Sequence[torch.Tensor] | None,
    ) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """See `sharding.Transport`."""
        return api._run(self._local, rows, shape, sources, outs), None
