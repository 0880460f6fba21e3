"""What is written as a LeRobot dataset comes back by our reader and by lerobot, also after a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pa = pytest.importorskip("pyarrow", reason="the extra `formats` is missing")
import pyarrow.parquet as pq  # noqa: E402

import rollout_data  # noqa: E402
from rollout_data.foreign.formats import writer_class  # noqa: E402
from rollout_data.recordings.converting import convert  # noqa: E402
from storage.errors import UsageError  # noqa: E402
from tests.formats.cases import ROOT  # noqa: E402
from tests.formats.lerobot_sets import FIRST, TASKS, LeRobotSet, check, feature, lists  # noqa: E402
from tests.formats.values import action, picture, state  # noqa: E402

LENGTHS = [3, 1, 4, 2]
VERSIONS = ["v3.0", "v2.1"]


def written(source: Any, target: Path, **options: Any) -> Any:
    changes = convert(source, target, "lerobot", progress=False, **options).changes
    return rollout_data.open(target), changes


@pytest.mark.parametrize("version", VERSIONS)
def test_every_kind_of_field_comes_back(tmp_path: Path, version: str) -> None:
    columns = {
        "observation.fine": (feature("float64", [2]), lambda e, n: lists(state(e, n, 2, "float64") + 1e-9)),
        "observation.grid": (
            feature("float32", [2, 3]),
            lambda e, n: pa.array(state(e, n, 6).reshape(n, 2, 3).tolist()),
        ),
        "observation.one": (feature("int32", [1]), lambda e, n: state(e, n, 1, "int32")[:, 0]),
        "next.success": (feature("bool", [1]), lambda e, n: np.arange(n) == n - 1),
        "note": (feature("string", [1]), lambda e, n: [f"нота {e}-{t}" for t in range(n)]),
    }
    source = rollout_data.open(LeRobotSet(tmp_path / "source", LENGTHS, columns=columns).write())
    back, changes = written(source, tmp_path / "set", version=version)
    check(back, LENGTHS)
    assert back.problems == []
    assert changes == {}
    assert back.metadata["codebase_version"] == version
    assert back.schema == source.schema
    for mine, theirs in zip(source, back, strict=True):
        for name in mine.schema:
            assert theirs[name].dtype == mine[name].dtype
            np.testing.assert_array_equal(theirs[name], mine[name])
        assert theirs["note"] == mine["note"]
        assert theirs.success is True
    assert not list((tmp_path / "set").rglob(".*"))


def test_pictures_and_depth_come_back_as_they_were(tmp_path: Path) -> None:
    source = rollout_data.open(ROOT / "lerobot_v3/images")
    back, changes = written(source, tmp_path / "set")
    assert changes == {}
    assert back.metadata["units"] == source.metadata["units"]
    for mine, theirs in zip(source, back, strict=True):
        for name in mine.schema:
            np.testing.assert_array_equal(theirs[name], mine[name])
    older, changes = written(source, tmp_path / "older", version="v2.1")
    assert [what.split(",")[0] for what in changes] == ["depth is written as numbers"]
    for mine, theirs in zip(source, older, strict=True):
        np.testing.assert_array_equal(theirs["observation/images.hwc"], mine["observation/images.hwc"])
        np.testing.assert_array_equal(theirs["observation/depth_m"], mine["observation/images.depth_m"])


@pytest.mark.parametrize(("version", "video"), [("v3.0", "h264"), ("v2.1", "h264"), ("v3.0", "av1")])
def test_pictures_become_video_when_asked(tmp_path: Path, version: str, video: str) -> None:
    pytest.importorskip("av", reason="the extra `video` is missing")

    def smooth(episode: int, length: int) -> Any:
        from rollout_data.foreign.pictures import encode_picture

        return pa.array([{"bytes": encode_picture(one), "path": ""} for one in picture(episode, length, 64, 96)])

    columns = {"observation.images.left": (feature("image", [64, 96, 3]), smooth)}
    lengths = [3, 1, 60]  # the last is read in two parts
    source = rollout_data.open(LeRobotSet(tmp_path / "source", lengths, columns=columns).write())
    back, changes = written(source, tmp_path / "set", version=version, video=video)
    assert list(changes) == ["pictures are stored as video, with loss"]
    assert back.metadata["lossy"] == ["observation/images.left"]
    check(back, lengths)
    for mine, theirs in zip(source, back, strict=True):
        off = mine.observation["images.left"].astype(float) - theirs.observation["images.left"]
        assert np.abs(off.mean((1, 2))).max() < 3
        assert np.abs(off).mean() < 12


def test_a_groot_set_names_its_parts(tmp_path: Path) -> None:
    pytest.importorskip("av", reason="the extra `video` is missing")
    source = rollout_data.open(ROOT / "lerobot_v21/groot_video")
    back, _ = written(source, tmp_path / "set", version="v2.1", video="h264", groot=True)
    assert back.problems == []
    modality = json.loads((tmp_path / "set" / "meta" / "modality.json").read_text())
    assert modality["state"] == {"state": {"start": 0, "end": 3, "original_key": "observation.state"}}
    assert modality["video"] == {"ego_view": {"original_key": "observation.images.ego_view"}}
    assert back[1]["annotation.human.task_description"] == [TASKS[1]] * 2
    with pytest.raises(UsageError, match=r"v2\.1"):
        written(source, tmp_path / "other", groot=True)


def test_statistics_are_those_of_all_frames(tmp_path: Path) -> None:
    source = rollout_data.open(ROOT / "lerobot_v3/images")
    written(source, tmp_path / "set")
    got = json.loads((tmp_path / "set" / "meta" / "stats.json").read_text())
    for feature_name, name in (("observation.state", "observation/state"), ("action", "action")):
        rows = np.concatenate([episode[name] for episode in source]).astype(np.float64)
        for key in ("min", "max", "mean", "std"):
            np.testing.assert_allclose(got[feature_name][key], getattr(rows, key)(0), err_msg=f"{name} {key}")
        assert got[feature_name]["count"] == [len(rows)]
    pixels = np.concatenate([episode["observation/images.hwc"] for episode in source]) / 255
    np.testing.assert_allclose(np.squeeze(got["observation.images.hwc"]["std"]), pixels.std((0, 1, 2)))
    assert np.shape(got["observation.images.hwc"]["mean"]) == (3, 1, 1)
    entries = pq.read_table(tmp_path / "set" / "meta" / "episodes").to_pylist()
    for entry, episode in zip(entries, source, strict=True):  # lerobot makes those of a part of the set of these
        np.testing.assert_allclose(entry["stats/action/mean"], episode.action.mean(0, np.float64))
        assert entry["stats/observation.images.hwc/count"] == [len(episode)]


def test_the_texts_of_tasks_are_the_index_that_pandas_reads(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    written(ROOT / "lerobot_v3/vectors", tmp_path / "set")
    table = pandas.read_parquet(tmp_path / "set" / "meta" / "tasks.parquet")
    assert list(table.index) == list(TASKS)
    assert list(table.columns) == ["task_index"]


def test_what_only_some_episodes_have_is_left_out_and_reported(tmp_path: Path) -> None:
    source = rollout_data.open(LeRobotSet(tmp_path / "source", LENGTHS, "v2.1").write())

    class Without:
        """An episode without its reward."""

        def __init__(self, episode: Any) -> None:
            self._episode = episode
            self.schema = type(episode.schema)(one for one in episode.schema.values() if one.name != "reward")

        def __getattr__(self, name: str) -> Any:
            return getattr(self._episode, name)

    episodes = [Without(episode) if number == 1 else episode for number, episode in enumerate(source)]
    made = writer_class("lerobot")(tmp_path / "other", episodes, source.metadata, {})
    for episode in episodes:
        made.add(episode)
    made.close()
    assert [what for what in made.report if "reward" in what]
    assert rollout_data.open(tmp_path / "other")[0].reward is None


def off_by(seconds: float) -> Callable[[LeRobotSet], None]:
    def change(made: LeRobotSet) -> None:
        table = made.tables[1]
        times = pa.array(np.asarray(table["timestamp"]) + np.float32(seconds))
        made.tables[1] = table.set_column(table.column_names.index("timestamp"), "timestamp", times)

    return change


def in_words(made: LeRobotSet) -> None:
    said = [pa.array([[{"role": "user", "content": "стоп"}]] * length) for length in made.lengths]
    made.tables = [table.append_column("language_events", one) for table, one in zip(made.tables, said, strict=True)]


REPORTED: dict[str, tuple[Callable[[LeRobotSet], None], dict[str, list[str]]]] = {
    "several tasks": (
        lambda made: made.entries[1].update(tasks=list(TASKS[::-1])),
        {"only the first task of an episode is written": ["1"]},
    ),
    "other times": (off_by(0.01), {"'timestamp' is counted anew": ["1"]}),
    "times that lerobot takes for those of the frames": (off_by(0.00005), {}),
    "language": (in_words, {"texts of steps are left out (language_events)": ["0", "1"]}),
}


@pytest.mark.parametrize("name", REPORTED)
def test_what_is_changed_of_episodes_is_in_the_report(tmp_path: Path, name: str) -> None:
    change, expected = REPORTED[name]
    made = LeRobotSet(tmp_path / "source", [3, 2])
    change(made)
    source = rollout_data.open(made.write())
    back, changes = written(source, tmp_path / "set")
    assert changes == expected
    for mine, theirs in zip(source, back, strict=True):
        is_same = np.array_equal(mine["timestamp"], theirs["timestamp"])
        assert is_same or name == "other times"


def test_a_long_episode_is_written_a_row_group_at_a_time(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).normal(size=(1200, 1 << 12)).astype("float32")  # 19 MiB
    made = LeRobotSet(tmp_path / "source", [1200])
    made.tables[0] = made.tables[0].append_column("observation.long", lists(rows))
    back, changes = written(made.write(), tmp_path / "set")
    assert changes == {}
    assert pq.read_metadata(tmp_path / "set" / "data" / "chunk-000" / "file-000.parquet").num_row_groups == 2
    np.testing.assert_array_equal(back[0]["observation/long"], rows)
    np.testing.assert_array_equal(back[0].action, action(FIRST, 1200))


def test_episodes_without_actions_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="actions"):
        written(ROOT / "motion_npz/clips", tmp_path / "set")


def test_a_set_that_is_complete_or_of_others_is_not_written_over(tmp_path: Path) -> None:
    written(ROOT / "lerobot_v3/vectors", tmp_path / "set")
    with pytest.raises(UsageError, match="a complete set"):
        written(ROOT / "lerobot_v3/vectors", tmp_path / "set")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "x").touch()
    with pytest.raises(UsageError, match="one with files"):
        written(ROOT / "lerobot_v3/vectors", tmp_path / "other")
    for options in ({"version": "v1"}, {"video": "mpeg"}, {"fps": 0}):
        with pytest.raises(UsageError):
            written(ROOT / "lerobot_v3/vectors", tmp_path / "third", **options)


KILLED = """
import sys
from rollout_data.recordings.converting import convert
convert(sys.argv[1], sys.argv[2], "lerobot", progress=False, version=sys.argv[3])
"""


@pytest.mark.parametrize("version", VERSIONS)
def test_a_killed_writer_leaves_whole_episodes_and_goes_on(tmp_path: Path, version: str) -> None:
    lengths = [3, 1, 4, 2] * 20
    source, target = LeRobotSet(tmp_path / "source", lengths).write(), tmp_path / "set"
    command = [sys.executable, "-c", KILLED, str(source), str(target), version]
    process = subprocess.Popen(command, cwd=Path(__file__).parents[2], env={**os.environ, "OMP_NUM_THREADS": "1"})
    while len(list(target.glob("data/*/*.parquet"))) < 10:
        time.sleep(0.002)
        assert process.poll() is None or len(list(target.glob("data/*/*.parquet"))) >= 10
    process.send_signal(signal.SIGKILL)
    process.wait()
    recording = rollout_data.open(target)
    if recording.problems:
        assert 10 <= len(recording) <= len(lengths)
        assert "whose writer has stopped" in str(recording.problems[0])
        check(recording, lengths, list(range(len(recording))))
        convert(source, target, "lerobot", progress=False, version=version)
    recording = rollout_data.open(target)
    assert recording.problems == []
    check(recording, lengths)


def test_lerobot_reads_what_is_written(tmp_path: Path) -> None:
    lerobot = pytest.importorskip("lerobot.datasets.lerobot_dataset", reason="its tests need the package lerobot")
    version = lerobot.CODEBASE_VERSION
    source = rollout_data.open(ROOT / "lerobot_v3/images")
    written(source, tmp_path / "set", version=version)
    read = lerobot.LeRobotDataset("tests/set", root=tmp_path / "set")
    assert (read.num_episodes, len(read)) == (len(source), sum(map(len, source)))
    rows = iter(range(len(read)))
    for mine in source:
        for frame in range(len(mine)):
            got = read[next(rows)]
            np.testing.assert_array_equal(got["observation.state"].numpy(), mine.observation["state"][frame])
            np.testing.assert_array_equal(got["action"].numpy(), mine.action[frame])
            pixels = (got["observation.images.hwc"].numpy() * 255).round().transpose(1, 2, 0)
            np.testing.assert_array_equal(pixels, mine.observation["images.hwc"][frame])
            assert got["task"] == mine.task
