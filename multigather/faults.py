"""Bad indices met by kernels: written on the GPU, read by the host without a synchronisation.

Every GPU has one *board*, a few KiB of pinned host memory that its kernels write to directly. A
kernel that meets a bad index takes a ticket (an atomic add on word 0) and, if the ring has a free
slot, writes one record. The host compares word 0 with the number of tickets it has taken, which
costs one memory read per call, and raises when they differ. Tickets are never reset, so neither
side can lose an update of the other; the ring keeps the earliest faults, the count all of them.

Layout, in 64-bit words (the numbers stand also in kernels/gather.cu and kernels/gather_triton.py):
word 0 tickets handed out; word 1 tickets taken by the host; records of 8 words from word 8 on:
``[ticket + 1, plan, position, value, buffer, rows, value is unsigned, further faults]``.

Torch has no operation that takes a ticket: between reading word 0 and adding to it, work on another
stream could take the same one. The torch backend therefore reports on *lanes*, boards of their own
that only the work of one stream writes to, one after another, and rings the device's board: it adds
1 to word 0 there before it counts the lane's ticket. Word 6 of a lane's record is twice the
device's tickets at that time, which puts the records of all in order, plus the flag.
"""

from __future__ import annotations

import array
import ctypes
import itertools
import os
import time
import weakref
from collections.abc import Hashable
from typing import Any

import torch

from .errors import bad_index_message
from .fork import cached_property

RING = 64
WORDS = 8

# A record follows its ticket within microseconds, if the ring had a free slot when it was taken.
# A ticket that stays without one for this long was handed out while the ring was full.
RECORD_SECONDS = 1.0

# As many lanes as torch's pool has streams of one priority, and as many for graphs; with more, some
# share a lane. They are in the board's own memory, because nothing can be allocated in a capture.
LANES = 64
LANE_RING = 8
LANE_WORDS = WORDS * (1 + LANE_RING)

FORKED = (
    "this process was forked after CUDA was used, and in torch CUDA then works in the parent only. "
    'Start workers by the method "spawn" or "forkserver", or gather on the CPU in them'
)

# Labels of the buffers of each plan, for as long as the plan lives.
plans: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

# What else has errors that arrive later: each has a device and `raise_seen`, which `check` calls.
watched: weakref.WeakSet[Any] = weakref.WeakSet()

_boards: dict[torch.device, Board] = {}

_ALL = slice(None)

# Whether a bad index raises at the call that has it; read once, since a look at the environment
# costs as much as the rest of a call's checks.
synchronous = os.environ.get("MULTIGATHER_SYNC", "0") not in ("", "0")


