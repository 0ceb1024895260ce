"""Write README's "How fast" from the results in benchmarks/.

    python3 tools/readme_speed.py

Each file there is the output of the `multigather bench` command that stands in it. Standard library
only.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- made by tools/readme_speed.py -->", "<!-- end -->"
# Below this ratio a gather is named as one that is not won; 3 % is within the noise of a run.
WON = 0.97
OURS = "multigather"
# Multigather's own ways are no peers.
OWN = (OURS, "plan", "plan, out=", "unchecked")
HOST_ROWS = {
    "raw launch": "one launch",
    "floor": "floor",
    "plan": "`plan(indices)`",
    "gather": "`gather(indices, *bufs)`",
    "gather, another m each time": "the same, another m each time",
    "plan, out=": "`plan(indices, out=outs)`",
    "gather, generated": "`gather` without the compiled extension",
    "b[idx]": "`b[idx]` each",
}
COLUMNS = (OURS, "plan", "b[idx]", "index_select", "torch.compile")


def section(report: dict[str, Any]) -> str:
    """The table of one report, with where it was made and what it does not win."""
    facts = report["environment"]
    gpu = report["device"] != "cpu"
    machine = facts["gpu"] if gpu else facts["cpu"]
    rows = report["measurements"]
    kinds = {"host_us": "host µs", "gpu_us": "GPU µs"} if gpu else {"host_us": "µs"}
    columns = [name for name in COLUMNS if all(name in each["host_us"] for each in rows)]
    head = ["workload", "m", *(f"{text}, {name}" for text in kinds.values() for name in columns)]
    lines = [
        f"{machine}; torch {facts['torch']}, {report['date'][:10]}, `{report['command']}`. "
        "Medians of interleaved rounds in one process.",
        "",
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
    ]
    for each in rows:
        cells = [each["workload"], f"{each['count']:,}"]
        cells += [f"{each[kind][name]:,.1f}" for kind in kinds for name in columns]
        lines.append("| " + " | ".join(cells) + " |")
    series = {"workloads above": rows}
    series |= {f"series over {name}": some for name, some in report.get("sweep", {}).items()}
    return "\n".join([*lines, "", *means(series, kinds), "", losses(series, kinds)])


def ratios(
    measurements: list[dict[str, Any]], kind: str
) -> dict[str, list[tuple[float, dict[str, Any]]]]:
    """For each peer its time over multigather's, with the measurement."""
    found: dict[str, list[tuple[float, dict[str, Any]]]] = {}
    for each in measurements:
        for peer, time in each[kind].items():
            if peer not in OWN:
                found.setdefault(peer, []).append((time / each[kind][OURS], each))
    return found


def means(series: dict[str, list[dict[str, Any]]], kinds: dict[str, str]) -> list[str]:
    """A table of geometric means: how many times as long each peer takes."""
    found = {
        f"{name}, {text}": ratios(measurements, kind)
        for kind, text in kinds.items()
        for name, measurements in series.items()
    }
    peers = list(dict.fromkeys(peer for each in found.values() for peer in each))
    lines = [
        "How many times as long the others take, geometric means:",
        "",
        f"| | {' | '.join(peers)} |",
        "|" + "---|" * (1 + len(peers)),
    ]
    for name, each in found.items():
        cells = [
            f"{math.exp(sum(math.log(ratio) for ratio, _ in each[peer]) / len(each[peer])):.2f}"
            if peer in each
            else ""
            for peer in peers
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def losses(series: dict[str, list[dict[str, Any]]], kinds: dict[str, str]) -> str:
    """Every gather that a peer does in less time."""
    found = [
        f"{name}, m = {each['count']:,}, {each['buffers']} buffer{'s' * (each['buffers'] > 1)}, "
        f"{each['row_bytes']:,} bytes a row in all, {text}: {peer} {ratio:.2f}"
        for name, measurements in series.items()
        for kind, text in kinds.items()
        for peer, values in ratios(measurements, kind).items()
        for ratio, each in values
        if ratio < WON
    ]
    count = sum(len(each) * len(kinds) for each in series.values())
    if not found:
        return f"None of these {count} times is longer than a peer's."
    return "\n".join(["Not won:", "", *(f"- {loss}" for loss in found)])


def host_section(report: dict[str, Any]) -> str:
    """The table of a report of ``--host``."""
    facts = report["environment"]
    head = [f"N = {each['buffers']}" for each in report["host"]]
    lines = [
        f"Host µs of a repeated call, m = {report['count']}; {facts['gpu']}, "
        f"{report['date'][:10]}, `{report['command']}`. The floor is N of torch's cheapest "
        "allocations and one launch.",
        "",
        f"| | {' | '.join(head)} |",
        "|" + "---|" * (1 + len(head)),
    ]
    for name, text in HOST_ROWS.items():
        times = [f"{each['host_us'][name]:.1f}" for each in report["host"]]
        lines.append(f"| {text} | {' | '.join(times)} |")
    return "\n".join(lines)


def main() -> None:
    """Replace what stands between the marks in README.md."""
    reports = [
        json.loads(path.read_text()) for path in sorted((ROOT / "benchmarks").glob("*.json"))
    ]
    calls = [host_section(report) for report in reports if "host" in report]
    reports = [report for report in reports if "measurements" in report]
    reports.sort(key=lambda report: report["device"] == "cpu")
    text = "\n\n".join([*map(section, reports), *calls])
    readme = ROOT / "README.md"
    before, rest = readme.read_text().split(BEGIN)
    after = rest.split(END)[1]
    readme.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")


if __name__ == "__main__":
    main()
