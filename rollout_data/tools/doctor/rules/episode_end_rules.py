"""Rules END: defects at the ends of episodes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress

import numpy as np

from ....blocks.block_header import FORMAT_NAME, TERMINATED, TRUNCATED
from ..batched_reading import Array
from ..episode_boundaries import (
    MIN_JUMP_DIMS,
    BoundaryRows,
    Jumps,
    Successors,
    float_observations,
    jumps,
)
from ..field_facts import Facts
from ..findings import Defect, Inapplicable, Settings, checks
from ..scan import Scan

_FLAG = re.compile(r"(dones?|terminals?|terminations?|is_last|is_terminal|truncations?)")
#: Maximum number of episodes whose end flags are read a second time.
_MAX_FLAGGED = 1000
#: Maximum number of duplicate episodes that are reported.
_MAX_DUPLICATES = 10_000


@checks("END01")
def never_ends(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Report a recording in which no trajectory ends, and open trajectories that should have ended.

    A trajectory is open if its recording stopped before it ended. In block files, only the last
    trajectory of an environment may be open, because the next one starts after an end.
    """
    table = scan.columns
    is_open = table["ends"] == "open"
    is_ours = scan.recording.format == FORMAT_NAME
    if is_open.all() and scan.num_episodes >= settings["episodes"]:
        envs = set(zip(table["writer"].tolist(), table["env"].tolist(), strict=True))
        is_one_per_env = is_ours and len(envs) == scan.num_episodes
        yield Defect(
            message="no trajectory ends",
            trajectories=range(scan.num_episodes),
            evidence={"open": int(is_open.sum())},
            severity="info" if is_one_per_env else "",
        )
    elif is_ours and (table["env"] >= 0).all():
        trajectory = np.array([int(name.rpartition(":")[2]) for name in table["id"].tolist()])
        order = np.lexsort((trajectory, table["env"], table["writer"]))
        env = table["env"][order]
        writer = table["writer"][order]
        has_successor = (env[:-1] == env[1:]) & (writer[:-1] == writer[1:])
        is_wrong = has_successor & is_open[order[:-1]]
        if is_wrong.any():
            yield Defect(
                message=f"{int(is_wrong.sum())} open trajectories are not the last ones of their "
                "environment",
                trajectories=order[:-1][is_wrong],
            )


