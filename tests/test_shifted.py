"""gather.cu's shifted copies: rows of 1- or 2-byte units, put together from 16-byte words."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from cases import Slab, assert_gathered, expected, raw_bytes
from conftest import Target
from gather_cu import launch

from multigather.backends import _cupy
from multigather.backends._cupy import EMPTY, SHIFTED, CudaConfig, units_of
from multigather.backends.base import Destination
from multigather.request import Field, field_of, power_of_two_divisor

TARGET_BACKENDS = ("cupy",)  # read by conftest.py: no other backend copies rows shifted
BOUNDS = ("raise", "fill", "clip", "unchecked")


def kinds_of(sources: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> list[int]:
    """Kinds of the fields' copies into these outputs."""
    return [
        units_of(
            field_of(source),
            Destination(
                out.stride(0) * out.element_size(), power_of_two_divisor(out.data_ptr())
            ),
        )[0]
        for source, out in zip(sources, outs, strict=True)
    ]  # fmt: skip


@pytest.mark.parametrize("width", [*range(32, 101), 255, 256, 1024, 4097])
def test_every_misalignment_of_source_and_destination(target: Target, width: int) -> None:
    """Each source address modulo 16 meets each destination address modulo 16."""
    indices = torch.tensor([3, 0, -1, 1], device=target.device)
    for turn in range(16):
        slabs = [
            Slab(4, (width,), offset=place, gap=turn % 3, seed=place, device=target.device)
            for place in range(16)
        ]
        outs = [
            Slab(4, (width,), offset=(place + turn) % 16, gap=place % 4, device=target.device)
            for place in range(16)
        ]
        for out in outs:
            out.poison()
        sources, into = [each.tensor for each in slabs], [each.tensor for each in outs]
        assert kinds_of(sources, into).count(SHIFTED) >= 8
        launch(target, indices, sources, into)
        fresh, _ = launch(target, indices, sources)
        for slab, out, new in zip(slabs, outs, fresh, strict=True):
            assert_gathered(out.tensor, indices, slab.tensor)
            assert_gathered(new, indices, slab.tensor)
            out.assert_guards_intact()
            slab.assert_unchanged()


