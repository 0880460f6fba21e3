"""Parallel requests to a store, with time-outs and retries.

A request that fails or exceeds its time-out is repeated a limited number of times. A thread that
hangs is abandoned and does not block other requests.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from storage.core.threads import Owner
from storage.errors import RolloutDataError, UnansweredError

from .access_errors import AccessError, denial

#: Seconds to wait before the first retry of a request; doubled for each further retry.
_FIRST_PAUSE_S = 0.05
#: Errors after which a request is not repeated, since the answer would be the same.
_FINAL = (
    FileExistsError, FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError, RolloutDataError,
)  # fmt: skip


class FetchError(UnansweredError):
    """All attempts of a request to a store failed or exceeded the time-out."""


def access_error(location: str, error: BaseException, cause: BaseException) -> AccessError:
    """Build the error for a request to which a store denied access.

    Args:
        location: The requested data, for the message.
        error: Error that the file system raised.
        cause: The result of `denial(error)`: this error, or one of its causes.
    """
    denied = AccessError(
        f"The store denies access to {location}: {_described(cause)}. Renew the credentials or "
        "request the access rights, then continue."
    )
    denied.__cause__ = error
    return denied


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".removesuffix(": ")


class Request:
    """A pending or completed request.

    Args:
        send: Function that sends the request and returns the answer.
        location: The requested data, for error messages.

    Attributes:
        is_done: Whether the request is completed or cancelled.
        value: The answer.
        error: Error of a failed request; None otherwise.
        num_attempts: Number of attempts that have ended or were abandoned.
        start_s: Monotonic time in s at which the current attempt starts.
        owner: The process whose thread sends the request.
    """

    def __init__(self, send: Callable[[], Any], location: str) -> None:
        self.send = send
        self.location = location
        self.is_done = False
        self.value: Any = None
        self.error: BaseException | None = None
        self.num_attempts = 0
        self.start_s = 0.0
        self.owner = Owner(location)

    def forget(self) -> None:
        """Cancel the request. A running attempt continues, but no further attempt starts."""
        self.is_done = True


class Fetcher:
    """Sends requests. Each attempt runs in its own thread.

    Args:
        num_requests: Maximum number of attempts that run at once.
        timeout_s: Time-out of an attempt in seconds.
        num_retries: Maximum number of attempts after the first one.
    """

    def __init__(self, num_requests: int, timeout_s: float, num_retries: int) -> None:
        self._num_requests = num_requests
        self._timeout_s = timeout_s
        self._num_retries = num_retries
        self._start()

    def _start(self) -> None:
        """Initialize the queue and the lock. A forked process does so again, without requests."""
        self._owner = Owner("a fetcher")
        self._changed = threading.Condition()
        self._queue: deque[Request] = deque()
        self._running: set[Request] = set()

    def submit(self, send: Callable[[], Any], location: str) -> Request:
        """Queue a request, whose attempts call `send` in a thread.

        Args:
            send: Function that sends the request and returns the answer.
            location: The requested data, for error messages.
        """
        if not self._owner.is_own:  # A forked process has none of the threads.
            self._start()
        request = Request(send, location)
        with self._changed:
            self._send(request)
        return request

    def wait(self, request: Request) -> Any:
        """Wait until a request is completed and return the answer.

        Raises:
            FetchError: All attempts failed or exceeded the time-out.
            AccessError: The store denied access. The request is not repeated, since file systems
                already do that.
            FileNotFoundError, RolloutDataError, ...: Errors that a repetition would not change.
        """
        if not self._owner.is_own:
            self._start()
        with self._changed:
            # After a fork, the thread of the request runs only in the parent process.
            if not (request.owner.is_own or request.is_done):
                request.owner = Owner(request.location)
                self._send(request)
            while not request.is_done:
                self._changed.wait(min(0.5, self._timeout_s))
                self._abandon_overdue()
        if request.error is not None:
            raise request.error
        return request.value

    def _send(self, request: Request, pause_s: float = 0.0) -> None:
        request.start_s = time.monotonic() + pause_s
        self._queue.append(request)
        self._start_attempts()

    def _start_attempts(self) -> None:
        while self._queue and len(self._running) < self._num_requests:
            request = self._queue.popleft()
            if not request.is_done:
                request.start_s = max(request.start_s, time.monotonic())
                self._running.add(request)
                threading.Thread(
                    target=self._attempt,
                    args=(request, request.num_attempts),
                    name="rollout-data fetch",
                    daemon=True,
                ).start()

    def _attempt(self, request: Request, number: int) -> None:
        """Run an attempt of a request in the current thread.

        Args:
            request: The request.
            number: Number of earlier attempts.
        """
        time.sleep(max(0.0, request.start_s - time.monotonic()))
        value: Any = None
        error: BaseException | None = None
        try:
            value = request.send()
        except BaseException as cause:  # noqa: BLE001 - `wait` raises the error
            error = cause
        with self._changed:
            # An abandoned attempt was counted already. Its late answer is ignored.
            if request.num_attempts == number:
                self._end(request, value, error)

    def _abandon_overdue(self) -> None:
        """Abandon the attempts that exceed the time-out."""
        now_s = time.monotonic()
        overdue = [
            request for request in self._running if now_s - request.start_s > self._timeout_s
        ]
        for request in overdue:
            self._end(request, None, TimeoutError(f"no answer within {self._timeout_s} s"))

    def _end(self, request: Request, value: Any, error: BaseException | None) -> None:
        """Complete the request of an ended attempt, or queue the next attempt.

        Args:
            request: The request.
            value: The answer.
            error: Error of the attempt; None if it was answered.
        """
        self._running.discard(request)
        request.num_attempts += 1
        if isinstance(error, Exception) and not isinstance(error, RolloutDataError):
            denied = denial(error)
            if denied is not None:
                error = access_error(request.location, error, denied)
        if isinstance(error, Exception) and not isinstance(error, _FINAL):
            if request.num_attempts <= self._num_retries:
                return self._send(request, _FIRST_PAUSE_S * 2 ** (request.num_attempts - 1))
            cause = error
            attempts = "attempt" if request.num_attempts == 1 else "attempts"
            error = FetchError(
                f"{request.num_attempts} {attempts} to access {request.location} failed: "
                f"{_described(cause)}. Try again, or check the connection and the access rights."
            )
            error.__cause__ = cause
        request.value = value
        request.error = error
        request.is_done = True
        self._changed.notify_all()
        self._start_attempts()
