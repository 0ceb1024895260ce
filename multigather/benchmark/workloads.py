"""Named gathers that people do, for the benchmark: buffers, row counts, numbers of indices."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..packed import pack
from ..slab import Column, RowLayout

Fields = tuple[tuple[tuple[int, ...], torch.dtype], ...]


@dataclass(frozen=True)
class Workload:
    """Buffers that are gathered by one index.

    Attributes:
        name: for tables.
        rows: row count of every buffer on a GPU.
        cpu_rows: the same for a CPU, where memory and patience are smaller; 0 leaves it out there.
        counts: numbers of indices on a GPU.
        cpu_counts: numbers of indices on a CPU.
        fields: row shape and dtype of each buffer.
        packed: whether the buffers are packed into one slab.
    """

    name: str
    rows: int
    cpu_rows: int
    counts: tuple[int, ...]
    cpu_counts: tuple[int, ...]
    fields: Fields
    packed: bool = False

    @property
    def row_bytes(self) -> int:
        """Bytes that one index gathers."""
        return sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in self.fields)

    def runs(self) -> list[tuple[int, int]]:
        """The runs of memory that one index reads: bytes, and bytes to the next row's run."""
        sizes = [torch.Size(shape).numel() * dtype.itemsize for shape, dtype in self.fields]
        if self.packed:
            layout = RowLayout.of([Column(dtype, shape) for shape, dtype in self.fields])
            return [(sum(sizes), layout.stride)]
        return [(size, size) for size in sizes]

    def buffers(self, device: torch.device, seed: int = 0) -> list[torch.Tensor]:
        """The buffers, full of random values."""
        generator = torch.Generator(device).manual_seed(seed)
        rows = self.cpu_rows if device.type == "cpu" else self.rows
        result = []
        for shape, dtype in self.fields:
            high = 2 if dtype == torch.bool else 100
            drawn = torch.randint(
                high, (rows, *shape), dtype=torch.uint8, device=device, generator=generator
            )
            result.append(drawn.to(dtype))
        return list(pack(*result)) if self.packed else result

    def index_sets(self, count: int, sets: int, device: torch.device) -> list[torch.Tensor]:
        """``sets`` different random index sets."""
        generator = torch.Generator(device).manual_seed(count)
        rows = self.cpu_rows if device.type == "cpu" else self.rows
        return [
            torch.randint(rows, (count,), device=device, generator=generator) for _ in range(sets)
        ]


F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
I64, I32, I16, U8, BOOL = torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool

COLUMNS: Fields = (((), I64), ((), I32), ((), F32), ((), F64), ((), U8), ((), I16))

WORKLOADS = (
    # State of speculative decoding, by request; two model sizes.
    Workload(
        "decode 4096", 4096, 1025, (64, 512), (64,),
        (((8,), F32), ((8,), I64), ((), I32), ((4096,), BF16)),
    ),
    Workload(
        "decode 7168", 1025, 0, (1, 256), (),
        (((1,), F32), ((1,), I64), ((), I64), ((7168,), BF16)),
    ),
    # Transitions of a humanoid agent: observation, action, next observation, reward, done, step.
    Workload(
        "replay", 200_000, 200_000, (256, 4096), (4096,),
        (((376,), F32), ((17,), F32), ((376,), F32), ((), F32), ((), BOOL), ((), I64)),
    ),
    # Stacked frames of a video game, now and next.
    Workload(
        "frames", 50_000, 4000, (256,), (256,),
        (((4, 84, 84), U8), ((4, 84, 84), U8), ((), I64), ((), F32), ((), BOOL)),
    ),
    # Node features of a graph.
    Workload(
        "features", 4_000_000, 400_000, (200_000,), (20_000,),
        (((100,), F32), ((128,), BF16), ((), I64), ((), I32)),
    ),
    # Columns of a table.
    Workload("columns", 30_000_000, 3_000_000, (4_000_000,), (400_000,), COLUMNS),
    # The same in one slab.
    Workload("columns, packed", 30_000_000, 3_000_000, (4_000_000,), (400_000,), COLUMNS, True),
    # Rows of several KB, where any copy is at the memory's limit.
    Workload(
        "wide", 40_000, 0, (20_000,), (),
        (((8192,), BF16), ((8192,), BF16), ((4096,), F32), ((), I64)),
    ),
)  # fmt: skip
