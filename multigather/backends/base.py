"""What every backend offers, and the pieces that the two kernel backends share."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Protocol, TypeVar

import torch

from ..launch import Launch
from ..request import Field, Request, Site, power_of_two_divisor


@dataclass(frozen=True)
class Refusal:
    """Why a backend cannot run a request; ``field`` is set where one buffer is the cause."""

    text: str
    field: int | None = None


@dataclass(frozen=True)
class Config:
    """How a backend runs a gather; subclasses add the knobs."""

    def describe(self) -> str:
        """The knobs as ``name=value``, in order."""
        return ", ".join(f"{name}={value}" for name, value in asdict(self).items()) or "default"


ConfigKind = TypeVar("ConfigKind", bound=Config)


def config_of(kind: type[ConfigKind], backend: str, knobs: dict[str, Any]) -> ConfigKind:
    """The config of a kind with these knobs; those left out have their defaults.

    Raises:
        ValueError: a knob is unknown, of the wrong type or out of its range. Knobs come from files
            that anybody may have written, and end in a compiler's command line.
    """
    types = {field.name: type(field.default) for field in fields(kind)}
    for name, value in knobs.items():
        if name not in types:
            raise ValueError(
                f"the {backend} backend has no knob {name!r}, only {', '.join(types) or 'none'}"
            )
        if type(value) is not types[name]:
            raise ValueError(f"{name} must be {types[name].__name__}, got {value!r}")
    return kind(**knobs)


class Runner(Protocol):
    """A gather made ready for one layout of buffers."""

    def __call__(
        self,
        indices: torch.Tensor,
        shape: torch.Size,
        sources: Sequence[torch.Tensor],
        outs: Sequence[torch.Tensor] | None,
    ) -> list[torch.Tensor]:
        """Gather.

        Args:
            indices: 1-d, any stride, on the request's device.
            shape: the caller's shape of ``indices``.
            sources: buffers laid out as the request's fields say.
            outs: tensors to write, or None to make them.
        """
        ...


class Backend(Protocol):
    """One way to run a gather."""

    name: ClassVar[str]
    # Raised by hand whenever a kernel changes so that what was measured for it no longer holds; a
    # test keeps it in step with the kernel's source.
    revision: ClassVar[int]
    # Whether its runners rely on how the buffers' addresses are aligned.
    by_address: ClassVar[bool]

    def unavailable(self) -> list[str]:
        """Reasons why this machine cannot use the backend at all; empty if it can."""
        ...

    def version(self) -> str | None:
        """Version of the library behind the backend, None if it is not installed."""
        ...

    def why_not(self, request: Request) -> list[Refusal]:
        """Reasons why the request cannot be run; empty if it can."""
        ...

    def space(self) -> list[Config]:
        """Every config worth measuring, a non-empty list."""
        ...

    def illegal(self, request: Request, config: Config) -> str | None:
        """Why a config cannot run a request that `why_not` accepts; None if it can."""
        ...

    def variant(self, request: Request, config: Config) -> Hashable | None:
        """What the compiled code depends on; None if nothing is compiled."""
        ...

    def packs(self, request: Request, config: Config) -> bool:
        """Whether packed groups of the request's fields are read row by row, all fields at once."""
        ...

    def config_from(self, knobs: dict[str, Any]) -> Config:
        """The config with these knobs. Raises `ValueError` if a knob is unknown or illegal."""
        ...

    def prepare(self, request: Request, config: Config, site: Site) -> Runner:
        """A runner for a request that `why_not` accepts."""
        ...


@dataclass(frozen=True)
class Destination:
    """Layout of one output, flattened to rows.

    Attributes:
        row_stride_bytes: bytes from one row to the next.
        alignment: largest power of two, at most 16, that divides the address.
    """

    row_stride_bytes: int
    alignment: int


def flat_row_stride(tensor: torch.Tensor, leading: int) -> int | None:
    """Elements from row to row when the first ``leading`` dimensions are flattened into rows.

    Returns None if one stride cannot describe them, 0 if there are fewer than two rows.
    """
    if 0 in tensor.shape[:leading]:
        return 0
    stride = expected = None
    for size, step in zip(
        reversed(tensor.shape[:leading]), reversed(tensor.stride()[:leading]), strict=True
    ):
        if size == 1:
            continue
        if stride is None:
            stride = step
        elif step != expected:
            return None
        expected = step * size
    return stride or 0


def destinations_of(outs: Sequence[torch.Tensor], leading: int) -> list[Destination]:
    """Layouts of outputs whose first ``leading`` dimensions are those of the indices."""
    return [
        Destination(
            (flat_row_stride(out, leading) or 0) * out.element_size(),
            power_of_two_divisor(out.data_ptr()),
        )
        for out in outs
    ]


def empty_outputs(request: Request, shape: torch.Size) -> list[torch.Tensor]:
    """New contiguous outputs for indices of this shape."""
    return [
        torch.empty((*shape, *field.row_shape), dtype=field.dtype, device=request.device)
        for field in request.fields
    ]


def row_refusals(request: Request) -> list[Refusal]:
    """A refusal for each buffer whose rows a kernel cannot copy as runs of bytes."""
    return [
        Refusal(
            f"rows of shape {list(field.row_shape)} are not contiguous in memory; "
            "call .contiguous()",
            number,
        )
        for number, field in enumerate(request.fields)
        if not field.contiguous_rows
    ]


