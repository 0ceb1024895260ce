"""How rows are divided among ranks, and which rows a rank's indices ask for."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

from ..bounds import as_int64, resolve
from ..fork import cached_property
from ..slab import RowLayout


@dataclass(frozen=True)
class Shards:
    """Buffers whose rows lie on several ranks, consecutive ones on each.

    Attributes:
        rows: row count of each rank.
        layout: of a row of all buffers together, as it travels.
    """

    rows: tuple[int, ...]
    layout: RowLayout

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """First row of each rank, and last the number of all rows."""
        return (0, *itertools.accumulate(self.rows))

    @property
    def total(self) -> int:
        """Rows of all ranks."""
        return self.offsets[-1]

    @property
    def index_dtype(self) -> torch.dtype:
        """What row numbers are sent as: half the bytes where all of them fit."""
        return torch.int32 if self.total < 2**31 else torch.int64


def bounds_of_rows(bounds: str) -> str:
    """The mode of gathers by the row numbers that `wanted_rows` made of indices of a mode.

    Bad indices ask for rows of zeros; where there are none, or none was promised, nothing is asked.
    """
    return "fill" if bounds in ("raise", "fill") else "unchecked"


def wanted_rows(indices: torch.Tensor, total: int, bounds: str) -> tuple[torch.Tensor, bool]:
    """Row numbers that 1-d indices ask for.

    Returns:
        int64 row numbers, ``total`` where an index is bad; and whether none of them certainly is.
    """
    wide = as_int64(indices).contiguous()  # searches warn of others
    if bounds == "unchecked":
        return wide, True
    if wide.device.type == "cpu" and len(wide):
        # Least and greatest tell it, in a tenth of the time that resolving all takes.
        low, high = torch.aminmax(wide)
        if int(low) >= 0 and int(high) < total:
            return wide, True
    rows, bad = resolve(wide, total, bounds)
    return (rows, True) if bad is None else (torch.where(bad, total, rows), False)
