"""The benchmark: every way is right before it is timed, and the report says what was found."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import HAVE_GPU
from typer.testing import CliRunner

from multigather import cli, native
from multigather.benchmark import host, plots, report, run, seed_kernel, sweep, ways, workloads
from multigather.benchmark.ways import OURS, Way

CPU = torch.device("cpu")
SMALL = workloads.Workload(
    "small", 50, 50, (7,), (7,),
    (((3,), torch.float32), ((), torch.int64), ((5,), torch.uint8), ((2,), torch.bfloat16)),
)  # fmt: skip


def quick_ways(device: torch.device = CPU) -> list[Way]:
    """All but the compiled ones, which take seconds each."""
    return [way for way in ways.WAYS if way.name not in ways.COMPILED]


def measure(chosen: Sequence[Way]) -> run.Measurement:
    return run.measure(SMALL, 7, CPU, SMALL.buffers(CPU), chosen, rounds=2)


def test_every_way_is_checked_and_timed() -> None:
    found = measure(quick_ways())
    timed = {OURS, "plan", "plan, out=", "unchecked", "b[idx]", "index_select"}
    assert set(found.host_us) - {"tensordict"} == timed
    assert set(found.missing) - {"tensordict"} == {"Triton, row per program", "cupy.take"}
    assert all(us > 0 for us in found.host_us.values())
    assert found.gpu_us == {}
    assert found.row_bytes == 12 + 8 + 5 + 4
    assert found.call_bytes == 7 * 29


def test_a_way_with_other_bytes_is_an_error() -> None:
    def prepare(buffers: Any, indices: Any) -> Any:
        def gather(indices: Any) -> Any:
            rows = [buffer[indices] for buffer in buffers]
            rows[2][-1, -1] ^= 1
            return rows

        return gather

    with pytest.raises(run.MismatchError, match=r"off by one bit differs from b\[idx\] on small"):
        measure([*quick_ways(), Way("off by one bit", prepare)])


def test_a_peer_that_fails_is_left_out_and_multigather_is_not() -> None:
    def prepare(buffers: Any, indices: Any) -> Any:
        raise RuntimeError("no compiler\nmore")

    found = measure([*quick_ways(), Way("broken", prepare)])
    assert found.missing["broken"] == "RuntimeError: no compiler"
    with pytest.raises(RuntimeError, match="no compiler"):
        measure([Way(OURS, prepare)])


def test_names_of_ways() -> None:
    assert [way.name for way in ways.named(["b[idx]"], CPU)] == [OURS, "b[idx]"]
    assert not {way.name for way in ways.named([], CPU)} & set(ways.COMPILED)
    assert {way.name for way in ways.named([], torch.device("cuda"))} == set(ways.BY_NAME)
    with pytest.raises(ValueError, match="unknown way 'numpy'; there are multigather, plan"):
        ways.named(["numpy"], CPU)


@pytest.mark.skipif(HAVE_GPU, reason="Triton's interpreter and its compiler cannot share a process")
def test_the_row_per_program_kernel_in_the_interpreter() -> None:
    buffers = [each for each in SMALL.buffers(CPU) if each.dtype != torch.bfloat16]
    buffers.append(torch.rand(50, 1100))  # more than one block of columns
    indices = torch.tensor([0, 49, 7, 7, 3])
    for out, buffer in zip(seed_kernel.gather(indices, buffers), buffers, strict=True):
        assert torch.equal(out, buffer[indices])
    why_not = ways.BY_NAME["Triton, row per program"].why_not
    assert why_not(buffers[:3]) == "it takes exactly four buffers"


@pytest.mark.parametrize("device", [CPU, torch.device("cuda")], ids=str)
def test_series_cover_what_they_say(device: torch.device) -> None:
    by_name = {name: sweep.series(name, device) for name in sweep.SERIES}
    over_rows = [each.row_bytes // 4 for each in by_name["row bytes"]]
    assert over_rows == list(sweep.ROW_BYTES)
    assert min(over_rows) == 1
    assert max(over_rows) == 65536
    assert sum(size % 2 for size in over_rows) > 8
    assert [len(each.fields) for each in by_name["buffers"]] == list(sweep.BUFFERS)
    assert {each.counts[0] for each in by_name["map"]} == set(sweep.COUNTS)
    assert {each.row_bytes // 4 for each in by_name["map"]} == set(sweep.MAP_ROW_BYTES)
    for each in [workload for series in by_name.values() for workload in series]:
        assert each.row_bytes * each.counts[0] <= sweep.MOST_CALL_BYTES[device.type]
        assert each.rows >= 1024
    dtypes = {dtype for each in by_name["buffers"] for _, dtype in each.fields}
    assert dtypes == {dtype for kinds in sweep.DTYPES.values() for dtype in kinds}


@pytest.mark.parametrize(
    ("shape", "dtype", "expected"),
    [
        ((8,), torch.float32, 32 + 32),  # every row fills a sector
        ((), torch.int64, 32 + 8),  # never crosses one
        ((4,), torch.float32, 32 + 16),
        # 12 bytes at 12 k: of eight starts, two cross a sector.
        ((3,), torch.float32, 32 * 1.25 + 12),
        ((33,), torch.uint8, 32 * 2 + 33),  # two sectors wherever it starts
    ],
)
def test_sector_bytes(shape: tuple[int, ...], dtype: torch.dtype, expected: float) -> None:
    one = workloads.Workload("one", 9, 9, (10,), (10,), ((shape, dtype),))
    assert sweep.sector_bytes(one, 10) == round(10 * (8 + expected))


def test_packed_columns() -> None:
    """The same values in one slab, of which a row is a sector."""
    (each,) = (each for each in workloads.WORKLOADS if each.packed)
    small = dataclasses.replace(each, cpu_rows=50)
    packed, separate = (
        dataclasses.replace(small, packed=packed).buffers(torch.device("cpu"))
        for packed in (True, False)
    )
    assert len({buffer.untyped_storage().data_ptr() for buffer in packed}) == 1
    assert all(map(torch.equal, packed, separate))
    assert sweep.sector_bytes(small, 10) == 10 * (8 + 32 + 27)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Series of a few small gathers."""
    monkeypatch.setitem(sweep.TABLE_BYTES, "cpu", 2**16)
    monkeypatch.setitem(sweep.CALL_BYTES, "cpu", 2**12)
    monkeypatch.setattr(sweep, "ROW_BYTES", (1, 63, 64))
    monkeypatch.setattr(sweep, "BUFFERS", (1, 2, 5))
    monkeypatch.setattr(sweep, "COUNTS", (1, 10))
    monkeypatch.setattr(sweep, "MAP_ROW_BYTES", (4, 63))
    monkeypatch.setattr(run, "WORKLOADS", (SMALL,))
    monkeypatch.setattr(run, "SWEEP_ROUNDS", 1)


