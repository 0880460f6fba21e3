"""Look at what a program asks of the system: what it opens, renames and removes, as audit events tell.

An audit hook cannot be removed, hence one for all tests, which does nothing outside of `watching`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

#: Called with an event's name and arguments before it takes place; what it raises is raised by the operation.
Watcher = Callable[[str, tuple[Any, ...]], None]
_watchers: list[Watcher] = []


def _tell(event: str, arguments: tuple[Any, ...]) -> None:
    for watcher in _watchers:
        watcher(event, arguments)


sys.addaudithook(_tell)


@contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """Call `watcher` for what all threads do within the block."""
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)


@contextmanager
def opened(suffix: str) -> Iterator[list[str]]:
    """List the paths that end so in the order in which they are opened within the block."""
    found: list[str] = []

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and str(arguments[0]).endswith(suffix):
            found.append(str(arguments[0]))

    with watching(note):
        yield found
