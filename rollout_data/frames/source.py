"""Data folders as one source of trajectories: what is there now, as an index and a store of rows.

One rule: a snapshot never changes; `refresh` makes a new one when the folders have. A file that cannot be read is
reported once, by name, a loss is counted once, and the rest goes on. `_KINDS` lists what can be read.
"""

from __future__ import annotations

import os
import time
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from storage.core import arguments
from storage.core.fields import Schema
from storage.errors import DataFileError, RolloutDataError, RolloutDataWarning, UsageError

from ..format.header import layouts_of
from ..format.schema import RowLayout
from ..index.folder import LOOK_SHARE, BlockFolder, block_entries, read_metadata
from ..index.index import Block, Key, LostBlockError, TrajectoryIndex
from ..index.stand_ins import NONE_GONE, Lengths, beside_stand_ins, is_stand_in, with_stand_ins
from ..remote.access import DataDirs, RemoteFiles, RemoteOptions, absolute_paths
from ..remote.folder import RemoteFolder
from ..trajectory_folders.trajectory_folder import FolderScan, numbers_within, read_chunk_rows, scan_trajectory_folder
from ..trajectory_folders.trajectory_listing import ChunkFile, is_trajectory_folder
from .coded import CHUNK_CACHE_BYTES
from .remote import RemoteFrames
from .shared import SharedMemory, Spot, share, shared_at
from .store import GONE, FileFrames, FileMap, FrameStore, MappedFrames, Place, can_map, read_block

#: Gives the blocks of the trajectories that are being played; only asked if the folders have changed.
BlocksInUse = Callable[[], Collection[Block]]
#: The last problems are kept, and more are known again by their hashes, so that each is reported once.
MAX_PROBLEMS, _MAX_REPORTED = 1000, 100_000


class Source:
    """One or several data folders, of block files or of the older trajectory layout; empty ones are decided later.

    Attributes:
        paths: The folders, absolute.
        schema: The fields that all of them must have; None as long as there is no trajectory.
        problems: What was left out or repaired, in the order in which it was found; the last `MAX_PROBLEMS`.
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
        self.paths, self.remote = absolute_paths(data_dir), remote or RemoteOptions()
        self.verify_on_open, self.chunk_cache_bytes = verify_on_open, chunk_cache_bytes
        self.schema: Schema | None = None
        self.problems: list[RolloutDataError] = []
        self.num_problems = self.num_vanished_blocks = self.num_lost_trajectories = 0
        self._reported: dict[int, None] = {}
        self.lost: set[Key] = set()  # counted already
        self._folders: _Folders | None = None
        self.is_remote = arguments.is_url(self.paths[0])
        self._decide(_kind_of_all(self.paths))

    def _decide(self, kind: type[_Folders] | None) -> None:
        if self._folders is None and kind is not None:
            self._folders = kind(weakref.proxy(self))  # as in `streaming/stream.py`: no circle

    @property
    def holds_blocks(self) -> bool:
        """Whether these are folders of block files."""
        return isinstance(self._folders, _Blocks)

    @property
    def metadata(self) -> dict[str, Any]:
        """Contents of the first folder's metadata.json, with the established totals."""
        if isinstance(self._folders, _Blocks) and self.is_remote:
            return self._folders.remote[0].metadata
        return self._folders.metadata if isinstance(self._folders, _Chunks) else read_metadata(self.paths[0])

    def refresh(self, in_use: BlocksInUse = tuple) -> None:
        """Look at the folders again; blocks that are `in_use` stay readable although they are gone."""
        self._decide(_kind_of_all(self.paths) if self._folders is None else None)
        if self._folders is not None:
            self._folders.refresh(in_use)

    def release(self, in_use: BlocksInUse = tuple) -> None:
        """Unmap blocks that are gone and not `in_use`, which gives the disk their room back; for between batches.

        Cheap: it seldom looks at the folders. Reading such a block from an earlier snapshot is a `LostBlockError`.
        """
        if self._folders is not None:
            self._folders.release(in_use)

    def snapshot(self, upto: Mapping[str, int] | None = None, gone: Lengths = NONE_GONE) -> FrameStore:
        """Give what is there now; with `upto` only blocks up to this number of each writer, and what is `gone`."""
        if self._folders is None:
            return FrameStore(TrajectoryIndex([]), layouts_of(Schema([])))
        return self._folders.snapshot(upto, gone)

    def sight(self) -> Any:
        """Say what `refresh` has found, so that `adopt` gives another process the same; the same object if it is."""
        return None if self._folders is None else self._folders.sight()

    def shared(self, store: FrameStore) -> Spot | None:
        """Say where other processes of this machine find the index of a snapshot; None: nowhere."""
        return self._folders.shared(store) if isinstance(self._folders, _Blocks) else None

    def adopt(self, sight: Any, spot: Spot | None = None) -> bool:
        """Take what another process has seen for what is there, and an index that is `shared`; False: there is none."""
        self._decide(sight[0] if sight is not None else None)
        return self._folders is not None and self._folders.adopt(sight, spot)

    def forget(self, problem: DataFileError, num_trajectories: int) -> None:
        """Report trajectories that cannot be read; a lost block is left out from the next refresh on."""
        self.num_lost_trajectories += num_trajectories
        if isinstance(problem, LostBlockError):
            self.count_lost([problem.key])
            if self._folders is not None:
                self._folders.leave_out(problem.key[0])
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

    def count_lost(self, keys: Iterable[Key], present: Collection[Key] = ()) -> None:
        """Count blocks that are gone, once until they are `present` again."""
        new = set(keys) - self.lost
        self.num_vanished_blocks += len(new)
        self.lost = (self.lost | new) - set(present)

    def check_schema(self, schema: Schema, where: Path) -> None:
        """Raise unless the folders have the same fields."""
        if self.schema is None:
            self.schema = schema
        elif difference := self.schema.difference(schema):
            expected, advice = f"the fields of {str(self.paths[0])!r}", "Open them as separate datasets"
            raise DataFileError("open the folders together", repr(str(where)), expected, difference, advice)


