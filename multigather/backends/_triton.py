"""Triton backend: kernels/gather_triton.py, on GPUs, and on CPU tensors in Triton's interpreter."""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import importlib.util
import os
import shutil
import struct
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from .. import faults
from ..bounds import raise_if_bad
from ..fork import no_fork
from ..launch import NOWHERE, Launch, Scale
from ..request import Request, Site
from .base import (
    Config,
    Destination,
    KernelRunner,
    Refusal,
    Runner,
    config_of,
    copy_unit,
    row_refusals,
)

# Kernel parameters take at most 4,096 bytes: two pointers, a row count, two strides, a unit count
# (8 bytes each) and a buffer number (4) per field, beside about 60 bytes for the call.
CAPACITY = 64
MOST_PROGRAMS = 2**31 - 1

# From here on a number, or a sum or product of it in the kernel, might not fit into 32 bits.
LARGE = 2**30

# The kernel's integers that are no part of its code.
VALUES = (
    "index_stride", "count", "plan", "buffers", "rows", "source_strides", "destination_strides",
    "units",
)  # fmt: skip

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
    revision: ClassVar[int] = 1
    by_address: ClassVar[bool] = True

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
                "torch sees no GPU (under TRITON_INTERPRET=1 CPU tensors run in its interpreter)"
            )
        elif not any(shutil.which(name) for name in (os.environ.get("CC") or "cc", "gcc", "clang")):
            reasons.append("Triton needs a C compiler at its first launch; install gcc or set CC")
        return reasons or _import_failures()

    def why_not(self, request: Request) -> list[Refusal]:
        """See `base.Backend.why_not`."""
        reasons = self.unavailable()
        if not reasons and request.device.type == "cpu" and not interpreted():
            reasons = [
                "it runs on CPU tensors only in Triton's interpreter, under TRITON_INTERPRET=1"
            ]
        elif not reasons and request.device.type not in ("cuda", "cpu"):
            reasons = [f"it runs on GPUs, not on {request.device}"]
        return [Refusal(text) for text in reasons] + row_refusals(request)

    def space(self) -> list[Config]:
        """See `base.Backend.space`."""
        return [
            TritonConfig(each.kwargs["BLOCK"], each.num_warps, bool(each.kwargs["FUSED"]))
            for each in _kernel().configs
        ]

    def illegal(self, request: Request, config: Config) -> str | None:
        """See `base.Backend.illegal`."""
        return None

    def variant(self, request: Request, config: Config) -> Hashable | None:
        """See `base.Backend.variant`."""
        rows = tuple((field.row_bytes, field.unit_bytes) for field in request.fields)
        return rows, request.index_dtype, request.bounds, config

    def packs(self, request: Request, config: Config) -> bool:
        """See `base.Backend.packs`."""
        return False

    def config_from(self, knobs: dict[str, Any]) -> TritonConfig:
        """See `base.Backend.config_from`."""
        return config_of(TritonConfig, self.name, knobs)

    def prepare(self, request: Request, config: Config, site: Site) -> Runner:
        """See `base.Backend.prepare`."""
        assert isinstance(config, TritonConfig)
        make = functools.partial(_launch_of, request, config, site)
        runner = KernelRunner(request, CAPACITY, make)
        if request.device.type == "cpu" and request.bounds == "raise":
            return functools.partial(_run_on_cpu, runner, site)
        return runner


