"""Random gathers against an oracle in NumPy, each replayable by one command.

    python tests/fuzz.py --seed 3 --cases 10000
    python tests/fuzz.py --device cuda --backend cupy --cases 100000 --processes 16

A case is a few buffers and a series of calls that gather from them: buffers of every type, with
gaps between rows, expanded, transposed, misaligned, packed or empty; indices of every type, shape
and stride, valid, negative and bad; every bounds mode; through `gather`, a plan and ``out=``. The
calls of a case share their buffers, because most of the code in a repeated call is for repetition.
Others go through dicts that change between calls, through gradients, forward-mode AD and vmap, or
bring NumPy arrays of types that torch lacks; any may run under another default device.
Some calls are misused in one place, by a wrong type, shape, device or option: these must be refused
by the documented exception, with nothing written into ``out=``. A case that fails is made smaller
as long as it fails, and printed as a command.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import operator
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

if __name__ == "__main__":
    os.environ.setdefault("MULTIGATHER_TUNING", "off")
    if "cuda" not in sys.argv:
        os.environ["TRITON_INTERPRET"] = "1"

import numpy
import torch
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad

import multigather
from multigather import api, dispatch
from multigather.backends import _cupy

DTYPES = (
    "uint8", "int8", "bool", "int16", "bfloat16", "float16", "int32", "float32", "int64", "float64",
    "complex64", "complex128", "float8_e4m3fn", "uint16", "uint32", "uint64",
)  # fmt: skip
INDEX_DTYPES = ("int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64")
BOUNDS = ("raise", "raise", "fill", "clip", "unchecked")
WAYS = ("gather", "gather", "plan", "out", "dict", "grad", "jvp", "vmap", "numpy")
LAYOUTS = ("plain", "plain", "gaps", "expanded", "shifted", "misaligned")
# Of which sums of up to 40 ones are exact.
SUMMED = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")
# NumPy's types of so many bytes, mostly such as torch has not.
ARRAYS = {
    1: ("u1", "S1", "V1", "?"),
    2: (">i2", ">f2", "S2", "V2", [("a", "u1"), ("b", "i1")]),
    4: (">i4", ">f4", "U1", "V4", [("a", ">i2"), ("b", "u2")]),
    8: (">i8", "M8[ns]", "m8[us]", ">f8", "S8", [("a", "u1"), ("b", ">i4"), ("c", "S3")]),
    16: (">c16", "V16", "S16", "U4"),
}

POISON = 0xA5

Case = dict[str, Any]


@dataclass
class Arguments:
    """The arguments of a call of `multigather.gather` with ``out=``, to be spoilt in one place."""

    indices: Any
    buffers: list[Any]
    outs: Any
    options: dict[str, Any]

    def replace(self, where: str, make: Callable[[Any], Any]) -> None:
        """Put something else in the place of the indices, the last buffer or the last output."""
        if where == "indices":
            self.indices = make(self.indices)
        else:
            items = self.buffers if where == "buffer" else self.outs
            items[-1] = make(items[-1])


def spoil(where: str, make: Callable[[Any], Any]) -> Callable[[Arguments], None]:
    return lambda arguments: arguments.replace(where, make)


def like(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: torch.zeros(tensor.shape, dtype=dtype, device=tensor.device)


def option(**options: Any) -> Callable[[Arguments], None]:
    return lambda arguments: arguments.options.update(options)


def outputs(make: Callable[[list[Any]], Any]) -> Callable[[Arguments], None]:
    def change(arguments: Arguments) -> None:
        arguments.outs = make(arguments.outs)

    return change


def freed(left: int) -> Callable[[torch.Tensor], Any]:
    """A tensor whose storage was freed, but for so many bytes."""

    def make(tensor: torch.Tensor) -> Any:
        shape = tensor.shape if tensor.numel() else (3, 4)
        copy = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
        size = copy.numel() * copy.element_size()
        copy.untyped_storage().resize_(min(left, size - 1))
        return copy

    return make


def fake(tensor: torch.Tensor) -> torch.Tensor:
    return FakeTensorMode().from_tensor(tensor)


# What spoils a call, and what it must raise.
MISUSES: dict[str, tuple[type[Exception], Callable[[Arguments], None]]] = {
    "float indices": (TypeError, spoil("indices", like(torch.float32))),
    "mask": (TypeError, spoil("indices", like(torch.bool))),
    "complex indices": (TypeError, spoil("indices", like(torch.complex64))),
    "list of indices": (TypeError, spoil("indices", lambda i: i.tolist())),
    "no indices": (TypeError, spoil("indices", lambda i: None)),
    "sparse indices": (TypeError, spoil("indices", lambda i: like(torch.int64)(i).to_sparse())),
    "meta indices": (ValueError, spoil("indices", lambda i: i.to("meta"))),
    "fake indices": (TypeError, spoil("indices", fake)),
    "freed indices": (ValueError, spoil("indices", lambda i: freed(1)(like(torch.int64)(i)))),
    "fake buffer": (TypeError, spoil("buffer", fake)),
    "freed buffer": (ValueError, spoil("buffer", freed(0))),
    "cut buffer": (ValueError, spoil("buffer", freed(7))),
    "text": (TypeError, spoil("buffer", lambda b: "rows")),
    "number": (TypeError, spoil("buffer", lambda b: 3.5)),
    "nested list": (TypeError, spoil("buffer", lambda b: [[1, 2], [3]])),
    "dict of numbers": (TypeError, spoil("buffer", lambda b: {"a": b, "b": 1})),
    "scalar": (ValueError, spoil("buffer", lambda b: torch.zeros((), device=b.device))),
    "sparse": (TypeError, spoil("buffer", lambda b: torch.ones(3, 3, device=b.device).to_sparse())),
    "meta buffer": (ValueError, spoil("buffer", lambda b: b.to("meta"))),
    "bounds": (ValueError, option(bounds="wrap")),
    "bounds of a type": (ValueError, option(bounds=1)),
    "bounds none": (ValueError, option(bounds=None)),
    "backend": (ValueError, option(backend="numpy")),
    "backend of a type": (ValueError, option(backend=["torch"])),
    "keyword": (TypeError, option(bound="raise")),
    "long output": (ValueError, spoil("out", lambda o: o.new_empty((len(o) + 1, *o.shape[1:])))),
    "wide output": (ValueError, spoil("out", lambda o: o.new_empty((*o.shape, 1)))),
    "type of output": (ValueError, spoil("out", lambda o: torch.empty(
        o.shape, dtype=torch.int8 if o.dtype != torch.int8 else torch.uint8, device=o.device))),
    "meta output": (ValueError, spoil("out", lambda o: o.to("meta"))),
    "output of a type": (TypeError, spoil("out", lambda o: 7)),
    "array for output": (ValueError, spoil("out", lambda o: numpy.zeros((3, 1, 4, 1, 5)))),
    "freed output": (ValueError, spoil("out", lambda o: freed(0)(o) if o.numel() else None)),
    "no output": (ValueError, spoil("out", lambda o: None)),
    "too few outputs": (ValueError, outputs(lambda outs: outs[:-1])),
    "too many outputs": (ValueError, outputs(lambda outs: [*outs, outs[0]])),
    "output alone": (ValueError, outputs(lambda outs: outs[0])),
    "outputs in a dict": (ValueError, outputs(lambda outs: dict(enumerate(outs)))),
    "outputs in an iterator": (ValueError, outputs(iter)),
}  # fmt: skip


def make(draw: random.Random, transposed: bool) -> Case:
    """A random case; ``transposed`` allows rows that are not contiguous."""
    buffers = []
    # Of as many rows, for they share a slab; in a third of the cases, most buffers.
    packed_rows = draw.choice((1, 2, 5, 33, 100))
    packing = 0.8 if draw.random() < 0.3 else 0.0
    for _ in range(draw.choice((1, 1, 2, 3, 5, 9))):
        sizes = (1, 2, 3, 7, 16, 33) if draw.random() < 0.9 else (0, 1, 100)
        shape = [draw.choice(sizes) for _ in range(draw.choice((0, 0, 1, 1, 2)))]
        layouts = (*LAYOUTS, "transposed") if transposed and len(shape) == 2 else LAYOUTS
        rows, layout = draw.choice((1, 2, 5, 33, 100)), draw.choice(layouts)
        if draw.random() < packing:
            rows, layout = packed_rows, "packed"
        buffers.append({"dtype": draw.choice(DTYPES), "shape": [rows, *shape], "layout": layout})
    bounds = draw.choice(BOUNDS)
    dtype = draw.choice(INDEX_DTYPES[:2] if draw.random() < 0.6 else INDEX_DTYPES)
    rows = min(buffer["shape"][0] for buffer in buffers)
    limits = torch.iinfo(getattr(torch, dtype))
    calls = []
    for _ in range(draw.randint(1, 8)):
        lowest = -rows if bounds == "raise" and draw.random() < 0.3 else 0
        count = draw.choice((0, 1, 2, 2, 2, 3, 8, 40))
        values = [draw.randrange(lowest, rows) for _ in range(count)]
        if count and bounds != "unchecked" and draw.random() < 0.2:
            far = draw.choice((rows, rows + draw.randrange(1, 99), -rows - 1, -1, 2**31, -(2**40)))
            values[draw.randrange(count)] = far
        values = [min(max(value, limits.min), limits.max) for value in values]
        if bounds == "unchecked":
            values = [min(max(value, 0), rows - 1) for value in values]
        calls.append(
            {
                "values": values,
                "shape": draw.choice(("flat", "flat", "flat", "column", "strided", "misaligned")),
                "way": draw.choice(WAYS),
                "misuse": draw.choice(tuple(MISUSES)) if draw.random() < 0.1 else None,
                "default": draw.choice(("meta", "cuda")) if draw.random() < 0.2 else None,
                "pick": draw.randrange(1000),
            }
        )
    return {"buffers": buffers, "bounds": bounds, "dtype": dtype, "calls": calls}


@contextlib.contextmanager
def packed_from_one_index() -> Iterator[None]:
    """Packed buffers are read row by row however few the indices are."""
    before, _cupy.PACKED_FROM = _cupy.PACKED_FROM, 1
    api.forget()
    try:
        yield
    finally:
        _cupy.PACKED_FROM = before
        api.forget()


def run(case: Case, device: str, backend: str | None) -> str | None:
    """Make the calls of a case; what went wrong, or None."""
    if any(spec["layout"] == "packed" for spec in case["buffers"]):
        with packed_from_one_index():
            return run_calls(case, device, backend)
    return run_calls(case, device, backend)


def run_calls(case: Case, device: str, backend: str | None) -> str | None:
    """`run` with things as they are."""
    content = numpy.random.default_rng(0)
    pairs = [buffer_of(spec, content, device) for spec in case["buffers"]]
    buffers = [buffer for buffer, _ in pairs]
    together = [k for k, spec in enumerate(case["buffers"]) if spec["layout"] == "packed"]
    for k, view in zip(together, multigather.pack(*(buffers[k] for k in together)), strict=True):
        buffers[k] = view
    options = {"bounds": case["bounds"], "backend": backend}
    plan = multigather.plan(*buffers, **options)
    table = dict(enumerate(buffers))
    of_table = multigather.plan(table, None, **options)
    for number, call in enumerate(case["calls"]):
        indices = indices_of(call, case["dtype"], device)
        where = f"call {number} ({call['way']})"
        if call.get("misuse"):
            with default_device(call.get("default"), device):
                text = misuse(call["misuse"], indices, buffers, options)
            if text:
                return f"{where}: {text}"
            continue
        bad = None
        expected = []
        for _, rows in pairs:
            wanted, wrong = oracle(rows, call["values"], case["bounds"])
            expected.append(wanted)
            bad = bad if bad is not None else wrong
        outs = None
        if call["way"] == "out":
            outs = [
                torch.empty((*indices.shape, *b.shape[1:]), dtype=b.dtype, device=device)
                for b in buffers
            ]
        error = results = text = None
        try:
            with default_device(call.get("default"), device):
                if call["way"] == "plan":
                    results = plan(indices)
                elif call["way"] == "dict":
                    text, results = through_dict(call, indices, table, buffers, of_table, options)
                elif call["way"] in DERIVED:
                    text, results = DERIVED[call["way"]](indices, buffers, options)
                elif call["way"] == "numpy" and device == "cpu":
                    text, results = through_numpy(call, indices, buffers, options)
                else:
                    results = multigather.gather(indices, *buffers, out=outs, **options)
                multigather.check()
        except IndexError as found:
            error = found
            with contextlib.suppress(IndexError):
                multigather.check()  # a batch is several gathers, and each has met the bad index
        if text:
            return f"{where}: {text}"
        if (error is None) != (bad is None):
            return f"{where}: index {bad} is bad, and the error was {error!r}"
        if error is not None and str(bad) not in str(error):
            return f"{where}: index {bad} is bad, and the error names another: {error}"
        if results is None:
            continue  # on a CPU, or for an empty buffer, the call itself raised
        for place, (result, buffer, wanted) in enumerate(
            zip(results, buffers, expected, strict=True)
        ):
            shape = (*indices.shape, *buffer.shape[1:])
            if tuple(result.shape) != shape or result.dtype != buffer.dtype:
                return f"{where}: output {place} is {result.dtype} {tuple(result.shape)}"
            if bytes_of(result) != wanted:
                return f"{where}: output {place} has other bytes"
    return None


@contextlib.contextmanager
def default_device(name: str | None, device: str) -> Iterator[None]:
    """Where tensors are made that name no device; a CPU's cases have no "cuda" to make them on."""
    if name is None or (name == "cuda" and device == "cpu"):
        yield
    else:
        with torch.device(name):
            yield


