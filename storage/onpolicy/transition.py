"""The records that go into a rollout storage and come out of it.

One rule: these are the established names, in the established order; new ones are added at the
end. What the storages keep of them, and in which shape, is declared in `columns.py`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple

import torch

#: A tensor, or a nested dict of tensors where observations were declared as a dict.
Tree = Any


@dataclasses.dataclass
class Transition:
    """What one step of all envs brings; every value has the envs first, `[B, ...]`."""

    #: Fields that a storage without such a column passes over: callers of every algorithm fill them.
    ignorable: ClassVar[frozenset[str]] = frozenset(
        {"critic_observations", "next_observations", "next_critic_observations"}
    )

    observations: Tree = None
    """`[B, *obs]`, or a dict of such: what the policy saw."""
    critic_observations: Tree = None
    """`[B, *critic_obs]`, or a dict of such: what the critic saw, if that is something else."""
    actions: torch.Tensor | None = None
    """`[B, *A]`: what was done."""
    rewards: torch.Tensor | None = None
    """`[B, R]`, or `[B]` with one reward."""
    dones: torch.Tensor | None = None
    """`[B]` or `[B, 1]` of any dtype: not 0 where this step was the last of its trajectory."""
    values: torch.Tensor | None = None
    """`[B, R]`, or `[B]` with one reward: the critic's value of the observation."""
    actions_log_prob: torch.Tensor | None = None
    """`[B]` or `[B, 1]`: log-probability of the action."""
    action_mean: torch.Tensor | None = None
    """`[B, *A]`: mean of the action distribution; not with declared `policy_outputs`."""
    action_sigma: torch.Tensor | None = None
    """`[B, *A]`: standard deviation of the action distribution; not with declared `policy_outputs`."""
    hidden_states: Any = None
    """The recurrent state before the step: None, a `[layers, B, H]` tensor, or (named) tuples of them."""
    time_outs: torch.Tensor | None = None
    """`[B]` or `[B, 1]`: not 0 where the trajectory was cut and did not end by itself."""
    bootstrap_values: torch.Tensor | None = None
    """`[B, R]`: value of the true final observation; read only where a time-out cut the trajectory."""
    next_observations: Tree = None
    """`[B, *obs]`, or a dict of such: the true next observation, before any reset."""
    next_critic_observations: Tree = None
    """Like `next_observations`, for the critic."""
    action_labels: torch.Tensor | None = None
    """`[B, *A]`: what a teacher would have done."""
    policy_outputs: Tree = None
    """A dict of `[B, ...]`: what a policy that is not Gaussian gives, as declared with the storage."""

    def clear(self) -> None:
        """Set every field to None."""
        for field in dataclasses.fields(self):
            setattr(self, field.name, None)


class HiddenStates(NamedTuple):
    """Recurrent states of an actor and of a critic; None for one that has none."""

    actor: Any = None
    critic: Any = None


class MiniBatch(NamedTuple):
    """Rows for one gradient step: `[M, ...]`, or `[T, n, ...]` in recurrent batches."""

    obs: Tree
    critic_obs: Tree
    """The same object as `obs` if there are no critic observations."""
    actions: torch.Tensor
    values: torch.Tensor
    advantages: torch.Tensor
    returns: torch.Tensor
    old_actions_log_prob: torch.Tensor
    old_mu: torch.Tensor | None
    old_sigma: torch.Tensor | None
    hidden_states: Any = None
    """Recurrent batches: the states at the first step of each trajectory, leaves `[layers, n_traj, H]`."""
    masks: torch.Tensor | None = None
    """Recurrent batches: `[T, n_traj]` bool, False on padding."""
    policy_outputs: Tree = None
    """A dict of `[M, ...]`, in recurrent batches `[T, envs, ...]`: what was declared instead of mean and deviation."""


class ActionLabelMiniBatch(NamedTuple):
    """A `MiniBatch` with the labels of a teacher; without computed returns, these and the advantages are None."""

    obs: Tree
    critic_obs: Tree
    actions: torch.Tensor
    values: torch.Tensor
    advantages: torch.Tensor | None
    returns: torch.Tensor | None
    old_actions_log_prob: torch.Tensor
    old_mu: torch.Tensor | None
    old_sigma: torch.Tensor | None
    hidden_states: Any = None
    masks: torch.Tensor | None = None
    policy_outputs: Tree = None
    action_labels: torch.Tensor | None = None
    """`[M, *A]`; in recurrent batches `[T, envs, *A]`, like the actions."""


class SarsaMiniBatch(NamedTuple):
    """A `MiniBatch` with the observations one step later."""

    obs: Tree
    critic_obs: Tree
    actions: torch.Tensor
    values: torch.Tensor
    advantages: torch.Tensor
    returns: torch.Tensor
    old_actions_log_prob: torch.Tensor
    old_mu: torch.Tensor | None
    old_sigma: torch.Tensor | None
    hidden_states: Any = None
    masks: torch.Tensor | None = None
    policy_outputs: Tree = None
    next_obs: Tree = None
    """Like `obs`, one step later; the true final observation where one was given."""
    next_critic_obs: Tree = None
    """The same object as `next_obs` if there are no critic observations."""
    next_valid: torch.Tensor | None = None
    """`[M, 1]` or `[T, n_traj, 1]` bool: False where `next_obs` belongs to the next trajectory already."""
