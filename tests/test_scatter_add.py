"""The kernel of the backward pass by itself: what it adds, and to which rows."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from conftest import Target

from multigather import dispatch
from multigather.backends import _scatter_add
from multigather.backends._cupy import INDEX_TYPES, CudaBackend
from multigather.backends._scatter_add import AddConfig
from multigather.request import BOUNDS

TARGET_BACKENDS = ("cupy",)  # read by conftest.py

ROWS = 11
# Every unit, rows that end within a unit or a warp, rows of several pieces, rows of no elements.
WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 17, 24, 31, 64, 100, 0, 257, 2050)
DTYPES = pytest.mark.parametrize("dtype", _scatter_add.ELEMENTS, ids=str)


def kernel_backend() -> CudaBackend:
    """The backend of the target."""
    (backend,) = (each for each in dispatch.BACKENDS if isinstance(each, CudaBackend))
    return backend


@pytest.fixture(params=[True, False], ids=["vectors", "words"])
def units(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both units that a GPU may want: up to 16 bytes at once, and a word."""
    monkeypatch.setattr(_scatter_add, "CONFIG", AddConfig(vectors=request.param))


def scatter_add(
    target: Target,
    indices: torch.Tensor,
    gradients: Sequence[torch.Tensor],
    rows: int = ROWS,
    bounds: str = "raise",
) -> list[torch.Tensor]:
    """The sums for buffers of as many rows."""
    shapes = [(rows, *each.shape[indices.dim() :]) for each in gradients]
    sums = [each.new_zeros(shape) for each, shape in zip(gradients, shapes, strict=True)]
    _scatter_add.scatter_add(kernel_backend(), indices, bounds, gradients, sums)
    if target.device == "cuda":
        torch.cuda.synchronize()
    return sums


def row_of(index: int, rows: int, bounds: str) -> int | None:
    """The row that an index selects, as the documentation says."""
    if bounds == "clip":
        return min(max(index, 0), rows - 1)
    if bounds == "raise" and -rows <= index < 0:
        return index + rows
    return index if 0 <= index < rows else None


def wanted(
    indices: torch.Tensor, gradient: torch.Tensor, rows: int = ROWS, bounds: str = "raise"
) -> torch.Tensor:
    """The sum, by NumPy with 64 bits."""
    wide = torch.complex128 if gradient.is_complex() else torch.float64
    shape = gradient.shape[indices.dim() :]
    addends = gradient.resolve_conj().to("cpu", wide).reshape(indices.numel(), *shape).numpy()
    total = np.zeros((rows, *shape), addends.dtype)
    for index, addend in zip(indices.flatten().tolist(), addends, strict=True):
        row = row_of(index, rows, bounds)
        if row is not None:
            total[row] += addend
    return torch.from_numpy(total).to(gradient.dtype)


def whole_numbers(
    shape: Sequence[int], dtype: torch.dtype, device: str, seed: int = 0
) -> torch.Tensor:
    """Values whose sums are exact in every type, whatever the order."""
    generator = torch.Generator().manual_seed(seed)
    real = torch.randint(-2, 3, (2, *shape), generator=generator).double()
    values = torch.complex(*real) if dtype.is_complex else real[0]
    return values.to(device, dtype)


def some_indices(count: int, device: str, low: int = -ROWS, high: int = ROWS) -> torch.Tensor:
    """Random ones, which repeat."""
    generator = torch.Generator().manual_seed(count)
    return torch.randint(low, high, (count,), generator=generator).to(device)


def assert_sums(
    sums: Sequence[torch.Tensor],
    indices: torch.Tensor,
    gradients: Sequence[torch.Tensor],
    bounds: str = "raise",
) -> None:
    for total, gradient in zip(sums, gradients, strict=True):
        correct = wanted(indices, gradient, bounds=bounds)
        assert torch.equal(total.cpu(), correct), (gradient.shape, gradient.stride())


@DTYPES
@pytest.mark.usefixtures("units")
def test_every_type_and_width(target: Target, dtype: torch.dtype) -> None:
    """Rows of every width, all in one launch."""
    indices = some_indices(70, target.device)
    gradients = [
        whole_numbers((70, width), dtype, target.device, seed) for seed, width in enumerate(WIDTHS)
    ]
    assert_sums(scatter_add(target, indices, gradients), indices, gradients)


