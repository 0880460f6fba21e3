"""Journals: how a writer's death is noticed, and how many frames were lost with it.

One rule: a journal is a small file beside the blocks that exists while its writer lives; the
writer holds a lock on it, which the system releases at any death. It is written at each `add`
through a memory map, which survives the death of the process (not of the machine).
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
#: Behind the magic stand five numbers: frames accepted, frames settled, time of the last sign in ns; and of the block
#: that is being published its sequence + 1, and how many frames are settled once it is there.
_ACCEPTED, _PUBLISHED, _TIME, _SEQUENCE, _SETTLED = (_NUMBER.size * place for place in range(1, 6))
_NUM_BYTES = _SETTLED + _NUMBER.size
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@dataclass(frozen=True)
class DeadWriter:
    """What was found of a writer that ended without `close()`.

    Attributes:
        writer: Its name.
        num_lost_frames: Frames that it had accepted and not yet published.
        last_sign_ns: Wall-clock time of its last `add`, nanoseconds since the epoch.
    """

    writer: str
    num_lost_frames: int
    last_sign_ns: int


def journal_path(folder: Path, writer: str) -> Path:
    """Where the journal of a writer is."""
    return folder / f".rollout_{writer}.journal"


class Journal:
    """The journal of one living writer: there from `open()` to `close()`."""

    def __init__(self, folder: Path, writer: str) -> None:
        self.writer = writer
        self.path = journal_path(folder, writer)
        self._descriptor = -1
        self._memory: mmap.mmap | None = None

    def open(self) -> None:
        """Take the writer's name. After an error, or a Ctrl-C in here, call `close()`.

        Raises:
            UsageError: A living writer has the name.
        """
        while True:
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
            if not _lock(self._descriptor):
                where = repr(str(self.path.parent))
                advice = "Leave writer_name out to get a free one"
                expected = f"a writer name not in use, other than {self.writer!r}"
                got = "a living writer of that name"
                raise UsageError("record into", where, expected, got, advice)
            if _is_linked(self._descriptor, self.path):
                break
            self._release()  # another writer removed the file, not locked yet, as a dead writer's: try again
        os.pwrite(self._descriptor, _MAGIC.ljust(_NUM_BYTES, b"\0"), 0)
        # Some file systems cannot be mapped. A system call would wait whenever the disk is flushed: 30 ms in an `add`.
        with suppress(OSError, ValueError):
            self._memory = mmap.mmap(self._descriptor, _NUM_BYTES)
        self._write(_TIME, time.time_ns())

    def accept(self, num_frames: int, time_ns: int) -> None:
        """Note how many frames were accepted in all, and when."""
        self._write(_ACCEPTED, num_frames)
        self._write(_TIME, time_ns)

    def announce(self, sequence: int, num_frames: int) -> None:
        """Note, before a block is published, how many accepted frames it settles."""
        self._write(_SEQUENCE, sequence + 1)
        self._write(_SETTLED, num_frames)

    def publish(self, num_frames: int) -> None:
        """Note how many accepted frames are settled: in a block, or dropped on purpose."""
        self._write(_PUBLISHED, num_frames)

    def _write(self, offset: int, number: int) -> None:
        """Overwrite; what cannot be written only makes a later loss report less exact."""
        if self._memory is not None:
            _NUMBER.pack_into(self._memory, offset, number)
            return
        with suppress(OSError):
            os.pwrite(self._descriptor, _NUMBER.pack(number), offset)

    def close(self) -> None:
        """Remove the journal: everything is settled. May be called twice; another writer's is left alone."""
        if self._descriptor < 0:
            return
        if self._memory is not None:
            self._memory.close()
            self._memory = None
        if _lock(self._descriptor) and _is_linked(self._descriptor, self.path):
            with suppress(OSError):  # the folder is read-only by now: the next writer cleans up
                self.path.unlink(missing_ok=True)
        self._release()

    def _release(self) -> None:
        descriptor = self._descriptor
        self._descriptor = -1
        os.close(descriptor)


def recover_dead_writers(folder: Path) -> list[DeadWriter]:
    """Clean up after writers that died in `folder`: journals without a lock, and their temporary files.

    Published blocks are not touched: they are complete.
    """
    found = []
    for path in sorted(folder.glob(".rollout_*.journal")):
        if not path.is_file():  # a folder or a pipe of that name is no journal
            continue
        with suppress(OSError):  # another process cleans up, or it belongs to another user
            descriptor = os.open(path, os.O_RDONLY)
            try:
                if _lock(descriptor) and _is_linked(descriptor, path):
                    writer = path.name.removeprefix(".rollout_").removesuffix(".journal")
                    dead = _read_dead(folder, writer, os.pread(descriptor, _NUM_BYTES, 0))
                    remove_temporary_files(folder, writer)
                    path.unlink(missing_ok=True)
                    found.append(dead)
            finally:
                os.close(descriptor)
    return found


def is_alive(path: Path) -> bool:
    """Return whether the writer of a journal lives; nothing is changed."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:  # where there are no locks, nothing tells
        return isinstance(error, BlockingIOError) or error.errno in _NO_LOCKS
    finally:
        os.close(descriptor)
    return False


def remove_temporary_files(folder: Path, writer: str) -> None:
    """Remove what a dead writer had begun to write."""
    for temporary in folder.glob(f"{TEMPORARY_PREFIX}rollout_{glob.escape(writer)}_*"):
        if not temporary.is_dir():
            temporary.unlink(missing_ok=True)


def _read_dead(folder: Path, writer: str, data: bytes) -> DeadWriter:
    if len(data) < _NUM_BYTES or not data.startswith(_MAGIC):  # it died before it accepted anything
        return DeadWriter(writer, 0, 0)
    accepted, published, time_ns, sequence, settled = struct.unpack_from("<5q", data, _ACCEPTED)
    # It may have died after a block was published and before it noted so: ask the folder.
    if sequence > 0 and (folder / block_name(writer, sequence - 1)).exists():
        published = max(published, settled)
    return DeadWriter(writer, max(0, accepted - published), time_ns)


def _lock(descriptor: int) -> bool:
    """Lock without waiting; True where the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True


def _is_linked(descriptor: int, path: Path) -> bool:
    """Whether `path` still names the open file."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    return False
