"""The readers of robomimic, LIBERO and Isaac Lab files return the content of the file, and invent
nothing.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import rollout_data
from rollout_data.formats.registry import open_foreign
from storage.errors import (
    CorruptFileError,
    DataFileError,
    RolloutDataWarning,
    UnsafeFileError,
    UsageError,
)
from tests.formats.cases import ROOT
from tests.formats.hdf5_files import (
    LENGTHS,
    STORAGE,
    actions,
    edited,
    pixels,
    replace,
    rewards,
    robomimic,
    values,
)


def check_demo(episode: Any, number: int, length: int, has_final: bool = True) -> None:
    assert (episode.id, len(episode)) == (f"demo_{number}", length)
    np.testing.assert_array_equal(episode.action, actions(number, length))
    assert episode.action.dtype == np.float32
    np.testing.assert_array_equal(episode.observation["low"], values(number, length))
    assert episode.observation["low"].dtype == np.float64
    np.testing.assert_array_equal(episode.observation["nested"]["cam"], pixels(number, length))
    if number == 9:
        assert episode.reward is None and "reward" not in episode
    else:
        np.testing.assert_array_equal(episode.reward, rewards(number, length))
    assert (episode.terminated, episode.truncated, episode.success) == (None, None, None)
    if has_final:
        np.testing.assert_array_equal(
            episode.final_observation["low"], values(number, 1, first=length)[0]
        )
        np.testing.assert_array_equal(
            episode.final_observation["nested/cam"], pixels(number, 1, length)[0]
        )
    else:
        assert episode.final_observation is None


def check_all(
    recording: rollout_data.Recording, lengths: dict[int, int] = LENGTHS, has_final: bool = True
) -> None:
    assert [episode.id for episode in recording] == [f"demo_{number}" for number in sorted(lengths)]
    for number, episode in zip(sorted(lengths), recording, strict=True):
        check_demo(episode, number, lengths[number], has_final)


@pytest.mark.parametrize("storage", STORAGE)
def test_demos_come_in_numeric_order_with_their_own_fields(tmp_path: Path, storage: str) -> None:
    recording = rollout_data.open(robomimic(tmp_path / "x.hdf5", storage=STORAGE[storage]))
    assert (recording.format, recording.problems) == ("robomimic", [])
    check_all(recording)
    assert recording[0].metadata["lang"] == recording[0].task == "öffne 2"
    assert recording[0].metadata["mask"] == ["train"] and "mask" not in recording[1].metadata
    assert "dones" in recording[0] and "next_obs/low" not in recording[0]
    assert (
        recording.metadata["env_name"] == "Lift" and recording.metadata["control_mode"] == "unknown"
    )


def test_plain_rows_are_mapped_and_cannot_be_written(tmp_path: Path) -> None:
    recording = rollout_data.open(robomimic(tmp_path / "x.hdf5"))
    cam = recording[2].observation["nested/cam"]
    assert not cam.flags.owndata and not cam.flags.writeable


def test_a_user_block_before_the_file_moves_every_row(tmp_path: Path) -> None:
    robomimic(tmp_path / "x.hdf5")
    with (
        h5py.File(tmp_path / "x.hdf5") as file,
        h5py.File(tmp_path / "y.hdf5", "w", userblock_size=1024) as moved,
    ):
        for name in file:
            file.copy(name, moved)
    check_all(rollout_data.open(tmp_path / "y.hdf5"))


def test_big_endian_numbers_are_delivered_in_native_byte_order(tmp_path: Path) -> None:
    path = edited(
        robomimic(tmp_path / "x.hdf5"),
        lambda file: replace(file, "data/demo_2/obs/low", values(2, 3, dtype=">f8")),
    )
    actual = rollout_data.open(path)[0].observation["low"]
    assert actual.dtype == np.dtype("<f8")
    np.testing.assert_array_equal(actual, values(2, 3))


def test_a_pickled_reader_and_threads_read_the_same(tmp_path: Path) -> None:
    lengths = {number: number % 5 + 1 for number in range(16)}
    del lengths[9]
    recording = rollout_data.open(robomimic(tmp_path / "x.hdf5", lengths, STORAGE["gzip"]))
    check_all(recording, lengths)
    check_all(pickle.loads(pickle.dumps(recording)), lengths)
    with ThreadPoolExecutor(8) as pool:
        list(
            pool.map(
                lambda at: check_demo(recording[at], sorted(lengths)[at], len(recording[at])),
                range(15),
            )
        )


def test_a_forked_process_opens_its_own_file_handle(tmp_path: Path) -> None:
    recording = rollout_data.open(robomimic(tmp_path / "x.hdf5", storage=STORAGE["gzip"]))
    check_all(recording)
    if (child := os.fork()) == 0:
        status = 1
        try:
            check_all(recording)
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    check_all(recording)


def test_a_file_that_changed_since_it_was_opened_is_refused(tmp_path: Path) -> None:
    reader = open_foreign(robomimic(tmp_path / "x.hdf5"))
    np.testing.assert_array_equal(
        pickle.loads(pickle.dumps(reader)).read(0, "action", 0, 3), actions(2, 3)
    )
    robomimic(tmp_path / "y.hdf5", {2: 3})
    os.replace(tmp_path / "y.hdf5", tmp_path / "x.hdf5")
    with pytest.raises(CorruptFileError, match=r"Call refresh\(\) of the recording"):
        pickle.loads(pickle.dumps(reader)).read(0, "action", 0, 3)


def _wrong(name: str, array: Any) -> Any:
    return lambda file: replace(file, f"data/demo_9/{name}", array)


#: What is wrong with demo 9 -> what its problem says.
DAMAGE: dict[str, tuple[Any, str]] = {
    "too few actions": (_wrong("actions", np.zeros((3, 2), "f4")), "'num_samples' is 1"),
    "no actions": (lambda file: file["data/demo_9"].pop("actions"), "no dataset 'actions'"),
    "too many observations": (
        _wrong("obs/low", np.zeros((2, 3))),
        "2 rows of 'obs/low', expected 1 rows",
    ),
    "no steps": (
        lambda file: file["data/demo_9"].attrs.update(num_samples=0),
        "'num_samples' is 0",
    ),
    "a scalar action": (_wrong("actions", 3.0), "no dataset 'actions'"),
    "a soft link": (
        lambda file: file["data/demo_9"].update(rewards=h5py.SoftLink("/data/demo_2/dones")),
        "the link 'rewards', which is not followed",
    ),
    "an external link": (
        lambda file: file["data/demo_9"].update(rewards=h5py.ExternalLink("/etc/passwd", "x")),
        "the link 'rewards', which is not followed",
    ),
    "a dataset in the place of the group": (
        lambda file: replace(file, "data/demo_9", np.zeros(3)),
        "is a dataset, expected a group",
    ),
    "a soft link in the place of the group": (
        lambda file: (
            file["data"].pop("demo_9"),
            file["data"].update(demo_9=h5py.SoftLink("/data/demo_2")),
        ),
        "a link",
    ),
    "a circle": (lambda file: file["data/demo_9"].update(obs2=file["data"]), "levels of groups"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_only_a_damaged_demo_is_left_out(tmp_path: Path, what: str) -> None:
    change, message = DAMAGE[what]
    recording = rollout_data.open(edited(robomimic(tmp_path / "x.hdf5"), change))
    check_all(recording, {2: 3, 10: 4})
    assert len(recording.problems) == 1 and "demo_9" in str(recording.problems[0])
    with pytest.raises(DataFileError, match=message):
        raise recording.problems[0]


def test_a_demo_after_the_first_hundreds_is_checked_when_it_is_read(tmp_path: Path) -> None:
    lengths = dict.fromkeys(range(20, 220), 2)
    path = robomimic(tmp_path / "x.hdf5", lengths)
    edited(path, lambda file: replace(file, "data/demo_219/obs/low", np.zeros((2, 4))))
    recording = rollout_data.open(path)
    assert len(recording) == 200
    check_demo(recording[198], 218, 2)
    with pytest.raises(CorruptFileError, match=r"demo_219.*float64\[4\] instead of float64\[3\]"):
        _ = recording[199].action


@pytest.mark.parametrize("libver", ["earliest", "latest"])
def test_attributes_of_other_exporters_have_the_same_meaning(tmp_path: Path, libver: str) -> None:
    text = json.dumps({"env_name": "Lift", "type": 1})
    written = {"str": text, "bytes": np.bytes_(text), "one": np.array([text], object)}
    for kind, value in written.items():
        with h5py.File(tmp_path / f"{kind}.hdf5", "w", libver=libver) as file:
            demo = file.create_group("data/demo_0")
            file["data"].attrs["env_args"], demo.attrs["num_samples"] = value, np.array([3], "u1")
            demo.attrs["nothing"], demo.attrs["texts"] = h5py.Empty("f4"), ["a", "ü"]
            demo["actions"], demo["rewards"] = (
                actions(0, 3).astype(">f8"),
                rewards(0, 3)[:, None].astype(">i8"),
            )
            demo["obs/low"], demo["obs/ünï/deep"] = values(0, 3), values(1, 3)
        (episode,) = recording = rollout_data.open(tmp_path / f"{kind}.hdf5")
        assert recording.metadata["env_name"] == "Lift" and episode.metadata["texts"] == ["a", "ü"]
        assert (
            episode.reward.dtype == np.int64
            and episode.reward.shape == (3,)
            and "nothing" not in episode.metadata
        )
        np.testing.assert_array_equal(episode.action, actions(0, 3).astype(float))
        np.testing.assert_array_equal(episode.observation["ünï/deep"], values(1, 3))


@pytest.mark.parametrize("libver", ["earliest", "latest"])
def test_texts_among_many_attributes_are_read_within_limits(tmp_path: Path, libver: str) -> None:
    path = tmp_path / "x.hdf5"
    with h5py.File(path, "w", libver=libver) as file:
        demo = file.create_group("data/demo_0")
        demo["actions"], demo["obs/low"] = actions(0, 3), values(0, 3)
        for number in range(60):
            demo.attrs[f"note{number}"] = f"text {number} " * (number + 1)
        demo.attrs["long"] = "q" * 3001
    (episode,) = rollout_data.open(path)
    assert episode.metadata["long"] == "q" * 3001
    assert all(
        episode.metadata[f"note{number}"] == f"text {number} " * (number + 1)
        for number in range(60)
    )
    damaged, length = path.read_bytes(), (3001).to_bytes(4, "little")
    path.write_bytes(damaged.replace(length, (0xF0000000).to_bytes(4, "little")))
    with pytest.raises(
        CorruptFileError,
        match="text of 4026531840" if libver == "earliest" else "metadata checksum",
    ):
        rollout_data.open(path)[0].metadata["long"]


def test_data_in_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(bytes(64))

    def lead_out(file: h5py.File) -> None:
        del file["data/demo_9/actions"]
        file.create_dataset(
            "data/demo_9/actions", (1, 2), "f4", external=[(str(tmp_path / "secret"), 0, 8)]
        )
        layout = h5py.VirtualLayout((4, 2), "f4")
        layout[:] = h5py.VirtualSource(str(tmp_path / "other.hdf5"), "x", (4, 2))
        del file["data/demo_10/actions"]
        file.create_virtual_dataset("data/demo_10/actions", layout)

    recording = rollout_data.open(edited(robomimic(tmp_path / "x.hdf5"), lead_out))
    assert len(recording) == 1
    assert [type(problem) for problem in recording.problems] == [UnsafeFileError] * 2


def test_a_file_without_a_good_demo_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(CorruptFileError, match="contains no demo"):
        rollout_data.open(
            edited(robomimic(tmp_path / "x.hdf5"), lambda file: replace_all(file)),
            format="robomimic",
        )
    path = edited(robomimic(tmp_path / "y.hdf5", {9: 1}), DAMAGE["no actions"][0])
    with pytest.raises(CorruptFileError, match="no dataset 'actions'"):
        rollout_data.open(path)


def replace_all(file: h5py.File) -> None:
    for name in list(file["data"]):
        del file["data"][name]


@pytest.mark.parametrize("part", [0.1, 0.5, 0.9, 0.999])
def test_a_truncated_file_is_refused(tmp_path: Path, part: float) -> None:
    path = robomimic(tmp_path / "x.hdf5")
    os.truncate(path, int(path.stat().st_size * part))
    with pytest.raises(DataFileError):
        rollout_data.open(path)


def test_datasets_of_another_length_are_metadata_or_left_out_by_name(tmp_path: Path) -> None:
    def add(file: h5py.File) -> None:
        demo = file["data/demo_2"]
        demo["goal"] = np.arange(5)
        demo["notes"] = ["å", "b", "c"]
        demo["complex"] = np.zeros(3, "c8")
        demo["action"] = np.arange(3)
        demo.attrs["init"] = np.arange(4.0)

    recording = rollout_data.open(edited(robomimic(tmp_path / "x.hdf5"), add))
    episode = recording[0]
    np.testing.assert_array_equal(episode.metadata["goal"], np.arange(5))
    np.testing.assert_array_equal(episode.metadata["init"], np.arange(4.0))
    assert episode["notes"] == ["å", "b", "c"] and episode.texts == ("notes",)
    assert "complex" not in episode and [
        "'complex'" in str(problem) for problem in recording.problems
    ] == [True]
    np.testing.assert_array_equal(episode.action, actions(2, 3))
    np.testing.assert_array_equal(episode["other/action"], np.arange(3))


def test_next_observations_that_differ_from_the_next_rows_are_reported_and_can_be_read(
    tmp_path: Path,
) -> None:
    path = edited(
        robomimic(tmp_path / "x.hdf5"),
        lambda file: file["data/demo_10/next_obs/low"].__setitem__((1, 0), 7),
    )
    recording = rollout_data.open(path)
    check_demo(recording[2], 10, 4)
    assert len(recording.problems) == 1
    assert "'next_obs/low' of 'demo_10'" in str(recording.problems[0]) and "Row 1 of" in str(
        recording.problems[0]
    )
    kept = rollout_data.open(path, keep_next_obs=True)
    assert kept.problems == [] and kept[2]["next_obs/low"][1, 0] == 7
    check_all(kept)


def test_next_observations_without_observations_are_fields(tmp_path: Path) -> None:
    path = edited(robomimic(tmp_path / "x.hdf5"), lambda file: file["data/demo_9/obs"].pop("low"))
    episode = rollout_data.open(path)[1]
    np.testing.assert_array_equal(episode["next_obs/low"], values(9, 1, first=1))
    assert (
        list(episode.final_observation) == ["nested/cam"] and "next_obs/nested/cam" not in episode
    )


def test_next_observations_of_later_demos_are_compared_when_they_are_read(tmp_path: Path) -> None:
    path = robomimic(tmp_path / "x.hdf5", dict.fromkeys(range(20, 80), 2))
    edited(path, lambda file: file["data/demo_79/next_obs/low"].__setitem__((0, 0), 7))
    recording = rollout_data.open(path)
    assert recording.problems == []
    with pytest.warns(RolloutDataWarning, match="next_obs/low"):
        _ = recording[59].final_observation


def test_nan_equals_nan_in_the_comparison_of_next_observations(tmp_path: Path) -> None:
    def spoil(file: h5py.File) -> None:
        file["data/demo_10/obs/low"][2, 1] = file["data/demo_10/next_obs/low"][1, 1] = np.nan

    recording = rollout_data.open(edited(robomimic(tmp_path / "x.hdf5"), spoil))
    assert recording.problems == [] and np.isnan(recording[2].observation["low"][2, 1])


def test_dones_terminate_an_episode_only_on_request(tmp_path: Path) -> None:
    path = edited(
        robomimic(tmp_path / "x.hdf5"), lambda file: file["data/demo_10/dones"].__setitem__(3, 1)
    )
    assert [episode.terminated for episode in rollout_data.open(path)] == [None, None, None]
    assert [
        episode.terminated for episode in rollout_data.open(path, terminated_from_dones=True)
    ] == [
        False,
        True,
        True,
    ]


def test_a_wrong_total_is_reported(tmp_path: Path) -> None:
    recording = rollout_data.open(
        edited(robomimic(tmp_path / "x.hdf5"), lambda file: file["data"].attrs.update(total=9))
    )
    check_all(recording)
    assert "has 8 steps, but its attribute 'total' is 9" in str(recording.problems[0])


def test_the_controller_determines_the_control_mode(tmp_path: Path) -> None:
    kwargs = {"controller_configs": {"type": "OSC_POSE", "control_delta": True}}
    text = json.dumps({"env_name": "Lift", "type": 1, "env_kwargs": kwargs})
    path = edited(
        robomimic(tmp_path / "x.hdf5"), lambda file: file["data"].attrs.update(env_args=text)
    )
    assert rollout_data.open(path).metadata["control_mode"] == "OSC_POSE delta"


def test_attributes_that_are_not_json_are_kept_as_texts(tmp_path: Path) -> None:
    def spoil(file: h5py.File) -> None:
        file["data"].attrs["env_args"] = "[" * 5000
        file["data/demo_2"].attrs["ep_meta"] = "pick"

    recording = rollout_data.open(edited(robomimic(tmp_path / "x.hdf5"), spoil))
    check_all(recording)
    assert recording[0].metadata["ep_meta"] == "pick" and recording.metadata["env_name"] == ""


def test_observations_of_libero_move_only_on_request(tmp_path: Path) -> None:
    path = ROOT / "libero" / "KITCHEN_SCENE_put_the_cube_demo.hdf5"
    stored = rollout_data.open(path)
    assert stored.metadata["macros_image_convention"] == "opengl"
    assert [len(item) for item in stored] == [3, 1, 4] and "shift_obs=True" in str(stored.advice[0])
    assert stored.problems == []
    moved = rollout_data.open(path, shift_obs=True)
    assert [(item.id, len(item)) for item in moved] == [("demo_0", 2), ("demo_2", 3)]
    assert "'data/demo_1'" in str(moved.problems[0]) and "has 1 step, but" in str(moved.problems[0])
    for old, new in zip((stored[0], stored[2]), moved, strict=True):
        for name in ("ee_pos", "agentview_rgb"):
            np.testing.assert_array_equal(new.observation[name], old.observation[name][:-1])
            np.testing.assert_array_equal(new.final_observation[name], old.observation[name][-1])
        for name in ("action", "reward", "states"):
            np.testing.assert_array_equal(new[name], old[name][1:])


def test_the_total_stays_valid_if_observations_of_libero_are_moved(tmp_path: Path) -> None:
    path = Path(shutil.copy(ROOT / "libero" / "KITCHEN_SCENE_put_the_cube_demo.hdf5", tmp_path))
    edited(path, lambda file: (file["data"].pop("demo_1"), file["data"].attrs.update(total=7)))
    assert rollout_data.open(path, shift_obs=True).problems == []


def isaaclab(path: Path, version: int | None = None, gzip: bool = True) -> Path:
    storage = {"compression": "gzip", "compression_opts": 2} if gzip else {}
    with h5py.File(path, "w") as file:
        if version is not None:
            file.attrs["format_version"] = version
        data = file.create_group("data")
        data.attrs["env_args"] = json.dumps({"env_name": "Isaac-Lift-v0", "type": 2})
        for number, length in LENGTHS.items():
            demo = data.create_group(f"demo_{number}")
            demo.attrs.update(num_samples=length, seed=number, success=number == 9)
            demo.create_dataset("actions", data=actions(number, length), **storage)
            demo.create_dataset("obs", data=values(number, length), **storage)
            pose = values(number, length, 7, "f4")
            demo.create_dataset("states/articulation/robot/root_pose", data=pose, **storage)
            demo.create_dataset(
                "initial_state/articulation/robot/root_pose", data=pose[:1], **storage
            )
            demo.create_dataset("initial_state/rigid_object/root_pose", data=pose[:1], **storage)
    return path


@pytest.mark.parametrize("version", [None, 0, 1])
def test_demos_of_isaac_lab_have_no_reward_and_no_end(tmp_path: Path, version: int | None) -> None:
    recording = rollout_data.open(isaaclab(tmp_path / "x.hdf5", version, gzip=version != 1))
    assert (recording.format, recording.problems) == ("isaaclab", [])
    assert recording.metadata["quaternion_order"] == ("xyzw" if version else "wxyz")
    for (number, length), episode in zip(LENGTHS.items(), recording, strict=True):
        np.testing.assert_array_equal(episode.observation, values(number, length))
        np.testing.assert_array_equal(episode.action, actions(number, length))
        assert (episode.reward, episode.terminated, episode.truncated) == (None, None, None)
        assert (episode.success, episode.metadata["seed"]) == (number == 9, number)
        assert not any(name.startswith("initial_state") for name in episode.schema)
        assert episode.metadata["initial_state/articulation/robot/root_pose"].shape == (1, 7)


@pytest.mark.parametrize("version", [0, 1])
def test_quaternions_are_turned_on_request_and_positions_never(
    tmp_path: Path, version: int
) -> None:
    path, name = isaaclab(tmp_path / "x.hdf5", version), "states/articulation/robot/root_pose"
    stored, initial = rollout_data.open(path)[2][name], "initial_state/rigid_object/root_pose"
    own, other = ("xyzw", "wxyz") if version else ("wxyz", "xyzw")
    np.testing.assert_array_equal(rollout_data.open(path, quaternions=own)[2][name], stored)
    turned = rollout_data.open(path, quaternions=other)[2]
    w_at = 6 if version else 3
    np.testing.assert_array_equal(turned[name][:, :3], stored[:, :3])
    np.testing.assert_array_equal(turned[name][:, 3 if version else 6], stored[:, w_at])
    np.testing.assert_array_equal(turned[name][0], turned.metadata[initial][0])
    with pytest.raises(UsageError, match="quaternions must be one of wxyz, xyzw"):
        rollout_data.open(path, quaternions="wyxz")


def test_the_newest_files_of_isaac_lab_have_groups_of_actions(tmp_path: Path) -> None:
    def change(file: h5py.File) -> None:
        file["data"].attrs.update(schema_version="1.0", fps=50, description="lift")
        del file["data"].attrs["env_args"]
        for number, length in LENGTHS.items():
            demo = file[f"data/demo_{number}"]
            del demo["actions"], demo["obs"]
            demo["actions/pose"], demo["actions/joints"] = (
                values(number, length, 7),
                values(number, length, 2),
            )
            demo["obs/policy/joints"], demo["obs/datagen_info/eef"] = (
                values(number, length),
                values(number, length),
            )

    recording = rollout_data.open(edited(isaaclab(tmp_path / "x.hdf5"), change))
    assert recording.format == "isaaclab" and recording.metadata["fps"] == 50
    np.testing.assert_array_equal(recording[2].action["joints"], values(10, 4, 2))
    assert (
        list(recording[2].observation) == ["policy/joints"]
        and "obs/datagen_info/eef" in recording[2]
    )


def test_real_demos_without_next_observations_have_no_final_observation(tmp_path: Path) -> None:
    shutil.copy(ROOT / "robomimic" / "layout_no_next_obs.hdf5", tmp_path)
    recording = rollout_data.open(tmp_path / "layout_no_next_obs.hdf5")
    assert [episode.final_observation for episode in recording] == [None, None, None]
    assert os.listdir(tmp_path) == ["layout_no_next_obs.hdf5"]


def test_circular_links_of_groups_raise_early(tmp_path: Path) -> None:
    def change(file: h5py.File) -> None:
        for number in range(1000):
            file[f"data/demo_2/obs/k{number}"] = h5py.Empty("f4")
        for number in range(100, 400):
            file[f"data/demo_{number}"] = file["data/demo_2"]

    with pytest.raises(CorruptFileError, match="links that form a cycle"):
        rollout_data.open(edited(robomimic(tmp_path / "x.hdf5"), change))
