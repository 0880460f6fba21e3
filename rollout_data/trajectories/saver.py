"""Save trajectories one after another in the background, and keep the folder's index true.

One rule: a trajectory stays readable in memory until its file is there, also when writing fails; a
failure is raised once by whoever asks next, and what was not written is tried again. A file goes only
after an index without it is on the disk, and the index names newer ones in its place.
"""

from __future__ import annotations

import filecmp
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager
from itertools import islice, takewhile
from pathlib import Path

from storage.core.durable import sync_path
from storage.core.threads import Worker
from storage.errors import BackgroundError, RolloutDataError, RolloutDataWarning

from .files import TrajectoryBlock, file_name, find_files, naming, write_trajectory
from .index import Counters, Entry, write_index

#: Writing the index takes at most about this share of the thread's time, however long the index is.
_INDEX_SHARE = 0.1


class SavedTrajectories:
    """Which trajectories of a folder the index is to name: of those that have their files the newest.

    They lag behind what is live in memory, by what waits to be written: what memory has given up already is
    named until as many newer ones have their files. Called under the lock of the buffer.

    Args:
        capacity: How many; None for any number.

    Attributes:
        entries: Id -> entry, oldest first.
        superfluous: Files to delete once an index that does not name them is written.
    """

    def __init__(self, capacity: int | None) -> None:
        self._capacity = capacity
        self.entries: dict[int, Entry] = {}
        self.superfluous: set[Path] = set()
        #: Id of what waits for its file -> is it still to be named then?
        self._expected: dict[int, bool] = {}

    def expect(self, entry: Entry) -> None:
        """Note that an entry is to be written."""
        self._expected[entry.trajectory_id] = True

    def expects(self, trajectory_id: int) -> bool:
        """Tell whether a file of this id is still to come."""
        return trajectory_id in self._expected

    def forget(self) -> None:
        """Name none of these any more, nor those that wait; their files stay."""
        self.entries = {}
        self._expected = dict.fromkeys(self._expected, False)

    def add(self, entry: Entry) -> bool:
        """Take an entry that has its file now; False if it is neither to be named nor kept."""
        if not self._expected.pop(entry.trajectory_id):
            return self._capacity is None
        self.entries[entry.trajectory_id] = entry
        before = islice(reversed(self.entries), 1, None)
        for one in [*takewhile(lambda one: one > entry.trajectory_id, before)][::-1]:
            self.entries[one] = self.entries.pop(one)  # it failed at first, and they were written before it
        while self._capacity is not None and len(self.entries) > self._capacity:
            oldest = self.entries.pop(next(iter(self.entries)))
            assert oldest.path is not None
            self.superfluous.add(oldest.path)
        return True

    def delete(self, paths: Iterable[Path]) -> None:
        """Delete files that the index on the disk does not name, unless they are wanted again."""
        for path in paths:
            if path in self.superfluous:
                path.unlink(missing_ok=True)
                self.superfluous.discard(path)


