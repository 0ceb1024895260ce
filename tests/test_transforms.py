"""Forward-mode AD and the transforms of torch.func: a gather is ``b[indices]`` to all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import Target
from torch import func
from torch.autograd import forward_ad, gradcheck, gradgradcheck

import multigather

ROWS, BATCH = 5, 3

Gather = Callable[..., tuple[torch.Tensor, ...]]


def gather_of(target: Target) -> Gather:
    """The gather under test."""
    return lambda indices, *bufs: multigather.gather(indices, *bufs, backend=target.backend)


def index(indices: torch.Tensor, *bufs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What it must equal."""
    # A batch of indices without a dimension is more than some versions of torch can index by.
    return tuple(buf[indices[None]].squeeze(0) for buf in bufs)


def floats(*shape: int, target: Target, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, dtype=torch.float64, generator=generator, device="cpu")
    return values.to(target.device)


def loss_of(gather: Gather, indices: torch.Tensor) -> Callable[..., torch.Tensor]:
    """A number with second derivatives in every buffer, and between them."""

    def loss(*bufs: torch.Tensor) -> torch.Tensor:
        a, b = gather(indices, *bufs)
        return (a**3).sum() * (b**2).sum()

    return loss


@pytest.fixture
def indices(target: Target) -> torch.Tensor:
    """Repeated and negative ones."""
    return torch.tensor([0, 3, 3, -1], device=target.device)


@pytest.fixture
def bufs(target: Target) -> tuple[torch.Tensor, torch.Tensor]:
    return floats(ROWS, target=target), floats(ROWS, 2, target=target, seed=1)


