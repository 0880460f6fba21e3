"""Writer of RLinf's trajectory checkpoints: a `.pt` file per episode and two JSON files.

An episode is a block `[T, 1, ...]`. Its file is renamed when the file is complete. The index
`trajectory_index.json` is written first, and lists all files. `metadata.json` is written last. The
target of a stopped conversion can be opened; it has the complete episodes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from storage.core.durable_files import replace_file

from ...sources.episode_info import ABSENT
from ...sources.trajectory_checkpoints.checkpoint_folder import INDEX_NAME, METADATA_NAME
from ..episode_writer import EpisodeToWrite, ForeignWriter, finals_of, shared_fields

_WEIGHTS = "recorded"
#: Group of the observations in a file.
_OBSERVATIONS = "curr_obs"
#: Group of all fields other than observations, actions and rewards in a file.
_OTHERS = "forward_inputs"
_ACTIONS_AND_REWARDS = {"action": "actions", "reward": "rewards"}


class RlinfWriter(ForeignWriter):
    """Writer of a checkpoint folder. Trajectory ids are 0, 1, ... in the order of the episodes."""

    format = "rlinf"
    MADE = (INDEX_NAME, "trajectory_*.pt")
    BEGUN = (INDEX_NAME,)
    LAST = METADATA_NAME

    @classmethod
    def is_finished(cls, path: Path) -> bool:
        return (path / METADATA_NAME).exists()

    def begin(self) -> set[str]:
        self._fields = shared_fields(self.episodes)
        self._numbers = {episode.id: number for number, episode in enumerate(self.episodes)}
        self._write(INDEX_NAME, self._index(self.episodes))
        self.note_files({INDEX_NAME: self.path / INDEX_NAME})
        return {episode.id for episode in self.episodes if self._file(episode).exists()}

    def _file(self, episode: EpisodeToWrite) -> Path:
        return self.path / f"trajectory_{self._numbers[episode.id]}_{_WEIGHTS}.pt"

    def _index(self, episodes: Sequence[EpisodeToWrite]) -> dict[str, Any]:
        index = {}
        for episode in episodes:
            number = self._numbers[episode.id]
            index[str(number)] = {
                "num_samples": episode.length,
                "trajectory_id": number,
                "max_episode_length": episode.length,
                "shape": [episode.length, 1],
                "model_weights_id": _WEIGHTS,
            }
        return {"trajectory_index": index, "trajectory_id_list": list(map(int, index))}

    def _write(self, name: str, content: dict[str, Any]) -> None:
        with replace_file(self.path / name) as temporary:
            temporary.write_text(json.dumps(content, indent=1), "utf-8")
            if name == METADATA_NAME:
                self.note_files({INDEX_NAME: self.path / INDEX_NAME, METADATA_NAME: temporary})

    def add(self, episode: EpisodeToWrite) -> None:
        place = self._file(episode)
        with replace_file(place) as temporary:
            # `torch.save` to a path would hide the operating system error of a failed write.
            with open(temporary, "wb") as file:
                torch.save(self._content(episode), file)
            self.note(episode, {place.name: temporary})
        self.written.add(episode.id)
        if episode.metadata.keys() - {"task"}:
            self.changed("metadata of episodes is left out", episode)
        if episode.terminated is None and episode.truncated is None:
            self.changed("the end, which is unknown, is only in `dones`", episode)

    def _content(self, episode: EpisodeToWrite) -> dict[str, Any]:
        """Return the content to write to the file of an episode.

        The content is nested dicts with tensors `[T, 1, ...]` and lists of texts.
        """
        for change in self._fields.changes(episode):
            self.changed(change, episode)
        content: dict[str, Any] = {
            "max_episode_length": episode.length,
            "model_weights_id": _WEIGHTS,
        }
        finals = finals_of(episode)
        for name, field in self._fields.schema.items():
            group, key = _place_of(name)
            rows = np.array(self._fields.read(episode, name))
            values = torch.from_numpy(rows).to(field.torch_dtype)
            target = content.setdefault(group, {}) if group else content
            target[key] = values[:, None]
            if group == _OBSERVATIONS and name in finals:
                last = torch.from_numpy(np.array(finals[name])).to(values.dtype)[None]
                following = torch.cat([values[1:], last])
                content.setdefault("next_obs", {})[key] = following[:, None]

        texts = {name: episode.read(name) for name in self._fields.texts}
        if episode.task:
            texts["task_descriptions"] = [episode.task] * episode.length
        for name, rows_of_text in texts.items():
            head, _, rest = name.partition("/")
            is_observation = head == "observation" and rest
            group, key = (_OBSERVATIONS, rest) if is_observation else (_OTHERS, name)
            content.setdefault(group, {})[key] = [[text] for text in rows_of_text]

        is_last = torch.arange(episode.length)[:, None] == episode.length - 1
        content["dones"] = is_last
        if episode.terminated is not None or episode.truncated is not None:
            content["terminations"] = is_last & bool(episode.terminated)
            content["truncations"] = is_last & bool(episode.truncated)
        self._report_changes(episode)
        return content

    def _report_changes(self, episode: EpisodeToWrite) -> None:
        """Report omitted fields, and fields that readers return with another name or shape."""
        schema = self._fields.schema
        for name in schema:
            if _read_name(name) != name:
                self.changed(f"{name!r} is called {_read_name(name)!r}", episode)
        if "reward" in schema and schema["reward"].shape == (1,):
            self.changed("'reward' is read as numbers, not as rows of one", episode)
        lost = [name for name in episode.final if name in episode.texts]
        if lost:
            change = f"texts of the final observation are left out ({', '.join(lost)})"
            self.changed(change, episode)

    def close(self) -> None:
        if not self.is_complete or (self.path / METADATA_NAME).exists():
            return
        episodes = [episode for episode in self.episodes if episode.id in self.written]
        metadata: dict[str, Any] = {
            "trajectory_format": "pt",
            "size": len(episodes),
            "total_samples": sum(episode.length for episode in episodes),
            "trajectory_counter": len(episodes),
            "seed": 0,
        }
        absent = {}
        for episode in episodes:
            names = self._fields.absent(episode, _read_name)
            if names:
                absent[str(self._numbers[episode.id])] = names
        if absent:
            metadata[ABSENT] = absent

        self.note_open()
        self._write(INDEX_NAME, self._index(episodes))
        self._write(METADATA_NAME, metadata)
        self.note_finish()


def _place_of(name: str) -> tuple[str, str]:
    """Return (group, key) of a numeric field in a file; the group is "" for top-level fields."""
    head, _, rest = name.partition("/")
    if head == "observation":
        return _OBSERVATIONS, rest or "states"
    if name in _ACTIONS_AND_REWARDS:
        return "", _ACTIONS_AND_REWARDS[name]
    return _OTHERS, name


def _read_name(name: str) -> str:
    """Return the name under which the reader of this format returns a numeric field."""
    group, key = _place_of(name)
    return f"{_OTHERS}/{key}" if group == _OTHERS else name
