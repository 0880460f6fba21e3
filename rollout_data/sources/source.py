"""Data folders as one source of trajectories: what is there now, as an index and a store of rows.

One rule: a snapshot never changes; `refresh` makes a new one when the folders have. What cannot be read is marked and
reported once, and costs the trajectories that it concerns, and no other.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from storage.core import arguments
from storage.core.fields import Schema
from storage.errors import DataFileError, MissingFolderError, UnansweredError, UsageError

from ..blocks.block_folder import block_entries, read_metadata
from ..blocks.block_header import layouts_of
from ..blocks.missing_trajectories import NONE_GONE, Lengths
from ..blocks.trajectory_index import Int64s, LostBlockError, TrajectoryIndex
from ..remote.locations import DataDirs, Origin, RemoteOptions
from .block_source import Blocks
from .cached_frames import CachedFrames
from .chunk_decoder import CHUNK_CACHE_BYTES
from .episode_source import Readers
from .format_registry import trajectory_folders
from .frame_store import FrameStore
from .shared_memory import Spot
from .source_kind import BlocksInUse as BlocksInUse
from .source_kind import Kind, Origins, mixed_conventions

#: Trajectories that cannot be read, and why.
Losses = list[tuple[Int64s, DataFileError]]


class Source(Origins):
    """One or several data folders, or files of other systems; how empty folders are read is decided later.

    With `is_awaited` the folders may be missing until they were opened once: until then there is no trajectory.
    """

    def __init__(
        self,
        data_dir: DataDirs,
        verify_on_open: bool = False,
        chunk_cache_bytes: int = CHUNK_CACHE_BYTES,
        remote: RemoteOptions | None = None,
        *,
        is_awaited: bool = False,
    ) -> None:
        super().__init__(data_dir, verify_on_open, chunk_cache_bytes, remote)
        self._kind: Kind | None = None
        self._has_compared = False
        self.is_awaited = is_awaited
        #: The folder that was missing at the last look; None if all were there, or none is awaited.
        self.missing: MissingFolderError | None = None
        try:
            self._decide(_kind_of_all(self.origins))
        except MissingFolderError as missing:
            if not is_awaited:
                raise
            self.missing = missing

    def _decide(self, kind: type[Kind] | None) -> None:
        if self._kind is None and kind is not None:
            self._kind = kind(weakref.proxy(self))  # as in `playback/rollout_stream.py`: no circle

    @property
    def holds_blocks(self) -> bool:
        """Whether these are folders of block files."""
        return isinstance(self._kind, Blocks)

    @property
    def format(self) -> str:
        """Name of the format; "" as long as all folders are empty."""
        return "" if self._kind is None else self._kind.format

    @property
    def metadata(self) -> dict[str, Any]:
        """Contents of the first folder's metadata.json, with the established totals."""
        return read_metadata(self.paths[0]) if self._kind is None else self._kind.metadata

    @property
    def conventions(self) -> set[tuple[str, str]]:
        """Control modes and orders of quaternions that metadata state; see `conventions`."""
        return set() if self._kind is None else self._kind.conventions

    def refresh(self, in_use: BlocksInUse = tuple) -> None:
        """Look at the folders again; blocks that are `in_use` stay readable although they are gone."""
        self.missing = None
        try:
            self._look(in_use)
        except MissingFolderError as missing:
            if not self.is_awaited or self._has_compared:
                raise
            self.missing = missing

    def _look(self, in_use: BlocksInUse) -> None:
        self._decide(_kind_of_all(self.origins) if self._kind is None else None)
        if self._kind is not None:
            self._kind.refresh(in_use)
            for remark in [] if self._has_compared else mixed_conventions(self.conventions):
                self.advise(remark)
            self._has_compared = True

    def release(self, in_use: BlocksInUse = tuple) -> None:
        """Unmap blocks that are gone and not `in_use`, which gives the disk their room back; for between batches.

        Cheap: it seldom looks at the folders. Reading such a block from an earlier snapshot is a `LostBlockError`.
        """
        if self._kind is not None:
            self._kind.release(in_use)

    def snapshot(self, upto: Mapping[str, int] | None = None, gone: Lengths = NONE_GONE) -> FrameStore:
        """Return what is there now; with `upto` only blocks up to this number of each writer, and what is `gone`."""
        if self._kind is None:
            return FrameStore(TrajectoryIndex([]), layouts_of(Schema([])))
        return self._kind.snapshot(upto, gone)

    def listing(self) -> Any:
        """Return what `refresh` has found, for `adopt` in another process; the same object if nothing changed."""
        return None if self._kind is None else self._kind.listing()

    def shared(self, store: FrameStore) -> Spot | None:
        """Return where other processes of this machine find the index of a snapshot; None: nowhere."""
        return None if self._kind is None else self._kind.shared(store)

    def adopt(self, listing: Any, spot: Spot | None = None) -> bool:
        """Take what another process has seen for what is there, and an index that is `shared`; False: there is none."""
        self._decide(listing[0] if listing is not None else None)
        return self._kind is not None and self._kind.adopt(listing, spot)

    def forget(self, problem: DataFileError, keys: Iterable[tuple[str, int]]) -> None:
        """Report trajectories that cannot be read; a lost block is left out from the next refresh on."""
        lost = {(writer, number) for writer, number in keys}
        if isinstance(problem, LostBlockError):
            # Two passes may hold the trajectory of a lost block; it is counted once.
            lost -= self._lost_with_blocks
            self._lost_with_blocks |= lost
        self.num_lost_trajectories += len(lost)
        if isinstance(problem, LostBlockError):
            self.count_lost([problem.key])
            if self._kind is not None:
                self._kind.leave_out(problem.key)
        self.report(problem)

    def leave_out(self, store: FrameStore, trajectories: Int64s, problem: DataFileError, skips: bool) -> Losses:
        """Mark those of some trajectories that cannot be read, and report why; what is left of them is not `valid`.

        Returns:
            Which ones, and why.

        Raises:
            DataFileError: `problem`, unless it concerns one of them and its file is gone or `skips` is True. A store
                that refuses access, or does not answer, concerns none of them.
        """
        if isinstance(problem, UnansweredError):
            raise problem
        if isinstance(problem, LostBlockError):
            blocks = [number for number, block in enumerate(store.index.blocks) if block.key == problem.key]
            found: Losses = [(store.index.trajectories_in(blocks), problem)]
        else:
            whys = {one: _damage(store, one) for one in trajectories.tolist()} if skips else {}
            found = [(np.array([one]), why) for one, why in whys.items() if why is not None]
        lost = [(left, why) for all_lost, why in found if len(left := all_lost[~store.is_lost[all_lost]])]
        if not lost:
            raise problem
        for left, why in lost:
            self.forget(why, store.index.keys(left))
            store.is_lost[left] = True
        return lost

    def check_readable(self, store: FrameStore, trajectories: Int64s, skips: bool) -> None:
        """Find one of some trajectories that can be read; those before it that cannot are left out.

        Raises:
            DataFileError: There is none, or a store refuses access or does not answer.
        """
        for trajectory in trajectories.tolist():
            if store.is_lost[trajectory]:
                continue
            try:
                store.probe(trajectory)
                return
            except DataFileError as problem:
                self.leave_out(store, np.array([trajectory]), problem, skips)
        where = repr(", ".join(map(str, self.paths)))
        cause = self.problems[-1] if self.problems else None
        expected = "a trajectory that can be read"
        got = f"none of {len(trajectories)}"
        raise DataFileError("read another frame", f"of {where}", expected, got, str(cause or "")) from cause

    def note_loss(self, store: FrameStore, keys: Sequence[tuple[str, int]], problem: DataFileError) -> None:
        """Mark and report trajectories that another process could not read, unless this was known."""
        found = store.index.find(keys)
        known = found[found >= 0]
        is_new = [place < 0 or not store.is_lost[place] for place in found.tolist()]
        store.is_lost[known] = True
        if any(is_new):
            self.forget(problem, [key for key, new in zip(keys, is_new, strict=True) if new])


