"""gather.cu's rows of a warp's width or more, which warps copy in pieces."""

from __future__ import annotations

import itertools

import pytest
import torch
from cases import Slab, expected, raw_bytes
from conftest import Target
from gather_cu import launch

from multigather.backends import _cupy
from multigather.backends._cupy import (
    BY_WARPS,
    EMPTY,
    SHIFTED,
    WARP,
    CudaConfig,
    units_of,
    work_of,
)
from multigather.backends.base import new_destination
from multigather.request import Field

TARGET_BACKENDS = ("cupy",)  # read by conftest.py: no other backend has pieces

BOUNDS = ("raise", "fill", "clip", "unchecked")
# Units per row around one, two, three, four and more widths of a warp.
UNITS = (31, 32, 33, 63, 64, 65, 95, 96, 97, 127, 128, 129, 160, 257, 1000)


def field(row_bytes: int) -> Field:
    return Field(torch.uint8, 9, (row_bytes,), row_bytes, row_bytes, True, 16)


@pytest.mark.parametrize("unroll", [1, 2, 4, 8])
def test_pieces_cover_a_row(unroll: int) -> None:
    """As few pieces as the unroll allows, all but the last of one size."""
    config = CudaConfig(64, unroll)
    for units, bytes_per_unit in itertools.product(range(1, 1200), (8, 16)):
        # An odd number of 8-byte units, so that rows allow no wider ones.
        row_bytes = units * bytes_per_unit if bytes_per_unit == 16 else (2 * units + 1) * 8
        one = field(row_bytes)
        kind, units = units_of(one, new_destination(one))
        work = work_of(one, new_destination(one), config)
        if units < WARP:
            assert (work.kind, work.parts, work.parts_per_tile) == (kind, units, 64 * unroll)
            continue
        assert (work.kind, work.width) == (BY_WARPS + kind, units)
        assert work.parts_per_tile == 64 // WARP
        assert work.piece % WARP == 0
        assert work.piece <= WARP * unroll
        assert (work.parts - 1) * work.piece < units <= work.parts * work.piece
        assert work.parts == -(-units // (WARP * unroll))


def test_what_warps_copy() -> None:
    """Shifted rows and rows of 8- or 16-byte units, from a warp's width on; nothing else."""
    kinds = {
        size: work_of(field(size), new_destination(field(size)), CudaConfig()).kind
        for size in (0, 31, 100, 8 * 31, 8 * 33, 16 * 31, 16 * 32, 16 * 30 + 1, 16 * 32 + 1)
    }
    assert kinds == {
        0: EMPTY,
        31: 0,
        100: 2,
        8 * 31: 3,
        8 * 33: BY_WARPS + 3,
        16 * 31: 4,
        16 * 32: BY_WARPS + 4,
        16 * 30 + 1: SHIFTED,
        16 * 32 + 1: BY_WARPS + SHIFTED,
    }


@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize(
    ("unroll", "wide"),
    [(1, False), (2, False), (4, False), (2, True)],
    ids=["1", "2", "4", "64-bit"],
)
def test_every_mode(
    target: Target, wide: bool, unroll: int, bounds: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of every number of pieces: right, or zeros; gaps stay as they are, each fault once."""
    if wide:
        monkeypatch.setattr(_cupy, "WIDE_FROM", 0)
    shapes = [((2 * units,), torch.int64) for units in UNITS]
    shapes += [((2 * units + 1,), torch.int64) for units in UNITS]
    shapes += [((16 * units + 3,), torch.uint8) for units in UNITS[::3]]
    slabs = [
        Slab(7, shape, dtype, target.device, gap=number % 3 * 16, seed=number)
        for number, (shape, dtype) in enumerate(shapes)
    ]
    sources = [slab.tensor for slab in slabs]
    values = [0, 6, 3, 3, 5] if bounds == "unchecked" else [0, 6, 7, 3, -1, 3, 5]
    indices = torch.tensor(values, device=target.device)
    outs = [
        Slab(len(values), shape, dtype, target.device, gap=number % 2 * 16)
        for number, (shape, dtype) in enumerate(shapes)
    ]
    for out in outs:
        out.poison()
    into = [out.tensor for out in outs]
    _, met = launch(target, indices, sources, into, bounds, CudaConfig(64, unroll))
    for source, out in zip(sources, outs, strict=True):
        assert (raw_bytes(out.tensor) == expected(indices, source, bounds)).all()
        out.assert_guards_intact()
    for slab in slabs:
        slab.assert_unchanged()
    bad = [2] if bounds == "raise" else []
    assert sorted(met) == list(itertools.product(bad, range(len(sources))))
