"""Decode rows of compressed columns in many blocks on demand.

A column consists of chunks of rows that are compressed together. A call requests runs: ranges of
consecutive rows. It decodes each chunk once. If all rows of a chunk are requested, it is decoded
directly into the output. Other decoded chunks are cached for later calls, up to a fixed number of
bytes.
"""

from __future__ import annotations

from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from storage.core.lru_cache import LruCache
from storage.core.threads import each_part
from storage.errors import CorruptFileError

from ...blocks.block_header import BlockHeader, corrupt
from ...blocks.chunk_table import ChunkTable, check_sum
from ...blocks.trajectory_index import Int64s, Runs, counted_from
from .mapped_files import Arena

#: Default size in bytes of the cache of decoded chunks, over all fields of a dataset.
CHUNK_CACHE_BYTES = 512 << 20


def row_cache(max_bytes: int = CHUNK_CACHE_BYTES, keeps_last: bool = False) -> LruCache[Any, Any]:
    """Create a cache of arrays, limited by their total bytes; see `LruCache`."""
    return LruCache(max_bytes, attrgetter("nbytes"), keeps_last)


class ChunkFiles:
    """The compressed chunks of one column in all mapped blocks, whose rows are decoded on demand.

    Args:
        place: Table ("data" or "final") and name of the column.
        row_bytes: Bytes of a decoded row.
        mapped: Mapped bytes of all blocks, shared with other columns.
        cache: Cache of decoded chunks, shared with other columns.
    """

    def __init__(
        self, place: tuple[str, str], row_bytes: int, mapped: Arena, cache: LruCache[Any, Any]
    ) -> None:
        self.place = place
        self.row_bytes = row_bytes
        self._mapped = mapped
        self._cache = cache
        self._files: dict[int, tuple[Path, ChunkTable]] = {}
        self._num_files = 0
        #: First row of each of the C chunks, then the total number of rows, int64 `[C + 1]`.
        self._rows = np.zeros(1, np.int64)
        #: File number, first and stop byte in the mapped memory, and checksum of each of the C
        #: chunks, int64 `[4, C]`.
        self._spots = np.zeros((4, 0), np.int64)

    def add(self, header: BlockHeader, first_byte: int) -> int:
        """Add the chunks of a block that is mapped from `first_byte` on.

        Returns:
            Number of the block's first row, if the rows of all added blocks are counted together.
        """
        table = header.chunks[self.place[0]][self.place[1]]
        start = int(self._rows[-1])
        number = np.full(len(table.sums), self._num_files)
        self._rows = np.concatenate([self._rows[:-1], table.rows + start])
        spots = np.stack(
            [number, table.places[:-1] + first_byte, table.places[1:] + first_byte, table.sums]
        )
        self._spots = np.concatenate([self._spots, spots], axis=1)
        if len(table.sums):
            self._files[self._num_files] = header.path, table
        self._num_files += 1
        return start

    def unmap(self, first: int, num_rows: int) -> None:
        """Remove the block whose first row is `first`. Its rows must not be read afterwards."""
        if not num_rows:
            return
        del self._files[int(self._spots[0, np.searchsorted(self._rows, first)])]
        is_kept = np.isin(self._spots[0], list(self._files))
        # Also keep the entry after each kept chunk, since it marks where the rows of the chunk end.
        is_kept[1:] |= is_kept[:-1]
        self._rows = self._rows[np.append(is_kept, True)]
        self._spots = self._spots[:, is_kept]

    def copy(self, first: Int64s, runs: Runs, out: torch.Tensor) -> None:
        """Copy R runs of rows to `out`. Their chunks are decoded, or found in the cache.

        Args:
            first: First row of each run, counted over all added blocks as in `add`, int64 `[R]`.
            runs: Number of rows and target row of each run.
            out: CPU tensor, int32 `[rows, row_bytes / 4]`, or windows `[num_windows, length,
                row_bytes / 4]` with any strides. No run crosses the end of a window.

        Raises:
            CorruptFileError: A chunk is damaged; the message names the chunk.
        """
        if not len(first):
            return
        chunk, pieces = self._cut(first, runs)
        heads = np.flatnonzero(np.diff(chunk, prepend=-1))
        chunks, bounds = chunk[heads].tolist(), [*heads.tolist(), len(chunk)]
        windows = (out if out.dim() == 3 else out[None]).view(torch.uint8).numpy()

        def decode(start: int, stop: int) -> None:
            for number in range(start, stop):
                self._put(chunks[number], pieces[bounds[number] : bounds[number + 1]], windows)

        num_rows = int((self._rows[chunk[heads] + 1] - self._rows[chunk[heads]]).sum())
        chunk_bytes = num_rows // len(chunks) * self.row_bytes
        each_part(decode, len(chunks), chunk_bytes * len(chunks))

    def will_need(self, first: Int64s, num_rows: Int64s) -> None:
        """Prefetch the chunks that contain runs of rows from disk, in the background."""
        begin = np.searchsorted(self._rows, first, side="right") - 1
        last = np.searchsorted(self._rows, first + num_rows, side="left") - 1
        self._mapped.will_need(self._spots[1, begin], self._spots[2, last] - self._spots[1, begin])

    def _cut(self, first: Int64s, runs: Runs) -> tuple[Int64s, list[tuple[int, int, int]]]:
        """Cut runs of rows into pieces at chunk boundaries.

        Returns:
            The chunk of each piece, ascending; and for each piece (first row in its chunk, number
            of rows, target row).
        """
        stop = first + runs.num_rows
        begin = np.searchsorted(self._rows, first, side="right") - 1
        num = np.searchsorted(self._rows, stop, side="left") - begin
        run = np.repeat(np.arange(len(first)), num)
        chunk = counted_from(begin, num)
        order = np.argsort(chunk, kind="stable")
        run = run[order]
        chunk = chunk[order]
        low = np.maximum(self._rows[chunk], first[run])
        high = np.minimum(self._rows[chunk + 1], stop[run])
        columns = low - self._rows[chunk], high - low, runs.target[run] + low - first[run]
        return chunk, list(zip(*(column.tolist() for column in columns), strict=True))

    def _put(self, chunk: int, pieces: list[tuple[int, int, int]], windows: np.ndarray) -> None:
        num_rows = int(self._rows[chunk + 1] - self._rows[chunk])
        key = self.place, *self._spots[:2, chunk].tolist()
        rows = self._cache.get(key)
        targets = []
        for low, count, place in pieces:
            window, begin = divmod(place, windows.shape[1])
            targets.append((windows[window, begin : begin + count], low))
        whole = targets[0][0]
        if (
            rows is None
            and len(targets) == 1
            and len(whole) == num_rows
            and whole.flags.c_contiguous
        ):
            self._decode(chunk, num_rows, whole)
            return
        if rows is None:
            rows = self._decode(chunk, num_rows)
            self._cache.put(key, rows)
        for target, low in targets:
            target[:] = rows[low : low + len(target)]

    def _decode(self, chunk: int, num_rows: int, out: np.ndarray | None = None) -> np.ndarray:
        """Verify and decode a chunk. The rows are written to `out`, or to new memory."""
        number, start, stop, checksum = self._spots[:, chunk].tolist()
        path, table = self._files[number]
        data = self._mapped.bytes_view[start:stop]
        try:
            check_sum(data, checksum)
            return table.decode(data, num_rows, out)
        except CorruptFileError as cause:
            first = int(np.searchsorted(self._spots[0], number))
            where = f"chunk {chunk - first} of {'/'.join(self.place)}"
            raise corrupt(path, f"{where}, {cause.message}") from cause
