"""Read and write folders with trajectory files, `trajectory_index.json` and `metadata.json`.

The index lists the trajectories of the folder, and is replaced atomically. A checkpoint replaces
its folder atomically, so a crash leaves the old or the new checkpoint. Both JSON files have the
names and keys of an earlier system, and additional keys. Each of the two systems can therefore read
the folders of the other system. The JSON files contain no paths, so folders can be moved.
"""

from __future__ import annotations

import base64
import hashlib
import json
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from storage.core.durable_files import (
    CHECKSUM,
    existing_folder,
    json_checksum,
    read_json,
    replace_file,
    replace_folder,
)
from storage.errors import CorruptFileError, DataFileError, RolloutDataWarning, SchemaError

from ..sources.trajectory_checkpoints.checkpoint_folder import (
    FORMATS,
    INDEX_NAME,
    LEGACY_INDEX_NAME,
    MAX_ID,
    METADATA_NAME,
    checkpoint_folders,
    find_files,
    index_path,
    listed_entries,
)
from .trajectory_files import Entry, find_block, read_whole
from .trajectory_rows import Rows, layout_of

_FORMAT = "rollout-data trajectories"
_VERSION = 1
#: Maximum bytes of an index, enough for several million trajectories.
_MAX_INDEX_BYTES = 1 << 30


class MissingTrajectoriesError(DataFileError, FileNotFoundError):
    """A folder was loaded that has no index of trajectories."""


class Counters(NamedTuple):
    """State of a buffer that is stored in an index: seed, next id, file format, random state."""

    seed: int
    next_id: int
    file_format: str
    rng: torch.Tensor | None


def save_to(
    folder: Path, entries: list[Entry], counters: Counters, rows_of: Callable[[Entry], Rows]
) -> None:
    """Write the files of trajectories and their index to a folder, which is replaced atomically."""
    own = {INDEX_NAME, LEGACY_INDEX_NAME, METADATA_NAME}
    if folder.is_dir():
        for paths in find_files(folder.resolve()).values():
            own |= {path.name for path in paths}
    with replace_folder(folder, own) as new_folder:
        for entry in entries:
            if entry.path is None:
                target = new_folder / entry.file_name(counters.file_format)
                entry.put_file(target, rows_of(entry))
            else:
                target = new_folder / entry.file_name(entry.path.suffix[1:])
                entry.put_file(target, None)
        write_index(new_folder, {entry.trajectory_id: entry for entry in entries}, counters)


def write_index(folder: Path, entries: Mapping[int, Entry], counters: Counters) -> None:
    """Write the index and the metadata file of a folder with trajectories.

    `entries` maps the trajectory id in each file name to the trajectory.
    """
    summary = {
        "trajectory_format": counters.file_format,
        "size": len(entries),
        "total_samples": sum(entry.num_samples for entry in entries.values()),
        "trajectory_counter": counters.next_id,
        "seed": counters.seed,
    }
    listed = {}
    for id_in_file_name, entry in entries.items():
        listed[str(id_in_file_name)] = {**entry.to_json(), "trajectory_id": id_in_file_name}
    assert counters.rng is not None
    rng = base64.b64encode(counters.rng.numpy().tobytes()).decode()
    index = {
        "trajectory_index": listed,
        "trajectory_id_list": list(entries),
        "format": _FORMAT,
        "version": _VERSION,
        "counters": {**summary, "rng": rng},
    }
    _write_json(folder / INDEX_NAME, {**index, CHECKSUM: json_checksum(index)})
    _write_json(folder / METADATA_NAME, summary)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    with replace_file(path) as new:
        new.write_text(json.dumps(content), encoding="utf-8")


def check_json(info: Mapping[str, Any]) -> None:
    """Check that the metadata of a trajectory can be stored as JSON. Raise `SchemaError` if not."""
    for name, leaf in info.items():
        try:
            json.dumps(leaf)
        except (TypeError, ValueError, RecursionError) as cause:
            raise SchemaError(
                f"field {name!r} of the trajectory cannot be saved as JSON: {cause}."
            ) from cause


