"""Gradients, on every backend: what torch's own of ``b[indices]`` are, and in how many launches."""

from __future__ import annotations

import gc
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from conftest import HAVE_GPU, Target
from scripts import load

import multigather
from multigather import api, autograd, dispatch, faults
from multigather.autograd import kernel_for
from multigather.backends import _scatter_add
from multigather.backends._cupy import CudaBackend
from multigather.request import BOUNDS

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS = 9
needs_gpu = pytest.mark.skipif(not HAVE_GPU, reason="torch sees no CUDA device")


def on_gpu(test: Callable[..., None]) -> Callable[..., None]:
    """A test of what only a GPU has, on every backend."""
    for mark in (
        pytest.mark.parametrize("backend", ["torch", "triton", "cupy"]),
        pytest.mark.gpu,
        needs_gpu,
    ):
        test = mark(test)
    return test


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of fields in each launch of scatter_add.cu so far."""
    made: list[int] = []
    launch_of = _scatter_add._launch_of

    def counted(*arguments: Any) -> Callable[..., None]:
        launch, fields = launch_of(*arguments), arguments[-1]

        def run(addresses: Sequence[int]) -> None:
            made.append(len(fields))
            launch(addresses)

        return run

    monkeypatch.setattr(_scatter_add, "_prepared", {})
    monkeypatch.setattr(_scatter_add, "_launch_of", counted)
    return made


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Torch is told to be deterministic."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def leaf(
    shape: Sequence[int], dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0
) -> torch.Tensor:
    """A buffer of small whole numbers that requires a gradient."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-3, 4, tuple(shape), generator=generator)
    return values.to(device, dtype).requires_grad_()


def weighted(rows: torch.Tensor) -> torch.Tensor:
    """A number that depends on each element with a whole weight of its own, of few values."""
    weights = torch.arange(rows.numel(), device=rows.device).remainder(5) - 2
    total = (rows * weights.view(rows.shape)).sum()
    return total.real + 2 * total.imag if total.is_complex() else total


def by_torch(buffer: torch.Tensor, indices: torch.Tensor, bounds: str = "raise") -> torch.Tensor:
    """The rows of ``b[indices]``, differentiably; indices that select none give zeros."""
    rows = len(buffer)
    wide = indices.to(torch.int64)
    if bounds == "clip":
        return buffer[wide.clamp(0, rows - 1)]
    low = -rows if bounds == "raise" else 0
    bad = (wide < low) | (wide >= rows)
    shape = (*indices.shape, *[1] * (buffer.dim() - 1))
    return torch.where(bad.view(shape), 0, buffer[torch.where(bad, 0, wide)])


@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32, torch.uint8], ids=str)
def test_as_torch(target: Target, bounds: str, index_dtype: torch.dtype) -> None:
    """Types and row shapes side by side, integers and None among them; rows that repeat."""
    if target.name == "triton-interpreter":
        pytest.skip("the backward pass is torch's there, and the forward pass takes seconds")
    values = [[3, 0, 3, 8], [1, 3, 8, 8]]
    if bounds == "raise" and index_dtype.is_signed:
        values.append([-1, -9, -3, 4])
    elif bounds in ("fill", "clip"):
        values.append([9, 100, -1 if index_dtype.is_signed else 200, 4])
    indices = torch.tensor(values, dtype=index_dtype, device=target.device)
    dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64)
    leaves = [
        leaf((ROWS, *shape), dtype, target.device, seed)
        for seed, (shape, dtype) in enumerate(
            (shape, dtype) for shape in ((), (3,), (2, 4)) for dtype in dtypes
        )
    ]
    codes = torch.arange(ROWS, device=target.device)
    flags = codes > 3
    fixed = leaf((ROWS, 2), device=target.device).detach()
    results = multigather.gather(
        indices, codes, *leaves, None, flags, fixed, bounds=bounds, backend=target.backend
    )
    gathered = results[1 : 1 + len(leaves)]
    assert [each.requires_grad for each in gathered] == [True] * len(leaves)
    assert not any(results[number].requires_grad for number in (0, -2, -1))
    assert results[-3] is None
    gradients = torch.autograd.grad(sum(map(weighted, gathered)), leaves)
    correct = torch.autograd.grad(
        sum(weighted(by_torch(each, indices, bounds)) for each in leaves), leaves
    )
    for one, other in zip(gradients, correct, strict=True):
        assert torch.equal(one, other), (one.dtype, one.shape)


