"""The readers of ALOHA and ManiSkill files: rows as stored, ends and pictures."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import rollout_data
from storage.errors import CorruptFileError, DataFileError, UnsafeFileError
from tests.formats.cases import ROOT
from tests.formats.hdf5_files import (
    LENGTHS,
    actions,
    edited,
    halves,
    jpeg,
    pixels,
    replace,
    rewards,
    values,
)


def aloha(folder: Path, kind: str = "raw") -> Path:
    """Write `episode_<n>.hdf5` of `LENGTHS` with two cameras: raw, padded to equal lengths, or ragged (gzip)."""
    folder.mkdir()
    for number, length in LENGTHS.items():
        with h5py.File(folder / f"episode_{number}.hdf5", "w") as file:
            file.attrs["sim"] = False
            file["action"] = actions(number, length)
            file["base_action"] = values(number, length, 2)
            file["observations/qpos"], file["observations/qvel"] = (
                values(number, length),
                values(number, length),
            )
            for camera in ("high", "left"):
                name = f"observations/images/{camera}"
                pictures = [halves(number, frame) for frame in range(length)]
                data = [jpeg(picture) for picture in pictures]
                if kind == "raw":
                    file.create_dataset(name, data=np.stack(pictures), chunks=(1, 32, 48, 3))
                elif kind == "padded":
                    width = max(map(len, data)) + 7
                    file[name] = np.stack(
                        [np.frombuffer(item.ljust(width, b"\0"), "u1") for item in data]
                    )
                    file.require_dataset("compress_len", (2, length), "f4")[...] = [
                        list(map(len, data))
                    ] * 2
                else:
                    storage = {"compression": "gzip", "shuffle": True} if camera == "left" else {}
                    rows = file.create_dataset(
                        name, (length,), h5py.vlen_dtype(np.uint8), **storage
                    )
                    for frame, item in enumerate(data):
                        rows[frame] = np.frombuffer(item, "u1")
    return folder


@pytest.mark.parametrize("kind", ["raw", "padded", "ragged"])
def test_episodes_of_aloha_come_in_numeric_order_with_their_pictures(
    tmp_path: Path, kind: str
) -> None:
    recording = rollout_data.open(aloha(tmp_path / "x", kind))
    assert (recording.format, recording.problems) == ("aloha", [])
    assert [episode.id for episode in recording] == ["episode_2", "episode_9", "episode_10"]
    for (number, length), episode in zip(LENGTHS.items(), recording, strict=True):
        np.testing.assert_array_equal(episode.action, actions(number, length))
        np.testing.assert_array_equal(episode["base_action"], values(number, length, 2))
        np.testing.assert_array_equal(episode.observation["qpos"], values(number, length))
        assert (
            episode.reward,
            episode.terminated,
            episode.truncated,
            episode.final_observation,
        ) == (None,) * 4
        assert episode.metadata["sim"] is False and "compress_len" not in episode
        for camera in ("high", "left"):
            actual = episode.observation["images"][camera]
            expected = np.stack([halves(number, frame) for frame in range(length)])
            assert actual.dtype == np.uint8 and actual.shape == expected.shape
            assert np.abs(actual.astype(int) - expected).mean() <= (0 if kind == "raw" else 4)
    names = ["observation/images/high", "observation/images/left"]
    assert recording.metadata["lossy"] == ([] if kind == "raw" else names)
    assert recording.metadata.get("color_order") == (None if kind == "raw" else "unknown")


def test_bgr_pictures_are_converted_to_rgb_on_request(tmp_path: Path) -> None:
    path = aloha(tmp_path / "x", "padded")
    stored = rollout_data.open(path)[2].observation["images/left"]
    turned = rollout_data.open(path, bgr=True)
    np.testing.assert_array_equal(turned[2].observation["images/left"], stored[..., ::-1])
    assert turned.metadata["color_order"] == "rgb, turned from bgr"


def test_one_file_of_aloha_is_a_recording(tmp_path: Path) -> None:
    path = aloha(tmp_path / "x") / "episode_10.hdf5"
    assert [episode.id for episode in rollout_data.open(path)] == ["episode_10"]


#: What is wrong with episode 9 -> what its problem says.
ALOHA_DAMAGE: dict[str, tuple[Any, str]] = {
    "no action": (lambda file: file.pop("action"), "no dataset 'action'"),
    "other lengths": (
        lambda file: replace(file, "observations/qvel", np.zeros((4, 3))),
        "4 rows of 'observations/qvel', expected 1 rows",
    ),
    "a picture that breaks off": (
        lambda file: replace(file, "observations/images/left", np.full((1, 9), 255, "u1")),
        "expected a picture as PNG, JPEG or TIFF",
    ),
    "a soft link": (
        lambda file: file.update(more=h5py.SoftLink("/action")),
        "the link 'more', which is not",
    ),
}


@pytest.mark.parametrize("what", ALOHA_DAMAGE)
def test_a_damaged_file_leaves_out_its_episode_only(tmp_path: Path, what: str) -> None:
    change, message = ALOHA_DAMAGE[what]
    folder = aloha(tmp_path / "x", "padded")
    edited(folder / "episode_9.hdf5", change)
    recording = rollout_data.open(folder)
    assert [episode.id for episode in recording] == ["episode_2", "episode_10"]
    with pytest.raises(DataFileError, match=message):
        raise recording.problems[0]


def test_a_truncated_aloha_file_leaves_out_its_episode_only(tmp_path: Path) -> None:
    folder = aloha(tmp_path / "x")
    os.truncate(folder / "episode_10.hdf5", 3000)
    recording = rollout_data.open(folder)
    assert len(recording) == 2 and "episode_10.hdf5" in str(recording.problems[0])


def test_a_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    folder = aloha(tmp_path / "x")
    shutil.move(folder / "episode_9.hdf5", tmp_path / "out.hdf5")
    (folder / "episode_9.hdf5").symlink_to(tmp_path / "out.hdf5")
    with pytest.raises(UnsafeFileError):
        rollout_data.open(folder, format="aloha")


def test_a_row_with_a_huge_declared_length_allocates_no_memory(tmp_path: Path) -> None:
    folder = aloha(tmp_path / "x", "ragged")
    with h5py.File(folder / "episode_10.hdf5") as file:
        at = file["observations/images/high"].id.get_offset()
    data = bytearray((folder / "episode_10.hdf5").read_bytes())
    data[at + 32 : at + 36] = (0xFFFFFFFF).to_bytes(4, "little")
    (folder / "episode_10.hdf5").write_bytes(data)
    episode = rollout_data.open(folder)[2]
    assert episode.read("observation/images/high", 0, 2).shape == (2, 32, 48, 3)
    with pytest.raises(
        CorruptFileError, match="a row of 4294967295 bytes, expected at most 1048576"
    ):
        episode.read("observation/images/high", 1, 3)


@pytest.mark.parametrize(("shift", "which"), [(0, "the same"), (1, "the next")])
def test_actions_that_are_positions_are_reported(tmp_path: Path, shift: int, which: str) -> None:
    folder = aloha(tmp_path / "x")
    edited(
        folder / "episode_2.hdf5", lambda file: replace(file, "action", values(2, 3, first=shift))
    )
    assert f" of {which} step" in str(rollout_data.open(folder).advice[0])


def maniskill(path: Path) -> Path:
    listed = []
    with h5py.File(path, "w") as file:
        for number, length in LENGTHS.items():
            item = file.create_group(f"traj_{number}")
            item["actions"], item["rewards"] = actions(number, length), rewards(number, length)
            item["terminated"], item["truncated"] = (
                np.arange(length) == length - 1,
                np.zeros(length, bool),
            )
            item["success"] = np.arange(length) >= length - 2
            item["obs/agent/qpos"] = values(number, length + 1)
            cam = item.create_group("obs/sensor_data/cam")
            cam.create_dataset(
                "rgb", data=pixels(number, length + 1), compression="gzip", compression_opts=5
            )
            cam["depth"] = values(number, length + 1, 4, "i2").reshape(-1, 2, 2, 1)
            item["env_states/actors/cube"] = values(number, length + 1, 13)
            about = {
                "episode_id": number,
                "episode_seed": number,
                "control_mode": "pd_ee",
                "elapsed_steps": length,
            }
            listed.append({**about, "reset_kwargs": {}, "success": number == 9})
    about = {"env_info": {"env_id": "PickCube-v1"}, "episodes": listed}
    path.with_suffix(".json").write_text(json.dumps(about))
    return path


def test_trajectories_of_maniskill_have_a_final_observation(tmp_path: Path) -> None:
    recording = rollout_data.open(maniskill(tmp_path / "x.h5"))
    assert (recording.format, recording.problems) == ("maniskill", [])
    assert (
        recording.metadata["control_mode"] == "pd_ee"
        and recording.metadata["env_name"] == "PickCube-v1"
    )
    assert recording.metadata["units"] == {"observation/sensor_data/cam/depth": "mm"}
    for (number, length), episode in zip(LENGTHS.items(), recording, strict=True):
        assert (episode.id, len(episode)) == (f"traj_{number}", length)
        np.testing.assert_array_equal(episode.action, actions(number, length))
        np.testing.assert_array_equal(episode.reward, rewards(number, length))
        np.testing.assert_array_equal(episode.observation["agent/qpos"], values(number, length))
        np.testing.assert_array_equal(
            episode.final_observation["agent/qpos"], values(number, 1, first=length)[0]
        )
        np.testing.assert_array_equal(
            episode.final_observation["sensor_data/cam/rgb"], pixels(number, 1, length)[0]
        )
        assert episode.observation["sensor_data/cam/depth"].dtype == np.int16
        assert (episode.terminated, episode.truncated, episode.success) == (
            True,
            False,
            number == 9,
        )
        np.testing.assert_array_equal(episode["success"], np.arange(length) >= length - 2)
        np.testing.assert_array_equal(episode["env_states/actors/cube"], values(number, length, 13))
        last = episode.metadata["final/env_states/actors/cube"]
        np.testing.assert_array_equal(last, values(number, 1, 13, first=length)[0])
        assert episode.metadata["control_mode"] == "pd_ee"


def test_actions_may_be_a_group_and_observations_absent(tmp_path: Path) -> None:
    def change(file: h5py.File) -> None:
        for number, length in LENGTHS.items():
            del file[f"traj_{number}/actions"], file[f"traj_{number}/obs"]
            file[f"traj_{number}/actions/arm"] = actions(number, length)

    recording = rollout_data.open(edited(maniskill(tmp_path / "x.h5"), change))
    assert recording[2].observation is None and recording[2].final_observation is None
    np.testing.assert_array_equal(recording[2].action["arm"], actions(10, 4))


def test_flags_before_the_last_step_are_reported_and_cut_nothing(tmp_path: Path) -> None:
    path = edited(
        maniskill(tmp_path / "x.h5"), lambda file: file["traj_10/terminated"].__setitem__(1, True)
    )
    recording = rollout_data.open(path)
    assert len(recording[2]) == 4 and "at step 1" in str(recording.advice[0])
    assert recording.problems == []


def test_a_json_of_other_trajectories_is_refused_unless_the_index_is_rebuilt(
    tmp_path: Path,
) -> None:
    path = edited(maniskill(tmp_path / "x.h5"), lambda file: file.pop("traj_9"))
    with pytest.raises(
        CorruptFileError,
        match=r"describes 3 trajectories\. 2 of them are among the 2 trajectories of 'x\.h5'",
    ):
        rollout_data.open(path)
    recording = rollout_data.open(path, on_bad_index="rebuild")
    assert [episode.id for episode in recording] == ["traj_2", "traj_10"] and len(
        recording.problems
    ) == 1


def test_a_maniskill_file_without_its_json_is_read_and_reported(tmp_path: Path) -> None:
    shutil.copy(next((ROOT / "maniskill").glob("*.h5")), tmp_path / "x.h5")
    recording = rollout_data.open(tmp_path / "x.h5")
    assert [episode.success for episode in recording] == [True, False, True] and "x.json" in str(
        recording.problems[0]
    )
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(CorruptFileError, match="JSON"):
        rollout_data.open(tmp_path / "x.h5")
    (tmp_path / "x.json").unlink()
    (tmp_path / "x.json").symlink_to("/etc/hostname")
    with pytest.raises(UnsafeFileError):
        rollout_data.open(tmp_path / "x.h5")


@pytest.mark.parametrize(
    ("name", "rows"), [("obs/agent/qpos", 4), ("rewards", 5), ("terminated", 3)]
)
def test_only_a_trajectory_with_wrong_rows_is_left_out(
    tmp_path: Path, name: str, rows: int
) -> None:
    change = values(10, rows) if name.startswith("obs") else np.zeros(rows)
    path = edited(
        maniskill(tmp_path / "x.h5"), lambda file: replace(file, f"traj_10/{name}", change)
    )
    recording = rollout_data.open(path)
    assert [episode.id for episode in recording] == ["traj_2", "traj_9"] and "traj_10" in str(
        recording.problems[0]
    )
