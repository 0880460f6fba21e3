"""Rules VAL of single values and dimensions: absolute, unless a comparison says otherwise."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ..facts import Facts, runs_of, worst
from ..finding import Found, Inapplicable, Rule, Settings
from ..reading import Array
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


def not_finite(scan: Scan, settings: Settings) -> Iterator[Found]:
    """VAL01."""
    for name, facts in scan.facts.items():
        numbers = worst(np.flatnonzero(facts.num_bad), facts.num_bad)
        if not len(numbers):
            continue
        count = int(facts.num_bad.sum())
        share, frames = count / facts.num_values, []
        for number in numbers[:20].tolist():
            frames += [(number, *run) for run in runs_of(~np.isfinite(scan.read(number, name)).all(1))]
        is_extra = name.partition("/")[0] not in ("observation", "action", "reward")
        severity = "warning" if is_extra and share < settings["share"] else ""
        message = f"{count:,} numbers of {name!r} are NaN or infinite, in {len(numbers):,} trajectories"
        yield Found(name, message, numbers, frames, {"count": count, "share": share, "threshold": 0}, severity)


def dead_action(scan: Scan, settings: Settings) -> Iterator[Found]:
    """VAL02."""
    for name in scan.group("action"):
        facts = scan.facts[name]
        if (dead := _dims(facts.is_constant)) and facts.is_continuous.any():
            values = facts.low[0, dead].tolist()
            yield Found(name, f"{name!r}{dead} is always {values}", evidence={"dimensions": dead, "values": values})


def constant(scan: Scan, settings: Settings) -> Iterator[Found]:
    """VAL03."""
    for name in scan.group("observation"):
        facts = scan.facts[name]
        if still := _dims(facts.is_constant):
            message = f"{len(still)} of {facts.field.num_elements} dimensions of {name!r} never change"
            yield Found(name, message, evidence={"dimensions": still})


def died(scan: Scan, settings: Settings) -> Iterator[Found]:
    """VAL04: the last episodes are constant at one value, and earlier ones were not."""
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
            evidence = {"dimensions": dims, "episodes": int(count[dims].max()), "changed_before": share[dims].min()}
            frames = [(number, 0, scan.lengths[number]) for number in last]
            yield Found(
                name, f"{name!r}{dims} stays at one value in the last {len(last)} episodes", last, frames, evidence
            )


def outlier(scan: Scan, settings: Settings) -> Iterator[Found]:
    """VAL05: alone and far away."""
    for name, facts in _signals(scan):
        far, active = facts.far, facts.is_active & (facts.spread > 0)
        places: list[tuple[float, int, int, int]] = []
        for dim in _dims(active & facts.is_continuous):
            mine = far[far["dim"] == dim]
            away = np.sort(np.abs(mine["value"] - facts.quantile(0.5)[dim]) / facts.spread[dim])[::-1]
            steps = away >= settings["gap"] * np.append(away[1:], facts.far_ranges)
            alone = np.flatnonzero(steps & (away > settings["ranges"]))
            if len(alone) and alone[-1] + 1 <= settings["share"] * facts.num_values / facts.field.num_elements:
                chosen = mine[np.argsort(-np.abs(mine["value"] - facts.quantile(0.5)[dim]))[: alone[-1] + 1]]
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
            evidence = {
                "ranges": places[0][0],
                "threshold": settings["ranges"],
                "dimensions": sorted({p[1] for p in places}),
            }
            message = f"{len(places)} values of {name!r} lie up to {places[0][0]:,.0f} ranges away from the median"
            frames = [(number, frame, frame + 1) for _, _, number, frame in places]
            yield Found(name, message, {number for number, _, _ in frames}, frames, evidence)


def placeholder(scan: Scan, settings: Settings) -> Iterator[Found]:
    """VAL06: one exact value again and again, far away from all others."""
    for name, facts in _signals(scan):
        for dim in _dims(facts.is_active & ~facts.is_constant):
            ordered = facts.sorted[dim, np.isfinite(facts.sorted[dim])]
            far = facts.far["value"][facts.far["dim"] == dim]
            ends = ordered[-1:].tolist() + ordered[:1].tolist()
            for value in dict.fromkeys([*ends, *np.unique(far).tolist()[:20]]):
                rest = ordered[ordered != value]
                count = max(len(ordered) - len(rest), int((far == value).sum()))
                is_rare = (
                    settings["count"] <= count < settings["share"] * max(len(ordered), facts.num_rows * (len(far) > 0))
                )
                if not is_rare or len(rest) < 20 or len(np.unique(rest[:4096])) < 20:
                    continue
                low, middle, high = np.quantile(rest, [0.005, 0.5, 0.995]).tolist()
                known = value in _SENTINELS and max(low - value, value - high) > 2 * (rest[-1] - rest[0]) > 0
                away = abs(value - middle) / max(high - low, 1e-30)
                if known or (facts.is_float and away > settings["ranges"]):
                    numbers, frames = _places(scan, facts, dim, value)
                    evidence = {"dimension": dim, "value": value, "count": count, "ranges": away}
                    yield Found(
                        name, f"{name!r}[{dim}] is exactly {value:g} again and again", numbers, frames, evidence
                    )


def _places(scan: Scan, facts: Facts, dim: int, value: float) -> tuple[Array, list[tuple[int, int, int]]]:
    """Find the episodes in which a dimension reaches an extreme value, and some frames of them."""
    numbers = facts.numbers[(facts.low[:, dim] == value) | (facts.high[:, dim] == value)]
    frames = [
        (number, *run)
        for number in numbers[:20].tolist()
        for run in runs_of(scan.read(number, facts.name)[:, dim] == value)
    ]
    return numbers, frames


def saturated(scan: Scan, settings: Settings) -> Iterator[Found]:
    """VAL07: many actions at an extreme that is not the declared bound."""
    for name in scan.group("action"):
        facts = scan.facts[name]
        dims = np.flatnonzero(facts.is_continuous)
        low, high = facts.low.min(0)[dims], facts.high.max(0)[dims]
        values = facts.sorted[dims]
        at_low, at_high = (values == low[:, None]).mean(1), (values == high[:, None]).mean(1)
        share = at_low + at_high
        if not len(dims) or not ((share >= settings["share"]).mean() >= 0.5 or share.max() > settings["alone"]):
            continue
        bounds = declared_bounds(scan, name)
        is_declared = False
        if bounds is not None:
            reached = [
                np.isclose(a, b[dims], atol=1e-6) | (at < 0.05)
                for a, b, at in ((low, bounds[0], at_low), (high, bounds[1], at_high))
            ]
            is_declared = bool((reached[0] & reached[1])[share >= settings["share"]].all())
        evidence = {
            "dimensions": dims.tolist(),
            "shares": share.tolist(),
            "threshold": settings["share"],
            "declared": is_declared,
        }
        message = f"up to {share.max():.0%} of the values of {name!r} lie at its smallest or largest value"
        yield Found(name, message, evidence=evidence, severity="info" if is_declared else "")


def narrowed(scan: Scan, settings: Settings) -> Iterator[Found]:
    """VAL08: float32 that holds no more than 16 bits told."""
    for name, facts in _signals(scan):
        if facts.field.dtype != "float32":
            continue
        values = [np.unique(facts.sorted[dim][np.isfinite(facts.sorted[dim])]) for dim in _dims(facts.is_continuous)]
        if sum(map(len, values)) < settings["distinct"]:
            continue
        for kind, bits in (("float16", 10), ("bfloat16", 7)):
            exact = [_is_narrow(one, kind, settings["share"]) and not _is_uniform(one, bits) for one in values]
            if np.mean(exact) > 0.5:
                message = f"the float32 values of {name!r} are all values of {kind}"
                yield Found(
                    name, message, evidence={"dtype": kind, "distinct": sum(map(len, values)), "share": np.mean(exact)}
                )
                break


def _is_narrow(values: Array, kind: str, share: float) -> bool:
    with np.errstate(over="ignore"):
        is_exact = values.astype(np.float16) == values if kind == "float16" else values.view(np.uint32) & 0xFFFF == 0
    return bool(np.mean(is_exact) > share)


def _is_uniform(values: Array, bits: int) -> bool:
    """Integers, or steps of one size: multiples of the resolution that the largest value has."""
    step = 2.0 ** (np.floor(np.log2(np.abs(values).max())) - bits)
    return any(bool(np.mean(values % one == 0) > 0.99) for one in (1.0, step))


def denormals(scan: Scan, settings: Settings) -> Iterator[Found]:
    """VAL09."""
    for name, facts in scan.facts.items():
        if facts.field.dtype in ("float32", "float64"):
            size = np.abs(facts.sorted)
            share = float(np.mean((size > 0) & (size < np.finfo(facts.dtype).tiny)))
            if share > settings["share"]:
                yield Found(
                    name,
                    f"{share:.2%} of {name!r} are subnormal",
                    evidence={"share": share, "threshold": settings["share"]},
                )


def scale_jumps(scan: Scan, settings: Settings) -> Iterator[Found]:
    """VAL10: an episode whose values are ten times those of others."""
    for name, facts in _signals(scan):
        known = np.flatnonzero(facts.scale > 0)
        if not facts.is_float or len(known) < 8:
            continue
        ratio = facts.scale[known] / np.median(facts.scale[known])
        units = np.array(list(_UNITS))
        near = np.abs(np.log(np.maximum(ratio, 1 / ratio)[:, None] / units)).min(1)
        off = (ratio > settings["ratio"]) | ((ratio < 1 / settings["ratio"]) & (near < 0.25))
        if 0 < off.sum() <= len(known) / 2:
            typical = float(np.exp(np.median(np.abs(np.log(ratio[off])))))
            unit = min(_UNITS, key=lambda one: abs(np.log(one / typical)))
            named = f", as between {_UNITS[unit]}" if abs(np.log(unit / typical)) < 0.3 else ""
            numbers = worst(known[off], np.abs(np.log(ratio[off])), aligned=True)
            frames = [(number, 0, scan.lengths[number]) for number in numbers.tolist()]
            message = f"{name!r} is off by a factor of about {typical:,.1f}{named} in {len(numbers)} trajectories"
            yield Found(
                name, message, numbers, frames, {"factor": typical, "threshold": settings["ratio"], "unit": named[5:]}
            )


def declared_bounds(scan: Scan, name: str) -> tuple[Array, Array] | None:
    """Give the bounds of the declared space of a field, each `[D]`; None if there is none."""
    metadata, group = scan.metadata, name.partition("/")[0]
    spaces: Any = metadata.get("spaces") if isinstance(metadata.get("spaces"), Mapping) else {}
    told = [metadata.get(f"{name}_space"), spaces.get(name), metadata.get(f"{group}_space"), spaces.get(group)]
    for space in told:
        bounds = _box(space, name.split("/")[1:], scan.schema[name].num_elements)
        if bounds is not None:
            return bounds
    return None


def _box(space: Any, path: list[str], size: int) -> tuple[Array, Array] | None:
    if isinstance(space, str):
        try:
            space = json.loads(space)
        except ValueError:
            return None
    if not isinstance(space, Mapping):
        return None
    if not {"low", "high"} <= space.keys():
        below = space.get("subspaces", space.get("spaces", space))
        return _box(below.get(path[0]), path[1:], size) if path and isinstance(below, Mapping) else None
    try:
        low, high = (
            np.broadcast_to(np.asarray(space[end], np.float64).reshape(-1), (size,)) for end in ("low", "high")
        )
        return low, high
    except (TypeError, ValueError):
        return None


def out_of_bounds(scan: Scan, settings: Settings) -> Iterator[Found]:
    """VAL15."""
    names = [name for name in scan.numeric if name.partition("/")[0] in ("observation", "action")]
    bounds = {name: one for name in names if (one := declared_bounds(scan, name)) is not None}
    if not bounds:
        raise Inapplicable("no bounds of spaces are declared in the metadata")
    for name, (low, high) in bounds.items():
        facts, width = scan.facts[name], high - low
        with np.errstate(invalid="ignore"):
            slack = settings["share"] * np.where(np.isfinite(width), width, np.maximum(1, np.abs(facts.spread)))
            over = np.fmax(
                np.where(np.isfinite(high), facts.high - high, 0), np.where(np.isfinite(low), low - facts.low, 0)
            )
        outside = over > slack
        numbers = facts.numbers[outside.any(1)]
        if len(numbers):
            frames = []
            for number in worst(numbers, over.max(1)[outside.any(1)], aligned=True)[:20].tolist():
                values = scan.read(number, name)
                frames += [(number, *run) for run in runs_of(((values > high + slack) | (values < low - slack)).any(1))]
            message = f"{name!r} leaves its declared space in {len(numbers)} trajectories"
            evidence = {"dimensions": _dims(outside.any(0)), "excess": over.max(), "threshold": settings["share"]}
            yield Found(name, message, numbers, frames, evidence)


def wraps(scan: Scan, settings: Settings) -> Iterator[Found]:
    """VAL14: steps of a whole turn."""
    for name, facts in _signals(scan):
        with np.errstate(invalid="ignore", over="ignore"):
            span = facts.high.max(0) - facts.low.min(0)
        for turn in _TURNS:
            usual = facts.usual_step(turn / 2)
            is_angle = facts.is_continuous & facts.is_active & (span < 3 * turn) & (turn > 10 * usual)
            hits = (np.abs(facts.step / turn - 1) < settings["share"]) & is_angle
            if hits.any():
                numbers, dims = facts.numbers[hits.any(1)], _dims(hits.any(0))
                frames = []
                for number in numbers[:20].tolist():
                    steps = np.abs(np.diff(scan.read(number, name)[:, dims].astype(np.float64), axis=0))
                    frames += [
                        (number, row, row + 2)
                        for row in np.flatnonzero((np.abs(steps / turn - 1) < 0.03).any(1)).tolist()
                    ]
                evidence = {"dimensions": dims, "turn": turn, "usual_step": usual[dims].max()}
                severity = "info" if name in scan.roles["heading"] else ""
                yield Found(name, f"{name!r}{dims} wraps around by {turn:.4g}", numbers, frames, evidence, severity)


def drift(scan: Scan, settings: Settings) -> Iterator[Found]:
    """VAL16: early and late episodes differ."""
    if scan.num_episodes < 20:
        raise Inapplicable("fewer than 20 episodes")
    for name, facts in _signals(scan):
        if len(facts.numbers) < 20 or name.partition("/")[0] not in ("observation", "action", "privileged_observation"):
            continue
        shift, noise = _halves(facts.mean)
        moved = (np.abs(shift) > settings["deviations"] * noise) & (np.abs(shift) > settings["share"] * facts.spread)
        if dims := _dims(moved & facts.is_continuous & (facts.spread > 0)):
            others: list[Array] = [facts.lengths[:, None].astype(np.float64)]
            others += (
                [scan.facts["reward"].mean * scan.facts["reward"].lengths[:, None]] if "reward" in scan.facts else []
            )
            is_curriculum = any((np.abs(a) > 1.5 * b + 1e-9).any() for a, b in map(_halves, others))
            ratio = (np.abs(shift) / np.maximum(noise, 1e-30))[dims].max()
            evidence = {"dimensions": dims, "deviations": ratio, "threshold": settings["deviations"]}
            message = f"the means of {name!r}{dims} differ between early and late episodes"
            late = facts.numbers[len(facts.numbers) // 2 :]
            yield Found(name, message, () if is_curriculum else late, (), evidence, "info" if is_curriculum else "")


def _halves(means: Array) -> tuple[Array, Array]:
    """Give how far the later half of rows lies above the earlier one, and the deviation within the halves.

    NaN where all values of a half are not finite.
    """
    early, late = np.array_split(np.ma.masked_invalid(means.astype(np.float64)), 2)
    shift, noise = late.mean(0) - early.mean(0), np.ma.sqrt((early.var(0) + late.var(0)) / 2)
    return shift.filled(np.nan), noise.filled(np.nan)


def overflow(scan: Scan, settings: Settings) -> Iterator[Found]:
    """VAL17: integers that jump by the whole range of their dtype."""
    for name, facts in _signals(scan):
        if facts.field.numpy_dtype.kind not in "iu":
            continue
        limits = np.iinfo(facts.field.numpy_dtype)
        size = float(limits.max) - float(limits.min)
        hits = (facts.step > settings["share"] * size) & (facts.step_quantile(0.9) < 0.1 * size)
        if hits.any():
            numbers, dims, frames = facts.numbers[hits.any(1)], _dims(hits.any(0)), []
            for number in numbers[:20].tolist():
                steps = np.abs(np.diff(scan.read(number, name)[:, dims].astype(np.float64), axis=0))
                frames += [
                    (number, row, row + 2) for row in np.flatnonzero((steps > settings["share"] * size).any(1)).tolist()
                ]
            evidence = {"dimensions": dims, "jump": facts.step.max(), "range": size}
            yield Found(name, f"{name!r}{dims} jumps by the range of {facts.field.dtype}", numbers, frames, evidence)


# fmt: off
_MASK = "leave out the trajectories, or mask the values"
VALUES: tuple[Rule, ...] = (
    Rule("VAL01", "not finite", "values", "error", "D", "K", "values are NaN or infinite", _MASK,
         not_finite, {"share": 0.001}, absolute=True),
    Rule("VAL02", "dead action", "values", "warning", "D", "-", "a dimension of a continuous action never changes",
         "drop it, or set its standard deviation to 1: normalization divides by 0", dead_action, absolute=True),
    Rule("VAL03", "constant", "values", "info", "D", "-", "a dimension of an observation never changes",
         "drop it, or set its standard deviation to 1", constant, absolute=True),
    Rule("VAL04", "died", "values", "warning", "D", "K",
         "a dimension changed in earlier episodes, and no more in the last",
         "look at the sensor and its cable; leave out the episodes since then", died,
         {"episodes": 3, "share": 0.1, "earlier": 0.9, "changing": 0.5}, compares=True, absolute=True),
    Rule("VAL05", "outlier", "values", "warning", "D", "K", "single values lie far away from all others", _MASK,
         outlier, {"ranges": 50, "gap": 10, "passive": 100, "share": 0.01}, absolute=True),
    Rule("VAL06", "placeholder", "values", "warning", "D", "K", "one exact value far away stands for missing ones",
         "mask the value before computing statistics", placeholder, {"count": 3, "share": 0.2, "ranges": 20},
         absolute=True),
    Rule("VAL07", "saturated", "values", "warning", "D", "-",
         "many actions lie at an extreme that is no declared bound",
         "declare the bound in the metadata, or look for clipping", saturated, {"share": 0.2, "alone": 0.6},
         absolute=True),
    Rule("VAL08", "narrowed", "values", "warning", "D", "-", "float32 values have the precision of 16 bits",
         "look for a conversion upstream; declare float16 if it is meant", narrowed,
         {"distinct": 300, "share": 0.999}, absolute=True),
    Rule("VAL09", "denormals", "values", "info", "D", "S", "many values are subnormal, which makes arithmetic slow",
         "flush them to 0", denormals, {"share": 0.0001}, absolute=True),
    Rule("VAL10", "scale jumps", "values", "warning", "D", "N", "some episodes have another scale than the others",
         "convert them once the unit is confirmed", scale_jumps, {"ratio": 10}, compares=True, absolute=True),
    Rule("VAL14", "wraps", "values", "warning", "D", "N", "an angle jumps by a whole turn",
         "unwrap it, or use its sine and cosine", wraps, {"share": 0.03}, absolute=True),
    Rule("VAL15", "out of bounds", "values", "warning", "D", "-", "values lie outside the declared space",
         "clip them, or correct the declaration", out_of_bounds, {"share": 1e-5}, absolute=True),
    Rule("VAL16", "drift", "values", "warning", "D", "-", "the means of early and late episodes differ",
         "ask whether sensors were recalibrated or columns swapped", drift,
         {"deviations": 3, "share": 0.05}, compares=True, absolute=True),
    Rule("VAL17", "integers overflow", "values", "warning", "D", "N", "integers jump by the range of their dtype",
         "unwrap them into a wider dtype", overflow, {"share": 0.9}, absolute=True),
)
# fmt: on
