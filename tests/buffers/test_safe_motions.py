"""Motions and their lists under real faults, what is kept of them, and priorities of any size."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from rollout_data import load_expert_trajectories
from storage import TrajectoryDictBuffer, load_buffer
from storage.errors import RolloutDataError, SchemaError, UnsafeFileError
from tests.saved import config_of

from .every_store import in_child, plain


def motions(folder: Path, change: Callable[[Any], Any] = lambda file: None, name: str = "a.h5") -> Path:
    """Write a motion file and a list of it."""
    folder.mkdir(exist_ok=True)
    with h5py.File(folder / "a.h5", "w") as file:
        file.attrs["num_episodes"] = 1
        file["ep_0/observation"] = np.arange(8.0).reshape(4, 2)
        file["ep_0/file_name"] = "walk"
        file["ep_0"].create_dataset("packed", data=np.arange(12.0).reshape(4, 3), chunks=(2, 3), compression="gzip")
        change(file)
    (folder / "list.txt").write_text(name + "\n")
    return folder


def load_motions(folder: Path, **options: Any) -> TrajectoryDictBuffer:
    return load_expert_trajectories(folder / "list.txt", folder, 2, "cpu", **options)


def test_a_flipped_byte_of_a_motion_is_never_a_raw_error(tmp_path: Path) -> None:
    code = "flip_and_load(Path(sys.argv[1]), lambda path: load_motions(path).get_full_buffer(), 61, False, 96)"
    in_child(code, motions(tmp_path / "m"))


def test_only_floating_observations_are_narrowed(tmp_path: Path) -> None:
    def write(file: Any) -> None:
        file["ep_0/qpos"] = np.full((4, 1), 1 / 3)
        file["ep_0/half"] = np.ones((4, 1), np.float16)
        file["ep_0/info/observation"] = np.full((4, 1), 1 / 3)

    full = load_motions(motions(tmp_path / "m", write)).get_full_buffer()
    assert full["observation"].dtype is torch.float32 and full["half"].dtype is torch.float16
    assert full["qpos"].dtype is torch.float64 and (full["qpos"] == 1 / 3).all()
    assert full["info"]["observation"].dtype is full["packed"].dtype is torch.float64


def test_a_mapper_is_given_nested_observations_too(tmp_path: Path) -> None:
    def write(file: Any) -> None:
        del file["ep_0/observation"]
        file["ep_0/observation/a"], file["ep_0/observation/b"] = np.ones((4, 2)), np.zeros((4, 1), np.int64)

    def swap(observation: Any) -> dict[str, Any]:
        assert observation["a"].dtype is torch.float32
        return {"both": torch.cat([observation["b"], observation["a"]], 1)}

    found = load_motions(motions(tmp_path / "m", write), obs_dict_mapper=swap).get_full_buffer()["observation"]
    assert found["both"].tolist() == [[0, 1, 1]] * 4


@pytest.mark.parametrize("way", ["..", "absolute", "inside and out", "link", "folder link", "absolute inside"])
def test_a_list_leads_out_of_its_root_in_no_way(tmp_path: Path, way: str) -> None:
    motions(tmp_path / "out")
    (tmp_path / "root" / "sub").mkdir(parents=True)
    shutil.copy(tmp_path / "out" / "a.h5", tmp_path / "root" / "b.h5")
    (tmp_path / "root" / "link.h5").symlink_to(tmp_path / "out" / "a.h5")
    (tmp_path / "root" / "folder").symlink_to(tmp_path / "out")
    (tmp_path / "root" / "within.h5").symlink_to("b.h5")
    names = {
        "..": "../out/a.h5",
        "absolute": str(tmp_path / "out" / "a.h5"),
        "inside and out": "sub/../b.h5",
        "link": "link.h5",
        "folder link": "folder/a.h5",
        "absolute inside": str(tmp_path / "root" / "b.h5"),
    }
    (tmp_path / "list.txt").write_text(f"b.h5\n{names[way]}\n")
    text = rf"line 2 of '{tmp_path / 'list.txt'}': expected a path in '{tmp_path / 'root'}', got one that leads out"
    with pytest.raises(UnsafeFileError, match=text):
        load_expert_trajectories(tmp_path / "list.txt", tmp_path / "root", 2, "cpu")
    (tmp_path / "list.txt").write_text("b.h5\nwithin.h5\n")
    (tmp_path / "linked").symlink_to(tmp_path / "root")
    assert load_expert_trajectories(tmp_path / "list.txt", tmp_path / "linked", 2, "cpu").num_episodes == 2


@pytest.mark.parametrize("place", ["list.txt", "a.h5"])
@pytest.mark.parametrize("what", ["pipe", "device", "folder"])
def test_a_motion_or_list_that_is_no_file_is_refused_at_once(tmp_path: Path, place: str, what: str) -> None:
    path = motions(tmp_path / "m") / place
    path.unlink()
    os.mkfifo(path) if what == "pipe" else path.symlink_to("/dev/zero") if what == "device" else path.mkdir()
    code = "try:\n    load_motions(Path(sys.argv[1]))\nexcept DataFileError as error:\n    print(error)\n"
    text = in_child(code, tmp_path / "m", timeout_s=60)
    assert place in text and text.startswith("cannot ")


def test_groups_that_hold_each_other_many_times_are_not_walked_for_ever(tmp_path: Path) -> None:
    def write(file: Any) -> None:
        inner = file["ep_0"]
        for depth in range(40):
            group = file.create_group(f"level{depth}")
            group["x"] = group["y"] = inner
            inner = group
        file["ep_1"] = inner
        file.attrs["num_episodes"] = 2

    motions(tmp_path / "m", write)
    code = "try:\n    load_motions(Path(sys.argv[1]))\nexcept CorruptFileError as error:\n    print(error)\n"
    assert "at most 64 groups in groups and 4096 datasets" in in_child(code, tmp_path / "m", timeout_s=120)


def test_priorities_of_any_finite_size_are_scaled_to_a_sum_of_one(tmp_path: Path) -> None:
    buffer = TrajectoryDictBuffer([{"observation": torch.ones(3, 1)}] * 3, "cpu", 2, generator=0)
    buffer.update_priorities([1e308, 1e308, 5e307])
    assert torch.allclose(buffer.priorities, torch.tensor([0.4, 0.4, 0.2]))
    buffer.update_priorities([1e308, 1e308], [0, 2])
    assert torch.allclose(buffer.priorities, torch.tensor([0.5, 0.0, 0.5]), atol=1e-6)
    buffer.update_priorities([5e-324, 5e-324, 0.0])
    assert buffer.priorities.tolist() == [0.5, 0.5, 0.0]
    buffer.sample(4)
    before = plain(buffer.state_dict())
    for wrong in ([1.0, float("inf"), 0.0], [1.0, -1.0, 0.0], [float("nan")] * 3):
        with pytest.raises(SchemaError, match="finite priorities >= 0"):
            state = buffer.state_dict()
            buffer.load_state_dict({**state, "numbers": {**state["numbers"], "priorities": wrong}})
    assert plain(buffer.state_dict()) == before
    buffer.save(tmp_path / "b")
    path = tmp_path / "b" / "config.json"
    path.write_text(json.dumps({**config_of(path), "priorities": [1e308, 1.0, 0.0]}))
    with pytest.raises(RolloutDataError, match=str(tmp_path)):
        load_buffer(tmp_path / "b")
