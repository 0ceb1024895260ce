"""A PyTorch Geometric feature store that fetches all of a batch's features in one gather.

PyG's loaders index one feature after another, or ask a feature store for all features of the
sampled nodes at once. `FeatureStore` answers with one gather per type of node::

    from multigather.integrations.pyg import FeatureStore

    loader = NeighborLoader((FeatureStore.from_data(data), data), num_neighbors=[10, 5], ...)

Needs torch_geometric 2.6 or newer (``pip install 'torch_geometric>=2.6'``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch_geometric import data as pyg

from .. import containers
from ..api import gather
from ..request import INDEX_DTYPES

__all__ = ["FeatureStore"]

_UNSET: Any = pyg.TensorAttr.index  # what PyG sets a field to that was not given


@dataclass
class TensorAttr(pyg.TensorAttr):  # type: ignore[misc]
    """PyG's, that asks whether a field is unset by identity.

    PyG compares with ``!=``, for which torch takes 14 microseconds to find that a tensor of
    indices equals no enumeration, once per feature and batch.
    """

    def is_set(self, key: str) -> bool:
        """Whether a field was given."""
        return getattr(self, key) is not _UNSET


class FeatureStore(pyg.FeatureStore):  # type: ignore[misc]
    """Node features in memory, by group (type of node; None in a homogeneous graph) and name.

    Features are tensors or NumPy arrays of shape ``[nodes, ...]``, any dtype. On a GPU, in memory
    of the host, or in pinned memory of the host: with sampled nodes on a GPU, rows of pinned
    features are read over the bus and are on the GPU.
    """

    def __init__(self) -> None:
        super().__init__(TensorAttr)
        # The base class makes attributes of its own in an unusual way; this is like PyG's stores.
        self.__dict__["_features"] = {}

    @classmethod
    def from_data(cls, data: Any) -> FeatureStore:
        """A store of the node features of a ``Data`` or ``HeteroData``, in the same memory.

        Features that are no tensors stay out.
        """
        store = cls()
        for attr in data.get_all_tensor_attrs():
            # A homogeneous graph has no groups, and PyG's `Data` leaves them unset.
            group = attr.group_name if attr.is_set("group_name") else None
            holder = data if group is None else data[group]
            tensor = holder[attr.attr_name]
            if isinstance(tensor, torch.Tensor):
                store.put_tensor(tensor, group_name=group, attr_name=attr.attr_name, index=None)
        return store

    def _put_tensor(self, tensor: Any, attr: Any) -> bool:
        key = attr.group_name, attr.attr_name
        if _is_whole(attr.index):
            self._features[key] = tensor
            return True
        if key not in self._features:
            return False
        self._features[key][attr.index] = tensor
        return True

    def _get_tensor(self, attr: Any) -> Any:
        return self._multi_get_tensor([attr])[0]

    def _multi_get_tensor(self, attrs: Sequence[Any]) -> list[Any]:
        """Rows of every feature asked for; one gather for those with the same index.

        Raises:
            IndexError: a node is outside a feature's rows.
        """
        results: list[Any] = [None] * len(attrs)
        together: dict[int, list[int]] = {}
        for number, attr in enumerate(attrs):
            feature = self._features.get((attr.group_name, attr.attr_name))
            if feature is None:
                continue
            index = attr.index
            if _is_rows(index):
                together.setdefault(id(index), []).append(number)
            elif not _is_whole(index):  # a slice, one node, or a mask
                feature = feature[index]
            results[number] = feature
        for numbers in together.values():
            rows = gather(
                containers.as_indices(attrs[numbers[0]].index),
                *(results[number] for number in numbers),
            )
            for number, each in zip(numbers, rows, strict=True):
                results[number] = each
        return results

    def _remove_tensor(self, attr: Any) -> bool:
        return self._features.pop((attr.group_name, attr.attr_name), None) is not None

    def _get_tensor_size(self, attr: Any) -> tuple[int, ...] | None:
        feature = self._features.get((attr.group_name, attr.attr_name))
        return None if feature is None else tuple(feature.shape)

    def get_all_tensor_attrs(self) -> list[Any]:
        """Every feature's group and name, the index not set."""
        return [
            self._tensor_attr_cls(group_name=group, attr_name=name)
            for group, name in self._features
        ]

    def __len__(self) -> int:
        return len(self._features)


def _is_whole(index: Any) -> bool:
    return index is None or (isinstance(index, slice) and index == slice(None))


def _is_rows(index: Any) -> bool:
    """Whether an index is row numbers; torch and PyG take uint8 for a mask."""
    if isinstance(index, torch.Tensor):
        return index.dtype in INDEX_DTYPES and index.dtype != torch.uint8
    return hasattr(index, "__array_interface__") and index.dtype.kind in "iu" and index.ndim > 0
