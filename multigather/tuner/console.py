"""What a long command says while it runs, on stderr: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from ..cache.store import WriteError

# A line at least this often, where there is no terminal.
LINE_SECONDS = 15.0


class Reporter:
    """Progress of a command's phases; use it as a context.

    Args:
        stream: where to.
        quiet: say nothing.
    """

    def __init__(self, stream: TextIO | None = None, quiet: bool = False) -> None:
        self._stream = stream or sys.stderr
        self._quiet = quiet
        self._progress: Progress | None = None
        if self._stream.isatty() and not quiet:
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=Console(file=self._stream),
            )

    def __enter__(self) -> Reporter:
        if self._progress:
            self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._progress:
            self._progress.stop()

    def say(self, text: str) -> None:
        """Print a line."""
        if self._quiet:
            return
        if self._progress:
            self._progress.console.print(text, markup=False, highlight=False)
        else:
            print(text, file=self._stream, flush=True)

    def phase(self, title: str, total: int) -> Phase:
        """A part of the work with so many steps."""
        return Phase(self, title, total, self._progress)


class Log:
    """A file with a line of JSON for everything measured; none if the path is None.

    Args:
        path: where; written anew.
    """

    def __init__(self, path: Path | None) -> None:
        try:
            self._file = path.open("w") if path else None
        except OSError as error:
            raise WriteError(f"--log: {path} cannot be written: {error}") from None

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file:
            self._file.close()

    def write(self, content: dict[str, Any]) -> None:
        """Append a line."""
        if self._file:
            print(json.dumps(content), file=self._file, flush=True)


class Phase:
    """Steps of one part of the work."""

    def __init__(
        self, reporter: Reporter, title: str, total: int, progress: Progress | None
    ) -> None:
        self._reporter = reporter
        self._title = title
        self._total = total
        self._progress = progress
        self._task = progress.add_task(title, total=total) if progress else None
        self._start = self._said = time.monotonic()

    def done(self, steps: int) -> None:
        """Say that so many steps are done by now."""
        if self._progress and self._task is not None:
            self._progress.update(self._task, completed=steps)
            return
        now = time.monotonic()
        if steps < self._total and now - self._said < LINE_SECONDS:
            return
        self._said = now
        spent = now - self._start
        left = spent / max(steps, 1) * (self._total - steps)
        self._reporter.say(
            f"{self._title}: {steps} of {self._total}, {spent:.0f} s, about {left:.0f} s left"
        )
