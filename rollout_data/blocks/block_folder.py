"""A folder of block files: which blocks are there, which are damaged, and the cache of it all.

One rule: a bad file is one entry in `problems` and never hides the good ones beside it. Reading
creates and changes nothing in the folder; only writers and tools call `save_index_cache`.
Nothing is concluded from a clock of the file system, and nothing is gone because a listing lacks it: both may be late.
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
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from storage.core import arguments
from storage.core.fields import Schema
from storage.core.threads import each
from storage.errors import CorruptFileError, DataFileError, MissingFolderError, RolloutDataError, UsageError

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
from .edit_blocks import named_edit, not_in_force
from .folder_metadata import BAD_METADATA, ENDS, UNKNOWN, Metadata, load_metadata, read_document
from .trajectory_index import Int64s, TrajectoryIndex, joined_fragments
from .write_block import TEMPORARY_PREFIX

INDEX_CACHE_NAME = ".index.npz"
_CACHE_VERSION = 4
#: What a damaged cache makes the readers of zip, npy and JSON raise; RuntimeError covers odd zip members.
BAD_CACHE = (*BAD_METADATA, EOFError, ArithmeticError, MemoryError, RuntimeError, zipfile.BadZipFile, zlib.error)
#: A folder's own time tells of no change within this time after another one: FAT counts in steps of 2 s.
_COARSE_S = 2.0
#: All files are looked at for this share of the time at most, and at most once a second, unless one came or went.
LOOK_SHARE = 0.005
#: How often a look is repeated because an edit was replaced meanwhile.
_NUM_LOOKS = 10
#: Size in bytes and time of the last change in ns: by these a file is known again.
FileStamp = tuple[int, int]


def stamp_of(path: Path) -> FileStamp | None:
    """Return the stamp of a regular file; None for folders, pipes and devices."""
    found = os.stat(path)
    return (found.st_size, found.st_mtime_ns) if stat.S_ISREG(found.st_mode) else None


def kind_of_file(path: Path) -> str:
    """Name the kind of a file, for errors."""
    mode = path.stat().st_mode
    kinds = (
        (stat.S_ISFIFO, "a pipe"),
        (stat.S_ISSOCK, "a socket"),
        (stat.S_ISBLK, "a device"),
        (stat.S_ISCHR, "a device"),
    )
    return next((name for is_kind, name in kinds if is_kind(mode)), "a file")


def entries_of(folder: Path) -> list[os.DirEntry[str]]:
    """List a folder.

    Raises:
        UsageError: There is no such folder.
        DataFileError: It may not be listed.
    """
    where = repr(str(folder))
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except FileNotFoundError as cause:
        raise MissingFolderError("open the data folder", where, "a folder", "nothing there") from cause
    except NotADirectoryError as cause:
        raise UsageError("open the data folder", where, "a folder", kind_of_file(folder)) from cause
    except OSError as cause:
        advice = "See to it that it may be read, and entered"
        raise DataFileError("open the data folder", where, "a folder that can be listed", str(cause), advice) from cause


def block_entries(data_dir: Path) -> list[os.DirEntry[str]]:
    """List what is opened as blocks in a folder; errors as of `entries_of`."""
    return [one for one in entries_of(data_dir) if one.name.endswith((".h5", ".hdf5")) and one.name[0] != "."]


class BlockFolder:
    """The blocks of one data folder.

    Args:
        data_dir: The folder.
        verify_on_open: Check every checksum of a block when it is first seen.
        label: Goes before the writers' names, so that those of several folders differ.

    Attributes:
        schema: Fields of the blocks; without a block those that metadata.json declares, or None.
        blocks: File name -> `Block`, of the intact blocks; of edits those that hold.
        replaced: File name -> `Block`, of the edits that do not hold (any more).
        problems: File name -> what is wrong with a file that was left out, metadata.json included.
        built: Index arrays from the cache, valid for exactly the present blocks, or None.
        has_unknown_ends: Notes may say how trajectories ended: metadata.json says so, or cannot be read.
    """

    def __init__(self, data_dir: str | os.PathLike[str], verify_on_open: bool = False, label: str = "") -> None:
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
        self._taken: object = None  # what was found when the blocks were last opened
        self._folder_is: object = None  # time of change and inode, of the folder
        self._changed_s = self._listed_s = self._due_s = -math.inf  # of the monotonic clock
        self._use_cache = not verify_on_open
        self._num_openers = 1
        self.has_unknown_ends = self._is_schema_fixed = self._has_missed_edit = False

    @classmethod
    def at(cls, data_dir: str | os.PathLike[str], verify_on_open: bool = False) -> BlockFolder:
        """Open a folder and look at it."""
        folder = cls(data_dir, verify_on_open)
        folder.refresh()
        return folder

    @property
    def index(self) -> TrajectoryIndex:
        """The trajectories in the blocks that are there as of the last look; computed each time."""
        return TrajectoryIndex(list(self.blocks.values()), built=self.built)

    def keep_only(self, blocks: Sequence[Block]) -> None:
        """Hold the blocks of an earlier look that are intact and unchanged, and its edits, not the present blocks."""
        present = {block.identity for block in self.blocks.values()}
        self.blocks = {block.path.name: block for block in blocks if block.is_edit or block.identity in present}
        self.replaced = {}
        self.built = None

    def _place_of(self, data_dir: str | os.PathLike[str]) -> Path:
        # Absolute, as the process may change its working directory.
        return arguments.path("open the data folder", "", data_dir).absolute()

    def refresh(self) -> bool:
        """Look at the folder again; open what is new, forget what is gone. True if anything changed."""
        has_changed = self._look()
        for _ in range(_NUM_LOOKS):
            if not self._has_missed_edit:
                break
            self._has_missed_edit = False
            has_changed |= self._look()
        return has_changed

    def _look(self) -> bool:
        found = self.found_now()
        if found is self._taken:
            return False
        if self._use_cache:
            self._use_cache = False
            self._load_cache(found)
        if has_changed := found != self._stamps or not (self._is_schema_fixed or not self.blocks):
            self._take(found)
        self._taken = found
        return has_changed

    def _take(self, found: Mapping[str, FileStamp]) -> None:
        """Open what is new, forget what is gone."""
        for name in [name for name in self._stamps if found.get(name) != self._stamps[name]]:
            self._forget(name)
        self.blocks |= self.replaced
        opened = self._opened(found, [name for name in found if name not in self._stamps])
        if self._is_schema_fixed:
            if opened and not self.has_unknown_ends:  # the ends of new blocks may be in notes
                _, problem = self._declared_schema()
                self._report_metadata(problem)
        elif self._fix_schema(opened):
            # The cache knew blocks that are fewer than others now: each is named when it is opened.
            known = list(self.blocks)
            for name in known:
                self._forget(name)
            opened |= self._opened(found, [name for name in known if name in found])
        self._keep(opened)
        self._stamps = dict(found)  # here: where this was interrupted, the next look opens what is missing
        self._keep_edits()

    def _keep_edits(self) -> None:
        """Set aside the edits that do not hold."""
        self.replaced = {name: self.blocks.pop(name) for name in not_in_force(self.blocks, self._stamps)}
        self.built = None if self.replaced else self.built

    def _forget(self, name: str) -> None:
        del self._stamps[name]
        for known in (self.blocks, self.replaced, self.problems):
            known.pop(name, None)
        self.built = None

    def _opened(self, found: Mapping[str, FileStamp], names: Sequence[str]) -> dict[str, tuple[Schema, Block]]:
        """Open files, by name in order."""
        names = sorted(names)
        self.built = None if names else self.built
        opened = each(lambda name: self._open(name, found[name]), names, self._num_openers)
        return {name: block for name, block in zip(names, opened, strict=True) if block is not None}

    def _fix_schema(self, opened: Mapping[str, tuple[Schema, Block]]) -> bool:
        """Choose the fields of this folder; True if the blocks known so far have others.

        Blocks have their fields under a checksum, metadata.json has not: where it names the fields of
        none of them, they are right. Of several kinds of blocks it tells which one is meant, or else
        the most frequent is.
        """
        votes = Counter({self.schema: len(self.blocks)} if self.schema is not None and self.blocks else {})
        votes.update(schema for schema, _ in opened.values())
        declared, problem = self._declared_schema()
        chosen = declared
        if votes and (declared is None or declared not in votes):
            chosen = max(votes, key=lambda schema: votes[schema])
            if declared is not None:
                problem = _unlike_blocks(self.data_dir / METADATA_NAME, chosen.difference(declared))
        self._report_metadata(problem)
        before, self.schema, self._is_schema_fixed = self.schema, chosen, bool(votes)
        return bool(self.blocks) and chosen != before

    def _keep(self, opened: Mapping[str, tuple[Schema, Block]]) -> None:
        """Take the opened blocks that have the fields of this folder, each once."""
        held = {(block.writer, block.sequence): block for name, block in self.blocks.items() if name not in opened}
        for name, (schema, block) in sorted(opened.items(), key=lambda item: item[0]):
            other = held.get((block.writer, block.sequence))
            where = repr(str(block.path))
            if self.schema is not None and (difference := self.schema.difference(schema)):
                expected = "the fields of the blocks beside it"
                advice = "Move it to a folder of its own"
                self.problems[name] = DataFileError("read the block", where, expected, difference, advice)
            elif other is not None:
                got = f"a second copy of {other.path.name!r}"
                advice = "Remove one of them"
                self.problems[name] = DataFileError("read the block", where, "each block once", got, advice)
            else:
                self.blocks[name] = held[block.writer, block.sequence] = block

    def found_now(self) -> Mapping[str, FileStamp]:
        """Return the files that may be blocks; the same object, for one system call, where none came or went.

        A file that was overwritten in its place may be noticed later: after a second, or 200 times what a look takes.
        """
        start_s = time.monotonic()
        with suppress(OSError):  # listing it tells
            about = os.stat(self.data_dir)
            if self._folder_is != (about.st_mtime_ns, about.st_ino):
                self._folder_is = (about.st_mtime_ns, about.st_ino)
                self._changed_s = start_s
            if self._listed_s >= self._changed_s + _COARSE_S and start_s < self._due_s:
                return self._found
        is_full = start_s >= self._due_s
        found = self._list_files(is_full)
        self._found = self._found if found == self._found else found
        self._listed_s = start_s
        if is_full:
            self._due_s = time.monotonic() + max(1.0, (time.monotonic() - start_s) / LOOK_SHARE)
        return self._found

    def _list_files(self, is_full: bool) -> dict[str, FileStamp]:
        """Files that may be blocks, with their size and time, of known ones as before unless `is_full`."""
        known = {} if is_full else self._found
        before = self._inodes
        self._inodes = {entry.name: entry.inode() for entry in block_entries(self.data_dir)}
        stamps = {}
        for name in self._inodes | dict.fromkeys(self._found):  # a listing may be late: those found before may be there
            if name in known and before.get(name) == self._inodes.get(name, -1):
                stamps[name] = known[name]
            elif (stamp := self._stamp_of(name)) is not None:
                stamps[name] = stamp
        return stamps

    def _stamp_of(self, name: str) -> FileStamp | None:
        """Size and time of a file that may be a block; what is no file becomes a problem."""
        try:
            if (stamp := stamp_of(self.data_dir / name)) is None:  # opening a pipe would wait
                where = repr(str(self.data_dir / name))
                self.problems[name] = CorruptFileError("read the block", where, "a file", "no file")
            return stamp
        except FileNotFoundError:  # removed by retention since it was listed, or a dead link
            return None
        except OSError as error:
            self.problems[name] = _as_problem(self.data_dir / name, error)
            return None

    def _report_metadata(self, problem: RolloutDataError | None) -> None:
        self.problems.pop(METADATA_NAME, None)
        self.problems |= {} if problem is None else {METADATA_NAME: problem}

    def _declared_schema(self) -> tuple[Schema | None, RolloutDataError | None]:
        """The fields that metadata.json declares, and what is wrong with it; (None, None) if there is none."""
        path = self.data_dir / METADATA_NAME
        self.has_unknown_ends = True
        try:
            document = self.read_document()
            self.has_unknown_ends = document.get(ENDS) == UNKNOWN
            return Schema.from_json(document["fields"]) or None, None
        except FileNotFoundError:
            return None, None
        except BAD_METADATA as cause:
            problem = _unlike_blocks(path, f"{type(cause).__name__}: {cause}"[:300])
            problem.__cause__ = cause
            return None, problem

    def read_document(self) -> dict[str, Any]:
        """Read metadata.json as it is; errors as of `metadata.read_document`."""
        return read_document(self.data_dir / METADATA_NAME)

    def header_of(self, block: Block) -> BlockHeader:
        """Read the header of a block of this folder."""
        return read_header(block.path)

    def _open_block(self, path: Path, stamp: FileStamp) -> BlockHeader:
        return open_block(path, verify=self.verify_on_open)

    def _open(self, name: str, stamp: FileStamp) -> tuple[Schema, Block] | None:
        """Open a file; None if it is gone, or a problem now."""
        path = self.data_dir / name
        try:
            header = self._open_block(path, stamp)
        except FileNotFoundError:
            self._has_missed_edit |= named_edit(name) is not None
            return None
        except (RolloutDataError, OSError) as error:
            self.problems[name] = error if isinstance(error, RolloutDataError) else _as_problem(path, error)
            return None
        places = {(table, column): at for table, columns in header.locations.items() for column, at in columns.items()}
        writer = self.label + header.writer
        block = Block(header.path, writer, header.sequence, header.fragments, places, *stamp)
        return header.schema, replace(block, fragment_sums=self._fragment_sums(header, stamp))

    def _fragment_sums(self, header: BlockHeader, stamp: FileStamp) -> FragmentSums | None:
        """Return the checksums with which rows of a block are compared as they are read; see `Block`."""
        return None

    def _load_cache(self, found: Mapping[str, FileStamp]) -> None:
        """Take what the cache knows of files that are still there; a bad cache is no cache."""
        path = self.data_dir / INDEX_CACHE_NAME
        try:
            if stamp_of(path) is None:
                return
            with np.load(path, allow_pickle=False) as cache:
                if any(member.compress_type != zipfile.ZIP_STORED for member in cache.zip.infolist()):
                    return
                about = json.loads(bytes(cache["about"]))
                if about["version"] != _CACHE_VERSION:
                    return
                schema, places = Schema.from_json(about["schema"]), [(table, name) for table, name in about["places"]]
                names, writers, stamps = about["names"], about["writers"], about["stamps"]
                sequences, bounds = (np.array(about[name], np.int64) for name in ("sequences", "bounds"))
                fragments, located = cache["fragments"], cache["places"]
                num_rows = _check_cached(schema, places, fragments, bounds, located, np.array(stamps, np.int64))
                at = [dict(zip(places, map(tuple, block), strict=True)) for block in located.tolist()]
                columns = names, writers, sequences.tolist(), np.split(fragments, bounds[1:-1]), at, map(tuple, stamps)
                blocks = {
                    name: Block(self.data_dir / name, self.label + writer, sequence, part, at, *stamp)
                    for name, writer, sequence, part, at, stamp in zip(*columns, strict=True)
                    if found.get(name) == stamp
                }
                index, stops = cache["index"].astype(np.int64, copy=False), np.cumsum(list(about["index"].values()))
                built = dict(zip(about["index"], np.split(index, stops[:-1]), strict=True))
                is_all = list(blocks) == names and len(blocks) == len(found)
                if is_all and not TrajectoryIndex(list(blocks.values()), built=built).is_valid(*num_rows):
                    return
        except BAD_CACHE:
            return
        self.schema = schema
        self.blocks = blocks
        self.built = built if is_all else None
        self._stamps = {name: found[name] for name in blocks}
        self._keep_edits()


def _unlike_blocks(path: Path, got: str) -> CorruptFileError:
    advice = "The blocks are read by the fields that they hold; 'rollout-data verify --repair' makes this file anew"
    return CorruptFileError("use the metadata", repr(str(path)), "the fields of the blocks beside it", got, advice)


def _check_cached(
    schema: Schema,
    places: list[tuple[str, str]],
    fragments: np.ndarray,
    bounds: np.ndarray,
    located: np.ndarray,
    stamps: np.ndarray,
) -> list[Int64s]:
    """Check what a cache says of B blocks with C columns as `read_header` checks it in each of them.

    Args:
        schema: Their fields.
        places: `[C]`, table and column.
        fragments, bounds: `[F]` of `FRAGMENT_DTYPE`, int64 `[B + 1]`, first fragment of each block.
        located: int64 `[B, C, 2]`, byte offset and number of rows of each column.
        stamps: int64 `[B, 2]`, a `FileStamp` each.

    Returns:
        int64 `[B]`, the rows in the two tables of each block.

    Raises:
        CorruptFileError: Rows lie outside their file, or fragments outside the rows.
    """
    columns = [layouts_of(schema)[table].columns[name] for table, name in places]
    row_bytes = np.array([0.0 if column.is_coded else column.row_bytes for column in columns])  # a product may not wrap
    tables = [located[:, [place[0] == table for place in places], 1] for table in (DATA, FINAL)]
    num_rows = [table.max(axis=1, initial=0) for table in tables]
    is_right = (located >= 0).all() and (located[..., 0] + located[..., 1] * row_bytes <= stamps[:, :1]).all()
    is_right &= fragments.dtype == FRAGMENT_DTYPE and bounds[0] == 0 and bounds[-1] == len(fragments)
    if not (is_right and (tables[0] == num_rows[0][:, None]).all()):
        raise CorruptFileError("use the index cache", "", "rows within their files")
    block = np.repeat(np.arange(len(located)), np.diff(bounds))
    check_fragments(fragments, *(counts[block] for counts in num_rows))
    return num_rows


def _as_problem(path: Path, error: OSError) -> CorruptFileError:
    problem = CorruptFileError("read the block", repr(str(path)), "a readable file", str(error))
    problem.__cause__ = error
    return problem


def read_metadata(data_dir: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a folder's metadata as a plain dict with the established keys.

    `total_timesteps` and `total_trajectories` are counted in the blocks, over the trajectories
    that a reader would get; damaged blocks do not count.

    Raises:
        DataFileError: There is neither a usable metadata.json nor a readable block.
    """
    metadata = load_metadata(data_dir)
    if metadata is None:
        raise DataFileError("read the metadata of", repr(str(data_dir)), f"a {METADATA_NAME} or a block", "neither")
    return counted_metadata(BlockFolder.at(data_dir), metadata)


