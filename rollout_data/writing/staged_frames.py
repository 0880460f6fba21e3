"""`Staging`: memory for the frames of the next block, and their division into fragments.

`Staging.put` copies steps in the order in which they arrive, so the caller waits as little as
possible. The background thread gathers the rows of each trajectory when it writes the block.
Fragments are computed from one byte per frame by array operations, without a Python loop over envs
or frames. A position `env * T + t` counts the frames of T steps env by env.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from storage.core.fields import Schema
from storage.core.memory import BufferPool

from ..blocks.annotation_table import EPISODES, TEXTS
from ..blocks.block_content import BlockContent, ColumnRows
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
from .rollout_records import (
    HAS_FINAL,
    PRESENT,
    REWARD,
    Rollout,
    ends_of,
    nonfinite_rewards,
    numbers,
)

#: Maximum fraction of unused rows in a block, for which an env had no frame or its trajectory was
#: dropped. Writing a few unused rows is faster than removing them.
MAX_UNUSED_PART = 0.25
#: Maximum bytes of staging memory for one block.
MAX_STAGED_BYTES = 4 << 30
#: Number of steps whose frames are counted in one call. Counting each step costs more time in total.
#: Counting more steps at once would delay the caller.
MAX_UNCOUNTED_STEPS = 32
#: Approximate number of frames that are counted at a time.
_COUNTED_FRAMES = 1 << 16


@dataclass(frozen=True, eq=False)
class Carry:
    """State between two blocks: the unfinished trajectory of each of N envs.

    Attributes:
        trajectory: Number of the unfinished trajectory, int64 `[N]`; -1 if there is none.
        length: Number of its frames so far, int64 `[N]`.
        time_ns: Time of its last frame in ns since the epoch, int64 `[N]`.
        next_trajectory: Number for the next new trajectory.
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
    """Memory for the steps of the next block.

    Args:
        schema: All fields as users see them.
        num_envs: Number of envs, N.
        max_steps: Maximum number of steps. Memory for all steps is reserved at once: unused memory
            costs nothing, and growing would delay the caller.
        pool: Memory pool.

    Attributes:
        num_steps: Number of steps. `put` sets this number last, so that the next `put` overwrites
            the steps of an interrupted `put`.
        num_counted: Number of steps that were added to a `Tally`.
        num_note_bytes: Bytes of metadata and texts. A text counts each time that it occurs.
        is_sealed: Whether the block was submitted, so that no step may be added.
        is_published: Whether publishing has begun, so that it is not repeated.
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
            self._values[name] = (
                pool.take(prod(shape) * dtype.itemsize).numpy().view(dtype).reshape(shape)
            )
        self._marks = np.zeros(lead, np.uint8)
        self._times_ns = np.zeros(max_steps, np.int64)
        #: The rollouts in this memory. Maps the first step of each to a tuple (number of steps, policy
        #: versions, final observations, annotations).
        self._rollouts: dict[
            int, tuple[int, np.ndarray | int, Mapping[str, np.ndarray] | None, StepNotes]
        ] = {}
        #: Flags of trajectories that began in an earlier block and end without another frame, uint8
        #: `[N]`.
        self._early_flags = np.zeros(num_envs, np.uint8)
        self._max_errors: dict[str, float] = {}
        self.num_steps = 0
        self.num_counted = 0
        self.num_note_bytes = 0
        self.is_sealed = False
        self.is_published = False

    @property
    def room(self) -> int:
        """Number of steps that can still be added."""
        return self.max_steps - self.num_steps

    @property
    def newest_ns(self) -> int | None:
        """Time of the last step in ns since the epoch; None before the first step."""
        return int(self._times_ns[self.num_steps - 1]) if self.num_steps else None

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to publish: no steps, and no ends of earlier trajectories."""
        return self.num_steps == 0 and not self._early_flags.any()

    def put(self, rollout: Rollout, time_ns: int) -> None:
        """Copy a rollout of at most `room` steps into the memory.

        Args:
            rollout: The rollout.
            time_ns: Time of its first step in ns. Each further step counts as 1 ns later.
        """
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
        self._rollouts[start] = count, rollout.policy_version, finals, rollout.notes
        self.num_note_bytes += rollout.notes.num_bytes
        self.num_steps = stop

    def end(self, env_ids: np.ndarray, flag: int) -> None:
        """Mark the last frames of some envs as ends of their trajectories.

        `flag` states how the trajectories end, such as `OPEN` or `DROPPED`.
        """
        is_frame = (self._marks[: self.num_steps, env_ids] & PRESENT) > 0
        has_frame = is_frame.any(axis=0)
        if has_frame.any():
            env = env_ids[has_frame]
            last = self.num_steps - 1 - np.argmax(is_frame[::-1, has_frame], axis=0)
            is_open = (self._marks[last, env] & ENDS) == 0
            self._marks[last[is_open], env[is_open]] |= np.uint8(flag)
        self._early_flags[env_ids[~has_frame]] |= np.uint8(flag)

    def content(
        self, writer: str, sequence: int, carry: Carry, is_tentative: bool
    ) -> tuple[BlockContent, Carry]:
        """Divide the staged frames into fragments, and build the content of the block.

        Args:
            writer: Name of the writer.
            sequence: Sequence number of the block.
            carry: Unfinished trajectories at the end of the previous block.
            is_tentative: Mark fragments so that readers ignore them until their trajectory has
                ended.

        Returns:
            The content, whose rows are read from this memory, and the unfinished trajectories at
            the end of this block.
        """
        used = self.num_steps
        rollouts = [(start, *parts) for start, parts in self._rollouts.items() if start < used]
        finals, final_keys = self._joined_finals(
            [(start, rows) for start, _, _, rows, _ in rollouts if rows is not None]
        )
        fragments, carry = cut(
            np.ascontiguousarray(self._marks[:used].T),
            self._early_flags,
            self._joined_versions([(count, version) for _, count, version, *_ in rollouts]),
            self._times_ns[:used],
            carry,
        )
        if is_tentative:
            fragments["flags"] |= TENTATIVE
        sums = self._reward_sums(fragments)
        notes = self._notes_of_block([(start, notes) for start, *_, notes in rollouts], fragments)
        # Fragments of length 0 have `final_row` -1. It selects the additional last element, -1.
        place_of = np.full(used * self.num_envs + 1, -1)
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
        layouts = layouts_of(self.schema)
        rows = {
            DATA: _row_sources(layouts[DATA], values, places),
            FINAL: _row_sources(layouts[FINAL], finals, final_places),
        }
        errors = dict(self._max_errors)
        return BlockContent(
            self.schema, writer, sequence, fragments, sums, rows, errors, notes=notes
        ), carry

    def _notes_of_block(
        self, parts: list[tuple[int, StepNotes]], fragments: np.ndarray
    ) -> dict[str, list[tuple[int, bytes]]]:
        """Build the annotations of the block: metadata by trajectory number, and texts by id.

        Metadata of a step that is in no fragment belong to a dropped trajectory. They are left out.

        Args:
            parts: First step and annotations of each rollout.
            fragments: Fragments of the block, before their rows are renumbered.
        """
        texts = dict[int, bytes]()
        keys = list[int]()
        contents = list[bytes]()
        for start, notes in parts:
            texts |= notes.texts
            for step, env, data in notes.episodes:
                keys.append(env * self.num_steps + start + step)
                contents.append(data)
        with_frames = fragments[fragments["length"] > 0]
        numbers = with_frames["trajectory"].tolist()
        stops = (with_frames["row"] + with_frames["length"]).tolist()
        places = (with_frames["row"].searchsorted(keys, "right") - 1).tolist()
        episodes = list[tuple[int, bytes]]()
        for place, key, data in zip(places, keys, contents, strict=True):
            if place >= 0 and key < stops[place]:
                episodes.append((numbers[place], data))
        return {EPISODES: episodes, TEXTS: list(texts.items())}

    def _joined_finals(
        self, parts: list[tuple[int, Mapping[str, np.ndarray]]]
    ) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Concatenate the final observations of all rollouts.

        Returns:
            Maps fields to the k final observations, `[k, *shape]`; and the position of the frame
            before each, as `env * num_steps + step`.
        """
        keys = [np.zeros(0, np.int64)]
        for start, _ in parts:
            count = self._rollouts[start][0]
            step, env = (self._marks[start : start + count] & HAS_FINAL).nonzero()
            keys.append(env * self.num_steps + start + step)
        stored = layouts_of(self.schema)[FINAL].stored
        joined = {
            name: np.concatenate(
                [np.zeros((0, *field.shape), field.numpy_dtype), *(rows[name] for _, rows in parts)]
            )
            for name, field in stored.items()
        }
        return joined, np.concatenate(keys)

    def _joined_versions(self, parts: list[tuple[int, np.ndarray | int]]) -> np.ndarray | int:
        """Return the policy version of all frames: one number, or int64 `[N, T]` if it varies."""
        if (
            all(isinstance(version, int) for _, version in parts)
            and len({version for _, version in parts}) <= 1
        ):
            return parts[0][1] if parts else -1
        steps = [np.broadcast_to(version, (count, self.num_envs)) for count, version in parts]
        return np.ascontiguousarray(np.concatenate(steps).T)

    def _reward_sums(self, fragments: np.ndarray) -> np.ndarray:
        """Compute the sum of each of R rewards over each fragment, float64 `[F, R]`."""
        if REWARD not in self.schema:
            return np.zeros((len(fragments), 0))
        width = self.schema[REWARD].num_elements
        num_rows = self.num_envs * self.num_steps
        rewards = numbers(self.schema[REWARD], self._values[REWARD][: self.num_steps])
        # Add a row of zeros, since `reduceat` needs an index after the last fragment.
        values = np.zeros((num_rows + 1, width))
        sums = np.zeros((len(fragments), width))
        with_frames = np.flatnonzero(fragments["length"] > 0)
        starts = fragments["row"][with_frames]
        stops = starts + fragments["length"][with_frames]
        bounds = np.stack([starts, stops], axis=1)
        with np.errstate(all="ignore"):  # NaN and Inf rewards are valid data and need no warning.
            values[:num_rows] = rewards.swapaxes(0, 1).reshape(num_rows, width)
            if len(with_frames):
                sums[with_frames] = np.add.reduceat(values, bounds.reshape(-1), axis=0)[::2]
        return sums

    def _used_places(self, fragments: np.ndarray) -> np.ndarray:
        """Renumber the rows of fragments so that rows without a fragment are not written.

        Returns:
            Position in the staging memory of each of the k remaining rows, int64 `[k]`.
        """
        length = fragments["length"]
        new_row = np.cumsum(length) - length
        old_rows = np.repeat(fragments["row"] - new_row, length) + np.arange(int(length.sum()))
        fragments["row"] = np.where(length > 0, new_row, 0)
        env, step = np.divmod(old_rows, max(1, self.num_steps))
        return step * self.num_envs + env

    def count(self, tally: Tally) -> None:
        """Add the frames of all uncounted steps to the counts of the writer."""
        while self.num_counted < self.num_steps:
            start = self.num_counted
            stop = min(start + max(1, _COUNTED_FRAMES // self.num_envs), self.num_steps)
            marks = self._marks[start:stop]
            rewards = {name: self._values[name][start:stop] for name in self.schema.below(REWARD)}
            tally.add(marks, sum(nonfinite_rewards(self.schema, rewards, marks).values()))
            self.num_counted = stop


class _Rows:
    """Rows of one column, packed from the staged values of its fields when they are written.

    Args:
        layout: Layout of the table.
        column: The column.
        values: Maps fields to values: `[T, N, *shape]` if `places` is None, otherwise
            `[R, *shape]`.
        places: Position in `values` of each row of the column, int64 `[k]`. If None, the column has
            T * N rows: all values, env by env.
    """

    def __init__(
        self,
        layout: RowLayout,
        column: StoredColumn,
        values: Mapping[str, np.ndarray],
        places: np.ndarray | None,
    ) -> None:
        lead = next(iter(values.values())).shape[: 2 if places is None else 1]
        self._num_steps = lead[0]
        self._places = places
        self.num_rows = prod(lead) if places is None else len(places)
        self.row_bytes = column.row_bytes
        #: For each field, its first byte in a row, and its values as raw bytes, which numpy copies
        #: faster than numbers.
        self._fields = [
            (offset, np.ndarray(lead, f"V{layout.stored[name].row_bytes}", values[name]))
            for name, offset in column.offsets.items()
        ]
        self._has_gaps = column.row_bytes > sum(values.itemsize for _, values in self._fields)

    def read(self, start: int, stop: int, out: np.ndarray) -> np.ndarray:
        """Copy rows `start:stop` to `out`, uint8 `[stop - start, row_bytes]`, and return it."""
        if self._has_gaps:
            # Padding bytes would otherwise contain old values of this memory.
            out[:] = 0
        for offset, values in self._fields:
            rows = np.ndarray(stop - start, values.dtype, out, offset, (self.row_bytes,))
            if self._places is not None:
                rows[:] = values[self._places[start:stop]]
                continue
            row = start
            # Each iteration copies all steps of several envs, or some steps of one env.
            while row < stop:
                env, step = divmod(row, self._num_steps)
                num_envs = (stop - row) // self._num_steps if step == 0 else 0
                num_steps = self._num_steps if num_envs else min(self._num_steps - step, stop - row)
                num_envs = max(1, num_envs)
                part = rows[row - start : row - start + num_envs * num_steps].reshape(
                    num_envs, num_steps
                )
                np.copyto(
                    part, values[step : step + num_steps, env : env + num_envs].swapaxes(0, 1)
                )
                row += num_envs * num_steps
        return out


def _row_sources(
    layout: RowLayout, values: Mapping[str, np.ndarray], places: np.ndarray | None
) -> dict[str, ColumnRows]:
    """Map each column of a table to an object that packs staged values into its rows."""
    return {name: _Rows(layout, column, values, places) for name, column in layout.columns.items()}


def cut(
    bits: np.ndarray,
    early_flags: np.ndarray,
    versions: np.ndarray | int,
    times_ns: np.ndarray,
    carry: Carry,
) -> tuple[np.ndarray, Carry]:
    """Divide staged frames into F fragments, one per trajectory and policy version.

    Args:
        bits: Marks of the frames, uint8 `[N, T]`: `PRESENT`, and flags if the trajectory ends.
        early_flags: Flags of trajectories that were unfinished at the end of the previous block,
            and end without a further frame, uint8 `[N]`.
        versions: Policy versions, int64 `[N, T]`, or one number for all.
        times_ns: Time of each step in ns since the epoch, int64 `[T]`.
        carry: Unfinished trajectories at the end of the previous block.

    Returns:
        The fragments, `[F]` of `FRAGMENT_DTYPE`, and the unfinished trajectories at the end of the
        block. `row` is the position `env * T + t` of the first frame of a fragment. `final_row` is
        the position of its last frame, or -1 if it has length 0; the caller replaces it by the row
        of the final observation. Fragments of dropped trajectories are left out. A dropped
        trajectory that began in an earlier block gets a `DROPPED` fragment of length 0.
    """
    num_steps = bits.shape[1]
    early, carry = _end_carried(early_flags, carry)
    first, last = _fragment_bounds(bits, versions)
    if not len(first):
        return early, carry
    env, step = np.divmod(first, num_steps)
    flags = bits.reshape(-1)[last]
    # Whether each fragment is the first of its env, and whether a trajectory starts with it.
    is_head = np.append(True, env[1:] != env[:-1])
    is_new = np.append(True, (flags[:-1] & ENDS) > 0)
    is_new[is_head] = carry.trajectory[env[is_head]] < 0
    # Group the fragments of this block by trajectory. `heads` is the first fragment of each group.
    heads = np.flatnonzero(is_head | is_new)
    group = np.cumsum(is_head | is_new) - 1
    group_env = env[heads]
    group_is_new = is_new[heads]
    trajectories = np.where(group_is_new, -1, carry.trajectory[group_env])
    # New trajectories are numbered by the time of their first frame, then by env.
    started = np.flatnonzero(group_is_new)
    started = started[np.lexsort((group_env[started], step[heads[started]]))]
    trajectories[started] = carry.next_trajectory + np.arange(len(started))
    length = last - first + 1
    published = np.cumsum(length) - length
    start = (
        published
        - published[heads][group]
        + np.where(group_is_new, 0, carry.length[group_env])[group]
    )

    table = np.zeros(len(env), FRAGMENT_DTYPE)
    table["trajectory"] = trajectories[group]
    table["env"] = env
    table["flags"] = (flags & (ENDS | FINAL_OBSERVATION_ONLY)) | np.where(is_new, FIRST, 0)
    table["start"] = start
    table["length"] = length
    table["row"] = first
    table["final_row"] = last
    table["end_time_ns"] = times_ns[last % num_steps]
    table["policy_version"] = (
        versions.reshape(-1)[first] if isinstance(versions, np.ndarray) else versions
    )
    next_carry = _next_carry(carry, table, carry.next_trajectory + len(started))

    is_dropped = np.bitwise_or.reduceat(table["flags"], heads) & DROPPED > 0
    # Earlier blocks may contain fragments of a dropped trajectory. A fragment of length 0 with the
    # flag `DROPPED` then makes readers ignore them.
    tombs = heads[is_dropped & ~group_is_new]
    table["length"][tombs] = 0
    table["row"][tombs] = 0
    table["final_row"][tombs] = -1
    table["start"][tombs] = carry.length[table["env"][tombs]]
    table["flags"][tombs] = DROPPED
    is_kept = ~is_dropped[group]
    is_kept[tombs] = True
    return np.concatenate([early, table[is_kept]]), next_carry


def _fragment_bounds(bits: np.ndarray, versions: np.ndarray | int) -> tuple[np.ndarray, np.ndarray]:
    """Return the first and the last frame of each fragment, each as `env * T + t`, ascending."""
    flat = bits.reshape(-1)
    num_steps = bits.shape[1]
    present = flat >= PRESENT  # `PRESENT` is the highest bit.
    # `joined[k]`: frame k + 1 belongs to the same fragment as frame k.
    joined = (flat & (PRESENT | ENDS) == PRESENT)[:-1] & present[1:]
    joined[num_steps - 1 :: num_steps or 1] = False  # After the last step comes another env.
    if isinstance(versions, np.ndarray):
        joined &= versions.reshape(-1)[1:] == versions.reshape(-1)[:-1]
    is_first = present.copy()
    is_last = present
    is_first[1:] &= ~joined
    is_last[:-1] &= ~joined
    return np.flatnonzero(is_first), np.flatnonzero(is_last)


def _end_carried(early_flags: np.ndarray, carry: Carry) -> tuple[np.ndarray, Carry]:
    """Build a fragment of length 0 for each trajectory that ends without a further frame.

    A fragment of length 0 states how the trajectory ended. The arguments are as in `cut`.

    Returns:
        The fragments, and the carry without these trajectories.
    """
    env = np.flatnonzero(((early_flags & ENDS) > 0) & (carry.trajectory >= 0))
    table = np.zeros(len(env), FRAGMENT_DTYPE)
    table["trajectory"] = carry.trajectory[env]
    table["env"] = env
    table["start"] = carry.length[env]
    table["flags"] = early_flags[env] & ENDS
    table["end_time_ns"] = carry.time_ns[env]
    table["final_row"] = -1
    table["policy_version"] = -1
    trajectory = carry.trajectory.copy()
    trajectory[env] = -1
    return table, replace(carry, trajectory=trajectory)


def _next_carry(carry: Carry, table: np.ndarray, next_trajectory: int) -> Carry:
    """Compute which trajectories are unfinished after a block, given its fragments sorted by env.

    Args:
        carry: State at the end of the previous block.
        table: The fragments, `[F]` of `FRAGMENT_DTYPE`.
        next_trajectory: Number for the next new trajectory.
    """
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
        num_trajectories, num_finished_frames: Number of kept trajectories that have ended, and of
            their frames.
        num_nonfinite: Number of rewards that are NaN or infinite.
        num_open_frames: Number of frames of unfinished trajectories.
    """

    def __init__(self, num_envs: int) -> None:
        self.num_trajectories = 0
        self.num_finished_frames = 0
        self.num_nonfinite = 0
        self._lengths = np.zeros(num_envs, np.int64)

    @property
    def num_open_frames(self) -> int:
        return int(self._lengths.sum())

    def add(self, marks: np.ndarray, num_nonfinite: int) -> None:
        """Add the frames of some steps, and the trajectories that end in them, to the counts.

        Args:
            marks: Marks of the frames, uint8 `[T, N]`.
            num_nonfinite: Number of rewards of these steps that are NaN or infinite.
        """
        self.num_nonfinite += num_nonfinite
        if (marks == PRESENT).all():
            self._lengths += len(marks)
            return
        is_present = marks > 0
        is_end = ends_of(marks)
        env, step = is_end.T.nonzero()  # Transposed, so that ends are sorted by env, then step.
        has_end = is_end.any(axis=0)
        num_frames = is_present[:, has_end].cumsum(axis=0)
        column = has_end.cumsum() - 1
        until = self._lengths[env] + num_frames[step, column[env]]
        is_same = env[1:] == env[:-1]
        lengths = until.copy()
        lengths[1:] -= until[:-1] * is_same
        self._keep(lengths * ((marks[step, env] & DROPPED) == 0))
        self._lengths += is_present.sum(axis=0)
        is_last = np.append(~is_same, True)[: len(env)]
        self._lengths[env[is_last]] -= until[is_last]

    def end(self, env_ids: np.ndarray, is_kept: bool) -> None:
        """Count the unfinished trajectories of some envs as kept or as dropped."""
        self._keep(self._lengths[env_ids] * is_kept)
        self._lengths[env_ids] = 0

    def _keep(self, lengths: np.ndarray) -> None:
        self.num_finished_frames += int(lengths.sum())
        self.num_trajectories += int(np.count_nonzero(lengths))
