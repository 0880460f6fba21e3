"""Reader of D4RL files: flat datasets with the steps of all episodes.

The datasets are `observations`, `actions`, `rewards`, `terminals` and optionally `timeouts`. Flags
in the file or the option `max_episode_steps` determine the ends of episodes. The row after an end
is not a final observation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from storage.core import arguments
from storage.errors import CorruptFileError, UsageError

from ...sources.episode_info import ABSENT, EpisodeInfo
from ...writing.conversion_record import NOTE_DATASET
from ..format_detection import d4rl_groups
from ..input_checks import parse_attribute
from .flat_episodes import FlatReader, ends_of, our_name
from .hdf5_datasets import OpenFile

_METADATA = "metadata/"
_NOTE = f"{_METADATA}{NOTE_DATASET}"
#: Datasets that must have a row per step. Other datasets without a row per step are left out.
_STEPS = (
    "observations",
    "actions",
    "rewards",
    "terminals",
    "timeouts",
    "next_observations",
)


class D4rlReader(FlatReader):
    """Reader of the episodes of a file, in the order of their rows.

    Options:
        max_episode_steps: Length at which episodes were truncated. Required without `timeouts`.
        terminals_end: Whether an episode ends where `terminals` is True. If `terminals` marks
            reached goals, as in antmaze, pass False: only `timeouts` then ends episodes.
    """

    format = "d4rl"
    OPTIONS: ClassVar[Mapping[str, Any]] = {"max_episode_steps": None, "terminals_end": True}

    @property
    def file_path(self) -> Path:
        return self.path

    def scan(self) -> Sequence[EpisodeInfo]:
        with self.files.use(self.path) as file:
            for group in d4rl_groups(file):
                self._read_group(file, group)
        absent = parse_attribute(self.metadata.pop(ABSENT, None), ABSENT)
        return [_with_source_end(info, absent.get(info.name)) for info in self._cut()]

    def _read_group(self, file: OpenFile, group: str) -> None:
        """Read the metadata of a group and append its rows to the steps."""
        datasets = dict(file.datasets(group))
        datasets.pop(_NOTE, None)
        metadata = {}
        for path, info in datasets.items():
            if path.startswith(_METADATA):
                value = file.read_small(f"{group}/{path}", info)
                if value is not None:
                    metadata[path.removeprefix(_METADATA)] = value
        self.metadata = {**metadata, **self.metadata}

        names = {}
        for path in self.usable(datasets):
            if not path.startswith(_METADATA):
                names[path] = our_name(path)
        if "observations" not in names or "terminals" not in names:
            raise CorruptFileError(
                f"{file.where} has the numeric datasets {sorted(names)}. D4RL needs "
                "'observations' and 'terminals'."
            )
        if not self.options["terminals_end"]:
            names["terminals"] = "terminals"
        num_rows = datasets["terminals"].shape[0]
        for path in list(names):
            got = datasets[path].shape[0]
            if path not in _STEPS and got != num_rows:
                self.problem(
                    f"{path!r} of {file.where} has {got} rows, expected {num_rows}. The dataset is "
                    "left out.",
                    kind="counts",
                )
                del names[path]
        self.add_group(datasets, names, group)

    def _cut(self) -> list[EpisodeInfo]:
        terminated = self.flags("terminated")
        truncated = self.flags("truncated")
        if "truncated" not in self.columns:
            truncated = _timeouts(terminated, self._checked_length())
        if not self.options["terminals_end"]:
            return self.cut(ends_of(truncated), None, truncated)
        return self.cut(ends_of(terminated | truncated), terminated, truncated)

    def _checked_length(self) -> int:
        """Return the option `max_episode_steps`; raise `UsageError` without a valid length."""
        length = self.options["max_episode_steps"]
        if length is None:
            raise UsageError(
                f"{str(self.path)!r} has no 'timeouts'. Pass max_episode_steps=..., the length at "
                "which episodes were truncated."
            )
        return arguments.whole("max_episode_steps", length, 1)


def _with_source_end(info: EpisodeInfo, names: Any) -> EpisodeInfo:
    """Restore the end of an episode whose end flags were filled by a conversion.

    A conversion writes a timeout at the end of each episode without termination, to separate the
    episode from the next episode. It notes the flags that it filled: only "timeouts" if the source
    has an open end, "timeouts" and "terminals" if the end is unknown.

    Args:
        info: Description of the episode.
        names: Names of the filled fields and flags, which become metadata. Values other than a list
            are ignored.
    """
    if not isinstance(names, list):
        return info
    if "timeouts" in names:
        flag = None if "terminals" in names else False
        info = replace(info, terminated=flag, truncated=flag)
    return replace(info, metadata={**info.metadata, ABSENT: names})


def _timeouts(terminated: np.ndarray[Any, Any], length: int) -> np.ndarray[Any, Any]:
    """Compute which steps are truncated if episodes have at most `length` steps: bool `[rows]`.

    Steps are counted from the first row or the previous end. A terminated step is not truncated.
    """
    timeouts: np.ndarray[Any, Any] = np.zeros_like(terminated)
    start = 0
    for stop in [*(np.flatnonzero(terminated) + 1).tolist(), len(terminated)]:
        timeouts[start + length - 1 : stop : length] = True
        start = stop
    timeouts[terminated] = False
    return timeouts
