"""Local copies of LeRobot sets and HDF5 files from URLs, in a cache folder of limited size.

Readers of LeRobot sets and HDF5 files need complete files on this machine. The format of the data
at a URL is detected from the names of the files. An error is raised for formats that can neither be
copied nor read at a URL.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path, PosixPath, PurePath, PurePosixPath
from typing import Any

from storage.core.arguments import is_url
from storage.core.durable_files import replace_file
from storage.errors import DataFileError, ForeignFileError, UnsafeFileError, UsageError

from .locations import NO_STAMP, Origin, RemoteFiles, RemoteOptions

#: Maps names of files below a URL to (size in bytes, stamp). The stamp is a number that changes
#: with the content of the file.
Listing = Mapping[str, tuple[int, int]]
#: Names of the formats that are copied.
COPIED = (
    "lerobot", "minari", "libero", "isaaclab", "robomimic", "aloha", "maniskill", "humenv", "d4rl", "bfm_zero",
)  # fmt: skip
_HDF5 = (".h5", ".hdf5")
_INFO_NAME = "meta/info.json"
#: Formats that are not copied, each with a function that recognizes the format by a file name. The
#: first match counts.
_NOT_COPIED: tuple[tuple[str, Callable[[PurePosixPath], bool]], ...] = (
    (
        "zarr",
        lambda name: name.name in (".zarray", ".zgroup", "zarr.json") or ".zarr" in name.suffixes,
    ),
    ("rlds", lambda name: ".tfrecord" in name.name or name.name == "features.json"),
    ("mcap", lambda name: name.suffix == ".mcap"),
    ("minari of Arrow or Parquet files", lambda name: name.name.startswith("part-")),
    ("ogbench or motion (.npz)", lambda name: name.suffix == ".npz"),
    (
        "trajectory folders",
        lambda name: any(part.startswith("trajectory_") for part in name.parts[:-1]),
    ),
    ("rlinf", lambda name: name.suffix in (".pt", ".pkl")),
    ("motion (.json)", lambda name: name.suffix == ".json"),
)
#: Formats whose files may also lie beside HDF5 files, which are then copied.
_BESIDE_HDF5 = ("ogbench or motion (.npz)", "trajectory folders", "rlinf", "motion (.json)")
_DONE_NAME = ".complete"
_LOCK_ENDING = ".lock"
_POLL_S = 0.1
#: Maps folders of copies to descriptors of their lock files. While this process holds the lock, no
#: process deletes the copy.
_in_use: dict[Path, int] = {}
#: Maps folders of copies to the URLs that `str` of a `CopiedPath` shows instead.
_urls: dict[str, str] = {}


class CopiedPath(PosixPath):
    """Path in a local copy. `open` reads the copy; `str` returns the original URL, for errors."""

    def __str__(self) -> str:
        file = os.fspath(self)
        for folder, url in _urls.items():
            if file == folder or file.startswith(f"{folder}/"):
                return url + file.removeprefix(folder)
        return file

    def __fspath__(self) -> str:
        return os.path.join("", *self.parts)

    # Some versions of Python implement the following methods with `str`, which is the URL here.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, PurePath) and os.fspath(self) == os.fspath(other)

    def __hash__(self) -> int:
        return hash(Path(os.fspath(self)))

    def iterdir(self) -> Generator[CopiedPath, None, None]:
        for name in os.listdir(self):
            yield self / name

    def glob(self, pattern: str) -> Generator[CopiedPath, None, None]:
        for path in Path(os.fspath(self)).glob(pattern):
            yield type(self)(path)

    def rglob(self, pattern: str) -> Generator[CopiedPath, None, None]:
        for path in Path(os.fspath(self)).rglob(pattern):
            yield type(self)(path)

    def __reduce__(self) -> tuple[Any, ...]:
        file = os.fspath(self)
        urls = {
            folder: url
            for folder, url in _urls.items()
            if file == folder or file.startswith(f"{folder}/")
        }
        return _unpickled, (file, urls)


def _unpickled(file: str, urls: Mapping[str, str]) -> CopiedPath:
    _urls.update(urls)
    return CopiedPath(file)


def local_origin(origin: Origin, options: RemoteOptions) -> Origin:
    """Copy a LeRobot set or HDF5 files from a URL; return an `Origin` that locates the copy.

    Origins of block folders and of local data are returned unchanged.

    Raises:
        ForeignFileError: The format of the URL is not copied.
        UsageError: The copy would be larger than `options.cache_bytes`.
        DataFileError: The files cannot be copied.
    """
    if origin.opened is not None:
        return replace(origin, path=origin.opened.path)
    if not is_url(origin.path) or origin.format == "rollout-data":
        return origin
    where = repr(str(origin.path))
    if origin.format not in (None, *COPIED):
        raise _not_copied_error(where, str(origin.format))
    files = RemoteFiles(origin.path, options)
    listing, is_file = _listing(files)
    is_empty = set(listing) <= {"metadata.json"}
    if not is_file and origin.format is None and (is_empty or _holds_blocks(listing)):
        return origin
    if origin.format is None:
        format_name = _format_not_copied(listing)
        if format_name is not None:
            raise _not_copied_error(where, format_name)
    folder = _copied(files, listing, is_file)
    _urls[os.fspath(folder)] = str(origin.path.parent if is_file else origin.path)
    return replace(origin, path=CopiedPath(folder / origin.path.name if is_file else folder))


def _holds_blocks(listing: Listing) -> bool:
    """Return whether a listed folder contains block files."""
    names = [name for name in listing if "/" not in name]
    return any(name.startswith("rollout_") and name.endswith(_HDF5) for name in names)


def _format_not_copied(listing: Listing) -> str | None:
    """Detect the format of listed files. Return its name if it cannot be copied, otherwise None."""
    if _INFO_NAME in listing:
        return None
    names = [PurePosixPath(name) for name in listing]
    has_hdf5 = any(name.suffix in _HDF5 for name in names)
    for format_name, matches in _NOT_COPIED:
        if has_hdf5 and format_name in _BESIDE_HDF5:
            continue
        if any(map(matches, names)):
            return format_name
    if has_hdf5:
        return None
    return f"unknown, with files such as {', '.join(sorted(listing)[:3])}"


def _not_copied_error(where: str, format_name: str) -> ForeignFileError:
    return ForeignFileError(
        f"{where} has the format {format_name}. At a URL, only block files, LeRobot sets and HDF5 "
        "files are read. Copy the data to this machine."
    )


def _listing(files: RemoteFiles) -> tuple[Listing, bool]:
    """List all files below a URL.

    If the folder contains blocks, its subfolders are not listed.

    Returns:
        The files, and whether the URL itself is a file. An HDF5 file is listed together with the
        file of the same name with ".json", which contains its metadata.
    """
    url = str(files.path)
    if files.path.suffix in _HDF5:
        about = _info(files, url)
        if about is not None and about.get("type") == "file":
            entries = {files.path.name: about}
            metadata = files.path.with_suffix(".json")
            metadata_entry = _info(files, str(metadata))
            if metadata_entry is not None:
                entries[metadata.name] = metadata_entry
            return dict(
                zip(entries, files.sizes_and_stamps(list(entries.values())), strict=True)
            ), True
    try:
        direct = files.listed()
    except UsageError:  # The URL does not exist yet; opening it raises this error.
        return {}, False
    if _holds_blocks(direct):
        return direct, False

    def find() -> Any:
        return files.system.find(url, detail=True)

    entries = files.fetcher.wait(files.fetcher.submit(find, repr(url)))
    root = url.partition("://")[2].strip("/")
    names = []
    for path in entries:
        name = path.partition("://")[2] or path
        name = name.strip("/").removeprefix(root).strip("/")
        if ".." in name.split("/") or "\0" in name:
            raise UnsafeFileError(
                f"{url!r} lists the file name {name!r}, which is outside of the URL."
            )
        names.append(name)
    return dict(zip(names, files.sizes_and_stamps(list(entries.values())), strict=True)), False


def _info(files: RemoteFiles, url: str) -> Mapping[str, Any] | None:
    """Return fsspec's description of a file in the store; None if there is no such file."""

    def info() -> Any:
        files.system.invalidate_cache()
        return files.system.info(url)

    try:
        entry: Mapping[str, Any] = files.fetcher.wait(files.fetcher.submit(info, repr(url)))
    except (FileNotFoundError, NotADirectoryError):
        return None
    return entry


