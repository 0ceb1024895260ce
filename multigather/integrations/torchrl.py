"""TorchRL storages that read a batch with one gather instead of indexing each tensor.

They are TorchRL's own storages but for `get`; with `ReplayBuffer` and every sampler and writer they
are used alike, and give the same batches::

    from multigather.integrations.torchrl import LazyTensorStorage

    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(1_000_000), batch_size=256)

On a CPU, batches of several MB (frames) can cost more in page faults than in copying, with any
storage, where glibc hands their memory back to the system each time. In the environment,
MALLOC_TRIM_THRESHOLD_=1073741824 and MALLOC_MMAP_THRESHOLD_=33554432 keep it.

Needs torchrl 0.14 or newer (``pip install 'torchrl>=0.14'``).
"""

from __future__ import annotations

from typing import Any

import torch
from torchrl.data.replay_buffers import storages

from .. import containers
from ..api import gather
from ..errors import UnsupportedError

__all__ = ["LazyMemmapStorage", "LazyTensorStorage", "TensorStorage"]

# To TorchRL, as to torch, uint8 is a mask.
ROW_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8)


class _Gathering:
    """What the storages have in common; stands before a storage of TorchRL in the bases."""

    # Of TorchRL's storages.
    initialized: bool
    ndim: int
    shape: torch.Size
    _is_full: bool
    _storage: Any
    _total_shape: torch.Size

    def get(self, index: Any) -> Any:
        """Read rows: ``storage[index]``, with one gather for all tensors.

        Args:
            index: integer tensor of any shape, or a tuple of ``ndim`` of them, for rows that have
                been written. Whatever else TorchRL takes (numbers, slices, masks, lists) is read
                by TorchRL.

        Returns:
            What the storage holds (TensorDict, tensorclass, tensor or pytree), with new tensors of
            shape ``index.shape + tensor.shape[ndim:]``.

        Raises:
            IndexError: an index is outside the written rows. On a GPU the row is zero-filled, and
                the error is raised by a later call or by `multigather.check`; it names the place
                among the indices, and as the index a row beyond the storage.
            RuntimeError: nothing was written yet.
        """
        rows = None
        if self.initialized and not torch.compiler.is_compiling():
            rows = self._rows(index)
        if rows is None:
            return super().get(index)  # type: ignore[misc]
        dims = len(index) if isinstance(index, tuple) else 1
        try:
            leaves, structure = containers.flatten((self._storage,))
            tensors = [_plain(leaf, dims) for leaf in leaves]
            results = gather(rows, *tensors)
        except (TypeError, ValueError, UnsupportedError):
            # Something that is no tensor in memory: TorchRL knows how to index it, or what to say.
            return super().get(index)  # type: ignore[misc]
        if structure is None:
            return results[0]
        return structure.rebuild(results, rows.shape, dims)[0]

    def _rows(self, index: Any) -> torch.Tensor | None:
        """Row numbers in the storage, leading dimensions flattened; None where TorchRL must read.

        A storage that is not full has memory that was not written: indices beyond the written part
        become ones beyond the memory, and negative ones count from the end of that part.
        """
        parts: tuple[Any, ...] = index if isinstance(index, tuple) else (index,)
        if not parts or (isinstance(index, tuple) and len(parts) != self.ndim):
            return None
        for part in parts:
            if (
                not isinstance(part, torch.Tensor)
                or part.dtype not in ROW_DTYPES
                or part.shape != parts[0].shape
            ):
                return None
        first: torch.Tensor = parts[0]
        if len(parts) == 1 and self._is_full:
            return first
        shape = self.shape[: len(parts)]
        if first.device.type == "cpu":
            # TorchRL's own way counts negative indices from the end, and names bad ones.
            for part, size in zip(parts, shape, strict=True):
                if part.numel():
                    low, high = part.aminmax()
                    if low.item() < 0 or high.item() >= size:
                        return None
            rows = first
            for part, size in zip(parts[1:], shape[1:], strict=True):
                rows = rows.to(torch.int64) * size + part
            return rows
        # No look at the values on a GPU, which would wait for it.
        rows = torch.zeros_like(first, dtype=torch.int64)
        bad = torch.zeros_like(first, dtype=torch.bool)
        for part, size in zip(parts, shape, strict=True):
            wide = part.to(torch.int64)
            wide = torch.where(wide < 0, wide + size, wide)
            bad |= (wide < 0) | (wide >= size)
            rows = rows * size + wide
        return rows.masked_fill_(bad, self._total_shape[: len(parts)].numel())


def _plain(leaf: Any, dims: int) -> torch.Tensor:
    """A storage's tensor as a buffer of rows, without the class that maps it to a file."""
    if not isinstance(leaf, torch.Tensor):
        raise TypeError(f"the storage holds a {type(leaf).__name__}")
    if type(leaf) is not torch.Tensor:
        leaf = leaf.as_subclass(torch.Tensor)
    tensor: torch.Tensor = leaf
    if dims == 1:
        return tensor
    if tensor.dim() < dims:
        raise ValueError("the storage holds what only tensordict can index")
    try:
        # No -1 for the rows: a tensor without elements leaves open what it stands for.
        return tensor.view(tensor.shape[:dims].numel(), *tensor.shape[dims:])
    except RuntimeError as error:
        raise ValueError("the storage's dimensions have strides that rows cannot have") from error


class TensorStorage(_Gathering, storages.TensorStorage):  # type: ignore[misc]
    """`torchrl.data.TensorStorage` whose batches are read with one gather."""


class LazyTensorStorage(TensorStorage, storages.LazyTensorStorage):  # type: ignore[misc]
    """`torchrl.data.LazyTensorStorage` whose batches are read with one gather."""


class LazyMemmapStorage(LazyTensorStorage, storages.LazyMemmapStorage):  # type: ignore[misc]
    """`torchrl.data.LazyMemmapStorage` whose batches are read with one gather."""
