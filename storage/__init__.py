"""Reinforcement-learning experience in memory: rollout storages and replay buffers."""

from .buffer_pool import BufferPool
from .columns import Column
from .errors import (
    BufferEmptyError,
    FieldTypeError,
    MissingFieldError,
    RolloutDataError,
    RolloutOverflowError,
    SchemaError,
    UsageError,
)
from .fields import Field, Schema
from .padding import split_and_pad_trajectories, unpad_trajectories
from .queue_rollout_storage import ActionLabelRollout, QueueRolloutStorage
from .replay_buffer import ReplayBuffer
from .returns import discounted_sums, generalized_advantage, n_step_returns, rollout_advantage
from .rollout_storage import RolloutStorage
from .sarsa_rollout_storage import SarsaRolloutStorage
from .snapshot import load_store
from .transition import ActionLabelMiniBatch, HiddenStates, MiniBatch, SarsaMiniBatch, Transition

__all__ = [
    "ActionLabelMiniBatch",
    "ActionLabelRollout",
    "BufferEmptyError",
    "BufferPool",
    "Column",
    "Field",
    "FieldTypeError",
    "HiddenStates",
    "MiniBatch",
    "MissingFieldError",
    "QueueRolloutStorage",
    "ReplayBuffer",
    "RolloutDataError",
    "RolloutOverflowError",
    "RolloutStorage",
    "SarsaMiniBatch",
    "SarsaRolloutStorage",
    "Schema",
    "SchemaError",
    "Transition",
    "UsageError",
    "discounted_sums",
    "generalized_advantage",
    "load_store",
    "n_step_returns",
    "rollout_advantage",
    "split_and_pad_trajectories",
    "unpad_trajectories",
]
