"""Dropping and tagging trajectories of a folder of block files; both can be undone.

One rule: no block is touched. The edits of a folder are one state, published as a whole by small blocks beside the
others (`blocks/edit_blocks.py`), one editor after the other; every reader applies it.
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
from ...sources.block_source import Blocks
from ...sources.episode_reader import ABSENT
from ...sources.recordings_in_folder import check_single
from ...sources.source import kind_of
from ...writing.annotation_checks import episode_json

LOCK_NAME = ".rollout_edits.lock"
#: A trajectory by its name, "writer:number", or by its place in `rollout_data.open(path)`; one or several.
Ids = str | int | Iterable[str | int]
#: (writer, number) of a trajectory.
Key = tuple[str, int]
_NUM_SHOWN = 5


@dataclass
class Edits:
    """All edits of a folder.

    Attributes:
        dropped: The trajectories that are left out.
        said: Trajectory -> what was said of it by `tag`.
        writers: Whose trajectories have ever been edited.
        created_ns: When; None is now.
    """

    dropped: set[Key] = field(default_factory=set)
    said: dict[Key, dict[str, Any]] = field(default_factory=dict)
    writers: set[str] = field(default_factory=set)
    created_ns: int | None = None


def drop(path: str | os.PathLike[str], ids: Ids, *, dry_run: bool = False) -> int:
    """Leave trajectories out: every reader skips them from now on. `undrop` takes it back, `pack` makes it final.

    Writers and readers may be at work. A stream that plays one of them goes on with others at its next look.

    Args:
        path: A folder of block files.
        ids: Names as in `open(path).ids`, or places in `open(path)`.
        dry_run: Count them only; nothing is written.

    Returns:
        How many are left out by it that were not before.

    Raises:
        UsageError: There is no such trajectory, or the path is of another format.
    """

    def change(edits: Edits, index: TrajectoryIndex) -> int:
        return _left_out(edits, _chosen("drop", index, edits, ids))

    return _edited(path, "drop", change, dry_run)


def keep(path: str | os.PathLike[str], ids: Ids, *, dry_run: bool = False) -> int:
    """Leave out all other trajectories that are there now; see `drop`."""

    def change(edits: Edits, index: TrajectoryIndex) -> int:
        return _left_out(edits, {*index.keys()}.difference(_chosen("keep", index, Edits(), ids)))

    return _edited(path, "keep", change, dry_run)


def _left_out(edits: Edits, keys: Iterable[Key]) -> int:
    num_before = len(edits.dropped)
    edits.dropped |= {*keys}
    return len(edits.dropped) - num_before


def undrop(path: str | os.PathLike[str], ids: Ids | None = None, *, dry_run: bool = False) -> int:
    """Take `drop` and `keep` back, of these trajectories by their names, or of all; give how many came back."""

    def change(edits: Edits, index: TrajectoryIndex) -> int:
        back = edits.dropped if ids is None else edits.dropped & set(_chosen("undrop", index, edits, ids))
        edits.dropped = edits.dropped - back
        return len(back)

    return _edited(path, "undrop", change, dry_run)


def tag(path: str | os.PathLike[str], ids: Ids, /, **said: Any) -> int:
    """Note something of trajectories, as a writer's `episode=` does: `task`, `success`, or anything that JSON holds.

    It goes over what was recorded under the same name; None says that it is unknown. `untag` takes it back.

    Args:
        path: A folder of block files.
        ids: Names as in `open(path).ids`, or places in `open(path)`.
        **said: Name -> value; `task` is a text, `success` a truth value.

    Returns:
        How many trajectories it was said of.

    Raises:
        UsageError: There is no such trajectory, a value has a wrong type, or the path is of another format.
    """
    return tagged(path, ids, said)


def tagged(path: str | os.PathLike[str], ids: Ids, said: Mapping[str, Any], *, dry_run: bool = False) -> int:
    """Do as `tag`, or with `dry_run` only check and count; here no name is taken."""
    data = json.loads(episode_json(said, _call("tag"), ""))
    if not said or (reserved := said.keys() & {ENDS, ABSENT}):
        expected = f"names and values, none of them {ENDS!r} or {ABSENT!r}"
        raise UsageError(_call("tag"), "", expected, repr(sorted(reserved)) if said else "none")

    def change(edits: Edits, index: TrajectoryIndex) -> int:
        chosen = _chosen("tag", index, edits, ids)
        for key in chosen:
            edits.said[key] = {**edits.said.get(key, {}), **data}
            if (size := len(json.dumps(edits.said[key]))) > MAX_NOTE_BYTES:
                where = f"for trajectory {_name(key)!r}"
                expected = f"at most {MAX_NOTE_BYTES} bytes said of it"
                raise UsageError(_call("tag"), where, expected, f"{size}", "Record what is large as a field")
        return len(chosen)

    return _edited(path, "tag", change, dry_run)


def untag(path: str | os.PathLike[str], ids: Ids | None = None, *, dry_run: bool = False) -> int:
    """Take back all that `tag` said of these trajectories, or of all; give how many it had said something of."""

    def change(edits: Edits, index: TrajectoryIndex) -> int:
        chosen = (
            list(edits.said)
            if ids is None
            else [key for key in _chosen("untag", index, edits, ids) if key in edits.said]
        )
        for key in chosen:
            del edits.said[key]
        return len(chosen)

    return _edited(path, "untag", change, dry_run)


def edits_of(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the edits of a folder: "dropped", names of trajectories, and "said", name -> what `tag` said of it."""
    edits = read_edits(_folder(path, "edits_of"))
    said = {_name(key): told for key, told in sorted(edits.said.items())}
    return {"dropped": [_name(key) for key in sorted(edits.dropped)], "said": said}


