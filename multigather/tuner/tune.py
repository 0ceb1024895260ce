"""``multigather tune``: measure key after key, and publish each winner at once."""

from __future__ import annotations

import datetime
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from .. import api, dispatch
from ..cache import store
from ..cache.device import device_of
from ..cache.key import Key, key_of
from ..cache.model import Entry, Tuning, merge, parse
from ..request import Request
from . import compiling
from .console import Log, Reporter
from .decide import NothingMeasured, entry_of, environment_facts, publish
from .measure import Bench, Measurement, OutOfMemory, candidates_for, defaults_of


@dataclass
class Summary:
    """What a tune did.

    Attributes:
        file: where the winners are.
        keys: number of keys measured.
        candidates: candidates timed, over all keys.
        failures: candidates that failed, over all keys.
        present: keys that were there already and were left.
        left: keys that the time budget left out.
        skipped: what was not measured at all, and why.
        changed: keys whose pick is not the heuristic's.
        seconds: wall time.
    """

    file: str
    keys: int = 0
    candidates: int = 0
    failures: int = 0
    present: int = 0
    left: int = 0
    skipped: list[str] = field(default_factory=list)
    changed: int = 0
    seconds: float = 0.0


def grouped(requests: Sequence[Request]) -> dict[Key, list[Request]]:
    """The gathers by key, in an order that is the same each time.

    Shuffled, so that a run which is cut short has measured a bit of everything.
    """
    groups: dict[Key, list[Request]] = {}
    for request in requests:
        groups.setdefault(key_of(request), []).append(request)
    order = sorted(groups)
    random.Random(0).shuffle(order)
    return {key: groups[key] for key in order}


def wanted(
    groups: dict[Key, list[Request]],
    names: Sequence[str],
    file: Path,
    retune: str,
    since: datetime.datetime | None = None,
) -> list[Key]:
    """The keys to measure: all, those without an entry, or also those with a stale one.

    Args:
        groups: from `grouped`.
        names: backends asked for; none means every backend that can run.
        file: what is there already.
        retune: "missing", "stale" or "all".
        since: keys that were measured since then count as present, whatever ``retune`` says.
    """
    try:
        entries = parse(store.read_data(file))
    except (OSError, ValueError):
        return list(groups)
    present = entries.keys
    now = environment_facts()

    def is_missing(key: Key, requests: list[Request]) -> bool:
        entry = present.get(key)
        if entry is None:
            return True
        expected = {each.backend.name for each in candidates_for(requests[0], names)[0]}
        measured = [entry.backends[name] for name in expected & set(entry.backends)]
        if len(measured) < len(expected) or any(
            dispatch.refusal_of(name, entry.backends[name]) for name in expected
        ):
            return True
        if since is not None and all(each.at >= since for each in measured):
            return False
        if retune == "stale":
            return any(entries.environments.get(each.environment) != now for each in measured)
        return retune == "all"

    return [key for key, requests in groups.items() if is_missing(key, requests)]


def tune(
    device: torch.device,
    groups: dict[Key, list[Request]],
    keys: Sequence[Key],
    names: tuple[str, ...],
    file: Path,
    reporter: Reporter,
    budget: float | None = None,
    log: Log | None = None,
) -> Summary:
    """Measure keys and publish every one in ``file``.

    Args:
        device: where.
        groups: the gathers of each key.
        keys: those to measure.
        names: backends asked for; none means every backend that can run.
        file: the tuning file.
        reporter: told of progress.
        budget: seconds after which no further key is begun; None for no limit.
        log: takes every timing.

    Raises:
        WriteError: the file cannot be written.
    """
    start = time.monotonic()
    kind = device_of(device)
    assert kind is not None
    summary = Summary(str(file), present=len(groups) - len(keys))
    facts = environment_facts()
    compiling.compile_ahead([each for key in keys for each in groups[key]], names, reporter)
    phase = reporter.phase("measuring keys", len(keys))
    for done, key in enumerate(keys):
        if budget is not None and time.monotonic() - start > budget:
            summary.left = len(keys) - done
            reporter.say(f"time budget of {budget:g} s spent, {summary.left} keys left out")
            break
        entry = _measure_key(key, groups[key], names, facts, summary, log or Log(None))
        if entry is not None:
            publish(file, kind, facts, entry)
            summary.keys += 1
        phase.done(done + 1)
    # Choices that programs made so far were made without these entries.
    api.forget()
    summary.seconds = round(time.monotonic() - start, 1)
    return summary


def _measure_key(
    key: Key,
    requests: list[Request],
    names: tuple[str, ...],
    facts: dict[str, Any],
    summary: Summary,
    log: Log,
) -> Entry | None:
    measurements: list[Measurement] = []
    hosts: dict[str, float] = {}
    for request in requests:
        candidates, skipped = candidates_for(request, names)
        for what, reason in skipped.items():
            text = f"{what}: {reason}"
            if text not in summary.skipped:
                summary.skipped.append(text)
        defaults = defaults_of(request)
        keep = [each for each in candidates if (each.backend.name, each.config) in defaults]
        try:
            bench = Bench(request)
        except OutOfMemory as error:
            summary.skipped.append(f"{key.label}: {error}")
            continue
        measurement = bench.measure(candidates, keep)
        summary.candidates += len(candidates)
        summary.failures += len(measurement.failed)
        measurements.append(measurement)
        log.write(measurement.as_dict())
        if request.device.type == "cuda" and not hosts:
            for name in {each.backend.name for each in measurement.timings}:
                hosts[name] = bench.host_us(api.gather, name)
        del bench
    if request.device.type == "cuda":
        torch.cuda.empty_cache()
    if not measurements:
        return None
    try:
        entry = entry_of(key, measurements, hosts, facts)
    except NothingMeasured as error:
        summary.skipped.append(str(error))
        return None
    default = entry.default
    picked = entry.pick, entry.backends[entry.pick].config
    if default and picked != (default.backend, default.config):
        summary.changed += 1
    return entry


class Run:
    """Marks in a small file that a tune of keys which have entries already is under way.

    Args:
        file: the tuning file.
    """

    def __init__(self, file: Path) -> None:
        self._path = file.with_name(f".{file.name}.run")

    def resumed(self) -> tuple[datetime.datetime, str] | None:
        """When the run that was not finished began, and its ``retune``; None if there is none."""
        try:
            content = json.loads(self._path.read_text())
            return datetime.datetime.fromisoformat(content["started"]), str(content["retune"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def begin(self, retune: str) -> None:
        """Remember that a run begins."""
        started = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
        content = {"started": started.isoformat(), "retune": retune}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps(content) + "\n")
        except OSError as error:
            raise store.WriteError(f"{self._path} cannot be written: {error}") from None

    def end(self) -> None:
        """Forget it: the run is complete."""
        self._path.unlink(missing_ok=True)


def merged(files: Sequence[Path]) -> Tuning:
    """The entries of several files of one device together.

    Raises:
        ValueError: a file is no tuning file, or of another device than the first; it is named.
    """
    result: Tuning | None = None
    for file in files:
        try:
            tuning = parse(store.read_data(file))
            result = tuning if result is None else merge(result, tuning)
        except (OSError, ValueError) as error:
            raise ValueError(f"{file}: {error}") from None
    if result is None:
        raise ValueError("no files to merge")
    return result
