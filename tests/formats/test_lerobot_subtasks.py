"""Subtasks of LeRobot sets: numbers of the frames, and the table of their texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow", reason="the extra `formats` is missing")

import pyarrow as pa
import pyarrow.parquet as pq

import rollout_data
from tests.formats.lerobot_sets import LeRobotSet, feature

LENGTHS = [4, 1, 3]
TABLE = "meta/subtasks.parquet"


def subtask_set(folder: Path, table: dict[int, str], text_type: Any) -> Path:
    """Write a set with a table of subtasks and the number of a subtask for each frame."""
    made = LeRobotSet(folder, LENGTHS)
    numbers = list(table)
    for episode, rows in enumerate(made.tables):
        column = [numbers[(episode + frame) % len(numbers)] for frame in range(len(rows))]
        made.tables[episode] = rows.append_column("subtask_index", pa.array(column, pa.int64()))
    made.info["features"]["subtask_index"] = feature("int64", [1])
    made.write()
    texts = pa.array(list(table.values()), text_type)
    pq.write_table(
        pa.table({"subtask_index": pa.array(numbers, pa.int64()), "subtask": texts}), folder / TABLE
    )
    return folder


def numbers_of_set(folder: Path) -> list[int]:
    files = sorted((folder / "data").rglob("*.parquet"))
    return [number for file in files for number in pq.read_table(file)["subtask_index"].to_pylist()]


@pytest.mark.parametrize("version", ["v3.0", "v2.1"])
@pytest.mark.parametrize("is_through_ours", [False, True])
def test_the_table_of_subtasks_keeps_its_types_and_values(
    tmp_path: Path, version: str, is_through_ours: bool
) -> None:
    table = {2: "lift", 0: "reach", 5: "öffne", 7: "in no frame"}
    source = subtask_set(tmp_path / "source", table, pa.large_string())
    between = source
    if is_through_ours:
        between = tmp_path / "own"
        assert rollout_data.convert(source, between, progress=False).changes == {}
    done = rollout_data.convert(
        between, tmp_path / "set", "lerobot", version=version, progress=False
    )
    assert not [change for change in done.changes if "subtask" in change or "text" in change]
    assert pq.read_table(tmp_path / "set" / TABLE).equals(pq.read_table(source / TABLE))
    assert numbers_of_set(tmp_path / "set") == numbers_of_set(source)


def test_windows_and_streams_have_the_same_subtasks_in_a_set_and_in_our_copy(
    tmp_path: Path,
) -> None:
    table = {0: "reach", 1: "lift", 2: "place"}
    source = subtask_set(tmp_path / "source", table, pa.string())
    rollout_data.convert(source, tmp_path / "own", progress=False)
    expected = [table[number] for number in numbers_of_set(source)]
    assert [
        text for episode in rollout_data.open(source) for text in episode["subtask"]
    ] == expected
    for path in (source, tmp_path / "own"):
        windows = rollout_data.WindowDataset(path, length=1, texts=True)
        assert [
            windows.texts[int(windows[place]["subtask"])] for place in range(len(windows))
        ] == expected
        stream = rollout_data.RolloutDataset(path, 1, texts=True)
        numbers = [int(stream.get_batch().extras["subtask"]) for _ in range(len(expected))]
        assert [stream.texts[number] for number in numbers] == expected


def test_merged_sets_get_a_joint_table_of_subtasks_and_keep_their_texts(tmp_path: Path) -> None:
    first = subtask_set(tmp_path / "first", {0: "reach", 1: "lift"}, pa.string())
    second = subtask_set(tmp_path / "second", {0: "lift", 1: "place"}, pa.string())
    rollout_data.merge([first, second], tmp_path / "merged", progress=False)
    expected = [
        episode["subtask"] for path in (first, second) for episode in rollout_data.open(path)
    ]
    merged = rollout_data.open(tmp_path / "merged")
    assert sorted(episode["subtask"] for episode in merged) == sorted(expected)
    done = rollout_data.convert(merged, tmp_path / "set", "lerobot", progress=False)
    assert "'subtask_index' is recomputed" in done.changes
    written = rollout_data.open(tmp_path / "set")
    assert [episode["subtask"] for episode in written] == [episode["subtask"] for episode in merged]
    assert sorted(written.metadata["subtasks"].values()) == ["lift", "place", "reach"]


def test_a_damaged_table_of_subtasks_is_a_problem_and_the_numbers_are_read(tmp_path: Path) -> None:
    source = subtask_set(tmp_path / "source", {0: "reach", 1: "lift"}, pa.string())
    (source / TABLE).write_bytes(b"no table")
    recording = rollout_data.open(source)
    assert [problem.kind for problem in recording.problems] == ["metadata"]
    assert recording[0]["subtask_index"].tolist() == [0, 1, 0, 1]
    assert "subtask" not in recording[0]
