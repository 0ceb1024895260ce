"""Arguments that are more than tensors: containers, TensorDicts, and arrays of other libraries.

`flatten` takes a call's buffers apart into tensors, and the `Structure` that it returns puts the
results together again in the same form. NumPy, CuPy and tensordict are looked at only if the
program has imported them; nothing here imports them.
"""

from __future__ import annotations

import collections
import operator
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch.utils import _pytree as pytree

from .memory import as_bytes


class Node(Protocol):
    """How one argument, or one leaf of a container, was taken apart into leaves."""

    @property
    def names(self) -> tuple[Any, ...] | None:
        """What tells its leaves apart: None for a single leaf; else a tuple.

        It has each leaf's key, or a key and its entry's names. Strings only, because executables
        are found by it.
        """

    def rebuild(self, items: Iterator[Any], shape: torch.Size, dims: int) -> Any:
        """Take this node's results from ``items`` and put them together.

        Args:
            items: the results of all leaves from this node's first one on.
            shape: of the indices.
            dims: how many dimensions of a buffer these stand for.
        """


class Leaf:
    """A tensor, or None."""

    names = None

    def rebuild(self, items: Iterator[Any], shape: torch.Size, dims: int) -> Any:
        """See `Node`."""
        return next(items)


class NumpyArray:
    """A NumPy array, which comes back as one.

    Args:
        dtype: None where the leaf has it; else each element is gathered as its bytes, in one more
            dimension, and comes back as this.
    """

    names = None

    def __init__(self, dtype: Any = None) -> None:
        self.dtype = dtype

    def rebuild(self, items: Iterator[Any], shape: torch.Size, dims: int) -> Any:
        """See `Node`."""
        item = next(items)
        if item.device.type != "cpu":
            return item
        array = item.numpy()
        return array if self.dtype is None else array.view(self.dtype)[..., 0]


class DlpackArray:
    """An array of another library, exchanged through DLPack.

    Args:
        namespace: the library's functions, from the array API standard; None where it has none,
            then the result stays a tensor.
    """

    names = None

    def __init__(self, namespace: Any) -> None:
        self.namespace = namespace

    def rebuild(self, items: Iterator[Any], shape: torch.Size, dims: int) -> Any:
        """See `Node`."""
        item = next(items)
        return item if self.namespace is None else self.namespace.from_dlpack(item)


class TensorDictNode:
    """A TensorDict.

    Args:
        source: the TensorDict itself, of which only batch size, names and device are used.
        keys: of its entries.
        entries: the node of each.
        names: see `Node`.
    """

    # No dataclass: replay buffers make one for each batch, and a frozen one takes thrice the time.
    __slots__ = ("entries", "keys", "names", "source")

    def __init__(
        self, source: Any, keys: list[str], entries: list[Node], names: tuple[Any, ...]
    ) -> None:
        self.source = source
        self.keys = keys
        self.entries = entries
        self.names = names

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
                # As tensordict has it, all dimensions of the indices take the name of the first
                # one that they stand for.
                names = [names[0]] * len(shape) + names[dims:]
                if names.count(None) == len(names):
                    names = None
        device = source.device
        found = None
        values = {}
        for key, entry in zip(self.keys, self.entries, strict=True):
            if entry is LEAF:
                values[key] = value = next(items)
                found = value
            else:
                values[key] = value = entry.rebuild(items, shape, dims)
                if entry.names and value.device is not None:
                    found = value
        if device is not None and found is not None:
            # Rows of buffers in pinned host memory may be on a GPU.
            device = found.device
        from tensordict import TensorDict

        # What tensordict itself makes rows with; the values need no check, which is half the time
        # of a small gather.
        make = getattr(TensorDict, "_new_unsafe", TensorDict)
        return make(values, batch_size=batch_size, names=names, device=device)


