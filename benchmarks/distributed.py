"""Time gathers of rows that the ranks of a torchrun group share; gloo on CPUs, NCCL on GPUs.

Beside multigather's transports: one all-to-all per buffer as people write it (the indices exchanged
once for all buffers), and indexing a DTensor where that works. Outputs are compared first, bit for
bit, with the rows that the index asks for. A time is that of the slowest rank; there are the median
and, for machines that others use too, the 10th percentile over interleaved rounds. "own rows only"
is no way to do it, but what a local gather takes meanwhile. The probe times bare all-to-alls, from
which the cost model's latency and bandwidth are taken. On GPUs there are also rows and plain copies
from a peer, and a decode step's gather beside one of own rows.

    torchrun --nproc-per-node 8 benchmarks/distributed.py --scale 0.1 --out gloo8.json
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

import multigather
from multigather import environment
from multigather.benchmark.timing import graph_timer, host_timer, rounds_of
from multigather.benchmark.workloads import WORKLOADS, Workload
from multigather.distributed import model, shard, symmetric

Gather = Callable[[torch.Tensor], Sequence[torch.Tensor]]

CHOSEN = ("replay", "features")
OWN = "own rows only"  # as many rows of the rank's own: what a gather costs without others
DTENSOR = "DTensor indexing"
SETS = 4  # of indices, used in turn
PROBE_BYTES = (1, 2**10, 2**14, 2**17, 2**20)  # from each rank to each
PEER_BYTES, PEER_ROW_BYTES = 2**27, (64, 512, 1024, 2048, 8192)


def per_buffer(bufs: Sequence[torch.Tensor], rows_per_rank: int, device: torch.device) -> Gather:
    """Indices exchanged once, then an all-to-all for each buffer."""
    world = dist.get_world_size()
    start = rows_per_rank * dist.get_rank()

    def gather(indices: torch.Tensor) -> list[torch.Tensor]:
        owner = indices // rows_per_rank
        order = owner.argsort()
        counts = torch.bincount(owner, minlength=world)
        others = torch.empty_like(counts)
        dist.all_to_all_single(others, counts)
        mine, theirs = counts.tolist(), others.tolist()
        wanted = torch.empty(sum(theirs), dtype=torch.int64, device=device)
        dist.all_to_all_single(wanted, indices[order], theirs, mine)
        wanted -= start
        results = []
        for buf in bufs:
            rows = buf[wanted]
            received = rows.new_empty(len(indices), *buf.shape[1:])
            # Not every type goes through every backend: bytes do.
            dist.all_to_all_single(
                received.view(len(indices), -1).view(torch.uint8),
                rows.view(len(rows), -1).view(torch.uint8),
                mine,
                theirs,
            )
            result = torch.empty_like(received)
            result[order] = received
            results.append(result)
        return results

    return gather


def dtensor_indexing(bufs: Sequence[torch.Tensor], device: torch.device) -> Gather:
    """``dtensor[indices]``, the indices of all ranks as one DTensor, rows back to their rank."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    tables = [DTensor.from_local(buf, mesh, [Shard(0)]) for buf in bufs]

    def gather(indices: torch.Tensor) -> list[torch.Tensor]:
        everyone = DTensor.from_local(indices, mesh, [Shard(0)])
        return [table[everyone].redistribute(mesh, [Shard(0)]).to_local() for table in tables]

    return gather


def slowest(seconds: Sequence[float], device: torch.device) -> list[float]:
    """Each time's maximum over the ranks."""
    times = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return times.tolist()


