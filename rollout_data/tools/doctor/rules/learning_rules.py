"""Rules LRN: rewards, success flags, tasks and actions that would mislead a learner."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from ..batched_reading import Array, Batch
from ..field_facts import worst
from ..findings import MAX_FRAMES, Defect, Inapplicable, Settings, checks
from ..scan import Collector, Scan

#: Minimum number of episodes for rules about returns, and about success and termination.
_MIN_EPISODES = 8
#: Maximum number of task names in the evidence of a finding.
_MAX_LISTED = 8


class Rewards(Collector):
    """Collector of sums and counts of the rewards in each episode.

    Attributes:
        is_known: Whether the recording has exactly one reward per frame.
        total: `[E]`, sums of rewards; NaN for episodes that were not read.
        num_nonzero: int64 `[E]`, number of rewards other than 0.
        num_rows: int64 `[E]`, number of frames that were read.
        at_first: bool `[E]`, whether the reward of the first frame is not 0.
        at_last: bool `[E]`, whether the reward of the last frame is not 0.
    """

    def __init__(self, scan: Scan) -> None:
        size = scan.num_episodes
        self.is_known = "reward" in scan.numeric and scan.schema["reward"].num_elements == 1
        self.total = np.full(size, np.nan)
        self.num_nonzero = np.zeros(size, int)
        self.num_rows = np.zeros(size, int)
        self.at_first = np.zeros(size, bool)
        self.at_last = np.zeros(size, bool)

    def add(self, batch: Batch) -> None:
        if not self.is_known or "reward" not in batch.values:
            return
        rewards = batch.values["reward"].reshape(-1).astype(np.float64)
        new_rewards = rewards.copy()
        new_rewards[: batch.overlap] = 0
        starts = batch.offsets[:-1]
        numbers = batch.numbers
        sums = np.add.reduceat(new_rewards, starts)
        self.total[numbers] = np.nan_to_num(self.total[numbers]) + sums
        self.num_nonzero[numbers] += np.add.reduceat((new_rewards != 0).astype(np.int64), starts)
        self.num_rows[numbers] += np.diff(batch.offsets) - batch.overlap
        if batch.starts[0] == 0:
            self.at_first[numbers] = rewards[starts] != 0
        self.at_last[numbers] = rewards[batch.offsets[1:] - 1] != 0


class Successes(Collector):
    """Collector of the first frame with success in each episode.

    Attributes:
        first: int64 `[E]`, first frame whose success flag is true; -1 if there is none.
    """

    def __init__(self, scan: Scan) -> None:
        self._name = next(iter(scan.roles["success"]), "")
        self.first = np.full(scan.num_episodes, -1)

    def add(self, batch: Batch) -> None:
        if self._name not in batch.values:
            return
        rows = np.flatnonzero(batch.values[self._name].reshape(-1) > 0)
        _, first = np.unique(batch.index_of(rows), return_index=True)
        numbers, frames = batch.episode_of(rows[first])
        is_unset = self.first[numbers] < 0
        self.first[numbers] = np.where(is_unset, frames, self.first[numbers])


def _known_rewards(scan: Scan) -> Rewards:
    """Return the collected rewards.

    Raises:
        Inapplicable: The recording does not have exactly one reward per frame.
    """
    rewards = scan.collected(Rewards)
    if not rewards.is_known:
        raise Inapplicable("no rewards, or several for each frame")
    return rewards


@checks("LRN01")
def action_is_state(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Report actions that equal the observation in the same frame."""
    yield from _equal_actions(scan, settings, 0, "the observation of the same frame")


