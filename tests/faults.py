"""Faults in calls of the operating system: one fails, waits, or lets another process in, at a given instant.

Calls of `os` are replaced, as no other means stops a process between two of them; the library's own
are not.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock


@contextmanager
def instead_of(name: str, act: Callable[..., Any]) -> Iterator[None]:
    """Let `os.<name>(...)` be `act(call, ...)`, where `call` is the real one."""
    call = getattr(os, name)
    with mock.patch.object(
        os, name, lambda *arguments, **options: act(call, *arguments, **options)
    ):
        yield


@contextmanager
def killed_at(name: str, nth: int) -> Iterator[None]:
    """Be killed in the call number `nth`, counted from 0, of `os.<name>`."""
    num_calls = 0

    def counted(call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls > nth:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*arguments, **options)

    with instead_of(name, counted):
        yield
