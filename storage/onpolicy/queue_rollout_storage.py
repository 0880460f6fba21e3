"""`QueueRolloutStorage`, a storage of the newest steps, and its subclass `ActionLabelRollout`.

The storage grows after each rollout until it reaches its target size. A full storage overwrites its
oldest steps. Readers get the steps in the order of time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import floor, inf
from typing import TYPE_CHECKING, Any

import torch

from ..core import arguments
from ..core.object_summary import described
from ..errors import SchemaError
from ..saving.saved_store import State
from .rollout_storage import RolloutStorage
from .transition_columns import (
    Column,
    MiniBatch,
    ShapeLike,
    Transition,
    batch_type,
    input_column,
    replaced,
)


class QueueRolloutStorage(RolloutStorage):
    """The last `floor(buffer_dilation_ratio * num_transitions_per_env)` steps of all envs.

    Args:
        num_envs, num_transitions_per_env, obs_shape, critic_obs_shape, actions_shape, num_rewards,
            device, generator, policy_outputs: As for `RolloutStorage`; `num_transitions_per_env` is
            one rollout.
        buffer_dilation_ratio: Number of rollouts that fit, a number of at least 1 such as 2.5.

    The storage starts with memory for one rollout. When the memory is full, `clear()` adds memory
    for another rollout, until the target is reached. Then new steps overwrite the oldest steps.
    `step` is the cursor. `compute_returns`, `get_statistics` and the generators use all steps so
    far, even if the storage is not full; `allow_partial` has no effect.
    """

    def __init__(
        self,
        num_envs: int,
        num_transitions_per_env: int,
        obs_shape: ShapeLike,
        critic_obs_shape: ShapeLike | None,
        actions_shape: ShapeLike,
        num_rewards: int = 1,
        device: torch.device | str = "cpu",
        buffer_dilation_ratio: float = 1.0,
        **options: Any,
    ) -> None:
        arguments.options(self, options)
        ratio = arguments.real(
            "buffer_dilation_ratio", buffer_dilation_ratio, ">= 1", lambda x: 1 <= x < inf
        )
        shapes = obs_shape, critic_obs_shape, actions_shape
        super().__init__(num_envs, num_transitions_per_env, *shapes, num_rewards, device, **options)
        self.num_timesteps_each_rollout = self.num_transitions_per_env
        self.buffer_dilation_ratio = ratio
        # 1e-9 is added because ratios such as 1.1 have no exact binary form.
        self.num_target_steps = floor(ratio * self.num_transitions_per_env + 1e-9)
        self.buffer_full = False

    def add_transitions(self, transition: Transition) -> None:
        """Copy one step to the cursor position. A storage of full size overwrites its oldest step.

        Raises:
            RolloutOverflowError: A rollout is complete and the storage must grow: call `clear()`.
            MissingFieldError, SchemaError, FieldTypeError: As for `RolloutStorage`.
        """
        with self._lock:
            super().add_transitions(transition)
            if self.step == self.num_transitions_per_env == self.num_target_steps:
                self.step = 0
                self.buffer_full = True

    def clear(self) -> None:
        """Start the next rollout and keep all steps. A full storage below its target size grows."""
        with self._lock:
            if self.step == self.num_transitions_per_env:
                self.expand_buffer_once()

    def expand_buffer_once(self) -> int:
        """Append up to one rollout of empty steps to every column.

        Returns:
            Number of appended steps; 0 if the storage has its target size.
        """
        with self._lock:
            missing = self.num_target_steps - self.num_transitions_per_env
            num_steps = min(missing, self.num_timesteps_each_rollout)
            if num_steps:
                self._order.wait(is_write=True)
                self._order.keep(self._table.tensors.values())
                self._table.grow(num_steps)
                self._order.record(is_write=True)
            return num_steps

    def untie_buffer_loop(self) -> None:
        """Rotate every column so that the oldest step comes first and the cursor is 0. Idempotent.

        `compute_returns` and the generators call it.
        """
        with self._lock, torch.no_grad():
            if self.buffer_full and self.step:
                self._order.wait(is_write=True)
                self._table.roll(self.step)
                self._order.record(is_write=True)
                self.step = 0

    def _put_in_order(self) -> None:
        self.untie_buffer_loop()

    def _arguments(self) -> dict[str, Any]:
        steps = self.num_timesteps_each_rollout
        ratio = self.buffer_dilation_ratio
        return {
            **super()._arguments(),
            "num_transitions_per_env": steps,
            "buffer_dilation_ratio": ratio,
        }

    def _get_state(self) -> State:
        state = super()._get_state()
        state.numbers["buffer_full"] = self.buffer_full
        return state

    def _set_state(self, numbers: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        with self._lock:
            if not isinstance(numbers["buffer_full"], bool):
                raise SchemaError(
                    "'buffer_full' of the state must be True or False, got "
                    f"{numbers['buffer_full']!r}."
                )
            super()._set_state(numbers, tensors)
            self.buffer_full = numbers["buffer_full"]

    def _row_limits(self) -> tuple[int, int]:
        return self.num_timesteps_each_rollout, self.num_target_steps

    def _num_rows_for(self, allow_partial: bool) -> int:
        return (
            self.num_transitions_per_env
            if self.buffer_full
            else super()._num_rows_for(allow_partial=True)
        )


if TYPE_CHECKING:
    _Labelled = MiniBatch
else:  # Type checkers cannot read fields that are computed.
    _Labelled = batch_type([input_column("action_labels", batch="action_labels")], MiniBatch)


class ActionLabelMiniBatch(_Labelled):
    """A `MiniBatch` whose last field is `action_labels`, `[M, *A]`. Returns may be None."""

    __slots__ = ()
    action_labels: Any
    __repr__ = described


class ActionLabelRollout(QueueRolloutStorage):
    """A `QueueRolloutStorage` with the actions that a teacher would have taken, for distillation.

    `Transition.action_labels` `[B, *A]` is required. `action_labels` is the last field of
    mini-batches. Generators do not need `compute_returns`: if it was not called since the last
    step, returns and advantages are None.
    """

    MiniBatch = ActionLabelMiniBatch
    mini_batch_generator: Callable[..., Iterator[ActionLabelMiniBatch]]
    recurrent_mini_batch_generator: Callable[..., Iterator[ActionLabelMiniBatch]]
    needs_returns = False

    def declare_columns(self) -> list[Column]:
        """Return the columns of `QueueRolloutStorage` and `action_labels`."""
        labels = input_column("action_labels", self.actions_shape, "action_labels")
        return replaced(super().declare_columns(), labels)
