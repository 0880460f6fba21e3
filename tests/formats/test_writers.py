"""Files in the formats of other systems are read back by our readers, in every field that they can
store.
"""

from __future__ import annotations

import json
import pickle
import re
import time
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

import rollout_data
from rollout_data import RolloutWriter
from rollout_data.blocks.block_header import read_header
from rollout_data.formats.block_episode_writer import OWN
from rollout_data.formats.registry import EXPORTS, FORMATS, WRITERS, writer_class
from storage.errors import UsageError

LENGTHS = [5, 1, 3, 12]
#: What makes a format take what it would refuse.
OPTIONS: dict[str, dict[str, Any]] = {"minari": {}, "d4rl": {}, "robomimic": {"next_obs": True}}


def record(
    folder: Path,
    is_nested: bool = True,
    with_reward: bool = True,
    dtype: torch.dtype = torch.float64,
    codecs: dict[str, str] | None = None,
) -> Any:
    """Record episodes whose values encode episode, frame and column: 1000 * episode + 10 * frame +
    column.
    """
    with RolloutWriter(
        folder, 1, durable=False, metadata={"frame_rate_hz": 30}, obs_disassemble_mapping=codecs
    ) as writer:
        for episode, length in enumerate(LENGTHS):
            for frame in range(length + 1):
                state = torch.tensor(
                    [[1000 * episode + 10 * frame + column for column in range(3)]], dtype=dtype
                )
                picture = torch.full((1, 4, 5, 3), (10 * episode + frame) % 256, dtype=torch.uint8)
                observation = {"state": state, "images": {"left": picture}} if is_nested else state
                if frame == length:
                    break
                is_last = frame == length - 1
                final = torch.tensor(
                    [[1000 * episode + 10 * (frame + 1) + column for column in range(3)]],
                    dtype=dtype,
                )
                following = {
                    "state": final,
                    "images": {"left": torch.full_like(picture, (10 * episode + frame + 1) % 256)},
                }
                ends = episode % 2 == 0
                writer.add(
                    observation=observation,
                    action=-state[:, :2].float(),
                    **(
                        {"reward": torch.tensor([100.0 * episode + frame + 0.25])}
                        if with_reward
                        else {}
                    ),
                    terminated=torch.tensor([is_last and ends]),
                    truncated=torch.tensor([is_last and not ends]),
                    **({"final_observation": following if is_nested else final} if is_last else {}),
                )
    return rollout_data.open(folder)


def write(recording: Any, path: Path, name: str, **options: Any) -> Any:
    writer = writer_class(name)(path, recording, recording.metadata, options)
    for episode in recording:
        if episode.id not in writer.written:
            writer.add(episode)
    writer.close()
    return writer


def arrays(fields: Any) -> dict[str, np.ndarray]:
    return (
        {"": fields}
        if not isinstance(fields, dict)
        else {name: np.asarray(value) for name, value in fields.items()}
    )


def same(mine: Any, theirs: Any) -> None:
    expected, actual = arrays(mine), arrays(theirs)
    if len(expected) == len(actual) == 1:
        expected, actual = {"": next(iter(expected.values()))}, {"": next(iter(actual.values()))}
    assert expected.keys() == actual.keys()
    for name, values in expected.items():
        assert np.array_equal(np.asarray(values), np.asarray(actual[name])), name
        assert np.asarray(values).dtype == np.asarray(actual[name]).dtype, name


@pytest.mark.parametrize("is_nested", [True, False], ids=["parts", "one array"])
@pytest.mark.parametrize("name", WRITERS)
def test_episodes_are_read_back_from_every_format(tmp_path, name, is_nested):
    if name not in FORMATS and name != "trajectory-folders":
        pytest.skip(f"{name} is not read yet")
    source = record(tmp_path / "ours", is_nested, dtype=torch.float32)
    target = tmp_path / ("file.hdf5" if name in ("robomimic", "isaaclab", "d4rl") else "folder")
    writer = write(source, target, name, **OPTIONS.get(name, {}))
    back = rollout_data.open(target)
    assert back.format == name and [len(item) for item in back] == LENGTHS
    for mine, theirs in zip(source, back, strict=True):
        if is_nested and name == "trajectory-folders":
            pictures = np.asarray(theirs.observation["images_left"]) * 255
            same(
                mine.observation,
                {
                    "state": theirs.observation["state"],
                    "images/left": pictures.round().astype(np.uint8),
                },
            )
        elif name == "lerobot" and is_nested:
            same(
                {item.replace("/", "."): rows for item, rows in mine.observation.items()},
                theirs.observation,
            )
        elif not (name == "d4rl" and is_nested):
            same(mine.observation, theirs.observation)
        same(mine.action, theirs.action)
        assert np.array_equal(
            np.asarray(mine.reward).reshape(-1), np.asarray(theirs.reward).reshape(-1)
        )
        if "how an episode ended" not in " ".join(writer.report) and name not in ("isaaclab",):
            assert (mine.terminated, mine.truncated) == (theirs.terminated, theirs.truncated)
        if "after the last step" not in " ".join(writer.report) and not (
            name == "d4rl" and is_nested
        ):
            same(mine.final_observation, theirs.final_observation)
    with pytest.raises(UsageError, match="Choose an empty target"):
        write(source, target, name, **OPTIONS.get(name, {}))


