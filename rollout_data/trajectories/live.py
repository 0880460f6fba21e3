"""Which trajectories are live, oldest first, where their rows lie, and the windows that may be drawn from.

One rule: what is counted is what is live. What changed is noted at once, in numbers of one trajectory, so that adding
one costs the same however many there are; a window is made of these numbers, and only after something changed.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import compress, islice

import numpy as np
import numpy.typing as npt
import torch

from storage.core.fields import Field
from storage.core.modes import lasting
from storage.core.samplers import fill_uniform, uniform
from storage.errors import BufferEmptyError, SchemaError

from .cache import RowBlock, TrajectoryCache
from .files import id_in_name
from .index import Entry
from .rows import TrajectoryLayout

Int64s = npt.NDArray[np.int64]
#: Where a trajectory's rows are: in the cache, in a mapped file, or elsewhere (to be read whole).
CACHED, MAPPED, ELSEWHERE = range(3)
#: Of a trajectory; `first` is its first row in the block of the cache, 0 where the rows are not cached.
_NUMBERS = np.dtype([("size", "i8"), ("first", "i8"), ("layout", "i4"), ("source", "i1")])
_FIRST_ROOM = 64
#: Windows of so many different conditions are kept.
_MAX_WINDOWS = 8


class LiveTrajectories:
    """The live trajectories of a buffer; called under its lock.

    Args:
        window_size: How many of the newest may be drawn from; 0 for all.
        capacity: How many are kept; None for any number.
        cache: Where rows may be, which tells what comes and goes there.

    Attributes:
        cache: The same.
        entries: Id -> entry, oldest first.
        fields: Every field that any of them had, so that none changes its dtype or shape.
        num_samples: Steps of all.
    """

    def __init__(self, window_size: int, capacity: int | None, cache: TrajectoryCache | None) -> None:
        self._window_size, self._capacity, self.cache = window_size, capacity, cache
        self.entries: dict[int, Entry] = {}
        self.fields: dict[str, Field] = {}
        self.num_samples = 0
        self._layouts: dict[TrajectoryLayout, int] = {}
        #: The numbers of all entries end at `_stop`; there were `_offset` trajectories before the first of them.
        self._numbers, self._stop, self._offset = np.zeros(_FIRST_ROOM, _NUMBERS), 0, 0
        self._windows: dict[int | None, Window] = {}
        if cache is not None:
            cache.on_moved = self.moved

    def append(self, entry: Entry) -> list[Entry]:
        """Make an entry live; give those, the oldest, that are not any more."""
        check_fields(self.fields, entry.layout.schema.values())
        if self._stop == len(self._numbers):
            start = self._stop - len(self.entries)
            room = np.zeros(max(_FIRST_ROOM, len(self.entries)), _NUMBERS)
            self._numbers = np.concatenate([self._numbers[start:], room])
            self._stop, self._offset = len(self.entries), self._offset + start
        entry.place = self._offset + self._stop
        self._stop += 1
        self.entries[entry.trajectory_id] = entry
        self.num_samples += entry.num_samples
        self.moved(entry.trajectory_id)
        num_over = 0 if self._capacity is None else len(self.entries) - self._capacity
        gone = [self.entries.pop(one) for one in list(islice(self.entries, max(0, num_over)))]
        self.num_samples -= sum(one.num_samples for one in gone)
        return gone

    def kept(self, entries: list[Entry]) -> list[Entry]:
        """Say which of these, oldest first, would be live if they were appended now, with nothing before.

        Those that several ranks have saved come one rank after the other: their ids, which all ranks count up
        side by side, tell when; not so if ranks have given the same ids, for which new ones stand here. One
        folder tells by the order in which it lists them.
        """
        paths = [entry.path for entry in entries if entry.path is not None]
        ids = [entry.trajectory_id for entry in entries]
        if len({path.parent for path in paths}) > 1 and ids == [id_in_name(path) for path in paths]:
            entries = sorted(entries, key=lambda entry: entry.trajectory_id)
        return entries if self._capacity is None else entries[-self._capacity :]

    def moved(self, trajectory_id: int) -> None:
        """Note where the rows of a trajectory, if it is live, lie now."""
        entry = self.entries.get(trajectory_id)
        if entry is not None:
            number = self._layouts.setdefault(entry.layout, len(self._layouts))
            source, first = MAPPED if entry.block is not None else ELSEWHERE, 0
            if self.cache is not None and trajectory_id in self.cache:
                source, first = CACHED, self.cache.find(trajectory_id)[0].first
            self._numbers[entry.place - self._offset] = entry.num_samples, first, number, source
            self._windows.clear()

    def window(self, min_weights_version: int | None = None) -> Window:
        """Give what may be drawn from.

        Raises:
            BufferEmptyError: Nothing.
        """
        window = self._windows.get(min_weights_version)
        if window is None:
            size = min(self._window_size or len(self.entries), len(self.entries))
            entries = list(islice(reversed(self.entries.values()), size))[::-1]
            numbers = self._numbers[self._stop - size : self._stop]
            if min_weights_version is not None:
                is_recent = [entry.is_recent(min_weights_version) for entry in entries]
                numbers, entries = numbers[np.array(is_recent, bool)], list(compress(entries, is_recent))
            if not entries:
                got = "none" if min_weights_version is None else f"none of version {min_weights_version} or later"
                raise BufferEmptyError("sample", "", "at least one trajectory", got)
            if len(self._windows) >= _MAX_WINDOWS:
                self._windows.clear()
            window = self._windows[min_weights_version] = Window(entries, numbers, list(self._layouts), self.cache)
        return window


class Window:
    """The trajectories that can be drawn from, at one moment.

    Args:
        entries: Oldest first.
        numbers: Theirs, `[W]` of `_NUMBERS`.
        layouts: What `numbers["layout"]` counts.
        cache: Where rows are that are cached.

    Attributes:
        num_samples: Steps of all together.
        layouts: The different layouts among them.
        names: The fields that every one of them has, in the order of the first.
        source: `[W]`, `CACHED`, `MAPPED` or `ELSEWHERE`.
        layout_number: `[W]`, position in `layouts`.
        shift: `[W]`; added to a draw it gives the row in the block of the cache, or within the trajectory.
        is_one_block: All is one gather from one block of the cache.
    """

    def __init__(
        self,
        entries: list[Entry],
        numbers: npt.NDArray[np.void],
        layouts: list[TrajectoryLayout],
        cache: TrajectoryCache | None,
    ) -> None:
        self.entries, self.cache = entries, cache
        self._ends = np.cumsum(numbers["size"])
        self.num_samples = int(self._ends[-1])
        self.source = np.ascontiguousarray(numbers["source"])
        self.shift = numbers["first"] - (self._ends - numbers["size"])
        used = list(dict.fromkeys(numbers["layout"].tolist())) if len(layouts) > 1 else [0]
        self.layouts = [layouts[one] for one in used]
        positions = np.zeros(len(layouts), np.int64)
        positions[used] = np.arange(len(used))
        self.layout_number = positions[numbers["layout"]]
        self.names = tuple(name for name in self.layouts[0].names if all(name in one.names for one in self.layouts[1:]))
        self.is_one_block = len(self.layouts) == 1 and bool((self.source == CACHED).all())
        # Trajectories that lie in a row are one run, so that few bounds are searched.
        starts = np.flatnonzero(np.diff(self.shift, prepend=self.shift[:1] - 1))
        self._run_ends, self._run_shift = self._ends[[*(starts[1:] - 1), -1]], self.shift[starts]
        self._drawn = _room(0)

    def block(self, place: int) -> RowBlock:
        """Give the rows of the cache in which those of a cached trajectory are."""
        assert self.cache is not None
        return self.cache.find(self.entries[place].trajectory_id)[0].block

    def draw(self, number: int, rng: torch.Generator) -> tuple[Int64s, Int64s]:
        """Draw steps uniformly, with replacement: `[number]` trajectory (position here) and row (see `shift`)."""
        draws = uniform(self.num_samples, number, rng).numpy()
        which = np.searchsorted(self._ends, draws, side="right")
        draws += self.shift[which]
        return which, draws

    def draw_rows(self, number: int, rng: torch.Generator) -> torch.Tensor:
        """Draw the same steps as `draw`, where all lie in one block: rows `[number]` of that.

        They are this window's own, and are drawn over the next time.
        """
        if len(self._drawn) != number:
            self._drawn = _room(number)
        if len(self._run_shift) == 1:
            return fill_uniform(self._drawn, self.num_samples, rng, int(self._run_shift[0]))
        rows = fill_uniform(self._drawn, self.num_samples, rng).numpy()
        rows += self._run_shift[np.searchsorted(self._run_ends, rows, side="right")]
        return self._drawn


@lasting
def _room(number: int) -> torch.Tensor:
    return torch.empty(number, dtype=torch.int64, device="cpu")


def check_fields(known: dict[str, Field], fields: Iterable[Field]) -> None:
    """Raise `SchemaError` if a field has another dtype or shape than it is known with; note new ones."""
    for one in fields:
        before = known.setdefault(one.name, one)
        if (before.dtype, before.shape) != (one.dtype, one.shape):
            expected, got = (f"{each.dtype}{list(each.shape)} per step" for each in (before, one))
            raise SchemaError("store the leaf", repr(one.name), expected, got)
