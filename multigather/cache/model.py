"""What a tuning file holds, checked: one JSON file per device.

Imported only where a file is read or written, because pydantic takes its time to import.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Annotated, Any, Literal

from pydantic import (
    AwareDatetime,
    BaseModel,
    ConfigDict,
    NonNegativeFloat,
    PositiveFloat,
    ValidationError,
    model_validator,
)
from pydantic import Field as Constrained

from ..fork import no_fork
from .device import Device
from .key import Key

SCHEMA = 1
# The largest file of a full tune is below a megabyte; more is no tuning file.
MOST_BYTES = 64 * 2**20
# Of a file's text: dicts are broken into lines down to this depth, where longer than this.
DEPTH = 4
# A config this much slower than the fastest is as good as any other that nobody would choose.
TIMES_LIMIT = 2.0
SHORT = 100


class TuningFileError(ValueError):
    """A file is no tuning file that this version can use.

    Attributes:
        newer: it is one of a newer version.
        foreign: it is sound JSON, but something else.
    """

    def __init__(self, text: str, *, newer: bool = False, foreign: bool = False) -> None:
        super().__init__(text)
        self.newer = newer
        self.foreign = foreign


class _Model(BaseModel):
    # Fields that a later version adds survive a rewrite by this one, but for those of a key or a
    # device, which would make it another one.
    model_config = ConfigDict(extra="allow", allow_inf_nan=False)


class Measured(_Model):
    """The fastest config of one backend, and how fast it was.

    Attributes:
        config: knobs by name.
        device_us: microseconds per call: on a GPU its own time, else wall time.
        spread_us: median absolute deviation of the rounds.
        host_us: microseconds of host time per call, on a GPU.
        revision: of the backend's kernel.
        environment: name of one of the file's environments.
        at: when.
    """

    config: dict[str, bool | int | str]
    device_us: PositiveFloat
    spread_us: NonNegativeFloat
    host_us: PositiveFloat | None = None
    revision: int
    environment: str
    at: AwareDatetime


class Default(_Model):
    """What the heuristic would have chosen, measured beside the winners."""

    backend: str
    config: dict[str, bool | int | str]
    device_us: PositiveFloat


class Entry(_Model):
    """The winners for one key, and how fast the others were.

    Attributes:
        key: see `key.Key`.
        pick: the backend to use.
        backends: the best of each backend that could run it.
        default: what the heuristic would have chosen.
        times: microseconds per call of every config, by backend and the config's text; those that
            took more than `TIMES_LIMIT` times the backend's fastest are left out.
        failed: candidates that did not run or gave wrong bytes, with the reason.
        shapes: the gathers that were measured, see `shape`.
    """

    key: Key
    pick: str
    backends: Annotated[dict[str, Measured], Constrained(min_length=1)]
    default: Default | None = None
    times: dict[str, dict[str, PositiveFloat]] = {}
    failed: dict[str, str] = {}
    shapes: list[dict[str, Any]] = []

    @model_validator(mode="after")
    def _pick_was_measured(self) -> Entry:
        if self.pick not in self.backends:
            raise ValueError(f"pick {self.pick!r} is not among the backends measured")
        return self

    def ordered(self) -> list[tuple[str, Measured]]:
        """The backends, the pick first, then from fast to slow."""
        return sorted(
            self.backends.items(), key=lambda item: (item[0] != self.pick, item[1].device_us)
        )


class Tuning(_Model):
    """A tuning file.

    Attributes:
        schema_version: `SCHEMA`.
        device: what was measured on.
        environments: software and method, by a hash of them.
        entries: by the label of their key.
    """

    schema_version: Literal[1] = Constrained(1, alias="schema")
    device: Device
    environments: dict[str, dict[str, Any]] = {}
    entries: dict[str, Entry] = {}
    _rejected: list[str] = []

    @property
    def rejected(self) -> list[str]:
        """Entries of the file that were left out when it was read, with the reason."""
        return self._rejected

    @property
    def keys(self) -> dict[Key, Entry]:
        """The entries by their keys."""
        return {entry.key: entry for entry in self.entries.values()}


def parse(data: bytes) -> Tuning:
    """Read a file's bytes; an entry that is wrong costs only itself.

    Raises:
        TuningFileError: the bytes are no tuning file of this version.
    """
    if len(data) > MOST_BYTES:
        raise TuningFileError(f"it has {len(data)} bytes, a tuning file at most {MOST_BYTES}")
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise TuningFileError(f"it is not JSON: {error}") from None
    version = content.get("schema") if isinstance(content, dict) else None
    if type(version) is not int:
        raise TuningFileError("it is JSON, but no tuning file", foreign=True)
    if version > SCHEMA:
        raise TuningFileError(
            f"it has schema {version} and this version of multigather reads {SCHEMA}; "
            "update multigather",
            newer=True,
        )
    entries = content.pop("entries", None)
    if not isinstance(entries, dict):
        raise TuningFileError("it has no entries", foreign=True)
    with no_fork:
        return _checked(content, entries)


def _checked(content: Any, entries: dict[str, Any]) -> Tuning:
    """`parse` once the file is seen to be a tuning file of a known schema."""
    try:
        tuning = Tuning.model_validate(content)
    except ValidationError as error:
        raise TuningFileError(_text(error), foreign=True) from None
    for label, raw in entries.items():
        try:
            entry = Entry.model_validate(raw)
            if entry.key.label != label:
                raise ValueError(f"its key is that of {entry.key.label}")
        except (ValueError, TypeError, RecursionError) as error:
            text = _text(error) if isinstance(error, ValidationError) else str(error)
            tuning.rejected.append(f"{label[:80]}: {text}")
        else:
            tuning.entries[label] = entry
    return tuning


def render(tuning: Tuning) -> str:
    """The text of a file, the same whatever the order in which entries came."""
    content = tuning.model_dump(mode="json", by_alias=True, exclude_none=True, exclude={"entries"})
    used = {m.environment for entry in tuning.entries.values() for m in entry.backends.values()}
    environments = {name: tuning.environments[name] for name in used & set(tuning.environments)}
    content["environments"] = dict(sorted(environments.items()))
    ordered = sorted(tuning.entries.values(), key=lambda entry: entry.key)
    content["entries"] = {
        entry.key.label: entry.model_dump(mode="json", exclude_none=True) for entry in ordered
    }
    for entry in content["entries"].values():
        entry["backends"] = dict(sorted(entry["backends"].items()))
        entry["times"] = {
            name: dict(sorted(times.items(), key=lambda item: (item[1], item[0])))
            for name, times in sorted(entry["times"].items())
        }
        entry["failed"] = dict(sorted(entry["failed"].items()))
    return _dump(content, 0) + "\n"


def _dump(value: Any, depth: int) -> str:
    """JSON with a line per backend of an entry: short enough to read, and to compare by line."""
    line = json.dumps(value)
    if not isinstance(value, dict) or depth >= DEPTH or len(line) <= SHORT:
        return line
    indent = " " * (depth + 1)
    items = [
        f"{indent}{json.dumps(name)}: {_dump(each, depth + 1)}" for name, each in value.items()
    ]
    return "{\n" + ",\n".join(items) + "\n" + " " * depth + "}"


def merge(older: Tuning, newer: Tuning) -> Tuning:
    """Both together; of one backend under one key the higher kernel revision, then the later.

    What one of them lacks is kept from the other: tuning again without CuPy drops nothing.

    Raises:
        TuningFileError: they are of different devices.
    """
    if older.device != newer.device:
        raise TuningFileError(
            f"it is for {_device_text(older.device)}, not for {_device_text(newer.device)}"
        )
    entries = {**older.entries, **newer.entries}
    for label in older.entries.keys() & newer.entries.keys():
        entries[label] = _merged_entry(older.entries[label], newer.entries[label])
    environments = {**older.environments, **newer.environments}
    return older.model_copy(update={"entries": entries, "environments": environments})


def _merged_entry(one: Entry, other: Entry) -> Entry:
    older, newer = sorted((one, other), key=_time_of)
    backends, times = dict(older.backends), dict(older.times)
    for name, measured in newer.backends.items():
        present = backends.get(name)
        if present is None or (present.revision, present.at) <= (measured.revision, measured.at):
            backends[name] = measured
            times[name] = newer.times.get(name, {})
    # The newer pick stands, for its backends were measured side by side; but a backend that was not
    # there then keeps the place that it had.
    pick = older.pick if older.pick not in newer.backends else newer.pick
    default = newer.default or older.default
    return newer.model_copy(
        update={"backends": backends, "times": times, "pick": pick, "default": default}
    )


def not_before(older: Tuning, newer: Tuning) -> Tuning:
    """The newer entries, none dated before the one that it replaces."""
    entries = dict(newer.entries)
    for label in older.entries.keys() & newer.entries.keys():
        latest = _time_of(older.entries[label])
        backends = {
            name: measured.model_copy(update={"at": max(measured.at, latest)})
            for name, measured in entries[label].backends.items()
        }
        entries[label] = entries[label].model_copy(update={"backends": backends})
    return newer.model_copy(update={"entries": entries})


def _time_of(entry: Entry) -> Any:
    return max(measured.at for measured in entry.backends.values())


def config_text(knobs: dict[str, Any]) -> str:
    """A config as ``name=value`` words, JSON's values: ``layout=tiles threads=128``."""
    return " ".join(
        f"{name}={value if isinstance(value, str) else json.dumps(value)}"
        for name, value in knobs.items()
    )


def config_of_text(text: str) -> dict[str, bool | int | str]:
    """The knobs that `config_text` wrote; a word that is none becomes a knob that none has."""
    knobs: dict[str, bool | int | str] = {}
    for word in text.split():
        name, _, value = word.partition("=")
        number = int(value) if re.fullmatch(r"-?\d{1,18}", value) else value
        knobs[name] = {"true": True, "false": False}.get(value, number)
    return knobs


def environment_name(facts: dict[str, Any]) -> str:
    """Name of an environment: a hash of its content, so that equal ones meet in a merge."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:8]


def json_schema() -> dict[str, Any]:
    """JSON Schema of a tuning file."""
    return Tuning.model_json_schema(by_alias=True)


def _text(error: ValidationError) -> str:
    first = error.errors()[0]
    place = ".".join(map(str, first["loc"]))
    return f"{place}: {first['msg']}" if place else str(first["msg"])


def _device_text(device: Device) -> str:
    return f"{device.name} with {device.processors} processors"
