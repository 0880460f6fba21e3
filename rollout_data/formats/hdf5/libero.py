"""LIBERO's files: robomimic's tree, with the task in the attributes of `data`.

One rule: `rewards` and `dones` are constants, 1 in the last row, so they are fields and tell no end; a row of `obs` is
what was seen after the action of its row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from storage.errors import CorruptFileError

from ...sources.episode_reader import EpisodeInfo
from ..input_checks import parse_attribute
from .hdf5_datasets import Found, OpenFile
from .hdf5_episodes import Layout
from .robomimic_reader import Reader as RobomimicReader


class Reader(RobomimicReader):
    """Demos of one task.

    Options:
        shift_obs: Give each observation with the action that followed it: T is one less, as no observation was made
            before the first action, and the last one is the final observation. Otherwise rows are given as stored.
    """

    format = "libero"
    OPTIONS: ClassVar[Mapping[str, Any]] = {"shift_obs": False}
    KNOWN = ()

    def scan(self) -> Sequence[EpisodeInfo]:
        self._task = ""
        episodes = super().scan()
        if not self.options["shift_obs"]:
            where = f"the observations of {str(self.path)!r}"
            advice = "Open it with shift_obs=True to move them"
            self.advise("move", where, "observations before the actions", "those after them, as stored", advice)
        return episodes

    def describe(self, file: OpenFile, data: Any) -> None:
        super().describe(file, data)
        problem = parse_attribute(self.metadata.get("problem_info"), "problem_info")
        told = problem.get("language_instruction", "")
        self._task = told if isinstance(told, str) else ""
        self.metadata["problem_info"] = problem

    def about(self, file: OpenFile, node: Any, length: int) -> dict[str, Any]:
        told = {"language_instruction": self._task} if self._task else {}
        return {"metadata": told, "task": self._task}

    def layout(self, file: OpenFile, group: str, found: Mapping[str, Found]) -> tuple[int, Layout]:
        length, layout = super().layout(file, group, found)
        if not self.options["shift_obs"]:
            return length, layout
        if length < 2:
            raise CorruptFileError("move the observations", f"of {group!r} of {file.where}", "2 steps", str(length))
        seen = [name for name in layout.columns if name.split("/")[0] == "observation"]
        columns = {name: one if name in seen else one._replace(first=1) for name, one in layout.columns.items()}
        return length - 1, Layout(columns, {name: layout.columns[name] for name in seen}, layout.aside)

    def num_steps(self, episodes: Sequence[EpisodeInfo]) -> int:
        return super().num_steps(episodes) + len(episodes) * bool(self.options["shift_obs"])

    def length(self, file: OpenFile, node: Any) -> int:
        return super().length(file, node) - bool(self.options["shift_obs"])