@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
def test_first_and_second_order_by_differences(
    target: Target, bounds: str, dtype: torch.dtype
) -> None:
    """By gradcheck and gradgradcheck, also of many gradients at once, which only torch can add."""
    indices = torch.tensor([[2, 0], [2, 3 if bounds == "unchecked" else -1]], device=target.device)
    if bounds in ("fill", "clip"):
        indices[0, 1] = 7
    torch.manual_seed(0)
    inputs = [
        torch.randn(4, *shape, dtype=dtype, device=target.device, requires_grad=True)
        for shape in ((2,), ())
    ]
    inputs.append(torch.randn(6, 2, dtype=dtype, device=target.device, requires_grad=True))
    # By the whole Jacobian or, where a gather takes long, by its product with random vectors.
    fast = target.name == "triton-interpreter"
    if fast and (dtype.is_complex or bounds != "raise"):
        pytest.skip("the backward pass is torch's there, and the forward pass takes seconds")

    def run(*buffers: torch.Tensor) -> tuple[torch.Tensor, ...]:
        curved = [each * each for each in buffers]
        rows = multigather.gather(indices, *curved, bounds=bounds, backend=target.backend)
        return tuple(each * each for each in rows)

    options = {"fast_mode": fast, "check_batched_grad": not fast}
    assert torch.autograd.gradcheck(run, inputs, **options)
    assert torch.autograd.gradgradcheck(run, inputs[1:], **options)


