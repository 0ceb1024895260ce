"""``multigather demo``: gather from real buffers, check every byte, then show times.

The buffers are a replay buffer filled with transitions of gymnasium's CartPole under a random
policy, and the state that speculative decoding keeps per request, with random values. No time is
shown unless every output was bit-identical to ``buffer[indices]``.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

import multigather
from multigather import environment

ENVIRONMENT = "CartPole-v1"
ENVIRONMENTS_AT_ONCE = 16

BATCHES = 8  # different index sets per workload and count, each checked, rotated while timing
ROUNDS = 9
ROUND_SECONDS = 0.01
NOISY_SPREAD = 2


class DemoError(RuntimeError):
    """The demo cannot run here; the message says what to do."""


@dataclass(frozen=True)
class Workload:
    """Buffers that are gathered by one index.

    Attributes:
        name: for the report.
        buffers: name to tensor.
        counts: the numbers of indices to try.
        unique: whether an index set has no repeats and leaves out row 0.
    """

    name: str
    buffers: dict[str, Tensor]
    counts: tuple[int, ...]
    unique: bool

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The buffers in the order of the call."""
        return tuple(self.buffers.values())

    def index_sets(self, count: int, seed: int) -> list[Tensor]:
        """`BATCHES` sets of ``count`` row numbers, on the device of the buffers."""
        generator = torch.Generator().manual_seed(seed)
        rows = len(self.tensors[0])
        if self.unique:
            orders = (
                torch.randperm(rows - 1, device="cpu", generator=generator) for _ in range(BATCHES)
            )
            drawn = [1 + order[:count] for order in orders]
        else:
            drawn = [
                torch.randint(rows, (count,), device="cpu", generator=generator)
                for _ in range(BATCHES)
            ]
        return [indices.to(self.tensors[0].device) for indices in drawn]


@dataclass(frozen=True)
class Timing:
    """Median microseconds per call; on a GPU its work is included.

    ``spread`` is the slowest round over the fastest, of the call for which that is largest.
    """

    workload: str
    count: int
    gather_us: float
    index_us: float
    index_select_us: float
    spread: float


@dataclass
class Report:
    """What the demo found.

    Attributes:
        device: where the buffers were.
        facts: the machine, see `environment.facts`.
        backends: one line of text per backend.
        picks: workload to the text of `multigather.explain`.
        outputs: number of outputs compared.
        mismatches: one line of text per output that differs.
        timings: empty if there is a mismatch.
    """

    device: str
    facts: dict[str, str]
    backends: list[str]
    picks: dict[str, str] = field(default_factory=dict)
    outputs: int = 0
    mismatches: list[str] = field(default_factory=list)
    timings: list[Timing] = field(default_factory=list)


def collect_transitions(steps: int, seed: int) -> dict[str, Tensor]:
    """Play ``steps`` random actions and return the transitions, one tensor per field, on the CPU.

    Raises:
        DemoError: gymnasium is not installed.
    """
    try:
        import gymnasium
    except ModuleNotFoundError as error:
        raise DemoError(
            "the demo plays a gymnasium environment, and gymnasium is not installed: "
            "run `make demo` in the repository, or install the extra there with "
            "`pip install '.[demo]'` (or gymnasium itself with `pip install gymnasium`)"
        ) from error

    env = gymnasium.make_vec(
        ENVIRONMENT, num_envs=ENVIRONMENTS_AT_ONCE, vectorization_mode="vector_entry_point"
    )
    env.action_space.seed(seed)
    obs, _ = env.reset(seed=seed)
    step = torch.zeros(ENVIRONMENTS_AT_ONCE, dtype=torch.int64, device="cpu")
    ended = torch.zeros(ENVIRONMENTS_AT_ONCE, dtype=torch.bool, device="cpu")
    columns: dict[str, list[Tensor]] = {}
    collected = 0
    while collected < steps:
        action = env.action_space.sample()
        next_obs, reward, terminated, truncated, _ = env.step(action)
        transition = {
            "obs": torch.tensor(obs, device="cpu"),
            "action": torch.tensor(action, device="cpu"),
            "reward": torch.tensor(reward, device="cpu"),
            "next_obs": torch.tensor(next_obs, device="cpu"),
            "terminated": torch.tensor(terminated, device="cpu"),
            "step": step,
        }
        # The step after an episode's end only resets that environment: no transition.
        played = ~ended
        for name, value in transition.items():
            columns.setdefault(name, []).append(value[played])
        collected += int(played.sum())
        ended = transition["terminated"] | torch.tensor(truncated, device="cpu")
        step = torch.where(played, step + 1, 0)
        obs = next_obs
    env.close()
    return {name: torch.cat(parts)[:steps] for name, parts in columns.items()}


