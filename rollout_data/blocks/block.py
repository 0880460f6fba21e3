"""`Block`: the file of a block, its fragments of trajectories, and the offsets of its rows.

A block is a file with frames that one `RolloutWriter` recorded. The consecutive frames of one
trajectory in one block are a fragment; a long trajectory has fragments in several blocks. A block
has two tables: "data" with the frames, and "final" with final observations. A table consists of
columns, and a column stores one or several fields. A row is the bytes of one frame in one column.
Compressed fields are stored in chunks, each with the rows of a few consecutive frames.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

#: Path of the file that contains a block, and name of the block in it; "" if the block is the
#: entire file.
Key = tuple[Path, str]
#: Key of a block, and size in bytes and modification time in ns of its file. Unequal identities show
#: that the file was replaced.
Identity = tuple[Key, int, int]
#: The table of F fragments of a block, and a mapping of tables to the CRC-32 of the rows of each
#: fragment in each column, uint32 `[F, columns]`.
FragmentSums = tuple[np.ndarray, Mapping[str, np.ndarray]]
#: Smallest sequence number of an edit, which is a block without frames that changes or drops earlier
#: trajectories.
FIRST_EDIT = 10**15


@dataclass(frozen=True, eq=False)
class Block:
    """Description of a block file, or of a part of a file of another format.

    Attributes:
        path: The file.
        writer: Name of the writer, unique among all data folders. Each writer numbers its own
            trajectories.
        sequence: Number of the block among the blocks of its writer.
        fragments: Table of fragments, `[F]` of `FRAGMENT_DTYPE`.
        places: Maps (table, column) to (byte offset, number of rows); empty for other formats.
        file_bytes: Size of the file in bytes.
        mtime_ns: Modification time in ns. Size and time show whether a file was replaced.
        name: Name of the block in its file; "" if the block is the entire file.
        fragment_sums: Checksums of the rows of a remote file, which each read checks. None for
            local files.
        notes: Annotations of an edit as (trajectory number, text). They are kept in memory, since
            the next edit may remove the file. None if annotations are read from the file.
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
        """File and name of the block, which identify it until the file is replaced."""
        return self.path, self.name

    @cached_property
    def is_edit(self) -> bool:
        """Whether the block is an edit: it drops or annotates earlier trajectories of its writer."""
        return self.sequence >= FIRST_EDIT and not self.fragments["length"].any()

    @cached_property
    def identity(self) -> Identity:
        """Key, file size and modification time; equal only for the same, unchanged block."""
        return self.key, self.file_bytes, self.mtime_ns
