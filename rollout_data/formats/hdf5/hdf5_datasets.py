"""Access to groups, datasets and attributes of untrusted HDF5 files.

Data must be in the file itself, reachable by hard links. The declared size of a dataset must be
plausible for the size of the file. Contiguous data are memory-mapped. Other modules map datasets to
fields.
"""

from __future__ import annotations

import mmap
import os
import re
import threading
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
from h5py import h5a, h5d, h5f, h5g, h5i, h5l, h5o, h5s, h5t, h5z

from storage.core.fields import DTYPES, MAX_DIMENSIONS, MAX_FIELDS, dtype_name
from storage.core.lru_cache import LruCache
from storage.core.threads import Owner
from storage.errors import CorruptFileError, FieldTypeError, RolloutDataError, UnsafeFileError
from storage.saving.hdf5_files import MAX_HEAP_BYTES, GuardedFile, check_text, open_hdf5, reported

from ..input_checks import KnownFiles

#: Maps the code of each supported compression filter to the maximum unpacked bytes per stored byte.
_EXPANSION = {h5z.FILTER_DEFLATE: 1100, h5z.FILTER_LZF: 100}
#: Filters that do not change the number of bytes.
_HARMLESS = (h5z.FILTER_SHUFFLE, h5z.FILTER_FLETCHER32)
#: Maximum bytes of unwritten values, which need no bytes in the file.
_MAX_UNWRITTEN_BYTES = 1 << 26
#: A dataset of up to this many unpacked bytes may have any expansion factor, because a mask of
#: zeros, for example, is packed into few bytes.
_MAX_UNPACKED_BYTES = 1 << 29
#: Maximum expansion factor (unpacked bytes per stored byte) of a larger dataset.
_LIKELY_EXPANSION = 200
_MAX_ATTRIBUTE_BYTES = 1 << 16
#: Bytes of a stored reference to a text: length (4), offset of the heap (8), index in the heap (4).
_TEXT_BYTES = 16
#: Bytes of the checksum after a chunk with the filter fletcher32.
_CHECKSUM_BYTES = 4
#: Maximum number of levels of groups.
_MAX_DEPTH = 12
_MAX_OPEN_FILES = 8
_MAX_LISTINGS = 256
#: Minimum bytes that a link, the entry of a member in a group, needs in a file.
_LINK_BYTES = 16
#: Bytes read from a memory map before its pages are released.
_MAX_MAPPED_BYTES = 1 << 26


class DatasetInfo(NamedTuple):
    """Shape, type and storage of a dataset.

    Attributes:
        shape: Shape of all rows.
        kind: Name of the dtype, such as "float32"; "text"; "bytes" (rows of variable length); or ""
            for an unreadable type.
        stored: Dtype of the values in the file; None if only HDF5 can convert them, as for texts of
            variable length.
        offset: Offset of contiguous values in the file; None for other layouts.
        expansion: Maximum expansion factor of a chunk; 0 if no chunk can unpack to too many bytes.
        chunk_rows: Number of rows of a chunk; 0 without chunks.
    """

    shape: tuple[int, ...]
    kind: str
    stored: np.dtype[Any] | None
    offset: int | None
    expansion: int = 0
    chunk_rows: int = 0

    @property
    def item_bytes(self) -> int:
        """Bytes of an element in the file."""
        return _TEXT_BYTES if self.stored is None else self.stored.itemsize


