"""Inputs for tests, and the expected outputs, computed on bytes by NumPy alone."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence

import numpy as np
import torch

POISON = 0xA5

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# Everything that torch can put into a strided tensor.
DTYPES = [
    dtype
    for dtype in sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype)}, key=str)
    if not dtype.is_complex or dtype in (torch.complex32, torch.complex64, torch.complex128)
]
DTYPES = [d for d in DTYPES if not str(d).startswith(("torch.q", "torch.bits"))]


def run_program(
    program: str, *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a Python program in a process of its own; what it printed. It must end well."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, *arguments],
        capture_output=True, text=True, timeout=400, check=False,
        env={**os.environ, **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done


def in_threads(number: int, work: Callable[[int], object]) -> None:
    """Call ``work(0)``, ``work(1)``, ... at once, each in a thread, and wait for all."""
    threads = [threading.Thread(target=work, args=(each,)) for each in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class Slab:
    """Poisoned memory with a buffer in its middle; everything around the buffer is a guard.

    Args:
        rows: row count.
        row_shape: shape of one row.
        dtype: element type.
        device: where.
        offset: bytes by which the buffer's address misses a multiple of 16.
        gap: bytes between one row's end and the next row's start.
        seed: for the buffer's random bytes.
    """

    GUARD = 256

    def __init__(
        self,
        rows: int,
        row_shape: Sequence[int] = (),
        dtype: torch.dtype = torch.uint8,
        device: str = "cpu",
        offset: int = 0,
        gap: int = 0,
        seed: int = 0,
    ) -> None:
        size = dtype.itemsize
        row_bytes = math.prod(row_shape) * size
        stride = row_bytes + gap
        if offset % size or gap % size:
            raise ValueError("offset and gap must be multiples of the element size")
        start = self.GUARD + offset
        length = start + max(rows * stride, 1) + self.GUARD
        self.memory = torch.full((-(-length // 16) * 16,), POISON, dtype=torch.uint8, device=device)
        window = self.memory[start : start + rows * stride].view(rows, stride)[:, :row_bytes]
        generator = torch.Generator().manual_seed(seed)
        data = torch.randint(0, 256, (rows, row_bytes), dtype=torch.uint8, generator=generator)
        window.copy_(data)
        inner = [1]
        for each in reversed(row_shape[1:]):
            inner.insert(0, inner[0] * each)
        strides = [stride // size, *(inner[: len(row_shape)])]
        typed = self.memory.view(dtype) if size <= 16 else self.memory
        self.tensor = typed.as_strided((rows, *row_shape), strides, start // size)
        self._inside = torch.zeros_like(self.memory, dtype=torch.bool)
        self._inside[start : start + rows * stride].view(rows, stride)[:, :row_bytes] = True
        self._before = self.memory.clone()

    def assert_guards_intact(self) -> None:
        """Nothing outside the buffer's rows was written."""
        outside = ~self._inside
        assert bool((self.memory[outside] == POISON).all()), "a guard byte was overwritten"

    def assert_unchanged(self) -> None:
        """Nothing at all was written."""
        assert torch.equal(self.memory, self._before), "memory was written"

    def poison(self) -> None:
        """Fill the buffer itself with poison too, as an output before a call."""
        self.memory.fill_(POISON)
        self._before = self.memory.clone()


def raw_bytes(tensor: torch.Tensor) -> np.ndarray:
    """Bytes of a tensor's elements in order, shape ``[dim 0, bytes]`` (0-d: ``[1, bytes]``)."""
    flat = tensor.detach().resolve_conj().resolve_neg()
    if flat.element_size() in INTEGERS:
        # torch copies few types if they are strided, and makes every true byte of a bool 1.
        flat = flat.view(INTEGERS[flat.element_size()])
    # Not .contiguous(): that leaves odd strides on a single element.
    flat = flat.cpu().clone(memory_format=torch.contiguous_format)
    rows = tensor.shape[0] if tensor.dim() else 1
    row_bytes = math.prod(tensor.shape[1:]) * tensor.element_size()
    if not flat.numel():
        return np.zeros((rows, row_bytes), np.uint8)
    return flat.reshape(-1).view(torch.uint8).numpy().reshape(rows, row_bytes)


def index_values(indices: torch.Tensor) -> list[int]:
    """Python integers of the indices, in order."""
    return [int(each) for each in indices.cpu().reshape(-1).tolist()]


def expected(indices: torch.Tensor, buffer: torch.Tensor, bounds: str = "raise") -> np.ndarray:
    """Bytes of ``buffer[indices]`` by the contract, ``[count, row bytes]``; bad rows are 0."""
    rows, source = buffer.shape[0], raw_bytes(buffer)
    result = np.zeros((indices.numel(), source.shape[1]), np.uint8)
    for place, index in enumerate(index_values(indices)):
        if bounds == "clip":
            index = min(max(index, 0), rows - 1)
        elif bounds == "raise" and index < 0:
            index += rows
        if 0 <= index < rows:
            result[place] = source[index]
    return result


def assert_gathered(
    output: torch.Tensor, indices: torch.Tensor, buffer: torch.Tensor, bounds: str = "raise"
) -> None:
    """The output has the contract's shape, dtype, layout and bytes."""
    assert tuple(output.shape) == (*indices.shape, *buffer.shape[1:])
    assert output.dtype == buffer.dtype
    assert not output.is_conj() and not output.is_neg()
    want = expected(indices, buffer, bounds)
    np.testing.assert_array_equal(raw_bytes(output).reshape(want.shape), want)
