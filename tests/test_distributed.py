"""Rows sharded over ranks: gloo processes on this machine; GPUs through NCCL and peer memory."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import distributed_worker
import pytest
import torch
from cases import POISON, assert_gathered, raw_bytes
from conftest import Target

import multigather
from multigather.containers import Buffers
from multigather.distributed import peer, shard
from multigather.distributed.agreement import Offer
from multigather.distributed.peer import SymmetricSlab
from multigather.distributed.plan import Options, Part, local_executable, sharding_of
from multigather.slab import Column, RowLayout

ROOT = Path(__file__).resolve().parent.parent


def run_jobs(folder: Path, seconds: float, *jobs: str) -> None:
    """Run jobs such as ``cases:8``; whoever is left at the time limit is killed."""
    command = [sys.executable, ROOT / "tests" / "distributed_worker.py", folder, *jobs]
    # Where PYTHONSAFEPATH is set, a script does not find its neighbours by itself.
    paths = [str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    parent = subprocess.Popen(command, start_new_session=True, env=environment)
    try:
        parent.wait(seconds)
    except subprocess.TimeoutExpired:
        pass  # the logs tell where they were
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(parent.pid, signal.SIGKILL)
        parent.wait()


def outcomes_of(job: str, ranks: int, folder: Path) -> list[dict[str, str]]:
    """For each rank, each case's traceback."""
    found = []
    for rank in range(ranks):
        path, log = folder / f"{job}-{rank}.json", folder / f"{job}-{rank}.log"
        assert path.exists(), f"rank {rank} of {job} ended early:\n{log.read_text()}"
        found.append(json.loads(path.read_text()))
    return found


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """Eight processes run every case of the worker once, because starting them takes the time."""
    folder = tmp_path_factory.mktemp("ranks")
    run_jobs(folder, 600, "cases:8")
    return outcomes_of("cases", 8, folder)


@pytest.mark.parametrize("name", distributed_worker.CASES)
def test_on_gloo_ranks(outcomes: list[dict[str, str]], name: str) -> None:
    assert_passed(outcomes, name)


def assert_passed(outcomes: list[dict[str, str]], name: str) -> None:
    failed = [
        f"rank {rank}:\n{each.get(name, 'not run: an earlier case failed')}"
        for rank, each in enumerate(outcomes)
        if each.get(name) != ""
    ]
    assert not failed, "\n".join(failed)


def test_without_a_process_group() -> None:
    with pytest.raises(RuntimeError, match=r"init_process_group\(\) first"):
        shard(torch.zeros(3))


def test_a_rank_that_dies_or_does_not_come(tmp_path: Path) -> None:
    """The others' errors name the operation, within the group's time-out; nobody hangs."""
    run_jobs(tmp_path, 400, *(f"{name}:3" for name in distributed_worker.LONELY))
    for name in distributed_worker.LONELY:
        found = outcomes_of(name, 2 if name == "die" else 3, tmp_path)
        assert [each[name] for each in found] == [""] * len(found)
    assert not (tmp_path / "die-2.json").exists()


# ----------------------------------------------------------------------------------------- GPUs


@pytest.fixture(scope="module")
def gpu_outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """Two processes with a GPU each, through NCCL and peer memory."""
    if torch.cuda.device_count() < 2:
        pytest.skip("torch sees fewer than two CUDA devices")
    folder = tmp_path_factory.mktemp("gpus")
    run_jobs(folder, 300, "gpus:2")
    return outcomes_of("gpus", 2, folder)


@pytest.mark.gpu
@pytest.mark.parametrize("name", distributed_worker.GPU_CASES)
def test_on_gpus(gpu_outcomes: list[dict[str, str]], name: str) -> None:
    assert_passed(gpu_outcomes, name)


# ------------------------------------------------------------------------------------ peer memory


