"""How each dimension lies over the course of a recording, and how odd each episode is.

One rule: the data are read once, in the pass of the doctor; what is kept does not grow with the number of frames.
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

#: Stretches that the recording is cut into; of each are kept the least value, five quantiles, and the greatest.
NUM_BUCKETS, QUANTILES, MEDIAN = 400, (0.01, 0.05, 0.5, 0.95, 0.99), 3
#: Values of a stretch that quantiles are taken of.
_NUM_RANKED = 512
#: A field with more dimensions is drawn as a whole as well, one with more than the second number only as a whole.
_MAX_APART, _MAX_COLUMNS = 64, 256
#: Fields of at most this number of dimensions are drawn before single dimensions of others: actions, rewards.
_NARROW = 16
#: A field and a dimension of it; `WHOLE` is all of them together.
Column = tuple[str, int]
WHOLE = -1


class Course(Collector):
    """Gathers the levels of each dimension in each stretch.

    Attributes:
        columns: What has levels.
        bucket_size: Frames of a stretch.
        levels: Field -> `[columns of the field, 7, stretches]`: least, quantiles, greatest; NaN where there is none.
    """

    def __init__(self, scan: Scan) -> None:
        super().__init__(scan)
        self._starts = np.cumsum(scan.lengths) - scan.lengths
        num_frames = int(scan.lengths.sum())
        self.bucket_size = max(1, math.ceil(num_frames / NUM_BUCKETS))
        widths = {
            name: scan.schema[name].num_elements for name in scan.numeric if not is_picture(scan.schema[name].shape)
        }
        self.columns: list[Column] = []
        for name, width in widths.items():
            self.columns += [(name, WHOLE)] if width > _MAX_APART else []
            self.columns += [(name, place) for place in range(width)] if width <= _MAX_COLUMNS else []
        shape = len(QUANTILES) + 2, math.ceil(num_frames / self.bucket_size)
        self.levels = {column: np.full(shape, np.nan) for column in self.columns}
        self._widths = widths
        self._bucket = 0
        self._pieces = dict[str, list[Array]]()

    def add(self, batch: Batch) -> None:
        places = np.repeat(self._starts[batch.numbers] + batch.starts - batch.offsets[:-1], np.diff(batch.offsets))
        buckets = (places + np.arange(len(batch)))[batch.overlap :] // self.bucket_size
        edges = [0, *(np.flatnonzero(np.diff(buckets)) + 1).tolist(), len(buckets)]
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
                for place, found in enumerate(_levels(rows)):
                    self.levels[name, place][:, self._bucket] = found
            if (name, WHOLE) in self.levels:
                self.levels[name, WHOLE][:, self._bucket] = _levels(rows.reshape(1, -1))[0]
        self._pieces = {}


def _levels(rows: Array) -> Array:
    """`[D, 7]` of `[D, n]`."""
    found = quantiles(rows[:, :: max(1, rows.shape[1] // _NUM_RANKED)], QUANTILES)
    return np.stack([np.fmin.reduce(rows, 1), *found, np.fmax.reduce(rows, 1)], 1)


def quantiles(rows: Array, shares: Sequence[float]) -> Array:
    """Return nearest-rank quantiles of each row, without NaN: `[len(shares), rows]`."""
    if not rows.shape[1]:
        return np.full((len(shares), len(rows)), np.nan)
    ranked = np.sort(rows, 1)  # NaN last
    last = np.maximum((~np.isnan(ranked)).sum(1) - 1, 0)
    places = np.round(np.array(shares)[:, None] * last).astype(np.int64)
    found: Array = np.take_along_axis(ranked.T, places, 0)
    return found


class Survey:
    """A recording as the page shows it.

    Attributes:
        scan, recording: What was examined.
        course: The levels of its dimensions.
        table: Its table, with returns.
        pictures: Names of fields of pictures.
        oddness: `[num_episodes]`: how many robust standard deviations an episode lies off the others in what it is
            oddest in; `oddest` says in what.
    """

    def __init__(self, scan: Scan) -> None:
        self.scan = scan
        self.recording = scan.recording
        self.course = scan.collected(Course)
        self.pictures = [name for name, field in scan.schema.items() if is_picture(field.shape)]
        self.table = scan.recording.descriptions
        self.num_frames = int(scan.lengths.sum())
        if "reward" in scan.facts and scan.schema["reward"].num_elements == 1:
            facts = scan.facts["reward"]
            self.table["return"][facts.numbers] = facts.mean[:, 0].astype(np.float64) * facts.lengths
        measures = {"length": self.table["length"].astype(np.float64), "return": self.table["return"]}
        self.oddness = np.zeros(len(self.table))
        self.oddest = np.full(len(self.table), "", object)
        for name, values in measures.items():
            self._compare(name, values, np.arange(len(values)))
        for name, place in self.course.columns:
            if place != WHOLE:
                facts = scan.facts[name]
                self._compare(f"mean of {self.name((name, place))}", facts.mean[:, place], facts.numbers)

    def _compare(self, what: str, values: Array, numbers: Array) -> None:
        finite = values[np.isfinite(values)].astype(np.float64)
        if not len(finite):
            return
        middle = np.median(finite)
        spread = 1.4826 * np.median(np.abs(finite - middle)) + 0.01 * np.ptp(finite)
        apart = np.nan_to_num(np.abs(values - middle) / spread) if spread > 0 else np.zeros(len(values))
        odder = apart > self.oddness[numbers]
        self.oddness[numbers[odder]], self.oddest[numbers[odder]] = apart[odder], what

    def name(self, column: Column) -> str:
        """Name a dimension: "observation[3]", or the field where it has only one."""
        name, place = column
        shape = self.scan.schema[name].shape
        if place == WHOLE:
            return f"{name} (all {self.scan.schema[name].num_elements:,} dimensions)"
        return f"{name}[{', '.join(map(str, np.unravel_index(place, shape)))}]" if math.prod(shape) > 1 else name

    def values(self, column: Column) -> Array:
        """Return the finite values of a dimension in the sample, sorted."""
        rows = self.scan.facts[column[0]].sorted
        rows = rows.reshape(-1) if column[1] == WHOLE else rows[column[1]]
        found: Array = rows[np.isfinite(rows)]
        return found

    def chosen(self, weights: Mapping[Column, int], count: int) -> list[Column]:
        """Choose `count` columns: fields as wholes, narrow fields, those of most weight."""

        def urgency(column: Column) -> tuple[Any, ...]:
            width = self.scan.schema[column[0]].num_elements
            return column[1] != WHOLE, width > _NARROW, -weights.get(column, 0), width

        kept = set(sorted(self.course.columns, key=urgency)[:count])
        return [one for one in self.course.columns if one in kept]
