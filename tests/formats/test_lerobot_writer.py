"""Our reader and lerobot read the LeRobot datasets that we write, also after the writer was killed."""

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
from rollout_data.formats.convert import convert  # noqa: E402
from rollout_data.formats.registry import writer_class  # noqa: E402
from storage.errors import UsageError  # noqa: E402
from tests.formats.cases import ROOT  # noqa: E402
from tests.formats.lerobot_sets import FIRST, TASKS, LeRobotSet, check, feature, lists  # noqa: E402
from tests.formats.values import action, picture, state  # noqa: E402
from tests.recordings import conversions  # noqa: E402
from tests.recordings.conversions import demos, place, stop_after_three  # noqa: E402

LENGTHS = [3, 1, 4, 2]
VERSIONS = ["v3.0", "v2.1"]


def written(source: Any, target: Path, **options: Any) -> Any:
    changes = convert(source, target, "lerobot", progress=False, **options).changes
    return rollout_data.open(target), changes


@pytest.mark.parametrize("version", VERSIONS)
def test_a_copy_has_fields_of_every_kind_as_recorded(tmp_path: Path, version: str) -> None:
    columns = {
        "observation.fine": (
            feature("float64", [2]),
            lambda e, n: lists(state(e, n, 2, "float64") + 1e-9),
        ),
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


def test_a_copy_has_pictures_and_depth_as_recorded(tmp_path: Path) -> None:
    source = rollout_data.open(ROOT / "lerobot_v3/images")
    back, changes = written(source, tmp_path / "set")
    assert changes == {}
    assert back.metadata["units"] == source.metadata["units"]
    for mine, theirs in zip(source, back, strict=True):
        for name in mine.schema:
            np.testing.assert_array_equal(theirs[name], mine[name])
    older, changes = written(source, tmp_path / "older", version="v2.1")
    assert sorted(what.split(",")[0] for what in changes) == [
        "depth is written as numbers",
        "field 'observation/images.depth_m' is called 'observation/depth_m'",
        "field 'observation/images.depth_mm' is called 'observation/depth_mm'",
    ]
    for mine, theirs in zip(source, older, strict=True):
        np.testing.assert_array_equal(
            theirs["observation/images.hwc"], mine["observation/images.hwc"]
        )
        np.testing.assert_array_equal(
            theirs["observation/depth_m"], mine["observation/images.depth_m"]
        )


@pytest.mark.parametrize(
    ("version", "video"), [("v3.0", "h264"), ("v2.1", "h264"), ("v3.0", "av1")]
)
def test_pictures_become_video_on_request(tmp_path: Path, version: str, video: str) -> None:
    pytest.importorskip("av", reason="the extra `video` is missing")

    def smooth(episode: int, length: int) -> Any:
        from rollout_data.formats.encoded_images import encode_picture

        return pa.array(
            [
                {"bytes": encode_picture(item), "path": ""}
                for item in picture(episode, length, 64, 96)
            ]
        )

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
    assert modality["state"] == {
        "state": {"start": 0, "end": 3, "original_key": "observation.state"}
    }
    assert modality["video"] == {"ego_view": {"original_key": "observation.images.ego_view"}}
    assert back[1]["annotation.human.task_description"] == [TASKS[1]] * 2
    with pytest.raises(UsageError, match=r"v2\.1"):
        written(source, tmp_path / "other", groot=True)


NUMBERED = ("timestamp", "frame_index", "episode_index", "index", "task_index")
QUANTILES = {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}


def check_statistics(got: Any, rows: np.ndarray, where: str) -> None:
    """Compare statistics of LeRobot with those of numpy."""
    exact = rows.astype(np.float64)
    expected = {name: getattr(exact, name)(0) for name in ("min", "max", "mean", "std")}
    expected |= {name: np.quantile(exact, share, axis=0) for name, share in QUANTILES.items()}
    assert set(got) == {*expected, "count"}, where
    for name, values in expected.items():
        np.testing.assert_allclose(
            np.squeeze(got[name]),
            np.squeeze(values),
            rtol=1e-9,
            atol=1e-12,
            err_msg=f"{where} {name}",
        )
    assert list(got["count"]) == [len(rows)], where


def rows_of(target: Path, number: int | None) -> dict[str, np.ndarray]:
    """Read the numbers of one episode, or of all, with pyarrow alone."""
    files = sorted(target.glob("data/*/*.parquet"))
    tables = [
        pq.read_table(item) for item in (files if number is None else files[number : number + 1])
    ]
    result: dict[str, np.ndarray] = {}
    for name, kind in zip(tables[0].column_names, tables[0].schema.types, strict=True):
        if not pa.types.is_struct(kind) and not pa.types.is_string(kind):
            result[name] = np.array([row for table in tables for row in table[name].to_pylist()])
    return result


@pytest.mark.parametrize("version", VERSIONS)
def test_statistics_have_exact_quantiles_of_each_episode_and_of_all_frames(
    tmp_path: Path, version: str
) -> None:
    lengths = [3, 1, 40, 23]
    rng = np.random.default_rng(1)
    columns = {
        "observation.grid": (
            feature("float32", [2, 3]),
            lambda e, n: pa.array(
                rng.normal(size=(n, 2, 3)).astype("f4").tolist(), pa.list_(pa.list_(pa.float32()))
            ),
        ),
        "observation.skewed": (
            feature("float64", [2]),
            lambda e, n: lists(rng.exponential(size=(n, 2)) + 1e6 * e),
        ),
        "next.success": (feature("bool", [1]), lambda e, n: np.arange(n) == n - 1),
    }
    source = LeRobotSet(tmp_path / "source", lengths, columns=columns).write()
    written(source, tmp_path / "set", version=version)
    if version == "v3.0":
        entries = pq.read_table(tmp_path / "set" / "meta" / "episodes").to_pylist()
    else:
        lines = (tmp_path / "set" / "meta" / "episodes_stats.jsonl").read_text().splitlines()
        stats = [json.loads(line)["stats"] for line in lines]
        entries = [
            {f"stats/{a}/{b}": v for a, statistics in item.items() for b, v in statistics.items()}
            for item in stats
        ]
    for number, entry in enumerate(entries):
        rows = rows_of(tmp_path / "set", number)
        assert {*NUMBERED, "action", "next.success"} <= rows.keys()
        for name, values in rows.items():
            prefix = f"stats/{name}/"
            got = {
                key.removeprefix(prefix): value
                for key, value in entry.items()
                if key.startswith(prefix)
            }
            check_statistics(got, values, f"episode {number}, {name}")
    if version == "v3.0":
        total = json.loads((tmp_path / "set" / "meta" / "stats.json").read_text())
        rows = rows_of(tmp_path / "set", None)
        assert total.keys() == rows.keys()
        for name, values in rows.items():
            check_statistics(total[name], values, name)


def test_statistics_of_pictures_and_depth_are_those_of_all_pixels(tmp_path: Path) -> None:
    source = rollout_data.open(ROOT / "lerobot_v3/images")
    written(source, tmp_path / "set")
    total = json.loads((tmp_path / "set" / "meta" / "stats.json").read_text())
    entries = pq.read_table(tmp_path / "set" / "meta" / "episodes").to_pylist()
    for name in ("hwc", "depth_m", "depth_mm"):
        feature_name = f"observation.images.{name}"
        if feature_name not in total:
            continue
        pictures = [episode[f"observation/images.{name}"] for episode in source]
        scale = 255 if name == "hwc" else 1
        num_channels = 3 if name == "hwc" else 1
        groups = [(total[feature_name], np.concatenate(pictures))]
        for entry, mine in zip(entries, pictures, strict=True):
            prefix = f"stats/{feature_name}/"
            got = {
                key.removeprefix(prefix): value
                for key, value in entry.items()
                if key.startswith(prefix)
            }
            groups.append((got, mine))
        for got, mine in groups:
            assert np.shape(got["q01"]) == (num_channels, 1, 1)
            assert list(got["count"]) == [len(mine)]
            pixels = mine.reshape(-1, num_channels).astype(np.float64) / scale
            for key, share in QUANTILES.items():
                np.testing.assert_allclose(
                    np.ravel(got[key]), np.quantile(pixels, share, axis=0), err_msg=key
                )
            for key in ("min", "max", "mean", "std"):
                np.testing.assert_allclose(
                    np.ravel(got[key]), getattr(pixels, key)(0), rtol=1e-6, atol=1e-9, err_msg=key
                )


def test_statistics_of_large_columns_are_the_same_from_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limits are internals: a column of 64 MiB would make the test slow."""
    from rollout_data.formats.lerobot import lerobot_statistics

    written(ROOT / "lerobot_v3/vectors", tmp_path / "in_memory")
    monkeypatch.setattr(lerobot_statistics, "_MEMORY_BYTES", 0)
    monkeypatch.setattr(lerobot_statistics, "_NUM_SUMMED", 3)
    written(ROOT / "lerobot_v3/vectors", tmp_path / "in_files")
    actual = [
        json.loads((tmp_path / name / "meta" / "stats.json").read_text())
        for name in ("in_memory", "in_files")
    ]
    assert actual[0].keys() == actual[1].keys()
    for name, statistics in actual[0].items():
        for key, values in statistics.items():
            np.testing.assert_allclose(actual[1][name][key], values, rtol=1e-12)
    assert not list((tmp_path / "in_files").rglob(".*"))


@pytest.mark.parametrize("version", ["v3.0", "v2.1"])
def test_a_resumed_conversion_has_the_statistics_of_one_that_was_not_stopped(
    tmp_path: Path, version: str
) -> None:
    source = demos(tmp_path / "source.hdf5")
    name = {"v3.0": "lerobot 3.0", "v2.1": "lerobot 2.1"}[version]
    conversions.convert(source, tmp_path / "whole", name)
    stop_after_three(source, tmp_path / "resumed", name)
    conversions.convert(source, tmp_path / "resumed", name)
    folders = [place(tmp_path / target, name) / "meta" for target in ("whole", "resumed")]
    file = "stats.json" if version == "v3.0" else "episodes_stats.jsonl"
    assert (folders[0] / file).read_bytes() == (folders[1] / file).read_bytes()


def test_missing_values_are_left_out_of_statistics(tmp_path: Path) -> None:
    values = np.array([[np.nan, 1], [3, 2], [5, np.nan]], np.float32)
    made = LeRobotSet(tmp_path / "source", [3])
    made.tables[0] = made.tables[0].append_column("observation.gaps", lists(values))
    written(made.write(), tmp_path / "set")
    got = json.loads((tmp_path / "set" / "meta" / "stats.json").read_text())["observation.gaps"]
    assert (got["min"], got["max"], got["mean"], got["q50"], got["count"]) == (
        [3, 1],
        [5, 2],
        [4, 1.5],
        [4, 1.5],
        [3],
    )


def test_the_texts_of_tasks_are_the_index_that_pandas_reads(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    written(ROOT / "lerobot_v3/vectors", tmp_path / "set")
    table = pandas.read_parquet(tmp_path / "set" / "meta" / "tasks.parquet")
    assert list(table.index) == list(TASKS)
    assert list(table.columns) == ["task_index"]


def record_unlike(folder: Path) -> Any:
    """Record three episodes. Each lacks fields of the others, and two are unfinished."""
    from rollout_data import RolloutWriter

    paths = []
    lacking = {"a": "", "b": "contact", "c": "effort count words camera reward"}
    for name, missing in lacking.items():
        paths.append(folder / name)
        with RolloutWriter(
            folder / name, 1, writer_name=name, durable=False, metadata={"frame_rate_hz": 10}
        ) as writer:
            for frame in range(4):
                row = np.full((1, 2), 10 * ord(name) + frame, np.float32)
                more = {
                    "contact": np.array([True]),
                    "effort": row.astype(np.float64),
                    "count": np.array([frame]),
                    "words": ["go"],
                    "reward": row[:, 0],
                }
                more = {key: value for key, value in more.items() if key not in missing.split()}
                camera = (
                    {}
                    if "camera" in missing
                    else {"camera": np.full((1, 8, 8, 3), frame, np.uint8)}
                )
                is_end = name == "a" and frame == 3
                notes = {"episode": [{"success": True, "task": "lift"}]} if is_end else {}
                writer.add(
                    observation={"state": row, **camera},
                    action=row,
                    terminated=[is_end],
                    **more,
                    **notes,
                )
    return paths


class Together(list):  # type: ignore[type-arg]
    """Episodes of several recordings."""


@pytest.mark.parametrize("version", VERSIONS)
def test_missing_flags_are_false_and_missing_floats_nan_and_other_fields_are_left_out(
    tmp_path: Path, version: str
) -> None:
    episodes = Together(
        episode for path in record_unlike(tmp_path) for episode in rollout_data.open(path)
    )
    made = writer_class("lerobot")(
        tmp_path / "set", episodes, {"frame_rate_hz": 10}, {"version": version}
    )
    for episode in episodes:
        made.add(episode)
    made.close()
    rows = rows_of(tmp_path / "set", None)
    assert not {"count", "words", "next.reward", "observation.images.camera"} & rows.keys()
    assert rows["contact"].tolist() == [True] * 4 + [False] * 4 + [True] * 4
    assert np.isnan(rows["effort"]).any(1).tolist() == [False] * 8 + [True] * 4
    assert rows["next.success"].tolist() == [False] * 3 + [True] + [False] * 8
    assert rows["next.done"].tolist() == [False] * 3 + [True] + [False] * 8
    report = made.report
    assert report["field 'contact' is False in episodes without it"] == ["b:0"]
    assert report["field 'effort' is NaN in episodes without it"] == ["c:0"]
    assert report["'next.success' is False in episodes without this information"] == ["b:0", "c:0"]
    for name in ("count", "words", "observation/camera", "reward"):
        assert report[f"field {name!r} is left out: not all episodes have it"] == ["a:0", "b:0"]
    back = rollout_data.open(tmp_path / "set")
    absent = [item.metadata.get("absent_fields") for item in back]
    assert absent == [None, ["contact", "next.success"], ["effort", "next.success"]]
    assert [episode.success for episode in back] == [True, None, None]
    again, changes = written(back, tmp_path / "again", version=version)
    assert [item.metadata.get("absent_fields") for item in again] == absent
    assert not [what for what in changes if "lack" in what or "left out" in what]
    rollout_data.convert(back, tmp_path / "own", progress=False)
    own = rollout_data.open(tmp_path / "own")
    assert "effort" not in own[2].schema and "effort" in own[1].schema


def test_fields_with_the_same_feature_are_refused(tmp_path: Path) -> None:
    from rollout_data import RolloutWriter

    with RolloutWriter(
        tmp_path / "own", 1, durable=False, metadata={"frame_rate_hz": 10}
    ) as writer:
        row = np.ones((1, 2), np.float32)
        writer.add(observation={"a": {"b": row}, "a.b": 2 * row}, action=row, terminated=[True])
    with pytest.raises(UsageError, match=r"both become feature 'observation\.a\.b'"):
        written(tmp_path / "own", tmp_path / "set")


def speaking(lengths: list[int], folder: Path) -> LeRobotSet:
    """Write a set with LeRobot's columns of language."""
    fields = [("role", pa.string()), ("content", pa.string()), ("style", pa.string())]
    shown = [("camera", pa.string()), ("tool_calls", pa.list_(pa.string()))]
    events = pa.list_(pa.struct([*fields, *shown]))
    persistent = pa.list_(pa.struct([*fields, ("timestamp", pa.float32()), *shown]))
    made = LeRobotSet(folder, lengths)
    tables = []
    for number, (table, length) in enumerate(zip(made.tables, lengths, strict=True)):
        held = [
            {
                "role": "assistant",
                "content": f"наклони {number}",
                "style": "subtask",
                "timestamp": 0.1 * place,
            }
            for place in range(2)
        ]
        calls = [
            {
                "role": "user",
                "content": "стоп",
                "style": None,
                "camera": "front",
                "tool_calls": ["a", None],
            }
        ]
        table = table.append_column("language_persistent", pa.array([held] * length, persistent))
        spoken = [None, [], calls]
        table = table.append_column("language_events", pa.array((spoken * length)[:length], events))
        tables.append(
            table.append_column(
                "subtasks", pa.array([["grasp", "lift"]] * length, pa.list_(pa.string()))
            )
        )
    made.tables = tables
    made.info["features"] |= {
        name: feature("language", [1]) for name in ("language_persistent", "language_events")
    }
    return made


@pytest.mark.parametrize("way", ["to LeRobot", "through ours", "through ours to version 2.1"])
def test_columns_of_language_keep_their_types_and_values(tmp_path: Path, way: str) -> None:
    lengths = [4, 1, 3]
    source: Any = speaking(lengths, tmp_path / "source").write()
    expected = pa.concat_tables(
        [pq.read_table(path) for path in sorted((source / "data").rglob("*.parquet"))]
    )
    if way != "to LeRobot":
        assert rollout_data.convert(source, tmp_path / "own", progress=False).changes == {}
        source = tmp_path / "own"
    version = "v2.1" if "2.1" in way else "v3.0"
    _, changes = written(source, tmp_path / "set", version=version)
    assert not [what for what in changes if "text" in what or "language" in what]
    files = sorted((tmp_path / "set" / "data").rglob("*.parquet"))
    got = pa.concat_tables([pq.read_table(path) for path in files])
    for name in ("language_persistent", "language_events", "subtasks"):
        assert got.schema.field(name).type == expected.schema.field(name).type
        assert got[name].to_pylist() == expected[name].to_pylist()
    features = json.loads((tmp_path / "set" / "meta" / "info.json").read_text())["features"]
    assert features["language_events"]["dtype"] == "language"


EVENTS = pa.list_(pa.struct([("role", pa.string()), ("at", pa.int64())]))
#: Column of language -> its array by episode and length.
UNUSUAL_LANGUAGE: dict[str, Callable[[int, int], pa.Array]] = {
    "plain texts": lambda episode, length: pa.array(
        [f"take {episode} {row}" for row in range(length)]
    ),
    "large texts": lambda episode, length: pa.array(
        [f"take {episode} {row}" for row in range(length)], "large_string"
    ),
    "no value in the first file": lambda episode, length: (
        pa.array([[]] * length, pa.list_(pa.null()))
        if not episode
        else pa.array([[{"role": "user", "at": 2**62 + row}] for row in range(length)], EVENTS)
    ),
}


@pytest.mark.each_value
@pytest.mark.parametrize("is_through_ours", [False, True])
@pytest.mark.parametrize("name", ["language_events", "subtask"])
@pytest.mark.parametrize("kind", UNUSUAL_LANGUAGE)
def test_columns_of_language_keep_unusual_types(
    tmp_path: Path, kind: str, name: str, is_through_ours: bool
) -> None:
    lengths, files = [4, 1, 3], [0, 1, 2]
    made = LeRobotSet(tmp_path / "source", lengths, files=files)
    columns = [UNUSUAL_LANGUAGE[kind](episode, length) for episode, length in enumerate(lengths)]
    made.tables = [
        table.append_column(name, column)
        for table, column in zip(made.tables, columns, strict=True)
    ]
    source = made.write()
    if is_through_ours:
        rollout_data.convert(source, tmp_path / "own", progress=False)
        source = tmp_path / "own"
    for version in ("v3.0", "v2.1"):
        target = tmp_path / version
        written(source, target, version=version)
        got = [pq.read_table(file)[name] for file in sorted((target / "data").rglob("*.parquet"))]
        assert all(item.type == columns[-1].type for item in got)
        assert [item.to_pylist() for item in got] == [column.to_pylist() for column in columns]


def test_a_key_of_merged_language_without_a_field_is_refused(tmp_path: Path) -> None:
    rows = [{"role": "user", "content": "stop"}]
    for name, row in (("one", rows), ("other", [{**rows[0], "speaker": "Ann"}])):
        made = LeRobotSet(tmp_path / name, [2])
        made.tables = [
            table.append_column("language_events", pa.array([row] * 2)) for table in made.tables
        ]
        made.write()
    rollout_data.merge([tmp_path / "one", tmp_path / "other"], tmp_path / "merged")
    with pytest.raises(
        UsageError, match=r"'language_events' in episode .* no field for the key 'speaker'"
    ):
        written(tmp_path / "merged", tmp_path / "set")


def test_a_column_of_times_that_python_cannot_hold_is_left_out_and_reported(tmp_path: Path) -> None:
    made = LeRobotSet(tmp_path / "source", [4, 3])
    times = [pa.array([10**18 + 1] * length, pa.timestamp("ns")) for length in made.lengths]
    made.tables = [
        table.append_column("when", column)
        for table, column in zip(made.tables, times, strict=True)
    ]
    recording = rollout_data.open(made.write())
    assert [str(problem) for problem in recording.problems if "'when'" in str(problem)]
    assert len(recording) == 2 and "when" not in recording[0].schema


def test_names_of_joints_are_kept(tmp_path: Path) -> None:
    made = LeRobotSet(tmp_path / "source", [2])
    made.info["features"]["observation.state"]["names"] = ["shoulder", "elbow", "wrist"]
    written(made.write(), tmp_path / "set")
    features = json.loads((tmp_path / "set" / "meta" / "info.json").read_text())["features"]
    assert features["observation.state"]["names"] == ["shoulder", "elbow", "wrist"]


def test_columns_of_extension_types_that_another_package_registers_are_read(tmp_path: Path) -> None:
    """The package `datasets` registers such a type when it is imported, and LeRobot's writer uses it."""

    class Array2D(pa.ExtensionType):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(
                pa.list_(pa.list_(pa.float32())), "datasets.features.features.Array2DExtensionType"
            )

        def __arrow_ext_serialize__(self) -> bytes:
            return b'[[2, 3], "float32"]'

        @classmethod
        def __arrow_ext_deserialize__(cls, storage_type: Any, serialized: bytes) -> Any:
            return cls()

    made = LeRobotSet(tmp_path / "set", [3, 2])
    grids = [
        state(number, length, 6).reshape(length, 2, 3) for number, length in enumerate(made.lengths)
    ]
    tables = []
    for table, grid in zip(made.tables, grids, strict=True):
        stored = pa.array(grid.tolist(), pa.list_(pa.list_(pa.float32())))
        tables.append(
            table.append_column(
                "observation.grid", pa.ExtensionArray.from_storage(Array2D(), stored)
            )
        )
    made.tables = tables
    made.info["features"]["observation.grid"] = feature("float32", [2, 3])
    path = made.write()
    for is_registered in (False, True):
        if is_registered:
            pa.register_extension_type(Array2D())
        try:
            recording = rollout_data.open(path)
            assert recording.problems == []
            for episode, grid in zip(recording, grids, strict=True):
                np.testing.assert_array_equal(episode["observation/grid"], grid)
        finally:
            if is_registered:
                pa.unregister_extension_type("datasets.features.features.Array2DExtensionType")


def off_by(seconds: float) -> Callable[[LeRobotSet], None]:
    def change(made: LeRobotSet) -> None:
        table = made.tables[1]
        times = pa.array(np.asarray(table["timestamp"]) + np.float32(seconds))
        made.tables[1] = table.set_column(table.column_names.index("timestamp"), "timestamp", times)

    return change


def in_words(made: LeRobotSet) -> None:
    texts = [pa.array([[{"role": "user", "content": "стоп"}]] * length) for length in made.lengths]
    made.tables = [
        table.append_column("language_events", item)
        for table, item in zip(made.tables, texts, strict=True)
    ]


REPORTED: dict[str, tuple[Callable[[LeRobotSet], None], dict[str, list[str]]]] = {
    "several tasks": (
        lambda made: made.entries[1].update(tasks=list(TASKS[::-1])),
        {"only the first task of an episode is written": ["1"]},
    ),
    "other times": (off_by(0.01), {"'timestamp' is recomputed": ["1"]}),
    "times that lerobot takes for those of the frames": (off_by(0.00005), {}),
    "language": (in_words, {}),
}


@pytest.mark.parametrize("name", REPORTED)
def test_changes_of_episodes_are_in_the_report(tmp_path: Path, name: str) -> None:
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
    assert (
        pq.read_metadata(
            tmp_path / "set" / "data" / "chunk-000" / "file-000.parquet"
        ).num_row_groups
        == 2
    )
    np.testing.assert_array_equal(back[0]["observation/long"], rows)
    np.testing.assert_array_equal(back[0].action, action(FIRST, 1200))


def test_episodes_without_actions_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="actions"):
        written(ROOT / "motion_npz/clips", tmp_path / "set")


