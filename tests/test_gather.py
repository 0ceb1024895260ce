"""One behaviour, every backend: outputs are bitwise what the contract says, and nothing else moves.

On CPU targets a bad index raises at the call; on a GPU the call returns and `check` raises.
"""

from __future__ import annotations

import collections
import ctypes
import dataclasses
import mmap
import sys

import pytest
import torch
from cases import DTYPES, POISON, Slab, assert_gathered, expected, raw_bytes
from conftest import Target

import multigather
from multigather import api, dispatch
from multigather.backends import _cupy, base
from multigather.cache import rules

BOUNDS = ("raise", "fill", "clip", "unchecked")
INDEX_DTYPES = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")


@pytest.fixture(autouse=True)
def poisoned_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs that the kernel backends allocate are full of poison before the kernel runs."""
    original = base.empty_outputs

    def poisoned(request, shape):
        outputs = original(request, shape)
        for output in outputs:
            if output.numel():
                output.view(-1).view(torch.uint8).fill_(POISON)
        return outputs

    monkeypatch.setattr(base, "empty_outputs", poisoned)


def rows_of(count: int, rows: int, device: str, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, rows, (count,), generator=generator).to(device)


def gather_and_check(
    target: Target, indices: torch.Tensor, slabs: list[Slab], bounds: str = "raise"
) -> None:
    """Gather once into new outputs and once into poisoned ones; check bytes and guards of both."""
    sources = [slab.tensor for slab in slabs]
    outputs = multigather.gather(indices, *sources, bounds=bounds, backend=target.backend)
    for output, source in zip(outputs, sources, strict=True):
        assert_gathered(output, indices, source, bounds)
        assert output.is_contiguous()
    into = [
        Slab(
            indices.numel(),
            source.shape[1:],
            source.dtype,
            target.device,
            gap=source.element_size() * 3,
        )
        for source in sources
    ]
    for slab in into:
        slab.poison()
    shaped = [slab.tensor.view((*indices.shape, *slab.tensor.shape[1:])) for slab in into]
    written = multigather.gather(
        indices, *sources, out=shaped, bounds=bounds, backend=target.backend
    )
    for output, given, slab, source in zip(written, shaped, into, sources, strict=True):
        assert output is given
        assert_gathered(output, indices, source, bounds)
        slab.assert_guards_intact()
    for slab in slabs:
        slab.assert_unchanged()


@pytest.mark.parametrize(
    "width",
    [*range(1, 41), 63, 64, 65, 127, 128, 129, 255, 256, 257, 1504, 4095, 4096, 4097],
)
def test_every_row_size_at_every_alignment(target: Target, width: int) -> None:
    """Rows of any number of bytes, at addresses that allow 1- to 16-byte copies, in one call."""
    slabs = [
        Slab(23, (width,), torch.uint8, target.device, offset=offset, seed=offset)
        for offset in (0, 8, 4, 2, 1)
    ]
    count = 3 if target.name == "triton-interpreter" and width > 65 else 17
    gather_and_check(target, rows_of(count, 23, target.device, seed=width), slabs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_copied_as_bytes(target: Target, dtype: torch.dtype) -> None:
    """Random bytes survive in every dtype: NaN payloads, odd bools, fp8, fp4 pairs, complex."""
    slabs = [Slab(9, shape, dtype, target.device) for shape in ((), (3,), (2, 2))]
    indices = torch.tensor([8, 0, 0, -1, 5], device=target.device)
    gather_and_check(target, indices, slabs)


@pytest.mark.parametrize("index_dtype", INDEX_DTYPES)
def test_every_index_dtype(target: Target, index_dtype: str) -> None:
    """Integers of any width and sign; uint8 is an index, never a mask."""
    dtype = getattr(torch, index_dtype)
    values = [0, 4, 99, 127, 3] if dtype.itemsize == 1 else [0, 128, 255, 256, 299, 3]
    if dtype.is_signed:
        values += [-1, -5]
    slabs = [Slab(300, (5,), torch.int16, target.device), Slab(300, (), torch.int64, target.device)]
    indices = torch.tensor(values, dtype=torch.int64).to(dtype).to(target.device)
    gather_and_check(target, indices, slabs)


@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize(
    "shape", [(), (0,), (1,), (31,), (32,), (33,), (3, 4), (2, 0, 3), (2, 3, 4)], ids=str
)
def test_index_shapes(target: Target, shape: tuple[int, ...], bounds: str) -> None:
    """The output's shape is the index's followed by the row's."""
    slabs = [Slab(11, (6,), torch.float32, target.device), Slab(11, (), torch.bool, target.device)]
    count = torch.Size(shape).numel()
    gather_and_check(target, rows_of(count, 11, target.device).view(shape), slabs, bounds)


