"""Asynchronous copies of numbers from a device to the host, and errors raised from them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch


class HostCopy:
    """Asynchronous copy of numbers from a CUDA device to pinned memory of the host.

    On other devices, which have no pinned memory, the constructor waits for the copy.

    Args:
        numbers: Tensor, computed on the current stream. It may change after the call.
    """

    def __init__(self, numbers: torch.Tensor) -> None:
        self._copied: torch.cuda.Event | None = None
        if numbers.device.type != "cuda":
            self._numbers = numbers.detach().cpu()
            return
        self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        self._numbers.copy_(numbers, non_blocking=True)
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._copied.record(torch.cuda.current_stream(numbers.device))

    @property
    def has_arrived(self) -> bool:
        """Whether the copy is complete, so that `int(copy)` returns the number."""
        return self._copied is None or bool(self._copied.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Wait for the copy."""
        if self._copied is not None:
            self._copied.synchronize()

    def __int__(self) -> int:
        return int(self._numbers)

    def tolist(self) -> Any:
        """Return the numbers as a list, or as one number if the tensor has no axes."""
        return self._numbers.tolist()


class DeferredErrors:
    """Errors in CUDA data that a later call raises, so that no call waits for the device.

    `note` adds a check of numbers on the device. A later call of `raise_arrived` runs the check,
    once the numbers are on the host. Every error is raised once, and at most one error per call.
    """

    def __init__(self) -> None:
        #: Checks that have not run, oldest first: the copied numbers, and a function that returns
        #: the error to raise for these numbers, or None.
        self._copies: deque[tuple[HostCopy, Callable[[Any], Exception | None]]] = deque()

    @property
    def num_pending(self) -> int:
        """Number of checks that have not run yet."""
        return len(self._copies)

    def note(self, numbers: torch.Tensor, read: Callable[[Any], Exception | None]) -> None:
        """Add a check of numbers on the device, which a later `raise_arrived` runs.

        Args:
            numbers: Tensor on the device.
            read: Function that maps the copied numbers (a result of `HostCopy.tolist`) to the
                error to raise, or to None. It is called once. Earlier checks run first.
        """
        self._copies.append((HostCopy(numbers), read))

    def raise_arrived(self, wait: bool = False) -> None:
        """Run the checks whose numbers are on the host, oldest first, and raise the first error.

        Args:
            wait: Whether to wait for all numbers.
        """
        while self._copies:
            copy, read = self._copies[0]
            if wait:
                copy.wait()
            elif not copy.has_arrived:
                return
            self._copies.popleft()
            error = read(copy.tolist())
            if error is not None:
                raise error
