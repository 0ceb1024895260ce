"""How fast the candidates of one gather are, side by side.

On a GPU a candidate's time is that of a replayed CUDA graph of many calls, divided by their number:
launched one by one, a small gather would show the host's time. Every call of a graph has indices of
its own and the outputs rotate, and before each replay the L2 cache is overwritten, outside the
timed region, so that rows come from memory. On a CPU it is the wall time per call.

Candidates run in interleaved rounds, because a GPU's clocks and its other users change over time;
a candidate's time is the median over the rounds, its spread the median absolute deviation.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from .. import dispatch
from ..backends.base import Backend, Config
from ..cache import shape
from ..cache.key import key_of
from ..cache.model import config_of_text, config_text
from ..request import Field, Request, Site

ROUNDS = 7
# After one replay, a candidate slower than this times its backend's fastest is out.
SCREEN = 1.15
# And one this much slower is not even given a graph of its own, judged by a single call.
HOPELESS = 2.5
HOPELESS_US = 200.0
# Calls per graph. A graph's launch costs about 6 microseconds, the same for all candidates; over 64
# calls of 1.5 microseconds or more it hides at most 6 % of their differences. Slow candidates need
# fewer: the torch backend takes 4 ms for 64 buffers.
FEWEST_CALLS, MOST_CALLS = 4, 64
GRAPH_US = 20_000.0
# Rounds of a backend that is this many times slower than another: nobody will choose it.
SLOW = 3.0
SLOW_ROUNDS = 3
GRAPH_BYTES = 128 * 2**20
OUTPUT_SETS = 8
OUTPUT_BYTES = 256 * 2**20
POISON = 0xA5
CPU_SECONDS = 0.01
HOST_BATCH_US = 2000.0


@dataclass(frozen=True)
class Candidate:
    """A backend with a config."""

    backend: Backend
    config: Config

    def __str__(self) -> str:
        return f"{self.backend.name}: {self.config.describe()}"

    def text(self) -> str:
        """As a name that a program can read, see `from_dict`."""
        return f"{self.backend.name}: {config_text(asdict(self.config))}"

    def short(self) -> str:
        """In a few words, for tables."""
        return f"{self.backend.name} {short_config(asdict(self.config))}"


@dataclass(frozen=True)
class Timing:
    """What was measured of a candidate.

    Attributes:
        us: microseconds per call, median over the rounds.
        spread: median absolute deviation of the rounds, microseconds.
        rounds: number of rounds; 1 if it was out after the first.
    """

    us: float
    spread: float
    rounds: int


@dataclass(frozen=True)
class Measurement:
    """All candidates of one gather.

    Attributes:
        request: the gather.
        timings: those that ran and gave the right bytes.
        failed: the others, with the reason.
    """

    request: Request
    timings: dict[Candidate, Timing]
    failed: dict[Candidate, str]

    def best(self, backend: str | None = None) -> Candidate | None:
        """The fastest of one backend, or of all."""
        found = [
            candidate
            for candidate in self.timings
            if backend in (None, candidate.backend.name) and self.timings[candidate].rounds > 1
        ]
        return min(found, key=lambda candidate: self.timings[candidate].us, default=None)

    def as_dict(self) -> dict[str, Any]:
        """For JSON: every candidate's time, spread and rounds."""
        return {
            "key": key_of(self.request).label,
            "gather": shape.to_text(self.request),
            "timings": {
                candidate.text(): [timing.us, timing.spread, timing.rounds]
                for candidate, timing in self.timings.items()
            },
            "failed": {candidate.text(): reason for candidate, reason in self.failed.items()},
        }


def short_config(knobs: dict[str, Any]) -> str:
    """Knobs in a few words: values in order, a flag by its name where it is set."""
    return " ".join(
        name if value is True else str(value) for name, value in knobs.items() if value is not False
    )


