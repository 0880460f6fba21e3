"""Rules END: how episodes end."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress

import numpy as np

from ....blocks.block_header import TERMINATED, TRUNCATED
from ..batched_reading import Array
from ..episode_boundaries import Bounds, Jumps, Successors, floats, jumps
from ..findings import Defect, Inapplicable, Settings, checks
from ..scan import Scan

_FLAG = re.compile(r"(dones?|terminals?|terminations?|is_last|is_terminal|truncations?)")


@checks("END01")
def never_ends(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """An env has several open trajectories, or nothing ends at all."""
    table = scan.columns
    is_open = table["ends"] == "open"
    if is_open.all() and scan.num_episodes >= settings["episodes"]:
        envs = set(zip(table["writer"].tolist(), table["env"].tolist(), strict=True))
        has_envs = scan.recording.format == "rollout-data" and len(envs) == scan.num_episodes
        severity = "info" if has_envs else ""
        yield Defect(None, "no trajectory ends", range(scan.num_episodes), evidence={"open": int(is_open.sum())},
                    severity=severity)  # fmt: skip
    elif scan.recording.format == "rollout-data" and (table["env"] >= 0).all():
        number = np.array([int(one.rpartition(":")[2]) for one in table["id"].tolist()])
        order = np.lexsort((number, table["env"], table["writer"]))
        same = [table[name][order[:-1]] == table[name][order[1:]] for name in ("env", "writer")]
        goes_on = same[0] & same[1] & is_open[order[:-1]]
        if goes_on.any():
            message = f"{int(goes_on.sum())} open trajectories are not the last of their env"
            yield Defect(None, message, order[:-1][goes_on])


@checks("END02")
def end_inside(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """A flag of an end before the last frame."""
    for name in scan.numeric:
        last = name.rpartition("/")[2].rpartition(".")[2]
        if not _FLAG.fullmatch(last) or scan.schema[name].num_elements != 1:
            continue
        facts = scan.facts[name]
        inside = facts.mean[:, 0] * facts.lengths - facts.last[:, 0]
        for row in np.flatnonzero(inside > 0.5)[:1000].tolist():
            number = int(facts.numbers[row])
            flags = scan.read(int(facts.numbers[row]), name)[:, 0] != 0
            frames = np.flatnonzero(flags)
            is_success = flags[frames[0] :].all()  # once reached, for the rest of the episode
            message = f"{name!r} is true before the last frame"
            yield Defect(name, message, [number], [(number, frames[0], frames[0] + 1)], {},
                        "warning" if is_success else "")  # fmt: skip


@checks("END03", Jumps)
def two_in_one(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """An episode holds two: much jumps at once, or back into the cloud of first frames."""
    seen = scan.collected(Jumps)
    if seen.num_dims < 8:
        raise Inapplicable("fewer than 8 continuous dimensions")
    if seen.found:
        found = sorted(seen.found, key=lambda one: -one[2])
        frames = [(number, frame, frame + 1) for number, frame, _, _ in found]
        message = f"{len(found)} frames look like the start of another episode"
        evidence = {"share": found[0][2]}
        yield Defect(None, message, [number for number, *_ in found], frames, evidence)


@checks("END04")
def too_short(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Much shorter than the others, with nothing in between."""
    lengths = scan.lengths
    usual = float(np.median(scan.lengths))
    short = lengths <= settings["share"] * usual
    between = (lengths > settings["share"] * usual) & (lengths < settings["gap"] * usual)
    if usual >= 20 and short.any() and short.mean() <= settings["most"] and not between.any():
        numbers = np.flatnonzero(short)
        evidence = {"longest": int(lengths[numbers].max()), "median": usual}
        yield Defect(None, f"{len(numbers)} of {len(lengths)} are far shorter than {usual:g} frames", numbers,
                    [(number, 0, lengths[number]) for number in numbers.tolist()], evidence)  # fmt: skip


