"""Read a recording in batches of several short episodes, or of a piece of a long episode.

Every row is read once, with one exception: a piece of a long episode starts with the last row of
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
#: Bytes of a batch, about the size of a CPU cache, so that repeated passes over a batch are fast.
BATCH_BYTES = 1 << 21
#: Maximum number of episodes in a batch.
_MAX_EPISODES = 4096


@dataclass(eq=False)
class Batch:
    """Rows of one or several episodes, concatenated.

    Attributes:
        numbers: int64 `[k]`, indices of the episodes in the recording.
        starts: int64 `[k]`, frame number of the first row of each episode. It is 0 unless the batch
            is a piece from inside a long episode.
        offsets: int64 `[k + 1]`, first row of each episode, then the number of rows.
        values: Map from field name to rows, `[n, *shape]`.
        overlap: Number of rows at the start that the previous batch also has: 1 in a batch that
            continues a long episode, else 0.
        is_last: Whether the last row of the batch is the last row of its episode.
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
        """Return a field as a contiguous float array `[D, n]`: one row per dimension.

        The dtype is float32 for values of at most 16 bits and for float32, otherwise float64.
        """
        if name not in self._columns:
            values = self.values[name]
            is_narrow = values.dtype.itemsize <= 2 or values.dtype == np.float32
            dtype = np.float32 if is_narrow else np.float64
            flat = values.reshape(len(values), -1)
            self._columns[name] = np.ascontiguousarray(flat.T, dtype)
        return self._columns[name]

    def steps(self, name: str) -> Array:
        """Return the difference between each row and the previous row, `[D, n]`.

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
        """Map row indices in the batch to episode indices and frame numbers, two arrays."""
        index = self.index_of(rows)
        return self.numbers[index], self.starts[index] + rows - self.offsets[index]

    def index_of(self, rows: Array) -> Array:
        """Map row indices in the batch to positions of their episodes in `numbers`."""
        index: Array = np.searchsorted(self.offsets, rows, side="right") - 1
        return index


class Collector(ABC):
    """Base class of objects that compute a result from all rows, for one or several rules.

    The scan creates the collectors that the rules name in `Rule.collectors`. It reads the data once
    and passes each batch to all collectors.
    """

    def __init__(self, scan: Any) -> None:
        self.scan = scan

    @abstractmethod
    def add(self, batch: Batch) -> None:
        """Process a batch: complete episodes, or a piece of a long episode."""

    def finish(self) -> None:  # noqa: B027 - optional
        """Complete the result after the last batch."""


@dataclass
class Reading:
    """Reader of fields of a recording in batches.

    Attributes:
        recording: Recording to read.
        lengths: int64 `[E]`, number of frames of each episode.
        names: Names of the fields to read. Fields that an episode does not have are skipped.
        failed: Function called with (episode, error) for each unreadable episode.
        schema_index: int64 `[E]`, index of each episode in `schemas`.
        schemas: Different schemas of episodes; see `Recording.schemas`.
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
        """Yield all rows of the episodes `numbers`, in order."""
        lengths = self.lengths[numbers]
        for places in self._grouped(numbers, lengths):
            if len(places) == 1 and lengths[places[0]] > self._batch_frames:
                yield from self._pieces(int(numbers[places[0]]), int(lengths[places[0]]))
            else:
                starts = np.zeros(len(places), np.int64)
                yield from self._read(numbers[places], starts, lengths[places])

    def pieces(self, numbers: Array, frames: int) -> Iterator[Batch]:
        """Yield batches that have only the middle `frames` frames of each episode in `numbers`."""
        counts = np.minimum(frames, self.lengths[numbers])
        starts = (self.lengths[numbers] - counts) // 2
        for places in self._grouped(numbers, counts):
            yield from self._read(numbers[places], starts[places], counts[places])

    def _grouped(self, numbers: Array, counts: Array) -> Iterator[Array]:
        """Divide episodes into groups that fit into one batch and have the same fields.

        Yields the indices of the episodes of each group in `numbers`. `counts` has the number of
        rows to read from each episode. An episode that is larger than a batch is a group by itself.
        """
        if not len(numbers):
            return
        places = np.arange(len(numbers))
        is_long = counts > self._batch_frames
        # Successive episodes are in the same group if all of these keys are equal.
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
        """Yield a long episode as several batches that overlap by one row."""
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
        """Yield the rows of episodes with the same fields as one batch.

        If reading fails, the episodes are read one by one. `failed` is called for each unreadable
        episode.
        """
        schema = self.schemas[self.schema_index[numbers[0]]]
        try:
            usual = self.recording.schema
            # Fields with an unusual dtype or shape are not read; rule STR06 reports them.
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
    """Return at most `count` evenly spaced items of `numbers`, in order."""
    if not len(numbers):
        return numbers
    places = np.linspace(0, len(numbers) - 1, count).astype(np.int64)
    chosen: Array = numbers[np.unique(places)]
    return chosen
