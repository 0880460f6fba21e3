"""A source of trajectories: one or several data folders, what was lost in them and what was reported.

One rule: a problem is reported once, by name, and a loss counted once; the subclasses in `sources.py` know what
the folders hold.
"""

from __future__ import annotations

import os
import stat
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from storage.core import arguments
from storage.core.fields import Schema
from storage.errors import DataFileError, RolloutDataError, RolloutDataWarning, UsageError

from ..index.folder import unlisted
from ..index.index import Block, Key, LostBlockError
from .coded import CHUNK_CACHE_BYTES
from .store import FrameStore

#: Gives the blocks of the trajectories that are being played; only asked if the folders have changed.
BlocksInUse = Callable[[], Collection[Block]]
#: So many problems are kept, and so many known again, by their hashes: those of as many files are told once.
MAX_PROBLEMS, _MAX_REPORTED = 1000, 100_000
DataDirs = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def absolute_paths(data_dir: DataDirs) -> list[Path]:
    """Give the folders of a `data_dir` argument so that they stay the same when the process goes elsewhere."""
    try:
        listed = [data_dir] if isinstance(data_dir, (str, os.PathLike)) else list(data_dir)
        return [arguments.path("open the dataset", "", os.fspath(path)).absolute() for path in listed]
    except TypeError as cause:
        raise UsageError("open the dataset", "", "a path or a list of paths", repr(data_dir)) from cause


def as_paths(data_dir: DataDirs) -> list[Path]:
    """Give the folders of a `data_dir` argument, absolute; each must exist."""
    paths = absolute_paths(data_dir)
    if not paths:
        raise UsageError("open the dataset", "", "at least one data folder", "none")
    for path in paths:
        try:
            found = "a folder" if stat.S_ISDIR(os.stat(path).st_mode) else "a file"
        except (FileNotFoundError, NotADirectoryError):
            found = "nothing there"
        except OSError as cause:
            raise unlisted(path, cause) from cause
        if found != "a folder":
            raise UsageError("open the dataset", repr(str(path)), "a folder", found)
    return paths


class Source(ABC):
    """The blocks of one or several data folders.

    Attributes:
        problems: What was left out or repaired, in the order in which it was found; the last `MAX_PROBLEMS`.
        num_problems: How many there were.
        num_vanished_blocks: Blocks, or chunks, that were lost since they were found: removed or spoilt.
        num_lost_trajectories: Trajectories that could not be read to their end.
    """

    def __init__(
        self, data_dir: DataDirs, verify_on_open: bool = False, chunk_cache_bytes: int = CHUNK_CACHE_BYTES
    ) -> None:
        self.paths = as_paths(data_dir)
        self.problems: list[RolloutDataError] = []
        self.num_problems = self.num_vanished_blocks = self.num_lost_trajectories = 0
        self._reported: dict[int, None] = {}
        self._lost: set[Key] = set()  # counted already
        self._verify_on_open, self._chunk_cache_bytes = verify_on_open, chunk_cache_bytes
        self._schema: Schema | None = None
        self._open_folders()

    @abstractmethod
    def _open_folders(self) -> None:
        """Begin with the folders as they are."""

    @property
    @abstractmethod
    def metadata(self) -> dict[str, Any]:
        """Contents of the first folder's metadata.json, with the established totals."""

    @abstractmethod
    def refresh(self, in_use: BlocksInUse = tuple) -> None:
        """Look at the folders again; blocks that are `in_use` stay readable although they are gone."""

    def release(self, in_use: BlocksInUse = tuple) -> None:  # noqa: B027 - most have nothing to unmap
        """Unmap blocks that are gone and not `in_use`, which gives the disk their room back; for between batches.

        Cheap: it seldom looks at the folders. Reading such a block from an earlier snapshot is a `LostBlockError`.
        """

    @abstractmethod
    def snapshot(self, upto: Mapping[str, int] | None = None) -> FrameStore:
        """Give what is there now; with `upto` only blocks up to this sequence number of each writer."""

    @abstractmethod
    def sight(self) -> Any:
        """Say what `refresh` has found, so that `adopt` gives another process the same; the same object if it is."""

    @abstractmethod
    def adopt(self, sight: Any) -> None:
        """Take what another process has seen for what is there; None changes nothing."""

    def forget(self, problem: DataFileError, num_trajectories: int) -> None:
        """Report trajectories that cannot be read; a lost block is left out from the next refresh on."""
        self.num_lost_trajectories += num_trajectories
        if isinstance(problem, LostBlockError):
            self._count_lost([problem.key])
        self.report(problem)

    def report(self, problem: RolloutDataError) -> None:
        """Warn of a problem, once."""
        key = hash(str(problem))
        if key not in self._reported:
            self._reported[key] = None
            if len(self._reported) > _MAX_REPORTED:
                del self._reported[next(iter(self._reported))]
            self.num_problems += 1
            self.problems.append(problem)
            del self.problems[:-MAX_PROBLEMS]
            warnings.warn(str(problem), RolloutDataWarning, stacklevel=2)

    def _count_lost(self, keys: Iterable[Key], present: Collection[Key] = ()) -> None:
        """Count blocks that are gone, once until they are `present` again."""
        new = set(keys) - self._lost
        self.num_vanished_blocks += len(new)
        self._lost = (self._lost | new) - set(present)

    def _check_schema(self, schema: Schema, where: str) -> None:
        """Raise unless the folders have the same fields."""
        if self._schema is None:
            self._schema = schema
        elif difference := self._schema.difference(schema):
            expected, advice = f"the fields of {str(self.paths[0])!r}", "Open them as separate datasets"
            raise DataFileError("open the folders together", repr(where), expected, difference, advice)