@checks("LRN02")
def action_is_next_state(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Report actions that equal the observation in the next frame."""
    yield from _equal_actions(scan, settings, 1, "the observation of the next frame")


def _equal_actions(scan: Scan, settings: Settings, lag: int, label: str) -> Iterator[Defect]:
    """Report actions that equal an observation of the same dimension, `lag` frames later."""
    for action in scan.group("action"):
        if not scan.facts[action].is_continuous.any():
            continue
        for name in scan.group("observation"):
            if scan.schema[name].num_elements != scan.schema[action].num_elements:
                continue
            share = _share_of_equal_frames(scan, action, name, lag, settings["tolerance"])
            if share > settings["share"]:
                evidence = {"share": share, "observation": name}
                yield Defect(action, f"{action!r} equals {label} ({name!r})", evidence=evidence)


def _share_of_equal_frames(
    scan: Scan,
    action: str,
    observation: str,
    lag: int,
    tolerance: float,
) -> float:
    """Return the fraction of sampled frames with an action that equals a later observation.

    The action is compared with the observation `lag` frames later, in its continuous dimensions.
    `tolerance` is the largest accepted difference, as a fraction of the range of the action.
    """
    facts = scan.facts[action]
    dims = np.flatnonzero(facts.is_continuous)
    limit = tolerance * np.maximum(facts.spread, 1e-30)[dims, None]
    num_equal = 0
    num_rows = 0
    for batch in scan.sample.batches:
        if not batch.values.keys() >= {action, observation}:
            continue
        has_later = np.ones(len(batch), bool)
        has_later[batch.offsets[1:] - 1] = lag == 0
        rows = np.flatnonzero(has_later)
        actions = batch.columns(action)[dims][:, rows]
        observations = batch.columns(observation)[dims][:, rows + lag]
        with np.errstate(invalid="ignore", over="ignore"):
            is_equal = np.abs(actions - observations) <= limit
        num_equal += int(is_equal.all(0).sum())
        num_rows += len(rows)
    return num_equal / max(1, num_rows)


@checks("LRN03")
def reward_zero(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Report rewards that never change."""
    for name in scan.group("reward"):
        facts = scan.facts[name]
        if facts.num_rows >= settings["frames"] and facts.is_constant.all():
            value = float(facts.low[0, 0])
            yield Defect(
                name,
                f"{name!r} is {value:g} in all {facts.num_rows:,} frames",
                evidence={"value": value, "frames": facts.num_rows},
                severity="" if value == 0 else "info",
            )


@checks("LRN04", Rewards)
def reward_late(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Report sparse rewards that are stored in the first frame of the next episode."""
    rewards = _known_rewards(scan)
    count = int(rewards.num_nonzero.sum())
    num_rows = int(rewards.num_rows.sum())
    if count < 4 or count > (1 - settings["zeros"]) * num_rows:
        return
    on_first = rewards.at_first.sum() / count
    on_last = rewards.at_last.sum() / count
    if on_first > settings["first"] and on_last < settings["last"]:
        numbers = np.flatnonzero(rewards.at_first)
        yield Defect(
            "reward",
            f"{on_first:.0%} of the rewards are in first frames",
            numbers,
            [(number, 0, 1) for number in numbers[:MAX_FRAMES].tolist()],
            {"on_first": on_first, "on_last": on_last},
        )


def _success(scan: Scan) -> Array:
    """Return the success of each episode, int64 `[E]`: 1, 0, or -1 if unknown.

    The metadata of the episodes decide. If none of them has an entry for success, an episode is
    successful if any of its frames has the success flag.
    """
    success = scan.columns["success"].astype(np.int64)
    if (success < 0).all() and scan.roles["success"]:
        first = scan.collected(Successes).first
        success = np.full(scan.num_episodes, -1)
        success[scan.examined] = first[scan.examined] >= 0
    if (success < 0).all():
        raise Inapplicable("success is not recorded")
    return success


class _Comparison(NamedTuple):
    """Other evidence of success, to compare with the recorded success.

    A positive sum of rewards, or a termination instead of a truncation, usually means success.

    Attributes:
        label: "reward" or "termination".
        numbers: int64 `[K]`, episodes for which the success and this evidence are known.
        is_positive: bool `[K]`, whether the evidence means success.
    """

    label: str
    numbers: Array
    is_positive: Array


@checks("LRN05", Rewards, Successes)
def success_contradicts(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Report episodes whose success contradicts their sparse reward or their termination."""
    success = _success(scan)
    comparisons = _success_comparisons(scan, success)
    if not comparisons:
        raise Inapplicable("fewer than 8 ended episodes have a success")
    for label, numbers, is_positive in comparisons:
        is_success = success[numbers] == 1
        differs = is_success != is_positive
        share = differs.mean()
        if share < settings["share"] or _have_plain_relation(label, is_success, is_positive):
            continue
        if share > 0.5 and label == "termination":
            # In this task, success means truncation. The episodes that agree are the wrong ones.
            differs = ~differs
        wrong = numbers[differs]
        message = f"success contradicts the {label} in {len(wrong)} trajectories"
        yield Defect(None, message, wrong, evidence={"share": share})
        return


def _have_plain_relation(label: str, is_success: Array, is_positive: Array) -> bool:
    """Return whether success and other evidence differ by convention and not by mistake.

    Rewards differ by convention if they are the opposite of success in nearly all episodes.
    Terminations differ by convention if one of the 4 combinations of success and termination is
    rare. Then the data follow a rule such as "every success terminates".
    """
    if label == "reward":
        return bool(np.mean(is_success != is_positive) > 0.95)
    shares = []
    for success in (True, False):
        for positive in (True, False):
            shares.append(np.mean((is_success == success) & (is_positive == positive)))
    return bool(min(shares) < 0.03)


def _success_comparisons(scan: Scan, success: Array) -> list[_Comparison]:
    """Return the evidence to compare with success: rewards if they are sparse, and terminations.

    Evidence that is known for fewer than 8 episodes is left out.
    """
    ends = scan.columns["ends"]
    has_ended = np.isin(ends, ["terminated", "truncated", "unknown"])
    ended = np.flatnonzero(has_ended & (success >= 0))
    comparisons = []
    rewards = scan.collected(Rewards)
    is_sparse = rewards.num_nonzero.sum() <= 0.2 * rewards.num_rows.sum()
    is_rewarded = rewards.total[ended] > 0
    if rewards.is_known and is_sparse and is_rewarded.any():
        comparisons.append(_Comparison("reward", ended, is_rewarded))
    known = ended[ends[ended] != "unknown"]
    comparisons.append(_Comparison("termination", known, ends[known] == "terminated"))
    return [comparison for comparison in comparisons if len(comparison.numbers) >= _MIN_EPISODES]


@checks("LRN06", Successes)
def after_success(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Report episodes that continue long after success."""
    name = scan.role("success")[0]
    first = scan.collected(Successes).first
    num_after = np.where(first >= 0, scan.lengths - 1 - first, 0)
    limit = np.maximum(settings["frames"], settings["share"] * scan.lengths)
    numbers = worst(np.flatnonzero(num_after > limit), num_after)
    if len(numbers) and len(numbers) >= settings["episodes"]:
        frames = [(number, first[number] + 1, scan.lengths[number]) for number in numbers.tolist()]
        message = f"{len(numbers)} trajectories continue after success"
        evidence = {"frames_after": float(np.median(num_after[numbers]))}
        yield Defect(name, message, numbers, frames, evidence)


@checks("LRN07", Rewards)
def return_outlier(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Report a single return (sum of rewards) that is far from all other returns."""
    rewards = _known_rewards(scan)
    known = np.flatnonzero(np.isfinite(rewards.total))
    if len(known) < _MIN_EPISODES:
        raise Inapplicable("fewer than 8 returns are known")
    returns = rewards.total[known]
    distance = np.abs(returns - np.median(returns))
    deviation = float(np.median(distance))
    if not deviation:
        raise Inapplicable("most returns are equal")
    farthest, second = np.argsort(-distance, kind="stable")[:2]

    # A long episode may have a large return without a defect. So its mean reward must be unusual.
    means = returns / np.maximum(1, rewards.num_rows[known])
    mean_distance = np.abs(means - np.median(means))
    if mean_distance[farthest] <= settings["deviations"] * np.median(mean_distance):
        return
    is_far = distance[farthest] > settings["deviations"] * deviation
    if is_far and distance[farthest] > settings["gap"] * distance[second]:
        number = int(known[farthest])
        yield Defect(
            "reward",
            f"the return of one trajectory is {returns[farthest]:.4g}",
            [number],
            [(number, 0, scan.lengths[number])],
            {"return": returns[farthest], "deviations": distance[farthest] / deviation},
        )


def _declared_tasks(scan: Scan) -> list[object]:
    """Return the tasks that the metadata declare, as texts or as the keys of a mapping."""
    tasks = scan.metadata.get("tasks")
    return list(tasks) if isinstance(tasks, (Mapping, list, tuple)) else []


def _task_of_episodes(scan: Scan) -> list[object]:
    """Return the task of each episode as a text or an index; "" if the task is unknown."""
    texts = scan.columns["task"].tolist()
    if not any(texts) and scan.roles["task_index"]:
        facts = scan.facts[scan.roles["task_index"][0]]
        return [int(value) for value in facts.first[:, 0].tolist()]
    return list(texts)


@checks("LRN08")
def imbalance(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Report recordings of several tasks in which nearly all episodes have the same task."""
    counts = Counter(task for task in _task_of_episodes(scan) if task != "")
    num_tasks = max(len(counts), len(_declared_tasks(scan)))
    if not counts or num_tasks < 2:
        raise Inapplicable("fewer than two tasks")
    num_episodes = sum(counts.values())
    task, count = counts.most_common(1)[0]
    share = count / num_episodes
    if num_episodes >= settings["episodes"] and share >= settings["share"]:
        message = f"{share:.0%} of the episodes have the task {task!r}, one of {num_tasks} tasks"
        yield Defect(None, message, evidence={"task": task, "share": share, "tasks": num_tasks})


@checks("LRN09")
def unknown_task(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Report episodes with an empty task, or with a task that the metadata do not declare."""
    texts = scan.columns["task"].tolist()
    declared = [str(task) for task in _declared_tasks(scan)]
    if any(texts):
        yield from _unknown_texts(scan, texts, declared)
    if declared:
        for name in scan.roles["task_index"]:
            yield from _unknown_indices(scan, name, declared)


def _unknown_texts(scan: Scan, texts: list[str], declared: list[str]) -> Iterator[Defect]:
    unread = {number for number, _ in scan.unreadable}
    blank = [number for number, text in enumerate(texts) if not text.strip()]
    empty = [number for number in blank if number not in unread]
    if empty:
        message = f"{len(empty)} of {len(texts)} trajectories have no task"
        yield Defect(None, message, empty, evidence={"empty": len(empty)})
    if declared and not any(task.isdigit() for task in declared):
        tasks = {text for text in texts if text.strip()} - set(declared)
        strange = [number for number, text in enumerate(texts) if text in tasks]
        if strange:
            message = f"{len(strange)} trajectories have an undeclared task"
            evidence = {
                "tasks": sorted(tasks)[:_MAX_LISTED],
                "declared": sorted(set(declared))[:_MAX_LISTED],
            }
            yield Defect(None, message, strange, evidence=evidence)


def _unknown_indices(scan: Scan, name: str, declared: list[str]) -> Iterator[Defect]:
    """Report episodes with a task index that the metadata do not declare."""
    facts = scan.facts[name]
    indices = set(range(len(declared)))
    if all(task.isdigit() for task in declared):
        indices = {int(task) for task in declared}
    lowest = facts.low[:, 0]
    highest = facts.high[:, 0]
    was_read = lowest <= highest
    is_known = np.isin(lowest, list(indices)) & np.isin(highest, list(indices))
    numbers = facts.numbers[was_read & ~is_known]
    if len(numbers):
        strange = sorted({*lowest.tolist(), *highest.tolist()} - indices)
        message = f"{len(numbers)} trajectories have an undeclared task index"
        evidence = {"indices": strange[:_MAX_LISTED], "declared": len(declared)}
        yield Defect(name, message, numbers, scan.whole(numbers), evidence)


@checks("LRN10")
def frozen_action(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Report episodes in which the action never changes."""
    facts = [scan.facts[name] for name in scan.group("action")]
    if not facts:
        raise Inapplicable("no actions")
    is_still = facts[0].lengths >= settings["frames"]
    for field in facts:
        is_still &= (field.low == field.high).all(1)
    numbers = facts[0].numbers[is_still]
    if len(numbers):
        is_usual = len(numbers) >= settings["usual"] * len(facts[0].numbers)
        yield Defect(
            message=f"{len(numbers)} trajectories have one action from start to end",
            trajectories=numbers,
            frames=scan.whole(numbers),
            evidence={"episodes": len(numbers)},
            severity="info" if is_usual else "",
        )
