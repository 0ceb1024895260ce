"""Triton kernel: gather rows of any number of buffers with one index, in one launch.

``destinations[k][j] = sources[k][indices[j]]`` for every field k, as integers of 1 to 8 bytes; a
field of 16-byte units is a field of 8-byte units in pairs, which the compiler merges into 16-byte
accesses because strides and widths are multiples of two by construction.

The decorated kernel declares the search space: ``gather.configs`` are the candidates of the tuner,
and ``gather.fn`` is what is launched with the chosen one. Nothing calls the autotuner in a gather:
its cache lookup alone costs more than the gather (8 to 36 microseconds of host time).
"""

import os

import triton
import triton.language as tl
from triton.language import target_info

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

# Layout of the fault board, as in multigather/faults.py.
FAULT_RING = tl.constexpr(64)
FAULT_WORDS = tl.constexpr(8)

# What is left out of this grid was never more than 1 % better than the rest (430 gathers, H200).
CONFIGS = [
    triton.Config({"BLOCK": block, "FUSED": fused}, num_warps=warps)
    for block, warps in ((128, 1), (256, 2), (512, 4), (1024, 4), (2048, 8), (4096, 8))
    for fused in (0, 1)
    if (block, fused) not in ((512, 1), (2048, 1))
]


@triton.constexpr_function
def columns_of(width, limit):
    """Columns of a field's tile: its padded row width, at least 1 and at most ``limit``."""
    return max(min(width, limit), 1)


@triton.jit
def chunks_of(elements, WIDTH: tl.constexpr, LIMIT: tl.constexpr):
    """Tiles side by side that cover one row of ``elements`` elements; 1 for a row of none."""
    COLUMNS: tl.constexpr = columns_of(WIDTH, LIMIT)
    return tl.maximum(tl.cdiv(elements, COLUMNS), 1)


