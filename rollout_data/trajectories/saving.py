"""Save trajectories one after another in the background, and keep the folder's index true.

One rule: a trajectory stays readable in memory until its file is there, also when writing fails; a
failure is raised once by whoever asks next, and what was not written is tried again.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from storage.background import BackgroundWorker
from storage.errors import BackgroundError, RolloutDataError, RolloutDataWarning

from .files import TrajectoryBlock, file_name, find_files, write_trajectory
from .index import Entry

#: Writing the index takes at most about this share of the thread's time, however long the index is.
_INDEX_SHARE = 0.1


class TrajectorySaver:
    """Write entries to a folder.

    Args:
        folder: Where to; made at once.
        file_format: "h5", "pt" or "pkl".
        max_pending: How many entries may wait; `submit` waits beyond that.
        on_saved: Called with an entry and its file, in the thread; gives False if nobody wants it any more.
        save_index: Writes the index of what is saved; called in the thread.
        timed: Gives what measures a block of this name.

    Attributes:
        first_free_id: Above the ids of the files that an earlier run has left.
        num_earlier: How many those are that nobody has loaded or been told of.
    """

    def __init__(
        self,
        folder: Path,
        file_format: str,
        max_pending: int,
        on_saved: Callable[[Entry, Path, TrajectoryBlock | None], bool],
        save_index: Callable[[], None],
        timed: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        self.folder, self.file_format = folder, file_format
        folder.mkdir(parents=True, exist_ok=True)
        earlier = [number for number, _ in find_files(folder)]
        self.num_earlier, self.first_free_id = len(earlier), max(earlier, default=-1) + 1
        self._on_saved, self._save_index, self._timed = on_saved, save_index, timed
        self._worker = BackgroundWorker(f"the trajectories of {str(folder)!r}", max_pending)
        self._worker.submit(_nothing)  # starts the thread: while the interpreter exits none can be
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        self._unsaved: list[Entry] = []
        self._index_due_s = 0.0

    @property
    def num_pending(self) -> int:
        """Entries that wait to be written."""
        return self._worker.num_pending

    def warn_of_earlier(self) -> None:
        """Say once, to who called the caller, that the index will not name the files of an earlier run."""
        number, self.num_earlier = self.num_earlier, 0
        if number:
            text = f"{number} trajectories of an earlier run are in {str(self.folder)!r}"
            advice = "the index will not name them. Load that folder first to go on with them"
            warnings.warn(f"{text}, and {advice}", RolloutDataWarning, stacklevel=3)

    def submit(self, entry: Entry) -> None:
        """Queue an entry, whose `rows` are not changed any more; waits while too many are queued."""
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

    def _save(self, entry: Entry) -> None:
        try:
            assert entry.rows is not None
            path = self.folder / file_name(entry.trajectory_id, entry.weights_id, self.file_format)
            with self._timed("write"):
                write_trajectory(path, entry.trajectory_id, entry.layout, entry.rows, entry.shape, entry.info)
            is_block = path.suffix == ".h5"
            block = TrajectoryBlock(path, entry.trajectory_id, entry.shape) if is_block else None
            if not self._on_saved(entry, path, block):
                path.unlink(missing_ok=True)
            # The last of a burst always writes it: then nothing saved is missing in it.
            if self._worker.num_pending <= 1 or time.monotonic() >= self._index_due_s:
                self._write_index()
        except BaseException as failure:  # noqa: BLE001 - handed to the caller
            with self._lock:
                self._failure = self._failure or failure
                if entry.path is None:
                    self._unsaved.append(entry)

    def _write_index(self) -> None:
        start = time.monotonic()
        try:
            self._save_index()
        except (OSError, RolloutDataError) as failure:
            with self._lock:
                self._failure = self._failure or failure
        stop = time.monotonic()
        self._index_due_s = stop + (stop - start) / _INDEX_SHARE


def _nothing() -> None:
    pass
