"""Locks of files and folders among processes. The kernel releases them when a process ends."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import UsageError

#: Error numbers of a file system without locks.
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
#: Error numbers of a folder in which no file can be created.
_NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS)
#: Descriptors of the locked files of this process.
#: A forked child closes its copies, because a lock lasts until all copies are closed.
_held: set[int] = set()
_forks_are_watched = False


@contextmanager
def only_writer_of(target: Path) -> Iterator[None]:
    """Lock a file or folder against other processes and threads during the block.

    The target may be missing. The lock is held on a hidden file next to the target, which is
    removed at the end. A killed process leaves the hidden file, but no lock. A forked child does
    not hold the lock. If no file can be created next to an existing target, such as a mounted
    folder, the target itself is locked.

    Raises:
        UsageError: Another process or thread holds the lock.
        OSError: The target does not exist, and its folder is not writable.
    """
    real = Path(os.path.realpath(target))
    real.parent.mkdir(parents=True, exist_ok=True)
    name = hashlib.blake2b(os.fsencode(real.name), digest_size=8).hexdigest()
    file = real.parent / f".rollout_{name}.lock"
    path: Path | None = file
    try:
        descriptor = _locked(file, target)
    except OSError as error:
        if error.errno not in _NOT_WRITABLE or not real.exists():
            raise
        path = None
        descriptor = _locked(real, target, os.O_RDONLY)
    _watch_forks()
    _held.add(descriptor)
    try:
        yield
    finally:
        if descriptor in _held:  # A forked child has already closed its copy.
            _held.discard(descriptor)
            # Remove the file before its lock is released.
            # A process that locks a removed file detects this and retries.
            if path is not None:
                with suppress(OSError):
                    path.unlink(missing_ok=True)
            os.close(descriptor)


def _locked(path: Path, target: Path, flags: int = os.O_RDWR | os.O_CREAT) -> int:
    """Open and lock a file or folder, and return its descriptor.

    Raises:
        UsageError: Another process or thread holds the lock.
    """
    while True:
        descriptor = os.open(path, flags | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(path, descriptor):
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            raise UsageError(
                f"another process or thread is writing to {str(target)!r}. Wait until it has "
                "finished."
            ) from None
        except OSError as error:
            if error.errno in NO_LOCKS:
                return descriptor
            os.close(descriptor)
            raise
        os.close(descriptor)


def _is_at(path: Path, descriptor: int) -> bool:
    """Return whether a path still refers to the file of an open descriptor."""
    try:
        at_path = os.stat(path)
    except FileNotFoundError:
        return False
    opened = os.fstat(descriptor)
    return (at_path.st_dev, at_path.st_ino) == (opened.st_dev, opened.st_ino)


def _watch_forks() -> None:
    global _forks_are_watched
    if not _forks_are_watched:
        _forks_are_watched = True
        os.register_at_fork(after_in_child=_close_copies)


def _close_copies() -> None:
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()
