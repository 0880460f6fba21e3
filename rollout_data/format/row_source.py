"""Row sources: where the rows of a block come from while it is written.

One rule: a source is read range by range into memory of the reader, so that a block never exists
twice and each part of it is still in the processor's cache when it is checked and written.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np


class RowSource(Protocol):
    """The rows of one column of a block. Several threads may read at once.

    Attributes:
        num_rows: How many there are.
        row_bytes: Bytes of each.
    """

    num_rows: int
    row_bytes: int

    def read(self, start: int, stop: int, out: np.ndarray) -> np.ndarray:
        """Give the rows `start:stop` as C-contiguous uint8 `[stop - start, row_bytes]`: in `out`, or a view."""
        ...


class ArrayRows:
    """Rows that are in memory as they will be in the file: uint8 `[R, row_bytes]`, C-contiguous."""

    def __init__(self, rows: np.ndarray) -> None:
        self._rows = rows
        self.num_rows, self.row_bytes = rows.shape

    def read(self, start: int, stop: int, out: np.ndarray) -> np.ndarray:
        return self._rows[start:stop]
