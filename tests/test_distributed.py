"""Rows sharded over ranks: gloo processes on this machine; GPUs through NCCL and peer memory."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import distributed_worker
import pytest

ROOT = Path(__file__).resolve().parent.parent


def run_jobs(folder: Path, seconds: float, *jobs: str) -> None:
    """Run jobs such as ``cases:8``; whoever is left at the time limit is killed."""
    command = [sys.executable, ROOT / "tests" / "distributed_worker.py", folder, *jobs]
    parent = subprocess.Popen(command, start_new_session=True)
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
    run_jobs(folder, 240, "cases:8")
    return outcomes_of("cases", 8, folder)


@pytest.mark.parametrize("name", distributed_worker.CASES)
def test_on_gloo_ranks(outcomes: list[dict[str, str]], name: str) -> None:
    failed = [
        f"rank {rank}:\n{each.get(name, 'not run: an earlier case failed')}"
        for rank, each in enumerate(outcomes)
        if each.get(name) != ""
    ]
    assert not failed, "\n".join(failed)


def test_a_rank_that_dies_or_does_not_come(tmp_path: Path) -> None:
    """The others' errors name the operation, within the group's time-out; nobody hangs."""
    run_jobs(tmp_path, 60, *(f"{name}:3" for name in distributed_worker.LONELY))
    for name in distributed_worker.LONELY:
        found = outcomes_of(name, 2 if name == "die" else 3, tmp_path)
        assert [each[name] for each in found] == [""] * len(found)
    assert not (tmp_path / "die-2.json").exists()
