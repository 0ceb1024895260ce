"""What a measured choice is filed under: the facts of a gather that change the fastest config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..request import Request, bucket_of

UNITS = (1, 2, 4, 8, 16)


@dataclass(frozen=True, order=True)
class Key:
    """A class of gathers that one choice serves.

    The index type and the bounds mode are not among the facts: on an H200 the config that is best
    for int64 indices in mode "raise" was within 1.5 % of the best for int32 indices (13 shapes) and
    within 2.1 % for mode "unchecked" (12 of 13 shapes), which is the noise.

    Attributes:
        count: exponent of the power of two nearest to the number of indices.
        row: the same for a buffer's bytes per row, the mean over the buffers.
        buffers: the same for the number of buffers.
        unit: bytes of the copy unit, the mean over all copy units of a row.
        layout: "ragged" if the widest buffer has more than twice the mean bytes per row.
    """

    count: int
    row: int
    buffers: int
    unit: int
    layout: Literal["uniform", "ragged"]

    def __post_init__(self) -> None:
        exponents = (self.count, self.row, self.buffers)
        if not all(type(each) is int and 0 <= each < 64 for each in exponents):
            raise ValueError(f"exponents must be 0 to 63, got {exponents}")
        if self.unit not in UNITS:
            raise ValueError(f"unit must be one of {UNITS}, got {self.unit!r}")

    @property
    def label(self) -> str:
        """The key as a name: powers of two in place of their exponents."""
        return (
            f"m{1 << self.count}.row{1 << self.row}.buffers{1 << self.buffers}"
            f".unit{self.unit}.{self.layout}"
        )

    def distance(self, other: Key) -> float:
        """How far another class of gathers is, in doublings of the number of indices."""
        return (
            COUNT_WEIGHT * abs(self.count - other.count)
            + ROW_WEIGHT * abs(self.row - other.row)
            + BUFFERS_WEIGHT * abs(self.buffers - other.buffers)
            + UNIT_WEIGHT * abs(self.unit.bit_length() - other.unit.bit_length())
            + LAYOUT_WEIGHT * (self.layout != other.layout)
        )

    def differences(self, other: Key) -> str:
        """The facts in which another key differs, for people."""
        texts = []
        for name in ("count", "row", "buffers"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                texts.append(f"{name} {1 << theirs} for {1 << mine}")
        for name in ("unit", "layout"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                texts.append(f"{name} {theirs} for {mine}")
        return ", ".join(texts) or "nothing"


# Chosen for the smallest regret of 48 random gathers that were not tuned (H200): the fastest config
# depends more on the copy unit than on the number of rows.
COUNT_WEIGHT = 0.5
ROW_WEIGHT = 0.5
BUFFERS_WEIGHT = 1.0
UNIT_WEIGHT = 2.0
LAYOUT_WEIGHT = 1.0
# A choice from further away is no better than the heuristic.
FARTHEST = 6.0


def key_of(request: Request) -> Key:
    """The key of a gather with at least one buffer."""
    fields = request.fields
    total = sum(field.row_bytes for field in fields)
    units = sum(field.row_bytes // field.unit_bytes for field in fields)
    mean = total / len(fields)
    widest = max(field.row_bytes for field in fields)
    unit = total / units if units else 16.0
    return Key(
        count=bucket_of(request.count),
        row=bucket_of(round(mean)),
        buffers=bucket_of(len(fields)),
        unit=min(UNITS, key=lambda each: max(each / unit, unit / each)),
        layout="ragged" if widest > 2 * mean else "uniform",
    )
