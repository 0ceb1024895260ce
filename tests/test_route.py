"""The kernels that find out which rank has a row: places, numbers, counts, reports."""

from __future__ import annotations

import pytest
import torch
from conftest import Target

from multigather import dispatch, faults
from multigather.backends import _route
from multigather.backends._cupy import INDEX_TYPES, CudaBackend
from multigather.backends._route import Router
from multigather.request import BOUNDS, Site

TARGET_BACKENDS = ("cupy",)  # read by conftest.py

# Rows of each rank: none at the ends and in between, one, many.
SHARES = [(5, 0, 13, 1), (0, 0, 7), (4,), (0, 3, 0, 0, 9, 0), tuple(range(40))]
SITE = Site(77, (0,), ("bufs[0]",))


def router_of(
    target: Target, rows: tuple[int, ...], bounds: str = "raise", capacity: int | None = None
) -> Router:
    (backend,) = (each for each in dispatch.BACKENDS if isinstance(each, CudaBackend))
    offsets = [sum(rows[:rank]) for rank in range(len(rows) + 1)]
    device = torch.device("cuda", 0) if target.device == "cuda" else torch.device("cpu")
    return Router(backend, device, offsets, torch.int32, bounds, SITE, capacity)


def owner_of(index: int, rows: tuple[int, ...], bounds: str) -> tuple[int, int] | None:
    """Rank and number at that rank of the row that an index selects, as the documentation says."""
    total = sum(rows)
    if bounds == "clip":
        index = min(max(index, 0), total - 1)
    elif bounds == "raise" and -total <= index < 0:
        index += total
    if not 0 <= index < total:
        return None
    for rank, number in enumerate(rows):
        if index < number:
            return rank, index
        index -= number
    raise AssertionError


def some_indices(count: int, total: int, bounds: str, dtype: torch.dtype) -> list[int]:
    """Random ones, some of them bad where the mode allows it without a report."""
    generator = torch.Generator().manual_seed(count)
    low, high = {"raise": (-total, total), "unchecked": (0, total)}.get(bounds, (-9, total + 9))
    if not dtype.is_signed:
        low = 0
    return torch.randint(low, high, (count,), generator=generator).tolist()


def taken(device: torch.device) -> str | None:
    """What was reported since the last look."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    error = faults.board_of(device).take()
    return None if error is None else str(error)


@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("rows", SHARES, ids=str)
def test_requests(target: Target, rows: tuple[int, ...], bounds: str) -> None:
    """Every row that is asked for has a place of its own among those of its rank."""
    router = router_of(target, rows, bounds)
    for count in (0, 1, 3, 300, 2000, 20_000 if target.device == "cuda" else 2001):
        values = some_indices(count, sum(rows), bounds, torch.int64)
        indices = torch.tensor(values, dtype=torch.int64, device=target.device)
        places, numbers, counts, missed = router.requests(indices)
        assert missed is None
        owners = [owner_of(each, rows, bounds) for each in values]
        asked = [
            sum(each is not None and each[0] == k for each in owners) for k in range(len(rows))
        ]
        assert counts[0].tolist() == asked
        found = []
        for place, owner in zip(places.tolist(), owners, strict=True):
            if owner is None:
                assert place == -1
                continue
            start = sum(asked[: owner[0]])
            assert start <= place < start + asked[owner[0]]
            assert int(numbers[place]) == owner[1]
            found.append(place)
        assert sorted(found) == list(range(sum(asked)))
    assert taken(indices.device) is None


@pytest.mark.parametrize("capacity", [1, 4, 50])
@pytest.mark.parametrize("rows", SHARES[:4], ids=str)
def test_requests_with_a_capacity(target: Target, rows: tuple[int, ...], capacity: int) -> None:
    """As many rows of a rank as there are places; places without a row ask for none."""
    router = router_of(target, rows, "fill", capacity)
    for count in (0, 2, 60, 400):
        values = some_indices(count, sum(rows), "fill", torch.int64)
        indices = torch.tensor(values, dtype=torch.int64, device=target.device)
        places, numbers, counts, missed = router.requests(indices)
        owners = [owner_of(each, rows, "fill") for each in values]
        asked = [
            sum(each is not None and each[0] == k for each in owners) for k in range(len(rows))
        ]
        assert counts[0].tolist() == asked
        assert missed is not None
        assert int(missed) == sum(max(each - capacity, 0) for each in asked)
        used = {}
        for place, owner in zip(places.tolist(), owners, strict=True):
            if owner is None:
                assert place == -1
            elif place >= 0:
                assert place // capacity == owner[0] and place not in used
                used[place] = owner[1]
        assert len(used) == sum(min(each, capacity) for each in asked)
        assert numbers.tolist() == [used.get(k, -1) for k in range(len(rows) * capacity)]


@pytest.mark.parametrize("index_dtype", INDEX_TYPES, ids=str)
def test_every_index_type(target: Target, index_dtype: torch.dtype) -> None:
    rows = (5, 0, 13, 1)
    for bounds in BOUNDS:
        values = some_indices(100, 19, bounds, index_dtype)
        indices = torch.tensor(values, device=target.device).to(index_dtype)
        places, numbers, _, _ = router_of(target, rows, bounds).requests(indices)
        for place, value in zip(places.tolist(), values, strict=True):
            owner = owner_of(value, rows, bounds)
            assert place == -1 if owner is None else int(numbers[place]) == owner[1]
        assert taken(places.device) is None


def test_bad_indices_are_reported_once(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """With position and value, as by a gather from as many rows as all ranks have."""
    monkeypatch.setitem(faults.plans, SITE.plan, SITE)
    rows = (5, 0, 14)
    router = router_of(target, rows)
    indices = torch.tensor([0, 18, 19, 5], dtype=torch.int32, device=target.device)
    places, _, counts, _ = router.requests(indices)
    assert places.tolist() == [0, 1, -1, 2] and counts[0].tolist() == [1, 0, 2]
    error = taken(places.device)
    assert error is not None and "[2] is 19, out of range for bufs[0] with 19 rows" in error
    assert "more bad" not in error
    indices[0] = -20
    assert router.requests(indices).places.tolist() == [-1, 0, -1, 1]
    error = taken(places.device)
    assert error is not None and "1 more bad" in error


def test_threads_are_few_where_ranks_are_many(target: Target) -> None:
    """The table stays within its bound, whatever the number of indices."""
    for ranks in (1, 2, 8, 1024, 5000):
        router = router_of(target, (1,) * ranks)
        for count in (0, 1, 1000, 10**6, 10**9):
            threads = router._threads(count)
            assert threads % _route.THREADS == 0 and threads & (threads - 1) == 0
            assert threads == _route.LEAST_THREADS or threads * ranks <= _route.MOST_CELLS
    router = router_of(target, (1,) * 1024)
    indices = torch.arange(1024, device=target.device).flip(0)
    places, numbers, counts, _ = router.requests(indices)
    assert torch.equal(places, indices) and not numbers.any() and bool((counts[0] == 1).all())
