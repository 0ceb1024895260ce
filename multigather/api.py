"""The public functions: check the arguments, find the executable, run it, mirror the arguments."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch.compiler import is_compiling, is_dynamo_compiling

from . import containers, dispatch, faults
from .autograd import Gather, detached, dispatch_modes
from .bounds import as_int64, resolve
from .cache import store
from .executable import Executable
from .nvtx import ranged
from .operator import gather_operator
from .outputs import check_outputs, mark_written
from .pinned import announce_reads
from .request import BOUNDS, INDEX_DTYPES, Request, field_of
from .shortcut import OutShortcut, Shortcut, guard

BACKEND_NAMES = tuple(backend.name for backend in dispatch.BACKENDS)

# Executables by the layout they are for. A program has a few; a bound keeps one that makes up
# shapes from growing without end.
KEPT_EXECUTABLES = 1024
_executables: dict[tuple[Any, ...], Executable] = {}
# By the first buffer's id and the options that are not the default ones.
_shortcuts: dict[Any, Shortcut] = {}
# By the first buffer's and the first output's id; None where these came only once.
_out_shortcuts: dict[tuple[int, int, str, str | None], OutShortcut | None] = {}


@ranged("multigather.gather")
def gather(
    indices: torch.Tensor,
    *bufs: Any,
    out: Sequence[Any] | None = None,
    bounds: str = "raise",
    backend: str | None = None,
) -> tuple[Any, ...]:
    """Gather the same rows of many buffers: ``tuple(buf[indices] for buf in bufs)``, bit for bit.

    Args:
        indices: row numbers, any integer dtype, any shape and stride. uint8 is an index, never a
            mask. On the buffers' device, or on the CPU (then copied once). Or an array of NumPy,
            of CuPy, or of another library that exports DLPack (not inside torch.compile).
        *bufs: tensors of at least one dimension, shape ``[rows, ...]``, each with its own row
            count, dtype, row shape and strides, all on one device; or None; or arrays as above,
            read in place; or containers of them: dicts, tuples, named tuples, lists, TensorDicts,
            tensorclasses, registered dataclasses and what else torch's pytree knows. Buffers in
            pinned host memory with ``indices`` on a GPU are read in place, and the outputs are on
            the GPU. Or DTensors, all of them placed ``Shard(0)`` or ``Replicate``: each rank then
            gathers its own global ``indices``, and every rank makes the call
            (see `multigather.distributed`).
        out: where to write, in the same structure as ``bufs``: tensors of the outputs' shape,
            dtype and device whose rows are contiguous (the rows may be strided) and which overlap
            no input, or NumPy or CuPy arrays like that. None makes new tensors.
        bounds: what an index outside the buffer means. "raise": `IndexError`; negative indices
            count from the end. "fill": a row of zero bytes, also for every negative index.
            "clip": the nearest valid row, 0 for every negative index. "unchecked": the caller
            promises ``0 <= index < rows``.
        backend: "cupy", "triton", "native" or "torch" to insist on one; None lets the dispatcher
            choose.

    Returns:
        A tuple with one item per argument, in the argument's structure. For a tensor a contiguous
        one of shape ``indices.shape + buf.shape[1:]`` and the buffer's dtype; None for None. For an
        array an array of the same library (a tensor, if that has no ``from_dlpack`` or, for NumPy,
        if the output is on a GPU). With ``out`` the items of ``out``.

    Raises:
        TypeError: ``indices`` are no integers, or a buffer is neither a strided tensor nor an array
            of fixed-size elements.
        ValueError: devices do not go together, a buffer has no rows dimension, ``out`` does not
            fit, or an option is unknown.
        IndexError: an index is outside the buffer, in mode "raise": at once for CPU tensors and
            for a buffer without rows. On a GPU the row is zero-filled, the call returns, and the
            error is raised by the next call that can see it, or by `check`.
        UnsupportedError: the named backend cannot run this; the message says why.
    """
    # A third of the time of `is_compiling`, which also knows the graphs that are not made from
    # bytecode: no guard lets their tensors pass, and `gather_checked` asks for them.
    if is_dynamo_compiling():
        return _in_graph(indices, bufs, out, bounds, backend)
    if out is not None and bufs:
        results = _into_known(indices, bufs, out, bounds, backend)
        if results is not None:
            return results
    elif bufs:
        # A program gathers from the same buffers over and over. Another object that has the first
        # one's id by now is no danger: the shortcut's guard looks at the tensors of this call.
        default = backend is None and bounds == "raise"
        try:
            shortcut = _shortcuts.get(id(bufs[0]) if default else (id(bufs[0]), bounds, backend))
        except TypeError:  # an option that cannot even be looked up; refused below
            shortcut = None
        if shortcut is not None:
            results = shortcut.run(indices, bufs)
            if results is None:
                results = shortcut.run_otherwise(indices, bufs)
            if results is not None:
                return results
    results, executable = gather_checked(indices, bufs, out, bounds, backend)
    # Arrays and containers are taken apart for every call anew.
    if executable is not None and only_tensors(indices, *bufs, *(out or ())):
        if out is None:
            _remember(executable, indices, bufs, bounds, backend)
        else:
            key = (id(bufs[0]), id(out[0]), bounds, backend)
            _remember_outputs(executable, indices, bufs, results, key)
    return results


def only_tensors(*items: Any) -> bool:
    """Whether a guard can look at all of these."""
    return all(isinstance(item, torch.Tensor) for item in items)


def _in_graph(
    indices: torch.Tensor, bufs: tuple[Any, ...], out: Any, bounds: str, backend: str | None
) -> tuple[Any, ...]:
    """The gather as one operator of the graph that torch is making."""
    leaves, structure = containers.flatten(bufs)
    tensors = [leaf for leaf in leaves if leaf is not None]
    gathered = gather_operator(indices, tensors, bounds, backend) if tensors else []
    if out is not None:
        outs = _flatten_outputs(out, bufs, leaves, structure)
        for item, result in zip(outs, gathered, strict=True):
            if item.shape != result.shape or item.dtype != result.dtype:
                raise ValueError("out does not have the outputs' shapes and dtypes")
        gathered = [item.copy_(result) for item, result in zip(outs, gathered, strict=True)]
    return mirrored(gathered, leaves, structure, indices.shape)


def gather_checked(
    indices: torch.Tensor,
    bufs: tuple[Any, ...],
    out: Sequence[Any] | None,
    bounds: str,
    backend: str | None,
) -> tuple[tuple[Any, ...], Executable | None]:
    """`gather` with every check made, the long way.

    Returns:
        What `gather` returns; and the executable, if the call was so plain that a guard on the
        layouts of the indices and of the tensors among ``bufs`` is all that another one needs.
    """
    indices = containers.as_indices(indices)
    if is_compiling() or dispatch_modes():
        return _in_graph(indices, bufs, out, bounds, backend), None
    leaves, structure = containers.flatten(bufs)
    tensors = [leaf for leaf in leaves if leaf is not None]
    key = _key(indices, leaves, bounds, backend, structure)
    executable = _executables.get(key) if key is not None else None
    if executable is None:
        if any(map(_is_dtensor, tensors)):
            from .distributed import routing

            return routing.gather(indices, bufs, out, bounds, backend), None
        executable = _make(key, indices, bufs, leaves, tensors, bounds, backend)
    if executable is None:
        if out is not None:
            _flatten_outputs(out, bufs, leaves, structure)
        return mirrored((), leaves, structure, indices.shape), None
    request = executable.request
    if request.device.type == "cuda":
        faults.raise_pending(request.device)
    if request.device.type != "meta":
        _check_memory(tensors, executable.site.labels)
    moved = indices.device != request.device
    if moved:
        # A copy that does not block would still read pinned indices when the caller writes the next
        # ones. Under capture nothing may block, and the copy is a part of the graph.
        capturing = torch.cuda.is_current_stream_capturing()
        if capturing and not indices.is_pinned():
            raise RuntimeError(
                "indices are in pageable host memory, which cannot be copied while a CUDA graph is "
                "being captured; use indices.pin_memory(), or put them on the GPU before"
            )
        indices = indices.to(request.device, non_blocking=capturing)
    shape = indices.shape
    flat = indices.reshape(-1) if indices.dim() != 1 else indices
    if flat.shape[0] and request.bounds != "fill" and executable.has_empty_buffer:
        raise executable.empty_buffer_error(flat.shape[0])
    outs = None
    if out is not None:
        outs = _flatten_outputs(out, bufs, leaves, structure)
        check_outputs(outs, tensors, indices, request, executable.site.labels)

    def run(sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return _run(executable, flat, shape, sources, outs)

    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        if outs is not None:
            raise ValueError(
                "out= cannot be combined with gradients: a buffer requires grad. Leave out= away, "
                "detach the buffers, or call under torch.no_grad()"
            )
        arguments = (run, indices, bounds, backend, *tensors)
        results = list(Gather.apply(*arguments))  # type: ignore[no-untyped-call]
    else:
        results = run(tensors)
        if outs is not None:
            mark_written(tuple(outs))
    if request.host_memory:
        announce_reads(tensors, request.device)
    if request.device.type == "cuda" and faults.synchronous and bounds == "raise":
        _synchronise(request.device)
    plain = not (
        moved
        or faults.synchronous
        or executable.has_empty_buffer
        or any(tensor.is_conj() or tensor.is_neg() for tensor in tensors)
        # What is not looked at again where outputs are known.
        or (outs is not None and request.host_memory)
        or (outs is not None and any(each.requires_grad for each in (*tensors, *outs)))
    )
    # Outputs that the caller brought are given back as they came.
    items = tuple(out) if out is not None else mirrored(results, leaves, structure, shape)
    return items, executable if plain else None


def explain(
    indices: torch.Tensor, *bufs: Any, bounds: str = "raise", backend: str | None = None
) -> dispatch.Explanation:
    """Which backend would run this gather, with which config, from where, and why not the others.

    Takes the arguments of `gather` and gathers nothing.

    Returns:
        An `Explanation`, whose text is meant for reading.

    Raises:
        TypeError, ValueError, UnsupportedError: as `gather` does.
    """
    indices = containers.as_indices(indices)
    leaves, _ = containers.flatten(bufs)
    tensors = [leaf for leaf in leaves if leaf is not None]
    if any(map(_is_dtensor, tensors)):
        from .distributed import routing

        return routing.explain(bufs, bounds, backend)
    executable = _make(None, indices, bufs, leaves, tensors, bounds, backend)
    if executable is None:
        return dispatch.Explanation("    no buffers: nothing to gather", (), {})
    request = executable.request.with_count(indices.numel())
    return dispatch.explain(request, backend, executable.site)


def load_tuning(path: str | os.PathLike[str]) -> int:
    """Use measured winners from a file, before those of every other place.

    Args:
        path: a tuning file, as ``multigather tune`` writes it, or a folder of such files. Read at
            once to see that it is sound, and again when the first gather on a device needs it.

    Returns:
        How many entries there are, for whatever devices.

    Raises:
        FileNotFoundError: nothing is at ``path``.
        ValueError: it is no tuning file, or one of a newer version of multigather.
    """
    entries = store.give(path)
    forget()
    return entries


def forget() -> None:
    """Drop every executable that was made, so that later calls choose anew."""
    store.forget()
    _executables.clear()
    _shortcuts.clear()
    _out_shortcuts.clear()


def _into_known(
    indices: torch.Tensor, bufs: tuple[Any, ...], out: Any, bounds: str, backend: str | None
) -> tuple[torch.Tensor, ...] | None:
    """Gather into outputs that an earlier call has checked; None if there was none."""
    try:
        known = _out_shortcuts[id(bufs[0]), id(out[0]), bounds, backend]
    except (KeyError, IndexError, TypeError):
        return None
    if known is None or not isinstance(out, (tuple, list)):
        return None
    return known.run(indices, bufs, out)


def _remember(
    executable: Executable,
    indices: torch.Tensor,
    bufs: tuple[torch.Tensor, ...],
    bounds: str,
    backend: str | None,
) -> None:
    """Leave a guard behind for the next call like this one."""
    default = backend is None and bounds == "raise"
    key = id(bufs[0]) if default else (id(bufs[0]), bounds, backend)
    # One per executable, whatever the tensors: a program that makes new views for every call finds
    # it here again, and does not pay for a guard and generated code each time.
    shortcut = executable.shortcut
    if shortcut is None or not shortcut.knows(indices, bufs):
        check = guard(indices, detached(bufs))
        if check is None:
            return
        shortcut = executable.shortcut = Shortcut(check, executable)
    if _shortcuts.get(key) is not shortcut:
        if len(_shortcuts) >= KEPT_EXECUTABLES:
            _shortcuts.clear()
        _shortcuts[key] = shortcut
    shortcut.learn(indices, bufs)


def _remember_outputs(
    executable: Executable,
    indices: torch.Tensor,
    bufs: tuple[torch.Tensor, ...],
    outs: Sequence[torch.Tensor],
    key: tuple[int, int, str, str | None],
) -> None:
    """Leave a guard behind for the next call into these outputs, once they have come twice."""
    if len(_out_shortcuts) >= KEPT_EXECUTABLES:
        _out_shortcuts.clear()
    again = key in _out_shortcuts
    _out_shortcuts[key] = OutShortcut(indices, bufs, outs, executable) if again else None


def mirrored(
    results: Sequence[torch.Tensor], leaves: list[Any], structure: Any, shape: torch.Size
) -> tuple[Any, ...]:
    """The results in the structure of the arguments, with None where these have None."""
    remaining = iter(results)
    items = [None if leaf is None else next(remaining) for leaf in leaves]
    return tuple(items) if structure is None else structure.rebuild(items, shape)


def _key(
    indices: torch.Tensor, leaves: list[Any], bounds: str, backend: str | None, structure: Any
) -> tuple[Any, ...] | None:
    """All that an executable depends on; None where a tensor does not tell its layout."""
    try:
        layouts = [
            (
                type(tensor),
                tensor.dtype,
                tensor.shape,
                tensor.stride(),
                tensor.device,
                tensor.data_ptr() & 15,
                tensor.is_conj(),
                tensor.is_neg(),
                indices.is_cuda and tensor.is_cpu and tensor.is_pinned(),
            )
            # The place of a None belongs to it, because it changes the names of later buffers.
            if tensor is not None
            else None
            for tensor in leaves
        ]
        kind = (type(indices), indices.layout, indices.is_nested, indices.dtype, indices.device)
        key = (kind, bounds, backend, structure, *layouts)
        hash(key)
    except (AttributeError, RuntimeError, TypeError):
        return None
    return key


def _make(
    key: tuple[Any, ...] | None,
    indices: torch.Tensor,
    bufs: tuple[Any, ...],
    leaves: list[Any],
    tensors: list[Any],
    bounds: str,
    backend: str | None,
) -> Executable | None:
    """Check everything that ``key`` stands for and make its executable; None without tensors."""
    if not isinstance(indices, torch.Tensor):
        raise TypeError(
            f"indices must be a torch.Tensor of integers, got {type(indices).__name__}; "
            "convert it with torch.as_tensor(indices)"
        )
    if indices.dtype not in INDEX_DTYPES:
        remedy = (
            "use mask.nonzero() for the positions of a mask"
            if indices.dtype == torch.bool
            else ("convert them with indices.to(torch.int64)")
        )
        raise TypeError(f"indices must have an integer dtype, got {indices.dtype}; {remedy}")
    _check_strided(indices, "indices")
    if bounds not in BOUNDS:
        raise ValueError(f"bounds must be one of {', '.join(map(repr, BOUNDS))}, got {bounds!r}")
    if backend is not None and backend not in BACKEND_NAMES:
        raise ValueError(
            f"backend must be None or one of {', '.join(map(repr, BACKEND_NAMES))}, got {backend!r}"
        )
    labels = labels_of(bufs, leaves)
    for tensor, label in zip(tensors, labels, strict=True):
        check_buffer(tensor, label)
    if not tensors:
        return None
    device, host_memory = _devices(indices, tensors, labels)
    request = Request(
        device=device,
        host_memory=host_memory,
        index_dtype=indices.dtype,
        count=0,
        bounds=bounds,
        fields=tuple(field_of(_physical(tensor)) for tensor in tensors),
    )
    executable = Executable(request, backend, labels)
    if key is not None:
        if len(_executables) >= KEPT_EXECUTABLES:
            for oldest in list(_executables)[:1]:  # none if another thread dropped them all
                _executables.pop(oldest, None)
        executable = _executables.setdefault(key, executable)
    return executable


def check_buffer(buffer: Any, label: str) -> None:
    """Refuse what is no buffer.

    Raises:
        TypeError: it is no dense strided tensor.
        ValueError: it has no rows dimension.
    """
    if not isinstance(buffer, torch.Tensor):
        raise TypeError(
            f"{label} must be a torch.Tensor, an array, None or a container of them, "
            f"got {type(buffer).__name__}; {_remedy(buffer)}"
        )
    _check_strided(buffer, label)
    if buffer.dim() == 0:
        raise ValueError(
            f"{label} has no dimensions, so no rows to gather; give it one with .reshape(1)"
        )


def _remedy(item: Any) -> str:
    name = type(item).__name__
    if dataclasses.is_dataclass(item):
        return f"register the dataclass once with torch.export.register_dataclass({name})"
    return "convert it with torch.as_tensor"


def _is_dtensor(tensor: Any) -> bool:
    """Whether it is a DTensor; asked only where no executable is known: they never have one."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def _check_strided(tensor: torch.Tensor, label: str) -> None:
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    if tensor.layout is not torch.strided or tensor.is_nested:
        kind, remedy = f"layout {tensor.layout}", ".to_dense()"
        if tensor.is_nested:
            kind, remedy = "a nested tensor", ".to_padded_tensor(0)"
        raise TypeError(
            f"{label} must be a dense strided tensor, got {kind}; convert it with {remedy}"
        )
    if tensor.is_quantized:
        raise TypeError(
            f"{label} is a quantized tensor ({tensor.dtype}); gather its .int_repr() instead"
        )
    if is_traceable_wrapper_subclass(tensor):
        raise TypeError(
            f"{label} is a {type(tensor).__name__}, which holds other tensors; gather those "
            "(for a DTensor, .to_local())"
        )


