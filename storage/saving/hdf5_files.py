"""HDF5 files as this project touches them: read through a guard, written without the library.

One rule: the library sees neither the disk while a file is written, as a disk that is full in the middle of its
closing leaves it in a state from which it crashes at the end of the process, nor a damaged global heap while it is
read, as it follows the sizes of the objects in it, which hold the text of attributes, without asking whether they
lead on, nor an attribute whose text claims a length, as it takes memory for that before it looks. What the datasets
mean is not known here.
"""

from __future__ import annotations

import errno
import io
import os
import re
import struct
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import h5py
import numpy as np

from ..core.durable_files import open_regular
from ..errors import CorruptFileError, RolloutDataError, UnsafeFileError

_MAGIC = b"GCOL"
#: The header of a heap, and that of each object in it: index (2 bytes), count (2), nothing (4), size (8).
_HEAD_BYTES = 16
#: A block has one heap, for texts of 128 KiB at most; each further object takes time to look at.
MAX_HEAP_BYTES = 1 << 20
#: DEFLATE gives no more for a byte; zeros that were never written take none.
_MAX_EXPANSION, _MAX_UNWRITTEN_BYTES = 1100, 1 << 26
#: No attribute that is read here is larger.
_MAX_ATTRIBUTE_BYTES = 1 << 12
#: Kinds of messages in the head of an object: an attribute, where the head goes on, and where there are more than eight
#: attributes; last, the most parts that are followed.
_ATTRIBUTE, _GOES_ON, _ATTRIBUTES_APART, _MAX_PARTS = 12, 16, 21, 256
#: Where the head of a fractal heap says how wide its table is, how large its first blocks are, how many bits places
#: have, where the first block or table is, and how many rows the table has.
_HEAP_FIELDS = (110, 112), (112, 120), (128, 130), (132, 140), (140, 142)
#: What a damaged file makes h5py raise.
_DAMAGE = (OSError, LookupError, ValueError, TypeError, RuntimeError, AttributeError, ArithmeticError)


class Guarded(io.RawIOBase):
    """A file to be read by HDF5 (its file-object driver) that stops it at a heap which it could not leave.

    Only good for files whose superblock declares sizes of 8 bytes. Every heap is read from its beginning: what
    joins reads of neighbouring places in the library, its metadata accumulator, is empty until something is written.
    """

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Size of the file."""

    @abstractmethod
    def take(self, view: memoryview) -> int:
        """Read bytes from the position on and move it; give their number, 0 at the end of the file."""

    @abstractmethod
    def read_at(self, num_bytes: int, start: int) -> bytes:
        """Read bytes from a place on; fewer at the end of the file."""

    @abstractmethod
    def is_written(self, num_bytes: int, start: int) -> bool:
        """Return whether there is no hole in these bytes, which cost their sender nothing."""

    def readinto(self, out: Any) -> int:
        view = memoryview(out)
        done = 0
        start = self.tell()
        while done < len(view) and (count := self.take(view[done:])):
            done += count
        view[done:] = bytes(len(view) - done)  # HDF5 takes the whole buffer, whatever was read
        if view[:4] == _MAGIC:
            self._check_heap(start)
        return len(view)

    def _check_heap(self, start: int) -> None:
        size = _number(self.read_at(8, start + 8))
        if not size <= MAX_HEAP_BYTES:
            raise OSError(f"a heap of {size} bytes at {start}")
        heap = self.read_at(size, start)
        at = _HEAD_BYTES
        while at + _HEAD_BYTES <= size:
            num_bytes = _number(heap[at + 8 : at + _HEAD_BYTES])
            is_free = heap[at : at + 2] == b"\0\0"  # unused space: its size includes its header
            step = num_bytes if is_free else _HEAD_BYTES + -(-num_bytes // 8) * 8
            if not _HEAD_BYTES <= step <= len(heap) - at:
                raise OSError(f"an object of {num_bytes} bytes at {at} of the heap at {start}")
            at += step


class GuardedFile(Guarded, io.FileIO):
    """A guarded file of this machine.

    Args:
        path: The file.

    Raises:
        CorruptFileError: It is no regular file.
        OSError: While reading: a heap is damaged.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(open_regular(path), "rb")

    @property
    def num_bytes(self) -> int:
        return os.fstat(self.fileno()).st_size

    def take(self, view: memoryview) -> int:
        return io.FileIO.readinto(self, view) or 0

    def read_at(self, num_bytes: int, start: int) -> bytes:
        return os.pread(self.fileno(), num_bytes, start)

    def is_written(self, num_bytes: int, start: int) -> bool:
        # A hole begins at the end of the file where the file system cannot tell.
        return os.lseek(self.fileno(), start, os.SEEK_HOLE) >= start + num_bytes


