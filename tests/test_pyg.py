"""PyG's loaders get the same batches from our feature store, in one gather for each node type."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip(
    "torch_geometric", reason="torch_geometric is not installed (pip install torch_geometric)"
)

from scripts import load
from torch_geometric.data import Data, HeteroData, TensorAttr
from torch_geometric.datasets import KarateClub
from torch_geometric.loader.utils import filter_custom_hetero_store

import multigather
from multigather.integrations import pyg


@pytest.fixture
def gathers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many features each gather had."""
    counts = []

    def counted(indices: Any, *bufs: Any) -> Any:
        counts.append(len(bufs))
        return multigather.gather(indices, *bufs)

    monkeypatch.setattr(pyg, "gather", counted)
    return counts


def papers(device: str = "cpu") -> HeteroData:
    data = HeteroData()
    data["paper"].x = torch.randn(20, 5)
    data["paper"].year = torch.arange(20, dtype=torch.int32)
    data["author"].x = torch.randn(8, 3).to(torch.bfloat16)
    data["author", "writes", "paper"].edge_index = torch.randint(8, (2, 30))
    return data.to(device)


def test_loader_batches_are_equal(gathers: list[int]) -> None:
    example = load("examples/pyg_features.py")
    compared = example.check_equal(KarateClub()[0], [10, 10], 8)
    assert compared >= 5 * 5
    assert len(gathers) == 5 and set(gathers) == {3}  # x, y, train_mask


@pytest.mark.usefixtures("one_thread")
def test_training_on_the_karate_club() -> None:
    """Far better than naming the largest class, which 13 of the 34 members are in."""
    assert load("examples/pyg_features.py").train(KarateClub()[0], 10) > 0.6


def test_timing_compares_first() -> None:
    example = load("examples/pyg_features.py")
    report = example.time_fetch(example.generated(300, 0), "cpu", 8, 1)
    assert set(report["median_us"]) == {
        "fetch, multigather", "fetch, index_select", "fetch, indexing",
        "whole batch, multigather", "whole batch, index_select",
    }  # fmt: skip


def test_hetero_batch(device: str, gathers: list[int]) -> None:
    data = papers(device)
    store = pyg.FeatureStore.from_data(data)
    nodes = {
        "paper": torch.tensor([19, 3, 3], device=device),
        "author": torch.tensor([0, 7], device=device),
    }
    for _ in range(3):
        gathers.clear()
        batch = filter_custom_hetero_store(store, data, nodes, {}, {}, {})
        assert sorted(gathers) == [1, 2]
        for kind, index in nodes.items():
            for name, feature in data[kind].items():
                assert torch.equal(batch[kind][name], feature[index]), (kind, name)


def test_store_of_pyg_s_interface() -> None:
    store = pyg.FeatureStore()
    x = torch.arange(12.0).view(4, 3)
    assert store.put_tensor(x, group_name=None, attr_name="x", index=None)
    numbers = np.arange(4)
    assert store.put_tensor(numbers, group_name="paper", attr_name="n", index=None)
    assert len(store) == 2 and store.get_tensor_size(None, "x") == (4, 3)
    assert [(attr.group_name, attr.attr_name) for attr in store.get_all_tensor_attrs()] == [
        (None, "x"), ("paper", "n"),
    ]  # fmt: skip
    indices = [None, slice(None), slice(1, 3), 2, torch.tensor([3, -1]), torch.tensor(1)]
    indices += [torch.tensor([True, False, True, False]), torch.empty(0, dtype=torch.int64)]
    for index in indices:
        for group, name, feature in ((None, "x", x), ("paper", "n", numbers)):
            got = store.get_tensor(group, name, index)
            want = feature if index is None else feature[index]
            assert type(got) is type(want) or np.isscalar(want)
            assert np.array_equal(np.asarray(got), np.asarray(want))
    converted = store.get_tensor("paper", "n", torch.tensor([3]), convert_type=True)
    assert isinstance(converted, torch.Tensor) and converted.tolist() == [3]
    store.put_tensor(torch.zeros(1, 3), group_name=None, attr_name="x", index=torch.tensor([2]))
    assert not x[2].any() and x[3].all()
    with pytest.raises(IndexError, match="4 rows"):
        store.get_tensor(None, "x", torch.tensor([4]))
    assert store.get_tensor(None, "missing", torch.tensor([0])) is None
    assert store.remove_tensor(None, "x", None) and len(store) == 1


def test_memory_is_shared_and_other_attributes_stay_out() -> None:
    data = Data(x=torch.zeros(4, 2), edge_index=torch.zeros(2, 3, dtype=torch.int64), name="club")
    store = pyg.FeatureStore.from_data(data)
    assert len(store) == 1
    data.x[1] = 5
    attr = TensorAttr(group_name=None, attr_name="x", index=torch.tensor([1]))
    assert store.multi_get_tensor([attr])[0].tolist() == [[5, 5]]


def test_what_was_not_given_is_asked_for() -> None:
    """As PyG's own attributes do, whose kind the store replaces."""
    store = pyg.FeatureStore.from_data(Data(x=torch.zeros(4, 2)))
    (attr,) = store.get_all_tensor_attrs()
    assert isinstance(attr, TensorAttr) and not attr.is_fully_specified()
    assert attr.is_set("group_name") and not attr.is_set("index")
    with pytest.raises(ValueError, match="fully"):
        store.multi_get_tensor([attr])
    attr.index = torch.tensor([1])
    assert attr.is_fully_specified() and len(store.multi_get_tensor([attr])[0]) == 1


@pytest.mark.gpu
def test_pinned_features_with_nodes_on_a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    data = papers()
    for store in data.node_stores:
        for name, feature in store.items():
            store[name] = feature.pin_memory()
    store = pyg.FeatureStore.from_data(data)
    index = torch.tensor([19, 0], device="cuda")
    for name, feature in data["paper"].items():
        got = store.get_tensor("paper", name, index)
        assert got.is_cuda and torch.equal(got.cpu(), feature[[19, 0]])
