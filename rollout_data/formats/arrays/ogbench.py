"""Reader of OGBench npz files: consecutive trajectories, each with one row more than it has steps.

The last row of a trajectory has the observation after its last step, and a meaningless action.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from storage.core.fields import Field, Schema, dtype_name
from storage.errors import CorruptFileError

from ...sources.episode_info import EpisodeInfo
from ...sources.file_source import FileSource
from ..format_detection import OGBENCH_ARRAYS
from .npz_arrays import Array, NpzArray, read_npz

_NAMES = {"observations": "observation", "actions": "action"}
_MAX_ROWS = 1 << 32
_MAX_EPISODES = 1 << 18
_ROWS_AT_ONCE = 1 << 20


class OgbenchReader(FileSource):
    """Reader of `<name>.npz`, or of `<name>-val.npz`, the validation split.

    The files do not state how a trajectory ended.
    """

    format = "ogbench"

    def scan(self) -> Sequence[EpisodeInfo]:
        arrays = read_npz(self.path)
        missing = OGBENCH_ARRAYS - arrays.keys()
        if missing:
            raise CorruptFileError(f"{str(self.path)!r} has no array {min(missing)!r}.")
        num_rows = self._check_rows(arrays)
        #: Maps each field name to the array with the rows of all trajectories.
        self._fields: dict[str, NpzArray] = {}
        fields = []
        for stored_name, array in arrays.items():
            if stored_name != "terminals":
                name = _NAMES.get(stored_name, stored_name)
                self._fields[name] = array
                fields.append(
                    Field(name, array.shape[1:], dtype_name(array.dtype, f"field {name!r}"))
                )

        schema = Schema(fields)
        final = Schema(field for field in fields if field.name != "action")
        split = "validation" if self.path.stem.endswith("-val") else "train"
        self.metadata = {"split": split}
        ends = self._ends(arrays["terminals"], num_rows)
        starts = [0, *(end + 1 for end in ends[:-1])]
        episodes = []
        for number, (start, end) in enumerate(zip(starts, ends, strict=True)):
            if start == end:
                self.problem(
                    f"Trajectory {number} of {str(self.path)!r} has one row, expected at least 2. "
                    "The trajectory is left out."
                )
                continue
            info = EpisodeInfo(
                str(number),
                end - start,
                schema,
                final=final,
                metadata=self.metadata,
                source=start,
            )
            episodes.append(info)
        self.splits = {split: [info.name for info in episodes]}
        return episodes

    def _check_rows(self, arrays: dict[str, NpzArray]) -> int:
        """Return the number of rows; remove optional arrays with another number of rows.

        Raises:
            CorruptFileError: A required array has another number of rows.
        """
        shape = arrays["observations"].shape
        num_rows = shape[0] if shape else 0
        if not 0 < num_rows <= _MAX_ROWS:
            raise CorruptFileError(
                f"{str(self.path)!r} has {num_rows} rows, expected 1 to {_MAX_ROWS}."
            )
        for name, array in list(arrays.items()):
            has_rows = array.shape[:1] == (num_rows,) and array.dtype.kind in "biuf"
            if not has_rows or (name == "terminals" and len(array.shape) > 2):
                message = (
                    f"{array.where} is {array.dtype}{list(array.shape)}, expected {num_rows} rows "
                    "of numbers."
                )
                if name in OGBENCH_ARRAYS:
                    raise CorruptFileError(message)
                self.problem(f"{message} The array is left out.")
                del arrays[name]
        return num_rows

    def _ends(self, terminals: NpzArray, num_rows: int) -> list[int]:
        """Return the index of the last row of each trajectory."""
        ends: list[int] = []
        for start in range(0, num_rows, _ROWS_AT_ONCE):
            flags = np.asarray(terminals.read(start, start + _ROWS_AT_ONCE)).reshape(-1)
            is_complete = len(flags) == min(_ROWS_AT_ONCE, num_rows - start)
            if not is_complete or not np.isin(flags, (0, 1)).all():
                raise CorruptFileError(
                    f"{terminals.where} has values other than 0 and 1, or too few values."
                )
            ends.extend((np.flatnonzero(flags) + start).tolist())
            if len(ends) > _MAX_EPISODES:
                raise CorruptFileError(
                    f"{str(self.path)!r} has more than {_MAX_EPISODES} trajectories."
                )
        if not ends or ends[-1] != num_rows - 1:
            self.problem(
                f"Trajectory {len(ends)} of {str(self.path)!r} has no end: the last value of "
                "'terminals' is 0. Its last action may be a dummy and is left out."
            )
            ends.append(num_rows - 1)
        return ends

    def read(self, number: int, name: str, start: int, stop: int) -> Array:
        first = self.episodes[number].source
        return self._fields[name].read(first + start, first + stop)

    def read_final(self, number: int, name: str) -> Array:
        info = self.episodes[number]
        last = info.source + info.length
        value: Array = self._fields[name].read(last, last + 1)[0]
        return value
