"""The cost model of sharded gathers: against the simulator, and against what was measured."""

from __future__ import annotations

import json
import math
import re
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from multigather.distributed import model
from multigather.distributed.model import Load, Machine

ROOT = Path(__file__).resolve().parent.parent

# The model knows neither the work of Python nor what other programs did meanwhile.
FACTOR = 2.5
GPU_FACTOR = 2.0


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


def report_of(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "benchmarks" / f"{name}.json").read_text())
    return found


def measured(ranks: int) -> dict[str, Any]:
    return report_of(f"gloo-{ranks}")


def load_of(result: dict[str, Any], ranks: int) -> Load:
    keys = ("rows", "indices_per_rank", "row_bytes", "buffers", "pattern")
    return Load(ranks, *(result[key] for key in keys))


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
        load = load_of(each, ranks)
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


def gpu_predictions(load: Load, machine: Machine) -> dict[str, float]:
    """Microseconds of each way that is timed on GPUs."""
    seconds = {
        "exchange": model.exchange_seconds(load, machine, False),
        "exchange, deduplicated": model.exchange_seconds(load, machine, True),
        "exchange, capacity": model.exchange_seconds(load, machine, False, 2),
        "all-to-all per buffer": model.per_buffer_seconds(load, machine),
        "peer reads": model.peer_seconds(load, machine),
    }
    return {name: each * 1e6 for name, each in seconds.items()}


def test_the_constants_of_h200_hosts_are_those_of_two_gpus() -> None:
    report, machine = report_of("nvidia-h200-2"), model.H200_HOSTS
    probed = model.fitted(report["all_to_all_us"], 2, machine.memory, machine.index)
    assert machine.latency == pytest.approx(probed.latency, rel=0.05)
    # All sizes of the probe take about as long, so it does not show the link: rows from a peer do.
    rate = report["peer_gb_per_s"]["512"]["rows"] * 1e9
    assert machine.link == pytest.approx(rate, rel=0.02)
    (uniform,) = (each for each in report["results"] if each["different_per_rank"] > 1e5)
    own = uniform["median_us"]["own rows only"] * 1e-6
    moved = 2 * uniform["indices_per_rank"] * uniform["row_bytes"]
    assert machine.memory == pytest.approx(moved / own, rel=0.15)  # which has the host's time, too
    launch = report["decode_us"]["host"]["peer reads"] * 1e-6
    assert machine.launch == pytest.approx(launch, rel=0.05)
    # What is left per collective, in all ways and workloads, and then what repeated rows add.
    bare = replace(machine, step=0.0, repeats=0.0)
    steps, repeats = [], []
    for each in report["results"]:
        load, times = load_of(each, 2), each["median_us"]
        without = gpu_predictions(load, bare)
        for name, collectives in (
            ("exchange", 3),
            ("exchange, capacity", 2),
            ("all-to-all per buffer", 2 + load.buffers),
        ):
            steps.append((times[name] - without[name]) * 1e-6 / collectives)
        name = "exchange, deduplicated"
        repeats.append((times[name] - without[name]) * 1e-6 - 3 * machine.step)
    assert machine.step == pytest.approx(statistics.median(steps), rel=0.05)
    assert machine.repeats == pytest.approx(statistics.median(repeats), rel=0.05)


def test_the_model_predicts_what_was_measured_on_two_gpus() -> None:
    """Its two host terms are medians of these points: it is the spread that is tested."""
    for each in report_of("nvidia-h200-2")["results"]:
        times = each["median_us"]
        predicted = gpu_predictions(load_of(each, 2), model.H200_HOSTS)
        for name, us in predicted.items():
            ratio = times[name] / us
            assert 1 / GPU_FACTOR < ratio < GPU_FACTOR, (each["workload"], name, ratio)
        # And it chooses as the times do.
        for found in (times, predicted):
            assert found["peer reads"] < found["exchange, capacity"] < found["exchange"]
            assert found["exchange"] < found["all-to-all per buffer"]
            assert found["exchange"] < found["exchange, deduplicated"]


def test_the_documentation_has_the_tables() -> None:
    """As ``python -m multigather.distributed.model`` prints them."""
    page = (ROOT / "docs" / "distributed.md").read_text()
    for line in model.tables().splitlines():
        assert line in page
    factors = re.findall(r"within a factor of (\d+(?:\.\d+)?)", page)
    assert list(map(float, factors)) == [FACTOR, GPU_FACTOR]


def test_the_documentation_has_the_times_of_two_gpus() -> None:
    page = (ROOT / "docs" / "distributed.md").read_text()
    ways = (
        *("exchange", "exchange, deduplicated", "exchange, capacity", "peer reads"),
        *("all-to-all per buffer", "DTensor indexing", "own rows only"),
    )
    for each in report_of("nvidia-h200-2")["results"]:
        times = " | ".join(f"{each['median_us'][way]:,.0f}" for way in ways)
        assert f"{each['indices_per_rank']:,} {each['pattern']} | {times} |" in page
