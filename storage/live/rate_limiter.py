"""`RateLimiter`: how many samples are drawn per item that is inserted, kept within bounds.

One rule: it counts and lets pass, waits or refuses; it knows no buffer. A learner that draws too
often from too few new items overfits to them, one that draws too seldom wastes them.

The measure is the balance `samples_per_insert * (inserted - min_inserts) - sampled`, which is kept
in `[-tolerance, tolerance]` (the sample-to-insert ratio of Cassirer et al. 2021).
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
    """A limiter that refuses, or waited for as long as it may, did not let an insertion pass."""


class RateLimiter:
    """Keep samples per insert near a ratio.

    Args:
        samples_per_insert: How many items are to be drawn per item that is inserted, above 0.
        tolerance: How far the balance may be off, in drawn items. Half of what one insertion and one
            draw together move it by is the least with which neither can wait for the other forever.
        min_inserts: Items that are inserted before anything is drawn. An insertion that begins below
            always passes, also if it goes beyond; no other leads out of the bounds.
        blocking: Whether a call that may not pass waits until it may; otherwise it is refused.
        timeout_s: How long it waits at most; None for no limit.

    All methods may be called from any thread.
    """

    def __init__(
        self,
        samples_per_insert: float,
        tolerance: float,
        min_inserts: int = 1,
        blocking: bool = True,
        timeout_s: float | None = None,
    ) -> None:
        action = "limit a rate"
        self.samples_per_insert = real(action, "samples_per_insert", samples_per_insert, "> 0", lambda x: 0 < x < inf)
        self.tolerance = real(action, "tolerance", tolerance, "> 0", lambda x: 0 < x < inf)
        self.min_inserts = whole(action, "min_inserts", min_inserts, 0)
        self.blocking = flag(action, "blocking", blocking)
        if timeout_s is not None:
            timeout_s = real(action, "timeout_s", timeout_s, ">= 0 or None", lambda x: 0 <= x < inf)
        self.timeout_s = timeout_s
        self.num_inserted = self.num_sampled = 0
        #: The largest draw and insertion so far, which say what tolerance is needed.
        self._largest = [1, 1]
        self._is_closed = False
        self._changed = threading.Condition()

    @property
    def balance(self) -> float:
        """Draws that are still due; negative where more were made than are due."""
        return self.samples_per_insert * (self.num_inserted - self.min_inserts) - self.num_sampled

    def insert(self, num_items: int = 1, waits: bool = True) -> bool:
        """Count an insertion of `num_items` and let it pass, at once or, if `waits`, after waiting; False if not."""
        return self._pass(num_items, True, waits)

    def sample(self, num_items: int = 1, waits: bool = True) -> bool:
        """Count a draw of `num_items` and let it pass, at once or, if `waits`, after waiting; False if not."""
        return self._pass(num_items, False, waits)

    def wait(self, num_items: int, is_push: bool, start_s: float) -> bool:
        """Wait, for `timeout_s` from `start_s` of `time.monotonic()`, until it would pass; nothing is counted."""
        limit_s = inf if self.timeout_s is None else start_s + self.timeout_s
        with self._changed:
            while not self._may(num_items, is_push):
                left_s = limit_s - time.monotonic()
                if not self.blocking or self._is_closed or left_s <= 0:
                    return False
                self._changed.wait(None if left_s == inf else left_s)
            return True

    def may_sample(self, num_items: int = 1) -> bool:
        """Return whether a draw would pass at once; nothing is counted."""
        with self._changed:
            num_items = _checked(num_items)
            self._largest_with(num_items, is_push=False)
            return self._may(num_items, is_push=False)

    def may_insert(self, num_items: int = 1) -> bool:
        """Return whether an insertion would pass at once; nothing is counted."""
        with self._changed:
            return self._may(_checked(num_items), is_push=True)

    def undo(self, num_inserted: int = 0, num_sampled: int = 0) -> None:
        """Take back what was let pass and then did not happen."""
        with self._changed:
            self._set(self.num_inserted - num_inserted, self.num_sampled - num_sampled)

    def close(self) -> None:
        """Wake up and refuse all waiting threads; later calls do not wait. May be called twice."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def reset(self) -> None:
        """Forget all counts."""
        self._set(0, 0)

    def snapshot(self) -> dict[str, int | float]:
        """Return the counts, the balance and the ratio so far as plain numbers."""
        with self._changed:
            ratio = self.num_sampled / self.num_inserted if self.num_inserted else 0.0
            return {**self.state_dict(), "balance": self.balance, "samples_per_insert": ratio}

    def state_dict(self) -> dict[str, int]:
        """Return the counts."""
        with self._changed:
            return {name: getattr(self, name) for name in _COUNTS}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over counts."""
        self._set(*(whole("load a limiter's state", name, state.get(name), 0) for name in _COUNTS))

    def to_json(self) -> dict[str, Any]:
        """Return the arguments that make an equal limiter."""
        return {name: getattr(self, name) for name in _ARGUMENTS}

    def _set(self, num_inserted: int, num_sampled: int) -> None:
        with self._changed:
            self.num_inserted = num_inserted
            self.num_sampled = num_sampled
            self._changed.notify_all()

    def _pass(self, num_items: int, is_push: bool, waits: bool) -> bool:
        num_items = _checked(num_items)
        start_s = time.monotonic()
        waits = flag("pass the limit", "waits", waits)
        with self._changed:
            self._largest = self._largest_with(num_items, is_push)
            if not self._may(num_items, is_push) and not (waits and self.wait(num_items, is_push, start_s)):
                return False
            self._set(self.num_inserted + num_items * is_push, self.num_sampled + num_items * (not is_push))
            return True

    def _may(self, num_items: int, is_push: bool) -> bool:
        is_filling = self.num_inserted < self.min_inserts
        if is_push:  # drawing is not allowed while it is filling, so that nothing could make room
            return is_filling or self.balance + self.samples_per_insert * num_items <= self.tolerance
        return not num_items or (not is_filling and self.balance - num_items >= -self.tolerance)

    def _largest_with(self, num_items: int, is_push: bool) -> list[int]:
        """Return the largest sizes with this one; refuse those with which both sides could wait for each other."""
        largest = list(self._largest)
        largest[is_push] = max(largest[is_push], num_items)
        needed = (self.samples_per_insert * largest[True] + largest[False]) / 2
        if self.tolerance < needed:
            what = f"insertions of {largest[True]} and draws of {largest[False]} items"
            raise UsageError(f"limit {what}", "", f"a tolerance of at least {needed:g}", f"{self.tolerance:g}")
        return largest


def _checked(num_items: Any) -> int:
    return whole("count items", "num_items", num_items, 0)