class TensorclassNode:
    """A tensorclass around a TensorDict, such as tensordict's own for data that is no tensor.

    Args:
        source: the tensorclass itself, of which the fields that are in no TensorDict are used.
        inner: the node of its TensorDict.
    """

    __slots__ = ("inner", "names", "source")

    def __init__(self, source: Any, inner: Node) -> None:
        self.source = source
        self.inner = inner
        self.names = inner.names

    def rebuild(self, items: Iterator[Any], shape: torch.Size, dims: int) -> Any:
        """See `Node`."""
        rows = self.inner.rebuild(items, shape, dims)
        return type(self.source).from_tensordict(rows, dict(self.source._non_tensordict))


class Shared:
    """A tensor of a TensorDict that all its rows share; it comes back as it is.

    Args:
        value: an UnbatchedTensor.
        parent: the TensorDict that it is in.
    """

    names = ()

    def __init__(self, value: Any, parent: Any) -> None:
        self.value = value
        self.parent = parent

    def rebuild(self, items: Iterator[Any], shape: torch.Size, dims: int) -> Any:
        """See `Node`."""
        value, batch_size = self.value.copy(), self.parent.batch_size
        value.batch_size = (*shape, *batch_size[dims:]) if batch_size else batch_size
        return value


class ByTensordict:
    """What tensordict itself must index, because its rows lie in no tensor.

    A stack of objects or of TensorDicts of several shapes, for example. The numbers of its rows are
    gathered in its place, so that bad indices are found and resolved as everywhere. They count from
    1: a row of zeros stands for none.

    Args:
        value: what to index.
        place: its name.
    """

    names = None

    def __init__(self, value: Any, place: _Place) -> None:
        self.value = value
        self.place = place

    def rebuild(self, items: Iterator[Any], shape: torch.Size, dims: int) -> Any:
        """See `Node`."""
        value = self.value
        rows = next(items) - 1
        if rows.numel():
            if rows.min().item() < 0:
                raise IndexError(
                    f"an index is out of range for {self.place}, a {type(value).__name__}, which "
                    "has no row of zeros to give instead; use bounds='clip'"
                )
            return value[rows]
        # tensordict has no stack of nothing: a batch like the first item, without rows.
        return _no_rows(value[0], shape, self.place) if _is_stack(value) else value[rows]


def _is_stack(value: Any) -> bool:
    """Whether the first dimension of something of tensordict's is a Python list."""
    return getattr(value, "stack_dim", None) == 0


def _no_rows(item: Any, shape: torch.Size, place: _Place) -> Any:
    """A batch of no items like this one; ``shape`` has a zero."""
    import tensordict

    if _is_stack(item):
        return _no_rows(item[0], torch.Size((*shape, len(item))), place)
    if tensordict.is_non_tensor(item) and tensordict.is_tensorclass(item):
        rows = tensordict.TensorDict({}, batch_size=(*shape, *item.batch_size))
        return type(item).from_tensordict(rows, dict(item._non_tensordict))
    leaves: list[Any] = []
    node = _tensordict(item.unsqueeze(0), leaves, place, writable=False)
    items = [
        torch.empty(shape, dtype=torch.int64, device="cpu")
        if isinstance(leaf, RowNumbers)
        else leaf.new_empty((*shape, *leaf.shape[1:]))
        for leaf in leaves
    ]
    return node.rebuild(iter(items), shape, 1)


class RowNumbers:
    """Stands among the leaves until it is known where these are."""

    def __init__(self, count: int) -> None:
        self.count = count

    def beside(self, leaves: Sequence[Any]) -> torch.Tensor:
        """A tensor of them where the first tensor among ``leaves`` is."""
        first = next((leaf for leaf in leaves if isinstance(leaf, torch.Tensor)), None)
        device = torch.device("cpu") if first is None else first.device
        numbers = torch.arange(1, self.count + 1, dtype=torch.int64, device=device)
        pinned = first is not None and first.is_cpu and first.is_pinned()
        return numbers.pin_memory() if pinned else numbers


LEAF = Leaf()


