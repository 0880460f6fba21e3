"""`gather`: copy runs of rows from one tensor into windows, in large pieces if that is faster."""

from __future__ import annotations

import numpy as np
import torch

from storage.core.memory import BufferPool, sent, sent_together

from ...blocks.trajectory_index import Int64s, Runs, counted_from

#: Fixed cost of copying a piece, in bytes of a plain copy, measured with rows of 2 KB. A window of
#: 25 rows takes 1.02 times as long as a memcpy, a single row 1.57 times.
_BYTES_A_PIECE = 1100
#: Cost of copying a piece again row by row, in plain copies of the piece.
_PATCH_COST = 2.2
_NO_PIECES = np.zeros(0, np.int64)
#: Buffers for single rows between source and output.
_scratch = BufferPool(2)
#: Number of rows up to which a batch is copied row by row.
_FEW_ROWS = 256


def gather(words: torch.Tensor, runs: Runs, first: Int64s, length: int, out: torch.Tensor) -> None:
    """Copy rows into `out`.

    Args:
        words: `[R, W]` int32, the rows.
        runs: Number of rows and target row of each run. No run crosses the end of a window.
        first: int64, first row of each run in `words`.
        length: Rows per window; the runs then cover each row of `out` once, in ascending order.
            With 0, the runs may cover a part of `out`.
        out: `[num_windows, length, W]` with any strides, or contiguous `[rows, W]`; int32 on the
            device of `words`.
    """
    windows = out if out.dim() == 3 else out.view(-1, length, out.shape[1]) if length else out[None]
    if not length:
        _copy_rows(
            words,
            counted_from(first, runs.num_rows),
            counted_from(runs.target, runs.num_rows),
            windows,
        )
        return
    width = words.shape[1]
    num_words = words.shape[0]
    num_windows = windows.shape[0]
    size = length
    starts = first
    broken = _NO_PIECES
    num_rows = num_windows * length
    is_whole = len(first) == num_windows  # each window is one run
    if words.device.type != "cpu" or (
        not is_whole and (num_rows <= _FEW_ROWS or num_words < length)
    ):
        # A GPU gathers single rows as fast as pieces, and needs only one array of row numbers.
        size = 1
        starts = counted_from(first, runs.num_rows)
    elif not is_whole:
        size = _piece_size(runs.target, length, num_rows, 4 * width)
        begin = -(-runs.target // size)  # first piece that starts in or after each run
        shift = first - runs.target  # row in `words` minus row in `out`
        num_begun = np.concatenate((begin[1:], [num_rows // size])) - begin
        starts = np.repeat(shift, num_begun) + np.arange(0, num_rows, size)
        broken = np.unique(runs.target[runs.target % size != 0] // size)
        starts[broken] = 0
    rows = torch.from_numpy(starts)
    if size == 1 and (by_time := windows.transpose(0, 1)).is_contiguous():
        rows = rows.view(num_windows, length).t().reshape(-1)
        windows = by_time
    rows = sent(rows, words.device)
    if windows.is_contiguous():  # each piece is contiguous
        pieces = words.as_strided((num_words - size + 1, size * width), (width, 1))
        torch.index_select(pieces, 0, rows, out=windows.view(-1, size * width))
    else:
        pieces = words.as_strided((num_words - size + 1, size, width), (width, width, 1))
        for part, some in enumerate(rows.view(num_windows, -1).unbind(1)):
            torch.index_select(pieces, 0, some, out=windows[:, part * size : (part + 1) * size])
    if len(broken):
        place = (size * broken[:, None] + np.arange(size)).reshape(-1)
        _copy_rows(
            words, place + shift[runs.target.searchsorted(place, side="right") - 1], place, windows
        )


def _copy_rows(words: torch.Tensor, numbers: Int64s, place: Int64s, windows: torch.Tensor) -> None:
    """Copy single rows into windows; on the CPU with numpy, in a quarter of torch's time."""
    if not len(numbers):
        return
    window, row = np.divmod(place, windows.shape[1])
    if words.device.type == "cpu":
        size = 1 << (len(numbers) - 1).bit_length()  # a power of two, to reuse pooled memory
        scratch = _scratch.empty((size, words.shape[1]), words.dtype)[: len(numbers)]
        rows = torch.from_numpy(numbers)
        windows.numpy()[window, row] = torch.index_select(words, 0, rows, out=scratch).numpy()
    else:
        rows, *at = sent_together(
            [torch.from_numpy(numbers), *map(torch.from_numpy, (window, row))], words.device
        )
        windows[tuple(at)] = torch.index_select(words, 0, rows)


def _piece_size(target: Int64s, length: int, num_rows: int, row_bytes: int) -> int:
    """Return the number of rows per piece: the divisor of the window length with the lowest cost.

    Large pieces are copied at the speed of a memcpy. But more of them contain rows of several runs,
    which are copied again row by row.
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
