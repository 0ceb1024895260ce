"""TorchRL's replay buffers sample the same through our storages as through TorchRL's own."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

os.environ.setdefault("RL_LOGGING_LEVEL", "ERROR")  # before torchrl reads it
pytest.importorskip("torchrl", reason="torchrl is not installed (pip install 'torchrl>=0.14')")

from scripts import load
from tensordict import NonTensorStack, TensorDict, UnbatchedTensor, lazy_stack, tensorclass
from torch.utils import _pytree as pytree
from torchrl import data as rl
from torchrl.data import replay_buffers as theirs

import multigather
from multigather.integrations import torchrl as ours


@tensorclass
class Sample:
    """A tensorclass with a nested TensorDict."""

    obs: torch.Tensor
    next: TensorDict


def transitions(count: int, *more: int, seed: int = 0) -> TensorDict:
    generator = torch.Generator().manual_seed(seed)
    shape = (count, *more)
    return TensorDict(
        {
            "obs": torch.randn(*shape, 3, generator=generator),
            "pixels": torch.randint(256, (*shape, 4, 5), dtype=torch.uint8, generator=generator),
            "next": TensorDict(
                {
                    "reward": torch.randn(*shape, generator=generator),
                    "done": torch.rand(*shape, 1, generator=generator) < 0.2,
                },
                batch_size=shape,
            ),
            "step": torch.arange(count).view(-1, *[1] * len(more)).expand(shape).clone(),
            "episode": (torch.arange(count) // 5).view(-1, *[1] * len(more)).expand(shape).clone(),
        },
        batch_size=shape,
    )


def as_kind(kind: str, data: TensorDict) -> Any:
    if kind == "tensordict":
        return data
    if kind == "tensorclass":
        return Sample(obs=data["obs"], next=data["next"], batch_size=data.batch_size)
    if kind == "tensor":
        return data["obs"]
    return {"a": data["obs"], "b": [data["step"], (data["next", "done"],)]}


def assert_same(got: Any, want: Any) -> None:
    """The same structure, shapes, types and bytes."""
    assert type(got) is type(want)
    if isinstance(want, torch.Tensor):
        assert got.dtype == want.dtype and got.shape == want.shape and got.device == want.device
        assert torch.equal(got, want)
        return
    if hasattr(want, "batch_size"):
        assert got.batch_size == want.batch_size and got.device == want.device
        assert got.is_locked == want.is_locked
        assert sorted(got.keys(True), key=str) == sorted(want.keys(True), key=str)
        for key in want.keys(True, True):
            assert_same(got.get(key), want.get(key))
        return
    got_leaves, got_spec = pytree.tree_flatten(got)
    want_leaves, want_spec = pytree.tree_flatten(want)
    assert got_spec == want_spec
    for one, other in zip(got_leaves, want_leaves, strict=True):
        assert_same(one, other)


def pair(storage: str, *arguments: Any, **options: Any) -> list[Any]:
    return [getattr(module, storage)(*arguments, **options) for module in (theirs, ours)]


@pytest.fixture
def gathers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tensors each gather of a storage had."""
    counts = []

    def counted(indices: torch.Tensor, *bufs: torch.Tensor) -> Any:
        counts.append(len(bufs))
        return multigather.gather(indices, *bufs)

    monkeypatch.setattr(ours, "gather", counted)
    return counts


@pytest.mark.parametrize("kind", ["tensordict", "tensorclass", "tensor", "pytree"])
@pytest.mark.parametrize("rows", [12, 40], ids=["partly filled", "full"])
@pytest.mark.parametrize("storage", ["LazyTensorStorage", "LazyMemmapStorage"])
def test_batches_are_equal(storage: str, rows: int, kind: str, gathers: list[int]) -> None:
    batches = []
    for each in pair(storage, 40):
        buffer = rl.ReplayBuffer(storage=each, batch_size=16)
        buffer.extend(as_kind(kind, transitions(rows)))
        torch.manual_seed(1)
        batches.append([buffer.sample() for _ in range(4)])
    for got, want in zip(batches[1], batches[0], strict=True):
        assert_same(got, want)
    assert len(gathers) == 4 and len(set(gathers)) == 1


