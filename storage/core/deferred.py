"""Asynchronous copies of numbers from a CUDA device to the host, and errors raised from them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch


class HostCopy:
    """Asynchronous copy of a number from a CUDA device to pinned memory of the host. Never waits.

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
        """Whether the copy is complete, so that `int(copy)` returns the number."""
        return bool(self._copied.query())  # type: ignore[no-untyped-call]

    def __int__(self) -> int:
        return int(self._pinned)


class DeferredErrors:
    """Errors that depend on counts on a CUDA device, and are raised by a later call.

    The call that causes an error does not wait for the device. Errors of the last calls of a
    program may never be raised.
    """

    def __init__(self) -> None:
        #: Pending counts, oldest first, each with a function from the count to its error.
        self._counts: deque[tuple[HostCopy, Callable[[int], Exception]]] = deque()

    def note(self, count: torch.Tensor, error: Callable[[int], Exception]) -> None:
        """Start to copy a 0-d count. A later `raise_arrived` raises `error(count)` if count > 0."""
        self._counts.append((HostCopy(count), error))

    def raise_arrived(self) -> None:
        """Raise the error of the oldest arrived count above 0. Remove the counts up to this one."""
        while self._counts and self._counts[0][0].has_arrived:
            copy, error = self._counts.popleft()
            count = int(copy)
            if count:
                raise error(count)
