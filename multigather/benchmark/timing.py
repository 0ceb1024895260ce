"""Times of several ways to do one thing, side by side.

Every time is taken in interleaved rounds of one process, because only ratios of one run compare:
machines are shared and their clocks move.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

Gather = Callable[[torch.Tensor], Sequence[torch.Tensor]]

ROUND_SECONDS = 0.02
GRAPH_CALLS = 20
QUEUED_CALLS = 50
LARGE_CALL_BYTES = 50_000_000
CEILING_BYTES = {"cuda": 2**30, "cpu": 2**26}


def rounds_of(timers: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """The times of rounds in which each timer runs once.

    The order rotates, for a way inherits the caches and the allocator as the one before left them.
    """
    times: dict[str, list[float]] = {name: [] for name in timers}
    names = list(timers)
    for turn in range(rounds):
        first = turn % max(len(names), 1)
        for name in names[first:] + names[:first]:
            times[name].append(timers[name]())
    return times


def interleaved(timers: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Medians of `rounds_of`."""
    times = rounds_of(timers, rounds)
    return {name: round(statistics.median(each), 3) for name, each in times.items()}


def host_timer(
    gather: Gather, sets: Sequence[torch.Tensor], device: torch.device
) -> Callable[[], float]:
    """Timer of the wall time per call in microseconds, over enough calls to fill a round."""

    def run(calls: int) -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        for call in range(calls):
            gather(sets[call % len(sets)])
        seconds = time.perf_counter() - start
        return seconds / calls * 1e6

    # The driver queues about a thousand launches; a call that had to wait for a place in the queue
    # would show the GPU's time as the host's.
    most = QUEUED_CALLS if device.type == "cuda" else 1000
    run(3)
    calls = max(1, min(most, int(ROUND_SECONDS * 1e6 / run(3))))
    return lambda: run(calls)


def graph_timer(
    gather: Gather, sets: Sequence[torch.Tensor], call_bytes: int, pool: Any = None
) -> Callable[[], float]:
    """Timer of the GPU time per call in microseconds, by replaying a graph of many calls.

    Graphs of one ``pool`` write their outputs to the same memory, so that none is faster for where
    its own happens to lie: on an H200 the same kernel took 2.4 or 2.7 microseconds.
    """
    calls = GRAPH_CALLS if call_bytes < LARGE_CALL_BYTES else 4
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        for indices in sets[:2]:
            gather(indices)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        # Every call has outputs of its own until all are captured.
        outputs = [gather(sets[call % len(sets)]) for call in range(calls)]
    del outputs
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
        return float(start.elapsed_time(end)) * 1e3 / calls

    return run


def copy_ceiling(device: torch.device, rounds: int = 9) -> float:
    """Bytes per second, read and written, of a plain copy of a large tensor."""
    size = CEILING_BYTES[device.type]
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def once() -> float:
        if device.type != "cuda":
            start = time.perf_counter()
            target.copy_(source)
            return time.perf_counter() - start
        begin, end = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        begin.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    once()
    return 2 * size / statistics.median(once() for _ in range(rounds))
