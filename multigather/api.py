"""The public functions: check the arguments, find the executable, run it, mirror the arguments."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.compiler import is_compiling, is_dynamo_compiling

from . import containers, dispatch, faults
from .autograd import (
    Gather,
    detached,
    dispatch_modes,
    forward_mode,
    has_tangent,
    is_wrapped,
    loadable,
    transforming,
)
from .bounds import as_int64, index_rows, resolve
from .cache import store
from .containers import Buffers
from .executable import Executable
from .memory import aligned, as_bytes, check_memory
from .nvtx import ranged
from .operator import gather_into_operator, gather_operator
from .outputs import check_outputs, mark_written
from .pinned import announce_reads
from .request import BOUNDS, INDEX_DTYPES, Request, field_of
from .shortcut import OutShortcut, Shortcut, guard
from .subclasses import (
    all_ordinary,
    decides_itself,
    is_dtensor,
    is_fake,
    keeps_class,
    lacks_memory,
    plain,
)

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
        return in_graph(indices, Buffers(bufs), out, bounds, backend)
    # What has no graph, forward-mode AD, is not looked at by guards.
    if forward_ad._current_level >= 0:
        return gather_checked(indices, Buffers(bufs), out, bounds, backend)[0]
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
    results, executable = gather_checked(indices, Buffers(bufs), out, bounds, backend)
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


def in_graph(
    indices: torch.Tensor, buffers: Buffers, out: Any, bounds: str, backend: str | None
) -> tuple[Any, ...]:
    """The gather as one operator of the graph that torch is making."""
    tensors = buffers.tensors
    outs = None if out is None else flatten_outputs(out, buffers)
    if not tensors:
        return buffers.mirrored((), indices.shape)
    if outs is None:
        results = (
            # ONNX knows torch's operations only.
            [index_rows(tensor, indices, bounds) for tensor in tensors]
            if torch.onnx.is_in_onnx_export()
            else gather_operator(indices, tensors, bounds, backend)
        )
        return buffers.mirrored(results, indices.shape)
    _refuse_gradients(False, (*tensors, *outs))
    gather_into_operator(indices, tensors, bounds, backend, outs)
    return tuple(out)


def gather_checked(
    indices: torch.Tensor, buffers: Buffers, out: Any, bounds: str, backend: str | None
) -> tuple[tuple[Any, ...], Executable | None]:
    """`gather` with every check made, the long way.

    Returns:
        What `gather` returns; and the executable, if the call was so plain that a guard on the
        layouts of the indices and of the tensors among the buffers is all that another one needs.
    """
    indices = containers.as_indices(indices)
    if is_compiling() or dispatch_modes() or torch._C._get_tracing_state() is not None:
        return in_graph(indices, buffers, out, bounds, backend), None
    if not all_ordinary(indices, *buffers.tensors):
        if any(map(is_dtensor, buffers.tensors)):
            from .distributed import routing

            return routing.gather(indices, buffers, out, bounds, backend), None
        if all(map(is_fake, (indices, *buffers.tensors))):
            return in_graph(indices, buffers, out, bounds, backend), None
    try:
        outs = None if out is None else flatten_outputs(out, buffers)
    except (TypeError, ValueError):
        check_arguments(indices, buffers, bounds, backend)  # the first thing that is wrong
        raise
    results, executable = _gather(indices, buffers, outs, bounds, backend)
    if out is not None:  # what the caller brought is given back as it came
        return tuple(out), executable
    return buffers.mirrored(results, indices.shape), executable


def _gather(
    indices: torch.Tensor,
    buffers: Buffers,
    outs: list[torch.Tensor] | None,
    bounds: str,
    backend: str | None,
) -> tuple[Sequence[torch.Tensor], Executable | None]:
    """`gather_checked` for what is no graph, without a look at the structure of the results."""
    tensors = buffers.tensors
    if not all_ordinary(indices, *tensors):
        return _gather_others(indices, buffers, outs, bounds, backend), None
    if any(map(is_wrapped, (indices, *tensors))):
        return _gather_transformed(indices, buffers, outs, bounds, backend), None
    key = _key(indices, buffers, bounds, backend)
    executable = _executables.get(key) if key is not None else None
    if executable is None:
        if any(tensor._is_zerotensor() for tensor in tensors):
            # Zeros that autograd has made no memory for.
            filled = [torch.zeros_like(t) if t._is_zerotensor() else t for t in tensors]
            return _gather(indices, buffers.of(filled), outs, bounds, backend)[0], None
        if outs is None and not all(map(torch._C._has_storage, (indices, *tensors))):
            # Batches of torch.autograd's own vmap, which has no rules for operators.
            check_arguments(indices, buffers, bounds, backend)
            return [index_rows(tensor, indices, bounds) for tensor in tensors], None
        executable = _make(key, indices, buffers, bounds, backend)
    if executable is None:
        return (), None
    request = executable.request
    if request.device.type == "cuda":
        faults.raise_pending(request.device)
    if request.device.type != "meta":
        check_memory((indices, *tensors), ("indices", *executable.site.labels))
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
    elif request.device.type != "meta":
        indices = aligned(indices.resolve_neg())
    shape = indices.shape
    flat = indices.reshape(-1) if indices.dim() != 1 else indices
    if flat.shape[0] and request.bounds != "fill" and executable.has_empty_buffer:
        raise executable.empty_buffer_error(flat.shape[0])
    if outs is not None:
        check_outputs(outs, tensors, indices, request, executable.site.labels)

    def run(_: torch.Tensor, sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return _run(executable, flat, shape, detached(sources), outs)

    tangents = forward_mode() and any(map(has_tangent, (*tensors, *(outs or ()))))
    if tangents or (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)):
        if outs is not None:
            _refuse_gradients(tangents, tensors)
        results: Sequence[torch.Tensor] = Gather.call(
            run, tangents, indices, bounds, backend, *tensors
        )
    else:
        results = run(indices, tensors)
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
    return results, executable if plain else None


def _refuse_gradients(transformed: bool, tensors: Sequence[torch.Tensor]) -> None:
    """Refuse outputs of the caller's where derivatives are wanted."""
    if transformed:
        raise ValueError(
            "out= cannot be combined with forward-mode AD or a transform of torch.func; leave out= "
            "away"
        )
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise ValueError(
            "out= cannot be combined with gradients: a buffer requires grad. Leave out= away, "
            "detach the buffers, or call under torch.no_grad()"
        )