class Board:
    """Fault records of one device.

    Attributes:
        ring: number of records.
        memory: int64 tensor, the words themselves; its address is valid on host and device.
        words: the same memory as unsigned 64-bit words.
        taken: number of tickets that the host has reported.

    Args:
        device: the device.
        lane: memory for a lane; without it memory is allocated, for the board and its lanes.
    """

    # What was made in inference mode could not be written outside it.
    @torch.inference_mode(False)
    def __init__(self, device: torch.device, lane: torch.Tensor | None = None) -> None:
        self.device = device
        self.ring = RING if lane is None else LANE_RING
        size = WORDS * (1 + self.ring)
        if lane is None:
            memory = torch.zeros(
                size + LANES * LANE_WORDS,
                dtype=torch.int64,
                device="cpu",
                pin_memory=device.type != "cpu",
            )
            lane, self._spare = memory[:size], memory[size:].view(LANES, -1)
            lanes = self._lane_words = _words_of(self._spare)
            # Tickets that each lane has handed out, and those that the host has taken of it.
            self._handed, self._taken = lanes[::LANE_WORDS], lanes[1::LANE_WORDS]
        self.memory = lane
        self.address = self.memory.data_ptr()
        self.words = _words_of(lane)
        self.taken = 0
        self._reports = 0
        self._first_seen: float | None = None
        self._lanes: dict[Hashable, Board] = {}
        self._places = itertools.count()

    @cached_property
    @torch.inference_mode(False)
    def device_words(self) -> torch.Tensor:
        """The words as a tensor of the device, for torch operations on it."""
        if self.device.type == "cpu":
            return self.memory
        size = self.memory.numel()
        words = torch.as_tensor(_DeviceArray(self.address, size), device=self.device)
        if words.data_ptr() != self.address:
            # Pinned memory counts as that of the GPU which was current when the allocator took it,
            # and torch has copied it to this one.
            construct: Any = torch._C._construct_storage_from_data_pointer
            storage = construct(self.address, self.device, 8 * size)
            words = torch.empty(0, dtype=torch.int64, device=self.device).set_(storage)
        return words

    def lane(self, key: Hashable) -> Board:
        """The board of those whose work is done one after another, which ``key`` names."""
        try:
            return self._lanes[key]
        except KeyError:
            place = next(self._places)
            if place < LANES:
                lane = Board(self.device, self._spare[place])
            else:
                made = list(self._lanes.values())
                lane = made[place % len(made)]
            return self._lanes.setdefault(key, lane)

    def wait(self) -> IndexError | None:
        """As `take`, but a record that is under way is waited for."""
        while True:
            error = self.take()
            if error is not None or not self._pending():
                return error
            time.sleep(0.0005)

    def _pending(self) -> bool:
        return self.words[0] != self.taken or self._handed != self._taken

    def take(self, shape: tuple[int, ...] | None = None) -> IndexError | None:
        """The error for every fault not reported yet, or None; each fault is reported once.

        ``shape`` is that of the indices where only one call can have met the faults.
        """
        while True:
            reports, taken = self._reports, self.taken
            # Lanes first: each of their tickets has rung the bell by now.
            handed = array.array("Q", self._handed)
            by_lanes = sum(handed) - sum(self._taken)
            # Torch's addition is not atomic where it must be deterministic, and may undo another.
            count = self.words[0]
            tickets = max(count - taken, by_lanes)
            error = None
            if tickets > 0:
                own = _records(self.words, RING, taken, count)
                found = [(record[0] - 1, record) for record in own]
                if len(found) + by_lanes < min(tickets, RING):
                    now = time.monotonic()
                    self._first_seen = first = self._first_seen or now
                    if now - first < RECORD_SECONDS:
                        return None
                for lane, (before, after) in enumerate(zip(self._taken, handed, strict=True)):
                    words = self._lane_words[LANE_WORDS * lane : LANE_WORDS * (lane + 1)]
                    of_lane = _records(words, LANE_RING, before, after)
                    found += [(record[6] >> 1, record) for record in of_lane]
                found.sort(key=lambda each: each[0])
                records = [record for _, record in found]
                more = sum(record[7] for record in records)
                error = self._error(records, tickets + more, shape)
            # CPython changes threads, and lets interrupts in, at calls and loops only. There are
            # none from here on, so these lines are one step: a report is made here, or by another
            # call, or not yet.
            if self._reports == reports:
                self.taken = self.words[1] = count
                self._taken[_ALL] = handed
                self._reports = reports + 1
                self._first_seen = None
                return error

    def _error(
        self, records: list[tuple[int, ...]], count: int, shape: tuple[int, ...] | None
    ) -> IndexError:
        if not records:
            return IndexError(
                f"{count} bad indices on {self.device}; the first ones' details are lost"
            )
        # The lowest ticket's call is the first; within it, tickets come in no particular order.
        plan = records[0][1]
        record = min((r for r in records if r[1] == plan), key=lambda r: (r[2], r[4]))
        value = record[3] if record[6] & 1 or record[3] < 2**63 else record[3] - 2**64
        owner = plans.get(plan)
        label = owner.labels[record[4]] if owner is not None else f"buffer {record[4]}"
        text = bad_index_message(
            position=record[2], value=value, label=label, rows=record[5], shape=shape
        )
        if shape is not None:
            return IndexError(text)
        more = f"; {count - 1} more bad (index, buffer) pairs were met before this report"
        return IndexError(
            f"{text}. It was met on {self.device} by an earlier gather, which zero-filled the row"
            f"{more if count > 1 else ''}. Set MULTIGATHER_SYNC=1 to raise at the call itself"
        )


