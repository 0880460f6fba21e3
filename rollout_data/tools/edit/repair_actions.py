"""Repairs of single episodes, by rule code.

A repair changes no value. It splits an episode into parts, or leaves out rows, fields or the final
observation. It is a function from a part of an episode to the parts that replace it. This module
writes no files; `repair_recording.py` writes the parts as new episodes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from storage.core.fields import Schema

from ...sources.recordings.episode import OBSERVATION, Episode, joined
from ...sources.video_range import VideoRange
from ..doctor.findings import Finding

Array = np.ndarray[Any, Any]
_END_FLAG = re.compile(r"(.*[/.])?(dones?|terminals?|terminated|truncat\w+|timeouts?)")
#: Number of frames that a repair keeps when it cuts frames at rest, or frames after success.
_KEPT_FRAMES = 5
#: Largest change of an action at rest in one step, as a fraction of the action's range.
_REST_SHARE = 0.01
#: Metadata of an episode that the reader derives from blocks. They are not copied to new blocks.
_INDEXED = ("env", "writer", "end_time_ns")


@dataclass
class EpisodePart:
    """Consecutive rows of an episode, with the interface of an episode to write.

    Rows are read from the episode only when a writer needs them.

    Attributes:
        episode: The episode.
        id: Name of the part, such as "demo_3/0".
        start, stop: First and stop row of the part in the episode.
        schema: Numeric fields of the part.
        terminated: Whether the part ends by a termination; None if its end is unknown.
        truncated: Whether the part ends by a truncation; None if its end is unknown.
        final_row: Index of the row of the episode that becomes the final observation of the part.
            If it equals the length of the episode, the part has the final observation of the
            episode. None means that the part has no final observation.
        length: Number of rows.
        final: Names of the fields in the final observation.
        texts, success, task, metadata: As in `Episode`.
    """

    episode: Episode
    id: str
    start: int
    stop: int
    schema: Schema
    terminated: bool | None
    truncated: bool | None
    final_row: int | None

    def __post_init__(self) -> None:
        episode = self.episode
        self.length = self.stop - self.start
        self.final: Collection[str] = ()
        if self.final_row == episode.length:
            self.final = episode.final
        elif self.final_row is not None:
            self.final = list(self.schema.below(OBSERVATION))
        self.texts = episode.texts
        self.success = episode.success
        self.task = episode.task
        self.metadata: Mapping[str, Any] = {
            name: value for name, value in episode.metadata.items() if name not in _INDEXED
        }

    @classmethod
    def whole(cls, episode: Episode) -> EpisodePart:
        """Return a part that has all rows of an episode."""
        return cls(
            episode=episode,
            id=episode.id,
            start=0,
            stop=episode.length,
            schema=episode.schema,
            terminated=episode.terminated,
            truncated=episode.truncated,
            final_row=episode.length if episode.final else None,
        )

    @property
    def final_observation(self) -> Any:
        """Observation after the last step of the part; None if it was not recorded."""
        row = self.final_row
        if row is None:
            return None
        if row == self.episode.length:
            return self.episode.final_observation
        rows = {name: self.episode.read(name, row, row + 1) for name in self.final}
        return joined(OBSERVATION, {name: values[0] for name, values in rows.items()})

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Any:
        """Read rows of a field, counted from the start of the part."""
        end = self.length if stop is None else stop
        return self.episode.read(name, self.start + start, self.start + end)

    def video(self, name: str) -> VideoRange | None:
        """Return None, so that writers decode videos instead of copying their files."""
        return None

    def columns(self, name: str) -> Array:
        """Read all rows of a field, flattened to `[T, D]`."""
        return np.asarray(self.read(name)).reshape(self.length, -1)

    def from_row(self, start: int) -> EpisodePart:
        """Return a part without the rows before `start`."""
        return replace(self, start=self.start + start)

    def until(self, stop: int) -> EpisodePart:
        """Return a part with the rows before `stop`, and with row `stop` as final observation."""
        if stop == self.length:
            return self
        row = self.start + stop
        return replace(self, stop=row, final_row=row, terminated=False, truncated=True)

    def split(self, cuts: list[int], terminated: bool) -> list[EpisodePart]:
        """Split the part into several parts.

        Args:
            cuts: First row of each part except the first part, ascending.
            terminated: Whether all parts but the last are terminated. Otherwise their end is
                unknown.
        """
        if not cuts:
            return [self]
        parts = []
        starts = [0, *cuts]
        stops = [*cuts, self.length]
        for number, (start, stop) in enumerate(zip(starts, stops, strict=True)):
            part = replace(self, start=self.start + start, stop=self.start + stop)
            if stop < self.length:
                part.final_row = None
                part.terminated = True if terminated else None
                part.truncated = False if terminated else None
            parts.append(replace(part, id=f"{self.id}/{number}"))
        return parts


def _whole(part: EpisodePart, finding: Finding, place: int) -> list[EpisodePart]:
    return [part]


def _at_end_flags(part: EpisodePart, finding: Finding, place: int) -> list[EpisodePart]:
    is_end = np.zeros(part.length, bool)
    for name in part.schema:
        if _END_FLAG.fullmatch(name):
            is_end |= part.columns(name).any(axis=1)
    cuts = np.flatnonzero(is_end[:-1]) + 1
    return part.split(cuts.tolist(), terminated=True)


def _at_jumps(part: EpisodePart, finding: Finding, place: int) -> list[EpisodePart]:
    frames = {stop - 1 for number, _, stop in finding.frames if number == place}
    cuts = [frame - part.start for frame in sorted(frames) if part.start < frame < part.stop]
    return part.split(cuts, terminated=False)


def _at_gaps(part: EpisodePart, finding: Finding, place: int) -> list[EpisodePart]:
    times = part.columns(str(finding.field))[:, 0].astype(np.float64)
    steps = np.diff(times)
    cuts = np.flatnonzero(steps > finding.evidence["threshold"] * np.median(steps)) + 1
    return part.split(cuts.tolist(), terminated=False)


def _terminated_only(part: EpisodePart, finding: Finding, place: int) -> list[EpisodePart]:
    return [replace(part, truncated=False)] if part.terminated else [part]


def _last_row_as_final(part: EpisodePart, finding: Finding, place: int) -> list[EpisodePart]:
    if part.length < 2 or part.stop < part.episode.length:
        return [part]
    cut = part.until(part.length - 1)
    return [replace(cut, terminated=part.terminated, truncated=part.truncated)]


def _without_final(part: EpisodePart, finding: Finding, place: int) -> list[EpisodePart]:
    return [replace(part, final_row=None)]


def _without_field(part: EpisodePart, finding: Finding, place: int) -> list[EpisodePart]:
    if finding.field is None:
        return [part]
    left_out = part.schema.below(finding.field)
    return [
        replace(
            part,
            schema=Schema(field for name, field in part.schema.items() if name not in left_out),
        )
    ]


def _without_first_row(part: EpisodePart, finding: Finding, place: int) -> list[EpisodePart]:
    return [part.from_row(1) if part.start == 0 else part]


def _is_resting(part: EpisodePart) -> Array:
    """Return bool `[T]`: whether the action of each row nearly equals the previous action.

    It is True for the first row.
    """
    actions = [part.columns(name).astype(np.float64) for name in part.schema.below("action")]
    rows = np.concatenate(actions, axis=1)
    span = np.quantile(rows, 0.99, axis=0) - np.quantile(rows, 0.01, axis=0)
    is_still = (np.abs(np.diff(rows, axis=0)) <= _REST_SHARE * span).all(axis=1)
    return np.append(True, is_still)


def _without_rest_at_start(part: EpisodePart, finding: Finding, place: int) -> list[EpisodePart]:
    is_moving = ~_is_resting(part)
    num_resting = int(is_moving.argmax()) if is_moving.any() else part.length
    start = min(max(0, num_resting - _KEPT_FRAMES), part.length - 1)
    return [part.from_row(start)]


def _without_rest_at_end(part: EpisodePart, finding: Finding, place: int) -> list[EpisodePart]:
    is_moving = ~_is_resting(part)[::-1]
    num_resting = int(is_moving.argmax()) if is_moving.any() else part.length
    return [part.until(max(1, part.length - max(0, num_resting - _KEPT_FRAMES)))]


def _until_success(part: EpisodePart, finding: Finding, place: int) -> list[EpisodePart]:
    frames = np.flatnonzero(part.columns(str(finding.field)).any(axis=1))
    if not len(frames):
        return [part]
    return [part.until(min(part.length, int(frames[0]) + 1 + _KEPT_FRAMES))]


@dataclass(frozen=True)
class EpisodeRepair:
    """Repair of the episodes that a finding names.

    Attributes:
        parts: Function that is called as `parts(part, finding, place)`. `part` is an episode, or a
            part of it after earlier repairs. `place` is the index of the episode in the recording.
            Returns the parts that replace `part`.
        description: Text about the repair for users.
        is_of_all: Whether all episodes are repaired, even if the finding names only some.
    """

    parts: Callable[[EpisodePart, Finding, int], list[EpisodePart]]
    description: str
    is_of_all: bool = False


#: Repair for each rule code. If an episode needs several repairs, they are applied in this order.
EPISODE_REPAIRS: Mapping[str, EpisodeRepair] = {
    "STR06": EpisodeRepair(_whole, "rewritten with the fields that all episodes have"),
    "STR08": EpisodeRepair(_whole, "rewritten with a new index"),
    "END02": EpisodeRepair(_at_end_flags, "split after the end flags"),
    "END03": EpisodeRepair(_at_jumps, "split at the jumps"),
    "END06": EpisodeRepair(_terminated_only, "the truncation beside the termination is removed"),
    "END07": EpisodeRepair(_last_row_as_final, "the last row became the final observation"),
    "END08": EpisodeRepair(_without_final, "final observations are removed"),
    "END09": EpisodeRepair(
        _without_field,
        "the stored next observations are removed: readers use the following rows",
        is_of_all=True,
    ),
    "END10": EpisodeRepair(_without_first_row, "the first row is removed"),
    "TIM03": EpisodeRepair(_at_gaps, "split where frames are missing"),
    "TIM09": EpisodeRepair(
        _without_rest_at_start,
        f"the rest at the start is cut to {_KEPT_FRAMES} frames",
    ),
    "TIM10": EpisodeRepair(
        _without_rest_at_end,
        f"the rest at the end is cut to {_KEPT_FRAMES} frames",
    ),
    "LRN06": EpisodeRepair(_until_success, f"cut {_KEPT_FRAMES} frames after success"),
    "STA01": EpisodeRepair(_whole, "rewritten with computed sums"),
}
