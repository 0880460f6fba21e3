"""Image blobs: a stack of equal frames as one self-describing run of bytes, in chunks that decode alone.

One rule: nothing is allocated before the whole header is checked, by its checksum, against the blob's length
and against what the caller expects.

A blob: `rdimages`, the header's length (uint32), the header (JSON: codec, dtype, shape, num_frames,
frames_per_chunk, max_error), the end of each chunk counted from the first (uint64), the CRC-32 of each chunk
(uint32), the CRC-32 of everything before it (uint32), then the chunks. All numbers are little-endian.
"""

from __future__ import annotations

import json
import operator
import struct
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..core.checksums import crc32
from ..core.fields import DTYPES, dtype_name
from ..errors import CorruptFileError, RolloutDataError, SchemaError, UsageError
from .chunks import ChunkCodec, chunk_codec
from .codecs import most_chunk_frames

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
_MAGIC = b"rdimages"
_LENGTH = struct.Struct("<I")
_MAX_HEADER_BYTES = 1 << 16
_KEYS = ("codec", "dtype", "shape", "num_frames", "frames_per_chunk", "max_error")


def make_blob(frames: Array, dtype: str, codec: ChunkCodec, frames_per_chunk: int, level: int | None) -> bytes:
    """Code contiguous `[num_frames, *shape]` frames whose values are of `dtype` (see `fields.DTYPES`)."""
    starts = range(0, len(frames), frames_per_chunk)
    coded = [codec.encode(frames[first : first + frames_per_chunk], level) for first in starts]
    about = {
        "codec": codec.name,
        "dtype": dtype,
        "shape": list(frames.shape[1:]),
        "num_frames": len(frames),
        "frames_per_chunk": frames_per_chunk,
        "max_error": max((error for _, error in coded), default=0.0),
    }
    text = json.dumps(about).encode()
    ends = np.cumsum([len(chunk) for chunk, _ in coded], dtype="<u8")
    sums = np.array([crc32(chunk) for chunk, _ in coded], "<u4")
    head = b"".join([_MAGIC, _LENGTH.pack(len(text)), text, ends.tobytes(), sums.tobytes()])
    return b"".join([head, _LENGTH.pack(crc32(head)), *(chunk for chunk, _ in coded)])


class ExpectedFrames:
    """What the caller says that a blob holds."""

    def __init__(self, image_shape: Sequence[int], batch_size: int, dtype: Any) -> None:
        self.dtype = dtype
        try:
            self.name = dtype_name(dtype, "of the images")
            self.shape = tuple(operator.index(size) for size in image_shape)
            self.num_frames = operator.index(batch_size)
        except SchemaError:
            raise
        except TypeError as cause:
            raise UsageError(
                "decompress images", "", "a dtype, and whole numbers in image_shape and batch_size", str(cause)
            ) from None
        if min((*self.shape, self.num_frames), default=0) < 0:
            raise UsageError("decompress images", "", "sizes >= 0", f"{self.num_frames} frames of {self.shape}")

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        return DTYPES[self.name][1]

    @property
    def frame_bytes(self) -> int:
        return prod(self.shape) * self.numpy_dtype.itemsize

    def empty(self, lead: tuple[int, ...]) -> Any:
        if isinstance(self.dtype, torch.dtype):
            return torch.empty((*lead, *self.shape), dtype=self.dtype, device="cpu")
        return np.empty((*lead, *self.shape), self.numpy_dtype)

    def checked(self, out: Any, lead: tuple[int, ...]) -> Any:
        """Give `out` if it can be written to."""
        shape, name = tuple(out.shape), dtype_name(out.dtype, "of the output")
        is_tensor = isinstance(out, torch.Tensor)
        whole = out.is_contiguous() and out.device.type == "cpu" if is_tensor else out.flags.carray
        if shape != (*lead, *self.shape) or name != self.name or not whole:
            expected = f"a contiguous {self.name} output of shape {(*lead, *self.shape)} on the CPU"
            raise SchemaError("decompress images", "", expected, f"{name} of shape {shape}")
        return out


def as_stored(out: Any) -> Array:
    """View an output as an array of the same bytes."""
    if isinstance(out, torch.Tensor):
        found: Array = (out.view(torch.uint16) if out.dtype == torch.bfloat16 else out).numpy()
        return found
    return np.asarray(out)