def decoding_state(pool: int, seed: int) -> dict[str, Tensor]:
    """Speculative-decoding state of ``pool`` request slots, random values, on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    options: dict[str, Any] = {"device": "cpu", "generator": generator}
    return {
        "topk_p": torch.rand(pool, 1, dtype=torch.float32, **options),
        "topk_index": torch.randint(150_000, (pool, 1), **options),
        "tokens": torch.randint(150_000, (pool,), **options),
        "hidden": torch.randn(pool, 7168, dtype=torch.float32, **options).to(torch.bfloat16),
    }


def workloads(device: torch.device, steps: int, seed: int) -> Iterator[Workload]:
    """The demo's workloads, buffers on ``device``."""
    sources = {
        "replay": (collect_transitions(steps, seed), (32, 256, 1024, 4096), False),
        "decode 257": (decoding_state(257, seed), (1, 48, 256), True),
        "decode 1025": (decoding_state(1025, seed), (1, 48, 512), True),
    }
    for name, (buffers, counts, unique) in sources.items():
        on_device = {key: value.to(device) for key, value in buffers.items()}
        yield Workload(name, on_device, counts, unique)


def difference(got: Tensor, want: Tensor) -> str | None:
    """Say how ``got`` differs from ``want`` in shape, dtype, device or any bit, or return None."""
    for what in ("shape", "dtype", "device"):
        if getattr(got, what) != getattr(want, what):
            return f"{what} is {getattr(got, what)}, must be {getattr(want, what)}"
    unequal = got.contiguous().view(torch.uint8) != want.contiguous().view(torch.uint8)
    if not unequal.any():
        return None
    row = int(unequal.reshape(len(got), -1).any(dim=1).nonzero()[0])
    return f"{int(unequal.sum())} of {unequal.numel()} bytes differ, first in row {row}"


def check_workload(workload: Workload, seed: int, report: Report) -> None:
    """Compare every output of every index set with ``buffer[indices]``; add to ``report``."""
    for count in workload.counts:
        for number, indices in enumerate(workload.index_sets(count, seed)):
            rows = multigather.gather(indices, *workload.tensors)
            for (name, buffer), got in zip(workload.buffers.items(), rows, strict=True):
                report.outputs += 1
                text = difference(got, buffer[indices])
                if text is not None:
                    report.mismatches.append(
                        f"{workload.name}, {count} indices, index set {number}, {name}: {text}"
                    )


def time_workload(workload: Workload, count: int, seed: int) -> Timing:
    """Time the three ways to gather, in interleaved rounds."""
    tensors = workload.tensors
    calls: dict[str, Callable[[Tensor], object]] = {
        "gather_us": lambda indices: multigather.gather(indices, *tensors),
        "index_us": lambda indices: tuple(b[indices] for b in tensors),
        "index_select_us": lambda indices: tuple(b.index_select(0, indices) for b in tensors),
    }
    index_sets = workload.index_sets(count, seed)
    device = index_sets[0].device
    repeats = {}
    for name, call in calls.items():
        _seconds(call, index_sets, 1, device)  # warm up
        one = _seconds(call, index_sets, 1, device)
        repeats[name] = max(1, round(ROUND_SECONDS / one))
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            taken = _seconds(call, index_sets, repeats[name], device)
            samples[name].append(1e6 * taken / (repeats[name] * len(index_sets)))
    medians = {name: round(statistics.median(values), 2) for name, values in samples.items()}
    spread = max(max(values) / min(values) for values in samples.values())
    return Timing(workload.name, count, **medians, spread=round(spread, 2))


