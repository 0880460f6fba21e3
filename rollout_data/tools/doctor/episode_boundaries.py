"""Measure episode boundaries: first and final observations, jumps, next observations.

A final observation is recorded after the last step of an episode. A jump is a difference between
successive rows that is far larger than usual. Importers often split or join episodes wrongly.
Then an episode has a jump inside, or its final observation belongs to another episode.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from storage.errors import RolloutDataError, UnansweredError

from .batched_reading import Array, Batch, Collector, evenly_spread
from .field_facts import MIN_DISTINCT, Facts
from .findings import Inapplicable

#: Maximum number of episodes whose final observations are read.
_MAX_FINALS = 512
#: Maximum number of dimensions that are searched for jumps.
_MAX_DIMS = 64
#: Maximum number of episodes whose first frames are compared with later frames.
_MAX_FIRST = 256
#: Number of frames at each end of an episode that are not searched for jumps.
_MARGIN = 5
#: Minimum number of continuous dimensions to search for jumps.
MIN_JUMP_DIMS = 8
_NEXT = re.compile(r"next_obs(?:ervations?)?(?:/(.+))?")


def float_observations(scan: Any) -> list[str]:
    """Return the names of the observations with a float dtype, except images."""
    names = scan.group("observation")
    return [name for name in names if scan.schema[name].dtype.startswith(("float", "bf"))]


class BoundaryRows:
    """First, last and final observations of episodes, in their D continuous dimensions.

    Attributes:
        episodes: int64 `[E]`, episodes whose first row is known.
        first: `[E, D]`, first observations of `episodes`.
        numbers: int64 `[K]`, at most 512 episodes with a final observation.
        last: `[K, D]`, observations in the last rows of `numbers`.
        finals: `[K, D]`, final observations of `numbers`, after the last step.
        steps: `[D]`, the 99 % quantile of absolute differences between successive rows.
    """

    def __init__(self, scan: Any) -> None:
        names = float_observations(scan)
        facts: list[Facts] = [scan.facts[name] for name in names]
        num_continuous = sum(int(field.is_continuous.sum()) for field in facts)
        if num_continuous < 2:
            raise Inapplicable("fewer than two continuous observations")
        dims = np.concatenate([field.is_continuous for field in facts])
        self.episodes = facts[0].numbers
        self.first = np.concatenate([field.first for field in facts], axis=1)[:, dims]
        self.steps = np.concatenate([field.step_quantile(0.99) for field in facts])[dims]
        last = np.concatenate([field.last for field in facts], axis=1)[:, dims]

        rows: list[int] = []
        finals: list[Array] = []
        for row in evenly_spread(np.arange(len(self.episodes)), _MAX_FINALS).tolist():
            final = _read_final(scan, int(self.episodes[row]), facts)
            if final is not None:
                rows.append(row)
                finals.append(final[dims])
        if not rows:
            raise Inapplicable("no final observations")
        self.numbers = self.episodes[rows]
        self.last = last[rows]
        self.finals = np.stack(finals).astype(self.first.dtype)

    def jumps(self, rows: Array, later_rows: Array) -> Array:
        """Return bool `[K]`: whether two rows differ more than successive rows usually do."""
        return jumps(rows, later_rows, self.steps)

    def resets(self) -> list[tuple[int, int]]:
        """Find final observations that equal the first observation of another episode.

        Returns a pair for each of them: the index into `numbers` of the episode with the final
        observation, and the episode number of the other episode.
        """
        starts: dict[bytes, list[int]] = {}
        for number, first in zip(self.episodes.tolist(), self.first, strict=True):
            starts.setdefault(first.tobytes(), []).append(number)
        resets = []
        for row, final in enumerate(self.finals):
            own = self.numbers[row]
            others = [number for number in starts.get(final.tobytes(), []) if number != own]
            later = [number for number in others if number > own]
            if others:
                resets.append((row, (later or others)[0]))
        return resets


def _read_final(scan: Any, number: int, facts: list[Facts]) -> Array | None:
    """Read the final observation of an episode, all components concatenated to `[D]`.

    Returns None if a component is missing or unreadable.
    """
    try:
        final = scan.recording[number].final_observation
    except UnansweredError:
        raise
    except (RolloutDataError, OSError):
        return None
    if final is None:
        return None
    parts = []
    for field in facts:
        component = field.name.partition("/")[2]
        part = final.get(component) if component and hasattr(final, "get") else final
        if part is None or np.size(part) != field.field.num_elements:
            return None
        parts.append(np.asarray(part).reshape(-1))
    return np.concatenate(parts)


def jumps(rows: Array, later_rows: Array, steps: Array) -> Array:
    """Return bool `[K]`: whether two rows differ more than successive rows usually do.

    This is a jump. In a jump, the difference exceeds `steps` in 1/6 of the dimensions, and in 2 or
    more. If more than half of the K pairs are jumps, the result is True for all pairs.

    Args:
        rows: `[K, D]`, first row of each pair.
        later_rows: `[K, D]`, second row of each pair.
        steps: `[D]`, usual differences between successive rows.
    """
    num_far = (np.abs(rows - later_rows) > steps + 1e-12).sum(1)
    is_jump: Array = num_far >= max(2, rows.shape[1] / 6)
    if len(is_jump) and is_jump.mean() > 0.5:
        is_jump[:] = True
    return is_jump


@dataclass(frozen=True)
class _JumpLimits:
    """Statistics of one field, by which jumps and returns to the start are detected.

    A step is the difference of two successive rows.

    Attributes:
        name: Name of the field.
        dims: int64 `[D]`, continuous dimensions.
        usual: `[D]`, the 90 % quantile of the absolute steps between rows.
        rare: `[D]`, 1.5 times the 99.5 % quantile of the absolute steps.
        mean: `[D]`, mean of the first frames of episodes.
        sd: `[D]`, standard deviation of the first frames of episodes.
    """

    name: str
    dims: Array
    usual: Array
    rare: Array
    mean: Array
    sd: Array


@dataclass(frozen=True)
class Jump:
    """Frame that looks like the start of another episode.

    Attributes:
        number: Index of the episode.
        frame: Frame in the episode.
        share: Fraction of the dimensions that jump.
    """

    number: int
    frame: int
    share: float


class Jumps(Collector):
    """Collector of frames inside an episode that look like the start of another episode.

    In such a frame, many dimensions jump, or many return to the values of a typical first frame.

    Attributes:
        jumps: Frames that look like the start of another episode.
        num_dims: Number of searched dimensions. With less than `MIN_JUMP_DIMS` dimensions, no jumps
            are searched, since a few dimensions may jump by chance.
    """

    def __init__(self, scan: Any) -> None:
        super().__init__(scan)
        self.jumps: list[Jump] = []
        self._limits: list[_JumpLimits] = []
        self.num_dims = 0
        if not len(scan.examined):
            return
        numbers = evenly_spread(scan.examined, _MAX_FIRST)
        dims_left = _MAX_DIMS
        for name in float_observations(scan):
            values = scan.sample.values(name)
            steps = np.sort(scan.sample.steps(name), axis=1)
            dims = _jumping_dims(values, steps)[:dims_left]
            dims_left -= len(dims)
            first = _read_first(scan, name, numbers) if len(dims) else None
            if first is not None:
                limits = _jump_limits(name, dims, values[dims], steps[dims], first[:, dims])
                self._limits.append(limits)
        self.num_dims = sum(len(limits.dims) for limits in self._limits)

    def add(self, batch: Batch) -> None:
        has_fields = all(limits.name in batch.values for limits in self._limits)
        if self.num_dims < MIN_JUMP_DIMS or not has_fields:
            return
        # For each row, the number of dimensions whose step from the previous row exceeds the limit
        # `rare`, and the number of dimensions whose step exceeds the limit `usual`.
        num_far = np.zeros(len(batch), np.int32)
        num_moved = np.zeros(len(batch), np.int32)
        for limits in self._limits:
            steps = np.abs(batch.steps(limits.name)[limits.dims])
            num_far += (steps > limits.rare[:, None]).sum(0, dtype=np.int32)
            num_moved += (steps > limits.usual[:, None]).sum(0, dtype=np.int32)

        min_far = max(6, 0.35 * self.num_dims)
        # It is improbable that 12 or more dimensions return to a typical first frame by chance.
        # Then fewer dimensions have to move in this step.
        is_wide = self.num_dims >= 12
        min_moved = (0.15 if is_wide else 0.3) * self.num_dims
        rows = np.flatnonzero((num_far >= min_far) | (num_moved > min_moved))
        if not len(rows):
            return
        numbers, frames = batch.episode_of(rows)
        is_inner = (frames >= _MARGIN) & (frames <= self.scan.lengths[numbers] - _MARGIN)
        rows = rows[is_inner]

        distance = self._distance_to_start(batch, rows)
        distance_before = self._distance_to_start(batch, rows - 1)
        median_before = np.median(distance_before, axis=0)
        returns_to_start = (distance < 4).all(0) & (distance_before.max(0, initial=0) > 12)
        returns_to_start &= median_before > 2
        # Periodic motion also returns to the start, but in several similar steps. A reset is one
        # step that is far larger than the steps around it.
        is_single_step = num_moved[rows] > 0.3 * self.num_dims
        is_single_step &= self._num_single_steps(batch, rows) > 0.15 * self.num_dims
        is_reset = returns_to_start & (is_single_step | (is_wide & (median_before > 4)))

        rows = rows[(num_far[rows] >= min_far) | is_reset]
        numbers, frames = batch.episode_of(rows)
        shares = num_far[rows] / self.num_dims
        for number, frame, share in zip(numbers, frames, shares, strict=True):
            self.jumps.append(Jump(int(number), int(frame), float(share)))

    def _num_single_steps(self, batch: Batch, rows: Array) -> Array:
        """Count the dimensions that jump at each of `rows`, but not just before or after: `[n]`.

        In such a dimension, the step from the previous row is larger than usual, and 2.5 times
        larger than the steps before and after it.
        """
        count = np.zeros(len(rows), np.int64)
        last_row = len(batch) - 1
        for limits in self._limits:
            steps = np.abs(batch.steps(limits.name)[limits.dims])
            step = steps[:, rows]
            neighbours = np.maximum(steps[:, rows - 1], steps[:, np.minimum(rows + 1, last_row)])
            is_single = (step > limits.usual[:, None]) & (step > 2.5 * neighbours)
            count += is_single.sum(0)
        return count

    def _distance_to_start(self, batch: Batch, rows: Array) -> Array:
        """Compute the distance of rows to a typical first frame of an episode: `[D, n]`.

        The unit is the standard deviation of first frames in each dimension.
        """
        distances = [np.zeros((0, len(rows)))]
        with np.errstate(invalid="ignore"):
            for limits in self._limits:
                values = batch.columns(limits.name)[limits.dims][:, rows]
                distances.append(np.abs(values - limits.mean[:, None]) / limits.sd[:, None])
        return np.concatenate(distances)


def _jumping_dims(values: Array, steps: Array) -> Array:
    """Return the continuous dimensions that change in at least 60 % of the steps.

    Args:
        values: `[D, S]`, sampled rows.
        steps: `[D, S]`, absolute sampled steps, sorted in each dimension.
    """
    num_steps = steps.shape[1]
    if not num_steps:
        return np.zeros(0, np.int64)
    ordered = np.sort(values)
    num_distinct = (ordered[:, 1:] > ordered[:, :-1]).sum(1)
    moves = steps[:, int(0.4 * (num_steps - 1))] > 0
    return np.flatnonzero(moves & (num_distinct >= MIN_DISTINCT))


def _read_first(scan: Any, name: str, numbers: Array) -> Array | None:
    """Read the first row of each episode that has a field: `[n, D]`; None if reading fails."""
    schema_index, schemas = scan.recording.schemas()
    has_field = np.array([schema.get(name) == scan.schema[name] for schema in schemas], bool)
    chosen = numbers[has_field[schema_index[numbers]]]
    starts = np.zeros(len(chosen), np.int64)
    try:
        first = scan.recording.read_many(chosen, [name], starts, starts + 1)[name]
    except UnansweredError:
        raise
    except (RolloutDataError, OSError):
        return None
    rows: Array = first.reshape(len(first), -1).astype(np.float64)
    return rows


def _jump_limits(
    name: str,
    dims: Array,
    values: Array,
    steps: Array,
    first: Array,
) -> _JumpLimits:
    """Compute the statistics of a field by which jumps and returns to the start are detected.

    Args:
        name: Name of the field.
        dims: int64 `[D]`, continuous dimensions.
        values: `[D, S]`, sampled rows.
        steps: `[D, S]`, absolute sampled steps, sorted in each dimension.
        first: `[n, D]`, first frames of n episodes.
    """
    last = steps.shape[1] - 1
    with np.errstate(invalid="ignore", over="ignore"):
        min_sd = 1e-6 + 0.02 * np.std(values, axis=1)
        return _JumpLimits(
            name,
            dims,
            usual=steps[:, int(0.9 * last)],
            rare=1.5 * steps[:, int(0.995 * last)],
            mean=first.mean(0),
            sd=np.maximum(first.std(0), min_sd),
        )


class Successors(Collector):
    """Collector that compares stored next observations with the observations one row later.

    Attributes:
        pairs: Map from each field of next observations, such as "next_obs", to the field of
            observations with the same number of elements.
        wrong: Map from field to int64 `[E]`: the number of frames in each episode whose stored next
            observation differs from the observation in the following row. Last frames do not count.
        same: Map from field to the number of wrong next observations that equal the observation in
            their own row. If nearly all do, the whole field is shifted by one row.
    """

    def __init__(self, scan: Any) -> None:
        super().__init__(scan)
        self.pairs: dict[str, str] = {}
        for name in scan.numeric:
            match = _NEXT.fullmatch(name)
            if match:
                observation = f"observation/{match[1]}" if match[1] else "observation"
                if observation not in scan.numeric:
                    continue
                if scan.schema[observation].num_elements == scan.schema[name].num_elements:
                    self.pairs[name] = observation
        self.wrong = {name: np.zeros(scan.num_episodes, np.int64) for name in self.pairs}
        self.same = dict.fromkeys(self.pairs, 0)

    def add(self, batch: Batch) -> None:
        is_inner = np.ones(len(batch) - 1, bool)
        is_inner[batch.offsets[1:-1] - 1] = False
        for name, observation in self.pairs.items():
            if not batch.values.keys() >= {name, observation}:
                continue
            stored = batch.columns(name)[:, :-1]
            current = batch.columns(observation)[:, :-1]
            following = batch.columns(observation)[:, 1:]
            differs = (stored != following) & ~(np.isnan(stored) & np.isnan(following))
            rows = np.flatnonzero(differs.any(0) & is_inner)
            numbers, _ = batch.episode_of(rows)
            self.wrong[name] += np.bincount(numbers, minlength=self.scan.num_episodes)
            self.same[name] += int((stored[:, rows] == current[:, rows]).all(0).sum())
