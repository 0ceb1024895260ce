"""Containers and other libraries' arrays: what goes in as one comes back as one."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

import multigather
from multigather import containers


@dataclasses.dataclass
class Transition:
    """A registered dataclass."""

    obs: Any
    action: Any = None


@dataclasses.dataclass
class Unregistered:
    """One that torch's pytree does not know."""

    obs: Any


torch.export.register_dataclass(Transition)
Pair = collections.namedtuple("Pair", ["first", "second"])

INDICES = [
    pytest.param([2, 0, -1, 2], id="1-d"),
    pytest.param([[1, 2], [3, 0]], id="2-d"),
    pytest.param(3, id="0-d"),
    pytest.param([], id="empty"),
]


def indices_of(values: Any, device: str = "cpu") -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)


@pytest.mark.parametrize("planned", [False, True], ids=["gather", "plan"])
@pytest.mark.parametrize("values", INDICES)
def test_dataclasses_and_named_tuples(device: str, values: Any, planned: bool) -> None:
    a, b = torch.arange(12, device=device).view(4, 3), torch.rand(4, device=device)
    arguments = (Transition(a), Pair(b, {"x": Transition(b, (a, None))}))
    indices = indices_of(values, device)
    for _ in range(3):
        call = multigather.plan(*arguments) if planned else None
        first, second = call(indices) if call else multigather.gather(indices, *arguments)
        assert type(first) is Transition and first.action is None
        assert torch.equal(first.obs, a[indices])
        assert type(second) is Pair and torch.equal(second.first, b[indices])
        inner = second.second["x"]
        assert type(inner) is Transition and torch.equal(inner.obs, b[indices])
        assert torch.equal(inner.action[0], a[indices]) and inner.action[1] is None


def test_unregistered_dataclass_is_refused_with_the_remedy() -> None:
    with pytest.raises(TypeError, match=r"bufs\[0\]\['k'\].*register_dataclass\(Unregistered\)"):
        multigather.gather(torch.tensor([0]), {"k": Unregistered(torch.ones(2))})


def test_errors_name_the_place_in_the_container() -> None:
    buffers = Transition(torch.ones(4), {"left": torch.ones(2)})
    with pytest.raises(IndexError, match=r"bufs\[0\]\.action\['left'\]"):
        multigather.gather(torch.tensor([3]), buffers)


def test_outputs_come_back_as_the_caller_s_own_objects() -> None:
    a = torch.arange(12.0).view(4, 3)
    out = Transition(torch.empty(2, 3))
    (result,) = multigather.gather(torch.tensor([3, 1]), Transition(a), out=(out,))
    assert result is out and torch.equal(out.obs, a[[3, 1]])
    with pytest.raises(ValueError, match="same structure"):
        multigather.gather(torch.tensor([3, 1]), Transition(a), out=({"obs": torch.empty(2, 3)},))


def test_gradients_through_a_container() -> None:
    weight = torch.rand(4, 3, requires_grad=True)
    (rows,) = multigather.gather(torch.tensor([1, 1]), Transition(weight, torch.arange(4)))
    rows.obs.sum().backward()
    assert weight.grad is not None and weight.grad.sum(1).tolist() == [0, 6, 0, 0]


def test_compiled_container_is_one_graph() -> None:
    a, b = torch.arange(12.0).view(4, 3), torch.arange(4)

    def call(indices: torch.Tensor) -> tuple[Any, ...]:
        return multigather.gather(indices, Transition(a, {"b": b}), None)

    compiled = torch.compile(call, fullgraph=True, backend="eager", dynamic=True)
    for count in (2, 3):
        first, second = compiled(torch.arange(count))
        assert isinstance(first, Transition) and second is None
        assert torch.equal(first.obs, a[:count]) and torch.equal(first.action["b"], b[:count])


