"""Statistics of LeRobot's features: exact, also the quantiles, in bounded memory."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import numpy as np

from .lerobot_features import FeatureColumn

Array = np.ndarray[Any, Any]
#: Maps LeRobot's names of quantiles to the share of values below them.
QUANTILES = {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}
#: Maximum bytes of a `NumberTable` in memory. Larger tables are in temporary files.
_MEMORY_BYTES = 1 << 26
#: Number of values that are summarized at once.
_NUM_SUMMED = 1 << 17
#: Number of levels (possible values) of a uint8 channel.
_LEVELS = 256


class SetStatistics:
    """Statistics of all features except texts, for each episode and for all frames.

    Args:
        columns: The features.
        num_frames: Number of frames of the dataset. If only statistics of episodes are needed, the
            number of frames of the longest episode is sufficient.
        folder: Folder for temporary files, which need as many bytes as all numbers of the dataset.
    """

    def __init__(self, columns: Sequence[FeatureColumn], num_frames: int, folder: Path) -> None:
        self._num_channels: dict[str, int] = {}
        groups: dict[tuple[np.dtype[Any], int], dict[str, tuple[int, ...]]] = defaultdict(dict)
        for column in columns:
            shape = column.field.shape
            if column.is_picture:
                self._num_channels[column.name] = shape[2]
            elif column.kind == "depth":
                groups[column.dtype, prod(shape)][column.name] = (1, 1, 1)
            else:
                groups[column.dtype, 1][column.name] = shape or (1,)
        self._tables = []
        for (dtype, num_pixels), shapes in groups.items():
            num_rows = num_frames * num_pixels
            self._tables.append(NumberTable(shapes, dtype, num_rows, folder, num_pixels))
        self._pictures = self._new_pictures()

    def _new_pictures(self) -> dict[str, PictureStatistics]:
        return {name: PictureStatistics(num) for name, num in self._num_channels.items()}

    def of_rows(self, start: int, num_frames: int) -> Statistics:
        """Return empty statistics for the frames of an episode.

        Args:
            start: Position of the first frame among all frames.
            num_frames: Frames of the episode.
        """
        numbers = [table.rows(start, num_frames) for table in self._tables]
        return Statistics(numbers, self._new_pictures())

    def add_levels(
        self,
        levels: Mapping[str, Iterable[Mapping[str, int]]],
        num_frames: int,
    ) -> None:
        """Add the pixel counts of the pictures of an episode to the totals of the dataset.

        Args:
            levels: Maps features to the number of pixels per level (pixel value), for each channel.
            num_frames: Frames of the episode.
        """
        for name, counts in levels.items():
            self._pictures[name].add_counts(counts, num_frames)

    def total(self, num_frames: int) -> Statistics:
        """Return the statistics of the whole dataset, which has `num_frames` frames."""
        numbers = [table.rows(0, num_frames) for table in self._tables]
        return Statistics(numbers, self._pictures)


class Statistics:
    """Statistics of consecutive frames: of an episode, or of the whole dataset."""

    def __init__(
        self,
        numbers: Sequence[NumberStatistics],
        pictures: dict[str, PictureStatistics],
    ) -> None:
        self._numbers = numbers
        self._pictures = pictures
        self._numbers_of = {name: group for group in numbers for name in group.shapes}

    def add(self, name: str, rows: Array) -> None:
        """Add rows of a feature, `[n, *shape]`."""
        if name in self._pictures:
            self._pictures[name].add(rows)
        else:
            self._numbers_of[name].add(name, rows)

    def reset(self, name: str) -> None:
        """Remove all rows of a picture feature."""
        self._pictures[name] = PictureStatistics(len(self._pictures[name].levels))

    def levels(self) -> dict[str, list[dict[str, int]]]:
        """Return the number of pixels by feature, channel and level (pixel value)."""
        return {name: pictures.counts() for name, pictures in self._pictures.items()}

    def result(self, num_channels: int | None = None) -> dict[str, dict[str, Array]]:
        """Map each feature to its statistics by LeRobot's names. Call this once, after all rows.

        Args:
            num_channels: Channels that the reader expects; None for the channels of the pictures.
        """
        statistics: dict[str, dict[str, Array]] = {}
        for numbers in self._numbers:
            statistics |= numbers.result()
        for name, pictures in self._pictures.items():
            statistics[name] = pictures.result(num_channels or len(pictures.levels))
        return statistics


class NumberTable:
    """Table with all values of the features of one dtype: `[columns, rows]`.

    A large table is in a temporary file.

    Args:
        shapes: Maps features to the shape of a row.
        dtype: Dtype of the numbers.
        num_rows: Rows of all episodes.
        folder: Folder for a temporary file.
        num_pixels: Number of rows per frame. Each pixel of a depth picture is a row; other
            features have 1 row per frame.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        dtype: np.dtype[Any],
        num_rows: int,
        folder: Path,
        num_pixels: int,
    ) -> None:
        self._shapes = shapes
        self._num_pixels = num_pixels
        size = (sum(map(prod, shapes.values())), num_rows)
        stored_dtype = np.dtype(np.uint8) if dtype.kind == "b" else dtype
        num_bytes = prod(size) * stored_dtype.itemsize
        self._columns: Array
        if num_bytes <= _MEMORY_BYTES:
            self._columns = np.empty(size, stored_dtype)
            return
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder) as file:
            # Without reserved bytes, a write to the map would end the process with SIGBUS on a full
            # disk.
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, num_bytes)
            self._columns = np.memmap(file, stored_dtype, "r+", shape=size)

    def rows(self, start: int, num_frames: int) -> NumberStatistics:
        """Return empty statistics for the frames from `start` on, backed by this table."""
        first = start * self._num_pixels
        stop = first + num_frames * self._num_pixels
        return NumberStatistics(self._shapes, self._columns[:, first:stop], num_frames)


