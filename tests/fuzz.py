"""Random gathers against an oracle in NumPy, each replayable by one command.

    python tests/fuzz.py --seed 3 --cases 10000
    python tests/fuzz.py --device cuda --backend triton --seed 3 --cases 10000

A case is a few buffers and a series of calls that gather from them: buffers of every type, with
gaps between rows, expanded, transposed, misaligned or empty; indices of every type, shape and
stride, valid, negative and bad; every bounds mode; through `gather`, a plan and ``out=``. The calls
of a case share their buffers, because most of the code in a repeated call is for the repetition. A
case that fails is made smaller as long as it fails, and printed as a command.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from collections.abc import Iterator
from typing import Any

if __name__ == "__main__":
    os.environ.setdefault("MULTIGATHER_TUNING", "off")
    if "cuda" not in sys.argv:
        os.environ["TRITON_INTERPRET"] = "1"

import numpy
import torch

import multigather
from multigather import dispatch

DTYPES = (
    "uint8", "int8", "bool", "int16", "bfloat16", "float16", "int32", "float32", "int64", "float64",
    "complex64", "complex128", "float8_e4m3fn", "uint16", "uint32", "uint64",
)  # fmt: skip
INDEX_DTYPES = ("int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64")
BOUNDS = ("raise", "raise", "fill", "clip", "unchecked")
WAYS = ("gather", "gather", "plan", "out")
LAYOUTS = ("plain", "plain", "gaps", "expanded", "shifted")

Case = dict[str, Any]


def make(draw: random.Random, transposed: bool) -> Case:
    """A random case; ``transposed`` allows rows that are not contiguous."""
    buffers = []
    for _ in range(draw.choice((1, 1, 2, 3, 5, 9))):
        sizes = (1, 2, 3, 7, 16, 33) if draw.random() < 0.9 else (0, 1, 100)
        shape = [draw.choice(sizes) for _ in range(draw.choice((0, 0, 1, 1, 2)))]
        layouts = (*LAYOUTS, "transposed") if transposed and len(shape) == 2 else LAYOUTS
        buffers.append(
            {
                "dtype": draw.choice(DTYPES),
                "shape": [draw.choice((1, 2, 5, 33, 100)), *shape],
                "layout": draw.choice(layouts),
            }
        )
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
                "shape": draw.choice(("flat", "flat", "flat", "column", "strided")),
                "way": draw.choice(WAYS),
            }
        )
    return {"buffers": buffers, "bounds": bounds, "dtype": dtype, "calls": calls}


def run(case: Case, device: str, backend: str | None) -> str | None:
    """Make the calls of a case; what went wrong, or None."""
    content = numpy.random.default_rng(0)
    pairs = [buffer_of(spec, content, device) for spec in case["buffers"]]
    buffers = [buffer for buffer, _ in pairs]
    options = {"bounds": case["bounds"], "backend": backend}
    plan = multigather.plan(*buffers, **options)
    for number, call in enumerate(case["calls"]):
        indices = indices_of(call, case["dtype"], device)
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
        error = results = None
        try:
            if call["way"] == "plan":
                results = plan(indices)
            else:
                results = multigather.gather(indices, *buffers, out=outs, **options)
            multigather.check()
        except IndexError as found:
            error = found
        where = f"call {number} ({call['way']})"
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
    tensor = torch.from_numpy(memory.copy())[:size].to(device).view(dtype)
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


def indices_of(call: dict[str, Any], dtype: str, device: str) -> torch.Tensor:
    values = torch.tensor(numpy.array(call["values"], dtype=dtype), device=device)
    if call["shape"] == "column":
        return values.view(-1, 1)
    if call["shape"] == "strided":
        return torch.stack((values, torch.zeros_like(values)), 1)[:, 0]
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
    return tensor.reshape(-1).view(torch.uint8).cpu().numpy().tobytes()


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


def failure(seed: int, number: int, device: str, backend: str | None) -> str | None:
    """Run case ``number`` of a seed; if it fails, why, and the command that repeats it."""
    draw = random.Random(f"{seed}/{number}")
    case = make(draw, transposed=backend in (None, "torch"))
    text = run(case, device, backend)
    if text is None:
        return None
    case = shrink(case, device, backend)
    option = f" --backend {backend}" if backend else ""
    command = f"python tests/fuzz.py --device {device}{option} --case '{json.dumps(case)}'"
    return f"{run(case, device, backend) or text}\n  {command}"


def main() -> int:
    """Run cases until one fails; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--backend", choices=["cupy", "triton", "torch"])
    parser.add_argument("--case", help="a case that failed, in place of random ones")
    chosen = parser.parse_args()
    if chosen.backend == "cupy" and chosen.device == "cpu":
        from cuda_host import HostCudaBackend

        dispatch.BACKENDS = (HostCudaBackend(), *dispatch.BACKENDS[1:])
    if chosen.case:
        text = run(json.loads(chosen.case), chosen.device, chosen.backend)
        print(text or "it does not fail")
        return int(text is not None)
    for number in range(chosen.first, chosen.first + chosen.cases):
        text = failure(chosen.seed, number, chosen.device, chosen.backend)
        if text:
            print(f"seed {chosen.seed}, case {number}: {text}")
            return 1
    print(f"{chosen.cases} cases of seed {chosen.seed} passed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
