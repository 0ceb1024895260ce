"""Create or refresh the virtual environment that the Makefile uses. Standard library only.

Installs this package in editable mode with the versions of constraints.txt, and picks for the
machine at hand the build of torch and the CuPy extra: both for the CUDA major version that the
NVIDIA driver supports, or neither on a machine without an NVIDIA GPU.

    python3 tools/setup_venv.py .venv --extras test,demo
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
import sys
import venv
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH_INDEX = "https://download.pytorch.org/whl"

# The first driver branch that runs programs of each CUDA major version, newest first.
DRIVER_BRANCHES = ((580, 13), (525, 12))
# CUDA 13 dropped the GPUs before this compute capability; CUDA 12 still runs them.
CUDA13_CAPABILITY = 7.5


def query_gpus() -> list[tuple[int, float]]:
    """Return (driver branch, compute capability) of each NVIDIA GPU; empty without one."""
    command = ["nvidia-smi", "--query-gpu=driver_version,compute_cap", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    if answer.returncode != 0:
        return []
    found = re.findall(r"^(\d+)\.[\d.]+, *(\d+\.\d+)\s*$", answer.stdout, re.MULTILINE)
    return [(int(branch), float(capability)) for branch, capability in found]


def cuda_major(gpus: Iterable[tuple[int, float]]) -> int | None:
    """Return the CUDA major version (13 or 12) that every GPU in ``gpus`` can use, or None.

    None means: no GPU, or a driver older than CUDA 12 needs.
    """
    fits = []
    for branch, capability in gpus:
        major = next((cuda for first, cuda in DRIVER_BRANCHES if branch >= first), None)
        if major is None:
            return None
        fits.append(12 if capability < CUDA13_CAPABILITY else major)
    return min(fits, default=None)


def torch_attempts(torch: str, cuda: int | None) -> list[list[str]]:
    """Return the pip arguments to try in turn for torch.

    Args:
        torch: the pinned requirement, such as ``torch==2.13.0``.
        cuda: what ``cuda_major`` returned.
    """
    if cuda == 13 or (cuda is None and sys.platform != "linux"):
        return [[torch]]  # PyPI's build
    if cuda == 12:
        return [[f"{torch}+cu126", "--extra-index-url", f"{TORCH_INDEX}/cu126"]]
    # PyPI's build for Linux brings gigabytes of CUDA libraries, so it comes last.
    return [
        [f"{torch}+cpu"],
        [f"{torch}+cpu", "--extra-index-url", f"{TORCH_INDEX}/cpu"],
        [torch],
    ]


def write_constraints(target: Path, cuda: int | None) -> str:
    """Write the pins that apply on this machine to ``target``; return the pin of torch."""
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    if cuda is not None:
        pins = [pin for pin in pins if not pin.startswith("triton==")]
    target.write_text("\n".join(pins) + "\n")
    return next(pin for pin in pins if pin.startswith("torch=="))


def main() -> int:
    """Set up the environment; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("venv", type=Path, help="folder of the virtual environment")
    parser.add_argument("--extras", default="test,demo", help="extras of pyproject.toml to install")
    args = parser.parse_args()

    if sys.version_info < (3, 11):  # noqa: UP036  runs before anything has checked
        print(
            f"Python 3.11 or newer is needed, this is {platform.python_version()}: "
            "name another, such as `make PYTHON=python3.12 test`"
        )
        return 2

    gpus = query_gpus()
    cuda = cuda_major(gpus)
    if cuda:
        print(f"setting up for CUDA {cuda}: NVIDIA driver {gpus[0][0]}")
    elif gpus:
        print(f"setting up for the CPU: NVIDIA driver {gpus[0][0]} is too old, CUDA 12 needs 525")
    else:
        print("setting up for the CPU: nvidia-smi shows no GPU")

    venv.create(args.venv, with_pip=True, symlinks=os.name != "nt")
    python = args.venv / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    constraints = args.venv / "constraints.txt"
    torch = write_constraints(constraints, cuda)

    def pip_install(*what: str) -> bool:
        command = [python, "-m", "pip", "install", *what, "--constraint", constraints]
        print("+", *command, flush=True)
        return subprocess.run(command, check=False).returncode == 0

    extras = args.extras + (f",cuda{cuda}" if cuda else "")
    if not any(pip_install(*attempt) for attempt in torch_attempts(torch, cuda)):
        print(f"no build of {torch} could be installed; pip's messages are above")
        return 1
    if not pip_install("--editable", f"{ROOT}[{extras}]"):
        print(f"multigather[{extras}] could not be installed; pip's messages are above")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
