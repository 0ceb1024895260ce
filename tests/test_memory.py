"""Tensors whose memory is gone, or lies where their type may not: copied right or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import INTEGERS, assert_gathered, raw_bytes
from conftest import Target
from torch._subclasses import FakeTensorMode

import multigather


def cut(tensor: torch.Tensor, left: int) -> None:
    """Free a tensor's storage but for so many bytes; the tensor keeps its shape."""
    tensor.untyped_storage().resize_(left)


def misaligned(tensor: torch.Tensor, by: int) -> torch.Tensor:
    """The same elements at an address that misses a multiple of 16 by so many bytes."""
    size = tensor.numel() * tensor.element_size()
    memory = torch.zeros(size + 32, dtype=torch.uint8, device=tensor.device)
    start = memory.data_ptr() + by
    construct: Any = torch._C._construct_storage_from_data_pointer
    storage = construct(start, tensor.device, size)
    moved = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
        storage, 0, tensor.shape, tensor.stride()
    )
    as_bytes = tensor.contiguous().view(-1).view(torch.uint8) if size else tensor.view(torch.uint8)
    memory[by : by + size] = as_bytes
    moved.memory = memory  # type: ignore[attr-defined]  # kept alive
    assert moved.data_ptr() % 16 == by
    return moved


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A view that a GPU may load from any address."""
    return tensor.unsqueeze(-1).view(torch.uint8)


class Call:
    """A gather of two buffers, known from some calls before, of which a tensor loses its memory."""

    def __init__(self, target: Target, way: str, shape: tuple[int, ...], known: int) -> None:
        self.target, self.way = target, way
        self.buffer = torch.arange(24.0, device=target.device).view(6, 4)
        self.other = torch.arange(6, device=target.device)
        self.indices = torch.tensor([5, 0, -1, 2], device=target.device).view(shape)
        self.outs = tuple(
            torch.zeros(*shape, *each.shape[1:], dtype=each.dtype, device=target.device)
            for each in (self.buffer, self.other)
        )
        self.plan = multigather.plan(self.buffer, self.other, backend=target.backend)
        for _ in range(known):
            self()

    def __call__(self) -> Any:
        out = self.outs if "out" in self.way else None
        if "plan" in self.way:
            return self.plan(self.indices, out=out)
        return multigather.gather(
            self.indices, self.buffer, self.other, out=out, backend=self.target.backend
        )


@pytest.mark.parametrize("known", [0, 1, 4])
@pytest.mark.parametrize("left", [0, 8])
@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=str)
@pytest.mark.parametrize("way", ["gather", "plan", "gather out", "plan out"])
@pytest.mark.parametrize("what", ["buffer", "other", "indices", "out"])
def test_freed_storage(
    target: Target, what: str, way: str, shape: tuple[int, ...], left: int, known: int
) -> None:
    """Of any argument, freed or cut, before the first call and after the fourth one."""
    if what == "out" and "out" not in way:
        pytest.skip("no outputs")
    call = Call(target, way, shape, known)
    victim = call.outs[0] if what == "out" else getattr(call, what)
    before = [out.clone() for out in call.outs]
    cut(victim, left)
    name = {"buffer": r"bufs\[0\]", "other": r"bufs\[1\]", "out": r"out\[0\]"}.get(what, "indices")
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"{name} has no memory|has changed"):
            call()
    for out, old in zip(call.outs, before, strict=True):
        if out is not victim:
            assert torch.equal(out, old)
    # The same call works again once there is memory, if a plan's is where it was.
    fresh = Call(target, way, shape, 0)
    for found, buffer in zip(fresh(), (fresh.buffer, fresh.other), strict=True):
        assert_gathered(found, fresh.indices, buffer)


def test_a_view_into_freed_storage(target: Target) -> None:
    """One that does not begin where its storage does has an address even without memory."""
    whole = torch.arange(24.0, device=target.device)
    view = whole[8:20].view(3, 4)
    indices = torch.tensor([2, 0], device=target.device)
    for _ in range(3):
        multigather.gather(indices, view, backend=target.backend)
    cut(whole, 0)
    with pytest.raises(ValueError, match=r"bufs\[0\] has no memory"):
        multigather.gather(indices, view, backend=target.backend)


def test_storage_that_is_filled_again(target: Target) -> None:
    buffer = torch.arange(8.0, device=target.device)
    indices = torch.tensor([7, 1], device=target.device)
    for _ in range(4):
        (rows,) = multigather.gather(indices, buffer, backend=target.backend)
        assert rows.tolist() == [7, 1]
        cut(buffer, 0)
        with pytest.raises(ValueError, match="no memory"):
            multigather.gather(indices, buffer, backend=target.backend)
        cut(buffer, 32)
        buffer.copy_(torch.arange(8.0))


def test_packing_freed_storage(device: str) -> None:
    buffer = torch.ones(4, device=device)
    cut(buffer, 4)
    with pytest.raises(ValueError, match=r"bufs\[1\] has no memory"):
        multigather.pack(torch.ones(4, device=device), buffer)


def test_gradients_of_freed_storage(target: Target) -> None:
    buffer = torch.ones(4, device=target.device, requires_grad=True)
    indices = torch.tensor([1], device=target.device)
    for _ in range(3):
        multigather.gather(indices, buffer, backend=target.backend)
    cut(buffer, 0)
    with pytest.raises(ValueError, match=r"bufs\[0\] has no memory"):
        multigather.gather(indices, buffer, backend=target.backend)


@pytest.mark.parametrize("by", [1, 2, 4, 8])
@pytest.mark.parametrize(
    "dtype", [torch.int16, torch.float32, torch.float64, torch.complex128, torch.bool], ids=str
)
def test_misaligned_buffers_and_outputs(target: Target, dtype: torch.dtype, by: int) -> None:
    """Each by itself and both; rows of several shapes, among aligned ones, from known layouts."""
    indices = torch.tensor([[3, 0], [-1, 2]], device=target.device)
    for shape in ((5,), (5, 3), (5, 2, 4)):
        plain = (torch.arange(torch.Size(shape).numel(), device=target.device) % 7).view(shape)
        plain = plain.to(dtype)
        moved = misaligned(plain, by)
        for _ in range(3):
            for buffer in (plain, moved):
                (rows,) = multigather.gather(indices, buffer, backend=target.backend)
                assert_gathered(rows, indices, plain)
                for make in (lambda out: out, lambda out: misaligned(out, by)):
                    out = make(torch.zeros_like(rows))
                    multigather.gather(indices, buffer, out=(out,), backend=target.backend)
                    assert (raw_bytes(as_bytes(out)) == raw_bytes(as_bytes(rows))).all()
                (filled,) = multigather.gather(
                    torch.tensor([1, 9], device=target.device), buffer, bounds="fill",
                    backend=target.backend,
                )  # fmt: skip
                assert not filled[1].any()


@pytest.mark.parametrize("by", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint32], ids=str)
def test_misaligned_indices(target: Target, dtype: torch.dtype, by: int) -> None:
    """Contiguous and strided ones, before and after aligned ones of the same layout."""
    if by % dtype.itemsize == 0:
        pytest.skip("aligned")
    buffer = torch.arange(20.0, device=target.device).view(10, 2)
    values = [9, 0, 3, 3, 7, 1]
    aligned = torch.tensor(values, device=target.device).view(INTEGERS[8]).to(dtype)
    moved = misaligned(aligned, by)
    plan = multigather.plan(buffer, backend=target.backend)
    out = torch.zeros(6, 2, device=target.device)
    for _ in range(3):
        for indices in (aligned, moved):
            for found in (
                multigather.gather(indices, buffer, backend=target.backend)[0],
                plan(indices)[0],
                multigather.gather(indices, buffer, out=(out,), backend=target.backend)[0],
            ):
                assert torch.equal(found, buffer[values])
            (some,) = multigather.gather(indices[::2], buffer, backend=target.backend)
            assert torch.equal(some, buffer[values[::2]])
            (square,) = multigather.gather(indices.view(2, 3), buffer, backend=target.backend)
            assert torch.equal(square, buffer[values].view(2, 3, 2))


@pytest.mark.parametrize("lazy", [torch.conj, torch._neg_view], ids=["conj", "neg"])
def test_misaligned_outputs_of_lazy_buffers(target: Target, lazy: Any) -> None:
    values = torch.arange(10, device=target.device).view(5, 2).to(torch.complex64) * (1 + 2j)
    indices = torch.tensor([3, 0], device=target.device)
    for by in (0, 1, 4):
        out = misaligned(torch.zeros(2, 2, dtype=torch.complex64, device=target.device), by)
        multigather.gather(indices, lazy(values), out=(out,), backend=target.backend)
        found = as_bytes(out).clone().view(out.dtype).squeeze(-1)
        assert torch.equal(found, lazy(values)[indices])


def test_misaligned_tensors_in_transforms(target: Target) -> None:
    """Where torch's own operations look at the indices and join the buffers of a batch."""
    buffer = torch.arange(20.0, device=target.device).view(2, 5, 2)
    indices = torch.tensor([[4, 0, -1], [1, 1, 2]], device=target.device)
    moved, odd = misaligned(buffer, 1), misaligned(indices, 1)

    def gather(indices: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
        return multigather.gather(indices, buffer, backend=target.backend)[0]

    for dims in ((0, 0), (None, 0), (0, None)):
        plain, other = [], []
        for each, all_moved, dim in zip((indices, buffer), (odd, moved), dims, strict=True):
            plain.append(each[0] if dim is None else each)
            other.append(misaligned(each[0].clone(), 1) if dim is None else all_moved)
        found = torch.func.vmap(gather, dims)(*other)
        assert torch.equal(found, torch.func.vmap(gather, dims)(*plain))
    leaf = misaligned(buffer[0].clone(), 1).requires_grad_()
    for _ in range(3):
        (gradient,) = torch.autograd.grad(gather(misaligned(indices[1], 1), leaf).sum(), leaf)
        assert gradient[:, 0].tolist() == [0, 2, 1, 0, 0]


def test_packing_misaligned_buffers(device: str) -> None:
    buffers = [torch.arange(4.0, device=device), torch.arange(8, device=device).view(4, 2)]
    packed = multigather.pack(*(misaligned(each, 1) for each in buffers))
    assert all(map(torch.equal, packed, buffers))


def test_misaligned_gradients(target: Target) -> None:
    """A gradient that a hook hands over, at an odd address."""
    buffer = torch.zeros(4, 3, device=target.device, requires_grad=True)
    indices = torch.tensor([1, 1, 2], device=target.device)
    for by in (0, 1, 2):
        (rows,) = multigather.gather(indices, buffer, backend=target.backend)
        rows.register_hook(lambda gradient, by=by: misaligned(gradient.contiguous(), by))
        (gradient,) = torch.autograd.grad((rows * 2).sum(), buffer)
        assert gradient[:, 0].tolist() == [0, 4, 2, 0]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8], ids=str)
