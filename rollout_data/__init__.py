"""Reinforcement-learning experience in files: record it, stream it back.

Write with `RolloutWriter` (or `record_demonstrations`), read with `RolloutDataset`. `FORMAT.md`
beside this file specifies the files.
"""

import storage as _storage

if not hasattr(_storage, "AsyncCheckpointSaver"):
    _hiding = _storage.__file__ or next(iter(_storage.__path__))
    raise ImportError(
        f"cannot import rollout_data: its package 'storage' is hidden by {_hiding!r}. "
        "Rename that folder or file, or start Python from another folder."
    )

from storage.errors import RolloutDataError, RolloutDataWarning

from .expert import load_expert_trajectories
from .frames.normalization import FieldStatistics
from .recordings.converting import Conversion, convert
from .recordings.episode import Episode
from .recordings.opening import open
from .recordings.recording import Recording
from .remote.access import RemoteOptions
from .remote.publish import push
from .streaming.base import RolloutFileBase
from .streaming.delivery import RolloutLoader, loader
from .streaming.rollout_dataset import RolloutDataset
from .trajectories.buffer import TrajectoryReplayBuffer
from .trajectories.cache import TrajectoryCache
from .transition import Transition
from .windows.dataset import WindowDataset
from .windows.loader import WindowLoader, WindowMixture
from .windows.normalizer import Normalizer
from .writing.recording import EpisodeSummary, RecordingSummary, RecordingWrapper, record_demonstrations
from .writing.retention import prune
from .writing.writer import RolloutWriter

__all__ = [
    "Conversion",
    "Episode",
    "EpisodeSummary",
    "FieldStatistics",
    "Normalizer",
    "Recording",
    "RecordingSummary",
    "RecordingWrapper",
    "RemoteOptions",
    "RolloutDataError",
    "RolloutDataWarning",
    "RolloutDataset",
    "RolloutFileBase",
    "RolloutLoader",
    "RolloutWriter",
    "TrajectoryCache",
    "TrajectoryReplayBuffer",
    "Transition",
    "WindowDataset",
    "WindowLoader",
    "WindowMixture",
    "convert",
    "load_expert_trajectories",
    "loader",
    "open",
    "prune",
    "push",
    "record_demonstrations",
]
