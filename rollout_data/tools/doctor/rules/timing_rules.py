"""Rules TIM of clocks, of frames that repeat or are frozen, of lags and of idle robots."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from ..batched_reading import Array, Batch
from ..field_facts import medians_of, runs_of, worst
from ..findings import Defect, Inapplicable, Settings, checks
from ..scan import Collector, Scan

#: What one second is in units that a field's name ends with.
_UNITS = {"_ns": 1e9, "_us": 1e6, "_ms": 1e3, "_s": 1.0}
_GAP = 1.8
_LAGS = 40
_MAX_CELLS = 6_000_000


class Clocks(Collector):
    """Steps of the time fields, per episode.

    Attributes:
        median, low, high, jitter: Field -> `[E]`: of the steps between frames; NaN without any. `jitter` is the 90 %
            quantile of their distance to the median, divided by it.
    """

    def __init__(self, scan: Scan) -> None:
        self._names = scan.roles["time"]
        size = scan.num_episodes
        self.median, self.low, self.high, self.jitter = (
            {name: np.full(size, np.nan) for name in self._names} for _ in range(4)
        )

    def add(self, batch: Batch) -> None:
        parts = np.repeat(np.arange(len(batch.numbers)), np.diff(batch.offsets))
        inner = np.ones(len(batch), bool)
        inner[batch.offsets[:-1]] = False
        for name in self._names:
            if name not in batch.values or not inner.any():
                continue
            times = batch.values[name].reshape(-1)
            steps = np.diff(times.astype(np.int64 if times.dtype.kind in "iu" else np.float64), prepend=times[:1])[
                inner
            ]
            there, medians = medians_of(parts[inner], steps.astype(np.float64))
            typical = np.ones(len(batch.numbers))
            typical[there] = np.where(medians == 0, 1, np.abs(medians))
            distance = np.abs(steps / typical[parts[inner]] - 1)
            order = np.lexsort((distance, parts[inner]))
            _, first, count = np.unique(parts[inner], return_index=True, return_counts=True)
            numbers = batch.numbers[there]
            is_first = batch.starts[0] == 0
            self.median[name][numbers] = np.where(is_first, medians, self.median[name][numbers])
            late = distance[order][first + np.minimum(count - 1, (0.9 * count).astype(np.int64))]
            self.jitter[name][numbers] = np.fmax(self.jitter[name][numbers], late)
            self.low[name][numbers] = np.fmin(self.low[name][numbers], np.minimum.reduceat(steps, first))
            self.high[name][numbers] = np.fmax(self.high[name][numbers], np.maximum.reduceat(steps, first))


class Actions(Collector):
    """How continuous actions move, per episode.

    Attributes:
        first, last: int64 `[E]`: the first and last frame that differs clearly from the one before; -1 without any.
        rough: Field -> `[E, D]`: mean square of the second difference in variances; NaN if unknown.
        is_known: There is a continuous dimension.
    """

    def __init__(self, scan: Scan) -> None:
        self._dims = {name: np.flatnonzero(scan.pending[name].is_continuous) for name in scan.group("action")}
        self._dims = {name: dims for name, dims in self._dims.items() if len(dims)}
        self._least = {name: 0.01 * scan.pending[name].range_98[dims, None] for name, dims in self._dims.items()}
        self.is_known = bool(self._dims)
        size = scan.num_episodes
        self.first = np.full(size, -1)
        self.last = np.full(size, -1)
        most = max(1, _MAX_CELLS // max(1, size))  # dimensions whose roughness is kept
        self.rough = {name: np.full((size, min(most, len(dims))), np.nan, "f4") for name, dims in self._dims.items()}

    def add(self, batch: Batch) -> None:
        starts = batch.offsets[:-1]
        counts = np.diff(batch.offsets)
        moving = np.zeros(len(batch), bool)
        inner = np.ones(len(batch), bool)
        inner[starts] = False
        inner[np.minimum(starts + 1, len(batch) - 1)] = False
        for name in (one for one in self._dims if one in batch.values):
            steps = batch.steps(name)[self._dims[name]]
            columns = batch.columns(name)[self._dims[name]]
            moving |= (np.abs(steps) > self._least[name]).any(0)
            with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
                mean = np.add.reduceat(columns, starts, axis=1) / counts
                centred = columns - np.repeat(mean, counts, axis=1)
                variance = np.add.reduceat(np.square(centred), starts, axis=1) / counts
                bend = np.zeros_like(steps)
                bend[:, 1:] = np.square(steps[:, 1:] - steps[:, :-1])
                bend[:, ~inner] = 0
                rough = np.add.reduceat(bend, starts, axis=1) / np.maximum(1, counts - 2) / variance
            rough[:, counts < 10] = np.nan
            kept = self.rough[name]
            kept[batch.numbers] = np.fmax(kept[batch.numbers], rough[: kept.shape[1]].T)
        rows = np.flatnonzero(moving)
        if len(rows):
            which, first = np.unique(np.searchsorted(batch.offsets, rows, side="right") - 1, return_index=True)
            last = np.append(first[1:], len(rows)) - 1
            numbers = batch.numbers[which]
            before = batch.starts[which] - batch.offsets[which]
            self.first[numbers] = np.where(self.first[numbers] < 0, rows[first] + before, self.first[numbers])
            self.last[numbers] = rows[last] + before


def _clock(scan: Scan) -> str:
    """Name the field of the main clock: the first that is no observation."""
    names = scan.role("time")
    return next((name for name in names if not name.startswith("observation/")), names[0])


@checks("TIM01", Clocks)
def not_increasing(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """The main clock stands or runs back; others may stand, as slow sensors' do."""
    for name in scan.role("time"):
        low = scan.collected(Clocks).low[name]
        is_wrong = (low <= 0) if name == _clock(scan) else (low < 0)
        if is_wrong.any():
            numbers = np.flatnonzero(is_wrong)
            message = f"{name!r} does not increase within {len(numbers)} trajectories"
            frames = scan.runs(numbers, name, lambda rows: _steps(rows) <= 0)
            yield Defect(name, message, numbers, frames, {"smallest_step": float(np.nanmin(low))})


