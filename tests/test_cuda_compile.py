"""The CUDA source compiles for every architecture without a GPU, into code that uses no stack.

The compiler is NVRTC from the package nvidia-cuda-nvrtc or, where that is not installed, nvcc.
Each test prints a table of registers and spills, shown with ``-s`` or on failure.
"""

from __future__ import annotations

import collections
import ctypes
import functools
import importlib.util
import itertools
import os
import re
import shutil
import subprocess
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from multigather.backends import _route, _scatter_add
from multigather.backends._cupy import (
    BOUNDS,
    CONFIGS,
    INDEX_TYPES,
    LARGE_CAPACITY,
    MOST_RANKS,
    PACKED_IN_FLIGHT,
    SMALL_CAPACITY,
    Compilation,
    CudaConfig,
    Specialisation,
    capacity_for,
    capacity_within,
    for_packed,
    parameter_bytes,
    source_text,
)

OLDEST, NEWEST = 75, 120
# The architecture whose code is examined closely, and the most bytes of spills where there may be
# any: a few registers, at a number of registers per thread that the assembler chose itself.
CLOSE = 90
SPILL_LIMIT = 32


class CompileError(Exception):
    """What the compiler said."""


@dataclass(frozen=True)
class Compiled:
    """Result of one compilation.

    Attributes:
        cubin: the machine code.
        log: what the compiler and the assembler printed.
    """

    cubin: bytes
    log: str

    @property
    def registers(self) -> int:
        """Registers per thread."""
        (count,) = re.findall(r"Used (\d+) registers", self.log)
        return int(count)

    @property
    def stack(self) -> tuple[int, int, int]:
        """Bytes of stack frame, spill stores and spill loads, summed over the functions."""
        found = re.findall(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", self.log
        )
        assert found, f"no report of the assembler in {self.log!r}"
        frame, stores, loads = (sum(map(int, column)) for column in zip(*found, strict=True))
        return frame, stores, loads


