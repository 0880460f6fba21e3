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

from .lerobot_features import Column

Array = np.ndarray[Any, Any]
#: Names of LeRobot's quantiles.
QUANTILES = {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}
#: Bytes of a `NumberTable` that are kept in memory; more are mapped from a temporary file.
_MEMORY_BYTES = 1 << 26
#: Values that are summarized at once.
_NUM_SUMMED = 1 << 17
_LEVELS = 256


class SetStatistics:
    """Statistics of all features but texts: of each episode, and of all frames.

    Args:
        columns: The features.
        num_frames: Frames of the whole set, or of the longest episode if `total` is not called.
        folder: Folder of temporary files. They take as many bytes as all numbers of the set.
    """

    def __init__(self, columns: Sequence[Column], num_frames: int, folder: Path) -> None:
        groups: dict[tuple[np.dtype[Any], int], dict[str, tuple[int, ...]]] = defaultdict(dict)
        for column in columns:
            if column.kind == "depth":
                groups[column.dtype, prod(column.field.shape)][column.name] = (1, 1, 1)
            elif not column.is_picture:
                groups[column.dtype, 1][column.name] = column.field.shape or (1,)
        self._tables = [
            NumberTable(shapes, dtype, num_frames * num_pixels, folder, num_pixels)
            for (dtype, num_pixels), shapes in groups.items()
        ]
        self._num_channels = {column.name: column.field.shape[2] for column in columns if column.is_picture}
        self._pictures = self._new_pictures()

    def _new_pictures(self) -> dict[str, PictureStatistics]:
        return {name: PictureStatistics(num_channels) for name, num_channels in self._num_channels.items()}

    def of_rows(self, start: int, num_frames: int) -> Statistics:
        """Return empty statistics of the frames of an episode.

        Args:
            start: Place of the first frame among all frames.
            num_frames: Frames of the episode.
        """
        return Statistics([table.rows(start, num_frames) for table in self._tables], self._new_pictures())

    def add_levels(self, levels: Mapping[str, Iterable[Mapping[str, int]]], num_frames: int) -> None:
        """Add the levels of the pictures of an episode, as `Statistics.levels` returned them, to those of the set."""
        for name, counts in levels.items():
            self._pictures[name].add_counts(counts, num_frames)

    def total(self, num_frames: int) -> Statistics:
        """Return the statistics of the first `num_frames` frames, which were added to those of episodes."""
        return Statistics([table.rows(0, num_frames) for table in self._tables], self._pictures)


class Statistics:
    """Statistics of consecutive frames; made by `SetStatistics`."""

    def __init__(self, numbers: Sequence[NumberStatistics], pictures: dict[str, PictureStatistics]) -> None:
        self._numbers = numbers
        self._pictures = pictures
        self._owners = {name: one for one in numbers for name in one.shapes}

    def add(self, name: str, rows: Array) -> None:
        """Add rows of a feature, `[n, *shape]`."""
        if name in self._pictures:
            self._pictures[name].add(rows)
        else:
            self._owners[name].add(name, rows)

    def reset(self, name: str) -> None:
        """Remove all rows of a feature of pictures."""
        self._pictures[name] = PictureStatistics(len(self._pictures[name].levels))

    def levels(self) -> dict[str, list[dict[str, int]]]:
        """Return the pixels of each level of the pictures: feature -> channel -> level -> pixels."""
        return {name: pictures.counts() for name, pictures in self._pictures.items()}

    def result(self, num_channels: int | None = None) -> dict[str, dict[str, Array]]:
        """Return feature -> LeRobot's names -> values. Call it once, when all rows are there.

        Args:
            num_channels: Channels of pictures that the reader expects; None for those of the pictures.
        """
        found: dict[str, dict[str, Array]] = {}
        for one in self._numbers:
            found |= one.result()
        for name, pictures in self._pictures.items():
            found[name] = pictures.result(num_channels or len(pictures.levels))
        return found


class NumberTable:
    """Values of features of one dtype by column: `[columns, rows]`, in a temporary file if they are large.

    Args:
        shapes: Feature -> shape of a row.
        dtype: Of the numbers.
        num_rows: Rows of all episodes.
        folder: Where a temporary file may be created.
        num_pixels: Rows of a frame: pixels of a depth picture, otherwise 1.
    """

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], dtype: np.dtype[Any], num_rows: int, folder: Path, num_pixels: int
    ) -> None:
        self._shapes = shapes
        self._num_pixels = num_pixels
        size = (sum(map(prod, shapes.values())), num_rows)
        kept_dtype = np.dtype(np.uint8) if dtype.kind == "b" else dtype
        num_bytes = prod(size) * kept_dtype.itemsize
        self._columns: Array
        if num_bytes <= _MEMORY_BYTES:
            self._columns = np.empty(size, kept_dtype)
        else:
            folder.mkdir(parents=True, exist_ok=True)
            with TemporaryFile(dir=folder) as file:
                if hasattr(os, "posix_fallocate"):  # otherwise a full disk ends the process with SIGBUS
                    os.posix_fallocate(file.fileno(), 0, num_bytes)
                self._columns = np.memmap(file, kept_dtype, "r+", shape=size)

    def rows(self, start: int, num_frames: int) -> NumberStatistics:
        """Return the statistics of the frames from `start` on."""
        first = start * self._num_pixels
        columns = self._columns[:, first : first + num_frames * self._num_pixels]
        return NumberStatistics(self._shapes, columns, num_frames)


