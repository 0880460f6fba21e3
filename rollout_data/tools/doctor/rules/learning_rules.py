"""Rules LRN of what would mislead a learner: rewards, success, tasks, actions that are states."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

import numpy as np

from ..batched_reading import Array, Batch
from ..field_facts import worst
from ..findings import Defect, Inapplicable, Settings, checks
from ..scan import Collector, Scan


class Rewards(Collector):
    """The rewards of each episode.

    Attributes:
        total: `[E]`: sums; NaN of episodes that were not read.
        num_nonzero, num_rows: int64 `[E]`.
        at_first, at_last: bool `[E]`: the reward of the first or last frame is not 0.
    """

    def __init__(self, scan: Scan) -> None:
        self.is_known = "reward" in scan.numeric and scan.schema["reward"].num_elements == 1
        size = scan.num_episodes
        self.total = np.full(size, np.nan)
        self.num_nonzero = np.zeros(size, int)
        self.num_rows = np.zeros(size, int)
        self.at_first = np.zeros(size, bool)
        self.at_last = np.zeros(size, bool)

    def add(self, batch: Batch) -> None:
        if not self.is_known or "reward" not in batch.values:
            return
        values = batch.values["reward"].reshape(-1).astype(np.float64)
        counted = values.copy()
        starts = batch.offsets[:-1]
        numbers = batch.numbers
        counted[: batch.overlap] = 0
        self.total[numbers] = np.nan_to_num(self.total[numbers]) + np.add.reduceat(counted, starts)
        self.num_nonzero[numbers] += np.add.reduceat((counted != 0).astype(np.int64), starts)
        self.num_rows[numbers] += np.diff(batch.offsets) - batch.overlap
        if batch.starts[0] == 0:
            self.at_first[numbers] = values[starts] != 0
        self.at_last[numbers] = values[batch.offsets[1:] - 1] != 0


class Successes(Collector):
    """int64 `[E]`: the first frame of each episode that is marked as a success; -1 without any."""

    def __init__(self, scan: Scan) -> None:
        self._names = scan.roles["success"]
        self.first = np.full(scan.num_episodes, -1)

    def add(self, batch: Batch) -> None:
        for name in self._names[:1]:
            rows = np.flatnonzero(batch.values[name].reshape(-1) > 0) if name in batch.values else np.zeros(0, int)
            which, first = np.unique(np.searchsorted(batch.offsets, rows, side="right") - 1, return_index=True)
            numbers = batch.numbers[which]
            frames = rows[first] - batch.offsets[which] + batch.starts[which]
            self.first[numbers] = np.where(self.first[numbers] < 0, frames, self.first[numbers])


def _rewards(scan: Scan) -> Rewards:
    found = scan.collected(Rewards)
    if not found.is_known:
        raise Inapplicable("no rewards, or several a frame")
    return found


@checks("LRN01")
def action_is_state(scan: Scan, settings: Settings) -> Iterator[Defect]:
    yield from _equal(scan, settings, 0, "the observation of the same frame")


@checks("LRN02")
def action_is_next_state(scan: Scan, settings: Settings) -> Iterator[Defect]:
    yield from _equal(scan, settings, 1, "the observation of the next frame")


def _equal(scan: Scan, settings: Settings, later: int, what: str) -> Iterator[Defect]:
    """Compare actions with observations of the same width, a number of frames later."""
    for action in scan.group("action"):
        dims = np.flatnonzero(scan.facts[action].is_continuous)
        for name in scan.group("observation") if len(dims) else ():
            if scan.schema[name].num_elements != scan.schema[action].num_elements:
                continue
            near = settings["tolerance"] * np.maximum(scan.facts[action].spread, 1e-30)[dims, None]
            num_equal = 0
            num_all = 0
            for batch in scan.sample.batches:
                if action in batch.values and name in batch.values:
                    a = batch.columns(action)[dims]
                    o = batch.columns(name)[dims]
                    inner = np.ones(len(batch), bool)
                    inner[batch.offsets[1:] - 1] = not later
                    rows = np.flatnonzero(inner)
                    with np.errstate(invalid="ignore", over="ignore"):
                        num_equal += int((np.abs(a[:, rows] - o[:, rows + later]) <= near).all(0).sum())
                    num_all += len(rows)
            if num_all and num_equal > settings["share"] * num_all:
                evidence = {"share": num_equal / num_all, "observation": name}
                yield Defect(action, f"{action!r} equals {what} ({name!r})", evidence=evidence)


@checks("LRN03")
def reward_zero(scan: Scan, settings: Settings) -> Iterator[Defect]:
    for name in scan.group("reward"):
        facts = scan.facts[name]
        if facts.num_rows >= settings["frames"] and facts.is_constant.all():
            value = float(facts.low[0, 0])
            evidence = {"value": value, "frames": facts.num_rows}
            message = f"{name!r} is {value:g} in all {facts.num_rows:,} frames"
            yield Defect(name, message, evidence=evidence, severity="" if value == 0 else "info")


@checks("LRN04", Rewards)
def reward_late(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Rewards arrive with the next episode."""
    rewards = _rewards(scan)
    count = int(rewards.num_nonzero.sum())
    rows = int(rewards.num_rows.sum())
    if count >= 4 and count <= (1 - settings["zeros"]) * rows:
        first = rewards.at_first.sum() / count
        last = rewards.at_last.sum() / count
        if first > settings["first"] and last < settings["last"]:
            numbers = np.flatnonzero(rewards.at_first)
            frames = [(number, 0, 1) for number in numbers[:20].tolist()]
            message = f"{first:.0%} of the rewards stand in first frames"
            evidence = {"on_first": first, "on_last": last}
            yield Defect("reward", message, numbers, frames, evidence)


