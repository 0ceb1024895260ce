"""The set-up scripts: which CUDA a machine gets, and installing without pip or network."""

import importlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import multigather

ROOT = Path(__file__).resolve().parent.parent


def load(name):
    """Import a script of tools/."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


setup_venv = load("setup_venv")
gpu_check = load("gpu_check")


@pytest.mark.parametrize(
    ("printed", "cuda"),
    [
        ("580.159.03, 9.0\n", 13),
        ("610.12, 12.0\n", 13),
        ("575.57.08, 8.6\n", 12),
        ("525.60.13, 7.5\n", 12),
        ("470.256.02, 8.0\n", None),
        ("580.95.05, 7.0\n", 12),
        ("580.95.05, 9.0\n580.95.05, 7.0\n", 12),
        ("No devices were found\n", None),
        ("", None),
    ],
)
def test_cuda_major_follows_the_driver(printed, cuda, tmp_path, monkeypatch):
    script = tmp_path / "nvidia-smi"
    script.write_text(f"#!/bin/sh\nprintf '%s' '{printed}'\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert setup_venv.cuda_major(setup_venv.query_gpus()) == cuda


@pytest.mark.parametrize("failure", ["missing", "fails"])
def test_no_gpu_where_nvidia_smi_does_not_work(failure, tmp_path, monkeypatch):
    if failure == "fails":
        script = tmp_path / "nvidia-smi"
        script.write_text("#!/bin/sh\necho 580.1.2, 9.0\nexit 9\n")
        script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert setup_venv.query_gpus() == []


@pytest.mark.parametrize("cuda", [None, 12, 13])
def test_pins_follow_the_build_of_torch(cuda, tmp_path):
    torch = setup_venv.write_constraints(tmp_path / "constraints.txt", cuda)
    pins = (tmp_path / "constraints.txt").read_text()
    assert torch.startswith("torch==")
    assert torch in pins
    assert ("\ntriton==" in pins) == (cuda is None)
    first = setup_venv.torch_attempts(torch, cuda)[0]
    if sys.platform == "linux":
        assert first[0] == torch + {None: "+cpu", 12: "+cu126", 13: ""}[cuda]


def test_extras_named_by_the_set_up_exist():
    text = (ROOT / "pyproject.toml").read_text()
    for extra in ("test", "demo", "cuda12", "cuda13", "dev"):
        assert f"\n{extra} = [" in text


@pytest.mark.parametrize("how", ["by pip", "by copying"])
def test_gpu_check_installs_a_package_that_gathers(how, tmp_path):
    python = sys.executable
    if how == "by copying":
        without_pip = tmp_path / "venv"
        subprocess.run([python, "-m", "venv", "--without-pip", without_pip], check=True)
        python = str(without_pip / "bin" / "python")
    site = tmp_path / "site"
    assert gpu_check.install(site, python).startswith(how)

    script = """
