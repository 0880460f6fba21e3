"""Atomic replacement of files and folders, and safe reading of small files.

New content is written to a temporary path in the folder of the target, flushed and renamed. After
a crash, the target has either its old or its new content, and never a mixture. Type and size of a
file are checked before the file is read. A JSON object stores the CRC-32 of its other keys under
the key `crc32`. Older files do not have this key.
"""

from __future__ import annotations

import fcntl
import glob
import json
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ..errors import (
    CorruptFileError,
    DataFileError,
    RolloutDataError,
    SchemaError,
    WriteError,
)
from . import arguments

try:
    # zlib_ng of the extra `fast` reaches 24 GB/s; zlib reaches 3.6 GB/s.
    from zlib_ng.zlib_ng import crc32 as _crc32
except ImportError:
    from zlib import crc32 as _crc32

#: `crc32(data, start=0)`: zlib's CRC-32 of a buffer. `start` is the CRC-32 of the preceding bytes.
crc32: Callable[..., int] = _crc32
#: Size limit of a JSON file in bytes. A list of a million episodes with file names is smaller.
MAX_JSON_BYTES = 64 << 20
CHECKSUM = "crc32"


def sync_path(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def replace_file(
    path: str | os.PathLike[str], *, temporary: Path | None = None, durable: bool = True
) -> Iterator[Path]:
    """Yield the path of a temporary file that replaces `path` if the block ends without an error.

    The block writes the temporary file. After an error `path` is unchanged and the temporary file
    is removed. If `path` is a symbolic link, the target of the link is replaced.

    Call this function instead of `os.replace` to replace one complete file. These operations need
    renames of their own:

    - `replace_folder` replaces a whole folder.
    - `publish_metadata` must fail if another writer has already created the file. Therefore it
      creates a hard link, or renames the file on a file system without hard links.
    - The writer of HDF5 targets fills a file during several runs of a conversion, and renames the
      finished file.
    - `repair`, `pack` and the Ray sink move finished files from one folder into another.

    Args:
        path: File to replace or create. Without `temporary`, a missing folder is created.
        temporary: Path of the temporary file, on the same file system. Two processes must not use
            the same path. The caller removes the temporary file of a killed process. None: the
            temporary file is in a new folder next to `path`. If the process is killed, the next
            replacement of `path` removes that folder.
        durable: Whether to flush the file before the rename, and the folder after the rename.
            Otherwise a power failure may lose the file until the caller flushes it.

    Raises:
        DataFileError: `path` is a folder, a device, a pipe or a socket.
        WriteError: `temporary` is None, and the operating system reports an error, such as a full
            disk.
        OSError: `temporary` is a path, and the operating system reports an error.
    """
    target = arguments.path("", path).resolve()
    if target.exists() and not target.is_file():
        kind = "a folder" if target.is_dir() else "a device, a pipe or a socket"
        raise DataFileError(f"{str(path)!r} is {kind}, not a file. Choose another path.")
    with _file_in_new_folder(target) if temporary is None else _removed_at_end(temporary) as new:
        yield new
        if durable:
            sync_path(new)
        os.replace(new, target)
        if durable:
            sync_path(target.parent)


@contextmanager
def _file_in_new_folder(target: Path) -> Iterator[Path]:
    with _new_folder_beside(target) as folder:
        yield folder / target.name


@contextmanager
def _removed_at_end(path: Path) -> Iterator[Path]:
    """Yield the path. Remove the file at the end of the block if it still exists."""
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


@contextmanager
def replace_folder(folder: str | os.PathLike[str], own_names: Collection[str]) -> Iterator[Path]:
    """Yield an empty folder that replaces `folder` if the block ends without an error.

    The end of the block renames the old folder, then the new folder. After a crash between the two
    renames, `existing_folder` returns the path of the old content. If several processes replace a
    folder, the content of the last process stays. The block must not call `replace_folder`.

    Args:
        folder: Folder to replace or create. A symbolic link is followed.
        own_names: File names that an earlier save may have left in `folder`. A folder with other
            file names is not replaced.

    Raises:
        DataFileError: `folder` is a file, or has file names that are not in `own_names`.
        WriteError: The operating system reports an error, such as a full disk.
    """
    target = arguments.path("", folder).resolve()
    _check_replaceable(target, folder, own_names)
    with _new_folder_beside(target) as new:
        yield new
        for path in (*new.rglob("*"), new):
            sync_path(path)
        previous = _previous(target)
        with _locked_folder(target.parent):
            if target.exists():
                shutil.rmtree(previous, ignore_errors=True)
                # If the process crashes after this rename, `existing_folder` returns `previous`.
                os.replace(target, previous)
            os.replace(new, target)
            sync_path(target.parent)
            shutil.rmtree(previous, ignore_errors=True)


def existing_folder(folder: str | os.PathLike[str]) -> Path:
    """Return the path of the current content of `folder`, even after an interrupted replacement."""
    target = arguments.path("", folder).resolve()
    previous = _previous(target)
    return previous if not target.exists() and previous.exists() else target


def _check_replaceable(
    target: Path, folder: str | os.PathLike[str], own_names: Collection[str]
) -> None:
    try:  # Another process may rename the folder after a check by `exists`.
        other_names = sorted(set(os.listdir(target)) - set(own_names))
    except FileNotFoundError:
        return
    except NotADirectoryError:
        raise DataFileError(
            f"{str(folder)!r} is a file. Choose a new folder, or a folder of an earlier save."
        ) from None
    if other_names:
        raise DataFileError(
            f"{str(folder)!r} contains {other_names[0]!r}, which no save has written. Choose a new "
            "folder, or a folder of an earlier save."
        )


@contextmanager
def _new_folder_beside(target: Path) -> Iterator[Path]:
    """Create a folder next to `target`, lock it during the block, and remove it afterwards.

    Raises:
        WriteError: The operating system reports an error, such as a full disk or a read-only
            folder.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _write_error(target, error) from error
    _remove_abandoned(target)
    folder, descriptor = _locked_new_folder(target)
    try:
        yield folder
    except OSError as error:
        is_system_error = error.errno is not None and not isinstance(error, RolloutDataError)
        is_about_folder = error.filename is None or str(error.filename).startswith(str(folder))
        if is_system_error and is_about_folder:
            raise _write_error(target, error) from error
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def _locked_new_folder(target: Path) -> tuple[Path, int]:
    """Create and lock a folder next to `target`. Return its path and the descriptor of the lock."""
    while True:
        folder = target.with_name(f".{target.name}.new-{secrets.token_hex(4)}")
        try:
            folder.mkdir()
        except OSError as error:
            raise _write_error(target, error) from error
        # Another process may remove the folder as abandoned before this process locks it.
        try:
            descriptor = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:
            continue
        with suppress(OSError):  # Without locks, no process removes abandoned folders.
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if folder.exists():
            return folder, descriptor
        os.close(descriptor)


def _write_error(target: Path, error: OSError) -> WriteError:
    return WriteError(
        f"{str(target)!r} cannot be written: {error.strerror or error}.",
        error_number=error.errno,
        filename=str(target),
    )


@contextmanager
def _locked_folder(folder: Path) -> Iterator[None]:
    """Lock a folder during the block, against all threads and processes.

    On a file system without locks, the block runs without a lock.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _remove_abandoned(target: Path) -> None:
    """Remove unlocked temporary folders next to `target`, which killed processes have left."""
    for name in glob.glob(f".{glob.escape(target.name)}.new-*", root_dir=target.parent):
        path = target.parent / name
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:  # Another process removed the folder, or the path is not a folder.
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        except OSError:  # Another process holds the lock and is writing into the folder.
            pass
        finally:
            os.close(descriptor)


def _previous(target: Path) -> Path:
    return target.with_name(f".{target.name}.previous")


def open_regular(path: str | os.PathLike[str]) -> int:
    """Open a regular file for reading and return its descriptor.

    Raises:
        CorruptFileError: `path` is not a regular file. Reading a pipe or a device may never end.
    """
    if stat.S_ISREG(os.stat(path).st_mode):
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        # Another process may have replaced the file since `stat`.
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return descriptor
        os.close(descriptor)
    raise CorruptFileError(f"{str(path)!r} is a folder, a pipe or a device, not a file.")


def read_text(path: str | os.PathLike[str], max_bytes: int = MAX_JSON_BYTES) -> str:
    """Read a text file in UTF-8.

    Raises:
        CorruptFileError: `path` is not a regular file, is larger than `max_bytes`, or is not UTF-8.
    """
    with open(open_regular(path), "rb") as file:
        num_bytes = os.fstat(file.fileno()).st_size
        if num_bytes > max_bytes:
            raise CorruptFileError(
                f"{str(path)!r} has {num_bytes} bytes, expected at most {max_bytes}."
            )
        data = file.read(max_bytes)
    try:
        return data.decode()
    except UnicodeDecodeError as cause:
        raise CorruptFileError(f"{str(path)!r} is not a UTF-8 text: {cause}.") from cause


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON object with its checksum.

    The file is created only if `content` can be written as JSON and is not too large.
    """
    text = json.dumps({**content, CHECKSUM: json_checksum(content)}, indent=1) + "\n"
    if len(text) > MAX_JSON_BYTES:
        raise SchemaError(
            f"{path.name!r} would have {len(text)} bytes, expected at most {MAX_JSON_BYTES}."
        )
    path.write_text(text, encoding="utf-8")


def read_json(path: Path, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Read a JSON object and compare its checksum, if the file has a checksum.

    Raises:
        FileNotFoundError: The file does not exist.
        CorruptFileError: `path` is not a regular file, is larger than `max_bytes`, is not a JSON
            object, or has a wrong checksum.
    """
    try:
        content = json.loads(read_text(path, max_bytes=max_bytes))
    except (ValueError, RecursionError) as cause:
        raise CorruptFileError(f"{str(path)!r} is not valid JSON: {cause}.") from cause
    if not isinstance(content, dict):
        raise CorruptFileError(
            f"{str(path)!r} must contain a JSON object, got {type(content).__name__}."
        )
    stored_checksum = content.pop(CHECKSUM, None)
    checksum = json_checksum(content)
    if stored_checksum is not None and stored_checksum != checksum:
        raise CorruptFileError(
            f"{str(path)!r} is damaged or was edited: expected checksum {stored_checksum}, got "
            f"{checksum}. To load an edited file, remove the key {CHECKSUM!r} from it."
        )
    return content


def json_checksum(content: Mapping[str, Any]) -> str:
    """Return the checksum of a parsed JSON object, independent of white space in the file."""
    return f"{crc32(json.dumps(content).encode()):08x}"
