"""Journals, which show whether a writer died and how many frames were lost.

A journal is a small file beside the blocks that exists while its writer lives. The writer holds a
lock on it, which the system releases when the process dies. Each `add` writes the journal through a
memory map, which survives the death of the process but not of the machine.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import mmap
import os
import struct
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from storage.errors import UsageError

from ..blocks.write_block import TEMPORARY_PREFIX, block_name

_MAGIC = b"rdjournl"
_NUMBER = struct.Struct("<q")
#: Offsets of five numbers after the magic: accepted frames, settled frames, time of the last `add`
#: in ns, sequence + 1 of the block that is being published, and settled frames after that block. A
#: settled frame is published or dropped.
_ACCEPTED, _PUBLISHED, _TIME, _SEQUENCE, _SETTLED = (_NUMBER.size * place for place in range(1, 6))
_NUM_BYTES = _SETTLED + _NUMBER.size
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@dataclass(frozen=True)
class DeadWriter:
    """A writer that ended without `close()`.

    Attributes:
        writer: Name of the writer.
        num_lost_frames: Frames that it accepted and did not publish.
        last_sign_ns: Wall-clock time of its last `add`, nanoseconds since the epoch.
    """

    writer: str
    num_lost_frames: int
    last_sign_ns: int


def journal_path(folder: Path, writer: str) -> Path:
    """Return the path of the journal of a writer."""
    return folder / f".rollout_{writer}.journal"


class Journal:
    """The journal of one living writer. The file exists from `open()` to `close()`."""

    def __init__(self, folder: Path, writer: str) -> None:
        self.writer = writer
        self.path = journal_path(folder, writer)
        self._descriptor = -1
        self._memory: mmap.mmap | None = None

    def open(self) -> None:
        """Reserve the writer's name. After an error or a Ctrl-C, the caller must call `close()`.

        Raises:
            UsageError: A living writer has the name.
        """
        while True:
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
            if not _lock(self._descriptor):
                raise UsageError(
                    f"writer name {self.writer!r} is in use in {str(self.path.parent)!r} by "
                    "another writer. Omit writer_name to choose a free name."
                )
            if _is_linked(self._descriptor, self.path):
                break
            # Before the lock, another writer removed the file, since a journal without a lock
            # counts as dead.
            self._release()
        os.pwrite(self._descriptor, _MAGIC.ljust(_NUM_BYTES, b"\0"), 0)
        # A system call would wait while the disk is flushed: 30 ms in an `add`. Some file systems
        # have no maps.
        with suppress(OSError, ValueError):
            self._memory = mmap.mmap(self._descriptor, _NUM_BYTES)
        self._write(_TIME, time.time_ns())

    def accept(self, num_frames: int, time_ns: int) -> None:
        """Note the number of accepted frames and the time of the last `add`."""
        self._write(_ACCEPTED, num_frames)
        self._write(_TIME, time_ns)

    def announce(self, sequence: int, num_frames: int) -> None:
        """Note, before block `sequence` is published, the number of settled frames after it."""
        self._write(_SEQUENCE, sequence + 1)
        self._write(_SETTLED, num_frames)

    def publish(self, num_frames: int) -> None:
        """Note the number of settled frames."""
        self._write(_PUBLISHED, num_frames)

    def _write(self, offset: int, number: int) -> None:
        """Overwrite a number. A failure is ignored: a loss report may then be less exact."""
        if self._memory is not None:
            _NUMBER.pack_into(self._memory, offset, number)
            return
        with suppress(OSError):
            os.pwrite(self._descriptor, _NUMBER.pack(number), offset)

    def close(self) -> None:
        """Remove the journal if it still belongs to this writer. Idempotent."""
        if self._descriptor < 0:
            return
        if self._memory is not None:
            self._memory.close()
            self._memory = None
        if _lock(self._descriptor) and _is_linked(self._descriptor, self.path):
            with suppress(OSError):  # A read-only folder: the next writer cleans up.
                self.path.unlink(missing_ok=True)
        self._release()

    def _release(self) -> None:
        descriptor = self._descriptor
        self._descriptor = -1
        os.close(descriptor)


def recover_dead_writers(folder: Path) -> list[DeadWriter]:
    """Remove journals and temporary files of dead writers in `folder`; return the writers.

    Published blocks are complete and not changed.
    """
    dead_writers = []
    for path in sorted(folder.glob(".rollout_*.journal")):
        if not path.is_file():  # A folder or a pipe is no journal.
            continue
        with suppress(OSError):  # Another process removed the file, or another user owns it.
            descriptor = os.open(path, os.O_RDONLY)
            try:
                if _lock(descriptor) and _is_linked(descriptor, path):
                    writer = path.name.removeprefix(".rollout_").removesuffix(".journal")
                    dead = _read_dead(folder, writer, os.pread(descriptor, _NUM_BYTES, 0))
                    remove_temporary_files(folder, writer)
                    path.unlink(missing_ok=True)
                    dead_writers.append(dead)
            finally:
                os.close(descriptor)
    return dead_writers


def is_alive(path: Path) -> bool:
    """Return whether the writer of a journal lives. Changes no file."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:  # Without locks a writer counts as living.
        return isinstance(error, BlockingIOError) or error.errno in _NO_LOCKS
    finally:
        os.close(descriptor)
    return False


def remove_temporary_files(folder: Path, writer: str) -> None:
    """Remove unfinished files of a dead writer."""
    for temporary in folder.glob(f"{TEMPORARY_PREFIX}rollout_{glob.escape(writer)}_*"):
        if not temporary.is_dir():
            temporary.unlink(missing_ok=True)


def _read_dead(folder: Path, writer: str, data: bytes) -> DeadWriter:
    """Parse the journal of a dead writer."""
    # The writer died before it accepted a frame.
    if len(data) < _NUM_BYTES or not data.startswith(_MAGIC):
        return DeadWriter(writer, 0, 0)
    accepted, published, time_ns, sequence, settled = struct.unpack_from("<5q", data, _ACCEPTED)
    # The writer may have died between publishing a block and updating the journal.
    if sequence > 0 and (folder / block_name(writer, sequence - 1)).exists():
        published = max(published, settled)
    return DeadWriter(writer, max(0, accepted - published), time_ns)


def _lock(descriptor: int) -> bool:
    """Lock a file without waiting; return whether it is locked. True without file locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True


def _is_linked(descriptor: int, path: Path) -> bool:
    """Return whether `path` still names the open file."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    return False
