"""``MULTIGATHER_RECORD=file``: the gathers that a program makes, a line of JSON each.

A gather is recorded when a runner is made for it, so once per layout and power of two of indices.
`multigather tune --from-record` reads the file.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os

from ..request import Request
from . import shape

log = logging.getLogger("multigather")

_waiting: list[str] = []
_failed: set[str] = set()


def note(request: Request, *, may_write: bool) -> None:
    """Record a gather, if the user asked for it; while nothing may be written, keep it for later.

    A file that cannot be written is one warning: the user's gather must not fail of it.
    """
    path = os.environ.get("MULTIGATHER_RECORD")
    if not path or request.host_memory or not any(f.contiguous_rows for f in request.fields):
        return
    line = json.dumps({"device": request.device.type, **shape.to_text(request)}) + "\n"
    _waiting.append(line)
    if may_write:
        _write(path)
    else:
        atexit.register(_write, path)


def _write(path: str) -> None:
    lines = ""
    with contextlib.suppress(IndexError):  # of another thread that took the last ones
        while _waiting:
            lines += _waiting.pop(0)
    if not lines:
        return
    try:
        # One write to a file opened for appending: lines of several writers do not mix.
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, lines.encode())
        finally:
            os.close(descriptor)
    except OSError as error:
        if path not in _failed:
            _failed.add(path)
            log.warning("MULTIGATHER_RECORD: %s cannot be written: %s", path, error)
