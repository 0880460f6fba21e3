"""Reading a recording in batches: whole episodes side by side, or a piece of a long one.

One rule: every row is read once, except that a later piece of an episode begins with the last row of the one before.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from storage.core.fields import Schema
from storage.errors import RolloutDataError, UnansweredError

from ...sources.recording import Recording

Array = np.ndarray[Any, Any]
#: About what fits into the cache of a processor, so that many small steps cost little.
BATCH_BYTES = 1 << 21
_MAX_EPISODES = 4096


@dataclass(eq=False)
class Batch:
    """Rows of some episodes, one after the other.

    Attributes:
        numbers: int64 `[k]`, places of the episodes in the recording.
        starts: int64 `[k]`, the frame that the first row of each is; above 0 only where `k` is 1.
        offsets: int64 `[k + 1]`, rows of each.
        values: Field -> `[n, *shape]`.
        overlap: Rows at the start that the batch before had as well: 1 in later pieces of an episode, else 0.
        is_last: The last row is the last one of its episode.
    """

    numbers: Array
    starts: Array
    offsets: Array
    values: Mapping[str, Array]
    overlap: int = 0
    is_last: bool = True
    _columns: dict[str, Array] = field(default_factory=dict)
    _steps: dict[str, Array] = field(default_factory=dict)

    def __len__(self) -> int:
        return int(self.offsets[-1])

    def columns(self, name: str) -> Array:
        """Return a field as contiguous `[D, n]`: float32, or float64 where float32 does not hold its values."""
        if name not in self._columns:
            values = self.values[name]
            is_narrow = values.dtype.itemsize <= 2 or values.dtype == np.float32
            dtype = np.float32 if is_narrow else np.float64
            flat = values.reshape(len(values), -1)
            self._columns[name] = np.ascontiguousarray(flat.T, dtype)
        return self._columns[name]

    def steps(self, name: str) -> Array:
        """Return what each row adds to the one before, `[D, n]`; 0 in the first row of an episode."""
        if name not in self._steps:
            columns = self.columns(name)
            steps = np.zeros_like(columns)
            with np.errstate(invalid="ignore", over="ignore"):
                np.subtract(columns[:, 1:], columns[:, :-1], out=steps[:, 1:])
            steps[:, self.offsets[:-1]] = 0
            self._steps[name] = steps
        return self._steps[name]

    def episode_of(self, rows: Array) -> tuple[Array, Array]:
        """Return (numbers, frames) of rows of the batch."""
        which = np.searchsorted(self.offsets, rows, side="right") - 1
        return self.numbers[which], self.starts[which] + rows - self.offsets[which]


class Collector(ABC):
    """What a group of rules gathers in the pass besides `Facts`; a rule names its class in `Rule.collectors`."""

    def __init__(self, scan: Any) -> None:
        self.scan = scan

    @abstractmethod
    def add(self, batch: Batch) -> None:
        """Take rows: whole episodes, or a piece of a long one, whose later pieces begin with `batch.overlap` rows."""

    def finish(self) -> None:  # noqa: B027 - not every collector has something to do then
        """Called after the last batch."""


@dataclass
class Reading:
    """What to read.

    Attributes:
        recording: The episodes.
        lengths: int64 `[E]`, of all episodes.
        names: The fields; those that an episode lacks are not in its batch.
        failed: Called with (episode, error) for each one that cannot be read.
        which, schemas: As `Recording.schemas` gives them.
    """

    recording: Recording
    lengths: Array
    names: Sequence[str]
    failed: Callable[[int, Exception], None]
    which: Array
    schemas: Sequence[Schema]

    def __post_init__(self) -> None:
        schema = self.recording.schema
        row_bytes = max(1, sum(schema[name].row_bytes for name in self.names))
        self._size = max(64, BATCH_BYTES // row_bytes)

    def batches(self, numbers: Array) -> Iterator[Batch]:
        """Yield the rows of some episodes in order."""
        lengths = self.lengths[numbers]
        for some in self._together(numbers, lengths):
            if len(some) == 1 and lengths[some[0]] > self._size:
                yield from self._pieces(int(numbers[some[0]]), int(lengths[some[0]]))
            else:
                chosen = numbers[some]
                yield from self._try(chosen, chosen * 0, lengths[some])

    def pieces(self, numbers: Array, frames: int) -> Iterator[Batch]:
        """Yield a piece of this number of frames from the middle of each of some episodes, or all of a short one."""
        counts = np.minimum(frames, self.lengths[numbers])
        starts = (self.lengths[numbers] - counts) // 2
        for some in self._together(numbers, counts):
            yield from self._try(numbers[some], starts[some], counts[some])

    def _together(self, numbers: Array, counts: Array) -> Iterator[Array]:
        """Cut a list of episodes into parts of the same fields that fill a batch: places in the list."""
        full = (np.cumsum(counts) - 1) // self._size
        place = np.arange(len(numbers)) // _MAX_EPISODES
        keys = np.stack([full, place, self.which[numbers], np.where(counts > self._size, np.arange(len(numbers)), -1)])
        edges = np.flatnonzero((np.diff(keys, axis=1) != 0).any(0)) + 1
        yield from np.split(np.arange(len(numbers)), edges) if len(numbers) else ()

    def _pieces(self, number: int, length: int) -> Iterator[Batch]:
        one = np.array([number])
        size = self._size
        for start in range(0, length, size):
            first = max(0, start - 1)
            stop = min(start + size, length)
            batches = list(self._try(one, one * 0 + first, one * 0 + stop - first))
            if not batches:
                return
            batches[0].overlap = start - first
            batches[0].is_last = stop == length
            yield from batches

    def _try(self, numbers: Array, starts: Array, counts: Array) -> Iterator[Batch]:
        """Read, one by one if some cannot be read: which ones is reported."""
        own = self.schemas[self.which[numbers[0]]]
        try:
            usual = self.recording.schema  # what an episode has in another form is the subject of STR06
            names = [name for name in self.names if own.get(name) == usual[name]]
            values = self.recording.read_many(numbers, names, starts, counts)
        except UnansweredError:
            raise
        except (RolloutDataError, OSError) as error:
            if len(numbers) == 1:
                self.failed(int(numbers[0]), error)
            for place in range(len(numbers)) if len(numbers) > 1 else ():
                one = slice(place, place + 1)
                yield from self._try(numbers[one], starts[one], counts[one])
            return
        yield Batch(numbers, starts, np.concatenate([[0], np.cumsum(counts)]), values)
