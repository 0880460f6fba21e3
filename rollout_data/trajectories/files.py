"""Files of trajectories: one per trajectory, as a block (`h5`), by `torch.save` (`pt`) or pickled (`pkl`).

One rule: a file is written beside its place and renamed, and believed only as far as it checks.
A block holds the fields of `[T, B]` steps as B fragments of T frames; rows of it are read where
they are needed, through memory maps. The other formats are read whole.
"""

from __future__ import annotations

import os
import pickle
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import lcm
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from storage.checkpoints.files import load_checkpoint, save_to
from storage.core.durable import replace_file
from storage.errors import CorruptFileError, DataFileError, UnsafeFileError, UsageError, nearest

from ..format.block_file import BlockContent, damaged_fragments, write_block
from ..format.header import DATA, FINAL, FIRST, FRAGMENT_DTYPE, OPEN, layouts_of, read_header
from ..format.row_source import ArrayRows
from ..frames import arena
from .rows import Rows, Trajectory, TrajectoryLayout, layout_for, put_together, take_apart

FORMATS = ("h5", "pt", "pkl")
#: Flags that existing trajectory folders hold with rows for the moment before the first step.
LONGER_FLAGS = ("dones", "terminations", "truncations")
_NAME = re.compile(r"trajectory_(\d{1,18})(?:_.*)?\.(h5|pt|pkl)")
#: Beyond this the system refuses more (65530 by default), so that all are given up and mapped again when needed.
_MAX_MAPPINGS = 20_000
#: So many rows are looked at to tell whether what is wanted lies in memory.
_NUM_PROBES = 16
Int64s = npt.NDArray[np.int64]


class MissingTrajectoryError(DataFileError, FileNotFoundError):
    """The file of a live trajectory is gone."""

    __str__ = DataFileError.__str__


@contextmanager
def naming(trajectory_id: int, path: Path) -> Iterator[None]:
    """Say which trajectory cannot be had when its file is gone: the system knows the file alone."""
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
    """Give the id that a trajectory file's name tells."""
    match = _NAME.fullmatch(path.name)
    assert match is not None, "named by file_name() or found by find_files()"
    return int(match[1])


def find_files(folder: Path) -> dict[tuple[int, str], Path]:
    """List the trajectory files of a folder: (id, format) -> path."""
    found = {}
    for entry in os.scandir(folder):
        match = _NAME.fullmatch(entry.name)
        if match and entry.is_file():
            found[int(match[1]), match[2]] = folder / entry.name
    return found


def write_trajectory(
    path: Path,
    trajectory_id: int,
    layout: TrajectoryLayout,
    rows: Rows,
    shape: tuple[int, int],
    info: Mapping[str, Any],
) -> None:
    """Write a trajectory, in the format that the path ends in; complete or not at all."""
    with replace_file(path) as new:
        if path.suffix == ".h5":
            content = _content(trajectory_id, layout, rows, shape)
            os.rename(write_block(new.parent, content, durable=False, in_haste=False), new)
        else:
            whole = put_together(unpack(layout, rows, shape), info)
            with open(new, "wb") as file:
                (save_to if path.suffix == ".pt" else pickle.dump)(whole, file)


def unpack(layout: TrajectoryLayout, rows: Rows, shape: tuple[int, int]) -> dict[str, torch.Tensor]:
    """Turn rows into `[T, B, *shape]` tensors of their own."""
    num_steps, num_envs = shape
    views = {name: x.unflatten(0, (num_envs, num_steps)).transpose(0, 1) for name, x in layout.cut(rows).items()}
    return {name: view.clone(memory_format=torch.contiguous_format) for name, view in views.items()}


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
        advice = "Pass trusted=True if you trust whoever wrote it: reading it runs what it says"
        raise UnsafeFileError(*read, "a file that runs no code", "a pickle", advice)
    else:
        try:
            with open(path, "rb") as file:
                found = pickle.load(file)  # the caller said `trusted`
        except Exception as cause:  # whatever it runs may raise anything
            raise CorruptFileError(*read, "a pickle", str(cause)) from cause
    if not isinstance(found, Mapping):
        raise CorruptFileError(*read, "a dict", type(found).__name__)
    return take_apart(found, LONGER_FLAGS, (), f"of {str(path)!r}")


