"""Motions of humenv: `ep_<i>` with a row per step, in one file or in those that a text file lists.

One rule: T rows, of which none is a final observation; files of motion capture have no action.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from storage.core.durable import read_text
from storage.errors import CorruptFileError, DataFileError

from ..guards import file_inside
from ..reader import EpisodeInfo
from .episodes import Hdf5Reader, Layout, LayoutMaker
from .files import Found, OpenFile, matches, numbered

_EPISODE, _LENGTH, _LIST = "ep_", "length", ".txt"
_ENDS = ("terminated", "truncated")
_STEPS = ("observation", "action", "reward")


class Reader(Hdf5Reader):
    """Episodes in the order of the list and of their numbers; named "<file>/ep_<i>" if they come from a list."""

    format = "humenv"
    KNOWN = (_LENGTH,)

    @classmethod
    def detect(cls, path: Path) -> bool:
        try:
            files = [path] if path.suffix != _LIST else list(_listed(path).values())[:1]
        except (DataFileError, OSError):
            return False
        return bool(files) and matches(files[0], lambda file: bool(_episodes(file)))

    def scan(self) -> Sequence[EpisodeInfo]:
        self.metadata.update(lossy=[], control_mode="unknown")
        files = _listed(self.path) if self.path.suffix == _LIST else {"": self.path}
        episodes: list[EpisodeInfo] = []
        for name, path in files.items():
            try:
                found = self._of_file(path)
            except DataFileError as cause:
                self.problems.append(cause)
                continue
            episodes += [replace(one, name=f"{name}/{one.name}") for one in found] if name else found
        return self.checked_some(episodes, "an episode")

    def _of_file(self, path: Path) -> list[EpisodeInfo]:
        with self.files.use(path) as file:
            names, stated = _episodes(file), file.attribute(file.open(""), "num_episodes")
            if stated is not None and stated != len(names):
                self.problem("believe", f"'num_episodes' of {file.where}", str(len(names)), str(stated))
            return self.collect(path, "", names)

    def length(self, file: OpenFile, node: Any) -> int:
        observed, stated = file.open("observation", node), file.attribute(node, _LENGTH)
        if not getattr(observed, "shape", ()):
            raise CorruptFileError("read", file.place(node), "the dataset 'observation'", "none")
        if stated is not None and stated != observed.shape[0]:
            raise CorruptFileError("read", file.place(node), f"{_LENGTH} {observed.shape[0]}", str(stated))
        return int(observed.shape[0])

    def layout(self, file: OpenFile, group: str, found: Mapping[str, Found]) -> tuple[int, Layout]:
        node = file.group(group)
        maker = LayoutMaker(self, found, self.length(file, node), file.place(node))
        for path in found:
            if path in _STEPS:
                maker.add(path, path)
            elif path not in _ENDS:
                maker.add_other(path)
        reward = maker.layout.columns.get("reward")
        if reward is not None and reward.shape == (1,):
            maker.layout.columns["reward"] = reward._replace(shape=())
        return maker.length, maker.layout

    def about(self, file: OpenFile, node: Any, length: int) -> dict[str, Any]:
        return {name: self.flag(file, node, name, length) for name in _ENDS}


def _episodes(file: OpenFile) -> list[str]:
    return numbered(list(file.links(file.open(""))), _EPISODE)


def _listed(path: Path) -> dict[str, Path]:
    """Give the files that a list names, a path a line, from its folder on: name without its ending -> path.

    Raises:
        DataFileError: It is no list of files in its folder.
    """
    lines = [line.strip() for line in read_text(path, max_bytes=1 << 24).splitlines()]
    return {line.rpartition(".")[0] or line: file_inside(path.parent, line) for line in lines if line}
