"""The readers of D4RL, humenv and BFM-Zero: ends of episodes.

No episode has rows of another episode.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import rollout_data
from storage import DictBuffer, load_buffer
from storage.errors import (
    CorruptFileError,
    DataFileError,
    ForeignFileError,
    UnsafeFileError,
    UsageError,
)
from tests.formats.cases import ROOT
from tests.formats.hdf5_files import edited, replace, values

#: Steps and kind of end of each episode; the last one is unfinished.
EPISODES = [(3, "terminals"), (1, "timeouts"), (4, "timeouts"), (2, "")]
STOPS = np.cumsum([length for length, _ in EPISODES])


def flat(path: Path, timeouts: bool = True, nexts: bool = False, wide: bool = False) -> Path:
    """Write `EPISODES` in the layout of D4RL. `wide` adds a second axis to rewards and flags."""
    rows = int(STOPS[-1])
    flags = {name: np.zeros(rows, bool) for name in ("terminals", "timeouts")}
    for (_, end), stop in zip(EPISODES, STOPS, strict=True):
        if end:
            flags[end][stop - 1] = True
    with h5py.File(path, "w") as file:
        file["observations"] = np.concatenate(
            [values(number, length) for number, (length, _) in enumerate(EPISODES)]
        )
        if nexts:
            pieces = [
                values(number, length, first=1) for number, (length, _) in enumerate(EPISODES)
            ]
            file["next_observations"] = np.concatenate(pieces)
        file["actions"] = np.arange(rows * 2, dtype="f4").reshape(rows, 2)
        column = (slice(None), None) if wide else slice(None)
        file["rewards"] = np.arange(rows, dtype="f4")[column]
        file["terminals"] = flags["terminals"][column]
        if timeouts:
            file["timeouts"] = flags["timeouts"][column]
        file["infos/qpos"] = values(0, rows, 2)
        file["metadata/algorithm"], file["metadata/seed"] = np.bytes_(b"sac"), 7
    return path


def check_flat(recording: rollout_data.Recording, has_final: bool = False) -> None:
    assert [len(episode) for episode in recording] == [length for length, _ in EPISODES]
    for number, (episode, (length, end)) in enumerate(zip(recording, EPISODES, strict=True)):
        np.testing.assert_array_equal(episode.observation, values(number, length))
        np.testing.assert_array_equal(
            episode.reward, np.arange(STOPS[number] - length, STOPS[number])
        )
        assert (episode.terminated, episode.truncated) == (end == "terminals", end == "timeouts")
        final = values(number, 1, first=length)[0] if has_final else None
        np.testing.assert_array_equal(episode.final_observation, final)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("nexts", [False, True])
def test_flags_cut_episodes_and_only_next_observations_are_final_observations(
    tmp_path: Path, nexts: bool, wide: bool
) -> None:
    recording = rollout_data.open(flat(tmp_path / "x.hdf5", nexts=nexts, wide=wide))
    assert (recording.format, recording.problems) == ("d4rl", [])
    assert (recording.metadata["algorithm"], recording.metadata["seed"]) == ("sac", 7)
    check_flat(recording, has_final=nexts)
    np.testing.assert_array_equal(recording[2]["infos/qpos"], values(0, 10, 2)[4:8])


def test_files_without_timeouts_require_the_length_of_episodes(tmp_path: Path) -> None:
    path = flat(tmp_path / "x.hdf5", timeouts=False)
    with pytest.raises(UsageError, match="max_episode_steps"):
        rollout_data.open(path)
    recording = rollout_data.open(path, max_episode_steps=3)
    assert [len(episode) for episode in recording] == [3, 3, 3, 1]
    assert [episode.terminated for episode in recording] == [True, False, False, False]
    assert [episode.truncated for episode in recording] == [False, True, True, False]
    np.testing.assert_array_equal(recording[3].reward, [9])


def test_terminals_that_mark_goals_end_no_episode_on_request(tmp_path: Path) -> None:
    recording = rollout_data.open(flat(tmp_path / "x.hdf5"), terminals_end=False)
    assert [len(episode) for episode in recording] == [4, 4, 2]
    assert [episode.terminated for episode in recording] == [None] * 3
    np.testing.assert_array_equal(recording[0]["terminals"], [False, False, True, False])


@pytest.mark.parametrize("is_joined", [False, True])
def test_groups_of_a_chunked_set_are_read_one_after_the_other(
    tmp_path: Path, is_joined: bool
) -> None:
    flat(tmp_path / "whole.hdf5")
    with h5py.File(tmp_path / "whole.hdf5") as whole, h5py.File(tmp_path / "x.hdf5", "w") as file:
        names = ["observations", "actions", "rewards", "terminals", "timeouts", "infos/qpos"]
        for part, rows in enumerate(np.array_split(np.arange(10), 11)):  # the last part has no row
            for name in names:
                file[f"virtual/{part}/{name}"] = (
                    whole[name][list(rows)] if len(rows) else whole[name][:0]
                )
        for name in names if is_joined else ():
            layout = h5py.VirtualLayout(whole[name].shape, whole[name].dtype)
            file.create_virtual_dataset(name, layout)
    recording = rollout_data.open(tmp_path / "x.hdf5")
    check_flat(recording)
    np.testing.assert_array_equal(recording[2]["infos/qpos"], values(0, 10, 2)[4:8])


def test_more_episodes_than_fit_in_memory_are_refused(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.hdf5", "w") as file:
        ones = np.ones(((1 << 20) + 1, 1), "u1")
        for name in ("observations", "actions", "rewards", "terminals", "timeouts"):
            file.create_dataset(name, data=ones, compression="gzip")
    with pytest.raises(CorruptFileError, match="1048577 episodes, expected at most 1048576"):
        rollout_data.open(tmp_path / "x.hdf5")


def test_a_file_that_matches_several_formats_needs_the_name_of_its_format(tmp_path: Path) -> None:
    path = edited(
        flat(tmp_path / "x.hdf5"),
        lambda file: file.create_dataset("traj_0/actions", data=[[1], [2]]),
    )
    with pytest.raises(
        ForeignFileError,
        match=r"matches maniskill and d4rl\. Name one of them: open\(path, format=",
    ):
        rollout_data.open(path)
    assert (
        len(rollout_data.open(path, "d4rl")) == len(EPISODES)
        and len(rollout_data.open(path, "maniskill")) == 1
    )


def test_the_error_of_a_folder_of_recordings_lists_its_content(tmp_path: Path) -> None:
    for name in ("walk-v10", "walk-v9"):
        shutil.copytree(ROOT / "minari" / "cartpole-hdf5-v0", tmp_path / name)
    with pytest.raises(
        UsageError,
        match=r"is a folder with 2 recordings \('walk-v9', 'walk-v10'\)\. Name one of them",
    ):
        rollout_data.open(tmp_path)


def test_real_files_of_d4rl_are_cut_at_their_flags() -> None:
    recording = rollout_data.open(ROOT / "d4rl" / "hopper_scripted.hdf5")
    assert [len(episode) for episode in recording] == [24, 24, 24, 24, 12, 12]
    recording = rollout_data.open(ROOT / "d4rl" / "hopper_no_timeouts.hdf5", max_episode_steps=24)
    assert {len(episode) for episode in recording} == {24}


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("actions", np.zeros((9, 2))),
        ("rewards", np.zeros(11)),
        ("terminals", np.zeros((10, 2))),
        ("observations", 3.0),
    ],
)
def test_columns_of_different_lengths_raise(tmp_path: Path, name: str, array: Any) -> None:
    path = edited(flat(tmp_path / "x.hdf5"), lambda file: replace(file, name, array))
    with pytest.raises(CorruptFileError):
        rollout_data.open(path)


def test_links_and_empty_files_are_refused(tmp_path: Path) -> None:
    path = edited(
        flat(tmp_path / "x.hdf5"), lambda file: file.update(more=h5py.SoftLink("/actions"))
    )
    with pytest.raises(UnsafeFileError):
        rollout_data.open(path)
    with h5py.File(tmp_path / "y.hdf5", "w") as file:
        for name in ("observations", "actions", "rewards", "terminals", "timeouts"):
            file[name] = np.zeros((0, 1))
    with pytest.raises(CorruptFileError, match="has no steps"):
        rollout_data.open(tmp_path / "y.hdf5")


def ring(
    folder: Path,
    at: int,
    is_full: bool,
    flags: str = "",
    capacity: int = 10,
    has_unwritten: bool = True,
) -> Path:
    """Write a ring of the steps 0, 1, 2 ..., the newest before `at`. Every fourth step ends an episode.

    The file has all rows of a ring that is not full, or with `has_unwritten=False` the written ones.
    """
    folder.mkdir()
    newest = at + capacity * is_full  # steps that were ever written
    steps = (
        np.array([place if place < at else place - capacity for place in range(capacity)])
        + newest
        - at
    )
    steps[steps < 0] = 99
    if not has_unwritten:
        steps = steps[steps < 99]
    with h5py.File(folder / "buffer.hdf5", "w") as file:
        file["observation-state"] = np.stack([steps, steps], 1).astype("f4")
        file["next-observation-state"] = np.stack([steps, steps], 1).astype("f4") + 1
        file["action"], file["reward"] = steps[:, None].astype("f4"), steps[:, None].astype("f4")
        file[f"{flags}terminated"], file[f"{flags}truncated"] = (
            steps[:, None] % 8 == 3,
            steps[:, None] % 8 == 7,
        )
    about = {
        "capacity": capacity,
        "device": "cpu",
        "nested_key_separator": "-",
        "_idx": at,
        "_is_full": is_full,
    }
    (folder / "config.json").write_text(json.dumps({**about, "__target__": "os.system"}))
    return folder


#: Position of the next row, whether the ring is full, and the steps of each episode.
RINGS = [
    (6, False, [[0, 1, 2, 3], [4, 5]]),
    (10, False, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]),
    (6, True, [[6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]),
    (0, True, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]),
    (10, True, [[10, 11], [12, 13, 14, 15], [16, 17, 18, 19]]),
]


@pytest.mark.parametrize("has_unwritten", [True, False])
@pytest.mark.parametrize(("at", "is_full", "expected"), RINGS)
def test_a_ring_is_loaded_with_the_rows_that_are_read(
    tmp_path: Path, at: int, is_full: bool, expected: list[list[int]], has_unwritten: bool
) -> None:
    folder = ring(tmp_path / "x", at, is_full, has_unwritten=has_unwritten)
    about = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**about, "__target__": "x.DictBuffer"}))
    buffer = load_buffer(folder)
    assert isinstance(buffer, DictBuffer)
    rows = buffer.get_full_buffer()["observation"]["state"]
    assert sorted(rows[:, 0].tolist()) == [step for steps in expected for step in steps]


@pytest.mark.parametrize("has_unwritten", [True, False])
@pytest.mark.parametrize(("at", "is_full", "expected"), RINGS)
@pytest.mark.parametrize("flags", ["", "next-"])
def test_a_ring_is_read_in_the_order_of_writing(
    tmp_path: Path,
    at: int,
    is_full: bool,
    expected: list[list[int]],
    flags: str,
    has_unwritten: bool,
) -> None:
    folder = ring(tmp_path / "x", at, is_full, flags, has_unwritten=has_unwritten)
    recording = rollout_data.open(folder)
    assert recording.format == "bfm_zero"
    assert recording.problems == []
    # The run has no resets
    assert all(
        "start with the final observation of the previous" in str(remark)
        for remark in recording.advice
    )
    assert [episode.reward.tolist() for episode in recording] == expected
    for episode, steps in zip(recording, expected, strict=True):
        np.testing.assert_array_equal(episode.observation["state"][:, 0], steps)
        np.testing.assert_array_equal(episode.final_observation["state"], [steps[-1] + 1] * 2)
        assert (episode.terminated, episode.truncated) == (steps[-1] % 8 == 3, steps[-1] % 8 == 7)


@pytest.mark.parametrize(
    "change", [{"_idx": 11}, {"_idx": "1"}, {"_is_full": None}, {"capacity": 12}, {"_idx": 0}]
)
def test_a_ring_with_a_wrong_cursor_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    folder = ring(tmp_path / "x", 6, False)
    about = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**about, **change}))
    with pytest.raises(CorruptFileError):
        rollout_data.open(folder)


def test_motions_of_a_list_are_named_by_their_files(tmp_path: Path) -> None:
    source = ROOT.parent / "humenv"
    recording = rollout_data.open(source / "motions.txt")
    assert (recording.format, recording.problems) == ("humenv", [])
    assert [episode.id for episode in recording] == [
        "0-CMU_01_01_poses/ep_0",
        "0-CMU_02_01_poses/ep_0",
    ]
    assert [len(episode) for episode in recording] == [9, 5]
    assert rollout_data.open(source).ids == recording.ids  # the folder by itself
    for episode in recording:
        assert (
            episode.action is None and episode.reward is None and episode.final_observation is None
        )
        assert (episode.terminated, episode.truncated) == (False, True)
        assert {"qpos", "qvel", "motion_id"} <= set(episode.keys())
    alone = rollout_data.open(source / "0-CMU_02_01_poses.hdf5")
    np.testing.assert_array_equal(alone[0].observation, recording[1].observation)


def test_a_list_of_files_outside_of_its_folder_is_refused(tmp_path: Path) -> None:
    shutil.copytree(ROOT.parent / "humenv", tmp_path / "x")
    shutil.copy(tmp_path / "x" / "0-CMU_01_01_poses.hdf5", tmp_path)
    for line in ("../0-CMU_01_01_poses.hdf5", str(tmp_path / "0-CMU_01_01_poses.hdf5")):
        (tmp_path / "x" / "motions.txt").write_text(line + "\n")
        with pytest.raises(DataFileError):
            rollout_data.open(tmp_path / "x" / "motions.txt")
        with pytest.raises(UnsafeFileError):
            rollout_data.open(tmp_path / "x" / "motions.txt", format="humenv")


def test_episodes_of_humenv_are_numbered_and_checked(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.hdf5", "w") as file:
        file.attrs["num_episodes"] = 3
        for number, length in ((2, 3), (9, 1), (10, 4)):
            item = file.create_group(f"ep_{number}")
            item.attrs["length"] = length + (number == 9)
            item["observation"], item["reward"] = values(number, length), np.ones((length, 1))
            item["terminated"], item["truncated"] = (
                np.zeros((length, 1), bool),
                np.zeros((length, 1), bool),
            )
    recording = rollout_data.open(tmp_path / "x.hdf5")
    assert [episode.id for episode in recording] == ["ep_2", "ep_10"] and "'ep_9'" in str(
        recording.problems[0]
    )
    assert recording[1].reward.shape == (4,) and (
        recording[1].terminated,
        recording[1].truncated,
    ) == (False, False)
