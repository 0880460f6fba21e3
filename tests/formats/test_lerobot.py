"""The reader of LeRobot datasets: each sentence of the layout."""

from __future__ import annotations

import json
import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pa = pytest.importorskip("pyarrow", reason="the extra `formats` is missing")
import pyarrow.parquet as pq  # noqa: E402

import rollout_data  # noqa: E402
from rollout_data import WindowDataset  # noqa: E402
from rollout_data.formats.encoded_images import encode_picture  # noqa: E402
from storage.errors import CorruptFileError, DataFileError, UsageError  # noqa: E402
from tests.formats.cases import ROOT  # noqa: E402
from tests.formats.lerobot_sets import FIRST, FPS, TASKS, LeRobotSet, check, feature, lists  # noqa: E402
from tests.formats.values import action, picture, state  # noqa: E402

LENGTHS = [3, 1, 4, 2]


@pytest.mark.parametrize("row_group_rows", [None, 2, 1000])
@pytest.mark.parametrize("files", [None, [0, 0, 1, 2]])
def test_version_3_is_read_with_any_files_and_row_groups(
    tmp_path: Path, row_group_rows: int | None, files: Any
) -> None:
    path = LeRobotSet(tmp_path / "set", LENGTHS, files=files).write(row_group_rows)
    before = sorted(path.rglob("*"))
    recording = rollout_data.open(path)
    check(recording, LENGTHS)
    assert recording.problems == []
    assert recording.metadata["robot_type"] == "test_arm"
    assert sorted(path.rglob("*")) == before


@pytest.mark.parametrize("version", ["v2.1", "v2.0"])
def test_version_2_has_a_file_for_each_episode_in_numbered_folders(
    tmp_path: Path, version: str
) -> None:
    made = LeRobotSet(tmp_path / "set", LENGTHS, version)
    made.info["chunks_size"] = 2
    path = made.write()
    assert (path / "data" / "chunk-001" / "episode_000003.parquet").exists()
    lines = (path / "meta" / "episodes.jsonl").read_text().splitlines()
    (path / "meta" / "episodes.jsonl").write_text("\n".join(lines[::-1]))  # by number, not by line
    check(rollout_data.open(path), LENGTHS)


def test_more_than_a_thousand_episodes_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    made = LeRobotSet(tmp_path / "set", [1] * 1100)
    made.info["splits"] = {"train": "0:1000", "valid": "1000:1100", "odd": "x"}
    recording = rollout_data.open(made.write(100))
    assert [episode.id for episode in recording] == [str(number) for number in range(1100)]


def test_every_type_of_column_is_read_in_its_shape_and_dtype(tmp_path: Path) -> None:
    def grid(dtype: str, *shape: int) -> Callable[[int, int], Any]:
        return lambda episode, length: pa.array(
            (state(episode, length, int(np.prod(shape)), dtype).reshape(length, *shape)).tolist()
        )

    columns = {
        "observation.fine": (
            feature("float64", [2]),
            lambda e, n: lists(state(e, n, 2, "float64") + 1e-9),
        ),
        "observation.plain": (
            feature("float32", [3]),
            lambda e, n: lists(state(e, n), is_fixed=False),
        ),
        "observation.one": (feature("float32", [1]), lambda e, n: state(e, n, 1)[:, 0]),
        "observation.environment_state": (feature("float64", [2, 3]), grid("float64", 2, 3)),
        "observation.deep": (feature("int64", [2, 1, 2, 3]), grid("int64", 2, 1, 2, 3)),
        "observation.small": (feature("uint8", [2]), lambda e, n: lists(state(0, n, 2, "uint8"))),
        "count": (feature("int32", [1]), lambda e, n: np.arange(n, dtype="int32")),
        "note": (feature("string", [1]), lambda e, n: [f"нота {e}-{t}" for t in range(n)]),
        "with.nan": (
            feature("float32", [2]),
            lambda e, n: lists(np.full((n, 2), np.nan, "float32")),
        ),
        "language_events": (
            feature("language", [1]),
            lambda e, n: pa.array(
                [[{"role": "user", "content": "стоп", "raw": b"x"}] if t else [] for t in range(n)]
            ),
        ),
    }
    made = LeRobotSet(tmp_path / "set", [3, 2], columns=columns, has_reward=False)
    del made.info["features"]["language_events"]  # in the data only
    made.info["a_future_key"] = {"x": 1}
    recording = rollout_data.open(made.write(4))
    assert recording.metadata["a_future_key"] == {"x": 1}
    for number, episode in enumerate(recording):
        n, e = len(episode), FIRST + number
        assert episode.reward is None
        got = episode.observation
        np.testing.assert_array_equal(got["fine"], state(e, n, 2, "float64") + 1e-9)
        np.testing.assert_array_equal(got["plain"], state(e, n))
        np.testing.assert_array_equal(got["one"], state(e, n, 1))
        np.testing.assert_array_equal(
            got["environment_state"], state(e, n, 6, "float64").reshape(n, 2, 3)
        )
        np.testing.assert_array_equal(got["deep"], state(e, n, 12, "int64").reshape(n, 2, 1, 2, 3))
        assert (got["small"].dtype, got["deep"].dtype, got["fine"].dtype) == (
            "uint8",
            "int64",
            "float64",
        )
        assert episode["count"].dtype == np.dtype("int32")
        assert episode["count"].shape == (n,)
        assert episode["note"] == [f"нота {e}-{t}" for t in range(n)]
        assert np.isnan(episode["with.nan"]).all()
        assert episode["language_events"][0] == "[]"
        assert json.loads(episode["language_events"][1])[0]["content"] == "стоп"


