"""Rules VAL: unusual values and dimensions of fields."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ..batched_reading import Array
from ..declared_spaces import declared_bounds
from ..field_facts import Facts, worst
from ..findings import Defect, Inapplicable, Settings, checks
from ..scan import Scan

#: Values that many systems store in place of missing data.
_PLACEHOLDERS = (
    -9999.0,
    -999.0,
    999.0,
    9999.0,
    99999.0,
    65535.0,
    32767.0,
    -32768.0,
    2147483647.0,
)
#: Ratios of units that are often confused, with the names of the units.
_UNITS = {
    57.2958: "degrees and radians",
    1000.0: "mm and m",
    100.0: "cm and m",
    255.0: "bytes and 0 to 1",
}
#: Full turn in radians and in degrees.
_TURNS = (2 * np.pi, 360.0)
#: Number of mantissa bits of the 16-bit float dtypes.
_MANTISSA_BITS = {"float16": 10, "bfloat16": 7}
#: Minimum number of frames of an episode that is searched for dimensions that stop changing.
_MIN_DIED_FRAMES = 5
#: Minimum number of episodes for comparing scales between episodes.
_MIN_EPISODES = 8
#: Minimum number of episodes for comparing early episodes with late episodes.
_MIN_DRIFT_EPISODES = 20
#: Maximum number of outliers, in dimensions that rarely change, whose frames are looked up.
_MAX_RARE = 20
#: Minimum number of distinct values of a dimension besides a placeholder.
_MIN_OTHERS = 20


def _signals(scan: Scan) -> Iterator[tuple[str, Facts]]:
    """Yield (name, facts) of each field that is not a reward, a time, a flag or an index."""
    special = {name for names in scan.roles.values() for name in names}
    special -= {*scan.roles["quaternion"], *scan.roles["heading"]}
    for name, facts in scan.facts.items():
        if name not in special and name.partition("/")[0] != "reward":
            yield name, facts


def _dims(mask: Any) -> list[int]:
    dims: list[int] = np.flatnonzero(mask).tolist()
    return dims


@checks("VAL01")
def not_finite(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Report fields with NaN or infinite values."""
    for name, facts in scan.facts.items():
        count = int(facts.num_bad.sum())
        if not count:
            continue
        numbers = worst(np.flatnonzero(facts.num_bad), facts.num_bad)
        share = count / facts.num_values
        is_extra = name.partition("/")[0] not in ("observation", "action", "reward")
        message = f"{count:,} numbers of {name!r} are NaN or infinite"
        message += f", in {len(numbers):,} trajectories"
        yield Defect(
            name,
            message,
            numbers,
            scan.runs(numbers, name, _has_bad),
            {"count": count, "share": share},
            severity="warning" if is_extra and share < settings["share"] else "",
        )


def _has_bad(rows: Array) -> Any:
    return np.logical_not(np.isfinite(rows).all(1))


