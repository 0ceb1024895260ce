"""The native backend beyond what every backend's tests ask: threads, slabs, chunks, large tables.

Everything else about it is tested by the target ``native-cpu``.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator

import pytest
import torch
from cases import assert_gathered, in_threads, run_program

import multigather
from multigather import native

pytestmark = pytest.mark.skipif(native.extension is None, reason=native.description)

CHUNK = 512  # as in gather_cpu.c
MODES = ("raise", "fill", "clip", "unchecked")
Share = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
Parallel = ctypes.CFUNCTYPE(None, Share, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
Number = ctypes.CFUNCTYPE(ctypes.c_int)


class Threads:
    """Stands in for OpenMP: runs the shares one after another, and notes how many there were."""

    def __init__(self, wanted: int) -> None:
        self.number, self.started = 0, []
        self.callbacks = (
            Parallel(self.parallel),
            Number(lambda: self.number),
            Number(lambda: wanted),
        )
        self.addresses = [ctypes.cast(each, ctypes.c_void_p).value for each in self.callbacks]

    def parallel(self, share: object, argument: int, threads: int, flags: int) -> None:
        self.started.append(threads)
        for self.number in reversed(range(threads)):
            share(argument)


@pytest.fixture
def threads() -> Iterator[Threads]:
    made = Threads(7)
    native.extension.use_threads(*made.addresses)
    yield made
    native.extension.use_threads(0, 0, 0)
    native.use_threads(native.extension)


def indices_for(bounds: str, count: int, rows: int) -> torch.Tensor:
    low, high = {"raise": (-rows, rows), "unchecked": (0, rows)}.get(bounds, (-2 * rows, 2 * rows))
    return torch.randint(low, high, (count,), generator=torch.Generator().manual_seed(count))


@pytest.mark.parametrize("bounds", MODES)
def test_shares_of_threads_are_the_whole(threads: Threads, bounds: str) -> None:
    """As many shares as the bytes are worth, at most as many as wanted; none without work."""
    buffers = [torch.randn(300, 100), torch.arange(300).to(torch.uint8), torch.randn(300, 7)]
    for count in (0, 1, 200, 613, 614, 5000):  # 429 bytes a row: from 611 on there are two shares
        indices = indices_for(bounds, count, 300)
        threads.started.clear()
        results = multigather.gather(indices, *buffers, bounds=bounds, backend="native")
        for result, buffer in zip(results, buffers, strict=True):
            assert_gathered(result, indices, buffer, bounds)
        shares = min(7, count * 429 // 2**17)
        assert threads.started == ([shares] if shares > 1 else [])


def test_few_wide_rows_are_shared_by_fewer_threads(threads: Threads) -> None:
    buffer = torch.randn(5, 2**20)
    (rows,) = multigather.gather(torch.tensor([4, -5]), buffer, backend="native")
    assert torch.equal(rows, buffer[[4, 0]])
    assert threads.started == [2]


def test_a_bad_index_starts_no_thread(threads: Threads) -> None:
    buffer = torch.randn(300, 4096)
    indices = torch.zeros(300, dtype=torch.int64)
    out = torch.full((300, 4096), 7.0)
    for bad in (300, -301):
        indices[299] = bad
        with pytest.raises(IndexError, match=rf"indices\[299\] is {bad}, "):
            multigather.gather(indices, buffer, out=(out,), backend="native")
    assert threads.started == []
    assert bool((out == 7).all())


def test_torchs_own_threads() -> None:
    """With any number of them, and from a thread that torch has not seen."""
    before = torch.get_num_threads()
    buffer = torch.arange(20_000 * 64).view(20_000, 64)
    indices = indices_for("raise", 30_000, 20_000)
    try:
        for number in (1, 2, 5):
            torch.set_num_threads(number)
            found = [multigather.gather(indices, buffer)[0]]
            in_threads(1, lambda _: found.append(multigather.gather(indices, buffer)[0]))  # noqa: B023
            assert len(found) == 2
            for rows in found:
                assert_gathered(rows, indices, buffer)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("bounds", MODES)
@pytest.mark.parametrize("count", [1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 17])
def test_fields_of_one_slab(bounds: str, count: int) -> None:
    """Columns of one memory block, mixed with buffers that lie elsewhere."""
    slab = torch.randint(256, (1000, 48), dtype=torch.uint8)
    columns = [slab[:, at : at + size] for at, size in ((0, 8), (8, 4), (12, 1), (13, 3), (16, 16))]
    others = [torch.randn(1000, 3), torch.randint(256, (900, 48), dtype=torch.uint8)[:, :5]]
    buffers = [*columns[:3], others[0], *columns[3:], others[1]]
    indices = indices_for(bounds, count, 900)
    for each in (indices, indices.to(torch.int32), indices.repeat_interleave(2)[::2]):
        results = multigather.gather(each, *buffers, bounds=bounds, backend="native")
        for result, buffer in zip(results, buffers, strict=True):
            assert_gathered(result, indices, buffer, bounds)


@pytest.mark.parametrize("bounds", MODES)
@pytest.mark.parametrize("width", [1, 2, 3, 4, 8, 16, 24, 100, 1500, 2048, 5000])
def test_tables_that_no_cache_holds(bounds: str, width: int) -> None:
    """Their rows are asked for ahead, up to the last, and no row before or behind them."""
    rows = 2 * 2**20 // width
    table = torch.randint(256, (rows, width), dtype=torch.uint8)
    for count in (1, 15, 16, 17, 700):
        indices = indices_for(bounds, count, rows)
        (result,) = multigather.gather(indices, table, bounds=bounds, backend="native")
        assert_gathered(result, indices, table, bounds)


def test_all_buffers_or_none() -> None:
    """What a plain buffer's refusal would look like if two backends shared a call in mode raise."""
    plain, strided = torch.randn(6, 4), torch.randn(4, 6).t()
    with pytest.raises(multigather.UnsupportedError, match="all buffers of a gather or none"):
        multigather.gather(torch.tensor([0]), plain, strided, backend="native")
    out = (torch.full((2, 4), 7.0), torch.full((2, 4), 7.0))
    with pytest.raises(IndexError):
        multigather.gather(torch.tensor([0, 6]), plain, strided, out=out)
    assert all(bool((each == 7).all()) for each in out)


FORKED = """
import os, torch, multigather
buffer = torch.arange(20_000 * 64).view(20_000, 64)
indices = torch.arange(20_000).flip(0)
torch.set_num_threads(2)
for _ in range(3):
    multigather.gather(indices, buffer)
child = os.fork()
if not child:
    (rows,) = multigather.gather(indices, buffer, backend="native")
    os._exit(0 if rows.numpy().tobytes() == buffer.numpy()[::-1].tobytes() else 1)
print(os.waitpid(child, 0)[1])
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system cannot fork")
def test_a_forked_child_waits_for_no_thread_of_the_parent() -> None:
    """Large enough for threads; a child has one, whatever torch says."""
    assert run_program(FORKED).stdout == "0\n"