def test_text_actions_are_texts_and_never_numbers(tmp_path: Path) -> None:
    made = LeRobotSet(tmp_path / "set", [2])
    made.tables[0] = made.tables[0].set_column(1, "action", pa.array(["left", "right"]))
    made.info["features"]["action"] = feature("string", [1])
    episode = rollout_data.open(made.write())[0]
    assert episode.action is None
    assert episode["action_text"] == ["left", "right"]


def test_success_comes_from_its_column(tmp_path: Path) -> None:
    about = feature("bool", [1])
    for version in ("v3.0", "v2.1"):
        columns = {"next.success": (about, lambda e, n: (np.arange(n) == n - 1) & (e % 2 == 0))}
        recording = rollout_data.open(
            LeRobotSet(tmp_path / version, LENGTHS, version, columns=columns).write()
        )
        assert [episode.success for episode in recording] == [True, False, True, False]


def test_a_reader_may_be_pickled(tmp_path: Path) -> None:
    recording = rollout_data.open(LeRobotSet(tmp_path / "set", LENGTHS, files=[0, 1, 1, 2]).write())
    check(pickle.loads(pickle.dumps(recording)), LENGTHS)


# Pictures and video.


def pictures(kind: str) -> Callable[[int, int], Any]:
    from PIL import Image

    def make(episode: int, length: int) -> Any:
        rows = []
        for row in picture(episode, length):
            path = f"{episode}.{kind}"
            if kind == "png":
                data = encode_picture(row)
            elif kind == "jpeg":
                import io

                out = io.BytesIO()
                Image.fromarray(row).save(out, "JPEG", quality=95)
                data = out.getvalue()
            else:
                data = encode_picture(row[..., 0].astype(kind))
            rows.append({"bytes": data, "path": path})
        return pa.array(rows)

    return make


def test_encoded_pictures_are_rows_by_columns_by_channels_whatever_is_declared(
    tmp_path: Path,
) -> None:
    chw = feature("image", [3, 8, 10]) | {"names": ["channels", "height", "width"]}
    columns = {
        "observation.images.chw": (chw, pictures("png")),
        "observation.images.jpeg": (feature("image", [8, 10, 3]), pictures("jpeg")),
        "observation.images.mm": (feature("image", [8, 10, 1]), pictures("uint16")),
        "observation.images.m": (
            feature("image", [8, 10, 1], info={"is_depth_map": True}),
            pictures("float32"),
        ),
    }
    recording = rollout_data.open(LeRobotSet(tmp_path / "set", [2, 1], columns=columns).write(1000))
    assert recording.metadata["lossy"] == ["observation/images.jpeg"]
    assert recording.metadata["units"] == {
        "observation/images.mm": "mm",
        "observation/images.m": "m",
    }
    assert sum("has no depth_unit" in str(remark) for remark in recording.advice) == 2
    for number, episode in enumerate(recording):
        expected = picture(FIRST + number, len(episode))
        np.testing.assert_array_equal(episode.observation["images.chw"], expected)
        np.testing.assert_array_equal(
            episode.observation["images.mm"], expected[..., 0].astype("uint16")
        )
        np.testing.assert_array_equal(
            episode.observation["images.m"], expected[..., 0].astype("float32")
        )
        assert np.abs(episode.observation["images.jpeg"].astype(int) - expected).mean() < 20


