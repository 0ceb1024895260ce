"""Arguments that are more than tensors: containers, TensorDicts, and arrays of other libraries.

`flatten` takes a call's buffers apart into tensors, and the `Structure` that it returns puts the
results together again in the same form. NumPy, CuPy and tensordict are looked at only if the
program has imported them; nothing here imports them.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.utils import _pytree as pytree


class Node(Protocol):
    """How one argument, or one leaf of a container, was taken apart into leaves.

    Two nodes are equal if they were taken apart alike: of a TensorDict that means the same keys, of
    an array the same library.
    """

    def rebuild(self, items: Iterator[Any], shape: torch.Size, dims: int) -> Any:
        """Take this node's results from ``items`` and put them together.

        Args:
            items: the results of all leaves from this node's first one on.
            shape: of the indices.
            dims: how many dimensions of a buffer these stand for.
        """

    def labels(self, label: str) -> list[str]:
        """Name of each leaf, where ``label`` is the name of the whole."""


@dataclass(frozen=True)
class Leaf:
    """A tensor, or None."""

    def rebuild(self, items: Iterator[Any], shape: torch.Size, dims: int) -> Any:
        """See `Node`."""
        return next(items)

    def labels(self, label: str) -> list[str]:
        """See `Node`."""
        return [label]


@dataclass(frozen=True)
class NumpyArray:
    """A NumPy array, which comes back as one.

    Attributes:
        dtype: None where torch has it; else each element is gathered as its bytes, in one more
            dimension, and comes back as this.
    """

    dtype: Any = None

    def rebuild(self, items: Iterator[Any], shape: torch.Size, dims: int) -> Any:
        """See `Node`."""
        item = next(items)
        if item.device.type != "cpu":
            return item
        array = item.numpy()
        return array if self.dtype is None else array.view(self.dtype)[..., 0]

    def labels(self, label: str) -> list[str]:
        """See `Node`."""
        return [label]


@dataclass(frozen=True)
class DlpackArray:
    """An array of another library, exchanged through DLPack.

    Attributes:
        namespace: the library's functions, from the array API standard; None where it has none,
            then the result stays a tensor.
    """

    namespace: Any

    def rebuild(self, items: Iterator[Any], shape: torch.Size, dims: int) -> Any:
        """See `Node`."""
        item = next(items)
        return item if self.namespace is None else self.namespace.from_dlpack(item)

    def labels(self, label: str) -> list[str]:
        """See `Node`."""
        return [label]


@dataclass(frozen=True)
class Constant:
    """Data of a TensorDict that is no tensor and the same for all rows."""

    value: Any = field(compare=False)

    def rebuild(self, items: Iterator[Any], shape: torch.Size, dims: int) -> Any:
        """See `Node`."""
        batch_size = (*shape, *self.value.batch_size[dims:])
        return type(self.value)(
            data=self.value.data, batch_size=batch_size, device=self.value.device
        )

    def labels(self, label: str) -> list[str]:
        """See `Node`."""
        return []


class TensorDictNode:
    """A TensorDict or a tensorclass.

    Args:
        source: the TensorDict itself, of which only batch size, names and device are used.
        kind: its type.
        keys: of its entries.
        entries: the node of each.
    """

    # No dataclass: replay buffers make one for each batch, and a frozen one takes thrice the time.
    __slots__ = ("entries", "keys", "kind", "source")

    def __init__(
        self, source: Any, kind: type, keys: tuple[str, ...], entries: tuple[Node, ...]
    ) -> None:
        self.source = source
        self.kind = kind
        self.keys = keys
        self.entries = entries

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TensorDictNode) and (self.kind, self.keys, self.entries) == (
            other.kind, other.keys, other.entries
        )  # fmt: skip

    def __hash__(self) -> int:
        return hash((self.kind, self.keys, self.entries))

    def rebuild(self, items: Iterator[Any], shape: torch.Size, dims: int) -> Any:
        """See `Node`."""
        source = self.source
        batch_size, names = source.batch_size, None
        if batch_size:
            batch_size = torch.Size((*shape, *batch_size[dims:]))
            names = source.names
            if names.count(None) == len(names):
                names = None
            else:
                # A name stands for one dimension.
                same = len(shape) == dims == 1
                names = [names[0] if same else None] * len(shape) + names[dims:]
        values = {
            key: next(items) if entry is LEAF else entry.rebuild(items, shape, dims)
            for key, entry in zip(self.keys, self.entries, strict=True)
        }
        device = source.device
        if device is not None:
            # Rows of buffers in pinned host memory may be on a GPU.
            for value in values.values():
                if value.device is not None:
                    device = value.device
                    break
        from tensordict import TensorDict

        # What tensordict itself makes rows with; the values need no check, which is half the time
        # of a small gather.
        make = getattr(TensorDict, "_new_unsafe", TensorDict)
        result = make(values, batch_size=batch_size, names=names, device=device)
        if self.kind is TensorDict:
            return result
        return self.kind.from_tensordict(result)  # type: ignore[attr-defined]

    def labels(self, label: str) -> list[str]:
        """See `Node`."""
        return [
            each
            for key, entry in zip(self.keys, self.entries, strict=True)
            for each in entry.labels(f"{label}[{key!r}]")
        ]


LEAF = Leaf()


@dataclass(frozen=True)
class Structure:
    """What a call's buffers were before they were taken apart.

    Attributes:
        spec: the containers that torch's pytree knows; None if there are none.
        nodes: what stands in them.
    """

    spec: Any
    nodes: tuple[Node, ...]

    def rebuild(self, items: Sequence[Any], shape: torch.Size, dims: int = 1) -> tuple[Any, ...]:
        """Put results together.

        Args:
            items: one for each leaf; None for None.
            shape: of the indices.
            dims: how many dimensions of a buffer these stand for.
        """
        remaining = iter(items)
        parts = [node.rebuild(remaining, shape, dims) for node in self.nodes]
        if self.spec is None:
            return tuple(parts)
        result: tuple[Any, ...] = pytree.tree_unflatten(parts, self.spec)
        return result


def flatten(
    bufs: tuple[Any, ...], name: str = "bufs", writable: bool = False
) -> tuple[list[Any], Structure | None]:
    """Take buffers apart into leaves: tensors, None, and what can be neither.

    Arrays of other libraries become tensors of the same memory.

    Args:
        bufs: the arguments of a call.
        name: what errors call them.
        writable: whether the leaves will be written.

    Returns:
        The leaves; and their structure, None where every argument is a tensor or None.

    Raises:
        TypeError: an array or a TensorDict has something that no tensor can have.
        ValueError: an array's layout is one that no tensor can have, or it cannot be written.
    """
    if all(buf is None or isinstance(buf, torch.Tensor) for buf in bufs):
        return list(bufs), None
    items: Sequence[Any] = bufs
    spec = None
    if not all(map(_is_whole, bufs)):
        items, spec = pytree.tree_flatten(bufs, is_leaf=is_tensordict)
        if len(items) == len(bufs) and all(map(operator.is_, items, bufs)):
            spec = None
    leaves: list[Any] = []
    nodes: list[Node] = []
    for number, item in enumerate(items):
        if item is None or isinstance(item, torch.Tensor):
            leaves.append(item)
            nodes.append(LEAF)
        else:
            nodes.append(_take_apart(item, leaves, _Place(bufs, number, name), writable))
    return leaves, Structure(spec, tuple(nodes))


class Buffers:
    """The buffers of a call, taken apart.

    Attributes:
        arguments: as the caller gave them.
        leaves: tensors, None, and what can be neither, see `flatten`.
        structure: what puts results together again.
        tensors: the leaves without None.

    Args:
        arguments: of a call.
    """

    __slots__ = ("arguments", "leaves", "structure", "tensors")

    def __init__(self, arguments: tuple[Any, ...]) -> None:
        self.arguments = arguments
        self.leaves, self.structure = flatten(arguments)
        self.tensors = [leaf for leaf in self.leaves if leaf is not None]

    def of(self, tensors: Sequence[torch.Tensor]) -> Buffers:
        """The same arguments with other tensors in the places of theirs."""
        other = object.__new__(Buffers)
        other.arguments, other.structure = self.arguments, self.structure
        remaining = iter(tensors)
        other.leaves = [None if leaf is None else next(remaining) for leaf in self.leaves]
        other.tensors = list(tensors)
        return other

    def labels(self) -> tuple[str, ...]:
        """The name of each tensor in the call, such as ``bufs[2]`` or ``bufs[0]['obs']``."""
        names = labels(self.arguments, self.structure)
        return tuple(
            name for name, leaf in zip(names, self.leaves, strict=True) if leaf is not None
        )

    def mirrored(self, results: Sequence[torch.Tensor], shape: torch.Size) -> tuple[Any, ...]:
        """A result for each tensor in the structure of the arguments, None where these have None.

        Args:
            results: one for each tensor.
            shape: of the indices.
        """
        remaining = iter(results)
        items = [None if leaf is None else next(remaining) for leaf in self.leaves]
        return tuple(items) if self.structure is None else self.structure.rebuild(items, shape)


def alike(one: Structure | None, other: Structure | None, count: int) -> bool:
    """Whether two calls with so many arguments have containers of the same form.

    Which library an array is from does not matter.
    """
    if one is None and other is None:
        return True
    return _form(one, count) == _form(other, count)


def _form(structure: Structure | None, count: int) -> tuple[Any, ...]:
    if structure is None:
        return None, (None,) * count

    def form(node: Node) -> Any:
        if isinstance(node, TensorDictNode):
            return node.kind, node.keys, tuple(map(form, node.entries))
        return Constant if isinstance(node, Constant) else None

    return structure.spec, tuple(map(form, structure.nodes))


def copied(bufs: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments in containers of their own, which their owner cannot change; no data is copied.

    Dicts, lists and what else torch's pytree knows are made anew, TensorDicts copied with their
    tensors shared.
    """
    if all(buf is None or isinstance(buf, torch.Tensor) for buf in bufs):
        return bufs
    result: tuple[Any, ...] = pytree.tree_map(
        lambda item: item.copy() if is_tensordict(item) else item, bufs, is_leaf=is_tensordict
    )
    return result


