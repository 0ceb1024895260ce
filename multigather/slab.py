"""Rows of several buffers together in one memory block, a *slab*, and the buffers as views of it.

A row of a slab has one value of every field. The memory system moves 32 bytes at a time, so reading
six narrow fields of one row costs one such sector here and six where every field has a buffer of
its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .request import power_of_two_divisor

SECTOR = 32  # bytes that a GPU moves at least
UNIT = 16  # bytes of the widest copy unit


@dataclass(frozen=True)
class Column:
    """What one field of a slab's rows holds.

    Attributes:
        dtype: of its elements.
        row_shape: of its values, ``()`` for one element a row.
    """

    dtype: torch.dtype
    row_shape: tuple[int, ...] = ()

    @property
    def row_bytes(self) -> int:
        """Bytes of a value."""
        return math.prod(self.row_shape) * self.dtype.itemsize


@dataclass(frozen=True)
class RowLayout:
    """Where in a row each field is.

    Attributes:
        columns: the fields.
        offsets: bytes from the row's start to each field.
        stride: bytes from one row to the next.
    """

    columns: tuple[Column, ...]
    offsets: tuple[int, ...]
    stride: int

    @classmethod
    def of(cls, columns: Sequence[Column]) -> RowLayout:
        """The layout that keeps every field in its widest copy unit, without gaps between them.

        Fields with the widest units come first; each field's size is a multiple of its unit, so the
        next one, whose unit is no wider, is aligned where it ends. Rows of up to a sector take a
        power of two of bytes, so that none straddles two sectors; longer ones a multiple of 16.
        """
        units = [power_of_two_divisor(column.row_bytes) for column in columns]
        offsets = [0] * len(columns)
        end = 0
        for number in sorted(range(len(columns)), key=lambda k: -units[k]):
            offsets[number] = end
            end += columns[number].row_bytes
        if end <= SECTOR:
            # A field of no bytes has elements all the same, and torch's strides count them.
            widest = max((column.dtype.itemsize for column in columns), default=0)
            stride = max(1 << (end - 1).bit_length() if end else 0, widest)
        else:
            stride = -(-end // UNIT) * UNIT
        return cls(tuple(columns), tuple(offsets), stride)

    def views(self, slab: torch.Tensor) -> list[torch.Tensor]:
        """The fields ``[rows, ...]`` of a slab of shape ``[rows, stride]`` and dtype uint8."""
        fields = []
        for column, offset in zip(self.columns, self.offsets, strict=True):
            if not column.row_bytes:  # no view, because the row stride may be too small for one
                shape = (len(slab), *column.row_shape)
                fields.append(slab.new_empty(shape, dtype=column.dtype))
                continue
            field = slab[:, offset : offset + column.row_bytes].view(column.dtype)
            shape = (len(slab), *column.row_shape)
            fields.append(field.view(shape) if column.row_shape else field[:, 0])
        return fields
