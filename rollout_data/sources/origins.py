"""`Origins`: the data folders of a dataset, their common fields, and their reported problems.

Each unreadable file is reported once, and each deleted block is counted once.
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

#: Maximum length of the lists of problems and advice; older entries are dropped.
MAX_PROBLEMS = 1000
#: Maximum number of problems that are remembered so that each is reported only once.
_MAX_REPORTED = 100_000
#: Keys in metadata for the control mode of actions and the order of quaternion elements.
MODE_KEY = "control_mode"
ORDER_KEY = "quaternion_order"
#: Value of the key `ORDER_KEY` if the episodes of a file have different quaternion orders.
MIXED = "mixed"


class Origins:
    """The files or folders of a dataset, with their reported problems.

    Attributes:
        origins: Locations and selected trajectories.
        paths: Absolute paths of the files or folders.
        schema: The fields that all folders must have; None until there is a trajectory.
        problems: Exceptions for data that were unreadable, repaired or left out, oldest first; at
            most `MAX_PROBLEMS`.
        advice: Remarks on suspicious data that are read unchanged; at most `MAX_PROBLEMS`.
        num_problems: Total number of problems.
        num_vanished_blocks: Number of blocks or chunks that were deleted or damaged after they
            were listed.
        num_lost_trajectories: Number of trajectories that could not be read completely.
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
        self.labels = (
            [""] if len(self.paths) == 1 else [f"{number}:" for number in range(len(self.paths))]
        )
        self.verify_on_open = verify_on_open
        self.chunk_cache_bytes = chunk_cache_bytes
        self.schema: Schema | None = None
        self.problems: list[RolloutDataError] = []
        self.advice: list[RolloutDataError] = []
        self.num_problems = 0
        self.num_vanished_blocks = 0
        self.num_lost_trajectories = 0
        #: (writer name, number) of each trajectory that was counted as lost with a deleted block.
        self._lost_with_blocks = set[tuple[str, int]]()
        self._reported: dict[int, None] = {}
        #: Deleted blocks that were counted, so that each is counted once.
        self.lost: set[Key] = set()
        self.is_remote = arguments.is_url(self.paths[0])

    def report(self, problem: RolloutDataError) -> None:
        """Add an exception to `problems` and warn, unless the same was reported before."""
        if self._is_new(problem):
            self.num_problems += 1
            self.problems.append(problem)
            del self.problems[:-MAX_PROBLEMS]
            warnings.warn(str(problem), RolloutDataWarning, stacklevel=2)

    def advise(self, remark: RolloutDataError) -> None:
        """Add a remark to `advice` and warn, unless the same remark was added before."""
        if self._is_new(remark):
            self.advice.append(remark)
            del self.advice[:-MAX_PROBLEMS]
            warnings.warn(str(remark), RolloutDataWarning, stacklevel=2)

    def _is_new(self, problem: RolloutDataError) -> bool:
        """Return whether an exception is reported for the first time, and record it as reported."""
        key = hash(str(problem))
        if key in self._reported:
            return False
        self._reported[key] = None
        if len(self._reported) > _MAX_REPORTED:
            del self._reported[next(iter(self._reported))]
        return True

    def count_lost(self, keys: Iterable[Key], present: Collection[Key] = ()) -> None:
        """Count deleted blocks, without blocks that were counted before.

        A block in `present` exists again. If it is deleted later, it counts again.
        """
        new = {key for key in keys if named_edit(key[0].name) is None} - self.lost
        self.num_vanished_blocks += len(new)
        self.lost = (self.lost | new) - set(present)

    def check_schema(self, schema: Schema, where: Path) -> None:
        """Raise `DataFileError` if the schema of folder `where` differs from earlier folders."""
        if self.schema is None:
            self.schema = schema
        elif difference := self.schema.difference(schema):
            raise DataFileError(
                f"{str(where)!r} has other fields than {str(self.paths[0])!r}: {difference}. Open "
                "the folders as separate datasets."
            )


def conventions(contexts: Iterable[Mapping[str, Any]]) -> set[tuple[str, str]]:
    """Return the pairs (key, value) for control mode and quaternion order in all metadata."""
    stated = {
        (name, str(metadata[name]))
        for metadata in contexts
        for name in (MODE_KEY, ORDER_KEY)
        if name in metadata
    }
    return stated - {(MODE_KEY, "unknown")}


def mixed_conventions(stated: Set[tuple[str, str]]) -> list[DataFileError]:
    """Return remarks if the folders state different control modes or quaternion orders.

    An unknown quaternion order counts as different from a known order.
    """
    modes = sorted(value for name, value in stated if name == MODE_KEY)
    orders = sorted(value for name, value in stated if name == ORDER_KEY)
    remarks = []
    if len(modes) > 1:
        remarks.append(
            DataFileError(
                f"The actions have different control modes: {', '.join(modes)}. Convert the "
                "actions, or select the episodes with one control mode."
            )
        )
    if len(orders) > 1 or orders == [MIXED]:
        remarks.append(
            DataFileError(
                f"The quaternions have different orders: {', '.join(orders)}. Pass "
                'quaternions="wxyz" or "xyzw", or select the clips with one order.'
            )
        )
    return remarks