def labels(bufs: tuple[Any, ...], structure: Structure | None, name: str = "bufs") -> list[str]:
    """The name of each leaf of `flatten`, such as ``bufs[2]`` or ``bufs[0]['obs']``."""
    paths, _ = pytree.tree_flatten_with_path(bufs, is_leaf=is_tensordict)
    names = [f"{name}{pytree.keystr(path)}" for path, _ in paths]
    if structure is None:
        return names
    return [
        label
        for node, each in zip(structure.nodes, names, strict=True)
        for label in node.labels(each)
    ]


def _is_whole(item: Any) -> bool:
    """Whether something certainly is no container that torch's pytree should take apart."""
    return item is None or isinstance(item, torch.Tensor) or is_tensordict(item)


def is_tensordict(item: Any) -> bool:
    """Whether something is a TensorDict or a tensorclass."""
    if item is None or isinstance(item, (torch.Tensor, tuple, list, dict)):
        return False
    # While compiling, torch goes through all of sys.modules where it is read, and fails if another
    # thread imports something then. Nothing else is likely to have a batch size and get here.
    if not hasattr(type(item), "batch_size"):
        return False
    if torch.compiler.is_compiling():
        import tensordict as package
    else:
        package = sys.modules.get("tensordict")
        if package is None:
            return False
    # Half imported by another thread, it may have neither.
    if type(item) is getattr(package, "TensorDict", None):
        return True
    check = getattr(package, "is_tensor_collection", None)
    return check is not None and bool(check(item))


