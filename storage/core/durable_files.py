"""What must outlive a crash, and what is read of files that others wrote: flush, replace in one step, check.

One rule: nothing is written in its place. What is new is written beside it, flushed, and renamed, so that a
crash leaves the old content or the new one. What an interrupted process left beside is removed by the next one.
Nothing is read of a file before its kind and size are known. A JSON object carries the CRC-32 of itself without its
key `crc32`; older files have none.
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

from ..errors import CorruptFileError, DataFileError, RolloutDataError, SchemaError, WriteError
from . import arguments

try:
    # zlib's own takes 3.6 GB/s; this one, of the extra `fast`, 24 GB/s, so that checking costs next to nothing.
    from zlib_ng.zlib_ng import crc32 as _crc32
except ImportError:
    from zlib import crc32 as _crc32

#: `crc32(data, start=0)`: the CRC-32 of zlib of a buffer, continued from that of the bytes before it.
crc32: Callable[..., int] = _crc32
#: A million episodes with a file name each take less.
MAX_JSON_BYTES = 64 << 20
CHECKSUM = "crc32"


def sync_path(path: Path) -> None:
    """Flush a file, or the entries of a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def replace_file(path: str | os.PathLike[str], durable: bool = True) -> Iterator[Path]:
    """Return a path to write a file to; it takes the place of `path` when the block ends without an error.

    The folder of `path` is made where it is missing; a link is followed. After an error nothing has changed. If not
    `durable`, the caller flushes it later; until then a power failure may cost it.

    Raises:
        DataFileError: There is a folder, or anything else that is no regular file (a device, a pipe).
        WriteError: The system does not let us write, as on a full disk.
    """
    target = arguments.path("save a file", "", path).resolve()
    if target.exists() and not target.is_file():
        got = "a folder" if target.is_dir() else "a device, a pipe or a socket"
        raise DataFileError("save to", repr(str(path)), "a file or nothing", got)
    with _made_beside(target) as made:
        new = made / target.name
        yield new
        if durable:
            sync_path(new)
        os.replace(new, target)
        if durable:
            sync_path(target.parent)


@contextmanager
def replace_folder(folder: str | os.PathLike[str], own_names: Collection[str]) -> Iterator[Path]:
    """Return an empty folder to write to; it takes the place of `folder` when the block ends without an error.

    A crash leaves the old content or the new one; between the two renames at the end the old content
    stands beside its place, where `existing_folder` finds it. Several may replace the same folder: the last
    one's content stays. Within the block no folder may be replaced this way.

    Args:
        folder: The folder; a link is followed.
        own_names: What an earlier save may have left in it. Replacing is removing: a folder with anything
            else stays what it is.

    Raises:
        DataFileError: There is a file, or a folder with anything else in it.
        WriteError: The system does not let us write, as on a full disk.
    """
    target = arguments.path("save to the folder", "", folder).resolve()
    _check_replaceable(target, folder, own_names)
    with _made_beside(target) as made:
        yield made
        for path in (*made.rglob("*"), made):
            sync_path(path)
        previous = _previous(target)
        with _only_one_in(target.parent):
            if target.exists():
                shutil.rmtree(previous, ignore_errors=True)
                os.replace(target, previous)  # a crash right here is mended by the reader
            os.replace(made, target)
            sync_path(target.parent)
            shutil.rmtree(previous, ignore_errors=True)


def existing_folder(folder: str | os.PathLike[str]) -> Path:
    """Return where the content of a folder is that `replace_folder` wrote, also if it was interrupted."""
    target = arguments.path("load the folder", "", folder).resolve()
    previous = _previous(target)
    return previous if not target.exists() and previous.exists() else target


def _check_replaceable(target: Path, named: str | os.PathLike[str], own_names: Collection[str]) -> None:
    try:  # asked once: another saver may rename it at any time
        others = sorted(set(os.listdir(target)) - set(own_names))
        got = f"a folder with {others[0]!r} in it" if others else ""
    except FileNotFoundError:
        return
    except NotADirectoryError:
        got = "a file"
    if got:
        raise DataFileError("save to", repr(str(named)), "a new folder or an earlier save", got, "Choose another place")