class Nvrtc:
    """NVRTC through its C interface."""

    def __init__(self, library: Path) -> None:
        # NVRTC opens this one by its name alone, which finds it if it is loaded.
        for builtins in library.parent.glob("libnvrtc-builtins.so.*"):
            ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
        self._library = ctypes.CDLL(str(library))
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        self.name = f"NVRTC {major.value}.{minor.value}"
        count = ctypes.c_int()
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        architectures = (ctypes.c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", architectures)
        self.architectures = sorted(set(architectures))

    def compile(self, source: str, options: Iterable[str], architecture: int) -> Compiled:
        """Compile; the assembler's report is in the log."""
        words = [f"--gpu-architecture=sm_{architecture}", "--ptxas-options=-v", *options]
        array = (ctypes.c_char_p * len(words))(*(word.encode() for word in words))
        program = ctypes.c_void_p()
        self._call(
            "nvrtcCreateProgram",
            ctypes.byref(program), source.encode(), b"gather.cu", 0, None, None,
        )  # fmt: skip
        try:
            status = self._library.nvrtcCompileProgram(program, len(words), array)
            log = self._read("ProgramLog", program).rstrip(b"\0").decode()
            if status:
                raise CompileError(log)
            return Compiled(self._read("CUBIN", program), log)
        finally:
            self._call("nvrtcDestroyProgram", ctypes.byref(program))

    def _read(self, what: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        self._call(f"nvrtcGet{what}", program, text)
        return text.raw

    def _call(self, function: str, *arguments: object) -> None:
        status = getattr(self._library, function)(*arguments)
        if status:
            message = self._library.nvrtcGetErrorString(status).decode()
            raise RuntimeError(f"{function}: {message}")


class Nvcc:
    """The compiler of an installed CUDA toolkit."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.name = _output([path, "--version"]).strip().splitlines()[-2]
        listed = re.findall(r"sm_(\d+)\b", _output([path, "--list-gpu-code"]))
        self.architectures = sorted(map(int, set(listed)))

    def compile(self, source: str, options: Iterable[str], architecture: int) -> Compiled:
        """Compile; the assembler's report is in the log."""
        with TemporaryDirectory() as folder:
            path = Path(folder, "gather.cu")
            path.write_text(source)
            command = [self.path, "-cubin", f"-arch=sm_{architecture}", "-Xptxas=-v", *options]
            result = subprocess.run(
                [*command, "-o", f"{folder}/gather.cubin", str(path)],
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            if result.returncode:
                raise CompileError(result.stderr)
            return Compiled(Path(folder, "gather.cubin").read_bytes(), result.stderr)


def _output(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def find_compiler() -> Nvrtc | Nvcc | None:
    """NVRTC of the newest package installed, else nvcc, else None."""
    spec = importlib.util.find_spec("nvidia")
    libraries = [
        library
        for folder in (spec.submodule_search_locations or [] if spec else [])
        for library in Path(folder).glob("*/lib/libnvrtc.so.*")
    ]
    if libraries:
        return Nvrtc(max(libraries, key=lambda path: int(path.suffix[1:])))
    nvcc = shutil.which("nvcc")
    return Nvcc(nvcc) if nvcc else None


def find_disassembler() -> str | None:
    """Path of nvdisasm: of a toolkit, or the one that Triton's package holds."""
    spec = importlib.util.find_spec("triton")
    folders = list(spec.submodule_search_locations or []) if spec else []
    inside = [f"{folder}/backends/nvidia/bin" for folder in folders]
    return shutil.which("nvdisasm", path=os.pathsep.join(inside)) or shutil.which("nvdisasm")


COMPILER = find_compiler()
ARCHITECTURES = [a for a in COMPILER.architectures if OLDEST <= a <= NEWEST] if COMPILER else []

pytestmark = pytest.mark.skipif(
    COMPILER is None, reason="no compiler: neither the package nvidia-cuda-nvrtc nor nvcc is here"
)

USUAL = CudaConfig(256, 2)


@functools.cache
def compile_one(specialisation: Compilation, architecture: int, after: str = "") -> Compiled:
    """Compile the source with the macros that ship; ``after`` is appended to it."""
    assert COMPILER is not None
    macros = [f"-D{name}={value}" for name, value in specialisation.macros().items()]
    source = source_text(specialisation.kernel) + after
    return COMPILER.compile(source, ["-std=c++17", *macros], architecture)


def compile_all(specialisations: Iterable[Specialisation], architecture: int) -> list[Compiled]:
    """Compile each on its own thread, print the table, check what holds for every compilation."""
    specialisations = list(specialisations)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = list(pool.map(lambda each: compile_one(each, architecture), specialisations))
    assert COMPILER is not None
    print(f"\n{COMPILER.name}, sm_{architecture}: registers; bytes of stack, spill stores, loads")
    for each, result in zip(specialisations, results, strict=True):
        print(f"  {result.registers:3}  {' '.join(map(str, result.stack)):8}  {describe(each)}")
    for each, result in zip(specialisations, results, strict=True):
        assert result.cubin.startswith(b"\x7fELF"), f"no machine code: {describe(each)}"
        assert b"\0gather\0" in result.cubin, f"no kernel of that name: {describe(each)}"
        assert "warning" not in result.log, f"{describe(each)}: {result.log}"
        assert result.registers * each.config.threads <= 65536, (
            f"too large a block: {describe(each)}"
        )
    return results


def describe(specialisation: Specialisation) -> str:
    """One line."""
    return (
        f"{specialisation.fields} fields, {specialisation.index_dtype}, {specialisation.bounds}, "
        f"{'64' if specialisation.wide else '32'}-bit units, {specialisation.config.describe()}"
        f"{', shifted' if specialisation.shifted else ''}"
        f"{', packed' if specialisation.packed else ''}"
        f"{f', {specialisation.ranks} ranks' if specialisation.ranks else ''}"
    )


def covering_set() -> list[Specialisation]:
    """Each bounds mode in both widths, with shifted or packed copies; every type, table size."""
    shapes = [(bounds, wide) for bounds in BOUNDS for wide in (False, True)]
    dtypes = itertools.cycle(INDEX_TYPES)
    fields = itertools.cycle((1, 8, 16, SMALL_CAPACITY, LARGE_CAPACITY))
    streaming = itertools.cycle((False, True, True))
    return [
        Specialisation(
            next(fields),
            next(dtypes),
            bounds,
            wide,
            replace(USUAL, streaming=next(streaming)),
            shifted,
            packed,
        )
        for shifted, packed in ((False, False), (True, False), (False, True))
        for bounds, wide in shapes
    ]


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids="sm_{}".format)
def test_compiles_for_every_architecture(architecture: int) -> None:
    """Every macro value compiles without a warning, and at most a few registers are spilled."""
    chosen = covering_set()
    assert {each.index_dtype for each in chosen} == set(INDEX_TYPES)
    for kind in ("shifted", "packed"):
        assert {(each.bounds, each.wide, getattr(each, kind)) for each in chosen} == {
            *itertools.product(BOUNDS, (False, True), (False, True))
        }
    for each, result in zip(chosen, compile_all(chosen, architecture), strict=True):
        _, stores, loads = result.stack
        assert stores + loads <= SPILL_LIMIT, f"spills: {describe(each)}"


def test_the_range_of_architectures_is_covered() -> None:
    """The compiler knows the oldest architecture, the one examined closely, and others."""
    assert {OLDEST, CLOSE} <= set(ARCHITECTURES)
    assert len(ARCHITECTURES) >= 5


@pytest.mark.parametrize("shifted", [False, True], ids=["plain", "shifted"])
def test_no_config_spills(shifted: bool) -> None:
    """In the default mode, every config that the tuner may pick keeps everything in registers.

    Streaming accesses take more registers for their addresses, shifted copies for their words, and
    the assembler then prefers a few spills to fewer threads per multiprocessor; these stay few.
    """
    chosen = [Specialisation(4, torch.int64, "raise", False, config, shifted) for config in CONFIGS]
    results = compile_all(chosen, CLOSE)
    for each, result in zip(chosen, results, strict=True):
        frame, stores, loads = result.stack
        if each.config.streaming or each.shifted:
            assert max(frame, stores, loads) <= SPILL_LIMIT, f"spills: {describe(each)}"
        else:
            assert (frame, stores, loads) == (0, 0, 0), f"uses the stack: {describe(each)}"


def test_no_packed_config_spills() -> None:
    """A launch of packed groups alone has one unit in flight per thread beside its row."""
    chosen = [
        Specialisation(4, torch.int64, "raise", False, for_packed(config), packed=True)
        for config in CONFIGS
    ]
    for each, result in zip(chosen, compile_all(chosen, CLOSE), strict=True):
        assert result.stack == (0, 0, 0), f"uses the stack: {describe(each)}"
        # A thousand threads per multiprocessor.
        assert result.registers <= 64, f"too many registers: {describe(each)}"


def test_no_mode_and_index_type_spills() -> None:
    """With the usual unroll, every bounds mode and index type keeps everything in registers."""
    chosen = [
        Specialisation(4, dtype, bounds, False, USUAL, shifted)
        for bounds in BOUNDS
        for dtype in INDEX_TYPES
        if bounds == "raise" or dtype in (torch.int64, torch.uint8)
        for shifted in (False, True)
    ]
    for each, result in zip(chosen, compile_all(chosen, CLOSE), strict=True):
        assert result.stack == (0, 0, 0), f"uses the stack: {describe(each)}"


def test_a_spill_would_be_seen() -> None:
    """Where the block is so large that registers run out, the report is not zero."""
    specialisation = Specialisation(4, torch.int64, "raise", True, CudaConfig(1024, 8))
    assert min(compile_one(specialisation, CLOSE).stack) > 0


@pytest.mark.parametrize(("most", "limit"), [(SMALL_CAPACITY, 4096), (LARGE_CAPACITY, 32764)])
def test_parameters_fit(most: int, limit: int) -> None:
    """Every table size that the host asks for has the size it packs, within the limit."""
    assert parameter_bytes(most) <= limit < parameter_bytes(most + 1)
    tables = sorted({capacity_for(count, most) for count in range(1, most + 1)})
    assert tables[-1] == most

    def check(fields: int) -> None:
        specialisation = Specialisation(fields, torch.int64, "raise", False, USUAL)
        size = parameter_bytes(fields)
        compile_one(specialisation, CLOSE, f"static_assert(sizeof(Parameters) == {size});")

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(check, tables))
    specialisation = Specialisation(most, torch.int64, "raise", False, USUAL)
    with pytest.raises(CompileError, match=r"static.assert"):
        compile_one(specialisation, CLOSE, f"static_assert(sizeof(Parameters) > {limit});")


def operations(cubin: bytes, folder: Path) -> list[str]:
    """Names of the machine code's instructions, in order, such as ``LDG.E.128.CONSTANT``."""
    tool = find_disassembler()
    if tool is None:
        pytest.skip("no disassembler: neither Triton's package nor a toolkit with nvdisasm is here")
    path = folder / "gather.cubin"
    path.write_bytes(cubin)
    text = _output([tool, "-c", str(path)])
    return re.findall(
        r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ +)?([A-Z][A-Z0-9_.x]+)", text, re.MULTILINE
    )


@pytest.mark.parametrize(
    "reporting",
    [
        Specialisation(4, torch.int64, "raise", False, USUAL),
        Specialisation(8, torch.int32, "raise", False, USUAL, shifted=True, packed=True),
        _route.Specialisation(_route.PLACE, torch.int64, "raise", torch.int32),
    ],
    ids=["gather", "packed", "route"],
)
def test_reports_use_no_atomic_operation_of_system_scope(
    reporting: Compilation, tmp_path: Path
) -> None:
    """It is undefined on the board, the host's memory; what the host waits for is fenced."""
    names = operations(compile_one(reporting, CLOSE).cubin, tmp_path)
    atomics = [name for name in names if name.startswith(("ATOM", "RED."))]
    assert atomics
    assert not [name for name in atomics if "SYS" in name], atomics
    assert [name for name in names if name.startswith("MEMBAR") and "SYS" in name]


IN_FLIGHT = pytest.mark.parametrize(
    ("config", "bounds"),
    [(config, "raise") for config in CONFIGS if config.threads == 256]
    + [(CudaConfig(256, 4), bounds) for bounds in BOUNDS if bounds != "raise"],
    ids=lambda value: value if isinstance(value, str) else value.describe().replace(", ", "-"),
)


def runs_of(touching: list[str]) -> list[tuple[int, int]]:
    """How many 16-byte loads, then how many stores, each copy of 16-byte words has."""
    kinds = [name[:3] for name in touching if ".128" in name]
    lengths = [(kind, len(list(group))) for kind, group in itertools.groupby(kinds)]
    assert [kind for kind, _ in lengths] == ["LDG", "STG"] * (len(lengths) // 2), touching
    return [
        (loads, stores) for (_, loads), (_, stores) in zip(lengths[::2], lengths[1::2], strict=True)
    ]


@IN_FLIGHT
def test_wide_accesses_are_in_flight_together(
    config: CudaConfig, bounds: str, tmp_path: Path
) -> None:
    """Units of 16 bytes move in one access each, and no load waits for another or for a store."""
    specialisation = Specialisation(4, torch.int64, bounds, False, config)
    found = operations(compile_one(specialisation, CLOSE).cubin, tmp_path)
    assert "EXIT" in found, "the disassembly could not be read"
    # Around single accesses there are branches; a call would stop what follows from starting early.
    touching = [name for name in found if re.match(r"LDG|STG|CALL|ATOM", name)]
    # By threads of a tile and by warps.
    assert runs_of(touching) == [(config.unroll, config.unroll)] * 2, touching
    wide = [place for place, name in enumerate(touching) if ".128" in name]
    indices = []
    for first in wide[:: 2 * config.unroll]:
        last = wide[wide.index(first) + 2 * config.unroll - 1]
        assert last - first == 2 * config.unroll - 1, touching
        before = itertools.takewhile(
            lambda name: name == "LDG.E.64.CONSTANT", reversed(touching[:first])
        )
        indices.append(len(list(before)))
    # A warp reads one index for all of its piece; where two copies' code meets, there are more.
    assert min(indices) >= 1, touching
    assert max(indices) >= config.unroll, touching


@IN_FLIGHT
def test_shifted_accesses_are_in_flight_together(
    config: CudaConfig, bounds: str, tmp_path: Path
) -> None:
    """Both words of every window are loaded before the first window is stored, in one access."""
    specialisation = Specialisation(4, torch.int64, bounds, False, config, True)
    found = operations(compile_one(specialisation, CLOSE).cubin, tmp_path)
    touching = [name for name in found if re.match(r"LDG|STG|CALL|ATOM|LDL|STL", name)]
    # By threads of a tile and by warps; so are the fields in 16-byte units beside them.
    unroll = config.unroll
    assert sorted(runs_of(touching)) == [(unroll, unroll)] * 2 + [(2 * unroll, unroll)] * 2
    wide = [place for place, name in enumerate(touching) if ".128" in name]
    passed = 0
    for loads, stores in runs_of(touching):
        # Amid the loads may be those of the last indices, which wait for nothing.
        span = range(wide[passed], wide[passed + loads - 1])
        between = [touching[place] for place in span if place not in wide]
        assert all(name.startswith("LDG.E.64") for name in between), touching
        passed += loads + stores


@pytest.mark.parametrize("architecture", [80, CLOSE], ids="sm_{}".format)
def test_sharded_variants_compile(architecture: int) -> None:
    """Rows of few and of the most ranks; the parameters have the size that the host packs."""
    dtypes = itertools.cycle(INDEX_TYPES)
    kinds = itertools.cycle(((False, False), (True, False), (False, True)))
    most = capacity_within(4096, MOST_RANKS)
    for bounds, ranks, fields in zip(
        BOUNDS, (2, 8, MOST_RANKS, MOST_RANKS), (1, 16, most, 4), strict=True
    ):
        each = Specialisation(
            fields, next(dtypes), bounds, False, USUAL, *next(kinds), ranks=ranks
        )  # fmt: skip
        size = each.parameter_bytes()
        assert size <= 4096
        after = f"static_assert(sizeof(Parameters) == {size});"
        result = compile_one(each, architecture, after)
        assert "warning" not in result.log, result.log


def adding(
    fields: int,
    index_dtype: torch.dtype = torch.int64,
    bounds: str = "raise",
    step: int = _scatter_add.ADD,
) -> _scatter_add.Specialisation:
    """A variant of scatter_add.cu with the config that ships."""
    return _scatter_add.Specialisation(step, fields, index_dtype, bounds, _scatter_add.CONFIG)


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids="sm_{}".format)
def test_scatter_add_compiles_for_every_architecture(architecture: int) -> None:
    """Without a warning and without the stack, with parameters of the size that the host packs."""
    fields = itertools.cycle((1, 8, SMALL_CAPACITY, LARGE_CAPACITY))
    dtypes = itertools.cycle(INDEX_TYPES)
    steps = (_scatter_add.CLAIM, _scatter_add.ADD, _scatter_add.ROUND)
    for bounds, step in itertools.product(BOUNDS, steps):
        each = adding(next(fields), next(dtypes), bounds, step)
        size = each.parameter_bytes()
        result = compile_one(each, architecture, f"static_assert(sizeof(Parameters) == {size});")
        assert b"\0scatter_add\0" in result.cubin
        assert "warning" not in result.log, result.log
        assert result.stack == (0, 0, 0), each
        assert result.registers * each.config.threads <= 65536
    # Fields are counted by the table of the gather's kernel, which has the larger entries.
    assert adding(SMALL_CAPACITY).parameter_bytes() <= 4096
    assert adding(LARGE_CAPACITY).parameter_bytes() <= 32764


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids="sm_{}".format)
def test_route_compiles_for_every_architecture(architecture: int) -> None:
    """Without a warning, with parameters of the size that the host packs."""
    dtypes = itertools.cycle(INDEX_TYPES)
    for step, bounds in itertools.product((_route.COUNT, _route.PLACE), BOUNDS):
        each = _route.Specialisation(step, next(dtypes), bounds, torch.int32)
        size = each.parameter_bytes()
        result = compile_one(each, architecture, f"static_assert(sizeof(Parameters) == {size});")
        assert b"\0route\0" in result.cubin
        assert "warning" not in result.log, result.log