class ImageBlob:
    """A blob with a checked header.

    Attributes:
        codec, frames_per_chunk: How its chunks are made.
        ends: int64 `[C + 1]`, where the chunks lie in `data`.
    """

    def __init__(self, data: Any, expected: ExpectedFrames) -> None:
        self.data = _as_bytes(data)
        self.expected = expected
        size = len(self.data)
        start = len(_MAGIC) + _LENGTH.size
        if size < start or self.data[: len(_MAGIC)].tobytes() != _MAGIC:
            raise _corrupt("a blob of compress_image_seq", f"{min(size, 8)} other bytes")
        length = _LENGTH.unpack(self.data[len(_MAGIC) : start].data)[0]
        if length > min(_MAX_HEADER_BYTES, size - start):
            raise _corrupt(f"a header within {size} bytes", f"one of {length}")
        self.codec, self.frames_per_chunk, num_chunks = self._header(self.data[start : start + length].tobytes())
        table = start + length
        first = table + 12 * num_chunks + _LENGTH.size
        if first > size:
            raise _corrupt(f"a table of {num_chunks} chunks within {size} bytes", f"{size - table} bytes")
        head = first - _LENGTH.size
        crc, wanted = crc32(self.data[:head].data), _LENGTH.unpack(self.data[head:first].data)[0]
        if crc != wanted:
            raise _corrupt(f"header checksum {wanted:08x}", f"{crc:08x}")
        ends = self.data[table : table + 8 * num_chunks].view("<u8")
        self._sums = self.data[table + 8 * num_chunks : head].view("<u4")
        if num_chunks and (int(ends[-1]) != size - first or bool((ends[1:] < ends[:-1]).any())):
            raise _corrupt(f"chunks that fill the last {size - first} bytes", f"ends up to {int(ends.max())}")
        if not num_chunks and size != first:
            raise _corrupt("nothing behind the header", f"{size - first} bytes")
        self.ends = np.append(0, ends.astype(np.int64)) + first
        most, declared = self.codec.max_expansion, expected.num_frames * expected.frame_bytes
        if declared > most * (size - first):  # too small for what it declares, as a bomb is
            raise _corrupt(f"at least {declared // most + 1} bytes of chunks", f"{size - first}")

    def _header(self, text: bytes) -> tuple[ChunkCodec, int, int]:
        """Compare the header with what is expected: (codec, frames per chunk, number of chunks)."""
        try:
            about = json.loads(text)
            codec, dtype, shape, num_frames, step, _ = (about[key] for key in _KEYS)
            chain = chunk_codec(str(codec))
            is_right = type(num_frames) is int and num_frames >= 0 and type(step) is int and step >= 1
        except (ValueError, LookupError, TypeError, RecursionError, RolloutDataError) as cause:
            raise _corrupt("an intact header", f"{type(cause).__name__}: {cause}") from cause
        if not is_right:
            raise _corrupt("a number of frames", f"{num_frames!r} in chunks of {step!r}")
        wanted = (self.expected.name, list(self.expected.shape), self.expected.num_frames)
        if (dtype, shape, num_frames) != wanted:
            expected = f"{wanted[2]} frames of {wanted[0]}{wanted[1]}"
            raise SchemaError("decompress images", "", expected, f"{num_frames} of {dtype}{shape} in the blob")
        if self.expected.frame_bytes * step > 1 << 62 or num_frames > 1 << 48:
            raise _corrupt("frames that fit into memory", f"{num_frames} in chunks of {step}")
        most = most_chunk_frames(self.expected.frame_bytes)
        if min(step, num_frames) > most:
            raise _corrupt(f"chunks of at most {most} frames", f"{num_frames} in chunks of {step}")
        return chain, step, -(-num_frames // step)

    def check(self, number: int) -> None:
        """Check the checksum of a chunk."""
        crc = crc32(self.chunk(number).data)
        if crc != int(self._sums[number]):
            raise _corrupt(f"checksum {int(self._sums[number]):08x} of chunk {number}", f"{crc:08x}")

    def chunks_of(self, chosen: npt.NDArray[np.int64] | None) -> list[int]:
        """Numbers of the chunks that hold these frames, ascending."""
        if chosen is None:
            return list(range(len(self.ends) - 1))
        found: list[int] = np.unique(chosen // self.frames_per_chunk).tolist()
        return found

    def chunk(self, number: int) -> Bytes:
        return self.data[self.ends[number] : self.ends[number + 1]]

    def decode(self, number: int, chosen: npt.NDArray[np.int64] | None, out: Array) -> None:
        """Decode one chunk's frames to their places in `out`."""
        first = number * self.frames_per_chunk
        stop = min(first + self.frames_per_chunk, self.expected.num_frames)
        frames = out[first:stop] if chosen is None else np.empty((stop - first, *out.shape[1:]), out.dtype)
        try:
            self.codec.decode(self.chunk(number), frames)
        except CorruptFileError as cause:
            raise _corrupt(f"{cause.expected} in chunk {number}", cause.got) from cause
        if chosen is not None:
            places = np.flatnonzero((chosen >= first) & (chosen < stop))
            out[places] = frames[chosen[places] - first]


def _as_bytes(data: Any) -> Bytes:
    try:
        return np.frombuffer(data, np.uint8)
    except (TypeError, ValueError, BufferError) as cause:
        if isinstance(data, (bytes, bytearray)):  # nothing in it
            return np.zeros(0, np.uint8)
        raise UsageError("decompress images", "", "bytes", type(data).__name__) from cause


def _corrupt(expected: str, got: str) -> CorruptFileError:
    return CorruptFileError(
        "decompress images", "", expected, got, "The blob is damaged: make it again from its source"
    )
