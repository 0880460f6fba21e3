"""Safe access to HDF5 files, despite three defects of the HDF5 library.

The module avoids these defects:

- If the disk fills up while a file is closed, the library crashes at the end of the process. Here
  the library writes only to memory.
- A global heap is a block of the file with the texts of attributes. Each text in it has a size. The
  library accepts sizes that are not positive, so that a damaged heap causes an endless loop.
  `Guarded` checks every heap when the library reads it.
- The library allocates the declared length of an attribute's text before it reads the text.
  `check_text` checks the length first.
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

#: First bytes of a global heap, the block of a file that contains texts of attributes.
_MAGIC = b"GCOL"
#: Bytes of the header of a global heap, and of the header of each object in it.
#: Header of an object: index (2 bytes), count (2), unused bytes (4), size of the object (8).
_HEAD_BYTES = 16
#: Size limit of a global heap in bytes, since checking many objects takes time.
#: The block files of this project have one heap with at most 128 KiB of text.
MAX_HEAP_BYTES = 1 << 20
#: Upper bound for the number of bytes that DEFLATE unpacks from one byte.
_MAX_EXPANSION = 1100
#: Bytes of data that even a small file may declare, since unwritten zeros take no space in it.
_MAX_UNWRITTEN_BYTES = 1 << 26
#: Size limit of an attribute in bytes.
_MAX_ATTRIBUTE_BYTES = 1 << 12
#: Type of a message with an attribute. The header of a group or dataset consists of messages.
_ATTRIBUTE = 12
#: Type of a message with the offset and the length of the next part of the header.
_CONTINUATION = 16
#: Type of a message with the offset of a fractal heap, which contains more than eight attributes.
_ATTRIBUTE_INFO = 21
#: Maximum number of parts to read from a header, and of blocks from a fractal heap.
_MAX_PARTS = 256
#: Header of a fractal heap, a structure of HDF5 for small objects. Only the fields that are read
#: here are named. Its blocks are listed in a table of `num_rows` rows of `num_columns` blocks.
_HEAP_HEADER = np.dtype(
    {
        "names": [
            "signature",
            "num_filter_bytes",
            "max_object_bytes",
            "num_huge_objects",
            "num_columns",
            "block_bytes",
            "offset_bits",
            "root_offset",
            "num_rows",
        ],
        "formats": ["S4", "<u2", "<u4", "<u8", "<u2", "<u8", "<u2", "<u8", "<u2"],
        "offsets": [0, 7, 10, 86, 110, 112, 128, 132, 140],
        "itemsize": 142,
    }
)
#: Bytes of the header of a table of blocks before the number of the first block of the table.
_TABLE_HEAD_BYTES = 13
#: HDF5 writes offsets from this number on for objects that do not exist.
_NO_OFFSET = 1 << 62
#: Errors that h5py raises for damaged files.
_DAMAGE = (
    OSError,
    LookupError,
    ValueError,
    TypeError,
    RuntimeError,
    AttributeError,
    ArithmeticError,
)


class Guarded(io.RawIOBase):
    """File object that the HDF5 library reads. Reading a damaged global heap raises `OSError`.

    The file must use offsets and lengths of 8 bytes. A global heap is a block with the texts of
    attributes. It is recognized by its first bytes, because the library starts a new read at each
    heap. The library joins adjacent reads only in files that are open for writing.
    """

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Size of the file."""

    @abstractmethod
    def take(self, view: memoryview) -> int:
        """Read bytes at the current position into `view`, and advance the position.

        Returns the number of read bytes, 0 at the end of the file.
        """

    @abstractmethod
    def read_at(self, num_bytes: int, start: int) -> bytes:
        """Return `num_bytes` bytes from the offset `start` on, or fewer at the end of the file."""

    @abstractmethod
    def is_written(self, num_bytes: int, start: int) -> bool:
        """Return whether all bytes of a range are stored on disk.

        A gap of a sparse file takes no disk space, so that a malicious file can declare large data.
        """

    def readinto(self, out: Any) -> int:
        view = memoryview(out)
        done = 0
        start = self.tell()
        while done < len(view):
            count = self.take(view[done:])
            if not count:
                break
            done += count
        # HDF5 uses the whole buffer, even if fewer bytes were read. Fill the rest with zeros.
        view[done:] = bytes(len(view) - done)
        if view[:4] == _MAGIC:
            self._check_heap(start)
        return len(view)

    def _check_heap(self, start: int) -> None:
        size = _number(self.read_at(8, start + 8))
        if not size <= MAX_HEAP_BYTES:
            raise OSError(
                f"the heap at byte {start} declares {size} bytes, expected at most {MAX_HEAP_BYTES}"
            )
        heap = self.read_at(size, start)
        at = _HEAD_BYTES
        while at + _HEAD_BYTES <= size:
            num_bytes = _number(heap[at + 8 : at + _HEAD_BYTES])
            # Free space is an object with the index 0, whose size includes the header.
            is_free = heap[at : at + 2] == b"\0\0"
            step = num_bytes if is_free else _HEAD_BYTES + -(-num_bytes // 8) * 8
            if not _HEAD_BYTES <= step <= len(heap) - at:
                raise OSError(
                    f"an object at byte {start + at} declares {num_bytes} bytes, which do not fit "
                    "into its heap"
                )
            at += step


class GuardedFile(Guarded, io.FileIO):
    """Local HDF5 file whose global heaps are checked when the library reads them.

    Args:
        path: Path of the file.

    Raises:
        CorruptFileError: The path is not a regular file.
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
        # In a file without gaps, the end of the file counts as the first gap.
        return os.lseek(self.fileno(), start, os.SEEK_HOLE) >= start + num_bytes


def _number(data: bytes) -> int:
    return int.from_bytes(data, "little")


#: File object of each open file, by the number that the HDF5 library assigns to the file.
_OPEN: WeakValueDictionary[int, Guarded] = WeakValueDictionary()


@contextmanager
def open_hdf5(path: Path, opened: Guarded | None = None) -> Iterator[tuple[h5py.File, Guarded]]:
    """Open an HDF5 file for reading. Yields the h5py file and the file object that it reads.

    Args:
        path: Path of the file, or its name in errors.
        opened: File object to read; None to open `path` on this machine.

    Raises:
        CorruptFileError: The file is damaged. In the block, errors of the HDF5 library about
            damage are converted to this error.
    """
    with (
        reported(repr(str(path))),
        opened or GuardedFile(path) as guarded,
        h5py.File(guarded, "r", locking=False) as file,
    ):
        offset_bytes, length_bytes = file.id.get_create_plist().get_sizes()
        # `Guarded` reads offsets and lengths of 8 bytes only.
        if (offset_bytes, length_bytes) != (8, 8):
            raise CorruptFileError(
                f"{str(path)!r} has HDF5 offsets of {offset_bytes} bytes and lengths of "
                f"{length_bytes} bytes, expected 8 bytes."
            )
        _OPEN[h5py.h5o.get_info(file.id).fileno] = guarded
        yield file, guarded


@contextmanager
def reported(where: str) -> Iterator[None]:
    """Convert errors of the HDF5 library about damaged files to `CorruptFileError`."""
    try:
        yield
    except _DAMAGE as cause:
        # A negative offset in a damaged file causes EINVAL.
        # Other errors of the operating system, such as a missing file, do not mean damage.
        is_of_system = isinstance(cause, OSError) and cause.errno not in (None, errno.EINVAL)
        if isinstance(cause, RolloutDataError) or is_of_system:
            raise
        problem = f"{type(cause).__name__}: {cause}".split("\n")[0]
        raise CorruptFileError(f"{where} is damaged: {problem}.") from cause


def member(group: h5py.Group, name: str, path: Path) -> Any:
    """Return a group or dataset by name, and check that its data are in the same file.

    Only hard links are followed, because other links can refer to any file.

    Raises:
        CorruptFileError: The group or dataset does not exist.
        UnsafeFileError: The data are in another file.
    """
    node: Any = group
    where = f"{name!r} of {str(path)!r}"
    for part in name.split("/"):
        link = node.get(part, getlink=True) if isinstance(node, h5py.Group) else None
        if link is None:
            raise CorruptFileError(
                f"{str(path)!r} has no {name!r}: {node.name!r} does not contain {part!r}."
            )
        if not isinstance(link, h5py.HardLink):
            kind = "an external link" if isinstance(link, h5py.ExternalLink) else "a soft link"
            raise UnsafeFileError(f"{where} is {kind}, which is not followed.")
        node = node[part]
    if isinstance(node, h5py.Dataset) and (node.is_virtual or node.external):
        raise UnsafeFileError(f"{where} refers to data in other files, which are not read.")
    return node


def attribute(node: Any, name: str) -> Any:
    """Return the value of an attribute; None if it is missing, too large, or not a single value."""
    # Read `attrs` once, because each access to `attrs` of a file opens its root group again.
    attributes = node.attrs
    if name not in attributes:
        return None
    attribute_id = attributes.get_id(name)
    if attribute_id.shape != () or attribute_id.get_storage_size() > _MAX_ATTRIBUTE_BYTES:
        return None
    check_text(node.id, name.encode(), attribute_id)
    return attributes[name]


def check_text(node: Any, name: bytes, attribute_id: h5py.h5a.AttrID) -> None:
    """Check that no text of an attribute is longer than `MAX_HEAP_BYTES`.

    The lengths are read from the bytes of the file, because the HDF5 library would allocate memory
    of these lengths.

    Raises:
        CorruptFileError: A text is too long, or the attribute is not found in the bytes of the
            file.
    """
    type_id = attribute_id.get_type()
    if type_id.get_class() != h5py.h5t.STRING or not type_id.is_variable_str():
        return
    about = h5py.h5o.get_info(node)
    start = h5py.h5i.get_file_id(node).get_create_plist().get_userblock()
    is_found = False
    num_texts = max(1, int(np.prod(attribute_id.shape, dtype=object)))
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
                raise CorruptFileError(
                    f"Attribute {name.decode()!r} has a text of {length} bytes, expected at most "
                    f"{MAX_HEAP_BYTES}."
                )
    if not is_found:
        raise CorruptFileError(
            f"Attribute {name.decode()!r} is not stored with its group or dataset, so that the "
            "length of its text cannot be checked."
        )


def _attributes(file: Guarded, place: int, start: int, name: bytes) -> Iterator[bytes]:
    """Yield the messages with attributes in the header of a group or dataset.

    More than eight attributes are stored in a fractal heap, which has no list of them. In this
    case, all byte ranges are yielded that may be the message of the attribute `name`.

    Args:
        file: The file.
        place: Offset of the header in the file.
        start: Offset to which all offsets in the header are relative.
        name: Name of the attribute to find.
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
    # The header may have further parts, which the loop appends to the list.
    for number, (offset, num_bytes) in enumerate(parts):
        data = file.read_at(min(num_bytes, MAX_HEAP_BYTES), offset)
        # In the new format, each part after the first begins with a signature of 4 bytes.
        at = 4 if is_new and number else 0
        while at + gap <= len(data) and number < _MAX_PARTS:
            message_type, size = struct.unpack_from("<BH" if is_new else "<HH", data, at)
            message = data[at + gap : at + gap + size]
            at += gap + size
            if message_type == _ATTRIBUTE and len(message) >= 8:
                yield message
            elif message_type == _CONTINUATION and len(message) >= 16:
                parts.append((start + _number(message[:8]), _number(message[8:16])))
            elif message_type == _ATTRIBUTE_INFO and len(message) >= 18:
                heap = start + _number(message[2 + 2 * (message[1] & 1) :][:8])
                for block in _heap_blocks(file, heap, start):
                    yield from _named(block, name)


def _named(block: bytes, name: bytes) -> Iterator[bytes]:
    """Yield the byte ranges of a block that may be the message of the attribute `name`.

    The name follows a header of 8 bytes in version 2 of the message, and of 9 bytes in version 3.
    """
    for match in re.finditer(re.escape(name) + b"\0", block):
        for version, begin in ((2, match.start() - 8), (3, match.start() - 9)):
            if begin >= 0 and block[begin] == version:
                yield block[begin : begin + _MAX_ATTRIBUTE_BYTES]


def _heap_blocks(file: Guarded, place: int, start: int) -> Iterator[bytes]:
    """Yield the blocks of a fractal heap, which contain its attributes.

    Yields nothing for compressed heaps, and for heaps that store objects outside of their blocks.
    Only the first level of a table of blocks is read.

    Args:
        file: The file.
        place: Position of the header of the heap in the file, in bytes.
        start: Position in the file from which the offsets in the heap count, in bytes.
    """
    head = file.read_at(_HEAP_HEADER.itemsize, place) if place < _NO_OFFSET else b""
    if len(head) < _HEAP_HEADER.itemsize:
        return
    values = np.frombuffer(head, _HEAP_HEADER)[0].item()
    header = dict(zip(_HEAP_HEADER.names or (), values, strict=True))
    is_compressed = header["num_filter_bytes"] > 0
    has_objects_outside = header["max_object_bytes"] < 512 or header["num_huge_objects"] > 0
    if header["signature"] != b"FRHP" or is_compressed or has_objects_outside:
        return

    root = start + header["root_offset"]
    block_bytes = header["block_bytes"]
    num_columns = header["num_columns"]
    num_rows = header["num_rows"]
    if num_rows == 0:  # The heap has a single block and no table.
        yield file.read_at(min(block_bytes, MAX_HEAP_BYTES), root)
        return

    num_entries = num_columns * min(num_rows, _MAX_PARTS)
    num_head_bytes = _TABLE_HEAD_BYTES + -(-header["offset_bits"] // 8)
    entries = file.read_at(8 * num_entries, root + num_head_bytes)
    for number in range(min(len(entries) // 8, _MAX_PARTS)):
        offset = _number(entries[8 * number : 8 * number + 8])
        if offset >= _NO_OFFSET:
            continue
        # The first two rows of the table have blocks of the same size, which then doubles.
        num_doublings = max(0, number // num_columns - 1)
        yield file.read_at(min(block_bytes << num_doublings, MAX_HEAP_BYTES), start + offset)


class Allowance:
    """Limit for the total memory of the datasets of a file, computed from the size of the file.

    Args:
        file_bytes: Size of the file in bytes.
    """

    def __init__(self, file_bytes: int) -> None:
        self._file_bytes = file_bytes
        self._taken_bytes = 0
        self._most_bytes = max(file_bytes, _MAX_UNWRITTEN_BYTES)

    def take(self, dataset: h5py.Dataset, where: str) -> None:
        """Add a dataset to the total, before it is read, and check the limit.

        Raises:
            CorruptFileError: The total is larger than the content of the file can be.
        """
        chunk_bytes = 0
        if dataset.chunks is not None:
            self._most_bytes = max(self._most_bytes, self._file_bytes * _MAX_EXPANSION)
            chunk_bytes = int(np.prod(dataset.chunks, dtype=object)) * dataset.dtype.itemsize
        elif (
            dataset.id.get_offset() is not None
            and dataset.id.get_offset() + dataset.nbytes > self._file_bytes
        ):
            self._taken_bytes = self._most_bytes
        self._taken_bytes += max(dataset.nbytes, chunk_bytes)
        if self._taken_bytes > self._most_bytes:
            raise CorruptFileError(
                f"{where} declares {dataset.nbytes} bytes, more than a file of "
                f"{self._file_bytes} bytes can contain."
            )


class SparseFile(io.RawIOBase):
    """File object in memory that the HDF5 library writes. Gaps are zeros and take no memory.

    Attributes:
        writes: Pairs (offset, bytes) in the order of writing. Later pairs overwrite earlier pairs.
        size: Length of the file in bytes.
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
                view[low - self._position : high - self._position] = data[
                    low - offset : high - offset
                ]
        self._position += count
        return count

    def write_to(self, descriptor: int) -> None:
        """Write the content to an open file and set the length of the file."""
        for offset, data in self.writes:
            write_at(descriptor, memoryview(data), offset)
        os.ftruncate(descriptor, self.size)


def begin_file(header: SparseFile, alignment: int, keeps_order: bool = False) -> h5py.File:
    """Create an HDF5 file in memory, three times as fast as `h5py.File(header, "w", ...)`.

    Args:
        header: File object that receives the bytes of the file.
        alignment: Alignment of datasets in bytes.
        keeps_order: Whether datasets are listed in the order of creation, not by name.
    """
    access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
    creation = h5py.h5p.create(h5py.h5p.FILE_CREATE)
    access.set_libver_bounds(h5py.h5f.LIBVER_V18, h5py.h5f.LIBVER_V18)
    access.set_alignment(1, alignment)
    access.set_fileobj_driver(h5py.h5fd.fileobj_driver, header)
    creation.set_obj_track_times(False)
    if keeps_order:
        creation.set_link_creation_order(h5py.h5p.CRT_ORDER_TRACKED | h5py.h5p.CRT_ORDER_INDEXED)
    return h5py.File(
        h5py.h5f.create(repr(header).encode(), h5py.h5f.ACC_TRUNC, fcpl=creation, fapl=access)
    )


def reserve(file: h5py.File, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> int:
    """Create a contiguous dataset without data, and return the file offset of its data.

    The caller writes the bytes at this offset later, without the HDF5 library.
    """
    settings = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    links = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    settings.set_layout(h5py.h5d.CONTIGUOUS)
    settings.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    settings.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    settings.set_obj_track_times(False)
    links.set_create_intermediate_group(True)
    space = h5py.h5s.create_simple(shape)
    kind = kind_of(dtype)
    return (
        h5py.h5d.create(file.id, name.encode(), kind, space, settings, lcpl=links).get_offset() or 0
    )


@lru_cache(maxsize=64)
def kind_of(dtype: np.dtype[Any]) -> Any:
    """Return the HDF5 type of a dtype."""
    return h5py.h5t.py_create(dtype, logical=True)


def write_at(descriptor: int, data: memoryview, offset: int) -> None:
    """Write all of `data` to the file at `offset`."""
    while data:
        written = os.pwrite(descriptor, data, offset)
        data = data[written:]
        offset += written
