"""Reinforcement-learning experience in files: record it, stream it back.

Write with `RolloutWriter` (or `record_demonstrations`), read with `RolloutDataset`. `FORMAT.md`
beside this file specifies the files.
"""

import importlib.util
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from storage.errors import RolloutDataError as RolloutDataError
    from storage.errors import RolloutDataWarning as RolloutDataWarning

    from .diagnosis.examining import doctor as doctor
    from .diagnosis.finding import Diagnosis as Diagnosis
    from .diagnosis.finding import Finding as Finding
    from .editing.edits import drop as drop
    from .editing.edits import edits_of as edits_of
    from .editing.edits import keep as keep
    from .editing.edits import tag as tag
    from .editing.edits import undrop as undrop
    from .editing.edits import untag as untag
    from .editing.folders import NewFolder as NewFolder
    from .editing.folders import merge as merge
    from .editing.folders import split as split
    from .editing.repairing import Repaired as Repaired
    from .editing.repairing import repair as repair
    from .expert import load_expert_trajectories as load_expert_trajectories
    from .expert import load_expert_trajectories_from_motion_lib as load_expert_trajectories_from_motion_lib
    from .frames.normalization import FieldStatistics as FieldStatistics
    from .recordings.converting import Conversion as Conversion
    from .recordings.converting import convert as convert
    from .recordings.episode import Episode as Episode
    from .recordings.opening import open as open
    from .recordings.recording import Recording as Recording
    from .remote.access import RemoteOptions as RemoteOptions
    from .remote.publish import push as push
    from .reporting.page import report as report
    from .streaming.base import RolloutFileBase as RolloutFileBase
    from .streaming.delivery import RolloutLoader as RolloutLoader
    from .streaming.delivery import loader as loader
    from .streaming.rollout_dataset import RolloutDataset as RolloutDataset
    from .trajectories.buffer import TrajectoryReplayBuffer as TrajectoryReplayBuffer
    from .trajectories.cache import TrajectoryCache as TrajectoryCache
    from .transition import Transition as Transition
    from .windows.dataset import WindowDataset as WindowDataset
    from .windows.loader import WindowLoader as WindowLoader
    from .windows.loader import WindowMixture as WindowMixture
    from .windows.normalizer import Normalizer as Normalizer
    from .writing.recording import EpisodeSummary as EpisodeSummary
    from .writing.recording import RecordingSummary as RecordingSummary
    from .writing.recording import RecordingWrapper as RecordingWrapper
    from .writing.recording import record_demonstrations as record_demonstrations
    from .writing.retention import prune as prune
    from .writing.writer import RolloutWriter as RolloutWriter

#: Public name -> its module. It is imported when the name is first used, so that `rollout-data --help` needs no torch.
_HOMES = {
    "Conversion": ".recordings.converting",
    "Diagnosis": ".diagnosis.finding",
    "Episode": ".recordings.episode",
    "EpisodeSummary": ".writing.recording",
    "FieldStatistics": ".frames.normalization",
    "Finding": ".diagnosis.finding",
    "NewFolder": ".editing.folders",
    "Normalizer": ".windows.normalizer",
    "Recording": ".recordings.recording",
    "RecordingSummary": ".writing.recording",
    "RecordingWrapper": ".writing.recording",
    "RemoteOptions": ".remote.access",
    "Repaired": ".editing.repairing",
    "RolloutDataError": "storage.errors",
    "RolloutDataWarning": "storage.errors",
    "RolloutDataset": ".streaming.rollout_dataset",
    "RolloutFileBase": ".streaming.base",
    "RolloutLoader": ".streaming.delivery",
    "RolloutWriter": ".writing.writer",
    "TrajectoryCache": ".trajectories.cache",
    "TrajectoryReplayBuffer": ".trajectories.buffer",
    "Transition": ".transition",
    "WindowDataset": ".windows.dataset",
    "WindowLoader": ".windows.loader",
    "WindowMixture": ".windows.loader",
    "convert": ".recordings.converting",
    "doctor": ".diagnosis.examining",
    "drop": ".editing.edits",
    "edits_of": ".editing.edits",
    "keep": ".editing.edits",
    "load_expert_trajectories": ".expert",
    "load_expert_trajectories_from_motion_lib": ".expert",
    "loader": ".streaming.delivery",
    "merge": ".editing.folders",
    "open": ".recordings.opening",
    "prune": ".writing.retention",
    "push": ".remote.publish",
    "record_demonstrations": ".writing.recording",
    "repair": ".editing.repairing",
    "report": ".reporting.page",
    "split": ".editing.folders",
    "tag": ".editing.edits",
    "undrop": ".editing.edits",
    "untag": ".editing.edits",
}
#: `from rollout_data import *` leaves Python's own `open` alone; `rollout_data.open` stays.
__all__ = sorted(_HOMES.keys() - {"open"})

_storage = importlib.util.find_spec("storage")
_folders = list(_storage.submodule_search_locations or ()) if _storage else []
if _storage and not any(os.path.exists(os.path.join(folder, "onpolicy", "rollout_storage.py")) for folder in _folders):
    raise ImportError(
        f"cannot import rollout_data: its package 'storage' is hidden by {_storage.origin or _folders[0]!r}. "
        "Rename that folder or file, or start Python from another folder."
    )

if not TYPE_CHECKING:  # a type checker would take any name for one that `__getattr__` gives

    def __getattr__(name):
        """Import a public name."""
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = getattr(importlib.import_module(_HOMES[name], __name__), name)
        return globals()[name]

    def __dir__():
        return sorted({*globals(), *_HOMES})
