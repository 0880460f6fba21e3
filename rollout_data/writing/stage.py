"""The frames of a block while it is being filled, the rows that are made of them, and counts of what is kept.

One rule: a step is copied once, in the order in which it came, which keeps the caller least; the rows of a trajectory
are brought together when the block is written, by the thread that writes it. Which fragments there are is
decided in `cut.py`.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping
from math import prod

import numpy as np
import torch

from storage.core.fields import Field, Schema
from storage.core.memory import BufferPool
from storage.errors import RolloutDataWarning

from ..format.header import DATA, DROPPED, ENDS, FINAL, layouts_of
from ..format.rows import BlockContent, RowSource
from ..format.schema import Column, RowLayout
from .cut import PRESENT, Carry, Marks, cut
from .record import REWARD, Rollout, ends_of

#: A block is written without its unused rows when more than this part of them is unused.
MAX_UNUSED_PART = 0.25
#: Address space for one block: enough for any file, and no more than any system gives.
MAX_STAGED_BYTES = 4 << 30
#: Most environments have time limits of 1,000 steps: where nothing has ended in twice as many, ends are not told.
MAX_STEPS_WITHOUT_END = 2000


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
        is_sealed: No further step may be put: the block is being published.
        is_published: Its publication has begun; a second one must do nothing.
    """

    def __init__(self, schema: Schema, num_envs: int, max_steps: int, pool: BufferPool) -> None:
        self.schema, self.num_envs, self.max_steps = schema, num_envs, max_steps
        lead = (max_steps, num_envs)
        fields = layouts_of(schema)[DATA].stored.values()
        self._values = {field.name: _empty(pool, (*lead, *field.shape), field.numpy_dtype) for field in fields}
        self._marks, self._times_ns = np.zeros(lead, np.uint8), np.zeros(max_steps, np.int64)
        #: First step of a rollout -> how many steps it has, its policy version(s), and its final rows.
        self._others: dict[int, tuple[int, np.ndarray | int, Mapping[str, np.ndarray] | None]] = {}
        self._before = np.zeros(num_envs, np.uint8)
        self._max_errors: dict[str, float] = {}
        self.num_steps = 0
        self.is_sealed = self.is_published = False

    @property
    def room(self) -> int:
        """How many more steps it takes."""
        return self.max_steps - self.num_steps

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to publish."""
        return self.num_steps == 0 and not self._before.any()

    def put(self, rollout: Rollout, time_ns: int) -> None:
        """Copy a rollout of at most `room` steps, the first of which was taken at `time_ns`."""
        start, count = self.num_steps, len(rollout.marks)
        for name, values in rollout.fields.items():
            self._values[name][start : start + count] = values
        self._marks[start : start + count] = rollout.marks
        self._times_ns[start : start + count] = time_ns if count == 1 else time_ns + np.arange(count)
        for name, error in rollout.max_errors.items():
            self._max_errors[name] = max(error, self._max_errors.get(name, 0.0))
        finals = rollout.finals and {name: np.array(rows) for name, rows in rollout.finals.items()}
        self._others[start] = count, rollout.policy_version, finals
        self.num_steps = start + count

    def end(self, env_ids: np.ndarray, flag: int) -> None:
        """End the trajectories in progress of these envs after their last frame."""
        marks = self._marks[: self.num_steps, env_ids]
        is_frame = (marks & PRESENT) > 0
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
        finals, final_keys = self._joined_finals([(start, rows) for start, _, _, rows in others if rows is not None])
        marks = Marks(
            bits=np.ascontiguousarray(self._marks[:used].T),
            before=self._before,
            versions=self._joined_versions([(count, version) for _, count, version, _ in others]),
            times_ns=self._times_ns[:used],
            final_keys=final_keys,
            is_tentative=is_tentative,
        )
        fragments, carry = cut(marks, carry)
        sums = self._reward_sums(fragments)
        has_final = np.flatnonzero(fragments["final_row"] >= 0)
        final_places = fragments["final_row"][has_final].copy()
        fragments["final_row"][has_final] = np.arange(len(has_final))
        values = {name: array[:used] for name, array in self._values.items()}
        places = None
        if fragments["length"].sum() < (1 - MAX_UNUSED_PART) * used * self.num_envs:
            places = self._used_places(fragments)
            values = {name: array.reshape(-1, *array.shape[2:]) for name, array in values.items()}
        layouts = layouts_of(self.schema)
        data, final = layouts[DATA], layouts[FINAL]
        tables: dict[str, dict[str, RowSource]] = {
            DATA: {
                name: StagedRows(data, column, values) if places is None else ChosenRows(data, column, values, places)
                for name, column in data.columns.items()
            },
            FINAL: {name: ChosenRows(final, column, finals, final_places) for name, column in final.columns.items()},
        }
        return BlockContent(self.schema, writer, sequence, fragments, sums, tables, dict(self._max_errors)), carry

    def _joined_finals(
        self, parts: list[tuple[int, Mapping[str, np.ndarray]]]
    ) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Join the final rows, `[k, *shape]` per field, and give `env * num_steps + step` of each, `[k]`."""
        keys = [np.zeros(0, np.int64)]
        bounds = {start: start + self._others[start][0] for start, _ in parts}
        for start, stop in bounds.items():
            step, env = ends_of(self._marks[start:stop]).nonzero()
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
        width, num_rows = self.schema[REWARD].num_elements, self.num_envs * self.num_steps
        rewards = _numbers(self.schema[REWARD], self._values[REWARD][: self.num_steps])
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


