"""D4RL's files: `observations`, `actions`, `rewards`, `terminals` and perhaps `timeouts`, of all episodes in a row.

One rule: an episode ends where the file says so, or where the user does; the row after an end is no final observation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from storage.core import arguments
from storage.errors import CorruptFileError, UsageError

from ...sources.episode_reader import ABSENT, EpisodeInfo
from ...writing.conversion_record import NOTE_DATASET
from ..format_detection import d4rl_groups
from ..input_checks import parse_attribute
from .flat_episodes import FlatReader, ends_of, our_name
from .hdf5_datasets import OpenFile

_METADATA = "metadata/"
_STEPS = ("observations", "actions", "rewards", "terminals", "timeouts", "next_observations")


class Reader(FlatReader):
    """Episodes by their place in the file.

    Options:
        max_episode_steps: Length at which episodes were cut; needed where the file has no `timeouts`.
        terminals_end: False where `terminals` marks goals that were reached, as in antmaze: then only `timeouts` end.
    """

    format = "d4rl"
    OPTIONS: ClassVar[Mapping[str, Any]] = {"max_episode_steps": None, "terminals_end": True}

    @property
    def file_path(self) -> Path:
        return self.path

    def scan(self) -> Sequence[EpisodeInfo]:
        with self.files.use(self.path) as file:
            for group in d4rl_groups(file):
                self._take_group(file, group)
        noted = parse_attribute(self.metadata.pop(ABSENT, None), ABSENT)
        return [_without_absent(info, noted.get(info.name)) for info in self._cut()]

    def _take_group(self, file: OpenFile, group: str) -> None:
        found = {path: one for path, one in file.survey(group).items() if path != f"{_METADATA}{NOTE_DATASET}"}
        told = {path: file.whole(f"{group}/{path}", one) for path, one in found.items() if path.startswith(_METADATA)}
        known = {path.removeprefix(_METADATA): one for path, one in told.items() if one is not None}
        self.metadata = {**known, **self.metadata}
        names = {path: our_name(path) for path in self.usable(found) if path not in told}
        if "observations" not in names or "terminals" not in names:
            raise CorruptFileError("read", file.where, "observations and terminals of numbers", f"{sorted(names)}")
        if not self.options["terminals_end"]:
            names["terminals"] = "terminals"
        num_rows = found["terminals"].shape[0]
        for path in [one for one in names if one not in _STEPS and found[one].shape[0] != num_rows]:
            self.problem("read", f"{path!r} of {file.where}", f"{num_rows} rows", f"{found[path].shape[0]}").of(
                "counts"
            )
            del names[path]
        self.take(found, names, group)

    def _cut(self) -> list[EpisodeInfo]:
        most = self.options["max_episode_steps"]
        terminated = self.flags("terminated")
        truncated = self.flags("truncated")
        if "truncated" not in self.columns:
            if most is None:
                advice = "Open it with max_episode_steps=..., the length at which they were cut"
                raise UsageError("cut into episodes", repr(str(self.path)), "'timeouts'", "none", advice)
            truncated = _timeouts(terminated, arguments.whole("cut into episodes", "max_episode_steps", most, 1))
        if not self.options["terminals_end"]:
            return self.cut(ends_of(truncated), None, truncated)
        return self.cut(ends_of(terminated | truncated), terminated, truncated)


def _without_absent(info: EpisodeInfo, names: Any) -> EpisodeInfo:
    """Return an episode with the names of fields that it lacked when it was written, and without flags that it lacked.

    A timeout that is noted as absent only separates the episode from the next one: the end is open, or unknown if the
    note names `terminals` too.
    """
    if not isinstance(names, list):
        return info
    if "timeouts" in names:
        flag = None if "terminals" in names else False
        info = replace(info, terminated=flag, truncated=flag)
    return replace(info, metadata={**info.metadata, ABSENT: names})


def _timeouts(terminated: np.ndarray[Any, Any], most: int) -> np.ndarray[Any, Any]:
    """Mark each step that is the last of `most` since the start or the last end, and no end itself."""
    found: np.ndarray[Any, Any] = np.zeros_like(terminated)
    start = 0
    for stop in [*(np.flatnonzero(terminated) + 1).tolist(), len(terminated)]:
        found[start + most - 1 : stop : most] = True
        start = stop
    found[terminated] = False
    return found
