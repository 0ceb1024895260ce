"""Time gathers of narrow columns from separate buffers and from one slab, over both sizes.

Six columns of 27 bytes a row, by plans, in interleaved rounds. "by field" is the slab read one
field after the other, as it is without the compiled extension; on a CPU only. Outputs are compared
first.

    python benchmarks/packed.py
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch

import multigather
from multigather import native
from multigather.benchmark.timing import Gather, graph_timer, host_timer, interleaved
from multigather.benchmark.workloads import COLUMNS


def learned(gather: Gather, sets: list[torch.Tensor]) -> Gather:
    """The gather after calls that leave its short way behind."""
    for indices in sets:
        gather(indices)
    return gather


def measure(rows: int, count: int, device: torch.device, rounds: int) -> dict[str, float]:
    """Medians of every way, microseconds per call."""
    separate = [
        torch.randint(100, (rows, *shape), device=device).to(dtype) for shape, dtype in COLUMNS
    ]
    packed = multigather.pack(*separate)
    sets = [torch.randint(rows, (count,), device=device) for _ in range(8)]
    gathers = {
        "separate": learned(multigather.plan(*separate), sets),
        "packed": learned(multigather.plan(*packed), sets),
    }
    if device.type == "cpu" and native.extension is not None:
        multigather.api.forget()
        with native.without():
            gathers["by field"] = learned(multigather.plan(*packed), sets)
    for gather in gathers.values():
        for result, buffer in zip(gather(sets[0]), separate, strict=True):
            assert torch.equal(result, buffer[sets[0]])
    timers: dict[str, Callable[[], float]] = {}
    for name, gather in gathers.items():
        if device.type == "cuda":
            timers[name] = graph_timer(gather, sets, 27 * count)
        else:
            timers[name] = host_timer(gather, sets, device)
    return interleaved(timers, rounds)


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", default="10000,100000,1000000,10000000")
    parser.add_argument("--counts", default="1000,10000,100000,1000000")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    for rows in map(int, args.rows.split(",")):
        for count in map(int, args.counts.split(",")):
            found = measure(rows, count, torch.device(args.device), args.rounds)
            times = ", ".join(f"{name} {time:,.0f}" for name, time in found.items())
            ratio = found["separate"] / found["packed"]
            print(f"{rows:,} rows, m = {count:,}: {times} us; {ratio:.2f} times", flush=True)


if __name__ == "__main__":
    main()
