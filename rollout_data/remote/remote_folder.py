"""`RemoteFolder`: a folder of block files at a URL. Most headers are read with two requests each.

The checks of `blocks/block_header.py` and `blocks/block_folder.py` also apply to remote files.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from storage.core.fields import Schema
from storage.errors import CorruptFileError, UnansweredError, UsageError
from storage.saving.hdf5_files import Guarded

from ..blocks.block import Block, FragmentSums
from ..blocks.block_folder import BlockFolder, FileStamp, counted_metadata
from ..blocks.block_header import (
    MAX_METADATA_BYTES,
    METADATA_NAME,
    BlockHeader,
    check_contents,
    read_header,
)
from ..blocks.folder_metadata import BAD_METADATA, Metadata
from .locations import RemoteFiles, RemotePath
from .piece_checksums import ENDING, PieceSums

#: Bytes at the beginning of a block that are fetched first. Beginning and end of a block contain
#: its complete header if it has up to 1,300 fragments. A larger header is fetched on demand.
HEAD_BYTES = 128 << 10
#: Bytes at the end of a block that are fetched first.
TAIL_BYTES = 64 << 10
#: Minimum bytes per request for further bytes of a header.
_MORE_BYTES = 64 << 10


class RemoteFile(Guarded):
    """A remote block as a file object, from which h5py reads the header.

    Beginning and end of the file are fetched by the constructor, other bytes on demand.

    Args:
        files: Files of the URL.
        path: The file.
        num_bytes: Listed size of the file in bytes.
        sums: Checksum file of the block; None if there is none.
    """

    def __init__(
        self, files: RemoteFiles, path: Path, num_bytes: int, sums: PieceSums | None = None
    ) -> None:
        super().__init__()
        self._sums = sums
        self._files = files
        self._path = path
        self._num_bytes = num_bytes
        self._position = 0
        head = min(HEAD_BYTES, num_bytes)
        tail = max(HEAD_BYTES, num_bytes - TAIL_BYTES)
        if sums is not None:
            find_ranges = partial(_complete_pieces, sums, head, tail, num_bytes)
            head, tail = files.wait_for(find_ranges, sums.path)
        requests = {}
        for start, stop in ((0, head), (tail, num_bytes)):
            if start < stop:
                requests[start] = files.ask(path, start, stop, bytes, sums)
        #: Byte offset and content of each fetched part.
        self._parts: list[tuple[int, bytes]] = []
        for start, request in requests.items():
            self._parts.append((start, files.fetcher.wait(request)))

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def take(self, view: memoryview) -> int:
        data = self.read_at(len(view), self._position)
        view[: len(data)] = data
        self._position += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._num_bytes}[whence]
        self._position = base + offset
        return self._position

    def read_at(self, num_bytes: int, start: int) -> bytes:
        stop = min(start + num_bytes, self._num_bytes)
        if start >= stop:
            return b""
        for first, part in self._parts:
            if first <= start and stop <= first + len(part):
                return part[start - first : stop - first]
        low = start
        end = min(max(stop, start + _MORE_BYTES), self._num_bytes)
        if self._sums is not None:
            low, least = self._sums.bounds(start, stop)
            end = max(least, self._sums.inner(low, end)[1])
        more = self._files.read(self._path, low, end, self._sums).tobytes()
        self._parts.append((low, more))
        return more[start - low : stop - low]

    def is_written(self, num_bytes: int, start: int) -> bool:
        # Unlike sparse local files, objects of a store have no holes.
        return len(self.read_at(num_bytes, start)) == num_bytes


def _complete_pieces(sums: PieceSums, head: int, tail: int, num_bytes: int) -> tuple[int, int]:
    """Shrink two byte ranges of a block, so that they consist of complete checksum pieces.

    Args:
        sums: Checksum file of the block.
        head: Stop of the range at the beginning of the block.
        tail: Start of the range at the end of the block.
        num_bytes: Size of the block in bytes.

    Returns:
        The new `head` and `tail`.
    """
    _, stop = sums.inner(0, head)
    if head == tail or tail >= num_bytes:
        # The ranges are adjacent, or the second is empty. They remain adjacent.
        return stop, stop
    return stop, sums.inner(tail, num_bytes)[0]


class RemoteFolder(BlockFolder):
    """The blocks at a URL, see `BlockFolder`. Headers are read with many requests at once.

    Args:
        files: Files of the URL.
        verify_on_open: Check all checksums of a block when it is first opened, which fetches the
            entire block.
        label: Prefix of writer names.
    """

    def __init__(self, files: RemoteFiles, verify_on_open: bool = False, label: str = "") -> None:
        super().__init__(files.path, verify_on_open, label)
        self.files = files
        self._num_openers = files.options.num_requests
        self._use_cache = False
        self._listed: dict[str, FileStamp] = {}
        #: Names of blocks that even a new listing did not contain. The folder is not listed again
        #: for their checksum files.
        self._unlisted: set[str] = set()
        self._sums: dict[str, tuple[FileStamp, PieceSums]] = {}

    def _place_of(self, data_dir: str | os.PathLike[str]) -> Path:
        return RemotePath(data_dir)

    def refresh(self) -> bool:
        """Open new blocks and remove deleted ones, see `BlockFolder.refresh`.

        Raises:
            AccessError, FetchError: A block cannot be fetched. The next call tries again.
        """
        has_changed = super().refresh()
        for name, problem in list(self.problems.items()):
            unanswered = problem if isinstance(problem, UnansweredError) else problem.__cause__
            if isinstance(unanswered, UnansweredError):
                del self.problems[name]
                self._is_schema_fixed = False
                if name != METADATA_NAME:
                    self._forget(name)
                raise unanswered
        return has_changed

    def found_now(self) -> Mapping[str, FileStamp]:
        stamps = {}
        for name, stamp in self._listed_now().items():
            if name.endswith((".h5", ".hdf5")) and not name.startswith("."):
                stamps[name] = stamp
        return stamps

    def _open_block(self, path: Path, stamp: FileStamp) -> BlockHeader:
        header = self.read_header(path, stamp[0])
        if self.verify_on_open:
            check_contents(header)
        return header

    def _fragment_sums(self, header: BlockHeader, stamp: FileStamp) -> FragmentSums | None:
        return header.fragments, header.checksums

    def read_header(self, path: Path, num_bytes: int) -> BlockHeader:
        """Read the header of a block of this folder; `num_bytes` is the listed file size."""
        sums = self.sums_of(path, num_bytes)
        header = read_header(path, RemoteFile(self.files, path, num_bytes, sums))
        return replace(header, fetch=partial(self.files.read, path, sums=sums))

    def header_of(self, block: Block) -> BlockHeader:
        return self.read_header(block.path, block.file_bytes)

    def _listed_now(self) -> dict[str, FileStamp]:
        self._listed = self.files.listed()
        return self._listed

    def sums_of(self, path: Path, num_bytes: int) -> PieceSums | None:
        """Return the checksum file of a block; None if the block has none.

        The file is found in the listing. If it was removed since, `FetchError` is raised when the
        block is read.

        Args:
            path: The block.
            num_bytes: Listed size of the block in bytes.
        """
        # Another process has listed the block, so this process may not have a listing yet.
        if path.name not in self._listed and path.name not in self._unlisted:
            self._listed_now()
            self._unlisted |= {path.name} - self._listed.keys()
        name = path.name + ENDING
        stamp = self._listed.get(name)
        opened = self._sums.get(name)
        if stamp is not None and (opened is None or opened[0] != stamp):
            load = partial(self.files.load_sums, path, self.data_dir / name)
            opened = stamp, PieceSums(path, num_bytes, stamp[0], load)
            self._sums[name] = opened
        return None if opened is None else opened[1]

    @property
    def num_without_sums(self) -> int:
        """Number of blocks without a checksum file."""
        with_sums = self._listed.keys() | self._sums.keys()
        return sum(name + ENDING not in with_sums for name in self.blocks)

    def read_document(self) -> dict[str, Any]:
        path = self.data_dir / METADATA_NAME
        num_bytes, _ = self.files.listed().get(METADATA_NAME) or (-1, 0)
        if num_bytes < 0:
            raise FileNotFoundError(str(path))
        if num_bytes > MAX_METADATA_BYTES:
            raise CorruptFileError(
                f"{str(path)!r} has {num_bytes} bytes, expected at most {MAX_METADATA_BYTES}."
            )
        document = json.loads(self.files.read(path, 0, num_bytes).tobytes())
        if not isinstance(document, dict):
            raise ValueError("no JSON object")
        return document

    def read_metadata(self) -> Metadata | None:
        """Read metadata.json; return None if the file or the folder is missing."""
        try:
            return Metadata.from_json(self.read_document())
        except (FileNotFoundError, UsageError):
            return None

    @property
    def metadata(self) -> dict[str, Any]:
        """Content of metadata.json, with totals that are counted in the blocks.

        If the file is damaged, the content is rebuilt from the blocks.
        """
        try:
            metadata = Metadata.from_json(self.read_document())
        except UnansweredError:
            raise
        except BAD_METADATA:
            metadata = Metadata.of_schema(Schema([]))
        self.refresh()
        return counted_metadata(self, metadata)
