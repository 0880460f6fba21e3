"""Writer of the files of Isaac Lab's recorder: robomimic files with other attributes.

Quaternions are written as recorded, and the file states their order.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from storage.saving.hdf5_files import MAX_HEAP_BYTES

from ...sources.episode_info import ABSENT
from ...sources.origins import ORDER_KEY
from ..episode_writer import Array, EpisodeToWrite
from . import robomimic_writer

#: Value of `type` in `env_args` for environments of Isaac Lab.
_ISAAC = 2
#: Prefix of the names of metadata that contain the initial state.
_INITIAL = "initial_state/"


class IsaacLabWriter(robomimic_writer.RobomimicWriter):
    """Writer of demos with `success`, `seed` and other plain metadata as attributes.

    Options:
        env_name: Name of the environment in `env_args`, if the recording does not state it.
    """

    format = "isaaclab"
    HOLDS = frozenset(("env", "env_args", "env_name", "format_version", ORDER_KEY, "total"))
    OPTIONS: ClassVar[Mapping[str, Any]] = {"env_name": ""}
    ends_exception = ""
    writes_dones = False

    @property
    def _order(self) -> str:
        """Quaternion order that the file states: "wxyz" or "xyzw"."""
        return "xyzw" if self.metadata.get(ORDER_KEY) == "xyzw" else "wxyz"

    def root_attributes(self) -> dict[str, Any]:
        return {"format_version": int(self._order == "xyzw")}

    def data_attributes(self) -> dict[str, Any]:
        stated = self.metadata.get("env_args")
        name = stated.get("env_name") if isinstance(stated, dict) else ""
        name = name or self.options["env_name"] or str(self.metadata.get("env", ""))
        total = sum(episode.length for episode in self.episodes)
        env_args = {"env_name": name, "type": _ISAAC}
        return {"total": total, "env_args": json.dumps(env_args)}

    def episode_attributes(self, episode: EpisodeToWrite) -> dict[str, Any]:
        attributes: dict[str, Any] = {}
        lost = []
        for name, value in episode.metadata.items():
            if isinstance(value, (str, int, float)):
                attributes[name] = value
            elif name != ABSENT and not name.startswith(_INITIAL):
                lost.append(name)
        change = "metadata of episodes are left out unless they are texts or numbers"
        self.changed(f"{change}: {', '.join(sorted(lost))}", episode, lost)
        order = episode.metadata.get(ORDER_KEY, self.metadata.get(ORDER_KEY))
        change = f"quaternions of the order {order!r} stand in a file that states {self._order!r}"
        self.changed(change, episode, order not in (None, self._order))

        absent = self._fields.absent(episode)
        if episode.task:
            attributes["task"] = episode.task
        if episode.success is not None:
            attributes["success"] = episode.success
        if absent:
            attributes[ABSENT] = json.dumps(absent)
        return self.fitting(attributes, MAX_HEAP_BYTES, episode)

    def key(self, name: str) -> str:
        return name  # Isaac Lab reads nested groups, so the name may contain "/".

    def extras(self, episode: EpisodeToWrite) -> dict[str, Array]:
        arrays = {}
        for name, value in episode.metadata.items():
            if name.startswith(_INITIAL):
                array = np.asarray(value)
                if array.dtype.kind in "fiub":
                    arrays[name] = array
        return arrays