def test_gradcheck_of_every_kind(target: Target, indices: torch.Tensor, bufs: Any) -> None:
    """Forward and backward, of first and second order, batched."""
    gather = gather_of(target)
    inputs = tuple(buf.requires_grad_() for buf in bufs)

    def run(*bufs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return gather(indices, *bufs)

    assert gradcheck(
        run,
        inputs,
        check_forward_ad=True,
        check_batched_grad=True,
        check_batched_forward_grad=True,
        check_undefined_grad=True,
    )
    assert gradgradcheck(run, inputs, check_fwd_over_rev=True, check_batched_grad=True)


@pytest.mark.parametrize("bounds", ["raise", "fill", "clip", "unchecked"])
def test_tangents_of_dual_numbers(target: Target, bounds: str) -> None:
    """Repeatedly, some buffers without a tangent, one that can have none; a plan too."""
    a, b = floats(ROWS, target=target), floats(ROWS, 2, target=target)
    numbers = torch.arange(ROWS, device=target.device)
    tangent = floats(ROWS, target=target, seed=2)
    indices = torch.tensor([4, 1, 1], device=target.device)
    options: Any = {"bounds": bounds, "backend": target.backend}
    for _ in range(3):  # a layout that is known without tangents
        multigather.gather(indices, a, b, numbers, **options)
    for _ in range(3):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(a, tangent)
            plan = multigather.plan(dual, b, numbers, **options)
            for rows, others, picked in (
                multigather.gather(indices, dual, b, numbers, **options),
                plan(indices),
                plan(indices),
            ):
                found = forward_ad.unpack_dual(rows)
                assert torch.equal(found.primal, a[indices])
                assert torch.equal(found.tangent, tangent[indices])
                assert torch.equal(others, b[indices])
                missing = forward_ad.unpack_dual(others).tangent
                assert missing is None or not missing.any()
                assert torch.equal(picked, numbers[indices])


def test_tangents_where_an_index_selects_zeros(target: Target) -> None:
    a, tangent = floats(ROWS, 2, target=target), floats(ROWS, 2, target=target, seed=1)
    indices = torch.tensor([1, -1, 9], device=target.device)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(a, tangent)
        (rows,) = multigather.gather(indices, dual, bounds="fill", backend=target.backend)
        found = forward_ad.unpack_dual(rows).tangent
    assert torch.equal(found[0], tangent[1])
    assert not found[1:].any()


def test_tangents_and_gradients_at_once(target: Target, indices: torch.Tensor) -> None:
    a, tangent = floats(ROWS, target=target), floats(ROWS, target=target, seed=1)
    a.requires_grad_()
    tangent.requires_grad_()
    results = []
    for gather in (gather_of(target), index):
        with forward_ad.dual_level():
            (rows,) = gather(indices, forward_ad.make_dual(a, tangent) ** 2)
            total = forward_ad.unpack_dual(rows).tangent.sum()
        results.append(torch.autograd.grad(total, (a, tangent)))
    assert all(map(torch.equal, *results))


TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "grad": lambda f: func.grad(f, (0, 1)),
    "grad and value": lambda f: func.grad_and_value(f, (0, 1)),
    "vjp": lambda f: lambda *bufs: func.vjp(f, *bufs)[1](torch.ones_like(f(*bufs))),
    "jvp": lambda f: lambda *bufs: func.jvp(f, bufs, tuple(buf + 1 for buf in bufs)),
    "jacrev": lambda f: func.jacrev(f, (0, 1)),
    "jacfwd": lambda f: func.jacfwd(f, (0, 1)),
    "hessian": lambda f: func.hessian(f, (0, 1)),
    "jacfwd of jacfwd": lambda f: func.jacfwd(func.jacfwd(f, (0, 1)), (0, 1)),
    "jacrev of jacfwd": lambda f: func.jacrev(func.jacfwd(f, (0, 1)), (0, 1)),
    "jacrev of jacrev": lambda f: func.jacrev(func.jacrev(f, (0, 1)), (0, 1)),
    "linearize": lambda f: lambda *bufs: func.linearize(f, *bufs)[1](*bufs),
    "functionalize": func.functionalize,
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_derivatives(
    target: Target, indices: torch.Tensor, bufs: Any, transform: Callable[[Any], Any]
) -> None:
    """Every transform, at the first call and at a later one."""
    correct = transform(loss_of(index, indices))(*bufs)
    for _ in range(2):
        found = transform(loss_of(gather_of(target), indices))(*bufs)
        torch.testing.assert_close(found, correct)


@pytest.mark.parametrize("shape", [(), (2,), (2, 3)], ids=str)
@pytest.mark.parametrize("outer", [0, 1, None], ids=lambda dim: f"buffer batch {dim}")
@pytest.mark.parametrize("inner", [0, -1, None], ids=lambda dim: f"index batch {dim}")
def test_batches(
    target: Target, inner: int | None, outer: int | None, shape: tuple[int, ...]
) -> None:
    """Of indices, of buffers, of both, beside a buffer that is the same for all."""
    if inner is None and outer is None:
        pytest.skip("no batch")
    generator = torch.Generator().manual_seed(5)
    size = (BATCH, *shape) if inner is not None else shape
    indices = torch.randint(-ROWS, ROWS, size, generator=generator, device="cpu")
    indices = indices.to(target.device)
    buffers = floats(BATCH, ROWS, 2, target=target) if outer is not None else None
    shared = floats(ROWS, target=target, seed=3)
    buffer = floats(ROWS, 2, target=target) if buffers is None else buffers.movedim(0, outer or 0)
    dims = (None if inner is None else inner % (indices.dim()), outer, None)
    if inner is not None:
        indices = indices.movedim(0, inner)

    def loss(gather: Gather) -> Callable[..., torch.Tensor]:
        return lambda *all: sum((rows**3).sum() for rows in gather(*all))  # type: ignore[return-value]

    gather = gather_of(target)
    torch.testing.assert_close(
        func.vmap(gather, dims)(indices, buffer, shared),
        func.vmap(index, dims)(indices, buffer, shared),
    )
    for derive in (func.grad, func.jacfwd, func.hessian):
        found = func.vmap(derive(loss(gather), (1, 2)), dims)(indices, buffer, shared)
        correct = func.vmap(derive(loss(index), (1, 2)), dims)(indices, buffer, shared)
        torch.testing.assert_close(found, correct)


def test_batches_of_batches(target: Target) -> None:
    buffers = floats(BATCH, ROWS, 2, target=target)
    indices = torch.arange(24, device=target.device).view(BATCH, 2, 4) % ROWS
    gather = gather_of(target)
    for dims in ((0, None), (None, 0), (0, 0)):
        twice = [
            func.vmap(func.vmap(each, (0, None)), dims)(
                indices if dims[0] == 0 else indices[0],
                buffers if dims[1] == 0 else buffers[0],
            )
            for each in (gather, index)
        ]
        torch.testing.assert_close(*twice)


@pytest.mark.parametrize("bounds", ["fill", "clip"])
def test_batches_with_indices_outside(target: Target, bounds: str) -> None:
    """A batch's buffers lie one after another, but an index never reaches another one's."""
    buffers = floats(2, ROWS, target=target)
    indices = torch.tensor([[0, -1, 5], [7, 2, -9]], device=target.device)

    def run(indices: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
        return multigather.gather(indices, buffer, bounds=bounds, backend=target.backend)[0]

    found = func.vmap(run)(indices, buffers)
    correct = torch.stack([run(*each) for each in zip(indices, buffers, strict=True)])
    assert torch.equal(found, correct)
    gradient = func.vmap(func.grad(lambda b, i: run(i, b).sum()))(buffers, indices)
    singly = [func.grad(lambda b, i=i: run(i, b).sum())(b) for i, b in zip(indices, buffers)]  # noqa: B905
    assert torch.equal(gradient, torch.stack(singly))


def test_a_bad_index_of_a_batch(target: Target) -> None:
    """It is reported, by its place in the whole batch where the indices are batched."""
    buffers = floats(2, ROWS, target=target)
    indices = torch.tensor([[0, 1], [0, ROWS]], device=target.device)
    gather = gather_of(target)
    with pytest.raises(IndexError, match=rf"is {ROWS}, out of range for bufs\[0\]"):
        func.vmap(gather)(indices, buffers)
        multigather.check()
    with pytest.raises(IndexError, match=rf"is {ROWS}, out of range for bufs\[0\]"):
        func.vmap(gather, (None, 0))(indices[1], buffers)
        multigather.check()
    assert torch.equal(gather(indices[0], buffers[0])[0], buffers[0][:2])


def test_containers_and_plans_in_a_batch(target: Target) -> None:
    table = {"a": floats(ROWS, 2, target=target), "b": torch.arange(ROWS, device=target.device)}
    indices = torch.tensor([[0, 1], [4, -1]], device=target.device)
    plan = multigather.plan(table, None, backend=target.backend)
    plan(indices[0])
    for run in (
        plan,
        lambda indices: multigather.gather(indices, table, None, backend=target.backend),
    ):
        found = func.vmap(lambda indices, run=run: run(indices)[0])(indices)
        assert all(torch.equal(found[name], table[name][indices]) for name in table)


def test_a_module_called_functionally(target: Target, indices: torch.Tensor) -> None:
    class Table(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(floats(ROWS, 2, target=target))

        def forward(self, indices: torch.Tensor) -> torch.Tensor:
            return multigather.gather(indices, self.weight, backend=target.backend)[0].sum()

    table = Table()
    weights = {"weight": floats(ROWS, 2, target=target, seed=9)}

    def run(weights: dict[str, torch.Tensor]) -> torch.Tensor:
        return func.functional_call(table, weights, (indices,))

    assert torch.equal(run(weights), weights["weight"][indices].sum())
    correct = torch.zeros(ROWS, 2, dtype=torch.float64, device=target.device)
    correct.index_add_(0, indices % ROWS, torch.ones_like(weights["weight"][indices]))
    assert torch.equal(func.grad(run)(weights)["weight"], correct)
    many = {"weight": torch.stack([weights["weight"], weights["weight"] * 2])}
    assert torch.equal(func.vmap(run)(many), torch.stack([run(weights), 2 * run(weights)]))


def test_a_buffer_from_outside_of_the_transform(target: Target) -> None:
    """One that is no argument of the transformed function keeps its own graph."""
    buffer = floats(ROWS, 2, target=target).requires_grad_()
    indices = torch.tensor([[0, 1], [1, 3]], device=target.device)
    gather = gather_of(target)
    total = func.vmap(lambda indices: gather(indices, buffer)[0].sum())(indices).sum()
    (gradient,) = torch.autograd.grad(total, buffer)
    assert gradient[:, 0].tolist() == [1, 2, 0, 1, 0]


def test_a_wrapper_that_outlived_its_transform(target: Target, indices: torch.Tensor) -> None:
    kept = []

    def keep(buffer: torch.Tensor) -> torch.Tensor:
        kept.append(buffer * 2)
        return buffer.sum()

    buffer = floats(ROWS, target=target)
    func.grad(keep)(buffer)
    (rows,) = gather_of(target)(indices, kept[0])
    assert torch.equal(rows, 2 * buffer[indices])


def test_outputs_of_the_callers(target: Target, indices: torch.Tensor) -> None:
    """Refused, and left alone."""
    buffer = floats(ROWS, target=target)
    out = torch.full((len(indices),), -1.0, dtype=torch.float64, device=target.device)

    def into(buffer: torch.Tensor) -> torch.Tensor:
        return multigather.gather(indices, buffer, out=(out,), backend=target.backend)[0].sum()

    for _ in range(3):
        with pytest.raises(ValueError, match="leave out= away"):
            func.grad(into)(buffer)
        with (
            pytest.raises(ValueError, match="leave out= away"),
            forward_ad.dual_level(),
        ):
            into(forward_ad.make_dual(buffer, buffer))
        assert bool((out == -1).all())
        into(buffer)
        assert torch.equal(out, buffer[indices])
        out.fill_(-1)


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", ["grad", "jvp", "jacrev", "jacfwd", "hessian", "vmap"])
def test_compiled_transforms(target: Target, bufs: Any, name: str, compiler: str) -> None:
    """In one graph of torch.compile."""
    torch._dynamo.reset()
    indices = torch.tensor([[0, 3, 3], [1, -1, 2]], device=target.device)

    def transformed(gather: Gather) -> Any:
        if name == "vmap":
            return func.vmap(lambda indices: gather(indices, *bufs))
        return lambda indices: TRANSFORMS[name](loss_of(gather, indices))(*bufs)

    try:
        torch.compile(transformed(index), fullgraph=True, backend=compiler)(indices)
    except Exception as error:
        pytest.skip(f"this torch does not compile it of b[indices] either: {error}"[:200])
    run = torch.compile(transformed(gather_of(target)), fullgraph=True, backend=compiler)
    for _ in range(2):
        torch.testing.assert_close(run(indices), transformed(index)(indices))


def test_compiled_dual_numbers(target: Target, indices: torch.Tensor) -> None:
    torch._dynamo.reset()
    gather = gather_of(target)

    @torch.compile(backend="eager")
    def run(buffer: torch.Tensor, tangent: torch.Tensor) -> Any:
        with forward_ad.dual_level():
            (rows,) = gather(indices, forward_ad.make_dual(buffer, tangent))
            return forward_ad.unpack_dual(rows).tangent

    buffer, tangent = floats(ROWS, target=target), floats(ROWS, target=target, seed=1)
    assert torch.equal(run(buffer, tangent), tangent[indices])
