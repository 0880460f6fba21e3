"""`Origins`: where the data of a dataset are, their common fields, and the problems that were reported of them.

A file that cannot be read is reported once, by name, and a loss is counted once.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Mapping, Set
from pathlib import Path
from typing import Any

from storage.core import arguments
from storage.core.fields import Schema
from storage.errors import DataFileError, RolloutDataError, RolloutDataWarning

from ..blocks.block import Key
from ..blocks.edit_blocks import named_edit
from ..remote.local_copy import local_origin
from ..remote.locations import DataDirs, RemoteOptions, origins_of
from .rows.chunk_decoder import CHUNK_CACHE_BYTES

#: Problems that are kept, the last ones.
MAX_PROBLEMS = 1000
#: Problems that are recognized by their hashes, so that each is reported once.
_MAX_REPORTED = 100_000
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
        origins = origins_of(data_dir)
        self.remote = remote or origins[0].remote or RemoteOptions()
        self.origins = [local_origin(origin, self.remote) for origin in origins]
        self.paths = [origin.path for origin in self.origins]
        self.labels = [""] if len(self.paths) == 1 else [f"{number}:" for number in range(len(self.paths))]
        self.verify_on_open = verify_on_open
        self.chunk_cache_bytes = chunk_cache_bytes
        self.schema: Schema | None = None
        self.problems: list[RolloutDataError] = []
        self.advice: list[RolloutDataError] = []
        self.num_problems = 0
        self.num_vanished_blocks = 0
        self.num_lost_trajectories = 0
        #: Trajectories of lost blocks that were counted: name of the writer and number.
        self._lost_with_blocks = set[tuple[str, int]]()
        self._reported: dict[int, None] = {}
        #: Blocks that were counted as lost.
        self.lost: set[Key] = set()
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
