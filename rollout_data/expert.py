"""`load_expert_trajectories`: motion files named in a text list -> a `TrajectoryDictBuffer`.

One rule: files are data; links that leave the file are refused, and nothing in it is executed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from storage.core import arguments
from storage.core.memory import viewable
from storage.errors import (
    CorruptFileError,
    DataFileError,
    FieldTypeError,
    RolloutDataError,
    UnsafeFileError,
    UsageError,
)
from storage.replay.episode_buffer import TrajectoryDictBuffer
from storage.saving.plain_files import read_text

from .foreign.hdf5 import open_foreign_hdf5

#: Turns what is under `observation`, an array or nested ones, into nested observations.
ObsMapper = Callable[[Any], Mapping[str, Any]]
_OBSERVATION = "observation"


class MissingMotionError(DataFileError, FileNotFoundError):
    """A motion that the list names is not there."""


def load_expert_trajectories(
    motions: str | os.PathLike[str],
    motions_root: str | os.PathLike[str],
    seq_length: int,
    device: torch.device | str,
    obs_dict_mapper: ObsMapper | None = None,
) -> TrajectoryDictBuffer:
    """Load the motions of a list.

    Args:
        motions: Text file with one path per line, relative to `motions_root`. Text after `#` at the
            start of a line, and empty lines, are skipped; spaces inside a path belong to it.
        motions_root: Where the paths start. None may lead out of it: not by "..", as an absolute path, or by a link.
        seq_length: Rows of a window.
        device: Where the frames are kept.
        obs_dict_mapper: Makes a nested mapping of each observation: a `[T, D]` array, or nested ones.

    Returns:
        The episodes of all files in their order, `ep_0` first; `file_names` says which came from where. Floating
        observations become float32; every other field keeps its dtype.

    Raises:
        FileNotFoundError: Naming the line of the list.
        DataFileError: A file does not hold what it should.
        UnsafeFileError: A path leads out of `motions_root`, or a link out of its file.
        TypeError: `obs_dict_mapper` was given, and a motion has no observation.
    """
    root, episodes, names = arguments.path("load motions", "", motions_root), [], []
    for number, name in read_motion_list(motions):
        path = _motion_path(root, name, f"{name!r}, line {number} of {str(motions)!r}")
        for episode in read_motion(path):
            episodes.append(_mapped(episode, obs_dict_mapper, path))
            names.append(name)
    if not episodes:
        raise UsageError("load motions from", repr(str(motions)), "at least one episode", "none")
    try:
        return TrajectoryDictBuffer(episodes, device, seq_length, file_names=names)
    except RolloutDataError as error:
        error.where = f"{error.where} of the motions of {str(motions)!r}"
        raise


def read_motion_list(path: str | os.PathLike[str]) -> list[tuple[int, str]]:
    """List the line numbers, from 1, and paths of a motion list."""
    try:
        text = read_text(path, "read the motion list")
    except FileNotFoundError as cause:
        raise MissingMotionError("read the motion list", repr(str(path)), "a text file", "none") from cause
    lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1)]
    return [(number, line) for number, line in lines if line and not line.startswith("#")]


def read_motion(path: Path) -> list[dict[str, Any]]:
    """Read all episodes of a file: nested dicts of `[T, ...]` tensors."""
    with open_foreign_hdf5(path) as file:
        num_episodes = file.attribute("num_episodes")
        if not isinstance(num_episodes, (np.integer, np.floating)) or not float(num_episodes).is_integer():
            expected = "the attribute 'num_episodes', a whole number"
            raise CorruptFileError("read", repr(str(path)), expected, repr(num_episodes))
        episodes = [file.read_group(f"ep_{number}") for number in range(int(num_episodes))]
        return [{name: _as_tensors(one, name == _OBSERVATION) for name, one in ep.items()} for ep in episodes]


def _motion_path(root: Path, name: str, where: str) -> Path:
    """Say where a motion is; refuse what leads out of the root."""
    path = root / name
    is_inside = not Path(name).is_absolute() and ".." not in Path(name).parts
    if is_inside and not os.path.exists(path):
        raise MissingMotionError("load the motion", where, f"a file in {str(root)!r}", "none")
    if not is_inside or not path.resolve().is_relative_to(root.resolve()):
        raise UnsafeFileError("load the motion", where, f"a path in {str(root)!r}", "one that leads out of it")
    return path


def _as_tensors(values: Any, is_observation: bool) -> Any:
    """Turn arrays into tensors with at least two axes, floating observations into float32."""
    if isinstance(values, dict):
        return {name: _as_tensors(one, is_observation) for name, one in values.items()}
    if isinstance(values, str):
        return values
    if is_observation and values.dtype.kind == "f":
        values = values.astype(np.float32, copy=False)
    tensor = torch.from_numpy(viewable(values))
    return tensor.unsqueeze(1) if tensor.dim() == 1 else tensor


def _mapped(episode: dict[str, Any], mapper: ObsMapper | None, path: Path) -> dict[str, Any]:
    if mapper is None:
        return episode
    if _OBSERVATION not in episode:
        raise FieldTypeError("map the observation", f"of {str(path)!r}", "one", "none", "Leave obs_dict_mapper out")
    return {**episode, _OBSERVATION: mapper(episode[_OBSERVATION])}