def through_dict(
    call: dict[str, Any],
    indices: torch.Tensor,
    table: dict[Any, Any],
    buffers: list[torch.Tensor],
    plan: multigather.Plan,
    options: dict[str, Any],
) -> tuple[str | None, Any]:
    """Gather from a dict that is changed then; its plan stays with what it was made of."""
    pick = call["pick"]
    table.clear()  # a call that raised left it changed
    table.update(enumerate(buffers))
    if pick % 4 == 0:  # replaced, and put back by the next call
        table[pick % len(buffers)] = torch.zeros(1, 2, device=indices.device)
    elif pick % 4 == 1:
        table["more"] = buffers[0]
    elif pick % 4 == 2:
        del table[pick % len(buffers)]
    results = plan(indices)[0]
    table.clear()
    table.update(enumerate(buffers))
    (again, nothing) = multigather.gather(indices, table, None, **options)
    if nothing is not None or list(again) != list(table) or list(results) != list(table):
        return "the dict has other keys", None
    for key in table:
        if bytes_of(again[key]) != bytes_of(results[key]):
            return f"the plan of a dict differs in {key}", None
    return None, list(results.values())


def rows_of(indices: torch.Tensor, rows: int, bounds: str) -> numpy.ndarray:
    """The row that each index selects, by NumPy; -1 for none."""
    values = numpy.array([int(each) for each in indices.reshape(-1).tolist()], dtype=object)
    if bounds == "clip":
        return numpy.clip(values, 0, rows - 1).astype(numpy.int64)
    if bounds == "raise":
        values = numpy.where(values < 0, values + rows, values)
    inside = numpy.array([0 <= value < rows for value in values], dtype=bool)
    return numpy.where(inside, values, -1).astype(numpy.int64)


