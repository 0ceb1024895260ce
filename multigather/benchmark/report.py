"""A report as tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .ways import OURS, WAYS

KINDS = {"host_us": "host time per call", "gpu_us": "GPU time per call"}
# Ways of multigather's own are no peers, and what writes into old outputs does less work.
OWN = (OURS, "plan", "plan, out=", "unchecked")
# A ratio below this is a loss; what lies closer to 1 is within the noise.
WON = 0.97


def geometric_mean(values: Sequence[float]) -> float:
    """Geometric mean of positive numbers."""
    return math.exp(sum(map(math.log, values)) / len(values))


def peers_of(measurements: Sequence[dict[str, Any]], kind: str) -> list[str]:
    """Names of the peers that were timed in any of the measurements, in the usual order."""
    timed = {name for each in measurements for name in each[kind]}
    return [way.name for way in WAYS if way.name in timed and way.name not in OWN]


def ratios(measurements: Sequence[dict[str, Any]], kind: str, peer: str) -> list[float]:
    """Time of a peer over multigather's, in each measurement that has both."""
    return [
        each[kind][peer] / each[kind][OURS]
        for each in measurements
        if peer in each[kind] and OURS in each[kind]
    ]


def losses(measurements: Sequence[dict[str, Any]], kind: str) -> list[str]:
    """Where multigather is slower than a peer, in words."""
    found = []
    for each in measurements:
        for peer in peers_of([each], kind):
            ratio = each[kind][peer] / each[kind][OURS]
            if ratio < WON:
                found.append(
                    f"{each['workload']}, m = {each['count']:,}, {each['buffers']} buffers, "
                    f"{each['row_bytes']:,} bytes a row: {ratio:.2f} x {peer}"
                )
    return found


def show(report: dict[str, Any], console: Console) -> None:
    """Print a report: the workloads in tables, the series in their means and losses."""
    ceiling = report["copy_bytes_per_second"]
    console.print(f"plain copy: {ceiling / 1e9:,.0f} GB/s read and written", markup=False)
    for kind, text in KINDS.items():
        rows = [each for each in report["measurements"] if each[kind]]
        if rows:
            title = "time per call" if report["device"] == "cpu" else text
            console.print(_table(f"{title}, µs ({report['device']})", rows, kind, ceiling))
        groups = {"workloads": rows, **report.get("sweep", {})}
        for name, measurements in groups.items():
            for peer in peers_of(measurements, kind):
                found = ratios(measurements, kind, peer)
                console.print(
                    f"{name}, {text}, against {peer}: geometric mean "
                    f"{geometric_mean(found):.2f}x, lowest {min(found):.2f}x of {len(found)}",
                    markup=False,
                )
    for name, measurements in {
        "workloads": report["measurements"],
        **report.get("sweep", {}),
    }.items():
        for kind, text in KINDS.items():
            for loss in losses(measurements, kind):
                console.print(f"not won, {text}, {name}: {loss}", markup=False)
    reasons = {
        f"{name}: {reason}"
        for each in report["measurements"]
        for name, reason in each["missing"].items()
    }
    for reason in sorted(reasons):
        console.print(f"not timed everywhere, {reason}", markup=False)


def _table(title: str, rows: Sequence[dict[str, Any]], kind: str, ceiling: float) -> Table:
    names = [way.name for way in WAYS if any(way.name in each[kind] for each in rows)]
    table = Table(title=title)
    columns = ["workload", "m", *names]
    # What a call moves: the useful bytes, read and written, as a share of a plain copy's rate.
    shares = kind == "gpu_us" or not rows[0]["gpu_us"]
    if shares:
        columns += ["useful GB/s", "sectors GB/s", "of the copy"]
    for column in columns:
        justify = "left" if column == "workload" else "right"
        table.add_column(Text(column), justify=justify)  # type: ignore[arg-type]
    for each in rows:
        cells = [each["workload"], f"{each['count']:,}"]
        cells += [f"{each[kind][name]:,.1f}" if name in each[kind] else "" for name in names]
        if shares:
            seconds = each[kind][OURS] / 1e6
            useful = 2 * each["count"] * each["row_bytes"] / seconds
            sectors = each["sector_bytes"] / seconds
            cells += [f"{useful / 1e9:,.0f}", f"{sectors / 1e9:,.0f}", f"{sectors / ceiling:.0%}"]
        table.add_row(*cells)
    return table
