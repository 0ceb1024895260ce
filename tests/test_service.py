"""The service loop of service.py, for some calls on every target."""

from __future__ import annotations

import pytest
import service
import torch
from conftest import Target

import multigather

# What takes seconds, at most some ten on a busy machine.
CALLS = {"triton-interpreter": 60, "cuda-source-on-cpu": 1000}


def test_good_and_bad_calls_of_many_threads(target: Target) -> None:
    """Every bad index is reported once and as what it is, and every other row is right."""
    # What stands in for a GPU has one program's state, or one fault board, for all threads.
    threads = 8 if target.device == "cuda" or target.backend in ("native", "torch") else 1
    share = 0.3 if target.name == "triton-interpreter" else 0.04  # few calls, being slow
    calls = CALLS.get(target.name, 4000)
    ledger = service.serve(calls, target.device, target.backend, threads, share)
    assert ledger.failures == []
    assert ledger.errors > 0
    assert ledger.calls > max(calls - 1, ledger.bad)


def ledger_of(*values: int) -> service.Ledger:
    ledger = service.Ledger()
    for value in values:
        ledger.send(value, 1, {"t0a": 4}, "cpu")
    return ledger


@pytest.mark.parametrize(
    "text",
    [
        "indices[0] is 9, out of range for bufs[0]['t0a'] with 4 rows",
        "indices[1] is 8, out of range for bufs[0]['t0a'] with 4 rows",
        "indices[1] is 9, out of range for bufs[0]['t1a'] with 4 rows",
        "indices[1] is 9, out of range for bufs[0]['t0a'] with 5 rows",
        "indices[1] is 9, out of range for buffer 0 with 4 rows",
        "3 bad indices on cpu; the first ones' details are lost",
    ],
)
def test_the_ledger_refuses_wrong_reports(text: str) -> None:
    """Another position, value, buffer or row count than was sent, or none."""
    ledger = ledger_of(9)
    ledger.receive(IndexError(text))
    assert len(ledger.failures) == 1


def test_the_ledger_counts() -> None:
    ledger = ledger_of(9, 10)
    text = "indices[1] is {}, out of range for bufs[0]['t0a'] with 4 rows"
    assert ledger.receive(IndexError(text.format(9) + "; 1 more bad")) == 9
    assert ledger.failures == []
    assert ledger.reported == ledger.pairs == ledger.bad == 2
    ledger.receive(IndexError(text.format(9)))
    assert len(ledger.failures) == 1, "reported twice"


def test_the_service_notices_a_wrong_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gather that swaps two rows, and one that swallows its error."""
    right = multigather.gather

    def swapped(indices: torch.Tensor, *arguments: object, **options: object) -> object:
        return right(indices.flip(0), *arguments, **options)

    def quiet(indices: torch.Tensor, *arguments: object, **options: object) -> object:
        return right(indices.clamp(0, 99), *arguments, **options)

    for wrong, text in ((swapped, "outputs are wrong"), (quiet, "no error for")):
        with monkeypatch.context() as patch:
            patch.setattr(multigather, "gather", wrong)
            ledger = service.serve(1000, "cpu", "torch", threads=1)
        assert any(text in failure for failure in ledger.failures)