@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("unroll", [1, 2, 4])
@pytest.mark.parametrize("wide", [False, True], ids=["32-bit", "64-bit"])
def test_every_mode(
    target: Target,
    wide: bool,
    unroll: int,
    bounds: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Shifted fields beside others: right rows, rows of zeros, untouched gaps, each fault once."""
    if wide:
        monkeypatch.setattr(_cupy, "WIDE_FROM", 0)
    shapes = [
        ((33,), torch.uint8, 0, 0),
        ((47,), torch.uint8, 7, 5),
        ((35,), torch.int16, 2, 4),
        ((255,), torch.uint8, 13, 0),
        ((4097,), torch.uint8, 1, 2),
        ((64,), torch.uint8, 9, 0),
        ((64,), torch.uint8, 0, 0),
        ((5,), torch.int16, 2, 0),
        ((3,), torch.float32, 4, 0),
        ((0,), torch.uint8, 0, 0),
    ]
    slabs = [
        Slab(11, shape, dtype, target.device, offset, gap, seed=number)
        for number, (shape, dtype, offset, gap) in enumerate(shapes)
    ]
    sources = [slab.tensor for slab in slabs]
    sources.append(slabs[1].tensor[4:5].expand(11, 47))
    values = [0, 10, 3, 3, 7] if bounds == "unchecked" else [0, 10, 11, 3, -1, -12, 2**40, 3, 7]
    indices = torch.tensor(values, device=target.device)
    outs = [
        Slab(len(values), source.shape[1:], source.dtype, target.device,
             offset=3 * number % 16 * source.element_size() % 16, gap=3 * source.element_size())
        for number, source in enumerate(sources)
    ]  # fmt: skip
    for out in outs:
        out.poison()
    into = [out.tensor for out in outs]
    assert kinds_of(sources, into).count(SHIFTED) == 8
    assert EMPTY in kinds_of(sources, into)
    # Few threads: many tiles, and rows of several pieces.
    config = CudaConfig(32, unroll)
    _, met = launch(target, indices, sources, into, bounds, config)
    for source, out in zip(sources, outs, strict=True):
        want = expected(indices, source, bounds)
        assert (raw_bytes(out.tensor) == want).all()
        out.assert_guards_intact()
    for slab in slabs:
        slab.assert_unchanged()
    bad = [2, 5, 6] if bounds == "raise" else []
    assert sorted(met) == list(itertools.product(bad, range(len(sources))))


def test_no_rows(target: Target) -> None:
    """A buffer without rows, which may have no address, gives rows of zeros."""
    none = torch.empty(0, 41, dtype=torch.uint8, device=target.device)
    indices = torch.tensor([0, -1, 5], device=target.device)
    for bounds in ("raise", "fill"):
        out = Slab(3, (41,), offset=5, gap=2, device=target.device)
        out.poison()
        _, met = launch(target, indices, [none], [out.tensor], bounds)
        assert not out.tensor.any()
        out.assert_guards_intact()
        assert sorted(met) == ([(0, 0), (1, 0), (2, 0)] if bounds == "raise" else [])


def test_the_last_window_of_a_row_may_be_empty(target: Target) -> None:
    """Rows at the alignments that need fewest windows have one to spare, which does nothing."""
    slab = Slab(5, (49,), offset=1, device=target.device)
    out = Slab(4, (49,), gap=3, offset=0, device=target.device)
    out.poison()
    # 52 is a multiple of 4: rows start at 0, 4, 8 and 12, and those from 12 on need 4 windows.
    destination = Destination(52, 16)
    assert units_of(field_of(slab.tensor), destination) == (SHIFTED, 4)
    indices = torch.tensor([4, 0, 2, 2], device=target.device)
    launch(target, indices, [slab.tensor], [out.tensor])
    assert_gathered(out.tensor, indices, slab.tensor)
    out.assert_guards_intact()


def field(row_bytes: int, alignment: int = 16, rows: int = 4) -> Field:
    return Field(torch.uint8, rows, (row_bytes,), row_bytes, row_bytes, True, alignment)


def test_windows_per_row() -> None:
    """As many as a row needs that starts in its first window as late as it may."""
    for row_bytes, stride, alignment in itertools.product(
        range(33, 67, 2), range(100, 117), (1, 2, 4, 8, 16)
    ):
        kind, units = units_of(field(row_bytes), Destination(stride, alignment))
        assert kind == SHIFTED
        addresses = [16] if alignment == 16 else range(alignment, 32, 2 * alignment)
        starts = [(address + row * stride) % 16 for address in addresses for row in range(16)]
        assert units == max(-(-(start + row_bytes) // 16) for start in starts)


def test_which_rows_are_copied_shifted() -> None:
    """Those of narrow units that are neither short nor of 2**30 bytes and more."""
    kinds = {
        size: units_of(field(size), Destination(size, 16))
        for size in (0, 31, 33, 62, 66, 124, 132, 136, 2**30 - 1, 2**30 + 1)
    }
    assert kinds == {
        0: (EMPTY, 1),
        31: (0, 31),
        33: (SHIFTED, 3),
        62: (1, 31),
        66: (SHIFTED, 5),
        124: (2, 31),
        132: (SHIFTED, 9),
        136: (3, 17),
        2**30 - 1: (SHIFTED, 2**26 + 1),
        2**30 + 1: (0, 2**30 + 1),
    }
    # An aligned output makes no window too many.
    assert units_of(field(33), Destination(48, 16)) == (SHIFTED, 3)
    # The widest unit of all, but for the output's address.
    assert units_of(field(64), Destination(64, 16)) == (4, 4)
    assert units_of(field(64), Destination(64, 2)) == (SHIFTED, 5)
