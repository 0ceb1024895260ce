"""Streams and lifetime: what is freed, reused, made elsewhere, or does not fit into memory."""

from __future__ import annotations

import collections
import dataclasses
import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from conftest import HAVE_GPU, Target
from torch.utils import _pytree as pytree

import multigather
from multigather import api

needs_gpu = pytest.mark.skipif(not HAVE_GPU, reason="torch sees no CUDA device")
CALLS = {"torch-cpu": 2000, "native-cpu": 2000, "triton-interpreter": 10, "cuda-source-on-cpu": 500}


def test_buffers_freed_right_after_the_call(target: Target) -> None:
    """Their memory is taken by the next tensor, which is filled with something else at once."""
    indices = torch.arange(40, device=target.device) % 30
    wrong = torch.zeros((), dtype=torch.int64, device=target.device)
    for turn in range(CALLS.get(target.name, 10_000)):
        first = torch.full((30, 5), turn, device=target.device)
        second = torch.full((30,), float(turn), device=target.device)
        places = indices.clone()
        rows, numbers = multigather.gather(places, first, second, backend=target.backend)
        del first, second, places
        torch.full((30, 5), -1, device=target.device)
        torch.full((30,), -1.0, device=target.device)
        torch.full((40,), 10**9, device=target.device)
        wrong += (rows != turn).any().long() + (numbers != turn).any().long()
    assert int(wrong) == 0
    multigather.check()


def test_ids_and_addresses_that_are_used_again(target: Target) -> None:
    """What is remembered by an id is not believed of another tensor that has it later."""
    indices = torch.tensor([3, 0, 2], device=target.device)
    shapes = ((8, 5), (4, 5), (8,), (5, 2, 2), (8, 5))
    dtypes = (torch.float32, torch.int16, torch.uint8)
    seen: set[int] = set()
    again, turns = 0, 11 if target.name == "triton-interpreter" else 400
    for turn in range(turns):
        shape, dtype = shapes[turn % 5], dtypes[turn % 3]
        buffer = torch.full(shape, turn % 100, dtype=dtype, device=target.device)
        buffer[3] = 101
        out = torch.empty((3, *shape[1:]), dtype=dtype, device=target.device)
        again += id(buffer) in seen
        seen.add(id(buffer))
        for _ in range(3):
            (rows,) = multigather.gather(indices, buffer, backend=target.backend)
            multigather.gather(indices, buffer, out=(out,), backend=target.backend)
            for each in (rows, out):
                assert (each[0] == 101).all()
                assert (each[1:] == turn % 100).all()
        del buffer, out, rows, each
    assert again > turns // 10, "the test needs ids that come again"


def test_plans_outlive_the_callers_buffers(target: Target) -> None:
    """A plan keeps its buffers; the memory comes back with the plan."""
    indices = torch.tensor([3, 0, 2], device=target.device)
    plans = []
    for number in range(5):
        buffer = torch.full((8, 5), number, device=target.device)
        plans.append(multigather.plan(buffer, {"b": buffer[:, 0]}, backend=target.backend))
        del buffer
    for _ in range(3):
        for number, plan in enumerate(plans):
            rows, second = plan(indices)
            assert (rows == number).all()
            assert (second["b"] == number).all()


# --------------------------------------------------------------------- what a call must not keep


class Name:
    """A key, or a context, that is no string."""

    def __hash__(self) -> int:
        return 7

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Name)


class Own:
    """A container that a program registers, with a context of its own."""

    def __init__(self, context: Any, items: list[Any]) -> None:
        self.context, self.items = context, items


pytree.register_pytree_node(
    Own,
    lambda own: (own.items, own.context),
    lambda items, context: Own(context, list(items)),
    flatten_with_keys_fn=lambda own: (
        [(pytree.SequenceKey(number), item) for number, item in enumerate(own.items)],
        own.context,
    ),
)


@dataclasses.dataclass
class Fields:
    """A registered dataclass."""

    first: Any
    second: Any