def test_a_damaged_picture_loses_only_its_frame(tmp_path: Path) -> None:
    def broken(episode: int, length: int) -> Any:
        rows = pictures("png")(episode, length).to_pylist()
        if episode == FIRST + 1:
            rows[1]["bytes"] = rows[1]["bytes"][:40]
        return pa.array(rows)

    columns = {"observation.images.a": (feature("image", [8, 10, 3]), broken)}
    recording = rollout_data.open(LeRobotSet(tmp_path / "set", [2, 3], columns=columns).write())
    assert recording[0].observation["images.a"].shape == (2, 8, 10, 3)
    assert recording[1].read("observation/images.a", 0, 1).shape == (1, 8, 10, 3)
    with pytest.raises(CorruptFileError, match="episode '1'"):
        recording[1].read("observation/images.a")


def sample(tmp_path: Path, name: str) -> Path:
    shutil.copytree(ROOT / name, tmp_path / "copy")
    return tmp_path / "copy"


@pytest.mark.each_value
@pytest.mark.parametrize(
    "damage", ["missing", "a folder", "empty", "a playlist", "cut", "another codec", "flipped"]
)
@pytest.mark.parametrize("version", ["lerobot_v3/video_h264", "lerobot_v21/groot_video"])
def test_a_damaged_video_leaves_out_its_camera_in_its_episodes_only(
    tmp_path: Path, version: str, damage: str
) -> None:
    pytest.importorskip("av", reason="the extra `video` is missing")
    path = sample(tmp_path, version)
    whole = rollout_data.open(path)
    file = min(path.rglob("*.mp4"))
    data = bytearray(file.read_bytes())
    if damage == "cut":
        del data[len(data) // 2 :]
    elif damage == "another codec":
        for name in (b"avc1", b"av01", b"hev1"):
            data = data.replace(name, b"zzzz")
    elif damage == "flipped":
        at = data.index(b"moov")
        data[at : at + 400] = bytes(byte ^ 0x5A for byte in data[at : at + 400])
    else:
        data = bytearray(b"" if damage == "empty" else b"#EXTM3U\n#EXTINF:10,\n/etc/passwd")
    if damage in ("missing", "a folder"):
        file.unlink()
        if damage == "a folder":
            file.mkdir()
    else:
        file.write_bytes(data)
    recording = rollout_data.open(path)
    assert recording.ids == whole.ids and recording.problems
    expected, actual = (
        WindowDataset(item, 2, fields=["action"]) for item in (ROOT / version, path)
    )
    everything = range(len(expected))
    assert torch.equal(
        actual.__getitems__(everything)["action"], expected.__getitems__(everything)["action"]
    )
    assert all(
        isinstance(problem, DataFileError) and problem.kind == "undecodable"
        for problem in recording.problems
    )
    assert all(
        file.name in str(problem) and "Camera" in str(problem) and "is left out" in str(problem)
        for problem in recording.problems
    )
    lost = {problem.episode for problem in recording.problems}
    for episode, before in zip(recording, whole, strict=True):
        missing = [name for name in before.schema if name not in episode.schema]
        assert len(missing) == (episode.id in lost)
        for name in episode.schema:
            np.testing.assert_array_equal(episode.read(name), before.read(name))
    assert any(
        finding.code == "IMG09" for finding in rollout_data.doctor(path, only=["IMG09"]).findings
    )


def test_a_video_without_the_frames_is_refused_and_left_out_when_the_index_is_rebuilt(
    tmp_path: Path,
) -> None:
    pytest.importorskip("av", reason="the extra `video` is missing")
    path = sample(tmp_path, "lerobot_v3/video_h264")
    file = path / "videos" / "observation.images.left" / "chunk-000" / "file-000.mp4"
    other = (
        ROOT
        / "lerobot_v21/groot_video/videos/chunk-000/observation.images.ego_view/episode_000000.mp4"
    )
    shutil.copy(other, file)
    with pytest.raises(CorruptFileError, match=r"Episode \d of .* frames, but its video of"):
        rollout_data.open(path)
    recording = rollout_data.open(path, on_bad_index="rebuild")
    assert len(recording) == 3
    assert ("observation/images.left" in recording[1].schema) is False
    assert recording[1].observation["images.right"].shape == (3, 64, 64, 3)
    assert "observation/images.left" in recording[0].schema


def test_a_short_video_of_version_2_is_found_when_the_set_is_opened(tmp_path: Path) -> None:
    pytest.importorskip("av", reason="the extra `video` is missing")
    path = sample(tmp_path, "lerobot_v21/groot_video")
    file = path / "videos" / "chunk-000" / "observation.images.ego_view" / "episode_000000.mp4"
    shutil.copy(file.with_name("episode_000001.mp4"), file)
    with pytest.raises(CorruptFileError, match=r"Episode 0 of .* frames, but its video of"):
        rollout_data.open(path)
    recording = rollout_data.open(path, on_bad_index="rebuild")
    assert ["observation/images.ego_view" in episode.schema for episode in recording] == [
        False,
        True,
    ]


def test_a_range_of_a_video_equals_the_same_frames_of_the_whole_video(tmp_path: Path) -> None:
    pytest.importorskip("av", reason="the extra `video` is missing")
    recording = rollout_data.open(ROOT / "lerobot_v3/video_h264")
    assert len(recording.metadata["lossy"]) == 3
    for episode in recording:
        for name in ("observation/images.left", "observation/images.depth"):
            whole = episode.read(name)
            for start in range(len(episode)):
                np.testing.assert_array_equal(
                    episode.read(name, start, start + 1), whole[start : start + 1]
                )


def test_frames_of_another_size_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("av", reason="the extra `video` is missing")
    path = sample(tmp_path, "lerobot_v3/video_av1")
    info = json.loads((path / "meta" / "info.json").read_text())
    info["features"]["observation.images.left"]["shape"] = [48, 64, 3]
    (path / "meta" / "info.json").write_text(json.dumps(info))
    recording = rollout_data.open(path)
    with pytest.raises(CorruptFileError, match="64 x 64 pixels, expected 48 x 64"):
        recording[0].read("observation/images.left")
    assert recording[0].read("observation/images.right").shape == (3, 64, 64, 3)


def test_a_missing_package_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording = rollout_data.open(ROOT / "lerobot_v3/video_av1")
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(UsageError, match=r"rollout-data\[video\]"):
        recording[0].read("observation/images.left")
    assert recording[0].action.shape == (3, 2)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UsageError, match=r"rollout-data\[formats\]"):
        rollout_data.open(ROOT / "lerobot_v3/vectors")


