"""``multigather check``: what the choices cost against the best there is, measured now."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from .. import dispatch
from ..cache import shape, store
from ..cache.key import key_of
from ..request import Request
from . import compiling, shapes
from .console import Log, Reporter
from .measure import Bench, Candidate, OutOfMemory, candidates_for, site_of


@dataclass(frozen=True)
class Regret:
    """One gather.

    Attributes:
        gather: the gather in words.
        key: label of its key.
        choice: backend and config that dispatch chooses.
        origin: why.
        choice_us: time of the choice.
        best: the fastest of all candidates.
        best_us: its time.
        heuristic_us: time of what the heuristic would choose.
        torch_us: time of the torch backend, None if it cannot run.
        failed: candidates that did not run or gave wrong bytes.
    """

    gather: str
    key: str
    choice: str
    origin: str
    choice_us: float
    best: str
    best_us: float
    heuristic_us: float | None
    torch_us: float | None
    failed: dict[str, str]

    @property
    def share(self) -> float:
        """By which share the choice takes longer than the best."""
        return self.choice_us / self.best_us - 1


@dataclass(frozen=True)
class Verdict:
    """All gathers of a check.

    Attributes:
        regrets: one per gather.
        skipped: gathers that could not be measured, with the reason.
        median: of the shares.
        worst: of the shares.
    """

    regrets: list[Regret]
    skipped: list[str]
    median: float
    worst: float

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        rows = [{**asdict(each), "regret": round(each.share, 4)} for each in self.regrets]
        return {
            "median": round(self.median, 4),
            "worst": round(self.worst, 4),
            "gathers": rows,
            "skipped": self.skipped,
        }


def sample(device: torch.device, number: int, seed: int) -> list[Request]:
    """Gathers that were tuned, drawn at random from what dispatch would use on the device."""
    found: dict[str, Request] = {}
    for source in store.winners(device).sources:
        for entry in source.entries.values():
            if entry.shapes and entry.key.label not in found:
                found[entry.key.label] = shape.from_text(entry.shapes[0], device)
    labels = sorted(found)
    return [found[label] for label in random.Random(seed).sample(labels, min(number, len(labels)))]


def check(
    requests: Sequence[Request], names: tuple[str, ...], reporter: Reporter, log: Log
) -> Verdict:
    """Measure every candidate of each gather beside the choice that dispatch makes."""
    regrets: list[Regret] = []
    skipped: list[str] = []
    if requests and requests[0].device.type == "cuda":
        jobs = compiling.variants(requests, names)
        if jobs:
            compiling.compile_ahead(jobs, reporter.phase("compiling kernels", len(jobs)).done)
    phase = reporter.phase("measuring gathers", len(requests))
    for done, request in enumerate(requests, 1):
        try:
            regrets.append(_regret(request, names, log))
        except OutOfMemory as error:
            skipped.append(f"{shapes.summary(request)}: {error}")
        if request.device.type == "cuda":
            torch.cuda.empty_cache()
        phase.done(done)
    shares = [each.share for each in regrets]
    return Verdict(
        regrets, skipped, statistics.median(shares) if shares else 0.0, max(shares, default=0.0)
    )


def _regret(request: Request, names: tuple[str, ...], log: Log) -> Regret:
    # As a program would: the choice is made for the nearest power of two of indices.
    key = key_of(request)
    asked = request.with_count(1 << key.count)
    picks = dispatch.select(asked, None, site_of(request)).picks
    choice = Candidate(picks[0].backend, picks[0].config)
    backend_name, (config, _) = next(
        (name, each)
        for name, each in dispatch.heuristic(asked).items()
        if name in {candidate.backend.name for candidate in candidates_for(request)[0]}
    )
    heuristic = next(
        Candidate(each, config) for each in dispatch.BACKENDS if each.name == backend_name
    )
    candidates = candidates_for(request, names)[0]
    candidates += [each for each in (choice, heuristic) if each not in candidates]
    measurement = Bench(request).measure(candidates, keep=(choice, heuristic))
    log.write(measurement.as_dict())
    best = measurement.best()
    if best is None or choice not in measurement.timings:
        reasons = "; ".join(measurement.failed.values())
        raise RuntimeError(f"{shapes.summary(request)}: the choice, {choice}, failed: {reasons}")
    torch_best = measurement.best("torch")
    timings = measurement.timings
    return Regret(
        gather=shapes.summary(request),
        key=key.label,
        choice=choice.short(),
        origin=picks[0].origin,
        choice_us=timings[choice].us,
        best=best.short(),
        best_us=timings[best].us,
        heuristic_us=timings[heuristic].us if heuristic in timings else None,
        torch_us=timings[torch_best].us if torch_best else None,
        failed={str(candidate): reason for candidate, reason in measurement.failed.items()},
    )
