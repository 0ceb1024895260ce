"""Sizes beyond 32 bits at their real size, which takes a GPU with tens of gigabytes."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import Target
from filelock import FileLock

import multigather

TARGET_DEVICES = ("cuda",)  # read by conftest.py


@pytest.fixture(autouse=True)
def room(target: Target) -> Iterator[None]:
    """One at a time, also of several workers; memory is given back before and after."""
    with FileLock(Path(tempfile.gettempdir(), "multigather-test-large.lock")):
        torch.cuda.empty_cache()
        yield
        torch.cuda.empty_cache()


def need(gigabytes: float) -> None:
    free, _ = torch.cuda.mem_get_info()
    if free < gigabytes * 1e9:
        pytest.skip(f"needs {gigabytes} GB of GPU memory, {free / 1e9:.0f} are free")


def last_rows(rows: int) -> list[int]:
    """Rows around every power of two that an offset or a row number could be cut at."""
    near = {0, 1, rows - 1, rows - 2}
    for bit in (31, 32):
        near |= {2**bit + step for step in (-1, 0, 1)}
    return sorted(each for each in near if 0 <= each < rows)


@pytest.mark.parametrize("bounds", ["raise", "fill", "clip", "unchecked"])
def test_more_than_2_to_the_31_elements(target: Target, bounds: str) -> None:
    """One-byte elements, so that rows, elements and bytes all pass 2**31 and 2**32."""
    rows = 2**32 + 77
    need(6)
    buffer = torch.zeros(rows, dtype=torch.uint8, device="cuda")
    places = last_rows(rows)
    contents = torch.arange(1, len(places) + 1, dtype=torch.uint8, device="cuda")
    indices = torch.tensor(places, device="cuda")
    buffer[indices] = contents
    options = {"bounds": bounds, "backend": target.backend}
    for _ in range(2):
        assert torch.equal(multigather.gather(indices, buffer, **options)[0], contents)
    if bounds == "raise":
        assert torch.equal(multigather.gather(indices - rows, buffer, **options)[0], contents)
        multigather.gather(indices + rows, buffer, **options)
        with pytest.raises(IndexError, match=rf"\[0\] is {rows}, .* with {rows} rows"):
            multigather.check()


@pytest.mark.parametrize(("width", "dtype"), [(1024, torch.float16), (1023, torch.uint8)])
def test_rows_far_into_a_buffer(target: Target, width: int, dtype: torch.dtype) -> None:
    """Long rows whose offsets pass 2**31 elements, and 2**32 bytes; odd ones are copied shifted."""
    rows = 2**32 // width // dtype.itemsize + 5000
    need(8)
    buffer = torch.zeros(rows, width, dtype=dtype, device="cuda")
    places = torch.tensor(
        [0, 1, *(2**bit // width + step for bit in (30, 31, 32) for step in (-1, 0, 1)), rows - 1],
        device="cuda",
    ).clamp(max=rows - 1)
    places = places.unique()
    contents = torch.arange(1, len(places) + 1, device="cuda").to(dtype)
    buffer[places] = contents[:, None].expand(-1, width)
    out = torch.empty(len(places), width, dtype=dtype, device="cuda")
    (made,) = multigather.gather(places, buffer, backend=target.backend)
    multigather.gather(places.int(), buffer, out=(out,), backend=target.backend)
    for each in (made, out):
        assert torch.equal(each, contents[:, None].expand(-1, width))
    multigather.check()


@pytest.mark.parametrize(("width", "dtype"), [(1024, torch.int32), (4099, torch.uint8)])
def test_output_of_more_than_2_to_the_32_bytes(
    target: Target, width: int, dtype: torch.dtype
) -> None:
    """Every row of the output is looked at, a part at a time."""
    count = 2**32 // (width * dtype.itemsize) + 3000
    need(12)
    buffer = torch.arange(200, device="cuda").to(dtype)[:, None].expand(200, width).contiguous()
    other = torch.arange(200, device="cuda")
    indices = torch.arange(count, device="cuda") * 7 % 200
    made, numbers = multigather.gather(indices, buffer, other, backend=target.backend)
    assert made.numel() * made.element_size() > 2**32
    assert torch.equal(numbers, indices)
    for start in range(0, count, 1 << 16):
        part = slice(start, start + (1 << 16))
        assert bool((made[part] == indices[part, None].to(dtype)).all()), start
    multigather.check()


def test_more_than_65535_times_65535_indices(target: Target) -> None:
    """As many work items as two short grid axes have together, and more than 2**32."""
    if target.backend == "torch":
        pytest.skip("torch's own operations take more than 100 GB for so many indices")
    count = 2**32 + 12345
    need(14)
    assert count > 65535 * 65535
    buffer = torch.arange(100, dtype=torch.uint8, device="cuda")
    # One index that is seen again and again, and then a few others by their own memory.
    same = torch.tensor([77], device="cuda").expand(count)
    (made,) = multigather.gather(same, buffer, backend=target.backend)
    assert made.shape == (count,)
    for start in range(0, count, 1 << 30):
        assert bool((made[start : start + (1 << 30)] == 77).all()), start
    del made
    indices = torch.zeros(count, dtype=torch.uint8, device="cuda")
    places = torch.tensor(last_rows(count), device="cuda")
    indices[places] = torch.arange(1, len(places) + 1, dtype=torch.uint8, device="cuda")
    (made,) = multigather.gather(indices, buffer, backend=target.backend)
    assert torch.equal(made, indices)
    multigather.check()


def test_a_bad_index_far_into_the_indices(target: Target) -> None:
    """Its position is beyond 2**31 and is reported as it is."""
    count = 2**31 + 9
    need(20 if target.backend != "torch" else 110)
    indices = torch.zeros(count, dtype=torch.int8, device="cuda")
    indices[count - 2] = 101
    buffer = torch.ones(100, dtype=torch.uint8, device="cuda")
    (made,) = multigather.gather(indices, buffer, backend=target.backend)
    with pytest.raises(IndexError, match=rf"\[{count - 2}\] is 101, out of range for bufs\[0\]"):
        multigather.check()
    assert made[-3:].tolist() == [1, 0, 1]
    assert int(made.sum(dtype=torch.int64)) == count - 1


@pytest.mark.parametrize("count", [1, 2, 8, 9, 33, 64, 100, 300])
def test_many_buffers_that_are_large_together(target: Target, count: int) -> None:
    """4 GiB in all, every one with its own content; offsets are not taken from one base."""
    if target.name == "triton-gpu" and count > 33:
        pytest.skip("its launches of many buffers compile for most of a minute")
    need(6)
    width = 2**32 // count // 64 // 4
    memory = torch.empty(count, 64, width, dtype=torch.int32, device="cuda")
    for number in range(count):
        memory[number] = torch.arange(64, device="cuda", dtype=torch.int32)[:, None] + 64 * number
    buffers = [memory[number][:, -8:] for number in range(count)]  # the far ends of long rows
    indices = torch.tensor([63, 0, 17, -1], device="cuda")
    for number, rows in enumerate(multigather.gather(indices, *buffers, backend=target.backend)):
        assert torch.equal(rows, (indices % 64)[:, None].expand(4, 8).int() + 64 * number)
    multigather.check()