def _steps(rows: Array) -> Array:
    return np.diff(rows[:, 0].astype(np.float64))


def _jitter(scan: Scan, name: str) -> float:
    known = scan.collected(Clocks).jitter[name]
    return float(np.median(known[np.isfinite(known)])) if np.isfinite(known).any() else 0.0


@checks("TIM02", Clocks)
def jitter(scan: Scan, settings: Settings) -> Iterator[Defect]:
    name = _clock(scan)
    if (found := _jitter(scan, name)) > settings["share"]:
        message = f"the steps of {name!r} vary by {found:.0%}"
        yield Defect(name, message, evidence={"jitter": found})


@checks("TIM03", Clocks)
def dropped(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Gaps in a clock that is regular otherwise."""
    name = _clock(scan)
    clocks = scan.collected(Clocks)
    if _jitter(scan, name) > 0.15:
        raise Inapplicable("the clock is irregular as a whole (TIM02)")
    with np.errstate(invalid="ignore"):
        ratio = np.where(clocks.median[name] > 0, clocks.high[name] / clocks.median[name], 0)
    numbers = worst(np.flatnonzero(ratio > settings["ratio"]), ratio)
    if len(numbers):
        frames = scan.runs(numbers, name, lambda rows: _steps(rows) > settings["ratio"] * np.median(_steps(rows)))
        evidence = {"largest_step": float(ratio.max())}
        yield Defect(name, f"frames are missing in {len(numbers)} trajectories", numbers, frames, evidence)


class Repeats(Collector):
    """int64 `[E]`: rows that equal the one before in all float observations and actions."""

    def __init__(self, scan: Scan) -> None:
        floats = [name for name in scan.group("observation") if scan.pending[name].is_continuous.any()]
        self.names = [*floats, *scan.group("action")] if floats else []
        self.count = np.zeros(scan.num_episodes, int)

    def add(self, batch: Batch) -> None:
        moved = [(batch.steps(name) != 0).any(0) for name in self.names if name in batch.values]
        if moved:
            num_moved = np.add.reduceat(np.logical_or.reduce(moved).astype(np.int64), batch.offsets[:-1])
            self.count[batch.numbers] += np.diff(batch.offsets) - 1 - num_moved


@checks("TIM04", Repeats)
def repeated(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Single frames recorded twice; longer stretches are TIM07."""
    if not scan.collected(Repeats).names:
        raise Inapplicable("no observation of floats")
    count = scan.collected(Repeats).count
    share = count.sum() / max(1, int((scan.lengths[scan.examined] - 1).sum()))
    if share > settings["share"]:
        each = count / np.maximum(1, scan.lengths - 1)
        numbers = worst(np.flatnonzero(each > settings["share"]), each)
        yield Defect(None, f"{share:.1%} of the frames repeat the one before", numbers, evidence={"share": share})


@checks("TIM05", Clocks)
def rate(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """The clock against the declared rate."""
    declared = scan.declared("fps", "frame_rate_hz")
    if declared is None:
        raise Inapplicable("no fps or frame_rate_hz is declared")
    name = _clock(scan)
    unit = next((size for end, size in _UNITS.items() if name.endswith(end)), None)
    if unit is None and scan.schema[name].numpy_dtype.kind in "iu":
        raise Inapplicable(f"the unit of {name!r} is not known")
    step = float(np.nanmedian(scan.collected(Clocks).median[name])) / (unit or 1.0)
    if step > 0 and abs(1 / step / declared - 1) > settings["share"]:
        message = f"{name!r} runs at {1 / step:.4g} Hz, {declared:g} are declared"
        yield Defect(name, message, evidence={"rate_hz": 1 / step, "declared_hz": declared})


@checks("TIM06", Clocks)
def unit(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """The steps of some episodes are thousands of times those of others."""
    for name in scan.role("time"):
        median = scan.collected(Clocks).median[name]
        known = np.flatnonzero(median > 0)
        ratio = median[known] / np.median(median[known]) if len(known) else median[known]
        off = (ratio > settings["ratio"]) | (ratio < 1 / settings["ratio"])
        if off.any() and off.mean() < 0.5:
            numbers = known[off]
            factors = sorted(set(np.round(ratio[off], 6).tolist()))[:8]
            message = f"{name!r} has another unit in {off.sum()} trajectories"
            yield Defect(name, message, numbers, scan.whole(numbers), {"factors": factors})


@checks("TIM07")
def frozen(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """A field stands still where it usually does not."""
    skipped = {*scan.roles["time"], *scan.roles["success"], *scan.roles["frame_index"]}
    for name, facts in scan.facts.items():
        group = name.partition("/")[0]
        if not facts.is_float or name in skipped or group in ("reward", "action") or not facts.is_continuous.any():
            continue
        lengths = np.maximum(2, scan.lengths[scan.examined])
        usual = float(np.median(facts.repeats[scan.examined] / (lengths - 1)))
        held = scan.examined[facts.hold[scan.examined] >= np.maximum(settings["frames"], settings["share"] * lengths)]
        if len(held) and usual < settings["usual"]:
            numbers = worst(held, facts.hold)
            frames = []
            for number in numbers[:20].tolist():
                runs = runs_of((np.diff(scan.read(number, name), axis=0) == 0).all(1))
                start, stop = max(runs, key=lambda run: run[1] - run[0])
                frames.append((number, start, stop + 1))
            evidence = {"frames": int(facts.hold.max()), "usual_share": usual}
            yield Defect(name, f"{name!r} stands still in {len(numbers)} trajectories", numbers, frames, evidence)


@checks("TIM08")
def lag(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """What actions do shows in the observation too late."""
    fps = scan.declared("fps", "frame_rate_hz")
    least = min(settings["frames"], max(4, settings["seconds"] * fps)) if fps else settings["frames"]
    for action in scan.group("action"):
        dims = np.flatnonzero(scan.facts[action].is_continuous)
        for name in scan.group("observation") if len(dims) else ():
            if scan.schema[name].num_elements != scan.schema[action].num_elements or not scan.facts[name].is_float:
                continue
            own, both = _correlations(scan, action, name, dims)
            fallen = np.flatnonzero(own < 0.3)
            if not len(own) or not len(fallen) or own[fallen[0] :].max() > settings["periodic"]:
                continue
            if both.max() <= settings["peak"]:
                continue
            peak = int(np.flatnonzero(both >= 0.95 * both.max())[0])
            if peak >= least and both[peak] > both[:4].max() + settings["above"]:
                evidence = {"lag_frames": peak, "correlation": both[peak], "correlation_at_0_to_3": both[:4].max()}
                yield Defect(name, f"{name!r} follows {action!r} after {peak} frames", evidence=evidence)


def _correlations(scan: Scan, action: str, name: str, dims: Array) -> tuple[Array, Array]:
    """Correlate differences of the action at lags of 0 to 40 frames: with itself, and with the observation."""
    own = np.zeros(_LAGS + 1)
    both = np.zeros(_LAGS + 1)
    count = 0
    for batch in scan.sample.batches:
        if action not in batch.values or name not in batch.values:
            continue
        for first, stop in zip(batch.offsets[:-1].tolist(), batch.offsets[1:].tolist(), strict=True):
            if stop - first < 2 * _LAGS or count >= 64:
                continue
            a, o = (_normal(batch.steps(one)[dims, first + 1 : stop]) for one in (action, name))
            first_rows = a[:, : a.shape[1] - _LAGS]
            for total, other in ((own, a), (both, o)):
                later = sliding_window_view(other, first_rows.shape[1], axis=1)
                total += np.einsum("dkt,dt->k", later, first_rows) / first_rows.size
            count += 1
    return (own / count, both / count) if count >= 3 else (own[:0], both[:0])


def _normal(steps: Array) -> Array:
    wide = np.nan_to_num(steps.astype(np.float64))
    wide -= wide.mean(1, keepdims=True)
    found: Array = wide / np.maximum(wide.std(1, keepdims=True), 1e-30)
    return found


@checks("TIM09", Actions)
def idle_start(scan: Scan, settings: Settings) -> Iterator[Defect]:
    moves = scan.collected(Actions)
    yield from _idle(scan, settings, np.where(moves.first < 0, 0, moves.first), True)


@checks("TIM10", Actions)
def idle_end(scan: Scan, settings: Settings) -> Iterator[Defect]:
    moves = scan.collected(Actions)
    yield from _idle(scan, settings, np.where(moves.last < 0, 0, scan.lengths - 1 - moves.last), False)


def _idle(scan: Scan, settings: Settings, idle: Array, at_start: bool) -> Iterator[Defect]:
    if not scan.collected(Actions).is_known:
        raise Inapplicable("no continuous action")
    numbers = scan.examined[
        (idle > np.maximum(settings["frames"] - 1, settings["share"] * scan.lengths))[scan.examined]
    ]
    if len(numbers) and len(numbers) >= settings["episodes"] * len(scan.examined):
        numbers = worst(numbers, idle)
        spans = [
            (n, 0, idle[n]) if at_start else (n, scan.lengths[n] - idle[n], scan.lengths[n]) for n in numbers.tolist()
        ]
        evidence = {"idle_frames": float(np.median(idle[numbers])), "episodes": len(numbers) / len(scan.examined)}
        where = "start" if at_start else "end"
        yield Defect(None, f"actions rest at the {where} of {len(numbers)} trajectories", numbers, spans, evidence)


@checks("TIM12", Actions)
def jerk(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """The actions of an episode are much rougher than others'."""
    tables = list(scan.collected(Actions).rough.values())
    rough = np.concatenate(tables, axis=1) if tables else np.zeros((scan.num_episodes, 0))
    known = np.flatnonzero((np.isfinite(rough) & (rough > 0)).any(1))
    if len(known) < 8:
        raise Inapplicable("fewer than 8 episodes with continuous actions")
    # Each dimension is compared with itself: a gripper that opens twice is no rougher arm.
    logs = 0.5 * np.log(np.where(rough[known] > 0, rough[known], np.nan))
    usual = np.nanmedian(logs[:, np.isfinite(logs).any(0)], axis=0)
    above = np.nanmedian(logs[:, np.isfinite(logs).any(0)] - usual, axis=1)
    spread = max(settings["floor"], float(np.median(np.abs(above))))
    off = (above > settings["deviations"] * spread) & (above > np.log(settings["ratio"]))
    if off.any():
        numbers = worst(known[off], above[off], aligned=True)
        evidence = {"ratio": float(np.exp(above.max())), "deviations": above.max() / spread}
        yield Defect(
            None,
            f"actions of {len(numbers)} trajectories jerk more than others'",
            numbers,
            scan.whole(numbers),
            evidence,
        )


@checks("TIM13", Clocks)
def apart(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Two clocks of one recording disagree."""
    names = scan.role("time")
    if len(names) < 2:
        raise Inapplicable("only one field of times")
    main = _clock(scan)
    chosen = scan.examined[np.unique(np.linspace(0, len(scan.examined) - 1, 512).astype(np.int64))]
    for name in (one for one in names if one != main):
        step = float(np.nanmedian(scan.collected(Clocks).median[main]))
        offs = []
        drifts = []
        for number in chosen.tolist():
            one, other = (scan.read(number, which)[:, 0].astype(np.float64) for which in (main, name))
            fresh = np.append(True, np.diff(other) != 0)  # a slow sensor holds its time as well
            apart = (other - one)[fresh] / step
            offs.append(np.median(apart))
            drifts.append(apart.max() - apart.min())
        off = np.array(offs)
        drifting = np.array(drifts)
        is_same = np.abs(np.median(off)) < 0.5 * np.median(scan.lengths)  # otherwise they start at different zeros
        wrong = (drifting > settings["frames"] + 0.01) | (is_same & (np.abs(off) > settings["frames"] + 0.01))
        if step > 0 and wrong.any():
            evidence = {"frames_apart": float(np.maximum(np.abs(off) * is_same, drifting).max())}
            yield Defect(name, f"{name!r} and {main!r} are more than a frame apart", chosen[wrong], (), evidence)
