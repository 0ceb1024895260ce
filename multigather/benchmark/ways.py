"""The ways to gather that are compared: multigather's calls, and what people use today."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.utils.dlpack

import multigather

from .timing import Gather

Buffers = Sequence[torch.Tensor]

OURS = "multigather"
COMPILED = ("torch.compile", "torch.compile, combo kernels")


def _always(buffers: Buffers) -> str | None:
    return None


@dataclass(frozen=True)
class Way:
    """One way to gather.

    Attributes:
        name: for tables.
        prepare: makes the gather from the buffers and one set of indices.
        why_not: why it cannot gather from these buffers; None if it can.
        writes: whether it allocates no outputs, so that only its time, not its results, compare
            with ways that do.
        no_graph: why it cannot be captured in a CUDA graph; None if it can. It is not tried: a
            capture that fails leaves torch's allocator and random numbers as if it still went on.
    """

    name: str
    prepare: Callable[[Buffers, torch.Tensor], Gather]
    why_not: Callable[[Buffers], str | None] = _always
    writes: bool = False
    no_graph: str | None = None


def _rows(indices: torch.Tensor, buffers: Buffers) -> list[torch.Tensor]:
    return [buffer[indices] for buffer in buffers]


def _plan_out(buffers: Buffers, indices: torch.Tensor) -> Gather:
    plan = multigather.plan(*buffers)
    outs = plan(indices)
    return lambda indices: plan(indices, out=outs)


def _unchecked(buffers: Buffers, _: torch.Tensor) -> Gather:
    return lambda indices: multigather.gather(indices, *buffers, bounds="unchecked")


def _compiled(**options: bool) -> Callable[[Buffers, torch.Tensor], Gather]:
    def prepare(buffers: Buffers, indices: torch.Tensor) -> Gather:
        torch.compiler.reset()
        function = torch.compile(_rows, options=dict(options))
        function(indices, buffers)
        return lambda indices: function(indices, buffers)

    return prepare


def _seed(buffers: Buffers, indices: torch.Tensor) -> Gather:
    from . import seed_kernel

    return lambda indices: seed_kernel.gather(indices, buffers)


def _seed_why_not(buffers: Buffers) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if len(buffers) != 4:
        return "it takes exactly four buffers"
    if buffers[0].device.type != "cuda":
        return "it runs on GPUs only"
    known = all(buffer.element_size() <= 8 and not buffer.is_complex() for buffer in buffers)
    return None if known else "Triton does not know a buffer's type"


def _take(buffers: Buffers, indices: torch.Tensor) -> Gather:
    import cupy

    # cupy has no bfloat16: integers of the same size are the same bytes.
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    arrays = [cupy.from_dlpack(b.view(integers[b.element_size()])) for b in buffers]
    dtypes = [buffer.dtype for buffer in buffers]

    def gather(indices: torch.Tensor) -> list[torch.Tensor]:
        stream = cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream)
        with stream:
            chosen = cupy.from_dlpack(indices)
            taken = [cupy.take(array, chosen, axis=0) for array in arrays]
        return [
            torch.utils.dlpack.from_dlpack(each).view(dtype)
            for each, dtype in zip(taken, dtypes, strict=True)
        ]

    return gather


def _take_why_not(buffers: Buffers) -> str | None:
    if buffers[0].device.type != "cuda":
        return "it runs on GPUs only"
    if importlib.util.find_spec("cupy") is None:
        return "CuPy is not installed"
    return None if all(b.element_size() <= 8 for b in buffers) else "a buffer's type is too wide"


def _tensordict(buffers: Buffers, indices: torch.Tensor) -> Gather:
    from tensordict import TensorDict

    table = TensorDict(
        {str(number): buffer for number, buffer in enumerate(buffers)}, batch_size=[len(buffers[0])]
    )
    names = list(map(str, range(len(buffers))))

    def gather(indices: torch.Tensor) -> list[torch.Tensor]:
        rows = table[indices]
        return [rows[name] for name in names]

    return gather


def _tensordict_why_not(buffers: Buffers) -> str | None:
    if importlib.util.find_spec("tensordict") is None:
        return "tensordict is not installed"
    return None if len({len(b) for b in buffers}) == 1 else "it needs equal row counts"


WAYS = (
    Way(OURS, lambda buffers, _: lambda indices: multigather.gather(indices, *buffers)),
    Way("plan", lambda buffers, _: multigather.plan(*buffers)),
    Way("plan, out=", _plan_out, writes=True),
    Way("unchecked", _unchecked),
    Way("b[idx]", lambda buffers, _: lambda indices: _rows(indices, buffers)),
    Way(
        "index_select",
        lambda buffers, _: lambda indices: [torch.index_select(b, 0, indices) for b in buffers],
    ),
    Way("torch.compile", _compiled()),
    Way("torch.compile, combo kernels", _compiled(combo_kernels=True)),
    Way("Triton, row per program", _seed, _seed_why_not),
    Way(
        "cupy.take",
        _take,
        _take_why_not,
        no_graph="CuPy's allocator does not know of torch's graph",
    ),
    Way("tensordict", _tensordict, _tensordict_why_not),
)
BY_NAME: dict[str, Way] = {way.name: way for way in WAYS}


def named(names: Sequence[str], device: torch.device) -> list[Way]:
    """The ways of these names; by default all but, on a CPU, the compiled ones.

    On a CPU torch compiles every new number of buffers for many seconds.

    Raises:
        ValueError: there is no such way.
    """
    unknown = [name for name in names if name not in BY_NAME]
    if unknown:
        raise ValueError(f"unknown way {unknown[0]!r}; there are {', '.join(BY_NAME)}")
    if names:
        return [way for way in WAYS if way.name in names or way.name == OURS]
    return [way for way in WAYS if device.type == "cuda" or way.name not in COMPILED]
