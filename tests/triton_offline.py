"""Compiles the Triton kernel for GPUs that are not there; a script run by test_triton_compile.py.

Reads a JSON list of cases from standard input and writes a JSON list of results. It needs a process
of its own: where there is no GPU, the tests have the kernel interpreted, and Triton settles that
once for a process. What runs is the backend's code up to the launch; in place of Triton's driver is
one that names a GPU and loads nothing.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from multigather import faults
from multigather.backends import _triton
from multigather.backends.base import Destination
from multigather.request import Field, Request, Site

CPU = torch.device("cpu")


class AbsentDriver:
    """What Triton asks of a driver before a launch."""

    def __init__(self, architecture: int) -> None:
        self._architecture = architecture
        self.utils = self

    def get_current_device(self) -> int:
        """A number per architecture, since compiled kernels are kept per device."""
        return self._architecture

    def get_current_stream(self, device: int) -> int:
        """The default stream."""
        return 0

    def get_current_target(self) -> GPUTarget:
        """The GPU to compile for."""
        return GPUTarget("cuda", self._architecture, 32)

    def get_device_properties(self, device: int) -> dict[str, int]:
        """No more shared memory than every GPU gives without being asked."""
        return {"max_shared_mem": 48 * 1024}

    def load_binary(self, name: str, binary: bytes, *rest: Any) -> tuple[int, int, int, int, int]:
        """Module, function, registers, spills, most threads."""
        return 1, 1, 0, 0, 1024

    def launcher_cls(self, source: Any, metadata: Any) -> None:
        """Nothing is launched."""


compilations: list[dict[str, str]] = []


def on_compilation(*, metadata_group: dict[str, str], cache_hit: bool, **ignored: Any) -> None:
    """Keep the paths of what was compiled, by suffix."""
    compilations.append({Path(name).suffix: str(path) for name, path in metadata_group.items()})


def launch_of(case: dict[str, Any]) -> Any:
    """Make the launch of a case, as a gather on a GPU would."""
    fields = tuple(
        Field(
            dtype=torch.uint8,
            rows=rows,
            row_shape=(row_bytes,),
            row_bytes=row_bytes,
            row_stride_bytes=row_stride_bytes,
            contiguous_rows=True,
            alignment=alignment,
        )
        for rows, row_bytes, row_stride_bytes, alignment in case["buffers"]
    )
    request = Request(
        device=torch.device("cuda", 0),
        host_memory=False,
        index_dtype=getattr(torch, case["index_dtype"]),
        count=case["count"],
        bounds=case["bounds"],
        fields=fields,
    )
    numbers = tuple(range(len(fields)))
    labels = tuple(number + case["first_label"] for number in numbers)
    return _triton._launch_of(
        request,
        _triton.TritonConfig(**case["config"]),
        Site(case["plan"], labels, tuple(f"bufs[{label}]" for label in range(labels[-1] + 1))),
        numbers,
        case["count"],
        case["index_stride"],
        [Destination(field.row_bytes + case["out_gap"], 16) for field in fields],
    )


def scaled_right(case: dict[str, Any], launch: Any, board: Any) -> bool:
    """Whether the launch, scaled to other numbers of indices, is as it would be made for them."""
    if launch.scale is None:
        return bool(case["count"] >= _triton.LARGE)
    for count in (1, 2, 77, 4096, 123_457):
        if count > launch.scale.most:
            break
        with (
            mock.patch.object(torch.cuda, "device", contextlib.nullcontext),
            mock.patch.object(faults, "board_of", return_value=board),
        ):
            made = launch_of(case | {"count": count})
        scaled = launch.at(count)
        for fact in ("grid", "threads", "shared_bytes", "parameters", "places", "offsets"):
            if getattr(made, fact) != getattr(scaled, fact):
                return False
    return True


def resources(cubin: str) -> dict[str, int]:
    """What the machine code uses: ``REG``, ``STACK``, ``LOCAL`` and others."""
    tool = knobs.nvidia.cuobjdump.path
    text = subprocess.run(
        [tool, "--dump-resource-usage", cubin], capture_output=True, text=True, check=True
    ).stdout
    (line,) = re.findall(r"Function gather:\s*(.*)", text)
    return {name: int(value) for name, value in re.findall(r"(\w+)(?:\[\d\])?:(\d+)", line)}


def run(case: dict[str, Any]) -> dict[str, Any]:
    """Compile one case and describe the result."""
    driver.set_active(AbsentDriver(case["architecture"]))
    compilations.clear()
    start = time.perf_counter()
    board = faults.Board(CPU)
    with (
        warnings.catch_warnings(record=True) as caught,
        mock.patch.object(torch.cuda, "device", contextlib.nullcontext),
        mock.patch.object(faults, "board_of", return_value=board),
    ):
        warnings.simplefilter("always")
        launch = launch_of(case)
    result: dict[str, Any] = {
        "seconds": time.perf_counter() - start,
        "compilations": len(compilations),
        "launch": type(launch).__name__,
        "warnings": [str(each.message) for each in caught],
    }
    if compilations:
        ptx = Path(compilations[-1][".ptx"]).read_text()
        (parameters,) = re.findall(r"\.entry gather\((.*?)\)", ptx, re.DOTALL)
        result["parameter_bits"] = [
            int(bits) for bits in re.findall(r"\.param \.[a-z](\d+)", parameters)
        ]
        result["accesses"] = sorted(set(re.findall(r"(?:ld|st)\.global[\w.:]*", ptx)))
        result["orders"] = re.findall(r"\b(?:atom|red|fence|membar)\.[\w.]+", ptx)
        result["resources"] = resources(compilations[-1][".cubin"])
        result["shared"] = json.loads(Path(compilations[-1][".json"]).read_text())["shared"]
    if isinstance(launch, _triton.Launch):
        result["scaled"] = scaled_right(case, launch, board)
        result["offsets"] = list(launch.offsets)
        result["threads"] = launch.threads
    return result


def main() -> None:
    """See the module's docstring."""
    results = []
    with tempfile.TemporaryDirectory() as folder:
        knobs.cache.dir = folder
        knobs.compilation.listener = on_compilation
        for case in json.load(sys.stdin):
            try:
                results.append(run(case))
            except Exception:
                results.append({"error": traceback.format_exc()})
    json.dump({"triton": triton.__version__, "results": results}, sys.stdout)


if __name__ == "__main__":
    main()
