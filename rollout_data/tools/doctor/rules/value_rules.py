"""Rules VAL of single values and dimensions: absolute, unless a comparison says otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ..batched_reading import Array
from ..declared_spaces import declared_bounds
from ..field_facts import Facts, worst
from ..findings import Defect, Inapplicable, Settings, checks
from ..scan import Scan

#: Values that stand for "no value" in many systems.
_SENTINELS = (-9999.0, -999.0, 999.0, 9999.0, 99999.0, 65535.0, 32767.0, -32768.0, 2147483647.0)
#: Ratios of units that are often mixed up.
_UNITS = {57.2958: "degrees and radians", 1000.0: "mm and m", 100.0: "cm and m", 255.0: "bytes and 0 to 1"}
_TURNS = (2 * np.pi, 360.0)


def _signals(scan: Scan) -> Iterator[tuple[str, Facts]]:
    """Yield all fields but rewards, times and flags."""
    special = {name for names in scan.roles.values() for name in names} - set(scan.roles["quaternion"])
    special -= set(scan.roles["heading"])
    for name, facts in scan.facts.items():
        if name.partition("/")[0] != "reward" and name not in special:
            yield name, facts


def _dims(mask: Any) -> list[int]:
    found: list[int] = np.flatnonzero(mask).tolist()
    return found


@checks("VAL01")
def not_finite(scan: Scan, settings: Settings) -> Iterator[Defect]:
    for name, facts in scan.facts.items():
        numbers = worst(np.flatnonzero(facts.num_bad), facts.num_bad)
        count = int(facts.num_bad.sum())
        if count:
            share = count / facts.num_values
            is_extra = name.partition("/")[0] not in ("observation", "action", "reward")
            frames = scan.runs(numbers, name, lambda rows: ~np.isfinite(rows).all(1))
            severity = "warning" if is_extra and share < settings["share"] else ""
            message = f"{count:,} numbers of {name!r} are NaN or infinite, in {len(numbers):,} trajectories"
            yield Defect(name, message, numbers, frames, {"count": count, "share": share}, severity)


@checks("VAL02")
def dead_action(scan: Scan, settings: Settings) -> Iterator[Defect]:
    for name in scan.group("action"):
        facts = scan.facts[name]
        if (dead := _dims(facts.is_constant)) and facts.is_continuous.any():
            values = facts.low[0, dead].tolist()
            yield Defect(name, f"{name!r}{dead} is always {values}", evidence={"dimensions": dead, "values": values})


@checks("VAL03")
def constant(scan: Scan, settings: Settings) -> Iterator[Defect]:
    for name in scan.group("observation"):
        facts = scan.facts[name]
        if still := _dims(facts.is_constant):
            message = f"{len(still)} of {facts.field.num_elements} dimensions of {name!r} never change"
            yield Defect(name, message, evidence={"dimensions": still})


@checks("VAL04")
def died(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """The last episodes are constant at one value, and earlier ones were not."""
    for name, facts in _signals(scan):
        rows = np.flatnonzero(facts.lengths >= 5)
        if len(rows) < 8:
            continue
        still = (facts.low == facts.high)[rows] & (facts.low[rows] == facts.low[rows[-1]])
        count = np.where(still.all(0), 0, np.argmin(still[::-1], axis=0))
        lively = facts.changes[rows] > settings["changing"] * (facts.lengths[rows, None] - 1)
        earlier = np.arange(len(rows))[:, None] < len(rows) - count
        share = (lively & earlier).sum(0) / np.maximum(1, earlier.sum(0))
        needed = max(settings["episodes"], settings["share"] * len(rows))
        if dims := _dims((count >= needed) & (share >= settings["earlier"])):
            last = facts.numbers[rows[-int(count[dims].max()) :]]
            evidence = {"dimensions": dims, "episodes": len(last), "changed_before": share[dims].min()}
            message = f"{name!r}{dims} stays at one value in the last {len(last)} episodes"
            yield Defect(name, message, last, scan.whole(last), evidence)


@checks("VAL05")
def outlier(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Alone and far away."""
    for name, facts in _signals(scan):
        far = facts.far
        active = facts.is_active & (facts.spread > 0)
        places: list[tuple[float, int, int, int]] = []
        for dim in _dims(active & facts.is_continuous):
            mine = far[far["dim"] == dim]
            away = np.sort(np.abs(mine["value"] - facts.quantile(0.5)[dim]) / facts.spread[dim])[::-1]
            near = np.abs(facts.sorted[dim] - facts.quantile(0.5)[dim]) / facts.spread[dim]
            usual = near[near <= facts.far_ranges].max(initial=0)  # of those that are not far
            steps = away >= settings["gap"] * np.append(away[1:], usual)
            alone = np.flatnonzero(steps & (away > settings["ranges"]))
            if len(alone) and alone[-1] + 1 <= settings["share"] * facts.num_values / facts.field.num_elements:
                order = np.argsort(-np.abs(mine["value"] - facts.quantile(0.5)[dim]), kind="stable")
                chosen = mine[order[: alone[-1] + 1]]
                places += [(a, dim, one["number"], one["frame"]) for a, one in zip(away.tolist(), chosen, strict=False)]
        peak = np.where(active, 0, np.nan_to_num(np.maximum(np.abs(facts.low), np.abs(facts.high)), posinf=0))
        usual = float(np.maximum(np.abs(facts.low), np.abs(facts.high))[:, active].max(initial=0))
        rare = np.sort(peak[peak > usual].astype(np.float64))[::-1] if usual > 0 else peak[:0, 0]
        steps = rare >= settings["gap"] * np.append(rare[1:], usual)
        alone = np.flatnonzero(steps & (rare > settings["passive"] * usual))
        for row, dim in np.argwhere(peak >= rare[alone[-1]])[:20] if len(alone) else ():
            frame = int(np.argmax(np.abs(scan.read(facts.numbers[row], name)[:, dim])))
            places.append((float(peak[row, dim] / usual), int(dim), int(facts.numbers[row]), frame))
        if places:
            places.sort(key=lambda one: -one[0])
            evidence = {"ranges": places[0][0], "dimensions": sorted({dim for _, dim, _, _ in places})}
            message = f"{len(places)} values of {name!r} lie up to {places[0][0]:,.0f} ranges away from the median"
            frames = [(number, frame, frame + 1) for _, _, number, frame in places]
            yield Defect(name, message, {number for number, _, _ in frames}, frames, evidence)


