"""Batches of gathers, and of their transposes, by one of the whole: the rules for torch.vmap."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .autograd import loadable, marked, sum_rows
from .request import has_contiguous_rows


def in_batch(indices: torch.Tensor, dim: int | None, rows: int, size: int, bounds: str) -> Any:
    """Row numbers in a batch of buffers that lie one after another, as `marked` has them.

    Args:
        indices: the indices; of the whole batch, if ``dim`` is not None.
        dim: where their batch dimension is.
        rows: of one buffer.
        size: of the batch.
        bounds: the bounds mode.

    Returns:
        A tensor of shape ``[size, *indices]``.
    """
    selected = marked(indices, rows, bounds)
    selected = selected[None] if dim is None else selected.movedim(dim, 0)
    first = torch.arange(size, device=selected.device) * rows
    first = first.view(-1, *[1] * (selected.dim() - 1))
    return torch.where(selected < 0, -1, selected + first)


def gather_batch(
    size: int,
    dim: int | None,
    dims: Sequence[int | None],
    indices: torch.Tensor,
    bounds: str,
    backend: str | None,
    buffers: Sequence[torch.Tensor],
) -> tuple[tuple[torch.Tensor, ...], tuple[int | None, ...]]:
    """The gather of each member of a batch, by gathers of the whole.

    One index for a batch of buffers, or a batch of indices into one buffer, is a gather of longer
    or of more rows. Otherwise the buffers of a batch become one buffer, without a copy where the
    batch is its outer dimension, and the indices row numbers in it.

    Args:
        size: of the batch.
        dim: the indices' batch dimension, None if they are the same for all.
        dims: each buffer's.
        indices: the indices.
        bounds: the bounds mode.
        backend: the backend that the caller insists on.
        buffers: the buffers.

    Returns:
        The outputs, and each one's batch dimension.
    """
    from .api import gather

    outer = indices if dim is None else indices.movedim(dim, 0)
    parts, joined = [], {}
    for number, (buffer, each) in enumerate(zip(buffers, dims, strict=True)):
        part = buffer if each is None else buffer.movedim(each, 1)
        if each is not None and (
            dim is not None or not has_contiguous_rows(tuple(part.shape), part.stride())
        ):
            # Here it takes part without a byte, so that bad indices are reported.
            joined[number] = loadable(buffer).movedim(each, 0)
            part = buffer.new_empty((part.shape[0], 0))
        parts.append(part)
    results = list(gather(outer, *parts, bounds=bounds, backend=backend))
    out_dims = [0 if dim is not None else None if each is None else indices.dim() for each in dims]
    for rows in {each.shape[1] for each in joined.values()}:
        some = {number: each for number, each in joined.items() if each.shape[1] == rows}
        selected = in_batch(indices, dim, rows, size, bounds)
        flat = [each.reshape(size * rows, *each.shape[2:]) for each in some.values()]
        gathered = gather(selected, *flat, bounds="fill", backend=backend)
        for number, found in zip(some, gathered, strict=True):
            results[number], out_dims[number] = found, 0
    return tuple(results), tuple(out_dims)


def sum_batch(
    size: int,
    dim: int | None,
    dims: Sequence[int | None],
    indices: torch.Tensor,
    bounds: str,
    backend: str | None,
    rows: Sequence[int],
    gradients: Sequence[torch.Tensor],
) -> tuple[tuple[torch.Tensor, ...], tuple[int, ...]]:
    """The sums of each member of a batch, by sums of the whole; see `gather_batch`.

    Args:
        size: of the batch.
        dim: the indices' batch dimension, None if they are the same for all.
        dims: each gradient's.
        indices: the indices.
        bounds: the bounds mode.
        backend: the backend that the caller insists on.
        rows: of each of one member's sums.
        gradients: the gradients.

    Returns:
        The sums, and each one's batch dimension.
    """
    if dim is None:
        longer = [
            gradient.movedim(each, indices.dim())  # type: ignore[arg-type]  # one of them has one
            for gradient, each in zip(gradients, dims, strict=True)
        ]
        sums = sum_rows(indices, bounds, backend, rows, longer)
        return tuple(sums), (1,) * len(sums)  # type: ignore[arg-type]
    results = []
    for count, gradient, each in zip(rows, gradients, dims, strict=True):
        selected = in_batch(indices, dim, count, size, bounds)
        members = (
            gradient.expand(size, *gradient.shape) if each is None else gradient.movedim(each, 0)
        )
        (total,) = sum_rows(selected, "fill", backend, [size * count], [members])
        assert total is not None
        results.append(total.view(size, count, *total.shape[1:]))
    return tuple(results), (0,) * len(results)
