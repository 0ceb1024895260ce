"""What a forked child must not take over from its parent.

A child has one thread: a lock that another thread of the parent held at the fork is never released
in it, so the next gather of a new layout would wait forever. Workers of a DataLoader are forked
while other threads gather, so this happens.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable

_locks: weakref.WeakSet[Lock] = weakref.WeakSet()


class Lock:
    """A `threading.Lock` that is free in a forked child, whoever held it in the parent.

    What these locks guard is right at every step; they only keep work from being done twice.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        _locks.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *exception: object) -> None:
        self._lock.release()

    def renew(self) -> None:
        """Be free."""
        self._lock = threading.Lock()


def in_child(function: Callable[[], None]) -> Callable[[], None]:
    """Have a function called in every forked child, where the system can fork."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=function)
    return function


@in_child
def _renew() -> None:
    for lock in list(_locks):
        lock.renew()
