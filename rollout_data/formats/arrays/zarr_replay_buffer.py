"""Reader of replay buffers in zarr (diffusion policy, UMI): arrays with the rows of all episodes.

The array `meta/episode_ends` contains the end of each episode: the index after its last row. Rows
after the last end belong to an unfinished episode and are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from storage.core.fields import Field, Schema, dtype_name
from storage.errors import CorruptFileError

from ...sources.episode_info import EpisodeInfo
from ...sources.file_source import FileSource
from ...sources.recordings.natural_order import natural
from ..format_detection import ZARR_ENDS
from .npz_arrays import Array
from .zarr_arrays import MAX_META_BYTES, Store, ZarrArray, find_arrays

_MAX_EPISODES = 1 << 18
_OBSERVATIONS = ("obs", "observation", "observations")
#: Maps names of arrays to field names. Other arrays become observations.
_NAMES = {"action": "action", "actions": "action", "reward": "reward", "rewards": "reward"}


class ZarrReplayBufferReader(FileSource):
    """Reader of a zarr folder or zip file with `data/<field>` and `meta/episode_ends`.

    The format does not state how episodes ended, and rarely has rewards.
    """

    format = "zarr"

    def scan(self) -> Sequence[EpisodeInfo]:
        self._store = Store(self.path)
        where = repr(str(self.path))

        def leave_out(name: str) -> None:
            self.problem(
                f"{name!r} of {where} contains texts or a single value. The array is left out."
            )

        arrays = find_arrays(self._store, leave_out)
        data = {}
        for name, array in arrays.items():
            if name.startswith("data/"):
                data[name.removeprefix("data/")] = array
        if ZARR_ENDS not in arrays or not data:
            names = ", ".join(arrays) or "no arrays"
            raise CorruptFileError(
                f"{where} has {names}, expected arrays in 'data' and the array {ZARR_ENDS!r}."
            )

        ends = self._ends(arrays[ZARR_ENDS])
        self._check_rows(data, int(ends[-1]) if len(ends) else 0)
        self._read_metadata(arrays)
        self._arrays = {self._name(name, data): data[name] for name in sorted(data, key=natural)}
        self.metadata["lossy"] = [name for name, array in self._arrays.items() if array.is_lossy]
        fields = []
        for name, array in self._arrays.items():
            fields.append(Field(name, array.shape[1:], dtype_name(array.dtype)))
        schema = Schema(fields)

        episodes = []
        for number, (start, end) in enumerate(pairwise([0, *ends.tolist()])):
            if start == end:
                self.problem(f"Episode {number} of {where} has no rows and is left out.")
            else:
                episodes.append(EpisodeInfo(str(number), end - start, schema, source=start))
        return episodes

    def _check_rows(self, data: dict[str, ZarrArray], num_rows: int) -> None:
        """Check that all arrays have at least `num_rows` rows; report additional rows."""
        where = repr(str(self.path))
        for name, array in data.items():
            if array.shape[0] < num_rows:
                raise CorruptFileError(
                    f"{name!r} of {where} has {array.shape[0]} rows, expected {num_rows}."
                )
        num_unfinished = max(array.shape[0] for array in data.values()) - num_rows
        if num_unfinished:
            self.problem(
                f"{where} has {num_unfinished} rows after the last episode. The rows of the "
                "unfinished episode are left out."
            )

    def _read_metadata(self, arrays: dict[str, ZarrArray]) -> None:
        """Read the small arrays of `meta` into the metadata."""
        for name, array in arrays.items():
            if not name.startswith("meta/") or name == ZARR_ENDS:
                continue
            if np.prod(array.shape) * array.dtype.itemsize <= MAX_META_BYTES:
                values = array.read(self._store, 0, array.shape[0])
                self.metadata[name.removeprefix("meta/")] = values

    def _ends(self, stored: ZarrArray) -> Array:
        """Read the index after the last row of each episode: ascending int64 `[num_episodes]`."""
        is_list = len(stored.shape) == 1 and stored.dtype.kind in "iu"
        if not is_list or stored.shape[0] > _MAX_EPISODES:
            raise CorruptFileError(
                f"{ZARR_ENDS!r} of {str(self.path)!r} is {stored.dtype}{list(stored.shape)}, "
                f"expected at most {_MAX_EPISODES} integers."
            )
        ends = stored.read(self._store, 0, stored.shape[0]).astype(np.int64)
        if (np.diff(ends, prepend=0) < 0).any():
            raise CorruptFileError(
                f"{ZARR_ENDS!r} of {str(self.path)!r} is not in ascending order."
            )
        return ends

    def _name(self, name: str, data: dict[str, ZarrArray]) -> str:
        """Return the field name of an array."""
        field = _NAMES.get(name)
        # If both "action" and "actions" exist, only "action" is the action field.
        if field is not None and (name == field or field not in data):
            return field
        group, _, part = name.partition("/")
        if group in _OBSERVATIONS and part:
            return f"observation/{part}"
        others = [other for other in data if other not in _NAMES]
        if others == [name] and name in _OBSERVATIONS:
            return "observation"
        return f"observation/{name}"

    def read(self, number: int, name: str, start: int, stop: int) -> Array:
        first = self.episodes[number].source
        return self._arrays[name].read(self._store, first + start, first + stop)
