"""The backward pass on CUDA: kernels/scatter_add.cu, built and launched by the cupy backend.

One launch adds the gradients of all outputs to those of the buffers, by the indices as the caller
gave them. Sums of 2-byte floats are made in float32 and rounded once, which takes a launch before
it and one after it. A gradient is read where it is, be it a slice of another tensor or one row for
all; only one whose rows are not contiguous, such as the expanded number that ``sum().backward()``
brings, is copied first.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch

from ..request import has_contiguous_rows, power_of_two_divisor
from ._cupy import BOUNDS, INDEX_TYPES, MOST_BLOCKS, NO_TILE, CudaBackend, capacity_for
from .base import Config, balanced_groups, flat_row_stride

# struct Parameters of scatter_add.cu: a head, then entries that four addresses begin. An entry is
# as large as one of gather.cu, so as many fields as one launch of that can carry fit here too.
HEAD_BYTES = 32
FIELD_BYTES = 64
# Layouts of which launches are kept; at that number all are dropped and made again as needed.
KEPT = 1024

# The types that are added, by their numbers in scatter_add.cu; a complex number is two.
HALF, BFLOAT, FLOAT, DOUBLE = 0, 8, 16, 24
NARROW = (HALF, BFLOAT)  # added as floats
ELEMENTS = {
    torch.float16: HALF,
    torch.bfloat16: BFLOAT,
    torch.float32: FLOAT,
    torch.float64: DOUBLE,
    torch.complex64: FLOAT,
    torch.complex128: DOUBLE,
}
# The most bytes of a gradient that a thread adds at once: where one instruction can add four
# floats, and where not. Doubles are always added one by one.
VECTOR_BYTES = {HALF: 8, BFLOAT: 8, FLOAT: 16, DOUBLE: 8}
WORD_BYTES = {HALF: 2, BFLOAT: 2, FLOAT: 4, DOUBLE: 8}

# Steps of scatter_add.cu: the first and the last are those of the 2-byte types.
CLAIM, ADD, ROUND = 0, 1, 2


@dataclass(frozen=True)
class AddConfig(Config):
    """Knobs of scatter_add.cu.

    Attributes:
        threads: threads per block, a power of two.
        unroll: units in flight per thread, a power of two.
        vectors: add up to four floats at once where the GPU can, not one by one.
    """

    threads: int = 256
    unroll: int = 2
    vectors: bool = True


CONFIG = AddConfig()


@dataclass(frozen=True)
class Specialisation:
    """The macros of one compilation of scatter_add.cu; they are explained there."""

    kernel: ClassVar[str] = "scatter_add"
    step: int
    fields: int
    index_dtype: torch.dtype
    bounds: str
    config: AddConfig

    def macros(self) -> dict[str, str]:
        """Macro names and values."""
        return {
            "STEP": str(self.step),
            "FIELDS": str(self.fields),
            "SEARCH_STEP": str(1 << (self.fields - 1).bit_length() >> 1),
            "INDEX": INDEX_TYPES[self.index_dtype],
            "INDEX_SIGNED": str(int(self.index_dtype.is_signed)),
            "BOUNDS": str(BOUNDS[self.bounds]),
            "THREADS": str(self.config.threads),
            "UNROLL": str(self.config.unroll),
        }

    def parameter_bytes(self) -> int:
        """Size of the kernel's parameters."""
        return HEAD_BYTES + FIELD_BYTES * self.fields


