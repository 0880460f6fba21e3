"""HDF5 files of other systems: what lies in them, and its rows, without trust.

One rule: an episode lies in its own file, behind hard links, and nothing takes more memory than the file can hold. What
lies there in one piece is mapped. What the datasets mean is the subject of the readers.
"""

from __future__ import annotations

import mmap
import os
import re
import threading
import weakref
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
from h5py import h5a, h5d, h5f, h5g, h5i, h5l, h5o, h5s, h5t, h5z

from storage.core.fields import DTYPES, MAX_DIMENSIONS, MAX_FIELDS, dtype_name
from storage.errors import CorruptFileError, FieldTypeError, RolloutDataError, UnsafeFileError
from storage.saving.hdf5_files import MAX_HEAP_BYTES, GuardedFile, check_text, open_hdf5, reported

from ..input_checks import KnownFiles

#: What unpacks -> how much it gives for a byte at most; other filters that unpack are not run.
_EXPANSION = {h5z.FILTER_DEFLATE: 1100, h5z.FILTER_LZF: 100}
_HARMLESS = (h5z.FILTER_SHUFFLE, h5z.FILTER_FLETCHER32)
#: Values that were never written take no byte of a file. What is larger than half a gigabyte is no empty mask.
_MAX_UNWRITTEN_BYTES, _MAX_UNPACKED_BYTES, _LIKELY_EXPANSION = 1 << 26, 1 << 29, 200
_MAX_ATTRIBUTE_BYTES = 1 << 16
#: A text in the file: its length (4 bytes), the place of its heap (8), its number there (4).
_TEXT_BYTES = 16
#: After the data of a chunk, with fletcher32.
_CHECKSUM_BYTES = 4
_MAX_DEPTH = 12
_MAX_OPEN_FILES = 8
_MAX_SURVEYS = 256
#: No link takes fewer bytes of a file.
_LINK_BYTES = 16
#: Pages of so much are mapped at most, about.
_MAX_SHOWN_BYTES = 1 << 26


class Found(NamedTuple):
    """A dataset: all its axes, what it holds, and where.

    Attributes:
        shape: Of all rows.
        kind: Key of `DTYPES`, "text", "bytes" (any number per row), or "" for what is not read.
        stored: Dtype of its bytes in the file; None if HDF5 must convert them.
        offset: Where they lie, if in one piece.
        expansion: What a byte of a chunk can unpack to; 0 if its chunks need not be looked at before they are read.
        chunk_rows: Rows of a chunk; 0 where there are no chunks.
    """

    shape: tuple[int, ...]
    kind: str
    stored: np.dtype[Any] | None
    offset: int | None
    expansion: int = 0
    chunk_rows: int = 0


