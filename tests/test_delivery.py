"""When the error of a bad index arrives, and whose it is: what docs/reliability.md promises.

On a CPU the call itself raises (test_errors.py). These tests are of GPUs, and of the fault board
that their errors come by, which a CPU can test too.
"""

from __future__ import annotations

import re
import threading
import time
from typing import Any

import pytest
import torch
from conftest import HAVE_GPU, Target

import multigather
from multigather import api, faults
from multigather.backends._torch import SelectRunner, TorchConfig
from multigather.request import Request, Site, field_of

needs_gpu = pytest.mark.skipif(not HAVE_GPU, reason="torch sees no CUDA device")

TARGET_DEVICES = ("cuda",)  # read by conftest.py: on a CPU the call itself raises


def number_of(error: BaseException) -> int:
    """How many bad (index, buffer) pairs an error stands for."""
    more = re.search(r"; (\d+) more bad", str(error))
    return 1 + (int(more[1]) if more else 0)


def bad_call(target: Target, buffer: torch.Tensor, value: int, position: int = 0) -> None:
    indices = torch.zeros(4, dtype=torch.int64, device=target.device)
    indices[position] = value
    multigather.gather(indices, buffer, backend=target.backend)


# ------------------------------------------------------------------------------ in a GPU's calls


def test_next_call_that_can_see_it_raises_before_it_does_anything(target: Target) -> None:
    """That call is not made; made again, it is right. Nothing is reported twice."""
    buffer = torch.arange(1.0, 13.0, device="cuda").view(4, 3)
    good = torch.tensor([1, 2], device="cuda")
    out = torch.full((2, 3), 9.0, device="cuda")
    plan = multigather.plan(buffer, backend=target.backend)

    def fill() -> torch.Tensor:
        return multigather.gather(good, buffer, bounds="fill", backend=target.backend)[0]

    ways = (
        lambda: multigather.gather(good, buffer, backend=target.backend)[0],
        lambda: plan(good)[0],
        lambda: multigather.gather(good, buffer, out=(out,), backend=target.backend)[0],
        lambda: plan(good, out=(out,))[0],
        fill,
    )
    for way in ways:
        for _ in range(3):  # so that every way is also taken as a repeated call
            way()
        out.fill_(9.0)
        bad_call(target, buffer, 4, position=3)
        torch.cuda.synchronize()
        with pytest.raises(IndexError, match=r"\[3\] is 4, out of range for bufs\[0\] with 4 rows"):
            way()
        assert (out == 9.0).all()
        assert torch.equal(way(), buffer[good])
        multigather.check()


def test_a_call_does_not_wait_for_a_fault(target: Target) -> None:
    """Behind work that still runs a bad call returns, and so does the next; check waits."""
    buffer = torch.zeros(4, 3, device="cuda")
    indices = torch.tensor([0, 7], device="cuda")
    for _ in range(2):  # compiled, and remembered
        multigather.gather(indices[:1].expand(2).contiguous(), buffer, backend=target.backend)
    stream = torch.cuda.current_stream()
    # About a second of work; a host that was kept from its two calls for longer tries again.
    for seconds in (1, 2, 4, 8):
        torch.cuda.synchronize()
        torch.cuda._sleep(seconds * 2_000_000_000)
        for _ in range(2):
            multigather.gather(indices, buffer, backend=target.backend)
        returned_before = not stream.query()
        with pytest.raises(IndexError, match=r"\[1\] is 7, ") as caught:
            multigather.check()
        assert number_of(caught.value) == 2
        multigather.check()
        if returned_before:
            break
    assert returned_before, "a call has waited for the GPU"


def test_several_before_the_host_looks_are_one_error(target: Target) -> None:
    """The first call's first bad index, and how many pairs there were, also beyond the ring."""
    one = torch.zeros(4, 3, device="cuda")
    other = torch.zeros(9, device="cuda")
    plan = multigather.plan(other, one, backend=target.backend)
    plan(torch.tensor([0, 5, 3, -6], device="cuda"))  # 5 and -6 are bad for `one` only
    with pytest.raises(IndexError) as caught:
        multigather.check()
    assert "flatten()[1] is 5, out of range for bufs[1] with 4 rows" in str(caught.value)
    assert number_of(caught.value) == 2
    for many in (1, 7, faults.RING, 3 * faults.RING):
        multigather.gather(torch.full((many,), 4, device="cuda"), one, backend=target.backend)
        with pytest.raises(IndexError) as caught:
            multigather.check()
        # Of more faults than the ring has places, the earliest are kept, in no particular order.
        position = "0" if many <= faults.RING else r"\d+"
        assert re.match(rf"indices.flatten\(\)\[{position}\] is 4, ", str(caught.value))
        assert number_of(caught.value) == many
        multigather.check()


