"""The built distribution works outside the checkout, and the documented commands exist."""

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = (
    *("multigather", "kernels", "tuning_cache"),
    *("pyproject.toml", "setup.py", "README.md", "LICENSE"),
)


def run(*command, cwd, **variables):
    """Run a command without this environment's PYTHONPATH; return what it printed."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=cwd, env=environment | variables, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A copy of what a distribution is made from, because building leaves files beside it."""
    pytest.importorskip("build")
    source = tmp_path_factory.mktemp("source")
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, source)
    return source


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory):
    """The wheel, built from the source distribution as an index would offer it."""
    dist = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", dist, source, cwd=dist)
    (built,) = dist.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def clean(wheel, tmp_path_factory):
    """A new virtual environment with the wheel, and torch and the rest from this environment."""
    folder = tmp_path_factory.mktemp("clean")
    environment = folder / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", environment, cwd=folder)
    python = environment / "bin" / "python"
    run(
        *(sys.executable, "-m", "pip", "--python", python),
        *("install", "--quiet", "--no-deps", "--no-index", wheel),
        cwd=folder,
    )
    (packages,) = environment.glob("lib/*/site-packages")
    ours = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (packages / "this_environment.pth").write_text("\n".join(ours))
    return environment


def test_wheel_holds_the_packages_and_nothing_else(wheel):
    expected = {
        f"{package}/{path.relative_to(ROOT / folder)}"
        for folder, package, pattern in [
            ("multigather", "multigather", "**/*.py"),
            ("multigather", "multigather", "*.pyi"),
            ("multigather", "multigather", "py.typed"),
            ("kernels", "multigather/kernels", "*.py"),
            ("kernels", "multigather/kernels", "*.cu*"),
            ("tuning_cache", "multigather/tuning_cache", "*.py"),
            ("tuning_cache", "multigather/tuning_cache", "*.json"),
        ]
        for path in (ROOT / folder).glob(pattern)
    }
    assert {
        "multigather/py.typed",
        "multigather/kernels/gather.cu",
        "multigather/kernels/common.cuh",
        "multigather/kernels/scatter_add.cu",
        "multigather/kernels/gather_triton.py",
        "multigather/tuning_cache/default.json",
    } <= expected
    assert files_in(wheel) - extensions_in(wheel) == expected
    assert len(extensions_in(wheel)) == (shutil.which("gcc") is not None)


def files_in(wheel):
    """Names of the files that a wheel installs."""
    return {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}


def extensions_in(wheel):
    """Those of them that are compiled."""
    return {name for name in files_in(wheel) if re.match(r"multigather/_native\..*(so|pyd)$", name)}


def test_a_wheel_is_built_without_a_compiler(wheel, source, tmp_path):
    command = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", tmp_path]
    run(*command, source, cwd=tmp_path, CC="/nonexistent/cc")
    (built,) = tmp_path.glob("*.whl")
    assert not extensions_in(built)
    assert files_in(built) == files_in(wheel) - extensions_in(wheel)


