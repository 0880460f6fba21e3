"""Files that we write, read with h5py, torch and pickle alone, according to the description of each
format.

No reader of ours is used. The values encode episode, frame and column, and are compared with
arithmetic.
"""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

import rollout_data
from rollout_data import RolloutWriter

LENGTHS = (5, 1, 12)
CAMERAS = {"front": 10, "wrist": 90}


def observed(episode: int, frame: int) -> dict[str, Any]:
    images = {
        name: np.full((1, 6, 7, 3), first + 20 * episode + frame, np.uint8)
        for name, first in CAMERAS.items()
    }
    return {"state": np.array([[100 * episode + frame, -frame]], np.float32), "images": images}


@pytest.fixture
def source(tmp_path: Path) -> Any:
    """Record three episodes; the last one has no end."""
    with RolloutWriter(tmp_path / "ours", 1, durable=False) as writer:
        for episode, length in enumerate(LENGTHS):
            for frame in range(length):
                is_end = frame == length - 1 and episode < 2
                final = {"final_observation": observed(episode, length)} if is_end else {}
                writer.add(
                    observation=observed(episode, frame),
                    action=np.array([[10 * episode + frame, 0.5]], np.float32),
                    reward=np.array([episode + frame / 16], np.float32),
                    terminated=[is_end and episode == 0],
                    truncated=[is_end and episode == 1],
                    **final,
                )
    return rollout_data.open(tmp_path / "ours")


def convert(source: Any, path: Path, name: str, **options: Any) -> Path:
    rollout_data.convert(source, path, name, progress=False, **options)
    return path


def check(episode: int, rows: dict[str, Any]) -> None:
    """Compare the arrays of an episode with the recorded values."""
    frames = np.arange(LENGTHS[episode])
    if "state" in rows:
        assert np.array_equal(rows["state"], np.stack([100 * episode + frames, -frames], 1))
    assert np.array_equal(rows["action"], np.stack([10 * episode + frames, 0 * frames + 0.5], 1))
    if "reward" in rows:
        assert np.asarray(rows["reward"]).reshape(-1).tolist() == (episode + frames / 16).tolist()
    for camera, first in CAMERAS.items():
        if camera in rows:
            pictures = np.asarray(rows[camera]).reshape(len(frames), 6, 7, 3)
            assert pictures[:, 3, 4, 1].tolist() == (first + 20 * episode + frames).tolist()


def test_plain_code_reads_demos_of_isaac_lab(source, tmp_path):
    with h5py.File(convert(source, tmp_path / "x.hdf5", "isaaclab")) as file:
        data = file["data"]
        assert file.attrs["format_version"] == 0 and data.attrs["total"] == sum(LENGTHS)
        assert json.loads(data.attrs["env_args"])["type"] == 2
        assert sorted(data) == ["demo_0", "demo_1", "demo_2"]
        for number, length in enumerate(LENGTHS):
            demo = data[f"demo_{number}"]
            assert demo.attrs["num_samples"] == length and "dones" not in demo
            images = {camera: demo[f"obs/images/{camera}"][:] for camera in CAMERAS}
            check(number, {"state": demo["obs/state"][:], "action": demo["actions"][:], **images})


def test_plain_code_reads_flat_arrays_of_d4rl(source, tmp_path):
    with h5py.File(convert(source, tmp_path / "x.hdf5", "d4rl")) as file:
        rows = {
            name: file[name][:]
            for name in ("observations", "actions", "rewards", "terminals", "timeouts")
        }
        assert {len(item) for item in rows.values()} == {sum(LENGTHS)}
        ends = np.flatnonzero(rows["terminals"] | rows["timeouts"])
        assert (ends + 1).tolist() == np.cumsum(LENGTHS).tolist() and rows["terminals"].sum() == 1
        assert "next_observations" not in file, "the last episode has no final observation"
        pixels = 6 * 7 * 3
        for number, stop in enumerate(np.cumsum(LENGTHS)):
            part = slice(stop - LENGTHS[number], stop)
            joined = rows["observations"][part]
            first = [
                np.flatnonzero(joined[0] == CAMERAS[camera] + 20 * number)[0] for camera in CAMERAS
            ]
            pictures = {
                camera: joined[:, at : at + pixels]
                for camera, at in zip(CAMERAS, first, strict=True)
            }
            check(
                number,
                {"action": rows["actions"][part], "reward": rows["rewards"][part], **pictures},
            )


