"""Rules TIM: clocks, repeated and frozen frames, delays, and robots at rest.

A clock is a field with the role "time". The main clock is the one that is compared with the declared
frame rate and with the other clocks. A time step is the difference of two successive times.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from ..batched_reading import Array, Batch, evenly_spread
from ..field_facts import medians_of, runs_of, worst
from ..findings import MAX_FRAMES, Defect, Inapplicable, Settings, checks
from ..scan import Collector, Scan

#: Number of time units per second for each suffix of a field name.
_UNITS = {"_ns": 1e9, "_us": 1e6, "_ms": 1e3, "_s": 1.0}
#: Maximum jitter of a regular clock. In other clocks, a large step is no evidence of dropped frames.
_MAX_JITTER = 0.15
#: Largest lag in frames for which correlations are computed.
_LAGS = 40
#: Maximum number of episodes from which correlations are computed.
_MAX_CORRELATED = 64
#: Minimum number of episodes from which correlations are computed.
_MIN_CORRELATED = 3
#: Maximum number of values in a table of the roughness of actions.
_MAX_CELLS = 6_000_000
#: Minimum number of frames of an episode to compute its roughness.
_MIN_ROUGH_FRAMES = 10
#: Maximum number of episodes in which clocks are compared with each other.
_NUM_COMPARED = 512


class Clocks(Collector):
    """Collector of statistics of the time steps of each clock, for each of E episodes.

    Values are NaN for episodes without time steps.

    Attributes:
        median: Median time step, `[E]`, by field.
        low: Smallest time step, `[E]`, by field.
        high: Largest time step, `[E]`, by field.
        jitter: Irregularity of the time steps, `[E]`, by field: the 90 % quantile of the
            differences between a step and the median step, divided by the median step.
    """

    def __init__(self, scan: Scan) -> None:
        self._names = scan.roles["time"]
        size = scan.num_episodes
        self.median = {name: np.full(size, np.nan) for name in self._names}
        self.low = {name: np.full(size, np.nan) for name in self._names}
        self.high = {name: np.full(size, np.nan) for name in self._names}
        self.jitter = {name: np.full(size, np.nan) for name in self._names}

    def add(self, batch: Batch) -> None:
        parts = np.repeat(np.arange(len(batch.numbers)), np.diff(batch.offsets))
        is_inner = np.ones(len(batch), bool)
        is_inner[batch.offsets[:-1]] = False
        if is_inner.any():
            for name in self._names:
                if name in batch.values:
                    times = batch.values[name].reshape(-1)
                    times = times.astype(np.int64 if times.dtype.kind in "iu" else np.float64)
                    steps = np.diff(times, prepend=times[:1])[is_inner]
                    self._add_steps(batch, name, parts[is_inner], steps)

    def _add_steps(self, batch: Batch, name: str, parts: Array, steps: Array) -> None:
        """Update the statistics of a clock with the time steps in a batch.

        Args:
            batch: The batch.
            name: Name of the clock.
            parts: int64 `[n]`, the episode of each step as an index into `batch.numbers`.
            steps: `[n]`, time steps.
        """
        present, medians = medians_of(parts, steps.astype(np.float64))
        typical = np.ones(len(batch.numbers))
        typical[present] = np.where(medians == 0, 1, np.abs(medians))
        distance = np.abs(steps / typical[parts] - 1)
        # Sort the distances within each episode. The quantile is at 90 % of the episode's steps.
        order = np.lexsort((distance, parts))
        _, first, count = np.unique(parts, return_index=True, return_counts=True)
        place = first + np.minimum(count - 1, (0.9 * count).astype(np.int64))
        jitter = distance[order][place]

        numbers = batch.numbers[present]
        if batch.starts[0] == 0:
            self.median[name][numbers] = medians
        self.jitter[name][numbers] = np.fmax(self.jitter[name][numbers], jitter)
        low = np.minimum.reduceat(steps, first)
        high = np.maximum.reduceat(steps, first)
        self.low[name][numbers] = np.fmin(self.low[name][numbers], low)
        self.high[name][numbers] = np.fmax(self.high[name][numbers], high)


class Actions(Collector):
    """Collector of the changes of continuous actions, for each of E episodes.

    The action of a frame changes if it differs from the previous action by more than 1 % of its
    range.

    Attributes:
        first: int64 `[E]`, first frame in which the action changes; -1 if it never does.
        last: int64 `[E]`, last frame in which the action changes; -1 if it never does.
        rough: Roughness of each dimension, `[E, D]`, by field: the mean squared second difference
            of the values, divided by their variance. NaN if unknown.
        is_known: Whether any action has a continuous dimension.
    """

    def __init__(self, scan: Scan) -> None:
        size = scan.num_episodes
        max_dims = max(1, _MAX_CELLS // max(1, size))
        self._dims: dict[str, Array] = {}
        self._least: dict[str, Array] = {}
        self.rough: dict[str, Array] = {}
        for name in scan.group("action"):
            facts = scan.sample_facts[name]
            dims = np.flatnonzero(facts.is_continuous)
            if len(dims):
                self._dims[name] = dims
                self._least[name] = 0.01 * facts.range_98[dims, None]
                self.rough[name] = np.full((size, min(max_dims, len(dims))), np.nan, "f4")
        self.is_known = bool(self._dims)
        self.first = np.full(size, -1)
        self.last = np.full(size, -1)

    def add(self, batch: Batch) -> None:
        is_move = np.zeros(len(batch), bool)
        for name, dims in self._dims.items():
            if name in batch.values:
                steps = batch.steps(name)[dims]
                is_move |= (np.abs(steps) > self._least[name]).any(0)
                roughness = _roughness(batch, batch.columns(name)[dims], steps)
                table = self.rough[name]
                added = roughness[: table.shape[1]].T
                table[batch.numbers] = np.fmax(table[batch.numbers], added)

        rows = np.flatnonzero(is_move)
        if len(rows):
            parts, first = np.unique(batch.index_of(rows), return_index=True)
            last = np.append(first[1:], len(rows)) - 1
            numbers = batch.numbers[parts]
            row_to_frame = batch.starts[parts] - batch.offsets[parts]
            is_unset = self.first[numbers] < 0
            first_frames = rows[first] + row_to_frame
            self.first[numbers] = np.where(is_unset, first_frames, self.first[numbers])
            self.last[numbers] = rows[last] + row_to_frame


def _roughness(batch: Batch, columns: Array, steps: Array) -> Array:
    """Return the roughness of each dimension in each of k episodes of a batch: `[D, k]`.

    Roughness is the mean squared second difference of the values, divided by their variance. It is
    NaN for episodes with less than 10 frames.

    Args:
        batch: The batch.
        columns: `[D, n]`, values of the actions.
        steps: `[D, n]`, differences between successive values.
    """
    starts = batch.offsets[:-1]
    counts = np.diff(batch.offsets)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        mean = np.add.reduceat(columns, starts, axis=1) / counts
        centred = columns - np.repeat(mean, counts, axis=1)
        variance = np.add.reduceat(np.square(centred), starts, axis=1) / counts
        bend = np.zeros_like(steps)
        bend[:, 1:] = np.square(steps[:, 1:] - steps[:, :-1])
        # A second difference needs three rows of the same episode.
        bend[:, starts] = 0
        bend[:, np.minimum(starts + 1, len(batch) - 1)] = 0
        mean_bend = np.add.reduceat(bend, starts, axis=1) / np.maximum(1, counts - 2)
        roughness: Array = mean_bend / variance
    roughness[:, counts < _MIN_ROUGH_FRAMES] = np.nan
    return roughness


def _main_clock(scan: Scan) -> str:
    """Return the name of the main clock: the first clock that is not an observation.

    If all clocks are observations, it is the first one.
    """
    names = scan.role("time")
    others = [name for name in names if not name.startswith("observation/")]
    return (others or names)[0]


def _time_steps(rows: Array) -> Array:
    return np.diff(rows[:, 0].astype(np.float64))


def _median_jitter(scan: Scan, name: str) -> float:
    """Return the jitter of a clock in the median episode; 0 without time steps."""
    jitter = scan.collected(Clocks).jitter[name]
    known = jitter[np.isfinite(jitter)]
    return float(np.median(known)) if len(known) else 0.0


@checks("TIM01", Clocks)
def not_increasing(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Report clocks that decrease within an episode, and a main clock that repeats a time.

    Other clocks may repeat a time. The clock of a slow sensor does.
    """
    for name in scan.role("time"):
        low = scan.collected(Clocks).low[name]
        is_wrong = low <= 0 if name == _main_clock(scan) else low < 0
        if is_wrong.any():
            numbers = np.flatnonzero(is_wrong)
            message = f"{name!r} does not increase within {len(numbers)} trajectories"
            frames = scan.runs(numbers, name, lambda rows: _time_steps(rows) <= 0)
            yield Defect(name, message, numbers, frames, {"smallest_step": float(np.nanmin(low))})