@pytest.mark.parametrize("name", WRITERS)
def test_an_interrupted_writer_is_resumed(tmp_path, name):
    source = record(tmp_path / "ours", dtype=torch.float32)
    target, whole = tmp_path / "stopped" / "set.hdf5", tmp_path / "whole" / "set.hdf5"
    writer = writer_class(name)(target, source, source.metadata, {})
    writer.add(source[0])
    writer.add(source[1])
    writer.close()
    time.sleep(1.1)  # HDF5 counts times in seconds
    again = write(source, target, name)
    assert again.written == {item.id for item in source}
    write(source, whole, name)
    files = [
        sorted(item for item in path.rglob("*") if item.is_file()) if path.is_dir() else [path]
        for path in (target, whole)
    ]
    assert [path.name for path in files[0]] == [path.name for path in files[1]]
    for item, other in zip(*files, strict=True):
        if item.suffix in (".hdf5", ".pickle"):
            # The last line of a note has the times of the files, and the name of the set in their
            # sizes.
            contents = [
                re.sub(rb'\n\{"files": .*', b"", file.read_bytes()) for file in (item, other)
            ]
            assert contents[0] == contents[1]
    assert not [path for path in tmp_path.rglob(".*") if path.parent.name != "ours"], (
        "nothing is left beside it"
    )


@pytest.mark.parametrize(
    "name", [name for name in WRITERS if not writer_class(name).is_laid_out_first]
)
def test_the_target_of_a_killed_writer_opens_with_its_complete_episodes(tmp_path, name):
    source = record(tmp_path / "ours", dtype=torch.float32)
    writer = writer_class(name)(tmp_path / "set.hdf5", source, source.metadata, {})
    for number in (0, 1):
        writer.add(source[number])
        back = rollout_data.open(tmp_path / "set.hdf5")
        assert [len(item) for item in back] == LENGTHS[: number + 1]
        assert all(
            np.array_equal(mine.action, theirs.action)
            for mine, theirs in zip(source, back, strict=False)
        )


def test_tasks_and_texts_are_read_back_from_rlinf_and_reshaped_fields_reported(tmp_path):
    with RolloutWriter(tmp_path / "ours", 1, durable=False) as recorder:
        for frame in range(3):
            notes = (
                {"episode": [{"task": "поднять куб"}], "terminated": [True]} if frame == 2 else {}
            )
            grid = torch.full((1, 2, 2), float(frame))
            recorder.add(
                observation=grid, action=grid, reward=grid[:, :1, 0], note=[[f"ü{frame}"]], **notes
            )
    source = rollout_data.open(tmp_path / "ours")
    report = write(source, tmp_path / "rlinf", "rlinf").report
    (episode,) = rollout_data.open(tmp_path / "rlinf")
    assert (episode.task, episode["forward_inputs/note"]) == ("поднять куб", ["ü0", "ü1", "ü2"])
    assert np.array_equal(episode.action, source[0].action) and any(
        "rows of one" in item for item in report
    )
    clips = rollout_data.open(
        Path(__file__).parents[1] / "data" / "formats" / "motion_npz" / "clips"
    )
    write(clips, tmp_path / "clips", "rlinf")  # observations only
    for mine, theirs in zip(clips, rollout_data.open(tmp_path / "clips"), strict=True):
        same(mine.observation, theirs.observation)
    report = write(source, tmp_path / "folders", "trajectory-folders").report
    assert {"'observation' is flattened", "'action' is flattened"} <= report.keys()


@pytest.mark.parametrize("way", [["trajectory-folders"], [OWN, "trajectory-folders"]])
def test_coded_components_are_written_as_the_bytes_that_were_read(tmp_path, sample, way):
    source = latest = sample("components")
    for step, name in enumerate(way):
        rollout_data.convert(latest, latest := tmp_path / str(step), to=name, progress=False)
    chunks = [
        [pickle.loads(path.read_bytes()) for path in sorted(item.rglob("traj_*"))]
        for item in (source, latest)
    ]
    mine, theirs = (np.concatenate([chunk["obs_depth"] for chunk in item]) for item in chunks)
    assert theirs.dtype == np.uint8 and np.array_equal(mine, theirs)
    about = json.loads((latest / "metadata.json").read_text())
    assert about["obs_disassemble_mapping"] == {"depth": "normalized_image"}


