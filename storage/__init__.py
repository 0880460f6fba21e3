"""Reinforcement-learning experience in memory: rollout storages and replay buffers."""

from .checkpoints.files import load_checkpoint, load_checkpoint_meta, load_checkpoint_parallel
from .checkpoints.saver import AsyncCheckpointSaver
from .codecs.compressed import CompressedDataCollector, CompressedTensorDict
from .codecs.images import (
    compress_image,
    compress_image_seq,
    decompress_image,
    decompress_image_seq,
    decompress_many,
)
from .core.fields import Field, Schema
from .core.memory import BufferPool
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
from .live.monitors import (
    BufferMonitor,
    InTickMonitor,
    NaturalMonitor,
    OutTickMonitor,
    PerformanceMonitor,
    plot_snapshots,
)
from .live.prefetch import PipelinedDataCollector
from .live.rates import RateLimitedError, RateLimiter
from .managed.advanced import AdvancedReplayBuffer
from .managed.buffer import NaiveReplayBuffer
from .managed.episodes import EpisodeReplayBuffer
from .managed.manager import BufferManager
from .onpolicy.columns import Column, HiddenStates, MiniBatch, Transition
from .onpolicy.mini_batches import split_and_pad_trajectories, unpad_trajectories
from .onpolicy.queue_rollout_storage import ActionLabelMiniBatch, ActionLabelRollout, QueueRolloutStorage
from .onpolicy.returns import discounted_sums, generalized_advantage, n_step_returns, rollout_advantage
from .onpolicy.rollout_storage import RolloutStorage
from .onpolicy.sarsa_rollout_storage import SarsaMiniBatch, SarsaRolloutStorage
from .prioritized.segment_tree import MaxSegmentTree, MinSegmentTree, SegmentTree, SumSegmentTree
from .prioritized.sum_tree import MaxTree, MinTree, SumTree
from .prioritized.windows import PrioritizedWindows, sequence_priorities
from .replay.dict_buffer import DictBuffer, ZBuffer
from .replay.episode_buffer import PrefixSum, TrajectoryDictBuffer
from .replay.replay_buffer import ReplayBuffer
from .replay.trajectory_buffer import TrajectoryDictBufferMultiDim, motion_priorities
from .ring.ring import RingStore
from .ring.transitions import TransitionRequest
from .saving.store import UnknownBufferError, load_buffer, load_store

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
    "CompressedDataCollector",
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
    "compress_image",
    "compress_image_seq",
    "decompress_image",
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
