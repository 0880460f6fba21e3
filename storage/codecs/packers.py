"""Packers: the last stage of a chain, which compresses bytes. `PACKERS` is the registry.

The size that packed bytes declare is compared with the expected size before they are decoded.
Packages of the extra `codecs` are imported on first use.
"""

from __future__ import annotations

import importlib
import importlib.util
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import CorruptFileError, UsageError
from . import lz4_frames as lz4

Bytes = npt.NDArray[np.uint8]
#: Default level of zstd. Only levels from 19 on are more than 2 % smaller, and take 15 times as
#: long.
_ZSTD_LEVEL = 9
#: The zstd decompressor of each thread.
_local = threading.local()
_FILTERS = {"": "NOFILTER", "shuffle": "SHUFFLE", "bitshuffle": "BITSHUFFLE"}


@dataclass(frozen=True)
class Packer:
    """A compressor of bytes, the last stage of a chain.

    Attributes:
        pack: Function that compresses items to bytes. Arguments: contiguous items, the level (None
            for the default), and the name of a shuffle ("" for none).
        unpack: Function that decompresses bytes to new memory. Arguments: packed bytes, and the
            number of unpacked bytes. Raises `CorruptFileError`.
        max_expansion: Maximum number of unpacked bytes per packed byte. Readers reject data that
            declare more.
        module: Required package of the extra `codecs`; None if the packer needs no extra.
        shuffles: Whether `pack` shuffles the items. Otherwise the caller passes shuffled bytes.
    """

    pack: Callable[[npt.NDArray[Any], int | None, str], bytes]
    unpack: Callable[[Bytes, int], Bytes]
    max_expansion: int
    module: str | None = None
    shuffles: bool = False


def check_installed(packer: str) -> None:
    """Raise `UsageError` if the package of a packer is not installed."""
    module = PACKERS[packer].module if packer else None
    if module is not None and importlib.util.find_spec(module) is None:
        raise UsageError(
            f"codec {packer!r} needs the package {module}. Install the extra 'codecs', or write "
            "with the codec 'lz4hc'."
        )


@lru_cache(maxsize=8)
def _module(packer: str) -> Any:
    """Import the package of a packer and return the module.

    The module is cached, since looking for the package takes as long as decoding 5 KB.
    """
    check_installed(packer)
    return importlib.import_module(str(PACKERS[packer].module))


def _pack_lz4(default_level: int, items: npt.NDArray[Any], level: int | None, _: str) -> bytes:
    # Fast LZ4 has the default level 0 and no other level.
    return lz4.compress(items, default_level if level is None or not default_level else level)


def _unpack_lz4(data: Bytes, num_bytes: int) -> Bytes:
    return np.frombuffer(lz4.decompress(data, num_bytes), np.uint8)


def _pack_zstd(items: npt.NDArray[Any], level: int | None, _: str) -> bytes:
    zstandard = _module("zstd")
    return bytes(
        zstandard.ZstdCompressor(level=_ZSTD_LEVEL if level is None else level).compress(items)
    )


def _unpack_zstd(data: Bytes, num_bytes: int) -> Bytes:
    zstandard = _module("zstd")
    try:
        declared = zstandard.get_frame_parameters(data).content_size
        if declared != num_bytes:
            raise CorruptFileError(
                f"the zstd frame declares {declared} bytes, expected {num_bytes}."
            )
        if not hasattr(_local, "zstd"):
            _local.zstd = zstandard.ZstdDecompressor()
        unpacked = np.empty(num_bytes, np.uint8)
        # This is 5 to 8 % faster than `decompress` and a copy of its result.
        with _local.zstd.stream_reader(data) as reader:
            num_read = reader.readinto(unpacked) if num_bytes else 0
    except zstandard.ZstdError as cause:
        raise CorruptFileError(f"the zstd frame is damaged: {cause}.") from cause
    if num_read != num_bytes:
        raise CorruptFileError(f"the zstd frame decodes to {num_read} bytes, expected {num_bytes}.")
    return unpacked


def _pack_blosc2(
    codec: str, default_level: int, items: npt.NDArray[Any], level: int | None, shuffle: str
) -> bytes:
    """Pack contiguous items with blosc2, including the shuffle."""
    blosc2 = _module("blosc2")
    settings = {
        "filters": [blosc2.Filter[_FILTERS[shuffle]]],
        "filters_meta": [0],
        "typesize": items.itemsize,
    }
    settings["codec"] = blosc2.Codec[codec]
    settings["clevel"] = default_level if level is None else min(9, level)
    return bytes(blosc2.compress2(np.ascontiguousarray(items).reshape(-1), nthreads=1, **settings))


def _unpack_blosc2(data: Bytes, num_bytes: int) -> Bytes:
    blosc2 = _module("blosc2")
    unpacked = np.empty(num_bytes, np.uint8)
    try:
        declared, coded, _ = blosc2.get_cbuffer_sizes(data)
        if (declared, coded) != (num_bytes, len(data)):
            raise CorruptFileError(
                f"the blosc2 chunk declares {declared} decoded and {coded} packed bytes, expected "
                f"{num_bytes} decoded and {len(data)} packed bytes."
            )
        blosc2.decompress2(data, dst=unpacked, nthreads=1)
    except (RuntimeError, ValueError, TypeError, BufferError) as cause:
        raise CorruptFileError(f"the blosc2 chunk is damaged: {cause}.") from cause
    return unpacked


#: Packers by their name in chains. A new packer needs one entry here.
PACKERS = {
    "lz4": Packer(partial(_pack_lz4, 0), _unpack_lz4, lz4.MAX_EXPANSION),
    "lz4hc": Packer(partial(_pack_lz4, lz4.DEFAULT_HIGH_LEVEL), _unpack_lz4, lz4.MAX_EXPANSION),
    "zstd": Packer(_pack_zstd, _unpack_zstd, 1 << 15, "zstandard"),
    "blosc2": Packer(
        partial(_pack_blosc2, "LZ4HC", 9), _unpack_blosc2, 1 << 17, "blosc2", shuffles=True
    ),
    "blosc2zstd": Packer(
        partial(_pack_blosc2, "ZSTD", 5), _unpack_blosc2, 1 << 17, "blosc2", shuffles=True
    ),
}
