"""Drop and tag trajectories in a folder of block files. Both can be undone.

Data blocks are not changed. The edits of a folder are stored in small additional blocks
(`blocks/edit_blocks.py`). Each change replaces all of these blocks. Every reader applies the edits.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from storage.core import arguments
from storage.core.arguments import is_whole
from storage.core.durable_files import sync_path
from storage.core.fields import Schema
from storage.errors import DataFileError, UsageError, nearest

from ...blocks.annotation_table import EPISODES, MAX_NOTE_BYTES
from ...blocks.annotations import parsed
from ...blocks.block_content import ArrayRows, BlockContent
from ...blocks.block_folder import BlockFolder
from ...blocks.block_header import DROPPED, FRAGMENT_DTYPE, layouts_of, read_header
from ...blocks.edit_blocks import edit_sequence, generation_of, named_edit
from ...blocks.folder_metadata import ENDS
from ...blocks.trajectory_index import TrajectoryIndex
from ...blocks.write_block import TEMPORARY_PREFIX, write_block
from ...remote.locations import RemotePath, origins_of
from ...sources.block_scanner import BlockScanner
from ...sources.episode_info import ABSENT
from ...sources.live_source import scanner_of
from ...sources.recordings.recordings_in_folder import check_single
from ...writing.annotation_checks import episode_json

LOCK_NAME = ".rollout_edits.lock"
#: One or several trajectories, each by its name "writer:number" or its index in
#: `rollout_data.open(path)`.
Ids = str | int | Iterable[str | int]
#: Key of a trajectory: its writer, and its number within the writer.
Key = tuple[str, int]
#: Maximum number of trajectory names that an error suggests.
_NUM_SHOWN = 5


@dataclass
class Edits:
    """All edits of a folder: dropped trajectories and tags.

    Attributes:
        dropped: Keys of the trajectories that readers skip.
        notes: Map from trajectory key to the annotations that `tag` has added.
        writers: Writers of all trajectories that were ever edited, even if the edit was undone.
        created_ns: Creation time of the new edit blocks in ns; None for the current time.
    """

    dropped: set[Key] = field(default_factory=set)
    notes: dict[Key, dict[str, Any]] = field(default_factory=dict)
    writers: set[str] = field(default_factory=set)
    created_ns: int | None = None


def drop(path: str | os.PathLike[str], ids: Ids, *, dry_run: bool = False) -> int:
    """Drop trajectories, so that every reader skips them from now on.

    `undrop` restores dropped trajectories, and `pack` removes them permanently. Safe to call while
    writers and readers are running. A stream that plays a dropped trajectory continues with another
    trajectory after its next scan of the folder.

    Args:
        path: A folder of block files.
        ids: Names as in `open(path).ids`, or indices into `open(path)`.
        dry_run: Count the trajectories without dropping them.

    Returns:
        Number of trajectories that were not dropped before.

    Raises:
        UsageError: A trajectory does not exist, or the path is of another format.
    """

    def change(edits: Edits, index: TrajectoryIndex) -> int:
        return _drop(edits, _chosen(index, edits, ids))

    return _edited(path, change, dry_run)


def keep(path: str | os.PathLike[str], ids: Ids, *, dry_run: bool = False) -> int:
    """Drop all trajectories in a folder except `ids`, so that every reader skips the others.

    Trajectories that are recorded later are not dropped. `undrop` restores dropped trajectories.
    """

    def change(edits: Edits, index: TrajectoryIndex) -> int:
        kept = _chosen(index, Edits(), ids)
        return _drop(edits, {*index.keys()}.difference(kept))

    return _edited(path, change, dry_run)


def _drop(edits: Edits, keys: Iterable[Key]) -> int:
    """Mark trajectories as dropped. Returns the number of them that were not dropped before."""
    num_before = len(edits.dropped)
    edits.dropped |= {*keys}
    return len(edits.dropped) - num_before


def undrop(path: str | os.PathLike[str], ids: Ids | None = None, *, dry_run: bool = False) -> int:
    """Restore trajectories that `drop` or `keep` has dropped.

    Args:
        path: A folder of block files.
        ids: Names of trajectories; None for all dropped trajectories.
        dry_run: Count the trajectories without restoring them.

    Returns:
        Number of restored trajectories.
    """

    def change(edits: Edits, index: TrajectoryIndex) -> int:
        restored = edits.dropped
        if ids is not None:
            restored = edits.dropped & set(_chosen(index, edits, ids))
        edits.dropped = edits.dropped - restored
        return len(restored)

    return _edited(path, change, dry_run)


def tag(path: str | os.PathLike[str], ids: Ids, /, **notes: Any) -> int:
    """Add metadata such as `task` or `success` to recorded trajectories.

    A value replaces the recorded value of the same name. None marks a value as unknown. `untag`
    restores the recorded values.

    Args:
        path: A folder of block files.
        ids: Names as in `open(path).ids`, or indices into `open(path)`.
        **notes: Names and values, which must be JSON values. `task` is a str, `success` a bool.

    Returns:
        Number of tagged trajectories.

    Raises:
        UsageError: A trajectory does not exist, a value has a wrong type, or the path is of another
            format.
    """
    return tagged(path, ids, notes)


def tagged(
    path: str | os.PathLike[str],
    ids: Ids,
    notes: Mapping[str, Any],
    *,
    dry_run: bool = False,
) -> int:
    """Add the metadata in the mapping `notes` to recorded trajectories.

    Other than in `tag`, names of metadata need not be Python identifiers. With `dry_run`, the
    arguments are checked and the trajectories are counted, but nothing is changed.
    """
    data = json.loads(episode_json(notes))
    reserved = sorted(notes.keys() & {ENDS, ABSENT})
    if not notes or reserved:
        if not notes:
            raise UsageError("no metadata are set. Pass names and values, such as success=False.")
        raise UsageError(f"the names {reserved} are reserved for the library. Choose other names.")

    def change(edits: Edits, index: TrajectoryIndex) -> int:
        chosen = _chosen(index, edits, ids)
        for key in chosen:
            edits.notes[key] = {**edits.notes.get(key, {}), **data}
            num_bytes = len(json.dumps(edits.notes[key]))
            if num_bytes > MAX_NOTE_BYTES:
                raise UsageError(
                    f"the notes of trajectory {_name(key)!r} have {num_bytes} bytes, and the "
                    f"limit is {MAX_NOTE_BYTES}. Record large data as a field."
                )
        return len(chosen)

    return _edited(path, change, dry_run)


def untag(path: str | os.PathLike[str], ids: Ids | None = None, *, dry_run: bool = False) -> int:
    """Remove the metadata that `tag` has added to trajectories.

    Args:
        path: A folder of block files.
        ids: Names or indices of trajectories; None for all.
        dry_run: Count the trajectories without changing them.

    Returns:
        Number of trajectories that had tags.
    """

    def change(edits: Edits, index: TrajectoryIndex) -> int:
        chosen = list(edits.notes)
        if ids is not None:
            named = _chosen(index, edits, ids)
            chosen = [key for key in named if key in edits.notes]
        for key in chosen:
            del edits.notes[key]
        return len(chosen)

    return _edited(path, change, dry_run)


def edits_of(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the dropped trajectories and the tags of a folder.

    Returns:
        A dict of two entries. "dropped" is the list of the names of dropped trajectories. "said"
        maps the name of each tagged trajectory to the metadata that `tag` has added.
    """
    edits = read_edits(_folder(path))
    return {
        "dropped": [_name(key) for key in sorted(edits.dropped)],
        "said": {_name(key): notes for key, notes in sorted(edits.notes.items())},
    }