@checks("END05")
def duplicate(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Equal observations and actions throughout."""
    names = [*scan.group("observation"), *scan.group("action")]
    facts = [scan.facts[name] for name in names]
    if not facts:
        raise Inapplicable("neither observations nor actions")
    least = settings["frames"] if any(one.is_continuous.any() for one in facts) else 5 * settings["frames"]
    seen: dict[bytes, int] = {}
    twice = list[int]()
    of = list[int]()
    for row, number in enumerate(facts[0].numbers.tolist()):
        if facts[0].lengths[row] >= least:
            key = b"".join(
                np.stack([one.first[row], one.last[row], one.low[row], one.high[row]]).tobytes() for one in facts
            )
            other = seen.setdefault(key + int(facts[0].lengths[row]).to_bytes(8, "little"), number)
            if other != number and len(twice) < 10_000:
                same = (np.array_equal(scan.read(number, one), scan.read(other, one), equal_nan=True) for one in names)
                if scan.lengths[other] == scan.lengths[number] and all(same):
                    twice.append(number)
                    of.append(other)
    if twice:
        yield Defect(None, f"{len(twice)} repeat an earlier one", twice, evidence={"of": of})


@checks("END06")
def two_ends(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Terminated and truncated at once."""
    if scan.files.folder is not None:
        parts = scan.files.parts
        names = scan.files.names(parts["flags"] & (TERMINATED | TRUNCATED) == TERMINATED | TRUNCATED)
        numbers = scan.files.named(names)["trajectories"]
    else:
        infos = ((place, scan.recording.info(place)) for place in range(scan.num_episodes))
        numbers = [place for place, info in infos if info.terminated and info.truncated]
    if numbers:
        env = str(next((scan.metadata[key] for key in ("env", "env_name", "env_id") if scan.metadata.get(key)), ""))
        is_gymnasium = scan.recording.format == "minari" or re.search(r"-v\d+$", env) is not None
        yield Defect(None, "terminated and truncated are both set", numbers,
                    severity="warning" if is_gymnasium else "")  # fmt: skip


@checks("END07")
def one_row_more(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """The last row is the state after the episode."""
    ended = np.flatnonzero((scan.columns["ends"] != "open") & (scan.lengths > 1))  # of one frame nothing would be left
    if len(ended) < settings["episodes"]:
        raise Inapplicable("too few episodes have ended")
    for name in scan.group("action"):
        facts = scan.facts[name]
        rows = np.isin(facts.numbers, ended)
        zero = (facts.last[rows] == 0).all(1)
        if facts.is_continuous.any() and zero.mean() >= settings["share"]:
            inner = [_inner_zeros(batch.columns(name), batch.offsets) for batch in scan.sample.batches
                     if name in batch.values]  # fmt: skip
            elsewhere = sum(one for one, _ in inner) / max(1, sum(count for _, count in inner))
            if elsewhere < 0.01:
                yield Defect(name, f"the last {name!r} is 0", facts.numbers[rows][zero],
                            evidence={"share": float(zero.mean()), "elsewhere": elsewhere})  # fmt: skip
    try:
        bounds = scan.once(Bounds)
    except Inapplicable:  # there is nothing to compare with
        return
    same = (bounds.finals == bounds.last).all(1) & (scan.lengths[bounds.numbers] > 1)
    if len(same) >= settings["episodes"] and same.mean() >= settings["share"]:
        message = "the last observation is the one after it as well"
        yield Defect("observation", message, bounds.numbers[same], evidence={"share": float(same.mean())})


def _inner_zeros(columns: Array, offsets: Array) -> tuple[int, int]:
    """Count rows of zeros, last ones left out, and all rows."""
    zeros = (columns == 0).all(0)
    zeros[offsets[1:] - 1] = False
    return int(zeros.sum()), len(zeros)


def _resets(scan: Scan, settings: Settings) -> Array:
    """Episodes whose final observation is the first one of another; none, if that are too few."""
    bounds = scan.once(Bounds)
    found = [at for at, _ in bounds.resets()]
    far = bounds.jumps(bounds.finals[found], bounds.last[found]) if found else np.zeros(0, bool)
    is_usual = far.sum() >= max(2, settings["resets"] * len(bounds.numbers))
    numbers: Array = bounds.numbers[found][far] if is_usual else bounds.numbers[:0]
    return numbers


@checks("END08")
def final_is_reset(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """The observation after the last is the first one of another episode."""
    numbers = _resets(scan, settings)
    if len(numbers):
        yield Defect(
            "observation",
            f"{len(numbers)} finals are starts of others",
            numbers,
        )


@checks("END09", Successors)
def successor_wrong(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Stored next observations are not the rows that follow."""
    if scan.recording.format == "robomimic":  # finals are the last of the next observations
        with suppress(Inapplicable):
            if len(numbers := _resets(scan, settings)):
                yield Defect("next_obs", f"{len(numbers)} next observations at ends are starts of others", numbers)
    stored = scan.collected(Successors)
    for name, other in stored.pairs.items():
        wrong = stored.wrong[name]
        inner = np.maximum(scan.lengths - 1, 0)
        if wrong.sum() > settings["share"] * inner[scan.examined].sum():
            all_same = bool(stored.same[name] > 0.9 * wrong.sum())
            message = f"{name!r} is not the following {other!r} in {int(wrong.sum()):,} frames"
            message += ", but the current one: it is shifted" * all_same
            yield Defect(name, message, np.flatnonzero(wrong), evidence={"wrong": int(wrong.sum())})
        facts = scan.facts[name]
        first = scan.facts[other].first
        same = (facts.last[:-1] == first[1:]).all(1) & (first[1:] != scan.facts[other].last[:-1]).any(1)
        far = jumps(facts.last[:-1], scan.facts[other].last[:-1], scan.facts[other].step_quantile(0.99))
        if (same & far).sum() >= max(2, 0.5 * (len(first) - 1)):
            message = f"{name!r} at ends is the first {other!r} of the next episode"
            yield Defect(name, message, facts.numbers[:-1][same & far], evidence={"ends": int((same & far).sum())})


@checks("END10")
def reset_rows(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """An episode begins with the final observation of the one before it, and then jumps."""
    bounds = scan.once(Bounds)
    pairs = [(at, other) for at, other in bounds.resets() if scan.lengths[other] > 1]
    if len(pairs) < max(2, settings["share"] * len(bounds.numbers)):
        return
    ats, others = np.array(pairs).T
    near = ~bounds.jumps(bounds.finals[ats], bounds.last[ats])
    names = floats(scan)
    count = np.full(len(others), 2)
    rows = scan.recording.read_many(others, [*names, *scan.group("reward")], others * 0, count)
    which = np.concatenate([scan.facts[name].is_continuous for name in names])
    seen = np.concatenate([np.asarray(rows[name]).reshape(2 * len(others), -1) for name in names], axis=1)[:, which]
    is_row = np.ones(len(others), bool)
    for name in scan.group("reward"):
        is_row &= (rows[name].reshape(2 * len(others), -1)[0::2] == 0).all(1)
    far = bounds.jumps(seen[0::2], seen[1::2]) & near & is_row
    if far.sum() >= max(2, settings["share"] * len(bounds.numbers)):  # then those that start nearby are such rows, too
        numbers = others[is_row]
        message = f"{len(numbers)} begin with a row of the reset before them"
        yield Defect("observation", message, numbers, [(number, 0, 1) for number in numbers])


@checks("END11")
def limit_as_termination(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Nearly all have one length, and are said to terminate."""
    ended = np.isin(scan.columns["ends"], ("terminated", "truncated"))
    values, counts = np.unique(scan.lengths[ended], return_counts=True)
    if ended.sum() < settings["episodes"]:
        raise Inapplicable("too few episodes have ended")
    limit = int(values[np.argmax(counts)])
    share = float(counts.max() / ended.sum())
    at_limit = ended & (scan.lengths == limit)
    if share >= settings["share"] and limit >= 20 and (scan.columns["ends"][at_limit] == "terminated").mean() >= 0.95:
        evidence = {"length": limit, "share": share}
        yield Defect(None, f"{share:.0%} have {limit} frames and are terminated", np.flatnonzero(at_limit),
                    evidence=evidence)  # fmt: skip


@checks("END12")
def finals_missing(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Some of those that ended have no observation after the last one."""
    if scan.files.folder is not None:
        named = scan.files.named(scan.files.names(scan.files.parts["final_row"] >= 0))["trajectories"]
        has = np.isin(np.arange(scan.num_episodes), named)
    else:
        has = np.array([len(scan.recording.info(place).final) > 0 for place in range(scan.num_episodes)], bool)
    lacks = np.flatnonzero((scan.columns["ends"] != "open") & ~has)
    if len(lacks) and has.any():
        yield Defect(None, f"{len(lacks)} have no final observation, {int(has.sum())} have one", lacks)