def test_third_order(target: Target) -> None:
    """The derivative of the gradient is a gather, whose derivative is the gradient's sum."""
    indices = torch.tensor([2, 0, 2, -1], device=target.device)
    buffer = torch.rand(4, 3, dtype=torch.float64, device=target.device, requires_grad=True)

    def third(gather: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        derivative = (gather(buffer) ** 5).sum()
        for _ in range(3):
            (derivative,) = torch.autograd.grad(derivative.sum(), buffer, create_graph=True)
        return derivative

    ours = third(lambda b: multigather.gather(indices, b, backend=target.backend)[0])
    torch.testing.assert_close(ours, third(lambda b: b[indices]))


def test_second_order_is_fused(target: Target, launches: list[int]) -> None:
    """With a graph of the gradients, these are made by the kernel too."""
    indices = torch.tensor([2, 0, 2, 1], device=target.device)
    buffers = [leaf((4, 3), device=target.device), leaf((7,), device=target.device)]
    rows = multigather.gather(indices, *buffers, backend=target.backend)
    first = torch.autograd.grad(sum((each**3).sum() for each in rows), buffers, create_graph=True)
    assert all(each.requires_grad for each in first)
    second = torch.autograd.grad(sum(each.sum() for each in first), buffers)
    for buffer, gradient in zip(buffers, second, strict=True):
        (rows,) = torch.autograd.grad((buffer[indices] ** 3).sum(), buffer, create_graph=True)
        assert torch.equal(gradient, torch.autograd.grad(rows.sum(), buffer)[0])
    # The rows' gradient, and that of the rows that its derivative gathers.
    assert launches == ([2, 2] if target.backend == "cupy" else [])


def test_one_launch_for_all_buffers(target: Target, launches: list[int]) -> None:
    """Seventy, of which some require no gradient and some outputs had none."""
    if target.backend == "triton":
        pytest.skip("the backward pass is torch's there, and the forward pass compiles for minutes")
    indices = torch.tensor([3, 8, 3, -1], device=target.device)
    buffers = [leaf((ROWS, 1 + n % 5), device=target.device, seed=n) for n in range(70)]
    buffers[5].requires_grad_(False)
    rows = multigather.gather(indices, *buffers, backend=target.backend)
    used = [number for number in range(70) if number not in (5, 6)]
    sum(weighted(rows[number]) for number in used).backward()
    assert buffers[5].grad is None and buffers[6].grad is None
    for number in used:
        (correct,) = torch.autograd.grad(weighted(buffers[number][indices]), buffers[number])
        assert torch.equal(buffers[number].grad, correct)
    if target.backend == "cupy":
        (backend,) = (each for each in dispatch.BACKENDS if isinstance(each, CudaBackend))
        most = backend.capacity(torch.device(target.device, 0))
        assert sum(launches) == 68 and len(launches) == -(-68 // most)
    else:
        assert not launches


def test_the_callers_backend_decides(target: Target, launches: list[int]) -> None:
    """The kernel is the cupy backend's; without a wish it is used where that backend runs."""
    indices = torch.tensor([1, 0, 1], device=target.device)
    for backend in (target.backend, None):
        buffer = leaf((4, 3), device=target.device)
        launches.clear()
        multigather.gather(indices, buffer, backend=backend)[0].sum().backward()
        assert buffer.grad.tolist() == [[1.0] * 3, [2.0] * 3, [0.0] * 3, [0.0] * 3]
        plain = torch.zeros(3, 3, device=target.device)
        assert len(launches) == (kernel_for(backend, indices, [plain]) is not None)
    assert (kernel_for(target.backend, indices, [plain]) is not None) == (target.backend == "cupy")


@pytest.mark.usefixtures("deterministic")
def test_deterministic(target: Target, launches: list[int]) -> None:
    """Torch's own deterministic sums, the same bits each time, whatever the number of repeats."""
    if target.name == "triton-interpreter":
        pytest.skip("the backward pass is torch's there, and the forward pass takes seconds")
    generator = torch.Generator().manual_seed(0)
    indices = torch.randint(5, (3000,), generator=generator).to(target.device)
    factor = torch.randn(3000, 7, generator=generator).to(target.device)
    buffer = leaf((5, 7), device=target.device)
    gradients = []
    for _ in range(4):
        (rows,) = multigather.gather(indices, buffer, backend=target.backend)
        gradients += torch.autograd.grad((rows * factor).sum(), buffer)
    assert all(torch.equal(gradients[0], each) for each in gradients[1:])
    correct = torch.zeros(5, 7, dtype=torch.float64, device=target.device)
    correct.index_add_(0, indices, factor.double())
    torch.testing.assert_close(gradients[0].double(), correct, rtol=1e-4, atol=1e-3)
    assert not launches


def test_no_graph_where_none_is_wanted(target: Target) -> None:
    """no_grad and inference_mode; tensors made in the latter beside those that require a gradient.

    A buffer that was changed since is no obstacle, because its values are not needed; changed
    indices are one.
    """
    indices = torch.tensor([1, 0, 1], device=target.device)
    buffer = leaf((4, 3), device=target.device)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert not multigather.gather(indices, buffer, backend=target.backend)[0].requires_grad
            inside = torch.ones(4, 2, device=target.device)
    rows, others = multigather.gather(indices, buffer, inside, backend=target.backend)
    assert rows.requires_grad and not others.requires_grad
    with torch.no_grad():
        buffer.add_(1)
    rows.sum().backward(retain_graph=True)
    assert buffer.grad[:, 0].tolist() == [1, 2, 0, 0]
    indices.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        rows.sum().backward()


def test_autocast_changes_nothing(target: Target) -> None:
    """Rows and gradients have the buffer's type inside autocast, and its values."""
    indices = torch.tensor([1, 0, 1], device=target.device)
    buffer = leaf((4, 3), device=target.device)
    weight = torch.eye(3, device=target.device)
    with torch.autocast(target.device, torch.bfloat16):
        (rows,) = multigather.gather(indices, buffer, backend=target.backend)
        assert rows.dtype == torch.float32
        product = rows @ weight
        assert product.dtype == torch.bfloat16
        product.sum().backward()
    assert buffer.grad.dtype == torch.float32
    assert buffer.grad[:, 0].tolist() == [1, 2, 0, 0]


def test_nothing_to_add(target: Target) -> None:
    """No indices, no rows, rows of no elements."""
    for count, rows, width in ((0, 4, 3), (0, 0, 3), (5, 4, 0), (5, 0, 3)):
        indices = torch.zeros(count, dtype=torch.int64, device=target.device)
        buffers = [leaf((rows, width), device=target.device), leaf((4, 2), device=target.device)]
        bounds = "raise" if rows or not count else "fill"
        gathered = multigather.gather(indices, *buffers, bounds=bounds, backend=target.backend)
        sum(each.sum() for each in gathered).backward()
        assert buffers[0].grad.shape == (rows, width) and not buffers[0].grad.any()
        assert buffers[1].grad.tolist() == [[float(count)] * 2] + [[0.0] * 2] * 3


def test_gradients_laid_out_in_any_way(target: Target) -> None:
    """What reductions, concatenation, transposition and conjugation hand to the backward pass."""
    indices = torch.tensor([[5, 0, 5], [-1, 2, 2]], device=target.device)
    steps: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "expanded": lambda rows: weighted(rows.sum()),
        "one row for all": lambda rows: weighted(rows.sum((0, 1))),
        "one number a row": lambda rows: weighted(rows.sum((2, 3))),
        "slice": lambda rows: weighted(torch.cat([rows, rows], -1)),
        "transposed": lambda rows: weighted(rows.transpose(2, 3).contiguous()),
        "rows transposed": lambda rows: weighted(rows.transpose(0, 1).contiguous()),
        "conjugate": lambda rows: weighted(rows.conj()),
        "imaginary": lambda rows: weighted((1j * rows).conj().imag),
    }
    for name, step in steps.items():
        for dtype in (torch.float32, torch.complex64, torch.bfloat16):
            if name == "imaginary" and dtype == torch.bfloat16:
                continue
            buffer = leaf((6, 4, 2), dtype, target.device)
            (rows,) = multigather.gather(indices, buffer, backend=target.backend)
            (gradient,) = torch.autograd.grad(step(rows), buffer)
            (correct,) = torch.autograd.grad(step(buffer[indices]), buffer)
            assert torch.equal(gradient, correct), (name, dtype)


def test_buffers_of_any_layout(target: Target) -> None:
    """The gradient of an expanded, a transposed and a conjugate buffer goes to its base."""
    indices = torch.tensor([3, 0, 3], device=target.device)
    if target.name == "cuda-source-on-cpu":
        pytest.skip("that backend refuses rows that are not contiguous")
    views: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "expanded": lambda base: base[:1].expand(4, 6),
        "every other": lambda base: base.repeat(2, 1)[::2],
        "conjugate": lambda base: base.conj(),
    }
    for name, view in views.items():
        base = leaf((4, 6), torch.complex64, target.device)
        (rows,) = multigather.gather(indices, view(base), backend=target.backend)
        (gradient,) = torch.autograd.grad(weighted(rows), base)
        (correct,) = torch.autograd.grad(weighted(view(base)[indices]), base)
        assert torch.equal(gradient, correct), name


