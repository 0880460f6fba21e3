"""Locations of data (paths and URLs), and requests to the fsspec file systems of URLs.

The library represents a URL as `RemotePath`. Only modules in `remote/` access it. `fetcher.py`
sends the requests.
"""

from __future__ import annotations

import importlib.util
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PosixPath
from typing import Any, Protocol
from zlib import crc32

import numpy as np

from storage.core.arguments import is_url, real, whole
from storage.core.arguments import path as path_of
from storage.core.threads import Owner
from storage.errors import CorruptFileError, DataFileError, MissingFolderError, UsageError

from .fetcher import Fetcher, FetchError, Request
from .piece_checksums import PieceSums


@dataclass(frozen=True)
class Origin:
    """Location of data, their format, and the selected trajectories.

    Attributes:
        path: A file, a folder or a `RemotePath`.
        format: Name of the format; None detects it from the content.
        options: Options of the format.
        ids: Names of the trajectories to read; None for all.
        remote: Options for a URL; None uses the options of the reader.
        opened: Source of an open recording, whose snapshot is read; None reads the present files.
    """

    path: Path
    format: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    ids: tuple[str, ...] | None = None
    remote: RemoteOptions | None = None
    opened: Any = field(default=None, compare=False, repr=False)


class HasOrigin(Protocol):
    """Interface of objects with an `Origin`, such as a `Recording`."""

    @property
    def origin(self) -> Origin:
        """Location of the data, their format, and the selected trajectories."""


DataDir = str | os.PathLike[str] | HasOrigin | Origin
DataDirs = DataDir | Sequence[DataDir]
#: Keys in fsspec's description of a file whose values change with the content: checksum, version or
#: time. They are used by S3, Google, Azure and WebDAV, web servers, Hugging Face, git and GitHub,
#: Drive and Box, HDFS, SMB, FTP and archives.
_STAMPS = (
    "ETag", "etag", "md5Hash", "LastModified", "last_modified", "mtime", "created", "generation", "modified",
    "Last-Modified", "Content-MD5", "Digest", "blob_id", "hex", "sha", "md5Checksum", "modifiedTime", "modified_at",
    "modificationTime", "last_write_time", "modify", "CRC", "chksum",
)  # fmt: skip

#: Seconds for which a successful listing counts as proof of access.
_RECENT_S = 1.0


@dataclass(frozen=True)
class RemoteOptions:
    """Options for reading data at URLs. They have no effect on local data.

    Windows are shuffled within `num_chunks` chunks while the next `num_chunks` chunks are fetched.
    Together they take 2 * `num_chunks` * `chunk_bytes` bytes of memory, 64 MiB by default. Playback
    uses the same amount of memory.

    Attributes:
        chunk_bytes: Maximum bytes per request.
        num_chunks: Number of chunks within which windows are shuffled, and of chunks that are
            fetched in advance.
        num_requests: Number of requests that run at once. `num_requests * chunk_bytes` should
            exceed bandwidth times latency.
        timeout_s: Time-out of an attempt in seconds.
        num_retries: Number of retries of a request that failed or exceeded its time-out.
        cache_bytes: Maximum bytes of copies of LeRobot sets and HDF5 files in the user's cache
            folder. Block files are never copied.
        storage_options: Options of the fsspec file system: keys, `endpoint_url`, ...

    Raises:
        UsageError: A value is out of range.
    """

    chunk_bytes: int = 1 << 20
    num_chunks: int = 32
    num_requests: int = 32
    timeout_s: float = 30.0
    num_retries: int = 3
    cache_bytes: int = 32 << 30
    storage_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, low in (
            ("chunk_bytes", 1 << 12),
            ("num_chunks", 1),
            ("num_requests", 1),
            ("num_retries", 0),
            ("cache_bytes", 0),
        ):
            whole(name, getattr(self, name), low)
        real("timeout_s", self.timeout_s, "> 0 seconds", lambda seconds: seconds > 0)
        if not isinstance(self.storage_options, Mapping):
            raise UsageError(f"storage_options must be a mapping, got {self.storage_options!r}.")

    @property
    def kept_bytes(self) -> int:
        """Bytes of memory for fetched chunks and for pending requests."""
        return 2 * self.num_chunks * self.chunk_bytes