@pytest.mark.parametrize("bounds", ["raise", "fill", "clip", "unchecked"])
@pytest.mark.parametrize(
    "fields",
    [
        [((3,), torch.float32), ((), torch.int64), ((5,), torch.uint8), ((2, 2), torch.bfloat16)],
        [((), torch.uint8)],
        [((), torch.int16), ((), torch.bool)],
        [((100,), torch.float32), ((128,), torch.float16), ((), torch.int64), ((), torch.int32)],
        [((0,), torch.float64), ((7,), torch.int8)],
        [((1 + number % 5,), torch.int16) for number in range(70)],
    ],
    ids=["mixed", "a byte", "four bytes", "features", "empty rows", "many"],
)
def test_peer_reads(target: Target, fields: list[Any], bounds: str) -> None:
    """Slabs anywhere in memory, uneven and empty ones: one gather reads them all, and only rows."""
    if target.name == "triton-interpreter" and len(fields) > 9:
        pytest.skip("Triton's interpreter takes half a minute for so many")
    rows = (5, 0, 13, 1)
    layout = RowLayout.of([Column(dtype, shape) for shape, dtype in fields])
    arena = torch.full((1 << 16,), POISON, dtype=torch.uint8, device=target.device)
    places = (40_000, 8_000, 16, 57_344)
    generator = torch.Generator().manual_seed(0)
    slabs = []
    for place, count in zip(places, rows, strict=True):
        size = count * layout.stride
        data = torch.randint(256, (size,), dtype=torch.uint8, generator=generator)
        arena[place : place + size] = data.to(target.device)
        slabs.append(arena[place : place + size].view(count, layout.stride))
    views = [layout.views(slab) for slab in slabs]
    own = tuple(views[0])
    local = local_executable(Buffers(own), bounds, target.backend)
    offers = [Offer(rows=count, symmetric=True) for count in rows]
    addresses = tuple(arena.data_ptr() + place for place in places)
    part = Part(local, SymmetricSlab(layout, addresses, arena))
    group = cast(Any, None)  # peers are not talked to
    sharding = sharding_of(group, offers, part, Options(bounds), target.backend)
    assert sharding.transport.name == "peer" and "one kernel" in sharding.explain()
    whole = [torch.cat([_as_bytes(view[k]) for view in views]) for k in range(len(fields))]
    values = [0, 18, 4, 5, 17, 17, 9]
    if bounds == "raise":
        values += [-1, -19]
    elif bounds != "unchecked":
        values += [-1, 19, 10**9]
    for count in (len(values), 0, 2):
        indices = torch.tensor(values[:count], dtype=torch.int64, device=target.device)
        results, shape = sharding(indices, own, lambda *_: None)
        assert shape == indices.shape
        for result, buffer, (row_shape, dtype) in zip(results, whole, fields, strict=True):
            assert result.dtype == dtype and tuple(result.shape) == (count, *row_shape)
            if buffer.shape[1]:
                assert_gathered(_as_bytes(result), indices, buffer, bounds)
    if bounds == "raise":
        with pytest.raises(IndexError, match=r"is 19, out of range for bufs\[\d+\] with 19 rows"):
            sharding(torch.tensor([0, 19], device=target.device), own, lambda *_: None)
            multigather.check()


def _as_bytes(rows: torch.Tensor) -> torch.Tensor:
    """Shape ``[rows, bytes]``."""
    return torch.from_numpy(raw_bytes(rows)).to(rows.device)


def test_what_is_a_symmetric_slab() -> None:
    """All fields of one slab in their order, and no slices of them."""
    layout = RowLayout.of([Column(torch.int64), Column(torch.uint8)])
    slab = SymmetricSlab(layout, (0,), None)
    one, other, third = (torch.zeros(3) for _ in range(3))
    for number, each in enumerate((one, other)):
        setattr(each, peer.MARK, (slab, number))
    assert peer.slab_of([one, other]) is slab
    for wrong in ([one], [other, one], [one, other, third], [one[1:], other[1:]], [one, third]):
        assert peer.slab_of(wrong) is None


@pytest.mark.parametrize(
    ("places", "reasons"),
    [
        ([("a", "cpu", ""), ("a", "cpu", "")], ["the buffers are on cpu"]),
        ([("a", "cuda:0", "x"), ("b", "cuda:0", "y")], ["the ranks are on 2 hosts (a, b)"]),
        ([("a", "cuda:0", "x"), ("a", "cuda:0", "x")], ["several ranks have the same GPU"]),
    ],
)
def test_why_memory_is_not_symmetric(
    places: list[tuple[str, str, str]], reasons: list[str]
) -> None:
    assert peer.why_not(places) == reasons


def test_gpus_that_cannot_read_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: a < b)
    places = [("a", "cuda:0", "x"), ("a", "cuda:1", "y")]
    assert peer.why_not(places) == ["GPU 1 cannot read the memory of GPU 0"]
