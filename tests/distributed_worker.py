"""The gloo processes that test_distributed.py starts: they run cases and tell the outcomes.

    python tests/distributed_worker.py FOLDER JOB:RANKS ...

Torch is imported once; each rank of each job is then forked off, with one thread. A job's ranks
meet through a file in the folder, and each writes ``JOB-RANK.json`` there: for each case "" or the
traceback. A case is a function of this module; the groups of 1, 2 and 3 ranks are the first ones
of all.
"""

from __future__ import annotations

import datetime
import itertools
import json
import math
import os
import random
import re
import signal
import sys
import time
import traceback
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cuda_host
import numpy as np
import pytest
import scripts
import torch
import torch.distributed as dist
from cases import DTYPES, Slab, assert_gathered, raw_bytes
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import multigather
from multigather import api, dispatch
from multigather.distributed import CapacityError, peer, shard, symmetric

SIZES = (1, 2, 3, 8)
TIMEOUT = 15.0  # seconds, of the jobs in which a rank is missing; a busy machine is slow

CASES: dict[str, Callable[[], None]] = {}
groups: dict[int, dist.ProcessGroup] = {}
rank = 0
folder = Path()


def case(function: Callable[[], None]) -> Callable[[], None]:
    """Make a function a case."""
    CASES[function.__name__] = function
    return function


def raises(kind: type[Exception], text: str) -> Any:
    """The block must raise such an error with this in its text."""
    return pytest.raises(kind, match=re.escape(text))