class TrajectoryBlock:
    """A trajectory in a block file: what is known of it without reading a row.

    Raises:
        DataFileError: Damaged, or another block than one of `trajectory_id` with `shape`; with `verify` its
            rows are checked too.
    """

    def __init__(self, path: Path, trajectory_id: int, shape: tuple[int, int], verify: bool = False) -> None:
        with naming(trajectory_id, path):
            header = read_header(path)
        self.trajectory_id, self.path = trajectory_id, path
        self.layout = layout_for(header.schema.values())
        num_steps, num_envs = shape
        fragments = header.fragments
        is_whole = (
            header.sequence == trajectory_id
            and len(fragments) == num_envs  # before the lists below, whose length the index alone tells
            and self.layout.schema == header.schema
            and fragments["length"].tolist() == [num_steps] * num_envs
            and fragments["row"].tolist() == list(range(0, num_envs * num_steps, num_steps))
            and not any(header.chunks.values())
        )
        if not is_whole:
            expected = f"trajectory {trajectory_id} of {num_envs} x {num_steps} frames"
            got = f"trajectory {header.sequence} of lengths {fragments['length'].tolist()[:8]}"
            raise CorruptFileError("read the trajectory", repr(str(path)), expected, got)
        self.num_rows = num_steps * num_envs
        self.offsets = {name: offset for name, (offset, _) in header.locations[DATA].items()}
        if verify:
            for _, error in damaged_fragments(header):
                raise error

    def rows(self) -> Rows:
        """Read all rows, opening the file once."""
        found: Rows = {}
        with naming(self.trajectory_id, self.path), open(self.path, "rb", buffering=0) as file:
            for name, width in self.layout.widths.items():
                file.seek(self.offsets[name])
                words = np.fromfile(file, np.int32, self.num_rows * width)
                if len(words) < self.num_rows * width:
                    where, expected = repr(str(self.path)), f"{4 * self.num_rows * width} bytes of column {name!r}"
                    raise CorruptFileError("read the trajectory", where, expected, str(4 * len(words)))
                found[name] = torch.from_numpy(words).view(self.num_rows, width)
        return found


class MappedRows:
    """The mapped rows of many trajectory files of one layout: any rows of any of them are one gather."""

    def __init__(self, layout: TrajectoryLayout) -> None:
        self.layout = layout
        self._arenas: dict[str, arena.Arena] = {}
        self._first: dict[Path, dict[str, int]] = {}

    def gather(self, blocks: Sequence[TrajectoryBlock], which: Int64s, row: Int64s, columns: Sequence[str]) -> Rows:
        """Copy row `row[i]` of `blocks[which[i]]`, for all i: column -> `[len(which), words]` int32."""
        if not arena.is_supported:
            return self._gather_plainly(blocks, which, row, columns)
        if len(self._first) + len(blocks) > _MAX_MAPPINGS or not all(map(self._map, blocks)):
            self.close()
            if not all(map(self._map, blocks)):
                raise DataFileError("map the trajectories", "", "address space for them", "too little")
        found = {}
        for name in columns:
            first = np.array([self._first[block.path][name] for block in blocks], np.int64)
            rows, mapped = first[which] + row, self._arenas[name]
            probes = rows[:: max(1, len(rows) // _NUM_PROBES)].tolist()
            if not all(map(mapped.is_resident, probes)):
                # Ask for all before waiting for the first; pages that are there are not asked for twice.
                for one in np.sort(rows).tolist():
                    mapped.will_need(one, 1)
            found[name] = torch.index_select(mapped.words_view, 0, torch.from_numpy(rows))
        return found

    def unmap(self, block: TrajectoryBlock) -> None:
        """Unmap a file, if it is mapped."""
        for name, first in self._first.pop(block.path, {}).items():
            self._arenas[name].unmap(first, block.num_rows)

    def close(self) -> None:
        """Unmap everything. Idempotent."""
        for mapped in self._arenas.values():
            mapped.close()
        self._arenas, self._first = {}, {}

    def _map(self, block: TrajectoryBlock) -> bool:
        """Map a file unless it is; tell whether there was room."""
        if block.path in self._first:
            return True
        first = {}
        for name, column in self.layout.layout.columns.items():
            needed = block.num_rows * column.row_bytes + lcm(column.row_bytes, arena.PAGE_BYTES) + arena.PAGE_BYTES
            if name not in self._arenas:
                self._arenas[name] = arena.Arena(column.row_bytes, needed)
            if self._arenas[name].free_bytes < needed:
                return False
            with naming(block.trajectory_id, block.path):
                first[name] = self._arenas[name].map_file(block.path, block.offsets[name], block.num_rows)
        self._first[block.path] = first
        return True

    def _gather_plainly(
        self, blocks: Sequence[TrajectoryBlock], which: Int64s, row: Int64s, columns: Sequence[str]
    ) -> Rows:
        found = {name: np.empty((len(which), self.layout.widths[name]), np.int32) for name in columns}
        for place, block in enumerate(blocks):
            for name, out in found.items():
                with naming(block.trajectory_id, block.path):
                    shape = block.num_rows, out.shape[1]
                    mapped = np.memmap(block.path, np.int32, "r", block.offsets[name], shape)
                out[which == place] = mapped[row[which == place]]
        return {name: torch.from_numpy(out) for name, out in found.items()}


def _content(trajectory_id: int, layout: TrajectoryLayout, rows: Rows, shape: tuple[int, int]) -> BlockContent:
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


def link_file(source: Path, target: Path) -> None:
    """Give a file a second name, or a copy that is there as a whole or not at all; nobody changes either in place."""
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:  # another file system, or one without links
        with replace_file(target) as new:
            shutil.copyfile(source, new)
