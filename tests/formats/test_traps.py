"""Traps that no file states: actions that command nothing, dummy steps, mixed control modes."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import rollout_data
from rollout_data import RolloutWriter
from storage.errors import RolloutDataWarning
from tests.formats.folders import NaiveFolder, write_metadata
from tests.formats.hdf5_files import robomimic
from tests.formats.lerobot_sets import LeRobotSet, lists
from tests.formats.test_aloha_files import maniskill
from tests.formats.values import action, state


@pytest.mark.parametrize(
    ("shift", "text"),
    [(0, "of the same step"), (1, "of the next step"), (None, "'action' is the same in all")],
)
@pytest.mark.parametrize("version", ["v3.0", "v2.1"])
def test_actions_that_are_copies_are_reported(
    tmp_path: Path, version: str, shift: int | None, text: str
) -> None:
    made = LeRobotSet(tmp_path / "x", [1, 4], version)
    for number, length in enumerate(made.lengths):
        rows = (
            state(50 + number, length + 1, 2)[shift : length + shift]
            if shift is not None
            else np.ones((length, 2))
        )
        column = made.tables[number].schema.get_field_index("observation.state")
        table = made.tables[number].set_column(
            column, "observation.state", lists(state(50 + number, length, 2))
        )
        made.tables[number] = table.set_column(column + 1, "action", lists(rows.astype("float32")))
    made.info["features"]["observation.state"]["shape"] = [2]
    recording = rollout_data.open(made.write())
    (remark,) = recording.advice
    assert text in str(remark) and recording.problems == []


@pytest.mark.parametrize("shift", [0, 1])
def test_copied_actions_of_trajectory_folders_are_reported(folder: NaiveFolder, shift: int) -> None:
    rows = state(50, 5, 3).astype(np.float32)
    folder.chunk(0, 0, 4, done=True, observations=rows[:4], actions=rows[shift : 4 + shift])
    for take in (rollout_data.open, rollout_data.WindowDataset):
        with pytest.warns(RolloutDataWarning, match=f"of the {('same', 'next')[shift]} step"):
            opened = take(folder.data_dir)
        assert len(opened.advice) == 1 and opened.problems == []


def test_a_sound_trajectory_folder_with_constant_actions_has_advice_and_no_problem(
    folder: NaiveFolder,
) -> None:
    folder.chunk(
        0,
        0,
        4,
        done=True,
        observations=state(50, 4, 3).astype(np.float32),
        actions=np.ones((4, 2), "f4"),
    )
    with pytest.warns(RolloutDataWarning, match="the same in all 4 compared steps"):
        stream = rollout_data.RolloutDataset(folder.data_dir, 1, device="cpu")
        assert stream.problems == []
    assert ["'action' is the same in all" in str(remark) for remark in stream.advice] == [True]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RolloutDataWarning)
        recording = rollout_data.open(folder.data_dir)
        done = rollout_data.convert(recording, folder.data_dir.parent / "own", progress=False)
    for result in (recording, done):
        assert result.problems == [] and len(result.advice) == 1


def test_copied_actions_of_a_group_are_reported(tmp_path: Path) -> None:
    path = robomimic(tmp_path / "a.hdf5", lengths={1: 3}, next_obs=False)
    with h5py.File(path, "r+") as file:
        del file["data/demo_1/actions"]
        file["data/demo_1/actions/pose"] = file["data/demo_1/obs/low"][:]
        file["data/demo_1/actions/gripper"] = np.arange(3.0)[:, None]
        file["data"].attrs["env_args"] = json.dumps({"env_name": "Lift", "type": 2})
    assert "'action/pose' equals 'observation/low' of the same step" in str(
        rollout_data.open(path, "isaaclab").advice
    )


def d4rl(path: Path, has_dummy_step: bool) -> Path:
    """Return two episodes of three steps.

    A dummy step between them begins with the observation after the first episode.
    """
    parts = [state(50, 4), state(51, 4)]
    rows = np.concatenate([parts[0][: 3 + has_dummy_step], parts[1][:3]])
    with h5py.File(path, "w") as file:
        file["observations"], file["actions"] = rows, action(50, len(rows))
        following = [parts[0][1:], *([parts[1][:1]] if has_dummy_step else []), parts[1][1:]]
        file["next_observations"] = np.concatenate(following)
        file["terminals"] = np.arange(len(rows)) == 2
        file["timeouts"] = np.arange(len(rows)) == len(rows) - 1
    return path


def with_finals(path: Path, has_dummy_step: bool) -> Path:
    """Return the same two episodes, each with its final observation."""
    with h5py.File(path, "w") as file:
        for number, first in ((0, 0), (1, 1 - has_dummy_step)):
            rows = np.concatenate([state(50, 4)[3:], state(51, 4)]) if number else state(50, 4)
            demo, length = file.create_group(f"data/demo_{number}"), len(rows[first:]) - 1
            demo.attrs["num_samples"], demo["actions"] = length, action(50 + number, length)
            demo["obs/low"], demo["next_obs/low"] = rows[first:-1], rows[first + 1 :]
        file["data"].attrs["env_args"] = json.dumps(
            {"env_name": "Lift", "type": 1, "env_kwargs": {}}
        )
    return path


@pytest.mark.parametrize("write", [d4rl, with_finals])
def test_a_dummy_step_after_an_end_is_reported(
    tmp_path: Path, write: Callable[[Path, bool], Path]
) -> None:
    assert not rollout_data.open(write(tmp_path / "a.hdf5", False)).advice
    recording = rollout_data.open(write(tmp_path / "b.hdf5", True))
    (remark,) = recording.advice
    assert "1 episode of" in str(remark) and "autoreset" in str(remark)
    assert recording.problems == []


def controlled(path: Path, kind: Any) -> Path:
    robomimic(path, lengths={1: 3}, next_obs=False)
    settings = {"env_name": "Lift", "type": 1, "env_kwargs": {"controller_configs": kind}}
    with h5py.File(path, "r+") as file:
        file["data"].attrs["env_args"] = json.dumps(settings)
    return path


def parts(kind: str) -> dict[str, Any]:
    return {"type": "BASIC", "body_parts": {"right": {"type": kind, "input_type": "delta"}}}


def of_robomimic(folder: Path) -> list[Path]:
    return [
        controlled(folder / f"{kind}.hdf5", {"type": kind})
        for kind in ("JOINT_POSITION", "OSC_POSE")
    ]


def of_parts(folder: Path) -> list[Path]:
    return [
        controlled(folder / f"{kind}.hdf5", parts(kind)) for kind in ("JOINT_POSITION", "OSC_POSE")
    ]


def of_ours(folder: Path) -> list[Path]:
    for kind in ("JOINT_POSITION", "OSC_POSE"):
        with RolloutWriter(folder / kind, 1, metadata={"control_mode": kind}) as writer:
            writer.add(
                observation=np.zeros((1, 2)), action=np.ones((1, 1)), reward=[0.0], done=[True]
            )
    return [folder / "JOINT_POSITION", folder / "OSC_POSE"]


def of_folders(folder: Path) -> list[Path]:
    made = [NaiveFolder(folder / kind) for kind in ("JOINT_POSITION", "OSC_POSE")]
    for item in made:
        item.chunk(0, 0, 3, done=True)
        write_metadata(item, control_mode=item.data_dir.name)
    return [item.data_dir for item in made]


@pytest.mark.parametrize("write", [of_robomimic, of_parts, of_ours, of_folders])
def test_sources_of_different_control_modes_do_not_mix_silently(
    tmp_path: Path, write: Callable[[Path], list[Path]]
) -> None:
    paths = write(tmp_path)
    datasets = [rollout_data.WindowDataset(path, length=1) for path in paths]
    for mix in (
        lambda: rollout_data.WindowDataset(paths, length=1),
        lambda: rollout_data.RolloutDataset(
            [rollout_data.open(path) for path in paths], 1
        ).get_batch(),
        lambda: rollout_data.WindowMixture(datasets),
        lambda: rollout_data.WindowMixture(paths),
    ):
        with pytest.warns(
            RolloutDataWarning, match="different control modes: .*JOINT_POSITION.*, .*OSC_POSE"
        ):
            mix()


def test_episodes_of_different_control_modes_in_one_file_do_not_mix_silently(
    tmp_path: Path,
) -> None:
    path = maniskill(tmp_path / "x.h5")
    about = json.loads(path.with_suffix(".json").read_text())
    about["episodes"][0]["control_mode"] = "pd_joint_pos"
    path.with_suffix(".json").write_text(json.dumps(about))
    with pytest.warns(RolloutDataWarning, match="different control modes: pd_ee, pd_joint_pos"):
        rollout_data.WindowDataset(path)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RolloutDataWarning)
        rollout_data.WindowDataset(rollout_data.open(path)[1:])


def test_labels_of_a_teacher_are_not_taken_for_executed_actions(folder: NaiveFolder) -> None:
    folder.chunk(0, 0, 4, done=True)
    write_metadata(folder, training_policy_logdir="runs/3")
    with pytest.warns(RolloutDataWarning, match="actions are labels of a teacher"):
        rollout_data.open(folder.data_dir)
