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

from ..guards import file_inside, natural
from ..reader import EpisodeInfo
from .episodes import Hdf5Reader, Layout, LayoutMaker
from .files import Found, OpenFile, matches, numbered

_EPISODE, _LENGTH, _LIST = "ep_", "length", ".txt"
_ENDS = ("terminated", "truncated")
_STEPS = ("observation", "action", "reward")


class Reader(Hdf5Reader):
    """A file, a list of files or a folder of them; named "<file>/ep_<i>" if there are several."""

    format = "humenv"
    KNOWN = (_LENGTH,)

    @classmethod
    def detect(cls, path: Path) -> bool:
        try:
            files = list(_files(path).values())[:1]
        except (DataFileError, OSError):
            return False
        return bool(files) and matches(files[0], lambda file: bool(_episodes(file)))

    def scan(self) -> Sequence[EpisodeInfo]:
        self.metadata.update(lossy=[], control_mode="unknown")
        episodes: list[EpisodeInfo] = []
        for name, path in _files(self.path).items():
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
        return maker.length, maker.layout

    def about(self, file: OpenFile, node: Any, length: int) -> dict[str, Any]:
        return {name: self.flag(file, node, name, length) for name in _ENDS}


def _episodes(file: OpenFile) -> list[str]:
    return numbered(list(file.links(file.open(""))), _EPISODE)


def _files(path: Path) -> dict[str, Path]:
    """Give the files of a folder, or those that a list names, a path a line: name without its ending -> path.

    Raises:
        DataFileError: It is no list of files in its folder.
    """
    if path.is_dir():
        names = [one.name for one in path.iterdir() if one.suffix in (".hdf5", ".h5") and not one.name.startswith(".")]
        return {name.rpartition(".")[0]: file_inside(path, name) for name in sorted(names, key=natural)}
    if path.suffix != _LIST:
        return {"": path}
    lines = [line.strip() for line in read_text(path, max_bytes=1 << 24).splitlines()]
    return {line.rpartition(".")[0] or line: file_inside(path.parent, line) for line in lines if line}
