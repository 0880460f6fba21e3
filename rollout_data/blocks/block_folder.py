"""A folder of block files: its intact and damaged blocks, and the cache of its index.

A damaged file adds an entry to `problems`; the other files are read. Reading never changes the
folder; only writers and tools call `save_index_cache`. Clocks and listings of a network file system
may be late. Therefore modification times are only compared for equality, and a known file that is
missing from a listing is looked up by its name.
"""

from __future__ import annotations

import json
import math
import os
import stat
import time
import zipfile
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from storage.core import arguments
from storage.core.durable_files import replace_file
from storage.core.fields import Schema
from storage.core.threads import each
from storage.errors import (
    CorruptFileError,
    DataFileError,
    MissingFolderError,
    RolloutDataError,
    UsageError,
)

from .block import Block, FragmentSums
from .block_header import (
    DATA,
    FINAL,
    FRAGMENT_DTYPE,
    METADATA_NAME,
    BlockHeader,
    check_fragments,
    layouts_of,
    open_block,
    read_header,
)
from .edit_blocks import ignored_edits, named_edit
from .folder_metadata import BAD_METADATA, ENDS, UNKNOWN, Metadata, load_metadata, read_document
from .trajectory_index import Int64s, TrajectoryIndex, joined_fragments
from .write_block import TEMPORARY_PREFIX

INDEX_CACHE_NAME = ".index.npz"
_CACHE_VERSION = 4
#: Exceptions that the readers of zip, npy and JSON raise if the index cache is damaged. The zip
#: reader raises RuntimeError for encrypted or unsupported entries.
BAD_CACHE = (
    *BAD_METADATA,
    EOFError,
    ArithmeticError,
    MemoryError,
    RuntimeError,
    zipfile.BadZipFile,
    zlib.error,
)
#: Largest step in s in which a file system stores the modification time of a folder: 2 s for FAT. A
#: second change within this time may be invisible, so the folder is listed again.
_COARSE_S = 2.0
#: Maximum fraction of the running time that is spent on checks of known files for changes. A folder
#: with many files is therefore checked less often.
LOOK_SHARE = 0.005
#: Maximum number of additional scans if an edit was replaced during a scan.
_NUM_LOOKS = 10
#: Size in bytes and modification time in ns. A file whose stamp did not change counts as unchanged.
FileStamp = tuple[int, int]
#: The schema of an opened block file, and the block.
_Opened = tuple[Schema, Block]


def stamp_of(path: Path) -> FileStamp | None:
    """Return size and modification time of a regular file; None for folders, pipes and devices."""
    status = os.stat(path)
    return (status.st_size, status.st_mtime_ns) if stat.S_ISREG(status.st_mode) else None


def kind_of_file(path: Path) -> str:
    """Return the kind of a file for error messages, such as "a pipe"."""
    mode = path.stat().st_mode
    if stat.S_ISFIFO(mode):
        return "a pipe"
    if stat.S_ISSOCK(mode):
        return "a socket"
    if stat.S_ISBLK(mode) or stat.S_ISCHR(mode):
        return "a device"
    return "a file"


def entries_of(folder: Path) -> list[os.DirEntry[str]]:
    """Return the directory entries of a data folder.

    Raises:
        UsageError: The folder does not exist.
        DataFileError: The folder cannot be listed.
    """
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except FileNotFoundError as cause:
        raise MissingFolderError(f"the data folder {str(folder)!r} does not exist.") from cause
    except NotADirectoryError as cause:
        raise UsageError(
            f"{str(folder)!r} is {kind_of_file(folder)}, expected a data folder."
        ) from cause
    except OSError as cause:
        raise DataFileError(
            f"The data folder {str(folder)!r} cannot be listed: {cause}. Check its permissions."
        ) from cause


def block_entries(data_dir: Path) -> list[os.DirEntry[str]]:
    """Return the directory entries of all HDF5 files in a data folder, without hidden files."""
    visible = [entry for entry in entries_of(data_dir) if not entry.name.startswith(".")]
    return [entry for entry in visible if entry.name.endswith((".h5", ".hdf5"))]