def _copied(files: RemoteFiles, listing: Listing, is_file: bool) -> Path:
    """Copy files into the cache, unless a copy exists; return the folder of the copy.

    Args:
        files: Files of the URL.
        listing: The files to copy.
        is_file: Whether the URL itself is a file.
    """
    listing = {name: about for name, about in listing.items() if not _is_hidden(name)}
    total = sum(size for size, _ in listing.values())
    limit = files.options.cache_bytes
    if total > limit:
        raise UsageError(
            f"{str(files.path)!r} has {total} bytes, and cache_bytes is {limit}. Pass "
            "RemoteOptions(cache_bytes=...), or copy the data to this machine."
        )
    identity: list[Any] = [str(files.path), sorted(listing.items())]
    if any(stamp == NO_STAMP for _, stamp in listing.values()):
        # Without stamps, a changed file cannot be detected, so an earlier copy is not used.
        identity.append(uuid.uuid4().hex)
    text = json.dumps(identity)
    cache = (
        Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
        / "rollout_data"
        / "remote"
    )
    folder = cache / hashlib.sha256(text.encode()).hexdigest()[:32]
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(folder):
            if not (folder / _DONE_NAME).exists():
                _make_room(cache, folder, limit - total)
                for name, (size, _) in sorted(listing.items()):
                    _copy(files, name, size, folder, is_file)
                _check_unchanged(files, listing, folder)
                (folder / _DONE_NAME).touch()
        os.utime(folder)
    except OSError as cause:
        raise DataFileError(
            f"The {total} bytes of {str(files.path)!r} cannot be copied to {str(cache)!r}: "
            f"{cause}. Set XDG_CACHE_HOME to use another folder."
        ) from cause
    return folder


