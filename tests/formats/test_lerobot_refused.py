"""LeRobot datasets: an index that contradicts the rows, and malicious files."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pa = pytest.importorskip("pyarrow", reason="the extra `formats` is missing")
import pyarrow.parquet as pq  # noqa: E402

import rollout_data  # noqa: E402
from storage.errors import CorruptFileError, DataFileError, ForeignFileError, UnsafeFileError  # noqa: E402
from tests.formats.lerobot_sets import FIRST, TASKS, LeRobotSet, check, feature  # noqa: E402
from tests.formats.values import state  # noqa: E402

LENGTHS = [3, 1, 4, 2]


def entry(number: int, **changes: Any) -> Callable[[LeRobotSet], None]:
    def change(made: LeRobotSet) -> None:
        made.entries[number] |= {
            name.replace("data_", "data/"): value for name, value in changes.items()
        }

    return change


def column(number: int, name: str, values: Any) -> Callable[[LeRobotSet], None]:
    def change(made: LeRobotSet) -> None:
        table = made.tables[number]
        made.tables[number] = table.set_column(
            table.column_names.index(name), name, pa.array(values)
        )

    return change


def told(**changes: Any) -> Callable[[LeRobotSet], None]:
    return lambda made: made.info.update(changes)


WRONG_3 = {
    "old file at a roll-over": (entry(2, data_file_index=0), "Episode 2"),
    "scrambled ranges": (entry(1, dataset_from_index=4, dataset_to_index=5), "Episode 1"),
    "length and range": (entry(1, length=2), "states length 2, but frames 3:4"),
    "one range over another": (entry(1, length=2, dataset_to_index=5), "Episode 2"),
    "an episode twice": (entry(2, episode_index=1), "index"),
    "a gap in the numbers": (entry(3, episode_index=5), "Episode 3"),
    "wrong position": (column(2, "index", [5, 6, 7, 8]), "Episode 2"),
    "frames in another order": (column(2, "frame_index", [0, 2, 1, 3]), "Episode 2"),
    "frames from 1 on": (column(2, "frame_index", [1, 2, 3, 4]), "Episode 2"),
    "rows of another episode": (column(3, "episode_index", [7, 7]), "Episode 7"),
    "number of episodes": (told(total_episodes=5), "total_episodes 4, expected 5"),
    "number of frames": (told(total_frames=11), "total_frames 10, expected 11"),
    "no number": (entry(1, data_file_index=None), "data/file_index"),
}


@pytest.mark.parametrize("name", WRONG_3)
def test_an_index_of_version_3_that_contradicts_its_data_is_refused_or_rebuilt(
    tmp_path: Path, name: str
) -> None:
    change, named = WRONG_3[name]
    made = LeRobotSet(tmp_path / "set", LENGTHS, files=[0, 0, 1, 1])
    change(made)
    path = made.write(1000)
    with pytest.raises(CorruptFileError, match=named) as caught:
        rollout_data.open(path)
    assert 'on_bad_index="rebuild"' in str(caught.value)
    recording = rollout_data.open(path, on_bad_index="rebuild")
    assert recording.problems
    if name == "frames from 1 on":
        check(recording, LENGTHS, [0, 1, 3])
    elif name == "rows of another episode":
        assert [episode.id for episode in recording] == ["0", "1", "2", "7"]
    elif name == "frames in another order":
        np.testing.assert_array_equal(
            recording[2].observation["state"], state(FIRST + 2, 4)[[0, 2, 1, 3]]
        )
    else:
        check(recording, LENGTHS)


WRONG_2 = {
    "a longer index": (entry(1, length=2), "Episode 1"),
    "a gap in the numbers": (entry(3, episode_index=5), "Episode 3"),
    "an episode twice": (entry(2, episode_index=1), "index"),
    "rows of another episode": (column(2, "episode_index", [3, 3, 3, 3]), "Episode 3"),
    "number of episodes": (told(total_episodes=3), "total_episodes 4, expected 3"),
}


@pytest.mark.parametrize("name", WRONG_2)
def test_an_index_of_version_2_that_contradicts_its_data_is_refused(
    tmp_path: Path, name: str
) -> None:
    change, named = WRONG_2[name]
    made = LeRobotSet(tmp_path / "set", LENGTHS, "v2.1")
    del made.info["total_frames"]
    change(made)
    with pytest.raises(CorruptFileError, match=named):
        rollout_data.open(made.write())
    recording = rollout_data.open(tmp_path / "set", on_bad_index="rebuild")
    assert recording.problems
    assert {"0", "1"} <= {episode.id for episode in recording}


def test_orphan_rows_are_refused_and_left_out_when_the_index_is_rebuilt(tmp_path: Path) -> None:
    made = LeRobotSet(tmp_path / "set", LENGTHS)
    path = made.write()
    orphan = LeRobotSet(tmp_path / "other", [3, 5]).tables[1]
    pq.write_table(orphan, path / "data" / "chunk-000" / "file-001.parquet")
    with pytest.raises(CorruptFileError, match="Episode 1"):
        rollout_data.open(path)
    recording = rollout_data.open(path, on_bad_index="rebuild")
    check(recording, LENGTHS)
    assert any("not in the index are left out" in str(problem) for problem in recording.problems)


def test_a_set_without_an_index_can_be_rebuilt(tmp_path: Path) -> None:
    path = LeRobotSet(tmp_path / "set", LENGTHS, files=[0, 0, 1, 1]).write()
    shutil.rmtree(path / "meta" / "episodes")
    with pytest.raises(CorruptFileError, match="rebuild"):
        rollout_data.open(path)
    check(rollout_data.open(path, on_bad_index="rebuild"), LENGTHS)


@pytest.mark.parametrize(("version", "name"), [("v3.0", "tasks.parquet"), ("v2.1", "tasks.jsonl")])
def test_tasks_come_from_the_index_if_their_file_is_missing(
    tmp_path: Path, version: str, name: str
) -> None:
    path = LeRobotSet(tmp_path / "set", LENGTHS, version).write()
    (path / "meta" / name).unlink()
    recording = rollout_data.open(path)
    check(recording, LENGTHS)
    assert name in str(recording.problems[0])


@pytest.mark.parametrize("damage", ["missing", "cut", "empty"])
def test_a_damaged_file_leaves_out_its_only_episode(tmp_path: Path, damage: str) -> None:
    path = LeRobotSet(tmp_path / "set", LENGTHS, "v2.1").write()
    file = path / "data" / "chunk-000" / "episode_000002.parquet"
    data = file.read_bytes()
    file.unlink()
    if damage != "missing":
        file.write_bytes(data[: len(data) // 2 if damage == "cut" else 0])
    recording = rollout_data.open(path)
    check(recording, LENGTHS, [0, 1, 3])
    assert "episode_000002" in str(recording.problems[0])


@pytest.mark.parametrize("damage", ["missing", "cut", "empty"])
@pytest.mark.parametrize("choice", ["refuse", "rebuild"])
def test_a_damaged_file_leaves_out_all_of_its_episodes(
    tmp_path: Path, damage: str, choice: str
) -> None:
    path = LeRobotSet(tmp_path / "set", LENGTHS, files=[0, 1, 1, 2]).write()
    file = path / "data" / "chunk-000" / "file-001.parquet"
    data = file.read_bytes()
    file.unlink()
    if damage != "missing":
        file.write_bytes(data[: len(data) // 2 if damage == "cut" else 0])
    recording = rollout_data.open(path, on_bad_index=choice)
    check(recording, LENGTHS, [0, 3])
    assert "file-001" in str(recording.problems[0]) and "is left out" in str(recording.problems[0])
    assert "It contains the episodes 1, 2." in str(recording.problems[0])
    for other in ("file-000", "file-002"):
        (path / "data" / "chunk-000" / f"{other}.parquet").unlink()
    with pytest.raises(DataFileError, match="file-000"):
        rollout_data.open(path)


def test_a_conversion_notes_the_episode_whose_rows_are_damaged(tmp_path: Path) -> None:
    path = LeRobotSet(tmp_path / "set", [40, 50, 60], files=[0, 1, 2]).write()
    file = path / "data" / "chunk-000" / "file-001.parquet"
    data = file.read_bytes()
    file.write_bytes(data[:8] + b"\xff" * 32 + data[40:])
    done = rollout_data.convert(path, tmp_path / "own", progress=False)
    assert done.num_episodes == 2 and [problem.episode for problem in done.problems] == ["1"]


def test_a_task_that_differs_between_rows_and_index_is_reported(tmp_path: Path) -> None:
    made = LeRobotSet(tmp_path / "set", LENGTHS)
    made.entries[1]["tasks"] = ["another"]
    recording = rollout_data.open(made.write())
    assert recording[1].task == TASKS[1]
    assert "Episode 1" in str(recording.problems[0])


# What is refused.


@pytest.mark.parametrize(
    "template",
    [
        "../data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        "/data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        "data/{chunk_index.__class__}/file-{file_index:03d}.parquet",
        "data/{chunk_index!r}/file-{file_index:03d}.parquet",
        "data/{chunk_index[0]}/file.parquet",
        "data/{chunk_index:0999999999d}/file.parquet",
        "data/{0}/file.parquet",
        "data/{other}/file.parquet",
        "data/{video_key}/file.parquet",
        "data/{chunk_index",
        "data/{chunk_index:{file_index}}.parquet",
    ],
)
def test_a_template_only_makes_names_inside_the_folder(tmp_path: Path, template: str) -> None:
    made = LeRobotSet(tmp_path / "set", [2])
    made.info["data_path"] = template
    path = made.write()
    outside = tmp_path / "data" / "chunk-000" / "file-000.parquet"
    outside.parent.mkdir(parents=True)
    shutil.copy(path / "data" / "chunk-000" / "file-000.parquet", outside)
    for choice in ("refuse", "rebuild"):
        with pytest.raises((CorruptFileError, UnsafeFileError)):
            rollout_data.open(path, on_bad_index=choice)


def test_links_out_of_the_folder_are_refused(tmp_path: Path) -> None:
    path = LeRobotSet(tmp_path / "set", [2]).write()
    file = path / "data" / "chunk-000" / "file-000.parquet"
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DataFileError, match="outside of the folder"):
        rollout_data.open(path)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(DataFileError):
        rollout_data.open(path)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"storage_format": "lance", "codebase_version": "v9"}, ForeignFileError),
        ({"codebase_version": "v1.6"}, ForeignFileError),
        ({"codebase_version": None}, ForeignFileError),
        ({"fps": 0}, CorruptFileError),
        ({"fps": "30"}, CorruptFileError),
        ({"fps": None}, CorruptFileError),
        ({"features": [1]}, CorruptFileError),
        ({"features": {"action": 1}}, CorruptFileError),
        ({"total_frames": 1e400}, CorruptFileError),
        ({"total_episodes": 10**30}, CorruptFileError),
        ({"data_path": 3}, CorruptFileError),
    ],
)
def test_an_invalid_description_is_refused(
    tmp_path: Path, change: dict, error: type[Exception]
) -> None:
    made = LeRobotSet(tmp_path / "set", [2])
    made.info |= change
    with pytest.raises(error):
        rollout_data.open(made.write())


def test_declared_shapes_take_no_memory_and_the_shapes_of_the_data_count(tmp_path: Path) -> None:
    made = LeRobotSet(tmp_path / "set", [2])
    made.info["features"]["observation.state"]["shape"] = [1 << 30, 1 << 30]
    made.info["features"]["action"]["shape"] = [-1, "x"]
    made.info["features"]["next.reward"]["shape"] = None
    check(rollout_data.open(made.write()), [2])


def test_a_row_that_unpacks_to_too_much_is_refused(tmp_path: Path) -> None:
    zeros = pa.array(np.zeros(1 << 24, "float32"))
    made = LeRobotSet(tmp_path / "set", [2])
    bomb = pa.ListArray.from_arrays(pa.array([0, 3, 1 << 24], pa.int32()), zeros)
    made.tables[0] = made.tables[0].set_column(0, "observation.state", bomb)
    path = made.write()
    with pytest.raises(CorruptFileError, match=r"values|bytes"):
        rollout_data.open(path)[0].read("observation/state")


def test_pages_that_hold_more_than_the_footer_says_are_refused(tmp_path: Path) -> None:
    nulls = pa.ListArray.from_arrays(
        pa.array([0, 3, 3_000_000], pa.int32()), pa.nulls(3_000_000, pa.float32())
    )
    made = LeRobotSet(tmp_path / "set", [2])
    made.tables[0] = made.tables[0].set_column(0, "observation.state", nulls)
    file = made.write() / "data" / "chunk-000" / "file-000.parquet"
    data, num_values = file.read_bytes(), b"\x80\x9b\xee\x02"  # as Thrift writes 3,000,000
    start = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    assert num_values in data[start:]
    file.write_bytes(data[:start] + data[start:].replace(num_values, b"\x8c\x80\x80\x00"))  # 6
    with pytest.raises(CorruptFileError, match="3000000 values"):
        rollout_data.open(tmp_path / "set")[0].read("observation/state")


@pytest.mark.parametrize("kind", ["ragged", "null", "other"])
def test_rows_of_another_shape_or_without_a_value_are_refused_by_their_episode(
    tmp_path: Path, kind: str
) -> None:
    made = LeRobotSet(tmp_path / "set", [2, 2])
    values = {
        "ragged": [[1.0], [2.0, 3.0, 4.0]],
        "null": [[1.0, 2.0, 3.0], None],
        "other": [[1.0, 2.0]] * 2,
    }[kind]
    for number, rows in enumerate((state(FIRST, 2).tolist(), values)):
        made.tables[number] = made.tables[number].set_column(
            0, "observation.state", pa.array(rows, pa.list_(pa.float32()))
        )
    recording = rollout_data.open(made.write())
    assert recording[0].observation["state"].shape == (2, 3)
    with pytest.raises(CorruptFileError, match="episode '1'"):
        recording[1].read("observation/state")
    assert recording[1].action.shape == (2, 2)


def test_every_truncated_or_changed_file_is_refused_or_read_as_before(tmp_path: Path) -> None:
    path = LeRobotSet(tmp_path / "set", [3, 2]).write()
    expected = [episode.action for episode in rollout_data.open(path)]
    random = np.random.default_rng(0)
    for file in (
        path / "data/chunk-000/file-000.parquet",
        path / "meta/tasks.parquet",
        path / "meta/info.json",
    ):
        data = file.read_bytes()
        for number in range(60):
            changed = bytearray(data[: len(data) * number // 30] if number < 30 else data)
            if number >= 30:
                changed[random.integers(len(data))] ^= 1 << random.integers(8)
            file.write_bytes(changed)
            try:
                got = [episode.action for episode in rollout_data.open(path)]
            except DataFileError:
                continue
            assert [tensor.shape for tensor in got] == [tensor.shape for tensor in expected]
        file.write_bytes(data)


@pytest.mark.parametrize("choice", ["refuse", "rebuild"])
def test_more_rows_than_a_file_can_hold_are_refused_before_they_are_read(
    tmp_path: Path, choice: str
) -> None:
    path = LeRobotSet(tmp_path / "set", [2]).write()
    zeros = pa.array(np.zeros(1 << 21, "int64"))
    table = pa.table(
        dict.fromkeys(("action", "frame_index", "episode_index", "index", "task_index"), zeros)
    )
    pq.write_table(
        table,
        path / "data" / "chunk-000" / "file-000.parquet",
        compression="zstd",
        row_group_size=1 << 21,
    )
    if choice == "refuse":
        with pytest.raises(CorruptFileError, match=r"declares .* rows"):
            rollout_data.open(path)
    else:
        recording = rollout_data.open(path, on_bad_index=choice)
        assert len(recording) == 0
        assert any("declares" in str(problem) for problem in recording.problems)


def test_no_flipped_bit_of_a_footer_ends_the_process(tmp_path: Path) -> None:
    """Arrow ends the process if types, counts and histograms of a footer contradict each other."""
    path = LeRobotSet(tmp_path / "set", [1]).write()
    tasks = path / "meta" / "tasks.parquet"
    raw = tasks.read_bytes()
    start, is_refused = len(raw) - 8 - int.from_bytes(raw[-8:-4], "little"), []
    for place in [(start + at, bit) for at in (*range(45), *range(150, 240)) for bit in range(8)]:
        flipped = bytearray(raw)
        flipped[place[0]] ^= 1 << place[1]
        tasks.write_bytes(flipped)
        try:
            rollout_data.open(path)
            is_refused.append(False)
        except DataFileError as error:
            is_refused.append(True)
            assert "tasks.parquet" in str(error)
    assert any(is_refused) and not all(is_refused)


def test_a_picture_that_unpacks_to_more_than_its_file_is_refused(tmp_path: Path) -> None:
    data = b"\x89PNG\r\n\x1a\n" + bytes(136 << 20)
    made = LeRobotSet(tmp_path / "set", [1])
    path = made.write()
    bomb = made.tables[0].append_column(
        "observation.images.a", pa.array([{"bytes": data, "path": ""}])
    )
    pq.write_table(bomb, path / "data" / "chunk-000" / "file-000.parquet", compression="zstd")
    with pytest.raises(CorruptFileError, match=r"bytes for column 'observation\.images\.a'"):
        rollout_data.open(path)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a child of its own is measured")
@pytest.mark.parametrize("version", ["v3.0", "v2.1"])
def test_a_long_text_of_all_frames_is_in_memory_once(tmp_path: Path, version: str) -> None:
    text, num_frames = "x" * (1 << 20), 700
    note = feature("string", [1]), lambda _, length: pa.array([text] * length)
    path = LeRobotSet(tmp_path / "a", [num_frames], version=version, columns={"note": note}).write()
    assert sum(item.stat().st_size for item in path.rglob("*.parquet")) < 1 << 18
    if (child := os.fork()) == 0:
        status = 1
        try:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            texts = rollout_data.open(path)[0].read("note")
            grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
            status = (
                0
                if len(texts) == num_frames and set(texts) == {text} and grown_kib < 400 << 10
                else 2
            )
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