def _gather_transformed(
    indices: torch.Tensor,
    buffers: Buffers,
    outs: list[torch.Tensor] | None,
    bounds: str,
    backend: str | None,
) -> Sequence[torch.Tensor]:
    """The gather of tensors that a transform of torch.func has wrapped."""
    check_arguments(indices, buffers, bounds, backend)
    if outs is not None:
        _refuse_gradients(True, buffers.tensors)
    if transforming():
        return gather_operator(indices, buffers.tensors, bounds, backend)  # type: ignore[no-any-return]
    # Wrappers that have outlived their transform.
    indices, *tensors = map(torch._C._functorch.unwrap_if_dead, (indices, *buffers.tensors))
    return _gather(indices, buffers.of(tensors), None, bounds, backend)[0]


def _gather_others(
    indices: torch.Tensor,
    buffers: Buffers,
    outs: list[torch.Tensor] | None,
    bounds: str,
    backend: str | None,
) -> Sequence[torch.Tensor]:
    """The gather of tensors of other classes, see `subclasses`."""
    check_arguments(indices, buffers, bounds, backend)
    tensors, labels = buffers.tensors, buffers.labels()
    parts = []
    for tensor, label in zip(tensors, labels, strict=True):
        if decides_itself(type(tensor)) and not all_ordinary(tensor):
            if outs is not None:
                raise ValueError(
                    f"{label} is a {type(tensor).__name__}, a class that decides itself what "
                    "indexing means, so its rows cannot be written into out=; leave out= away, or "
                    "pass .as_subclass(torch.Tensor)"
                )
            # For the check of the indices; the rows are selected below.
            part = torch.empty((tensor.shape[0], 0), device=tensor.device)
        else:
            part = plain(tensor)
        parts.append(part)
    if outs is not None:
        outs = list(map(plain, outs))
    indices = loadable(plain(indices))
    results = list(_gather(indices, buffers.of(parts), outs, bounds, backend)[0])
    for number, tensor in enumerate(tensors):
        kind = type(tensor)
        if all_ordinary(tensor):
            continue
        if decides_itself(kind):
            results[number] = index_rows(tensor, indices, bounds)
        elif keeps_class(kind):
            results[number] = results[number].as_subclass(kind)
    return results


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
    return explain_buffers(containers.as_indices(indices), Buffers(bufs), bounds, backend)


def explain_buffers(
    indices: torch.Tensor, buffers: Buffers, bounds: str, backend: str | None
) -> dispatch.Explanation:
    """`explain` for buffers that were taken apart."""
    if any(map(is_dtensor, buffers.tensors)):
        from .distributed import routing

        return routing.explain(buffers, bounds, backend)
    executable = _make(None, indices, buffers, bounds, backend)
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
        shortcut = executable.shortcut = Shortcut(check, executable, detached(bufs))
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