def test_foreign_folders_are_not_overwritten_and_a_refused_option_leaves_no_files(
    tmp_path: Path,
) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "x").touch()
    with pytest.raises(UsageError, match=r"files but no 'rollout_conversion\.jsonl'"):
        written(ROOT / "lerobot_v3/vectors", tmp_path / "other")
    for options in ({"version": "v1"}, {"video": "mpeg"}, {"fps": 0}):
        with pytest.raises(UsageError):
            written(ROOT / "lerobot_v3/vectors", tmp_path / "third", **options)
        assert not (tmp_path / "third").exists()


KILLED = """
import sys
from rollout_data.formats.convert import convert
convert(sys.argv[1], sys.argv[2], "lerobot", progress=False, version=sys.argv[3])
"""


@pytest.mark.parametrize("version", VERSIONS)
def test_a_killed_writer_leaves_complete_episodes_and_resumes(tmp_path: Path, version: str) -> None:
    lengths = [3, 1, 4, 2] * 20
    source, target = LeRobotSet(tmp_path / "source", lengths).write(), tmp_path / "set"
    command = [sys.executable, "-c", KILLED, str(source), str(target), version]
    process = subprocess.Popen(
        command, cwd=Path(__file__).parents[2], env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    while len(list(target.glob("data/*/*.parquet"))) < 10:
        time.sleep(0.002)
        assert process.poll() is None or len(list(target.glob("data/*/*.parquet"))) >= 10
    process.send_signal(signal.SIGKILL)
    process.wait()
    recording = rollout_data.open(target)
    if recording.problems:
        assert 10 <= len(recording) <= len(lengths)
        assert "is incomplete: its writer was interrupted" in str(recording.problems[0])
        check(recording, lengths, list(range(len(recording))))
        convert(source, target, "lerobot", progress=False, version=version)
    recording = rollout_data.open(target)
    assert recording.problems == []
    check(recording, lengths)


def test_lerobot_reads_the_written_set(tmp_path: Path) -> None:
    lerobot = pytest.importorskip(
        "lerobot.datasets.lerobot_dataset", reason="its tests need the package lerobot"
    )
    version = lerobot.CODEBASE_VERSION
    source = rollout_data.open(ROOT / "lerobot_v3/images")
    written(source, tmp_path / "set", version=version)
    read = lerobot.LeRobotDataset("tests/set", root=tmp_path / "set")
    assert (read.num_episodes, len(read)) == (len(source), sum(map(len, source)))
    rows = iter(range(len(read)))
    for mine in source:
        for frame in range(len(mine)):
            got = read[next(rows)]
            np.testing.assert_array_equal(
                got["observation.state"].numpy(), mine.observation["state"][frame]
            )
            np.testing.assert_array_equal(got["action"].numpy(), mine.action[frame])
            pixels = (got["observation.images.hwc"].numpy() * 255).round().transpose(1, 2, 0)
            np.testing.assert_array_equal(pixels, mine.observation["images.hwc"][frame])
            assert got["task"] == mine.task


def test_windows_and_streams_have_the_same_numbered_language_in_a_set_and_in_our_copy(
    tmp_path: Path,
) -> None:
    source = speaking([4, 1, 3], tmp_path / "source").write()
    rollout_data.convert(source, tmp_path / "own", progress=False)
    names = ("language_persistent", "language_events", "subtasks")
    episodes = rollout_data.open(source)
    expected = {name: [text for episode in episodes for text in episode[name]] for name in names}
    for path in (source, tmp_path / "own"):
        windows = rollout_data.WindowDataset(path, length=1, texts=True)
        for name in names:
            assert [
                windows.texts[int(windows[place][name])] for place in range(len(windows))
            ] == expected[name]
        stream = rollout_data.RolloutDataset(path, 1, texts=True)
        texts = stream.texts
        got: dict[str, list[str]] = {name: [] for name in names}
        for _ in range(8):
            transition = stream.get_batch()
            for name in names:
                got[name].append(texts[int(transition.extras[name])])
        assert got == expected


def test_statistics_leave_out_nan_and_keep_infinite_neighbours_infinite(tmp_path: Path) -> None:
    values = np.array(
        [[np.nan, 1, np.nan], [2, np.inf, np.nan], [4, 3, np.nan], [6, 5, np.nan]], np.float32
    )
    columns = {
        "observation.odd": (
            feature("float32", [3]),
            lambda e, n: lists(values[:n] * (1 - 2 * (e % 2))),
        )
    }
    source = LeRobotSet(tmp_path / "source", [4, 4], columns=columns).write()
    written(source, tmp_path / "set")
    for number, sign in enumerate((1, -1)):
        [table] = [
            row
            for row in pq.read_table(tmp_path / "set/meta/episodes").to_pylist()
            if row["episode_index"] == number
        ]
        got = {
            name: table[f"stats/observation.odd/{name}"]
            for name in ("min", "max", "mean", "q50", "q99", "q01")
        }
        assert (got["q50"][:2], got["mean"][0]) == ([sign * 4, sign * 4], sign * 4)
        assert got["q99" if sign > 0 else "q01"][1] == sign * np.inf
        assert all(np.isnan(value[2]) for value in got.values())


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (
            [{"role": "user", "at": 10**18 + 1}],
            pa.list_(pa.struct([("role", pa.string()), ("at", pa.timestamp("ns"))])),
        ),
        (
            [{"role": "user"}],
            pa.list_(pa.struct([("role", pa.string()), ("role", pa.string())])),
        ),
    ],
)
def test_a_column_of_language_whose_values_json_cannot_hold_is_left_out_and_reported(
    tmp_path: Path, values: list[dict[str, Any]], kind: Any
) -> None:
    made = LeRobotSet(tmp_path / "source", [4, 3])
    column = pa.array([values] * 4, kind)
    made.tables = [
        table.append_column("language_events", column.slice(0, length))
        for table, length in zip(made.tables, made.lengths, strict=True)
    ]
    recording = rollout_data.open(made.write())
    assert any("'language_events'" in str(problem) for problem in recording.problems)
    done = rollout_data.convert(recording, tmp_path / "own", progress=False)
    assert done.num_episodes == 2 and any(
        "'language_events'" in str(problem) for problem in done.problems
    )
    for mine, theirs in zip(recording, rollout_data.open(tmp_path / "own"), strict=True):
        np.testing.assert_array_equal(mine["observation/state"], theirs["observation/state"])
