"""The tuner: which gathers, honest timing, choices that stand, and commands that can be trusted."""

from __future__ import annotations

import errno
import io
import itertools
import json
import math
import os
import re
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import HAVE_GPU
from typer.testing import CliRunner

import multigather
from multigather import api, cli, dispatch, native
from multigather.backends import _cupy, _torch, _triton
from multigather.backends.base import Config
from multigather.cache import shape, store
from multigather.cache.key import key_of
from multigather.cache.model import parse
from multigather.request import Request
from multigather.tuner import check as checking
from multigather.tuner import decide, measure, shapes, tune
from multigather.tuner.console import Log, Reporter
from multigather.tuner.measure import Bench, Candidate, Measurement, Timing, candidates_for

CPU = torch.device("cpu")
# Triton's interpreter is a backend of the CPU here, and slow.
ONLY_TORCH = ["--device", "cpu", "--backends", "torch"]
SMALL = ["--rows", "4,64", "--row-bytes", "8", "--buffers", "1,2", *ONLY_TORCH]
# "ragged" has the key of "uniform" here: keys know a row's mean size only.
SMALL_KEYS = 8


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache folder, with lookups on."""
    monkeypatch.setenv("MULTIGATHER_TUNING", "cached")
    monkeypatch.setenv("MULTIGATHER_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("MULTIGATHER_TUNING_PATH", raising=False)
    monkeypatch.setitem(shapes.TABLE_BYTES, "cpu", 2**20)  # filling tables takes most of the time
    api.forget()
    yield tmp_path / "cache" / "tuning"
    monkeypatch.undo()
    api.forget()


def multigather_command(*arguments: Any) -> tuple[int, str]:
    """Run the command line in this process; its exit status and all that it printed."""
    result = CliRunner().invoke(cli.app, [str(each) for each in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def the_file(folder: Path) -> Path:
    (file,) = folder.glob("*.json")
    return file


# Which gathers.


@pytest.mark.parametrize("preset", shapes.PRESETS)
def test_presets_leave_nothing_out_silently(preset: str) -> None:
    requests, skipped = shapes.preset(torch.device("cuda", 0), preset)
    combinations = 0
    for counts, sizes, buffers, layouts in shapes.PRESETS[preset]:
        for number, size in itertools.product(buffers, sizes):
            combinations += len(counts) * sum(
                shapes.makes_sense(each, size, number) for each in layouts
            )
    assert len(requests) + len(skipped) == combinations
    assert all("its output is more than 512 MiB" in text for text in skipped)
    assert all(each.row_bytes * each.count <= 512 << 20 for each in requests)


@pytest.mark.parametrize(
    ("layout", "unit"), [("uniform", 16), ("eights", 8), ("odd", 1), ("ragged", 16), ("mixed", 4)]
)
def test_layouts_are_what_they_say(layout: str, unit: int) -> None:
    for size in (512, 4096, 32768):
        for number in (3, 4, 16, 64):
            assert shapes.makes_sense(layout, size, number)
            request = shapes.request_of(CPU, 8, shapes.field_widths(layout, size, number))
            assert request.row_bytes / number == pytest.approx(size, rel=0.1)
            key = key_of(request)
            assert key.row == size.bit_length() - 1
            assert key.unit == unit
    columns = shapes.request_of(CPU, 8, shapes.field_widths("columns", 4, 24))
    assert [field.row_bytes for field in columns.fields] == [8, 4, 2, 1] * 6
    assert shapes.makes_sense("columns", 4, 24)
    assert not shapes.makes_sense("columns", 8, 24)
    assert not shapes.makes_sense("ragged", 512, 1)
    assert not shapes.makes_sense("odd", 1, 4)


def test_held_out_gathers_repeat_by_seed_and_vary() -> None:
    device = torch.device("cuda", 0)
    first, again = shapes.held_out(60, 5, device), shapes.held_out(60, 5, device)
    assert first == again != shapes.held_out(60, 6, device)
    assert any(len({field.row_bytes for field in each.fields}) > 2 for each in first)
    assert {key_of(each).unit for each in first} >= {1, 2, 4, 8}
    assert max(len(each.fields) for each in first) > 30
    assert min(len(each.fields) for each in first) == 1
    assert max(each.count for each in first) > 100_000
    assert any(each.row_bytes % 2 for each in first)
    tuned = {shape.to_text(each).__repr__() for each in shapes.preset(device, "default")[0]}
    assert not tuned & {shape.to_text(each).__repr__() for each in first}


# What is timed.


def small_request(count: int = 16, fields: int = 2) -> Request:
    return shapes.request_of(CPU, count, [(4, 4)] * (fields - 1) + [(8, 1)], rows=50)


def test_candidates_are_every_legal_config_and_the_heuristics_own() -> None:
    found, skipped = candidates_for(small_request(), ("torch",))
    assert [str(each) for each in found] == [
        "torch: elements=index_select",
        "torch: elements=gather",
    ]
    assert skipped == {}
    found, skipped = candidates_for(small_request())
    assert len(found) > 2 or "triton" in skipped
    assert "it runs on CUDA devices only" in skipped["cupy"]
    wide = shapes.request_of(CPU, 16, [(4, 4)], rows=50)
    found, skipped = candidates_for(wide, ("torch",))
    assert len(found) == 1
    assert "no buffer has one dimension" in skipped["torch: elements=gather"]


def test_the_one_predicate_of_legality() -> None:
    """A config of the space is legal or has its reason; candidates are those without one."""
    wide = shapes.request_of(CPU, 16, [(4, 4)], rows=50)
    for backend in (_cupy.CudaBackend(), _triton.TritonBackend(), _torch.TorchBackend()):
        for request in (small_request(), wide, replace(wide, count=2**31)):
            reasons = [backend.illegal(request, config) for config in backend.space()]
            assert None in reasons
            assert all(reason is None or len(reason) > 20 for reason in reasons)
    assert any(_torch.TorchBackend().illegal(wide, each) for each in _torch.TorchBackend().space())


@pytest.mark.parametrize(
    "backend",
    [_cupy.CudaBackend(), _triton.TritonBackend(), _torch.TorchBackend()],
    ids=lambda b: b.name,
)
def test_configs_survive_a_file(backend: Any) -> None:
    """A config is written as its knobs, and those give the config back."""
    space = backend.space()
    assert len(set(space)) == len(space)
    for config in space:
        knobs = json.loads(json.dumps(config.__dict__))
        assert backend.config_from(knobs) == config
        for name, value in knobs.items():
            wrong = 1.5 if isinstance(value, str) else str(value)
            with pytest.raises(ValueError, match=name):
                backend.config_from({**knobs, name: wrong})
        with pytest.raises(ValueError, match="no knob 'fast'"):
            backend.config_from({**knobs, "fast": True})


@dataclass(frozen=True)
class FakeConfig(Config):
    """What the fake backend does: how long it takes, and whether it is right."""

    seconds: float = 0.0
    fault: str = ""


class FakeBackend:
    """Gathers by indexing, late or wrongly if its config says so."""

    name = "fake"
    revision = 1
    sleep = staticmethod(time.sleep)

    def prepare(self, request: Request, config: FakeConfig, site: Any) -> Any:
        if config.fault == "prepare":
            raise RuntimeError("out of registers\nmore")

        def run(indices: Any, size: Any, sources: Any, outs: Any) -> list[torch.Tensor]:
            self.sleep(config.seconds)
            results = [source[indices] for source in sources]
            if config.fault == "bytes":
                results[1].view(torch.uint8)[-1] ^= 1
            return results

        return run


class Clock:
    """Time that passes only by sleeping, and by a microsecond at each look."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        self.now += 1e-6
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(measure, "time", made)
    monkeypatch.setattr(FakeBackend, "sleep", staticmethod(made.sleep))
    return made


