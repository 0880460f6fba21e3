"""Reinforcement-learning experience in memory: rollout storages and replay buffers."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .checkpoints.checkpoint_files import load_checkpoint as load_checkpoint
    from .checkpoints.checkpoint_files import load_checkpoint_meta as load_checkpoint_meta
    from .checkpoints.checkpoint_files import load_checkpoint_parallel as load_checkpoint_parallel
    from .checkpoints.checkpoint_saver import AsyncCheckpointSaver as AsyncCheckpointSaver
    from .codecs.compressed_tensor_dict import CompressedDataCollector as CompressedDataCollector
    from .codecs.compressed_tensor_dict import CompressedTensorDict as CompressedTensorDict
    from .codecs.image_sequences import compress_image as compress_image
    from .codecs.image_sequences import compress_image_seq as compress_image_seq
    from .codecs.image_sequences import decompress_image as decompress_image
    from .codecs.image_sequences import decompress_image_seq as decompress_image_seq
    from .codecs.image_sequences import decompress_many as decompress_many
    from .core.fields import Field as Field
    from .core.fields import Schema as Schema
    from .core.memory import BufferPool as BufferPool
    from .errors import BufferEmptyError as BufferEmptyError
    from .errors import DataFileError as DataFileError
    from .errors import FieldTypeError as FieldTypeError
    from .errors import MissingFieldError as MissingFieldError
    from .errors import RolloutDataError as RolloutDataError
    from .errors import RolloutOverflowError as RolloutOverflowError
    from .errors import SchemaError as SchemaError
    from .errors import UsageError as UsageError
    from .live.monitors import BufferMonitor as BufferMonitor
    from .live.monitors import InTickMonitor as InTickMonitor
    from .live.monitors import NaturalMonitor as NaturalMonitor
    from .live.monitors import OutTickMonitor as OutTickMonitor
    from .live.monitors import PerformanceMonitor as PerformanceMonitor
    from .live.monitors import plot_snapshots as plot_snapshots
    from .live.prefetch import PipelinedDataCollector as PipelinedDataCollector
    from .live.rate_limiter import RateLimitedError as RateLimitedError
    from .live.rate_limiter import RateLimiter as RateLimiter
    from .managed.advanced_buffer import AdvancedReplayBuffer as AdvancedReplayBuffer
    from .managed.buffer_manager import BufferManager as BufferManager
    from .managed.episode_replay_buffer import EpisodeReplayBuffer as EpisodeReplayBuffer
    from .managed.managed_buffer import NaiveReplayBuffer as NaiveReplayBuffer
    from .onpolicy.mini_batches import split_and_pad_trajectories as split_and_pad_trajectories
    from .onpolicy.mini_batches import unpad_trajectories as unpad_trajectories
    from .onpolicy.queue_rollout_storage import ActionLabelMiniBatch as ActionLabelMiniBatch
    from .onpolicy.queue_rollout_storage import ActionLabelRollout as ActionLabelRollout
    from .onpolicy.queue_rollout_storage import QueueRolloutStorage as QueueRolloutStorage
    from .onpolicy.returns import discounted_sums as discounted_sums
    from .onpolicy.returns import generalized_advantage as generalized_advantage
    from .onpolicy.returns import n_step_returns as n_step_returns
    from .onpolicy.returns import rollout_advantage as rollout_advantage
    from .onpolicy.rollout_storage import RolloutStorage as RolloutStorage
    from .onpolicy.sarsa_rollout_storage import SarsaMiniBatch as SarsaMiniBatch
    from .onpolicy.sarsa_rollout_storage import SarsaRolloutStorage as SarsaRolloutStorage
    from .onpolicy.transition_columns import Column as Column
    from .onpolicy.transition_columns import HiddenStates as HiddenStates
    from .onpolicy.transition_columns import MiniBatch as MiniBatch
    from .onpolicy.transition_columns import Transition as Transition
    from .prioritized.prioritized_windows import PrioritizedWindows as PrioritizedWindows
    from .prioritized.prioritized_windows import sequence_priorities as sequence_priorities
    from .prioritized.segment_tree import MaxSegmentTree as MaxSegmentTree
    from .prioritized.segment_tree import MinSegmentTree as MinSegmentTree
    from .prioritized.segment_tree import SegmentTree as SegmentTree
    from .prioritized.segment_tree import SumSegmentTree as SumSegmentTree
    from .prioritized.sum_tree import MaxTree as MaxTree
    from .prioritized.sum_tree import MinTree as MinTree
    from .prioritized.sum_tree import SumTree as SumTree
    from .replay.dict_buffer import DictBuffer as DictBuffer
    from .replay.dict_buffer import ZBuffer as ZBuffer
    from .replay.replay_buffer import ReplayBuffer as ReplayBuffer
    from .replay.trajectory_dict_buffer import PrefixSum as PrefixSum
    from .replay.trajectory_dict_buffer import TrajectoryDictBuffer as TrajectoryDictBuffer
    from .replay.trajectory_window_buffer import (
        TrajectoryDictBufferMultiDim as TrajectoryDictBufferMultiDim,
    )
    from .replay.trajectory_window_buffer import motion_priorities as motion_priorities
    from .ring.ring_store import RingStore as RingStore
    from .ring.transition_sampler import TransitionRequest as TransitionRequest
    from .saving.saved_store import UnknownBufferError as UnknownBufferError
    from .saving.saved_store import load_buffer as load_buffer
    from .saving.saved_store import load_store as load_store

#: Module of each public name. A module is imported when one of its names is first used.
_HOMES = {
    "ActionLabelMiniBatch": ".onpolicy.queue_rollout_storage",
    "ActionLabelRollout": ".onpolicy.queue_rollout_storage",
    "AdvancedReplayBuffer": ".managed.advanced_buffer",
    "AsyncCheckpointSaver": ".checkpoints.checkpoint_saver",
    "BufferEmptyError": ".errors",
    "BufferManager": ".managed.buffer_manager",
    "BufferMonitor": ".live.monitors",
    "BufferPool": ".core.memory",
    "Column": ".onpolicy.transition_columns",
    "CompressedDataCollector": ".codecs.compressed_tensor_dict",
    "CompressedTensorDict": ".codecs.compressed_tensor_dict",
    "DataFileError": ".errors",
    "DictBuffer": ".replay.dict_buffer",
    "EpisodeReplayBuffer": ".managed.episode_replay_buffer",
    "Field": ".core.fields",
    "FieldTypeError": ".errors",
    "HiddenStates": ".onpolicy.transition_columns",
    "InTickMonitor": ".live.monitors",
    "MaxSegmentTree": ".prioritized.segment_tree",
    "MaxTree": ".prioritized.sum_tree",
    "MinSegmentTree": ".prioritized.segment_tree",
    "MinTree": ".prioritized.sum_tree",
    "MiniBatch": ".onpolicy.transition_columns",
    "MissingFieldError": ".errors",
    "NaiveReplayBuffer": ".managed.managed_buffer",
    "NaturalMonitor": ".live.monitors",
    "OutTickMonitor": ".live.monitors",
    "PerformanceMonitor": ".live.monitors",
    "PipelinedDataCollector": ".live.prefetch",
    "PrefixSum": ".replay.trajectory_dict_buffer",
    "PrioritizedWindows": ".prioritized.prioritized_windows",
    "QueueRolloutStorage": ".onpolicy.queue_rollout_storage",
    "RateLimitedError": ".live.rate_limiter",
    "RateLimiter": ".live.rate_limiter",
    "ReplayBuffer": ".replay.replay_buffer",
    "RingStore": ".ring.ring_store",
    "RolloutDataError": ".errors",
    "RolloutOverflowError": ".errors",
    "RolloutStorage": ".onpolicy.rollout_storage",
    "SarsaMiniBatch": ".onpolicy.sarsa_rollout_storage",
    "SarsaRolloutStorage": ".onpolicy.sarsa_rollout_storage",
    "Schema": ".core.fields",
    "SchemaError": ".errors",
    "SegmentTree": ".prioritized.segment_tree",
    "SumSegmentTree": ".prioritized.segment_tree",
    "SumTree": ".prioritized.sum_tree",
    "TrajectoryDictBuffer": ".replay.trajectory_dict_buffer",
    "TrajectoryDictBufferMultiDim": ".replay.trajectory_window_buffer",
    "Transition": ".onpolicy.transition_columns",
    "TransitionRequest": ".ring.transition_sampler",
    "UnknownBufferError": ".saving.saved_store",
    "UsageError": ".errors",
    "ZBuffer": ".replay.dict_buffer",
    "compress_image": ".codecs.image_sequences",
    "compress_image_seq": ".codecs.image_sequences",
    "decompress_image": ".codecs.image_sequences",
    "decompress_image_seq": ".codecs.image_sequences",
    "decompress_many": ".codecs.image_sequences",
    "discounted_sums": ".onpolicy.returns",
    "generalized_advantage": ".onpolicy.returns",
    "load_buffer": ".saving.saved_store",
    "load_checkpoint": ".checkpoints.checkpoint_files",
    "load_checkpoint_meta": ".checkpoints.checkpoint_files",
    "load_checkpoint_parallel": ".checkpoints.checkpoint_files",
    "load_store": ".saving.saved_store",
    "motion_priorities": ".replay.trajectory_window_buffer",
    "n_step_returns": ".onpolicy.returns",
    "plot_snapshots": ".live.monitors",
    "rollout_advantage": ".onpolicy.returns",
    "sequence_priorities": ".prioritized.prioritized_windows",
    "split_and_pad_trajectories": ".onpolicy.mini_batches",
    "unpad_trajectories": ".onpolicy.mini_batches",
}
__all__ = sorted(_HOMES)

# With `__getattr__`, type checkers would accept any name of the package.
if not TYPE_CHECKING:

    def __getattr__(name):
        """Import and return a public name of this package."""
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = getattr(importlib.import_module(_HOMES[name], __name__), name)
        return globals()[name]

    def __dir__():
        return sorted({*globals(), *_HOMES})
