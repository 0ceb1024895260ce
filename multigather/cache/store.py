"""Where tuning files are, and how they are read, searched and written.

Layers, the first that has an answer wins: files given to `multigather.load_tuning`, the files and
folders in ``MULTIGATHER_TUNING_PATH``, the user's cache folder, and what ships with the package.
Only the user's folder is ever written. Reading takes no lock: a file is replaced as a whole.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import math
import os
import stat
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..fork import no_fork
from .device import Device, device_of
from .key import FARTHEST, Key
from .rules import RULES_FILE

if TYPE_CHECKING:
    from .model import Entry, Measured, Tuning

log = logging.getLogger("multigather")

# An entry this much farther than the nearest has less than 1 % of its weight.
NEGLIGIBLE = 5.0

MODES = ("cached", "off", "strict", "online")
LOCK_SECONDS = 10

# Says why a backend cannot use what was measured for it, or None if it can.
Refuse = Callable[[str, "Measured"], "str | None"]


class WriteError(OSError):
    """A tuning file could not be written; what was there is as it was."""


def mode() -> str:
    """What ``MULTIGATHER_TUNING`` asks for, one of `MODES`.

    Raises:
        ValueError: it is set to something else.
    """
    chosen = os.environ.get("MULTIGATHER_TUNING") or "cached"
    if chosen not in MODES:
        raise ValueError(f"MULTIGATHER_TUNING must be one of {', '.join(MODES)}, got {chosen!r}")
    return chosen


def user_folder() -> Path | None:
    """The folder that tuning writes to; None where the system gives the user none."""
    chosen = os.environ.get("MULTIGATHER_CACHE_DIR")
    if chosen:
        return _path(chosen) / "tuning"
    with no_fork:
        import platformdirs

    try:
        folder = platformdirs.user_cache_path("multigather")
    except RuntimeError:  # no home folder
        return None
    # A service account's home is often "/", and its cache folder then belongs to nobody; older
    # platformdirs answer "~/.cache" where there is no home.
    usable = folder.is_absolute() and folder.parent != Path("/.cache")
    return folder / "tuning" if usable else None


def _path(text: str | os.PathLike[str]) -> Path:
    """A path as the user wrote it; unlike `Path.expanduser`, an unknown ``~`` is no error."""
    return Path(os.path.expanduser(text))  # noqa: PTH111


@dataclass(frozen=True)
class Layer:
    """A place of tuning files.

    Attributes:
        name: for people.
        path: a file or a folder of ``*.json`` files, which need not exist.
    """

    name: str
    path: Any

    def files(self) -> list[Any]:
        """Its files, by name; none where it is missing or cannot be read."""
        try:
            if self.path.is_file():
                return [self.path]
            found = [each for each in self.path.iterdir() if each.name.endswith(".json")]
        except OSError:
            return []
        return sorted(
            (each for each in found if each.name not in (RULES_FILE, SCHEMA_FILE)),
            key=lambda each: str(each.name),
        )


SCHEMA_FILE = "schema.json"
_given: list[Layer] = []


def layers() -> list[Layer]:
    """All layers, in the order of precedence."""
    found = list(_given)
    for text in os.environ.get("MULTIGATHER_TUNING_PATH", "").split(os.pathsep):
        if text:
            found.append(Layer("MULTIGATHER_TUNING_PATH", _path(text)))
    folder = user_folder()
    if folder is not None:
        found.append(Layer("user cache", folder))
    with no_fork:
        found.append(Layer("shipped", resources.files("multigather.tuning_cache")))
    return found


def give(path: str | os.PathLike[str]) -> int:
    """Put a file or a folder before every other layer; return how many entries it has.

    Raises:
        FileNotFoundError: there is none.
        TuningFileError: a file is no tuning file.
    """
    with no_fork:
        from .model import TuningFileError, parse

    layer = Layer("load_tuning", _path(path))
    if not layer.path.exists():
        raise FileNotFoundError(f"path: no tuning file or folder at {path}")
    entries = 0
    for file in layer.files():
        try:
            entries += len(parse(read_data(file)).entries)
        except (OSError, TuningFileError) as error:
            raise TuningFileError(f"{file} cannot be used: {error}") from None
    _given.insert(0, layer)
    forget()
    return entries


@dataclass(frozen=True)
class Source:
    """The entries of one file that fits a device.

    Attributes:
        name: of the layer.
        path: of the file.
        rank: see `Device.rank`.
        entries: by key.
    """

    name: str
    path: str
    rank: int
    entries: dict[Key, Entry]


@dataclass(frozen=True)
class Found:
    """What was measured that serves a key.

    Attributes:
        choices: backends with their knobs, the best backend first.
        origin: file, entry and how near it is, for people.
    """

    choices: tuple[tuple[str, dict[str, bool | int | str]], ...]
    origin: str


@dataclass(frozen=True)
class _Neighbour:
    distance: float
    source: Source
    key: Key
    usable: dict[str, Measured]  # by backend

    @property
    def entry(self) -> Entry:
        return self.source.entries[self.key]


@dataclass
class Winners:
    """Everything that was measured for one device, in the order of precedence."""

    sources: list[Source]
    _known: dict[Key, Found | None] = field(default_factory=dict)

    def find(self, key: Key, refuse: Refuse) -> Found | None:
        """The choice for a key: its own entry's, else what suits the entries around it best.

        Entries of the device itself come before those of a similar one, and of two files with the
        same key the first.
        """
        answers = self._known  # those before `forget`
        try:
            return answers[key]
        except KeyError:
            pass
        found = None
        for rank in (0, 1, 2):
            near = self._neighbours(key, rank, refuse)
            if near:
                own = [each for each in near if each.key == key]
                found = _its_own(own[0]) if own else _between(key, near, refuse)
                break
        answers[key] = found
        return found

    def forget(self) -> None:
        """Search anew."""
        self._known = {}

    def _neighbours(self, key: Key, rank: int, refuse: Refuse) -> list[_Neighbour]:
        """The usable entries of a rank that are not too far, nearest first."""
        found: dict[Key, _Neighbour] = {}
        for source in self.sources:
            for other in source.entries if source.rank == rank else ():
                distance = key.distance(other)
                if distance > FARTHEST or other in found:
                    continue
                usable = {
                    name: measured
                    for name, measured in source.entries[other].ordered()
                    if refuse(name, measured) is None
                }
                if usable:
                    found[other] = _Neighbour(distance, source, other, usable)
        return sorted(found.values(), key=lambda each: each.distance)

    def trace(self, key: Key, refuse: Refuse) -> list[str]:
        """What a search for the key looks at, a line each."""
        lines = []
        for source in self.sources:
            fit = ("this device", "an equal device", "a device of this capability")[source.rank]
            lines.append(f"{source.name}, {source.path}: {len(source.entries)} entries for {fit}")
            for other in sorted(source.entries, key=key.distance)[:3]:
                distance = key.distance(other)
                text = f"  {other.label}, distance {distance:g}"
                if distance:
                    text += f": {key.differences(other)}"
                if distance > FARTHEST:
                    text += f"; farther than {FARTHEST:g}"
                for name, measured in source.entries[other].ordered():
                    reason = refuse(name, measured)
                    text += f"; {name} refused: {reason}" if reason else ""
                lines.append(text)
        return lines or ["no tuning file for this device"]


def _its_own(neighbour: _Neighbour) -> Found:
    """The choice that an entry itself names."""
    choices = tuple((name, measured.config) for name, measured in neighbour.usable.items())
    return Found(choices, _origin(neighbour, "measured"))


def _between(key: Key, near: list[_Neighbour], refuse: Refuse) -> Found:
    """The choice for a key between entries: kernel regression on how slow each config was there.

    A config's slow-down is its time over that of the fastest, at most `TIMES_LIMIT`; the mean over
    the entries, which count less the farther they are (Nadaraya, "On estimating regression", 1964),
    is what it is expected to be. Taking the nearest entry's choice instead would be worse: it takes
    over what suits that entry only, and its noise.
    """
    with no_fork:
        from .model import TIMES_LIMIT, config_of_text, config_text

    near = [each for each in near if each.distance <= near[0].distance + NEGLIGIBLE]
    weights = [math.exp(near[0].distance - each.distance) for each in near]
    expected: dict[str, dict[str, float]] = {}
    backends = {name for each in near for name in each.usable}
    for name in backends:
        candidates: dict[str, float] = {}
        total = 0.0
        for each, weight in zip(near, weights, strict=True):
            if name not in each.usable:
                continue
            own = config_text(each.usable[name].config)
            times = {own: each.usable[name].device_us, **each.entry.times.get(name, {})}
            fastest = min(times.values())
            total += weight
            for text, us in times.items():
                gain = TIMES_LIMIT - min(us / fastest, TIMES_LIMIT)
                candidates[text] = candidates.get(text, 0.0) + weight * gain
        expected[name] = {text: gain / total for text, gain in candidates.items()}
    choices = []
    for name in backends:
        example = next(each.usable[name] for each in near if name in each.usable)
        ranked = sorted(expected[name], key=lambda text: (-expected[name][text], text))
        for text in ranked:
            knobs = config_of_text(text)
            if refuse(name, example.model_copy(update={"config": knobs})) is None:
                pairs = zip(near, weights, strict=True)
                slow = sum(weight * _slow_down(each, name) for each, weight in pairs)
                choices.append((slow, name, knobs))
                break
    choices.sort(key=lambda choice: choice[:2])
    number = sum(weight > 0.05 for weight in weights)
    around = "next to it" if number == 1 else f"around it in {number} entries"
    kind = f"measured {around}, nearest ({key.differences(near[0].key)})"
    return Found(tuple((name, knobs) for _, name, knobs in choices), _origin(near[0], kind))


def _slow_down(neighbour: _Neighbour, name: str) -> float:
    """How much slower a backend's best was than the entry's pick, at most `TIMES_LIMIT`."""
    with no_fork:
        from .model import TIMES_LIMIT

    measured = neighbour.usable.get(name)
    if measured is None:
        return TIMES_LIMIT
    pick = next(iter(neighbour.usable.values()))
    # The pick stands at 1 even where another is faster by less than the noise.
    if measured is pick:
        return 1.0
    return min(max(measured.device_us / pick.device_us, 1.0), TIMES_LIMIT)


def _origin(neighbour: _Neighbour, kind: str) -> str:
    if neighbour.source.rank:
        kind += ", on another device of this capability"
    source = neighbour.source
    return f"{kind}, {neighbour.key.label} in {source.path} ({source.name})"


_winners: dict[torch.device, Winners] = {}
_warned: set[str] = set()


def loaded(device: torch.device) -> bool:
    """Whether `winners` would answer without reading files."""
    return device in _winners


def winners(device: torch.device) -> Winners:
    """Everything measured for a device; the first call for it reads the files."""
    # The dict as it is now: what is read before `forget` must not be found after it.
    known = _winners
    return known.get(device) or known.setdefault(device, Winners(_read(device)))


def remember(device: torch.device, entry: Entry) -> None:
    """Put an entry before everything else, for this process."""
    known = winners(device)
    known.sources.insert(0, Source("this process", "memory", 0, {entry.key: entry}))
    known.forget()


def forget() -> None:
    """Read the files anew at the next search."""
    global _winners
    _winners = {}


def _read(device: torch.device) -> list[Source]:
    own = device_of(device)
    sources = []
    for layer in layers() if own else ():
        for file in layer.files():
            tuning = _usable(file)
            rank = own.rank(tuning.device) if own and tuning else None
            if tuning is not None and rank is not None:
                sources.append(Source(layer.name, str(file), rank, tuning.keys))
    return sources


def read_data(file: Any) -> bytes:
    """The bytes of a tuning file.

    Raises:
        OSError: it cannot be read, or is nothing that a tuning file can be: a pipe would be waited
            for, a device or a huge file read until the memory is full.
    """
    with no_fork:
        from .model import MOST_BYTES

    if isinstance(file, Path) and not file.is_dir():  # a folder's own error says it best
        facts = file.stat()
        if not stat.S_ISREG(facts.st_mode):
            raise OSError(f"{file} is no regular file")
        if facts.st_size > MOST_BYTES:
            raise OSError(f"it has {facts.st_size} bytes, a tuning file at most {MOST_BYTES}")
    data: bytes = file.read_bytes()
    return data


def _usable(file: Any) -> Tuning | None:
    """A file's content; a file that cannot be used is a miss, with one warning."""
    with no_fork:
        from .model import TuningFileError, parse

    try:
        tuning = parse(read_data(file))
    except FileNotFoundError:  # gone since the folder was listed
        return None
    except (OSError, TuningFileError) as error:
        _warn(f"tuning file {file} is not used: {error}")
        return None
    if tuning.rejected:
        first = tuning.rejected[0]
        _warn(f"tuning file {file}: {len(tuning.rejected)} entries are not used, such as {first}")
    return tuning


