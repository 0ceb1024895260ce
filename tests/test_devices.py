"""Devices that do not go together, several GPUs at once, and machines that lack something."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from cases import POISON, in_threads
from conftest import HAVE_GPU, Target

import multigather
from multigather import api

needs_gpu = pytest.mark.skipif(not HAVE_GPU, reason="torch sees no CUDA device")
BACKENDS = ("torch", "triton", "cupy")


@pytest.fixture
def two_gpus() -> None:
    if not HAVE_GPU or torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")


# ---------------------------------------------------------------------------------- mismatches


@pytest.mark.parametrize("elsewhere", ["meta", "cpu", "cuda:1"])
@pytest.mark.parametrize("known", [False, True], ids=["first call", "known layout"])
def test_another_device_in_every_argument_position(
    target: Target, elsewhere: str, known: bool
) -> None:
    """ValueError that names the argument and the device; nothing is written."""
    if elsewhere == "cuda:1" and (target.device != "cuda" or torch.cuda.device_count() < 2):
        pytest.skip("needs two GPUs")
    if elsewhere == target.device:
        pytest.skip("the same device")
    indices = torch.tensor([2, 0], device=target.device)
    bufs = [torch.ones(4, 3, device=target.device) for _ in range(4)]
    outs = [torch.full((2, 3), POISON, device=target.device).float() for _ in range(4)]

    def call(indices: torch.Tensor, bufs: list, outs: list | None) -> None:
        first, second, third, fourth = bufs
        if outs is not None:
            outs = [outs[0], {"x": [outs[1], outs[2]]}, outs[3]]
        multigather.gather(
            indices, first, {"x": [second, third]}, fourth, out=outs, backend=target.backend
        )

    if known:
        for _ in range(2):
            call(indices, bufs, outs)
            call(indices, bufs, None)
    for out in outs:
        out.fill_(POISON)
    names = ("bufs[0]", "bufs[1]['x'][0]", "bufs[1]['x'][1]", "bufs[2]")
    for place, name in enumerate(names):
        moved = [buf.to(elsewhere) if at == place else buf for at, buf in enumerate(bufs)]
        for into in (outs, None):
            with pytest.raises(ValueError, match="one device") as caught:
                call(indices, moved, into)
            # Where the first buffer is the odd one, the second one shows it.
            assert (name if place else names[1]) in str(caught.value)
            assert elsewhere in str(caught.value)
    for place, name in enumerate(names):
        wrong = [out.to(elsewhere) if at == place else out for at, out in enumerate(outs)]
        with pytest.raises(ValueError, match="the gather runs on") as caught:
            call(indices, bufs, wrong)
        assert name.replace("bufs", "out", 1) in str(caught.value)
        assert elsewhere in str(caught.value)
    if elsewhere != "cpu":  # indices of the host are copied
        for into in (outs, None):
            with pytest.raises(ValueError, match="indices are on") as caught:
                call(indices.to(elsewhere), bufs, into)
            assert elsewhere in str(caught.value)
    assert all(bool((out == POISON).all()) for out in outs)
    with pytest.raises(ValueError, match=r"one device|indices are on"):
        multigather.plan(*bufs[:3], bufs[3].to(elsewhere), backend=target.backend)
    multigather.check()


# -------------------------------------------------------------------------------- several GPUs


@pytest.mark.gpu
@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("backend", BACKENDS)
def test_two_gpus_at_once(backend: str) -> None:
    """Threads with plans on both, whichever GPU is current in the thread."""
    failures: list[str] = []
    start = threading.Barrier(4)

    def work(number: int) -> None:
        device, current = f"cuda:{number % 2}", number // 2
        try:
            with torch.cuda.device(current):
                buffers = [
                    torch.arange(40 * width, device=device).view(40, width) + number
                    for width in (1, 5, 64)
                ]
                plan = multigather.plan(*buffers, backend=backend)
                out = [
                    torch.empty(8, width, dtype=torch.int64, device=device) for width in (1, 5, 64)
                ]
                start.wait(60)
                for turn in range(100):
                    indices = (torch.arange(8, device=device) * 3 + turn) % 40
                    results = (
                        plan(indices),
                        plan(indices, out=out),
                        multigather.gather(indices, *buffers, backend=backend),
                    )
                    for rows in results:
                        for each, buffer in zip(rows, buffers, strict=True):
                            assert str(each.device) == device
                            assert torch.equal(each, buffer[indices])
                    assert torch.cuda.current_device() == current
        except BaseException as error:
            failures.append(f"thread {number}: {error!r}")

    in_threads(4, work)
    assert failures == []
    multigather.check()


@pytest.mark.gpu
@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_plan_for_each_gpu(backend: str) -> None:
    """Plans of the same layout on two GPUs keep to their own, and refuse the other's indices."""
    plans, buffers = [], []
    for number in (0, 1):
        buffers.append(torch.full((9, 3), float(number), device=f"cuda:{number}"))
        plans.append(multigather.plan(buffers[-1], backend=backend))
    for _ in range(3):
        for number in (0, 1):
            indices = torch.tensor([8, 0], device=f"cuda:{number}")
            (rows,) = plans[number](indices)
            assert rows.device == indices.device
            assert (rows == number).all()
            with pytest.raises(ValueError, match="indices are on"):
                plans[1 - number](indices)
    assert plans[1](torch.tensor([1]))[0].tolist() == [[1.0] * 3]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("backend", ["triton", "cupy"])
