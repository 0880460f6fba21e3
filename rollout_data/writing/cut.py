"""Cutting: from the end marks of staged frames to the fragment table of a block.

One rule: pure functions of integers; work on one byte per frame, then on one number per
fragment, never Python per env or per frame. Bytes of rows are not touched here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..format.header import DROPPED, ENDS, FINAL_OBSERVATION_ONLY, FIRST, FRAGMENT_DTYPE, TENTATIVE

#: Mark of a staged frame that exists; the other marks are the flags of fragments.
PRESENT = 128


@dataclass(frozen=True, eq=False)
class Carry:
    """What one block hands on to the next: the trajectories that go on, by env.

    Attributes:
        trajectory: `[N]` int64, number of the trajectory in progress, -1 for none.
        length: `[N]` int64, its published frames.
        time_ns: `[N]` int64, when the last of them was recorded.
        next_trajectory: Number of the trajectory that starts next.
    """

    trajectory: np.ndarray
    length: np.ndarray
    time_ns: np.ndarray
    next_trajectory: int

    @classmethod
    def start(cls, num_envs: int, next_trajectory: int = 0) -> Carry:
        zeros = np.zeros(num_envs, np.int64)
        return cls(np.full(num_envs, -1, np.int64), zeros, zeros, next_trajectory)


@dataclass(frozen=True, eq=False)
class Marks:
    """What is known of the staged frames besides their bytes.

    Attributes:
        bits: `[N, T]` uint8: `PRESENT` and the flags with which the frame ends its trajectory.
        before: `[N]` uint8: flags that end the carried trajectory before the first frame.
        versions: `[N, T]` int64, or one number for all.
        times_ns: `[T]` int64.
        final_keys: `[k]` int64, `env * T + t` of each row of the final table.
        is_tentative: Mark every fragment as tentative.
    """

    bits: np.ndarray
    before: np.ndarray
    versions: np.ndarray | int
    times_ns: np.ndarray
    final_keys: np.ndarray
    is_tentative: bool = False


def cut(marks: Marks, carry: Carry) -> tuple[np.ndarray, Carry]:
    """Cut staged frames into fragments.

    Returns:
        `[F]` of `FRAGMENT_DTYPE` and the next carry. `row` is `env * T + t`, `final_row` a position
        in `final_keys`. Fragments of dropped trajectories are left out; one that has published
        fragments gets a `DROPPED` one of length 0.
    """
    num_steps = marks.bits.shape[1]
    early, carry = _end_carried(marks, carry)
    first, last = _fragment_bounds(marks)
    if not len(first):
        return early, carry
    env, step = np.divmod(first, num_steps)
    bits = marks.bits.reshape(-1)[last]
    is_head = np.ones(len(env), bool)  # first fragment of its env in this block
    is_head[1:] = env[1:] != env[:-1]
    is_new = np.ones(len(env), bool)
    is_new[1:] = (bits[:-1] & ENDS) > 0
    is_new[is_head] = carry.trajectory[env[is_head]] < 0
    # A group is the part of one trajectory in this block.
    heads = np.flatnonzero(is_head | is_new)
    group = np.cumsum(is_head | is_new) - 1
    group_env, group_is_new = env[heads], is_new[heads]
    numbers = np.where(group_is_new, -1, carry.trajectory[group_env])
    started = np.flatnonzero(group_is_new)
    started = started[np.lexsort((group_env[started], step[heads[started]]))]
    numbers[started] = carry.next_trajectory + np.arange(len(started))
    length = last - first + 1
    before = np.cumsum(length) - length
    start = before - before[heads][group] + np.where(group_is_new, 0, carry.length[group_env])[group]

    table = np.zeros(len(env), FRAGMENT_DTYPE)
    table["trajectory"], table["env"] = numbers[group], env
    table["flags"] = (bits & ENDS) | np.where(is_new, FIRST, 0) | (TENTATIVE if marks.is_tentative else 0)
    table["flags"] |= bits & FINAL_OBSERVATION_ONLY
    table["start"], table["length"], table["row"] = start, length, first
    table["final_row"] = _positions(marks.final_keys, last)
    table["end_time_ns"] = marks.times_ns[last % num_steps]
    versions = marks.versions
    table["policy_version"] = versions.reshape(-1)[first] if isinstance(versions, np.ndarray) else versions
    after = _next_carry(carry, table, carry.next_trajectory + len(started))
    table = _without_dropped(table, group, heads, group_is_new, carry)
    return np.concatenate([early, table]) if len(early) else table, after


def _fragment_bounds(marks: Marks) -> tuple[np.ndarray, np.ndarray]:
    """First and last frame of each fragment, as `env * T + t`, in that order."""
    bits, num_steps = marks.bits.reshape(-1), marks.bits.shape[1]
    present = bits >= PRESENT  # the highest bit
    joined = (bits & (PRESENT | ENDS) == PRESENT)[:-1] & present[1:]  # frame k goes on at k + 1
    joined[num_steps - 1 :: num_steps or 1] = False  # which is another env's
    if isinstance(marks.versions, np.ndarray):
        versions = marks.versions.reshape(-1)
        joined &= versions[1:] == versions[:-1]
    is_first, is_last = present.copy(), present
    is_first[1:] &= ~joined
    is_last[:-1] &= ~joined
    return np.flatnonzero(is_first), np.flatnonzero(is_last)


def _end_carried(marks: Marks, carry: Carry) -> tuple[np.ndarray, Carry]:
    """Fragments of length 0 for trajectories that end without a further frame."""
    env = np.flatnonzero(((marks.before & ENDS) > 0) & (carry.trajectory >= 0))
    table = np.zeros(len(env), FRAGMENT_DTYPE)
    if not len(env):
        return table, carry
    table["trajectory"], table["env"], table["start"] = carry.trajectory[env], env, carry.length[env]
    table["flags"] = (marks.before[env] & ENDS) | (TENTATIVE if marks.is_tentative else 0)
    table["final_row"], table["policy_version"] = -1, -1
    table["end_time_ns"] = carry.time_ns[env]
    trajectory = carry.trajectory.copy()
    trajectory[env] = -1
    return table, Carry(trajectory, carry.length, carry.time_ns, carry.next_trajectory)


def _without_dropped(
    table: np.ndarray, group: np.ndarray, heads: np.ndarray, group_is_new: np.ndarray, carry: Carry
) -> np.ndarray:
    """Leave out the fragments of dropped trajectories; keep a tombstone where others are published."""
    is_dropped = np.bitwise_or.reduceat(table["flags"], heads) & DROPPED > 0
    if not is_dropped.any():
        return table
    keep = ~is_dropped[group]
    tombs = heads[is_dropped & ~group_is_new]
    table = table.copy()
    table["length"][tombs], table["row"][tombs], table["final_row"][tombs] = 0, 0, -1
    table["start"][tombs] = carry.length[table["env"][tombs]]
    table["flags"][tombs] = DROPPED | (table["flags"][tombs] & TENTATIVE)
    keep[tombs] = True
    kept: np.ndarray = table[keep]
    return kept


def _next_carry(carry: Carry, table: np.ndarray, next_trajectory: int) -> Carry:
    """Carry on from the last fragment of each env."""
    is_tail = np.ones(len(table), bool)
    is_tail[:-1] = table["env"][1:] != table["env"][:-1]
    tail = table[is_tail]
    env = tail["env"]
    trajectory, length, time_ns = carry.trajectory.copy(), carry.length.copy(), carry.time_ns.copy()
    trajectory[env] = np.where(tail["flags"] & ENDS > 0, -1, tail["trajectory"])
    length[env] = tail["start"] + tail["length"]
    time_ns[env] = tail["end_time_ns"]
    return Carry(trajectory, length, time_ns, next_trajectory)


def _positions(keys: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Position of each wanted key in `keys`, -1 where it is not."""
    if not len(keys):
        return np.full(len(wanted), -1, np.int64)
    order = np.argsort(keys, kind="stable")
    place = np.minimum(np.searchsorted(keys, wanted, sorter=order), len(keys) - 1)
    found = order[place]
    return np.where(keys[found] == wanted, found, -1)
