"""The file of one trajectory: a block (`h5`), what `torch.save` makes (`pt`), or a pickle (`pkl`).

One rule: a file is written beside its place and renamed, and believed only after its checks. A block holds `[T, B]`
steps as B fragments of T frames, and its rows can be mapped; the other formats are read as a whole.
"""

from __future__ import annotations

import os
import pickle
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from storage.checkpoints.files import load_checkpoint, save_to
from storage.core.durable import replace_file
from storage.core.tree import unflatten
from storage.errors import CorruptFileError, DataFileError, UnsafeFileError, UsageError, nearest

from ..format.header import DATA, FINAL, FIRST, FRAGMENT_DTYPE, OPEN, damaged_fragments, layouts_of, read_header
from ..format.rows import ArrayRows
from ..format.schema import RowLayout
from ..format.write import BlockContent, write_block
from ..index.index import Block
from .rows import Rows, Trajectory, layout_for, take_apart, unpack

FORMATS = ("h5", "pt", "pkl")
#: Flags that existing trajectory folders hold with rows for the moment before the first step.
LONGER_FLAGS = ("dones", "terminations", "truncations")
_NAME = re.compile(r"trajectory_(\d{1,18})(?:_.*)?\.(h5|pt|pkl)")


class MissingTrajectoryError(DataFileError, FileNotFoundError):
    """The file of a live trajectory is gone."""

    __str__ = DataFileError.__str__


@contextmanager
def naming(trajectory_id: int, path: Path) -> Iterator[None]:
    """Raise a `MissingTrajectoryError` with the id if the block finds that the file is gone."""
    try:
        yield
    except FileNotFoundError as cause:
        if path.exists():  # something else was not found
            raise
        where, expected = f"{trajectory_id} in {str(path)!r}", "the file that it was saved to or loaded from"
        advice = "Put it back, or load a checkpoint that has it; files stay where they are while a buffer uses them"
        raise MissingTrajectoryError("read the trajectory", where, expected, "no file", advice) from cause


def check_format(file_format: str, trusted: bool) -> None:
    """Raise unless trajectories can be written, and read again, in this format."""
    if file_format not in FORMATS:
        expected = f"a trajectory_format of {nearest(str(file_format), FORMATS)}"
        raise UsageError("store trajectories", "", expected, repr(file_format))
    if file_format == "pkl" and not trusted:
        advice = "Reading pickles runs what they say"
        raise UsageError("store trajectories", "as 'pkl'", "trusted=True", "trusted=False", advice)


def file_name(trajectory_id: int, weights_id: str, file_format: str) -> str:
    """Name a trajectory's file; what in `weights_id` cannot be in a name becomes "_"."""
    return f"trajectory_{trajectory_id}_{re.sub(r'[^A-Za-z0-9.-]', '_', weights_id)[:80]}.{file_format}"


def id_in_name(path: Path) -> int:
    """Give the id in the name of a trajectory file."""
    match = _NAME.fullmatch(path.name)
    assert match is not None, "named by file_name() or found by find_files()"
    return int(match[1])


def find_files(folder: Path) -> dict[tuple[int, str], Path]:
    """List the trajectory files of a folder: (id, format) -> path."""
    matches = [(_NAME.fullmatch(entry.name), entry) for entry in os.scandir(folder)]
    return {(int(m[1]), m[2]): folder / entry.name for m, entry in matches if m and entry.is_file()}


def write_trajectory(
    path: Path, trajectory_id: int, layout: RowLayout, rows: Rows, shape: tuple[int, int], info: Mapping[str, Any]
) -> None:
    """Write a trajectory, in the format that the path ends in; complete or not at all."""
    with replace_file(path) as new:
        if path.suffix == ".h5":
            content = _block_content(trajectory_id, layout, rows, shape)
            os.rename(write_block(new.parent, content, durable=False, in_haste=False), new)
        else:
            with open(new, "wb") as file:
                whole = unflatten({**info, **unpack(layout, rows, shape)})
                (save_to if path.suffix == ".pt" else pickle.dump)(whole, file)