def test_index_strides(target: Target) -> None:
    """Strided, transposed, expanded and offset indices are read as they lie."""
    slab = Slab(40, (3,), torch.int32, target.device)
    base_index = rows_of(60, 40, target.device)
    for indices in (
        base_index[::3],
        base_index[1::2],
        base_index.view(6, 10).t(),
        base_index.view(6, 10)[:, 2:5],
        base_index[7:8].expand(9),
        base_index[7].expand(2, 3),
        base_index.view(torch.int32)[::2],
    ):
        gather_and_check(target, indices, [slab])


@pytest.mark.parametrize("index_dtype", ["int8", "int32", "int64", "uint64"])
@pytest.mark.parametrize("bounds", ["fill", "clip"])
def test_bad_indices_filled_or_clamped(target: Target, bounds: str, index_dtype: str) -> None:
    """fill: a row of zero bytes, for negatives too. clip: the nearest valid row."""
    dtype = getattr(torch, index_dtype)
    info = torch.iinfo(dtype)
    values = [0, 5, 6, 7, 100, 6, info.max]
    values += [-1, -7, -8, info.min] if dtype.is_signed else []
    indices = torch.tensor(values, dtype=torch.int64 if dtype.is_signed else torch.uint64).to(dtype)
    slabs = [
        Slab(7, (5,), torch.float32, target.device),
        Slab(6, (64,), torch.uint8, target.device),
        Slab(1, (), torch.int64, target.device),
    ]
    gather_and_check(target, indices.to(target.device), slabs, bounds)


@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("bad", [7, -8, 2**40, -(2**40)])
def test_bad_index_raises(target: Target, bad: int, rows: int) -> None:
    """raise: an IndexError that names what was wrong and where; on a CPU nothing is written."""
    indices = torch.tensor([0, rows - 1, -rows, bad, bad, 0], device=target.device)
    good = Slab(9, (), torch.int32, target.device)
    slab = Slab(rows, (40,), torch.uint8, target.device)
    fits = indices.clamp(-9, 8)
    out = Slab(6, (40,), torch.uint8, target.device)
    out.poison()
    message = rf"is {bad}, out of range for bufs\[1\] with {rows} rows"
    if target.device == "cpu":
        with pytest.raises(IndexError, match=rf"indices\[3\] {message}"):
            multigather.gather(indices, None, slab.tensor, backend=target.backend)
        with pytest.raises(IndexError, match=message):
            multigather.gather(
                indices, None, slab.tensor, out=(None, out.tensor), backend=target.backend
            )
        out.assert_unchanged()
    else:
        _, rows_out = multigather.gather(indices, None, slab.tensor, backend=target.backend)
        assert_gathered(rows_out, indices, slab.tensor)
        with pytest.raises(IndexError, match=message) as caught:
            multigather.check()
        assert "1 more bad" in str(caught.value)
        multigather.check()
    gather_and_check(target, fits, [good])


