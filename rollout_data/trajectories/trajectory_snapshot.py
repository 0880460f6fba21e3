"""`TrajectorySnapshot`: the trajectories to sample from, and the locations of their rows."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import numpy.typing as npt

from storage.core.records import Key, flat_name
from storage.errors import MissingFieldError, UsageError, nearest

from ..blocks.row_layout import RowLayout
from .trajectory_files import Entry

Int64s = npt.NDArray[np.int64]
#: Where the rows of a trajectory are: in the cache, in a file that can be mapped, or elsewhere (in
#: other memory, or in a file that must be read completely).
CACHED, MAPPED, ELSEWHERE = range(3)
#: One trajectory of a buffer as a row of a numpy table. "size" is its number of steps. "layout" is
#: the index of its row layout. "location" is `CACHED`, `MAPPED` or `ELSEWHERE`. "first" is the
#: index of its first row in the memory of the cache, 0 if it is not cached.
TABLE_DTYPE = np.dtype([("size", "i8"), ("layout", "i8"), ("location", "i8"), ("first", "i8")])
_FIRST_RUN = np.zeros(1, np.int64)


class TrajectorySnapshot:
    """Snapshot of the trajectories to sample from, divided into runs.

    A run is one trajectory, or several consecutive trajectories whose rows are contiguous in the
    cache.

    Args:
        entries: Trajectories, oldest first.
        table: Steps, layout and location of each trajectory, `TABLE_DTYPE`, `[num_trajectories]`.
        layouts: Row layouts, indexed by `table["layout"]`.

    Attributes:
        num_samples: Number of steps of all trajectories.
        entries: First trajectory of each run.
        layout: Index of the layout of each run, int64 `[R]`.
        location: Location of the rows of each run (`CACHED`, `MAPPED`, `ELSEWHERE`), int64 `[R]`.
        layouts: Map from layout index to layout, for the layouts of the runs.
        names: Names of the fields that every trajectory has.
        is_one_location: Whether all rows are in the cache, or all rows are in mapped files.
    """

    def __init__(
        self, entries: list[Entry], table: npt.NDArray[np.void], layouts: list[RowLayout]
    ) -> None:
        size = np.ascontiguousarray(table["size"])
        layout = np.ascontiguousarray(table["layout"])
        location = np.ascontiguousarray(table["location"])
        first = np.ascontiguousarray(table["first"])

        is_cached = location == CACHED
        continues = is_cached[1:] & is_cached[:-1] & (layout[1:] == layout[:-1])
        continues &= first[1:] == first[:-1] + size[:-1]
        run_starts = np.flatnonzero(np.append(True, ~continues))
        run_lasts = np.append(run_starts[1:], len(size)) - 1

        # Steps are numbered over all trajectories, from 0 for the first step of the oldest one.
        stops = np.cumsum(size)
        self._run_stops = stops[run_lasts]
        self._row_of_sample_0 = (first - (stops - size))[run_starts]
        self.num_samples = int(stops[-1])
        self.entries = [entries[start] for start in run_starts.tolist()]
        self.layout = layout[run_starts]
        self.location = location[run_starts]
        self.layouts = {number: layouts[number] for number in self.layout.tolist()}
        self.names = _common_names(list(self.layouts.values()))
        is_same_location = bool((self.location == self.location[0]).all())
        self.is_one_location = is_same_location and self.location[0] != ELSEWHERE

    def locate(self, samples: Int64s) -> tuple[Int64s, Int64s]:
        """Return where the rows of steps are.

        Args:
            samples: Numbers of the steps, int64 `[n]`. Steps are numbered over all trajectories,
                from 0 for the first step of the oldest trajectory.

        Returns:
            The run of each step, int64 `[n]`, or `[1]` if there is only one run. The row of each
            step, int64 `[n]`: an index into the memory of the cache, or into the rows of the
            trajectory if it is not cached.
        """
        run = _FIRST_RUN
        if len(self._run_stops) > 1:
            run = np.searchsorted(self._run_stops, samples, side="right")
        return run, samples + self._row_of_sample_0[run]

    def names_of(self, keys: Collection[Key]) -> tuple[str, ...]:
        """Return the names of the fields that a user has selected by keys.

        A key is the name of a field, or of a mapping, which selects all fields in the mapping.

        Raises:
            UsageError: `keys` is not a list of keys.
            MissingFieldError: No trajectory has a field at or below a key.
        """
        is_list = isinstance(keys, Collection) and not isinstance(keys, str)
        if not is_list or not all(isinstance(key, (str, tuple)) for key in keys):
            raise UsageError(f"keys must be a list of names, got {keys!r}.")

        known: dict[str, None] = {}
        for layout in self.layouts.values():
            known.update(dict.fromkeys(layout.schema))
        selected: dict[str, None] = {}
        for key in keys:
            name = flat_name(key)
            names = [name]
            if name not in known:
                names = [field for field in known if field.startswith(f"{name}/")]
            if not names:
                raise missing_field(name, self.entries[0])
            selected.update(dict.fromkeys(names))
        return tuple(selected)


def missing_field(name: str, entry: Entry) -> MissingFieldError:
    """Build the error for a field that a trajectory does not have."""
    return MissingFieldError(
        f"trajectory {entry.trajectory_id} has no field {name!r}. "
        f"The fields are {nearest(name, entry.layout.schema)}."
    )


def _common_names(layouts: list[RowLayout]) -> tuple[str, ...]:
    """Return the names of the fields that all layouts have, in the order of the first layout."""
    names = []
    for name in layouts[0].schema:
        if all(name in layout.schema for layout in layouts):
            names.append(name)
    return tuple(names)
