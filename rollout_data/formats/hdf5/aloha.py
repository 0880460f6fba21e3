"""Reader of ALOHA and ACT files: one episode per file, with `action` and `observations`.

The recorder of the robot stores each observation in the same row as the previous action. Rows are
returned as stored; observations are not shifted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from storage.errors import DataFileError

from ...sources.episode_info import EpisodeInfo
from ..format_detection import aloha_files
from .hdf5_episodes import DatasetColumn, Hdf5Reader, LayoutMaker, is_encoded

_IMAGES = "observations/images/"


class AlohaReader(Hdf5Reader):
    """Reader of a file, or of all `episode_<n>.hdf5` of a folder in the order of their numbers.

    The files have no rewards and no episode ends.

    Options:
        bgr: Convert encoded pictures from BGR to RGB. OpenCV writes BGR if it receives RGB
            pictures.
    """

    format = "aloha"
    OPTIONS: ClassVar[Mapping[str, Any]] = {"bgr": False}
    STEPS: ClassVar[Mapping[str, str]] = {"action": "action", "observations": "observation"}
    # `compress_len` has the bytes of each encoded picture. The reader does not need them, because the
    # data of a picture mark its end.
    METADATA = ("compress_len",)
    COUNTED = "action"

    def scan(self) -> Sequence[EpisodeInfo]:
        episodes: list[EpisodeInfo] = []
        for path in aloha_files(self.path):
            num_problems = len(self.problems)
            try:
                for info in self.collect(path, "", [""]):
                    episodes.append(replace(info, name=path.stem))
            except DataFileError as cause:
                self.problems.append(cause)
            for problem in self.problems[num_problems:]:
                problem.of("", path.stem)
        if self.metadata["lossy"]:
            color_order = "rgb, turned from bgr" if self.options["bgr"] else "unknown"
            self.metadata["color_order"] = color_order
        return self.checked_some(episodes, "episode")

    def is_picture(self, maker: LayoutMaker, path: str, name: str) -> bool:
        return path.startswith(_IMAGES) and is_encoded(maker.datasets[path])

    def read_rows(self, info: EpisodeInfo, column: DatasetColumn, start: int, stop: int) -> Any:
        rows = super().read_rows(info, column, start, stop)
        if column.is_picture and self.options["bgr"]:
            rows = np.ascontiguousarray(rows[..., ::-1])
        return rows