@checks("VAL02")
def dead_action(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Report constant dimensions of action fields that also have a continuous dimension."""
    for name in scan.group("action"):
        facts = scan.facts[name]
        dims = _dims(facts.is_constant)
        if dims and facts.is_continuous.any():
            values = facts.low[0, dims].tolist()
            evidence = {"dimensions": dims, "values": values}
            yield Defect(name, f"{name!r}{dims} is always {values}", evidence=evidence)


@checks("VAL03")
def constant(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Report dimensions of observations that never change."""
    for name in scan.group("observation"):
        facts = scan.facts[name]
        dims = _dims(facts.is_constant)
        if dims:
            size = facts.field.num_elements
            message = f"{len(dims)} of {size} dimensions of {name!r} never change"
            yield Defect(name, message, evidence={"dimensions": dims})


@checks("VAL04")
def died(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Report dimensions that stop changing: they are constant in all later episodes."""
    for name, facts in _signals(scan):
        rows = np.flatnonzero(facts.lengths >= _MIN_DIED_FRAMES)
        if len(rows) < _MIN_EPISODES:
            continue
        # A dimension may stay at its last value until the recording ends. Count the episodes at the
        # end of the recording in which it has no other value.
        low = facts.low[rows]
        is_still = (low == facts.high[rows]) & (low == low[-1])
        num_still = np.argmin(is_still[::-1], axis=0)
        num_still = np.where(is_still.all(0), 0, num_still)

        # Fraction of the earlier episodes in which the dimension often changes.
        num_steps = facts.lengths[rows, None] - 1
        is_lively = facts.changes[rows] > settings["changing"] * num_steps
        is_earlier = np.arange(len(rows))[:, None] < len(rows) - num_still
        num_lively = (is_lively & is_earlier).sum(0)
        share = num_lively / np.maximum(1, is_earlier.sum(0))

        min_still = max(settings["episodes"], settings["share"] * len(rows))
        dims = _dims((num_still >= min_still) & (share >= settings["earlier"]))
        if dims:
            first = len(rows) - int(num_still[dims].max())
            numbers = facts.numbers[rows[first:]]
            message = f"{name!r}{dims} stays at one value in the last {len(numbers)} episodes"
            evidence = {
                "dimensions": dims,
                "episodes": len(numbers),
                "changed_before": share[dims].min(),
            }
            yield Defect(name, message, numbers, scan.whole(numbers), evidence)


class _Outlier(NamedTuple):
    """Value far from all other values.

    Attributes:
        distance: Distance to the median, as a multiple of the range of usual values.
        dim: Dimension of the field.
        number: Index of the episode.
        frame: Frame in the episode.
    """

    distance: float
    dim: int
    number: int
    frame: int


@checks("VAL05")
def outlier(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Report a few values that are far from all other values of their dimension."""
    for name, facts in _signals(scan):
        is_active = facts.is_active & (facts.spread > 0)
        outliers: list[_Outlier] = []
        for dim in _dims(is_active & facts.is_continuous):
            outliers += _active_outliers(facts, dim, settings)
        outliers += _rare_outliers(scan, facts, is_active, settings)
        if outliers:
            outliers.sort(key=lambda outlier: -outlier.distance)
            largest = outliers[0].distance
            message = f"{len(outliers)} values of {name!r} lie up to {largest:,.0f} ranges away"
            message += " from the median"
            dims = sorted({outlier.dim for outlier in outliers})
            yield Defect(
                name,
                message,
                {outlier.number for outlier in outliers},
                [(outlier.number, outlier.frame, outlier.frame + 1) for outlier in outliers],
                {"ranges": largest, "dimensions": dims},
            )


def _active_outliers(facts: Facts, dim: int, settings: Settings) -> list[_Outlier]:
    """Return the outliers in a dimension that changes in most frames."""
    median = facts.quantile(0.5)[dim]
    spread = facts.spread[dim]
    far = facts.far[facts.far["dim"] == dim]
    order = np.argsort(-np.abs(far["value"] - median), kind="stable")
    far = far[order]
    distance = np.abs(far["value"] - median) / spread
    sample_distance = np.abs(facts.sorted[dim] - median) / spread
    usual = sample_distance[sample_distance <= facts.far_ranges].max(initial=0)
    count = _num_alone(distance, usual, settings["gap"], settings["ranges"])
    num_rows = facts.num_values / facts.field.num_elements
    if count > settings["share"] * num_rows:
        return []
    return [
        _Outlier(ranges, dim, int(value["number"]), int(value["frame"]))
        for ranges, value in zip(distance[:count].tolist(), far[:count], strict=True)
    ]


def _rare_outliers(
    scan: Scan,
    facts: Facts,
    is_active: Array,
    settings: Settings,
) -> list[_Outlier]:
    """Return the outliers in dimensions that rarely change, such as contact forces.

    Such a dimension is 0 in most frames, so it has no usual range. Its values are compared with the
    largest absolute value in the dimensions that often change, `is_active` `[D]`.
    """
    largest = np.maximum(np.abs(facts.low), np.abs(facts.high))
    usual = float(largest[:, is_active].max(initial=0))
    if usual <= 0:
        return []
    peak = np.where(is_active, 0, np.nan_to_num(largest, posinf=0))
    sizes = np.sort(peak[peak > usual].astype(np.float64))[::-1]
    count = _num_alone(sizes, usual, settings["gap"], settings["passive"] * usual)
    if not count:
        return []
    outliers = []
    for row, dim in np.argwhere(peak >= sizes[count - 1])[:_MAX_RARE].tolist():
        number = int(facts.numbers[row])
        frame = int(np.argmax(np.abs(scan.read(number, facts.name)[:, dim])))
        outliers.append(_Outlier(float(peak[row, dim] / usual), dim, number, frame))
    return outliers


def _num_alone(sizes: Array, usual: float, gap: float, limit: float) -> int:
    """Count the outliers: the largest sizes, which a gap separates from all smaller sizes.

    For the sizes 900, 800, 7 and 5, with the gap 10, there are 2 outliers, because 800 is more than
    10 times 7.

    Args:
        sizes: Sizes in descending order, without usual sizes.
        usual: Largest usual size. It follows the last of `sizes`.
        gap: A size is above a gap if it is at least `gap` times the next smaller size.
        limit: Only sizes above this limit are counted.
    """
    is_gap = sizes >= gap * np.append(sizes[1:], usual)
    last = np.flatnonzero(is_gap & (sizes > limit))
    return int(last[-1]) + 1 if len(last) else 0


@checks("VAL06")
def placeholder(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Report placeholders: one exact value that occurs often, far from all other values."""
    for name, facts in _signals(scan):
        for dim in _dims(facts.is_active & ~facts.is_constant):
            yield from _placeholders(scan, name, facts, dim, settings)


def _placeholders(
    scan: Scan,
    name: str,
    facts: Facts,
    dim: int,
    settings: Settings,
) -> Iterator[Defect]:
    """Report the placeholders in one dimension of a field.

    The candidates are the minimum, the maximum, and the values that are far from the median.
    """
    ordered = facts.sorted[dim]
    ordered = ordered[np.isfinite(ordered)]
    far = facts.far["value"][facts.far["dim"] == dim]
    num_all = max(len(ordered), facts.num_rows if len(far) else 0)
    extremes = [*ordered[-1:].tolist(), *ordered[:1].tolist()]
    for value in dict.fromkeys([*extremes, *np.unique(far).tolist()[:20]]):
        others = ordered[ordered != value]
        count = max(len(ordered) - len(others), int((far == value).sum()))
        if count < settings["count"] or count >= settings["share"] * num_all:
            continue
        if len(others) < _MIN_OTHERS or len(np.unique(others[:4096])) < _MIN_OTHERS:
            continue
        low, median, high = np.quantile(others, [0.005, 0.5, 0.995]).tolist()
        distance = abs(value - median) / max(high - low, 1e-30)
        is_far = facts.is_float and distance > settings["ranges"]
        if is_far or _is_common_placeholder(value, low, high, others[-1] - others[0]):
            has_value = (facts.low[:, dim] == value) | (facts.high[:, dim] == value)
            numbers = facts.numbers[has_value]
            frames = scan.runs(numbers, name, _equals, dim, value)
            message = f"{name!r}[{dim}] is exactly {value:g} in many frames"
            evidence = {"dimension": dim, "value": value, "count": count, "ranges": distance}
            yield Defect(name, message, numbers, frames, evidence)


def _is_common_placeholder(value: float, low: float, high: float, span: float) -> bool:
    """Return whether a value is a known placeholder, such as -999, and far from other values."""
    return value in _PLACEHOLDERS and span > 0 and max(low - value, value - high) > 2 * span


def _equals(rows: Array, dim: int, value: float) -> Array:
    is_equal: Array = rows[:, dim] == value
    return is_equal


@checks("VAL07")
def saturated(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Report actions with many values at their minimum or maximum."""
    for name in scan.group("action"):
        facts = scan.facts[name]
        dims = np.flatnonzero(facts.is_continuous)
        values = facts.sorted[dims]
        if not values.size:
            continue
        low = facts.low.min(0)[dims]
        high = facts.high.max(0)[dims]
        share_low = (values == low[:, None]).mean(1)
        share_high = (values == high[:, None]).mean(1)
        share = share_low + share_high
        is_saturated = share >= settings["share"]
        if is_saturated.mean() < 0.5 and share.max() <= settings["alone"]:
            continue
        is_declared = False
        bounds = declared_bounds(scan, name)
        if bounds is not None:
            is_low_bound = np.isclose(low, bounds[0][dims], atol=1e-6) | (share_low < 0.05)
            is_high_bound = np.isclose(high, bounds[1][dims], atol=1e-6) | (share_high < 0.05)
            is_declared = bool((is_low_bound & is_high_bound)[is_saturated].all())
        message = f"up to {share.max():.0%} of the values of {name!r} lie at its smallest or"
        message += " largest value"
        evidence = {
            "dimensions": dims.tolist(),
            "shares": share.tolist(),
            "declared": is_declared,
        }
        yield Defect(name, message, evidence=evidence, severity="info" if is_declared else "")


@checks("VAL08")
def narrowed(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Report float32 fields whose values have only the precision of a 16-bit dtype."""
    for name, facts in _signals(scan):
        if facts.field.dtype != "float32":
            continue
        values = []
        for dim in _dims(facts.is_continuous):
            ordered = facts.sorted[dim]
            values.append(np.unique(ordered[np.isfinite(ordered)]))
        num_distinct = sum(map(len, values))
        if num_distinct < settings["distinct"]:
            continue
        for dtype, bits in _MANTISSA_BITS.items():
            is_narrowed = []
            for distinct in values:
                is_exact = _is_exact(distinct, dtype, settings["share"])
                is_narrowed.append(is_exact and not _is_uniform(distinct, bits))
            share = np.mean(is_narrowed)
            if share > 0.5:
                message = f"the float32 values of {name!r} are all values of {dtype}"
                evidence = {"dtype": dtype, "distinct": num_distinct, "share": share}
                yield Defect(name, message, evidence=evidence)
                break


def _is_exact(values: Array, dtype: str, share: float) -> bool:
    """Return whether more than `share` of float32 values are exactly representable in `dtype`."""
    if dtype == "bfloat16":
        is_exact = values.view(np.uint32) & 0xFFFF == 0
    else:
        with np.errstate(over="ignore"):
            is_exact = values.astype(np.float16) == values
    return bool(np.mean(is_exact) > share)


def _is_uniform(values: Array, bits: int) -> bool:
    """Return whether values are uniformly spaced: integers, or multiples of a resolution.

    The resolution is the difference between adjacent floats at the size of the largest value, in a
    dtype with `bits` mantissa bits. Such values come from a sensor, not from a conversion.
    """
    exponent = np.floor(np.log2(np.abs(values).max()))
    resolution = 2.0 ** (exponent - bits)
    return any(bool(np.mean(values % step == 0) > 0.99) for step in (1.0, resolution))


@checks("VAL09")
def denormals(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Report fields with many subnormal values."""
    for name, facts in scan.facts.items():
        if facts.field.dtype not in ("float32", "float64") or not facts.sorted.size:
            continue
        size = np.abs(facts.sorted)
        is_subnormal = (size > 0) & (size < np.finfo(facts.dtype).tiny)
        share = float(np.mean(is_subnormal))
        if share > settings["share"]:
            yield Defect(name, f"{share:.2%} of {name!r} are subnormal", evidence={"share": share})


@checks("VAL10")
def scale_jumps(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Report episodes whose values have another scale than the rest, for example another unit."""
    for name, facts in _signals(scan):
        known = np.flatnonzero(facts.scale > 0)
        if not facts.is_float or len(known) < _MIN_EPISODES:
            continue
        logs = np.log(facts.scale[known] / np.median(facts.scale[known]))
        is_off = _is_too_large(facts, known, logs, settings)
        is_off |= _is_too_small(facts, known, logs, settings)
        if not is_off.any() or is_off.sum() > len(known) / 2:
            continue
        factor = float(np.exp(np.median(np.abs(logs[is_off]))))
        unit = _unit_of(factor)
        numbers = worst(known[is_off], np.abs(logs[is_off]), aligned=True)
        message = f"{name!r} is off by a factor of about {factor:,.1f}"
        if unit:
            message += f", as between {unit}"
        message += f" in {len(numbers)} trajectories"
        evidence = {"factor": factor, "unit": f"between {unit}" if unit else ""}
        yield Defect(name, message, numbers, scan.whole(numbers), evidence)


def _unit_of(factor: float) -> str:
    """Return the names of the units whose ratio is about `factor`; "" for other factors."""
    ratio = min(_UNITS, key=lambda ratio: abs(np.log(ratio / factor)))
    return _UNITS[ratio] if abs(np.log(ratio / factor)) < 0.3 else ""


def _is_too_large(facts: Facts, known: Array, logs: Array, settings: Settings) -> Array:
    """Return `[k]` bool: whether each episode has far larger values than the other episodes.

    Args:
        facts: Facts of the field.
        known: int64 `[k]`, indices of the compared episodes.
        logs: `[k]`, for each episode the logarithm of the ratio of its scale to the median scale.
        settings: Thresholds of the rule.
    """
    is_far, gap = _beyond_gap(logs, settings)
    # If the scales differ by a large gap, it is enough that a single dimension is larger.
    if gap > np.log(settings["ratio"]):
        return is_far
    return is_far & _scaled_together(facts, known, 1, settings["alike"])


def _is_too_small(facts: Facts, known: Array, logs: Array, settings: Settings) -> Array:
    """Return `[k]` bool: whether each episode has far smaller values than the other episodes.

    The ratio must be about the ratio of two units, such as 1000 for m and mm. An episode at rest
    also has small values, but rarely by such a ratio.

    Args:
        facts: Facts of the field.
        known: int64 `[k]`, indices of the compared episodes.
        logs: `[k]`, for each episode the logarithm of the ratio of its scale to the median scale.
        settings: Thresholds of the rule.
    """
    is_far, _ = _beyond_gap(-logs, settings)
    typical = float(np.median(np.abs(logs)))
    tolerance = min(0.7, max(0.25, 4.4 * typical))
    distance_to_units = np.abs(-logs[:, None] - np.log(list(_UNITS))).min(1)
    is_far &= distance_to_units < tolerance
    return is_far & _scaled_together(facts, known, -1, settings["alike"])


def _beyond_gap(logs: Array, settings: Settings) -> tuple[Array, float]:
    """Find the episodes whose scale is separated from the other scales by a gap.

    `logs` `[k]` are logarithms of relative scales. A scale is large if it exceeds the threshold
    "ratio". The gap lies between the smallest large scale and the largest other scale.

    Returns:
        Whether each episode has a large scale, bool `[k]`, and the gap as a difference of
        logarithms. All entries are False if the gap is smaller than the threshold "gap".
    """
    is_far = logs > np.log(settings["ratio"])
    largest_near = max(0.0, float(logs[~is_far].max(initial=0)))
    gap = float(logs[is_far].min(initial=np.inf)) - largest_near
    if gap <= np.log(settings["gap"]):
        is_far = np.zeros(len(logs), bool)
    return is_far, gap


def _scaled_together(facts: Facts, known: Array, sign: int, share: float) -> Array:
    """Return `[k]` bool: whether each episode has another scale in many dimensions.

    A dimension has another scale if it is 5 times larger (sign 1) or smaller (sign -1) than in the
    median episode. More than the fraction `share` of the dimensions must have another scale.
    Constant dimensions do not count. The result is False for episodes that are not in the tables of
    `facts`.
    """
    has_row = np.isin(known, facts.numbers)
    rows = np.searchsorted(facts.numbers, known[has_row])
    size = np.maximum(np.abs(facts.low), np.abs(facts.high))[rows]
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        logs = sign * np.log(size / np.median(size, axis=0))
    logs = logs[:, ~facts.is_constant]
    is_scaled = np.zeros(len(known), bool)
    is_scaled[has_row] = (logs > np.log(5)).sum(1) > share * logs.shape[1]
    return is_scaled


@checks("VAL15")
def out_of_bounds(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Report values outside of the bounds that the metadata declare."""
    has_bounds = False
    for name in scan.numeric:
        if name.partition("/")[0] not in ("observation", "action"):
            continue
        bounds = declared_bounds(scan, name)
        if bounds is not None:
            has_bounds = True
            yield from _outside_of(scan, settings, name, *bounds)
    if not has_bounds:
        raise Inapplicable("the metadata declare no bounds of observations or actions")


def _outside_of(
    scan: Scan,
    settings: Settings,
    name: str,
    low: Array,
    high: Array,
) -> Iterator[Defect]:
    """Report episodes with values of a field below `low` or above `high`, each `[D]`."""
    facts = scan.facts[name]
    width = high - low
    with np.errstate(invalid="ignore"):
        finite_width = np.where(np.isfinite(width), width, np.maximum(1, np.abs(facts.spread)))
        slack = settings["share"] * finite_width
        above = np.where(np.isfinite(high), facts.high - high, 0)
        below = np.where(np.isfinite(low), low - facts.low, 0)
        excess = np.fmax(above, below)
    is_outside = excess > slack
    rows = np.flatnonzero(is_outside.any(1))
    if len(rows):
        numbers = worst(facts.numbers[rows], excess.max(1)[rows], aligned=True)
        dims = _dims(is_outside.any(0))
        yield Defect(
            name,
            f"{name!r} leaves its declared space in {len(numbers)} trajectories",
            numbers,
            scan.runs(numbers, name, _is_outside, low - slack, high + slack),
            {
                "dimensions": dims,
                "low": low[dims].tolist(),
                "high": high[dims].tolist(),
                "excess": excess.max(),
            },
        )


def _is_outside(rows: Array, low: Array, high: Array) -> Any:
    return np.logical_or(rows > high, rows < low).any(1)


def _is_jump(rows: Array, dims: list[int], low: float, high: float) -> Any:
    """Return `[T - 1]` bool: whether a step in any of `dims` is between `low` and `high`."""
    steps = np.abs(np.diff(rows[:, dims].astype(np.float64), axis=0))
    return np.logical_and(steps > low, steps < high).any(1)


@checks("VAL14")
def wraps(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Report angles that jump by a full turn."""
    for name, facts in _signals(scan):
        with np.errstate(invalid="ignore", over="ignore"):
            span = facts.high.max(0) - facts.low.min(0)
        for turn in _TURNS:
            usual = facts.usual_step(turn / 2)
            is_angle = facts.is_continuous & facts.is_active & (span < 3 * turn)
            is_angle &= turn > 10 * usual
            is_wrap = (np.abs(facts.step / turn - 1) < settings["share"]) & is_angle
            dims = _dims(is_wrap.any(0))
            if dims:
                numbers = facts.numbers[is_wrap.any(1)]
                margin = turn * settings["share"]
                yield Defect(
                    name,
                    f"{name!r}{dims} wraps around by {turn:.4g}",
                    numbers,
                    scan.runs(numbers, name, _is_jump, dims, turn - margin, turn + margin),
                    {"dimensions": dims, "turn": turn, "usual_step": usual[dims].max()},
                    severity="info" if name in scan.roles["heading"] else "",
                )


@checks("VAL16")
def drift(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Report dimensions whose mean differs between early and late episodes."""
    if scan.num_episodes < _MIN_DRIFT_EPISODES:
        raise Inapplicable("fewer than 20 episodes")
    groups = ("observation", "action", "privileged_observation")
    for name, facts in _signals(scan):
        if name.partition("/")[0] not in groups or len(facts.numbers) < _MIN_DRIFT_EPISODES:
            continue
        shift, noise = _shift_of_means(facts.mean)
        size = np.abs(shift)
        is_moved = (size > settings["deviations"] * noise) & facts.is_continuous
        is_moved &= (size > settings["share"] * facts.spread) & (facts.spread > 0)
        dims = _dims(is_moved)
        if dims:
            is_curriculum = _is_curriculum(scan, facts)
            late = facts.numbers[len(facts.numbers) // 2 :]
            deviations = (size / np.maximum(noise, 1e-30))[dims].max()
            yield Defect(
                name,
                f"the means of {name!r}{dims} differ between early and late episodes",
                () if is_curriculum else late,
                evidence={"dimensions": dims, "deviations": deviations},
                severity="info" if is_curriculum else "",
            )


def _is_curriculum(scan: Scan, facts: Facts) -> bool:
    """Return whether lengths or returns also change over the episodes, as in a curriculum."""
    measures: list[Array] = [facts.lengths[:, None].astype(np.float64)]
    rewards = scan.facts.get("reward")
    if rewards is not None:
        measures.append(rewards.mean * rewards.lengths[:, None])
    for measure in measures:
        shift, noise = _shift_of_means(measure)
        if (np.abs(shift) > 1.5 * noise + 1e-9).any():
            return True
    return False


def _shift_of_means(means: Array) -> tuple[Array, Array]:
    """Compare the means of early episodes with the means of late episodes.

    Args:
        means: `[K, D]`, mean of each dimension in K successive episodes.

    Returns:
        The difference of the second half of the episodes to the first half, `[D]`, and the standard
        deviation of the means within a half, `[D]`. Both are NaN if a half has no finite values.
    """
    early, late = np.array_split(np.ma.masked_invalid(means.astype(np.float64)), 2)
    shift = late.mean(0) - early.mean(0)
    noise = np.ma.sqrt((early.var(0) + late.var(0)) / 2)
    return shift.filled(np.nan), noise.filled(np.nan)


@checks("VAL17")
def overflow(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Report integers that overflow: they jump by the range of their dtype."""
    for name, facts in _signals(scan):
        if facts.field.numpy_dtype.kind not in "iu":
            continue
        limits = np.iinfo(facts.field.numpy_dtype)
        size = float(limits.max) - float(limits.min)
        min_jump = settings["share"] * size
        is_wrap = (facts.step > min_jump) & (facts.step_quantile(0.9) < 0.1 * size)
        dims = _dims(is_wrap.any(0))
        if dims:
            numbers = facts.numbers[is_wrap.any(1)]
            frames = scan.runs(numbers, name, _is_jump, dims, min_jump, np.inf)
            message = f"{name!r}{dims} jumps by the range of {facts.field.dtype}"
            evidence = {"dimensions": dims, "jump": facts.step.max(), "range": size}
            yield Defect(name, message, numbers, frames, evidence)


@checks("VAL18")
def narrow_quantiles(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Report dimensions whose 1 % and 99 % quantiles are too close for normalization."""
    for name in (*scan.group("action"), *scan.group("observation")):
        facts = scan.facts[name]
        low = facts.quantile(0.01)
        high = facts.quantile(0.99)
        is_narrow = high - low < settings["part"] * np.maximum(np.abs(low), np.abs(high))
        dims = _dims(is_narrow & ~facts.is_constant)
        if dims:
            quantiles = [(float(low[dim]), float(high[dim])) for dim in dims]
            ranges = ", ".join(f"{first:.6g} to {last:.6g}" for first, last in quantiles[:4])
            if len(quantiles) > 4:
                ranges += " ..."
            message = f"98 % of the values of {name!r}{dims} lie within {ranges}"
            yield Defect(name, message, evidence={"dimensions": dims, "quantiles": quantiles})