def is_summed(buffer: torch.Tensor) -> bool:
    return str(buffer.dtype).removeprefix("torch.") in SUMMED


def through_grad(
    indices: torch.Tensor, buffers: list[torch.Tensor], options: dict[str, Any]
) -> tuple[str | None, Any]:
    """Gather with gradients: of ones, it is how often a row was selected."""
    leaves = [b.detach().requires_grad_() if is_summed(b) else b for b in buffers]
    results = multigather.gather(indices, *leaves, **options)
    for place, (leaf, rows) in enumerate(zip(leaves, results, strict=True)):
        if not leaf.requires_grad:
            continue
        ones = torch.ones_like(rows)
        (gradient,) = torch.autograd.grad(rows, leaf, ones, retain_graph=True)
        selected = rows_of(indices, len(leaf), options["bounds"])
        counts = numpy.bincount(selected[selected >= 0], minlength=len(leaf))
        want = torch.from_numpy(counts).to(gradient.dtype).to(gradient.device)
        if not torch.equal(gradient, want.view(-1, *[1] * (leaf.dim() - 1)).expand(leaf.shape)):
            return f"gradient {place} is wrong", None
    return None, [rows.detach() for rows in results]


def through_jvp(
    indices: torch.Tensor, buffers: list[torch.Tensor], options: dict[str, Any]
) -> tuple[str | None, Any]:
    """Gather dual numbers, whose tangents are their row numbers and 1."""
    with forward_ad.dual_level():
        duals = []
        # Torch makes no tangent of one row that stands for all.
        has_tangent = [is_summed(b) and (len(b) < 2 or b.stride(0) > 0) for b in buffers]
        for buffer, has in zip(buffers, has_tangent, strict=True):
            if has:
                numbers = torch.arange(1, len(buffer) + 1, device=buffer.device)
                numbers = numbers.view(-1, *[1] * (buffer.dim() - 1)).expand(buffer.shape)
                duals.append(forward_ad.make_dual(buffer, numbers.to(buffer.dtype)))
            else:
                duals.append(buffer)
        found = multigather.gather(indices, *duals, **options)
        results = []
        for place, (buffer, rows) in enumerate(zip(buffers, found, strict=True)):
            primal, tangent = forward_ad.unpack_dual(rows)
            results.append(primal)
            if has_tangent[place]:
                selected = rows_of(indices, len(buffer), options["bounds"]) + 1
                want = torch.from_numpy(selected).to(buffer.dtype).to(buffer.device)
                want = want.view(*indices.shape, *[1] * (buffer.dim() - 1)).expand(rows.shape)
                if tangent is None or not torch.equal(tangent, want):
                    return f"tangent {place} is wrong", None
    return None, results


