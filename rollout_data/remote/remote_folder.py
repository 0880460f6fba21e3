"""A folder of block files behind a network: which blocks are there, and their headers by two requests each.

One rule: what is read goes through the checks that files of this machine go through, in `blocks/block_header.py` and
`blocks/block_folder.py`; here they only get their bytes.
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
from ..blocks.block_header import MAX_METADATA_BYTES, METADATA_NAME, BlockHeader, check_contents, read_header
from ..blocks.folder_metadata import BAD_METADATA, Metadata
from .locations import RemoteFiles, RemotePath
from .piece_checksums import ENDING, PieceSums

#: What opens a block of up to 1,300 fragments; of larger ones the rest is asked for when the library wants it.
HEAD_BYTES, TAIL_BYTES = 128 << 10, 64 << 10
#: The least that is asked for then.
_MORE_BYTES = 64 << 10


class RemoteFile(Guarded):
    """A file behind a network as HDF5 reads it: its head and its tail at once, what else is wanted by more requests.

    Args:
        files: Where it is.
        path: Which one.
        num_bytes: Its size, as it was listed.
        sums: Checksums of its pieces; None if there are none.
    """

    def __init__(self, files: RemoteFiles, path: Path, num_bytes: int, sums: PieceSums | None = None) -> None:
        super().__init__()
        self._sums = sums
        self._files = files
        self._path = path
        self._num_bytes = num_bytes
        self._position = 0
        head = min(HEAD_BYTES, num_bytes)
        tail = max(HEAD_BYTES, num_bytes - TAIL_BYTES)
        if sums is not None:
            head, tail = files.wait_for(partial(_narrowed, sums, head, tail, num_bytes), sums.path)
        bounds = ((0, head), (tail, num_bytes))
        requests = {start: files.ask(path, start, stop, bytes, sums) for start, stop in bounds if start < stop}
        #: First byte and bytes of each part that was fetched.
        self._parts: list[tuple[int, bytes]] = [(start, files.fetcher.wait(one)) for start, one in requests.items()]

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
        return len(self.read_at(num_bytes, start)) == num_bytes  # what the store sends is there


def _narrowed(sums: PieceSums, head: int, tail: int, num_bytes: int) -> tuple[int, int]:
    """Move the end of the head and the beginning of the tail to bounds of pieces, so that no more bytes are fetched."""
    _, stop = sums.inner(0, head)
    if head == tail or tail >= num_bytes:  # nothing lies between
        return stop, stop
    return stop, sums.inner(tail, num_bytes)[0]


class RemoteFolder(BlockFolder):
    """The blocks below a URL; see `BlockFolder`. Headers are read by many requests at once.

    Args:
        files: Where they are.
        verify_on_open: Check every checksum of a block when it is first seen, which fetches all of it.
        label: Goes before the writers' names.
    """

    def __init__(self, files: RemoteFiles, verify_on_open: bool = False, label: str = "") -> None:
        super().__init__(files.path, verify_on_open, label)
        self.files = files
        self._num_openers = files.options.num_requests
        self._use_cache = False
        self._listed: dict[str, FileStamp] = {}
        self._unlisted: set[str] = set()  # blocks that a listing lacked, for which none is asked for again
        self._sums: dict[str, tuple[FileStamp, PieceSums]] = {}

    def _place_of(self, data_dir: str | os.PathLike[str]) -> Path:
        return RemotePath(data_dir)

    def refresh(self) -> bool:
        """Look at the folder again; see `BlockFolder`.

        Raises:
            AccessError, FetchError: A block cannot be reached; the next call asks for it again.
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
        found = self._listed_now()
        return {name: stamp for name, stamp in found.items() if name.endswith((".h5", ".hdf5")) and name[0] != "."}

    def _open_block(self, path: Path, stamp: FileStamp) -> BlockHeader:
        header = self.read_header(path, stamp[0])
        if self.verify_on_open:
            check_contents(header)
        return header

    def _fragment_sums(self, header: BlockHeader, stamp: FileStamp) -> FragmentSums | None:
        return header.fragments, header.checksums

    def read_header(self, path: Path, num_bytes: int) -> BlockHeader:
        """Read the header of a block of this folder."""
        sums = self.sums_of(path, num_bytes)
        header = read_header(path, RemoteFile(self.files, path, num_bytes, sums))
        return replace(header, fetch=partial(self.files.read, path, sums=sums))

    def header_of(self, block: Block) -> BlockHeader:
        return self.read_header(block.path, block.file_bytes)

    def _listed_now(self) -> dict[str, FileStamp]:
        self._listed = self.files.listed()
        return self._listed

    def sums_of(self, path: Path, num_bytes: int) -> PieceSums | None:
        """Return the checksums of the pieces of a block of this folder; None if there were none beside it."""
        if path.name not in self._listed and path.name not in self._unlisted:  # another process has found it
            self._listed_now()
            self._unlisted |= {path.name} - self._listed.keys()
        name = path.name + ENDING
        about = self._listed.get(name)
        known = self._sums.get(name)
        if about is not None and (known is None or known[0] != about):
            load = partial(self.files.load_sums, path, self.data_dir / name)
            known = self._sums[name] = about, PieceSums(path, num_bytes, about[0], load)
        return None if known is None else known[1]  # those that were removed meanwhile are an error of the next request

    @property
    def num_without_sums(self) -> int:
        """Blocks that were found without checksums of pieces beside them."""
        have_sums = self._listed.keys() | self._sums.keys()
        return sum(name + ENDING not in have_sums for name in self.blocks)

    def read_document(self) -> dict[str, Any]:
        path = self.data_dir / METADATA_NAME
        num_bytes, _ = self.files.listed().get(METADATA_NAME) or (-1, 0)
        if num_bytes < 0:
            raise FileNotFoundError(str(path))
        if num_bytes > MAX_METADATA_BYTES:
            raise CorruptFileError("read", repr(str(path)), f"at most {MAX_METADATA_BYTES} bytes", str(num_bytes))
        found = json.loads(self.files.read(path, 0, num_bytes).tobytes())
        if not isinstance(found, dict):
            raise ValueError("no JSON object")
        return found

    def metadata_there(self) -> Metadata | None:
        """Return the contents of metadata.json; None if there is none, or no folder."""
        try:
            return Metadata.from_json(self.read_document())
        except (FileNotFoundError, UsageError):
            return None

    @property
    def metadata(self) -> dict[str, Any]:
        """Contents of metadata.json with the totals counted in the blocks; made of the blocks where it is damaged."""
        try:
            found = Metadata.from_json(self.read_document())
        except UnansweredError:
            raise
        except BAD_METADATA:
            found = Metadata.of_schema(Schema([]))
        self.refresh()
        return counted_metadata(self, found)
