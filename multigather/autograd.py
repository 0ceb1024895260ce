"""Gradients: each buffer's gradient is the sum of its output rows' gradients, row by row.

On CUDA the gradients of all buffers are added in one launch of the cupy backend's kernel, otherwise
by torch buffer by buffer. `kernel_for` decides.

The gather and its transpose, the sum of rows, are linear and each other's derivative, so the two
nodes here are enough for every order, and tangents of forward mode are gathered and summed like
values. Where torch transforms or traces, the nodes are made inside of its operators, see
`operator`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from . import dispatch
from .backends import _scatter_add
from .backends._cupy import CudaBackend
from .bounds import as_int64, resolve
from .launch import current_device, fast_allocation
from .memory import aligned
from .request import contiguous_strides

Run = Callable[[torch.Tensor, Sequence[torch.Tensor]], Sequence[torch.Tensor]]

# Number of active modes that see every operator, such as that of fake tensors.
dispatch_modes: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)

# Whether a transform of torch.func is active, and whether a tensor is one of its wrappers.
transforming: Callable[[], bool] = getattr(
    torch._C, "_are_functorch_transforms_active", lambda: False
)
_functorch = getattr(torch._C, "_functorch", None)
is_wrapped: Callable[[torch.Tensor], bool] = getattr(
    _functorch, "is_functorch_wrapped_tensor", lambda tensor: False
)


def forward_mode() -> bool:
    """Whether forward-mode derivatives are being computed, so that a tensor may have a tangent."""
    level: int = forward_ad._current_level
    return level >= 0 and forward_ad._is_fwd_grad_enabled()


def has_tangent(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a dual number of forward-mode AD, which has one level, of number 0."""
    return torch._VF._unpack_dual(tensor, level=0)[1] is not None


