"""Motions and motion lists with real faults, their stored fields, and priorities of any size."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

import rollout_data
from rollout_data import load_expert_trajectories, load_expert_trajectories_from_motion_lib
from storage import TrajectoryDictBuffer, load_buffer, load_store
from storage.errors import RolloutDataError, SchemaError, UnsafeFileError, UsageError
from tests.saved import config_of

from .every_store import in_child, plain


def motions(
    folder: Path, change: Callable[[Any], Any] = lambda file: None, name: str = "a.h5"
) -> Path:
    """Write a motion file and a list with its name."""
    folder.mkdir(exist_ok=True)
    with h5py.File(folder / "a.h5", "w") as file:
        file.attrs["num_episodes"] = 1
        file["ep_0/observation"] = np.arange(8.0).reshape(4, 2)
        file["ep_0/file_name"] = "walk"
        file["ep_0"].create_dataset(
            "packed", data=np.arange(12.0).reshape(4, 3), chunks=(2, 3), compression="gzip"
        )
        change(file)
    (folder / "list.txt").write_text(name + "\n")
    return folder


def load_motions(folder: Path, **options: Any) -> TrajectoryDictBuffer:
    return load_expert_trajectories(folder / "list.txt", folder, 2, "cpu", **options)


def test_a_flipped_byte_of_a_motion_raises_a_library_error(tmp_path: Path) -> None:
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


def test_a_mapper_receives_nested_observations(tmp_path: Path) -> None:
    def write(file: Any) -> None:
        del file["ep_0/observation"]
        file["ep_0/observation/a"], file["ep_0/observation/b"] = (
            np.ones((4, 2)),
            np.zeros((4, 1), np.int64),
        )

    def swap(observation: Any) -> dict[str, Any]:
        assert observation["a"].dtype is torch.float32
        return {"both": torch.cat([observation["b"], observation["a"]], 1)}

    actual = load_motions(motions(tmp_path / "m", write), obs_dict_mapper=swap).get_full_buffer()[
        "observation"
    ]
    assert actual["both"].tolist() == [[0, 1, 1]] * 4


@pytest.mark.parametrize(
    "way", ["..", "absolute", "inside and out", "link", "folder link", "spaces", "absolute link"]
)
def test_a_motion_list_cannot_leave_its_root(tmp_path: Path, way: str) -> None:
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
        "spaces": ". . / out / a.h5",
        "absolute link": str(tmp_path / "root" / "link.h5"),
    }
    (tmp_path / "list.txt").write_text(f"b.h5\n{names[way]}\n")
    text = (
        rf"Line 2 of '{tmp_path / 'list.txt'}' names '.*', which leads out of '{tmp_path / 'root'}'"
    )
    with pytest.raises(UnsafeFileError, match=text):
        load_expert_trajectories(tmp_path / "list.txt", tmp_path / "root", 2, "cpu")
    (tmp_path / "list.txt").write_text("b.h5\nwithin.h5\n")
    (tmp_path / "linked").symlink_to(tmp_path / "root")
    assert (
        load_expert_trajectories(tmp_path / "list.txt", tmp_path / "linked", 2, "cpu").num_episodes
        == 2
    )


def test_absolute_paths_inside_of_the_root_are_read(tmp_path: Path) -> None:
    motions(tmp_path / "root")
    path = tmp_path / "root" / "a.h5"
    (tmp_path / "list.txt").write_text(f"{path}\na.h5\n")
    (tmp_path / "linked").symlink_to(tmp_path / "root")
    for root in (tmp_path / "root", tmp_path / "linked"):
        actual = load_expert_trajectories(tmp_path / "list.txt", root, 2, "cpu")
        assert actual.file_names == [str(path), "a.h5"]
    (tmp_path / "list.txt").write_text(f"{tmp_path / 'root' / 'none.h5'}\n")
    with pytest.raises(FileNotFoundError, match=r"Line 1 of .* has no file of that name"):
        load_expert_trajectories(tmp_path / "list.txt", tmp_path / "root", 2, "cpu")


def test_a_line_is_read_as_written_and_then_without_spaces(tmp_path: Path) -> None:
    root = motions(tmp_path / "root")
    names = {"with space.h5": 1, "withspace.h5": 2, "only.h5": 3, " around.h5": 4, "inner .h5": 5}
    for name, value in names.items():
        shutil.copy(root / "a.h5", root / name)
        with h5py.File(root / name, "a") as file:
            file["ep_0/number"] = np.full((4, 1), value)
    lines = {
        "with space.h5": 1,
        "withspace.h5": 2,
        "on ly .h5": 3,
        " around.h5": 4,
        "\tonly.h5  ": 3,
        "  inner .h5 ": 5,
    }
    (root / "list.txt").write_text("\n".join(lines) + "\n")
    actual = load_motions(root)
    starts = [int(start) for start in actual.start_idx]
    assert actual.get_full_buffer()["number"].flatten()[starts].tolist() == list(lines.values())
    assert actual.file_names == [
        "with space.h5",
        "withspace.h5",
        "only.h5",
        " around.h5",
        "only.h5",
        "inner .h5",
    ]
    (root / "list.txt").write_text("no such .h5\n")
    with pytest.raises(FileNotFoundError, match=r"Line 1 of .* names 'no such \.h5'"):
        load_motions(root)


@pytest.mark.parametrize("place", ["list.txt", "a.h5"])
@pytest.mark.parametrize("what", ["pipe", "device", "folder"])
def test_a_motion_or_list_that_is_not_a_file_raises_at_once(
    tmp_path: Path, place: str, what: str
) -> None:
    path = motions(tmp_path / "m") / place
    path.unlink()
    os.mkfifo(path) if what == "pipe" else path.symlink_to(
        "/dev/zero"
    ) if what == "device" else path.mkdir()
    code = "try:\n    load_motions(Path(sys.argv[1]))\nexcept DataFileError as error:\n    print(error)\n"
    text = in_child(code, tmp_path / "m", timeout_s=60)
    assert place in text and ("is a folder, a pipe" in text or "leads out of" in text)


def test_groups_with_circular_links_raise_quickly(tmp_path: Path) -> None:
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
    assert "more than 12 levels of groups" in in_child(code, tmp_path / "m", timeout_s=120)


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
        with pytest.raises(SchemaError, match="finite numbers >= 0"):
            state = buffer.state_dict()
            buffer.load_state_dict({**state, "numbers": {**state["numbers"], "priorities": wrong}})
    assert plain(buffer.state_dict()) == before
    buffer.save(tmp_path / "b")
    path = tmp_path / "b" / "config.json"
    path.write_text(json.dumps({**config_of(path), "priorities": [1e308, 1.0, 0.0]}))
    with pytest.raises(RolloutDataError, match=str(tmp_path)):
        load_buffer(tmp_path / "b")


# Motions of a program


def motion(number: int, length: int) -> dict[str, Any]:
    rows = np.full((length, 2), float(number))
    return {
        "observation": {"state": rows, "id": np.full(length, number)},
        "action": rows,
        "motion_id": number,
    }


class Library:
    """An object that yields one mapping per motion, as a motion library of a simulator may do."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (motion(number, length) for number, length in ((7, 4), (3, 5)))


