"""The Triton kernel compiles for GPUs without one, into wide accesses that use no stack.

Every case is compiled by triton_offline.py in a process of its own; see there.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from multigather.backends._triton import CAPACITY, TritonBackend
from multigather.request import BOUNDS, INDEX_DTYPES

SCRIPT = Path(__file__).parent / "triton_offline.py"
# All cases together take about half a minute; with the tiles' code repeated for each of 64 fields,
# a single one takes minutes.
TIME_LIMIT = 300
# Where fields differ, the kernel calls several functions, each of which may save a few registers.
CALLS_STACK = 32

# Buffers: rows, bytes per row, bytes from row to row, alignment of the address.
WIDE = [1000, 256, 256, 16]  # 16-byte units
NARROW = [1000, 12, 12, 16]  # 4-byte units
EVERY_UNIT = [[1000, 7 * unit, 7 * unit, 16] for unit in (1, 2, 4, 8, 16)] + [[1000, 0, 0, 16]]

BASE: dict[str, Any] = {
    "architecture": 90,
    "config": {"block": 1024, "num_warps": 4, "fused": False},
    "bounds": "raise",
    "index_dtype": "int64",
    "buffers": [WIDE, NARROW],
    "count": 33,
    "index_stride": 1,
    "plan": 7,
    "first_label": 0,
    "out_gap": 0,
}


def case(fused: bool = False, **changes: Any) -> dict[str, Any]:
    """The base case with changes."""
    config = {**BASE["config"], "fused": fused}
    return {**BASE, "config": config, **changes}


def config_cases() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every config that the tuner may pick, in every bounds mode."""
    for config, bounds in itertools.product(TritonBackend().space(), BOUNDS):
        knobs = {name: getattr(config, name) for name in ("block", "num_warps", "fused")}
        yield f"{config.describe()}, {bounds}", {**BASE, "config": knobs, "bounds": bounds}


CONFIG_CASES = dict(config_cases())
ARCHITECTURE_CASES = {
    f"sm_{architecture}, fused={fused}": case(fused, architecture=architecture)
    for architecture, fused in itertools.product((75, 80, 86, 100, 120), (False, True))
    if fused or architecture in (80, 120)
}
UNIT_CASES = {f"fused={fused}": case(fused, buffers=EVERY_UNIT) for fused in (False, True)}
INDEX_CASES = {
    str(dtype): case(index_dtype=str(dtype).removeprefix("torch."), buffers=[WIDE])
    for dtype in INDEX_DTYPES
    if dtype != torch.uint64  # runs the code for int64, with a flag
}
FULL_CASES = {
    f"{CAPACITY} fields, fused={fused}": case(
        fused, buffers=[*itertools.islice(itertools.cycle(EVERY_UNIT), CAPACITY)]
    )
    for fused in (False, True)
}
LARGE_CASES = {
    "rows": case(buffers=[[2**31 + 5, 256, 256, 16]]),
    "source stride": case(buffers=[[3, 256, 2**34, 16]]),
    "row": case(buffers=[[3, 2**35, 2**35, 16]]),
    "count": case(count=2**31 - 1, buffers=[NARROW]),
    "fused": case(True, count=2**31 - 1, buffers=[[2**31 + 5, 8, 2**34, 8]]),
}
MISALIGNED = case(buffers=[[1000, 256, 256, 8]])
# In order: what is compiled for the first is what runs the others.
SAME_CODE = [
    case(fused, **changes)
    for fused in (False, True)
    for changes in (
        {},
        {"buffers": [[1, 256, 0, 16], [16, 12, 12, 16]]},
        {"buffers": [[1024, 240, 256, 16], [2**29, 16, 20, 16]]},
        {"buffers": [[16, 144, 2**20, 16], [1, 12, 0, 4]]},
        {"out_gap": 16},
        {"out_gap": 240},
        {"count": 1},
        {"count": 4096},
        {"index_stride": 16},
        {"index_stride": 0},
        {"plan": 1},
        {"plan": 16},
        {"first_label": 1},
        {"first_label": 16},
    )
]
OTHER_CODE = [case(bounds="clip"), case(index_dtype="int32"), case(buffers=[NARROW, WIDE])]


def run(cases: list[dict[str, Any]]) -> subprocess.Popen[str]:
    """Start compiling."""
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "TRITON_INTERPRET": "0"},
    )  # fmt: skip
    assert process.stdin
    process.stdin.write(json.dumps(cases))
    process.stdin.close()
    process.stdin = None
    return process


@pytest.fixture(scope="module")
def results() -> dict[str, list[dict[str, Any]]]:
    """Results of all cases, by group; compiled by two processes."""
    groups: dict[str, list[dict[str, Any]]] = {
        "config": [*CONFIG_CASES.values()],
        "architecture": [*ARCHITECTURE_CASES.values()],
        "unit": [*UNIT_CASES.values()],
        "index": [*INDEX_CASES.values()],
        "full": [*FULL_CASES.values()],
        "large": [*LARGE_CASES.values()],
        "misaligned": [MISALIGNED],
        "same": SAME_CODE + OTHER_CODE,
    }
    shares = [["config"], [name for name in groups if name != "config"]]
    processes = [run([each for name in share for each in groups[name]]) for share in shares]
    found: dict[str, list[dict[str, Any]]] = {}
    try:
        for share, process in zip(shares, processes, strict=True):
            output, errors = process.communicate(timeout=TIME_LIMIT)
            assert process.returncode == 0, errors
            answers = json.loads(output)["results"]
            for name in share:
                found[name], answers = answers[: len(groups[name])], answers[len(groups[name]) :]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return found


