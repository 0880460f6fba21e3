"""Where data are: paths and URLs, the fsspec file systems behind those, and how they are asked.

One rule: a URL travels through the library as a `RemotePath`, and only this room opens it.
`fetching.py` sends the requests.
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
from storage.errors import CorruptFileError, DataFileError, MissingFolderError, UsageError

from .fetcher import Fetcher, FetchError, Request
from .piece_checksums import PieceSums


@dataclass(frozen=True)
class Origin:
    """Where data are, and which of them are meant.

    Attributes:
        path: A file or folder, or a `RemotePath`.
        format: Its format; None where its content tells.
        options: Of the format.
        ids: Names of the trajectories that are read; None is all.
        remote: How it is read if it is a URL; None leaves that to who reads it.
        opened: The reader of an open recording, whose snapshot is read; None: what is there now.
    """

    path: Path
    format: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    ids: tuple[str, ...] | None = None
    remote: RemoteOptions | None = None
    opened: Any = field(default=None, compare=False, repr=False)


class HasOrigin(Protocol):
    """What knows where its data are, such as a `Recording`."""

    @property
    def origin(self) -> Origin:
        """Where they are."""


DataDir = str | os.PathLike[str] | HasOrigin | Origin
DataDirs = DataDir | Sequence[DataDir]
#: Names under which file systems list a checksum, a version or a time that changes with the content of a file: S3,
#: Google, Azure and WebDAV, web servers, Hugging Face, git and GitHub, Drive and Box, HDFS, SMB, FTP, archives.
_STAMPS = (
    "ETag", "etag", "md5Hash", "LastModified", "last_modified", "mtime", "created", "generation", "modified",
    "Last-Modified", "Content-MD5", "Digest", "blob_id", "hex", "sha", "md5Checksum", "modifiedTime", "modified_at",
    "modificationTime", "last_write_time", "modify", "CRC", "chksum",
)  # fmt: skip

_FETCH = "fetch the bytes"
#: A listing of this age in seconds shows that access is granted.
_RECENT_S = 1.0


@dataclass(frozen=True)
class RemoteOptions:
    """How files behind a network are read; local ones ignore it.

    Windows are shuffled among `num_chunks` chunks, while as many are on their way: both together take
    2 * `num_chunks` * `chunk_bytes` of memory, 64 MiB by default, which is also what playback keeps.

    Attributes:
        chunk_bytes: How much is fetched by one request at most.
        num_chunks: Chunks among which windows are shuffled, and chunks that are fetched ahead.
        num_requests: Requests under way at once. Together they must cover bandwidth times latency.
        timeout_s: How long an attempt may take.
        num_retries: How often a request that failed or took too long is sent again.
        cache_bytes: Disk space for copies of LeRobot sets and HDF5 files in the user's cache folder; block files are
            never copied.
        storage_options: For the file system, as fsspec takes them: keys, `endpoint_url`, ...

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
        action = "create RemoteOptions"
        for name, low in (
            ("chunk_bytes", 1 << 12),
            ("num_chunks", 1),
            ("num_requests", 1),
            ("num_retries", 0),
            ("cache_bytes", 0),
        ):
            whole(action, name, getattr(self, name), low)
        real(action, "timeout_s", self.timeout_s, "> 0 seconds", lambda seconds: seconds > 0)
        if not isinstance(self.storage_options, Mapping):
            raise UsageError(action, "", "storage_options as a mapping", repr(self.storage_options))

    @property
    def kept_bytes(self) -> int:
        """Memory for what was fetched and what is on its way."""
        return 2 * self.num_chunks * self.chunk_bytes


def checked_remote(action: str, remote: Any) -> RemoteOptions:
    """Check `remote`; None is the default options."""
    if remote is not None and not isinstance(remote, RemoteOptions):
        raise UsageError(action, "", "remote as RemoteOptions or None", repr(remote))
    return remote or RemoteOptions()


class RemotePath(PosixPath):
    """A URL that travels through the library as a path; its text is the URL, and nothing of this machine is below."""

    def __str__(self) -> str:
        return super().__str__().replace(":/", "://", 1)


def origins_of(data_dir: DataDirs, action: str = "open the dataset", name: str = "data_dir") -> list[Origin]:
    """Return what a `data_dir` argument names, so that it stays the same when the process goes elsewhere.

    Errors name the `action`, and the argument by its `name`.
    """
    try:
        listed: Any = [data_dir] if is_one(data_dir) else data_dir
        origins = [_origin(one, action, name) for one in listed]
    except TypeError as cause:
        raise UsageError(action, "", f"{name} as a path or a list of paths", repr(data_dir)) from cause
    if not origins:
        raise UsageError(action, "", f"{name} with at least one data folder", "none")
    return origins


