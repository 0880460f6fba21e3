"""Texts of an observation also exist after the last step, and are kept in our format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import rollout_data
from rollout_data import RolloutWriter


def spoken(root: Path, kind: str = "hdf5") -> Path:
    """Write a Minari dataset of two episodes whose observations have a number and a Text space."""
    data = root / "lab" / "text-v0" / "data"
    data.mkdir(parents=True)
    text = {"type": "Text", "max_length": 9, "min_length": 1, "charset": "w0123456789"}
    box = {"type": "Box", "dtype": "float32", "shape": [1], "low": [0], "high": [9]}
    about: dict[str, Any] = {"total_episodes": 2, "total_steps": 6, "data_format": kind}
    about["observation_space"] = json.dumps(
        {"type": "Dict", "subspaces": {"at": box, "word": text}}
    )
    about["action_space"] = json.dumps({"type": "Discrete", "n": 2, "start": 0, "dtype": "int64"})
    (data / "metadata.json").write_text(json.dumps(about))
    words = [[f"w{episode}{frame}" for frame in range(4)] for episode in range(2)]
    places, is_last = np.arange(4, dtype=np.float32)[:, None], [False, False, True]
    if kind == "hdf5":
        with h5py.File(data / "main_data.hdf5", "w") as file:
            for number in range(2):
                group = file.create_group(f"episode_{number}")
                group.attrs.update(id=number, total_steps=3)
                group["observations/at"] = places
                group.create_dataset(
                    "observations/word", data=words[number], dtype=h5py.string_dtype()
                )
                group["actions"], group["rewards"] = np.arange(3), np.ones(3)
                group["terminations"], group["truncations"] = is_last, [False] * 3
        return data.parent
    pyarrow = pytest.importorskip("pyarrow", reason="tables need the extra formats")
    parquet = pytest.importorskip("pyarrow.parquet")
    for number in range(2):
        (data / str(number)).mkdir()
        (data / str(number) / "metadata.json").write_text(
            json.dumps({"id": number, "total_steps": 3})
        )
        observed = [
            {"at": [float(at)], "word": word}
            for at, word in zip(range(4), words[number], strict=True)
        ]
        rows = {"observations": observed, "actions": [0, 1, 2, 0], "rewards": [1.0] * 4}
        ends = {"terminations": [*is_last, False], "truncations": [False] * 4}
        parquet.write_table(pyarrow.table({**rows, **ends}), data / str(number) / "part-0.parquet")
    return data.parent


@pytest.mark.parametrize("kind", ["hdf5", "parquet"])
def test_the_final_text_of_a_text_space_is_read_and_stays_in_our_format(tmp_path, kind):
    source = rollout_data.open(spoken(tmp_path, kind))
    done = rollout_data.convert(source, tmp_path / "own", progress=False)
    for recording in (source, rollout_data.open(tmp_path / "own")):
        for number, episode in enumerate(recording):
            assert episode["observation/word"] == [f"w{number}0", f"w{number}1", f"w{number}2"]
            assert episode.final_observation["word"] == f"w{number}3"
            assert episode.final_observation["at"].tolist() == [3]
    assert (
        not [change for change in done.changes if "word" in change or "final" in change]
        and not done.problems
    )


@pytest.mark.parametrize("name", ["robomimic", "rlinf", "isaaclab", "minari", "d4rl"])
def test_formats_without_final_texts_report_their_omission(tmp_path, name):
    source = rollout_data.open(spoken(tmp_path))
    target = tmp_path / ("x.hdf5" if name in ("robomimic", "isaaclab", "d4rl") else "x")
    changes = " ".join(rollout_data.convert(source, target, name, progress=False).changes)
    assert (
        "texts of the final observation" in changes
        or "texts of steps" in changes
        or "texts and metadata" in changes
    )


def test_nested_texts_are_recorded_with_their_final_texts(tmp_path):
    row = np.ones((2, 3), np.float32)
    with RolloutWriter(tmp_path / "a", 2, durable=False) as writer:
        for frame in range(3):
            observation = {"at": row, "said": {"word": [f"a{frame}", f"b{frame}"]}}
            final = {"at": row, "said": {"word": ["a3", "b3"]}}
            end = {"final_observation": final} if frame == 2 else {}
            writer.add(
                observation=observation, action=row, terminated=[frame == 2, frame == 2], **end
            )
    first, second = rollout_data.open(tmp_path / "a")
    assert (
        first["observation/said/word"] == ["a0", "a1", "a2"]
        and first.final_observation["said/word"] == "a3"
    )
    assert (
        second["observation/said/word"] == ["b0", "b1", "b2"]
        and second.final_observation["said/word"] == "b3"
    )


def test_texts_that_some_episodes_lack_are_left_out_of_our_format_and_named(tmp_path):
    with h5py.File(tmp_path / "x.hdf5", "w") as file:
        for number in range(2):
            demo = file.create_group(f"data/demo_{number}")
            demo["actions"] = demo["obs/low"] = np.ones((3, 2), np.float32)
            if number:
                demo["words"] = ["a", "b", "c"]
    done = rollout_data.convert(tmp_path / "x.hdf5", tmp_path / "own", progress=False)
    assert done.changes["field 'words' is left out: some episodes do not have it"] == ["demo_1"]
    assert [episode.texts for episode in rollout_data.open(tmp_path / "own")] == [
        (),
        (),
    ] and not done.problems
