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
from .returns import discounted_sums, generalized_advantage, n_step_returns, rollout_advantage
from .rollout_storage import RolloutStorage
from .transition import HiddenStates, MiniBatch, Transition

__all__ = [
    "BufferEmptyError",
    "BufferPool",
    "Column",
    "Field",
    "FieldTypeError",
    "HiddenStates",
    "MiniBatch",
    "MissingFieldError",
    "RolloutDataError",
    "RolloutOverflowError",
    "RolloutStorage",
    "Schema",
    "SchemaError",
    "Transition",
    "UsageError",
    "discounted_sums",
    "generalized_advantage",
    "n_step_returns",
    "rollout_advantage",
]
