"""Motions of humenv: `ep_<i>` with a row per step, in one file or in those that a text file lists.

One rule: T rows, of which none is a final observation; files of motion capture have no action.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from storage.core.durable import read_text
from storage.errors import DataFileError

from ...sources.episode_reader import EpisodeInfo
from ...sources.natural_order import natural
from ..input_checks import file_inside
from .hdf5_datasets import hdf5_names, matches
from .hdf5_episodes import Hdf5Reader

_EPISODE, _LIST = "ep_", ".txt"


class Reader(Hdf5Reader):
    """A file, a list of files or a folder of them; named "<file>/ep_<i>" if there are several."""

    format = "humenv"
    STEPS: ClassVar[Mapping[str, str]] = {name: name for name in ("observation", "action", "reward")}
    ENDS: ClassVar[Mapping[str, str]] = {name: name for name in ("terminated", "truncated")}
    COUNTED, STATED = "observation", "length"

    @classmethod
    def detect(cls, path: Path) -> bool:
        try:
            files = list(_files(path).values())[:3]
        except (DataFileError, OSError):
            return False
        return any(matches(one, lambda file: bool(file.numbered("", _EPISODE))) for one in files)  # one may be damaged

    def scan(self) -> Sequence[EpisodeInfo]:
        episodes: list[EpisodeInfo] = []
        for name, path in _files(self.path).items():
            try:
                found = self._of_file(path)
            except DataFileError as cause:
                self.problems.append(cause.of("", path.stem))
                continue
            episodes += [replace(one, name=f"{name}/{one.name}") for one in found] if name else found
        return self.checked_some(episodes, "an episode")

    def _of_file(self, path: Path) -> list[EpisodeInfo]:
        with self.files.use(path) as file:
            names, stated = file.numbered("", _EPISODE), file.attribute(file.open(""), "num_episodes")
            if stated is not None and stated != len(names):
                self.problem("believe", f"'num_episodes' of {file.where}", str(len(names)), str(stated)).of("counts")
            return self.collect(path, "", names)


def _files(path: Path) -> dict[str, Path]:
    """Give the files of a folder, or those that a list names, a path a line: name without its ending -> path.

    Raises:
        DataFileError: It is no list of files in its folder.
    """
    if path.is_dir():
        return {name.rpartition(".")[0]: file_inside(path, name) for name in sorted(hdf5_names(path), key=natural)}
    if path.suffix != _LIST:
        return {"": path}
    lines = [line.strip() for line in read_text(path, max_bytes=1 << 24).splitlines()]
    return {line.rpartition(".")[0] or line: file_inside(path.parent, line) for line in lines if line}
