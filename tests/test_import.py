"""Importing multigather is light: nothing optional, no GPU, no file; checked in fresh processes."""

import json
import os
import subprocess
import sys

import pytest
from cases import run_program

# Makes packages absent: neither importlib nor importlib.metadata finds them any more.
HIDE = """
import importlib.machinery, sys

def hide(*hidden):
    class Hiding(importlib.machinery.PathFinder):
        @classmethod
        def find_spec(cls, name, path=None, target=None):
            if name.partition(".")[0] in hidden:
                return None
            return super().find_spec(name, path, target)

        @staticmethod
        def find_distributions(context):
            if context.name and context.name.startswith(hidden):
                return iter(())
            return importlib.machinery.PathFinder.find_distributions(context)

    finders = sys.meta_path
    finders[:] = [Hiding if f is importlib.machinery.PathFinder else f for f in finders]
"""


def run_fresh(script, folder):
    """Run a script that prints JSON in a new process in an empty folder; return what it printed."""
    environment = {
        **os.environ,
        "HOME": str(folder),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "TMPDIR": str(folder),
        "TRITON_INTERPRET": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """What ``import multigather`` did in a fresh process, beyond what ``import torch`` does."""
    folder = tmp_path_factory.mktemp("empty")
    found = run_fresh(
        """
import json, sys
import torch
before = set(sys.modules)
import multigather
print(json.dumps({
    "loaded": sorted({name.partition(".")[0] for name in set(sys.modules) - before}),
    "gpu": torch.cuda.is_initialized(),
}))
""",
        folder,
    )
    return {**found, "files": [str(path) for path in folder.rglob("*")]}


def test_import_loads_nothing_optional(imported):
    assert "multigather" in imported["loaded"]
    optional = {
        "cupy", "cupy_backends", "triton", "typer", "rich", "click", "pydantic",
        "platformdirs", "filelock", "gymnasium", "kernels", "tuning_cache",
        "tensordict", "torchrl", "torch_geometric",
    }  # fmt: skip
    assert not optional & set(imported["loaded"])


def test_import_touches_no_gpu(imported):
    assert imported["gpu"] is False


def test_import_creates_no_file(imported):
    assert imported["files"] == []


def test_cpu_gather_without_triton_and_cupy(tmp_path):
    found = run_fresh(
        HIDE
        + """
hide("triton", "cupy")
import json
import torch
import multigather as mg
buffers = torch.arange(12.0).reshape(4, 3), torch.tensor([True, False, False, True])
rows = mg.gather(torch.tensor([3, 0, -2]), *buffers)
print(json.dumps({
    "rows": [row.tolist() for row in rows],
    "backends": {s.name: [s.available, s.version, s.reasons] for s in mg.backends()},
}))
""",
        tmp_path,
    )
    assert found["rows"] == [
        [[9.0, 10.0, 11.0], [0.0, 1.0, 2.0], [6.0, 7.0, 8.0]],
        [True, True, False],
    ]
    for name in ("triton", "cupy"):
        available, version, reasons = found["backends"][name]
        assert not available
        assert version is None
        assert any("not installed" in reason for reason in reasons), reasons
    assert found["backends"]["torch"][0]


def test_gather_does_not_load_the_other_backends(tmp_path):
    loaded = run_fresh(
        """
import json, sys
import torch
import multigather as mg
mg.gather(torch.tensor([1]), torch.zeros(2, 3))
others = ("cupy", "triton", "pydantic", "torch.distributed.tensor", "multigather.distributed")
print(json.dumps([name for name in others if name in sys.modules]))
""",
        tmp_path,
    )
    assert loaded == []


QUIET = """
import sys, warnings
import torch  # whose own import may warn
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    import multigather
    device = sys.argv[1]
    buffer = torch.arange(30.0, device=device).view(10, 3)
    other = torch.arange(10, device=device)
    leaf = torch.ones(10, 3, device=device, requires_grad=True)
    indices = torch.tensor([[3], [-1]], device=device)
    out = (torch.empty(2, 1, 3, device=device), torch.empty(2, 1, dtype=torch.int64, device=device))
    plan = multigather.plan(buffer, other)
    fields = {"a": (torch.float32, (3,)), "b": torch.int16}
    packed = multigather.alloc(10, fields, device=device)
    for _ in range(4):
        multigather.gather(indices, buffer, other)
        multigather.gather(indices, {"a": buffer, "b": None}, (other,))
        multigather.gather(indices, buffer, other, out=out)
        multigather.gather(indices, buffer.t(), bounds="clip")
        multigather.gather(indices, packed)
        plan(indices), plan(indices, out=out)
        multigather.gather(indices, leaf, other)[0].sum().backward()
        if device == "cpu":
            multigather.gather(indices.numpy(), buffer.numpy(), other.numpy())
    multigather.explain(indices, buffer), multigather.backends(), multigather.check()
    for each in seen:
        print(each)
"""


def test_a_plain_program_sees_no_warning(device: str) -> None:
    """Neither one of multigather's nor one that a library gives because of it."""
    assert run_program(QUIET, device).stdout == ""
