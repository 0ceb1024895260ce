"""The backward pass on CUDA: kernels/scatter_add.cu, built and launched by the cupy backend.

One launch adds the gradients of all outputs to those of the buffers, by the indices as the caller
gave them. A gradient is read where it is, be it a slice of another tensor or one row for all; only
one whose rows are not contiguous, such as the expanded number that ``sum().backward()`` brings, is
copied first.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..request import has_contiguous_rows, power_of_two_divisor
from ._cupy import BOUNDS, INDEX_TYPES, MOST_BLOCKS, NO_TILE, CudaBackend, capacity_for
from .base import Config, balanced_groups, flat_row_stride

# struct Parameters of scatter_add.cu: a head, then entries that two addresses begin. An entry is
# smaller than one of gather.cu, so as many fields as one launch of that can carry fit here too.
HEAD_BYTES = 32
FIELD_BYTES = 48
LAUNCHES_KEPT = 1024

# The types that are added, by their numbers in scatter_add.cu; a complex number is two.
HALF, BFLOAT, FLOAT, DOUBLE = 0, 8, 16, 24
ELEMENTS = {
    torch.float16: HALF,
    torch.bfloat16: BFLOAT,
    torch.float32: FLOAT,
    torch.float64: DOUBLE,
    torch.complex64: FLOAT,
    torch.complex128: DOUBLE,
}
# The most bytes that a thread adds at once: where one instruction can add several words, and where
# not. Doubles are always added one by one.
VECTOR_BYTES = {HALF: 16, BFLOAT: 16, FLOAT: 16, DOUBLE: 8}
WORD_BYTES = {HALF: 4, BFLOAT: 4, FLOAT: 4, DOUBLE: 8}


@dataclass(frozen=True)
class AddConfig(Config):
    """Knobs of scatter_add.cu.

    Attributes:
        threads: threads per block, a power of two.
        unroll: units in flight per thread, a power of two.
    """

    threads: int = 256
    unroll: int = 2


CONFIG = AddConfig()


@dataclass(frozen=True)
class Specialisation:
    """The macros of one compilation of scatter_add.cu; they are explained there."""

    kernel: ClassVar[str] = "scatter_add"
    fields: int
    index_dtype: torch.dtype
    bounds: str
    config: AddConfig

    def macros(self) -> dict[str, str]:
        """Macro names and values."""
        return {
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
        unit: bytes that a thread adds at once.
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
            "=QQqqIIIBBBx",
            0,
            0,
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


def supported(gradient: torch.Tensor, shape: Sequence[int]) -> bool:
    """Whether the kernel can add this gradient to that of a buffer of this shape."""
    # The kernel numbers the units of a row with 31 bits; a complex number may be two units.
    return gradient.dtype in ELEMENTS and torch.Size(shape[1:]).numel() < 2**30


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
    if not indices.numel():
        return
    flat = indices.reshape(-1)
    widest = VECTOR_BYTES if backend.adds_vectors(indices.device) else WORD_BYTES
    fields, tensors = [], []
    for gradient, total in zip(gradients, sums, strict=True):
        if total.numel():
            rows, stride = _rows_in_place(gradient, indices.dim())
            fields.append(_field_of(rows, stride, total, widest))
            tensors.append((rows, total))
    if not fields:
        return
    launches = _launches_of(
        backend,
        indices.device,
        indices.dtype,
        bounds,
        flat.shape[0],
        flat.stride(0),
        tuple(fields),
        CONFIG,
    )
    for numbers, launch in launches:
        pointers = [flat.data_ptr()]
        for number in numbers:
            pointers += (tensor.data_ptr() for tensor in tensors[number])
        launch(pointers)


def _rows_in_place(gradient: torch.Tensor, leading: int) -> tuple[torch.Tensor, int]:
    """The gradient, a copy if its rows are not contiguous, and the elements from row to row."""
    gradient = gradient.resolve_conj().resolve_neg()
    stride = flat_row_stride(gradient, leading)
    shape, strides = tuple(gradient.shape[leading:]), gradient.stride()[leading:]
    if stride is None or not has_contiguous_rows((1, *shape), (0, *strides)):
        return gradient.contiguous(), torch.Size(shape).numel()
    return gradient, stride


def _field_of(
    gradient: torch.Tensor, stride: int, total: torch.Tensor, widest: dict[int, int]
) -> Field:
    element, size = ELEMENTS[gradient.dtype], gradient.element_size()
    row_bytes, stride_bytes = total.numel() // total.shape[0] * size, stride * size
    unit = power_of_two_divisor(
        gradient.data_ptr(), total.data_ptr(), stride_bytes, row_bytes, widest[element]
    )
    return Field(element, unit, total.shape[0], row_bytes, stride_bytes)


@functools.lru_cache(LAUNCHES_KEPT)
def _launches_of(
    backend: CudaBackend,
    device: torch.device,
    index_dtype: torch.dtype,
    bounds: str,
    count: int,
    index_stride: int,
    fields: tuple[Field, ...],
    config: AddConfig,
) -> list[tuple[tuple[int, ...], Callable[[Sequence[int]], None]]]:
    """The launches that add these fields, each with the numbers of its fields."""
    most = backend.capacity(device)
    # Widest first: the blocks of the narrow fields then fill the end of the launch.
    order = sorted(range(len(fields)), key=lambda number: -fields[number].row_bytes)
    launches = []
    for numbers in balanced_groups(order, most):
        specialisation = Specialisation(
            capacity_for(len(numbers), most), index_dtype, bounds, config
        )
        parameters = bytearray(struct.pack("=Qqq8x", 0, index_stride, count))
        places, grid = [0], 0
        for number in numbers:
            places += (len(parameters), len(parameters) + 8)
            entry, tiles = fields[number].packed(grid, count, config)
            parameters += entry
            grid += tiles
        if grid > MOST_BLOCKS:
            raise ValueError(
                f"the gradients of {count} rows need {grid} thread blocks in one launch, which has "
                f"at most {MOST_BLOCKS}; gather in several calls"
            )
        unused = struct.pack("=32xI12x", NO_TILE)
        parameters += unused * (specialisation.fields - len(numbers))
        launch = backend.launch_of(
            specialisation, grid, config.threads, device, bytes(parameters), places
        )
        launches.append((numbers, launch))
    return launches
