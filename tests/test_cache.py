"""Tuning files: what is filed under which key, how files are found, read, written and refused.

A gather must be right and must not fail whatever a tuning file says, and no file may lose what
somebody measured.
"""

import dataclasses
import errno
import hashlib
import itertools
import json
import logging
import math
import os
import random
import re
import subprocess
import sys
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cases import DTYPES, assert_gathered
from hypothesis import given, settings
from hypothesis import strategies as st

import multigather
from multigather import api, dispatch, native
from multigather.backends._cupy import CudaBackend
from multigather.backends._torch import TorchBackend
from multigather.backends._triton import TritonBackend
from multigather.cache import model, record, rules, shape, store
from multigather.cache.device import Device, device_of
from multigather.cache.key import FARTHEST, UNITS, Key, key_of
from multigather.cache.model import (
    TuningFileError,
    config_of_text,
    config_text,
    merge,
    parse,
    render,
)
from multigather.cache.store import WriteError, publish
from multigather.request import BOUNDS, INDEX_DTYPES, Field, Request, field_of, has_contiguous_rows
from multigather.tuner import online

ROOT = Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")

# The gather that most tests ask for, its key, and a choice for it that no rule makes.
INDICES = torch.tensor([3, 0, 39, -1, 7, 7, 20, -40])
BUFFER = torch.arange(40, dtype=torch.float32)
KEY = Key(count=3, row=2, buffers=0, unit=4)
MEASURED = "elements=gather"
HEURISTIC = "elements=index_select"
FAR_KEY = Key(count=13, row=2, buffers=0, unit=4)
FAR_INDICES = torch.arange(8192) % 40


REVISIONS = {backend.name: backend.revision for backend in dispatch.BACKENDS}


def measured(us=10.0, **fields):
    """A backend of an entry, as in a file; `entry` adds the revision of this version's backend."""
    return {
        "config": {"elements": "gather"},
        "device_us": us,
        "spread_us": 0.5,
        "environment": "e",
        "at": "2026-01-02T03:04:05Z",
        **fields,
    }


def entry(key=KEY, pick="torch", backends=None, **fields):
    """An entry, as in a file."""
    backends = {
        name: {"revision": REVISIONS.get(name, 1), **each}
        for name, each in (backends or {pick: measured()}).items()
    }
    return {"key": dataclasses.asdict(key), "pick": pick, "backends": backends, **fields}


def content(*entries, device=None, **fields):
    """A tuning file for this CPU, or for another device."""
    return {
        "schema": 1,
        "device": dataclasses.asdict(device or device_of(CPU)),
        "environments": {"e": {"torch": "2"}},
        "entries": {Key(**each["key"]).label: each for each in entries},
        **fields,
    }


def tuning(*entries, **fields):
    """The same, read."""
    found = parse(json.dumps(content(*entries, **fields)).encode())
    assert not found.rejected
    return found