def test_wrong_bytes_and_failures_are_no_candidates() -> None:
    backend: Any = FakeBackend()
    good, wrong, broken = (
        Candidate(backend, FakeConfig(0.0, fault)) for fault in ("", "bytes", "prepare")
    )
    measured = Bench(small_request()).measure([wrong, good, broken], rounds=2)
    assert set(measured.timings) == {good}
    assert "wrong bytes from buffer 1" in measured.failed[wrong]
    assert measured.failed[broken] == "RuntimeError: out of registers"
    assert measured.best() == good


@pytest.mark.usefixtures("clock")
def test_slow_candidates_are_out_early_unless_kept() -> None:
    backend: Any = FakeBackend()
    fast, slow, kept = (Candidate(backend, FakeConfig(each)) for each in (0.0, 0.02, 0.021))
    measured = Bench(small_request()).measure([fast, slow, kept], keep=[kept], rounds=3)
    assert measured.timings[slow].rounds == 1
    assert measured.timings[fast].rounds == 3
    assert measured.timings[kept].us > 20_000
    assert measured.timings[kept].rounds == 3
    assert measured.best() == fast


def test_nothing_is_begun_after_the_deadline() -> None:
    backend: Any = FakeBackend()
    candidates = [Candidate(backend, FakeConfig(each / 1000)) for each in range(5)]
    measured = Bench(small_request()).measure(candidates, rounds=1, deadline=time.monotonic() - 1)
    assert set(measured.timings) == {candidates[0]}


def test_buffers_are_laid_out_as_the_request_says() -> None:
    text = {
        "indices": "int32[5]",
        "bounds": "raise",
        "fields": [
            "float32[9, 2, 3] stride 40 alignment 4",
            "bool[7]",
            "complex64[3, 1]",
            "int8[4] stride 0",
        ],
    }
    request = shape.from_text(text, CPU)
    bench = Bench(request)
    for source, field in zip(bench.sources, request.fields, strict=True):
        assert source.shape == (field.rows, *field.row_shape)
        assert source.stride(0) * source.element_size() == field.row_stride_bytes
        assert source.dtype == field.dtype
        assert source.data_ptr() % 16 == field.alignment % 16
        assert source[0].is_contiguous()
    assert all(each.dtype == torch.int32 and each.max() < 3 for each in bench.indices)
    assert not bench.measure(candidates_for(request, ("torch",))[0], rounds=1).failed


