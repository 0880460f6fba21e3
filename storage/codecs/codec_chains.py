"""Codecs: array <-> stored array, by name; and chunks: a few frames as bytes that can be decoded alone.

One rule: a codec is pure functions, knows nothing of files, and states whether, and how much, it loses. Two kinds meet
in one name: what turns each value into another of a fixed size (`raw`, `normalized_image`), so that rows stay rows, and
the chain that makes chunks of the result: `normalized_image+lz4` is both. `auto` is decided by trying.

A chain is written `quantizer+delta+shuffle+packer`, any part of it: `uint16+shuffle+lz4`. The quantizer here is
`uint16`, or `uint16(low,high)`; deltas are `delta` (subtract the frame before, as integers of the bytes) and
`xor`; shuffles `shuffle`, `split`, `bitshuffle`; packers `lz4` (fast), `lz4hc` (high compression) and, with the
extra `codecs`, `zstd` (smaller images), `blosc2` (`lz4hc`) and `blosc2zstd`, which shuffle themselves, with SIMD.
Video (`video.py`: `h264:crf=18`) stands alone.

A chunk says how it was packed and in which range it was quantized; dtype, frame shape, number of frames and the chain
are known from where it stands, and nothing is decoded into more than those ask for. It is one byte: 0 for plain values,
where stages would not save anything or more than readers believe, or 1; then the range of a quantizer (low, step:
float64, whether special counts: uint8, all little-endian); then the bytes.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..core.fields import Field
from ..errors import CorruptFileError, FieldTypeError, UsageError, nearest
from . import lz4_frames as lz4
from . import video_codec as video
from .codec_stages import (
    IMAGE_MAX_ERROR,
    RANGE_BYTES,
    SHUFFLES,
    LinearCounts,
    decode_counts,
    decode_image,
    encode_image,
    scratch_bytes,
    shuffle,
    shuffled_bytes,
    unshuffle,
)
from .packers import PACKERS, check_installed

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
_QUANTIZER = re.compile(r"uint16(?:\(([^,()]+),([^,()]+)\))?")
#: Delta -> how a frame is changed by the one before it, and how that is undone.
DELTAS = {"delta": (np.subtract, np.add), "xor": (np.bitwise_xor, np.bitwise_xor)}
#: Kinds of stages in the order in which they stand in a chain, each with the registry of its kind.
STAGES: dict[str, tuple[str, ...]] = {
    "quantizer": ("uint16",),
    "delta": tuple(DELTAS),
    "shuffle": SHUFFLES,
    "packer": tuple(PACKERS),
}
AUTO = "auto"
#: First byte of a chunk.
_PLAIN, _PACKED = 0, 1
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
class ChunkCodec:
    """A chain of stages, by name; "" for none."""

    name: str
    #: The one stage that loses.
    quantizer: LinearCounts | None = None
    delta: str = ""
    shuffle: str = ""
    packer: str = ""
    #: What codes pictures with loss, instead of all stages.
    video: video.Video | None = None

    @property
    def is_lossless(self) -> bool:
        """Return whether decoding restores every bit."""
        return self.quantizer is None and self.video is None

    @property
    def max_expansion(self) -> int:
        """How many bytes of frames one byte of a chunk can be at most; more is refused as an attack."""
        if self.video is not None:
            return video.MAX_EXPANSION
        most = PACKERS[self.packer].max_expansion if self.packer else lz4.MAX_EXPANSION
        return most * (4 if self.quantizer is not None else 1)

    @property
    def packer_shuffles(self) -> bool:
        """Return whether shuffling is left to the packer."""
        return bool(self.packer) and PACKERS[self.packer].shuffles

    def check_dtype(self, dtype: np.dtype[Any]) -> None:
        """Raise `FieldTypeError` if values of this dtype cannot be coded."""
        if self.quantizer is not None and dtype.kind != "f":
            raise FieldTypeError("code values", f"as {self.name!r}", "float16, float32 or float64", str(dtype))
        if self.video is not None and dtype != np.uint8:
            raise FieldTypeError("code values", f"as {self.name!r}", "uint8 pictures", str(dtype))

    def encode(self, frames: Array, level: int | None = None) -> tuple[bytes, float]:
        """Code `[F, *shape]` frames as one chunk; give it and the largest error, 0 if nothing is lost.

        `level` is the packer's, None for its default.
        """
        about = b""
        error = 0.0
        values: Array = np.ascontiguousarray(frames).reshape(len(frames), prod(frames.shape[1:]))
        if self.quantizer is not None:
            about, counts, error = self.quantizer.encode(values)
            values = counts.reshape(values.shape)
        items = values.view(_unsigned(values.dtype))
        data = self._packed(items, level) if self.video is None else self.video.encode(frames)
        # blosc2 packs any number of zeros into 32 bytes; shorter than readers believe is no use.
        if len(data) < items.nbytes and frames.nbytes <= self.max_expansion * len(data):
            if self.video is not None:
                shown = np.empty_like(frames)
                self.video.decode(np.frombuffer(data, np.uint8), shown)
                error = float((np.maximum(shown, frames) - np.minimum(shown, frames)).max(initial=0))
            return bytes([_PACKED]) + about + data, error
        return bytes([_PLAIN]) + about + items.tobytes(), error

    def _packed(self, items: Array, level: int | None) -> bytes:
        if self.delta and len(items) > 1:
            changes = items.copy()
            DELTAS[self.delta][0](items[1:], items[:-1], out=changes[1:])
            items = changes
        if self.packer_shuffles:
            return PACKERS[self.packer].pack(items, level, self.shuffle)
        data = shuffle(self.shuffle, items.reshape(-1)) if self.shuffle else items.reshape(-1).view(np.uint8)
        return PACKERS[self.packer].pack(data, level, "") if self.packer else data.tobytes()

    def decode(self, chunk: Bytes, out: Array) -> None:
        """Decode a chunk into `out`, `[F, *shape]`, contiguous; from any number of threads at once.

        Raises:
            CorruptFileError: The chunk does not hold exactly these frames; `out` has undefined content.
        """
        start = 1 + (RANGE_BYTES if self.quantizer is not None else 0)
        if len(chunk) < start or chunk[0] > _PACKED:
            expected = "a chunk with its header"
            got = f"{chunk[:start].tobytes()!r}"
            raise CorruptFileError("decode a chunk", "", expected, got)
        if self.video is not None and chunk[0] == _PACKED:
            self.video.decode(chunk[1:], out)
            return
        if self.quantizer is None:
            self._undo(chunk[1:], chunk[0], out.reshape(-1).view(_unsigned(out.dtype)), len(out))
            return
        counts = _scratch(0, 2 * out.size).view(np.uint16)
        self._undo(chunk[start:], chunk[0], counts, len(out))
        decode_counts(chunk[1:start].tobytes(), counts, out.reshape(-1))

    def decoded(self, chunk: Bytes, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Decode a chunk to new memory: of one that is only packed, without the copy that `decode` makes."""
        if self.name in PACKERS and len(chunk) and chunk[0] == _PACKED:
            return self._unpacked(chunk[1:], prod(shape) * dtype.itemsize).view(dtype).reshape(shape)
        out: Array = np.empty(shape, dtype)
        self.decode(chunk, out)
        return out

    def _undo(self, data: Bytes, method: int, items: Array, num_frames: int) -> None:
        """Undo everything but the quantizer: to the unsigned items of all frames, one after the other."""
        size = items.dtype.itemsize
        is_shuffled = bool(self.shuffle) and (size > 1 or self.shuffle == "bitshuffle")  # of one byte only bits can be
        if method == _PLAIN or not is_shuffled or self.packer_shuffles:
            target = items.view(np.uint8)
            target[:] = self._unpacked(data, len(target), is_packed=method == _PACKED)
            if method == _PLAIN:
                return
        else:
            num_bytes = shuffled_bytes(self.shuffle, items.size, size)
            unshuffle(self.shuffle, self._unpacked(data, num_bytes), items, _scratch(1, scratch_bytes(num_bytes)))
        if self.delta and num_frames > 1:
            undo = DELTAS[self.delta][1]
            for before, frame in pairwise(items.reshape(num_frames, items.size // num_frames)):
                undo(frame, before, out=frame)

    def _unpacked(self, data: Bytes, num_bytes: int, is_packed: bool = True) -> Bytes:
        if self.packer and is_packed:
            return PACKERS[self.packer].unpack(data, num_bytes)
        if len(data) != num_bytes:
            raise CorruptFileError("decode a chunk", "", f"{num_bytes} bytes", f"{len(data)}")
        return data


@lru_cache(maxsize=32)
def _unsigned(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype(f"u{dtype.itemsize}")


#: The scratch of each thread, by its place.
_local = threading.local()


def _scratch(place: int, num_bytes: int) -> Bytes:
    """Return memory of this thread that the next call with the same `place` takes over."""
    scratch: dict[Any, Bytes] = _local.__dict__
    held = scratch.get(place)
    if held is None or len(held) < num_bytes:
        held = scratch[place] = np.empty(-(-num_bytes // 8) * 8, np.uint8)
    return held[:num_bytes]


# -- names -------------------------------------------------------------------------------------


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


#: The codecs that keep one stored value per value; stages that make chunks are in `STAGES`.
VALUE_CODECS: dict[str, Codec] = {
    codec.name: codec
    for codec in (
        Codec("raw", True, 0.0, None, lambda values: values, lambda stored, dtype: stored),
        Codec("normalized_image", False, IMAGE_MAX_ERROR, "uint8", encode_image, decode_image),
    )
}
#: Every word that a codec's name may be made of.
CODEC_WORDS = (*VALUE_CODECS, AUTO, *video.CODERS, *(stage for stages in STAGES.values() for stage in stages))


@lru_cache(maxsize=256)
def chunk_codec(name: str) -> ChunkCodec:
    """Return the codec of a chain, checked; "raw" or "" keeps values as they are.

    Raises:
        UsageError: An unknown stage, or stages in another order; the text says what is known, or the order.
    """
    return _read_chain([] if name in ("", "raw") else name.split("+"), name)


def _read_chain(stages: Sequence[str], name: str, before: str = "") -> ChunkCodec:
    """Return the codec of stages in a codec's name, behind a quantizer of values that stands `before` them."""
    if not before and len(stages) == 1 and (coder := video.video_named(stages[0])) is not None:
        return ChunkCodec(name, video=coder)
    found: dict[str, Any] = {}
    kinds = list(STAGES)[bool(before) :]
    for stage in stages:
        match = _QUANTIZER.fullmatch(stage)
        kind = next((kind for kind in STAGES if stage in STAGES[kind] or (match and kind == "quantizer")), "")
        if not kind and not (before and stage in (*VALUE_CODECS, AUTO)):
            raise UsageError("use the codec", repr(name), nearest(stage, CODEC_WORDS), repr(stage))
        if kind not in kinds:
            order = f"stages in the order {'+'.join(STAGES)}, each at most once"
            raise UsageError("use the codec", repr(name), order, f"{stage!r} after {before!r}")
        kinds = kinds[kinds.index(kind) + 1 :]
        before = stage
        found[kind] = _linear(name, match) if match else stage
    codec = ChunkCodec("+".join(stages) or "raw", **found)
    if codec.packer_shuffles and codec.shuffle == "split":
        raise UsageError("use the codec", repr(name), "'shuffle', 'bitshuffle' or none before blosc2", "'split'")
    return codec


def _linear(name: str, match: re.Match[str]) -> LinearCounts:
    if match[1] is None:
        return LinearCounts()
    try:
        low, high = float(match[1]), float(match[2])
        is_range = -np.inf < low < high < np.inf
    except ValueError:
        is_range = False
    if not is_range:
        expected = "uint16(low,high), finite numbers with low < high"
        raise UsageError("use the codec", repr(name), expected, repr(match[0]))
    return LinearCounts(low, high)


@lru_cache(maxsize=256)
def find_codec(name: str) -> Codec:
    """Return the codec with a name, for example `raw`, `normalized_image+lz4`, `uint16+shuffle+lz4`, `auto`.

    Raises:
        UsageError: There is none; the text lists the words that names are made of.
    """
    raw = VALUE_CODECS["raw"]
    stages = name.split("+")
    if name == AUTO:
        return replace(raw, name=AUTO, chunks=chunk_codec(raw.name))
    if AUTO in stages:
        raise UsageError("use the codec", repr(name), f"{AUTO!r} alone", repr(name))
    values = VALUE_CODECS.get(stages[0], raw)
    if name == values.name:
        return values
    if stages[0] == values.name:
        del stages[0]
    chunks = _read_chain([] if stages == [raw.name] else stages, name, "" if values is raw else values.name)
    is_lossless = values.is_lossless and chunks.is_lossless
    max_error = values.max_error if chunks.is_lossless else None
    return replace(values, name=name, is_lossless=is_lossless, max_error=max_error, chunks=chunks)


def codec_of(field: Field) -> Codec:
    """Return the codec of a field; an unknown name raises `UsageError` listing the known ones."""
    try:
        return find_codec(field.codec)
    except UsageError as error:
        raise UsageError("find the codec of field", repr(field.name), error.expected, error.got) from None


def check_writable(name: str) -> None:
    """Raise `UsageError` if there is no such codec, or if it needs an extra that is not installed."""
    if chunks := find_codec(name).chunks:
        check_installed(chunks.packer)
        if chunks.video is not None:
            video.check_installed(chunks.video.coder)


def stored_field(field: Field) -> Field:
    """Describe a row of the field as it is stored, or as its chunks decode to: the codec's dtype, no codec."""
    return Field(field.name, field.shape, codec_of(field).stored_dtype or field.dtype)


def check_codec(field: Field) -> None:
    """Raise if the codec does not exist or cannot give back the field's dtype."""
    codec = codec_of(field)
    expected = ""
    if codec.chunks and codec.chunks.video is not None:
        return video.check_shape(field.shape, field.dtype, repr(field.name))
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
    if video.video_named(codec) is not None:
        return min(MAX_CHUNK_FRAMES, most_chunk_frames(row_bytes))
    most = MAX_CHUNK_BYTES if codec.endswith(_LARGE_CHUNK_PACKERS) else MAX_SMALL_CHUNK_BYTES
    return max(1, min(MAX_CHUNK_FRAMES, most // max(1, row_bytes)))


def choose_codec(chunks: Sequence[npt.NDArray[Any]]) -> str:
    """Choose a lossless chain for chunks `[n, *shape]` like these by trying a few: the smallest result.

    "raw" if less than `MIN_SAVED` would be saved.
    """
    num_bytes = sum(part.nbytes for part in chunks)
    best = "raw"
    fewest = (1 - MIN_SAVED) * num_bytes
    for name in _CANDIDATES.get(chunks[0].dtype.itemsize, _WIDE_CANDIDATES) if chunks else ():
        coded = sum(len(chunk_codec(name).encode(part)[0]) for part in chunks)
        if coded < fewest:
            best = name
            fewest = coded
    return best
