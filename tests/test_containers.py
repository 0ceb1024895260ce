"""Containers and other libraries' arrays: what goes in as one comes back as one."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Target

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
        for values in ([1], [[1, 2]], 1, []):
            indices = indices_of(values)
            assert multigather.gather(indices, source)[0].names == source[indices].names

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
        whole = make({"a": torch.ones(4)}, [])
        view = make({"a": torch.ones(2, 4)}, [2])._get_sub_tensordict(0)
        with pytest.raises(ValueError, match=r"bufs\[0\] is a _SubTensorDict.*\.to_tensordict"):
            multigather.gather(torch.tensor([0]), view)
        (got,) = multigather.gather(torch.tensor([0]), view.to_tensordict())
        assert torch.equal(got["a"], whole["a"][[0]])

    def test_compiled(self) -> None:
        source = self.tensordict.TensorDict({"a": torch.rand(4, 2)}, [4])
        compiled = torch.compile(
            lambda indices, td: multigather.gather(indices, td)[0],
            fullgraph=True, backend="eager", dynamic=True,
        )  # fmt: skip
        for count in (2, 3):
            got = compiled(torch.arange(count), source)
            assert got.batch_size == (count,) and torch.equal(got["a"], source["a"][:count])


def tensordict_kinds() -> dict[str, Any]:
    """One of everything that tensordict has, four rows each; empty without tensordict."""
    try:
        import tensordict
    except ImportError:
        return {}
    make, lazy_stack = tensordict.TensorDict, tensordict.lazy_stack
    unbatched, data = tensordict.UnbatchedTensor, tensordict.NonTensorData
    stack = tensordict.NonTensorStack

    @tensordict.tensorclass
    class Sample:
        image: torch.Tensor
        label: Any = None

    class Own(make):  # type: ignore[misc, valid-type]
        pass

    def numbers(*shape: int) -> torch.Tensor:
        return torch.arange(torch.Size(shape).numel()).view(shape)

    def plain(batch: list[int]) -> Any:
        return make({"a": numbers(*batch, 3), "n": make({"b": numbers(*batch)}, batch)}, batch)

    pairs = ["ab", "cd", "ef", "gh"]
    ragged = [make({"a": numbers(n), "n": make({"b": numbers(n)}, [])}, []) for n in (1, 2, 3, 4)]
    kinds = {
        "plain": plain([4]),
        "two dimensions": plain([4, 3]),
        "deeper inside": make({"n": make({"b": numbers(4, 3, 5)}, [4, 3, 5])}, [4, 3]),
        "names": make({"a": numbers(4, 3, 2)}, [4, 3], names=["time", None]),
        "name of the last": make({"a": numbers(4, 3, 2)}, [4, 3], names=[None, "env"]),
        "no entries": make({}, [4]),
        "device": make({"a": numbers(4, 3)}, [4], device="cpu"),
        "locked": plain([4]).lock_(),
        "shared by all rows": make(
            {"a": numbers(4), "u": unbatched(numbers(7)), "n": {"u": unbatched(numbers(2))}}, [4]
        ),
        "shared, two dimensions": make({"a": numbers(4, 3), "u": unbatched(numbers(7))}, [4, 3]),
        "only shared": make({"u": unbatched(numbers(7))}, [4]),
        "text": make({"a": numbers(4), "s": "text"}, [4]),
        "data": make({"a": numbers(4), "s": data({"x": 1}, batch_size=[4, 2])}, [4]),
        "named data": make(
            {"s": data("x", batch_size=[4, 2], names=["t", None])}, [4, 2], names=["t", None]
        ),
        "metadata": make({"a": numbers(4), "s": tensordict.MetaData("x", batch_size=[4])}, [4]),
        "objects": make({"a": numbers(4), "s": stack("p", "q", "r", "s")}, [4]),
        "objects inside": make({"n": make({"s": stack(*"pqrs"), "a": numbers(4)}, [4])}, [4]),
        "rows of objects": make({"s": stack(*(stack(*pair) for pair in pairs))}, [4]),
        "stack": lazy_stack([plain([]) for _ in range(4)]),
        "ragged stack": lazy_stack(ragged),
        "stack of other keys": lazy_stack([make({key: numbers(2)}, []) for key in "aabc"]),
        "stack along columns": lazy_stack([plain([4]) for _ in range(2)], 1),
        "stack inside": make({"a": numbers(4), "l": lazy_stack(ragged)}, [4]),
        "parameters": tensordict.TensorDictParams(make({"w": torch.rand(4, 2)}, [4])),
        "view": plain([8])._get_sub_tensordict(slice(0, 8, 2)),
        "own class": Own({"a": numbers(4, 3)}, [4]),
        "tensorclass": Sample(numbers(4, 2), numbers(4), batch_size=[4]),
        "tensorclass, nothing": Sample(numbers(4, 2), batch_size=[4]),
        "tensorclass, text": Sample(numbers(4, 2), "text", batch_size=[4]),
        "tensorclass, objects": Sample(numbers(4, 2), stack(*"pqrs"), batch_size=[4]),
        "tensorclass, shared": Sample(numbers(4, 2), unbatched(numbers(3)), batch_size=[4]),
        "tensorclass inside": make({"t": Sample(numbers(4, 2), batch_size=[4])}, [4]),
        "tensorclasses, stacked": lazy_stack([Sample(numbers(n)) for n in (1, 2, 3, 4)]),
        "data alone": data("x", batch_size=[4]),
        "objects alone": stack("p", "q", "r", "s"),
    }  # fmt: skip
    return kinds


def assert_same(got: Any, want: Any) -> None:
    """The same class, values, names, sizes and device, all the way down."""
    import tensordict

    assert type(got) is type(want)
    if isinstance(want, torch.Tensor):
        assert got.dtype == want.dtype and got.device == want.device
        assert torch.equal(torch.Tensor(got), torch.Tensor(want))
        assert getattr(got, "batch_size", None) == getattr(want, "batch_size", None)
        return
    assert got.batch_size == want.batch_size and got.names == want.names
    assert got.device == want.device and got.is_locked == want.is_locked
    if isinstance(want, tensordict.NonTensorStack):
        assert got.tolist() == want.tolist()
    elif tensordict.is_tensorclass(want):
        assert got._non_tensordict == want._non_tensordict
        assert_same(got._tensordict, want._tensordict)
    elif isinstance(want, tensordict.LazyStackedTensorDict):
        assert got.stack_dim == want.stack_dim
        for one, other in zip(got.tensordicts, want.tensordicts, strict=True):
            assert_same(one, other)
    else:
        assert sorted(got.keys()) == sorted(want.keys())
        for key, value in want.items():
            assert_same(got._get_str(key, None), value)


TENSORDICT_INDICES = {
    "1-d": torch.tensor([2, 0, -1, 2]),
    "2-d": torch.tensor([[1, 2], [3, 0], [0, 0]]),
    "0-d": torch.tensor(3),
    "int32": torch.tensor([3, -4], dtype=torch.int32),
    "uint8": torch.tensor([3, 1], dtype=torch.uint8),
    "one": torch.tensor([0]),
}


@pytest.mark.skipif(not tensordict_kinds(), reason="tensordict is not installed")
class TestEveryKindOfTensorDict:
    @pytest.mark.filterwarnings("ignore:Stacking UnbatchedTensors")
    @pytest.mark.parametrize("planned", [False, True], ids=["gather", "plan"])
    @pytest.mark.parametrize("form", TENSORDICT_INDICES)
    @pytest.mark.parametrize("kind", tensordict_kinds())
    def test_as_tensordict_indexes_it(self, kind: str, form: str, planned: bool) -> None:
        source, indices = tensordict_kinds()[kind], TENSORDICT_INDICES[form]
        want = source[indices.long()]
        call = multigather.plan(source) if planned else None
        for _ in range(3):
            (got,) = call(indices) if call else multigather.gather(indices, source)
            assert_same(got, want)
        ((inside, rows),) = multigather.gather(indices, [source, torch.arange(4)])
        assert_same(inside, want)
        assert torch.equal(rows, torch.arange(4)[indices.long()])

    @pytest.mark.parametrize("kind", ["shared by all rows", "objects", "stack inside"])
    def test_on_every_backend(self, target: Target, kind: str) -> None:
        source = tensordict_kinds()[kind].to(target.device)
        indices = torch.tensor([2, 0, -1], device=target.device)
        for _ in range(3):
            (got,) = multigather.gather(indices, source, backend=target.backend)
            assert_same(got, source[indices])

    @pytest.mark.parametrize("shape", [(0,), (0, 2), (2, 0)], ids=str)
    @pytest.mark.parametrize("kind", tensordict_kinds())
    def test_no_indices(self, kind: str, shape: tuple[int, ...]) -> None:
        """Of a stack of nothing, which tensordict does not have, the size is right."""
        source, indices = tensordict_kinds()[kind], torch.empty(shape, dtype=torch.int64)
        (got,) = multigather.gather(indices, source)
        assert got.batch_size == (*shape, *source.batch_size[1:])
        if "stack" not in kind and "objects" not in kind:
            assert_same(got, source[indices])

    @pytest.mark.parametrize("kind", tensordict_kinds())
    def test_bad_indices(self, kind: str) -> None:
        source, bad = tensordict_kinds()[kind], torch.tensor([0, 4])
        leaves, _ = containers.flatten((source,))
        if not leaves:
            pytest.skip("nothing in it has rows")
        with pytest.raises(IndexError, match=r"indices\[1\] is 4, out of range for bufs\[0\]"):
            multigather.gather(bad, source)
        with pytest.raises(IndexError, match=r"indices\[1\] is 4, out of range for bufs\[0\]"):
            multigather.plan(source)(bad)
        clipped = multigather.gather(torch.tensor([-9, 4]), source, bounds="clip")[0]
        assert_same(clipped, source[torch.tensor([0, 3])])

    @pytest.mark.parametrize("kind", ["objects", "ragged stack", "view"])
    def test_no_row_of_zeros_of_what_is_no_tensor(self, kind: str) -> None:
        source = tensordict_kinds()[kind]
        with pytest.raises(IndexError, match=r"bufs\[0\].*no row of zeros.*bounds='clip'"):
            multigather.gather(torch.tensor([0, -1]), source, bounds="fill")
        (got,) = multigather.gather(torch.tensor([0, 3]), source, bounds="fill")
        assert_same(got, source[torch.tensor([0, 3])])

    @pytest.mark.parametrize("kind", ["objects", "ragged stack", "stack inside", "view"])
    def test_outputs_that_are_no_tensors_are_refused(self, kind: str) -> None:
        source, indices = tensordict_kinds()[kind], torch.tensor([1, 2])
        with pytest.raises(TypeError, match=r"out\[0\].*cannot be written in place; leave out="):
            multigather.gather(indices, source, out=(source[indices],))

    def test_row_numbers_are_not_written_into_a_tensor(self) -> None:
        out = torch.full((2,), -1)
        with pytest.raises(ValueError, match="same structure"):
            multigather.gather(
                torch.tensor([1, 2]), tensordict_kinds()["objects alone"], out=(out,)
            )
        assert out.tolist() == [-1, -1]

    def test_outputs_with_what_rows_share(self) -> None:
        source, indices = tensordict_kinds()["shared by all rows"], torch.tensor([1, 2])
        out = source[torch.tensor([0, 0])]
        assert multigather.gather(indices, source, out=(out,))[0] is out
        assert_same(out, source[indices])

    def test_without_batch_size_it_is_a_plain_container(self) -> None:
        """Tensordict refuses to index it; its tensors are buffers as those of a dict are."""
        import tensordict

        table, other = torch.rand(4, 2), torch.arange(6)
        source = tensordict.TensorDict({"a": table, "n": {"b": other}, "s": "text"}, [])
        (got,) = multigather.gather(torch.tensor([3, 0]), source)
        assert got.batch_size == () and got["s"] == "text"
        assert torch.equal(got["a"], table[[3, 0]]) and torch.equal(got["n", "b"], other[[3, 0]])

    def test_gradients_of_parameters(self) -> None:
        source = tensordict_kinds()["parameters"]
        multigather.gather(torch.tensor([1, 1]), source)[0]["w"].sum().backward()
        assert source["w"].grad.sum(1).tolist() == [0, 4, 0, 0]

    def test_compiled_with_what_rows_share(self) -> None:
        for kind in ("shared by all rows", "text", "tensorclass, shared"):
            source = tensordict_kinds()[kind]
            compiled = torch.compile(
                lambda indices, td: multigather.gather(indices, td)[0],
                fullgraph=True, backend="eager", dynamic=True,
            )  # fmt: skip
            for indices in (torch.tensor([3, 1]), torch.tensor([0, 2, 2])):
                assert_same(compiled(indices, source), source[indices])

    def test_packed(self) -> None:
        for kind in ("shared by all rows", "objects", "names"):
            source, indices = tensordict_kinds()[kind], torch.tensor([3, 1])
            (packed,) = multigather.pack(source)
            assert_same(multigather.gather(indices, packed)[0], source[indices])

    def test_rows_that_no_other_rank_can_get(self) -> None:
        source = tensordict_kinds()["objects inside"]
        _, structure = containers.flatten((torch.arange(4), source))
        with pytest.raises(
            TypeError, match=r"bufs\[1\]\['n'\]\['s'\] is a NonTensorStack.*\.exclude"
        ):
            containers.check_shareable(structure)
        _, structure = containers.flatten((torch.arange(4), source.exclude(("n", "s"))))
        containers.check_shareable(structure)


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


def test_subclasses_and_odd_addresses_of_buffers(target: Target) -> None:
    if target.device != "cpu":
        pytest.skip("NumPy arrays are on the CPU")
    indices = torch.tensor([2, 0])
    odd = np.frombuffer(b"\0" + np.arange(3.0).tobytes(), np.float64, offset=1)
    records = np.zeros(3, "u1, i8").view(np.recarray)
    records.f1 = [5, 6, 7]
    for source in (odd, records, records.f1, np.arange(6).reshape(3, 2).view(np.matrix)):
        (got,) = multigather.gather(indices, source, backend=target.backend)
        want = np.asarray(source)[indices.numpy()]
        assert type(got) is np.ndarray and got.dtype == want.dtype and got.shape == want.shape
        assert got.tobytes() == want.tobytes()


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


PACKED = np.array([(1, 2, 3), (0, 1, 0), (1, -1, 2)], "u1, i8, u2")
ROWS = np.array([2, 0, -1, 1])
INTEGERS = {
    "packed field": lambda: PACKED["f1"],
    "packed field, aligned size": lambda: PACKED["f2"],
    "field of a record array": lambda: PACKED.view(np.recarray).f1,
    "big-endian": lambda: ROWS.astype(">i8"),
    "big-endian field": lambda: np.array([(7, 1), (8, 3)], "u1, >i4")["f1"],
    "odd address": lambda: np.frombuffer(b"\0" + ROWS.tobytes(), np.int64, offset=1),
    "backwards": lambda: ROWS[::-1],
    "every second, backwards": lambda: ROWS[::-2],
    "every second": lambda: ROWS[::2],
    "column": lambda: np.stack([ROWS, ROWS + 1]).T[:, 0],
    "repeated": lambda: np.broadcast_to(np.int64(3), (2, 2)),
    "frozen": lambda: np.frombuffer(ROWS.tobytes(), np.int64),
    "frozen, big-endian": lambda: np.frombuffer(ROWS.astype(">i8").tobytes(), ">i8"),
    "0-d": lambda: np.array(3),
    "0-d, big-endian": lambda: np.array(3, ">i4"),
    "0-d, packed": lambda: PACKED["f1"][0:1].reshape(()),
    "scalar": lambda: np.int64(3),
    "scalar uint8": lambda: np.uint8(3),
    "empty": lambda: np.empty((0, 2), np.int64),
    "empty packed field": lambda: PACKED["f1"][:0],
    "matrix": lambda: ROWS.view(np.matrix),
    "fortran": lambda: np.asfortranarray(ROWS.reshape(2, 2)),
    **{f"code {code}": lambda code=code: np.array([3, 1], code) for code in "bBhHiIlLqQpP"},
}
NO_INTEGERS = {
    "bool": (np.array([True]), r"dtype, got NumPy's bool; use mask\.nonzero\(\)\[0\]"),
    "scalar bool": (np.bool_(True), r"dtype, got NumPy's bool; use mask\.nonzero"),
    "float": (np.array([1.0]), r"dtype, got NumPy's float64; .*indices\.astype"),
    "scalar float": (np.float32(1), r"dtype, got NumPy's float32; .*indices\.astype"),
    "date": (np.array(["2020"], "M8[ns]"), r"dtype, got NumPy's datetime64\[ns\]; .*astype"),
    "span": (np.array([3], "m8[s]"), r"dtype, got NumPy's timedelta64\[s\]; .*astype"),
    "object": (np.array([1], object), r"dtype, got NumPy's object; .*astype"),
    "text": (np.array(["1"]), r"dtype, got NumPy's <U1; .*astype"),
    "record": (PACKED, r"got NumPy's \[.*'f1'.*; pass one of the fields, such as indices\['f0'\]"),
    "void": (np.zeros(1, "V8"), r"dtype, got NumPy's \|V8; .*astype"),
    "masked": (np.ma.array([1]), "indices is a masked array"),
}


@pytest.mark.filterwarnings("error")
class TestNumpyIndices:
    @pytest.mark.parametrize("form", INTEGERS)
    def test_select_as_in_numpy(self, target: Target, form: str) -> None:
        indices = INTEGERS[form]()
        before = indices.tobytes()
        numbers = np.arange(12.0).reshape(4, 3)
        table = torch.from_numpy(numbers).to(target.device)
        want = numbers[np.asarray(indices).astype(np.int64)]
        plan = multigather.plan(table, backend=target.backend)
        out = torch.empty(want.shape, dtype=torch.float64, device=target.device)
        for _ in range(3):
            for (got,) in (
                multigather.gather(indices, table, backend=target.backend),
                plan(indices),
                plan(indices, out=(out.zero_(),)),
                multigather.gather(indices, table, out=(out.zero_(),), backend=target.backend),
            ):
                assert got.shape == want.shape and np.array_equal(got.cpu().numpy(), want)
        assert indices.tobytes() == before

    @pytest.mark.parametrize("form", NO_INTEGERS)
    def test_others_are_refused(self, form: str) -> None:
        indices, text = NO_INTEGERS[form]
        table = torch.arange(4)
        plan = multigather.plan(table)
        for call in (
            lambda: multigather.gather(indices, table),
            lambda: multigather.gather(indices, table, out=(torch.empty(1).long(),)),
            lambda: plan(indices),
            lambda: multigather.explain(indices, table),
        ):
            with pytest.raises(TypeError, match=text):
                call()

    def test_remedies_work(self) -> None:
        table = torch.arange(4)
        dates = np.array([3, 1]).view("M8[s]")
        for indices, want in (
            (dates.astype(np.int64), [3, 1]),
            (np.array([False, True, True]).nonzero()[0], [1, 2]),
            (np.array(["2"]).astype(np.int64), [2]),
            (PACKED["f0"], [1, 0, 1]),
        ):
            assert multigather.gather(indices, table)[0].tolist() == want

    @pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.bfloat16, torch.complex64])
    def test_dlpack_of_other_kinds(self, dtype: torch.dtype) -> None:
        indices = Exporter(torch.ones(2, dtype=dtype))
        for call in (multigather.plan(torch.arange(4)), lambda i: multigather.gather(i, ROWS)):
            with pytest.raises(TypeError, match=f"integer dtype, got {dtype}; (use|convert)"):
                call(indices)


def elements(dtype: Any, *shape: int) -> np.ndarray:
    """An array whose bytes are all different enough."""
    count = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer(bytes(7 * n % 120 for n in range(count)), dtype).reshape(shape).copy()


# Pairs that NumPy takes for the same, and pairs of one size that it does not.
SAME_DTYPES = [
    (">i4", ">i4"), ("<i4", "=i4"), ("l", "q"), ("Q", "L"), ("M8[ns]", "M8[ns]"),
    ("m8[s]", "m8[s]"), ("S5", "S5"), ("U3", "U3"), ("V6", "V6"), ("g", "g"), ("G", "G"),
    (">c8", ">c8"), (">f2", ">f2"),
    ([("a", "u1"), ("b", "i8")], [("a", "u1"), ("b", "i8")]),
    ([(("title", "a"), "i4")], [(("title", "a"), "i4")]),
]  # fmt: skip
OTHER_DTYPES = [
    (">i4", ">f4"), (">i4", "<i4"), ("<i4", ">i4"), (">i4", "<f4"), ("M8[ns]", "M8[us]"),
    ("M8[ns]", "m8[ns]"), ("M8[ns]", "i8"), ("i8", "M8[ns]"), ("S4", "U1"), ("S5", "V5"),
    ("S5", "S6"), ("g", "V16"), ("g", "c16"), ("c16", "g"), (">i4", "4u1"),
    ([("a", "i4"), ("b", "i4")], [("a", "i4"), ("c", "i4")]),
    ([("a", "i4"), ("b", "i4")], [("b", "i4"), ("a", "i4")]),
    ([("a", "i4"), ("b", "i4")], "i8"),
    ("i8", [("a", "i4"), ("b", "i4")]),
    ([(("title", "a"), "i4")], [(("other", "a"), "i4")]),
    (
        {"names": ["a"], "formats": ["i4"], "offsets": [0], "itemsize": 8},
        {"names": ["a"], "formats": ["i4"], "offsets": [4], "itemsize": 8},
    ),
]  # fmt: skip


@pytest.mark.filterwarnings("error")
class TestNumpyOutputs:
    @staticmethod
    def calls(indices: Any, source: Any, backend: str | None = None) -> list[Any]:
        plan = multigather.plan(source, backend=backend)
        return [
            lambda out: multigather.gather(indices, source, out=(out,), backend=backend),
            lambda out: plan(indices, out=(out,)),
            lambda out: multigather.gather(
                indices, {"k": [source]}, out=({"k": [out]},), backend=backend
            )[0]["k"],
        ]

    @pytest.mark.parametrize("dtypes", SAME_DTYPES, ids=str)
    def test_same_dtype(self, target: Target, dtypes: tuple[Any, Any]) -> None:
        if target.device != "cpu":
            pytest.skip("NumPy arrays are on the CPU")
        source, indices = elements(dtypes[0], 4, 3), np.array([3, 0])
        for call in self.calls(indices, source, target.backend):
            for _ in range(3):
                out = np.zeros((2, 3), dtypes[1])
                (got,) = call(out)
                assert got is out and out.tobytes() == source[indices].tobytes()

    @pytest.mark.parametrize("dtypes", OTHER_DTYPES, ids=str)
    def test_other_dtype(self, dtypes: tuple[Any, Any]) -> None:
        source, indices = elements(dtypes[0], 4), np.array([3, 0])
        for call in self.calls(indices, source):
            for _ in range(3):
                out = np.zeros(2, dtypes[1])
                with pytest.raises(
                    ValueError, match=r"^out\[0\].* has (dtype|shape) .*bufs\[0\]"
                ) as error:
                    call(out)
                if np.dtype(dtypes[1]).subdtype is None:
                    assert str(source.dtype) in str(error.value)
                assert not any(out.tobytes())

    def test_tensors_and_arrays(self) -> None:
        """Bytes of a tensor are no elements of an array's dtype, nor the other way round."""
        indices = torch.tensor([3, 0])
        tensor, array = torch.arange(16, dtype=torch.uint8).view(4, 4), elements(">i4", 4)
        for source, out, have, want in (
            (tensor, np.zeros(2, ">i4"), ">i4", r"torch\.uint8"),
            (array, torch.zeros(2, 4, dtype=torch.uint8), r"torch\.uint8", ">i4"),
            (array, torch.zeros(2, dtype=torch.int32), r"torch\.int32", ">i4"),
            (torch.arange(4, dtype=torch.int32), np.zeros(2, ">i4"), ">i4", r"torch\.int32"),
        ):
            for call in self.calls(indices, source):
                with pytest.raises(ValueError, match=rf"out.* has dtype {have}, bufs.* has {want}"):
                    call(out)
                assert not bool((out != 0).any())

    def test_fields_of_packed_records(self) -> None:
        """No tensor can have their strides, but the elements are torch's."""
        indices, source = np.array([2, 0]), PACKED["f1"]
        for call in self.calls(indices, source):
            for out in (np.zeros(2, np.int64), torch.zeros(2, dtype=torch.int64)):
                call(out)
                assert out.tolist() == [-1, 2]
            with pytest.raises(ValueError, match=r"has dtype torch\.float64, .* has int64"):
                call(torch.zeros(2, dtype=torch.float64))
        records = np.zeros(2, PACKED.dtype)
        for call in self.calls(indices, source):
            call(records["f1"])
            assert records["f1"].tolist() == [-1, 2] and not records["f2"].any()
        for call in self.calls(indices, torch.from_numpy(source.copy())):
            with pytest.raises(ValueError, match=r"no multiple.*pass a contiguous array"):
                call(records["f1"])


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