def outcome(function: Callable[[], Any]) -> Any:
    """What a function returns, or the type of its error."""
    try:
        return function()
    except (NotImplementedError, RuntimeError) as error:
        return type(error)


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu], ids=str
)
def test_8_bit_floats_as_torch(target: Target, dtype: torch.dtype) -> None:
    """Where ``b[indices]`` has a gradient there is the same one, else the same kind of error."""
    indices = torch.tensor([1, 3, 1, -1], device=target.device)
    values = torch.tensor([1.0, 2.0, 4.0, 2.0]).repeat(4, 1).to(target.device, dtype)
    buffer = values.clone().requires_grad_()
    other = leaf((4, 2), device=target.device)

    def run(rows: torch.Tensor) -> torch.Tensor:
        (gradient,) = torch.autograd.grad(rows, buffer, values, retain_graph=True)
        return gradient.view(torch.uint8)

    gathered = multigather.gather(indices, buffer, other, backend=target.backend)
    ours, torchs = outcome(lambda: run(gathered[0])), outcome(lambda: run(buffer[indices]))
    if isinstance(torchs, torch.Tensor):
        assert torch.equal(ours, torchs)
        (rows,) = multigather.gather(indices, buffer, bounds="fill", backend=target.backend)
        correct = torch.zeros(4, 4, device=target.device)
        correct.index_add_(0, indices[:3], values[:3].float())
        assert torch.equal(run(rows).view(dtype).float(), correct)
    else:
        assert ours is torchs
    (gradient,) = torch.autograd.grad(gathered[1].sum(), other)
    assert gradient[:, 0].tolist() == [0, 2, 0, 2]


# Types below float32, each with a number whose repeated sums are far from overflow.
NARROW = {
    torch.float16: 1.0,
    torch.bfloat16: 1.0,
    torch.complex32: 1.0,
    torch.float8_e4m3fn: 2.0**-6,
    torch.float8_e4m3fnuz: 2.0**-6,
    torch.float8_e5m2: 2.0**-6,
}
# The last is longer than a thread block of the kernel.
NARROW_SHAPES = ((), (1,), (3,), (4,), (7,), (8,), (64,), (513,))


def parts(values: torch.Tensor) -> torch.Tensor:
    """Real and imaginary parts in float64."""
    if values.is_complex():
        return torch.view_as_real(values.to(torch.complex128))
    return values.double()


def assert_rounded_once(
    total: torch.Tensor, indices: torch.Tensor, addends: torch.Tensor, torchs: torch.Tensor | None
) -> None:
    """Compare with sums in float64, and their errors with those of torch's own gradient."""
    wide = parts(addends)
    shape = (len(total), *wide.shape[1:])
    exact = wide.new_zeros(shape).index_add_(0, indices, wide)
    size = wide.new_zeros(shape).index_add_(0, indices, wide.abs())
    times = torch.bincount(indices, minlength=len(total)).view(-1, *[1] * (len(shape) - 1))
    summing = times * size * torch.finfo(torch.float32).eps
    real = torch.float16 if total.is_complex() else total.dtype
    info = torch.finfo(real)
    smallest = info.smallest_normal * info.eps
    rounding = torch.clamp((exact.abs() + summing) * info.eps, min=smallest) / 2
    error = (parts(total) - exact).abs()
    assert (error <= rounding + summing).all(), (total.dtype, total.shape)
    if torchs is not None:
        assert (error <= (parts(torchs) - exact).abs() + 2 * summing).all()


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("is_deterministic", [False, True], ids=["any order", "deterministic"])
@pytest.mark.parametrize("times", [2, 512, 5000])
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_narrow_sums_are_rounded_once(
    target: Target,
    dtype: torch.dtype,
    times: int,
    is_deterministic: bool,
    request: pytest.FixtureRequest,
) -> None:
    """One row's gradients are equal, another's random; the buffers have few rows, or many."""
    if target.name == "triton-interpreter":
        pytest.skip("the backward pass is torch's there, and the forward pass takes seconds")
    if is_deterministic:
        request.getfixturevalue("deterministic")
    generator = torch.Generator().manual_seed(times)
    indices = torch.arange(2 * times) % 2
    indices = indices[torch.randperm(2 * times, generator=generator)]
    random = torch.complex64 if dtype.is_complex else torch.float32
    unit = NARROW[dtype]
    for rows, shapes in ((3, NARROW_SHAPES), (12_000, NARROW_SHAPES[:6])):
        buffers = [torch.ones(rows, *shape, device=target.device) for shape in shapes]
        buffers = [buffer.to(dtype).requires_grad_() for buffer in buffers]
        addends = []
        for shape in shapes:
            values = unit * torch.randn(2 * times, *shape, dtype=random, generator=generator)
            values[indices == 0] = unit
            addends.append(values.to(dtype).to(target.device))
        selected = indices.to(target.device)
        gathered = multigather.gather(selected, *buffers, backend=target.backend)
        gradients = torch.autograd.grad(gathered, buffers, addends)
        for buffer, total, addend in zip(buffers, gradients, addends, strict=True):
            assert total.dtype == dtype
            (torchs,) = torch.autograd.grad(buffer[selected], buffer, addend)
            assert_rounded_once(total, selected, addend, torchs)
            # Exactly, because floats count to 2^24.
            assert torch.equal(
                parts(total[0]).flatten(),
                parts(torch.full_like(addend[0], unit * times)).flatten(),
            )


