"""The gathers that are measured: presets, grids, what a program recorded, and random ones."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from ..cache import shape
from ..request import Field, Request

LAYOUTS = ("uniform", "eights", "odd", "ragged", "mixed", "columns")

# One call's output is at most this, and the buffers of a call together about that: several times
# the L2 cache (50 MB on an H100 or H200), so that rows come from memory as they do in a program.
MOST_CALL_BYTES = {"cuda": 512 * 2**20, "cpu": 16 * 2**20}
TABLE_BYTES = {"cuda": 256 * 2**20, "cpu": 64 * 2**20}
MOST_CPU_COUNT = 65536
FEWEST_ROWS = 1024
MOST_ROWS = 2**24
COLUMN_BYTES = 4  # of a table's columns, the mean

# Choices change slowly with the number of rows and faster with their size. On an H200, steps of 64
# in place of 8 in the rows' size added 1 % to the median regret of gathers between them.
# Columns, rows of one element, are many and their choices change within these steps, so they have
# steps of their own: without them they had the highest regrets, up to 17 %.
Grid = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[str, ...]]
PRESETS: dict[str, tuple[Grid, ...]] = {
    "quick": (((8, 512, 32768), (16, 1024), (1, 8), ("uniform", "odd", "ragged")),),
    "default": (
        (
            (1, 16, 256, 4096, 65536, 1048576),
            (1, 8, 64, 512, 4096, 32768),
            (1, 4, 24),
            LAYOUTS[:-1],
        ),
        ((64, 1024, 4096, 16384, 65536, 262144), (4,), (4, 12, 24, 56), ("columns",)),
    ),
    "full": (
        (
            tuple(4**k for k in range(12)),
            (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536),
            (1, 2, 4, 8, 16, 32, 64),
            LAYOUTS,
        ),
    ),
}

DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.float32, 8: torch.int64}


def preset(device: torch.device, name: str) -> tuple[list[Request], list[str]]:
    """The gathers of a preset, and the reasons against those that were left out."""
    requests: list[Request] = []
    skipped: list[str] = []
    for counts, row_bytes, buffers, layouts in PRESETS[name]:
        if device.type == "cpu":
            counts = tuple(count for count in counts if count <= MOST_CPU_COUNT)
        found, left_out = grid(device, counts, row_bytes, buffers, layouts)
        requests += found
        skipped += left_out
    return requests, skipped


def grid(
    device: torch.device,
    counts: Iterable[int],
    row_bytes: Iterable[int],
    buffers: Iterable[int],
    layouts: Sequence[str] = LAYOUTS,
) -> tuple[list[Request], list[str]]:
    """All combinations that make sense, and the reasons against those that were left out."""
    requests: list[Request] = []
    skipped: list[str] = []
    for number in buffers:
        for size in row_bytes:
            for layout in layouts:
                if not makes_sense(layout, size, number):
                    continue
                widths = field_widths(layout, size, number)
                for count in counts:
                    request = request_of(device, count, widths)
                    if request.row_bytes * count > MOST_CALL_BYTES[device.type]:
                        most = MOST_CALL_BYTES[device.type] >> 20
                        skipped.append(
                            f"m={count}, {number} {layout} buffers of {size} bytes a row: "
                            f"its output is more than {most} MiB"
                        )
                        continue
                    requests.append(request)
    return requests, skipped


def makes_sense(layout: str, row_bytes: int, number: int) -> bool:
    """Whether a layout differs from a simpler one at this size and number of buffers."""
    fewest, smallest = {
        "uniform": (1, 1),
        "eights": (1, 32),
        "odd": (1, 2),
        "ragged": (2, 4),
        "mixed": (2, 32),
        "columns": (2, COLUMN_BYTES),
    }[layout]
    if layout == "columns" and row_bytes > smallest:
        return False
    return number >= fewest and row_bytes >= smallest


def field_widths(layout: str, row_bytes: int, number: int) -> list[tuple[int, int]]:
    """(element bytes, elements per row) of each buffer, for a mean of about ``row_bytes``.

    "uniform": all alike, in 16-byte units where rows are that long. "eights": 8 bytes less, so that
    rows start at multiples of 8. "odd": a byte less, so that they start anywhere. "ragged": widths
    that fall from buffer to buffer by the same factor, from the widest to one of 1 to 8 bytes, as
    in a decode step's state or a transition. "mixed": the same in units of 4 bytes. "columns": one
    element of 8, 4, 2 or 1 bytes per row, in turn.
    """
    if layout == "columns":
        return [((8, 4, 2, 1)[k % 4], 1) for k in range(number)]
    if layout == "odd":
        return [(1, row_bytes - 1)] * number
    if layout == "eights":
        return [(8, row_bytes // 8 - 1)] * number
    if layout == "uniform":
        size = next(each for each in (4, 2, 1) if row_bytes % each == 0)
        return [(size, row_bytes // size)] * number
    weights = [2.0 ** (-12 * k / (number - 1)) for k in range(number)]
    scale = row_bytes * number / sum(weights)
    widths = []
    for k, weight in enumerate(weights):
        wanted = weight * scale
        if wanted >= 32:
            widths.append((4, 4 * round(wanted / 16) + (layout == "mixed")))
        else:
            widths.append(((8, 4, 1)[k % 3], 1))
    return widths


def request_of(
    device: torch.device,
    count: int,
    widths: Sequence[tuple[int, int]],
    rows: int | None = None,
) -> Request:
    """A gather from contiguous buffers; ``rows`` as many as fill `TABLE_BYTES` by default."""
    total = sum(size * elements for size, elements in widths)
    if rows is None:
        rows = min(max(TABLE_BYTES[device.type] // max(total, 1), FEWEST_ROWS), MOST_ROWS)
    fields = tuple(
        Field(
            DTYPES[size],
            rows,
            (elements,) if elements != 1 else (),
            size * elements,
            size * elements,
            True,
            16,
        )
        for size, elements in widths
    )
    return Request(device, False, torch.int64, count, "raise", fields)


def recorded(path: Path, device: torch.device) -> list[Request]:
    """The gathers of a file that ``MULTIGATHER_RECORD`` wrote, for devices of this type.

    Raises:
        ValueError: a line is none of its lines; it names the line.
    """
    requests: list[Request] = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            content = json.loads(line)
            if not isinstance(content, dict):
                raise ValueError("it is no JSON object")
            request = shape.from_text(content, device)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
        if content.get("device") == device.type and request not in requests:
            requests.append(request)
    return requests


def held_out(number: int, seed: int, device: torch.device) -> list[Request]:
    """Random gathers of every kind: counts, row sizes, odd ones, dtypes, numbers of buffers.

    Counts, row sizes and numbers of buffers are uniform in their logarithms. A third each has
    buffers that are all alike, that differ in everything, or that hold one element per row.
    """
    draw = random.Random(seed)
    most = MOST_CALL_BYTES[device.type]
    widest = 16 if device.type == "cuda" else 12
    requests: list[Request] = []
    while len(requests) < number:
        buffers = round(2 ** draw.uniform(0, 6))
        count = round(2 ** draw.uniform(0, 20 if device.type == "cuda" else 14))
        kind = draw.choice(("alike", "mixed", "columns"))

        def width(most_bytes: float) -> tuple[int, int]:
            wanted = 2 ** draw.uniform(0, most_bytes)
            size = 1 if draw.random() < 0.3 else draw.choice((1, 2, 4, 8))
            return size, max(1, round(wanted / size))

        if kind == "alike":
            widths = [width(widest)] * buffers
        elif kind == "mixed":
            widths = [width(widest - max(0, math.log2(buffers) - 3)) for _ in range(buffers)]
        else:
            widths = [(draw.choice((1, 2, 4, 8)), 1) for _ in range(buffers)]
        total = sum(size * elements for size, elements in widths)
        requests.append(request_of(device, max(1, min(count, most // total)), widths))
    return requests


def summary(request: Request) -> str:
    """The gather in a few words, for tables."""
    sizes = [field.row_bytes for field in request.fields]
    span = f"{min(sizes)}" if min(sizes) == max(sizes) else f"{min(sizes)}-{max(sizes)}"
    return f"m={request.count}, {len(sizes)} x {span} B"
