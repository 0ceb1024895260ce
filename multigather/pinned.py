"""Buffers in pinned memory of the host, whose rows a GPU reads over the bus."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch


def announce_reads(tensors: Sequence[torch.Tensor], device: torch.device) -> None:
    """Let torch's allocator of pinned memory know that a kernel reads these buffers.

    It would otherwise give a buffer that the caller drops now to the next one who asks, before the
    kernel has read it. A copy that does not block is the only public way to tell it. A graph's
    buffers must live as long as the graph, so a capture tells nothing.
    """
    if torch.cuda.is_current_stream_capturing():
        return
    storages = [tensor.untyped_storage() for tensor in tensors]
    for storage in {storage.data_ptr(): storage for storage in storages}.values():
        if storage.nbytes():
            first = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage, 0, (1,), (1,))
            _any_byte(device).copy_(first, non_blocking=True)


@functools.cache
@torch.inference_mode(False)  # what was made in that mode could not be written outside it
def _any_byte(device: torch.device) -> torch.Tensor:
    """A byte of the device that nobody reads; new ones would cost as much as the copy."""
    return torch.empty(1, dtype=torch.uint8, device=device)
