"""Read and write trajectory files: blocks (`h5`), `torch.save` files (`pt`), pickles (`pkl`).

A file is written under a temporary name and then renamed. A file is checked before it is read. A
block stores the `[T, B]` steps of a trajectory as B fragments of T frames. Single rows can be read
from a block. Files of the other formats must be read completely.
"""

from __future__ import annotations

import os
import pickle
import re
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from storage.checkpoints.checkpoint_files import save_to
from storage.core.durable_files import replace_file
from storage.core.fields import unflatten
from storage.core.memory import BufferPool
from storage.errors import CorruptFileError, DataFileError

from ..blocks.block import Block
from ..blocks.block_content import ArrayRows, BlockContent
from ..blocks.block_header import (
    DATA,
    FINAL,
    FIRST,
    FRAGMENT_DTYPE,
    OPEN,
    BlockHeader,
    layouts_of,
    open_block,
)
from ..blocks.row_layout import RowLayout
from ..blocks.write_block import write_block_file
from ..sources.trajectory_checkpoints.checkpoint_file import END_FLAGS, load_trajectory
from ..sources.trajectory_checkpoints.checkpoint_folder import id_of_file
from .trajectory_rows import FlatTrajectory, Rows, flatten_trajectory, layout_for, pack, unpack


class MissingTrajectoryError(DataFileError, FileNotFoundError):
    """The file of a trajectory that a buffer still uses does not exist."""


@contextmanager
def missing_file_reported(trajectory_id: int, path: Path) -> Iterator[None]:
    """Context manager that raises `MissingTrajectoryError` if the file `path` is missing.

    The error replaces a `FileNotFoundError` in the `with` block. Errors about other files are not
    replaced.
    """
    try:
        yield
    except FileNotFoundError as cause:
        if path.exists():  # The error is about another file.
            raise
        raise MissingTrajectoryError(
            f"the file {str(path)!r} of trajectory {trajectory_id} is missing. "
            "Restore it, or load a checkpoint with this trajectory. "
            "Do not move files while a buffer uses them."
        ) from cause