def test_each_buffer_has_its_own_row_count(target: Target) -> None:
    """An index may be good for one buffer and bad for another; the error names the right one."""
    small, large = (
        Slab(4, (3,), torch.int16, target.device),
        Slab(50, (3,), torch.int16, target.device),
    )
    indices = torch.tensor([1, 30, 2], device=target.device)

    def call():
        outputs = multigather.gather(indices, large.tensor, small.tensor, backend=target.backend)
        multigather.check()
        return outputs

    with pytest.raises(IndexError, match=r"is 30, out of range for bufs\[1\] with 4 rows"):
        call()
    both = multigather.gather(
        indices, large.tensor, small.tensor, bounds="fill", backend=target.backend
    )
    for output, slab in zip(both, (large, small), strict=True):
        assert_gathered(output, indices, slab.tensor, "fill")


@pytest.mark.parametrize("bounds", BOUNDS)
def test_strided_expanded_and_single_rows(target: Target, bounds: str) -> None:
    """Rows with gaps, one row seen many times, a single row and rows of several dimensions."""
    one = Slab(1, (6,), torch.int16, target.device)
    slabs = [
        Slab(12, (5,), torch.float32, target.device, gap=12),
        Slab(12, (3, 5), torch.uint8, target.device, gap=1, offset=3),
        Slab(12, (4, 2, 2), torch.float64, target.device, gap=16),
        Slab(12, (), torch.int64, target.device, gap=24),
    ]
    gather_and_check(target, rows_of(29, 12, target.device), slabs, bounds)
    gather_and_check(target, torch.zeros(5, dtype=torch.int32, device=target.device), [one], bounds)
    (repeated,) = multigather.gather(
        rows_of(29, 12, target.device),
        one.tensor.expand(12, 6),
        bounds=bounds,
        backend=target.backend,
    )
    assert_gathered(repeated, rows_of(29, 12, target.device), one.tensor.expand(12, 6), bounds)


def test_rows_of_no_bytes_are_still_checked(target: Target) -> None:
    """A buffer of empty rows gives empty rows, and a bad index into it is an error."""
    empty = torch.empty(3, 0, 2, device=target.device)
    full = Slab(5, (2,), torch.int32, target.device)
    indices = torch.tensor([1, 1, 2, -3], device=target.device)
    outputs = multigather.gather(indices, empty, full.tensor, backend=target.backend)
    assert tuple(outputs[0].shape) == (4, 0, 2)
    assert_gathered(outputs[1], indices, full.tensor)
    multigather.check()
    with pytest.raises(IndexError, match=r"is 4, out of range for bufs\[0\] with 3 rows"):
        multigather.gather(indices + 3, empty, full.tensor, backend=target.backend)
        multigather.check()


def test_no_rows(target: Target) -> None:
    """No index needs no row; fill makes rows of zeros even where there are none."""
    none = torch.empty(0, 4, device=target.device)
    (output,) = multigather.gather(
        torch.empty(0, dtype=torch.int64, device=target.device), none, backend=target.backend
    )
    assert tuple(output.shape) == (0, 4)
    indices = torch.tensor([0, -1, 5], device=target.device)
    (output,) = multigather.gather(indices, none, bounds="fill", backend=target.backend)
    assert tuple(output.shape) == (3, 4) and not output.any()
    for bounds in ("raise", "clip", "unchecked"):
        with pytest.raises(IndexError, match=r"bufs\[0\] has 0 rows"):
            multigather.gather(indices, none, bounds=bounds, backend=target.backend)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 9, 17, 33, 64, 65, 100, 300])
def test_any_number_of_buffers(target: Target, count: int) -> None:
    """Every buffer is gathered, whatever the number of launches that takes."""
    if target.backend == "triton" and count > 65:
        pytest.skip("65 shows the split; more take minutes to interpret or to compile")
    slabs = [
        Slab(13, (1 + number % 7,), torch.uint8, target.device, offset=number % 4, seed=number)
        for number in range(count)
    ]
    indices = rows_of(9, 13, target.device)
    outputs = multigather.gather(indices, *(slab.tensor for slab in slabs), backend=target.backend)
    assert len(outputs) == count
    for output, slab in zip(outputs, slabs, strict=True):
        assert_gathered(output, indices, slab.tensor)


