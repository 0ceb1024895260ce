"""The tuning commands: options in, printed results and an exit status out.

Exit status: 0 done; 1 a check found drift, or tuning measured nothing; 2 wrong options; 3 the
device is not there; 4 a file cannot be written; 130 interrupted.
"""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from .. import dispatch
from ..cache import store
from ..cache.device import Device, device_of
from ..cache.model import Tuning, TuningFileError, json_schema, parse
from ..request import Request
from . import check as checking
from . import report, shapes
from . import tune as tuning
from .console import Log, Reporter
from .measure import candidates_for, from_dict, site_of

DONE, FAILED, USAGE, NO_DEVICE, NOT_WRITABLE, INTERRUPTED = 0, 1, 2, 3, 4, 130


class UsageError(ValueError):
    """Options that make no sense; the message names the option and the value."""


class NoDeviceError(RuntimeError):
    """The device that was asked for is not there."""


@dataclass(frozen=True)
class Grid:
    """Lists of numbers as they were typed, such as ``64,4096``; None where left out."""

    rows: str | None
    row_bytes: str | None
    buffers: str | None

    def given(self) -> bool:
        """Whether any was."""
        return any(each is not None for each in (self.rows, self.row_bytes, self.buffers))


@dataclass(frozen=True)
class TuneOptions:
    """Options of ``multigather tune``; see its help."""

    preset: str
    grid: Grid
    from_record: Path | None
    backends: str | None
    budget: str | None
    retune: str
    resume: bool
    dry_run: bool
    out: Path | None
    log: Path | None


@dataclass(frozen=True)
class CheckOptions:
    """Options of ``multigather check``; see its help."""

    sample: int
    held_out: int
    seed: int
    max_regret: float
    max_median: float
    backends: str | None
    log: Path | None
    from_log: Path | None
    tuning: Path | None


def run(command: Callable[[], int]) -> int:
    """Run a command; errors that a user can do something about become a line and a status."""
    try:
        return command()
    except KeyboardInterrupt:
        print("interrupted; every key measured so far is kept", file=sys.stderr)
        return INTERRUPTED
    except NoDeviceError as error:
        return _failed(error, NO_DEVICE)
    except store.WriteError as error:
        return _failed(error, NOT_WRITABLE)
    except (UsageError, TuningFileError, FileNotFoundError) as error:
        return _failed(error, USAGE)


def _failed(error: Exception, status: int) -> int:
    print(f"multigather: {error}", file=sys.stderr)
    return status


def tune(device_name: str | None, options: TuneOptions, as_json: bool) -> int:
    """``multigather tune``."""
    device = device_named(device_name)
    kind = device_of(device)
    assert kind is not None
    names = _backends(options.backends)
    requests, skipped = _requests(options, device)
    budget = _seconds(options.budget)
    file = _file(options.out, kind)
    groups = tuning.grouped(requests)
    run_mark = tuning.Run(file)
    since, retune = None, options.retune
    if options.resume:
        found = run_mark.resumed()
        if found is not None:
            since, retune = found
    keys = tuning.wanted(groups, names, file, retune, since)
    with Log(options.log) as log, Reporter(quiet=as_json) as reporter:
        reporter.say(
            f"tuning for {kind.name} ({kind.processors} processors), {len(keys)} of {len(groups)} "
            f"keys, into {file}"
        )
        if device.type == "cpu" and device_name is None:
            reporter.say("torch sees no GPU, so this tunes the choices for the CPU")
        for text in skipped:
            reporter.say(f"left out: {text}")
        plan = _plan(groups, keys, names)
        reporter.say(f"{plan['candidates']} candidates, {plan['memory_mib']} MiB of memory at most")
        if options.dry_run:
            if as_json:
                print(json.dumps({"file": str(file), "left_out": skipped, **plan}, indent=1))
            else:
                for key in keys:
                    print(f"{key.label}: {'; '.join(map(shapes.summary, groups[key]))}")
            return DONE
        _check_writable(file.parent)
        if since is None and retune != "missing":
            run_mark.begin(retune)
        summary = tuning.tune(device, groups, keys, names, file, reporter, budget, log)
        if not summary.left:
            run_mark.end()
        if as_json:
            print(json.dumps({**asdict(summary), "left_out": skipped}, indent=1))
            return DONE if summary.keys or not keys else FAILED
        for text in summary.skipped:
            reporter.say(f"skipped: {text}")
    print(
        f"{summary.keys} keys measured in {summary.seconds:.0f} s ({summary.present} were there, "
        f"{summary.left} left out), {summary.candidates} candidates timed, "
        f"{summary.failures} failures"
    )
    print(f"the heuristic's choice was beaten in {summary.changed} keys; winners in {file}")
    return DONE if summary.keys or not keys else FAILED