SAMPLERS = {
    "random": lambda: rl.RandomSampler(),
    "without replacement": lambda: rl.SamplerWithoutReplacement(),
    "slices": lambda: rl.SliceSampler(num_slices=4, traj_key="episode", strict_length=False),
}


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("more", [(), (3,)], ids=["one environment", "three environments"])
def test_samplers(sampler: str, more: tuple[int, ...], gathers: list[int]) -> None:
    batches = []
    for each in pair("LazyTensorStorage", 90, ndim=1 + len(more)):
        buffer = rl.TensorDictReplayBuffer(
            storage=each, sampler=SAMPLERS[sampler](), batch_size=16, dim_extend=0
        )
        # Rounds of writing, so that a partly filled storage is read, then a full one that wraps.
        torch.manual_seed(2)
        found = []
        for seed in range(4):
            buffer.extend(transitions(30 if not more else 10, *more, seed=seed))
            found += [buffer.sample(return_info=True)[0] for _ in range(2)]
        batches.append(found)
    for got, want in zip(batches[1], batches[0], strict=True):
        assert_same(got, want)
    # The slice sampler reads the ends of trajectories besides.
    assert len(gathers) == (16 if sampler == "slices" else 8)


def test_transforms_and_prefetch() -> None:
    batches = []
    for each in pair("LazyTensorStorage", 40):
        buffer = rl.TensorDictReplayBuffer(storage=each, batch_size=8, prefetch=2)
        buffer.append_transform(lambda batch: batch.set("twice", batch["obs"] * 2))
        buffer.extend(transitions(40))
        torch.manual_seed(3)
        batches.append(buffer.sample())
    assert torch.equal(batches[1]["twice"], batches[1]["obs"] * 2)
    assert_same(batches[1].exclude("index"), batches[0].exclude("index"))


INDICES = [
    3,
    -2,
    slice(2, 9, 3),
    range(4),
    [1, 5, 1],
    torch.tensor(4),
    torch.tensor([7, 0, -12, -1]),
    torch.tensor([[1, 2], [3, 11]], dtype=torch.int32),
    torch.tensor([], dtype=torch.int64),
    torch.arange(12) % 2 == 0,
    (torch.arange(12) % 2).to(torch.uint8),
]


@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
@pytest.mark.parametrize("rows", [12, 20], ids=["full", "partly filled"])
@pytest.mark.parametrize("index", INDICES, ids=str)
def test_every_kind_of_index(index: Any, rows: int) -> None:
    storages = pair("LazyTensorStorage", rows)
    for storage in storages:
        storage.set(range(12), transitions(12))
    want, got = (storage.get(index) for storage in storages)
    assert_same(got, want)


@pytest.mark.parametrize("rows", [12, 20], ids=["full", "partly filled"])
@pytest.mark.parametrize("value", [12, 19, 20, -13])
def test_bad_index(rows: int, value: int) -> None:
    """Rows beyond the written ones are never read, though the memory is there."""
    storage = ours.LazyTensorStorage(rows)
    storage.set(range(12), transitions(12))
    with pytest.raises(IndexError, match=str(value)):
        storage.get(torch.tensor([0, value]))
    both = ours.LazyTensorStorage(rows * 2, ndim=2)
    both.set(range(rows), transitions(rows, 2))
    for index in ((torch.tensor([0]), torch.tensor([2])), (torch.tensor([20]), torch.tensor([0]))):
        with pytest.raises((IndexError, RuntimeError)):
            both.get(index)


def test_two_dimensions_with_negative_indices() -> None:
    storages = pair("LazyTensorStorage", 24, ndim=2)
    for storage in storages:
        storage.set(range(8), transitions(8, 3))
    for index in (
        (torch.tensor([0, -1, 5]), torch.tensor([2, -3, 0])),
        (torch.tensor([[0, 1], [2, 3]]), torch.tensor([[0, 1], [2, 0]])),
        torch.tensor([7, 2]),
        (torch.tensor([7, 2]), 1),
    ):
        assert_same(storages[1].get(index), storages[0].get(index))


