"""The report of a conversion lists each difference between the copy and its source."""

from __future__ import annotations

import shutil
import signal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rollout_data
from rollout_data import RolloutDataset, RolloutWriter
from storage.errors import UsageError
from tests.recordings.conversions import Kills, in_child


def convert(source: Any, target: Path, name: str, **options: Any) -> dict[str, Any]:
    return dict(rollout_data.convert(source, target, name, progress=False, **options).changes)


def record(folder: Path, num_episodes: int = 2) -> rollout_data.Recording:
    """Record episodes of three steps whose action has two parts, with a camera and a reward of one term."""
    with RolloutWriter(folder, 1, durable=False) as writer:
        for frame in range(3 * num_episodes):
            writer.add(
                observation={
                    "state": np.full((1, 2), frame, np.float32),
                    "eye": np.full((1, 4, 4, 3), frame, np.uint8),
                },
                action={
                    "arm": np.full((1, 2), frame / 3, np.float32),
                    "grip": np.array([frame % 2 == 0]),
                },
                reward=np.full((1, 1), frame, np.float32),
                terminated=[frame % 3 == 2],
                privileged_observation={"mass": np.full((1, 2), frame, np.float32)},
            )
    return rollout_data.open(folder)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("d4rl", "the parts of the action are joined: action/arm, action/grip"),
        ("robomimic", "the parts of the action are joined as `actions`: action/arm, action/grip"),
        ("isaaclab", "the parts of the action are joined as `actions`: action/arm, action/grip"),
    ],
)
def test_joined_actions_are_named(tmp_path, name, change):
    source = record(tmp_path / "ours")
    changes = convert(source, tmp_path / "x.hdf5", name)
    assert changes[change] == source.ids
    assert rollout_data.open(tmp_path / "x.hdf5")[0].action.shape == (3, 3)


@pytest.mark.parametrize("version", ["v3.0", "v2.1"])
def test_renamed_fields_of_lerobot_are_in_the_changes(tmp_path, version):
    source = record(tmp_path / "ours")
    changes = convert(source, tmp_path / "set", "lerobot", fps=10, version=version)
    back = rollout_data.open(tmp_path / "set")
    renamed = {
        "observation/eye": "observation/images.eye",
        "privileged_observation/mass": "privileged_observation.mass",
    }
    for name in source.schema:
        other = renamed.get(name, name)
        assert (f"field {name!r} is called {other!r}" in changes) == (name != other)
        np.testing.assert_array_equal(source[1][name].reshape(-1), back[1][other].reshape(-1))


@pytest.mark.parametrize(
    ("name", "file", "shapes"),
    [
        ("lerobot", "set", {"reward": (), "action/grip": (1,)}),
        ("robomimic", "x.hdf5", {"reward": ()}),
        ("isaaclab", "x.hdf5", {"reward": ()}),
        ("d4rl", "x.hdf5", {"reward": ()}),
        ("rollout-data", "copy", {}),
    ],
)
def test_scalars_that_become_vectors_and_the_reverse_are_in_the_changes(
    tmp_path, name, file, shapes
):
    source = record(tmp_path / "ours")
    changes = convert(source, tmp_path / file, name, **({"fps": 10} if name == "lerobot" else {}))
    back = rollout_data.open(tmp_path / file)
    own = {field: source.schema[field].shape for field in ("reward", "action/grip")}
    reshaped = {
        f"field {field!r} has the shape {list(shape)}, not {list(own[field])}"
        for field, shape in shapes.items()
    }
    assert {change for change in changes if "shape" in change} == reshaped
    for field, shape in shapes.items():
        assert back.schema[field].shape == shape


def record_open_end(folder: Path) -> rollout_data.Recording:
    """Record an episode that ends, and a truncated recording of an episode."""
    with RolloutWriter(folder, 1, durable=False) as writer:
        for frame in range(7):
            row = np.full((1, 2), frame, np.float32)
            final = {"final_observation": row + 100} if frame == 2 else {}
            writer.add(
                observation=row, action=row, reward=row[:, 0], terminated=[frame == 2], **final
            )
    return rollout_data.open(folder)


def test_an_open_end_with_a_final_observation_stays_open_in_our_format(tmp_path):
    convert(record_open_end(tmp_path / "ours"), tmp_path / "minari", "minari")
    source = rollout_data.open(tmp_path / "minari")
    assert [(episode.terminated, episode.truncated) for episode in source] == [
        (True, False),
        (False, False),
    ]
    assert convert(source, tmp_path / "copy", "rollout-data") == {}
    convert(tmp_path / "copy", tmp_path / "second", "rollout-data")
    for name in ("copy", "second"):
        copy = rollout_data.open(tmp_path / name)
        assert (
            copy.table["ends"].tolist() == source.table["ends"].tolist() == ["terminated", "open"]
        )
        np.testing.assert_array_equal(copy[1].final_observation, source[1].final_observation)
        assert [bool(item) for item in ends_of(tmp_path / name)] == [
            bool(item) for item in ends_of(tmp_path / "minari")
        ]
    convert(tmp_path / "second", tmp_path / "back", "minari")
    back = rollout_data.open(tmp_path / "back")
    assert [(episode.terminated, episode.truncated) for episode in back] == [
        (True, False),
        (False, False),
    ]