torch.export.register_dataclass(Fields)


class Array:
    """An array of another library."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __dlpack__(self, **options: Any) -> Any:
        return self.tensor.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.tensor.__dlpack_device__()


class Text(str):
    """A string that can be watched."""


def containers_of(rows: int) -> dict[str, Any]:
    """One of every kind of argument, new each time."""

    def tensor() -> torch.Tensor:
        return torch.arange(rows * 3).view(rows, 3)

    pair = collections.namedtuple("pair", "a b")  # a class that goes, too
    kinds: dict[str, Any] = {
        "tensor": tensor(),
        "list": [tensor(), (tensor(),)],
        "dict": {"a": tensor(), 3: tensor()},
        "dict of objects": {Name(): tensor()},
        "dict of subclassed strings": {Text("a"): tensor()},
        "dict of tuples": {("a", Name()): tensor()},
        "dict with default": collections.defaultdict(Name, {"a": tensor()}),
        "ordered": collections.OrderedDict({"a": tensor(), Name(): tensor()}),
        "deque": collections.deque([tensor()], maxlen=4),
        "named tuple": pair(tensor(), None),
        "dataclass": Fields(tensor(), {"k": tensor()}),
        "own container": Own(Name(), [tensor()]),
        "own container, plain context": Own(["x", 1], [tensor()]),
        "NumPy": np.zeros((rows, 3), np.float32),
        "NumPy, bytes": np.zeros((rows, 3), ">i4"),
        "NumPy, read-only": np.frombuffer(bytes(rows * 8), np.int64),
        "other library": Array(tensor()),
    }
    try:
        import tensordict
    except ImportError:
        return kinds
    make = tensordict.TensorDict

    @tensordict.tensorclass
    class Sample:
        image: torch.Tensor
        label: Any = None

    data = tensordict.NonTensorData(Name(), batch_size=[rows])
    names = [Name() for _ in range(rows)]
    kinds |= {
        "TensorDict": make({"a": tensor(), "n": {"b": tensor()}}, [rows]),
        "TensorDict of subclassed strings": make({Text("a"): tensor()}, [rows]),
        "TensorDict with data": make({"a": tensor(), "s": data}, [rows]),
        "TensorDict with objects": make({"s": tensordict.NonTensorStack(*names)}, [rows]),
        "TensorDict, shared": make(
            {"a": tensor(), "u": tensordict.UnbatchedTensor(torch.ones(2))}, [rows]
        ),
        "tensorclass": Sample(tensor(), tensor(), batch_size=[rows]),
        "stack": tensordict.lazy_stack([make({"a": torch.ones(n)}, []) for n in range(rows)]),
    }
    return kinds


def parts(item: Any) -> Iterator[Any]:
    """An argument and all in it that a weak reference can watch."""
    seen = set()
    remaining = [item]
    while remaining:
        each = remaining.pop()
        if id(each) in seen or isinstance(each, (type, int, float, bytes, type(None))):
            continue
        seen.add(id(each))
        if isinstance(each, (tuple, list, collections.deque, set)):
            remaining += each
        if isinstance(each, dict):
            remaining += [*each, *each.values()]
        if hasattr(type(each), "__weakref__") or isinstance(each, (torch.Tensor, np.ndarray)):
            yield each
        if type(each).__module__ != "torch":
            remaining.append(getattr(each, "__dict__", None))


def alive(watched: list[weakref.ref[Any]]) -> list[Any]:
    gc.collect()
    return [type(each()) for each in watched if each() is not None]


@pytest.mark.parametrize("kind", containers_of(1))
def test_nothing_of_the_caller_s_is_kept(target: Target, kind: str) -> None:
    """Neither buffers, containers, keys and contexts nor indices and rows, of many sizes."""
    if target.device != "cpu":
        pytest.skip("arrays and data on the CPU")
    watched: list[weakref.ref[Any]] = []
    for rows in range(3, 5 if target.name == "triton-interpreter" else 23):
        source, indices = containers_of(rows)[kind], torch.tensor([rows - 1, 0])
        results = []
        for _ in range(3):
            results.append(multigather.gather(indices, source, backend=target.backend))
            results.append(multigather.gather(indices.numpy(), source, backend=target.backend))
        watched += [weakref.ref(each) for each in parts([source, indices, results[:4]])]
        with pytest.raises(IndexError):
            multigather.gather(indices + rows, source, backend=target.backend)
        del source, indices, results
    assert len(watched) > 3
    assert not alive(watched)


@pytest.mark.parametrize("kind", ["tensor", "dict", "dict of objects", "dataclass", "NumPy"])
def test_outputs_are_not_kept(target: Target, kind: str) -> None:
    if target.device != "cpu":
        pytest.skip("arrays on the CPU")
    watched: list[weakref.ref[Any]] = []
    for rows in range(3, 5 if target.name == "triton-interpreter" else 9):
        source, out = containers_of(rows)[kind], containers_of(2)[kind]
        for _ in range(4):
            multigather.gather(torch.tensor([0, 1]), source, out=(out,), backend=target.backend)
        watched += [weakref.ref(each) for each in parts([source, out])]
        del source, out
    assert not alive(watched)


@pytest.mark.parametrize("kind", containers_of(1))
def test_a_plan_s_buffers_go_with_it(kind: str) -> None:
    source = containers_of(5)[kind]
    watched = [weakref.ref(each) for each in parts(source)]
    plan = multigather.plan(source)
    del source
    for _ in range(3):
        plan(torch.tensor([1, 0]))
    with pytest.raises(IndexError):
        plan(torch.tensor([5]))
    assert alive(watched)  # the tensors, in containers of the plan's own
    del plan
    assert not alive(watched)


@pytest.mark.parametrize("kind", ["dict of objects", "own container", "dict of tuples"])
def test_names_in_errors_are_of_this_call_s_keys(kind: str) -> None:
    """Not of another call's with as many buffers of the same layout."""
    plain = {"x": torch.arange(9).view(3, 3)}
    with pytest.raises(IndexError, match=r"bufs\[0\]\['x'\]"):
        multigather.gather(torch.tensor([3]), plain)
    for _ in range(2):
        with pytest.raises(IndexError, match=r"bufs\[0\]\[(<|0|\('a', <)"):
            multigather.gather(torch.tensor([3]), containers_of(3)[kind])
    with pytest.raises(IndexError, match=r"bufs\[0\]\.first"):
        multigather.gather(torch.tensor([3]), Fields(plain["x"], None))
    with pytest.raises(IndexError, match=r"bufs\[0\]\[True\]"):
        multigather.gather(torch.tensor([3]), {True: plain["x"]})
    with pytest.raises(IndexError, match=r"bufs\[0\]\[1\]"):
        multigather.gather(torch.tensor([3]), {1: plain["x"]})


