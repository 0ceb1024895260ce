"""A server's life in short: threads that gather on their streams, some with bad indices.

    python tests/service.py --seconds 60 --backend cupy

Every bad index has a value that no other call has, so that an error tells which call it is of.
A ledger knows what was sent, and at the end every bad pair of an index and a buffer must have been
reported exactly once, with the right position, value, buffer, row count and device, and every other
row must be right. Threads gather by `gather`, by plans, into outputs of their own and by replaying
CUDA graphs; with several GPUs they are spread over these.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import re
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

if __name__ == "__main__":
    os.environ.setdefault("MULTIGATHER_TUNING", "off")

import torch

import multigather

ERROR = re.compile(
    r"indices(?:\.flatten\(\))?\[(?P<position>\d+)\] is (?P<value>-?\d+), out of range for "
    r"(?P<label>\S+) with (?P<rows>\d+) rows"
)
# Name, elements of a row, type, rows beyond a client's fewest.
BUFFERS = (("a", 5, torch.int64, 0), ("b", 1, torch.float32, 10), ("c", 33, torch.uint8, 20))
COUNTS = (1, 2, 8, 33)
FEWEST_BAD = 10
HANGS_AFTER = 600.0


def pairs_of(rows: dict[str, int], device: str) -> int:
    """How many pairs a bad index counts for: on a CPU its call raises for the first."""
    return 1 if device == "cpu" else len(rows)


@dataclass
class Ledger:
    """What was sent and what was reported.

    Attributes:
        calls: gathers made.
        bad: of them, those with a bad index.
        pairs: bad (index, buffer) pairs sent.
        errors: `IndexError`s seen.
        reported: pairs that these stand for.
        failures: what went wrong.
    """

    calls: int = 0
    bad: int = 0
    pairs: int = 0
    errors: int = 0
    reported: int = 0
    failures: list[str] = field(default_factory=list)
    _sent: dict[int, tuple[int, dict[str, int], str]] = field(default_factory=dict)
    _named: set[tuple[int, str]] = field(default_factory=set)
    _lock: Any = field(default_factory=threading.Lock)

    def fail(self, text: str) -> None:
        with self._lock:
            self.failures.append(text)

    def made(self) -> None:
        with self._lock:
            self.calls += 1

    def send(self, value: int, position: int, rows: dict[str, int], device: str) -> None:
        """A call is about to be made whose index is bad for buffers of these names and rows."""
        with self._lock:
            self.bad += 1
            self.pairs += pairs_of(rows, device)
            self._sent[value] = position, rows, device

    def withdraw(self, value: int) -> None:
        """That call was not made, because it raised an earlier call's error."""
        with self._lock:
            self.bad -= 1
            self.pairs -= pairs_of(*self._sent.pop(value)[1:])

    def receive(self, error: IndexError) -> int | None:
        """Check an error against what was sent; the value that it names."""
        found, more = ERROR.search(str(error)), re.search(r"; (\d+) more bad", str(error))
        with self._lock:
            self.errors += 1
            if found is None:
                self.failures.append(f"an error without details: {error}")
                return None
            self.reported += 1 + (int(more[1]) if more else 0)
            value, label = int(found["value"]), found["label"]
            position, rows, device = self._sent.get(value, (-1, {}, ""))
            name = re.sub(r"^bufs\[0\]\['(.*)'\]$", r"\1", label)
            right = position == int(found["position"]) and rows.get(name) == int(found["rows"])
            if device != "cpu":
                right = right and f" on {device} by an earlier gather" in str(error)
            if not right or (value, name) in self._named:
                self.failures.append(f"{error} (sent: {position, rows, device})")
            self._named.add((value, name))
            return value


