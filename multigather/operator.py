"""The gather as one operator of torch, for graphs that torch.compile and torch.export make.

A graph must not look inside a gather: what happens there depends on the values of the indices and
on addresses. In a graph the whole call is the operator ``multigather::gather``; eager calls never
pass through it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.library import Library, register_autograd, register_fake

from .autograd import gradients_of, remember

_library: Any = Library("multigather", "DEF")  # type: ignore[no-untyped-call]
_library.define("gather(Tensor indices, Tensor[] bufs, str bounds, str? backend) -> Tensor[]")


def _run(
    indices: torch.Tensor, bufs: Sequence[torch.Tensor], bounds: str, backend: str | None
) -> list[torch.Tensor]:
    from .api import gather

    with torch.no_grad():
        return list(gather(indices, *bufs, bounds=bounds, backend=backend))


def _shapes(
    indices: torch.Tensor, bufs: Sequence[torch.Tensor], bounds: str, backend: str | None
) -> list[torch.Tensor]:
    outputs = []
    for buf in bufs:
        # Buffers in pinned host memory are gathered to the device of the indices.
        device = indices.device if indices.device.type == "cuda" else buf.device
        outputs.append(buf.new_empty((*indices.shape, *buf.shape[1:]), device=device))
    return outputs


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    indices, bufs, bounds, backend = inputs
    remember(ctx, indices, bounds, backend, bufs)
    ctx.wanted = [buf.requires_grad for buf in bufs]


def _backward(ctx: Any, gradients: Sequence[torch.Tensor | None]) -> tuple[Any, ...]:
    return None, gradients_of(ctx, ctx.wanted, gradients), None, None


_library.impl("gather", _run, "CompositeExplicitAutograd")
register_fake("multigather::gather", _shapes, lib=_library)
register_autograd("multigather::gather", _backward, setup_context=_remember, lib=_library)

gather_operator = torch.ops.multigather.gather.default
