"""`TrajectorySaver`: write trajectories and the index of their folder in the background.

A trajectory stays in memory until its file is written. If writing fails, the next call raises the
error once, and writing is retried by `flush`. An old file is deleted only after a new index that
does not list the file was written.
"""

from __future__ import annotations

import filecmp
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from storage.core.durable_files import sync_path
from storage.core.threads import Worker
from storage.errors import BackgroundError, RolloutDataError, RolloutDataWarning

from ..blocks.block import Block
from ..sources.trajectory_checkpoints.checkpoint_folder import find_files
from .replay_folder import Counters, write_index
from .trajectory_files import Entry, find_block, missing_file_reported

#: Maximum fraction of the background thread's time in which the index is written. If writing an
#: index took 1 s, the next index is due 10 s later.
_INDEX_SHARE = 0.1
#: File of a trajectory, and the locations of its rows if it is a block file, otherwise None.
_Place = tuple[Path, Block | None]


class TrajectorySaver:
    """Background writer of trajectory files and their index.

    An entry is a trajectory of a buffer. The index lists the newest `capacity` entries whose file
    is written. An entry that the buffer has removed stays listed until newer entries replace it.
    Call methods without the lock of the buffer, unless their docstring requires the lock.

    Args:
        folder: Target folder, created by the constructor.
        file_format: "h5", "pt" or "pkl".
        max_pending: Maximum number of entries that wait to be written. `submit` blocks while the
            number is reached.
        capacity: Maximum number of trajectories in the folder; None means no limit.
        lock: Lock of the buffer, which protects its entries.
        on_saved: Function called with the id of a written entry, in the background thread, under
            the lock.
        counters: Function that returns the state of the buffer for the index. It is called in the
            background thread, under the lock.
        timed: Function that returns a context manager, which records the duration of its `with`
            block under the name in the argument.

    Attributes:
        first_free_id: Smallest id that is larger than the ids of all files of earlier runs.
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
        #: Ids of files of an earlier run that were not loaded. Cleared when the user was warned.
        self._earlier_ids = set(find_files(folder))
        self.first_free_id = max(self._earlier_ids, default=-1) + 1
        self._lock = lock
        self._on_saved = on_saved
        self._counters = counters
        self._timed = timed
        self._worker = Worker(f"the trajectories of {str(folder)!r}", max_pending)
        #: The trajectories that the next written index lists, by id, oldest first.
        self._listed: dict[int, Entry] = {}
        #: For the id of each trajectory that is not written yet: whether the index will list it.
        self._expected: dict[int, bool] = {}
        #: Files to delete after the next index is written, because it does not list them.
        self._superfluous: set[Path] = set()
        self._unsaved: list[Entry] = []
        self._failure: BaseException | None = None
        self._index_due_s = 0.0
        self._num_in_index = 0

    def warn_of_earlier(self) -> None:
        """Warn once if the folder has files of an earlier run, which the index will not list.

        The warning names the line of the user's code.
        """
        num_earlier = len(self._earlier_ids)
        self._earlier_ids = set()
        if num_earlier:
            message = (
                f"{str(self.folder)!r} has {num_earlier} trajectories of an earlier run, which the "
                "new index omits. Load this folder first to continue the run"
            )
            warnings.warn(message, RolloutDataWarning, stacklevel=3)

    def expect(self, entry: Entry) -> None:
        """Announce a trajectory that will be submitted, so that the index will list it.

        Requires the lock.
        """
        self._expected[entry.trajectory_id] = True

    def submit(self, entry: Entry) -> None:
        """Queue a trajectory for the background thread, which writes its file.

        Call `expect` first. Do not change the rows of the trajectory afterwards. The call blocks
        while `max_pending` trajectories are queued.
        """
        self._worker.submit(self._save, entry)

    def list_only(self, entries: Iterable[Entry]) -> None:
        """Set the trajectories that the next index lists, after the buffer has replaced its own.

        Only trajectories whose file is in this folder are listed. Queued trajectories are not.
        Files of trajectories that were listed before are not deleted. Requires the lock.
        """
        self._expected = dict.fromkeys(self._expected, False)
        self._listed = {}
        for entry in entries:
            if entry.path is not None and self._is_in_folder(entry):
                self._listed[entry.trajectory_id] = entry
                self._superfluous.discard(entry.path)

    def adopt(self, entries: Collection[Entry], directory: Path, is_share: bool) -> None:
        """Link or copy the files of loaded trajectories into this folder. Requires the lock.

        Afterwards the index can list these trajectories, and their rows are read from this folder.
        If an error is raised, the folder is unchanged.

        Args:
            entries: Entries of the loaded trajectories.
            directory: Folder of the loaded trajectories. If the saver's own folder is inside of
                `directory`, no files are linked or copied unless `is_share` is True: they belong to
                other ranks of the same run.
            is_share: Whether each rank has loaded its own share.
        """
        is_inside = self.folder.is_relative_to(directory.resolve())
        others: list[Entry] = []
        if is_share or not is_inside:
            others = [entry for entry in entries if not self._is_in_folder(entry)]
        placed = self._place_all(others)
        num_omitted = 0
        for entry, place in zip(others, placed, strict=True):
            if place is None:
                num_omitted += 1
            else:
                entry.path, entry.block = place

        if is_inside:
            self._earlier_ids.clear()
        else:
            self._earlier_ids -= {
                entry.trajectory_id for entry in entries if self._is_in_folder(entry)
            }
        if num_omitted:
            message = (
                f"{num_omitted} trajectories of {str(directory)!r} have ids that other "
                f"trajectories in {str(self.folder)!r} use, so its index omits them. Choose "
                "another auto_save_path"
            )
            warnings.warn(message, RolloutDataWarning, stacklevel=3)

    def check(self) -> None:
        """Raise `BackgroundError` if a save failed since the last call."""
        with self._lock:
            failure = self._failure
            self._failure = None
        if failure is not None:
            cause = str(failure).rstrip(".") or repr(failure)
            raise BackgroundError(
                f"a trajectory could not be saved to {str(self.folder)!r}: {cause}. It stays in "
                "memory and is saved again at the next checkpoint or close()."
            ) from failure

    def wait(self) -> None:
        """Wait until each submitted trajectory is written or its write has failed."""
        self._worker.drain()

    def flush(self) -> None:
        """Wait until all submitted trajectories are written. Failed writes are repeated once.

        Raises `BackgroundError` if a write fails.
        """
        self.wait()
        with self._lock:
            unsaved = self._unsaved
            self._unsaved = []
            if unsaved:
                self._failure = None
        for entry in unsaved:
            self.submit(entry)
        self._worker.submit(self._write_index)
        self.wait()
        self.check()

    def close(self) -> None:
        """Write all submitted trajectories and stop the thread.

        Raises `BackgroundError` if a write fails.
        """
        try:
            self.flush()
        finally:
            self._worker.close()

    def _is_in_folder(self, entry: Entry) -> bool:
        return entry.path is not None and entry.path.parent == self.folder

    def _place_all(self, entries: Sequence[Entry]) -> list[_Place | None]:
        """Link or copy the files of loaded trajectories. If one fails, remove all created files."""
        if not entries:
            return []
        existing = find_files(self.folder)
        created: list[Path] = []
        try:
            places = []
            for entry in entries:
                places.append(self._place(entry, existing.get(entry.trajectory_id, []), created))
            if created:
                sync_path(self.folder)
        except BaseException:  # Created files must not stay after Ctrl-C either.
            for path in created:
                path.unlink(missing_ok=True)
            raise
        return places

    def _place(self, entry: Entry, existing: Sequence[Path], created: list[Path]) -> _Place | None:
        """Link or copy the file of a loaded trajectory into this folder, unless it is there already.

        Args:
            entry: The loaded trajectory, whose file is in another folder.
            existing: Files in this folder with the id of the trajectory.
            created: Paths of created files. A new path is appended.

        Returns:
            The file in this folder and its row locations. None if another trajectory in this folder
            has the same id.
        """
        trajectory_id = entry.trajectory_id
        source = entry.path
        assert source is not None
        path = self.folder / entry.file_name(source.suffix[1:])
        if existing:
            path = existing[0]
        if existing or trajectory_id in self._expected:
            with missing_file_reported(trajectory_id, source):
                if len(existing) != 1 or not _is_copy(path, source):
                    return None
        else:
            created.append(path)
            entry.put_file(path, None)
        if entry.block is None:
            return path, None
        _, block = find_block(path, trajectory_id, entry.shape, verify=False)
        return path, block

    def _save(self, entry: Entry) -> None:
        """Write the file of a trajectory, and the index if it is due, in the background thread."""
        try:
            self._write(entry)
            # Writing the index after each trajectory would be slow. It is written after the last
            # queued trajectory, or at the time `_index_due_s`. It is also written if files wait for
            # deletion and the last written index lists fewer trajectories than the next index.
            is_short = self._superfluous and self._num_in_index < len(self._listed)
            is_due = time.monotonic() >= self._index_due_s
            if is_short or is_due or self._worker.num_pending <= 1:
                self._write_index()
        except BaseException as failure:  # noqa: BLE001 - `check` raises the error
            self._note_failure(failure)
            if entry.path is None:
                with self._lock:
                    self._unsaved.append(entry)

    def _write(self, entry: Entry) -> None:
        assert entry.rows is not None
        path = self.folder / entry.file_name(self.file_format)
        with self._timed("write"):
            entry.write(path, entry.rows)
        block = None
        if path.suffix == ".h5":
            _, block = find_block(path, entry.trajectory_id, entry.shape, verify=False)
        with self._lock:
            entry.path = path
            entry.block = block
            entry.rows = None
            is_kept = self._note_saved(entry)
            self._on_saved(entry.trajectory_id)
        if not is_kept:
            path.unlink(missing_ok=True)

    def _note_saved(self, entry: Entry) -> bool:
        """Record that the file of a trajectory is written, so that the next index lists it.

        Returns:
            Whether to keep the file. If not, the caller must delete it.
        """
        is_listed = self._expected.pop(entry.trajectory_id)
        if not is_listed:
            return self._capacity is None
        # If the first write failed, newer trajectories were written before this one. The index
        # lists trajectories oldest first, so insert it before the newer ones.
        newer_ids = []
        for trajectory_id in reversed(self._listed):
            if trajectory_id < entry.trajectory_id:
                break
            newer_ids.append(trajectory_id)
        self._listed[entry.trajectory_id] = entry
        for trajectory_id in reversed(newer_ids):
            self._listed[trajectory_id] = self._listed.pop(trajectory_id)
        while self._capacity is not None and len(self._listed) > self._capacity:
            oldest = self._listed.pop(next(iter(self._listed)))
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
                listed = {entry.id_in_file_name: entry for entry in self._listed.values()}
                superfluous = set(self._superfluous)
                counters = self._counters()
            write_index(self.folder, listed, counters)
            self._num_in_index = len(listed)
            with self._lock:
                # While the index was written, another thread may have loaded a checkpoint with some
                # of these files. Such files are no longer in `_superfluous`, and are kept.
                for path in self._superfluous.intersection(superfluous):
                    path.unlink(missing_ok=True)
                    self._superfluous.discard(path)
        except (OSError, RolloutDataError) as failure:
            self._note_failure(failure)
        stop = time.monotonic()
        self._index_due_s = stop + (stop - start) / _INDEX_SHARE


def _is_copy(path: Path, source: Path) -> bool:
    """Return whether two files have the same format and content."""
    if path.suffix != source.suffix:
        return False
    return path.samefile(source) or filecmp.cmp(path, source, shallow=False)