class NumberStatistics:
    """Statistics of each dimension of features of numbers. NaN stands for a missing value and is left out.

    Args:
        shapes: Feature -> shape of a row.
        columns: Values of the frames, `[columns, rows]`: `add` fills them, and `result` sorts each column.
        num_frames: Frames of the rows.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], columns: Array, num_frames: int) -> None:
        self.shapes = shapes
        self._columns = columns
        self._num_frames = num_frames
        self._num_added = dict.fromkeys(shapes, 0)
        self._places: dict[str, slice] = {}
        first = 0
        for name, shape in shapes.items():
            self._places[name] = slice(first, first + prod(shape))
            first += prod(shape)

    def add(self, name: str, rows: Array) -> None:
        """Add rows of a feature, `[n, *shape]`, or depth pictures, `[n, H, W]`."""
        columns = self._columns[self._places[name]]
        values = rows.reshape(-1, len(columns))
        start = self._num_added[name]
        self._num_added[name] += len(values)
        columns[:, start : self._num_added[name]] = values.T

    def result(self) -> dict[str, dict[str, Array]]:
        """Return feature -> LeRobot's names -> arrays of the shape of a row; `count` is the number of frames."""
        step = max(1, _NUM_SUMMED // max(1, self._columns.shape[1]))
        with np.errstate(invalid="ignore"):  # the mean and deviation of infinite values
            parts = [_summary(self._columns[start : start + step]) for start in range(0, len(self._columns), step)]
        found = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        return {
            feature: {
                **{name: values[self._places[feature]].reshape(shape) for name, values in found.items()},
                "count": np.array([self._num_frames]),
            }
            for feature, shape in self.shapes.items()
        }


def _summary(columns: Array) -> dict[str, Array]:
    """Sort and summarize each row of `[d, n]`: name -> `[d]`."""
    columns.sort(axis=1)  # three times as fast as to partition it by ten ranks
    if columns.dtype.kind == "f" and np.isnan(columns[:, -1]).any():  # NaN comes last
        nums_known = [int(np.searchsorted(column, np.nan)) for column in columns]
        parts = [
            _summary_of_sorted(column[None, :num]) if num else _unknown()
            for column, num in zip(columns, nums_known, strict=True)
        ]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    return _summary_of_sorted(columns)


def _summary_of_sorted(columns: Array) -> dict[str, Array]:
    last = columns.shape[1] - 1
    exact = np.float64 if columns.dtype == np.uint64 else columns.dtype
    found = {"min": columns[:, 0].astype(exact), "max": columns[:, last].astype(exact)}
    starts = range(0, last + 1, max(1, _NUM_SUMMED // len(columns)))
    parts = [columns[:, start : start + starts.step] for start in starts]
    mean = np.sum([part.sum(1, dtype=np.float64) for part in parts], axis=0) / (last + 1)
    squares = np.zeros(len(columns))
    for part in parts:
        distance = part.astype(np.float64)
        distance -= mean[:, None]
        squares += np.einsum("dn,dn->d", distance, distance)
    found |= {"mean": mean, "std": np.sqrt(squares / (last + 1))}
    return found | dict(zip(QUANTILES, _quantiles(columns, last), strict=True))


def _quantiles(columns: Array, last: int) -> Array:
    """Return the quantiles of sorted columns, `[quantiles, d]`, interpolated between neighbours.

    Equal neighbours stay as they are, and an infinite one is the result.
    """
    places = np.array(list(QUANTILES.values())) * last
    ranks = places.astype(np.int64)
    shares = (places - ranks)[:, None]
    low = columns.T[ranks].astype(np.float64)
    high = columns.T[np.minimum(ranks + 1, last)].astype(np.float64)
    is_finite = np.isfinite(low) & np.isfinite(high)
    with np.errstate(invalid="ignore"):
        between = np.where(is_finite, low + (high - low) * shares, low + high)
    found: Array = np.where((low == high) | (shares == 0), low, between)
    return found


def _unknown() -> dict[str, Array]:
    return {name: np.full(1, np.nan) for name in ("min", "max", "mean", "std", *QUANTILES)}


class PictureStatistics:
    """Statistics of each channel of uint8 pictures over all pixels, from 0 to 1, by counting their levels.

    Args:
        num_channels: Channels of a picture.

    Attributes:
        levels: int64 `[num_channels, 256]`: pixels of each level.
        num_frames: Pictures that were counted.
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
        """Add what `counts` returned for other pictures."""
        self.num_frames += num_frames
        for channel, counts in enumerate(levels):
            for level, count in counts.items():
                self.levels[channel, int(level)] += count

    def counts(self) -> list[dict[str, int]]:
        """Return the pixels of each level that occurs, by channel."""
        return [{str(level): int(levels[level]) for level in np.flatnonzero(levels).tolist()} for levels in self.levels]

    def result(self, num_channels: int) -> dict[str, Array]:
        """Return LeRobot's names -> `[num_channels, 1, 1]`; one channel is repeated for readers that expect three."""
        parts = [_summary_of_levels(levels) for levels in self.levels]
        found = {name: np.resize([part[name] for part in parts], num_channels) for name in parts[0]}
        return {**{name: values[:, None, None] for name, values in found.items()}, "count": np.array([self.num_frames])}


def _summary_of_levels(levels: Array) -> dict[str, float]:
    values = np.arange(_LEVELS) / (_LEVELS - 1)
    stops = np.cumsum(levels)
    num_pixels = int(stops[-1])
    present = np.flatnonzero(levels)
    mean = float(levels @ values) / num_pixels
    std = float(np.sqrt(levels @ (values - mean) ** 2 / num_pixels))
    found = {"min": float(values[present[0]]), "max": float(values[present[-1]]), "mean": mean, "std": std}
    for name, share in QUANTILES.items():
        place = share * (num_pixels - 1)
        ranks = [int(place), min(int(place) + 1, num_pixels - 1)]
        low, high = values[np.searchsorted(stops, ranks, "right")]
        found[name] = float(low + (high - low) * (place - int(place)))
    return found