def _seconds(
    call: Callable[[Tensor], object], index_sets: list[Tensor], repeats: int, device: torch.device
) -> float:
    _wait_for(device)
    start = time.perf_counter()
    for _ in range(repeats):
        for indices in index_sets:
            call(indices)
    _wait_for(device)
    return time.perf_counter() - start


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def resolve_device(name: str | None) -> torch.device:
    """The device named, or the GPU if torch can use one, else the CPU.

    Raises:
        DemoError: ``name`` is "cuda" and torch can use no GPU.
    """
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise DemoError(
            f"--device cuda: torch {torch.__version__} can use no GPU here; "
            "leave --device out to run on the CPU"
        )
    if name is None:
        name = "cuda" if available else "cpu"
    return torch.device(name, torch.cuda.current_device()) if name == "cuda" else torch.device(name)


def run(device: torch.device, steps: int, seed: int) -> Report:
    """Check all workloads, then time them if every output was right."""
    report = Report(str(device), environment.facts(), [str(s) for s in multigather.backends()])
    built = list(workloads(device, steps, seed))
    for workload in built:
        indices = workload.index_sets(workload.counts[-1], seed)[0]
        report.picks[workload.name] = str(multigather.explain(indices, *workload.tensors))
        check_workload(workload, seed, report)
    multigather.check()
    if not report.mismatches:
        report.timings = [time_workload(w, count, seed) for w in built for count in w.counts]
    return report


def print_report(report: Report) -> None:
    """Print a report for people to read."""
    console = Console(markup=False, highlight=False, soft_wrap=True)
    for subject, text in {**report.facts, "device": report.device}.items():
        console.print(f"{subject:>12}  {text}")
    console.print("\nbackends", style="bold")
    for line in report.backends:
        console.print(f"  {line}")
    for workload, text in report.picks.items():
        console.print(f"\n{workload}", style="bold")
        console.print(text)
    console.print()
    if report.mismatches:
        summary = (
            f"{len(report.mismatches)} of {report.outputs} outputs differ from buffer[indices]"
        )
        console.print(f"{summary}; no times are shown:", style="bold red")
        for line in report.mismatches:
            console.print(f"  {line}")
    else:
        console.print(timing_table(report.timings))
        noisy = sum(timing.spread > NOISY_SPREAD for timing in report.timings)
        if noisy:
            console.print(
                f"{noisy} of {len(report.timings)} rows are noisy: their rounds differ by more "
                f"than a factor of {NOISY_SPREAD}, as when other programs use the machine"
            )
        console.print(
            f"all {report.outputs} outputs bit-identical to buffer[indices]", style="bold"
        )


def timing_table(timings: list[Timing]) -> Table:
    """Times per call, with the factor by which gather is faster than indexing each buffer."""
    table = Table(title="µs per call, median of interleaved rounds, GPU time included")
    table.add_column("workload")
    for heading in ("indices", "gather", "b[idx]", "index_select", "b[idx] / gather"):
        table.add_column(Text(heading), justify="right")
    for timing in timings:
        table.add_row(
            timing.workload,
            str(timing.count),
            f"{timing.gather_us:.1f}",
            f"{timing.index_us:.1f}",
            f"{timing.index_select_us:.1f}",
            f"{timing.index_us / timing.gather_us:.2f}",
        )
    return table


def main(device: str | None, steps: int, seed: int, as_json: bool) -> int:
    """Run the demo and print its report; return the exit status.

    Args:
        device: "cpu", "cuda" or None for the GPU if there is one.
        steps: transitions in the replay buffer.
        seed: of the environment, the policy, the buffers' values and the indices.
        as_json: print the report as one JSON object instead of text.

    Returns:
        0 if every output was bit-identical, 1 if one was not, 2 if the demo cannot run here.
    """
    try:
        report = run(resolve_device(device), steps, seed)
    except DemoError as error:
        print(f"multigather demo: {error}", file=sys.stderr)
        return 2
    if as_json:
        print(json.dumps(dataclasses.asdict(report), indent=2))
    else:
        print_report(report)
    return 1 if report.mismatches else 0
