"""What the bounds modes make of indices, in torch operations (any device).

The kernels do the same work themselves; this is for the torch backend, for gradients and for the
wording of errors.
"""

from __future__ import annotations

import torch

from .errors import bad_index_message
from .request import Request, Site

LARGEST = torch.iinfo(torch.int64).max


def as_int64(indices: torch.Tensor) -> torch.Tensor:
    """Indices as int64; a uint64 value that does not fit becomes the largest int64."""
    if indices.dtype == torch.uint64:
        indices = indices.view(torch.int64)
        return torch.where(indices < 0, LARGEST, indices)
    return indices.to(torch.int64)


def resolve(
    indices: torch.Tensor, rows: int, bounds: str
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows that int64 indices select, and which of them select none.

    Returns:
        Row numbers, all within ``0 .. rows - 1`` in the checked modes, and a bool mask of the
        indices that select a row of zeros (None if the mode has no such rows).
    """
    if bounds == "unchecked":
        return indices, None
    if bounds == "clip":
        return indices.clamp(0, rows - 1), None
    selected = indices
    if bounds == "raise":
        selected = torch.where(indices < 0, indices + rows, indices)
    bad = (selected < 0) | (selected >= rows)
    return torch.where(bad, 0, selected), bad


def index_rows(buffer: torch.Tensor, indices: torch.Tensor, bounds: str) -> torch.Tensor:
    """The gather of one buffer by operations that every kind of tensor has, ``buffer[rows]``.

    For tensors without memory of their own to read: traced ones, and those of a class that decides
    itself what indexing means. In mode "raise" a bad index selects a row of zeros.
    """
    if torch._C._get_tracing_state() is None and buffer.shape[0] == 0:
        return buffer.new_zeros((*indices.shape, *buffer.shape[1:]))
    selected, bad = resolve(as_int64(indices), buffer.shape[0], bounds)
    rows = buffer[selected]
    if bad is None:
        return rows
    return rows.masked_fill(bad.view(*bad.shape, *[1] * (buffer.dim() - 1)), 0)


def raise_if_bad(indices: torch.Tensor, shape: torch.Size, request: Request, site: Site) -> None:
    """Raise `IndexError` for the first bad index of the "raise" mode; waits for the device.

    Args:
        indices: 1-d indices as the caller gave them.
        shape: the caller's shape of them.
        request: the gather.
        site: names of its buffers.
    """
    if not indices.numel():
        return
    wide = as_int64(indices)
    low, high = (int(bound) for bound in torch.aminmax(wide))
    # A smaller buffer refuses whatever a larger one does, so the smallest decides the position.
    rows = min(field.rows for field in request.fields)
    if -rows <= low and high < rows:
        return
    position = int(((wide < -rows) | (wide >= rows)).nonzero()[0, 0])
    value = int(indices[position].item())
    for number, field in enumerate(request.fields):
        if not -field.rows <= value < field.rows:
            raise IndexError(
                bad_index_message(
                    position=position,
                    value=value,
                    label=site.label(number),
                    rows=field.rows,
                    shape=tuple(shape),
                )
            )