def write(path, written):
    """Write a file, from bytes or from what JSON can say, and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(written if isinstance(written, bytes) else json.dumps(written).encode())
    return path


@dataclass
class Places:
    """The folders of the layers, the highest first; none exists at first."""

    given: Path
    first: Path
    second: Path
    user: Path
    shipped: Path


@pytest.fixture
def places(tmp_path, monkeypatch):
    """Mode "cached", with every layer's folder below a temporary one and no file anywhere."""
    names = ("given", "first", "second", "cache/tuning", "shipped")
    found = Places(*(tmp_path / name for name in names))
    monkeypatch.setenv("MULTIGATHER_TUNING", "cached")
    monkeypatch.setenv("MULTIGATHER_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("MULTIGATHER_TUNING_PATH", f"{found.first}{os.pathsep}{found.second}")
    monkeypatch.delenv("MULTIGATHER_RECORD", raising=False)
    monkeypatch.setattr(store, "resources", SimpleNamespace(files=lambda package: found.shipped))
    monkeypatch.setattr(store, "_given", [])
    monkeypatch.setattr(store, "_warned", set())
    api.forget()
    yield found
    api.forget()


@pytest.fixture(autouse=True)
def without_the_extension():
    """On a CPU the native backend has nothing to choose; the torch backend has."""
    with native.without():
        yield


@pytest.fixture
def prepared(monkeypatch):
    """The configs that the torch backend was asked to run with, in order."""
    configs = []
    prepare = TorchBackend.prepare

    def noting(self, request, config, site):
        configs.append(config.describe())
        return prepare(self, request, config, site)

    monkeypatch.setattr(TorchBackend, "prepare", noting)
    return configs


def choice(indices=INDICES, *buffers, **options):
    """What would run a gather: backend, config and origin."""
    (pick,) = multigather.explain(indices, *(buffers or (BUFFER,)), **options).picks
    return pick


def check_gather(indices=INDICES, *buffers, **options):
    """Gather, and compare every byte."""
    buffers = buffers or (BUFFER,)
    results = multigather.gather(indices, *buffers, **options)
    for result, buffer in zip(results, buffers, strict=True):
        assert_gathered(result, indices, buffer)


def warnings_in(caplog):
    """What multigather has warned of so far."""
    return [
        each.getMessage()
        for each in caplog.records
        if each.name == "multigather" and each.levelno >= logging.WARNING
    ]


def run_script(script, *arguments, **environment):
    """Run a script in a new process; return the JSON it printed. A variable of None is unset."""
    variables = {**os.environ, "TRITON_INTERPRET": "0", **environment}
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        env={name: value for name, value in variables.items() if value is not None},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def names_in(folder):
    """Names of the files in a folder, but for lock files, which stay behind by design."""
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock"))


# --- Several processes ---------------------------------------------------------------------------

# Importing torch takes seconds, so the processes are forks of one that has imported it. It has run
# nothing yet, so it has one thread, and forking is safe.
FORKS = """
import json, os, random, signal, sys, time, traceback
from pathlib import Path
import torch
from multigather.cache import record, shape, store
from multigather.cache.model import parse

def fork(work):
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return child

def fork_together(works):
    ready, start = os.pipe()
    def waiting(work):
        def run():
            os.close(start)
            os.read(ready, 1)  # returns when every end for writing is closed
            work()
        return run
    children = {fork(waiting(work)) for work in works}
    os.close(start)
    return children
"""

WRITERS = """
path, jobs = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
store.LOCK_SECONDS = 200  # a slow machine is no failure
jobs = [[parse(text.encode()) for text in job] for job in jobs]
def work(job):
    def run():
        for addition in job:
            store.publish(path, addition)
    return run
children = fork_together([work(job) for job in jobs])
statuses, reads, seen = [], 0, 0
while children:
    child, status = os.waitpid(-1, os.WNOHANG)
    if child:
        children.remove(child)
        statuses.append(status)
    if path.exists():
        found = parse(path.read_bytes())  # without a lock
        assert not found.rejected and len(found.entries) >= seen, (found.rejected, seen)
        reads, seen = reads + 1, len(found.entries)
    time.sleep(0.05)
print(json.dumps({"statuses": statuses, "reads": reads}))
"""


def test_processes_that_publish_at_once_lose_nothing(tmp_path):
    keys = [[Key(count, 2, writer, 4) for count in range(40)] for writer in range(8)]
    jobs = [
        [json.dumps(content(entry(key, note=[writer, key.count]))) for key in each]
        for writer, each in enumerate(keys)
    ]
    path = tmp_path / "tuning" / "cpu.json"
    told = run_script(FORKS + WRITERS, path, write(tmp_path / "jobs", jobs))
    assert told["statuses"] == [0] * 8
    assert told["reads"] > 0
    found = parse(path.read_bytes())
    assert not found.rejected
    assert set(found.keys) == {key for each in keys for key in each}
    assert len(found.entries) == 320
    for each in found.entries.values():
        assert each.model_extra == {"note": [each.key.buffers, each.key.count]}
    assert names_in(path.parent) == ["cpu.json"]


KILLS = """
path, texts = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
additions = [parse(text.encode()) for text in texts]
chance = random.Random(0)

def die(*arguments, **options):
    os.kill(os.getpid(), signal.SIGKILL)

def loop():
    for addition in additions * 1000:
        store.publish(path, addition)

def dying_before(name):
    def run():
        setattr(os, name, die)
        store.publish(path, additions[0])
    return run

def dying_after_replacing():
    replace = os.replace
    os.replace = lambda *arguments: (replace(*arguments), die())
    store.publish(path, additions[0])

points = [dying_before("fsync"), dying_before("replace"), dying_after_replacing]
missing = present = halves = 0
for turn in range(200 + 2 * len(points)):
    if turn % 7 == 0:
        path.unlink(missing_ok=True)
    if turn < 200:
        child = fork(loop)
        time.sleep(chance.uniform(0.0, 0.02))
        os.kill(child, signal.SIGKILL)
    else:
        child = fork(points[turn % len(points)])
    status = os.waitpid(child, 0)[1]
    halves += len(list(path.parent.glob(".*.tmp")))
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, status
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        missing += 1
    else:
        found = parse(data)
        assert found.entries and not found.rejected, found
        present += 1
    addition = additions[turn % len(additions)]
    store.publish(path, addition)
    found = parse(path.read_bytes())
    assert set(addition.entries) <= set(found.entries) and not found.rejected
print(json.dumps({"missing": missing, "present": present, "halves": halves}))
"""


def test_a_writer_killed_at_any_point_leaves_a_sound_file_and_no_lock(tmp_path):
    texts = [
        json.dumps(content(*(entry(Key(count, row, 0, 4)) for count in range(16))))
        for row in range(4)
    ]
    path = tmp_path / "tuning" / "cpu.json"
    told = run_script(FORKS + KILLS, path, write(tmp_path / "texts", texts))
    assert told["missing"] + told["present"] == 206
    # Some died with a file half written, which the next writer clears away.
    assert told["halves"] > 0
    assert names_in(path.parent) == ["cpu.json"]


RECORDERS = """
path, texts = sys.argv[1], json.loads(Path(sys.argv[2]).read_text())
os.environ["MULTIGATHER_RECORD"] = path
device = torch.device("cpu")
def work(text):
    request = shape.from_text(text, device)
    def run():
        for count in range(100):
            record.note(request.with_count(count), may_write=True)
    return run
children = fork_together([work(text) for text in texts])
statuses = [os.waitpid(child, 0)[1] for child in children]
# Noted where nothing may be written, and no write follows: the line comes when the process ends.
record.note(shape.from_text(texts[0], device).with_count(12345), may_write=False)
print(json.dumps({"statuses": statuses, "waiting": len(record._waiting)}))
"""


def test_recorded_lines_of_several_processes_do_not_mix(tmp_path):
    # Longer than a page, and than what a pipe takes at once.
    texts = [
        {
            "indices": "int64[1]",
            "bounds": "raise",
            "fields": [f"uint8[{writer + 1}, {width}]" for width in range(1, 400)],
        }
        for writer in range(8)
    ]
    path = tmp_path / "record"
    told = run_script(FORKS + RECORDERS, path, write(tmp_path / "texts", texts))
    assert told == {"statuses": [0] * 8, "waiting": 1}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines.pop()["indices"] == "int64[12345]"
    assert len(lines) == 800
    for writer, text in enumerate(texts):
        counts = [each["indices"] for each in lines if each["fields"] == text["fields"]]
        assert counts == [f"int64[{count}]" for count in range(100)], writer


# --- Files that are wrong ------------------------------------------------------------------------


def with_device(**fields):
    """A file whose device has other fields."""
    whole = content(entry())
    whole["device"].update(fields)
    return whole


def dumped(whole):
    return json.dumps(whole).encode()


GOOD_BYTES = dumped(
    {
        "schema": 1,
        "device": {"vendor": "cpu", "name": "x", "capability": "y", "processors": 1},
        "entries": {},
    }
)

BAD_FILES = {
    "empty": lambda: b"",
    "blank": lambda: b" \n",
    "truncated": lambda: dumped(content(entry()))[:-40],
    "binary": lambda: bytes(range(256)) * 8,
    "not utf-8": lambda: GOOD_BYTES.replace(b'"x"', b'"\xff\xfe"'),
    "two files in one": lambda: GOOD_BYTES * 2,
    "list": lambda: b"[]",
    "list of files": lambda: b"[" + GOOD_BYTES + b"]",
    "number": lambda: b"7",
    "text": lambda: b'"schema"',
    "null": lambda: b"null",
    "NaN": lambda: b"NaN",
    "other object": lambda: b'{"name": "x", "version": 3}',
    "rules": lambda: (ROOT / "tuning_cache" / "default.json").read_bytes(),
    "newer schema": lambda: content(entry(), schema=2),
    "much newer schema": lambda: content(entry(), schema=10**4000),
    "schema 0": lambda: content(entry(), schema=0),
    "schema true": lambda: content(entry(), schema=True),
    "schema as text": lambda: content(entry(), schema="1"),
    "schema as float": lambda: content(entry(), schema=1.0),
    "no schema": lambda: {name: each for name, each in content().items() if name != "schema"},
    "nested lists": lambda: b"[" * 200_000,
    "nested objects": lambda: b'{"a":' * 200_000,
    "nested extra": lambda: dumped(content(entry()))[:-1] + b', "x": ' + b"[" * 100_000,
    "huge integer": lambda: b"1" + b"0" * 10_000,
    "huge integer inside": lambda: dumped(content(entry()))[:-1] + b', "x": 1' + b"0" * 10_000,
    "device is a number": lambda: content(entry()) | {"device": 5},
    "device is a list": lambda: content(entry()) | {"device": ["cpu"]},
    "device is null": lambda: content(entry()) | {"device": None},
    "no device": lambda: {name: each for name, each in content().items() if name != "device"},
    "processors as words": lambda: with_device(processors="many"),
    "processors is infinite": lambda: with_device(processors=math.inf),
    "processors is 1e300": lambda: with_device(processors=1e300),
    "processors is null": lambda: with_device(processors=None),
    "name is a list": lambda: with_device(name=["x"]),
    "vendor is a number": lambda: with_device(vendor=1),
    "no entries": lambda: {name: each for name, each in content().items() if name != "entries"},
    "entries is a list": lambda: content(entry()) | {"entries": [entry()]},
    "entries is null": lambda: content(entry()) | {"entries": None},
    "environments is a list": lambda: content(entry()) | {"environments": [1]},
    "environment is a text": lambda: content(entry()) | {"environments": {"e": "torch"}},
}


def check_bad_file(places, caplog, path, unchanged):
    """One warning names the file; gathers are right, and the next layer serves them."""
    check_gather()
    check_gather(torch.tensor([1, 0]), torch.arange(12, dtype=torch.int16).view(4, 3))
    assert choice()["config"] == HEURISTIC
    (warning,) = warnings_in(caplog)
    assert str(path) in warning
    api.forget()  # the file is read again, and said nothing more of
    good = write(places.shipped / "good.json", content(entry()))
    check_gather()
    assert choice()["config"] == MEASURED and str(good) in choice()["origin"]
    assert warnings_in(caplog) == [warning]
    assert unchanged()
    return warning


@pytest.mark.parametrize("name", BAD_FILES)
def test_file_that_is_no_tuning_file(places, caplog, name):
    made = BAD_FILES[name]()
    path = write(places.user / "x.json", made)
    data = path.read_bytes()
    warning = check_bad_file(places, caplog, path, lambda: path.read_bytes() == data)
    assert "is not used" in warning
    assert names_in(places.user) == ["x.json"]


def test_file_of_a_newer_version_says_to_update(places, caplog):
    write(places.user / "x.json", content(entry(), schema=2))
    check_gather()
    (warning,) = warnings_in(caplog)
    assert "schema 2" in warning and "update multigather" in warning


def test_file_that_is_too_large(places, caplog, monkeypatch):
    path = write(places.user / "x.json", content(entry()))
    monkeypatch.setattr(model, "MOST_BYTES", path.stat().st_size)
    assert choice()["config"] == MEASURED
    monkeypatch.setattr(model, "MOST_BYTES", path.stat().st_size - 1)
    api.forget()
    assert choice()["config"] == HEURISTIC
    assert [str(path) in each for each in warnings_in(caplog)] == [True]


def test_folder_named_like_a_file(places, caplog):
    path = places.user / "x.json"
    path.mkdir(parents=True)
    check_bad_file(places, caplog, path, path.is_dir)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_file_that_may_not_be_read(places, caplog):
    path = write(places.user / "x.json", content(entry()))
    path.chmod(0)
    check_bad_file(places, caplog, path, path.exists)


def test_file_that_cannot_be_read(places, caplog, monkeypatch):
    path = write(places.user / "x.json", content(entry()))
    read_bytes = Path.read_bytes

    def failing(self):
        if self == path:
            raise OSError(errno.EIO, "Input/output error", str(self))
        return read_bytes(self)

    monkeypatch.setattr(Path, "read_bytes", failing)
    check_bad_file(places, caplog, path, path.exists)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no named pipes")
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_file_that_can_be_read_without_end(places, caplog, kind):
    """A pipe that nobody writes to, a device that never ends: neither is opened."""
    path = places.user / "x.json"
    path.parent.mkdir(parents=True)
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    assert "no regular file" in check_bad_file(places, caplog, path, path.exists)
    with pytest.raises(ValueError, match="no regular file"):
        multigather.load_tuning(path.parent)
    with pytest.raises(WriteError, match="no regular file"):
        publish(path, tuning(entry()))


def test_huge_file_is_not_read(places, caplog):
    """Its size is looked at first; a file of this size has holes in place of bytes."""
    path = write(places.user / "x.json", b"{")
    os.truncate(path, 2**40)
    assert f"{2**40} bytes" in check_bad_file(places, caplog, path, path.exists)


def test_file_that_is_replaced_while_it_is_read(places, caplog, monkeypatch):
    """By a writer that does not replace it as a whole: half of the old and half of the new one."""
    path = write(places.user / "x.json", content(entry()))
    old = path.read_bytes()
    new = dumped(content(entry(FAR_KEY), entry(near(count=5))))
    read_bytes = Path.read_bytes

    def torn(self):
        return old[: len(old) // 2] + new[len(old) // 2 :] if self == path else read_bytes(self)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", torn)
        check_gather()
        assert choice()["config"] == HEURISTIC
    (warning,) = warnings_in(caplog)
    assert str(path) in warning
    api.forget()
    assert choice()["config"] == MEASURED


def test_nothing_in_a_file_is_run(places, caplog, tmp_path):
    """Every text, name and knob that a file can have, with something to run in it."""
    sign = tmp_path / "it was run"
    payloads = (
        f"__import__('pathlib').Path({str(sign)!r}).touch()",
        f"$(touch '{sign}')",
        f'"; touch "{sign}"; "',
        f"-DTHREADS=1 -include {sign}",
        "!!python/object/apply:os.system ['touch x']",
    )
    for number, text in enumerate(payloads):
        backends = {
            "torch": measured(config={"elements": text}),
            "cupy": measured(config={"layout": text, text: 1}),
            text: measured(),
        }
        hostile = entry(pick=text, backends=backends, failed={text: text}, shapes=[{text: text}])
        hostile["times"] = {"torch": {text: 1.0, f"elements={text}": 2.0}}
        write(places.user / f"{number}.json", content(hostile, environments={text: {text: text}}))
        check_gather()
        str(multigather.explain(INDICES, BUFFER))
        assert choice()["config"] == HEURISTIC
        api.forget()
    assert not sign.exists()
    assert all(str(places.user) in each for each in warnings_in(caplog))


def test_file_that_is_gone_when_it_is_read(places, caplog):
    places.user.mkdir(parents=True)
    (places.user / "x.json").symlink_to(places.user / "nowhere")
    check_gather()
    assert warnings_in(caplog) == []


def test_other_files_in_a_folder_are_not_read(places, caplog):
    for name in ("x.json.corrupt-20260101", "x.json.lock", ".x.json.abc.tmp", "README.md"):
        write(places.user / name, b"nothing to read")
    write(places.user / "schema.json", model.json_schema())
    write(places.user / "default.json", (ROOT / "tuning_cache" / "default.json").read_bytes())
    check_gather()
    assert choice()["config"] == HEURISTIC
    assert warnings_in(caplog) == []


def test_each_bad_file_is_named_once(places, caplog):
    paths = [write(places.user / name, b"?") for name in ("a.json", "b.json")]
    paths.append(write(places.second / "c.json", b"{}"))
    for _ in range(2):
        check_gather()
        api.forget()
    found = warnings_in(caplog)
    assert len(found) == 3
    for path in paths:
        assert sum(str(path) in each for each in found) == 1


MISSING = object()
BACKEND = ("backends", "torch")
BAD_ENTRIES = {
    "label of another key": (("key", "count"), 12),
    "list": ((), []),
    "number": ((), 7),
    "null": ((), None),
    "empty": ((), {}),
    "no key": (("key",), MISSING),
    "key is a label": (("key",), FAR_KEY.label),
    "negative exponent": (("key", "count"), -1),
    "exponent above 63": (("key", "row"), 64),
    "huge exponent": (("key", "buffers"), 10**400),
    "fraction of an exponent": (("key", "count"), 13.5),
    "exponent is null": (("key", "count"), None),
    "odd unit": (("key", "unit"), 3),
    # pydantic puts unknown fields of a dataclass into the instance, where this one is called.
    "field named like a method": (("key", "__post_init__"), 5),
    "no pick": (("pick",), MISSING),
    "pick was not measured": (("pick",), "cupy"),
    "pick is a list": (("pick",), ["torch"]),
    "no backends": (("backends",), MISSING),
    "backends is empty": (("backends",), {}),
    "backends is a list": (("backends",), [measured()]),
    "backend is a number": (BACKEND, 3),
    "no config": ((*BACKEND, "config"), MISSING),
    "config is a list": ((*BACKEND, "config"), []),
    "config is a text": ((*BACKEND, "config"), "elements=gather"),
    "knob is a fraction": ((*BACKEND, "config"), {"elements": 1.5}),
    "knob is null": ((*BACKEND, "config"), {"elements": None}),
    "knob is a list": ((*BACKEND, "config"), {"elements": ["gather"]}),
    "knob is NaN": ((*BACKEND, "config"), {"elements": math.nan}),
    "negative time": ((*BACKEND, "device_us"), -1.0),
    "time of zero": ((*BACKEND, "device_us"), 0.0),
    "time is NaN": ((*BACKEND, "device_us"), math.nan),
    "time is infinite": ((*BACKEND, "device_us"), math.inf),
    "time as words": ((*BACKEND, "device_us"), "fast"),
    "huge time": ((*BACKEND, "device_us"), 10**400),
    "negative spread": ((*BACKEND, "spread_us"), -0.5),
    "spread is NaN": ((*BACKEND, "spread_us"), math.nan),
    "negative host time": ((*BACKEND, "host_us"), -3.0),
    "fraction of a revision": ((*BACKEND, "revision"), 1.5),
    "no revision": ((*BACKEND, "revision"), MISSING),
    "environment is a number": ((*BACKEND, "environment"), 5),
    "no date": ((*BACKEND, "at"), MISSING),
    "date without a zone": ((*BACKEND, "at"), "2026-01-02T03:04:05"),
    "date as words": ((*BACKEND, "at"), "yesterday"),
    "date out of range": ((*BACKEND, "at"), 10**400),
    "shapes is an object": (("shapes",), {}),
    "failed is a list": (("failed",), ["cupy"]),
    "default without a time": (("default",), {"backend": "torch", "config": {}}),
    "default with a NaN": (
        ("default",),
        {"backend": "torch", "config": {}, "device_us": math.nan},
    ),
}


def with_bad_entry(place, value):
    """A file with a good entry for `KEY` and one for `FAR_KEY` that is wrong in one place."""
    whole = content(entry(), entry(FAR_KEY))
    *path, last = ("entries", FAR_KEY.label, *place)
    inner = whole
    for name in path:
        inner = inner[name]
    if value is MISSING:
        del inner[last]
    else:
        inner[last] = value
    return whole


@pytest.mark.parametrize("name", BAD_ENTRIES)
def test_bad_entry_costs_only_itself(places, caplog, name):
    path = write(places.user / "x.json", with_bad_entry(*BAD_ENTRIES[name]))
    data = path.read_bytes()
    check_gather()
    assert choice()["config"] == MEASURED and str(path) in choice()["origin"]
    check_gather(FAR_INDICES)
    assert choice(FAR_INDICES)["config"] == HEURISTIC
    assert "heuristic" in choice(FAR_INDICES)["origin"]
    (warning,) = warnings_in(caplog)
    assert str(path) in warning and "1 entries are not used" in warning
    assert FAR_KEY.label in warning
    api.forget()
    write(places.shipped / "good.json", content(entry(FAR_KEY)))
    assert choice(FAR_INDICES)["config"] == MEASURED
    assert warnings_in(caplog) == [warning]
    assert path.read_bytes() == data


# What a file may say and a backend refuses: (backend, its config and more, part of the reason).
REFUSED = {
    "million threads": ("cupy", {"config": {"threads": 10**6}}, "threads"),
    "huge number": ("cupy", {"config": {"unroll": 10**400}}, "unroll"),
    "truth for a number": ("cupy", {"config": {"threads": True}}, "threads must be int, got True"),
    "number for truth": ("cupy", {"config": {"streaming": 1}}, "streaming must be bool, got 1"),
    "text for a number": ("triton", {"config": {"block": "1024"}}, "block must be int"),
    "unknown choice": ("torch", {"config": {"elements": "scatter"}}, "elements must be"),
    "unknown knob": ("torch", {"config": {"elements": "gather", "x": 2}}, "has no knob 'x'"),
    "code": ("cupy", {"config": {"layout": "0\n#include </etc/passwd>"}}, "layout"),
    "other revision": ("torch", {"revision": 99}, "kernel revision 99, this is"),
    "older revision": ("torch", {"revision": -1}, "kernel revision -1, this is"),
    "unknown backend": ("numpy", {}, "there is no such backend"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_entry_that_no_backend_takes(places, caplog, name):
    backend, fields, reason = REFUSED[name]
    refused = entry(pick=backend, backends={backend: measured(**fields)})
    path = write(places.user / "x.json", content(refused))
    data = path.read_bytes()
    check_gather()
    assert choice()["config"] == HEURISTIC
    searched = "\n".join(multigather.explain(INDICES, BUFFER).searched)
    assert f"{backend} refused: " in searched and reason in searched
    write(places.shipped / "good.json", content(entry()))
    api.forget()
    check_gather()
    assert choice()["config"] == MEASURED
    assert warnings_in(caplog) == []
    assert path.read_bytes() == data


def test_another_backend_of_an_entry_serves_where_the_pick_is_refused(places):
    backends = {"torch": measured(99.0), "cupy": measured(1.0, config={"threads": 10**6})}
    write(places.user / "x.json", content(entry(pick="cupy", backends=backends)))
    check_gather()
    assert choice()["backend"] == "torch" and choice()["config"] == MEASURED


def test_config_that_does_not_fit_the_gather(places):
    # "gather" is for buffers of one dimension, and the key does not say that.
    rows = torch.arange(40, dtype=torch.int32).view(40, 1)
    write(places.user / "x.json", content(entry()))
    check_gather(INDICES, rows)
    assert choice(INDICES, rows)["config"] == HEURISTIC
    assert choice(INDICES, BUFFER)["config"] == MEASURED


# --- Writing -------------------------------------------------------------------------------------


@pytest.fixture
def path(tmp_path):
    """Where to publish; its folder does not exist."""
    return tmp_path / "tuning" / "cpu.json"


def test_publish_makes_folder_and_file(path):
    publish(path, tuning(entry()))
    assert parse(path.read_bytes()) == tuning(entry())
    assert path.read_text() == render(tuning(entry()))
    assert names_in(path.parent) == ["cpu.json"]


def test_file_may_be_read_by_all_whatever_the_umask(path):
    before = os.umask(0o077)
    try:
        publish(path, tuning(entry()))
        publish(path, tuning(entry(FAR_KEY)))
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o644


def test_publish_adds_to_what_is_there(path):
    publish(path, tuning(entry()))
    publish(path, tuning(entry(FAR_KEY)))
    assert set(parse(path.read_bytes()).keys) == {KEY, FAR_KEY}


@pytest.mark.parametrize("name", ["empty", "truncated", "binary", "huge integer", "nested lists"])
def test_corrupt_file_is_kept_aside(path, caplog, name):
    data = BAD_FILES[name]()
    write(path, data)
    publish(path, tuning(entry()))
    assert parse(path.read_bytes()) == tuning(entry())
    (kept,) = path.parent.glob("cpu.json.corrupt-*")
    assert kept.read_bytes() == data
    (warning,) = warnings_in(caplog)
    assert str(path) in warning and str(kept) in warning
    assert names_in(path.parent) == ["cpu.json", kept.name]


@pytest.mark.parametrize(
    "name",
    ["newer schema", "list", "number", "null", "other object", "rules", "no entries",
     "device is a number", "entries is a list"],
)  # fmt: skip
def test_file_of_somebody_else_is_not_overwritten(path, name):
    write(path, BAD_FILES[name]())
    data = path.read_bytes()
    with pytest.raises(WriteError, match="not overwritten") as caught:
        publish(path, tuning(entry()))
    assert str(path) in str(caught.value)
    assert path.read_bytes() == data
    assert names_in(path.parent) == ["cpu.json"]


def test_file_of_another_device_is_not_overwritten(path):
    other = dataclasses.replace(device_of(CPU), name="Other 9000", processors=77)
    publish(path, tuning(entry(), device=other))
    data = path.read_bytes()
    with pytest.raises(WriteError, match="Other 9000 with 77 processors") as caught:
        publish(path, tuning(entry(FAR_KEY)))
    assert str(path) in str(caught.value)
    assert path.read_bytes() == data


def test_bad_entries_are_kept_in_a_copy(path, caplog):
    write(path, with_bad_entry((*BACKEND, "device_us"), -1.0))
    data = path.read_bytes()
    new = Key(5, 5, 5, 16)
    publish(path, tuning(entry(new)))
    assert set(parse(path.read_bytes()).keys) == {KEY, new}
    (kept,) = path.parent.glob("cpu.json.corrupt-*")
    assert kept.read_bytes() == data
    assert str(kept) in warnings_in(caplog)[0]
    publish(path, tuning(entry(FAR_KEY)))
    assert len(list(path.parent.glob("cpu.json.corrupt-*"))) == 1


def test_fields_of_a_later_version_survive(path):
    backends = {"torch": measured(clock_mhz=1980)}
    default = {"backend": "torch", "config": {}, "device_us": 11.0, "why": "rule 7"}
    kept = entry(backends=backends, default=default, votes={"yes": 3, "no": None})
    write(path, content(kept, made_by={"tool": "x", "tags": [1, "é"]}, count=2**70))
    publish(path, tuning(entry(FAR_KEY)))
    found = json.loads(path.read_text())
    assert found["made_by"] == {"tool": "x", "tags": [1, "é"]}
    assert found["count"] == 2**70
    old = found["entries"][KEY.label]
    assert old["votes"]["yes"] == 3
    assert old["backends"]["torch"]["clock_mhz"] == 1980
    assert old["default"]["why"] == "rule 7"
    assert set(found["entries"]) == {KEY.label, FAR_KEY.label}


@pytest.mark.parametrize("opened", ["[", '{"a":'])
def test_what_cannot_be_written_again_is_refused(path, opened):
    # Deeper than pydantic writes, and not too deep to be read.
    closed = "]" if opened == "[" else "}"
    deep = f', "x": {opened * 400}1{closed * 400}}}'.encode()
    write(path, dumped(content(entry()))[:-1] + deep)
    data = path.read_bytes()
    assert parse(data).keys
    with pytest.raises(WriteError, match="is not written") as caught:
        publish(path, tuning(entry(FAR_KEY)))
    assert str(path) in str(caught.value)
    assert path.read_bytes() == data
    assert names_in(path.parent) == ["cpu.json"]


SOME_KEYS = [Key(0, 0, 0, 1), Key(9, 4, 2, 16), Key(9, 12, 0, 16)]
SOME_BACKENDS = {
    "cupy": measured(1.5, environment="f", config={"threads": 64}),
    "torch": measured(7.25, host_us=3.0),
    "triton": measured(2.0, environment="é", at="2026-01-02T03:04:05.000006+05:30"),
}
SOME_FAILURES = {"triton: b": "wrong bytes", "cupy: a": "it needs 2 blocks"}
SOME_ENVIRONMENTS = {"f": {"driver": "1"}, "e": {}, "é": {"x": [1]}, "unused": {}}


def shuffled(mapping, chance):
    return dict(chance.sample(list(mapping.items()), len(mapping)))


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 2**32))
def test_text_does_not_depend_on_the_order_of_anything(seed):
    def made(chance):
        entries = [
            entry(
                key,
                pick="triton",
                backends=shuffled(SOME_BACKENDS, chance),
                failed=shuffled(SOME_FAILURES, chance),
                shapes=[{"indices": "int64[4]", "fields": ["float32[9, 2]"]}],
            )
            for key in chance.sample(SOME_KEYS, 3)
        ]
        return tuning(*entries, environments=shuffled(SOME_ENVIRONMENTS, chance), more=[1])

    text = render(made(random.Random(0)))
    assert render(made(random.Random(seed))) == text
    assert render(parse(text.encode())) == text
    found = json.loads(text)
    assert list(found["environments"]) == ["e", "f", "é"]
    assert list(found["entries"]) == [key.label for key in SOME_KEYS]
    assert text.isascii() and text.endswith("}\n")


def test_text_has_a_line_per_backend():
    lines = render(tuning(entry(pick="cupy", backends=SOME_BACKENDS))).splitlines()
    for name in SOME_BACKENDS:
        assert sum(line.lstrip().startswith(f'"{name}": {{') for line in lines) == 1


def test_folder_below_a_file_cannot_be_made(tmp_path):
    path = write(tmp_path / "file", b"x") / "tuning" / "cpu.json"
    with pytest.raises(WriteError, match="cannot be written") as caught:
        publish(path, tuning(entry()))
    assert str(path) in str(caught.value)
    assert (tmp_path / "file").read_bytes() == b"x"


def test_folder_in_place_of_the_file(path):
    path.mkdir(parents=True)
    with pytest.raises(WriteError, match="cannot be written"):
        publish(path, tuning(entry()))
    assert path.is_dir()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_folder_that_may_not_be_written(path):
    publish(path, tuning(entry()))
    data = path.read_bytes()
    path.with_name("cpu.json.lock").unlink(missing_ok=True)
    path.parent.chmod(0o555)
    try:
        with pytest.raises(WriteError, match="cannot be written"):
            publish(path, tuning(entry(FAR_KEY)))
    finally:
        path.parent.chmod(0o755)
    assert path.read_bytes() == data


HOLDER = """
import sys, filelock
with filelock.FileLock(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_lock_that_another_process_holds(path, monkeypatch):
    publish(path, tuning(entry()))
    data = path.read_bytes()
    monkeypatch.setattr(store, "LOCK_SECONDS", 0.2)
    command = [sys.executable, "-c", HOLDER, f"{path}.lock"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(WriteError, match=r"held for .+ by another process") as caught:
            publish(path, tuning(entry(FAR_KEY)))
        assert f"{path}.lock" in str(caught.value) and "--out" in str(caught.value)
        assert parse(path.read_bytes()).keys, "readers need no lock"
        holder.communicate()
    assert path.read_bytes() == data
    publish(path, tuning(entry(FAR_KEY)))
    assert set(parse(path.read_bytes()).keys) == {KEY, FAR_KEY}


def no_space(*arguments, **options):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("function", ["fsync", "replace"])
@pytest.mark.parametrize("there", [True, False])
def test_disk_that_is_full(path, monkeypatch, function, there):
    if there:
        publish(path, tuning(entry()))
    data = path.read_bytes() if there else None
    with monkeypatch.context() as patch, pytest.raises(WriteError, match="No space left"):
        patch.setattr(store.os, function, no_space)
        publish(path, tuning(entry(FAR_KEY)))
    if there:
        assert path.read_bytes() == data
    assert names_in(path.parent) == (["cpu.json"] if there else [])
    publish(path, tuning(entry(FAR_KEY)))
    assert FAR_KEY in parse(path.read_bytes()).keys


def test_disk_that_gets_full_while_writing(path, monkeypatch):
    publish(path, tuning(entry()))
    data = path.read_bytes()
    open_descriptor = os.fdopen

    def opened(descriptor, *arguments, **options):
        file = open_descriptor(descriptor, *arguments, **options)

        class Full:
            def __enter__(self):
                return self

            def __exit__(self, *exception):
                file.close()

            def write(self, text):
                file.write(text[: len(text) // 2])
                file.flush()
                no_space()

        return Full()

    with monkeypatch.context() as patch, pytest.raises(WriteError, match="No space left"):
        patch.setattr(store.os, "fdopen", opened)
        publish(path, tuning(entry(FAR_KEY)))
    assert path.read_bytes() == data
    assert names_in(path.parent) == ["cpu.json"]


@pytest.mark.parametrize("fresh", [True, False])
def test_clock_that_was_set_back(path, fresh):
    """What was measured just now replaces what is dated later; what is merged does not."""
    slow, fast = measured(9.0, at="2031-01-01T00:00:00Z"), measured(5.0, at="2026-01-01T00:00:00Z")
    fast["config"] = {"elements": "index_select"}
    publish(path, tuning(entry(backends={"torch": slow}), entry(FAR_KEY)))
    publish(path, tuning(entry(backends={"torch": fast})), fresh=fresh)
    found = parse(path.read_bytes())
    assert set(found.keys) == {KEY, FAR_KEY}
    assert found.keys[KEY].backends["torch"].device_us == (5.0 if fresh else 9.0)
    # Nothing is dated before what it replaced, so other files' entries do not come back by a merge.
    assert found.keys[KEY].backends["torch"].at.year == 2031


def test_clock_that_was_set_back_between_backends(path):
    """The pick is the one that was measured last, and a backend that is gone keeps its entry."""
    late = "2031-01-01T00:00:00Z"
    backends = {"cupy": measured(3.0, at=late, config={"threads": 64}), "torch": measured(9.0)}
    publish(path, tuning(entry(pick="torch", backends=backends)))
    again = {"triton": measured(2.0, config={}), "torch": measured(8.0)}
    publish(path, tuning(entry(pick="triton", backends=again)), fresh=True)
    found = parse(path.read_bytes()).keys[KEY]
    assert found.pick == "triton"
    assert {name: each.device_us for name, each in found.backends.items()} == {
        "cupy": 3.0, "torch": 8.0, "triton": 2.0,
    }  # fmt: skip


def test_file_name_that_another_device_has_taken(tmp_path):
    mine = device_of(CPU)
    slice_of_it = dataclasses.replace(mine, processors=mine.processors + 5)
    file = store.file_for(tmp_path, mine)
    assert file == tmp_path / f"{mine.label}.json"
    publish(file, tuning(entry()))
    assert store.file_for(tmp_path, mine) == file
    other = store.file_for(tmp_path, slice_of_it)
    assert other == tmp_path / f"{mine.label}-{slice_of_it.processors}-processors.json"
    publish(other, tuning(entry(), device=slice_of_it))
    assert store.file_for(tmp_path, slice_of_it) == other


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("NVIDIA H200", "nvidia-h200"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "nvidia-h100-80gb-hbm3-mig-1g-10gb"),
        ("../../etc/passwd", "etc-passwd"),
        ("AMD EPYC(tm) 9/4\\x\0", "amd-epyc-tm-9-4-x"),
        ("???", "nvidia"),
    ],
)
def test_device_name_as_a_file_name(name, label):
    assert Device("nvidia", name, "9.0", 132).label == label


# --- Merging -------------------------------------------------------------------------------------

EARLY, LATE = "2026-01-01T00:00:00Z", "2026-02-01T00:00:00Z"


def merged(one, other):
    """The entry that two entries of one key give, and that it does not matter which came first."""
    results = [
        merge(tuning(first), tuning(second)).entries[KEY.label]
        for first, second in ((one, other), (other, one))
    ]
    assert results[0] == results[1]
    return results[0]


def test_later_measurement_wins():
    early = entry(backends={"torch": measured(1.0, at=EARLY)})
    late = entry(backends={"torch": measured(9.0, at=LATE)})
    assert merged(early, late).backends["torch"].device_us == 9.0


def test_dates_are_compared_across_time_zones():
    early = entry(backends={"torch": measured(1.0, at="2026-01-01T10:00:00+05:00")})
    late = entry(backends={"torch": measured(9.0, at="2026-01-01T06:00:00Z")})
    assert merged(early, late).backends["torch"].device_us == 9.0


def test_higher_revision_wins_over_a_later_one():
    early = entry(backends={"torch": measured(1.0, at=EARLY, revision=3)})
    late = entry(backends={"torch": measured(9.0, at=LATE, revision=2)})
    found = merged(early, late).backends["torch"]
    assert (found.device_us, found.revision) == (1.0, 3)


def test_of_equal_measurements_the_addition_wins():
    one, other = (tuning(entry(backends={"torch": measured(us)})) for us in (1.0, 2.0))
    assert merge(one, other).entries[KEY.label].backends["torch"].device_us == 2.0


def test_backends_are_decided_one_by_one():
    one = entry(
        pick="cupy",
        backends={
            "cupy": measured(1.0, at=EARLY, revision=2),
            "torch": measured(5.0, at=EARLY),
            "only_early": measured(6.0, at=EARLY),
        },
    )
    other = entry(
        pick="torch",
        backends={
            "cupy": measured(8.0, at=LATE, revision=1),
            "torch": measured(4.0, at=LATE),
            "only_late": measured(7.0, at=LATE),
        },
    )
    found = merged(one, other)
    assert {name: each.device_us for name, each in found.backends.items()} == {
        "cupy": 1.0,
        "torch": 4.0,
        "only_early": 6.0,
        "only_late": 7.0,
    }


@pytest.mark.parametrize(
    ("early_pick", "late_pick", "pick"),
    [
        ("torch", "triton", "triton"),  # measured side by side, and later
        ("triton", "torch", "torch"),
        ("cupy", "torch", "cupy"),  # the late run did not have it
        ("cupy", "triton", "cupy"),
        ("torch", "torch", "torch"),
    ],
)
def test_pick_of_a_merged_entry(early_pick, late_pick, pick):
    early = {name: measured(at=EARLY) for name in ("cupy", "triton", "torch")}
    late = {name: measured(at=LATE) for name in ("triton", "torch")}
    found = merged(entry(pick=early_pick, backends=early), entry(pick=late_pick, backends=late))
    assert found.pick == pick
    assert set(found.backends) == {"cupy", "triton", "torch"}


def test_new_backend_of_a_later_run_may_be_picked():
    early = entry(pick="torch", backends={"torch": measured(at=EARLY)})
    both = {"torch": measured(at=LATE), "cupy": measured(at=LATE)}
    assert merged(early, entry(pick="cupy", backends=both)).pick == "cupy"


def test_merge_keeps_entries_and_environments_of_both():
    one = tuning(entry(backends={"torch": measured(environment="a")}), environments={"a": {"x": 1}})
    other = tuning(
        entry(FAR_KEY, backends={"torch": measured(environment="b")}),
        environments={"b": {"x": 2}},
    )
    found = merge(one, other)
    assert set(found.keys) == {KEY, FAR_KEY}
    assert found.environments == {"a": {"x": 1}, "b": {"x": 2}}
    assert json.loads(render(found))["environments"] == {"a": {"x": 1}, "b": {"x": 2}}
    assert set(one.keys) == {KEY} and set(other.keys) == {FAR_KEY}


@pytest.mark.parametrize(
    "change", [{"name": "x"}, {"processors": 9999}, {"vendor": "amd"}, {"capability": "1.0"}]
)
def test_files_of_two_devices_do_not_merge(change):
    other = dataclasses.replace(device_of(CPU), **change)
    with pytest.raises(TuningFileError, match=r"it is for .* processors, not for"):
        merge(tuning(entry()), tuning(entry(), device=other))


def test_environment_name_depends_on_content_only():
    name = model.environment_name({"torch": "2", "driver": "5"})
    assert name == model.environment_name({"driver": "5", "torch": "2"})
    assert name != model.environment_name({"driver": "5", "torch": "3"})
    assert re.fullmatch("[0-9a-f]{8}", name)


# --- Layers --------------------------------------------------------------------------------------


def test_layers_by_precedence(places, monkeypatch):
    loose = write(places.first.parent / "loose.json", content(entry()))
    paths = [
        write(places.given / "a.json", content(entry())),
        write(places.first / "b.json", content(entry())),
        write(places.second / "a.json", content(entry())),
        loose,
        write(places.user / "a.json", content(entry())),
        write(places.shipped / "a.json", content(entry())),
    ]
    folders = (places.first, places.second, loose)
    monkeypatch.setenv("MULTIGATHER_TUNING_PATH", os.pathsep.join(map(str, folders)))
    names = ["load_tuning", *["MULTIGATHER_TUNING_PATH"] * 3, "user cache", "shipped"]
    assert multigather.load_tuning(places.given) == 1
    assert [each.name for each in store.layers()] == names
    for path, name in zip(paths, names, strict=True):
        origin = choice()["origin"]
        assert origin == f"measured, {KEY.label} in {path} ({name})"
        assert choice()["config"] == MEASURED
        check_gather()
        path.unlink()
        api.forget()
    assert "heuristic" in choice()["origin"]


def test_last_layer_is_the_package(monkeypatch):
    monkeypatch.setattr(store, "_given", [])
    layer = store.layers()[-1]
    assert layer.name == "shipped"
    assert (layer.path / "default.json").is_file()
    names = {file.name for file in layer.files()}
    assert not names & {"default.json", "schema.json", "__init__.py"}


def test_files_of_a_folder_by_name(places):
    for name in ("b.json", "a.json", "c.json"):
        write(places.user / name, content(entry()))
    assert str(places.user / "a.json") in choice()["origin"]


def test_missing_and_empty_places_are_skipped(places, monkeypatch):
    there = write(places.second / "a.json", content(entry()))
    listed = os.pathsep.join(("", str(places.first / "none"), str(there), ""))
    monkeypatch.setenv("MULTIGATHER_TUNING_PATH", listed)
    api.forget()
    assert str(there) in choice()["origin"]


def near(**fields):
    """A key that is not `KEY` but near it."""
    return dataclasses.replace(KEY, **fields)


def test_exact_key_of_a_lower_layer_beats_a_near_one(places):
    write(places.first / "a.json", content(entry(near(count=4))))
    exact = write(places.shipped / "a.json", content(entry()))
    assert choice()["origin"] == f"measured, {KEY.label} in {exact} (shipped)"


def test_nearer_key_of_a_lower_layer_beats_a_farther_one(places):
    write(places.first / "a.json", content(entry(near(count=5))))
    nearer = write(places.shipped / "a.json", content(entry(near(count=4))))
    assert str(nearer) in choice()["origin"]


def test_of_equally_near_keys_the_higher_layer_wins(places):
    higher = write(places.first / "a.json", content(entry(near(count=5))))
    write(places.shipped / "a.json", content(entry(near(row=4))))
    origin = choice()["origin"]
    assert str(higher) in origin
    assert "measured around it in 2 entries, nearest (count 32 for 8)" in origin


def test_nearest_entry_that_is_refused_gives_way_to_the_next(places):
    refused = entry(near(count=4), backends={"torch": measured(revision=REVISIONS["torch"] + 1)})
    write(places.user / "a.json", content(refused, entry(near(count=6))))
    assert "count 64 for 8" in choice()["origin"]
    assert choice()["config"] == MEASURED


@pytest.mark.parametrize(("count", "serves"), [(8, True), (9, 0)])
def test_entries_beyond_the_farthest_do_not_serve(places, count, serves):
    write(places.user / "a.json", content(entry(near(count=count))))
    assert (choice()["config"] == MEASURED) == bool(serves)
    searched = "\n".join(multigather.explain(INDICES, BUFFER).searched)
    distance = KEY.distance(near(count=count))
    assert (distance > FARTHEST) == (not serves)
    assert (f"farther than {FARTHEST:g}" in searched) == (not serves)
    check_gather()


def other_device(**fields):
    return dataclasses.replace(device_of(CPU), **fields)


def test_near_entry_of_this_device_beats_an_exact_one_of_another(places):
    write(places.first / "a.json", content(entry(), device=other_device(name="Other")))
    own = write(places.shipped / "a.json", content(entry(near(count=8))))
    assert str(own) in choice()["origin"]
    own.unlink()
    api.forget()
    origin = choice()["origin"]
    assert str(places.first / "a.json") in origin
    assert origin.startswith("measured, on another device of this capability")


def test_same_number_of_processors_beats_another(places):
    write(places.first / "a.json", content(entry(), device=other_device(processors=4096)))
    equal = write(
        places.shipped / "a.json", content(entry(near(count=6)), device=other_device(name="Other"))
    )
    assert str(equal) in choice()["origin"]
    equal.unlink()
    api.forget()
    assert choice()["config"] == MEASURED
    assert str(places.first / "a.json") in choice()["origin"]


@pytest.mark.parametrize("change", [{"capability": "other"}, {"vendor": "nvidia"}])
def test_device_of_another_kind_does_not_serve(places, change):
    write(places.user / "a.json", content(entry(), device=other_device(**change)))
    assert choice()["config"] == HEURISTIC
    found = multigather.explain(INDICES, BUFFER).searched
    assert found == (f"for {KEY.label}", "no tuning file for this device")


def test_device_of_no_known_kind_has_no_files(places, monkeypatch):
    write(places.user / "a.json", content(entry()))
    monkeypatch.setattr(store, "device_of", lambda device: None)
    check_gather()
    assert choice()["config"] == HEURISTIC


@pytest.mark.parametrize(
    ("change", "rank"),
    [
        ({}, 0),
        ({"name": "NVIDIA H100"}, 1),
        ({"processors": 16}, 2),
        ({"name": "NVIDIA H100", "processors": 114}, 2),
        ({"capability": "8.0"}, None),
        ({"vendor": "amd"}, None),
    ],
)
def test_rank_of_a_device(change, rank):
    mine = Device("nvidia", "NVIDIA H200", "9.0", 132)
    other = dataclasses.replace(mine, **change)
    assert mine.rank(other) == rank
    assert other.rank(mine) == rank


def test_device_of_this_cpu():
    found = device_of(CPU)
    assert found.vendor == "cpu" and found.name and found.processors >= 1
    assert found.rank(found) == 0
    assert device_of(torch.device("meta")) is None


def test_backend_that_is_missing_gives_way_to_the_next(places, monkeypatch):
    monkeypatch.setattr(TritonBackend, "unavailable", lambda self: ["Triton is not installed"])
    backends = {
        "torch": measured(30.0),
        "triton": measured(20.0, config={"block": 256}),
        "cupy": measured(10.0, config={"threads": 64}),
    }
    write(places.user / "a.json", content(entry(pick="cupy", backends=backends)))
    check_gather()
    found = multigather.explain(INDICES, BUFFER)
    assert found.picks[0]["backend"] == "torch"
    assert found.picks[0]["config"] == MEASURED
    assert found.picks[0]["origin"].startswith("measured")
    assert found.refused["triton"] == ("Triton is not installed",)
    assert "CUDA devices only" in found.refused["cupy"][0]


def test_backends_of_an_entry_are_tried_from_the_pick_to_the_slowest():
    backends = {name: measured(us) for name, us in (("a", 3.0), ("b", 1.0), ("c", 2.0))}
    (found,) = tuning(entry(pick="c", backends=backends)).entries.values()
    assert [name for name, _ in found.ordered()] == ["c", "b", "a"]


def test_backend_that_the_caller_names_gets_its_measured_config(places):
    backends = {"cupy": measured(1.0, config={"threads": 64}), "torch": measured(3.0)}
    write(places.user / "a.json", content(entry(pick="cupy", backends=backends)))
    found = choice(backend="torch")
    assert found["config"] == MEASURED and found["origin"].startswith("measured")
    check_gather(backend="torch")


# For a key between entries, the choice is made from what every config took around it.

SELECT, GATHER = "elements=index_select", "elements=gather"


def timed(key, select, gather):
    """An entry of a key in which the two configs took so many microseconds."""
    best, config = min((select, "index_select"), (gather, "gather"))
    return entry(
        key,
        backends={"torch": measured(best, config={"elements": config})},
        times={"torch": {SELECT: select, GATHER: gather}},
    )


def test_between_entries_the_config_that_is_good_for_all_wins(places):
    # index_select is the nearest entry's own choice, but 1.8 times slower in the next.
    entries = timed(near(count=4), 10.0, 10.1), timed(near(count=1), 18.0, 10.0)
    write(places.user / "a.json", content(*entries))
    found = choice()
    assert found["config"] == GATHER
    assert "measured around it in 2 entries, nearest (count 16 for 8)" in found["origin"]


def test_between_entries_the_nearer_counts_more(places):
    entries = timed(near(count=4), 10.0, 13.0), timed(near(count=8), 13.0, 10.0)
    write(places.user / "a.json", content(*entries))
    assert choice()["config"] == SELECT


def test_at_an_entry_only_its_own_choice_counts(places):
    around = [timed(near(count=count), 20.0, 10.0) for count in (2, 4)]
    write(places.user / "a.json", content(timed(KEY, 10.0, 10.1), *around))
    assert choice()["config"] == SELECT
    assert choice()["origin"].startswith("measured, m8.")


def test_a_slow_down_beyond_the_limit_counts_no_more(places):
    """One entry in which a config is hopeless does not outweigh two in which it is best."""
    entries = (
        timed(near(count=4), 10.0, 12.0),
        timed(near(count=2), 10.0, 12.0),
        timed(near(count=5), 9000.0, 10.0),
    )
    write(places.user / "a.json", content(*entries))
    assert choice()["config"] == SELECT


def test_between_entries_backends_come_in_the_order_of_their_slow_downs():
    def one(key, cupy, triton):
        pick = "cupy" if cupy <= triton else "triton"
        return entry(
            key,
            pick=pick,
            backends={
                "cupy": measured(cupy, config={"threads": 64}),
                "triton": measured(triton, config={"block": 256}),
            },
        )

    tuning = parse(
        json.dumps(content(one(near(count=4), 10.0, 12.0), one(near(count=1), 30.0, 10.0))).encode()
    )
    winners = store.Winners([store.Source("user cache", "a.json", 0, tuning.keys)])
    found = winners.find(near(count=2), lambda name, measured: None)
    assert [name for name, _ in found.choices] == ["triton", "cupy"]
    found = winners.find(near(count=5), lambda name, measured: None)
    assert [name for name, _ in found.choices] == ["cupy", "triton"]
    assert found.choices[0][1] == {"threads": 64}


@pytest.mark.parametrize("text", ["elements=scatter", "threads=1000000", "elements", "x=1 y=2"])
def test_a_config_that_is_none_is_passed_over(places, text):
    bad = entry(
        near(count=4),
        backends={"torch": measured(10.0, config={"elements": "gather"})},
        times={"torch": {text: 0.1, GATHER: 10.0}},
    )
    write(places.user / "a.json", content(bad))
    assert choice()["config"] == MEASURED == GATHER
    check_gather()


@given(
    knobs=st.dictionaries(
        st.from_regex(r"[a-z_]+", fullmatch=True),
        st.booleans() | st.integers(-(10**17), 10**17) | st.from_regex(r"[a-z_]+", fullmatch=True),
    )
)
def test_configs_as_text(knobs):
    strings = {name: value for name, value in knobs.items() if value not in ("true", "false")}
    assert config_of_text(config_text(strings)) == strings


def test_explanation_shows_what_was_searched(places):
    path = write(places.user / "a.json", content(entry(near(count=4)), entry(near(row=9))))
    text = str(multigather.explain(INDICES, BUFFER))
    assert f"searched for {KEY.label}" in text
    assert f"user cache, {path}: 2 entries for this device" in text
    assert f"{near(count=4).label}, distance 1.5: count 16 for 8" in text
    assert f"{near(row=9).label}, distance 10.5: row 512 for 4; farther than 8" in text


# --- load_tuning ---------------------------------------------------------------------------------


def test_load_tuning_of_nothing(places):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        multigather.load_tuning(places.given / "nowhere")
    assert store._given == []


@pytest.mark.parametrize("name", ["empty", "binary", "list", "newer schema", "no device"])
@pytest.mark.parametrize("folder", [False, True])
def test_load_tuning_of_a_bad_file(places, name, folder):
    write(places.given / "a.json", content(entry()))
    path = write(places.given / "b.json", BAD_FILES[name]())
    with pytest.raises(ValueError, match=re.escape(str(path))) as caught:
        multigather.load_tuning(path.parent if folder else path)
    if name == "newer schema":
        assert "update multigather" in str(caught.value)
    assert store._given == []
    assert choice()["config"] == HEURISTIC


def test_load_tuning_counts_the_entries_of_all_devices(places):
    write(places.given / "a.json", content(entry(), entry(FAR_KEY)))
    write(places.given / "b.json", content(entry(), device=other_device(vendor="nvidia")))
    write(places.given / "notes.txt", b"nothing to read")
    assert multigather.load_tuning(str(places.given)) == 3
    assert multigather.load_tuning(places.given / "a.json") == 2
    (places.given / "none").mkdir()
    assert multigather.load_tuning(places.given / "none") == 0


def test_load_tuning_does_not_count_bad_entries(places, caplog):
    path = write(places.given / "a.json", with_bad_entry((*BACKEND, "device_us"), -1.0))
    assert multigather.load_tuning(path) == 1
    check_gather()
    assert choice()["config"] == MEASURED
    (warning,) = warnings_in(caplog)
    assert str(path) in warning


def test_load_tuning_changes_gathers_that_were_made_before(places, prepared):
    path = write(places.given / "a.json", content(entry()))
    for _ in range(3):
        check_gather()
    assert prepared == [HEURISTIC]
    assert multigather.load_tuning(path) == 1
    for _ in range(3):
        check_gather()
    assert prepared == [HEURISTIC, MEASURED]


def test_file_loaded_last_comes_first(places):
    for name in ("a.json", "b.json"):
        multigather.load_tuning(write(places.given / name, content(entry())))
        assert str(places.given / name) in choice()["origin"]


# --- Modes ---------------------------------------------------------------------------------------


def test_cached_is_the_default(places, monkeypatch):
    write(places.user / "a.json", content(entry()))
    for value in (None, ""):
        if value is None:
            monkeypatch.delenv("MULTIGATHER_TUNING")
        else:
            monkeypatch.setenv("MULTIGATHER_TUNING", value)
        assert store.mode() == "cached"
        assert choice()["config"] == MEASURED


def test_off_reads_no_file(places, caplog, monkeypatch):
    monkeypatch.setenv("MULTIGATHER_TUNING", "off")
    write(places.user / "a.json", content(entry()))
    write(places.user / "bad.json", b"?")
    multigather.load_tuning(write(places.given / "a.json", content(entry())))
    check_gather()
    assert choice()["config"] == HEURISTIC
    assert multigather.explain(INDICES, BUFFER).searched == ("nothing: MULTIGATHER_TUNING=off",)
    assert warnings_in(caplog) == []


@pytest.mark.parametrize("value", ["on", "OFF", " cached", "online,strict"])
def test_mode_that_does_not_exist(places, monkeypatch, value):
    monkeypatch.setenv("MULTIGATHER_TUNING", value)
    for call in (multigather.gather, multigather.explain):
        with pytest.raises(ValueError, match="MULTIGATHER_TUNING must be one of") as caught:
            call(INDICES, BUFFER)
        assert repr(value) in str(caught.value)
        assert all(name in str(caught.value) for name in store.MODES)


def test_strict_refuses_what_was_not_measured(places, monkeypatch):
    monkeypatch.setenv("MULTIGATHER_TUNING", "strict")
    far = near(count=12)
    path = write(places.user / "a.json", content(entry(far)))
    for call in (multigather.gather, multigather.explain):
        with pytest.raises(multigather.NotTunedError) as caught:
            call(INDICES, BUFFER)
        text = str(caught.value)
        assert KEY.label in text
        assert f"{far.label}, distance 13.5: count 4096 for 8; farther than 8" in text
        assert str(path) in text
        assert "float32 [40]" in text
        assert "run: multigather tune --rows 8 --row-bytes 4 --buffers 1" in text


def test_strict_says_that_there_is_no_file(places, monkeypatch):
    monkeypatch.setenv("MULTIGATHER_TUNING", "strict")
    with pytest.raises(multigather.NotTunedError, match="no tuning file for this device"):
        multigather.gather(INDICES, BUFFER)


@pytest.mark.parametrize("key", [KEY, near(count=5)])
def test_strict_takes_what_was_measured(places, monkeypatch, key, prepared):
    monkeypatch.setenv("MULTIGATHER_TUNING", "strict")
    write(places.user / "a.json", content(entry(key)))
    check_gather()
    assert prepared == [MEASURED]


def test_strict_does_not_take_an_entry_that_is_refused(places, monkeypatch):
    monkeypatch.setenv("MULTIGATHER_TUNING", "strict")
    write(places.user / "a.json", content(entry(backends={"torch": measured(revision=99)})))
    with pytest.raises(multigather.NotTunedError, match=r"torch refused: .* revision 99,"):
        multigather.gather(INDICES, BUFFER)


def test_strict_lets_the_caller_name_torch(places, monkeypatch):
    monkeypatch.setenv("MULTIGATHER_TUNING", "strict")
    check_gather(backend="torch")


@pytest.fixture
def benches(places, monkeypatch):
    """Mode "online"; the requests that were measured, in order.

    The tests name the torch backend, because Triton's interpreter takes its time.
    """
    monkeypatch.setenv("MULTIGATHER_TUNING", "online")
    requests = []
    bench = online.Bench

    def noting(request):
        requests.append(request)
        return bench(request)

    monkeypatch.setattr(online, "Bench", noting)
    return requests


def test_online_measures_once_and_publishes(places, benches, monkeypatch):
    check_gather(backend="torch")
    check_gather(backend="torch")
    (request,) = benches
    assert key_of(request) == KEY
    (path,) = (file for file in places.user.iterdir() if file.suffix == ".json")
    assert path.name == f"{device_of(CPU).label}.json"
    found = parse(path.read_bytes())
    assert found.device == device_of(CPU) and not found.rejected
    (published,) = found.entries.values()
    assert published.key == KEY and published.pick == "torch"
    assert published.backends["torch"].environment in found.environments
    assert shape.from_text(published.shapes[0], CPU).count == 8
    assert path.read_text() == render(found)
    # As another process would: from the file.
    api.forget()
    check_gather(backend="torch")
    assert len(benches) == 1
    assert str(path) in choice()["origin"]
    monkeypatch.setenv("MULTIGATHER_TUNING", "strict")
    api.forget()
    check_gather()


def test_online_leaves_what_was_measured(places, benches):
    write(places.user / "a.json", content(entry(near(count=4))))
    check_gather(backend="torch")
    assert benches == []


@pytest.mark.parametrize("name", ["file in the way", "no folder", "list", "too deep", "other"])
def test_online_where_nothing_can_be_written(places, benches, monkeypatch, caplog, name):
    path = places.user / f"{device_of(CPU).label}.json"
    if name == "file in the way":
        path = write(places.user.parent, b"x")
    elif name == "no folder":
        monkeypatch.setattr(store, "user_folder", lambda: None)
    elif name == "list":
        write(path, b"[]")
    elif name == "too deep":
        far = near(count=40)
        write(path, dumped(content(entry(far)))[:-1] + b', "x":' + b"[" * 400 + b"]" * 400 + b"}")
    else:
        # Both names that this device's file could have are those of others.
        write(path, content(entry(), device=other_device(vendor="amd")))
        label = f"{device_of(CPU).label}-{device_of(CPU).processors}-processors.json"
        write(path.with_name(label), content(entry(), device=other_device(vendor="amd")))
    data = path.read_bytes() if path.exists() else None
    with caplog.at_level(logging.INFO, logger="multigather"):
        check_gather(backend="torch")
        check_gather(backend="torch")
    assert len(benches) == 1
    assert "kept for this process only" in caplog.text
    assert "memory (this process)" in choice(backend="torch")["origin"]
    assert (path.read_bytes() if path.exists() else None) == data
    assert all(str(path) in each for each in warnings_in(caplog))


def test_online_measures_where_only_an_absent_backend_was_measured(places, benches):
    """An entry that this machine cannot use serves nothing, so it must not keep it from tuning."""
    backends = {"cupy": measured(config={"threads": 128})}
    write(places.user / "a.json", content(entry(pick="cupy", backends=backends)))
    check_gather(backend="torch")
    (request,) = benches
    assert key_of(request) == KEY


def test_online_where_nothing_can_be_measured(places, benches, monkeypatch):
    def failing(*arguments, **options):
        raise online.OutOfMemory("it needs 1 MiB and 0 MiB are free")

    monkeypatch.setattr(online, "Bench", failing)
    check_gather(backend="torch")
    assert choice(backend="torch")["config"] == "elements=index_select"
    assert not places.user.exists()


@pytest.mark.parametrize(
    "buffer",
    [torch.zeros(40, 0), torch.arange(80).view(2, 40).t()[:, ::2], torch.zeros(40, 4, 6).mT],
    ids=["empty rows", "one column", "not contiguous"],
)
def test_online_of_odd_buffers(places, benches, buffer):
    check_gather(INDICES, buffer, backend="torch")


# --- The user's folder ---------------------------------------------------------------------------


@pytest.fixture
def nobody(monkeypatch):
    """No home in the environment, no folder set."""
    for name in ("HOME", "XDG_CACHE_HOME", "MULTIGATHER_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_user_folder_that_is_set(nobody, tmp_path):
    nobody.setenv("HOME", str(tmp_path))
    nobody.setenv("MULTIGATHER_CACHE_DIR", "/somewhere/else")
    assert store.user_folder() == Path("/somewhere/else/tuning")
    nobody.setenv("MULTIGATHER_CACHE_DIR", "~/mine")
    assert store.user_folder() == tmp_path / "mine" / "tuning"


linux = pytest.mark.skipif(sys.platform != "linux", reason="other systems have other folders")


@linux
def test_user_folder_by_the_system(nobody, tmp_path):
    nobody.setenv("HOME", str(tmp_path))
    assert store.user_folder() == tmp_path / ".cache" / "multigather" / "tuning"
    nobody.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert store.user_folder() == tmp_path / "xdg" / "multigather" / "tuning"
    nobody.setenv("MULTIGATHER_CACHE_DIR", "")
    assert store.user_folder() == tmp_path / "xdg" / "multigather" / "tuning"
    assert list(tmp_path.iterdir()) == []


@linux
def test_user_whose_home_is_the_root_has_no_folder(nobody):
    nobody.setenv("HOME", "/")
    assert store.user_folder() is None


def test_user_without_a_home_has_no_folder(places, nobody):
    import platformdirs

    def failing(*arguments, **options):
        raise RuntimeError("Could not determine home directory.")

    nobody.setattr(platformdirs, "user_cache_path", failing)
    assert store.user_folder() is None
    assert "user cache" not in [layer.name for layer in store.layers()]
    check_gather()


@linux
def test_user_whom_the_system_does_not_know_has_no_folder(nobody):
    import pwd

    def failing(*arguments):
        raise KeyError("getpwuid(): uid not found")

    nobody.setattr(pwd, "getpwuid", failing)
    assert store.user_folder() is None


def test_reading_creates_nothing(places, tmp_path):
    write(places.second / "a.json", content(entry()))
    check_gather()
    multigather.load_tuning(places.second)
    check_gather()
    assert choice()["config"] == MEASURED
    assert not places.user.parent.exists()
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a.json", "second"]


def test_importing_and_gathering_create_nothing(tmp_path):
    found = run_script(
        """
import json
import multigather, torch
assert multigather.gather(torch.tensor([1]), torch.arange(4))[0].tolist() == [1]
print(json.dumps(str(multigather.explain(torch.tensor([1]), torch.arange(4)))))
""",
        HOME=str(tmp_path),
        TMPDIR=str(tmp_path),
        XDG_CACHE_HOME=None,
        MULTIGATHER_CACHE_DIR=None,
        MULTIGATHER_TUNING_PATH=None,
        MULTIGATHER_TUNING=None,
        PYTHONDONTWRITEBYTECODE="1",
    )
    assert list(tmp_path.iterdir()) == []
    assert "searched for m1.row8.buffers1.unit8" in found


# --- Recording -----------------------------------------------------------------------------------


@pytest.fixture
def recording(places, tmp_path, monkeypatch):
    """A file to record to."""
    monkeypatch.setenv("MULTIGATHER_RECORD", str(tmp_path / "record"))
    monkeypatch.setattr(record, "_waiting", [])
    monkeypatch.setattr(record, "_failed", set())
    return tmp_path / "record"


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def request_of(indices, *buffers, bounds="raise"):
    fields = tuple(field_of(buffer) for buffer in buffers)
    return Request(CPU, False, indices.dtype, indices.numel(), bounds, fields)


def test_a_line_per_layout_and_power_of_two(recording):
    for count in (8, 9, 11, 8, 12, 16, 22, 23):
        check_gather(torch.arange(count), BUFFER)
    check_gather(torch.arange(8), BUFFER, BUFFER.double())
    check_gather(torch.arange(8, dtype=torch.int32), BUFFER)
    check_gather(torch.arange(8), BUFFER)
    assert [(each["indices"], each["fields"]) for each in lines_of(recording)] == [
        ("int64[8]", ["float32[40]"]),
        ("int64[12]", ["float32[40]"]),
        ("int64[23]", ["float32[40]"]),
        ("int64[8]", ["float32[40]", "float64[40]"]),
        ("int32[8]", ["float32[40]"]),
    ]


def test_recorded_gathers_can_be_read_again(recording):
    memory = torch.arange(400, dtype=torch.uint8)
    buffers = [
        BUFFER,
        torch.zeros(5, 3, 2, dtype=torch.complex64),
        memory.view(40, 10)[:, :7],
        memory[1:241].view(40, 6),
        torch.zeros(5, 0),
        torch.zeros(3).expand(4, 3),
        *[torch.zeros(7, 2, dtype=torch.float16)] * 3,
    ]
    indices = torch.tensor([[0, 1, 2], [3, 0, 1]], dtype=torch.int16)
    multigather.gather(indices, *buffers, bounds="clip")
    (line,) = lines_of(recording)
    assert line["device"] == "cpu"
    assert "float16[7, 2] x 3" in line["fields"]
    assert shape.from_text(line, CPU) == request_of(indices, *buffers, bounds="clip")


def test_buffers_that_no_kernel_takes_are_not_recorded(recording):
    turned = torch.zeros(6, 4, 5).mT
    multigather.gather(torch.tensor([1]), turned)
    assert not recording.exists()
    multigather.gather(torch.tensor([1]), turned, BUFFER)
    assert [each["fields"] for each in lines_of(recording)] == [["float32[40]"]]


def test_record_that_cannot_be_written(recording, monkeypatch, caplog, tmp_path):
    monkeypatch.setenv("MULTIGATHER_RECORD", str(tmp_path))
    for count in (1, 2, 4):
        check_gather(torch.arange(count), BUFFER)
    (warning,) = warnings_in(caplog)
    assert "MULTIGATHER_RECORD" in warning and str(tmp_path) in warning


def test_nothing_is_written_until_it_may_be(recording):
    for count in (1, 2):
        record.note(request_of(torch.arange(count), BUFFER), may_write=False)
    assert not recording.exists()
    record.note(request_of(torch.arange(3), BUFFER), may_write=True)
    expected = ["int64[1]", "int64[2]", "int64[3]"]
    assert [each["indices"] for each in lines_of(recording)] == expected
    record.note(request_of(torch.arange(4), BUFFER), may_write=True)
    assert [each["indices"] for each in lines_of(recording)] == [*expected, "int64[4]"]


def test_nothing_is_recorded_unless_asked_for(recording, monkeypatch):
    for value in (None, ""):
        if value is None:
            monkeypatch.delenv("MULTIGATHER_RECORD")
        else:
            monkeypatch.setenv("MULTIGATHER_RECORD", value)
        record.note(request_of(INDICES, BUFFER), may_write=True)
    assert record._waiting == [] and not recording.exists()


# --- Gathers as text -----------------------------------------------------------------------------


@st.composite
def fields(draw):
    dtype = draw(st.sampled_from(DTYPES))
    rows = draw(st.integers(0, 2**20))
    row_shape = tuple(draw(st.lists(st.integers(0, 300), max_size=3)))
    row_bytes = dtype.itemsize * math.prod(row_shape)
    stride = row_bytes
    if rows > 1 and draw(st.booleans()):
        stride = draw(st.integers(0, 2**30))
    alignment = draw(st.sampled_from(UNITS))
    return Field(dtype, rows, row_shape, row_bytes, stride, True, alignment)


@st.composite
def requests(draw):
    runs = draw(st.lists(st.tuples(fields(), st.integers(1, 5)), min_size=1, max_size=6))
    repeated = [field for field, times in runs for _ in range(times)]
    return Request(
        CPU,
        False,
        draw(st.sampled_from(INDEX_DTYPES)),
        draw(st.integers(0, 2**62)),
        draw(st.sampled_from(BOUNDS)),
        tuple(repeated),
    )


@settings(deadline=None, max_examples=150)
@given(request=requests())
def test_gather_as_text_and_back(request):
    text = shape.to_text(request)
    assert shape.from_text(json.loads(json.dumps(text)), CPU) == request
    repeats = [len(list(same)) for _, same in itertools.groupby(request.fields)]
    assert len(text["fields"]) == len(repeats)


@settings(deadline=None, max_examples=100)
@given(
    dtype=st.sampled_from(DTYPES),
    rows=st.integers(0, 5),
    row_shape=st.lists(st.integers(0, 4), max_size=2),
    start=st.integers(0, 3),
    gap=st.integers(0, 3),
)
def test_real_buffer_as_text_and_back(dtype, rows, row_shape, start, gap):
    size = math.prod(row_shape)
    memory = torch.zeros(4096, dtype=torch.uint8).view(dtype)
    inner = [math.prod(row_shape[place + 1 :]) for place in range(len(row_shape))]
    buffer = memory.as_strided((rows, *row_shape), (size + gap, *inner), start)
    request = request_of(INDICES, buffer)
    assert has_contiguous_rows(buffer.shape, buffer.stride())
    read = shape.from_text(shape.to_text(request), CPU)
    # Of a single row the stride is not kept; nothing depends on it.
    if rows > 1:
        assert read == request
    assert key_of(read) == key_of(request)
    assert read.fields[0].unit_bytes == request.fields[0].unit_bytes


def test_text_says_only_what_differs_from_the_plain_case():
    plain = Field(torch.float32, 4096, (8,), 32, 32, True, 16)
    strided = dataclasses.replace(plain, row_stride_bytes=64, alignment=2)
    request = Request(CPU, False, torch.int64, 48, "raise", (plain, plain, strided, plain))
    assert shape.to_text(request) == {
        "indices": "int64[48]",
        "bounds": "raise",
        "fields": [
            "float32[4096, 8] x 2",
            "float32[4096, 8] stride 64 alignment 2",
            "float32[4096, 8]",
        ],
    }


@pytest.mark.parametrize(
    ("part", "value"),
    [
        *[
            ("indices", value)
            for value in (
                None, 48, ["int64[48]"], "", "int64", "int64[]", "int64[-1]", "int64[4, 8]",
                "float32[48]", "bool[48]", "nothing[48]", "int64[48] ", "int64[1.5]",
                f"int64[{2**62 + 1}]", "__name__[1]",
            )
        ],
        *[("bounds", value) for value in (None, "", "wrap", "Raise", 3, ["raise"])],
        *[("fields", value) for value in (None, [], "float32[4]", {"float32[4]": 1}, 3)],
        *[
            ("fields", [value])
            for value in (
                None, 3, ["float32[4]"], "", "float32", "float32[]", "float32[4,]", "float32[-4]",
                "float33[4]", "nn[4]", "float32[4] x 0x2", "float32[4] x", "float32[4] stride",
                "float32[4] stride -4", "float32[4] alignment 3", "float32[4] alignment 32",
                "float32[4] alignment 0x", "float32[4] x 2 stride 64", "float32[4]\n",
                f"float32[{2**62 + 1}]", f"float32[2, {2**62}]", f"float32[4] stride {2**62}",
                "float32[4] x 4097", f"float32[{'9' * 5000}]", "float32[4" + ", 4" * 500 + "]",
            )
        ],
        ("fields", ["float32[4] x 4096", "float32[4]"]),
    ],
)  # fmt: skip
def test_text_that_describes_no_gather(part, value):
    text = {"indices": "int64[48]", "bounds": "raise", "fields": ["float32[4096, 8]"]}
    assert shape.from_text(text, CPU).count == 48
    with pytest.raises(ValueError) as caught:  # noqa: PT011  # the text is looked at below
        shape.from_text({**text, part: value}, CPU)
    # It shows the field; where there are none or too many, it says that.
    single = part == "fields" and isinstance(value, list) and len(value) == 1
    assert (repr(value[0]) if single else part) in str(caught.value)
    with pytest.raises(ValueError, match=part):
        shape.from_text({name: each for name, each in text.items() if name != part}, CPU)


# --- Keys ----------------------------------------------------------------------------------------


def field(dtype, *row_shape, stride=None, alignment=16):
    row_bytes = dtype.itemsize * math.prod(row_shape)
    stride = row_bytes if stride is None else stride
    return Field(dtype, 1000, row_shape, row_bytes, stride, True, alignment)


WIDE, WORD = field(torch.float32, 1024), field(torch.int64)
U8 = torch.uint8


@pytest.mark.parametrize(
    ("count", "buffers", "key"),
    [
        # 48 is nearer to 64 than to 32 in the logarithm, 3 nearer to 4.
        (48, [field(torch.float32, 8)] * 3, Key(6, 5, 2, 16)),
        (1, [field(U8)], Key(0, 0, 0, 1)),
        (0, [WORD], Key(0, 3, 0, 8)),
        (11, [WORD], Key(3, 3, 0, 8)),
        (12, [WORD], Key(4, 3, 0, 8)),
        (2**20, [WORD] * 64, Key(20, 3, 6, 8)),
        # (4096 + 3 * 8) / 4 = 1030 bytes; 4120 bytes in 256 + 3 units.
        (1, [WIDE, WORD, WORD, WORD], Key(0, 10, 2, 16)),
        # A mean of 6 bytes: 12 is twice as many, 13 is more.
        (8, [field(U8, 12), field(U8, 3), field(U8, 3)], Key(3, 3, 2, 2)),
        (8, [field(U8, 13), field(U8, 3), field(U8, 2)], Key(3, 3, 2, 1)),
        # Rows of an odd size begin anywhere, so they are copied byte by byte.
        (64, [field(U8, 1023)], Key(6, 10, 0, 1, narrow=2)),
        # Less than half of the bytes, half of them, and rows that are not long.
        (64, [field(U8, 1023), field(torch.float32, 512)], Key(6, 11, 1, 2, narrow=1)),
        (64, [field(U8, 1023), field(torch.int64, 127)], Key(6, 10, 1, 2, narrow=2)),
        (64, [field(U8, 31), field(torch.float32, 31)], Key(6, 6, 1, 2)),
        # The stride and the address limit the unit too.
        (64, [field(torch.float32, 4, stride=20)], Key(6, 4, 0, 4)),
        (64, [field(torch.float32, 4, alignment=2)], Key(6, 4, 0, 2)),
        (64, [field(torch.float32, 4, stride=0)], Key(6, 4, 0, 16)),
        # 18 bytes in two units: 9 is nearer to 8 than to 16.
        (64, [field(U8, 16), field(U8, 2)], Key(6, 3, 1, 8)),
        # Nothing to copy: as good as the widest unit.
        (64, [field(torch.float32, 0)] * 2, Key(6, 0, 1, 16)),
        (64, [field(U8, 0), field(U8, 16)], Key(6, 3, 1, 16)),
    ],
)  # fmt: skip
def test_key_of_a_gather(count, buffers, key):
    request = Request(CPU, False, torch.int64, count, "raise", tuple(buffers))
    assert key_of(request) == key
    other = dataclasses.replace(request, index_dtype=torch.int32, bounds="clip")
    assert key_of(other) == key


def test_label_has_powers_of_two():
    key = Key(count=6, row=5, buffers=2, unit=16)
    assert key.label == "m64.row32.buffers4.unit16"
    assert Key(0, 0, 0, 1).label == "m1.row1.buffers1.unit1"
    assert Key(63, 0, 0, 1).label.startswith(f"m{2**63}.")
    assert Key(0, 6, 0, 4, narrow=1).label == "m1.row64.buffers1.unit4.partly-narrow"
    assert Key(0, 6, 0, 1, narrow=2).label == "m1.row64.buffers1.unit1.narrow"


@pytest.mark.parametrize("name", ["count", "row", "buffers"])
@pytest.mark.parametrize("value", [-1, 64, 2**70, 1.0, True, "1", None])
def test_exponent_out_of_range(name, value):
    with pytest.raises(ValueError, match="exponents must be 0 to 63"):
        dataclasses.replace(KEY, **{name: value})


@pytest.mark.parametrize("unit", [0, 3, 32, -1, None, "4"])
def test_unit_out_of_range(unit):
    with pytest.raises(ValueError, match="unit must be one of"):
        dataclasses.replace(KEY, unit=unit)


@pytest.mark.parametrize("narrow", [-1, 3, 1.0, True, "1", None])
def test_narrow_out_of_range(narrow):
    with pytest.raises(ValueError, match="narrow must be 0, 1 or 2"):
        dataclasses.replace(KEY, narrow=narrow)


exponents = st.integers(0, 63)
keys = st.builds(Key, exponents, exponents, exponents, st.sampled_from(UNITS), st.integers(0, 2))


@settings(deadline=None)
@given(one=keys, other=keys, third=keys)
def test_distance_is_a_distance(one, other, third):
    assert one.distance(other) == other.distance(one)
    assert one.distance(one) == 0
    assert one.distance(third) <= one.distance(other) + other.distance(third) + 1e-9
    assert (one.label == other.label) == (one == other)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({}, "nothing"),
        ({"count": 5}, "count 32 for 8"),
        ({"row": 0, "buffers": 3}, "row 1 for 4, buffers 8 for 1"),
        ({"unit": 1, "row": 3}, "row 8 for 4, unit 1 for 4"),
        ({"narrow": 2}, "narrow 2 for 0"),
    ],
)
def test_differences_of_keys(change, text):
    assert KEY.differences(dataclasses.replace(KEY, **change)) == text


# --- The heuristic -------------------------------------------------------------------------------


def rules_of(folder, monkeypatch, *entries):
    """The rules of a file, read past the memory of those that ship."""
    write(folder / "default.json", {"schema": 1, "rules": list(entries)})
    monkeypatch.setattr(rules, "resources", SimpleNamespace(files=lambda package: folder))
    return rules.default_rules.__wrapped__()


def test_rule_with_an_unknown_condition(tmp_path, monkeypatch):
    good = {"device": "any", "backend": "torch", "when": {"max_row_bytes": 8}, "config": {}}
    assert len(rules_of(tmp_path, monkeypatch, good)) == 1
    bad = {**good, "when": {"min_rows": 1, "max_row_bytes": 8}}
    with pytest.raises(ValueError, match=r"rule 1: unknown conditions \['min_rows'\]"):
        rules_of(tmp_path, monkeypatch, good, bad)


@pytest.mark.parametrize(
    ("when", "matches"),
    [
        ({}, True),
        ({"min_row_bytes": 12, "max_row_bytes": 12}, True),
        ({"min_call_bytes": 120, "max_call_bytes": 120}, True),
        ({"min_row_bytes": 13}, False),
        ({"max_row_bytes": 11}, False),
        ({"min_call_bytes": 121}, False),
        ({"max_call_bytes": 119}, False),
        ({"min_row_bytes": 1, "max_call_bytes": 119}, False),
    ],
)
def test_conditions_of_a_rule(when, matches):
    request = Request(CPU, False, torch.int64, 10, "raise", (WORD, field(torch.float32)))
    for device, fits in (("cpu", True), ("any", True), ("cuda", False)):
        rule = rules.Rule(device, "torch", when, {}, "a test")
        assert rule.matches(request) == (matches and fits)


def test_shipped_rules_are_sound():
    backends = {backend.name: backend for backend in dispatch.BACKENDS}
    found = rules.default_rules()
    for rule in found:
        backends[rule.backend].config_from(rule.knobs)
        assert set(rule.when) <= set(rules.CONDITIONS)
        assert all(type(value) is int and value >= 0 for value in rule.when.values())
    assert {rule.device for rule in found} == {"cuda", "cpu", "any"}


@pytest.mark.parametrize("count", [0, 1, 100, 10**5, 10**8])
@pytest.mark.parametrize("row", [0, 1, 4096, 10**6])
def test_shipped_rules_choose_for_every_gather(count, row):
    request = Request(CPU, False, torch.int64, count, "raise", (field(U8, row),))
    assert list(dispatch.heuristic(request))[:2] == ["native", "torch"]
    on_gpu = dataclasses.replace(request, device=torch.device("cuda"))
    assert list(dispatch.heuristic(on_gpu)) == ["cupy", "triton", "torch"]
    elsewhere = dataclasses.replace(request, device=torch.device("meta"))
    assert next(iter(dispatch.heuristic(elsewhere))) == "torch"


# --- What ships ----------------------------------------------------------------------------------


def test_shipped_tuning_files_are_sound():
    for file in store.Layer("shipped", resources.files("multigather.tuning_cache")).files():
        found = parse(file.read_bytes())
        assert found.rejected == [], file
        assert found.entries, file
        assert file.read_text() == render(found), f"{file} is not as the tuner writes it"
        for label, each in found.entries.items():
            for name, best in each.backends.items():
                assert dispatch.refusal_of(name, best) is None, f"{file}: {label}"
                assert best.environment in found.environments, f"{file}: {label}"
            for text in each.shapes:
                shape.from_text(text, CPU)
            if each.default is not None:
                best = each.backends[each.pick]
                most = each.default.device_us + best.spread_us
                assert best.device_us <= most, f"{file}: {label} is slower than the heuristic"


def test_shipped_schema_is_that_of_the_model():
    path = ROOT / "tuning_cache" / "schema.json"
    expected = json.dumps(model.json_schema(), indent=1) + "\n"
    assert path.read_text() == expected, (
        "write `json.dumps(multigather.cache.model.json_schema(), indent=1)` and a newline into "
        f"{path}"
    )


@pytest.mark.parametrize(
    ("backend", "sources"),
    [
        (CudaBackend(), ["kernels/common.cuh", "kernels/gather.cu"]),
        (TritonBackend(), ["kernels/gather_triton.py"]),
    ],
    ids=["cupy", "triton"],
)
def test_kernel_revision_is_in_step_with_its_source(backend, sources):
    path = ROOT / "tests" / "kernel_revisions.json"
    recorded = json.loads(path.read_text())[backend.name]
    now = {
        "revision": backend.revision,
        "sha256": hashlib.sha256(
            b"".join((ROOT / each).read_bytes() for each in sources)
        ).hexdigest(),
    }
    assert now == recorded, (
        f"{' or '.join(sources)} or the revision of the {backend.name} backend has changed. If the "
        "kernel's speed or the meaning of a config may have changed, raise `revision` in the "
        "backend's class, so that what was measured before is not used any more. Then record in "
        f"{path}: {json.dumps({backend.name: now})}"
    )
