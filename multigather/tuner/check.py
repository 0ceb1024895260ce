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
from .measure import Bench, Candidate, Measurement, OutOfMemory, candidates_for, site_of


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
    """

    regrets: list[Regret]
    skipped: list[str]

    @property
    def median(self) -> float:
        """Of the shares; 0 without any."""
        return statistics.median(each.share for each in self.regrets) if self.regrets else 0.0

    @property
    def worst(self) -> float:
        """Of the shares; 0 without any."""
        return max((each.share for each in self.regrets), default=0.0)

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
    compiling.compile_ahead(requests, names, reporter)
    phase = reporter.phase("measuring gathers", len(requests))
    for done, request in enumerate(requests, 1):
        pick = dispatch.select(_rounded(request), None, site_of(request)).picks[0]
        choice = Candidate(pick.backend, pick.config)
        candidates = candidates_for(request, names)[0]
        heuristic = _heuristic(request, {each.backend.name for each in candidates})
        candidates += [each for each in (choice, heuristic) if each not in candidates]
        try:
            measurement = Bench(request).measure(candidates, keep=(choice, heuristic))
        except OutOfMemory as error:
            skipped.append(f"{shapes.summary(request)}: {error}")
        else:
            log.write(measurement.as_dict())
            regrets.append(_regret(measurement, choice, pick.origin, heuristic))
        if request.device.type == "cuda":
            torch.cuda.empty_cache()
        phase.done(done)
    return Verdict(regrets, skipped)


def check_log(measurements: Sequence[Measurement], winners: store.Winners) -> Verdict:
    """What the choices of some tuning files cost in gathers that were measured before.

    For machines without the device: nothing is run. Where no entry is near, the heuristic chooses.
    """
    regrets = []
    for measurement in measurements:
        names = {candidate.backend.name for candidate in measurement.timings}
        heuristic = choice = _heuristic(measurement.request, names)
        origin = "the heuristic"
        found = winners.find(key_of(measurement.request), dispatch.refusal_of)
        if found is not None:
            name, knobs = next(each for each in found.choices if each[0] in names)
            backend = dispatch.backend_named(name)
            choice = Candidate(backend, backend.config_from(knobs))
            origin = found.origin
        regrets.append(_regret(measurement, choice, origin, heuristic))
    return Verdict(regrets, [])


def _rounded(request: Request) -> Request:
    """The gather that a program's choice is made for: the nearest power of two of indices."""
    return request.with_count(1 << key_of(request).count)


def _heuristic(request: Request, names: set[str]) -> Candidate:
    """What the heuristic would choose among these backends."""
    choices = dispatch.heuristic(_rounded(request)).items()
    name, (config, _) = next(choice for choice in choices if choice[0] in names)
    return Candidate(dispatch.backend_named(name), config)


def _regret(
    measurement: Measurement, choice: Candidate, origin: str, heuristic: Candidate
) -> Regret:
    timings, request = measurement.timings, measurement.request
    best, torch_best = measurement.best(), measurement.best("torch")
    if best is None or choice not in timings:
        reasons = "; ".join(measurement.failed.values()) or "it was not measured"
        raise RuntimeError(f"{shapes.summary(request)}: no time of the choice, {choice}: {reasons}")
    return Regret(
        gather=shapes.summary(request),
        key=key_of(request).label,
        choice=choice.short(),
        origin=origin,
        choice_us=timings[choice].us,
        best=best.short(),
        best_us=timings[best].us,
        heuristic_us=timings[heuristic].us if heuristic in timings else None,
        torch_us=timings[torch_best].us if torch_best else None,
        failed={str(candidate): reason for candidate, reason in measurement.failed.items()},
    )
