"""Faults that other gather-like operations have had in public, each kind as a test.

A docstring names the public thread (project#number) that the case is from; where a thread used
another operation the case is the nearest one for a gather.
"""

from __future__ import annotations

import math
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from cases import POISON, Slab, assert_gathered, in_threads, raw_bytes
from conftest import HAVE_GPU, Target

import multigather
from multigather.backends.base import Destination, copy_unit
from multigather.request import field_of


def gather(target: Target, indices: torch.Tensor, *bufs: Any, **options: Any) -> tuple[Any, ...]:
    """`multigather.gather` on the target's backend."""
    return multigather.gather(indices, *bufs, backend=target.backend, **options)


def gather_anyhow(
    target: Target, indices: torch.Tensor, *bufs: Any, **options: Any
) -> tuple[Any, ...]:
    """As `gather`, but buffers that the kernels refuse go where the dispatcher sends them."""
    backend = target.backend
    if backend != "torch" and not all(field_of(buffer).contiguous_rows for buffer in bufs):
        with pytest.raises(multigather.UnsupportedError, match="not contiguous"):
            multigather.gather(indices, *bufs, backend=backend, **options)
        backend = None
    return multigather.gather(indices, *bufs, backend=backend, **options)


def index_error(target: Target, call: Callable[[], Any]) -> str:
    """Text of the IndexError that a call ends in: its own on a CPU, `check`'s on a GPU."""
    if target.device == "cuda":
        call()
        call = multigather.check
    with pytest.raises(IndexError) as caught:
        call()
    return str(caught.value)


def untouched(
    target: Target, shape: Sequence[int], dtype: torch.dtype = torch.uint8
) -> torch.Tensor:
    """A large tensor; on a CPU memory is only taken for the pages that a test writes to."""
    try:
        return torch.empty(*shape, dtype=dtype, device=target.device)
    except (RuntimeError, torch.OutOfMemoryError) as error:
        pytest.skip(f"no room for {math.prod(shape) * dtype.itemsize} bytes: {error}")


def mark_rows(buffer: torch.Tensor, rows: Sequence[int]) -> dict[int, torch.Tensor]:
    """Write different random bytes to some rows of a large buffer; returns them (on the CPU)."""
    generator = torch.Generator().manual_seed(len(rows))
    contents = {}
    for row in rows:
        shape = (math.prod(buffer.shape[1:]) * buffer.element_size(),)
        content = torch.randint(1, 256, shape, dtype=torch.uint8, generator=generator)
        buffer[row].view(-1).view(torch.uint8).copy_(content)
        contents[row] = content
    return contents


def assert_marked(
    output: torch.Tensor, values: Sequence[int], contents: dict[int, torch.Tensor]
) -> None:
    """Every output row has the bytes that were written to the row it came from."""
    got = raw(output)
    for place, value in enumerate(values):
        assert torch.equal(got[place], contents[value]), f"row {value}"


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """Bytes of a tensor, a row for each of its rows."""
    return torch.from_numpy(raw_bytes(tensor))


def integers(values: Sequence[int], dtype: torch.dtype, device: str) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype).to(device)


# ------------------------------------------------------------------------- 1. what an index means

INTEGERS = (
    torch.int8, torch.uint8, torch.int16, torch.uint16,
    torch.int32, torch.uint32, torch.int64, torch.uint64,
)  # fmt: skip


