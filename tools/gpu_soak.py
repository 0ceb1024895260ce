"""The long form of the GPU's reliability tests, with a table of what was run and found.

    python3 tools/gpu_soak.py
    python3 tools/gpu_soak.py --only service fuzz --seconds 20 --cases 10000 --json soak.json

Steps: the reliability tests themselves; the service loop of tests/service.py on every backend; the
random gathers of tests/fuzz.py; and compute-sanitizer over tests of the kernels, where that tool is
installed. Like tools/gpu_check.py it takes the Python and the packages at hand, and no network.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from gpu_check import ROOT, environment_with, install

BACKENDS = ("cupy", "triton", "torch")
RELIABILITY = (
    "poison", "delivery", "service", "graphs", "lifetime", "processes", "devices", "large",
    "shifted",
)  # fmt: skip
# Of the fuzz cases, in percent. A layout that Triton has not seen takes it a second to compile.
FUZZ_SHARES = (("cupy", 50), (None, 30), ("torch", 19), ("triton", 1))
SANITIZERS = ("memcheck", "racecheck", "initcheck")
# Tests that reach every path of the kernels. Not graphs, which the setting below rules out, nor
# threads, which with it did not end in six minutes. A width of the misalignments takes a minute.
SANITIZED = ["tests/test_shifted.py", "tests/test_gather.py", "tests/test_known_faults.py"]
SANITIZED += ["tests/test_packed_rows.py", "tests/test_scatter_add.py", "tests/test_route.py"]
SANITIZED += [
    "-k",
    "(cupy-gpu or triton-gpu) and not offsets and not buffers and not config "
    "and not many_threads and not (misalignment and not (33 or 66 or 255))",
]
# Every tensor is an allocation of its own: a read beside one inside torch's blocks would not show.
UNCACHED = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
TIME_LIMIT = 3600.0


@dataclass
class Row:
    """A line of the table.

    Attributes:
        test: what was run.
        load: how much of it.
        injected: how many faults were made on purpose; None where that has no meaning.
        found: how many of these were reported as what they are.
        remaining: what went wrong.
        seconds: how long it took.
        note: the first thing that went wrong, or why the step was not run.
    """

    test: str
    load: str = ""
    injected: int | None = None
    found: int | None = None
    remaining: int = 0
    seconds: float = 0.0
    note: str = ""


class Soak:
    """Runs the steps.

    Args:
        chosen: the command line's options.
        environment: in which multigather can be imported.
    """

    def __init__(self, chosen: argparse.Namespace, environment: dict[str, str]) -> None:
        self.chosen, self.environment = chosen, environment
        self.backends = BACKENDS if chosen.device == "cuda" else ("native", "torch")
        self.seconds = 0.0  # that the last command took

    def run(self, *command: str, **more: str) -> tuple[int, str]:
        """Run a command; its status and what it printed."""
        print("+", *command, flush=True)
        environment = {**self.environment, **more}
        start = time.monotonic()
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, text=True,
                timeout=TIME_LIMIT, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return 124, f"it took more than {TIME_LIMIT:g} s"
        finally:
            self.seconds = time.monotonic() - start
        return done.returncode, done.stdout + done.stderr

    def pytest(self, test: str, *arguments: str, before: Sequence[str] = (), **more: str) -> Row:
        """Run tests; the row says how many ran and how many failed."""
        with tempfile.TemporaryDirectory() as folder:
            results = Path(folder, "results.xml")
            command = [sys.executable, "-m", "pytest", "-q", f"--junit-xml={results}"]
            # It warns where tests run in parallel, and warnings are errors.
            command += ["-p", "no:benchmark", *arguments]
            status, printed = self.run(*before, *command, **more)
            if not results.exists():
                return Row(test, remaining=1, seconds=self.seconds, note=last_line(printed))
            (suite,) = ElementTree.parse(results).getroot().iter("testsuite")
        counts = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors")}
        failed = counts["failures"] + counts["errors"]
        ran = counts["tests"] - int(suite.get("skipped", 0))
        broken = re.search(r"^(FAILED|ERROR) .*", printed, re.MULTILINE)
        note = broken[0] if broken else last_line(printed) if status and not failed else ""
        remaining = max(failed, int(status != 0))
        return Row(test, f"{ran} tests", None, None, remaining, self.seconds, note)

    def tests(self) -> list[Row]:
        """The reliability tests."""
        marker = ["-m", "gpu"] if self.chosen.device == "cuda" else ["-m", "not gpu"]
        files = [f"tests/test_{name}.py" for name in RELIABILITY]
        return [self.pytest("reliability tests", *marker, *files)]

    def service(self) -> list[Row]:
        """The service loop on every backend."""
        rows = []
        for backend in self.backends:
            status, printed = self.run(
                sys.executable, "tests/service.py", "--json", "--device", self.chosen.device,
                "--backend", backend, "--seconds", str(self.chosen.seconds),
            )  # fmt: skip
            row = Row(f"service loop, {backend}", remaining=int(status != 0), seconds=self.seconds)
            try:
                facts = json.loads(printed[printed.index("{") :].splitlines()[0])
            except ValueError:
                row.note = last_line(printed)
            else:
                row.load = f"8 threads, {self.chosen.seconds:g} s, {facts['calls']} gathers"
                row.injected, row.found = facts["pairs"], facts["reported"]
                row.remaining = max(row.remaining, len(facts["failures"]))
                row.note = (facts["failures"] or [""])[0]
            rows.append(row)
        return rows

    def fuzz(self) -> list[Row]:
        """Random gathers, some of them misused."""
        rows = []
        shares = FUZZ_SHARES if self.chosen.device == "cuda" else ((None, 100),)
        for backend, share in shares:
            cases = max(self.chosen.cases * share // 100, 1)
            options = ["--backend", backend] if backend else []
            status, printed = self.run(
                sys.executable, "tests/fuzz.py", "--device", self.chosen.device, *options,
                "--cases", str(cases), "--processes", str(self.chosen.processes),
            )  # fmt: skip
            row = Row(f"random gathers, {backend or 'any backend'}", f"{cases} cases")
            row.seconds = self.seconds
            passed = re.search(r"passed: (\d+) calls, (\d+) of them", printed)
            if status or not passed:
                row.remaining, row.note = 1, (printed.strip() or "it printed nothing")[:2000]
            else:
                row.load += f", {passed[1]} calls"
                row.injected = row.found = int(passed[2])
            rows.append(row)
        return rows

    def sanitizers(self) -> list[Row]:
        """NVIDIA's compute-sanitizer over tests of the kernels."""
        tool = shutil.which("compute-sanitizer")
        if tool is None or self.chosen.device != "cuda":
            reason = "compute-sanitizer is not installed" if tool is None else "there is no GPU"
            return [Row("compute-sanitizer", "not run", note=reason)]
        workers = []
        if importlib.util.find_spec("xdist") is not None:
            workers = ["-n", str(self.chosen.processes)]
        rows = []
        for name in SANITIZERS:
            with tempfile.TemporaryDirectory() as folder:
                before = [tool, "--tool", name, "--target-processes", "all"]
                before += ["--log-file", f"{folder}/%p.log"]
                test = f"compute-sanitizer {name}"
                row = self.pytest(
                    test, "-m", "gpu", *workers, *SANITIZED, before=before, **UNCACHED
                )
                found, first = findings(Path(folder))
            row.remaining += found
            row.note = row.note or first
            rows.append(row)
        return rows


