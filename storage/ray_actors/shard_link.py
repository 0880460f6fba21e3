"""`Link`: the connection of one client to one shard: calls, and pushes in order.

A push is kept until it is answered and, with checkpoints, until a checkpoint contains it. After a
restart of the actor, lost pushes are sent again. Every wait ends after `timeout_s`.
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

    `collector` is the id of the client. `where` is the name of the shard in errors. The attribute
    `last_ack` is the last `Ack` (answer) of the shard.
    """

    def __init__(self, actor: Any, collector: str, where: str, options: RemoteOptions) -> None:
        self.actor = actor
        self.where = where
        self._collector = collector
        self._options = options
        self._is_kept = options.checkpoint_dir is not None
        self.last_ack: Ack | None = None
        #: Pushes that may be sent again, by number, oldest first: method of the shard, reference to
        #: the pushed data, and number of bytes. `_kept_bytes` is the total number of bytes.
        self._kept: dict[int, tuple[str, Any, int]] = {}
        self._kept_bytes = 0
        #: Number of the next push to create (`_next`), and to send (`_sent`). If `_sent` is below
        #: 0, the next call requests the due number from the shard.
        self._next = self._sent = 0
        #: Unanswered pushes: (number, reference to the answer).
        self._pending: deque[tuple[int, Any]] = deque()

    def start(self, method: str, *args: Any) -> Any:
        """Call a method of the shard and return the reference to its answer."""
        return getattr(self.actor, method).remote(*args)

    def answer(self, reference: Any, least_s: float = 0) -> Any:
        """Wait for an answer and return it.

        Raises the error of the shard, or an error if the wait ends without an answer or the actor
        of the shard has died.
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
            self._sent = -1
            raise LostActorError(f"The actor of {self.where} is restarting.") from cause
        except ray.exceptions.RayActorError as cause:
            advice = "" if self._is_kept else " Pass checkpoint_dir, so that actors are restarted."
            problem = str(cause).strip().rstrip(".")
            raise BackgroundError(f"The actor of {self.where} died: {problem}.{advice}") from cause

    def ask(self, method: str, *args: Any) -> Any:
        """Call the actor and wait for the answer. Retry if the actor restarts."""
        return self.lasting(lambda: self.answer(self.start(method, *args)))

    def lasting(self, act: Callable[[], Any]) -> Any:
        """Call `act`. Retry while an actor restarts, for at most `timeout_s` in total."""
        stop_s = time.monotonic() + self._options.timeout_s
        while True:
            try:
                return act()
            except LostActorError:
                if not self._is_kept or time.monotonic() > stop_s:
                    raise
                time.sleep(_PAUSE_S)

    def has_restarted(self, ack: Ack) -> bool:
        """Store an answer and return whether the actor has restarted since the previous answer."""
        before = self.last_ack
        self.last_ack = ack
        if before is None or before.life == ack.life:
            return False
        self._sent = -1
        return True

    def push(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Send a push. Waits if too many pushes are unanswered.

        Raises the error of an earlier push.
        """
        import ray

        packed = pack((args, options))
        num_bytes = sum(buffer.nbytes for buffer in packed[0])
        self._pump(self._options.max_pending - 1)
        if self._is_kept and self._kept_bytes + num_bytes > self._options.max_unsaved_bytes:
            self.checkpoint(is_anew=False)
        method = "tell" if name in UPDATES else "push"
        self._kept[self._next] = method, ray.put((name, packed)), num_bytes
        self._kept_bytes += num_bytes
        self._next += 1
        self._pump(self._options.max_pending)

    def flush(self) -> None:
        """Wait until the current actor has answered all pushes."""
        self._pump(0)
        if self._kept and self.has_restarted(self.ask("hello", self._collector)):
            self._pump(0)

    def catch_up(self) -> None:
        """Send pushes again if an earlier answer showed a restart of the actor."""
        if self._sent < 0:
            self._pump(0)

    def checkpoint(self, is_anew: bool = True) -> None:
        """Flush and wait for a checkpoint.

        If `is_anew` is False, an existing checkpoint with all pushes of this client is sufficient.
        """
        self.flush()
        self._note(self.ask("save", self._collector, 0 if is_anew else self._next))

    def _pump(self, most: int) -> None:
        """Send all unsent pushes, and wait until at most `most` pushes are unanswered."""
        self.lasting(lambda: self._pump_once(most))

    def _pump_once(self, most: int) -> None:
        while self._sent < self._next or len(self._pending) > most:
            if self._sent < 0:
                self._note(self.answer(self.start("hello", self._collector)), is_back=True)
            elif self._sent < self._next and len(self._pending) < self._options.max_pending:
                method, content, _ = self._kept[self._sent]
                self._pending.append(
                    (self._sent, self.start(method, self._collector, self._sent, content))
                )
                self._sent += 1
            else:
                self._end_push()

    def _end_push(self) -> None:
        number, reference = self._pending[0]
        try:
            ack, error = self.answer(reference)
        except RateLimitedError:
            self._sent = -1  # The next call sends this push again.
            raise
        self._pending.popleft()
        self._note(ack, is_back=ack.due <= number)
        if error is not None:
            # The shard has counted the failed push. After a restart, an empty push is sent instead,
            # so that the shard counts it again.
            if number in self._kept:
                self._kept[number] = "push", ("", None), self._kept[number][2]
            raise error

    def _note(self, ack: Ack, is_back: bool = False) -> None:
        """Store an answer and delete the pushes that need not be sent again.

        With `is_back`, sending resumes at the due number of the answer.
        """
        self.last_ack = ack
        if is_back:
            self._sent = ack.due
            self._pending.clear()
            if ack.due < self._next and ack.due not in self._kept:
                raise BackgroundError(
                    f"The checkpoint of {self.where} lacks push {ack.due}, which this client no "
                    "longer stores. The rows of this push are lost."
                )
        while self._kept and (oldest := next(iter(self._kept))) < (
            ack.unsaved if self._is_kept else ack.due
        ):
            self._kept_bytes -= self._kept.pop(oldest)[2]
