"""Compute statistics ("facts") of each numeric field for the rules, such as quantiles.

Quantiles are computed from a sample. Extremes, steps, first and last rows of each episode are
computed while all data are read once. A batch is processed as arrays `[D, n]`, without a loop over
frames.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np

from .batched_reading import Array, Batch, Reading, evenly_spread

#: Approximate bytes of the sample in memory.
_SAMPLE_BYTES = 8 << 20
#: Minimum number of frames that the sample takes from a long episode.
_PIECE_FRAMES = 512
#: Approximate number of rows of the sample from which quantiles are computed.
_QUANTILE_ROWS = 10_000
#: Maximum number of values in a table with one row per episode. For larger recordings, a table has
#: only every k-th episode.
_MAX_CELLS = 6_000_000
#: Approximate maximum number of stored values per field that are far from the median.
_MAX_FAR = 100_000
#: Dtype of a value that is far from the median: dimension, episode, frame, value.
FAR = np.dtype(
    [
        ("dim", np.int64),
        ("number", np.int64),
        ("frame", np.int64),
        ("value", np.float64),
    ]
)
#: Minimum number of distinct values of a continuous dimension, which also must be float.
MIN_DISTINCT = 20


class Sample:
    """Evenly spaced episodes, or pieces of episodes, whose numeric fields stay in memory.

    Attributes:
        batches: Batches of the sampled rows.
        is_all: Whether the sample contains all examined episodes completely.
    """

    def __init__(self, reading: Reading, examined: Array) -> None:
        schema = reading.recording.schema
        row_bytes = max(1, sum(schema[name].row_bytes for name in reading.names))
        max_frames = max(256, _SAMPLE_BYTES // row_bytes)
        lengths = reading.lengths[examined]
        self.is_all = int(lengths.sum()) <= max_frames
        if self.is_all:
            self.batches = list(reading.batches(examined))
            return
        piece_frames = max(1, min(_PIECE_FRAMES, int(np.median(lengths))))
        chosen = evenly_spread(examined, max(8, max_frames // piece_frames))
        frames = max(_PIECE_FRAMES, max_frames // len(chosen))
        self.batches = list(reading.pieces(chosen, frames))

    @cached_property
    def _stride(self) -> int:
        return max(1, sum(map(len, self.batches)) // _QUANTILE_ROWS)

    def values(self, name: str) -> Array:
        """Return about 10,000 rows of a field, or all if there are fewer: `[D, S]`."""
        batches = [batch for batch in self.batches if name in batch.values]
        return _joined([self._strided(batch, name, Batch.columns) for batch in batches])

    def steps(self, name: str) -> Array:
        """Return about 10,000 absolute differences of successive rows of a field: `[D, S]`."""
        parts = []
        for batch in self.batches:
            if name in batch.values:
                first_rows = batch.offsets[:-1]
                parts.append(self._strided(batch, name, Batch.steps, leave_out=first_rows))
        return np.abs(_joined(parts))

    def _strided(
        self,
        batch: Batch,
        name: str,
        read: Callable[[Batch, str], Array],
        leave_out: Array | None = None,
    ) -> Array:
        """Subsample the rows of a field in a batch: return every k-th row, `[D, n]`.

        Rows that the previous batch also has, and rows in `leave_out`, are removed first.
        """
        is_kept = np.ones(len(batch), bool)
        is_kept[: batch.overlap] = False
        if leave_out is not None:
            is_kept[leave_out] = False
        return read(batch, name)[:, np.flatnonzero(is_kept)[:: self._stride]]


def _joined(parts: list[Array]) -> Array:
    return np.concatenate(parts, axis=1) if parts else np.zeros((1, 0), np.float32)


class Facts:
    """Facts about a numeric field with D dimensions, per episode and for the whole recording.

    Arrays `[K, D]` are called tables. To limit memory, they may have only some of the E episodes.
    Arrays `[E]` have all episodes.

    Attributes:
        name: Name of the field.
        field: Entry of the field in the schema.
        is_float: Whether the values are floats.
        numbers: int64 `[K]`, indices of the episodes in the tables: all examined episodes, or every
            k-th of them if the tables would be too large.
        lengths: int64 `[K]`, number of frames of the episodes in the tables.
        low: `[K, D]`, minimum in each episode.
        high: `[K, D]`, maximum in each episode.
        mean: `[K, D]`, mean in each episode.
        step: `[K, D]`, largest absolute difference between successive rows.
        first: `[K, D]`, first row.
        last: `[K, D]`, last row.
        changes: `[K, D]`, number of rows that differ from the previous row.
        num_bad: int64 `[E]`, number of NaN and infinite values.
        num_rows: Number of rows that were read.
        scale: `[E]`, typical size of the values: the largest absolute value of a row, as the median
            of about 16 rows that are not all 0. It is 0 if unknown.
        repeats: int64 `[E]`, number of rows that equal the previous row in all dimensions.
        hold: int64 `[E]`, length of the longest run of repeated rows.
    """

    #: A value is far from the median if its distance exceeds this multiple of `spread`.
    far_ranges = 10.0

    def __init__(self, reading: Reading, name: str, examined: Array, sample: Sample) -> None:
        schema = reading.recording.schema
        self.name = name
        self.field = schema[name]
        self.is_float = self.field.dtype in ("float16", "bfloat16", "float32", "float64")
        is_narrow = self.field.numpy_dtype.itemsize <= 2 or self.field.dtype == "float32"
        self.dtype = np.dtype(np.float32 if is_narrow else np.float64)
        self._sample = sample

        num_elements = sum(schema[field].num_elements for field in reading.names)
        stride = max(1, -(-len(examined) * num_elements // _MAX_CELLS))
        num_episodes = len(reading.lengths)
        self.numbers = examined[::stride]
        self.lengths = reading.lengths[self.numbers]
        self._row_of = np.full(num_episodes, -1)
        self._row_of[self.numbers] = np.arange(len(self.numbers))

        shape = len(self.numbers), self.field.num_elements
        self.low = np.full(shape, np.inf, self.dtype)
        self.high = np.full(shape, -np.inf, self.dtype)
        self.mean = np.zeros(shape, self.dtype)
        self.step = np.zeros(shape, self.dtype)
        self.changes = np.zeros(shape, self.dtype)
        self.first = np.zeros(shape, self.dtype)
        self.last = np.zeros(shape, self.dtype)
        self.num_bad = np.zeros(num_episodes, np.int64)
        self.repeats = np.zeros(num_episodes, np.int64)
        self.hold = np.zeros(num_episodes, np.int64)
        self.scale = np.zeros(num_episodes)
        self.num_rows = 0

        self._far = [np.zeros(0, FAR)]
        reach = np.where(self.spread > 0, self.far_ranges * self.spread, np.inf)
        median = self.quantile(0.5)
        self._far_low = median - reach
        self._far_high = median + reach

    def add(self, batch: Batch) -> None:
        """Update the facts with the rows of a batch, if the batch has this field."""
        if self.name not in batch.values:
            return
        columns = batch.columns(self.name)
        steps = batch.steps(self.name)
        starts = batch.offsets[:-1]
        with np.errstate(invalid="ignore", over="ignore"):
            low = np.minimum.reduceat(columns, starts, axis=1).T
            high = np.maximum.reduceat(columns, starts, axis=1).T
            total = np.add.reduceat(columns[:, batch.overlap :], starts, axis=1).T
            step = np.maximum.reduceat(np.abs(steps), starts, axis=1).T
        is_changed = steps != 0
        changes = np.add.reduceat(is_changed.view(np.int8), starts, axis=1, dtype=np.int32).T

        self.num_rows += len(batch) - batch.overlap
        self._add_repeats(batch, is_changed)
        if not np.isfinite(total).all():
            self._add_bad(batch, columns)
        self._add_scale(batch, columns)
        if ((low < self._far_low) | (high > self._far_high)).any():
            self._add_far(batch, columns)

        rows = self._row_of[batch.numbers]
        has_row = np.flatnonzero(rows >= 0)
        rows = rows[has_row]
        self.low[rows] = np.minimum(self.low[rows], low[has_row])
        self.high[rows] = np.maximum(self.high[rows], high[has_row])
        self.mean[rows] += total[has_row] / self.lengths[rows, None]
        self.step[rows] = np.fmax(self.step[rows], step[has_row])
        self.changes[rows] += changes[has_row]
        begins = has_row[batch.starts[has_row] == 0]
        self.first[self._row_of[batch.numbers[begins]]] = columns[:, starts[begins]].T
        if batch.is_last:
            self.last[rows] = columns[:, batch.offsets[1:][has_row] - 1].T

    def _add_repeats(self, batch: Batch, is_changed: Array) -> None:
        starts = batch.offsets[:-1]
        numbers = batch.numbers
        is_move: Array = np.asarray(is_changed.any(0))
        num_moves = np.add.reduceat(is_move.astype(np.int64), starts)
        self.repeats[numbers] += np.diff(batch.offsets) - 1 - num_moves
        self.hold[numbers] = np.maximum(self.hold[numbers], longest_runs(~is_move, starts))

    def _add_bad(self, batch: Batch, columns: Array) -> None:
        is_bad = ~np.isfinite(columns)
        is_bad[:, : batch.overlap] = False
        self.num_bad[batch.numbers] += np.add.reduceat(is_bad.sum(0), batch.offsets[:-1])

    def _add_scale(self, batch: Batch, columns: Array) -> None:
        """Compute the typical size of the values in each episode that begins in a batch.

        The result is stored in `scale`. For speed, only about 16 rows of an episode are used.
        """
        counts = np.diff(batch.offsets)
        parts = np.repeat(np.arange(len(counts)), counts)
        row_in_episode = np.arange(len(batch)) - batch.offsets[parts]
        stride = np.maximum(1, counts // 16)
        rows = np.flatnonzero(row_in_episode % stride[parts] == 0)
        sizes = np.abs(columns[:, rows]).max(0)
        is_positive = sizes > 0
        if batch.starts[0] == 0 and is_positive.any():
            parts, medians = medians_of(parts[rows][is_positive], sizes[is_positive])
            self.scale[batch.numbers[parts]] = np.where(np.isfinite(medians), medians, 0)

    def _add_far(self, batch: Batch, columns: Array) -> None:
        """Store the possible outliers of a batch: values that are far from the median."""
        is_far = (columns < self._far_low[:, None]) | (columns > self._far_high[:, None])
        is_far[:, : batch.overlap] = False
        dims, rows = np.nonzero(is_far & np.isfinite(columns))
        far = np.zeros(len(rows), FAR)
        far["dim"] = dims
        far["value"] = columns[dims, rows]
        far["number"], far["frame"] = batch.episode_of(rows)
        if sum(map(len, self._far)) < _MAX_FAR:
            self._far.append(far)

    @cached_property
    def far(self) -> Array:
        """Possible outliers, which are far from the median: dtype `FAR`, `[n]`.

        Their distance to the median is more than 10 times `spread`. If there are more than about
        100,000 such values, only the first of them are included.
        """
        return np.concatenate(self._far)

    @property
    def num_values(self) -> int:
        """Number of values that were read. It is at least 1, so that it can be a divisor."""
        return max(1, self.num_rows * self.field.num_elements)

    @cached_property
    def is_constant(self) -> Array:
        """Whether each dimension has the same value in all frames, bool `[D]`."""
        is_constant: Array = self.low.min(0) == self.high.max(0)
        return is_constant

    @cached_property
    def sorted(self) -> Array:
        """Sampled values, sorted in each dimension, with NaN for infinite values: `[D, S]`."""
        return _sorted_finite(self._sample.values(self.name))

    @cached_property
    def sorted_steps(self) -> Array:
        """Sampled absolute steps between rows, sorted in each dimension, NaN last: `[D, S]`."""
        return _sorted_finite(self._sample.steps(self.name))

    def quantile(self, level: float) -> Array:
        """Return a quantile of the sampled values in each dimension: `[D]`."""
        return _quantile(self.sorted, self._num_finite, level)

    @cached_property
    def _num_finite(self) -> Array:
        count: Array = np.isfinite(self.sorted).sum(1)
        return count

    def step_quantile(self, level: float) -> Array:
        """Return a quantile of the sampled absolute steps in each dimension: `[D]`."""
        return _quantile(self.sorted_steps, np.isfinite(self.sorted_steps).sum(1), level)

    def usual_step(self, below: float) -> Array:
        """Return the 99 % quantile of the absolute steps that are smaller than `below`: `[D]`.

        Larger steps, such as full turns of an angle, are jumps and do not count as usual steps.
        """
        return _quantile(self.sorted_steps, (self.sorted_steps < below).sum(1), 0.99)

    @cached_property
    def spread(self) -> Array:
        """Range from the 0.5 % to the 99.5 % quantile: `[D]`."""
        return self.quantile(0.995) - self.quantile(0.005)

    @cached_property
    def range_98(self) -> Array:
        """Range from the 1 % to the 99 % quantile: `[D]`."""
        return self.quantile(0.99) - self.quantile(0.01)

    @cached_property
    def distinct(self) -> Array:
        """Number of distinct sampled values in each dimension, int64 `[D]`."""
        count: Array = 1 + (np.diff(self.sorted, axis=1) > 0).sum(1)
        return count

    @cached_property
    def is_continuous(self) -> Array:
        """Whether each dimension is float with at least 20 distinct values, bool `[D]`."""
        is_continuous: Array = (self.distinct >= MIN_DISTINCT) & self.is_float
        return is_continuous

    @cached_property
    def is_active(self) -> Array:
        """Whether each dimension changes in more than half of the steps, bool `[D]`."""
        num_steps = max(1, (self.lengths - 1).sum())
        is_active: Array = self.changes.sum(0) > 0.5 * num_steps
        return is_active


def longest_runs(holds: Array, starts: Array) -> Array:
    """Return int64 `[k]`: the length of the longest run of True in each of k episodes.

    The first row of an episode interrupts a run. It cannot repeat a row of the same episode.

    Args:
        holds: bool `[n]`, such as whether each row repeats the previous row.
        starts: int64 `[k]`, first row of each episode in `holds`.
    """
    is_end = np.append(~holds, True)
    is_end[starts] = True
    ends = np.flatnonzero(is_end)
    lengths = np.diff(ends, append=ends[-1]) - 1
    parts = np.searchsorted(starts, ends, side="right") - 1
    longest = np.zeros(len(starts), np.int64)
    np.maximum.at(longest, parts, np.maximum(lengths, 0))
    return longest


def _sorted_finite(values: Array) -> Array:
    return np.sort(np.where(np.isfinite(values), values, np.nan), axis=1)


def _quantile(ordered: Array, count: Array, level: float) -> Array:
    """Return a quantile of each row of `ordered`: `[D]`.

    Args:
        ordered: `[D, S]`, values in ascending order.
        count: int64 `[D]`, number of values at the start of each row that are used.
        level: Level of the quantile, from 0 to 1.
    """
    width = ordered.shape[1]
    if not width:
        return np.zeros(len(ordered))
    place = np.clip((level * (count - 1)).round().astype(np.int64), 0, width - 1)
    quantile: Array = np.nan_to_num(ordered[np.arange(len(ordered)), place]).astype(np.float64)
    return quantile


def medians_of(parts: Array, values: Array) -> tuple[Array, Array]:
    """Compute the median of each group of values.

    The median of an even number of values is the upper of the two middle values.

    Args:
        parts: int64 `[n]`, group of each value, such as the index of its episode.
        values: `[n]`, values.

    Returns:
        The distinct groups in ascending order, and the median of each of them.
    """
    order = np.lexsort((values, parts))
    distinct, first, count = np.unique(parts[order], return_index=True, return_counts=True)
    return distinct, values[order][first + count // 2]


def worst(numbers: Array, measure: Array, aligned: bool = False) -> Array:
    """Return episodes in descending order of a measure, so that the worst episode is first.

    Args:
        numbers: int64 `[n]`, indices of the episodes to sort.
        measure: Measure of each episode of the recording, `[E]`. With `aligned`, it has only the
            episodes in `numbers`, `[n]`.
        aligned: Whether `measure` has one value for each of `numbers`.
    """
    values = measure if aligned else measure[numbers]
    ordered: Array = numbers[np.argsort(-values, kind="stable")]
    return ordered


def runs_of(mask: Any) -> list[tuple[int, int]]:
    """Return a pair (start, stop) for each run of True in a bool array."""
    padded = np.concatenate([[False], mask, [False]]).astype(np.int8)
    edges = np.flatnonzero(np.diff(padded))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