def bench(*arguments: Any) -> tuple[int, str]:
    result = CliRunner().invoke(cli.app, ["bench", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout


def test_the_whole_command(tiny: None, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    options = ["--device", "cpu", "--rounds", "1", "--sweep", "--plot", tmp_path / "plots"]
    status, output = bench(*options, "--json")
    assert status == 0
    found = json.loads(output)
    assert found["copy_bytes_per_second"] > 1e8
    assert [len(found["sweep"][name]) for name in sweep.SERIES] == [3, 3, 4]
    assert [each["buffers"] for each in found["sweep"]["buffers"]] == [1, 2, 5]
    for name in ("bandwidth", "buffers", "map"):
        picture = (tmp_path / "plots" / f"cpu-{name}.png").read_bytes()
        assert picture[:8] == b"\x89PNG\r\n\x1a\n"
    status, output = bench("--device", "cpu", "--rounds", "1", "--way", "b[idx]")
    assert status == 0
    assert "small" in output
    assert "against b[idx]: geometric mean" in output
    assert "index_select" not in output


def test_a_stopped_run_keeps_what_it_measured(
    tiny: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file of --out is whole after every measurement, and holds the last report at the end."""
    path = tmp_path / "report.json"
    options = ["--device", "cpu", "--rounds", "1", "--sweep", "--way", "b[idx]", "--out", path]
    measured, measure_one = [], run.measure

    def measure_some(*arguments: Any) -> run.Measurement:
        if len(measured) == 5:
            raise KeyboardInterrupt
        measured.append(measure_one(*arguments))
        return measured[-1]

    monkeypatch.setattr(run, "measure", measure_some)
    assert bench(*options)[0] != 0
    found = json.loads(path.read_text())
    assert len(found["measurements"]) == 1
    assert {name: len(each) for name, each in found["sweep"].items()} == {
        "row bytes": 3, "buffers": 1,
    }  # fmt: skip
    monkeypatch.setattr(run, "measure", measure_one)
    status, output = bench(*options, "--json")
    assert status == 0
    assert json.loads(output) == json.loads(path.read_text())
    assert [each.name for each in tmp_path.iterdir()] == ["report.json"]


def test_host_time_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "BUFFERS", (1, 3))
    status, output = bench("--device", "cpu", "--rounds", "2", "--host", "--json")
    assert status == 0
    found = json.loads(output)
    assert [each["buffers"] for each in found["host"]] == [1, 3]
    ours = {"gather", "plan", "plan, out="}
    if native.extension is not None:
        ours |= {f"{name}, generated" for name in ours}
    for each in (*(each["host_us"] for each in found["host"]), found["host_us_per_buffer"]):
        both = {"gather, another m each time", "b[idx], another m each time"}
        assert set(each) == {"floor", "b[idx]", *ours, *both}
    status, output = bench("--device", "cpu", "--rounds", "2", "--host")
    assert status == 0
    assert "b[idx] / floor" in output


@pytest.mark.gpu
@pytest.mark.skipif(not HAVE_GPU, reason="torch sees no CUDA device")
def test_host_time_on_a_gpu() -> None:
    """The parts of the floor launch what a plan launches, so they can be compared."""
    found = host.measure(4, torch.device("cuda", 0), 2)
    assert {"raw launch", "fast empties", "floor", "gather", "plan", "plan, out="} <= set(found)


def test_wrong_options(tmp_path: Path) -> None:
    assert bench("--device", "cpu", "--way", "numpy")[0] == 2
    assert bench("--device", "cpu", "--workload", "nothing")[0] == 2
    assert bench("--device", "cpu", "--plot", tmp_path)[0] == 2
    assert bench("--device", "cpu", "--host", "--sweep")[0] == 2
    assert bench("--device", "cpu", "--out", tmp_path / "no" / "report.json")[0] == 2
    with pytest.raises(ValueError, match="without --sweep"):
        plots.draw({"measurements": []}, tmp_path, "x")


def test_losses_are_named() -> None:
    def one(ours: float, theirs: float, **more: Any) -> dict[str, Any]:
        return {
            "workload": "w", "count": 1000, "buffers": 2, "row_bytes": 64,
            "host_us": {OURS: ours, "plan": 1.0, "b[idx]": theirs}, "gpu_us": {}, **more,
        }  # fmt: skip

    rows = [one(10.0, 30.0), one(10.0, 9.8), one(10.0, 5.0)]
    assert report.ratios(rows, "host_us", "b[idx]") == pytest.approx([3.0, 0.98, 0.5])
    assert report.losses(rows, "host_us") == [
        "w, m = 1,000, 2 buffers, 64 bytes a row: 0.50 x b[idx]"
    ]
    assert report.peers_of(rows, "host_us") == ["b[idx]"]
    assert report.geometric_mean([2.0, 8.0]) == pytest.approx(4.0)


@pytest.mark.gpu
@pytest.mark.skipif(not HAVE_GPU, reason="torch sees no CUDA device")
def test_ways_on_a_gpu() -> None:
    device = torch.device("cuda", 0)
    found = run.measure(SMALL, 7, device, SMALL.buffers(device), quick_ways(), rounds=2)
    assert {OURS, "plan", "b[idx]", "index_select"} <= set(found.gpu_us)
    assert not set(found.missing) & {
        OURS,
        "plan",
        "plan, out=",
        "unchecked",
        "b[idx]",
        "index_select",
    }
    assert run.copy_ceiling(device) > 1e10
    # No capture has failed, after which torch could make no random numbers.
    assert torch.rand(3, device=device).shape == (3,)
