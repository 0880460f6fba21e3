"""Writing robomimic's files: `data/demo_<i>` with `actions`, `obs/<key>` and what else an episode has.

One rule: what a demo has no place for is in the report; numbers keep their dtypes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import numpy as np

from storage.core.fields import Field
from storage.errors import UsageError

from ..writer import Array, EpisodeToWrite, finals_of, plain
from .hdf5_file import EpisodeFile, Hdf5Writer, written_dtype

_DEMO = re.compile(r"demo_\d+")
#: Our name of a group of fields -> its group in a demo.
_GROUPS = {"observation": "obs", "action": "action_dict", "reward": "rewards"}
#: robomimic's number for data that no simulator of its own makes.
_REAL = 4


class Writer(Hdf5Writer):
    """Demos; ids such as "demo_7" stay, other episodes are numbered and keep their ids in `ep_meta`.

    Options:
        next_obs: Also write the following observations, which take as much again. Otherwise the observation after
            the last step is left out.
        obs_key: Name of an observation that has none.
        env_name, env_kwargs: Of `env_args`, where the recording does not say them.
    """

    format = "robomimic"
    HOLDS = frozenset(("control_mode", "env", "env_args", "env_name", "total"))
    #: Says in the report what is written of the ends of episodes.
    but_dones = ", but for `dones`, which readers do not take for it"
    OPTIONS: ClassVar[Mapping[str, Any]] = {"next_obs": False, "obs_key": "state", "env_name": "", "env_kwargs": None}

    def begin(self) -> set[str]:
        ids = [episode.id for episode in self.episodes]
        are_demos = all(map(_DEMO.fullmatch, ids))
        self._demos = {one: one if are_demos else f"demo_{number}" for number, one in enumerate(ids)}
        self._writes_next = bool(self.options.get("next_obs"))
        datasets: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {}
        attributes: dict[str, dict[str, Any]] = {"/": self.about_root(), "data": self.about()}
        masks: dict[str, list[str]] = {}
        for episode in self.episodes:
            demo = self._demos[episode.id]
            group, length = f"data/{demo}", episode.length
            for field, at in self.columns(episode):
                if f"{group}/{at}" in datasets:
                    where, got = f"episode {episode.id!r} as {self.format}", f"two for {at!r}"
                    raise UsageError("write", where, "one field for a dataset", got, "Rename one of them")
                shape = () if at == "rewards" else field.shape
                datasets[f"{group}/{at}"] = written_dtype(field), (length, *shape)
                if self._has_next(episode, field):
                    datasets[f"{group}/next_{at}"] = datasets[f"{group}/{at}"]
            made = self.made(episode, reads=False)
            datasets.update({f"{group}/{at}": (one.dtype, one.shape) for at, one in made.items()})
            attributes[group] = {"num_samples": length, **self.about_episode(episode)}
            for mask in episode.metadata.get("mask", ()):
                masks.setdefault(f"mask/{mask}", []).append(demo)
        contents = {mask: np.array(demos, "S") for mask, demos in masks.items()}
        self._file = EpisodeFile(self.path, datasets, contents, attributes)
        return self._file.written

    def add(self, episode: EpisodeToWrite) -> None:
        group, length = f"data/{self._demos[episode.id]}", episode.length
        final = finals_of(episode) if self._writes_next else {}
        for field, at in self.columns(episode):
            self.copy(episode, field.name, f"{group}/{at}")
            if self._has_next(episode, field):
                self.copy(episode, field.name, f"{group}/next_{at}", steps=range(1, length))
                self._file.write(f"{group}/next_{at}", final[field.name][None], length - 1)
        for at, values in self.made(episode).items():
            self._file.write(f"{group}/{at}", values)
        self._report(episode)
        self._file.note(episode.id)

    def about_root(self) -> dict[str, Any]:
        """Attributes of the file."""
        return {}

    def about(self) -> dict[str, Any]:
        """Attributes of `data`."""
        given, name = self.metadata.get("env_args"), self.options["env_name"] or str(self.metadata.get("env", ""))
        mode = self.metadata.get("control_mode", "unknown")
        controller = {} if mode == "unknown" else {"controller_configs": {"type": mode}}
        made = {"env_name": name, "type": _REAL, "env_kwargs": self.options["env_kwargs"] or controller}
        total = sum(episode.length for episode in self.episodes)
        return {"total": total, "env_args": json.dumps(given if isinstance(given, dict) and given else made)}

    def about_episode(self, episode: EpisodeToWrite) -> dict[str, Any]:
        """Attributes of a demo, besides its length."""
        told = {**({"lang": episode.task} if episode.task else {}), **plain(episode.metadata)}
        if self._demos[episode.id] != episode.id:
            told["id"] = episode.id
        return {"ep_meta": json.dumps(told)}

    def made(self, episode: EpisodeToWrite, reads: bool = True) -> dict[str, Array]:
        """Datasets of a demo that are made of several fields, or of none: their rows, zero where nothing is read."""
        found = {}
        if fields := [field for name, field in episode.schema.items() if name.startswith("action/")]:
            empty = [np.zeros((episode.length, *field.shape), written_dtype(field)) for field in fields]
            columns = [np.asarray(episode.read(field.name)) for field in fields] if reads else empty
            found["actions"] = np.concatenate([one.reshape(episode.length, -1) for one in columns], axis=1)
        if episode.terminated is not None and "dones" not in episode.schema:
            found["dones"] = np.zeros(episode.length, np.int64)
            found["dones"][-1] = episode.terminated
        return found

    def columns(self, episode: EpisodeToWrite) -> Iterator[tuple[Field, str]]:
        """Say which dataset of a demo has which field."""
        for name, field in episode.schema.items():
            head, _, rest = name.partition("/")
            if name == "observation":
                yield field, f"obs/{self.options.get('obs_key', '')}".rstrip("/")
            elif head != "reward":
                yield field, "actions" if name == "action" else f"{_GROUPS.get(head, head)}/{rest}".rstrip("/")
            elif field.num_elements == 1:
                yield field, "rewards"

    def _has_next(self, episode: EpisodeToWrite, field: Field) -> bool:
        return self._writes_next and field.name in episode.final and field.name.split("/")[0] == "observation"

    def _report(self, episode: EpisodeToWrite) -> None:
        fields, key = episode.schema, self.options.get("obs_key")
        self.changed(f"texts of steps are left out ({', '.join(episode.texts)})", episode, episode.texts)
        self.changed(f"the observation is called {key!r}", episode, "observation" in fields and key)
        has_terms = any(field.num_elements > 1 for field in fields.below("reward").values())
        self.changed("rewards of several terms are left out", episode, has_terms)
        tells_end = episode.terminated is not None or episode.truncated is not None
        self.changed(f"how an episode ended is left out{self.but_dones}", episode, tells_end)
        lost_final = episode.final and not self._writes_next
        self.changed("the observation after the last step is left out", episode, lost_final)
