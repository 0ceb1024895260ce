"""Gathers inside graphs: one operator, no graph break, no recompilation when the count changes."""

from __future__ import annotations

import pytest
import torch
from cases import Slab, assert_gathered
from conftest import Target
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

import multigather
from multigather.operator import gather_operator


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    """No graph of another test is found again."""
    torch._dynamo.reset()


def test_full_graph_with_any_number_of_indices(target: Target) -> None:
    """fullgraph=True, negative indices included; counts from 2 to 50 share one graph."""
    a = Slab(40, (3,), torch.float32, target.device).tensor
    b = Slab(40, (), torch.bool, target.device).tensor
    counter = CompileCounter()

    @torch.compile(fullgraph=True, dynamic=True, backend=counter)
    def run(indices):
        first, _, last = multigather.gather(indices, {"a": a}, None, b, backend=target.backend)
        return first["a"], last, indices + 1

    for count in (7, 2, 50, 31):
        indices = torch.arange(count, device=target.device) % 40 - 20
        rows, flags, _ = run(indices)
        assert_gathered(rows, indices, a)
        assert_gathered(flags, indices, b)
    assert counter.frame_count == 1


def test_a_graph_does_not_depend_on_the_imported_modules(target: Target) -> None:
    """The compiler would go through all of them, and fail if another thread imports one then."""
    tensordict = pytest.importorskip("tensordict")
    a = Slab(40, (3,), torch.float32, target.device).tensor
    table = tensordict.TensorDict({"a": a}, [40])
    indices = torch.tensor([5, 0, -1], device=target.device)

    def run(indices):
        (rows,) = multigather.gather(indices, {"a": a}, backend=target.backend)
        (others,) = multigather.gather(indices, table, backend=target.backend)
        return rows["a"], others["a"]

    explanation = torch._dynamo.explain(run)(indices)
    assert explanation.graph_count == 1
    assert explanation.out_guards
    assert not [guard for guard in explanation.out_guards if ".sys" in str(guard)]
    for rows in torch.compile(run, fullgraph=True, backend="eager")(indices):
        assert_gathered(rows, indices, a)


def test_plan_and_out_in_a_graph(target: Target) -> None:
    """A plan is the same operator; out= is written."""
    a = Slab(40, (3,), torch.float32, target.device).tensor
    plan = multigather.plan(a, backend=target.backend)
    into = torch.empty(3, 3, device=target.device)
    indices = torch.tensor([5, 0, -1], device=target.device)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def run(indices):
        (rows,) = plan(indices)
        multigather.gather(indices, a, out=(into,), backend=target.backend)
        return rows

    assert_gathered(run(indices), indices, a)
    assert_gathered(into, indices, a)


def test_bad_index_in_a_graph(target: Target) -> None:
    """The graph reports as the eager call does."""
    a = Slab(40, (3,), torch.float32, target.device).tensor
    run = torch.compile(
        lambda i: multigather.gather(i, a, backend=target.backend)[0], backend="eager"
    )
    with pytest.raises(IndexError, match=r"is 40, out of range for bufs\[0\] with 40 rows"):
        run(torch.tensor([1, 40], device=target.device))
        multigather.check()


def test_gradients_in_a_graph(target: Target) -> None:
    """AOT autograd differentiates through the operator."""
    indices = torch.tensor([1, 0, 1, -1], device=target.device)
    weights = torch.randn(5, 3, device=target.device, requires_grad=True)
    codes = torch.arange(5, device=target.device)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def run(weights):
        rows, numbers = multigather.gather(indices, weights, codes, backend=target.backend)
        return (rows * 2).sum() + numbers.sum()

    (gradient,) = torch.autograd.grad(run(weights), weights)
    (wanted,) = torch.autograd.grad((weights[indices] * 2).sum(), weights)
    assert torch.equal(gradient, wanted)


def test_operator_passes_torchs_own_checks(target: Target) -> None:
    """Torch's opcheck: schema, fake implementation, autograd registration, AOT dispatch."""
    a = torch.randn(9, 3, device=target.device, requires_grad=True)
    b = torch.arange(9, device=target.device)
    indices = torch.tensor([1, 8, 1], device=target.device)
    opcheck(gather_operator, (indices, [a, b], "raise", target.backend))
    opcheck(gather_operator, (indices.view(3, 1), [b], "fill", None))


def test_fake_and_meta_tensors(target: Target) -> None:
    """Shapes and dtypes without data."""
    with FakeTensorMode():
        indices = torch.zeros(2, 5, dtype=torch.int64, device=target.device)
        buffer = torch.zeros(9, 3, dtype=torch.bfloat16, device=target.device)
        (rows,) = multigather.gather(indices, buffer)
    assert tuple(rows.shape) == (2, 5, 3) and rows.dtype == torch.bfloat16
    assert rows.device.type == target.device
    (rows,) = multigather.gather(
        torch.zeros(4, dtype=torch.int64, device="meta"), torch.zeros(9, 3, device="meta")
    )
    assert rows.is_meta and tuple(rows.shape) == (4, 3)


def test_export(target: Target) -> None:
    """torch.export keeps the operator, with the number of indices dynamic."""

    class Rows(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.randn(9, 3, device=target.device))

        def forward(self, indices):
            return multigather.gather(indices, self.table)[0]

    count = torch.export.Dim("count", min=2, max=64)
    exported = torch.export.export(
        Rows(),
        (torch.tensor([1, 2, 3], device=target.device),),
        dynamic_shapes={"indices": {0: count}},
    )
    assert any(node.target is gather_operator for node in exported.graph.nodes)
    indices = torch.tensor([8, 0, 1, 7, 2], device=target.device)
    module = exported.module()
    assert torch.equal(module(indices), module.table[indices])


