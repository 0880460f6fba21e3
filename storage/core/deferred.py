"""Errors that a CUDA device finds: a later call raises them, so that the call that caused them does not wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch


class DeferredErrors:
    """Errors whose conditions are counts on a CUDA device.

    A count travels to pinned memory without a wait. It is read by the first `raise_arrived` after its event. Errors of
    the last calls of a program may never be raised.
    """

    def __init__(self) -> None:
        #: Oldest first: the event of the copy, the count, and a function that makes the error.
        self._counts: deque[tuple[torch.cuda.Event, torch.Tensor, Callable[[int], Exception]]] = deque()

    def note(self, count: torch.Tensor, error: Callable[[int], Exception]) -> None:
        """Let a later `raise_arrived` raise `error(count)` if a 0-d count on the current stream is above 0."""
        pinned = torch.empty((), dtype=count.dtype, pin_memory=True)
        pinned.copy_(count, non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record(torch.cuda.current_stream(count.device))
        self._counts.append((copied, pinned, error))

    def raise_arrived(self) -> None:
        """Raise the error of the oldest count above 0 that has arrived; forget the counts up to it. Never waits."""
        while self._counts and self._counts[0][0].query():  # type: ignore[no-untyped-call]
            _, pinned, error = self._counts.popleft()
            count = int(pinned)
            if count:
                raise error(count)