def read_edits(folder: BlockFolder) -> Edits:
    """Read the edits from the edit blocks of an opened folder.

    Raises:
        CorruptFileError: An edit block is damaged.
    """
    writers = {writer for writer, _ in _edit_files(folder.data_dir).values()}
    edits = Edits(writers=writers)
    for block in folder.blocks.values():
        if not block.is_edit:
            continue
        numbers = block.fragments["trajectory"].tolist()
        edits.dropped |= {(block.writer, number) for number in numbers}
        stored: Iterable[tuple[int, str]] | None = block.notes
        if stored is None:
            stored = read_header(block.path).read_notes(EPISODES)
        for number, text in stored:
            edits.notes[block.writer, number] = dict(parsed(block.path, text))
    return edits


def _edit_files(path: Path) -> dict[str, tuple[str, int]]:
    """Map the file name of each edit block in a folder to its (writer, sequence)."""
    files = {name: named_edit(name) for name in os.listdir(path)}
    return {name: edit for name, edit in files.items() if edit is not None}


def publish_edits(folder: BlockFolder, edits: Edits) -> None:
    """Replace all edits of a folder. A crash leaves either the old or the new edits.

    The caller must hold the lock `only_editor`, unless no other process uses the folder.
    """
    path = folder.data_dir
    schema = folder.schema
    assert schema is not None
    for unfinished in path.glob(f"{TEMPORARY_PREFIX}rollout_*"):  # Temporary files after a crash.
        if named_edit(unfinished.name.removeprefix(TEMPORARY_PREFIX)):
            unfinished.unlink(missing_ok=True)
    old_files = _edit_files(path)
    old_generations = [generation_of(sequence) for _, sequence in old_files.values()]
    writers = set(edits.writers)
    writers.update(writer for writer, _ in edits.dropped)
    writers.update(writer for writer, _ in edits.notes)
    sequence = edit_sequence(1 + max(old_generations, default=0), len(writers))
    for writer in sorted(writers):
        write_part(path, schema, writer, sequence, edits)
    for name in old_files:
        (path / name).unlink(missing_ok=True)
    sync_path(path)


