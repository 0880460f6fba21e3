"""Frame stores in memory: copies of whole trajectories, and rows of other systems' files that are read when needed.

A copy of trajectories belongs to one process, or is shared by all workers of a machine. It lists the trajectories that
could not be read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from storage.core.durable_files import crc32
from storage.core.memory import BufferPool, sent
from storage.errors import DataFileError, UnansweredError, UsageError

from ..blocks.block import Block
from ..blocks.block_header import DATA, FINAL, read_header
from ..blocks.missing_trajectories import is_stand_in
from ..blocks.row_layout import RowLayout
from ..blocks.trajectory_index import Int64s, LostBlockError, Runs, TrajectoryIndex
from .chunk_decoder import CHUNK_CACHE_BYTES, RowCache
from .frame_store import GONE, FrameStore, Place
from .shared_memory import SharedMemory, Spot, shared_memory

#: Reads all rows of a block: `[num_rows, row_bytes]` uint8.
ReadRows = Callable[[Block, Place], np.ndarray]
#: Reads the rows `start:stop` of a block: `[stop - start, row_bytes]` uint8.
ReadPart = Callable[[Block, Place, int, int], np.ndarray]
#: Of a damaged block with many rows, so many are tried. If none of them can be read, the others are not tried.
_NUM_SAMPLES = 8
_MANY_ROWS = 64
#: Runs that are copied at once: index arrays stay small beside the data.
_NUM_RUNS = 4096


class SharedFrames(NamedTuple):
    """Where other processes find the frames that one process has cached.

    Attributes:
        spot: The shared memory.
        trajectories: int64 `[K]`, numbers of the cached trajectories.
        content: Checksum of the index that these numbers belong to; see `_content`.
        lost: int64, numbers of the trajectories that could not be read.
    """

    spot: Spot
    trajectories: Int64s
    content: int
    lost: Int64s


class CachedFrames(FrameStore):
    """Rows of some trajectories copied into memory of one device, each trajectory in one piece.

    Args:
        source: Where the rows come from.
        trajectories: int64 `[K]`, which trajectories; only these can be read.
        device: Where to keep them.
        is_shared: Other processes are going to map them; see `shared` and `mapped`.
        memory: Where another process has put the rows of just these trajectories.
    """

    def __init__(
        self,
        source: FrameStore,
        trajectories: Int64s,
        device: torch.device,
        is_shared: bool = False,
        memory: SharedMemory | None = None,
    ) -> None:
        super().__init__(source.index, source.layouts, device)
        self.is_lost = source.is_lost
        is_there = memory is not None
        self.read_header = source.read_header
        self.episode_tasks = source.episode_tasks
        self.read_texts = source.read_texts
        self.episode_names = source.episode_names
        trajectories = trajectories if is_there else trajectories[~self.is_lost[trajectories]]
        self._trajectories = trajectories
        lengths = source.index.lengths[trajectories]
        self._first_row = np.full(len(source.index), -1, np.int64)
        self._first_row[trajectories] = np.cumsum(lengths) - lengths
        has_final = trajectories[source.index.final_row[trajectories] >= 0]
        self._final_row = np.full(len(source.index), -1, np.int64)
        self._final_row[has_final] = np.arange(len(has_final))
        shapes = {
            (table, name): (num_rows, column.row_bytes // 4)
            for table, num_rows in ((DATA, int(lengths.sum())), (FINAL, len(has_final)))
            for name, column in self.layouts[table].columns.items()
        }
        needed = int(lengths.sum()) * self.layouts[DATA].frame_bytes
        free = free_memory_bytes() if device.type == "cpu" and not is_there else None
        if free is not None and needed > 0.9 * free:
            expected = f"at most 90 % of the free {free / 2**30:.1f} GiB"
            got = f"{needed / 2**30:.1f} GiB"
            raise UsageError("cache the dataset in memory", "", expected, got, "Use cache='none'")
        self._memory = self._shared_memory(shapes.values()) if is_shared else memory
        self._rows: dict[Place, torch.Tensor] = {}
        runs = source.locate(trajectories, np.zeros_like(lengths), lengths, np.cumsum(lengths) - lengths)
        for (table, name), shape in shapes.items():
            rows = self._empty(shape)
            for first in range(0, 0 if is_there or table == FINAL else len(runs.target), _NUM_RUNS):
                part = Runs(*(values[first : first + _NUM_RUNS] for values in runs))
                start = int(part.target[0])
                stop = int(part.target[-1] + part.num_rows[-1])
                source.copy((DATA, name), part._replace(target=part.target - start), 1, rows[start:stop])
            if table == FINAL and not is_there:
                rows.copy_(source.finals(name, has_final).view(torch.int32))
            self._rows[table, name] = rows.to(device)

    @classmethod
    def mapped(cls, source: FrameStore, shared: SharedFrames | None) -> CachedFrames | None:
        """Map what another process has cached; None where it is of another index, or is there no more."""
        if shared is None or shared.content != _content(source.index):
            return None
        try:
            memory = SharedMemory(spot=shared.spot)
        except OSError:  # that process has gone on, or away
            return None
        source.is_lost[shared.lost] = True
        return cls(source, shared.trajectories, torch.device("cpu"), memory=memory)

    def shared(self) -> SharedFrames | None:
        """Move the frames to shared memory and return where other processes find them; None if they cannot be."""
        if self._memory is None:
            self._memory = self._shared_memory([rows.shape for rows in self._rows.values()])
            for place, rows in self._rows.items() if self._memory is not None else ():
                self._rows[place] = self._empty(rows.shape).copy_(rows)
        if self._memory is None or self._memory.spot is None:
            return None
        lost = np.flatnonzero(self.is_lost)
        return SharedFrames(self._memory.spot, self._trajectories, _content(self.index), lost)

    def _shared_memory(self, shapes: Iterable[Sequence[int]]) -> SharedMemory | None:
        """Make shared memory for rows of these shapes; None where it cannot be made."""
        return shared_memory([4 * prod(shape) for shape in shapes]) if self.device.type == "cpu" else None

    def _empty(self, shape: Sequence[int]) -> torch.Tensor:
        if self._memory is not None:
            return torch.from_numpy(self._memory.take(4 * prod(shape)).view(np.int32).reshape(shape))
        # Pooled memory has huge pages, which make gathering from it 1.25 times faster.
        return BufferPool(1).empty(shape, torch.int32)

    def holds(self, trajectories: Int64s) -> bool:
        """Return whether all of these trajectories that can be read are cached."""
        return bool((self.is_lost[trajectories] | (self._first_row[trajectories] >= 0)).all())

    def locate(self, trajectory: Int64s, frame: Int64s, count: Int64s, target: Int64s) -> Runs:
        return Runs(target, np.zeros_like(target), self._first_row[trajectory] + frame, count)

    def probe(self, trajectory: int) -> None:
        """Do nothing: what was cached could be read."""

    def finals(self, column: str, trajectories: Int64s) -> torch.Tensor:
        rows = sent(torch.from_numpy(self._final_row[trajectories]), self.device)
        return torch.index_select(self._rows[FINAL, column], 0, rows).view(torch.uint8)

    def _words(self, place: Place) -> torch.Tensor:
        return self._rows[place]


class FileFrames(FrameStore):
    """Rows of files that are not mapped, mostly of other systems; they are read when needed and kept for a while.

    Small rows are read by whole blocks. Large rows that are decoded alone or in small groups, such as pictures, are
    read by groups: a random window decodes only the groups that it needs.

    Args:
        read_rows: Reads all rows of one kind of one block.
        losses: Errors of a file that is lost for good; they become a `LostBlockError`.
        max_cached_bytes: How much of the blocks that were read is kept.
        read_part: Reads the rows `start:stop` of a block, so that the intact rows of a damaged block are read. None
            where rows cannot be read apart.
        file_of: Returns the file that holds a row; None where it is that of the block.
        group_of: Returns how many rows of a block are decoded together, and the number of its first row in the first
            group; (None, 0) where whole blocks are read. None where all are. It needs `read_part`.
        max_group_bytes: How much of the groups that were read is kept.
    """

    def __init__(
        self,
        index: TrajectoryIndex,
        layouts: Mapping[str, RowLayout],
        read_rows: ReadRows,
        losses: tuple[type[Exception], ...] = GONE,
        max_cached_bytes: int = 1 << 30,
        read_part: ReadPart | None = None,
        file_of: Callable[[Block, Place, int], Path] | None = None,
        group_of: Callable[[Block, Place], tuple[int | None, int]] | None = None,
        max_group_bytes: int = CHUNK_CACHE_BYTES,
    ) -> None:
        super().__init__(index, layouts)
        self._read_rows = read_rows
        self._losses = losses
        self._read_part = read_part
        self._find_file = file_of
        self._group_of = group_of
        self._groups: dict[tuple[int, Place], tuple[int | None, int]] = {}
        #: Damaged rows of blocks whose other rows were read.
        self._damaged: dict[tuple[int, Place], dict[int, DataFileError]] = {}
        self._broken: set[tuple[int, Place]] = set()  # of which no row can be read
        self._cache = RowCache(max_cached_bytes, keeps_last=True)
        self._cached_groups = RowCache(max_group_bytes)

    def copy(self, place: Place, runs: Runs, length: int, out: torch.Tensor) -> None:
        windows = (out if out.dim() == 3 else out[None]).view(torch.uint8).numpy()
        for to, block, row, count in zip(*(column.tolist() for column in runs), strict=True):
            window, begin = divmod(to, windows.shape[1])
            target = windows[window, begin : begin + count]
            group_rows, first_in_group = self._rows_of_group(block, place)
            if group_rows is None:
                target[:] = self._rows_of_block(block, place, row, count)
            else:
                self._copy_groups(block, place, row, group_rows, first_in_group, target)

    def _rows_of_group(self, block: int, place: Place) -> tuple[int | None, int]:
        """Return how many rows are decoded together and the number of the first row in its group; see `group_of`."""
        if self._group_of is None:
            return None, 0
        key = block, place
        if key not in self._groups:
            with self._losses_named(block):
                self._groups[key] = self._group_of(self.index.blocks[block], place)
        return self._groups[key]

    def _rows_of_block(self, block: int, place: Place, first: int, count: int) -> np.ndarray:
        """Return rows of a block, all of which is read and kept."""
        rows: np.ndarray | None = self._cache.get((block, place))
        if rows is None:
            rows = self._read(block, place)
            self._cache.put((block, place), rows)
        damaged = self._damaged.get((block, place), {})
        for number in sorted(damaged):
            if first <= number < first + count:
                raise self._lost(block, damaged[number]) from damaged[number]
        return rows[first : first + count]

    def _copy_groups(
        self, block: int, place: Place, first: int, group_rows: int, first_in_group: int, out: np.ndarray
    ) -> None:
        """Copy the rows from `first` on to `out`; read the groups that are not kept, neighbours at once."""
        about = self.index.blocks[block]
        num_rows = int(about.fragments["length"].sum())
        stop = first + len(out)
        start_of = range(-first_in_group, num_rows, group_rows)
        groups = range((first + first_in_group) // group_rows, (stop - 1 + first_in_group) // group_rows + 1)
        kept = {group: self._cached_groups.get((block, place, group)) for group in groups}
        missing = [group for group in groups if kept[group] is None]
        for some in _neighbours(missing):
            low = max(start_of[some[0]], 0)
            high = min(start_of[some[-1]] + group_rows, num_rows)
            rows = self._read_part_safely(block, place, low, high)
            for group in some:
                begin = max(start_of[group], 0) - low
                kept[group] = rows[begin : start_of[group] + group_rows - low].copy()
                self._cached_groups.put((block, place, group), kept[group])
        for group, rows in kept.items():
            begin = max(start_of[group], 0)
            low = max(first, begin)
            high = min(stop, begin + len(rows))
            out[low - first : high - first] = rows[low - begin : high - begin]

    def _read_part_safely(self, block: int, place: Place, start: int, stop: int) -> np.ndarray:
        assert self._read_part is not None
        with self._losses_named(block):
            return self._read_part(self.index.blocks[block], place, start, stop)

    def _read(self, block: int, place: Place) -> np.ndarray:
        with self._losses_named(block):
            try:
                return self._read_rows(self.index.blocks[block], place)
            except UnansweredError:
                raise
            except DataFileError:
                if DataFileError not in self._losses:
                    raise
                is_broken = (block, place) in self._broken
                intact = None if is_broken else self._intact_rows(block, place)
                if intact is None:
                    self._broken.add((block, place))
                    raise
                return intact

    @contextmanager
    def _losses_named(self, block: int) -> Iterator[None]:
        """Raise what reading a block raises as the error that names its trajectories."""
        try:
            yield
        except UnansweredError:
            raise
        except DataFileError as cause:
            if DataFileError not in self._losses:
                raise
            raise self._lost(block, cause) from cause
        except self._losses as cause:
            raise self.index.lost_block(block, _in_words(cause)) from cause
        except OSError as cause:
            lost = self.index.lost_block(block, _in_words(cause))
            advice = "Try again, or reset these envs"
            raise DataFileError(lost.action, lost.where, lost.expected, lost.got, advice) from cause

    def _lost(self, block: int, cause: DataFileError) -> LostBlockError:
        lost = self.index.lost_block(block, _in_words(cause), is_gone=False)
        if cause.advice:
            lost.advice = f"{cause.advice}. {lost.advice}"
        return lost

    def _file_of(self, block: Block, place: Place, row: int) -> Path:
        return block.path if self._find_file is None else self._find_file(block, place, row)

    def _intact_rows(self, block: int, place: Place) -> np.ndarray | None:
        """Read the intact rows of a damaged block, zeros for the others, which are noted; None if there are none."""
        about = self.index.blocks[block]
        read_part = self._read_part
        num_rows = int(about.fragments["length"].sum())
        if read_part is None or place[0] != DATA or num_rows < 2:
            return None
        damaged: dict[int, DataFileError] = {}
        rows = np.zeros((num_rows, self.layouts[DATA].columns[place[1]].row_bytes), np.uint8)

        def read(start: int, stop: int) -> bool:
            """Read some rows, by halves where that fails; False if none of them can be read."""
            try:
                rows[start:stop] = read_part(about, place, start, stop)
                return True
            except UnansweredError:
                raise
            except DataFileError as cause:
                if stop - start == 1:
                    damaged[start] = cause
                    return False
            middle = (start + stop) // 2
            is_first_read = read(start, middle)
            return read(middle, stop) or is_first_read

        samples = range(0, num_rows, -(-num_rows // _NUM_SAMPLES)) if num_rows > _MANY_ROWS else ()
        if samples and not any(read(row, row + 1) for row in samples):  # as where a whole file is damaged
            return None
        damaged.clear()
        if not read(0, num_rows):
            return None
        self._damaged[block, place] = damaged
        return rows


def _neighbours(numbers: Sequence[int]) -> list[list[int]]:
    """Divide ascending numbers into runs of consecutive ones."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return runs