@contextmanager
def _made_beside(target: Path) -> Iterator[Path]:
    """Make a folder beside `target`, locked while it is in use, and remove it afterwards.

    Raises:
        WriteError: The system does not let us write there: a full disk, a read-only folder.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritten(target, error) from error
    _remove_abandoned(target)
    while True:
        made = target.with_name(f".{target.name}.new-{secrets.token_hex(4)}")
        try:
            made.mkdir()
        except OSError as error:
            raise _unwritten(target, error) from error
        try:
            handle = os.open(made, os.O_RDONLY)
        except FileNotFoundError:  # taken for abandoned
            continue
        fcntl.flock(handle, fcntl.LOCK_EX)
        if made.exists():  # not taken for abandoned meanwhile
            break
        os.close(handle)
    try:
        yield made
    except OSError as error:
        is_of_system = error.errno is not None and not isinstance(error, RolloutDataError)
        if not is_of_system or not (error.filename is None or str(error.filename).startswith(str(made))):
            raise
        raise _unwritten(target, error) from error
    finally:
        shutil.rmtree(made, ignore_errors=True)
        os.close(handle)


def _unwritten(target: Path, error: OSError) -> WriteError:
    """Build the error for a file or folder that the system does not let us write; it names `target`."""
    got = error.strerror or str(error)
    return WriteError("write", repr(str(target)), "", got, error_number=error.errno, filename=str(target))


@contextmanager
def _only_one_in(folder: Path) -> Iterator[None]:
    """Let one thread of all processes at a time into the block, where the file system has locks for that."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _remove_abandoned(target: Path) -> None:
    """Remove what killed processes left beside `target`: its lock is free."""
    for name in glob.glob(f".{glob.escape(target.name)}.new-*", root_dir=target.parent):
        path = target.parent / name
        try:
            handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:  # it is gone already, or is not ours
            continue
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        except OSError:  # somebody is writing it
            pass
        finally:
            os.close(handle)


def _previous(target: Path) -> Path:
    return target.with_name(f".{target.name}.previous")


def open_regular(path: str | os.PathLike[str]) -> int:
    """Open a file for reading; give its descriptor. A pipe would be waited for, and a device has no end."""
    if stat.S_ISREG(os.stat(path).st_mode):
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        if stat.S_ISREG(os.fstat(handle).st_mode):
            return handle
        os.close(handle)
    raise CorruptFileError("open", repr(str(path)), "a file", "a folder, a pipe or a device")


def read_text(path: str | os.PathLike[str], action: str = "read", max_bytes: int = MAX_JSON_BYTES) -> str:
    """Read a text file in UTF-8 of at most `max_bytes`."""
    with open(open_regular(path), "rb") as file:
        if (num_bytes := os.fstat(file.fileno()).st_size) > max_bytes:
            raise CorruptFileError(action, repr(str(path)), f"at most {max_bytes} bytes", str(num_bytes))
        data = file.read(max_bytes)
    try:
        return data.decode()
    except UnicodeDecodeError as cause:
        raise CorruptFileError(action, repr(str(path)), "UTF-8", str(cause)) from cause


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON object with its checksum; checked for being JSON before the file is made."""
    text = json.dumps({**content, CHECKSUM: json_checksum(content)}, indent=1) + "\n"
    if len(text) > MAX_JSON_BYTES:
        raise SchemaError("write", repr(path.name), f"at most {MAX_JSON_BYTES} bytes", str(len(text)))
    path.write_text(text, encoding="utf-8")


def read_json(path: Path, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Read a JSON object of at most `max_bytes` and compare its checksum, if it has one.

    Raises:
        FileNotFoundError: It is not there.
        CorruptFileError: It is no regular file, too large, no JSON object, or was changed.
    """
    try:
        found = json.loads(read_text(path, max_bytes=max_bytes))
    except (ValueError, RecursionError) as cause:
        raise CorruptFileError("read", repr(str(path)), "JSON", str(cause)) from cause
    if not isinstance(found, dict):
        raise CorruptFileError("read", repr(str(path)), "a JSON object", type(found).__name__)
    stated = found.pop(CHECKSUM, None)
    if stated is not None and stated != (checksum := json_checksum(found)):
        advice = f"It was damaged or changed; remove {CHECKSUM!r} from it to load it as it is"
        raise CorruptFileError("read", repr(str(path)), f"checksum {stated}", checksum, advice)
    return found


def json_checksum(content: Mapping[str, Any]) -> str:
    """Return the checksum of a parsed JSON object, which is not of its layout."""
    return f"{crc32(json.dumps(content).encode()):08x}"
