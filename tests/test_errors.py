"""Bad arguments: the right exception, a text that helps, and outputs that nobody wrote to.

On a GPU the IndexError of mode "raise" is deferred, so a test of it calls `multigather.check`.
"""

from __future__ import annotations

import re
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from cases import Slab, assert_gathered, in_threads
from conftest import HAVE_GPU, Target

import multigather
from multigather import api, faults
from multigather.cache import rules
from multigather.errors import bad_index_message

ROWS = (5, 4)  # of the two buffers of the good call


@pytest.fixture(autouse=True)
def no_prototype_warnings() -> Iterator[None]:
    """Torch warns that nested, quantized and sparse tensors are prototypes or going away."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


@dataclass
class Call:
    """A call that works, for tests to break in one place.

    Attributes:
        target: where.
        options: keyword arguments of `multigather.gather`, without ``out``.
        guarded: outputs, poisoned; everything around and in them is watched.
    """

    target: Target
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        device = self.target.device
        self.indices: Any = torch.tensor([2, 0, -1], device=device)
        self.slabs = [
            Slab(ROWS[0], (3,), torch.float32, device, seed=1),
            Slab(ROWS[1], (), torch.int64, device, gap=8, seed=2),
        ]
        self.bufs: list[Any] = [slab.tensor for slab in self.slabs]
        self.guarded = [
            Slab(3, (3,), torch.float32, device, gap=4),
            Slab(3, (), torch.int64, device),
        ]
        for slab in self.guarded:
            slab.poison()
        self.out: Any = [slab.tensor for slab in self.guarded]
        self.options.setdefault("backend", self.target.backend)

    def __call__(self) -> tuple[Any, ...]:
        return multigather.gather(self.indices, *self.bufs, out=self.out, **self.options)

    def refused(self, kind: type[Exception], *fragments: str) -> str:
        """Expect a refusal whose text has all the fragments; nothing may have been written."""
        with pytest.raises(kind) as caught:
            self()
        assert type(caught.value) is kind
        for fragment in fragments:
            assert fragment in str(caught.value)
        for slab in (*self.slabs, *self.guarded):
            slab.assert_unchanged()
        return str(caught.value)


@pytest.fixture(params=["first call", "known layout"])
def call(request: pytest.FixtureRequest, target: Target) -> Call:
    """A good call, before and after the library has remembered its layout."""
    api.forget()
    if request.param == "known layout":
        good = Call(target)
        outputs = good()
        for output, buffer in zip(outputs, good.bufs, strict=True):
            assert_gathered(output, good.indices, buffer)
    return Call(target)


def index_error(target: Target, gather: Callable[[], Any]) -> str:
    """Text of the IndexError that a call ends in: its own on a CPU, `check`'s on a GPU."""
    if target.device == "cuda":
        gather()
        gather = multigather.check
    with pytest.raises(IndexError) as caught:
        gather()
    return str(caught.value)


# ---------------------------------------------------------------------------------- indices, bufs


@pytest.mark.parametrize(
    ("make", "fragments"),
    [
        (lambda i: i > 0, ("torch.bool", "mask.nonzero()")),
        (lambda i: i.to(torch.float32), ("torch.float32", "indices.to(torch.int64)")),
        (lambda i: i.to(torch.bfloat16), ("torch.bfloat16", "indices.to(torch.int64)")),
        (lambda i: i.to(torch.complex64), ("torch.complex64", "indices.to(torch.int64)")),
        (lambda i: i.tolist(), ("list", "torch.as_tensor(indices)")),
        (lambda i: 2, ("int", "torch.as_tensor(indices)")),
        (lambda i: slice(3), ("slice", "torch.as_tensor(indices)")),
        (lambda i: None, ("NoneType", "torch.as_tensor(indices)")),
        (lambda i: i.to_sparse(), ("torch.sparse_coo", ".to_dense()")),
        (lambda i: torch.nested.nested_tensor([i, i]), ("nested", ".to_padded_tensor(0)")),
        (
            lambda i: torch.nested.nested_tensor([i, i], layout=torch.jagged),
            ("nested", ".to_padded_tensor(0)"),
        ),
    ],
    ids=[
        "bool", "float32", "bfloat16", "complex64", "list", "int", "slice", "None",
        "sparse", "nested", "jagged",
    ],
)  # fmt: skip
def test_indices_that_are_no_integer_tensor(
    call: Call, make: Callable[[Any], Any], fragments: tuple[str, ...]
) -> None:
    """TypeError, also where a call of the same layout with good indices came before."""
    call.indices = make(call.indices)
    call.refused(TypeError, "indices", *fragments)


@pytest.mark.parametrize(
    ("make", "fragments"),
    [
        (lambda b: [1.0, 2.0], ("bufs[1][0]", "float", "torch.as_tensor")),
        (lambda b: {"obs": b, "act": "x"}, ("bufs[1]['act']", "str", "torch.as_tensor")),
        (lambda b: 7, ("bufs[1]", "int", "torch.as_tensor")),
        (lambda b: b.to_sparse(), ("bufs[1]", "torch.sparse_coo", ".to_dense()")),
        (
            lambda b: torch.ones(2, 2, device=b.device).to_sparse_csr(),
            ("bufs[1]", "torch.sparse_csr", ".to_dense()"),
        ),
        (
            lambda b: torch.nested.nested_tensor([b, b]),
            ("bufs[1]", "nested", ".to_padded_tensor(0)"),
        ),
        (
            lambda b: (torch.nested.nested_tensor([b, b], layout=torch.jagged),),
            ("bufs[1][0]", "nested", ".to_padded_tensor(0)"),
        ),
        (
            lambda b: torch.quantize_per_tensor(b.float(), 1.0, 0, torch.quint8),
            ("bufs[1]", "torch.quint8", ".int_repr()"),
        ),
    ],
    ids=["list", "str", "int", "coo", "csr", "nested", "jagged", "quantized"],
)
def test_buffers_that_are_no_strided_tensors(
    call: Call, make: Callable[[Any], Any], fragments: tuple[str, ...]
) -> None:
    """TypeError with the buffer's place in the arguments."""
    call.bufs[1] = make(call.bufs[1])
    call.refused(TypeError, *fragments)


