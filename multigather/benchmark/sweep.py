"""Series of gathers: over the bytes per row, over the number of buffers, over both m and row."""

from __future__ import annotations

import torch

from .workloads import Fields, Workload

ROW_BYTES = (
    *(1, 2, 3, 4, 7, 8, 13, 16, 31, 32, 63, 64, 100, 127, 128, 255, 256, 500, 512, 1000, 1023),
    *(1024, 2048, 4095, 4096, 10000, 16384, 32768, 65535, 65536),
)
BUFFERS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
COUNTS = (1, 10, 100, 1000, 10_000, 100_000, 1_000_000)
MAP_ROW_BYTES = (1, 4, 16, 63, 256, 1024, 4095, 16384, 65536)
HOST_COUNT = 48

# One call of the series over row bytes, and the largest of the map; a table holds several times it.
CALL_BYTES = {"cuda": 64 * 2**20, "cpu": 4 * 2**20}
MOST_CALL_BYTES = {"cuda": 256 * 2**20, "cpu": 16 * 2**20}
TABLE_BYTES = {"cuda": 512 * 2**20, "cpu": 64 * 2**20}
MOST_ROWS = 2**22

# Every type that torch can index, by bytes per element.
DTYPES = {
    1: (torch.uint8, torch.int8, torch.bool),
    2: (torch.bfloat16, torch.int16, torch.float16),
    4: (torch.float32, torch.int32),
    8: (torch.int64, torch.float64),
}

SERIES = ("row bytes", "buffers", "map")


def fields(row_bytes: int, number: int) -> Fields:
    """Buffers of one row size in mixed types: the widest first that divide it, in turn."""
    sizes = [size for size in (8, 4, 2, 1) if row_bytes % size == 0]
    found = []
    for place in range(number):
        size = sizes[place % len(sizes)]
        dtype = DTYPES[size][place // len(sizes) % len(DTYPES[size])]
        elements = row_bytes // size
        found.append(((elements,) if elements > 1 else (), dtype))
    return tuple(found)


def workload(name: str, row_bytes: int, number: int, count: int, device: torch.device) -> Workload:
    """A gather of so many rows from so many buffers, in tables as large as `TABLE_BYTES`."""
    rows = TABLE_BYTES[device.type] // (row_bytes * number)
    rows = max(min(rows, MOST_ROWS), 1024)
    return Workload(name, rows, rows, (count,), (count,), fields(row_bytes, number))


def series(name: str, device: torch.device) -> list[Workload]:
    """The gathers of a series, by its name in `SERIES`."""
    kind = device.type
    if name == "row bytes":
        counts = [max(1, min(10**6, CALL_BYTES[kind] // (4 * size))) for size in ROW_BYTES]
        return [
            workload(name, size, 4, count, device)
            for size, count in zip(ROW_BYTES, counts, strict=True)
        ]
    if name == "buffers":
        return [workload(name, 64, number, HOST_COUNT, device) for number in BUFFERS]
    return [
        workload(name, size, 4, count, device)
        for size in MAP_ROW_BYTES
        for count in COUNTS
        if 4 * size * count <= MOST_CALL_BYTES[kind]
    ]


def sector_bytes(each: Workload, count: int) -> int:
    """Bytes that memory moves for one call at least: whole 32-byte sectors of every row read.

    The mean over where a row begins in a sector; rows are written one after another, and the
    indices are read once.
    """
    total = 8.0 * count
    for row, step in each.runs():
        starts = [k * step % 32 for k in range(32)]
        sectors = sum((start + row - 1) // 32 + 1 for start in starts) / len(starts)
        total += count * (32 * sectors + row)
    return round(total)