@pytest.mark.usefixtures("units")
def test_types_side_by_side(target: Target) -> None:
    """Each field has its own type, row shape and unit."""
    indices = some_indices(40, target.device)
    gradients = [
        whole_numbers((40, *shape), dtype, target.device, seed)
        for seed, (dtype, shape) in enumerate(
            (dtype, shape) for dtype in _scatter_add.ELEMENTS for shape in ((), (2, 3, 4))
        )
    ]
    assert_sums(scatter_add(target, indices, gradients), indices, gradients)


@pytest.mark.parametrize("index_dtype", INDEX_TYPES, ids=str)
@pytest.mark.parametrize("bounds", BOUNDS)
def test_every_index_type_and_bounds_mode(
    target: Target, bounds: str, index_dtype: torch.dtype
) -> None:
    """Bad indices add nothing, in "unchecked" too: what may be read must not be written."""
    few = {"raise": INDEX_TYPES, "clip": (torch.int32, torch.uint64)}.get(bounds, (torch.int32,))
    if index_dtype not in few:
        pytest.skip("the mode and the type do not meet elsewhere")
    values = [0, ROWS - 1, 5, 5, ROWS, 100]
    if index_dtype.is_signed:
        values += [-1, -ROWS, -ROWS - 1, -100]
    values += [torch.iinfo(index_dtype).max]
    if index_dtype == torch.uint64:
        indices = torch.tensor([v - (v >> 63 << 64) for v in values]).view(torch.uint64)
    else:
        indices = torch.tensor(values, dtype=index_dtype)
    gradients = [whole_numbers((len(values), w), torch.float32, target.device) for w in (3, 8)]
    sums = scatter_add(target, indices.to(target.device), gradients, bounds=bounds)
    assert_sums(sums, indices, gradients, bounds)


@DTYPES
@pytest.mark.usefixtures("units")
def test_gradients_are_read_where_they_are(target: Target, dtype: torch.dtype) -> None:
    """Slices at any address, rows with gaps, one row for all, and what must be copied."""
    indices = some_indices(24, target.device)
    wide = whole_numbers((24, 40), dtype, target.device)
    grid = whole_numbers((4, 6, 8), dtype, target.device)
    gradients = [
        *(wide[:, start : start + width] for start in (1, 2, 4) for width in (8, 9)),
        wide[::2].repeat(2, 1)[:, :8],
        wide[:1].expand(24, 40),
        wide[:, 3],
        wide[0, 0].expand(24, 6),
        whole_numbers((8, 24), dtype, target.device).t(),
        whole_numbers((24, 8, 4), dtype, target.device).transpose(1, 2),
        grid.view(24, 8),
    ]
    if dtype.is_complex:
        gradients += [wide.conj(), wide[:, 1:9].conj()]
    assert_sums(scatter_add(target, indices, gradients), indices, gradients)
    indices = indices.view(4, 6)
    gradients = [grid, grid[:, :, 2:6], grid.transpose(0, 1).contiguous().transpose(0, 1)]
    gradients += [wide.view(4, 6, 5, 8)[:, :, 1], grid[:1].expand(4, 6, 8)]
    assert_sums(scatter_add(target, indices, gradients), indices, gradients)


def test_every_stride_of_the_indices(target: Target) -> None:
    """Columns, every other one, one for all, transposed, 0-d and none at all."""
    table = some_indices(48, target.device).view(8, 6)
    for indices in (table[:, 2], table[0, ::2], table[1, 1:2].expand(7), table.t(), table[3, 3]):
        gradients = [
            whole_numbers((*indices.shape, *shape), torch.float32, target.device)
            for shape in ((), (5,), (16,))
        ]
        assert_sums(scatter_add(target, indices, gradients), indices, gradients)
    gradients = [torch.ones(0, 3, device=target.device)]
    assert not scatter_add(target, table[0, :0], gradients)[0].any()
    assert scatter_add(target, table[0], [torch.ones(6, 3, device=target.device)], rows=0)