def test_tensors_that_hold_tensors(call: Call) -> None:
    """A wrapper subclass has no memory of its own to gather from."""
    from torch.testing._internal.two_tensor import TwoTensor

    call.bufs[0] = TwoTensor(call.bufs[0], call.bufs[0])
    call.refused(TypeError, "bufs[0]", "TwoTensor", "holds other tensors")


def test_zero_dimensional_buffer(call: Call) -> None:
    """ValueError; a scalar has no rows."""
    call.bufs[1] = call.bufs[1][0]
    call.refused(ValueError, "bufs[1]", "no dimensions", ".reshape(1)")


@pytest.mark.parametrize("option", ["bounds", "backend"])
@pytest.mark.parametrize("value", ["", "Raise", "numba", 3, ["raise"]], ids=repr)
def test_unknown_options(call: Call, option: str, value: Any) -> None:
    """ValueError with the values that exist."""
    call.options[option] = value
    valid = {
        "bounds": ("'raise'", "'fill'", "'clip'", "'unchecked'"),
        "backend": ("None", "'cupy'", "'triton'", "'torch'"),
    }
    call.refused(ValueError, option, repr(value), *valid[option])


def test_bounds_none_and_unknown_keywords(call: Call) -> None:
    """None is no bounds mode, and a misspelt keyword is Python's TypeError."""
    call.options["bounds"] = None
    call.refused(ValueError, "bounds", "None", "'raise'")
    call.options = {"bound": "raise"}
    call.refused(TypeError, "bound")
    with pytest.raises(TypeError, match="indices"):
        multigather.gather()


# ---------------------------------------------------------------------------------------- devices


def test_buffers_on_two_devices(call: Call) -> None:
    """ValueError naming both, also inside a container."""
    call.bufs[1] = call.bufs[1].to("meta")
    here = str(call.bufs[0].device)
    call.refused(ValueError, "bufs[0]", "bufs[1]", here, "meta", ".to()")
    call.bufs[1] = {"x": [call.bufs[1]]}
    call.refused(ValueError, "bufs[0]", "bufs[1]['x'][0]", here, "meta", ".to()")


def test_indices_on_another_device(call: Call) -> None:
    """ValueError that says where to move them."""
    call.indices = call.indices.to("meta")
    call.refused(ValueError, "indices", "meta", f".to({str(call.bufs[0].device)!r})")
    call.indices = torch.tensor([2, 0, 1], device=call.target.device)
    call.bufs = [buffer.to("meta") for buffer in call.bufs]
    call.refused(ValueError, "indices", "meta", ".to('meta')")


def test_output_on_another_device(call: Call) -> None:
    """ValueError; the other output stays as it was."""
    call.out[1] = call.out[1].to("meta")
    call.refused(ValueError, "out[1]", "meta", str(call.bufs[0].device), "move it")


def test_everything_on_the_meta_device() -> None:
    """Meta tensors have shapes only, and that is what comes back, with out= too."""
    indices = torch.empty(2, 3, dtype=torch.int64, device="meta")
    buffer = torch.empty(7, 4, device="meta", dtype=torch.float16)
    (made,) = multigather.gather(indices, buffer)
    out = torch.empty(2, 3, 4, device="meta", dtype=torch.float16)
    (written,) = multigather.gather(indices, buffer, out=(out,))
    assert written is out
    for each in (made, written):
        assert each.device.type == "meta"
        assert each.shape == (2, 3, 4)
        assert each.dtype == torch.float16


@pytest.mark.gpu
@pytest.mark.skipif(not HAVE_GPU, reason="torch sees no CUDA device")
def test_pageable_buffers_with_indices_on_a_gpu() -> None:
    """ValueError: a GPU cannot read them; pinned memory or CPU indices are the way out."""
    with pytest.raises(ValueError, match=r"bufs\[1\].*pageable.*pin_memory\(\).*indices\.cpu\(\)"):
        multigather.gather(
            torch.tensor([0], device="cuda"), torch.zeros(2).pin_memory(), torch.zeros(2)
        )
    with pytest.raises(ValueError, match=r"one device: bufs\[0\].*cuda:0, bufs\[1\] is on cpu"):
        multigather.gather(
            torch.tensor([0], device="cuda"), torch.zeros(2, device="cuda"), torch.zeros(2)
        )


# ------------------------------------------------------------------------------------------- out=


@pytest.mark.parametrize(
    ("number", "make"),
    [
        (0, lambda out: out[:2]),
        (0, lambda out: out.new_zeros(4, 3)),
        (0, lambda out: out.new_zeros(0)),
        (0, lambda out: out.new_zeros(9)),
        (0, lambda out: out.unsqueeze(0)),
        (0, lambda out: out.unsqueeze(-1)),
        (0, lambda out: out[:, :2]),
        (1, lambda out: out.unsqueeze(-1)),
        (1, lambda out: out[0]),
    ],
    ids=["short", "long", "empty", "flat", "leading 1", "trailing 1", "narrow", "column", "0-d"],
)
def test_output_of_another_shape(
    call: Call, number: int, make: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """pytorch#1193: ValueError with both shapes, and the output keeps its shape."""
    wanted = list(call.out[number].shape)
    given = call.out[number] = make(call.out[number])
    shape = list(given.shape)
    call.refused(ValueError, f"out[{number}]", str(shape), str(wanted), "never resized")
    assert list(given.shape) == shape


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint32, torch.float16, torch.complex64])
def test_output_of_another_dtype(call: Call, dtype: torch.dtype) -> None:
    """ValueError even where the sizes agree: bytes are never converted."""
    call.out[0] = torch.zeros(3, 3, dtype=dtype, device=call.target.device)
    call.refused(ValueError, "out[0]", str(dtype), "torch.float32", "bufs[0]")
    assert not call.out[0].view(torch.uint8).any()


