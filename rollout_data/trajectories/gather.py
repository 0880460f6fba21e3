"""One sample: check what is asked for, draw steps, move their rows into a batch.

One rule: a sample that raises has drawn nothing: the random numbers are where they were. Two gathers at most, one from
the cache and one from mapped files, and no file is opened twice. What may be drawn is decided in `live.py`.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from storage.core.buffer_pool import BufferPool
from storage.core.fields import signed
from storage.core.records import Key, flat_name
from storage.core.tree import unflatten
from storage.errors import MissingFieldError, UsageError, nearest

from .files import MappedRows, naming, read_trajectory
from .index import Entry
from .live import CACHED, ELSEWHERE, MAPPED, Int64s, LiveTrajectories, Window
from .rows import MAX_CUTS, Rows, TrajectoryLayout, cutting


class Gatherer:
    """Moves rows; belongs to one buffer and is called under its lock."""

    def __init__(self, trusted: bool) -> None:
        self._trusted = trusted
        self.pool = BufferPool(16)
        self._mapped: dict[TrajectoryLayout, MappedRows] = {}
        #: The plans of many samples are kept, with their memory.
        self._cutting = lru_cache(MAX_CUTS)(cutting)

    def sample(
        self,
        live: LiveTrajectories,
        rng: torch.Generator,
        num_steps: int,
        keys: Collection[Key] | None,
        min_weights_version: int | None,
        contiguous: bool,
    ) -> dict[str, Any]:
        """Draw steps and give them as a nested dict of new tensors `[num_steps, ...]`.

        Raises:
            BufferEmptyError: There is nothing to draw from.
            MissingFieldError: No trajectory that may be drawn has a key, or one that was drawn does not.
            SchemaError, UsageError: A key is neither a str nor a tuple of them, or the keys are no collection of them.
        """
        window = live.window(min_weights_version)
        names = window.names if keys is None else _names_of(window, keys)
        if window.is_one_block and not contiguous:
            return self._sample_one_block(window, rng, num_steps, names, contiguous)
        before = rng.get_state()
        try:
            if window.is_one_block:
                return self._sample_one_block(window, rng, num_steps, names, contiguous)
            which, row = window.draw(num_steps, rng)
            _check_drawn(window, names, which)
            if self._fill(window, which):
                # The same steps, where they lie now.
                moved = live.window(min_weights_version)
                row += moved.shift[which] - window.shift[which]
                window = moved
            return self._gather(window, which, row, names, contiguous)
        except BaseException:  # Ctrl-C too
            rng.set_state(before)
            raise

    def load(self, entry: Entry) -> Rows:
        """Give all rows of an entry that is not in the cache; not to be changed."""
        if entry.rows is not None:
            return entry.rows
        if entry.block is not None:
            return entry.block.rows()
        assert entry.path is not None
        with naming(entry.trajectory_id, entry.path):
            return entry.layout.pack(read_trajectory(entry.path, self._trusted).tensors, self.pool)

    def forget(self, entry: Entry) -> None:
        """Unmap the file of an entry that is not live any more, so that its room on the disk comes back."""
        if entry.block is not None and entry.layout in self._mapped:
            self._mapped[entry.layout].unmap(entry.block)

    def close(self) -> None:
        """Give mapped files and the memory of samples back. Idempotent."""
        self._cutting.cache_clear()
        for mapped in self._mapped.values():
            mapped.close()
        self._mapped.clear()

    def _sample_one_block(
        self, window: Window, rng: torch.Generator, number: int, names: tuple[str, ...], contiguous: bool
    ) -> dict[str, Any]:
        """Do it where all steps lie in one block of the cache.

        All that can fail comes before the draw, as saving the random state would cost a fiftieth of a sample; all but
        to make room for contiguous tensors, for which the caller saves it.
        """
        plan, columns = self._cutting(window.layouts[0], names, contiguous, True)
        block = window.block(0)
        sources = [None if column is None else block.words(column) for column in columns]
        rows = [None if x is None else plan.room(place, number, x, x.shape[1]) for place, x in enumerate(sources)]
        drawn = window.draw_rows(number, rng)
        for source, one in zip(sources, rows, strict=True):
            if source is not None and one is not None:
                one.fill(source, drawn)
        return plan(rows)

    def _fill(self, window: Window, which: Int64s) -> bool:
        """Put drawn trajectories into the cache while it has room; tell whether there were any."""
        cache, is_changed = window.cache, False
        for place in np.unique(which[window.source[which] != CACHED]).tolist():
            if cache is None or (cache.max_size and len(cache) >= cache.max_size):
                break
            entry = window.entries[place]
            cache.put_rows(entry.trajectory_id, [(entry.layout, self.load(entry))])
            is_changed = True
        return is_changed

    def _gather(
        self, window: Window, which: Int64s, row: Int64s, names: tuple[str, ...], contiguous: bool
    ) -> dict[str, Any]:
        """Give drawn steps (see `Window.draw`) as a nested dict."""
        out: dict[str, torch.Tensor] = {}
        is_one, numbers = len(window.layouts) == 1, window.layout_number[which]
        for number, layout in enumerate(window.layouts):
            chosen = np.flatnonzero(numbers == number)
            if len(chosen):
                plan, columns = self._cutting(layout, names, is_one and contiguous, is_one)
                rows = self._rows(window, which[chosen], row[chosen], [name for name in columns if name is not None])
                parts = plan([None if name is None else plan.seen(k, rows[name]) for k, name in enumerate(columns)])
                if is_one:
                    return parts
                for name, part in parts.items():
                    if name not in out:
                        out[name] = torch.empty((len(which), *part.shape[1:]), dtype=part.dtype, device="cpu")
                    signed(out[name])[torch.from_numpy(chosen)] = signed(part)
        return unflatten({name: out[name] for name in names})

    def _rows(self, window: Window, which: Int64s, row: Int64s, columns: list[str]) -> Rows:
        """Gather the columns of steps whose trajectories all have one layout."""
        source = window.source[which]
        parts = [(kind, np.flatnonzero(source == kind)) for kind in (CACHED, MAPPED)]
        apart = np.unique(which[source == ELSEWHERE]).tolist()
        parts += [(ELSEWHERE, np.flatnonzero(which == place)) for place in apart]
        out: Rows = {}
        for kind, chosen in parts:
            if len(chosen):
                found = self._rows_from(kind, window, which[chosen], row[chosen], columns)
                if len(chosen) == len(which):
                    return found
                for name, part in found.items():
                    if name not in out:
                        out[name] = self.pool.empty((len(which), part.shape[1]), torch.int32)
                    # Through numpy, which takes a quarter of the time of `index_copy_`.
                    out[name].numpy()[chosen] = part.numpy()
        return out

    def _rows_from(self, kind: int, window: Window, which: Int64s, row: Int64s, columns: list[str]) -> Rows:
        """Gather rows that are in the cache, in mapped files, or of one trajectory that is read whole."""
        entry = window.entries[int(which[0])]
        if kind == MAPPED:
            places, inverse = np.unique(which, return_inverse=True)
            blocks = [block for place in places.tolist() if (block := window.entries[place].block) is not None]
            mapped = self._mapped.setdefault(entry.layout, MappedRows(entry.layout))
            return mapped.gather(blocks, inverse, row, columns)
        if kind == CACHED:
            block = window.block(int(which[0]))
            words = {name: block.words(name) for name in columns}
        else:
            words = self.load(entry)
        rooms = {name: self.pool.empty((len(row), words[name].shape[1]), torch.int32) for name in columns}
        index = torch.from_numpy(row)
        return {name: torch.index_select(words[name], 0, index, out=room) for name, room in rooms.items()}


def _names_of(window: Window, keys: Collection[Key]) -> tuple[str, ...]:
    """List the leaves that keys mean: each itself, or all below it that any trajectory of a window has."""
    is_list = isinstance(keys, Collection) and not isinstance(keys, str)
    if not is_list or not all(isinstance(key, (str, tuple)) for key in keys):
        raise UsageError("choose the keys of a sample", "", "a list of keys", repr(keys))
    there = dict.fromkeys(name for layout in window.layouts for name in layout.names)
    found: dict[str, None] = {}
    for key in keys:
        name = flat_name(key)
        below = [name] if name in there else [one for one in there if one.startswith(f"{name}/")]
        if not below:
            raise _missing(name, window.entries[0])
        found.update(dict.fromkeys(below))
    return tuple(found)


def _check_drawn(window: Window, names: tuple[str, ...], which: Int64s) -> None:
    """Raise if a drawn trajectory does not have one of the names."""
    for number, layout in enumerate(window.layouts if names is not window.names else ()):
        lacking = [name for name in names if name not in layout.names]
        drawn = which[window.layout_number[which] == number]
        if lacking and len(drawn):
            raise _missing(lacking[0], window.entries[int(drawn[0])])


def _missing(name: str, entry: Entry) -> MissingFieldError:
    where = f"{name!r} of trajectory {entry.trajectory_id}"
    return MissingFieldError("sample the key", where, nearest(name, entry.layout.names), "none")
