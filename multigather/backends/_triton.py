"""Triton backend: kernels/gather_triton.py, on GPUs, and on CPU tensors in Triton's interpreter."""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import importlib.util
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from .. import faults
from ..bounds import raise_if_bad
from ..request import Request, Site
from .base import (
    Config,
    Destination,
    KernelRunner,
    Refusal,
    Runner,
    copy_unit,
    row_refusals,
)

# Kernel parameters take at most 4,096 bytes: two pointers, a row count, two strides, a unit count
# (8 bytes each) and a buffer number (4) per field, beside about 60 bytes for the call.
CAPACITY = 64
MOST_PROGRAMS = 2**31 - 1

ELEMENT_DTYPES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class TritonConfig(Config):
    """Knobs of the Triton kernel.

    Attributes:
        block: elements of one tile (``BLOCK``), a power of two.
        num_warps: warps per program, a power of two.
        fused: each program copies the same rows of every field, rather than a tile of one.
    """

    block: int = 1024
    num_warps: int = 4
    fused: bool = False

    def __post_init__(self) -> None:
        if self.block not in (64, 128, 256, 512, 1024, 2048, 4096, 8192):
            raise ValueError(f"block must be a power of two from 64 to 8192, got {self.block!r}")
        if self.num_warps not in (1, 2, 4, 8, 16):
            raise ValueError(f"num_warps must be 1, 2, 4, 8 or 16, got {self.num_warps!r}")
        if not isinstance(self.fused, bool):
            raise ValueError(f"fused must be true or false, got {self.fused!r}")


class TritonBackend:
    """See the module's docstring; the methods are those of `base.Backend`."""

    name: ClassVar[str] = "triton"

    def version(self) -> str | None:
        """Version of Triton, None if it is not installed."""
        try:
            return importlib.metadata.version("triton")
        except importlib.metadata.PackageNotFoundError:
            return None

    def unavailable(self) -> list[str]:
        """See `base.Backend.unavailable`."""
        if importlib.util.find_spec("triton") is None:
            return ["Triton is not installed (pip install triton)"]
        if interpreted():
            return []
        reasons = []
        if not torch.cuda.is_available():
            reasons.append(
                "torch sees no GPU (CPU tensors run in Triton's interpreter under TRITON_INTERPRET=1)"
            )
        elif not any(shutil.which(name) for name in (os.environ.get("CC") or "cc", "gcc", "clang")):
            reasons.append("Triton needs a C compiler at its first launch; install gcc or set CC")
        return reasons or _import_failures()

    def why_not(self, request: Request) -> list[Refusal]:
        """See `base.Backend.why_not`."""
        reasons = self.unavailable()
        if not reasons and request.device.type == "cpu" and not interpreted():
            reasons = ["it runs on CPU tensors only in Triton's interpreter, under TRITON_INTERPRET=1"]
        elif not reasons and request.device.type not in ("cuda", "cpu"):
            reasons = [f"it runs on GPUs, not on {request.device}"]
        return [Refusal(text) for text in reasons] + row_refusals(request)

    def configs(self, request: Request) -> list[Config]:
        """See `base.Backend.configs`."""
        return [
            TritonConfig(each.kwargs["BLOCK"], each.num_warps, bool(each.kwargs["FUSED"]))
            for each in _kernel().configs
        ]

    def config_from(self, knobs: dict[str, Any]) -> TritonConfig:
        """See `base.Backend.config_from`."""
        try:
            return TritonConfig(**knobs)
        except TypeError as error:
            raise ValueError(f"not a config of the triton backend: {knobs!r} ({error})") from None

    def prepare(self, request: Request, config: Config, site: Site) -> Runner:
        """See `base.Backend.prepare`."""
        assert isinstance(config, TritonConfig)
        make = functools.partial(_Launch, request, config, site)
        runner = KernelRunner(request, CAPACITY, make)
        if request.device.type == "cpu" and request.bounds == "raise":
            return functools.partial(_run_on_cpu, runner, site)
        return runner


