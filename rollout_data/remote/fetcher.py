"""Requests to a store, many at once, that end: with an answer, or with one error.

One rule: no caller waits for a request longer than its time-out. A request that fails or hangs is sent again a bounded
number of times; the thread of one that hangs is given up and keeps no other from being sent. What is requested, and
of which store, is not known here.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from storage.errors import RolloutDataError, UnansweredError

from .access_errors import AccessError, denial

#: Seconds before a request that failed is sent again, doubled each time.
_FIRST_PAUSE_S = 0.05
#: What no further attempt would change, besides an `AccessError`.
_FINAL = (
    FileExistsError, FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError, RolloutDataError,
)  # fmt: skip


class FetchError(UnansweredError):
    """A store did not answer a request, however often it was sent."""


def access_error(action: str, where: str, error: BaseException, cause: BaseException) -> AccessError:
    """Build the error for a request that a store refused, by what the file system raised and the cause of it."""
    got = f"{type(cause).__name__}: {cause}".removesuffix(": ")
    advice = "Renew the credentials, or ask for the right, and continue"
    denied = AccessError(action, where, "the right to do so", got, advice)
    denied.__cause__ = error
    return denied


class Request:
    """A request on its way: `send` gives the answer, `action` and `where` tell what it is for."""

    def __init__(self, send: Callable[[], Any], action: str, where: str) -> None:
        self.send = send
        self.action = action
        self.where = where
        self.is_done, self.value, self.error = False, None, None  # type: bool, Any, BaseException | None
        #: Counts attempts that have ended; what one that was given up brings is ignored.
        self.num_attempts = 0
        self.begun_s = 0.0
        self.process = os.getpid()

    def forget(self) -> None:
        """Do not send it any more, unless it is under way."""
        self.is_done = True


class Fetcher:
    """Sends requests, `num_requests` at once, each attempt from a thread of its own.

    Args:
        num_requests: How many are under way at once.
        timeout_s: How long an attempt may take.
        num_retries: How often a request is sent again.
    """

    def __init__(self, num_requests: int, timeout_s: float, num_retries: int) -> None:
        self._num_requests = num_requests
        self._timeout_s = timeout_s
        self._num_retries = num_retries
        self._begin()

    def _begin(self) -> None:
        self._process, self._changed = os.getpid(), threading.Condition()
        self._queue: deque[Request] = deque()
        self._running: set[Request] = set()

    def submit(self, send: Callable[[], Any], action: str, where: str) -> Request:
        """Queue a request; it is called in a thread, and again where an attempt is repeated."""
        if self._process != os.getpid():  # a fork has no threads
            self._begin()
        request = Request(send, action, where)
        with self._changed:
            self._send(request)
        return request

    def wait(self, request: Request) -> Any:
        """Wait for a request and give its answer.

        Raises:
            FetchError: It failed, or took too long, each time.
            AccessError: The store refused access; it is not asked again, as its file system did that.
            FileNotFoundError, RolloutDataError, ...: What no further attempt would change.
        """
        if self._process != os.getpid():
            self._begin()
        with self._changed:
            if request.process != os.getpid() and not request.is_done:  # its thread is in another process
                request.process = os.getpid()
                self._send(request)
            while not request.is_done:
                self._changed.wait(min(0.5, self._timeout_s))
                self._give_up_overdue()
        if request.error is not None:
            raise request.error
        return request.value

    def _send(self, request: Request, pause_s: float = 0.0) -> None:
        request.begun_s = time.monotonic() + pause_s
        self._queue.append(request)
        self._begin_attempts()

    def _begin_attempts(self) -> None:
        while self._queue and len(self._running) < self._num_requests:
            request = self._queue.popleft()
            if not request.is_done:
                request.begun_s = max(request.begun_s, time.monotonic())
                self._running.add(request)
                attempt = request, request.num_attempts
                threading.Thread(target=self._attempt, args=attempt, name="rollout-data fetch", daemon=True).start()

    def _attempt(self, request: Request, number: int) -> None:
        time.sleep(max(0.0, request.begun_s - time.monotonic()))
        value, error = None, None  # type: Any, BaseException | None
        try:
            value = request.send()
        except BaseException as cause:  # noqa: BLE001 - whatever a store raises reaches who waits
            error = cause
        with self._changed:
            if request.num_attempts == number:  # it was not given up
                self._end(request, value, error)

    def _give_up_overdue(self) -> None:
        now_s = time.monotonic()
        for request in [one for one in self._running if now_s - one.begun_s > self._timeout_s]:
            self._end(request, None, TimeoutError(f"no answer within {self._timeout_s} s"))

    def _end(self, request: Request, value: Any, error: BaseException | None) -> None:
        """End an attempt: with an answer, with an error that is final, or to send the request again after a pause."""
        self._running.discard(request)
        request.num_attempts += 1
        if isinstance(error, Exception) and not isinstance(error, RolloutDataError) and (cause := denial(error)):
            error = access_error(request.action, request.where, error, cause)
        if isinstance(error, Exception) and not isinstance(error, _FINAL):
            if request.num_attempts <= self._num_retries:
                return self._send(request, _FIRST_PAUSE_S * 2 ** (request.num_attempts - 1))
            got = f"{type(error).__name__}: {error}".removesuffix(": ") + f", {request.num_attempts} times"
            advice = "Try again, or see to the connection and the rights"
            cause = error
            error = FetchError(request.action, request.where, "an answer", got, advice)
            error.__cause__ = cause
        request.value = value
        request.error = error
        request.is_done = True
        self._changed.notify_all()
        self._begin_attempts()
