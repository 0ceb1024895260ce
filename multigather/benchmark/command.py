"""The command: measure, print, return the exit status."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from . import host, plots
from .report import show
from .run import MismatchError, run
from .ways import named


def main(
    device: str | None,
    names: Sequence[str],
    ways: Sequence[str],
    rounds: int,
    sweep: bool,
    plot: Path | None,
    only_host: bool,
    out: Path | None,
    as_json: bool,
) -> int:
    """See the help of ``multigather bench``; 1 if a way is wrong, 2 for wrong options."""
    errors = Console(stderr=True)
    wanted = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if wanted.type == "cuda" and wanted.index is None:
        wanted = torch.device("cuda", torch.cuda.current_device())

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def keep(report: dict[str, Any]) -> None:
        # A run that is stopped, as on a machine lent for a time, has lost nothing that it measured.
        if out is not None:
            unfinished = out.with_name(f"{out.name}.unfinished")
            unfinished.write_text(json.dumps(report, indent=1) + "\n")
            unfinished.replace(out)

    try:
        if plot is not None and not sweep:
            raise ValueError("--plot draws what --sweep measures; add --sweep")
        if only_host and (names or ways or sweep):
            raise ValueError("--host measures its own gathers, without workloads, ways and sweep")
        if out is not None and not out.parent.is_dir():
            raise ValueError(f"--out: there is no folder {out.parent}")
        if only_host:
            report = host.run(wanted, rounds, sys.argv[2:], say, keep)
        else:
            report = run(wanted, names, named(ways, wanted), rounds, sweep, sys.argv[2:], say, keep)
    except (MismatchError, ValueError) as error:
        errors.print(f"multigather bench: {error}", markup=False)
        return 1 if isinstance(error, MismatchError) else 2
    if plot is not None:
        try:
            for file in plots.draw(report, plot, wanted.type):
                print(f"drawn: {file}", file=sys.stderr)
        except ModuleNotFoundError as error:
            errors.print(f"multigather bench: --plot needs matplotlib: {error}", markup=False)
            return 2
    if as_json:
        print(json.dumps(report, indent=1))
    else:
        # A table that is piped into a file is not cut to the 80 columns that rich then assumes.
        console = Console() if sys.stdout.isatty() else Console(width=200)
        (host.show if only_host else show)(report, console)
    return 0
