"""Journals of writers, which show whether a writer died and how many frames were lost.

A journal is a small file in the data folder that exists while its writer is open. The writer locks
the file; the system releases the lock when the process dies. Each `add` updates the journal through
a memory map, whose content survives a crash of the process, but not of the machine. The journal
counts accepted frames, which `add` has received, and settled frames, which are in a published block
or were dropped. The difference is the number of frames that a crash loses.
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
# Byte offsets of the numbers in a journal. The file starts with the 8 bytes of `_MAGIC`.
#: Total number of accepted frames.
_ACCEPTED = 1 * _NUMBER.size
#: Total number of settled frames, which are published or dropped.
_SETTLED = 2 * _NUMBER.size
#: Time of the last `add`, ns since the epoch.
_TIME = 3 * _NUMBER.size
#: Sequence number of the block that is being published, plus 1.
_SEQUENCE = 4 * _NUMBER.size
#: Total number of settled frames after the block that is being published.
_SETTLED_AFTER = 5 * _NUMBER.size
_NUM_BYTES = 6 * _NUMBER.size
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@dataclass(frozen=True)
class DeadWriter:
    """A writer whose process ended without `close()`.

    Attributes:
        writer: Name of the writer.
        num_lost_frames: Number of frames that the writer accepted and did not publish.
        last_sign_ns: Wall-clock time of the writer's last `add`, ns since the epoch.
    """

    writer: str
    num_lost_frames: int
    last_sign_ns: int


def journal_path(folder: Path, writer: str) -> Path:
    """Return the path of a writer's journal."""
    return folder / f".rollout_{writer}.journal"


class Journal:
    """The journal of one open writer. The file exists from `open()` to `close()`."""

    def __init__(self, folder: Path, writer: str) -> None:
        self.writer = writer
        self.path = journal_path(folder, writer)
        self._descriptor = -1
        self._memory: mmap.mmap | None = None

    def open(self) -> None:
        """Create and lock the journal, which reserves the writer's name.

        After an error or a Ctrl-C, the caller must call `close()`.

        Raises:
            UsageError: An open writer has this name.
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
            # Before this process got the lock, another writer removed the file as a dead journal,
            # since it was not locked.
            self._release()
        os.pwrite(self._descriptor, _MAGIC.ljust(_NUM_BYTES, b"\0"), 0)
        # Without a memory map, an `add` would wait 30 ms while the disk is flushed. Some file
        # systems do not support maps.
        with suppress(OSError, ValueError):
            self._memory = mmap.mmap(self._descriptor, _NUM_BYTES)
        self._write(_TIME, time.time_ns())

    def accept(self, num_frames: int, time_ns: int) -> None:
        """Write the total number of accepted frames and the time of the last `add`."""
        self._write(_ACCEPTED, num_frames)
        self._write(_TIME, time_ns)

    def announce(self, sequence: int, num_frames: int) -> None:
        """Write the number of the block that will be published next.

        If the writer dies before it calls `publish`, the existence of the block shows whether its
        frames are settled.

        Args:
            sequence: Sequence number of the block.
            num_frames: Total number of settled frames as soon as the block is published.
        """
        self._write(_SEQUENCE, sequence + 1)
        self._write(_SETTLED_AFTER, num_frames)

    def publish(self, num_frames: int) -> None:
        """Write how many frames are in published blocks or were dropped, after publishing a block."""
        self._write(_SETTLED, num_frames)

    def _write(self, offset: int, number: int) -> None:
        """Overwrite a number in the journal. Errors are ignored, since the journal is not essential.

        After an error, a later count of lost frames is less exact.
        """
        if self._memory is not None:
            _NUMBER.pack_into(self._memory, offset, number)
            return
        with suppress(OSError):
            os.pwrite(self._descriptor, _NUMBER.pack(number), offset)

    def close(self) -> None:
        """Remove the journal file, if it still belongs to this writer. Idempotent."""
        if self._descriptor < 0:
            return
        if self._memory is not None:
            self._memory.close()
            self._memory = None
        if _lock(self._descriptor) and _is_linked(self._descriptor, self.path):
            with suppress(OSError):  # If the folder is read-only, a later writer cleans up.
                self.path.unlink(missing_ok=True)
        self._release()

    def _release(self) -> None:
        descriptor = self._descriptor
        self._descriptor = -1
        os.close(descriptor)


def recover_dead_writers(folder: Path) -> list[DeadWriter]:
    """Remove journals and temporary files of dead writers in a folder; return these writers.

    Published blocks are complete and are not changed.
    """
    dead_writers = []
    for path in sorted(folder.glob(".rollout_*.journal")):
        if not path.is_file():  # Opening a pipe would block.
            continue
        # OSError is raised if another process removed the file, or another user owns it.
        with suppress(OSError):
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
    """Return whether the writer of a journal is still running. Changes no file."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:  # If the file system has no locks, the writer counts as running.
        return isinstance(error, BlockingIOError) or error.errno in _NO_LOCKS
    finally:
        os.close(descriptor)
    return False


def remove_temporary_files(folder: Path, writer: str) -> None:
    """Remove temporary files that a dead writer has left."""
    for temporary in folder.glob(f"{TEMPORARY_PREFIX}rollout_{glob.escape(writer)}_*"):
        if not temporary.is_dir():
            temporary.unlink(missing_ok=True)


def _read_dead(folder: Path, writer: str, data: bytes) -> DeadWriter:
    """Parse the journal of a dead writer; compute the number of lost frames."""
    # An incomplete journal means that the writer died before it accepted a frame.
    if len(data) < _NUM_BYTES or not data.startswith(_MAGIC):
        return DeadWriter(writer, 0, 0)
    numbers = struct.unpack_from("<5q", data, _ACCEPTED)
    num_accepted, num_settled, time_ns, sequence, num_settled_after = numbers
    # If this block exists, the writer died after publishing it and before updating the journal.
    if sequence > 0 and (folder / block_name(writer, sequence - 1)).exists():
        num_settled = max(num_settled, num_settled_after)
    return DeadWriter(writer, max(0, num_accepted - num_settled), time_ns)


def _lock(descriptor: int) -> bool:
    """Try to lock a file without waiting; return False if another process has locked it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True


def _is_linked(descriptor: int, path: Path) -> bool:
    """Return whether the open file still exists at `path`."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    return False
