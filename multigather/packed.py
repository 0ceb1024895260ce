"""`pack` and `alloc`: buffers whose rows lie together in one slab."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from . import api
from .autograd import loadable
from .backends._torch import SAME_SIZE
from .containers import Buffers
from .memory import check_memory
from .slab import Column, RowLayout


def pack(*bufs: Any) -> tuple[Any, ...]:
    """Copy buffers into one slab, where a row of all of them lies together.

    The values are those of ``tuple(b.clone() for b in bufs)``, bit for bit. The results are views
    of the slab, ordinary tensors with gaps between their rows: what is written to them is seen by
    the next gather. `gather` reads whole rows of them, so that narrow buffers of which rows are
    picked at random cost one memory access per row, not one each.

    Args:
        *bufs: as for `multigather.gather`; all with the same number of rows and on one device, or
            all in pinned host memory, where the slab then is too.

    Returns:
        A tuple with one item per argument, in the argument's structure. For a tensor one of the
        same shape and dtype; None for None.

    Raises:
        TypeError: a buffer is neither a strided tensor nor an array of fixed-size elements.
        ValueError: row counts or devices differ, a buffer has no rows dimension, or it requires
            grad, which a copy into a slab does not hand on.
    """
    buffers = Buffers(bufs)
    tensors, labels = buffers.tensors, buffers.labels()
    for tensor, label in zip(tensors, labels, strict=True):
        api.check_buffer(tensor, label)
        if len(tensor) != len(tensors[0]):
            raise ValueError(
                f"all buffers must have the same number of rows: {labels[0]} has "
                f"{len(tensors[0])}, {label} has {len(tensor)}; pack those that do"
            )
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{label} requires grad, and its copy in a slab would not; pass "
                f"{label}.detach(), and call .requires_grad_() on the result"
            )
    if not tensors:
        return buffers.mirrored((), torch.Size(()))
    device = api.common_device(tensors, labels)
    if device.type != "meta":
        check_memory(tensors, labels)
    pinned = all(tensor.is_pinned() for tensor in tensors)
    columns = [Column(tensor.dtype, tuple(tensor.shape[1:])) for tensor in tensors]
    fields = _fields(len(tensors[0]), RowLayout.of(columns), device, pinned)
    for field, tensor in zip(fields, tensors, strict=True):
        # As integers, since a copy of bools makes every odd byte 1.
        as_bytes = SAME_SIZE[field.itemsize]
        values = loadable(tensor.detach()).resolve_conj().resolve_neg()
        field.view(as_bytes).copy_(values.view(as_bytes))
    return buffers.mirrored(fields, torch.Size((len(tensors[0]),)))


def alloc(
    rows: int,
    fields: Mapping[Any, torch.dtype | tuple[torch.dtype, Any]],
    *,
    device: torch.device | str | int | None = None,
    pin_memory: bool = False,
) -> dict[Any, torch.Tensor]:
    """Make buffers whose rows lie together in one slab, to be filled and then gathered from.

    Like ``{name: torch.zeros(rows, *shape, dtype=dtype) for ...}`` with another layout in memory,
    see `pack`. All bytes are zero, so that nobody meets a bool that is neither True nor False.

    Args:
        rows: of every buffer.
        fields: for each name a dtype, or a dtype and a row's shape, as in NumPy's structured
            dtypes: ``{"reward": torch.float32, "action": (torch.float32, (3,))}``. A row's shape
            may be an integer.
        device: as for `torch.zeros`.
        pin_memory: as for `torch.zeros`.

    Returns:
        A dict with the names of ``fields``, each with a tensor of shape ``[rows, *row_shape]``.

    Raises:
        TypeError: ``rows`` is no integer, ``fields`` is no mapping, or something else than dtypes
            and shapes is in it.
        ValueError: a size is negative.
    """
    _check_size(rows, "rows")
    if not isinstance(fields, Mapping):
        raise TypeError(
            f"fields must be a mapping from names to dtypes, got {type(fields).__name__}; pass "
            "something like {'reward': torch.float32, 'action': (torch.float32, (3,))}"
        )
    columns = [_column(value, f"fields[{name!r}]") for name, value in fields.items()]
    layout = RowLayout.of(columns)
    return dict(zip(fields, _fields(rows, layout, device, pin_memory), strict=True))


def _fields(
    rows: int, layout: RowLayout, device: torch.device | str | int | None, pin_memory: bool
) -> list[torch.Tensor]:
    """The fields of a new slab, all bytes zero."""
    slab = torch.zeros(
        (rows, layout.stride), dtype=torch.uint8, device=device, pin_memory=pin_memory
    )
    return layout.views(slab)


def _column(value: Any, label: str) -> Column:
    dtype, row_shape = value if isinstance(value, tuple) and len(value) == 2 else (value, ())
    if not isinstance(dtype, torch.dtype):
        raise TypeError(
            f"{label} must be a torch.dtype or a tuple of one and a row's shape, got {value!r}"
        )
    if str(dtype).startswith("torch.q"):
        raise TypeError(f"{label} has the quantized {dtype}; use the integers that it stands for")
    if isinstance(row_shape, int):
        row_shape = (row_shape,)
    if not isinstance(row_shape, (tuple, list)):
        raise TypeError(f"{label} has the row shape {row_shape!r}; pass an integer or a tuple")
    for size in row_shape:
        _check_size(size, f"a size in {label}")
    return Column(dtype, tuple(row_shape))


def _check_size(size: Any, label: str) -> None:
    if not isinstance(size, int) or isinstance(size, bool):
        raise TypeError(f"{label} must be an integer, got {size!r}")
    if size < 0:
        raise ValueError(f"{label} must not be negative, got {size}")
