"""`Scanner`: lists files of one format and creates snapshots of their episodes."""

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
from ..blocks.missing_trajectories import NONE_GONE, Lengths
from ..remote.locations import Origin
from .origins import Origins
from .processes.shared_memory import Spot
from .rows.row_source import RowSource

#: Function that returns the blocks of the trajectories in use. It is called only if the folders
#: have changed.
BlocksInUse = Callable[[], Collection[Block]]


class Scanner(ABC):
    """Scanner of the files of one format, which creates snapshots of their episodes.

    A snapshot never changes. After a `refresh`, `snapshot` returns a new one if files changed.
    `LiveSource` owns the scanner and receives its problems.

    Attributes:
        format: Name of the format.
        description: Description of the format for errors.
    """

    format: str
    description: str

    @abstractmethod
    def __init__(self, source: Origins) -> None:
        """List the files."""

    @staticmethod
    @abstractmethod
    def is_there(path: Path) -> bool:
        """Return whether a path contains data of this format."""

    @property
    @abstractmethod
    def metadata(self) -> dict[str, Any]:
        """Metadata of the first folder."""

    @property
    @abstractmethod
    def conventions(self) -> set[tuple[str, str]]:
        """Control modes and quaternion orders in the metadata; see `origins.conventions`."""

    @abstractmethod
    def refresh(self, in_use: BlocksInUse) -> None:
        """Scan the files again. Deleted blocks stay readable while they are `in_use`."""

    @abstractmethod
    def snapshot(
        self, upto: Mapping[str, int] | None = None, gone: Lengths = NONE_GONE
    ) -> RowSource:
        """Return the episodes of the last scan; see `LiveSource.snapshot`."""

    @abstractmethod
    def listing(self) -> Any:
        """Return the last scan, (class, *plain data); the same object if nothing changed."""

    @abstractmethod
    def adopt(self, listing: Any, spot: Spot | None) -> bool:
        """Use the scan of another process; see `LiveSource.adopt`."""

    def shared(self, source: RowSource) -> Spot | None:
        """Return shared memory with the index of a snapshot, for other local processes, or None."""
        return None

    def release(self, in_use: BlocksInUse) -> None:  # noqa: B027 (most keep no file open)
        """Close deleted files that are not `in_use`. Formats that keep no file open do nothing."""

    def leave_out(self, key: Key) -> None:  # noqa: B027 (most never list it again)
        """Skip a block in later scans until it changes.

        Needed for formats whose listing can contain deleted blocks.
        """


class Choice:
    """The selected trajectories of one origin, by name: "writer:number".

    Attributes:
        header_of: Function that reads the header of a block whose notes may contain the ends of
            trajectories; None if the flags of fragments are complete.

    Raises:
        UsageError: A name does not have this form.
    """

    header_of: Callable[[Block], BlockHeader] | None = None

    def __init__(self, origin: Origin, label: str) -> None:
        self._numbers: dict[str, list[int]] | None = None if origin.ids is None else {}
        self._cut: dict[Identity, Block] = {}
        for name in origin.ids or ():
            writer, _, number = name.rpartition(":")
            if not number.isdecimal():
                raise UsageError(
                    f"{name!r} is no name of a trajectory of {str(origin.path)!r}, expected "
                    "'writer:number'."
                )
            assert self._numbers is not None
            self._numbers.setdefault(label + writer, []).append(int(number))

    @property
    def is_all(self) -> bool:
        """Whether all trajectories are selected."""
        return self._numbers is None and self.header_of is None

    def of(self, blocks: Iterable[Block]) -> list[Block]:
        """Return blocks with only the selected trajectories; the same object for equal blocks."""
        if self.is_all:
            return list(blocks)
        chosen = []
        for block in blocks:
            if block.is_edit:  # An edit has no frames.
                chosen.append(block)
                continue
            if block.identity not in self._cut:
                self._cut[block.identity] = replace(block, fragments=self._fragments(block))
            chosen.append(self._cut[block.identity])
        return [block for block in chosen if len(block.fragments) or block.is_edit]

    def _fragments(self, block: Block) -> np.ndarray:
        fragments: np.ndarray = block.fragments.copy()
        if self.header_of is not None:
            ends: dict[int, Any] = {}
            try:
                for key, text in self.header_of(block).read_notes(EPISODES):
                    ends[key] = parsed(block.path, text).get(ENDS)
            except FileNotFoundError:  # The block was deleted. Reading its rows raises the error.
                ends = {}
            except CorruptFileError:  # Reading the annotations raises the error.
                ends = {**dict.fromkeys(fragments["trajectory"].tolist(), UNKNOWN), **ends}
            flags = fragments["flags"]
            is_end = (fragments["flags"] & (OPEN | TRUNCATED)) > 0
            for noted, marks in ((UNKNOWN, OPEN | END_UNKNOWN), (OPEN_END, OPEN)):
                these = [key for key, end in ends.items() if end == noted]
                is_noted = np.isin(fragments["trajectory"], these) & is_end
                flags = np.where(is_noted, flags & ~np.uint32(TRUNCATED) | np.uint32(marks), flags)
            fragments["flags"] = flags
        if self._numbers is None:
            return fragments
        return fragments[np.isin(fragments["trajectory"], self._numbers.get(block.writer, []))]
