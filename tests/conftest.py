"""Where a behaviour is tested: every backend on a CPU, and on the GPU if there is one.

Without a GPU the Triton kernel runs in Triton's interpreter and the CUDA C kernel as C++ on the
CPU (cuda_host). With a GPU, ``pytest -m gpu`` runs the same tests on the three real backends.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

# What was measured on this machine must not decide what the tests run; those of tuning say so.
os.environ["MULTIGATHER_TUNING"] = "off"

HAVE_GPU = torch.cuda.is_available()
# Triton decides when a kernel is imported, for the whole process.
if not HAVE_GPU:
    os.environ["TRITON_INTERPRET"] = "1"

import pytest

import multigather
from multigather import api, autograd, dispatch

with contextlib.suppress(ImportError):
    import hypothesis

    # How long an example takes says how busy the machine is.
    hypothesis.settings.register_profile(
        "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
    )
    hypothesis.settings.load_profile("any machine")


@dataclass(frozen=True)
class Target:
    """One backend on one device.

    Attributes:
        name: for test ids.
        device: device of the buffers.
        backend: value for ``backend=``.
    """

    name: str
    device: str
    backend: str


CPU_TARGETS = [
    Target("torch-cpu", "cpu", "torch"),
    Target("native-cpu", "cpu", "native"),
    Target("triton-interpreter", "cpu", "triton"),
    Target("cuda-source-on-cpu", "cpu", "cupy"),
]
GPU_TARGETS = [
    Target("torch-gpu", "cuda", "torch"),
    Target("triton-gpu", "cuda", "triton"),
    Target("cupy-gpu", "cuda", "cupy"),
]


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--default-device meta``: tests as in a program that has set a default device."""
    parser.addoption("--default-device", help="torch's default device inside multigather's calls")


def pytest_configure(config: pytest.Config) -> None:
    """Replace the public functions, before tests import them, by some with a default device.

    What the tests themselves make stays on the CPU. Without a GPU whatever is made on a default of
    "cuda" fails.
    """
    name = config.getoption("--default-device")
    if name is None:
        return

    def inside(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def called(*arguments: Any, **options: Any) -> Any:
            if torch.compiler.is_compiling():  # a graph has no place for a mode
                return function(*arguments, **options)
            with torch.device(name):
                return function(*arguments, **options)

        return called

    for function in ("gather", "plan", "explain", "check", "pack"):
        public = getattr(multigather, function)
        called = inside(public)
        setattr(multigather, function, called)
        setattr(sys.modules[public.__module__], function, called)
    for kind, method in ((multigather.Plan, "__call__"), (multigather.Plan, "explain")):
        setattr(kind, method, inside(getattr(kind, method)))
    for node in (autograd.Gather, autograd.ScatterAdd):
        node.backward = staticmethod(inside(node.backward))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give every test that asks for a target one run per target, of the module's kind."""
    if "target" in metafunc.fixturenames:
        backends = getattr(
            metafunc.module, "TARGET_BACKENDS", ("torch", "native", "triton", "cupy")
        )
        devices = getattr(metafunc.module, "TARGET_DEVICES", ("cpu", "cuda"))
        parameters = [
            pytest.param(
                target, id=target.name, marks=[pytest.mark.gpu] * (target.device == "cuda")
            )
            for target in CPU_TARGETS + GPU_TARGETS
            if target.backend in backends and target.device in devices
        ]
        metafunc.parametrize("target", parameters, indirect=True)


@pytest.fixture
def target(request: pytest.FixtureRequest) -> Iterator[Target]:
    """A target that works here; otherwise the test is skipped with the backend's own reason."""
    chosen: Target = request.param
    if chosen.device == "cuda" and not HAVE_GPU:
        pytest.skip("torch sees no CUDA device")
    if chosen.name == "triton-interpreter" and HAVE_GPU:
        pytest.skip("Triton's interpreter and its compiler cannot share a process")
    backends = dispatch.BACKENDS
    if chosen.name == "cuda-source-on-cpu":
        from cuda_host import HostCudaBackend

        dispatch.BACKENDS = (HostCudaBackend(), *backends[1:])
        api.forget()
    by_name = {backend.name: backend for backend in dispatch.BACKENDS}
    reasons = by_name[chosen.backend].unavailable()
    try:
        if reasons:
            pytest.skip(f"{chosen.backend}: {'; '.join(reasons)}")
        yield chosen
    finally:
        if dispatch.BACKENDS is not backends:
            dispatch.BACKENDS = backends
            api.forget()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """A device for what does not depend on the backend."""
    if request.param == "cuda" and not HAVE_GPU:
        pytest.skip("torch sees no CUDA device")
    return str(request.param)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Torch on one CPU thread: on a busy machine more of them mostly wait for one another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session", autouse=True)
def imported_is_no_garbage() -> None:
    """A look through all that torch has made takes a tenth of a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_garbage_in_a_capture() -> Iterator[None]:
    """Garbage goes between tests: to free a module or a graph spoils a capture under way."""
    if HAVE_GPU:
        gc.collect()
        gc.disable()
    yield
    gc.enable()


@pytest.fixture(autouse=True)
def no_pending_faults() -> Iterator[None]:
    """No test leaves a fault that the next one would raise."""
    yield
    if HAVE_GPU:
        from multigather import faults

        torch.cuda.synchronize()
        for device in list(faults._boards):
            faults.board_of(device).wait()