# What is chosen.


def measured(
    times: dict[Candidate, float], spread: float = 0.0, request: Request | None = None
) -> Measurement:
    return Measurement(
        request or small_request(), {each: Timing(us, spread, 7) for each, us in times.items()}, {}
    )


def entry_for(*measurements: Measurement, hosts: dict[str, float] | None = None) -> Any:
    key = key_of(measurements[0].request)
    return decide.entry_of(key, measurements, hosts or {}, {"test": 1})


INDEX_SELECT = Candidate(dispatch.backend_named("torch"), _torch.TorchConfig("index_select"))
GATHER = Candidate(dispatch.backend_named("torch"), _torch.TorchConfig("gather"))
TRITON = Candidate(dispatch.backend_named("triton"), _triton.TritonConfig(1024, 4, False))


@pytest.mark.parametrize(
    ("default_us", "other_us", "spread", "elements"),
    [
        (10.0, 9.9, 0.0, "index_select"),  # within 2 %
        (10.0, 9.7, 0.0, "gather"),
        (10.0, 9.7, 0.1, "index_select"),  # within 3 times both spreads, 0.6
        (10.0, 9.3, 0.1, "gather"),
        (10.0, 11.0, 0.0, "index_select"),
    ],
)
def test_the_heuristic_stands_unless_clearly_beaten(
    default_us: float, other_us: float, spread: float, elements: str
) -> None:
    entry = entry_for(measured({INDEX_SELECT: default_us, GATHER: other_us}, spread))
    assert entry.pick == "torch"
    assert entry.backends["torch"].config == {"elements": elements}
    assert entry.default.config == {"elements": "index_select"}
    assert entry.default.device_us == default_us
    assert entry.shapes == [shape.to_text(small_request())]


def test_a_backend_must_win_clearly_too() -> None:
    assert entry_for(measured({INDEX_SELECT: 10.0, TRITON: 9.9})).pick == "torch"
    assert entry_for(measured({INDEX_SELECT: 10.0, TRITON: 9.0})).pick == "triton"
    # In a short call the host is what the user waits for …
    slower_host = {"torch": 20.0, "triton": 30.0}
    assert entry_for(measured({INDEX_SELECT: 10.0, TRITON: 9.0}), hosts=slower_host).pick == "torch"
    # … and in a long one the GPU.
    long = measured({INDEX_SELECT: 1000.0, TRITON: 900.0})
    assert entry_for(long, hosts=slower_host).pick == "triton"


def test_gathers_of_one_key_count_alike() -> None:
    """The geometric mean of the slow-downs decides, not the longest gather."""
    one = measured({INDEX_SELECT: 10.0, GATHER: 30.0})
    other = measured({INDEX_SELECT: 1000.0, GATHER: 800.0})
    entry = entry_for(one, other)
    assert entry.backends["torch"].config == {"elements": "index_select"}
    assert entry.backends["torch"].device_us == pytest.approx(math.sqrt(10.0 * 1000.0), rel=1e-4)
    assert len(entry.shapes) == 2


def test_nothing_measured_is_an_error() -> None:
    failed = Measurement(small_request(), {}, {INDEX_SELECT: "RuntimeError: no"})
    with pytest.raises(decide.NothingMeasured, match="RuntimeError: no"):
        entry_for(failed)


# The commands.


def test_tune_publishes_and_dispatch_follows(folder: Path) -> None:
    status, output = multigather_command("tune", *SMALL)
    assert status == 0, output
    assert f"{SMALL_KEYS} keys measured" in output
    tuning = parse(the_file(folder).read_bytes())
    assert len(tuning.entries) == SMALL_KEYS
    assert not tuning.rejected
    for entry in tuning.entries.values():
        assert entry.pick == "torch"
        assert dispatch.refusal_of("torch", entry.backends["torch"]) is None
        assert entry.key == key_of(shape.from_text(entry.shapes[0], CPU))
        assert (
            tuning.environments[entry.backends["torch"].environment]["torch"] == torch.__version__
        )
    buffers = torch.zeros(99, 2), torch.zeros(99, 2)
    text = str(multigather.explain(torch.zeros(64, dtype=torch.int64), *buffers))
    assert "measured, m64.row8.buffers2.unit8 in" in text
    assert str(the_file(folder)) in text


