"""Exceptions from outside, such as Ctrl-C, at any step of a call: what comes after is right.

A trace function raises before one step of the interpreter in the library's code. That is every
place where a signal handler's exception or another thread's can appear, and more.
"""

from __future__ import annotations

import dis
import faulthandler
import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from cases import assert_gathered
from conftest import Target

import multigather
from multigather import api, faults
from multigather.fork import cached_property

# The others share the locks, and take long for thousands of calls.
TARGET_BACKENDS, TARGET_DEVICES = ("torch", "native"), ("cpu",)
OURS = str(Path(multigather.__file__).parent)
HANGS_AFTER = 300.0


@pytest.fixture(autouse=True)
def no_hanging() -> Iterator[None]:
    """A gather that waits for what never comes ends the process, and says where it waits."""
    faulthandler.dump_traceback_later(HANGS_AFTER, exit=True, file=sys.__stderr__)
    yield
    faulthandler.cancel_dump_traceback_later()


def interrupted(call: Callable[[], Any], step: int) -> bool:
    """Call, and raise KeyboardInterrupt before a step of it; whether it has so many."""
    left = step

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.startswith((OURS, "<string>")):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= 1
            if left < 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def steps_of(call: Callable[[], Any], apart: int, anew: Callable[[], Any]) -> Iterator[int]:
    """Interrupt a call at steps that lie so far apart, from another start each time it has few."""
    for step in itertools.count(0, apart):
        anew()
        if not interrupted(call, step):
            return
        yield step


WAYS = ("gather", "gather dict", "gather out", "plan", "plan out", "backward", "bad")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("repeated", [False, True], ids=["first", "repeated"])
def test_a_gather_after_an_interrupted_one(target: Target, way: str, repeated: bool) -> None:
    """The same call again, and another one, in this thread and in another."""
    buffer, other = torch.arange(30.0).view(10, 3), torch.arange(10)
    indices, bad = torch.tensor([3, -1, 3]), torch.tensor([0, 10])
    leaf = torch.ones(10, 3, requires_grad=True)
    outs = (torch.empty(3, 3), torch.empty(3, dtype=torch.int64))
    options = {"backend": target.backend}
    plans = [multigather.plan(buffer, other, **options)]

    def anew() -> None:
        if not repeated:
            api.forget()
            plans[0] = multigather.plan(buffer, other, **options)

    def call() -> None:
        if way == "gather":
            found = multigather.gather(indices, buffer, other, **options)
        elif way == "gather dict":
            (found,) = multigather.gather(indices, {"a": buffer, "b": other}, **options)
            found = tuple(found.values())
        elif way == "gather out":
            found = multigather.gather(indices, buffer, other, out=outs, **options)
        elif way == "plan":
            found = plans[0](indices)
        elif way == "plan out":
            found = plans[0](indices, out=outs)
        elif way == "backward":
            leaf.grad = None
            found = multigather.gather(indices, leaf * buffer, other, **options)
            found[0].sum().backward()
            assert torch.equal(leaf.grad[3], 2 * buffer[3]) and not leaf.grad[4].any()
        else:
            with pytest.raises(IndexError, match=r"indices\[1\] is 10, out of range for bufs\[0\]"):
                multigather.gather(bad, buffer, other, **options)
            return
        assert_gathered(found[0], indices, buffer)
        assert_gathered(found[1], indices, other)

    for _ in range(4):
        call()
    met = 0
    for step in steps_of(call, 1 if repeated else 23, anew):
        met += 1
        call()
        if step % 5 == 0:
            failures: list[BaseException] = []
            thread = threading.Thread(target=lambda: keep(call, failures))  # noqa: B023
            thread.start()
            thread.join()
            assert failures == []
    assert met > 20


def keep(call: Callable[[], None], failures: list[BaseException]) -> None:
    try:
        call()
    except BaseException as error:
        failures.append(error)


def test_interrupted_reports() -> None:
    """A fault is reported at most once, whatever ended the report, and the board goes on."""
    of_one = torch.tensor([1, 0, 5, 9, 0, 4, 0, 0]).numpy()
    record = memoryview(of_one).cast("B").cast("Q")
    whole = lost = 0
    for step in itertools.count():
        board = faults.Board(torch.device("cpu"))
        lane = board.lane("stream")
        for words in (board.words, lane.words):
            words[faults.WORDS : 2 * faults.WORDS] = record
            words[0] = 1
        board.words[0] = 2  # the lane's ticket has rung the bell
        found: list[IndexError | None] = []
        ended = interrupted(lambda board=board, found=found: found.append(board.take()), step)
        found += (board.take(), board.take())
        texts = [str(each) for each in found if each is not None]
        assert len(texts) <= 1
        both = bool(texts) and "1 more bad" in texts[0]
        whole, lost = whole + both, lost + (not both)
        assert board.taken == board.words[0] == board.words[1] == 2
        assert lane.words[0] == lane.words[1] == 1
        assert not board._pending()
        if not ended:
            break
    # Between the first change of the report and its return, which no interrupt divides.
    assert whole > 100 and lost < 20


def test_a_report_is_made_in_one_step() -> None:
    """No other thread and no interrupt comes between its first change and its return."""
    code = list(dis.get_instructions(faults.Board.take))
    first = next(
        number for number, each in enumerate(code)
        if each.opname == "STORE_ATTR" and each.argval == "_reports"
    )  # fmt: skip
    # Back to the comparison that it hangs on, forward to the return.
    start = max(number for number in range(first) if code[number].opname == "COMPARE_OP")
    end = next(n for n in range(first, len(code)) if code[n].opname.startswith("RETURN"))
    names = [each.opname for each in code[start:end]]
    assert {"STORE_ATTR", "STORE_SUBSCR"} <= set(names)
    let_in = ("CALL", "PRECALL", "FOR_ITER", "JUMP_BACKWARD", "RESUME", "BUILD")
    assert not [name for name in names if name.startswith(let_in) or "BACKWARD" in name]


def test_a_property_waits_for_no_other() -> None:
    """What one thread is in the middle of, another, or a forked child, makes for itself."""
    begun, go = threading.Event(), threading.Event()

    class Slow:
        @cached_property
        def value(self) -> object:
            if threading.current_thread() is not threading.main_thread():
                begun.set()
                go.wait()
            return object()

    one, found = Slow(), []
    thread = threading.Thread(target=lambda: found.append(one.value))
    thread.start()
    begun.wait()
    Slow().value  # noqa: B018
    mine = one.value
    go.set()
    thread.join()
    assert found == [mine] and one.value is mine
