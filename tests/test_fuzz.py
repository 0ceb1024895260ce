"""Some random gathers of fuzz.py on every target, and that a failure can be repeated."""

from __future__ import annotations

import json
import random
import shlex

import fuzz
import pytest
import torch
from conftest import Target

import multigather

# As many as take some seconds: compiling the CUDA source for the CPU and Triton's interpreter are
# slow. `python tests/fuzz.py --cases 100000` runs more.
CASES = {
    "torch-cpu": 3000,
    "native-cpu": 4000,
    "triton-interpreter": 12,
    "cuda-source-on-cpu": 200,
    "torch-gpu": 300,
    "triton-gpu": 60,
    "cupy-gpu": 1500,
}


def test_random_gathers(target: Target) -> None:
    for number in range(CASES[target.name]):
        failed = fuzz.failure(1, number, target.device, target.backend)
        assert failed is None, failed


def test_without_a_named_backend() -> None:
    for number in range(3000):
        failed = fuzz.failure(2, number, "cpu", None)
        assert failed is None, failed


def test_cases_reach_what_they_should() -> None:
    cases = [fuzz.make(random.Random(f"1/{number}"), True) for number in range(1500)]
    buffers = [buffer for case in cases for buffer in case["buffers"]]
    calls = [call for case in cases for call in case["calls"]]
    assert {buffer["dtype"] for buffer in buffers} == set(fuzz.DTYPES)
    assert {buffer["layout"] for buffer in buffers} == {*fuzz.LAYOUTS, "transposed", "packed"}
    assert {case["dtype"] for case in cases} == set(fuzz.INDEX_DTYPES)
    assert {case["bounds"] for case in cases} == set(fuzz.BOUNDS)
    assert {call["way"] for call in calls} == set(fuzz.WAYS)
    raising = [case for case in cases if case["bounds"] == "raise"]
    bad = sum(
        any(not -rows <= value < rows for call in case["calls"] for value in call["values"])
        for case in raising
        for rows in [min(buffer["shape"][0] for buffer in case["buffers"])]
    )
    assert len(raising) / 4 < bad < len(raising)
    assert any(0 in buffer["shape"] for buffer in buffers)
    assert any(not call["values"] for call in calls)
    assert {call["misuse"] for call in calls} == {None, *fuzz.MISUSES}


def test_a_misuse_that_is_not_refused_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that is refused by another exception, or after something was written."""
    buffers = [torch.arange(12.0).view(4, 3)]
    indices = torch.tensor([1, 2])
    options = {"bounds": "raise", "backend": "torch"}

    def outcome(name: str) -> str | None:
        return fuzz.misuse(name, indices, buffers, options)

    assert all(outcome(name) is None for name in fuzz.MISUSES)
    monkeypatch.setitem(fuzz.MISUSES, "nothing", (ValueError, fuzz.option(bounds="clip")))
    assert outcome("nothing") == "nothing was not refused"
    wrong = (ValueError, fuzz.MISUSES["mask"][1])
    monkeypatch.setitem(fuzz.MISUSES, "mask", wrong)
    assert "mask raised TypeError" in outcome("mask")
    gather = multigather.gather

    def late(indices: torch.Tensor, *buffers: torch.Tensor, out: object, **options: object) -> None:
        if out is not None:
            out[0].zero_()
        gather(indices, *buffers, out=out, **options)

    monkeypatch.setattr(multigather, "gather", late)
    assert outcome("bounds") == "bounds was refused, but an output was written"


def test_a_failure_shrinks_to_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """With an oracle that takes row 3 for row 2, the smallest case is one such index."""
    right = fuzz.oracle

    def wrong(rows: list[bytes], values: list[int], bounds: str) -> tuple[bytes, int | None]:
        return right(rows, [2 if value == 3 else value for value in values], bounds)

    monkeypatch.setattr(fuzz, "oracle", wrong)
    failed = next(filter(None, (fuzz.failure(1, number, "cpu", "torch") for number in range(500))))
    text, command = failed.splitlines()
    assert "has other bytes" in text
    arguments = shlex.split(command)
    assert arguments[:6] == ["python", "tests/fuzz.py", "--device", "cpu", "--backend", "torch"]
    case = json.loads(arguments[7])
    assert len(case["buffers"]) == len(case["calls"]) == 1
    assert case["calls"][0]["values"] == [3]
    assert fuzz.run(case, "cpu", "torch") == text
    monkeypatch.setattr(fuzz, "oracle", right)
    assert fuzz.run(case, "cpu", "torch") is None
