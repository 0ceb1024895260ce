"""Run TorchRL's own replay-buffer tests with this package's storages in place of TorchRL's.

Needs a checkout of TorchRL of about the installed version, and pytest. Runs the tests twice, with
TorchRL's storages and with ours, and fails if a test that passes with the former does not with the
latter. A few of TorchRL's tests pass or fail by chance: run those again. Arguments after the folder
are passed on to pytest.

    git clone --depth 1 https://github.com/pytorch/rl && python tools/torchrl_tests.py rl/test/rb
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

STORAGES = ("TensorStorage", "LazyTensorStorage", "LazyMemmapStorage")

# Loaded by pytest before it imports a test: every later import of a storage finds ours.
PLUGIN = """
import torchrl.data
from torchrl.data import replay_buffers
from torchrl.data.replay_buffers import storages
from multigather.integrations import torchrl as ours

for name in {names!r}:
    for module in (torchrl.data, replay_buffers, storages):
        if hasattr(module, name):
            setattr(module, name, getattr(ours, name))
"""


def outcomes(folder: Path, arguments: list[str], ours: bool) -> dict[str, str]:
    """Run the tests; return "passed", "failed" or "skipped" by the test's name."""
    with tempfile.TemporaryDirectory() as place:
        Path(place, "our_storages.py").write_text(PLUGIN.format(names=STORAGES))
        report = Path(place, "report.xml")
        # Those of several hosts need Ray or processes that talk to one another.
        names = sorted(path.name for path in folder.glob("test_*.py"))
        files = [name for name in names if "distributed" not in name]
        command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", *files, *arguments]
        if ours:
            command += ["-p", "our_storages"]
        paths = [place, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        subprocess.run(command, cwd=folder, env=environment, check=False)
        found = {}
        for case in ElementTree.parse(report).getroot().iter("testcase"):
            kinds = {child.tag for child in case}
            name = f"{case.get('classname')}.{case.get('name')}"
            found[name] = (
                "failed" if kinds & {"failure", "error"} else
                "skipped" if "skipped" in kinds else
                "passed"
            )  # fmt: skip
        return found


def main(arguments: list[str]) -> int:
    """Run both and compare; return 1 if ours is worse."""
    if not arguments or not Path(arguments[0]).is_dir():
        print(__doc__)
        return 2
    folder = Path(arguments[0]).resolve()
    try:
        importlib.import_module("torchrl._torchrl")
    except ImportError as error:
        print(f"TorchRL's extension does not load, so prioritized samplers fail in both: {error}")
    theirs, ours = (outcomes(folder, arguments[1:], each) for each in (False, True))
    worse = sorted(name for name, kind in theirs.items() if kind == "passed" != ours.get(name))
    for label, found in (("TorchRL's storages", theirs), ("multigather's storages", ours)):
        counts = {
            kind: list(found.values()).count(kind) for kind in ("passed", "failed", "skipped")
        }
        print(f"{label}: " + ", ".join(f"{count} {kind}" for kind, count in counts.items()))
    for name in worse:
        print(f"passes with TorchRL's storages only: {name}")
    return 1 if worse or not theirs else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
