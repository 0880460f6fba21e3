"""`Block`: a block as indices and stores see it, without its rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

#: File of a block, and its name in the file; "" if it is the whole file.
Key = tuple[Path, str]
#: Key, size and modification time in ns. A changed block has another identity.
Identity = tuple[Key, int, int]
#: Fragments of a file, and table -> CRC-32 of the rows of each fragment, uint32 `[F, columns]`.
FragmentSums = tuple[np.ndarray, Mapping[str, np.ndarray]]
#: Blocks without frames from this sequence number on are edits: see `edit_blocks.py`.
FIRST_EDIT = 10**15


@dataclass(frozen=True, eq=False)
class Block:
    """A file of frames, or a part of a file.

    Attributes:
        path: The file.
        writer: Name of the writer, unique among all data folders. Trajectories are numbered by
            writer.
        sequence: Position among the blocks of its writer.
        fragments: `[F]` of `FRAGMENT_DTYPE`.
        places: (table, column) -> (byte offset, number of rows); empty for foreign files.
        file_bytes: Size of the file.
        mtime_ns: Modification time. With the size, it distinguishes files of one name.
        name: Name of the block among the blocks of its file; "" if it is the whole file.
        fragment_sums: Checksums to compare rows with when they are read; None for files of this
            machine.
        notes: (trajectory number, text) of the annotations of an edit, since its file may be
            removed by the next edit. None if they are read from the file.
    """

    path: Path
    writer: str
    sequence: int
    fragments: np.ndarray
    places: Mapping[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    file_bytes: int = 0
    mtime_ns: int = 0
    name: str = ""
    fragment_sums: FragmentSums | None = None
    notes: tuple[tuple[int, str], ...] | None = None

    @cached_property
    def key(self) -> Key:
        """File and name of the block."""
        return self.path, self.name

    @cached_property
    def is_edit(self) -> bool:
        """Whether the block has no frames, but later annotations of trajectories of its writer."""
        return self.sequence >= FIRST_EDIT and not self.fragments["length"].any()

    @cached_property
    def identity(self) -> Identity:
        """Key, size and modification time: equal only for the same, unchanged block."""
        return self.key, self.file_bytes, self.mtime_ns
