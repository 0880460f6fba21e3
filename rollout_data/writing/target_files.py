"""Sizes and checksums of the files that a conversion wrote, to detect later changes."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from storage.core.durable_files import crc32, open_regular
from storage.errors import UsageError

#: Maximum bytes of a file whose checksum is always compared. The checksum of a larger file is
#: compared only if the modification time has changed.
ALWAYS_READ_BYTES = 1 << 20
#: Bytes read at a time.
_PART_BYTES = 1 << 23


class FileSum(NamedTuple):
    """Size, checksum and modification time of a file of a target.

    Attributes:
        size: Size in bytes.
        checksum: CRC-32 of the content as 8 hexadecimal digits.
        mtime_ns: Modification time in nanoseconds.
    """

    size: int
    checksum: str
    mtime_ns: int


def file_sum(path: Path) -> FileSum:
    """Compute the size, checksum and modification time of a file."""
    descriptor = open_regular(path)
    try:
        status = os.fstat(descriptor)
        return FileSum(
            status.st_size, checksum_of(descriptor, [(0, status.st_size)]), status.st_mtime_ns
        )
    finally:
        os.close(descriptor)


def checksum_of(descriptor: int, ranges: Iterable[tuple[int, int]]) -> str:
    """Compute the CRC-32 of the concatenation of byte ranges (start, size) of a file.

    The result is a text of 8 hexadecimal digits.
    """
    checksum = 0
    for start, size in ranges:
        for first in range(start, start + size, _PART_BYTES):
            data = os.pread(descriptor, min(_PART_BYTES, start + size - first), first)
            if not data:
                break
            checksum = crc32(data, checksum)
    return f"{checksum:08x}"


def gaps(covered: Iterable[tuple[int, int]], size: int) -> Iterator[tuple[int, int]]:
    """Yield the byte ranges (start, size) of a file of `size` bytes that are not in `covered`."""
    end = 0
    for start, num_bytes in sorted(covered):
        if start > end:
            yield end, start - end
        end = max(end, start + num_bytes)
    if size > end:
        yield end, size - end


def check_file(target: Path, file: Path, noted: FileSum) -> None:
    """Check that a file of a target still has its recorded size and checksum.

    Raises:
        UsageError: The file was removed or changed.
    """
    try:
        status = os.stat(file)
    except (FileNotFoundError, NotADirectoryError):
        raise changed_file(target, file, "it was removed") from None
    if not stat.S_ISREG(status.st_mode):
        raise changed_file(target, file, "it is not a regular file")
    if status.st_size != noted.size:
        raise changed_file(target, file, f"it has {status.st_size} bytes, expected {noted.size}")
    is_read = status.st_size <= ALWAYS_READ_BYTES or status.st_mtime_ns != noted.mtime_ns
    if is_read and file_sum(file).checksum != noted.checksum:
        raise changed_file(target, file, "its content differs")


def changed_file(target: Path, file: Path, change: str) -> UsageError:
    """Build the error for a file of a target that was changed after it was written."""
    return UsageError(
        f"file {str(file)!r} of the target {str(target)!r} was changed after the conversion wrote "
        f"it: {change}. Choose another target."
    )


def sums_from_json(value: Any) -> dict[str, FileSum] | None:
    """Parse sizes, checksums and times of a target's files from a JSON value.

    Returns:
        Maps file names to sizes, checksums and times. None if the value is invalid, or a file name
        is outside of the target.
    """
    if not isinstance(value, dict):
        return None
    sums = {}
    for name, parts in value.items():
        if not isinstance(parts, list) or [type(part) for part in parts] != [int, str, int]:
            return None
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or "\0" in name:
            return None
        sums[name] = FileSum(*parts)
    return sums


def sums_as_json(sums: Mapping[str, FileSum]) -> dict[str, list[Any]]:
    """Convert a mapping of file names to sizes, checksums and times to JSON values."""
    return {name: list(file_sum) for name, file_sum in sums.items()}
