"""Quantiles of columns of numbers that arrive in portions: exact where they fit, with a stated error where not.

One rule: each class takes `[n, C]` portions with `add` and gives float64 `[Q, C]` with `at`, NaN in a column that has
one; `error` bounds, as a part of all numbers, how far the rank of a result is from the rank that was asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

#: Columns of at most so many bytes are kept as they are; their quantiles are exact.
EXACT_BYTES = 64 << 20
#: Rows of a buffer of the sketch.
SKETCH_ROWS = 4096

Array = np.ndarray[Any, Any]


class ByteCounts:
    """How often each of the 256 values of a byte occurs: exact whatever the number of rows."""

    def __init__(self, num_columns: int, dtype: np.dtype[Any]) -> None:
        self._lowest = -128 if dtype.kind == "i" else 0
        self._counts = np.zeros((num_columns, 256), np.int64)
        self.error = 0.0

    def add(self, values: Array) -> None:
        for column, counts in enumerate(self._counts):
            shifted = values[:, column].astype(np.int16) - self._lowest
            counts += np.bincount(shifted, minlength=256)

    def at(self, levels: Sequence[float]) -> Array:
        upto = np.cumsum(self._counts, axis=1)
        found = np.empty((len(levels), len(upto)))
        for column, sums in enumerate(upto):
            position = np.asarray(levels) * (sums[-1] - 1)
            below, above = (np.searchsorted(sums, end(position), side="right") for end in (np.floor, np.ceil))
            found[:, column] = below + (above - below) * (position - np.floor(position)) + self._lowest
        return found


class QuantileSketch:
    """A sketch in bounded memory: buffers of sorted rows, two of a level halved into one of the next.

    Exact, as `numpy.quantile`, until the first halving. Munro and Paterson 1980, as analysed by Manku, Rajagopalan and
    Lindsay 1998: halving two buffers whose rows stand for w numbers each moves a rank by at most w, so that `error` is
    the sum of these over all numbers: at most log2(n / k) / (2 k) for n numbers in buffers of k rows (0.001 for 10^6,
    0.0023 for 10^9).

    Args:
        num_columns: C.
        dtype: Of the numbers.
        num_rows: k.
    """

    def __init__(self, num_columns: int, dtype: np.dtype[Any], num_rows: int = SKETCH_ROWS) -> None:
        self._filling = np.empty((num_rows, num_columns), dtype)
        self._num_filled = self._count = 0
        self._has_nan = np.zeros(num_columns, bool)
        self._levels: list[Array | None] = []
        self._next_offset: list[int] = []
        self._moved = 0

    @property
    def error(self) -> float:
        return self._moved / max(1, self._count)

    def add(self, values: Array) -> None:
        while len(values):
            part = values[: len(self._filling) - self._num_filled]
            self._filling[self._num_filled : self._num_filled + len(part)] = part
            self._num_filled += len(part)
            self._count += len(part)
            values = values[len(part) :]
            if self._num_filled == len(self._filling):
                rows = np.sort(self._filling, axis=0)
                self._has_nan |= np.isnan(rows[-1])  # NaNs come last, and halving may drop them
                self._carry(rows)
                self._num_filled = 0

    def _carry(self, rows: Array) -> None:
        """Put a full buffer into the first free level, halving it with those that are in its way."""
        for level, other in enumerate(self._levels):
            if other is None:
                self._levels[level] = rows
                return
            both = np.sort(np.concatenate([other, rows]), axis=0, kind="stable")
            # By turns the odd and the even rows, so that the errors of successive halvings cancel.
            rows = both[self._next_offset[level] :: 2]
            self._next_offset[level] ^= 1
            self._moved += 1 << level
            self._levels[level] = None
        self._levels.append(rows)
        self._next_offset.append(0)

    def at(self, levels: Sequence[float]) -> Array:
        parts = [(self._filling[: self._num_filled], 1)]
        parts += [(rows, 1 << level) for level, rows in enumerate(self._levels) if rows is not None]
        if not self._moved:
            rows = np.concatenate([rows for rows, _ in parts])
            return np.stack([np.quantile(column.astype(np.float64), levels) for column in rows.T], axis=1)
        weights = np.concatenate([np.full(len(rows), weight) for rows, weight in parts])
        wanted = np.asarray(levels) * self._count
        found = np.empty((len(levels), self._filling.shape[1]))
        for column in range(found.shape[1]):
            values = np.concatenate([rows[:, column] for rows, _ in parts]).astype(np.float64)
            order = np.argsort(values, kind="stable")
            place = np.searchsorted(np.cumsum(weights[order]), wanted, side="left")
            found[:, column] = values[order[np.minimum(place, len(order) - 1)]]
            if self._has_nan[column] or np.isnan(values).any():
                found[:, column] = np.nan
        return found


Quantiles = ByteCounts | QuantileSketch


def quantiles_of(num_rows: int, num_columns: int, dtype: np.dtype[Any]) -> Quantiles:
    """Choose how to find the quantiles of columns of this size."""
    if dtype.kind in "biu" and dtype.itemsize == 1:
        return ByteCounts(num_columns, dtype)
    is_exact = num_rows * num_columns * dtype.itemsize <= EXACT_BYTES
    return QuantileSketch(num_columns, dtype, num_rows if is_exact else SKETCH_ROWS)