class TestTensorDict:
    @pytest.fixture(autouse=True)
    def needs_tensordict(self) -> None:
        self.tensordict = pytest.importorskip("tensordict", reason="tensordict is not installed")

    def transitions(self, device: str = "cpu") -> Any:
        make = self.tensordict.TensorDict
        step = make({"reward": torch.rand(5, 3), "done": torch.rand(5, 3) < 0.5}, [5, 3])
        fields = {"obs": torch.randn(5, 3, 2), "next": step, "nothing": make({}, [5]), "s": "text"}
        return make(fields, batch_size=[5, 3]).to(device)

    @pytest.mark.parametrize("planned", [False, True], ids=["gather", "plan"])
    @pytest.mark.parametrize("values", INDICES)
    def test_equals_indexing(self, device: str, values: Any, planned: bool) -> None:
        source, indices = self.transitions(device), indices_of(values, device)
        want = source[indices]
        for _ in range(3):
            if planned:
                (got,) = multigather.plan(source)(indices)
            else:
                (got,) = multigather.gather(indices, source)
            assert type(got) is type(want) and got["s"] == "text"
            assert got.device == want.device and not got.is_locked
            assert sorted(got.keys(True), key=str) == sorted(want.keys(True), key=str)
            for key in [(), ("next",), ("nothing",)]:
                one, other = (each.get(key) if key else each for each in (got, want))
                assert one.batch_size == other.batch_size, key
            for key in want.keys(True, True):
                if key != "s":
                    assert torch.equal(got[key], want[key]), key

    def test_names_of_dimensions(self) -> None:
        source = self.tensordict.TensorDict({"a": torch.ones(4, 2)}, [4, 2], names=["time", None])
        assert multigather.gather(torch.tensor([1]), source)[0].names == ["time", None]
        (several,) = multigather.gather(torch.tensor([[1, 2]]), source)
        assert several.names == [None, None, None] and several.batch_size == (1, 2, 2)

    def test_tensorclass(self) -> None:
        tensorclass = self.tensordict.tensorclass

        @tensorclass
        class Sample:
            image: torch.Tensor
            label: torch.Tensor

        source = Sample(torch.rand(4, 2), torch.arange(4), batch_size=[4])
        (got,) = multigather.gather(torch.tensor([3, 0]), source)
        assert type(got) is Sample and got.batch_size == (2,)
        assert torch.equal(got.image, source.image[[3, 0]]) and got.label.tolist() == [3, 0]

    def test_inside_other_containers_and_into_outputs(self) -> None:
        make, indices = self.tensordict.TensorDict, torch.tensor([2, 1])
        source = make({"a": torch.rand(4), "b": make({"c": torch.arange(4)}, [4])}, [4])
        ((got, number),) = multigather.gather(indices, (source, source["a"]))
        assert torch.equal(got["b", "c"], indices) and torch.equal(number, source["a"][indices])
        out = make({"a": torch.empty(2), "b": make({"c": torch.zeros(2).long()}, [2])}, [2])
        assert multigather.gather(indices, source, out=(out,))[0] is out
        assert torch.equal(out["a"], source["a"][indices]) and torch.equal(out["b", "c"], indices)
        with pytest.raises(ValueError, match="same structure"):
            multigather.gather(indices, source, out=(make({"a": torch.empty(2)}, [2]),))

    def test_memory_mapped(self, tmp_path: Any) -> None:
        source = self.tensordict.TensorDict({"a": torch.rand(6, 2)}, [6]).memmap(tmp_path)
        (got,) = multigather.gather(torch.tensor([5, 0]), source)
        assert type(got["a"]) is torch.Tensor and not got.is_memmap()
        assert torch.equal(got["a"], source["a"][[5, 0]])

    def test_errors(self) -> None:
        make = self.tensordict.TensorDict
        source = make({"a": make({"b": torch.ones(4)}, [4])}, [4])
        with pytest.raises(IndexError, match=r"bufs\[1\]\['a'\]\['b'\] with 4 rows"):
            multigather.gather(torch.tensor([4]), None, source)
        lazy = self.tensordict.lazy_stack([make({"a": torch.ones(n)}, []) for n in (2, 3)])
        with pytest.raises(TypeError, match=r"bufs\[0\] is a LazyStackedTensorDict.*contiguous"):
            multigather.gather(torch.tensor([0]), lazy)

    def test_compiled(self) -> None:
        source = self.tensordict.TensorDict({"a": torch.rand(4, 2)}, [4])
        compiled = torch.compile(
            lambda indices, td: multigather.gather(indices, td)[0],
            fullgraph=True, backend="eager", dynamic=True,
        )  # fmt: skip
        for count in (2, 3):
            got = compiled(torch.arange(count), source)
            assert got.batch_size == (count,) and torch.equal(got["a"], source["a"][:count])


RECORD = np.dtype([("x", "<i4"), ("y", "<f8"), ("name", "S3")])


