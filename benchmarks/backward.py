"""Time backward passes: multigather's against those of ``b[idx]`` and of `index_select`.

A call makes the gradients of all floating buffers of a workload, zeros included, from the gradients
of their gathered rows; the forward pass is not in the time. On a GPU *host* is the wall time per
call and *gpu* the time per call of a CUDA graph that replays many. Before any time is taken every
way's gradients are compared with sums in float64. Times are of interleaved rounds in one process.

Ways: "multigather", and "multigather, torch" whose additions are torch's, buffer by buffer;
"b[idx]" (``index_put_(accumulate=True)``); "index_select" (``index_add_``); "torch.compile" of
``b[idx]`` with ``--compile``. "zeros" is what every way has to do first, buffer by buffer; "foreach
zeros" the same in one call. ``--config`` adds configs of the kernel. Indices: each row at most
once, Zipf's law with exponent 1, and one row for all.

    python benchmarks/backward.py --out backward.json
    python benchmarks/backward.py --config 128,2 --config 256,4 --config 256,2,words --counts 4096
    python benchmarks/backward.py --device cpu --workload replay --counts 64,4096
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import multigather
from multigather import environment
from multigather.backends import _scatter_add
from multigather.backends._scatter_add import AddConfig
from multigather.benchmark.timing import GRAPH_CALLS, LARGE_CALL_BYTES, host_timer, interleaved
from multigather.benchmark.workloads import WORKLOADS, Workload

OURS = "multigather"
NAMES = ("decode 4096", "replay", "features")
COUNTS = (64, 512, 4096, 32_768, 200_000)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PATTERNS = ("unique", "zipf", "equal")
SETS = 4

Tensors = Sequence[torch.Tensor]
Forward = Callable[[torch.Tensor, Tensors], Tensors]
Backward = Callable[[int], Tensors]


def by_index(indices: torch.Tensor, buffers: Tensors) -> Tensors:
    """One ``b[idx]`` each."""
    return [buffer[indices] for buffer in buffers]


def forwards(compiled: bool) -> dict[str, Forward]:
    """The forward passes whose backward passes are timed."""
    ways: dict[str, Forward] = {
        OURS: lambda indices, buffers: multigather.gather(indices, *buffers),
        "multigather, torch": lambda indices, buffers: multigather.gather(
            indices, *buffers, backend="torch"
        ),
        "b[idx]": by_index,
        "index_select": lambda indices, buffers: [b.index_select(0, indices) for b in buffers],
    }
    if compiled:
        import torch._functorch.config

        torch._functorch.config.donated_buffer = False  # would forbid to keep the graph
        ways["torch.compile"] = torch.compile(by_index, dynamic=False)
    return ways


def indices_of(pattern: str, rows: int, count: int, seed: int, device: torch.device) -> Any:
    """Row numbers, or None where there are not enough rows."""
    generator = torch.Generator(device).manual_seed(seed)
    if pattern == "equal":
        return torch.full((count,), seed, device=device)
    if pattern == "unique":
        if count > rows:
            return None
        return torch.randperm(rows, device=device, generator=generator)[:count]
    drawn = torch.rand(count, device=device, generator=generator, dtype=torch.float64)
    ranks = (drawn * math.log(rows)).exp().long() - 1
    return torch.randperm(rows, device=device, generator=generator)[ranks]


def check(name: str, got: Tensors, indices: torch.Tensor, gradients: Tensors) -> None:
    """Compare with sums in float64: equal where these are exact, else as near as rounding allows.

    Raises:
        AssertionError: the gradients of this way are wrong.
    """
    for total, gradient in zip(got, gradients, strict=True):
        wide = gradient.double()
        shape, width = total.shape, wide[0].numel()
        exact = wide.new_zeros(shape).index_add_(0, indices, wide).view(-1, width)
        size = wide.new_zeros(shape).index_add_(0, indices, wide.abs()).view(-1, width)
        times = torch.bincount(indices, minlength=shape[0])[:, None]
        limit = 2 / torch.finfo(total.dtype).eps  # whole numbers up to it are exact
        bound = torch.where(size <= limit, 0, size * times * torch.finfo(total.dtype).eps)
        error = (total.double().view(-1, width) - exact).abs()
        assert total.dtype == gradient.dtype, name
        assert (error <= bound).all(), f"{name}: wrong by {float((error - bound).max())}"


def graph_timer(call: Backward, call_bytes: int, stream: Any) -> Callable[[], float]:
    """Timer of the GPU time per call in microseconds.

    Like `multigather.benchmark.timing.graph_timer`, on the stream of the forward passes, which is
    where autograd runs the backward passes.
    """
    calls = GRAPH_CALLS if call_bytes < LARGE_CALL_BYTES else 4
    with torch.cuda.stream(stream):
        for number in range(2):
            call(number)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for number in range(calls):
            call(number % SETS)
    graph.replay()
    torch.cuda.synchronize()

    def run() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end)) * 1e3 / calls

    return run


def backward_of(
    forward: Forward, config: AddConfig, sets: Tensors, buffers: Tensors, gradients: Tensors
) -> Backward:
    """The backward pass of a forward pass that has run once for each set of indices."""
    outputs = [forward(indices, buffers) for indices in sets]

    def call(number: int) -> Tensors:
        _scatter_add.CONFIG = config
        return torch.autograd.grad(outputs[number], buffers, gradients, retain_graph=True)

    return call


def measure(
    workload: Workload,
    dtype: torch.dtype,
    pattern: str,
    count: int,
    device: torch.device,
    rounds: int,
    compiled: bool = False,
    configs: Sequence[AddConfig] = (),
) -> dict[str, Any] | None:
    """Check and time all ways; None where the pattern does not fit the number of rows."""
    rows = workload.cpu_rows if device.type == "cpu" else workload.rows
    shapes = [(rows, *shape) for shape, field in workload.fields if field.is_floating_point]
    buffers = [torch.zeros(shape, dtype=dtype, device=device).requires_grad_() for shape in shapes]
    sets = [indices_of(pattern, rows, count, seed, device) for seed in range(SETS)]
    if sets[0] is None:
        return None
    gradients = [
        torch.randint(-1, 2, (count, *shape[1:]), device=device).to(dtype) for shape in shapes
    ]
    written = sum(each.nbytes for each in buffers)
    stream = None
    if device.type == "cuda":
        stream = torch.cuda.Stream()
        torch.cuda.synchronize()
    ways: dict[str, Backward] = {}
    missing: dict[str, str] = {}
    with torch.cuda.stream(stream):
        plans = [(name, forward, AddConfig()) for name, forward in forwards(compiled).items()]
        ours = plans[0][1]
        plans += [(f"{OURS}, {each.describe()}", ours, each) for each in configs]
        for name, forward, config in plans:
            try:
                ways[name] = backward_of(forward, config, sets, buffers, gradients)
                check(name, ways[name](0), sets[0], gradients)
            except (RuntimeError, NotImplementedError) as error:
                if name.startswith(OURS):
                    raise
                missing[name] = str(error).partition("\n")[0]
                ways.pop(name, None)
        ways["zeros"] = lambda _: [each.new_zeros(each.shape) for each in buffers]

        def foreach_zeros(_: int) -> Tensors:
            made = [torch.empty_like(each, requires_grad=False) for each in buffers]
            torch._foreach_zero_(made)
            return made

        ways["foreach zeros"] = foreach_zeros
        sets_by_number = range(SETS)
        timers = {name: host_timer(way, sets_by_number, device) for name, way in ways.items()}
        host_us = interleaved(timers, rounds)
    gpu_us = {}
    if device.type == "cuda":
        multigather.check()
        graphs = {}
        for name, way in ways.items():
            try:
                graphs[name] = graph_timer(way, written, stream)
            except RuntimeError as error:
                if name.startswith(OURS):
                    raise
                missing[f"{name}, gpu"] = str(error).partition("\n")[0]
        gpu_us = interleaved(graphs, rounds)
    return {
        "workload": workload.name,
        "rows": rows,
        "dtype": str(dtype).removeprefix("torch."),
        "pattern": pattern,
        "count": count,
        "buffers": len(buffers),
        "added_bytes": sum(each.nbytes for each in gradients),
        "zeroed_bytes": written,
        "host_us": host_us,
        "gpu_us": gpu_us,
        "missing": missing,
    }


def show(results: Sequence[dict[str, Any]]) -> None:
    """Print a table per kind of time: microseconds of multigather, then each way's over it."""
    for kind in ("host_us", "gpu_us"):
        some = [each for each in results if each[kind]]
        if not some:
            continue
        names = [name for name in some[0][kind] if name != OURS]
        print(f"\n{kind}: multigather, and the others' times over it")
        head = f"{'workload':12} {'dtype':9} {'indices':8} {'m':>7} {OURS:>11}  "
        print(head + "  ".join(names))
        for each in some:
            ours = each[kind][OURS]
            ratios = [
                f"{each[kind][name] / ours:{len(name)}.2f}"
                if name in each[kind]
                else " " * len(name)
                for name in names
            ]
            print(
                f"{each['workload']:12} {each['dtype']:9} {each['pattern']:8} {each['count']:7} "
                f"{ours:11.1f}  {'  '.join(ratios)}"
            )