@pytest.mark.parametrize("kind", ["list", "iterator", "object", "columns of ids", "tensors"])
def test_motions_in_memory_are_loaded_with_their_ids(kind: str) -> None:
    listed = list(Library())
    value: Any = {"list": listed, "iterator": iter(listed), "object": Library()}.get(kind)
    if kind == "columns of ids":
        value = [
            {**item, "motion_id": np.full(len(item["action"]), item["motion_id"])}
            for item in listed
        ]
    if kind == "tensors":
        value = [
            {**item, "observation": torch.from_numpy(item["observation"]["state"])}
            for item in listed
        ]
    actual = load_expert_trajectories_from_motion_lib(value, seq_length=2, device="cpu")
    assert actual.motion_ids == [7, 3] and actual.lengths.tolist() == [4, 5]
    rows = actual.get_full_buffer()
    observation = rows["observation"] if kind == "tensors" else rows["observation"]["state"]
    assert (
        observation.dtype is torch.float32 and observation[:, 0].tolist() == [7.0] * 4 + [3.0] * 5
    )
    assert rows["action"].dtype is torch.float64
    if kind != "tensors":
        assert rows["observation"]["id"].flatten().tolist() == [7] * 4 + [3] * 5
    assert actual.sample(4)["observation"] is not None


def test_episodes_of_a_recording_are_loaded_as_motions(tmp_path: Path) -> None:
    from tests.files.recorded import record

    record(tmp_path, [4, 5, 3])
    recording = rollout_data.open(tmp_path)
    for value in (recording, list(recording)[:3], iter(recording)):
        actual = load_expert_trajectories_from_motion_lib(value, 2, "cpu")
        assert actual.motion_ids == recording.ids and actual.lengths.tolist() == [4, 5, 3]
    assert actual.get_full_buffer()["observation"][4:9, 1].tolist() == [0, 1, 2, 3, 4]


def test_a_mapper_receives_observations_of_motions_in_memory(tmp_path: Path) -> None:
    def mapper(observation: Any) -> dict[str, Any]:
        return {"first": observation["state"][:, :1]}

    actual = load_expert_trajectories_from_motion_lib(Library(), 2, "cpu", mapper)
    assert actual.get_full_buffer()["observation"]["first"].shape == (9, 1)
    with pytest.raises(TypeError, match="motion 0 has no observation"):
        load_expert_trajectories_from_motion_lib([{"action": np.zeros((4, 1))}], 2, "cpu", mapper)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (3, "must be an iterable of motions, got int"),
        ([], "motion_lib is empty"),
        ([1], "motion 0 of motion_lib must be a mapping, got int"),
    ],
)
def test_an_invalid_motion_raises_with_its_name(given: Any, text: str) -> None:
    with pytest.raises(
        UsageError,
        match=f"load_expert_trajectories_from_motion_lib: .*{text}",
    ):
        load_expert_trajectories_from_motion_lib(given)


def test_a_buffer_is_loaded_by_the_keyword_path(tmp_path: Path) -> None:
    load_expert_trajectories_from_motion_lib(Library(), 2).save(tmp_path / "b")
    actual = load_buffer(path=tmp_path / "b", device="cpu")
    assert isinstance(actual, TrajectoryDictBuffer) and actual.motion_ids == [7, 3]
    assert load_store(path=tmp_path / "b").motion_ids == [7, 3]