def checked_remote(remote: Any) -> RemoteOptions:
    """Check a user's `remote` argument; None becomes the default options."""
    if remote is None:
        return RemoteOptions()
    if not isinstance(remote, RemoteOptions):
        raise UsageError(f"remote must be RemoteOptions or None, got {remote!r}.")
    return remote


class RemotePath(PosixPath):
    """A URL as a path. `str` returns the URL. The path cannot be opened as a local file."""

    def __str__(self) -> str:
        return super().__str__().replace(":/", "://", 1)


def origins_of(data_dir: DataDirs, name: str = "data_dir") -> list[Origin]:
    """Convert a user's `data_dir` argument to origins with absolute paths.

    Args:
        data_dir: One location, or a list of locations.
        name: Name of the argument, for errors.

    Raises:
        UsageError: `data_dir` is no path or list of paths, or the list is empty.
    """
    try:
        locations: Any = [data_dir] if is_one(data_dir) else data_dir
        origins = [_origin(location, name) for location in locations]
    except TypeError as cause:
        raise UsageError(f"{name} must be a path or a list of paths, got {data_dir!r}.") from cause
    if not origins:
        raise UsageError(f"{name} is an empty list. Pass at least one data folder.")
    return origins


def present_origins_of(data_dir: DataDirs) -> list[Origin]:
    """Convert a `data_dir` argument to origins; check that files of open recordings still exist.

    Raises:
        DataFileError: An open recording has an episode whose file was removed or replaced.
    """
    origins = origins_of(data_dir)
    locations: Any = [data_dir] if is_one(data_dir) else data_dir
    for location in locations:
        if not isinstance(location, Origin) and hasattr(location, "origin"):
            location.check_present()
    return origins


def is_one(data_dir: Any) -> bool:
    """Return whether `data_dir` is one location (path, URL, origin or recording), and no list."""
    return isinstance(data_dir, (str, os.PathLike, Origin)) or hasattr(data_dir, "origin")


def _origin(location: Any, name: str) -> Origin:
    if not isinstance(location, Origin) and hasattr(location, "origin"):
        location = location.origin
    if isinstance(location, Origin):
        return location
    path = os.fspath(location)
    return Origin(remote_path(path) if is_url(path) else path_of(name, path).absolute())


def remote_path(url: str | os.PathLike[str]) -> RemotePath:
    """Convert a URL to a path.

    Raises:
        UsageError: fsspec is not installed, or does not know the protocol.
    """
    text = os.fsdecode(url)
    if importlib.util.find_spec("fsspec") is None:
        raise UsageError(
            f"fsspec, which reads {text!r}, is not installed. Install it with: "
            "pip install rollout-data[remote]."
        )
    import fsspec

    protocol = text.partition(":/")[0]
    if protocol in ("file", "local") or protocol not in {
        *fsspec.available_protocols(),
        *fsspec.registry,
    }:
        raise UsageError(f"fsspec does not support the protocol {protocol!r} of {text!r}.")
    return RemotePath(text)