def _success(scan: Scan) -> Array:
    """int `[E]`: 1, 0 or -1 if unknown: as noted of the episode, or by its flags."""
    told = scan.columns["success"].astype(np.int64)
    if (told < 0).all() and scan.roles["success"]:
        told = np.full(scan.num_episodes, -1)
        told[scan.examined] = scan.collected(Successes).first[scan.examined] >= 0
    if (told < 0).all():
        raise Inapplicable("nothing tells of success")
    return told


@checks("LRN05", Rewards, Successes)
def success_contradicts(scan: Scan, settings: Settings) -> Iterator[Defect]:
    """Success and termination, or success and sparse reward, disagree without a rule."""
    success = _success(scan)
    ends = scan.columns["ends"]
    rewards = scan.collected(Rewards)
    is_sparse = rewards.is_known and rewards.num_nonzero.sum() <= 0.2 * rewards.num_rows.sum()
    ended = np.flatnonzero(np.isin(ends, ["terminated", "truncated", "unknown"]) & (success >= 0))
    against = []
    if is_sparse and (rewards.total[ended] > 0).any():
        against.append(("reward", ended, rewards.total[ended] > 0))
    told = ended[ends[ended] != "unknown"]
    against.append(("termination", told, ends[told] == "terminated"))
    against = [one for one in against if len(one[1]) >= 8]
    if not against:
        raise Inapplicable("fewer than 8 episodes that ended and tell of success")
    for what, ended, other in against:
        told = success[ended] == 1
        cells = [np.mean((told == a) & (other == b)) for a in (True, False) for b in (True, False)]
        differs = told != other
        # One kind of contradiction that is (nearly) absent is a rule: "all that succeed terminate".
        is_rule = min(cells) < 0.03 if what == "termination" else differs.mean() > 0.95
        if differs.mean() >= settings["share"] and not is_rule:
            numbers = ended[differs] if differs.mean() <= 0.5 or what == "reward" else ended[~differs]
            message = f"success contradicts the {what} in {len(numbers)} trajectories"
            yield Defect(None, message, numbers, (), {"share": differs.mean()}, "", "")
            return


@checks("LRN06", Successes)
def after_success(scan: Scan, settings: Settings) -> Iterator[Defect]:
    scan.role("success")
    first = scan.collected(Successes).first
    rest = np.where(first >= 0, scan.lengths - 1 - first, 0)
    numbers = np.flatnonzero(rest > np.maximum(settings["frames"], settings["share"] * scan.lengths))
    if len(numbers) >= settings["episodes"]:
        numbers = worst(numbers, rest)
        frames = [(number, first[number] + 1, scan.lengths[number]) for number in numbers.tolist()]
        evidence = {"frames_after": float(np.median(rest[numbers]))}
        yield Defect(
            scan.roles["success"][0], f"{len(numbers)} trajectories go on after success", numbers, frames, evidence
        )


