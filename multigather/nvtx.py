"""A range for every call in the timelines of NVIDIA's profilers, if ``MULTIGATHER_NVTX=1``.

The variable is read once, when multigather is imported: a call that nobody profiles does not ask.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.compiler import is_dynamo_compiling

log = logging.getLogger("multigather")

Function = TypeVar("Function", bound=Callable[..., Any])


def _wanted() -> bool:
    if os.environ.get("MULTIGATHER_NVTX", "0") in ("", "0"):
        return False
    try:
        torch.cuda.nvtx.range_push("multigather")  # type: ignore[no-untyped-call]
        torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]
    except RuntimeError as error:  # a torch without it, such as a build for CPUs
        log.warning("MULTIGATHER_NVTX: no ranges, %s", error)
        return False
    return True


wanted = _wanted()


def ranged(name: str) -> Callable[[Function], Function]:
    """A decorator that puts each call into a range of this name; does nothing if none is wanted."""

    def decorate(function: Function) -> Function:
        if not wanted:
            return function

        @functools.wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            if is_dynamo_compiling():  # the graph's operators have ranges of their own
                return function(*arguments, **options)
            torch.cuda.nvtx.range_push(name)  # type: ignore[no-untyped-call]
            try:
                return function(*arguments, **options)
            finally:
                torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]

        return call  # type: ignore[return-value]

    return decorate
