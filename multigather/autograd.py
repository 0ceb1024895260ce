"""Gradients: each buffer's gradient is the sum of its output rows' gradients, row by row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .bounds import as_int64, resolve


class Gather(torch.autograd.Function):
    """The gather as one node of the graph, with every buffer that requires a gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        run: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]],
        indices: torch.Tensor,
        bounds: str,
        *buffers: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Run the gather.

        Args:
            ctx: autograd's context.
            run: gathers from the buffers that it is given.
            indices: the indices, any shape.
            bounds: the bounds mode.
            buffers: the buffers, not all of them differentiable.
        """
        ctx.save_for_backward(indices)
        ctx.bounds = bounds
        ctx.shapes = [buffer.shape for buffer in buffers]
        ctx.set_materialize_grads(False)
        outputs = run([buffer.detach() for buffer in buffers])
        ctx.mark_non_differentiable(
            *(out for out in outputs if not (out.is_floating_point() or out.is_complex()))
        )
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """See `gradients`."""
        (indices,) = ctx.saved_tensors
        results = Gather.gradients(
            indices, ctx.bounds, ctx.shapes, ctx.needs_input_grad[3:], gradients
        )
        return (None, None, None, *results)

    @staticmethod
    def gradients(
        indices: torch.Tensor,
        bounds: str,
        shapes: Sequence[torch.Size],
        wanted: Sequence[bool],
        gradients: Sequence[torch.Tensor | None],
    ) -> list[torch.Tensor | None]:
        """Add each output row's gradient to the row it came from; rows of zeros came from none.

        Args:
            indices: the indices, any shape.
            bounds: the bounds mode.
            shapes: of the buffers.
            wanted: which buffers need a gradient.
            gradients: of the outputs.

        Returns:
            A gradient for each buffer, or None.
        """
        flat = as_int64(indices.reshape(-1))
        results: list[torch.Tensor | None] = []
        for shape, want, gradient in zip(shapes, wanted, gradients, strict=True):
            if gradient is None or not want:
                results.append(None)
                continue
            if shape[0] == 0:
                results.append(gradient.new_zeros(shape))
                continue
            rows, bad = resolve(flat.to(gradient.device), shape[0], bounds)
            gradient = gradient.reshape(flat.shape[0], *shape[1:])
            if bad is not None:
                gradient = gradient.masked_fill(bad.view(-1, *[1] * (len(shape) - 1)), 0)
            results.append(gradient.new_zeros(shape).index_add(0, rows, gradient))
        return results
