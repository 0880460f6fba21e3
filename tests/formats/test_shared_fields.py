"""All episodes of a target have the same fields.

The report of a conversion counts changed values.
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

import rollout_data
from rollout_data import RolloutWriter
from storage.errors import UsageError

LARGE = 2**53 + 1


def convert(source: Any, target: Path, name: str, **options: Any) -> Any:
    return rollout_data.convert(source, target, name, progress=False, **options)


def record(folder: Path, lengths: list[int], is_open: bool = False) -> Any:
    """Record two cameras under `images`; the last episode has no end with `is_open`, and no final observation."""

    def observed(episode: int, frame: int) -> dict[str, Any]:
        images = {
            name: np.full((1, 8, 8, 3), number + frame, np.uint8)
            for number, name in ((10, "front"), (90, "wrist"))
        }
        return {"state": np.full((1, 3), 100 * episode + frame, np.float32), "images": images}

    with RolloutWriter(folder, 1, durable=False) as writer:
        for episode, length in enumerate(lengths):
            for frame in range(length):
                is_end = frame == length - 1 and not (is_open and episode == len(lengths) - 1)
                final = {"final_observation": observed(episode, length)} if is_end else {}
                writer.add(
                    observation=observed(episode, frame),
                    action=np.full((1, 2), frame, np.float32),
                    reward=np.full(1, frame, np.float32),
                    terminated=[is_end],
                    **final,
                )
    return rollout_data.open(folder)


def test_each_camera_below_one_name_keeps_its_pictures_and_its_name_in_robomimic(tmp_path):
    source = record(tmp_path / "ours", [4, 3])
    changes = convert(source, tmp_path / "x.hdf5", "robomimic").changes
    assert changes["'observation/images/front' is called 'images_front'"] == source.ids
    with h5py.File(tmp_path / "x.hdf5") as file:
        assert sorted(file["data/demo_0/obs"]) == ["images_front", "images_wrist", "state"]
        assert file["data/demo_1/obs/images_wrist"][:, 0, 0, 0].tolist() == [90, 91, 92]
        assert file["data/demo_1/next_obs/images_wrist"][:, 0, 0, 0].tolist() == [91, 92, 93]
    back = rollout_data.open(tmp_path / "x.hdf5")
    assert "obs_names" not in back.metadata and not back.problems
    for mine, theirs in zip(source, back, strict=True):
        assert {*mine.observation} == {*theirs.observation} == {*theirs.final_observation}
        for name in mine.observation:
            assert np.array_equal(mine.observation[name], theirs.observation[name])
            assert np.array_equal(mine.final_observation[name], theirs.final_observation[name])
    convert(back, tmp_path / "again.hdf5", "robomimic")
    assert [episode.schema for episode in rollout_data.open(tmp_path / "again.hdf5")] == [
        item.schema for item in back
    ]


def test_nested_names_that_meet_a_flat_one_are_refused_by_robomimic(tmp_path):
    row = np.ones((1, 2), np.float32)
    with RolloutWriter(tmp_path / "ours", 1, durable=False) as writer:
        writer.add(
            observation={"images": {"front": row}, "images_front": 2 * row},
            action=row,
            terminated=[True],
        )
    with pytest.raises(UsageError, match="both become dataset 'obs/images_front'"):
        convert(tmp_path / "ours", tmp_path / "x.hdf5", "robomimic")
    assert not (tmp_path / "x.hdf5").exists()
    convert(tmp_path / "ours", tmp_path / "isaac.hdf5", "isaaclab")  # which reads nested groups
    assert {*rollout_data.open(tmp_path / "isaac.hdf5")[0].observation} == {
        "images/front",
        "images_front",
    }


@pytest.mark.parametrize(
    "text",
    [
        "[1]",
        '{"images_front": "../x"}',
        '{"images_front": "a//b"}',
        '{"images_front": "state"}',
        "{",
    ],
)
def test_names_that_do_not_fit_their_key_are_ignored(tmp_path, text):
    convert(record(tmp_path / "ours", [2]), tmp_path / "x.hdf5", "robomimic")
    with h5py.File(tmp_path / "x.hdf5", "r+") as file:
        file["data"].attrs["obs_names"] = text
    assert {*rollout_data.open(tmp_path / "x.hdf5")[0].observation} == {
        "images_front",
        "images_wrist",
        "state",
    }


def test_next_observations_are_left_out_of_robomimic_on_request(tmp_path):
    source = record(tmp_path / "ours", [4, 3])
    convert(source, tmp_path / "x.hdf5", "robomimic", next_obs=False)
    with h5py.File(tmp_path / "x.hdf5") as file:
        assert "obs" in file["data/demo_0"] and "next_obs" not in file["data/demo_0"]
    assert [len(episode) for episode in rollout_data.open(tmp_path / "x.hdf5")] == [4, 3]


def test_an_episode_without_an_end_has_every_dataset_in_robomimic(tmp_path):
    source = record(tmp_path / "ours", [4, 3], is_open=True)
    changes = convert(source, tmp_path / "x.hdf5", "robomimic").changes
    last = [source[1].id]
    assert changes["`dones` is 0 in all steps: the episode has no end"] == last
    assert (
        changes["the last observation is written again as `next_obs`: no later one is known"]
        == last
    )
    with h5py.File(tmp_path / "x.hdf5") as file:
        names: list[list[str]] = [[], []]
        for number in (0, 1):
            file[f"data/demo_{number}"].visit(names[number].append)
        assert names[0] == names[1] and {"dones", "rewards", "next_obs/images_wrist"} <= {*names[0]}
        assert (
            file["data/demo_0/dones"][:].tolist() == [0, 0, 0, 1]
            and not file["data/demo_1/dones"][:].any()
        )
        assert file["data/demo_1/next_obs/state"][:, 0].tolist() == [101, 102, 102]
    back = rollout_data.open(tmp_path / "x.hdf5")
    assert back[0].final_observation is not None and back[1].final_observation is None, (
        "it was not recorded"
    )


#: Format -> name of the target, what `changes` says of an unknown end, flags that stand for it in
#: the target.
END_FLAGS = {
    "robomimic": (
        "x.hdf5",
        "`dones` is 0 in all steps: the end of the episode is not known",
        ["dones"],
    ),
    "minari": (
        "lab/x-v0",
        "neither terminated nor truncated, as the end is not known",
        ["terminations", "truncations"],
    ),
    "d4rl": (
        "x.hdf5",
        "the end, which is unknown, is written as a timeout",
        ["terminals", "timeouts"],
    ),
    "lerobot": ("x", "'next.done' is False in episodes without this information", ["next.done"]),
    "trajectory-folders": (
        "x",
        "`dones` and `timeouts` are False in all steps: the end of the episode is not known",
        ["dones", "timeouts"],
    ),
}
ENDS = [(True, False), (None, None), (False, True), (None, None)]


def record_ends(folder: Path) -> Any:
    """Record four episodes with a final observation in RLinf's files.

    The second and fourth have no known end.
    """
    convert(record(folder / "ours", [3, 4, 2, 5]), folder / "source", "rlinf")
    for number, (terminated, truncated) in enumerate(ENDS):
        path = folder / "source" / f"trajectory_{number}_recorded.pt"
        block = torch.load(path, weights_only=True)
        flags = block.pop("terminations"), block.pop("truncations")
        if terminated is not None:
            block |= {
                "terminations": flags[0] & terminated,
                "truncations": block["dones"] & truncated,
            }
        torch.save(block, path)
    source = rollout_data.open(folder / "source")
    assert [(episode.terminated, episode.truncated) for episode in source] == ENDS
    return source


@pytest.mark.parametrize("name", END_FLAGS)
def test_flags_of_an_unknown_end_are_named_in_changes_and_in_the_target(tmp_path, name):
    source = record_ends(tmp_path)
    place, change, flags = END_FLAGS[name]
    options = {"fps": 10} if name == "lerobot" else {}
    unknown = [source.ids[1], source.ids[3]]
    assert convert(source, tmp_path / place, name, **options).changes[change] == unknown
    back = rollout_data.open(tmp_path / place)
    if name == "trajectory-folders":
        noted = json.loads((tmp_path / place / "metadata.json").read_text())["absent_fields"]
        assert (
            noted == {"trajectory_1": flags, "trajectory_3": flags}
            and "absent_fields" not in back.metadata
        )
    else:
        assert [item.metadata.get("absent_fields") for item in back] == [None, flags, None, flags]
    if name in ("minari", "d4rl", "trajectory-folders"):
        assert [(episode.terminated, episode.truncated) for episode in back] == ENDS
        assert [item.metadata.get("ends") for item in back] == [None] * 4
        part = convert(
            back.select([back.ids[1], back.ids[2]]), tmp_path / "part" / place, name
        ).changes
        assert part[change] == [back.ids[1]]
        again = rollout_data.open(tmp_path / "part" / place)
        assert [(episode.terminated, episode.truncated) for episode in again] == ENDS[1:3]
    elif name == "robomimic":
        reopened = rollout_data.open(tmp_path / place, terminated_from_dones=True)
        assert [episode.terminated for episode in reopened] == [True, None, False, None]


def test_an_open_end_that_d4rl_writes_as_a_timeout_is_named_and_stays_open(tmp_path):
    convert(record(tmp_path / "ours", [3, 4], is_open=True), tmp_path / "m", "minari")
    source = rollout_data.open(tmp_path / "m")
    assert [(episode.terminated, episode.truncated) for episode in source] == [
        (True, False),
        (False, False),
    ]
    changes = convert(source, tmp_path / "x.hdf5", "d4rl").changes
    assert changes["the open end is written as a timeout"] == source.ids[1:]
    with h5py.File(tmp_path / "x.hdf5") as file:
        assert file["timeouts"][:].tolist() == [False] * 5 + [True]
        assert json.loads(file["metadata/absent_fields"][()]) == {"1": ["timeouts"]}
    back = rollout_data.open(tmp_path / "x.hdf5")
    assert [(episode.terminated, episode.truncated) for episode in back] == [
        (True, False),
        (False, False),
    ]


def test_dones_are_in_every_demo_where_the_ends_are_not_known(tmp_path):
    source = record(tmp_path / "ours", [4, 3])
    convert(source, tmp_path / "le", "lerobot", fps=10)
    changes = convert(tmp_path / "le", tmp_path / "x.hdf5", "robomimic", missing_reward=0.0).changes
    assert changes["`dones` is 0 in all steps: the end of the episode is not known"] == ["0", "1"]
    with h5py.File(tmp_path / "x.hdf5") as file:
        for number, length in enumerate((4, 3)):
            assert file[f"data/demo_{number}/dones"][:].tolist() == [0] * length
            assert {"actions", "dones", "next_obs", "obs", "rewards"} <= {
                *file[f"data/demo_{number}"]
            }


def record_large(folder: Path, head: str) -> Any:
    """Record integers beside floats in the observation or the action: 2**53 + 1, 2**53 + 2, ..."""
    row = np.full((1, 2), 0.5, np.float32)
    with RolloutWriter(folder, 1, durable=False) as writer:
        for frame in range(8):
            mixed = {"a": row, "stamp": np.array([[LARGE + frame % 4]], np.int64)}
            record = {"observation": row, "action": row, head: mixed}
            writer.add(**record, reward=row[:, 0], truncated=[frame % 4 == 3])
    return rollout_data.open(folder)


@pytest.mark.parametrize(
    ("head", "name"),
    [("observation", "d4rl"), ("action", "d4rl"), ("action", "robomimic"), ("action", "isaaclab")],
)
def test_integers_that_a_join_with_floats_changes_are_counted(tmp_path, head, name):
    source = record_large(tmp_path / "ours", head)
    changes = convert(source, tmp_path / "x.hdf5", name).changes
    line = f"field '{head}/stamp' (int64) is written as float64: 4 values change, by at most 1"
    assert changes[line] == source.ids
    joined = rollout_data.open(tmp_path / "x.hdf5")[0][head]
    assert np.asarray(joined)[:, -1].tolist() == [2.0**53, 2**53 + 2, 2**53 + 4, 2**53 + 4]


def test_integers_that_a_join_keeps_are_not_in_the_report(tmp_path):
    with RolloutWriter(tmp_path / "ours", 1, durable=False) as writer:
        for frame in range(4):
            mixed = {
                "a": np.full((1, 2), 0.5, np.float32),
                "b": np.array([[2**53 - frame]], np.int64),
            }
            writer.add(
                observation=mixed,
                action=mixed,
                reward=np.ones(1, np.float32),
                truncated=[frame == 3],
            )
    for name in ("d4rl", "robomimic", "isaaclab"):
        assert not [
            change
            for change in convert(tmp_path / "ours", tmp_path / f"{name}.hdf5", name).changes
            if "change" in change
        ]


def record_with_gaps(folder: Path) -> Path:
    """Write three demos of which the middle one lacks a flag, a float, an integer and the rewards."""
    with h5py.File(folder, "w") as file:
        file.create_group("data").attrs["env_args"] = json.dumps(
            {"env_name": "Lift", "type": 1, "env_kwargs": {}}
        )
        for number in range(3):
            rows = np.arange(4.0) + 10 * number
            demo = file.create_group(f"data/demo_{number}")
            demo["actions"] = np.stack([rows, -rows], 1).astype(np.float32)
            demo["obs/low"] = np.stack([rows] * 3, 1)
            if number != 1:
                demo["obs/touch"] = np.stack([rows, rows], 1)
                demo["is_held"] = rows % 2 == 0
                demo["count"] = rows.astype(np.int64)
                demo["rewards"] = rows
    return folder


def test_missing_fields_of_a_demo_are_filled_with_false_and_nan_only(tmp_path):
    source = record_with_gaps(tmp_path / "gaps.hdf5")
    for name, key in (("robomimic", "touch"), ("isaaclab", "touch")):
        changes = convert(source, tmp_path / f"{name}.hdf5", name).changes
        assert changes["field 'is_held' is False in episodes without it"] == ["demo_1"]
        assert changes["field 'observation/touch' is NaN in episodes without it"] == ["demo_1"]
        assert changes["field 'count' is left out: not all episodes have it"] == [
            "demo_0",
            "demo_2",
        ]
        assert changes["field 'reward' is left out: not all episodes have it"] == [
            "demo_0",
            "demo_2",
        ]
        with h5py.File(tmp_path / f"{name}.hdf5") as file:
            demos = [file[f"data/demo_{number}"] for number in range(3)]
            assert len({tuple(sorted(demo)) for demo in demos}) == 1 and "count" not in demos[0]
            assert (
                not demos[1]["is_held"][:].any()
                and demos[2]["is_held"][:].tolist() == [True, False] * 2
            )
            assert np.isnan(demos[1][f"obs/{key}"][:]).all() and demos[2][f"obs/{key}"][
                :, 0
            ].tolist() == [
                20,
                21,
                22,
                23,
            ]
        back = rollout_data.open(tmp_path / f"{name}.hdf5")
        noted = [item.metadata.get("absent_fields") for item in back]
        ends = ["dones"] if name == "robomimic" else []
        lacking = [ends or None, [*ends, "is_held", "observation/touch"], ends or None]
        assert [noted[0], sorted(noted[1]), noted[2]] == lacking
        convert(back, tmp_path / f"{name}2.hdf5", name)
        assert sorted(
            rollout_data.open(tmp_path / f"{name}2.hdf5")[1].metadata["absent_fields"]
        ) == sorted(noted[1])


def test_missing_rewards_of_demos_are_missing_reward(tmp_path):
    source = record_with_gaps(tmp_path / "gaps.hdf5")
    for name in ("robomimic", "d4rl", "minari"):
        target = tmp_path / ("minari" if name == "minari" else f"{name}.hdf5")
        changes = convert(source, target, name, missing_reward=-1.5).changes
        assert changes["rewards are made up by missing_reward"] == ["demo_1"]
        rewards = [
            np.asarray(episode.reward).reshape(-1)[:3].tolist()
            for episode in rollout_data.open(target)
        ]
        assert rewards == [[0, 1, 2], [-1.5] * 3, [20, 21, 22]]


def test_d4rl_and_minari_note_the_fields_that_were_filled(tmp_path):
    source = record_with_gaps(tmp_path / "gaps.hdf5")
    changes = convert(source, tmp_path / "d.hdf5", "d4rl", missing_reward=0.0).changes
    assert changes["field 'is_held' is False in episodes without it"] == ["demo_1"]
    with h5py.File(tmp_path / "d.hdf5") as file:
        assert (
            file["observations"].shape == (12, 5) and np.isnan(file["observations"][4:8, 3:]).all()
        )
        assert (
            file["infos/is_held"][:].tolist() == [True, False] * 2 + [False] * 4 + [True, False] * 2
        )
        noted = json.loads(file["metadata/absent_fields"][()])
    ends = ["terminals", "timeouts"]
    lacking = {"0": ends, "1": ["infos/is_held", "observation/touch", *ends], "2": ends}
    assert {number: sorted(names) for number, names in noted.items()} == lacking
    back = [
        episode.metadata.get("absent_fields") for episode in rollout_data.open(tmp_path / "d.hdf5")
    ]
    assert back == [noted["0"], noted["1"], noted["2"]]
    changes = convert(source, tmp_path / "m", "minari", missing_reward=0.0).changes
    assert changes["field 'observation/touch' is NaN in episodes without it"] == ["demo_1"]
    back = rollout_data.open(tmp_path / "m")
    assert (
        np.isnan(back[1].observation["touch"]).all()
        and "observation/touch" in back[1].metadata["absent_fields"]
    )


def gaps_with_rewards(folder: Path) -> Any:
    """Record demos of which the middle one lacks a flag, a float and an integer."""
    record_with_gaps(folder)
    with h5py.File(folder, "r+") as file:
        file["data/demo_1/rewards"] = np.arange(4.0) + 10
    return rollout_data.open(folder)


def test_rlinf_fills_flags_and_floats_and_leaves_integers_out(tmp_path):
    source = gaps_with_rewards(tmp_path / "gaps.hdf5")
    changes = convert(source, tmp_path / "r", "rlinf").changes
    assert changes["field 'is_held' is False in episodes without it"] == ["demo_1"]
    assert changes["field 'count' is left out: not all episodes have it"] == ["demo_0", "demo_2"]
    files = [
        torch.load(tmp_path / "r" / f"trajectory_{number}_recorded.pt", weights_only=True)
        for number in range(3)
    ]
    assert len({tuple(sorted(file)) for file in files}) == 1
    assert {*files[1]["forward_inputs"]} == {*files[0]["forward_inputs"]} == {"is_held"}
    assert (
        not files[1]["forward_inputs"]["is_held"].any()
        and files[2]["forward_inputs"]["is_held"][0].all()
    )
    assert (
        files[1]["curr_obs"]["touch"].isnan().all()
        and not files[2]["curr_obs"]["touch"].isnan().any()
    )
    noted = json.loads((tmp_path / "r" / "metadata.json").read_text())["absent_fields"]
    assert {number: sorted(names) for number, names in noted.items()} == {
        "1": ["forward_inputs/is_held", "observation/touch"]
    }
    assert [
        episode.metadata.get("absent_fields") for episode in rollout_data.open(tmp_path / "r")
    ] == [
        None,
        noted["1"],
        None,
    ]


def test_trajectory_folders_fill_floats_and_count_what_float32_changes(tmp_path):
    source = gaps_with_rewards(tmp_path / "gaps.hdf5")
    with h5py.File(tmp_path / "gaps.hdf5", "r+") as file:
        file["data/demo_2/obs/low"][0, 0] = 2.0**25 + 1
    changes = convert(
        rollout_data.open(tmp_path / "gaps.hdf5"), tmp_path / "t", "trajectory-folders"
    ).changes
    assert changes["field 'observation/touch' is NaN in episodes without it"] == ["demo_1"]
    line = "field 'observation/low' (float64) is written as float32: 1 value changes, by at most 1"
    assert changes[line] == ["demo_2"]
    paths = [
        tmp_path / "t" / f"trajectory_{number}" / "traj_000000_000004.pickle" for number in range(3)
    ]
    chunks = [pickle.loads(path.read_bytes()) for path in paths]
    assert len({tuple(sorted(chunk)) for chunk in chunks}) == 1
    assert np.isnan(chunks[1]["obs_touch"]).all() and chunks[2]["obs_touch"][:, 0].tolist() == [
        20,
        21,
        22,
        23,
    ]
    noted = json.loads((tmp_path / "t" / "metadata.json").read_text())["absent_fields"]
    ends = ["dones", "timeouts"]
    lacking = {
        "trajectory_0": ends,
        "trajectory_1": ["observation/touch", *ends],
        "trajectory_2": ends,
    }
    assert noted == lacking and len(source) == 3
    assert changes["the field 'is_held' is left out"] == ["demo_0", "demo_2"]


def test_block_files_keep_the_dtypes_of_flags_and_integers(tmp_path):
    source = gaps_with_rewards(tmp_path / "gaps.hdf5")
    changes = convert(source, tmp_path / "own", "rollout-data").changes
    assert changes["field 'is_held' is False in episodes without it"] == ["demo_1"]
    assert changes["field 'observation/touch' is NaN in episodes without it"] == ["demo_1"]
    assert changes["field 'count' is left out: some episodes do not have it"] == [
        "demo_0",
        "demo_2",
    ]
    back = rollout_data.open(tmp_path / "own")
    assert [item.schema["is_held"].dtype for item in back if "is_held" in item.schema] == [
        "bool",
        "bool",
    ]
    assert "observation/touch" not in back[1].schema and "is_held" not in back[1].schema
    assert back[2]["is_held"].tolist() == [True, False] * 2
    batch = rollout_data.RolloutDataset(tmp_path / "own", num_envs=1).get_batch(12)
    assert batch.extras["is_held"].dtype == torch.bool and not batch.extras["is_held"][4:8].any()


def test_block_files_have_no_invented_rewards_actions_or_pictures(tmp_path):
    source = record_with_gaps(tmp_path / "gaps.hdf5")
    with h5py.File(source, "r+") as file:
        file["data/demo_0/obs/camera"] = np.ones((4, 8, 8, 3), np.float32)
    copy = convert(source, tmp_path / "own", "rollout-data")
    assert copy.changes["field 'reward' is left out: some episodes do not have it"] == [
        "demo_0",
        "demo_2",
    ]
    assert copy.changes["field 'observation/camera' is left out: some episodes do not have it"] == [
        "demo_0"
    ]
    for episode in rollout_data.open(tmp_path / "own"):
        assert {"reward", "observation/camera"}.isdisjoint(episode.schema)
    batch = rollout_data.RolloutDataset(tmp_path / "own", num_envs=1).get_batch(12)
    assert batch.reward is None and batch.action[:, 0, 0].tolist() == [
        0,
        1,
        2,
        3,
        10,
        11,
        12,
        13,
        20,
        21,
        22,
        23,
    ]
    assert "reward" not in rollout_data.WindowDataset(tmp_path / "own")[5]


@pytest.mark.parametrize("lacking", [0, 1, 2])
def test_block_files_leave_out_a_missing_picture_and_keep_the_episode(tmp_path, lacking):
    source = gaps_with_rewards(tmp_path / "gaps.hdf5").path
    with h5py.File(source, "r+") as file:
        for number in {0, 1, 2} - {lacking}:
            file[f"data/demo_{number}/obs/camera"] = np.ones((4, 8, 8, 3), np.uint8)
            file[f"data/demo_{number}/obs/mask"] = np.ones((4, 8, 8), bool)
    copy = convert(source, tmp_path / "own", "rollout-data")
    having = [f"demo_{number}" for number in range(3) if number != lacking]
    for name in ("camera", "mask"):
        assert (
            copy.changes[f"field 'observation/{name}' is left out: some episodes do not have it"]
            == having
        )
    assert copy.num_episodes == 3
    back = rollout_data.open(tmp_path / "own")
    assert [item["observation/low"][0, 0] for item in back] == [0, 10, 20]


def test_filled_fields_are_absent_in_a_copy_to_block_files(tmp_path):
    source = gaps_with_rewards(tmp_path / "gaps.hdf5")
    convert(source, tmp_path / "filled.hdf5", "robomimic")
    convert(tmp_path / "filled.hdf5", tmp_path / "own", "rollout-data")
    for mine, theirs in zip(rollout_data.open(tmp_path / "own"), source, strict=True):
        assert [name in mine.schema for name in ("is_held", "observation/touch")] == [
            "is_held" in theirs.schema
        ] * 2


#: Format -> fields of the target, by the names under which they are read, that a conversion filled.
FILLED = {
    "trajectory-folders": ["observation/hand_grip", "observation/touch"],
    "lerobot": ["is_held", "observation/hand.grip", "observation/touch"],
    "rlinf": ["forward_inputs/is_held", "observation/hand/grip", "observation/touch"],
    "minari": ["observation/hand/grip", "observation/touch"],
    "isaaclab": ["is_held", "observation/hand/grip", "observation/touch"],
    "robomimic": ["is_held", "observation/hand/grip", "observation/touch"],
    "d4rl": ["infos/is_held"],
}


@pytest.mark.parametrize("name", FILLED)
def test_fields_that_a_conversion_filled_are_absent_in_a_copy_of_the_copy(tmp_path, name):
    gaps_with_rewards(tmp_path / "gaps.hdf5")
    with h5py.File(tmp_path / "gaps.hdf5", "r+") as file:
        for number in (0, 2):
            file[f"data/demo_{number}/obs/hand/grip"] = np.ones((4, 1))
    first = tmp_path / ("first.hdf5" if name in ("isaaclab", "robomimic", "d4rl") else "first")
    convert(tmp_path / "gaps.hdf5", first, name, **({"fps": 10} if name == "lerobot" else {}))
    copy = rollout_data.open(first)
    assert {*FILLED[name]} <= {*copy[0].schema}
    # Read like a folder of ours, whose episodes have no field that was filled
    if name == "trajectory-folders":
        assert not {*FILLED[name]} & {*copy[1].schema} and {*FILLED[name]} <= {*copy[2].schema}
    else:
        assert {*FILLED[name]} <= {*copy[1].metadata["absent_fields"]}
    changes = convert(copy, tmp_path / "own", "rollout-data").changes
    own = rollout_data.open(tmp_path / "own")
    lacking = {
        item.removeprefix("recorded_") for item in own[0].schema.keys() - own[1].schema.keys()
    }
    assert {*FILLED[name]} <= lacking
    assert own[0].schema.keys() == own[2].schema.keys()
    if name == "trajectory-folders":
        assert changes["field 'observation/hand_grip' is NaN in episodes without it"] == [
            copy.ids[1]
        ]


def test_filled_parts_of_a_joined_observation_stay_named_in_copies(tmp_path):
    source = gaps_with_rewards(tmp_path / "gaps.hdf5")
    convert(source, tmp_path / "d.hdf5", "d4rl")
    before = tmp_path / "d.hdf5"
    for name, place in (
        ("rollout-data", "own"),
        ("trajectory-folders", "t"),
        ("robomimic", "r.hdf5"),
    ):
        convert(before, tmp_path / place, name)
        before = tmp_path / place
        episode = rollout_data.open(before)[1]
        assert "observation/touch" in episode.metadata["absent_fields"], name
        rows = np.asarray(
            episode.observation["state"] if name == "robomimic" else episode.observation
        )
        assert np.isnan(rows[:, 3:]).all() and not np.isnan(rows[:, :3]).any()