def read_edits(folder: BlockFolder) -> Edits:
    """Read the edits that hold in a folder that was looked at.

    Raises:
        CorruptFileError: One is damaged.
    """
    edits = Edits(writers={found[0] for name in os.listdir(folder.data_dir) if (found := named_edit(name))})
    for block in folder.blocks.values():
        if block.is_edit:
            edits.dropped |= {(block.writer, int(number)) for number in block.fragments["trajectory"]}
            notes = block.notes
            for number, text in read_header(block.path).read_notes(EPISODES) if notes is None else notes:
                edits.said[block.writer, number] = dict(parsed(block.path, text))
    return edits


def publish_edits(folder: BlockFolder, edits: Edits) -> None:
    """Make these the edits of a folder, then remove the earlier ones; a death leaves those or these.

    To be called within `only_editor`, or for a folder that no one else knows.
    """
    path = folder.data_dir
    schema = folder.schema
    assert schema is not None
    for left in path.glob(f"{TEMPORARY_PREFIX}rollout_*"):  # by an editor that died
        if named_edit(left.name.removeprefix(TEMPORARY_PREFIX)):
            left.unlink(missing_ok=True)
    earlier = {name: found[1] for name in os.listdir(path) if (found := named_edit(name))}
    writers = sorted(edits.writers | {writer for writer, _ in (*edits.dropped, *edits.said)})
    sequence = edit_sequence(1 + max(map(generation_of, earlier.values()), default=0), len(writers))
    for writer in writers:
        write_part(path, schema, writer, sequence, edits)
    for name in earlier:
        (path / name).unlink(missing_ok=True)
    sync_path(path)


def write_part(path: Path, schema: Schema, writer: str, sequence: int, edits: Edits) -> None:
    """Write what edits say of the trajectories of one writer, as a block without frames."""
    rows = {
        table: {name: ArrayRows(np.zeros((0, column.row_bytes), np.uint8)) for name, column in layout.columns.items()}
        for table, layout in layouts_of(schema).items()
    }
    numbers = sorted(number for of, number in edits.dropped if of == writer)
    fragments = np.zeros(len(numbers), FRAGMENT_DTYPE)
    fragments["trajectory"], fragments["flags"] = numbers, DROPPED
    fragments["final_row"] = fragments["policy_version"] = -1
    said = [(number, json.dumps(told).encode()) for (of, number), told in edits.said.items() if of == writer]
    sums = np.zeros((len(numbers), schema["reward"].num_elements if "reward" in schema else 0))
    content = BlockContent(schema, writer, sequence, fragments, sums, rows, notes={EPISODES: said})
    write_block(path, replace(content, created_ns=edits.created_ns))