def told(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """What every rank has as this value."""
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


class Whole:
    """Buffers that all ranks know whole, and the part of them that this rank contributes.

    Args:
        rows: of each rank.
        fields: row shape and dtype of each buffer.
        gap: bytes between the rows.
        seed: for the values.
        device: of the buffers.
    """

    def __init__(
        self,
        rows: list[int],
        fields: list[tuple[tuple[int, ...], torch.dtype]],
        gap: int = 0,
        seed: int = 0,
        device: str = "cpu",
    ) -> None:
        self.total = sum(rows)
        start = sum(rows[:rank])
        self.bufs, self.own = [], []
        for number, (shape, dtype) in enumerate(fields):
            slab = Slab(self.total, shape, dtype, device, gap=gap, seed=seed + number)
            self.bufs.append(slab.tensor)
            self.own.append(slab.tensor[start : start + rows[rank]] if rank < len(rows) else None)

    def check(self, results: Any, indices: torch.Tensor, bounds: str = "raise") -> None:
        """Every byte is what a gather from the whole buffers gives."""
        assert len(results) == len(self.bufs)
        for result, buffer in zip(results, self.bufs, strict=True):
            assert_gathered(result, indices, buffer, bounds)


MIXED: list[tuple[tuple[int, ...], torch.dtype]] = [
    ((3,), torch.float32), ((), torch.int64), ((5,), torch.uint8), ((2, 2), torch.bfloat16),
    ((), torch.bool), ((7,), torch.float16),
]  # fmt: skip


def members() -> list[tuple[int, dist.ProcessGroup]]:
    """The groups that this rank is in."""
    return [(size, groups[size]) for size in SIZES if rank < size]


# ------------------------------------------------------------------------------------- values


def random_indices(pick: random.Random, whole: Whole, rows: list[int], bounds: str) -> torch.Tensor:
    """Indices of some pattern and form."""
    total = whole.total
    count = pick.choice([0, 1, 2, 7, 20, 60])
    pattern = pick.choice(["uniform", "one row", "one rank", "few rows", "in order"])
    low, high = 0, total
    if pattern == "one rank":
        owner = pick.choice([each for each, number in enumerate(rows) if number])
        low = sum(rows[:owner])
        high = low + rows[owner]
    hot = [pick.randrange(total) for _ in range(1 if pattern == "one row" else 3)]
    values = [
        pick.choice(hot) if pattern in ("one row", "few rows") else pick.randrange(low, high)
        for _ in range(count)
    ]
    if pattern == "in order":
        values.sort()
    if bounds == "raise" and pick.random() < 0.4:
        values = [each - total if pick.random() < 0.5 else each for each in values]
    if bounds in ("fill", "clip"):
        values = [pick.choice([each, each, -1, -total - 9, total, 10**9]) for each in values]
    fitting = [
        dtype
        for dtype in (torch.int64, torch.int32, torch.int16, torch.uint8)
        if all(torch.iinfo(dtype).min <= each <= torch.iinfo(dtype).max for each in values)
    ]
    indices = torch.tensor(values, dtype=pick.choice(fitting))
    form = pick.choice(["flat", "flat", "2-d", "strided", "0-d"])
    if form == "2-d" and count % 2 == 0:
        return indices.view(2, -1)
    if form == "strided":
        return torch.stack((indices, indices), 1)[:, 0]
    return indices[0] if form == "0-d" and count else indices


def random_gathers(group: dist.ProcessGroup, plans: int, calls: int) -> None:
    """Plans of random layouts and options, each called with random indices."""
    size = group.size()
    together = random.Random(size)  # what all ranks must have alike
    alone = random.Random(1000 * size + rank)
    for number in range(plans):
        rows = [together.choice([0, 0, 1, 2, 5, 30]) for _ in range(size)]
        if not sum(rows):
            rows[-1] = 3
        fields = [
            (together.choice([(), (), (3,), (1,), (2, 5), (33,), (0,)]), together.choice(DTYPES))
            for _ in range(together.choice([1, 2, 4, 9]))
        ]
        whole = Whole(rows, fields, gap=together.choice([0, 0, 16]), seed=number)
        bounds = together.choice(["raise", "raise", "fill", "clip", "unchecked"])
        plan = shard(
            *whole.own,
            group=group,
            bounds=bounds,
            deduplicate=together.choice([True, False, "auto"]),
            capacity=together.choice([None, None, 60]),
        )
        for _ in range(calls):
            indices = random_indices(alone, whole, rows, bounds)
            out = None
            if alone.random() < 0.3:
                outs = [
                    Slab(indices.numel(), each.shape[1:], each.dtype, gap=16) for each in whole.bufs
                ]
                if indices.dim() == 1:
                    out = [each.tensor for each in outs]
            results = plan(indices, out=out)
            whole.check(results, indices, bounds)
            if out is not None:
                for each in outs:
                    each.assert_guards_intact()


@case
def a_thousand_random_gathers_of_8_ranks() -> None:
    random_gathers(groups[8], 100, 10)


@case
def random_gathers_of_1_2_and_3_ranks() -> None:
    for size, group in members():
        if size < 8:
            random_gathers(group, 25, 6)


@case
def random_gathers_by_the_kernels_of_a_gpu() -> None:
    """As on a GPU: its kernels, run as C++, find out which rows are asked of whom."""
    if not cuda_host.compiler():
        return
    kept = dispatch.BACKENDS
    dispatch.BACKENDS = (cuda_host.HostCudaBackend(), *kept[1:])
    api.forget()
    try:
        random_gathers(groups[8], 12, 5)
    finally:
        dispatch.BACKENDS = kept
        api.forget()


@case
def ranks_ask_for_all_of_one_rank_and_for_nothing() -> None:
    """Skewed as it can be: seven ranks have nothing, or want nothing."""
    for owner in (0, 3, 7):
        rows = [200 if each == owner else 0 for each in range(8)]
        whole = Whole(rows, MIXED)
        for deduplicate in (False, True):
            plan = shard(*whole.own, deduplicate=deduplicate)
            for asking in (range(8), [owner], [(owner + 1) % 8], []):
                count = 300 if rank in asking else 0
                indices = torch.arange(count) * 7 % 200
                whole.check(plan(indices), indices)


@case
def new_values_are_seen_and_containers_mirrored() -> None:
    rows = [4, 0, 3, 1, 2, 5, 0, 2]
    start, total = sum(rows[:rank]), sum(rows)
    numbers = torch.arange(start, start + rows[rank])
    buffer, array = numbers * 1.5, numbers.numpy().astype(np.int32) * 3
    plan = shard({"a": buffer, "none": None}, (array,), None)
    indices = torch.tensor([total - 1, 0, rank])
    for turn in range(3):
        mapping, (made,), nothing = plan(indices)
        assert mapping["none"] is None and nothing is None
        assert mapping["a"].tolist() == [each * 1.5 + turn for each in indices.tolist()]
        assert isinstance(made, np.ndarray) and made.dtype == np.int32
        assert made.tolist() == [3 * each for each in indices.tolist()]
        buffer.add_(1)
        dist.barrier()
    found = plan(indices.numpy())
    assert found[1][0].tolist() == made.tolist()
    out = ({"a": torch.empty(3), "none": None}, (np.empty(3, np.int32),), None)
    assert plan(indices, out=out) == out
    assert out[1][0].tolist() == made.tolist()


@case
def lazy_bits_and_odd_layouts() -> None:
    generator = torch.Generator().manual_seed(1)
    whole = torch.randn(8 * 3, 4, dtype=torch.complex64, generator=generator)
    own = whole[3 * rank : 3 * rank + 3]
    plan = shard(own.conj(), own.conj().imag, own.t().contiguous().t(), own[:1].expand(3, 4))
    indices = torch.tensor([23, -1, 5, 5, rank])
    conjugate, negative, transposed, expanded = plan(indices)
    assert not conjugate.is_conj() and not negative.is_neg()
    np.testing.assert_array_equal(raw_bytes(conjugate), raw_bytes(whole.conj()[indices]))
    np.testing.assert_array_equal(raw_bytes(negative), raw_bytes(whole.conj().imag[indices]))
    np.testing.assert_array_equal(raw_bytes(transposed), raw_bytes(whole[indices]))
    np.testing.assert_array_equal(raw_bytes(expanded), raw_bytes(whole[indices % 24 // 3 * 3]))


# ------------------------------------------------------------------------------------ DTensors


@case
def gather_takes_dtensors() -> None:
    """Sharded evenly or not, replicated, mixed, in containers; results are this rank's tensors."""
    mesh = init_device_mesh("cpu", (8,))
    for rows in (16, 13, 3):
        first = torch.arange(rows * 3.0).view(rows, 3)
        second = torch.arange(rows, dtype=torch.int32)
        everywhere = torch.arange(50) * 10
        sharded = [distribute_tensor(each, mesh, [Shard(0)]) for each in (first, second)]
        replicated = distribute_tensor(everywhere, mesh, [Replicate()])
        indices = torch.tensor([rows - 1, 0, -1, rank % rows, 0])
        for turn in range(2):
            with counted() as made:
                a, b = multigather.gather(indices, *sharded)
            # Agreed upon once; later calls only exchange.
            assert made.get("all_gather_object", 0) == 1 - turn, made
            assert made["all_to_all_single"] == 3
            assert type(a) is torch.Tensor
            assert torch.equal(a, first[indices]) and torch.equal(b, second[indices])
        mapping, c, nothing = multigather.gather(indices, {"a": sharded[0]}, replicated, None)
        assert torch.equal(mapping["a"], first[indices]) and torch.equal(c, everywhere[indices])
        assert nothing is None
        out = (torch.empty(5, dtype=torch.int64), torch.empty(5, 3))
        assert multigather.gather(indices, replicated, sharded[0], out=out) == out
        assert torch.equal(out[0], everywhere[indices]) and torch.equal(out[1], first[indices])
        with counted() as made:
            (d,) = multigather.gather(indices, replicated)
        assert torch.equal(d, everywhere[indices]) and not made
        together = distribute_tensor(indices[:1], mesh, [Replicate()])
        (e,) = multigather.gather(together, sharded[1])
        assert torch.equal(e, second[-1:])
        if rank == 6:
            with raises(IndexError, f"indices[0] is {rows}, out of range for bufs[1] with {rows}"):
                multigather.gather(torch.tensor([rows]), replicated, sharded[0])
        else:
            multigather.gather(indices, replicated, sharded[0])
        padded, zeros = multigather.gather(
            torch.tensor([0, -1]), sharded[1], replicated, bounds="fill"
        )
        assert padded.tolist() == [0, 0] and zeros.tolist() == [0, 0]
        text = str(multigather.explain(indices, *sharded))
        assert f"{rows} rows on 8 ranks" in text and "torch" in text
        assert "every rank has all rows" in str(multigather.explain(indices, replicated))

    grid = init_device_mesh("cpu", (2, 4))
    table = torch.arange(20.0)
    for placements in ([Shard(0), Replicate()], [Replicate(), Shard(0)]):
        indices = torch.tensor([19, rank])
        (rows_,) = multigather.gather(indices, distribute_tensor(table, grid, placements))
        assert torch.equal(rows_, table[indices])
    wide = distribute_tensor(torch.zeros(16, 8), mesh, [Shard(1)])
    both = distribute_tensor(table, grid, [Shard(0), Shard(0)])
    tall = distribute_tensor(table, mesh, [Shard(0)])
    gradient = distribute_tensor(torch.zeros(16), mesh, [Shard(0)]).requires_grad_()
    for bufs, text in (
        ([wide], "placed (Shard(dim=1),); rows can be gathered from Replicate"),
        ([both], "along one dimension of the mesh"),
        ([tall, torch.zeros(20)], "buffer 1 is a Tensor among DTensors"),
        ([tall, sharded[0]], "buffer 1 has 3 rows"),
        ([gradient], "requires grad"),
    ):
        with raises(ValueError, text):
            multigather.gather(torch.tensor([0]), *bufs)
    with raises(ValueError, "indices are a DTensor placed"):
        multigather.gather(distribute_tensor(torch.arange(8), mesh, [Shard(0)]), tall)
    uneven = DTensor.from_local(
        torch.full((1 + 2 * (rank == 0),), rank), mesh, [Shard(0)], shape=(10,), stride=(1,)
    )
    assert multigather.gather(torch.tensor([2, 3, 9]), uneven)[0].tolist() == [0, 1, 7]
    for _ in range(2):
        plan = multigather.plan(tall)
        assert plan(torch.tensor([19]))[0].tolist() == [19.0]


@case
def the_example_trains() -> None:
    example = scripts.load("examples/sharded_features.py")
    first, last = example.train(200, 16, 32, 12, torch.device("cpu"))
    assert last < 0.8 * first


# -------------------------------------------------------------------------------- collectives


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """How often each collective is called."""
    counts: dict[str, int] = {}
    kept = {}

    def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            counts[name] = counts.get(name, 0) + 1
            return function(*arguments, **options)

        return call

    for name in dir(dist):
        function = getattr(dist, name)
        if name.startswith(("all_", "broadcast", "gather", "scatter", "reduce", "send", "recv")):
            kept[name] = function
            setattr(dist, name, counting(name, function))
    try:
        yield counts
    finally:
        for name, function in kept.items():
            setattr(dist, name, function)


@case
def collectives_do_not_grow_with_the_buffers() -> None:
    for buffers in (1, 2, 40):
        whole = Whole([3] * 8, [((2,), torch.float32)] * buffers)
        indices = torch.tensor([23, 0, rank])
        for capacity, expected in ((None, 3), (5, 2)):
            with counted() as made:
                plan = shard(*whole.own, capacity=capacity)
            assert made == {"all_gather_object": 1}, made
            for deduplicate in (False, True):
                plan = shard(*whole.own, capacity=capacity, deduplicate=deduplicate)
                with counted() as made:
                    results = plan(indices)
                assert made == {"all_to_all_single": expected}, made
                whole.check(results, indices)


@case
def one_rank_makes_no_collective_call() -> None:
    if rank == 0:
        whole = Whole([5], MIXED)
        plan = shard(*whole.own, group=groups[1])
        with counted() as made:
            whole.check(plan(torch.tensor([4, -5])), torch.tensor([4, -5]))
        assert not made and "one rank" in plan.explain()


@case
def kernels_pack_and_unpack_in_one_launch_each() -> None:
    """The CUDA source, as C++ on the CPU; a field of a slab has the alignment that it needs."""
    if rank > 1 or not cuda_host.compiler():
        return
    kept = dispatch.BACKENDS
    backend = cuda_host.HostCudaBackend()
    dispatch.BACKENDS = (backend, *kept[1:])
    api.forget()
    try:
        for buffers in (1, 6):
            whole = Whole([30, 20], (MIXED * 2)[:buffers], gap=8)
            for capacity, deduplicate in itertools.product((None, 50), (True, False)):
                plan = shard(
                    *whole.own,
                    group=groups[2],
                    backend="cupy",
                    capacity=capacity,
                    deduplicate=deduplicate,
                )
                indices = torch.arange(50).flip(0) * 3 % 50
                before = backend.launches
                results = plan(indices)
                # Where the rows are takes two more, or torch's operations.
                assert plan._sharding.transport.takes_indices != deduplicate
                assert backend.launches == before + (2 if deduplicate else 4)
                whole.check(results, indices)
    finally:
        dispatch.BACKENDS = kept
        api.forget()


@case
def ranks_outside_a_group_are_refused() -> None:
    if rank:
        with raises(ValueError, "this rank is not in the group"):
            shard(torch.zeros(1), group=groups[1])


@case
def a_repeated_row_is_sent_once() -> None:
    """The bytes of the third all-to-all tell it."""
    whole = Whole([10] * 8, MIXED)
    indices = torch.tensor([3, 77, 3, 3, 77, 12] * 10)
    sent = {}
    original = dist.all_to_all_single

    def watching(output: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        if output.dtype == torch.uint8:
            sent[deduplicate] = output.shape[0]
        return original(output, *arguments, **options)

    dist.all_to_all_single = watching
    try:
        for deduplicate in (True, False):
            whole.check(shard(*whole.own, deduplicate=deduplicate)(indices), indices)
    finally:
        dist.all_to_all_single = original
    assert sent == {True: 3, False: 60}


# --------------------------------------------------------------------------------------- faults


@case
def a_bad_index_raises_on_its_rank_only() -> None:
    for size, group in members():
        whole = Whole([2 + each for each in range(size)], MIXED)
        guilty = size - 1
        for capacity in (None, 50):
            plan = shard(*whole.own, group=group, capacity=capacity)
            good = torch.tensor([0, -1, whole.total - 1])
            for bad in (whole.total, -whole.total - 1, 2**62):
                outs = [each[:2].clone() for each in whole.bufs]
                before = [each.clone() for each in outs]
                indices = torch.tensor([1, bad]) if rank == guilty else good
                if rank == guilty:
                    text = f"indices[1] is {bad}, out of range for bufs[0] with {whole.total} rows"
                    with raises(IndexError, text):
                        plan(indices, out=outs)
                    for out, kept in zip(outs, before, strict=True):
                        np.testing.assert_array_equal(raw_bytes(out), raw_bytes(kept))
                else:
                    whole.check(plan(indices), indices)
            whole.check(plan(good), good)


@case
def wrong_arguments_raise_on_their_rank_only() -> None:
    whole = Whole([3] * 8, MIXED)
    plan = shard(*whole.own)
    good = torch.tensor([0, 23])
    wrong: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (TypeError, "indices must have an integer dtype", lambda: plan(torch.tensor([1.0]))),
        (TypeError, "torch.Tensor of integers", lambda: plan([1])),  # type: ignore[arg-type]
        (TypeError, "mask", lambda: plan(torch.tensor([True]))),
        (ValueError, "out must be a tuple", lambda: plan(good, out=())),
        (ValueError, "shape", lambda: plan(good, out=[each[:1] for each in whole.bufs])),
        (ValueError, "shares memory", lambda: plan(good, out=[each[:2] for each in whole.own])),
    ]
    for kind, text, call in wrong:
        if rank == 5:
            with raises(kind, text):
                call()
        else:
            whole.check(plan(good), good)
    whole.check(plan(good), good)


@case
def a_buffer_that_changed_is_refused_on_its_rank() -> None:
    buffer = torch.arange(3.0) + 3 * rank
    plan = shard(buffer)
    if rank == 2:
        buffer.resize_(5)
        with raises(ValueError, "bufs[0] has changed"):
            plan(torch.tensor([1]))
    else:
        assert plan(torch.tensor([1]))[0].tolist() == [1.0]


@case
def no_rows_at_all() -> None:
    for bounds in ("raise", "fill", "clip", "unchecked"):
        for size, group in members():
            plan = shard(torch.empty(0, 3), group=group, bounds=bounds)
            assert plan(torch.empty(0, dtype=torch.int64))[0].shape == (0, 3)
            if bounds == "fill":
                assert plan(torch.tensor([0, 5]))[0].tolist() == [[0.0] * 3] * 2
            elif rank == size - 1:
                with raises(IndexError, "bufs[0] has 0 rows"):
                    plan(torch.tensor([0]))
            else:
                plan(torch.empty(0, dtype=torch.int64))


@case
def different_buffers_are_refused_on_all_ranks() -> None:
    base: dict[str, Any] = {"bounds": "raise"}
    ours = [torch.zeros(3, 2), torch.zeros(3, dtype=torch.int64)]
    trials: list[tuple[list[Any], dict[str, Any], list[str]]] = [
        ([ours[0]], base, ["rank 6 has 1 buffers, rank 0 has 2"]),
        (
            [ours[0], ours[1].int()],
            base,
            ["rank 6 has bufs[1] int32 [rows], rank 0 has bufs[1] int64 [rows]"],
        ),
        (
            [ours[0][:, :1], ours[1]],
            base,
            ["rank 6 has bufs[0] float32 [rows, 1], rank 0 has bufs[0] float32 [rows, 2]"],
        ),
        (
            ours,
            {"bounds": "fill", "capacity": 7},
            [
                "rank 6 has bounds='fill', rank 0 has bounds='raise'",
                "rank 6 has capacity=7, rank 0 has capacity=None",
            ],
        ),
        ([{"a": ours[0]}, ours[1]], base, ["rank 6 has bufs[0]['a'] float32"]),
        ([None, *ours], base, ["rank 6 has bufs[1] float32 [rows, 2], rank 0 has bufs[0]"]),
    ]
    for theirs, options, texts in trials:
        text = ""
        try:
            shard(*(theirs if rank == 6 else ours), **(options if rank == 6 else base))
        except ValueError as error:
            text = str(error)
        for each in ("the ranks do not bring the same buffers", *texts):
            assert each in text, text
        assert set(told(text, groups[8])) == {text}


@case
def what_one_rank_cannot_bring_is_told_to_all() -> None:
    good = torch.zeros(3, 2)
    trials: list[tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = [
        ((good, good[:2]), {}, ValueError, "bufs[0] has 3 rows and bufs[1] has 2"),
        ((good.to_sparse(),), {}, TypeError, "dense strided"),
        ((torch.tensor(1.0),), {}, ValueError, "no dimensions"),
        ((), {}, ValueError, "no buffer"),
        ((good.clone().requires_grad_(),), {}, ValueError, "requires grad"),
        ((good,), {"bounds": "wrap"}, ValueError, "bounds must be one of"),
        ((good,), {"capacity": 0}, ValueError, "at least 1"),
        ((good,), {"capacity": 2.5}, TypeError, "a number of rows"),
        ((good,), {"deduplicate": "yes"}, ValueError, "deduplicate must be"),
        ((good,), {"transport": "post"}, ValueError, "transport must be"),
        ((good,), {"backend": "cupy"}, multigather.UnsupportedError, "cupy"),
    ]
    for bufs, options, kind, text in trials:
        if rank == 4:
            with raises(kind, text):
                shard(*bufs, **options)
        else:
            with raises(ValueError, f"rank 4: {kind.__name__}: "):
                shard(good)


@case
def no_symmetric_memory_on_cpus() -> None:
    with raises(multigather.UnsupportedError, "no symmetric memory: the buffers are on cpu"):
        symmetric(torch.zeros(3))
    with raises(ValueError, "those of rank 0 are not"):
        shard(torch.zeros(3), transport="peer")
    text = shard(torch.zeros(3)).explain()
    assert "not peer: the buffers of rank 0 are not in symmetric memory" in text
    text = shard(torch.zeros(3), transport="exchange").explain()
    assert "not peer: transport='exchange' was asked for" in text


class SharedFiles:
    """Torch's symmetric memory, made of files that processes of this machine map."""

    made = 0

    @classmethod
    def empty(cls, shape: tuple[int, ...], dtype: torch.dtype, device: Any) -> torch.Tensor:
        assert dtype == torch.uint8
        cls.made += 1
        return cls.mapped(rank, shape)

    @classmethod
    def mapped(cls, owner: int, shape: tuple[int, ...]) -> torch.Tensor:
        path = folder / f"symmetric-{cls.made}-{owner}"
        size = math.prod(shape)
        return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8).view(shape)

    @classmethod
    def rendezvous(cls, memory: torch.Tensor, group: dist.ProcessGroup) -> Any:
        dist.barrier(group)
        maps = [cls.mapped(owner, tuple(memory.shape)) for owner in range(group.size())]
        maps[rank] = memory
        return types.SimpleNamespace(get_remote_tensor=lambda owner, shape, dtype: maps[owner])


@case
def rows_of_other_processes_are_read_in_place() -> None:
    """All of the way by peers but torch's symmetric memory itself, which needs GPUs."""
    from torch.distributed import _symmetric_memory

    rows = [5, 0, 40, 1, 7, 7, 0, 12]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peer, "why_not", lambda places: [])
        for name in ("empty", "rendezvous"):
            patch.setattr(_symmetric_memory, name, getattr(SharedFiles, name))
        for fields in (MIXED, [((100,), torch.float32), ((), torch.int64)], [((), torch.uint8)]):
            whole = Whole(rows, fields, gap=16)
            copies = symmetric(*whole.own)
            for bounds in ("raise", "fill", "clip", "unchecked"):
                plan = shard(*copies, bounds=bounds)
                assert "by peer" in repr(plan) and "one kernel" in plan.explain()
                alone = random.Random(rank)
                # Calls are not collective: some ranks make more of them.
                for _ in range(3 + rank % 3):
                    with counted() as made:
                        indices = random_indices(alone, whole, rows, bounds)
                        whole.check(plan(indices), indices, bounds)
                    assert not made
            with raises(IndexError, "indices[0] is 72, out of range for bufs[0] with 72 rows"):
                shard(*copies)(torch.tensor([72]))
            shard(*copies, transport="exchange")(torch.tensor([71]))
            assert "by exchange" in repr(shard(*[copied[:] for copied in copies]))
        (table,) = symmetric({"a": torch.zeros(rank + 1), "none": None})
        plan = shard(table)
        for turn in range(3):
            table["a"].fill_(10 * turn + rank)
            dist.barrier()
            assert plan(torch.tensor([0, 35]))[0]["a"].tolist() == [10 * turn, 10 * turn + 7]
            dist.barrier()


@case
def too_little_capacity_is_never_silent() -> None:
    whole = Whole([20] * 8, MIXED)
    for deduplicate in (True, False):
        plan = shard(*whole.own, capacity=4, deduplicate=deduplicate)
        good = torch.tensor([0, 0, 1, 159, 20, 21]) if deduplicate else torch.arange(8) * 20
        whole.check(plan(good), good)
        for _ in range(2):
            if rank == 3:
                with raises(CapacityError, "2 rows were not fetched"):
                    plan(torch.arange(6))
            else:
                whole.check(plan(good), good)
        multigather.check()
        whole.check(plan(good), good)


@case
def explanations() -> None:
    plan = shard(torch.zeros(rank, 100), torch.zeros(rank, dtype=torch.int64))
    text = plan.explain()
    for each in ("28 rows on 8 ranks", "0, 1, 2, 3, 4, 5, 6, 7", "416 bytes", "gloo", "sent once"):
        assert each in text, text
    assert repr(plan) == "<ShardedPlan of 2 buffers, 28 rows on 8 ranks, by exchange>"
    text = shard(torch.zeros(rank, 1), capacity=9).explain()
    assert "two collectives" in text and "as often as asked for" in text


# ---------------------------------------------------------------------------------------- GPUs

GPU_CASES: dict[str, Callable[[], None]] = {}
GPU_ROWS = [400, 300]


def on_gpus(function: Callable[[], None]) -> Callable[[], None]:
    """Make a function a case of two ranks with a GPU each."""
    GPU_CASES[function.__name__] = function
    return function


def gpu_indices(count: int, total: int, seed: int, low: int = 0) -> torch.Tensor:
    """This rank's own."""
    generator = torch.Generator().manual_seed(10 * seed + rank)
    return torch.randint(low, total, (count,), generator=generator).cuda()


def plans_of(whole: Whole, **options: Any) -> dict[str, Any]:
    """A plan for each transport."""
    return {
        "exchange": shard(*whole.own, **options),
        "capacity": shard(*whole.own, capacity=400, **options),
        "peer": shard(*symmetric(*whole.own), transport="peer", **options),
    }


@on_gpus
def gathers_by_every_transport() -> None:
    for bounds in ("raise", "fill", "clip", "unchecked"):
        for fields in (MIXED, [((100,), torch.float32), ((), torch.int64)], [((), torch.uint8)]):
            whole = Whole(GPU_ROWS, fields, device="cuda")
            for name, plan in plans_of(whole, bounds=bounds).items():
                assert plan.explain().count(name) or name == "capacity"
                for seed, count in enumerate((0, 1, 100, 399)):
                    low = {"raise": -700, "unchecked": 0}.get(bounds, -9)
                    indices = gpu_indices(count, 700, seed, low)
                    if bounds in ("fill", "clip"):
                        indices += indices % 7  # some are too large
                    whole.check(plan(indices), indices, bounds)
                indices = gpu_indices(64, 700, 9).view(8, 8).to(torch.int32)
                out = [torch.empty((8, 8, *each.shape[1:]), dtype=each.dtype, device="cuda")
                       for each in whole.bufs]  # fmt: skip
                assert plan(indices, out=out) == tuple(out)
                whole.check(out, indices, bounds)
    multigather.check()


@on_gpus
def backends_gather_from_peers() -> None:
    whole = Whole(GPU_ROWS, MIXED, device="cuda")
    copies = symmetric(*whole.own)
    for status in multigather.backends():
        if status.available and status.name != "native":
            plan = shard(*copies, backend=status.name, transport="peer")
            indices = gpu_indices(200, 700, 3)
            whole.check(plan(indices), indices)


@on_gpus
def peers_see_new_values() -> None:
    (buffer,) = symmetric(torch.zeros(GPU_ROWS[rank], 3, device="cuda"))
    plan = shard(buffer)
    assert "peer" in repr(plan)
    for turn in range(3):
        buffer.fill_(10 * turn + rank)
        torch.cuda.synchronize()
        told(None, groups[2])
        (rows,) = plan(torch.tensor([0, 699]))
        assert rows[:, 0].tolist() == [10 * turn, 10 * turn + 1]
        torch.cuda.synchronize()
        told(None, groups[2])


@on_gpus
def a_bad_index_on_a_gpu_is_zeros_and_an_error_later() -> None:
    whole = Whole(GPU_ROWS, MIXED, device="cuda")
    for plan in plans_of(whole).values():
        good = gpu_indices(50, 700, 1)
        bad = torch.tensor([3, 700, -701], device="cuda")
        if rank == 1:
            for result, buffer in zip(plan(bad), whole.bufs, strict=True):
                wanted = raw_bytes(buffer[3:6])
                wanted[1:] = 0
                np.testing.assert_array_equal(raw_bytes(result), wanted)
            with raises(IndexError, "is 700, out of range for bufs[0] with 700 rows"):
                multigather.check()
        else:
            whole.check(plan(good), good)
            multigather.check()
        whole.check(plan(good), good)


@on_gpus
def too_little_capacity_on_a_gpu() -> None:
    whole = Whole(GPU_ROWS, MIXED, device="cuda")
    plan = shard(*whole.own, capacity=8)
    plan(torch.arange(10 if rank else 8, device="cuda"))
    if rank:
        with raises(CapacityError, "2 rows were not fetched"):
            multigather.check()
    multigather.check()


@on_gpus
def waits_for_the_device() -> None:
    """One wait for the counts; with a capacity, and from peers, none."""
    whole = Whole(GPU_ROWS, MIXED, device="cuda")
    for name, plan in plans_of(whole).items():
        indices = gpu_indices(100, 700, 2)
        for _ in range(2):
            plan(indices)
        torch.cuda.synchronize()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            results = plan(indices)
            torch.cuda.set_sync_debug_mode("default")
        told_of = "called a synchronizing CUDA operation"
        waits = [each for each in caught if told_of in str(each.message)]
        assert len(waits) == (name == "exchange"), [str(each.message) for each in waits]
        whole.check(results, indices)


@on_gpus
def captured_in_a_graph() -> None:
    """Replays see new indices; with a capacity and from peers."""
    whole = Whole(GPU_ROWS, MIXED, device="cuda")
    plans = plans_of(whole)
    for name in ("capacity", "peer"):
        plan, indices = plans[name], gpu_indices(100, 700, 3)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(3):
                plan(indices)
        torch.cuda.synchronize()
        told(None, groups[2])
        graph = torch.cuda.CUDAGraph()
        # NCCL's own thread looks at events meanwhile.
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            results = plan(indices)
        for seed in range(4, 8):
            indices.copy_(gpu_indices(100, 700, seed))
            graph.replay()
            torch.cuda.synchronize()
            whole.check(results, indices)
    multigather.check()


@on_gpus
def dtensors_on_gpus() -> None:
    mesh = init_device_mesh("cuda", (2,))
    table = torch.arange(39.0, device="cuda").view(13, 3)
    indices = torch.tensor([12, 0, -1, 7 + rank], device="cuda")
    for placement in (Shard(0), Replicate()):
        (rows,) = multigather.gather(indices, distribute_tensor(table, mesh, [placement]))
        assert torch.equal(rows, table[indices])


# ------------------------------------------------------------------ ranks that die or do not come


def wait_for(*names: str) -> None:
    """Until other ranks have written these files; `run_jobs` ends what waits too long."""
    while not all((folder / name).exists() for name in names):
        time.sleep(0.01)


def die() -> None:
    """The last rank is killed between two calls."""
    plan = shard(torch.arange(5.0) + 5 * rank)
    assert plan(torch.tensor([14, 0]))[0].tolist() == [14.0, 0.0]
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    with raises(dist.DistError, "multigather.distributed failed while exchanging"):
        plan(torch.tensor([14, 0]))


def stay_away() -> None:
    """The last rank makes the plan and no call; then no plan."""
    plan = shard(torch.arange(5.0) + 5 * rank)
    if rank == 2:
        wait_for("stay_away-0.json", "stay_away-1.json")
        return
    with raises(dist.DistError, "exchanging counts (all_to_all_single 1 of 3), on rank"):
        plan(torch.tensor([14, 0]))


def no_plan() -> None:
    """The last rank makes no plan."""
    if rank == 2:
        wait_for("no_plan-0.json", "no_plan-1.json")
        return
    with raises(dist.DistError, "agreeing on the buffers (all_gather_object)"):
        shard(torch.zeros(3))


LONELY = {each.__name__: each for each in (die, stay_away, no_plan)}


def run(job: str, world: int) -> None:
    """Run the cases of a job as rank `rank`."""
    warnings.filterwarnings("error", module="multigather")
    warnings.filterwarnings("ignore", "ComplexHalf support is experimental")
    # Together, so that no rank's time-out runs while another still imports.
    (folder / f"{job}-{rank}.ready").touch()
    wait_for(*(f"{job}-{each}.ready" for each in range(world)))
    seconds = TIMEOUT if job in LONELY else 120.0
    gpu = None
    if job == "gpus":
        gpu = torch.device("cuda", rank)
        torch.cuda.set_device(gpu)
    dist.init_process_group(
        "nccl" if gpu else "gloo",
        device_id=gpu,
        init_method=f"file://{folder / job}",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=seconds),
    )
    cases = {"cases": CASES, "gpus": GPU_CASES}.get(job) or {job: LONELY[job]}
    if job == "cases":
        groups.update({size: dist.new_group(list(range(size))) for size in SIZES})
    else:
        groups[world] = dist.group.WORLD
    outcomes = {}
    for name, function in cases.items():
        start = time.monotonic()
        try:
            function()
            outcomes[name] = ""
        except BaseException:
            outcomes[name] = traceback.format_exc()
        print(f"{name}: {time.monotonic() - start:.2f} s {outcomes[name]}", flush=True)
        if outcomes[name]:
            break  # the ranks are out of step
    (folder / f"{job}-{rank}.json").write_text(json.dumps(outcomes))
    if job not in LONELY and not any(outcomes.values()):
        dist.barrier()
        dist.destroy_process_group()


def main() -> None:
    """Fork the ranks of the jobs that the command line names, and wait for them."""
    global rank, folder
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)  # OpenMP's threads do not come along
    children = []
    for argument in sys.argv[2:]:
        job, _, world = argument.partition(":")
        for rank in range(int(world)):
            children.append(os.fork())
            if children[-1]:
                continue
            log = os.open(folder / f"{job}-{rank}.log", os.O_CREAT | os.O_WRONLY)
            os.dup2(log, 1)
            os.dup2(log, 2)
            try:
                run(job, int(world))
            except BaseException:
                traceback.print_exc()
            os._exit(0)  # a broken group might wait for its peers
    for child in children:
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
