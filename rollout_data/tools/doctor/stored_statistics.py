"""Statistics and sums that are stored beside data, as plain arrays: of single episodes, and of the whole.

One rule: what is malformed is no statistic; other rules tell of damaged files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from storage.core.durable_files import read_text
from storage.errors import RolloutDataError

from ...formats.input_checks import file_inside, read_object
from ...formats.lerobot.lerobot_info import field_name
from ...formats.parquet import ParquetFile
from .batched_reading import Array

_KEYS = ("mean", "std", "min", "max")
_MAX_EPISODES = 2000
_MAX_BYTES = 1 << 24
#: Statistics of a whole LeRobot dataset.
STATISTICS = "meta/stats.json"
#: Attributes of Minari's episodes -> what they are.
_OF_REWARDS = {"rewards_mean": "mean", "rewards_min": "min", "rewards_max": "max"}


@dataclass(frozen=True)
class Told:
    """What is stored of a field: "mean", "std", "min", "max" -> float64 `[D]`."""

    field: str
    values: Mapping[str, Array]


def _told(field: str, about: Any) -> Told | None:
    if not isinstance(about, Mapping):
        return None
    try:
        values = {key: np.array(about[key], np.float64).reshape(-1) for key in _KEYS if about.get(key) is not None}
    except (TypeError, ValueError):
        return None
    return Told(field, values) if values else None


def _of_features(scan: Any, about: Any) -> Iterator[Told]:
    names = scan.metadata.get("features") or {}
    for source, one in about.items() if isinstance(about, Mapping) else ():
        if (told := _told(field_name(str(source), names), one)) is not None:
            yield told


def of_whole(scan: Any) -> Iterator[Told]:
    """Yield what is stored of all episodes together."""
    path = scan.recording.path
    if scan.recording.format == "lerobot" and (path / STATISTICS).exists():
        try:
            yield from _of_features(scan, read_object(file_inside(path, STATISTICS), _MAX_BYTES))
        except (RolloutDataError, OSError):
            return
    for key in ("statistics", "stats"):
        for name, about in (
            (scan.metadata.get(key) or {}).items() if isinstance(scan.metadata.get(key), Mapping) else ()
        ):
            if (told := _told(str(name), about)) is not None:
                yield told


def of_episodes(scan: Any) -> Iterator[tuple[int, Told]]:
    """Yield (place, what is stored) of single episodes, of some thousand at most."""
    places = {name: place for place, name in enumerate(scan.recording.ids)}
    if scan.recording.format == "minari":
        for place in range(min(scan.num_episodes, _MAX_EPISODES)):
            about = scan.recording.info(place).metadata
            values = {ours: about.get(name) for name, ours in _OF_REWARDS.items()}
            if (told := _told("reward", values)) is not None:
                yield place, told
    elif scan.recording.format == "lerobot":
        try:
            for episode, listed in islice(_lerobot(scan), _MAX_EPISODES):
                for told in _of_features(scan, listed):
                    if str(episode) in places:
                        yield places[str(episode)], told
        except (RolloutDataError, OSError, ValueError):
            return


def _lerobot(scan: Any) -> Iterator[tuple[Any, Any]]:
    """Yield (episode, feature -> statistics) of a LeRobot dataset of either version."""
    path = scan.recording.path
    if (path / "meta/episodes_stats.jsonl").exists():
        for line in read_text(file_inside(path, "meta/episodes_stats.jsonl"), max_bytes=_MAX_BYTES).splitlines():
            about = json.loads(line)
            yield about.get("episode_index"), about.get("stats")
    for table in sorted((path / "meta" / "episodes").rglob("*.parquet")):
        file = ParquetFile(file_inside(path, str(table.relative_to(path))))
        columns = [name for name in file.types if name.startswith("stats/") and name.count("/") == 2]
        for batch in file.batches(dict.fromkeys(["episode_index", *columns]), 0, file.num_rows) if columns else ():
            rows = {name: batch[name].to_pylist() for name in batch}
            for row, episode in enumerate(rows["episode_index"]):
                listed: dict[str, dict[str, Any]] = {}
                for column in columns:
                    _, feature, key = column.split("/")
                    listed.setdefault(feature, {})[key] = rows[column][row]
                yield episode, listed


def reward_sums(scan: Any) -> Iterator[tuple[str, Array, Array, Array, Array]]:
    """Yield (field, episodes, stored sums, sums of the rows, what they are compared with) of rewards."""
    names = list(scan.schema.below("reward"))
    if len(names) != 1 or names[0] not in scan.facts:
        return
    facts = scan.facts[names[0]]
    places = list[int]()
    stored = list[float]()
    if scan.files.folder is not None:
        found: dict[str, float] = {}
        for header in {(one.writer, one.sequence): one for one in scan.files.headers.values()}.values():
            if header.reward_sums.shape[1] == 1:  # a second copy of a block does not count
                for number, one in zip(header.fragments["trajectory"].tolist(), header.reward_sums[:, 0], strict=True):
                    found[f"{header.writer}:{number}"] = found.get(f"{header.writer}:{number}", 0.0) + float(one)
        ids = scan.recording.ids if found else []
        pairs = [(place, found[name]) for place, name in enumerate(ids) if name in found]
    else:
        count = min(scan.num_episodes, _MAX_EPISODES) if scan.recording.format == "minari" else 0
        told = [(place, scan.recording.info(place).metadata.get("rewards_sum")) for place in range(count)]
        pairs = [(place, float(one)) for place, one in told if isinstance(one, (float, int, np.floating))]
    rows = {number: row for row, number in enumerate(facts.numbers.tolist())}
    pairs = [(place, one) for place, one in pairs if place in rows]
    if pairs and facts.field.num_elements == 1:
        places = [place for place, _ in pairs]
        stored = [one for _, one in pairs]
        at = np.array([rows[place] for place in places])
        sums = facts.mean[at, 0].astype(np.float64) * facts.lengths[at]
        most = np.maximum(np.abs(facts.low[at, 0]), np.abs(facts.high[at, 0])).astype(np.float64) * facts.lengths[at]
        yield names[0], np.array(places), np.array(stored), sums, np.maximum(np.abs(sums), 0.01 * most)