def clock(device: torch.device) -> float:
    """The time, after the device's work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def measure(
    workload: Workload, pattern: str, count: int, rows: int, rounds: int, device: torch.device
) -> dict[str, object]:
    """Times of every way for one workload and number of indices per rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    rows_per_rank = rows // world
    total = rows_per_rank * world
    # A row's values follow from its number: each rank knows what it must get from the others.
    numbers = torch.arange(rank * rows_per_rank, (rank + 1) * rows_per_rank)

    def values(row: torch.Tensor) -> list[torch.Tensor]:
        made = []
        for field, (shape, dtype) in enumerate(workload.fields):
            high = 2 if dtype == torch.bool else 100
            first = ((row * 2_654_435_761 + 97 * field) % high).view(-1, *[1] * len(shape))
            column = torch.arange(max(1, torch.Size(shape).numel())).view(1, *(shape or ()))
            made.append(((first + (column if shape else 0)) % high).to(dtype))
        return made

    bufs = [each.to(device) for each in values(numbers)]
    load = model.Load(world, total, count, workload.row_bytes, len(bufs), pattern)
    generator = torch.Generator().manual_seed(rank)
    sets = [model.draw(load, generator) for _ in range(SETS)]
    wanted = [each.to(device) for each in values(sets[0])]
    sets = [each.to(device) for each in sets]
    # The least that a fixed capacity must be here; a program would leave some room.
    once = device.type == "cpu"  # as "auto" does for these rows
    asked = [
        torch.bincount((each.unique() if once else each) // rows_per_rank, minlength=world)
        for each in sets
    ]
    most = torch.stack(asked).max()
    dist.all_reduce(most, dist.ReduceOp.MAX)
    capacity = int(most)

    def plan(**options: object) -> Callable[[], Gather]:
        return lambda: shard(*bufs, **options)  # type: ignore[arg-type]

    makers: dict[str, Callable[[], Gather]] = {
        "exchange": plan(deduplicate=False),
        "exchange, deduplicated": plan(deduplicate=True),
        "exchange, capacity": plan(deduplicate=once, capacity=capacity),
        "peer reads": lambda: shard(*symmetric(*bufs), transport="peer"),
        "all-to-all per buffer": lambda: per_buffer(bufs, rows_per_rank, device),
        DTENSOR: lambda: dtensor_indexing(bufs, device),
    }
    ways: dict[str, Gather] = {}
    missing: dict[str, str] = {}
    for name, make in makers.items():
        failure = ""
        try:
            gather = make()
            for got, want in zip(gather(sets[0]), wanted, strict=True):
                assert torch.equal(got, want), f"{name}: wrong rows"
        except (RuntimeError, NotImplementedError, ValueError) as error:
            failure = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        failures: list[str] = [""] * world
        dist.all_gather_object(failures, failure)
        if any(failures):
            missing[name] = next(filter(None, failures))
        else:
            ways[name] = gather
    own = multigather.plan(*bufs)
    ways[OWN] = lambda indices: own(indices % rows_per_rank)
    slow = [name for name in ways if name == DTENSOR]

    def timer(gather: Gather) -> Callable[[], float]:
        def run() -> float:
            dist.barrier()
            start = clock(device)
            for indices in sets:
                gather(indices)
            return (clock(device) - start) / SETS

        return run

    fast = {name: timer(gather) for name, gather in ways.items() if name not in slow}
    # The slowest way moves the whole table: it has its rounds last, and few.
    last = {name: timer(ways[name]) for name in slow}
    seconds = rounds_of(fast, rounds) | rounds_of(last, min(rounds, 3))
    times = {name: micros(slowest(each, device)) for name, each in seconds.items()}
    different = statistics.mean(len(each.unique()) for each in sets)
    return {
        "workload": workload.name,
        "pattern": pattern,
        "ranks": world,
        "rows": total,
        "indices_per_rank": count,
        "different_per_rank": different,
        "capacity": capacity,
        "row_bytes": workload.row_bytes,
        "buffers": len(bufs),
        "median_us": {name: median for name, (median, _) in times.items()},
        "best_us": {name: best for name, (_, best) in times.items()},
        "missing": missing,
    }


def micros(seconds: Sequence[float]) -> tuple[float, float]:
    """Median and 10th percentile, in microseconds."""
    ordered = sorted(seconds)
    best = ordered[len(ordered) // 10]
    return round(statistics.median(ordered) * 1e6, 1), round(best * 1e6, 1)


def probe(device: torch.device, rounds: int) -> dict[str, dict[str, float]]:
    """Microseconds of an all-to-all, by the bytes from each rank to each."""
    world = dist.get_world_size()
    median, best = {}, {}
    for size in PROBE_BYTES:
        source = torch.zeros(size * world, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        seconds = []
        for _ in range(3 * rounds + 2):
            dist.barrier()
            start = clock(device)
            dist.all_to_all_single(target, source)
            seconds.append(clock(device) - start)
        median[str(size)], best[str(size)] = micros(slowest(seconds[2:], device))
    return {"all_to_all_us": median, "all_to_all_best_us": best}


def gpu_seconds(call: Callable[[], object], calls: int = 4) -> float:
    """Seconds of the GPU's time per call, of so many in a row; all ranks at once."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    start.record()
    for _ in range(calls):
        call()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / calls


def peer_rates(device: torch.device, rounds: int) -> dict[str, dict[str, float]]:
    """GB/s that every GPU reads from its neighbour, the slowest one's, while all do.

    Rows of one buffer by random indices, by their bytes, beside a plain copy of as many bytes.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    if device.type != "cuda" or world < 2:
        return {}
    neighbour = (rank + 1) % world
    source = torch.zeros(PEER_BYTES, dtype=torch.uint8, device=f"cuda:{neighbour}")
    target = torch.empty(PEER_BYTES, dtype=torch.uint8, device=device)
    found = {}
    for row_bytes in PEER_ROW_BYTES:
        rows, count = 2 * PEER_BYTES // row_bytes, PEER_BYTES // row_bytes
        own = torch.randint(256, (rows, row_bytes), dtype=torch.uint8, device=device)
        plan = shard(*symmetric(own), transport="peer")
        del own
        sets = [torch.randint(rows, (count,), device=device) + neighbour * rows for _ in range(3)]
        turns = itertools.cycle(sets)
        calls: dict[str, Callable[[], object]] = {
            "copy": lambda: target.copy_(source),
            "rows": lambda plan=plan, turns=turns: plan(next(turns)),
        }
        timers = {name: functools.partial(gpu_seconds, call) for name, call in calls.items()}
        rounds_of(timers, 2)  # the first ones learn
        found[str(row_bytes)] = {
            name: round(PEER_BYTES / statistics.median(slowest(each, device)) / 1e9, 1)
            for name, each in rounds_of(timers, rounds).items()
        }
    return found


def decode_times(device: torch.device, rounds: int) -> dict[str, dict[str, float]]:
    """Microseconds of a decode step's gather: from all ranks by peer reads, and of own rows.

    *host* is the wall time per call while the GPU never limits, *gpu* that of a replayed graph.
    """
    world = dist.get_world_size()
    if device.type != "cuda" or world < 2:
        return {}
    (workload,) = (each for each in WORKLOADS if each.name == "decode 4096")
    bufs = workload.buffers(device)
    rows, count = len(bufs[0]), workload.counts[0]
    ways: dict[str, Gather] = {
        "peer reads": shard(*symmetric(*bufs), transport="peer"),
        "own rows": multigather.plan(*bufs),
    }
    sets = {
        "peer reads": [torch.randint(world * rows, (count,), device=device) for _ in range(8)],
        "own rows": [torch.randint(rows, (count,), device=device) for _ in range(8)],
    }
    host = {name: host_timer(way, sets[name], device) for name, way in ways.items()}
    gpu = {name: graph_timer(way, sets[name], 0) for name, way in ways.items()}
    found = {}
    for kind, timers in (("host", host), ("gpu", gpu)):
        times = rounds_of(timers, rounds)
        found[kind] = {
            name: round(statistics.median(slowest(each, device)), 2) for name, each in times.items()
        }
    return found


def table(results: Sequence[dict[str, object]]) -> str:
    """The results as text, a line for each way."""
    lines = []
    for each in results:
        lines.append(
            f"{each['workload']}, {each['pattern']}: {each['ranks']} ranks, {each['rows']} rows of "
            f"{each['row_bytes']} bytes in {each['buffers']} buffers, {each['indices_per_rank']} "
            f"indices per rank ({each['different_per_rank']:.0f} different)"
        )
        medians: dict[str, float] = each["median_us"]  # type: ignore[assignment]
        theirs = medians["all-to-all per buffer"]
        for name, us in medians.items():
            lines.append(f"  {name:26} {us:12.1f} us   {theirs / us:5.2f} x")
        missing: dict[str, str] = each["missing"]  # type: ignore[assignment]
        lines += [f"  {name:26} not here: {why}" for name, why in missing.items()]
    return "\n".join(lines)


def main() -> None:
    """Measure, print a table on rank 0, write JSON there if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="by default a GPU if there is one"
    )
    parser.add_argument("--scale", type=float, default=1.0, help="of row and index counts")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--workload", choices=CHOSEN, action="append", help="by default both")
    parser.add_argument("--pattern", choices=model.PATTERNS, action="append")
    parser.add_argument("--out", type=Path, help="file for the results as JSON")
    args = parser.parse_args()
    kind = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(kind)
    if kind == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
    report: dict[str, object] = {
        "environment": environment.facts(),
        "backend": dist.get_backend(),
        "scale": args.scale,
        "rounds": args.rounds,
        **probe(device, args.rounds),
        "peer_gb_per_s": peer_rates(device, args.rounds),
        "decode_us": decode_times(device, args.rounds),
    }
    if dist.get_rank() == 0:
        print(f"from the neighbour, GB/s by bytes per row: {report['peer_gb_per_s'] or 'no GPU'}")
        print(f"decode step, us: {report['decode_us'] or 'no GPU'}", flush=True)
    results = []
    for workload in WORKLOADS:
        if workload.name not in (args.workload or CHOSEN):
            continue
        rows = workload.rows if kind == "cuda" else workload.cpu_rows
        counts = workload.counts if kind == "cuda" else workload.cpu_counts
        for pattern in args.pattern or model.PATTERNS:
            for count in counts:
                scaled = max(1, int(count * args.scale))
                results.append(
                    measure(workload, pattern, scaled, int(rows * args.scale), args.rounds, device)
                )
                if dist.get_rank() == 0:
                    print(table(results[-1:]), flush=True)
    report["results"] = results
    if dist.get_rank() == 0 and args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
