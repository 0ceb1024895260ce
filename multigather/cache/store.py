"""Where tuning files are, and how they are read, searched and written.

Layers, the first that has an answer wins: files given to `multigather.load_tuning`, the files and
folders in ``MULTIGATHER_TUNING_PATH``, the user's cache folder, and what ships with the package.
Only the user's folder is ever written. Reading takes no lock: a file is replaced as a whole.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .device import Device, device_of
from .key import FARTHEST, Key
from .rules import RULES_FILE

if TYPE_CHECKING:
    from .model import Entry, Measured, Tuning

log = logging.getLogger("multigather")

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
    found.append(Layer("shipped", resources.files("multigather.tuning_cache")))
    return found


def give(path: str | os.PathLike[str]) -> int:
    """Put a file or a folder before every other layer; return how many entries it has.

    Raises:
        FileNotFoundError: there is none.
        TuningFileError: a file is no tuning file.
    """
    from .model import TuningFileError, parse

    layer = Layer("load_tuning", _path(path))
    if not layer.path.exists():
        raise FileNotFoundError(f"path: no tuning file or folder at {path}")
    entries = 0
    for file in layer.files():
        try:
            entries += len(parse(file.read_bytes()).entries)
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
    """An entry that serves a key.

    Attributes:
        choices: backends with what was measured for them, the pick first.
        origin: file, entry and how near it is, for people.
        exact: whether the entry is of the very key, measured on the very device.
    """

    choices: tuple[tuple[str, Measured], ...]
    origin: str
    exact: bool


@dataclass
class Winners:
    """Everything that was measured for one device, in the order of precedence."""

    sources: list[Source]
    _known: dict[Key, Found | None] = field(default_factory=dict)

    def find(self, key: Key, refuse: Refuse) -> Found | None:
        """The best entry for a key: of the best device, the key's own before the nearest."""
        try:
            return self._known[key]
        except KeyError:
            self._known[key] = found = next(self._candidates(key, refuse), None)
            return found

    def forget(self) -> None:
        """Search anew."""
        self._known.clear()

    def _candidates(self, key: Key, refuse: Refuse) -> Iterator[Found]:
        for rank in (0, 1, 2):
            sources = [source for source in self.sources if source.rank == rank]
            near = sorted(
                (
                    (key.distance(other), order, other)
                    for order, source in enumerate(sources)
                    for other in source.entries
                    if key.distance(other) <= FARTHEST
                ),
            )
            for distance, order, other in near:
                entry = sources[order].entries[other]
                choices = tuple(item for item in entry.ordered() if refuse(*item) is None)
                if choices:
                    yield Found(choices, _origin(sources[order], key, other), not distance + rank)

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


def _origin(source: Source, key: Key, other: Key) -> str:
    where = f"{other.label} in {source.path} ({source.name})"
    kind = "measured" if key == other else f"measured nearby ({key.differences(other)})"
    if source.rank:
        kind += ", on another device of this capability"
    return f"{kind}, {where}"


_winners: dict[torch.device, Winners] = {}
_loading = threading.Lock()
_warned: set[str] = set()


def loaded(device: torch.device) -> bool:
    """Whether `winners` would answer without reading files."""
    return device in _winners


def winners(device: torch.device) -> Winners:
    """Everything measured for a device; the first call for it reads the files."""
    try:
        return _winners[device]
    except KeyError:
        with _loading:
            if device not in _winners:
                _winners[device] = Winners(_read(device))
            return _winners[device]


def remember(device: torch.device, entry: Entry) -> None:
    """Put an entry before everything else, for this process."""
    known = winners(device)
    known.sources.insert(0, Source("this process", "memory", 0, {entry.key: entry}))
    known.forget()


def forget() -> None:
    """Read the files anew at the next search."""
    with _loading:
        _winners.clear()


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


def _usable(file: Any) -> Tuning | None:
    """A file's content; a file that cannot be used is a miss, with one warning."""
    from .model import TuningFileError, parse

    try:
        tuning = parse(file.read_bytes())
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
    from .model import TuningFileError, parse

    file = folder / f"{device.label}.json"
    try:
        if parse(file.read_bytes()).device != device:
            return folder / f"{device.label}-{device.processors}-processors.json"
    except (OSError, TuningFileError):
        pass
    return file


def publish(path: Path, addition: Tuning) -> None:
    """Merge entries into a file, so that a reader and another writer see all or nothing.

    Raises:
        WriteError: the file cannot be written, or is something that must not be overwritten.
    """
    import filelock

    from .model import TuningFileError, merge, parse, render

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A lock on the file itself would be lost when the file is replaced. Without flock there is
        # no telling whether a soft lock's owner lives, so none is better.
        lock = filelock.FileLock(f"{path}.lock", timeout=LOCK_SECONDS, fallback_to_soft=False)
        with lock:
            for stale in path.parent.glob(f".{path.name}.*.tmp"):  # of writers that were killed
                stale.unlink(missing_ok=True)
            try:
                data = path.read_bytes()
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
