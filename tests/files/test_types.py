"""Types of batches in code of users: mypy finds a misspelt field."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mypy")

USER_CODE = """
import rollout_data
from rollout_data import RolloutDataset, Transition, WindowDataset, loader
from storage import ActionLabelRollout, MiniBatch, RolloutStorage, SarsaRolloutStorage

dataset = RolloutDataset("walk", num_envs=4)
for batch in dataset:
    batch.observaton  # wrong
    right: Transition = batch
for batch in loader(dataset):
    batch.rewards  # wrong
observation, action, reward, done, info = dataset.get_transition_batch()
transition, infos = dataset.get_transition_batch()  # wrong
first, last = dataset.get_frame_range("traj_0_200.pickle")
first.start  # wrong
dataset.read_dataset_directory().wait  # wrong
dataset.get_batch(3).next_obs  # wrong
storage = RolloutStorage(4, 6, obs_shape=(3,), critic_obs_shape=None, actions_shape=(2,))
for rows in storage.mini_batch_generator(2, 1):
    rows.advantage  # wrong
    also: MiniBatch = rows
    print(rows.advantages, batch.observation, batch.done.any())
sarsa, labelled = SarsaRolloutStorage(4, 6, (3,), None, (2,)), ActionLabelRollout(4, 6, (3,), None, (2,))
for pairs in sarsa.recurrent_mini_batch_generator(2, 1):
    pairs.next_ob  # wrong
    print(pairs.next_obs, pairs.next_critic_obs, pairs.next_valid, pairs.masks)
for labels in labelled.mini_batch_generator(2, 1):
    labels.action_label  # wrong
    print(labels.action_labels, labels.returns)
for episode in rollout_data.open("walk").filter(success=True):
    episode.rewards  # wrong
    print(episode.reward)
WindowDataset("walk", lenght=3)  # wrong
"""


def test_a_misspelt_field_is_an_error_of_mypy(tmp_path):
    path = tmp_path / "user.py"
    path.write_text(USER_CODE)
    # Other packages take a minute, and what the library itself contains is checked by `make lint`.
    skipped = "".join(
        f"[mypy-{name}.*]\nfollow_imports = skip\n" for name in ("torch", "numpy", "h5py", "tqdm")
    )
    (tmp_path / "mypy.ini").write_text(
        f"[mypy]\nfollow_imports = silent\nignore_missing_imports = True\n{skipped}"
    )
    options = [
        "--config-file",
        str(tmp_path / "mypy.ini"),
        "--cache-dir",
        str(tmp_path),
        "--no-error-summary",
    ]
    command = [sys.executable, "-m", "mypy", *options, str(path)]
    actual = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    wrong = [number for number, line in enumerate(USER_CODE.splitlines(), 1) if "# wrong" in line]
    assert [
        int(line.split(":")[1]) for line in actual.stdout.splitlines() if "error:" in line
    ] == wrong, actual.stdout
