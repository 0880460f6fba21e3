"""Read a recording in batches: whole episodes side by side, or a piece of a long episode.

Every row is read once, with one exception: a piece of a long episode begins with the last row of
the previous piece.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from storage.core.fields import Schema
from storage.errors import RolloutDataError, UnansweredError

from ...sources.recordings.recording import Recording

Array = np.ndarray[Any, Any]
#: Bytes of a batch. About the size of a processor's cache, which makes many small steps cheap.
BATCH_BYTES = 1 << 21
#: Maximum number of episodes of a batch.
_MAX_EPISODES = 4096


@dataclass(eq=False)
class Batch:
    """Rows of some episodes, one episode after the other.

    Attributes:
        numbers: int64 `[k]`, places of the episodes in the recording.
        starts: int64 `[k]`, frame of the first row of each episode. Above 0 only in a batch of one
            episode.
        offsets: int64 `[k + 1]`, first row of each episode, then the number of rows.
        values: Field -> `[n, *shape]`.
        overlap: Rows at the start that the previous batch had too: 1 in later pieces, else 0.
        is_last: Whether the last row is the last one of its episode.
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
        """Return a field as contiguous `[D, n]`: float64 if float32 cannot hold its values."""
        if name not in self._columns:
            values = self.values[name]
            is_narrow = values.dtype.itemsize <= 2 or values.dtype == np.float32
            dtype = np.float32 if is_narrow else np.float64
            flat = values.reshape(len(values), -1)
            self._columns[name] = np.ascontiguousarray(flat.T, dtype)
        return self._columns[name]

    def steps(self, name: str) -> Array:
        """Return the difference of each row to the previous row, `[D, n]`.

        The difference is 0 in the first row of an episode.
        """
        if name not in self._steps:
            columns = self.columns(name)
            steps = np.zeros_like(columns)
            with np.errstate(invalid="ignore", over="ignore"):
                np.subtract(columns[:, 1:], columns[:, :-1], out=steps[:, 1:])
            steps[:, self.offsets[:-1]] = 0
            self._steps[name] = steps
        return self._steps[name]

    def episode_of(self, rows: Array) -> tuple[Array, Array]:
        """Return the episodes and the frames of rows of the batch."""
        index = self.index_of(rows)
        return self.numbers[index], self.starts[index] + rows - self.offsets[index]

    def index_of(self, rows: Array) -> Array:
        """Return the index in `numbers` of the episodes of rows of the batch."""
        index: Array = np.searchsorted(self.offsets, rows, side="right") - 1
        return index


class Collector(ABC):
    """Measurements for a group of rules, collected in the pass over the data besides `Facts`.

    A rule names the class in `Rule.collectors`.
    """

    def __init__(self, scan: Any) -> None:
        self.scan = scan

    @abstractmethod
    def add(self, batch: Batch) -> None:
        """Add whole episodes, or a piece of a long one. A later piece has `batch.overlap` rows."""

    def finish(self) -> None:  # noqa: B027 - optional
        """Finish after the last batch."""


@dataclass
class Reading:
    """Reads fields of a recording in batches.

    Attributes:
        recording: The recording.
        lengths: int64 `[E]`, frames of all episodes.
        names: Fields to read. Fields that an episode lacks are not in its batch.
        failed: Called with (episode, error) for each episode that cannot be read.
        schema_index: int64 `[E]`, index of each episode in `schemas`.
        schemas: See `Recording.schemas`.
    """

    recording: Recording
    lengths: Array
    names: Sequence[str]
    failed: Callable[[int, Exception], None]
    schema_index: Array
    schemas: Sequence[Schema]

    def __post_init__(self) -> None:
        schema = self.recording.schema
        row_bytes = max(1, sum(schema[name].row_bytes for name in self.names))
        self._batch_frames = max(64, BATCH_BYTES // row_bytes)

    def batches(self, numbers: Array) -> Iterator[Batch]:
        """Yield the rows of some episodes in order."""
        lengths = self.lengths[numbers]
        for places in self._grouped(numbers, lengths):
            if len(places) == 1 and lengths[places[0]] > self._batch_frames:
                yield from self._pieces(int(numbers[places[0]]), int(lengths[places[0]]))
            else:
                starts = np.zeros(len(places), np.int64)
                yield from self._read(numbers[places], starts, lengths[places])

    def pieces(self, numbers: Array, frames: int) -> Iterator[Batch]:
        """Yield frames from the middle of each of some episodes; all frames of short episodes."""
        counts = np.minimum(frames, self.lengths[numbers])
        starts = (self.lengths[numbers] - counts) // 2
        for places in self._grouped(numbers, counts):
            yield from self._read(numbers[places], starts[places], counts[places])

    def _grouped(self, numbers: Array, counts: Array) -> Iterator[Array]:
        """Yield groups of episodes for one batch: consecutive episodes with the same fields."""
        if not len(numbers):
            return
        places = np.arange(len(numbers))
        is_long = counts > self._batch_frames
        keys = np.stack(
            [
                (np.cumsum(counts) - 1) // self._batch_frames,
                places // _MAX_EPISODES,
                self.schema_index[numbers],
                np.where(is_long, places, -1),
            ]
        )
        is_edge = (np.diff(keys, axis=1) != 0).any(0)
        yield from np.split(places, np.flatnonzero(is_edge) + 1)

    def _pieces(self, number: int, length: int) -> Iterator[Batch]:
        """Yield a long episode in pieces that overlap by one row."""
        size = self._batch_frames
        for start in range(0, length, size):
            first = max(0, start - 1)
            stop = min(start + size, length)
            count = stop - first
            batches = list(self._read(np.array([number]), np.array([first]), np.array([count])))
            if not batches:
                return
            batches[0].overlap = start - first
            batches[0].is_last = stop == length
            yield from batches

    def _read(self, numbers: Array, starts: Array, counts: Array) -> Iterator[Batch]:
        """Yield the rows of episodes with the same fields.

        If reading fails, the episodes are read one by one. `failed` is called for each unreadable
        episode.
        """
        schema = self.schemas[self.schema_index[numbers[0]]]
        try:
            usual = self.recording.schema
            # Rule STR06 reports fields that differ from the usual schema. They are not read.
            names = [name for name in self.names if schema.get(name) == usual[name]]
            values = self.recording.read_many(numbers, names, starts, counts)
        except UnansweredError:
            raise
        except (RolloutDataError, OSError) as error:
            if len(numbers) == 1:
                self.failed(int(numbers[0]), error)
                return
            for place in range(len(numbers)):
                single = slice(place, place + 1)
                yield from self._read(numbers[single], starts[single], counts[single])
            return
        yield Batch(numbers, starts, np.concatenate([[0], np.cumsum(counts)]), values)


def evenly_spread(numbers: Array, count: int) -> Array:
    """Return at most `count` of some numbers, evenly spread, in order."""
    if not len(numbers):
        return numbers
    places = np.linspace(0, len(numbers) - 1, count).astype(np.int64)
    chosen: Array = numbers[np.unique(places)]
    return chosen
