"""Chunk files: the rows of a coded component over many blocks, decoded when they are asked for.

One rule: a call decodes each chunk that it touches once; a chunk that is wanted whole goes straight to the
output, of the others the decoded frames are kept for the next call, within a fixed number of bytes.
"""

from __future__ import annotations

import mmap
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from storage.errors import CorruptFileError
from storage.work_split import WorkSplit

from .block_header import BlockHeader, corrupt, read_header
from .chunk_table import ChunkTable
from .index import Block, Int64s, Runs

#: How much of decoded chunks is kept by default, over all components of a dataset.
CACHE_BYTES = 512 << 20
_MADV_WILLNEED: int | None = getattr(mmap, "MADV_WILLNEED", None)


class ChunkCache:
    """Decoded chunks by key, the least recently used given up first; for several threads.

    Attributes:
        max_bytes: How much is kept at most.
        num_bytes: How much is kept.
    """

    def __init__(self, max_bytes: int = CACHE_BYTES) -> None:
        self.max_bytes, self.num_bytes = max_bytes, 0
        self._kept: OrderedDict[Any, np.ndarray] = OrderedDict()
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        """Decoded chunks can be decoded again: a pickled cache arrives empty."""
        return {"max_bytes": self.max_bytes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["max_bytes"])  # type: ignore[misc]

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


@dataclass(frozen=True, eq=False)
class _Pieces:
    """Parts of chunks and where they go; sorted by chunk, `bounds` cut them into those of one chunk each."""

    chunk: list[int]
    low: list[int]
    count: list[int]
    target: list[int]
    bounds: list[int]

    @classmethod
    def of(cls, first_row: Int64s, first: Int64s, runs: Runs) -> _Pieces:
        """Cut runs of rows, starting at `first`, at the bounds of chunks, vectorized."""
        stop = first + runs.num_rows
        begin = np.searchsorted(first_row, first, side="right") - 1
        num = np.searchsorted(first_row, stop, side="left") - begin
        run = np.repeat(np.arange(len(first)), num)
        chunk = begin[run] + np.arange(len(run)) - np.repeat(np.cumsum(num) - num, num)
        order = np.argsort(chunk, kind="stable")
        run, chunk = run[order], chunk[order]
        low, high = np.maximum(first_row[chunk], first[run]), np.minimum(first_row[chunk + 1], stop[run])
        target = runs.target[run] + low - first[run]
        bounds = np.append(np.flatnonzero(np.diff(chunk, prepend=-1)), len(chunk))
        columns = (chunk, low - first_row[chunk], high - low, target, bounds)
        return cls(*(column.tolist() for column in columns))


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
        self._files: list[MappedFile] = []
        self._tables: list[ChunkTable] = []
        #: Number of the first chunk, and of the first row, of each file; the last entries are the totals.
        self._first_chunk, self._first_row = [0], [0]
        self._chunk_rows = np.zeros(1, np.int64)

    def add(self, file: MappedFile) -> int:
        """Take the chunks of one more block; give the number of its first row."""
        table = file.header.chunks[self.place[0]][self.place[1]]
        start = self._first_row[-1]
        self._files.append(file)
        self._tables.append(table)
        self._chunk_rows = np.concatenate([self._chunk_rows[:-1], table.rows + start])
        self._first_chunk.append(len(self._chunk_rows) - 1)
        self._first_row.append(int(self._chunk_rows[-1]))
        return start

    def copy(self, first: Int64s, runs: Runs, out: torch.Tensor) -> None:
        """Decode rows into `out`.

        Args:
            first: int64 `[R]`, number of the first row of each run, as counted by `add`.
            runs: Where they go and how many they are.
            out: `[rows, row_bytes / 4]` int32 on the CPU.

        Raises:
            CorruptFileError: A chunk is damaged; the text names it.
        """
        if not len(first):
            return
        pieces = _Pieces.of(self._chunk_rows, first, runs)
        target = out.view(torch.uint8).numpy()

        def decode(start: int, stop: int) -> None:
            for number in range(start, stop):
                self._put(pieces, pieces.bounds[number], pieces.bounds[number + 1], target)

        num_chunks = len(pieces.bounds) - 1
        num_bytes = num_chunks * self._mean_rows() * self.row_bytes
        self._splits.run(decode, num_chunks, num_bytes, (self.place, (num_bytes // max(1, num_chunks)).bit_length()))

    def will_need(self, first: Int64s, num_rows: Int64s) -> None:
        """Have the chunks of rows fetched from the disk in the background."""
        begin = np.searchsorted(self._chunk_rows, first, side="right") - 1
        end = np.searchsorted(self._chunk_rows, first + num_rows, side="left")
        for low, high in zip(begin.tolist(), end.tolist(), strict=True):
            file = self._file_of(low)
            places, base = self._tables[file].places, self._first_chunk[file]
            self._files[file].will_need(int(places[low - base]), int(places[high - base]))

    def _mean_rows(self) -> int:
        return max(1, self._first_row[-1] // max(1, self._first_chunk[-1]))

    def _file_of(self, chunk: int) -> int:
        return int(np.searchsorted(self._first_chunk, chunk, side="right")) - 1

    def _put(self, pieces: _Pieces, start: int, stop: int, target: np.ndarray) -> None:
        """Decode one chunk and copy its pieces `start:stop`."""
        chunk = pieces.chunk[start]
        file = self._file_of(chunk)
        number = chunk - self._first_chunk[file]
        num_rows = int(self._tables[file].rows[number + 1] - self._tables[file].rows[number])
        key = (self.place, chunk)
        rows = self.cache.get(key)
        if rows is None and stop - start == 1 and pieces.count[start] == num_rows:
            place = pieces.target[start]
            self._decode(file, number, target[place : place + num_rows])
            return
        if rows is None:
            rows = np.empty((num_rows, self.row_bytes), np.uint8)
            self._decode(file, number, rows)
            self.cache.put(key, rows)
        for piece in range(start, stop):
            low, count, place = pieces.low[piece], pieces.count[piece], pieces.target[piece]
            target[place : place + count] = rows[low : low + count]

    def _decode(self, file: int, number: int, rows: np.ndarray) -> None:
        table, source = self._tables[file], self._files[file]
        start, stop = int(table.places[number]), int(table.places[number + 1])
        try:
            table.decode(source.bytes[start:stop], rows)
        except CorruptFileError as cause:
            path, (name, column) = source.header.path, self.place
            where = f"chunk {number} of {name}/{column}"
            raise corrupt(path, f"{cause.expected} in {where}", cause.got) from cause