@contextmanager
def only_editor(path: Path) -> Iterator[None]:
    """Wait until no one else edits a folder, and keep others waiting; the system ends it at any death."""
    lock = path / LOCK_NAME
    while True:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if lock.exists() and os.path.samestat(os.fstat(descriptor), os.stat(lock)):
                break
        except FileNotFoundError:  # the one before removed it just now
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
    path: str | os.PathLike[str], action: str, change: Callable[[Edits, TrajectoryIndex], int], dry_run: bool
) -> int:
    """Change the edits of a folder; nothing is written where nothing changes, or for a `dry_run`."""
    dry_run = arguments.flag(_call(action), "dry_run", dry_run)
    folder = _folder(path, action)
    if dry_run:
        return change(read_edits(folder), folder.index)
    with only_editor(folder.data_dir):
        folder.refresh()
        edits = read_edits(folder)
        if count := change(edits, folder.index):
            publish_edits(folder, edits)
        return count


def _call(function: str) -> str:
    return f"call rollout_data.{function}"


def _folder(path: str | os.PathLike[str], action: str) -> BlockFolder:
    """Open a folder of block files.

    Raises:
        UsageError: It is something else, or not on this machine.
        DataFileError: An edit in it is damaged.
    """
    if hasattr(path, "origin"):  # its places and ids would be taken as those of the whole folder
        got = f"{path!r}"
        advice = "Give its path, and names of trajectories, such as its ids"
        raise UsageError(_call(action), "", "path as a folder of block files", got, advice)
    origin, *others = origins_of(path, _call(action), "path")
    if others or isinstance(origin.path, RemotePath):
        expected = "path as one folder of this machine"
        advice = "Edit it, then push it"
        got = f"the URL {str(origin.path)!r}" if not others else f"{1 + len(others)} paths"
        raise UsageError(_call(action), "", expected, got, advice)
    check_single(_call(action), origin.path)
    if kind_of(origin) is not Blocks:
        expected = "path as a folder of block files"
        advice = "Convert it first: rollout_data.convert(path, new_path)"
        got = f"{str(path)!r}, which is of another format"
        raise UsageError(_call(action), "", expected, got, advice)
    folder = BlockFolder.at(origin.path)
    for name, problem in folder.problems.items():
        if named_edit(name):
            advice = f"Run 'rollout-data verify --repair {folder.data_dir}' first"
            raise DataFileError(action, repr(str(path)), "intact edits", repr(name), advice) from problem
    return folder


def _chosen(function: str, index: TrajectoryIndex, edits: Edits, ids: Ids) -> list[Key]:
    """Return (writer, number) of trajectories that are there, or that were dropped."""
    action = _call(function)
    if not isinstance(ids, Iterable) and not is_whole(ids):
        raise UsageError(action, "", "ids as names or places of trajectories", repr(ids))
    listed: list[Any] = list(ids) if isinstance(ids, Iterable) and not isinstance(ids, str) else [ids]
    known = dict.fromkeys(index.keys())
    found: dict[Key, None] = {}
    for one in listed:
        if isinstance(one, (int, np.integer)) and not isinstance(one, bool):
            if not -len(index) <= one < len(index):
                raise UsageError(action, "", f"ids with places in {-len(index)}:{len(index)}", str(one))
            found[index.keys(np.array([one]))[0]] = None
            continue
        writer, _, number = str(one).rpartition(":")
        key = writer, int(number) if number.isdecimal() else -1
        if key not in known and key not in edits.dropped:
            expected = f"ids with names such as {nearest(str(one), map(_name, known), _NUM_SHOWN)}"
            if not known:
                expected = "path with trajectories, of which there are none"
            raise UsageError(action, "", expected, repr(one), "'rollout-data ls' lists them")
        found[key] = None
    return list(found)


def _name(key: Key) -> str:
    return f"{key[0]}:{key[1]}"
