"""A trajectory and its file: a block (`h5`), what `torch.save` makes (`pt`), or a pickle (`pkl`).

One rule: a file is written beside its place and renamed, and believed only after its checks. A block holds `[T, B]`
steps as B fragments of T frames, and its rows can be mapped; the other formats are read as a whole.
"""

from __future__ import annotations

import os
import pickle
import re
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from storage.checkpoints.checkpoint_files import load_checkpoint, save_to
from storage.core.durable_files import replace_file
from storage.core.fields import unflatten
from storage.core.memory import BufferPool
from storage.errors import CorruptFileError, DataFileError, UnsafeFileError

from ..blocks.block import Block
from ..blocks.block_content import ArrayRows, BlockContent
from ..blocks.block_header import DATA, FINAL, FIRST, FRAGMENT_DTYPE, OPEN, layouts_of, open_block
from ..blocks.row_layout import RowLayout
from ..blocks.write_block import write_block
from .trajectory_rows import Leaves, Rows, layout_for, pack, take_apart, unpack

FORMATS = ("h5", "pt", "pkl")
#: Flags that existing trajectory folders hold with rows for the moment before the first step.
LONGER_FLAGS = ("dones", "terminations", "truncations")
_NAME = re.compile(r"trajectory_(\d{1,18})(?:_.*)?\.(h5|pt|pkl)")
_READ = "read the trajectory"


class MissingTrajectoryError(DataFileError, FileNotFoundError):
    """The file of a live trajectory is gone."""


@contextmanager
def naming(trajectory_id: int, path: Path) -> Iterator[None]:
    """Raise a `MissingTrajectoryError` with the id if the block finds that the file is gone."""
    try:
        yield
    except FileNotFoundError as cause:
        if path.exists():  # something else was not found
            raise
        where = f"{trajectory_id} in {str(path)!r}"
        expected = "the file that it was saved to or loaded from"
        advice = "Put it back, or load a checkpoint that has it; files stay where they are while a buffer uses them"
        raise MissingTrajectoryError(_READ, where, expected, "no file", advice) from cause


@dataclass(eq=False)
class Entry:
    """A trajectory of a buffer.

    Attributes:
        trajectory_id: Its number; never used again.
        layout: What its rows hold.
        shape: (T, B).
        info: Its leaves that are no tensors, by flat name.
        uuid: Tells it from all others, also of other runs.
        weights_version: Number of the policy that acted, or None.
        path: Its file, once it has one.
        rows: Its rows until the file is written.
        block: Where the rows lie in the file, if that is a block.
        place: Position among all that were ever live in a buffer.
    """

    trajectory_id: int
    layout: RowLayout
    shape: tuple[int, int]
    info: dict[str, Any]
    uuid: str = field(default_factory=lambda: uuid.uuid4().hex)
    weights_version: int | None = None
    path: Path | None = None
    rows: Rows | None = None
    block: Block | None = None
    place: int = 0

    @property
    def num_samples(self) -> int:
        return self.shape[0] * self.shape[1]

    @property
    def weights_id(self) -> str:
        """The name of the policy that acted: `model_weights_id`, or else the version."""
        return str(self.info.get("model_weights_id", "" if self.weights_version is None else self.weights_version))

    @property
    def filed_id(self) -> int:
        """The id in the name of its file."""
        match = self.path and _NAME.fullmatch(self.path.name)
        assert match, "named by file_name() or found by find_files()"
        return int(match[1])

    def is_recent(self, min_weights_version: int | None) -> bool:
        """Return whether the policy that acted is this version or a later one; False if it is not known."""
        if min_weights_version is None:
            return True
        return self.weights_version is not None and self.weights_version >= min_weights_version

    def file_name(self, file_format: str) -> str:
        """Name its file; what of the weights' name cannot be in a name becomes "_"."""
        weights = re.sub(r"[^A-Za-z0-9.-]", "_", self.weights_id)[:80]
        return f"trajectory_{self.trajectory_id}_{weights}.{file_format}"

    def read_rows(self, trusted: bool, pool: BufferPool) -> Rows:
        """Return its rows, of memory or of its file; not to be changed."""
        if self.rows is not None:
            return self.rows
        assert self.path is not None
        with naming(self.trajectory_id, self.path):
            if self.block is None:
                return pack(self.layout, read_whole(self.path, trusted).tensors, pool)
            return {name: self._read_column(name, *place) for (_, name), place in self.block.places.items()}

    def _read_column(self, name: str, offset: int, num_rows: int) -> torch.Tensor:
        assert self.path is not None
        num_words = num_rows * self.layout.columns[name].row_bytes // 4
        words = np.fromfile(self.path, np.int32, num_words, offset=offset)
        if len(words) < num_words:
            expected = f"{4 * num_words} bytes of column {name!r}"
            raise CorruptFileError(_READ, repr(str(self.path)), expected, str(words.nbytes))
        return torch.from_numpy(words).view(num_rows, -1)

    def write(self, path: Path, rows: Rows) -> None:
        """Write a file of these rows, in the format that the path ends in; complete or not at all."""
        with replace_file(path) as new:
            if path.suffix == ".h5":
                os.rename(write_block(new.parent, self._content(rows), durable=False, num_threads=1), new)
            else:
                with open(new, "wb") as file:
                    whole = unflatten({**self.info, **unpack(self.layout, rows, self.shape)})
                    (save_to if path.suffix == ".pt" else pickle.dump)(whole, file)

    def _content(self, rows: Rows) -> BlockContent:
        num_steps, num_envs = self.shape
        fragments = np.zeros(num_envs, FRAGMENT_DTYPE)
        fragments["trajectory"] = fragments["env"] = np.arange(num_envs)
        fragments["flags"], fragments["length"] = FIRST | OPEN, num_steps
        fragments["row"], fragments["final_row"] = np.arange(num_envs) * num_steps, -1
        fragments["end_time_ns"], fragments["policy_version"] = time.time_ns(), -1
        data = {name: ArrayRows(words.view(torch.uint8).numpy()) for name, words in rows.items()}
        final = layouts_of(self.layout.schema)[FINAL].columns
        nothing = {name: ArrayRows(np.empty((0, column.row_bytes), np.uint8)) for name, column in final.items()}
        return BlockContent(
            schema=self.layout.schema,
            writer="trajectory",
            sequence=self.trajectory_id,
            fragments=fragments,
            reward_sums=np.zeros((num_envs, 0)),
            rows={DATA: data, FINAL: nothing},
        )

    def put_file(self, target: Path, rows: Rows | None) -> None:
        """Write a file of `rows`; without, link or copy its own, or write it anew if that names another id."""
        if rows is None and self.block is not None and self.block.sequence != self.trajectory_id:
            rows = self.read_rows(trusted=False, pool=BufferPool())
        if rows is not None:
            self.write(target, rows)
            return
        assert self.path is not None
        with naming(self.trajectory_id, self.path):
            try:
                os.link(self.path, target)
            except FileNotFoundError:
                raise
            except OSError:  # another file system, or one without links
                with replace_file(target) as new:
                    shutil.copyfile(self.path, new)

    def to_json(self) -> dict[str, Any]:
        return {
            "num_samples": self.num_samples,
            "trajectory_id": self.trajectory_id,
            "max_episode_length": self.info.get("max_episode_length", self.shape[0]),
            "shape": list(self.shape),
            "model_weights_id": self.weights_id,
            "uuid": self.uuid,
            "weights_version": self.weights_version,
            "info": self.info,
        }