def _launch_of(
    request: Request,
    config: TritonConfig,
    site: Site,
    numbers: tuple[int, ...],
    count: int,
    index_stride: int,
    destinations: Sequence[Destination],
) -> Callable[[Sequence[int]], None]:
    """The launch of some fields, see `base.KernelRunner`."""
    fields = [request.fields[number] for number in numbers]
    units = [copy_unit(request.fields[number], destinations[number]) for number in numbers]
    elements = [field.row_bytes // min(unit, 8) for field, unit in zip(fields, units, strict=True)]
    widths = tuple(1 << (each - 1).bit_length() if each else 0 for each in elements)
    terms = _terms(config, widths, elements)
    grid = sum(-(-count * parts // tile) * chunks for parts, tile, chunks in terms)
    if grid > MOST_PROGRAMS:
        raise ValueError(
            f"{count} indices need {grid} programs in one launch, which has at most "
            f"{MOST_PROGRAMS}; gather in several calls"
        )
    arguments = {
        "index_stride": index_stride,
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
        "units": tuple(field.row_bytes // unit for field, unit in zip(fields, units, strict=True)),
        "WIDTHS": widths,
        # A 16-byte unit is a pair of 8-byte elements: Triton has no wider integer.
        "VECTORS": tuple(max(unit // 8, 1) for unit in units),
        "WIDEST": max(*widths, 1),
        "BOUNDS": request.bounds,
        "BLOCK": config.block,
        "FUSED": int(config.fused),
        "num_warps": config.num_warps,
        "enable_fp_fusion": False,  # Triton 3.9 warns where it is unset
    }
    # uint64 indices are read as int64 and marked unsigned.
    index_dtype = torch.int64 if request.index_dtype == torch.uint64 else request.index_dtype
    dtypes = [ELEMENT_DTYPES[min(unit, 8)] for unit in units]
    if request.device.type == "cpu":
        return functools.partial(_interpret, grid, arguments, index_dtype, dtypes)
    with torch.cuda.device(request.device):
        return _compile(grid, arguments, index_dtype, dtypes, units, request.device, terms)


def _interpret(
    grid: int,
    arguments: dict[str, Any],
    index_dtype: torch.dtype,
    dtypes: Sequence[torch.dtype],
    addresses: Sequence[int],
) -> None:
    """Run the kernel in Triton's interpreter, with a board of its own: on a CPU the call raises.

    Raises:
        _BadIndex: the kernel met a bad index.
    """
    board = faults.Board(torch.device("cpu"))
    tensors = _Places()
    sources, destinations = (
        tuple(tensors[address].view(dtype) for address, dtype in zip(some, dtypes, strict=True))
        for some in (addresses[1::2], addresses[2::2])
    )
    _kernel().fn[(grid,)](
        indices=tensors[addresses[0]].view(index_dtype),
        faults=board.memory,
        sources=sources,
        destinations=destinations,
        **arguments,
    )
    if board.words[0]:
        raise _BadIndex(board)


class _BadIndex(Exception):
    """A kernel on the CPU met a bad index; the board has its record."""

    def __init__(self, board: faults.Board) -> None:
        super().__init__()
        self.board = board


def _compile(
    grid: int,
    arguments: dict[str, Any],
    index_dtype: torch.dtype,
    dtypes: Sequence[torch.dtype],
    units: Sequence[int],
    device: torch.device,
    terms: Sequence[tuple[int, int, int]],
) -> Callable[[Sequence[int]], None]:
    """Compile for the current device; launch through the driver, without Triton's own launcher.

    Triton's launcher costs 10 to 28 microseconds a call. What is read of the compiled kernel is not
    a public interface, so a kernel that lacks it, or that needs what only the launcher can give
    (scratch memory, clusters), is launched by Triton.
    """
    board = faults.board_of(device).memory
    pointers: dict[str, Any] = {
        # Alignment to 16 bytes is part of the compiled code: only 16-byte units promise it.
        "indices": _Pointer(index_dtype.itemsize, index_dtype),
        "faults": _Pointer(16, torch.int64),
        "sources": tuple(map(_Pointer, units, dtypes)),
        "destinations": tuple(map(_Pointer, units, dtypes)),
    }
    compiled = _kernel().fn.warmup(grid=(grid,), **pointers, **_stand_ins(arguments))

    def launch_by_triton(addresses: Sequence[int]) -> None:
        with torch.cuda.device(device):
            _kernel().fn[(grid,)](
                indices=_Pointer(addresses[0], index_dtype),
                faults=_Pointer(board.data_ptr(), torch.int64),
                sources=tuple(map(_Pointer, addresses[1::2], dtypes)),
                destinations=tuple(map(_Pointer, addresses[2::2], dtypes)),
                **arguments,
            )

    found = driver_facts(compiled)
    if found is None:
        return launch_by_triton
    signature, function, shared = found
    names = ["indices"]
    for number in range(len(dtypes)):
        names += (f"sources {number}", f"destinations {number}")
    place = {name: 8 * slot for slot, name in enumerate(names)}
    constants = bytearray()
    offsets = []
    count_place = None
    for name, kind in signature.items():
        if kind == "constexpr":
            continue
        kinds = kind if isinstance(kind, tuple) else (kind,)
        for number, each in enumerate(kinds):
            key = f"{name} {number}" if isinstance(kind, tuple) else name
            if each == "constexpr":
                continue
            if key in place:
                offsets.append(place[key])
                continue
            value = board.data_ptr() if name == "faults" else arguments[name]
            value = value[number] if isinstance(value, tuple) else value
            if name == "count":
                count_place = 8 * len(names) + len(constants)
            offsets.append(8 * len(names) + len(constants))
            constants += struct.pack("=q", value)  # little-endian, so 32 bits are its first half
    # Room for the scratch pointers that Triton appends, null here.
    for _ in range(2):
        offsets.append(8 * len(names) + len(constants))
        constants += bytes(8)
    threads = 32 * arguments["num_warps"]
    return Launch(
        function,
        grid,
        threads,
        shared,
        device.index,
        bytes(8 * len(names)) + constants,
        list(place.values()),
        offsets,
        compiled,
        _scale(arguments["count"], count_place, terms),
    )


def _scale(
    count: int, count_place: int | None, terms: Sequence[tuple[int, int, int]]
) -> Scale | None:
    """How a launch depends on the number of indices: up to where other code is compiled for it."""
    most = min(LARGE - 1, MOST_PROGRAMS // sum(chunks for _, _, chunks in terms))
    if count_place is None or not 0 < count <= most:
        return None
    return Scale(1, most, count_place, NOWHERE, tuple(terms))


def driver_facts(compiled: Any) -> tuple[dict[str, Any], int, int] | None:
    """Signature, function handle and shared memory of a compiled kernel.

    None if this Triton does not tell, or if the kernel needs what only Triton's launcher can give.
    """
    try:
        compiled = compiled.result() if hasattr(compiled, "result") else compiled
        compiled._init_handles()
        metadata = compiled.metadata
        if getattr(metadata, "global_scratch_size", 0) or getattr(metadata, "num_ctas", 1) != 1:
            return None
        return compiled.src.signature, compiled.function, metadata.shared
    except AttributeError:
        return None


def _stand_ins(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments with other integers in place of a call's own, to compile for every value.

    Triton compiles it in where an integer is 1 or a multiple of 16, in tuples even if told not to,
    and whether it fits into 32 bits. Odd numbers leave only the last. Large means so large that a
    sum or a product in the kernel might not fit; one large element makes its tuple large.
    """
    small, large = 3, 2**32 + 1

    def stand_in(value: Any) -> Any:
        if isinstance(value, tuple):
            return (large if max(value) >= LARGE else small,) * len(value)
        return large if value >= LARGE else small

    return {name: stand_in(value) if name in VALUES else value for name, value in arguments.items()}


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
    try:
        return runner(indices, shape, sources, outs)
    except _BadIndex as found:
        error = found.board.take(tuple(shape))
    assert error is not None
    raise error


def _terms(
    config: TritonConfig, widths: Sequence[int], elements: Sequence[int]
) -> tuple[tuple[int, int, int], ...]:
    """What the programs of one launch are the sum of, as in `launch.Scale`.

    The kernel numbers its tiles in the same way.
    """
    if config.fused:
        limit = max(min(max(*widths, 1), config.block), 1)
        chunks = max(
            max(-(-each // max(min(width, limit), 1)), 1)
            for width, each in zip(widths, elements, strict=True)
        )
        return ((1, config.block // limit, chunks),)
    terms = []
    for width, each in zip(widths, elements, strict=True):
        columns = max(min(width, config.block), 1)
        terms.append((1, config.block // columns, max(-(-each // columns), 1)))
    return tuple(terms)


class _Pointer:
    """An address with the integer type that the kernel sees, in place of a tensor."""

    __slots__ = ("address", "dtype")

    def __init__(self, address: int, dtype: torch.dtype) -> None:
        self.address = address
        self.dtype = dtype

    def data_ptr(self) -> int:
        """The address, for Triton."""
        return self.address


class _Places(dict[int, torch.Tensor]):
    """Tensors at addresses of host memory, since Triton's interpreter needs real ones.

    It takes all storages at one address for the first of them, and in the end copies it to the
    last. So there is one for each address, of a size for every type; a copy to itself is none.
    """

    def __missing__(self, address: int) -> torch.Tensor:
        if address:
            memory = ctypes.c_int64.from_address(address)
            self[address] = torch.frombuffer(memory, dtype=torch.int64)
        else:  # of a tensor without elements
            self[address] = torch.empty(1, dtype=torch.int64, device="cpu")
        return self[address]


@functools.cache
def _kernel() -> Any:
    with no_fork:
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
