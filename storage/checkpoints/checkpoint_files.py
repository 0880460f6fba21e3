"""Checkpoint files: files of `torch.save`, uncompressed or in an LZ4 frame.

Sizes and checksums are checked before torch reads the file. By default, only tensors and plain
types are loaded.
"""

from __future__ import annotations

import io
import json
import mmap
import os
import pickle
import struct
import sys
import time
import zipfile
from contextlib import nullcontext
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import numpy.typing as npt
import torch

from ..codecs.lz4_frames import MAGIC, Lz4Writer, decode, scan_frames, skippable_frame
from ..core import arguments
from ..core.arguments import whole
from ..core.durable_files import crc32, open_regular, replace_file
from ..core.threads import num_processors
from ..errors import CorruptFileError, DataFileError, ForeignFileError, UnsafeFileError, UsageError
from .allowed_types import NotLoadedError, allowed_globals, check_values, reason

#: Suffix of compressed checkpoints.
SUFFIX = ".lz4"
#: Name of the zip member that contains the metadata of the user.
META_NAME = "archive/meta.json"
_ZIP_MAGIC = b"PK\x03\x04"
#: Header of a zip member, with the lengths of the name and of the extra field at its end.
#: The name and the extra field precede the content.
_LOCAL_HEADER = struct.Struct("<26xHH")
_CHUNK_BYTES = 4 << 20
#: Errors that damaged pickles cause, in addition to `UnpicklingError` and errors of torch.
_NONSENSE = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    TypeError,
    ValueError,
    struct.error,
)


class MissingCheckpointError(DataFileError, FileNotFoundError):
    """No file of a checkpoint exists."""


def write_checkpoint(obj: Any, path: Path, level: int | None, meta: bytes | None) -> None:
    """Write a checkpoint atomically.

    Args:
        obj: Object to save. It must not change during the call.
        path: Path of the file, including the suffix.
        level: LZ4 level; None for no compression.
        meta: Metadata as JSON, or None. It is stored as a member of the zip archive, or in a
            compressed file as a frame that LZ4 readers skip.
    """
    with replace_file(path) as new:
        with open(new, "wb") as file:
            if level is None:
                save_to(obj, file)
            else:
                with Lz4Writer(file, level) as stream:
                    save_to(obj, stream)
                if meta is not None:
                    file.write(skippable_frame(meta))
        if level is None and meta is not None:
            with zipfile.ZipFile(new, "a") as archive:
                archive.writestr(META_NAME, meta)
        # Loading compares the times of two files of a checkpoint.
        # Times that the file system sets are too coarse to order two saves in quick succession.
        now_ns = time.time_ns()
        os.utime(new, ns=(now_ns, now_ns))


def save_to(obj: Any, file: IO[bytes] | Lz4Writer) -> None:
    """Save an object by `torch.save`. A full disk raises `OSError`, not an error of torch."""
    try:
        torch.save(obj, cast(IO[bytes], file))
    except RuntimeError as cause:
        if isinstance(cause.__context__, OSError):
            raise cause.__context__ from None
        raise


def load_checkpoint(
    path: str | os.PathLike[str],
    map_location: Any = "cpu",
    weights_only: bool = True,
    *,
    device: torch.device | str | None = None,
) -> Any:
    """Load a checkpoint.

    Args:
        path: Path that was passed to `save_async`. The newer of `path` and `path` + ".lz4" is read.
            If `path` ends in ".lz4", only this file is read.
        map_location: As for `torch.load`. The device must exist.
        weights_only: Load only tensors, numbers, strings, plain containers, numpy values,
            `argparse.Namespace`, and members of enums whose classes are already imported. Use False
            only for files that you trust: loading then runs code of the file.
        device: Alias of `map_location`, for a single device.

    Raises:
        MissingCheckpointError: Neither file exists.
        CorruptFileError: The file is truncated, a checksum is wrong, declared sizes exceed the
            file, or it contains no pickle.
        ForeignFileError: The file is neither a zip archive of `torch.save` nor an LZ4 frame.
        UnsafeFileError: The file contains a type that is not loaded; the message names the type.
        UsageError: `device` and `map_location` differ, or `device` is not available.
    """
    return load_checkpoint_parallel(path, map_location, weights_only, num_threads=1, device=device)