def present_origins_of(data_dir: DataDirs, action: str, name: str) -> list[Origin]:
    """Return the origins of `origins_of`; the files of open recordings are checked.

    Raises:
        DataFileError: A file of an episode of an open recording was removed or replaced since it was opened.
    """
    origins = origins_of(data_dir, action, name)
    listed: Any = [data_dir] if is_one(data_dir) else data_dir
    for one in listed:
        if not isinstance(one, Origin) and hasattr(one, "origin"):
            one.check_present()
    return origins


def is_one(data_dir: Any) -> bool:
    """Return whether this is one place of data, not a list; a recording is one although it is a sequence."""
    return isinstance(data_dir, (str, os.PathLike, Origin)) or hasattr(data_dir, "origin")


def _origin(one: Any, action: str, name: str) -> Origin:
    if not isinstance(one, Origin) and hasattr(one, "origin"):
        one = one.origin
    return one if isinstance(one, Origin) else Origin(_absolute(os.fspath(one), action, name))


def _absolute(path: str, action: str, name: str) -> Path:
    return remote_path(path, action) if is_url(path) else path_of(action, name, path).absolute()


def remote_path(url: str | os.PathLike[str], action: str = "open the dataset") -> RemotePath:
    """Return a URL as a path.

    Raises:
        UsageError: fsspec is not installed, or does not know the kind of URL.
    """
    text = os.fsdecode(url)
    if importlib.util.find_spec("fsspec") is None:
        advice = "To read it: pip install rollout-data[remote]"
        raise UsageError(action, repr(text), "a path on this machine", "a URL, and no fsspec", advice)
    import fsspec

    protocol = text.partition(":/")[0]
    if protocol in ("file", "local") or protocol not in {*fsspec.available_protocols(), *fsspec.registry}:
        expected = "a path on this machine, or a URL that fsspec knows"
        raise UsageError(action, repr(text), expected, f"a URL of kind {protocol!r}")
    return RemotePath(text)