@checks("TIM02", Clocks)
def jitter(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Report a main clock whose time steps are irregular."""
    name = _main_clock(scan)
    median_jitter = _median_jitter(scan, name)
    if median_jitter > settings["share"]:
        message = f"the steps of {name!r} vary by {median_jitter:.0%}"
        yield Defect(name, message, evidence={"jitter": median_jitter})


@checks("TIM03", Clocks)
def dropped(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Report dropped frames: gaps in a main clock that is otherwise regular."""
    name = _main_clock(scan)
    clocks = scan.collected(Clocks)
    if _median_jitter(scan, name) > _MAX_JITTER:
        raise Inapplicable("the clock is irregular in all frames, which TIM02 reports")
    with np.errstate(invalid="ignore"):
        is_known = clocks.median[name] > 0
        ratio = np.where(is_known, clocks.high[name] / clocks.median[name], 0)
    numbers = worst(np.flatnonzero(ratio > settings["ratio"]), ratio)

    def is_gap(rows: Array) -> Array:
        steps = _time_steps(rows)
        gaps: Array = steps > settings["ratio"] * np.median(steps)
        return gaps

    if len(numbers):
        message = f"frames are missing in {len(numbers)} trajectories"
        evidence = {"largest_step": float(ratio.max())}
        yield Defect(name, message, numbers, scan.runs(numbers, name, is_gap), evidence)


class Repeats(Collector):
    """Collector of repeated rows, which equal the previous row in observations and actions.

    Actions and observations with a continuous dimension are compared.

    Attributes:
        names: Names of the compared fields; empty without a continuous observation.
        count: int64 `[E]`, number of repeated rows in each episode.
    """

    def __init__(self, scan: Scan) -> None:
        facts = scan.sample_facts
        observations = scan.group("observation")
        floats = [name for name in observations if facts[name].is_continuous.any()]
        self.names = [*floats, *scan.group("action")] if floats else []
        self.count = np.zeros(scan.num_episodes, int)

    def add(self, batch: Batch) -> None:
        names = [name for name in self.names if name in batch.values]
        if not names:
            return
        is_changed = np.logical_or.reduce([(batch.steps(name) != 0).any(0) for name in names])
        num_changed = np.add.reduceat(is_changed.astype(np.int64), batch.offsets[:-1])
        self.count[batch.numbers] += np.diff(batch.offsets) - 1 - num_changed


@checks("TIM04", Repeats)
def repeated(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Report recordings in which many frames were recorded twice."""
    repeats = scan.collected(Repeats)
    if not repeats.names:
        raise Inapplicable("no continuous observation")
    num_steps = max(1, int((scan.lengths[scan.examined] - 1).sum()))
    share = repeats.count.sum() / num_steps
    if share > settings["share"]:
        share_of_episode = repeats.count / np.maximum(1, scan.lengths - 1)
        numbers = np.flatnonzero(share_of_episode > settings["share"])
        yield Defect(
            message=f"{share:.1%} of the frames repeat the previous frame",
            trajectories=worst(numbers, share_of_episode),
            evidence={"share": share},
        )


@checks("TIM05", Clocks)
def rate(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Report a main clock whose rate differs from the declared frame rate."""
    declared = scan.declared_rate_hz
    if declared is None:
        raise Inapplicable("the metadata have neither fps nor frame_rate_hz")
    name = _main_clock(scan)
    units = [units for ending, units in _UNITS.items() if name.endswith(ending)]
    if not units and scan.schema[name].numpy_dtype.kind in "iu":
        raise Inapplicable(f"the unit of {name!r} is not known")
    step = float(np.nanmedian(scan.collected(Clocks).median[name]))
    step_s = step / (units[0] if units else 1.0)
    if step_s > 0 and abs(1 / step_s / declared - 1) > settings["share"]:
        message = f"{name!r} runs at {1 / step_s:.4g} Hz, and {declared:g} Hz are declared"
        yield Defect(name, message, evidence={"rate_hz": 1 / step_s, "declared_hz": declared})


@checks("TIM06", Clocks)
def unit(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Report episodes whose time steps are far longer or shorter than in other episodes."""
    for name in scan.role("time"):
        median = scan.collected(Clocks).median[name]
        known = np.flatnonzero(median > 0)
        if not len(known):
            continue
        ratio = median[known] / np.median(median[known])
        is_off = (ratio > settings["ratio"]) | (ratio < 1 / settings["ratio"])
        if is_off.any() and is_off.mean() < 0.5:
            numbers = known[is_off]
            factors = sorted(set(np.round(ratio[is_off], 6).tolist()))[:8]
            message = f"{name!r} has another unit in {len(numbers)} trajectories"
            yield Defect(name, message, numbers, scan.whole(numbers), {"factors": factors})


@checks("TIM07")
def frozen(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Report fields that keep the same value for many frames, although they usually change."""
    skipped = {*scan.roles["time"], *scan.roles["success"], *scan.roles["frame_index"]}
    lengths = np.maximum(2, scan.lengths[scan.examined])
    min_frames = np.maximum(settings["frames"], settings["share"] * lengths)
    for name, facts in scan.facts.items():
        if name in skipped or name.partition("/")[0] in ("reward", "action"):
            continue
        if not facts.is_continuous.any():
            continue
        usual = float(np.median(facts.repeats[scan.examined] / (lengths - 1)))
        is_frozen = facts.hold[scan.examined] >= min_frames
        if is_frozen.any() and usual < settings["usual"]:
            numbers = worst(scan.examined[is_frozen], facts.hold)
            frames = [_longest_hold(scan, number, name) for number in numbers[:MAX_FRAMES].tolist()]
            message = f"{name!r} stands still in {len(numbers)} trajectories"
            evidence = {"frames": int(facts.hold.max()), "usual_share": usual}
            yield Defect(name, message, numbers, frames, evidence)


def _longest_hold(scan: Scan, number: int, name: str) -> tuple[int, int, int]:
    """Return the frames (episode, start, stop) of the longest run of equal rows in a field."""
    is_hold = (np.diff(scan.read(number, name), axis=0) == 0).all(1)
    start, stop = max(runs_of(is_hold), key=lambda run: run[1] - run[0])
    return number, start, stop + 1


@checks("TIM08")
def lag(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Report observations that follow actions with a delay."""
    min_lag = settings["frames"]
    rate_hz = scan.declared_rate_hz
    if rate_hz:
        min_lag = min(min_lag, max(4, settings["seconds"] * rate_hz))
    for action in scan.group("action"):
        dims = np.flatnonzero(scan.facts[action].is_continuous)
        if not len(dims):
            continue
        width = scan.schema[action].num_elements
        for name in scan.group("observation"):
            if scan.schema[name].num_elements != width or not scan.facts[name].is_float:
                continue
            autocorrelation, correlation = _correlations(scan, action, name, dims)
            if not len(correlation) or correlation.max() <= settings["peak"]:
                continue
            if _is_periodic(autocorrelation, settings["periodic"]):
                continue
            peak = int(np.flatnonzero(correlation >= 0.95 * correlation.max())[0])
            at_start = correlation[:4].max()
            if peak >= min_lag and correlation[peak] > at_start + settings["above"]:
                evidence = {
                    "lag_frames": peak,
                    "correlation": correlation[peak],
                    "correlation_at_0_to_3": at_start,
                }
                message = f"{name!r} follows {action!r} after {peak} frames"
                yield Defect(name, message, evidence=evidence)


def _is_periodic(autocorrelation: Array, limit: float) -> bool:
    """Return whether an action repeats itself, according to its autocorrelation by lag.

    The autocorrelation of a periodic action falls below 0.3 and then rises above `limit` again.
    """
    fallen = np.flatnonzero(autocorrelation < 0.3)
    return not len(fallen) or bool(autocorrelation[fallen[0] :].max() > limit)


def _correlations(scan: Scan, action: str, name: str, dims: Array) -> tuple[Array, Array]:
    """Correlate the changes of an action with later changes of the action and an observation.

    Returns:
        The autocorrelation of the action, and its correlation with the observation `name`. Both
        have one value for each lag from 0 to 40 frames: `[41]`. They are empty if fewer than 3
        sampled episodes have 80 or more frames.
    """
    autocorrelation = np.zeros(_LAGS + 1)
    correlation = np.zeros(_LAGS + 1)
    count = 0
    for batch in scan.sample.batches:
        if not batch.values.keys() >= {action, name}:
            continue
        for first, stop in pairwise(batch.offsets.tolist()):
            if stop - first < 2 * _LAGS or count >= _MAX_CORRELATED:
                continue
            action_steps = _normalized(batch.steps(action)[dims, first + 1 : stop])
            steps = _normalized(batch.steps(name)[dims, first + 1 : stop])
            autocorrelation += _lagged_products(action_steps, action_steps)
            correlation += _lagged_products(action_steps, steps)
            count += 1
    if count < _MIN_CORRELATED:
        return np.zeros(0), np.zeros(0)
    return autocorrelation / count, correlation / count


def _lagged_products(steps: Array, later_steps: Array) -> Array:
    """Return the correlation of two arrays of normalized steps `[D, n]` at each lag: `[41]`.

    At the lag k, a step in `steps` is multiplied by the step k rows later in `later_steps`.
    """
    early = steps[:, : steps.shape[1] - _LAGS]
    later = sliding_window_view(later_steps, early.shape[1], axis=1)
    products: Array = np.einsum("dkt,dt->k", later, early) / early.size
    return products


def _normalized(steps: Array) -> Array:
    """Scale steps `[D, n]` to mean 0 and standard deviation 1 in each dimension."""
    centred = np.nan_to_num(steps.astype(np.float64))
    centred -= centred.mean(1, keepdims=True)
    normalized: Array = centred / np.maximum(centred.std(1, keepdims=True), 1e-30)
    return normalized


@checks("TIM09", Actions)
def idle_start(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Report episodes whose action does not change for a long time at the start."""
    first = scan.collected(Actions).first
    num_idle = np.where(first < 0, 0, first)
    numbers = _idle_episodes(scan, settings, num_idle)
    frames = [(number, 0, num_idle[number]) for number in numbers.tolist()]
    yield from _idle_defect(scan, "start", numbers, num_idle, frames)


@checks("TIM10", Actions)
def idle_end(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Report episodes whose action does not change for a long time at the end."""
    last = scan.collected(Actions).last
    num_idle = np.where(last < 0, 0, scan.lengths - 1 - last)
    numbers = _idle_episodes(scan, settings, num_idle)
    stops = scan.lengths
    starts = stops - num_idle
    frames = [(number, starts[number], stops[number]) for number in numbers.tolist()]
    yield from _idle_defect(scan, "end", numbers, num_idle, frames)


def _idle_episodes(scan: Scan, settings: Settings, num_idle: Array) -> Array:
    """Return the episodes in which the action does not change for a long time.

    The episode with the longest rest is first. The result is empty if these episodes are less than
    the fraction `settings["episodes"]` of all episodes.

    Args:
        scan: Scan of the recording.
        settings: Thresholds of the rule.
        num_idle: int64 `[E]`, number of frames before the first change of the action, or after the
            last one.
    """
    if not scan.collected(Actions).is_known:
        raise Inapplicable("no continuous action")
    max_idle = np.maximum(settings["frames"] - 1, settings["share"] * scan.lengths)
    numbers = scan.examined[(num_idle > max_idle)[scan.examined]]
    if len(numbers) < settings["episodes"] * len(scan.examined):
        return numbers[:0]
    return worst(numbers, num_idle)


def _idle_defect(
    scan: Scan,
    place: str,
    numbers: Array,
    num_idle: Array,
    frames: list[tuple[int, int, int]],
) -> Iterator[Defect]:
    if len(numbers):
        message = f"actions rest at the {place} of {len(numbers)} trajectories"
        evidence = {
            "idle_frames": float(np.median(num_idle[numbers])),
            "episodes": len(numbers) / len(scan.examined),
        }
        yield Defect(None, message, numbers, frames, evidence)


@checks("TIM12", Actions)
def jerk(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Report episodes whose actions are much rougher than in other episodes."""
    tables = list(scan.collected(Actions).rough.values())
    rough = np.concatenate(tables, axis=1) if tables else np.zeros((scan.num_episodes, 0))
    is_known = np.isfinite(rough) & (rough > 0)
    known = np.flatnonzero(is_known.any(1))
    if len(known) < 8:
        raise Inapplicable("fewer than 8 episodes with continuous actions")
    # Dimensions are compared separately, because a gripper is always rougher than an arm.
    logs = 0.5 * np.log(np.where(rough[known] > 0, rough[known], np.nan))
    logs = logs[:, np.isfinite(logs).any(0)]
    above = np.nanmedian(logs - np.nanmedian(logs, axis=0), axis=1)
    spread = max(settings["floor"], float(np.median(np.abs(above))))
    is_rough = above > settings["deviations"] * spread
    is_rough &= above > np.log(settings["ratio"])
    if is_rough.any():
        numbers = worst(known[is_rough], above[is_rough], aligned=True)
        message = f"actions of {len(numbers)} trajectories are rougher than in other trajectories"
        evidence = {"ratio": float(np.exp(above.max())), "deviations": above.max() / spread}
        yield Defect(None, message, numbers, scan.whole(numbers), evidence)


@checks("TIM13", Clocks)
def apart(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Report clocks that differ from the main clock by more than a frame."""
    names = scan.role("time")
    if len(names) < 2:
        raise Inapplicable("only one field has times")
    main = _main_clock(scan)
    numbers = evenly_spread(scan.examined, _NUM_COMPARED)
    step = float(np.nanmedian(scan.collected(Clocks).median[main]))
    max_frames = settings["frames"] + 0.01
    for name in names:
        if name == main:
            continue
        distances = []
        for number in numbers.tolist():
            distances.append(_distance_of_clocks(scan, number, main, name, step))
        offset, drift = np.array(distances).T
        # If the offset is very large, the clocks start at different times. That is no defect.
        has_same_zero = np.abs(np.median(offset)) < 0.5 * np.median(scan.lengths)
        is_apart = (drift > max_frames) | (has_same_zero & (np.abs(offset) > max_frames))
        if step > 0 and is_apart.any():
            distance = np.maximum(np.abs(offset) * has_same_zero, drift).max()
            message = f"{name!r} and {main!r} are more than a frame apart"
            yield Defect(name, message, numbers[is_apart], (), {"frames_apart": float(distance)})


def _distance_of_clocks(
    scan: Scan,
    number: int,
    main: str,
    name: str,
    step: float,
) -> tuple[float, float]:
    """Compare a clock with the main clock in one episode.

    Args:
        scan: Scan of the recording.
        number: Index of the episode.
        main: Name of the main clock.
        name: Name of the clock to compare.
        step: Median time step of the main clock.

    Returns:
        The median of the differences between both clocks, and the range of the differences. The
        unit of both is `step`.
    """
    times = scan.read(number, main)[:, 0].astype(np.float64)
    other_times = scan.read(number, name)[:, 0].astype(np.float64)
    # The clock of a slow sensor repeats a time until the next measurement. So compare only rows in
    # which it has a new time.
    is_new = np.append(True, np.diff(other_times) != 0)
    distance = (other_times - times)[is_new] / step
    return float(np.median(distance)), float(distance.max() - distance.min())
