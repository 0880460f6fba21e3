"""Save trajectories one after another in the background, and keep the index of the folder true.

One rule: a trajectory stays readable in memory until its file is there, also when writing fails; a failure is raised
once, by the next call, and what was not written is tried again. A file is deleted only after an index without it is on
the disk, which names newer ones in its place.
"""

from __future__ import annotations

import filecmp
import time
import warnings
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

from storage.core.durable_files import sync_path
from storage.core.threads import Worker
from storage.errors import BackgroundError, RolloutDataError, RolloutDataWarning

from ..blocks.block import Block
from .replay_folder import Counters, write_index
from .trajectory_files import Entry, find_block, find_files, naming

#: Writing the index takes about this share of the thread's time at most, however long the index is.
_INDEX_SHARE = 0.1


class TrajectorySaver:
    """Write entries to a folder, whose index names the newest `capacity` that have their files.

    They lag behind what is live by what waits to be written: what memory has given up is named until as many newer
    ones have their files. What is said to be called under the lock is, everything else without it.

    Args:
        folder: Where to; made at once.
        file_format: "h5", "pt" or "pkl".
        max_pending: How many entries may wait; `submit` waits beyond that.
        capacity: How many trajectories the folder keeps; None for any number.
        lock: That of the buffer, under which its entries change.
        on_saved: Called with the id of an entry that has its file now, in the thread, under the lock.
        counters: Gives what the index says besides; called in the thread, under the lock.
        timed: Gives what measures a block of this name.

    Attributes:
        first_free_id: Above the ids of the files that an earlier run has left.
    """

    def __init__(
        self,
        folder: Path,
        file_format: str,
        max_pending: int,
        capacity: int | None,
        lock: AbstractContextManager[Any],
        on_saved: Callable[[int], object],
        counters: Callable[[], Counters],
        timed: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        self.folder = folder
        self.file_format = file_format
        self._capacity = capacity
        folder.mkdir(parents=True, exist_ok=True)
        #: Ids of the files of an earlier run that were neither loaded nor warned of.
        self._earlier = {number for number, _ in find_files(folder)}
        self.first_free_id = max(self._earlier, default=-1) + 1
        self._lock = lock
        self._on_saved = on_saved
        self._counters = counters
        self._timed = timed
        self._worker = Worker(f"the trajectories of {str(folder)!r}", max_pending)
        #: What the index is to name, oldest first; the ids that wait for their files, and whether it is to name them;
        #: the files to delete once an index that does not name them is written.
        self._named: dict[int, Entry] = {}
        self._expected: dict[int, bool] = {}
        self._superfluous: set[Path] = set()
        self._unsaved: list[Entry] = []
        self._failure: BaseException | None = None
        self._index_due_s = 0.0
        self._num_in_index = 0

    def warn_of_earlier(self) -> None:
        """Warn once, at the call of the caller's caller, that the index will not name the files of an earlier run."""
        number = len(self._earlier)
        self._earlier = set()
        if number:
            text = f"{number} trajectories of an earlier run are in {str(self.folder)!r}"
            advice = "the index will not name them. Load that folder first to go on with them"
            warnings.warn(f"{text}, and {advice}", RolloutDataWarning, stacklevel=3)

    def expect(self, entry: Entry) -> None:
        """Note that an entry is about to be submitted; under the lock."""
        self._expected[entry.trajectory_id] = True

    def submit(self, entry: Entry) -> None:
        """Queue an expected entry, with `rows` that do not change; waits while too many are queued."""
        self._worker.submit(self._save, entry)

    def name(self, entries: Iterable[Entry]) -> None:
        """Let the index name those of these, oldest first, that are in this folder; under the lock.

        What it named before keeps its file.
        """
        self._expected = dict.fromkeys(self._expected, False)
        self._named = {one.trajectory_id: one for one in entries if self._has(one)}
        self._superfluous -= {one.path for one in self._named.values() if one.path is not None}

    def adopt(self, entries: Collection[Entry], directory: Path, is_share: bool) -> None:
        """Write trajectories that were loaded from elsewhere, so that the index can name it; under the lock.

        A hard link, or a copy where the file system has none; entries are read from here then. After an error
        nothing has changed.

        Args:
            entries: What was loaded.
            directory: Where from. What else is in this folder's own tree stays with the ranks that saved it, ...
            is_share: ... unless only this rank has loaded it.
        """
        is_own = self.folder.is_relative_to(directory.resolve())
        others = [] if is_own and not is_share else [one for one in entries if not self._has(one)]
        there: dict[int, list[Path]] = {}
        for (number, _), path in find_files(self.folder).items() if others else ():
            there.setdefault(number, []).append(path)
        made: list[Path] = []
        try:
            places = [self._place(one, there.get(one.trajectory_id, []), made) for one in others]
            if made:
                sync_path(self.folder)
        except BaseException:  # Ctrl-C too: no file is left that no index will name
            for path in made:
                path.unlink(missing_ok=True)
            raise
        for entry, place in zip(others, places, strict=True):
            if place is not None:
                entry.path, entry.block = place
        self._earlier -= self._earlier if is_own else {one.trajectory_id for one in entries if self._has(one)}
        if number := places.count(None):
            text = f"{number} trajectories of {str(directory)!r} have the ids of others in {str(self.folder)!r}"
            advice = "the index there will not name them. Choose an auto_save_path of its own for this run"
            warnings.warn(f"{text}, and {advice}", RolloutDataWarning, stacklevel=3)

    def check(self) -> None:
        """Raise what an earlier save failed with, once."""
        with self._lock:
            failure = self._failure
            self._failure = None
        if failure is not None:
            got = str(failure).rstrip(".") or repr(failure)
            advice = "It stays in memory and is tried again at the next checkpoint or close()"
            raise BackgroundError("save a trajectory", f"to {str(self.folder)!r}", "", got, advice) from failure

    def wait(self) -> None:
        """Wait until what was submitted has its file, or has failed."""
        self._worker.drain()

    def flush(self) -> None:
        """Wait until everything is written, what failed before included; raise a failure."""
        self.wait()
        with self._lock:
            again = self._unsaved
            self._unsaved = []
            if again:
                self._failure = None
        for entry in again:
            self.submit(entry)
        self._worker.submit(self._write_index)
        self.wait()
        self.check()

    def close(self) -> None:
        """Write everything, stop the thread, raise a failure. Idempotent."""
        try:
            self.flush()
        finally:
            self._worker.close()

    def _has(self, entry: Entry) -> bool:
        return entry.path is not None and entry.path.parent == self.folder

    def _place(self, entry: Entry, there: list[Path], made: list[Path]) -> tuple[Path, Block | None] | None:
        """Return the file here of a loaded entry, made if need be; None if its id is that of another."""
        number = entry.trajectory_id
        source = entry.path
        assert source is not None
        path = there[0] if there else self.folder / entry.file_name(source.suffix[1:])
        if not there and number not in self._expected:
            made.append(path)
            entry.put_file(path, None)
        else:
            with naming(number, source):
                is_same = len(there) == 1 and path.suffix == source.suffix
                if not is_same or not (path.samefile(source) or filecmp.cmp(path, source, shallow=False)):
                    return None
        return path, None if entry.block is None else find_block(path, number, entry.shape, verify=False)[1]

    def _save(self, entry: Entry) -> None:
        try:
            assert entry.rows is not None
            path = self.folder / entry.file_name(self.file_format)
            with self._timed("write"):
                entry.write(path, entry.rows)
            is_block = path.suffix == ".h5"
            block = find_block(path, entry.trajectory_id, entry.shape, verify=False)[1] if is_block else None
            with self._lock:
                entry.path = path
                entry.block = block
                entry.rows = None
                is_kept = self._note_saved(entry)
                self._on_saved(entry.trajectory_id)
            if not is_kept:
                path.unlink(missing_ok=True)
            # The last of a burst always writes it: then nothing saved is missing in it. Files that are to go do not
            # pile up beside one that names fewer than are kept.
            is_short = self._superfluous and self._num_in_index < len(self._named)
            if is_short or self._worker.num_pending <= 1 or time.monotonic() >= self._index_due_s:
                self._write_index()
        except BaseException as failure:  # noqa: BLE001 - handed to the caller
            self._note_failure(failure)
            if entry.path is None:
                with self._lock:
                    self._unsaved.append(entry)

    def _note_saved(self, entry: Entry) -> bool:
        """Name an entry that has its file now; False if it is neither to be named nor kept."""
        if not self._expected.pop(entry.trajectory_id):
            return self._capacity is None
        self._named[entry.trajectory_id] = entry
        before = islice(reversed(self._named), 1, None)
        for one in [*takewhile(lambda one: one > entry.trajectory_id, before)][::-1]:
            self._named[one] = self._named.pop(one)  # it failed at first, and they were written before it
        while self._capacity is not None and len(self._named) > self._capacity:
            oldest = self._named.pop(next(iter(self._named)))
            assert oldest.path is not None
            self._superfluous.add(oldest.path)
        return True

    def _note_failure(self, failure: BaseException) -> None:
        with self._lock:
            self._failure = self._failure or failure

    def _write_index(self) -> None:
        start = time.monotonic()
        try:
            with self._lock:
                named = {entry.filed_id: entry for entry in self._named.values()}
                superfluous, counters = list(self._superfluous), self._counters()
            write_index(self.folder, named, counters)
            self._num_in_index = len(named)
            with self._lock:
                for path in self._superfluous.intersection(superfluous):  # the others are wanted again
                    path.unlink(missing_ok=True)
                    self._superfluous.discard(path)
        except (OSError, RolloutDataError) as failure:
            self._note_failure(failure)
        stop = time.monotonic()
        self._index_due_s = stop + (stop - start) / _INDEX_SHARE
