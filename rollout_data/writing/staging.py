"""Staging: the frames of a block while it is being filled.

One rule: staging decides nothing: `step_buffer.py` holds the values, `cut.py` finds the fragments.
"""

from __future__ import annotations

import time
from functools import lru_cache

import numpy as np

from storage.core.buffer_pool import BufferPool
from storage.core.fields import Schema
from storage.core.host_arrays import on_host

from ..format.block_file import BlockContent
from ..format.header import DATA, DROPPED, ENDS, FINAL, FINAL_OBSERVATION_ONLY, TERMINATED, TRUNCATED, layouts_of
from ..format.row_source import RowSource
from .cut import PRESENT, Carry, Marks, cut
from .record import REWARD, Rollout, num_nonfinite
from .step_buffer import ChosenRows, StagedRows, StepBuffer

#: A block is written without its unused rows when more than this part of them is unused.
MAX_UNUSED_PART = 0.25
_MIN_FINALS = 16
#: Address space for one block: enough for any file, and no more than any system gives.
MAX_STAGED_BYTES = 4 << 30


class Staging:
    """The steps that make the next block.

    Args:
        schema: All fields, as users see them.
        num_envs: N.
        max_steps: How many steps it takes at most. There is room for all at once, as memory that was never
            touched costs nothing: growing in the middle of a recording would keep a caller waiting.
        pool: Where its memory comes from and returns to.
        num_nonfinite: Rewards that were NaN or infinite in the stagings before.

    Attributes:
        num_steps: Steps taken.
        started_s: Monotonic time of the first step, or None.
        is_sealed: No further step may be put: the block is being published.
        is_published: Its publication has begun; a second one must do nothing.
    """

    def __init__(self, schema: Schema, num_envs: int, max_steps: int, pool: BufferPool, num_nonfinite: int = 0) -> None:
        self.schema = schema
        self.num_envs = num_envs
        self.max_steps = max_steps
        layouts = layouts_of(schema)
        self._data = StepBuffer(layouts[DATA], (num_envs,), max_steps, pool)
        self._final = StepBuffer(layouts[FINAL], (), _MIN_FINALS, pool)
        self._bits = np.zeros((max_steps, num_envs), np.uint8)
        self._times_ns = np.zeros(max_steps, np.int64)
        self._before = np.zeros(num_envs, np.uint8)
        self._versions: list[np.ndarray | int] = []
        self._final_places: list[tuple[np.ndarray, np.ndarray]] = []
        self._num_finals = 0
        self._num_nonfinite, self._num_counted = num_nonfinite, 0
        self.num_steps = 0
        self.started_s: float | None = None
        self.is_sealed = False
        self.is_published = False

    @property
    def room(self) -> int:
        return self.max_steps - self.num_steps

    @property
    def is_empty(self) -> bool:
        return self.num_steps == 0 and not self._before.any()

    @property
    def marks_view(self) -> np.ndarray:
        """`[T, N]` uint8: the marks of the frames."""
        return self._bits[: self.num_steps]

    def put(self, rollout: Rollout, time_ns: int) -> None:
        """Copy a rollout of at most `room` steps."""
        start, count = self.num_steps, rollout.num_steps
        self._data.put(start, rollout.fields)
        bits = _bits(rollout)
        if count == 1:
            self._bits[start], self._times_ns[start] = bits[0], time_ns
        else:
            self._bits[start : start + count] = bits
            self._times_ns[start : start + count] = time_ns + np.arange(count)
        finals = self._put_finals(rollout)
        num_finals = self._num_finals if finals is None else self._num_finals + len(finals[0])
        version = rollout.policy_version
        versions = [version] * count if isinstance(version, int) else list(version.copy())
        started_s = time.monotonic() if self.started_s is None else self.started_s
        # From here on the steps exist: without a call, and so without a Ctrl-C in between.
        self._versions += versions
        if finals is not None:
            self._final_places += [(finals[0] + start, finals[1])]
        self._num_finals, self.num_steps, self.started_s = num_finals, start + count, started_s

    def num_nonfinite_rewards(self) -> int:
        """Count the rewards that are NaN or infinite, here and in the stagings before; each step once."""
        if self._num_counted < self.num_steps:
            new, number = slice(self._num_counted, self.num_steps), self._num_nonfinite
            for name in self.schema.below(REWARD):
                rewards = self._data.field(name, self.num_steps)[new]
                number += num_nonfinite(rewards, self._bits[new] > 0)
            self._num_nonfinite, self._num_counted = number, self.num_steps
        return self._num_nonfinite

    def end(self, env_ids: np.ndarray, flag: int) -> None:
        """End the trajectories in progress of these envs after their last frame."""
        bits = self._bits[: self.num_steps, env_ids]
        is_frame = (bits & PRESENT) > 0
        has_frame = is_frame.any(axis=0)
        if has_frame.any():
            env = env_ids[has_frame]
            last = self.num_steps - 1 - np.argmax(is_frame[::-1, has_frame], axis=0)
            is_open = (self._bits[last, env] & ENDS) == 0
            self._bits[last[is_open], env[is_open]] |= np.uint8(flag)
        self._before[env_ids[~has_frame]] |= np.uint8(flag)

    def content(self, writer: str, sequence: int, carry: Carry, is_tentative: bool) -> tuple[BlockContent, Carry]:
        """Cut the staged frames and give what the block holds; its rows are read out of this staging."""
        used = self.num_steps
        marks = Marks(
            np.ascontiguousarray(self._bits[:used].T),
            self._before,
            self._joined_versions(),
            self._times_ns[:used],
            self._final_keys(),
            is_tentative,
        )
        fragments, carry = cut(marks, carry)
        sums = self._reward_sums(fragments)
        final = np.flatnonzero(fragments["final_row"] >= 0)
        final_places = fragments["final_row"][final].copy()
        fragments["final_row"][final] = np.arange(len(final))
        places = None
        if fragments["length"].sum() < (1 - MAX_UNUSED_PART) * used * self.num_envs:
            places = self._used_places(fragments)
        data, finals = self._data, self._final
        tables: dict[str, dict[str, RowSource]] = {
            DATA: {
                name: StagedRows(data, column, used) if places is None else ChosenRows(data, column, places)
                for name, column in data.layout.columns.items()
            },
            FINAL: {name: ChosenRows(finals, column, final_places) for name, column in finals.layout.columns.items()},
        }
        errors = {
            name: max(data.max_errors.get(name, 0.0), finals.max_errors.get(name, 0.0)) for name in data.max_errors
        }
        return BlockContent(self.schema, writer, sequence, fragments, sums, tables, errors), carry

    def _put_finals(self, rollout: Rollout) -> tuple[np.ndarray, np.ndarray] | None:
        """Copy the final rows behind those that are there; give the (step, env) of each, or None without any."""
        if rollout.finals is None:
            return None
        step, env = np.nonzero(rollout.terminated | rollout.truncated)
        needed = self._num_finals + len(step)
        if needed > self._final.capacity:
            self._final.reserve(max(needed, 2 * self._final.capacity), self._num_finals)
        self._final.put(self._num_finals, rollout.finals)
        return step, env

    def _final_keys(self) -> np.ndarray:
        if not self._final_places:
            return np.zeros(0, np.int64)
        steps, envs = (np.concatenate(part) for part in zip(*self._final_places, strict=True))
        return envs * self.num_steps + steps

    def _joined_versions(self) -> np.ndarray | int:
        if all(isinstance(version, int) for version in self._versions) and len(set(self._versions)) <= 1:
            return self._versions[0] if self._versions else -1
        steps = [np.broadcast_to(version, (self.num_envs,)) for version in self._versions]
        return np.ascontiguousarray(np.stack(steps, axis=1))

    def _reward_sums(self, fragments: np.ndarray) -> np.ndarray:
        """Sum the rewards of each fragment: `[F, R]` float64."""
        if REWARD not in self.schema:
            return np.zeros((len(fragments), 0))
        width, num_rows = self.schema[REWARD].num_elements, self.num_envs * self.num_steps
        rewards = on_host(self._data.field(REWARD, self.num_steps))
        values = np.zeros((num_rows + 1, width))  # the last row is where the last fragment ends
        sums = np.zeros((len(fragments), width))
        long = np.flatnonzero(fragments["length"] > 0)
        bounds = np.empty((len(long), 2), np.int64)
        bounds[:, 0] = fragments["row"][long]
        bounds[:, 1] = bounds[:, 0] + fragments["length"][long]
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


def _bits(rollout: Rollout) -> np.ndarray:
    if rollout.is_plain:
        return _plain_bits(rollout.present.shape)
    bits = np.where(rollout.terminated, np.uint8(PRESENT | TERMINATED), np.uint8(PRESENT))
    if rollout.truncated.any():
        bits |= rollout.truncated * np.uint8(TRUNCATED)
    if not rollout.present.all():
        bits[~rollout.present] = 0
    if rollout.is_kept is not None:
        bits |= ((rollout.terminated | rollout.truncated) & ~rollout.is_kept) * np.uint8(DROPPED)
    if rollout.finals is not None and not rollout.has_final_privileged:
        bits |= (rollout.terminated | rollout.truncated) * np.uint8(FINAL_OBSERVATION_ONLY)
    return bits


@lru_cache(maxsize=16)
def _plain_bits(shape: tuple[int, ...]) -> np.ndarray:
    bits = np.full(shape, PRESENT, np.uint8)
    bits.flags.writeable = False
    return bits
