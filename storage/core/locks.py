"""One process at a time: locks of the kernel, which end with the process that holds them."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import UsageError

#: Raised where a file system has no locks.
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
#: Raised where no file can be made.
_NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS)
#: Locked files of this process; a forked child closes its copies, which would keep the locks.
_held: set[int] = set()
_forks_are_watched = False


@contextmanager
def only_writer_of(target: Path, action: str) -> Iterator[None]:
    """Lock a file or folder that may not exist yet, against other processes and threads.

    The lock is that of a hidden file beside the target, which is removed at the end. A killed
    process leaves the file and no lock. A forked child does not hold the lock. Where nothing can be
    made beside a target that is there, as for a mounted folder, the lock is that of the target
    itself.

    Raises:
        UsageError: Somebody else holds the lock.
        OSError: There is no target yet, and its folder cannot be written.
    """
    real = Path(os.path.realpath(target))
    real.parent.mkdir(parents=True, exist_ok=True)
    name = hashlib.blake2b(os.fsencode(real.name), digest_size=8).hexdigest()
    file = real.parent / f".rollout_{name}.lock"
    path: Path | None = file
    try:
        descriptor = _locked(file, action, target)
    except OSError as error:
        if error.errno not in _NOT_WRITABLE or not real.exists():
            raise
        path = None
        descriptor = _locked(real, action, target, os.O_RDONLY)
    _watch_forks()
    _held.add(descriptor)
    try:
        yield
    finally:
        if descriptor in _held:  # not in a forked child
            _held.discard(descriptor)
            # Removed before it is released: whoever locks a removed file tries again.
            if path is not None:
                with suppress(OSError):
                    path.unlink(missing_ok=True)
            os.close(descriptor)


def _locked(path: Path, action: str, target: Path, flags: int = os.O_RDWR | os.O_CREAT) -> int:
    """Open and lock a file or folder; return its descriptor."""
    while True:
        descriptor = os.open(path, flags | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(path, descriptor):
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            expected = "no other writer"
            got = "another process or thread that is writing it"
            raise UsageError(
                action, repr(str(target)), expected, got, "Wait until it has ended"
            ) from None
        except OSError as error:
            if error.errno in NO_LOCKS:
                return descriptor
            os.close(descriptor)
            raise
        os.close(descriptor)


def _is_at(path: Path, descriptor: int) -> bool:
    """Return whether a path still names an open file."""
    try:
        there = os.stat(path)
    except FileNotFoundError:
        return False
    mine = os.fstat(descriptor)
    return (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino)


def _watch_forks() -> None:
    global _forks_are_watched
    if not _forks_are_watched:
        _forks_are_watched = True
        os.register_at_fork(after_in_child=_close_copies)


def _close_copies() -> None:
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()