@pytest.mark.parametrize("shape", [(3,), (3, 1), ()], ids=str)
def test_negative_views_as_indices(
    target: Target, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    """The values count, not the bytes behind a lazy negation."""
    buffer = torch.arange(5.0, device=target.device)
    stored = torch.tensor([1, 5, -2], dtype=dtype, device=target.device)
    stored = stored.view(shape) if shape else stored[0]
    for way in (multigather.gather, lambda i, b, **o: multigather.plan(b, **o)(i)):
        for _ in range(2):
            (rows,) = way(torch._neg_view(stored), buffer, backend=target.backend)
            assert torch.equal(rows, buffer[-stored.long()])
            (rows,) = way(stored % 5, buffer, backend=target.backend)
            assert torch.equal(rows, buffer[(stored % 5).long()])


class Wrapper(torch.Tensor):
    """A tensor without memory that stands for another one."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined,no-any-return]
            cls, inner.shape, dtype=inner.dtype, device=inner.device
        )

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError("nothing may run")


def fake(tensor: torch.Tensor) -> torch.Tensor:
    return FakeTensorMode().from_tensor(tensor)


WITHOUT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "fake": fake,
    "wrapper": Wrapper,
    "meta": lambda tensor: tensor.to("meta"),
}


@pytest.mark.parametrize("make", WITHOUT.values(), ids=WITHOUT)
@pytest.mark.parametrize("where", ["indices", "buffer", "out", "plan"])
def test_tensors_that_never_had_memory(
    target: Target, where: str, make: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Among real ones they are refused by name, and without a warning."""
    if where == "plan" and make is WITHOUT["meta"]:
        pytest.skip("there are gathers on the meta device")
    indices = torch.tensor([2, 0], device=target.device)
    buffer = torch.arange(3.0, device=target.device)
    out = torch.zeros(2, device=target.device)
    names = {"indices": "indices", "out": r"out\[0\]"}
    for _ in range(2):
        multigather.gather(indices, buffer, out=(out,), backend=target.backend)
        multigather.gather(indices, buffer, backend=target.backend)
        with pytest.raises((TypeError, ValueError), match=names.get(where, r"bufs\[0\]|buffers")):
            if where == "indices":
                multigather.gather(make(indices), buffer, backend=target.backend)
            elif where == "buffer":
                multigather.gather(indices, make(buffer), backend=target.backend)
            elif where == "plan":
                multigather.plan(make(buffer), backend=target.backend)(indices)
            else:
                multigather.gather(indices, buffer, out=(make(out),), backend=target.backend)


def test_zeros_without_memory(target: Target) -> None:
    """Autograd's zeros that have none are zeros."""
    indices = torch.tensor([2, 0], device=target.device)
    for _ in range(2):
        zeros = torch._efficientzerotensor(3, 2, device=target.device)
        (rows,) = multigather.gather(indices, zeros, backend=target.backend)
        assert torch.equal(rows, torch.zeros(2, 2, device=target.device))
