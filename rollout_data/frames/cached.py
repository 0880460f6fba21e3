"""Frames copied into memory: of this process alone, or for all workers of a machine, which map one copy.

One rule: a copy holds what its process could read of some trajectories; what it could not is told with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from storage.core.durable import crc32
from storage.core.memory import BufferPool
from storage.errors import UsageError

from ..format.header import DATA, FINAL
from ..index.index import Int64s, Runs, TrajectoryIndex
from .shared import SharedMemory, Spot, shared_memory
from .store import FrameStore, Place

_NUM_RUNS = 4096  # copied at once: index arrays stay small beside the data


class ToldFrames(NamedTuple):
    """Where one process has cached frames, for others; trajectories of which index, and those it could not read."""

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
        is_shared: Other processes are going to map them, see `told` and `mapped`.
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
        self.is_lost, is_there = source.is_lost, memory is not None
        self.read_header, self.told_tasks = source.read_header, source.told_tasks
        trajectories = trajectories if is_there else trajectories[~self.is_lost[trajectories]]
        self._trajectories, lengths = trajectories, source.index.lengths[trajectories]
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
            expected, got = f"at most 90 % of the free {free / 2**30:.1f} GiB", f"{needed / 2**30:.1f} GiB"
            raise UsageError("cache the dataset in memory", "", expected, got, "Use cache='none'")
        self._memory = self._shared(shapes.values()) if is_shared else memory
        self._rows: dict[Place, torch.Tensor] = {}
        runs = source.locate(trajectories, np.zeros_like(lengths), lengths, np.cumsum(lengths) - lengths)
        for (table, name), shape in shapes.items():
            rows = self._empty(shape)
            for first in range(0, 0 if is_there or table == FINAL else len(runs.target), _NUM_RUNS):
                part = Runs(*(values[first : first + _NUM_RUNS] for values in runs))
                start, stop = int(part.target[0]), int(part.target[-1] + part.num_rows[-1])
                source.copy((DATA, name), part._replace(target=part.target - start), 1, rows[start:stop])
            if table == FINAL and not is_there:
                rows.copy_(source.finals(name, has_final).view(torch.int32))
            self._rows[table, name] = rows.to(device)

    @classmethod
    def mapped(cls, source: FrameStore, told: ToldFrames | None) -> CachedFrames | None:
        """Give what another process has cached of the same index; None where that is not to be had."""
        if told is None or told.content != _content(source.index):
            return None
        try:
            memory = SharedMemory(spot=told.spot)
        except OSError:  # that process has gone on, or away
            return None
        source.is_lost[told.lost] = True
        return cls(source, told.trajectories, torch.device("cpu"), memory=memory)

    def told(self) -> ToldFrames | None:
        """Say where other processes find all this, moved to shared memory; None if it cannot be shared."""
        if self._memory is None:
            self._memory = self._shared([rows.shape for rows in self._rows.values()])
            for place, rows in self._rows.items() if self._memory is not None else ():
                self._rows[place] = self._empty(rows.shape).copy_(rows)
        spot = self._memory.spot if self._memory is not None else None
        lost = np.flatnonzero(self.is_lost)
        return None if spot is None else ToldFrames(spot, self._trajectories, _content(self.index), lost)

    def _shared(self, shapes: Iterable[Sequence[int]]) -> SharedMemory | None:
        """Make memory for rows of these shapes; None where it cannot be made."""
        return shared_memory([4 * prod(shape) for shape in shapes]) if self.device.type == "cpu" else None

    def _empty(self, shape: Sequence[int]) -> torch.Tensor:
        if self._memory is not None:
            return torch.from_numpy(self._memory.take(4 * prod(shape)).view(np.int32).reshape(shape))
        # Pooled memory has huge pages, which make gathering from it 1.25 times faster.
        return BufferPool(1).empty(shape, torch.int32)

    def holds(self, trajectories: Int64s) -> bool:
        """True if all these trajectories are here that can be read."""
        return bool((self.is_lost[trajectories] | (self._first_row[trajectories] >= 0)).all())

    def locate(self, trajectory: Int64s, frame: Int64s, count: Int64s, target: Int64s) -> Runs:
        return Runs(target, np.zeros_like(target), self._first_row[trajectory] + frame, count)

    def finals(self, column: str, trajectories: Int64s) -> torch.Tensor:
        rows = torch.from_numpy(self._final_row[trajectories]).to(self.device)
        return torch.index_select(self._rows[FINAL, column], 0, rows).view(torch.uint8)

    def _words(self, place: Place) -> torch.Tensor:
        return self._rows[place]


def _content(index: TrajectoryIndex) -> int:
    """A checksum of the names, lengths and final observations of all trajectories, in their order."""
    columns = np.stack([index.first_frame[1:], index.number, index.writer, index.final_row])
    return crc32(repr(index.writers).encode() + columns.tobytes())


def free_memory_bytes() -> int | None:
    """Memory that can be had without swapping, or None where the system does not say."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None
