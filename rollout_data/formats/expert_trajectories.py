"""Load expert motions into a `TrajectoryDictBuffer`, from humenv's files or from memory.

`load_expert_trajectories` reads the files named in a text file. All files must be inside
`motions_root`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from storage.core import arguments
from storage.core.durable_files import read_text
from storage.core.fields import unflatten
from storage.core.memory import viewable
from storage.errors import (
    DataFileError,
    FieldTypeError,
    RolloutDataError,
    UnsafeFileError,
    UsageError,
)
from storage.replay.trajectory_dict_buffer import TrajectoryDictBuffer

from .hdf5.humenv import read_motions

#: Function that maps the observation of a motion (array or nested arrays) to a nested mapping.
ObsMapper = Callable[[Any], Mapping[str, Any]]
_OBSERVATION = "observation"


class MissingMotionError(DataFileError, FileNotFoundError):
    """A motion file named in the list does not exist."""


def load_expert_trajectories(
    motions: str | os.PathLike[str],
    motions_root: str | os.PathLike[str],
    seq_length: int,
    device: torch.device | str,
    obs_dict_mapper: ObsMapper | None = None,
) -> TrajectoryDictBuffer:
    """Load the motion files named in a text file.

    Args:
        motions: Text file with one path per line, relative to `motions_root` or absolute. Empty
            lines and lines that start with `#` are skipped. The exact line is tried as a path
            first, then the line without surrounding spaces, then the line without any spaces.
        motions_root: Folder of the motion files. A path must not lead out of this folder, neither
            by "..", nor as an absolute path, nor by a link.
        seq_length: Number of rows of a window.
        device: Device of the frames.
        obs_dict_mapper: Function that maps an observation, a `[T, D]` array or nested arrays, to a
            nested mapping.

    Returns:
        The episodes of all files in the order of the lines, `ep_0` first. `file_names` has the line
        of each episode. Floating observations become float32; every other field keeps its dtype.

    Raises:
        FileNotFoundError: A motion file does not exist. The error names the line.
        DataFileError: A file is damaged or contains no motions.
        UnsafeFileError: A path leads out of `motions_root`, or a link leads out of an HDF5 file.
        TypeError: `obs_dict_mapper` is set, and a motion has no observation.
    """
    motions = arguments.path("motions", motions)
    root = arguments.path("motions_root", motions_root)
    seq_length, device = _checked_options(seq_length, device, obs_dict_mapper)

    episodes = []
    names = []
    for number, line in read_motion_list(motions):
        name, path = _motion_path(root, line, f"Line {number} of {str(motions)!r}")
        for values in read_motions(path):
            episode = {
                field: _as_tensors(value, field == _OBSERVATION) for field, value in values.items()
            }
            episodes.append(_mapped(episode, obs_dict_mapper, repr(str(path))))
            names.append(name)

    if not episodes:
        raise UsageError(f"{str(motions)!r} lists no motions. At least one motion is needed.")
    try:
        return TrajectoryDictBuffer(episodes, device, seq_length, file_names=names)
    except RolloutDataError as error:
        error.message = f"{str(motions)!r}: {error.message}"
        raise


class MotionEpisode(Protocol):
    """Interface of episodes that can be loaded from memory, a subset of `Episode`."""

    @property
    def id(self) -> str:
        """Name of the episode."""

    @property
    def schema(self) -> Mapping[str, Any]:
        """Numeric fields by name. The parts of a nested name are joined by "/"."""

    def read(self, name: str) -> Any:
        """Read all rows of a field: `[T, ...]`."""


def load_expert_trajectories_from_motion_lib(
    motion_lib: Iterable[Mapping[str, Any] | MotionEpisode],
    seq_length: int = 1,
    device: torch.device | str = "cpu",
    obs_dict_mapper: ObsMapper | None = None,
) -> TrajectoryDictBuffer:
    """Load motions that are already in memory, without a simulator.

    Args:
        motion_lib: A `Recording`, an iterable of episodes, or an iterable of nested mappings, one
            mapping per motion. A mapping has arrays or tensors `[T, ...]`, including `observation`.
            An optional `motion_id` is a scalar, or an array with one value per row. The
            `motion_id` of an episode without this field is the id of the episode.
        seq_length: Number of rows of a window.
        device: Device of the frames.
        obs_dict_mapper: Function that maps an observation, a `[T, D]` array or nested arrays, to a
            nested mapping.

    Returns:
        The motions in the order of `motion_lib`. Floating observations become float32; every other
        field keeps its dtype.

    Raises:
        UsageError: `motion_lib` is empty, a motion is not a mapping, or the motions have different
            fields.
        TypeError: `obs_dict_mapper` is set, and a motion has no observation.
    """
    seq_length, device = _checked_options(seq_length, device, obs_dict_mapper)
    if not isinstance(motion_lib, Iterable) and not hasattr(motion_lib, "__getitem__"):
        got = type(motion_lib).__name__
        raise UsageError(f"motion_lib must be an iterable of motions, got {got}.")

    episodes = []
    motions: Iterable[Any] = motion_lib
    for number, motion in enumerate(motions):
        fields = motion
        if hasattr(motion, "schema") and hasattr(motion, "read"):
            values = {name: motion.read(name) for name in motion.schema}
            fields = {"motion_id": motion.id, **unflatten(values)}
        if not hasattr(fields, "items"):
            got = type(motion).__name__
            raise UsageError(f"motion {number} of motion_lib must be a mapping, got {got}.")
        episode = {name: _as_tensors(value, name == _OBSERVATION) for name, value in fields.items()}
        episodes.append(_mapped(episode, obs_dict_mapper, f"motion {number}"))

    if not episodes:
        raise UsageError("motion_lib is empty. At least one motion is needed.")
    return TrajectoryDictBuffer(episodes, device, seq_length)


def _checked_options(
    seq_length: Any, device: Any, obs_dict_mapper: Any
) -> tuple[int, torch.device]:
    if obs_dict_mapper is not None and not callable(obs_dict_mapper):
        raise UsageError(
            f"obs_dict_mapper must be a function of an observation, got {obs_dict_mapper!r}."
        )
    num_rows = arguments.whole("seq_length", seq_length, 1)
    return num_rows, arguments.device("device", device)


def read_motion_list(path: str | os.PathLike[str]) -> list[tuple[int, str]]:
    """Read a list of motion files: (line number counted from 1, text) of each line with a path."""
    try:
        text = read_text(path)
    except FileNotFoundError as cause:
        raise MissingMotionError(
            f"{str(path)!r} does not exist, expected a text file with one motion per line."
        ) from cause

    motions = []
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if stripped and not stripped.startswith("#"):
            motions.append((number, line))
    return motions


def _motion_path(root: Path, line: str, place: str) -> tuple[str, Path]:
    """Find the motion file that a line names; return its name and path.

    The exact line is tried first, then without surrounding spaces, then without any spaces.

    Raises:
        UnsafeFileError: The path leads out of `root`.
        MissingMotionError: The file does not exist.
    """
    stripped = line.strip()
    for name in dict.fromkeys([line, stripped, stripped.replace(" ", "")]):
        path = root / name
        if ".." in Path(name).parts or not path.resolve().is_relative_to(root.resolve()):
            raise UnsafeFileError(
                f"{place} names {name!r}, which leads out of {str(root)!r}. Files outside of "
                "motions_root are not read."
            )
        if os.path.exists(path):
            return name, path
    raise MissingMotionError(
        f"{place} names {stripped!r}, but {str(root)!r} has no file of that name."
    )


def _as_tensors(values: Any, is_observation: bool) -> Any:
    """Convert arrays to tensors with at least two axes; floating observations become float32.

    Texts and scalar Python values are returned unchanged.
    """
    if hasattr(values, "items"):
        return {name: _as_tensors(part, is_observation) for name, part in values.items()}
    if isinstance(values, torch.Tensor):
        is_narrowed = is_observation and values.dtype.is_floating_point
        tensor = values.to(torch.float32) if is_narrowed else values
        return tensor.unsqueeze(1) if tensor.dim() == 1 else tensor
    if np.ndim(values) == 0 and not isinstance(values, np.ndarray):
        return values

    array = np.asarray(values)
    if is_observation and array.dtype.kind == "f":
        array = array.astype(np.float32, copy=False)
    tensor = torch.from_numpy(viewable(array))
    return tensor.unsqueeze(1) if tensor.dim() == 1 else tensor


def _mapped(episode: dict[str, Any], mapper: ObsMapper | None, where: str) -> dict[str, Any]:
    if mapper is None:
        return episode
    if _OBSERVATION not in episode:
        raise FieldTypeError(
            f"{where} has no observation for obs_dict_mapper. Omit obs_dict_mapper."
        )
    return {**episode, _OBSERVATION: mapper(episode[_OBSERVATION])}
