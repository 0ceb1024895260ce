"""Checks of ``out=``: everything that could go wrong is refused before a byte is written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .backends.base import flat_row_stride
from .memory import check_memory, extent, span_of
from .request import Request, has_contiguous_rows
from .subclasses import is_fake


def _marker() -> Callable[[Sequence[torch.Tensor]], Any]:
    """The inner function of `torch.autograd.graph.increment_version`, if it takes several tensors.

    It costs 0.6 microseconds for four; the public one looks at its argument first.
    """
    public = torch.autograd.graph.increment_version
    inner = getattr(torch._C, "_increment_version", public)
    try:
        inner((torch.empty(0, device="cpu"),))
    except (TypeError, RuntimeError):  # a torch where it takes one tensor
        return lambda outs: [public(out) for out in outs]
    return inner


# Autograd refuses a backward whose saved tensors were written since; of what is written through an
# address it must be told.
mark_written = _marker()


def check_outputs(
    outs: Sequence[torch.Tensor],
    sources: Sequence[torch.Tensor],
    indices: torch.Tensor,
    request: Request,
    labels: tuple[str, ...],
) -> None:
    """Refuse outputs that do not fit or that share memory with an input or with one another.

    Raises:
        TypeError: an output is not a strided tensor.
        ValueError: names the output, what it is, what it must be and what to do.
    """
    for out, field, label in zip(outs, request.fields, labels, strict=True):
        name = label.replace("bufs", "out", 1)
        if not isinstance(out, torch.Tensor) or out.layout is not torch.strided or is_fake(out):
            layout = getattr(out, "layout", torch.strided)
            kind = type(out).__name__ if layout is torch.strided else layout
            raise TypeError(f"{name} must be a dense strided torch.Tensor, got {kind}")
        shape = (*indices.shape, *field.row_shape)
        if tuple(out.shape) != shape:
            raise ValueError(
                f"{name} has shape {list(out.shape)}, the output for {label} has shape "
                f"{list(shape)}; outputs are never resized"
            )
        if out.dtype != field.dtype:
            raise ValueError(
                f"{name} has dtype {out.dtype}, {label} has {field.dtype}; "
                "pass a tensor of that dtype"
            )
        if out.device != request.device:
            raise ValueError(
                f"{name} is on {out.device}, the gather runs on {request.device}; move it there"
            )
        if out.is_conj() or out.is_neg():
            raise ValueError(
                f"{name} has a lazy conjugate or negative bit; pass .resolve_conj().resolve_neg()"
            )
        if out.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name} requires grad and cannot be written in place; detach it")
        if not out.numel():
            continue  # the strides of nothing may be anything
        leading = indices.dim()
        stride = flat_row_stride(out, leading)
        if not has_contiguous_rows((1, *field.row_shape), (0, *out.stride()[leading:])):
            raise ValueError(
                f"{name} has rows that are not contiguous (strides {out.stride()}); pass a "
                "contiguous tensor or a slice of whole rows"
            )
        if stride is None:
            raise ValueError(
                f"{name} has strides {out.stride()}, which one row stride cannot describe; pass a "
                "tensor whose index dimensions can be flattened"
            )
        if indices.numel() > 1 and stride * out.element_size() < field.row_bytes:
            raise ValueError(
                f"{name} has rows that overlap one another (strides {out.stride()}); pass a tensor "
                "with memory of its own for each row"
            )
    names = [*(label.replace("bufs", "out", 1) for label in labels), "indices", *labels]
    tensors = [*outs, indices, *sources]
    if request.device.type == "meta":
        return
    check_memory(outs, names[: len(outs)])
    extents = [extent(tensor) for tensor in tensors]
    for number, out in enumerate(outs):
        start, end = extents[number]
        for other in (*range(number), *range(len(outs), len(tensors))):
            low, high = extents[other]
            if start < high and low < end and share_memory(out, tensors[other]):
                raise ValueError(
                    f"{names[number]} shares memory with {names[other]}; "
                    "pass a tensor with memory of its own"
                )


def share_memory(
    a: torch.Tensor,
    b: torch.Tensor,
    start_of: Callable[[torch.Tensor], Any] = torch.Tensor.data_ptr,
) -> bool:
    """Whether two tensors may have a byte in common.

    Exact for tensors whose rows are runs of bytes with the same distance, such as columns of one
    table; for other interleaved tensors the answer may be yes without a common byte.
    """
    if not a.numel() or not b.numel() or a.device != b.device or a.device.type == "meta":
        return False
    a_start, b_start = start_of(a), start_of(b)
    if a_start + span_of(a) <= b_start or b_start + span_of(b) <= a_start:
        return False
    a_run, b_run = _run_of(a), _run_of(b)
    if a_run is None or b_run is None:
        return True
    # A single run lies between the other's runs or touches one, whatever their distance is.
    distance = a_run[1] or b_run[1]
    if not distance or (b_run[1] and b_run[1] != distance):
        return True
    offset: int = (b_start - a_start) % distance
    return offset < a_run[0] or offset + b_run[0] > distance


def _run_of(tensor: torch.Tensor) -> tuple[int, int] | None:
    """Bytes of one row and from row to row, if the tensor is rows of contiguous bytes."""
    for leading in range(tensor.dim() + 1):
        stride = flat_row_stride(tensor, leading)
        shape, steps = tuple(tensor.shape[leading:]), tensor.stride()[leading:]
        if stride is not None and has_contiguous_rows((1, *shape), (0, *steps)):
            size = tensor.element_size()
            run = size
            for each in shape:
                run *= each
            return run, stride * size
    return None
