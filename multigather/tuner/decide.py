"""From times to choices: which config of each backend, which backend, and its entry in a file."""

from __future__ import annotations

import datetime
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from .. import dispatch, environment
from ..cache import shape, store
from ..cache.device import Device
from ..cache.key import Key
from ..cache.model import (
    TIMES_LIMIT,
    Default,
    Entry,
    Measured,
    Tuning,
    config_text,
    environment_name,
)
from .measure import ROUNDS, SCREEN, Candidate, Measurement

# A config or a backend takes the heuristic's place only if it is faster by more than this and by
# more than three times the spread of both. Two runs on an H200 then differed in 46 of 263 choices,
# by at most 4 % of their times; taking the plain minimum they would in 73.
MARGIN = 0.02
SPREADS = 3
# A host that is slower by more than this share is not made up for by the GPU in a small call.
HOST_MARGIN = 0.1


def entry_of(
    key: Key,
    measurements: Sequence[Measurement],
    hosts: dict[str, float],
    facts: dict[str, Any],
) -> Entry:
    """Decide: the best config of each backend, and the backend to use.

    Raises:
        NothingMeasured: no candidate can be chosen.
    """
    times = _combined(measurements)
    if not times:
        reasons = [reason for each in measurements for reason in each.failed.values()]
        raise NothingMeasured(f"{key.label}: no candidate ran: {'; '.join(reasons[:3])}")
    default = dispatch.heuristic(measurements[0].request)
    best: dict[str, Candidate] = {}
    for candidate in sorted(times, key=lambda each: times[each]):
        best.setdefault(candidate.backend.name, candidate)
    for candidate, (us, spread) in times.items():
        name = candidate.backend.name
        fastest_us, fastest_spread = times[best[name]]
        is_default = name in default and default[name][0] == candidate.config
        if is_default and not _clearly(fastest_us, us, fastest_spread + spread):
            best[name] = candidate
    pick = next(name for name in (*default, *best) if name in best)
    incumbent = best[pick]
    for name, candidate in best.items():
        us, spread = times[candidate]
        if (
            us < times[best[pick]][0]
            and _clearly(us, times[incumbent][0], spread + times[incumbent][1])
            and not _costs_more_host_time(hosts, name, incumbent.backend.name, us)
        ):
            pick = name
    now = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
    first = next((name for name in default if name in best), None)
    by_default = Candidate(best[first].backend, default[first][0]) if first else None
    return Entry(
        key=key,
        pick=pick,
        backends={
            name: Measured(
                config=asdict(candidate.config),
                device_us=times[candidate][0],
                spread_us=times[candidate][1],
                host_us=hosts.get(name),
                revision=candidate.backend.revision,
                environment=environment_name(facts),
                at=now,
            )
            for name, candidate in best.items()
        },
        default=Default(
            backend=by_default.backend.name,
            config=asdict(by_default.config),
            device_us=times[by_default][0],
        )
        if by_default in times
        else None,
        times=_all_times(measurements),
        failed={
            str(candidate): reason
            for each in measurements
            for candidate, reason in each.failed.items()
        },
        shapes=[shape.to_text(each.request) for each in measurements],
    )


def _combined(measurements: Sequence[Measurement]) -> dict[Candidate, tuple[float, float]]:
    """Time and spread of each candidate that ran in all gathers of a key: geometric means."""
    result = {}
    for candidate in measurements[0].timings:
        timings = [each.timings.get(candidate) for each in measurements]
        known = [timing for timing in timings if timing is not None]
        if len(known) < len(timings):
            continue
        # One that was out after the first round of every gather has no median worth comparing.
        if all(timing.rounds == 1 for timing in known):
            continue
        us = math.exp(sum(math.log(max(timing.us, 1e-3)) for timing in known) / len(known))
        spread = sum(timing.spread for timing in known) / len(known)
        result[candidate] = (round(us, 3), round(spread, 3))
    return result


def _all_times(measurements: Sequence[Measurement]) -> dict[str, dict[str, float]]:
    """Every config's time by backend, geometric means over the gathers, but for the slow ones."""
    times: dict[str, dict[str, float]] = {}
    for candidate in measurements[0].timings:
        each = [one.timings[candidate].us for one in measurements if candidate in one.timings]
        if len(each) == len(measurements):
            mean = math.exp(sum(math.log(max(us, 1e-3)) for us in each) / len(each))
            text = config_text(asdict(candidate.config))
            times.setdefault(candidate.backend.name, {})[text] = round(mean, 3)
    return {
        name: {text: us for text, us in found.items() if us <= TIMES_LIMIT * min(found.values())}
        for name, found in times.items()
    }


def _clearly(faster_us: float, slower_us: float, spread: float) -> bool:
    """Whether one time beats another by more than the margin and the noise."""
    return faster_us < slower_us - max(MARGIN * slower_us, SPREADS * spread)


def _costs_more_host_time(hosts: dict[str, float], name: str, other: str, us: float) -> bool:
    """Whether a backend would lose on the host what it wins on the GPU, in a call this short."""
    if name not in hosts or other not in hosts or us > hosts[name]:
        return False
    return hosts[name] > (1 + HOST_MARGIN) * hosts[other]


class NothingMeasured(Exception):
    """No candidate of a gather ran and gave the right bytes."""


def environment_facts() -> dict[str, Any]:
    """What a measurement depends on beside the device."""
    versions: dict[str, Any] = {
        name: text
        for name, text in environment.facts().items()
        if name in ("multigather", "python", "torch", "driver")
    }
    versions |= {
        status.name: status.version
        for status in dispatch.backends()
        if status.name != "torch" and status.version
    }
    versions["cuda"] = torch.version.cuda or torch.version.hip or "none"
    versions["measuring"] = {
        "rounds": ROUNDS,
        "screen": SCREEN,
        "margin": MARGIN,
        "spreads": SPREADS,
        "rows": "cold, rotated",
    }
    return versions


def publish(file: Path, device: Device, facts: dict[str, Any], entry: Entry) -> None:
    """Merge one entry into a device's file.

    Raises:
        WriteError: see `store.publish`.
    """
    addition = Tuning(
        schema=1,
        device=device,
        environments={environment_name(facts): facts},
        entries={entry.key.label: entry},
    )
    store.publish(file, addition, fresh=True)