class _Launch:
    """One launch for a fixed count and fixed layouts; only the pointers are still open."""

    def __init__(
        self,
        request: Request,
        config: TritonConfig,
        site: Site,
        numbers: tuple[int, ...],
        count: int,
        destinations: Sequence[Destination],
    ) -> None:
        self._request = request
        self._numbers = numbers
        fields = [request.fields[number] for number in numbers]
        units = [copy_unit(request.fields[number], destinations[number]) for number in numbers]
        # A 16-byte unit is a pair of 8-byte elements: Triton has no wider integer.
        vectors = tuple(max(unit // 8, 1) for unit in units)
        elements = [field.row_bytes // min(unit, 8) for field, unit in zip(fields, units, strict=True)]
        widths = tuple(1 << (each - 1).bit_length() if each else 0 for each in elements)
        self._dtypes = [ELEMENT_DTYPES[min(unit, 8)] for unit in units]
        self._arguments = {
            "count": count,
            "plan": site.plan,
            "unsigned": int(request.index_dtype == torch.uint64),
            "buffers": tuple(site.numbers[number] for number in numbers),
            "rows": tuple(field.rows for field in fields),
            "source_strides": tuple(
                field.row_stride_bytes // unit for field, unit in zip(fields, units, strict=True)
            ),
            "destination_strides": tuple(
                destinations[number].row_stride_bytes // unit
                for number, unit in zip(numbers, units, strict=True)
            ),
            "units": tuple(
                field.row_bytes // unit for field, unit in zip(fields, units, strict=True)
            ),
            "WIDTHS": widths,
            "VECTORS": vectors,
            "WIDEST": max(*widths, 1),
            "BOUNDS": request.bounds,
            "BLOCK": config.block,
            "FUSED": int(config.fused),
            "num_warps": config.num_warps,
        }
        self._grid = _programs(config, count, widths, elements)
        if self._grid > MOST_PROGRAMS:
            raise ValueError(
                f"{count} indices need {self._grid} programs in one launch, which has at most "
                f"{MOST_PROGRAMS}; gather in several calls"
            )

    def __call__(
        self,
        indices: torch.Tensor,
        shape: torch.Size,
        sources: Sequence[torch.Tensor],
        outs: Sequence[torch.Tensor],
    ) -> None:
        device = self._request.device
        if indices.dtype == torch.uint64:
            indices = indices.view(torch.int64)
        pointer = _host_pointer if device.type == "cpu" else _Pointer
        on_cpu = device.type == "cpu"
        # On a CPU the call itself raises, so its faults must not meet those of another thread.
        board = faults.Board(device) if on_cpu else faults.board_of(device)
        arguments = {
            "indices": indices,
            "index_stride": indices.stride(0),
            "faults": board.memory if on_cpu else _Pointer(board.memory, torch.int64),
            "sources": tuple(
                pointer(sources[number], dtype)
                for number, dtype in zip(self._numbers, self._dtypes, strict=True)
            ),
            "destinations": tuple(
                pointer(outs[number], dtype)
                for number, dtype in zip(self._numbers, self._dtypes, strict=True)
            ),
        }
        kernel = _kernel().fn[(self._grid,)]
        if on_cpu:
            kernel(**arguments, **self._arguments)
            error = board.take(tuple(shape))
            if error is not None:
                raise error
        elif torch.cuda.current_device() == device.index:
            kernel(**arguments, **self._arguments)
        else:
            with torch.cuda.device(device):
                kernel(**arguments, **self._arguments)


def _run_on_cpu(
    runner: KernelRunner,
    site: Site,
    indices: torch.Tensor,
    shape: torch.Size,
    sources: Sequence[torch.Tensor],
    outs: Sequence[torch.Tensor] | None,
) -> list[torch.Tensor]:
    """On a CPU the call itself raises, so the caller's outputs must not be written before."""
    if outs is not None:
        raise_if_bad(indices, shape, runner.request, site)
    return runner(indices, shape, sources, outs)


def _programs(
    config: TritonConfig, count: int, widths: Sequence[int], elements: Sequence[int]
) -> int:
    """Programs of one launch; the kernel numbers its tiles in the same way."""
    if config.fused:
        limit = max(min(max(*widths, 1), config.block), 1)
        chunks = max(
            max(-(-each // max(min(width, limit), 1)), 1)
            for width, each in zip(widths, elements, strict=True)
        )
        return -(-count // (config.block // limit)) * chunks
    programs = 0
    for width, each in zip(widths, elements, strict=True):
        columns = max(min(width, config.block), 1)
        programs += -(-count // (config.block // columns)) * max(-(-each // columns), 1)
    return programs


class _Pointer:
    """A device address with the integer type that the kernel sees, without making a view."""

    __slots__ = ("dtype", "tensor")

    def __init__(self, tensor: torch.Tensor, dtype: torch.dtype) -> None:
        self.tensor = tensor
        self.dtype = dtype

    def data_ptr(self) -> int:
        """Address, for Triton's launcher."""
        return self.tensor.data_ptr()


def _host_pointer(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """An integer tensor at a CPU tensor's address; Triton's interpreter needs real tensors.

    Not a view: a storage may start at an address that is no multiple of the integer's size.
    """
    address = tensor.data_ptr()
    if not address:  # no elements
        return torch.empty(1, dtype=dtype)
    memory = (ctypes.c_char * dtype.itemsize).from_address(address)
    return torch.frombuffer(memory, dtype=dtype)


@functools.cache
def _kernel() -> Any:
    from multigather.kernels import gather_triton

    return gather_triton.gather


@functools.cache
def _import_failures() -> list[str]:
    try:
        _kernel()
    except Exception as error:
        return [f"Triton cannot be used: {type(error).__name__}: {error}"]
    return []


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, which is settled when they are imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"