@checks("END02")
def end_inside(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Report end flags, such as `done`, that are true before the last frame of an episode."""
    for name in scan.numeric:
        last_part = name.rpartition("/")[2].rpartition(".")[2]
        if not _FLAG.fullmatch(last_part) or scan.schema[name].num_elements != 1:
            continue
        facts = scan.facts[name]
        num_inside = facts.mean[:, 0] * facts.lengths - facts.last[:, 0]
        for row in np.flatnonzero(num_inside > 0.5)[:_MAX_FLAGGED].tolist():
            number = int(facts.numbers[row])
            is_set = scan.read(number, name)[:, 0] != 0
            frame = int(np.argmax(is_set))
            # A flag that stays true until the end may mean success, so it is only a warning.
            is_success = is_set[frame:].all()
            yield Defect(
                name,
                f"{name!r} is true before the last frame",
                [number],
                [(number, frame, frame + 1)],
                severity="warning" if is_success else "",
            )


@checks("END03", Jumps)
def two_in_one(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Report frames inside an episode that look like the start of another episode."""
    collected = scan.collected(Jumps)
    if collected.num_dims < MIN_JUMP_DIMS:
        raise Inapplicable("fewer than 8 continuous dimensions")
    if collected.jumps:
        ordered = sorted(collected.jumps, key=lambda jump: -jump.share)
        yield Defect(
            message=f"{len(ordered)} frames look like the start of another episode",
            trajectories=[jump.number for jump in ordered],
            frames=[(jump.number, jump.frame, jump.frame + 1) for jump in ordered],
            evidence={"share": ordered[0].share},
        )


@checks("END04")
def too_short(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Report episodes that are far shorter than all others, with no lengths in between."""
    lengths = scan.lengths
    median = float(np.median(lengths))
    is_short = lengths <= settings["share"] * median
    is_between = ~is_short & (lengths < settings["gap"] * median)
    if median < 20 or not is_short.any() or is_short.mean() > settings["most"]:
        return
    if not is_between.any():
        numbers = np.flatnonzero(is_short)
        yield Defect(
            message=f"{len(numbers)} of {len(lengths)} episodes are far shorter than {median:g} frames",
            trajectories=numbers,
            frames=[(number, 0, lengths[number]) for number in numbers.tolist()],
            evidence={"longest": int(lengths[numbers].max()), "median": median},
        )


@checks("END05")
def duplicate(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Report episodes whose observations and actions equal those of an earlier episode."""
    names = [*scan.group("observation"), *scan.group("action")]
    facts = [scan.facts[name] for name in names]
    if not facts:
        raise Inapplicable("neither observations nor actions")
    is_discrete = not any(field.is_continuous.any() for field in facts)
    # Episodes with discrete values may be equal by chance if they are short.
    min_frames = settings["frames"] * (5 if is_discrete else 1)

    first_with: dict[bytes, int] = {}
    duplicates: list[int] = []
    originals: list[int] = []
    for row, number in enumerate(facts[0].numbers.tolist()):
        if facts[0].lengths[row] < min_frames or len(duplicates) >= _MAX_DUPLICATES:
            continue
        original = first_with.setdefault(_fingerprint(facts, row), number)
        if original != number and _are_equal(scan, names, number, original):
            duplicates.append(number)
            originals.append(original)
    if duplicates:
        message = f"{len(duplicates)} episodes repeat an earlier episode"
        yield Defect(None, message, duplicates, evidence={"of": originals})


def _fingerprint(facts: list[Facts], row: int) -> bytes:
    """Return bytes that are equal for equal episodes, and rarely equal for different episodes.

    They consist of the length, and of the first row, last row, minimum and maximum of each field.
    """
    length = int(facts[0].lengths[row]).to_bytes(8, "little")
    rows: list[Array] = []
    for field in facts:
        rows += [field.first[row], field.last[row], field.low[row], field.high[row]]
    return b"".join(values.tobytes() for values in rows) + length


def _are_equal(scan: Scan, names: list[str], number: int, other: int) -> bool:
    """Return whether two episodes have the same values in the fields `names`."""
    if scan.lengths[number] != scan.lengths[other]:
        return False
    return all(_have_equal_field(scan, name, number, other) for name in names)


def _have_equal_field(scan: Scan, name: str, number: int, other: int) -> bool:
    return np.array_equal(scan.read(number, name), scan.read(other, name), equal_nan=True)


@checks("END06")
def two_ends(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Report episodes that are both terminated and truncated."""
    if scan.files.folder is not None:
        both = TERMINATED | TRUNCATED
        is_both = scan.files.parts["flags"] & both == both
        numbers = scan.files.located(scan.files.names(is_both))["trajectories"]
    else:
        numbers = []
        for number in range(scan.num_episodes):
            info = scan.recording.info(number)
            if info.terminated and info.truncated:
                numbers.append(number)
    if numbers:
        yield Defect(
            message="terminated and truncated are both set",
            trajectories=numbers,
            severity="warning" if _is_gymnasium(scan) else "",
        )


def _is_gymnasium(scan: Scan) -> bool:
    """Return whether the data come from gymnasium, which may set both end flags of a step."""
    if scan.recording.format == "minari":
        return True
    names = [scan.metadata.get(key) for key in ("env", "env_name", "env_id")]
    name = next((str(name) for name in names if name), "")
    return re.search(r"-v\d+$", name) is not None


@checks("END07")
def one_row_more(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Report episodes whose last row is the final observation, not a step with an action."""
    # `repair` removes the last row, so an episode of one frame would become empty.
    is_candidate = (scan.columns["ends"] != "open") & (scan.lengths > 1)
    ended = np.flatnonzero(is_candidate)
    if len(ended) < settings["episodes"]:
        raise Inapplicable("too few episodes have ended")
    for name in scan.group("action"):
        facts = scan.facts[name]
        rows = np.isin(facts.numbers, ended)
        is_zero = (facts.last[rows] == 0).all(1)
        share = float(is_zero.mean())
        if not facts.is_continuous.any() or share < settings["share"]:
            continue
        elsewhere = _share_of_inner_zeros(scan, name)
        if elsewhere < 0.01:
            yield Defect(
                name,
                f"the last {name!r} is 0",
                facts.numbers[rows][is_zero],
                evidence={"share": share, "elsewhere": elsewhere},
            )
    try:
        boundaries = scan.computed(BoundaryRows)
    except Inapplicable:  # The recording has no final observations to compare.
        return
    is_equal = (boundaries.finals == boundaries.last).all(1)
    is_equal &= scan.lengths[boundaries.numbers] > 1
    if len(is_equal) >= settings["episodes"] and is_equal.mean() >= settings["share"]:
        yield Defect(
            "observation",
            "the last observation equals the final observation",
            boundaries.numbers[is_equal],
            evidence={"share": float(is_equal.mean())},
        )


def _share_of_inner_zeros(scan: Scan, name: str) -> float:
    """Return the fraction of sampled rows that are 0 before the last row of their episode."""
    num_zeros = 0
    num_rows = 0
    for batch in scan.sample.batches:
        if name in batch.values:
            is_zero = (batch.columns(name) == 0).all(0)
            is_zero[batch.offsets[1:] - 1] = False
            num_zeros += int(is_zero.sum())
            num_rows += len(is_zero)
    return num_zeros / max(1, num_rows)


def _with_reset_as_final(scan: Scan, settings: Settings) -> Array:
    """Return the episodes whose final observation is the first observation of another episode.

    Such an observation probably was recorded after a reset. If only few episodes have one, it may
    be equal by chance. So the result is empty for fewer than 2 episodes, or for less than the
    fraction `settings["resets"]` of the episodes with a final observation.
    """
    boundaries = scan.computed(BoundaryRows)
    rows = [row for row, _ in boundaries.resets()]
    is_jump = np.zeros(0, bool)
    if rows:
        is_jump = boundaries.jumps(boundaries.finals[rows], boundaries.last[rows])
    numbers: Array = boundaries.numbers[rows][is_jump]
    if len(numbers) < max(2, settings["resets"] * len(boundaries.numbers)):
        return numbers[:0]
    return numbers


@checks("END08")
def final_is_reset(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Report final observations that equal the first observation of another episode."""
    numbers = _with_reset_as_final(scan, settings)
    if len(numbers):
        message = f"{len(numbers)} final observations start other episodes"
        yield Defect("observation", message, numbers)


@checks("END09", Successors)
def successor_wrong(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Report stored next observations that differ from the observations of the following rows."""
    if scan.recording.format == "robomimic":
        # The reader of robomimic takes final observations from the last `next_obs`.
        with suppress(Inapplicable):
            numbers = _with_reset_as_final(scan, settings)
            if len(numbers):
                message = f"{len(numbers)} next observations at ends start other episodes"
                yield Defect("next_obs", message, numbers)
    successors = scan.collected(Successors)
    for name, observation in successors.pairs.items():
        num_wrong = int(successors.wrong[name].sum())
        num_inner = np.maximum(scan.lengths - 1, 0)[scan.examined].sum()
        if num_wrong > settings["share"] * num_inner:
            message = f"{name!r} differs from {observation!r} of the following row in "
            message += f"{num_wrong:,} frames"
            if successors.same[name] > 0.9 * num_wrong:
                message += "; it equals that of the same row, so it is shifted by one row"
            yield Defect(
                name,
                message,
                np.flatnonzero(successors.wrong[name]),
                evidence={"wrong": num_wrong},
            )
        yield from _next_is_reset(scan, name, observation)


def _next_is_reset(scan: Scan, name: str, observation: str) -> Iterator[Defect]:
    """Report episodes whose last stored next observation is the first row of the next episode.

    `name` is the field of next observations, and `observation` the field of observations.
    """
    stored = scan.facts[name].last[:-1]
    first = scan.facts[observation].first[1:]
    last = scan.facts[observation].last[:-1]
    is_reset = (stored == first).all(1) & (first != last).any(1)
    is_reset &= jumps(stored, last, scan.facts[observation].step_quantile(0.99))
    if is_reset.sum() >= max(2, 0.5 * len(first)):
        yield Defect(
            name,
            f"{name!r} at ends is the first {observation!r} of the next episode",
            scan.facts[name].numbers[:-1][is_reset],
            evidence={"ends": int(is_reset.sum())},
        )


@checks("END10")
def reset_rows(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Report episodes whose first row is the final observation of the previous episode.

    Vectorized environments with autoreset produce such rows if they reset in the step after an end.
    """
    boundaries = scan.computed(BoundaryRows)
    min_count = max(2, settings["share"] * len(boundaries.numbers))
    pairs = [pair for pair in boundaries.resets() if scan.lengths[pair[1]] > 1]
    if len(pairs) < min_count:
        return
    final_rows, numbers = np.array(pairs).T
    is_near = ~boundaries.jumps(boundaries.finals[final_rows], boundaries.last[final_rows])

    # Read two rows of each episode, to test whether the observation jumps after the first row.
    names = float_observations(scan)
    rewards = scan.group("reward")
    starts = np.zeros(len(numbers), np.int64)
    rows = scan.recording.read_many(numbers, [*names, *rewards], starts, starts + 2)
    dims = np.concatenate([scan.facts[name].is_continuous for name in names])
    flat = [np.asarray(rows[name]).reshape(2 * len(numbers), -1) for name in names]
    observations = np.concatenate(flat, axis=1)[:, dims]
    is_unrewarded = np.ones(len(numbers), bool)
    for name in rewards:
        is_unrewarded &= (rows[name].reshape(2 * len(numbers), -1)[0::2] == 0).all(1)

    is_jump = boundaries.jumps(observations[0::2], observations[1::2])
    if (is_jump & is_near & is_unrewarded).sum() >= min_count:
        # A reset row may be so close to the second row that there is no jump. So report all
        # candidates if there is a jump in enough of them.
        chosen = numbers[is_unrewarded]
        yield Defect(
            "observation",
            f"{len(chosen)} episodes begin with the reset row of the previous episode",
            chosen,
            [(number, 0, 1) for number in chosen],
        )


@checks("END11")
def limit_as_termination(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Report terminations that probably are a time limit: nearly all episodes are equally long."""
    ends = scan.columns["ends"]
    has_ended = np.isin(ends, ("terminated", "truncated"))
    if has_ended.sum() < settings["episodes"]:
        raise Inapplicable("too few episodes have ended")
    lengths, counts = np.unique(scan.lengths[has_ended], return_counts=True)
    limit = int(lengths[np.argmax(counts)])
    share = float(counts.max() / has_ended.sum())
    is_at_limit = has_ended & (scan.lengths == limit)
    share_terminated = (ends[is_at_limit] == "terminated").mean()
    if share >= settings["share"] and limit >= 20 and share_terminated >= 0.95:
        yield Defect(
            message=f"{share:.0%} of the ended episodes have {limit} frames and are terminated",
            trajectories=np.flatnonzero(is_at_limit),
            evidence={"length": limit, "share": share},
        )


@checks("END12")
def finals_missing(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Report ended episodes without a final observation, if other episodes have one."""
    has_final = np.zeros(scan.num_episodes, bool)
    if scan.files.folder is not None:
        names = scan.files.names(scan.files.parts["final_row"] >= 0)
        has_final[scan.files.located(names)["trajectories"]] = True
    else:
        for number in range(scan.num_episodes):
            has_final[number] = len(scan.recording.info(number).final) > 0
    lacking = np.flatnonzero((scan.columns["ends"] != "open") & ~has_final)
    if len(lacking) and has_final.any():
        num_final = int(has_final.sum())
        message = f"{len(lacking)} ended episodes have no final observation, {num_final} have it"
        yield Defect(None, message, lacking)
