"""CRC-32 as files of this project carry it, by the quickest implementation that is there.

One rule: the sum is always that of zlib (ISO 3309, polynomial 0x04c11db7), so that any reader can check it. zlib
itself reaches about 3.6 GB/s on the machines that we measured, which is less than the page cache takes; zlib-ng (the
extra `fast`) folds with carry-less multiplication and reaches 24 GB/s, so that checking costs next to nothing.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from importlib import import_module


def _quickest() -> Callable[..., int]:
    try:
        function: Callable[..., int] = import_module("zlib_ng.zlib_ng").crc32
    except ImportError:
        return zlib.crc32
    return function


#: `crc32(data, start=0)`: the sum of a buffer, continued from that of the bytes before it.
crc32: Callable[..., int] = _quickest()