@pytest.mark.parametrize(
    "make",
    [
        lambda out: out[0],
        lambda out: {"a": out[0], "b": out[1]},
        lambda out: (out[0],),
        lambda out: (*out, out[1]),
        lambda out: (),
        lambda out: (out[0], [out[1]]),
        lambda out: (out[0], {"a": out[1]}),
        lambda out: iter(out),
    ],
    ids=["tensor", "dict", "too few", "too many", "none", "list item", "dict item", "iterator"],
)
def test_outputs_of_another_structure(call: Call, make: Callable[[Any], Any]) -> None:
    """ValueError: one item per buffer argument, in its structure."""
    call.out = make(call.out)
    call.refused(ValueError, "out", "one item per buffer argument (2)", type(call.out).__name__)


def test_outputs_of_another_nested_structure(call: Call) -> None:
    """The keys of a dict count, and None stands where the buffer is None and nowhere else."""
    first, second = call.out
    call.bufs = [{"a": call.bufs[0], "b": None}, call.bufs[1]]
    for item in ({"a": first}, {"a": first, "c": None}, first, [first, None]):
        call.out = (item, second)
        call.refused(ValueError, "out", "same structure")
    for item in ({"a": None, "b": None}, {"a": first, "b": second}, {"a": None, "b": first}):
        call.out = (item, second)
        call.refused(ValueError, "out", "None exactly where")
    call.out = ({"a": first, "b": None}, second)
    outputs = call()
    assert outputs[0]["a"] is first
    assert outputs[0]["b"] is None


def test_outputs_where_there_is_nothing_to_gather(target: Target) -> None:
    """out= is checked even where no buffer is given."""
    indices = torch.tensor([0], device=target.device)
    out = torch.zeros(1, device=target.device)
    for bufs, wrong in (((), (out,)), ((), out), ((None,), (out,)), ((None,), ()), (({},), (out,))):
        with pytest.raises(ValueError, match=r"^out must "):
            multigather.gather(indices, *bufs, out=wrong, backend=target.backend)
    assert multigather.gather(indices, out=(), backend=target.backend) == ()
    assert multigather.gather(indices, None, out=(None,), backend=target.backend) == (None,)


@pytest.mark.parametrize(
    "make",
    [
        lambda out: out.tolist(),
        lambda out: 5,
        lambda out: torch.zeros(3, dtype=torch.int64, device=out.device).to_sparse(),
    ],
    ids=["list", "int", "sparse"],
)
def test_output_that_is_no_strided_tensor(call: Call, make: Callable[[Any], Any]) -> None:
    """TypeError, or ValueError for a container where a tensor should be."""
    call.out[1] = make(call.out[1])
    kind = ValueError if isinstance(call.out[1], list) else TypeError
    call.refused(kind, "out")


def test_output_whose_rows_are_not_contiguous(call: Call) -> None:
    """ValueError; only whole rows can be written."""
    device = call.target.device
    call.indices = call.indices[:3]
    for out in (
        torch.zeros(3, 3, device=device).t(),
        torch.zeros(3, 6, device=device)[:, ::2],
        torch.zeros(3, 1, device=device).expand(3, 3),
    ):
        call.out[0] = out
        call.refused(ValueError, "out[0]", str(out.stride()), "not contiguous", "whole rows")
        assert not out.any()


def test_outputs_whose_rows_overlap(call: Call) -> None:
    """ValueError for every way of giving two output rows the same memory."""
    memory = torch.zeros(64, device=call.target.device)
    for out in (
        memory[:3].expand(3, 3),
        memory.as_strided((3, 3), (2, 1)),
        memory.as_strided((3, 3), (0, 1)),
    ):
        call.out[0] = out
        call.refused(ValueError, "out[0]", str(out.stride()), "overlap one another")
    call.indices = torch.tensor([[2, 0, 1], [3, 4, 1]], device=call.target.device)
    call.bufs, call.guarded = call.bufs[:1], call.guarded[1:]
    for strides in ((3, 0, 1), (0, 3, 1), (0, 0, 1), (3, 3, 1), (6, 3, 1)):
        call.out = (memory.as_strided((2, 3, 3), strides),)
        call.refused(ValueError, "out[0]", str(strides))
    assert not memory.any()
    call.out = (memory.as_strided((2, 3, 3), (9, 3, 1)),)
    assert_gathered(call()[0], call.indices, call.bufs[0])


def test_output_that_gradients_or_lazy_bits_hang_on(call: Call) -> None:
    """ValueError with the way out for each."""
    device = call.target.device
    good = call.out[0]
    call.out[0] = torch.zeros(3, 3, device=device, requires_grad=True)
    call.refused(ValueError, "out[0]", "requires grad", "detach")
    call.out[0] = torch._neg_view(torch.zeros(3, 3, device=device))
    call.refused(ValueError, "out[0]", "negative bit", ".resolve_neg()")
    call.out[0], buffer = good, call.bufs[0]
    call.bufs[0] = buffer.detach().requires_grad_()
    call.refused(ValueError, "out=", "requires grad", "no_grad()")
    with torch.no_grad():
        assert_gathered(call()[0], call.indices, buffer)