def _kind_of_all(paths: Sequence[Path]) -> type[_Folders] | None:
    """Tell how folders are read, None as long as all are empty."""
    is_remote = [arguments.is_url(path) for path in paths]
    if any(is_remote) and not all(is_remote):
        raise UsageError("open the folders together", "", "folders of one kind", "some of this machine and some URLs")
    if all(is_remote):
        return _Blocks
    kinds = {path: kind for path in paths for kind in reversed(_KINDS) if kind.is_there(path)}
    if len(set(kinds.values())) > 1:
        got = "; ".join(f"{kind.about} in {path}" for path, kind in kinds.items())
        raise UsageError("open the folders together", "", "folders of one kind", got)
    return next(iter(kinds.values()), None)


class _Blocks:
    """Folders of block files."""

    about = "block files"

    def __init__(self, source: Source) -> None:
        self._source = source
        labels = [""] if len(source.paths) == 1 else [f"{number}:" for number in range(len(source.paths))]
        self._folders = [self._folder(path, label) for path, label in zip(source.paths, labels, strict=True)]
        #: Blocks that are gone and in use; blocks that another process has seen.
        self._pinned: list[Block] = []
        self._adopted: list[Block] | None = None
        self._files: FileMap | None = None
        self._last: FrameStore | None = None
        self._sight: tuple[FrameStore | None, Any] = None, None
        self._shared: tuple[TrajectoryIndex | None, SharedMemory | None] = None, None
        self._broken: DataFileError | None = None
        self._look_due_s = 0.0

    @staticmethod
    def is_there(path: Path) -> bool:
        return bool(block_entries(path))

    def _folder(self, path: Path, label: str) -> BlockFolder:
        if self._source.is_remote:
            return RemoteFolder(RemoteFiles(path, self._source.remote), self._source.verify_on_open, label)
        return BlockFolder(path, self._source.verify_on_open, label)

    @property
    def remote(self) -> list[RemoteFolder]:
        return [folder for folder in self._folders if isinstance(folder, RemoteFolder)]

    def sight(self) -> Any:
        if self._sight[0] is not (store := self.snapshot()):
            self._sight = store, self._sight_of(store)
        return self._sight[1]

    def _sight_of(self, store: FrameStore) -> Any:
        blocks = [(self._source.paths.index(block.path.parent), block) for block in store.index.blocks]
        return _Blocks, self._source.schema, store.index.num_present, blocks

    def shared(self, store: FrameStore) -> Spot | None:
        if self._shared[0] is not store.index:
            self._shared = store.index, share((self._sight_of(store), store.index))
        memory = self._shared[1]
        return None if memory is None else memory.spot

    def adopt(self, sight: Any, spot: Spot | None) -> bool:
        if sight is not None and sight is self._sight[1]:
            return True
        found, memory = shared_at(spot)
        if found is None and sight is None:
            return False
        _, self._source.schema, num_present, placed = sight if found is None else found[0]
        paths = self._source.paths
        blocks = [replace(block, path=paths[folder] / block.path.name) for folder, block in placed]
        self._adopted, self._pinned, self._last = blocks[:num_present], blocks[num_present:], None
        if found is not None:
            found[1].blocks = tuple(blocks)
            is_own = self._shared[1] is not None and self._shared[1].spot == spot  # others find it where it is
            self._shared = found[1], self._shared[1] if is_own else memory
        return True

    def leave_out(self, path: Path) -> None:
        """Do nothing: what has gone is not listed again."""

    def refresh(self, in_use: BlocksInUse) -> None:
        has_changed = self._last is None or bool(self._pinned) or self._adopted is not None
        self._adopted = None
        for folder in self._folders:
            has_changed |= folder.refresh()
            for problem in folder.problems.values():
                self._source.report(problem)
        if not has_changed:
            return
        blocks = self._blocks()
        present, before = {block.key for block in blocks}, self._last.index if self._last is not None else None
        if before is not None:
            self._source.count_lost({block.key for block in before.blocks[: before.num_present]} - present, present)
        mapped = self._files.mapped if self._files is not None else ()
        gone = [one for one in in_use() if one.key not in present and (one.identity in mapped or is_stand_in(one))]
        if gone != self._pinned or before is None or _identities(before.blocks) != _identities(blocks):
            self._pinned, self._last = gone, None
        self._source.lost.intersection_update(key for key, *_ in mapped)

    def release(self, in_use: BlocksInUse) -> None:
        if self._files is None or (start_s := time.monotonic()) < self._look_due_s:
            return
        try:
            present = {f"{one.data_dir}{os.sep}{name}" for one in self._folders for name in one.found_now()}
        except RolloutDataError:  # the folder itself cannot be looked at: `refresh` tells
            return
        if gone := {identity for identity in self._files.mapped if str(identity[0][0]) not in present}:
            self._source.count_lost(key for key, *_ in gone)
            if unused := gone - _identities(in_use()):
                self._files.unmap(unused)
        stop_s = time.monotonic()
        self._look_due_s = stop_s + max(1.0, (stop_s - start_s) / LOOK_SHARE)

    def _blocks(self) -> list[Block]:
        if self._adopted is not None:
            return self._adopted
        return [folder.blocks[name] for folder in self._folders for name in sorted(folder.blocks)]

    def snapshot(self, upto: Mapping[str, int] | None = None, gone: Lengths = NONE_GONE) -> FrameStore:
        if self._last is not None and upto is None:
            return self._last
        if upto is not None:
            folders = {folder.label: folder.data_dir for folder in self._folders}
            self._pinned = with_stand_ins(self._pinned, folders, gone)
            self._last = None if gone else self._last
        for folder in self._folders:
            if folder.schema is not None and folder.blocks:
                self._source.check_schema(folder.schema, folder.data_dir)
        layouts = layouts_of(self._source.schema or self._folders[0].schema or Schema([]))
        blocks = self._blocks()
        if upto is not None:
            blocks = [block for block in blocks if block.sequence <= upto.get(block.writer, -1)]
        store = self._frames(beside_stand_ins(blocks, self._pinned), layouts)
        if upto is None:
            self._report_broken(store.index)
            self._last = store
        return store

    def _frames(self, blocks: list[Block], layouts: Mapping[str, RowLayout]) -> FrameStore:
        if not self._source.is_remote and can_map([*blocks, *self._pinned]):
            return self._mapped_frames(blocks, layouts)
        index = self._index(blocks, list(filter(is_stand_in, self._pinned)))
        if self._source.is_remote:
            return RemoteFrames(index, layouts, self.remote)
        return FileFrames(index, layouts, partial(read_block, layouts=layouts))

    def _mapped_frames(self, blocks: list[Block], layouts: Mapping[str, RowLayout]) -> FrameStore:
        files = self._files
        if files is None or files.layouts is not layouts or not files.has_room(blocks):
            # Blocks that are gone cannot be mapped again: what is played of them counts as lost.
            files = self._files = FileMap(layouts, blocks, self._source.chunk_cache_bytes)
        mapped = []
        for block in blocks:
            try:
                files.add(block)
                mapped.append(block)
            except FileNotFoundError:
                self._source.count_lost([block.key])
            except RolloutDataError as problem:
                self._source.report(problem)
        is_as_found = self._adopted is None and not self._pinned and mapped == self._blocks()
        built = self._folders[0].built if is_as_found and len(self._folders) == 1 else None
        # What another process has seen is numbered as there, whether or not it could be mapped here.
        known = mapped if self._adopted is None else blocks
        self._look_due_s = 0.0
        return MappedFrames(self._index(known, self._pinned, built), layouts, files)

    def _index(
        self, blocks: list[Block], pinned: list[Block], built: Mapping[str, np.ndarray] | None = None
    ) -> TrajectoryIndex:
        """Give the index of some blocks: the one that is shared, if it is of these."""
        shared, wanted = self._shared[0], (*blocks, *pinned)
        if shared is not None and (shared.blocks, shared.num_present) == (wanted, len(blocks)):
            return shared
        return TrajectoryIndex(wanted, len(blocks), built)

    def _report_broken(self, index: TrajectoryIndex) -> None:
        """Keep one problem for the trajectories that lack a block now; warn at the first of them only."""
        problems = self._source.problems
        if self._broken is not None and self._broken in problems:
            problems.remove(self._broken)
        if index.num_broken:
            problem = index.broken_problem(repr(", ".join(map(str, self._source.paths))))
            if self._broken is None:
                self._source.report(problem)
            else:
                problems.append(problem)
            self._broken = problem


