"""The compiled extension `_native`, if this machine has it and it is wanted.

It does in C what `shortcut` otherwise generates as Python, and it gathers on a CPU, where otherwise
torch's operations do; so nothing but times depend on it. It is missing where the package was
installed without a C compiler, and ``MULTIGATHER_NATIVE=off`` leaves it alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from .fork import in_child

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
    use_threads(_native)
    return _native, f"used, {'addresses' if read_tensors(_native) else 'methods'} of tensors"


def read_tensors(module: ModuleType) -> bool:
    """Let the extension read tensors through torch's C interface, if it can be seen to work.

    A tensor's Python object holds its ``at::Tensor``, which is one pointer, and ``_cdata`` is that
    pointer: where they agree for different tensors is where it lies. Functions of the C
    interface that torch keeps stable for compiled models, ``aoti_torch_get_data_ptr`` and others,
    take it from there. Their answers must be those of the methods.
    """
    cpu = torch.device("cpu")
    samples = [
        torch.empty(0, device=cpu),
        torch.arange(7, device=cpu),
        torch.arange(12.0, device=cpu).view(3, 4)[1:, ::2],
    ]
    if any(type(each) is not torch.Tensor for each in samples):  # imported while torch traces
        return False
    names = ("data_ptr", "numel", "storage_size", "storage_offset")
    try:
        library = ctypes.CDLL(torch._C.__file__)
        functions = [getattr(library, f"aoti_torch_get_{name}") for name in names]
    except (OSError, AttributeError):
        return False

    def facts(tensor: torch.Tensor) -> tuple[int, ...]:
        storage = tensor.untyped_storage()
        return tensor.data_ptr(), tensor.numel(), storage.nbytes(), int(tensor.storage_offset())

    addresses = [ctypes.cast(function, ctypes.c_void_p).value for function in functions]
    word = ctypes.sizeof(ctypes.c_void_p)
    for offset in range(object.__basicsize__, torch.Tensor.__basicsize__, word):
        held = [ctypes.c_void_p.from_address(id(each) + offset).value for each in samples]
        if held == [each._cdata for each in samples]:
            module.read_tensors(torch.Tensor, offset, *addresses)
            if all(module.facts_of(each) == facts(each) for each in samples):
                return True
            module.read_tensors(None, 0, 0, 0, 0, 0)
    return False


def use_threads(module: ModuleType) -> None:
    """Let the extension gather on torch's own CPU threads, as many as torch would use.

    A second pool beside torch's would wait for work while torch's has some: idle threads of OpenMP
    do so on a core for milliseconds. Torch's library leads to the OpenMP that it was linked to,
    and through it GNU's entry points are found, which the other OpenMPs have too. Where one is
    missing there is one thread.
    """
    names = ("GOMP_parallel", "omp_get_thread_num", "_ZN2at15get_num_threadsEv")
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        functions = [getattr(library, name) for name in names]
    except (OSError, AttributeError):
        return
    module.use_threads(*(ctypes.cast(each, ctypes.c_void_p).value for each in functions))


@in_child
def _one_thread() -> None:
    """The threads of the parent do not come along, and OpenMP would wait for them."""
    if extension is not None:
        extension.use_threads(0, 0, 0)


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
