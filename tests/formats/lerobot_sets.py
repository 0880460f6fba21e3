"""LeRobot datasets for tests, written with pyarrow alone.

Values are those of `values.py`, with episodes from 50 on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import rollout_data
from tests.formats.values import action, reward, state

FIRST = 50
FPS = 10
TASKS = ("pick up the blüe cube", "开抽屉")
SCALARS = {
    "timestamp": "float32",
    **dict.fromkeys(("frame_index", "episode_index", "index", "task_index"), "int64"),
}
DATA_3 = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
VIDEO_3 = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
DATA_2 = "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet"
VIDEO_2 = "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4"


def feature(dtype: str, shape: Sequence[int], **more: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "names": None, **more}


def lists(rows: np.ndarray, is_fixed: bool = True) -> pa.Array:
    """Return a column of vectors, as fixed-size or plain lists."""
    kind = pa.list_(pa.from_numpy_dtype(rows.dtype), rows.shape[1] if is_fixed else -1)
    return pa.array(list(rows), kind)


@dataclass
class LeRobotSet:
    """A dataset before it is written. Tests change `info`, `entries` or `files` to make it wrong.

    Attributes:
        path: Its folder.
        lengths: Of the episodes.
        version: "v3.0", "v2.1" or "v2.0".
        files: In version 3, the data file of each episode; None for all in the first.
        columns: Further columns of a row group: name -> (feature, function of (episode from 50 on,
            length)).
        has_reward: Whether `next.reward` and `next.done` are there.
    """

    path: Path
    lengths: Sequence[int]
    version: str = "v3.0"
    files: Sequence[int] | None = None
    columns: dict[str, tuple[dict[str, Any], Callable[[int, int], Any]]] = field(
        default_factory=dict
    )
    has_reward: bool = True

    def __post_init__(self) -> None:
        self.is_3 = self.version.startswith("v3")
        starts = np.cumsum([0, *self.lengths]).tolist()
        self.tables = [self.table(number, start) for number, start in enumerate(starts[:-1])]
        self.entries = [
            {"episode_index": number, "tasks": [TASKS[number % 2]], "length": length}
            for number, length in enumerate(self.lengths)
        ]
        if self.is_3:
            for entry, start in zip(self.entries, starts, strict=False):
                file = self.files[entry["episode_index"]] if self.files else 0
                entry["data/chunk_index"], entry["data/file_index"] = 0, file
                entry["dataset_from_index"], entry["dataset_to_index"] = (
                    start,
                    start + entry["length"],
                )
        vectors = {"observation.state": feature("float32", [3]), "action": feature("float32", [2])}
        rewards = {"next.reward": feature("float32", [1]), "next.done": feature("bool", [1])}
        self.info: dict[str, Any] = {
            "codebase_version": self.version,
            "robot_type": "test_arm",
            "fps": FPS,
            "total_episodes": len(self.lengths),
            "total_frames": starts[-1],
            "total_tasks": len(TASKS),
            "chunks_size": 1000,
            "splits": {"train": f"0:{len(self.lengths)}"},
            "data_path": DATA_3 if self.is_3 else DATA_2,
            "video_path": None,
            "features": {
                **vectors,
                **(rewards if self.has_reward else {}),
                **{name: about for name, (about, _) in self.columns.items()},
                **{name: feature(dtype, [1]) for name, dtype in SCALARS.items()},
            },
        }

    def table(self, number: int, start: int) -> pa.Table:
        episode, length = FIRST + number, self.lengths[number]
        frames = np.arange(length)
        actual: dict[str, Any] = {
            "observation.state": lists(state(episode, length)),
            "action": lists(action(episode, length)),
        }
        if self.has_reward:
            actual |= {"next.reward": reward(episode, length), "next.done": frames == length - 1}
        actual |= {name: make(episode, length) for name, (_, make) in self.columns.items()}
        actual |= {
            "timestamp": (frames / FPS).astype("f4"),
            "frame_index": frames,
            "episode_index": np.full(length, number),
        }
        return pa.table(
            {**actual, "index": start + frames, "task_index": np.full(length, number % 2)}
        )

    def write(self, row_group_rows: int | None = None) -> Path:
        """Write the set. Row groups have one episode each, or a number of rows."""
        meta = self.path / "meta"
        meta.mkdir(parents=True, exist_ok=True)
        (meta / "info.json").write_text(json.dumps(self.info, ensure_ascii=False), encoding="utf-8")
        if not self.is_3:
            self._write_2(meta)
            return self.path
        tasks = pa.table({"task_index": np.arange(len(TASKS)), "__index_level_0__": list(TASKS)})
        pq.write_table(tasks, meta / "tasks.parquet")
        (meta / "episodes" / "chunk-000").mkdir(parents=True, exist_ok=True)
        pq.write_table(
            pa.Table.from_pylist(self.entries), meta / "episodes" / "chunk-000" / "file-000.parquet"
        )
        groups: dict[int, list[pa.Table]] = {}
        for number, table in enumerate(self.tables):
            groups.setdefault(self.files[number] if self.files else 0, []).append(table)
        for file, tables in groups.items():
            path = self.path / DATA_3.format(chunk_index=0, file_index=file)
            path.parent.mkdir(parents=True, exist_ok=True)
            with pq.ParquetWriter(path, tables[0].schema) as writer:
                for table in [pa.concat_tables(tables)] if row_group_rows else tables:
                    writer.write_table(table, row_group_rows)
        return self.path

    def _write_2(self, meta: Path) -> None:
        tasks = [{"task_index": number, "task": task} for number, task in enumerate(TASKS)]
        for name, lines in (("tasks", tasks), ("episodes", self.entries)):
            text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
            (meta / f"{name}.jsonl").write_text(text, encoding="utf-8")
        for number, table in enumerate(self.tables):
            path = self.path / DATA_2.format(
                episode_chunk=number // self.info["chunks_size"], episode_index=number
            )
            path.parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(table, path)


def check(
    recording: rollout_data.Recording, lengths: list[int], numbers: list[int] | None = None
) -> None:
    """Compare vectors, reward, task and end of every episode."""
    numbers = list(range(len(lengths))) if numbers is None else numbers
    assert [episode.id for episode in recording] == [str(number) for number in numbers]
    for number, episode in zip(numbers, recording, strict=True):
        length = lengths[number]
        np.testing.assert_array_equal(episode.observation["state"], state(FIRST + number, length))
        np.testing.assert_array_equal(episode.action, action(FIRST + number, length))
        np.testing.assert_array_equal(episode.reward, reward(FIRST + number, length))
        np.testing.assert_array_equal(episode["next.done"], np.arange(length) == length - 1)
        assert episode.task == TASKS[number % 2]
        assert (episode.terminated, episode.truncated, episode.final_observation) == (
            None,
            None,
            None,
        )
        for start in range(length + 1):
            np.testing.assert_array_equal(
                episode.read("action", start, length), action(FIRST + number, length)[start:]
            )