def test_negative_index_is_the_same_everywhere(target: Target) -> None:
    """pytorch#169779, jax#5766: -1 is the last row, on every backend and for every signed type."""
    wide = Slab(5, (10,), torch.float32, target.device).tensor
    narrow = torch.tensor([[1, 2], [3, 4], [5, 6]], device=target.device)
    for dtype in (torch.int8, torch.int16, torch.int32, torch.int64):
        (rows,) = gather(target, integers([-1], dtype, target.device), wide)
        assert torch.equal(rows.view(torch.int32), wide[4:].view(torch.int32))
        (rows,) = gather(target, integers([0, -1], dtype, target.device), narrow)
        assert rows.tolist() == [[1, 2], [5, 6]]


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_sizes_and_values_around_powers_of_two(target: Target, dtype: torch.dtype) -> None:
    """cupy#757, cupy#758: an offset must not be computed, or wrapped, in the index's type."""
    largest, smallest = torch.iinfo(dtype).max, torch.iinfo(dtype).min
    for power in (7, 8, 15, 16):
        around = (2**power - 1, 2**power, 2**power + 1)
        for rows in around:
            if rows - 1 > largest:
                continue
            values = [rows - 1, 0, *around, rows + 1, rows // 2, largest]
            values = [value for value in values if value <= largest]
            indices = integers(values, dtype, target.device)
            # Rows of several bytes, so that the offset is larger than the index.
            buffer = torch.arange(rows, dtype=torch.int32, device=target.device)
            buffer = buffer.unsqueeze(1).expand(rows, 3).contiguous()
            (output,) = gather(target, indices, buffer, bounds="fill")
            wanted = [[value if value < rows else 0] * 3 for value in values]
            assert output.tolist() == wanted
            valid = [value for value in values if value < rows]
            valid += [value for value in (-1, -rows, 1 - rows) if value >= smallest]
            (output,) = gather(target, integers(valid, dtype, target.device), buffer)
            assert output.tolist() == [[value % rows] * 3 for value in valid]


@pytest.mark.parametrize("rows", [2**31 - 1, 2**31, 2**31 + 1, 2**32 - 1, 2**32, 2**32 + 1])
def test_row_counts_around_32_bits(target: Target, rows: int) -> None:
    """cupy#757: bounds are compared in 64 bits; the buffer is one row seen many times."""
    buffer = torch.tensor([[1, 2, 3]], dtype=torch.uint8, device=target.device).expand(rows, 3)
    for dtype in (torch.int32, torch.uint32, torch.int64, torch.uint64):
        largest, smallest = torch.iinfo(dtype).max, torch.iinfo(dtype).min
        values = [0, 2**31 - 1, 2**31, 2**32 - 1, 2**32, rows - 1, rows, rows + 1, largest]
        values += [-1, smallest]
        values = [value for value in values if smallest <= value <= largest]
        indices = integers(values, dtype, target.device)
        (output,) = gather(target, indices, buffer, bounds="fill")
        assert output.any(dim=1).tolist() == [0 <= value < rows for value in values]
        valid = [value for value in values if -rows <= value < rows]
        (output,) = gather(target, integers(valid, dtype, target.device), buffer)
        assert output.tolist() == [[1, 2, 3]] * len(valid)
        multigather.check()
        if rows <= largest:
            bad = integers([0, rows], dtype, target.device)
            text = index_error(target, lambda bad=bad: gather(target, bad, buffer))
            assert f"[1] is {rows}, out of range for bufs[0] with {rows} rows" in text


@pytest.mark.parametrize(("rows", "value", "dtype"), [
    (257, 256, torch.uint16), (129, 128, torch.int16), (256, 255, torch.uint8),
    (65537, 65536, torch.int32), (65536, 65535, torch.uint16), (128, 127, torch.int8),
])  # fmt: skip
def test_row_offset_beyond_the_index_type(
    target: Target, rows: int, value: int, dtype: torch.dtype
) -> None:
    """cupy#757, cupy#758: rows of 256 elements, the last row by a narrow index."""
    buffer = torch.zeros(rows, 256, dtype=torch.int16, device=target.device)
    buffer[value] = torch.arange(1, 257, dtype=torch.int16, device=target.device)
    (output,) = gather(target, integers([value, 0], dtype, target.device), buffer)
    assert output[0].tolist() == list(range(1, 257))
    assert not output[1].any()


def test_uint8_is_an_index_and_never_a_mask(target: Target) -> None:
    """pytorch#17346, pytorch#4219: arange(10) as uint8 selects rows 0 to 9."""
    buffer = Slab(10, (11,), torch.float32, target.device).tensor
    indices = torch.arange(10, dtype=torch.uint8, device=target.device)
    (output,) = gather(target, indices, buffer)
    assert_gathered(output, indices, buffer)
    (output,) = gather(target, integers([1, 1, 0, 1, 0], torch.uint8, target.device), buffer[:5])
    assert torch.equal(raw(output), raw(buffer)[[1, 1, 0, 1, 0]])


@pytest.mark.parametrize("count", [1, 2, 3, 7, 33])
def test_int32_indices_are_not_read_as_int64(target: Target, count: int) -> None:
    """pytorch#37996: odd lengths, columns, and every second half of an int64."""
    buffer = Slab(6, (2,), torch.int64, target.device).tensor
    wide = torch.arange(count, device=target.device) * 5 % 6
    for indices in (
        wide.to(torch.int32),
        wide.to(torch.int32).view(count, 1),
        wide.view(torch.int32)[::2],
        torch.stack([wide, wide + 100], dim=1).to(torch.int32)[:, 0],
        torch.stack([wide, wide + 100], dim=1).to(torch.int16)[:, 0],
    ):
        (output,) = gather(target, indices, buffer)
        assert_gathered(output, indices, buffer)


def test_bad_index_has_one_policy(target: Target) -> None:
    """tensorflow#3638, pytorch#121251: an index equal to the row count is an error everywhere."""
    small = torch.tensor([[0.1], [0.2]], device=target.device)
    cube = torch.zeros(2, 2, 2, 2, device=target.device)
    for buffer, value in ((small, 3), (small, 2), (cube, 2), (cube, -3)):
        text = index_error(
            target,
            lambda buffer=buffer, value=value: gather(
                target, torch.tensor([value], device=target.device), buffer
            ),
        )
        assert f"is {value}, out of range for bufs[0] with 2 rows" in text


def test_fill_is_zero_bytes_in_every_dtype(target: Target) -> None:
    """jax#14193, cudf#6479, cudf#14511: the filled row is zero bytes, and -1 means missing."""
    indices = torch.tensor([0, 2, -1, 5, 10], device=target.device)
    for dtype in (torch.int32, torch.float32, torch.bool, torch.float8_e5m2, torch.complex64):
        slab = Slab(6, (3,), dtype, target.device)
        (output,) = gather(target, indices, slab.tensor, bounds="fill")
        assert_gathered(output, indices, slab.tensor, "fill")
        assert not raw(output)[[2, 4]].any()


def test_fill_is_zero_bytes_in_lazily_negated_views(target: Target) -> None:
    """pytorch#54987: a lazy bit turns the buffer's rows, not the zeros of missing ones."""
    values = torch.view_as_complex(torch.ones(4, 3, 2, device=target.device))
    for shape in ((4,), (2, 2), ()):
        indices = torch.full(shape, -1, dtype=torch.int64, device=target.device)
        if shape:
            indices.view(-1)[0] = 1
        for buffer in (values.conj(), torch._neg_view(torch.ones(4, 3, device=target.device))):
            (output,) = gather(target, indices, buffer, bounds="fill")
            assert_gathered(output, indices, buffer, "fill")
            if target.device == "cuda":
                (output,) = gather(target, indices + 7 * (indices < 0), buffer)
                assert_gathered(output, indices + 7 * (indices < 0), buffer)
                with pytest.raises(IndexError, match="is 6, out of range"):
                    multigather.check()
        flat = values.conj()[:, 0]
        (output,) = gather(target, indices, flat, bounds="fill")
        assert_gathered(output, indices, flat, "fill")


# ------------------------------------------------------------------- 2. empty, scalar, degenerate


def test_rows_from_an_empty_buffer(target: Target) -> None:
    """pytorch#70675: a buffer of no rows gives an error, never random values."""
    empty = torch.rand(0, 4, device=target.device)
    with pytest.raises(IndexError, match=r"bufs\[0\] has 0 rows"):
        gather(target, torch.tensor([0, 1], device=target.device), empty)


def test_empty_indices(target: Target) -> None:
    """candle#2673: no grid of zero blocks."""
    buffer = torch.rand(3, 3, 3, device=target.device)
    for dtype in INTEGERS:
        for bounds in ("raise", "fill", "clip", "unchecked"):
            indices = torch.empty(0, dtype=dtype, device=target.device)
            (output,) = gather(target, indices, buffer, bounds=bounds)
            assert output.shape == (0, 3, 3)


def test_rows_without_elements(target: Target) -> None:
    """pytorch#39946: five rows of no elements, and bad indices are still found."""
    buffer = torch.randn(3, 0, 3, device=target.device)
    one = torch.ones(5, dtype=torch.int64, device=target.device)
    for bounds in ("raise", "fill", "clip"):
        (output,) = gather(target, one, buffer, bounds=bounds)
        assert output.shape == (5, 0, 3)
    multigather.check()
    out = torch.empty(5, 0, 3, device=target.device)
    assert gather(target, one, buffer, out=(out,))[0] is out
    text = index_error(target, lambda: gather(target, one * 3, buffer, out=(out,)))
    assert "is 3, out of range for bufs[0] with 3 rows" in text


def test_scalar_buffer_and_no_buffer(target: Target) -> None:
    """pytorch#97086, pytorch#173995: an error for a scalar, an empty tuple for nothing."""
    indices = torch.tensor([0], device=target.device)
    with pytest.raises(ValueError, match=r"bufs\[0\] has no dimensions"):
        gather(target, indices, torch.tensor(1.5, device=target.device))
    assert gather(target, indices) == ()


@pytest.mark.parametrize("count", [1, 2, 31, 32, 33, 127, 129])
def test_every_index_is_used(target: Target, count: int) -> None:
    """hip-ep#116: not only the first one; all rows differ."""
    buffer = torch.arange(200 * 4, dtype=torch.int32, device=target.device).view(200, 4)
    indices = (torch.arange(count, device=target.device) * 7 + 3) % 200
    (output,) = gather(target, indices, buffer)
    assert output[:, 0].tolist() == [4 * int(value) for value in indices]


# ------------------------------------------------------------------------------ 3. size, overflow

# Shapes of buffers whose offsets in bytes or elements pass 2^31 or 2^32, and the rows around it.
LARGE = {
    "FlagGems#4156": ((24901, 8 * 128 * 128), torch.bfloat16, (16383, 16384, 24900, 0)),
    "cumm#36": ((2**21 + 2, 256), torch.float32, (2**21 - 1, 2**21, 2**21 + 1, 0)),
    "raft#3055": ((2782000, 772), torch.uint8, (2780999, 2781000, 2781782, 2781999, 0)),
    "8-byte rows": ((2**29 + 9, 1), torch.float64, (2**28 - 1, 2**28, 2**29 - 1, 2**29, 2**29 + 8)),
    "1-byte rows": ((2**32 + 9,), torch.uint8, (2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**32 + 8)),
}


@pytest.mark.parametrize("thread", LARGE)
def test_offsets_beyond_32_bits(target: Target, thread: str) -> None:
    """FlagGems#4156, cumm#36, raft#3055: exact rows, new output and out= each on its own."""
    shape, dtype, rows = LARGE[thread]
    if target.name == "triton-interpreter" and thread == "FlagGems#4156":
        shape, rows = (2**18 + 1, 2**12), (2**17, 2**18 - 1, 2**18, 0)
    buffer = untouched(target, shape, dtype)
    contents = mark_rows(buffer, rows)
    row_shape = buffer.shape[1:]
    for index_dtype in (torch.int32, torch.uint32, torch.int64):
        values = [row for row in rows if row <= torch.iinfo(index_dtype).max]
        indices = integers(values, index_dtype, target.device)
        (output,) = gather(target, indices, buffer)
        assert_marked(output, values, contents)
        out = Slab(len(values), row_shape, dtype, target.device)
        out.poison()
        gather(target, indices, buffer, out=(out.tensor,))
        assert_marked(out.tensor, values, contents)
        out.assert_guards_intact()
        if -shape[0] >= torch.iinfo(index_dtype).min:
            (output,) = gather(target, indices - buffer.shape[0], buffer)
            assert_marked(output, values, contents)
    multigather.check()


def test_buffers_that_are_large_only_together(target: Target) -> None:
    """pytorch#186057: every buffer fits in 31 bits of offset, their sum does not."""
    shapes = [(2**29 + number, 3) for number in range(4)]
    buffers = [untouched(target, shape) for shape in shapes]
    values = [2**29 - 1, 0, 2**28]
    contents = [mark_rows(buffer, values) for buffer in buffers]
    indices = torch.tensor(values, dtype=torch.int32, device=target.device)
    outputs = gather(target, indices, *buffers)
    for output, content in zip(outputs, contents, strict=True):
        assert_marked(output, values, content)


@pytest.mark.parametrize("count", [65535, 65536, 65537, 2**17 + 3])
def test_more_indices_than_a_short_grid_axis_has(target: Target, count: int) -> None:
    """triton#3299, triton#580, fla#172, ggml#877: rows are on a grid axis that is long enough."""
    if target.name == "triton-interpreter" and count != 65537:
        pytest.skip("Triton's interpreter takes seconds for each of these; one of them shows it")
    width = 1 if target.device == "cpu" else 1024
    buffer = (
        (torch.arange(251 * width, device=target.device) % 249).to(torch.uint8).view(251, width)
    )
    indices = torch.arange(count, device=target.device) * 7 % 251
    (output,) = gather(target, indices, buffer)
    assert torch.equal(output, buffer.index_select(0, indices))


def test_few_elements_that_lie_far_apart(target: Target) -> None:
    """cupy#8130, cupy#8150: strides past 2^31 with a small number of elements, in every role."""
    step = 2**31 + 16
    memory = untouched(target, (3 * step,))
    far = memory.as_strided((3, 16), (step, 1))
    contents = mark_rows(far, (0, 1, 2))
    (output,) = gather(target, torch.tensor([2, 0, 1, -1], device=target.device), far)
    assert_marked(output, [2, 0, 1, 2], contents)

    buffer = Slab(9, (16,), torch.uint8, target.device).tensor
    out = memory[32:].as_strided((2, 16), (step, 1), 32)
    indices = torch.tensor([8, 5], device=target.device)
    gather(target, indices, buffer, out=(out,))
    assert_gathered(out, indices, buffer)
    assert_marked(far, [0, 1, 2], contents)

    far_indices = memory.as_strided((3,), (step,), 64)
    far_indices.copy_(torch.tensor([7, 0, 3], dtype=torch.uint8))
    (output,) = gather(target, far_indices, buffer)
    assert torch.equal(output, buffer[[7, 0, 3]])


def test_huge_expanded_buffer_is_not_copied(target: Target) -> None:
    """cupy#8130: one row seen 2^31 + 5 times; a contiguous copy would be 8.6 GB."""
    row = torch.arange(4, dtype=torch.uint8, device=target.device)
    buffer = row.expand(2**31 + 5, 4)
    column = row[3:].expand(2**33)
    if target.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.max_memory_allocated()
    else:
        before = peak_memory()
    values = [2**31 + 4, 2**31, 0, -1, -(2**31) - 5]
    indices = torch.tensor(values, device=target.device)
    for bounds in ("raise", "clip"):
        outputs = gather(target, indices, buffer, column, bounds=bounds)
        assert outputs[0].tolist() == [[0, 1, 2, 3]] * 5
        assert outputs[1].tolist() == [3] * 5
    text = index_error(
        target,
        lambda: gather(target, torch.tensor([0, 2**31 + 5], device=target.device), buffer),
    )
    assert f"[1] is {2**31 + 5}, out of range for bufs[0] with {2**31 + 5} rows" in text
    (output,) = gather(target, indices, buffer, bounds="fill")
    assert output.tolist() == [[0, 1, 2, 3]] * 3 + [[0, 0, 0, 0]] * 2
    after = torch.cuda.max_memory_allocated() if target.device == "cuda" else peak_memory()
    assert after - before < 2**30


def peak_memory() -> int:
    """Most memory that this process has had resident, in bytes."""
    resource = pytest.importorskip("resource")
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


# ----------------------------------------------------------------------- 4. layout, aliasing, out


def test_every_column_of_a_matrix(target: Target) -> None:
    """cutorch#240: a column's elements lie a row apart."""
    matrix = torch.arange(25.0, device=target.device).view(5, 5)
    indices = torch.arange(5, device=target.device)
    for column in range(5):
        (output,) = gather(target, indices, matrix[:, column])
        assert output.tolist() == [column + 5.0 * row for row in range(5)]
        assert output.is_contiguous()
    outputs = gather(target, indices, *matrix.unbind(1))
    assert torch.equal(torch.stack(outputs, 1), matrix)


def test_output_that_is_a_slice_of_whole_rows(target: Target) -> None:
    """pytorch#1193: out=b[0, :3, 2:] is written where it lies, and nothing beside it."""
    big = torch.full((2, 4, 6), -1, dtype=torch.int32, device=target.device)
    buffer = torch.arange(20, dtype=torch.int32, device=target.device).view(5, 4)
    indices = torch.tensor([4, 0, 2], device=target.device)
    out = big[0, :3, 2:]
    assert gather(target, indices, buffer, out=(out,))[0] is out
    assert torch.equal(big[0, :3, 2:], buffer[indices])
    big[0, :3, 2:] = -1
    assert (big == -1).all()
    with pytest.raises(ValueError, match="not contiguous"):
        gather(target, indices, buffer[:, :2], out=(big[0, :3, ::3],))
    assert (big == -1).all()


def layouts(device: str) -> dict[str, torch.Tensor]:
    """Views of one small array that no two libraries read alike."""
    base = torch.arange(4 * 3 * 2 * 5, dtype=torch.float32, device=device).view(4, 3, 2, 5)
    return {
        "transposed": base[:, 0, 0].t(),
        "permuted": base.permute(2, 3, 0, 1),
        "channels_last": base.contiguous(memory_format=torch.channels_last),
        "every second column": base[..., ::2],
        "every second row": base[::2],
        "broadcast rows": base[:1].expand(4, 3, 2, 5),
        "broadcast inside": base[:, :1].expand(4, 3, 2, 5),
        "all broadcast": base[0, 0, 0, :1].expand(4, 5),
        "sliding windows": base.view(-1).as_strided((10, 6), (3, 1)),
        "overlapping bytes": base.view(-1).as_strided((10, 6), (1, 1)),
        "flipped": base.flip(0, 3),
        "offset": base[1:, 1:, 1:, 1:],
        "one row": base[2:3, 1],
        "size-1 dimensions": base[:, :1, :1, :].transpose(1, 2),
        "diagonal": base[:, 0].diagonal(),
    }


@pytest.mark.parametrize("name", layouts("cpu"))
def test_layouts(target: Target, name: str) -> None:
    """cupy#3095, cupy#9233, FlagGems#455, pytorch#168381: right rows, contiguous output."""
    buffer = layouts(target.device)[name]
    rows = buffer.shape[0]
    indices = torch.tensor([rows - 1, 0, -1, rows // 2], device=target.device)
    for bounds in ("raise", "fill"):
        (output,) = gather_anyhow(target, indices, buffer, bounds=bounds)
        assert_gathered(output, indices, buffer, bounds)
        assert output.is_contiguous()
    out = Slab(4, buffer.shape[1:], buffer.dtype, target.device, gap=4)
    out.poison()
    gather_anyhow(target, indices, buffer, out=(out.tensor,))
    assert_gathered(out.tensor, indices, buffer)
    out.assert_guards_intact()


def test_every_layout_in_one_call(target: Target) -> None:
    """FBGEMM#1942: odd layouts beside plain ones, where a temporary copy could die too early."""
    plain = Slab(4, (6,), torch.int64, target.device).tensor
    buffers = [buffer for buffer in layouts(target.device).values() if buffer.shape[0] >= 4]
    indices = torch.tensor([3, 0, -4], device=target.device)
    for _ in range(3):
        outputs = gather_anyhow(target, indices, plain, *buffers, plain)
        for output, buffer in zip(outputs, (plain, *buffers, plain), strict=True):
            assert_gathered(output, indices, buffer)


def test_output_is_never_resized(target: Target) -> None:
    """pytorch#1193: an output of another shape is an error and stays as it is."""
    buffer = torch.ones(4, 3, device=target.device)
    indices = torch.tensor([0, 1], device=target.device)
    for shape in ((0,), (2, 4), (6,), (3, 2), (1, 2, 3)):
        out = torch.full(shape, 7.0, device=target.device)
        with pytest.raises(ValueError, match=r"out\[0\] has shape .* never resized"):
            gather(target, indices, buffer, out=(out,))
        assert out.shape == shape
        assert (out == 7).all()


# ---------------------------------------------------------------------------------- 5. alignment


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64, torch.complex128], ids=str
)
def test_buffers_that_start_at_any_element(target: Target, dtype: torch.dtype) -> None:
    """tilelang#2526: buf[1:] and storage offsets 1, 2, 3 with rows that would allow 16 bytes."""
    width = 64 // dtype.itemsize
    slab = Slab(400, (), dtype, target.device)
    buffers = [slab.tensor[1:].view(-1, 1), slab.tensor[1:][:3]]
    buffers += [slab.tensor[start:].as_strided((4, width), (width, 1)) for start in (1, 2, 3)]
    indices = torch.tensor([2, 0, 2, -1], device=target.device)
    for buffer in buffers:
        (output,) = gather(target, indices, buffer)
        assert_gathered(output, indices, buffer)
    out = torch.empty(4 * width + 1, dtype=dtype, device=target.device)[1:].view(4, width)
    gather(target, indices, buffers[-1], out=(out,))
    assert_gathered(out, indices, buffers[-1])
    slab.assert_unchanged()


@pytest.mark.parametrize(
    ("dtype", "width", "stride"),
    [
        (torch.float32, 4, 1185),
        (torch.float32, 16, 1185),
        (torch.bfloat16, 8, 5124),
        (torch.bfloat16, 5124, 5124),
        (torch.bfloat16, 8, 9),
        (torch.bfloat16, 16, 17),
        (torch.uint8, 3, 3),
        (torch.uint8, 5, 5),
        (torch.uint8, 4, 7),
        (torch.float32, 8, 9),
        (torch.float64, 16, 17),
    ],
    ids=str,
)
def test_row_strides_that_break_the_alignment(
    target: Target, dtype: torch.dtype, width: int, stride: int
) -> None:
    """triton#1330, triton#1320: the first row is aligned, the next ones are not."""
    slab = Slab(9, (width,), dtype, target.device, gap=(stride - width) * dtype.itemsize)
    assert slab.tensor.stride(0) == stride
    indices = torch.tensor([8, 1, 3, 0, -2], device=target.device)
    (output,) = gather(target, indices, slab.tensor)
    assert_gathered(output, indices, slab.tensor)
    out = Slab(5, (width,), dtype, target.device, gap=(stride - width) * dtype.itemsize)
    out.poison()
    gather(target, indices, slab.tensor, out=(out.tensor,))
    assert_gathered(out.tensor, indices, slab.tensor)
    out.assert_guards_intact()
    slab.assert_unchanged()


@pytest.mark.parametrize("place", [0, 1, 3])
def test_one_misaligned_buffer_among_aligned_ones(target: Target, place: int) -> None:
    """dgl, index_select_impl.cu: it neither breaks the others nor narrows their copies."""
    slabs = [
        Slab(6, (32,), torch.uint8, target.device, offset=int(number == place), seed=number)
        for number in range(4)
    ]
    indices = torch.tensor([5, 0, 3], device=target.device)
    outputs = gather(target, indices, *(slab.tensor for slab in slabs))
    for number, (output, slab) in enumerate(zip(outputs, slabs, strict=True)):
        assert_gathered(output, indices, slab.tensor)
        unit = copy_unit(field_of(slab.tensor), Destination(row_stride_bytes=32, alignment=16))
        assert unit == (1 if number == place else 16)


# ------------------------------------------------------------------------------------- 6. dtypes

FLOAT8 = sorted(name for name in vars(torch) if name.startswith("float8_"))


@pytest.mark.parametrize("name", [*FLOAT8, "float4_e2m1fn_x2"])
def test_small_floats(target: Target, name: str) -> None:
    """pytorch#133605, pytorch#169656: fp8 and fp4 rows are copied, which torch cannot index."""
    slab = Slab(4, (5,), getattr(torch, name), target.device)
    indices = torch.tensor([0, 3], device=target.device)
    (output,) = gather(target, indices, slab.tensor)
    assert_gathered(output, indices, slab.tensor)
    (output,) = gather(target, indices - 4, slab.tensor, bounds="fill")
    assert not raw(output).any()


@pytest.mark.parametrize("name", ["complex32", "complex64", "complex128"])
def test_complex(target: Target, name: str) -> None:
    """FlagGems#1803, FlagGems#5332, pytorch#192023: copied as bytes, conjugated views too."""
    slab = Slab(4, (3,), getattr(torch, name), target.device)
    indices = torch.tensor([3, 0, -2], device=target.device)
    (output,) = gather(target, indices, slab.tensor)
    assert_gathered(output, indices, slab.tensor)
    numbers = torch.arange(24.0, device=target.device).view(4, 3, 2)
    numbers = torch.view_as_complex(numbers).to(getattr(torch, name))
    (output,) = gather(target, indices, numbers.conj())
    assert_gathered(output, indices, numbers.conj())
    assert output[0, 0].item() == complex(18, -19)


def test_bool_and_leaf_tensors(target: Target) -> None:
    """cupy#7144: bools, with bytes other than 0 and 1, and tensors that require a gradient."""
    flags = torch.tensor([0, 1, 2, 255], dtype=torch.uint8, device=target.device).view(torch.bool)
    leaf = torch.rand(4, 2, device=target.device, requires_grad=True)
    indices = torch.tensor([3, 2, 0], device=target.device)
    outputs = gather(target, indices, flags, leaf)
    assert outputs[0].view(torch.uint8).tolist() == [255, 2, 0]
    assert torch.equal(outputs[1], leaf[indices])
    assert outputs[1].requires_grad
    with torch.no_grad():
        assert torch.equal(gather(target, indices, leaf)[0], leaf[indices])


def test_conjugate_and_negative_views(target: Target) -> None:
    """Torch-FL#209, pytorch#54987, pytorch#56058: the lazy bits count."""
    values = torch.view_as_complex(
        torch.randn(6, 3, 2, generator=torch.Generator().manual_seed(3)).to(target.device)
    )
    indices = torch.tensor([[5, 0], [2, -1]], device=target.device)
    imaginary = values.conj().imag
    assert imaginary.is_neg()
    negated = torch._neg_view(values.conj())
    for buffer in (values.conj(), imaginary, values.conj()[:, 1:], negated, values.conj()[:, 1]):
        wanted = buffer[indices].resolve_conj().resolve_neg()
        (output,) = gather_anyhow(target, indices, buffer)
        assert torch.equal(output, wanted)
        assert_gathered(output, indices, buffer)
        out = torch.full_like(wanted, 7)
        assert gather_anyhow(target, indices, buffer, out=(out,))[0] is out
        assert torch.equal(out, wanted)
    plain, lazy = gather(target, indices, values, values.conj())
    assert torch.equal(plain.conj(), lazy)


@pytest.mark.parametrize(
    ("dtype", "as_integer", "patterns"),
    [
        (torch.float16, torch.int16, (0x7E01, 0x7C01, 0xFE00, 0xFDFF, 0x8000, 0x0001, 0x83FF)),
        (torch.bfloat16, torch.int16, (0x7FC1, 0x7F81, 0xFFC0, 0xFF81, 0x8000, 0x0001, 0x807F)),
        (
            torch.float32,
            torch.int32,
            (0x7FC00001, 0x7F800001, 0xFFC12345, 0xFF800001, 0x80000000, 0x1, 0x807FFFFF),
        ),
        (
            torch.float64,
            torch.int64,
            (0x7FF8000000000001, 0x7FF0000000000001, 0xFFF8000000000123, 1 << 63, 1),
        ),
    ],
    ids=str,
)
def test_float_bits_survive(
    target: Target, dtype: torch.dtype, as_integer: torch.dtype, patterns: tuple[int, ...]
) -> None:
    """WholeGraph, gather_scatter_func.cuh: NaN payloads, -0.0 and denormals keep their bits."""
    bits = 8 * dtype.itemsize
    signed = [pattern - (pattern >> (bits - 1) << bits) for pattern in patterns]
    words = torch.tensor(signed, dtype=as_integer, device=target.device)
    buffer = words.view(dtype)
    order = torch.arange(len(signed) - 1, -1, -1, device=target.device)
    for source in (buffer, buffer.unsqueeze(1), torch.stack([buffer] * 3, 1)):
        (output,) = gather(target, order, source)
        assert torch.equal(output.view(as_integer), source.view(as_integer).flip(0))
        out = torch.zeros_like(output)
        gather(target, order, source, out=(out,))
        assert torch.equal(out.view(as_integer), output.view(as_integer))
    leaf = buffer.clone().requires_grad_()
    assert torch.equal(gather(target, order, leaf)[0].detach().view(as_integer), words.flip(0))


def test_numbers_reach_the_kernel_whole(target: Target) -> None:
    """cupy#6940: row counts, strides, widths and counts that a wrong argument type would cut."""
    memory = untouched(target, (2**32 + 2**20,))
    indices = torch.tensor([1, 0], device=target.device)
    # Cut to 32 bits the row stride 2^32 + 16 is 16 and the row count 2^32 + 1 is 1.
    far = memory.as_strided((2, 3), (2**32 + 16, 1))
    contents = mark_rows(far, (0, 1))
    many = memory[:1].expand(2**32 + 1)
    (first, second) = gather(target, indices, far, many)
    assert_marked(first, [1, 0], contents)
    assert second.tolist() == [memory[0].item()] * 2
    (output,) = gather(target, torch.tensor([2**32], device=target.device), many)
    assert output.tolist() == [memory[0].item()]


# -------------------------------------------------------------------------- 7. devices and streams

GPU_BACKENDS = ("torch", "triton", "cupy")


@pytest.fixture
def gpu_backend(request: pytest.FixtureRequest) -> str:
    """A backend that runs on this machine's GPU; otherwise the test is skipped with the reason."""
    if not HAVE_GPU:
        pytest.skip("torch sees no CUDA device")
    status = {each.name: each for each in multigather.backends()}[request.param]
    if not status.available:
        pytest.skip(str(status))
    return request.param


on_every_gpu_backend = pytest.mark.parametrize("gpu_backend", GPU_BACKENDS, indirect=True)

BAD_INDEX_SCRIPT = """
import sys
import torch
import multigather

backend = sys.argv[1]
buffers = [torch.arange(4.0 * 6, device="cuda").view(6, 4), torch.arange(9, device="cuda")]
bad = torch.tensor([0, 5, 6, 1], device="cuda")
caught = None
try:
    multigather.gather(bad, *buffers, backend=backend)
    multigather.check()
except IndexError as error:
    caught = str(error)
assert caught is not None, "no IndexError"
for part in ("[2] is 6", "bufs[0]", "6 rows"):
    assert part in caught, caught
assert torch.ones(1, device="cuda").item() == 1
good = torch.tensor([5, 0, -1], device="cuda")
for rows, buffer in zip(multigather.gather(good, *buffers, backend=backend), buffers, strict=True):
    assert torch.equal(rows, buffer[good])
multigather.check()
print("the context is alive")
"""


@pytest.mark.gpu
@on_every_gpu_backend
def test_bad_index_does_not_kill_the_context(gpu_backend: str) -> None:
    """pytorch#71572: in a process of its own, a catchable error and a GPU that works on."""
    command = [sys.executable, "-c", BAD_INDEX_SCRIPT, gpu_backend]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "the context is alive" in done.stdout


@pytest.mark.gpu
@on_every_gpu_backend
def test_another_current_device(gpu_backend: str) -> None:
    """Liger-Kernel#1303, triton#2441, KIVI#24: tensors on one GPU, another one current."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    for current, used in ((0, 1), (1, 0)):
        with torch.cuda.device(current):
            buffer = torch.arange(40.0, device=f"cuda:{used}").view(10, 4)
            indices = torch.tensor([9, 0, -1], device=f"cuda:{used}")
            (output,) = multigather.gather(indices, buffer, backend=gpu_backend)
            assert torch.equal(output, buffer[indices])
            assert output.device == buffer.device
            (output,) = multigather.gather(indices.cpu(), buffer, backend=gpu_backend)
            assert torch.equal(output, buffer[indices])
            multigather.gather(indices + 7, buffer, backend=gpu_backend)
            with pytest.raises(IndexError, match=f"is 16, .* on cuda:{used}"):
                multigather.check(used)
            assert torch.cuda.current_device() == current


@pytest.mark.gpu
@on_every_gpu_backend
def test_runs_on_the_current_stream(gpu_backend: str) -> None:
    """pytorch#2702, cupy#7189, cupy#3141: a gather waits for what its stream does before it."""
    indices = torch.tensor([3, 0], device="cuda")
    buffer = torch.zeros(5, 4, device="cuda")
    fresh = torch.arange(20.0, device="cuda").view(5, 4)
    multigather.gather(indices, buffer, backend=gpu_backend)  # compiled before the clock runs
    torch.cuda.synchronize()
    for stream in (
        torch.cuda.Stream(),
        torch.cuda.Stream(priority=-1),
        torch.cuda.default_stream(),
    ):
        with torch.cuda.stream(stream):
            buffer.zero_()
            out = torch.zeros(2, 4, device="cuda")
            torch.cuda.synchronize()
            torch.cuda._sleep(200_000_000)  # about 0.1 s
            buffer.copy_(fresh)
            (made,) = multigather.gather(indices, buffer, backend=gpu_backend)
            multigather.gather(indices, buffer, out=(out,), backend=gpu_backend)
            buffer.zero_()
        stream.synchronize()
        assert torch.equal(made, fresh[indices])
        assert torch.equal(out, fresh[indices])


@pytest.mark.gpu
@on_every_gpu_backend
def test_first_call_of_a_layout_is_captured(gpu_backend: str) -> None:
    """triton#10596, triton#10604: no tuning and no sync in a capture; replays see new values."""
    buffers = [
        torch.arange(7.0 * 53, device="cuda").view(7, 53),
        torch.arange(7, device="cuda", dtype=torch.int16),
    ]
    indices = torch.tensor([6, 0, 3], device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = multigather.gather(indices, *buffers, backend=gpu_backend)
    for values in ([1, 2, 3], [6, 6, -7], [0, 5, -1]):
        indices.copy_(torch.tensor(values))
        for buffer in buffers:
            buffer.add_(1)
        graph.replay()
        torch.cuda.synchronize()
        for output, buffer in zip(outputs, buffers, strict=True):
            assert torch.equal(output, buffer[indices])
    multigather.check()


@pytest.mark.gpu
@on_every_gpu_backend
def test_bad_index_in_a_replay(gpu_backend: str) -> None:
    """pytorch#71572: check reports what a replay met, each time anew; the row is zero."""
    buffer = torch.arange(1.0, 13.0, device="cuda").view(4, 3)
    indices = torch.tensor([3, 0], device="cuda")
    out = torch.zeros(2, 3, device="cuda")
    multigather.gather(indices, buffer, out=(out,), backend=gpu_backend)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        multigather.gather(indices, buffer, out=(out,), backend=gpu_backend)
    for bad in (4, -5, 100):
        indices.copy_(torch.tensor([1, bad]))
        graph.replay()
        with pytest.raises(
            IndexError, match=rf"\[1\] is {bad}, out of range for bufs\[0\] with 4 rows"
        ):
            multigather.check()
        assert torch.equal(out[0], buffer[1])
        assert not out[1].any()
        multigather.check()
    indices.copy_(torch.tensor([2, -4]))
    graph.replay()
    multigather.check()
    assert torch.equal(out, buffer[[2, 0]])


@pytest.mark.gpu
@on_every_gpu_backend
def test_check_is_refused_in_a_capture(gpu_backend: str) -> None:
    """pytorch#71572: nothing may be waited for while a graph is captured."""
    buffer, indices = torch.zeros(3, device="cuda"), torch.tensor([0], device="cuda")
    multigather.gather(indices, buffer, backend=gpu_backend)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (output,) = multigather.gather(indices, buffer, backend=gpu_backend)
        with pytest.raises(RuntimeError, match="captured"):
            multigather.check()
    graph.replay()
    torch.cuda.synchronize()
    assert output.tolist() == [0]


# ------------------------------------------------------------------------------ 8. many buffers


@pytest.mark.parametrize("count", [1, 2, 3, 8, 9, 33, 55, 56, 64, 100])
def test_every_buffer_is_copied_from_its_own_memory(target: Target, count: int) -> None:
    """sglang#8915, FBGEMM#1421, FBGEMM#1884: no buffer is skipped or taken twice, at any number."""
    if target.name == "triton-interpreter" and count > 9:
        pytest.skip("Triton's interpreter takes time with the square of the number of buffers")
    if target.name == "triton-gpu" and count > 33:
        pytest.skip("its launches of many buffers compile for most of a minute")
    buffers = [
        torch.arange(count * 10_000, count * 10_000 + 12, device=target.device).add(100 * number)
        for number in range(count)
    ]
    indices = torch.tensor([11, 0, 7], device=target.device)
    outputs = gather(target, indices, *buffers)
    assert len(outputs) == count
    for number, output in enumerate(outputs):
        start = count * 10_000 + 100 * number
        assert output.tolist() == [start + 11, start, start + 7]
    outs = [torch.zeros(3, dtype=torch.int64, device=target.device) for _ in range(count)]
    gather(target, indices, *buffers, out=outs)
    for out, output in zip(outs, outputs, strict=True):
        assert torch.equal(out, output)


@pytest.mark.parametrize("width", [1, 3, 4, 16, 60])
def test_nothing_past_the_ends_is_read_or_written(target: Target, width: int) -> None:
    """cudf#6710: the last rows and the last output rows, with poison on both sides of each."""
    slabs = [Slab(8, (width,), torch.uint8, target.device, offset=offset) for offset in (0, 3)]
    for count in (1, 7, 64):
        indices = torch.full((count,), 7, dtype=torch.int16, device=target.device)
        indices[::2] = 0
        outs = [Slab(count, (width,), torch.uint8, target.device, offset=5, gap=2) for _ in slabs]
        for out in outs:
            out.poison()
        gather(target, indices, *(slab.tensor for slab in slabs), out=[out.tensor for out in outs])
        for slab, out in zip(slabs, outs, strict=True):
            assert_gathered(out.tensor, indices, slab.tensor)
            out.assert_guards_intact()
            slab.assert_unchanged()
            assert POISON not in raw_bytes(out.tensor) or POISON in raw_bytes(slab.tensor)


def test_gathers_in_many_threads(target: Target) -> None:
    """cudf#6710: threads that share buffers, layouts and launches do not disturb one another."""
    if target.name == "triton-interpreter":
        pytest.skip("Triton's interpreter keeps one program's state per process")
    if target.name == "cuda-source-on-cpu":
        pytest.skip("the C++ stand-in for a GPU has one fault board and no streams")
    buffers = [Slab(50, (7,), torch.float32, target.device, seed=seed).tensor for seed in (1, 2)]
    failures: list[str] = []
    start = threading.Barrier(6)

    def work(number: int) -> None:
        try:
            generator = torch.Generator().manual_seed(number)
            start.wait()
            for turn in range(40):
                values = torch.randint(-50, 50, (1 + (number + turn) % 5,), generator=generator)
                indices = values.to(target.device)
                for output, buffer in zip(gather(target, indices, *buffers), buffers, strict=True):
                    assert_gathered(output, indices, buffer)
        except BaseException as error:
            failures.append(f"thread {number}: {error!r}")

    in_threads(6, work)
    assert not failures
    multigather.check()


# ---------------------------------------------------------------------------------- 9. backward


@pytest.mark.parametrize("width", [1, 31, 32, 33, 63, 64, 65])
def test_gradient_of_every_column(target: Target, width: int) -> None:
    """FBGEMM#6008, xformers#1406: exact sums for each column, repeated rows add up."""
    leaf = torch.rand(6, width, device=target.device, requires_grad=True)
    other = torch.rand(6, 2, device=target.device, requires_grad=True)
    indices = torch.tensor([5, 0, 5, -1, 2], device=target.device)
    weights = torch.arange(1.0, 1 + 5 * width, device=target.device).view(5, width)
    outputs = gather(target, indices, leaf, other)
    ((outputs[0] * weights).sum() + outputs[1].sum()).backward()
    wanted = torch.zeros(6, width, device=target.device)
    for place, row in enumerate((5, 0, 5, 5, 2)):
        wanted[row] += weights[place]
    assert torch.equal(leaf.grad, wanted)
    assert other.grad[:, 0].tolist() == [1, 0, 1, 0, 0, 3]


def test_inference_mode(target: Target) -> None:
    """pytorch#112024, pytorch#77967, pytorch#161164: forward works on inference tensors."""
    indices = torch.tensor([2, 0], device=target.device)
    with torch.inference_mode():
        made_inside = torch.arange(12.0, device=target.device).view(4, 3)
        (output,) = gather(target, indices, made_inside)
        assert torch.equal(output, made_inside[indices])
        out = torch.zeros(2, 3, device=target.device)
        gather(target, indices, made_inside, out=(out,))
        assert torch.equal(out, output)
    (output,) = gather(target, indices, made_inside)
    assert output.tolist() == [[6, 7, 8], [0, 1, 2]]
    leaf = torch.ones(4, 3, device=target.device, requires_grad=True)
    gather(target, indices, leaf, made_inside)[0].sum().backward()
    assert leaf.grad[:, 0].tolist() == [1, 0, 1, 0]


def test_gradient_of_many_repeats_does_the_same(target: Target) -> None:
    """pytorch#53491, pytorch#171381: operations that add a repeated row up one after another."""
    if target.device == "cpu" and target.backend != "torch":
        pytest.skip("the backward pass is the same on every backend")
    count = 2000
    leaf = torch.rand(count, 8, device=target.device, requires_grad=True)
    patterns = (
        torch.arange(count, device=target.device),
        torch.zeros(count, dtype=torch.int64, device=target.device),
    )
    found = []
    for indices in patterns:
        (output,) = gather(target, indices, leaf)
        gradient = torch.ones_like(output)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            torch.autograd.grad(output, leaf, gradient)
        found.append(sorted((each.key, each.count) for each in profile.key_averages()))
    once, repeated = found
    assert once == repeated
    assert any(name.startswith("aten::") for name, _ in once)
    assert not any("index_put" in name or "embedding" in name for name, _ in once)