def test_another_threads_call_may_see_it(target: Target) -> None:
    """A GPU has one board for all threads."""
    buffer = torch.zeros(4, 3, device="cuda")
    bad_call(target, buffer, 99)
    torch.cuda.synchronize()
    seen: list[str] = []

    def look() -> None:
        try:
            multigather.gather(torch.tensor([0], device="cuda"), buffer, backend=target.backend)
        except IndexError as error:
            seen.append(str(error))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert len(seen) == 1 and " is 99, " in seen[0]
    multigather.check()


def test_a_capture_is_not_spoilt_by_an_earlier_fault(target: Target) -> None:
    """A pending fault stays pending while a graph is captured, and is raised after it."""
    buffer = torch.arange(12.0, device="cuda").view(4, 3)
    good = torch.tensor([1, 3], device="cuda")
    for _ in range(2):
        multigather.gather(good, buffer, backend=target.backend)
    bad_call(target, buffer, -77)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (rows,) = multigather.gather(good, buffer, backend=target.backend)
    with pytest.raises(IndexError, match="is -77, "):
        multigather.gather(good, buffer, backend=target.backend)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(rows, buffer[good])
    multigather.check()


# ------------------------------------------------------------------------------------ the lanes


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch) -> faults.Board:
    """A board for the CPU, which nothing else writes to."""
    monkeypatch.setattr(faults, "_boards", {})
    return faults.board_of(torch.device("cpu"))


class Reporter(SelectRunner):
    """Reports bad indices by torch operations, on a lane of the test's choice.

    Args:
        name: of its buffer, which error messages have.
        rows: of its buffer.
        lane: key of its lane.
    """

    def __init__(self, name: str, rows: int = 10, lane: object = 0) -> None:
        field = field_of(torch.zeros(rows, 3))
        request = Request(torch.device("cpu"), False, torch.int64, 1, "raise", (field,))
        number = 10**8 + hash(name) % 10**6
        self.site = Site(number, (0,), (name,))
        faults.plans[number] = self.site
        super().__init__(request, TorchConfig(), self.site)
        self.lane, self.rows = lane, rows

    def _lane(self) -> object:
        return self.lane

    def __call__(self, *values: int) -> None:
        indices = torch.tensor(values)
        self._report(0, indices, (indices < -self.rows) | (indices >= self.rows))


def kernel_report(board: faults.Board, position: int, value: int) -> None:
    """Ticket, record, stamp, as a kernel writes them; of a plan that does not live."""
    ticket = board.words[0]
    board.words[0] = ticket + 1
    start = faults.WORDS * (1 + ticket % faults.RING)
    for place, word in enumerate((10**6, position, value, 7, 4, 0, 0), start + 1):
        board.words[place] = word
    board.words[start] = ticket + 1


def test_reports_of_torch_operations(board: faults.Board) -> None:
    """The first bad index of a call and the number of all; a good call reports nothing."""
    report = Reporter("bufs[3]")
    report(1, 2, 3)
    assert board.take() is None
    report(1, 12, -11, 2)
    error = board.take()
    assert "flatten()[1] is 12, out of range for bufs[3] with 10 rows" in str(error)
    assert number_of(error) == 2
    assert board.take() is None


def test_reports_of_several_lanes_and_kernels_come_in_order(board: faults.Board) -> None:
    """The first of all is named, whichever way it was reported, and each is counted once."""
    one, other = Reporter("bufs[1]", lane="one"), Reporter("bufs[2]", lane="other")

    def kernel(value: int) -> None:
        kernel_report(board, 5, value)

    for order in ((one, other, kernel), (other, kernel, one), (kernel, one, other)):
        for turn in range(80):
            value = 100 + turn
            for report in order:
                report(value)
            error = board.take()
            name = "buffer 7" if order[0] is kernel else order[0].site.labels[0]
            assert f" is {value}, out of range for {name} " in str(error)
            assert number_of(error) == 3
            assert board.take() is None


