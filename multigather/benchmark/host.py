"""Host time of a repeated call, beside the least that a call through Python can take.

On a GPU that is the *floor*: one fast allocation per output and one launch by CuPy's binding of
the driver call, with parameters that were written before. On a CPU it is `index_select` per buffer,
called by hand. Both of multigather's repeated calls are timed, the compiled and the generated one.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

import multigather

from .. import native
from ..backends.base import KernelRunner
from ..launch import current_stream, fast_allocation, launch_function
from ..plan import Plan
from ..request import bucket_of
from ..shortcut import allocations
from .run import Keep, Say, heading
from .timing import Gather, host_timer, interleaved
from .workloads import BF16, F32, I32, I64, Fields, Workload

BUFFERS = (1, 2, 4, 8, 16)
COUNT = 48
ROWS = 4096
# Of a way whose number of indices is another one at each call, from 1 to so many.
ANOTHER = ", another m each time"
CHANGING = 1500
# What follows the name of a way that was learned without the extension.
GENERATED = ", generated"

Buffers = Sequence[torch.Tensor]
Ways = dict[str, Gather]


def fields(number: int, device: torch.device) -> Fields:
    """Rows of a decode step, in turn; on a CPU narrow ones, which it copies in one thread."""
    wide = 4096 if device.type == "cuda" else 8
    kinds = (((8,), F32), ((8,), I64), ((), I32), ((wide,), BF16))
    return tuple(kinds[place % len(kinds)] for place in range(number))


def measure(number: int, device: torch.device, rounds: int) -> dict[str, float]:
    """Median microseconds per call of each way, for so many buffers."""
    # Another number of rows is another layout, so that neither learns from the other.
    ours, others = (
        Workload("host", rows, rows, (), (), fields(number, device)) for rows in (ROWS, ROWS + 1)
    )
    buffers = ours.buffers(device)
    sets = ours.index_sets(COUNT, 8, device)
    plan = multigather.plan(*buffers)
    ways = _repeated("", plan, buffers, sets[0])
    if native.extension is not None:
        with native.without():
            copies = others.buffers(device)
            ways |= _repeated(GENERATED, multigather.plan(*copies), copies, sets[0])
    ways["b[idx]"] = lambda indices: [buffer[indices] for buffer in buffers]
    # As batches of a graph or of requests are: no two calls in a row have the same number, and it
    # takes longer until one comes again than anybody would remember it.
    another = [torch.arange(1 + count * 37 % CHANGING, device=device) for count in range(CHANGING)]
    for indices in another:  # what is learned once for a range of numbers is learned
        multigather.gather(indices, *buffers)
    changing = itertools.cycle(another)
    ways[f"gather{ANOTHER}"] = lambda _: multigather.gather(next(changing), *buffers)
    ways[f"b[idx]{ANOTHER}"] = lambda _: [
        buffer[each] for each in [next(changing)] for buffer in buffers
    ]
    if device.type == "cuda":
        ways = _floor(plan, buffers, sets[0]) | ways
    else:
        select = torch.index_select
        ways = {"floor": lambda indices: [select(b, 0, indices) for b in buffers]} | ways
    timers = {name: host_timer(way, sets, device) for name, way in ways.items()}
    return interleaved(timers, rounds)


def _repeated(suffix: str, plan: Plan, buffers: Buffers, indices: torch.Tensor) -> Ways:
    """Multigather's calls, after each has been learned."""
    outs = plan(indices)
    ways: Ways = {
        "gather": lambda indices: multigather.gather(indices, *buffers),
        "plan": plan,
        "plan, out=": lambda indices: plan(indices, out=outs),
    }
    for way in ways.values():
        for _ in range(3):
            way(indices)
    return {f"{name}{suffix}": way for name, way in ways.items()}


def _floor(plan: Plan, buffers: Buffers, indices: torch.Tensor) -> Ways:
    """The parts of a call that none can do without.

    Raises:
        ValueError: this machine gathers in another way than by one launch into fast allocations.
    """
    empty = fast_allocation("cuda")
    known = plan._shortcuts.get(indices.dtype)
    runner = known.executable.runners[bucket_of(COUNT)] if known is not None else None
    launch = runner.launch(COUNT) if isinstance(runner, KernelRunner) else None
    if known is None or launch is None or empty is None:
        raise ValueError("--host compares with one launch and torch's fast allocations")
    request = known.executable.request
    outs = plan(indices)
    addresses = [indices.data_ptr()]
    for number in KernelRunner.order(request):
        addresses += (buffers[number].data_ptr(), outs[number].data_ptr())
    block = launch.new_block()
    launch.write(block.memory, addresses)
    raw = functools.partial(
        launch_function(), launch.function, launch.grid, 1, 1, launch.threads, 1, 1,
        launch.shared_bytes,
    )  # fmt: skip
    device, parameters, keep = launch.device, block.address, (outs, block, indices)

    def launching(indices: torch.Tensor) -> Any:
        raw(current_stream(device), parameters, 0)
        return keep

    scope: dict[str, Any] = {"empty": empty, "raw": raw, "stream": current_stream}
    scope |= {"device": device, "parameters": parameters}
    names = []
    for k, (size, stride, dtype) in enumerate(allocations(request, COUNT)):
        scope |= {f"size{k}": size, f"stride{k}": stride, f"dtype{k}": dtype}
        names.append(f"empty(size{k}, stride{k}, dtype{k})")
    made = f"    outs = ({', '.join(names)},)"
    started = "    raw(stream(device), parameters, 0)"
    exec(
        "\n".join(
            (
                *("def allocating(indices):", made, "    return outs"),
                *("def both(indices):", made, started, "    return outs"),
            )
        ),
        scope,
    )
    return {
        "raw launch": launching,
        "fast empties": scope["allocating"],
        "floor": scope["both"],
    }


def run(
    device: torch.device,
    rounds: int,
    arguments: Sequence[str],
    say: Say = lambda text: None,
    keep: Keep = lambda report: None,
) -> dict[str, Any]:
    """Measure every number of buffers and return a report that JSON can hold."""
    report: dict[str, Any] = {
        **heading(device, arguments),
        "count": COUNT,
        "host": [],
    }
    for number in BUFFERS:
        say(f"{number} buffers")
        report["host"].append({"buffers": number, "host_us": measure(number, device, rounds)})
        keep(report)
    first, last = report["host"][0], report["host"][-1]
    report["host_us_per_buffer"] = {
        name: round((last["host_us"][name] - us) / (last["buffers"] - first["buffers"]), 3)
        for name, us in first["host_us"].items()
    }
    keep(report)
    return report


def show(report: dict[str, Any], console: Console) -> None:
    """Print the times, and as multiples of the floor those that are whole calls."""
    names = list(report["host"][0]["host_us"])
    table = Table(title=f"host time per call, µs (m = {report['count']}, {report['device']})")
    table.add_column("way")
    for each in report["host"]:
        table.add_column(f"N = {each['buffers']}", justify="right")
    table.add_column("per buffer", justify="right")
    for name in names:
        times = [f"{each['host_us'][name]:,.2f}" for each in report["host"]]
        table.add_row(Text(name), *times, f"{report['host_us_per_buffer'][name]:,.2f}")
    for name in names:
        base = "raw launch" if "out=" in name and "raw launch" in names else "floor"
        if name == base or name in ("raw launch", "fast empties"):
            continue
        ratios = [each["host_us"][name] / each["host_us"][base] for each in report["host"]]
        table.add_row(Text(f"{name} / {base}"), *(f"{ratio:,.2f}" for ratio in ratios), "")
    console.print(table)
