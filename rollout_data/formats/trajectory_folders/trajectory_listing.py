"""Listing of a data folder: trajectory folders, chunk files and metadata.json.

A folder `trajectory_K` contains chunk files `traj_START_END.pickle` with the frames START to END of
trajectory K. Chunks are not opened here. Links that lead out of the data folder are reported as
problems. Links to folders are not followed, so no file is read twice.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from storage.core.durable_files import read_json
from storage.errors import CorruptFileError, DataFileError, RolloutDataError, UnsafeFileError

from ...blocks.block_folder import entries_of

METADATA_NAME = "metadata.json"
SEGMENTS = "obs_segments"
MAPPING = "obs_disassemble_mapping"
FOLDER_PREFIX = "trajectory_"
_CHUNK_NAME = re.compile(r"traj_(\d{1,18})_(\d{1,18})\.(?:pickle|pkl)", re.ASCII)
_FOLDER_NUMBER = re.compile(r"trajectory_(\d{1,18})", re.ASCII)
#: Sort key of a folder `trajectory_*` without a number in its name. Such folders come last.
_NO_NUMBER = 1 << 62
MAX_METADATA_BYTES = 1 << 24
#: Attempts to read metadata.json. The older writer rewrites it in place.
_NUM_READS = 4
#: Seconds between two attempts.
_RETRY_S = 0.02


@dataclass(frozen=True, order=True)
class ChunkFile:
    """A chunk file: the frames `start:stop` from its name, and its size, time and inode."""

    start: int
    stop: int
    path: Path
    mtime_ns: int
    num_bytes: int
    inode: int = 0

    @property
    def state(self) -> tuple[int, int, int]:
        """Inode, size and modification time, to detect later changes of the file."""
        return self.inode, self.num_bytes, self.mtime_ns


@dataclass(frozen=True)
class TrajectoryFolder:
    """A folder `trajectory_K` with at least one chunk file; `number` is K."""

    path: Path
    number: int
    files: tuple[ChunkFile, ...]


def chunk_frames(path: str) -> tuple[int, int] | None:
    """Return the frames `(start, stop)` in the name of a chunk file; None for other names."""
    match = _CHUNK_NAME.fullmatch(os.path.basename(path))
    return None if match is None else (int(match[1]), int(match[2]))


def is_trajectory_folder(data_dir: str | os.PathLike[str], with_chunk: bool = False) -> bool:
    """Return whether a trajectory folder lies at or below `data_dir`.

    A trajectory folder is called `trajectory_*`, and has a chunk file or no file at all. If
    `with_chunk` is true, it must have a chunk file.
    """
    for path, entries in _walk(Path(data_dir), []):
        if not path.name.startswith(FOLDER_PREFIX):
            continue
        has_chunk = any(_CHUNK_NAME.fullmatch(entry.name) for entry in entries)
        is_accepted_empty = not entries and not with_chunk
        if has_chunk or is_accepted_empty:
            return True
    return False


def list_trajectory_folders(data_dir: Path) -> tuple[list[TrajectoryFolder], list[DataFileError]]:
    """Return the trajectory folders at or below `data_dir`, and errors of skipped files.

    Folders are ordered by parent, number and name.

    Raises:
        UsageError: `data_dir` is not a folder.
        DataFileError: `data_dir` cannot be listed.
    """
    problems: list[DataFileError] = []
    folders = []
    root = os.path.realpath(data_dir)
    for path, entries in _walk(data_dir, problems):
        if not path.name.startswith(FOLDER_PREFIX):
            continue
        files = _chunk_files(path, entries, root, problems)
        if files:
            match = _FOLDER_NUMBER.fullmatch(path.name)
            number = int(match[1]) if match else _NO_NUMBER
            folders.append(TrajectoryFolder(path, number, tuple(sorted(files))))
    folders.sort(key=lambda folder: (str(folder.path.parent), folder.number, folder.path.name))
    return folders, problems


def _walk(
    data_dir: Path, problems: list[DataFileError]
) -> Iterator[tuple[Path, list[os.DirEntry[str]]]]:
    """Yield every folder at or below `data_dir` with its files.

    Links to folders are not followed. Links that look like trajectory folders, or lead out of
    `data_dir`, are reported.
    """
    root = os.path.realpath(data_dir)
    waiting = [data_dir]
    while waiting:
        path = waiting.pop()
        try:
            entries = sorted(entries_of(path), key=lambda entry: entry.name)
        except RolloutDataError as cause:
            if path == data_dir:
                raise
            problem = DataFileError(f"{str(path)!r} is left out: {cause.message}")
            problem.__cause__ = cause
            problems.append(problem)
            continue
        files = []
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                waiting.append(Path(entry.path))
            elif entry.is_symlink() and os.path.isdir(entry.path):
                if not is_inside(entry.path, root):
                    problems.append(_outside(entry.path))
                elif entry.name.startswith(FOLDER_PREFIX):
                    message = (
                        f"{entry.path!r} is a link to a folder and is not followed. The linked "
                        "folder is read if it is a trajectory folder."
                    )
                    problems.append(DataFileError(message))
            else:
                files.append(entry)
        yield path, files


def _chunk_files(
    folder: Path, entries: list[os.DirEntry[str]], root: str, problems: list[DataFileError]
) -> list[ChunkFile]:
    """Return the chunk files among the files of a folder; report other files in `problems`."""
    files = []
    other_names = []
    for entry in entries:
        frames = chunk_frames(entry.name)
        if frames is None:
            if not entry.name.startswith("."):
                other_names.append(entry.name)
            continue
        try:
            if entry.is_symlink() and not is_inside(entry.path, root):
                problems.append(_outside(entry.path))
            elif not entry.is_file():  # Opening a pipe would block.
                message = f"{entry.path!r} is not a regular file and is left out."
                problems.append(DataFileError(message))
            else:
                stat = entry.stat()
                start, stop = frames
                path = Path(entry.path)
                file = ChunkFile(start, stop, path, stat.st_mtime_ns, stat.st_size, stat.st_ino)
                files.append(file)
        except OSError:  # The file was removed after it was listed.
            continue
    if other_names:
        names = repr(other_names[0])
        if len(other_names) > 1:
            names += f" and {len(other_names) - 1} more"
        message = (
            f"{str(folder)!r} contains files that are not called traj_START_END.pickle: {names}. "
            "These files are ignored."
        )
        problems.append(DataFileError(message, kind="stray", episode=folder.name))
    return files


def is_inside(path: str | Path, root: str) -> bool:
    """Return whether the real path of `path` is the real path `root` or lies below it."""
    real = os.path.realpath(path)
    return real == root or real.startswith(root.rstrip(os.sep) + os.sep)


def read_metadata(
    data_dir: Path, folders: list[TrajectoryFolder]
) -> tuple[dict[str, Any], list[DataFileError]]:
    """Read metadata.json of a dataset: in the data folder, or next to its trajectory folders.

    If there are several files, the first readable one is used. Files that contradict it in the
    description of components are reported.

    Returns:
        Content of the used file; {} if no file is readable.
        Errors of unreadable and contradicting files.
    """
    parents = [data_dir]
    parents += [folder.path.parent for folder in folders if folder.path != data_dir]
    paths = [parent / METADATA_NAME for parent in dict.fromkeys(parents)]
    problems: list[DataFileError] = []
    used: dict[str, Any] = {}
    used_path = paths[0]
    for path, content in _readable_files(paths, os.path.realpath(data_dir), problems):
        if not used:
            used = content
            used_path = path
        elif _components(content) != _components(used):
            message = (
                f"{str(path)!r} and {str(used_path)!r} differ in {SEGMENTS} or {MAPPING}. The "
                "second file is used. Open the folders separately to use both."
            )
            problems.append(DataFileError(message))
    return used, problems


def _readable_files(
    paths: Sequence[Path], root: str, problems: list[DataFileError]
) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield path and content of each readable JSON file; append errors of others to `problems`."""
    for path in paths:
        if not os.path.lexists(path):
            continue
        if not is_inside(path, root):
            problems.append(_outside(path))
            continue
        try:
            content = _read_json(path)
        except DataFileError as problem:
            problems.append(problem)
        else:
            yield path, content


def _components(metadata: Mapping[str, Any]) -> str:
    """Return the description of components as JSON text, in which the order of keys counts."""
    return json.dumps([metadata.get(SEGMENTS), metadata.get(MAPPING)])


def _read_json(path: Path) -> dict[str, Any]:
    for attempt in range(_NUM_READS):
        if attempt:
            time.sleep(_RETRY_S)
        try:
            return read_json(path, MAX_METADATA_BYTES)
        except (OSError, CorruptFileError) as error:
            cause = error
    reason = f"{str(path)!r} cannot be read: {cause}."
    if isinstance(cause, CorruptFileError):
        reason = cause.message
    message = f"{reason} The file is ignored. Names and shapes are read from the chunks."
    raise CorruptFileError(message, kind="metadata") from cause


def _outside(path: str | Path) -> DataFileError:
    return UnsafeFileError(
        f"{str(path)!r} is a link that leads out of the data folder. It is not followed."
    )
