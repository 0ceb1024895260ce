"""Exceptions that are multigather's own, and the texts that several modules share."""

from __future__ import annotations


class UnsupportedError(NotImplementedError):
    """A backend, named by the caller, cannot run this gather; the message lists every reason."""


class NotTunedError(LookupError):
    """In mode ``MULTIGATHER_TUNING=strict``, nothing was measured that serves a gather."""


def bad_index_message(
    *, position: int, value: int, label: str, rows: int, shape: tuple[int, ...] | None = None
) -> str:
    """Text of an `IndexError`: where the index stands, what it is, which buffer refuses it.

    Args:
        position: flat position in ``indices``.
        value: the index.
        label: name of the buffer in the call, such as ``bufs[2]``.
        rows: the buffer's row count.
        shape: shape of ``indices`` if known; the position is then shown in its coordinates.
    """
    where = f"indices.flatten()[{position}]"
    if shape is not None and len(shape) <= 1:
        where = f"indices[{position}]" if shape else "indices"
    elif shape is not None:
        coordinates = []
        for size in reversed(shape):
            position, coordinate = divmod(position, size)
            coordinates.append(str(coordinate))
        where = f"indices[{', '.join(reversed(coordinates))}]"
    valid = f"{-rows} <= index < {rows}" if rows else "no index is valid"
    return f"{where} is {value}, out of range for {label} with {rows} rows ({valid})"