@checks("VAL06")
def placeholder(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """One exact value again and again, far away from all others."""
    for name, facts in _signals(scan):
        for dim in _dims(facts.is_active & ~facts.is_constant):
            ordered = facts.sorted[dim, np.isfinite(facts.sorted[dim])]
            far = facts.far["value"][facts.far["dim"] == dim]
            ends = ordered[-1:].tolist() + ordered[:1].tolist()
            for value in dict.fromkeys([*ends, *np.unique(far).tolist()[:20]]):
                rest = ordered[ordered != value]
                count = max(len(ordered) - len(rest), int((far == value).sum()))
                total = max(len(ordered), facts.num_rows * (len(far) > 0))
                is_rare = settings["count"] <= count < settings["share"] * total
                if not is_rare or len(rest) < 20 or len(np.unique(rest[:4096])) < 20:
                    continue
                low, middle, high = np.quantile(rest, [0.005, 0.5, 0.995]).tolist()
                known = value in _SENTINELS and max(low - value, value - high) > 2 * (rest[-1] - rest[0]) > 0
                away = abs(value - middle) / max(high - low, 1e-30)
                if known or (facts.is_float and away > settings["ranges"]):
                    numbers = facts.numbers[(facts.low[:, dim] == value) | (facts.high[:, dim] == value)]
                    frames = scan.runs(numbers, name, lambda rows, *at: rows[:, at[0]] == at[1], dim, value)
                    evidence = {"dimension": dim, "value": value, "count": count, "ranges": away}
                    message = f"{name!r}[{dim}] is exactly {value:g} again and again"
                    yield Defect(name, message, numbers, frames, evidence)


@checks("VAL07")
def saturated(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Many actions at an extreme that is not the declared bound."""
    for name in scan.group("action"):
        facts = scan.facts[name]
        dims = np.flatnonzero(facts.is_continuous)
        low = facts.low.min(0)[dims]
        high = facts.high.max(0)[dims]
        values = facts.sorted[dims]
        if not values.size:
            continue
        at_low = (values == low[:, None]).mean(1)
        at_high = (values == high[:, None]).mean(1)
        share = at_low + at_high
        if (share >= settings["share"]).mean() < 0.5 and share.max() <= settings["alone"]:
            continue
        bounds = declared_bounds(scan, name)
        is_declared = False
        if bounds is not None:
            sides = ((low, bounds[0], at_low), (high, bounds[1], at_high))
            reached = [np.isclose(a, b[dims], atol=1e-6) | (at < 0.05) for a, b, at in sides]
            is_declared = bool((reached[0] & reached[1])[share >= settings["share"]].all())
        evidence = {"dimensions": dims.tolist(), "shares": share.tolist(), "declared": is_declared}
        message = f"up to {share.max():.0%} of the values of {name!r} lie at its smallest or largest value"
        yield Defect(name, message, evidence=evidence, severity="info" if is_declared else "")


@checks("VAL08")
def narrowed(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Float32 that holds no more than 16 bits told."""
    for name, facts in _signals(scan):
        if facts.field.dtype != "float32":
            continue
        values = [np.unique(facts.sorted[dim][np.isfinite(facts.sorted[dim])]) for dim in _dims(facts.is_continuous)]
        if sum(map(len, values)) < settings["distinct"]:
            continue
        for kind, bits in (("float16", 10), ("bfloat16", 7)):
            exact = [_is_narrow(one, kind, settings["share"]) and not _is_uniform(one, bits) for one in values]
            if np.mean(exact) > 0.5:
                evidence = {"dtype": kind, "distinct": sum(map(len, values)), "share": np.mean(exact)}
                yield Defect(name, f"the float32 values of {name!r} are all values of {kind}", evidence=evidence)
                break


def _is_narrow(values: Array, kind: str, share: float) -> bool:
    with np.errstate(over="ignore"):
        is_exact = values.astype(np.float16) == values if kind == "float16" else values.view(np.uint32) & 0xFFFF == 0
    return bool(np.mean(is_exact) > share)


def _is_uniform(values: Array, bits: int) -> bool:
    """Integers, or steps of one size: multiples of the resolution that the largest value has."""
    step = 2.0 ** (np.floor(np.log2(np.abs(values).max())) - bits)
    return any(bool(np.mean(values % one == 0) > 0.99) for one in (1.0, step))


@checks("VAL09")
def denormals(scan: Scan, settings: Settings) -> Iterator[Defect]:
    for name, facts in scan.facts.items():
        if facts.field.dtype in ("float32", "float64") and facts.sorted.size:
            size = np.abs(facts.sorted)
            share = float(np.mean((size > 0) & (size < np.finfo(facts.dtype).tiny)))
            if share > settings["share"]:
                yield Defect(name, f"{share:.2%} of {name!r} are subnormal", evidence={"share": share})


@checks("VAL10")
def scale_jumps(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Episodes whose values are ten times those of others, with no episode in between."""
    for name, facts in _signals(scan):
        known = np.flatnonzero(facts.scale > 0)
        if not facts.is_float or len(known) < 8:
            continue
        logs = np.log(facts.scale[known] / np.median(facts.scale[known]))
        off = np.zeros(len(known), bool)
        units = np.log(list(_UNITS))
        for sign in (1, -1):
            far = sign * logs > np.log(settings["ratio"])
            rest = max(0.0, float((sign * logs[~far]).max(initial=0)))
            gap = float((sign * logs[far]).min(initial=np.inf)) - rest
            far &= gap > np.log(settings["gap"])
            shared = _scaled_alike(facts, known, sign, settings["alike"])
            if sign > 0:  # one dimension that is far off all others tells a unit, too
                far &= shared | (gap > np.log(settings["ratio"]))
            else:  # an episode at rest is small as well, but not by the ratio of units
                width = min(0.7, max(0.25, 4.4 * float(np.median(np.abs(logs)))))
                far &= shared & (np.abs(-logs[:, None] - units).min(1) < width)
            off |= far
        if 0 < off.sum() <= len(known) / 2:
            typical = float(np.exp(np.median(np.abs(logs[off]))))
            unit = min(_UNITS, key=lambda one: abs(np.log(one / typical)))
            named = f", as between {_UNITS[unit]}" if abs(np.log(unit / typical)) < 0.3 else ""
            numbers = worst(known[off], np.abs(logs[off]), aligned=True)
            message = f"{name!r} is off by a factor of about {typical:,.1f}{named} in {len(numbers)} trajectories"
            evidence = {"factor": typical, "unit": named[5:]}
            yield Defect(name, message, numbers, scan.whole(numbers), evidence)


def _scaled_alike(facts: Facts, known: Array, sign: int, share: float) -> Array:
    """bool `[k]`: more than a share of the dimensions that change are five times larger, or smaller, than usual."""
    there = np.isin(known, facts.numbers)
    size = np.maximum(np.abs(facts.low), np.abs(facts.high))[np.searchsorted(facts.numbers, known[there])]
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        logs = sign * np.log(size / np.median(size, axis=0))[:, ~facts.is_constant]
    found = np.zeros(len(known), bool)
    found[there] = (logs > np.log(5)).sum(1) > share * logs.shape[1]
    return found


@checks("VAL15")
def out_of_bounds(scan: Scan, settings: Settings) -> Iterator[Defect]:
    names = [name for name in scan.numeric if name.partition("/")[0] in ("observation", "action")]
    bounds = {name: one for name in names if (one := declared_bounds(scan, name)) is not None}
    if not bounds:
        raise Inapplicable("no bounds of spaces are declared in the metadata")
    for name, (low, high) in bounds.items():
        facts = scan.facts[name]
        width = high - low
        with np.errstate(invalid="ignore"):
            slack = settings["share"] * np.where(np.isfinite(width), width, np.maximum(1, np.abs(facts.spread)))
            above = np.where(np.isfinite(high), facts.high - high, 0)
            over = np.fmax(above, np.where(np.isfinite(low), low - facts.low, 0))
        outside = over > slack
        numbers = facts.numbers[outside.any(1)]
        if len(numbers):
            numbers = worst(numbers, over.max(1)[outside.any(1)], aligned=True)
            frames = scan.runs(numbers, name, _outside, low - slack, high + slack)
            message = f"{name!r} leaves its declared space in {len(numbers)} trajectories"
            dims = _dims(outside.any(0))
            evidence = {
                "dimensions": dims,
                "low": low[dims].tolist(),
                "high": high[dims].tolist(),
                "excess": over.max(),
            }
            yield Defect(name, message, numbers, frames, evidence)


def _outside(rows: Array, low: Array, high: Array) -> Any:
    return np.logical_or(rows > high, rows < low).any(1)


def _jumps(rows: Array, dims: list[int], least: float, most: float) -> Any:
    """bool `[T - 1]`: steps of a size between two."""
    steps = np.abs(np.diff(rows[:, dims].astype(np.float64), axis=0))
    return np.logical_and(steps > least, steps < most).any(1)


@checks("VAL14")
def wraps(scan: Scan, settings: Settings) -> Iterator[Defect]:
    for name, facts in _signals(scan):
        with np.errstate(invalid="ignore", over="ignore"):
            span = facts.high.max(0) - facts.low.min(0)
        for turn in _TURNS:
            usual = facts.usual_step(turn / 2)
            is_angle = facts.is_continuous & facts.is_active & (span < 3 * turn) & (turn > 10 * usual)
            hits = (np.abs(facts.step / turn - 1) < settings["share"]) & is_angle
            if dims := _dims(hits.any(0)):
                numbers = facts.numbers[hits.any(1)]
                off = turn * settings["share"]
                evidence = {"dimensions": dims, "turn": turn, "usual_step": usual[dims].max()}
                frames = scan.runs(numbers, name, _jumps, dims, turn - off, turn + off)
                severity = "info" if name in scan.roles["heading"] else ""
                yield Defect(name, f"{name!r}{dims} wraps around by {turn:.4g}", numbers, frames, evidence, severity)


@checks("VAL16")
def drift(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Early and late episodes differ."""
    if scan.num_episodes < 20:
        raise Inapplicable("fewer than 20 episodes")
    for name, facts in _signals(scan):
        if len(facts.numbers) < 20 or name.partition("/")[0] not in ("observation", "action", "privileged_observation"):
            continue
        shift, noise = _halves(facts.mean)
        moved = (np.abs(shift) > settings["deviations"] * noise) & (np.abs(shift) > settings["share"] * facts.spread)
        if dims := _dims(moved & facts.is_continuous & (facts.spread > 0)):
            others = [one.mean * one.lengths[:, None] for one in (scan.facts.get("reward"),) if one is not None]
            others.append(facts.lengths[:, None].astype(np.float64))
            is_curriculum = any((np.abs(a) > 1.5 * b + 1e-9).any() for a, b in map(_halves, others))
            ratio = (np.abs(shift) / np.maximum(noise, 1e-30))[dims].max()
            evidence = {"dimensions": dims, "deviations": ratio}
            message = f"the means of {name!r}{dims} differ between early and late episodes"
            late = facts.numbers[len(facts.numbers) // 2 :]
            yield Defect(name, message, () if is_curriculum else late, (), evidence, "info" if is_curriculum else "")


def _halves(means: Array) -> tuple[Array, Array]:
    """Return how far the later half of rows lies above the earlier one, and the deviation within the halves.

    NaN where all values of a half are not finite.
    """
    early, late = np.array_split(np.ma.masked_invalid(means.astype(np.float64)), 2)
    shift = late.mean(0) - early.mean(0)
    noise = np.ma.sqrt((early.var(0) + late.var(0)) / 2)
    return shift.filled(np.nan), noise.filled(np.nan)


@checks("VAL17")
def overflow(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Integers that jump by the whole range of their dtype."""
    for name, facts in _signals(scan):
        if facts.field.numpy_dtype.kind not in "iu":
            continue
        limits = np.iinfo(facts.field.numpy_dtype)
        size = float(limits.max) - float(limits.min)
        hits = (facts.step > settings["share"] * size) & (facts.step_quantile(0.9) < 0.1 * size)
        if dims := _dims(hits.any(0)):
            numbers = facts.numbers[hits.any(1)]
            frames = scan.runs(numbers, name, _jumps, dims, settings["share"] * size, np.inf)
            evidence = {"dimensions": dims, "jump": facts.step.max(), "range": size}
            yield Defect(name, f"{name!r}{dims} jumps by the range of {facts.field.dtype}", numbers, frames, evidence)


@checks("VAL18")
def narrow_quantiles(scan: Scan, settings: Settings) -> Iterator[Defect]:
    for name in (*scan.group("action"), *scan.group("observation")):
        facts = scan.facts[name]
        low = facts.quantile(0.01)
        high = facts.quantile(0.99)
        is_narrow = high - low < settings["part"] * np.maximum(np.abs(low), np.abs(high))
        if narrow := _dims(is_narrow & ~facts.is_constant):
            pairs = [(float(low[dim]), float(high[dim])) for dim in narrow]
            shown = ", ".join(f"{first:.6g} to {last:.6g}" for first, last in pairs[:4])
            message = f"98 % of the values of {name!r}{narrow} lie within {shown}{' ...' * (len(pairs) > 4)}"
            yield Defect(name, message, evidence={"dimensions": narrow, "quantiles": pairs})
