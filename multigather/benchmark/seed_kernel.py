"""A peer: the simplest Triton kernel for the job, one program per row, exactly four buffers.

Many code bases have one like it. It checks no index, takes contiguous buffers only, and is launched
through Triton's own launcher.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit  # type: ignore[untyped-decorator]
def copy_row(source, destination, row, position, columns, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Copy one row of ``columns`` elements, BLOCK at a time."""
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < columns
        value = tl.load(source + row * columns + column, mask=inside)
        tl.store(destination + position * columns + column, value, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def gather_four(  # type: ignore[no-untyped-def]
    indices, source_a, source_b, source_c, source_d, out_a, out_b, out_c, out_d,
    columns_a, columns_b, columns_c, columns_d, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy row ``indices[program]`` of each buffer."""
    position = tl.program_id(0).to(tl.int64)
    row = tl.load(indices + position).to(tl.int64)
    copy_row(source_a, out_a, row, position, columns_a, BLOCK)
    copy_row(source_b, out_b, row, position, columns_b, BLOCK)
    copy_row(source_c, out_c, row, position, columns_c, BLOCK)
    copy_row(source_d, out_d, row, position, columns_d, BLOCK)


def gather(indices: torch.Tensor, buffers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """``[buffer[indices] for buffer in buffers]`` for four contiguous buffers."""
    outs = [
        torch.empty((len(indices), *b.shape[1:]), dtype=b.dtype, device=b.device) for b in buffers
    ]
    columns = [max(b[0].numel(), 1) for b in buffers]
    launch: Any = gather_four[(len(indices),)]
    launch(indices, *map(_bits, buffers), *map(_bits, outs), *columns, BLOCK=BLOCK)
    return outs


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """As a type that Triton knows."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor
