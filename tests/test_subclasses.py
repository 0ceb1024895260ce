"""Buffers of other classes than torch.Tensor: rows have the class that ``b[indices]`` gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import Target

import multigather


class Plain(torch.Tensor):
    """Keeps its class in every operation."""


class Deaf(torch.Tensor):
    """Its results are plain tensors."""

    __torch_function__ = torch._C._disabled_torch_function_impl


class Counting(torch.Tensor):
    """Sees every operation."""

    seen: list[Any] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})


class Refusing(torch.Tensor):
    """Does not let itself be indexed."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__getitem__:
            raise PermissionError("not to be indexed")
        return super().__torch_function__(func, types, args, kwargs or {})


class Doubling(torch.Tensor):
    """Has an indexing of its own."""

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(key) * 2


KINDS = (Plain, Deaf, Counting, Doubling)


def rows_of(target: Target, buffer: torch.Tensor, indices: torch.Tensor, way: str) -> Any:
    other = torch.arange(5, device=target.device)
    if way == "plan":
        plan = multigather.plan(other, {"a": buffer}, backend=target.backend)
        results = plan(indices)
    else:
        results = multigather.gather(indices, other, {"a": buffer}, backend=target.backend)
    assert type(results[0]) is torch.Tensor
    assert torch.equal(results[0], other[indices.as_subclass(torch.Tensor)])
    return results[1]["a"]


@pytest.mark.parametrize("way", ["gather", "plan"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_class_and_values(target: Target, kind: type, way: str) -> None:
    buffer = torch.arange(10.0, device=target.device).view(5, 2).as_subclass(kind)
    indices = torch.tensor([[3, -1], [0, 0]], device=target.device)
    for _ in range(3):
        found, correct = rows_of(target, buffer, indices, way), buffer[indices]
        assert type(found) is type(correct)
        assert torch.equal(found.as_subclass(torch.Tensor), correct.as_subclass(torch.Tensor))


def test_one_that_sees_operations_sees_the_indexing(target: Target) -> None:
    Counting.seen.clear()
    buffer = torch.arange(5.0, device=target.device).as_subclass(Counting)
    rows_of(target, buffer, torch.tensor([1], device=target.device), "gather")
    assert torch.Tensor.__getitem__ in Counting.seen


@pytest.mark.parametrize("way", ["gather", "plan"])
def test_one_that_refuses_refuses(target: Target, way: str) -> None:
    buffer = torch.arange(5.0, device=target.device).as_subclass(Refusing)
    with pytest.raises(PermissionError, match="not to be indexed"):
        rows_of(target, buffer, torch.tensor([1], device=target.device), way)


@pytest.mark.parametrize("kind", [Plain, Deaf, Counting], ids=lambda kind: kind.__name__)
def test_bounds_modes(target: Target, kind: type) -> None:
    values = torch.arange(1.0, 6.0, device=target.device)
    buffer = values.as_subclass(kind)
    indices = torch.tensor([4, -1, 9], device=target.device)
    options: Any = {"backend": target.backend}
    for bounds in ("fill", "clip"):
        (found,) = multigather.gather(indices, buffer, bounds=bounds, **options)
        (correct,) = multigather.gather(indices, values, bounds=bounds, **options)
        assert torch.equal(found.as_subclass(torch.Tensor), correct)
    with pytest.raises(IndexError, match=r"is 9, out of range for bufs\[0\] with 5 rows"):
        multigather.gather(indices, buffer, **options)
        multigather.check()


def test_gradients(target: Target) -> None:
    indices = torch.tensor([1, 1, 3], device=target.device)
    for kind in KINDS:
        leaf = torch.arange(5.0, device=target.device, requires_grad=True)
        gradients = []
        for gather in (multigather.gather, lambda indices, buffer, **_: (buffer[indices],)):
            (rows,) = gather(indices, leaf.as_subclass(kind), backend=target.backend)
            total = (rows.as_subclass(torch.Tensor) ** 2).sum()
            gradients += torch.autograd.grad(total, leaf)
        assert torch.equal(*(each.as_subclass(torch.Tensor) for each in gradients))


def test_outputs(target: Target) -> None:
    """Rows of a class can be written to; not those of a class with its own idea of rows."""
    values = torch.arange(5.0, device=target.device)
    indices = torch.tensor([4, 0], device=target.device)
    for make in (lambda out: out, lambda out: out.as_subclass(Plain)):
        out = make(torch.zeros(2, device=target.device))
        for _ in range(3):
            (given,) = multigather.gather(
                indices, values.as_subclass(Plain), out=(out,), backend=target.backend
            )
            assert given is out
            assert out.tolist() == [4, 0]
            out.zero_()
    with pytest.raises(ValueError, match="a class that decides itself what indexing means"):
        multigather.gather(
            indices, values.as_subclass(Counting), out=(out,), backend=target.backend
        )
    assert out.tolist() == [0, 0]


def test_indices_of_another_class(target: Target) -> None:
    buffer = torch.arange(5.0, device=target.device)
    indices = torch.tensor([4, 0], device=target.device).as_subclass(Plain)
    for _ in range(3):
        (rows,) = multigather.gather(indices, buffer, backend=target.backend)
        assert type(rows) is torch.Tensor
        assert rows.tolist() == [4, 0]


def test_parameters_give_tensors(target: Target) -> None:
    buffer = torch.nn.Parameter(torch.arange(5.0, device=target.device))
    indices = torch.tensor([4, 0], device=target.device)
    for _ in range(3):
        with torch.no_grad():
            (rows,) = multigather.gather(indices, buffer, backend=target.backend)
        assert type(rows) is torch.Tensor
        assert rows.tolist() == [4, 0]


def test_memory_mapped_tensors_are_gathered(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensordict's are plain memory: rows are tensors, and come from the kernel."""
    tensordict = pytest.importorskip("tensordict")
    if target.device != "cpu":
        pytest.skip("files are on the CPU")
    mapped = tensordict.MemoryMappedTensor.from_tensor(torch.arange(10.0).view(5, 2))
    indices = torch.tensor([4, 0])

    def indexed(*arguments: Any) -> None:
        raise AssertionError("indexed buffer by buffer")

    monkeypatch.setattr(tensordict.MemoryMappedTensor, "__getitem__", indexed)
    for _ in range(2):
        (rows,) = multigather.gather(indices, mapped, backend=target.backend)
        assert type(rows) is torch.Tensor
        assert rows.tolist() == [[8, 9], [0, 1]]