@pytest.mark.parametrize("rows", [3, 2000], ids=["few rows", "many rows"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_narrow_sums_beyond_the_type(target: Target, dtype: torch.dtype, rows: int) -> None:
    """What the sums in float32 overflow to, when they are rounded; on the way they need not fit."""
    if target.name == "triton-interpreter":
        pytest.skip("the backward pass is torch's there, and the forward pass takes seconds")
    large = torch.finfo(dtype).max / 2
    columns = {
        math.inf: [large] * 3 + [0.0] * 3,
        -math.inf: [-large] * 3 + [0.0] * 3,
        math.nan: [math.inf, -math.inf, 1.0, 1.0, 1.0, 1.0],
    }
    if dtype == torch.float16:  # the largest bfloat has no double in float32
        columns[0.0] = [large] * 3 + [-large] * 3
    addends = torch.tensor(list(columns.values()), dtype=dtype, device=target.device).t()
    indices = torch.ones(6, dtype=torch.int64, device=target.device)
    buffer = torch.zeros(rows, len(columns), dtype=dtype, device=target.device, requires_grad=True)
    (gathered,) = multigather.gather(indices, buffer, backend=target.backend)
    (total,) = torch.autograd.grad(gathered, buffer, addends)
    wanted = torch.zeros(rows, len(columns), dtype=dtype)
    wanted[1] = torch.tensor(list(columns))
    torch.testing.assert_close(total.cpu(), wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("rows", [3, 2000], ids=["few rows", "many rows"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_narrow_sums_of_higher_order(target: Target, dtype: torch.dtype, rows: int) -> None:
    """Second derivatives are rounded once too, and third ones."""
    if target.name == "triton-interpreter":
        pytest.skip("the backward pass is torch's there, and the forward pass takes seconds")
    indices = torch.zeros(512, dtype=torch.int64, device=target.device)
    for shape in ((), (4,)):
        buffer = torch.ones(rows, *shape, dtype=dtype, device=target.device, requires_grad=True)
        (gathered,) = multigather.gather(indices, buffer, backend=target.backend)
        derivative = gathered**4
        for correct in (512 * 4, 512 * 12, 512 * 24):
            (derivative,) = torch.autograd.grad(
                derivative, buffer, torch.ones_like(derivative), create_graph=True
            )
            assert (derivative[0] == correct).all() and not derivative[1:].any()


@pytest.mark.parametrize("rows", [3, 2000], ids=["few rows", "many rows"])
def test_narrow_sums_skip_indices_without_a_row(target: Target, rows: int) -> None:
    """They take no other index's place, wherever they stand."""
    indices = torch.tensor([-7, 1, 9999, 1, 0, 9999], device=target.device)
    dtypes = (torch.bfloat16, torch.float16, torch.float8_e5m2)
    buffers = [leaf((rows, 3), dtype, target.device) for dtype in dtypes]
    gathered = multigather.gather(indices, *buffers, bounds="fill", backend=target.backend)
    addends = [torch.ones_like(each) for each in gathered]
    for total in torch.autograd.grad(gathered, buffers, addends):
        assert total[:2].float().tolist() == [[1.0] * 3, [2.0] * 3]
        assert not total[2:].float().any()


def test_narrow_sums_of_a_compiled_gather(target: Target) -> None:
    """Its backward pass is traced operations of torch, whose sums are float32 too."""
    indices = torch.zeros(512, dtype=torch.int64, device=target.device)
    torch._dynamo.reset()  # each shape is a graph, of which torch keeps eight
    run = torch.compile(
        lambda buffer: multigather.gather(indices, buffer, backend=target.backend)[0].sum(0),
        fullgraph=True,
        backend="aot_eager",
    )
    for shape in ((3,), (3, 2), (2000,), (2000, 2)):
        buffer = torch.ones(shape, dtype=torch.bfloat16, device=target.device, requires_grad=True)
        (total,) = torch.autograd.grad(run(buffer), buffer, torch.ones_like(buffer[0]))
        assert (total[0] == 512).all() and not total[1:].any()


def test_bad_indices_are_reported_once(target: Target) -> None:
    """On a GPU, where a gather goes on: the gradients of any order skip them and report nothing."""
    indices = torch.tensor([1, 40, -1, 0], device=target.device)
    buffers = [leaf((4, 3), device=target.device), leaf((50,), device=target.device)]

    def run() -> tuple[torch.Tensor, ...]:
        return multigather.gather(indices, *buffers, backend=target.backend)

    if target.device == "cpu" or faults.synchronous:
        with pytest.raises(IndexError, match="is 40"):
            run()
        return
    rows = run()
    with pytest.raises(IndexError, match="is 40"):
        multigather.check()
    total = (rows[0] ** 3).sum() + (rows[1] ** 3).sum()
    first = torch.autograd.grad(total, buffers, create_graph=True)
    second = torch.autograd.grad(sum(each.sum() for each in first), buffers)
    multigather.check()
    for buffer, one, two in zip(buffers, first, second, strict=True):
        correct = torch.autograd.grad(
            (by_torch(buffer, indices) ** 3).sum(), buffer, create_graph=True
        )
        assert torch.equal(one, correct[0])
        assert torch.equal(two, torch.autograd.grad(correct[0].sum(), buffer)[0])


def test_a_traced_backward_is_torchs(target: Target, launches: list[int]) -> None:
    """In a graph of torch.compile the additions are operations that its compiler knows."""
    indices = torch.tensor([1, 0, 1, -1], device=target.device)
    buffer = leaf((4, 3), device=target.device)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def run(buffer: torch.Tensor) -> torch.Tensor:
        return (multigather.gather(indices, buffer, backend=target.backend)[0] ** 2).sum()

    (gradient,) = torch.autograd.grad(run(buffer), buffer)
    (correct,) = torch.autograd.grad((buffer[indices] ** 2).sum(), buffer)
    assert torch.equal(gradient, correct)
    assert not launches


def test_a_plan_and_containers(target: Target) -> None:
    """Gradients go through plans, dicts and modules' parameters."""
    indices = torch.tensor([2, 0, 2], device=target.device)
    weight = torch.nn.Parameter(torch.ones(4, 3, device=target.device))
    bias = torch.nn.Parameter(torch.ones(4, device=target.device))
    plan = multigather.plan({"weight": weight, "bias": bias}, backend=target.backend)
    for gathered in (
        plan(indices)[0],
        multigather.gather(indices, {"weight": weight, "bias": bias}, backend=target.backend)[0],
    ):
        (gathered["weight"].sum() + gathered["bias"].sum()).backward()
    assert weight.grad[:, 0].tolist() == bias.grad.tolist() == [2, 0, 4, 0]


def test_threads(target: Target) -> None:
    """Backward passes of several threads, of the same layout at once."""
    if target.name == "triton-interpreter":
        pytest.skip("Triton's interpreter runs in one thread")
    failures: list[str] = []

    def work(number: int) -> None:
        indices = torch.arange(number, number + 5, device=target.device) % 8
        buffer = torch.ones(8, 4, device=target.device, requires_grad=True)
        for _ in range(5):
            (rows,) = multigather.gather(indices, buffer, backend=target.backend)
            (gradient,) = torch.autograd.grad((rows * (number + 1)).sum(), buffer)
            correct = torch.zeros(8, device=target.device)
            correct[indices] = number + 1.0
            if not torch.equal(gradient, correct[:, None].expand(8, 4)):
                failures.append(f"{number}: {gradient.tolist()}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


# ----------------------------------------------------------------------------------- on a GPU


@on_gpu
def test_captured(backend: str) -> None:
    """Forward and backward in a CUDA graph: each replay adds by the indices it finds."""
    indices = torch.zeros(64, dtype=torch.int64, device="cuda")
    buffers = [
        leaf((50, 7), device="cuda"),
        leaf((50,), torch.bfloat16, "cuda"),
        leaf((20, 16), torch.float64, "cuda"),
    ]

    def step() -> list[torch.Tensor]:
        rows = multigather.gather(indices, *buffers, backend=backend)
        return list(torch.autograd.grad(sum(weighted(each) for each in rows), buffers))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gradients = step()
    for turn in range(20):
        indices.copy_((torch.arange(64, device="cuda") * (turn + 1)) % 20)
        for gradient in gradients:
            gradient.fill_(99)
        graph.replay()
        correct = torch.autograd.grad(sum(weighted(buffer[indices]) for buffer in buffers), buffers)
        for one, other in zip(gradients, correct, strict=True):
            assert torch.equal(one, other)
    multigather.check()


@on_gpu
def test_streams(backend: str) -> None:
    """The sums are made on the stream of the forward pass, after what that stream had to do."""
    indices = torch.arange(4096, device="cuda") % 50
    buffer = leaf((50, 64), device="cuda")
    factor = torch.zeros(4096, 64, device="cuda")
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    for turn in range(10):
        results = []
        for number, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                (rows,) = multigather.gather(indices, buffer, backend=backend)
                torch.cuda._sleep(1_000_000)
                value = factor + (turn + number)
                results.append(torch.autograd.grad((rows * value).sum(), buffer)[0])
        torch.cuda.synchronize()
        for number, gradient in enumerate(results):
            correct = torch.bincount(indices, minlength=50)[:, None] * (turn + number)
            assert torch.equal(gradient, correct.expand(50, 64).float())


@on_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_large_and_random(backend: str, dtype: torch.dtype) -> None:
    """Many rows, some far more often than others, against sums in float64."""
    generator = torch.Generator("cuda").manual_seed(0)
    rows = 5000
    skewed = torch.rand(100_000, device="cuda", generator=generator) ** 4
    indices = (skewed * rows).long() - rows // 2
    for width in (1, 17, 100, 128):
        buffer = torch.zeros(rows, width, dtype=dtype, device="cuda", requires_grad=True)
        addends = torch.rand(len(indices), width, device="cuda", generator=generator) / 64
        addends = addends.to(dtype)
        (gathered,) = multigather.gather(indices, buffer, backend=backend)
        (gradient,) = torch.autograd.grad(gathered, buffer, addends)
        selected = torch.where(indices < 0, indices + rows, indices)
        correct = torch.zeros(rows, width, dtype=torch.float64, device="cuda")
        correct.index_add_(0, selected, addends.double())
        counts = torch.bincount(selected, minlength=rows)[:, None].double()
        # Each addition rounds to at most half a unit in the last place of the sum so far.
        bound = counts * correct * torch.finfo(dtype).eps + 1e-7
        assert ((gradient.double() - correct).abs() <= bound).all()


@on_gpu
def test_pinned_host_buffers(backend: str) -> None:
    """Their gradients are in host memory, as they are."""
    buffer = torch.ones(4, 3).pin_memory().requires_grad_()
    indices = torch.tensor([1, 0, 1], device="cuda")
    try:
        (rows,) = multigather.gather(indices, buffer, backend=backend)
    except multigather.UnsupportedError as refused:
        pytest.skip(str(refused))
    rows.sum().backward()
    assert buffer.grad.device.type == "cpu"
    assert buffer.grad[:, 0].tolist() == [1, 2, 0, 0]


@on_gpu
def test_indices_on_the_cpu(backend: str) -> None:
    """They are copied once, for both passes."""
    buffer = leaf((4, 3), device="cuda")
    (rows,) = multigather.gather(torch.tensor([1, 0, -3]), buffer, backend=backend)
    rows.sum().backward()
    assert buffer.grad[:, 0].tolist() == [1, 2, 0, 0]


@on_gpu
def test_gradients_leave_no_memory_behind(backend: str) -> None:
    """Nothing is held of the gradients of first and second order once the caller drops them."""
    api.forget()
    indices = torch.arange(64, device="cuda") % 50
    buffer = torch.ones(50, 24, device="cuda", requires_grad=True)

    def step() -> None:
        (rows,) = multigather.gather(indices, buffer, backend=backend)
        (first,) = torch.autograd.grad((rows**3).sum(), buffer, create_graph=True)
        torch.autograd.grad(first.sum(), buffer)

    for _ in range(3):
        step()
    gc.collect()
    torch.cuda.synchronize()
    base = torch.cuda.memory_allocated()
    for _ in range(100):
        step()
    torch.cuda.synchronize()
    # Autograd's own thread lets go of its last tensors a moment after the call has returned.
    assert abs(torch.cuda.memory_allocated() - base) <= 4 * buffer.nbytes


# ------------------------------------------------------------------------------ repeated calls


def no_long_way(*arguments: Any) -> None:
    raise AssertionError("the long way")


@pytest.mark.parametrize("shape", [(12,), (3, 4)], ids=str)
@pytest.mark.parametrize("planned", [False, True], ids=["gather", "plan"])
def test_a_repeated_call_is_short(
    target: Target, planned: bool, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With gradients and without, of parameters too; and with the same gradients as before."""
    if target.name in ("triton-interpreter", "cuda-source-on-cpu", "torch-gpu"):
        pytest.skip("it has no short way")
    api.forget()
    weight = torch.nn.Parameter(leaf((ROWS, 3), device=target.device).detach())
    table = leaf((ROWS, 2), torch.float64, target.device)
    codes = torch.arange(ROWS, device=target.device)
    indices = torch.arange(12, device=target.device).remainder(ROWS).view(shape)
    bufs = (weight, table, codes)
    plan = multigather.plan(*bufs, backend=target.backend)

    def gather() -> tuple[torch.Tensor, ...]:
        if planned:
            return plan(indices)
        return multigather.gather(indices, *bufs, backend=target.backend)

    def step() -> None:
        results = gather()
        assert [each.requires_grad for each in results] == [True, True, False]
        with torch.no_grad():
            constants = gather()
        assert not any(each.requires_grad for each in constants)
        for one, other, buffer in zip(results, constants, bufs, strict=True):
            assert torch.equal(one, buffer[indices]) and torch.equal(one, other)
            assert type(one) is torch.Tensor
        found = torch.autograd.grad(weighted(results[0]) + weighted(results[1]), (weight, table))
        wanted = torch.autograd.grad(
            weighted(weight[indices]) + weighted(table[indices]), (weight, table)
        )
        assert all(map(torch.equal, found, wanted))

    for _ in range(3):
        step()
    with monkeypatch.context() as patch:
        patch.setattr(api, "gather_checked", no_long_way)
        step()
    # Another gradient is required now, which is another guard; and none.
    table.requires_grad_(False)
    for _ in range(3):
        assert [each.requires_grad for each in gather()] == [True, False, False]
    weight.requires_grad_(False)
    for _ in range(3):
        assert not any(each.requires_grad for each in gather())


def test_plans_of_parameters_refuse_other_memory(target: Target) -> None:
    """As plans of other tensors, once they have learned the short way."""
    weight = torch.nn.Parameter(torch.ones(ROWS, 3, device=target.device))
    plan = multigather.plan(weight, backend=target.backend)
    indices = torch.arange(4, device=target.device)
    for _ in range(3):
        assert plan(indices)[0].requires_grad
    weight.data = torch.zeros(ROWS, 3, device=target.device)
    with pytest.raises(ValueError, match="has changed"):
        plan(indices)
    with torch.no_grad(), pytest.raises(ValueError, match="has changed"):
        plan(indices)


def test_outputs_are_refused_where_gradients_are_required(target: Target) -> None:
    """Whatever was gathered into them before, without gradients."""
    weight = torch.nn.Parameter(torch.ones(ROWS, 3, device=target.device))
    outs = (torch.zeros(4, 3, device=target.device),)
    plan = multigather.plan(weight, backend=target.backend)
    indices = torch.arange(4, device=target.device)
    with torch.no_grad():
        for _ in range(3):
            multigather.gather(indices, weight, out=outs, backend=target.backend)
            plan(indices, out=outs)
    assert bool((outs[0] == 1).all())
    with pytest.raises(ValueError, match="out= cannot be combined with gradients"):
        multigather.gather(indices, weight, out=outs, backend=target.backend)
    with pytest.raises(ValueError, match="out= cannot be combined with gradients"):
        plan(indices, out=outs)


def test_without_torchs_fast_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sums start from zeros of each buffer's shape and type, however they are made."""
    like = [torch.ones(2, 3, dtype=torch.float64), torch.ones(0), torch.ones(2, dtype=torch.half)]
    shapes = [torch.Size(each) for each in ((5, 3), (0, 4, 2), ())]
    fast = autograd._zeros(shapes, like)
    monkeypatch.setattr(autograd, "fast_allocation", lambda device: None)
    for made in (fast, autograd._zeros(shapes, like)):
        for total, shape, each in zip(made, shapes, like, strict=True):
            wanted = each.new_zeros(shape)
            assert torch.equal(total, wanted) and total.dtype == wanted.dtype
            assert total.stride() == wanted.stride()


# ------------------------------------------------------------------------------- the benchmark


@pytest.mark.parametrize("pattern", ["unique", "zipf", "equal"])
def test_benchmark_compares_before_it_times(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every way's gradients are looked at, and wrong ones end the run."""
    benchmark = load("benchmarks/backward.py")
    fields = (((3,), torch.float32), ((), torch.float32), ((), torch.int64))
    workload = benchmark.Workload("small", 0, 40, (), (), fields)
    arguments = (workload, torch.bfloat16, pattern, 16, torch.device("cpu"), 1)
    result = benchmark.measure(*arguments)
    assert result["buffers"] == 2 and result["zeroed_bytes"] == 2 * 40 * 4
    assert list(result["host_us"]) == [*benchmark.forwards(False), "zeros", "foreach zeros"]
    assert benchmark.measure(*arguments[:2], "unique", 41, *arguments[4:]) is None
    wrong = {**benchmark.forwards(False), "wrong": lambda indices, buffers: [
        2 * buffer[indices] for buffer in buffers
    ]}  # fmt: skip
    monkeypatch.setattr(benchmark, "forwards", lambda compiled: wrong)
    with pytest.raises(AssertionError, match="wrong: wrong by"):
        benchmark.measure(*arguments)