def through_vmap(
    indices: torch.Tensor, buffers: list[torch.Tensor], options: dict[str, Any]
) -> tuple[str | None, Any]:
    """Gather a batch of indices, and from a batch of buffers of which each is the same."""
    parts = 2 if len(indices) % 2 == 0 and len(indices) else 1
    batch = indices.reshape(parts, -1, *indices.shape[1:])
    results = torch.func.vmap(lambda each: multigather.gather(each, *buffers, **options))(batch)
    whole = [
        rows.reshape(*indices.shape, *buffer.shape[1:])
        for rows, buffer in zip(results, buffers, strict=True)
    ]
    twice = [stacked(b, len(b.shape) % 2) if is_summed(b) else b for b in buffers]
    dims = [len(b.shape) % 2 if is_summed(b) else None for b in buffers]
    again = torch.func.vmap(
        lambda *each: multigather.gather(indices, *each, **options),
        in_dims=tuple(dims),
        out_dims=tuple(0 if dim is not None else None for dim in dims),
    )(*twice) if any(dim is not None for dim in dims) else results  # fmt: skip
    for place, (dim, rows) in enumerate(zip(dims, again, strict=True)):
        for each in rows if dim is not None else ():
            if bytes_of(each.contiguous()) != bytes_of(whole[place]):
                return f"output {place} of a batch of buffers differs", None
    return None, whole


