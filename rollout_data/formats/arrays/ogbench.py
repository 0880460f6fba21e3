"""OGBench npz files: trajectories one after the other, each with one row more than steps.

One rule: the last row of a trajectory is the state that its last action led to; the action stored with it is a dummy.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from storage.core.fields import Field, Schema, dtype_name
from storage.errors import CorruptFileError

from ...sources.episode_reader import EpisodeInfo, ForeignReader
from ..format_detection import OGBENCH_ARRAYS
from .npz_arrays import Array, NpzArray, read_npz

_NAMES = {"observations": "observation", "actions": "action"}
_MAX_ROWS = 1 << 32
_MAX_EPISODES = 1 << 18
_ROWS_AT_ONCE = 1 << 20


class Reader(ForeignReader):
    """Reads `<name>.npz`; `<name>-val.npz` is the validation split. How a trajectory ended is not told."""

    format = "ogbench"

    def scan(self) -> Sequence[EpisodeInfo]:
        arrays = read_npz(self.path)
        if missing := OGBENCH_ARRAYS - arrays.keys():
            raise CorruptFileError("open", repr(str(self.path)), f"the array {min(missing)!r}", "none")
        num_rows = self._check_rows(arrays)
        self._fields = {_NAMES.get(name, name): one for name, one in arrays.items() if name != "terminals"}
        fields = [Field(name, one.shape[1:], dtype_name(one.dtype, repr(name))) for name, one in self._fields.items()]
        schema = Schema(fields)
        final = Schema(field for field in fields if field.name != "action")
        split = "validation" if self.path.stem.endswith("-val") else "train"
        self.metadata = {"split": split}
        ends = self._ends(arrays["terminals"], num_rows)
        starts = [0, *(end + 1 for end in ends[:-1])]
        episodes = []
        for number, (start, end) in enumerate(zip(starts, ends, strict=True)):
            if start == end:
                self.problem("read the trajectory", self._where(number), "two rows or more", "one", "It is left out")
                continue
            info = EpisodeInfo(str(number), end - start, schema, final=final, metadata=self.metadata, source=start)
            episodes.append(info)
        self.splits = {split: [info.name for info in episodes]}
        return episodes

    def _check_rows(self, arrays: dict[str, NpzArray]) -> int:
        """Leave out what has not one number per row and state, and give the number of rows."""
        shape = arrays["observations"].shape
        num_rows = shape[0] if shape else 0
        if not 0 < num_rows <= _MAX_ROWS:
            raise CorruptFileError("open", repr(str(self.path)), f"1 to {_MAX_ROWS} rows", str(num_rows))
        for name, one in list(arrays.items()):
            has_rows = bool(one.shape) and one.shape[0] == num_rows and one.dtype.kind in "biuf"
            if not has_rows or (name == "terminals" and len(one.shape) > 2):
                expected = f"{num_rows} rows of numbers in {name!r}"
                got = f"{one.dtype}{list(one.shape)}"
                if name in OGBENCH_ARRAYS:
                    raise CorruptFileError("open", repr(str(self.path)), expected, got)
                self.problem("read the array", repr(str(self.path)), expected, got, "It is left out")
                del arrays[name]
        return num_rows

    def _ends(self, terminals: NpzArray, num_rows: int) -> list[int]:
        found: list[int] = []
        for start in range(0, num_rows, _ROWS_AT_ONCE):
            flags = np.asarray(terminals.read(start, start + _ROWS_AT_ONCE)).reshape(-1)
            if len(flags) != min(_ROWS_AT_ONCE, num_rows - start) or not np.isin(flags, (0, 1)).all():
                raise CorruptFileError("open", repr(str(self.path)), "0 or 1 as 'terminals'", "something else")
            found.extend((np.flatnonzero(flags) + start).tolist())
            if len(found) > _MAX_EPISODES:
                raise CorruptFileError("open", repr(str(self.path)), f"at most {_MAX_EPISODES} trajectories", "more")
        if not found or found[-1] != num_rows - 1:
            where = self._where(len(found))
            advice = "Its last action, which may be a dummy, is left out"
            self.problem("find the end of the trajectory", where, "1 as the last of 'terminals'", "0", advice)
            found.append(num_rows - 1)
        return found

    def _where(self, number: int) -> str:
        return f"{number} of {str(self.path)!r}"

    def read(self, number: int, name: str, start: int, stop: int) -> Array:
        first = self.episodes[number].source
        return self._fields[name].read(first + start, first + stop)

    def read_final(self, number: int, name: str) -> Array:
        info = self.episodes[number]
        last = info.source + info.length
        found: Array = self._fields[name].read(last, last + 1)[0]
        return found
