"""Which rows a sample takes: uniform draws over the steps of the newest trajectories, and where they lie.

One rule: decided by arithmetic on a few arrays, one number per trajectory; rows are moved elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from storage.modes import lasting
from storage.samplers import fill_uniform, uniform

from .index import Entry
from .rows import TrajectoryLayout
from .table import CACHED, Rows

Int64s = npt.NDArray[np.int64]


class Window:
    """The trajectories that can be drawn from, at one moment.

    Args:
        entries: Oldest first.
        rows: Their rows of the `TrajectoryTable`.
        layouts: What `rows["layout"]` counts.

    Attributes:
        num_samples: Steps of all together.
        layouts: The different layouts among them.
        names: The fields that every one of them has, in the order of the first.
        source: `[W]`, `CACHED`, `MAPPED` or `ELSEWHERE`.
        layout_number: `[W]`, position in `layouts`.
    """

    def __init__(self, entries: list[Entry], rows: Rows, layouts: Sequence[TrajectoryLayout]) -> None:
        self.entries = entries
        sizes = rows["size"]
        self._ends = np.cumsum(sizes)
        self.num_samples = int(self._ends[-1]) if len(sizes) else 0
        self.source = np.ascontiguousarray(rows["source"])
        #: `[W]`; added to a draw it gives the row in the block of the cache, or within the trajectory.
        self.shift = rows["first"] - (self._ends - sizes)
        used = list(dict.fromkeys(rows["layout"].tolist())) if len(layouts) > 1 else [0]
        self.layouts = [layouts[one] for one in used]
        numbers = np.zeros(len(layouts), np.int64)
        numbers[used] = np.arange(len(used))
        self.layout_number = numbers[rows["layout"]]
        common = [name for name in self.layouts[0].names if all(name in one.names for one in self.layouts)]
        self.names = tuple(common)
        self.is_cached = bool((self.source == CACHED).all())
        #: All is one gather from one block of the cache.
        self.is_one_block = self.is_cached and len(self.layouts) == 1
        # Trajectories that lie in a row are one run, so that few bounds are searched.
        starts = np.flatnonzero(np.diff(self.shift, prepend=self.shift[:1] - 1))
        self._run_ends, self._run_shift = self._ends[[*(starts[1:] - 1), -1]], self.shift[starts]
        self._drawn = _room(0)
        self._only_shift = int(self._run_shift[0]) if len(starts) == 1 else None

    def draw(self, number: int, rng: torch.Generator) -> tuple[Int64s, Int64s]:
        """Draw steps uniformly, with replacement: `[number]` trajectory (position here) and row (see `source`)."""
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
        shift = self._only_shift
        if shift is not None:
            return fill_uniform(self._drawn, self.num_samples, rng, shift)
        rows = fill_uniform(self._drawn, self.num_samples, rng).numpy()
        rows += self._run_shift[np.searchsorted(self._run_ends, rows, side="right")]
        return self._drawn

    def lacking(self, name: str, which: Int64s) -> Entry | None:
        """Give a drawn trajectory that does not have a field, if there is one."""
        for number, layout in enumerate(self.layouts):
            if name not in layout.names:
                drawn = which[self.layout_number[which] == number]
                if len(drawn):
                    return self.entries[int(drawn[0])]
        return None


@lasting
def _room(number: int) -> torch.Tensor:
    return torch.empty(number, dtype=torch.int64, device="cpu")
