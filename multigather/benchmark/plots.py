"""A sweep as pictures: bandwidth over bytes per row, host time over buffers, a map of speed-ups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .report import OWN
from .ways import OURS, WAYS


def draw(report: dict[str, Any], folder: Path, name: str) -> list[Path]:
    """Draw the series of a report; returns the files.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        ValueError: the report has no sweep.
    """
    if "sweep" not in report:
        raise ValueError("there is nothing to draw without --sweep")
    import matplotlib

    matplotlib.use("agg")
    folder.mkdir(parents=True, exist_ok=True)
    kind = "gpu_us" if report["measurements"][0]["gpu_us"] else "host_us"
    files = [folder / f"{name}-{what}.png" for what in ("bandwidth", "buffers", "map")]
    _bandwidth(report, kind, files[0])
    _buffers(report, files[1])
    _map(report, kind, files[2])
    return files


def _names(rows: list[dict[str, Any]], kind: str) -> list[str]:
    return [way.name for way in WAYS if any(way.name in each[kind] for each in rows)]


def _bandwidth(report: dict[str, Any], kind: str, file: Path) -> None:
    from matplotlib import pyplot

    rows = report["sweep"]["row bytes"]
    figure, axis = pyplot.subplots(figsize=(8, 5))
    for name in _names(rows, kind):
        if name in OWN[1:]:
            continue
        points = [
            (each["row_bytes"] / each["buffers"], 2 * each["count"] * each["row_bytes"], each[kind])
            for each in rows
            if name in each[kind]
        ]
        rates = [moved / times[name] / 1e3 for _, moved, times in points]
        axis.plot([size for size, _, _ in points], rates, marker=".", label=name)
    axis.axhline(report["copy_bytes_per_second"] / 1e9, color="grey", label="plain copy")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xlabel("bytes per row of a buffer (four buffers)")
    axis.set_ylabel("useful GB/s, read and written")
    axis.legend(fontsize=7)
    _save(figure, file)


def _buffers(report: dict[str, Any], file: Path) -> None:
    from matplotlib import pyplot

    rows = report["sweep"]["buffers"]
    figure, axis = pyplot.subplots(figsize=(8, 5))
    for name in _names(rows, "host_us"):
        points = [
            (each["buffers"], each["host_us"][name]) for each in rows if name in each["host_us"]
        ]
        axis.plot(*zip(*points, strict=True), marker=".", label=name)
    axis.set_xlabel(f"buffers (m = {rows[0]['count']})")
    axis.set_ylabel("host time per call, µs")
    axis.set_yscale("log")
    axis.legend(fontsize=7)
    _save(figure, file)


def _map(report: dict[str, Any], kind: str, file: Path) -> None:
    from matplotlib import pyplot

    rows = report["sweep"]["map"]
    sizes = sorted({each["row_bytes"] // each["buffers"] for each in rows})
    counts = sorted({each["count"] for each in rows})
    grid = [[float("nan")] * len(sizes) for _ in counts]
    for each in rows:
        place = counts.index(each["count"]), sizes.index(each["row_bytes"] // each["buffers"])
        grid[place[0]][place[1]] = each[kind]["b[idx]"] / each[kind][OURS]
    figure, axis = pyplot.subplots(figsize=(8, 5))
    image = axis.imshow(grid, origin="lower", aspect="auto", cmap="viridis")
    for y, line in enumerate(grid):
        for x, value in enumerate(line):
            if value == value:
                axis.text(x, y, f"{value:.1f}", ha="center", va="center", color="white", fontsize=7)
    axis.set_xticks(range(len(sizes)), [f"{size:,}" for size in sizes])
    axis.set_yticks(range(len(counts)), [f"{count:,}" for count in counts])
    axis.set_xlabel("bytes per row of a buffer (four buffers)")
    axis.set_ylabel("rows gathered")
    figure.colorbar(image, label="times faster than b[idx] per buffer")
    _save(figure, file)


def _save(figure: Any, file: Path) -> None:
    from matplotlib import pyplot

    figure.tight_layout()
    figure.savefig(file, dpi=110)
    pyplot.close(figure)