@pytest.mark.parametrize("way", ["gather", "plan"])
def test_output_that_a_backward_needs(target: Target, way: str) -> None:
    """Autograd refuses a backward whose saved tensors were written since; it is told of ours."""
    api.forget()
    buffer, indices = (
        torch.rand(5, 3, device=target.device),
        torch.tensor([4, 0], device=target.device),
    )
    out = torch.ones(2, 3, device=target.device)
    plan = multigather.plan(buffer, backend=target.backend)
    for _ in range(4):  # the first ways of a call and the repeated ones
        weights = torch.ones(2, 3, device=target.device, requires_grad=True)
        (weights * out).sum().backward()
        loss = (weights * out).sum()
        if way == "plan":
            plan(indices, out=(out,))
        else:
            multigather.gather(indices, buffer, out=(out,), backend=target.backend)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_output_that_shares_memory_with_a_buffer(call: Call) -> None:
    """ValueError for rows, shifted rows and other types' views of a buffer's memory."""
    first = call.bufs[0]
    for out in (first[:3], first[2:], first.as_strided((3, 3), first.stride())):
        call.out[0] = out
        call.refused(ValueError, "out[0]", "bufs[0]", "shares memory", "memory of its own")
    # The last 4 bytes of each row are the first of the other buffer's.
    words = call.slabs[1].memory.view(torch.float32)
    call.out[0] = words.as_strided((3, 3), (4, 1), Slab.GUARD // 4 - 2)
    call.refused(ValueError, "out[0]", "bufs[1]", "shares memory")


def test_output_that_shares_memory_with_the_indices(call: Call) -> None:
    """ValueError; on a GPU also for indices that were there from the start."""
    memory = torch.tensor([2, 0, 1, 3, 3], device=call.target.device)
    for start, out in ((0, memory[:3]), (0, memory[1:4]), (1, memory[:3])):
        call.indices, call.out[1] = memory[start : start + 3], out
        call.refused(ValueError, "out[1]", "indices", "shares memory", "memory of its own")
    assert memory.tolist() == [2, 0, 1, 3, 3]


def test_outputs_that_share_memory_with_one_another(call: Call) -> None:
    """ValueError for the same tensor twice and for one byte in common."""
    memory = torch.zeros(16, dtype=torch.int64, device=call.target.device)
    call.bufs[0] = call.bufs[1]
    call.out = (memory[:3], memory[:3])
    call.refused(ValueError, "out[1]", "out[0]", "shares memory")
    call.out = (memory[:3], memory[2:5])
    call.refused(ValueError, "out[1]", "out[0]", "shares memory")
    call.out = (memory[:6:2], memory[4:7])
    call.refused(ValueError, "out[1]", "out[0]", "shares memory")
    assert not memory.any()
    call.out = (memory[:3], memory[3:6])
    for output in call():
        assert_gathered(output, call.indices, call.bufs[1])


@pytest.mark.parametrize("count", [1, 2, 3])
def test_disjoint_columns_of_one_table(target: Target, count: int) -> None:
    """Buffer, indices and outputs may be columns of one allocation, whatever the row count."""
    device = target.device
    table = torch.arange(60, dtype=torch.int64, device=device).view(6, 10)
    table[:, 0] = torch.tensor([5, 0, 2, 1, 4, 3], device=device)
    before = table.clone()
    buffer, indices = table[:, 1:4], table[:count, 0]
    outs = (table[:count, 5:8], table[6 - count :, 8:10])
    multigather.gather(
        indices, buffer, table[:, 4:5], out=(outs[0], outs[1][:, :1]), backend=target.backend
    )
    assert torch.equal(outs[0], before[before[:count, 0], 1:4])
    assert torch.equal(outs[1][:, :1], before[before[:count, 0], 4:5])
    table[:count, 5:8] = before[:count, 5:8]
    table[6 - count :, 8:9] = before[6 - count :, 8:9]
    assert torch.equal(table, before)
    with pytest.raises(ValueError, match=r"out\[0\] shares memory with bufs\[0\]"):
        multigather.gather(indices, buffer, out=(table[:count, 3:6],), backend=target.backend)
    assert torch.equal(table, before)


@pytest.mark.parametrize("shape", [(3, 0), (0, 3), (2, 0, 2), (0,)], ids=str)
def test_outputs_for_no_indices(target: Target, shape: tuple[int, ...]) -> None:
    """An output without elements fits, whatever its strides say."""
    indices = torch.empty(shape, dtype=torch.int32, device=target.device)
    buffer = torch.zeros(4, 5, device=target.device)
    out = torch.empty(*shape, 5, device=target.device)
    (written,) = multigather.gather(indices, buffer, out=(out,), backend=target.backend)
    assert written is out
    assert written.shape == (*shape, 5)


# ------------------------------------------------------------------------------------ bad indices


@pytest.mark.parametrize(
    ("shape", "position", "where"),
    [
        ((), 0, "indices"),
        ((5,), 3, "indices[3]"),
        ((2, 3), 5, "indices[1, 2]"),
        ((2, 3), 2, "indices[0, 2]"),
        ((2, 3, 4), 17, "indices[1, 1, 1]"),
    ],
    ids=str,
)
def test_bad_index_is_named_by_its_coordinates(
    target: Target, shape: tuple[int, ...], position: int, where: str
) -> None:
    """The error names place, value, buffer and row count; a deferred one knows the flat place."""
    indices = torch.zeros(shape, dtype=torch.int64, device=target.device)
    indices.view(-1)[position] = -8
    buffer = Slab(7, (2,), torch.int16, target.device).tensor
    text = index_error(target, lambda: multigather.gather(indices, buffer, backend=target.backend))
    if target.device == "cuda":
        where = f"indices.flatten()[{position}]"
    wanted = f"{where} is -8, out of range for bufs[0] with 7 rows (-7 <= index < 7)"
    assert text.startswith(wanted)


def test_bad_index_names_the_buffer_inside_containers(target: Target) -> None:
    """The label is the expression that leads to the buffer from the arguments."""
    indices = torch.tensor([1, 4], device=target.device)
    large, small = (Slab(rows, (), torch.int32, target.device).tensor for rows in (9, 3))

    def error(*bufs: Any) -> str:
        return index_error(
            target, lambda: multigather.gather(indices, *bufs, backend=target.backend)
        )

    assert "for bufs[1]['obs'][0] with 3 rows" in error(large, {"obs": [small, large]})
    assert "for bufs[0]['b'] with 3 rows" in error({"a": large, "b": small})
    # The same layouts as before, under other names.
    assert "for bufs[0]['z'] with 3 rows" in error({"a": large, "z": small})
    assert "for bufs[1] with 3 rows" in error(large, small)
    assert "for bufs[2] with 3 rows" in error(large, None, small)
    assert "for bufs[3] with 3 rows" in error(None, large, None, small)
    assert "for bufs[0]['b'][1] with 3 rows" in error({"a": None, "b": (large, small)})
    assert "for bufs[0]['a'][1] with 3 rows" in error({"a": (large, small), "b": None})


def test_bad_index_where_two_backends_share_the_work(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A buffer that the kernel leaves to torch keeps its own name, and so do the others."""
    both = [rules.Rule("any", name, {}, {}, "test") for name in (target.backend, "torch")]
    monkeypatch.setattr(rules, "default_rules", lambda: tuple(both))
    api.forget()
    plain, columns = (
        torch.zeros(9, 2, device=target.device),
        torch.zeros(2, 9, device=target.device).t(),
    )
    indices = torch.tensor([1, 4], device=target.device)
    for place in range(4):
        bufs = [plain, columns, plain, columns]
        bufs[place] = bufs[place][:3]
        text = index_error(target, lambda bufs=bufs: multigather.gather(indices, *bufs))
        assert f"[1] is 4, out of range for bufs[{place}] with 3 rows" in text
    picks = multigather.explain(indices, plain, columns).picks
    # The native backend takes all or none.
    assert len(picks) == 1 + (target.backend in ("cupy", "triton"))
    api.forget()


def test_first_bad_pair_is_the_one_named(target: Target) -> None:
    """Of several bad indices the first counts, and for it the first buffer that refuses it."""
    indices = torch.tensor([0, 4, 20, -20], device=target.device)
    bufs = [Slab(rows, (), torch.int64, target.device).tensor for rows in (10, 4, 3)]
    text = index_error(target, lambda: multigather.gather(indices, *bufs, backend=target.backend))
    assert "[1] is 4, out of range for bufs[1] with 4 rows" in text
    if target.device == "cuda":
        # Index 20 and -20 are bad for three buffers, index 4 for two.
        assert "7 more bad (index, buffer) pairs" in text


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (2**63 + 5, torch.uint64),
        (2**64 - 1, torch.uint64),
        (2**63 - 1, torch.uint64),
        (2**63 - 1, torch.int64),
        (-(2**63), torch.int64),
        (2**32 - 1, torch.uint32),
        (-(2**31), torch.int32),
        (65535, torch.uint16),
        (-32768, torch.int16),
        (255, torch.uint8),
        (-128, torch.int8),
    ],
    ids=str,
)
def test_bad_index_keeps_its_value(target: Target, value: int, dtype: torch.dtype) -> None:
    """The value in the error is the caller's, for the extremes of every integer type."""
    indices = torch.tensor([3, value], dtype=dtype).to(target.device)
    buffer = Slab(6, (3,), torch.uint8, target.device).tensor
    text = index_error(target, lambda: multigather.gather(indices, buffer, backend=target.backend))
    assert f"[1] is {value}, out of range for bufs[0] with 6 rows" in text
    for bounds in ("fill", "clip"):
        (output,) = multigather.gather(indices, buffer, bounds=bounds, backend=target.backend)
        assert_gathered(output, indices, buffer, bounds)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_bad_index_on_a_cpu_leaves_every_output_alone(target: Target, place: int) -> None:
    """pytorch#172019: no partial result, whichever buffer refuses; on a GPU bad rows are zero."""
    indices = torch.tensor([1, 3, 6], device=target.device)
    slabs = [
        Slab(5 if number == place else 9, (4,), torch.int32, target.device, seed=number)
        for number in range(3)
    ]
    outs = [Slab(3, (4,), torch.int32, target.device, gap=4) for _ in slabs]
    for out in outs:
        out.poison()
    text = index_error(
        target,
        lambda: multigather.gather(
            indices,
            *(slab.tensor for slab in slabs),
            out=tuple(out.tensor for out in outs),
            backend=target.backend,
        ),
    )
    assert f"[2] is 6, out of range for bufs[{place}] with 5 rows" in text
    for slab, out in zip(slabs, outs, strict=True):
        if target.device == "cpu":
            out.assert_unchanged()
        else:
            assert_gathered(out.tensor, indices, slab.tensor)
            out.assert_guards_intact()


def test_call_after_a_bad_index(target: Target) -> None:
    """The error is raised once; what is gathered afterwards is right."""
    buffer = Slab(8, (5,), torch.float32, target.device).tensor
    good, bad = (torch.tensor(each, device=target.device) for each in ([7, 0, 3], [7, 8, 3]))
    out = Slab(3, (5,), torch.float32, target.device)
    out.poison()

    def gather(indices: torch.Tensor, **options: Any) -> torch.Tensor:
        return multigather.gather(indices, buffer, backend=target.backend, **options)[0]

    if target.device == "cpu":
        with pytest.raises(IndexError):
            gather(bad)
    else:
        gather(bad)
        torch.cuda.synchronize()
        with pytest.raises(IndexError, match=r"is 8, .* by an earlier gather.*MULTIGATHER_SYNC=1"):
            gather(good, out=(out.tensor,))
        out.assert_unchanged()
    assert_gathered(gather(good), good, buffer)
    multigather.check()


@pytest.mark.parametrize("bounds", ["raise", "clip", "unchecked", "fill"])
def test_buffer_without_rows(target: Target, bounds: str) -> None:
    """IndexError at once on every device, outputs untouched; fill makes rows of zeros."""
    indices = torch.tensor([0, -1], device=target.device)
    empty = torch.empty(0, 4, device=target.device)
    full = Slab(4, (4,), torch.float32, target.device).tensor
    outs = [Slab(2, (4,), torch.float32, target.device) for _ in range(2)]
    for out in outs:
        out.poison()

    def gather(indices: torch.Tensor, out: Any = None) -> Any:
        return multigather.gather(
            indices, full, {"x": empty}, out=out, bounds=bounds, backend=target.backend
        )

    given = (outs[0].tensor, {"x": outs[1].tensor})
    if bounds == "fill":
        gather(indices, given)
        assert_gathered(outs[0].tensor, indices, full, "fill")
        assert_gathered(outs[1].tensor, indices, empty, "fill")
    else:
        for out in (None, given):
            with pytest.raises(IndexError, match=r"bufs\[1\]\['x'\] has 0 rows.*2 indices.*fill"):
                gather(indices, out)
        for out in outs:
            out.assert_unchanged()
    shapes = [item.shape for item in (lambda a, b: (a, b["x"]))(*gather(indices[:0]))]
    assert shapes == [(0, 4), (0, 4)]


def test_message_of_an_empty_buffer_and_of_a_scalar_index() -> None:
    """The text of the error itself."""
    text = bad_index_message(position=0, value=0, label="bufs[0]", rows=0, shape=())
    assert text == "indices is 0, out of range for bufs[0] with 0 rows (no index is valid)"
    text = bad_index_message(position=7, value=9, label="bufs[0]", rows=2)
    assert text.startswith("indices.flatten()[7] is 9, ")


# --------------------------------------------------------------------------------- named backends


def test_named_backend_refuses_with_reasons(call: Call) -> None:
    """UnsupportedError lists every buffer in the way and who could do it; it never falls back."""
    buffer = torch.zeros(4, 6, device=call.target.device).t()
    call.bufs.insert(0, buffer)
    call.out.insert(0, torch.zeros(3, 4, device=call.target.device))
    if call.target.backend == "torch":
        assert_gathered(call()[0], call.indices, buffer)
        return
    text = call.refused(
        multigather.UnsupportedError,
        f"backend '{call.target.backend}' cannot run this gather",
        f"{call.target.backend}: bufs[0]: rows of shape [4] are not contiguous",
        ".contiguous()",
        "backends that can: torch",
        "bufs[1]  float32 [5, 3]",
    )
    assert f"{call.target.backend}: bufs[1]" not in text
    assert isinstance(multigather.UnsupportedError(), NotImplementedError)
    with pytest.raises(multigather.UnsupportedError) as caught:
        multigather.explain(call.indices, *call.bufs, backend=call.target.backend)
    assert "not contiguous" in str(caught.value)


def test_backend_for_another_device_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that cannot run CPU tensors says so, and nothing is written."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    out = Slab(1, (), torch.int64)
    out.poison()
    for backend in ("cupy", "triton"):
        with pytest.raises(multigather.UnsupportedError) as caught:
            multigather.gather(
                torch.tensor([1]), torch.arange(3), out=(out.tensor,), backend=backend
            )
        assert f"backend {backend!r} cannot run this gather" in str(caught.value)
        assert f"    - {backend}: " in str(caught.value)
        assert re.search("backends that can: (native, )?torch$", str(caught.value), re.MULTILINE)
        status = {each.name: each for each in multigather.backends()}[backend]
        if not status.available:
            for reason in status.reasons:
                assert reason in str(caught.value) or "CUDA devices only" in str(caught.value)
        out.assert_unchanged()


def test_buffer_that_changes_under_a_known_layout(target: Target) -> None:
    """What the library remembers of a tensor object holds only while the object is laid out so."""
    indices = torch.tensor([2, 0], device=target.device)
    buffer = Slab(4, (6,), torch.float32, target.device, seed=1).tensor.clone()

    def gather(indices: torch.Tensor, **options: Any) -> torch.Tensor:
        return multigather.gather(indices, buffer, backend=target.backend, **options)[0]

    def known() -> None:
        for _ in range(3):
            assert_gathered(gather(indices), indices, buffer)

    known()
    for changed in (
        Slab(4, (6,), torch.float32, target.device, offset=4, seed=2).tensor,
        Slab(4, (6,), torch.int32, target.device, seed=3).tensor,
        Slab(9, (6,), torch.float32, target.device, gap=8, seed=4).tensor,
        Slab(3, (), torch.uint8, target.device, offset=1, seed=5).tensor,
        Slab(1, (6,), torch.float32, target.device, seed=6).tensor.expand(5, 6),
        torch._neg_view(torch.ones(4, 6, device=target.device)),
    ):
        buffer.data = changed
        known()
    buffer.data = torch.ones(2, 6, device=target.device)
    text = index_error(target, lambda: gather(indices))
    assert "[0] is 2, out of range for bufs[0] with 2 rows" in text
    buffer.data = torch.ones(4, 6, device=target.device)
    known()
    buffer.requires_grad_()
    assert gather(indices).requires_grad
    with torch.no_grad():
        assert not gather(indices).requires_grad
    assert gather(indices).requires_grad
    buffer.requires_grad_(False)
    known()
    with pytest.raises(TypeError, match="indices must have an integer dtype"):
        gather(indices > 0)
    buffer.data = torch.ones(0, 6, device=target.device)
    assert gather(indices[:0]).shape == (0, 6)
    with pytest.raises(IndexError, match="has 0 rows"):
        gather(indices)


def test_explain_checks_as_gather_does(target: Target) -> None:
    """Explain refuses what gather refuses."""
    buffer = torch.zeros(3, device=target.device)
    indices = torch.tensor([0], device=target.device)
    with pytest.raises(TypeError, match="indices must have an integer dtype"):
        multigather.explain(indices.float(), buffer)
    with pytest.raises(TypeError, match=r"bufs\[1\]"):
        multigather.explain(indices, buffer, "x")
    with pytest.raises(ValueError, match="bounds must be one of"):
        multigather.explain(indices, buffer, bounds="wrap")
    with pytest.raises(ValueError, match="backend must be None or one of"):
        multigather.explain(indices, buffer, backend="jax")


def test_threads_meet_only_their_own_errors() -> None:
    """A bad index in one thread is that thread's error and nobody else's (CPU: at the call)."""
    buffer = torch.arange(40).view(10, 4)
    failures: list[str] = []
    start = threading.Barrier(8)

    def work(number: int) -> None:
        start.wait()
        for turn in range(50):
            bad = (number + turn) % 2
            indices = torch.tensor([number, 10 + number if bad else 0])
            try:
                (rows,) = multigather.gather(indices, buffer, backend="torch")
                if bad or not torch.equal(rows, buffer[indices]):
                    failures.append(f"thread {number}: no error, or wrong rows")
            except IndexError as error:
                if not bad or f"is {10 + number}, " not in str(error):
                    failures.append(f"thread {number}: {error}")

    in_threads(8, work)
    assert not failures


# ---------------------------------------------------------------------------- the board of faults


class Owner:
    """What the board knows of a plan."""

    def __init__(self, *labels: str) -> None:
        self.labels = labels


@contextmanager
def plan(number: int, *labels: str) -> Iterator[None]:
    owner = faults.plans[number] = Owner(*labels)
    yield
    del owner


def ticket_of(board: faults.Board) -> int:
    """Take a ticket, as a kernel's atomic add does."""
    ticket = board.words[0]
    board.words[0] = ticket + 1
    return ticket


def write(
    board: faults.Board,
    ticket: int,
    plan: int = 10**6,
    position: int = 0,
    value: int = 0,
    buffer: int = 0,
    rows: int = 1,
    unsigned: int = 0,
    further: int = 0,
) -> None:
    """Write a ticket's record where the ring has a free slot, stamp last, as a kernel does."""
    if ticket - board.words[1] >= faults.RING:
        return
    start = faults.WORDS * (1 + ticket % faults.RING)
    words = (plan, position, value % 2**64, buffer, rows, unsigned, further)
    for place, word in enumerate(words, start + 1):
        board.words[place] = word
    board.words[start] = ticket + 1


@pytest.fixture
def board() -> faults.Board:
    """A board of its own, in CPU memory."""
    return faults.Board(torch.device("cpu"))


def reported(error: IndexError | None) -> int:
    """How many faults an error stands for."""
    if error is None:
        return 0
    lost = re.match(r"(\d+) bad indices", str(error))
    if lost:
        return int(lost[1])
    more = re.search(r"; (\d+) more bad", str(error))
    return 1 + (int(more[1]) if more else 0)


def test_board_of_nothing(board: faults.Board) -> None:
    """No fault, no error."""
    assert board.take() is None
    assert not any(board.words)


def test_board_reports_a_fault_once(board: faults.Board) -> None:
    """The record's numbers and the plan's labels make the text."""
    with plan(10**6, "bufs[0]", "bufs[1]['obs']"):
        write(board, ticket_of(board), position=7, value=-9, buffer=1, rows=8)
        error = board.take()
    assert isinstance(error, IndexError)
    assert str(error).startswith(
        "indices.flatten()[7] is -9, out of range for bufs[1]['obs'] with 8 rows (-8 <= index < 8)"
    )
    assert "by an earlier gather, which zero-filled the row" in str(error)
    assert "more bad" not in str(error)
    assert board.take() is None
    assert board.words[0] == board.words[1] == 1


def test_board_that_one_call_used_gives_coordinates(board: faults.Board) -> None:
    """A call that reads its own board knows the shape, and is not "an earlier gather"."""
    with plan(10**6, "bufs[0]"):
        write(board, ticket_of(board), position=5, value=3, rows=2)
        text = str(board.take((2, 3)))
    assert text == "indices[1, 2] is 3, out of range for bufs[0] with 2 rows (-2 <= index < 2)"


def test_board_without_the_plan(board: faults.Board) -> None:
    """A plan that is gone leaves the buffer's number."""
    write(board, ticket_of(board), plan=10**7, position=1, value=5, buffer=3, rows=4)
    assert "is 5, out of range for buffer 3 with 4 rows" in str(board.take())


def test_board_orders_the_faults_of_one_call(board: faults.Board) -> None:
    """Within a call tickets come in any order; the first position and buffer are named."""
    for position, buffer in ((9, 0), (4, 2), (4, 1), (6, 0)):
        write(board, ticket_of(board), position=position, value=position, buffer=buffer, rows=2)
    error = board.take()
    assert "indices.flatten()[4] is 4, out of range for buffer 1 with 2 rows" in str(error)
    assert reported(error) == 4


def test_board_of_two_plans(board: faults.Board) -> None:
    """The earliest ticket's call is named, also where a later call's position is smaller."""
    with plan(10**6, "bufs[0]"), plan(10**6 + 1, "bufs[5]"):
        write(board, ticket_of(board), plan=10**6, position=8, value=8)
        write(board, ticket_of(board), plan=10**6 + 1, position=1, value=1)
        write(board, ticket_of(board), plan=10**6, position=3, value=3)
        error = board.take()
    assert "indices.flatten()[3] is 3, out of range for bufs[0]" in str(error)
    assert reported(error) == 3


@pytest.mark.parametrize(
    ("word", "unsigned", "value"),
    [
        (2**63 + 5, 1, 2**63 + 5),
        (2**64 - 1, 1, 2**64 - 1),
        (2**64 - 1, 0, -1),
        (2**63, 0, -(2**63)),
        (2**63 - 1, 0, 2**63 - 1),
        (2**63 - 1, 1, 2**63 - 1),
    ],
)
def test_board_values_by_signedness(
    board: faults.Board, word: int, unsigned: int, value: int
) -> None:
    """The same 64 bits are a large unsigned or a negative signed index."""
    write(board, ticket_of(board), value=word, unsigned=unsigned)
    assert f" is {value}, " in str(board.take())


@pytest.mark.parametrize("count", [2, 63, 64, 65, 1000])
def test_board_overflow(board: faults.Board, count: int) -> None:
    """The ring keeps the earliest 64 faults, the count all, and both go on afterwards."""
    for turn in range(3):
        for number in range(count):
            write(board, ticket_of(board), position=10 * turn + number, value=turn)
        error = board.take()
        assert f"indices.flatten()[{10 * turn}] is {turn}, " in str(error)
        assert reported(error) == count
        assert board.take() is None
    assert board.taken == board.words[0] == board.words[1] == 3 * count


def test_board_counts_the_faults_that_a_record_stands_for(board: faults.Board) -> None:
    """A record may stand for more bad indices of its buffer."""
    write(board, ticket_of(board), further=41)
    write(board, ticket_of(board), position=2)
    assert reported(board.take()) == 43


def test_board_waits_for_a_record_under_way(
    board: faults.Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ticket without its record is left for the next look, then reported in full."""
    monkeypatch.setattr(faults, "RECORD_SECONDS", 1000.0)
    write(board, ticket_of(board), position=6)
    late = ticket_of(board)
    assert board.take() is None
    assert board.take() is None
    assert board.taken == 0
    write(board, late, position=2, value=77)
    error = board.take()
    assert "indices.flatten()[2] is 77, " in str(error)
    assert reported(error) == 2
    assert board.take() is None


def test_board_gives_up_on_a_record_that_never_comes(
    board: faults.Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After RECORD_SECONDS a ticket counts without details, and later faults are not held up."""
    monkeypatch.setattr(faults, "RECORD_SECONDS", 0.05)
    ticket_of(board)
    assert board.take() is None
    time.sleep(0.06)
    assert str(board.take()) == "1 bad indices on cpu; the first ones' details are lost"
    assert board.take() is None
    ticket_of(board)
    write(board, ticket_of(board), position=3, value=5)
    # The wait starts anew for each incomplete look.
    assert board.take() is None
    time.sleep(0.06)
    error = board.take()
    assert "indices.flatten()[3] is 5, " in str(error)
    assert reported(error) == 2
    write(board, ticket_of(board), position=4)
    assert "indices.flatten()[4]" in str(board.take())


@pytest.mark.parametrize("takers", [1, 4])
def test_board_loses_nothing_between_threads(board: faults.Board, takers: int) -> None:
    """Writers and readers at once: every fault is reported exactly once, details or not."""
    atomic = threading.Lock()
    counts = [0] * takers
    writing = threading.Event()
    writing.set()

    def writer(number: int) -> None:
        for turn in range(300):
            with atomic:
                ticket = ticket_of(board)
            write(board, ticket, position=turn, value=number)

    def taker(number: int) -> None:
        while writing.is_set():
            counts[number] += reported(board.take())

    writers = [threading.Thread(target=writer, args=(number,)) for number in range(4)]
    readers = [threading.Thread(target=taker, args=(number,)) for number in range(takers)]
    for thread in (*readers, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    writing.clear()
    for thread in readers:
        thread.join()
    rest = reported(board.take())
    assert board.take() is None
    assert sum(counts) + rest == 1200
    assert board.taken == board.words[0] == board.words[1] == 1200


def test_pending_fault_is_raised_by_the_next_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """raise_pending and check read the device's board, and raise once."""
    device = torch.device("cpu")
    monkeypatch.setattr(faults, "_boards", {})
    faults.raise_pending(device)
    assert not faults._boards
    board = faults.board_of(device)
    assert faults.board_of(device) is board
    faults.raise_pending(device)
    for look in (
        lambda: faults.raise_pending(device),
        multigather.check,
        lambda: multigather.check("cpu"),
    ):
        write(board, ticket_of(board), position=1, value=2)
        with pytest.raises(IndexError, match=r"flatten\(\)\[1\] is 2"):
            look()
        look()


@pytest.mark.parametrize("device", ["meta", torch.device("meta"), "nope", "", 1.5], ids=repr)
def test_check_of_a_device_that_runs_nothing(device: Any) -> None:
    """ValueError with the value."""
    with pytest.raises(ValueError, match=r"device must be a CUDA device or None, got ") as caught:
        multigather.check(device)
    assert repr(device) in str(caught.value)