def _records(words: memoryview, ring: int, taken: int, count: int) -> list[tuple[int, ...]]:
    """The records of tickets ``taken`` to ``count``, as far as a ring of so many has them."""
    records = []
    for ticket in range(taken, min(count, taken + ring)):
        start = WORDS * (1 + ticket % ring)
        if words[start] == ticket + 1:
            records.append(tuple(words[start : start + WORDS]))
    return records


def _words_of(memory: torch.Tensor) -> memoryview:
    """A contiguous int64 tensor of host memory as unsigned words."""
    raw = (ctypes.c_uint64 * memory.numel()).from_address(memory.data_ptr())
    return memoryview(raw).cast("B").cast("Q")


class _DeviceArray:
    """Mapped host memory, described so that torch takes it as memory of a CUDA device."""

    def __init__(self, address: int, words: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (words,),
            "typestr": "<i8",
            "version": 3,
        }


def board_of(device: torch.device) -> Board:
    """The board of a device, made at first use."""
    try:
        return _boards[device]
    except KeyError:
        return _boards.setdefault(device, Board(device))


def raise_pending(device: torch.device) -> None:
    """Raise `IndexError` if a fault of the device has arrived and was not reported yet.

    Does not synchronise: a fault of a kernel that still runs is left for a later call. Does
    nothing while a CUDA graph is being captured, which an error would spoil.

    Raises:
        RuntimeError: the process was forked from one that used CUDA. A board is then memory that
            it does not have.
    """
    if device.type == "cuda" and torch.cuda._is_in_bad_fork():
        raise RuntimeError(FORKED)
    board = _boards.get(device)
    if board is not None and board.words[0] != board.taken:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return
        error = board.take()
        if error is not None:
            raise error


def raise_all(device: torch.device) -> None:
    """As `raise_pending`, once the device's work is done: every fault of it has arrived."""
    board = _boards.get(device)
    error = board.wait() if board is not None else None
    if error is not None:
        raise error


def check(device: torch.device | str | int | None = None) -> None:
    """Wait for the GPU's queued work, then raise if an earlier call met a bad index.

    Args:
        device: a CUDA device, its number or its name; None checks every device that was used.

    Raises:
        IndexError: names position, value, buffer and row count of the first bad index that no
            earlier call has reported, and how many there were.
        CapacityError: a plan of `multigather.distributed` had too little capacity.
        RuntimeError: while a CUDA graph is being captured, when nothing may be waited for; or
            ``device`` is a CUDA device and the process was forked from one that used CUDA.
        ValueError: ``device`` is neither a CUDA device nor "cpu".
    """
    forked = torch.cuda._is_in_bad_fork()
    if device is None:
        # A forked child has made no call on a GPU.
        devices = [each for each in _boards if not (forked and each.type == "cuda")]
    else:
        wanted = None
        try:
            if isinstance(device, int):
                wanted = torch.device("cuda", device)
            else:
                wanted = torch.device(device)
        except (RuntimeError, TypeError):
            pass  # torch knows no such device
        if wanted is None or wanted.type not in ("cuda", "cpu"):
            raise ValueError(f"device must be a CUDA device or None, got {device!r}")
        if wanted.type == "cuda" and forked:
            raise RuntimeError(FORKED)
        if wanted.type == "cuda" and wanted.index is None:
            wanted = torch.device("cuda", torch.cuda.current_device())
        devices = [wanted] if wanted in _boards else []
    for wanted in devices:
        if wanted.type == "cuda":
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    "check() waits for the GPU, which is not possible while a CUDA graph is being "
                    "captured; call it after the capture or after a replay"
                )
            torch.cuda.synchronize(wanted)
        raise_all(wanted)
        for each in list(watched):
            if each.device == wanted:
                each.raise_seen()
