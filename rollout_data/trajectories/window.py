"""Which rows a sample takes: uniform draws over the steps of the newest trajectories, and where they lie.

One rule: decided by arithmetic on a few arrays, one number per trajectory; rows are moved elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from .cache import Cached, TrajectoryCache
from .index import Entry

Int64s = npt.NDArray[np.int64]
#: Where a trajectory's rows are: in the cache, in a mapped file, or elsewhere (to be read whole).
CACHED, MAPPED, ELSEWHERE = range(3)


class Window:
    """The trajectories that can be drawn from, at one moment.

    Args:
        entries: Oldest first.
        cache: Where rows may be; None for none.

    Attributes:
        num_samples: Steps of all together.
        layouts: The different layouts among them.
        names: The fields that every one of them has, in the order of the first.
        source: `[W]`, `CACHED`, `MAPPED` or `ELSEWHERE`.
        layout_number: `[W]`, position in `layouts`.
    """

    def __init__(self, entries: Sequence[Entry], cache: TrajectoryCache | None) -> None:
        self.entries = list(entries)
        sizes = np.array([entry.num_samples for entry in self.entries], np.int64)
        self._ends = np.cumsum(sizes)
        self.num_samples = int(self._ends[-1]) if len(sizes) else 0
        places = [_place(entry, cache) for entry in self.entries]
        self.source = np.array([source for source, _ in places], np.int8)
        first = np.array([first for _, first in places], np.int64)
        #: `[W]`; added to a draw it gives the row in the block of the cache, or within the trajectory.
        self.shift = first - (self._ends - sizes)
        self.layouts = list(dict.fromkeys(entry.layout for entry in self.entries))
        numbers = {layout: number for number, layout in enumerate(self.layouts)}
        self.layout_number = np.array([numbers[entry.layout] for entry in self.entries], np.int64)
        common = [name for name in self.layouts[0].names if all(name in one.names for one in self.layouts)]
        self.names = tuple(common)
        self.is_cached = bool((self.source == CACHED).all())
        #: All is one gather from one block of the cache.
        self.is_one_block = self.is_cached and len(self.layouts) == 1
        # Trajectories that lie in a row are one run, so that few bounds are searched.
        starts = np.flatnonzero(np.diff(self.shift, prepend=self.shift[:1] - 1))
        self._run_ends, self._run_shift = self._ends[[*(starts[1:] - 1), -1]], self.shift[starts]

    def draw(self, number: int, rng: torch.Generator) -> tuple[Int64s, Int64s]:
        """Draw steps uniformly, with replacement: `[number]` trajectory (position here) and row (see `source`)."""
        draws = torch.randint(self.num_samples, (number,), generator=rng).numpy()
        which = np.searchsorted(self._ends, draws, side="right")
        draws += self.shift[which]
        return which, draws

    def draw_rows(self, number: int, rng: torch.Generator) -> torch.Tensor:
        """Draw the same steps as `draw`, where all lie in one block: rows `[number]` of that."""
        draws = torch.randint(self.num_samples, (number,), generator=rng)
        rows = draws.numpy()
        if len(self._run_shift) == 1:
            rows += self._run_shift[0]
        else:
            rows += self._run_shift[np.searchsorted(self._run_ends, rows, side="right")]
        return draws

    def lacking(self, name: str, which: Int64s) -> Entry | None:
        """Give a drawn trajectory that does not have a field, if there is one."""
        for number, layout in enumerate(self.layouts):
            if name not in layout.names:
                drawn = which[self.layout_number[which] == number]
                if len(drawn):
                    return self.entries[int(drawn[0])]
        return None


def cached_part(entry: Entry, cache: TrajectoryCache) -> Cached:
    """Say where an entry's rows stand in the cache: in one part, as all fields have one length."""
    [part] = cache.find(entry.trajectory_id)
    return part


def _place(entry: Entry, cache: TrajectoryCache | None) -> tuple[int, int]:
    if cache is not None and entry.trajectory_id in cache:
        return CACHED, cached_part(entry, cache).first
    return (MAPPED if entry.block is not None else ELSEWHERE), 0
