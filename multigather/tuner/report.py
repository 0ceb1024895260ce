"""``multigather show``: the winners as a table, as JSON, or as a map."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from .. import dispatch
from ..cache.key import Key
from ..cache.model import Entry, Tuning
from .check import Verdict
from .decide import environment_facts
from .measure import short_config


def rows_of(tuning: Tuning) -> list[dict[str, Any]]:
    """An entry per key: pick, times, gains over the heuristic and over torch, what is stale."""
    now = environment_facts()
    rows = []
    for key, entry in sorted(tuning.keys.items()):
        measured = entry.backends[entry.pick]
        by_torch = entry.backends.get("torch")
        default_us = entry.default.device_us if entry.default else None
        rows.append(
            {
                "key": key.label,
                "pick": entry.pick,
                "config": measured.config,
                "device_us": measured.device_us,
                "spread_us": measured.spread_us,
                "host_us": measured.host_us,
                "over_default": _ratio(default_us, measured.device_us),
                "over_torch": _ratio(by_torch.device_us if by_torch else None, measured.device_us),
                "backends": {name: each.device_us for name, each in entry.ordered()},
                "failed": entry.failed,
                "stale": _stale(tuning, entry, now),
            }
        )
    return rows


def table_of(title: str, rows: Sequence[dict[str, Any]]) -> Table:
    """The rows of `rows_of` for people."""
    table = Table(title=title)
    for column in ("key", "pick", "config", "µs", "host µs", "x default", "x torch", "stale"):
        left = column in ("key", "pick", "config", "stale")
        table.add_column(Text(column), justify="left" if left else "right", no_wrap=True)
    for row in rows:
        table.add_row(
            row["key"],
            row["pick"],
            short_config(row["config"]),
            f"{row['device_us']:.2f}",
            _number(row["host_us"], ".1f"),
            _number(row["over_default"], ".2f"),
            _number(row["over_torch"], ".2f"),
            row["stale"] or "",
        )
    return table


def verdict_table(title: str, verdict: Verdict) -> Table:
    """A check's gathers, the worst first."""
    table = Table(title=title)
    for column in ("gather", "choice", "µs", "best", "µs ", "regret", "heuristic", "torch"):
        left = column in ("gather", "choice", "best")
        table.add_column(Text(column), justify="left" if left else "right", no_wrap=True)
    for each in sorted(verdict.regrets, key=lambda regret: -regret.share):
        table.add_row(
            each.gather,
            each.choice,
            f"{each.choice_us:.2f}",
            "the same" if each.best == each.choice else each.best,
            f"{each.best_us:.2f}",
            f"{each.share:.1%}",
            f"{_ratio(each.heuristic_us, each.best_us) or 0:.2f}x",
            f"{_ratio(each.torch_us, each.best_us) or 0:.2f}x",
        )
    return table


def plot(tuning: Tuning, file: Path) -> None:
    """Draw the winners over number of indices and row bytes, a panel per number of buffers.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import colormaps, pyplot
    from matplotlib.patches import Patch

    every: list[tuple[str, Callable[[Key], bool]]] = [
        ("units of 16 bytes", lambda key: key.unit == 16),
        ("units of 4 or 8 bytes", lambda key: 4 <= key.unit < 16),
        ("units of 1 or 2 bytes", lambda key: key.unit < 4),
    ]
    kinds = [(name, test) for name, test in every if any(test(key) for key in tuning.keys)]
    columns = sorted({key.buffers for key in tuning.keys})
    names = sorted({_choice(entry) for entry in tuning.keys.values()})
    palette = [colormaps[name](number) for name in ("tab20", "tab20b") for number in range(20)]
    colours = {name: palette[number % len(palette)] for number, name in enumerate(names)}
    figure, axes = pyplot.subplots(
        len(kinds), len(columns), figsize=(3.2 * len(columns) + 2.5, 3 * len(kinds)),
        squeeze=False, sharex=True, sharey=True,
    )  # fmt: skip
    for line, (kind, test) in zip(axes, kinds, strict=True):
        for axis, buffers in zip(line, columns, strict=True):
            points: list[tuple[Key, Entry]] = [
                (key, entry)
                for key, entry in tuning.keys.items()
                if key.buffers == buffers and test(key)
            ]
            for key, entry in points:
                axis.scatter(key.row, key.count, color=colours[_choice(entry)], marker="s", s=60)
            axis.set_title(f"buffers: {1 << buffers}, {kind}", fontsize=7)
            axis.set_xticks(range(0, 18, 3))
            axis.set_yticks(range(0, 24, 4))
            axis.xaxis.set_major_formatter(lambda exponent, _: f"{2**exponent:,.0f}")
            axis.yaxis.set_major_formatter(lambda exponent, _: f"{2**exponent:,.0f}")
            axis.tick_params(labelsize=6)
    for axis in axes[-1]:
        axis.set_xlabel("bytes per row of a buffer", fontsize=7)
    for line in axes:
        line[0].set_ylabel("rows gathered", fontsize=7)
    figure.legend(
        handles=[Patch(color=colours[name], label=name) for name in names],
        loc="center right", fontsize=6,
    )  # fmt: skip
    figure.suptitle(f"fastest choice on {tuning.device.name}", fontsize=9)
    figure.tight_layout(rect=(0, 0, 1 - 2.2 / (3.2 * len(columns) + 2.5), 1))
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


def _choice(entry: Entry) -> str:
    return f"{entry.pick} {short_config(entry.backends[entry.pick].config)}"


def _stale(tuning: Tuning, entry: Entry, now: dict[str, Any]) -> str | None:
    """Why an entry should be measured again; None if nothing has changed since."""
    for name, measured in entry.backends.items():
        refusal = dispatch.refusal_of(name, measured)
        if refusal:
            return f"{name}: {refusal}"
        then = tuning.environments.get(measured.environment, {})
        changed = [what for what in ("driver", "torch", name) if then.get(what) != now.get(what)]
        if changed:
            what = changed[0]
            return f"{what} was {then.get(what)}"
    return None


def _ratio(us: float | None, reference: float) -> float | None:
    return None if us is None else round(us / reference, 3)


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