def stacked(buffer: torch.Tensor, dim: int) -> torch.Tensor:
    """Twice the same; copied as bytes, since torch's own copy of a misaligned tensor may crash."""
    copy = buffer.unsqueeze(-1).view(torch.uint8).clone(memory_format=torch.contiguous_format)
    copy = copy.view(buffer.dtype).squeeze(-1)
    return torch.stack((copy, copy), dim)


DERIVED: dict[str, Callable[..., tuple[str | None, Any]]] = {
    "grad": through_grad,
    "jvp": through_jvp,
    "vmap": through_vmap,
}


def through_numpy(
    call: dict[str, Any],
    indices: torch.Tensor,
    buffers: list[torch.Tensor],
    options: dict[str, Any],
) -> tuple[str | None, Any]:
    """Gather NumPy arrays of the same bytes, into new ones and into given ones."""
    pick = call["pick"]
    arrays = []
    for number, buffer in enumerate(buffers):
        kinds = ARRAYS[buffer.element_size()]
        dtype = numpy.dtype(kinds[(pick + number) % len(kinds)])
        memory = numpy.frombuffer(bytearray(bytes_of(buffer)) or bytearray(1), numpy.uint8)
        whole = memory[: buffer.numel() * dtype.itemsize]
        arrays.append(numpy.ndarray(tuple(buffer.shape), dtype, whole))
    number = indices.numpy()
    if pick % 3 == 0:
        number = number.astype(number.dtype.newbyteorder(">"))
    elif pick % 3 == 1:
        record = numpy.zeros(number.shape, [("flag", "u1"), ("row", number.dtype)])
        record["row"] = number
        number = record["row"]
    results = multigather.gather(number, *arrays, **options)
    outs = [numpy.zeros(rows.shape, rows.dtype) for rows in results]
    multigather.gather(number, *arrays, out=outs, **options)
    found = []
    for place, (array, rows, out, buffer) in enumerate(
        zip(arrays, results, outs, buffers, strict=True)
    ):
        if rows.dtype != array.dtype or rows.tobytes() != out.tobytes():
            return f"array {place} is {rows.dtype}, or ``out=`` differs", None
        memory = torch.frombuffer(bytearray(rows.tobytes()) or bytearray(16), dtype=torch.uint8)
        size = rows.size * rows.dtype.itemsize
        found.append(memory[:size].view(buffer.dtype).view(*rows.shape))
    return None, found


