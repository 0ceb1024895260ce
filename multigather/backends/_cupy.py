"""CUDA C backend: kernels/gather.cu, built by NVRTC through CuPy and launched by the driver.

Pointers and field descriptions travel in one parameter structure passed by value, so nothing is
copied to the device before a launch and a captured launch keeps what it needs.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import itertools
import struct
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any, ClassVar, Protocol

import torch

from .. import faults
from ..fork import no_fork
from ..launch import Launch, Scale
from ..request import Field, Request, Site, power_of_two_divisor
from .base import (
    Config,
    Destination,
    KernelRunner,
    Refusal,
    config_of,
    copy_unit,
    new_destination,
    row_refusals,
)

INDEX_TYPES = {
    torch.int64: "long long",
    torch.int32: "int",
    torch.int16: "short",
    torch.int8: "signed char",
    torch.uint8: "unsigned char",
    torch.uint16: "unsigned short",
    torch.uint32: "unsigned int",
    torch.uint64: "unsigned long long",
}
BOUNDS = {"raise": 0, "fill": 1, "clip": 2, "unchecked": 3}

# struct Parameters of gather.cu: a head, lines of first tiles, entries that two addresses begin.
HEAD_BYTES = 48
FIELD_BYTES = 64
LINE_STARTS = 16  # first tiles in a line of the constant cache


def room_for_starts(fields: int) -> int:
    """First tiles that a table of so many fields has room for: whole lines."""
    return -(-fields // LINE_STARTS) * LINE_STARTS


def parameter_bytes(fields: int, ranks: int = 0) -> int:
    """Size of the parameters of a kernel with a table of so many fields, and one of ranks."""
    table = 8 + 16 * ranks if ranks else 0
    return HEAD_BYTES + 4 * room_for_starts(fields) + FIELD_BYTES * fields + table


def capacity_within(size: int, ranks: int = 0) -> int:
    """Most fields whose parameters have at most this size."""
    numbers = range(size // FIELD_BYTES)
    return max(fields for fields in numbers if parameter_bytes(fields, ranks) <= size)


# Kernel parameters: 4,096 bytes everywhere; 32,764 from CUDA 12.1 on, on compute capability 7.0 and
# newer.
SMALL_CAPACITY = capacity_within(4096)
LARGE_CAPACITY = capacity_within(32764)
# More ranks than these do not share the memory of one host.
MOST_RANKS = 128
NO_TILE = 2**32 - 1
MOST_BLOCKS = 2**31 - 1
# Unit numbers and warp numbers from here on take 64 bits, and divisions by the hardware.
WIDE_FROM = 2**31

# Kinds of fields beside the copy units of 1 << 0 to 1 << 4 bytes, as in gather.cu.
EMPTY = 5
SHIFTED = 6
PACKED = 7
BY_WARPS = 8
WARP = 32
# Units of a packed group that a thread has in flight, by their binary logarithm, as in gather.cu.
PACKED_IN_FLIGHT = {3: 4, 2: 8, 1: 4, 0: 4}
# Packed groups are copied row by row from so many indices on. An H200 has about 10**5 sectors in
# flight, so fewer come all at once anyway, and blocks of one field start sooner: each reads one
# entry of the parameters, not one after the other. On an H200 six packed columns of 27 bytes a row
# are 1.01 to 1.45 times as fast as separate ones at 10,000 indices, field by field, and 1.37 to
# 2.33 times at 100,000, row by row (benchmarks/packed.py). Other thresholds were not tried.
PACKED_FROM = 2**14
# Rows with copy units of so many bytes are copied shifted from so many bytes per row on: an H200
# copies about 0.5e12 units per second whatever their width, with units of 1 byte an eighth of its
# memory rate. Windows and their words take about three times the work of a plain unit.
SHIFTED_FROM = {1: 32, 2: 64, 4: 128}
SHIFTED_MOST = 2**30


@dataclass(frozen=True)
class CudaConfig(Config):
    """Knobs of gather.cu.

    Attributes:
        threads: threads per block, a multiple of 32.
        unroll: copy units in flight per thread.
        streaming: evict-first loads and stores, for tables and outputs far beyond the L2 cache.
    """

    threads: int = 256
    unroll: int = 2
    streaming: bool = False

    def __post_init__(self) -> None:
        if self.threads not in (32, 64, 128, 256, 512, 1024):
            raise ValueError(f"threads must be 32, 64, ... or 1024, got {self.threads!r}")
        if self.unroll not in (1, 2, 4, 8):
            raise ValueError(f"unroll must be 1, 2, 4 or 8, got {self.unroll!r}")
        if not isinstance(self.streaming, bool):
            raise ValueError(f"streaming must be true or false, got {self.streaming!r}")


# The search space. Over 700 gathers on an H200, none of what is left out was faster than the best
# of these by more than 1 %: unroll 8, streaming with smaller blocks, and a layout in which a block
# copies one chunk of a row in every field.
CONFIGS = [
    *(
        CudaConfig(threads, unroll, False)
        for threads in (64, 128, 256, 512)
        for unroll in (1, 2, 4)
    ),
    *(CudaConfig(1024, unroll, False) for unroll in (1, 2)),
    *(CudaConfig(*each, True) for each in ((128, 2), (256, 2), (512, 2), (128, 4))),
]


def multiplier(divisor: int) -> tuple[int, int]:
    """Multiplier and shift with ``n // divisor == (umulhi(n, multiplier) + n) >> shift``.

    Exact for 0 <= n < 2**31 and 1 <= divisor < 2**31 (Granlund and Montgomery, "Division by
    invariant integers using multiplication", PLDI 1994, figure 4.1).
    """
    shift = (divisor - 1).bit_length()
    return (((1 << shift) - divisor) << 32) // divisor + 1, shift


def capacity_for(fields: int, most: int) -> int:
    """Size of the field table to compile for: few different sizes, so few compilations."""
    return min(1 << (fields - 1).bit_length(), most)


def room_for_ranks(request: Request) -> int:
    """Ranks that the kernel's table of them has room for; 0 if there is no table."""
    return 0 if request.ranks is None else capacity_for(len(request.ranks.places), MOST_RANKS)


class Compilation(Protocol):
    """One compilation of a CUDA source; hashable."""

    # Name of the kernel and, with .cu behind it, of the source.
    kernel: ClassVar[str]

    def macros(self) -> dict[str, str]:
        """Macro names and values."""
        ...

    def parameter_bytes(self) -> int:
        """Size of the kernel's parameters."""
        ...


@dataclass(frozen=True)
class Specialisation:
    """The macros of one compilation of gather.cu; they are explained there."""

    kernel: ClassVar[str] = "gather"
    fields: int
    index_dtype: torch.dtype
    bounds: str
    wide: bool
    config: CudaConfig
    shifted: bool = False
    packed: bool = False
    ranks: int = 0

    def macros(self) -> dict[str, str]:
        """Macro names and values."""
        return {
            "FIELDS": str(self.fields),
            "STARTS": str(room_for_starts(self.fields)),
            "SEARCH_STEP": str(1 << (self.fields - 1).bit_length() >> 1),
            "INDEX": INDEX_TYPES[self.index_dtype],
            "INDEX_SIGNED": str(int(self.index_dtype.is_signed)),
            "BOUNDS": str(BOUNDS[self.bounds]),
            "WIDE": str(int(self.wide)),
            "SHIFTED": str(int(self.shifted)),
            "PACKED": str(int(self.packed)),
            "RANKS": str(self.ranks),
            "THREADS": str(self.config.threads),
            "UNROLL": str(self.config.unroll),
            "STREAMING": str(int(self.config.streaming)),
        }

    def parameter_bytes(self) -> int:
        """Size of the kernel's parameters."""
        return parameter_bytes(self.fields, self.ranks)


def source_text(kernel: str = "gather") -> str:
    """Text of a kernel's CUDA source, with what all of them have in common before it.

    Not by an include: CuPy keeps what it compiled by a source's text and options, and would not see
    that an included file has changed.
    """
    folder = resources.files("multigather.kernels")
    common, own = ((folder / name).read_text() for name in ("common.cuh", f"{kernel}.cu"))
    return f'{common}\n#line 1 "{kernel}.cu"\n{own}'


class CudaBackend:
    """See the module's docstring; the methods are those of `base.Backend`."""

    name: ClassVar[str] = "cupy"
    revision: ClassVar[int] = 2
    by_address: ClassVar[bool] = True

    def version(self) -> str | None:
        """Version of CuPy, None if it is not installed."""
        for distribution in ("cupy-cuda13x", "cupy-cuda12x", "cupy"):
            try:
                return importlib.metadata.version(distribution)
            except importlib.metadata.PackageNotFoundError:
                continue
        return None

    def unavailable(self) -> list[str]:
        """See `base.Backend.unavailable`."""
        reasons = []
        if torch.version.hip:
            reasons.append("it needs CUDA, and this torch is built for ROCm")
        elif not torch.cuda.is_available():
            reasons.append("torch sees no CUDA device")
        if importlib.util.find_spec("cupy") is None:
            reasons.append(
                "CuPy is not installed (extra cuda12 or cuda13, by the driver's CUDA version)"
            )
        elif not reasons:
            reasons += _import_failures()
        return reasons

    def why_not(self, request: Request) -> list[Refusal]:
        """See `base.Backend.why_not`."""
        if request.device.type != "cuda":
            return [Refusal(f"it runs on CUDA devices only, not on {request.device}")]
        return [Refusal(text) for text in self.unavailable()] + row_refusals(request)

    def space(self) -> list[Config]:
        """See `base.Backend.space`."""
        return list(CONFIGS)

    def illegal(self, request: Request, config: Config) -> str | None:
        """See `base.Backend.illegal`."""
        return None

    def variant(self, request: Request, config: Config) -> Hashable | None:
        """See `base.Backend.variant`."""
        fields = request.fields
        capacity = capacity_for(min(len(fields), SMALL_CAPACITY), SMALL_CAPACITY)
        shifted = any(units_of(each, new_destination(each))[0] == SHIFTED for each in fields)
        assert isinstance(config, CudaConfig)
        packed = self.packs(request, config)
        if packed and sum(map(len, request.packed)) == len(fields):
            config = for_packed(config)
        return capacity, shifted, packed, request.index_dtype, request.bounds, config

    def packs(self, request: Request, config: Config) -> bool:
        """See `base.Backend.packs`."""
        return request.count >= PACKED_FROM and bool(request.packed)

    def config_from(self, knobs: dict[str, Any]) -> CudaConfig:
        """See `base.Backend.config_from`."""
        return config_of(CudaConfig, self.name, knobs)

    def prepare(self, request: Request, config: Config, site: Site) -> KernelRunner:
        """See `base.Backend.prepare`."""
        assert isinstance(config, CudaConfig)
        most = self.capacity(request.device)
        if request.ranks is not None:
            most = min(most, capacity_within(4096, room_for_ranks(request)))
        make = functools.partial(_launch_of, self, request, config, site, most)
        return KernelRunner(request, most, make)

    def capacity(self, device: torch.device) -> int:
        """Most fields that one launch can carry on the device."""
        return _capacity(device.index)

    def compiles_for(self, device: torch.device) -> bool:
        """Whether kernels of CUDA C run on the device."""
        # Asked at every backward pass. Where a tensor is on such a device, torch has CUDA.
        return device.type == "cuda" and not torch.version.hip and not _import_failures()

    def adds_vectors(self, device: torch.device) -> bool:
        """Whether one instruction of the device adds up to 16 bytes."""
        return torch.cuda.get_device_capability(device) >= (9, 0)

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
        """The launch of a compiled variant; the structure is the function's only parameter."""
        function = _load(specialisation, device.index)
        return Launch(
            function, grid, threads, 0, device.index, parameters, places, (0,), scale=scale
        )


def units_of(field: Field, destination: Destination) -> tuple[int, int]:
    """Kind of a field's copy units (log2_unit in gather.cu) and how many of them a row has."""
    # One fault is recorded per field, so a field of empty rows is "copied" as one unit of size 0.
    if not field.row_bytes:
        return EMPTY, 1
    unit = copy_unit(field, destination)
    if SHIFTED_FROM.get(unit, SHIFTED_MOST) <= field.row_bytes < SHIFTED_MOST:
        # A row may start at any multiple of this in its first window.
        start = power_of_two_divisor(destination.row_stride_bytes, destination.alignment)
        return SHIFTED, (16 - start + field.row_bytes - 1) // 16 + 1
    return unit.bit_length() - 1, field.row_bytes // unit


@dataclass(frozen=True)
class Work:
    """How a field's rows are divided among threads; see struct Field in gather.cu.

    Attributes:
        kind: of copy units, and whether warps copy pieces of rows.
        parts: copy units or pieces per row.
        parts_per_tile: parts that a thread block copies.
        width: copy units, or bytes if shifted, of a row; 0 where the kernel does not ask.
        piece: copy units per piece; for the first field of a packed group, the numbers of fields by
            the size of their units.
        steps: in which a thread copies a row of a packed group; of its first field only.
        columns: most units of a row in a packed group; of its first field only.
    """

    kind: int
    parts: int
    parts_per_tile: int
    width: int
    piece: int
    steps: int = 0
    columns: int = 0


def work_of(field: Field, destination: Destination, config: CudaConfig) -> Work:
    """How to divide a field's rows with a config.

    Rows of a warp's width or more are copied in pieces of up to 32 * unroll units, as equal as
    whole warps allow.
    """
    kind, units = units_of(field, destination)
    shifted_bytes = field.row_bytes if kind == SHIFTED else 0
    if kind not in (3, 4, SHIFTED) or not WARP <= units < 2**31:
        return Work(kind, units, config.threads * config.unroll, shifted_bytes, 0)
    pieces = -(-units // (WARP * config.unroll))
    piece = WARP * -(-units // (WARP * pieces))
    return Work(
        BY_WARPS + kind, -(-units // piece), config.threads // WARP, shifted_bytes or units, piece
    )


def for_packed(config: CudaConfig) -> CudaConfig:
    """The config for a launch of packed groups alone, of which a thread copies one row each.

    More units in flight of fields that are not there would only cost registers.
    """
    return replace(config, unroll=1)


def packed_works(
    request: Request,
    group: Sequence[int],
    destinations: Sequence[Destination],
    config: CudaConfig,
) -> list[tuple[int, Work]]:
    """`work_of` for the fields of a packed group, in the order that the kernel takes them in."""
    units = {
        number: min(copy_unit(request.fields[number], destinations[number]), 8) for number in group
    }
    order = sorted(group, key=lambda number: -units[number])
    widths = [request.fields[number].row_bytes // units[number] for number in order]
    counts = [list(units.values()).count(1 << kind) for kind in PACKED_IN_FLIGHT]
    steps = [
        -(-count // most) for count, most in zip(counts, PACKED_IN_FLIGHT.values(), strict=True)
    ]
    numbers = int.from_bytes(bytes(counts), "little")
    first = Work(PACKED, 1, config.threads, widths[0], numbers, max(steps), max(widths))
    # No tiles of their own.
    others = [Work(PACKED, 0, config.threads, width, 0) for width in widths[1:]]
    return list(zip(order, (first, *others), strict=True))


def works_of(
    request: Request,
    numbers: Sequence[int],
    count: int,
    destinations: Sequence[Destination],
    config: CudaConfig,
) -> list[tuple[int, Work]]:
    """How to divide the rows of each field of a launch, in the order of its table."""
    group_of = {number: group for group in request.packed for number in group}
    if count < PACKED_FROM:
        group_of.clear()
    works = []
    for _, together in itertools.groupby(numbers, lambda number: group_of.get(number, (number,))):
        group = list(together)
        if len(group) > 1:
            works += packed_works(request, group, destinations, config)
        else:
            (number,) = group
            works.append((number, work_of(request.fields[number], destinations[number], config)))
    return works


def _launch_of(
    backend: CudaBackend,
    request: Request,
    config: CudaConfig,
    site: Site,
    most: int,
    numbers: tuple[int, ...],
    count: int,
    index_stride: int,
    destinations: Sequence[Destination],
) -> Any:
    """The launch of some fields, see `base.KernelRunner`."""
    table = works_of(request, numbers, count, destinations, config)
    works = [work for _, work in table]
    kinds = [work.kind for work in works]
    if all(kind == PACKED for kind in kinds):
        config = for_packed(config)
    tile = config.threads * config.unroll
    wide = max(work.parts for work in works) * count + tile >= WIDE_FROM
    tiles = [-(-count * work.parts // work.parts_per_tile) for work in works]
    grid = sum(tiles)
    if grid > MOST_BLOCKS:
        raise ValueError(
            f"{count} indices need {grid} thread blocks in one launch, which has at most "
            f"{MOST_BLOCKS}; gather in several calls"
        )
    capacity = capacity_for(len(numbers), most)
    ranks = request.ranks
    specialisation = Specialisation(
        capacity,
        request.index_dtype,
        request.bounds,
        wide,
        config,
        any(kind & ~BY_WARPS == SHIFTED for kind in kinds),
        PACKED in kinds,
        room_for_ranks(request),
    )
    board = faults.board_of(request.device).address if request.bounds == "raise" else 0
    # struct Parameters of gather.cu, its addresses still 0.
    parameters = bytearray(struct.pack("=QqqQQ8x", 0, index_stride, count, board, site.plan))
    starts = [0, *itertools.accumulate(tiles[:-1])]
    starts += [NO_TILE] * (room_for_starts(capacity) - len(starts))
    parameters += struct.pack(f"={len(starts)}I", *starts)
    place_of: dict[int, int] = {}
    for number, work in table:
        place_of[number] = len(parameters)
        field = request.fields[number]
        if work.kind == PACKED:
            magic, shift = work.steps, work.columns
        else:
            magic, shift = (work.parts >> 32, 0) if wide else multiplier(work.parts)
        parameters += struct.pack(
            "=QQqqqIIIIIHH",
            0,
            0,
            field.rows,
            field.row_stride_bytes,
            destinations[number].row_stride_bytes,
            work.parts & 2**32 - 1,
            magic,
            work.width,
            work.piece,
            site.numbers[number],
            shift,
            work.kind,
        )
    parameters += bytes(FIELD_BYTES * (capacity - len(numbers)))
    if ranks is not None:
        unused = specialisation.ranks - len(ranks.places)
        first_rows = (*ranks.first_rows, *[2**63 - 1] * unused)
        numbers_of_ranks = (ranks.steps, *first_rows, *ranks.places, *[0] * unused)
        parameters += struct.pack(f"={len(numbers_of_ranks)}q", *numbers_of_ranks)
    places = [0]
    for number in numbers:
        places += (place_of[number], place_of[number] + 8)
    scale = scale_of(works, config, bool(request.packed), specialisation, count)
    return backend.launch_of(
        specialisation, grid, config.threads, request.device, bytes(parameters), places, scale
    )


# Where in struct Parameters of gather.cu the number of indices and the first tiles are.
COUNT_PLACE = 16
STARTS_PLACE = 48


def scale_of(
    works: Sequence[Work],
    config: CudaConfig,
    packed: bool,
    specialisation: Specialisation,
    count: int,
) -> Scale | None:
    """How a launch depends on the number of indices; None where one range has no others near."""
    if specialisation.wide or not count:
        return None
    tile = config.threads * config.unroll
    # Up to where unit numbers fit into 32 bits, and thread blocks into a grid.
    most = (WIDE_FROM - tile - 1) // max(work.parts for work in works)
    most = min(most, MOST_BLOCKS // sum(-(-work.parts // work.parts_per_tile) for work in works))
    least = 1
    if packed and count < PACKED_FROM:
        most = min(most, PACKED_FROM - 1)
    elif packed:
        least = PACKED_FROM
    terms = tuple((work.parts, work.parts_per_tile, 1) for work in works)
    return Scale(least, most, COUNT_PLACE, STARTS_PLACE, terms)


@functools.cache
def _import_failures() -> list[str]:
    """Import CuPy once; what it says if it cannot be used."""
    try:
        with no_fork:
            import cupy

        cupy.cuda.runtime.driverGetVersion()
    except Exception as error:  # a CuPy for another CUDA version fails in many ways
        return [f"CuPy cannot be used: {type(error).__name__}: {error}"]
    return []


@functools.cache
def _capacity(device: int) -> int:
    import cupy

    modern = cupy.cuda.runtime.driverGetVersion() >= 12010 and cupy.cuda.nvrtc.getVersion() >= (
        12,
        1,
    )
    if modern and torch.cuda.get_device_capability(device) >= (7, 0):
        return LARGE_CAPACITY
    return SMALL_CAPACITY


_loaded: dict[tuple[Compilation, int], Any] = {}


def _load(specialisation: Compilation, device: int) -> int:
    key = (specialisation, device)
    if key not in _loaded:
        import cupy

        options = ["-std=c++17"]
        options += [f"-D{name}={value}" for name, value in specialisation.macros().items()]
        with cupy.cuda.Device(device):
            code = source_text(specialisation.kernel)
            module = cupy.RawModule(code=code, options=tuple(options), backend="nvrtc")
            kernel = module.get_function(specialisation.kernel)
            # The module must outlive the handle, and only a handle that is kept is given away.
            _loaded.setdefault(key, (kernel.kernel.ptr, kernel, module))
    return int(_loaded[key][0])
