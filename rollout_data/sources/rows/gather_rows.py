"""`gather`: copy runs of rows from one tensor into windows, by large pieces where that is faster."""

from __future__ import annotations

import numpy as np
import torch

from storage.core.memory import BufferPool, sent, sent_together

from ...blocks.trajectory_index import Int64s, Runs, counted_from

#: Measured with rows of 2 KB: moving a piece costs as much as this many bytes more (a window of 25
#: rows 1.02 of a memcpy, one row 1.57), and moving a broken one again this many times its bytes.
_BYTES_A_PIECE = 1100
_PATCH_COST = 2.2
_NO_PIECES = np.zeros(0, np.int64)
#: Memory for single rows on their way.
_scratch = BufferPool(2)
#: Batches with fewer rows are moved row by row.
_FEW_ROWS = 256


def gather(words: torch.Tensor, runs: Runs, first: Int64s, length: int, out: torch.Tensor) -> None:
    """Copy rows into `out`, which is on the device of `words` and int32.

    Args:
        words: `[R, W]` int32, the rows.
        runs: Where they go and how many they are; none reaches from one window into the next.
        first: int64, first row of each run in `words`.
        length: Rows of a window; then the runs cover all of `out`, each row once, in ascending order. With 0 they may
            cover a part of it.
        out: `[num_windows, length, W]` of any strides, or contiguous `[rows, W]`.
    """
    windows = out if out.dim() == 3 else out.view(-1, length, out.shape[1]) if length else out[None]
    if not length:
        _copy_rows(words, counted_from(first, runs.num_rows), counted_from(runs.target, runs.num_rows), windows)
        return
    width = words.shape[1]
    num_words = words.shape[0]
    num_windows = windows.shape[0]
    size = length
    starts = first
    broken = _NO_PIECES
    num_rows = num_windows * length
    is_whole = len(first) == num_windows  # each window is one run
    if words.device.type != "cpu" or (not is_whole and (num_rows <= _FEW_ROWS or num_words < length)):
        # A device gathers single rows as fast as pieces, and one array of numbers is one copy to it.
        size = 1
        starts = counted_from(first, runs.num_rows)
    elif not is_whole:
        size = _piece_size(runs.target, length, num_rows, 4 * width)
        begin = -(-runs.target // size)  # the first piece that begins in each run, or later
        shift = first - runs.target  # what makes the row of a position in `out`
        num_begun = np.concatenate((begin[1:], [num_rows // size])) - begin
        starts = np.repeat(shift, num_begun) + np.arange(0, num_rows, size)
        broken = np.unique(runs.target[runs.target % size != 0] // size)
        starts[broken] = 0
    rows = torch.from_numpy(starts)
    if size == 1 and (by_time := windows.transpose(0, 1)).is_contiguous():
        rows = rows.view(num_windows, length).t().reshape(-1)
        windows = by_time
    rows = sent(rows, words.device)
    if windows.is_contiguous():  # a piece is one copy
        pieces = words.as_strided((num_words - size + 1, size * width), (width, 1))
        torch.index_select(pieces, 0, rows, out=windows.view(-1, size * width))
    else:
        pieces = words.as_strided((num_words - size + 1, size, width), (width, width, 1))
        for part, some in enumerate(rows.view(num_windows, -1).unbind(1)):
            torch.index_select(pieces, 0, some, out=windows[:, part * size : (part + 1) * size])
    if len(broken):
        place = (size * broken[:, None] + np.arange(size)).reshape(-1)
        _copy_rows(words, place + shift[runs.target.searchsorted(place, side="right") - 1], place, windows)


def _copy_rows(words: torch.Tensor, numbers: Int64s, place: Int64s, windows: torch.Tensor) -> None:
    """Copy single rows to places in windows; on the CPU through numpy, which takes a quarter of the time."""
    if not len(numbers):
        return
    window, row = np.divmod(place, windows.shape[1])
    if words.device.type == "cpu":
        size = 1 << (len(numbers) - 1).bit_length()  # memory that is a little too small is of no use to a pool
        scratch = _scratch.empty((size, words.shape[1]), words.dtype)[: len(numbers)]
        rows = torch.from_numpy(numbers)
        windows.numpy()[window, row] = torch.index_select(words, 0, rows, out=scratch).numpy()
    else:
        rows, *at = sent_together([torch.from_numpy(numbers), *map(torch.from_numpy, (window, row))], words.device)
        windows[tuple(at)] = torch.index_select(words, 0, rows)


def _piece_size(target: Int64s, length: int, num_rows: int, row_bytes: int) -> int:
    """How many rows to move at once: the divisor of a window's length that costs least.

    Large pieces move at the speed of a memcpy, but more of them lie in several runs and are moved
    again, row by row.
    """
    best = 1
    lowest = 1 + _BYTES_A_PIECE / row_bytes
    for size in range(2, length + 1):
        if length % size == 0:
            broken = np.count_nonzero(target % size) * size / num_rows
            cost = 1 + _BYTES_A_PIECE / (size * row_bytes) + _PATCH_COST * broken
            if cost < lowest:
                best = size
                lowest = cost
    return best
