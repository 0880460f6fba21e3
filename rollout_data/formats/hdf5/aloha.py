"""Files of ALOHA and ACT: one episode each, `action` beside `observations/qpos` and `observations/images/<camera>`.

One rule: rows are given as stored, although the robot's recorder pairs an observation with the action before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from storage.errors import DataFileError

from ...sources.episode_reader import EpisodeInfo
from ..format_detection import aloha_files
from .hdf5_episodes import Column, Hdf5Reader, LayoutMaker, is_encoded

_IMAGES = "observations/images/"


class Reader(Hdf5Reader):
    """One file, or all `episode_<n>.hdf5` of a folder in the order of their numbers. No reward, no end.

    Options:
        bgr: Encoded pictures hold blue first, as those that OpenCV was given do: turn them.
    """

    format = "aloha"
    OPTIONS: ClassVar[Mapping[str, Any]] = {"bgr": False}
    STEPS: ClassVar[Mapping[str, str]] = {"action": "action", "observations": "observation"}
    ASIDE = ("compress_len",)  # the end of each picture says as much
    COUNTED = "action"

    def scan(self) -> Sequence[EpisodeInfo]:
        episodes: list[EpisodeInfo] = []
        for path in aloha_files(self.path):
            num_before = len(self.problems)
            try:
                episodes += [replace(info, name=path.stem) for info in self.collect(path, "", [""])]
            except DataFileError as cause:
                self.problems.append(cause)
            for problem in self.problems[num_before:]:
                problem.of("", path.stem)
        if self.metadata["lossy"]:
            self.metadata["color_order"] = "rgb, turned from bgr" if self.options["bgr"] else "unknown"
        return self.checked_some(episodes, "an episode")

    def is_picture(self, maker: LayoutMaker, path: str, name: str) -> bool:
        return path.startswith(_IMAGES) and is_encoded(maker.found[path])

    def rows(self, info: EpisodeInfo, column: Column, start: int, stop: int) -> Any:
        rows = super().rows(info, column, start, stop)
        return np.ascontiguousarray(rows[..., ::-1]) if column.is_picture and self.options["bgr"] else rows