def misuse(
    name: str, indices: torch.Tensor, buffers: list[torch.Tensor], options: dict[str, Any]
) -> str | None:
    """Make a call that is spoilt in one place; what went wrong, or None."""
    kind, change = MISUSES[name]
    outs = []
    for buffer in buffers:
        shape = (*indices.shape, *buffer.shape[1:])
        size = int(numpy.prod(shape, dtype=int)) * buffer.element_size()
        memory = torch.full((size,), POISON, dtype=torch.uint8, device=indices.device)
        outs.append(memory.view(buffer.dtype).view(shape))
    given = list(outs)
    arguments = Arguments(indices, list(buffers), given, dict(options))
    change(arguments)
    # Where the outputs are not what is wrong, the call without them must be refused too.
    same = arguments.outs is given and all(map(operator.is_, given, outs))
    for out in (arguments.outs, None) if same else (arguments.outs,):
        try:
            multigather.gather(arguments.indices, *arguments.buffers, out=out, **arguments.options)
        except kind as error:
            if type(error) is not kind or not str(error):
                return f"{name} raised {error!r}, not a {kind.__name__} with a text"
        except Exception as error:
            return f"{name} raised {error!r}, not a {kind.__name__}"
        else:
            return f"{name} was not refused"
        if any(byte != POISON for each in outs for byte in bytes_of(each)):
            return f"{name} was refused, but an output was written"
    multigather.check()  # nothing is left behind
    return None


