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
from storage.host_arrays import viewable

#: Turns the array under `observation` into nested observations.
ObsMapper = Callable[[torch.Tensor], Mapping[str, Any]]
_OBSERVATION = "observation"
#: Groups in groups.
_MAX_DEPTH = 64
#: DEFLATE gives no more for a byte; zeros that nobody wrote take none.
_MAX_EXPANSION, _MAX_UNWRITTEN_BYTES = 1100, 1 << 26


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
    except UnicodeDecodeError as cause:
        raise CorruptFileError("read the motion list", repr(str(path)), "UTF-8", str(cause)) from cause
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
        try:
            num_episodes = int(file.attrs["num_episodes"])
        except (OSError, OverflowError, TypeError, ValueError) as cause:
            expected = "a number in the attribute 'num_episodes'"
            raise CorruptFileError("read", repr(str(path)), expected, str(cause)) from cause
        episodes = []
        for number in range(num_episodes):
            group = _member(file, f"ep_{number}", path)
            if not isinstance(group, h5py.Group):
                raise CorruptFileError("read", repr(str(path)), f"a group 'ep_{number}'", "a dataset")
            episodes.append(_read_group(group, path))
        return episodes


def _read_group(group: h5py.Group, path: Path, depth: int = 1) -> dict[str, Any]:
    if depth > _MAX_DEPTH:
        raise CorruptFileError("read", repr(str(path)), f"at most {_MAX_DEPTH} groups in groups", "more, or a cycle")
    found: dict[str, Any] = {}
    for name in group:
        member = _member(group, name, path)
        is_group = isinstance(member, h5py.Group)
        found[name] = _read_group(member, path, depth + 1) if is_group else _read_dataset(member, path)
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
    where = f"{dataset.name!r} of {str(path)!r}"
    is_text = h5py.check_string_dtype(dataset.dtype) is not None
    if not is_text and dataset.dtype.kind not in "biuf":
        raise FieldTypeError("read the dataset", where, "numbers", str(dataset.dtype))
    if dataset.size is None or (is_text and not dataset.size):  # the one has no shape, the other no first text
        raise CorruptFileError("read the dataset", where, "values", "none")
    _check_size(dataset, where, path)
    try:
        if is_text:
            return str(dataset.asstr()[(0,) * dataset.ndim])
        array = np.asarray(dataset[()])
    except (OSError, ValueError) as cause:
        raise CorruptFileError("read the dataset", where, "what can be read", str(cause)) from cause
    if array.dtype.kind == "f":
        array = array.astype(np.float32, copy=False)
    tensor = torch.from_numpy(viewable(array))
    return tensor.unsqueeze(1) if tensor.dim() == 1 else tensor


def _check_size(dataset: h5py.Dataset, where: str, path: Path) -> None:
    """Raise before memory is taken for more than what is stored can hold."""
    num_stored = min(dataset.id.get_storage_size(), path.stat().st_size)
    most = max(num_stored * (_MAX_EXPANSION if dataset.chunks else 1), _MAX_UNWRITTEN_BYTES)
    if dataset.nbytes > most:
        got = f"{dataset.nbytes} bytes in {num_stored}"
        raise CorruptFileError("read the dataset", where, f"at most {most} bytes", got)


def _mapped(episode: dict[str, Any], mapper: ObsMapper | None, path: Path) -> dict[str, Any]:
    if mapper is None:
        return episode
    observation = episode.get(_OBSERVATION)
    if not isinstance(observation, torch.Tensor):
        got = "none" if observation is None else "a mapping already"
        raise FieldTypeError("map the observation", f"of {str(path)!r}", "an array", got, "Leave obs_dict_mapper out")
    return {**episode, _OBSERVATION: mapper(observation)}
