"""Move drawn steps into a batch: from the cache, from mapped files, from files that are read whole.

One rule: two gathers at most, one from the cache and one from mapped files, and no file is opened
twice for one sample. What to draw is decided in `window.py`, what may be asked for in `sampling.py`.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import torch

from storage.buffer_pool import BufferPool
from storage.fields import signed
from storage.tree import unflatten

from .cache import TrajectoryCache
from .files import MappedRows, naming, read_trajectory
from .index import Entry
from .rows import MAX_CUTS, Cutting, Rows, TrajectoryLayout
from .table import CACHED, ELSEWHERE, MAPPED, cached_part
from .window import Int64s, Window


class Gatherer:
    """Moves rows; belongs to one buffer and is called under its lock."""

    def __init__(self, trusted: bool) -> None:
        self._trusted = trusted
        self.pool = BufferPool(16)
        self._mapped: dict[TrajectoryLayout, MappedRows] = {}
        self._cuts: dict[tuple[TrajectoryLayout, tuple[str, ...], bool], Cutting] = {}

    def sample_one_block(
        self,
        window: Window,
        cache: TrajectoryCache,
        number: int,
        rng: torch.Generator,
        names: Collection[str] | None,
        contiguous: bool = False,
    ) -> dict[str, Any]:
        """Draw steps where all lie in one block of the cache, and give them as `sample` does.

        All that can fail comes before the draw, as saving the random state would cost a fiftieth of a sample; all but
        to make room for contiguous tensors, for which the caller saves it.
        """
        layout = window.layouts[0]
        plan, columns = self._cutting(layout, window.names if names is None else tuple(names), contiguous)
        block = cached_part(window.entries[0], cache).block
        sources = [None if column is None else block.words(column) for column in columns]
        rows = [None if x is None else plan.room(place, number, x, x.shape[1]) for place, x in enumerate(sources)]
        drawn = window.draw_rows(number, rng)
        for source, one in zip(sources, rows, strict=True):
            if source is not None and one is not None:
                one.fill(source, drawn)
        return plan(rows)

    def sample(
        self,
        window: Window,
        cache: TrajectoryCache | None,
        which: Int64s,
        row: Int64s,
        names: Collection[str] | None,
        contiguous: bool,
    ) -> dict[str, Any]:
        """Give drawn steps (see `Window.draw`) as a nested dict of new tensors `[n, ...]`."""
        wanted = window.names if names is None else tuple(names)
        if len(window.layouts) == 1:
            layout = window.layouts[0]
            rows = self._rows(window, cache, layout, which, row, layout.columns_of(wanted))
            return layout.cut(rows, wanted, contiguous, nested=True)
        out: dict[str, torch.Tensor] = {}
        numbers = window.layout_number[which]
        for number, layout in enumerate(window.layouts):
            chosen = np.flatnonzero(numbers == number)
            if len(chosen):
                rows = self._rows(window, cache, layout, which[chosen], row[chosen], layout.columns_of(wanted))
                for name, part in layout.cut(rows, wanted, contiguous=False).items():
                    if name not in out:
                        out[name] = torch.empty((len(which), *part.shape[1:]), dtype=part.dtype, device="cpu")
                    signed(out[name])[torch.from_numpy(chosen)] = signed(part)
        return unflatten({name: out[name] for name in wanted})

    def load(self, entry: Entry) -> Rows:
        """Give all rows of an entry that is not in the cache; not to be changed."""
        if entry.rows is not None:
            return entry.rows
        if entry.block is not None:
            return entry.block.rows()
        assert entry.path is not None
        with naming(entry.trajectory_id, entry.path):
            return entry.layout.pack(read_trajectory(entry.path, self._trusted).tensors, self.pool)

    def fill(self, window: Window, cache: TrajectoryCache, which: Int64s) -> bool:
        """Put drawn trajectories into the cache while it has room; tell whether there were any."""
        is_changed = False
        for place in np.unique(which[window.source[which] != CACHED]).tolist():
            if cache.max_size and len(cache) >= cache.max_size:
                break
            entry = window.entries[place]
            cache.put_rows(entry.trajectory_id, [(entry.layout, self.load(entry))])
            is_changed = True
        return is_changed

    def forget(self, entry: Entry) -> None:
        """Unmap the file of an entry that is not live any more, so that its room on the disk comes back."""
        if entry.block is not None and entry.layout in self._mapped:
            self._mapped[entry.layout].unmap(entry.block)

    def close(self) -> None:
        """Give mapped files and the memory of samples back. Idempotent."""
        self._cuts.clear()
        for mapped in self._mapped.values():
            mapped.close()
        self._mapped.clear()

    def _cutting(self, layout: TrajectoryLayout, names: tuple[str, ...], contiguous: bool) -> Cutting:
        """Say how rows are gathered and cut; the plans of many samples are kept, with their memory."""
        key = layout, names, contiguous
        found = self._cuts.get(key)
        if found is None:
            if len(self._cuts) >= MAX_CUTS:
                self._cuts.clear()
            found = self._cuts[key] = layout.cutting(names, contiguous, nested=True)
        return found

    def _rows(
        self,
        window: Window,
        cache: TrajectoryCache | None,
        layout: TrajectoryLayout,
        which: Int64s,
        row: Int64s,
        columns: list[str],
    ) -> Rows:
        """Gather the columns of steps whose trajectories all have one layout."""
        widths = layout.widths()
        out = {name: self.pool.empty((len(which), widths[name]), torch.int32) for name in columns}
        if window.is_cached:
            self._from_cache(window, cache, int(which[0]), torch.from_numpy(row), out)
            return out
        source = window.source[which]
        chosen = np.flatnonzero(source == CACHED)
        if len(chosen):
            part = {name: self.pool.empty((len(chosen), widths[name]), torch.int32) for name in columns}
            self._from_cache(window, cache, int(which[chosen[0]]), torch.from_numpy(row[chosen]), part)
            _put(part, chosen, out)
        chosen = np.flatnonzero(source == MAPPED)
        if len(chosen):
            places, inverse = np.unique(which[chosen], return_inverse=True)
            blocks = [block for place in places.tolist() if (block := window.entries[place].block) is not None]
            mapped = self._mapped.setdefault(layout, MappedRows(layout))
            _put(mapped.gather(blocks, inverse, row[chosen], columns), chosen, out)
        for place in np.unique(which[source == ELSEWHERE]).tolist():
            chosen = np.flatnonzero(which == place)
            whole = self.load(window.entries[place])
            _put({name: whole[name][torch.from_numpy(row[chosen])] for name in columns}, chosen, out)
        return out

    def _from_cache(
        self, window: Window, cache: TrajectoryCache | None, place: int, row: torch.Tensor, out: Rows
    ) -> None:
        assert cache is not None
        block = cached_part(window.entries[place], cache).block
        for name, target in out.items():
            torch.index_select(block.words(name), 0, row, out=target)


def _put(rows: Rows, chosen: Int64s, out: Rows) -> None:
    for name, part in rows.items():
        # Through numpy, which takes a quarter of the time of `index_copy_`.
        out[name].numpy()[chosen] = part.numpy()
