"""Read arrays of npz files: plain arrays are memory-mapped, deflated arrays are unpacked in parts.

Declared sizes are compared with the bytes of the file before memory is allocated. Pickled objects
raise an error. `numpy.load` would decompress a complete array to read a few rows.
"""

from __future__ import annotations

import os
import zipfile
import zlib
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, Any, BinaryIO

import numpy as np

from storage.core.durable_files import crc32, open_regular
from storage.core.fields import MAX_DIMENSIONS
from storage.errors import CorruptFileError, DataFileError, UnsafeFileError

from ..input_checks import KnownFiles, first_bytes

Array = np.ndarray[Any, Any]
_ZIP_MAGIC = b"PK\3\4"
_ZIP_END_MAGIC = b"PK\5\6"
_MAX_MEMBERS = 4096
_MAX_HEAD_BYTES = 10_000
#: Maximum bytes of the end record of a zip file, including its comment.
_ZIP_END_BYTES = 22 + 0xFFFF
#: Placeholder in the end record if the number of members is in the ZIP64 record.
_COUNT_IN_ZIP64 = 0xFFFF
#: Flag bit of a zip member whose name is encoded in UTF-8.
_UTF_8 = 0x800
#: Maximum number of bytes that DEFLATE can unpack from one byte.
_MAX_EXPANSION = 1032
#: Minimum unpacked bytes between two saved decompressor states. A state takes 40 KB.
_MIN_SPACING = 1 << 20
#: Maximum number of saved decompressor states per array.
_MAX_STATES = 256
#: Maximum unpacked bytes per read of a deflated array: the larger of `_FREE_BYTES` and
#: `_MAX_READ_EXPANSION` times the deflated bytes. Only arrays with very few non-zero values expand
#: more.
_FREE_BYTES = 1 << 28
_MAX_READ_EXPANSION = 256
#: Exceptions that zipfile and numpy raise for damaged files.
_DAMAGE = (
    zipfile.BadZipFile,
    zlib.error,
    ValueError,
    SyntaxError,
    EOFError,
    NotImplementedError,
    RuntimeError,
    LookupError,
)


def is_zip(path: Path) -> bool:
    """Return whether a file starts with the signature of a zip archive."""
    return first_bytes(path, len(_ZIP_MAGIC)) == _ZIP_MAGIC