def write_part(path: Path, schema: Schema, writer: str, sequence: int, edits: Edits) -> None:
    """Write the edits of the trajectories of one writer, as an edit block. It has no frames."""
    tables: dict[str, dict[str, ArrayRows]] = {}
    for table, layout in layouts_of(schema).items():
        tables[table] = {}
        for name, column in layout.columns.items():
            tables[table][name] = ArrayRows(np.zeros((0, column.row_bytes), np.uint8))
    numbers = sorted(number for owner, number in edits.dropped if owner == writer)
    fragments = np.zeros(len(numbers), FRAGMENT_DTYPE)
    fragments["trajectory"] = numbers
    fragments["flags"] = DROPPED
    fragments["final_row"] = -1
    fragments["policy_version"] = -1
    num_rewards = schema["reward"].num_elements if "reward" in schema else 0
    reward_sums = np.zeros((len(numbers), num_rewards))
    notes = []
    for (owner, number), values in edits.notes.items():
        if owner == writer:
            notes.append((number, json.dumps(values).encode()))
    content = BlockContent(
        schema,
        writer,
        sequence,
        fragments,
        reward_sums,
        tables,
        notes={EPISODES: notes},
    )
    write_block(path, replace(content, created_ns=edits.created_ns))


@contextmanager
def only_editor(path: Path) -> Iterator[None]:
    """Hold the lock for editing a folder during the `with` statement.

    The operating system releases the lock if the process dies.
    """
    lock = path / LOCK_NAME
    while True:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if lock.exists() and os.path.samestat(os.fstat(descriptor), os.stat(lock)):
                break
        except FileNotFoundError:  # The previous holder of the lock has just removed the file.
            pass
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)
        os.close(descriptor)


def _edited(
    path: str | os.PathLike[str],
    change: Callable[[Edits, TrajectoryIndex], int],
    dry_run: bool,
) -> int:
    """Change the edits of a folder under its lock. Returns the number of changed trajectories.

    `change` modifies the edits in place and returns the number of changed trajectories. The edits
    are not written if this number is 0, or with `dry_run`.
    """
    dry_run = arguments.flag("dry_run", dry_run)
    folder = _folder(path)
    if dry_run:
        return change(read_edits(folder), folder.index)
    with only_editor(folder.data_dir):
        folder.refresh()
        edits = read_edits(folder)
        count = change(edits, folder.index)
        if count:
            publish_edits(folder, edits)
        return count


def _folder(path: str | os.PathLike[str]) -> BlockFolder:
    """Open the folder of block files at `path`, for editing.

    Raises:
        UsageError: The path is of another format, or not on this machine.
        DataFileError: An edit block is damaged.
    """
    # `path` may not be a `Recording`. If it is a selection, its indices differ from those of the
    # folder that would be edited.
    if hasattr(path, "origin"):
        raise UsageError(
            f"path must be a folder of block files, got {path!r}. "
            "Pass the path of the recording, and ids of its trajectories."
        )
    origin, *others = origins_of(path, "path")
    if others or isinstance(origin.path, RemotePath):
        number = f"{1 + len(others)} paths" if others else f"the URL {str(origin.path)!r}"
        raise UsageError(
            f"path must be one folder on this machine, got {number}. "
            "Edit a local folder, then push it."
        )
    check_single(origin.path)
    if scanner_of(origin) is not BlockScanner:
        raise UsageError(
            f"{str(path)!r} has another format than block files. "
            "Convert it with rollout_data.convert(path, new_path)."
        )
    folder = BlockFolder.at(origin.path)
    for name, problem in folder.problems.items():
        if named_edit(name):
            error = DataFileError(
                f"the edits {name!r} in {str(path)!r} are damaged. "
                f"Run 'rollout-data verify --repair {folder.data_dir}' first."
            )
            raise error from problem
    return folder


def _chosen(index: TrajectoryIndex, edits: Edits, ids: Ids) -> list[Key]:
    """Convert ids to keys of trajectories. An index counts only trajectories that are not dropped.

    Raises:
        UsageError: A trajectory does not exist.
    """
    if not isinstance(ids, Iterable) and not is_whole(ids):
        raise UsageError(f"ids must be names or numbers of trajectories, got {ids!r}.")
    is_single = isinstance(ids, str) or not isinstance(ids, Iterable)
    items: list[Any] = [ids] if is_single else list(ids)  # type: ignore[arg-type]
    known = dict.fromkeys(index.keys())
    chosen: dict[Key, None] = {}
    for item in items:
        if isinstance(item, (int, np.integer)) and not isinstance(item, bool):
            if not -len(index) <= item < len(index):
                raise UsageError(
                    f"ids must be names, or numbers in {-len(index)}:{len(index)}, got {item}."
                )
            (key,) = index.keys(np.array([item]))
            chosen[key] = None
            continue
        writer, _, number = str(item).rpartition(":")
        key = writer, int(number) if number.isdecimal() else -1
        if key not in known and key not in edits.dropped:
            if not known:
                raise UsageError(f"the id {item!r} is unknown, since path has no trajectories.")
            raise UsageError(
                f"the id {item!r} is unknown. Choose ids such as "
                f"{nearest(str(item), map(_name, known), _NUM_SHOWN)}; 'rollout-data ls' lists all."
            )
        chosen[key] = None
    return list(chosen)


def _name(key: Key) -> str:
    return f"{key[0]}:{key[1]}"
