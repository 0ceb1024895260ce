"""Random gathers against the NumPy oracle; random layouts against counting bytes one by one."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from cases import DTYPES, Slab, assert_gathered
from conftest import Target
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import multigather
from multigather.backends.base import Destination, copy_unit, flat_row_stride
from multigather.outputs import share_memory
from multigather.request import Field, power_of_two_divisor

# On a GPU a new layout is compiled, in about a second by Triton.
EXAMPLES = {"triton-gpu": 30, "cupy-gpu": 60, "triton-interpreter": 200}

INDEX_DTYPES = (
    torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.uint16, torch.uint32, torch.uint64,
)  # fmt: skip


def settled(target: Target | None = None, examples: int = 300) -> settings:
    """Settings that give the same examples in every run, however slow it is."""
    return settings(
        max_examples=EXAMPLES.get(target.name, examples) if target else examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


VIEWS = {
    "all": lambda rows: rows,
    "every second row": lambda rows: rows[::2],
    "without the first row": lambda rows: rows[1:],
    "one row, seen many times": lambda rows: rows[:1].expand(7, *rows.shape[1:]),
    # Rows that are not contiguous, for the torch backend.
    "last dimension first": lambda rows: rows.movedim(-1, 0),
    "every second element": lambda rows: rows[..., ::2],
}


@dataclass(frozen=True)
class Rows:
    """A tensor made of rows in poisoned memory.

    Attributes:
        count: rows in memory.
        shape: of one row.
        dtype: element type.
        offset: elements by which the address misses a multiple of 16 bytes.
        gap: elements between rows.
        view: what of it the tensor is, a key of `VIEWS`.
    """

    count: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    gap: int
    view: str = "all"

    def make(self, device: str, seed: int = 0) -> tuple[Slab, torch.Tensor]:
        """The memory, and the tensor in it."""
        size = self.dtype.itemsize
        slab = Slab(
            self.count, self.shape, self.dtype, device, self.offset * size, self.gap * size, seed
        )
        return slab, VIEWS[self.view](slab.tensor)


@dataclass(frozen=True)
class Case:
    """One gather, without its tensors.

    Attributes:
        buffers: the sources; None stands for a None among the arguments.
        outs: the outputs, or None to let them be made.
        index_dtype: integer type of the indices.
        index_shape: their shape.
        index_layout: how they lie in memory.
        values: the indices, row by row.
        bounds: the mode.
    """

    buffers: tuple[Rows | None, ...]
    outs: tuple[Rows | None, ...] | None
    index_dtype: torch.dtype
    index_shape: tuple[int, ...]
    index_layout: str
    values: tuple[int, ...]
    bounds: str

    def indices(self, device: str) -> torch.Tensor:
        dense = torch.tensor(self.values, dtype=self.index_dtype).view(self.index_shape)
        shape = self.index_shape
        if self.index_layout == "strided" and shape:
            holder = torch.full((*shape[:-1], 2 * shape[-1] + 1), 99).to(self.index_dtype)
            holder[..., 1::2] = dense
            return holder.to(device)[..., 1::2]
        if self.index_layout == "transposed" and shape:
            return dense.movedim(0, -1).contiguous().to(device).movedim(-1, 0)
        if self.index_layout == "unaligned":
            holder = torch.cat([dense.new_zeros(1), dense.view(-1)])
            return holder.to(device)[1:].view(shape)
        return dense.to(device)


@st.composite
def rows_of(draw: st.DrawFn, views: tuple[str, ...]) -> Rows:
    """A buffer. Rows of up to about 200 bytes, so that Triton's interpreter keeps up."""
    shape = draw(
        st.one_of(
            st.just(()),
            st.tuples(st.integers(1, 24)),
            st.tuples(st.integers(0, 4), st.integers(1, 5)),
            st.tuples(st.integers(1, 3), st.integers(1, 2), st.integers(1, 3)),
            st.sampled_from([(32,), (33,), (63,), (64,), (4, 16)]),
        )
    )
    dtype = draw(st.sampled_from(DTYPES))
    if math.prod(shape) * dtype.itemsize > 256:
        dtype = draw(st.sampled_from([each for each in DTYPES if each.itemsize <= 2]))
    view = draw(st.sampled_from(views))
    if not shape and view in ("last dimension first", "every second element"):
        view = "all"
    counts = list(range(12, -1, -1))  # none of the rows is the rarest
    if view in ("without the first row", "one row, seen many times"):
        counts.remove(0)
    return Rows(
        count=draw(st.sampled_from(counts)),
        shape=shape,
        dtype=dtype,
        offset=draw(st.integers(0, 15 // dtype.itemsize)),
        gap=draw(st.sampled_from((0, 0, 1, 2, 3, 8, 16))),
        view=view,
    )


@st.composite
def cases(draw: st.DrawFn, target: Target) -> Case:
    """A gather that the target's backend accepts, with good or bad indices."""
    views = (
        ("all", "all", *VIEWS) if target.backend == "torch" else ("all", "all", *list(VIEWS)[:4])
    )
    # One and three buffers: the sizes of gather.cu's field table are 1 and 4, fewer compilations.
    number = draw(st.sampled_from((1, 3)))
    buffers: list[Rows | None] = [draw(rows_of(views)) for _ in range(number)]
    tensors = [rows.make("cpu")[1] for rows in buffers]
    least = min(tensor.shape[0] for tensor in tensors)
    bounds = draw(st.sampled_from(("raise", "raise", "fill", "clip", "unchecked")))
    index_dtype = draw(st.sampled_from(INDEX_DTYPES))
    index_shape = draw(
        st.sampled_from(((3,), (5,), (9,), (2, 3), (3, 1), (2, 2, 2), (1,), (), (0,), (2, 0, 2)))
    )
    largest, smallest = torch.iinfo(index_dtype).max, torch.iinfo(index_dtype).min
    low, high = (-least if bounds == "raise" else 0), least - 1
    good = st.integers(max(low, smallest), high) if high >= 0 else None
    anything = st.one_of(
        st.integers(max(-15, smallest), min(15, largest)),
        st.sampled_from((smallest, largest, largest // 2 + 1)),
    )
    if bounds == "unchecked":
        values = good
    else:
        mixed = draw(st.booleans())
        values = anything if good is None else st.one_of(good, good, anything) if mixed else good
    if values is None:
        index_shape = (0,)
    elements = math.prod(index_shape)
    chosen = draw(st.lists(values, min_size=elements, max_size=elements)) if elements else []

    outs: list[Rows | None] | None = None
    if draw(st.sampled_from((True, True, False))):
        outs = [
            Rows(
                elements,
                tuple(tensor.shape[1:]),
                rows.dtype,
                draw(st.integers(0, 15 // rows.dtype.itemsize)),
                draw(st.sampled_from((0, 0, 1, 5, 16))),
            )
            for rows, tensor in zip(buffers, tensors, strict=True)
        ]
    if draw(st.booleans()):
        place = draw(st.integers(0, number))
        for items in (buffers, outs):
            if items is not None:
                items.insert(place, None)
    layouts = ("dense", "dense", "strided", "transposed", "unaligned")
    return Case(
        buffers=tuple(buffers),
        outs=None if outs is None else tuple(outs),
        index_dtype=index_dtype,
        index_shape=index_shape,
        index_layout=draw(st.sampled_from(layouts)),
        values=tuple(chosen),
        bounds=bounds,
    )


def placed(
    items: tuple[Rows | None, ...], device: str
) -> tuple[list[Slab], list[torch.Tensor | None]]:
    """The memory of tensors, and the tensors, with None where None stands."""
    made = [rows and rows.make(device, seed) for seed, rows in enumerate(items)]
    return [each[0] for each in made if each], [each and each[1] for each in made]


def shaped(out: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Rows as an output for indices of this shape."""
    shape = (*shape, *out.shape[1:])
    return out.view(shape) if math.prod(shape) else out.new_empty(shape)


def run(target: Target, case: Case) -> None:
    """Gather, and check error, bytes, layout and guards."""
    indices = case.indices(target.device)
    assert indices.flatten().tolist() == list(case.values)
    slabs, buffers = placed(case.buffers, target.device)
    tensors = [buffer for buffer in buffers if buffer is not None]
    out_slabs, outs = [], None
    if case.outs is not None:
        out_slabs, outs = placed(case.outs, target.device)
        for slab in out_slabs:
            slab.poison()
        outs = [out if out is None else shaped(out, indices.shape) for out in outs]

    def gather() -> tuple[Any, ...]:
        return multigather.gather(
            indices, *buffers, out=outs, bounds=case.bounds, backend=target.backend
        )

    no_rows = any(tensor.shape[0] == 0 for tensor in tensors)
    refused = bool(case.values) and no_rows and case.bounds != "fill"
    bad = case.bounds == "raise" and any(
        not -tensor.shape[0] <= value < tensor.shape[0]
        for tensor in tensors
        for value in case.values
    )
    if refused or (bad and target.device == "cpu"):
        with pytest.raises(IndexError):
            gather()
        for slab in (*slabs, *out_slabs):
            slab.assert_unchanged()
        return
    results = gather()
    assert len(results) == len(buffers)
    for number, (result, buffer) in enumerate(zip(results, buffers, strict=True)):
        if buffer is None:
            assert result is None
            continue
        assert_gathered(result, indices, buffer, case.bounds)
        if outs is None:
            assert result.is_contiguous()
        else:
            assert result is outs[number]
    for slab in out_slabs:
        slab.assert_guards_intact()
    for slab in slabs:
        slab.assert_unchanged()
    if target.device == "cuda":
        if bad:
            with pytest.raises(IndexError, match="out of range"):
                multigather.check()
        multigather.check()


def test_gather_agrees_with_the_oracle(target: Target) -> None:
    """Any shapes, dtypes, strides, offsets, indices, modes and outputs; nothing else is touched."""

    @settled(target)
    @given(cases(target))
    def holds(case: Case) -> None:
        run(target, case)

    holds()


SMALL = st.integers(0, 4)
SHAPES = st.lists(st.integers(1, 3), min_size=0, max_size=3)


@st.composite
def views(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], int, int]:
    """Shape, strides, storage offset and element size of a view of 128 bytes."""
    shape = tuple(draw(SHAPES))
    strides = tuple(draw(st.lists(SMALL, min_size=len(shape), max_size=len(shape))))
    return shape, strides, draw(st.integers(0, 6)), draw(st.sampled_from((1, 2)))


def tensor_and_bytes(
    memory: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...], offset: int, size: int
) -> tuple[torch.Tensor, set[int]]:
    """The view, and the places of all its bytes."""
    typed = memory if size == 1 else memory.view(torch.int16)
    places = set()
    for point in itertools.product(*map(range, shape)):
        first = size * (offset + sum(at * step for at, step in zip(point, strides, strict=True)))
        places.update(range(first, first + size))
    return typed.as_strided(shape, strides, offset), places


@settled(examples=600)
@given(views(), views())
def test_shared_memory_is_never_missed(a: Any, b: Any) -> None:
    """Where two views have a byte in common the answer is yes."""
    memory = torch.zeros(128, dtype=torch.uint8)
    (first, first_bytes), (second, second_bytes) = (
        tensor_and_bytes(memory, *each) for each in (a, b)
    )
    if first_bytes & second_bytes:
        assert share_memory(first, second)
        assert share_memory(second, first)
    assert share_memory(first, second) == share_memory(second, first)


@st.composite
def tables(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], int, int]:
    """Rows of up to 3 elements, 8 elements apart; a single row is one run of bytes."""
    rows, width = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    return (rows, width), (8, 1), draw(st.integers(0, 12)), 1


@settled(examples=400)
@given(tables(), tables())
def test_columns_of_one_table_are_told_apart(a: Any, b: Any) -> None:
    """For rows at one distance, and for a single row among them, no view is refused in vain.

    The rows' ends may not tell: a column below another one shares nothing but counts as shared.
    """
    memory = torch.zeros(128, dtype=torch.uint8)
    (first, first_bytes), (second, second_bytes) = (
        tensor_and_bytes(memory, *each) for each in (a, b)
    )
    residues = [{place % 8 for place in places} for places in (first_bytes, second_bytes)]
    if not residues[0] & residues[1]:
        assert not share_memory(first, second)
    if first_bytes & second_bytes:
        assert share_memory(first, second)


@settled(examples=600)
@given(
    st.lists(st.integers(0, 3), min_size=0, max_size=4),
    st.lists(st.integers(0, 9), min_size=4, max_size=4),
)
def test_row_stride_of_flattened_dimensions(shape: list[int], strides: list[int]) -> None:
    """A stride is given exactly where the flattened rows are that far apart."""
    strides = strides[: len(shape)]
    tensor = torch.zeros(128, dtype=torch.uint8).as_strided(shape, strides)
    places = [
        sum(at * step for at, step in zip(point, strides, strict=True))
        for point in itertools.product(*map(range, shape))
    ]
    steps = {b - a for a, b in itertools.pairwise(places)}
    given_stride = flat_row_stride(tensor, len(shape))
    if len(places) < 2:
        assert given_stride == 0
    elif len(steps) == 1:
        assert given_stride == steps.pop()
    else:
        assert given_stride is None


@settled(examples=400)
@given(
    st.lists(st.sampled_from((*range(1, 9), 12, 16, 24, 32, 48, 64)), min_size=5, max_size=5),
    st.sampled_from((1, 2, 4, 8, 16)),
)
def test_copy_unit_divides_sizes_strides_and_addresses(numbers: list[int], factor: int) -> None:
    """The unit is the widest one that both addresses, both row strides and the row size allow."""
    row_bytes, source_stride, stride, source_address, address = (each * factor for each in numbers)
    source = Field(
        dtype=torch.uint8,
        rows=2,
        row_shape=(row_bytes,),
        row_bytes=row_bytes,
        row_stride_bytes=source_stride,
        contiguous_rows=True,
        alignment=power_of_two_divisor(source_address),
    )
    unit = copy_unit(source, Destination(stride, power_of_two_divisor(address)))
    fits = [
        width for width in (1, 2, 4, 8, 16) if not any(each * factor % width for each in numbers)
    ]
    assert unit == fits[-1]