def test_fewest_launches() -> None:
    """Buffers are spread over the fewest launches, none of them larger than it may be."""
    assert base.balanced_groups(range(56), 56) == [tuple(range(56))]
    groups = base.balanced_groups(range(57), 56)
    assert [len(group) for group in groups] == [28, 29]
    assert sum(base.balanced_groups(range(300), 56), ()) == tuple(range(300))
    assert len(base.balanced_groups(range(300), 56)) == 6
    for fields in range(1, _cupy.LARGE_CAPACITY + 1):
        capacity = _cupy.capacity_for(fields, _cupy.LARGE_CAPACITY)
        assert fields <= capacity <= _cupy.LARGE_CAPACITY


@pytest.mark.parametrize("wide", [False, True], ids=["32-bit", "64-bit"])
def test_every_config(target: Target, wide: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All configs of the search space, not just chosen ones, on aligned, odd and tail cases."""
    if wide and target.backend != "cupy":
        pytest.skip("only gather.cu has a 64-bit variant")
    if wide:
        monkeypatch.setattr(_cupy, "WIDE_FROM", 0)
    interpreted = target.name == "triton-interpreter"
    wide_row = 2100 if interpreted else 9000
    slabs = [
        Slab(30, (wide_row,), torch.int16, target.device),
        Slab(21, (7,), torch.uint8, target.device, offset=1),
        Slab(30, (), torch.int64, target.device, gap=8),
        Slab(30, (100,), torch.float32, target.device, offset=4),
    ]
    indices = rows_of(3 if interpreted else 19, 21, target.device)
    indices[2] = -2
    for config in next(b for b in dispatch.BACKENDS if b.name == target.backend).space():
        rule = rules.Rule("any", target.backend, {}, dataclasses.asdict(config), "test")
        monkeypatch.setattr(rules, "default_rules", lambda rule=rule: (rule,))
        api.forget()
        assert config.describe() in str(
            multigather.explain(indices, slabs[0].tensor, backend=target.backend)
        )
        gather_and_check(target, indices, slabs)
    api.forget()


def test_lazy_conjugate_and_negative_bits(target: Target) -> None:
    """Views that torch conjugates or negates on reading are read so here, and outputs are plain."""
    values = torch.view_as_complex(torch.randn(6, 3, 2, generator=torch.Generator().manual_seed(3)))
    values = values.to(target.device)
    sources = (values.conj(), values.conj().imag, values.conj()[:, 1], values.imag)
    indices = torch.tensor([5, 0, -1], device=target.device)
    for source in sources:
        leave = not source[:1].is_contiguous() and source.dim() > 1
        backend = None if leave else target.backend
        if backend is None and target.device == "cpu":
            backend = "torch"
        (output,) = multigather.gather(indices, source, backend=backend)
        assert not output.is_conj() and not output.is_neg()
        assert torch.equal(output, source[indices].resolve_conj().resolve_neg())


def test_rows_that_are_not_contiguous(target: Target) -> None:
    """The kernels refuse them with a reason; without a named backend each buffer finds its way."""
    image = torch.arange(2 * 3 * 4 * 5, device=target.device).view(2, 3, 4, 5)
    image = image.to(torch.float32).contiguous(memory_format=torch.channels_last)
    column = torch.arange(48, dtype=torch.int16, device=target.device).view(6, 8)[:, ::2]
    plain = Slab(6, (4,), torch.int16, target.device)
    indices = torch.tensor([1, 0, -1], device=target.device)
    if target.backend == "torch":
        outputs = multigather.gather(indices, image, column, plain.tensor, backend="torch")
    else:
        with pytest.raises(
            multigather.UnsupportedError, match=r"bufs\[1\].*not contiguous.*\n(.*\n)*.*torch"
        ):
            multigather.gather(indices, plain.tensor, column, backend=target.backend)
        outputs = multigather.gather(indices, image, column, plain.tensor)
    for output, source in zip(outputs, (image, column, plain.tensor), strict=True):
        assert_gathered(output, indices, source)
        assert output.is_contiguous()


Pair = collections.namedtuple("Pair", ["first", "second"])


def test_result_mirrors_the_arguments(target: Target) -> None:
    """None, dicts, lists, tuples and named tuples come back as they went in."""
    a, b = (
        Slab(5, (2,), torch.int32, target.device).tensor,
        Slab(5, (), torch.uint8, target.device).tensor,
    )
    indices = torch.tensor([4, 1], device=target.device)
    result = multigather.gather(
        indices, {"x": a, "y": None, "z": [b, (a,)]}, None, Pair(a, b), b, backend=target.backend
    )
    assert isinstance(result, tuple) and len(result) == 4
    assert list(result[0]) == ["x", "y", "z"] and result[0]["y"] is None and result[1] is None
    assert isinstance(result[2], Pair)
    for output, source in (
        (result[0]["x"], a),
        (result[0]["z"][0], b),
        (result[0]["z"][1][0], a),
        (result[2].first, a),
        (result[2].second, b),
        (result[3], b),
    ):
        assert_gathered(output, indices, source)
    into = ({"x": torch.empty_like(a[:2])}, None)
    written = multigather.gather(indices, {"x": a}, None, out=into, backend=target.backend)
    assert written[0]["x"] is into[0]["x"]
    assert_gathered(written[0]["x"], indices, a)
    assert multigather.gather(indices, backend=target.backend) == ()
    assert multigather.gather(indices, None, backend=target.backend) == (None,)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["cupy", "triton", None])
def test_pinned_buffers_are_read_in_place(backend: str | None) -> None:
    """Buffers in pinned host memory, indices and outputs on the GPU; torch cannot, and says so."""
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    table = torch.arange(700, dtype=torch.float32).view(100, 7).pin_memory()
    flags = (torch.arange(100) % 3).to(torch.uint8).pin_memory()
    indices = torch.tensor([99, 0, -1, 5], device="cuda")
    for turn in range(3):
        rows, some = multigather.gather(indices, table, flags, backend=backend)
        assert rows.is_cuda and some.is_cuda
        torch.cuda.synchronize()
        assert_gathered(rows, indices, table)
        assert_gathered(some, indices, flags)
        table[99] = turn
    out = (torch.empty(4, 7, device="cuda"), torch.empty(4, dtype=torch.uint8, device="cuda"))
    multigather.gather(indices, table, flags, out=out, backend=backend)
    assert_gathered(out[0], indices, table)
    with pytest.raises(multigather.UnsupportedError, match="host memory"):
        multigather.gather(indices, table, backend="torch")


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["cupy", "triton", "torch"])
def test_cpu_indices_with_buffers_on_a_gpu(backend: str) -> None:
    """The indices are copied once; bad ones are reported as always."""
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    slab = Slab(9, (3,), torch.float32, "cuda")
    for indices in (torch.tensor([8, 0, -1]), torch.tensor([[1], [2]]), torch.tensor(4)):
        for given in (indices, indices.pin_memory()):
            (rows,) = multigather.gather(given, slab.tensor, backend=backend)
            assert_gathered(rows, indices, slab.tensor)
    multigather.gather(torch.tensor([9]), slab.tensor, backend=backend)
    with pytest.raises(IndexError, match=r"\[0\] is 9, out of range for bufs\[0\] with 9 rows"):
        multigather.check()


def test_sources_may_change_between_calls(target: Target) -> None:
    """Nothing of a buffer's content or address is remembered from one call to the next."""
    indices = torch.tensor([3, 3, 0], device=target.device)
    for seed in range(4):
        slab = Slab(5, (9,), torch.float32, target.device, seed=seed)
        (output,) = multigather.gather(indices, slab.tensor, backend=target.backend)
        assert_gathered(output, indices, slab.tensor)
        slab.tensor.view(torch.int32).add_(seed + 1)
        (output,) = multigather.gather(indices, slab.tensor, backend=target.backend)
        assert_gathered(output, indices, slab.tensor)


def test_gradients(target: Target) -> None:
    """Rows that repeat add up, rows of zeros give none, integer buffers ride along."""
    weights = torch.randn(5, 3, dtype=torch.float64, device=target.device, requires_grad=True)
    codes = torch.arange(5, device=target.device)
    indices = torch.tensor([[4, 0], [4, -1]], device=target.device)
    rows, numbers = multigather.gather(indices, weights, codes, backend=target.backend)
    assert not numbers.requires_grad
    factor = torch.arange(1.0, 13.0, dtype=torch.float64, device=target.device).view(2, 2, 3)
    (gradient,) = torch.autograd.grad((rows * factor).sum(), weights)
    (reference,) = torch.autograd.grad((weights[indices] * factor).sum(), weights)
    assert torch.equal(gradient, reference)
    (rows,) = multigather.gather(indices, weights, bounds="fill", backend=target.backend)
    (gradient,) = torch.autograd.grad(rows.sum(), weights)
    assert gradient[4].tolist() == [2.0] * 3 and gradient[0].tolist() == [1.0] * 3
    assert not gradient[1:4].any()
    assert torch.autograd.gradcheck(
        lambda w: multigather.gather(indices, w, backend=target.backend), (weights,)
    )
    with torch.no_grad():
        (rows,) = multigather.gather(indices, weights, backend=target.backend)
    assert not rows.requires_grad


def test_explain_names_pick_and_reasons(target: Target) -> None:
    """Explain tells the backend, its config, where the choice is from and why not the others."""
    slab = Slab(5, (4,), torch.float32, target.device)
    indices = torch.tensor([1, 2], device=target.device)
    text = str(multigather.explain(indices, slab.tensor, backend=target.backend))
    assert f"runs on {target.backend}" in text and "bufs[0]" in text
    for backend in dispatch.BACKENDS:
        if backend.name != target.backend:
            assert f"not {backend.name}: " in text
    picks = multigather.explain(indices, slab.tensor, backend=target.backend).picks
    assert [pick["backend"] for pick in picks] == [target.backend]


def test_named_backend_really_runs(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """A named backend is obeyed: it is the one whose runner is made."""
    made = []
    for backend in dispatch.BACKENDS:
        original = type(backend).prepare

        def spy(self, request, config, site, original=original):
            made.append(self.name)
            return original(self, request, config, site)

        monkeypatch.setattr(type(backend), "prepare", spy)
    api.forget()
    slab = Slab(5, (4,), torch.float32, target.device)
    multigather.gather(torch.tensor([1], device=target.device), slab.tensor, backend=target.backend)
    assert made == [target.backend]
    api.forget()


def test_shapes_made_up_without_end_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of executables is bounded, and forgetting one is harmless."""
    monkeypatch.setattr(api, "KEPT_EXECUTABLES", 8)
    api.forget()
    indices = torch.tensor([1, 0])
    for width in range(1, 30):
        source = torch.arange(2 * width).view(2, width)
        assert torch.equal(multigather.gather(indices, source)[0], source[indices])
    assert len(api._executables) <= 8


def test_oracle_disagrees_with_a_wrong_gather() -> None:
    """The oracle itself can fail."""
    source = torch.arange(12).view(4, 3)
    indices = torch.tensor([1, 3])
    assert (raw_bytes(source[indices]) == expected(indices, source)).all()
    with pytest.raises(AssertionError):
        assert_gathered(source[indices.flip(0)], indices, source)


def over_one_address(device: str) -> dict[str, list[torch.Tensor]]:
    """Buffers of which several begin at one address, with other sizes, types or strides."""
    table = torch.arange(80.0, device=device).view(8, 10)
    words = torch.arange(64, dtype=torch.uint8, device=device).view(8, 8)
    pairs = torch.view_as_complex(torch.arange(48.0, device=device).view(8, 3, 2))
    return {
        "columns": [table[:, :5], table, table[:, :1], table[:, 5:]],
        "twice": [table, table],
        "shifted rows": [table, table[1:7], table[::2]],
        "types": [words[:, :1], words, words.view(torch.int64), words.view(torch.int16), words],
        "conjugate": [pairs.conj(), pairs, torch.view_as_real(pairs)],
        "expanded": [table[:1].expand(8, 10), table[:1, 3:4].expand(8, 1), table],
        "no bytes": [table[:, :0], table, words[:, :0]],
        "many": [table[:, number % 5 : 5 + number % 4] for number in range(65)],
    }


@pytest.mark.parametrize("case", over_one_address("cpu"))
def test_buffers_at_one_address(target: Target, case: str) -> None:
    buffers = over_one_address(target.device)[case]
    indices = torch.tensor([0, 3, -1], device=target.device)
    found = multigather.gather(indices, *buffers, backend=target.backend)
    for rows, buffer in zip(found, buffers, strict=True):
        assert_gathered(rows, indices, buffer)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_type_and_its_bytes_at_one_address(target: Target, dtype: torch.dtype) -> None:
    slab = Slab(6, (2,), dtype, target.device)
    indices = torch.tensor([5, 0, -2], device=target.device)
    buffers = [slab.tensor.view(torch.uint8), slab.tensor]
    for some in (buffers, buffers[::-1]):
        found = multigather.gather(indices, *some, backend=target.backend)
        for rows, buffer in zip(found, some, strict=True):
            assert_gathered(rows, indices, buffer)


def test_a_buffer_in_the_memory_of_the_indices(target: Target) -> None:
    indices = torch.arange(8, device=target.device).flip(0).contiguous()
    buffers = [indices, indices.view(torch.uint8).view(8, 8), indices.view(4, 2).repeat(2, 1)]
    found = multigather.gather(indices, *buffers, backend=target.backend)
    for rows, buffer in zip(found, buffers, strict=True):
        assert_gathered(rows, indices, buffer)


def test_outputs_in_one_tensor(target: Target) -> None:
    """Columns of it, and one after another."""
    table = torch.arange(80.0, device=target.device).view(8, 10)
    indices = torch.tensor([0, 3, -1], device=target.device)
    into = torch.empty(6, 12, device=target.device)
    out = (into[:3, :5], into[:3, 5:6], into[3:, :10])
    buffers = (table[:, :5], table[:, :1], table)
    for _ in range(3):
        into.fill_(-1)
        multigather.gather(indices, *buffers, out=out, backend=target.backend)
        for rows, buffer in zip(out, buffers, strict=True):
            assert torch.equal(rows, buffer[indices])
        assert bool((into[:3, 6:] == -1).all() and (into[3:, 10:] == -1).all())


def test_read_only_memory_up_to_its_last_byte(target: Target) -> None:
    """No byte beyond a buffer is read, and none of it written: both would end the process."""
    if target.device != "cpu" or not sys.platform.startswith("linux"):
        pytest.skip("needs memory of the host with the protection of Linux")
    page = mmap.PAGESIZE
    memory = mmap.mmap(-1, 2 * page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    content = bytes(range(1, 12))
    memory[page - len(content) : page] = content
    protect = ctypes.CDLL(None).mprotect
    protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    assert not protect(start, page, mmap.PROT_READ) and not protect(start + page, page, 0)
    try:
        view = (ctypes.c_char * len(content)).from_address(start + page - len(content))
        whole = torch.frombuffer(view, dtype=torch.uint8)
        buffers = [
            whole,
            whole[-2:],
            whole[-1:],
            whole[:9].view(3, 3),
        ]
        indices = torch.tensor([0, -1])
        found = multigather.gather(indices, *buffers, backend=target.backend)
        for rows, buffer in zip(found, buffers, strict=True):
            assert_gathered(rows, indices, buffer)
    finally:
        protect(start, 2 * page, mmap.PROT_READ | mmap.PROT_WRITE)
