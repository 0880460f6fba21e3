"""`CachedRows`: copies of complete trajectories in the memory of one device.

The copies belong to one process, or are in memory that all workers of a machine share. Shared
copies include the list of unreadable trajectories.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from storage.core.durable_files import crc32
from storage.core.memory import BufferPool, StreamOrder, sent
from storage.errors import UsageError

from ...blocks.block_header import DATA, FINAL
from ...blocks.trajectory_index import Int64s, Runs, TrajectoryIndex
from ..processes.shared_memory import SharedMemory, Spot, shared_memory
from .gather_rows import gather
from .row_source import Place, Rows, RowSource

#: Maximum number of trajectories per copy call, so that index arrays stay small.
_NUM_COPIED = 4096


class SharedRows(NamedTuple):
    """Description of the rows that one process has cached in shared memory, for other processes.

    Attributes:
        spot: Where to find the shared memory.
        trajectories: Numbers of the K cached trajectories, int64 `[K]`.
        content: Checksum of the index to which these numbers belong; see `_content`.
        lost: Numbers of the trajectories that could not be read, int64.
    """

    spot: Spot
    trajectories: Int64s
    content: int
    lost: Int64s


class CachedRows(RowSource):
    """Copies of the rows of K trajectories in the memory of one device.

    The rows of a trajectory are contiguous.

    Args:
        source: Source of the rows.
        trajectories: Numbers of the trajectories to copy, int64 `[K]`. Only these can be read.
        device: Device of the copies.
        is_shared: Whether other processes will map the copies; see `shared` and `mapped`.
        memory: Shared memory in which another process has cached the same trajectories; None
            copies the rows.
    """

    def __init__(
        self,
        source: RowSource,
        trajectories: Int64s,
        device: torch.device,
        is_shared: bool = False,
        memory: SharedMemory | None = None,
    ) -> None:
        super().__init__(source.index, source.layouts, device)
        self.is_lost = source.is_lost
        self.read_header = source.read_header
        self.episode_tasks = source.episode_tasks
        self.read_texts = source.read_texts
        self.episode_names = source.episode_names
        if memory is None:
            trajectories = trajectories[~self.is_lost[trajectories]]
        self._trajectories = trajectories

        lengths = source.index.lengths[trajectories]
        first_row = np.cumsum(lengths) - lengths
        self._first_row = np.full(len(source.index), -1, np.int64)
        self._first_row[trajectories] = first_row
        has_final = trajectories[source.index.final_row[trajectories] >= 0]
        self._final_row = np.full(len(source.index), -1, np.int64)
        self._final_row[has_final] = np.arange(len(has_final))

        num_rows = {DATA: int(lengths.sum()), FINAL: len(has_final)}
        shapes: dict[Place, tuple[int, int]] = {}
        for table, count in num_rows.items():
            for name, column in self.layouts[table].columns.items():
                shapes[table, name] = (count, column.row_bytes // 4)
        if memory is None and device.type == "cpu":
            _check_room(num_rows[DATA] * self.layouts[DATA].frame_bytes)
        self._memory = self._shared_memory(shapes.values()) if is_shared else memory

        self._rows: dict[Place, torch.Tensor] = {}
        self._order = StreamOrder(device)
        rows_of_all = Rows(trajectories, np.zeros_like(lengths), lengths, first_row)
        for (table, name), shape in shapes.items():
            memory_rows = self._empty(shape)
            if memory is None and table == DATA:
                _copy_column(source, name, rows_of_all, memory_rows)
            elif memory is None:
                memory_rows.copy_(source.final_rows(name, has_final).view(torch.int32))
            with self._order.writes:
                self._rows[table, name] = memory_rows.to(device)

    @classmethod
    def mapped(cls, source: RowSource, shared: SharedRows | None) -> CachedRows | None:
        """Map the rows that another process has cached in shared memory.

        Returns:
            The mapped rows; None if the index differs or the memory was freed.
        """
        if shared is None or shared.content != _content(source.index):
            return None
        try:
            memory = SharedMemory(spot=shared.spot)
        except OSError:  # The other process has released the memory or has ended.
            return None
        source.is_lost[shared.lost] = True
        return cls(source, shared.trajectories, torch.device("cpu"), memory=memory)

    def shared(self) -> SharedRows | None:
        """Move the cached rows to shared memory, so that other processes can map them.

        Returns:
            The description; None if shared memory cannot be created.
        """
        if self._memory is None:
            self._memory = self._shared_memory([rows.shape for rows in self._rows.values()])
            for place, rows in self._rows.items() if self._memory is not None else ():
                self._rows[place] = self._empty(rows.shape).copy_(rows)
        if self._memory is None or self._memory.spot is None:
            return None
        lost = np.flatnonzero(self.is_lost)
        return SharedRows(self._memory.spot, self._trajectories, _content(self.index), lost)

    def _shared_memory(self, shapes: Iterable[Sequence[int]]) -> SharedMemory | None:
        """Create shared memory for int32 rows of these shapes; None if it cannot be created."""
        if self.device.type != "cpu":
            return None
        return shared_memory([4 * prod(shape) for shape in shapes])

    def _empty(self, shape: Sequence[int]) -> torch.Tensor:
        if self._memory is not None:
            return torch.from_numpy(
                self._memory.take(4 * prod(shape)).view(np.int32).reshape(shape)
            )
        # Memory of a pool uses huge pages, which makes gathering rows 1.25 times faster.
        return BufferPool(1).empty(shape, torch.int32)

    def holds(self, trajectories: Int64s) -> bool:
        """Return whether all of these trajectories are cached, except unreadable ones."""
        return bool((self.is_lost[trajectories] | (self._first_row[trajectories] >= 0)).all())

    def locate(self, rows: Rows) -> Runs:
        return Runs(
            rows.target,
            np.zeros_like(rows.target),
            self._first_row[rows.episode] + rows.start,
            rows.num_frames,
        )

    def probe(self, episode: int) -> None:
        """Do nothing, since cached rows can always be read."""

    def final_rows(self, column: str, episodes: Int64s) -> torch.Tensor:
        rows = sent(torch.from_numpy(self._final_row[episodes]), self.device)
        with self._order.reads:
            finals = torch.index_select(self._rows[FINAL, column], 0, rows)
            self._order.keep([self._rows[FINAL, column]])
        return finals.view(torch.uint8)

    def _copy(self, place: Place, runs: Runs, length: int, out: torch.Tensor) -> None:
        with self._order.reads:
            gather(self._rows[place], runs, runs.row, length, out)
            self._order.keep([self._rows[place]])


def _copy_column(source: RowSource, name: str, rows: Rows, out: torch.Tensor) -> None:
    """Copy a column of complete trajectories to `out`: int32 `[num_rows, row_bytes / 4]`."""
    for first in range(0, len(rows.episode), _NUM_COPIED):
        part = Rows(*(values[first : first + _NUM_COPIED] for values in rows))
        start = int(part.target[0])
        stop = int(part.target[-1] + part.num_frames[-1])
        source.read_rows(part._replace(target=part.target - start), 1, {name: out[start:stop]})


def _check_room(needed_bytes: int) -> None:
    """Raise `UsageError` if the rows need more than 90 % of the free memory."""
    free = free_memory_bytes()
    if free is not None and needed_bytes > 0.9 * free:
        raise UsageError(
            f"the dataset needs {needed_bytes / 2**30:.1f} GiB, but {free / 2**30:.1f} GiB of "
            "memory are free, of which at most 90 % are used. Pass cache='none'."
        )


def _content(index: TrajectoryIndex) -> int:
    """Compute a checksum that shows whether two indexes contain the same trajectories."""
    columns = np.stack([index.first_frame[1:], index.number, index.writer, index.final_row])
    return crc32(repr(index.writers).encode() + columns.tobytes())


def free_memory_bytes() -> int | None:
    """Return the bytes of memory that are available without swapping; None if unknown."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None