class RemoteFiles:
    """The files below one URL; a pickled copy connects anew."""

    def __init__(self, path: Path, options: RemoteOptions) -> None:
        self.path = path
        self.options = options
        self.fetcher = Fetcher(options.num_requests, options.timeout_s, options.num_retries)
        self._system: tuple[int, Any] | None = None
        self._listed_s = -math.inf  # of the monotonic clock

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteFiles, (self.path, self.options)

    @property
    def system(self) -> Any:
        """fsspec's file system; of this process, as its threads do not survive a fork."""
        if self._system is None or self._system[0] != os.getpid():
            import fsspec

            protocol = str(self.path).partition(":")[0]
            options = dict(self.options.storage_options)
            try:
                self._system = os.getpid(), fsspec.filesystem(protocol, **options)
            except ImportError as cause:
                expected, got = "the file system of its kind", str(cause)
                raise UsageError("open", repr(str(self.path)), expected, got, "Install it with pip") from cause
        return self._system[1]

    def ask(
        self,
        path: Path,
        start: int,
        stop: int,
        use: Callable[[bytes], Any] = bytes,
        sums: PieceSums | None = None,
    ) -> Request:
        """Ask for bytes of a file; `fetcher.wait` gives what `use` makes of them.

        It raises, besides: FileNotFoundError, there is no such file; CorruptFileError, the file is shorter, or a piece
        of it has not the checksum of `sums`.
        """

        def fetch() -> Any:
            if sums is None:
                return use(self.load(path, start, stop))
            low, high = sums.bounds(start, stop)
            first, last = sums.place(low, high)
            kept = sums.kept(first, last)
            if len(kept) == last - first:
                sums.check(data := self.load(path, low, high), low, kept)
            else:
                data, more = self._load_both(path, (low, high), sums.path, (first + len(kept), last))
                sums.check(data, low, kept + more)
            return use(data if (low, high) == (start, stop) else data[start - low : stop - low])

        where = f"{start}:{stop} of {str(path)!r}"
        return self.fetcher.submit(fetch, _FETCH, where)

    def wait_for(self, send: Callable[[], Any], path: Path) -> Any:
        """Return what `send` returns, which reads a file by `load`; errors as of `ask`."""
        return self.fetcher.wait(self.fetcher.submit(send, _FETCH, f"of {str(path)!r}"))

    def load(self, path: Path, start: int, stop: int) -> bytes:
        """Fetch bytes of a file at once, in the thread that asks: only inside a request, which repeats it.

        Raises:
            CorruptFileError: The file is shorter.
        """
        return _checked_length(self.system.cat_file(str(path), start=start, end=stop), path, start, stop)

    def load_sums(self, path: Path, sums_path: Path, start: int, stop: int) -> bytes:
        """Fetch bytes of the file of checksums of a block; see `load`.

        Raises:
            FileNotFoundError: The block is missing.
            FetchError: Only the file of checksums is missing.
        """
        try:
            return self.load(sums_path, start, stop)
        except FileNotFoundError as cause:
            self.load(path, 0, 1)
            raise _missing_sums(sums_path) from cause

    def _load_both(
        self, path: Path, part: tuple[int, int], sums_path: Path, sums_part: tuple[int, int]
    ) -> tuple[bytes, bytes]:
        """Fetch bytes of a block and of its file of checksums, at once where the file system can do that."""
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
        """Read bytes of a file, by several requests where they are many: a new uint8 array; errors as of `ask`."""
        step = self.options.chunk_bytes
        parts = [self.ask(path, low, min(low + step, stop), bytes, sums) for low in range(start, stop, step)]
        return np.frombuffer(b"".join(map(self.fetcher.wait, parts)), np.uint8)

    def listed(self) -> dict[str, tuple[int, int]]:
        """Return the name, size and stamp of each file right below the URL, asked anew.

        Raises:
            UsageError: There is nothing.
            DataFileError: It cannot be listed; an `AccessError` where the store refuses it.
        """
        url = str(self.path)

        def ls() -> list[Any]:
            self.system.invalidate_cache(url)
            return [one for one in self.system.ls(url, detail=True) if one["type"] == "file"]

        try:
            found = self.fetcher.wait(self.fetcher.submit(ls, "list the files", f"of {url!r}"))
        except (FileNotFoundError, NotADirectoryError) as cause:
            raise MissingFolderError("open the data folder", repr(url), "a folder", "nothing there") from cause
        except OSError as cause:
            expected = "a folder that can be listed"
            advice = "See to the connection and the rights to read"
            raise DataFileError("open the data folder", repr(url), expected, str(cause), advice) from cause
        self._listed_s = time.monotonic()
        names = [one["name"].rpartition("/")[2] for one in found]
        return dict(zip(names, self.sizes_and_stamps(found), strict=True))

    def sizes_and_stamps(self, entries: Sequence[Mapping[str, Any]]) -> list[tuple[int, int]]:
        """Return the size and the stamp of each listed file; looks up files whose size a listing lacks, as over HTTP.

        Raises:
            DataFileError: The store tells the size of a file nowhere, or does not answer.
        """

        def ask(entry: Mapping[str, Any]) -> Request:
            name = entry["name"]
            return self.fetcher.submit(partial(self.system.info, name), "look up the file", repr(name))

        requests = {number: ask(entry) for number, entry in enumerate(entries) if entry.get("size") is None}
        found = []
        for number, entry in enumerate(entries):
            about = self.fetcher.wait(requests[number]) if number in requests else entry
            if about.get("size") is None:
                expected = "a size in the answer of the store"
                got = "none"
                raise DataFileError("look up the file", repr(entry["name"]), expected, got, "Copy the data first")
            found.append((int(about["size"]), stamp_of_entry(about)))
        return found

    def check_access(self) -> None:
        """List the files, unless that was done a moment ago: some stores say of what they refuse that it is not there.

        Raises:
            AccessError: The store refuses to list them.
            FetchError: It does not answer.
        """
        if time.monotonic() - self._listed_s > _RECENT_S:
            with suppress(UsageError):  # all of it is gone
                self.listed()


def _missing_sums(path: Path) -> FetchError:
    """Build the error for checksums that were removed while their block stays; it is no block that vanished."""
    advice = "Push the block again, or open the data again: it is then read without them"
    return FetchError("compare the block", f"with {str(path)!r}", "the checksums that were listed", "no file", advice)


def _checked_length(data: bytes, path: Path, start: int, stop: int) -> bytes:
    if len(data) != stop - start:
        raise CorruptFileError(_FETCH, f"{start}:{stop} of {str(path)!r}", f"{stop - start} bytes", str(len(data)))
    return data


def stamp_of_entry(entry: Mapping[str, Any]) -> int:
    """Make a number of what tells a file's content from another one's; `NO_STAMP` if there is nothing."""
    return crc32(repr([str(entry[name]) for name in _STAMPS if entry.get(name)]).encode())


#: The stamp of a file of which a change does not show.
NO_STAMP = stamp_of_entry({})