class _Chunks:
    """Folders of the older `trajectory_K/traj_START_END.pickle` layout.

    A chunk is a block. One that cannot be read is left out until it has changed, and the fields stay those of the
    first chunks that were found.
    """

    about = "trajectory folders"

    def __init__(self, source: Source) -> None:
        self._source = source
        self._unreadable: set[ChunkFile] = set()
        self._mixed: set[Path] = set()
        self._scans = [scan_trajectory_folder(path) for path in source.paths]
        self._sight, self._last = (_Chunks, self._scans), self._store()
        self._report_left_out()

    @staticmethod
    def is_there(path: Path) -> bool:
        # An empty one beside blocks says nothing.
        return is_trajectory_folder(path, with_chunk=bool(block_entries(path)))

    @property
    def metadata(self) -> dict[str, Any]:
        return dict(self._scans[0].metadata)

    def refresh(self, in_use: BlocksInUse) -> None:
        scans = [scan_trajectory_folder(old.data_dir, previous=old, without=self._unreadable) for old in self._scans]
        before, self._scans = self._scans, scans
        if [_contents(scan) for scan in scans] != [_contents(scan) for scan in before]:
            present = {(file.path, "") for scan in scans for file in scan.known}
            self._source.count_lost({block.key for block in self._last.index.blocks} - present, present)
            self._last, self._sight = self._store(), (_Chunks, scans)
        self._report_left_out()

    def sight(self) -> Any:
        return self._sight

    def adopt(self, sight: Any, spot: Spot | None) -> bool:
        if sight is not None and sight is not self._sight:
            _, self._scans = self._sight = sight
            self._last = self._store()
        return sight is not None

    def release(self, in_use: BlocksInUse) -> None:
        """Do nothing: no chunk is mapped."""

    def leave_out(self, path: Path) -> None:
        """Read a chunk no more until it has changed."""
        self._unreadable.update(file for scan in self._scans for file in scan.known if file.path == path)

    def snapshot(self, upto: Mapping[str, int] | None = None, gone: Lengths = NONE_GONE) -> FrameStore:
        return self._last

    def _report_left_out(self) -> None:
        for scan in self._scans:
            for problem in scan.problems:
                self._source.report(problem)
        for path in self._source.paths:
            found = [] if path in self._mixed else block_entries(path)
            if count := sum(entry.name.startswith("rollout_") for entry in found):
                self._mixed.add(path)
                got = f"{count} block file{'s' if count > 1 else ''} beside trajectory folders"
                advice = "Only the trajectory folders are read; move one or the other to a folder of their own"
                problem = DataFileError("read all of", repr(str(path)), "data of one kind", got, advice)
                self._source.report(problem)

    def _store(self) -> FrameStore:
        chunks: dict[Key, tuple[FolderScan, int]] = {}
        blocks: list[Block] = []
        for number, scan in enumerate(self._scans):
            if scan.signature:
                self._source.check_schema(scan.schema, scan.data_dir)
            fragments = scan.fragments.copy()
            folder_of = [path.parent.relative_to(scan.data_dir).as_posix() for path in scan.chunk_paths]
            fragments["trajectory"] = numbers_within(np.array(folder_of)[scan.chunk_of], fragments["trajectory"])
            parts = np.split(fragments, np.searchsorted(scan.chunk_of, np.arange(1, len(scan.chunk_paths))))
            for chunk, path in enumerate(scan.chunk_paths):
                blocks.append(Block(path, f"{number}:{folder_of[chunk]}", chunk, parts[chunk]))
                chunks[blocks[-1].key] = scan, chunk

        def read(block: Block, place: Place) -> np.ndarray:
            scan, chunk = chunks[block.key]
            return read_chunk_rows(scan, chunk, columns=[place[1]])[place[1]]

        layouts = layouts_of(self._source.schema or Schema([]))
        return FileFrames(TrajectoryIndex(blocks), layouts, read, losses=(*GONE, DataFileError))


#: How folders are read: as the first kind that is there. A class for another kind has the methods of these.
_KINDS = (_Chunks, _Blocks)
_Folders = _Chunks | _Blocks


def _contents(scan: FolderScan) -> Any:
    return scan.chunk_paths, list(scan.known)


def _identities(blocks: Iterable[Block]) -> set[Any]:
    return {block.identity for block in blocks}
