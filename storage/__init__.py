"""Reinforcement-learning experience in memory: rollout storages and replay buffers."""

from .buffer_files import UnknownBufferError, load_buffer
from .buffer_pool import BufferPool
from .checkpoint import (
    AsyncCheckpointSaver,
    load_checkpoint,
    load_checkpoint_meta,
    load_checkpoint_parallel,
)
from .columns import Column
from .compressed import CompressedTensorDict
from .dict_buffer import DictBuffer
from .episode_buffer import TrajectoryDictBuffer
from .errors import (
    BufferEmptyError,
    DataFileError,
    FieldTypeError,
    MissingFieldError,
    RolloutDataError,
    RolloutOverflowError,
    SchemaError,
    UsageError,
)
from .fields import Field, Schema
from .image_sequences import compress_image_seq, decompress_image_seq, decompress_many
from .managed.advanced_replay_buffer import AdvancedReplayBuffer
from .managed.buffer_manager import BufferManager
from .managed.buffer_monitor import BufferMonitor
from .managed.episode_replay_buffer import EpisodeReplayBuffer
from .managed.naive_replay_buffer import NaiveReplayBuffer
from .managed.prioritized_windows import PrioritizedWindows, sequence_priorities
from .managed.rate_limiter import RateLimitedError, RateLimiter
from .monitors import InTickMonitor, NaturalMonitor, OutTickMonitor, PerformanceMonitor, plot_snapshots
from .padding import split_and_pad_trajectories, unpad_trajectories
from .prefetch import PipelinedDataCollector
from .prefix_sum import PrefixSum
from .priorities import motion_priorities
from .queue_rollout_storage import ActionLabelRollout, QueueRolloutStorage
from .replay_buffer import ReplayBuffer
from .returns import discounted_sums, generalized_advantage, n_step_returns, rollout_advantage
from .ring import RingStore
from .rollout_storage import RolloutStorage
from .sarsa_rollout_storage import SarsaRolloutStorage
from .segment_tree import MaxSegmentTree, MinSegmentTree, SegmentTree, SumSegmentTree
from .snapshot import load_store
from .sum_tree import MaxTree, MinTree, SumTree
from .trajectory_buffer import TrajectoryDictBufferMultiDim
from .transition import ActionLabelMiniBatch, HiddenStates, MiniBatch, SarsaMiniBatch, Transition
from .transitions import TransitionRequest
from .z_buffer import ZBuffer

__all__ = [
    "ActionLabelMiniBatch",
    "ActionLabelRollout",
    "AdvancedReplayBuffer",
    "AsyncCheckpointSaver",
    "BufferEmptyError",
    "BufferManager",
    "BufferMonitor",
    "BufferPool",
    "Column",
    "CompressedTensorDict",
    "DataFileError",
    "DictBuffer",
    "EpisodeReplayBuffer",
    "Field",
    "FieldTypeError",
    "HiddenStates",
    "InTickMonitor",
    "MaxSegmentTree",
    "MaxTree",
    "MinSegmentTree",
    "MinTree",
    "MiniBatch",
    "MissingFieldError",
    "NaiveReplayBuffer",
    "NaturalMonitor",
    "OutTickMonitor",
    "PerformanceMonitor",
    "PipelinedDataCollector",
    "PrefixSum",
    "PrioritizedWindows",
    "QueueRolloutStorage",
    "RateLimitedError",
    "RateLimiter",
    "ReplayBuffer",
    "RingStore",
    "RolloutDataError",
    "RolloutOverflowError",
    "RolloutStorage",
    "SarsaMiniBatch",
    "SarsaRolloutStorage",
    "Schema",
    "SchemaError",
    "SegmentTree",
    "SumSegmentTree",
    "SumTree",
    "TrajectoryDictBuffer",
    "TrajectoryDictBufferMultiDim",
    "Transition",
    "TransitionRequest",
    "UnknownBufferError",
    "UsageError",
    "ZBuffer",
    "compress_image_seq",
    "decompress_image_seq",
    "decompress_many",
    "discounted_sums",
    "generalized_advantage",
    "load_buffer",
    "load_checkpoint",
    "load_checkpoint_meta",
    "load_checkpoint_parallel",
    "load_store",
    "motion_priorities",
    "n_step_returns",
    "plot_snapshots",
    "rollout_advantage",
    "sequence_priorities",
    "split_and_pad_trajectories",
    "unpad_trajectories",
]
