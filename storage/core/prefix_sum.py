"""`PrefixSum`: which episode holds frame i, over a growing list of episode lengths.

One rule: boundaries are one int64 array that only grows at its end and shrinks at its start;
finding an episode is a binary search. What an episode holds is known elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import RolloutDataError, UsageError
from .arguments import whole

Integers = npt.NDArray[np.int64]
_FIRST_ROOM = 16


class FrameIndexError(RolloutDataError, IndexError):
    """A frame was asked for that no episode holds."""


class PrefixSum:
    """Lengths of episodes, oldest first, and the running sum of them.

    Args:
        lengths: Episodes to begin with.

    Frames are numbered from 0 at the start of the oldest episode that is kept; so are episodes.
    """

    def __init__(self, lengths: Iterable[int] = ()) -> None:
        #: Ends of the episodes in frames since creation; [_first] is the start of the oldest kept one.
        self._ends: Integers = np.zeros(_FIRST_ROOM, np.int64)
        self._first, self._last = 0, 0
        self.extend(lengths)

    def __len__(self) -> int:
        """Number of episodes."""
        return self._last - self._first

    @property
    def total(self) -> int:
        """Number of frames of all episodes together."""
        return int(self._ends[self._last] - self._ends[self._first])

    @property
    def lengths(self) -> Integers:
        """Length of every episode, `[len(self)]`, a new array."""
        found: Integers = np.diff(self._ends[self._first : self._last + 1])
        return found

    @property
    def starts(self) -> Integers:
        """First frame of every episode, `[len(self)]`, a new array."""
        found: Integers = self._ends[self._first : self._last] - self._ends[self._first]
        return found

    def add(self, length: int) -> None:
        """Append an episode; amortized O(1). A length below 0, or none at all, raises `UsageError`."""
        length = whole("add an episode", "a length", length, 0)
        self._make_room(1)
        self._ends[self._last + 1] = self._ends[self._last] + length
        self._last += 1

    def extend(self, lengths: Iterable[int]) -> None:
        """Append many episodes at once; all or none."""
        values = np.asarray(lengths if isinstance(lengths, np.ndarray) else list(lengths))
        if not values.size:
            return
        if values.ndim != 1 or values.dtype.kind not in "iu" or (values < 0).any():
            raise UsageError("add episodes", "", "lengths >= 0", repr(values.tolist())[:60])
        self._make_room(len(values))
        stop = self._last + len(values)
        self._ends[self._last + 1 : stop + 1] = self._ends[self._last] + np.cumsum(values, dtype=np.int64)
        self._last = stop

    def pop_oldest(self, num_episodes: int = 1) -> int:
        """Drop the oldest episodes; give the number of frames that went. Too many raise `IndexError`."""
        if not 0 <= num_episodes <= len(self):
            raise FrameIndexError("drop episodes", "", f"0 to {len(self)}", str(num_episodes))
        before = self.total
        self._first += int(num_episodes)
        return before - self.total

    def locate(self, index: Any) -> tuple[Any, Any]:
        """Find the episode that holds a frame, and the frame's offset in it.

        Args:
            index: A number, or an array of numbers of any shape, in `[0, total)`.

        Returns:
            Two ints, or two int64 arrays of that shape. Episodes without frames are never found.
        """
        wanted = np.asarray(index)
        if wanted.size and wanted.dtype.kind not in "iu":
            raise FrameIndexError("locate frames", "", "integers", str(wanted.dtype))
        wanted = wanted.astype(np.int64)
        outside = (wanted < 0) | (wanted >= self.total)
        if outside.any():
            got = str(wanted[outside].flat[0])
            raise FrameIndexError("locate a frame", "", f"an index in [0, {self.total})", got)
        ends = self._ends[self._first : self._last + 1]
        episode = np.searchsorted(ends, wanted + ends[0], side="right") - 1
        offset = wanted + ends[0] - ends[episode]
        return (int(episode), int(offset)) if wanted.ndim == 0 else (episode, offset)

    def _make_room(self, num_episodes: int) -> None:
        needed = self._last + num_episodes + 1
        if needed <= len(self._ends):
            return
        kept = self._ends[self._first : self._last + 1]
        room = np.zeros(max(_FIRST_ROOM, 2 * (len(kept) + num_episodes)), np.int64)
        room[: len(kept)] = kept
        self._ends = room
        self._first, self._last = 0, len(kept) - 1
