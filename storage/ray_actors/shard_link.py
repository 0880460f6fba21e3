"""`Link`: the connection of one client to one shard.

A push is a call that adds rows to the shard or updates them. Pushes are numbered from 0. The due
number is the number of the next push that the shard will apply. A link keeps each push until it is
answered and, with checkpoints, until a checkpoint contains it. After a restart of the actor, the
link sends the pushes again that the checkpoint does not contain. Every wait ends after `timeout_s`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from ..errors import BackgroundError, WaitTimeoutError
from ..live.rate_limiter import RateLimitedError
from .buffer_shard import UPDATES, Ack, RemoteOptions
from .packed_results import pack

_PAUSE_S = 0.05


class LostActorError(BackgroundError):
    """The actor of a shard has died. Ray restarts it from its checkpoint."""


class Link:
    """Connection of a client to the actor of one shard.

    Args:
        actor: Handle of the actor.
        collector: Id of the client.
        where: Name of the shard, for errors.
        options: Options of the `RemoteBuffer`.

    Attributes:
        last_ack: The last acknowledgement of the shard; None before the first.
    """

    def __init__(self, actor: Any, collector: str, where: str, options: RemoteOptions) -> None:
        self.actor = actor
        self.where = where
        self._collector = collector
        self._options = options
        self._has_checkpoints = options.checkpoint_dir is not None
        self.last_ack: Ack | None = None
        #: Pushes that may have to be sent again, by number, oldest first:
        #: (method of the shard, reference to the content of the push, bytes of the content).
        self._kept: dict[int, tuple[str, Any, int]] = {}
        #: Total bytes of the pushes in `_kept`.
        self._kept_bytes = 0
        #: Number of the next push that the client creates.
        self._next = 0
        #: Number of the next push to send. -1 to ask the shard for its due number first.
        self._to_send = 0
        #: Unanswered pushes: (number, reference to the answer).
        self._pending: deque[tuple[int, Any]] = deque()

    def start(self, method: str, *args: Any) -> Any:
        """Start a call of a method of the shard, and return the Ray reference to its answer."""
        return getattr(self.actor, method).remote(*args)

    def answer(self, reference: Any, least_s: float = 0) -> Any:
        """Wait for the answer to a call and return it.

        Args:
            reference: Ray reference to the answer.
            least_s: Seconds to wait at least, even if `timeout_s` is shorter.

        Raises:
            WaitTimeoutError: The time limit is over.
            LostActorError: The actor has died, and Ray restarts it.
            BackgroundError: The actor has died and is not restarted.
            Exception: The called method raised this error.
        """
        import ray

        timeout_s = max(self._options.timeout_s, least_s)
        try:
            return ray.get(reference, timeout=timeout_s)
        except ray.exceptions.GetTimeoutError as cause:
            raise WaitTimeoutError(
                f"The actor of {self.where} did not answer within {timeout_s} s. Check its log, or "
                "raise timeout_s."
            ) from cause
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None
        except ray.exceptions.ActorUnavailableError as cause:
            self._to_send = -1
            raise LostActorError(f"The actor of {self.where} is restarting.") from cause
        except ray.exceptions.RayActorError as cause:
            advice = (
                ""
                if self._has_checkpoints
                else " Pass checkpoint_dir, so that actors are restarted."
            )
            problem = str(cause).strip().rstrip(".")
            raise BackgroundError(f"The actor of {self.where} died: {problem}.{advice}") from cause

    def ask(self, method: str, *args: Any) -> Any:
        """Call a method of the shard and return its answer. Retry if the actor restarts."""
        return self.retried(lambda: self.answer(self.start(method, *args)))

    def retried(self, function: Callable[[], Any]) -> Any:
        """Call a function and return its result. Repeat the call while the actor restarts.

        The calls are repeated for at most `timeout_s`, and only if actors have checkpoints.
        """
        stop_s = time.monotonic() + self._options.timeout_s
        while True:
            try:
                return function()
            except LostActorError:
                if not self._has_checkpoints or time.monotonic() > stop_s:
                    raise
                time.sleep(_PAUSE_S)

    def has_restarted(self, ack: Ack) -> bool:
        """Store an acknowledgement; return whether the actor has restarted since the last one."""
        before = self.last_ack
        self.last_ack = ack
        if before is None or before.life == ack.life:
            return False
        self._to_send = -1
        return True

    def push(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Send a call that adds rows to the buffer, or updates them, without a wait for its result.

        Waits while `max_pending` pushes are unanswered. Raises the error of an earlier push.
        """
        import ray

        packed = pack((args, options))
        num_bytes = sum(buffer.nbytes for buffer in packed[0])
        self._send_pushes(self._options.max_pending - 1)
        if self._has_checkpoints and self._kept_bytes + num_bytes > self._options.max_unsaved_bytes:
            self.checkpoint(is_forced=False)
        method = "push_update" if name in UPDATES else "push"
        self._kept[self._next] = method, ray.put((name, packed)), num_bytes
        self._kept_bytes += num_bytes
        self._next += 1
        self._send_pushes(self._options.max_pending)

    def flush(self) -> None:
        """Wait until the actor has answered all pushes, also those lost by a restart."""
        self._send_pushes(0)
        if self._kept and self.has_restarted(self.ask("acknowledge", self._collector)):
            self._send_pushes(0)

    def catch_up(self) -> None:
        """Send the lost pushes again if the actor is known to have restarted."""
        if self._to_send < 0:
            self._send_pushes(0)

    def checkpoint(self, is_forced: bool = True) -> None:
        """Flush, and save a checkpoint of the shard.

        If `is_forced` is False, a checkpoint is saved only if the last checkpoint does not contain
        all pushes of this client.
        """
        self.flush()
        self._note(self.ask("save", self._collector, 0 if is_forced else self._next))

    def _send_pushes(self, max_unanswered: int) -> None:
        """Send all unsent pushes, and wait until at most `max_unanswered` are unanswered."""
        self.retried(lambda: self._try_to_send_pushes(max_unanswered))

    def _try_to_send_pushes(self, max_unanswered: int) -> None:
        while self._to_send < self._next or len(self._pending) > max_unanswered:
            if self._to_send < 0:
                ack = self.answer(self.start("acknowledge", self._collector))
                self._note(ack, resumes=True)
            elif self._to_send < self._next and len(self._pending) < self._options.max_pending:
                number = self._to_send
                method, content, _ = self._kept[number]
                reference = self.start(method, self._collector, number, content)
                self._pending.append((number, reference))
                self._to_send += 1
            else:
                self._read_oldest_answer()

    def _read_oldest_answer(self) -> None:
        """Wait for the answer to the oldest unanswered push. Raises the error of the push."""
        number, reference = self._pending[0]
        try:
            ack, error = self.answer(reference)
        except RateLimitedError:
            # The shard has not applied this push. The next call sends it again.
            self._to_send = -1
            raise
        self._pending.popleft()
        self._note(ack, resumes=ack.due <= number)
        if error is not None:
            # The shard has counted the failed push. After a restart, send an empty push of the
            # same number, so that the numbers of later pushes stay correct.
            if number in self._kept:
                self._kept[number] = "push", ("", None), self._kept[number][2]
            raise error

    def _note(self, ack: Ack, resumes: bool = False) -> None:
        """Store an acknowledgement, and delete the pushes that need not be sent again.

        With `resumes`, the next push to send is the due number of the shard.
        """
        self.last_ack = ack
        if resumes:
            self._to_send = ack.due
            self._pending.clear()
            if ack.due < self._next and ack.due not in self._kept:
                raise BackgroundError(
                    f"The checkpoint of {self.where} does not contain push {ack.due}, which this "
                    "client no longer stores. The rows of this push are lost."
                )
        first_needed = ack.unsaved if self._has_checkpoints else ack.due
        while self._kept:
            oldest = next(iter(self._kept))
            if oldest >= first_needed:
                break
            _, _, num_bytes = self._kept.pop(oldest)
            self._kept_bytes -= num_bytes
