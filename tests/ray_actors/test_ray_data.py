"""Recorded trajectories through Ray Data: the written recording equals the source, in every field,
each frame once.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("ray", reason="ray is not installed: pip install 'rollout-data[ray]'")

from rollout_data import RolloutWriter, WindowDataset
from rollout_data.ray import read_rollouts, write_rollouts
from storage.core.fields import flatten
from storage.errors import UsageError

NUM_STEPS, NUM_ENVS = 60, 4


def record(folder: Path) -> None:
    rng = np.random.default_rng(0)
    with RolloutWriter(folder, NUM_ENVS) as writer:
        for step in range(NUM_STEPS):
            terminated, truncated = rng.random((2, NUM_ENVS)) < 0.08
            final = {
                "state": np.full((NUM_ENVS, 3), -step, np.float32),
                "rgb": np.zeros((NUM_ENVS, 2, 2), np.uint8),
            }
            writer.add(
                observation={
                    "state": rng.normal(size=(NUM_ENVS, 3)).astype(np.float32),
                    "rgb": rng.integers(0, 255, (NUM_ENVS, 2, 2), dtype=np.uint8),
                },
                privileged_observation=rng.normal(size=(NUM_ENVS, 2)),
                action=rng.integers(0, 9, NUM_ENVS),
                reward=rng.normal(size=(NUM_ENVS, 2)).astype(np.float32),
                terminated=terminated,
                truncated=truncated | (step == NUM_STEPS - 1),
                final_observation=final,
                number=np.arange(NUM_ENVS) + step * NUM_ENVS,
            )


def content(folder: Path) -> dict[str, torch.Tensor]:
    """Return all frames with their next frames, in the order of their numbers."""
    windows = WindowDataset(folder, next_observations=True)
    flat = flatten(dict(windows.__getitems__(range(len(windows)))))
    order = flat["number"].flatten().argsort()
    return {name: leaf[order, 0] for name, leaf in flat.items()}


def check_equal(found: Path, expected: Path) -> None:
    mine, theirs = content(found), content(expected)
    assert list(mine) == list(theirs)
    for name, leaf in theirs.items():
        assert mine[name].dtype == leaf.dtype and torch.equal(mine[name], leaf), name


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded")
    record(folder)
    return folder


def test_rollouts_read_and_written_by_ray_data_are_equal_in_every_field(
    cluster: Any, recorded: Path, tmp_path: Path
) -> None:
    dataset = read_rollouts(recorded, rows_per_task=60)
    write_rollouts(dataset, tmp_path / "again")
    check_equal(tmp_path / "again", recorded)
    assert sorted(path.suffix for path in (tmp_path / "again").iterdir())[-1] == ".json"
    # Several tasks wrote, and left nothing else
    assert len(list((tmp_path / "again").iterdir())) > 3


def test_a_killed_task_is_retried_and_writes_once(
    cluster: Any, recorded: Path, tmp_path: Path
) -> None:
    token = tmp_path / "killed"

    def kill_once(batch: dict[str, Any]) -> dict[str, Any]:
        if not token.exists():
            token.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return {**batch, "reward": batch["reward"] * 2}

    write_rollouts(
        read_rollouts(recorded, rows_per_task=60).map_batches(kill_once), tmp_path / "again"
    )
    assert token.exists()
    mine, theirs = content(tmp_path / "again"), content(recorded)
    assert torch.equal(mine["reward"], 2 * theirs["reward"]) and torch.equal(
        mine["done"], theirs["done"]
    )


def test_trajectories_divided_among_tasks_raise_until_they_are_sorted(
    cluster: Any, recorded: Path, tmp_path: Path
) -> None:
    shuffled = read_rollouts(recorded, rows_per_task=60).random_shuffle(seed=0)
    with pytest.raises(UsageError, match=r"a task has . of . frames"):
        write_rollouts(shuffled, tmp_path / "again")
    assert not list(tmp_path.rglob("*.h5"))
    write_rollouts(shuffled.sort("trajectory"), tmp_path / "again")
    check_equal(tmp_path / "again", recorded)
