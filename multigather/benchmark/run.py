"""Check every way bit for bit, then time all of them.

On a GPU two times are taken apart: *host*, wall time per call while the GPU never limits, and
*gpu*, per call of a CUDA graph that replays many calls with other indices each. On a CPU there is
one time.
"""

from __future__ import annotations

import datetime
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from .. import environment
from . import sweep
from .timing import Gather, copy_ceiling, graph_timer, host_timer, interleaved
from .ways import COMPILED, OURS, Way
from .workloads import WORKLOADS, Workload

ROUNDS = 21
SWEEP_ROUNDS = 7
INDEX_SETS = 8
# torch.compile takes seconds for every number of buffers and layout; in the series, only here.
COMPILED_BUFFERS = (1, 4, 16)

Say = Callable[[str], None]
Keep = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Measurement:
    """Medians of one workload and count, microseconds per call by way.

    Attributes:
        workload: its name.
        count: number of indices.
        buffers: number of buffers.
        row_bytes: bytes of a row of all buffers together.
        sector_bytes: see `sweep.sector_bytes`.
        host_us: wall time per call.
        gpu_us: GPU time per call, empty on a CPU.
        missing: ways that were not timed, and why.
    """

    workload: str
    count: int
    buffers: int
    row_bytes: int
    sector_bytes: int
    host_us: dict[str, float]
    gpu_us: dict[str, float]
    missing: dict[str, str]

    @property
    def call_bytes(self) -> int:
        """Bytes written by one call."""
        return self.count * self.row_bytes


class MismatchError(RuntimeError):
    """A way gave other bytes than ``b[idx]``, so nothing was timed."""


def measure(
    workload: Workload,
    count: int,
    device: torch.device,
    buffers: Sequence[torch.Tensor],
    ways: Sequence[Way],
    rounds: int = ROUNDS,
) -> Measurement:
    """Check and time the ways on one workload.

    A peer that fails is left out with its reason; multigather must not fail.

    Raises:
        MismatchError: the outputs of a way differ from ``b[idx]`` in a byte.
    """
    sets = workload.index_sets(count, INDEX_SETS, device)
    reference = [_bytes(buffer[sets[0]]) for buffer in buffers]
    call_bytes = count * workload.row_bytes
    gathers: dict[str, Gather] = {}
    missing: dict[str, str] = {}
    no_graph = {way.name: way.no_graph for way in ways if way.no_graph}
    for way in ways:
        reason = way.why_not(buffers)
        if reason:
            missing[way.name] = reason
            continue
        try:
            gather = way.prepare(buffers, sets[0])
            outputs = [_bytes(each) for each in gather(sets[0])]
        except Exception as error:
            if way.name == OURS:
                raise
            missing[way.name] = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
            continue
        for output, wanted in zip(outputs, reference, strict=True):
            if not torch.equal(output, wanted):
                raise MismatchError(
                    f"{way.name} differs from b[idx] on {workload.name}, m = {count}"
                )
        gathers[way.name] = gather
    timers = {name: host_timer(gather, sets, device) for name, gather in gathers.items()}
    host = interleaved(timers, rounds)
    gpu: dict[str, float] = {}
    if device.type == "cuda":
        graphs = {}
        pool = torch.cuda.graph_pool_handle()
        for name, gather in gathers.items():
            if name in no_graph:
                missing[name] = f"in a CUDA graph, {no_graph[name]}"
                continue
            try:
                graphs[name] = graph_timer(gather, sets, call_bytes, pool)
            except Exception as error:
                if name == OURS:
                    raise
                missing[name] = f"in a CUDA graph, {type(error).__name__}: {error}"[:160]
        gpu = interleaved(graphs, rounds)
    return Measurement(
        workload.name,
        count,
        len(buffers),
        workload.row_bytes,
        sweep.sector_bytes(workload, count),
        host,
        gpu,
        missing,
    )


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    # A copy: some ways write into the same outputs each time.
    return tensor.contiguous().view(-1).view(torch.uint8).clone()


def heading(device: torch.device, arguments: Sequence[str]) -> dict[str, Any]:
    """What every report begins with: when, by which command, where and with what."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["multigather", "bench", *arguments]),
        "device": str(device),
        "environment": environment.facts(),
    }


def run(
    device: torch.device,
    names: Sequence[str],
    ways: Sequence[Way],
    rounds: int = ROUNDS,
    sweeping: bool = False,
    arguments: Sequence[str] = (),
    say: Say = lambda text: None,
    keep: Keep = lambda report: None,
) -> dict[str, Any]:
    """Measure the workloads (all, or those named) and return a report that JSON can hold.

    Args:
        device: where.
        names: of `WORKLOADS`; none means all.
        ways: those to time.
        rounds: of a workload's medians.
        sweeping: also measure the series of `sweep`.
        arguments: of the command line, for the report.
        say: told of progress.
        keep: given the report so far after every measurement.

    Raises:
        MismatchError: see `measure`.
        ValueError: an unknown workload.
    """
    unknown = set(names) - {workload.name for workload in WORKLOADS}
    if unknown:
        known = ", ".join(workload.name for workload in WORKLOADS)
        raise ValueError(f"unknown workloads {sorted(unknown)}; there are {known}")
    report: dict[str, Any] = {
        **heading(device, arguments),
        "copy_bytes_per_second": round(copy_ceiling(device)),
        "measurements": [],
    }
    for workload in WORKLOADS:
        counts = workload.cpu_counts if device.type == "cpu" else workload.counts
        if not counts or (names and workload.name not in names):
            continue
        buffers = workload.buffers(device)
        for count in counts:
            say(f"{workload.name}, m = {count}")
            measured = measure(workload, count, device, buffers, ways, rounds)
            report["measurements"].append(asdict(measured))
            keep(report)
        del buffers
    if sweeping:
        report["sweep"] = {}
        for name in sweep.SERIES:
            series = report["sweep"][name] = []
            for found in _series(name, device, ways, say):
                series.append(asdict(found))
                keep(report)
    return report


def _series(
    name: str, device: torch.device, ways: Sequence[Way], say: Say
) -> Iterator[Measurement]:
    buffers: list[torch.Tensor] = []
    made_for = None
    for workload in sweep.series(name, device):
        say(f"sweep over {name}: m = {workload.counts[0]}, {workload.row_bytes} bytes a row")
        if made_for != (workload.rows, workload.fields):
            buffers.clear()
            buffers.extend(workload.buffers(device))
            made_for = workload.rows, workload.fields
        count = workload.counts[0]
        compiling = name == "buffers" and len(buffers) in COMPILED_BUFFERS
        some = [way for way in ways if compiling or way.name not in COMPILED]
        yield measure(workload, count, device, buffers, some, SWEEP_ROUNDS)
