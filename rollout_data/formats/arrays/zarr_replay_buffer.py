"""Replay buffers in zarr (diffusion policy, UMI): arrays of all episodes one after the other, and where each ends.

One rule: `meta/episode_ends` tells the episodes; rows after the last end are an unfinished one, and are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from storage.core.fields import Field, Schema, dtype_name
from storage.errors import CorruptFileError

from ...sources.episode_reader import EpisodeInfo, ForeignReader
from ...sources.natural_order import natural
from ..format_detection import ZARR_ENDS
from .npz_arrays import Array
from .zarr_arrays import MAX_META_BYTES, Store, ZarrArray, find_arrays

_MAX_EPISODES = 1 << 18
_NAMES = {"action": "action", "actions": "action", "reward": "reward", "rewards": "reward"}


class Reader(ForeignReader):
    """Reads a folder or zip file with `data/<field>` and `meta/episode_ends`; it tells no end and rarely a reward."""

    format = "zarr"

    def scan(self) -> Sequence[EpisodeInfo]:
        self._store, where = Store(self.path), repr(str(self.path))

        def leave_out(name: str) -> None:
            self.problem("read", f"{name!r} of {where}", "rows of numbers", "texts, or one value", "It is left out")

        arrays = find_arrays(self._store, leave_out)
        data = {name.removeprefix("data/"): one for name, one in arrays.items() if name.startswith("data/")}
        if ZARR_ENDS not in arrays or not data:
            raise CorruptFileError("open", where, f"arrays in 'data' and {ZARR_ENDS!r}", ", ".join(arrays) or "none")
        ends = self._ends(arrays[ZARR_ENDS])
        num_rows = int(ends[-1]) if len(ends) else 0
        for name, one in data.items():
            if one.shape[0] < num_rows:
                raise CorruptFileError("open", where, f"{num_rows} rows in {name!r}", str(one.shape[0]))
        if most := max(one.shape[0] for one in data.values()) - num_rows:
            self.problem(
                "read", where, f"{num_rows} rows", f"{most} more", "Those of an unfinished episode are left out"
            )
        for name, one in arrays.items():
            if (
                name.startswith("meta/")
                and name != ZARR_ENDS
                and np.prod(one.shape) * one.dtype.itemsize <= MAX_META_BYTES
            ):
                self.metadata[name.removeprefix("meta/")] = one.read(self._store, 0, one.shape[0])
        self._arrays = {self._name(name, data): data[name] for name in sorted(data, key=natural)}
        self.metadata["lossy"] = [name for name, one in self._arrays.items() if one.is_lossy]
        schema = Schema(Field(name, one.shape[1:], dtype_name(one.dtype)) for name, one in self._arrays.items())
        episodes = []
        for number, (start, end) in enumerate(pairwise([0, *ends.tolist()])):
            if start == end:
                self.problem("read", f"episode {number} of {where}", "one row or more", "none", "It is left out")
            else:
                episodes.append(EpisodeInfo(str(number), end - start, schema, source=start))
        return episodes

    def _ends(self, stored: ZarrArray) -> Array:
        if len(stored.shape) != 1 or stored.dtype.kind not in "iu" or stored.shape[0] > _MAX_EPISODES:
            expected = f"at most {_MAX_EPISODES} whole numbers as {ZARR_ENDS!r}"
            raise CorruptFileError("open", repr(str(self.path)), expected, f"{stored.dtype}{list(stored.shape)}")
        ends = stored.read(self._store, 0, stored.shape[0]).astype(np.int64)
        if (np.diff(ends, prepend=0) < 0).any():
            raise CorruptFileError("open", repr(str(self.path)), f"{ZARR_ENDS!r} that grow", "others")
        return ends

    def _name(self, name: str, data: dict[str, ZarrArray]) -> str:
        if (ours := _NAMES.get(name)) and (name == ours or ours not in data):
            return ours
        is_only = [one for one in data if one not in _NAMES] == [name]
        parts = name.split("/")
        rest = "/".join(parts[1:]) if parts[0] in ("obs", "observation", "observations") and parts[1:] else name
        return "observation" if is_only and name in ("obs", "observation", "observations") else f"observation/{rest}"

    def read(self, number: int, name: str, start: int, stop: int) -> Array:
        first = self.episodes[number].source
        return self._arrays[name].read(self._store, first + start, first + stop)