def buffer_of(
    spec: dict[str, Any], content: numpy.random.Generator, device: str
) -> tuple[torch.Tensor, list[bytes]]:
    """A buffer of random bytes, and the bytes of each of its rows."""
    dtype = getattr(torch, spec["dtype"])
    rows, *row_shape = spec["shape"]
    elements = int(numpy.prod(row_shape, dtype=int))
    stride = elements + 3 if spec["layout"] == "gaps" else elements
    start = 1 if spec["layout"] == "shifted" else 0
    made = 1 if spec["layout"] == "expanded" else rows
    size = (start + made * stride) * dtype.itemsize
    memory = content.integers(0, 256, max(size, 1), dtype=numpy.uint8)
    tensor = torch.from_numpy(memory.copy())[:size].to(device)
    tensor = misaligned(tensor, dtype) if spec["layout"] == "misaligned" else tensor.view(dtype)
    step = 0 if spec["layout"] == "expanded" else stride
    inner = [int(numpy.prod(row_shape[k + 1 :], dtype=int)) for k in range(len(row_shape))]
    tensor = tensor.as_strided((rows, *row_shape), (step, *inner), start)
    first = start * dtype.itemsize
    starts = [first + (0 if made == 1 else row * stride * dtype.itemsize) for row in range(rows)]
    flat = [memory[at : at + elements * dtype.itemsize] for at in starts]
    if spec["layout"] == "transposed":
        tensor = tensor.transpose(1, 2)
        flat = [
            row.reshape(*row_shape, dtype.itemsize).transpose(1, 0, 2).reshape(-1) for row in flat
        ]
    return tensor, [row.tobytes() for row in flat]


