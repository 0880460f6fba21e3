"""Order in which an epoch reads windows from remote files: shuffled, but in large requests.

The files are divided into chunks, which are shuffled and then divided into groups. The windows are
shuffled within each group. The order is a function of (seed, epoch), the frames per chunk, the
chunks per group, and the positions of trajectories in their files. Prefetching follows the order
and does not change it.
"""

from __future__ import annotations

import numpy as np

from ..blocks.block_header import FINAL
from ..blocks.trajectory_index import Int64s, counted_from, mixed
from ..sources.epoch import Epoch
from ..sources.rows.row_source import FetchedRows, Rows, RowSource
from .window_index import WindowIndex
from .window_reader import WindowPlan


class ChunkedOrder:
    """Order in which an epoch reads windows from remote files, chunk by chunk.

    A chunk is a run of consecutive frames in the files. The chunks are shuffled and divided into
    groups of `num_chunks`. Then the windows within each group are shuffled. A window belongs to the
    chunk that contains its anchor frame.

    Args:
        windows: Index of the windows to order.
        place: int64 `[K]`, indices into `windows.trajectories`, in the order of the files.
        num_frames: Frames per chunk.
        num_chunks: Chunks per group.
        epoch: Epoch that shuffles the chunks and windows; None keeps the windows in the order of
            their numbers.

    Attributes:
        bounds: int64 `[G + 1]`, position in the order at which each of the G groups starts, then
            the total number of windows.
    """

    def __init__(
        self,
        windows: WindowIndex,
        place: Int64s,
        num_frames: int,
        num_chunks: int,
        epoch: Epoch | None,
    ) -> None:
        self._seed = None if epoch is None else np.uint64(epoch.key_seed)
        place = np.arange(len(place)) if epoch is None else place
        counts = np.diff(windows.first_window)[place]
        place = place[counts > 0]
        counts = counts[counts > 0]
        # Chunks may span trajectories, so frames are numbered over all files, in file order.
        stop = np.cumsum(windows.lengths[place])
        first_anchor = stop - windows.lengths[place] + windows.first_anchor
        last_anchor = first_anchor + (counts - 1) * windows.stride
        first_chunk = first_anchor // num_frames
        num_parts = last_anchor // num_frames - first_chunk + 1
        # A part is the piece of a trajectory within one chunk. `part` has the index into `place` of
        # the trajectory of each part.
        part = np.repeat(np.arange(len(place)), num_parts)
        chunk = counted_from(first_chunk, num_parts)
        # The anchors of the windows `low:high` of the trajectory are in this part.
        low = -(-(chunk * num_frames - first_anchor[part]) // windows.stride)
        high = -(-((chunk + 1) * num_frames - first_anchor[part]) // windows.stride)
        low = np.maximum(low, 0)
        high = np.minimum(high, counts[part])
        part, chunk, low, high = (column[high > low] for column in (part, chunk, low, high))
        # Renumber the chunks from 0, without the chunks that contain no anchor.
        _, chunk = np.unique(chunk, return_inverse=True)
        num_all = int(chunk[-1]) + 1 if len(chunk) else 0
        rank = np.empty(num_all, np.int64)
        rank[self._shuffled(num_all, 0)] = np.arange(num_all)
        order = np.argsort(rank[chunk], kind="stable")
        group = rank[chunk][order] // num_chunks
        #: One entry per part, int64 `[P]`, in the order of the groups. `_place` is the trajectory of
        #: the part, an index into `windows.trajectories`. `_low:_high` are the windows of the part,
        #: counted from the first window of the trajectory.
        self._place = place[part][order]
        self._low = low[order]
        self._high = high[order]
        self._first_window = windows.first_window[self._place]
        self._parts = np.searchsorted(group, np.arange(-(-num_all // num_chunks) + 1))
        self.bounds: Int64s = np.append(0, np.cumsum(self._high - self._low))[self._parts]

    def windows(self) -> Int64s:
        """Return the numbers of all windows in the order of the epoch, int64."""
        numbers = counted_from(self._first_window + self._low, self._high - self._low)
        for group, (start, stop) in enumerate(
            zip(self.bounds[:-1].tolist(), self.bounds[1:].tolist(), strict=True), 1
        ):
            numbers[start:stop] = numbers[start:stop][self._shuffled(stop - start, group)]
        return numbers

    def ranges(self, group: int) -> tuple[Int64s, Int64s, Int64s]:
        """Return the windows of a group of chunks as ranges, each within one trajectory.

        Returns:
            Three int64 arrays `[num_ranges]`: the trajectory of each range, as an index into
            `windows.trajectories`, its first window and its stop window. Windows are counted from
            the first window of the trajectory.
        """
        part = slice(int(self._parts[group]), int(self._parts[group + 1]))
        return self._place[part], self._low[part], self._high[part]

    def _shuffled(self, size: int, number: int) -> Int64s:
        if self._seed is None:
            return np.arange(size)
        start = mixed(np.array([self._seed ^ np.uint64(number)]))
        return np.argsort(mixed(start + np.arange(size, dtype=np.uint64)), kind="stable")


class Route:
    """Prefetches rows of remote files, one group of chunks ahead of the reader.

    Args:
        source: Source of the rows.
        plan: Columns of the windows, and the frames to read from each column.
        windows: Index of the windows.
        order: Order of the windows in the epoch.
    """

    def __init__(
        self, source: RowSource, plan: WindowPlan, windows: WindowIndex, order: ChunkedOrder
    ) -> None:
        self._source = source
        self._plan = plan
        self._windows = windows
        self._order = order
        #: Fetched rows of each group of chunks.
        self._fetched: dict[int, list[FetchedRows]] = {}

    def advance(self, start: int, stop: int) -> None:
        """Prefetch rows before the windows at positions `start:stop` of the epoch are read.

        The rows of the following group of chunks are prefetched too. Rows of earlier groups are
        released.
        """
        bounds = self._order.bounds
        stop = min(stop, int(bounds[-1]))
        low, high = (bounds.searchsorted([start, max(start, stop - 1)], side="right") - 1).tolist()
        for group in [earlier for earlier in self._fetched if earlier < low]:
            for rows in self._fetched.pop(group):
                rows.drop()
        # Fetch at most two groups, to limit memory, unless a single batch needs more.
        for group in range(low, min(max(low + 2, high + 1), len(bounds) - 1)):
            if group not in self._fetched:
                self._fetched[group] = self._fetch(group)

    def _fetch(self, group: int) -> list[FetchedRows]:
        place, low, high = self._order.ranges(group)
        trajectory = self._windows.trajectories[place]
        lengths = self._windows.lengths[place]
        stride = self._windows.stride
        first_anchor = self._windows.first_anchor
        fetched = []
        for name, number in self._plan.columns.items():
            first, last = self._plan.shapes[number].reach
            if stride > last - first + 1:  # Windows do not touch. Do not fetch the rows between.
                which = np.repeat(np.arange(len(low)), high - low)
                begin = first_anchor + counted_from(low, high - low) * stride
                end = begin
                played = trajectory[which]
                limit = lengths[which]
            else:
                begin = first_anchor + low * stride
                end = first_anchor + (high - 1) * stride
                played = trajectory
                limit = lengths
            begin = np.clip(begin + first, 0, limit - 1)
            count = np.clip(end + last + 1, 1, limit) - begin
            rows = Rows(played, begin, count, np.cumsum(count) - count)
            fetched.append(self._source.fetch_rows(name, rows))
        has_final = self._source.index.final_row[trajectory] >= 0
        return fetched + self._fetch_finals(np.unique(trajectory[has_final]))

    def _fetch_finals(self, trajectory: Int64s) -> list[FetchedRows]:
        layout = self._source.layouts[FINAL]
        sources = {name for field in self._plan.fields if field.is_next for name in field.sources}
        columns = (
            sorted({layout.column_of[name].name for name in sources}) if len(trajectory) else []
        )
        return [self._source.fetch_final_rows(name, trajectory) for name in columns]
