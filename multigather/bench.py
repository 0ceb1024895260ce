"""``multigather bench``: the workloads, side by side with what people use today.

Every way is checked bit for bit before it is timed, and every time is taken in interleaved rounds
of one process, because only ratios of one run compare: machines are shared and their clocks move.

On a GPU two times are taken apart: *host*, wall time per call while the GPU never limits, and
*gpu*, per call of a CUDA graph that replays many calls with other indices each. On a CPU there is
one time.
"""

from __future__ import annotations

import datetime
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

import multigather

from . import environment
from .workloads import WORKLOADS, Workload

Gather = Callable[[torch.Tensor, Sequence[torch.Tensor]], Sequence[torch.Tensor]]

ROUNDS = 21
ROUND_SECONDS = 0.02
INDEX_SETS = 8
GRAPH_CALLS = 20
QUEUED_CALLS = 50
LARGE_CALL_BYTES = 50_000_000


def _rows(indices: torch.Tensor, buffers: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    return [buffer[indices] for buffer in buffers]


def _index_select(indices: torch.Tensor, buffers: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    return [torch.index_select(buffer, 0, indices) for buffer in buffers]


def _gather(indices: torch.Tensor, buffers: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    return multigather.gather(indices, *buffers)


# Name, function; multigather first.
WAYS: tuple[tuple[str, Gather], ...] = (
    ("multigather", _gather),
    ("b[idx]", _rows),
    ("index_select", _index_select),
)


@dataclass(frozen=True)
class Measurement:
    """Medians of one workload and count, microseconds per call by way.

    Attributes:
        workload: its name.
        count: number of indices.
        call_bytes: bytes written by one call.
        host_us: wall time per call.
        gpu_us: GPU time per call, empty on a CPU.
    """

    workload: str
    count: int
    call_bytes: int
    host_us: dict[str, float]
    gpu_us: dict[str, float]


class MismatchError(RuntimeError):
    """A way gave other bytes than ``b[idx]``, so nothing was timed."""


def measure(
    workload: Workload, count: int, device: torch.device, buffers: Any, rounds: int = ROUNDS
) -> Measurement:
    """Check and time every way on one workload.

    Raises:
        MismatchError: the outputs of a way differ from ``b[idx]`` in a byte.
    """
    sets = workload.index_sets(count, INDEX_SETS, device)
    reference = _rows(sets[0], buffers)
    for name, way in WAYS:
        for output, wanted in zip(way(sets[0], buffers), reference, strict=True):
            if not torch.equal(_bytes(output), _bytes(wanted)):
                raise MismatchError(f"{name} differs from b[idx] on {workload.name}, m = {count}")
    host = _interleaved(
        {name: _host_timer(way, sets, buffers, device) for name, way in WAYS}, rounds
    )
    gpu: dict[str, float] = {}
    if device.type == "cuda":
        calls = GRAPH_CALLS if count * workload.row_bytes < LARGE_CALL_BYTES else 4
        gpu = _interleaved(
            {name: _graph_timer(way, sets, buffers, calls) for name, way in WAYS}, rounds
        )
    return Measurement(workload.name, count, count * workload.row_bytes, host, gpu)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _interleaved(timers: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Median over rounds in which each timer runs once.

    The order rotates, for a way inherits the caches and the allocator as the one before left them.
    """
    times: dict[str, list[float]] = {name: [] for name in timers}
    names = list(timers)
    for turn in range(rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            times[name].append(timers[name]())
    return {name: round(statistics.median(each), 3) for name, each in times.items()}


def _host_timer(
    way: Gather, sets: Sequence[torch.Tensor], buffers: Any, device: torch.device
) -> Callable[[], float]:
    """Timer of the wall time per call in microseconds, over enough calls to fill a round."""

    def run(calls: int) -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        for call in range(calls):
            way(sets[call % len(sets)], buffers)
        seconds = time.perf_counter() - start
        return seconds / calls * 1e6

    # The driver queues about a thousand launches; a call that had to wait for a place in the queue
    # would show the GPU's time as the host's.
    most = QUEUED_CALLS if device.type == "cuda" else 1000
    run(3)
    calls = max(1, min(most, int(ROUND_SECONDS * 1e6 / run(3))))
    return lambda: run(calls)


def _graph_timer(
    way: Gather, sets: Sequence[torch.Tensor], buffers: Any, calls: int
) -> Callable[[], float]:
    """Timer of the GPU time per call in microseconds, by replaying a graph of many calls."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        for indices in sets[:2]:
            way(indices, buffers)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        keep = [way(sets[call % len(sets)], buffers) for call in range(calls)]
    graph.replay()
    torch.cuda.synchronize()

    def run() -> float:
        start, end = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        assert keep
        return float(start.elapsed_time(end)) * 1e3 / calls

    return run


def run(device: torch.device, names: Sequence[str] = (), rounds: int = ROUNDS) -> dict[str, Any]:
    """Measure the workloads (all, or those named) and return a report that JSON can hold.

    Raises:
        MismatchError: see `measure`.
        ValueError: an unknown workload.
    """
    unknown = set(names) - {workload.name for workload in WORKLOADS}
    if unknown:
        known = ", ".join(workload.name for workload in WORKLOADS)
        raise ValueError(f"unknown workloads {sorted(unknown)}; there are {known}")
    measurements = []
    for workload in WORKLOADS:
        counts = workload.cpu_counts if device.type == "cpu" else workload.counts
        if not counts or (names and workload.name not in names):
            continue
        buffers = workload.buffers(device)
        measurements += [measure(workload, count, device, buffers, rounds) for count in counts]
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": f"multigather bench --device {device.type} --rounds {rounds} --json",
        "device": str(device),
        "environment": environment.facts(),
        "measurements": [asdict(each) for each in measurements],
    }


def geometric_mean(values: Sequence[float]) -> float:
    """Geometric mean of positive numbers."""
    return math.exp(sum(map(math.log, values)) / len(values))


def show(report: dict[str, Any], console: Console) -> None:
    """Print a report as a table, with the geometric mean of the speed-ups."""
    names = [name for name, _ in WAYS]
    for kind, title in (("host_us", "time per call"), ("gpu_us", "GPU time per call")):
        rows = [each for each in report["measurements"] if each[kind]]
        if not rows:
            continue
        if kind == "host_us" and report["device"] != "cpu":
            title = "host time per call"
        table = Table(title=f"{title}, µs ({report['device']})")
        for column in ("workload", "m", *names, *(f"x {name}" for name in names[1:])):
            table.add_column(
                Text(column), justify="left" if column == "workload" else "right", no_wrap=True
            )
        ratios: dict[str, list[float]] = {name: [] for name in names[1:]}
        for each in rows:
            times = each[kind]
            for name in names[1:]:
                ratios[name].append(times[name] / times[names[0]])
            table.add_row(
                each["workload"],
                str(each["count"]),
                *(f"{times[name]:.1f}" for name in names),
                *(f"{ratios[name][-1]:.2f}" for name in names[1:]),
            )
        console.print(table)
        for name in names[1:]:
            mean, worst = geometric_mean(ratios[name]), min(ratios[name])
            line = f"against {name}: geometric mean {mean:.2f}x, lowest {worst:.2f}x"
            console.print(line, markup=False)


def main(device: str | None, names: Sequence[str], rounds: int, as_json: bool) -> int:
    """The command: measure, print, return the exit status."""
    # A table that is piped into a file is not cut to the 80 columns that rich then assumes.
    console = Console() if sys.stdout.isatty() else Console(width=110)
    wanted = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if wanted.type == "cuda" and wanted.index is None:
        wanted = torch.device("cuda", torch.cuda.current_device())
    try:
        report = run(wanted, names, rounds)
    except (MismatchError, ValueError) as error:
        Console(stderr=True).print(f"multigather bench: {error}", markup=False)
        return 1
    if as_json:
        print(json.dumps(report, indent=1))
    else:
        show(report, console)
    return 0
