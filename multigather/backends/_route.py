"""Which rank has which row, on CUDA: kernels/route.cu, built by the cupy backend."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch

from .. import faults
from ..request import Site
from ._cupy import BOUNDS, INDEX_TYPES, CudaBackend

THREADS = 256
# Threads of a launch: so many at least and at most, and in all cells of the table. Each takes about
# four indices, if that leads to no more; the sum of the table is what more threads cost.
LEAST_THREADS, MOST_THREADS, MOST_CELLS = 256, 2**16, 2**20
INDICES_PER_THREAD = 4

# Where in struct Parameters of route.cu what a call brings stands, in its order.
PLACES = (0, 8, 16, 24, 32, 40, 48, 72)
PARAMETER_BYTES = 104

COUNT, PLACE = 0, 1


@dataclass(frozen=True)
class Specialisation:
    """The macros of one compilation of route.cu; they are explained there."""

    kernel: ClassVar[str] = "route"
    step: int
    index_dtype: torch.dtype
    bounds: str
    number_dtype: torch.dtype

    def macros(self) -> dict[str, str]:
        """Macro names and values."""
        return {
            "STEP": str(self.step),
            "INDEX": INDEX_TYPES[self.index_dtype],
            "INDEX_SIGNED": str(int(self.index_dtype.is_signed)),
            "BOUNDS": str(BOUNDS[self.bounds]),
            "NUMBER": INDEX_TYPES[self.number_dtype],
            "THREADS": str(THREADS),
        }

    def parameter_bytes(self) -> int:
        """Size of the kernel's parameters."""
        return PARAMETER_BYTES


class Requests(NamedTuple):
    """What a rank asks of the others.

    Attributes:
        places: int64, for each index the place of its row among the requests, -1 for no row.
        numbers: of the rows at their ranks, rank after rank; -1 where nobody asks.
        counts: int64, shape ``[2, ranks]``: rows asked of each rank; the second row is free for
            what each rank asks of this one.
        missed: int64, how many rows found no place; None without a capacity.
    """

    places: torch.Tensor
    numbers: torch.Tensor
    counts: torch.Tensor
    missed: torch.Tensor | None


class Router:
    """Finds the rank and the place of every row that indices ask for.

    Its calls follow one another on one stream.

    Args:
        backend: the cupy backend.
        device: of the indices.
        offsets: first row of each rank, and last the number of all rows.
        number_dtype: of a row's number at its rank, int32 or int64.
        bounds: the bounds mode; "raise" reports bad indices as of the first buffer of the site.
        site: names of the buffers.
        capacity: the most rows that are asked of a rank, and the places of each rank's rows; None
            for as many as there are.
    """

    def __init__(
        self,
        backend: CudaBackend,
        device: torch.device,
        offsets: Sequence[int],
        number_dtype: torch.dtype,
        bounds: str,
        site: Site,
        capacity: int | None = None,
    ) -> None:
        self._backend, self._device, self._site = backend, device, site
        self._capacity = capacity
        self._ranks = len(offsets) - 1
        self._number_dtype, self._bounds = number_dtype, bounds
        self._offsets = torch.tensor(offsets, device=device)
        self._launches: dict[Any, Callable[[Sequence[int]], None]] = {}
        self._tables: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def requests(self, indices: torch.Tensor) -> Requests:
        """The rows that indices ask for, rank after rank; the indices are 1-d and contiguous."""
        count, ranks, device = indices.shape[0], self._ranks, self._device
        capacity = self._capacity
        places = torch.empty(count, dtype=torch.int64, device=device)
        asked = count if capacity is None else ranks * capacity
        numbers = torch.empty(asked, dtype=self._number_dtype, device=device)
        counts = torch.empty((2, ranks), dtype=torch.int64, device=device)
        missed = None
        if capacity is not None:
            missed = torch.zeros((), dtype=torch.int64, device=device)
        threads = self._threads(count)
        table, sums = self._table(threads)
        addresses = [
            indices.data_ptr(),
            places.data_ptr(),
            table.data_ptr(),
            sums.data_ptr(),
            numbers.data_ptr(),
            counts.data_ptr(),
            count,
            0 if missed is None else missed.data_ptr(),
        ]
        self._launch(COUNT, indices.dtype, threads)(addresses)
        torch.cumsum(table, 0, out=sums)
        self._launch(PLACE, indices.dtype, threads)(addresses)
        return Requests(places, numbers, counts, missed)

    def _threads(self, count: int) -> int:
        wanted = 1 << (-(-count // INDICES_PER_THREAD) - 1).bit_length() if count else 1
        most = max(LEAST_THREADS, min(MOST_THREADS, MOST_CELLS // self._ranks))
        most = 1 << most.bit_length() - 1
        return min(max(wanted, LEAST_THREADS), most)

    def _table(self, threads: int) -> tuple[torch.Tensor, torch.Tensor]:
        tables = self._tables.get(threads)
        if tables is None:
            table = torch.empty(self._ranks * threads, dtype=torch.int64, device=self._device)
            tables = table, torch.empty_like(table)
            # What is allocated while a graph is captured is that graph's.
            if self._device.type == "cpu" or not torch.cuda.is_current_stream_capturing():
                self._tables[threads] = tables
        return tables

    def _launch(
        self, step: int, index_dtype: torch.dtype, threads: int
    ) -> Callable[[Sequence[int]], None]:
        key = step, index_dtype, threads
        launch = self._launches.get(key)
        if launch is None:
            board = faults.board_of(self._device).address if self._bounds == "raise" else 0
            parameters = struct.pack(
                "=56xQq8xQQII",
                self._offsets.data_ptr(),
                -1 if self._capacity is None else self._capacity,
                board,
                self._site.plan,
                self._ranks,
                threads,
            )
            specialisation = Specialisation(step, index_dtype, self._bounds, self._number_dtype)
            launch = self._launches[key] = self._backend.launch_of(
                specialisation, threads // THREADS, THREADS, self._device, parameters, PLACES
            )
        return launch
