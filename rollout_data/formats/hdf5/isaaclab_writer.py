"""Writing Isaac Lab's recorder files, which are robomimic's with other attributes.

One rule: quaternions are written as the recording has them, and the file says in which order that is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from storage.saving.hdf5_files import MAX_HEAP_BYTES

from ...sources.episode_reader import ABSENT
from ...sources.source_kind import ORDER_KEY
from ..episode_writer import Array, EpisodeToWrite
from . import robomimic_writer

#: Isaac Lab's number for its own environments.
_ISAAC = 2
_INITIAL = "initial_state/"


class Writer(robomimic_writer.Writer):
    """Demos with `success`, `seed` and other plain metadata as attributes.

    Options:
        env_name: Of `env_args`, where the recording does not say it.
    """

    format = "isaaclab"
    HOLDS = frozenset(("env", "env_args", "env_name", "format_version", ORDER_KEY, "total"))
    OPTIONS: ClassVar[Mapping[str, Any]] = {"env_name": ""}
    but_dones = ""  # there are none

    @property
    def _order(self) -> str:
        """The order of quaternions that the file states."""
        return "xyzw" if self.metadata.get(ORDER_KEY) == "xyzw" else "wxyz"

    def about_root(self) -> dict[str, Any]:
        return {"format_version": int(self._order == "xyzw")}

    def about(self) -> dict[str, Any]:
        given = self.metadata.get("env_args")
        name = (given.get("env_name") if isinstance(given, dict) else "") or self.options["env_name"]
        env_args = {"env_name": name or str(self.metadata.get("env", "")), "type": _ISAAC}
        return {"total": sum(episode.length for episode in self.episodes), "env_args": json.dumps(env_args)}

    def about_episode(self, episode: EpisodeToWrite) -> dict[str, Any]:
        plain = {name: value for name, value in episode.metadata.items() if isinstance(value, (str, int, float))}
        lost = [name for name in episode.metadata if name not in plain and not name.startswith(_INITIAL)]
        lost = sorted(name for name in lost if name != ABSENT)
        what = f"metadata of episodes are left out unless they are texts or numbers: {', '.join(lost)}"
        self.changed(what, episode, lost)
        order = episode.metadata.get(ORDER_KEY, self.metadata.get(ORDER_KEY))
        what = f"quaternions of the order {order!r} stand in a file that states {self._order!r}"
        self.changed(what, episode, order not in (None, self._order))
        absent = self._fields.absent(episode)
        told = {"task": episode.task or None, "success": episode.success}
        told[ABSENT] = json.dumps(absent) if absent else None
        given = {**plain, **{name: value for name, value in told.items() if value is not None}}
        return self.fitting(given, MAX_HEAP_BYTES, episode)

    @property
    def writes_dones(self) -> bool:
        return False

    def key(self, name: str) -> str:
        return name  # Isaac Lab reads nested groups

    def extras(self, episode: EpisodeToWrite) -> dict[str, Array]:
        kept = {name: np.asarray(value) for name, value in episode.metadata.items() if name.startswith(_INITIAL)}
        return {name: value for name, value in kept.items() if value.dtype.kind in "fiub"}
