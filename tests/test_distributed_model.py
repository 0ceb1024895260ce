"""The cost model of sharded gathers: against the simulator, and against what was measured."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from multigather.distributed import model
from multigather.distributed.model import Load

ROOT = Path(__file__).resolve().parent.parent

# The model knows neither the work of Python nor what other programs did meanwhile.
FACTOR = 2.5


@pytest.mark.parametrize("pattern", model.PATTERNS)
@pytest.mark.parametrize("deduplicate", [False, True])
@pytest.mark.parametrize("ranks", [2, 8, 64, 256])
def test_the_formulae_count_what_the_simulator_counts(
    ranks: int, deduplicate: bool, pattern: str
) -> None:
    load = Load(ranks, 20_000 * ranks, 4000, 672, 4, pattern)
    expected, drawn = model.traffic(load, deduplicate), model.simulate(load, deduplicate)
    assert drawn.asked == pytest.approx(expected.asked, rel=0.03)
    assert drawn.messages == pytest.approx(expected.messages, rel=0.01)
    # The busiest of many ranks has a little more than any on average.
    assert drawn.served == pytest.approx(expected.served, rel=0.12)
    assert drawn.sent_bytes == pytest.approx(expected.sent_bytes, rel=0.12)


def test_popularity() -> None:
    for pattern in model.PATTERNS:
        for rows in (1, 2, 100, 10**8):
            load = Load(2, rows, 10, 8, 1, pattern)
            shares = model.popularity(load)
            assert sum(number for number, _ in shares) == rows
            assert math.isclose(sum(number * share for number, share in shares), 1, rel_tol=1e-9)
            assert math.isclose(model.hot_share(load, rows), 1, rel_tol=1e-9)
            assert 1 <= model.different(load) <= min(rows, 10)


def measured(ranks: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "benchmarks" / f"gloo-{ranks}.json").read_text())
    return found


@pytest.mark.parametrize("ranks", [2, 8])
def test_the_model_predicts_what_was_measured(ranks: int) -> None:
    """From bare all-to-alls and gathers of own rows of the same run, on two cores.

    Two ranks by the 10th percentile, because other programs ran there too. Eight ranks have to wait
    for the cores in any case.
    """
    kind, probe = ("best", "all_to_all_best") if ranks == 2 else ("median", "all_to_all")
    report = measured(ranks)
    index = 1e-7 * max(1.0, ranks / 2)  # on one core; ranks share them
    for each in report["results"]:
        own = each[f"{kind}_us"]["own rows only"] * 1e-6
        memory = 2 * each["indices_per_rank"] * each["row_bytes"] / own
        machine = model.fitted(report[f"{probe}_us"], ranks, memory, index)
        load = Load(
            ranks,
            *(each[key] for key in ("rows", "indices_per_rank", "row_bytes", "buffers", "pattern")),
        )
        predictions = {
            "exchange": model.exchange_seconds(load, machine, False),
            "exchange, deduplicated": model.exchange_seconds(load, machine, True),
            "all-to-all per buffer": model.per_buffer_seconds(load, machine),
        }
        for name, seconds in predictions.items():
            ratio = each[f"{kind}_us"][name] / (seconds * 1e6)
            assert 1 / FACTOR < ratio < FACTOR, (each["workload"], each["pattern"], name, ratio)


def test_the_measured_exchange_beats_an_all_to_all_per_buffer() -> None:
    for ranks in (2, 8):
        for each in measured(ranks)["results"]:
            times = each["median_us"]
            assert times["exchange"] < times["all-to-all per buffer"]


def test_the_documentation_has_the_tables() -> None:
    """As ``python -m multigather.distributed.model`` prints them."""
    page = (ROOT / "docs" / "distributed.md").read_text()
    for line in model.tables().splitlines():
        assert line in page
    factor = re.search(r"within a factor of ([\d.]+)", page)
    assert factor is not None
    assert float(factor[1]) == FACTOR
