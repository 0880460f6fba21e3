"""LeRobot sets and HDF5 files behind a network: copied once to a bounded folder of this machine and read there.

Their readers need whole files, so the numbers and the checks of hostile files are those of local data. What a URL
holds is told by the names of its files; a format that is not copied is refused by its name.
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

#: Name of a file below the URL -> its size in bytes, and a number that changes with its content.
Listing = Mapping[str, tuple[int, int]]
#: Formats that are copied: LeRobot's, and those of HDF5 files.
COPIED = (
    "lerobot", "minari", "libero", "isaaclab", "robomimic", "aloha", "maniskill", "humenv", "d4rl", "bfm_zero",
)  # fmt: skip
_HDF5 = (".h5", ".hdf5")
_INFO_NAME = "meta/info.json"
#: Formats that are refused, and whether the names of the files below a URL are theirs; the first one counts.
_REFUSED: tuple[tuple[str, Callable[[PurePosixPath], bool]], ...] = (
    ("zarr", lambda name: name.name in (".zarray", ".zgroup", "zarr.json") or ".zarr" in name.suffixes),
    ("rlds", lambda name: ".tfrecord" in name.name or name.name == "features.json"),
    ("mcap", lambda name: name.suffix == ".mcap"),
    ("minari of Arrow or Parquet files", lambda name: name.name.startswith("part-")),
    ("ogbench or motion (.npz)", lambda name: name.suffix == ".npz"),
    ("trajectory folders", lambda name: any(part.startswith("trajectory_") for part in name.parts[:-1])),
    ("rlinf", lambda name: name.suffix in (".pt", ".pkl")),
    ("motion (.json)", lambda name: name.suffix == ".json"),
)
_DONE_NAME = ".complete"
_LOCK_ENDING = ".lock"
_POLL_S = 0.1
#: Locks of the copies that this process uses, which keep others from deleting them.
_in_use: dict[Path, int] = {}
#: Folder of a copy -> the URL that its files have as text.
_urls: dict[str, str] = {}


class CopiedPath(PosixPath):
    """A file or folder of a copy. `open` reads the copy; the text, as in errors, is the URL."""

    def __str__(self) -> str:
        file = os.fspath(self)
        for folder, url in _urls.items():
            if file == folder or file.startswith(f"{folder}/"):
                return url + file.removeprefix(folder)
        return file

    def __fspath__(self) -> str:
        return os.path.join("", *self.parts)

    # Some versions of Python compare and list paths by their text.
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
        urls = {folder: url for folder, url in _urls.items() if file == folder or file.startswith(f"{folder}/")}
        return _unpickled, (file, urls)


def _unpickled(file: str, urls: Mapping[str, str]) -> CopiedPath:
    _urls.update(urls)
    return CopiedPath(file)


def local_origin(origin: Origin, options: RemoteOptions) -> Origin:
    """Return an origin on this machine for a LeRobot set or HDF5 files at a URL; others as they are.

    Raises:
        ForeignFileError: The URL holds another format than those and block files.
        UsageError: The copy does not fit into `options.cache_bytes`.
        DataFileError: It cannot be copied.
    """
    if origin.opened is not None:
        return replace(origin, path=origin.opened.path)
    if not is_url(origin.path) or origin.format == "rollout-data":
        return origin
    where = repr(str(origin.path))
    if origin.format not in (None, *COPIED):
        raise _refused(where, str(origin.format))
    files = RemoteFiles(origin.path, options)
    listing, is_file = _listing(files)
    is_empty = set(listing) <= {"metadata.json"}
    if not is_file and origin.format is None and (is_empty or _holds_blocks(listing)):
        return origin
    if (refused := _refused_format(listing)) is not None and origin.format is None:
        raise _refused(where, refused)
    folder = _copied(files, listing, is_file)
    _urls[os.fspath(folder)] = str(origin.path.parent if is_file else origin.path)
    return replace(origin, path=CopiedPath(folder / origin.path.name if is_file else folder))


def _holds_blocks(listing: Listing) -> bool:
    """Return whether a folder holds block files."""
    names = [name for name in listing if "/" not in name]
    return any(name.startswith("rollout_") and name.endswith(_HDF5) for name in names)


def _refused_format(listing: Listing) -> str | None:
    """Name the format of a URL that is not copied; None if it is."""
    if _INFO_NAME in listing:
        return None
    visible = [PurePosixPath(name) for name in listing]
    for form, is_of in _REFUSED[:4]:
        if any(map(is_of, visible)):
            return form
    if any(name.suffix in _HDF5 for name in visible):
        return None
    found = [form for form, is_of in _REFUSED[4:] if any(map(is_of, visible))]
    return found[0] if found else f"unknown, with files such as {', '.join(sorted(listing)[:3])}"


def _refused(where: str, form: str) -> ForeignFileError:
    expected = "block files, a LeRobot set or HDF5 files at a URL"
    advice = "Copy the data to this machine first"
    return ForeignFileError("open", where, expected, f"the format {form}", advice)


def _listing(files: RemoteFiles) -> tuple[Listing, bool]:
    """List all files below a URL, and say whether it is itself a file; a folder of blocks is not searched."""
    url, where = str(files.path), f"of {str(files.path)!r}"
    if files.path.suffix in _HDF5:
        about = _info(files, url)
        if about is not None and about.get("type") == "file":
            beside = str(files.path.with_suffix(".json"))
            entries = {files.path.name: about, PurePosixPath(beside).name: _info(files, beside)}
            there = {name: entry for name, entry in entries.items() if entry is not None}
            return dict(zip(there, files.sizes_and_stamps(list(there.values())), strict=True)), True
    try:
        near = files.listed()
    except UsageError:  # nothing is there, or nothing yet: opening it tells
        return {}, False
    if _holds_blocks(near):
        return near, False

    def find() -> Any:
        return files.system.find(url, detail=True)

    found = files.fetcher.wait(files.fetcher.submit(find, "list the files", where))
    root = url.partition("://")[2].strip("/")
    names = []
    for path in found:
        name = path.partition("://")[2] or path
        name = name.strip("/").removeprefix(root).strip("/")
        if ".." in name.split("/") or "\0" in name:
            raise UnsafeFileError("open", repr(url), "files below it", f"the name {name!r}")
        names.append(name)
    return dict(zip(names, files.sizes_and_stamps(list(found.values())), strict=True)), False


def _info(files: RemoteFiles, url: str) -> Mapping[str, Any] | None:
    """Return what the store says of a file; None if it is not there."""

    def info() -> Any:
        files.system.invalidate_cache()
        return files.system.info(url)

    try:
        found: Mapping[str, Any] = files.fetcher.wait(files.fetcher.submit(info, "look up the file", repr(url)))
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found


def _copied(files: RemoteFiles, listing: Listing, is_file: bool) -> Path:
    """Copy the listed files into a folder of their own, unless they are there; return it."""
    listing = {name: about for name, about in listing.items() if not _is_hidden(name)}
    total = sum(size for size, _ in listing.values())
    limit = files.options.cache_bytes
    if total > limit:
        advice = "Give RemoteOptions(cache_bytes=...), or copy the data to this machine"
        raise UsageError("open", repr(str(files.path)), f"at most cache_bytes = {limit} bytes", str(total), advice)
    # Without stamps a change does not show, so no earlier copy is used.
    only_now = [uuid.uuid4().hex] if any(stamp == NO_STAMP for _, stamp in listing.values()) else []
    text = json.dumps([str(files.path), sorted(listing.items()), *only_now])
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "rollout_data" / "remote"
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
        expected = f"room for {total} bytes in {str(cache)!r}"
        advice = "XDG_CACHE_HOME may name another folder"
        raise DataFileError("copy", repr(str(files.path)), expected, str(cause), advice) from cause
    return folder


def _check_unchanged(files: RemoteFiles, listing: Listing, folder: Path) -> None:
    """Raise `DataFileError`, and delete the copy, if a file was changed while it was copied: parts may be mixed."""
    now, _ = _listing(files)
    changed = [name for name, about in listing.items() if now.get(name) != about]
    if changed:
        shutil.rmtree(folder)
        raise _changed(files, f"another {sorted(changed)[0]!r}")


def _changed(files: RemoteFiles, got: str) -> DataFileError:
    """Build the error for a file that was replaced or removed while it was copied."""
    return DataFileError("open", repr(str(files.path)), "files that stay while they are copied", got, "Open it again")


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") for part in name.split("/"))


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a copy alone while it is made; then share it until this process ends, so that nobody deletes it."""
    if folder not in _in_use:
        _in_use[folder] = os.open(folder.with_suffix(_LOCK_ENDING), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    lock = _in_use[folder]
    while True:
        is_done = (folder / _DONE_NAME).exists()
        try:
            fcntl.flock(lock, (fcntl.LOCK_SH if is_done else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:  # another process makes it
            time.sleep(_POLL_S)
            continue
        if is_done == (folder / _DONE_NAME).exists():  # it may have been made, or deleted, just before
            break
    try:
        yield
    finally:
        fcntl.flock(lock, fcntl.LOCK_SH)


def _make_room(cache: Path, folder: Path, num_bytes: int) -> None:
    """Delete the copies that were used longest ago, of no living process, until they take at most so many bytes."""
    others = [one for one in cache.iterdir() if one.is_dir() and one != folder]
    others.sort(key=lambda one: one.stat().st_mtime_ns, reverse=True)
    for other in others:
        num_bytes -= sum(path.stat().st_size for path in other.rglob("*") if path.is_file())
        if num_bytes >= 0:
            continue
        lock = os.open(other.with_suffix(_LOCK_ENDING), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            with suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                (other / _DONE_NAME).unlink(missing_ok=True)
                shutil.rmtree(other)
        finally:
            os.close(lock)


def _copy(files: RemoteFiles, name: str, size: int, folder: Path, is_file: bool) -> None:
    """Copy one file, by several requests at once; it appears whole or not at all."""
    target = folder / name
    if target.exists():  # it was copied before this process, or the one before it, was killed
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    source = (files.path.parent if is_file else files.path) / name
    step = files.options.chunk_bytes * files.options.num_requests
    with replace_file(target, durable=False) as new, open(new, "wb") as file:
        for start in range(0, size, step):
            try:
                data = files.read(source, start, min(start + step, size)).data
            except OSError as cause:  # of the store, not of the folder of the copy
                raise _changed(files, str(cause)) from cause
            file.write(data)
