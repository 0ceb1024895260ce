"""Time gathers from tables in pinned host memory with indices on the GPU; needs a GPU.

Beside multigather, which reads the rows over the bus in place: `index_select` on the CPU and a copy
to the GPU, from pageable memory and through a pinned buffer; the indices are on the GPU, so their
copy to the host counts. The bus limit is a plain copy of as many bytes from pinned memory, in the
same run. Outputs are compared first, bit for bit. Prints one JSON object.

    python benchmarks/pinned.py
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence

import torch

import multigather
from multigather.benchmark.timing import Gather, interleaved

F32, I64, BF16 = torch.float32, torch.int64, torch.bfloat16
# Row shape and dtype of each table: one narrow, one of a cache line, one wide, and a mixed set.
TABLES: dict[str, tuple[tuple[tuple[int, ...], torch.dtype], ...]] = {
    "16 bytes": (((4,), F32),),
    "128 bytes": (((32,), F32),),
    "400 bytes": (((100,), F32),),
    "512 bytes": (((128,), F32),),
    "4096 bytes": (((1024,), F32),),
    "features, 668 bytes": (((100,), F32), ((128,), BF16), ((), I64), ((), torch.int32)),
}


def measure(
    name: str, table_bytes: int, counts: Sequence[int], rounds: int
) -> list[dict[str, object]]:
    """Times of every way, for each number of rows."""
    fields = TABLES[name]
    row_bytes = sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in fields)
    rows = table_bytes // row_bytes
    # Random bytes in the exponent would make NaN, which compare unequal; small integers do not.
    pageable = [torch.randint(100, (rows, *shape)).to(dtype) for shape, dtype in fields]
    pinned = [table.pin_memory() for table in pageable]
    results = []
    for count in counts:
        sets = [torch.randint(rows, (count,), device="cuda") for _ in range(8)]
        staging = [
            torch.empty(count, *shape, dtype=dtype, pin_memory=True) for shape, dtype in fields
        ]
        total = count * row_bytes
        source = torch.empty(total, dtype=torch.uint8, pin_memory=True)
        target = torch.empty(total, dtype=torch.uint8, device="cuda")

        def through_pageable(indices: torch.Tensor) -> list[torch.Tensor]:
            there = indices.cpu()
            return [table.index_select(0, there).cuda() for table in pageable]

        def through_pinned(
            indices: torch.Tensor, staging: list[torch.Tensor] = staging
        ) -> list[torch.Tensor]:
            there = indices.cpu()
            copies = []
            for table, stage in zip(pageable, staging, strict=True):
                torch.index_select(table, 0, there, out=stage)
                copies.append(stage.to("cuda", non_blocking=True))
            return copies

        ways: dict[str, Gather] = {
            "multigather": lambda indices: multigather.gather(indices, *pinned),
            "index_select, .to": through_pageable,
            "index_select into pinned, .to": through_pinned,
            "bus limit: copy of as many bytes": lambda _, s=source, t=target: [
                t.copy_(s, non_blocking=True)
            ],
        }
        wanted = [table[sets[0].cpu()] for table in pageable]
        for way, gather in ways.items():
            if way.startswith("bus"):
                continue
            for got, want in zip(gather(sets[0]), wanted, strict=True):
                assert got.is_cuda, way
                assert torch.equal(got.cpu(), want), way

        def timer(gather: Gather, sets: list[torch.Tensor] = sets) -> Callable[[], float]:
            def run() -> float:
                torch.cuda.synchronize()
                start = time.perf_counter()
                for indices in sets:
                    gather(indices)
                torch.cuda.synchronize()
                return (time.perf_counter() - start) / len(sets) * 1e6

            return run

        medians = interleaved({way: timer(gather) for way, gather in ways.items()}, rounds)
        multigather.check()
        ours = medians["multigather"]
        results.append(
            {
                "table": name,
                "rows": rows,
                "count": count,
                "bytes": total,
                "median_us": {way: round(value, 1) for way, value in medians.items()},
                "gb_per_s": {way: round(total / value / 1e3, 2) for way, value in medians.items()},
                "speedup": {
                    way: round(value / ours, 2)
                    for way, value in medians.items()
                    if way.startswith("index_select")
                },
                "share_of_bus_limit": round(medians["bus limit: copy of as many bytes"] / ours, 3),
            }
        )
    return results


def main() -> int:
    """Measure and print; 2 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--table", choices=TABLES, action="append", help="by default all")
    parser.add_argument("--table-mib", type=int, default=1024, help="size of each set of tables")
    parser.add_argument("--counts", default="256,4096,65536", help="numbers of rows to gather")
    parser.add_argument("--rounds", type=int, default=11)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks/pinned.py: torch sees no CUDA device", file=sys.stderr)
        return 2
    counts = [int(count) for count in args.counts.split(",")]
    report = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "results": [
            result
            for name in args.table or TABLES
            for result in measure(name, args.table_mib << 20, counts, args.rounds)
        ],
    }
    print(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
