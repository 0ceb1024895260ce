"""Launches gather.cu alone, on the target's device, and says which faults it recorded."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from conftest import Target

from multigather import dispatch, faults
from multigather.backends._cupy import CudaBackend, CudaConfig
from multigather.request import Request, Site, field_of


def launch(
    target: Target,
    indices: torch.Tensor,
    sources: Sequence[torch.Tensor],
    outs: Sequence[torch.Tensor] | None = None,
    bounds: str = "raise",
    config: CudaConfig | None = None,
) -> tuple[list[torch.Tensor], list[tuple[int, int]]]:
    """Gather by the kernel alone; returns the outputs and the faults: (position, buffer) pairs."""
    (backend,) = (each for each in dispatch.BACKENDS if each.name == "cupy")
    numbers = tuple(range(len(sources)))
    site = Site(0, numbers, tuple(f"bufs[{number}]" for number in numbers))
    fields = tuple(map(field_of, sources))
    request = Request(indices.device, False, indices.dtype, len(indices), bounds, fields)
    # Not the method of the backend on a CPU, which raises for a fault.
    runner = CudaBackend.prepare(backend, request, config or CudaConfig(), site)
    outputs = runner(indices, indices.shape, sources, outs)
    if target.device == "cuda":
        torch.cuda.synchronize()
    board = faults.board_of(indices.device)
    tickets = range(board.taken, board.words[0])
    assert len(tickets) <= faults.RING
    starts = [faults.WORDS * (1 + ticket % faults.RING) for ticket in tickets]
    met = [(board.words[start + 2], board.words[start + 4]) for start in starts]
    board.take()
    return outputs, met
