"""Gradients: each buffer's gradient is the sum of its output rows' gradients, row by row.

On CUDA the gradients of all buffers are added in one launch of the cupy backend's kernel, otherwise
by torch buffer by buffer. `kernel_for` decides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.compiler import is_compiling

from . import dispatch
from .backends import _scatter_add
from .backends._cupy import CudaBackend
from .bounds import as_int64, resolve
from .launch import current_device, fast_allocation
from .request import contiguous_strides

# Number of active modes that see every operator, such as that of fake tensors.
dispatch_modes: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)


class Gather(torch.autograd.Function):
    """The gather as one node of the graph, with every buffer that requires a gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        run: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]],
        indices: torch.Tensor,
        bounds: str,
        backend: str | None,
        *buffers: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Run the gather.

        Args:
            ctx: autograd's context.
            run: gathers from the buffers that it is given.
            indices: the indices, any shape.
            bounds: the bounds mode.
            backend: the backend that the caller insists on.
            buffers: the buffers, not all of them differentiable.
        """
        remember(ctx, indices, bounds, backend, buffers)
        ctx.set_materialize_grads(False)
        outputs = run(detached(buffers))
        # As with b[indices], the rows of a buffer that requires no gradient require none.
        wanted = ctx.needs_input_grad[4:]
        if not all(wanted):
            ctx.mark_non_differentiable(
                *(out for out, want in zip(outputs, wanted, strict=True) if not want)
            )
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """See `gradients_of`."""
        return (None, None, None, None, *gradients_of(ctx, ctx.needs_input_grad[4:], gradients))


class ScatterAdd(torch.autograd.Function):
    """The kernel as a node of the graph, for higher derivatives: its own is the gather."""

    @staticmethod
    def forward(
        ctx: Any,
        kernel: CudaBackend,
        indices: torch.Tensor,
        bounds: str,
        shapes: Sequence[torch.Size],
        *gradients: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """See `add_by_kernel`, which it calls without a graph."""
        ctx.save_for_backward(indices)
        ctx.bounds = bounds
        ctx.set_materialize_grads(False)
        return tuple(add_by_kernel(kernel, indices, bounds, shapes, gradients))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Gather the rows of the gradients of the sums."""
        (indices,) = ctx.saved_tensors
        return (None, None, None, None, *gather_again(indices, ctx.bounds, gradients))


