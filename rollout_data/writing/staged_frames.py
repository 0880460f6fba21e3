"""The frames of a block while it is being filled, the fragments and rows that are made of them, and counts.

One rule: a step is copied once, in the order in which it came, which keeps the caller least; the rows of a trajectory
are brought together when the block is written, by the thread that writes it. Fragments follow from integers alone:
one byte per frame, then one number per fragment, never Python per env or per frame.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from storage.core.fields import Schema
from storage.core.memory import BufferPool

from ..blocks.annotation_table import EPISODES, TEXTS
from ..blocks.block_content import BlockContent, RowSource
from ..blocks.block_header import (
    DATA,
    DROPPED,
    ENDS,
    FINAL,
    FINAL_OBSERVATION_ONLY,
    FIRST,
    FRAGMENT_DTYPE,
    TENTATIVE,
    layouts_of,
)
from ..blocks.row_layout import RowLayout, StoredColumn
from .annotation_checks import StepNotes
from .rollout_records import HAS_FINAL, PRESENT, REWARD, Rollout, ends_of, nonfinite_rewards, numbers

#: A block is written without its unused rows when more than this part of them is unused.
MAX_UNUSED_PART = 0.25
#: Address space for one block: enough for any file, and no more than any system gives.
MAX_STAGED_BYTES = 4 << 30
#: Steps that are counted together cost less than one by one; more of them would keep a caller waiting.
MAX_UNCOUNTED_STEPS = 32
#: About as many frames are counted at a time.
_COUNTED_FRAMES = 1 << 16


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
    def start(cls, num_envs: int, next_trajectory: int) -> Carry:
        zeros = np.zeros(num_envs, np.int64)
        return cls(np.full(num_envs, -1, np.int64), zeros, zeros, next_trajectory)


class Staging:
    """The steps that make the next block.

    Args:
        schema: All fields, as users see them.
        num_envs: N.
        max_steps: How many steps it takes at most. There is room for all at once, as memory that was never
            touched costs nothing: growing in the middle of a recording would keep a caller waiting.
        pool: Where its memory comes from and returns to.

    Attributes:
        num_steps: Steps taken. A `put` sets it last: one that is interrupted is overwritten by the next.
        num_counted: Steps that a `Tally` has counted.
        num_note_bytes: Bytes of notes, a text counted each time that it is given.
        is_sealed: No further step may be put: the block is being published.
        is_published: Its publication has begun; a second one must do nothing.
    """

    def __init__(self, schema: Schema, num_envs: int, max_steps: int, pool: BufferPool) -> None:
        self.schema = schema
        self.num_envs = num_envs
        self.max_steps = max_steps
        lead = (max_steps, num_envs)
        self._values = {}
        for name, field in layouts_of(schema)[DATA].stored.items():
            shape = (*lead, *field.shape)
            dtype = field.numpy_dtype
            self._values[name] = pool.take(prod(shape) * dtype.itemsize).numpy().view(dtype).reshape(shape)
        self._marks = np.zeros(lead, np.uint8)
        self._times_ns = np.zeros(max_steps, np.int64)
        #: First step of a rollout -> how many steps it has, its policy version(s), its final rows, and its notes.
        self._others: dict[int, tuple[int, np.ndarray | int, Mapping[str, np.ndarray] | None, StepNotes]] = {}
        #: `[N]`: flags that end the trajectory of the block before, ahead of the first frame.
        self._before = np.zeros(num_envs, np.uint8)
        self._max_errors: dict[str, float] = {}
        self.num_steps = self.num_counted = self.num_note_bytes = 0
        self.is_sealed = self.is_published = False

    @property
    def room(self) -> int:
        """How many more steps it takes."""
        return self.max_steps - self.num_steps

    @property
    def newest_ns(self) -> int | None:
        """When the newest step was taken; None before the first."""
        return int(self._times_ns[self.num_steps - 1]) if self.num_steps else None

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to publish."""
        return self.num_steps == 0 and not self._before.any()

    def put(self, rollout: Rollout, time_ns: int) -> None:
        """Copy a rollout of at most `room` steps, the first of which was taken at `time_ns`."""
        start = self.num_steps
        count = len(rollout.marks)
        stop = start + count
        for name, values in rollout.fields.items():
            self._values[name][start:stop] = values
        self._marks[start:stop] = rollout.marks
        self._times_ns[start:stop] = time_ns if count == 1 else time_ns + np.arange(count)
        for name, error in rollout.max_errors.items():
            self._max_errors[name] = max(error, self._max_errors.get(name, 0.0))
        finals = rollout.finals and {name: np.array(rows) for name, rows in rollout.finals.items()}
        self._others[start] = count, rollout.policy_version, finals, rollout.notes
        self.num_note_bytes += rollout.notes.num_bytes
        self.num_steps = stop

    def end(self, env_ids: np.ndarray, flag: int) -> None:
        """End the trajectories in progress of these envs after their last frame."""
        is_frame = (self._marks[: self.num_steps, env_ids] & PRESENT) > 0
        has_frame = is_frame.any(axis=0)
        if has_frame.any():
            env = env_ids[has_frame]
            last = self.num_steps - 1 - np.argmax(is_frame[::-1, has_frame], axis=0)
            is_open = (self._marks[last, env] & ENDS) == 0
            self._marks[last[is_open], env[is_open]] |= np.uint8(flag)
        self._before[env_ids[~has_frame]] |= np.uint8(flag)

    def content(self, writer: str, sequence: int, carry: Carry, is_tentative: bool) -> tuple[BlockContent, Carry]:
        """Cut the staged frames and give what the block holds; its rows are read out of this staging."""
        used = self.num_steps
        others = [(start, *other) for start, other in self._others.items() if start < used]
        finals, final_keys = self._joined_finals([(start, rows) for start, _, _, rows, _ in others if rows is not None])
        fragments, carry = cut(
            np.ascontiguousarray(self._marks[:used].T),
            self._before,
            self._joined_versions([(count, version) for _, count, version, *_ in others]),
            self._times_ns[:used],
            carry,
        )
        if is_tentative:
            fragments["flags"] |= TENTATIVE
        sums = self._reward_sums(fragments)
        notes = self._placed([(start, notes) for start, *_, notes in others], fragments)
        place_of = np.full(used * self.num_envs + 1, -1)  # what has no final row, -1, finds the last of these
        place_of[final_keys] = np.arange(len(final_keys))
        fragments["final_row"] = place_of[fragments["final_row"]]
        has_final = np.flatnonzero(fragments["final_row"] >= 0)
        final_places = fragments["final_row"][has_final].copy()
        fragments["final_row"][has_final] = np.arange(len(has_final))
        values = {name: array[:used] for name, array in self._values.items()}
        places = None
        if fragments["length"].sum() < (1 - MAX_UNUSED_PART) * used * self.num_envs:
            places = self._used_places(fragments)
            values = {name: array.reshape(-1, *array.shape[2:]) for name, array in values.items()}
        rows: dict[str, dict[str, RowSource]] = {}
        for table, source, chosen in ((DATA, values, places), (FINAL, finals, final_places)):
            layout = layouts_of(self.schema)[table]
            rows[table] = {name: _Rows(layout, one, source, chosen) for name, one in layout.columns.items()}
        errors = dict(self._max_errors)
        return BlockContent(self.schema, writer, sequence, fragments, sums, rows, errors, notes=notes), carry

    def _placed(self, parts: list[tuple[int, StepNotes]], fragments: np.ndarray) -> dict[str, list[tuple[int, bytes]]]:
        """Return the notes of the block: those of episodes by the trajectory in whose frames they were given."""
        texts = dict[int, bytes]()
        said = list[tuple[int, bytes]]()
        for start, notes in parts:
            texts |= notes.texts
            said += [(env * self.num_steps + start + step, data) for step, env, data in notes.episodes]
        long = fragments[fragments["length"] > 0]
        numbers = long["trajectory"].tolist()
        stops = (long["row"] + long["length"]).tolist()
        places = (long["row"].searchsorted([key for key, _ in said], "right") - 1).tolist()
        found = zip(places, said, strict=True)
        kept = [(numbers[place], data) for place, (key, data) in found if place >= 0 and key < stops[place]]
        return {EPISODES: kept, TEXTS: list(texts.items())}

    def _joined_finals(
        self, parts: list[tuple[int, Mapping[str, np.ndarray]]]
    ) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Join the final rows, `[k, *shape]` per field, and give `env * num_steps + step` of each, `[k]`."""
        keys = [np.zeros(0, np.int64)]
        for start, _ in parts:
            step, env = (self._marks[start : start + self._others[start][0]] & HAS_FINAL).nonzero()
            keys.append(env * self.num_steps + start + step)
        stored = layouts_of(self.schema)[FINAL].stored
        joined = {
            name: np.concatenate([np.zeros((0, *field.shape), field.numpy_dtype), *(rows[name] for _, rows in parts)])
            for name, field in stored.items()
        }
        return joined, np.concatenate(keys)

    def _joined_versions(self, parts: list[tuple[int, np.ndarray | int]]) -> np.ndarray | int:
        """Join policy versions: one number if all are the same, else `[N, T]`."""
        if all(isinstance(version, int) for _, version in parts) and len({version for _, version in parts}) <= 1:
            return parts[0][1] if parts else -1
        steps = [np.broadcast_to(version, (count, self.num_envs)) for count, version in parts]
        return np.ascontiguousarray(np.concatenate(steps).T)

    def _reward_sums(self, fragments: np.ndarray) -> np.ndarray:
        """Sum the rewards of each fragment: `[F, R]` float64."""
        if REWARD not in self.schema:
            return np.zeros((len(fragments), 0))
        width = self.schema[REWARD].num_elements
        num_rows = self.num_envs * self.num_steps
        rewards = numbers(self.schema[REWARD], self._values[REWARD][: self.num_steps])
        values = np.zeros((num_rows + 1, width))  # the last row is where the last fragment ends
        sums = np.zeros((len(fragments), width))
        long = np.flatnonzero(fragments["length"] > 0)
        bounds = np.stack([fragments["row"][long], fragments["row"][long] + fragments["length"][long]], axis=1)
        with np.errstate(all="ignore"):  # NaN and Inf rewards are data
            values[:num_rows] = rewards.swapaxes(0, 1).reshape(num_rows, width)
            if len(long):
                sums[long] = np.add.reduceat(values, bounds.reshape(-1), axis=0)[::2]
        return sums

    def _used_places(self, fragments: np.ndarray) -> np.ndarray:
        """Find where the rows that a fragment holds are staged, and renumber the fragments to hold only those."""
        length = fragments["length"]
        after = np.cumsum(length)
        old = np.repeat(fragments["row"] - (after - length), length) + np.arange(int(length.sum()))
        fragments["row"] = np.where(length > 0, after - length, 0)
        env, step = np.divmod(old, max(1, self.num_steps))
        return step * self.num_envs + env

    def count(self, tally: Tally) -> None:
        """Count the steps that are not counted yet."""
        while (start := self.num_counted) < self.num_steps:
            stop = min(start + max(1, _COUNTED_FRAMES // self.num_envs), self.num_steps)
            marks = self._marks[start:stop]
            rewards = {name: self._values[name][start:stop] for name in self.schema.below(REWARD)}
            tally.add(marks, sum(nonfinite_rewards(self.schema, rewards, marks).values()))
            self.num_counted = stop


class _Rows:
    """Rows of one column (a `RowSource`) of staged values.

    They are those of all envs, one env after another, of `[T, N, *shape]`; or, with `places`, `[k]` int64, those of
    `[R, *shape]`.
    """

    def __init__(
        self, layout: RowLayout, column: StoredColumn, values: Mapping[str, np.ndarray], places: np.ndarray | None
    ) -> None:
        lead = next(iter(values.values())).shape[: 2 if places is None else 1]
        self._num_steps = lead[0]
        self._places = places
        self.num_rows = prod(lead) if places is None else len(places)
        self.row_bytes = column.row_bytes
        #: First byte in a row, and values as bytes, which are copied faster than numbers; by field.
        self._fields = [
            (offset, np.ndarray(lead, f"V{layout.stored[name].row_bytes}", values[name]))
            for name, offset in column.offsets.items()
        ]
        self._has_gaps = column.row_bytes > sum(values.itemsize for _, values in self._fields)

    def read(self, start: int, stop: int, out: np.ndarray) -> np.ndarray:
        """Gather the rows `start:stop` into `out`."""
        if self._has_gaps:  # so that files hold no stray memory
            out[:] = 0
        for offset, values in self._fields:
            rows = np.ndarray(stop - start, values.dtype, out, offset, (self.row_bytes,))
            if self._places is not None:
                rows[:] = values[self._places[start:stop]]
                continue
            row = start
            while row < stop:  # the end of one env, whole envs, the beginning of another
                env, step = divmod(row, self._num_steps)
                num_envs = (stop - row) // self._num_steps if step == 0 else 0
                num_steps = self._num_steps if num_envs else min(self._num_steps - step, stop - row)
                num_envs = max(1, num_envs)
                part = rows[row - start : row - start + num_envs * num_steps].reshape(num_envs, num_steps)
                np.copyto(part, values[step : step + num_steps, env : env + num_envs].swapaxes(0, 1))
                row += num_envs * num_steps
        return out


def cut(
    bits: np.ndarray, before: np.ndarray, versions: np.ndarray | int, times_ns: np.ndarray, carry: Carry
) -> tuple[np.ndarray, Carry]:
    """Cut staged frames into fragments.

    Args:
        bits: `[N, T]` uint8: `PRESENT` and the flags with which the frame ends its trajectory.
        before: `[N]` uint8: flags that end the carried trajectory before the first frame.
        versions: `[N, T]` int64, or one number for all.
        times_ns: `[T]` int64.
        carry: Of the block before.

    Returns:
        `[F]` of `FRAGMENT_DTYPE` and the next carry. `row` is `env * T + t` of the first frame, `final_row` that of the
        last one, -1 without. Fragments of dropped trajectories are left out; one that has published fragments gets a
        `DROPPED` one of length 0.
    """
    num_steps = bits.shape[1]
    early, carry = _end_carried(before, carry)
    first, last = _fragment_bounds(bits, versions)
    if not len(first):
        return early, carry
    env, step = np.divmod(first, num_steps)
    flags = bits.reshape(-1)[last]
    is_head = np.append(True, env[1:] != env[:-1])  # first fragment of its env in this block
    is_new = np.append(True, (flags[:-1] & ENDS) > 0)
    is_new[is_head] = carry.trajectory[env[is_head]] < 0
    # A group is the part of one trajectory in this block.
    heads = np.flatnonzero(is_head | is_new)
    group = np.cumsum(is_head | is_new) - 1
    group_env = env[heads]
    group_is_new = is_new[heads]
    trajectories = np.where(group_is_new, -1, carry.trajectory[group_env])
    started = np.flatnonzero(group_is_new)
    started = started[np.lexsort((group_env[started], step[heads[started]]))]
    trajectories[started] = carry.next_trajectory + np.arange(len(started))
    length = last - first + 1
    published = np.cumsum(length) - length
    start = published - published[heads][group] + np.where(group_is_new, 0, carry.length[group_env])[group]

    table = np.zeros(len(env), FRAGMENT_DTYPE)
    table["trajectory"], table["env"] = trajectories[group], env
    table["flags"] = (flags & (ENDS | FINAL_OBSERVATION_ONLY)) | np.where(is_new, FIRST, 0)
    table["start"], table["length"], table["row"], table["final_row"] = start, length, first, last
    table["end_time_ns"] = times_ns[last % num_steps]
    table["policy_version"] = versions.reshape(-1)[first] if isinstance(versions, np.ndarray) else versions
    after = _next_carry(carry, table, carry.next_trajectory + len(started))

    is_dropped = np.bitwise_or.reduceat(table["flags"], heads) & DROPPED > 0
    tombs = heads[is_dropped & ~group_is_new]  # left where fragments of a dropped trajectory are published
    table["length"][tombs], table["row"][tombs], table["final_row"][tombs] = 0, 0, -1
    table["start"][tombs], table["flags"][tombs] = carry.length[table["env"][tombs]], DROPPED
    is_kept = ~is_dropped[group]
    is_kept[tombs] = True
    return np.concatenate([early, table[is_kept]]), after


def _fragment_bounds(bits: np.ndarray, versions: np.ndarray | int) -> tuple[np.ndarray, np.ndarray]:
    """First and last frame of each fragment, as `env * T + t`, in that order."""
    flat = bits.reshape(-1)
    num_steps = bits.shape[1]
    present = flat >= PRESENT  # the highest bit
    joined = (flat & (PRESENT | ENDS) == PRESENT)[:-1] & present[1:]  # frame k goes on at k + 1
    joined[num_steps - 1 :: num_steps or 1] = False  # which is another env's
    if isinstance(versions, np.ndarray):
        joined &= versions.reshape(-1)[1:] == versions.reshape(-1)[:-1]
    is_first = present.copy()
    is_last = present
    is_first[1:] &= ~joined
    is_last[:-1] &= ~joined
    return np.flatnonzero(is_first), np.flatnonzero(is_last)


def _end_carried(before: np.ndarray, carry: Carry) -> tuple[np.ndarray, Carry]:
    """Fragments of length 0 for trajectories that end without a further frame."""
    env = np.flatnonzero(((before & ENDS) > 0) & (carry.trajectory >= 0))
    table = np.zeros(len(env), FRAGMENT_DTYPE)
    table["trajectory"], table["env"], table["start"] = carry.trajectory[env], env, carry.length[env]
    table["flags"], table["end_time_ns"] = before[env] & ENDS, carry.time_ns[env]
    table["final_row"], table["policy_version"] = -1, -1
    trajectory = carry.trajectory.copy()
    trajectory[env] = -1
    return table, replace(carry, trajectory=trajectory)


def _next_carry(carry: Carry, table: np.ndarray, next_trajectory: int) -> Carry:
    """Carry on from the last fragment of each env."""
    tail = table[np.append(table["env"][1:] != table["env"][:-1], True)]
    env = tail["env"]
    trajectory = carry.trajectory.copy()
    length = carry.length.copy()
    time_ns = carry.time_ns.copy()
    trajectory[env] = np.where(tail["flags"] & ENDS > 0, -1, tail["trajectory"])
    length[env] = tail["start"] + tail["length"]
    time_ns[env] = tail["end_time_ns"]
    return Carry(trajectory, length, time_ns, next_trajectory)


class Tally:
    """Counts of kept frames and trajectories, and of rewards that are NaN or infinite.

    Attributes:
        num_trajectories, num_finished_frames: Kept trajectories that have ended, and their frames.
        num_open_frames: Frames of the trajectories in progress.
    """

    def __init__(self, num_envs: int) -> None:
        self.num_trajectories = self.num_finished_frames = self.num_nonfinite = 0
        self._lengths = np.zeros(num_envs, np.int64)

    @property
    def num_open_frames(self) -> int:
        return int(self._lengths.sum())

    def add(self, marks: np.ndarray, num_nonfinite: int) -> None:
        """Count steps, by their marks `[T, N]`."""
        self.num_nonfinite += num_nonfinite
        if (marks == PRESENT).all():
            self._lengths += len(marks)
            return
        is_present = marks > 0
        is_end = ends_of(marks)
        env, step = is_end.T.nonzero()  # of an env one after another
        has_end = is_end.any(axis=0)
        seen = is_present[:, has_end].cumsum(axis=0)
        column = has_end.cumsum() - 1
        until = self._lengths[env] + seen[step, column[env]]
        is_same = env[1:] == env[:-1]
        lengths = until.copy()
        lengths[1:] -= until[:-1] * is_same
        self._keep(lengths * ((marks[step, env] & DROPPED) == 0))
        self._lengths += is_present.sum(axis=0)
        is_last = np.append(~is_same, True)[: len(env)]
        self._lengths[env[is_last]] -= until[is_last]

    def end(self, env_ids: np.ndarray, is_kept: bool) -> None:
        """Count the trajectories in progress of these envs as ended."""
        self._keep(self._lengths[env_ids] * is_kept)
        self._lengths[env_ids] = 0

    def _keep(self, lengths: np.ndarray) -> None:
        self.num_finished_frames += int(lengths.sum())
        self.num_trajectories += int(np.count_nonzero(lengths))
