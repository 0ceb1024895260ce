"""The short way of repeated calls, compiled and generated, on a CPU with a stand-in for the driver.

Both ways run every test here; what a GPU adds is in test_launch.py.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import json
import os
import subprocess
import sys
import tracemalloc
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from cases import in_threads
from cuda_host import HostCudaBackend, compiler, library
from torch._C._dynamo import guards

import multigather
from multigather import api, faults, launch, native, shortcut
from multigather.backends._cupy import CudaConfig, Specialisation, _launch_of
from multigather.backends.base import Destination, KernelRunner
from multigather.executable import Executable
from multigather.launch import Launch, Scale
from multigather.request import Request, bucket_of, field_of

# With a number, so that it is like a GPU's.
DEVICE = torch.device("cpu", 0)
FUNCTION, THREADS, SHARED, STREAM = 0xF00D, 96, 48, 0x57EA
INVALID_CONTEXT, INVALID_VALUE = 201, 1
NAMES = {INVALID_CONTEXT: "CUDA_ERROR_INVALID_CONTEXT", INVALID_VALUE: "CUDA_ERROR_INVALID_VALUE"}

Pointers = ctypes.POINTER(ctypes.c_void_p)
Entry = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, *[ctypes.c_uint] * 7, ctypes.c_void_p, Pointers, ctypes.c_void_p
)


class Driver:
    """Stands in for the CUDA driver.

    Attributes:
        calls: what each launch said, without the parameters.
        blocks: what the parameters of each launch held.
        answers: results of the next launches; 0 when there are none.
        device: number of the current device.
        work: does a launch's work, from its function, grid, threads and parameters.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = sizes
        self.calls: list[tuple[Any, ...]] = []
        self.blocks: list[list[bytes]] = []
        self.answers: list[int] = []
        self.device = 0
        self.work: Callable[..., None] | None = None
        self.entry = Entry(self.launch)
        self.address = ctypes.cast(self.entry, ctypes.c_void_p).value or 0

    def launch(self, *arguments: Any) -> int:
        self.calls.append((*arguments[:9], arguments[10]))
        parameters = arguments[9]
        self.blocks.append(
            [ctypes.string_at(parameters[k], size) for k, size in enumerate(self.sizes)]
        )
        answer = self.answers.pop(0) if self.answers else 0
        if not answer and self.work is not None:
            self.work(arguments[0], arguments[1], arguments[4], parameters)
        return answer

    def launch_kernel(self, *arguments: int) -> None:
        """As CuPy's binding of the call."""
        answer = self.launch(*arguments[:9], ctypes.cast(arguments[9], Pointers), None)
        if answer:
            raise launch.LaunchError(NAMES[answer])


@pytest.fixture(params=["native", "native, methods", "generated"])
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    """The ways of a repeated call: compiled, the same without torch's C interface, generated."""
    if request.param == "generated":
        with native.without():
            yield request.param
        return
    if native.extension is None:
        pytest.skip(native.description)
    if request.param == "native":
        yield request.param
        return
    native.extension.read_tensors(None, 0, 0, 0, 0, 0)
    try:
        yield request.param
    finally:
        native.read_tensors(native.extension)


@pytest.fixture
def drive(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Driver]:
    """Put a stand-in in the driver's place."""

    def start(*sizes: int) -> Driver:
        driver = Driver(sizes)
        for module in (launch, shortcut):
            monkeypatch.setattr(module, "driver_address", lambda: driver.address)
            monkeypatch.setattr(module, "launch_function", lambda: driver.launch_kernel)
            monkeypatch.setattr(module, "current_device", lambda: driver.device)
            monkeypatch.setattr(module, "current_stream", lambda device: STREAM + device)
        monkeypatch.setattr(shortcut, "fast_allocation", lambda device: guards._empty_strided_cpu)
        return driver

    return start