@pytest.mark.parametrize("config", [(32, 1), (64, 4), (1024, 8)], ids=str)
def test_every_config(
    target: Target, config: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many threads a block has, and units a thread."""
    monkeypatch.setattr(_scatter_add, "CONFIG", AddConfig(*config))
    indices = some_indices(300, target.device)
    gradients = [
        whole_numbers((300, width), torch.float32, target.device) for width in (1, 3, 8, 100, 2050)
    ]
    assert_sums(scatter_add(target, indices, gradients), indices, gradients)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [1, 2])
def test_sums_round_as_torchs(target: Target, dtype: torch.dtype, width: int) -> None:
    """Of two rows, every bit: subnormal numbers, ties to even, infinities, NaN where torch has it.

    One by one and in pairs. Adding to zeros first changes nothing but the sign of -0.0. Only what
    is no normal float32 may be taken as zero, as a GPU's additions do.
    """
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**15), 2**15, (2, 20_000), generator=generator).to(torch.int16)
    # Numbers that are near to one another, so that both matter.
    bits[1, ::2] = bits[0, ::2] ^ bits[1, ::2] & 0x0FFF
    first, second = bits.view(dtype)
    if target.device == "cuda":
        tiny = torch.finfo(torch.float32).smallest_normal
        first, second = (torch.where(each.abs() < tiny, 0, each) for each in (first, second))
    correct = (first.float() + second.float()).to(dtype)
    if target.device == "cuda":
        correct[correct.abs() < tiny] = 0
    pairs = torch.stack([first, second], 1).view(-1).to(target.device)
    rows = len(first) // width
    indices = torch.arange(rows, device=target.device)
    gradients = pairs.view(rows, width, 2).transpose(1, 2).reshape(2 * rows, width)
    (total,) = scatter_add(target, indices.repeat_interleave(2), [gradients], rows)
    total = total.cpu().view(-1)
    nan = correct.isnan()
    assert torch.equal(total.isnan(), nan)
    assert torch.equal(total[~nan], correct[~nan])


def test_infinities_and_nan(target: Target) -> None:
    """They arrive, and stay in their row."""
    indices = torch.tensor([0, 1, 1, 2], device=target.device)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        values = torch.tensor([math.inf, math.inf, -math.inf, 1.0], dtype=dtype)
        gradient = values.to(target.device)[:, None].expand(4, 4)
        for each in (gradient, gradient.contiguous()):
            (total,) = scatter_add(target, indices, [each], rows=3)
            assert total.isinf()[0].all() and total.isnan()[1].all() and (total[2] == 1).all()


def test_one_row_for_all(target: Target) -> None:
    """Additions to one address, from many blocks at once, are all counted."""
    count = 2**20 if target.device == "cuda" else 2**14
    indices = torch.full((count,), 7, device=target.device)
    gradients = [torch.ones((), device=target.device).expand(count, w).contiguous() for w in (1, 8)]
    gradients.append(torch.ones(count, 3, dtype=torch.float64, device=target.device))
    for total in scatter_add(target, indices, gradients):
        assert (total[7] == count).all()
        assert total.sum() == count * total.shape[1]


def test_offsets_beyond_32_bits(target: Target) -> None:
    """More rows than 31 bits count, in sums and gradients of more bytes than 32 bits count."""
    rows = 2**31 + 8
    # New memory of a CPU process is zeros that take no room until they are written.
    make = torch.zeros if target.device == "cuda" else torch.empty
    memory = make(2 * rows, dtype=torch.bfloat16, device=target.device)
    total, addends = memory[:rows].view(rows, 1), memory.as_strided((2, 1), (rows - 1, 1), rows)
    addends[:] = torch.tensor([[3.0], [4.0]])
    total[2**31 + 2 : 2**31 + 7].zero_()
    indices = torch.tensor([2**31 + 3, -3], device=target.device)
    _scatter_add.scatter_add(kernel_backend(), indices, "raise", [addends], [total])
    assert total[2**31 + 2 : 2**31 + 7].flatten().tolist() == [0, 3, 0, 4, 0]


def test_many_fields(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every field is added once, in one launch or in as few as the parameters have room for.

    Those of 2-byte types, every other one, have two steps more.
    """
    indices = some_indices(20, target.device)
    gradients = [
        whole_numbers((20, 1 + number % 9), dtype, target.device, number)
        for number, dtype in enumerate([torch.float32, torch.bfloat16] * 35)
    ]
    assert_sums(scatter_add(target, indices, gradients), indices, gradients)
    monkeypatch.setattr(type(kernel_backend()), "capacity", lambda self, device: 9)
    monkeypatch.setattr(_scatter_add, "_prepared", {})
    assert_sums(scatter_add(target, indices, gradients), indices, gradients)
    ((prepared),) = _scatter_add._prepared.values()
    claims = rounds = [8, 9, 9, 9]
    additions = [8, 9, 9, 9, 8, 9, 9, 9]
    assert [len(numbers) for numbers, _ in prepared.launches] == claims + additions + rounds