def test_a_lane_that_overflows_keeps_the_earliest(board: faults.Board) -> None:
    report = Reporter("bufs[0]")
    for turn in range(3):
        for number in range(5 * faults.LANE_RING):
            report(10 + turn, 10 + number)
        error = board.take()
        assert f" is {10 + turn}, " in str(error)
        # Each has two; of those without a record only one is known.
        assert number_of(error) == (5 + 1) * faults.LANE_RING
        assert board.take() is None


def test_lanes_are_shared_beyond_a_number(
    board: faults.Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program may make streams without end."""
    monkeypatch.setattr(faults, "LANES", 4)
    for number in range(20):
        Reporter("bufs[0]", lane=number)(50)
    assert len({id(lane) for lane in board._lanes.values()}) == 4
    assert number_of(board.take()) == 20
    assert board.take() is None


def test_reports_on_several_streams_at_once(
    board: faults.Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No report is lost, counted twice, or mixed with another's numbers."""
    monkeypatch.setattr(faults, "RECORD_SECONDS", 1000.0)  # threads may wait for one another
    # As on a GPU; on a CPU two additions at once can undo each other.
    atomic, add = threading.Lock(), torch.Tensor.index_add_

    def added(*arguments: Any) -> torch.Tensor:
        with atomic:
            return add(*arguments)

    monkeypatch.setattr(torch.Tensor, "index_add_", added)
    failures: list[str] = []
    counts = {"taken": 0}
    done = threading.Event()

    reporters = [Reporter(f"bufs[{number}]", lane=number) for number in range(4)]

    def report(number: int) -> None:
        words = board.lane(number).words
        for turn in range(100):
            # A full lane would keep the count of further reports only.
            while words[0] - words[1] >= faults.LANE_RING:
                time.sleep(0)
            reporters[number](*[0] * number, 1000 * (number + 1) + turn)

    def take() -> None:
        while True:
            finished = done.is_set()
            error = board.take()
            if error is None:
                if finished and not board._pending():
                    return
                continue
            counts["taken"] += number_of(error)
            found = re.search(r"\[(\d)\] is (\d+), out of range for bufs\[(\d)\]", str(error))
            if not found or not found[1] == found[3] == str(int(found[2]) // 1000 - 1):
                failures.append(str(error))

    taker = threading.Thread(target=take)
    threads = [threading.Thread(target=report, args=(number,)) for number in range(4)]
    for thread in (taker, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    taker.join()
    assert failures == []
    assert counts["taken"] == 400


def test_check_waits_for_a_record_under_way(
    board: faults.Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault whose record comes a little after its ticket is raised by the check itself."""
    monkeypatch.setattr(faults, "RECORD_SECONDS", 1000.0)
    ticket = board.words[0]
    board.words[0] = ticket + 1

    def finish() -> None:
        time.sleep(0.05)
        board.words[0] = ticket
        kernel_report(board, 2, 6)

    thread = threading.Thread(target=finish)
    thread.start()
    with pytest.raises(IndexError, match=r"\[2\] is 6, out of range for buffer 7 with 4 rows"):
        multigather.check("cpu")
    thread.join()
    multigather.check("cpu")


def test_check_gives_up_on_a_record_that_never_comes(
    board: faults.Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault that found the ring full while the host emptied it has no record, but is counted."""
    monkeypatch.setattr(faults, "RECORD_SECONDS", 0.05)
    board.words[0] += 1
    with pytest.raises(IndexError, match="1 bad indices on cpu; the first ones' details are lost"):
        multigather.check("cpu")
    multigather.check("cpu")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("backend", ["torch", "triton", "cupy"])
def test_two_devices_do_not_blame_each_other(backend: str) -> None:
    """Each device's check raises what that device met, in whichever order they are asked."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    api.forget()
    for first, second in ((0, 1), (1, 0)):
        for number in (0, 1):
            buffer = torch.zeros(4 + number, 3, device=f"cuda:{number}")
            indices = torch.tensor([0, 50 + number], device=f"cuda:{number}")
            multigather.gather(indices, buffer, backend=backend)
        for number in (first, second):
            text = rf"is {50 + number}, .* with {4 + number} rows .* on cuda:{number} "
            with pytest.raises(IndexError, match=text):
                multigather.check(number)
        multigather.check()
