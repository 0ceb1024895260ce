"""Buffers packed into a slab: the same results, read row by row."""

from __future__ import annotations

import collections
import copy
import io
import itertools
import math
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from cases import DTYPES, INTEGERS, Slab, assert_gathered, expected, raw_bytes
from conftest import Target
from hypothesis import given, settings
from hypothesis import strategies as st

import multigather as mg
from multigather import api, dispatch, native
from multigather.backends import _cupy
from multigather.backends._cupy import PACKED, CudaConfig, works_of
from multigather.backends.base import KernelRunner, new_destination
from multigather.request import (
    PACKED_FIELDS,
    Request,
    field_of,
    packed_groups,
)
from multigather.slab import Column, RowLayout

BOUNDS = ("raise", "fill", "clip", "unchecked")
I64, I32, I16, U8 = torch.int64, torch.int32, torch.int16, torch.uint8
F32, F64, BOOL = torch.float32, torch.float64, torch.bool
COLUMNS = ((I64, ()), (I32, ()), (F32, ()), (F64, ()), (U8, ()), (I16, ()))


@pytest.fixture(autouse=True)
def from_one_index(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Groups are read row by row however few the indices are."""
    monkeypatch.setattr(_cupy, "PACKED_FROM", 1)
    api.forget()
    yield
    api.forget()


def random_buffers(
    rows: int, fields: Any, device: str = "cpu", seed: int = 0
) -> list[torch.Tensor]:
    """Buffers of any bytes."""
    return [
        Slab(rows, shape, dtype, device, seed=seed + number).tensor
        for number, (dtype, shape) in enumerate(fields)
    ]


def is_packed(target: Target, indices: torch.Tensor, bufs: list[torch.Tensor]) -> bool:
    """Whether the target reads the buffers as one group."""
    (pick,) = mg.explain(indices, *bufs, backend=target.backend).picks
    names = tuple(f"bufs[{number}]" for number in range(len(bufs)))
    return bool(pick["packed"] == (names,))


def request_for(bufs: list[torch.Tensor], count: int, bounds: str = "raise") -> Request:
    fields = tuple(map(field_of, bufs))
    return Request(torch.device("cpu"), False, torch.int64, count, bounds, fields)


@pytest.mark.parametrize("bounds", BOUNDS)
def test_gather_plan_and_out(target: Target, bounds: str) -> None:
    """Right rows in every mode and way, again and again, beside ordinary buffers."""
    fields = (*COLUMNS, (F32, (3,)))
    bufs = random_buffers(50, fields, target.device)
    packed = list(mg.pack(*bufs))
    others = random_buffers(50, [(F32, (40,)), (I64, ())], target.device, seed=20)
    mixed = [*packed[:3], others[0], *packed[3:], others[1]]
    values = [3, 0, 49, 7, 7] + ([-1, -50, 50, -51] if bounds in ("fill", "clip") else [])
    values += [-1, -50] if bounds == "raise" else []
    if target.name == "triton-interpreter" and bounds not in ("raise", "fill"):
        pytest.skip("a few seconds, and no packed way")
    indices = torch.tensor(values, device=target.device)
    plan = mg.plan(*mixed, bounds=bounds, backend=target.backend)
    # In Triton's interpreter a call takes a second.
    for _ in range(1 if target.name == "triton-interpreter" else 3):
        outs = tuple(each.new_empty((len(values), *each.shape[1:])) for each in mixed)
        again = mg.gather(indices, *mixed, out=outs, bounds=bounds, backend=target.backend)
        gathered = mg.gather(indices, *mixed, bounds=bounds, backend=target.backend)
        for results in (again, gathered, plan(indices)):
            for result, buffer in zip(results, mixed, strict=True):
                assert_gathered(result, indices, buffer, bounds)


def test_the_packed_way_is_taken(target: Target) -> None:
    """Where a backend has one, `explain` names the buffers; not for as many that are separate."""
    bufs = random_buffers(50, COLUMNS, target.device)
    packed = list(mg.pack(*bufs))
    indices = torch.tensor([3, 0], device=target.device)
    has_one = target.backend in ("cupy", "native")
    assert is_packed(target, indices, packed) == has_one
    assert not is_packed(target, indices, bufs)
    found = mg.explain(indices, *packed, bufs[0], backend=target.backend)
    line = "read row by row, as columns of a slab: bufs[0], bufs[1], bufs[2], bufs[3], bufs[4], b"
    assert (line in str(found)) == has_one


def test_a_bad_index_is_reported_for_each_buffer(target: Target) -> None:
    """As separate buffers report it; on a CPU at once, and nothing is written into ``out=``."""
    packed = mg.pack(*random_buffers(9, COLUMNS, target.device))
    indices = torch.tensor([1, 9, 2], device=target.device)
    outs = tuple(each.new_ones(3) for each in packed)
    for options in ({}, {"out": outs}):
        with pytest.raises(IndexError, match=r"\[1\] is 9, .*bufs\[\d\] with 9 rows"):
            mg.gather(indices, *packed, backend=target.backend, **options)
            mg.check()
    if target.device == "cpu":
        assert all(bool((out == 1).all()) for out in outs)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.uint8, torch.uint64])
def test_index_types_and_shapes(target: Target, index_dtype: torch.dtype) -> None:
    if target.backend == "triton":
        pytest.skip("it has no packed way, and takes seconds in the interpreter")
    packed = mg.pack(*random_buffers(9, COLUMNS, target.device))
    indices = torch.tensor([[1, 8, 2], [0, 0, 5]]).to(index_dtype).to(target.device)
    for chosen in (indices, indices.T, indices[0, ::2], indices[0, 0], indices[:0]):
        for result, buffer in zip(
            mg.gather(chosen, *packed, backend=target.backend), packed, strict=True
        ):
            assert_gathered(result, chosen, buffer)


def test_every_dtype(target: Target) -> None:
    """Any bytes survive in any company: odd bools, fp8, pairs of fp4, NaN payloads."""
    if target.backend == "triton":
        pytest.skip("it has no packed way, and takes seconds in the interpreter")
    indices = torch.tensor([4, 0, 4, 2], device=target.device)
    bufs = random_buffers(5, [(dtype, ()) for dtype in DTYPES], target.device)
    packed = mg.pack(*bufs)
    for result, view, buffer in zip(
        mg.gather(indices, *packed, backend=target.backend), packed, bufs, strict=True
    ):
        assert (raw_bytes(view) == raw_bytes(buffer)).all()
        assert_gathered(result, indices, buffer)


@pytest.mark.parametrize("count", [0, 1, 70])
def test_numbers_of_fields(target: Target, count: int) -> None:
    """None, one, and more than a group takes; fields without bytes among them."""
    if target.backend == "triton" and count > 1:
        pytest.skip("it has no packed way, and takes seconds in the interpreter")
    dtypes = itertools.cycle((F32, U8, I16, I64, F32, U8))
    fields = [(next(dtypes), (0,) if number % 9 == 4 else ()) for number in range(count)]
    bufs = random_buffers(6, fields, target.device)
    packed = mg.pack(*bufs)
    assert [each.shape for each in packed] == [each.shape for each in bufs]
    indices = torch.tensor([5, 0, 3], device=target.device)
    results = mg.gather(indices, *packed, backend=target.backend)
    for result, buffer in zip(results, bufs, strict=True):
        assert_gathered(result, indices, buffer)


def test_what_only_looks_like_a_slab(target: Target) -> None:
    """Equal strides in different memory, overlapping columns, columns of two slabs mixed."""
    tables = [torch.randint(0, 99, (12, 8), dtype=I32, device=target.device) for _ in range(3)]
    first, second = (
        mg.pack(*random_buffers(12, fields, target.device)) for fields in (COLUMNS[:4], COLUMNS)
    )
    mixed = [each for pair in zip(first, second, strict=False) for each in pair]
    windows = tables[0].as_strided((12, 3), (8, 1), 2), tables[0].as_strided((12, 3), (8, 1), 3)
    indices = torch.tensor([11, 0, 3, 3], device=target.device)
    for bufs in ([table[:, 1] for table in tables], list(windows), mixed):
        for result, buffer in zip(
            mg.gather(indices, *bufs, backend=target.backend), bufs, strict=True
        ):
            assert_gathered(result, indices, buffer)


def test_one_launch_or_as_few_as_there_is_room_for() -> None:
    """A group that is split over launches, down to single fields, is right too."""
    from cuda_host import HostCudaBackend

    if HostCudaBackend().unavailable():
        pytest.skip("g++ is not installed")
    packed = mg.pack(*random_buffers(9, [*COLUMNS, (F32, (9,))]))
    indices = torch.tensor([1, 8, -3])
    backends = dispatch.BACKENDS
    try:
        for most, launches in ((8, 1), (4, 2), (3, 3), (1, 7)):
            backend = HostCudaBackend(most)
            dispatch.BACKENDS = (backend, *backends[1:])
            api.forget()
            results = mg.gather(indices, *packed, backend="cupy")
            assert backend.launches == launches
            for result, buffer in zip(results, packed, strict=True):
                assert_gathered(result, indices, buffer)
    finally:
        dispatch.BACKENDS = backends


def test_the_table_of_a_launch() -> None:
    """A group's fields are together by the size of their units, and its first has all tiles."""
    bufs = [*mg.pack(*random_buffers(9, COLUMNS)), *random_buffers(9, [(F32, (8,))])]
    request = request_for(bufs, 1000)
    order = KernelRunner.order(request)
    assert order == [6, 0, 1, 2, 3, 4, 5]  # 32 bytes come before 27
    destinations = [new_destination(field) for field in request.fields]
    table = works_of(request, order, 1000, destinations, CudaConfig(128, 2))
    assert [number for number, _ in table] == [6, 0, 3, 1, 2, 5, 4]
    works = [work for _, work in table[1:]]
    assert all(work.kind == PACKED for work in works)
    assert works[0].piece.to_bytes(4, "little") == bytes((2, 2, 1, 1))
    assert (works[0].steps, works[0].columns) == (1, 1)
    assert [work.parts for work in works] == [1, 0, 0, 0, 0, 0]


def test_few_indices_are_gathered_field_by_field(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_cupy, "PACKED_FROM", 100)
    bufs = list(mg.pack(*random_buffers(9, COLUMNS)))
    for count, together in ((50, False), (100, True)):
        request = request_for(bufs, count)
        destinations = [new_destination(field) for field in request.fields]
        table = works_of(request, range(6), count, destinations, CudaConfig())
        assert (PACKED in {work.kind for _, work in table}) == together
        assert _cupy.CudaBackend().packs(request, CudaConfig()) == together


def test_one_kernel_for_every_unroll() -> None:
    """A launch of packed groups alone has one row per thread, whatever the config."""
    backend = _cupy.CudaBackend()
    packed = list(mg.pack(*random_buffers(9, COLUMNS)))
    for bufs, kernels in ((packed, 1), ([*packed, packed[0].clone()], 3)):
        request = request_for(bufs, 1000)
        variants = {backend.variant(request, CudaConfig(128, unroll)) for unroll in (1, 2, 4)}
        assert len(variants) == kernels
        assert variants.isdisjoint(
            {backend.variant(request.with_count(0), CudaConfig(128, unroll)) for unroll in (1, 2)}
        )


def groups(*bufs: torch.Tensor) -> tuple[tuple[int, ...], ...]:
    return packed_groups([field_of(each) for each in bufs])


def test_what_is_a_group() -> None:
    """Narrow fields with the same rows and stride, as many as fit into it."""
    table = torch.zeros(10, 16, dtype=F32)
    assert groups(table[:, 0], table[:, 3], table[:, 5:9]) == ((0, 1, 2),)
    assert groups(table[:, 0], torch.zeros(10), table[:, 3], torch.zeros(10)) == ((0, 2),)
    assert groups(table[:, 0]) == ()
    assert groups(table[:, 0], table[:5, 3]) == ()
    assert groups(table[:, 0], torch.zeros(10, 15)[:, 3]) == ()
    assert groups(table[:, :8], table[:, 8:]) == ((0, 1),)
    assert groups(table[:, :9], table[:, 9:]) == ()  # one is wider than a sector
    assert groups(*(table[:, k : k + 8] for k in range(3))) == ((0, 1),)  # more than a stride
    assert groups(*(table[:, k : k + 8] for k in range(4))) == ((0, 1), (2, 3))
    assert groups(table[:, :4:2], table[:, 4:8:2]) == ()  # rows that are not contiguous
    assert groups(table[:1, 0], table[:1, 1]) == ()  # no distance from row to row
    assert groups(table[:, :0], table[:, 1:1]) == ()
    assert groups(table[:1, 0].expand(9), table[:1, 1].expand(9)) == ()
    many = torch.zeros(4, 100, dtype=U8)
    found = groups(*(many[:, k] for k in range(100)))
    assert [len(group) for group in found] == [PACKED_FIELDS] * 3 + [100 - 3 * PACKED_FIELDS]
    odd = torch.zeros(10, 33, dtype=U8)
    assert groups(odd[:, 0:9], odd[:, 9:18]) == ()  # nine units a row
    assert groups(odd[:, 0:8], odd[:, 9:17]) == ((0, 1),)


@pytest.mark.parametrize(
    ("columns", "offsets", "stride"),
    [
        ([(I64, ()), (I32, ()), (F32, ()), (F64, ()), (U8, ()), (I16, ())],
         (0, 16, 20, 8, 26, 24), 32),
        ([(U8, ())], (0,), 1),
        ([(U8, ()), (F32, ())], (4, 0), 8),
        ([(F32, (3,)), (F64, (5,))], (40, 0), 64),
        ([(F32, (376,)), (BOOL, ()), (F32, (17,)), (I64, ())], (0, 1580, 1512, 1504), 1584),
        ([(F64, (0,)), (U8, ())], (0, 0), 8),
        ([], (), 0),
    ],
)  # fmt: skip
def test_row_layout(columns: Any, offsets: tuple[int, ...], stride: int) -> None:
    layout = RowLayout.of([Column(*each) for each in columns])
    assert (layout.offsets, layout.stride) == (offsets, stride)
    views = layout.views(torch.zeros(7, stride, dtype=U8))
    assert [(each.dtype, each.shape) for each in views] == [
        (dtype, (7, *shape)) for dtype, shape in columns
    ]


def test_pack_mirrors_its_arguments() -> None:
    pair = collections.namedtuple("pair", ["left", "right"])
    days = np.array(["2024-01-01", "2024-02-29"], dtype="M8[D]")
    bufs = ({"a": torch.tensor([1, 2]), "b": [None, torch.tensor([True, False])]},
            None, pair(torch.rand(2, 3), days), np.array([5, 6], dtype=np.int16))  # fmt: skip
    packed = mg.pack(*bufs)
    assert packed[1] is None
    assert packed[0]["b"][0] is None
    assert type(packed[2]) is pair
    assert packed[2].right.dtype == days.dtype
    assert (packed[2].right == days).all()
    assert packed[3].tolist() == [5, 6]
    storages = {each.untyped_storage().data_ptr() for each in (packed[0]["a"], packed[2].left)}
    assert len(storages) == 1
    packed[3][1] = 7
    (gathered,) = mg.gather(torch.tensor([1]), packed[3])
    assert gathered.tolist() == [7]
    assert mg.pack() == ()
    assert mg.pack(None) == (None,)


def test_pack_a_tensordict() -> None:
    tensordict = pytest.importorskip("tensordict")
    source = tensordict.TensorDict(
        {"a": torch.arange(6).view(3, 2), "b": {"c": torch.rand(3)}}, batch_size=[3]
    )
    (packed,) = mg.pack(source)
    assert packed.batch_size == source.batch_size
    assert torch.equal(packed["a"], source["a"])
    assert packed["b", "c"].stride() == (8,)  # 20 of 32 bytes
    (rows,) = mg.gather(torch.tensor([2, 0]), packed)
    assert torch.equal(rows["b", "c"], source["b", "c"][[2, 0]])


def test_pack_keeps_every_byte() -> None:
    """Of bools that are neither 0 nor 1, of strided and of conjugated buffers."""
    odd = torch.tensor([0, 1, 2, 255], dtype=U8).view(BOOL)
    values = torch.tensor([[1 + 2j, 3 - 1j]] * 4).conj()
    negative = torch.tensor([1j, 2j, 3j, 4j]).conj().imag
    table = torch.arange(24.0).view(3, 8).T[1:5]
    packed = mg.pack(odd, values, negative, table)
    assert raw_bytes(packed[0]).ravel().tolist() == [0, 1, 2, 255]
    assert torch.equal(packed[1], values)
    assert not packed[1].is_conj()
    assert torch.equal(packed[2], negative)
    assert torch.equal(packed[3], table)


def test_alloc() -> None:
    made = mg.alloc(5, {"step": I64, "action": (F32, (2, 3)), "code": (U8, 7), "done": BOOL})
    assert {name: (each.dtype, tuple(each.shape)) for name, each in made.items()} == {
        "step": (I64, (5,)), "action": (F32, (5, 2, 3)), "code": (U8, (5, 7)), "done": (BOOL, (5,)),
    }  # fmt: skip
    assert not any(raw_bytes(each).any() for each in made.values())
    made["action"][2] = torch.arange(6.0).view(2, 3)
    made["done"][2] = True
    made["step"].copy_(torch.arange(5))
    indices = torch.tensor([2, 4])
    for _ in range(2):
        (rows,) = mg.gather(indices, made)
        assert rows["action"][0].tolist() == [[0, 1, 2], [3, 4, 5]]
        assert rows["done"].tolist() == [True, False]
        assert rows["step"].tolist() == [2, 4]
    made["step"][4] = -9
    assert mg.gather(indices, made)[0]["step"].tolist() == [2, -9]
    assert not any(bool(each.any()) for each in (made["code"], made["action"][:2]))
    assert mg.alloc(0, {"a": F32})["a"].shape == (0,)
    assert mg.alloc(3, {}) == {}
    assert mg.alloc(2, {"a": F32}, device="meta")["a"].is_meta


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (lambda: mg.alloc(2.0, {}), TypeError, "rows must be an integer, got 2.0"),
        (lambda: mg.alloc(True, {}), TypeError, "rows must be an integer"),
        (lambda: mg.alloc(-1, {}), ValueError, "rows must not be negative, got -1"),
        (lambda: mg.alloc(2, [F32]), TypeError, "fields must be a mapping .* got list; pass"),
        (lambda: mg.alloc(2, {"a": float}), TypeError, r"fields\['a'\] must be a torch.dtype"),
        (lambda: mg.alloc(2, {"a": (F32, "2")}), TypeError, r"fields\['a'\] has the row shape '2'"),
        (lambda: mg.alloc(2, {"a": (F32, (-2,))}), ValueError, r"a size in fields\['a'\] must not"),
        (lambda: mg.alloc(2, {"a": torch.qint8}), TypeError, r"fields\['a'\] has the quantized"),
        (lambda: mg.pack(torch.ones(2), {"a": torch.ones(3)}), ValueError,
         r"same number of rows: bufs\[0\] has 2, bufs\[1\]\['a'\] has 3"),
        (lambda: mg.pack(torch.ones(2), torch.ones(2, device="meta")), ValueError, "on one device"),
        (lambda: mg.pack(torch.ones(2), 7), TypeError, r"bufs\[1\] must be a torch.Tensor"),
        (lambda: mg.pack(torch.tensor(1)), ValueError, r"bufs\[0\] has no dimensions"),
        (lambda: mg.pack(torch.eye(2).to_sparse()), TypeError, r"bufs\[0\] must be a dense"),
        (lambda: mg.pack(torch.ones(2, requires_grad=True)), ValueError,
         r"bufs\[0\] requires grad, .* pass bufs\[0\].detach\(\), and call .requires_grad_\(\)"),
    ],
)  # fmt: skip
def test_errors(call: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        call()


def test_gradients_through_views() -> None:
    """Repeated rows add up, as for any buffer."""
    source = torch.rand(6, 3, requires_grad=True)
    with torch.no_grad():
        assert not mg.pack(source)[0].requires_grad
    packed, other = mg.pack(source.detach(), torch.arange(6))
    packed.requires_grad_()
    indices = torch.tensor([1, 4, 1])
    for _ in range(2):
        packed.grad = None
        rows, _ = mg.gather(indices, packed, other)
        (rows * torch.tensor([[1.0], [2.0], [3.0]])).sum().backward()
        assert packed.grad is not None
        assert packed.grad[:, 0].tolist() == [0, 4, 0, 0, 2, 0]


def test_in_a_compiled_graph(device: str) -> None:
    packed = mg.pack(*random_buffers(9, COLUMNS, device))
    indices = torch.tensor([1, 8, 1], device=device)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def rows(indices: torch.Tensor, *bufs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return mg.gather(indices, *bufs)

    for result, buffer in zip(rows(indices, *packed), packed, strict=True):
        assert_gathered(result, indices, buffer)


def test_copied_and_saved() -> None:
    """A deep copy is a slab again; a file takes copies of the buffers, or one of them."""
    packed = dict(zip("abcdef", mg.pack(*random_buffers(9, COLUMNS)), strict=True))
    copied = copy.deepcopy(packed)
    assert len({each.untyped_storage().data_ptr() for each in copied.values()}) == 1
    with pytest.raises(RuntimeError, match="view the same data as different types"):
        torch.save(packed, io.BytesIO())
    file = io.BytesIO()
    torch.save({name: each.clone() for name, each in packed.items()}, file)
    file.seek(0)
    (loaded,) = mg.pack(torch.load(file))
    plan = pickle.loads(pickle.dumps(mg.plan(packed)))
    indices = torch.tensor([3, 1])
    for (rows,) in (mg.gather(indices, copied), mg.gather(indices, loaded), plan(indices)):
        for name, buffer in packed.items():
            assert_gathered(rows[name], indices, buffer)
    assert groups(*loaded.values()) == groups(*copied.values()) == ((0, 1, 2, 3, 4, 5),)


def test_without_the_extension_every_field_is_selected() -> None:
    """Unless a plan was made before."""
    packed = mg.pack(*random_buffers(9, COLUMNS))
    indices = torch.tensor([3, -1])
    plan = mg.plan(*packed)
    plan(indices)
    with native.without():
        assert_gathered(plan(indices)[0], indices, packed[0])
        api.forget()
        assert mg.explain(indices, *packed).picks[0]["packed"] == ()
        for result, buffer in zip(mg.gather(indices, *packed), packed, strict=True):
            assert_gathered(result, indices, buffer)
    api.forget()


@st.composite
def packed_gathers(draw: st.DrawFn) -> dict[str, Any]:
    shape = st.lists(st.sampled_from((1, 2, 3, 5, 8)), max_size=2).map(tuple)
    field = st.tuples(st.sampled_from(DTYPES), shape)
    rows = draw(st.integers(1, 9))
    bounds = draw(st.sampled_from(BOUNDS))
    low, high = {"raise": (-rows, rows - 1), "unchecked": (0, rows - 1)}.get(bounds, (-12, 12))
    return {
        "fields": draw(st.lists(field, min_size=1, max_size=12)),
        "rows": rows,
        "bounds": bounds,
        "indices": draw(st.lists(st.integers(low, high), max_size=9)),
        "left_out": draw(st.sets(st.integers(0, 11), max_size=3)),
        "clone": draw(st.sets(st.integers(0, 11), max_size=3)),
    }


@pytest.mark.parametrize("backend", ["torch", "cupy"])
def test_any_slab(backend: str) -> None:
    """Slabs of any fields, of which some are not gathered or are elsewhere."""
    from cuda_host import HostCudaBackend

    backends = dispatch.BACKENDS
    dispatch.BACKENDS = (HostCudaBackend(), *backends[1:])
    if backend == "cupy" and dispatch.BACKENDS[0].unavailable():
        pytest.skip("g++ is not installed")

    @settings(max_examples=60, deadline=None)
    @given(packed_gathers())
    def check(case: dict[str, Any]) -> None:
        views = mg.pack(*random_buffers(case["rows"], case["fields"]))
        bufs = [
            # .clone() of few rows would change bools.
            view.view(INTEGERS[view.itemsize]).clone().view(view.dtype)
            if number in case["clone"] and view.itemsize in INTEGERS
            else view
            for number, view in enumerate(views)
            if number not in case["left_out"]
        ]
        indices = torch.tensor(case["indices"], dtype=torch.int64)
        outs = [
            Slab(len(indices), each.shape[1:], each.dtype, offset=16 - 16 % each.itemsize,
                 gap=each.itemsize)
            for each in bufs
        ]  # fmt: skip
        into = tuple(out.tensor for out in outs)
        options = {"bounds": case["bounds"], "backend": backend}
        for results in (
            mg.gather(indices, *bufs, **options),
            mg.gather(indices, *bufs, out=into, **options),
        ):
            for result, buffer in zip(results, bufs, strict=True):
                want = expected(indices, buffer, case["bounds"])
                assert result.numel() == math.prod((len(indices), *buffer.shape[1:]))
                assert (raw_bytes(result).reshape(want.shape) == want).all()
        for out in outs:
            out.assert_guards_intact()

    try:
        check()
    finally:
        dispatch.BACKENDS = backends


@pytest.mark.gpu
def test_pinned_slabs_are_read_from_a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    made = mg.alloc(100, {"a": I64, "b": F32, "c": BOOL}, pin_memory=True)
    assert all(each.is_pinned() for each in made.values())
    made["a"].copy_(torch.arange(100))
    packed = mg.pack(*made.values())
    assert all(each.is_pinned() for each in packed)
    indices = torch.tensor([99, 5, 5], device="cuda")
    for result, buffer in zip(mg.gather(indices, *packed), packed, strict=True):
        assert result.is_cuda
        assert torch.equal(result.cpu(), buffer[indices.cpu()])


@pytest.mark.gpu
def test_a_large_packed_gather_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the bounds that ship, in a graph too; bad rows are zeros, and each is counted."""
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    monkeypatch.undo()
    api.forget()
    packed = mg.pack(*random_buffers(300_000, COLUMNS, "cuda"))
    indices = torch.randint(300_000, (100_000,), device="cuda")
    results = mg.gather(indices, *packed)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = mg.gather(indices, *packed)
    indices.random_(0, 300_000)
    graph.replay()
    results += mg.gather(indices, *packed)
    for number, (result, again) in enumerate(zip(results[6:], replayed, strict=True)):
        wanted = packed[number].view(INTEGERS[result.itemsize])[indices]
        assert torch.equal(result.view(wanted.dtype), wanted)
        assert torch.equal(again.view(wanted.dtype), wanted)
    indices[7] = 300_000
    results = mg.gather(indices, *packed)
    with pytest.raises(IndexError, match=r"\[7\] is 300000"):
        mg.check()
    assert not any(raw_bytes(each[7:8]).any() for each in results)
