"""Compress the blocks of an LZ4 frame, one after the other, into memory that is there already.

One rule: no memory is allocated per block. The package `lz4` gives every block in new memory, and twice; for
blocks of 4 MiB the page faults cost several times the compression itself (0.1 s against 0.3 s and more for
200 MB). Its libraries also export the functions behind that, which are called here directly; where they do
not, the package is used as it is.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import lz4.block
import lz4.frame
import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
BLOCK_BYTES = 4 << 20
#: From this level on LZ4 compresses harder and slower; the numbers are LZ4's own.
_MIN_HIGH_LEVEL = 3
#: Set in a block's size where the block is stored as it is.
_STORED = 1 << 31


class _Functions:
    """The exported functions.

    Raises:
        AttributeError, OSError: They are not there.
    """

    def __init__(self) -> None:
        block, frame = (ctypes.CDLL(module.__file__) for module in (lz4.block._block, lz4.frame._frame))
        place, size = ctypes.c_void_p, ctypes.c_int
        self.fast = _typed(block.LZ4_compress_fast, size, place, place, size, size, size)
        self.high = _typed(block.LZ4_compress_HC, size, place, place, size, size, size)
        self.new_state = _typed(frame.XXH32_createState, place)
        self.free_state = _typed(frame.XXH32_freeState, ctypes.c_int, place)
        self.reset = _typed(frame.XXH32_reset, ctypes.c_int, place, ctypes.c_uint)
        self.update = _typed(frame.XXH32_update, ctypes.c_int, place, place, ctypes.c_size_t)
        self.digest = _typed(frame.XXH32_digest, ctypes.c_uint, place)


def _typed(function: Any, result: Any, *arguments: Any) -> Callable[..., int]:
    function.restype, function.argtypes = result, arguments
    found: Callable[..., int] = function
    return found


@lru_cache(maxsize=1)
def _functions() -> _Functions | None:
    try:
        return _Functions()
    except (AttributeError, OSError, TypeError):
        return None


class BlockStream:
    """Makes the parts of one frame: header, blocks in order, end.

    Args:
        level: LZ4's.
    """

    def __init__(self, level: int) -> None:
        self._level = level
        self._package = lz4.frame.LZ4FrameCompressor(
            block_size=lz4.frame.BLOCKSIZE_MAX4MB,
            block_linked=False,
            block_checksum=False,
            content_checksum=True,
            compression_level=level,
            auto_flush=True,
        )
        self.header: bytes = self._package.begin()
        self._functions = _functions()
        self._state: Any = None
        if self._functions is not None:
            self._state = ctypes.c_void_p(self._functions.new_state())
            self._functions.reset(self._state, 0)

    def compress(self, block: Bytes, out: Bytes) -> tuple[bytes, Any]:
        """Make the next block of at most `BLOCK_BYTES` in `out`, as large; give its size field and its bytes.

        The bytes are valid until `block` or `out` is changed.
        """
        functions = self._functions
        if functions is None:
            return b"", self._package.compress(block)
        source, target = (array.__array_interface__["data"][0] for array in (block, out))
        functions.update(self._state, source, len(block))
        if self._level >= _MIN_HIGH_LEVEL:
            size = functions.high(source, target, len(block), len(block) - 1, self._level)
        else:
            size = functions.fast(source, target, len(block), len(block) - 1, max(1, -self._level))
        if size > 0:
            return size.to_bytes(4, "little"), out[:size].data
        return (len(block) | _STORED).to_bytes(4, "little"), block.data  # it would not be smaller

    def end(self) -> bytes:
        """Give what ends the frame: a mark and the checksum of the content."""
        if self._functions is None:
            return bytes(self._package.flush())
        return bytes(4) + self._functions.digest(self._state).to_bytes(4, "little")

    def close(self) -> None:
        """Free what the checksum needs. Idempotent."""
        if self._functions is not None and self._state is not None:
            self._functions.free_state(self._state)
            self._state = None