STEPS: dict[str, Callable[[Soak], list[Row]]] = {
    "tests": Soak.tests,
    "service": Soak.service,
    "fuzz": Soak.fuzz,
    "sanitizers": Soak.sanitizers,
}


def findings(folder: Path) -> tuple[int, str]:
    """How many errors and hazards the logs of compute-sanitizer have, and the first of them.

    A log for each process that used the GPU; one without its summary counts as an error.
    """
    found, first = 0, ""
    logs = [file.read_text(errors="replace") for file in sorted(folder.glob("*.log"))]
    for log in logs or [""]:
        summary = re.search(r"^=+ (?:ERROR|RACECHECK) SUMMARY: (\d+) ", log, re.MULTILINE)
        errors = int(summary[1]) if summary else 1
        found += errors
        if errors and not first:
            first = log.strip()[:2000] or "compute-sanitizer wrote no log"
    return found, first


def last_line(printed: str) -> str:
    """The last line that says something."""
    return (printed.strip().splitlines() or ["it printed nothing"])[-1]


def table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table, and below it what went wrong or was not run."""
    lines = [
        "| test | load | faults injected | found | remaining | s |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [row.test, row.load, row.injected, row.found, row.remaining, round(row.seconds)]
        lines.append(f"| {' | '.join('' if each is None else str(each) for each in cells)} |")
    lines += [f"{row.test}: {row.note}" for row in rows if row.note]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the steps; 0 if nothing remains, 1 if something does."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=list(STEPS), default=list(STEPS))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--seconds", type=float, default=60.0, help="of the service, per backend")
    parser.add_argument("--cases", type=int, default=100_000, help="of random gathers")
    parser.add_argument("--processes", type=int, default=min(os.cpu_count() or 1, 16))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table there too")
    chosen = parser.parse_args(arguments)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder, "site")
        print(f"multigather installed into a temporary folder {install(site)}", flush=True)
        environment = environment_with(site)
        # PYTHONSAFEPATH keeps a script's own folder off the path too.
        environment["PYTHONPATH"] += os.pathsep + str(ROOT / "tests")
        soak = Soak(chosen, environment)
        for name in chosen.only:
            made = STEPS[name](soak)
            rows += made
            print(table(made), flush=True)
    if len(chosen.only) > 1:
        print(f"\n{table(rows)}")
    if chosen.json:
        chosen.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return int(any(row.remaining for row in rows))


if __name__ == "__main__":
    sys.exit(main())
