"""Reader of humenv motions: groups `ep_<i>` with a row per step.

They are in one file, or in the files that a text file lists. No row is a final observation. Files
of motion capture have no action.
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
    """A file, a list of files or a folder of them.

    Of several files, episodes are named "<file>/ep_<i>".
    """

    format = "humenv"
    STEPS: ClassVar[Mapping[str, str]] = {
        "observation": "observation",
        "action": "action",
        "reward": "reward",
    }
    ENDS: ClassVar[Mapping[str, str]] = {"terminated": "terminated", "truncated": "truncated"}
    COUNTED = "observation"
    STATED = "length"

    def scan(self) -> Sequence[EpisodeInfo]:
        episodes: list[EpisodeInfo] = []
        for file_name, path in humenv_files(self.path).items():
            try:
                infos = self._episodes_of(path)
            except DataFileError as cause:
                self.problems.append(cause.of("", path.stem))
                continue
            if file_name:
                infos = [replace(info, name=f"{file_name}/{info.name}") for info in infos]
            episodes += infos
        return self.checked_some(episodes, "an episode")

    def _episodes_of(self, path: Path) -> list[EpisodeInfo]:
        """Return the episodes of a file."""
        with self.files.use(path) as file:
            names = file.numbered("", HUMENV_EPISODE)
            stated = file.attribute(file.open(""), "num_episodes")
            if stated is not None and stated != len(names):
                where = f"'num_episodes' of {file.where}"
                self.problem("use", where, str(len(names)), str(stated)).of("counts")
            return self.collect(path, "", names)