def _number(data: bytes) -> int:
    return int.from_bytes(data, "little")


#: Number that HDF5 gives an open file -> the file.
_OPEN: WeakValueDictionary[int, Guarded] = WeakValueDictionary()


@contextmanager
def open_hdf5(path: Path, opened: Guarded | None = None) -> Iterator[tuple[h5py.File, Guarded]]:
    """Open a file for reading, `opened` if it is elsewhere. What damage makes the library raise becomes one error.

    Raises:
        CorruptFileError: Also for what the block raises because of the file.
    """
    with (
        reported(repr(str(path))),
        opened or GuardedFile(path) as guarded,
        h5py.File(guarded, "r", locking=False) as file,
    ):
        if file.id.get_create_plist().get_sizes() != (8, 8):  # the guard reads no other
            raise CorruptFileError("read", repr(str(path)), "sizes and places of 8 bytes", "others")
        _OPEN[h5py.h5o.get_info(file.id).fileno] = guarded
        yield file, guarded


@contextmanager
def reported(where: str) -> Iterator[None]:
    """Turn what damage makes the library raise into one error, a `CorruptFileError`."""
    try:
        yield
    except _DAMAGE as cause:
        is_of_system = isinstance(cause, OSError) and cause.errno not in (None, errno.EINVAL)  # a negative place
        if isinstance(cause, RolloutDataError) or is_of_system:
            raise  # what the system says of it, like a missing file, is no damage
        got = f"{type(cause).__name__}: {cause}".split("\n")[0]
        raise CorruptFileError("read", where, "an intact HDF5 file", got) from cause


def member(group: h5py.Group, name: str, path: Path) -> Any:
    """Find a group or dataset by hard links only, with its data in the file: a link can lead to any file.

    Raises:
        CorruptFileError, UnsafeFileError: It is not there, or elsewhere.
    """
    found: Any = group
    where = f"{name!r} of {str(path)!r}"
    for part in name.split("/"):
        link = found.get(part, getlink=True) if isinstance(found, h5py.Group) else None
        if link is None:
            raise CorruptFileError("read", where, f"{part!r} in {found.name!r}", "nothing of that name")
        if not isinstance(link, h5py.HardLink):
            raise UnsafeFileError("read", where, "data in the file itself", type(link).__name__)
        found = found[part]
    if isinstance(found, h5py.Dataset) and (found.is_virtual or found.external):
        raise UnsafeFileError("read", where, "data in the file itself", "a reference to other files")
    return found


def attribute(node: Any, name: str) -> Any:
    """Return the value of an attribute; None if there is none, or if it is not one small value."""
    attributes = node.attrs  # a file opens its first group for it each time
    if name not in attributes:
        return None
    found = attributes.get_id(name)
    if found.shape != () or found.get_storage_size() > _MAX_ATTRIBUTE_BYTES:
        return None
    check_text(node.id, name.encode(), found)
    return attributes[name]


