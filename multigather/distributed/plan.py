"""`shard`: buffers whose rows lie on several ranks, and the plan that gathers from all of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from .. import api, containers, dispatch, faults
from ..backends._route import Router
from ..containers import Buffers
from ..executable import Executable
from ..memory import check_memory, has_memory, span_of
from ..outputs import check_outputs
from ..plan import _layout, _text
from ..request import Request, dtype_name
from ..shortcut import guard
from ..slab import Column, RowLayout
from . import peer
from .agreement import Offer, agree
from .exchange import Exchange, Local
from .sharding import Sharding, Transport
from .shards import Shards, bounds_of_rows

TRANSPORTS = ("auto", "exchange", "peer")

# To find repeated rows among sorted ones costs 11 ns of a CPU core for an index (20,000 of them), a
# byte between two gloo ranks 1 ns: with 64 bytes it pays if one index in six is a repetition, with
# 668 if one in sixty is. It also keeps a popular row's rank from serving it n times. Between two
# H200 linked by NVLink it did not pay even for rows of 668 bytes, six in ten of them repetitions,
# because it takes a sort.
DEDUPLICATE_FROM = 64


@dataclasses.dataclass(frozen=True)
class Options:
    """How a plan gathers; each the same on all ranks. See `shard`."""

    bounds: str = "raise"
    deduplicate: bool | str = "auto"
    capacity: int | None = None
    transport: str = "auto"

    def check(self) -> None:
        """Refuse what no plan can have.

        Raises:
            TypeError, ValueError: says what is allowed.
        """
        if self.deduplicate not in (True, False, "auto"):
            raise ValueError(f"deduplicate must be 'auto', True or False, got {self.deduplicate!r}")
        if self.transport not in TRANSPORTS:
            allowed = ", ".join(map(repr, TRANSPORTS))
            raise ValueError(f"transport must be one of {allowed}, got {self.transport!r}")
        if self.capacity is not None:
            if isinstance(self.capacity, bool) or not isinstance(self.capacity, int):
                kind = type(self.capacity).__name__
                raise TypeError(f"capacity must be a number of rows or None, got {kind}")
            if self.capacity < 1:
                raise ValueError(f"capacity must be at least 1 row, got {self.capacity}")


@dataclasses.dataclass(frozen=True)
class Part:
    """What a rank has of sharded buffers.

    Attributes:
        local: executable of a gather from its own rows.
        slab: the symmetric memory that these are in, None if they are not.
    """

    local: Executable
    slab: peer.SymmetricSlab | None = None


def shard(
    *local_bufs: Any,
    group: dist.ProcessGroup | None = None,
    bounds: str = "raise",
    backend: str | None = None,
    deduplicate: bool | str = "auto",
    capacity: int | None = None,
    transport: str = "auto",
) -> ShardedPlan:
    """Describe buffers whose rows the ranks of a group share; a collective call.

    Row ``i`` of the whole is row ``i`` of rank 0 if that has so many, else row ``i - rows of rank
    0`` of rank 1, and so on: ``torch.cat`` of every rank's buffer in the order of ranks, which
    nobody makes. One index stands for one row of every buffer, so a rank's buffers have the same
    number of rows; other ranks may have other numbers, also none.

    Args:
        *local_bufs: this rank's rows, as buffers for `multigather.gather`: tensors ``[rows, ...]``,
            arrays, None, dicts and other containers of them. They are kept alive and read in place:
            new values are seen by later calls.
        group: the ranks; None for all. Its time-out bounds how long a call waits for a rank that
            does not come.
        bounds: what an index outside all ranks' rows means, as for `multigather.gather`.
        backend: for the gathers into and from what is sent, as for `multigather.gather`; ranks may
            differ in it.
        deduplicate: whether a row that a rank asks for repeatedly is sent to it once. "auto" does
            so on CPUs where all buffers' rows together have at least 64 bytes.
        capacity: most different rows (rows, without ``deduplicate``) that a rank may ask another
            for in one call. With it a call has fixed sizes, never waits for the device and can be
            captured in a CUDA graph, and always moves ``capacity`` rows per pair of ranks. None
            takes any number, and waits once for the counts.
        transport: "exchange" moves rows by collectives; "peer" reads them from the other GPUs of
            the host, which needs buffers made by `symmetric`. "auto" reads if all ranks' buffers
            are such, else exchanges.

    Returns:
        A `ShardedPlan`.

    Raises:
        TypeError, ValueError, UnsupportedError: as `multigather.gather` for the same buffers; or
            an option is not allowed, buffers differ in their row counts, or require grad.
        ValueError: another rank brought other buffers or options, or could not take part, or
            "peer" was asked for and a rank's buffers are not symmetric; raised on every rank.
        torch.distributed.DistError: another rank did not come within the group's time-out.
    """
    group = group_of(group)
    options = Options(bounds, deduplicate, capacity, transport)
    return ShardedPlan(local_bufs, group, options, backend)


class ShardedPlan:
    """A gather from buffers that several ranks share. Made by `shard`.

    Its calls are collective: every rank of the group makes as many, in the same order, unless rows
    are read from peers. They follow one another on one thread and, on a GPU, one stream.
    """

    def __init__(
        self,
        bufs: tuple[Any, ...],
        group: dist.ProcessGroup,
        options: Options,
        backend: str | None,
    ) -> None:
        self._group = group

        def own_part() -> Part:
            options.check()
            self._buffers = Buffers(containers.copied(bufs))
            containers.check_shareable(self._buffers.structure)
            self._tensors = self._buffers.tensors
            local = local_executable(self._buffers, options.bounds, backend)
            return Part(local, peer.slab_of(self._tensors))

        part, offers = agreed(group, own_part, options)
        self._layouts = [_layout(tensor) for tensor in self._tensors]
        # A look at all layouts at once, in a fifth of the time that it takes one after the other.
        self._none = torch.empty(0, dtype=torch.int64, device=part.local.request.device)
        self._unchanged = guard(self._none, self._tensors)
        self._addresses = [tensor.data_ptr() for tensor in self._tensors]
        self._memory = [span_of(tensor) for tensor in self._tensors]
        self._sharding = sharding_of(group, offers, part, options, backend)

    def __call__(self, indices: torch.Tensor, out: Sequence[Any] | None = None) -> tuple[Any, ...]:
        """Gather this rank's ``indices`` from all ranks' rows; a collective call.

        With ``whole = torch.cat(every rank's buffer)`` for each buffer, the result is
        ``tuple(whole[indices] for each whole)``, bit for bit.

        Args:
            indices: global row numbers, as for `multigather.gather`; each rank its own, of any
                number and shape, also none.
            out: as for `multigather.gather`.

        Returns:
            A tuple with one item per buffer argument of `shard`, in its structure: tensors of
            shape ``indices.shape + buf.shape[1:]`` on the buffers' device. With ``out`` its items.

        Raises:
            TypeError, ValueError, IndexError: as `multigather.gather`, on this rank only: the
                others get their rows.
            CapacityError: a rank was asked for more rows than the plan's capacity. On a CPU at
                once, on a GPU by a later call or by `multigather.check`.
            torch.distributed.DistError: another rank died or did not call within the group's
                time-out; names the operation. Where torch only sees it later, as with NCCL, the
                error is its own.
        """

        def take_outputs(tensor: torch.Tensor, request: Request) -> list[torch.Tensor] | None:
            self._refuse_changes()
            if out is None:
                return None
            outs = api.flatten_outputs(out, self._buffers)
            check_outputs(outs, self._tensors, tensor, request, self._sharding.labels)
            return outs

        transport = self._sharding.transport
        if out is None and isinstance(transport, peer.PeerReads) and not faults.synchronous:
            self._refuse_changes()
            again = transport.again(indices)
            if again is not None:
                return self._buffers.mirrored(again, indices.shape)
        results, shape = self._sharding(indices, self._tensors, take_outputs)
        if out is not None:
            return tuple(out)
        return self._buffers.mirrored(results, shape)

    def _refuse_changes(self) -> None:
        """Raise if a buffer is not what it was when the plan was made.

        Raises:
            ValueError: names the buffer, what it was and what it is.
        """
        if (
            self._unchanged is not None
            and self._unchanged(self._none, *self._tensors)
            and [tensor.data_ptr() for tensor in self._tensors] == self._addresses
            and all(map(has_memory, self._tensors, self._memory))
        ):
            return
        check_memory(self._tensors, self._sharding.labels)
        for label, buf, layout in zip(
            self._sharding.labels, self._tensors, self._layouts, strict=True
        ):
            if _layout(buf) != layout:
                raise ValueError(
                    f"{label} has changed: it had {_text(layout)} when the plan was made and "
                    f"has {_text(_layout(buf))} now; make a new plan"
                )

    def explain(self) -> str:
        """How a call gets its rows: the transport and why, rows per rank, bytes per row."""
        return self._sharding.explain()

    def __repr__(self) -> str:
        shards = self._sharding.shards
        return (
            f"<ShardedPlan of {len(self._tensors)} buffers, {shards.total} rows on "
            f"{len(shards.rows)} ranks, by {self._sharding.transport.name}>"
        )


def group_of(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group, all ranks for None.

    Raises:
        RuntimeError: there are no groups yet.
        ValueError: this rank is not in the group.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            "no process group: call torch.distributed.init_process_group() first, in a program "
            "that torchrun starts"
        )
    if group is None:
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(f"this rank is not in the group: {group!r}")
    return group


def local_executable(buffers: Buffers, bounds: str, backend: str | None) -> Executable:
    """The gather from a rank's own rows, after all checks that the rank can make alone."""
    tensors = buffers.tensors
    if not tensors:
        raise ValueError("there is no buffer to shard")
    first = tensors[0]
    device = first.device if isinstance(first, torch.Tensor) else "cpu"
    none = torch.empty(0, dtype=torch.int64, device=device)
    local = api._make(None, none, buffers, bounds, backend)
    assert local is not None
    labels = local.site.labels
    check_memory(tensors, labels)
    for tensor, label in zip(tensors, labels, strict=True):
        if len(tensor) != len(first):
            raise ValueError(
                f"{labels[0]} has {len(first)} rows and {label} has {len(tensor)}; buffers that "
                "are sharded together have the same number of rows on a rank, because one index "
                "stands for a row of each. Shard the others by a call of their own"
            )
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{label} requires grad, and no gradient goes to other ranks; pass .detach()"
            )
    api._run(local, none, none.shape, tensors, None)  # refuses what the named backend cannot do
    return local


