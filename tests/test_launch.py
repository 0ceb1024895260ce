"""The ways to launch a compiled function: every rung of the ladder, and what happens without."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
from cases import Slab, assert_gathered
from conftest import HAVE_GPU

import multigather
from multigather import api, launch, native, shortcut
from multigather.backends import _cupy, _triton
from multigather.backends.base import KernelRunner, new_destination
from multigather.request import Request, Site, field_of


def gather_twice(backend: str) -> None:
    """A first and a repeated call, checked."""
    api.forget()
    slabs = [Slab(9, (5,), torch.float32, "cuda"), Slab(9, (), torch.uint8, "cuda", offset=1)]
    indices = torch.tensor([8, 0, -1], device="cuda")
    for _ in range(3):
        outputs = multigather.gather(indices, *(slab.tensor for slab in slabs), backend=backend)
        for output, slab in zip(outputs, slabs, strict=True):
            assert_gathered(output, indices, slab.tensor)
    api.forget()


LAYOUTS = {
    "one": [torch.empty(9, 3)],
    "decode": [torch.empty(9, 8), torch.empty(9), torch.empty(9, 4096, dtype=torch.bfloat16)],
    "odd": [torch.empty(9, width, dtype=torch.uint8) for width in (0, 1, 47, 333, 5000)],
    "many": [torch.empty(9, 1 + 37 * number % 100) for number in range(100)],
    "packed": [*torch.empty(9, 8).unbind(1), torch.empty(9, 33)],
    "all packed": [*torch.empty(9, 8).unbind(1)],
}


@pytest.mark.parametrize("config", _cupy.CONFIGS[::3], ids=lambda config: config.describe())
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_scaled_launch_is_the_one_that_would_be_made(
    layout: str, config: _cupy.CudaConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last byte, up to both ends of its range; and beyond them others are made."""
    functions: dict[Any, int] = {}
    monkeypatch.setattr(
        _cupy, "_load", lambda *key: functions.setdefault(key[0], len(functions) + 1)
    )
    fields = tuple(map(field_of, LAYOUTS[layout]))
    device = torch.device("cuda", 0)
    request = Request(device, False, torch.int64, 0, "clip", fields)
    site = Site(3, tuple(range(len(fields))), tuple(f"bufs[{k}]" for k in range(len(fields))))
    order = tuple(KernelRunner.order(request))
    fresh = [new_destination(field) for field in fields]

    def made(count: int) -> launch.Launch:
        return _cupy._launch_of(
            _cupy.CudaBackend(), request, config, site, 480, order, count, 1, fresh
        )

    ranges = set()
    for base in map(made, (5, _cupy.PACKED_FROM + 7)):
        least, most = base.scale[:2]
        ranges.add((least, most))
        for count in (least, 100, 16_383, 16_384, 1_000_003, most):
            if not least <= count <= most:
                continue
            wanted, scaled = made(count), base.at(count)
            for fact in ("function", "grid", "threads", "parameters", "places", "offsets", "scale"):
                assert getattr(wanted, fact) == getattr(scaled, fact), (fact, count)
    assert len(ranges) == 1 + ("packed" in layout)
    assert min(least for least, _ in ranges) == 1
    # Where unit numbers need 64 bits the kernel is another, made for one number at a time.
    units = max(
        _cupy.work_of(each, to, config).parts for each, to in zip(fields, fresh, strict=True)
    )
    wide = made(_cupy.WIDE_FROM // units + 1) if layout == "one" else None
    assert wide is None or (wide.scale is None and wide.function != made(5).function)


def test_a_runner_scales_what_it_has_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """One launch is made for each layout of outputs; with other numbers of indices it is scaled."""
    monkeypatch.setattr(_cupy, "_load", lambda *key: 1)
    fields = tuple(map(field_of, LAYOUTS["decode"]))
    request = Request(torch.device("cuda", 0), False, torch.int64, 0, "clip", fields)
    site = Site(3, (0, 1, 2), ("bufs[0]", "bufs[1]", "bufs[2]"))
    calls = []

    def make(*arguments: Any) -> Any:
        calls.append(arguments[1])
        return _cupy._launch_of(
            _cupy.CudaBackend(), request, _cupy.CudaConfig(), site, 480, *arguments
        )

    runner = KernelRunner(request, 480, make)
    for count in (5, 6, 1000, 5):
        runner.compile(count)
        assert runner.launch(count).grid == make((2, 0, 1), count, 1, runner._fresh).grid
    assert calls == [5, 5, 6, 1000, 5]


@pytest.mark.gpu
@pytest.mark.skipif(not HAVE_GPU, reason="torch sees no CUDA device")
@pytest.mark.parametrize("backend", ["cupy", "triton"])
def test_a_number_of_indices_that_changes(backend: str) -> None:
    """Every call has another, and each is right: by gather, by a plan, and into outputs."""
    slabs = [Slab(999, (5,), torch.float32, "cuda"), Slab(999, (), torch.uint8, "cuda", offset=1)]
    buffers = [slab.tensor for slab in slabs]
    plan = multigather.plan(*buffers, backend=backend)
    for count in (*range(1, 70), *range(900, 1100, 7), 40_000, 40_001, 39_999):
        indices = torch.arange(count, device="cuda") * 7 % 999
        for outputs in (plan(indices), multigather.gather(indices, *buffers, backend=backend)):
            for output, slab in zip(outputs, slabs, strict=True):
                assert_gathered(output, indices, slab.tensor)
    multigather.check()


@pytest.mark.gpu
@pytest.mark.skipif(not HAVE_GPU, reason="torch sees no CUDA device")
@pytest.mark.parametrize("backend", ["cupy", "triton"])
@pytest.mark.parametrize("rung", launch.LADDER, ids=lambda rung: rung.__name__)
def test_every_rung_launches(rung: Any, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy's driver call, cuda.bindings and ctypes launch both backends' functions."""
    try:
        function = rung()
    except ImportError as error:
        pytest.skip(str(error))
    calls = []

    def counted(*arguments: int) -> None:
        calls.append(arguments)
        function(*arguments)

    monkeypatch.setattr(launch, "launch_function", lambda: counted)
    monkeypatch.setattr(shortcut, "launch_function", lambda: counted)
    with native.without():
        gather_twice(backend)
    assert len(calls) == 3


@pytest.mark.gpu
@pytest.mark.skipif(not HAVE_GPU, reason="torch sees no CUDA device")
@pytest.mark.skipif(native.extension is None, reason=native.description)
@pytest.mark.parametrize("backend", ["cupy", "triton"])
def test_the_extension_launches_repeated_calls(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the first call no rung of the ladder is used any more, by gather, plan or out=."""
    function, calls = launch.launch_function(), []

    def counted(*arguments: int) -> None:
        calls.append(arguments)
        function(*arguments)

    monkeypatch.setattr(launch, "launch_function", lambda: counted)
    gather_twice(backend)
    assert len(calls) == 1
    slab = Slab(9, (5,), torch.float32, "cuda")
    plan = multigather.plan(slab.tensor, backend=backend)
    indices = torch.tensor([8, 0, -1], device="cuda")
    out = plan(indices)
    plan(indices, out=out)
    calls.clear()
    for _ in range(3):
        out[0].zero_()
        assert_gathered(plan(indices)[0], indices, slab.tensor)
        assert_gathered(plan(indices, out=out)[0], indices, slab.tensor)
    assert not calls


@pytest.mark.gpu
@pytest.mark.skipif(not HAVE_GPU, reason="torch sees no CUDA device")
@pytest.mark.parametrize("rung", launch.LADDER, ids=lambda rung: rung.__name__)
def test_a_refused_launch_is_an_error(rung: Any) -> None:
    """The driver's refusal raises and names its error: 4096 threads are more than a block has."""
    try:
        function = rung()
    except ImportError as error:
        pytest.skip(str(error))
    slab = Slab(9, (5,), torch.float32, "cuda")
    indices = torch.tensor([8], device="cuda")
    api.forget()
    multigather.gather(indices, slab.tensor, backend="cupy")
    (known,) = api._shortcuts.values()
    prepared = known.executable.runners[0].launch(1)
    block = prepared.new_block()
    with pytest.raises(Exception, match="INVALID_VALUE"):
        function(prepared.function, 1, 1, 1, 4096, 1, 1, 0, 0, block.address, 0)
    gather_twice("cupy")


@pytest.mark.gpu
@pytest.mark.skipif(not HAVE_GPU, reason="torch sees no CUDA device")
@pytest.mark.parametrize("backend", ["cupy", "triton", "torch"])
def test_a_new_thread_can_gather(backend: str) -> None:
    """A thread that has made no CUDA call yet, into outputs that were made elsewhere."""
    slab = Slab(9, (5,), torch.float32, "cuda")
    indices = torch.tensor([8, 2], device="cuda")
    out = [torch.empty(2, 5, device="cuda")]
    plan = multigather.plan(slab.tensor, backend=backend)
    for _ in range(2):
        plan(indices, out=out)
    out[0].zero_()
    torch.cuda.synchronize()
    failures: list[BaseException] = []

    def work() -> None:
        try:
            plan(indices, out=out)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not failures
    assert_gathered(out[0], indices, slab.tensor)


@pytest.mark.gpu
@pytest.mark.skipif(not HAVE_GPU, reason="torch sees no CUDA device")
def test_triton_launches_what_the_driver_call_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel without the private parts that are needed goes through Triton's launcher."""
    monkeypatch.setattr(_triton, "driver_facts", lambda compiled: None)
    gather_twice("triton")


@pytest.mark.gpu
@pytest.mark.skipif(not HAVE_GPU, reason="torch sees no CUDA device")
def test_without_torchs_fast_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch has no fast allocation, repeated calls take the long way."""
    monkeypatch.setattr(shortcut, "fast_allocation", lambda device: None)
    gather_twice("cupy")


def test_no_driver_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any rung the error says what was looked for."""

    def missing() -> Any:
        raise ImportError("no such module")

    monkeypatch.setattr(launch, "LADDER", (missing, missing))
    launch.launch_function.cache_clear()
    try:
        with pytest.raises(launch.LaunchError, match=r"CuPy, cuda.bindings nor libcuda.so.1"):
            launch.launch_function()
    finally:
        launch.launch_function.cache_clear()


@pytest.mark.gpu
@pytest.mark.skipif(not HAVE_GPU, reason="torch sees no CUDA device")
@pytest.mark.parametrize("backend", ["cupy", "triton", "torch"])
def test_synchronous_mode_raises_at_the_call(backend: str) -> None:
    """With MULTIGATHER_SYNC=1 a bad index on a GPU raises at the call that has it."""
    program = (
        "import torch, multigather\n"
        "buffer = torch.zeros(9, 5, device='cuda')\n"
        "for bad in (9, 12):\n"
        "    try:\n"
        "        index = torch.tensor([0, bad], device='cuda')\n"
        f"        multigather.gather(index, buffer, backend={backend!r})\n"
        "        print('no error')\n"
        "    except IndexError as error:\n"
        "        print(error)\n"
        "multigather.check()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "MULTIGATHER_SYNC": "1"},
    )
    first, second = done.stdout.splitlines()
    assert "is 9, out of range for bufs[0] with 9 rows" in first
    assert "is 12, out of range for bufs[0] with 9 rows" in second
