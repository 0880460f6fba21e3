"""Reader of LIBERO files: the groups of robomimic, with the task in the attributes of `data`.

`rewards` and `dones` are always 1 in the last row. They therefore become fields, and do not
determine how an episode ended. A row of `obs` was observed after the action in the same row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from storage.errors import CorruptFileError

from ...sources.episode_info import EpisodeInfo
from ..input_checks import parse_attribute
from .hdf5_datasets import DatasetInfo, OpenFile
from .hdf5_episodes import Layout
from .robomimic_reader import RobomimicReader


class LiberoReader(RobomimicReader):
    """Reader of the demos of one task.

    Options:
        shift_obs: Pair each observation with the action that follows it. T is one less, because no
            observation precedes the first action. The last observation becomes the final
            observation. False returns rows as stored.
    """

    format = "libero"
    OPTIONS: ClassVar[Mapping[str, Any]] = {"shift_obs": False}
    ATTRIBUTES = ()

    def scan(self) -> Sequence[EpisodeInfo]:
        self._task = ""
        self._num_shifted = int(bool(self.options["shift_obs"]))
        episodes = super().scan()
        if not self._num_shifted:
            self.advise(
                f"{str(self.path)!r} stores each observation with the action before it. Pass "
                "shift_obs=True to pair it with the next action."
            )
        return episodes

    def read_file_metadata(self, file: OpenFile, data: Any) -> None:
        super().read_file_metadata(file, data)
        problem = parse_attribute(self.metadata.get("problem_info"), "problem_info")
        instruction = problem.get("language_instruction", "")
        self._task = instruction if isinstance(instruction, str) else ""
        self.metadata["problem_info"] = problem

    def facts(self, file: OpenFile, node: Any, length: int) -> dict[str, Any]:
        metadata = {"language_instruction": self._task} if self._task else {}
        return {"metadata": metadata, "task": self._task}

    def layout(
        self,
        file: OpenFile,
        group: str,
        datasets: Mapping[str, DatasetInfo],
    ) -> tuple[int, Layout]:
        length, stored = super().layout(file, group, datasets)
        if not self._num_shifted:
            return length, stored
        if length < 2:
            raise CorruptFileError(
                f"{group!r} of {file.where} has {length} step, but shift_obs needs at least 2."
            )
        shifted = Layout(metadata=stored.metadata)
        for name, column in stored.columns.items():
            if name.split("/")[0] == "observation":
                shifted.columns[name] = column
                shifted.final[name] = column
            else:
                shifted.columns[name] = column._replace(first=1)
        return length - 1, shifted

    def num_steps(self, episodes: Sequence[EpisodeInfo]) -> int:
        return super().num_steps(episodes) + len(episodes) * self._num_shifted

    def length(self, file: OpenFile, node: Any) -> int:
        return super().length(file, node) - self._num_shifted