def test_tune_again_measures_only_what_is_missing_stale_or_asked_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    multigather_command("tune", *SMALL)
    before = the_file(folder).read_bytes()
    status, output = multigather_command("tune", *SMALL)
    assert status == 0
    assert f"0 keys measured in 0 s ({SMALL_KEYS} were there" in output
    assert the_file(folder).read_bytes() == before
    _, output = multigather_command("tune", *SMALL, "--retune", "stale")
    assert "0 keys measured" in output
    _, output = multigather_command("tune", *SMALL, "--rows", "4,64,1024")
    assert f"{SMALL_KEYS // 2} keys measured" in output
    _, output = multigather_command("tune", *SMALL, "--retune", "all")
    assert f"{SMALL_KEYS} keys measured" in output
    monkeypatch.setattr(_torch.TorchBackend, "revision", 2)
    _, output = multigather_command("tune", *SMALL)
    assert f"{SMALL_KEYS} keys measured" in output  # a kernel that changed is a missing one
    versions = decide.environment_facts()
    monkeypatch.setattr(tune, "environment_facts", lambda: {**versions, "torch": "9.9"})
    _, output = multigather_command("tune", *SMALL)
    assert "0 keys measured" in output
    _, output = multigather_command("tune", *SMALL, "--retune", "stale")
    assert f"{SMALL_KEYS} keys measured" in output


def test_an_interrupted_tune_keeps_its_keys_and_resumes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    multigather_command("tune", *SMALL)
    # Keys measured in the same second as the run's beginning count as its own.
    time.sleep(1.1)
    original = tune._measure_key
    asked: list[str] = []

    def interrupted(key: Any, *others: Any) -> Any:
        if len(asked) == 4:
            raise KeyboardInterrupt
        asked.append(key.label)
        return original(key, *others)

    monkeypatch.setattr(tune, "_measure_key", interrupted)
    status, output = multigather_command("tune", *SMALL, "--retune", "all")
    assert status == 130
    assert "every key measured so far is kept" in output
    assert len(parse(the_file(folder).read_bytes()).entries) == SMALL_KEYS
    resumed: list[str] = []

    def noted(key: Any, *others: Any) -> Any:
        resumed.append(key.label)
        return original(key, *others)

    monkeypatch.setattr(tune, "_measure_key", noted)
    status, output = multigather_command("tune", *SMALL, "--resume")
    assert status == 0
    assert len(resumed) == SMALL_KEYS - 4
    assert not set(resumed) & set(asked)
    resumed.clear()
    multigather_command("tune", *SMALL, "--resume")  # nothing is left of the run
    assert resumed == []


def test_budget_and_dry_run(folder: Path) -> None:
    status, output = multigather_command("tune", *SMALL, "--dry-run", "--json")
    assert status == 0
    plan = json.loads(output)
    assert len(plan["keys"]) == SMALL_KEYS
    assert plan["candidates"] >= SMALL_KEYS
    assert not folder.exists()
    status, output = multigather_command("tune", *SMALL, "--budget", "0s", "--json")
    assert status == 1  # nothing was measured
    assert json.loads(output)["left"] == SMALL_KEYS


def test_tune_what_a_program_recorded(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = tmp_path / "shapes.jsonl"
    monkeypatch.setenv("MULTIGATHER_RECORD", str(record))
    a, b = torch.zeros(37, 5), torch.zeros(41, dtype=torch.int16)
    for count in (3, 3, 50):
        multigather.gather(torch.zeros(count, dtype=torch.int32), a, b)
    monkeypatch.delenv("MULTIGATHER_RECORD")
    assert len(record.read_text().splitlines()) == 2
    status, output = multigather_command("tune", "--from-record", record, *ONLY_TORCH)
    assert status == 0, output
    measured_shapes = [
        each
        for entry in parse(the_file(folder).read_bytes()).entries.values()
        for each in entry.shapes
    ]
    assert sorted(each["indices"] for each in measured_shapes) == ["int32[3]", "int32[50]"]
    assert all(each["fields"] == ["float32[37, 5]", "int16[41]"] for each in measured_shapes)
    indices = torch.zeros(50, dtype=torch.int32)
    assert "measured, m64" in str(multigather.explain(indices, a, b))
    record.write_text(record.read_text() + '{"indices": "int64[x]"}\n')
    status, output = multigather_command("tune", "--from-record", record, *ONLY_TORCH)
    assert status == 2
    assert "line 3" in output
    assert "int64[x]" in output


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (["tune", "--rows", "0"], 2, "--rows must be numbers of at least 1 by comma, got '0'"),
        (["tune", "--row-bytes", "4;8"], 2, "--row-bytes"),
        (["tune", "--backends", "cuda"], 2, "no backend 'cuda', only cupy, triton, native, torch"),
        (["tune", "--budget", "soon"], 2, "--budget must be like 90s, 8m or 1h, got 'soon'"),
        (["tune", "--from-record", "/no/such/file"], 2, "/no/such/file"),
        (["tune", "--from-record", "x", "--rows", "4"], 2, "cannot be combined"),
        (["show", "/no/such/file"], 2, "there is no tuning file /no/such/file"),
        (["show", "--device", "cpu"], 2, "run `multigather tune`"),
        (["check", "--device", "cpu"], 2, "run `multigather tune`"),
        (["export", "--device", "cpu"], 2, "there is no tuning file"),
        (["merge", "/no/a", "/no/b", "-o", "/no/c"], 2, "/no/a"),
        (["explain", "--rows", "4", "--row-bytes", "1", "--layout", "odd"], 2, "--layout odd"),
    ],
)
def test_wrong_options(folder: Path, arguments: list[str], status: int, text: str) -> None:
    found, output = multigather_command(*arguments)
    assert found == status, output
    assert text in output


