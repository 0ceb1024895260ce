"""Plans: the same results as `gather`, for the same buffers only."""

from __future__ import annotations

import json
import pickle
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Slab, assert_gathered, in_threads
from conftest import Target

import multigather
from multigather import api, native, shortcut


@pytest.fixture(params=["native", "generated"], autouse=True)
def way(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test learns its repeated calls once compiled and once generated."""
    if request.param == "native":
        if native.extension is None:
            pytest.skip(native.description)
        yield
        return
    api.forget()
    with native.without():
        yield
    api.forget()


def buffers(target: Target) -> list[torch.Tensor]:
    return [
        Slab(40, (9,), torch.float32, target.device, seed=1).tensor,
        Slab(30, (), torch.bool, target.device, seed=2).tensor,
        Slab(50, (64,), torch.uint8, target.device, offset=1, seed=3).tensor,
    ]


def test_plan_gathers_what_gather_gathers(target: Target) -> None:
    """Repeated calls with other indices, counts, index dtypes and shapes, and changed values."""
    sources = buffers(target)
    plan = multigather.plan(*sources, backend=target.backend)
    generator = torch.Generator().manual_seed(0)
    for turn in range(12):
        for count in (1, 7, 0, 7, 33):
            dtype = (torch.int64, torch.int32)[turn % 2]
            indices = torch.randint(30, (count,), generator=generator).to(dtype).to(target.device)
            for output, source in zip(plan(indices), sources, strict=True):
                assert_gathered(output, indices, source)
        sources[0].view(torch.int32).add_(1)
    indices = torch.tensor([[1, 2], [29, -1]], device=target.device)
    for output, source in zip(plan(indices), sources, strict=True):
        assert_gathered(output, indices, source)


def test_plan_mirrors_its_arguments(target: Target) -> None:
    """Dicts and None, also on the repeated call, and out=."""
    a, b, _ = buffers(target)
    plan = multigather.plan({"a": a, "none": None}, None, b, backend=target.backend)
    indices = torch.tensor([3, 0, 29], device=target.device)
    for _ in range(3):
        first, none, last = plan(indices)
        assert list(first) == ["a", "none"] and first["none"] is None and none is None
        assert_gathered(first["a"], indices, a)
        assert_gathered(last, indices, b)
    into = ({"a": torch.empty_like(a[:3]), "none": None}, None, torch.empty_like(b[:3]))
    written = plan(indices, out=into)
    assert written[0]["a"] is into[0]["a"] and written[2] is into[2]
    assert_gathered(into[0]["a"], indices, a)


@pytest.mark.parametrize("called", [0, 2], ids=["first call", "repeated call"])
@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.resize_(20, 9),
        lambda t: t.set_(torch.zeros(40, 9, device=t.device)),
        lambda t: t.as_strided_((9, 40), (1, 9)),
        lambda t: t.unsqueeze_(1),
        lambda t: setattr(t, "data", torch.ones(40, 9, device=t.device)),
    ],
    ids=["resized", "moved", "transposed", "reshaped", "data"],
)
def test_changed_buffers_are_refused(target: Target, change, called: int) -> None:
    """A buffer that is no longer laid out, or no longer lies, where the plan saw it."""
    sources = buffers(target)
    sources[0] = sources[0].clone()
    plan = multigather.plan(*sources, backend=target.backend)
    indices = torch.tensor([1, 2], device=target.device)
    for _ in range(called):
        plan(indices)
    change(sources[0])
    for _ in range(2):
        with pytest.raises(ValueError, match=r"tensor 0 of the plan has changed.*make a new plan"):
            plan(indices)


def test_gather_follows_changed_buffers(target: Target) -> None:
    """Where a plan refuses, gather resolves anew: it never reads by an old layout."""
    source = torch.arange(360, dtype=torch.float32, device=target.device).view(40, 9)
    indices = torch.tensor([1, 5, 7], device=target.device)
    for change in (
        lambda: source.resize_(20, 9),
        lambda: source.set_(torch.randn(30, 4, device=target.device)),
        lambda: source.as_strided_((20, 2), (4, 1)),
        lambda: source.set_(torch.randn(401, device=target.device)[1:].view(100, 4)),
    ):
        for _ in range(3):
            assert_gathered(
                multigather.gather(indices, source, backend=target.backend)[0], indices, source
            )
        change()
        for _ in range(3):
            assert_gathered(
                multigather.gather(indices, source, backend=target.backend)[0], indices, source
            )


def test_other_alignment_under_the_same_layout(target: Target) -> None:
    """Views that differ only in their address, by any number of bytes, in calls that repeat."""
    memory = torch.arange(4096, device=target.device).to(torch.uint8)
    indices = torch.tensor([3, 0, 7], device=target.device)
    for _ in range(3):
        for offset in (0, 16, 1, 8, 4, 2, 32):
            source = memory[offset : offset + 256].view(16, 16)
            (output,) = multigather.gather(indices, source, backend=target.backend)
            assert_gathered(output, indices, source)


@pytest.mark.parametrize("through", ["gather", "plan"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8], ids=str)
def test_repeated_calls_with_indices_of_any_shape(
    target: Target, through: str, dtype: torch.dtype
) -> None:
    """Again and again, mixed, and with a bad index among them."""
    sources = buffers(target)
    plan = multigather.plan(*sources, backend=target.backend)

    def rows(indices: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if through == "plan":
            return plan(indices)
        return multigather.gather(indices, *sources, backend=target.backend)

    if target.name == "triton-interpreter" and dtype != torch.int64:
        pytest.skip("Triton's interpreter takes a minute")
    values = torch.arange(6, device=target.device).to(dtype)
    shapes = ((1, 2, 3), (6,), (6, 1), (), (3, 2), (0, 3), (1, 2, 3))
    for _ in range(1 if target.name == "triton-interpreter" else 3):
        for shape in shapes:
            indices = values[: torch.Size(shape).numel()].view(shape)
            for each in (indices, indices.t() if len(shape) == 2 else indices):
                for result, source in zip(rows(each), sources, strict=True):
                    assert_gathered(result, each, source)
                    assert result.is_contiguous()
    bad = values.view(3, 2).clone()
    bad[2, 0] = 99
    with pytest.raises(IndexError, match=r"\[(2, 0|4)\] is 99, out of range for bufs\[0\]"):
        rows(bad)
        multigather.check()
    for result, source in zip(rows(values.view(3, 2)), sources, strict=True):
        assert_gathered(result, values.view(3, 2), source)


def test_plan_is_refused_when_it_is_made(target: Target) -> None:
    """Bad buffers and options are refused before the first call."""
    (source, *_) = buffers(target)
    with pytest.raises(ValueError, match="bounds"):
        multigather.plan(source, bounds="wrap", backend=target.backend)
    with pytest.raises(TypeError, match=r"bufs\[1\]"):
        multigather.plan(source, "text", backend=target.backend)
    if target.backend != "torch":
        with pytest.raises(multigather.UnsupportedError, match="not contiguous"):
            multigather.plan(source[:, ::2], backend=target.backend)


def test_plan_reports_bad_indices(target: Target) -> None:
    """A repeated call reports a bad index as the first one does."""
    source, *_ = buffers(target)
    plan = multigather.plan(source, backend=target.backend)
    good = torch.tensor([0, 39], device=target.device)
    bad = torch.tensor([0, 40], device=target.device)
    for _ in range(3):
        plan(good)
        with pytest.raises(
            IndexError, match=r"\[1\] is 40, out of range for bufs\[0\] with 40 rows"
        ):
            plan(bad)
            multigather.check()
    assert_gathered(plan(good)[0], good, source)


def test_plan_keeps_its_buffers_and_gather_none(target: Target) -> None:
    """A plan outlives the caller's references; the shortcuts of gather hold no tensor."""
    source = torch.randn(40, 9, device=target.device)
    wanted, alive = source.clone(), weakref.ref(source)
    indices = torch.tensor([1, 0], device=target.device)
    multigather.gather(indices, source, backend=target.backend)
    plan = multigather.plan(source, backend=target.backend)
    plan(indices)
    del source
    assert torch.equal(plan(indices)[0], wanted[indices])
    del plan
    assert alive() is None


def test_threads_share_a_plan(target: Target) -> None:
    """Calls from many threads do not mix their indices, counts or outputs."""
    if target.name == "triton-interpreter":
        pytest.skip(
            "Triton's interpreter patches its language while a kernel runs, for all threads"
        )
    sources = buffers(target)
    plan = multigather.plan(*sources, backend=target.backend)
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            generator = torch.Generator().manual_seed(seed)
            for _ in range(40):
                count = int(torch.randint(1, 20, (1,), generator=generator))
                indices = torch.randint(30, (count,), generator=generator).to(target.device)
                for output, source in zip(plan(indices), sources, strict=True):
                    assert_gathered(output, indices, source)
        except BaseException as error:
            failures.append(error)

    in_threads(8, work)
    assert not failures


def test_inference_mode_and_gradients_do_not_confuse_a_shortcut(target: Target) -> None:
    """A guard made in one mode is not used in another that needs more."""
    source = torch.randn(40, 9, dtype=torch.float64, device=target.device)
    indices = torch.tensor([1, 0, 1], device=target.device)
    for _ in range(3):
        multigather.gather(indices, source, backend=target.backend)
        with torch.inference_mode():
            (output,) = multigather.gather(indices, source, backend=target.backend)
            assert torch.equal(output, source[indices])
    source.requires_grad_()
    for _ in range(3):
        (output,) = multigather.gather(indices, source, backend=target.backend)
        (gradient,) = torch.autograd.grad(output.sum(), source)
        assert gradient[1].tolist() == [2.0] * 9


def test_without_torchs_private_guard(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the private class is missing every call takes the long way."""
    api.forget()
    monkeypatch.setattr(shortcut, "TensorGuards", None)
    source, *_ = buffers(target)
    indices = torch.tensor([1, 2], device=target.device)
    plan = multigather.plan(source, backend=target.backend)
    for _ in range(3):
        assert_gathered(
            multigather.gather(indices, source, backend=target.backend)[0], indices, source
        )
        assert_gathered(plan(indices)[0], indices, source)
    assert not api._shortcuts


@pytest.mark.parametrize("planned", [False, True], ids=["gather", "plan"])
def test_repeated_outputs_are_still_checked(target: Target, planned: bool) -> None:
    """A known set of outputs is written without its checks, any other one with all of them."""
    sources = buffers(target)
    plan = multigather.plan(*sources, backend=target.backend)

    def call(indices, out):
        if planned:
            return plan(indices, out=out)
        return multigather.gather(indices, *sources, out=out, backend=target.backend)

    memory = torch.zeros(64, dtype=torch.int64, device=target.device)
    indices = memory[:3]
    indices.copy_(torch.tensor([2, 0, 29]))
    outs = [torch.empty_like(source[:3]) for source in sources]
    for turn in range(4):
        indices.copy_(torch.tensor([turn, 29 - turn, 5]))
        assert all(got is given for got, given in zip(call(indices, outs), outs, strict=True))
        for output, source in zip(outs, sources, strict=True):
            assert_gathered(output, indices, source)
    # Other indices of the same layout that lie in an output.
    overlapping = memory.view(torch.float32)[:27].view(3, 9)
    shared = [overlapping, *outs[1:]]
    elsewhere = memory[32:35]
    elsewhere.copy_(indices)
    for _ in range(2):
        call(elsewhere, shared)
    before = overlapping.clone()
    with pytest.raises(ValueError, match=r"out\[0\] shares memory with indices"):
        call(memory[1:4], shared)
    assert torch.equal(overlapping, before)
    # An output that became another shape, or another number of indices.
    outs[1].resize_(2)
    with pytest.raises(ValueError, match=r"out\[1\] has shape"):
        call(indices, outs)
    outs[1].resize_(3)
    with pytest.raises(ValueError, match=r"out\[0\] has shape"):
        call(elsewhere[:2], outs)
    with pytest.raises(ValueError, match="one item per buffer"):
        call(indices, outs[:2])
    bad = torch.tensor([0, 50, 1], device=target.device)
    with pytest.raises(IndexError, match=r"\[1\] is 50"):
        call(bad, outs)
        multigather.check()


def test_new_views_of_the_same_layout_share_a_shortcut(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that slices its buffers for every call makes no new guard for every call."""
    made = []

    def counted(*arguments):
        made.append(arguments)
        return shortcut.guard(*arguments)

    api.forget()
    monkeypatch.setattr(api, "guard", counted)
    memory = torch.arange(4096, device=target.device).to(torch.uint8).view(64, 64)
    indices = torch.tensor([3, 0, 7], device=target.device)
    views = []
    for _ in range(20):
        views.append(memory[:32])
        (output,) = multigather.gather(indices, views[-1], backend=target.backend)
        assert_gathered(output, indices, views[-1])
    assert len(made) == 1
    api.forget()


@pytest.mark.parametrize("bounds", ["raise", "fill", "clip", "unchecked"])
@pytest.mark.parametrize("through", ["gather", "plan"])
def test_repeated_calls_on_a_cpu(through: str, bounds: str) -> None:
    """The generated way of a known layout: every kind of index after it was learned."""
    buffers = [torch.arange(40.0).reshape(10, 4), torch.arange(10) % 3 == 0, torch.arange(10)]
    plan = multigather.plan(*buffers, bounds=bounds)

    def rows(indices: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if through == "plan":
            return plan(indices)
        return multigather.gather(indices, *buffers, bounds=bounds)

    def check(*values: int) -> None:
        indices = torch.tensor(values, dtype=torch.int64)
        for _ in range(3):
            for out, buffer in zip(rows(indices), buffers, strict=True):
                chosen = indices
                if bounds == "clip":
                    chosen = indices.clamp(0, 9)
                expected = buffer[chosen.clamp(-10, 9)]
                if bounds == "fill":
                    expected[(indices < 0) | (indices > 9)] = 0
                assert out.dtype == buffer.dtype
                assert torch.equal(out, expected)

    check(3, 3, 0)
    check(9)
    check(*range(10), *range(10))
    check()
    if bounds != "unchecked":
        check(1, -2, 3)
        check(4, 5, 6)
    if bounds == "raise":
        for _ in range(3):
            with pytest.raises(IndexError, match=r"indices\[1\] is 10, out of range for bufs\[0\]"):
                rows(torch.tensor([0, 10, 2]))
    elif bounds != "unchecked":
        check(0, 10, 2)
    check(7, 8, 9)


def test_repeated_calls_on_a_cpu_see_other_sizes_and_moved_buffers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = tmp_path / "record.jsonl"
    monkeypatch.setenv("MULTIGATHER_RECORD", str(record))
    api.forget()
    buffer = torch.arange(30.0).reshape(10, 3)
    plan = multigather.plan(buffer)
    for count in (2, 2, 2, 3, 9, 2, 100):
        indices = torch.arange(count) % 10
        assert torch.equal(multigather.gather(indices, buffer)[0], buffer[indices])
        assert torch.equal(plan(indices)[0], buffer[indices])
    # One of each power of two, by whichever came first.
    found = [json.loads(line)["indices"] for line in record.read_text().splitlines()]
    assert found == ["int64[2]", "int64[3]", "int64[9]", "int64[100]"]
    buffer.set_(torch.zeros(10, 3))
    with pytest.raises(ValueError, match="has changed"):
        plan(torch.tensor([1, 2]))
    assert not multigather.gather(torch.tensor([1, 2]), buffer)[0].any()


def dict_of(a: Any, b: Any) -> Any:
    return {"a": a, "b": b}


def list_of(a: Any, b: Any) -> Any:
    return [a, [b]]


def tensordict_of(a: Any, b: Any) -> Any:
    tensordict = pytest.importorskip("tensordict")
    return tensordict.TensorDict({"a": a, "b": b}, [len(a)])


CHANGES: dict[str, Any] = {
    "replaced": lambda table, new: table.__setitem__(0 if isinstance(table, list) else "a", new),
    "added": lambda table, new: (
        table.append(new) if isinstance(table, list) else table.update({"c": new})
    ),
    "deleted": lambda table, new: table.__delitem__(0 if isinstance(table, list) else "a"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("make", [dict_of, list_of, tensordict_of])
@pytest.mark.parametrize("known", [0, 1, 4])
def test_a_container_that_changes(target: Target, make: Any, change: Any, known: int) -> None:
    """A plan is of the tensors that it was made from, whatever becomes of their container."""
    a, b = torch.arange(5.0, device=target.device), torch.arange(5, device=target.device) * 2
    rows = 5 if make is tensordict_of else 1000
    table = make(a, b)
    plan = multigather.plan(table, None, backend=target.backend)
    indices = torch.tensor([4, 0], device=target.device)
    for _ in range(known):
        plan(indices)
    change(table, torch.full((rows,), -1.0, device=target.device))
    copy = pickle.loads(pickle.dumps(plan)) if target.device == "cpu" else plan
    for each in (plan, copy):
        for wanted in (indices, indices.int(), indices[:1], indices.view(2, 1)):
            for _ in range(2):
                found, nothing = each(wanted)
                assert nothing is None
                leaves = [*found.values()] if hasattr(found, "values") else [found[0], found[1][0]]
                assert torch.equal(leaves[0], a[wanted.long()])
                assert torch.equal(leaves[1], b[wanted.long()])
        assert "  float32 [5]  " in each.explain(indices).request
    with pytest.raises(IndexError, match=r"is 7, out of range for .* with 5 rows"):
        plan(torch.tensor([7], dtype=torch.int32, device=target.device))
        multigather.check()


def test_an_array_that_is_laid_out_anew(target: Target) -> None:
    """A plan of a NumPy array is of its memory as it was laid out then."""
    if target.device != "cpu":
        pytest.skip("arrays are on the CPU")
    numpy = pytest.importorskip("numpy")
    array = numpy.arange(12, dtype=numpy.int32)
    plan = multigather.plan(array, backend=target.backend)
    indices = torch.tensor([11, 0])
    plan(indices)
    array.shape = (2, 6)
    for _ in range(3):
        assert plan(indices)[0].tolist() == [11, 0]
