"""Facts of each numeric field that rules compare.

Quantiles come from a sample. Extremes, steps, first and last rows of each episode come from the
pass over the data. A batch is processed in whole arrays `[D, n]`, without a loop over frames.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np

from .batched_reading import Array, Batch, Reading, evenly_spread

#: Number of bytes of the sample.
_SAMPLE_BYTES = 8 << 20
#: Minimum number of frames of a piece of an episode in the sample.
_PIECE_FRAMES = 512
#: Number of rows of the sample from which quantiles are computed.
_QUANTILE_ROWS = 10_000
#: Numbers in the tables of all fields. Beyond it, only every k-th episode has rows in the tables.
_MAX_CELLS = 6_000_000
#: Far values that are kept of a field.
_MAX_FAR = 100_000
#: A far value: dimension, episode, frame and value.
FAR = np.dtype(
    [
        ("dim", np.int64),
        ("number", np.int64),
        ("frame", np.int64),
        ("value", np.float64),
    ]
)
#: A dimension is continuous if it is float with at least this number of distinct values.
MIN_DISTINCT = 20


class Sample:
    """Batches of numeric fields that stay in memory.

    Attributes:
        batches: Whole episodes or pieces of them, evenly spread.
        is_all: Whether the batches are the whole recording.
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
        """Return rows of a field, at most about 10,000: `[D, S]`."""
        batches = [batch for batch in self.batches if name in batch.values]
        return _joined([self._strided(batch, name, Batch.columns) for batch in batches])

    def steps(self, name: str) -> Array:
        """Return sizes of steps between rows of a field, at most about 10,000: `[D, S]`."""
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
        """Return every k-th row of a batch, without overlapping rows and the rows `leave_out`."""
        is_kept = np.ones(len(batch), bool)
        is_kept[: batch.overlap] = False
        if leave_out is not None:
            is_kept[leave_out] = False
        return read(batch, name)[:, np.flatnonzero(is_kept)[:: self._stride]]


def _joined(parts: list[Array]) -> Array:
    return np.concatenate(parts, axis=1) if parts else np.zeros((1, 0), np.float32)


class Facts:
    """Facts of a numeric field with D dimensions: tables of K episodes, totals of all E episodes.

    Attributes:
        name: Name of the field.
        field: Entry of the field in the schema.
        is_float: Whether the values are floats.
        numbers: int64 `[K]`, episodes in the tables. All episodes, unless the tables would be too
            large.
        lengths: int64 `[K]`, frames of the episodes in the tables.
        low: `[K, D]`, minimum of each episode.
        high: `[K, D]`, maximum of each episode.
        mean: `[K, D]`, mean of each episode.
        step: `[K, D]`, the largest step between two rows.
        first: `[K, D]`, first row.
        last: `[K, D]`, last row.
        changes: `[K, D]`, number of rows that differ from the previous row.
        num_bad: int64 `[E]`, numbers that are not finite.
        num_rows: Rows that were read.
        scale: `[E]`, median over about 16 rows of the largest size in a row; 0 if all are 0.
        repeats: int64 `[E]`, rows that equal the previous row in all dimensions.
        hold: int64 `[E]`, longest run of repeated rows.
    """

    #: A value is far if it is more than this number of ranges away from the median.
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
        """Add the rows of a batch."""
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
        """Set the scale of the episodes of a batch from about 16 rows of each."""
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
        """Keep the values that are far away from the median."""
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
        """Values more than `far_ranges` ranges away from the median: `FAR` `[n]`.

        About the first 100,000 are kept.
        """
        return np.concatenate(self._far)

    @property
    def num_values(self) -> int:
        """Number of values that were read, at least 1."""
        return max(1, self.num_rows * self.field.num_elements)

    @cached_property
    def is_constant(self) -> Array:
        """Whether a dimension has one value in all frames: bool `[D]`."""
        is_constant: Array = self.low.min(0) == self.high.max(0)
        return is_constant

    @cached_property
    def sorted(self) -> Array:
        """Finite values of the sample, each dimension sorted, NaN last: `[D, S]`."""
        return _sorted_finite(self._sample.values(self.name))

    @cached_property
    def sorted_steps(self) -> Array:
        """Sizes of steps in the sample, each dimension sorted, NaN last: `[D, S]`."""
        return _sorted_finite(self._sample.steps(self.name))

    def quantile(self, level: float) -> Array:
        """Return a quantile of the values: `[D]`."""
        return _quantile(self.sorted, self._num_finite, level)

    @cached_property
    def _num_finite(self) -> Array:
        count: Array = np.isfinite(self.sorted).sum(1)
        return count

    def step_quantile(self, level: float) -> Array:
        """Return a quantile of the sizes of steps between rows: `[D]`."""
        return _quantile(self.sorted_steps, np.isfinite(self.sorted_steps).sum(1), level)

    def usual_step(self, below: float) -> Array:
        """Return the 99 % quantile of the steps smaller than `below`: `[D]`."""
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
        """Number of distinct values in the sample: int64 `[D]`."""
        count: Array = 1 + (np.diff(self.sorted, axis=1) > 0).sum(1)
        return count

    @cached_property
    def is_continuous(self) -> Array:
        """Whether a dimension is float with 20 distinct values or more: bool `[D]`."""
        is_continuous: Array = (self.distinct >= MIN_DISTINCT) & self.is_float
        return is_continuous

    @cached_property
    def is_active(self) -> Array:
        """Whether a dimension changes in more than half of the frames: bool `[D]`."""
        num_steps = max(1, (self.lengths - 1).sum())
        is_active: Array = self.changes.sum(0) > 0.5 * num_steps
        return is_active


def longest_runs(holds: Array, starts: Array) -> Array:
    """Return the longest run of True after the first row of each part: int64 `[k]`.

    Args:
        holds: bool `[n]`.
        starts: int64 `[k]`, first row of each part.
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
    """Return the quantile of the first `count` values of each sorted row."""
    width = ordered.shape[1]
    if not width:
        return np.zeros(len(ordered))
    place = np.clip((level * (count - 1)).round().astype(np.int64), 0, width - 1)
    quantile: Array = np.nan_to_num(ordered[np.arange(len(ordered)), place]).astype(np.float64)
    return quantile


def medians_of(parts: Array, values: Array) -> tuple[Array, Array]:
    """Return the distinct parts, and the median of the values of each.

    The median of an even number of values is the upper of the two middle values.
    """
    order = np.lexsort((values, parts))
    distinct, first, count = np.unique(parts[order], return_index=True, return_counts=True)
    return distinct, values[order][first + count // 2]


def worst(numbers: Array, measure: Array, aligned: bool = False) -> Array:
    """Return numbers in the order of a measure, the largest first.

    Args:
        numbers: int64 `[n]`.
        measure: Indexed by number, or `[n]` if `aligned`.
        aligned: Whether `measure` is aligned with `numbers`.
    """
    values = measure if aligned else measure[numbers]
    ordered: Array = numbers[np.argsort(-values, kind="stable")]
    return ordered


def runs_of(mask: Any) -> list[tuple[int, int]]:
    """Return (start, stop) of each run of True."""
    padded = np.concatenate([[False], mask, [False]]).astype(np.int8)
    edges = np.flatnonzero(np.diff(padded))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
