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

from ..core.arguments import real, whole
from ..errors import RolloutDataError, UsageError

_STATE = ("num_inserted", "num_sampled")


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
        self.min_inserts, self.blocking = whole(action, "min_inserts", min_inserts, 0), bool(blocking)
        if timeout_s is not None:
            timeout_s = real(action, "timeout_s", timeout_s, ">= 0 or None", lambda x: 0 <= x < inf)
        self.timeout_s = timeout_s
        self.num_inserted = self.num_sampled = 0
        #: The largest insertion and draw so far, which say what tolerance is needed.
        self._largest = [1, 1]
        self._is_closed = False
        self._changed = threading.Condition()

    @property
    def balance(self) -> float:
        """Draws that are still due; negative where more were made than are due."""
        return self.samples_per_insert * (self.num_inserted - self.min_inserts) - self.num_sampled

    def insert(self, num_items: int = 1, waits: bool = True) -> bool:
        """Count an insertion of `num_items` and let it pass, at once or, if `waits`, after waiting; False if not."""
        return self._pass(num_items, 0, self._may_insert, waits)

    def sample(self, num_items: int = 1, waits: bool = True) -> bool:
        """Count a draw of `num_items` and let it pass, at once or, if `waits`, after waiting; False if not."""
        return self._pass(num_items, 1, self._may_sample, waits)

    def wait(self, num_items: int, is_push: bool, start_s: float) -> bool:
        """Wait, for `timeout_s` from `start_s` of `time.monotonic()`, until it would pass; nothing is counted."""
        with self._changed:
            return self._wait(num_items, self._may_insert if is_push else self._may_sample, start_s)

    def may_sample(self, num_items: int = 1) -> bool:
        """Tell whether a draw would pass at once; nothing is counted."""
        with self._changed:
            self._largest_with(1, num_items := _checked(num_items))
            return self._may_sample(num_items)

    def may_insert(self, num_items: int = 1) -> bool:
        """Tell whether an insertion would pass at once; nothing is counted."""
        with self._changed:
            return self._may_insert(_checked(num_items))

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
        """Give the counts, the balance and the ratio so far as plain numbers."""
        with self._changed:
            inserted = self.num_inserted
            ratio = self.num_sampled / inserted if inserted else 0.0
            return {
                "num_inserted": inserted,
                "num_sampled": self.num_sampled,
                "balance": self.balance,
                "samples_per_insert": ratio,
            }

    def state_dict(self) -> dict[str, int]:
        """Give the counts."""
        with self._changed:
            return {name: getattr(self, name) for name in _STATE}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over counts."""
        inserted, sampled = (whole("load a limiter's state", name, state.get(name), 0) for name in _STATE)
        self._set(inserted, sampled)

    def to_json(self) -> dict[str, Any]:
        """Give the arguments that make an equal limiter."""
        names = ("samples_per_insert", "tolerance", "min_inserts", "blocking", "timeout_s")
        return {name: getattr(self, name) for name in names}

    def _set(self, num_inserted: int, num_sampled: int) -> None:
        with self._changed:
            self.num_inserted, self.num_sampled = num_inserted, num_sampled
            self._changed.notify_all()

    def _may_insert(self, num_items: int) -> bool:
        is_filling = self.num_inserted < self.min_inserts  # drawing is not allowed yet, so nothing could make room
        return is_filling or self.balance + self.samples_per_insert * num_items <= self.tolerance

    def _may_sample(self, num_items: int) -> bool:
        is_filled = self.num_inserted >= self.min_inserts
        return not num_items or (is_filled and self.balance - num_items >= -self.tolerance)

    def _wait(self, num_items: int, may: Any, start_s: float) -> bool:
        limit = None if self.timeout_s is None else start_s + self.timeout_s
        while not may(num_items):
            left = None if limit is None else limit - time.monotonic()
            if not self.blocking or self._is_closed or (left is not None and left <= 0):
                return False
            self._changed.wait(left)
        return True

    def _pass(self, num_items: int, kind: int, may: Any, waits: bool) -> bool:
        num_items, start_s = _checked(num_items), time.monotonic()
        with self._changed:
            self._largest = self._largest_with(kind, num_items)
            if not (self._wait(num_items, may, start_s) if waits else may(num_items)):
                return False
            self._set(self.num_inserted + num_items * (kind == 0), self.num_sampled + num_items * (kind == 1))
            return True

    def _largest_with(self, kind: int, num_items: int) -> list[int]:
        """Give the largest sizes with this one; refuse those with which both sides could wait for each other."""
        largest = list(self._largest)
        largest[kind] = max(largest[kind], num_items)
        needed = (self.samples_per_insert * largest[0] + largest[1]) / 2
        if self.tolerance < needed:
            what = f"insertions of {largest[0]} and draws of {largest[1]} items"
            raise UsageError(f"limit {what}", "", f"a tolerance of at least {needed:g}", f"{self.tolerance:g}")
        return largest


def _checked(num_items: Any) -> int:
    return whole("count items", "a number", num_items, 0)
