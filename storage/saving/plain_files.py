"""Text and JSON files that others wrote: opened only if they are regular, read up to a limit, checked.

One rule: nothing is read of a file before its kind and size are known. A JSON object carries the CRC-32 of itself
without its key `crc32`; older files have none.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..core.durable import crc32
from ..errors import CorruptFileError, SchemaError

#: A million episodes with a file name each take less.
MAX_JSON_BYTES = 64 << 20
CHECKSUM = "crc32"


def open_regular(path: str | os.PathLike[str]) -> int:
    """Open a file for reading; give its descriptor. A pipe would be waited for, and a device has no end."""
    if stat.S_ISREG(os.stat(path).st_mode):
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        if stat.S_ISREG(os.fstat(handle).st_mode):
            return handle
        os.close(handle)
    raise CorruptFileError("open", repr(str(path)), "a file", "a folder, a pipe or a device")


def read_text(path: str | os.PathLike[str], action: str = "read", max_bytes: int = MAX_JSON_BYTES) -> str:
    """Read a text file in UTF-8 of at most `max_bytes`."""
    with open(open_regular(path), "rb") as file:
        if (num_bytes := os.fstat(file.fileno()).st_size) > max_bytes:
            raise CorruptFileError(action, repr(str(path)), f"at most {max_bytes} bytes", str(num_bytes))
        data = file.read(max_bytes)
    try:
        return data.decode()
    except UnicodeDecodeError as cause:
        raise CorruptFileError(action, repr(str(path)), "UTF-8", str(cause)) from cause


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON object with its checksum; checked for being JSON before the file is made."""
    text = json.dumps({**content, CHECKSUM: json_checksum(content)}, indent=1) + "\n"
    if len(text) > MAX_JSON_BYTES:
        raise SchemaError("write", repr(path.name), f"at most {MAX_JSON_BYTES} bytes", str(len(text)))
    path.write_text(text, encoding="utf-8")


def read_json(path: Path, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Read a JSON object of at most `max_bytes` and compare its checksum, if it has one.

    Raises:
        FileNotFoundError: It is not there.
        CorruptFileError: It is no regular file, too large, no JSON object, or was changed.
    """
    try:
        found = json.loads(read_text(path, max_bytes=max_bytes))
    except (ValueError, RecursionError) as cause:
        raise CorruptFileError("read", repr(str(path)), "JSON", str(cause)) from cause
    if not isinstance(found, dict):
        raise CorruptFileError("read", repr(str(path)), "a JSON object", type(found).__name__)
    stated = found.pop(CHECKSUM, None)
    if stated is not None and stated != (checksum := json_checksum(found)):
        advice = f"It was damaged or changed; remove {CHECKSUM!r} from it to load it as it is"
        raise CorruptFileError("read", repr(str(path)), f"checksum {stated}", checksum, advice)
    return found


def json_checksum(content: Mapping[str, Any]) -> str:
    """Give the checksum of a parsed JSON object, which is not of its layout."""
    return f"{crc32(json.dumps(content).encode()):08x}"
