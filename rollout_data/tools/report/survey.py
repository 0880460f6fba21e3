"""Compute value ranges of each dimension over a recording, and outlier scores of episodes.

The recording is divided into buckets: ranges of successive frames, over the limits of episodes. The
value ranges of each bucket are computed while the doctor reads the data. As the number of buckets
is limited, memory does not depend on the number of frames.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from ..doctor.batched_reading import Array, Batch
from ..doctor.scan import Collector, Scan
from .embedded_data import is_picture

#: Maximum number of buckets: parts of a recording with equally many frames. A chart shows the range
#: of values in each bucket.
NUM_BUCKETS = 400
#: Levels of the 5 quantiles that are computed of the values in a bucket, besides minimum and maximum.
QUANTILES = (0.01, 0.05, 0.5, 0.95, 0.99)
#: Index of the median among the 7 values of a bucket: minimum, 5 quantiles, maximum.
MEDIAN = 3
#: Approximate number of values of a bucket from which its quantiles are computed.
_NUM_RANKED = 512
#: If a field has more dimensions, an additional chart shows the values of all its dimensions.
_MAX_APART = 64
#: If a field has more dimensions, no charts of single dimensions are drawn.
_MAX_COLUMNS = 256
#: Maximum number of dimensions of a narrow field, such as a reward. Their charts have priority.
_NARROW = 16
#: Dimension of a field: the name of the field and an index, or `WHOLE` for all dimensions.
Column = tuple[str, int]
#: Index in a `Column` that means all dimensions of a field together.
WHOLE = -1


class Course(Collector):
    """Collector of the value range of each dimension over the course of a recording.

    Attributes:
        columns: Dimensions in `levels`.
        bucket_size: Number of frames of a bucket.
        levels: Minimum, 5 quantiles and maximum of each bucket, float64 `[7, buckets]`, by column.
            They are NaN for a bucket without finite values.
    """

    def __init__(self, scan: Scan) -> None:
        super().__init__(scan)
        self._starts = np.cumsum(scan.lengths) - scan.lengths
        num_frames = int(scan.lengths.sum())
        self.bucket_size = max(1, math.ceil(num_frames / NUM_BUCKETS))

        self._widths: dict[str, int] = {}
        for name in scan.numeric:
            field = scan.schema[name]
            if not is_picture(field.shape):
                self._widths[name] = field.num_elements

        self.columns: list[Column] = []
        for name, width in self._widths.items():
            if width > _MAX_APART:
                self.columns.append((name, WHOLE))
            if width <= _MAX_COLUMNS:
                self.columns.extend((name, dimension) for dimension in range(width))

        num_buckets = math.ceil(num_frames / self.bucket_size)
        shape = (len(QUANTILES) + 2, num_buckets)
        self.levels = {column: np.full(shape, np.nan) for column in self.columns}
        self._bucket = 0
        self._pieces = dict[str, list[Array]]()

    def add(self, batch: Batch) -> None:
        first_frames = self._starts[batch.numbers] + batch.starts - batch.offsets[:-1]
        frames = np.repeat(first_frames, np.diff(batch.offsets)) + np.arange(len(batch))
        buckets = frames[batch.overlap :] // self.bucket_size

        changes = np.flatnonzero(np.diff(buckets)) + 1
        edges = [0, *changes.tolist(), len(buckets)]
        for first, last in pairwise(edges):
            if last > first and buckets[first] != self._bucket:
                self.finish()
                self._bucket = int(buckets[first])
            for name in batch.values.keys() & self._widths.keys():
                rows = batch.columns(name)[:, batch.overlap + first : batch.overlap + last]
                self._pieces.setdefault(name, []).append(rows)

    def finish(self) -> None:
        for name, pieces in self._pieces.items():
            rows = np.concatenate(pieces, 1)
            rows = np.where(np.isfinite(rows), rows, np.nan)
            if (name, 0) in self.levels:
                for dimension, levels in enumerate(_levels(rows)):
                    self.levels[name, dimension][:, self._bucket] = levels
            if (name, WHOLE) in self.levels:
                all_values = rows.reshape(1, -1)
                self.levels[name, WHOLE][:, self._bucket] = _levels(all_values)[0]
        self._pieces = {}


def _levels(rows: Array) -> Array:
    """Compute minimum, 5 quantiles and maximum of each row of `[D, n]` values: `[D, 7]`."""
    step = max(1, rows.shape[1] // _NUM_RANKED)
    inner = quantiles(rows[:, ::step], QUANTILES)
    return np.stack([np.fmin.reduce(rows, 1), *inner, np.fmax.reduce(rows, 1)], 1)


def quantiles(rows: Array, shares: Sequence[float]) -> Array:
    """Compute nearest-rank quantiles of each row, ignoring NaN: `[len(shares), len(rows)]`."""
    if not rows.shape[1]:
        return np.full((len(shares), len(rows)), np.nan)
    ranked = np.sort(rows, 1)  # `np.sort` moves NaN to the end.
    last = np.maximum((~np.isnan(ranked)).sum(1) - 1, 0)
    ranks = np.round(np.array(shares)[:, None] * last).astype(np.int64)
    levels: Array = np.take_along_axis(ranked.T, ranks, 0)
    return levels


class Survey:
    """Facts about a recording that the page shows.

    Attributes:
        scan: Scan of the recording, after its data were read.
        recording: The examined recording.
        course: Value ranges of the dimensions of the recording.
        pictures: Names of the image fields.
        table: Table of the episodes, with returns.
        num_frames: Number of frames of all episodes.
        oddness: Outlier score of each episode, float64 `[num_episodes]`. It is the largest robust
            z-score of its measures: the length, the return and the mean of each dimension.
        oddest: Name of the measure with this z-score, `[num_episodes]`.
    """

    def __init__(self, scan: Scan) -> None:
        self.scan = scan
        self.recording = scan.recording
        self.course = scan.collected(Course)
        self.pictures = [name for name, field in scan.schema.items() if is_picture(field.shape)]
        self.table = scan.recording.descriptions
        self.num_frames = int(scan.lengths.sum())
        if "reward" in scan.facts and scan.schema["reward"].num_elements == 1:
            rewards = scan.facts["reward"]
            mean = rewards.mean[:, 0].astype(np.float64)
            self.table["return"][rewards.numbers] = mean * rewards.lengths

        self.oddness = np.zeros(len(self.table))
        self.oddest = np.full(len(self.table), "", object)
        numbers = np.arange(len(self.table))
        self._score("length", self.table["length"].astype(np.float64), numbers)
        self._score("return", self.table["return"], numbers)
        for name, dimension in self.course.columns:
            if dimension == WHOLE:
                continue
            facts = scan.facts[name]
            measure = f"mean of {self.name((name, dimension))}"
            self._score(measure, facts.mean[:, dimension], facts.numbers)

    def _score(self, measure: str, values: Array, numbers: Array) -> None:
        """Compute the robust z-score of each episode in one measure, such as the length.

        If it is the largest z-score of the episode so far, it becomes the outlier score in
        `oddness`, and the measure is noted in `oddest`.

        Args:
            measure: Name of the measure.
            values: `[n]`, value of the measure in each episode.
            numbers: int64 `[n]`, indices of the episodes.
        """
        finite = values[np.isfinite(values)].astype(np.float64)
        if not len(finite):
            return
        median = np.median(finite)
        # For normally distributed values, 1.4826 times the median absolute deviation is the standard
        # deviation. A hundredth of the range is added, in case that most values are equal.
        spread = 1.4826 * np.median(np.abs(finite - median)) + 0.01 * np.ptp(finite)
        if not spread > 0:
            return
        scores = np.nan_to_num(np.abs(values - median) / spread)
        is_odder = scores > self.oddness[numbers]
        self.oddness[numbers[is_odder]] = scores[is_odder]
        self.oddest[numbers[is_odder]] = measure

    def name(self, column: Column) -> str:
        """Return the name of a dimension, such as "observation[3]" or, for a scalar, "reward"."""
        name, dimension = column
        field = self.scan.schema[name]
        if dimension == WHOLE:
            return f"{name} (all {field.num_elements:,} dimensions)"
        if math.prod(field.shape) <= 1:
            return name
        index = np.unravel_index(dimension, field.shape)
        return f"{name}[{', '.join(map(str, index))}]"

    def values(self, column: Column) -> Array:
        """Return the finite sampled values of a dimension in ascending order."""
        name, dimension = column
        rows = self.scan.facts[name].sorted
        rows = rows.reshape(-1) if dimension == WHOLE else rows[dimension]
        finite: Array = rows[np.isfinite(rows)]
        return finite

    def most_important(self, weights: Mapping[Column, int], count: int) -> list[Column]:
        """Return the `count` most important columns, in the order of the fields.

        Columns for all dimensions of a field are the most important, then those of narrow fields.
        Within each kind, columns with a larger weight are more important.
        """

        def rank(column: Column) -> tuple[Any, ...]:
            name, dimension = column
            width = self.scan.schema[name].num_elements
            return dimension != WHOLE, width > _NARROW, -weights.get(column, 0), width

        important = set(sorted(self.course.columns, key=rank)[:count])
        return [column for column in self.course.columns if column in important]
