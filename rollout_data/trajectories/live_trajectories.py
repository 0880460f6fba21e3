"""Table of the trajectories in a buffer, used to find their rows and to sample their steps.

A trajectory is live until the buffer removes it. The table has one entry per trajectory with the
location of its rows: in the cache, in a file or in other memory. The entry is updated when the rows
move, so the time to add a trajectory does not depend on the number of trajectories. A sampled step
is found by a binary search in the cumulative sum of lengths. Rows are gathered with one call per
location and layout. `sample` restores the random state if it raises an error.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import lru_cache
from itertools import compress, islice
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from storage.core.fields import Field, signed, unflatten
from storage.core.memory import MIN_POOLED_BYTES, BufferPool, take_rows
from storage.core.packed_rows import Cut, Group, Part, Target
from storage.core.random_indices import uniform
from storage.core.records import Key, flat_name
from storage.errors import (
    BufferEmptyError,
    MissingFieldError,
    SchemaError,
    UsageError,
    nearest,
)

from ..blocks.block_header import DATA
from ..blocks.row_layout import RowLayout
from ..sources.rows import mapped_files
from ..sources.rows.mapped_blocks import FileMap
from .trajectory_cache import TrajectoryCache
from .trajectory_files import Entry, naming
from .trajectory_rows import Rows

Int64s = npt.NDArray[np.int64]
#: Map from the name of a column to its rows, int32 `[n, words]`.
Arrays = dict[str, npt.NDArray[np.int32]]
#: Locations of rows: in the cache, in a file that can be mapped, or elsewhere (in other memory, or
#: in a file without random access).
CACHED, MAPPED, ELSEWHERE = range(3)
#: Table row of a trajectory: "size" is the number of steps, "layout" an index of the row layout,
#: "source" the location (`CACHED`, ...) and "first" the first row in the cache (0 if not cached).
_NUMBERS = np.dtype([("size", "i8"), ("layout", "i8"), ("source", "i8"), ("first", "i8")])
_FIRST_ROOM, _FIRST_RUN = 64, np.zeros(1, np.int64)
#: Maximum number of mapped files per layout. All files of the layout are unmapped when the number
#: is exceeded. Linux allows 65,530 mappings per process, and each column of a file is one mapping.
MAX_MAPPED_FILES = 20_000
#: Number of rows of a sample that are tested for presence in the page cache, before prefetching.
_NUM_PROBES = 16
#: Maximum bytes of a gather with numpy, which has less overhead per call. Above, torch is faster,
#: because it uses several threads.
_MAX_NUMPY_BYTES = 1 << 20


class Window:
    """Snapshot of the trajectories to sample from, divided into runs.

    A run is one trajectory, or several consecutive trajectories whose rows are contiguous in the
    cache.

    Args:
        entries: Trajectories, oldest first.
        numbers: Table rows of the W trajectories, dtype `_NUMBERS`, `[W]`.
        layouts: Row layouts, indexed by `numbers["layout"]`.

    Attributes:
        num_samples: Number of steps of all trajectories.
        entries: First entry of each run.
        layout: Index of the layout of each run, int64 `[R]`.
        source: Location of the rows of each run (`CACHED`, `MAPPED`, `ELSEWHERE`), int64 `[R]`.
        layouts: Map from layout index to layout, for the layouts of the runs.
        names: Names of the fields that every trajectory has.
        is_one_place: Whether all rows are in the cache, or all rows are in mapped files.
    """

    def __init__(
        self, entries: list[Entry], numbers: npt.NDArray[np.void], layouts: list[RowLayout]
    ) -> None:
        size, layout, source_of, first_of = (
            np.ascontiguousarray(numbers[name]) for name in _NUMBERS.names or ()
        )
        is_start = np.ones(len(size), bool)
        ends = np.cumsum(size)
        is_start[1:] = (
            (np.diff(layout) != 0) | (source_of[1:] != CACHED) | (source_of[:-1] != CACHED)
        )
        is_start[1:] |= first_of[1:] != first_of[:-1] + size[:-1]
        starts = np.flatnonzero(is_start)
        self._ends = ends[np.append(starts[1:], len(size)) - 1]
        self._shift = (first_of - ends + size)[starts]
        self.num_samples = int(ends[-1])
        self.entries = [entries[place] for place in starts.tolist()]
        self.layout = layout[starts]
        self.source = source_of[starts]
        self.layouts = {number: layouts[number] for number in self.layout.tolist()}
        first, *others = self.layouts.values()
        self.names = tuple(
            name for name in first.schema if all(name in one.schema for one in others)
        )
        self.is_one_place = (
            bool((self.source == self.source[0]).all()) and self.source[0] != ELSEWHERE
        )

    def locate(self, draws: Int64s) -> tuple[Int64s, Int64s]:
        """Return the run and the row of each sampled step. `draws` counts from the oldest step.

        A row is an index into the cache or into the trajectory. If there is only one run, the first
        result has the shape `[1]`.
        """
        run = (
            np.searchsorted(self._ends, draws, side="right") if len(self._ends) > 1 else _FIRST_RUN
        )
        return run, draws + self._shift[run]

    def names_of(self, keys: Collection[Key]) -> tuple[str, ...]:
        """Return the names of the fields at or below `keys` that any trajectory has."""
        is_list = isinstance(keys, Collection) and not isinstance(keys, str)
        if not is_list or not all(isinstance(key, (str, tuple)) for key in keys):
            raise UsageError(f"keys must be a list of names, got {keys!r}.")
        there = dict.fromkeys(name for layout in self.layouts.values() for name in layout.schema)
        found: dict[str, None] = {}
        for key in keys:
            name = flat_name(key)
            below = (
                [name] if name in there else [one for one in there if one.startswith(f"{name}/")]
            )
            if not below:
                raise _missing(name, self.entries[0])
            found.update(dict.fromkeys(below))
        return tuple(found)


class LiveTrajectories:
    """Trajectories in a buffer. The caller of a method must hold the lock of the buffer.

    Args:
        window_size: Number of newest trajectories to sample from; 0 means all.
        capacity: Maximum number of live trajectories; 0 means no limit.
        cache: Cache of rows, or None.
        trusted: Whether pickles may be read, which can run code.

    Attributes:
        capacity, cache: The arguments of the same names.
        entries: Map from trajectory id to entry, oldest first.
        fields: Map from name to field, for the fields of all past and present trajectories. The
            dtype and shape of a field never change.
        num_samples: Number of steps of all live trajectories.
        pool: Memory pool for the rows of samples.
    """

    def __init__(
        self, window_size: int, capacity: int, cache: TrajectoryCache | None, trusted: bool
    ) -> None:
        self._window_size = window_size
        self.capacity = capacity
        self.cache = cache
        self._trusted = trusted
        self.entries: dict[int, Entry] = {}
        self.fields: dict[str, Field] = {}
        self.num_samples = 0
        self.pool = BufferPool(16)
        self._layouts: dict[RowLayout, int] = {}
        #: Table of the trajectories. Rows below `_stop` are in use. The rows of the first `_offset`
        #: trajectories of the buffer were removed.
        self._numbers = np.zeros(_FIRST_ROOM, _NUMBERS)
        self._stop = 0
        self._offset = 0
        self._window: tuple[int | None, Window] | None = None
        self._files: dict[RowLayout, FileMap] = {}

    def append(self, entry: Entry, rows: Rows | None = None) -> None:
        """Add an entry to the table, and its rows to the cache if there is one.

        If the capacity is exceeded, the oldest entry is removed.
        """
        check_fields(self.fields, entry.layout.schema.values())
        if self._stop == len(self._numbers):
            start = self._stop - len(self.entries)
            room = np.zeros(max(_FIRST_ROOM, len(self.entries)), _NUMBERS)
            self._numbers = np.concatenate([self._numbers[start:], room])
            self._stop = len(self.entries)
            self._offset = self._offset + start
        entry.place = self._offset + self._stop
        self._stop += 1
        self.entries[entry.trajectory_id] = entry
        self.num_samples += entry.num_samples
        if len(self.entries) > (self.capacity or len(self.entries)):
            gone = self.entries.pop(next(iter(self.entries)))
            self.num_samples -= gone.num_samples
            if self.cache is not None:
                self.cache.drop(gone.trajectory_id)
            files = self._files.get(gone.layout)
            if files is not None and gone.block is not None and gone.block.identity in files.mapped:
                # While a file is mapped, deleting it does not free its disk space.
                files.unmap([gone.block.identity])
        if self.cache is not None and rows is not None:
            self.note_moved(self.cache.put_rows(entry.trajectory_id, {entry.layout: rows}))
        else:
            self.note_moved([entry.trajectory_id])

    def note_moved(self, trajectory_ids: Iterable[int]) -> None:
        """Update the table rows of trajectories whose data moved. Unknown ids are ignored."""
        for entry in filter(None, map(self.entries.get, trajectory_ids)):
            source = MAPPED if entry.block is not None and mapped_files.is_supported else ELSEWHERE
            first = 0
            if self.cache is not None and entry.trajectory_id in self.cache:
                source = CACHED
                first = self.cache.find(entry.trajectory_id)[0].first
            layout = self._layouts.setdefault(entry.layout, len(self._layouts))
            self._numbers[entry.place - self._offset] = entry.num_samples, layout, source, first
        self._window = None

    def clear_cache(self) -> None:
        """Free the memory of the cache."""
        if self.cache is not None:
            cached = self.cache.ids
            self.cache.clear()
            self.note_moved(cached)

    def rows_of(self, entry: Entry) -> Rows:
        """Return all rows of a trajectory, wherever they are. The caller must not change them."""
        if self.cache is not None and entry.trajectory_id in self.cache:
            [(block, first)] = self.cache.find(entry.trajectory_id)
            return block.rows(first)
        return entry.read_rows(self._trusted, self.pool)

    def window(self, min_weights_version: int | None = None) -> Window:
        """Return a snapshot of the newest trajectories, from which `sample` draws.

        Raises:
            BufferEmptyError: No trajectory has `min_weights_version` or a later version.
        """
        if self._window is None or self._window[0] != min_weights_version:
            size = min(self._window_size or len(self.entries), len(self.entries))
            entries = list(islice(reversed(self.entries.values()), size))[::-1]
            numbers = self._numbers[self._stop - size : self._stop]
            if min_weights_version is not None:
                is_recent = [entry.is_recent(min_weights_version) for entry in entries]
                numbers = numbers[np.array(is_recent, bool)]
                entries = list(compress(entries, is_recent))
            if not entries:
                if min_weights_version is None:
                    raise BufferEmptyError("the buffer is empty. Call add() first.")
                raise BufferEmptyError(
                    f"no trajectory has the weights_version {min_weights_version} or later."
                )
            self._window = min_weights_version, Window(entries, numbers, list(self._layouts))
        return self._window[1]

    def sample(
        self,
        num_steps: int,
        rng: torch.Generator,
        keys: Collection[Key] | None,
        min_weights_version: int | None,
        contiguous: bool,
    ) -> dict[str, Any]:
        """Draw random steps; see `TrajectoryReplayBuffer.sample` for arguments and errors."""
        window = self.window(min_weights_version)
        names = window.names if keys is None else window.names_of(keys)
        before = rng.get_state()
        try:
            draws = uniform(window.num_samples, num_steps, rng).numpy()
            run, row = window.locate(draws)
            if self._fill_cache(window, run):
                window = self.window(min_weights_version)
                run, row = window.locate(draws)
            if len(window.layouts) == 1:
                return self._fields(window, run, row, names, contiguous, nested=True)
            return self._fields_of_several_layouts(window, run, row, names)
        except BaseException:  # Ctrl-C must also restore the random state.
            rng.set_state(before)
            raise

    def _fill_cache(self, window: Window, run: Int64s) -> bool:
        """Add sampled trajectories to the cache until the cache is full.

        Returns:
            Whether a trajectory was added, so that `window()` must be called again.
        """
        cache = self.cache
        if cache is None or cache.is_full or (window.is_one_place and window.source[0] == CACHED):
            return False
        for one in np.unique(run[window.source[run] != CACHED]).tolist():
            if not cache.is_full:
                entry = window.entries[one]
                self.note_moved(
                    cache.put_rows(entry.trajectory_id, {entry.layout: self.rows_of(entry)})
                )
        return self._window is None

    def _fields_of_several_layouts(
        self, window: Window, run: Int64s, row: Int64s, names: tuple[str, ...]
    ) -> dict[str, Any]:
        out: dict[str, torch.Tensor] = {}
        layout = window.layout[run]
        for number in np.unique(layout).tolist():
            chosen = np.flatnonzero(layout == number)
            if lacking := [name for name in names if name not in window.layouts[number].schema]:
                raise _missing(lacking[0], window.entries[run[chosen[0]]])
            fields = self._fields(
                window, run[chosen], row[chosen], names, contiguous=False, nested=False
            )
            for name, part in fields.items():
                if name not in out:
                    out[name] = self.pool.empty((len(row), *part.shape[1:]), part.dtype)
                signed(out[name])[torch.from_numpy(chosen)] = signed(part)
        return unflatten({name: out[name] for name in names})

    def _fields(
        self,
        window: Window,
        run: Int64s,
        row: Int64s,
        names: tuple[str, ...],
        contiguous: bool,
        nested: bool,
    ) -> dict[str, Any]:
        """Gather the rows of steps with the same layout, and split the rows into fields."""
        layout = window.entries[run[0]].layout
        plan, columns = _cut_of(layout, names, contiguous, nested)
        wanted = [name for name in columns if name is not None]
        if window.is_one_place or len(run) == 1:
            rows = self._rows_at_one_place(window, run, row, wanted)
        else:
            source = window.source[run]
            # `_rows_at_one_place` reads ELSEWHERE rows of one run only, so each run gets a number.
            place = np.where(source == ELSEWHERE, -1 - run, source)
            rows = {
                name: self._empty(len(row), layout.columns[name].row_bytes // 4).numpy()
                for name in wanted
            }
            for one in np.unique(place):
                chosen = np.flatnonzero(place == one)
                for name, part in self._rows_at_one_place(
                    window, run[chosen], row[chosen], wanted
                ).items():
                    rows[name][chosen] = part
        return plan([None if name is None else rows[name] for name in columns])

    def _rows_at_one_place(
        self, window: Window, run: Int64s, row: Int64s, columns: list[str]
    ) -> Arrays:
        """Copy rows that are all in the cache, all in mapped files, or all in one other run."""
        entry = window.entries[run[0]]
        source = window.source[run[0]]
        if source == MAPPED:
            return self._mapped_rows(window, run, row, columns)
        if source == CACHED and self.cache is not None:
            words = self.cache.find(entry.trajectory_id)[0].block.words
        else:
            words = self.rows_of(entry)
        return {name: self._taken(words[name], row) for name in columns}

    def _mapped_rows(self, window: Window, run: Int64s, row: Int64s, columns: list[str]) -> Arrays:
        used, which = np.unique(run, return_inverse=True)
        entries = [window.entries[one] for one in used.tolist()]
        files = self._files_of(entries)
        firsts = np.array([files.mapped[one.block.identity][1] for one in entries if one.block])
        found = {}
        for place, (_, name) in enumerate(files.places):
            if name in columns:
                mapped = files.arenas[DATA, name]
                rows = firsts[which, place] + row
                if not all(
                    map(mapped.is_resident, rows[:: max(1, len(rows) // _NUM_PROBES)].tolist())
                ):
                    # Starts all disk reads at once, instead of one per page fault.
                    mapped.will_need(np.sort(rows), np.ones_like(rows))
                found[name] = self._taken(mapped.words_view, rows)
        return found

    def _files_of(self, entries: list[Entry]) -> FileMap:
        """Return a map of files that includes those of `entries`, which have the same layout."""
        layout = entries[0].layout
        blocks = [entry.block for entry in entries if entry.block is not None]
        files = self._files.get(layout)
        new = (
            blocks
            if files is None
            else [block for block in blocks if block.identity not in files.mapped]
        )
        if (
            files is None
            or len(files.mapped) + len(new) > MAX_MAPPED_FILES
            or (new and not files.has_room(new))
        ):
            self._files.pop(layout, None)  # Unmaps the files of this layout.
            files = FileMap({DATA: layout}, blocks)
            new = blocks
            self._files[layout] = files
        for block in new:
            with naming(block.sequence, block.path):
                files.add(block)
        return files

    def _taken(self, words: torch.Tensor, rows: Int64s) -> npt.NDArray[np.int32]:
        if (num_bytes := 4 * len(rows) * words.shape[1]) < MIN_POOLED_BYTES:
            few: npt.NDArray[np.int32] = words.numpy().take(rows, axis=0, mode="clip")
            return few
        out = self._empty(len(rows), words.shape[1])
        if num_bytes <= _MAX_NUMPY_BYTES:
            take_rows(words.numpy(), rows, out.numpy())
        else:
            torch.index_select(words, 0, torch.from_numpy(rows), out=out)
        return out.numpy()

    def _empty(self, num_rows: int, num_words: int) -> torch.Tensor:
        return self.pool.empty((num_rows, num_words), torch.int32)


def check_fields(known: dict[str, Field], fields: Iterable[Field]) -> None:
    """Add `fields` to `known`, and check fields that it already has.

    Raises:
        SchemaError: A field in `known` has a different dtype or shape.
    """
    for one in fields:
        before = known.setdefault(one.name, one)
        if (before.dtype, before.shape) != (one.dtype, one.shape):
            raise SchemaError(
                f"field {one.name!r} has {one.dtype}{list(one.shape)} per step, expected "
                f"{before.dtype}{list(before.shape)}."
            )


@lru_cache(maxsize=256)
def _cut_of(
    layout: RowLayout, names: tuple[str, ...], contiguous: bool, nested: bool
) -> tuple[Cut, list[str | None]]:
    """Return a function that splits rows into fields, and the columns that the function needs.

    The columns are a list with the name of each column in layout order, or None if it is unused.
    """
    groups = []
    for column in layout.columns.values():
        spans = [(layout.schema[name], first) for name, first in column.offsets.items()]
        parts = tuple(Part(field, first, first + field.row_bytes) for field, first in spans)
        groups.append(Group(parts, column.row_bytes // 4, torch.float32))
    plan = Cut(groups, [Target(0, name, name) for name in names], contiguous, nested)
    return plan, [
        name if width else None for name, width in zip(layout.columns, plan.widths, strict=True)
    ]


def _missing(name: str, entry: Entry) -> MissingFieldError:
    return MissingFieldError(
        f"trajectory {entry.trajectory_id} has no field {name!r}. "
        f"The fields are {nearest(name, entry.layout.schema)}."
    )