def show(
    file: Path | None,
    device_name: str | None,
    only_stale: bool,
    plot: Path | None,
    schema: bool,
    as_json: bool,
) -> int:
    """``multigather show``."""
    if schema:
        print(json.dumps(json_schema(), indent=1))
        return DONE
    shown = [(file, _parse(file))] if file is not None else _in_use(device_named(device_name))
    if not shown:
        raise FileNotFoundError(
            "no tuning file for this device in any place that `multigather paths` lists; "
            "run `multigather tune`"
        )
    result = []
    for path, content in shown:
        rows = report.rows_of(content)
        if only_stale:
            rows = [row for row in rows if row["stale"]]
        if as_json:
            result.append({"file": str(path), "device": asdict(content.device), "entries": rows})
        else:
            _console().print(report.table_of(f"{content.device.name}, {path}", rows))
    if as_json:
        print(json.dumps(result, indent=1))
    if plot is not None:
        try:
            report.plot(shown[0][1], plot)
        except ModuleNotFoundError as error:
            raise UsageError(f"--plot needs matplotlib (pip install matplotlib): {error}") from None
        except OSError as error:
            raise store.WriteError(f"{plot} cannot be written: {error}") from None
        print(f"map of winners drawn into {plot}", file=sys.stderr)
    return DONE


def explain(
    rows: int,
    row_bytes: int,
    buffers: int,
    layout: str,
    device_name: str | None,
    as_json: bool,
) -> int:
    """``multigather explain``."""
    device = device_named(device_name)
    if not shapes.makes_sense(layout, row_bytes, buffers):
        raise UsageError(
            f"--layout {layout} is no different from a simpler one with --row-bytes {row_bytes} "
            f"and --buffers {buffers}"
        )
    request = shapes.request_of(device, rows, shapes.field_widths(layout, row_bytes, buffers))
    found = dispatch.explain(request, None, site_of(request))
    print(json.dumps(asdict(found), indent=1) if as_json else found)
    return DONE


def check(device_name: str | None, options: CheckOptions, as_json: bool) -> int:
    """``multigather check``."""
    if options.tuning is not None and options.from_log is None:
        raise UsageError("--tuning goes with --from-log; set MULTIGATHER_TUNING_PATH to use a file")
    device = device_named(device_name)
    if options.from_log is not None:
        return _check_log(options.from_log, device, options, as_json)
    if options.held_out:
        requests = shapes.held_out(options.held_out, options.seed, device)
        what = f"{len(requests)} gathers that were not tuned, seed {options.seed}"
    else:
        requests = checking.sample(device, options.sample, options.seed)
        what = f"{len(requests)} tuned gathers, seed {options.seed}"
        if not requests:
            raise FileNotFoundError("nothing is tuned for this device; run `multigather tune`")
    names = _backends(options.backends)
    with Log(options.log) as log, Reporter(quiet=as_json) as reporter:
        verdict = checking.check(requests, names, reporter, log)
    return _judge(what, verdict, options, as_json)


def _check_log(file: Path, device: torch.device, options: CheckOptions, as_json: bool) -> int:
    winners = store.winners(device)
    if options.tuning is not None:
        content = _parse(options.tuning)
        winners = store.Winners([store.Source("--tuning", str(options.tuning), 0, content.keys)])
    measurements = []
    for number, line in enumerate(file.read_text().splitlines(), 1):
        try:
            measurements.append(from_dict(json.loads(line), torch.device("cuda", 0)))
        except (ValueError, RecursionError) as error:
            raise UsageError(f"--from-log: {file}, line {number}: {error}") from None
    verdict = checking.check_log(measurements, winners)
    return _judge(f"{len(measurements)} gathers of {file}", verdict, options, as_json)


def _judge(what: str, verdict: checking.Verdict, options: CheckOptions, as_json: bool) -> int:
    good = verdict.median <= options.max_median and verdict.worst <= options.max_regret
    if as_json:
        print(json.dumps({"checked": what, "good": good, **verdict.as_dict()}, indent=1))
        return DONE if good else FAILED
    _console().print(report.verdict_table(what, verdict))
    for text in verdict.skipped:
        print(f"skipped: {text}")
    print(
        f"regret against the best of all: median {verdict.median:.1%} (at most "
        f"{options.max_median:.1%}), worst {verdict.worst:.1%} (at most {options.max_regret:.1%})"
    )
    return DONE if good else FAILED


def merge(files: Sequence[Path], out: Path, as_json: bool) -> int:
    """``multigather merge``."""
    try:
        merged = tuning.merged(files)
    except ValueError as error:
        raise UsageError(str(error)) from None
    store.publish(out, merged)
    return _written(merged, f"{len(files)} files", out, as_json)