@pytest.mark.parametrize("victim", [1, 3])
@pytest.mark.parametrize("name", [OWN, *WRITERS, *EXPORTS])
def test_an_episode_that_cannot_be_read_is_left_out_and_the_rest_is_finished(
    tmp_path, name, victim
):
    if name in EXPORTS:
        pytest.importorskip("rerun", reason="its tests need the package rerun-sdk")
    record(tmp_path / "ours", dtype=torch.float32, codecs={"images/left": "lz4"})
    (block,) = (tmp_path / "ours").glob("*.h5")
    chunks = read_header(block).chunks["data"]["observation/images/left"]
    _, end = chunks.byte_ranges(
        np.array([sum(LENGTHS[:victim])]), np.array([sum(LENGTHS[: victim + 1])])
    )
    content = bytearray(block.read_bytes())
    content[int(end[0]) - 1] ^= 0xFF
    block.write_bytes(content)
    source, target = rollout_data.open(tmp_path / "ours"), tmp_path / "made" / "set.hdf5"
    kept = [item for number, item in enumerate(source) if number != victim]
    done = rollout_data.convert(source, target, to=name, progress=False)
    assert done.num_episodes == len(kept)
    assert [
        f"of trajectory {victim}" in str(problem) and "images/left" in str(problem)
        for problem in done.problems
    ] == [True]
    assert not list(target.parent.glob(".*")), "nothing is left beside it"
    if name not in EXPORTS:
        back = rollout_data.open(target)
        assert not back.problems and [len(item) for item in back] == [len(item) for item in kept]
        for mine, theirs in zip(kept, back, strict=True):
            assert np.array_equal(mine.action, theirs.action)
    repeated = rollout_data.convert(source, target, to=name, progress=False)
    assert (repeated.num_episodes, repeated.num_present) == (len(kept), len(kept))
    assert [str(problem) for problem in repeated.problems] == [
        str(problem) for problem in done.problems
    ]
    again = rollout_data.convert(
        source.select([item.id for item in kept]), tmp_path / "again.hdf5", to=name, progress=False
    )
    assert again.num_episodes == len(kept) and not again.problems


def test_a_missing_required_field_raises_or_is_reported(tmp_path):
    source = record(tmp_path / "ours", with_reward=False)
    for name in ("minari", "d4rl", "trajectory-folders"):
        with pytest.raises(UsageError, match="missing_reward"):
            write(source, tmp_path / name, name)
        report = write(source, tmp_path / name, name, missing_reward=0.0).report
        assert report["rewards are made up by missing_reward"] == [item.id for item in source]
    with (
        h5py.File(tmp_path / "robomimic.hdf5")
        if write(source, tmp_path / "robomimic.hdf5", "robomimic")
        else None as file
    ):
        assert (
            "rewards" not in file["data/demo_0"]
            and json.loads(file["data"].attrs["env_args"])["env_kwargs"] == {}
        )


def test_colliding_names_of_a_trajectory_folder_raise(tmp_path):
    with RolloutWriter(tmp_path / "ours", 1, durable=False) as recorder:
        row = torch.ones(1, 2)
        recorder.add(
            observation={"a": {"b": row}, "a_b": 2 * row},
            action=row,
            reward=row[:, 0],
            terminated=torch.ones(1).bool(),
        )
    with pytest.raises(UsageError, match="several observations are called 'a_b'"):
        write(rollout_data.open(tmp_path / "ours"), tmp_path / "folders", "trajectory-folders")


def record_more(folder: Path, **fields: Any) -> Any:
    """Record an episode of three steps with further fields."""
    with RolloutWriter(folder, 1, durable=False) as writer:
        for frame in range(3):
            state, is_last = torch.full((1, 2), float(frame)), torch.tensor([frame == 2])
            final = {"final_observation": {"state": state + 1}} if frame == 2 else {}
            ends = {
                "action": state,
                "reward": state[:, 0],
                "terminated": is_last,
                **final,
                **fields,
            }
            writer.add(observation={"state": state}, **ends)
    return rollout_data.open(folder)


def test_extra_fields_keep_their_names_in_d4rl_or_the_report_has_their_new_names(tmp_path):
    state = torch.ones(1, 2)
    source = record_more(tmp_path / "ours", qvel=state, value=state.bfloat16())
    report = write(source, tmp_path / "x.hdf5", "d4rl").report
    write(rollout_data.open(tmp_path / "x.hdf5"), tmp_path / "again.hdf5", "d4rl")
    for name in ("x", "again"):
        assert {"infos/qvel", "infos/value"} <= set(
            rollout_data.open(tmp_path / f"{name}.hdf5")[0].keys()
        )
    for what in ("other fields are called infos/<name>", "bfloat16 is written as float32"):
        assert report[what] == [source[0].id]


def test_two_fields_with_the_same_dataset_raise(tmp_path):
    arm = {"arm": torch.ones(1, 2)}
    source = record_more(tmp_path / "ours", action=arm, action_dict=arm)
    with pytest.raises(UsageError, match=r"both become dataset 'action_dict/arm'"):
        write(source, tmp_path / "x.hdf5", "robomimic")


def test_success_and_the_dtype_of_rewards_are_read_back(tmp_path):
    source = record(tmp_path / "ours", dtype=torch.float32)
    for name in ("robomimic", "minari"):
        write(source, tmp_path / f"{name}.hdf5", name)
        assert rollout_data.open(tmp_path / f"{name}.hdf5")[0].reward.dtype == np.float32
    noted = record_more(tmp_path / "noted", episode={"success": True})
    write(noted, tmp_path / "noted.hdf5", "robomimic")
    assert rollout_data.open(tmp_path / "noted.hdf5")[0].success is True
