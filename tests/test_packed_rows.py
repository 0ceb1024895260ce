"""gather.cu's packed groups: fields that a thread copies a row of, all at once."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from cases import Slab, expected, raw_bytes
from conftest import Target
from gather_cu import launch

import multigather as mg
from multigather.backends import _cupy
from multigather.backends._cupy import CudaConfig

TARGET_BACKENDS = ("cupy",)  # read by conftest.py: no other backend has this kernel

BOUNDS = ("raise", "fill", "clip", "unchecked")
I64, I32, I16, U8 = torch.int64, torch.int32, torch.int16, torch.uint8
F32, F64, BOOL = torch.float32, torch.float64, torch.bool


def buffers(rows: int, fields: Any, device: str) -> list[torch.Tensor]:
    return [
        Slab(rows, shape, dtype, device, seed=rows + number).tensor
        for number, (dtype, shape) in enumerate(fields)
    ]


@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("wide", [False, True], ids=["32-bit", "64-bit"])
@pytest.mark.parametrize("config", [CudaConfig(32, 1), CudaConfig(64, 4, True)], ids=["32", "64"])
def test_every_mode(
    target: Target, config: CudaConfig, wide: bool, bounds: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fields of every unit, into outputs with gaps and odd addresses; each fault once a buffer."""
    monkeypatch.setattr(_cupy, "PACKED_FROM", 1)
    if wide:
        monkeypatch.setattr(_cupy, "WIDE_FROM", 0)
    fields = [(I64, ()), (U8, (3,)), (I32, (3,)), (F64, (4,)), (BOOL, ()), (I16, (5,)), (F32, ())]
    fields += [(F32, ())] * 9 + [(U8, ())] * 6 + [(F64, (40,)), (U8, (47,)), (U8, (0,))]
    slab = mg.pack(*buffers(11, fields, target.device))
    sources = [*slab, *buffers(7, [(F32, (100,)), (U8, (33,))], target.device)]
    # A bad index in mode "raise" is as many faults as the board takes.
    values = {"unchecked": [0, 6, 3], "raise": [0, 6, 11, -1]}.get(bounds, [0, 11, 3, -1, 2**40])
    indices = torch.tensor(values * 9, device=target.device)
    outs = [
        Slab(len(indices), each.shape[1:], each.dtype, target.device,
             offset=number % 5 * each.itemsize % 16, gap=number % 3 * each.itemsize)
        for number, each in enumerate(sources)
    ]  # fmt: skip
    for out in outs:
        out.poison()
    _, met = launch(target, indices[: len(values)], sources, None, bounds, config)
    bad = [2] if bounds == "raise" else []
    assert sorted(met) == list(itertools.product(bad, range(len(sources))))
    before = [raw_bytes(source).copy() for source in sources]
    if bounds == "raise":
        indices = indices.remainder(7)
    launch(target, indices, sources, [out.tensor for out in outs], bounds, config)
    for source, out, content in zip(sources, outs, before, strict=True):
        assert (raw_bytes(out.tensor) == expected(indices, source, bounds)).all()
        out.assert_guards_intact()
        assert (raw_bytes(source) == content).all()