def as_indices(indices: Any) -> Any:
    """Indices of another library as a tensor; anything that is no array, as it is.

    NumPy indices that torch has no layout or byte order for are copied.

    Raises:
        TypeError: they are a masked array, or their library does not hand them out.
    """
    if isinstance(indices, torch.Tensor):
        return indices
    if _is_numpy(indices):
        if indices.dtype.kind not in "iub":
            raise TypeError(f"indices must have an integer dtype, got NumPy's {indices.dtype}")
        native = indices.dtype.newbyteorder("=")
        if indices.dtype != native or any(step < 0 for step in indices.strides):
            indices = indices.astype(native, order="C")
        leaves: list[Any] = []
        _numpy(indices, leaves, _Place((indices,), 0, "indices"), writable=False)
        return leaves[0]
    if hasattr(indices, "__dlpack__"):
        return _from_dlpack(indices, _Place((indices,), 0, "indices"))
    return indices


class _Place:
    """Name of an item among the arguments, made only if there is an error to be reported."""

    def __init__(self, bufs: tuple[Any, ...], number: int, name: str, suffix: str = "") -> None:
        self._arguments = bufs, number, name, suffix

    def inside(self, key: str) -> _Place:
        """The place of a TensorDict's entry."""
        bufs, number, name, suffix = self._arguments
        return _Place(bufs, number, name, f"{suffix}[{key!r}]")

    def __str__(self) -> str:
        bufs, number, name, suffix = self._arguments
        if name == "indices":
            return name
        paths, _ = pytree.tree_flatten_with_path(bufs, is_leaf=is_tensordict)
        return f"{name}{pytree.keystr(paths[number][0])}{suffix}"


