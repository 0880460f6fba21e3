"""A folder of block files: which blocks are there, which are damaged, and the cache of it all.

One rule: a bad file is one entry in `problems` and never hides the good ones beside it. Reading
creates and changes nothing in the folder; only writers and tools call `save_index_cache`.
"""

from __future__ import annotations

import json
import os
import stat
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from storage.core.durable import as_path
from storage.core.fields import Schema
from storage.errors import CorruptFileError, DataFileError, RolloutDataError, UsageError

from ..format.block_file import TEMPORARY_PREFIX, open_block
from ..format.header import DATA, FINAL, FRAGMENT_DTYPE, MAX_METADATA_BYTES, METADATA_NAME, layouts_of
from .index import Block, TrajectoryIndex

INDEX_CACHE_NAME = ".index.npz"
_CACHE_VERSION = 2
#: What a damaged cache makes the readers of zip, npy and JSON raise; RuntimeError covers odd zip members.
_BAD_CACHE = (
    OSError, LookupError, ValueError, TypeError, AttributeError, EOFError, ArithmeticError, MemoryError, RuntimeError,
    zipfile.BadZipFile, zlib.error, RolloutDataError,
)  # fmt: skip


#: Size in bytes and time of the last change in ns: by these a file is known again.
FileStamp = tuple[int, int]


def stamp_of(path: Path) -> FileStamp | None:
    """Give the stamp of a regular file; None for folders, pipes and devices."""
    found = os.stat(path)
    return (found.st_size, found.st_mtime_ns) if stat.S_ISREG(found.st_mode) else None


def block_names(data_dir: Path) -> list[str]:
    """Name what is opened as blocks in a folder.

    Raises:
        UsageError: There is no such folder.
        DataFileError: It may not be listed.
    """
    try:
        with os.scandir(data_dir) as entries:
            return [entry.name for entry in entries if entry.name.endswith((".h5", ".hdf5")) and entry.name[0] != "."]
    except (FileNotFoundError, NotADirectoryError) as cause:
        raise UsageError("open the data folder", repr(str(data_dir)), "a folder", "none") from cause
    except OSError as cause:
        raise unlisted(data_dir, cause) from cause