class OpenFile:
    """An open file; only `Files` makes it, and holds its lock while it is used.

    Its methods raise `UnsafeFileError` where data are elsewhere, and `CorruptFileError` where the file cannot hold what
    it declares, its groups are not in a tree, or what must be there is not.
    """

    def __init__(self, path: Path, file: h5py.File, guarded: GuardedFile) -> None:
        self.path = path
        self._file = file
        #: How errors name it.
        self.num_bytes = guarded.num_bytes
        self.where = repr(str(path))
        self.descriptor = guarded.fileno()
        self._map = mmap.mmap(guarded.fileno(), 0, access=mmap.ACCESS_READ)
        self._num_shown_bytes = 0
        self._surveys: OrderedDict[str, dict[str, Found]] = OrderedDict()
        self._heavy: dict[str, set[tuple[int, ...]]] = {}  # chunks that may unpack to too much
        self.checked: set[str] = set()  # what its users have looked at
        self.num_links_left = 0  # that are listed before the groups are taken for no tree
        self.allow_links()

    def allow_links(self) -> None:
        """Allow as many links to be listed as the file can hold."""
        self.num_links_left = max(self.num_bytes // _LINK_BYTES, MAX_FIELDS)

    def _let_go(self, num_bytes: int) -> None:
        """Unmap pages of what was shown, now and then; they come back from the page cache if they are read again."""
        self._num_shown_bytes += num_bytes
        if self._num_shown_bytes > _MAX_SHOWN_BYTES and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)
            self._num_shown_bytes = 0

    def name(self, node: Any) -> str:
        """Return the path of a group or dataset in the file; "" for the whole."""
        return str(h5i.get_name(node).decode().lstrip("/"))

    def place(self, node: Any) -> str:
        """Return where a group or dataset is, for errors."""
        name = self.name(node)
        return f"{name!r} of {self.where}" if name else self.where

    def links(self, group: h5g.GroupID) -> dict[str, bool]:
        """Name the members of a group, and whether each is in it by a hard link."""
        listed: list[tuple[bytes, bool]] = []

        def take(name: bytes, link: Any) -> None:  # nothing here may raise
            listed.append((name, link.type == h5l.TYPE_HARD))

        group.links.iterate(take, info=True)
        found = {name.decode(): is_hard for name, is_hard in listed}
        self.num_links_left -= len(found)
        if self.num_links_left < 0:
            raise CorruptFileError("read", self.place(group), "groups in a tree", "links in circles")
        return found

    def numbered(self, group: str, prefix: str) -> list[str]:
        """Name the members of a group that are `prefix` and a number, in the order of the numbers; [] if it is none."""
        node = self.open(group)
        return numbered(list(self.links(node)), prefix) if isinstance(node, h5g.GroupID) else []

    def members(self, group: h5g.GroupID) -> list[str]:
        """Name the members of a group, all of which must be in the file."""
        found = self.links(group)
        if elsewhere := [name for name, is_hard in found.items() if not is_hard]:
            where = f"{elsewhere[0]!r} of {self.place(group)}"
            raise UnsafeFileError("read", where, "data in the file itself", "a link to elsewhere")
        return list(found)

    def open(self, path: str, above: Any = None) -> Any:
        """Open a group or dataset by hard links; None if it is not there."""
        node = h5g.open(self._file.id, b"/") if above is None else above
        for part in filter(None, path.split("/")):
            name = part.encode()
            if not isinstance(node, h5g.GroupID) or not node.links.exists(name):
                return None
            if node.links.get_info(name).type != h5l.TYPE_HARD:
                raise UnsafeFileError("read", f"{path!r} of {self.where}", "data in the file itself", "a link")
            node = h5o.open(node, name)
        return node

    def group(self, path: str, above: Any = None) -> h5g.GroupID:
        """Open a group, which must be there."""
        if not isinstance(node := self.open(path, above), h5g.GroupID):
            raise CorruptFileError("read", f"{path!r} of {self.where}", "a group", "nothing or a dataset")
        return node

    def survey(self, path: str) -> dict[str, Found]:
        """List all datasets in a group and the groups in it: path below it -> what it is."""
        if path not in self._surveys:
            self._surveys[path] = dict(self._walk(self.group(path), "", 0))
            if len(self._surveys) > _MAX_SURVEYS:
                self._surveys.popitem(last=False)
        return self._surveys[path]

    def _walk(self, group: h5g.GroupID, prefix: str, depth: int) -> Iterator[tuple[str, Found]]:
        for name in self.members(group):
            node = h5o.open(group, name.encode())
            if isinstance(node, h5d.DatasetID):
                yield prefix + name, self.describe(node)
            elif isinstance(node, h5g.GroupID):
                if depth == _MAX_DEPTH:
                    raise CorruptFileError(
                        "read", self.place(group), f"{_MAX_DEPTH} levels of groups", "links in circles"
                    )
                yield from self._walk(node, f"{prefix}{name}/", depth + 1)

    def describe(self, node: h5d.DatasetID) -> Found:
        """Return what a dataset holds."""
        space = node.get_space()
        offset = node.get_offset()
        expansion = 0
        chunk_rows = 0
        if space.get_simple_extent_type() not in (h5s.SIMPLE, h5s.SCALAR):
            return Found((), "", None, None)
        shape: tuple[int, ...] = space.get_simple_extent_dims()
        if len(shape) > MAX_DIMENSIONS:
            return Found(shape, "", None, None)
        kind, stored = _kind(node.get_type())
        row_bytes = _TEXT_BYTES if stored is None else stored.itemsize
        num_bytes = prod(shape) * (row_bytes if kind else 1)
        if offset is not None:
            most_bytes = self.num_bytes - offset
        else:
            settings = node.get_create_plist()
            if settings.get_layout() == h5d.VIRTUAL or settings.get_external_count():
                raise UnsafeFileError("read", self.place(node), "data in the file itself", "a reference to other files")
            if stored is None and kind and settings.get_layout() != h5d.CHUNKED and node.get_storage_size():
                kind = ""  # in the head of the dataset, where the lengths of its rows cannot be compared
            stored_bytes = node.get_storage_size()
            expansion = 1
            if settings.get_layout() == h5d.CHUNKED:
                expansion = self._expansion(node, settings)
                chunk_rows = int(settings.get_chunk()[0])
                num_bytes = max(num_bytes, 2 * prod(settings.get_chunk()) * node.get_type().get_size())
            claimed_bytes = stored_bytes * expansion
            likely_bytes = max(_MAX_UNPACKED_BYTES, stored_bytes * _LIKELY_EXPANSION)
            most_bytes = (
                min(claimed_bytes + _MAX_UNWRITTEN_BYTES, likely_bytes) if stored_bytes <= self.num_bytes else -1
            )
            expansion = expansion if claimed_bytes > _MAX_UNPACKED_BYTES and expansion > 1 else 0
        if num_bytes > most_bytes:
            got = f"{num_bytes} bytes in a file of {self.num_bytes}"
            raise CorruptFileError("read", self.place(node), "a file that holds its data", got)
        return Found(shape, kind, stored, offset, expansion, chunk_rows)

    def _expansion(self, node: h5d.DatasetID, settings: Any) -> int:
        """Return what a byte of a chunk can unpack to; 1 if nothing unpacks it."""
        filters = [settings.get_filter(number)[0] for number in range(settings.get_nfilters())]
        unpackers = [one for one in filters if one not in _HARMLESS]
        if len(unpackers) > 1 or any(one not in _EXPANSION for one in unpackers):
            raise CorruptFileError("read", self.place(node), "one of gzip and LZF, or none", f"filters {filters}")
        return _EXPANSION[unpackers[0]] if unpackers else 1

    def rows(self, path: str, found: Found, start: int, stop: int, node: Any = None) -> Any:
        """Read rows of a dataset that was described, and that may be open as `node`.

        Returns:
            `[stop - start, *shape]`, perhaps a read-only map of the file; of texts a list of str, of "bytes" of bytes.
        """
        kind = found.kind
        stored = found.stored
        offset = found.offset
        shape = (stop - start, *found.shape[1:])
        if offset is not None and stored is not None:
            row_bytes = prod(found.shape[1:]) * stored.itemsize
            self._let_go((stop - start) * row_bytes)
            rows: Any = np.ndarray(shape, stored, buffer=self._map, offset=offset + start * row_bytes)
        else:
            node = h5d.open(self._file.id, path.encode()) if node is None else node
            rows = self._read(node, found, start, shape)
        if kind == "text":
            return [bytes(item).decode() for item in rows]
        if kind == "bytes":
            return [row.tobytes() for row in rows]
        return rows != 0 if kind == "bool" else np.require(rows, DTYPES[kind][1], ["C", "A"])

    def _read(self, node: h5d.DatasetID, found: Found, start: int, shape: tuple[int, ...]) -> Any:
        """Read rows by HDF5, as they are stored where numpy knows that; in a fifth of the time of `h5py.Dataset`."""
        if found.expansion:
            self._check_chunks(node, found.expansion, start, start + shape[0])
        if found.stored is None:
            if found.kind in ("text", "bytes"):
                self._check_lengths(node, found, start, start + shape[0])
            return h5py.Dataset(node)[start : start + shape[0]]
        rows = np.empty(shape, found.stored)
        if rows.size:
            space = node.get_space()
            space.select_hyperslab((start, *[0] * (len(shape) - 1)), shape)
            node.read(h5s.create_simple(shape), space, rows, node.get_type())
        return rows

    def whole(self, path: str, found: Found, max_bytes: int = _MAX_ATTRIBUTE_BYTES) -> Any:
        """Read a small dataset: an array, a Python value or a list of texts; None if it is large, or not read."""
        row_bytes = _TEXT_BYTES if found.stored is None else found.stored.itemsize
        is_listed = len(found.shape) < 2 or found.kind != "text"
        if found.kind in ("", "bytes") or prod(found.shape) * row_bytes > max_bytes or not is_listed:
            return None
        if found.shape:
            return self.rows(path, found, 0, found.shape[0])
        node = h5d.open(self._file.id, path.encode())
        if found.kind == "text" and found.stored is None:
            self._check_lengths(node, found, 0, 1)
        value = h5py.Dataset(node)[()]
        return _text(value) if found.kind == "text" else value.item()

    def _check_chunks(self, node: h5d.DatasetID, expansion: int, start: int, stop: int) -> None:
        """Refuse chunks that unpack to more than the dataset says: HDF5 unpacks all of it before it looks."""
        name = self.name(node)
        settings = node.get_create_plist()
        if name not in self._heavy:
            heavy = self._heavy[name] = set()

            def take(chunk: Any) -> None:
                if chunk.size * expansion > _MAX_UNPACKED_BYTES:
                    heavy.add(chunk.chunk_offset)

            node.chunk_iter(take)
        shape = settings.get_chunk()
        num_bytes = prod(shape) * node.get_type().get_size() + _CHECKSUM_BYTES
        for place in [one for one in self._heavy[name] if start - shape[0] < one[0] < stop]:
            unpacker = zlib.decompressobj()
            data = node.read_direct_chunk(place)[1]
            if expansion == _EXPANSION[h5z.FILTER_LZF] or len(unpacker.decompress(data, num_bytes + 1)) > num_bytes:
                raise CorruptFileError("read", f"a chunk of {self.place(node)}", f"{num_bytes} bytes", "more")
            self._heavy[name].discard(place)

    def _check_lengths(self, node: h5d.DatasetID, found: Found, start: int, stop: int) -> None:
        """Refuse rows longer than a heap: HDF5 takes memory for what a row says of its length before it looks."""
        if found.offset is not None:
            lies = slice(found.offset + start * _TEXT_BYTES, found.offset + stop * _TEXT_BYTES)
            described = [self._map[lies]]
        else:
            settings = node.get_create_plist()
            filters = [settings.get_filter(number)[0] for number in range(settings.get_nfilters())]
            rows = settings.get_chunk()[0]
            described = []
            for first in range(start // rows * rows, stop, rows):
                skipped, data = node.read_direct_chunk((first,))
                used = [one for number, one in enumerate(filters) if not skipped >> number & 1]
                described.append(_unpacked(data, used, rows * _TEXT_BYTES))
        for one in described:
            lengths = np.frombuffer(one, "<u4")[:: _TEXT_BYTES // 4]
            if len(lengths) and lengths.max() > MAX_HEAP_BYTES:
                got = f"{lengths.max()} bytes"
                raise CorruptFileError("read", f"a row of {self.where}", f"at most {MAX_HEAP_BYTES} bytes", got)

    def attribute(self, node: Any, name: str) -> Any:
        """Return the value of an attribute: a Python value, an array or a list of texts; None if there is none."""
        if not h5a.exists(node, name.encode()):
            return None
        found = h5a.open(node, name.encode())
        kind = found.get_type().get_class()
        if kind not in (h5t.STRING, h5t.INTEGER, h5t.FLOAT, h5t.ENUM):
            return None
        if found.get_space().get_simple_extent_type() not in (h5s.SIMPLE, h5s.SCALAR):
            return None
        if not 0 < prod(found.shape) * found.get_type().get_size() <= _MAX_ATTRIBUTE_BYTES:
            return None
        check_text(node, name.encode(), found)
        if found.shape == () and kind in (h5t.INTEGER, h5t.FLOAT):
            number = np.empty((), found.dtype)
            found.read(number)
            return number.item()
        value = h5py.AttributeManager(_Owner(node))[name]
        if isinstance(value, np.ndarray):
            texts = [_text(item) for item in value.ravel()] if value.dtype.kind in "OS" else []
            return value if not texts else texts[0] if len(texts) == 1 else texts
        return _text(value) if isinstance(value, bytes) else getattr(value, "item", lambda: value)()

    def attributes(self, node: Any, without: Sequence[str] = ()) -> dict[str, Any]:
        """Return all attributes of a group or dataset that are texts or numbers."""
        names: list[bytes] = []
        h5a.iterate(node, lambda name, *_: names.append(name))
        found = {name: self.attribute(node, name) for name in map(bytes.decode, names) if name not in without}
        return {name: value for name, value in found.items() if value is not None}


class Files:
    """HDF5 files that are opened when they are read, and kept open by each process for itself.

    May be pickled and used after a fork, which takes no open file along. A file that was changed since it was first
    opened is refused.
    """

    def __init__(self) -> None:
        self._known = KnownFiles()
        self._forget()

    def _forget(self) -> None:
        self._process, self._lock = os.getpid(), threading.RLock()
        self._open: OrderedDict[Path, tuple[ExitStack, OpenFile]] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {"_known": self._known}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    @contextmanager
    def use(self, path: Path) -> Iterator[OpenFile]:
        """Use a file; one thread at a time.

        Raises:
            CorruptFileError: It is damaged, or has changed; also for what the block raises because of the file.
        """
        if self._process != os.getpid():
            self._forget()
        with self._lock, reported(repr(str(path))):
            if path not in self._open:
                self._open[path] = self._opened(path)
                if len(self._open) > _MAX_OPEN_FILES:
                    self._open.popitem(last=False)[1][0].close()
            self._open.move_to_end(path)
            self._known.check(path, os.fstat(self._open[path][1].descriptor))
            self._open[path][1].allow_links()
            yield self._open[path][1]

    def _opened(self, path: Path) -> tuple[ExitStack, OpenFile]:
        with ExitStack() as stack:
            self._known.check(path)
            guarded = GuardedFile(path)
            file, _ = stack.enter_context(open_hdf5(path, guarded))
            self._known.check(path, os.fstat(guarded.fileno()))
            closing = stack.pop_all()
            opened = OpenFile(path, file, guarded)
            # While Python is there to answer HDF5, which ends the process with a fault when it closes what is left.
            weakref.finalize(opened, closing.close)
            return closing, opened
        raise AssertionError("unreachable")


class _Owner(NamedTuple):
    """What h5py's view of attributes asks for."""

    id: Any


def numbered(names: Sequence[str], pattern: str) -> list[str]:
    """Return the names that are `pattern` and a number, in the order of the numbers."""
    matches = [(name, re.fullmatch(rf"{pattern}(\d{{1,18}})", name)) for name in names]
    return [name for _, name in sorted((int(match[1]), name) for name, match in matches if match)]


def hdf5_names(folder: Path) -> list[str]:
    """Name the HDF5 files of a folder by their endings; those that start with a dot are no data."""
    return [one.name for one in folder.iterdir() if one.suffix in (".hdf5", ".h5") and not one.name.startswith(".")]


def matches(path: Path, test: Callable[[OpenFile], bool]) -> bool:
    """Return whether a path is an HDF5 file that passes a test; nothing is raised."""
    with suppress(RolloutDataError, OSError):
        if path.is_file() and h5f.is_hdf5(os.fsencode(path)):
            guarded = GuardedFile(path)
            with open_hdf5(path, guarded) as (file, _):
                return test(OpenFile(path, file, guarded))
    return False


def _kind(sort: h5t.TypeID) -> tuple[str, np.dtype[Any] | None]:
    """Return what a type of HDF5 holds, and the dtype of its bytes if numpy knows them."""
    family = sort.get_class()
    if family == h5t.STRING:
        return "text", None if sort.is_variable_str() else np.dtype(f"S{sort.get_size()}")
    if family == h5t.VLEN:
        inner = sort.get_super()
        return ("bytes", None) if inner.get_class() == h5t.INTEGER and inner.get_size() == 1 else ("", None)
    if family not in (h5t.INTEGER, h5t.FLOAT, h5t.ENUM):
        return "", None
    with suppress(FieldTypeError, TypeError, ValueError):
        dtype = np.dtype(sort.dtype.str)
        name = dtype_name(dtype)
        is_plain = family == h5t.ENUM or sort.equal(h5t.py_create(dtype))
        return name, (np.dtype("u1") if name == "bool" else dtype) if is_plain else None
    return "", None


def _unpacked(data: bytes, filters: Sequence[int], num_bytes: int) -> bytes:
    """Undo the filters of a chunk of descriptions of texts."""
    for one in reversed(filters):
        if one == h5z.FILTER_DEFLATE:
            data = zlib.decompressobj().decompress(data, num_bytes)
        elif one == h5z.FILTER_SHUFFLE:
            data = np.frombuffer(data, np.uint8).reshape(_TEXT_BYTES, -1).T.tobytes()
        else:
            raise CorruptFileError("read", "rows of different lengths", "gzip or no compression", f"filter {one}")
    return data


def _text(value: Any) -> Any:
    return value.decode() if isinstance(value, bytes) else value
