"""Reader of humenv motions: groups `ep_<i>` with a row per step.

The groups are in one file, or in several files listed in a text file. The files have no final
observations, and motion capture files have no actions. `read_motions` loads whole files for buffers
of expert motions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import h5py
import numpy as np

from storage.core.fields import DTYPES, unflatten
from storage.errors import CorruptFileError, DataFileError, FieldTypeError
from storage.saving.hdf5_files import Allowance

from ...sources.episode_info import EpisodeInfo
from ..format_detection import HUMENV_EPISODE, humenv_files
from .hdf5_datasets import DatasetInfo, Files, OpenFile
from .hdf5_episodes import Hdf5Reader

_NUM_EPISODES = "num_episodes"


class HumenvReader(Hdf5Reader):
    """Reader of a file, a folder of files, or a text file that lists files.

    Episodes of several files are named "<file>/ep_<i>".
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
        return self.checked_some(episodes, "episode")

    def _episodes_of(self, path: Path) -> list[EpisodeInfo]:
        """Return the episodes of a file."""
        with self.files.use(path) as file:
            names, contradiction = _episode_names(file)
            if contradiction:
                self.problem(f"{contradiction} The number is ignored.", kind="counts")
            return self.collect(path, "", names)


def _episode_names(file: OpenFile) -> tuple[list[str], str]:
    """Return the names of the episode groups, and a sentence if `num_episodes` contradicts them.

    The sentence is "" if the attribute `num_episodes` is right or missing.
    """
    names = file.numbered("", HUMENV_EPISODE)
    stated = file.attribute(file.open(""), _NUM_EPISODES)
    is_number = isinstance(stated, (int, float))
    if stated is None or (is_number and stated == len(names)):
        return names, ""
    return names, f"{file.where} has {len(names)} episodes, but {_NUM_EPISODES!r} is {stated!r}."


def read_motions(path: Path) -> list[dict[str, Any]]:
    """Read all episodes of a file into memory.

    Returns:
        A nested dict of each episode, by group: new arrays `[T, ...]`, arrays without axes for
        single numbers, and texts. Only the first text of an array of texts is read.

    Raises:
        CorruptFileError: The file is damaged, has another number of episodes than it states, or
            declares more data than it can contain.
        FieldTypeError: A dataset contains neither numbers nor texts.
        UnsafeFileError: A link leads out of the file.
    """
    with Files().use(path) as file:
        names, contradiction = _episode_names(file)
        if contradiction:
            raise CorruptFileError(contradiction, kind="counts")
        allowance = Allowance(file.num_bytes)
        episodes = []
        for name in names:
            group = file.group(name)
            values = {}
            for path_in_group, info in file.datasets(name).items():
                dataset = file.open(path_in_group, group)
                values[path_in_group] = _read_whole(file, dataset, info, allowance)
            episodes.append(unflatten(values))
        return episodes


def _read_whole(
    file: OpenFile, node: h5py.h5d.DatasetID, info: DatasetInfo, allowance: Allowance
) -> Any:
    """Read a complete dataset as an array; return only the first text of a text dataset."""
    dataset = h5py.Dataset(node)
    where = file.place(node)
    is_text = info.kind == "text"
    has_values = dataset.size is not None
    if not has_values or (is_text and dataset.size == 0):
        raise CorruptFileError(f"{where} is empty.")
    if not is_text and info.kind not in DTYPES:
        raise FieldTypeError(f"{where} has dtype {dataset.dtype}, expected numbers.")

    allowance.take(dataset, where)
    if is_text:
        return str(dataset.asstr()[(0,) * dataset.ndim])
    if info.shape:
        # The rows are copied, because they may be a map of the file.
        return np.array(file.rows(file.name(node), info, 0, info.shape[0], node))
    return np.asarray(dataset[()])
