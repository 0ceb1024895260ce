"""What interrupts and forks must find: nothing of ours waits for what never comes.

Ctrl-C, or another exception that comes from outside, can end any call between any two steps. A
forked child has one thread. So a lock may never be released, by a call that was ended before it
owned the lock or by a thread that did not come along, and the next gather would wait forever.

Hence no lock guards what threads share: it changes by single operations on a dict, a list or an
attribute, after each of which it is right, and what two threads make at once is made twice, of
which one is kept.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

Value = TypeVar("Value")

# Held around every import at first use, and around pydantic's checks, whose compiled code makes at
# first use what it keeps. What another thread has begun of that when a fork cuts it in two is never
# finished in the child, which would wait for it; so a fork waits for it instead. Unlike a lock made
# of Python code it is taken and owned in one step, `with` included.
no_fork = threading.RLock()


def in_child(function: Callable[[], None]) -> Callable[[], None]:
    """Have a function called in every forked child, where the system can fork."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=function)
    return function


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=no_fork.acquire,
        after_in_parent=no_fork.release,
        after_in_child=no_fork.release,
    )


class cached_property(Generic[Value]):
    """`functools.cached_property` without the lock that it has in Python 3.11."""

    def __init__(self, function: Callable[[Any], Value]) -> None:
        self._function = function
        self.__doc__ = function.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> cached_property[Value]: ...
    @overload
    def __get__(self, instance: object, owner: type) -> Value: ...
    def __get__(self, instance: object | None, owner: type) -> cached_property[Value] | Value:
        if instance is None:
            return self
        # Of two threads that come first, both get what one of them made.
        made: Value = vars(instance).setdefault(self._name, self._function(instance))
        return made