def load_checkpoint_parallel(
    path: str | os.PathLike[str],
    map_location: Any = "cpu",
    weights_only: bool = True,
    *,
    num_threads: int | None = None,
    device: torch.device | str | None = None,
) -> Any:
    """Load a checkpoint, and decompress it in several threads. Arguments: see `load_checkpoint`.

    `num_threads` None means one thread per available processor, but at most 8.
    """
    if num_threads is None:
        num_threads = min(8, num_processors())
    whole("num_threads", num_threads, 1)
    arguments.flag("weights_only", weights_only)
    if device is not None:
        if map_location not in ("cpu", device):
            raise UsageError(
                f"device is {device!r} and map_location is {map_location!r}. Pass only one of "
                "device and map_location."
            )
        map_location = arguments.device("device", device)
    elif isinstance(map_location, (str, torch.device)):
        map_location = arguments.device("map_location", map_location)
    located = _find(path)
    with open(located, "rb") as file:
        content = _decoded(file, located, num_threads) if _is_compressed(file, located) else file
        buffer = memoryview(bytearray(_CHUNK_BYTES))
        for member in _members(content, located).values():
            _check_member(content, member, located, buffer)
        return _unpickled(content, located, content, map_location, weights_only)


def map_checkpoint(path: Path) -> Any:
    """Load an uncompressed checkpoint, whose tensors are mapped from the file into memory.

    Writing to a tensor does not change the file. Only tensors and plain types are loaded, as by
    default in `load_checkpoint`. Checksums are not checked, because that would read the whole file.

    Raises:
        CorruptFileError: The file is truncated, or declared sizes exceed the file.
        ForeignFileError: The file is no zip archive of `torch.save`.
        UnsafeFileError: The file contains a type that is not loaded.
    """
    with open(open_regular(path), "rb") as file:
        if _is_compressed(file, path):
            raise ForeignFileError(f"{str(path)!r} is an LZ4 frame, which cannot be mapped.")
        _members(file, path)
        return _unpickled(file, path, path, "cpu", weights_only=True)


def _unpickled(
    content: IO[bytes],
    path: Path,
    source: IO[bytes] | Path,
    map_location: Any,
    weights_only: bool,
) -> Any:
    """Load a checkpoint by `torch.load`; convert the errors of damaged and unsafe files.

    Args:
        content: The zip archive, whose members were checked.
        path: Path of the file, for errors.
        source: `content` to read the tensors into memory, or the path of the archive to map them.
        map_location: As for `torch.load`.
        weights_only: Whether only tensors and plain types are loaded.
    """
    content.seek(0)
    try:
        # Only with `weights_only=False`, loading may run code of the file.
        with allowed_globals(content) if weights_only else nullcontext(False) as has_names:
            loaded = torch.load(
                source,
                map_location=map_location,
                weights_only=weights_only,
                mmap=isinstance(source, Path),
            )
        if has_names:
            check_values(loaded)
        return loaded
    except pickle.UnpicklingError as cause:
        if not weights_only:
            raise _damaged(path, f"it contains no valid pickle ({cause})") from cause
        raise _unsafe(path, cause) from cause
    except (RuntimeError, EOFError) as cause:
        problem = str(cause) or "the end of the file"
        raise DataFileError(f"{str(path)!r} cannot be loaded: {problem}.") from cause
    except _NONSENSE as cause:
        if isinstance(cause, AttributeError) and not weights_only:
            # The program lacks a class of the checkpoint. The file is not damaged.
            raise
        problem = f"it is not a file of torch.save ({type(cause).__name__}: {cause})"
        raise _damaged(path, problem) from cause


def _unsafe(path: Path, cause: pickle.UnpicklingError) -> UnsafeFileError:
    refused = reason(cause)
    advice = "Pass weights_only=False if you trust the file."
    if isinstance(cause, NotLoadedError):
        refused = str(cause)
        modules = sorted({name.rpartition(".")[0] for name in cause.names} - sys.modules.keys())
        if modules:
            advice = f"For an enum, import {modules[0]!r} before loading. {advice}"
    return UnsafeFileError(
        f"{str(path)!r} contains objects that are not loaded by default: {refused}. {advice}"
    )


def load_checkpoint_meta(path: str | os.PathLike[str]) -> Any:
    """Read the `meta` that was passed to `save_async`, without reading the tensors.

    Returns None for a checkpoint without `meta`. Raises the errors of `load_checkpoint`.
    """
    located = _find(path)
    text = None
    with open(located, "rb") as file:
        if _is_compressed(file, located):
            data = _mapped(file)
            for frame in scan_frames(data, str(located)):
                text = bytes(data[slice(*frame.blocks[0])]) if frame.is_skippable else text
        elif member := _members(file, located).get(META_NAME):
            file.seek(_check_member(file, member, located, memoryview(bytearray(_CHUNK_BYTES))))
            text = file.read(member.file_size)
    try:
        return None if text is None else json.loads(text)
    except ValueError as cause:
        raise _damaged(located, f"its meta is not valid JSON ({cause})") from cause