@dataclass(eq=False)
class Entry:
    """A trajectory in a buffer: its id, row layout and metadata, and its rows or its file.

    Attributes:
        trajectory_id: Id of the trajectory, unique in the buffer and never reused.
        layout: Layout of the rows: the fields and their byte offsets.
        shape: Number of steps and of environments, (T, B).
        info: Map from flat name to metadata leaf, such as a text or a number.
        uuid: Identifier of the trajectory that is unique across runs.
        weights_version: Version of the policy that recorded the trajectory; None if unknown.
        path: File of the trajectory; None until the file is written.
        rows: Rows in memory; None after the file is written.
        block: Locations of the rows in a block file; None for other files.
        position: Number of trajectories that the buffer received before this trajectory.
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
    position: int = 0

    @property
    def num_samples(self) -> int:
        return self.shape[0] * self.shape[1]

    @property
    def weights_id(self) -> str:
        """Name of the recording policy: the leaf `model_weights_id`, or the version as text."""
        version = "" if self.weights_version is None else self.weights_version
        return str(self.info.get("model_weights_id", version))

    @property
    def id_in_file_name(self) -> int:
        """Trajectory id in the file name.

        It may differ from `trajectory_id`: if several ranks used the same id, loading renumbers a
        trajectory, but does not rename its file.
        """
        trajectory_id = None if self.path is None else id_of_file(self.path.name)
        assert trajectory_id is not None, "named by file_name() or found by find_files()"
        return trajectory_id

    def is_recent(self, min_weights_version: int | None) -> bool:
        """Return whether the trajectory was recorded by a policy of this version or later.

        If `min_weights_version` is None, every trajectory is recent. Otherwise a trajectory with an
        unknown policy version is not.
        """
        if min_weights_version is None:
            return True
        return self.weights_version is not None and self.weights_version >= min_weights_version

    def file_name(self, file_format: str) -> str:
        """Return the name for the file of this trajectory, from its id and its policy.

        Special characters in the name of the policy become "_".
        """
        weights = re.sub(r"[^A-Za-z0-9.-]", "_", self.weights_id)[:80]
        return f"trajectory_{self.trajectory_id}_{weights}.{file_format}"

    def read_rows(self, trusted: bool, pool: BufferPool) -> Rows:
        """Return all rows of the trajectory, from memory if possible, otherwise from its file.

        The caller must not change the rows.
        """
        if self.rows is not None:
            return self.rows
        assert self.path is not None
        with missing_file_reported(self.trajectory_id, self.path):
            if self.block is None:
                return pack(self.layout, read_whole(self.path, trusted).tensors, pool)
            rows = {}
            for (_, name), (offset, num_rows) in self.block.places.items():
                rows[name] = self._read_column(name, offset, num_rows)
            return rows

    def _read_column(self, name: str, offset: int, num_rows: int) -> torch.Tensor:
        assert self.path is not None
        num_words = num_rows * self.layout.columns[name].row_bytes // 4
        words = np.fromfile(self.path, np.int32, num_words, offset=offset)
        if len(words) < num_words:
            raise CorruptFileError(
                f"{str(self.path)!r} is truncated: column {name!r} has {words.nbytes} of "
                f"{4 * num_words} bytes."
            )
        return torch.from_numpy(words).view(num_rows, -1)

    def write(self, path: Path, rows: Rows) -> None:
        """Write rows to a file atomically, in the format of its extension (h5, pt or pkl)."""
        with replace_file(path) as new:
            if path.suffix == ".h5":
                write_block_file(new, self._content(rows), starts_writeback=False, num_threads=1)
                return
            trajectory = unflatten({**self.info, **unpack(self.layout, rows, self.shape)})
            with open(new, "wb") as file:
                if path.suffix == ".pt":
                    save_to(trajectory, file)
                else:
                    pickle.dump(trajectory, file)

    def _content(self, rows: Rows) -> BlockContent:
        """Convert rows to the content of a block file, with one fragment per environment."""
        num_steps, num_envs = self.shape
        fragments = np.zeros(num_envs, FRAGMENT_DTYPE)
        fragments["trajectory"] = np.arange(num_envs)
        fragments["env"] = np.arange(num_envs)
        fragments["flags"] = FIRST | OPEN
        fragments["length"] = num_steps
        fragments["row"] = np.arange(num_envs) * num_steps
        fragments["final_row"] = -1
        fragments["end_time_ns"] = time.time_ns()
        fragments["policy_version"] = -1
        data = {}
        for name, words in rows.items():
            data[name] = ArrayRows(words.view(torch.uint8).numpy())
        no_finals = {}
        for name, column in layouts_of(self.layout.schema)[FINAL].columns.items():
            no_finals[name] = ArrayRows(np.empty((0, column.row_bytes), np.uint8))
        return BlockContent(
            schema=self.layout.schema,
            writer="trajectory",
            sequence=self.trajectory_id,
            fragments=fragments,
            reward_sums=np.zeros((num_envs, 0)),
            rows={DATA: data, FINAL: no_finals},
        )

    def put_file(self, target: Path, rows: Rows | None) -> None:
        """Create the file `target` with the content of this trajectory.

        Args:
            target: Path of the new file.
            rows: Rows to write. None: link or copy the existing file of this trajectory.
        """
        has_other_id = self.block is not None and self.block.sequence != self.trajectory_id
        if rows is None and has_other_id:  # A linked file would still contain the old id.
            rows = self.read_rows(trusted=False, pool=BufferPool())
        if rows is not None:
            self.write(target, rows)
            return
        assert self.path is not None
        with missing_file_reported(self.trajectory_id, self.path):
            try:
                os.link(self.path, target)
            except FileNotFoundError:
                raise
            except OSError:  # The file system has no hard links.
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


def find_block(
    path: Path,
    trajectory_id: int,
    shape: tuple[int, int],
    verify: bool,
) -> tuple[RowLayout, Block]:
    """Read and check the header of a block file. Returns the layout and the row locations.

    Args:
        path: Path of the block file.
        trajectory_id: Expected id of the trajectory.
        shape: Expected shape (T, B).
        verify: Also check the checksums of all rows.

    Raises:
        DataFileError: The block is damaged, or contains a different trajectory.
    """
    with missing_file_reported(trajectory_id, path):
        header = open_block(path, verify)
        status = os.stat(path)
    layout = layout_for(header.schema.values())
    is_expected = header.sequence == trajectory_id and layout.schema == header.schema
    if not is_expected or not _has_shape(header, shape):
        num_steps, num_envs = shape
        lengths = header.fragments["length"].tolist()[:8]
        raise CorruptFileError(
            f"{str(path)!r} has trajectory {header.sequence} with {lengths} frames per environment, "
            f"expected trajectory {trajectory_id} with {num_envs} environments of {num_steps} "
            "frames each."
        )
    places = {(DATA, name): place for name, place in header.locations[DATA].items()}
    block = Block(
        path=path,
        writer=header.writer,
        sequence=trajectory_id,
        fragments=header.fragments[:0],
        places=places,
        file_bytes=status.st_size,
        mtime_ns=status.st_mtime_ns,
    )
    return layout, block


def _has_shape(header: BlockHeader, shape: tuple[int, int]) -> bool:
    """Return whether a block has the shape (T, B): B consecutive fragments of T frames.

    Compressed blocks do not, since single rows cannot be read from them.
    """
    num_steps, num_envs = shape
    fragments = header.fragments
    # Test the number of fragments first. `num_envs` is from the index and may be huge if the index
    # was forged, and the lists below have `num_envs` items.
    if len(fragments) != num_envs:
        return False
    has_lengths = fragments["length"].tolist() == [num_steps] * num_envs
    has_rows = fragments["row"].tolist() == list(range(0, num_envs * num_steps, num_steps))
    return has_lengths and has_rows and not any(header.chunks.values())


def read_whole(path: Path, trusted: bool) -> FlatTrajectory:
    """Read all leaves of a `pt` or `pkl` file. Raises the errors of `load_trajectory`."""
    trajectory = load_trajectory(path, trusted=trusted)
    return flatten_trajectory(trajectory, END_FLAGS, (), f"of {str(path)!r}")
