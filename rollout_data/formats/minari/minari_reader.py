"""Reader of Minari datasets: a folder or its HDF5 file.

A dataset in HDF5 has one group `episode_<id>` per episode in `main_data.hdf5`. Observations and
infos of an episode with T steps have T + 1 rows. The last row is the observation after the last
action. Datasets in Arrow or Parquet files are read by `minari_tables.py`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from ...sources.episode_info import ABSENT, EpisodeInfo
from ...sources.file_source import FileSource
from ..encoded_images import picture_format
from ..format_detection import (
    MINARI_EPISODE,
    MINARI_MAIN_FILE,
    MINARI_NUM_STEPS,
    has_minari_tables,
    minari_folder,
)
from ..hdf5.hdf5_datasets import OpenFile
from ..hdf5.hdf5_episodes import Hdf5Reader, LayoutMaker, absent_fields, is_encoded
from ..input_checks import file_inside
from .minari_metadata import ENDS, STEP_FIELDS, check_totals, read_description
from .minari_tables import TableReader

#: First bytes of a picture that determine its format.
_PICTURE_HEAD_BYTES = 16


class GroupReader(Hdf5Reader):
    """Reader of a dataset in an HDF5 file, with one group per episode."""

    format = "minari"
    OPTIONS: ClassVar[Mapping[str, Any]] = {"on_bad_index": "refuse"}
    STEPS: ClassVar[Mapping[str, str]] = STEP_FIELDS
    ENDS: ClassVar[Mapping[str, str]] = ENDS
    WITH_FINAL = ("observations",)
    STATED = MINARI_NUM_STEPS
    GROUPS = ("observations",)

    def scan(self) -> Sequence[EpisodeInfo]:
        path = self.path
        folder = minari_folder(path) if path.is_dir() else None
        if folder is not None:
            path = file_inside(path, os.path.relpath(folder / MINARI_MAIN_FILE, path))
        with self.files.use(path) as file:
            root = file.attributes(file.open(""))
            self._description = read_description(self.path, folder or path, root)
            self.metadata = {**self._description.metadata, **self.metadata}
            names = file.numbered("", MINARI_EPISODE)
        episodes = self.checked_some(self.collect(path, "", names), "episode")
        check_totals(self, episodes)
        return episodes

    def facts(self, file: OpenFile, node: Any, length: int) -> dict[str, Any]:
        facts = super().facts(file, node, length)
        # A converted episode whose end is unknown has False in all end flags, and an attribute that
        # lists these flags as absent. The attribute is read only if no flag is True.
        if not any(facts.values()):
            absent = absent_fields(file.attribute(node, ABSENT)).get(ABSENT, ())
            for path, name in self.ENDS.items():
                if path in absent:
                    facts[name] = None
        return facts

    def is_picture(self, maker: LayoutMaker, path: str, name: str) -> bool:
        # Encoded pictures have at most one axis per row. Other pictures have more axes.
        info = maker.datasets[path]
        has_bytes = is_encoded(info) and info.shape[0] > 0
        if not has_bytes or not self._description.is_jpeg or not self._description.is_picture(name):
            return False
        if info.kind == "bytes":
            return True
        first = maker.file.rows(f"{maker.group}/{path}", info, 0, 1)[0]
        return picture_format(bytes(first[:_PICTURE_HEAD_BYTES])) == "JPEG"

    def shape_of(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        return self._description.shape_of(name, shape)


class MinariReader(GroupReader):
    """Reader of a dataset in HDF5, Arrow or Parquet files. Episodes are sorted by their numbers.

    Options:
        on_bad_index: "refuse" raises an error if the totals in the metadata contradict the data;
            "rebuild" reads the data.
    """

    def __new__(cls, path: Path, options: Mapping[str, Any]) -> FileSource:  # type: ignore[misc]
        folder = minari_folder(path) if path.is_dir() else None
        if folder is not None and has_minari_tables(folder):
            return TableReader(path, options)
        return GroupReader(path, options)