class KernelRunner:
    """Shared host side of the kernel backends: launches prepared per count and output layout.

    A launch is everything but the pointers: which function, which grid, which strides. It depends
    on the number of indices, so launches are kept per count. `KEPT` of them are as many as a
    server has batch sizes; at that number all are dropped and made again as needed.

    Args:
        request: the gather.
        capacity: most fields that one launch can carry.
        make: builds the launch of some fields from their numbers, the count, the stride of the
            indices and the destinations; a launch takes the addresses of the indices and of each
            field's source and destination.
    """

    KEPT = 1024

    def __init__(
        self,
        request: Request,
        capacity: int,
        make: Callable[[tuple[int, ...], int, int, Sequence[Destination]], Callable[..., None]],
    ) -> None:
        self.request = request
        self.groups = balanced_groups(self.order(request), capacity)
        self._make = make
        self._launches: dict[Any, list[Callable[..., None]]] = {}
        # By layout alone: launches from which those for other numbers of indices are made.
        self._scaled: dict[Any, list[list[Launch]]] = {}
        self._fresh = [new_destination(field) for field in request.fields]

    @staticmethod
    def order(request: Request) -> list[int]:
        """The fields' numbers in the order of a launch.

        Widest first: the blocks of the narrow fields then fill the end of the launch. The fields of
        a packed group stay together.
        """
        group_of = {number: group for group in request.packed for number in group}
        groups = dict.fromkeys(group_of.get(k, (k,)) for k in range(len(request.fields)))
        widest = sorted(groups, key=lambda group: -sum(request.fields[k].row_bytes for k in group))
        return [number for group in widest for number in group]

    @classmethod
    def places(cls, request: Request) -> list[int]:
        """Which place in a launch's `order` each field of a request has."""
        order = cls.order(request)
        return [order.index(number) for number in range(len(order))]

    def __call__(
        self,
        indices: torch.Tensor,
        shape: torch.Size,
        sources: Sequence[torch.Tensor],
        outs: Sequence[torch.Tensor] | None,
    ) -> list[torch.Tensor]:
        """See `Runner`."""
        count, stride = indices.shape[0], indices.stride(0)
        destinations = self._fresh
        key: tuple[Any, ...] = (count, stride)
        if outs is None:
            outs = empty_outputs(self.request, shape)
        else:
            destinations = destinations_of(outs, len(shape))
            key = (count, stride, *destinations)
        if count:
            launches = self._launches.get(key) or self._add(key, destinations)
            for group, launch in zip(self.groups, launches, strict=True):
                addresses = [indices.data_ptr()]
                for number in group:
                    addresses += (sources[number].data_ptr(), outs[number].data_ptr())
                launch(addresses)
        return list(outs)

    def _add(
        self, key: tuple[Any, ...], destinations: Sequence[Destination]
    ) -> list[Callable[..., None]]:
        count, stride, *layout = key
        base = (stride, *layout)
        # In a quarter of the time that it takes to make them: programs whose number of indices
        # changes from call to call do little else.
        launches: list[Callable[..., None]] = []
        for made in self._scaled.get(base, ()):
            if all(each.scale and each.scale.least <= count <= each.scale.most for each in made):
                launches = [each.at(count) for each in made]
        known = bool(launches)
        if not known:
            launches = [self._make(group, count, stride, destinations) for group in self.groups]
        if len(self._launches) >= self.KEPT:
            self._launches.clear()
        self._launches[key] = launches
        if not known and all(isinstance(each, Launch) and each.scale for each in launches):
            if len(self._scaled) >= self.KEPT:
                self._scaled.clear()
            self._scaled.setdefault(base, []).append(launches)  # type: ignore[arg-type]
        return launches

    def compile(self, count: int) -> None:
        """Make the launch of a call with so many contiguous indices and new outputs."""
        self._add((count, 1), self._fresh)

    def launch(self, count: int) -> Launch | None:
        """The launch of a call with so many contiguous indices and new outputs, if one was made.

        None too where it is not a single launch through the driver.
        """
        return self._single((count, 1))

    def launch_into(self, count: int, outs: Sequence[torch.Tensor]) -> Launch | None:
        """As `launch`, for a call with one dimension of indices into these outputs."""
        return self._single((count, 1, *destinations_of(outs, 1)))

    def _single(self, key: tuple[Any, ...]) -> Launch | None:
        launches = self._launches.get(key, [])
        if len(launches) == 1 and isinstance(launches[0], Launch):
            return launches[0]
        return None


def balanced_groups(fields: Sequence[int], capacity: int) -> list[tuple[int, ...]]:
    """Field numbers split into the fewest groups of at most ``capacity``, of nearly equal size."""
    groups = max(1, -(-len(fields) // capacity))
    bounds = [len(fields) * group // groups for group in range(groups + 1)]
    return [tuple(fields[a:b]) for a, b in itertools.pairwise(bounds)]


def new_destination(field: Field) -> Destination:
    """Layout of an output that a backend allocates."""
    return Destination(field.row_bytes, 16)


def copy_unit(field: Field, destination: Destination) -> int:
    """Bytes of the widest unit that a field can be copied in to this destination."""
    return power_of_two_divisor(
        field.unit_bytes, destination.row_stride_bytes, destination.alignment
    )
