"""Folders to edit, and their content as all kinds of readers return it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import rollout_data
from rollout_data import RolloutDataset, WindowDataset
from tests.files.readback import trajectories_of
from tests.files.recorded import record

LENGTHS = [3, 7, 5, 9, 4, 6, 8, 2, 5, 7]


def folder_of(
    path: Path, writers: tuple[str, ...] = ("a", "b"), num: int = 10, **options: Any
) -> Path:
    """Record `num` trajectories of each writer. Blocks end within trajectories.

    The observations of trajectory k of writer w have the number 100 * w + k.
    """
    for number, writer in enumerate(writers):
        about = {
            "writer_name": writer,
            "flush_every": 7,
            "with_final": True,
            "num_envs": 2,
            **options,
        }
        record(path, LENGTHS[:num], first_number=100 * number, **about)
    return path


def content(path: Any) -> dict[str, Any]:
    """Return id -> (fields, final observation, metadata) of all episodes, in order."""
    result = {}
    for episode in rollout_data.open(path):
        fields = {
            name: np.asarray(episode.read(name)).tolist()
            for name in [*episode.schema, *episode.texts]
        }
        final = episode.final_observation
        parts = dict(final) if isinstance(final, Mapping) else {"": final}
        ended = (
            None
            if final is None
            else {name: np.asarray(item).tolist() for name, item in parts.items()}
        )
        result[episode.id] = (fields, ended, dict(episode.metadata))
    return result


def ids(path: Any) -> set[str]:
    return set(rollout_data.open(path).ids)


def number_of(episode_id: str, writers: tuple[str, ...] = ("a", "b")) -> int:
    """Return the number in the observations of a trajectory of `folder_of`."""
    recording_order = {name: 100 * place for place, name in enumerate(writers)}
    writer, _, number = episode_id.partition(":")
    return recording_order[writer] + int(number)


def streamed(path: Any, **options: Any) -> set[int]:
    """Return the numbers of the trajectories that a `RolloutDataset` delivers."""
    actual: set[int] = set()
    for batch in RolloutDataset(path, 1, device="cpu", num_transitions_per_env=4, **options):
        actual |= set(
            batch.observation[batch.valid.squeeze(-1)][..., 0].long().reshape(-1).tolist()
        )
    return actual


def windowed(dataset: WindowDataset) -> set[int]:
    return {int(dataset[place]["observation"][0, 0]) for place in range(len(dataset))}


def by_the_format(path: Path) -> set[str]:
    """Return the ids of the trajectories that a naive reader of `FORMAT.md` finds."""
    return {f"{trajectory.writer}:{trajectory.number}" for trajectory in trajectories_of(path)}


def files(path: Path) -> dict[str, tuple[bytes, int]]:
    """Return the content and the modification time of each file."""
    there = sorted(item for item in path.rglob("*") if item.is_file())
    return {
        str(item.relative_to(path)): (item.read_bytes(), item.stat().st_mtime_ns) for item in there
    }