def _find(path: str | os.PathLike[str]) -> Path:
    """Return the file of a checkpoint: the newer of `path` and `path` + ".lz4"."""
    plain = arguments.path("", path)
    candidates = (
        [plain] if plain.suffix == SUFFIX else [plain, plain.with_name(plain.name + SUFFIX)]
    )
    existing = [(file.stat().st_mtime_ns, file) for file in candidates if file.is_file()]
    if not existing:
        names = " nor ".join(repr(str(file)) for file in candidates)
        if len(candidates) > 1:
            raise MissingCheckpointError(f"Neither {names} exists.")
        raise MissingCheckpointError(f"{names} does not exist.")
    return max(existing)[1]


def _is_compressed(file: IO[bytes], path: Path) -> bool:
    magic = file.read(4)
    file.seek(0)
    if magic not in (MAGIC, _ZIP_MAGIC):
        start = f"starts with the bytes {magic.hex()}" if magic else "is empty"
        raise ForeignFileError(
            f"{str(path)!r} {start}. A checkpoint is a zip archive of torch.save or an LZ4 frame."
        )
    return magic == MAGIC


def _mapped(file: IO[bytes]) -> memoryview:
    """Map a non-empty file into memory, for as long as a view of the memory exists."""
    return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def _decoded(file: IO[bytes], path: Path, num_threads: int) -> io.BufferedReader:
    data = _mapped(file)
    return cast(
        io.BufferedReader,
        _MemoryFile(decode(data, scan_frames(data, str(path)), str(path), num_threads)),
    )


class _MemoryFile(io.RawIOBase):
    """File object that reads bytes in memory without a copy."""

    def __init__(self, content: npt.NDArray[np.uint8]) -> None:
        self._content = content
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._content)}[whence]
        self._at = max(0, start + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        part = self._content[self._at : self._at + len(buffer)]
        np.frombuffer(buffer, np.uint8)[: len(part)] = part
        self._at += len(part)
        return len(part)


def _members(file: io.BufferedReader, path: Path) -> dict[str, zipfile.ZipInfo]:
    """Read the directory of a zip archive, and return its members by name.

    Raises:
        CorruptFileError: The file is not a zip archive, a member is compressed, or the members are
            larger than the archive.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, ValueError, OSError) as cause:
        raise _damaged(path, f"it is not a zip archive ({cause})") from cause
    left = size = file.seek(0, io.SEEK_END)
    for member in members:
        left -= member.file_size
        if member.compress_type != zipfile.ZIP_STORED:
            sizes = f"{member.file_size} bytes, compressed to {member.compress_size}"
            raise _damaged(path, f"member {member.filename!r} has {sizes}")
        is_cut = member.file_size != member.compress_size or left < 0
        if is_cut or not 0 <= member.header_offset < size:
            raise _damaged(
                path,
                f"member {member.filename!r} has {member.file_size} bytes at offset "
                f"{member.header_offset}, in a file of {size} bytes",
            )
    return {member.filename: member for member in members}


def _check_member(
    file: io.BufferedReader, member: zipfile.ZipInfo, path: Path, buffer: memoryview
) -> int:
    """Check the checksum of a zip member and return the offset of its content.

    The content is read piece by piece into `buffer`, three times as fast as with `zipfile`.
    """
    name = f"member {member.filename!r}"
    file.seek(member.header_offset)
    header = file.read(_LOCAL_HEADER.size)
    if len(header) < _LOCAL_HEADER.size or not header.startswith(_ZIP_MAGIC):
        raise _damaged(path, f"{name} has no zip header, got the bytes {header[:4]!r}")
    start: int = member.header_offset + _LOCAL_HEADER.size + sum(_LOCAL_HEADER.unpack(header))
    file.seek(start)
    left = member.file_size
    crc = 0
    while left:
        num_bytes = file.readinto(buffer[:left])
        if not num_bytes:
            raise _damaged(path, f"the last {left} bytes of {name} are missing")
        left = left - num_bytes
        crc = crc32(buffer[:num_bytes], crc)
    if crc != member.CRC:
        raise _damaged(path, f"{name} has checksum {crc:08x}, expected {member.CRC:08x}")
    return start


def _damaged(path: Path, problem: str) -> CorruptFileError:
    return CorruptFileError(f"{str(path)!r} is truncated or damaged: {problem}.")
