"""Writing RLinf's trajectory checkpoints: a `.pt` file for each episode, `trajectory_index.json` and `metadata.json`.

One rule: an episode is a block `[T, 1, ...]`; its file is renamed when it is complete, and the index names files that
are there.
"""

from __future__ import annotations

import json
import os
from typing import Any

import numpy as np
import torch

from storage.core.durable import sync_path
from storage.errors import UsageError

from ..writer import EpisodeToWrite, ForeignWriter
from .robomimic import finals_of

_WEIGHTS = "recorded"


class Writer(ForeignWriter):
    """A folder of trajectories; the order of the episodes is that of their ids 0, 1, ..."""

    format = "rlinf"

    def begin(self) -> set[str]:
        self._numbers = {episode.id: number for number, episode in enumerate(self.episodes)}
        if (self.path / "trajectory_index.json").exists():
            raise UsageError("write", repr(str(self.path)), "a new folder", "a complete set", "Choose another one")
        self.path.mkdir(parents=True, exist_ok=True)
        for left in self.path.glob(".tmp_*"):
            left.unlink()
        return {name for name, number in self._numbers.items() if (self.path / self._file_name(number)).exists()}

    def _file_name(self, number: int) -> str:
        return f"trajectory_{number}_{_WEIGHTS}.pt"

    def add(self, episode: EpisodeToWrite) -> None:
        number, content = self._numbers[episode.id], self._content(episode)
        temporary = self.path / f".tmp_{number}.pt"
        torch.save(content, temporary)
        os.replace(temporary, self.path / self._file_name(number))
        self.written.add(episode.id)
        if episode.texts or episode.task or episode.metadata:
            self.changed("texts and metadata of episodes are left out", episode)
        if episode.terminated is None and episode.truncated is None:
            self.changed("the end, which is unknown, is only in `dones`", episode)

    def _content(self, episode: EpisodeToWrite) -> dict[str, Any]:
        content: dict[str, Any] = {"max_episode_length": episode.length, "model_weights_id": _WEIGHTS}
        finals = finals_of(episode)
        for name, field in episode.schema.items():
            head, _, rest = name.partition("/")
            values = torch.from_numpy(np.array(episode.read(name)))
            values = values.to(field.torch_dtype)
            if head == "observation":
                content.setdefault("curr_obs", {})[rest or "states"] = values[:, None]
                if name in finals:
                    last = torch.from_numpy(np.array(finals[name])).to(values.dtype)[None]
                    content.setdefault("next_obs", {})[rest or "states"] = torch.cat([values[1:], last])[:, None]
            elif name in ("action", "reward"):
                content[f"{name}s"] = values[:, None]
            else:
                content.setdefault("forward_inputs", {})[name] = values[:, None]
        last_row = torch.arange(episode.length)[:, None] == episode.length - 1
        content["dones"] = last_row
        if episode.terminated is not None or episode.truncated is not None:
            content["terminations"] = last_row & bool(episode.terminated)
            content["truncations"] = last_row & bool(episode.truncated)
        return content

    def close(self) -> None:
        if not self.is_complete:
            return
        episodes = {self._numbers[one.id]: one for one in self.episodes if one.id in self.written}
        index = {
            str(number): {
                "num_samples": episode.length,
                "trajectory_id": number,
                "max_episode_length": episode.length,
                "shape": [episode.length, 1],
                "model_weights_id": _WEIGHTS,
            }
            for number, episode in episodes.items()
        }
        total = sum(episode.length for episode in episodes.values())
        about = {
            "trajectory_format": "pt",
            "size": len(index),
            "total_samples": total,
            "trajectory_counter": len(index),
        }
        tables = {
            "metadata.json": {**about, "seed": 0},
            "trajectory_index.json": {"trajectory_index": index, "trajectory_id_list": list(episodes)},
        }
        for name, content in tables.items():
            temporary = self.path / f".tmp_{name}"
            temporary.write_text(json.dumps(content, indent=1), "utf-8")
            os.replace(temporary, self.path / name)
        sync_path(self.path)
