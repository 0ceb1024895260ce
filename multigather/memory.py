"""Where a tensor's elements lie in memory, and whether there is any."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def span_of(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last; 0 without elements."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte address of a tensor's elements and the one past the last."""
    start = tensor.data_ptr()
    return start, start + span_of(tensor)


def has_memory(tensor: torch.Tensor, span: int) -> bool:
    """Whether a tensor's storage, which may have been freed or cut, still has its span."""
    return (
        not span
        or tensor.untyped_storage().nbytes()
        >= tensor.storage_offset() * tensor.element_size() + span
    )


def check_memory(tensors: Iterable[torch.Tensor], labels: Iterable[str]) -> None:
    """Refuse tensors without memory for all of their elements.

    Raises:
        ValueError: names the tensor.
    """
    for tensor, label in zip(tensors, labels, strict=True):
        span = span_of(tensor)
        if not has_memory(tensor, span):
            raise ValueError(
                f"{label} has no memory for its shape {list(tensor.shape)} and strides "
                f"{list(tensor.stride())}: its storage has "
                f"{tensor.untyped_storage().nbytes()} bytes, because it was freed or resized; "
                "gather before that, or after it was filled again"
            )
        if span and not tensor.data_ptr():
            raise ValueError(
                f"{label} is a {type(tensor).__name__} without memory of its own; gather from the "
                "tensor whose elements it stands for"
            )


def is_aligned(tensor: torch.Tensor) -> bool:
    """Whether the address is a multiple of an element's size, as hardware demands of a load."""
    return tensor.data_ptr() % tensor.element_size() == 0


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A view of each element's bytes, in one more dimension."""
    return tensor.unsqueeze(-1).view(torch.uint8)


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy of its bytes if it is not aligned.

    Not by ``clone()``, whose loads would be of whole elements: on a GPU such a load ends the
    context.
    """
    if is_aligned(tensor):
        return tensor
    return (
        as_bytes(tensor).clone(memory_format=torch.contiguous_format).view(tensor.dtype).squeeze(-1)
    )