BUFFERS = (
    lambda: torch.arange(40.0).reshape(10, 4),
    lambda: torch.arange(7, dtype=torch.uint8),
    lambda: torch.arange(3 * 2 * 300, dtype=torch.int16).reshape(3, 2, 300),
)
# Where the addresses of three buffers belong in the block, and its parameters begin.
SCATTERED = ([8, 64, 24, 40, 16, 88, 48], (0, 8, 16, 24, 40, 48, 64, 72, 80, 88), bytes(range(96)))
PACKED = ([*range(0, 56, 8)], (0,), bytes(56) + bytes(range(200)))
# More than the stack of the compiled way has room for: bytes, or parameters.
LARGE = ([32752 - 16 * k for k in range(7)], (0,), bytes(k % 251 for k in range(32760)))
MANY = ([*range(0, 56, 8)], range(0, 2600, 4), bytes(k % 251 for k in range(2600)))


def blank(template: bytes, places: Sequence[int]) -> bytes:
    """The block without the addresses."""
    block = bytearray(template)
    for place in places:
        block[place : place + 8] = bytes(8)
    return bytes(block)


def addresses_in(block: bytes, places: Sequence[int]) -> list[int]:
    return [int.from_bytes(block[place : place + 8], sys.byteorder) for place in places]


class Made:
    """A shortcut for three buffers, with what it was made from."""

    def __init__(
        self,
        driver: Driver,
        layout: tuple[Sequence[int], Sequence[int], bytes],
        counts: Sequence[int] = (5,),
        fixed: bool = False,
    ) -> None:
        self.driver = driver
        self.places, offsets, self.template = layout
        self.buffers = tuple(make() for make in BUFFERS)
        self.indices = torch.arange(5) % 3
        fields = tuple(field_of(buffer) for buffer in self.buffers)
        self.request = Request(DEVICE, False, torch.int64, 0, "raise", fields)
        self.executable = Executable(self.request, None, ("bufs[0]", "bufs[1]", "bufs[2]"))
        self.executable.on_cuda = True

        def make(
            numbers: tuple[int, ...], count: int, stride: int, destinations: Sequence[Destination]
        ) -> Launch:
            assert numbers == (2, 0, 1)
            return Launch(
                FUNCTION + count, 100 + count, THREADS, SHARED, 0, self.template, self.places,
                offsets,
            )  # fmt: skip

        self.runner = KernelRunner(self.request, 64, make)
        check = shortcut.guard(self.indices, self.buffers)
        assert check is not None
        self.shortcut = shortcut.Shortcut(check, self.executable, self.buffers, fixed)
        for count in counts:
            self.executable.runners[bucket_of(count)] = self.runner
            self.runner.compile(count)
            self.shortcut.learn(self.indices[:1].expand(count), [])
        self.run = self.shortcut.run

    def into(self, outs: Sequence[torch.Tensor]) -> shortcut.OutShortcut:
        """A shortcut for these outputs."""
        self.runner(self.indices, self.indices.shape, self.buffers, outs)
        self.driver.calls.clear()
        self.driver.blocks.clear()
        return shortcut.OutShortcut(self.indices, self.buffers, outs, self.executable)

    def outputs(self) -> tuple[torch.Tensor, ...]:
        return tuple(buffer.new_zeros(5, *buffer.shape[1:]) for buffer in self.buffers)

    def assert_launched(
        self, indices: torch.Tensor, outs: Sequence[torch.Tensor], call: int = -1
    ) -> None:
        """The launch was the one for these tensors, to the last byte."""
        count = len(indices)
        said = (FUNCTION + count, 100 + count, 1, 1, THREADS, 1, 1, SHARED, STREAM, None)
        assert self.driver.calls[call] == said
        # The parameters follow one another.
        block = b"".join(self.driver.blocks[call])
        wanted = [indices.data_ptr()]
        for number in (2, 0, 1):
            wanted += (self.buffers[number].data_ptr(), outs[number].data_ptr())
        assert addresses_in(block, self.places) == wanted
        assert blank(block, self.places) == blank(self.template, self.places)


def sizes_of(layout: tuple[Sequence[int], Sequence[int], bytes]) -> list[int]:
    """Sizes of the parameters, if each lasts until the next one."""
    _, offsets, template = layout
    return [b - a for a, b in zip(offsets, (*offsets[1:], len(template)), strict=True)]