class Unpacking:
    """Random access to the unpacked bytes of a deflated zip member.

    The unpacked bytes are divided into pieces of at least 1 MiB. The decompressor state at the
    start of each visited piece is saved, so that a later read can start there.

    Args:
        path: The zip file.
        known: State of the file at its first use.
        offset: Offset of the deflated bytes in the file.
        packed_bytes, num_bytes: Number of bytes before and after unpacking.
        checksum: CRC-32 of all unpacked bytes; compared when the last piece is unpacked.

    Attributes:
        most_bytes: Maximum unpacked bytes per read. Without a limit, reading a small file could
            fill the memory.
    """

    def __init__(
        self,
        path: Path,
        known: KnownFiles,
        offset: int,
        packed_bytes: int,
        num_bytes: int,
        checksum: int,
    ) -> None:
        self._arguments = (path, known, offset, packed_bytes, num_bytes, checksum)
        self.most_bytes = max(_FREE_BYTES, packed_bytes * _MAX_READ_EXPANSION)
        self._spacing = max(_MIN_SPACING, -(-num_bytes // _MAX_STATES))
        # Maps each piece to the decompressor state, the number of deflated bytes and the CRC-32
        # before the piece. It is a dict, because two threads may add the same piece.
        self._states: dict[int, tuple[Any, int, int]] = {
            0: (zlib.decompressobj(-zlib.MAX_WBITS), 0, 0)
        }
        self._latest: tuple[int, bytes] = (-1, b"")

    def __reduce__(self) -> Any:
        return Unpacking, self._arguments

    def read(self, start: int, stop: int) -> bytearray:
        """Return the unpacked bytes `start:stop`."""
        unpacked = bytearray()
        position = start
        while position < stop:
            number, first = divmod(position, self._spacing)
            piece = self._piece(number)
            unpacked += memoryview(piece)[first : first + stop - position]
            position = start + len(unpacked)
        return unpacked

    def _piece(self, number: int) -> bytes:
        """Return the unpacked bytes of a piece. Pieces before it are unpacked first if needed."""
        for earlier in range(max(self._states), number):
            self._unpack(earlier)
        latest, data = self._latest
        if latest != number:
            data = self._unpack(number)
            self._latest = (number, data)
        return data

    def _unpack(self, number: int) -> bytes:
        """Unpack a piece from the saved state at its start, and save the state at its end."""
        path, known, offset, packed_bytes, num_bytes, checksum = self._arguments
        kept_state, position, crc = self._states[number]
        state = kept_state.copy()
        start = number * self._spacing
        piece_bytes = min(self._spacing, num_bytes - start)
        unpacked = bytearray()
        try:
            with known.open(path) as file:
                while len(unpacked) < piece_bytes:
                    file.seek(offset + position)
                    data = file.read(min(1 << 16, packed_bytes - position))
                    part = state.decompress(data, piece_bytes - len(unpacked))
                    position += len(data) - len(state.unconsumed_tail)
                    unpacked += part
                    if not part and (state.eof or not data):
                        num_unpacked = start + len(unpacked)
                        raise zlib.error(f"the data end after {num_unpacked} of {num_bytes} bytes")
        except zlib.error as cause:
            raise CorruptFileError(f"{str(path)!r} is damaged: {cause}.") from cause

        crc = crc32(unpacked, crc)
        if start + piece_bytes == num_bytes and crc != checksum:
            raise CorruptFileError(
                f"{str(path)!r} is damaged: expected checksum {checksum:08x}, got {crc:08x}."
            )
        self._states[number + 1] = (state, position, crc)
        return bytes(unpacked)


@dataclass(frozen=True)
class NpzArray:
    """An array of an npz file, read on request.

    Attributes:
        path: The npz file.
        name: Name of the array.
        dtype: Stored dtype, possibly big-endian.
        shape: Stored shape, checked against the number of stored bytes.
        is_fortran: Whether the array is stored by columns instead of rows.
        offset: Offset of the first value in the file, or in the unpacked bytes of `packed`.
        packed: Reader of the deflated bytes; None if the array is not compressed.
        known: State of the file when it was opened. Reading a changed file raises an error.
    """

    path: Path
    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    is_fortran: bool
    offset: int
    packed: Unpacking | None
    known: KnownFiles

    def __len__(self) -> int:
        return self.shape[0] if self.shape else 0

    def read(self, start: int = 0, stop: int | None = None) -> Array:
        """Read the rows `start:stop` in little-endian byte order.

        Uncompressed, aligned, little-endian rows are a read-only map of the file. Other rows are
        copied.
        """
        if not self.shape:
            value: Array = self._stored((1,), 0)[0]
            return value
        stop = self.shape[0] if stop is None else min(stop, self.shape[0])
        start = min(start, stop)
        if self.is_fortran and len(self.shape) > 1:  # No row is contiguous, so all are read.
            whole: Array = self._stored(self.shape[::-1], 0).transpose()
            return whole[start:stop]
        row_bytes = prod(self.shape[1:]) * self.dtype.itemsize
        return self._stored((stop - start, *self.shape[1:]), start * row_bytes)

    def _stored(self, shape: tuple[int, ...], skipped: int) -> Array:
        """Read values of shape `shape`, starting `skipped` bytes after the first stored value."""
        num_bytes = prod(shape) * self.dtype.itemsize
        begin = self.offset + skipped
        self.known.check(self.path)
        values: Array
        if not num_bytes:
            values = np.empty(shape, self.dtype)
        elif self.packed:
            if num_bytes > self.packed.most_bytes:
                raise CorruptFileError(
                    f"{self.where} is compressed, and {num_bytes} bytes are too many to read at "
                    f"once. The limit is {self.packed.most_bytes} bytes."
                )
            data = self.packed.read(begin, begin + num_bytes)
            values = np.frombuffer(data, self.dtype).reshape(shape)
        else:
            try:
                with self.known.open(self.path) as file:
                    values = np.memmap(file, self.dtype, "r", begin, shape).view(np.ndarray)
            except ValueError as cause:
                raise CorruptFileError(
                    f"{self.where} is truncated: the file ends before byte {begin + num_bytes}."
                ) from cause
        little_endian = self.dtype.newbyteorder("<")
        if values.flags.aligned and little_endian == self.dtype:
            return values
        return values.astype(little_endian)

    @property
    def where(self) -> str:
        """Name and file of the array, for errors."""
        return f"{self.name!r} of {str(self.path)!r}"


def array_names(path: Path) -> set[str]:
    """Return the names of the arrays of an npz file; an empty set for other files."""
    return {name.removesuffix(".npy") for name in member_names(path) if name.endswith(".npy")}


def member_names(path: Path) -> set[str]:
    """Return the names of the members of a zip file; an empty set for damaged and other files."""
    if not is_zip(path):
        return set()
    try:
        with open(open_regular(path), "rb") as file, zipfile.ZipFile(file) as archive:
            return set(archive.namelist())
    except (OSError, DataFileError, *_DAMAGE):
        return set()


def read_npz(path: Path) -> dict[str, NpzArray]:
    """Map the name of each array of an npz file to the array. Rows are not read yet.

    Raises:
        CorruptFileError: The file is damaged, is not an npz file, or declares more data than it
            has.
        UnsafeFileError: An array contains pickled objects.
    """
    arrays: dict[str, NpzArray] = {}
    known = KnownFiles()
    try:
        with known.open(path) as file, zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            check_count(file, len(members))
            if len(members) > _MAX_MEMBERS:
                raise CorruptFileError(
                    f"{str(path)!r} has {len(members)} arrays, expected at most {_MAX_MEMBERS}."
                )
            for member in members:
                name = member.filename.removesuffix(".npy")
                if name in arrays:
                    raise CorruptFileError(f"{str(path)!r} has several arrays named {name!r}.")
                if member.filename != name:
                    arrays[name] = _describe(path, known, name, file, archive, member)
    except _DAMAGE as cause:
        reason = f"{type(cause).__name__}: {cause}"[:200].rstrip(".")
        raise CorruptFileError(f"{str(path)!r} is damaged: {reason}.") from cause
    return arrays


def check_count(file: BinaryIO, num_members: int) -> None:
    """Raise `BadZipFile` if a zip file states another number of members than `num_members`.

    A member can be missing without an error of `zipfile`: if an entry of the zip directory has a
    damaged length, the next entry is skipped.

    Args:
        file: The zip file.
        num_members: Number of members that `zipfile` found in the directory.
    """
    file_bytes = file.seek(0, os.SEEK_END)
    file.seek(max(0, file_bytes - _ZIP_END_BYTES))
    tail = file.read()
    end_record = tail[tail.rfind(_ZIP_END_MAGIC) :]
    stated = int.from_bytes(end_record[10:12], "little")
    if stated not in (num_members, _COUNT_IN_ZIP64):
        raise zipfile.BadZipFile(
            f"its directory lists {num_members} members, but its end record states {stated}"
        )


def _describe(
    path: Path,
    known: KnownFiles,
    name: str,
    file: BinaryIO,
    archive: zipfile.ZipFile,
    member: zipfile.ZipInfo,
) -> NpzArray:
    """Read the header of an array, and compare the declared sizes with the size of the file."""
    where = f"{name!r} of {str(path)!r}"
    is_packed = member.compress_type == zipfile.ZIP_DEFLATED
    is_encrypted = bool(member.flag_bits & 1)
    if is_encrypted or not (is_packed or member.compress_type == zipfile.ZIP_STORED):
        raise DataFileError(
            f"{where} is encrypted or has an unknown compression. Only stored and deflated arrays "
            "are read."
        )

    most_bytes = member.compress_size * (_MAX_EXPANSION if is_packed else 1)
    begin = member_begin(file, member)
    file_bytes = os.fstat(file.fileno()).st_size
    if member.file_size > most_bytes or begin + member.compress_size > file_bytes:
        raise CorruptFileError(
            f"{where} declares {member.file_size} bytes, stored in {member.compress_size} bytes. A "
            f"file of {file_bytes} bytes cannot contain them."
        )
    with archive.open(member) as stream:
        dtype, shape, is_fortran, head_bytes = _read_head(stream, where)
    if head_bytes + prod(shape) * dtype.itemsize != member.file_size:
        raise CorruptFileError(
            f"{where} has {member.file_size} bytes, which do not fit shape {list(shape)[:8]} and "
            f"dtype {dtype}."
        )

    packed = None
    offset = begin + head_bytes
    if is_packed:
        packed = Unpacking(path, known, begin, member.compress_size, member.file_size, member.CRC)
        offset = head_bytes
    return NpzArray(path, name, dtype, shape, is_fortran, offset, packed, known)


def member_begin(file: BinaryIO, member: zipfile.ZipInfo) -> int:
    """Return the offset of the content of a zip member, after its local header.

    The directory at the end of a zip file does not state the lengths of local headers.

    Raises:
        BadZipFile: The local header is damaged, or has a name other than in the directory.
    """
    file.seek(max(0, member.header_offset))
    head = file.read(30)
    if member.header_offset < 0 or len(head) < 30 or head[:4] != _ZIP_MAGIC:
        raise zipfile.BadZipFile(f"no member begins at byte {member.header_offset}")
    name_bytes = int.from_bytes(head[26:28], "little")
    extra_bytes = int.from_bytes(head[28:30], "little")
    encoding = "utf-8" if member.flag_bits & _UTF_8 else "cp437"
    name = file.read(name_bytes).decode(encoding)
    if name != member.orig_filename:
        listed = f"{member.orig_filename!r} in the directory"
        raise zipfile.BadZipFile(f"a member is named {name!r} in its header, but {listed}")
    return member.header_offset + 30 + name_bytes + extra_bytes


def _read_head(
    stream: IO[bytes],
    where: str,
) -> tuple[np.dtype[Any], tuple[int, ...], bool, int]:
    """Read an npy header: dtype, shape, whether the order is column-major, and header length."""
    version = np.lib.format.read_magic(stream)
    if version not in ((1, 0), (2, 0)):
        raise DataFileError(
            f"{where} has npy version {'.'.join(map(str, version))}. Versions 1.0 and 2.0 are read."
        )
    read = np.lib.format.read_array_header_2_0
    if version == (1, 0):
        read = np.lib.format.read_array_header_1_0
    shape, is_fortran, dtype = read(stream, max_header_size=_MAX_HEAD_BYTES)
    if dtype.hasobject:
        raise UnsafeFileError(
            f"{where} contains pickled objects. Only numbers and texts are read. No code of the "
            "file was run."
        )
    if len(shape) > MAX_DIMENSIONS or any(size < 0 for size in shape):
        raise ValueError(f"shape {list(shape)[:8]} is invalid")
    return dtype, shape, is_fortran, stream.tell()