def numpy_arrays() -> dict[str, np.ndarray]:
    numbers = np.arange(12.0).reshape(4, 3)
    frozen = numbers.copy()
    frozen.flags.writeable = False
    records = np.zeros(4, RECORD)
    records["x"], records["y"], records["name"] = np.arange(4), np.pi, [b"a", b"bc", b"", b"def"]
    return {
        "float64": numbers,
        "read-only": frozen,
        "big-endian": numbers.astype(">f4"),
        "float16": numbers.astype(np.float16),
        "longdouble": numbers.astype(np.longdouble),
        "bool": numbers > 3,
        "uint16": numbers.astype(np.uint16),
        "complex": numbers + 1j,
        "dates": np.array(["2020-01-01", "2021-01-01", "NaT", "2023-03-03"], "M8[D]"),
        "text": np.array(["a", "bcd", "", "e"]),
        "records": records,
        "field of records": records["y"],
        "records in rows": np.zeros((4, 2), RECORD),
        "columns": numbers[:, ::2],
        "transposed": np.asfortranarray(numbers),
        "expanded": np.broadcast_to(np.float32(3), (4, 2)),
        "rows of nothing": np.zeros((4, 0)),
        "rows of no dates": np.zeros((4, 2, 0), "M8[s]"),
        "memory-mapped": np.frombuffer(bytes(range(32)), np.int64),
    }


@pytest.mark.parametrize(
    "make",
    [
        lambda values: values,
        lambda values: torch.from_numpy(values),
        lambda values: values.astype(">i4"),
        lambda values: np.ascontiguousarray(values[::-1])[::-1] if values.ndim else values,
        lambda values: values.astype(np.int8),
    ],
    ids=["numpy", "torch", "big-endian", "backwards", "int8"],
)
@pytest.mark.parametrize("values", INDICES)
def test_numpy_in_numpy_out(values: Any, make: Any) -> None:
    arrays = numpy_arrays()
    places = np.array(values, np.int64)
    plan = multigather.plan(*arrays.values())
    for results in (
        multigather.gather(make(places), *arrays.values()),
        multigather.gather(make(places), arrays)[0].values(),
        plan(make(places)),
        plan(make(places)),
    ):
        for (name, array), got in zip(arrays.items(), results, strict=True):
            want = array[places.reshape(-1)].reshape(places.shape + array.shape[1:])
            assert type(got) is np.ndarray, name
            assert got.dtype == want.dtype and got.shape == want.shape, name
            assert got.tobytes() == want.tobytes(), name
            assert got.flags.writeable and not np.shares_memory(got, array), name


def test_numpy_memory_is_not_copied_and_lives_as_long_as_the_plan() -> None:
    array = np.zeros((4, 2))
    (leaf,), _ = containers.flatten((array,))
    assert leaf.data_ptr() == array.ctypes.data
    frozen = np.arange(4).astype(">i8")
    frozen.flags.writeable = False
    (leaf,), _ = containers.flatten((frozen,))
    assert leaf.data_ptr() == frozen.ctypes.data
    plan = multigather.plan(array, frozen)
    array[3] = 7
    del frozen
    first, second = plan(np.array([3, 0]))
    assert first.tolist() == [[7, 7], [0, 0]] and second.tolist() == [3, 0]


def test_mixed_kinds_and_outputs() -> None:
    array, tensor = np.arange(4), torch.arange(4)
    first, second, third = multigather.gather(np.array([2]), array, tensor, None)
    assert isinstance(first, np.ndarray) and isinstance(second, torch.Tensor) and third is None
    out = np.empty(2, np.int64), torch.empty(2, dtype=torch.int64)
    for order in (out, out[::-1]):
        results = multigather.gather(torch.tensor([3, 1]), array, tensor, out=order)
        assert results[0] is order[0] and results[1] is order[1]
        assert order[0].tolist() == order[1].tolist() == [3, 1]
    with pytest.raises(ValueError, match="shares memory with bufs"):
        multigather.gather(torch.tensor([3, 1]), array, out=(array[:2],))


def test_arrays_beside_tensors_call_after_call() -> None:
    """Indices, buffers or outputs may be arrays among tensors; the third call is as the first."""
    tensor, array = torch.arange(12.0).view(4, 3), np.arange(8).reshape(4, 2)
    plan = multigather.plan(tensor)
    both = multigather.plan(tensor, array)
    into = np.empty((2, 3), np.float32)
    for turn in range(3):
        rows = np.array([turn, 3])
        want = tensor[torch.from_numpy(rows)]
        for (found,) in (
            multigather.gather(rows, tensor),
            plan(rows),
            multigather.gather(torch.from_numpy(rows), tensor),
        ):
            assert torch.equal(found, want)
        for found, other in (multigather.gather(rows, tensor, array), both(rows)):
            assert torch.equal(found, want)
            assert np.array_equal(other, array[rows])
        for gather in (plan, lambda rows, out: multigather.gather(rows, tensor, out=out)):
            into[:] = -1
            (given,) = gather(rows, out=(into,))
            assert given is into
            assert np.array_equal(into, want.numpy())
    with pytest.raises(IndexError, match="is 4, out of range"):
        plan(np.array([4]))