def read_block(block: Block, place: Place, layouts: Mapping[str, RowLayout]) -> np.ndarray:
    """Map or decode one kind of row of one block, where blocks cannot be mapped side by side."""
    if is_stand_in(block):
        raise FileNotFoundError("it was removed")
    offset, num_rows = block.places[place]
    column = layouts[place[0]].columns[place[1]]
    if column.is_coded:
        return read_header(block.path).read_rows(*place, 0, num_rows)
    if num_rows == 0:
        return np.zeros((0, column.row_bytes), np.uint8)
    return np.memmap(block.path, np.uint8, "r", offset, (num_rows, column.row_bytes))


def _in_words(cause: Exception) -> str:
    """Describe a cause for the text of another error."""
    if isinstance(cause, DataFileError) and cause.expected:
        return f"{cause.got or 'nothing'} instead of {cause.expected}"
    return (cause.strerror if isinstance(cause, OSError) else None) or str(cause)


def _content(index: TrajectoryIndex) -> int:
    """Return a checksum of the names, lengths and final observations of all trajectories, in their order."""
    columns = np.stack([index.first_frame[1:], index.number, index.writer, index.final_row])
    return crc32(repr(index.writers).encode() + columns.tobytes())


def free_memory_bytes() -> int | None:
    """Return how much memory is free without swapping; None where the system does not say."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None
