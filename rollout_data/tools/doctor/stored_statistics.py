"""Read statistics and reward sums that files store in addition to the data.

A file may store statistics of single episodes, or of the whole recording. Malformed statistics are
skipped, because other rules report damaged files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from storage.core.durable_files import read_text
from storage.errors import RolloutDataError

from ...formats.input_checks import file_inside, read_object
from ...formats.lerobot.lerobot_info import field_name
from ...formats.parquet import ParquetFile
from .batched_reading import Array

_KEYS = ("mean", "std", "min", "max")
#: Maximum number of episodes whose statistics are compared.
_MAX_EPISODES = 2000
#: Maximum bytes of a file of statistics that is read.
_MAX_BYTES = 1 << 24
#: File with the statistics of a whole LeRobot dataset.
STATISTICS = "meta/stats.json"
#: File with the statistics of each episode in a LeRobot dataset of version 2.
_EPISODE_STATISTICS = "meta/episodes_stats.jsonl"
#: Key of each reward statistic in the metadata of a Minari episode.
_MINARI_REWARDS = {"mean": "rewards_mean", "min": "rewards_min", "max": "rewards_max"}


@dataclass(frozen=True)
class StoredStatistics:
    """Stored statistics of a field, float64 `[D]` each, by name: "mean", "std", "min", "max"."""

    field: str
    values: Mapping[str, Array]


@dataclass(frozen=True)
class RewardSums:
    """Stored and computed sums of rewards in K episodes.

    Attributes:
        field: Name of the reward field.
        numbers: int64 `[K]`, indices of the episodes.
        stored: `[K]`, stored sums.
        computed: `[K]`, sums computed from the rows.
        scale: `[K]`, typical size of a sum. A difference of sums is judged relative to it.
    """

    field: str
    numbers: Array
    stored: Array
    computed: Array
    scale: Array


def _parsed(field: str, stored: Any) -> Iterator[StoredStatistics]:
    """Yield the parsed statistics of a field, or nothing if they are malformed or empty."""
    if not isinstance(stored, Mapping):
        return
    values: dict[str, Array] = {}
    try:
        for key in _KEYS:
            if stored.get(key) is not None:
                values[key] = np.array(stored[key], np.float64).reshape(-1)
    except (TypeError, ValueError):
        return
    if values:
        yield StoredStatistics(field, values)


def _of_features(scan: Any, stored: Any) -> Iterator[StoredStatistics]:
    """Parse LeRobot statistics, a mapping by feature name. Yields the statistics of each field."""
    if not isinstance(stored, Mapping):
        return
    features = scan.metadata.get("features") or {}
    for feature, statistics in stored.items():
        yield from _parsed(field_name(str(feature), features), statistics)


def of_whole(scan: Any) -> Iterator[StoredStatistics]:
    """Yield the stored statistics of the whole recording, one per field."""
    path = scan.recording.path
    if scan.recording.format == "lerobot" and (path / STATISTICS).exists():
        try:
            stored = read_object(file_inside(path, STATISTICS), _MAX_BYTES)
            yield from _of_features(scan, stored)
        except (RolloutDataError, OSError):
            return
    for key in ("statistics", "stats"):
        stored = scan.metadata.get(key)
        if isinstance(stored, Mapping):
            for field, statistics in stored.items():
                yield from _parsed(str(field), statistics)


def of_episodes(scan: Any) -> Iterator[tuple[int, StoredStatistics]]:
    """Yield pairs (episode index, stored statistics) for the first 2000 episodes."""
    if scan.recording.format == "minari":
        yield from _of_minari_episodes(scan)
    elif scan.recording.format == "lerobot":
        yield from _of_lerobot_episodes(scan)


def _of_minari_episodes(scan: Any) -> Iterator[tuple[int, StoredStatistics]]:
    for place in range(min(scan.num_episodes, _MAX_EPISODES)):
        metadata = scan.recording.info(place).metadata
        stored = {key: metadata.get(name) for key, name in _MINARI_REWARDS.items()}
        for statistics in _parsed("reward", stored):
            yield place, statistics


def _of_lerobot_episodes(scan: Any) -> Iterator[tuple[int, StoredStatistics]]:
    places = {name: place for place, name in enumerate(scan.recording.ids)}
    try:
        for episode, stored in islice(_read_lerobot(scan.recording.path), _MAX_EPISODES):
            if str(episode) in places:
                for statistics in _of_features(scan, stored):
                    yield places[str(episode)], statistics
    except (RolloutDataError, OSError, ValueError):
        return


def _read_lerobot(path: Path) -> Iterator[tuple[Any, Any]]:
    """Read the statistics of each episode in a LeRobot dataset of version 2 or 3.

    Yields pairs of an episode index and a mapping from feature to statistics.
    """
    if (path / _EPISODE_STATISTICS).exists():
        text = read_text(file_inside(path, _EPISODE_STATISTICS), max_bytes=_MAX_BYTES)
        for line in text.splitlines():
            document = json.loads(line)
            yield document.get("episode_index"), document.get("stats")
    for table in sorted((path / "meta" / "episodes").rglob("*.parquet")):
        yield from _read_lerobot_table(file_inside(path, str(table.relative_to(path))))


def _read_lerobot_table(path: Any) -> Iterator[tuple[Any, Any]]:
    """Read the statistics of each episode in a LeRobot table with columns "stats/FEATURE/KEY"."""
    file = ParquetFile(path)
    columns = [name for name in file.types if name.startswith("stats/")]
    columns = [name for name in columns if name.count("/") == 2]
    if not columns:
        return
    names = dict.fromkeys(["episode_index", *columns])
    for batch in file.batches(names, 0, file.num_rows):
        values = {name: batch[name].to_pylist() for name in batch}
        for row, episode in enumerate(values["episode_index"]):
            stored: dict[str, dict[str, Any]] = {}
            for column in columns:
                _, feature, key = column.split("/")
                stored.setdefault(feature, {})[key] = values[column][row]
            yield episode, stored


def reward_sums(scan: Any) -> RewardSums | None:
    """Return the stored and the computed sums of rewards; None without stored sums."""
    names = list(scan.schema.below("reward"))
    if len(names) != 1 or names[0] not in scan.facts:
        return None
    facts = scan.facts[names[0]]
    if facts.field.num_elements != 1:
        return None
    if scan.files.folder is not None:
        stored = _stored_in_blocks(scan)
    elif scan.recording.format == "minari":
        stored = _stored_in_minari(scan)
    else:
        return None
    rows = {number: row for row, number in enumerate(facts.numbers.tolist())}
    stored = {place: total for place, total in stored.items() if place in rows}
    if not stored:
        return None

    chosen = np.array([rows[place] for place in stored])
    lengths = facts.lengths[chosen]
    computed = facts.mean[chosen, 0].astype(np.float64) * lengths
    largest = np.maximum(np.abs(facts.low[chosen, 0]), np.abs(facts.high[chosen, 0]))
    return RewardSums(
        names[0],
        np.array(list(stored)),
        np.array(list(stored.values())),
        computed,
        np.maximum(np.abs(computed), 0.01 * largest.astype(np.float64) * lengths),
    )


def _stored_in_blocks(scan: Any) -> dict[int, float]:
    """Read the stored sum of rewards of each episode from the block headers of a folder.

    Returns a map from episode index to sum.
    """
    sums: dict[str, float] = {}
    # If two files are copies of a block, only one of them is counted.
    headers = {(header.writer, header.sequence): header for header in scan.files.headers.values()}
    for header in headers.values():
        if header.reward_sums.shape[1] == 1:
            numbers = header.fragments["trajectory"].tolist()
            for number, total in zip(numbers, header.reward_sums[:, 0], strict=True):
                name = f"{header.writer}:{number}"
                sums[name] = sums.get(name, 0.0) + float(total)
    if not sums:
        return {}
    return {place: sums[name] for place, name in enumerate(scan.recording.ids) if name in sums}


def _stored_in_minari(scan: Any) -> dict[int, float]:
    """Read the stored sum of rewards of the first 2000 episodes of a Minari dataset.

    Returns a map from episode index to sum.
    """
    sums: dict[int, float] = {}
    for place in range(min(scan.num_episodes, _MAX_EPISODES)):
        total = scan.recording.info(place).metadata.get("rewards_sum")
        if isinstance(total, (float, int, np.floating)):
            sums[place] = float(total)
    return sums
