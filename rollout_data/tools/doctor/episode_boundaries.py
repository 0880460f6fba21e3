"""What happens at the bounds of episodes: finals and first rows side by side, jumps within, stored successors."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from storage.errors import RolloutDataError, UnansweredError

from .batched_reading import Array, Batch, Collector
from .field_facts import MIN_DISTINCT
from .findings import Inapplicable

_MAX_FINALS = 512
_MAX_DIMS = 64
_MAX_FIRST = 256
_MARGIN = 5
_NEXT = re.compile(r"next_obs(?:ervations?)?(?:/(.+))?")


def floats(scan: Any) -> list[str]:
    """Name the observations of floats, pictures left out."""
    return [name for name in scan.group("observation") if scan.schema[name].dtype.startswith(("float", "bf"))]


class Bounds:
    """First, last and final observations of some episodes, in the dimensions that are continuous.

    Attributes:
        numbers: int64 `[K]`, episodes that have a final observation, a few hundred at most.
        finals, last: `[K, D]`, of these.
        first: `[E, D]`, of `episodes`.
        steps: `[D]`, the 99 % quantile of steps.
    """

    def __init__(self, scan: Any) -> None:
        names = floats(scan)
        facts = [scan.facts[name] for name in names]
        if not facts or sum(int(one.is_continuous.sum()) for one in facts) < 2:
            raise Inapplicable("fewer than two continuous observations")
        which = np.concatenate([one.is_continuous for one in facts])
        self.episodes = facts[0].numbers
        self.first = np.concatenate([one.first for one in facts], axis=1)[:, which]
        self.steps = np.concatenate([one.step_quantile(0.99) for one in facts])[which]
        last = np.concatenate([one.last for one in facts], axis=1)[:, which]
        spread = np.unique(np.linspace(0, len(self.episodes) - 1, _MAX_FINALS).astype(np.int64))
        rows = list[int]()
        finals = list[Array]()
        for row in spread.tolist():
            try:
                found = scan.recording[int(self.episodes[row])].final_observation
            except UnansweredError:
                raise
            except (RolloutDataError, OSError):
                continue
            parts = [_part(found, name) for name in names]
            sizes = [0 if part is None else np.size(part) for part in parts]
            if sizes == [one.field.num_elements for one in facts]:
                rows.append(row)
                finals.append(np.concatenate([np.asarray(part).reshape(-1) for part in parts])[which])
        if not rows:
            raise Inapplicable("no final observations")
        self.numbers = self.episodes[rows]
        self.last = last[rows]
        self.finals = np.stack(finals).astype(self.first.dtype)

    def jumps(self, one: Array, other: Array) -> Array:
        """bool `[K]`: rows that differ by more than usual steps in a sixth of the dimensions."""
        return jumps(one, other, self.steps)

    def resets(self) -> list[tuple[int, int]]:
        """List (row of `numbers`, episode) where the final observation is the first one of another episode."""
        starts: dict[bytes, list[int]] = {}
        for place, row in zip(self.episodes.tolist(), self.first, strict=True):
            starts.setdefault(row.tobytes(), []).append(place)
        found = []
        for at, row in enumerate(self.finals):
            others = [one for one in starts.get(row.tobytes(), []) if one != self.numbers[at]]
            later = [one for one in others if one > self.numbers[at]]
            found += [(at, (later or others)[0])] if others else []
        return found


def jumps(one: Array, other: Array, steps: Array) -> Array:
    """bool `[K]`: rows that differ by more than `steps` in a sixth of the dimensions; all, if more than half do."""
    far: Array = (np.abs(one - other) > steps + 1e-12).sum(1) >= max(2, one.shape[1] / 6)
    return far | (far.mean() > 0.5) if len(far) else far


def _part(found: Any, name: str) -> Any:
    rest = name.partition("/")[2]
    if found is None:
        return None
    return found.get(rest) if rest and hasattr(found, "get") else found


class Jumps(Collector):
    """Rows at which much changes at once, or that look like the start of another episode.

    Attributes:
        found: (episode, frame, share of dimensions that jump, whether it enters the cloud of first frames).
    """

    def __init__(self, scan: Any) -> None:
        super().__init__(scan)
        self.found: list[tuple[int, int, float, bool]] = []
        self._parts: list[tuple[str, Array, Array, Array, Array, Array]] = []
        left = _MAX_DIMS
        numbers = scan.examined[np.unique(np.linspace(0, len(scan.examined) - 1, _MAX_FIRST).astype(np.int64))]
        which, schemas = scan.recording.schemas()
        for name in floats(scan) if len(scan.examined) else ():
            steps = np.sort(scan.sample.steps(name), axis=1)
            values = scan.sample.values(name)
            if not steps.shape[1]:
                continue
            at = [int(level * (steps.shape[1] - 1)) for level in (0.4, 0.9, 0.995)]
            ordered = np.sort(values)
            distinct = (ordered[:, 1:] > ordered[:, :-1]).sum(1)
            dims = np.flatnonzero((steps[:, at[0]] > 0) & (distinct >= MIN_DISTINCT))[:left]
            left -= len(dims)
            has = np.array([schema.get(name) == scan.schema[name] for schema in schemas], bool)
            have = numbers[has[which[numbers]]]
            try:
                first = scan.recording.read_many(have, [name], have * 0, have * 0 + 1)[name]
            except UnansweredError:
                raise
            except (RolloutDataError, OSError):
                continue
            first = first.reshape(len(first), -1)[:, dims].astype(np.float64)
            with np.errstate(invalid="ignore", over="ignore"):
                sd = np.maximum(first.std(0), 1e-6 + 0.02 * np.std(values[dims], axis=1))
                limits = steps[dims, at[1]], 1.5 * steps[dims, at[2]]
                self._parts.append((name, dims, *limits, first.mean(0), sd))
        self.num_dims = sum(len(part[1]) for part in self._parts)

    def add(self, batch: Batch) -> None:
        parts = [part for part in self._parts if part[0] in batch.values]
        if self.num_dims < 8 or len(parts) < len(self._parts):
            return
        far = np.zeros(len(batch), np.int32)
        moved = np.zeros(len(batch), np.int32)
        for name, dims, usual, rare, _, _ in parts:
            steps = np.abs(batch.steps(name)[dims])
            far += (steps > rare[:, None]).sum(0, dtype=np.int32)
            moved += (steps > usual[:, None]).sum(0, dtype=np.int32)
        is_wide = self.num_dims >= 12  # so many never come back to the start by chance
        rows = np.flatnonzero(
            (far >= max(6, 0.35 * self.num_dims)) | (moved > (0.15 if is_wide else 0.3) * self.num_dims)
        )
        if not len(rows):
            return
        numbers, frames = batch.episode_of(rows)
        inner = (frames >= _MARGIN) & (frames <= self.scan.lengths[numbers] - _MARGIN)
        rows = rows[inner]
        numbers = numbers[inner]
        frames = frames[inner]
        now, before = (self._scores(batch, rows - back) for back in (0, 1))
        enters = (now < 4).all(0) & (before.max(0, initial=0) > 12) & (np.median(before, axis=0) > 2)
        # A swing passes the start with steps like those around it; a reset is a step by itself.
        is_reset = (moved[rows] > 0.3 * self.num_dims) & (self._alone(batch, rows) > 0.15 * self.num_dims)
        enters &= is_reset | (is_wide & (np.median(before, axis=0) > 4))
        kept = np.flatnonzero((far[rows] >= max(6, 0.35 * self.num_dims)) | enters)
        shares = far[rows] / self.num_dims
        self.found += [(int(numbers[at]), int(frames[at]), float(shares[at]), bool(enters[at])) for at in kept]

    def _alone(self, batch: Batch, rows: Array) -> Array:
        """int `[n]`: dimensions in which the step to a row is far larger than those before and after it."""
        found = np.zeros(len(rows), np.int64)
        for name, dims, usual, *_ in self._parts:
            last, this, after = (
                np.abs(batch.steps(name)[dims][:, np.minimum(rows + at, len(batch) - 1)]) for at in (-1, 0, 1)
            )
            found += ((this > usual[:, None]) & (this > 2.5 * np.maximum(last, after))).sum(0)
        return found

    def _scores(self, batch: Batch, rows: Array) -> Array:
        """`[D, n]`: how far rows are from first frames, in their standard deviations."""
        with np.errstate(invalid="ignore"):
            parts = [
                np.abs(batch.columns(name)[dims][:, rows] - mean[:, None]) / sd[:, None]
                for name, dims, _, _, mean, sd in self._parts
            ]
        return np.concatenate(parts) if parts else np.zeros((0, len(rows)))


class Successors(Collector):
    """Stored next observations, compared with the rows that follow.

    Attributes:
        pairs: Field of next observations -> field of observations.
        wrong: Field -> int64 `[E]`, inner frames whose successor is another.
        same: Field -> how many of these repeat the current observation.
    """

    def __init__(self, scan: Any) -> None:
        super().__init__(scan)
        told = {name: _NEXT.fullmatch(name) for name in scan.numeric}
        pairs = {name: f"observation/{one[1]}" if one[1] else "observation" for name, one in told.items() if one}
        self.pairs = {name: other for name, other in pairs.items() if other in scan.schema}
        self.wrong = {name: np.zeros(scan.num_episodes, np.int64) for name in self.pairs}
        self.same = dict.fromkeys(self.pairs, 0)

    def add(self, batch: Batch) -> None:
        for name, other in self.pairs.items():
            if name in batch.values and other in batch.values:
                stored = batch.columns(name)
                rows = batch.columns(other)
                inner = np.ones(len(batch) - 1, bool)
                inner[batch.offsets[1:-1] - 1] = False
                differs = (stored[:, :-1] != rows[:, 1:]) & ~(np.isnan(stored[:, :-1]) & np.isnan(rows[:, 1:]))
                at = np.flatnonzero(differs.any(0) & inner)
                self.wrong[name] += np.bincount(batch.episode_of(at)[0], minlength=self.scan.num_episodes)
                self.same[name] += int((stored[:, at] == rows[:, at]).all(0).sum())