def _check_unchanged(files: RemoteFiles, listing: Listing, folder: Path) -> None:
    """Check that no file has changed since the listing.

    Raises:
        DataFileError: A file has changed. The copy was deleted.
    """
    now, _ = _listing(files)
    changed = [name for name, about in listing.items() if now.get(name) != about]
    if changed:
        shutil.rmtree(folder)
        raise _changed(files, f"{sorted(changed)[0]!r} was replaced")


def _changed(files: RemoteFiles, reason: str) -> DataFileError:
    """Build the error for files that were replaced or removed while they were copied."""
    return DataFileError(
        f"The files of {str(files.path)!r} changed while they were copied: {reason}. Open them "
        "again."
    )


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") for part in name.split("/"))


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock the folder of a copy, exclusively if the copy is incomplete.

    The exclusive lock lasts during the `with` block. After the block, this process keeps a shared
    lock until it ends, so that no process deletes the copy.
    """
    if folder not in _in_use:
        _in_use[folder] = os.open(
            folder.with_suffix(_LOCK_ENDING), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
        )
    lock = _in_use[folder]
    while True:
        is_done = (folder / _DONE_NAME).exists()
        try:
            fcntl.flock(lock, (fcntl.LOCK_SH if is_done else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:  # Another process is copying the files; wait for it.
            time.sleep(_POLL_S)
            continue
        # Before this process got the lock, another may have completed or deleted the copy.
        if is_done == (folder / _DONE_NAME).exists():
            break
    try:
        yield
    finally:
        fcntl.flock(lock, fcntl.LOCK_SH)


def _make_room(cache: Path, folder: Path, num_bytes: int) -> None:
    """Delete the least recently used copies, so that the others have at most `num_bytes` bytes.

    Copies that a running process uses are not deleted.

    Args:
        cache: Folder with all copies.
        folder: Folder of the new copy, which is neither counted nor deleted.
        num_bytes: Maximum bytes of the other copies.
    """
    copies = [path for path in cache.iterdir() if path.is_dir() and path != folder]
    copies.sort(key=lambda path: path.stat().st_mtime_ns, reverse=True)
    num_bytes_left = num_bytes
    for copy in copies:
        num_bytes_left -= sum(path.stat().st_size for path in copy.rglob("*") if path.is_file())
        if num_bytes_left >= 0:
            continue
        lock = os.open(copy.with_suffix(_LOCK_ENDING), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            with suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                (copy / _DONE_NAME).unlink(missing_ok=True)
                shutil.rmtree(copy)
        finally:
            os.close(lock)


def _copy(files: RemoteFiles, name: str, size: int, folder: Path, is_file: bool) -> None:
    """Copy one file with several requests at once, unless the copy has the file already."""
    target = folder / name
    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    source = (files.path.parent if is_file else files.path) / name
    step = files.options.chunk_bytes * files.options.num_requests
    temporary = target.with_name(f".{target.name}.part")
    with replace_file(target, temporary=temporary, durable=False) as new, open(new, "wb") as file:
        for start in range(0, size, step):
            try:
                data = files.read(source, start, min(start + step, size)).data
            except OSError as cause:
                # The store no longer has a file that it has listed.
                raise _changed(files, str(cause)) from cause
            file.write(data)
