"""The CUDA C kernel on a CPU: compiled as C++ behind a shim, driven by the real host code.

`HostCudaBackend` is the CUDA backend with its last two steps replaced: `load` builds a shared
library with g++ in place of NVRTC, `launch` calls it in place of the driver. Everything before,
from field descriptions to the packed parameter structure, is the code that ships.

With ``MULTIGATHER_HOST_SANITIZE=1`` the library is built with the address and undefined-behaviour
sanitizers; the process must then run with libasan preloaded (see test_sanitizers.py).
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any, ClassVar

import torch

from multigather import faults
from multigather.backends._cupy import (
    SMALL_CAPACITY,
    Compilation,
    CudaBackend,
)
from multigather.backends.base import Config, KernelRunner, Refusal, Runner, row_refusals
from multigather.bounds import raise_if_bad
from multigather.launch import Block, Scale
from multigather.request import Request, Site

HERE = Path(__file__).parent
SANITIZE = os.environ.get("MULTIGATHER_HOST_SANITIZE", "0") == "1"
FLAGS = ["-std=c++17", "-shared", "-fPIC", "-fno-strict-aliasing", "-g1", "-Wall", "-Werror"]
FLAGS += ["-Wno-unknown-pragmas"]
if SANITIZE:
    FLAGS += ["-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
else:
    FLAGS += ["-O1"]


def compiler() -> str | None:
    """Path of g++, None if there is none."""
    return shutil.which("g++")


@functools.cache
def library(specialisation: Compilation) -> ctypes.CDLL:
    """The kernel, built for these macros; builds are kept in the checkout's build folder."""
    kernel = specialisation.kernel
    source = resources.files("multigather.kernels") / f"{kernel}.cu"
    macros = [f"-D{name}={value}" for name, value in specialisation.macros().items()]
    macros += [f"-DKERNEL={kernel}", f'-DSOURCE="{kernel}.cu"']
    with resources.as_file(source) as path:
        command = [str(compiler()), *FLAGS, *macros, f"-I{HERE}", f"-I{path.parent}"]
        sources = (path, path.with_name("common.cuh"), HERE / "shim.h", HERE / "run.cpp")
        texts = [each.read_text() for each in sources]
        digest = hashlib.sha256("\0".join([*command[1:], *texts]).encode()).hexdigest()[:24]
        target = HERE.parent.parent / "build" / "cuda_host" / f"{digest}.so"
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            unfinished = target.with_suffix(f".{os.getpid()}")
            subprocess.run(
                [*command, str(HERE / "run.cpp"), "-o", str(unfinished)],
                check=True, capture_output=True, text=True,
                # The sanitizer's allocator would make the compiler twice as slow.
                env={name: value for name, value in os.environ.items() if name != "LD_PRELOAD"},
            )  # fmt: skip
            unfinished.replace(target)
    loaded = ctypes.CDLL(str(target))
    loaded.parameters_size.restype = ctypes.c_size_t
    packed = specialisation.parameter_bytes()
    assert loaded.parameters_size() == packed, f"the host packs another structure than {kernel}.cu"
    return loaded


class HostCudaBackend(CudaBackend):
    """The CUDA backend for CPU tensors."""

    name: ClassVar[str] = "cupy"

    def __init__(self, most_fields: int = SMALL_CAPACITY) -> None:
        self.most_fields = most_fields
        self.launches = 0

    def unavailable(self) -> list[str]:
        """Only a C++ compiler is needed."""
        return [] if compiler() else ["g++ is not installed"]

    def why_not(self, request: Request) -> list[Refusal]:
        """As the CUDA backend, for CPU tensors."""
        return [Refusal(text) for text in self.unavailable()] + row_refusals(request)

    def capacity(self, device: torch.device) -> int:
        """As many fields as the test wants in one launch."""
        return self.most_fields

    def compiles_for(self, device: torch.device) -> bool:
        """Everywhere."""
        return not self.unavailable()

    def adds_vectors(self, device: torch.device) -> bool:
        """In units of up to 16 bytes, word after word."""
        return True

    def launch_of(
        self,
        specialisation: Compilation,
        grid: int,
        threads: int,
        device: torch.device,
        parameters: bytes,
        places: Sequence[int],
        scale: Scale | None = None,
    ) -> Any:
        """A launch that runs all blocks at once, in this thread."""
        function = library(specialisation).run

        def launch(addresses: Sequence[int]) -> None:
            self.launches += 1
            block = Block.of(parameters, (0,))
            for place, address in zip(places, addresses, strict=True):
                block.memory[place // 8] = address
            function(ctypes.c_uint(grid), ctypes.c_uint(threads), ctypes.c_void_p(block.address))

        return launch

    def prepare(self, request: Request, config: Config, site: Site) -> Runner:
        """As the CUDA backend; a CPU call raises at once, as the contract says."""
        runner = super().prepare(request, config, site)
        return functools.partial(self._run, runner, site)

    def _run(
        self,
        runner: KernelRunner,
        site: Site,
        indices: torch.Tensor,
        shape: torch.Size,
        sources: Sequence[torch.Tensor],
        outs: Sequence[torch.Tensor] | None,
    ) -> list[torch.Tensor]:
        if outs is not None and runner.request.bounds == "raise":
            raise_if_bad(indices, shape, runner.request, site)
        results = runner(indices, shape, sources, outs)
        error = faults.board_of(runner.request.device).take(tuple(shape))
        if error is not None:
            raise error
        return results
