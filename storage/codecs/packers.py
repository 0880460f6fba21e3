"""Packers of optional packages (the extra `codecs`): zstd by `zstandard`, and `blosc2`.

One rule: imported where they are used, so that files say what they hold also where the package is missing; then
a chunk that needs it is refused by name. What a coded run of bytes declares is compared with what the caller
expects before anything is decoded.
"""

from __future__ import annotations

import importlib
import importlib.util
import threading
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import CorruptFileError, UsageError

Bytes = npt.NDArray[np.uint8]
#: Packer -> module. Packer -> the most bytes that one byte can declare: an attack asks for more.
MODULES = {"zstd": "zstandard", "blosc2": "blosc2", "blosc2zstd": "blosc2"}
MAX_EXPANSION = {"zstd": 1 << 15, "blosc2": 1 << 17, "blosc2zstd": 1 << 17}
#: The next level of zstd that gains more than 2 % is 19, and takes 15 times as long.
_ZSTD_LEVEL = 9
#: blosc2's packer and level.
_BLOSC2 = {"blosc2": ("LZ4HC", 9), "blosc2zstd": ("ZSTD", 5)}
_FILTERS = {"": "NOFILTER", "shuffle": "SHUFFLE", "bitshuffle": "BITSHUFFLE"}


def check_installed(packer: str) -> None:
    """Raise `UsageError` if a packer needs a package that is not there; nothing for one that needs none."""
    module = MODULES.get(packer)
    if module is not None and importlib.util.find_spec(module) is None:
        advice = "Install the extra 'codecs', or use 'lz4hc' to write"
        raise UsageError("use the codec", repr(packer), f"the package {module}", "none", advice)


@lru_cache(maxsize=8)
def _module(packer: str) -> Any:
    """Import the package of a packer; looked for once, as that takes as long as decoding 5 KB."""
    check_installed(packer)
    return importlib.import_module(MODULES[packer])


def pack_zstd(data: Bytes, level: int | None) -> bytes:
    zstandard = _module("zstd")
    return bytes(zstandard.ZstdCompressor(level=_ZSTD_LEVEL if level is None else level).compress(data))


#: Holds a decompressor for each thread.
_local = threading.local()


def unpack_zstd(data: Bytes, target: Bytes) -> None:
    """Decode a zstd frame that declares exactly `target`, into it."""
    zstandard = _module("zstd")
    try:
        declared = zstandard.get_frame_parameters(data).content_size
        if declared != len(target):
            raise _wrong(f"{len(target)} bytes", f"{declared} declared")
        if not hasattr(_local, "zstd"):
            _local.zstd = zstandard.ZstdDecompressor()
        with _local.zstd.stream_reader(data) as reader:  # 5 to 8 % faster than bytes that are copied
            got = reader.readinto(target) if len(target) else 0
    except zstandard.ZstdError as cause:
        raise _wrong(f"a zstd frame of {len(target)} bytes", str(cause)) from cause
    if got != len(target):
        raise _wrong(f"a zstd frame of {len(target)} bytes", f"{got}")


def pack_blosc2(items: npt.NDArray[Any], shuffle: str, packer: str, level: int | None) -> bytes:
    """Pack contiguous items with LZ4HC or zstd behind blosc2's own shuffle."""
    blosc2 = _module("blosc2")
    settings = {"filters": [blosc2.Filter[_FILTERS[shuffle]]], "filters_meta": [0], "typesize": items.itemsize}
    codec, usual = _BLOSC2[packer]
    settings |= {"codec": blosc2.Codec[codec], "clevel": usual if level is None else min(9, level)}
    return bytes(blosc2.compress2(np.ascontiguousarray(items).reshape(-1), nthreads=1, **settings))


def unpack_blosc2(data: Bytes, target: Bytes) -> None:
    """Decode a blosc2 chunk that declares exactly `target`, into it."""
    blosc2 = _module("blosc2")
    try:
        declared, coded, _ = blosc2.get_cbuffer_sizes(data)
        if (declared, coded) != (len(target), len(data)):
            raise _wrong(f"{len(target)} bytes in {len(data)}", f"{declared} in {coded} declared")
        blosc2.decompress2(data, dst=target, nthreads=1)
    except (RuntimeError, ValueError, TypeError, BufferError) as cause:
        raise _wrong(f"a blosc2 chunk of {len(target)} bytes", str(cause)) from cause


def _wrong(expected: str, got: str) -> CorruptFileError:
    return CorruptFileError("decode a chunk", "", expected, got)
