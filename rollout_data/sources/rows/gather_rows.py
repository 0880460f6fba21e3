"""`gather`: copy runs of rows from one tensor into a batch, in large pieces if that is faster.

A run is a range of consecutive source rows. A batch consists of windows of equal length. A window
may contain rows of several runs. All windows are divided into pieces of equal size. A piece with
rows of one run is copied at once. A piece with rows of several runs ("broken" here) is copied row
by row.
"""

from __future__ import annotations

import numpy as np
import torch

from storage.core.memory import BufferPool, sent, sent_together

from ...blocks.trajectory_index import Int64s, Runs, counted_from

#: Fixed cost of copying a piece, as the number of bytes that memcpy copies in the same time. With
#: rows of 2 KB, a window of 25 rows takes 1.02 times as long as memcpy, a single row 1.57 times.
_BYTES_A_PIECE = 1100
#: Cost of copying a piece row by row, as a multiple of the time of memcpy.
_PATCH_COST = 2.2
#: Buffers in which single rows are gathered before they are written to the output.
_scratch = BufferPool(2)
#: Maximum number of rows of a batch that is always copied row by row.
_FEW_ROWS = 256


def gather(words: torch.Tensor, runs: Runs, first: Int64s, length: int, out: torch.Tensor) -> None:
    """Copy runs of rows from `words` to their target rows in `out`.

    Args:
        words: Source rows, int32 `[R, W]`.
        runs: Number of rows and target row of each run. No run crosses the end of a window.
        first: First row of each run in `words`, int64.
        length: Number of rows per window, if the runs cover all rows of `out` in ascending order.
            0 if the runs may cover only a part of `out`.
        out: int32 `[num_windows, length, W]` with any strides, or contiguous `[rows, W]`, on the
            device of `words`.
    """
    windows = out
    if out.dim() == 2:
        windows = out.view(-1, length, out.shape[1]) if length else out[None]
    if not length:
        _copy_rows(
            words,
            counted_from(first, runs.num_rows),
            counted_from(runs.target, runs.num_rows),
            windows,
        )
        return
    num_windows = windows.shape[0]
    is_cpu = words.device.type == "cpu"
    if is_cpu and len(first) == num_windows:  # Each window is a single run of rows.
        _copy_pieces(words, first, length, windows)
        return
    num_rows = num_windows * length
    # A GPU gathers single rows as fast as larger pieces.
    if not is_cpu or num_rows <= _FEW_ROWS or words.shape[0] < length:
        _copy_pieces(words, counted_from(first, runs.num_rows), 1, windows)
        return

    size = _piece_size(runs.target, length, num_rows, 4 * words.shape[1])
    begin = -(-runs.target // size)  # Number of the first piece that starts in or after each run.
    shift = first - runs.target  # Row in `words` minus row in `out`.
    num_begun = np.concatenate((begin[1:], [num_rows // size])) - begin
    starts = np.repeat(shift, num_begun) + np.arange(0, num_rows, size)
    broken = np.unique(runs.target[runs.target % size != 0] // size)
    starts[broken] = 0
    _copy_pieces(words, starts, size, windows)
    if len(broken):
        place = (size * broken[:, None] + np.arange(size)).reshape(-1)
        run = runs.target.searchsorted(place, side="right") - 1
        _copy_rows(words, place + shift[run], place, windows)


def _copy_pieces(words: torch.Tensor, starts: Int64s, size: int, windows: torch.Tensor) -> None:
    """Copy all pieces of the windows, each from consecutive rows of `words`.

    Args:
        words: Source rows, int32 `[R, W]`.
        starts: First row in `words` of each piece, int64, window after window.
        size: Number of rows of a piece, a divisor of the length of a window.
        windows: Output, int32 `[num_windows, length, W]` with any strides.
    """
    num_words, width = words.shape
    rows = torch.from_numpy(starts)
    if size == 1 and (by_time := windows.transpose(0, 1)).is_contiguous():
        num_windows, length, _ = windows.shape
        rows = rows.view(num_windows, length).t().reshape(-1)
        windows = by_time
    rows = sent(rows, words.device)
    if windows.is_contiguous():  # One call can write all pieces.
        pieces = words.as_strided((num_words - size + 1, size * width), (width, 1))
        torch.index_select(pieces, 0, rows, out=windows.view(-1, size * width))
    else:
        pieces = words.as_strided((num_words - size + 1, size, width), (width, width, 1))
        for part, some in enumerate(rows.view(windows.shape[0], -1).unbind(1)):
            torch.index_select(pieces, 0, some, out=windows[:, part * size : (part + 1) * size])


def _copy_rows(words: torch.Tensor, numbers: Int64s, place: Int64s, windows: torch.Tensor) -> None:
    """Copy single rows: row `numbers[i]` of `words` to row `place[i]` of the windows.

    The rows of all windows are counted together. On the CPU, numpy writes the rows in a quarter of
    torch's time.
    """
    if not len(numbers):
        return
    window, row = np.divmod(place, windows.shape[1])
    if words.device.type == "cpu":
        size = 1 << (len(numbers) - 1).bit_length()  # A power of two, so that memory is reused.
        scratch = _scratch.empty((size, words.shape[1]), words.dtype)[: len(numbers)]
        rows = torch.from_numpy(numbers)
        windows.numpy()[window, row] = torch.index_select(words, 0, rows, out=scratch).numpy()
    else:
        rows, *at = sent_together(
            [torch.from_numpy(numbers), *map(torch.from_numpy, (window, row))], words.device
        )
        windows[tuple(at)] = torch.index_select(words, 0, rows)


def _piece_size(target: Int64s, length: int, num_rows: int, row_bytes: int) -> int:
    """Return how many rows to copy at once: the divisor of `length` with the lowest cost.

    Large pieces are copied at the speed of memcpy. However, the larger the pieces, the more of them
    contain rows of several runs. These are copied again row by row.
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
