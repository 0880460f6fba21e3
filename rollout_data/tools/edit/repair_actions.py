"""Mending episodes: what is done to the arrays of one, for each code of a finding.

One rule: a function takes a draft and gives the drafts that replace it; nothing here reads or writes files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from storage.core.fields import Field, Schema

from ...sources.episode import OBSERVATION, Episode, joined
from ...sources.recording import Recording
from ..doctor.field_roles import roles_of
from ..doctor.findings import Finding

Array = np.ndarray[Any, Any]
_ENDS = re.compile(r"(.*[/.])?(dones?|terminals?|terminated|truncat\w+|timeouts?)")
#: Factors between units that are often mixed up: degrees, millimetres, centimetres, bytes; of times besides.
_UNITS, _TIMES = (180 / np.pi, 1e3, 1e2, 255.0), (1e3, 1e6, 1e9)
#: Logarithm of how far a ratio may be from one of these.
_NEAR = 0.7
#: Frames that stay of a resting start or end.
_REST = 5
#: What the index tells of an episode, which is not noted of it.
_INDEXED = ("env", "writer", "end_time_ns")


@dataclass
class Draft:
    """An episode in memory, in the form that writers take (`EpisodeToWrite`)."""

    id: str
    fields: dict[str, Array]
    notes: dict[str, list[str]]
    final: dict[str, Array] | None
    terminated: bool | None
    truncated: bool | None
    success: bool | None
    task: str
    metadata: Mapping[str, Any]
    known: Schema

    @classmethod
    def of(cls, episode: Episode) -> Draft:
        """Read an episode."""
        final = episode.final_observation
        parts = final.items() if hasattr(final, "items") else [] if final is None else [("", final)]
        return cls(
            id=episode.id,
            fields={name: np.array(episode.read(name)) for name in episode.schema},
            notes={name: episode.read(name) for name in episode.texts},
            final={f"{OBSERVATION}/{name}".rstrip("/"): one for name, one in parts} or None,
            metadata={name: told for name, told in episode.metadata.items() if name not in _INDEXED},
            known=episode.schema,
            **{name: getattr(episode, name) for name in ("terminated", "truncated", "success", "task")},
        )

    @property
    def length(self) -> int:
        return len(next(iter(self.fields.values()), next(iter(self.notes.values()), [])))

    @property
    def schema(self) -> Schema:
        """Its fields; those that were given another dtype or shape are declared anew."""
        return Schema(self._declared(name, one) for name, one in self.fields.items())

    def _declared(self, name: str, values: Array) -> Field:
        field = self.known[name]
        kept = field.numpy_dtype == values.dtype or field.dtype == "bfloat16"
        return field if kept and field.shape == values.shape[1:] else Field(name, values.shape[1:], str(values.dtype))

    @property
    def texts(self) -> list[str]:
        return list(self.notes)

    @property
    def final_observation(self) -> Any:
        return None if self.final is None else joined(OBSERVATION, dict(self.final))

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Any:
        return (self.notes[name] if name in self.notes else self.fields[name])[start:stop]

    def chosen(self, rows: Any) -> Draft:
        """Return the draft with some of its rows: a slice, or bool `[T]`."""
        places = np.arange(self.length)[rows].tolist()
        notes = {name: [texts[place] for place in places] for name, texts in self.notes.items()}
        return replace(self, fields={name: one[rows] for name, one in self.fields.items()}, notes=notes)

    def before(self, stop: int, is_end: bool) -> Draft:
        """Return the rows before `stop`; where others follow, the next is the final observation, or it ended there."""
        cut = self.chosen(slice(0, stop))
        if stop == self.length:
            return cut
        final = None if is_end else {name: self.fields[name][stop] for name in _below(self, OBSERVATION)}
        return replace(cut, final=final, terminated=is_end, truncated=not is_end)

    def pieces(self, cuts: list[int], is_end: bool) -> list[Draft]:
        """Divide it before these rows; the parts but the last one ended there, or it is not known how they ended."""
        bounds = [0, *cuts, self.length]
        found = []
        for number, (start, stop) in enumerate(pairwise(bounds)):
            part = replace(self.chosen(slice(start, stop)), id=f"{self.id}/{number}")
            if stop < self.length:
                part = replace(part, final=None, terminated=is_end or None, truncated=False if is_end else None)
            found.append(part)
        return found if len(found) > 1 else [self]


@dataclass
class Case:
    """What a mending function knows besides the draft: the finding, the place, and the recording."""

    finding: Finding
    place: int
    recording: Recording

    @property
    def names(self) -> list[str]:
        """The fields that it is about."""
        found = self.finding.field
        return [name for name in self.recording.schema if found in (None, name) or name.startswith(f"{found}/")]

    @cached_property
    def roles(self) -> dict[str, list[str]]:
        return roles_of(self.recording.metadata, self.recording.schema)

    def typical(self, name: str, measure: Callable[[Array], Any]) -> Any:
        """Return the median of a measure over the trajectories that the finding does not name."""
        named = set(self.finding.places)
        rows = [
            np.asarray(episode.read(name), np.float64)
            for place, episode in enumerate(self.recording)
            if place not in named and name in episode.schema
        ]
        return np.median([*map(measure, rows)], axis=0) if rows else None


def _below(draft: Draft, group: str) -> list[str]:
    return [name for name in draft.fields if name.partition("/")[0] == group]


def _mapped(function: Callable[[Array, Case], Array], finals: bool = True) -> Callable[[Draft, Case], list[Draft]]:
    """Make a mending function of one that changes the values of a field, `[T, ...]`, and of the final observation."""

    def mend(draft: Draft, case: Case) -> list[Draft]:
        for name in [name for name in case.names if name in draft.fields]:
            values = draft.fields[name]
            final = (draft.final or {}).get(name) if finals else None
            rows = values if final is None else np.concatenate([values, final[None]])
            changed = function(rows, replace(case, finding=replace(case.finding, field=name)))
            draft.fields[name] = changed[: len(values)]
            if final is not None and draft.final is not None:
                draft.final[name] = changed[-1]
        return [draft]

    return mend


def _size(values: Array) -> float:
    """Return the median of the largest absolute value of each row; 0 is left out."""
    largest = np.abs(values.reshape(len(values), -1)).max(1)
    return float(np.median(largest[largest > 0])) if (largest > 0).any() else 0.0


def _unit(values: Array, typical: float | None, size: float, units: tuple[float, ...]) -> Array:
    """Bring values to the unit in which they have a typical size, where the ratio is near one between units."""
    if not typical or not size:
        return values
    ratio = size / typical
    near = min((*units, *(1 / unit for unit in units)), key=lambda unit: abs(np.log(ratio / unit)))
    factor = near if abs(np.log(ratio / near)) < _NEAR else ratio
    return np.asarray(values / factor).astype(values.dtype)


def _rescaled(values: Array, case: Case) -> Array:
    """Divide by the factor that all these trajectories are off by; sizes of single ones differ for other reasons."""
    typical = case.typical(str(case.finding.field), _size)
    off = float(case.finding.evidence["factor"])
    return _unit(values, typical, typical * (off if _size(values) > typical else 1 / off), _UNITS)


def _retimed(values: Array, case: Case) -> Array:
    def step(rows: Array) -> float:
        return float(np.median(np.diff(rows.reshape(-1).astype(np.float64)))) if len(rows) > 1 else 0.0

    return _unit(values, case.typical(str(case.finding.field), step), step(values), _TIMES)


def _quaternions(function: Callable[[Array, Case], Array]) -> Callable[[Draft, Case], list[Draft]]:
    def change(values: Array, case: Case) -> Array:
        rows = values.reshape(len(values), -1, 4).astype(np.float64)
        changed: Array = function(rows, case).reshape(values.shape).astype(values.dtype)
        return changed

    return _mapped(change)


def _normalized(rows: Array, case: Case) -> Array:
    norm = np.linalg.norm(rows, axis=-1, keepdims=True)
    return np.where(norm > 0, rows / np.where(norm > 0, norm, 1), rows)


def _continuous(rows: Array, case: Case) -> Array:
    is_turned = np.cumsum((rows[1:] * rows[:-1]).sum(-1) < 0, axis=0) % 2 == 1
    return np.concatenate([rows[:1], np.where(is_turned[..., None], -rows[1:], rows[1:])])


def _rolled(rows: Array, case: Case) -> Array:
    part = int(case.finding.evidence.get("quaternion", 0))
    shift = 1 if np.abs(rows[:, part].mean(0)).argmax() == 3 else -1
    changed: Array = rows.copy()
    changed[:, part] = np.roll(rows[:, part], shift, axis=-1)
    return changed


def _unwrapped(values: Array, case: Case) -> Array:
    turn = float(case.finding.evidence["turn"])
    dims = case.finding.evidence["dimensions"]
    changed: Array = values.copy()
    rows = changed.reshape(len(values), -1)
    rows[:, dims] = np.unwrap(rows[:, dims].astype(np.float64), axis=0, period=turn)
    return changed


def _widened(values: Array, case: Case) -> Array:
    size = float(np.iinfo(values.dtype).max) - float(np.iinfo(values.dtype).min) + 1
    changed: Array = np.rint(np.unwrap(values.astype(np.float64), axis=0, period=size)).astype(np.int64)
    return changed


def _flushed(values: Array, case: Case) -> Array:
    is_tiny = np.abs(values) < np.finfo(values.dtype).tiny if values.dtype.kind == "f" else np.zeros(values.shape, bool)
    return np.where(is_tiny, np.zeros_like(values), values)


def _relaid(values: Array, case: Case) -> Array:
    """Read pictures `[T, H, W, C]` as what they are, channels first."""
    height, width, channels = values.shape[1:]
    return np.ascontiguousarray(np.moveaxis(values.reshape(-1, channels, height, width), 1, -1))


def _ranged(values: Array, case: Case) -> Array:
    if values.dtype.kind == "f":
        return (values / 255).astype(values.dtype) if values.max(initial=0) > 1.5 else values
    return values * 255 if values.max(initial=0) <= 1 else values


def _at_ends(draft: Draft, case: Case) -> list[Draft]:
    flags = [one.reshape(len(one), -1).any(1) for name, one in draft.fields.items() if _ENDS.fullmatch(name)]
    return draft.pieces((np.flatnonzero(np.any(flags, axis=0)[:-1]) + 1).tolist() if flags else [], True)


def _at_frames(draft: Draft, case: Case) -> list[Draft]:
    cuts = sorted({stop - 1 for place, _, stop in case.finding.frames if place == case.place})
    return draft.pieces([cut for cut in cuts if 0 < cut < draft.length], False)


def _at_gaps(draft: Draft, case: Case) -> list[Draft]:
    steps = np.diff(draft.fields[str(case.finding.field)].reshape(-1).astype(np.float64))
    limit = float(case.finding.evidence.get("threshold", 1.8)) * np.median(steps)
    return draft.pieces((np.flatnonzero(steps > limit) + 1).tolist(), False)


def _cut_last(draft: Draft, case: Case) -> list[Draft]:
    if draft.length < 2:
        return [draft]
    cut = draft.before(draft.length - 1, False)
    return [replace(cut, terminated=draft.terminated, truncated=draft.truncated)]


def _without_field(draft: Draft, case: Case) -> list[Draft]:
    kept = {name: one for name, one in draft.fields.items() if name not in case.names or case.finding.field is None}
    return [replace(draft, fields=kept)]


def _without_repeats(draft: Draft, case: Case) -> list[Draft]:
    floats = [name for name in _below(draft, OBSERVATION) if draft.fields[name].dtype.kind == "f"]
    names = [*_below(draft, "action"), *floats]
    same = [(np.diff(draft.fields[name].reshape(draft.length, -1), axis=0) == 0).all(1) for name in names]
    return [draft.chosen(np.append(True, ~np.all(same, axis=0)))]


def _shifted(draft: Draft, case: Case) -> list[Draft]:
    """Join each observation with the action before it: leave out the first and the last rows."""
    lag = int(case.finding.evidence["lag_frames"])
    if draft.length <= lag:
        return []
    moved = {name: one[lag:] if name in case.names else one[:-lag] for name, one in draft.fields.items()}
    notes = {name: texts[:-lag] for name, texts in draft.notes.items()}
    return [replace(draft, fields=moved, notes=notes)]


def _resting(draft: Draft) -> Array:
    """bool `[T]`: no dimension of the action moves by more than 1 % of its range from the frame before to this one."""
    actions = [draft.fields[name].reshape(draft.length, -1).astype(np.float64) for name in _below(draft, "action")]
    rows = np.concatenate(actions, axis=1)
    span = np.quantile(rows, 0.99, axis=0) - np.quantile(rows, 0.01, axis=0)
    return np.append(True, (np.abs(np.diff(rows, axis=0)) <= 0.01 * span).all(1))


def _without_start(draft: Draft, case: Case) -> list[Draft]:
    num_idle = int(np.argmin(np.append(_resting(draft), False)))
    return [draft.chosen(slice(min(max(0, num_idle - _REST), draft.length - 1), None))]


def _without_end(draft: Draft, case: Case) -> list[Draft]:
    num_idle = int(np.argmin(np.append(_resting(draft)[::-1], False)))
    return [draft.before(max(1, draft.length - max(0, num_idle - _REST)), False)]


def _earlier_reward(draft: Draft, case: Case) -> list[Draft]:
    """Move rewards a frame back; the last frame gets what stands in the first one of the next trajectory."""
    for name in _below(draft, "reward"):
        after = case.recording[case.place + 1] if case.place + 1 < len(case.recording) else None
        last = np.zeros_like(draft.fields[name][:1]) if after is None else np.asarray(after.read(name, 0, 1))
        draft.fields[name] = np.concatenate([draft.fields[name][1:], last])
    return [draft]


def _until_success(draft: Draft, case: Case) -> list[Draft]:
    flags = [
        draft.fields[name].reshape(draft.length, -1).any(1) for name in case.roles["success"] if name in draft.fields
    ]
    reached: list[int] = np.flatnonzero(np.any(flags, axis=0)).tolist() if flags else []
    return [draft.before(min(draft.length, reached[0] + 1 + _REST), False)] if reached else [draft]


@dataclass(frozen=True)
class Mend:
    """What is done to an episode for a code: the function, in words, and whether to all episodes of the recording."""

    function: Callable[[Draft, Case], list[Draft]]
    says: str
    everywhere: bool = False


MENDS: Mapping[str, Mend] = {
    "STR06": Mend(lambda draft, case: [draft], "written anew with the fields that are common"),
    "STR08": Mend(lambda draft, case: [draft], "written anew, counted"),
    "END02": Mend(_at_ends, "split after the flags of an end"),
    "END03": Mend(_at_frames, "split at the jumps"),
    "END06": Mend(lambda draft, case: [replace(draft, terminated=True, truncated=False)], "marked as terminated only"),
    "END07": Mend(_cut_last, "the last row became the final observation"),
    "END08": Mend(lambda draft, case: [replace(draft, final=None)], "final observations left out"),
    "END09": Mend(_without_field, "the stored successors left out: readers take the rows", True),
    "END10": Mend(lambda draft, case: [draft.chosen(slice(1, None))], "the first row left out"),
    "END11": Mend(lambda draft, case: [replace(draft, terminated=False, truncated=True)], "marked as truncated"),
    "VAL09": Mend(_mapped(_flushed), "subnormal numbers set to 0", True),
    "VAL10": Mend(_mapped(_rescaled), "brought to the scale of the others"),
    "VAL11": Mend(_quaternions(_normalized), "quaternions normalized"),
    "VAL12": Mend(_quaternions(_continuous), "quaternions made continuous"),
    "VAL13": Mend(_quaternions(_rolled), "components of quaternions brought into the order of the others"),
    "VAL14": Mend(_mapped(_unwrapped), "angles unwrapped"),
    "VAL17": Mend(_mapped(_widened), "unwrapped into int64", True),
    "TIM03": Mend(_at_gaps, "split where frames are missing"),
    "TIM04": Mend(_without_repeats, "repeated frames left out"),
    "TIM06": Mend(_mapped(_retimed), "brought to the unit of the others"),
    "TIM08": Mend(_shifted, "actions and observations shifted against each other", True),
    "TIM09": Mend(_without_start, f"resting start cut down to {_REST} frames"),
    "TIM10": Mend(_without_end, f"resting end cut down to {_REST} frames"),
    "LRN04": Mend(_earlier_reward, "rewards moved a frame back", True),
    "LRN06": Mend(_until_success, f"cut {_REST} frames after success"),
    "IMG04": Mend(_mapped(lambda values, case: np.ascontiguousarray(values[..., ::-1])), "red and blue exchanged"),
    "IMG05": Mend(_mapped(_relaid), "channels moved to the end"),
    "IMG06": Mend(_mapped(_ranged), "brought to the range of the others"),
    "STA01": Mend(lambda draft, case: [draft], "written anew, sums computed"),
}