def labels_of(bufs: tuple[Any, ...], leaves: list[Any]) -> tuple[str, ...]:
    """The name of each tensor in the call, such as ``bufs[2]`` or ``bufs[0]['obs']``."""
    labels = containers.labels(bufs)
    return tuple(label for label, leaf in zip(labels, leaves, strict=True) if leaf is not None)


def _check_memory(tensors: list[torch.Tensor], labels: tuple[str, ...]) -> None:
    """Refuse tensors without memory, as those are whose storage was freed to be filled again."""
    for tensor, label in zip(tensors, labels, strict=True):
        if not tensor.data_ptr() and tensor.numel():
            raise ValueError(
                f"{label} has no memory: its storage was freed (resized to 0 bytes); gather before "
                "that, or after it was filled again"
            )


def common_device(tensors: Sequence[torch.Tensor], labels: Sequence[str]) -> torch.device:
    """The device of all buffers.

    Raises:
        ValueError: they are on different ones.
    """
    device = tensors[0].device
    for tensor, label in zip(tensors, labels, strict=True):
        if tensor.device != device:
            raise ValueError(
                f"all buffers must be on one device: {labels[0]} is on {device}, {label} is on "
                f"{tensor.device}; move one with .to()"
            )
    return device


def _devices(
    indices: torch.Tensor, tensors: list[torch.Tensor], labels: tuple[str, ...]
) -> tuple[torch.device, bool]:
    """Where the gather runs, and whether the buffers lie in pinned host memory."""
    device = common_device(tensors, labels)
    if indices.device == device:
        return device, False
    if indices.device.type == "cpu" and device.type == "cuda":
        return device, False
    if indices.device.type == "cuda" and device.type == "cpu":
        for tensor, label in zip(tensors, labels, strict=True):
            if tensor.numel() and not tensor.is_pinned():
                raise ValueError(
                    f"{label} is in pageable host memory, which a GPU cannot read, and indices are "
                    f"on {indices.device}; use {label}.pin_memory() once, or indices.cpu()"
                )
        return indices.device, True
    raise ValueError(
        f"indices are on {indices.device} and the buffers on {device}; move the indices with "
        f".to({str(device)!r})"
    )