def test_what_cannot_be_gathered_is_read_by_torchrl() -> None:
    lazy = lazy_stack([TensorDict({"a": torch.ones(2) * n}, []) for n in range(4)])
    text = TensorDict({"a": torch.arange(4), "s": "text"}, [4])
    for data in (lazy, text):
        want, got = (
            module.TensorStorage(data).get(torch.tensor([3, 0])) for module in (theirs, ours)
        )
        assert torch.equal(got["a"], want["a"]) and got.batch_size == want.batch_size
    with pytest.raises(RuntimeError, match="non-initialized"):
        ours.LazyTensorStorage(3).get(torch.tensor([0]))


@pytest.mark.parametrize("kind", ["TensorDict", "tensorclass"])
def test_tensors_that_all_rows_share(kind: str, gathers: list[int]) -> None:
    """They come back whole, with the class that says so, and no index is held against them."""
    inner = TensorDict({"reward": torch.arange(6), "scale": UnbatchedTensor(torch.rand(2))}, [6])
    data = TensorDict(
        {"obs": torch.rand(6, 2), "next": inner, "u": UnbatchedTensor(torch.rand(3))}, [6]
    )
    if kind == "tensorclass":
        data = Sample(obs=UnbatchedTensor(torch.rand(3)), next=inner, batch_size=[6])
    for index in (torch.tensor([5, 1]), torch.tensor([[3], [-1]]), torch.tensor(4)):
        want, got = (each.get(index) for each in pair("TensorStorage", data))
        assert_same(got, want)
        for one, other in ((got, want), (got.get("next"), want.get("next"))):
            for key, value in other.items():
                assert type(one.get(key)) is type(value), key
                if isinstance(value, UnbatchedTensor):
                    assert one.get(key).batch_size == value.batch_size == index.shape
    assert len(gathers) == 3


def test_tensors_that_all_rows_share_in_two_dimensions() -> None:
    data = TensorDict(
        {"a": torch.arange(12).view(6, 2), "u": UnbatchedTensor(torch.rand(3))}, [6, 2]
    )
    for index in ((torch.tensor([5, 1]), torch.tensor([1, 0])), torch.tensor([5, 1])):
        want, got = (each.get(index) for each in pair("TensorStorage", data, ndim=2))
        assert torch.equal(got["a"], want["a"]) and got.batch_size == want.batch_size
        assert type(got["u"]) is UnbatchedTensor and got["u"].batch_size == want["u"].batch_size


@pytest.mark.parametrize("storage", ["TensorStorage", "LazyTensorStorage"])
def test_objects_among_the_tensors(storage: str) -> None:
    data = TensorDict({"a": torch.arange(6), "s": NonTensorStack(*"abcdef")}, [6])
    found = []
    for each in pair(storage, data if storage == "TensorStorage" else 10):
        if storage != "TensorStorage":
            each.set(range(6), data)
        found.append([each.get(torch.tensor(index)) for index in ([5, 1], [[0], [-1]], 3)])
        with pytest.raises(IndexError):
            each.get(torch.tensor([6]))
    for want, got in zip(*found, strict=True):
        assert torch.equal(got["a"], want["a"]) and got["s"] == want["s"]
        assert type(got.get("s")) is type(want.get("s"))
    pairs = NonTensorStack(*(NonTensorStack(*"xy") for _ in range(6)))
    both = TensorDict({"a": torch.arange(12).view(6, 2), "s": pairs}, [6, 2])
    index = torch.tensor([5, 1]), torch.tensor([1, 0])
    want, got = (each.get(index) for each in pair("TensorStorage", both, ndim=2))
    assert torch.equal(got["a"], want["a"]) and got["s"] == want["s"] == ["y", "x"]


def test_new_keys_and_replaced_tensors_are_seen() -> None:
    storage = ours.TensorStorage(transitions(6))
    index = torch.tensor([5, 1])
    storage.get(index)
    storage.get(index)
    inner = storage[:]
    inner["extra"] = torch.arange(6)
    inner["obs"] = torch.ones(6, 3)
    got = storage.get(index)
    assert torch.equal(got["extra"], index) and torch.equal(got["obs"], torch.ones(2, 3))


