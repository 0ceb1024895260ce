"""Ranges for profilers: around every call if they are wanted, else nothing at all."""

from __future__ import annotations

from cases import run_program

# Torch's functions are replaced before multigather looks for them.
PROGRAM = """
import sys
import torch
if sys.argv[1] == "there":
    calls = []
    torch.cuda.nvtx.range_push = calls.append
    torch.cuda.nvtx.range_pop = lambda: calls.append("pop")
elif sys.argv[1] == "missing":
    def missing(name):
        raise RuntimeError("NVTX functions not installed")
    torch.cuda.nvtx.range_push = missing
import multigather
buffer, indices = torch.zeros(3, 2), torch.tensor([1])
plan = multigather.plan(buffer)
if sys.argv[1] == "there":
    calls.clear()
for _ in range(3):
    multigather.gather(indices, buffer)
    plan(indices)
try:
    multigather.gather(torch.tensor([3]), buffer)
except IndexError:
    pass
if sys.argv[1] == "there":
    print(calls)
print(multigather.gather.__name__, multigather.gather.__doc__ is not None)
"""


def run(kind: str, wanted: str) -> tuple[str, str]:
    done = run_program(PROGRAM, kind, MULTIGATHER_NVTX=wanted)
    return done.stdout, done.stderr


def test_a_range_for_every_call() -> None:
    """Closed also where the call raises."""
    one = ["multigather.gather", "pop", "multigather.plan", "pop"]
    printed, _ = run("there", "1")
    assert printed == f"{[*one * 3, *one[:2]]}\ngather True\n"


def test_no_range_if_none_is_wanted() -> None:
    for wanted in ("0", ""):
        assert run("there", wanted)[0] == "[]\ngather True\n"


def test_a_torch_without_ranges() -> None:
    """A warning, and gathers as ever."""
    printed, warned = run("missing", "1")
    assert printed == "gather True\n"
    assert "MULTIGATHER_NVTX: no ranges, NVTX functions not installed" in warned
