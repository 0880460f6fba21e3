"""Saved stores of every class in format version 1, in the folder `tests/data/saves/v1`.

`python -m tests.saved_by_1 FOLDER` writes such a folder. The folder in the repository is never
written again, because every later release must load the files of this version.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from rollout_data import (
    RolloutDataset,
    RolloutWriter,
    TrajectoryReplayBuffer,
    WindowDataset,
    WindowLoader,
)
from storage import (
    AsyncCheckpointSaver,
    NaiveReplayBuffer,
    QueueRolloutStorage,
    RolloutStorage,
    SarsaRolloutStorage,
)
from tests.buffers.every_store import MAKERS
from tests.storage.rollouts import make_transition
from tests.trajectory_replay.recorded import trajectory

SAVES = Path(__file__).parent / "data" / "saves" / "v1"


def rich(kind: Any) -> Any:
    """Return a storage with grouped observations, hidden states and policy outputs.

    The policy is not Gaussian, so it has no mean and no standard deviation.
    """
    outputs = {"logits": (4,), "choice": ((1,), torch.int64)}
    # Version 1 stored integer observations as float32, unless a dtype was declared.
    shapes = {"state": (3,), "camera": {"rgb": ((2, 2), "float32")}}
    storage = kind(2, 2, shapes, (5,), (2,), policy_outputs=outputs, generator=0)
    for step in range(2):
        item = make_transition(step, 2)
        item.action_mean = item.action_sigma = None
        item.observations = {
            "state": torch.full((2, 3), step + 0.5),
            "camera": {"rgb": torch.full((2, 2, 2), step)},
        }
        if kind is SarsaRolloutStorage:
            item.next_observations, item.next_critic_observations = (
                item.observations,
                item.critic_observations + 1,
            )
        item.hidden_states = (
            torch.full((1, 2, 3), step + 0.25),
            torch.full((1, 2, 3), step + 0.75),
        )
        item.policy_outputs = {
            "logits": torch.full((2, 4), step + 0.125),
            "choice": torch.full((2, 1), step),
        }
        storage.add_transitions(item)
    storage.compute_returns(torch.ones(2, 1), 0.9, 0.8)
    return storage


def odd() -> Any:
    """Return a buffer of nested items with several dtypes, texts and Python objects."""
    store = NaiveReplayBuffer(4, generator=0)
    for number in range(3):
        leaves = {
            "half": torch.full((2,), number, dtype=torch.bfloat16),
            "flag": torch.tensor([True, False]),
        }
        store.append({"deep": leaves, "name": f"item {number}", "more": [number, None, 0.5]})
    return store


STORES = {
    **MAKERS,
    "rich": lambda: rich(RolloutStorage),
    "rich_queue": lambda: rich(QueueRolloutStorage),
    "rich_sarsa": lambda: rich(SarsaRolloutStorage),
    "odd": odd,
}


def state_of(value: Any) -> Any:
    """Convert the state of a store to plain Python values, which can be compared."""
    if isinstance(value, torch.Tensor):
        return [str(value.dtype), value.tolist()]
    if isinstance(value, dict):
        return {str(key): state_of(item) for key, item in value.items()}
    return [state_of(item) for item in value] if isinstance(value, (list, tuple)) else repr(value)


def replayed(folder: Path | None = None, **options: Any) -> TrajectoryReplayBuffer:
    saving = {} if folder is None else {"auto_save": True, "auto_save_path": folder}
    buffer = TrajectoryReplayBuffer(seed=3, sample_window_size=0, **saving, **options)
    for number in range(3):
        buffer.add(trajectory(number, num_steps=4, num_envs=2))
    return buffer


def recorded(folder: Path) -> None:
    with RolloutWriter(folder, 2, writer_name="one") as writer:
        for step in range(12):
            row = torch.full((2, 3), step) + torch.arange(2)[:, None] / 2
            writer.add(
                observation=row,
                action=row[:, :1],
                reward=row[:, 0],
                done=torch.full((2,), step % 4 == 3),
            )


def dataset_of(folder: Path) -> RolloutDataset:
    return RolloutDataset(folder, 2, seed=5, dataset_loops=0, device="cpu")


def loader_of(folder: Path) -> WindowLoader:
    return WindowLoader(WindowDataset(folder, 2), 3, seed=5)


def main(folder: Path) -> None:
    for name, make in STORES.items():
        store = make()
        store.save(folder / name)
        torch.save(store.state_dict(), folder / f"{name}.pt")
    for file_format in ("h5", "pt", "pkl"):
        made = replayed(trajectory_format=file_format, trusted=file_format == "pkl")
        made.save_checkpoint(folder / f"trajectories_{file_format}")
    replayed(folder / "trajectories_live").close()
    with AsyncCheckpointSaver() as saver:
        for name, options in {"plain": {}, "lz4": {"compress": True}}.items():
            saved = {"weights": torch.arange(6.0), "steps": [1, 2], "best": None}
            saver.save_async(saved, folder / f"checkpoint_{name}.pt", meta={"steps": 7}, **options)
    recorded(folder / "frames")
    dataset, loader = dataset_of(folder / "frames"), loader_of(folder / "frames")
    dataset.get_batch(3), next(iter(loader))
    states = {"dataset": dataset.state_dict(), "loader": loader.state_dict()}
    states["next"] = dataset.get_batch(3).observation.tolist()
    (folder / "states.json").write_text(json.dumps(states))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
