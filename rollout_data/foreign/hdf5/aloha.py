"""Files of ALOHA and ACT: one episode each, `action` beside `observations/qpos` and `observations/images/<camera>`.

One rule: rows are given as stored, although the robot's recorder pairs an observation with the action before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import h5py
import numpy as np

from storage.errors import CorruptFileError, DataFileError

from ..guards import file_inside
from ..reader import EpisodeInfo
from .episodes import Column, Hdf5Reader, Layout, LayoutMaker, is_encoded
from .files import Found, OpenFile, matches, numbered

_FILE, _OBSERVATIONS, _IMAGES = "episode_", "observations/", "observations/images/"


class Reader(Hdf5Reader):
    """One file, or all `episode_<n>.hdf5` of a folder in the order of their numbers. No reward, no end.

    Options:
        bgr: Encoded pictures hold blue first, as those that OpenCV was given do: turn them.
    """

    format = "aloha"
    OPTIONS: ClassVar[Mapping[str, Any]] = {"bgr": False}

    @classmethod
    def detect(cls, path: Path) -> bool:
        files = _files(path)
        return bool(files) and matches(files[0], _is_episode)

    def scan(self) -> Sequence[EpisodeInfo]:
        self.metadata.update(lossy=[], control_mode="unknown")
        episodes: list[EpisodeInfo] = []
        for path in _files(self.path):
            try:
                episodes += [replace(info, name=path.stem) for info in self.collect(path, "", [""])]
            except DataFileError as cause:
                self.problems.append(cause)
        if self.metadata["lossy"]:
            self.metadata["color_order"] = "rgb, turned from bgr" if self.options["bgr"] else "unknown"
        return self.checked_some(episodes, "an episode")

    def layout(self, file: OpenFile, group: str, found: Mapping[str, Found]) -> tuple[int, Layout]:
        if "action" not in found or not found["action"].shape:
            raise CorruptFileError("read", file.where, "the dataset 'action'", "none")
        length = found["action"].shape[0]
        maker = LayoutMaker(self, found, length, file.where)
        maker.add("action", "action")
        for path in found:
            name = "observation/" + path.removeprefix(_OBSERVATIONS)
            if path.startswith(_IMAGES) and is_encoded(found[path]):
                maker.add_pictures(file, group, name, path)
            elif path.startswith(_OBSERVATIONS):
                maker.add(name, path)
            elif path == "compress_len":  # the end of each picture says as much
                maker.layout.aside[path] = None
            elif path != "action":
                maker.add_other(path)
        return length, maker.layout

    def rows(self, info: EpisodeInfo, column: Column, start: int, stop: int) -> Any:
        rows = super().rows(info, column, start, stop)
        return np.ascontiguousarray(rows[..., ::-1]) if column.is_picture and self.options["bgr"] else rows


def _files(path: Path) -> list[Path]:
    """List the files of episodes that a path is or holds; none if the folder holds other HDF5 files."""
    if not path.is_dir():
        return [path]
    names = [one.name for one in path.iterdir() if one.suffix in (".hdf5", ".h5") and not one.name.startswith(".")]
    files = [f"{name}.hdf5" for name in numbered([name.removesuffix(".hdf5") for name in names], _FILE)]
    return [file_inside(path, name) for name in files] if len(files) == len(names) else []


def _is_episode(file: OpenFile) -> bool:
    datasets = (file.open("action"), file.open("observations/qpos"))
    return all(isinstance(one, h5py.h5d.DatasetID) for one in datasets)
