"""What a measured choice is filed under: the facts of a gather that change the fastest config."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..request import Request, bucket_of

UNITS = (1, 2, 4, 8, 16)

# How much the facts matter, in units in which a neighbour's weight falls by e. Fitted on 304
# gathers tuned on an H200, each left out in turn and chosen for by the others: of the weightings
# that were equally good within the noise, this one needs the fewest facts. Choices made so among
# 328 gathers of a later tune took 0.7 % longer than the fastest config (median), 4 % (90th
# percentile) and 24 % (worst).
BUFFERS_WEIGHT = 2.0
UNITS_WEIGHT = 1.0
BYTES_WEIGHT = 0.5
NARROW_WEIGHT = 3.0
# A choice from further away is no better than the heuristic.
FARTHEST = 8.0
# Of a shorter row, kernels copy each narrow unit alone; a longer one they may copy in wide words.
LONG_ROW_UNITS = 32
NARROW_UNIT = 8
SHARES = ("", ".partly-narrow", ".narrow")


@dataclass(frozen=True, order=True)
class Key:
    """A class of gathers that one choice serves.

    Left out is what did not change the fastest config on an H200 by more than the noise of 2 %: the
    index type (int32 beside int64, 13 gathers), the bounds mode ("unchecked" beside "raise", 12 of
    13), and whether the buffers' rows are of one size or many.

    Attributes:
        count: exponent of the power of two nearest to the number of indices.
        row: the same for a buffer's bytes per row, the mean over the buffers.
        buffers: the same for the number of buffers.
        unit: bytes of the widest copy unit that address, stride and size of the rows allow, the
            mean over all units of a row.
        narrow: whether long rows of narrow units, `LONG_ROW_UNITS` or more of less than
            `NARROW_UNIT` bytes, have 0 none, 1 less or 2 more than half of the bytes. A kernel that
            has to shift them into wide words holds more registers, and with them all of the launch:
            without this fact a mean unit of 8 bytes led to blocks of 1024 threads, 33 % slower.
    """

    count: int
    row: int
    buffers: int
    unit: int
    narrow: int = 0

    def __post_init__(self) -> None:
        exponents = (self.count, self.row, self.buffers)
        if not all(type(each) is int and 0 <= each < 64 for each in exponents):
            raise ValueError(f"exponents must be 0 to 63, got {exponents}")
        if self.unit not in UNITS:
            raise ValueError(f"unit must be one of {UNITS}, got {self.unit!r}")
        if type(self.narrow) is not int or not 0 <= self.narrow < len(SHARES):
            raise ValueError(f"narrow must be 0, 1 or 2, got {self.narrow!r}")

    @property
    def label(self) -> str:
        """The key as a name: powers of two in place of their exponents."""
        sizes = f"m{1 << self.count}.row{1 << self.row}.buffers{1 << self.buffers}"
        return f"{sizes}.unit{self.unit}{SHARES[self.narrow]}"

    def distance(self, other: Key) -> float:
        """How little another class of gathers says about this one; 0 says as much as itself."""
        pairs = zip(self._facts(), other._facts(), strict=True)
        return sum(abs(one - another) for one, another in pairs)

    def _facts(self) -> tuple[float, ...]:
        size = self.count + self.row + self.buffers
        units = size - (4 if self.narrow else math.log2(self.unit))
        return (
            BUFFERS_WEIGHT * self.buffers,
            UNITS_WEIGHT * units,
            BYTES_WEIGHT * size,
            NARROW_WEIGHT * self.narrow,
        )

    def differences(self, other: Key) -> str:
        """The facts in which another key differs, for people."""
        texts = []
        for name in ("count", "row", "buffers"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                texts.append(f"{name} {1 << theirs} for {1 << mine}")
        if self.unit != other.unit:
            texts.append(f"unit {other.unit} for {self.unit}")
        if self.narrow != other.narrow:
            texts.append(f"narrow {other.narrow} for {self.narrow}")
        return ", ".join(texts) or "nothing"


def key_of(request: Request) -> Key:
    """The key of a gather with at least one buffer."""
    fields = request.fields
    total = sum(field.row_bytes for field in fields)
    units = sum(field.row_bytes // field.unit_bytes for field in fields)
    unit = total / units if units else 16.0
    narrow = sum(
        field.row_bytes
        for field in fields
        if field.unit_bytes < NARROW_UNIT and field.row_bytes >= LONG_ROW_UNITS * field.unit_bytes
    )
    return Key(
        count=bucket_of(request.count),
        row=bucket_of(round(total / len(fields))),
        buffers=bucket_of(len(fields)),
        unit=min(UNITS, key=lambda each: max(each / unit, unit / each)),
        narrow=0 if not narrow else 1 if 2 * narrow < total else 2,
    )