def test_numpy_errors() -> None:
    def refused(kind: type[Exception], text: str, indices: Any, *bufs: Any, **options: Any) -> None:
        with pytest.raises(kind, match=text):
            multigather.gather(indices, *bufs, **options)

    good, rows = np.arange(4.0), np.array([1])
    refused(ValueError, r"bufs\[1\] has negative strides \(-8,\).*ascontig", rows, good, good[::-1])
    refused(TypeError, r"bufs\[0\]\['k'\] is a masked array", rows, {"k": np.ma.array([1, 2])})
    refused(TypeError, r"bufs\[0\] has NumPy's dtype object", rows, np.array([None, "x"]))
    refused(ValueError, r"bufs\[0\] has no dimensions", rows, np.array(3))
    refused(IndexError, r"indices\[0\] is 9.*bufs\[0\] with 4 rows", np.array([9]), good)
    refused(TypeError, "indices must have an integer dtype.*float64", np.array([1.0]), good)
    refused(TypeError, "mask.nonzero", np.array([True]), good)
    refused(TypeError, "indices is a masked array", np.ma.array([1]), good)
    frozen = np.empty(1)
    frozen.flags.writeable = False
    refused(ValueError, r"out\[0\] is a read-only NumPy array", rows, good, out=(frozen,))
    refused(ValueError, r"out\[0\] has dtype", rows, good, out=(np.empty(1, np.float32),))


class Exporter:
    """An array of a library that has nothing but DLPack."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __dlpack__(self, **options: Any) -> Any:
        return self.tensor.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.tensor.__dlpack_device__()


class Standard(Exporter):
    """An array of a library that follows the array API standard; its functions are the class's."""

    def __array_namespace__(self, **_: Any) -> Any:
        return Standard

    @classmethod
    def from_dlpack(cls, other: Any) -> Standard:
        return cls(torch.from_dlpack(other))


def test_dlpack(device: str) -> None:
    table = torch.arange(12, device=device).view(4, 3)
    indices = torch.tensor([3, 0], device=device)
    first, second = multigather.gather(Exporter(indices), Exporter(table), Standard(table))
    assert isinstance(first, torch.Tensor) and torch.equal(first, table[indices])
    assert type(second) is Standard and torch.equal(second.tensor, table[indices])
    with pytest.raises(TypeError, match=r"out\[0\] is a Exporter, which cannot be written"):
        multigather.gather(indices, table, out=(Exporter(table[:2].clone()),))


def test_array_that_cannot_be_handed_over() -> None:
    class Broken(Exporter):
        def __dlpack__(self, **_: Any) -> Any:
            raise BufferError("on another planet")

    broken = Broken(torch.ones(2))
    with pytest.raises(TypeError, match=r"bufs\[0\] is a Broken.*on another planet"):
        multigather.gather(torch.tensor([0]), broken)
    with pytest.raises(TypeError, match=r"indices is a Broken.*on another planet"):
        multigather.gather(broken, torch.ones(2))


@pytest.mark.gpu
def test_cupy_in_cupy_out() -> None:
    cupy = pytest.importorskip("cupy", reason="cupy is not installed")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    table = cupy.arange(12, dtype=cupy.float32).reshape(4, 3)
    flags = torch.tensor([True, False, True, False], device="cuda")
    places = cupy.array([3, 0, -1])
    for stream in (None, torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            rows, some = multigather.gather(places, table, flags)
        assert isinstance(rows, cupy.ndarray) and isinstance(some, torch.Tensor)
        assert rows.tolist() == table[places].tolist() and some.tolist() == [False, True, False]
    # Work that CuPy has queued before the call is seen by it, and the other way round.
    with cupy.cuda.Stream(non_blocking=True):
        big = cupy.zeros((1 << 22, 8), dtype=cupy.float32)
        for number in range(8):
            big += number
        (rows,) = multigather.gather(cupy.array([5]), big)
        assert float((rows * 2).sum()) == 2 * 8 * 28
    out = cupy.empty((3, 3), dtype=cupy.float32)
    assert multigather.gather(places, table, out=(out,))[0] is out
    torch.cuda.synchronize()
    assert out.tolist() == table[places].tolist()


@pytest.mark.gpu
def test_numpy_indices_with_buffers_on_a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    table = torch.arange(12, device="cuda").view(4, 3)
    (rows,) = multigather.gather(np.array([3, 0]), table)
    assert rows.is_cuda and torch.equal(rows, table[[3, 0]])