def read_folder(folder: Path, trusted: bool, verify: bool) -> tuple[list[Entry], Counters]:
    """Read the trajectories of a folder, oldest first.

    If the folder has no index, its `rank_<r>` folders are read. Trajectories whose file is missing
    are left out, with one warning. If two ranks used the same id, one trajectory gets a new id.

    Raises:
        MissingTrajectoriesError: Neither the folder nor a `rank_<r>` folder has an index.
        CorruptFileError: The index or a file is damaged, or the index contradicts a file.
    """
    folder = existing_folder(folder)
    folders = checkpoint_folders(folder)
    if not folders:
        raise MissingTrajectoriesError(
            f"{str(folder)!r} has no saved trajectories: {INDEX_NAME} is missing."
        )
    entries: list[Entry] = []
    counters_of_ranks = []
    for rank_folder in folders:
        entries_of_rank, counters = _read_rank(rank_folder, trusted, verify)
        entries += entries_of_rank
        counters_of_ranks.append(counters)

    next_id = max(counters.next_id for counters in counters_of_ranks)
    next_id = max([next_id] + [entry.trajectory_id + 1 for entry in entries])
    used_ids: set[int] = set()
    for entry in entries:
        if entry.trajectory_id in used_ids:
            entry.trajectory_id = next_id
            next_id += 1
        used_ids.add(entry.trajectory_id)
    return entries, counters_of_ranks[0]._replace(next_id=next_id)


def share_of(entries: Sequence[Entry], rank: int, world_size: int) -> list[Entry]:
    """Return the trajectories that one rank loads: a contiguous part of all, oldest first.

    Ids show the order in which the ranks of a run recorded, because ranks use disjoint ascending
    ids. So a part with trajectories of several ranks is sorted by id. The part is not sorted if two
    ranks had used the same id, because one of the two trajectories was renumbered on loading.
    """
    start = len(entries) * rank // world_size
    stop = len(entries) * (rank + 1) // world_size
    share = list(entries[start:stop])
    folders = {entry.path.parent for entry in share if entry.path}
    has_stored_ids = all(entry.trajectory_id == entry.id_in_file_name for entry in share)
    if len(folders) > 1 and has_stored_ids:
        share.sort(key=lambda entry: entry.trajectory_id)
    return share


def _read_rank(folder: Path, trusted: bool, verify: bool) -> tuple[list[Entry], Counters]:
    """Read the trajectories and counters of a folder with an index.

    Trajectories whose file is missing are left out, with one warning.

    Raises:
        CorruptFileError: The index is missing or damaged, or a file is damaged.
    """
    path_of_index = index_path(folder) or folder / LEGACY_INDEX_NAME
    try:
        items, counters = _read_index(path_of_index)
        files = find_files(folder)
        entries = []
        missing_ids = []
        for trajectory_id, item in items.items():
            path = _choose_file(files.get(trajectory_id, []), counters.file_format)
            if path is None:
                missing_ids.append(trajectory_id)
            else:
                entries.append(_read_entry(path, trajectory_id, item, trusted, verify))
    except DataFileError:
        raise
    except (
        FileNotFoundError,
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
        OverflowError,
    ) as cause:
        raise CorruptFileError(
            f"{str(path_of_index)!r} is damaged: {type(cause).__name__}: {cause}."
        ) from cause
    if missing_ids:
        first_ids = ", ".join(map(str, missing_ids[:10]))
        message = (
            f"{len(missing_ids)} of {len(items)} trajectories in the index of {str(folder)!r} have "
            f"no file and are skipped: {first_ids}"
        )
        warnings.warn(message, RolloutDataWarning, stacklevel=4)
    return entries, counters


