"""A gather from zeros that stand in poison never shows poison, whatever the indices are.

A kernel that reads beside a row, in a gap between rows, or outside the buffer shows bytes that are
not zero. Odd row sizes are among the buffers, because the CUDA kernel reads those in aligned words
of 16 bytes, which reach beyond the row.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import pytest
import torch
from cases import POISON
from conftest import Target

import multigather
from multigather import dispatch, faults
from multigather.backends._cupy import CudaBackend
from multigather.backends._triton import TritonConfig, _BadIndex
from multigather.backends.base import KernelRunner
from multigather.request import Request, Site, field_of

GUARD = 1 << 13
# Row bytes, bytes between rows, bytes by which the first row misses a multiple of 16, and rows.
LAYOUTS = (
    (1, 0, 0, 1000),
    (3, 0, 5, 1000),
    (16, 0, 0, 7),
    (33, 0, 1, 500),
    (47, 5, 7, 64),
    (66, 2, 2, 1),
    (100, 28, 4, 300),
    (255, 0, 13, 40),
)
CHECKED = ("raise", "fill", "clip")
COUNTS = {
    "torch-cpu": 1_000_000,
    "native-cpu": 1_000_000,
    "triton-interpreter": 120,
    "cuda-source-on-cpu": 200_000,
    "torch-gpu": 1_000_000,
    "triton-gpu": 1_000_000,
    "cupy-gpu": 1_000_000,
}


class Zeros:
    """Rows of zeros in poisoned memory, which is in the gaps between the rows too."""

    def __init__(self, layout: tuple[int, int, int, int], device: str) -> None:
        width, gap, offset, rows = layout
        stride = width + gap
        self.memory = torch.full(
            (2 * GUARD + 16 + rows * stride,), POISON, dtype=torch.uint8, device=device
        )
        start = GUARD + (offset - self.memory.data_ptr() - GUARD) % 16
        self.tensor = self.memory.as_strided((rows, width), (stride, 1), start)
        self.tensor.zero_()
        self.before = self.memory.clone()


def random_indices(count: int, dtype: torch.dtype, device: str, seed: int) -> torch.Tensor:
    """A third within a few rows of a buffer, a third within 2000, and a third of any bits at all.

    The first ones are the extremes of the type and the neighbours of every power of two.
    """
    generator = torch.Generator().manual_seed(seed)
    info = torch.iinfo(dtype)
    special = {0, -1, info.min, info.max, info.min + 1, info.max - 1}
    for bit in range(64):
        special |= {sign * (1 << bit) + step for sign in (1, -1) for step in (-1, 0, 1)}
    special = {each for each in special if info.min <= each <= info.max}
    fixed = torch.tensor([(each + 2**63) % 2**64 - 2**63 for each in sorted(special)])
    any_bits = torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator)
    near = torch.randint(-10, 10, (count,), generator=generator)
    wide = torch.randint(-2000, 2000, (count,), generator=generator)
    kind = torch.randint(0, 3, (count,), generator=generator)
    values = torch.where(kind == 0, near, torch.where(kind == 1, wide, any_bits))
    fixed = fixed[torch.randperm(len(fixed), generator=generator)][: count // 2]
    values[: len(fixed)] = fixed
    if dtype != torch.uint64:
        # The low bits, as a cast between integers takes them.
        return values.to(dtype).to(device)
    return values.view(torch.uint64).to(device)


def gather_into(
    target: Target,
    indices: torch.Tensor,
    sources: Sequence[torch.Tensor],
    outs: Sequence[torch.Tensor],
    bounds: str,
) -> bool:
    """Gather with bad indices among others; False where the call refused and wrote nothing.

    On a CPU the call raises before a kernel runs, so the kernels are called without the check.
    """
    if target.device == "cuda" or target.backend in ("native", "torch") or bounds != "raise":
        try:
            multigather.gather(indices, *sources, out=outs, bounds=bounds, backend=target.backend)
            multigather.check()
        except IndexError:
            return target.device == "cuda"
        return True
    (backend,) = (each for each in dispatch.BACKENDS if each.name == target.backend)
    numbers = tuple(range(len(sources)))
    site = Site(0, numbers, tuple(f"bufs[{number}]" for number in numbers))
    fields = tuple(map(field_of, sources))
    request = Request(indices.device, False, indices.dtype, len(indices), bounds, fields)
    if target.backend == "cupy":
        runner = CudaBackend.prepare(backend, request, backend.space()[0], site)
    else:
        prepared = backend.prepare(request, TritonConfig(4096, 8, False), site)
        assert isinstance(prepared, functools.partial)
        runner = prepared.args[0]
    assert isinstance(runner, KernelRunner)
    try:
        runner(indices, indices.shape, sources, outs)
        assert faults.board_of(indices.device).take() is not None
    except _BadIndex:
        pass
    return True


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint64], ids=str)
@pytest.mark.parametrize("bounds", CHECKED)
def test_poison_never_shows(target: Target, bounds: str, dtype: torch.dtype) -> None:
    slabs = [Zeros(layout, target.device) for layout in LAYOUTS]
    sources = [slab.tensor for slab in slabs]
    count = COUNTS[target.name]
    if dtype != torch.int64 and target.device == "cpu":
        count //= 5  # to save time: only how an index is read differs
    indices = random_indices(count, dtype, target.device, seed=1)
    outs = [
        torch.full((len(indices), source.shape[1]), POISON, dtype=torch.uint8, device=target.device)
        for source in sources
    ]
    if gather_into(target, indices, sources, outs, bounds):
        for source, out in zip(sources, outs, strict=True):
            assert not out.any(), f"rows of {source.shape[1]} bytes show poison"
    else:
        assert all(bool((out == POISON).all()) for out in outs), "a refused call has written"
    for slab in slabs:
        assert torch.equal(slab.memory, slab.before)


@pytest.mark.parametrize("bounds", CHECKED)
def test_poison_never_shows_in_new_outputs(target: Target, bounds: str) -> None:
    """Repeated calls into outputs that the call makes; on a CPU only good indices give any."""
    slabs = [Zeros(layout, target.device) for layout in LAYOUTS]
    sources = [slab.tensor for slab in slabs]
    count = COUNTS[target.name] // 10
    for seed in range(3):
        indices = random_indices(count, torch.int64, target.device, seed)
        if bounds == "raise" and target.device == "cpu":
            indices = indices % min(source.shape[0] for source in sources)
        made = multigather.gather(indices, *sources, bounds=bounds, backend=target.backend)
        assert not any(bool(out.any()) for out in made)
        if bounds == "raise" and target.device == "cuda":
            with pytest.raises(IndexError):
                multigather.check()
    for slab in slabs:
        assert torch.equal(slab.memory, slab.before)


def test_a_read_beside_a_row_would_show(target: Target) -> None:
    """The test can fail: a buffer that takes in one byte of poison shows it."""
    slab = Zeros((33, 0, 1, 500), target.device)
    start = slab.tensor.storage_offset()
    wrong = slab.memory.as_strided((500, 33), (33, 1), start - 1)
    indices = random_indices(1000, torch.int64, target.device, seed=1)
    (rows,) = multigather.gather(indices, wrong, bounds="clip", backend=target.backend)
    assert rows.any()
