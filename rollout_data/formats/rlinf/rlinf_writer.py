"""Writing RLinf's trajectory checkpoints: a `.pt` file for each episode, `trajectory_index.json` and `metadata.json`.

One rule: an episode is a block `[T, 1, ...]`; its file is renamed when it is complete. The index, which may name files
that are not there, is written first, and `metadata.json` when all are there: what was stopped opens with what is whole.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from storage.core.durable_files import replace_file

from ...sources.episode_reader import ABSENT
from ..episode_writer import EpisodeToWrite, ForeignWriter, finals_of, shared_fields

_WEIGHTS = "recorded"
_INDEX = "trajectory_index.json"
_METADATA = "metadata.json"
_ACTIONS_AND_REWARDS = {"action": "actions", "reward": "rewards"}


class Writer(ForeignWriter):
    """A folder of trajectories; the order of the episodes is that of their ids 0, 1, ..."""

    format = "rlinf"
    MADE = (_INDEX, "trajectory_*.pt")
    BEGUN = (_INDEX,)
    LAST = _METADATA

    @classmethod
    def is_finished(cls, path: Path) -> bool:
        return (path / _METADATA).exists()

    def begin(self) -> set[str]:
        self._fields = shared_fields(self.episodes)
        self._numbers = {episode.id: number for number, episode in enumerate(self.episodes)}
        self._write(_INDEX, self._index(self.episodes))
        self.note_files({_INDEX: self.path / _INDEX})
        return {episode.id for episode in self.episodes if self._file(episode).exists()}

    def _file(self, episode: EpisodeToWrite) -> Path:
        return self.path / f"trajectory_{self._numbers[episode.id]}_{_WEIGHTS}.pt"

    def _index(self, episodes: Sequence[EpisodeToWrite]) -> dict[str, Any]:
        index = {
            str(self._numbers[episode.id]): {
                "num_samples": episode.length,
                "trajectory_id": self._numbers[episode.id],
                "max_episode_length": episode.length,
                "shape": [episode.length, 1],
                "model_weights_id": _WEIGHTS,
            }
            for episode in episodes
        }
        return {"trajectory_index": index, "trajectory_id_list": list(map(int, index))}

    def _write(self, name: str, content: dict[str, Any]) -> None:
        with replace_file(self.path / name) as temporary:
            temporary.write_text(json.dumps(content, indent=1), "utf-8")
            if name == _METADATA:
                self.note_files({_INDEX: self.path / _INDEX, _METADATA: temporary})

    def add(self, episode: EpisodeToWrite) -> None:
        place = self._file(episode)
        with replace_file(place) as temporary:
            with open(temporary, "wb") as file:  # torch alone hides why a file cannot be written
                torch.save(self._content(episode), file)
            self.note(episode, {place.name: temporary})
        self.written.add(episode.id)
        if episode.metadata.keys() - {"task"}:
            self.changed("metadata of episodes is left out", episode)
        if episode.terminated is None and episode.truncated is None:
            self.changed("the end, which is unknown, is only in `dones`", episode)

    def _content(self, episode: EpisodeToWrite) -> dict[str, Any]:
        content: dict[str, Any] = {"max_episode_length": episode.length, "model_weights_id": _WEIGHTS}
        finals = finals_of(episode)
        for change in self._fields.changes(episode):
            self.changed(change, episode)
        for name, field in self._fields.schema.items():
            head, _, rest = name.partition("/")
            values = torch.from_numpy(np.array(self._fields.read(episode, name))).to(field.torch_dtype)
            if head == "observation":
                content.setdefault("curr_obs", {})[rest or "states"] = values[:, None]
                if name in finals:
                    last = torch.from_numpy(np.array(finals[name])).to(values.dtype)[None]
                    content.setdefault("next_obs", {})[rest or "states"] = torch.cat([values[1:], last])[:, None]
            elif name in _ACTIONS_AND_REWARDS:
                content[_ACTIONS_AND_REWARDS[name]] = values[:, None]
            else:
                content.setdefault("forward_inputs", {})[name] = values[:, None]
                self.changed(f"{name!r} is called {_read_name(name)!r}", episode)
        if "reward" in self._fields.schema and self._fields.schema["reward"].shape == (1,):
            self.changed("'reward' is read as numbers, not as rows of one", episode)
        texts = {name: episode.read(name) for name in self._fields.texts}
        lost = [name for name in episode.final if name in episode.texts]
        self.changed(f"texts of the final observation are left out ({', '.join(lost)})", episode, lost)
        if episode.task:
            texts["task_descriptions"] = [episode.task] * episode.length
        for name, rows in texts.items():
            head, _, rest = name.partition("/")
            group, key = ("curr_obs", rest) if head == "observation" and rest else ("forward_inputs", name)
            content.setdefault(group, {})[key] = [[text] for text in rows]
        last_row = torch.arange(episode.length)[:, None] == episode.length - 1
        content["dones"] = last_row
        if episode.terminated is not None or episode.truncated is not None:
            content["terminations"] = last_row & bool(episode.terminated)
            content["truncations"] = last_row & bool(episode.truncated)
        return content

    def close(self) -> None:
        if not self.is_complete or (self.path / _METADATA).exists():
            return
        episodes = [one for one in self.episodes if one.id in self.written]
        size = len(episodes)
        total = sum(one.length for one in episodes)
        about: dict[str, Any] = {
            "trajectory_format": "pt",
            "size": size,
            "total_samples": total,
            "trajectory_counter": size,
            "seed": 0,
        }
        absent = {str(self._numbers[one.id]): self._fields.absent(one, _read_name) for one in episodes}
        if noted := {number: names for number, names in absent.items() if names}:
            about[ABSENT] = noted
        self.note_open()
        self._write(_INDEX, self._index(episodes))
        self._write(_METADATA, about)
        self.note_finish()


def _read_name(name: str) -> str:
    """Return the name under which a field is read."""
    is_own = name.partition("/")[0] == "observation" or name in _ACTIONS_AND_REWARDS
    return name if is_own else f"forward_inputs/{name}"