def _take_apart(item: Any, leaves: list[Any], place: _Place, writable: bool) -> Node:
    """The node of something that is neither None nor a tensor; its leaves are added to others."""
    if is_tensordict(item):
        return _tensordict(item, leaves, place)
    if _is_numpy(item):
        return _numpy(item, leaves, place, writable)
    if hasattr(item, "__dlpack__"):
        package = type(item).__module__.partition(".")[0]
        # Of the array API standard; an older CuPy has the function all the same.
        namespace = getattr(item, "__array_namespace__", lambda: sys.modules.get(package))()
        # Others, such as JAX's, may be shared with values that must not change.
        if writable and package != "cupy":
            raise TypeError(
                f"{place} is a {type(item).__name__}, which cannot be written in place; pass a "
                "torch.Tensor, or leave out= away"
            )
        leaves.append(_from_dlpack(item, place))
        return DlpackArray(namespace if hasattr(namespace, "from_dlpack") else None)
    leaves.append(item)  # refused where the leaves are checked
    return LEAF


def _tensordict(source: Any, leaves: list[Any], place: _Place) -> Node:
    import tensordict

    kind = type(source)
    if kind is not tensordict.TensorDict and not tensordict.is_tensorclass(source):
        raise TypeError(
            f"{place} is a {kind.__name__}, whose entries are not whole tensors; make it one of "
            "tensors with .contiguous()"
        )
    keys: list[str] = []
    entries: list[Node] = []
    for key, value in source.items():
        keys.append(key)
        if isinstance(value, torch.Tensor):
            # A memory-mapped tensor is a plain tensor in other people's memory.
            if type(value) is tensordict.MemoryMappedTensor:
                value = value.as_subclass(torch.Tensor)
            leaves.append(value)
            entries.append(LEAF)
        elif isinstance(value, tensordict.NonTensorData):
            entries.append(Constant(value))
        else:
            entries.append(_tensordict(value, leaves, place.inside(key)))
    return TensorDictNode(source, kind, tuple(keys), tuple(entries))


class _Alias:
    """The memory of a NumPy array under another description, which keeps the array alive."""

    def __init__(self, array: Any, **changes: Any) -> None:
        self._array = array
        self.__array_interface__ = {**array.__array_interface__, **changes}


def _is_numpy(item: Any) -> bool:
    # So that sys.modules is not read of things that are no array; see `is_tensordict`.
    if not hasattr(type(item), "__array_interface__"):
        return False
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(item, numpy.ndarray)


def _numpy(array: Any, leaves: list[Any], place: _Place, writable: bool) -> Node:
    """The node of a NumPy array; the leaf is a tensor of the same memory."""
    import numpy

    if isinstance(array, numpy.ma.MaskedArray):
        raise TypeError(f"{place} is a masked array; gather its .data and its .mask")
    if array.dtype.hasobject or not array.dtype.itemsize:
        raise TypeError(
            f"{place} has NumPy's dtype {array.dtype}, whose elements cannot be copied as bytes"
        )
    if any(step < 0 for step in array.strides):
        raise ValueError(
            f"{place} has negative strides {array.strides}, which a torch.Tensor cannot have; pass "
            "numpy.ascontiguousarray(...) of it"
        )
    if not array.flags.writeable:
        if writable:
            raise ValueError(f"{place} is a read-only NumPy array; pass one that can be written")
        # torch warns of read-only arrays, which matters only to those who write.
        address, _ = array.__array_interface__["data"]
        array = numpy.asarray(_Alias(array, data=(address, False))).view(array.dtype)
    try:
        leaves.append(torch.from_numpy(array))
        return NumpyArray()
    except (TypeError, ValueError):
        # No such type or byte order in torch, or strides that split an element.
        pass
    as_bytes = _Alias(
        array,
        typestr="|u1",
        descr=[("", "|u1")],
        shape=(*array.shape, array.dtype.itemsize),
        strides=(*array.strides, 1),
    )
    leaves.append(torch.from_numpy(numpy.asarray(as_bytes)))
    return NumpyArray(array.dtype)


def _from_dlpack(array: Any, place: _Place) -> torch.Tensor:
    try:
        tensor: torch.Tensor = torch.utils.dlpack.from_dlpack(array)
        return tensor
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise TypeError(
            f"{place} is a {type(array).__name__} that torch cannot take through DLPack: {error}"
        ) from error
