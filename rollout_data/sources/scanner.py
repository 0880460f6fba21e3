"""`Scanner`, the interface to data folders of one format, and `Choice`, a filter of blocks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from storage.errors import CorruptFileError, UsageError

from ..blocks.annotation_table import EPISODES
from ..blocks.annotations import parsed
from ..blocks.block import Block, Identity, Key
from ..blocks.block_header import END_UNKNOWN, OPEN, TRUNCATED, BlockHeader
from ..blocks.folder_metadata import ENDS, OPEN_END, UNKNOWN
from ..remote.locations import Origin
from .origins import Origins
from .processes.shared_memory import Spot
from .rows.row_source import RowSource

#: Function that returns the blocks of trajectories that are still being read. It is called only if
#: the folders have changed.
BlocksInUse = Callable[[], Collection[Block]]


class Scanner(ABC):
    """Base class that lists files of one format and creates snapshots of their episodes.

    A snapshot never changes. If files changed, `snapshot` returns a new snapshot after `refresh`.
    `LiveSource` owns the scanner and collects its problems.

    Attributes:
        format: Name of the format.
        description: Description of the format for error messages.
    """

    format: str
    description: str

    @abstractmethod
    def __init__(self, source: Origins) -> None:
        """List the files or folders of a dataset."""

    @staticmethod
    @abstractmethod
    def is_there(path: Path) -> bool:
        """Return whether a file or folder contains data of this format."""

    @property
    @abstractmethod
    def metadata(self) -> dict[str, Any]:
        """Metadata of the first file or folder."""

    @property
    @abstractmethod
    def conventions(self) -> set[tuple[str, str]]:
        """Control modes and quaternion orders in the metadata: pairs (key, value)."""

    @abstractmethod
    def refresh(self, in_use: BlocksInUse) -> None:
        """Scan the files again. Deleted blocks that `in_use` returns stay readable."""

    @abstractmethod
    def snapshot(self, upto: Mapping[str, int] | None = None) -> RowSource:
        """Return a snapshot of the episodes that the last scan found."""

    @abstractmethod
    def listing(self) -> Any:
        """Return the result of the last scan, to send it to other processes.

        The result is a tuple of the scanner class and data that can be pickled.
        If nothing changed, the same object is returned.
        """

    @abstractmethod
    def adopt(self, listing: Any, spot: Spot | None) -> bool:
        """Use the result of another process's scan; return whether it was used."""

    def shared(self, source: RowSource) -> Spot | None:
        """Copy a snapshot's index into shared memory; return its location, None if unsupported."""
        return None

    def release(self, in_use: BlocksInUse) -> None:  # noqa: B027 (optional for subclasses)
        """Close deleted files, except the files of blocks that are still being read.

        Formats that keep no file open do nothing.
        """

    def leave_out(self, key: Key) -> None:  # noqa: B027 (optional for subclasses)
        """Skip an unreadable block in later scans, until its file changes.

        Only formats whose listing may still contain the block implement this.
        """


class Choice:
    """Filter that reduces the blocks of one origin to the selected trajectories.

    The selection consists of names "writer:number". The filter also sets ends of trajectories that
    only annotations state.

    Attributes:
        header_of: Function that reads the header of a block, which gives access to its annotations.
            Annotations may state the end of a trajectory as open or unknown. None if the flags of
            the fragments state all ends.

    Raises:
        UsageError: A selected name does not have the form "writer:number".
    """

    header_of: Callable[[Block], BlockHeader] | None = None

    def __init__(self, origin: Origin, label: str) -> None:
        self._numbers: dict[str, list[int]] | None = None if origin.ids is None else {}
        self._cut: dict[Identity, Block] = {}
        for name in origin.ids or ():
            writer, _, number = name.rpartition(":")
            if not number.isdecimal():
                raise UsageError(
                    f"{name!r} is not the name of a trajectory of {str(origin.path)!r}, expected "
                    "'writer:number'."
                )
            assert self._numbers is not None
            self._numbers.setdefault(label + writer, []).append(int(number))

    @property
    def is_all(self) -> bool:
        """Whether blocks need no change: all trajectories are selected and all ends are known."""
        return self._numbers is None and self.header_of is None

    def of(self, blocks: Iterable[Block]) -> list[Block]:
        """Return the blocks with only the selected trajectories; blocks without any are left out.

        Repeated calls return the same object for the same block.
        """
        if self.is_all:
            return list(blocks)
        chosen = []
        for block in blocks:
            if block.is_edit:  # An edit has no frames to select.
                chosen.append(block)
                continue
            if block.identity not in self._cut:
                self._cut[block.identity] = replace(block, fragments=self._fragments(block))
            chosen.append(self._cut[block.identity])
        return [block for block in chosen if len(block.fragments) or block.is_edit]

    def _fragments(self, block: Block) -> np.ndarray:
        fragments: np.ndarray = block.fragments.copy()
        if self.header_of is not None:
            ends = _annotated_ends(block, self.header_of)
            flags = fragments["flags"]
            is_end = (flags & (OPEN | TRUNCATED)) > 0
            for annotated_end, marks in ((UNKNOWN, OPEN | END_UNKNOWN), (OPEN_END, OPEN)):
                numbers = [number for number, end in ends.items() if end == annotated_end]
                is_changed = np.isin(fragments["trajectory"], numbers) & is_end
                changed_flags = flags & ~np.uint32(TRUNCATED) | np.uint32(marks)
                flags = np.where(is_changed, changed_flags, flags)
            fragments["flags"] = flags
        if self._numbers is None:
            return fragments
        return fragments[np.isin(fragments["trajectory"], self._numbers.get(block.writer, []))]


def _annotated_ends(block: Block, header_of: Callable[[Block], BlockHeader]) -> dict[int, Any]:
    """Read from the annotations of a block how its trajectories ended.

    The result maps trajectory numbers to ends.
    The end is None for annotations without an end. If an annotation is damaged, the end of the
    trajectories without a readable annotation is `UNKNOWN`.
    """
    ends: dict[int, Any] = {}
    try:
        for number, text in header_of(block).read_notes(EPISODES):
            ends[number] = parsed(block.path, text).get(ENDS)
    except FileNotFoundError:  # The block was deleted. Reading its rows raises an error.
        return {}
    except CorruptFileError:  # Reading the metadata of an episode raises this error.
        return {**dict.fromkeys(block.fragments["trajectory"].tolist(), UNKNOWN), **ends}
    return ends
