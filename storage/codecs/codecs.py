"""Codecs: array <-> stored array, by name. Each states whether, and how much, it loses.

One rule: a codec is pure functions and knows nothing of files. Two kinds meet in one name: what turns each
value into another of a fixed size (`raw`, `normalized_image`), so that rows stay rows, and what makes chunks of
the result (`chunks.py`): `normalized_image+lz4` is both. `auto` is decided by trying (`choose_codec`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy.typing as npt
import torch

from ..core.fields import Field
from ..errors import FieldTypeError, UsageError
from .chunks import AUTO, STAGES, ChunkCodec, chunk_codec, read_chain
from .packers import check_installed
from .stages import IMAGE_MAX_ERROR, decode_image, encode_image

#: `auto` keeps values raw when less than this part would be saved.
MIN_SAVED = 0.1
#: Most frames of a chunk, and most bytes, beyond which it has fewer frames: as many as fit into a cache near the
#: processor, and what a reader of one frame decodes for nothing. Fast LZ4 gains 2 % from chunks twice as large
#: (it looks back 64 KiB), and random windows of 8 images lose a quarter of their speed; slow packers gain 4 to 14 %.
MAX_CHUNK_FRAMES, MAX_CHUNK_BYTES, MAX_SMALL_CHUNK_BYTES = 8, 512 * 1024, 192 * 1024
#: Most bytes that a chunk of several frames decodes to, also with a given number: reading one frame decodes all,
#: and a file, or a blob, of 3 MB could hold one of 600 MB.
LARGEST_CHUNK_BYTES = 64 << 20
_LARGE_CHUNK_PACKERS = tuple(packer for packer in STAGES["packer"] if packer != "lz4")
#: What `auto` tries, by item size: lossless, readable without an extra, and written at 300 MB/s and more. High
#: compression writes 50 MB/s, which may make a learner wait, so that it has to be asked for.
_CANDIDATES = {1: ("lz4", "delta+lz4"), 2: ("shuffle+lz4", "delta+shuffle+lz4")}
_WIDE_CANDIDATES = ("shuffle+lz4", "split+lz4", "delta+split+lz4")


@dataclass(frozen=True)
class Codec:
    """How the values of one field are stored.

    Attributes:
        name: The name in `obs_disassemble_mapping` and in files.
        is_lossless: True if decode(encode(x)) == x for every x that the codec accepts.
        max_error: Largest absolute error on finite values in the codec's range, before the result is rounded to the
            field's dtype; 0 if lossless, None if the data decide. What was lost is measured when they are written.
        stored_dtype: Dtype name of the stored values; None keeps the field's own.
        encode: Tensor of the field's dtype -> tensor of the stored dtype.
        decode: Tensor of the stored dtype -> tensor of the field's dtype.
        chunks: Makes chunks of stored rows, with `auto` of rows as they are; None for rows of a fixed place.
    """

    name: str
    is_lossless: bool
    max_error: float | None
    stored_dtype: str | None
    encode: Callable[[torch.Tensor], torch.Tensor]
    decode: Callable[[torch.Tensor, torch.dtype], torch.Tensor]
    chunks: ChunkCodec | None = None


#: The codecs that keep one stored value per value; stages that make chunks are in `chunks.STAGES`.
VALUE_CODECS: dict[str, Codec] = {
    codec.name: codec
    for codec in (
        Codec("raw", True, 0.0, None, lambda values: values, lambda stored, dtype: stored),
        Codec("normalized_image", False, IMAGE_MAX_ERROR, "uint8", encode_image, decode_image),
    )
}


@lru_cache(maxsize=256)
def find_codec(name: str) -> Codec:
    """Give the codec of a name, for example `raw`, `normalized_image+lz4`, `uint16+shuffle+lz4`, `auto`.

    Raises:
        UsageError: There is none; the text lists the words that names are made of.
    """
    raw, stages = VALUE_CODECS["raw"], name.split("+")
    if name == AUTO:
        return replace(raw, name=AUTO, chunks=chunk_codec(raw.name))
    if AUTO in stages:
        raise UsageError("use the codec", repr(name), f"{AUTO!r} alone", repr(name))
    values = VALUE_CODECS.get(stages[0], raw)
    if name == values.name:
        return values
    if stages[0] == values.name:
        del stages[0]
    chunks = read_chain([] if stages == [raw.name] else stages, name, "" if values is raw else values.name)
    is_lossless, max_error = values.is_lossless and chunks.is_lossless, values.max_error if chunks.is_lossless else None
    return replace(values, name=name, is_lossless=is_lossless, max_error=max_error, chunks=chunks)


def codec_of(field: Field) -> Codec:
    """Give the codec of a field; an unknown name raises `UsageError` listing the known ones."""
    try:
        return find_codec(field.codec)
    except UsageError as error:
        raise UsageError("find the codec of field", repr(field.name), error.expected, error.got) from None


def check_writable(name: str) -> None:
    """Raise `UsageError` if there is no such codec, or if it needs an extra that is not installed."""
    if chunks := find_codec(name).chunks:
        check_installed(chunks.packer)


def stored_field(field: Field) -> Field:
    """Describe a row of the field as it is stored, or as its chunks decode to: the codec's dtype, no codec."""
    return Field(field.name, field.shape, codec_of(field).stored_dtype or field.dtype)


def check_codec(field: Field) -> None:
    """Raise if the codec does not exist or cannot give back the field's dtype."""
    codec, expected = codec_of(field), ""
    is_float = field.torch_dtype.is_floating_point
    if codec.stored_dtype is not None and not (is_float or field.dtype == codec.stored_dtype):
        expected = f"a floating dtype or {codec.stored_dtype}"
    elif codec.chunks and not codec.chunks.is_lossless and not (is_float and field.dtype != "bfloat16"):
        expected = "float16, float32 or float64"
    if expected:
        raise FieldTypeError(f"code the field as {codec.name!r}", repr(field.name), expected, field.dtype)


def most_chunk_frames(row_bytes: int) -> int:
    """How many frames a chunk may have at all: as many as are `LARGEST_CHUNK_BYTES`, at least 1."""
    return max(1, LARGEST_CHUNK_BYTES // max(1, row_bytes))


def chunk_frames(row_bytes: int, codec: str) -> int:
    """How many frames a chunk of this codec has by default: 8, or as many as stay small, at least 1."""
    most = MAX_CHUNK_BYTES if codec.endswith(_LARGE_CHUNK_PACKERS) else MAX_SMALL_CHUNK_BYTES
    return max(1, min(MAX_CHUNK_FRAMES, most // max(1, row_bytes)))


def choose_codec(chunks: Sequence[npt.NDArray[Any]]) -> str:
    """Choose a lossless chain for chunks `[n, *shape]` like these by trying a few: the smallest result.

    "raw" if less than `MIN_SAVED` would be saved.
    """
    num_bytes = sum(part.nbytes for part in chunks)
    best, fewest = "raw", (1 - MIN_SAVED) * num_bytes
    for name in _CANDIDATES.get(chunks[0].dtype.itemsize, _WIDE_CANDIDATES) if chunks else ():
        coded = sum(len(chunk_codec(name).encode(part)[0]) for part in chunks)
        if coded < fewest:
            best, fewest = name, coded
    return best