def check(result: dict[str, Any], stack: int = 0) -> None:
    """What holds for every compilation; ``stack`` is the most bytes of stack that it may use."""
    assert "error" not in result, result["error"]
    print(result)
    assert result["launch"] == "Launch", "the driver cannot launch this kernel directly"
    assert result["compilations"] == 1
    assert result["warnings"] == []
    assert result["scaled"]
    used = result["resources"]
    assert used["STACK"] <= stack, used
    assert used["LOCAL"] == 0, used
    assert used["REG"] * result["threads"] <= 65536
    # The host lays out one value per parameter, and all fit into what every driver takes.
    assert len(result["offsets"]) == len(result["parameter_bits"])
    assert parameter_bytes(result["parameter_bits"]) <= 4096


def parameter_bytes(widths: list[int]) -> int:
    """Size of parameters of these widths in bits, each at a multiple of its size."""
    end = 0
    for width in widths:
        size = width // 8
        end = -(-end // size) * size + size
    return end


def wide_accesses(result: dict[str, Any]) -> set[str]:
    """Which of load and store move 16 bytes at once."""
    return {
        name[:2] for name in result["accesses"] if name.endswith((".v2.b64", ".v4.b32", ".b128"))
    }


@pytest.mark.parametrize("name", CONFIG_CASES)
def test_every_config_compiles(name: str, results: dict[str, Any]) -> None:
    """In every bounds mode, without a stack, with 16-byte accesses for aligned rows."""
    result = results["config"][[*CONFIG_CASES].index(name)]
    check(result)
    assert wide_accesses(result) == {"ld", "st"}


def test_reports_use_no_atomic_operation_of_system_scope(results: dict[str, Any]) -> None:
    """It is undefined on the board, the host's memory; what the host waits for is fenced."""
    for name, result in zip(CONFIG_CASES, results["config"], strict=True):
        orders = result["orders"]
        assert bool(orders) == name.endswith("raise"), name
        atomics = [each for each in orders if each.startswith(("atom", "red"))]
        assert not [each for each in atomics if ".sys" in each], name
        before = [orders[n - 1] for n, each in enumerate(orders) if ".exch" in each]
        assert all("exch" in each or each == "fence.acq_rel.sys" for each in before), name
        assert orders.count("fence.acq_rel.sys") == len(before), name


@pytest.mark.parametrize("name", ARCHITECTURE_CASES)
def test_compiles_for_other_architectures(name: str, results: dict[str, Any]) -> None:
    """With the same accesses."""
    result = results["architecture"][[*ARCHITECTURE_CASES].index(name)]
    check(result)
    assert wide_accesses(result) == {"ld", "st"}


@pytest.mark.parametrize("name", UNIT_CASES)
def test_every_unit_compiles(name: str, results: dict[str, Any]) -> None:
    """Fields of all unit sizes and of empty rows share a launch; each moves in its own unit."""
    result = results["unit"][[*UNIT_CASES].index(name)]
    check(result, CALLS_STACK)
    assert wide_accesses(result) == {"ld", "st"}
    for size in (8, 16, 32, 64):
        assert any(each.endswith(f".b{size}") for each in result["accesses"]), size


@pytest.mark.parametrize("name", INDEX_CASES)
def test_every_index_type_compiles(name: str, results: dict[str, Any]) -> None:
    """Indices of every integer type are loaded in their own size."""
    result = results["index"][[*INDEX_CASES].index(name)]
    check(result)
    bits = 8 * getattr(torch, INDEX_CASES[name]["index_dtype"]).itemsize
    loads = {each for each in result["accesses"] if each.startswith("ld")}
    assert any(each.endswith(f".b{bits}") and ".v" not in each for each in loads), loads


@pytest.mark.parametrize("name", FULL_CASES)
def test_a_full_launch_compiles(name: str, results: dict[str, Any]) -> None:
    """As many fields as the backend puts into one launch fit into the kernel's parameters."""
    result = results["full"][[*FULL_CASES].index(name)]
    check(result, CALLS_STACK)
    assert len(result["parameter_bits"]) >= 7 * CAPACITY


@pytest.mark.parametrize("name", LARGE_CASES)
def test_large_values_are_passed_in_64_bits(name: str, results: dict[str, Any]) -> None:
    """A value near 2**31 or beyond makes its parameter, and arithmetic with it, 64 bits wide."""
    result = results["large"][[*LARGE_CASES].index(name)]
    check(result)
    # Beside the pointers: indices, faults, source, destination and two that Triton appends.
    assert result["parameter_bits"].count(64) > 6


def test_no_wide_access_without_alignment(results: dict[str, Any]) -> None:
    """Rows at multiples of 8 bytes are never moved by 16 bytes at once."""
    (result,) = results["misaligned"]
    check(result)
    assert wide_accesses(result) == set()


def test_no_value_is_compiled_in(results: dict[str, Any]) -> None:
    """Row counts, strides, row sizes of one padded size, counts and labels share one build."""
    found = results["same"]
    assert all("error" not in result for result in found), found
    made = [result["compilations"] for result in found]
    # The first of all was compiled in an earlier group.
    per_way = len(SAME_CODE) // 2
    assert sum(made[:per_way]) <= 1, made
    assert sum(made[per_way : 2 * per_way]) <= 1, made
    assert made[2 * per_way :] == [1] * len(OTHER_CODE), made
