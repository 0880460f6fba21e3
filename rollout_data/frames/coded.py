"""Chunk files: the rows of a coded component over many blocks, decoded when they are asked for.

One rule: a call decodes each chunk that it touches once; a chunk that is wanted whole goes straight to the
output, of the others the decoded frames are kept for the next call, within a fixed number of bytes.
"""

from __future__ import annotations

import mmap
import threading
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import torch

from storage.core.work_split import WorkSplit
from storage.errors import CorruptFileError

from ..format.chunk_table import ChunkTable, check_sum
from ..format.header import BlockHeader, corrupt, read_header
from ..index.index import Block, Int64s, Runs

#: How much of decoded chunks is kept by default, over all components of a dataset.
CHUNK_CACHE_BYTES = 512 << 20
_MADV_WILLNEED: int | None = getattr(mmap, "MADV_WILLNEED", None)


class ChunkCache:
    """Decoded chunks by key, the least recently used given up first; for several threads.

    Attributes:
        max_bytes: How much is kept at most.
        num_bytes: How much is kept.
    """

    def __init__(self, max_bytes: int = CHUNK_CACHE_BYTES) -> None:
        self.max_bytes, self.num_bytes = max_bytes, 0
        self._kept: OrderedDict[Any, np.ndarray] = OrderedDict()
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        """Decoded chunks can be decoded again: a pickled cache arrives empty."""
        return {"max_bytes": self.max_bytes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        ChunkCache.__init__(self, state["max_bytes"])

    def get(self, key: Any) -> np.ndarray | None:
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
            return found

    def put(self, key: Any, rows: np.ndarray) -> None:
        if rows.nbytes > self.max_bytes:
            return
        with self._lock:
            before = self._kept.pop(key, None)
            self.num_bytes += rows.nbytes - (0 if before is None else before.nbytes)
            self._kept[key] = rows
            while self.num_bytes > self.max_bytes:
                self.num_bytes -= self._kept.popitem(last=False)[1].nbytes


class MappedFile:
    """A block mapped into memory as a whole, for its chunks: it stays readable when it is removed."""

    def __init__(self, block: Block) -> None:
        self.header: BlockHeader = read_header(block.path)
        with open(block.path, "rb") as file:
            self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if not len(self.map) == self.header.file_bytes == block.file_bytes:
            raise corrupt(block.path, f"{block.file_bytes} bytes", f"{len(self.map)}")
        self.bytes = np.frombuffer(self.map, np.uint8)

    def will_need(self, start: int, stop: int) -> None:
        """Ask the kernel for a part of the file."""
        if _MADV_WILLNEED is not None and stop > start:
            begin = start // mmap.PAGESIZE * mmap.PAGESIZE
            self.map.madvise(_MADV_WILLNEED, begin, stop - begin)


class _Job(NamedTuple):
    """One chunk that a call needs: where it is, its checksum, how many rows it has, which pieces of it go where."""

    chunk: int
    file: int
    start: int
    stop: int
    checksum: int
    num_rows: int
    first_piece: int
    last_piece: int


class _Pieces(NamedTuple):
    """Parts of chunks, sorted by chunk: first row within the chunk, number of rows, place in the output."""

    low: list[int]
    size: list[int]
    target: list[int]


class _Scratch(threading.local):
    """Memory of each thread for a chunk that is not kept: as much as the largest took, until the thread ends."""

    def __init__(self) -> None:
        self._held = np.empty(0, np.uint8)

    def take(self, num_rows: int, row_bytes: int) -> np.ndarray:
        """Give `[num_rows, row_bytes]`, which the next call takes over."""
        if len(self._held) < num_rows * row_bytes:
            self._held = np.empty(num_rows * row_bytes, np.uint8)
        return self._held[: num_rows * row_bytes].reshape(num_rows, row_bytes)


_scratch = _Scratch()


class ChunkFiles:
    """The chunks of one column over all mapped blocks; grows as blocks come.

    Args:
        place: (table, column).
        row_bytes: Size of a decoded row.
        cache: Where decoded chunks are kept; shared by several.
        splits: Decides how many threads decode; shared by several.

    Attributes:
        cache: The same.
    """

    def __init__(self, place: tuple[str, str], row_bytes: int, cache: ChunkCache, splits: WorkSplit) -> None:
        self.place, self.row_bytes = place, row_bytes
        self.cache, self._splits = cache, splits
        self._files: dict[int, tuple[MappedFile, ChunkTable]] = {}
        self._num_files = 0
        #: Of every chunk: its first row (and the number of rows at the end), its file, its bytes there, their checksum.
        self._rows = np.zeros(1, np.int64)
        self._file, self._start, self._stop, self._sum = (np.zeros(0, np.int64) for _ in range(4))

    def add(self, file: MappedFile) -> int:
        """Take the chunks of one more block; give the number of its first row."""
        table = file.header.chunks[self.place[0]][self.place[1]]
        start = int(self._rows[-1])
        self._rows = np.concatenate([self._rows[:-1], table.rows + start])
        self._file = np.append(self._file, np.full(len(table.rows) - 1, self._num_files))
        self._start = np.concatenate([self._start, table.places[:-1]])
        self._stop = np.concatenate([self._stop, table.places[1:]])
        self._sum = np.concatenate([self._sum, table.sums])
        if len(table.sums):
            self._files[self._num_files] = file, table
        self._num_files += 1
        return start

    def unmap(self, first: int, num_rows: int) -> None:
        """Give up the block whose first row has this number; its rows must not be asked for any more."""
        if not num_rows:
            return
        del self._files[int(self._file[np.searchsorted(self._rows, first)])]
        is_kept = np.isin(self._file, list(self._files))
        is_kept[1:] |= is_kept[:-1]  # the first chunk behind a kept one ends it
        self._rows = self._rows[np.append(is_kept, True)]
        self._file, self._start, self._stop, self._sum = (
            column[is_kept] for column in (self._file, self._start, self._stop, self._sum)
        )

    def copy(self, first: Int64s, runs: Runs, out: torch.Tensor) -> None:
        """Decode rows into `out`.

        Args:
            first: int64 `[R]`, number of the first row of each run, as counted by `add`.
            runs: Where they go and how many they are.
            out: int32 on the CPU, `[rows, row_bytes / 4]`, or windows `[num_windows, length, row_bytes / 4]` of any
                strides; no run reaches from one into the next.

        Raises:
            CorruptFileError: A chunk is damaged; the text names it.
        """
        if not len(first):
            return
        jobs, pieces = self._plan(first, runs)
        windows = (out if out.dim() == 3 else out[None]).view(torch.uint8).numpy()

        def decode(start: int, stop: int) -> None:
            for job in jobs[start:stop]:
                self._put(job, pieces, windows)

        chunk_bytes = sum(job.num_rows for job in jobs) // len(jobs) * self.row_bytes
        self._splits.run(decode, len(jobs), chunk_bytes * len(jobs), (self.place, chunk_bytes.bit_length()))

    def will_need(self, first: Int64s, num_rows: Int64s) -> None:
        """Have the chunks of rows fetched from the disk in the background."""
        begin = np.searchsorted(self._rows, first, side="right") - 1
        last = np.searchsorted(self._rows, first + num_rows, side="left") - 1
        for file, start, stop in zip(self._file[begin], self._start[begin], self._stop[last], strict=True):
            if int(file) in self._files:
                self._files[int(file)][0].will_need(int(start), int(stop))

    def _plan(self, first: Int64s, runs: Runs) -> tuple[list[_Job], _Pieces]:
        """Cut runs of rows at the bounds of chunks, vectorized."""
        stop = first + runs.num_rows
        begin = np.searchsorted(self._rows, first, side="right") - 1
        num = np.searchsorted(self._rows, stop, side="left") - begin
        run = np.repeat(np.arange(len(first)), num)
        chunk = begin[run] + np.arange(len(run)) - np.repeat(np.cumsum(num) - num, num)
        order = np.argsort(chunk, kind="stable")
        run, chunk = run[order], chunk[order]
        low, high = np.maximum(self._rows[chunk], first[run]), np.minimum(self._rows[chunk + 1], stop[run])
        target = runs.target[run] + low - first[run]
        pieces = _Pieces((low - self._rows[chunk]).tolist(), (high - low).tolist(), target.tolist())
        heads = np.flatnonzero(np.diff(chunk, prepend=-1))
        one = chunk[heads]
        size = self._rows[one + 1] - self._rows[one]
        columns = (
            one,
            self._file[one],
            self._start[one],
            self._stop[one],
            self._sum[one],
            size,
            heads,
            np.append(heads, len(chunk))[1:],
        )
        return list(map(_Job._make, zip(*(column.tolist() for column in columns), strict=True))), pieces

    def _put(self, job: _Job, pieces: _Pieces, windows: np.ndarray) -> None:
        """Decode one chunk and copy its pieces to their windows."""
        key = (self.place, job.file, job.start)
        rows = self.cache.get(key) if self.cache.max_bytes else None
        targets = []
        for piece in range(job.first_piece, job.last_piece):
            window, begin = divmod(pieces.target[piece], windows.shape[1])
            targets.append((windows[window, begin : begin + pieces.size[piece]], pieces.low[piece]))
        spot = targets[0][0]
        if rows is None and len(targets) == 1 and len(spot) == job.num_rows and spot.flags.c_contiguous:
            self._decode(job, spot)
            return
        if rows is None:
            is_kept = job.num_rows * self.row_bytes <= self.cache.max_bytes
            shape = job.num_rows, self.row_bytes
            rows = np.empty(shape, np.uint8) if is_kept else _scratch.take(*shape)
            self._decode(job, rows)
            if is_kept:
                self.cache.put(key, rows)
        for spot, low in targets:
            spot[:] = rows[low : low + len(spot)]

    def _decode(self, job: _Job, rows: np.ndarray) -> None:
        """Check a chunk and decode it to `rows`, which are contiguous."""
        source, table = self._files[job.file]
        chunk = source.bytes[job.start : job.stop]  # never longer than the file
        try:
            check_sum(chunk, job.checksum)
            table.decode(chunk, rows)
        except CorruptFileError as cause:
            number = job.chunk - int(np.searchsorted(self._file, job.file))
            where = f"chunk {number} of {'/'.join(self.place)}"
            raise corrupt(source.header.path, f"{cause.expected} in {where}", cause.got) from cause