class BlockFolder:
    """The blocks of one data folder, updated by `refresh`.

    Args:
        data_dir: The folder.
        verify_on_open: Check all checksums of a block when it is first opened.
        label: Prefix of writer names, so that writers of several folders have different names.

    Attributes:
        schema: Fields of the blocks; without blocks the fields that metadata.json declares, or
            None.
        blocks: Maps file names to intact blocks, without the edits in `replaced`.
        replaced: Maps file names to edits that readers ignore: older edits, and edits with missing
            blocks.
        problems: Maps the names of unreadable files to errors, metadata.json included.
        built: Arrays of `index` from the index cache. None if they must be computed, since the
            cache describes other blocks than `blocks`.
        has_unknown_ends: Whether readers must look into annotations to know how trajectories
            ended. True if metadata.json states `"ends": "unknown"` or cannot be read.
    """

    def __init__(
        self, data_dir: str | os.PathLike[str], verify_on_open: bool = False, label: str = ""
    ) -> None:
        self.label = label
        self.data_dir = self._place_of(data_dir)
        self.verify_on_open = verify_on_open
        self.schema: Schema | None = None
        self.blocks: dict[str, Block] = {}
        self.replaced: dict[str, Block] = {}
        self.problems: dict[str, RolloutDataError] = {}
        self.built: Mapping[str, np.ndarray] | None = None
        self._stamps: dict[str, FileStamp] = {}
        self._found: dict[str, FileStamp] = {}
        self._inodes: dict[str, int] = {}
        #: The listing of the last completed scan. An identical listing needs no scan.
        self._opened_listing: object = None
        #: Modification time and inode of the folder, which change when a file is added or removed.
        self._folder_state: object = None
        # Monotonic times in s: last change of the folder, last listing, next check of all stamps.
        self._changed_s = -math.inf
        self._listed_s = -math.inf
        self._due_s = -math.inf
        self._use_cache = not verify_on_open
        #: Number of threads that open blocks.
        self._num_openers = 1
        self.has_unknown_ends = False
        self._is_schema_fixed = False
        #: Whether the last scan listed an edit and could not open it, since a newer edit had
        #: replaced it. The folder must then be scanned again.
        self._has_missed_edit = False

    @classmethod
    def at(cls, data_dir: str | os.PathLike[str], verify_on_open: bool = False) -> BlockFolder:
        """Create a `BlockFolder` and open all its blocks."""
        folder = cls(data_dir, verify_on_open)
        folder.refresh()
        return folder

    @property
    def index(self) -> TrajectoryIndex:
        """Index of the trajectories in `blocks`, computed at each access."""
        return TrajectoryIndex(list(self.blocks.values()), built=self.built)

    def keep_only(self, blocks: Sequence[Block]) -> None:
        """Use a list of blocks that another process has found, instead of the own scan.

        A block is left out if its file was changed or removed since. Edits are never left out.
        """
        present = {block.identity for block in self.blocks.values()}
        kept = [block for block in blocks if block.is_edit or block.identity in present]
        self.blocks = {block.path.name: block for block in kept}
        self.replaced = {}
        self.built = None

    def _place_of(self, data_dir: str | os.PathLike[str]) -> Path:
        # Make the path absolute, since the process may change its working directory.
        return arguments.path("", data_dir).absolute()

    def refresh(self) -> bool:
        """Open new blocks and remove deleted ones; return whether anything changed."""
        has_changed = self._scan()
        for _ in range(_NUM_LOOKS):
            if not self._has_missed_edit:
                break
            self._has_missed_edit = False
            has_changed |= self._scan()
        return has_changed

    def _scan(self) -> bool:
        """List the folder once and update the blocks; return whether anything changed."""
        listing = self.found_now()
        if listing is self._opened_listing:
            return False
        if self._use_cache:
            self._use_cache = False
            self._load_cache(listing)
        is_schema_open = bool(self.blocks) and not self._is_schema_fixed
        has_changed = listing != self._stamps or is_schema_open
        if has_changed:
            self._update(listing)
        self._opened_listing = listing
        return has_changed

    def _update(self, listing: Mapping[str, FileStamp]) -> None:
        """Open the files that are new in a listing; remove blocks whose files are not in it."""
        for name, stamp in list(self._stamps.items()):
            if listing.get(name) != stamp:
                self._forget(name)
        self.blocks |= self.replaced
        opened = self._open_all(listing, [name for name in listing if name not in self._stamps])
        if self._is_schema_fixed:
            # New blocks may state trajectory ends in annotations. Their writer has then set the key
            # `ends` in metadata.json before, so read the file again.
            if opened and not self.has_unknown_ends:
                _, problem = self._declared_schema()
                self._report_metadata(problem)
        elif self._fix_schema(opened):
            # The blocks from the cache have other fields. Opening each reports the difference.
            cached = list(self.blocks)
            for name in cached:
                self._forget(name)
            opened |= self._open_all(listing, [name for name in cached if name in listing])
        self._add(opened)
        # This is assigned last, so that after an interruption the next scan opens the other blocks.
        self._stamps = dict(listing)
        self._set_edits_aside()

    def _set_edits_aside(self) -> None:
        """Remove edits from `blocks` that newer edits replace, or that lack some of their parts.

        They are kept in `replaced`, since they count again if the newer edit is deleted.
        """
        names = ignored_edits(self.blocks, self._stamps)
        self.replaced = {name: self.blocks.pop(name) for name in names}
        if self.replaced:
            self.built = None

    def _forget(self, name: str) -> None:
        """Remove all that this object knows about a file which was deleted or replaced."""
        del self._stamps[name]
        self.blocks.pop(name, None)
        self.replaced.pop(name, None)
        self.problems.pop(name, None)
        self.built = None

    def _open_all(
        self,
        listing: Mapping[str, FileStamp],
        names: Sequence[str],
    ) -> dict[str, _Opened]:
        """Open block files in parallel threads; return the schema and the block of each file.

        The result is ordered by file name. The errors of damaged files are added to `problems`.
        """
        names = sorted(names)
        if names:
            self.built = None
        blocks = each(lambda name: self._open(name, listing[name]), names, self._num_openers)
        opened = {}
        for name, block in zip(names, blocks, strict=True):
            if block is not None:
                opened[name] = block
        return opened

    def _fix_schema(self, opened: Mapping[str, _Opened]) -> bool:
        """Choose the schema of this folder from metadata.json and the schemas of its blocks.

        The schema in metadata.json is chosen if at least one block has it. Otherwise the most
        frequent schema of the blocks is chosen, since a checksum covers the schema in a block, but
        not metadata.json.

        Returns:
            Whether the blocks from the index cache have a different schema, so that their files
            must be opened.
        """
        votes: Counter[Schema] = Counter()
        if self.schema is not None and self.blocks:
            votes[self.schema] = len(self.blocks)
        votes.update(schema for schema, _ in opened.values())
        declared, problem = self._declared_schema()
        chosen = declared
        if votes and (declared is None or declared not in votes):
            chosen = max(votes, key=lambda schema: votes[schema])
            if declared is not None:
                difference = chosen.difference(declared)
                problem = _metadata_error(self.data_dir / METADATA_NAME, difference)
        self._report_metadata(problem)
        has_other_fields = bool(self.blocks) and chosen != self.schema
        self.schema = chosen
        self._is_schema_fixed = bool(votes)
        return has_other_fields

    def _add(self, opened: Mapping[str, _Opened]) -> None:
        """Add the opened blocks that have the schema of this folder.

        A block with another schema or a second copy of a block adds an error to `problems`.
        """
        known = {}
        for name, block in self.blocks.items():
            if name not in opened:
                known[block.writer, block.sequence] = block
        for name, (schema, block) in sorted(opened.items(), key=lambda item: item[0]):
            other = known.get((block.writer, block.sequence))
            difference = "" if self.schema is None else self.schema.difference(schema)
            if difference:
                self.problems[name] = DataFileError(
                    f"The block {str(block.path)!r} has other fields than the data "
                    f"folder: {difference}. It is left out. Move it to another folder to read it."
                )
            elif other is not None:
                self.problems[name] = DataFileError(
                    f"The block {str(block.path)!r} is a duplicate of {other.path.name!r}. It is "
                    "left out. Remove one of the two files."
                )
            else:
                self.blocks[name] = block
                known[block.writer, block.sequence] = block

    def found_now(self) -> Mapping[str, FileStamp]:
        """Return size and modification time of each file that may be a block, by file name.

        If no file was added or removed, this takes one system call and returns the same object. A
        file that is overwritten in place is detected after a second, or after 200 times the
        duration of a full check.
        """
        start_s = time.monotonic()
        with suppress(OSError):  # The listing below raises this error.
            status = os.stat(self.data_dir)
            state = (status.st_mtime_ns, status.st_ino)
            if self._folder_state != state:
                self._folder_state = state
                self._changed_s = start_s
            if self._listed_s >= self._changed_s + _COARSE_S and start_s < self._due_s:
                return self._found
        is_full = start_s >= self._due_s
        listing = self._list_files(is_full)
        if listing != self._found:
            self._found = listing
        self._listed_s = start_s
        if is_full:
            end_s = time.monotonic()
            self._due_s = end_s + max(1.0, (end_s - start_s) / LOOK_SHARE)
        return self._found

    def _list_files(self, is_full: bool) -> dict[str, FileStamp]:
        """List the folder: map the name of each file that may be a block to its size and time.

        Without `is_full`, size and modification time are read only for files that are not in the
        last listing.
        """
        known = {} if is_full else self._found
        inodes_before = self._inodes
        self._inodes = {entry.name: entry.inode() for entry in block_entries(self.data_dir)}
        stamps = {}
        # Listings of network file systems may be late, so also look up the previous files.
        for name in self._inodes | dict.fromkeys(self._found):
            if name in known and inodes_before.get(name) == self._inodes.get(name, -1):
                stamps[name] = known[name]
                continue
            stamp = self._stamp_of(name)
            if stamp is not None:
                stamps[name] = stamp
        return stamps

    def _stamp_of(self, name: str) -> FileStamp | None:
        """Return size and modification time of a file that may be a block.

        The result is None if the file was removed or is not a regular file. A file that is not
        regular adds an error to `problems`.
        """
        path = self.data_dir / name
        try:
            stamp = stamp_of(path)
        except FileNotFoundError:  # The file was deleted after the listing, or is a dangling link.
            return None
        except OSError as error:
            self.problems[name] = _unreadable(path, error)
            return None
        if stamp is None:  # Opening a pipe would block.
            self.problems[name] = CorruptFileError(
                f"The block {str(path)!r} is not a regular file. It is left out."
            )
        return stamp

    def _report_metadata(self, problem: RolloutDataError | None) -> None:
        self.problems.pop(METADATA_NAME, None)
        if problem is not None:
            self.problems[METADATA_NAME] = problem

    def _declared_schema(self) -> tuple[Schema | None, RolloutDataError | None]:
        """Read from metadata.json the schema, and whether some episode ends are unknown.

        The attribute `has_unknown_ends` is set to the second value.

        Returns:
            The schema, or None if it cannot be read; and the error of a damaged file, or None.
        """
        path = self.data_dir / METADATA_NAME
        self.has_unknown_ends = True
        try:
            document = self.read_document()
            self.has_unknown_ends = document.get(ENDS) == UNKNOWN
            return Schema.from_json(document["fields"]) or None, None
        except FileNotFoundError:
            return None, None
        except BAD_METADATA as cause:
            problem = _metadata_error(path, f"{type(cause).__name__}: {cause}"[:300])
            problem.__cause__ = cause
            return None, problem

    def read_document(self) -> dict[str, Any]:
        """Read metadata.json as a dict, without checking its keys."""
        return read_document(self.data_dir / METADATA_NAME)

    def header_of(self, block: Block) -> BlockHeader:
        """Read the header of a block of this folder."""
        return read_header(block.path)

    def _open_block(self, path: Path, stamp: FileStamp) -> BlockHeader:
        return open_block(path, verify=self.verify_on_open)

    def _open(self, name: str, stamp: FileStamp) -> _Opened | None:
        """Open a block; return None if its file was removed or is damaged.

        The error of a damaged file is added to `problems`.
        """
        path = self.data_dir / name
        try:
            header = self._open_block(path, stamp)
        except FileNotFoundError:
            self._has_missed_edit |= named_edit(name) is not None
            return None
        except RolloutDataError as error:
            self.problems[name] = error
            return None
        except OSError as error:
            self.problems[name] = _unreadable(path, error)
            return None
        places = {}
        for table, columns in header.locations.items():
            for column, place in columns.items():
                places[table, column] = place
        num_bytes, mtime_ns = stamp
        block = Block(
            header.path,
            self.label + header.writer,
            header.sequence,
            header.fragments,
            places,
            num_bytes,
            mtime_ns,
            fragment_sums=self._fragment_sums(header, stamp),
        )
        return header.schema, block

    def _fragment_sums(self, header: BlockHeader, stamp: FileStamp) -> FragmentSums | None:
        """Return the checksums of rows to compare at each read; None for local files.

        Folders at URLs return the checksums. The rows of local files are checked only with
        `verify_on_open`.
        """
        return None

    def _load_cache(self, files: Mapping[str, FileStamp]) -> None:
        """Load the blocks of unchanged files from the index cache. A damaged cache is ignored."""
        path = self.data_dir / INDEX_CACHE_NAME
        try:
            content = None if stamp_of(path) is None else _read_cache(path)
            if content is None:
                return
            about, arrays = content
            schema = Schema.from_json(about["schema"])
            bounds = np.array(about["bounds"], np.int64)
            stamps = np.array(about["stamps"], np.int64)
            places = [(table, name) for table, name in about["places"]]
            fragments = arrays["fragments"]
            located = arrays["places"]
            num_rows = _check_cached(schema, places, fragments, bounds, located, stamps)
            blocks = {}
            for name, writer, sequence, block_fragments, block_places, block_stamp in zip(
                about["names"],
                about["writers"],
                np.array(about["sequences"], np.int64).tolist(),
                np.split(fragments, bounds[1:-1]),
                located.tolist(),
                about["stamps"],
                strict=True,
            ):
                places_of_columns = dict(zip(places, map(tuple, block_places), strict=True))
                if files.get(name) == tuple(block_stamp):
                    blocks[name] = Block(
                        self.data_dir / name,
                        self.label + writer,
                        sequence,
                        block_fragments,
                        places_of_columns,
                        *block_stamp,
                    )

            sizes = about["index"]
            index = arrays["index"].astype(np.int64, copy=False)
            stops = np.cumsum(list(sizes.values()))
            built = dict(zip(sizes, np.split(index, stops[:-1]), strict=True))
            # The index arrays describe all blocks in the cache. They are of no use if the folder
            # has other blocks.
            is_complete = list(blocks) == about["names"] and len(blocks) == len(files)
            if is_complete:
                trajectories = TrajectoryIndex(list(blocks.values()), built=built)
                if not trajectories.is_valid(*num_rows):
                    return
        except BAD_CACHE:
            return
        self.schema = schema
        self.blocks = blocks
        self.built = built if is_complete else None
        self._stamps = {name: files[name] for name in blocks}
        self._set_edits_aside()