@pytest.mark.skipif(HAVE_GPU, reason="there is a GPU")
def test_a_gpu_that_is_not_there(folder: Path) -> None:
    for command in ("tune", "check", "show"):
        status, output = multigather_command(command, "--device", "cuda")
        assert status == 3
        assert "torch sees no GPU" in output


def test_a_disk_that_is_full_while_tuning(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was published before is kept, the failure is said, and the next run goes on."""
    synchronise = os.fsync
    calls: list[int] = []

    def full(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) > 4:  # a file and its folder for each key
            raise OSError(errno.ENOSPC, "No space left on device")
        synchronise(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        status, output = multigather_command("tune", *SMALL)
    assert status not in (0, 1)
    assert "No space left on device" in output
    assert len(parse(the_file(folder).read_bytes()).entries) == 2
    assert not list(folder.rglob("*.tmp"))
    status, output = multigather_command("tune", *SMALL)
    assert status == 0
    assert f"{SMALL_KEYS - 2} keys measured" in output


def test_a_clock_that_was_set_back_before_tuning(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measuring again replaces entries that are dated in the future."""
    multigather_command("tune", *SMALL)
    file = the_file(folder)
    future = re.sub(r'"at": "\d{4}', '"at": "2099', file.read_text())
    file.write_text(re.sub(r'"device_us": [0-9.e+-]+', '"device_us": 123456.0', future))
    status, output = multigather_command("tune", *SMALL, "--retune", "all")
    assert status == 0, output
    for entry in parse(file.read_bytes()).entries.values():
        assert entry.backends["torch"].device_us != 123456.0
    status, output = multigather_command("tune", *SMALL, "--retune", "stale")
    assert "0 keys measured" in output


def test_a_folder_that_cannot_be_written_is_found_out_first(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(tune, "tune", lambda *_: pytest.fail("it measured"))
    status, output = multigather_command("tune", *SMALL, "--out", tmp_path / "file" / "sub")
    assert status == 4
    assert str(tmp_path / "file") in output


def test_show(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    multigather_command("tune", *SMALL)
    status, output = multigather_command("show", "--device", "cpu")
    assert status == 0
    assert "m64.row8.buffers2.unit8" in output
    status, output = multigather_command("show", the_file(folder), "--json")
    (found,) = json.loads(output)
    assert len(found["entries"]) == SMALL_KEYS
    row = found["entries"][0]
    assert row["over_torch"] == 1.0
    assert row["stale"] is None
    _, output = multigather_command("show", the_file(folder), "--json", "--stale")
    assert json.loads(output)[0]["entries"] == []
    monkeypatch.setattr(_torch.TorchBackend, "revision", 7)
    _, output = multigather_command("show", the_file(folder), "--json", "--stale")
    stale = json.loads(output)[0]["entries"]
    assert len(stale) == SMALL_KEYS
    assert stale[0]["stale"] == "torch: measured for kernel revision 1, this is 7"
    status, output = multigather_command("show", "--schema")
    assert json.loads(output)["title"] == "Tuning"


def test_show_draws_the_map(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    multigather_command("tune", *SMALL)
    picture = tmp_path / "map.png"
    status, _ = multigather_command("show", "--device", "cpu", "--plot", picture)
    assert status == 0
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    nowhere = tmp_path / "no" / "map.png"
    status, _ = multigather_command("show", "--device", "cpu", "--plot", nowhere)
    assert status == 4


def test_check_compares_the_choice_with_the_best(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Rows of one element, for which the torch backend has two configs.
    multigather_command("tune", *SMALL, "--row-bytes", "4")
    file = the_file(folder)
    text = file.read_text().replace('"elements": "index_select"', '"elements": "gather"')
    content = json.loads(text)
    content["entries"] = {
        label: entry for label, entry in content["entries"].items() if label.endswith(".unit4")
    }
    file.write_text(json.dumps(content))
    api.forget()

    def fake(self: Bench, candidates: Any, keep: Any = (), **_: Any) -> Measurement:
        choice, heuristic = keep
        assert str(choice) == "torch: elements=gather"
        assert str(heuristic) == "torch: elements=index_select"
        found = {each: Timing(10.0, 0.1, 7) for each in candidates}
        return Measurement(self.request, {**found, choice: Timing(11.0, 0.1, 7)}, {})

    monkeypatch.setattr(Bench, "measure", fake)
    command = ["check", *ONLY_TORCH, "--sample", "3", "--seed", "1"]
    status, output = multigather_command(*command, "--json")
    assert status == 1  # the median is above 3 %
    found = json.loads(output)
    assert found["median"] == found["worst"] == 0.1
    assert len(found["gathers"]) == 3
    assert multigather_command(*command, "--max-median", "0.2")[0] == 0
    assert multigather_command(*command, "--max-median", "0.2", "--max-regret", "0.09")[0] == 1


def test_held_out_gathers_are_checked(folder: Path) -> None:
    multigather_command("tune", *SMALL)
    _, output = multigather_command(
        "check", *ONLY_TORCH, "--held-out", "3", "--seed", "3", "--max-regret", "9"
    )
    assert "3 gathers that were not tuned, seed 3" in output
    assert "regret against the best of all: median" in output


def test_regret_is_that_of_the_choice(
    folder: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    """A choice that sleeps is found to be slow, and the other the best."""
    monkeypatch.setattr(native, "extension", None)  # whose backend dispatch would choose
    request = small_request()

    def slow(self: Any, *arguments: Any) -> Any:
        clock.sleep(0.003)
        return fast(self, *arguments)

    fast = _torch.SelectRunner.__call__
    original = _torch.TorchBackend.prepare

    def prepare(self: Any, request: Request, config: Any, site: Any) -> Any:
        runner = original(self, request, config, site)
        if config.elements == "index_select":
            return lambda *arguments: slow(runner, *arguments)
        return runner

    monkeypatch.setattr(_torch.TorchBackend, "prepare", prepare)
    verdict = checking.check([request], ("torch",), Reporter(quiet=True), Log(None))
    (regret,) = verdict.regrets
    assert regret.choice == "torch index_select"
    assert regret.best == "torch gather"
    assert regret.choice_us > 3000 > regret.best_us
    assert verdict.worst == verdict.median == regret.share > 1


ROOT = Path(__file__).resolve().parent.parent
LOG = ROOT / "benchmarks" / "nvidia-h200-held-out.jsonl"
SHIPPED = ROOT / "tuning_cache" / "nvidia-h200.json"


def shipped_choices_judged_by(log: Path) -> dict[str, Any]:
    """What the shipped choices cost by the times of every config in a log; within the limits."""
    status, output = multigather_command(
        "check", "--from-log", log, "--tuning", SHIPPED, "--json", "--device", "cpu"
    )
    found: dict[str, Any] = json.loads(output)
    assert status == 0
    assert found["median"] <= 0.03
    assert found["worst"] <= 0.15
    return found


def test_shipped_choices_are_good_for_gathers_that_were_not_tuned() -> None:
    """Judged by the times of every config in 48 random gathers, as one H200 took for them."""
    found = shipped_choices_judged_by(LOG)
    assert len(found["gathers"]) == 48
    tuned = set(parse(SHIPPED.read_bytes()).entries)
    assert sum(each["key"] in tuned for each in found["gathers"]) < 10
    assert sum(each["best_us"] < each["choice_us"] for each in found["gathers"]) > 20
    # Without any tuning file the heuristic is judged, and found to be worse.
    status, output = multigather_command("check", "--from-log", LOG, "--json", "--device", "cpu")
    assert status in (0, 1)
    heuristic = json.loads(output)
    assert heuristic["median"] > 2 * found["median"]
    assert heuristic["worst"] > found["worst"]


def test_shipped_choices_are_good_for_narrow_rows() -> None:
    """77 gathers of rows in units of 1, 2 or 4 bytes, by 65 keys; 40 of these are tuned."""
    found = shipped_choices_judged_by(ROOT / "benchmarks" / "nvidia-h200-narrow.jsonl")
    assert len(found["gathers"]) == 77
    # Each kernel is the faster one somewhere.
    assert {each["choice"].split()[0] for each in found["gathers"]} == {"cupy", "triton"}


def test_choices_are_legal_for_gathers_that_were_not_tuned() -> None:
    """An entry's config may be one that a gather near it cannot run; dispatch must see that."""
    by_name = {backend.name: backend for backend in dispatch.BACKENDS}
    source = store.Source("shipped", str(SHIPPED), 0, parse(SHIPPED.read_bytes()).keys)
    winners = store.Winners([source])
    exact = 0
    for request in shapes.held_out(200, 9, torch.device("cuda", 0)):
        found = winners.find(key_of(request), dispatch.refusal_of)
        assert found is not None
        names = [name for name, _ in found.choices]
        assert sorted(names) == ["cupy", "torch", "triton"]
        assert names[-1] == "torch"
        for name, knobs in found.choices:
            assert by_name[name].illegal(request, by_name[name].config_from(knobs)) in (
                None,
                "no buffer has one dimension, so it is the same as index_select",
            )
        exact += found.origin.startswith("measured, ")
    assert exact < 50


def test_progress_on_a_terminal_and_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for stream in (Terminal(), io.StringIO()):
        with Reporter(stream) as reporter:
            reporter.say("[40 of] keys")
            phase = reporter.phase("measuring", 3)
            for step in (1, 2, 3):
                phase.done(step)
        assert "[40 of] keys" in stream.getvalue()
        text = "measuring: 3 of 3, 0 s, about 0 s left"
        assert (text in stream.getvalue()) == (not stream.isatty())
        assert ("3/3" in stream.getvalue()) == stream.isatty()
    with Reporter(quiet=True) as reporter:
        reporter.say("nothing")
        reporter.phase("nothing", 1).done(1)
    assert capsys.readouterr() == ("", "")


def test_logs_that_are_none(folder: Path, tmp_path: Path) -> None:
    first = LOG.read_text().splitlines()[0]
    for line, text in (
        ("{", "line 2"),
        ("[]", "no line of a timing log"),
        ('{"gather": {}}', "indices must be like"),
        (first.replace("cupy:", "gpu:"), "there is no backend 'gpu'"),
        (first.replace("threads=64", "threads=63"), "threads must be 32"),
    ):
        log = tmp_path / "log.jsonl"
        log.write_text(f"{first}\n{line}\n")
        status, output = multigather_command("check", "--from-log", log, "--device", "cpu")
        assert status == 2, output
        assert text in output
        assert "line 2" in output
    status, output = multigather_command("check", "--tuning", SHIPPED, "--device", "cpu")
    assert status == 2
    assert "--tuning goes with --from-log" in output


def test_timings_survive_a_log(folder: Path, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    multigather_command("check", *ONLY_TORCH, "--held-out", "2", "--log", log)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert len(lines) == 2
    for line in lines:
        assert measure.from_dict(line, CPU).as_dict() == line


def test_merge_and_export(folder: Path, tmp_path: Path) -> None:
    one, other, both = tmp_path / "one", tmp_path / "other", tmp_path / "both.json"
    multigather_command("tune", *SMALL, "--out", one)
    multigather_command("tune", *SMALL, "--rows", "1024", "--out", other)
    status, output = multigather_command("merge", the_file(one), the_file(other), "-o", both)
    assert status == 0
    assert f"{SMALL_KEYS + SMALL_KEYS // 2} entries of 2 files" in output
    assert len(parse(both.read_bytes()).entries) == SMALL_KEYS + SMALL_KEYS // 2
    multigather_command("tune", *SMALL)
    command = ["export", "--device", "cpu", "--to", tmp_path / "shipped", "--json"]
    status, output = multigather_command(*command)
    assert status == 0
    assert json.loads(output)["entries"] == SMALL_KEYS
    assert the_file(tmp_path / "shipped").read_bytes() == the_file(folder).read_bytes()


def test_paths_and_explain(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MULTIGATHER_TUNING_PATH", str(tmp_path / "given"))
    _, output = multigather_command("paths", "--json")
    places = [(each["place"], each["path"]) for each in json.loads(output)]
    assert places[:2] == [
        ("MULTIGATHER_TUNING_PATH", str(tmp_path / "given")),
        ("user cache", str(folder)),
    ]
    assert places[2][0] == "shipped"
    multigather_command("tune", *SMALL)
    command = ["explain", "--rows", "64", "--row-bytes", "8", "--buffers", "2", "--device", "cpu"]
    status, output = multigather_command(*command)
    assert status == 0
    assert "chosen by: measured, m64.row8.buffers2.unit8" in output
    assert "searched for m64.row8.buffers2.unit8" in output
    _, output = multigather_command(*command, "--json")
    assert json.loads(output)["picks"][0]["backend"] == "torch"


def test_every_timing_can_be_logged(folder: Path, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    multigather_command("tune", *SMALL, "--log", log)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert len(lines) == SMALL_KEYS + 2  # of two keys, two gathers each
    assert all(line["timings"] for line in lines)
    status, output = multigather_command("tune", *SMALL, "--log", tmp_path / "no" / "log")
    assert status == 4
    assert "--log" in output


def test_while_capturing_no_file_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    multigather_command("tune", *SMALL)
    request = shapes.request_of(CPU, 64, shapes.field_widths("uniform", 8, 2))
    api.forget()
    monkeypatch.setattr(store, "_read", lambda _: pytest.fail("it read a file"))
    selection = dispatch.select(request, None, measure.site_of(request), reading=False)
    assert not selection.settled
    assert not selection.tuned
    assert "heuristic" in selection.picks[0].origin
    monkeypatch.undo()


def test_a_kernel_backend_is_chosen_and_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the file to the launch, with the CUDA source on the CPU: own keys and those between."""
    from cuda_host import HostCudaBackend

    from multigather.cache import model
    from multigather.cache.device import device_of

    backend = HostCudaBackend()
    if backend.unavailable():
        pytest.skip("; ".join(backend.unavailable()))
    monkeypatch.setattr(dispatch, "BACKENDS", (backend, *dispatch.BACKENDS[1:]))
    slow, fast = _cupy.CudaConfig(128, 1), _cupy.CudaConfig(64, 4)
    entries = {}
    for count in (4, 64):
        request = shapes.request_of(CPU, count, [(4, 25), (1, 33)], rows=40)
        times = {INDEX_SELECT: 9.0, Candidate(backend, slow): 6.0, Candidate(backend, fast): 3.0}
        timings = {each: Timing(us, 0.0, 7) for each, us in times.items()}
        entry = decide.entry_of(
            key_of(request), [Measurement(request, timings, {})], {}, {"test": 1}
        )
        entries[entry.key.label] = entry
    device = device_of(CPU)
    assert device is not None
    path = store.file_for(folder, device)
    store.publish(path, model.Tuning(schema=1, device=device, entries=entries))
    api.forget()
    buffers = torch.randn(40, 25), torch.randint(0, 255, (40, 33), dtype=torch.uint8)
    for count, origin in ((64, "measured, m64."), (16, "measured around it in 2 entries")):
        indices = torch.randint(-40, 40, (count,))
        text = str(multigather.explain(indices, *buffers))
        assert "runs on cupy (threads=64, unroll=4, streaming=False)" in text
        assert f"chosen by: {origin}" in text
        for _ in range(3):
            for out, buffer in zip(multigather.gather(indices, *buffers), buffers, strict=True):
                assert torch.equal(out, buffer[indices])
    with pytest.raises(IndexError, match=r"is 40, out of range for bufs\[0\]"):
        multigather.gather(torch.full((64,), 40), *buffers)


# On a GPU.


@pytest.mark.gpu
@pytest.mark.skipif(not HAVE_GPU, reason="torch sees no CUDA device")
class TestOnGpu:
    def test_tune_and_use(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MULTIGATHER_TUNING", "cached")
        monkeypatch.setenv("MULTIGATHER_CACHE_DIR", str(tmp_path))
        api.forget()
        status, output = multigather_command(
            "tune", "--rows", "64", "--row-bytes", "32", "--buffers", "3"
        )
        assert status == 0, output
        tuning = parse(the_file(tmp_path / "tuning").read_bytes())
        able = {status.name for status in multigather.backends() if status.available} - {"native"}
        wanted, _ = shapes.grid(torch.device("cuda", 0), (64,), (32,), (3,))
        assert set(tuning.keys) == {key_of(each) for each in wanted}
        for entry in tuning.entries.values():
            assert set(entry.backends) == able
            assert entry.failed == {}
            assert all(each.host_us and each.device_us < 1000 for each in entry.backends.values())
        buffers = [torch.rand(1000, 8, device="cuda") for _ in range(3)]
        indices = torch.randint(1000, (64,), device="cuda")
        assert "measured, m64.row32.buffers4.unit16" in str(multigather.explain(indices, *buffers))
        for out, buffer in zip(multigather.gather(indices, *buffers), buffers, strict=True):
            assert torch.equal(out, buffer[indices])

    def test_first_use_while_capturing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Nothing is read, the heuristic serves, and the next call outside looks again."""
        monkeypatch.setenv("MULTIGATHER_TUNING", "cached")
        monkeypatch.setenv("MULTIGATHER_CACHE_DIR", str(tmp_path))
        buffers = [torch.rand(77, 6, device="cuda"), torch.rand(77, device="cuda")]
        indices = torch.randint(77, (33,), device="cuda")
        multigather.gather(indices, *buffers)  # compiles
        api.forget()
        reads: list[Any] = []
        original = store._read
        monkeypatch.setattr(store, "_read", lambda device: reads.append(device) or original(device))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs = multigather.gather(indices, *buffers)
        assert reads == []
        indices.random_(77)
        graph.replay()
        torch.cuda.synchronize()
        for out, buffer in zip(outs, buffers, strict=True):
            assert torch.equal(out, buffer[indices])
        multigather.gather(indices, *buffers)
        assert len(reads) == 1
        multigather.gather(indices, *buffers)
        assert len(reads) == 1
        api.forget()

    def test_online(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MULTIGATHER_TUNING", "online")
        monkeypatch.setenv("MULTIGATHER_CACHE_DIR", str(tmp_path))
        monkeypatch.setattr(
            store, "layers", lambda: [store.Layer("user cache", tmp_path / "tuning")]
        )
        api.forget()
        buffers = [torch.rand(500, 24, device="cuda"), torch.rand(500, 3, device="cuda")]
        indices = torch.randint(500, (100,), device="cuda")
        for out, buffer in zip(multigather.gather(indices, *buffers), buffers, strict=True):
            assert torch.equal(out, buffer[indices])
        tuning = parse(the_file(tmp_path / "tuning").read_bytes())
        assert [entry.key for entry in tuning.entries.values()] == [
            key_of(shape.from_text(next(iter(tuning.entries.values())).shapes[0], indices.device))
        ]
        assert "measured" in str(multigather.explain(indices, *buffers))
        multigather.check()
        api.forget()
