"""Rows that are read file by file, and what becomes of those whose file is lost meanwhile.

One rule: a file that was there when the index was made and cannot be read any more is a
`LostBlockError`, which names it and its trajectories; other errors may pass, and lose nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping

import numpy as np
import torch

from storage.errors import DataFileError

from ..format.schema import RowLayout
from ..index.index import Block, Runs, TrajectoryIndex
from .store import FrameStore, Place, as_windows

#: Gives all rows of a block: `[num_rows, row_bytes]` uint8.
ReadRows = Callable[[Block, Place], np.ndarray]
#: What a file raises that is gone, or is another's now.
GONE = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)


class FileFrames(FrameStore):
    """Rows that are read file by file and kept while they are in use: foreign files, other systems.

    Args:
        read_rows: Reads all rows of one kind of one block.
        losses: What it raises where a file is lost for good; a `LostBlockError` is made of it.
        max_cached_bytes: How much of what was read is kept.
    """

    def __init__(
        self,
        index: TrajectoryIndex,
        layouts: Mapping[str, RowLayout],
        read_rows: ReadRows,
        losses: tuple[type[Exception], ...] = GONE,
        max_cached_bytes: int = 1 << 30,
    ) -> None:
        super().__init__(index, layouts, torch.device("cpu"))
        self._read_rows, self._losses, self._max_cached_bytes = read_rows, losses, max_cached_bytes
        self._cached: OrderedDict[tuple[int, Place], np.ndarray] = OrderedDict()
        self._cached_bytes = 0

    def copy(self, place: Place, runs: Runs, length: int, out: torch.Tensor) -> None:
        windows = as_windows(out, 0).view(torch.uint8).numpy()
        for to, block, row, count in zip(*(column.tolist() for column in runs), strict=True):
            window, begin = divmod(to, windows.shape[1])
            windows[window, begin : begin + count] = self._rows(block, place)[row : row + count]

    def _rows(self, block: int, place: Place) -> np.ndarray:
        key = (block, place)
        rows = self._cached.get(key)
        if rows is None:
            rows = self._cached[key] = self._read(block, place)
            self._cached_bytes += rows.nbytes
            while self._cached_bytes > self._max_cached_bytes and len(self._cached) > 1:
                self._cached_bytes -= self._cached.popitem(last=False)[1].nbytes
        else:
            self._cached.move_to_end(key)
        return rows

    def _read(self, block: int, place: Place) -> np.ndarray:
        try:
            return self._read_rows(self.index.blocks[block], place)
        except self._losses as cause:
            raise self.index.lost_block(block, _in_words(cause)) from cause
        except OSError as cause:
            lost = self.index.lost_block(block, _in_words(cause))
            advice = "Try again, or reset these envs"
            raise DataFileError(lost.action, lost.where, lost.expected, lost.got, advice) from cause


def _in_words(cause: Exception) -> str:
    if isinstance(cause, DataFileError) and cause.expected:
        return f"{cause.got or 'nothing'} instead of {cause.expected}"
    return (cause.strerror if isinstance(cause, OSError) else None) or str(cause)
