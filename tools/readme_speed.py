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
# More than so many are counted, and only the largest is named.
MOST_LOSSES = 6
OURS = "multigather"
# Multigather's own ways are no peers.
OWN = (OURS, "plan", "plan, out=", "unchecked")
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
    for name, measurements in {"these workloads": rows, **report.get("sweep", {})}.items():
        text = name if name == "these workloads" else f"the sweep over {name}"
        lines += ["", *summary(text, measurements, kinds)]
    return "\n".join(lines)


def summary(name: str, measurements: list[dict[str, Any]], kinds: dict[str, str]) -> list[str]:
    """Geometric means against each peer, then every loss."""
    ratios: dict[tuple[str, str], list[float]] = {}
    losses = []
    for each in measurements:
        for kind, text in kinds.items():
            for peer in each[kind]:
                if peer in OWN:
                    continue
                ratio = each[kind][peer] / each[kind][OURS]
                ratios.setdefault((text, peer), []).append(ratio)
                if ratio < WON:
                    size = f", {each['row_bytes']:,} bytes a row" if "buffers" in each else ""
                    place = f"{each['workload']}, m = {each['count']:,}{size}"
                    losses.append((ratio, f"{place}, {text} against {peer} {ratio:.2f} x"))
    means = [
        f"{text} against {peer} {math.exp(sum(map(math.log, values)) / len(values)):.2f} x"
        for (text, peer), values in ratios.items()
    ]
    lines = [f"Geometric means over {name}: {'; '.join(means)}.", ""]
    if not losses:
        lines.append("None of them is lost to a peer.")
    elif len(losses) <= MOST_LOSSES:
        lines.append(f"Not won: {'; '.join(loss for _, loss in losses)}.")
    else:
        count = sum(map(len, ratios.values()))
        lines.append(f"Not won: {len(losses)} of {count} comparisons, the lowest {min(losses)[1]}.")
    return lines


def main() -> None:
    """Replace what stands between the marks in README.md."""
    reports = [
        json.loads(path.read_text()) for path in sorted((ROOT / "benchmarks").glob("*.json"))
    ]
    reports = [report for report in reports if "measurements" in report]  # not of --host
    reports.sort(key=lambda report: report["device"] == "cpu")
    text = "\n\n".join(section(report) for report in reports)
    readme = ROOT / "README.md"
    before, rest = readme.read_text().split(BEGIN)
    after = rest.split(END)[1]
    readme.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")


if __name__ == "__main__":
    main()
