"""Motions -> a `TrajectoryDictBuffer`: `load_expert_trajectories` from files named in a text list, or from episodes.

One rule: nothing in a file is trusted. Data are taken from the file itself, by hard links only, and are compared with
its length before they are read; groups and datasets are counted, as links can make a cycle; texts and numbers are the
only values.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import h5py
import numpy as np
import torch

from storage.core import arguments
from storage.core.durable_files import read_text
from storage.core.fields import dtype_name, unflatten
from storage.core.memory import viewable
from storage.errors import (
    CorruptFileError,
    DataFileError,
    FieldTypeError,
    RolloutDataError,
    UnsafeFileError,
    UsageError,
)
from storage.replay.trajectory_dict_buffer import TrajectoryDictBuffer
from storage.saving.hdf5_files import Allowance, attribute, member, open_hdf5

#: Turns what is under `observation`, an array or nested ones, into nested observations.
ObsMapper = Callable[[Any], Mapping[str, Any]]
_OBSERVATION = "observation"
#: Groups in groups, and datasets of a group and all below it.
_MAX_DEPTH, _MAX_MEMBERS = 64, 4096


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
        motions: Text file with one path per line, relative to `motions_root` or absolute. Text after `#` at the start
            of a line, and empty lines, are skipped. A line is taken as it is written; where that file does not exist,
            without the spaces around it, and then without any space.
        motions_root: Where the paths start. None may lead out of it, not by "..", as an absolute path, or by a link.
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
    action = "call rollout_data.load_expert_trajectories"
    motions = arguments.path(action, "motions", motions)
    root = arguments.path(action, "motions_root", motions_root)
    seq_length, device = _checked_options(action, seq_length, device, obs_dict_mapper)
    episodes = []
    names = []
    for number, line in read_motion_list(motions):
        name, path = _motion_path(root, line, f"line {number} of {str(motions)!r}")
        for episode in read_motion(path):
            episodes.append(_mapped(episode, obs_dict_mapper, repr(str(path))))
            names.append(name)
    if not episodes:
        raise UsageError("load motions from", repr(str(motions)), "at least one episode", "none")
    try:
        return TrajectoryDictBuffer(episodes, device, seq_length, file_names=names)
    except RolloutDataError as error:
        error.where = f"{error.where} of the motions of {str(motions)!r}"
        raise


class MotionEpisode(Protocol):
    """What an `Episode` of `rollout_data.open` has."""

    @property
    def id(self) -> str:
        """Its name."""

    @property
    def schema(self) -> Mapping[str, Any]:
        """Its numeric fields by flat names."""

    def read(self, name: str) -> Any:
        """Return a field, `[T, ...]`."""


def load_expert_trajectories_from_motion_lib(
    motion_lib: Iterable[Mapping[str, Any] | MotionEpisode],
    seq_length: int = 1,
    device: torch.device | str = "cpu",
    obs_dict_mapper: ObsMapper | None = None,
) -> TrajectoryDictBuffer:
    """Load motions that a program holds or yields; no simulator takes part.

    Args:
        motion_lib: A `Recording` or its episodes, or any iterable with a nested mapping for each motion: arrays or
            tensors `[T, ...]`, of which `observation` is the observation, and a `motion_id`, a value or a column.
            The id of an episode is its `motion_id` if it has one, and its name otherwise.
        seq_length: Rows of a window.
        device: Where the frames are kept.
        obs_dict_mapper: Makes a nested mapping of each observation: a `[T, D]` array, or nested ones.

    Returns:
        The motions in their order. Floating observations become float32; every other field keeps its dtype.

    Raises:
        UsageError: There is no motion, or one is no mapping; or the motions do not fit each other.
        TypeError: `obs_dict_mapper` was given, and a motion has no observation.
    """
    action = "call rollout_data.load_expert_trajectories_from_motion_lib"
    seq_length, device = _checked_options(action, seq_length, device, obs_dict_mapper)
    if not isinstance(motion_lib, Iterable) and not hasattr(motion_lib, "__getitem__"):
        raise UsageError(action, "", "motion_lib as an iterable of motions", type(motion_lib).__name__)
    motions = []
    listed: Iterable[Any] = motion_lib
    for number, motion in enumerate(listed):
        fields = motion
        if hasattr(motion, "schema") and hasattr(motion, "read"):
            read = {name: motion.read(name) for name in motion.schema}
            fields = {"motion_id": motion.id, **unflatten(read)}
        if not hasattr(fields, "items"):
            expected = f"motion_lib with a mapping as motion {number}"
            raise UsageError(action, "", expected, type(motion).__name__)
        values = {name: _given(one, name == _OBSERVATION) for name, one in fields.items()}
        motions.append(_mapped(values, obs_dict_mapper, f"motion {number}"))
    if not motions:
        raise UsageError(action, "", "motion_lib with at least one motion", "none")
    return TrajectoryDictBuffer(motions, device, seq_length)


def _checked_options(action: str, seq_length: Any, device: Any, obs_dict_mapper: Any) -> tuple[int, torch.device]:
    if obs_dict_mapper is not None and not callable(obs_dict_mapper):
        raise UsageError(action, "", "obs_dict_mapper as a function of an observation", repr(obs_dict_mapper))
    return arguments.whole(action, "seq_length", seq_length, 1), arguments.device(action, "device", device)


def _given(values: Any, is_observation: bool) -> Any:
    """View what a program gave as tensors with at least two axes; single values stay."""
    if hasattr(values, "items"):
        return {name: _given(one, is_observation) for name, one in values.items()}
    if isinstance(values, torch.Tensor):
        narrow = is_observation and values.dtype.is_floating_point
        tensor = values.to(torch.float32) if narrow else values
        return tensor.unsqueeze(1) if tensor.dim() == 1 else tensor
    if values is None or isinstance(values, (str, int, float)) or np.ndim(values) == 0:
        return values
    return _as_tensors(np.asarray(values), is_observation)


def read_motion_list(path: str | os.PathLike[str]) -> list[tuple[int, str]]:
    """List the numbers, from 1, and the texts of the lines of a motion list that name a motion."""
    try:
        text = read_text(path, "read the motion list")
    except FileNotFoundError as cause:
        raise MissingMotionError("read the motion list", repr(str(path)), "a text file", "none") from cause
    lines = enumerate(text.splitlines(), 1)
    return [(number, line) for number, line in lines if line.strip() and not line.strip().startswith("#")]


def read_motion(path: Path) -> list[dict[str, Any]]:
    """Read all episodes of a file: nested dicts of `[T, ...]` tensors, and of texts, of which an array gives its first.

    Raises:
        CorruptFileError: Damaged, no HDF5 file, without an episode, or holding more than its length can.
        FieldTypeError: A dataset holds neither numbers nor texts.
        UnsafeFileError: A link leads out of the file.
    """
    with open_hdf5(path) as (file, handle):
        allowance = Allowance(handle.num_bytes)
        num_episodes = attribute(file, "num_episodes")
        if not isinstance(num_episodes, (np.integer, np.floating)) or not float(num_episodes).is_integer():
            expected = "the attribute 'num_episodes', a whole number"
            raise CorruptFileError("read", repr(str(path)), expected, repr(num_episodes))
        episodes = []
        for name in (f"ep_{number}" for number in range(int(num_episodes))):
            group = member(file, name, path)
            if not isinstance(group, h5py.Group):
                raise CorruptFileError("read", repr(str(path)), f"a group {name!r}", "a dataset")
            episode = _read_group(group, path, allowance, iter(range(_MAX_MEMBERS)), 1)
            episodes.append({field: _as_tensors(one, field == _OBSERVATION) for field, one in episode.items()})
        return episodes


def _read_group(
    group: h5py.Group, path: Path, allowance: Allowance, numbers: Iterator[int], depth: int
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in group:
        if depth > _MAX_DEPTH or next(numbers, None) is None:
            expected = f"at most {_MAX_DEPTH} groups in groups and {_MAX_MEMBERS} datasets"
            raise CorruptFileError("read", repr(str(path)), expected, "more, or a cycle")
        one = member(group, name, path)
        is_group = isinstance(one, h5py.Group)
        found[name] = _read_group(one, path, allowance, numbers, depth + 1) if is_group else _read(one, path, allowance)
    return found


def _read(dataset: h5py.Dataset, path: Path, allowance: Allowance) -> Any:
    where = f"{dataset.name!r} of {str(path)!r}"
    is_text = h5py.check_string_dtype(dataset.dtype) is not None
    if not is_text and dataset.dtype.kind not in "biuf":
        raise FieldTypeError("read the dataset", where, "numbers", str(dataset.dtype))
    if dataset.size is None or (is_text and not dataset.size):  # the one has no shape, the other no first text
        raise CorruptFileError("read the dataset", where, "values", "none")
    allowance.take(dataset, where)
    if is_text:
        return str(dataset.asstr()[(0,) * dataset.ndim])
    dtype_name(dataset.dtype, f"of {where}")
    return np.asarray(dataset[()])


def _motion_path(root: Path, line: str, place: str) -> tuple[str, Path]:
    """Return the name in a line that is there, and its file; refuse what leads out of the root."""
    names = dict.fromkeys([line, line.strip(), line.strip().replace(" ", "")])
    for name in names:
        path = root / name
        where = f"{name!r}, {place}"
        if ".." in Path(name).parts or not path.resolve().is_relative_to(root.resolve()):
            raise UnsafeFileError("load the motion", where, f"a path in {str(root)!r}", "one that leads out of it")
        if os.path.exists(path):
            return name, path
    raise MissingMotionError("load the motion", f"{line.strip()!r}, {place}", f"a file in {str(root)!r}", "none")


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


def _mapped(episode: dict[str, Any], mapper: ObsMapper | None, where: str) -> dict[str, Any]:
    if mapper is None:
        return episode
    if _OBSERVATION not in episode:
        raise FieldTypeError("map the observation", f"of {where}", "one", "none", "Leave obs_dict_mapper out")
    return {**episode, _OBSERVATION: mapper(episode[_OBSERVATION])}
