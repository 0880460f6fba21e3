"""Rows of remote blocks: fetched by parallel requests, cached in bounded memory, then gathered.

A `Stock` fetches rows together; adjacent rows share a request. Callers create stocks to prefetch
rows that they need soon. Other rows are fetched when they are read, also in parallel.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from storage.core.durable_files import crc32
from storage.core.memory import BufferPool
from storage.errors import CorruptFileError

from ...blocks.block_header import DATA, FINAL, corrupt, row_ranges
from ...blocks.chunk_table import ChunkTable
from ...blocks.row_layout import RowLayout
from ...blocks.trajectory_index import Int64s, Runs, TrajectoryIndex
from ...remote.fetcher import Request
from ...remote.piece_checksums import PieceSums, rows_of_a_unit
from ...remote.remote_folder import RemoteFolder
from .gather_rows import gather
from .row_source import GONE, FetchedRows, Place, Rows, RowSource

#: Exclusive upper limit of the rows of a block. The rows of all blocks are numbered block * _ROWS +
#: row.
_ROWS = 1 << 40
#: Maximum gap between rows that share a request, as a fraction of `chunk_bytes`. Fetching a smaller
#: gap costs less than another request.
_GAP = 1 / 32
#: Bytes per request for final observations.
_FINAL_BYTES = 64 << 10
#: Maximum number of cached groups of fetched rows. It is small, since each read searches all groups.
_MAX_STOCKS = 64


class Stock(FetchedRows):
    """Rows of one column that are fetched together into one piece of memory.

    Creating a stock sends all requests.

    Args:
        source: Source of the rows.
        place: The (table, column) pair.
        runs: The rows to fetch. Runs that overlap or are close together share requests.
    """

    def __init__(self, source: RemoteBlocks, place: Place, runs: Runs) -> None:
        self.place = place
        self._source = source
        row_bytes = source.layouts[place[0]].columns[place[1]].row_bytes
        first = runs.block * _ROWS + runs.row
        order = np.argsort(first, kind="stable")
        first = first[order]
        stop = np.maximum.accumulate(first + runs.num_rows[order])
        # A run belongs to the extent of the runs before it if the gap between them is small.
        max_gap = int(_GAP * source.options.chunk_bytes / row_bytes)
        is_head = np.ones(len(first), bool)
        is_head[1:] = first[1:] > stop[:-1] + max_gap
        heads = np.flatnonzero(is_head)
        #: First row, stop row and position in `words` of each extent, int64 `[E]`. An extent is a
        #: range of adjacent rows.
        self._first = first[heads]
        self._stop = stop[np.append(heads[1:], len(first)) - 1]
        counts = self._stop - self._first
        self._base = np.cumsum(counts) - counts
        self.words = source.memory.empty((int(counts.sum()), row_bytes // 4), torch.int32)
        self.is_lost = False
        self._requests: list[tuple[int, Request]] = []
        #: Fetched rows that are not yet compared with checksums: (block, first row, rows).
        self._passing: list[tuple[int, int, torch.Tensor]] = []
        extents = zip(self._first.tolist(), counts.tolist(), self._base.tolist(), strict=True)
        for start, count, base in extents:
            block, row = divmod(start, _ROWS)
            self._request(block, row, self.words[base : base + count])

    def _request(self, block: int, first: int, words: torch.Tensor) -> None:
        """Send the requests for rows of a block.

        Args:
            block: Position of the block in the index.
            first: First row to fetch.
            words: Output, int32 `[num_rows, row_bytes / 4]`.
        """
        stop = first + len(words)
        row_bytes = words.shape[1] * words.element_size()
        unit = rows_of_a_unit(row_bytes)
        step = max(1, self._source.options.chunk_bytes // row_bytes // unit) * unit
        # Requests end where a piece with a checksum ends, so no piece is fetched twice.
        cuts = range(first // unit * unit + step, stop, step)
        for low, high in pairwise([first, *cuts, stop]):
            part = words[low - first : high - first]
            request = self._source.request(self.place, block, low, high, part)
            self._passing.append((block, low, part))
            if request is not None:
                self._requests.append((block, request))

    @property
    def num_bytes(self) -> int:
        return self.words.numel() * self.words.element_size()

    def copy(self, runs: Runs, length: int, out: torch.Tensor) -> Runs:
        """Copy all requested rows that this stock contains to `out`; return the remaining runs.

        The arguments are as in `gather`.
        """
        if self.is_lost or not len(self._first):
            return runs
        key = runs.block * _ROWS + runs.row
        extent = np.maximum(self._first.searchsorted(key, side="right") - 1, 0)
        inside = np.minimum(self._stop[extent] - key, runs.num_rows)
        count: Int64s = np.where(key >= self._first[extent], np.maximum(inside, 0), 0)
        here = np.flatnonzero(count > 0)
        if not len(here):
            return runs
        self.wait()
        if self.is_lost:  # Another thread waited for the same rows, and a request failed.
            return runs
        first = self._base[extent] + key - self._first[extent]
        if len(here) == len(count) and (count == runs.num_rows).all():
            gather(self.words, runs, first, length, out)
            return Runs(*(column[:0] for column in runs))
        part = Runs(runs.target[here], runs.block[here], runs.row[here], count[here])
        gather(self.words, part, first[here], 0, out)
        left = count < runs.num_rows
        moved = runs.target + count, runs.block, runs.row + count, runs.num_rows - count
        return Runs(*(column[left] for column in moved))

    def wait(self) -> None:
        """Wait until all rows are fetched and check them. After an error, the stock is unusable."""
        try:
            for block, request in self._requests:
                self._source.wait(block, request)
            for block, row, words in self._passing:
                self._source.compare(self.place, block, row, words)
        except BaseException:
            self.is_lost = True
            raise
        self._requests = []
        self._passing = []

    def drop(self) -> None:
        """Cancel all requests; the stock is unusable afterwards."""
        self.is_lost = True
        for _, request in self._requests:
            request.forget()


class RemoteBlocks(RowSource):
    """Rows of remote blocks. Chunks of compressed columns are decoded when they arrive.

    Args:
        index: Index of the trajectories.
        layouts: Maps tables to row layouts.
        folders: Folders of the blocks.

    Attributes:
        memory: Memory pool of the stocks.
    """

    def __init__(
        self,
        index: TrajectoryIndex,
        layouts: Mapping[str, RowLayout],
        folders: Sequence[RemoteFolder],
    ) -> None:
        super().__init__(index, layouts)
        self._folders = by_path = {folder.data_dir: folder for folder in folders}
        self.read_header = lambda block: by_path[block.path.parent].read_header(
            block.path, block.file_bytes
        )
        self.options = folders[0].files.options
        self.memory = BufferPool(8)
        #: Weak references to rows that callers have fetched. The tuple is replaced, not changed,
        #: since several threads read it.
        self._fetched: tuple[weakref.ref[Stock], ...] = ()
        self._kept: deque[Stock] = deque(maxlen=_MAX_STOCKS)
        self._tables: dict[tuple[int, Place], ChunkTable] = {}
        self._fragments: dict[tuple[int, Place], FragmentRows | None] = {}
        self._lock = threading.Lock()

    def _copy(self, place: Place, runs: Runs, length: int, out: torch.Tensor) -> None:
        left = runs
        for _ in range(2):  # Repeat, since the second part of a run may be in an earlier stock.
            for stock in [*[known() for known in self._fetched], *reversed(self._kept)]:
                if stock is not None and stock.place == place and len(left.row):
                    left = stock.copy(left, length if left is runs else 0, out)
        for part in self._portions(place, left):
            stock = Stock(self, place, self._widened(part, place) if place[0] == FINAL else part)
            is_all = left is runs and len(part.row) == len(runs.row)
            rest = stock.copy(part, length if is_all else 0, out)
            assert not len(rest.row), "a stock has what it was made for"
            self._keep(stock)

    def prefetch(self, rows: Rows) -> None:
        runs = self.locate(rows)
        for name in self.layouts[DATA].columns if len(runs.row) else ():
            self._keep(Stock(self, (DATA, name), runs))

    def fetch_rows(self, column: str, rows: Rows) -> Stock:
        return self._fetch((DATA, column), self.locate(rows))

    def fetch_final_rows(self, column: str, episodes: Int64s) -> Stock:
        return self._fetch((FINAL, column), self.locate_finals(episodes))

    def _fetch(self, place: Place, runs: Runs) -> Stock:
        """Fetch rows into a new stock. Reads use the stock as long as the caller keeps it."""
        stock = Stock(self, place, runs)
        living = [known for known in self._fetched if known() is not None]
        self._fetched = (*living, weakref.ref(stock))
        return stock

    def is_resident(self, rows: Rows) -> bool:
        return False

    def stretch_bytes(self, num_envs: int) -> int:
        # The prefetched rows of all envs together may use a quarter of the cache.
        return max(
            1 << 12, min(self.options.chunk_bytes, self.options.kept_bytes // (4 * num_envs))
        )

    def request(
        self, place: Place, block: int, start: int, stop: int, out: torch.Tensor
    ) -> Request | None:
        """Send a request that writes rows `start:stop` of a block to `out`.

        Args:
            place: The (table, column) pair.
            block: Position of the block in the index.
            start, stop: Range of rows.
            out: int32 `[stop - start, row_bytes / 4]`.

        Returns:
            The request; None if the block stores no bytes for these rows, which are then zero.
        """
        at = self.index.blocks[block]
        rows = out.numpy().view(np.uint8)
        ask = partial(self._folders[at.path.parent].files.ask, at.path)
        sums = self._sums_of(block)
        column = self.layouts[place[0]].columns[place[1]]
        if not column.is_coded:
            offset = at.places[place][0]
            first = offset + start * column.row_bytes
            last = offset + stop * column.row_bytes
            fragments = self._fragments_of(block, place)
            if sums is not None and fragments is not None and fragments.are_whole(start, stop):
                return ask(first, last, partial(fragments.put, start, rows))
            return ask(first, last, partial(_put, rows), sums)
        table = self._table(block, place)
        first = int(table.rows.searchsorted(start, side="right")) - 1
        last = int(table.rows.searchsorted(stop))
        low = int(table.places[first])
        high = int(table.places[last])
        if low == high:
            rows[:] = 0
            return None
        decode = partial(_decode, table, (start, stop), low, (at.path, place), rows)
        has_own_sums = bool((table.sums[first:last] >= 0).all())
        return ask(low, high, decode, None if has_own_sums else sums)

    def wait(self, block: int, request: Request) -> None:
        """Wait for a request of rows of a block.

        Raises:
            LostBlockError: The block was deleted.
            AccessError: The store denies access.
            FetchError: The rows could not be fetched.
            CorruptFileError: The block is truncated, or a chunk is damaged.
        """
        with self._may_be_gone(block):
            self._folders[self.index.blocks[block].path.parent].files.fetcher.wait(request)

    def compare(self, place: Place, block: int, row: int, words: torch.Tensor) -> None:
        """Check fetched rows against the checksums of the fragments to which they belong.

        A checksum is compared as soon as all rows of the fragment have arrived.

        Nothing is done for blocks with a checksum file, since their bytes are checked on arrival.

        Raises:
            CorruptFileError: The checksum of a fragment is wrong.
        """
        fragments = self._fragments_of(block, place)
        if fragments is None or not len(words) or self._sums_of(block) is not None:
            return
        with self._lock:
            fragments.take(row, words.numpy().view(np.uint8))

    def _sums_of(self, block: int) -> PieceSums | None:
        """Return the checksum file of a block; None if the block has no such file."""
        at = self.index.blocks[block]
        return self._folders[at.path.parent].sums_of(at.path, at.file_bytes)

    def _fragments_of(self, block: int, place: Place) -> FragmentRows | None:
        """Return the object that compares rows of a column with the checksums of fragments.

        The result is None if the column is compressed, since its chunks have their own checksums.
        It is also None if the checksums of the fragments are unknown.
        """
        with self._lock:
            if (block, place) not in self._fragments:
                self._fragments[block, place] = self._new_fragments(block, place)
            return self._fragments[block, place]

    def _new_fragments(self, block: int, place: Place) -> FragmentRows | None:
        table, name = place
        at = self.index.blocks[block]
        columns = self.layouts[table].columns
        if at.fragment_sums is None or columns[name].is_coded:
            return None
        fragments, sums = at.fragment_sums
        sums_of_column = sums[table][:, list(columns).index(name)]
        return FragmentRows(at.path, place, row_ranges(table, fragments), sums_of_column)

    @contextmanager
    def _may_be_gone(self, block: int) -> Iterator[None]:
        try:
            yield
        except GONE as cause:
            self._folders[self.index.blocks[block].path.parent].files.check_access()
            raise self.index.lost_block(block) from cause

    def _table(self, block: int, place: Place) -> ChunkTable:
        """Return the chunk table of a compressed column. The block's header is read once."""
        if (block, place) not in self._tables:
            with self._may_be_gone(block):
                header = self.read_header(self.index.blocks[block])
            for table, chunks in header.chunks.items():
                self._tables |= {
                    (block, (table, name)): chunk_table for name, chunk_table in chunks.items()
                }
        return self._tables[block, place]

    def _keep(self, stock: Stock) -> None:
        self._kept.append(stock)
        limit = max(self.options.kept_bytes, 3 * stock.num_bytes)
        while sum(group.num_bytes for group in self._kept) > limit:
            self._kept.popleft()

    def _portions(self, place: Place, runs: Runs) -> Iterator[Runs]:
        """Divide runs of rows into groups that fit into the cache. A large run is its own group."""
        size = runs.num_rows * self.layouts[place[0]].columns[place[1]].row_bytes
        number = np.cumsum(size) // (self.options.kept_bytes // 2)
        for cut in (
            np.split(np.arange(len(size)), np.flatnonzero(np.diff(number)) + 1) if len(size) else ()
        ):
            yield Runs(*(column[cut] for column in runs))

    def _widened(self, runs: Runs, place: Place) -> Runs:
        """Extend runs of final observations to adjacent rows, which are usually read soon."""
        unit = max(1, _FINAL_BYTES // self.layouts[FINAL].columns[place[1]].row_bytes)
        num_rows = np.array(
            [self.index.blocks[block].places[place][1] for block in runs.block.tolist()]
        )
        first = runs.row // unit * unit
        return Runs(runs.target, runs.block, first, np.minimum(first + unit, num_rows) - first)


class FragmentRows:
    """Checks the rows of one column of a block against the checksums of its F fragments.

    Rows may arrive as complete fragments (`put`), or in parts in ascending order (`take`).

    Args:
        path: The block.
        place: The (table, column) pair.
        ranges: First and stop row of each fragment, int64 `[F]` each.
        sums: CRC-32 of the rows of each fragment, uint32 `[F]`.
    """

    def __init__(
        self, path: Path, place: Place, ranges: tuple[np.ndarray, np.ndarray], sums: np.ndarray
    ) -> None:
        first, stop = ranges
        order = np.flatnonzero(stop > first)
        order = order[np.argsort(first[order], kind="stable")]
        self._path = path
        self._place = place
        self._first = first[order]
        self._stop = stop[order]
        self._sums = sums[order]
        #: Maps incomplete fragments to (next expected row, CRC-32 of the earlier rows).
        self._passed: dict[int, tuple[int, int]] = {}
        self._damaged: dict[int, CorruptFileError] = {}

    def are_whole(self, start: int, stop: int) -> bool:
        """Return whether rows `start:stop` are exactly one or several complete fragments."""
        begin, end = self._numbers(start, stop)
        return begin < end and self._first[begin] == start and self._stop[end - 1] == stop

    def put(self, row: int, out: np.ndarray, data: bytes) -> None:
        """Copy the rows of complete fragments from `data` to `out` and check their checksums.

        Args:
            row: First row of the block in `data`.
            out: uint8 `[n, row_bytes]`.
            data: Bytes of the rows.

        Raises:
            CorruptFileError: The checksum of a fragment is wrong.
        """
        _put(out, data)
        for number in range(*self._numbers(row, row + len(out))):
            part = out[self._first[number] - row : self._stop[number] - row]
            self._check(number, crc32(np.ascontiguousarray(part)))

    def take(self, row: int, rows: np.ndarray) -> None:
        """Continue the checksums of fragments with the next rows, uint8 `[n, row_bytes]`.

        `row` is the number of the first of these rows. A checksum is compared at the end of its
        fragment.

        Rows that were added before, or are not the next expected rows, are ignored.

        Raises:
            CorruptFileError: The checksum of a fragment is wrong.
        """
        end = row + len(rows)
        for number in range(*self._numbers(row, end)):
            if number in self._damaged:  # Reading the rows in another order must fail, too.
                raise self._damaged[number]
            done, checksum = self._passed.get(number, (int(self._first[number]), 0))
            upto = min(end, int(self._stop[number]))
            if not row <= done < upto:
                continue
            checksum = crc32(np.ascontiguousarray(rows[done - row : upto - row]), checksum)
            self._passed[number] = upto, checksum
            if upto < self._stop[number]:
                continue
            del self._passed[number]
            try:
                self._check(number, checksum)
            except CorruptFileError as problem:
                self._damaged[number] = problem
                raise

    def _numbers(self, start: int, stop: int) -> tuple[int, int]:
        """Return the positions (first, stop) of the fragments that overlap rows `start:stop`."""
        return int(self._stop.searchsorted(start, side="right")), int(
            self._first.searchsorted(stop)
        )

    def _check(self, number: int, checksum: int) -> None:
        if checksum != self._sums[number]:
            rows = f"rows {self._first[number]}:{self._stop[number]} of {'/'.join(self._place)}"
            expected = f"{int(self._sums[number]):08x}"
            problem = f"{rows}, expected checksum {expected}, got {checksum:08x}"
            raise corrupt(self._path, problem)


def _put(rows: np.ndarray, data: bytes) -> None:
    rows.reshape(-1)[:] = np.frombuffer(data, np.uint8)


def _decode(
    table: ChunkTable,
    rows: tuple[int, int],
    first: int,
    where: tuple[Path, Place],
    out: np.ndarray,
    data: bytes,
) -> None:
    """Decode rows of a compressed column to `out`.

    Args:
        table: Chunk table of the column.
        rows: First and stop row.
        first: Byte offset of `data` in the block.
        where: The block and its column, for errors.
        out: uint8 `[n, row_bytes]`.
        data: Bytes of all chunks with these rows.
    """
    path, place = where
    try:
        out[:] = table.read(
            *rows, lambda start, stop: np.frombuffer(data, np.uint8)[start - first : stop - first]
        )
    except CorruptFileError as cause:
        raise corrupt(path, f"{'/'.join(place)}, {cause.message}") from cause
