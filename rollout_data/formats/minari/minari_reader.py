"""Minari datasets: a folder, or its file, whatever the kind of its files; HDF5 has `episode_<id>` in `main_data.hdf5`.

One rule: observations and infos have T + 1 rows; the last one follows the last action.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from ...sources.episode_reader import ABSENT, EpisodeInfo, ForeignReader
from ..encoded_images import picture_format
from ..format_detection import MINARI_EPISODE, MINARI_MAIN_FILE, MINARI_NUM_STEPS, has_minari_tables, minari_folder
from ..hdf5.hdf5_datasets import OpenFile
from ..hdf5.hdf5_episodes import Hdf5Reader, LayoutMaker, absent_fields, is_encoded
from ..input_checks import file_inside
from .minari_metadata import ENDS, STEP_FIELDS, check_totals, describe
from .minari_tables import TableReader


class GroupReader(Hdf5Reader):
    """Reads a dataset whose data are in groups of a file."""

    format = "minari"
    OPTIONS: ClassVar[Mapping[str, Any]] = {"on_bad_index": "refuse"}
    STEPS: ClassVar[Mapping[str, str]] = STEP_FIELDS
    ENDS: ClassVar[Mapping[str, str]] = ENDS
    AFTER = ("observations",)
    STATED = MINARI_NUM_STEPS
    GROUPS = ("observations",)

    def scan(self) -> Sequence[EpisodeInfo]:
        folder = minari_folder(self.path) if self.path.is_dir() else None
        path = self.path
        if folder is not None:
            path = file_inside(path, os.path.relpath(folder / MINARI_MAIN_FILE, path))
        with self.files.use(path) as file:
            self._about = describe(self.path, folder or path, file.attributes(file.open("")))
            self.metadata = {**self._about.metadata, **self.metadata}
            names = file.numbered("", MINARI_EPISODE)
        return check_totals(self, self.checked_some(self.collect(path, "", names), "an episode"))

    def about(self, file: OpenFile, node: Any, length: int) -> dict[str, Any]:
        ends = super().about(file, node, length)
        if not any(ends.values()):  # most episodes have an end: their attributes need not be read
            lacking = absent_fields(file.attribute(node, ABSENT)).get(ABSENT, ())
            ends |= {ours: None for name, ours in ENDS.items() if name in lacking}
        return ends

    def is_picture(self, maker: LayoutMaker, path: str, name: str) -> bool:
        # Raw pictures have more axes.
        found = maker.found[path]
        if not (is_encoded(found) and found.shape[0] and self._about.is_jpeg and self._about.is_picture(name)):
            return False
        if found.kind == "bytes":
            return True
        first = maker.file.rows(f"{maker.group}/{path}", found, 0, 1)[0]
        return picture_format(bytes(first[:16])) == "JPEG"

    def shape_of(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        return self._about.shape_of(name, shape)


class Reader(GroupReader):
    """Episodes in the order of their numbers.

    Options:
        on_bad_index: "refuse" a dataset that does not hold what its metadata count, or "rebuild": read what is there.
    """

    def __new__(cls, path: Path, options: Mapping[str, Any]) -> ForeignReader:  # type: ignore[misc]
        folder = minari_folder(path) if path.is_dir() else None
        if folder is not None and has_minari_tables(folder):
            return TableReader(path, options)
        return GroupReader(path, options)
