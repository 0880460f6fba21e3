"""`SimpleReplayBuffer`: replacement for the replay buffer of FastTD3 and FastSAC.

This module only converts names and types. `tensordict` is imported when a batch is drawn. One line
of the trainer changes:

    from storage.adapters.fast_td3 import SimpleReplayBuffer
"""

from __future__ import annotations

from typing import Any

import torch

from ..core import arguments
from ..errors import SchemaError
from ..replay.dict_buffer import DictBuffer
from .step_pairs import StepPairs

#: Field that marks steps after which an environment was reset without an end flag.
_CUT = "cut"
#: Field with the number of each step.
#: The difference of two such numbers is the number of rewards between the steps.
_STEP = "step"
_OBSERVATIONS = "observations"
_CRITIC = "critic_observations"


class SimpleReplayBuffer:
    """Replay buffer for the trainers of FastTD3 and FastSAC, which stores each observation once.

    Args:
        n_env: Number of environments.
        buffer_size: Number of steps of each environment.
        n_obs, n_act, n_critic_obs: Sizes of an observation, an action and a critic's observation.
        asymmetric_obs: Whether steps have `critic_observations`.
        playground_mode: Whether the critic's observation begins with the policy's observation. Then
            only the remaining part is stored.
        n_steps: Number of steps n whose rewards are summed in a transition.
        gamma: Discount per step in these sums.
        device: Device of the steps and the batches.
        generator: Random generator of the samples, or a seed; see `DictBuffer`.

    Batches differ from those of FastTD3 in two points. Steps are drawn uniformly over all
    environments, not equally many from each. Steps whose next observation or sum of n rewards is
    not complete yet are not drawn. These are at least the two newest steps of an environment.
    """

    def __init__(
        self,
        n_env: int,
        buffer_size: int,
        n_obs: int,
        n_act: int,
        n_critic_obs: int,
        asymmetric_obs: bool = False,
        playground_mode: bool = False,
        n_steps: int = 1,
        gamma: float = 0.99,
        device: torch.device | str | None = None,
        *,
        generator: torch.Generator | int | None = None,
    ) -> None:
        self.n_env = arguments.whole("n_env", n_env, 1)
        self.buffer_size = arguments.whole("buffer_size", buffer_size, 1)
        self.n_steps = arguments.whole("n_steps", n_steps, 1)
        self.gamma = gamma
        self.asymmetric_obs = arguments.flag("asymmetric_obs", asymmetric_obs)
        self.playground_mode = (
            arguments.flag("playground_mode", playground_mode) and self.asymmetric_obs
        )
        self._num_observed = n_obs
        self._sizes = {_OBSERVATIONS: n_obs, "actions": n_act}
        if self.asymmetric_obs:
            self._sizes[_CRITIC] = n_critic_obs
        buffer = DictBuffer(
            self.n_env * self.buffer_size,
            "cpu" if device is None else device,
            num_envs=self.n_env,
            end_key=["dones", "truncations", _CUT],
            generator=generator,
        )
        self._pairs = StepPairs(buffer, (_CUT,))
        self._num_added = 0

    @property
    def buffer(self) -> DictBuffer:
        """The buffer that stores the steps."""
        return self._pairs.buffer

    @property
    def num_bytes(self) -> int:
        """Memory reserved for the steps, in bytes."""
        return self._pairs.num_bytes

    def extend(self, tensor_dict: Any) -> None:
        """Add one step of all environments.

        Args:
            tensor_dict: `TensorDict` or nested dict of `[n_env, ...]` tensors: `observations`,
                `actions`, `critic_observations` if asymmetric, and `next` with `observations`,
                `critic_observations`, `rewards`, `dones` and `truncations`. Where `dones` is set,
                the next observations are those before the reset.

        Raises:
            SchemaError: A tensor has another size.
        """
        steps = {name: self._checked(tensor_dict, name) for name in self._sizes}
        following = {
            name: self._checked(tensor_dict["next"], name)
            for name in self._sizes
            if name != "actions"
        }
        if self.playground_mode:
            for columns in (steps, following):
                columns[_CRITIC] = columns[_CRITIC][..., self._num_observed :]
        ends = tensor_dict["next"]
        steps["rewards"] = self._column(ends, "rewards")
        for name in ("dones", "truncations"):
            steps[name] = self._column(ends, name) != 0
        steps[_CUT] = torch.zeros_like(steps["dones"])
        if self.n_steps > 1:
            for columns, number in ((steps, self._num_added), (following, self._num_added + 1)):
                columns[_STEP] = torch.full_like(steps["dones"], number, dtype=torch.int64)
        self._pairs.add(steps, following)
        self._num_added += 1

    def sample(self, batch_size: int) -> Any:
        """Draw `n_env * batch_size` transitions: a `TensorDict` with the fields of `extend`.

        Rewards are discounted sums over `effective_n_steps` steps, an additional field of `next`.
        The flags (int64) and the next observations belong to the last step of each sum.

        Raises:
            UsageError, BufferEmptyError: No transition is complete.
        """
        from tensordict import TensorDict

        batch_size = arguments.whole("batch_size", batch_size, 1)
        num_draws = self.n_env * batch_size
        is_summed = self.n_steps > 1
        transitions = self.buffer.sample_transitions(
            num_draws,
            next_keys=(_OBSERVATIONS, *[_CRITIC] * self.asymmetric_obs, *[_STEP] * is_summed),
            num_steps=self.n_steps,
            gamma=self.gamma if is_summed else None,
            reward_key="rewards",
        )
        following = transitions["next"]
        if self.playground_mode:
            for columns in (transitions, following):
                columns[_CRITIC] = torch.cat([columns[_OBSERVATIONS], columns[_CRITIC]], 1)
        following["rewards"] = transitions["rewards"].squeeze(1)
        for name in ("dones", "truncations"):
            following[name] = transitions[name].squeeze(1).long()
        if is_summed:
            num_taken = (following.pop(_STEP) - transitions[_STEP]).squeeze(1)
        else:
            num_taken = torch.ones_like(following["dones"])
        following["effective_n_steps"] = num_taken
        batch = {name: transitions[name] for name in self._sizes}
        batch["next"] = TensorDict(following, batch_size=[num_draws])
        return TensorDict(batch, batch_size=[num_draws])

    def _checked(self, columns: Any, name: str) -> torch.Tensor:
        """Check observations or actions of one step and return them as `[1, n_env, size]`."""
        column: torch.Tensor = columns[name]
        expected = [self.n_env, self._sizes[name]]
        if list(column.shape) != expected:
            raise SchemaError(
                f"field {name!r} has shape {tuple(column.shape)}, expected {tuple(expected)}."
            )
        return column.unsqueeze(0)

    def _column(self, columns: Any, name: str) -> torch.Tensor:
        """Check rewards or flags of one step and return them as `[1, n_env, 1]`."""
        column: torch.Tensor = columns[name]
        if column.numel() != self.n_env:
            raise SchemaError(
                f"field {name!r} has shape {tuple(column.shape)}, expected ({self.n_env},)."
            )
        return column.reshape(1, self.n_env, 1)
