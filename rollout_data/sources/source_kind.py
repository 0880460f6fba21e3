"""What all kinds of data folders share: where the data are, which fields they have, what was lost and reported.

One rule: a snapshot never changes; `refresh` makes a new one when the folders have. A file that cannot be read is
reported once, by name, a loss is counted once, and the rest goes on. `source.py` lists the kinds.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from storage.core import arguments
from storage.core.fields import Schema
from storage.errors import CorruptFileError, DataFileError, RolloutDataError, RolloutDataWarning, UsageError

from ..blocks.annotation_table import EPISODES
from ..blocks.annotations import parsed
from ..blocks.block import Block, Identity, Key
from ..blocks.block_header import END_UNKNOWN, OPEN, TRUNCATED, BlockHeader
from ..blocks.edit_blocks import named_edit
from ..blocks.folder_metadata import ENDS, OPEN_END, UNKNOWN
from ..blocks.missing_trajectories import NONE_GONE, Lengths
from ..remote.local_copy import local_origin
from ..remote.locations import DataDirs, Origin, RemoteOptions, origins_of
from .chunk_decoder import CHUNK_CACHE_BYTES
from .frame_store import FrameStore
from .shared_memory import Spot

#: Gives the blocks of the trajectories that are being played; only asked if the folders have changed.
BlocksInUse = Callable[[], Collection[Block]]
#: The last problems are kept, and more are known again by their hashes, so that each is reported once.
MAX_PROBLEMS, _MAX_REPORTED = 1000, 100_000
#: Names in metadata under which a recording states what its actions control, and the order of its quaternions.
MODE_KEY = "control_mode"
ORDER_KEY = "quaternion_order"
#: The order of quaternions in metadata of a recording whose episodes have several.
MIXED = "mixed"


class Origins:
    """One or several files or folders of data.

    Attributes:
        origins: Where they are, and which of their trajectories are read.
        paths: The folders, absolute.
        schema: The fields that all of them must have; None as long as there is no trajectory.
        problems: Data that were not read, were repaired or were left out, in the order in which they were found; the
            last `MAX_PROBLEMS`.
        advice: Remarks on data that are read as they are stored; the last `MAX_PROBLEMS`.
        num_problems: How many there were.
        num_vanished_blocks: Blocks, or chunks, that were lost since they were found: removed or spoilt.
        num_lost_trajectories: Trajectories that could not be read to their end.
    """

    def __init__(
        self,
        data_dir: DataDirs,
        verify_on_open: bool = False,
        chunk_cache_bytes: int = CHUNK_CACHE_BYTES,
        remote: RemoteOptions | None = None,
    ) -> None:
        given = origins_of(data_dir)
        self.remote = remote or given[0].remote or RemoteOptions()
        self.origins = [local_origin(origin, self.remote) for origin in given]
        self.paths = [origin.path for origin in self.origins]
        self.labels = [""] if len(self.paths) == 1 else [f"{number}:" for number in range(len(self.paths))]
        self.verify_on_open = verify_on_open
        self.chunk_cache_bytes = chunk_cache_bytes
        self.schema: Schema | None = None
        self.problems: list[RolloutDataError] = []
        self.advice: list[RolloutDataError] = []
        self.num_problems = self.num_vanished_blocks = self.num_lost_trajectories = 0
        #: Trajectories of lost blocks that were counted: name of the writer and number.
        self._lost_with_blocks = set[tuple[str, int]]()
        self._reported: dict[int, None] = {}
        self.lost: set[Key] = set()  # counted already
        self.is_remote = arguments.is_url(self.paths[0])

    def report(self, problem: RolloutDataError) -> None:
        """Warn of a problem, once."""
        if self._is_new(problem):
            self.num_problems += 1
            self.problems.append(problem)
            del self.problems[:-MAX_PROBLEMS]
            warnings.warn(str(problem), RolloutDataWarning, stacklevel=2)

    def advise(self, remark: RolloutDataError) -> None:
        """Warn of data that are read as they are stored and are probably not meant so, once."""
        if self._is_new(remark):
            self.advice.append(remark)
            del self.advice[:-MAX_PROBLEMS]
            warnings.warn(str(remark), RolloutDataWarning, stacklevel=2)

    def _is_new(self, problem: RolloutDataError) -> bool:
        """Return whether a problem or remark is reported for the first time, and note it."""
        key = hash(str(problem))
        if key in self._reported:
            return False
        self._reported[key] = None
        if len(self._reported) > _MAX_REPORTED:
            del self._reported[next(iter(self._reported))]
        return True

    def count_lost(self, keys: Iterable[Key], present: Collection[Key] = ()) -> None:
        """Count blocks that are gone, once until they are `present` again."""
        new = {key for key in keys if named_edit(key[0].name) is None} - self.lost
        self.num_vanished_blocks += len(new)
        self.lost = (self.lost | new) - set(present)

    def check_schema(self, schema: Schema, where: Path) -> None:
        """Raise unless the folders have the same fields."""
        if self.schema is None:
            self.schema = schema
        elif difference := self.schema.difference(schema):
            expected = f"the fields of {str(self.paths[0])!r}"
            advice = "Open them as separate datasets"
            raise DataFileError("open the folders together", repr(str(where)), expected, difference, advice)


def conventions(found: Iterable[Mapping[str, Any]]) -> set[tuple[str, str]]:
    """Return control modes and orders of quaternions that metadata of recordings or episodes state: (name, value)."""
    stated = {(name, str(metadata[name])) for metadata in found for name in (MODE_KEY, ORDER_KEY) if name in metadata}
    return stated - {(MODE_KEY, "unknown")}


def mixed_conventions(stated: Set[tuple[str, str]]) -> list[DataFileError]:
    """Build the remarks that actions, or quaternions, of one stream do not mean the same; none if each has one value.

    An unknown order of quaternions differs from a known one.
    """
    modes = sorted(value for name, value in stated if name == MODE_KEY)
    orders = sorted(value for name, value in stated if name == ORDER_KEY)
    remarks = []
    if len(modes) > 1:
        advice = "Convert the actions, or train on one of them"
        remarks.append(DataFileError("mix the actions", "", "one control mode", ", ".join(modes), advice))
    if len(orders) > 1 or orders == [MIXED]:
        advice = 'Open the clips with quaternions="wxyz" or "xyzw", or read those of one order'
        remarks.append(DataFileError("mix the quaternions", "", "one order", ", ".join(orders), advice))
    return remarks


class Kind(ABC):
    """A way in which data lie in files: `format` by its name, `about` in words."""

    format: str
    about: str

    @abstractmethod
    def __init__(self, source: Origins) -> None:
        """Open what `is_there`."""

    @staticmethod
    @abstractmethod
    def is_there(path: Path) -> bool:
        """Whether a path holds data of this kind."""

    @property
    @abstractmethod
    def metadata(self) -> dict[str, Any]:
        """What the first folder says of the whole."""

    @property
    @abstractmethod
    def conventions(self) -> set[tuple[str, str]]:
        """Control modes and orders of quaternions that metadata state; see `conventions`."""

    @abstractmethod
    def refresh(self, in_use: BlocksInUse) -> None:
        """Look at the files again; blocks that are `in_use` stay readable although they are gone."""

    @abstractmethod
    def snapshot(self, upto: Mapping[str, int] | None = None, gone: Lengths = NONE_GONE) -> FrameStore:
        """Return what is there now; see `Source`."""

    @abstractmethod
    def listing(self) -> Any:
        """Return what `refresh` has found: a tuple of the kind and what it needs; the same object if it is the same."""

    @abstractmethod
    def adopt(self, listing: Any, spot: Spot | None) -> bool:
        """Take what another process has seen for what is there; see `Source`."""

    def shared(self, store: FrameStore) -> Spot | None:
        """Return where other processes of this machine find the index of a snapshot; None: nowhere."""
        return None

    def release(self, in_use: BlocksInUse) -> None:  # noqa: B027 (most keep no file open)
        """Close files that are gone and not `in_use`, where files are kept open."""

    def leave_out(self, key: Key) -> None:  # noqa: B027 (most never list it again)
        """Read a block no more until it has changed, where what has gone is listed again."""


class Choice:
    """Which trajectories of the blocks of one origin are read: (writer, number) named "writer:number".

    Attributes:
        header_of: Reads the header of a block whose notes may say how trajectories ended; None if flags say it all.

    Raises:
        UsageError: A name has another form.
    """

    header_of: Callable[[Block], BlockHeader] | None = None

    def __init__(self, origin: Origin, label: str) -> None:
        self._numbers: dict[str, list[int]] | None = None if origin.ids is None else {}
        self._cut: dict[Identity, Block] = {}
        for name in origin.ids or ():
            writer, _, number = name.rpartition(":")
            if not number.isdecimal():
                raise UsageError("choose trajectories", f"of {str(origin.path)!r}", "'writer:number'", repr(name))
            assert self._numbers is not None
            self._numbers.setdefault(label + writer, []).append(int(number))

    @property
    def is_all(self) -> bool:
        """Whether blocks are given as they are."""
        return self._numbers is None and self.header_of is None

    def of(self, blocks: Iterable[Block]) -> list[Block]:
        """Leave out what blocks hold of other trajectories; a block is given as the same object each time."""
        if self.is_all:
            return list(blocks)
        chosen = []
        for block in blocks:
            if block.is_edit:  # without frames
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
            except FileNotFoundError:  # it was removed meanwhile, which reading it tells
                ends = {}
            except CorruptFileError:  # reading the notes tells
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
