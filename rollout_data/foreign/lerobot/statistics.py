"""Statistics of LeRobot's features: exact, also the quantiles, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
#: Names of LeRobot's quantiles.
QUANTILES = {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}
#: Bytes of a feature that are kept in memory; more are mapped from a temporary file.
_MEMORY_BYTES = 1 << 26
#: Bytes that are summarized at once, and values that are summed at once.
_BLOCK_BYTES = 1 << 24
_NUM_SUMMED = 1 << 20
_LEVELS = 256


class NumberStatistics:
    """Statistics of each dimension of a feature of numbers. NaN stands for a missing value and is left out.

    All rows are kept by column until `result`, in a temporary file if they are large.

    Args:
        num_rows: Rows that will be added.
        shape: Of a row.
        dtype: Of the numbers.
        folder: Where a temporary file may be created.
    """

    def __init__(self, num_rows: int, shape: tuple[int, ...], dtype: np.dtype[Any], folder: Path) -> None:
        self._shape = shape or (1,)
        self._num_rows = 0
        size = (prod(shape), num_rows)
        kept_dtype = np.dtype(np.uint8) if dtype.kind == "b" else dtype
        self._columns: Array
        if prod(size) * kept_dtype.itemsize <= _MEMORY_BYTES:
            self._columns = np.empty(size, kept_dtype)
        else:
            folder.mkdir(parents=True, exist_ok=True)
            with TemporaryFile(dir=folder) as file:
                self._columns = np.memmap(file, kept_dtype, "w+", shape=size)

    def add(self, rows: Array) -> None:
        """Add rows, `[n, *shape]`."""
        stop = self._num_rows + len(rows)
        self._columns[:, self._num_rows : stop] = rows.reshape(len(rows), len(self._columns)).T
        self._num_rows = stop

    def result(self) -> dict[str, Array]:
        """Return LeRobot's names -> arrays of the shape of a row; `count` is the number of rows. Call it once."""
        columns = self._columns[:, : self._num_rows]
        step = max(1, _BLOCK_BYTES // max(1, self._num_rows * columns.itemsize))
        with np.errstate(invalid="ignore"):  # the mean and deviation of infinite values
            parts = [_summary(columns[start : start + step]) for start in range(0, len(columns), step)]
        found = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        shaped = {name: values.reshape(self._shape) for name, values in found.items()}
        return {**shaped, "count": np.array([self._num_rows])}


class DepthStatistics(NumberStatistics):
    """Statistics of depth pictures `[H, W]` over all pixels, as they are stored."""

    def __init__(self, num_rows: int, shape: tuple[int, ...], dtype: np.dtype[Any], folder: Path) -> None:
        self._num_pixels = prod(shape)
        super().__init__(num_rows * self._num_pixels, (1, 1, 1), dtype, folder)

    def add(self, rows: Array) -> None:
        """Add pictures, `[n, H, W]`."""
        super().add(rows.reshape(-1, 1))

    def result(self) -> dict[str, Array]:
        """Return LeRobot's names -> `[1, 1, 1]`; `count` is the number of pictures."""
        found = super().result()
        return {**found, "count": found["count"] // self._num_pixels}


def _summary(columns: Array) -> dict[str, Array]:
    """Summarize each row of `[d, n]`, whose values are reordered: name -> `[d]`."""
    if columns.dtype.kind == "f" and np.isnan(columns).any():
        known = [column[~np.isnan(column)] for column in columns]
        parts = [_summary(column[None]) if len(column) else _unknown() for column in known]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    last = columns.shape[1] - 1
    places = {name: share * last for name, share in QUANTILES.items()}
    ranks = sorted({0, last, *map(int, places.values()), *(min(int(place) + 1, last) for place in places.values())})
    columns.partition(ranks, axis=1)
    exact = np.float64 if columns.dtype == np.uint64 else columns.dtype
    found = {"min": columns[:, 0].astype(exact), "max": columns[:, last].astype(exact)}
    total = np.zeros(len(columns))
    for start in range(0, last + 1, _NUM_SUMMED):
        total += columns[:, start : start + _NUM_SUMMED].sum(1, dtype=np.float64)
    mean = total / (last + 1)
    squares = np.zeros(len(columns))
    for start in range(0, last + 1, _NUM_SUMMED):
        distance = columns[:, start : start + _NUM_SUMMED] - mean[:, None]
        squares += np.einsum("dn,dn->d", distance, distance)
    found |= {"mean": mean, "std": np.sqrt(squares / (last + 1))}
    for name, place in places.items():
        low = columns[:, int(place)].astype(np.float64)
        high = columns[:, min(int(place) + 1, last)].astype(np.float64)
        found[name] = _between(low, high, place - int(place))
    return found


def _between(low: Array, high: Array, share: float) -> Array:
    """Interpolate between neighbours; equal ones stay as they are, and an infinite one is the result."""
    if not share:
        return low
    is_finite = np.isfinite(low) & np.isfinite(high)
    with np.errstate(invalid="ignore"):
        between = np.where(is_finite, low + (high - low) * share, low + high)
    return np.where(low == high, low, between)


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


AnyStatistics = NumberStatistics | PictureStatistics
