"""Watch a program: its system calls by audit events, and the functions in which its threads wait.

An audit hook cannot be removed, so all tests share one hook. It does nothing outside of `watching`.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

#: Called with an event's name and arguments before it takes place; what it raises is raised by the
#: operation.
Watcher = Callable[[str, tuple[Any, ...]], None]
_watchers: list[Watcher] = []


def _tell(event: str, arguments: tuple[Any, ...]) -> None:
    for watcher in _watchers:
        watcher(event, arguments)


sys.addaudithook(_tell)


@contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """Call `watcher` for the audit events of all threads within the block."""
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)


@contextmanager
def opened(suffix: str) -> Iterator[list[str]]:
    """List the paths with an ending in the order in which they are opened within the block."""
    result: list[str] = []

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and str(arguments[0]).endswith(suffix):
            result.append(str(arguments[0]))

    with watching(note):
        yield result


def await_wait_in(thread: threading.Thread, name: str, within_s: float = 60.0) -> None:
    """Return when a thread waits for an event, a lock or another thread within a function of this
    name.

    Raises:
        TimeoutError: It does not wait there within `within_s` seconds.
    """
    end_s = time.monotonic() + within_s
    while not _waits_in(thread, name):
        if time.monotonic() > end_s:
            raise TimeoutError(f"{thread.name} does not wait in {name!r}")
        time.sleep(0.001)


def _waits_in(thread: threading.Thread, name: str) -> bool:
    frame = sys._current_frames().get(thread.ident or 0)
    if frame is None or frame.f_code.co_filename != threading.__file__:
        return False
    names = set()
    while frame is not None:
        names.add(frame.f_code.co_name)
        frame = frame.f_back
    return name in names