class Structure:
    """What a call's buffers were before they were taken apart.

    It holds the caller's objects, so nothing that outlives a call or a plan may hold it.

    Args:
        bufs: the arguments of the call.
        name: what errors call them.
        spec: the containers that torch's pytree knows; None if there are none.
        nodes: what stands in them.
        elements: of each leaf that is bytes of another dtype's elements, by its number, the dtype.
    """

    __slots__ = ("_bufs", "_name", "elements", "nodes", "spec")

    def __init__(
        self,
        bufs: tuple[Any, ...],
        name: str,
        spec: Any,
        nodes: tuple[Node, ...],
        elements: dict[int, Any],
    ) -> None:
        self._bufs = bufs
        self._name = name
        self.spec = spec
        self.nodes = nodes
        self.elements = elements

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

    def labels(self) -> list[str]:
        """The name of each leaf, such as ``bufs[2]`` or ``bufs[0]['obs']``."""
        paths, _ = pytree.tree_flatten_with_path(self._bufs, is_leaf=is_tensordict)
        return [
            label
            for node, (path, _) in zip(self.nodes, paths, strict=True)
            for label in _labels(f"{self._name}{pytree.keystr(path)}", node.names)
        ]

    def key(self) -> tuple[Any, ...]:
        """What two structures with the same labels have alike; keeps no object of the caller's."""
        nodes = tuple([node.names for node in self.nodes])
        try:
            return (None if self.spec is None else _spec_key(self.spec)), nodes
        except TypeError:
            return tuple(self.labels())


def _labels(label: str, names: tuple[Any, ...] | None) -> Iterator[str]:
    if names is None:
        yield label
        return
    for name in names:
        if isinstance(name, tuple):
            yield from _labels(f"{label}[{name[0]!r}]", name[1])
        else:
            yield f"{label}[{name!r}]"


def _spec_key(spec: Any) -> Any:
    """The containers of a spec as classes, strings and numbers.

    Raises:
        TypeError: something else is in it, whose name only its container knows.
    """
    kind = spec.type
    if kind is None:
        return None
    children = tuple([_spec_key(child) for child in spec.children()])
    if kind is tuple or kind is list:
        return children
    context = spec.context
    if kind is collections.namedtuple:
        context = context._fields
    elif kind is collections.defaultdict:
        context = context[1]
    return kind, _plain(context), children


def _plain(value: Any) -> Any:
    kind = type(value)
    if value is None or kind is str or kind is int:
        return value
    if kind is list or kind is tuple:
        return tuple([_plain(each) for each in value])
    raise TypeError("not plain")


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
    elements = {}
    for number, item in enumerate(items):
        if item is None or isinstance(item, torch.Tensor):
            leaves.append(item)
            nodes.append(LEAF)
            continue
        node = _take_apart(item, leaves, _Place(bufs, number, name), writable)
        nodes.append(node)
        if type(node) is NumpyArray and node.dtype is not None:
            elements[len(leaves) - 1] = node.dtype
    for number, leaf in enumerate(leaves):
        if type(leaf) is RowNumbers:
            leaves[number] = leaf.beside(leaves)
    return leaves, Structure(bufs, name, spec, tuple(nodes), elements)


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
        if self.structure is None:
            names = [f"bufs[{number}]" for number in range(len(self.leaves))]
        else:
            names = self.structure.labels()
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
        if isinstance(node, TensorclassNode):
            return type(node.source), form(node.inner)
        if isinstance(node, TensorDictNode):
            return node.keys, list(map(form, node.entries))
        return type(node) if isinstance(node, (Shared, ByTensordict)) else None

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