class Client:
    """One thread's buffers, plans, streams and graph.

    Args:
        number: of the thread.
        device: where it gathers.
        backend: value for ``backend=``.
        ledger: of all clients.
        graphs: whether it replays a CUDA graph too.
        share: of its calls that have a bad index.
    """

    _values = itertools.count(1000)

    def __init__(
        self,
        number: int,
        device: str,
        backend: str | None,
        ledger: Ledger,
        graphs: bool,
        share: float,
    ) -> None:
        self.share = share
        self.number, self.device, self.backend, self.ledger = number, device, backend, ledger
        self.on_gpu = device.startswith("cuda")
        self.draw = random.Random(number)
        self.generator = torch.Generator(device).manual_seed(number)
        self.fewest = 100 + number
        self.wrong = torch.zeros((), dtype=torch.int64, device=device)
        self.streams = [torch.cuda.Stream(device) for _ in range(2)] if self.on_gpu else [None]
        self.rows: dict[str, int] = {}
        self.buffers: dict[str, torch.Tensor] = {}
        for name, width, dtype, more in BUFFERS:
            rows = self.fewest + more
            content = self.content(torch.arange(rows, device=device), width, dtype)
            self.buffers[f"t{number}{name}"] = content if width > 1 else content[:, 0].contiguous()
            self.rows[f"t{number}{name}"] = rows
        self.plan = multigather.plan(self.buffers, backend=backend)
        self.outs = {count: self.empty(count) for count in COUNTS}
        self.graph = None
        if graphs:
            # Warm, because the first use of a layout compiles; then captured before others run.
            self.static = torch.zeros(8, dtype=torch.int64, device=device)
            self.into = self.empty(8)
            with torch.cuda.device(device):
                for _ in range(2):
                    self.plan(self.static, out=(self.into,))
                torch.cuda.synchronize()
                self.graph = torch.cuda.CUDAGraph()
                # Torch's own stream for captures is one of the first device that captured.
                with torch.cuda.graph(self.graph, stream=torch.cuda.Stream(device)):
                    self.plan(self.static, out=(self.into,))

    def content(self, rows: torch.Tensor, width: int, dtype: torch.dtype) -> torch.Tensor:
        """Rows of a buffer by arithmetic: the gather is not its own oracle. No byte row is zero."""
        columns = torch.arange(width, device=rows.device)
        return ((rows[:, None] * width + columns + self.number) % 251 + 1).to(dtype)

    def empty(self, count: int) -> dict[str, torch.Tensor]:
        return {
            name: torch.empty((count, *buffer.shape[1:]), dtype=buffer.dtype, device=self.device)
            for name, buffer in self.buffers.items()
        }

    def run(self, done: Callable[[], bool]) -> None:
        try:
            for turn in itertools.count():
                if done():
                    break
                stream = self.streams[turn % len(self.streams)]
                with torch.cuda.stream(stream):  # None: no stream to switch to
                    self.step()
                    if turn % 64 == 63:
                        self.look()
                if stream is not None:  # the two streams share the outputs
                    self.streams[(turn + 1) % 2].wait_stream(stream)
            self.look()
        except BaseException as error:
            self.ledger.fail(f"client {self.number}: {error!r}")

    def look(self) -> None:
        """Count wrong rows, now and then, because that waits for the GPU; and sometimes check."""
        if int(self.wrong):
            self.ledger.fail(f"client {self.number}: {int(self.wrong)} outputs are wrong")
            self.wrong.zero_()
        if self.draw.random() < 0.3:
            try:
                multigather.check(self.device)
            except IndexError as error:
                self.ledger.receive(error)

    def step(self) -> None:
        """One gather, perhaps a bad one."""
        ways = ["gather", "plan", "gather out", "plan out"] + ["graph"] * (self.graph is not None)
        way = self.draw.choice(ways)
        count = 8 if way == "graph" else self.draw.choice(COUNTS)
        indices = torch.randint(
            -self.fewest, self.fewest, (count,), device=self.device, generator=self.generator
        )
        value, place = None, self.draw.randrange(count)
        if self.draw.random() < self.share:
            value = next(self._values)  # beyond every client's rows, and no other call has it
            value = self.draw.choice((value, -value))
            indices[place] = value
            self.ledger.send(value, place, self.rows, self.device)
        self.ledger.made()
        try:
            made = self.gather(way, indices)
        except IndexError as error:
            seen = self.ledger.receive(error)
            if self.on_gpu and value is not None:
                self.ledger.withdraw(value)
            if not self.on_gpu and (value is None or seen != value):
                self.ledger.fail(f"client {self.number}: {value} was bad, the error was {error}")
            return
        if not self.on_gpu and value is not None:
            self.ledger.fail(f"client {self.number}: no error for {value}")
        for (name, result), (_, width, dtype, _) in zip(made.items(), BUFFERS, strict=True):
            rows = torch.where(indices < 0, indices + self.rows[name], indices)
            wanted = self.content(rows, width, dtype)
            if value is not None:
                wanted[place] = 0
            self.wrong += (result.view(wanted.shape) != wanted).any()

    def gather(self, way: str, indices: torch.Tensor) -> dict[str, torch.Tensor]:
        if way == "graph":
            self.static.copy_(indices)
            self.graph.replay()
            return self.into
        out = (self.outs[len(indices)],) if way.endswith("out") else None
        if way.startswith("plan"):
            return self.plan(indices, out=out)[0]
        return multigather.gather(indices, self.buffers, out=out, backend=self.backend)[0]


def serve(
    calls: int,
    device: str = "cuda",
    backend: str | None = None,
    threads: int = 8,
    share: float = 0.04,
    seconds: float = 0.0,
) -> Ledger:
    """Run the service, a share of its calls bad; ``failures`` of the ledger say what went wrong.

    It ends when there were so many calls, `FEWEST_BAD` bad ones among them, and so many seconds
    have passed: a busy machine takes longer, and does as much.
    """
    ledger = Ledger()
    devices = [device]
    if device == "cuda":
        devices = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    clients = [
        Client(number, devices[number % len(devices)], backend, ledger, device != "cpu", share)
        for number in range(threads)
    ]
    for each in devices:
        if each.startswith("cuda"):
            torch.cuda.synchronize(each)  # buffers were made on other streams
    until = time.monotonic() + seconds

    def done() -> bool:
        enough = ledger.calls >= calls and ledger.bad >= FEWEST_BAD
        return enough and time.monotonic() >= until

    running = [threading.Thread(target=client.run, args=(done,), daemon=True) for client in clients]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(max(until - time.monotonic(), 0) + HANGS_AFTER)
        if thread.is_alive():
            ledger.fail("a thread hangs")
    while not ledger.failures:
        try:
            multigather.check()
            break
        except IndexError as error:
            ledger.receive(error)
    if ledger.reported != ledger.pairs:
        ledger.fail(f"{ledger.pairs} bad pairs were sent and {ledger.reported} reported")
    return ledger


def main() -> int:
    """Run the service and print what it did; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=1000, help="at least")
    parser.add_argument("--seconds", type=float, default=10.0, help="at least")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--backend", choices=["cupy", "triton", "native", "torch"])
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    chosen = parser.parse_args()
    ledger = serve(
        chosen.calls, chosen.device, chosen.backend, chosen.threads, seconds=chosen.seconds
    )
    names = ("calls", "bad", "pairs", "errors", "reported")
    facts = {name: getattr(ledger, name) for name in names}
    if chosen.json:
        print(json.dumps({**facts, "failures": ledger.failures[:20]}))
    else:
        print(", ".join(f"{name} {value}" for name, value in facts.items()))
        for text in ledger.failures[:20]:
            print(f"  {text}")
    return int(bool(ledger.failures))


if __name__ == "__main__":
    sys.exit(main())
