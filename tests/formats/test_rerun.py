"""Recordings of Rerun, read back by its own SDK."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rollout_data
from rollout_data import RolloutWriter, convert
from storage.errors import UsageError

LENGTHS = (4, 9, 1)
SIDES = (10, 12)
PICTURES = {
    "rgb": ((*SIDES, 3), "uint8"),
    "first": ((3, *SIDES), "uint8"),
    "depth": (SIDES, "uint16"),
}


def values(number: int, t: int, shape: tuple[int, ...], dtype: str) -> np.ndarray[Any, Any]:
    return (
        np.full((1, *shape), 20 * number + t, dtype)
        + np.arange(np.prod(shape)).reshape(shape).astype(dtype) % 3
    )


@pytest.fixture
def walk(tmp_path: Path) -> Path:
    with RolloutWriter(tmp_path / "walk", 1, durable=False, metadata={"env": "walk"}) as writer:
        for number, length in enumerate(LENGTHS):
            for t in range(length):
                is_last = t == length - 1
                writer.add(
                    observation={
                        "pos": values(number, t, (3,), "float32"),
                        "matrix": values(number, t, (2, 2), "float64"),
                        **{name: values(number, t, *about) for name, about in PICTURES.items()},
                    },
                    action=values(number, t, (2,), "float64"),
                    reward=np.array([[0.5 * t]]),
                    done=[is_last],
                    timeout=[is_last and number == 1],
                    final_observation={
                        "pos": values(number, length, (3,), "float32"),
                        "matrix": values(number, length, (2, 2), "float64"),
                        **{
                            name: values(number, length, *about) for name, about in PICTURES.items()
                        },
                    },
                    timestamp=np.array([[0.25 * t]]),
                    count=np.array([t]),
                    note=[["début" if t < 2 else "end"]],
                    episode=[{"task": "go", "success": number == 2} if is_last else None],
                )
    return tmp_path / "walk"


def chunks_of(path: Path) -> dict[str, dict[str, Any]]:
    """Return entity path -> column -> one value per row, and the values of static columns."""
    reader = pytest.importorskip(
        "rerun.chunk", reason="needs pip install 'rollout-data[rerun]' (500 MB)"
    ).RrdReader
    result: dict[str, dict[str, Any]] = {}
    for chunk in reader(path).stream():
        columns = chunk.to_record_batch().to_pydict()
        entity = result.setdefault(chunk.entity_path.replace("\\", ""), {})
        for name, rows in columns.items():
            if name != "rerun.controls.RowId":
                entity.setdefault(name, []).extend(rows)
    return result


def test_a_missing_sdk_raises_with_its_extra(walk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "rerun", None)
    with pytest.raises(UsageError, match=r"rollout-data\[rerun\]"):
        convert(walk, walk.parent / "x.rrd", to="rerun", progress=False)
    assert not (walk.parent / "x.rrd").exists()


def test_every_value_is_logged_with_its_frame_and_time(
    walk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("rerun.chunk", reason="needs pip install 'rollout-data[rerun]' (500 MB)")
    monkeypatch.setattr("rollout_data.formats.rerun_writer._PORTION_BYTES", 5000)  # some rows each
    done = convert(walk, walk.parent / "walk.rrd", to="rerun", progress=False)
    assert done.num_episodes == 3 and done.changes == {
        "field 'observation/matrix' is flattened: scalars of a step are a list": rollout_data.open(
            walk
        ).ids,
    }
    actual = chunks_of(walk.parent / "walk.rrd")
    assert json.loads(actual["/recording"]["metadata"][0][0])["env"] == "walk"
    for number, episode in enumerate(rollout_data.open(walk)):
        root, length = f"/{episode.id}", episode.length
        for name in (
            "observation/pos",
            "observation/matrix",
            "action",
            "reward",
            "timestamp",
            "count",
        ):
            entity = actual[f"{root}/{name}"]
            wanted = np.asarray(episode[name], np.float64).reshape(length, -1).tolist()
            if name.startswith("observation"):
                rest = name.partition("/")[2]
                wanted.append(np.float64(episode.final_observation[rest]).reshape(-1).tolist())
            assert (
                entity["frame"] == list(range(len(wanted))) and entity["Scalars:scalars"] == wanted
            )
        seconds = [item.total_seconds() for item in actual[f"{root}/action"]["time"]]
        assert seconds == [0.25 * t for t in range(length)]
        for name, (shape, dtype) in PICTURES.items():
            entity, kind = (
                actual[f"{root}/observation/{name}"],
                "DepthImage" if name == "depth" else "Image",
            )
            wanted = [values(number, t, shape, dtype)[0] for t in range(length + 1)]
            wanted = [np.moveaxis(item, 0, -1) if name == "first" else item for item in wanted]
            got = [np.array(row[0], np.uint8).tobytes() for row in entity[f"{kind}:buffer"]]
            assert got == [item.tobytes() for item in wanted]
            (about,) = entity[f"{kind}:format"][0]
            assert (about["height"], about["width"]) == SIDES
        assert actual[f"{root}/note"]["TextLog:text"] == [[text] for text in episode["note"]]
        end = actual[f"{root}/end"]
        assert end["frame"] == [length - 1] and end["TextLog:text"] == [
            ["truncated" if number == 1 else "terminated"]
        ]
        message = {
            name: actual[root][name][0][0]
            for name in ("terminated", "truncated", "success", "task", "length")
        }
        assert message == {name: getattr(episode, name) for name in message}


def test_an_interrupted_conversion_resumes_and_a_complete_one_is_not_replaced(
    walk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("rerun.chunk", reason="needs pip install 'rollout-data[rerun]' (500 MB)")
    from rollout_data.formats.rerun_writer import RerunWriter

    target, add = walk.parent / "new" / "walk.rrd", RerunWriter.add

    def stop(self: RerunWriter, episode: Any) -> None:
        if self.written:
            raise KeyboardInterrupt
        add(self, episode)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(RerunWriter, "add", stop)
        convert(walk, target, to="rerun", progress=False)
    assert not target.exists()
    assert convert(walk, target, to="rerun", progress=False).num_present == 1
    assert [path.name for path in target.parent.iterdir()] == ["walk.rrd"]
    entities = chunks_of(target)
    assert [
        len(entities[f"/{episode.id}/action"]["frame"]) for episode in rollout_data.open(walk)
    ] == list(LENGTHS)
    content = target.read_bytes()
    assert convert(walk, target, to="rerun", progress=False).num_present == len(LENGTHS)
    assert target.read_bytes() == content


def test_integers_that_no_float_represents_are_counted(tmp_path: Path) -> None:
    pytest.importorskip("rerun.chunk", reason="needs pip install 'rollout-data[rerun]' (500 MB)")
    row = np.ones((1, 2), np.float32)
    with rollout_data.RolloutWriter(tmp_path / "ours", 1, durable=False) as writer:
        for frame in range(4):
            stamp = np.array([[2**53 + frame]])
            writer.add(
                observation=row, action=row, stamp=stamp, small=stamp % 8, terminated=[frame == 3]
            )
    changes = convert(tmp_path / "ours", tmp_path / "x.rrd", to="rerun", progress=False).changes
    assert [*changes] == [
        "field 'stamp' (int64) is written as float64: 2 values change, by at most 1"
    ]
