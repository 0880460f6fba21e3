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

from ..writer import EpisodeToWrite, ForeignWriter, plain
from .hdf5_file import Array, EpisodeFile, parts, written_dtype

_DEMO = re.compile(r"demo_\d+")
#: Our name of a group of fields -> its group in a demo.
_GROUPS = {"observation": "obs", "action": "action_dict", "reward": "rewards"}
#: robomimic's number for data that no simulator of its own makes.
_REAL = 4


class Writer(ForeignWriter):
    """Demos; ids such as "demo_7" stay, other episodes are numbered and keep their ids in `ep_meta`.

    Options:
        next_obs: Also write the following observations, which take as much again. Otherwise the observation after
            the last step is left out.
        obs_key: Name of an observation that has none.
        env_name, env_kwargs: Of `env_args`, where the recording does not say them.
    """

    format, is_laid_out_first = "robomimic", True
    HOLDS = frozenset(("control_mode", "env", "env_args", "env_name", "total"))
    OPTIONS: ClassVar[Mapping[str, Any]] = {"next_obs": False, "obs_key": "state", "env_name": "", "env_kwargs": None}

    def begin(self) -> set[str]:
        ids = [episode.id for episode in self.episodes]
        are_demos = all(map(_DEMO.fullmatch, ids))
        self._demos = {one: one if are_demos else f"demo_{number}" for number, one in enumerate(ids)}
        datasets: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {}
        attributes: dict[str, dict[str, Any]] = {"/": self.about_root(), "data": self.about()}
        for episode in self.episodes:
            group = f"data/{self._demos[episode.id]}"
            for name, field, at in self.columns(episode):
                datasets[f"{group}/{at}"] = written_dtype(field), (episode.length, *self._shape(name, field))
            made = self.made(episode, reads=False)
            datasets.update({f"{group}/{at}": (one.dtype, one.shape) for at, one in made.items()})
            attributes[group] = {"num_samples": episode.length, **self.about_episode(episode)}
        masks = {f"mask/{name}": np.array(demos, "S") for name, demos in self._masks().items() if demos}
        self._file = EpisodeFile(self.path, datasets, masks, attributes)
        return self._file.written

    def add(self, episode: EpisodeToWrite) -> None:
        group, final = f"data/{self._demos[episode.id]}", self._finals(episode)
        for name, _, at in self.columns(episode):
            if at.startswith("next_obs"):
                continue
            following = at.replace("obs", "next_obs", 1) if at.split("/")[0] == "obs" and name in final else ""
            for start, rows in parts(episode, name):
                self._file.write(f"{group}/{at}", rows, start)
                if following:
                    self._file.write(f"{group}/{following}", rows[start == 0 :], max(0, start - 1))
            if following:
                self._file.write(f"{group}/{following}", final[name][None], episode.length - 1)
        for at, values in self.made(episode).items():
            self._file.write(f"{group}/{at}", values)
        self._report(episode)
        self._file.note(episode.id)

    def close(self) -> None:
        self._file.close(is_complete=self.is_complete)

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

    def columns(self, episode: EpisodeToWrite) -> Iterator[tuple[str, Field, str]]:
        """Say which dataset of a demo has which field: (name, field, dataset)."""
        final = episode.final if self.options.get("next_obs") else ()
        for name, field in episode.schema.items():
            head, _, rest = name.partition("/")
            if name == "action":
                yield name, field, "actions"
            elif head == "reward":
                if field.num_elements == 1:
                    yield name, field, "rewards"
            elif head == "observation":
                at = rest or self.options.get("obs_key", "")
                yield name, field, f"obs/{at}"
                if name in final:
                    yield name, field, f"next_obs/{at}"
            else:
                yield name, field, f"{_GROUPS.get(head, head)}/{rest}".rstrip("/")

    def _shape(self, name: str, field: Field) -> tuple[int, ...]:
        return () if name.partition("/")[0] == "reward" else field.shape

    def _finals(self, episode: EpisodeToWrite) -> dict[str, Array]:
        """The observation after the last step by our names, if it is written."""
        return finals_of(episode) if self.options.get("next_obs") else {}

    def _masks(self) -> dict[str, list[str]]:
        masks: dict[str, list[str]] = {}
        for episode in self.episodes:
            for mask in episode.metadata.get("mask", ()):
                masks.setdefault(str(mask), []).append(self._demos[episode.id])
        return masks

    def _report(self, episode: EpisodeToWrite) -> None:
        if episode.texts:
            self.changed(f"texts of steps are left out ({', '.join(episode.texts)})", episode)
        if "observation" in episode.schema and (key := self.options.get("obs_key")):
            self.changed(f"the observation is called {key!r}", episode)
        if any(field.num_elements > 1 for field in episode.schema.below("reward").values()):
            self.changed("rewards of several terms are left out", episode)
        if episode.terminated is not None or episode.truncated is not None:
            self.changed("how an episode ended is left out, but for `dones`, which readers do not take for it", episode)
        if episode.final and not self.options.get("next_obs"):
            self.changed("the observation after the last step is left out", episode)
        if any(field.dtype == "bfloat16" for field in episode.schema.values()):
            self.changed("bfloat16 is written as float32", episode)


def finals_of(episode: EpisodeToWrite) -> dict[str, Array]:
    """The observation after the last step by our names: `[*shape]` each; {} if there is none."""
    final = episode.final_observation
    if final is None:
        return {}
    named = {f"observation/{name}": value for name, value in final.items()} if isinstance(final, dict) else None
    found = named if named is not None else {"observation": final}
    return {name: np.asarray(value) for name, value in found.items() if name in episode.schema}