def counted_metadata(folder: BlockFolder, metadata: Metadata) -> dict[str, Any]:
    """Return metadata of a folder with the totals that are counted in its blocks, as of the last look."""
    if folder.blocks and folder.schema is not None and metadata.schema != folder.schema:
        metadata = Metadata.of_schema(folder.schema, metadata.context)  # the blocks are right
    index = folder.index
    return {**metadata.to_json(), "total_timesteps": index.num_frames, "total_trajectories": len(index)}


def save_index_cache(data_dir: str | os.PathLike[str], writer: str = "tool") -> None:
    """Write the index cache of a folder, atomically. For writers and tools; readers never write.

    `writer` names the temporary file, so that what a dead writer leaves is found and removed.
    The cache is an accelerator: it may be deleted at any time and is ignored where it disagrees
    with the files.
    """
    folder = BlockFolder.at(data_dir)
    names = sorted(folder.blocks)
    blocks = [folder.blocks[name] for name in names]
    if folder.schema is None or not blocks:
        return
    index = TrajectoryIndex(blocks).arrays()
    places = list(blocks[0].places)
    about: dict[str, Any] = {"version": _CACHE_VERSION, "schema": folder.schema.to_json(), "names": names}
    about |= {"places": places, "index": {name: len(values) for name, values in index.items()}}
    about["writers"], about["sequences"] = [block.writer for block in blocks], [block.sequence for block in blocks]
    about["stamps"] = [(block.file_bytes, block.mtime_ns) for block in blocks]
    about["bounds"] = list(accumulate((len(block.fragments) for block in blocks), initial=0))
    path = folder.data_dir / INDEX_CACHE_NAME
    temporary = path.with_name(f"{TEMPORARY_PREFIX}rollout_{writer}_index_{os.getpid()}_{id(folder):x}")
    try:
        with open(temporary, "wb") as file:
            np.savez(
                file,
                about=np.frombuffer(json.dumps(about).encode(), np.uint8),
                fragments=joined_fragments(blocks),
                places=np.array([[block.places[place] for place in places] for block in blocks], np.int64),
                index=np.concatenate(list(index.values())),  # one array: to read twelve takes a millisecond more
            )
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
