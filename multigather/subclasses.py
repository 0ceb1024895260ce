"""Buffers of other classes than torch.Tensor: rows have the class that ``buf[indices]`` gives.

- A class with torch's own ``__torch_function__``: its rows are gathered like a tensor's and are of
  the class.
- One that has disabled it, as torch.nn.Parameter has: they are plain tensors.
- One that decides itself, by a ``__torch_function__``, ``__torch_dispatch__`` or ``__getitem__`` of
  its own: it is indexed, ``buf[rows]``, with rows that were checked.
- One that only holds other tensors, or none, has no memory to gather from and is refused.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

ORDINARY = (torch.Tensor, torch.nn.Parameter)


def all_ordinary(*tensors: Any) -> bool:
    """Whether none is of another class."""
    return all(type(tensor) in ORDINARY for tensor in tensors)


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether it is one of torch's fake tensors."""
    module = sys.modules.get("torch._subclasses.fake_tensor")
    return module is not None and isinstance(tensor, module.FakeTensor)


def is_dtensor(tensor: Any) -> bool:
    """Whether it is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def lacks_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor of another class only stands for others, as wrappers do."""
    if type(tensor) in ORDINARY or tensor.device.type == "meta" or not tensor.numel():
        return False
    try:
        return not tensor.data_ptr()
    except RuntimeError:
        return True


def keeps_class(kind: type) -> bool:
    """Whether the results of torch's operations on a class are of that class."""
    default = torch.Tensor.__torch_function__.__func__  # type: ignore[attr-defined]
    return getattr(kind.__torch_function__, "__func__", None) is default  # type: ignore[attr-defined]


def decides_itself(kind: type) -> bool:
    """Whether a class says itself what indexing it means."""
    tensordict = sys.modules.get("tensordict")
    if tensordict is not None and kind is getattr(tensordict, "MemoryMappedTensor", None):
        return False  # plain rows of a file: what it says itself is the same, buffer by buffer
    disabled: Any = torch._C._disabled_torch_function_impl
    return (
        getattr(kind, "__getitem__", None) is not torch.Tensor.__getitem__
        or kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__  # type: ignore[attr-defined]
        or not (keeps_class(kind) or kind.__torch_function__ is disabled)  # type: ignore[attr-defined]
    )


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements as a torch.Tensor, in autograd's graph too."""
    return tensor if type(tensor) in ORDINARY else tensor.as_subclass(torch.Tensor)
