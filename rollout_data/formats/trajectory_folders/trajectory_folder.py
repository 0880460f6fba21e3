"""Scan of trajectory folders: files `trajectory_K/traj_START_END.pickle` and `metadata.json`.

The files are only read, and no code in them is run. Every repaired, skipped or unreadable file is
one entry in `problems`. The intact data are read.

The chunks determine the fields: keys, widths and dtypes. An observation may be stored as several
arrays, its components. The metadata determine their order, shape and codec.
`trajectory_listing.py` parses file names. `trajectory_chunks.py` reads chunks and joins them to
trajectories.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from storage.codecs.codec_chains import VALUE_CODECS
from storage.core.fields import Field, Schema
from storage.core.threads import each
from storage.errors import CorruptFileError, DataFileError, ForeignFileError, nearest

from ...blocks.block_header import DATA, END_UNKNOWN, FRAGMENT_DTYPE, OPEN, layouts_of
from ...blocks.row_layout import RowLayout
from ...sources.episode_info import ABSENT
from ..input_checks import KnownFiles
from .pickled_arrays import TruncatedPickleError
from .trajectory_chunks import (
    ACTIONS,
    COMPONENT_PREFIX,
    DONES,
    OBSERVATIONS,
    PRIVILEGED,
    REWARDS,
    OpenChunk,
    Signature,
    StoredField,
    TrajectoryChunk,
    cut_trajectories,
    join_chunks,
    open_chunk,
    scan_chunk,
)
from .trajectory_listing import (
    MAPPING,
    METADATA_NAME,
    SEGMENTS,
    ChunkFile,
    TrajectoryFolder,
    list_trajectory_folders,
    read_metadata,
)

_FIELD_OF_KEY = {
    OBSERVATIONS: "observation",
    PRIVILEGED: "privileged_observation",
    ACTIONS: "action",
    REWARDS: "reward",
}
_COMPONENT = "observation/"

#: Number of chunks that are first scanned without threads. Scanning a pickle needs the global
#: interpreter lock. Threads cost 30 % if the files are in the page cache, and help only if the disk
#: is slow. The first chunks are timed to decide.
_NUM_TRIAL_CHUNKS = 16
#: Number of threads for the other chunks.
_NUM_THREADS = 8
#: Age in ns up to which a truncated last chunk is not reported. The older writer writes chunks in
#: place, so a recently changed chunk may still grow.
_WRITING_NS = 10 * 10**9
_CUT = "This chunk and the later chunks of its trajectory are left out."


class JoinedFolder(NamedTuple):
    """A trajectory folder with joined chunks.

    Attributes:
        order: Sort key of the folder: modification time of its last chunk, number and path.
        chunks: Joined chunks, by frame.
        fragments: `FRAGMENT_DTYPE`, one per run of frames within one chunk and one trajectory.
        chunk_of: Position of each fragment's chunk in `chunks`.
    """

    order: tuple[int, int, str]
    chunks: list[TrajectoryChunk]
    fragments: np.ndarray
    chunk_of: np.ndarray


@dataclass(frozen=True, eq=False)
class FolderScan:
    """Description of a dataset of trajectory folders, without rows.

    Attributes:
        data_dir: Data folder.
        schema: Fields of the dataset; empty if nothing could be read.
        metadata: Content of metadata.json, unknown keys included; {} if missing or half-written.
        chunk_paths: Chunk files with used frames. Fragments refer to them by position.
        fragments: `FRAGMENT_DTYPE`, one per run of frames within one chunk and one trajectory.
            `row` is the first row within the chunk. Trajectories are numbered by the modification
            times of their last chunks. `end_time_ns` strictly increases in this order.
        chunk_of: int64, position in `chunk_paths` of each fragment; ascending.
        problems: Errors of repaired, skipped and unreadable files. Each names the file and states
            whether it was repaired or skipped.
        absent: Maps folders to fields and flags that a conversion filled with NaN or False, because
            the original data do not have them.
        known: Maps chunk files to their readable chunks. The next scan does not open these files.
        files: States of the readable chunks when they were scanned. Reading a changed file raises
            an error.
        signature: Arrays of the used chunks; () without chunks.
    """

    data_dir: Path
    schema: Schema
    metadata: dict[str, Any]
    chunk_paths: tuple[Path, ...]
    fragments: np.ndarray
    chunk_of: np.ndarray
    problems: tuple[DataFileError, ...]
    absent: Mapping[Path, Sequence[str]] = field(default_factory=dict)
    known: Mapping[ChunkFile, TrajectoryChunk] = field(default_factory=dict, repr=False)
    files: KnownFiles = field(default_factory=KnownFiles, repr=False)
    signature: Signature = ()


def scan_trajectory_folder(
    data_dir: str | os.PathLike[str],
    *,
    previous: FolderScan | None = None,
    without: Collection[ChunkFile] = (),
) -> FolderScan:
    """Scan every chunk once and return the trajectories of a data folder.

    Args:
        data_dir: Data folder. All folders below it are searched.
        previous: An earlier scan of this folder. Only new and changed chunks are opened. The fields
            of the earlier scan are kept if that scan found fields.
        without: Chunk files to leave out, because an earlier attempt to read their rows failed.

    Raises:
        UsageError: `data_dir` is not a folder.
        DataFileError: `data_dir` cannot be listed.
        ForeignFileError: A component of the observation has an unknown codec.
    """
    data_dir = Path(data_dir)
    folders, problems = list_trajectory_folders(data_dir)
    metadata, metadata_problems = read_metadata(data_dir, folders)
    files = []
    for folder in folders:
        files += [file for file in folder.files if file not in without]
    known = previous.known if previous else {}
    scanned = _scan_chunks([file for file in files if file not in known])
    for file in files:
        if file in known:
            scanned[file] = known[file]
    readable = {}
    for file in files:
        chunk = scanned[file]
        if isinstance(chunk, TrajectoryChunk):
            readable[file] = chunk

    chunks = readable.values()
    metadata_path = data_dir / METADATA_NAME
    signature, schema, contradictions = _fields(chunks, metadata, metadata_path, previous)
    problems += [*metadata_problems, *contradictions, *_repairs(chunks)]
    absent = _absent_of(metadata.pop(ABSENT, None), folders)
    known_paths = {file.path for file in known}
    joined = []
    for folder in folders:
        usable, chunk_problems = _usable_chunks(folder, scanned, signature, known_paths)
        joined_folder, join_problems = _join_folder(folder, usable, absent)
        problems += chunk_problems + join_problems
        if joined_folder is not None:
            joined.append(joined_folder)
    chunk_paths, fragments, chunk_of = _in_order(joined)
    return FolderScan(
        data_dir,
        schema,
        metadata,
        chunk_paths,
        fragments,
        chunk_of,
        tuple(problems),
        absent,
        known=readable,
        files=KnownFiles({file.path: file.state for file in readable}),
        signature=signature,
    )


def _usable_chunks(
    folder: TrajectoryFolder,
    scanned: Mapping[ChunkFile, TrajectoryChunk | DataFileError],
    signature: Signature,
    known_paths: Collection[Path],
) -> tuple[list[TrajectoryChunk], list[DataFileError]]:
    """Return the readable chunks of a folder with the expected arrays, and errors for the others.

    Args:
        folder: The trajectory folder.
        scanned: Maps chunk files to chunks, or to errors of unreadable files.
        signature: The expected arrays.
        known_paths: Files that an earlier scan has read.
    """
    usable = []
    problems = []
    for file in folder.files:
        chunk = scanned.get(file)
        if isinstance(chunk, DataFileError):
            is_new_end = file == folder.files[-1] and file.path not in known_paths
            is_recent = abs(time.time_ns() - file.mtime_ns) < _WRITING_NS
            is_truncated = isinstance(chunk.__cause__, TruncatedPickleError)
            # The writer may still be writing this chunk. The next scan reads or reports it.
            if not (is_new_end and is_recent and is_truncated):
                problems.append(chunk)
        elif chunk is not None and chunk.signature != signature:
            expected, got = _difference(signature, chunk.signature)
            message = (
                f"{str(file.path)!r} has {got}, but most chunks have {expected}. {_CUT} Move the "
                "file to a separate data folder to read it."
            )
            problems.append(DataFileError(message, kind="fields", episode=folder.path.name))
        elif chunk is not None:
            usable.append(chunk)
    return usable, problems


def _join_folder(
    folder: TrajectoryFolder,
    chunks: Sequence[TrajectoryChunk],
    absent: Mapping[Path, Sequence[str]],
) -> tuple[JoinedFolder | None, list[DataFileError]]:
    """Join the chunks of a folder and divide them into trajectories.

    Args:
        folder: The trajectory folder.
        chunks: Its usable chunks.
        absent: Maps folders to fields and flags that a conversion filled with NaN or False.

    Returns:
        The joined folder, or None if no chunk can be used.
        Errors to report.
    """
    kept, problems = join_chunks(folder.path, chunks)
    if not kept:
        return None, problems
    fragments, chunk_of, cut_problems = cut_trajectories(folder.path, kept)
    if DONES in absent.get(folder.path, ()):
        is_open = (fragments["flags"] & OPEN) != 0
        fragments["flags"][is_open] |= END_UNKNOWN
    order = (kept[-1].file.mtime_ns, folder.number, str(folder.path))
    return JoinedFolder(order, kept, fragments, chunk_of), problems + cut_problems


def _absent_of(noted: Any, folders: Sequence[TrajectoryFolder]) -> dict[Path, list[str]]:
    """Map folders to the fields and flags that a conversion filled with NaN or False.

    The result is empty if the folders have several parents, since folder names are ambiguous then.

    Args:
        noted: Value of `ABSENT` in the metadata: maps folder names to names of fields and flags.
        folders: All trajectory folders.
    """
    parents = {folder.path.parent for folder in folders}
    if not isinstance(noted, dict) or len(parents) != 1:
        return {}
    absent = {}
    for folder in folders:
        names = noted.get(folder.path.name)
        if isinstance(names, list):
            absent[folder.path] = [name for name in names if isinstance(name, str)]
    return absent


def _fields(
    chunks: Iterable[TrajectoryChunk],
    metadata: Mapping[str, Any],
    path: Path,
    previous: FolderScan | None,
) -> tuple[Signature, Schema, list[DataFileError]]:
    """Choose the arrays to read. Return them, their fields, and errors about wrong metadata.

    Arrays and fields of the previous scan are kept if that scan found fields.
    """
    if previous is None or not previous.signature:
        # The signature with the most frames is used, so that one unusual chunk cannot exclude the
        # rest.
        frames = Counter[Signature]()
        for chunk in chunks:
            frames[chunk.signature] += chunk.num_frames
        signature = max(frames, key=frames.__getitem__, default=())
        return signature, *_build_schema(signature, metadata, path)
    signature = previous.signature
    schema = previous.schema
    try:
        described, problems = _build_schema(signature, metadata, path)
    except ForeignFileError as problem:
        return signature, schema, [problem]
    if metadata and (difference := schema.difference(described)):
        message = (
            f"{str(path)!r} has changed since the dataset was opened: {difference}. The earlier "
            "content is used. Open the dataset again to use the new content."
        )
        problems = [DataFileError(message)]
    return signature, schema, problems


def _difference(expected: Signature, got: Signature) -> tuple[str, str]:
    """Return the first difference of two signatures as texts (expected, got)."""
    expected_fields = {field.key: field for field in expected}
    got_fields = {field.key: field for field in got}
    for key in {**expected_fields, **got_fields}:
        expected_field = expected_fields.get(key)
        got_field = got_fields.get(key)
        if expected_field != got_field:
            return str(expected_field or f"no {key}"), str(got_field or f"no {key}")
    return f"the order {', '.join(expected_fields)}", ", ".join(got_fields)


def _build_schema(
    signature: Signature, metadata: Mapping[str, Any], metadata_path: Path
) -> tuple[Schema, list[DataFileError]]:
    """Build the fields of the dataset from the arrays in the chunks and from metadata.json.

    The metadata state shape and codec of each component. If they contradict the arrays in the
    chunks, an error is reported and the arrays are read as stored.

    Returns:
        The fields: components in the order of the metadata, then the other arrays.
        Errors about contradictions.

    Raises:
        ForeignFileError: A recorded component has an unknown codec.
    """
    problems: list[DataFileError] = []

    def report(problem: str, outcome: str = "The chunks are read as stored.") -> None:
        message = f"{str(metadata_path)!r} {problem}. {outcome}"
        problems.append(DataFileError(message, kind="description"))

    shapes: Any = metadata.get(SEGMENTS)
    codecs: Any = metadata.get(MAPPING)
    if shapes is not None and not _are_shapes(shapes):
        problem = f"has invalid {SEGMENTS}, expected a JSON object of name -> shape"
        report(problem, "The components are read in the order of the chunks.")
    shapes = shapes if _are_shapes(shapes) else {}
    codecs = codecs if isinstance(codecs, dict) else {}
    rank = {COMPONENT_PREFIX + name: position for position, name in enumerate(shapes)}
    components = [stored for stored in signature if stored.key not in _FIELD_OF_KEY]
    components.sort(key=lambda stored: rank.get(stored.key, len(rank)))
    fields = []
    for stored in components:
        name = stored.key.removeprefix(COMPONENT_PREFIX)
        shape = _component_shape(stored, shapes, report)
        codec = codecs.get(name, "raw")
        if not isinstance(codec, str) or codec not in VALUE_CODECS:
            raise ForeignFileError(
                f"{str(metadata_path)!r} has the unknown codec {codec!r} for component {name!r}. "
                f"Known codecs are {nearest(str(codec), VALUE_CODECS)}."
            )
        codec = _component_codec(stored, codec, bool(shapes), report)
        dtype = stored.dtype if codec == "raw" else "float32"
        fields.append(Field(_COMPONENT + name, shape, dtype, codec))

    recorded_keys = {stored.key for stored in components}
    missing = [key for key in rank if key not in recorded_keys]
    if components and missing:
        report(f"has {missing[0]!r} in {SEGMENTS}, but the chunks have no array of that name")
    for stored in signature:
        if stored.key in _FIELD_OF_KEY:
            fields.append(Field(_FIELD_OF_KEY[stored.key], stored.shape, stored.dtype))
    return Schema(fields), problems


def _component_shape(
    stored: StoredField, shapes: Mapping[str, Sequence[int]], report: Callable[..., None]
) -> tuple[int, ...]:
    """Return the shape of a component in the metadata, or else its stored, flat shape."""
    if not shapes:
        return stored.shape
    name = stored.key.removeprefix(COMPONENT_PREFIX)
    num_values = prod(stored.shape)
    described = "no shape"
    if name in shapes:
        shape = tuple(shapes[name])
        if prod(shape) == num_values:
            return shape
        described = f"{prod(shape)} values"
    report(f"has {described} for {name!r} in {SEGMENTS}, but the chunks have {num_values} values")
    return stored.shape


def _component_codec(
    stored: StoredField, codec: str, has_shapes: bool, report: Callable[..., None]
) -> str:
    """Return the codec that fits the stored dtype of a component.

    Args:
        stored: The array in the chunks.
        codec: Codec in the metadata, "raw" if there is none.
        has_shapes: Whether the metadata state shapes. Without any shapes, metadata.json was
            probably lost, and "raw" does not mean that the array has no codec.
        report: Function that adds a problem.
    """
    if codec == "raw":
        if has_shapes or stored.dtype != "uint8":
            return "raw"
        problem = f"has no {MAPPING} for {stored.key!r} of dtype uint8"
        report(problem, "The values are decoded as 'normalized_image'.")
        return "normalized_image"

    needed_dtype = VALUE_CODECS[codec].stored_dtype
    if stored.dtype == needed_dtype:
        return codec
    problem = f"has codec {codec!r} for {stored.key!r}, which needs dtype {needed_dtype}"
    outcome = f"The chunks have dtype {stored.dtype}, and the values are not decoded."
    report(problem, outcome)
    return "raw"


def _are_shapes(value: Any) -> bool:
    if not isinstance(value, dict) or not all(isinstance(shape, list) for shape in value.values()):
        return False
    return all(type(size) is int and size > 0 for shape in value.values() for size in shape)


def _scan_chunks(files: list[ChunkFile]) -> dict[ChunkFile, TrajectoryChunk | DataFileError]:
    start_s = time.perf_counter()
    start_cpu_s = time.thread_time()
    scanned = [_try_scan(file) for file in files[:_NUM_TRIAL_CHUNKS]]
    is_waiting = time.perf_counter() - start_s > 2 * (time.thread_time() - start_cpu_s)
    num_threads = _NUM_THREADS if is_waiting else 1
    scanned += each(_try_scan, files[_NUM_TRIAL_CHUNKS:], num_threads)
    return dict(zip(files, scanned, strict=True))


def _try_scan(file: ChunkFile) -> TrajectoryChunk | DataFileError:
    try:
        return scan_chunk(file)
    except DataFileError as error:
        is_truncated = isinstance(error, TruncatedPickleError)
        error_class = CorruptFileError if is_truncated else type(error)
        problem = error_class(f"{error.message} {_CUT}")
        problem.__cause__ = error.__cause__ or error
        problem.of(error.kind)
    except OSError as error:
        reason = error.strerror or str(error)
        problem = DataFileError(f"{str(file.path)!r} cannot be read: {reason}. {_CUT}")
        problem.__cause__ = error
    return problem.of("", file.path.parent.name)


def _repairs(chunks: Iterable[TrajectoryChunk]) -> list[DataFileError]:
    """Summarize the repairs of all chunks: an error per kind of repair, with the first file."""
    paths: dict[str, list[Path]] = {}
    for chunk in chunks:
        for repair in chunk.repairs:
            paths.setdefault(repair, []).append(chunk.file.path)
    problems = []
    for repair, repaired in paths.items():
        more = f" and {len(repaired) - 1} more" if len(repaired) > 1 else ""
        problems.append(DataFileError(f"{str(repaired[0])!r}{more}: {repair}."))
    return problems


def _in_order(joined: list[JoinedFolder]) -> tuple[tuple[Path, ...], np.ndarray, np.ndarray]:
    """Concatenate the chunks and fragments of all folders, in the order of modification times.

    Trajectories are renumbered in the order of the folders. `end_time_ns` becomes strictly
    increasing.

    Returns:
        The chunk files, the fragments, and the position of each fragment's chunk among the files.
    """
    paths: list[Path] = []
    tables = [np.zeros(0, FRAGMENT_DTYPE)]
    chunk_of = [np.zeros(0, np.int64)]
    num_trajectories = 0
    time_ns = -1
    for folder in sorted(joined, key=lambda folder: folder.order):
        fragments = folder.fragments
        time_ns = max(time_ns + 1, folder.chunks[-1].file.mtime_ns)
        fragments["end_time_ns"] = time_ns + fragments["trajectory"]
        time_ns = int(fragments["end_time_ns"][-1])
        fragments["trajectory"] += num_trajectories
        num_trajectories = int(fragments["trajectory"][-1]) + 1
        tables.append(fragments)
        chunk_of.append(folder.chunk_of + len(paths))
        paths += [chunk.file.path for chunk in folder.chunks]
    return tuple(paths), np.concatenate(tables), np.concatenate(chunk_of)


def _key_of(field_name: str) -> str:
    """Return the key of the array in a chunk that contains a field."""
    keys = [key for key, name in _FIELD_OF_KEY.items() if name == field_name]
    return keys[0] if keys else COMPONENT_PREFIX + field_name.removeprefix(_COMPONENT)


def read_chunk_rows(
    scan: FolderScan, chunk: int, columns: Collection[str] | None = None
) -> dict[str, np.ndarray]:
    """Read all rows of a chunk.

    Args:
        scan: Scan of the data folder with the chunk.
        chunk: Position in `scan.chunk_paths`.
        columns: Columns to read; None for all. The bytes of other columns are not read.

    Returns:
        A dict that maps column names to new arrays, uint8 `[num_rows, row_bytes]`.

    Raises:
        CorruptFileError: The chunk has changed since it was scanned.
        OSError: The chunk cannot be opened any more.
    """
    layout = layouts_of(scan.schema)[DATA]
    path = scan.chunk_paths[chunk]
    scan.files.check(path, os.stat(path))
    used = scan.fragments[scan.chunk_of == chunk]
    num_used_rows = int((used["row"] + used["length"]).max(initial=0))
    rows = {}
    with open_chunk(path) as opened:
        _check_unchanged(opened, num_used_rows, layout, scan.schema)
        for name in layout.columns if columns is None else columns:
            column = layout.columns[name]
            table = np.zeros(opened.num_frames, layout.numpy_dtype(column))
            for field_name in column.offsets:
                shape = (opened.num_frames, *scan.schema[field_name].shape)
                table[field_name] = opened.read(_key_of(field_name)).reshape(shape)
            rows[name] = table.view(np.uint8).reshape(opened.num_frames, column.row_bytes)
    return rows


def _check_unchanged(opened: OpenChunk, num_rows: int, layout: RowLayout, schema: Schema) -> None:
    """Raise `CorruptFileError` if a chunk has fewer than `num_rows` rows, or other arrays."""
    forms = {stored.key: (stored.dtype, prod(stored.shape)) for stored in opened.signature}
    has_same_arrays = True
    for array in layout.stored.values():
        if forms.get(_key_of(array.name)) != (array.dtype, array.num_elements):
            has_same_arrays = False
    if opened.num_frames < num_rows or not has_same_arrays:
        raise CorruptFileError(
            f"{str(opened.path)!r} has changed since the dataset was opened: expected at least "
            f"{num_rows} frames of {schema}, got {opened.num_frames} frames of "
            f"{', '.join(map(str, opened.signature))}. Open the dataset again."
        )


def numbers_within(folder: np.ndarray, trajectory: np.ndarray) -> np.ndarray:
    """Return the number of each trajectory within its folder, counted from 0: int64 `[n]`.

    Args:
        folder: Folder of each fragment, `[n]`.
        trajectory: Trajectory of each fragment, counted over all folders, `[n]`.
    """
    _, folder_number = np.unique(folder, return_inverse=True)
    pairs, position = np.unique(np.stack([folder_number, trajectory]), axis=1, return_inverse=True)
    first_of_folder = np.searchsorted(pairs[0], folder_number)
    numbers: np.ndarray = position.reshape(-1) - first_of_folder
    return numbers