class OpenFile:
    """An open HDF5 file. `Files.use` opens it, and locks it while it is used.

    The methods raise `UnsafeFileError` for data outside of the file. They raise `CorruptFileError`
    if the declared data are larger than the file allows, if groups form a cycle, or if a required
    part is missing.

    Attributes:
        path: Path of the file.
        where: Name of the file in errors.
        num_bytes: Size of the file.
        descriptor: File descriptor.
        checked: Paths of the groups that a reader has already checked.
        num_links_left: Number of links that may still be listed. More links than the file can
            contain mean that groups form a cycle.
    """

    def __init__(self, path: Path, file: h5py.File, guarded: GuardedFile) -> None:
        self.path = path
        self.where = repr(str(path))
        self.num_bytes = guarded.num_bytes
        self.descriptor = guarded.fileno()
        self.checked: set[str] = set()
        self.num_links_left = 0
        self._file = file
        self._map = mmap.mmap(guarded.fileno(), 0, access=mmap.ACCESS_READ)
        self._num_mapped_bytes = 0
        self._listings: LruCache[str, dict[str, DatasetInfo]] = LruCache(_MAX_LISTINGS)
        #: Maps the path of each dataset to the offsets of unchecked chunks that may expand to more
        #: than `_MAX_UNPACKED_BYTES`.
        self._heavy_chunks: dict[str, set[tuple[int, ...]]] = {}
        self.allow_links()

    def allow_links(self) -> None:
        """Allow listing as many links as a file of this size can contain.

        The limit stops an endless listing of groups that form a cycle.
        """
        self.num_links_left = max(self.num_bytes // _LINK_BYTES, MAX_FIELDS)

    def _unmap_pages(self, num_bytes: int) -> None:
        """Limit the memory of the file map: release its pages after `_MAX_MAPPED_BYTES` read bytes.

        Released pages stay in the page cache. `num_bytes` are added to the number of read bytes.
        """
        self._num_mapped_bytes += num_bytes
        if self._num_mapped_bytes > _MAX_MAPPED_BYTES and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)
            self._num_mapped_bytes = 0

    def name(self, node: Any) -> str:
        """Return the path of a group or dataset in the file; "" for the root."""
        return str(h5i.get_name(node).decode().lstrip("/"))

    def place(self, node: Any) -> str:
        """Return the name of a group or dataset and of its file, for errors."""
        name = self.name(node)
        return f"{name!r} of {self.where}" if name else self.where

    def links(self, group: h5g.GroupID) -> dict[str, bool]:
        """Map the name of each member of a group to whether the member is a hard link."""
        links: list[tuple[bytes, bool]] = []

        def append(name: bytes, link: Any) -> None:  # HDF5 callbacks must not raise.
            links.append((name, link.type == h5l.TYPE_HARD))

        group.links.iterate(append, info=True)
        self.num_links_left -= len(links)
        if self.num_links_left < 0:
            raise CorruptFileError(f"{self.place(group)} contains links that form a cycle.")
        return {name.decode(): is_hard for name, is_hard in links}

    def numbered(self, group: str, prefix: str) -> list[str]:
        """Return the members of a group named `prefix` plus a number, sorted by the number.

        The list is empty if the group does not exist.
        """
        node = self.open(group)
        if not isinstance(node, h5g.GroupID):
            return []
        return numbered(list(self.links(node)), prefix)

    def members(self, group: h5g.GroupID) -> list[str]:
        """Return the members of a group; raise `UnsafeFileError` for a link out of the file."""
        links = self.links(group)
        for name, is_hard in links.items():
            if not is_hard:
                raise UnsafeFileError(
                    f"{self.place(group)} contains the link {name!r}, which is not followed. Only "
                    "data in the file are read."
                )
        return list(links)

    def open(self, path: str, above: Any = None) -> Any:
        """Open a group or dataset through hard links only; return None if it does not exist.

        Args:
            path: Path below `above`.
            above: An open group; None for the root.
        """
        node = h5g.open(self._file.id, b"/") if above is None else above
        for part in filter(None, path.split("/")):
            name = part.encode()
            if not isinstance(node, h5g.GroupID) or not node.links.exists(name):
                return None
            if node.links.get_info(name).type != h5l.TYPE_HARD:
                raise UnsafeFileError(
                    f"{path!r} of {self.where} is a link, which is not followed. Only data in the "
                    "file are read."
                )
            node = h5o.open(node, name)
        return node

    def group(self, path: str, above: Any = None) -> h5g.GroupID:
        """Open a group; raise `CorruptFileError` if it does not exist."""
        node = self.open(path, above)
        if not isinstance(node, h5g.GroupID):
            problem = "is missing" if node is None else "is a dataset, expected a group"
            raise CorruptFileError(f"{path!r} of {self.where} {problem}.")
        return node

    def datasets(self, path: str) -> dict[str, DatasetInfo]:
        """Map the path of each dataset in a group and its subgroups to its description."""
        listing = self._listings.get(path)
        if listing is None:
            listing = dict(self._walk(self.group(path), "", 0))
            self._listings.put(path, listing)
        return listing

    def _walk(
        self,
        group: h5g.GroupID,
        prefix: str,
        depth: int,
    ) -> Iterator[tuple[str, DatasetInfo]]:
        for name in self.members(group):
            node = h5o.open(group, name.encode())
            if isinstance(node, h5d.DatasetID):
                yield prefix + name, self.describe(node)
            elif isinstance(node, h5g.GroupID):
                if depth == _MAX_DEPTH:
                    raise CorruptFileError(
                        f"{self.place(group)} has more than {_MAX_DEPTH} levels of groups."
                    )
                yield from self._walk(node, f"{prefix}{name}/", depth + 1)

    def describe(self, node: h5d.DatasetID) -> DatasetInfo:
        """Return the description of a dataset after comparing its size with the file size."""
        space = node.get_space()
        if space.get_simple_extent_type() not in (h5s.SIMPLE, h5s.SCALAR):
            return DatasetInfo((), "", None, None)
        shape: tuple[int, ...] = space.get_simple_extent_dims()
        if len(shape) > MAX_DIMENSIONS:
            return DatasetInfo(shape, "", None, None)
        kind, stored = _kind(node.get_type())
        info = DatasetInfo(shape, kind, stored, node.get_offset())
        num_bytes = prod(shape) * (info.item_bytes if kind else 1)
        if info.offset is None:
            return self._describe_parts(node, info, num_bytes)
        self._check_size(node, num_bytes, self.num_bytes - info.offset)
        return info

    def _describe_parts(
        self,
        node: h5d.DatasetID,
        info: DatasetInfo,
        num_bytes: int,
    ) -> DatasetInfo:
        """Return the description of a dataset that is not contiguous.

        Args:
            node: The dataset.
            info: Description of the dataset without `expansion` and `chunk_rows`.
            num_bytes: Number of bytes of all elements.
        """
        settings = node.get_create_plist()
        layout = settings.get_layout()
        if layout == h5d.VIRTUAL or settings.get_external_count():
            raise UnsafeFileError(
                f"{self.place(node)} refers to other files, which are not read. Only data in the "
                "file are read."
            )
        stored_bytes = node.get_storage_size()
        if layout == h5d.CHUNKED:
            expansion = self._expansion(node, settings)
            chunk_shape = settings.get_chunk()
            chunk_bytes = prod(chunk_shape) * node.get_type().get_size()
            num_bytes = max(num_bytes, 2 * chunk_bytes)
            info = info._replace(chunk_rows=int(chunk_shape[0]))
        else:
            expansion = 1
            if info.stored is None and stored_bytes:
                # A compact dataset is stored in its object header, where the declared lengths of
                # texts cannot be checked. It is treated as unreadable.
                info = info._replace(kind="")

        unpacked_bytes = stored_bytes * expansion
        likely_bytes = max(_MAX_UNPACKED_BYTES, stored_bytes * _LIKELY_EXPANSION)
        most_bytes = min(unpacked_bytes + _MAX_UNWRITTEN_BYTES, likely_bytes)
        if stored_bytes > self.num_bytes:
            most_bytes = -1  # The stored bytes do not fit into the file, so any size is wrong.
        self._check_size(node, num_bytes, most_bytes)
        needs_check = unpacked_bytes > _MAX_UNPACKED_BYTES and expansion > 1
        return info._replace(expansion=expansion if needs_check else 0)

    def _check_size(self, node: h5d.DatasetID, num_bytes: int, most_bytes: int) -> None:
        if num_bytes > most_bytes:
            raise CorruptFileError(
                f"{self.place(node)} declares {num_bytes} bytes, more than a file of "
                f"{self.num_bytes} bytes can contain."
            )

    def _expansion(self, node: h5d.DatasetID, settings: Any) -> int:
        """Return the maximum expansion factor of a dataset's filters; 1 without compression."""
        filters = _filters(settings)
        unpackers = [code for code in filters if code not in _HARMLESS]
        if len(unpackers) > 1 or any(code not in _EXPANSION for code in unpackers):
            raise CorruptFileError(
                f"{self.place(node)} is compressed with filters {filters}. Only gzip and LZF are "
                "read."
            )
        return _EXPANSION[unpackers[0]] if unpackers else 1

    def rows(self, path: str, info: DatasetInfo, start: int, stop: int, node: Any = None) -> Any:
        """Read rows of a dataset.

        Args:
            path: Path in the file.
            info: Description of the dataset.
            start: First row.
            stop: One past the last row.
            node: The open dataset; None opens it.

        Returns:
            `[stop - start, *shape]`, a new array or a read-only map of the file. A list of str for
            the kind "text", and a list of bytes for the kind "bytes".
        """
        kind = info.kind
        shape = (stop - start, *info.shape[1:])
        if info.offset is not None and info.stored is not None:
            row_bytes = prod(info.shape[1:]) * info.stored.itemsize
            self._unmap_pages((stop - start) * row_bytes)
            offset = info.offset + start * row_bytes
            rows: Any = np.ndarray(shape, info.stored, buffer=self._map, offset=offset)
        else:
            node = h5d.open(self._file.id, path.encode()) if node is None else node
            rows = self._read(node, info, start, shape)
        if kind == "text":
            return [bytes(item).decode() for item in rows]
        if kind == "bytes":
            return [row.tobytes() for row in rows]
        if kind == "bool":
            return rows != 0
        return np.require(rows, DTYPES[kind][1], ["C", "A"])

    def _read(
        self,
        node: h5d.DatasetID,
        info: DatasetInfo,
        start: int,
        shape: tuple[int, ...],
    ) -> Any:
        """Read rows with HDF5's low-level calls, in a fifth of the time of `h5py.Dataset`."""
        stop = start + shape[0]
        if info.expansion:
            self._check_chunks(node, info.expansion, start, stop)
        if info.stored is None:
            if info.kind in ("text", "bytes"):
                self._check_lengths(node, info, start, stop)
            return h5py.Dataset(node)[start:stop]
        rows = np.empty(shape, info.stored)
        if rows.size:
            space = node.get_space()
            space.select_hyperslab((start, *[0] * (len(shape) - 1)), shape)
            node.read(h5s.create_simple(shape), space, rows, node.get_type())
        return rows

    def read_small(
        self,
        path: str,
        info: DatasetInfo,
        max_bytes: int = _MAX_ATTRIBUTE_BYTES,
    ) -> Any:
        """Read a complete small dataset: an array, a Python value or a list of texts.

        Returns:
            The value, or None if the dataset is larger than `max_bytes` or cannot be read.
        """
        is_table_of_texts = info.kind == "text" and len(info.shape) > 1
        if info.kind in ("", "bytes") or is_table_of_texts:
            return None
        if prod(info.shape) * info.item_bytes > max_bytes:
            return None
        if info.shape:
            return self.rows(path, info, 0, info.shape[0])
        node = h5d.open(self._file.id, path.encode())
        if info.kind == "text" and info.stored is None:
            self._check_lengths(node, info, 0, 1)
        value = h5py.Dataset(node)[()]
        return _text(value) if info.kind == "text" else value.item()

    def _check_chunks(self, node: h5d.DatasetID, expansion: int, start: int, stop: int) -> None:
        """Raise `CorruptFileError` if a chunk of these rows unpacks to more than its declared size.

        HDF5 decompresses a whole chunk before it checks the size.
        """
        name = self.name(node)
        if name not in self._heavy_chunks:
            heavy: set[tuple[int, ...]] = set()

            def add_if_heavy(chunk: Any) -> None:
                if chunk.size * expansion > _MAX_UNPACKED_BYTES:
                    heavy.add(chunk.chunk_offset)

            node.chunk_iter(add_if_heavy)
            self._heavy_chunks[name] = heavy

        shape = node.get_create_plist().get_chunk()
        num_bytes = prod(shape) * node.get_type().get_size() + _CHECKSUM_BYTES
        for offset in list(self._heavy_chunks[name]):
            if not start - shape[0] < offset[0] < stop:
                continue
            _, data = node.read_direct_chunk(offset)
            # The unpacked size of LZF data is unknown before decompression, so a chunk that may be
            # too large is an error.
            is_too_large = expansion == _EXPANSION[h5z.FILTER_LZF]
            if not is_too_large:
                unpacked = zlib.decompressobj().decompress(data, num_bytes + 1)
                is_too_large = len(unpacked) > num_bytes
            if is_too_large:
                raise CorruptFileError(
                    f"{self.place(node)} is damaged: a chunk has more than {num_bytes} bytes."
                )
            self._heavy_chunks[name].discard(offset)

    def _check_lengths(self, node: h5d.DatasetID, info: DatasetInfo, start: int, stop: int) -> None:
        """Raise `CorruptFileError` if the declared length of a text exceeds `MAX_HEAP_BYTES`.

        HDF5 allocates the declared length of a text before it checks the length.
        """
        for references in self._references(node, info, start, stop):
            lengths = np.frombuffer(references, "<u4")[:: _TEXT_BYTES // 4]
            longest = lengths.max(initial=0)
            if longest > MAX_HEAP_BYTES:
                raise CorruptFileError(
                    f"{self.place(node)} has a row of {longest} bytes, expected at most "
                    f"{MAX_HEAP_BYTES}."
                )

    def _references(
        self,
        node: h5d.DatasetID,
        info: DatasetInfo,
        start: int,
        stop: int,
    ) -> Iterator[bytes]:
        """Yield the stored references to the texts of rows, `_TEXT_BYTES` bytes per text.

        In a chunked dataset, references of other rows in the same chunks are included.
        """
        if info.offset is not None:
            first = info.offset + start * _TEXT_BYTES
            last = info.offset + stop * _TEXT_BYTES
            yield self._map[first:last]
            return
        settings = node.get_create_plist()
        filters = _filters(settings)
        chunk_rows = settings.get_chunk()[0]
        for first_row in range(start // chunk_rows * chunk_rows, stop, chunk_rows):
            skipped, data = node.read_direct_chunk((first_row,))
            used = [code for bit, code in enumerate(filters) if not skipped >> bit & 1]
            yield _unpacked(data, used, chunk_rows * _TEXT_BYTES)

    def attribute(self, node: Any, name: str) -> Any:
        """Return an attribute: a Python value, an array or a list of texts.

        Returns:
            The value, or None if the attribute is missing or has an unsupported type.
        """
        if not h5a.exists(node, name.encode()):
            return None
        attribute = h5a.open(node, name.encode())
        attribute_type = attribute.get_type()
        family = attribute_type.get_class()
        if family not in (h5t.STRING, h5t.INTEGER, h5t.FLOAT, h5t.ENUM):
            return None
        if attribute.get_space().get_simple_extent_type() not in (h5s.SIMPLE, h5s.SCALAR):
            return None
        num_bytes = prod(attribute.shape) * attribute_type.get_size()
        if not 0 < num_bytes <= _MAX_ATTRIBUTE_BYTES:
            return None
        check_text(node, name.encode(), attribute)
        if attribute.shape == () and family in (h5t.INTEGER, h5t.FLOAT):
            number = np.empty((), attribute.dtype)
            attribute.read(number)
            return number.item()
        value = h5py.AttributeManager(_Node(node))[name]
        return _plain_value(value)

    def attributes(self, node: Any, without: Sequence[str] = ()) -> dict[str, Any]:
        """Map the names of text and number attributes of a group or dataset to their values."""
        names: list[bytes] = []
        h5a.iterate(node, lambda name, *_: names.append(name))
        attributes = {}
        for name in map(bytes.decode, names):
            value = None if name in without else self.attribute(node, name)
            if value is not None:
                attributes[name] = value
        return attributes


class Files:
    """Pool of open HDF5 files. A file is opened at its first use in each process.

    The pool may be pickled, and used after a fork. Using a file that has changed since it was first
    opened raises an error.
    """

    def __init__(self) -> None:
        self._known = KnownFiles()
        self._reset()

    def _reset(self) -> None:
        """Start with an empty pool, because processes cannot share open files."""
        self._owner = Owner("open HDF5 files")
        self._lock = threading.RLock()
        self._open: LruCache[Path, tuple[ExitStack, OpenFile]] = LruCache(_MAX_OPEN_FILES)

    def __getstate__(self) -> dict[str, Any]:
        return {"_known": self._known}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    @contextmanager
    def use(self, path: Path) -> Iterator[OpenFile]:
        """Open a file for a block of code, exclusively for one thread.

        Raises:
            CorruptFileError: The file is damaged or has changed, or h5py raised an error in the
                block.
        """
        if not self._owner.is_own:
            self._reset()
        with self._lock, reported(repr(str(path))):
            opened = self._open.get(path)
            if opened is None:
                opened = self._opened(path)
                for closing, _ in self._open.put(path, opened):
                    closing.close()
            _, file = opened
            self._known.check(path, os.fstat(file.descriptor))
            file.allow_links()
            yield file

    def _opened(self, path: Path) -> tuple[ExitStack, OpenFile]:
        with ExitStack() as stack:
            self._known.check(path)
            guarded = GuardedFile(path)
            file, _ = stack.enter_context(open_hdf5(path, guarded))
            self._known.check(path, os.fstat(guarded.fileno()))
            closing = stack.pop_all()
            opened = OpenFile(path, file, guarded)
            # Files are closed before the interpreter exits. HDF5 crashes if it closes files later.
            weakref.finalize(opened, closing.close)
            return closing, opened
        raise AssertionError("unreachable")


class _Node(NamedTuple):
    """Object with the attribute `id`, as `h5py.AttributeManager` requires."""

    id: Any


def numbered(names: Sequence[str], pattern: str) -> list[str]:
    """Return the names that consist of `pattern` and a number, sorted by the number."""
    numbers = []
    for name in names:
        match = re.fullmatch(rf"{pattern}(\d{{1,18}})", name)
        if match:
            numbers.append((int(match[1]), name))
    return [name for _, name in sorted(numbers)]


def hdf5_names(folder: Path) -> list[str]:
    """Return the names of the visible files in a folder with an HDF5 extension."""
    names = []
    for path in folder.iterdir():
        is_hidden = path.name.startswith(".")
        if path.suffix in (".hdf5", ".h5") and not is_hidden:
            names.append(path.name)
    return names


def matches(path: Path, test: Callable[[OpenFile], bool]) -> bool:
    """Return whether a path is a readable HDF5 file that passes `test`."""
    with suppress(RolloutDataError, OSError):
        if path.is_file() and h5f.is_hdf5(os.fsencode(path)):
            guarded = GuardedFile(path)
            with open_hdf5(path, guarded) as (file, _):
                return test(OpenFile(path, file, guarded))
    return False


def _kind(type_id: h5t.TypeID) -> tuple[str, np.dtype[Any] | None]:
    """Return the kind of an HDF5 type and the dtype of its stored values, as in `DatasetInfo`."""
    family = type_id.get_class()
    if family == h5t.STRING:
        is_variable = type_id.is_variable_str()
        return "text", None if is_variable else np.dtype(f"S{type_id.get_size()}")
    if family == h5t.VLEN:
        inner = type_id.get_super()
        is_bytes = inner.get_class() == h5t.INTEGER and inner.get_size() == 1
        return "bytes" if is_bytes else "", None
    if family not in (h5t.INTEGER, h5t.FLOAT, h5t.ENUM):
        return "", None
    with suppress(FieldTypeError, TypeError, ValueError):
        dtype = np.dtype(type_id.dtype.str)
        name = dtype_name(dtype)
        is_plain = family == h5t.ENUM or type_id.equal(h5t.py_create(dtype))
        if not is_plain:
            return name, None
        return name, np.dtype("u1") if name == "bool" else dtype
    return "", None


def _filters(settings: Any) -> list[int]:
    """Return the codes of the filters of a dataset, in their order."""
    return [settings.get_filter(number)[0] for number in range(settings.get_nfilters())]


def _unpacked(data: bytes, filters: Sequence[int], num_bytes: int) -> bytes:
    """Decompress a chunk of references to texts.

    Args:
        data: The stored bytes.
        filters: Codes of the filters.
        num_bytes: Maximum number of bytes to decompress.
    """
    for code in reversed(filters):
        if code == h5z.FILTER_DEFLATE:
            data = zlib.decompressobj().decompress(data, num_bytes)
        elif code == h5z.FILTER_SHUFFLE:
            data = np.frombuffer(data, np.uint8).reshape(_TEXT_BYTES, -1).T.tobytes()
        else:
            raise CorruptFileError(
                f"rows of different lengths are compressed with filter {code}. Only gzip is read."
            )
    return data


def _plain_value(value: Any) -> Any:
    """Convert the value of an attribute to a Python value, an array or a list of texts."""
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "OS" or not value.size:
            return value
        texts = [_text(item) for item in value.ravel()]
        return texts[0] if len(texts) == 1 else texts
    if isinstance(value, np.generic):
        value = value.item()
    return _text(value)


def _text(value: Any) -> Any:
    return value.decode() if isinstance(value, bytes) else value
