"""`RateLimiter`: keeps the ratio between sampled and inserted items within bounds.

A learner that samples too often overfits to few new items; a learner that samples too rarely wastes
items. The limiter counts items and admits, delays or refuses operations. It has no reference to a
buffer.

The balance is the number of items to sample until the target ratio is reached:
`samples_per_insert * (inserted - min_inserts) - sampled`. The limiter keeps the balance in
`[-tolerance, tolerance]` (the sample-to-insert ratio of Cassirer et al. 2021).
"""

from __future__ import annotations

import threading
import time
from math import inf
from typing import Any

from ..core.arguments import flag, real, whole
from ..errors import RolloutDataError, UsageError

_ARGUMENTS = ("samples_per_insert", "tolerance", "min_inserts", "blocking", "timeout_s")
_COUNTS = ("num_inserted", "num_sampled")


class RateLimitedError(RolloutDataError, RuntimeError):
    """The rate limiter refused an insertion or a draw, possibly after a wait."""


class RateLimiter:
    """Limiter of the number of sampled items per inserted item.

    Args:
        samples_per_insert: Target ratio of sampled to inserted items, above 0.
        tolerance: Maximum absolute value of the balance, in sampled items. It must be at least
            `(samples_per_insert * items of an insertion + items of a draw) / 2`. With less,
            insertions and draws could wait for each other forever.
        min_inserts: Number of items to insert before the first draw. While fewer items are
            inserted, every insertion is admitted, even if it exceeds `min_inserts`. Only such an
            insertion may move the balance out of its bounds.
        blocking: Whether an operation waits if it would move the balance out of its bounds.
            Otherwise such an operation is refused.
        timeout_s: Longest wait in seconds; None for no limit.

    Thread-safe.
    """

    def __init__(
        self,
        samples_per_insert: float,
        tolerance: float,
        min_inserts: int = 1,
        blocking: bool = True,
        timeout_s: float | None = None,
    ) -> None:
        self.samples_per_insert = real(
            "samples_per_insert", samples_per_insert, "> 0", lambda x: 0 < x < inf
        )
        self.tolerance = real("tolerance", tolerance, "> 0", lambda x: 0 < x < inf)
        self.min_inserts = whole("min_inserts", min_inserts, 0)
        self.blocking = flag("blocking", blocking)
        if timeout_s is not None:
            timeout_s = real("timeout_s", timeout_s, ">= 0 or None", lambda x: 0 <= x < inf)
        self.timeout_s = timeout_s
        self.num_inserted = self.num_sampled = 0
        #: Numbers of items in the largest draw and in the largest insertion so far.
        #: These two numbers determine the minimum of `tolerance`.
        self._largest = [1, 1]
        self._is_closed = False
        self._changed = threading.Condition()

    @property
    def balance(self) -> float:
        """Number of items to sample to reach the target ratio; negative above the target."""
        return self.samples_per_insert * (self.num_inserted - self.min_inserts) - self.num_sampled

    def insert(self, num_items: int = 1, waits: bool = True) -> bool:
        """Admit and count an insertion of `num_items` items. Return False if it is refused.

        A refused insertion is not counted. If `waits` is True and the limiter is blocking, the call
        waits until the balance permits the insertion, for at most `timeout_s`.
        """
        return self._pass(num_items, True, waits)

    def sample(self, num_items: int = 1, waits: bool = True) -> bool:
        """Admit and count a draw of `num_items` items. Return False if it is refused.

        A refused draw is not counted. If `waits` is True and the limiter is blocking, the call
        waits until the balance permits the draw, for at most `timeout_s`.
        """
        return self._pass(num_items, False, waits)

    def wait(self, num_items: int, is_push: bool, start_s: float) -> bool:
        """Wait until the balance permits an operation, and return whether it does. Counts nothing.

        The wait ends `timeout_s` seconds after `start_s` on the clock of `time.monotonic()`.
        """
        limit_s = inf if self.timeout_s is None else start_s + self.timeout_s
        with self._changed:
            while not self._may(num_items, is_push):
                left_s = limit_s - time.monotonic()
                if not self.blocking or self._is_closed or left_s <= 0:
                    return False
                self._changed.wait(None if left_s == inf else left_s)
            return True

    def may_sample(self, num_items: int = 1) -> bool:
        """Return whether the balance permits a draw now. Counts nothing."""
        with self._changed:
            num_items = _checked(num_items)
            self._largest_with(num_items, is_push=False)
            return self._may(num_items, is_push=False)

    def may_insert(self, num_items: int = 1) -> bool:
        """Return whether the balance permits an insertion now. Counts nothing."""
        with self._changed:
            return self._may(_checked(num_items), is_push=True)

    def undo(self, num_inserted: int = 0, num_sampled: int = 0) -> None:
        """Subtract the items of operations that were admitted and then failed."""
        with self._changed:
            self._set(self.num_inserted - num_inserted, self.num_sampled - num_sampled)

    def close(self) -> None:
        """Refuse the operations of all waiting threads; later calls do not wait. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def reset(self) -> None:
        """Set all counts to 0."""
        self._set(0, 0)

    def snapshot(self) -> dict[str, int | float]:
        """Return the counts, the balance and the ratio so far as Python numbers."""
        with self._changed:
            ratio = self.num_sampled / self.num_inserted if self.num_inserted else 0.0
            return {**self.state_dict(), "balance": self.balance, "samples_per_insert": ratio}

    def state_dict(self) -> dict[str, int]:
        """Return the numbers of inserted and sampled items."""
        with self._changed:
            return {name: getattr(self, name) for name in _COUNTS}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the counts to the result of `state_dict`."""
        self._set(*(whole(name, state.get(name), 0) for name in _COUNTS))

    def to_json(self) -> dict[str, Any]:
        """Return the constructor arguments as JSON values."""
        return {name: getattr(self, name) for name in _ARGUMENTS}

    def _set(self, num_inserted: int, num_sampled: int) -> None:
        with self._changed:
            self.num_inserted = num_inserted
            self.num_sampled = num_sampled
            self._changed.notify_all()

    def _pass(self, num_items: int, is_push: bool, waits: bool) -> bool:
        num_items = _checked(num_items)
        start_s = time.monotonic()
        waits = flag("waits", waits)
        with self._changed:
            self._largest = self._largest_with(num_items, is_push)
            if not self._may(num_items, is_push) and not (
                waits and self.wait(num_items, is_push, start_s)
            ):
                return False
            self._set(
                self.num_inserted + num_items * is_push,
                self.num_sampled + num_items * (not is_push),
            )
            return True

    def _may(self, num_items: int, is_push: bool) -> bool:
        is_filling = self.num_inserted < self.min_inserts
        # Before `min_inserts` no draw is admitted, so an insertion must not wait for one.
        if is_push:
            return (
                is_filling or self.balance + self.samples_per_insert * num_items <= self.tolerance
            )
        return not num_items or (not is_filling and self.balance - num_items >= -self.tolerance)

    def _largest_with(self, num_items: int, is_push: bool) -> list[int]:
        """Return the largest numbers of items per draw and per insertion, with a new operation.

        Raises:
            UsageError: `tolerance` is too small for these numbers of items, so that insertions and
                draws could wait for each other forever.
        """
        largest = list(self._largest)
        largest[is_push] = max(largest[is_push], num_items)
        needed = (self.samples_per_insert * largest[True] + largest[False]) / 2
        if self.tolerance < needed:
            raise UsageError(
                f"tolerance must be at least {needed:g} for insertions of {largest[True]} and "
                f"draws of {largest[False]} items, got {self.tolerance:g}."
            )
        return largest


def _checked(num_items: Any) -> int:
    return whole("num_items", num_items, 0)