def _metadata_error(path: Path, got: str) -> CorruptFileError:
    """Build the error for a metadata.json that is damaged or does not match any block.

    Args:
        path: The file.
        got: Text about its content: a difference between fields, or the error of reading it.
    """
    return CorruptFileError(
        f"{str(path)!r} does not contain the fields of the blocks: {got}. The blocks are read "
        "without it. 'rollout-data verify --repair' writes it again."
    )


def _read_cache(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]] | None:
    """Read an index cache; return its JSON description and its arrays by name.

    The result is None if the cache was written by another release, or is compressed.
    """
    with np.load(path, allow_pickle=False) as cache:
        # Compressed members are not read, since a small file could then fill the memory.
        if any(member.compress_type != zipfile.ZIP_STORED for member in cache.zip.infolist()):
            return None
        about = json.loads(bytes(cache["about"]))
        if about["version"] != _CACHE_VERSION:
            return None
        return about, {name: cache[name] for name in ("fragments", "places", "index")}


def _check_cached(
    schema: Schema,
    places: list[tuple[str, str]],
    fragments: np.ndarray,
    bounds: np.ndarray,
    located: np.ndarray,
    stamps: np.ndarray,
) -> list[Int64s]:
    """Check that the B blocks in an index cache refer to rows that exist in their files.

    `read_header` makes the same checks for blocks that are not in the cache. The blocks have C
    columns and, together, F fragments.

    Args:
        schema: Fields of the blocks.
        places: The (table, column) pairs, `[C]`.
        fragments: Table of fragments, `[F]` of `FRAGMENT_DTYPE`.
        bounds: First fragment of each block, int64 `[B + 1]`.
        located: Byte offset and number of rows of each column of each block, int64 `[B, C, 2]`.
        stamps: A `FileStamp` for each block, int64 `[B, 2]`.

    Returns:
        Numbers of rows in the tables `data` and `final` of each block, int64 `[B]` each.

    Raises:
        CorruptFileError: Rows lie outside their file, or fragments refer to missing rows.
    """
    row_bytes = []
    for table, name in places:
        column = layouts_of(schema)[table].columns[name]
        # The product is computed in floats, since integers of a malicious file may overflow.
        row_bytes.append(0.0 if column.is_coded else float(column.row_bytes))
    row_counts = []
    num_rows = []
    for table in (DATA, FINAL):
        is_of_table = [place[0] == table for place in places]
        row_counts.append(located[:, is_of_table, 1])
        num_rows.append(row_counts[-1].max(axis=1, initial=0))

    ends = located[..., 0] + located[..., 1] * np.array(row_bytes)
    is_inside = (located >= 0).all() and (ends <= stamps[:, :1]).all()
    has_fragments = fragments.dtype == FRAGMENT_DTYPE
    is_bounded = bounds[0] == 0 and bounds[-1] == len(fragments)
    is_even = (row_counts[0] == num_rows[0][:, None]).all()
    if not (is_inside and has_fragments and is_bounded and is_even):
        raise CorruptFileError("The index cache has rows outside their files.")

    block = np.repeat(np.arange(len(located)), np.diff(bounds))
    check_fragments(fragments, num_rows[0][block], num_rows[1][block])
    return num_rows


