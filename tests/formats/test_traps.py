"""What no file says and every importer gets wrong: actions that command nothing, dummy steps, mixed control modes."""

from __future__ import annotations

import json
from pathlib import Path

import h5py
import numpy as np
import pytest

import rollout_data
from storage.errors import RolloutDataWarning
from tests.formats.folders import NaiveFolder, write_metadata
from tests.formats.hdf5_files import robomimic
from tests.formats.lerobot_sets import LeRobotSet, lists
from tests.formats.values import action, state


@pytest.mark.parametrize(
    ("shift", "said"), [(0, "those of the same step"), (1, "those of the next step"), (None, "the same in all steps")]
)
@pytest.mark.parametrize("version", ["v3.0", "v2.1"])
def test_actions_that_are_copies_are_reported(tmp_path: Path, version: str, shift: int | None, said: str) -> None:
    made = LeRobotSet(tmp_path / "x", [1, 4], version)
    for number, length in enumerate(made.lengths):
        rows = state(50 + number, length + 1, 2)[shift : length + shift] if shift is not None else np.ones((length, 2))
        column = made.tables[number].schema.get_field_index("observation.state")
        table = made.tables[number].set_column(column, "observation.state", lists(state(50 + number, length, 2)))
        made.tables[number] = table.set_column(column + 1, "action", lists(rows.astype("float32")))
    made.info["features"]["observation.state"]["shape"] = [2]
    (problem,) = rollout_data.open(made.write()).problems
    assert said in str(problem)


def d4rl(path: Path, has_dummy_step: bool) -> Path:
    """Two episodes of three steps; a dummy step between them begins with the observation after the first."""
    parts = [state(50, 4), state(51, 4)]
    rows = np.concatenate([parts[0][: 3 + has_dummy_step], parts[1][:3]])
    with h5py.File(path, "w") as file:
        file["observations"], file["actions"] = rows, action(50, len(rows))
        following = [parts[0][1:], *([parts[1][:1]] if has_dummy_step else []), parts[1][1:]]
        file["next_observations"] = np.concatenate(following)
        file["terminals"] = np.arange(len(rows)) == 2
        file["timeouts"] = np.arange(len(rows)) == len(rows) - 1
    return path


def test_a_dummy_step_after_an_end_is_reported(tmp_path: Path) -> None:
    assert not rollout_data.open(d4rl(tmp_path / "a.hdf5", has_dummy_step=False)).problems
    (problem,) = rollout_data.open(d4rl(tmp_path / "b.hdf5", has_dummy_step=True)).problems
    assert "the one of the next row, 1 times" in str(problem) and "autoreset" in str(problem)


def controlled(path: Path, kind: str) -> Path:
    robomimic(path, next_obs=False)
    settings = {"env_name": "Lift", "type": 1, "env_kwargs": {"controller_configs": {"type": kind}}}
    with h5py.File(path, "r+") as file:
        file["data"].attrs["env_args"] = json.dumps(settings)
    return path


def test_sources_of_different_control_modes_do_not_mix_silently(tmp_path: Path) -> None:
    paths = [controlled(tmp_path / f"{kind}.hdf5", kind) for kind in ("OSC_POSE", "JOINT_POSITION")]
    with pytest.warns(RolloutDataWarning, match="one control mode, got JOINT_POSITION, OSC_POSE"):
        rollout_data.WindowDataset(paths, length=1)
    datasets = [rollout_data.WindowDataset(path, length=1) for path in paths]
    with pytest.warns(RolloutDataWarning, match="one control mode, got JOINT_POSITION, OSC_POSE"):
        rollout_data.WindowMixture(datasets)


def test_labels_of_a_teacher_are_not_taken_for_executed_actions(folder: NaiveFolder) -> None:
    folder.chunk(0, 0, 4, done=True)
    write_metadata(folder, training_policy_logdir="runs/3")
    with pytest.warns(RolloutDataWarning, match="expected those executed, got a teacher's"):
        rollout_data.open(folder.data_dir)
