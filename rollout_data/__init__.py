"""Reinforcement-learning experience in files: record it, stream it back.

Write with `RolloutWriter` or `record_demonstrations`, and read with `RolloutDataset`. `FORMAT.md`
in this folder specifies the files.
"""

import importlib.util
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from storage.errors import RolloutDataError as RolloutDataError
    from storage.errors import RolloutDataWarning as RolloutDataWarning

    from .formats.convert import Conversion as Conversion
    from .formats.convert import convert as convert
    from .formats.expert_trajectories import load_expert_trajectories as load_expert_trajectories
    from .formats.expert_trajectories import (
        load_expert_trajectories_from_motion_lib as load_expert_trajectories_from_motion_lib,
    )
    from .formats.open_recording import open as open
    from .playback.loader import RolloutLoader as RolloutLoader
    from .playback.loader import loader as loader
    from .playback.rollout_dataset import RolloutDataset as RolloutDataset
    from .playback.rollout_file_base import RolloutFileBase as RolloutFileBase
    from .playback.transition import Transition as Transition
    from .remote.locations import RemoteOptions as RemoteOptions
    from .remote.push import push as push
    from .sources.recordings.episode import Episode as Episode
    from .sources.recordings.field_statistics import FieldStatistics as FieldStatistics
    from .sources.recordings.recording import Recording as Recording
    from .tools.doctor.examination import doctor as doctor
    from .tools.doctor.findings import Diagnosis as Diagnosis
    from .tools.doctor.findings import Finding as Finding
    from .tools.edit.edits import drop as drop
    from .tools.edit.edits import edits_of as edits_of
    from .tools.edit.edits import keep as keep
    from .tools.edit.edits import tag as tag
    from .tools.edit.edits import undrop as undrop
    from .tools.edit.edits import untag as untag
    from .tools.edit.merge_split import NewFolder as NewFolder
    from .tools.edit.merge_split import merge as merge
    from .tools.edit.merge_split import split as split
    from .tools.edit.repair_recording import Repaired as Repaired
    from .tools.edit.repair_recording import repair as repair
    from .tools.report.report_page import report as report
    from .trajectories.trajectory_cache import TrajectoryCache as TrajectoryCache
    from .trajectories.trajectory_replay_buffer import (
        TrajectoryReplayBuffer as TrajectoryReplayBuffer,
    )
    from .windows.normalizer import Normalizer as Normalizer
    from .windows.window_dataset import WindowDataset as WindowDataset
    from .windows.window_loader import WindowLoader as WindowLoader
    from .windows.window_loader import WindowMixture as WindowMixture
    from .writing.record_environments import EpisodeSummary as EpisodeSummary
    from .writing.record_environments import RecordingSummary as RecordingSummary
    from .writing.record_environments import RecordingWrapper as RecordingWrapper
    from .writing.record_environments import record_demonstrations as record_demonstrations
    from .writing.retention import prune as prune
    from .writing.rollout_writer import RolloutWriter as RolloutWriter

#: Module of each public name. Modules are imported when a name is first used, so that
#: `rollout-data --help` does not import torch.
_HOMES = {
    "Conversion": ".formats.convert",
    "Diagnosis": ".tools.doctor.findings",
    "Episode": ".sources.recordings.episode",
    "EpisodeSummary": ".writing.record_environments",
    "FieldStatistics": ".sources.recordings.field_statistics",
    "Finding": ".tools.doctor.findings",
    "NewFolder": ".tools.edit.merge_split",
    "Normalizer": ".windows.normalizer",
    "Recording": ".sources.recordings.recording",
    "RecordingSummary": ".writing.record_environments",
    "RecordingWrapper": ".writing.record_environments",
    "RemoteOptions": ".remote.locations",
    "Repaired": ".tools.edit.repair_recording",
    "RolloutDataError": "storage.errors",
    "RolloutDataWarning": "storage.errors",
    "RolloutDataset": ".playback.rollout_dataset",
    "RolloutFileBase": ".playback.rollout_file_base",
    "RolloutLoader": ".playback.loader",
    "RolloutWriter": ".writing.rollout_writer",
    "TrajectoryCache": ".trajectories.trajectory_cache",
    "TrajectoryReplayBuffer": ".trajectories.trajectory_replay_buffer",
    "Transition": ".playback.transition",
    "WindowDataset": ".windows.window_dataset",
    "WindowLoader": ".windows.window_loader",
    "WindowMixture": ".windows.window_loader",
    "convert": ".formats.convert",
    "doctor": ".tools.doctor.examination",
    "drop": ".tools.edit.edits",
    "edits_of": ".tools.edit.edits",
    "keep": ".tools.edit.edits",
    "load_expert_trajectories": ".formats.expert_trajectories",
    "load_expert_trajectories_from_motion_lib": ".formats.expert_trajectories",
    "loader": ".playback.loader",
    "merge": ".tools.edit.merge_split",
    "open": ".formats.open_recording",
    "prune": ".writing.retention",
    "push": ".remote.push",
    "record_demonstrations": ".writing.record_environments",
    "repair": ".tools.edit.repair_recording",
    "report": ".tools.report.report_page",
    "split": ".tools.edit.merge_split",
    "tag": ".tools.edit.edits",
    "undrop": ".tools.edit.edits",
    "untag": ".tools.edit.edits",
}
#: Names that `from rollout_data import *` imports: without `open`, to keep Python's own `open`.
__all__ = sorted(_HOMES.keys() - {"open"})

_storage = importlib.util.find_spec("storage")
_folders = list(_storage.submodule_search_locations or ()) if _storage else []
if _storage and not any(
    os.path.exists(os.path.join(folder, "onpolicy", "rollout_storage.py")) for folder in _folders
):
    raise ImportError(
        f"cannot import rollout_data: its package 'storage' is hidden by {_storage.origin or _folders[0]!r}. "
        "Rename that folder or file, or start Python from another folder."
    )

if not TYPE_CHECKING:  # With `__getattr__`, type checkers would accept misspelled names.

    def __getattr__(name):
        """Import the module of a public name and return the object with this name."""
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = getattr(importlib.import_module(_HOMES[name], __name__), name)
        return globals()[name]

    def __dir__():
        return sorted({*globals(), *_HOMES})