def as_written(
    structure: Structure | None,
    out_structure: Structure | None,
    leaves: Sequence[Any],
    outs: Sequence[Any],
) -> list[Any]:
    """Leaves of outputs as those of the buffers are: bytes where these are bytes.

    Raises:
        ValueError: the elements of an output are none of its buffer's. Their bytes may well fit.
    """
    wanted = {} if structure is None else structure.elements
    given = {} if out_structure is None else out_structure.elements
    written = list(outs)
    for number in sorted({*wanted, *given}):
        leaf, item = leaves[number], outs[number]
        if not isinstance(leaf, torch.Tensor) or not isinstance(item, torch.Tensor):
            continue
        want, have = wanted.get(number, leaf.dtype), given.get(number, item.dtype)
        if number in wanted and number in given:
            same = want == have
        else:
            same = _torch_dtype(want) is _torch_dtype(have)
        label = f"bufs[{number}]" if structure is None else structure.labels()[number]
        name = f"out[{number}]" if out_structure is None else out_structure.labels()[number]
        if not same:
            raise ValueError(
                f"{name} has dtype {have}, {label} has {want}; pass an array of that dtype"
            )
        if number not in given:
            written[number] = as_bytes(item)
        elif number not in wanted:
            raise ValueError(
                f"{name} has strides that are no multiple of its elements' size; pass a contiguous "
                "array"
            )
    return written


def _torch_dtype(dtype: Any) -> Any:
    """Torch's dtype of the same elements as NumPy's; that one itself where torch has none."""
    if isinstance(dtype, torch.dtype):
        return dtype
    import numpy

    try:
        return torch.from_numpy(numpy.empty(0, dtype)).dtype
    except (TypeError, ValueError):
        return dtype


def check_shareable(structure: Structure | None) -> None:
    """Refuse what only the rank itself can index.

    Raises:
        TypeError: names it.
    """

    def check(node: Node) -> None:
        if isinstance(node, ByTensordict):
            raise TypeError(
                f"{node.place} is a {type(node.value).__name__}, whose rows no other rank can get; "
                "pass the TensorDict without it (.exclude)"
            )
        if isinstance(node, TensorclassNode):
            check(node.inner)
        if isinstance(node, TensorDictNode):
            for entry in node.entries:
                check(entry)

    for node in () if structure is None else structure.nodes:
        check(node)


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
        TypeError: they are no integers, a masked array, or their library does not hand them out.
    """
    if isinstance(indices, torch.Tensor):
        return indices
    if _is_numpy(indices):
        return _numpy_indices(indices)
    if hasattr(indices, "__dlpack__"):
        return _from_dlpack(indices, _Place((indices,), 0, "indices"))
    return indices


def _numpy_indices(indices: Any) -> torch.Tensor:
    import numpy

    _refuse_mask(indices, "indices")
    dtype = indices.dtype
    if dtype.kind not in "iu":
        remedy = "convert them with indices.astype(numpy.int64)"
        if dtype.kind == "b":
            remedy = "use mask.nonzero()[0] for the positions of a mask"
        elif dtype.names:
            remedy = f"pass one of the fields, such as indices[{dtype.names[0]!r}]"
        raise TypeError(f"indices must have an integer dtype, got NumPy's {dtype}; {remedy}")
    array = _standard(numpy.asarray(indices))
    if not (
        dtype.isnative
        and array.flags.aligned
        and all(step >= 0 and step % dtype.itemsize == 0 for step in array.strides)
    ):
        array = _standard(array.astype(dtype.newbyteorder("="), order="C"))
    return torch.from_numpy(_unfrozen(array))


class _Place:
    """Name of an item among the arguments, made only if there is an error to be reported."""

    def __init__(
        self, bufs: tuple[Any, ...], number: int, name: str, keys: tuple[str, ...] = ()
    ) -> None:
        self._arguments = bufs, number, name, keys

    def inside(self, key: str) -> _Place:
        """The place of a TensorDict's entry."""
        bufs, number, name, keys = self._arguments
        return _Place(bufs, number, name, (*keys, key))

    def __str__(self) -> str:
        bufs, number, name, keys = self._arguments
        if name == "indices":
            return name
        paths, _ = pytree.tree_flatten_with_path(bufs, is_leaf=is_tensordict)
        return f"{name}{pytree.keystr(paths[number][0])}" + "".join(f"[{key!r}]" for key in keys)


