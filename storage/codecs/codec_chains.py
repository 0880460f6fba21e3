"""Codecs by name: conversions of arrays to stored arrays, and of frames to independent chunks.

A codec has two parts. A value codec (`raw`, `normalized_image`) converts each value to a value of a
fixed size. A chain encodes the result as chunks. `normalized_image+lz4` has both parts. `auto`
tries several lossless chains on sample data and chooses the smallest result. A codec states whether
it is lossless, and its largest error.

A chain is `quantizer+delta+shuffle+packer` or a part of it, such as `uint16+shuffle+lz4`:

- Quantizers: `uint16`, `uint16(low,high)`.
- Deltas: `delta` subtracts the previous frame as unsigned integers; `xor`.
- Shuffles: `shuffle`, `split`, `bitshuffle`.
- Packers: `lz4` (fast), `lz4hc` (high compression). With the extra `codecs`: `zstd` (smaller
  images), `blosc2` (LZ4HC) and `blosc2zstd`. Both packers of blosc2 include a shuffle with SIMD
  instructions.

A video codec such as `h264:crf=18` (`video_codec.py`) replaces the whole chain.

A chunk consists of

- one byte: 1 if the values were packed, 0 if they are plain. Values are plain if packing saves no
  bytes, or if readers would reject the packed chunk because of `max_expansion`;
- with a quantizer, its range, little-endian: low and step as float64, then a uint8 flag: whether
  the highest counts encode NaN and infinities;
- the bytes of the values.

The reader knows dtype, frame shape, number of frames and chain. It decodes no more bytes than these
frames have.
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
#: Functions that subtract the previous frame from a frame and add it again, by name of the delta.
DELTAS = {"delta": (np.subtract, np.add), "xor": (np.bitwise_xor, np.bitwise_xor)}
#: Names of the stages by kind. The kinds are in the order of a chain.
STAGES: dict[str, tuple[str, ...]] = {
    "quantizer": ("uint16",),
    "delta": tuple(DELTAS),
    "shuffle": SHUFFLES,
    "packer": tuple(PACKERS),
}
_KIND_OF_STAGE = {stage: kind for kind, stages in STAGES.items() for stage in stages}
AUTO = "auto"
#: First byte of a chunk: 0 if its values are stored unpacked, 1 if they are packed.
_PLAIN, _PACKED = 0, 1
#: Fraction of bytes that a chain must save. Otherwise `auto` chooses "raw".
MIN_SAVED = 0.1
#: Maximum number of frames of a chunk by default.
MAX_CHUNK_FRAMES = 8
#: Default limit for the bytes of a chunk of several frames, so that a chunk fits into the L2 cache.
MAX_CHUNK_BYTES = 512 * 1024
#: Default limit for the bytes of a chunk with fast LZ4. Chunks twice as large are 2 %
#: smaller, but reading random windows of 8 images becomes a quarter slower. With slow packers,
#: larger chunks are 4 to 14 % smaller.
MAX_SMALL_CHUNK_BYTES = 192 * 1024
#: Largest decoded size of a chunk of several frames in bytes, also if the user chooses the number
#: of frames. Reading one frame decodes its whole chunk. Without the limit, a file of 3 MB could
#: hold a chunk of 600 MB.
LARGEST_CHUNK_BYTES = 64 << 20
_LARGE_CHUNK_PACKERS = tuple(packer for packer in STAGES["packer"] if packer != "lz4")
#: Chains that `auto` tries, by item size in bytes. These chains are lossless, need no extra, and
#: write 300 MB/s or more. High compression writes only 50 MB/s, which could delay a learner.
_CANDIDATES = {1: ("lz4", "delta+lz4"), 2: ("shuffle+lz4", "delta+shuffle+lz4")}
_WIDE_CANDIDATES = ("shuffle+lz4", "split+lz4", "delta+split+lz4")


@dataclass(frozen=True)
class ChunkCodec:
    """Codec that encodes frames as chunks by a chain of stages.

    Attributes:
        name: Name of the chain.
        quantizer: Quantizer, the only lossy stage; None for a chain without a quantizer.
        delta, shuffle, packer: Names of the stages; "" for a missing stage.
        video: Lossy coder of pictures that replaces all stages; None without video.
    """

    name: str
    quantizer: LinearCounts | None = None
    delta: str = ""
    shuffle: str = ""
    packer: str = ""
    video: video.Video | None = None

    @property
    def is_lossless(self) -> bool:
        """Whether decoding restores every bit."""
        return self.quantizer is None and self.video is None

    @property
    def max_expansion(self) -> int:
        """Maximum number of decoded bytes per byte of a chunk.

        A corrupt chunk may declare more decoded bytes. Readers reject it before they allocate
        memory.
        """
        if self.video is not None:
            return video.MAX_EXPANSION
        expansion = PACKERS[self.packer].max_expansion if self.packer else lz4.MAX_EXPANSION
        # The quantizer alone shrinks float64 values of 8 bytes to counts of 2 bytes.
        return expansion * (4 if self.quantizer is not None else 1)

    @property
    def packer_shuffles(self) -> bool:
        """Whether the packer also shuffles, as blosc2 does. Other packers get shuffled bytes."""
        return bool(self.packer) and PACKERS[self.packer].shuffles

    def check_dtype(self, dtype: np.dtype[Any]) -> None:
        """Raise `FieldTypeError` if the chain cannot encode values of this dtype."""
        if self.quantizer is not None and dtype.kind != "f":
            raise FieldTypeError(
                f"codec {self.name!r} needs float16, float32 or float64, got {dtype}."
            )
        if self.video is not None and dtype != np.uint8:
            raise FieldTypeError(f"codec {self.name!r} needs uint8 pictures, got {dtype}.")

    def encode(self, frames: Array, level: int | None = None) -> tuple[bytes, float]:
        """Encode `[F, *shape]` frames as one chunk.

        Args:
            frames: Array `[F, *shape]` of F frames.
            level: Level of the packer; None for its default.

        Returns:
            The chunk and the largest error, 0 if lossless.
        """
        range_bytes = b""
        error = 0.0
        values: Array = np.ascontiguousarray(frames).reshape(len(frames), prod(frames.shape[1:]))
        if self.quantizer is not None:
            range_bytes, counts, error = self.quantizer.encode(values)
            values = counts.reshape(values.shape)
        items = values.view(_unsigned(values.dtype))
        data = self._packed(items, level) if self.video is None else self.video.encode(frames)
        # blosc2 packs any number of zeros into 32 bytes. Readers reject chunks that expand so much.
        if len(data) < items.nbytes and frames.nbytes <= self.max_expansion * len(data):
            if self.video is not None:
                decoded = np.empty_like(frames)
                self.video.decode(np.frombuffer(data, np.uint8), decoded)
                difference = np.maximum(decoded, frames) - np.minimum(decoded, frames)
                error = float(difference.max(initial=0))
            return bytes([_PACKED]) + range_bytes + data, error
        return bytes([_PLAIN]) + range_bytes + items.tobytes(), error

    def _packed(self, items: Array, level: int | None) -> bytes:
        """Apply the delta, the shuffle and the packer to unsigned items `[F, n]`."""
        if self.delta and len(items) > 1:
            subtract, _ = DELTAS[self.delta]
            differences = items.copy()
            subtract(items[1:], items[:-1], out=differences[1:])
            items = differences
        if self.packer_shuffles:
            return PACKERS[self.packer].pack(items, level, self.shuffle)
        data = (
            shuffle(self.shuffle, items.reshape(-1))
            if self.shuffle
            else items.reshape(-1).view(np.uint8)
        )
        return PACKERS[self.packer].pack(data, level, "") if self.packer else data.tobytes()

    def decode(self, chunk: Bytes, out: Array) -> None:
        """Decode a chunk into `out`, `[F, *shape]`, contiguous. Thread-safe.

        Raises:
            CorruptFileError: The chunk does not contain exactly F frames. The content of `out` is
                then undefined.
        """
        start = 1 + (RANGE_BYTES if self.quantizer is not None else 0)
        if len(chunk) < start or chunk[0] > _PACKED:
            raise CorruptFileError(
                f"the header of the chunk is damaged: {chunk[:start].tobytes()!r}."
            )
        if self.video is not None and chunk[0] == _PACKED:
            self.video.decode(chunk[1:], out)
            return
        if self.quantizer is None:
            self._undo(chunk[1:], chunk[0], out.reshape(-1).view(_unsigned(out.dtype)), len(out))
            return
        counts = _scratch("counts", 2 * out.size).view(np.uint16)
        self._undo(chunk[start:], chunk[0], counts, len(out))
        decode_counts(chunk[1:start].tobytes(), counts, out.reshape(-1))

    def decoded(self, chunk: Bytes, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Decode a chunk and return the frames, `[F, *shape]`, in new memory.

        `shape` contains F. If the chain is only a packer, this takes one copy less than `decode`.
        """
        if self.name in PACKERS and len(chunk) and chunk[0] == _PACKED:
            return (
                self._unpacked(chunk[1:], prod(shape) * dtype.itemsize).view(dtype).reshape(shape)
            )
        out: Array = np.empty(shape, dtype)
        self.decode(chunk, out)
        return out

    def _undo(self, data: Bytes, method: int, items: Array, num_frames: int) -> None:
        """Write the unsigned items of a chunk to `items`: undo the packer, shuffle and delta.

        Args:
            data: Bytes of the chunk after its header.
            method: First byte of the chunk, `_PLAIN` or `_PACKED`.
            items: Memory for the items of all frames, contiguous.
            num_frames: Number of frames in the chunk.
        """
        size = items.dtype.itemsize
        # Shuffles of bytes do not change items of one byte. Only `bitshuffle` does.
        is_shuffled = bool(self.shuffle) and (size > 1 or self.shuffle == "bitshuffle")
        if method == _PLAIN or not is_shuffled or self.packer_shuffles:
            target = items.view(np.uint8)
            target[:] = self._unpacked(data, len(target), is_packed=method == _PACKED)
            if method == _PLAIN:
                return
        else:
            num_bytes = shuffled_bytes(self.shuffle, items.size, size)
            unshuffle(
                self.shuffle,
                self._unpacked(data, num_bytes),
                items,
                _scratch("unshuffle", scratch_bytes(num_bytes)),
            )
        if self.delta and num_frames > 1:
            _, add = DELTAS[self.delta]
            for previous, frame in pairwise(items.reshape(num_frames, items.size // num_frames)):
                add(frame, previous, out=frame)

    def _unpacked(self, data: Bytes, num_bytes: int, is_packed: bool = True) -> Bytes:
        if self.packer and is_packed:
            return PACKERS[self.packer].unpack(data, num_bytes)
        if len(data) != num_bytes:
            raise CorruptFileError(f"the chunk has {len(data)} bytes, expected {num_bytes}.")
        return data


@lru_cache(maxsize=32)
def _unsigned(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the unsigned integer dtype with the item size of `dtype`."""
    return np.dtype(f"u{dtype.itemsize}")


#: Scratch memory of each thread, by purpose.
_local = threading.local()


def _scratch(purpose: str, num_bytes: int) -> Bytes:
    """Return memory that this thread reuses in all calls with the same `purpose`."""
    scratch: dict[str, Bytes] = _local.__dict__
    memory = scratch.get(purpose)
    if memory is None or len(memory) < num_bytes:
        memory = np.empty(-(-num_bytes // 8) * 8, np.uint8)
        scratch[purpose] = memory
    return memory[:num_bytes]


# -- names -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Codec:
    """Codec of a field: the dtype of stored values, and the chain that encodes them as chunks.

    Attributes:
        name: Name in `obs_disassemble_mapping` and in files.
        is_lossless: Whether decode(encode(x)) == x for every accepted x.
        max_error: Largest absolute error on finite values in the codec's range, before rounding to
            the field's dtype. 0 if lossless, None if it depends on the data. Writers measure the
            real error.
        stored_dtype: Name of the dtype of stored values; None keeps the dtype of the field.
        encode: Function from a tensor of the field's dtype to a tensor of the stored dtype.
        decode: Function from a tensor of the stored dtype to a tensor of the field's dtype.
        chunks: Chain that encodes stored rows as chunks; for `auto` an empty chain. None stores
            plain rows.
    """

    name: str
    is_lossless: bool
    max_error: float | None
    stored_dtype: str | None
    encode: Callable[[torch.Tensor], torch.Tensor]
    decode: Callable[[torch.Tensor, torch.dtype], torch.Tensor]
    chunks: ChunkCodec | None = None


#: Value codecs by name. A value codec stores one number for each value of the field.
VALUE_CODECS: dict[str, Codec] = {
    codec.name: codec
    for codec in (
        Codec("raw", True, 0.0, None, lambda values: values, lambda stored, dtype: stored),
        Codec("normalized_image", False, IMAGE_MAX_ERROR, "uint8", encode_image, decode_image),
    )
}
#: Names of value codecs, video coders and stages: the words that names of codecs consist of.
CODEC_WORDS = (
    *VALUE_CODECS,
    AUTO,
    *video.CODERS,
    *(stage for stages in STAGES.values() for stage in stages),
)


@lru_cache(maxsize=256)
def chunk_codec(name: str) -> ChunkCodec:
    """Return the chain named `name`. "raw" and "" are the empty chain.

    Raises:
        UsageError: A stage is unknown, or the order of stages is wrong.
    """
    return _read_chain([] if name in ("", "raw") else name.split("+"), name)


def _read_chain(stages: Sequence[str], name: str, value_codec: str = "") -> ChunkCodec:
    """Build the chain from the names of its stages.

    Args:
        stages: Names of the stages.
        name: Name of the codec, for errors.
        value_codec: Name of the value codec before the stages; "" for none. A chain after a value
            codec must have no quantizer.
    """
    if not value_codec and len(stages) == 1:
        coder = video.video_named(stages[0])
        if coder is not None:
            return ChunkCodec(name, video=coder)
    parts: dict[str, Any] = {}
    previous = value_codec
    # A value codec replaces the quantizer, the first kind.
    next_kinds = list(STAGES)[bool(value_codec) :]
    for stage in stages:
        match = _QUANTIZER.fullmatch(stage)
        kind = "quantizer" if match else _KIND_OF_STAGE.get(stage, "")
        is_known = kind or stage in (*VALUE_CODECS, AUTO)
        if not is_known or not (kind or previous):
            raise UsageError(
                f"codec {name!r} has the unknown stage {stage!r}. The stages are "
                f"{nearest(stage, CODEC_WORDS)}."
            )
        if kind not in next_kinds:
            raise UsageError(
                f"codec {name!r} has {stage!r} after {previous!r}. The order of stages is "
                f"{'+'.join(STAGES)}, each at most once."
            )
        next_kinds = next_kinds[next_kinds.index(kind) + 1 :]
        previous = stage
        parts[kind] = _linear(name, match) if match else stage
    codec = ChunkCodec("+".join(stages) or "raw", **parts)
    if codec.packer_shuffles and codec.shuffle == "split":
        raise UsageError(
            f"codec {name!r} has 'split' before blosc2, which does not support it. Choose "
            "'shuffle', 'bitshuffle' or no shuffle."
        )
    return codec


def _linear(name: str, match: re.Match[str]) -> LinearCounts:
    """Build the quantizer from a match of `_QUANTIZER`. Raise `UsageError` for an invalid range."""
    if match[1] is None:
        return LinearCounts()
    try:
        low = float(match[1])
        high = float(match[2])
        is_range = -np.inf < low < high < np.inf
    except ValueError:
        is_range = False
    if not is_range:
        raise UsageError(
            f"codec {name!r} needs uint16(low,high) with finite numbers low < high, got "
            f"{match[0]!r}."
        )
    return LinearCounts(low, high)


@lru_cache(maxsize=256)
def find_codec(name: str) -> Codec:
    """Return the codec named `name`, such as `raw`, `normalized_image+lz4` or `uint16+lz4`.

    Raises:
        UsageError: The name is unknown. The message lists the words of codec names.
    """
    raw = VALUE_CODECS["raw"]
    stages = name.split("+")
    if name == AUTO:
        return replace(raw, name=AUTO, chunks=chunk_codec(raw.name))
    if AUTO in stages:
        raise UsageError(f"codec {name!r} combines {AUTO!r} with other stages. Pass {AUTO!r}.")
    values = VALUE_CODECS.get(stages[0], raw)
    if name == values.name:
        return values
    if stages[0] == values.name:
        del stages[0]
    chunks = _read_chain(
        [] if stages == [raw.name] else stages, name, "" if values is raw else values.name
    )
    is_lossless = values.is_lossless and chunks.is_lossless
    max_error = values.max_error if chunks.is_lossless else None
    return replace(values, name=name, is_lossless=is_lossless, max_error=max_error, chunks=chunks)


def codec_of(field: Field) -> Codec:
    """Return the codec of a field. Raise `UsageError` if its name is unknown."""
    try:
        return find_codec(field.codec)
    except UsageError as error:
        raise UsageError(f"field {field.name!r}: {error.message}") from None


def check_writable(name: str) -> None:
    """Raise `UsageError` if the codec is unknown, or needs an extra that is not installed."""
    chunks = find_codec(name).chunks
    if chunks is not None:
        check_installed(chunks.packer)
        if chunks.video is not None:
            video.check_installed(chunks.video.coder)


def stored_field(field: Field) -> Field:
    """Return the field of the stored rows: with the dtype that the codec stores, and no codec."""
    return Field(field.name, field.shape, codec_of(field).stored_dtype or field.dtype)


def check_codec(field: Field) -> None:
    """Check that a field has a codec for its dtype and shape.

    Raises:
        UsageError: The name of the codec is unknown.
        FieldTypeError: The codec cannot encode the dtype or shape.
    """
    codec = codec_of(field)
    expected = ""
    if codec.chunks and codec.chunks.video is not None:
        return video.check_shape(field.shape, field.dtype, field.name)
    is_float = field.torch_dtype.is_floating_point
    if codec.stored_dtype is not None and not (is_float or field.dtype == codec.stored_dtype):
        expected = f"a floating dtype or {codec.stored_dtype}"
    elif (
        codec.chunks
        and not codec.chunks.is_lossless
        and not (is_float and field.dtype != "bfloat16")
    ):
        expected = "float16, float32 or float64"
    if expected:
        raise FieldTypeError(
            f"field {field.name!r} has dtype {field.dtype}. Codec {codec.name!r} needs {expected}."
        )


def most_chunk_frames(row_bytes: int) -> int:
    """Return how many frames of `row_bytes` bytes fit into `LARGEST_CHUNK_BYTES`, at least 1."""
    return max(1, LARGEST_CHUNK_BYTES // max(1, row_bytes))


def chunk_frames(row_bytes: int, codec: str) -> int:
    """Return the default number of frames of a chunk: 8, or fewer for large frames, at least 1."""
    if video.video_named(codec) is not None:
        return min(MAX_CHUNK_FRAMES, most_chunk_frames(row_bytes))
    most = MAX_CHUNK_BYTES if codec.endswith(_LARGE_CHUNK_PACKERS) else MAX_SMALL_CHUNK_BYTES
    return max(1, min(MAX_CHUNK_FRAMES, most // max(1, row_bytes)))


def choose_codec(chunks: Sequence[npt.NDArray[Any]]) -> str:
    """Return the name of the lossless chain that encodes sample chunks to the fewest bytes.

    Each chunk is `[n, *shape]`. Returns "raw" if every chain saves less than `MIN_SAVED`.
    """
    best = "raw"
    if not chunks:
        return best
    fewest_bytes = (1 - MIN_SAVED) * sum(part.nbytes for part in chunks)
    for name in _CANDIDATES.get(chunks[0].dtype.itemsize, _WIDE_CANDIDATES):
        num_bytes = sum(len(chunk_codec(name).encode(part)[0]) for part in chunks)
        if num_bytes < fewest_bytes:
            best = name
            fewest_bytes = num_bytes
    return best