def find_files(folder: Path) -> dict[tuple[int, str], Path]:
    """List the trajectory files of a folder: (id, format) -> path."""
    matches = [(_NAME.fullmatch(entry.name), entry) for entry in os.scandir(folder)]
    return {(int(m[1]), m[2]): folder / entry.name for m, entry in matches if m and entry.is_file()}


def find_block(path: Path, trajectory_id: int, shape: tuple[int, int], verify: bool) -> tuple[RowLayout, Block]:
    """Read where the rows of a trajectory lie in a block file.

    Raises:
        DataFileError: Damaged, or another block than that of `trajectory_id` with `shape`; with `verify` its rows
            are checked too.
    """
    with naming(trajectory_id, path):
        header = open_block(path, verify)
        stamp = os.stat(path)
    num_steps, num_envs = shape
    fragments = header.fragments
    layout = layout_for(header.schema.values())
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
        raise CorruptFileError(_READ, repr(str(path)), expected, got)
    places = {(DATA, name): place for name, place in header.locations[DATA].items()}
    return layout, Block(path, header.writer, trajectory_id, fragments[:0], places, stamp.st_size, stamp.st_mtime_ns)


def read_whole(path: Path, trusted: bool) -> Leaves:
    """Read a `pt` or `pkl` file.

    Raises:
        UnsafeFileError: A `pkl` file without `trusted`, or a `pt` file with more than tensors and containers.
        CorruptFileError: Damaged, or no trajectory.
    """
    if path.suffix == ".pt":
        found = load_checkpoint(path)
    elif not trusted:
        advice = "Pass trusted=True if you trust its author: reading it runs what it says"
        raise UnsafeFileError(_READ, repr(str(path)), "a file that runs no code", "a pickle", advice)
    else:
        try:
            with open(path, "rb") as file:
                found = pickle.load(file)  # the caller said `trusted`
        except Exception as cause:  # what it runs may raise anything
            raise CorruptFileError(_READ, repr(str(path)), "a pickle", str(cause)) from cause
    if not isinstance(found, Mapping):
        raise CorruptFileError(_READ, repr(str(path)), "a dict", type(found).__name__)
    return take_apart(found, LONGER_FLAGS, (), f"of {str(path)!r}")