def from_dict(content: dict[str, Any], device: torch.device) -> Measurement:
    """What `Measurement.as_dict` gave.

    Raises:
        ValueError: it is something else; the message names the part.
    """
    try:
        request = shape.from_text(content["gather"], device)
        timings = {
            _candidate_of(text): Timing(*timing) for text, timing in content["timings"].items()
        }
        failed = {_candidate_of(text): reason for text, reason in content["failed"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"it is no line of a timing log: {error!r}") from None
    return Measurement(request, timings, failed)


def _candidate_of(text: str) -> Candidate:
    """The candidate whose text this is."""
    name, _, knobs = text.partition(": ")
    try:
        backend = dispatch.backend_named(name)
    except KeyError:
        raise ValueError(f"there is no backend {name!r}") from None
    return Candidate(backend, backend.config_from(config_of_text(knobs)))


class OutOfMemory(Exception):
    """The buffers of a gather do not fit into the device's memory."""


def candidates_for(
    request: Request, names: Sequence[str] = ()
) -> tuple[list[Candidate], dict[str, str]]:
    """Every config of every backend (or of those named), and why others were left out.

    The heuristic's own choices are always among them.
    """
    found: list[Candidate] = []
    skipped: dict[str, str] = {}
    default = dispatch.heuristic(request)
    for backend in dispatch.BACKENDS:
        if names and backend.name not in names:
            continue
        refusals = backend.why_not(request)
        if refusals:
            skipped[backend.name] = refusals[0].text
            continue
        configs = backend.space()
        if backend.name in default and default[backend.name][0] not in configs:
            configs.append(default[backend.name][0])
        for config in configs:
            reason = backend.illegal(request, config)
            candidate = Candidate(backend, config)
            if reason:
                skipped[str(candidate)] = reason
            else:
                found.append(candidate)
    return found, skipped


def defaults_of(request: Request) -> set[tuple[str, Config]]:
    """The heuristic's choice of every backend: backend and config."""
    return {(name, config) for name, (config, _) in dispatch.heuristic(request).items()}


def site_of(request: Request) -> Site:
    """Names for the buffers of a gather that nobody's call made."""
    numbers = tuple(range(len(request.fields)))
    return Site(0, numbers, tuple(map(str, numbers)))


class Bench:
    """The tensors of one gather, and the timing of its candidates.

    Args:
        request: the gather.
        seed: of the indices.

    Raises:
        OutOfMemory: its buffers do not fit.
    """

    def __init__(self, request: Request, seed: int = 0) -> None:
        self.request = request
        self.device = request.device
        self.on_gpu = request.device.type == "cuda"
        count = request.count
        call_bytes = max(request.row_bytes * count, 1)
        sets = max(FEWEST_CALLS, min(MOST_CALLS, GRAPH_BYTES // call_bytes)) if self.on_gpu else 8
        outputs = max(2, min(OUTPUT_SETS, OUTPUT_BYTES // call_bytes))
        self._check_memory(outputs * call_bytes + 8 * count * sets)
        generator = torch.Generator(self.device).manual_seed(seed)
        try:
            self.sources = [_table(field, self.device, generator) for field in request.fields]
            rows = min((field.rows for field in request.fields), default=1)
            self.indices = [
                torch.randint(
                    max(rows, 1), (count,), dtype=torch.int64, device=self.device,
                    generator=generator,
                ).to(request.index_dtype)
                for _ in range(sets)
            ]  # fmt: skip
            self.outs = [
                [
                    torch.empty((count, *field.row_shape), dtype=field.dtype, device=self.device)
                    for field in request.fields
                ]
                for _ in range(outputs if self.on_gpu else 0)
            ]
            self._evict = None
            if self.on_gpu:
                properties = torch.cuda.get_device_properties(self.device)
                size = 2 * getattr(properties, "L2_cache_size", 64 * 2**20)
                self._evict = torch.empty(size, dtype=torch.uint8, device=self.device)
        except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
            raise OutOfMemory(str(error).splitlines()[0]) from None

    def _check_memory(self, needed: int) -> None:
        needed += sum(_table_bytes(field) for field in self.request.fields)
        if not self.on_gpu:
            return
        free, _ = torch.cuda.mem_get_info(self.device)
        free += torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        if needed > 0.9 * free:
            raise OutOfMemory(f"it needs {needed >> 20} MiB and {free >> 20} MiB are free")

    def measure(
        self,
        candidates: Iterable[Candidate],
        keep: Iterable[Candidate] = (),
        rounds: int = ROUNDS,
        deadline: float | None = None,
    ) -> Measurement:
        """Check and time candidates.

        Args:
            candidates: in the order to begin with them.
            keep: those that are never out early.
            rounds: of the finalists.
            deadline: value of `time.monotonic` after which none but the first is begun.
        """
        kept = set(keep)
        candidates = list(candidates)
        expected = [_rows_of(source, self.indices[0]) for source in self.sources]
        timings: dict[Candidate, Timing] = {}
        failed: dict[Candidate, str] = {}
        timers: dict[Candidate, Callable[[], float]] = {}
        fastest: dict[str, float] = {}
        single: dict[str, float] = {}
        for number, candidate in enumerate(candidates):
            if number and deadline is not None and time.monotonic() > deadline:
                break
            try:
                run = self._runner(candidate)
                us = self._checked(run, expected)
                name = candidate.backend.name
                single[name] = min(us, single.get(name, us))
                if us > (limit := max(HOPELESS * single[name], HOPELESS_US)):
                    # One call alone may have waited for the host: of 430 gathers, 135 candidates.
                    again = functools.partial(run, 0)
                    us = min(us, *(self._once(again)[0] for _ in range(3)))
                if us > limit and candidate not in kept:
                    timings[candidate] = Timing(round(us, 3), 0.0, 1)
                    continue
                timer = self._timer(run, us)
                us = timer()
            except Exception as error:
                if "CUDA error" in str(error):  # nothing works in this process any more
                    raise
                failed[candidate] = _reason(error)
                continue
            timings[candidate] = Timing(round(us, 3), 0.0, 1)
            fastest[name] = min(us, fastest.get(name, us))
            timers[candidate] = timer
        finalists = [
            candidate
            for candidate in timers
            if candidate in kept
            or timings[candidate].us <= SCREEN * fastest[candidate.backend.name]
        ]
        times: dict[Candidate, list[float]] = {candidate: [] for candidate in finalists}
        for turn in range(rounds):
            shift = turn % max(len(finalists), 1)
            for candidate in finalists[shift:] + finalists[:shift]:
                if turn < SLOW_ROUNDS or timings[candidate].us < SLOW * min(fastest.values()):
                    times[candidate].append(timers[candidate]())
        for candidate, each in times.items():
            median = statistics.median(each)
            spread = statistics.median(abs(us - median) for us in each)
            timings[candidate] = Timing(round(median, 3), round(spread, 3), len(each))
        return Measurement(self.request, timings, failed)

    def _runner(self, candidate: Candidate) -> Callable[[int], Sequence[torch.Tensor]]:
        """A function that makes call number k: on a GPU into outputs that are there already.

        On a CPU making the outputs belongs to the time, as it does in a program.
        """
        request = self.request
        runner = candidate.backend.prepare(request, candidate.config, site_of(request))
        size = torch.Size((request.count,))

        def run(call: int) -> Sequence[torch.Tensor]:
            indices = self.indices[call % len(self.indices)]
            outs = self.outs[call % len(self.outs)] if self.outs else None
            return runner(indices, size, self.sources, outs)

        return run

    def _checked(
        self, run: Callable[[int], Sequence[torch.Tensor]], expected: Sequence[torch.Tensor]
    ) -> float:
        """Make one call and compare every byte; return its time in microseconds."""
        for out in run(0):
            out.reshape(-1).view(torch.uint8).fill_(POISON)
        us, results = self._once(lambda: run(0))
        for number, (out, wanted) in enumerate(zip(results, expected, strict=True)):
            if not torch.equal(out.reshape(-1).view(torch.uint8), wanted):
                raise ValueError(f"it gathers wrong bytes from buffer {number}")
        return us

    def _once(
        self, call: Callable[[], Sequence[torch.Tensor]]
    ) -> tuple[float, Sequence[torch.Tensor]]:
        if not self.on_gpu:
            start = time.perf_counter()
            results = call()
            return (time.perf_counter() - start) * 1e6, results
        start_event, end_event = _events()
        start_event.record()
        results = call()
        end_event.record()
        end_event.synchronize()
        return float(start_event.elapsed_time(end_event)) * 1e3, results

    def _timer(self, run: Callable[[int], object], us: float) -> Callable[[], float]:
        """A function that measures the time per call, in microseconds; one took about ``us``."""
        if not self.on_gpu:
            return self._wall_timer(run)
        calls = min(len(self.indices), max(FEWEST_CALLS, int(GRAPH_US / us)))
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            # Thread-local: what other threads of the program do meanwhile is their business.
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                for call in range(calls):
                    run(call)
            finally:
                graph.capture_end()
        graph.replay()

        def timed() -> float:
            start, end = _events()
            assert self._evict is not None
            self._evict.zero_()
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            return float(start.elapsed_time(end)) * 1e3 / calls

        return timed

    def _wall_timer(self, run: Callable[[int], object]) -> Callable[[], float]:
        def timed(calls: int) -> float:
            start = time.perf_counter()
            for call in range(calls):
                run(call)
            return (time.perf_counter() - start) / calls * 1e6

        calls = max(1, min(1000, int(CPU_SECONDS * 1e6 / timed(2))))
        return lambda: timed(calls)

    def host_us(self, gather: Callable[..., object], backend: str) -> float:
        """Microseconds of host time of ``gather`` itself, new outputs included."""

        def batch(calls: int) -> float:
            # Few calls, so that the launch queue never fills and makes the host wait for the GPU.
            torch.cuda.synchronize(self.device)
            start = time.perf_counter()
            for call in range(calls):
                indices = self.indices[call % len(self.indices)]
                gather(indices, *self.sources, bounds=self.request.bounds, backend=backend)
            return (time.perf_counter() - start) / calls * 1e6

        most = max(1, OUTPUT_BYTES // max(self.request.row_bytes * self.request.count, 1))
        batch(1)
        calls = max(1, min(20, most, int(HOST_BATCH_US / batch(1))))
        return round(statistics.median(batch(calls) for _ in range(5)), 2)


def _events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    return (
        torch.cuda.Event(enable_timing=True),  # type: ignore[no-untyped-call]
        torch.cuda.Event(enable_timing=True),  # type: ignore[no-untyped-call]
    )


def _table_bytes(field: Field) -> int:
    return max(field.rows - 1, 0) * field.row_stride_bytes + field.row_bytes + 16


def _table(field: Field, device: torch.device, generator: torch.Generator) -> torch.Tensor:
    """A buffer of random bytes, laid out as the field says."""
    memory = torch.empty(_table_bytes(field), dtype=torch.uint8, device=device)
    memory.random_(0, 256, generator=generator)
    # The allocation is aligned to 16 bytes or more; an alignment of 4 is at byte 4 of it.
    start = field.alignment % 16
    size = field.dtype.itemsize
    usable = memory[start : start + (len(memory) - start) // size * size].view(field.dtype)
    strides = [1]
    for length in reversed(field.row_shape[1:]):
        strides.insert(0, strides[0] * length)
    row_stride = field.row_stride_bytes // size
    return usable.as_strided(
        (field.rows, *field.row_shape), (row_stride, *(strides if field.row_shape else ()))
    )


def _rows_of(source: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """The bytes of the rows, by torch's own indexing of bytes."""
    data = source.view(torch.uint8) if source.dim() > 1 else source[:, None].view(torch.uint8)
    return data[indices.to(torch.int64)].reshape(-1)


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"