def ends_before_and_after_growth(folder: Path) -> tuple[Path, Path]:
    """Convert an episode with an end, then one that was cut off: the copy before, and the grown copy."""
    source = record_open_end(folder / "ours")
    convert(source[:1], folder / "minari", "minari", dataset_id="a/b")
    convert(folder / "minari", folder / "copy", "rollout-data")
    before = Path(shutil.copytree(folder / "copy", folder / "before"))
    shutil.rmtree(folder / "minari")
    convert(source, folder / "minari", "minari", dataset_id="a/b")
    return before, folder / "copy"


def test_an_open_end_is_added_to_a_copy_that_had_none(tmp_path):
    _, copy = ends_before_and_after_growth(tmp_path)
    watched = rollout_data.open(copy)
    assert convert(tmp_path / "minari", copy, "rollout-data") == {}
    assert watched.table["ends"].tolist() == ["terminated"]
    watched.refresh()
    assert watched.table["ends"].tolist() == ["terminated", "open"]
    assert rollout_data.open(copy).table["ends"].tolist() == ["terminated", "open"]
    again = rollout_data.convert(tmp_path / "minari", copy, progress=False)
    assert (again.num_episodes, again.num_present) == (2, 2)


def test_an_open_end_is_added_to_a_copy_after_a_kill_around_the_mark(tmp_path):
    before, copy = ends_before_and_after_growth(tmp_path)

    def grow(kills: Kills) -> None:
        with kills.watching():
            convert(tmp_path / "minari", copy, "rollout-data")

    counted = Kills()
    grow(counted)
    marked = counted.calls.index("replace metadata.json")
    for number in (*range(marked - 3, marked + 3), len(counted.calls) * 3 // 4):
        shutil.rmtree(copy)
        shutil.copytree(before, copy)
        assert in_child(partial(grow, Kills(number))) == -signal.SIGKILL
        convert(tmp_path / "minari", copy, "rollout-data")
        assert rollout_data.open(copy).table["ends"].tolist() == ["terminated", "open"], (
            counted.calls[number]
        )


def test_ends_are_the_same_without_metadata(tmp_path):
    convert(record_open_end(tmp_path / "ours"), tmp_path / "minari", "minari")
    convert(tmp_path / "minari", tmp_path / "copy", "rollout-data")
    (tmp_path / "copy" / "metadata.json").unlink()
    rollout_data.merge([tmp_path / "copy"], tmp_path / "merged")
    for name in ("copy", "merged"):
        assert rollout_data.open(tmp_path / name).table["ends"].tolist() == ["terminated", "open"]


def test_ends_of_a_block_with_a_damaged_note_are_unknown(tmp_path):
    convert(record_open_end(tmp_path / "ours"), tmp_path / "minari", "minari")
    convert(tmp_path / "minari", tmp_path / "copy", "rollout-data")
    (block,) = (tmp_path / "copy").glob("*.h5")
    data = block.read_bytes()
    block.write_bytes(data.replace(b'"ends": "open"', b'"ends": "oven"'))
    copy = rollout_data.open(tmp_path / "copy")
    assert copy.table["ends"].tolist() == ["terminated", "unknown"]
    assert any("annotation" in str(problem) for problem in copy.problems)


def test_a_pushed_copy_has_the_ends_of_a_later_copy(tmp_path):
    _, copy = ends_before_and_after_growth(tmp_path)
    url = f"memory://later-ends/{tmp_path.name}"
    rollout_data.push(copy, url)
    convert(tmp_path / "minari", copy, "rollout-data")
    rollout_data.push(copy, url)
    assert rollout_data.open(url).table["ends"].tolist() == ["terminated", "open"]


def ends_of(path: Any) -> list[bool]:
    """Return whether each end that a stream of a recording gives is a timeout."""
    return [bool(step.timeout) for step in RolloutDataset(path, num_envs=1) if bool(step.done)]


def test_unknown_and_open_ends_are_equal_at_a_url(tmp_path):
    source = record_open_end(tmp_path / "ours")
    convert(source, tmp_path / "minari", "minari")
    convert(tmp_path / "minari", tmp_path / "open", "rollout-data")
    convert(source, tmp_path / "x.hdf5", "robomimic")
    convert(tmp_path / "x.hdf5", tmp_path / "unknown", "rollout-data")
    for name, ends in (("open", ["terminated", "open"]), ("unknown", ["unknown", "open"])):
        url = f"memory://ends/{tmp_path.name}/{name}"
        rollout_data.push(tmp_path / name, url)
        assert rollout_data.open(url).table["ends"].tolist() == ends
        assert rollout_data.open(tmp_path / name).table["ends"].tolist() == ends
        assert ends_of(url) == ends_of(tmp_path / name)


def record_with_notes(folder: Path, metadata: dict[str, Any], task: str) -> Path:
    """Record an episode of three steps."""
    with RolloutWriter(folder, 1, metadata=metadata, durable=False) as writer:
        for frame in range(3):
            row = np.full((1, 2), frame, np.float32)
            note = {"episode": [{"task": task, "success": True}]} if frame == 2 else {}
            writer.add(
                observation=row, action=row, reward=row[:, 0], terminated=[frame == 2], **note
            )
    return folder


def test_a_task_stored_twice_is_stored_once_in_the_copy(tmp_path):
    source = record_with_notes(tmp_path / "ours", {}, "open the door")
    convert(source, tmp_path / "set.hdf5", "robomimic")
    convert(tmp_path / "set.hdf5", tmp_path / "copy", "rollout-data")
    episode = rollout_data.open(tmp_path / "copy")[0]
    assert (episode.task, episode.success) == ("open the door", True)
    assert [name for name in episode.metadata if name.startswith("recorded_")] == []


def test_a_large_task_leaves_a_robomimic_file_that_opens(tmp_path):
    source = rollout_data.open(record_with_notes(tmp_path / "ours", {}, "open " * 200_000))
    changes = convert(source, tmp_path / "set.hdf5", "robomimic")
    assert [change for change in changes if change.endswith("is left out: it is too large")]
    copy = rollout_data.open(tmp_path / "set.hdf5")
    assert (copy.problems, copy[0].length, copy[0].task) == ([], 3, source[0].task)


@pytest.mark.parametrize("name", ["rollout-data", "trajectory-folders"])
def test_metadata_beyond_the_limits_of_readers_are_left_out_of_a_copy(tmp_path, name):
    pq = pytest.importorskip("pyarrow.parquet")
    pa = pytest.importorskip("pyarrow")
    source = record_with_notes(tmp_path / "ours", {"frame_rate_hz": 20}, "open")
    convert(source, tmp_path / "set", "lerobot")
    texts = pa.DictionaryArray.from_arrays(
        pa.array([0] * 40, pa.int32()), pa.array(["x" * (1 << 20)])
    )
    pq.write_table(
        pa.table({"task_index": range(40), "task": texts}),
        tmp_path / "set" / "meta" / "tasks.parquet",
    )
    assert len(rollout_data.open(tmp_path / "set").metadata["tasks"]) == 40
    changes = convert(tmp_path / "set", tmp_path / "copy", name)
    assert changes["metadata 'tasks' of the recording are left out: they are too large"] == ["0"]
    copy = rollout_data.open(tmp_path / "copy")
    assert (copy.problems, copy.metadata["fps"]) == ([], 20)
    assert sum(path.stat().st_size for path in (tmp_path / "copy").iterdir()) < 1 << 20


def test_metadata_beyond_the_limits_of_readers_raise_in_a_writer(tmp_path):
    with pytest.raises(UsageError, match=r"the metadata of .* exceed 16777216 bytes as JSON"):
        record_with_notes(tmp_path / "ours", {"notes": "x" * (17 << 20)}, "open")
    assert list((tmp_path / "ours").glob("*.h5")) == []


@pytest.mark.parametrize(
    ("order", "stated"), [("unknown", "wxyz"), ("mixed", "wxyz"), ("xyzw", None), ("wxyz", None)]
)
def test_quaternions_of_another_order_than_an_isaac_lab_file_states_are_named(
    tmp_path, order, stated
):
    with RolloutWriter(
        tmp_path / "own", 1, durable=False, metadata={"quaternion_order": order}
    ) as writer:
        writer.add(observation=[[0.0, 0.0, 0.0, 1.0]], action=[[0.0]], done=[True])
    conversion = rollout_data.convert(tmp_path / "own", tmp_path / "new.hdf5", to="isaaclab")
    named = [change for change in conversion.changes if "quaternions" in change]
    assert named == (
        [f"quaternions of the order {order!r} stand in a file that states {stated!r}"]
        if stated
        else []
    )
    recording = rollout_data.open(tmp_path / "new.hdf5", format="isaaclab")
    assert recording.metadata["quaternion_order"] == (stated or order)