@dataclass(frozen=True)
class Field:
    """Layout of one buffer's gradient and of the gradient that is added to it.

    Attributes:
        element: one of `ELEMENTS`' numbers.
        unit: bytes of the added gradient that a thread adds at once.
        rows: of the buffer.
        row_bytes: bytes of one row.
        gradient_stride: bytes from one row of the added gradient to the next.
    """

    element: int
    unit: int
    rows: int
    row_bytes: int
    gradient_stride: int

    def packed(self, first_tile: int, count: int, config: AddConfig) -> tuple[bytes, int]:
        """Entry of the table, its addresses still 0, and the number of tiles."""
        units = self.row_bytes // self.unit
        lanes = min((units - 1).bit_length(), (config.threads - 1).bit_length())
        columns = min((-(-units >> lanes) - 1).bit_length(), (config.unroll - 1).bit_length())
        pieces = -(-units >> lanes + columns)
        rows_per_tile = (config.threads >> lanes) * (config.unroll >> columns)
        entry = struct.pack(
            "=32xqqIIIBBBx",
            self.rows,
            self.gradient_stride,
            first_tile,
            units,
            pieces,
            self.element + self.unit.bit_length() - 1,
            lanes,
            columns,
        )
        return entry, -(-count // rows_per_tile) * pieces


class Prepared(NamedTuple):
    """What is kept of a call, for the next one with the same layouts.

    Attributes:
        copied: which gradients are copied first, because their rows are not contiguous.
        scratch_bytes: of the memory for the sums of 2-byte types and for the places of their rows.
        scratch: for each such field where in that memory its sums and its places begin.
        launches: in their order, each with the numbers of its fields.
    """

    copied: tuple[int, ...]
    scratch_bytes: int
    scratch: dict[int, tuple[int, int]]
    launches: tuple[tuple[tuple[int, ...], Callable[[Sequence[int]], None]], ...]


_prepared: dict[Any, Prepared] = {}


def supported(gradient: torch.Tensor, count: int) -> bool:
    """Whether the kernel can add this gradient of so many rows."""
    # The kernel numbers the units of a row with 31 bits; a complex number may be two units. Rows of
    # 2-byte types it numbers with 32.
    element = ELEMENTS.get(gradient.dtype)
    return (
        element is not None
        and gradient.numel() < count << 30
        and not (element in NARROW and count > 2**32)
    )


def scatter_add(
    backend: CudaBackend,
    indices: torch.Tensor,
    bounds: str,
    gradients: Sequence[torch.Tensor],
    sums: Sequence[torch.Tensor],
) -> None:
    """Add each row of the gradients to the row of the sum that its index selects.

    Args:
        backend: the cupy backend.
        indices: any integer dtype, shape and stride.
        bounds: the bounds mode; an index that selects no row adds nothing.
        gradients: of the gathered rows, of shape ``indices.shape + sum.shape[1:]``, `supported`.
        sums: new contiguous tensors on the device of the indices.
    """
    flat = indices.reshape(-1)
    if not flat.shape[0]:
        return
    gradients = [
        each.resolve_conj().resolve_neg() if each.is_conj() or each.is_neg() else each
        for each in gradients
    ]
    # What else the host has to do is done once: a backward pass of few rows is host time.
    key: tuple[Any, ...] = (
        backend,
        indices.device,
        indices.dtype,
        indices.dim(),
        flat.shape[0],
        flat.stride(0),
        bounds,
        CONFIG,
        *(
            (
                each.dtype,
                each.shape,
                each.stride(),
                (each.data_ptr() | total.data_ptr()) & 15,
                total.shape[0],
            )
            for each, total in zip(gradients, sums, strict=True)
        ),
    )
    prepared = _prepared.get(key)
    if prepared is None:
        prepared = _prepare(backend, indices, flat, bounds, gradients, sums)
        if len(_prepared) >= KEPT:
            _prepared.clear()
        _prepared[key] = prepared
    for number in prepared.copied:
        gradients[number] = gradients[number].contiguous()
    if prepared.scratch:
        memory = torch.empty(prepared.scratch_bytes, dtype=torch.uint8, device=indices.device)
        start = memory.data_ptr()
        scratch = {n: (start + a, start + b) for n, (a, b) in prepared.scratch.items()}
    else:
        scratch = {}
    for numbers, launch in prepared.launches:
        addresses = [flat.data_ptr()]
        for number in numbers:
            addresses += (gradients[number].data_ptr(), sums[number].data_ptr())
            addresses += scratch.get(number, (0, 0))
        launch(addresses)


def _prepare(
    backend: CudaBackend,
    indices: torch.Tensor,
    flat: torch.Tensor,
    bounds: str,
    gradients: Sequence[torch.Tensor],
    sums: Sequence[torch.Tensor],
) -> Prepared:
    """Find what must be copied, and make the launches."""
    vectors = CONFIG.vectors and backend.adds_vectors(indices.device)
    widest = VECTOR_BYTES if vectors else WORD_BYTES
    fields: dict[int, Field] = {}
    copied = []
    for number, (gradient, total) in enumerate(zip(gradients, sums, strict=True)):
        if not total.numel():
            continue
        stride, address = flat_row_stride(gradient, indices.dim()), gradient.data_ptr()
        row_shape, row_stride = (
            each[indices.dim() :] for each in (gradient.shape, gradient.stride())
        )
        if stride is None or not has_contiguous_rows((1, *row_shape), (0, *row_stride)):
            copied.append(number)
            stride, address = torch.Size(row_shape).numel(), 0
        element, size = ELEMENTS[gradient.dtype], gradient.element_size()
        row_bytes = torch.Size(row_shape).numel() * size
        unit = power_of_two_divisor(
            address, total.data_ptr(), stride * size, row_bytes, widest[element]
        )
        fields[number] = Field(element, unit, total.shape[0], row_bytes, stride * size)
    # Widest first: the blocks of the narrow fields then fill the end of the launch.
    order = sorted(fields, key=lambda number: -fields[number].row_bytes)
    narrow = [number for number in order if fields[number].element in NARROW]
    launches = [
        (numbers, _launch_of(backend, flat, bounds, step, [fields[number] for number in numbers]))
        for step, some in ((CLAIM, narrow), (ADD, order), (ROUND, narrow))
        if some
        for numbers in balanced_groups(some, backend.capacity(indices.device))
    ]
    scratch_bytes, scratch = _scratch_of({n: fields[n] for n in narrow}, flat.shape[0])
    return Prepared(tuple(copied), scratch_bytes, scratch, tuple(launches))


def _scratch_of(fields: Mapping[int, Field], count: int) -> tuple[int, dict[int, tuple[int, int]]]:
    """Bytes of the memory beside the gradients, and where in it each field has its two parts.

    Buffers of as many rows have the same places, because an index selects the same rows in them.
    """
    end = 0

    def part(elements: int) -> int:
        nonlocal end
        start, end = end, end + -(-4 * elements // 16) * 16
        return start

    places = {rows: part(rows) for rows in {field.rows for field in fields.values()}}
    scratch = {
        number: (part(count * field.row_bytes // 2), places[field.rows])
        for number, field in fields.items()
    }
    return end, scratch


def _launch_of(
    backend: CudaBackend,
    indices: torch.Tensor,
    bounds: str,
    step: int,
    fields: Sequence[Field],
) -> Callable[[Sequence[int]], None]:
    """The launch of a step for these fields, by indices of one dimension."""
    count, config = indices.shape[0], CONFIG
    capacity = capacity_for(len(fields), backend.capacity(indices.device))
    specialisation = Specialisation(step, capacity, indices.dtype, bounds, config)
    parameters = bytearray(struct.pack("=Qqq8x", 0, indices.stride(0), count))
    places, grid = [0], 0
    for field in fields:
        places += range(len(parameters), len(parameters) + 32, 8)
        entry, tiles = field.packed(grid, count, config)
        parameters += entry
        grid += tiles
    if grid > MOST_BLOCKS:
        raise ValueError(
            f"the gradients of {count} rows need {grid} thread blocks in one launch, which has at "
            f"most {MOST_BLOCKS}; gather in several calls"
        )
    parameters += struct.pack("=48xI12x", NO_TILE) * (capacity - len(fields))
    launch: Callable[[Sequence[int]], None] = backend.launch_of(
        specialisation, grid, config.threads, indices.device, bytes(parameters), places
    )
    return launch