class NumberStatistics:
    """Statistics of each dimension of numeric features. NaN values are left out.

    Args:
        shapes: Maps features to the shape of a row.
        columns: Values of the frames, `[columns, rows]`, filled by `add`, sorted by `result`.
        num_frames: Number of frames.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        columns: Array,
        num_frames: int,
    ) -> None:
        self.shapes = shapes
        self._columns = columns
        self._num_frames = num_frames
        self._num_added = dict.fromkeys(shapes, 0)
        self._columns_of: dict[str, slice] = {}
        first = 0
        for name, shape in shapes.items():
            stop = first + prod(shape)
            self._columns_of[name] = slice(first, stop)
            first = stop

    def add(self, name: str, rows: Array) -> None:
        """Add rows of a feature, `[n, *shape]`, or depth pictures, `[n, H, W]`."""
        columns = self._columns[self._columns_of[name]]
        values = rows.reshape(-1, len(columns))
        start = self._num_added[name]
        stop = start + len(values)
        columns[:, start:stop] = values.T
        self._num_added[name] = stop

    def result(self) -> dict[str, dict[str, Array]]:
        """Map each feature to its statistics by LeRobot's names: arrays of the shape of a row.

        `count` is the number of frames.
        """
        num_columns, num_rows = self._columns.shape
        step = max(1, _NUM_SUMMED // max(1, num_rows))
        with np.errstate(invalid="ignore"):  # The deviation of infinite values is NaN.
            starts = range(0, num_columns, step)
            parts = [_summary(self._columns[start : start + step]) for start in starts]
        summary = _joined(parts)
        statistics = {}
        for feature, shape in self.shapes.items():
            columns = self._columns_of[feature]
            values = {name: array[columns].reshape(shape) for name, array in summary.items()}
            values["count"] = np.array([self._num_frames])
            statistics[feature] = values
        return statistics


def _joined(parts: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _summary(columns: Array) -> dict[str, Array]:
    """Compute statistics of each row of `columns`, `[d, n]`, which is sorted in place.

    Returns:
        A dict that maps LeRobot's names of statistics to arrays `[d]`. NaN values are left out.
    """
    columns.sort(axis=1)  # Sorting is three times as fast as a partition by ten ranks.
    has_nan = columns.dtype.kind == "f" and np.isnan(columns[:, -1]).any()  # NaN is sorted last.
    if not has_nan:
        return _summary_of_sorted(columns)
    parts = []
    for column in columns:
        num_known = int(np.searchsorted(column, np.nan))
        if num_known:
            parts.append(_summary_of_sorted(column[None, :num_known]))
        else:
            parts.append(_unknown_summary())
    return _joined(parts)


def _summary_of_sorted(columns: Array) -> dict[str, Array]:
    num_columns, num_rows = columns.shape
    step = max(1, _NUM_SUMMED // num_columns)
    parts = [columns[:, start : start + step] for start in range(0, num_rows, step)]
    mean = np.sum([part.sum(1, dtype=np.float64) for part in parts], axis=0) / num_rows
    squares = np.zeros(num_columns)
    for part in parts:
        distance = part.astype(np.float64)
        distance -= mean[:, None]
        squares += np.einsum("dn,dn->d", distance, distance)

    exact_dtype = np.float64 if columns.dtype == np.uint64 else columns.dtype
    return {
        "min": columns[:, 0].astype(exact_dtype),
        "max": columns[:, -1].astype(exact_dtype),
        "mean": mean,
        "std": np.sqrt(squares / num_rows),
        **dict(zip(QUANTILES, _quantiles(columns), strict=True)),
    }


def _quantiles(columns: Array) -> Array:
    """Return the quantiles of sorted columns, `[quantiles, d]`, interpolated between neighbors.

    If both neighbors are equal, the quantile is their value. If only one neighbor is infinite, the
    quantile is infinite too, because interpolation can return NaN.
    """
    last = columns.shape[1] - 1
    places = np.array(list(QUANTILES.values())) * last
    ranks = places.astype(np.int64)
    shares = (places - ranks)[:, None]
    low = columns.T[ranks].astype(np.float64)
    high = columns.T[np.minimum(ranks + 1, last)].astype(np.float64)
    is_finite = np.isfinite(low) & np.isfinite(high)
    with np.errstate(invalid="ignore"):
        between = np.where(is_finite, low + (high - low) * shares, low + high)
    quantiles: Array = np.where((low == high) | (shares == 0), low, between)
    return quantiles


def _unknown_summary() -> dict[str, Array]:
    return {name: np.full(1, np.nan) for name in ("min", "max", "mean", "std", *QUANTILES)}


class PictureStatistics:
    """Statistics of each channel of uint8 pictures over all pixels, scaled to 0..1.

    Levels are counted, so memory does not grow with the number of pictures.

    Args:
        num_channels: Channels of a picture.

    Attributes:
        levels: int64 `[num_channels, 256]`: pixels of each level.
        num_frames: Number of counted pictures.
    """

    def __init__(self, num_channels: int) -> None:
        self.levels = np.zeros((num_channels, _LEVELS), np.int64)
        self.num_frames = 0

    def add(self, pictures: Array) -> None:
        """Count the pixels of pictures, `[n, H, W, C]`."""
        self.num_frames += len(pictures)
        for channel, levels in enumerate(self.levels):
            levels += np.bincount(pictures[..., channel].reshape(-1), minlength=_LEVELS)

    def add_counts(self, levels: Iterable[Mapping[str, int]], num_frames: int) -> None:
        """Add the pixel counts of `num_frames` other pictures, by channel and level."""
        self.num_frames += num_frames
        for channel, counts in enumerate(levels):
            for level, count in counts.items():
                self.levels[channel, int(level)] += count

    def counts(self) -> list[dict[str, int]]:
        """Return the number of pixels for each channel and each level that occurs."""
        return [_nonzero(levels) for levels in self.levels]

    def result(self, num_channels: int) -> dict[str, Array]:
        """Map LeRobot's names of statistics to arrays `[num_channels, 1, 1]`.

        A single channel is repeated for readers that expect three.
        """
        parts = [_summary_of_levels(levels) for levels in self.levels]
        statistics: dict[str, Array] = {}
        for name in parts[0]:
            values = np.resize([part[name] for part in parts], num_channels)
            statistics[name] = values[:, None, None]
        statistics["count"] = np.array([self.num_frames])
        return statistics


def _nonzero(levels: Array) -> dict[str, int]:
    return {str(level): int(levels[level]) for level in np.flatnonzero(levels).tolist()}


def _summary_of_levels(levels: Array) -> dict[str, float]:
    values = np.arange(_LEVELS) / (_LEVELS - 1)
    stops = np.cumsum(levels)
    num_pixels = int(stops[-1])
    present = np.flatnonzero(levels)
    mean = float(levels @ values) / num_pixels
    variance = levels @ (values - mean) ** 2 / num_pixels
    summary = {
        "min": float(values[present[0]]),
        "max": float(values[present[-1]]),
        "mean": mean,
        "std": float(np.sqrt(variance)),
    }
    for name, share in QUANTILES.items():
        place = share * (num_pixels - 1)
        rank = int(place)
        ranks = [rank, min(rank + 1, num_pixels - 1)]
        low, high = values[np.searchsorted(stops, ranks, "right")]
        summary[name] = float(low + (high - low) * (place - rank))
    return summary