def is_differentiable(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of a type that has derivatives."""
    return tensor.is_floating_point() or tensor.is_complex()


Layout = tuple[torch.Size, torch.dtype, torch.device]


def layouts(outputs: Sequence[torch.Tensor]) -> list[Layout | None]:
    """Shape, dtype and device of the outputs that can have tangents."""
    return [
        (out.shape, out.dtype, out.device) if is_differentiable(out) else None for out in outputs
    ]


def materialised(
    tangents: Sequence[torch.Tensor | None], outputs: Sequence[Layout | None]
) -> tuple[torch.Tensor | None, ...]:
    """Zeros in place of missing tangents: torch takes no None of an output that can have one."""
    return tuple(
        torch.zeros(each[0], dtype=each[1], device=each[2])
        if tangent is None and each is not None
        else tangent
        for tangent, each in zip(tangents, outputs, strict=True)
    )


class Node(torch.autograd.Function):
    """A node of autograd's graph, whatever transforms of torch.func are around it."""

    @classmethod
    def call(cls, *arguments: Any) -> tuple[torch.Tensor, ...]:
        """`apply` for tensors that no transform has wrapped, or that it has unwrapped already.

        Without its look at the signature of ``forward``, which takes longer than the gather.
        """
        with enable_single_level_autograd_function() if transforming() else nullcontext():
            return super(torch.autograd.Function, cls).apply(*arguments)  # type: ignore[no-any-return,misc]


class Gather(Node):
    """The gather as one node of the graph, with every buffer that requires a gradient."""

    @staticmethod
    def forward(
        run: Run,
        dual: bool,
        indices: torch.Tensor,
        bounds: str,
        backend: str | None,
        *buffers: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Run the gather.

        Args:
            run: gathers by the indices from the buffers that it is given.
            dual: whether a buffer may have a tangent, which ``setup_context`` cannot see.
            indices: the indices, any shape.
            bounds: the bounds mode.
            backend: the backend that the caller insists on.
            buffers: the buffers, not all of them differentiable.
        """
        return tuple(run(indices, buffers))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        """Keep what the derivatives need."""
        _, dual, indices, ctx.bounds, ctx.backend, *buffers = inputs
        ctx.rows = [buffer.shape[0] for buffer in buffers]
        ctx.device = buffers[0].device
        keep(ctx, indices, dual, output)
        # As with b[indices], the rows of a buffer that requires no gradient require none.
        wanted = ctx.needs_input_grad[5:]
        if not all(wanted):
            ctx.mark_non_differentiable(
                *(
                    out
                    for out, want in zip(output, wanted, strict=True)
                    if not want and not (dual and is_differentiable(out))
                )
            )

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """See `gradients_of`."""
        return (*[None] * 5, *gradients_of(ctx, ctx.needs_input_grad[5:], gradients))

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """The rows of the buffers' tangents."""
        (indices,) = ctx.saved_tensors
        return materialised(gather_again(indices, ctx.bounds, tangents[5:]), ctx.outputs)


class ScatterAdd(Node):
    """The sum of rows as a node of the graph, for higher derivatives: its own is the gather."""

    @staticmethod
    def forward(
        run: Run,
        dual: bool,
        indices: torch.Tensor,
        bounds: str,
        backend: str | None,
        rows: Sequence[int],
        *gradients: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Run the sum.

        Args:
            run: adds up the gradients that it is given, by the indices.
            dual: whether a gradient may have a tangent.
            indices: of the gather.
            bounds: its bounds mode.
            backend: the backend that the caller insists on.
            rows: of each sum.
            gradients: of the gathered rows.
        """
        return tuple(run(indices, gradients))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        """Keep what the derivatives need."""
        _, dual, indices, ctx.bounds, ctx.backend, ctx.rows, *_ = inputs
        keep(ctx, indices, dual, output)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Gather the rows of the gradients of the sums."""
        (indices,) = ctx.saved_tensors
        return (*[None] * 6, *gather_again(indices, ctx.bounds, gradients))

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """The sums of the tangents' rows."""
        (indices,) = ctx.saved_tensors
        sums = sum_rows(indices, ctx.bounds, ctx.backend, ctx.rows, tangents[6:])
        return materialised(sums, ctx.outputs)


def keep(ctx: Any, indices: torch.Tensor, dual: bool, output: Sequence[torch.Tensor]) -> None:
    """Keep in autograd's context what both nodes need."""
    ctx.save_for_backward(indices)
    ctx.set_materialize_grads(False)
    if dual:
        ctx.save_for_forward(indices)
        ctx.outputs = layouts(output)


def detached(buffers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The buffers outside of the graph."""
    return [buffer.detach() if buffer.requires_grad else buffer for buffer in buffers]


def gradients_of(
    ctx: Any, wanted: Sequence[bool], gradients: Sequence[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    """Add each output row's gradient to the row it came from; rows of zeros came from none.

    Sums of floats of 8 and 16 bits are made in float32 and rounded once, others in the buffer's own
    type. On a GPU rows are added in no certain order unless torch is told to be deterministic, so
    the last bits of sums of repeated indices may differ from run to run.

    Args:
        ctx: the context of `Gather`.
        wanted: which buffers need a gradient.
        gradients: of the outputs.

    Returns:
        A gradient for each buffer, or None.
    """
    (indices,) = ctx.saved_tensors
    device = ctx.device
    # Buffers in pinned host memory have their gradients there, unlike their outputs.
    indices = indices.to(device)
    moved = [
        None
        if gradient is None or not want
        else gradient
        if gradient.device == device
        else gradient.to(device)
        for gradient, want in zip(gradients, wanted, strict=True)
    ]
    return sum_rows(indices, ctx.bounds, ctx.backend, ctx.rows, moved)


def sum_rows(
    indices: torch.Tensor,
    bounds: str,
    backend: str | None,
    rows: Sequence[int],
    gradients: Sequence[torch.Tensor | None],
) -> list[torch.Tensor | None]:
    """Add rows to zeros, to the rows there that the indices select; differentiable.

    Args:
        indices: of the gather.
        bounds: its bounds mode.
        backend: the backend that the caller insists on.
        rows: of each sum.
        gradients: of shape ``indices.shape + sum.shape[1:]``; None gives None.

    Returns:
        The sums, of the gradients' types.
    """
    numbers = [number for number, gradient in enumerate(gradients) if gradient is not None]
    results: list[torch.Tensor | None] = [None] * len(gradients)
    if not numbers:
        return results
    found: list[Any] = [gradients[number] for number in numbers]
    sizes = [rows[number] for number in numbers]

    def run(index: torch.Tensor, added: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return sums_of(index, bounds, backend, sizes, added)

    sums: Sequence[torch.Tensor]
    if is_compiling() or dispatch_modes():
        # The compiler knows operations of torch, and fuses them with those around.
        shapes = sum_shapes(indices, sizes, found)
        sums = add_by_torch(indices, bounds, shapes, found)
    elif transforming():
        sums = torch.ops.multigather.add_rows.default(indices, found, sizes, bounds, backend)
    elif (dual := forward_mode()) or (
        torch.is_grad_enabled() and any(each.requires_grad for each in found)
    ):
        sums = ScatterAdd.call(run, dual, indices, bounds, backend, sizes, *found)
    else:
        sums = run(indices, found)
    for number, total in zip(numbers, sums, strict=True):
        results[number] = total
    return results


def sum_shapes(
    indices: torch.Tensor, rows: Sequence[int], gradients: Sequence[torch.Tensor]
) -> list[torch.Size]:
    """The shapes of sums of so many rows."""
    return [
        torch.Size((size, *gradient.shape[indices.dim() :]))
        for size, gradient in zip(rows, gradients, strict=True)
    ]


def sums_of(
    indices: torch.Tensor,
    bounds: str,
    backend: str | None,
    rows: Sequence[int],
    gradients: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    """`sum_rows` without a graph: by the kernel what it can add, the rest by torch."""
    shapes = sum_shapes(indices, rows, gradients)
    kernel = kernel_for(backend, indices, gradients)
    indices, *gradients = map(loadable, (indices, *gradients))
    count = max(1, indices.numel())
    sums: dict[int, torch.Tensor] = {}
    for by_kernel in (True, False):
        numbers = [
            number
            for number, gradient in enumerate(gradients)
            if (kernel is not None and _scatter_add.supported(gradient, count)) == by_kernel
        ]
        if not numbers:
            continue
        chosen = [shapes[number] for number in numbers], [gradients[number] for number in numbers]
        if by_kernel:
            assert kernel is not None
            some = add_by_kernel(kernel, indices, bounds, *chosen)
        else:
            some = add_by_torch(indices, bounds, *chosen)
        sums |= zip(numbers, some, strict=True)
    return [sums[number] for number in range(len(gradients))]


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


def loadable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy if it has memory at an address that no element may be loaded from."""
    return aligned(tensor) if is_plain(tensor) else tensor


def add_by_kernel(
    kernel: CudaBackend,
    indices: torch.Tensor,
    bounds: str,
    shapes: Sequence[torch.Size],
    gradients: Sequence[torch.Tensor],
) -> Sequence[torch.Tensor]:
    """The sums of buffers of these shapes, in one launch."""
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
        selected = marked(indices, size, bounds)
        gathered = gather(selected, *some.values(), bounds="fill")
        for number, rows in zip(some, gathered, strict=True):
            results[number] = rows
    return results


def marked(indices: torch.Tensor, rows: int, bounds: str) -> torch.Tensor:
    """The row numbers that indices select, as int64; -1 where they select none."""
    selected, bad = resolve(as_int64(loadable(indices)), rows, bounds)
    return selected if bad is None else torch.where(bad, -1, selected)
