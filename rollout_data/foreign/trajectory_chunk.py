"""One chunk file: which of its arrays are fields, how long it is, and where trajectories end in it.

One rule: what a chunk holds is decided here, once, and compared as a `Signature`; what the
fields are called and how the chunks of a dataset hang together is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedIOBase, BufferedReader, FileIO
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from storage.core.fields import dtype_name
from storage.errors import DataFileError

from .pickled_arrays import StoredArray
from .restricted_pickle import describe_pickle
from .trajectory_listing import ChunkFile

OBSERVATIONS, COMPONENT_PREFIX = "observations", "obs_"
PRIVILEGED, ACTIONS, REWARDS, DONES = "privileged_observations", "actions", "rewards", "dones"
TIMEOUTS = ("timeouts", "timeout")
_UNREAD = {"values"}
#: Ends are read into memory while a dataset is opened; no chunk has more frames.
MAX_FRAMES = 1 << 26


class StoredField(NamedTuple):
    """One array of a chunk: its key, the shape of one row, its dtype's name."""

    key: str
    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.key} {self.dtype}{list(self.shape)}"


Signature = tuple[StoredField, ...]


@dataclass(frozen=True)
class Chunk:
    """What is known of a readable chunk.

    Attributes:
        file: Its name, place and time.
        num_frames: Length of its arrays.
        signature: The arrays that are fields.
        ends: int64, rows at which a trajectory ends.
        is_timeout: bool, for each end.
        repairs: What had to be put right in it, as (expected, got, what was done).
    """

    file: ChunkFile
    num_frames: int
    signature: Signature
    ends: np.ndarray
    is_timeout: np.ndarray
    repairs: tuple[tuple[str, str, str], ...]


class OpenChunk(NamedTuple):
    """A chunk open for reading: nothing but its description is in memory."""

    file: BufferedIOBase
    path: Path
    arrays: dict[str, StoredArray]
    num_frames: int
    repairs: list[tuple[str, str, str]]

    @property
    def signature(self) -> Signature:
        return tuple(_stored_field(key, array) for key, array in self.arrays.items() if _is_field(key))

    def read(self, key: str) -> np.ndarray:
        return self.arrays[key].read(self.file, self.path)


@contextmanager
def open_chunk(path: Path) -> Iterator[OpenChunk]:
    """Open a chunk and describe its arrays.

    Raises:
        DataFileError: It is not a chunk of this layout; the subclass and the text say why.
        OSError: It cannot be opened.
    """
    with BufferedReader(FileIO(path), 1 << 15) as file:
        arrays, repairs = _known_arrays(path, describe_pickle(file, path))
        yield OpenChunk(file, path, arrays, _num_frames(path, arrays), repairs)


def scan_chunk(file: ChunkFile) -> Chunk:
    """Read what must be known of a chunk before its rows are wanted: a few kilobytes of it."""
    with open_chunk(file.path) as chunk:
        is_done = _flags(chunk, DONES)
        timeout_keys = [key for key in TIMEOUTS if key in chunk.arrays]
        is_timeout = _flags(chunk, timeout_keys[0]) if timeout_keys else np.zeros_like(is_done)
        if (is_timeout & ~is_done).any():
            chunk.repairs.append(("timeouts only where dones are", "one without", "Taken as the end of a trajectory"))
        ends = np.flatnonzero(is_done | is_timeout)
        return Chunk(file, chunk.num_frames, chunk.signature, ends, is_timeout[ends], tuple(chunk.repairs))


def chunk_problem(path: Path, expected: str, got: str, advice: str = "") -> DataFileError:
    """Build the error for a chunk that is not what this layout says."""
    return DataFileError("read the chunk", repr(str(path)), expected, got, advice)


def _is_field(key: str) -> bool:
    return key != DONES and key not in TIMEOUTS


def _is_component(key: str) -> bool:
    return key.startswith(COMPONENT_PREFIX) and len(key) > len(COMPONENT_PREFIX) and "/" not in key


def _known_arrays(path: Path, content: dict[str, Any]) -> tuple[dict[str, StoredArray], list[tuple[str, str, str]]]:
    """Pick the arrays of this layout: observation or its components, then the rest, in one order for all chunks."""
    repairs = []
    observations = [OBSERVATIONS] if OBSERVATIONS in content else [key for key in content if _is_component(key)]
    wanted = [*observations, PRIVILEGED, ACTIONS, REWARDS, DONES, *TIMEOUTS]
    for key in (ACTIONS, DONES):
        if key not in content:
            raise chunk_problem(path, f"an array {key!r}", f"only {', '.join(map(repr, content))}"[:200])
    if not observations:
        raise chunk_problem(path, f"{OBSERVATIONS!r} or components 'obs_*'", f"{', '.join(map(repr, content))}"[:200])
    if ignored := [key for key in content if key not in wanted and key not in _UNREAD]:
        repairs.append(("the arrays of this layout", f"also {', '.join(map(repr, ignored))}"[:200], "Left out"))
    arrays = {}
    for key in wanted:
        value = content.get(key)
        if type(value) is tuple:  # the older writer leaves a trailing comma behind it
            repairs.append((f"{key!r} as an array", "a tuple that holds it", "Taken as the array"))
            value = value[0] if len(value) == 1 else value
        if isinstance(value, StoredArray):
            arrays[key] = value
        elif value is not None or key in (ACTIONS, DONES, *observations):
            raise chunk_problem(path, f"{key!r} as an array", type(value).__name__)
    return _without_empty(path, arrays), repairs


def _without_empty(path: Path, arrays: dict[str, StoredArray]) -> dict[str, StoredArray]:
    """Leave out optional arrays with rows of no values: they were not recorded."""
    kept = {}
    for key, array in arrays.items():
        if prod(array.shape[1:]):
            kept[key] = array
        elif key not in (PRIVILEGED, REWARDS):
            raise chunk_problem(path, f"{key!r} with at least one value per frame", f"the shape {list(array.shape)}")
    return kept


def _num_frames(path: Path, arrays: dict[str, StoredArray]) -> int:
    lengths = {key: array.shape[0] if array.shape else -1 for key, array in arrays.items()}
    num_frames = lengths[DONES]
    for key, length in lengths.items():
        if length != num_frames or length < 0:
            got = f"{length}" if length >= 0 else "a single value"
            raise chunk_problem(path, f"{num_frames} frames in {key!r}, as in {DONES!r}", got)
    if num_frames > MAX_FRAMES:
        raise chunk_problem(path, f"at most {MAX_FRAMES} frames", str(num_frames))
    return num_frames


def _stored_field(key: str, array: StoredArray) -> StoredField:
    shape = array.shape[1:]
    return StoredField(key, (prod(shape),) if _is_component(key) else shape, dtype_name(array.dtype))


def _flags(chunk: OpenChunk, key: str) -> np.ndarray:
    """Read dones or timeouts of any numeric dtype, `[T]` or `[T, 1]`, as bool `[T]`."""
    shape = chunk.arrays[key].shape
    if shape[1:] not in ((), (1,)):
        raise chunk_problem(chunk.path, f"{key!r} of shape [T] or [T, 1]", f"{list(shape)}")
    values = chunk.read(key).reshape(-1)
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        raise chunk_problem(chunk.path, f"finite {key!r}", "NaN or infinity")
    return values.view(np.uint8) != 0 if values.dtype == bool else values != 0
