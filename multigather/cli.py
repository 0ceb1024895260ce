"""The command line: ``multigather`` or ``python -m multigather``. Commands hold no logic."""

from __future__ import annotations

import enum
import sys
from typing import Annotated

import typer

import multigather

app = typer.Typer(
    help="One index, many buffers, one kernel launch.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # with it, help would drop the brackets of b[idx]
)


class Device(enum.StrEnum):
    """Where to run."""

    cpu = "cpu"
    cuda = "cuda"


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
    device: Annotated[
        Device | None, typer.Option(help="Where to run; by default the GPU if there is one.")
    ] = None,
    steps: Annotated[
        int, typer.Option(min=1, help="Transitions to collect for the replay buffer.")
    ] = 30_000,
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Gather from real data, compare every byte with b[idx], and show times."""
    from multigather import demo as run_demo

    sys.exit(run_demo.main(device, steps, seed, as_json))


@app.command()
def bench(
    device: Annotated[
        Device | None, typer.Option(help="Where to run; by default the GPU if there is one.")
    ] = None,
    workload: Annotated[
        list[str] | None, typer.Option(help="Only this workload; may be repeated.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds that a median is taken over.")] = 21,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Time the workloads against b[idx] and index_select per buffer, after checking every byte."""
    from multigather import bench as run_bench

    sys.exit(run_bench.main(device, workload or (), rounds, as_json))


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