def config_of(text: str) -> AddConfig:
    """The config of ``threads,unroll`` or ``threads,unroll,words``."""
    threads, unroll, *words = text.split(",")
    if words not in ([], ["words"]):
        raise ValueError(text)
    return AddConfig(int(threads), int(unroll), not words)


def main() -> int:
    """Measure and print; 1 if a way is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workload", choices=NAMES, action="append", help="by default all")
    parser.add_argument("--dtype", choices=DTYPES, action="append", help="by default all")
    parser.add_argument("--pattern", choices=PATTERNS, action="append", help="by default all")
    parser.add_argument("--counts", default=",".join(map(str, COUNTS)), help="numbers of indices")
    parser.add_argument("--config", type=config_of, action="append", help="threads,unroll[,words]")
    parser.add_argument("--compile", action="store_true", help="torch.compile too")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--out", type=Path, help="write a JSON file")
    args = parser.parse_args()
    device = torch.device(args.device)
    report: dict[str, Any] = {
        "command": sys.argv[1:],
        "date": datetime.date.today().isoformat(),
        "environment": environment.facts(),
        "results": [],
    }
    by_name = {workload.name: workload for workload in WORKLOADS}
    for name in args.workload or NAMES:
        for dtype in args.dtype or DTYPES:
            for pattern in args.pattern or PATTERNS:
                for count in map(int, args.counts.split(",")):
                    try:
                        result = measure(
                            by_name[name], DTYPES[dtype], pattern, count, device, args.rounds,
                            args.compile, args.config or (),
                        )  # fmt: skip
                    except AssertionError as error:
                        print(f"benchmarks/backward.py: {name}: {error}", file=sys.stderr)
                        return 1
                    if result is None:
                        continue
                    report["results"].append(result)
                    print(f"{name}, {dtype}, {pattern}, m = {count}", file=sys.stderr, flush=True)
                    if args.out is not None:
                        args.out.write_text(json.dumps(report, indent=1) + "\n")
    show(report["results"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
