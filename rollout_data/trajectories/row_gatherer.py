"""`RowGatherer`: copy the rows of sampled steps and split them into fields.

A row has the fields of one step. Its trajectory is in the cache, in a file that is mapped, or
elsewhere: in other memory, or in a file that must be read completely. One call gathers all rows
with the same location and the same layout.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from storage.core.fields import signed, unflatten
from storage.core.memory import MIN_POOLED_BYTES, BufferPool, take_rows
from storage.core.packed_rows import Cut, Group, Part, Target

from ..blocks.block import Block
from ..blocks.block_header import DATA
from ..blocks.row_layout import RowLayout
from ..sources.rows.mapped_blocks import FileMap
from .trajectory_cache import TrajectoryCache
from .trajectory_files import Entry, missing_file_reported
from .trajectory_rows import Rows
from .trajectory_snapshot import (
    CACHED,
    ELSEWHERE,
    MAPPED,
    Int64s,
    TrajectorySnapshot,
    missing_field,
)

#: Map from the name of a column to its rows, int32 `[n, words]`.
Arrays = dict[str, npt.NDArray[np.int32]]
#: Maximum number of mapped files per layout. All files of the layout are unmapped when the number
#: is exceeded. Linux allows 65,530 mappings per process, and each column of a file is one mapping.
MAX_MAPPED_FILES = 20_000
#: Number of sampled rows that are tested for presence in the page cache. If a row is missing, all
#: rows of the sample are prefetched.
_NUM_PROBES = 16
#: Maximum bytes of a gather with numpy, which has less overhead per call. torch copies more bytes
#: faster, because it uses several threads.
_MAX_NUMPY_BYTES = 1 << 20


class RowGatherer:
    """Reader of the rows of sampled steps: from the cache, from mapped files, or from elsewhere.

    The caller of a method must hold the lock of the buffer.

    Args:
        cache: Cache of rows, or None.
        trusted: Whether pickles may be read, which can run code.

    Attributes:
        pool: Memory pool for the gathered rows.
    """

    def __init__(self, cache: TrajectoryCache | None, trusted: bool) -> None:
        self.pool = BufferPool(16)
        self._cache = cache
        self._trusted = trusted
        self._files: dict[RowLayout, FileMap] = {}

    def trajectory_rows(self, entry: Entry) -> Rows:
        """Return all rows of a trajectory. The caller must not change them."""
        if self._cache is not None and entry.trajectory_id in self._cache:
            [(memory, first)] = self._cache.find(entry.trajectory_id)
            return memory.rows(first)
        return entry.read_rows(self._trusted, self.pool)

    def unmap(self, entry: Entry) -> None:
        """Unmap the file of a trajectory. While a file is mapped, deleting it frees no space."""
        files = self._files.get(entry.layout)
        if files is None or entry.block is None:
            return
        if entry.block.identity in files.mapped:
            files.unmap([entry.block.identity])

    def unmap_all(self) -> None:
        """Unmap all files."""
        self._files.clear()

    def gather(
        self,
        snapshot: TrajectorySnapshot,
        run: Int64s,
        row: Int64s,
        names: tuple[str, ...],
        contiguous: bool,
    ) -> dict[str, Any]:
        """Copy the requested fields of sampled steps into new tensors.

        Args:
            snapshot: Trajectories of the steps.
            run: Run of each step, int64 `[n]`, or `[1]` if all steps are in the same run.
            row: Row of each step in its run, int64 `[n]`.
            names: Names of the fields.
            contiguous: Whether to return contiguous tensors.

        Returns:
            Nested dict of new tensors `[n, *field.shape]`.

        Raises:
            MissingFieldError: A sampled trajectory does not have a field of `names`.
        """
        if len(snapshot.layouts) == 1:
            return self._fields(snapshot, run, row, names, contiguous, nested=True)

        out: dict[str, torch.Tensor] = {}
        layout_of_step = snapshot.layout[run]
        for number in np.unique(layout_of_step).tolist():
            steps = np.flatnonzero(layout_of_step == number)
            for name in names:
                if name not in snapshot.layouts[number].schema:
                    raise missing_field(name, snapshot.entries[run[steps[0]]])
            fields = self._fields(
                snapshot, run[steps], row[steps], names, contiguous=False, nested=False
            )
            for name, values in fields.items():
                if name not in out:
                    out[name] = self.pool.empty((len(row), *values.shape[1:]), values.dtype)
                signed(out[name])[torch.from_numpy(steps)] = signed(values)
        return unflatten({name: out[name] for name in names})

    def _fields(
        self,
        snapshot: TrajectorySnapshot,
        run: Int64s,
        row: Int64s,
        names: tuple[str, ...],
        contiguous: bool,
        nested: bool,
    ) -> dict[str, Any]:
        """Copy the requested fields of steps whose trajectories have the same row layout.

        With `nested`, the result is a nested dict; otherwise it is a dict by flat name.
        """
        layout = snapshot.entries[run[0]].layout
        cut, columns = _cut_of(layout, names, contiguous, nested)
        used_columns = [name for name in columns if name is not None]
        if snapshot.is_one_location or len(run) == 1:
            rows = self._rows_at_one_location(snapshot, run, row, used_columns)
        else:
            rows = self._rows_at_several_locations(snapshot, run, row, used_columns)
        return cut([None if name is None else rows[name] for name in columns])

    def _rows_at_several_locations(
        self, snapshot: TrajectorySnapshot, run: Int64s, row: Int64s, columns: list[str]
    ) -> Arrays:
        """Copy rows of steps that are partly in the cache, in mapped files, or elsewhere.

        All rows have the same layout. The result has the order of the steps.
        """
        layout = snapshot.entries[run[0]].layout
        rows = {}
        for name in columns:
            rows[name] = self._empty(len(row), layout.columns[name].row_bytes // 4).numpy()
        location = snapshot.location[run]
        # A trajectory outside of the cache and of mapped files is read as a whole. So each such
        # trajectory counts as a location of its own, with a number below 0.
        location_of_step = np.where(location == ELSEWHERE, -1 - run, location)
        for place in np.unique(location_of_step):
            steps = np.flatnonzero(location_of_step == place)
            copied = self._rows_at_one_location(snapshot, run[steps], row[steps], columns)
            for name, words in copied.items():
                rows[name][steps] = words
        return rows

    def _rows_at_one_location(
        self, snapshot: TrajectorySnapshot, run: Int64s, row: Int64s, columns: list[str]
    ) -> Arrays:
        """Copy rows that are all in the cache, all in mapped files, or all in one trajectory."""
        entry = snapshot.entries[run[0]]
        location = snapshot.location[run[0]]
        if location == MAPPED:
            return self._mapped_rows(snapshot, run, row, columns)
        if location == CACHED and self._cache is not None:
            words = self._cache.find(entry.trajectory_id)[0].memory.words
        else:
            words = self.trajectory_rows(entry)
        return {name: self._copied(words[name], row) for name in columns}

    def _mapped_rows(
        self, snapshot: TrajectorySnapshot, run: Int64s, row: Int64s, columns: list[str]
    ) -> Arrays:
        used_runs, run_position = np.unique(run, return_inverse=True)
        entries = [snapshot.entries[number] for number in used_runs.tolist()]
        files = self._map_files(entries)
        first_rows = []
        for entry in entries:
            assert entry.block is not None
            first_rows.append(files.mapped[entry.block.identity][1])
        first_of_run = np.array(first_rows)
        copied = {}
        for position, (_, name) in enumerate(files.places):
            if name not in columns:
                continue
            arena = files.arenas[DATA, name]
            rows = first_of_run[run_position, position] + row
            probes = rows[:: max(1, len(rows) // _NUM_PROBES)].tolist()
            if not all(map(arena.is_resident, probes)):
                # Start all disk reads at once, instead of one per page fault.
                arena.will_need(np.sort(rows), np.ones_like(rows))
            copied[name] = self._copied(arena.words_view, rows)
        return copied

    def _map_files(self, entries: list[Entry]) -> FileMap:
        """Map the files of trajectories with the same layout, unless they are mapped already.

        Returns:
            All mapped files of this layout.
        """
        layout = entries[0].layout
        blocks = [entry.block for entry in entries if entry.block is not None]
        files = self._files.get(layout)
        if files is None or not _has_room(files, blocks):
            # Unmap the old files before new files are mapped, to stay below the limit of mappings.
            self._files.pop(layout, None)
            files = FileMap({DATA: layout}, blocks)
            self._files[layout] = files
        for block in blocks:
            if block.identity not in files.mapped:
                with missing_file_reported(block.sequence, block.path):
                    files.add(block)
        return files

    def _copied(self, words: torch.Tensor, rows: Int64s) -> npt.NDArray[np.int32]:
        num_bytes = 4 * len(rows) * words.shape[1]
        if num_bytes < MIN_POOLED_BYTES:
            copied: npt.NDArray[np.int32] = words.numpy().take(rows, axis=0, mode="clip")
            return copied
        out = self._empty(len(rows), words.shape[1])
        if num_bytes <= _MAX_NUMPY_BYTES:
            take_rows(words.numpy(), rows, out.numpy())
        else:
            torch.index_select(words, 0, torch.from_numpy(rows), out=out)
        return out.numpy()

    def _empty(self, num_rows: int, num_words: int) -> torch.Tensor:
        return self.pool.empty((num_rows, num_words), torch.int32)


def _has_room(files: FileMap, blocks: list[Block]) -> bool:
    """Return whether more block files can be mapped without exceeding the limits."""
    unmapped = [block for block in blocks if block.identity not in files.mapped]
    if not unmapped:
        return True
    return len(files.mapped) + len(unmapped) <= MAX_MAPPED_FILES and files.has_room(unmapped)


@lru_cache(maxsize=256)
def _cut_of(
    layout: RowLayout, names: tuple[str, ...], contiguous: bool, nested: bool
) -> tuple[Cut, list[str | None]]:
    """Build the function that splits rows into the fields `names`.

    Returns:
        The function, and one item per column of the layout: the name of the column, or None if none
        of the fields is in the column.
    """
    groups = []
    for column in layout.columns.values():
        parts = []
        for name, first in column.offsets.items():
            field = layout.schema[name]
            parts.append(Part(field, first, first + field.row_bytes))
        groups.append(Group(tuple(parts), column.row_bytes // 4, torch.float32))
    targets = [Target(0, name, name) for name in names]
    cut = Cut(groups, targets, contiguous, nested)
    used: list[str | None] = []
    for name, width in zip(layout.columns, cut.widths, strict=True):
        used.append(name if width else None)
    return cut, used