import importlib.resources, json
import torch
import multigather as mg
print(json.dumps([
    mg.__file__,
    str(importlib.resources.files("multigather.kernels") / "gather.cu"),
    mg.gather(torch.tensor([1]), torch.tensor([3, 4]))[0].tolist(),
    mg.__version__,
    mg.native.extension and mg.native.extension.__file__,
]))
"""
    environment = {**os.environ, "PYTHONPATH": str(site), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    package, kernel, rows, version, extension = json.loads(done.stdout)
    assert Path(package).is_relative_to(site)
    assert Path(kernel).is_relative_to(site)
    assert Path(kernel).is_file()
    assert rows == [4]
    assert version == multigather.__version__
    # An editable install of this environment lends its own extension to a copy without one.
    built = list((site / "multigather").glob("_native*.so"))
    assert len(built) == (how == "by pip" and shutil.which("gcc") is not None)
    assert not built or Path(extension) == built[0]


def test_gpu_check_names_what_is_missing(monkeypatch, capsys):
    def version(name):
        if name in ("pytest", "gymnasium"):
            raise gpu_check.metadata.PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(gpu_check.metadata, "version", version)
    assert gpu_check.main([]) == 2
    printed = capsys.readouterr().out
    assert "pytest is missing" in printed
    assert "gymnasium is missing: needed for the demo" in printed
    assert "cannot run without pytest" in printed


def test_gpu2_check_ends_with_a_table(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    gpu2_check = importlib.import_module("gpu2_check")
    report = json.loads((ROOT / "benchmarks" / "gloo-2.json").read_text())
    measured = {
        "peer_gb_per_s": {"512": {"copy": 300.0, "rows": 270.0}},
        "decode_us": {"gpu": {"peer reads": 4.5, "own rows": 2.0}},
    }
    text = gpu2_check.summary(report | measured)
    assert len(text.splitlines()) == 2 + sum(1 + len(r["missing"]) for r in report["results"])
    assert "replay, uniform, 409 indices: exchange" in text
    assert "not peer reads: UnsupportedError: no symmetric memory" in text
    assert "rows of 512 bytes: 270.0 GB/s, 90% of the 300.0 of a copy" in text
    assert text.endswith("decode step, gpu: peer reads 4.5 us, own rows 2.0 us")


@pytest.fixture
def gpu_soak(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")  # it imports gpu_check
    return importlib.import_module("gpu_soak")


def soak_of(gpu_soak, monkeypatch, outcome, *options):
    """Run some steps of the soak with commands that only pretend; the status and the commands."""
    commands = []

    def run(self, *command, **more):
        commands.append(command)
        return outcome(command)

    monkeypatch.setattr(gpu_soak.Soak, "run", run)
    monkeypatch.setattr(gpu_soak, "install", lambda site: "not at all")
    return gpu_soak.main(options), commands


def test_soak_of_what_is_well(gpu_soak, monkeypatch, tmp_path, capsys):
    """Every backend is served and fuzzed, and the table and the file have what they did."""

    def outcome(command):
        if "tests/service.py" in command:
            facts = {"calls": 900, "bad": 5, "pairs": 15, "errors": 4, "reported": 15}
            return 0, "a line\n" + json.dumps({**facts, "failures": []}) + "\n"
        return 0, "50 cases of seed 0 passed: 200 calls, 30 of them bad or misused\n"

    file = tmp_path / "soak.json"
    status, commands = soak_of(
        gpu_soak, monkeypatch, outcome, "--only", "service", "fuzz", "--json", str(file)
    )
    assert status == 0

    def values(script, option):
        given = [command for command in commands if script in command and option in command]
        return [command[command.index(option) + 1] for command in given]

    for script in ("tests/service.py", "tests/fuzz.py"):
        assert (ROOT / script).exists()
        assert set(values(script, "--backend")) == {"cupy", "triton", "torch"}
    assert sum(map(int, values("tests/fuzz.py", "--cases"))) == 100_000
    printed = capsys.readouterr().out
    assert "| service loop, cupy | 8 threads, 60 s, 900 gathers | 15 | 15 | 0 | 0 |" in printed
    assert "| random gathers, any backend | 30000 cases, 200 calls | 30 | 30 | 0 | 0 |" in printed
    assert [row["remaining"] for row in json.loads(file.read_text())] == [0] * 7


def test_soak_of_what_is_not(gpu_soak, monkeypatch, capsys):
    """A failure of any step makes the status 1, and its text is in the table."""

    def outcome(command):
        if "tests/service.py" in command:
            facts = {"calls": 9, "bad": 5, "pairs": 15, "errors": 4, "reported": 14}
            return 1, json.dumps({**facts, "failures": ["15 sent and 14 reported"]})
        if "tests/fuzz.py" in command:
            return 1, "seed 0, case 7: output 0 has other bytes\n  python tests/fuzz.py --case x"
        return 2, "pytest could not start"

    for step, text in (
        ("service", "service loop, cupy: 15 sent and 14 reported"),
        ("fuzz", "seed 0, case 7: output 0 has other bytes\n  python tests/fuzz.py --case x"),
        ("tests", "reliability tests: pytest could not start"),
    ):
        status, _ = soak_of(gpu_soak, monkeypatch, outcome, "--only", step)
        assert status == 1
        assert text in capsys.readouterr().out


def test_soak_says_what_it_cannot_run(gpu_soak, monkeypatch, capsys):
    monkeypatch.setattr(gpu_soak.shutil, "which", lambda name: None)
    status, commands = soak_of(gpu_soak, monkeypatch, None, "--only", "sanitizers")
    assert (status, commands) == (0, [])
    assert "compute-sanitizer is not installed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("logs", "found", "first"),
    [
        (("========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n",) * 2, 0, ""),
        (("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n",), 0, ""),
        (
            (
                "========= ERROR SUMMARY: 0 errors\n",
                "========= Invalid __global__ read of size 16 bytes\n"
                "========= ERROR SUMMARY: 3 errors\n",
            ),
            3,
            "Invalid __global__ read",
        ),
        (("========= COMPUTE-SANITIZER\n",), 1, "COMPUTE-SANITIZER"),
        ((), 1, "wrote no log"),
    ],
)
def test_findings_of_the_sanitizers(gpu_soak, tmp_path, logs, found, first):
    for number, log in enumerate(logs):
        (tmp_path / f"{number}.log").write_text(log)
    errors, text = gpu_soak.findings(tmp_path)
    assert errors == found
    assert first in text and bool(text) == bool(first)


def test_soak_runs_test_files_that_exist(gpu_soak):
    assert all((ROOT / "tests" / f"test_{name}.py").exists() for name in gpu_soak.RELIABILITY)
    assert all((ROOT / name).exists() for name in gpu_soak.SANITIZED if name.startswith("tests/"))


def test_service_and_fuzz_print_what_the_soak_reads(gpu_soak):
    """A second of both on the CPU, as the soak runs them."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}
    options = gpu_soak.argparse.Namespace(device="cpu", seconds=1.0, cases=10, processes=2)
    soak = gpu_soak.Soak(options, environment)
    for row in (*soak.service(), *soak.fuzz()):
        assert row.remaining == 0, row
        assert row.injected == row.found > 0
        assert row.seconds > 0