def test_saved_and_loaded(tmp_path: Any) -> None:
    first = rl.ReplayBuffer(storage=ours.LazyTensorStorage(20), batch_size=4)
    first.extend(transitions(10))
    first.dumps(tmp_path)
    second = rl.ReplayBuffer(storage=ours.LazyTensorStorage(20), batch_size=4)
    second.extend(transitions(1))
    second.loads(tmp_path)
    third = rl.ReplayBuffer(storage=theirs.LazyTensorStorage(20), batch_size=4)
    third.extend(transitions(1))
    third.load_state_dict(first.state_dict())
    for other in (second, third):
        assert_same(other[:], first[:])


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [12, 40], ids=["partly filled", "full"])
@pytest.mark.parametrize("more", [(), (3,)], ids=["one environment", "three environments"])
def test_batches_are_equal_on_a_gpu(rows: int, more: tuple[int, ...]) -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    size = 40 * (more[0] if more else 1)
    batches = []
    for each in pair("LazyTensorStorage", size, device="cuda", ndim=1 + len(more)):
        buffer = rl.ReplayBuffer(storage=each, batch_size=16, dim_extend=0)
        buffer.extend(transitions(rows, *more))
        torch.manual_seed(1)
        batches.append([buffer.sample() for _ in range(4)])
    for got, want in zip(batches[1], batches[0], strict=True):
        assert_same(got, want)
    multigather.check()


@pytest.mark.gpu
def test_negative_and_bad_indices_on_a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    storage = ours.LazyTensorStorage(20, device="cuda")
    data = transitions(12).to("cuda")
    storage.set(range(12), data)
    index = torch.tensor([-1, 3, -12], device="cuda")
    assert torch.equal(storage.get(index)["obs"], data["obs"][index])
    for bad in (12, -13):
        got = storage.get(torch.tensor([0, bad], device="cuda"))
        assert torch.equal(got["obs"][0], data["obs"][0]) and not got["obs"][1].any()
        with pytest.raises(IndexError, match=r"\[1\] is"):
            multigather.check()


@pytest.mark.usefixtures("one_thread")
def test_agent_learns_the_same_with_both_storages() -> None:
    pytest.importorskip("gymnasium", reason="gymnasium is not installed (pip install gymnasium)")
    agent = load("examples/torchrl_agent.py")
    one, other = (agent.train(name, 2600, 1500, 1, 0) for name in ("multigather", "torchrl"))
    assert one["updates"] > 30
    assert one["network_checksum"] == other["network_checksum"]
    assert one["episodes"] == other["episodes"]


@pytest.mark.parametrize("workload", ["replay", "frames"])
def test_benchmark_compares_before_it_times(workload: str) -> None:
    benchmark = load("benchmarks/torchrl_replay.py")
    report = benchmark.measure(workload, 60, 16, torch.device("cpu"), 1)
    assert report["equal_tensors"] == 5 * 7
    one, other = benchmark.transitions(workload, 60, 0), benchmark.transitions(workload, 60, 0)
    assert benchmark.assert_equal(one, other) == 6
    other["next", "reward"][3] += 1
    with pytest.raises(AssertionError):
        benchmark.assert_equal(one, other)


def test_rows_of_two_dimensions_that_are_no_view() -> None:
    """A tensor without elements, and one whose strides no single dimension can have."""
    index = (torch.tensor([0, 1]), torch.tensor([1, 0]))
    data = TensorDict({"obs": torch.arange(8.0).view(4, 2), "none": torch.ones(4, 2, 0)}, [4, 2])
    batches = []
    for each in pair("LazyTensorStorage", 16, ndim=2):
        rl.ReplayBuffer(storage=each, batch_size=2).extend(data)
        batches.append(each.get(index))
    assert_same(batches[1], batches[0])
    turned = torch.arange(8).view(2, 4).t()
    want, got = (each.get(index) for each in pair("TensorStorage", turned, ndim=2))
    assert_same(got, want)


def test_classes_are_related_as_in_torchrl() -> None:
    names = ["TensorStorage", "LazyTensorStorage", "LazyMemmapStorage"]
    for lower, one in enumerate(names):
        for higher, other in enumerate(names):
            assert issubclass(getattr(ours, one), getattr(ours, other)) == (lower >= higher)
        assert issubclass(getattr(ours, one), getattr(theirs, one))
