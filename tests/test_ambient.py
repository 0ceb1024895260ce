"""Defaults and modes of torch that a program has set: no tensor of ours depends on them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from cases import assert_gathered
from conftest import Target
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import multigather
from multigather import api, faults


class FunctionMode(TorchFunctionMode):
    """Passes everything on."""

    def __torch_function__(
        self, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        return function(*arguments, **(options or {}))


class DispatchMode(TorchDispatchMode):
    """Passes everything on."""

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        return function(*arguments, **(options or {}))


@contextlib.contextmanager
def default_device(device: str) -> Iterator[None]:
    before = torch.get_default_device()
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(before if before.type != "cpu" else None)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


# Without a GPU what is made on a default of "cuda" fails; that is what shows it.
MODES: dict[str, Any] = {
    "device meta": lambda: torch.device("meta"),
    "device cuda": lambda: torch.device("cuda"),
    "default device meta": lambda: default_device("meta"),
    "default device cuda": lambda: default_device("cuda"),
    "default float64": lambda: default_dtype(torch.float64),
    "default float16": lambda: default_dtype(torch.float16),
    "inference": torch.inference_mode,
    "no grad": torch.no_grad,
    "deterministic": lambda: deterministic(),
    "function mode": FunctionMode,
    "dispatch mode": DispatchMode,
}


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> Iterator[AbstractContextManager[Any]]:
    """A mode to enter; nothing has been made before it, or stays that was made in it."""
    api.forget()
    yield MODES[request.param]()
    api.forget()


@pytest.fixture
def new_boards(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Boards that kernels write to stay: launches have their addresses."""
    if target.device == "cpu" and target.backend != "cupy":
        monkeypatch.setattr(faults, "_boards", {})


@pytest.mark.usefixtures("new_boards")
def test_every_way_inside(target: Target, mode: AbstractContextManager[Any]) -> None:
    """The long way and the short ones, and after the mode as before it."""
    options: dict[str, Any] = {"backend": target.backend}
    device = torch.device(target.device)
    buffers = [torch.arange(30.0, device=device).view(10, 3), torch.arange(10, device=device)]
    leaf = torch.ones(10, 3, device=device, requires_grad=True)
    indices = torch.tensor([3, -1, 3], device=device)
    square = torch.tensor([[3, -1], [3, 0]], device=device)
    far = torch.tensor([0, 10], device=device)
    outs = (torch.empty(3, 3, device=device), torch.empty(3, dtype=torch.int64, device=device))
    plans = []

    def every_way() -> None:
        plans.append(multigather.plan(*buffers, **options))
        for _ in range(4):
            found = [
                multigather.gather(indices, *buffers, **options),
                multigather.gather(indices, *buffers, out=outs, **options),
                multigather.gather(indices, {"a": buffers[0]}, buffers[1], **options),
                *(plan(indices) for plan in plans),
                plans[-1](indices, out=outs),
            ]
            found[2] = (found[2][0]["a"], found[2][1])
            for results in found:
                for rows, buffer in zip(results, buffers, strict=True):
                    assert_gathered(rows, indices, buffer)
            (rows,) = multigather.gather(square, buffers[0], bounds="fill", **options)
            assert_gathered(rows, square, buffers[0], "fill")
            with pytest.raises(IndexError, match="is 10, out of range for bufs"):
                multigather.gather(far, *buffers, **options)
                multigather.check()
            (rows,) = multigather.gather(indices, leaf, **options)
            if rows.requires_grad:
                (gradient,) = torch.autograd.grad(rows.sum(), leaf)
                assert gradient.dtype == torch.float32 and gradient.device.type == device.type
                assert gradient[:, 0].tolist() == [0, 0, 0, 2, 0, 0, 0, 0, 0, 1]
        assert multigather.explain(indices, *buffers, **options).picks
        packed = multigather.pack(*buffers)
        for rows, buffer in zip(
            multigather.gather(indices, *packed, **options), buffers, strict=True
        ):
            assert_gathered(rows, indices, buffer)

    with mode:
        every_way()
    every_way()


def test_numpy_inside(mode: AbstractContextManager[Any]) -> None:
    numbers = torch.arange(12).view(4, 3).numpy()
    places = torch.tensor([3, 0]).numpy()
    with mode:
        for _ in range(3):
            (rows,) = multigather.gather(places, numbers)
            assert rows.tolist() == numbers[places].tolist()


def test_a_slab_is_where_it_was_asked_for(mode: AbstractContextManager[Any], device: str) -> None:
    with mode:
        fields = multigather.alloc(4, {"a": torch.float32, "b": (torch.int16, 3)}, device=device)
    assert [each.device.type for each in fields.values()] == [device] * 2
    assert [each.dtype for each in fields.values()] == [torch.float32, torch.int16]
