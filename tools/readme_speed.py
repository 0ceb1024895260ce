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
# Below this ratio a workload is named as one that is not won; 3 % is within the noise of a run.
WON = 0.97


def section(report: dict[str, Any]) -> str:
    """The table of one report, with where it was made and what it does not win."""
    facts = report["environment"]
    gpu = report["device"] != "cpu"
    machine = facts["gpu"] if gpu else facts["cpu"]
    names = list(report["measurements"][0]["host_us"])
    ours, others = names[0], names[1:]
    kinds = [("host_us", "host µs")] + ([("gpu_us", "GPU µs")] if gpu else [])
    if not gpu:
        kinds = [("host_us", "µs")]
    head = ["workload", "m", *(f"{text}, {name}" for _, text in kinds for name in names)]
    lines = [
        f"{machine}; torch {facts['torch']}, {report['date'][:10]}, `{report['command']}`. "
        "Medians of interleaved rounds in one process.",
        "",
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
    ]
    losses = []
    ratios: dict[tuple[str, str], list[float]] = {}
    for each in report["measurements"]:
        row = [each["workload"], f"{each['count']:,}"]
        for kind, text in kinds:
            times = each[kind]
            row += [f"{times[name]:,.1f}" for name in names]
            for other in others:
                ratio = times[other] / times[ours]
                ratios.setdefault((text, other), []).append(ratio)
                if ratio < WON:
                    losses.append(
                        f"{each['workload']}, m = {each['count']:,}, {text} against {other}: "
                        f"{ratio:.2f} x"
                    )
        lines.append("| " + " | ".join(row) + " |")
    means = [
        f"{text} against {other} {math.exp(sum(map(math.log, values)) / len(values)):.2f} x"
        for (text, other), values in ratios.items()
    ]
    lines += ["", f"Geometric means: {'; '.join(means)}.", ""]
    lines.append(
        f"Not won: {'; '.join(losses)}." if losses else "No workload is slower than either peer."
    )
    return "\n".join(lines)


def main() -> None:
    """Replace what stands between the marks in README.md."""
    reports = [
        json.loads(path.read_text()) for path in sorted((ROOT / "benchmarks").glob("*.json"))
    ]
    reports.sort(key=lambda report: report["device"] == "cpu")
    text = "\n\n".join(section(report) for report in reports)
    readme = ROOT / "README.md"
    before, rest = readme.read_text().split(BEGIN)
    after = rest.split(END)[1]
    readme.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")


if __name__ == "__main__":
    main()
