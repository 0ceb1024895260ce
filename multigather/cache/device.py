"""Which device a measurement is for, and how close another one is."""

from __future__ import annotations

import functools
import platform
import re
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Device:
    """A kind of device.

    Attributes:
        vendor: "nvidia", "amd" or "cpu".
        name: product name.
        capability: compute capability such as "9.0"; for a CPU the architecture.
        processors: streaming multiprocessors; for a CPU the threads that torch uses.
    """

    vendor: str
    name: str
    capability: str
    processors: int

    @property
    def label(self) -> str:
        """The name as part of a file name."""
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-") or self.vendor

    def rank(self, other: Device) -> int | None:
        """How well measurements of another device fit this one.

        0: the same product with as many processors (a MIG slice has fewer); 1: the same compute
        capability and as many processors; 2: the same compute capability; None: not at all.
        """
        if (self.vendor, self.capability) != (other.vendor, other.capability):
            return None
        if self.processors != other.processors:
            return 2
        return 0 if self.name == other.name else 1


@functools.cache
def device_of(device: torch.device) -> Device | None:
    """The kind of a torch device; None if it is neither a GPU nor a CPU."""
    if device.type == "cpu":
        return Device("cpu", cpu_name(), platform.machine(), torch.get_num_threads())
    if device.type != "cuda":
        return None
    facts = torch.cuda.get_device_properties(device)
    vendor = "amd" if torch.version.hip else "nvidia"
    capability = f"{facts.major}.{facts.minor}"
    return Device(vendor, facts.name, capability, facts.multi_processor_count)


@functools.cache
def cpu_name() -> str:
    """Product name of the CPU, as far as the system tells."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