def test_wheel_metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode())
        assert any(name.endswith("licenses/LICENSE") for name in archive.namelist())
    assert metadata["Name"] == "multigather-kernels"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert set(metadata.get_all("Provides-Extra")) == {
        "cuda12",
        "cuda13",
        "demo",
        "dev",
        "docs",
        "plot",
        "pyg",
        "test",
        "torchrl",
    }
    required = [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    assert {re.match(r"[\w-]+", line)[0] for line in required} == {
        "torch", "triton", "filelock", "platformdirs", "pydantic", "rich", "typer",
    }  # fmt: skip


def test_installed_wheel_gathers_outside_the_checkout(clean, wheel, tmp_path):
    script = """
import importlib.metadata, importlib.resources, json
import torch
import multigather as mg
kernels = importlib.resources.files("multigather.kernels")
tuning = importlib.resources.files("multigather.tuning_cache")
buffers = torch.arange(8.0).reshape(4, 2), torch.tensor([5, 6, 7, 8], dtype=torch.int16)
rows = mg.gather(torch.tensor([[2, 0]]), *buffers)
print(json.dumps({
    "package": mg.__file__,
    "kernel": str(kernels / "gather.cu"),
    "source": (kernels / "gather.cu").read_text(),
    "tuning": str(tuning / "default.json"),
    "rules": json.loads((tuning / "default.json").read_text()),
    "versions": [mg.__version__, importlib.metadata.version("multigather-kernels")],
    "rows": [row.tolist() for row in rows],
    "explanation": str(mg.explain(torch.tensor([2]), *buffers)),
    "native": mg.native.extension and mg.native.extension.__file__,
}))
"""
    found = json.loads(run(clean / "bin" / "python", "-c", script, cwd=tmp_path))
    for name in ("package", "kernel", "tuning"):
        assert Path(found[name]).is_relative_to(clean), found[name]
    assert "__global__" in found["source"]
    assert found["rules"]
    assert found["versions"][0] == found["versions"][1]
    assert found["rows"] == [[[[4.0, 5.0], [0.0, 1.0]]], [[7, 5]]]
    assert "torch" in found["explanation"]
    assert bool(found["native"]) == bool(extensions_in(wheel))
    if found["native"]:
        assert Path(found["native"]).is_relative_to(clean)


def test_installed_commands(clean, tmp_path):
    version = run(clean / "bin" / "multigather", "--version", cwd=tmp_path).strip()
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", version)
    assert version in run(clean / "bin" / "python", "-m", "multigather", "info", cwd=tmp_path)


def test_help_of_each_installed_command(clean, tmp_path):
    script = """
import json, sys
from typer.testing import CliRunner
from multigather.cli import app
results = [CliRunner().invoke(app, [*words, "--help"]) for words in json.loads(sys.argv[1])]
print(json.dumps([[result.exit_code, result.output] for result in results]))
"""
    commands = [[], *([name] for name in cli_commands())]
    printed = run(clean / "bin" / "python", "-c", script, json.dumps(commands), cwd=tmp_path)
    (overview, *each) = json.loads(printed)
    for (name,), (exit_code, text) in zip(commands[1:], each, strict=True):
        assert exit_code == 0
        assert f"{name} [OPTIONS]" in text
        assert name in overview[1]


def cli_commands():
    """The command line's commands, name to click command."""
    typer = pytest.importorskip("typer")
    from multigather.cli import app

    return typer.main.get_command(app).commands


def documented_lines():
    """Every line of code in the documentation, from code blocks and from code within text."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    text = "\n".join(page.read_text() for page in pages)
    blocks = re.findall(r"^```[^\n]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    text = re.sub(r"^```[^\n]*\n.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    return [line.strip().removeprefix("$ ") for line in lines + re.findall(r"`([^`\n]+)`", text)]


def test_documented_make_targets_exist():
    targets = {m[1] for line in documented_lines() if (m := re.match(r"make ([a-z]+)", line))}
    assert {"demo", "test", "gpu", "docs", "lint"} <= targets
    for target in sorted(targets):
        run("make", "--dry-run", target, cwd=ROOT)


def test_documented_files_exist():
    """The files that the documentation of what is tested names."""
    text = (ROOT / "docs" / "reliability.md").read_text() + (ROOT / "README.md").read_text()
    named = set(re.findall(r"`((?:tests|tools|docs)/[\w.]+)`", text))
    assert len(named) > 10
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_documented_cli_commands_exist():
    pattern = re.compile(r"(?:\S*/)?(?:python3? -m )?multigather ([a-z][a-z-]*)(.*)")
    documented = [m for line in documented_lines() if (m := pattern.fullmatch(line))]
    assert "demo" in {m[1] for m in documented}
    commands = cli_commands()
    for name, rest in (m.groups() for m in documented):
        assert name in commands, f"documented: multigather {name}"
        options = {option for param in commands[name].params for option in param.opts}
        used = set(re.findall(r"(?<!\S)--[a-z-]+", rest)) - {"--help"}
        assert used <= options, f"documented: multigather {name}{rest}"