def error_of(run, *arguments) -> str:
    """What a call says when it refuses, in torch's wrapping or not; empty if it does not."""
    try:
        run(*arguments)
    except Exception as error:
        return str(error)
    return ""


@pytest.mark.parametrize("full", [True, False], ids=["full graph", "with breaks"])
@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_outputs_that_eager_calls_refuse(target: Target, compiler: str, full: bool) -> None:
    """Outputs over an input or over one another, or that gradients hang on; nothing is written."""
    if not full and target.name != "native-cpu":
        pytest.skip("what the compiler makes of the eager call after a refusal is not looked at")
    if compiler == "inductor" and target.name not in ("native-cpu", "cupy-gpu"):
        pytest.skip("once is enough")
    device = target.device
    indices = torch.tensor([3, 0, 1], device=device)

    @torch.compile(fullgraph=full, backend=compiler)
    def run(indices, a, b, first, second):
        return multigather.gather(indices, a, b, out=(first, second), backend=target.backend)

    def arguments():
        a, b = torch.arange(4.0, device=device), torch.arange(10.0, 14.0, device=device)
        return a, b, torch.zeros(3, device=device), torch.zeros(3, device=device)

    for _ in range(2):
        a, b, first, second = arguments()
        whole = torch.zeros(5, device=device)
        for wrong in (
            (a, b, a[:3], second),
            (a, b, first, a[1:]),
            (a, b, whole[:3], whole[2:]),
            (a.clone().requires_grad_(), b, first, second),
            (a, b, first, second.clone().requires_grad_()),
        ):
            before = [each.detach().clone() for each in wrong]
            error = error_of(run, indices, *wrong)
            if error:
                assert "out" in error or "gradients" in error
                assert all(torch.equal(*pair) for pair in zip(wrong, before, strict=True))
            else:
                # Inductor may put a copy in the place of an output at an odd address.
                assert compiler == "inductor" and not any(each.requires_grad for each in wrong)
                assert torch.equal(wrong[3], before[1][indices])
        a, b, first, second = arguments()
        run(indices, a, b, first, second)
        assert first.tolist() == [3, 0, 1]
        assert second.tolist() == [13, 10, 11]


def test_no_gradients_of_outputs_under_no_grad(target: Target) -> None:
    buffer = torch.arange(4.0, device=target.device, requires_grad=True)
    indices = torch.tensor([3, 0], device=target.device)
    out = torch.zeros(2, device=target.device)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def run(indices, buffer, out):
        return multigather.gather(indices, buffer, out=(out,), backend=target.backend)[0] + 1

    with torch.no_grad():
        assert run(indices, buffer, out).tolist() == [4, 1]
    assert out.tolist() == [3, 0]


def test_a_plan_into_outputs_in_a_graph(target: Target) -> None:
    table = {"a": torch.arange(4.0, device=target.device)}
    plan = multigather.plan(table, backend=target.backend)
    out = torch.zeros(2, device=target.device)
    indices = torch.tensor([3, 0], device=target.device)
    table["a"] = torch.zeros(4, device=target.device)  # the plan keeps what it was made of

    @torch.compile(fullgraph=True, backend="aot_eager")
    def run(indices, out):
        return plan(indices, out=({"a": out},))[0]["a"]

    assert run(indices, out).tolist() == [3, 0]
    assert out.tolist() == [3, 0]


def test_the_operators_are_well_behaved(target: Target) -> None:
    """Torch's own checks of an operator that writes, and of the gather's transpose."""
    indices = torch.tensor([1, 0, 1], device=target.device)
    buffer = torch.rand(4, 2, device=target.device)
    out = torch.zeros(3, 2, device=target.device)
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    opcheck(
        torch.ops.multigather.gather_into.default,
        (indices, [buffer], "raise", target.backend, [out]),
        test_utils=tests,
    )
    gradient = torch.rand(3, 2, device=target.device, requires_grad=True)
    opcheck(
        torch.ops.multigather.add_rows.default,
        (indices, [gradient], [4], "raise", None),
        test_utils=tests,
    )


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_traced_by_torch_jit(target: Target) -> None:
    """A trace has the operator, for any number of indices; known layouts or not."""
    buffer = torch.arange(12.0, device=target.device).view(4, 3)
    indices = torch.tensor([3, 0], device=target.device)

    def run(indices, buffer):
        return multigather.gather(indices, {"a": buffer}, None, backend=target.backend)[0]["a"]

    for _ in range(2):
        traced = torch.jit.trace(run, (indices, buffer))
        assert "multigather::gather" in str(traced.graph)
        others = torch.tensor([1, -1, 2, 2, 0], device=target.device)
        assert torch.equal(traced(others, buffer * 2), buffer[others] * 2)
        run(indices, buffer)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_exported_to_onnx_it_is_torchs_operations(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ONNX has no operator of ours; a trace for it has those of torch, with the same rows."""
    buffer = torch.arange(12.0, device=target.device).view(4, 3)
    indices = torch.tensor([3, -4, 0], device=target.device)
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    traced = torch.jit.trace(
        lambda indices, buffer: multigather.gather(indices, buffer)[0], (indices, buffer)
    )
    assert "multigather::" not in str(traced.graph)
    assert torch.equal(traced(indices, buffer), buffer[indices])
