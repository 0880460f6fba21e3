"""What is known of one block without reading a row of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

#: Of a block: its file, and its name in there; "" if it is the whole file.
Key = tuple[Path, str]
#: What is the same only as long as the block is the same: its key, size and time of the last change in ns.
Identity = tuple[Key, int, int]
#: The fragments of a file, and table -> uint32 `[F, columns]`, CRC-32 of their rows.
FragmentSums = tuple[np.ndarray, Mapping[str, np.ndarray]]
#: Blocks from this sequence number on, without a frame, are edits: see `edits.py`.
FIRST_EDIT = 10**15


@dataclass(frozen=True, eq=False)
class Block:
    """What the index and the frame stores need to know of one file, or of a part of one.

    Attributes:
        path: The file.
        writer: Whose trajectory numbers its fragments use; unique among all data folders.
        sequence: Position among the blocks of its writer.
        fragments: `[F]` of `FRAGMENT_DTYPE`.
        places: (table, column) -> (byte offset, number of rows); empty for foreign files.
        file_bytes: Size of the file.
        mtime_ns: When it was last written: with the size, what tells it from another file of the same name.
        name: Tells it from the other blocks of its file.
        fragment_sums: Checksums with which rows are compared as they are read; None for files of this machine.
        notes: (trajectory number, text) of the notes of an edit, kept for when the next edit has removed its file;
            None: they are read from the file.
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
        """Where it is."""
        return self.path, self.name

    @cached_property
    def is_edit(self) -> bool:
        """Whether it holds no frames, but what was said later of those of its writer."""
        return self.sequence >= FIRST_EDIT and not self.fragments["length"].any()

    @cached_property
    def identity(self) -> Identity:
        """What is the same only as long as the block is the same."""
        return self.key, self.file_bytes, self.mtime_ns