def export(to: Path, device_name: str | None, as_json: bool) -> int:
    """``multigather export``."""
    kind = device_of(device_named(device_name))
    assert kind is not None
    source = _file(None, kind)
    content = _parse(source)
    target = to / source.name
    store.publish(target, content)
    return _written(content, str(source), target, as_json)


def _written(content: Tuning, source: str, file: Path, as_json: bool) -> int:
    number = len(content.entries)
    if as_json:
        print(json.dumps({"file": str(file), "entries": number}, indent=1))
    else:
        print(f"{number} entries of {source} in {file}")
    return DONE


def paths(as_json: bool) -> int:
    """``multigather paths``."""
    found = [
        {
            "place": layer.name,
            "path": str(layer.path),
            "files": [str(file) for file in layer.files()],
        }
        for layer in store.layers()
    ]
    if as_json:
        print(json.dumps(found, indent=1))
        return DONE
    table = Table()
    for column in ("place", "path", "files"):
        table.add_column(column, overflow="fold")
    for each in found:
        names = [Path(file).name for file in each["files"]]
        table.add_row(str(each["place"]), str(each["path"]), ", ".join(names) or "none")
    _console().print(table)
    return DONE


def device_named(name: str | None) -> torch.device:
    """The device to work on: the one asked for, else the current GPU, else the CPU.

    Raises:
        NoDeviceError: a GPU was asked for and torch sees none.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise NoDeviceError("--device cuda: torch sees no GPU; --device cpu tunes for the CPU")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _requests(options: TuneOptions, device: torch.device) -> tuple[list[Request], list[str]]:
    grid = options.grid
    if options.from_record is not None:
        if grid.given():
            raise UsageError("--from-record cannot be combined with --rows, --row-bytes, --buffers")
        try:
            return shapes.recorded(options.from_record, device), []
        except ValueError as error:
            raise UsageError(f"--from-record: {error}") from None
    if not grid.given():
        return shapes.preset(device, options.preset)
    counts, sizes, buffers, layouts = shapes.PRESETS[options.preset][0]
    return shapes.grid(
        device,
        _numbers("--rows", grid.rows) or counts,
        _numbers("--row-bytes", grid.row_bytes) or sizes,
        _numbers("--buffers", grid.buffers) or buffers,
        layouts,
    )


def _numbers(option: str, text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    try:
        numbers = tuple(int(each) for each in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise UsageError(f"{option} must be numbers of at least 1 by comma, got {text!r}")
    return numbers


def _backends(text: str | None) -> tuple[str, ...]:
    names = tuple(text.split(",")) if text else ()
    known = [backend.name for backend in dispatch.BACKENDS]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UsageError(f"--backends: no backend {unknown[0]!r}, only {', '.join(known)}")
    return names


def _seconds(text: str | None) -> float | None:
    if text is None:
        return None
    factor = {"s": 1, "m": 60, "h": 3600}.get(text[-1:], 0)
    try:
        return float(text[:-1]) * factor if factor else float(text)
    except ValueError:
        raise UsageError(f"--budget must be like 90s, 8m or 1h, got {text!r}") from None


def _file(out: Path | None, kind: Device) -> Path:
    folder = out or store.user_folder()
    if folder is None:
        raise store.WriteError("there is no cache folder for this user; choose one with --out")
    return store.file_for(folder, kind)


def _check_writable(folder: Path) -> None:
    """Find out before minutes of measuring."""
    probe = folder / f".writable-{datetime.datetime.now(datetime.UTC).timestamp()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise store.WriteError(f"{folder} cannot be written to: {error}") from None


def _plan(
    groups: dict[Any, list[Request]], keys: Sequence[Any], names: tuple[str, ...]
) -> dict[str, Any]:
    requests = [request for key in keys for request in groups[key]]
    memory = max(
        (
            sum(field.rows * field.row_stride_bytes for field in request.fields)
            + 2 * request.row_bytes * request.count
            for request in requests
        ),
        default=0,
    )
    return {
        "keys": [key.label for key in keys],
        "candidates": sum(len(candidates_for(request, names)[0]) for request in requests),
        "memory_mib": memory >> 20,
    }


def _in_use(device: torch.device) -> list[tuple[Path, Tuning]]:
    found = []
    for source in store.winners(device).sources:
        path = Path(source.path)
        if path.is_file():
            found.append((path, _parse(path)))
    return found


def _parse(file: Path) -> Tuning:
    try:
        return parse(store.read_data(file))
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no tuning file {file}; run `multigather tune`") from None
    except (OSError, TuningFileError) as error:
        raise UsageError(f"{file}: {error}") from None


def _console() -> Console:
    # A table that is piped into a file is not cut to the 80 columns that rich then assumes.
    return Console() if sys.stdout.isatty() else Console(width=150)