@pytest.mark.parametrize("architecture", [80, CLOSE], ids="sm_{}".format)
def test_scatter_add_uses_the_widest_additions(architecture: int, tmp_path: Path) -> None:
    """16 bytes in one instruction from sm_90 on, and no 2-byte sums anywhere."""
    found = set(operations(compile_one(adding(4), architecture).cubin, tmp_path))
    assert "EXIT" in found, "the disassembly could not be read"
    kinds = {name.split(".")[3] for name in found if re.match(r"REDG?\.E\.ADD", name)}
    if architecture >= 90:
        assert kinds == {"F32x4", "F32x2", "F32", "F64"}, found
    else:
        assert kinds == {"F32", "F64"}, found


@pytest.mark.parametrize("streaming", [False, True], ids=["plain", "streaming"])
@pytest.mark.parametrize("bounds", BOUNDS)
def test_packed_accesses_are_in_flight_together(
    bounds: str, streaming: bool, tmp_path: Path
) -> None:
    """All loads of a step come before its first store, and none has the evict-first hint."""
    config = CudaConfig(256, 1, streaming)
    specialisation = Specialisation(8, torch.int64, bounds, False, config, packed=True)
    found = operations(compile_one(specialisation, CLOSE).cubin, tmp_path)
    touching = [name for name in found if re.match(r"LDG|STG|CALL|ATOM|LDL|STL", name)]
    slots = sum(PACKED_IN_FLIGHT.values())
    kinds = [(kind, list(group)) for kind, group in itertools.groupby(touching, lambda k: k[:3])]
    (at,) = [k for k, (kind, group) in enumerate(kinds) if kind == "STG" and len(group) == slots]
    loads, stores = kinds[at - 1][1][-slots:], kinds[at][1]
    expected = {"64": 4, "": 8, "U16": 4, "U8": 4}
    for names in (loads, stores):
        widths = [name.split(".")[-1] if name.count(".") > 1 else "" for name in names]
        assert collections.Counter(each.replace("EF", "") for each in widths) == expected, names
    assert not any("EF" in name for name in loads)
    assert all(("EF" in name) == streaming for name in stores)