@checks("LRN07", Rewards)
def return_outlier(scan: Scan, settings: Settings) -> Iterator[Defect]:
    rewards = _rewards(scan)
    total = rewards.total
    mean = rewards.total / np.maximum(1, rewards.num_rows)
    known = np.flatnonzero(np.isfinite(total))
    away = np.abs(total[known] - np.median(total[known])) if len(known) else total[known]
    if len(known) < 8 or not (spread := float(np.median(away))):
        raise Inapplicable("most returns are equal")
    order = np.argsort(-away, kind="stable")
    # A long episode has a large sum of ordinary rewards.
    by_frame = np.abs(mean[known] - np.median(mean[known]))
    if by_frame[order[0]] <= settings["deviations"] * np.median(by_frame):
        return
    if away[order[0]] > settings["deviations"] * spread and away[order[0]] > settings["gap"] * away[order[1]]:
        number = int(known[order[0]])
        evidence = {"return": total[number], "deviations": away[order[0]] / spread}
        frames = [(number, 0, scan.lengths[number])]
        yield Defect("reward", f"the return of one trajectory is {total[number]:.4g}", [number], frames, evidence)


def _declared_tasks(scan: Scan) -> list[object]:
    """Return what the metadata lists as tasks: texts, or indices where they are keys."""
    tasks = scan.metadata.get("tasks")
    return list(tasks) if isinstance(tasks, (Mapping, list, tuple)) else []


def _tasks(scan: Scan) -> list[object]:
    """Return the task of each episode: its text, or its index; "" where neither is known."""
    texts = scan.columns["task"].tolist()
    if not any(texts) and scan.roles["task_index"]:
        facts = scan.facts[scan.roles["task_index"][0]]
        return [int(value) for value in facts.first[:, 0].tolist()]
    return list(texts)


@checks("LRN08")
def imbalance(scan: Scan, settings: Settings) -> Iterator[Defect]:
    counts = Counter(task for task in _tasks(scan) if task != "")
    num_tasks = max(len(counts), len(_declared_tasks(scan)))
    if not counts or num_tasks < 2:
        raise Inapplicable("no two tasks are declared or found")
    (task, count), total = counts.most_common(1)[0], sum(counts.values())
    if total >= settings["episodes"] and count >= settings["share"] * total:
        evidence = {"task": task, "share": count / total, "tasks": num_tasks}
        yield Defect(
            None, f"{count / total:.0%} of the episodes are of one of {num_tasks} tasks: {task!r}", evidence=evidence
        )


@checks("LRN09")
def unknown_task(scan: Scan, settings: Settings) -> Iterator[Defect]:
    texts = scan.columns["task"].tolist()
    declared = _declared_tasks(scan)
    unread = {number for number, _ in scan.unreadable}
    empty = [number for number, text in enumerate(texts) if not text.strip() and number not in unread]
    if any(texts) and empty:
        yield Defect(None, f"{len(empty)} trajectories have no task, others have", empty, (), {"empty": len(empty)})
    known = {str(one) for one in declared}
    if any(texts) and known and all(not one.isdigit() for one in known):
        strange = [number for number, text in enumerate(texts) if text.strip() and text not in known]
        if strange:
            evidence = {"tasks": sorted({texts[number] for number in strange})[:8], "declared": sorted(known)[:8]}
            yield Defect(None, f"{len(strange)} trajectories have a task that is not declared", strange, (), evidence)
    for name in scan.roles["task_index"] if declared else ():
        facts = scan.facts[name]
        indices = {int(one) for one in known} if all(one.isdigit() for one in known) else set(range(len(declared)))
        lowest = facts.low[:, 0]
        highest = facts.high[:, 0]
        was_read = lowest <= highest
        wrong = facts.numbers[was_read & ~(np.isin(lowest, list(indices)) & np.isin(highest, list(indices)))]
        if len(wrong):
            strange = sorted({*lowest.tolist(), *highest.tolist()} - indices)[:8]
            message = f"{len(wrong)} trajectories have an index of no declared task"
            yield Defect(name, message, wrong, scan.whole(wrong), {"indices": strange, "declared": len(declared)})


@checks("LRN10")
def frozen_action(scan: Scan, settings: Settings) -> Iterator[Defect]:
    names = scan.group("action")
    if not names:
        raise Inapplicable("no actions")
    facts = [scan.facts[name] for name in names]
    still = np.logical_and.reduce([(one.low == one.high).all(1) for one in facts])
    numbers = facts[0].numbers[still & (facts[0].lengths >= settings["frames"])]
    if len(numbers):
        is_usual = len(numbers) >= settings["usual"] * len(facts[0].numbers)
        evidence = {"episodes": len(numbers)}
        message = f"{len(numbers)} trajectories have one action from start to end"
        yield Defect(None, message, numbers, scan.whole(numbers), evidence, "info" if is_usual else "")