def check_text(node: Any, name: bytes, found: h5py.h5a.AttrID) -> None:
    """Compare the lengths that an attribute of texts claims with the size of a heap, by its bytes in the file.

    Raises:
        CorruptFileError: One is longer, or the attribute is not where attributes are.
    """
    kind = found.get_type()
    if kind.get_class() != h5py.h5t.STRING or not kind.is_variable_str():
        return
    about = h5py.h5o.get_info(node)
    start = h5py.h5i.get_file_id(node).get_create_plist().get_userblock()
    is_found = False
    num_texts = max(1, int(np.prod(found.shape, dtype=object)))
    for data in _attributes(_OPEN[about.fileno], about.addr + start, start, name):
        version, _, name_bytes, type_bytes, space_bytes = struct.unpack_from("<BB3H", data)
        at = 9 if version == 3 else 8
        if data[at : at + name_bytes].rstrip(b"\0") == name:
            unit = 8 if version == 1 else 1
            at += sum(-(-size // unit) * unit for size in (name_bytes, type_bytes, space_bytes))
            places = range(at, min(at + 16 * num_texts, len(data) - 15), 16)
            length = max((_number(data[place : place + 4]) for place in places), default=0)
            is_found = True
            if length > MAX_HEAP_BYTES:
                expected = f"a heap of at most {MAX_HEAP_BYTES} bytes"
                got = f"a text of {length}"
                raise CorruptFileError("read", f"the attribute {name.decode()!r}", expected, got)
    if not is_found:
        raise CorruptFileError(
            "read", f"the attribute {name.decode()!r}", "a text among the attributes", "another place"
        )


def _attributes(file: Guarded, place: int, start: int, name: bytes) -> Iterator[bytes]:
    """Yield the messages of attributes of a group or dataset; all places are counted from `start`.

    Where they lie apart, in a heap without a list of them, what may be the one of this name is given, and what follows.
    """
    head = file.read_at(64, place)
    is_new = head[:4] == b"OHDR"
    if is_new:
        at = 6 + 16 * (head[5] >> 5 & 1) + 4 * (head[5] >> 4 & 1)
        width = 1 << (head[5] & 3)
        parts = [(place + at + width, _number(head[at : at + width]))]
        gap = 4 + 2 * (head[5] >> 2 & 1)
    else:
        parts = [(place + 16, _number(head[8:12]))]
        gap = 8
    for number, (offset, num_bytes) in enumerate(parts):  # which grow
        data = file.read_at(min(num_bytes, MAX_HEAP_BYTES), offset)
        at = 4 if is_new and number else 0  # a signature
        while at + gap <= len(data) and number < _MAX_PARTS:
            kind, size = struct.unpack_from("<BH" if is_new else "<HH", data, at)
            message = data[at + gap : at + gap + size]
            at = at + gap + size
            if kind == _ATTRIBUTE and len(message) >= 8:
                yield message
            elif kind == _GOES_ON and len(message) >= 16:
                parts.append((start + _number(message[:8]), _number(message[8:16])))
            elif kind == _ATTRIBUTES_APART and len(message) >= 18:
                heap = start + _number(message[2 + 2 * (message[1] & 1) :][:8])
                for block in _heap_blocks(file, heap, start):
                    yield from _named(block, name)


def _named(block: bytes, name: bytes) -> Iterator[bytes]:
    """Yield what may be the message of an attribute, of version 2 or 3, whose head has 8 or 9 bytes."""
    for found in re.finditer(re.escape(name) + b"\0", block):
        for version, begin in ((2, found.start() - 8), (3, found.start() - 9)):
            if begin >= 0 and block[begin] == version:
                yield block[begin : begin + _MAX_ATTRIBUTE_BYTES]


def _heap_blocks(file: Guarded, place: int, start: int) -> Iterator[bytes]:
    """Yield the blocks of a fractal heap of small objects, which is neither compressed nor nested."""
    head = file.read_at(142, place) if place < 1 << 62 else b""  # no place: there is none
    if head[:4] != b"FRHP" or head[7:9] != b"\0\0" or _number(head[10:14]) < 512 or _number(head[86:94]):
        return
    width, size, bits, root, num_rows = (_number(head[a:b]) for a, b in _HEAP_FIELDS)
    if not num_rows:
        yield file.read_at(min(size, MAX_HEAP_BYTES), start + root)
        return
    entries = file.read_at(8 * width * min(num_rows, _MAX_PARTS), start + root + 13 + -(-bits // 8))
    for number in range(min(len(entries) // 8, _MAX_PARTS)):
        child = _number(entries[8 * number : 8 * number + 8])
        if child < 1 << 63:
            yield file.read_at(min(size << max(0, number // width - 1), MAX_HEAP_BYTES), start + child)


class Allowance:
    """Adds up what the datasets of a file take in memory: never more than the file can hold.

    Args:
        file_bytes: Size of the file.
    """

    def __init__(self, file_bytes: int) -> None:
        self._file_bytes = file_bytes
        self._taken_bytes = 0
        self._most_bytes = max(file_bytes, _MAX_UNWRITTEN_BYTES)

    def take(self, dataset: h5py.Dataset, where: str) -> None:
        """Count a dataset that is about to be read.

        Raises:
            CorruptFileError: All that were counted are larger than the file, unpacked.
        """
        chunk_bytes = 0
        if dataset.chunks is not None:
            self._most_bytes = max(self._most_bytes, self._file_bytes * _MAX_EXPANSION)
            chunk_bytes = int(np.prod(dataset.chunks, dtype=object)) * dataset.dtype.itemsize
        elif dataset.id.get_offset() is not None and dataset.id.get_offset() + dataset.nbytes > self._file_bytes:
            self._taken_bytes = self._most_bytes
        self._taken_bytes += max(dataset.nbytes, chunk_bytes)
        if self._taken_bytes > self._most_bytes:
            got = f"{dataset.nbytes} bytes in a file of {self._file_bytes}"
            raise CorruptFileError("read", where, "a file that holds its data", got)


class SparseFile(io.RawIOBase):
    """What was written where, for HDF5's file-object driver; gaps read as zeros and take no memory.

    Attributes:
        writes: (offset, bytes), in the order of writing; later ones lie over earlier ones.
        size: Length of the file.
    """

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[tuple[int, bytes]] = []
        self.size = 0
        self._position = 0

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size}[whence]
        self._position = base + offset
        return self._position

    def truncate(self, size: int | None = None) -> int:
        self.size = self._position if size is None else size
        return self.size

    def write(self, data: Any) -> int:
        self.writes.append((self._position, bytes(data)))
        self._position += len(data)
        self.size = max(self.size, self._position)
        return len(data)

    def readinto(self, out: Any) -> int:
        view = memoryview(out).cast("B")
        count = min(len(view), max(0, self.size - self._position))
        view[:count] = bytes(count)
        for offset, data in self.writes:
            low = max(offset, self._position)
            high = min(offset + len(data), self._position + count)
            if low < high:
                view[low - self._position : high - self._position] = data[low - offset : high - offset]
        self._position += count
        return count

    def write_to(self, descriptor: int) -> None:
        """Write what HDF5 wrote to a file, and give the file its length."""
        for offset, data in self.writes:
            write_at(descriptor, memoryview(data), offset)
        os.ftruncate(descriptor, self.size)


def begin_file(header: SparseFile, alignment: int, keeps_order: bool = False) -> h5py.File:
    """Begin an HDF5 file in memory, in a third of the time of `h5py.File(header, "w", ...)`.

    Args:
        header: Takes what HDF5 writes.
        alignment: Datasets start at multiples of it.
        keeps_order: Whether readers find the datasets in the order of their making; otherwise by name.
    """
    access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
    creation = h5py.h5p.create(h5py.h5p.FILE_CREATE)
    access.set_libver_bounds(h5py.h5f.LIBVER_V18, h5py.h5f.LIBVER_V18)
    access.set_alignment(1, alignment)
    access.set_fileobj_driver(h5py.h5fd.fileobj_driver, header)
    creation.set_obj_track_times(False)
    if keeps_order:
        creation.set_link_creation_order(h5py.h5p.CRT_ORDER_TRACKED | h5py.h5p.CRT_ORDER_INDEXED)
    return h5py.File(h5py.h5f.create(repr(header).encode(), h5py.h5f.ACC_TRUNC, fcpl=creation, fapl=access))


def reserve(file: h5py.File, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> int:
    """Create a contiguous dataset whose bytes are written later, without HDF5; give its file offset."""
    settings = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    links = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    settings.set_layout(h5py.h5d.CONTIGUOUS)
    settings.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    settings.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    settings.set_obj_track_times(False)
    links.set_create_intermediate_group(True)
    space = h5py.h5s.create_simple(shape)
    kind = kind_of(dtype)
    return h5py.h5d.create(file.id, name.encode(), kind, space, settings, lcpl=links).get_offset() or 0


@lru_cache(maxsize=64)
def kind_of(dtype: np.dtype[Any]) -> Any:
    """Return HDF5's name of a dtype."""
    return h5py.h5t.py_create(dtype, logical=True)


def write_at(descriptor: int, data: memoryview, offset: int) -> None:
    """Write all of `data` to the file at `offset`."""
    while data:
        written = os.pwrite(descriptor, data, offset)
        data = data[written:]
        offset = offset + written