def _physical(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as it lies in memory, without a lazy conjugate or negative bit; no copy."""
    if tensor.is_conj():
        tensor = tensor.conj()
    if tensor.is_neg():
        tensor = torch._neg_view(tensor)
    return tensor


def _run(
    executable: Executable,
    indices: torch.Tensor,
    shape: torch.Size,
    sources: Sequence[torch.Tensor],
    outs: Sequence[torch.Tensor] | None,
) -> list[torch.Tensor]:
    """Gather the bytes in memory, then apply the lazy bits of the sources to the output rows."""
    if not any(source.is_conj() or source.is_neg() for source in sources):
        return executable(indices, shape, sources, outs)
    results = executable(indices, shape, [_physical(source) for source in sources], outs)
    bounds = executable.request.bounds
    for source, result in zip(sources, results, strict=True):
        if source.is_conj():
            torch.conj_physical(result, out=result)
        if source.is_neg():
            result.neg_()
        if source.is_conj() or source.is_neg():
            # Rows that came from no buffer are zero bytes, not -0.0.
            _, bad = resolve(as_int64(indices), source.shape[0], bounds)
            if bad is not None:
                result.masked_fill_(bad.view((*shape, *[1] * (source.dim() - 1))), 0)
    return results


def _flatten_outputs(
    out: Any, bufs: tuple[Any, ...], leaves: list[Any], structure: Any
) -> list[Any]:
    """The output tensors, after checking that ``out`` has the structure of ``bufs``."""
    outs: list[Any] | None = None
    if isinstance(out, (tuple, list)) and len(out) == len(bufs):
        outs, out_structure = containers.flatten(tuple(out), "out", writable=True)
        if not containers.alike(structure, out_structure, len(bufs)):
            outs = None
    if outs is None:
        raise ValueError(
            f"out must be a tuple with one item per buffer argument ({len(bufs)}), in the same "
            f"structure, got {type(out).__name__}"
            + (f" of length {len(out)}" if isinstance(out, (tuple, list)) else "")
        )
    for number, (leaf, item) in enumerate(zip(leaves, outs, strict=True)):
        if (leaf is None) != (item is None):
            raise ValueError(
                f"out must have None exactly where the buffers have None; leaf {number} differs"
            )
    return [item for item in outs if item is not None]


def _synchronise(device: torch.device) -> None:
    if not torch.cuda.is_current_stream_capturing():
        torch.cuda.current_stream(device).synchronize()
        faults.raise_all(device)
