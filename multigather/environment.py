"""What this machine has: the devices, and the software that every backend runs on."""

from __future__ import annotations

import platform
import subprocess

import torch

import multigather

from . import native
from .cache.device import cpu_name


def facts() -> dict[str, str]:
    """Describe the machine, one line of text per subject, in the order to print them."""
    return {
        "multigather": multigather.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "native": native.description,
        "driver": _driver(),
        "gpu": _gpus(),
        "cpu": f"{cpu_name()}, {torch.get_num_threads()} threads",
    }


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return "no NVIDIA driver"
    return (answer.stdout.splitlines() or ["no NVIDIA driver"])[0]


def _gpus() -> str:
    if not torch.cuda.is_available():
        return "none that torch can use"
    return ", ".join(
        f"{torch.cuda.get_device_name(i)} (cuda:{i})" for i in range(torch.cuda.device_count())
    )