def agreed(
    group: dist.ProcessGroup, own_part: Callable[[], Part], options: Options
) -> tuple[Part, list[Offer]]:
    """What ``own_part`` makes, and what every rank offers.

    One collective call, which a rank makes also if it has no part to offer.

    Raises:
        Exception: what ``own_part`` raised.
        ValueError: see `agreement.agree`.
    """
    error: Exception | None = None
    try:
        part = own_part()
        request = part.local.request
        fields = zip(part.local.site.labels, request.fields, strict=True)
        offer = Offer(
            rows=request.fields[0].rows,
            fields=tuple((label, dtype_name(each.dtype), each.row_shape) for label, each in fields),
            device=request.device.type,
            options=tuple(dataclasses.asdict(options).items()),
            symmetric=part.slab is not None,
        )
    except (TypeError, ValueError, NotImplementedError) as caught:
        error = caught
        offer = Offer(error=f"{type(caught).__name__}: {caught}")
    try:
        offers = agree(group, offer)
    except ValueError:
        if error is not None:
            raise error from None
        raise
    return part, offers


def sharding_of(
    group: dist.ProcessGroup,
    offers: Sequence[Offer],
    part: Part,
    options: Options,
    backend: str | None,
) -> Sharding:
    """The gather that the ranks have agreed on; makes no collective call.

    Raises:
        ValueError: the transport that was asked for is not possible; on all ranks.
    """
    request, labels = part.local.request, part.local.site.labels
    layout = RowLayout.of([Column(each.dtype, each.row_shape) for each in request.fields])
    shards = Shards(tuple(each.rows for each in offers), layout)
    inner = bounds_of_rows(options.bounds)

    def gather_own(index_dtype: torch.dtype, bounds: str) -> Executable:
        changed = dataclasses.replace(request, index_dtype=index_dtype, bounds=bounds)
        return Executable(changed, backend, labels)

    others = [rank for rank, each in enumerate(offers) if not each.symmetric]
    if options.transport == "peer" and others:
        raise ValueError(
            f"transport 'peer' needs buffers made by multigather.distributed.symmetric, all of one "
            f"call in its order, on every rank; those of rank {others[0]} are not"
        )

    def router() -> Router | None:
        cuda = dispatch.cuda_backend(backend, request.device)
        if cuda is None:
            return None
        return Router(
            *(cuda, request.device, shards.offsets, shards.index_dtype, options.bounds),
            *(part.local.site, options.capacity),
        )

    transport: Transport
    if len(offers) == 1:
        transport = Local(gather_own(torch.int64, inner))
    elif part.slab is not None and not others and options.transport != "exchange":
        transport = peer.PeerReads(shards, part.slab.addresses, part.local, options.bounds, backend)
    else:
        own = gather_own(shards.index_dtype, "unchecked" if options.capacity is None else "fill")
        deduplicate = options.deduplicate
        if deduplicate == "auto":
            deduplicate = request.device.type == "cpu" and layout.stride >= DEDUPLICATE_FROM
        reason = "transport='exchange' was asked for"
        if options.transport == "auto":
            reason = f"the buffers of rank {others[0]} are not in symmetric memory"
        transport = Exchange(
            group,
            shards,
            own,
            inner,
            bool(deduplicate),
            options.capacity,
            backend,
            f"not peer: {reason}",
            None if deduplicate else router(),
        )
    return Sharding(shards, transport, part.local, options.bounds)