@triton.jit
def row_blocks_of(count, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Tiles one below the other that cover ``count`` rows, where a tile has BLOCK elements."""
    ROWS: tl.constexpr = BLOCK // columns_of(WIDTH, BLOCK)
    return tl.cdiv(count, ROWS)


@triton.constexpr_function
def is_cuda():
    """Whether the kernel is compiled for a GPU of NVIDIA's."""
    return not INTERPRETED and target_info.is_cuda()


@triton.jit
def stamp(record, value, mask):
    """Write the first words of records when the host can see the others."""
    if is_cuda():
        # The fence by itself, since the exchange may not have system scope; see copy_tile_of.
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $1, 0; @p fence.acq_rel.sys; mov.b32 $0, 0; }",
            "=r,r", [mask.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
        tl.atomic_xchg(record, value, mask=mask, sem="relaxed", scope="gpu")
    else:
        tl.atomic_xchg(record, value, mask=mask, sem="release", scope="sys")


def copy_tile_of(
    indices, index_stride, count, faults, plan, buffer, unsigned,
    source, destination, rows, source_stride, destination_stride, units,
    row_block, chunk, BOUNDS: tl.constexpr, VECTOR: tl.constexpr, WIDTH: tl.constexpr,
    LIMIT: tl.constexpr, ELEMENTS: tl.constexpr,
):  # fmt: skip
    """Copy tile (``row_block``, ``chunk``) of one field.

    A tile is ROWS rows by COLUMNS elements: as many columns as the row has, at most LIMIT, and as
    many rows as make ELEMENTS elements.
    """
    COLUMNS: tl.constexpr = columns_of(WIDTH, LIMIT)
    ROWS: tl.constexpr = ELEMENTS // COLUMNS
    position = row_block.to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    inside = position < count
    value = tl.load(indices + position * index_stride, mask=inside, other=0).to(tl.int64)
    row = value
    valid = inside
    if BOUNDS == "raise":
        row = tl.where((value < 0) & (unsigned == 0), value + rows, value)
        valid = inside & (row >= 0) & (row < rows)
        bad = inside & ((row < 0) | (row >= rows)) & (tl.zeros_like(position) + chunk == 0)
        # As report() in common.cuh, which says why the scope is the GPU: ticket, record where the
        # ring has a free slot, stamp last.
        SCOPE: tl.constexpr = "gpu" if is_cuda() else "sys"
        ticket = tl.atomic_add(
            faults + tl.zeros_like(position), 1, mask=bad, sem="relaxed", scope=SCOPE
        )
        taken = tl.load(faults + 1 + tl.zeros_like(position), mask=bad, other=0, volatile=True)
        free = bad & (ticket - taken < FAULT_RING)
        record = faults + FAULT_WORDS * (1 + ticket % FAULT_RING)
        tl.store(record + 1, tl.zeros_like(position) + plan, mask=free)
        tl.store(record + 2, position, mask=free)
        tl.store(record + 3, value, mask=free)
        tl.store(record + 4, tl.zeros_like(position) + buffer, mask=free)
        tl.store(record + 5, tl.zeros_like(position) + rows, mask=free)
        tl.store(record + 6, tl.zeros_like(position) + unsigned, mask=free)
        tl.store(record + 7, tl.zeros_like(position), mask=free)
        stamp(record, ticket + 1, free)
    elif BOUNDS == "fill":
        valid = inside & (row >= 0) & (row < rows)
    elif BOUNDS == "clip":
        # A negative 64-bit value of an unsigned index is a value of 2^63 or more.
        row = tl.where(
            (row < 0) & (unsigned == 0), 0, tl.where((row >= 0) & (row < rows), row, rows - 1)
        )
    if WIDTH > 0:
        # Multiplying by VECTOR shows the compiler that rows start at multiples of it.
        width = units * VECTOR
        start = chunk.to(tl.int64) * COLUMNS
        column = tl.arange(0, COLUMNS)  # [COLUMNS]
        left = tl.minimum(width - start, COLUMNS).to(tl.int32)
        row = tl.where(valid, row, 0)
        from_row = source + row * (source_stride * VECTOR) + start  # [ROWS]
        to_row = destination + position * (destination_stride * VECTOR) + start  # [ROWS]
        mask = valid[:, None] & (column < left)[None, :]
        data = tl.load(from_row[:, None] + column[None, :], mask=mask, other=0)
        tl.store(
            to_row[:, None] + column[None, :], data, mask=inside[:, None] & (column < left)[None, :]
        )


# Compile time grows with the square of the code's length: 64 fields in mode "raise" take 260 s if
# each has its own copy of the code, and 2 s if fields of a kind share a function (Triton 3.9).
# Up to INLINED fields each has its own, which spares the call: 2 s.
INLINED = tl.constexpr(8)
inlined_copy_tile = triton.jit(copy_tile_of)
shared_copy_tile = triton.jit(copy_tile_of, noinline=True)


@triton.autotune(
    configs=CONFIGS,
    key=["count", "WIDTHS", "VECTORS", "BOUNDS"],
    cache_results=False,
)
@triton.jit(do_not_specialize=["count", "index_stride", "plan", "unsigned", "buffers", "rows"])
def gather(
    indices, index_stride, count, faults, plan, unsigned,
    buffers, sources, destinations, rows, source_strides, destination_strides, units,
    WIDTHS: tl.constexpr, VECTORS: tl.constexpr, WIDEST: tl.constexpr, BOUNDS: tl.constexpr,
    BLOCK: tl.constexpr, FUSED: tl.constexpr,
):  # fmt: skip
    """Gather every field's rows.

    Args:
        indices: pointer to ``count`` integers, ``index_stride`` elements apart.
        faults: int64 pointer to the device's fault board (used where ``BOUNDS`` is "raise").
        plan: number of this call's description, copied into fault records.
        unsigned: 1 where the indices are uint64, so that a negative int64 is a large value.
        buffers: number of each field's buffer among the caller's, for fault records.
        sources, destinations: integer pointers, one per field.
        rows: row count of each source.
        source_strides, destination_strides, units: row strides and row size in copy units; a copy
            unit is ``VECTORS[k]`` elements of the pointer's type.
        WIDTHS: elements per row, rounded up to a power of two; 0 for rows of no bytes.
        WIDEST: the largest of ``WIDTHS``, at least 1.
        BOUNDS: "raise", "fill", "clip" or "unchecked".
        BLOCK: elements of one tile.
        FUSED: 0, each program copies one tile of one field; 1, it copies the same rows and the
            same chunk of every field.
    """
    copy_tile: tl.constexpr = inlined_copy_tile if len(WIDTHS) <= INLINED else shared_copy_tile
    program = tl.program_id(0)
    if FUSED:
        LIMIT: tl.constexpr = columns_of(WIDEST, BLOCK)
        chunks = 1
        for k in tl.static_range(len(WIDTHS)):
            chunks = tl.maximum(chunks, chunks_of(units[k] * VECTORS[k], WIDTHS[k], LIMIT))
        row_block = program // chunks
        chunk = program % chunks
        for k in tl.static_range(len(WIDTHS)):
            if chunk < chunks_of(units[k] * VECTORS[k], WIDTHS[k], LIMIT):
                copy_tile(
                    indices, index_stride, count, faults, plan, buffers[k], unsigned,
                    sources[k], destinations[k], rows[k], source_strides[k], destination_strides[k],
                    units[k], row_block, chunk, BOUNDS, VECTORS[k], WIDTHS[k],
                    LIMIT, (BLOCK // LIMIT) * columns_of(WIDTHS[k], LIMIT),
                )  # fmt: skip
    else:
        first = 0
        for k in tl.static_range(len(WIDTHS)):
            chunks = chunks_of(units[k] * VECTORS[k], WIDTHS[k], BLOCK)
            tiles = row_blocks_of(count, WIDTHS[k], BLOCK) * chunks
            if (program >= first) & (program < first + tiles):
                copy_tile(
                    indices, index_stride, count, faults, plan, buffers[k], unsigned,
                    sources[k], destinations[k], rows[k], source_strides[k], destination_strides[k],
                    units[k], (program - first) // chunks, (program - first) % chunks, BOUNDS,
                    VECTORS[k], WIDTHS[k], BLOCK, BLOCK,
                )  # fmt: skip
            first += tiles