@pytest.mark.skipif(not HAVE_GPU, reason="torch sees no CUDA device")
@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["torch", "triton", "cupy"])
def test_memory_comes_back(backend: str) -> None:
    """After many shapes, plans, outputs and gradients nothing is held but what the caller holds."""
    api.forget()
    indices = torch.arange(64, device="cuda") % 50
    multigather.gather(indices, torch.zeros(50, 3, device="cuda"), backend=backend)
    torch.cuda.synchronize()
    gc.collect()
    base = torch.cuda.memory_allocated()
    for width in (1, 7, 64) * 10:
        buffer = torch.zeros(50, width, device="cuda", requires_grad=True)
        detached = buffer.detach()
        plan = multigather.plan(detached, backend=backend)
        out = torch.empty(64, width, device="cuda")
        for count in (1, 33, 64):
            multigather.gather(indices[:count], buffer, backend=backend)[0].sum().backward()
            for _ in range(3):
                multigather.gather(indices[:count], detached, backend=backend)
                plan(indices[:count])
        for _ in range(3):
            plan(indices, out=(out,))
        del buffer, detached, plan, out
    gc.collect()
    assert torch.cuda.memory_allocated() == base


@pytest.mark.parametrize("known", [False, True], ids=["first call", "known layout"])
def test_buffers_whose_storage_was_freed(target: Target, known: bool) -> None:
    """Parameters that a sharded model has given back: refused, and gathered once they are back."""
    if target.device == "cuda":
        pytest.skip("in a process of its own, below: the wrong outcome is the end of the context")
    api.forget()
    buffer, other = torch.ones(100, 33), torch.ones(100)
    buffer, other = buffer.to(target.device), other.to(target.device)
    indices = torch.tensor([3, 99], device=target.device)
    out = (torch.zeros(2, device=target.device), torch.zeros(2, 33, device=target.device))
    plan = multigather.plan(other, buffer, backend=target.backend)
    ways = (
        lambda: multigather.gather(indices, other, buffer, backend=target.backend),
        lambda: multigather.gather(indices, other, buffer, out=out, backend=target.backend),
        lambda: plan(indices),
        lambda: plan(indices, out=out),
    )
    for way in ways * (3 if known else 0):
        way()
    size = buffer.untyped_storage().nbytes()
    buffer.untyped_storage().resize_(0)
    for each in out:
        each.zero_()
    for way in ways:
        # On a CPU torch's own operation may refuse it first.
        with pytest.raises((ValueError, RuntimeError), match=r"bufs\[1\]|tensor 1|setStorage"):
            way()
    assert not any(bool(each.any()) for each in out)
    buffer.untyped_storage().resize_(size)
    buffer.fill_(2)
    assert bool((ways[0]()[1] == 2).all())