def _unreadable(path: Path, error: OSError) -> CorruptFileError:
    """Build the error for a block file that cannot be read because of an `OSError`."""
    problem = CorruptFileError(f"The block {str(path)!r} cannot be read: {error}. It is left out.")
    problem.__cause__ = error
    return problem


def read_metadata(data_dir: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the content of metadata.json with the total numbers of frames and trajectories.

    `total_timesteps` and `total_trajectories` count the trajectories that a reader finds in the
    blocks. Damaged blocks do not count.

    Raises:
        DataFileError: There is neither a usable metadata.json nor a readable block.
    """
    metadata = load_metadata(data_dir)
    if metadata is None:
        raise DataFileError(
            f"{str(data_dir)!r} contains neither a {METADATA_NAME} nor a readable block."
        )
    return counted_metadata(BlockFolder.at(data_dir), metadata)


def counted_metadata(folder: BlockFolder, metadata: Metadata) -> dict[str, Any]:
    """Return `metadata` as a dict, with the total frames and trajectories of all blocks."""
    if folder.blocks and folder.schema is not None and metadata.schema != folder.schema:
        # The schema in the blocks takes precedence, since a checksum covers it.
        metadata = Metadata.of_schema(folder.schema, metadata.context)
    index = folder.index
    totals = {"total_timesteps": index.num_frames, "total_trajectories": len(index)}
    return {**metadata.to_json(), **totals}


def save_index_cache(data_dir: str | os.PathLike[str], writer: str = "tool") -> None:
    """Write the index cache of a data folder atomically. Only writers and tools call this.

    The cache only makes opening faster. It may be deleted at any time. Readers ignore its entries
    for changed files.

    Args:
        data_dir: The folder.
        writer: Name of the calling writer. It becomes part of the name of the temporary file, so
            that the cleanup after a killed writer finds the file.
    """
    folder = BlockFolder.at(data_dir)
    names = sorted(folder.blocks)
    blocks = [folder.blocks[name] for name in names]
    if folder.schema is None or not blocks:
        return
    index = TrajectoryIndex(blocks).arrays()
    places = list(blocks[0].places)
    about: dict[str, Any] = {
        "version": _CACHE_VERSION,
        "schema": folder.schema.to_json(),
        "names": names,
        "places": places,
        "index": {name: len(values) for name, values in index.items()},
        "writers": [block.writer for block in blocks],
        "sequences": [block.sequence for block in blocks],
        "stamps": [(block.file_bytes, block.mtime_ns) for block in blocks],
        "bounds": list(accumulate((len(block.fragments) for block in blocks), initial=0)),
    }
    located = [[block.places[place] for place in places] for block in blocks]
    path = folder.data_dir / INDEX_CACHE_NAME
    unique = f"{os.getpid()}_{id(folder):x}"
    temporary = path.with_name(f"{TEMPORARY_PREFIX}rollout_{writer}_index_{unique}")
    with replace_file(path, temporary=temporary, durable=False) as new, open(new, "wb") as file:
        np.savez(
            file,
            about=np.frombuffer(json.dumps(about).encode(), np.uint8),
            fragments=joined_fragments(blocks),
            places=np.array(located, np.int64),
            # All index arrays are stored as one, since reading twelve takes a millisecond more.
            index=np.concatenate(list(index.values())),
        )
