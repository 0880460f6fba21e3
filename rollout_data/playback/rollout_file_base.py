"""The template of datasets that play recorded rollouts back, env by env and in order.

Resets, batches, iteration and lookup by time are written here once. A subclass reads the frames.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch.utils.data import IterableDataset, default_collate

from storage.core import arguments
from storage.core.arguments import whole
from storage.core.object_summary import Shown
from storage.errors import UsageError

from ..remote.locations import DataDirs
from ..sources.processes.process_group import is_in_worker

#: Maximum number of streams. A larger number is a mistake, and each stream needs some memory.
_MAX_ENVS = 1 << 24

EnvIds = Sequence[int] | torch.Tensor | None
#: Type of the batches of a stream: `Transition` for `RolloutDataset`.
Batch = TypeVar("Batch")


class RolloutFileBase(Shown, IterableDataset[Batch], ABC, Generic[Batch]):
    """An endless or finite stream of `[T, num_envs, ...]` batches from files.

    A subclass implements `reset_all`, `refresh_handlers`, `get_buffer` and `fill_transition`.
    `get_batch(T)` calls `fill_transition` for each step. A subclass that can fill many steps at
    once overrides `fill_rollout`.

    Args:
        data_dir: A folder, a file or a `Recording`, or several.
        num_envs: Number of parallel streams in a batch.
        device: Device of the batches. None: CUDA if it is available, else the CPU. Batches of a
            DataLoader worker are always on the CPU.

    Attributes:
        data_dir: The argument `data_dir`.
        num_envs: The argument `num_envs`.
        all_env_ids: The ids 0, 1, ..., int64 `[num_envs]` on the CPU.
        num_transitions_per_env: Number of steps of the batches of an iteration. None: one step
            without a time axis.
    """

    num_transitions_per_env: int | None = None

    def __init__(
        self,
        data_dir: DataDirs,
        num_envs: int,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.data_dir = data_dir
        self.num_envs = whole("num_envs", num_envs, 1, _MAX_ENVS)
        self._wanted_device: torch.device | None = None
        if device is not None:
            self._wanted_device = arguments.device("device", device)
        self.all_env_ids = torch.arange(self.num_envs, device="cpu")
        self._is_started = False

    @property
    def device(self) -> torch.device:
        """Device of the batches."""
        if is_in_worker():
            return torch.device("cpu")
        if self._wanted_device is None:
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return self._wanted_device

    @abstractmethod
    def reset_all(self) -> None:
        """Start every env at the first trajectories."""

    @abstractmethod
    def refresh_handlers(self, env_ids: torch.Tensor) -> None:
        """Move each of `env_ids` (int64, unique, in range) to its next trajectory."""

    @abstractmethod
    def get_buffer(self, num_transitions_per_env: int | None = None) -> Batch:
        """Allocate a batch: a named tuple or a mapping of tensors.

        The tensors are `[T, num_envs, ...]`, or `[num_envs, ...]` for None.
        """

    @abstractmethod
    def fill_transition(self, buffer: Batch, env_ids: torch.Tensor | None = None) -> Batch:
        """Write the next step of `env_ids` (None: all) into their rows of a buffer `[num_envs, ...]`.

        The cursors of these envs advance by one frame.
        """

    def fill_rollout(self, buffer: Batch, num_transitions_per_env: int) -> Batch:
        """Write the next T steps of all envs into a `[T, num_envs, ...]` buffer; return the buffer."""
        for step in range(whole("num_transitions_per_env", num_transitions_per_env, 1)):
            self.fill_transition(_at_step(buffer, step))
        return buffer

    def reset(self, env_ids: EnvIds = None) -> None:
        """Reset the stream (None or all ids), or move `env_ids` to their next trajectories.

        Raises:
            UsageError: An id is out of range, or occurs twice.
        """
        ids = self._checked_ids(env_ids)
        if len(ids) == self.num_envs or not self._is_started:
            self.reset_all()
            self._is_started = True
        else:
            self.refresh_handlers(ids)

    def get_batch(self, num_transitions_per_env: int | None = None) -> Batch:
        """Return the next batch, `[T, num_envs, ...]`, or `[num_envs, ...]` without T.

        The first call resets the stream.

        Raises:
            DatasetExhausted: All passes were delivered. It is a `StopIteration` too.
        """
        steps = self._checked_steps(num_transitions_per_env)
        self._ensure_started()
        buffer = self.get_buffer(steps)
        if steps is None:
            filled = self.fill_transition(buffer)
            return buffer if filled is None else filled
        return self.fill_rollout(buffer, steps)

    def get_transition_batch(self) -> tuple[Any, Any, Any, torch.Tensor, dict[str, Any]]:
        """Return the next step as `(observation, action, reward, done, info)`.

        Fields that were not recorded are None. `info` contains `transition`, the batch that
        `get_batch()` would return; `time_outs`, if they are known; and `end_unknown`, which is False
        everywhere if all ends are known.
        """
        transition = self.get_batch()
        field = transition.get if isinstance(transition, Mapping) else partial(getattr, transition)
        done: Any = field("done", None)
        time_outs = field("timeout", None)
        end_unknown = field("end_unknown", None)
        if end_unknown is None:
            end_unknown = torch.zeros(self.num_envs, dtype=torch.bool, device=self.device)
        info: dict[str, Any] = {} if time_outs is None else {"time_outs": time_outs}
        info |= {"end_unknown": end_unknown, "transition": transition}
        return field("observation", None), field("action", None), field("reward", None), done, info

    def __iter__(self) -> Iterator[Batch]:
        """Reset all envs to the first pass and return this object. All iterators share its cursors.

        `get_batch` continues without a reset. To read data without moving the cursors, use another
        dataset.
        """
        refuse_collation()
        self.reset()
        return self

    def __next__(self) -> Batch:
        return self.get_batch(self.num_transitions_per_env)

    def get_batch_by_time(
        self, time_s: float | Sequence[float] | torch.Tensor, env_ids: EnvIds = None
    ) -> tuple[Any, torch.Tensor]:
        """Return the frames of the played trajectories at certain times. No cursor moves.

        Args:
            time_s: Seconds since the start of each env's trajectory: a number, or `[len(env_ids)]`.
            env_ids: Ids of envs; None: all.

        Returns:
            A batch `[len(env_ids), ...]`, and whether each time is inside the trajectory, bool
            `[len(env_ids)]`. For a time outside, the row is the nearest frame.

        Raises:
            UsageError: The frame rate of the data is unknown.
        """
        self._ensure_started()
        ids = self._checked_ids(env_ids)
        if not len(ids):
            raise UsageError("env_ids is empty. Pass the id of at least one env.")
        try:
            times = torch.as_tensor(time_s, dtype=torch.float64, device="cpu").broadcast_to(
                (len(ids),)
            )
        except (TypeError, ValueError, RuntimeError) as cause:
            raise UsageError(
                f"time_s must be seconds of shape () or ({len(ids)},), got {repr(time_s)[:100]}."
            ) from cause
        last = self.reference_num_frames(ids) - 1
        position = times * self.frame_rate_hz
        # Times are often frame numbers divided by the rate: allow for the rounding error.
        valid = (position >= -1e-6) & (position <= last + 1e-6)
        inside = torch.minimum(torch.nan_to_num(position).clamp(min=0.0), last.to(torch.float64))
        return self.read_frames_at(ids, inside), valid.to(self.device)

    def reference_length_s(self, env_ids: EnvIds = None) -> torch.Tensor:
        """Seconds from the first to the last frame of each env's trajectory, float32 `[len(env_ids)]`."""
        self._ensure_started()
        frames = self.reference_num_frames(self._checked_ids(env_ids))
        return (
            ((frames - 1).to(torch.float64) / self.frame_rate_hz).to(torch.float32).to(self.device)
        )

    @property
    def frame_rate_hz(self) -> float:
        """Frames per second of the recording."""
        raise UsageError(
            f"the frame rate of {str(self.data_dir)!r} is unknown. Override frame_rate_hz in "
            f"{type(self).__name__}."
        )

    def reference_num_frames(self, env_ids: torch.Tensor) -> torch.Tensor:
        """Frames of each env's trajectory, int64 `[len(env_ids)]`."""
        raise UsageError(
            f"{type(self).__name__} does not support reading by time. Override reference_num_frames "
            "and read_frames_at."
        )

    def read_frames_at(self, env_ids: torch.Tensor, position: torch.Tensor) -> Any:
        """Return the frames at `position` (float64, in frames) as a batch `[len(env_ids), ...]`."""
        # This raises the error that reading by time is not supported.
        return self.reference_num_frames(env_ids)

    def _ensure_started(self) -> None:
        if not self._is_started:
            self.reset()

    def _checked_ids(self, env_ids: EnvIds) -> torch.Tensor:
        if env_ids is None or env_ids is self.all_env_ids:
            return self.all_env_ids
        ids = arguments.env_ids("env_ids", env_ids, self.num_envs)
        if len(np.unique(ids)) != len(ids):
            raise UsageError(f"env_ids must be unique, got {ids.tolist()}.")
        return torch.from_numpy(ids)

    def _checked_steps(self, steps: int | None) -> int | None:
        return None if steps is None else whole("num_transitions_per_env", steps, 1)


def refuse_collation() -> None:
    """Raise `UsageError` if the iterating `DataLoader` would collate the batches of the stream.

    A dataset does not know its loader, so this function reads the local variables of the caller of
    `__iter__`.
    """
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_name in ("refuse_collation", "__iter__"):
        frame = frame.f_back
    loading = {} if frame is None else frame.f_locals
    if loading.get("auto_collation") and loading.get("collate_fn") is default_collate:
        raise UsageError(
            "the DataLoader would collate batches again, since the dataset yields batches. "
            "Use DataLoader(dataset, batch_size=None)."
        )


def _at_step(buffer: Any, step: int) -> Any:
    """Return a view of one step of a buffer: tensors without their first axis, and other values."""
    if isinstance(buffer, torch.Tensor):
        return buffer[step]
    if isinstance(buffer, Mapping):
        return {key: _at_step(value, step) for key, value in buffer.items()}
    if isinstance(buffer, tuple) and hasattr(buffer, "_fields"):
        return type(buffer)(*(_at_step(value, step) for value in buffer))
    if isinstance(buffer, (tuple, list)):
        return type(buffer)(_at_step(value, step) for value in buffer)
    return buffer