def _take_apart(item: Any, leaves: list[Any], place: _Place, writable: bool) -> Node:
    """The node of something that is neither None nor a tensor; its leaves are added to others."""
    if is_tensordict(item):
        return _tensordict(item, leaves, place, writable)
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


def _tensordict(source: Any, leaves: list[Any], place: _Place, writable: bool) -> Node:
    """The node of a TensorDict, a tensorclass or something else of tensordict's."""
    import tensordict

    kind = type(source)
    if kind is not tensordict.TensorDict and kind is not tensordict.TensorDictParams:
        if tensordict.is_tensorclass(source):
            return TensorclassNode(source, _tensordict(source._tensordict, leaves, place, writable))
        return _by_tensordict(source, leaves, place, writable)
    keys: list[str] = []
    entries: list[Node] = []
    names: list[Any] = []
    for key, value in source.items():
        keys.append(key)
        if type(value) is tensordict.UnbatchedTensor:
            entries.append(Shared(value, source))
            continue
        if isinstance(value, torch.Tensor):
            # A memory-mapped tensor is a plain tensor in other people's memory.
            if type(value) is tensordict.MemoryMappedTensor:
                value = value.as_subclass(torch.Tensor)
            leaves.append(value)
            entries.append(LEAF)
            names.append(_exact(key))
            continue
        node = _tensordict(value, leaves, place.inside(key), writable)
        entries.append(node)
        if node.names is None:
            names.append(_exact(key))
        elif node.names:
            names.append((_exact(key), node.names))
    return TensorDictNode(source, keys, entries, tuple(names))


def _exact(key: str) -> str:
    """A key as a plain string; tensordict lets it be of a subclass."""
    return key if type(key) is str else str.__str__(key)


def _by_tensordict(source: Any, leaves: list[Any], place: _Place, writable: bool) -> Node:
    batch_size = source.batch_size
    if not batch_size:
        raise ValueError(
            f"{place} is a {type(source).__name__} without batch dimensions, so it has no rows; "
            "make its tensors buffers with .to_tensordict()"
        )
    if writable:
        raise TypeError(
            f"{place} is a {type(source).__name__}, which cannot be written in place; leave out= "
            "away"
        )
    leaves.append(RowNumbers(batch_size[0]))
    return ByTensordict(source, place)


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
    return numpy is not None and isinstance(item, (numpy.ndarray, numpy.generic))


def _refuse_mask(array: Any, place: Any) -> None:
    import numpy

    if isinstance(array, numpy.ma.MaskedArray):
        raise TypeError(f"{place} is a masked array; gather its .data and its .mask")


def _standard(array: Any) -> Any:
    """The same array under the code that torch knows its dtype by: C has two types of 8 bytes."""
    return array.view("u8") if array.dtype.char == "Q" and array.dtype.isnative else array


def _unfrozen(array: Any) -> Any:
    """The same memory as an array that can be written: torch warns of others."""
    import numpy

    if array.flags.writeable:
        return array
    address, _ = array.__array_interface__["data"]
    return numpy.asarray(_Alias(array, data=(address, False))).view(array.dtype)


def _numpy(array: Any, leaves: list[Any], place: _Place, writable: bool) -> Node:
    """The node of a NumPy array; the leaf is a tensor of the same memory."""
    import numpy

    _refuse_mask(array, place)
    array = _standard(numpy.asarray(array))
    if array.dtype.hasobject or not array.dtype.itemsize:
        raise TypeError(
            f"{place} has NumPy's dtype {array.dtype}, whose elements cannot be copied as bytes"
        )
    if any(step < 0 for step in array.strides):
        raise ValueError(
            f"{place} has negative strides {array.strides}, which a torch.Tensor cannot have; pass "
            "numpy.ascontiguousarray(...) of it"
        )
    if writable and not array.flags.writeable:
        raise ValueError(f"{place} is a read-only NumPy array; pass one that can be written")
    array = _unfrozen(array)
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
