"""What the pass finds of each field: quantiles from a sample; per episode extremes, steps, first and last rows.

One rule: a batch is looked at in whole arrays, `[D, n]`; no loop over frames or episodes.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from .batched_reading import Array, Batch, Reading

#: Of the sample: bytes at most, frames of a piece of an episode, and rows that quantiles are taken of.
_SAMPLE_BYTES, _PIECE_FRAMES, _QUANTILE_ROWS = 8 << 20, 512, 10_000
#: Numbers in the tables of all fields at most; with more, only every so manieth episode has rows in them.
_MAX_CELLS = 6_000_000
_MAX_FAR = 100_000
FAR = np.dtype([("dim", np.int64), ("number", np.int64), ("frame", np.int64), ("value", np.float64)])
#: A dimension is continuous if it is float with at least this number of distinct values.
MIN_DISTINCT = 20


class Sample:
    """Some batches of numeric fields, kept.

    Attributes:
        batches: Whole episodes or pieces of them, evenly spread.
        is_all: They are the whole recording.
    """

    def __init__(self, reading: Reading, examined: Array) -> None:
        schema = reading.recording.schema
        row_bytes = max(1, sum(schema[name].row_bytes for name in reading.names))
        lengths = reading.lengths[examined]
        budget = max(256, _SAMPLE_BYTES // row_bytes)
        self.is_all = int(lengths.sum()) <= budget
        count = budget // max(1, min(_PIECE_FRAMES, int(np.median(lengths)))) if len(lengths) else 0
        chosen = examined[np.unique(np.linspace(0, len(examined) - 1, max(8, count)).astype(np.int64))]
        frames = max(_PIECE_FRAMES, budget // max(1, len(chosen)))
        self.batches = list(reading.batches(examined) if self.is_all else reading.pieces(chosen, frames))

    @cached_property
    def _stride(self) -> int:
        return max(1, sum(map(len, self.batches)) // _QUANTILE_ROWS)

    def values(self, name: str) -> Array:
        """Return rows of a field, at most about 10,000: `[D, S]`."""
        return self._rows(name, Batch.columns)

    def steps(self, name: str) -> Array:
        """Return sizes of steps between rows of a field, at most about 10,000: `[D, S]`."""
        return np.abs(self._rows(name, Batch.steps))

    def _rows(self, name: str, give: Any) -> Array:
        parts = []
        for batch in self.batches:
            if name in batch.values:
                kept = np.ones(len(batch), bool)
                kept[: batch.overlap] = False
                if give is Batch.steps:
                    kept[batch.offsets[:-1]] = False
                parts.append(give(batch, name)[:, np.flatnonzero(kept)[:: self._stride]])
        return np.concatenate(parts, axis=1) if parts else np.zeros((1, 0), np.float32)


class Facts:
    """What is known of a numeric field of D dimensions.

    Attributes:
        name, field: Its name, and its description.
        is_float: Its numbers are floats.
        numbers: int64 `[K]`: the episodes that have rows in the tables; all, unless there are very many.
        low, high, mean, step, first, last: `[K, D]`: of each episode; `step` is the largest between two rows.
        changes: `[K, D]`: how many rows differ from the one before.
        num_bad: int64 `[E]`: numbers that are not finite.
        num_rows, num_values: Rows that were read, and numbers in them.
        scale: `[E]`: median over rows of an episode (about 16 of a batch) of the largest size; 0 where all are 0.
        far: Structured `[n]` (dim, number, frame, value): values more than `far_ranges` ranges away from the median.
        repeats, hold: int64 `[E]`: rows that equal the one before in all dimensions, and the longest run of them.
    """

    far_ranges = 10.0

    def __init__(self, reading: Reading, name: str, examined: Array, sample: Sample) -> None:
        schema = reading.recording.schema
        lengths = reading.lengths
        self.name = name
        self.field = schema[name]
        self._sample = sample
        size = self.field.num_elements
        cells = sum(schema[one].num_elements for one in reading.names)
        stride = max(1, -(-len(examined) * cells // _MAX_CELLS))
        self.numbers = examined[::stride]
        self.lengths = lengths[self.numbers]
        self._slot = np.full(len(lengths), -1)
        self._slot[self.numbers] = np.arange(len(self.numbers))
        self.is_float = self.field.dtype in ("float16", "bfloat16", "float32", "float64")
        is_narrow = self.field.numpy_dtype.itemsize <= 2 or self.field.dtype == "float32"
        self.dtype = np.dtype(np.float32 if is_narrow else np.float64)
        shape = len(self.numbers), size
        self.low = np.full(shape, np.inf, self.dtype)
        self.high = np.full(shape, -np.inf, self.dtype)
        self.mean, self.step, self.changes, self.first, self.last = (np.zeros(shape, self.dtype) for _ in range(5))
        self.num_bad, self.repeats, self.hold = (np.zeros(len(lengths), np.int64) for _ in range(3))
        self.num_rows = 0
        self.scale = np.zeros(len(lengths))
        self._far = [np.zeros(0, FAR)]
        reach = np.where(self.spread > 0, self.far_ranges * self.spread, np.inf)
        self._far_low, self._far_high = self.quantile(0.5) - reach, self.quantile(0.5) + reach

    def add(self, batch: Batch) -> None:
        """Take the rows of a batch."""
        if self.name not in batch.values:
            return
        columns = batch.columns(self.name)
        steps = batch.steps(self.name)
        starts = batch.offsets[:-1]
        counts = np.diff(batch.offsets)
        numbers = batch.numbers
        changed = steps != 0
        with np.errstate(invalid="ignore", over="ignore"):
            low, high = (one.reduceat(columns, starts, axis=1).T for one in (np.minimum, np.maximum))
            total = np.add.reduceat(columns[:, batch.overlap :], starts, axis=1).T
            step = np.maximum.reduceat(np.abs(steps), starts, axis=1).T
        changes = np.add.reduceat(changed.view(np.int8), starts, axis=1, dtype=np.int32).T
        if not np.isfinite(total).all():
            bad = ~np.isfinite(columns)
            bad[:, : batch.overlap] = False
            self.num_bad[numbers] += np.add.reduceat(bad.sum(0), starts)
        moved = changed.any(0)
        self.repeats[numbers] += counts - 1 - np.add.reduceat(moved.astype(np.int64), starts)
        self.hold[numbers] = np.maximum(self.hold[numbers], longest_runs(~moved, starts))
        self.num_rows += len(batch) - batch.overlap
        self._note_scale(batch, columns)
        if ((low < self._far_low) | (high > self._far_high)).any():
            self._note_far(batch, columns)
        slots = self._slot[numbers]
        there = np.flatnonzero(slots >= 0)
        slots = slots[there]
        self.low[slots] = np.minimum(self.low[slots], low[there])
        self.high[slots] = np.maximum(self.high[slots], high[there])
        self.mean[slots] += total[there] / self.lengths[slots, None]
        self.step[slots] = np.fmax(self.step[slots], step[there])
        self.changes[slots] += changes[there]
        begins = there[batch.starts[there] == 0]
        self.first[self._slot[numbers[begins]]] = columns[:, starts[begins]].T
        if batch.is_last:
            self.last[slots] = columns[:, batch.offsets[1:][there] - 1].T

    def _note_scale(self, batch: Batch, columns: Array) -> None:
        counts = np.diff(batch.offsets)
        parts = np.repeat(np.arange(len(counts)), counts)
        rows = np.flatnonzero((np.arange(len(batch)) - batch.offsets[parts]) % np.maximum(1, counts // 16)[parts] == 0)
        sizes = np.abs(columns[:, rows]).max(0)
        parts = parts[rows]
        parts = parts[sizes > 0]
        sizes = sizes[sizes > 0]
        if batch.starts[0] == 0 and len(sizes):
            found, medians = medians_of(parts, sizes)
            self.scale[batch.numbers[found]] = np.where(np.isfinite(medians), medians, 0)

    def _note_far(self, batch: Batch, columns: Array) -> None:
        is_far = (columns < self._far_low[:, None]) | (columns > self._far_high[:, None])
        is_far[:, : batch.overlap] = False
        dims, rows = np.nonzero(is_far & np.isfinite(columns))
        found = np.zeros(len(rows), FAR)
        found["dim"], found["value"] = dims, columns[dims, rows]
        found["number"], found["frame"] = batch.episode_of(rows)
        if sum(map(len, self._far)) < _MAX_FAR:
            self._far.append(found)

    @cached_property
    def far(self) -> Array:
        """Structured `[n]`, see above; the first 100,000 of them."""
        return np.concatenate(self._far)

    @property
    def num_values(self) -> int:
        """Numbers that were read."""
        return max(1, self.num_rows * self.field.num_elements)

    @cached_property
    def is_constant(self) -> Array:
        """bool `[D]`: one value in all frames."""
        found: Array = self.low.min(0) == self.high.max(0)
        return found

    @cached_property
    def sorted(self) -> Array:
        """`[D, S]`: the finite part of the sample, each dimension sorted; NaN last."""
        values = self._sample.values(self.name)
        return np.sort(np.where(np.isfinite(values), values, np.nan), axis=1)

    @cached_property
    def sorted_steps(self) -> Array:
        """`[D, S]`: sizes of steps in the sample, sorted; NaN last."""
        values = self._sample.steps(self.name)
        return np.sort(np.where(np.isfinite(values), values, np.nan), axis=1)

    def quantile(self, level: float) -> Array:
        """`[D]`: of the values."""
        return _quantile(self.sorted, self._num_finite, level)

    @cached_property
    def _num_finite(self) -> Array:
        found: Array = np.isfinite(self.sorted).sum(1)
        return found

    def step_quantile(self, level: float) -> Array:
        """`[D]`: of the sizes of steps between rows."""
        return _quantile(self.sorted_steps, np.isfinite(self.sorted_steps).sum(1), level)

    def usual_step(self, below: float) -> Array:
        """`[D]`: the 99 % quantile of the steps that are smaller than something."""
        return _quantile(self.sorted_steps, (self.sorted_steps < below).sum(1), 0.99)

    @cached_property
    def spread(self) -> Array:
        """`[D]`: from the 0.5 % to the 99.5 % quantile."""
        return self.quantile(0.995) - self.quantile(0.005)

    @cached_property
    def range_98(self) -> Array:
        """`[D]`: from the 1 % to the 99 % quantile."""
        return self.quantile(0.99) - self.quantile(0.01)

    @cached_property
    def distinct(self) -> Array:
        """int64 `[D]`: how many values the sample has."""
        found: Array = 1 + (np.diff(self.sorted, axis=1) > 0).sum(1)
        return found

    @cached_property
    def is_continuous(self) -> Array:
        """bool `[D]`: float with 20 distinct values or more."""
        found: Array = (self.distinct >= MIN_DISTINCT) & self.is_float
        return found

    @cached_property
    def is_active(self) -> Array:
        """bool `[D]`: changes in more than half of the frames."""
        found: Array = self.changes.sum(0) > 0.5 * np.maximum(1, (self.lengths - 1).sum())
        return found


def longest_runs(holds: Array, starts: Array) -> Array:
    """int64 `[k]`: the longest run of True after the first row of each part; parts begin at `starts`."""
    is_end = np.append(~holds, True)
    is_end[starts] = True
    ends = np.flatnonzero(is_end)
    length = np.diff(ends, append=ends[-1]) - 1
    which = np.searchsorted(starts, ends, side="right") - 1
    found = np.zeros(len(starts), np.int64)
    np.maximum.at(found, which, np.maximum(length, 0))
    return found


def _quantile(ordered: Array, count: Array, level: float) -> Array:
    """Return the quantile of the first `count` values of each row."""
    place = np.clip((level * (count - 1)).round().astype(np.int64), 0, max(0, ordered.shape[1] - 1))
    if not ordered.shape[1]:
        return np.zeros(len(ordered))
    found: Array = np.nan_to_num(ordered[np.arange(len(ordered)), place]).astype(np.float64)
    return found


def medians_of(parts: Array, values: Array) -> tuple[Array, Array]:
    """Return the parts that there are, and the median (the upper one of two) of the values of each."""
    order = np.lexsort((values, parts))
    found, first, count = np.unique(parts[order], return_index=True, return_counts=True)
    return found, values[order][first + count // 2]


def worst(numbers: Array, by: Array, aligned: bool = False) -> Array:
    """Order numbers by a measure, the largest first: `by[number]`, or aligned with them."""
    found: Array = numbers[np.argsort(-(by if aligned else by[numbers]), kind="stable")]
    return found


def runs_of(mask: Any) -> list[tuple[int, int]]:
    """Return (start, stop) of each run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