def _read_index(path: Path) -> tuple[dict[int, dict[str, Any]], Counters]:
    """Read an index and the counters of its folder.

    Returns:
        Two results. First, a map from trajectory id to its item in the index, in the order of the
        index. Second, the counters; an earlier system stores them in `metadata.json`.
    """
    index = read_json(path, _MAX_INDEX_BYTES)
    metadata_path = path.parent / METADATA_NAME
    summary = None
    if index.get("format") == _FORMAT:
        summary = index.get("counters")
    elif metadata_path.exists():
        summary = read_json(metadata_path)
    return dict(listed_entries(index)), _counters_of(summary or {})


def _choose_file(paths: Sequence[Path], file_format: str) -> Path | None:
    """Choose the file to read if a trajectory is stored in several formats. None without a file.

    A file with the extension `file_format` is preferred. Otherwise the order of `FORMATS` decides.
    """
    for suffix in (file_format, *FORMATS):
        for path in paths:
            if path.suffix == f".{suffix}":
                return path
    return None


def _read_entry(
    path: Path, trajectory_id: int, item: Mapping[str, Any], trusted: bool, verify: bool
) -> Entry:
    """Read a trajectory from its file and its item in the index. Rows of a block are not read.

    Raises:
        CorruptFileError: The file is damaged, or the index contradicts it.
    """
    num_steps, num_envs = map(int, item["shape"][:2])
    num_samples = int(item["num_samples"])
    shape = (num_steps, num_envs)
    if min(shape) < 1 or num_steps * num_envs != num_samples:
        raise CorruptFileError(
            f"the index lists {str(path)!r} with shape {list(shape)} and {num_samples} samples, "
            "expected the product of the shape."
        )

    block = None
    if path.suffix == ".h5":
        layout, block = find_block(path, trajectory_id, shape, verify)
        info = dict(item.get("info", {}))
    else:
        trajectory = read_whole(path, trusted)
        if trajectory.shape != shape:
            raise CorruptFileError(
                f"{str(path)!r} has shape {list(trajectory.shape)}, expected {list(shape)}."
            )
        layout = layout_of(trajectory.tensors, f"of {str(path)!r}")
        info = trajectory.info
    version = item.get("weights_version")
    return Entry(
        trajectory_id,
        layout,
        shape,
        info,
        uuid=str(item.get("uuid") or uuid.uuid4().hex),
        weights_version=None if version is None else int(version),
        path=path,
        block=block,
    )


def _counters_of(summary: Mapping[str, Any]) -> Counters:
    """Parse the state of a buffer from JSON: seed, next id, file format and random state.

    Raises:
        ValueError: A value is invalid.
    """
    file_format = str(summary.get("trajectory_format"))
    if file_format not in FORMATS:
        file_format = FORMATS[0]
    seed = int(summary.get("seed", 0))
    next_id = int(summary.get("trajectory_counter", 0))
    if next_id >= MAX_ID:
        raise ValueError(f"trajectory_counter must be below {MAX_ID}, got {next_id}")
    text = summary.get("rng")
    rng = None if text is None else _random_state_of(text)
    return Counters(seed, next_id, file_format, rng)


def _random_state_of(text: Any) -> torch.Tensor:
    """Decode the random state in an index. Raise `ValueError` if the text is invalid."""
    state = bytearray(base64.b64decode(text, validate=True))
    rng = torch.frombuffer(state, dtype=torch.uint8)
    try:
        torch.Generator().set_state(rng)
    except RuntimeError as cause:
        raise ValueError(f"rng is not the state of a torch generator: {cause}") from cause
    return rng


def random_state_of_rank(rng: torch.Tensor, rank: int, world_size: int) -> torch.Tensor:
    """Derive a random state for a rank from the random state of a checkpoint.

    Ranks that load the same checkpoint then draw different samples.
    """
    digest = hashlib.sha256(rng.numpy().tobytes() + f"{rank} of {world_size}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1).get_state()
