"""Readers and writers that projects write without this library.

They are correct, and not slowed down on purpose. Whole runs are copied where that is easy. A file
stays in memory while an environment plays it.
"""

from __future__ import annotations

import pickle
from pathlib import Path

import h5py
import numpy as np
import torch

from . import peers
from .data import FOLDER_NAMES, Rollout


class FolderReader:
    """Stream `trajectory_*/traj_<start>_<stop>.pickle` folders: one open chunk per environment."""

    def __init__(self, folder: Path, num_envs: int, first_frames: np.ndarray) -> None:
        self.trajectories = sorted(
            path for path in folder.iterdir() if path.name.startswith("trajectory_")
        )
        self.num_envs = num_envs
        self.next_trajectory = 0
        self.chunks: list[dict[str, np.ndarray]] = [{} for _ in range(num_envs)]
        self.files: list[list[Path]] = [[] for _ in range(num_envs)]
        self.rows = [0] * num_envs
        for env in range(num_envs):
            self._next_trajectory(env)
            while first_frames[env] >= len(self.chunks[env]["dones"]):
                first_frames[env] -= len(self.chunks[env]["dones"])
                self._next_chunk(env)
            self.rows[env] = int(first_frames[env])
        self.names = list(self.chunks[0])

    def _next_trajectory(self, env: int) -> None:
        trajectory = self.trajectories[self.next_trajectory % len(self.trajectories)]
        self.next_trajectory += 1
        self.files[env] = sorted(trajectory.glob("traj_*.pickle"), reverse=True)
        self._next_chunk(env)

    def _next_chunk(self, env: int) -> None:
        with open(self.files[env].pop(), "rb") as file:
            self.chunks[env] = pickle.load(file)
        self.rows[env] = 0

    def batch(self, num_steps: int) -> dict[str, torch.Tensor]:
        """Fill `[T + 1, N, ...]` columns. The last row is the next observation of the last step."""
        like = self.chunks[0]
        out = {
            name: np.empty((num_steps + 1, self.num_envs, *like[name].shape[1:]), like[name].dtype)
            for name in self.names
        }
        for env in range(self.num_envs):
            time = 0
            while time <= num_steps:
                chunk, row = self.chunks[env], self.rows[env]
                count = min(num_steps + 1 - time, len(chunk["dones"]) - row)
                for name in self.names:
                    out[name][time : time + count, env] = chunk[name][row : row + count]
                time += count
                self.rows[env] += count
                if self.rows[env] == len(chunk["dones"]):
                    self._next_chunk(env) if self.files[env] else self._next_trajectory(env)
            self.rows[env] = max(0, self.rows[env] - 1)
        return {name: torch.from_numpy(column) for name, column in out.items()}


def write_pickles(folder: Path, rollout: Rollout) -> None:
    """Write one pickle per environment."""
    for env in range(rollout["done"].shape[1]):
        with open(folder / f"traj_{env:06d}.pickle", "wb") as file:
            columns = {FOLDER_NAMES[name]: value[:, env].numpy() for name, value in rollout.items()}
            pickle.dump(columns, file, protocol=pickle.HIGHEST_PROTOCOL)


def write_groups(folder: Path, rollout: Rollout) -> None:
    """Write one HDF5 group per environment into one file."""
    with h5py.File(folder / "data.hdf5", "w") as file:
        for env in range(rollout["done"].shape[1]):
            group = file.create_group(f"data/demo_{env}")
            for name, value in rollout.items():
                group.create_dataset(name, data=value[:, env].numpy())


def write_datasets(folder: Path, rollout: Rollout) -> None:
    """Write one HDF5 dataset per field, `[T, N, ...]`, into one file."""
    with h5py.File(folder / "data.hdf5", "w") as file:
        for name, value in rollout.items():
            file.create_dataset(name, data=value.numpy())


def append_datasets(folder: Path, rollout: Rollout) -> None:
    """Append step by step to one HDF5 dataset per field.

    A chunk has one step of all environments.
    """
    with h5py.File(folder / "data.hdf5", "w") as file:
        datasets = {}
        for name, value in rollout.items():
            shape = tuple(value.shape[1:])
            datasets[name] = file.create_dataset(
                name,
                (0, *shape),
                value[0].numpy().dtype,
                maxshape=(None, *shape),
                chunks=(1, *shape),
            )
        for step in range(len(rollout["done"])):
            for name, dataset in datasets.items():
                dataset.resize(step + 1, axis=0)
                dataset[step] = rollout[name][step].numpy()


def write_torch(folder: Path, rollout: Rollout) -> None:
    """Write the rollout as one file of `torch.save`."""
    torch.save(rollout, folder / "rollout.pt")


def write_tensordict(folder: Path, rollout: Rollout) -> None:
    """Write the rollout as memory maps of the `tensordict` package."""
    peers.load("tensordict").TensorDict(rollout, batch_size=rollout["done"].shape).memmap(
        folder / "tensordict"
    )
