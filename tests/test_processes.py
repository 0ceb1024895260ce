"""Threads, forks, other processes and pickles."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from cases import assert_gathered, in_threads, run_program
from conftest import HAVE_GPU, Target

import multigather
from multigather import api, faults, shortcut
from multigather.cache import store
from multigather.cache.device import device_of
from multigather.cache.model import parse

needs_gpu = pytest.mark.skipif(not HAVE_GPU, reason="torch sees no CUDA device")
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="the system cannot fork")
BACKENDS = ("torch", "triton", "cupy")


# ---------------------------------------------------------------------------------------- threads


def test_many_threads(target: Target) -> None:
    """32 threads: layouts in common, layouts of their own, plans, outputs of their own."""
    if target.name == "triton-interpreter":
        pytest.skip("Triton's interpreter keeps one program's state per process")
    if target.name == "cuda-source-on-cpu":
        pytest.skip("the C++ stand-in for a GPU has one fault board and no streams")
    api.forget()
    shared = torch.arange(600.0, device=target.device).view(60, 10)
    plan = multigather.plan(shared, backend=target.backend)
    own = 3 if target.name == "triton-gpu" else 32  # different layouts: each is compiled
    start = threading.Barrier(32)
    failures: list[str] = []

    def work(number: int) -> None:
        try:
            mine = torch.arange(60 * (1 + number % own), device=target.device).view(60, -1)
            out = (torch.empty(4, 10, device=target.device),)
            start.wait()
            for turn in range(25):
                values = [(7 * number + turn + step) % 60 for step in range(4)]
                indices = torch.tensor(values, device=target.device)
                both = multigather.gather(indices, shared, mine, backend=target.backend)
                assert_gathered(both[0], indices, shared)
                assert_gathered(both[1], indices, mine)
                assert_gathered(plan(indices)[0], indices, shared)
                assert_gathered(plan(indices, out=out)[0], indices, shared)
                if turn == 12:
                    api.forget()
        except BaseException as error:
            failures.append(f"thread {number}: {error!r}")

    in_threads(32, work)
    assert failures == []
    multigather.check()


# ------------------------------------------------------------------------------------------ forks

FORK = """
import os, sys
import torch, multigather

torch.set_num_threads(1)  # OpenMP's threads do not come along
buffer = torch.arange(30.0).view(10, 3)
plan = multigather.plan(buffer)
used = sys.argv[1] == "used"
if used:
    for _ in range(3):
        plan(torch.tensor([1])), multigather.gather(torch.tensor([1]), buffer)

child = os.fork()
if not child:
    status = 1
    try:
        for count in (1, 2, 3, 40):
            indices = torch.arange(count) % 10
            assert torch.equal(plan(indices)[0], buffer[indices])
            other = torch.zeros(10, count)  # a layout that the parent has not seen
            assert torch.equal(multigather.gather(indices, other)[0], other[indices])
        try:
            plan(torch.tensor([10]))
        except IndexError:
            status = 0
        multigather.check()
    finally:
        os._exit(status)
_, status = os.waitpid(child, 0)
assert torch.equal(plan(torch.tensor([3]))[0], buffer[3:4])
print(status)
"""


@needs_fork
@pytest.mark.parametrize("state", ["imported", "used"])
def test_a_forked_child_can_gather(state: str) -> None:
    assert run_program(FORK, state).stdout == "0\n"


FORK_FROM_THREADS = """
import itertools, os, signal, sys, threading
import torch, multigather

torch.set_num_threads(1)  # OpenMP's threads do not come along
options = {"backend": sys.argv[1]} if sys.argv[1] != "default" else {}
buffer = torch.arange(30.0).view(10, 3)
numbers = itertools.count(1)
done = threading.Event()

def work():
    while not done.is_set():
        number = next(numbers)
        other = torch.zeros(10, number % 500, number % 3 + 1)  # mostly a new layout
        indices = torch.arange(number % 70) % 10
        multigather.gather(indices, {"a": other, "b": buffer}, **options)
        multigather.plan(other, buffer, **options)(indices)
        if number % 5 == 0:
            multigather.gather(indices, other.requires_grad_(), **options)[0].sum().backward()

