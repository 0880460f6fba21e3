"""`load_expert_trajectories`: motion files named in a text list -> a `TrajectoryDictBuffer`.

One rule: files are data; links that leave the file are refused, and nothing in it is executed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch

from storage import TrajectoryDictBuffer
from storage.errors import CorruptFileError, DataFileError, FieldTypeError, UnsafeFileError, UsageError

#: Turns the array under `observation` into nested observations.
ObsMapper = Callable[[torch.Tensor], Mapping[str, Any]]
_OBSERVATION = "observation"


class MissingMotionError(DataFileError, FileNotFoundError):
    """A motion that the list names is not there."""

    __str__ = DataFileError.__str__


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
        motions_root: Where the paths start.
        seq_length: Rows of a window.
        device: Where the frames are kept.
        obs_dict_mapper: Makes a nested mapping of each `[T, D]` observation.

    Returns:
        The episodes of all files in their order, `ep_0` first; `file_names` says which came from where.

    Raises:
        FileNotFoundError: Naming the line of the list.
        DataFileError: A file does not hold what it should.
        TypeError: `obs_dict_mapper` was given, and an observation is not an array.
    """
    root, episodes, names = Path(motions_root), [], []
    for number, name in read_motion_list(motions):
        path = root / name
        if not path.is_file():
            where = f"{str(path)!r}, line {number} of {str(motions)!r}"
            raise MissingMotionError("load the motion", where, "a file", "none")
        for episode in read_motion(path):
            episodes.append(_mapped(episode, obs_dict_mapper, path))
            names.append(name)
    if not episodes:
        raise UsageError("load motions from", repr(str(motions)), "at least one episode", "none")
    return TrajectoryDictBuffer(episodes, device, seq_length, file_names=names)


def read_motion_list(path: str | os.PathLike[str]) -> list[tuple[int, str]]:
    """List the line numbers, from 1, and paths of a motion list."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError as cause:
        raise MissingMotionError("read the motion list", repr(str(path)), "a text file", "none") from cause
    lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1)]
    return [(number, line) for number, line in lines if line and not line.startswith("#")]


def read_motion(path: Path) -> list[dict[str, Any]]:
    """Read all episodes of a file: nested dicts of `[T, ...]` tensors."""
    try:
        file = h5py.File(path, "r")
    except OSError as cause:
        raise CorruptFileError("read", repr(str(path)), "an HDF5 file", str(cause).splitlines()[0]) from cause
    with file:
        if "num_episodes" not in file.attrs:
            raise CorruptFileError("read", repr(str(path)), "the attribute 'num_episodes'", "none")
        episodes = []
        for number in range(int(file.attrs["num_episodes"])):
            group = _member(file, f"ep_{number}", path)
            if not isinstance(group, h5py.Group):
                raise CorruptFileError("read", repr(str(path)), f"a group 'ep_{number}'", "a dataset")
            episodes.append(_read_group(group, path))
        return episodes


def _read_group(group: h5py.Group, path: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in group:
        member = _member(group, name, path)
        found[name] = _read_group(member, path) if isinstance(member, h5py.Group) else _read_dataset(member, path)
    return found


def _member(group: h5py.Group, name: str, path: Path) -> Any:
    link = group.get(name, getlink=True)
    if link is None:
        raise CorruptFileError("read", repr(str(path)), f"{name!r} in {group.name!r}", "nothing of that name")
    if not isinstance(link, h5py.HardLink):
        raise UnsafeFileError("read", repr(str(path)), f"{name!r} in the file itself", type(link).__name__)
    member = group[name]
    if isinstance(member, h5py.Dataset) and (member.is_virtual or member.external):
        raise UnsafeFileError("read", repr(str(path)), f"{name!r} in the file itself", "a reference to other files")
    return member


def _read_dataset(dataset: h5py.Dataset, path: Path) -> Any:
    if h5py.check_string_dtype(dataset.dtype) is not None:
        value = dataset.asstr()[()]
        return value if isinstance(value, str) else str(value.flat[0])
    if dataset.dtype.kind not in "biuf":
        where = f"{dataset.name!r} of {str(path)!r}"
        raise FieldTypeError("read the dataset", where, "numbers", str(dataset.dtype))
    array = np.asarray(dataset[()])
    if array.dtype.kind == "f":
        array = array.astype(np.float32, copy=False)
    tensor = torch.from_numpy(np.ascontiguousarray(array.astype(array.dtype.newbyteorder("="), copy=False)))
    return tensor.unsqueeze(1) if tensor.dim() == 1 else tensor


def _mapped(episode: dict[str, Any], mapper: ObsMapper | None, path: Path) -> dict[str, Any]:
    if mapper is None:
        return episode
    observation = episode.get(_OBSERVATION)
    if not isinstance(observation, torch.Tensor):
        got = "none" if observation is None else "a mapping already"
        raise FieldTypeError("map the observation", f"of {str(path)!r}", "an array", got, "Leave obs_dict_mapper out")
    return {**episode, _OBSERVATION: mapper(observation)}