class RemoteFiles:
    """Access to the files below one URL. An unpickled copy opens its own connections."""

    def __init__(self, path: Path, options: RemoteOptions) -> None:
        self.path = path
        self.options = options
        self.fetcher = Fetcher(options.num_requests, options.timeout_s, options.num_retries)
        self._owner = Owner("a connection")
        self._system: Any = None
        #: Monotonic time of the last listing in s.
        self._listed_s = -math.inf

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteFiles, (self.path, self.options)

    @property
    def system(self) -> Any:
        """The fsspec file system; a new one after a fork, which does not copy its threads."""
        if self._system is None or not self._owner.is_own:
            import fsspec

            protocol = str(self.path).partition(":")[0]
            options = dict(self.options.storage_options)
            try:
                self._system = fsspec.filesystem(protocol, **options)
            except ImportError as cause:
                raise UsageError(
                    f"the package for {protocol!r}, which reads {str(self.path)!r}, is not "
                    f"installed: {cause}. Install it with pip."
                ) from cause
            self._owner = Owner("a connection")
        return self._system

    def ask(
        self,
        path: Path,
        start: int,
        stop: int,
        use: Callable[[bytes], Any] = bytes,
        sums: PieceSums | None = None,
    ) -> Request:
        """Submit a request for bytes `start:stop` of a file.

        Args:
            path: The file.
            start, stop: Byte range.
            use: Function that converts the bytes to the result of the request.
            sums: Checksum file of the block, to check the bytes; None checks nothing.

        Returns:
            The request, whose result `fetcher.wait` returns. In addition to its usual errors, it
            raises `CorruptFileError` if the file is too short or a checksum is wrong.
        """

        def fetch() -> Any:
            if sums is None:
                return use(self.load(path, start, stop))
            # Only complete pieces can be checked, so the bytes `low:high` are fetched. Their
            # checksums are the bytes `first:last` of the checksum file.
            low, high = sums.bounds(start, stop)
            first, last = sums.range_of_sums(low, high)
            checksums = sums.in_memory(first, last)
            if len(checksums) == last - first:
                data = self.load(path, low, high)
            else:
                missing = (first + len(checksums), last)
                data, fetched = self._load_both(path, (low, high), sums.path, missing)
                checksums += fetched
            sums.check(data, low, checksums)
            return use(data if (low, high) == (start, stop) else data[start - low : stop - low])

        return self.fetcher.submit(fetch, f"bytes {start}:{stop} of {str(path)!r}")

    def wait_for(self, send: Callable[[], Any], path: Path) -> Any:
        """Run a function that accesses the store as one request; wait and return its result.

        Args:
            send: The function. Time-out and retries apply to it as a whole.
            path: The file that it accesses, for error messages.
        """
        return self.fetcher.wait(self.fetcher.submit(send, repr(str(path))))

    def load(self, path: Path, start: int, stop: int) -> bytes:
        """Fetch bytes `start:stop` of a file in the current thread, without time-out and retries.

        Only functions that are passed to `fetcher.submit` or `wait_for` call it.

        Raises:
            CorruptFileError: The file ends before `stop`.
        """
        return _checked_length(
            self.system.cat_file(str(path), start=start, end=stop), path, start, stop
        )

    def load_sums(self, path: Path, sums_path: Path, start: int, stop: int) -> bytes:
        """Fetch bytes `start:stop` of a block's checksum file, like `load`.

        Raises:
            FileNotFoundError: The block is missing.
            FetchError: Only the checksum file is missing.
        """
        try:
            return self.load(sums_path, start, stop)
        except FileNotFoundError as cause:
            self.load(path, 0, 1)
            raise _missing_sums(sums_path) from cause

    def _load_both(
        self, path: Path, part: tuple[int, int], sums_path: Path, sums_part: tuple[int, int]
    ) -> tuple[bytes, bytes]:
        """Fetch bytes of a block and of its checksum file, concurrently if fsspec supports it."""
        if not getattr(self.system, "async_impl", False):
            return self.load(path, *part), self.load_sums(path, sums_path, *sums_part)
        starts, stops = zip(part, sums_part, strict=True)
        data, sums = self.system.cat_ranges([str(path), str(sums_path)], list(starts), list(stops))
        if isinstance(data, BaseException):
            raise data
        if isinstance(sums, FileNotFoundError):
            raise _missing_sums(sums_path) from sums
        if isinstance(sums, BaseException):
            raise sums
        return _checked_length(data, path, *part), _checked_length(sums, sums_path, *sums_part)

    def read(self, path: Path, start: int, stop: int, sums: PieceSums | None = None) -> np.ndarray:
        """Read bytes `start:stop` of a file, with parallel requests: a uint8 array.

        Raises the errors of `ask`.
        """
        step = self.options.chunk_bytes
        parts = [
            self.ask(path, low, min(low + step, stop), bytes, sums)
            for low in range(start, stop, step)
        ]
        return np.frombuffer(b"".join(map(self.fetcher.wait, parts)), np.uint8)

    def listed(self) -> dict[str, tuple[int, int]]:
        """List the files directly below the URL; map their names to size and stamp.

        The listing is not cached.

        Raises:
            UsageError: The URL does not exist.
            AccessError: The store denies access.
            DataFileError: The folder cannot be listed.
        """
        url = str(self.path)

        def ls() -> list[Any]:
            self.system.invalidate_cache(url)
            return [entry for entry in self.system.ls(url, detail=True) if entry["type"] == "file"]

        try:
            entries = self.fetcher.wait(self.fetcher.submit(ls, repr(url)))
        except (FileNotFoundError, NotADirectoryError) as cause:
            raise MissingFolderError(f"the data folder {url!r} does not exist.") from cause
        except OSError as cause:
            raise DataFileError(
                f"The data folder {url!r} cannot be listed: {cause}. Check the connection and the "
                "access rights."
            ) from cause
        self._listed_s = time.monotonic()
        names = [entry["name"].rpartition("/")[2] for entry in entries]
        return dict(zip(names, self.sizes_and_stamps(entries), strict=True))

    def sizes_and_stamps(self, entries: Sequence[Mapping[str, Any]]) -> list[tuple[int, int]]:
        """Return the size and the stamp of each file of a listing.

        If the listing has no size of a file, as over HTTP, the size is requested separately.

        Raises:
            DataFileError: The store reports no size of a file, or does not answer.
        """

        def ask(entry: Mapping[str, Any]) -> Request:
            name = entry["name"]
            return self.fetcher.submit(partial(self.system.info, name), repr(name))

        requests = {
            number: ask(entry) for number, entry in enumerate(entries) if entry.get("size") is None
        }
        sizes_and_stamps = []
        for number, entry in enumerate(entries):
            complete = self.fetcher.wait(requests[number]) if number in requests else entry
            if complete.get("size") is None:
                raise DataFileError(
                    f"The store reports no size of the file {entry['name']!r}. Copy the data to "
                    "this machine."
                )
            sizes_and_stamps.append((int(complete["size"]), stamp_of_entry(complete)))
        return sizes_and_stamps

    def check_access(self) -> None:
        """Check that the store grants access, by a listing at most once per second.

        This is needed because some stores report a file as missing if they deny access.

        Raises:
            AccessError: The store denies access.
            FetchError: The store does not answer.
        """
        if time.monotonic() - self._listed_s > _RECENT_S:
            # A listing fails with `UsageError` if the folder is missing, which is not checked here.
            with suppress(UsageError):
                self.listed()


def _missing_sums(path: Path) -> FetchError:
    """Build the error for an existing block whose checksum file was removed."""
    return FetchError(
        f"The checksum file {str(path)!r} was removed. Push the block again, or open the data "
        "again to read it without checksums."
    )


def _checked_length(data: bytes, path: Path, start: int, stop: int) -> bytes:
    if len(data) != stop - start:
        raise CorruptFileError(
            f"{str(path)!r} is truncated: it ends after {len(data)} of the {stop - start} bytes at "
            f"offset {start}."
        )
    return data


def stamp_of_entry(entry: Mapping[str, Any]) -> int:
    """Compute the stamp of a file: a number that changes if its content changes.

    Args:
        entry: fsspec's description of the file. If it has no checksum, version or time, the result
            is `NO_STAMP`.
    """
    return crc32(repr([str(entry[name]) for name in _STAMPS if entry.get(name)]).encode())


#: Stamp of a file whose description has no checksum, version or time.
NO_STAMP = stamp_of_entry({})