class _Rows(ABC):
    """Rows of one column (a `RowSource`), made of one array per field."""

    def __init__(self, layout: RowLayout, column: Column, values: Mapping[str, np.ndarray], num_rows: int) -> None:
        self.num_rows, self.row_bytes = num_rows, column.row_bytes
        self._values = {name: values[name] for name in column.offsets}
        self._dtype = layout.numpy_dtype(column)
        self._has_gaps = column.row_bytes > sum(layout.stored[name].row_bytes for name in column.offsets)

    def read(self, start: int, stop: int, out: np.ndarray) -> np.ndarray:
        """Gather the rows `start:stop` into `out`."""
        if self._has_gaps:  # so that files hold no stray memory
            out[:] = 0
        self._fill(start, stop, out.reshape(-1).view(self._dtype))
        return out

    @abstractmethod
    def _fill(self, start: int, stop: int, records: np.ndarray) -> None:
        """Copy every field of the rows."""


class StagedRows(_Rows):
    """All steps `[T, N, *shape]`, env by env: row `env * T + step`."""

    def __init__(self, layout: RowLayout, column: Column, values: Mapping[str, np.ndarray]) -> None:
        self._num_steps, num_envs = next(iter(values.values())).shape[:2]
        super().__init__(layout, column, values, self._num_steps * num_envs)

    def _fill(self, start: int, stop: int, records: np.ndarray) -> None:
        row, used = start, self._num_steps
        while row < stop:  # the end of one env, whole envs, the beginning of another
            env, step = divmod(row, used)
            num_envs = (stop - row) // used if step == 0 else 0
            num_steps = used if num_envs else min(used - step, stop - row)
            num_envs = max(1, num_envs)
            part = records[row - start : row - start + num_envs * num_steps].reshape(num_envs, num_steps)
            for name, values in self._values.items():
                np.copyto(part[name], values[step : step + num_steps, env : env + num_envs].swapaxes(0, 1))
            row += num_envs * num_steps


class ChosenRows(_Rows):
    """Some rows of `[R, *shape]`, in the order of `places`, `[k]` int64."""

    def __init__(self, layout: RowLayout, column: Column, values: Mapping[str, np.ndarray], places: np.ndarray) -> None:
        super().__init__(layout, column, values, len(places))
        self._places = places

    def _fill(self, start: int, stop: int, records: np.ndarray) -> None:
        for name, values in self._values.items():
            records[name] = values[self._places[start:stop]]


class Tally:
    """Counts of kept frames and trajectories.

    Attributes:
        num_trajectories, num_finished_frames: Kept trajectories that have ended, and their frames.
    """

    def __init__(self, num_envs: int, success_only: bool) -> None:
        self.num_trajectories = self.num_finished_frames = 0
        self._success_only = success_only
        #: `[N]`, frames of the trajectories in progress, less the steps that were plain so far.
        self._lengths, self._num_plain = np.zeros(num_envs, np.int64), 0
        self._warn_at = MAX_STEPS_WITHOUT_END * num_envs

    @property
    def num_frames(self) -> int:
        """Kept frames; with `success_only` those of ended trajectories alone."""
        return self.num_finished_frames + (0 if self._success_only else self._num_open_frames)

    @property
    def _num_open_frames(self) -> int:
        return int(self._lengths.sum()) + self._num_plain * len(self._lengths)

    def add(self, rollout: Rollout) -> None:
        """Count the frames of a rollout."""
        marks = rollout.marks
        if rollout.is_plain:
            self._num_plain += len(marks)
            return
        is_present, is_end, start = marks >= PRESENT, ends_of(marks), 0
        for step in is_end.any(axis=1).nonzero()[0].tolist():
            self._lengths += is_present[start : step + 1].sum(axis=0)
            ended = is_end[step].nonzero()[0]
            self.end(ended, (marks[step][ended] & DROPPED) == 0)
            start = step + 1
        self._lengths += is_present[start:].sum(axis=0)

    def end(self, env_ids: np.ndarray, is_kept: np.ndarray | bool) -> None:
        """Count the trajectories in progress of these envs as ended."""
        lengths = (self._lengths[env_ids] + self._num_plain) * is_kept
        self._lengths[env_ids] = -self._num_plain
        self.num_finished_frames += int(lengths.sum())
        self.num_trajectories += int(np.count_nonzero(lengths))

    def warn_if_endless(self, num_accepted: int, folder: str) -> None:
        """Warn once, when so many frames were accepted, if all of them are of trajectories in progress."""
        if num_accepted > self._warn_at:
            self._warn_at = np.iinfo(np.int64).max
            if self._num_open_frames >= num_accepted:
                steps = f"more than {MAX_STEPS_WITHOUT_END} steps in {folder!r}"
                text = f"no trajectory has ended in {steps}: say where they end"
                warnings.warn(f"{text}, by done= or by terminated= and truncated=", RolloutDataWarning, stacklevel=4)


def _empty(pool: BufferPool, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    array: np.ndarray = pool.take(prod(shape) * dtype.itemsize).numpy().view(dtype).reshape(shape)
    return array


def _numbers(field: Field, values: np.ndarray) -> np.ndarray:
    """Give stored values as numbers: bfloat16 stands as uint16."""
    if field.dtype != "bfloat16":
        return values
    return torch.from_numpy(values).view(torch.bfloat16).float().numpy()