# GR00T.


def test_parts_of_a_groot_set_are_delivered_on_request_and_annotations_become_texts() -> None:
    path = ROOT / "lerobot_v21/groot_video"
    recording = rollout_data.open(path)
    parts = recording.metadata["components"]
    assert parts["state"]["gripper"] == {"field": "observation/state", "columns": [2, 3]}
    assert parts["video"]["ego_view"] == {"field": "observation/images.ego_view", "columns": None}
    assert recording[1]["annotation.human.action.task_description"] == [TASKS[1]] * 2
    assert "observation/state.arm" not in recording.schema
    split = rollout_data.open(path, components=True)
    for number, episode in enumerate(split):
        n = len(episode)
        np.testing.assert_array_equal(
            episode["observation/state.arm"], state(FIRST + number, n)[:, :2]
        )
        np.testing.assert_array_equal(
            episode["observation/state.gripper"], state(FIRST + number, n)[:, 2:]
        )
        np.testing.assert_array_equal(episode["action.gripper"], action(FIRST + number, n)[:, 1:])
        np.testing.assert_array_equal(episode.action, action(FIRST + number, n))


def test_parts_outside_a_vector_are_left_out(tmp_path: Path) -> None:
    path = LeRobotSet(tmp_path / "set", [2], "v2.1").write()
    wrong = {
        "a": {"start": 2, "end": 4},
        "b": {"start": 1},
        "c": {"start": 0, "end": 3, "original_key": ["no"]},
        "d": 3,
    }
    (path / "meta" / "modality.json").write_text(
        json.dumps({"state": {**wrong, "good": {"start": 0, "end": 1}}})
    )
    recording = rollout_data.open(path, components=True)
    assert len(recording.problems) == 4
    assert recording[0]["observation/state.good"].shape == (2, 1)


def test_an_empty_set_has_no_episodes(tmp_path: Path) -> None:
    made = LeRobotSet(tmp_path / "set", [1])
    made.entries, made.tables = [], []
    made.info |= {"total_episodes": 0, "total_frames": 0}
    path = tmp_path / "set"
    (path / "meta").mkdir(parents=True)
    (path / "meta" / "info.json").write_text(json.dumps(made.info))
    pq.write_table(pa.table({"task_index": [0], "task": ["x"]}), path / "meta" / "tasks.parquet")
    assert len(rollout_data.open(path)) == 0


def test_options_are_checked() -> None:
    with pytest.raises(UsageError, match="on_bad_index"):
        rollout_data.open(ROOT / "lerobot_v3/vectors", on_bad_index="ignore")
    assert rollout_data.open(ROOT / "lerobot_v3/vectors").metadata["fps"] == FPS