def detached(buffers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The buffers outside of the graph."""
    return [buffer.detach() if buffer.requires_grad else buffer for buffer in buffers]


def remember(
    ctx: Any,
    indices: torch.Tensor,
    bounds: str,
    backend: str | None,
    buffers: Sequence[torch.Tensor],
) -> None:
    """Keep in autograd's context what `gradients_of` needs."""
    ctx.save_for_backward(indices)
    ctx.bounds, ctx.backend = bounds, backend
    ctx.shapes = [buffer.shape for buffer in buffers]
    ctx.device = buffers[0].device


def gradients_of(
    ctx: Any, wanted: Sequence[bool], gradients: Sequence[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    """Add each output row's gradient to the row it came from; rows of zeros came from none.

    Sums of floats of 8 and 16 bits are made in float32 and rounded once, others in the buffer's own
    type. On a GPU rows are added in no certain order unless torch is told to be deterministic, so
    the last bits of sums of repeated indices may differ from run to run.

    Args:
        ctx: autograd's context, filled by `remember`.
        wanted: which buffers need a gradient.
        gradients: of the outputs.

    Returns:
        A gradient for each buffer, or None.
    """
    (indices,) = ctx.saved_tensors
    device = ctx.device
    # Buffers in pinned host memory have their gradients there, unlike their outputs.
    indices = indices.to(device)
    found = {
        number: gradient if gradient.device == device else gradient.to(device)
        for number, gradient in enumerate(gradients)
        if gradient is not None and wanted[number]
    }
    results: list[torch.Tensor | None] = [None] * len(gradients)
    kernel = kernel_for(ctx.backend, indices, list(found.values()))
    if kernel is not None:
        count = max(1, indices.numel())
        some = {n: each for n, each in found.items() if _scatter_add.supported(each, count)}
        if some:
            shapes = [ctx.shapes[number] for number in some]
            sums = add_by_kernel(kernel, indices, ctx.bounds, shapes, list(some.values()))
            for number, total in zip(some, sums, strict=True):
                results[number] = total
    rest = {n: each for n, each in found.items() if results[n] is None}
    if rest:
        shapes = [ctx.shapes[number] for number in rest]
        sums = add_by_torch(indices, ctx.bounds, shapes, list(rest.values()))
        for number, total in zip(rest, sums, strict=True):
            results[number] = total
    return results


def kernel_for(
    backend: str | None, indices: torch.Tensor, gradients: Sequence[torch.Tensor]
) -> CudaBackend | None:
    """The backend whose kernel adds these gradients in one launch; None if torch adds them.

    This is the place for what measurements say: where ``benchmarks/backward.py`` finds that
    ``index_add_`` per buffer is faster, return None. It did so nowhere on an H200.

    Args:
        backend: the backend that the caller insists on; the kernel is the cupy backend's.
        indices: on the device of the buffers.
        gradients: of the outputs, on that device.
    """
    if torch.are_deterministic_algorithms_enabled() or not is_plain(indices, *gradients):
        return None
    return dispatch.cuda_backend(backend, indices.device)


def is_plain(*tensors: torch.Tensor) -> bool:
    """Whether tensors have memory to look at: none is traced, batched or of a type of its own."""
    return (
        not is_compiling()
        and not dispatch_modes()
        and all(
            type(tensor) in (torch.Tensor, torch.nn.Parameter)
            and tensor.layout is torch.strided
            and torch._C._has_storage(tensor)
            for tensor in tensors
        )
    )


def add_by_kernel(
    kernel: CudaBackend,
    indices: torch.Tensor,
    bounds: str,
    shapes: Sequence[torch.Size],
    gradients: Sequence[torch.Tensor],
) -> Sequence[torch.Tensor]:
    """The sums of buffers of these shapes, in one launch, as a node of the graph if one is made."""
    if torch.is_grad_enabled() and any(gradient.requires_grad for gradient in gradients):
        arguments = (kernel, indices, bounds, shapes, *gradients)
        return ScatterAdd.apply(*arguments)  # type: ignore[no-untyped-call,no-any-return]
    sums = _zeros(shapes, gradients)
    _scatter_add.scatter_add(kernel, indices, bounds, gradients, sums)
    return sums


def _zeros(shapes: Sequence[torch.Size], gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Zeros of these shapes, as ``gradient.new_zeros(shape)``, filled in one launch.

    The gradients are all on one device. Four of them on an H200: 14 microseconds of host time
    against 35, and 9.1 of the GPU's against 12.3 where they are small.
    """
    device = gradients[0].device
    empty = fast_allocation(device.type)
    if empty is None or (device.type == "cuda" and current_device() != device.index):
        sums = [each.new_empty(shape) for shape, each in zip(shapes, gradients, strict=True)]
    else:
        sums = [
            empty(tuple(shape), contiguous_strides(shape), each.dtype)
            for shape, each in zip(shapes, gradients, strict=True)
        ]
    torch._foreach_zero_(sums)
    return sums


def add_by_torch(
    indices: torch.Tensor,
    bounds: str,
    shapes: Sequence[torch.Size],
    gradients: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    """The sums of buffers of these shapes, by differentiable operations of torch on any device.

    Types below float32 are added in float32. Where a copy of the buffer in float32 would be larger
    than the gradient, each row's sum is made at one of its positions, as by scatter_add.cu; what is
    then added in the buffer's type is one number and zeros.
    """
    flat = as_int64(indices.reshape(-1))
    resolved: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
    chosen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    plain = is_plain(flat)
    sums: list[torch.Tensor] = []
    for shape, gradient in zip(shapes, gradients, strict=True):
        if shape[0] == 0:
            sums.append(gradient.new_zeros(shape))
            continue
        # A traced row count cannot be looked up.
        key = shape[0] if plain else len(sums)
        if key not in resolved:
            rows, bad = resolve(flat, shape[0], bounds)
            # If all are good, there is nothing to mask, but to ask a GPU would wait for it.
            if bad is not None and plain and flat.device.type == "cpu" and not bad.any():
                bad = None
            resolved[key] = rows, bad
        rows, bad = resolved[key]
        gradient = gradient.reshape(flat.shape[0], *shape[1:])
        aside = [1] * (len(shape) - 1)
        if bad is not None:
            gradient = torch.where(bad.view(-1, *aside), 0, gradient)
        dtype = gradient.dtype
        wide = torch.complex64 if dtype.is_complex else torch.float32
        # The last has no zero, and as torch has no gradients of it, index_put_ refuses it.
        if dtype.itemsize < wide.itemsize and dtype != torch.float8_e8m0fnu:
            gradient = gradient.to(wide)
            # Traced numbers of rows cannot be compared.
            if plain and shape[0] <= flat.shape[0]:
                total = gradient.new_zeros(shape).index_add_(0, rows, gradient)
                sums.append(total.to(dtype))
                continue
            if key not in chosen:
                chosen[key] = _one_position(rows, shape[0])
            position, others = chosen[key]
            added = gradient.new_zeros(gradient.shape).index_add_(0, position, gradient)
            gradient = torch.where(others.view(-1, *aside), 0, added).to(dtype)
        total = gradient.new_zeros(shape)
        if dtype.itemsize == 1:
            # The 8-bit floats have no index_add; this is the gradient of b[indices].
            total.index_put_((rows,), gradient, accumulate=True)
        else:
            total.index_add_(0, rows, gradient)
        sums.append(total)
    return sums


def _one_position(rows: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """For each position one, always the same, that has its row; and which do not have their own."""
    positions = torch.arange(rows.shape[0], device=rows.device)
    position = rows.new_empty(count).scatter_(0, rows, positions).gather(0, rows)
    return position, position != positions


def gather_again(
    indices: torch.Tensor, bounds: str, buffers: Sequence[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    """The rows that an earlier gather selected, of other buffers; differentiable.

    Args:
        indices: the indices of that gather.
        bounds: its bounds mode. It has reported bad indices; now they select zeros.
        buffers: None gives None.
    """
    from .api import gather

    found = {number: buffer for number, buffer in enumerate(buffers) if buffer is not None}
    results: list[torch.Tensor | None] = [None] * len(buffers)
    for size in {len(buffer) for buffer in found.values()}:
        some = {number: buffer for number, buffer in found.items() if len(buffer) == size}
        selected, bad = resolve(as_int64(indices), size, bounds)
        if bad is not None:
            selected = torch.where(bad, -1, selected)
        if is_plain(selected, *some.values()):
            gathered = gather(selected, *some.values(), bounds="fill")
        else:
            gathered = tuple(_filled(buffer, selected) for buffer in some.values())
        for number, rows in zip(some, gathered, strict=True):
            results[number] = rows
    return results


def _filled(buffer: torch.Tensor, selected: torch.Tensor) -> torch.Tensor:
    """The gather in mode "fill" of a buffer without memory, by operations that know such."""
    bad = (selected < 0).view(*selected.shape, *[1] * (buffer.dim() - 1))
    return torch.where(bad, 0, buffer[selected.clamp(min=0)])