def misaligned(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Elements of these bytes at an odd address."""
    memory = torch.zeros(len(data) + 16, dtype=torch.uint8, device=data.device)
    memory[1 : 1 + len(data)] = data
    construct: Any = torch._C._construct_storage_from_data_pointer
    storage = construct(memory.data_ptr() + 1, data.device, len(data))
    tensor = torch.empty(0, dtype=dtype, device=data.device)
    tensor.set_(storage, 0, (len(data) // dtype.itemsize,), (1,))
    KEPT.append(memory)  # a storage made of an address keeps nothing
    del KEPT[:-10_000]
    return tensor


KEPT: list[torch.Tensor] = []


def indices_of(call: dict[str, Any], dtype: str, device: str) -> torch.Tensor:
    values = torch.tensor(numpy.array(call["values"], dtype=dtype), device=device)
    if call["shape"] == "column":
        return values.view(-1, 1)
    if call["shape"] == "strided":
        return torch.stack((values, torch.zeros_like(values)), 1)[:, 0]
    if call["shape"] == "misaligned":
        return misaligned(values.unsqueeze(1).view(torch.uint8).view(-1), values.dtype)
    return values


def oracle(rows: list[bytes], values: list[int], bounds: str) -> tuple[bytes, int | None]:
    """The bytes of the rows, one after another, and the first index that is bad."""
    found, bad = [], None
    for value in values:
        row = value + len(rows) if value < 0 and bounds == "raise" else value
        if bounds == "clip":
            row = min(max(row, 0), len(rows) - 1)
        if 0 <= row < len(rows):
            found.append(rows[row])
        else:
            found.append(bytes(len(rows[0])))
            bad = value if bad is None and bounds == "raise" else bad
    return b"".join(found), bad


def bytes_of(tensor: torch.Tensor) -> bytes:
    if not tensor.numel():
        return b""
    return tensor.unsqueeze(-1).view(torch.uint8).reshape(-1).cpu().numpy().tobytes()


def smaller(case: Case) -> Iterator[Case]:
    """Cases with a part left out."""
    for name in ("calls", "buffers"):
        for place in range(len(case[name])):
            if len(case[name]) > 1:
                yield {**case, name: case[name][:place] + case[name][place + 1 :]}
    for place, call in enumerate(case["calls"]):
        for at in range(len(call["values"])):
            less = {**call, "values": call["values"][:at] + call["values"][at + 1 :]}
            yield {**case, "calls": [*case["calls"][:place], less, *case["calls"][place + 1 :]]}


def shrink(case: Case, device: str, backend: str | None) -> Case:
    """The smallest case that still fails, leaving out one part after another."""
    for candidate in smaller(case):
        if run(candidate, device, backend):
            return shrink(candidate, device, backend)
    return case


def case_of(seed: int, number: int, backend: str | None) -> Case:
    """Case ``number`` of a seed."""
    return make(random.Random(f"{seed}/{number}"), transposed=backend in (None, "torch"))


def faults_in(case: Case) -> int:
    """How many calls of a case are misused, or have an index that the mode calls bad."""
    rows = min(buffer["shape"][0] for buffer in case["buffers"])
    lowest = -rows if case["bounds"] == "raise" else 0
    return sum(
        bool(call["misuse"]) or any(not lowest <= value < rows for value in call["values"])
        for call in case["calls"]
    )


def failure(seed: int, number: int, device: str, backend: str | None) -> str | None:
    """Run case ``number`` of a seed; if it fails, why, and the command that repeats it."""
    case = case_of(seed, number, backend)
    text = run(case, device, backend)
    if text is None:
        return None
    case = shrink(case, device, backend)
    option = f" --backend {backend}" if backend else ""
    command = f"python tests/fuzz.py --device {device}{option} --case '{json.dumps(case)}'"
    return f"{run(case, device, backend) or text}\n  {command}"


PASSED = re.compile(r"passed: (?P<calls>\d+) calls, (?P<faults>\d+) of them bad or misused")


def passed_text(cases: int, seed: int, calls: int, faults: int) -> str:
    return f"{cases} cases of seed {seed} passed: {calls} calls, {faults} of them bad or misused"


def shared(chosen: argparse.Namespace) -> int:
    """Run the cases in several processes; the exit status."""
    options = ["--seed", str(chosen.seed), "--device", chosen.device]
    options += ["--backend", chosen.backend] if chosen.backend else []
    bounds = [chosen.cases * share // chosen.processes for share in range(chosen.processes + 1)]
    running = []
    for first, last in itertools.pairwise(bounds):
        part = ["--first", str(chosen.first + first), "--cases", str(last - first)]
        command = [sys.executable, __file__, *options, *part]
        running.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    failed = calls = faults = 0
    for process in running:
        printed, _ = process.communicate()
        passed = PASSED.search(printed)
        if process.returncode or not passed:
            failed += 1
            print(printed.strip() or f"a process ended with {process.returncode}")
        else:
            calls, faults = calls + int(passed["calls"]), faults + int(passed["faults"])
    if not failed:
        print(passed_text(chosen.cases, chosen.seed, calls, faults))
    return int(bool(failed))


def main() -> int:
    """Run cases until one fails; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--backend", choices=["cupy", "triton", "native", "torch"])
    parser.add_argument("--processes", type=int, default=1, help="among which to share the cases")
    parser.add_argument("--case", help="a case that failed, in place of random ones")
    chosen = parser.parse_args()
    if chosen.backend == "cupy" and chosen.device == "cpu":
        from cuda_host import HostCudaBackend

        dispatch.BACKENDS = (HostCudaBackend(), *dispatch.BACKENDS[1:])
    if chosen.case:
        text = run(json.loads(chosen.case), chosen.device, chosen.backend)
        print(text or "it does not fail")
        return int(text is not None)
    if chosen.processes > 1:
        return shared(chosen)
    calls = faults = 0
    for number in range(chosen.first, chosen.first + chosen.cases):
        case = case_of(chosen.seed, number, chosen.backend)
        calls, faults = calls + len(case["calls"]), faults + faults_in(case)
        text = failure(chosen.seed, number, chosen.device, chosen.backend)
        if text:
            print(f"seed {chosen.seed}, case {number}: {text}")
            return 1
    print(passed_text(chosen.cases, chosen.seed, calls, faults))
    return 0


if __name__ == "__main__":
    sys.exit(main())