def _warn(text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        log.warning(text)


def file_for(folder: Path, device: Device) -> Path:
    """The file in a folder that holds, or would hold, a device's entries.

    A file's name is only a label: where it is taken by another device (a MIG slice of the same
    product), the number of processors is added.
    """
    with no_fork:
        from .model import TuningFileError, parse

    file = folder / f"{device.label}.json"
    try:
        if parse(read_data(file)).device != device:
            return folder / f"{device.label}-{device.processors}-processors.json"
    except (OSError, TuningFileError):
        pass
    return file


def publish(path: Path, addition: Tuning, *, fresh: bool = False) -> None:
    """Merge entries into a file, so that a reader and another writer see all or nothing.

    Args:
        path: the file.
        addition: the entries.
        fresh: they were measured just now, so they win whatever the clock said when; it may have
            been set back since the file was written.

    Raises:
        WriteError: the file cannot be written, or is something that must not be overwritten.
    """
    with no_fork:
        import filelock

        from .model import TuningFileError, merge, not_before, parse, render

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A lock on the file itself would be lost when the file is replaced. Without flock there is
        # no telling whether a soft lock's owner lives, so none is better.
        lock = filelock.FileLock(f"{path}.lock", timeout=LOCK_SECONDS, fallback_to_soft=False)
        with lock:
            for stale in path.parent.glob(f".{path.name}.*.tmp"):  # of writers that were killed
                stale.unlink(missing_ok=True)
            try:
                data = read_data(path)
            except FileNotFoundError:
                _replace(path, render(addition))
                return
            try:
                present = parse(data)
            except TuningFileError as error:
                if error.newer or error.foreign:
                    raise WriteError(f"{path} is not overwritten: {error}") from None
                kept = _aside(path, data)
                _replace(path, render(addition))
                log.warning("%s was unreadable (%s); it is kept as %s", path, error, kept)
                return
            if present.rejected:
                kept = _aside(path, data)
                log.warning("%s had unusable entries; it is kept as %s", path, kept)
            if fresh:
                addition = not_before(present, addition)
            _replace(path, render(merge(present, addition)))
    except filelock.Timeout:
        raise WriteError(
            f"{path}.lock was held for {LOCK_SECONDS} s by another process; choose another folder "
            "with --out"
        ) from None
    except (ValueError, RecursionError, NotImplementedError) as error:
        raise WriteError(f"{path} is not written: {error}") from None
    except WriteError:
        raise
    except OSError as error:
        raise WriteError(f"{path} cannot be written: {error}") from None


def _aside(path: Path, data: bytes) -> Path:
    """Keep what a file held beside it."""
    now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%S%f")
    kept = path.with_name(f"{path.name}.corrupt-{now}")
    kept.write_bytes(data)
    return kept


def _replace(path: Path, text: str) -> None:
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
            file.flush()
            os.fchmod(file.fileno(), 0o644)
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