def child():
    signal.alarm(100)  # far more than it needs
    plan = multigather.plan(buffer, **options)
    for count in (1, 2, 40):
        indices = torch.arange(count) % 10
        other = torch.rand(10, count + 1000, requires_grad=True)
        rows = multigather.gather(indices, {"a": other}, buffer, **options)
        assert torch.equal(rows[0]["a"], other[indices])
        assert torch.equal(rows[1], buffer[indices])
        rows[0]["a"].sum().backward()
        assert other.grad.sum() == count * (count + 1000)
        out = (torch.empty(count, 3),)
        for _ in range(3):
            assert torch.equal(plan(indices)[0], buffer[indices])
            assert torch.equal(plan(indices, out=out)[0], buffer[indices])
            assert torch.equal(multigather.gather(indices, buffer, out=out, **options)[0], out[0])
    try:
        plan(torch.tensor([10]))
    except IndexError:
        multigather.check()
        return 0
    return 1

threads = [threading.Thread(target=work) for _ in range(4)]
for thread in threads:
    thread.start()
codes = []
for _ in range(int(sys.argv[2])):
    pid = os.fork()
    if not pid:
        status = 3
        try:
            status = child()
        finally:
            os._exit(status)
    codes.append(os.waitpid(pid, 0)[1])
done.set()
for thread in threads:
    thread.join()
print(codes)
"""


@needs_fork
@pytest.mark.parametrize("backend", ["default", "torch"])
def test_children_forked_while_threads_gather(backend: str) -> None:
    """From the first gather of the process on, with what is imported and made at first use."""
    assert run_program(FORK_FROM_THREADS, backend, "50").stdout == f"{[0] * 50}\n"


FORK_IN_IMPORT = """
import importlib.abc, os, signal, sys, threading
import torch, multigather