def _damage(store: FrameStore, trajectory: int) -> DataFileError | None:
    """Return why a trajectory cannot be read; None if it can, or is known to be lost."""
    if not store.is_lost[trajectory]:
        try:
            CachedFrames(store, np.array([trajectory]), store.device)
        except UnansweredError:
            raise
        except DataFileError as problem:
            return problem
    return None


def _kind_of_all(origins: Sequence[Origin]) -> type[Kind] | None:
    """Return how data are read, None as long as all folders are empty."""
    is_remote = [arguments.is_url(origin.path) for origin in origins]
    if any(is_remote) and not all(is_remote):
        raise UsageError("open the folders together", "", "folders of one kind", "some of this machine and some URLs")
    if all(is_remote):
        return Blocks
    kinds = {origin.path: kind for origin in origins if (kind := kind_of(origin)) is not None}
    if len(set(kinds.values())) > 1:
        got = "; ".join(f"{kind.about} in {path}" for path, kind in kinds.items())
        advice = "Convert one of them, or mix windows of both by a WindowMixture"
        raise UsageError("open the folders together", "", "folders of one kind", got, advice)
    return next(iter(kinds.values()), None)


def kind_of(origin: Origin) -> type[Kind] | None:
    """Return how a path is read: by its format, or by its content; None if it is not there yet, or holds nothing."""
    if origin.opened is not None:
        return origin.opened.kind or Readers
    if arguments.is_url(origin.path):
        return Blocks
    if origin.format is not None:
        return {kind.format: kind for kind in (Blocks, trajectory_folders())}.get(origin.format, Readers)
    if origin.path.is_file():
        return Readers
    is_written_here = any(one.name.startswith("rollout_") for one in block_entries(origin.path))
    if not is_written_here and Readers.is_there(origin.path):
        return Readers
    return next((kind for kind in (trajectory_folders(), Blocks) if kind.is_there(origin.path)), None)
