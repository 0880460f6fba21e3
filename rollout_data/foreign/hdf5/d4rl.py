"""D4RL's files: `observations`, `actions`, `rewards`, `terminals` and perhaps `timeouts`, of all episodes in a row.

One rule: an episode ends where the file says so, or where the user does; the row after an end is no final observation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import h5py
import numpy as np

from storage.core import arguments
from storage.errors import CorruptFileError, UsageError

from ..reader import EpisodeInfo
from .files import matches, numbered
from .flat import FlatReader, ends_of

_FIELDS = {
    "observations": "observation",
    "actions": "action",
    "rewards": "reward",
    "terminals": "terminated",
    "timeouts": "truncated",
}
_NEXT, _METADATA, _CHUNKED = "next_observations", "metadata/", "virtual"


class Reader(FlatReader):
    """Episodes by their place in the file.

    Options:
        max_episode_steps: Length at which episodes were cut; needed where the file has no `timeouts`.
        terminals_end: False where `terminals` marks goals that were reached, as in antmaze: then only `timeouts` end.
    """

    format = "d4rl"
    OPTIONS: ClassVar[Mapping[str, Any]] = {"max_episode_steps": None, "terminals_end": True}

    @classmethod
    def detect(cls, path: Path) -> bool:
        names = ("observations", "terminals")
        return matches(path, lambda file: all(isinstance(file.open(name), h5py.h5d.DatasetID) for name in names))

    @property
    def file_path(self) -> Path:
        return self.path

    def scan(self) -> Sequence[EpisodeInfo]:
        self.metadata.update(lossy=[], control_mode="unknown")
        with self.files.use(self.path) as file:
            chunked = file.open(_CHUNKED)
            groups = numbered(list(file.links(chunked)), "") if isinstance(chunked, h5py.h5g.GroupID) else []
            for group in [f"{_CHUNKED}/{name}" for name in groups] or [""]:
                found = file.survey(group)
                told = [path for path in found if path.startswith(_METADATA)]
                whole = {path: file.whole(f"{group}/{path}", found[path]) for path in told}
                self.metadata.update(
                    {path.removeprefix(_METADATA): one for path, one in whole.items() if one is not None}
                )
                names = self.usable({path: one for path, one in found.items() if path not in told})
                if "observations" not in names or "terminals" not in names:
                    expected = "observations and terminals of numbers"
                    raise CorruptFileError("read", file.where, expected, f"{sorted(names)}")
                rows = found["terminals"].shape[0]
                ours = {path: _FIELDS.get(path, path) for path in names}
                if not self.options["terminals_end"]:
                    ours["terminals"] = "terminals"
                for path in [path for path in names if path not in (*_FIELDS, _NEXT) and found[path].shape[0] != rows]:
                    self.problem("read", f"{path!r} of {file.where}", f"{rows} rows", f"{found[path].shape[0]}")
                    del ours[path]
                self.take(found, ours, group)
        self.steps.final = {_NEXT: "observation"} if _NEXT in self.steps.fields else {}
        return self._cut()

    def _cut(self) -> list[EpisodeInfo]:
        most = self.options["max_episode_steps"]
        terminated, truncated = self.flags("terminated"), self.flags("truncated")
        if "truncated" not in self.steps.fields:
            if most is None:
                advice = "Open it with max_episode_steps=..., the length at which they were cut"
                raise UsageError("cut into episodes", repr(str(self.path)), "'timeouts'", "none", advice)
            truncated = _timeouts(terminated, arguments.whole("cut into episodes", "max_episode_steps", most, 1))
        if not len(terminated):
            raise CorruptFileError("read", repr(str(self.path)), "a step", "none")
        if not self.options["terminals_end"]:
            return self.cut(ends_of(truncated), None, truncated)
        return self.cut(ends_of(terminated | truncated), terminated, truncated)


def _timeouts(terminated: np.ndarray[Any, Any], most: int) -> np.ndarray[Any, Any]:
    """Mark each step that is the last of `most` since the start or the last end, and no end itself."""
    found: np.ndarray[Any, Any] = np.zeros_like(terminated)
    start = 0
    for stop in [*(np.flatnonzero(terminated) + 1).tolist(), len(terminated)]:
        found[start + most - 1 : stop : most] = True
        start = stop
    found[terminated] = False
    return found
