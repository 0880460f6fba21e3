"""Frame stores: rows of frames as tensors, from mapped files or from files read one by one; `cached.py`: from memory.

One rule: integers come in, rows go out; which frames a batch needs was decided elsewhere. A file that was there
when the index was made and cannot be read any more is a `LostBlockError`; other errors may pass, and lose nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import lcm
from pathlib import Path

import numpy as np
import torch

from storage.core.memory import BufferPool, sent, sent_together
from storage.core.threads import each
from storage.errors import UsageError

from ..blocks.block import Block, Identity
from ..blocks.block_header import DATA, FINAL, BlockHeader, corrupt, read_header
from ..blocks.row_layout import RowLayout
from ..blocks.trajectory_index import Int64s, Runs, TrajectoryIndex, counted_from
from . import mapped_files
from .chunk_decoder import CHUNK_CACHE_BYTES, ChunkFiles, RowCache
from .mapped_files import PAGE_BYTES, Arena

#: (table, column): one kind of row.
Place = tuple[str, str]
#: All of a block, as rows of one byte: chunks lie in them.
_WHOLE = ("", "")
#: What a file raises that is gone, or is another's now.
GONE = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)
_CPU = torch.device("cpu")
#: Measured with rows of 2 KB: moving a piece costs as much as this many bytes more (a window of 25
#: rows 1.02 of a memcpy, one row 1.57), and moving a broken one again this many times its bytes.
_BYTES_A_PIECE = 1100
_PATCH_COST = 2.2
_NO_PIECES = np.zeros(0, np.int64)
#: Memory for broken pieces on their way; so few rows are moved one by one instead.
_scratch, _FEW_ROWS = BufferPool(2), 256
#: The kernel allows 65,530 mappings a process by default; stay clear of it.
_MAX_MAPPINGS = 50_000
#: Memory of rows that are read once is let go of when they are this many bytes; a fault maps so much around it.
_MAX_READ_ONCE_BYTES, _MAPPED_AROUND_BYTES = 64 << 20, 64 << 10
#: Threads that ask the kernel for pages while the disk is the limit.
_NUM_ADVISERS = 4
#: With more runs than this, threads ask; runs, evenly spread, that are probed first: if all are in memory, none asks.
_FEW_RUNS, _NUM_PROBES = 8, 16


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


class FrameStore:
    """The rows of all trajectories of an index; the base of the stores below.

    Attributes:
        index: Which frames there are.
        layouts: Table -> row layout.
        device: Where the rows are.
        is_lost: bool `[M]`, trajectories that could not be read: their rows are asked for no more.
        read_header: Gives the header of a block file of the index.
        episode_tasks: The task of each trajectory, where the files are no blocks; None where they are.
        read_texts: Returns the texts of all text fields, where the files are no blocks; None where they are.
        episode_names: The name of the episode of each trajectory, likewise.
    """

    def __init__(self, index: TrajectoryIndex, layouts: Mapping[str, RowLayout], device: torch.device = _CPU) -> None:
        self.index = index
        self.layouts = layouts
        self.device = device
        self.is_lost = np.zeros(len(index), bool)
        self.read_header: Callable[[Block], BlockHeader] = _header_of
        self.episode_tasks: Sequence[str] | None = None
        self.read_texts: Callable[[], Iterable[str]] | None = None
        self.episode_names: Sequence[str] | None = None

    def locate(self, trajectory: Int64s, frame: Int64s, count: Int64s, target: Int64s) -> Runs:
        """Turn pieces of trajectories into runs of this store's rows (see `TrajectoryIndex.locate`)."""
        return self.index.locate(trajectory, frame, count, target)

    def copy(self, place: Place, runs: Runs, length: int, out: torch.Tensor) -> None:
        """Copy runs of rows of `row_bytes / 4` words into `out`, on `device` (see `gather`)."""
        gather(self._words(place), runs, self._first(place, runs), length, out)

    def rows(self, column: str, trajectory: Int64s, frame: Int64s, count: Int64s) -> torch.Tensor:
        """Read pieces of trajectories one after the other: `[sum of count, row_bytes]` uint8; new memory."""
        out = torch.empty((int(count.sum()), self.layouts[DATA].columns[column].row_bytes // 4), dtype=torch.int32)
        if len(out):
            self.copy((DATA, column), self.locate(trajectory, frame, count, np.cumsum(count) - count), 0, out)
            self.note_read_once(out.nbytes)
        return out.view(torch.uint8)

    def name_of(self, trajectory: int) -> str:
        """Name the episode of a trajectory; "writer:number" in block files."""
        if self.episode_names is not None:
            return self.episode_names[trajectory]
        writer, number = self.index.keys(np.array([trajectory]))[0]
        return f"{writer[writer.find(':') + 1 :]}:{number}"

    def file_of(self, column: str, trajectory: int, frame: int) -> Path:
        """Return the file that holds a column of a frame."""
        one = np.array([trajectory])
        runs = self.index.locate(one, np.array([frame]), np.ones_like(one), np.zeros_like(one))
        return self._file_of(self.index.blocks[int(runs.block[0])], (DATA, column), int(runs.row[0]))

    def _file_of(self, block: Block, place: Place, row: int) -> Path:
        return block.path

    def probe(self, trajectory: int) -> None:
        """Read the first frame of a trajectory: raise the `DataFileError` that reading it would raise."""
        for column in list(self.layouts[DATA].columns)[:1]:
            one = np.array([trajectory])
            self.rows(column, one, np.zeros_like(one), np.ones_like(one))

    def array(self, place: Place, rows: torch.Tensor) -> np.ndarray:
        """Return a field, (table, name), of rows of its column as numpy has it: bfloat16 as float32."""
        values = self.layouts[place[0]].decoded(place[1], rows)
        found: np.ndarray = (values.float() if values.dtype == torch.bfloat16 else values).numpy()
        return found

    def finals(self, column: str, trajectories: Int64s) -> torch.Tensor:
        """Final observation rows `[K, row_bytes]` uint8 of trajectories that have one; new memory."""
        block = self.index.final_block[trajectories]
        row = self.index.final_row[trajectories]
        runs = Runs(np.arange(len(trajectories)), block, row, np.ones(len(trajectories), np.int64))
        width = self.layouts[FINAL].columns[column].row_bytes // 4
        out = torch.empty((len(trajectories), width), dtype=torch.int32, device=self.device)
        self.copy((FINAL, column), runs, 1, out)
        return out.view(torch.uint8)

    def will_need(self, runs: Runs) -> None:
        """Have rows fetched in the background, where that helps."""

    def note_read_once(self, num_bytes: int) -> None:
        """Count bytes of rows that are not read again, so that their memory is let go of."""

    def _words(self, place: Place) -> torch.Tensor:
        raise UsageError("read rows", f"of {type(self).__name__}", "a store that keeps rows as one tensor")

    def _first(self, place: Place, runs: Runs) -> Int64s:
        return runs.row


def _header_of(block: Block) -> BlockHeader:
    return read_header(block.path)


class FileMap:
    """The mapped rows and chunks of many blocks, one arena for each kind of row; grows as blocks come.

    `chunk_cache_bytes` of decoded chunks are kept at most.
    """

    def __init__(
        self, layouts: Mapping[str, RowLayout], blocks: Sequence[Block], chunk_cache_bytes: int = CHUNK_CACHE_BYTES
    ) -> None:
        self.layouts = layouts
        self.places = [(table, column) for table, layout in layouts.items() for column in layout.columns]
        coded = [(table, column) for table, column in self.places if layouts[table].columns[column].is_coded]
        self.places += [_WHOLE] if coded else []
        plain = [place for place in self.places if place not in coded]
        self.arenas = {place: Arena(self._row_bytes(place), self._size(place, blocks)) for place in plain}
        cache = RowCache(chunk_cache_bytes)
        self.chunks = {place: ChunkFiles(place, self._row_bytes(place), self.arenas[_WHOLE], cache) for place in coded}
        #: What is mapped: the block and the first row of each kind.
        self.mapped: dict[Identity, tuple[Block, list[int]]] = {}
        self.num_unmapped = 0

    def unmap(self, identities: Iterable[Identity]) -> None:
        """Unmap blocks: stores that know them raise a `LostBlockError` instead of reading them."""
        for block, rows in map(self.mapped.pop, identities):
            for place, first in zip(self.places, rows, strict=True):
                (self.chunks.get(place) or self.arenas[place]).unmap(first, self._at(block, place)[1])
            self.num_unmapped += 1

    def has_room(self, blocks: Sequence[Block]) -> bool:
        """Return whether those of the blocks that are not mapped yet fit."""
        new = [block for block in blocks if block.identity not in self.mapped]
        return all(mapped.free_bytes >= self._size(place, new) for place, mapped in self.arenas.items())

    def _row_bytes(self, place: Place) -> int:
        return 1 if place == _WHOLE else self.layouts[place[0]].columns[place[1]].row_bytes

    def _at(self, block: Block, place: Place) -> tuple[int, int]:
        """Where the rows of a place begin in the file, and how many they are."""
        return (0, block.file_bytes) if place == _WHOLE else block.places[place]

    def _size(self, place: Place, blocks: Sequence[Block]) -> int:
        """Address space that blocks need at most: rows, and the gap before each by which it is aligned."""
        row_bytes = self._row_bytes(place)
        return sum(self._at(block, place)[1] * row_bytes + lcm(row_bytes, PAGE_BYTES) + PAGE_BYTES for block in blocks)

    def add(self, block: Block) -> None:
        """Map a block, unless it is mapped already: then it may even be gone.

        Raises:
            FileNotFoundError: It is gone and was not mapped before.
            CorruptFileError: It is too short.
        """
        if block.identity in self.mapped:
            return
        header = read_header(block.path) if self.chunks else None
        if header is not None and header.file_bytes != block.file_bytes:
            raise corrupt(block.path, f"{block.file_bytes} bytes", str(header.file_bytes))
        rows = {place: mapped.map_file(block.path, *self._at(block, place)) for place, mapped in self.arenas.items()}
        if header is not None:
            rows |= {place: chunks.add(header, rows[_WHOLE]) for place, chunks in self.chunks.items()}
        self.mapped[block.identity] = block, [rows[place] for place in self.places]


def can_map(blocks: Iterable[Block]) -> bool:
    """Return whether all these blocks can be mapped at once on this machine."""
    return mapped_files.is_supported and sum(len(block.places) for block in blocks) <= _MAX_MAPPINGS


class MappedFrames(FrameStore):
    """Rows of block files through memory maps: the page cache is the memory, nothing is copied twice.

    Rows of coded components are decoded from their chunks (see `coded.py`).
    """

    def __init__(self, index: TrajectoryIndex, layouts: Mapping[str, RowLayout], files: FileMap) -> None:
        super().__init__(index, layouts)
        self.files = files
        nowhere = (None, [0] * len(files.places))
        rows = np.array([files.mapped.get(block.identity, nowhere)[1] for block in index.blocks], np.int64)
        #: For each kind of row, the number of each block's first row, int64 `[B]`.
        rows = rows.reshape(len(index.blocks), len(files.places)).T.copy()
        self._first_rows: dict[Place, Int64s] = dict(zip(files.places, rows, strict=True))
        self._num_unmapped = -1
        self._num_read_once = 0
        self._is_unmapped: np.ndarray | None = None  # of each block, if one is

    def copy(self, place: Place, runs: Runs, length: int, out: torch.Tensor) -> None:
        if self._num_unmapped != self.files.num_unmapped:
            self._num_unmapped = self.files.num_unmapped
            is_unmapped = np.array([block.identity not in self.files.mapped for block in self.index.blocks])
            self._is_unmapped = is_unmapped if is_unmapped.any() else None
        if self._is_unmapped is not None and (lost := self._is_unmapped[runs.block]).any():
            raise self.index.lost_block(int(runs.block[np.argmax(lost)]), "it was removed")
        if place in self.files.chunks:
            self.files.chunks[place].copy(self._first(place, runs), runs, out)
        else:
            super().copy(place, runs, length, out)

    def will_need(self, runs: Runs) -> None:
        for place in self.files.places:
            if place[0] == DATA:
                files = self.files.chunks.get(place) or self.files.arenas[place]
                _advise(files, self._first(place, runs), runs.num_rows)

    def note_read_once(self, num_bytes: int) -> None:
        self._num_read_once += max(num_bytes, _MAPPED_AROUND_BYTES)
        if self._num_read_once >= _MAX_READ_ONCE_BYTES:
            self._num_read_once = 0
            for mapped in self.files.arenas.values():
                mapped.let_go()

    def is_resident(self, runs: Runs) -> bool:
        """Return whether the first rows of runs are in memory, those that are stored as they are."""
        arenas = [(place, mapped) for place, mapped in self.files.arenas.items() if place[0] == DATA]
        return all(mapped.is_resident(row) for place, mapped in arenas for row in self._first(place, runs).tolist())

    def _words(self, place: Place) -> torch.Tensor:
        return self.files.arenas[place].words_view

    def _first(self, place: Place, runs: Runs) -> Int64s:
        return self._first_rows[place][runs.block] + runs.row


def _advise(files: Arena | ChunkFiles, first: Int64s, num_rows: Int64s) -> None:
    """Ask the kernel for runs of rows, as far as they are not in memory."""
    if isinstance(files, Arena):
        # The middle: pages at the ends are shared with rows that others have asked for.
        middle = (first + num_rows // 2).tolist()
        if all(map(files.is_resident, middle[:: max(1, len(middle) // _NUM_PROBES)])):
            return
        is_away = [not files.is_resident(row) for row in middle]
        first = first[is_away]
        num_rows = num_rows[is_away]
    # Asking takes the kernel about 0.1 ms for 256 KiB that are not in memory: more threads, more in flight.
    num_parts = 1 if len(first) <= _FEW_RUNS else _NUM_ADVISERS
    parts = [(first[part::num_parts], num_rows[part::num_parts]) for part in range(num_parts)]
    each(lambda part: files.will_need(*part), parts, num_parts)