@pytest.mark.parametrize(
    "layout", [SCATTERED, PACKED, LARGE, MANY], ids=["scattered", "packed", "large", "many"]
)
def test_a_repeated_launch(way: str, drive: Any, layout: Any) -> None:
    """Function, grid, block, stream and every byte of the parameters; new outputs each time."""
    made = Made(drive(*sizes_of(layout)), layout, counts=(5, 2, 0))
    seen = set()
    kept = []
    for indices in (made.indices, made.indices + 0, torch.tensor([2, 0]), made.indices[:2]):
        outs = made.run(indices, made.buffers)
        assert type(outs) is tuple
        made.assert_launched(indices, outs)
        for out, buffer in zip(outs, made.buffers, strict=True):
            assert out.dtype == buffer.dtype
            assert out.shape == (len(indices), *buffer.shape[1:])
            assert out.is_contiguous()
            seen.add(out.data_ptr())
        kept.append(outs)
    assert len(seen) == 12
    assert len(made.driver.calls) == 4
    # A list of other buffers with the same layout.
    made.buffers = tuple(buffer.clone() for buffer in made.buffers)
    made.assert_launched(made.indices, made.run(made.indices, list(made.buffers)))


class Sub(torch.Tensor):
    pass


HOSTILE: dict[str, Callable[[Made], tuple[Any, Any]]] = {
    "other count": lambda m: (m.indices[:3], m.buffers),
    "other type of indices": lambda m: (m.indices.int(), m.buffers),
    "strided indices": lambda m: (torch.arange(10)[::2], m.buffers),
    "2-d indices": lambda m: (m.indices[None], m.buffers),
    "no tensor": lambda m: ([1, 2, 3], m.buffers),
    "None": lambda m: (None, m.buffers),
    "a buffer that is none": lambda m: (m.indices, (*m.buffers[:2], "text")),
    "too few": lambda m: (m.indices, m.buffers[:2]),
    "too many": lambda m: (m.indices, (*m.buffers, m.buffers[0])),
    "none at all": lambda m: (m.indices, ()),
    "no buffers but a number": lambda m: (m.indices, 7),
    "another layout": lambda m: (m.indices, (m.buffers[0][:9], *m.buffers[1:])),
    "a subclass": lambda m: (m.indices, (m.buffers[0].as_subclass(Sub), *m.buffers[1:])),
    "a parameter": lambda m: (
        m.indices,
        (torch.nn.Parameter(m.buffers[0].clone()), *m.buffers[1:]),
    ),
    "gradients": lambda m: (m.indices, (m.buffers[0].clone().requires_grad_(), *m.buffers[1:])),
    "meta": lambda m: (m.indices, (m.buffers[0].to("meta"), *m.buffers[1:])),
    "another address": lambda m: (
        m.indices,
        (torch.zeros(44)[1:41].view(10, 4), *m.buffers[1:]),
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
@pytest.mark.parametrize("fixed", [False, True], ids=["gather", "plan"])
def test_what_must_go_the_long_way(way: str, drive: Any, case: str, fixed: bool) -> None:
    """None, nothing launched, and the next call as before."""
    made = Made(drive(len(PACKED[2])), PACKED, fixed=fixed)
    for _ in range(2):
        assert made.run(*HOSTILE[case](made)) is None
    assert not made.driver.calls
    made.assert_launched(made.indices, made.run(made.indices, made.buffers))


def test_addresses(way: str, drive: Any) -> None:
    """Another address is all right if it is as aligned, but never for a plan."""
    for fixed in (False, True):
        made = Made(drive(len(PACKED[2])), PACKED, fixed=fixed)
        made.buffers = (made.buffers[0].clone(), *made.buffers[1:])
        outs = made.run(made.indices, made.buffers)
        if fixed:
            assert outs is None
        else:
            made.assert_launched(made.indices, outs)


def test_another_current_device(way: str, drive: Any) -> None:
    made = Made(drive(len(PACKED[2])), PACKED)
    made.driver.device = 1
    assert made.run(made.indices, made.buffers) is None
    assert not made.driver.calls


def test_pending_faults_are_raised_first(way: str, drive: Any) -> None:
    """A fault that arrived is raised once, before anything is launched or written."""
    made = Made(drive(len(PACKED[2])), PACKED)
    outs = made.outputs()
    into = made.into(outs)
    board = faults.board_of(DEVICE)
    for call in (
        lambda: made.run(made.indices, made.buffers),
        lambda: into.run(made.indices, made.buffers, outs),
    ):
        ticket = board.words[0]
        start = faults.WORDS * (1 + ticket % faults.RING)
        record = (ticket + 1, made.executable.site.plan, 3, 77, 1, 7, 0, 0)
        for word, value in enumerate(record):
            board.words[start + word] = value
        board.words[0] += 1
        with pytest.raises(IndexError, match=r"\[3\] is 77, out of range for bufs\[1\] with 7"):
            call()
        assert not made.driver.calls
        assert call() is not None
        made.driver.calls.clear()


def test_a_missing_context_is_made_once(
    way: str, drive: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread without a context gets one and the launch is repeated; other errors are raised."""
    made = Made(drive(len(PACKED[2])), PACKED)
    outs = made.outputs()
    into = made.into(outs)
    contexts: list[int] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", contexts.append)
    refusals = 1 if way == "generated" else 2
    made.driver.answers = [INVALID_CONTEXT] * refusals
    made.assert_launched(made.indices, made.run(made.indices, made.buffers))
    assert contexts == [0]
    assert len(made.driver.calls) == refusals + 1
    made.driver.answers = [INVALID_CONTEXT] * refusals
    assert into.run(made.indices, made.buffers, outs) is not None
    made.assert_launched(made.indices, outs)
    assert contexts == [0, 0]
    for answers in ([INVALID_CONTEXT] * (refusals + 1), [INVALID_VALUE] * refusals):
        made.driver.answers = list(answers)
        with pytest.raises(launch.LaunchError, match=NAMES[answers[0]]):
            made.run(made.indices, made.buffers)
        assert not made.driver.answers


def test_errors_come_through(way: str, drive: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a callee raises is raised, and nothing was launched."""

    def full(*arguments: Any) -> Any:
        if arguments[2] == torch.int16:
            raise MemoryError("no room")
        return guards._empty_strided_cpu(*arguments)

    driver = drive(len(PACKED[2]))
    monkeypatch.setattr(shortcut, "fast_allocation", lambda device: full)
    made = Made(driver, PACKED)
    with pytest.raises(MemoryError, match="no room"):
        made.run(made.indices, made.buffers)

    def broken(*arguments: Any) -> Any:
        raise RuntimeError("broken")

    executable = made.executable
    run = shortcut.Shortcut(broken, executable, made.buffers).run
    with pytest.raises(RuntimeError, match="broken"):
        run(made.indices, made.buffers)

    def unwilling(*arguments: Any) -> Any:
        raise TypeError("no tensor")

    known = shortcut.Shortcut(unwilling, executable, made.buffers)
    assert known.run(made.indices, made.buffers) is None
    assert not driver.calls


def test_into_the_same_outputs(way: str, drive: Any) -> None:
    """What may differ is where the indices lie, unless it is in an output."""
    made = Made(drive(len(SCATTERED[2])), ([*SCATTERED[0]], (0,), SCATTERED[2]))
    memory = torch.zeros(64, dtype=torch.int64)
    outs = (memory[:10].view(torch.float32).view(5, 4), *made.outputs()[1:])
    into = made.into(outs)
    for indices in (made.indices, made.indices.clone(), memory[10:15]):
        for given in (outs, list(outs)):
            results = into.run(indices, made.buffers, given)
            assert type(results) is tuple
            assert all(a is b for a, b in zip(results, outs, strict=True))
            made.assert_launched(indices, outs)
    made.driver.calls.clear()
    for arguments in (
        (memory[9:14], made.buffers, outs),
        (memory[5:10], made.buffers, outs),
        (made.indices[:4], made.buffers, outs),
        (made.indices, made.buffers, made.outputs()),
        (made.indices, made.buffers, outs[:2]),
        (made.indices, made.buffers[:2], outs),
        (made.indices, (made.buffers[0].clone(), *made.buffers[1:]), outs),
        (made.indices, made.buffers, (None, *outs[1:])),
        (None, made.buffers, outs),
    ):
        assert into.run(*arguments) is None
    assert not made.driver.calls


def test_into_outputs_on_another_device(
    way: str, drive: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device of the outputs is made the current one, and the one before it again."""
    made = Made(drive(len(PACKED[2])), PACKED)
    outs = made.outputs()
    into = made.into(outs)

    class Device:
        def __init__(self, number: int) -> None:
            self.number = number

        def __enter__(self) -> None:
            self.before, made.driver.device = made.driver.device, self.number

        def __exit__(self, *error: object) -> None:
            made.driver.device = self.before

    monkeypatch.setattr(torch.cuda, "device", Device)
    made.driver.device = 3
    results = into.run(made.indices, made.buffers, outs)
    assert results is not None
    assert all(a is b for a, b in zip(results, outs, strict=True))
    made.assert_launched(made.indices, outs)
    assert len(made.driver.calls) == 1
    assert made.driver.device == 3


@pytest.mark.skipif(compiler() is None, reason="g++ is not installed")
@pytest.mark.parametrize("index", [torch.int64, torch.uint8])
def test_the_cuda_kernel_through_a_repeated_launch(
    way: str, drive: Any, index: torch.dtype
) -> None:
    """gather.cu, built for the CPU, finds its parameters; from several threads at once."""
    driver = drive()
    libraries: list[Any] = []

    class Backend(HostCudaBackend):
        def launch_of(
            self,
            specialisation: Specialisation,
            grid: int,
            threads: int,
            device: torch.device,
            parameters: bytes,
            places: Sequence[int],
            scale: Scale | None = None,
        ) -> Launch:
            libraries.append(library(specialisation))
            return Launch(
                len(libraries), grid, threads, 0, 0, parameters, places, (0,), scale=scale
            )

    def work(function: int, grid: int, threads: int, parameters: Any) -> None:
        libraries[function - 1].run(ctypes.c_uint(grid), ctypes.c_uint(threads), parameters)

    driver.work = work
    buffers = (
        *(make() for make in BUFFERS),
        torch.rand(9, 40, dtype=torch.float64),
        torch.rand(3, 33),
    )
    fields = tuple(field_of(buffer) for buffer in buffers)
    request = Request(DEVICE, False, index, 0, "raise", fields)
    executable = Executable(request, None, tuple(f"bufs[{k}]" for k in range(len(buffers))))
    executable.on_cuda = True
    make = functools.partial(_launch_of, Backend(), request, CudaConfig(), executable.site, 56)
    runner = KernelRunner(request, 56, make)
    check = shortcut.guard(torch.zeros(4, dtype=index), buffers)
    assert check is not None
    known = shortcut.Shortcut(check, executable, buffers)
    for count in (1, 4, 30):
        executable.runners[bucket_of(count)] = runner
        runner.compile(count)
        known.learn(torch.empty(count), [])
    failures: list[BaseException] = []
    # The extension scales what it knows to every number in the same bucket.
    counts = (1, 4, 30) if way == "generated" else (1, 4, 30, 3, 5, 23, 45, 31)

    def gather(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        try:
            for turn in range(30):
                count = counts[turn % len(counts)]
                indices = torch.randint(3, (count,), generator=generator).to(index)
                outs = known.run(indices, buffers)
                assert outs is not None
                for out, buffer in zip(outs, buffers, strict=True):
                    assert torch.equal(out, buffer[indices.long()])
        except BaseException as error:
            failures.append(error)

    in_threads(6, gather)
    assert not failures


def test_nothing_is_leaked(way: str, drive: Any) -> None:
    """Calls of every outcome leave counts of references and memory as they were."""
    driver = drive()
    made = Made(driver, LARGE)
    outs = made.outputs()
    into = made.into(outs)
    plan = multigather.plan(*made.buffers)
    plan(made.indices)
    bad = torch.tensor([0, 1, 2, 0, 99])
    watched = [
        *(made.indices, *made.buffers, *outs, made.buffers, outs, bad, None, True),
        *(torch.float32, torch.int16, made.shortcut.check),
        *(each for pair in made.shortcut._launches.values() for each in (pair, *pair)),
    ]

    def calls() -> None:
        assert made.run(made.indices, made.buffers) is not None
        assert made.run(made.indices[:3], made.buffers) is None
        assert made.run(made.indices, made.buffers[:2]) is None
        assert made.run(made.indices, 7) is None
        assert made.run("text", made.buffers) is None
        assert into.run(made.indices, made.buffers, outs) is not None
        assert into.run(made.indices, made.buffers, outs[:2]) is None
        plan(made.indices)
        with pytest.raises(IndexError):
            plan(bad)
        driver.answers = [INVALID_VALUE] * 2
        with pytest.raises(launch.LaunchError):
            made.run(made.indices, made.buffers)
        driver.answers.clear()
        driver.calls.clear()
        driver.blocks.clear()

    for _ in range(20):
        calls()
    gc.collect()
    tracemalloc.start()
    try:
        # Torch keeps some of what it converts indices with, up to 27 KB in all and no more.
        for _ in range(500):
            calls()
        gc.collect()
        before, memory = [sys.getrefcount(each) for each in watched], tracemalloc.take_snapshot()
        for _ in range(2000):
            calls()
        gc.collect()
        after = [sys.getrefcount(each) for each in watched]
        grown = sum(
            each.size_diff for each in tracemalloc.take_snapshot().compare_to(memory, "filename")
        )
    finally:
        tracemalloc.stop()
    assert all(abs(b - a) < 100 for a, b in zip(before, after, strict=True)), (before, after)
    assert grown < 2000 * 24  # the smallest object of each call would be more


def test_cycles_are_collected(way: str, drive: Any) -> None:
    """A shortcut that refers to itself through its compiled or generated call is garbage."""
    made = Made(drive(len(PACKED[2])), PACKED)
    outs = made.outputs()
    into = made.into(outs)
    plan = multigather.plan(*made.buffers)
    plan(made.indices)
    alive = [weakref.ref(each) for each in (made.shortcut, made.executable, into, made.runner)]
    alive += [weakref.ref(each) for each in plan._shortcuts.values()]
    del made, into, plan
    gc.collect()
    assert [each() for each in alive] == [None] * len(alive)


@pytest.mark.parametrize("through", ["gather", "plan", "plan of dicts"])
def test_operations_on_a_cpu(way: str, through: str) -> None:
    """One operation per buffer, viewed as integers where torch refuses the type."""
    api.forget()
    buffers = [
        torch.randn(10, 4),
        torch.arange(10) % 3 == 0,
        torch.randn(10, 3).to(torch.float8_e5m2),
        torch.randn(10, 2, dtype=torch.complex64),
    ]
    plan = multigather.plan(*buffers)
    tree = multigather.plan({"a": buffers[0], "b": tuple(buffers[1:])}, None)

    def rows(indices: torch.Tensor) -> Sequence[torch.Tensor]:
        if through == "gather":
            return multigather.gather(indices, *buffers)
        if through == "plan":
            return plan(indices)
        found, nothing = tree(indices)
        assert nothing is None
        return [found["a"], *found["b"]]

    for values in ([3, 3, 0], [9], [*range(10)], [], [3, 3, 0]):
        for dtype in (torch.int64, torch.int32, torch.int64, torch.uint8):
            indices = torch.tensor(values, dtype=dtype)
            for _ in range(2):
                for out, buffer in zip(rows(indices), buffers, strict=True):
                    assert out.dtype == buffer.dtype
                    assert torch.equal(
                        out.view(torch.uint8), buffer[indices.long()].view(torch.uint8)
                    )
    for _ in range(2):
        with pytest.raises(IndexError, match=r"indices\[1\] is 10, out of range for bufs\[0\]"):
            rows(torch.tensor([0, 10, 2]))
        assert torch.equal(rows(torch.tensor([-1]))[0], buffers[0][-1:])
    api.forget()


def test_numbers_of_indices_on_a_cpu(way: str) -> None:
    """Only those in the buckets that were learned."""
    buffer = torch.randn(10, 4)
    request = Request(torch.device("cpu"), False, torch.int64, 0, "raise", (field_of(buffer),))
    executable = Executable(request, None, ("bufs[0]",))
    check = shortcut.guard(torch.zeros(3, dtype=torch.int64), (buffer,))
    assert check is not None
    known = shortcut.Shortcut(check, executable, (buffer,))
    for count in (0, 5, 90):
        indices = torch.zeros(count, dtype=torch.int64)
        executable(indices, indices.shape, (buffer,), None)
        known.learn(torch.empty(count), [])
    for count in range(200):
        results = known.run(torch.zeros(count, dtype=torch.int64), (buffer,))
        assert (results is not None) == (bucket_of(count) in {bucket_of(k) for k in (0, 5, 90)})
    with pytest.raises(IndexError, match=r"indices\[1\] is 10"):
        known.run(torch.tensor([0, 10, 0, 0, 0]), (buffer,))
    # Where torch refuses an index, a look at the indices first costs less than another refusal.
    assert (known.run == known._run) == (native.extension is None)


@pytest.mark.skipif(native.extension is None, reason=native.description)
def test_the_extension_is_used_on_a_cpu() -> None:
    api.forget()
    buffer, indices = torch.randn(10, 4), torch.tensor([1])
    multigather.gather(indices, buffer)
    (known,) = api._shortcuts.values()
    assert type(known.run) is native.extension.Copy
    with native.without():
        api.forget()
        multigather.gather(indices, buffer)
        (known,) = api._shortcuts.values()
        assert type(known.run) is type(lambda: None)
    api.forget()


@pytest.mark.skipif(native.extension is None, reason=native.description)
def test_the_extension_refuses_what_it_could_not_use() -> None:
    """Wrong arguments are errors when an object is made, not memory written at a call."""
    extension = native.extension
    facts: dict[str, Any] = {
        "driver": 1, "function": 1, "grid": 1, "threads": 1, "shared_bytes": 0, "device": 0,
        "current_stream": abs, "template": bytes(24), "places": (0, 8, 16), "offsets": (0,),
        "otherwise": abs,
    }  # fmt: skip
    prepared = extension.Launch(**facts)
    for wrong in (
        {"driver": 0},
        {"places": (0, 8, 17)},
        {"places": (2**63, 8, 0)},
        {"places": (-1, 0, 8)},
        {"places": ("0", 0, 8)},
        {"places": 7},
        {"offsets": (25,)},
        {"template": "text"},
        {"device": "cuda"},
    ):
        with pytest.raises((TypeError, ValueError, OverflowError)):
            extension.Launch(**{**facts, **wrong})
    scale = (1, 9, 8, 16, [1, 2, 3])
    extension.Launch(**facts, scale=scale)
    for place, wrong in (
        (0, 10), (1, 0), (2, 17), (2, -1), (3, 21), (3, "0"), (4, []), (4, [1, 2]), (4, [1, 0, 3]),
        (4, 7), (4, [1, 2, 3] * 3),
    ):  # fmt: skip
        with pytest.raises((TypeError, ValueError, OverflowError)):
            extension.Launch(**facts, scale=(*scale[:place], wrong, *scale[place + 1 :]))
    with pytest.raises(TypeError):
        extension.Launch(**facts, scale=scale[:4])
    into: dict[str, Any] = {
        "check": abs, "launch": prepared, "current_device": abs, "device": 0, "board": 0,
        "raise_pending": abs, "elsewhere": abs, "numel": 1, "index_bytes": 8, "addresses": (0, 0),
        "items": (1, 1), "spans": (1, 1), "extents": (), "places": (0,), "written": abs,
    }  # fmt: skip
    extension.LaunchInto(**into)
    for wrong in (
        {"launch": None},
        {"places": (1,)},
        {"places": (0, 1), "addresses": (0,) * 4, "items": (1,) * 4, "spans": (1,) * 4},
        {"addresses": (0,)},
        {"items": (1,)},
        {"spans": ()},
        {"extents": (1,)},
    ):
        with pytest.raises((TypeError, ValueError)):
            extension.LaunchInto(**{**into, **wrong})
    new: dict[str, Any] = {
        "check": lambda *tensors: True, "launches": {}, "empty": abs, "current_device": abs,
        "device": 0, "board": faults.board_of(DEVICE).address, "raise_pending": abs,
        "index_bytes": 8, "masks": (15,), "values": (0,), "places": (0,), "items": (8,),
        "spans": (8,),
    }  # fmt: skip
    for wrong in (
        {"launches": []},
        {"masks": ()},
        {"values": (0, 0)},
        {"places": (1,)},
        {"items": ()},
        {"spans": (8, 8)},
        {"places": (0, 0), "masks": (0, 0), "values": (0, 0), "items": (8, 8), "spans": (8, 8)},
    ):
        with pytest.raises((TypeError, ValueError)):
            extension.LaunchNew(**{**new, **wrong})
    tensor = torch.tensor([1])
    for entry in (7, (prepared,), (7, ((),)), (prepared, ()), (prepared, (7,)), (prepared, [()])):
        run = extension.LaunchNew(**{**new, "launches": {1: entry}})
        with pytest.raises(TypeError, match="no launch and its outputs"):
            run(tensor, (tensor,))
    for wrong_call in ((), (tensor,), (tensor, (tensor,), ())):
        with pytest.raises(TypeError, match="indices and buffers are needed"):
            run(*wrong_call)
    with pytest.raises(TypeError, match="indices and buffers are needed"):
        run(tensor, buffers=(tensor,))
    copy: dict[str, Any] = {
        "check": abs, "buckets": set(), "empty": abs, "outputs": (((), (1,), torch.int64),),
        "layout": bytes(32), "bounds": 0, "index_type": 3, "failed": abs, "items": (8,),
        "spans": (8,), "addresses": None,
    }  # fmt: skip
    extension.Copy(**copy)
    for change in (
        {"outputs": (7,)}, {"outputs": (((), (1,)),)}, {"outputs": ((1, (1,), 1),)},
        {"outputs": ()}, {"layout": bytes(31)}, {"addresses": ()}, {"addresses": (1, 2)},
        {"addresses": ("text",)}, {"buckets": ()}, {"items": ()}, {"spans": (8, 8)},
    ):  # fmt: skip
        with pytest.raises((TypeError, ValueError)):
            extension.Copy(**{**copy, **change})
    with pytest.raises(ValueError, match="two addresses"):
        extension.gather_rows(bytes(32), 0, 3, 0, 1, 0, [1])
    with pytest.raises(AttributeError):
        extension.facts_of("text")
    with pytest.raises(TypeError):
        extension.read_tensors(7, 0, 0, 0, 0, 0)


def fresh(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, **environment}, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_the_extension_can_be_switched_off() -> None:
    script = """
import json
import torch
from multigather import environment, gather, native
rows = [gather(torch.tensor([1]), torch.arange(4.0))[0].tolist() for _ in range(3)]
print(json.dumps([native.extension is None, environment.facts()["native"], rows]))
"""
    done = fresh(script, MULTIGATHER_NATIVE="off")
    assert json.loads(done.stdout) == [True, "not used: MULTIGATHER_NATIVE=off", [[1.0]] * 3]
    done = fresh(script, MULTIGATHER_NATIVE="on")
    expected = [native.extension is None, native.description, [[1.0]] * 3]
    assert json.loads(done.stdout) == expected
    done = fresh(script, MULTIGATHER_NATIVE="maybe")
    assert "ValueError: MULTIGATHER_NATIVE must be one of on, off, got 'maybe'" in done.stderr


def test_without_the_extension() -> None:
    """Where it was not built, the description says so and everything works."""
    script = """
import sys
sys.modules["multigather._native"] = None
import torch
from multigather import gather, native, plan
buffer = torch.arange(4.0)
assert native.extension is None
for way in (gather, lambda indices, buffer: plan(buffer)(indices)):
    for _ in range(3):
        assert way(torch.tensor([1]), buffer)[0].tolist() == [1.0]
print(native.description)
"""
    done = fresh(script)
    assert done.stdout.startswith("not used: "), done.stderr


@pytest.mark.skipif(native.extension is None, reason=native.description)
def test_a_torch_of_another_layout_is_read_by_its_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors are read as memory only where that is seen to give what their methods give."""
    assert native.read_tensors(native.extension)
    try:
        monkeypatch.setattr(torch.Tensor, "_cdata", 0, raising=False)
        native.extension.read_tensors(None, 0, 0, 0, 0, 0)
        assert not native.read_tensors(native.extension)
        tensor = torch.arange(6)[2:]
        assert native.extension.facts_of(tensor) == (tensor.data_ptr(), 4, 48, 2)
    finally:
        monkeypatch.undo()
        assert native.read_tensors(native.extension)