class Slow(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            sys.meta_path.remove(self)
            begun.set()
            forking.wait()
        return None

begun, forking = threading.Event(), threading.Event()
buffer = torch.arange(30.0).view(10, 3)
indices = torch.tensor([3, -1])
sys.meta_path.insert(0, Slow())
thread = threading.Thread(target=multigather.gather, args=(indices, buffer))
thread.start()
assert begun.wait(300)
threading.Timer(0.2, forking.set).start()
pid = os.fork()
if not pid:
    signal.alarm(100)
    (rows,) = multigather.gather(indices, buffer)
    os._exit(0 if torch.equal(rows, buffer[indices]) else 1)
print(os.waitpid(pid, 0)[1])
thread.join()
"""


FORK_IN_CHECK = """
import os, signal, threading
import torch, multigather
from multigather.cache import model

begun, forking = threading.Event(), threading.Event()
checked = model._checked

def slow(*arguments):
    begun.set()
    forking.wait()
    return checked(*arguments)

model._checked = slow
buffer, indices = torch.arange(30.0).view(10, 3), torch.tensor([3, -1])
thread = threading.Thread(target=multigather.gather, args=(indices, buffer))
thread.start()
assert begun.wait(300)
threading.Timer(0.2, forking.set).start()
pid = os.fork()
if not pid:  # the fork came after the check, so what it keeps is whole
    os._exit(0 if forking.is_set() else 1)
print(os.waitpid(pid, 0)[1])
thread.join()
"""


@needs_fork
def test_a_fork_waits_for_a_check_of_a_tuning_file() -> None:
    """What pydantic's compiled code makes at first use would never be finished in the child."""
    pytest.importorskip("pydantic")
    assert run_program(FORK_IN_CHECK, MULTIGATHER_TUNING="").stdout == "0\n"


@needs_fork
@pytest.mark.parametrize("module", ["multigather.cache.model", "pydantic", "platformdirs"])
def test_a_fork_waits_for_an_import_at_first_use(module: str) -> None:
    """A child would wait forever for one that was cut in two."""
    found = run_program(FORK_IN_IMPORT, module, MULTIGATHER_TUNING="cached")
    assert found.stdout == "0\n"


def test_a_forked_child_is_told_that_cuda_is_the_parents(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error comes before the fault board is read, which is memory that the child lacks."""

    class Unreadable:
        def __getattribute__(self, name: str) -> object:
            raise AssertionError("a forked child would die of this")

    device = torch.device("cuda", 0)
    monkeypatch.setattr(faults, "_boards", {device: Unreadable()})
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    for look in (
        lambda: faults.raise_pending(device),
        lambda: multigather.check(0),
        lambda: multigather.check("cuda"),
        lambda: multigather.check("cuda:1"),
    ):
        with pytest.raises(RuntimeError, match=r'forked after CUDA was used.*"spawn"'):
            look()
    multigather.check()  # a worker that gathers on the CPU
    multigather.check("cpu")


def test_generated_launches_are_not_used_in_a_child() -> None:
    """They read the board themselves; the plain way asks `raise_pending`."""
    buffer = torch.zeros(3, 2)
    multigather.gather(torch.tensor([0]), buffer)
    known = api._shortcuts[id(buffer)]
    known.run = lambda indices, buffers: pytest.fail("the child would read the board")
    shortcut._launching.add(known)
    try:
        shortcut._forget_launches()
        (rows,) = multigather.gather(torch.tensor([1]), buffer)
        assert rows.shape == (1, 2)
    finally:
        shortcut._launching.discard(known)
        api.forget()


FORK_ON_GPU = """
import os, sys
import torch, multigather

buffer = torch.arange(30.0, device="cuda").view(10, 3)
indices = torch.tensor([1, 2], device="cuda")
out = (torch.empty(2, 3, device="cuda"),)
host = torch.arange(30.0).view(10, 3)
plan = multigather.plan(buffer, backend=sys.argv[1])
ways = {
    "gather": lambda: multigather.gather(indices, buffer, backend=sys.argv[1]),
    "gather out": lambda: multigather.gather(indices, buffer, out=out, backend=sys.argv[1]),
    "plan": lambda: plan(indices),
    "plan out": lambda: plan(indices, out=out),
    "check": lambda: multigather.check(0),
}
for _ in range(3):
    for way in ways.values():
        way()
torch.cuda.synchronize()
for name, way in ways.items():
    child = os.fork()
    if not child:
        status = 3
        try:
            way()
        except RuntimeError as error:
            status = 0 if "forked after CUDA was used" in str(error) else 4
            if status:
                print(error, flush=True)
        finally:
            os._exit(status)
    print(name, os.waitpid(child, 0)[1], flush=True)
child = os.fork()
if not child:
    status = 5
    try:
        torch.set_num_threads(1)
        places = torch.tensor([3, 4])
        if torch.equal(multigather.gather(places, host)[0], host[places]):
            status = 0
        multigather.check()
    finally:
        os._exit(status)
print("cpu", os.waitpid(child, 0)[1], flush=True)
assert torch.equal(plan(indices)[0], buffer[indices])
multigather.check()
"""


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("backend", BACKENDS)
def test_fork_after_cuda_was_used(backend: str) -> None:
    """Every way of a gather raises in the child, none hangs or dies; a gather on the CPU works."""
    lines = run_program(FORK_ON_GPU, backend).stdout.splitlines()
    assert lines == ["gather 0", "gather out 0", "plan 0", "plan out 0", "check 0", "cpu 0"]


# ---------------------------------------------------------------------------- pickles and workers


def test_a_plan_that_was_pickled_is_a_plan_for_the_copied_buffers() -> None:
    """Before and after it was called; its copy does not follow the original's buffers."""
    first, second = torch.arange(12.0).view(4, 3), torch.arange(4) % 2 == 0
    plan = multigather.plan({"a": first, "none": None}, second, bounds="clip")
    indices = torch.tensor([3, 9])
    for _ in range(2):
        for copied in (lambda: pickle.loads(pickle.dumps(plan)), lambda: copy.deepcopy(plan)):
            other = copied()
            assert isinstance(other, multigather.Plan)
            for _ in range(3):
                made, kept = other(indices), plan(indices)
                assert torch.equal(made[0]["a"], kept[0]["a"])
                assert torch.equal(made[1], kept[1])
            first.add_(1)
            assert not torch.equal(other(indices)[0]["a"], plan(indices)[0]["a"])
    shared = copy.copy(plan)
    first.add_(1)
    assert torch.equal(shared(indices)[0]["a"], plan(indices)[0]["a"])


def test_what_else_can_be_pickled() -> None:
    """Errors that a worker raises, and what people print or log, come back as they were."""
    buffer = torch.zeros(3, 2)
    explanation = multigather.explain(torch.tensor([0]), buffer)
    assert str(pickle.loads(pickle.dumps(explanation))) == str(explanation)
    assert pickle.loads(pickle.dumps(multigather.backends())) == multigather.backends()
    assert pickle.loads(pickle.dumps(multigather.gather)) is multigather.gather
    for call in (
        lambda: multigather.gather(torch.tensor([3]), buffer),
        lambda: multigather.gather(torch.tensor([0]), buffer.t(), backend="cupy"),
    ):
        with pytest.raises((IndexError, NotImplementedError)) as caught:
            call()
        copied = pickle.loads(pickle.dumps(caught.value))
        assert type(copied) is type(caught.value) and str(copied) == str(caught.value)
    refusal = pickle.loads(pickle.dumps(multigather.NotTunedError("a\nb")))
    assert refusal.args == ("a\nb",)


@pytest.mark.gpu
@needs_gpu
def test_a_plan_of_a_gpu_can_be_copied() -> None:
    """Torch copies the buffers to the device they were on."""
    buffer = torch.arange(12.0, device="cuda").view(4, 3)
    plan = multigather.plan(buffer)
    indices = torch.tensor([3, 1], device="cuda")
    plan(indices)
    other = pickle.loads(pickle.dumps(plan))
    buffer.add_(1)
    assert torch.equal(other(indices)[0] + 1, plan(indices)[0])


WORKERS = """
import sys
import torch, multigather
from torch.utils.data import DataLoader, Dataset

class Rows(Dataset):
    def __init__(self, planned):
        self.buffers = (
            torch.arange(300.0).view(100, 3).share_memory_(), torch.arange(100).share_memory_()
        )
        self.plan = multigather.plan(*self.buffers) if planned else None

    def __len__(self):
        return 10

    def __getitem__(self, number):
        indices = torch.arange(10) + 10 * number
        if number == 9:
            indices[4] = 1000
        if self.plan is not None:
            return self.plan(indices)
        return multigather.gather(indices, *self.buffers)

if __name__ == "__main__":
    method, planned = sys.argv[1], sys.argv[2] == "plan"
    rows = Rows(planned)
    for _ in range(3):
        rows[0]
    if len(sys.argv) > 3:
        torch.zeros(1, device="cuda")
        buffer = torch.zeros(3, 2, device="cuda")
        multigather.gather(torch.tensor([0], device="cuda"), buffer)
    loader = DataLoader(rows, batch_size=None, num_workers=2, multiprocessing_context=method)
    seen = []
    try:
        for number, batch in enumerate(loader):
            assert torch.equal(batch[0], rows.buffers[0][10 * number : 10 * number + 10])
            seen += batch[1].tolist()
    except IndexError as error:
        print("indices[4] is 1000, out of range for bufs[0] with 100 rows" in str(error))
    print(seen == list(range(90)))
    print(torch.equal(rows[3][1], torch.arange(30, 40)))
"""


def run_workers(folder: Path, *arguments: str) -> None:
    script = folder / "workers.py"  # a spawned worker imports it
    script.write_text(WORKERS)
    command = [sys.executable, "-W", "ignore", str(script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, done.stdout) == (0, "True\nTrue\nTrue\n"), done.stderr


@needs_fork
@pytest.mark.parametrize(
    ("method", "way"), [("fork", "gather"), ("fork", "plan"), ("spawn", "plan")]
)
def test_workers_of_a_dataloader(tmp_path: Path, method: str, way: str) -> None:
    """They gather on the CPU, and an index error of theirs arrives in the parent."""
    run_workers(tmp_path, method, way)


@pytest.mark.gpu
@needs_gpu
@needs_fork
def test_workers_gather_on_the_cpu_beside_a_gpu(tmp_path: Path) -> None:
    """Forked from a parent that uses CUDA."""
    run_workers(tmp_path, "fork", "plan", "cuda")


# ------------------------------------------------------------------------------ two tuners at once


def test_two_processes_tune_at_once(tmp_path: Path) -> None:
    """Their winners land in one file, none lost, and a third process uses them."""
    environment = {**os.environ, "MULTIGATHER_CACHE_DIR": str(tmp_path)}
    environment["MULTIGATHER_TUNING"] = "cached"
    environment.pop("TRITON_INTERPRET", None)
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "multigather", "tune", "--device", "cpu",
             "--rows", "64", "--row-bytes", str(row_bytes), "--buffers", "1,2"],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for row_bytes in (8, 256)
    ]  # fmt: skip
    for process in running:
        printed, _ = process.communicate(timeout=240)
        assert process.returncode == 0, printed
    file = store.file_for(tmp_path / "tuning", device_of(torch.device("cpu")))
    found = parse(file.read_bytes())
    assert not found.rejected
    assert {(key.row, key.buffers) for key in found.keys} >= {(3, 0), (3, 1), (8, 0), (8, 1)}
    assert sorted(each.name for each in file.parent.iterdir()) == [file.name, f"{file.name}.lock"]