class TrajectorySaver:
    """Write entries to a folder.

    Args:
        folder: Where to; made at once.
        file_format: "h5", "pt" or "pkl".
        max_pending: How many entries may wait; `submit` waits beyond that.
        capacity: How many trajectories the folder keeps; None for any number.
        lock: That of the buffer, under which its entries change.
        on_saved: Called with an id whose entry has its file now, in the thread, under the lock.
        counters: Gives what the index says besides; called in the thread, under the lock.
        timed: Gives what measures a block of this name.

    Attributes:
        first_free_id: Above the ids of the files that an earlier run has left.
        saved: What the index is to name; called under the lock.
    """

    def __init__(
        self,
        folder: Path,
        file_format: str,
        max_pending: int,
        capacity: int | None,
        lock: threading.RLock,
        on_saved: Callable[[int], object],
        counters: Callable[[], Counters],
        timed: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        self.folder, self.file_format = folder, file_format
        folder.mkdir(parents=True, exist_ok=True)
        #: Ids of the files of an earlier run that nobody has loaded or been told of.
        self._earlier = {number for number, _ in find_files(folder)}
        self.first_free_id = max(self._earlier, default=-1) + 1
        self.saved = SavedTrajectories(capacity)
        self._on_saved, self._counters, self._timed = on_saved, counters, timed
        self._worker = Worker(f"the trajectories of {str(folder)!r}", max_pending)
        self._lock = lock
        self._failure: BaseException | None = None
        self._unsaved: list[Entry] = []
        self._index_due_s, self._num_named = 0.0, 0

    def warn_of_earlier(self) -> None:
        """Say once, to who called the caller, that the index will not name the files of an earlier run."""
        number, self._earlier = len(self._earlier), set()
        if number:
            text = f"{number} trajectories of an earlier run are in {str(self.folder)!r}"
            advice = "the index will not name them. Load that folder first to go on with them"
            warnings.warn(f"{text}, and {advice}", RolloutDataWarning, stacklevel=3)

    def wait(self) -> None:
        """Wait until what was submitted has its file, or has failed."""
        self._worker.drain()

    def adopt(self, entries: Collection[Entry], directory: Path, is_share: bool) -> None:
        """Give what was loaded from elsewhere a file here too, so that the index can name it; under the lock.

        A hard link, or a copy where the file system has none; entries are read from here then. After an error
        nothing has changed.

        Args:
            entries: What was loaded.
            directory: Where from. What else is in this folder's own tree stays with the ranks that saved it, ...
            is_share: ... unless only this rank has loaded it.
        """
        is_own = self.folder.is_relative_to(directory.resolve())
        others = [] if is_own and not is_share else [one for one in entries if not self.has(one)]
        there: dict[int, list[Path]] = {}
        for (number, _), path in find_files(self.folder).items() if others else ():
            there.setdefault(number, []).append(path)
        made: list[Path] = []
        try:
            places = [self._place(one, there.get(one.trajectory_id, []), made) for one in others]
            if made:
                sync_path(self.folder)
        except BaseException:  # Ctrl-C too: nothing is left that no index will name
            for path in made:
                path.unlink(missing_ok=True)
            raise
        for entry, place in zip(others, places, strict=True):
            if place is not None:
                entry.path, entry.block = place
        self._earlier -= self._earlier if is_own else {one.trajectory_id for one in entries if self.has(one)}
        if number := places.count(None):
            text = f"{number} trajectories of {str(directory)!r} have the ids of others in {str(self.folder)!r}"
            advice = "the index there will not name them. Choose an auto_save_path of its own for this run"
            warnings.warn(f"{text}, and {advice}", RolloutDataWarning, stacklevel=3)

    def name(self, entries: Iterable[Entry]) -> None:
        """Let the index name those of these that are in this folder, oldest first, and nothing before."""
        self.saved.forget()
        self.saved.entries = {one.trajectory_id: one for one in entries if self.has(one)}
        self.saved.superfluous -= {one.path for one in self.saved.entries.values() if one.path is not None}

    def has(self, entry: Entry) -> bool:
        """Tell whether an entry has its file in this folder."""
        return entry.path is not None and entry.path.parent == self.folder

    def submit(self, entry: Entry) -> None:
        """Queue an entry that `saved` expects, with `rows` that nobody changes; waits while too many are queued."""
        self._worker.submit(lambda: self._save(entry))

    def check(self) -> None:
        """Raise what an earlier save failed with, once."""
        with self._lock:
            failure, self._failure = self._failure, None
        if failure is not None:
            raise BackgroundError(
                "save a trajectory", f"to {str(self.folder)!r}", "", str(failure).rstrip(".") or repr(failure),
                "It stays in memory and is tried again at the next checkpoint or close()",
            ) from failure  # fmt: skip

    def flush(self) -> None:
        """Wait until everything is written, what failed before included; raise a failure."""
        self._worker.drain()
        with self._lock:
            again, self._unsaved = self._unsaved, []
            if again:
                self._failure = None
        for entry in again:
            self.submit(entry)
        self._worker.submit(self._write_index)
        self._worker.drain()
        self.check()

    def close(self) -> None:
        """Write everything, stop the thread, raise a failure. Idempotent."""
        try:
            self.flush()
        finally:
            self._worker.close()

    def _place(self, entry: Entry, there: list[Path], made: list[Path]) -> tuple[Path, TrajectoryBlock | None] | None:
        """Give the file here of a loaded entry, made if need be; None if its id is that of another."""
        number, source = entry.trajectory_id, entry.path
        assert source is not None
        path = there[0] if there else self.folder / file_name(number, entry.weights_id, source.suffix[1:])
        if not there and not self.saved.expects(number):
            made.append(path)
            entry.put_file(path)
        else:
            with naming(number, source):
                is_same = len(there) == 1 and path.suffix == source.suffix
                if not is_same or not (path.samefile(source) or filecmp.cmp(path, source, shallow=False)):
                    return None
        return path, None if entry.block is None else TrajectoryBlock(path, number, entry.shape)

    def _save(self, entry: Entry) -> None:
        try:
            assert entry.rows is not None
            path = self.folder / file_name(entry.trajectory_id, entry.weights_id, self.file_format)
            with self._timed("write"):
                write_trajectory(path, entry.trajectory_id, entry.layout, entry.rows, entry.shape, entry.info)
            is_block = path.suffix == ".h5"
            block = TrajectoryBlock(path, entry.trajectory_id, entry.shape) if is_block else None
            with self._lock:
                entry.path, entry.block, entry.rows = path, block, None
                is_kept = self.saved.add(entry)
                self._on_saved(entry.trajectory_id)
            if not is_kept:
                path.unlink(missing_ok=True)
            # The last of a burst always writes it: then nothing saved is missing in it. Files that are to go do not
            # pile up beside one that names fewer than are kept.
            is_short = self.saved.superfluous and self._num_named < len(self.saved.entries)
            if is_short or self._worker.num_pending <= 1 or time.monotonic() >= self._index_due_s:
                self._write_index()
        except BaseException as failure:  # noqa: BLE001 - handed to the caller
            with self._lock:
                self._failure = self._failure or failure
                if entry.path is None:
                    self._unsaved.append(entry)

    def _write_index(self) -> None:
        start = time.monotonic()
        try:
            with self._lock:
                named = [entry.as_filed() for entry in self.saved.entries.values()]
                superfluous, counters = list(self.saved.superfluous), self._counters()
            write_index(self.folder, named, counters)
            self._num_named = len(named)
            with self._lock:
                self.saved.delete(superfluous)
        except (OSError, RolloutDataError) as failure:
            with self._lock:
                self._failure = self._failure or failure
        stop = time.monotonic()
        self._index_due_s = stop + (stop - start) / _INDEX_SHARE