def episodes_of_minari(file: h5py.File) -> Iterator[h5py.Group]:
    for number in range(len(LENGTHS)):
        yield file[f"episode_{number}"]


def test_plain_code_reads_groups_of_minari(source, tmp_path):
    folder = convert(source, tmp_path / "lab" / "walk-v0", "minari") / "data"
    about = json.loads((folder / "metadata.json").read_text())
    assert (about["total_episodes"], about["data_format"], about["jpeg_encoding"]) == (
        3,
        "hdf5",
        False,
    )
    space = json.loads(about["observation_space"])
    assert space["subspaces"]["images"]["subspaces"]["wrist"]["shape"] == [6, 7, 3]
    with h5py.File(folder / "main_data.hdf5") as file:
        for number, group in enumerate(episodes_of_minari(file)):
            steps = LENGTHS[number] - (number == 2)  # what follows the last step is not known
            assert (
                group.attrs["total_steps"]
                == len(group["actions"])
                == len(group["rewards"])
                == steps
            )
            assert (
                len(group["observations/state"])
                == len(group["observations/images/front"])
                == steps + 1
            )
            assert group["observations/state"][:, 0].tolist() == [
                100 * number + frame for frame in range(steps + 1)
            ]
            ends = group["terminations"][-1], group["truncations"][-1]
            assert ends == [(True, False), (False, True), (False, False)][number]


def test_plain_code_reads_blocks_of_rlinf(source, tmp_path):
    folder = convert(source, tmp_path / "x", "rlinf")
    index = json.loads((folder / "trajectory_index.json").read_text())
    about = json.loads((folder / "metadata.json").read_text())
    assert (about["trajectory_format"], about["size"], about["total_samples"]) == (
        "pt",
        3,
        sum(LENGTHS),
    )
    for number in index["trajectory_id_list"]:
        (path,) = folder.glob(f"trajectory_{number}_*.pt")
        block = torch.load(path, weights_only=True)
        assert index["trajectory_index"][str(number)]["shape"] == [LENGTHS[number], 1]
        images = {camera: block["curr_obs"][f"images/{camera}"][:, 0] for camera in CAMERAS}
        rows = {"state": block["curr_obs"]["state"][:, 0], "action": block["actions"][:, 0]}
        check(number, {**rows, "reward": block["rewards"][:, 0], **images})
        assert block["dones"][:, 0].tolist() == [False] * (LENGTHS[number] - 1) + [True]
        assert ("next_obs" in block) == (number < 2)


def test_plain_code_reads_chunks_of_trajectory_folders(source, tmp_path):
    folder = convert(source, tmp_path / "x", "trajectory-folders")
    about = json.loads((folder / "metadata.json").read_text())
    assert {*about["obs_segments"]} == {"state", "images_front", "images_wrist"}
    by_time = sorted(folder.glob("trajectory_*"), key=lambda item: item.stat().st_mtime)
    assert [item.name for item in by_time] == ["trajectory_0", "trajectory_1", "trajectory_2"]
    for number, item in enumerate(by_time):
        (path,) = item.iterdir()
        assert re.fullmatch(r"traj_000000_0*(\d+)\.pickle", path.name)[1] == str(LENGTHS[number])
        chunk = pickle.loads(path.read_bytes())
        images = {camera: chunk[f"obs_images_{camera}"] for camera in CAMERAS}
        check(
            number,
            {
                "state": chunk["obs_state"],
                "action": chunk["actions"],
                "reward": chunk["rewards"],
                **images,
            },
        )
        assert chunk["dones"].reshape(-1)[-1] == (number < 2) and chunk["timeouts"][-1] == (
            number == 1
        )
        assert (
            not chunk["values"].any()
            and about["obs_disassemble_mapping"]["images_front"] == "normalized_image"
        )
