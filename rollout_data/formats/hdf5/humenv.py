"""Motions of humenv: `ep_<i>` with a row per step, in one file or in those that a text file lists.

One rule: T rows, of which none is a final observation; files of motion capture have no action.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from storage.errors import DataFileError

from ...sources.episode_reader import EpisodeInfo
from ..format_detection import HUMENV_EPISODE, humenv_files
from .hdf5_episodes import Hdf5Reader


class Reader(Hdf5Reader):
    """A file, a list of files or a folder of them; named "<file>/ep_<i>" if there are several."""

    format = "humenv"
    STEPS: ClassVar[Mapping[str, str]] = {name: name for name in ("observation", "action", "reward")}
    ENDS: ClassVar[Mapping[str, str]] = {name: name for name in ("terminated", "truncated")}
    COUNTED = "observation"
    STATED = "length"

    def scan(self) -> Sequence[EpisodeInfo]:
        episodes: list[EpisodeInfo] = []
        for name, path in humenv_files(self.path).items():
            try:
                found = self._of_file(path)
            except DataFileError as cause:
                self.problems.append(cause.of("", path.stem))
                continue
            episodes += [replace(one, name=f"{name}/{one.name}") for one in found] if name else found
        return self.checked_some(episodes, "an episode")

    def _of_file(self, path: Path) -> list[EpisodeInfo]:
        with self.files.use(path) as file:
            names = file.numbered("", HUMENV_EPISODE)
            stated = file.attribute(file.open(""), "num_episodes")
            if stated is not None and stated != len(names):
                self.problem("believe", f"'num_episodes' of {file.where}", str(len(names)), str(stated)).of("counts")
            return self.collect(path, "", names)