def _block_content(trajectory_id: int, layout: RowLayout, rows: Rows, shape: tuple[int, int]) -> BlockContent:
    num_steps, num_envs = shape
    fragments = np.zeros(num_envs, FRAGMENT_DTYPE)
    fragments["trajectory"] = fragments["env"] = np.arange(num_envs)
    fragments["flags"], fragments["length"] = FIRST | OPEN, num_steps
    fragments["row"], fragments["final_row"] = np.arange(num_envs) * num_steps, -1
    fragments["end_time_ns"], fragments["policy_version"] = time.time_ns(), -1
    data = {name: ArrayRows(words.view(torch.uint8).numpy()) for name, words in rows.items()}
    final = layouts_of(layout.schema)[FINAL].columns
    nothing = {name: ArrayRows(np.empty((0, column.row_bytes), np.uint8)) for name, column in final.items()}
    return BlockContent(
        schema=layout.schema,
        writer="trajectory",
        sequence=trajectory_id,
        fragments=fragments,
        reward_sums=np.zeros((num_envs, 0)),
        rows={DATA: data, FINAL: nothing},
    )


def open_block(path: Path, trajectory_id: int, shape: tuple[int, int], verify: bool = False) -> tuple[RowLayout, Block]:
    """Read where the rows of a trajectory lie in a block file.

    Raises:
        DataFileError: Damaged, or another block than that of `trajectory_id` with `shape`; with `verify` its rows
            are checked too.
    """
    with naming(trajectory_id, path):
        header = read_header(path)
        stamp = os.stat(path)
    num_steps, num_envs = shape
    fragments, layout = header.fragments, layout_for(header.schema.values())
    is_whole = (
        header.sequence == trajectory_id
        and len(fragments) == num_envs  # before the lists below, whose length only the index states
        and layout.schema == header.schema
        and fragments["length"].tolist() == [num_steps] * num_envs
        and fragments["row"].tolist() == list(range(0, num_envs * num_steps, num_steps))
        and not any(header.chunks.values())
    )
    if not is_whole:
        expected = f"trajectory {trajectory_id} of {num_envs} x {num_steps} frames"
        got = f"trajectory {header.sequence} of lengths {fragments['length'].tolist()[:8]}"
        raise CorruptFileError("read the trajectory", repr(str(path)), expected, got)
    if verify:
        for _, error in damaged_fragments(header):
            raise error
    places = {(DATA, name): place for name, place in header.locations[DATA].items()}
    return layout, Block(path, header.writer, trajectory_id, fragments[:0], places, stamp.st_size, stamp.st_mtime_ns)


def read_rows(layout: RowLayout, block: Block) -> Rows:
    """Read all rows of a block file."""
    found: Rows = {}
    with naming(block.sequence, block.path), open(block.path, "rb", buffering=0) as file:
        for (_, name), (offset, num_rows) in block.places.items():
            num_bytes = num_rows * layout.columns[name].row_bytes
            file.seek(offset)
            words = np.fromfile(file, np.int32, num_bytes // 4)
            if words.nbytes < num_bytes:
                expected = f"{num_bytes} bytes of column {name!r}"
                raise CorruptFileError("read the trajectory", repr(str(block.path)), expected, str(words.nbytes))
            found[name] = torch.from_numpy(words).view(num_rows, -1)
    return found


def read_trajectory(path: Path, trusted: bool) -> Trajectory:
    """Read a `pt` or `pkl` file.

    Raises:
        UnsafeFileError: A `pkl` file without `trusted`, or a `pt` file with more than tensors and containers.
        CorruptFileError: Damaged, or no trajectory.
    """
    read = "read the trajectory", repr(str(path))
    if path.suffix == ".pt":
        found = load_checkpoint(path)
    elif not trusted:
        advice = "Pass trusted=True if you trust its author: reading it runs what it says"
        raise UnsafeFileError(*read, "a file that runs no code", "a pickle", advice)
    else:
        try:
            with open(path, "rb") as file:
                found = pickle.load(file)  # the caller said `trusted`
        except Exception as cause:  # what it runs may raise anything
            raise CorruptFileError(*read, "a pickle", str(cause)) from cause
    if not isinstance(found, Mapping):
        raise CorruptFileError(*read, "a dict", type(found).__name__)
    return take_apart(found, LONGER_FLAGS, (), f"of {str(path)!r}")


def link_file(source: Path, target: Path) -> None:
    """Give a file a second name, or make a copy where the file system has no links; complete or not at all."""
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:  # another file system, or one without links
        with replace_file(target) as new:
            shutil.copyfile(source, new)