def test_pinned_sources_repeat(backend: str) -> None:
    """Values that the host writes are seen by the next call; outputs are on the GPU."""
    buffer = torch.zeros(40, 5).pin_memory()
    narrow = torch.zeros(40, 33, dtype=torch.uint8).pin_memory()
    plan = multigather.plan(buffer, narrow, backend=None)
    indices = torch.arange(8, device="cuda")
    for turn in range(1, 30):
        torch.cuda.synchronize()
        buffer.fill_(turn)
        narrow.fill_(turn)
        for rows in (plan(indices), multigather.gather(indices, buffer, narrow, backend=backend)):
            assert all(each.is_cuda and bool((each == turn).all()) for each in rows)
    multigather.gather(indices + 35, buffer, narrow, backend=backend)
    with pytest.raises(IndexError, match=r"is 40, out of range for bufs\[0\] with 40 rows"):
        multigather.check()


@pytest.mark.gpu
@needs_gpu
def test_pageable_memory_after_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A repeated call is short, but does not take other host memory of that layout for pinned."""
    api.forget()
    pinned = torch.ones(40, 5).pin_memory()
    indices = torch.arange(8, device="cuda")
    plan = multigather.plan(pinned)
    for _ in range(3):
        multigather.gather(indices, pinned)
    assert plan(indices)[0].is_cuda
    with monkeypatch.context() as patch:
        patch.setattr(api, "gather_checked", None)
        assert bool((multigather.gather(indices, pinned)[0] == 1).all())
    known = dict(api._shortcuts)
    pageable = torch.ones(40, 5)
    api._shortcuts[id(pageable)] = known[id(pinned)]
    with pytest.raises(ValueError, match="pageable host memory"):
        multigather.gather(indices, pageable)
    outs = (torch.zeros(8, 5, device="cuda"),)
    for _ in range(3):
        multigather.gather(indices, pinned, out=outs)
    assert bool((outs[0] == 1).all())


# ---------------------------------------------------------------- machines that lack something

WITHOUT = """
import os, sys
device, missing = sys.argv[1], sys.argv[2].split(",")
for name in ("cupy", "triton"):
    if name in missing:
        sys.modules[name] = None  # as where it is not installed
if "compiler" in missing:
    os.environ.pop("CC", None)
    os.environ["PATH"] = sys.argv[3]  # an empty folder
if "extension" in missing:
    os.environ["MULTIGATHER_NATIVE"] = "off"  # as where it was not built
import torch, multigather

buffer, column = torch.arange(40.0, device=device).view(10, 4), torch.arange(10, device=device)
indices = torch.tensor([3, -1, 0], device=device)
for _ in range(3):
    for rows, source in zip(multigather.gather(indices, buffer, column), (buffer, column)):
        assert torch.equal(rows, source[indices])
try:
    multigather.gather(torch.tensor([3, 10], device=device), buffer)
    multigather.check()
    raise SystemExit("a bad index was not reported")
except IndexError as error:
    assert "[1] is 10, out of range for bufs[0] with 10 rows" in str(error)
statuses = [each for each in multigather.backends() if device == "cpu" or each.name != "native"]
for status in statuses:
    refusal = None
    try:
        multigather.gather(indices, buffer, backend=status.name)
    except multigather.UnsupportedError as error:
        refusal = str(error)
        assert f"backend {status.name!r} cannot run this gather" in refusal
        assert device == "cpu" or any(reason in refusal for reason in status.reasons)
    print(status.name, "runs" if refusal is None else "; ".join(status.reasons))
explanation = multigather.explain(indices, buffer)
for status in statuses:
    assert all(reason in str(explanation) for reason in status.reasons) or device == "cpu"
print("chosen:", explanation.picks[0]["backend"])
"""

LACKING = [
    pytest.param("cupy", "triton", ("cupy",), id="no cupy"),
    pytest.param("triton", "cupy", ("triton",), id="no triton"),
    pytest.param("compiler", "cupy", ("triton",), id="no compiler"),
    pytest.param("cupy,compiler", "torch", ("cupy", "triton"), id="no cupy, no compiler"),
    pytest.param("cupy,triton", "torch", ("cupy", "triton"), id="torch only"),
]
REASONS = {"cupy": "CuPy is not installed", "triton": "Triton is not installed"}


def run_without(device: str, missing: str, empty: Path) -> list[str]:
    environment = {**os.environ, "MULTIGATHER_TUNING": "off"}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", WITHOUT, device, missing, str(empty)],
        capture_output=True, text=True, timeout=240, check=False, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("missing", "chosen", "refused"), LACKING)
def test_gpu_without(missing: str, chosen: str, refused: tuple[str, ...], tmp_path: Path) -> None:
    """The next backend takes over; the one that cannot run says why when it is asked for."""
    *lines, last = run_without("cuda", missing, tmp_path)
    told = dict(line.split(" ", 1) for line in lines)
    if chosen == "cupy" and told["cupy"] != "runs":
        pytest.skip(f"cupy {told['cupy']}")
    assert last == f"chosen: {chosen}"
    for name in refused:
        reason = REASONS[name] if name in missing else "needs a C compiler"
        assert reason in told[name]
    assert told[chosen] == told["torch"] == "runs"


def test_cpu_without_all_of_them(tmp_path: Path) -> None:
    """A CPU needs none of them."""
    *lines, last = run_without("cpu", "cupy,triton,compiler,extension", tmp_path)
    told = dict(line.split(" ", 1) for line in lines)
    assert last == "chosen: torch"
    assert told["torch"] == "runs"
    assert {name for name, state in told.items() if state == "runs"} == {"torch"}
