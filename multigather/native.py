"""The compiled extension `_native`, if this machine has it and it is wanted.

It does in C what `shortcut` otherwise generates as Python, and copies packed groups on a CPU, for
which there are torch operations too: nothing but time depends on it. It is missing where the
package was installed without a C compiler, and ``MULTIGATHER_NATIVE=off`` leaves it alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

MODES = ("on", "off")


def _load() -> tuple[Any, str]:
    """The extension, or None; and what to say of it."""
    mode = os.environ.get("MULTIGATHER_NATIVE") or "on"
    if mode not in MODES:
        raise ValueError(f"MULTIGATHER_NATIVE must be one of {', '.join(MODES)}, got {mode!r}")
    if mode == "off":
        return None, "not used: MULTIGATHER_NATIVE=off"
    try:
        from . import _native
    except ImportError as error:
        return None, f"not used: {error}"
    return _native, f"used, {'addresses' if read_tensors(_native) else 'methods'} of tensors"


def read_tensors(module: ModuleType) -> bool:
    """Let the extension read tensors through torch's C interface, if it can be seen to work.

    A tensor's Python object holds its ``at::Tensor``, which is one pointer, and ``_cdata`` is that
    pointer: where they agree for different tensors is where it lies. Two functions of the C
    interface that torch keeps stable for compiled models, ``aoti_torch_get_data_ptr`` and
    ``aoti_torch_get_numel``, take it from there. Their answers must be those of the methods.
    """
    cpu = torch.device("cpu")
    samples = [
        torch.empty(0, device=cpu),
        torch.arange(7, device=cpu),
        torch.arange(12.0, device=cpu).view(3, 4)[1:, ::2],
    ]
    if any(type(each) is not torch.Tensor for each in samples):  # imported while torch traces
        return False
    try:
        library = ctypes.CDLL(torch._C.__file__)
        functions = (library.aoti_torch_get_data_ptr, library.aoti_torch_get_numel)
    except (OSError, AttributeError):
        return False
    addresses = [ctypes.cast(function, ctypes.c_void_p).value for function in functions]
    word = ctypes.sizeof(ctypes.c_void_p)
    for offset in range(object.__basicsize__, torch.Tensor.__basicsize__, word):
        held = [ctypes.c_void_p.from_address(id(each) + offset).value for each in samples]
        if held == [each._cdata for each in samples]:
            module.read_tensors(torch.Tensor, offset, *addresses)
            if all(module.facts_of(each) == (each.data_ptr(), each.numel()) for each in samples):
                return True
            module.read_tensors(None, 0, 0, 0)
    return False


extension, description = _load()


@contextlib.contextmanager
def without() -> Iterator[None]:
    """What is learned inside is learned as if there were no extension."""
    global extension
    before, extension = extension, None
    try:
        yield
    finally:
        extension = before