FREED = """
import sys
import torch, multigather

buffer, other = torch.ones(100, 33, device="cuda"), torch.ones(100, device="cuda")
indices = torch.tensor([3, 99], device="cuda")
out = (torch.zeros(2, device="cuda"), torch.zeros(2, 33, device="cuda"))
plan = multigather.plan(other, buffer, backend=sys.argv[1])
ways = (
    lambda: multigather.gather(indices, other, buffer, backend=sys.argv[1]),
    lambda: multigather.gather(indices, other, buffer, out=out, backend=sys.argv[1]),
    lambda: plan(indices),
    lambda: plan(indices, out=out),
)
for known in (False, True):
    for way in ways * (3 if known else 0):
        way()
    size = buffer.untyped_storage().nbytes()
    buffer.untyped_storage().resize_(0)
    for way in ways:
        try:
            way()
            raise SystemExit("a buffer without memory was not refused")
        except ValueError as error:
            assert "bufs[1] has no memory" in str(error) or "tensor 1" in str(error), error
    torch.cuda.synchronize()
    buffer.untyped_storage().resize_(size)
    buffer.fill_(2)
    assert bool((ways[0]()[1] == 2).all())
    plan = multigather.plan(other, buffer, backend=sys.argv[1])
print("works")
"""


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("backend", ["torch", "triton", "cupy"])
def test_buffers_of_a_gpu_whose_storage_was_freed(backend: str) -> None:
    """A kernel would read address 0 and end the context."""
    command = [sys.executable, "-W", "ignore", "-c", FREED, backend]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, done.stdout) == (0, "works\n"), done.stderr


