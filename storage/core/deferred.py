"""Asynchronous copies of numbers from a CUDA device to the host, and errors raised from them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch


class HostCopy:
    """A number of a CUDA device on its way to pinned memory of the host. Nothing here waits.

    Args:
        number: 0-d tensor, computed on the current stream.
    """

    def __init__(self, number: torch.Tensor) -> None:
        self._pinned = torch.empty((), dtype=number.dtype, pin_memory=True)
        self._pinned.copy_(number, non_blocking=True)
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._copied.record(torch.cuda.current_stream(number.device))

    @property
    def has_arrived(self) -> bool:
        """Whether `int` returns the number."""
        return bool(self._copied.query())  # type: ignore[no-untyped-call]

    def __int__(self) -> int:
        return int(self._pinned)


class DeferredErrors:
    """Errors whose conditions are counts on a CUDA device: the call that caused an error does not wait, a later one
    raises it. Errors of the last calls of a program may never be raised.
    """

    def __init__(self) -> None:
        #: Oldest first: the count, and a function that makes the error.
        self._counts: deque[tuple[HostCopy, Callable[[int], Exception]]] = deque()

    def note(self, count: torch.Tensor, error: Callable[[int], Exception]) -> None:
        """Let a later `raise_arrived` raise `error(count)` if a 0-d count is above 0."""
        self._counts.append((HostCopy(count), error))

    def raise_arrived(self) -> None:
        """Raise the error of the oldest count above 0 that has arrived; forget the counts up to it."""
        while self._counts and self._counts[0][0].has_arrived:
            copy, error = self._counts.popleft()
            count = int(copy)
            if count:
                raise error(count)
