"""Faults in calls of the operating system: at a given instant a call fails, waits, or another
process runs.

Calls of `os` are replaced, because only this stops a process between two of them. Functions of the
library are not replaced.
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
    """Replace `os.<name>(...)` by `act(call, ...)`, where `call` is the original function."""
    call = getattr(os, name)
    with mock.patch.object(
        os, name, lambda *arguments, **options: act(call, *arguments, **options)
    ):
        yield


@contextmanager
def killed_at(name: str, nth: int) -> Iterator[None]:
    """Kill the process in the call number `nth` of `os.<name>`, counted from 0."""
    num_calls = 0

    def counted(call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls > nth:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*arguments, **options)

    with instead_of(name, counted):
        yield