def _key(
    indices: torch.Tensor, buffers: Buffers, bounds: str, backend: str | None
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
                tensor._is_zerotensor(),
                indices.is_cuda and tensor.is_cpu and tensor.is_pinned(),
            )
            # The place of a None belongs to it, because it changes the names of later buffers.
            if tensor is not None
            else None
            for tensor in buffers.leaves
        ]
        kind = (type(indices), indices.layout, indices.is_nested, indices.dtype, indices.device)
        # The caller's objects, TensorDicts and keys for example, must not live on in it.
        places = None if buffers.structure is None else buffers.structure.key()
        key = (kind, bounds, backend, places, *layouts)
        hash(key)
    except (AttributeError, RuntimeError, TypeError):
        return None
    return key


def check_options(indices: Any, bounds: str, backend: str | None) -> None:
    """Refuse indices that are none, and options that there are not.

    Raises:
        TypeError: the indices are no strided tensor of integers.
        ValueError: an option is unknown.
    """
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


def check_arguments(
    indices: Any, buffers: Buffers, bounds: str, backend: str | None
) -> tuple[torch.device, bool] | None:
    """Refuse what no gather takes, whatever the outputs are.

    Returns:
        Where the gather runs, and whether the buffers lie in pinned host memory; None without any.
    """
    check_options(indices, bounds, backend)
    labels = buffers.labels()
    for tensor, label in zip(buffers.tensors, labels, strict=True):
        check_buffer(tensor, label)
    return _devices(indices, buffers.tensors, labels) if labels else None


def _make(
    key: tuple[Any, ...] | None,
    indices: torch.Tensor,
    buffers: Buffers,
    bounds: str,
    backend: str | None,
) -> Executable | None:
    """Check everything that ``key`` stands for and make its executable; None without tensors."""
    found = check_arguments(indices, buffers, bounds, backend)
    if found is None:
        return None
    device, host_memory = found
    request = Request(
        device=device,
        host_memory=host_memory,
        index_dtype=indices.dtype,
        count=0,
        bounds=bounds,
        fields=tuple(field_of(_physical(tensor)) for tensor in buffers.tensors),
    )
    executable = Executable(request, backend, buffers.labels())
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


def _check_strided(tensor: torch.Tensor, label: str) -> None:
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    if is_fake(tensor):
        raise TypeError(
            f"{label} is a fake tensor, which has no memory, among real ones; make all of them "
            "fake, or none"
        )
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
    if is_traceable_wrapper_subclass(tensor) or lacks_memory(tensor):
        raise TypeError(
            f"{label} is a {type(tensor).__name__}, which holds other tensors and has no memory of "
            "its own; gather those (for a DTensor, .to_local())"
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
    for source, given in zip(sources, results, strict=True):
        if not (source.is_conj() or source.is_neg()):
            continue
        result = aligned(given)
        if source.is_conj():
            torch.conj_physical(result, out=result)
        if source.is_neg():
            result.neg_()
        # Rows that came from no buffer are zero bytes, not -0.0.
        _, bad = resolve(as_int64(indices), source.shape[0], bounds)
        if bad is not None:
            result.masked_fill_(bad.view((*shape, *[1] * (source.dim() - 1))), 0)
        if result is not given:
            as_bytes(given).copy_(as_bytes(result))
    return results


def flatten_outputs(out: Any, buffers: Buffers) -> list[Any]:
    """The output tensors, after checking that ``out`` has the structure of the buffers."""
    count = len(buffers.arguments)
    outs: list[Any] | None = None
    if isinstance(out, (tuple, list)) and len(out) == count:
        outs, structure = containers.flatten(tuple(out), "out", writable=True)
        if not containers.alike(buffers.structure, structure, count):
            outs = None
    if outs is None:
        raise ValueError(
            f"out must be a tuple with one item per buffer argument ({count}), in the same "
            f"structure, got {type(out).__name__}"
            + (f" of length {len(out)}" if isinstance(out, (tuple, list)) else "")
        )
    for number, (leaf, item) in enumerate(zip(buffers.leaves, outs, strict=True)):
        if (leaf is None) != (item is None):
            raise ValueError(
                f"out must have None exactly where the buffers have None; leaf {number} differs"
            )
    outs = containers.as_written(buffers.structure, structure, buffers.leaves, outs)
    return [item for item in outs if item is not None]


def _synchronise(device: torch.device) -> None:
    if not torch.cuda.is_current_stream_capturing():
        torch.cuda.current_stream(device).synchronize()
        faults.raise_all(device)
