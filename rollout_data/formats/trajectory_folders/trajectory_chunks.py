"""Chunks of a trajectory folder: reading their content, and joining them to trajectories.

A chunk is a file with some consecutive frames of a trajectory. Each file is scanned once. The
result, a `TrajectoryChunk`, is sufficient to find the trajectories of a folder. A folder should
contain one trajectory. If it has several, or frames are missing, the readable part is used and a
problem is reported.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedIOBase, BufferedReader, FileIO
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from storage.core.fields import dtype_name
from storage.errors import CorruptFileError, DataFileError

from ...blocks.block_header import FIRST, FRAGMENT_DTYPE, OPEN, TERMINATED, TRUNCATED
from .pickled_arrays import StoredArray
from .restricted_pickle import describe_pickle
from .trajectory_listing import ChunkFile

OBSERVATIONS = "observations"
COMPONENT_PREFIX = "obs_"
PRIVILEGED = "privileged_observations"
ACTIONS = "actions"
REWARDS = "rewards"
DONES = "dones"
TIMEOUTS = ("timeouts", "timeout")
#: Arrays of the older writer that do not become fields: value estimates of the critic.
_UNREAD = {"values"}
#: Maximum rows of a chunk. The `dones` of chunks are read into memory when a dataset is opened.
MAX_FRAMES = 1 << 26


class StoredField(NamedTuple):
    """Form of an array in a chunk: key, shape of a row, and name of the dtype."""

    key: str
    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.key} {self.dtype}{list(self.shape)}"


Signature = tuple[StoredField, ...]


@dataclass(frozen=True)
class TrajectoryChunk:
    """Description of a readable chunk.

    Attributes:
        file: The chunk file.
        num_frames: Length of the arrays.
        signature: Arrays that are fields.
        ends: Rows at which a trajectory ends, int64.
        is_timeout: Whether each end is a timeout, bool.
        repairs: A sentence for each repair that was necessary, without the name of the file.
    """

    file: ChunkFile
    num_frames: int
    signature: Signature
    ends: np.ndarray
    is_timeout: np.ndarray
    repairs: tuple[str, ...]


class OpenChunk(NamedTuple):
    """A chunk that is open for reading. Only its description is in memory."""

    file: BufferedIOBase
    path: Path
    arrays: dict[str, StoredArray]
    num_frames: int
    repairs: list[str]

    @property
    def signature(self) -> Signature:
        """Keys, row shapes and dtypes of the arrays that become fields.

        The row of an observation component has shape `[n]`; the metadata state its real shape.
        """
        fields = []
        for key, array in self.arrays.items():
            if key in (DONES, *TIMEOUTS):
                continue
            shape = array.shape[1:]
            if _is_component(key):
                shape = (prod(shape),)
            fields.append(StoredField(key, shape, dtype_name(array.dtype)))
        return tuple(fields)

    def read(self, key: str) -> np.ndarray:
        return self.arrays[key].read(self.file, self.path)


@contextmanager
def open_chunk(path: Path) -> Iterator[OpenChunk]:
    """Open a chunk and describe its arrays.

    Raises:
        DataFileError: The file is no chunk of this layout.
        OSError: The file cannot be opened.
    """
    with BufferedReader(FileIO(path), 1 << 15) as file:
        arrays, repairs = _known_arrays(path, describe_pickle(file, path))
        yield OpenChunk(file, path, arrays, _num_frames(path, arrays), repairs)


def scan_chunk(file: ChunkFile) -> TrajectoryChunk:
    """Read the description of a chunk. This reads only a few kilobytes of the file."""
    with open_chunk(file.path) as chunk:
        is_done = _flags(chunk, DONES)
        timeout_keys = [key for key in TIMEOUTS if key in chunk.arrays]
        is_timeout = _flags(chunk, timeout_keys[0]) if timeout_keys else np.zeros_like(is_done)
        if (is_timeout & ~is_done).any():
            chunk.repairs.append("a timeout without a done is read as the end of a trajectory")
        ends = np.flatnonzero(is_done | is_timeout)
        return TrajectoryChunk(
            file=file,
            num_frames=chunk.num_frames,
            signature=chunk.signature,
            ends=ends,
            is_timeout=is_timeout[ends],
            repairs=tuple(chunk.repairs),
        )


def _is_component(key: str) -> bool:
    return key.startswith(COMPONENT_PREFIX) and len(key) > len(COMPONENT_PREFIX) and "/" not in key


def _known_arrays(path: Path, content: dict[str, Any]) -> tuple[dict[str, StoredArray], list[str]]:
    """Select the arrays of a chunk that this format defines; also return the necessary repairs.

    Optional arrays with empty rows are left out, because they were not recorded.
    """
    repairs: list[str] = []
    observations = [OBSERVATIONS]
    if OBSERVATIONS not in content:
        observations = [key for key in content if _is_component(key)]
    required = [*observations, ACTIONS, DONES]
    keys = ", ".join(map(repr, content))[:200]
    for key in (ACTIONS, DONES):
        if key not in content:
            raise DataFileError(f"{str(path)!r} has no array {key!r}. Its keys are {keys}.")
    if not observations:
        raise DataFileError(
            f"{str(path)!r} has no array {OBSERVATIONS!r} and no arrays 'obs_*'. Its keys are "
            f"{keys}."
        )
    wanted = [*observations, PRIVILEGED, ACTIONS, REWARDS, DONES, *TIMEOUTS]
    ignored = [key for key in content if key not in {*wanted, *_UNREAD}]
    if ignored:
        repairs.append(f"unknown keys are ignored: {', '.join(map(repr, ignored))}"[:200])
    arrays = {}
    for key in wanted:
        value = content.get(key)
        if type(value) is tuple:  # A stray comma in the older writer made tuples of arrays.
            repairs.append(f"{key!r} is a tuple, and the array in the tuple is read")
            value = value[0] if len(value) == 1 else value
        if not isinstance(value, StoredArray):
            if value is not None or key in required:
                got = type(value).__name__
                raise DataFileError(f"{str(path)!r} has a {got} in {key!r}, expected an array.")
        elif prod(value.shape[1:]):
            arrays[key] = value
        elif key not in (PRIVILEGED, REWARDS):
            raise DataFileError(
                f"{str(path)!r} has shape {list(value.shape)} in {key!r}. At least one value per "
                "frame is needed."
            )
    return arrays, repairs


def _num_frames(path: Path, arrays: dict[str, StoredArray]) -> int:
    lengths = {key: array.shape[0] if array.shape else -1 for key, array in arrays.items()}
    num_frames = lengths[DONES]
    for key, length in lengths.items():
        if length != num_frames or length < 0:
            got = f"{length} frames" if length >= 0 else "a single value"
            expected = f"{num_frames} frames" if num_frames >= 0 else "a single value"
            raise DataFileError(
                f"{str(path)!r} has {got} in {key!r} and {expected} in {DONES!r}.", kind="counts"
            )
    if num_frames > MAX_FRAMES:
        raise DataFileError(
            f"{str(path)!r} has {num_frames} frames, more than the limit of {MAX_FRAMES}."
        )
    return num_frames


def _flags(chunk: OpenChunk, key: str) -> np.ndarray:
    """Read dones or timeouts of any numeric dtype, `[T]` or `[T, 1]`, as bool `[T]`."""
    shape = chunk.arrays[key].shape
    if shape[1:] not in ((), (1,)):
        raise DataFileError(
            f"{str(chunk.path)!r} has shape {list(shape)} in {key!r}, expected [T] or [T, 1]."
        )
    values = chunk.read(key).reshape(-1)
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        raise DataFileError(f"{str(chunk.path)!r} has NaN or infinity in {key!r}.")
    flags: np.ndarray = values.view(np.uint8) != 0 if values.dtype == bool else values != 0
    return flags


def join_chunks(
    folder: Path, chunks: Sequence[TrajectoryChunk]
) -> tuple[list[TrajectoryChunk], list[DataFileError]]:
    """Select the chunks that cover the frames from 0 on without gaps; return errors for the others.

    The name of a chunk file states its first frame and its end. If several chunks have the same
    first frame, the newest is kept, because a resumed collector writes the same frames again. The
    end is not used, because it may differ from the length of the arrays.
    """
    problems: list[DataFileError] = []
    newest = _newest_chunks(folder, chunks, problems)
    kept: list[TrajectoryChunk] = []
    position = 0
    while position in newest:
        kept.append(newest.pop(position))
        position += kept[-1].num_frames
        file = kept[-1].file
        num_frames = kept[-1].num_frames
        if file.stop - file.start != num_frames:
            message = (
                f"{str(file.path)!r} has {num_frames} frames, but {file.stop - file.start} "
                "according to its name. The arrays are read at their full length."
            )
            problems.append(DataFileError(message, kind="counts", episode=folder.name))
    if newest:
        first = newest[min(newest)].file.path.name
        remaining = f"The remaining chunk is {first!r}"
        if len(newest) > 1:
            remaining = f"The remaining chunks are {first!r} and {len(newest) - 1} more"
        kept_part = f"Only the first {position} frames are read"
        outcome = kept_part if position else "The folder is left out"
        kind = "overlap" if min(newest) < position else "gap"
        problem = CorruptFileError(
            f"{str(folder)!r} has no chunk that starts at frame {position}. {remaining}. "
            f"{outcome}.",
            kind=kind,
            episode=folder.name,
        )
        problems.append(problem)
    return kept, problems


def _newest_chunks(
    folder: Path, chunks: Sequence[TrajectoryChunk], problems: list[DataFileError]
) -> dict[int, TrajectoryChunk]:
    """Map each first frame to the newest chunk that starts there; report the other chunks."""
    newest: dict[int, TrajectoryChunk] = {}
    for chunk in sorted(chunks, key=_age):
        start = chunk.file.start
        if chunk.num_frames == 0:
            message = f"{str(chunk.file.path)!r} has no frames. The file is left out."
            problems.append(DataFileError(message))
            continue
        if start in newest:
            message = (
                f"{str(newest[start].file.path)!r} and {chunk.file.path.name!r} both start at "
                f"frame {start}. The older file is left out."
            )
            problems.append(DataFileError(message, kind="overlap", episode=folder.name))
        newest[start] = chunk
    return newest


def _age(chunk: TrajectoryChunk) -> tuple[int, int, Path]:
    """Return a sort key that orders chunks from the oldest to the newest."""
    return chunk.file.mtime_ns, chunk.file.stop, chunk.file.path


def cut_trajectories(
    folder: Path, chunks: Sequence[TrajectoryChunk]
) -> tuple[np.ndarray, np.ndarray, list[DataFileError]]:
    """Divide the joined chunks of a folder into trajectories at every recorded end.

    If the last trajectory has no end, it is open: the recording stopped before it ended.

    Returns:
        Fragments of `FRAGMENT_DTYPE`, one per run of frames within one chunk and one trajectory.
        `trajectory` counts from 0, and times are 0.
        Position of each fragment's chunk in `chunks`: ascending int64.
        Errors to report.
    """
    lengths = np.array([chunk.num_frames for chunk in chunks], np.int64)
    total = int(lengths.sum())
    chunk_starts = np.cumsum(lengths) - lengths
    ends = np.concatenate(
        [chunk.ends + start for chunk, start in zip(chunks, chunk_starts, strict=True)]
    )
    is_timeout = np.concatenate([chunk.is_timeout for chunk in chunks])

    # First frame, stop and end flag of each trajectory.
    trajectory_stops = ends + 1
    end_flags = np.where(is_timeout, TRUNCATED, TERMINATED)
    if not len(ends) or trajectory_stops[-1] < total:
        trajectory_stops = np.append(trajectory_stops, total)
        end_flags = np.append(end_flags, OPEN)
    trajectory_starts = np.append(0, trajectory_stops[:-1])

    # A fragment starts where a chunk or a trajectory starts.
    starts = np.union1d(chunk_starts, trajectory_starts)
    fragment_lengths = np.diff(np.append(starts, total))
    chunk_of = np.searchsorted(chunk_starts, starts, side="right") - 1
    trajectory_of = np.searchsorted(trajectory_starts, starts, side="right") - 1
    is_first = starts == trajectory_starts[trajectory_of]
    is_last = starts + fragment_lengths == trajectory_stops[trajectory_of]

    fragments = np.zeros(len(starts), FRAGMENT_DTYPE)
    fragments["trajectory"] = trajectory_of
    fragments["start"] = starts - trajectory_starts[trajectory_of]
    fragments["length"] = fragment_lengths
    fragments["row"] = starts - chunk_starts[chunk_of]
    fragments["final_row"] = -1
    fragments["policy_version"] = -1
    fragments["flags"] = np.where(is_first, FIRST, 0)
    fragments["flags"] |= np.where(is_last, end_flags[trajectory_of], 0).astype(np.uint32)
    return fragments, chunk_of, _inner_ends(folder, ends, trajectory_stops, total)


def _inner_ends(
    folder: Path, ends: np.ndarray, trajectory_stops: np.ndarray, total: int
) -> list[DataFileError]:
    """Return the error to report for a folder with several trajectories instead of one.

    Args:
        folder: The trajectory folder.
        ends: Frames with an end, ascending.
        trajectory_stops: Stop of each trajectory, ascending.
        total: Number of frames.
    """
    if len(trajectory_stops) == 1:
        return []
    num_inner = int((trajectory_stops < total).sum())
    ends_text = f"{num_inner} end{'' if num_inner == 1 else 's'} before its last frame"
    if num_inner:
        ends_text += f", the first at frame {int(ends[0])}"
    problem = DataFileError(
        f"{str(folder)!r} has {ends_text}. It is read as {len(trajectory_stops)} trajectories.",
        kind="inside",
        episode=folder.name,
    )
    return [problem]
