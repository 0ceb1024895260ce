"""The command line: ``multigather`` or ``python -m multigather``. Commands hold no logic."""

from __future__ import annotations

import enum
import sys
from pathlib import Path
from typing import Annotated

import typer

import multigather

app = typer.Typer(
    help="One index, many buffers, one kernel launch.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # with it, help would drop the brackets of b[idx]
)


class Device(enum.StrEnum):
    """Where to run."""

    cpu = "cpu"
    cuda = "cuda"


class Preset(enum.StrEnum):
    """Which gathers to tune for."""

    quick = "quick"
    default = "default"
    full = "full"


class Retune(enum.StrEnum):
    """Which keys to measure again."""

    missing = "missing"
    stale = "stale"
    all = "all"


class Layout(enum.StrEnum):
    """What the rows of several buffers are like."""

    uniform = "uniform"
    eights = "eights"
    odd = "odd"
    ragged = "ragged"
    mixed = "mixed"


DeviceOption = Annotated[
    Device | None, typer.Option(help="Where to run; by default the GPU if there is one.")
]
LogOption = Annotated[
    Path | None, typer.Option(help="Write every timing into this file, a line of JSON each.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        print(multigather.__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """One index, many buffers, one kernel launch."""


@app.command()
def demo(
    device: DeviceOption = None,
    steps: Annotated[
        int, typer.Option(min=1, help="Transitions to collect for the replay buffer.")
    ] = 30_000,
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
    as_json: Json = False,
) -> None:
    """Gather from real data, compare every byte with b[idx], and show times."""
    from multigather import demo as run_demo

    sys.exit(run_demo.main(device, steps, seed, as_json))


@app.command()
def bench(
    device: DeviceOption = None,
    workload: Annotated[
        list[str] | None, typer.Option(help="Only this workload; may be repeated.")
    ] = None,
    way: Annotated[
        list[str] | None, typer.Option(help="Only multigather and this way; may be repeated.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds that a median is taken over.")] = 21,
    sweep: Annotated[
        bool, typer.Option("--sweep", help="Also series over row bytes, buffers and both.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the series into PNG files in this folder.")
    ] = None,
    host: Annotated[
        bool, typer.Option("--host", help="Only the host time of repeated calls and its floor.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Write the JSON object here, anew after every measurement."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Time workloads beside what people use today, after checking every byte."""
    from multigather.benchmark import command

    sys.exit(
        command.main(device, workload or (), way or (), rounds, sweep, plot, host, out, as_json)
    )


@app.command()
def tune(
    preset: Annotated[
        Preset, typer.Option(help="Which gathers; not used where the next options say.")
    ] = Preset.default,
    rows: Annotated[
        str | None, typer.Option(help="Numbers of rows to gather, such as 64,4096.")
    ] = None,
    row_bytes: Annotated[
        str | None, typer.Option(help="Bytes of a buffer's row, such as 4,1024.")
    ] = None,
    buffers: Annotated[str | None, typer.Option(help="Numbers of buffers, such as 1,4.")] = None,
    from_record: Annotated[
        Path | None, typer.Option(help="The gathers in a file that MULTIGATHER_RECORD wrote.")
    ] = None,
    backends: Annotated[
        str | None, typer.Option(help="Only these backends, such as triton,torch.")
    ] = None,
    budget: Annotated[
        str | None, typer.Option(help="Begin no key after this time, such as 90s or 8m.")
    ] = None,
    retune: Annotated[
        Retune, typer.Option(help="Keys that have an entry: leave, measure if stale, measure all.")
    ] = Retune.missing,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run that was interrupted.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be measured.")] = False,
    device: DeviceOption = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder to write to; by default the user's cache.")
    ] = None,
    log: LogOption = None,
    as_json: Json = False,
) -> None:
    """Measure every backend and config on this device, and keep the winners."""
    from multigather.tuner import commands

    grid = commands.Grid(rows, row_bytes, buffers)
    options = commands.TuneOptions(
        preset.value, grid, from_record, backends, budget, retune.value, resume, dry_run, out, log
    )
    sys.exit(commands.run(lambda: commands.tune(device, options, as_json)))


@app.command()
def show(
    file: Annotated[
        Path | None, typer.Argument(help="A tuning file; by default this device's.")
    ] = None,
    device: DeviceOption = None,
    stale: Annotated[
        bool, typer.Option("--stale", help="Only entries that should be measured again.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the map of winners into this PNG file.")
    ] = None,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON Schema of a tuning file.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show the winners, their times, and how much they gain."""
    from multigather.tuner import commands

    sys.exit(commands.run(lambda: commands.show(file, device, stale, plot, schema, as_json)))


@app.command()
def explain(
    rows: Annotated[int, typer.Option(min=1, help="Number of rows to gather.")],
    row_bytes: Annotated[int, typer.Option(min=1, help="Bytes of a buffer's row.")],
    buffers: Annotated[int, typer.Option(min=1, help="Number of buffers.")] = 1,
    layout: Annotated[
        Layout, typer.Option(help="Rows all alike, of odd sizes, or of different sizes.")
    ] = Layout.uniform,
    device: DeviceOption = None,
    as_json: Json = False,
) -> None:
    """Say which backend and config a gather would get, from where, and why not others."""
    from multigather.tuner import commands

    sys.exit(
        commands.run(
            lambda: commands.explain(rows, row_bytes, buffers, layout.value, device, as_json)
        )
    )


@app.command()
def check(
    sample: Annotated[int, typer.Option(min=1, help="Tuned gathers to measure again.")] = 20,
    held_out: Annotated[
        int, typer.Option(min=0, help="Measure so many random gathers that were not tuned instead.")
    ] = 0,
    seed: Annotated[int, typer.Option(help="Seed of the random choice.")] = 0,
    max_regret: Annotated[
        float, typer.Option(min=0, help="Largest regret of one gather, as a share.")
    ] = 0.15,
    max_median: Annotated[
        float, typer.Option(min=0, help="Largest median of the regrets, as a share.")
    ] = 0.03,
    backends: Annotated[
        str | None, typer.Option(help="Only these backends, such as triton,torch.")
    ] = None,
    from_log: Annotated[
        Path | None, typer.Option(help="Measure nothing; use the timings that --log wrote.")
    ] = None,
    tuning: Annotated[
        Path | None, typer.Option(help="With --from-log, judge the choices of this tuning file.")
    ] = None,
    device: DeviceOption = None,
    log: LogOption = None,
    as_json: Json = False,
) -> None:
    """Measure what the choices cost against the best of all configs; exit 1 if too much."""
    from multigather.tuner import commands

    options = commands.CheckOptions(
        sample, held_out, seed, max_regret, max_median, backends, log, from_log, tuning
    )
    sys.exit(commands.run(lambda: commands.check(device, options, as_json)))


@app.command()
def merge(
    files: Annotated[list[Path], typer.Argument(help="Tuning files of one device.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="File to write.")],
    as_json: Json = False,
) -> None:
    """Put the entries of several tuning files into one."""
    from multigather.tuner import commands

    sys.exit(commands.run(lambda: commands.merge(files, out, as_json)))


@app.command()
def export(
    to: Annotated[Path, typer.Option(help="Folder to write to.")] = Path("tuning_cache"),
    device: DeviceOption = None,
    as_json: Json = False,
) -> None:
    """Copy this device's entries from the user's cache to a folder, to ship them."""
    from multigather.tuner import commands

    sys.exit(commands.run(lambda: commands.export(to, device, as_json)))


@app.command()
def paths(as_json: Json = False) -> None:
    """Print the places of tuning files in order of precedence, and what is there."""
    from multigather.tuner import commands

    sys.exit(commands.run(lambda: commands.paths(as_json)))


@app.command()
def info() -> None:
    """Print the versions, the devices and the backends that this machine has."""
    from multigather import environment

    for subject, text in environment.facts().items():
        print(f"{subject:>12}  {text}")
    for status in multigather.backends():
        print(f"{'backend':>12}  {status}")


def main() -> None:
    """Run the command line."""
    app()