class BlockFolder:
    """The blocks of one data folder.

    Args:
        data_dir: The folder.
        verify_on_open: Check every checksum of a block when it is first seen.
        label: Goes before the writers' names, so that those of several folders differ.

    Attributes:
        schema: Fields of the blocks; without a block those that metadata.json declares, or None.
        blocks: File name -> `Block`, of the intact blocks.
        problems: File name -> what is wrong with a file that was left out, metadata.json included.
        built: Index arrays from the cache, valid for exactly the present blocks, or None.
    """

    def __init__(self, data_dir: str | os.PathLike[str], verify_on_open: bool = False, label: str = "") -> None:
        self.label = label
        self.data_dir = as_path(data_dir, "open the data folder").absolute()  # whatever directory the process goes to
        self.verify_on_open = verify_on_open
        self.schema: Schema | None = None
        self.blocks: dict[str, Block] = {}
        self.problems: dict[str, RolloutDataError] = {}
        self.built: Mapping[str, np.ndarray] | None = None
        self._stamps: dict[str, FileStamp] = {}
        self._use_cache = not verify_on_open
        self._is_schema_fixed = False

    def refresh(self) -> bool:
        """Look at the folder again; open what is new, forget what is gone. True if anything changed."""
        found = self._list_files()
        if self._use_cache:
            self._use_cache = False
            self._load_cache(found)
        if found == self._stamps and (self._is_schema_fixed or not self.blocks):
            return False
        for name in [name for name in self._stamps if found.get(name) != self._stamps[name]]:
            del self._stamps[name]
            self.blocks.pop(name, None)
            self.problems.pop(name, None)
            self.built = None
        opened = self._open_new(found)
        if not self._is_schema_fixed and (strangers := self._fix_schema(opened)):
            # The cache knew blocks that are fewer than others now: each is named when it is opened.
            self.blocks = {}
            for name in strangers:
                del self._stamps[name]
            opened |= self._open_new(found)
        self._keep(opened)
        return True

    def _open_new(self, found: Mapping[str, FileStamp]) -> dict[str, tuple[Schema, Block]]:
        """Open the files that are not known yet, by name in order."""
        names = sorted(name for name in found if name not in self._stamps)
        self._stamps |= {name: found[name] for name in names}
        self.built = None if names else self.built
        return {name: block for name in names if (block := self._open(name, found[name])) is not None}

    def _fix_schema(self, opened: Mapping[str, tuple[Schema, Block]]) -> Mapping[str, Block]:
        """Choose the fields of this folder; gives the blocks known so far if they have others.

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
        self.problems.pop(METADATA_NAME, None)
        if problem is not None:
            self.problems[METADATA_NAME] = problem
        strangers = self.blocks if chosen != self.schema else {}
        self.schema, self._is_schema_fixed = chosen, bool(votes)
        return strangers

    def _keep(self, opened: Mapping[str, tuple[Schema, Block]]) -> None:
        """Take the opened blocks that fit the others."""
        held = {(block.writer, block.sequence): block for block in self.blocks.values()}
        for name in sorted(opened):
            schema, block = opened[name]
            key = block.writer, block.sequence
            try:
                self._check_schema(block.path, schema)
                _check_unique(block.path, held.get(key))
            except DataFileError as problem:
                self.problems[name] = problem
            else:
                self.blocks[name] = held[key] = block

    def _list_files(self) -> dict[str, FileStamp]:
        """Files that may be blocks, with their size and time; what is no file becomes a problem."""
        stamps = {}
        for name in block_names(self.data_dir):
            path = self.data_dir / name
            try:
                stamp = stamp_of(path)
            except FileNotFoundError:  # removed by retention since it was listed, or a dead link
                continue
            except OSError as error:
                self.problems[name] = _as_problem(path, error)
                continue
            if stamp is None:  # opening a pipe would wait for ever
                self.problems[name] = CorruptFileError("read the block", repr(str(path)), "a file", "no file")
            else:
                stamps[name] = stamp
        return stamps

    def _declared_schema(self) -> tuple[Schema | None, RolloutDataError | None]:
        """The fields that metadata.json declares, and what is wrong with it; (None, None) if there is none."""
        path = self.data_dir / METADATA_NAME
        try:
            if (stamp := stamp_of(path)) is None or stamp[0] > MAX_METADATA_BYTES:
                raise ValueError(f"no file, or one of more than {MAX_METADATA_BYTES} bytes")
            return Schema.from_json(json.loads(path.read_text(encoding="utf-8"))["fields"]) or None, None
        except FileNotFoundError:
            return None, None
        except (OSError, LookupError, ValueError, TypeError, OverflowError, RecursionError, RolloutDataError) as cause:
            problem = _unlike_blocks(path, f"{type(cause).__name__}: {cause}"[:300])
            problem.__cause__ = cause
            return None, problem

    def _open(self, name: str, stamp: FileStamp) -> tuple[Schema, Block] | None:
        """Open a file; None if it is gone, or a problem now."""
        try:
            header = open_block(self.data_dir / name, verify=self.verify_on_open)
        except FileNotFoundError:
            return None
        except (RolloutDataError, OSError) as error:
            self.problems[name] = (
                error if isinstance(error, RolloutDataError) else _as_problem(self.data_dir / name, error)
            )
            return None
        places = {(table, column): at for table, columns in header.locations.items() for column, at in columns.items()}
        writer = self.label + header.writer
        return header.schema, Block(header.path, writer, header.sequence, header.fragments, places, *stamp)

    def _check_schema(self, path: Path, schema: Schema) -> None:
        if self.schema is not None and (difference := self.schema.difference(schema)):
            raise DataFileError(
                "read the block",
                repr(str(path)),
                "the fields of the blocks beside it",
                difference,
                "Move it to a folder of its own",
            )

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
                schema = Schema.from_json(about["schema"])
                places = [(table, column) for table, column in about["places"]]
                blocks = self._cached_blocks(cache, about["names"], places, found)
                _check_places(blocks.values(), schema)
                if list(blocks) == about["names"] and len(blocks) == len(found):
                    built = {name: cache[name] for name in about["index"]}
                    _check_built(list(blocks.values()), built)
                    self.built = built
        except _BAD_CACHE:
            self.built = None
            return
        self.schema, self.blocks = schema, blocks
        self._stamps = {name: found[name] for name in blocks}

    def _cached_blocks(
        self, cache: Any, names: list[str], places: list[tuple[str, str]], found: Mapping[str, FileStamp]
    ) -> dict[str, Block]:
        fragments, bounds, at = cache["fragments"], cache["bounds"].tolist(), cache["places"].tolist()
        stamps, sequences = list(map(tuple, cache["stamps"].tolist())), cache["sequences"].tolist()
        writers = json.loads(bytes(cache["writers"]))
        if fragments.dtype != FRAGMENT_DTYPE or not len(names) == len(writers) == len(stamps) == len(bounds) - 1:
            raise CorruptFileError("use the index cache", repr(str(self.data_dir)))
        blocks = {}
        for k, name in enumerate(names):
            if found.get(name) == stamps[k]:
                spots = {place: (int(at[k][c][0]), int(at[k][c][1])) for c, place in enumerate(places)}
                part = fragments[bounds[k] : bounds[k + 1]]
                writer = self.label + writers[k]
                blocks[name] = Block(self.data_dir / name, writer, sequences[k], part, spots, *stamps[k])
        return blocks


def unlisted(path: Path, cause: OSError) -> DataFileError:
    """Build the error for a folder that may not be listed."""
    advice = "See to it that it may be read, and entered"
    return DataFileError("open the data folder", repr(str(path)), "a folder that can be listed", str(cause), advice)


def _unlike_blocks(path: Path, got: str) -> CorruptFileError:
    advice = "The blocks are read by the fields that they hold; 'rollout-data verify --repair' makes this file anew"
    return CorruptFileError("use the metadata", repr(str(path)), "the fields of the blocks beside it", got, advice)


def _check_unique(path: Path, other: Block | None) -> None:
    if other is not None:
        copy = f"a second copy of {other.path.name!r}"
        raise DataFileError("read the block", repr(str(path)), "each block once", copy, "Remove one of them")


def _check_places(blocks: Iterable[Block], schema: Schema) -> None:
    """Raise unless the rows of cached blocks lie within their files, and the fragments within the rows."""
    layouts = layouts_of(schema)
    for block in blocks:
        num_rows: dict[str, set[int]] = {DATA: set(), FINAL: set()}
        for (table, column), (offset, rows) in block.places.items():
            num_rows[table].add(rows)
            layout = layouts[table].columns[column]
            num_bytes = 0 if layout.is_coded else rows * layout.row_bytes  # of chunks the file itself tells more
            if min(offset, rows) < 0 or offset + num_bytes > block.file_bytes:
                raise CorruptFileError("use the index cache", repr(str(block.path)), "rows within the file")
        part = block.fragments
        rows, finals = (max(num_rows[table], default=0) for table in (DATA, FINAL))
        is_wrong = (part["row"] < 0) | (part["length"] < 0) | (part["row"] > rows - part["length"])
        if (is_wrong | (part["final_row"] >= finals) | (part["final_row"] < -1)).any() or len(num_rows[DATA]) > 1:
            raise CorruptFileError("use the index cache", repr(str(block.path)), "fragments within the rows")


def _check_built(blocks: list[Block], built: Mapping[str, np.ndarray]) -> None:
    """Raise unless the cached index arrays agree with their blocks."""
    rows = {
        table: np.array([max((n for (t, _), (_, n) in b.places.items() if t == table), default=0) for b in blocks], int)
        for table in (DATA, FINAL)
    }
    ok, reason = TrajectoryIndex(blocks, built).check_valid(rows[DATA], rows[FINAL])
    if not ok:
        raise CorruptFileError("use the index cache", "", reason, "something else")


def _as_problem(path: Path, error: OSError) -> CorruptFileError:
    problem = CorruptFileError("read the block", repr(str(path)), "a readable file", str(error))
    problem.__cause__ = error
    return problem


def save_index_cache(data_dir: str | os.PathLike[str], writer: str = "tool") -> None:
    """Write the index cache of a folder, atomically. For writers and tools; readers never write.

    `writer` names the temporary file, so that what a dead writer leaves is found and removed.
    The cache is an accelerator: it may be deleted at any time and is ignored where it disagrees
    with the files.
    """
    folder = BlockFolder(data_dir)
    folder.refresh()
    names = sorted(folder.blocks)
    blocks = [folder.blocks[name] for name in names]
    if folder.schema is None or not blocks:
        return
    index: dict[str, Any] = TrajectoryIndex(blocks).arrays()
    places = list(blocks[0].places)
    about = {
        "version": _CACHE_VERSION,
        "schema": folder.schema.to_json(),
        "names": names,
        "places": places,
        "index": list(index),
    }
    path = folder.data_dir / INDEX_CACHE_NAME
    temporary = path.with_name(f"{TEMPORARY_PREFIX}rollout_{writer}_index_{os.getpid()}_{id(folder):x}")
    try:
        with open(temporary, "wb") as file:
            np.savez(
                file,
                about=_json_bytes(about),
                writers=_json_bytes([block.writer for block in blocks]),
                stamps=np.array([(block.file_bytes, block.mtime_ns) for block in blocks], np.int64),
                sequences=np.array([block.sequence for block in blocks], np.int64),
                bounds=np.cumsum([0] + [len(block.fragments) for block in blocks]),
                fragments=np.concatenate([block.fragments for block in blocks]),
                places=np.array([[block.places[place] for place in places] for block in blocks], np.int64),
                **index,
            )
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _json_bytes(value: Any) -> np.ndarray:
    return np.frombuffer(json.dumps(value).encode(), np.uint8)