# ---------------------------------------------------------------------------------------- streams


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("backend", ["torch", "triton", "cupy"])
def test_producers_and_consumers_on_other_streams(backend: str) -> None:
    """A gather comes after what its stream waits for, and before what waits for its stream."""
    producer, gatherer, consumer = (torch.cuda.Stream() for _ in range(3))
    buffer = torch.zeros(50, 33, dtype=torch.uint8, device="cuda")
    indices = torch.zeros(20, dtype=torch.int64, device="cuda")
    total = torch.zeros((), dtype=torch.int64, device="cuda")
    plan = multigather.plan(buffer, backend=backend)
    plan(indices)
    torch.cuda.synchronize()
    for turn in range(1, 40):
        with torch.cuda.stream(producer):
            torch.cuda._sleep(2_000_000)  # about a millisecond
            buffer.fill_(turn)
            indices.fill_(turn % 50)
        gatherer.wait_stream(producer)
        with torch.cuda.stream(gatherer):
            (rows,) = plan(indices)
            rows.record_stream(consumer)
        consumer.wait_stream(gatherer)
        producer.wait_stream(gatherer)  # it writes what the gather reads
        with torch.cuda.stream(consumer):
            total += (rows != turn).any()
        del rows
    torch.cuda.synchronize()
    assert int(total) == 0
    multigather.check()


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("backend", ["triton", "cupy"])
def test_pinned_buffers_freed_before_the_kernel_reads_them(backend: str) -> None:
    """Torch must not give their memory to another pinned tensor before that."""
    indices = torch.arange(64, device="cuda") % 50
    warm = torch.full((50, 1024), 1).pin_memory()
    multigather.gather(indices, warm, backend=backend)
    torch.cuda.synchronize()
    del warm
    for turn in range(20):
        buffer = torch.empty((50, 1024), dtype=torch.int64, pin_memory=True).fill_(turn)
        torch.cuda._sleep(20_000_000)  # about 10 ms
        (rows,) = multigather.gather(indices, buffer, backend=backend)
        del buffer
        torch.empty((50, 1024), dtype=torch.int64, pin_memory=True).fill_(-1)
        assert bool((rows == turn).all())


# ---------------------------------------------------------------------------------- out of memory


def test_a_host_without_memory_for_the_output() -> None:
    """Torch's own error, and the next call works."""
    wide = torch.ones(1, 1).expand(1000, 1 << 28)
    indices = torch.zeros(1 << 18, dtype=torch.int64)  # 256 TiB of output, beyond any address
    for _ in range(3):
        with pytest.raises(RuntimeError, match="allocate"):
            multigather.gather(indices, wide, backend="torch")
        (rows,) = multigather.gather(indices[:2], wide[:, :3], backend="torch")
        assert rows.tolist() == [[1.0] * 3] * 2


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("backend", ["torch", "triton", "cupy"])
def test_a_gpu_without_memory_for_the_output(backend: str) -> None:
    """torch.OutOfMemoryError from every way, nothing held after it, and then all works again.

    The first output fits and the second does not, so the first must be given back too.
    """
    one = torch.ones(1, 8, device="cuda").expand(100, 8)
    row = torch.ones(1, 1 << 15, device="cuda").expand(100, 1 << 15)  # 128 KiB in each row
    indices = torch.zeros(8192, dtype=torch.int64, device="cuda")  # 1 GiB of output
    plan = multigather.plan(one, row, backend=backend)
    ways = {
        "gather": lambda: multigather.gather(indices, one, row, backend=backend),
        "plan": lambda: plan(indices),
    }
    for way in ways.values():  # once where there is room: the repeated ways know this count then
        for _ in range(2):
            way()
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    base = torch.cuda.memory_allocated()
    device = torch.cuda.current_device()
    total = torch.cuda.get_device_properties(device).total_memory
    room = torch.cuda.memory_reserved() + (256 << 20)
    torch.cuda.set_per_process_memory_fraction(room / total, device)
    try:
        for known in (True, False):
            if not known:
                api.forget()  # now a call of an unknown layout
            for name, way in ways.items():
                for _ in range(20):
                    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
                        way()
                gc.collect()
                assert torch.cuda.memory_allocated() == base, name
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    for way in ways.values():
        rows = way()
        assert rows[1].shape == (8192, 1 << 15) and bool(rows[1].all())
        del rows
    gc.collect()
    assert torch.cuda.memory_allocated() == base
    multigather.check()
