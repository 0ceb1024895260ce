"""What one gather asks for, as frozen facts that dispatch and backends decide by."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from .fork import cached_property

BOUNDS = ("raise", "fill", "clip", "unchecked")

INDEX_DTYPES = (
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
)

# Rows of so many bytes may be part of a packed group: more than a sector of one field gains nothing
# from its neighbours. A thread copies a row unit after unit, so it has few of them.
PACKED_BYTES = 32
PACKED_UNITS = 8
# Fields of one group: those of several sectors gain as little.
PACKED_FIELDS = 32


@dataclass(frozen=True)
class Field:
    """Layout of one buffer: how its rows lie in memory.

    Attributes:
        dtype: element type.
        rows: size of the first dimension.
        row_shape: the other sizes.
        row_bytes: bytes of one row's elements.
        row_stride_bytes: bytes from a row to the next; 0 for an expanded buffer.
        contiguous_rows: whether the elements of a row are adjacent and in order.
        alignment: largest power of two, at most 16, that divides the base address.
    """

    dtype: torch.dtype
    rows: int
    row_shape: tuple[int, ...]
    row_bytes: int
    row_stride_bytes: int
    contiguous_rows: bool
    alignment: int

    @cached_property
    def unit_bytes(self) -> int:
        """Widest copy unit, 1 to 16 bytes, that address, row stride and row size allow."""
        return power_of_two_divisor(self.alignment, self.row_stride_bytes, self.row_bytes)


class Ranks(NamedTuple):
    """Where the rows of sharded buffers are in one address space.

    Row ``r`` of rank ``k`` is where row ``places[k] + r * steps`` of each field would be, whose row
    stride that is; a field's ``rows`` are those of all ranks.

    Attributes:
        first_rows: of each rank, the first one's 0.
        places: see above.
        steps: see above.
    """

    first_rows: tuple[int, ...]
    places: tuple[int, ...]
    steps: int


@dataclass(frozen=True)
class Request:
    """One gather: ``tuple(field[indices] for field in fields)``.

    Attributes:
        device: where the gather runs and its outputs are.
        host_memory: whether the buffers lie in pinned host memory that a GPU reads in place.
        index_dtype: one of `INDEX_DTYPES`.
        count: number of indices.
        bounds: one of `BOUNDS`.
        fields: the buffers, in order.
        ranks: for buffers whose rows are in the memory of several ranks; the cupy backend's only.
    """

    device: torch.device
    host_memory: bool
    index_dtype: torch.dtype
    count: int
    bounds: str
    fields: tuple[Field, ...]
    ranks: Ranks | None = None

    @property
    def row_bytes(self) -> int:
        """Bytes that one index gathers from all fields together."""
        return sum(field.row_bytes for field in self.fields)

    @cached_property
    def packed(self) -> tuple[tuple[int, ...], ...]:
        """The numbers of the fields of each packed group, see `packed_groups`."""
        return packed_groups(self.fields)

    def subset(self, numbers: tuple[int, ...]) -> Request:
        """The same request for the fields with these numbers only."""
        return dataclasses.replace(self, fields=tuple(self.fields[number] for number in numbers))

    def with_count(self, count: int) -> Request:
        """The same request for another number of indices."""
        return dataclasses.replace(self, count=count)


@dataclass(frozen=True)
class Site:
    """Whom a bad index is reported for.

    Attributes:
        plan: number that stands in fault records and leads back to ``labels``.
        numbers: for each field of the request, the place of its label.
        labels: names of all buffers of the call, such as ``bufs[2]`` or ``bufs[0]['obs']``.
    """

    plan: int
    numbers: tuple[int, ...]
    labels: tuple[str, ...]

    def label(self, field: int) -> str:
        """Name of a field's buffer."""
        return self.labels[self.numbers[field]]


def packed_groups(fields: Sequence[Field]) -> tuple[tuple[int, ...], ...]:
    """Numbers of the fields that lie as the columns of one slab do, a group per slab.

    They have narrow rows, as many of them and the same distance from row to row, which has room for
    all. Layouts alone decide, so separate buffers with gaps may look like a slab: it is a hint how
    to read, and nothing may rely on it.
    """
    groups: dict[tuple[int, int], list[list[int]]] = {}
    for number, field in enumerate(fields):
        stride = field.row_stride_bytes
        narrow = 0 < field.row_bytes <= min(PACKED_BYTES, stride - 1)
        if not narrow or not field.contiguous_rows:
            continue
        if field.row_bytes > PACKED_UNITS * field.unit_bytes:
            continue
        found = groups.setdefault((field.rows, stride), [[]])
        used = sum(fields[member].row_bytes for member in found[-1])
        if used + field.row_bytes > stride or len(found[-1]) == PACKED_FIELDS:
            found.append([])
        found[-1].append(number)
    return tuple(tuple(group) for found in groups.values() for group in found if len(group) > 1)


def power_of_two_divisor(*values: int) -> int:
    """Largest power of two, at most 16, that divides every value (0 is divided by all)."""
    bits = 16
    for value in values:
        bits |= value
    return bits & -bits


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype as people write it: ``float32``."""
    return str(dtype).removeprefix("torch.")


def bucket_of(number: int) -> int:
    """Exponent of the power of two nearest to a number in log space; 0 for 0."""
    return (number * number).bit_length() >> 1


@functools.lru_cache(maxsize=4096)
def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a new contiguous tensor, in elements."""
    sizes = (max(size, 1) for size in reversed(shape[1:]))
    return tuple(itertools.accumulate(sizes, operator.mul, initial=1))[::-1] if shape else ()


def has_contiguous_rows(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether each row of a tensor of this shape and stride is contiguous in memory."""
    if 0 in shape[1:]:
        return True
    expected = 1
    for size, step in zip(reversed(shape[1:]), reversed(stride[1:]), strict=True):
        if size != 1 and step != expected:
            return False
        expected *= size
    return True


def field_of(buffer: torch.Tensor) -> Field:
    """Facts of one buffer (at least 1-d, strided, without a lazy conjugate or negative bit)."""
    shape, stride = tuple(buffer.shape), buffer.stride()
    row_bytes = buffer.element_size()
    for size in shape[1:]:
        row_bytes *= size
    return Field(
        dtype=buffer.dtype,
        rows=shape[0],
        row_shape=shape[1:],
        row_bytes=row_bytes,
        # With one row the stride is never used, and torch leaves odd values there.
        row_stride_bytes=stride[0] * buffer.element_size() if shape[0] > 1 else 0,
        contiguous_rows=has_contiguous_rows(shape, stride),
        alignment=power_of_two_divisor(buffer.data_ptr()),
    )
