"""Image sequences: a stack of equal frames as one self-describing run of bytes, in chunks that decode alone.

One rule: nothing is allocated before the whole header is checked, by its checksum, against the blob's length
and against what the caller expects. How frames become bytes is decided in `codecs.py`, as for block files.

A blob: `rdimages`, the header's length (uint32), the header (JSON: codec, dtype, shape, num_frames,
frames_per_chunk, max_error), the end of each chunk counted from the first (uint64), the CRC-32 of each chunk
(uint32), the CRC-32 of everything before it (uint32), then the chunks. All numbers are little-endian.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..core.arguments import env_ids, instance, whole
from ..core.durable_files import crc32
from ..core.fields import DTYPES, dtype_name
from ..core.threads import each_part
from ..errors import CorruptFileError, FieldTypeError, RolloutDataError, SchemaError, UsageError
from .codec_chains import ChunkCodec, chunk_codec, chunk_frames, most_chunk_frames
from .lz4_frames import MAGIC as LZ4_MAGIC
from .lz4_frames import check_level, decode_exactly
from .packers import check_installed

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
_MAGIC = b"rdimages"
_LENGTH = struct.Struct("<I")
_MAX_HEADER_BYTES = 1 << 16
_KEYS = ("codec", "dtype", "shape", "num_frames", "frames_per_chunk", "max_error")


def compress_image_seq(
    images: Any, level: int = 0, *, codec: str | None = None, frames_per_chunk: int | None = None
) -> bytes:
    """Compress a stack of frames without loss.

    Args:
        images: `[num_frames, *image_shape]` tensor (any device) or array of a dtype of `storage.core.fields.DTYPES`.
        level: 0 is fast; 1 to 12 compress better and slower, and decode as fast; 13 to 16 are like 12.
        codec: A chain of `storage/codecs/codec_chains.py` instead of the usual one (`lz4`, or `split+lz4` for wider
            numbers); `uint16` chains lose, everything else does not.
        frames_per_chunk: Frames that are decoded together; by default at most 8, and never more than are 64 MiB.

    Returns:
        The blob.

    Raises:
        UsageError, SchemaError, FieldTypeError: No stack of frames, or a dtype, level or codec that cannot be.
    """
    array, dtype = _as_frames(images)
    level = check_level("compress images", level)
    if codec is None:
        codec = ("split+" if array.dtype.itemsize > 1 else "") + ("lz4hc" if level else "lz4")
    chain = chunk_codec(instance("compress images", "codec", codec, "as a name", str))
    check_installed(chain.packer)
    chain.check_dtype(array.dtype if dtype != "bfloat16" else np.dtype(np.uint16))
    row_bytes = prod(array.shape[1:]) * array.itemsize
    step = chunk_frames(row_bytes, codec)
    if frames_per_chunk is not None:
        step = whole("compress images", "frames_per_chunk", frames_per_chunk, 1)
    return _make_blob(array, dtype, chain, min(step, most_chunk_frames(row_bytes)), level or None)


def decompress_image_seq(
    compressed_data: Any,
    image_shape: Sequence[int],
    batch_size: int,
    dtype: Any = "uint8",
    indices: Any = None,
    num_threads: int | None = 1,
) -> Any:
    """Decompress a blob, or some frames of it.

    Args:
        compressed_data: The blob of `compress_image_seq`, or plain LZ4 frames of the bytes of all images; anything with
            a buffer.
        image_shape: Shape of one frame.
        batch_size: How many frames the blob holds.
        dtype: Of the frames. A torch dtype gives a CPU tensor, a numpy dtype (or its name) an array.
        indices: Which frames, in any order, also repeated; None gives all. Only their chunks are decoded.
        num_threads: Most threads, used where they are faster; None takes torch's number.

    Returns:
        `[batch_size or len(indices), *image_shape]`, new memory.

    Raises:
        SchemaError: Shape, dtype or number of frames are others than those of the blob.
        UsageError: An index outside `0:batch_size`.
        CorruptFileError: The blob is truncated or damaged; known before anything is allocated. LZ4 frames hold
            another number of bytes.
    """
    data = _as_bytes(compressed_data)
    if data[: len(LZ4_MAGIC)].tobytes() == LZ4_MAGIC:
        return _from_lz4_frames(data, _Wanted.checked(image_shape, batch_size, dtype, indices))
    return decompress_many([compressed_data], image_shape, [batch_size], dtype, [indices], num_threads)[0]


def _from_lz4_frames(data: Bytes, wanted: _Wanted) -> Any:
    """Decode plain LZ4 frames, which hold the images one after the other and nothing else."""
    num_bytes = wanted.num_frames * wanted.frame_bytes
    try:
        values = decode_exactly(data.data, num_bytes, "LZ4 frames")
    except CorruptFileError as cause:
        images = f"{wanted.num_frames} images of {wanted.name}{list(wanted.shape)}"
        raise _corrupt(f"{cause.expected}, for {images}", cause.got) from cause
    out = wanted.empty((wanted.count,))
    stored = _as_stored(out)
    frames = values.view(stored.dtype).reshape(wanted.num_frames, *wanted.shape)
    stored[...] = frames if wanted.indices is None else frames[wanted.indices]
    return out


#: Modes of PIL whose pixels are uint8 and mean the same without the mode's name.
_MODES = {"L": 2, "LA": 3, "RGB": 3, "RGBA": 3}


def compress_image(image: Any, level: int = 0) -> bytes:
    """Compress one image without loss.

    Args:
        image: A PIL image of mode L, LA, RGB or RGBA, or uint8 `[H, W]` or `[H, W, 1 to 4]` as array or tensor.
        level: As for `compress_image_seq`.

    Returns:
        A blob, which `decompress_image` reads.

    Raises:
        UsageError: A PIL image of another mode, whose pixels would come back as others: convert it first.
        SchemaError, FieldTypeError: It is no image of uint8.
    """
    action = "compress the image"
    mode = getattr(image, "mode", None)
    if isinstance(mode, str) and mode not in _MODES:
        advice = "Give image.convert('RGB')"
        raise UsageError(action, "", f"a PIL image of mode {', '.join(_MODES)}", f"mode {mode!r}", advice)
    pixels, dtype = _as_frames(image)
    if dtype != "uint8":
        raise FieldTypeError(action, "", "uint8", dtype)
    if not (pixels.ndim == 2 or (pixels.ndim == 3 and 1 <= pixels.shape[2] <= 4)):
        raise SchemaError(action, "", "shape [H, W] or [H, W, 1 to 4]", str(list(pixels.shape)))
    return compress_image_seq(pixels[None], level)


def decompress_image(compressed_data: Any) -> Any:
    """Decompress a blob of `compress_image`.

    Returns:
        A PIL image (package `pillow`): L for one channel, LA, RGB or RGBA.

    Raises:
        CorruptFileError: The blob is truncated or damaged, or holds no single image.
    """
    from PIL import Image

    shape, num_images = stored_shape(compressed_data)
    if num_images != 1 or not (len(shape) == 2 or (len(shape) == 3 and 1 <= shape[2] <= 4)):
        raise _corrupt("a blob of one image", f"{num_images} of shape {list(shape)}")
    pixels = decompress_image_seq(compressed_data, shape, 1)[0]
    return Image.fromarray(pixels[..., 0] if shape[2:] == (1,) else pixels)


def stored_shape(compressed_data: Any) -> tuple[tuple[int, ...], int]:
    """Return the shape of the frames of a blob, and how many it says it holds; the blob is not checked otherwise."""
    data = _as_bytes(compressed_data)
    start = len(_MAGIC) + _LENGTH.size
    is_ours = len(data) >= start and data[: len(_MAGIC)].tobytes() == _MAGIC
    _check(is_ours, "a blob of compress_image", f"{min(len(data), 8)} other bytes")
    length = _LENGTH.unpack(data[len(_MAGIC) : start].data)[0]
    _check(
        length <= min(_MAX_HEADER_BYTES, len(data) - start), f"a header within {len(data)} bytes", f"one of {length}"
    )
    try:
        about = json.loads(data[start : start + length].tobytes())
        shape = tuple(whole("", "", size, 0) for size in about["shape"])
        return shape, whole("", "", about["num_frames"], 0)
    except (ValueError, LookupError, TypeError, RecursionError, RolloutDataError) as cause:
        raise _corrupt("an intact header", f"{type(cause).__name__}: {cause}") from cause


def decompress_many(
    blobs: Sequence[Any],
    image_shape: Sequence[int],
    batch_size: int | Sequence[int],
    dtype: Any,
    indices: Any = None,
    num_threads: int | None = None,
    out: Any = None,
) -> Any:
    """Decompress blobs into one output, with threads where they are faster.

    Args:
        blobs: B blobs.
        image_shape, dtype: As for `decompress_image_seq`, for every blob.
        batch_size: How many frames a blob holds: one number for all blobs, or B numbers.
        indices: Which frames: a list for all blobs, or B lists. None gives all frames, also in the place of a list.
        num_threads: Most threads; None takes torch's number of threads.
        out: Contiguous, to write to instead of new memory: `[B, n, *image_shape]` if each blob gives n frames; if
            the numbers differ `[total, *image_shape]`, where the frames of one blob follow those of the blob before.

    Returns:
        `out`, or a new one; if the numbers differ a list of B views of it, `[n_b, *image_shape]`. Either way
        `result[b]` holds the frames of blob b.

    Raises:
        As `decompress_image_seq`. UsageError: There are not B numbers, or not B lists.
    """
    instance("decompress images", "blobs", blobs, "as a list of bytes", Sequence)
    given: Any = batch_size
    sizes = list(given) or [0] if np.ndim(given) else [given] * max(1, len(blobs))
    lists = list(indices) if _is_nested(indices) else [indices] * len(sizes)
    if {len(sizes), len(lists)} != {max(1, len(blobs))}:
        got = f"{len(sizes)} and {len(lists)} for {len(blobs)} blobs"
        raise UsageError("decompress images", "", "one batch_size and one list of indices per blob, or for all", got)
    wanted = [_Wanted.checked(image_shape, size, dtype, one) for size, one in zip(sizes, lists, strict=True)]
    found = [_Blob(data, its) for data, its in zip(blobs, wanted, strict=False)]
    pieces = [(at, number) for at, blob in enumerate(found) for number in blob.chunks_wanted()]

    def check(start: int, stop: int) -> None:
        for at, number in pieces[start:stop]:
            found[at].check(number)

    each_part(check, len(pieces), sum(len(found[at].chunk(number)) for at, number in pieces), num_threads)
    counts = [its.count for its in wanted]
    lead = (len(found), counts[0]) if len({*counts}) == 1 else (sum(counts),)
    target = wanted[0].empty(lead) if out is None else wanted[0].fitting(out, lead)
    ends = np.cumsum(counts).tolist()
    outs = target if len(lead) == 2 else [target[end - count : end] for end, count in zip(ends, counts, strict=True)]
    arrays = [_as_stored(one) for one in outs]

    def decode(start: int, stop: int) -> None:
        for at, number in pieces[start:stop]:
            found[at].decode(number, arrays[at])

    each_part(decode, len(pieces), sum(found[at].chunk_bytes for at, _ in pieces), num_threads)
    return outs


def _is_nested(indices: Any) -> bool:
    """Return whether these are lists of frames, one for each blob, rather than one for all."""
    if isinstance(indices, (list, tuple)):
        return any(one is None or np.ndim(one) > 0 for one in indices[:1])
    return getattr(indices, "ndim", 1) > 1


def _as_frames(images: Any) -> tuple[Array, str]:
    """View frames as an array of the bytes that are stored; give it and the dtype's name."""
    is_tensor = isinstance(images, torch.Tensor)
    array = images.detach().cpu().contiguous() if is_tensor else np.asarray(images)
    dtype = dtype_name(array.dtype, "of the images")
    if array.ndim < 1:
        raise SchemaError("compress images", "", "a stack of frames [num_frames, *image_shape]", "a single number")
    return np.ascontiguousarray(_as_stored(array), DTYPES[dtype][1]), dtype


def _as_stored(out: Any) -> Array:
    """View a CPU tensor or an array as an array of the same bytes."""
    if isinstance(out, torch.Tensor):
        found: Array = (out.view(torch.uint16) if out.dtype == torch.bfloat16 else out).numpy()
        return found
    return np.asarray(out)


def _make_blob(frames: Array, dtype: str, codec: ChunkCodec, frames_per_chunk: int, level: int | None) -> bytes:
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


@dataclass(frozen=True)
class _Wanted:
    """What the caller says that a blob holds, and which frames of it is wanted.

    Attributes:
        dtype, name: As given, and its name in `fields.DTYPES`.
        shape, num_frames: Shape of a frame, and how many the blob holds.
        indices: int64 `[n]`, or None for all frames.
    """

    dtype: Any
    name: str
    shape: tuple[int, ...]
    num_frames: int
    indices: npt.NDArray[np.int64] | None

    @classmethod
    def checked(cls, image_shape: Sequence[int], batch_size: Any, dtype: Any, indices: Any) -> _Wanted:
        name = dtype_name(dtype, "of the images")
        sizes = np.atleast_1d(image_shape).tolist()
        shape = tuple(whole("decompress images", "sizes of image_shape", size, 0) for size in sizes)
        num_frames = whole("decompress images", "batch_size", batch_size, 0)
        if indices is not None:
            if np.ndim(indices) != 1:
                got = f"{np.ndim(indices)} dimensions"
                raise UsageError("decompress images", "", "indices as a list of frame numbers", got)
            indices = env_ids("decompress images", "indices as frame numbers", indices, num_frames)
        return cls(dtype, name, shape, num_frames, indices)

    @property
    def count(self) -> int:
        return self.num_frames if self.indices is None else len(self.indices)

    @property
    def frame_bytes(self) -> int:
        return prod(self.shape) * DTYPES[self.name][1].itemsize

    def empty(self, lead: tuple[int, ...]) -> Any:
        if isinstance(self.dtype, torch.dtype):
            return torch.empty((*lead, *self.shape), dtype=self.dtype, device="cpu")
        return np.empty((*lead, *self.shape), DTYPES[self.name][1])

    def fitting(self, out: Any, lead: tuple[int, ...]) -> Any:
        """Return `out` if it can be written to."""
        instance("decompress images", "out", out, "as an array or a tensor", np.ndarray, torch.Tensor)
        shape = tuple(out.shape)
        name = dtype_name(out.dtype, "of the output")
        is_tensor = isinstance(out, torch.Tensor)
        is_plain = out.is_contiguous() and out.device.type == "cpu" if is_tensor else out.flags.carray
        if shape != (*lead, *self.shape) or name != self.name or not is_plain:
            expected = f"a contiguous {self.name} output of shape {(*lead, *self.shape)} on the CPU"
            raise SchemaError("decompress images", "", expected, f"{name} of shape {shape}")
        return out


class _Blob:
    """A blob whose header was checked; nothing was allocated for its frames."""

    def __init__(self, data: Any, wanted: _Wanted) -> None:
        self.data = _as_bytes(data)
        self.wanted = wanted
        size = len(self.data)
        start = len(_MAGIC) + _LENGTH.size
        is_ours = size >= start and self.data[: len(_MAGIC)].tobytes() == _MAGIC
        _check(is_ours, "a blob of compress_image_seq", f"{min(size, 8)} other bytes")
        length = _LENGTH.unpack(self.data[len(_MAGIC) : start].data)[0]
        _check(length <= min(_MAX_HEADER_BYTES, size - start), f"a header within {size} bytes", f"one of {length}")
        table = start + length
        self.codec, self.frames_per_chunk, num_chunks = self._header(self.data[start:table].tobytes())
        head = table + 12 * num_chunks
        first = head + _LENGTH.size
        _check(first <= size, f"a table of {num_chunks} chunks within {size} bytes", f"{size - table} bytes")
        crc = crc32(self.data[:head].data)
        written = _LENGTH.unpack(self.data[head:first].data)[0]
        _check(crc == written, f"header checksum {written:08x}", f"{crc:08x}")
        ends = np.append(np.uint64(0), self.data[table : table + 8 * num_chunks].view("<u8"))
        self._sums = self.data[table + 8 * num_chunks : head].view("<u4")
        is_filled = int(ends[-1]) == size - first and not (ends[1:] < ends[:-1]).any()
        _check(is_filled, f"chunks that fill the last {size - first} bytes", f"ends up to {int(ends.max())}")
        #: int64 `[C + 1]`, where the chunks lie in `data`.
        self._ends = ends.astype(np.int64) + first
        # Too small for what it declares, as a bomb is.
        fewest = -(-wanted.num_frames * wanted.frame_bytes // self.codec.max_expansion)
        _check(size - first >= fewest, f"at least {fewest} bytes of chunks", f"{size - first}")

    def _header(self, text: bytes) -> tuple[ChunkCodec, int, int]:
        """Compare the header with what is expected: (codec, frames per chunk, number of chunks)."""
        try:
            about = json.loads(text)
            codec, dtype, shape, num_frames, step, _ = (about[key] for key in _KEYS)
            chain = chunk_codec(str(codec))
            is_right = type(num_frames) is int and num_frames >= 0 and type(step) is int and step >= 1
        except (ValueError, LookupError, TypeError, RecursionError, RolloutDataError) as cause:
            raise _corrupt("an intact header", f"{type(cause).__name__}: {cause}") from cause
        _check(is_right, "a number of frames", f"{num_frames!r} in chunks of {step!r}")
        wanted = (self.wanted.name, list(self.wanted.shape), self.wanted.num_frames)
        if (dtype, shape, num_frames) != wanted:
            expected = f"{wanted[2]} frames of {wanted[0]}{wanted[1]}"
            raise SchemaError("decompress images", "", expected, f"{num_frames} of {dtype}{shape} in the blob")
        most = most_chunk_frames(self.wanted.frame_bytes)
        got = f"{num_frames} in chunks of {step}"
        is_possible = self.wanted.frame_bytes * step <= 1 << 62 and num_frames <= 1 << 48
        _check(is_possible, "frames that fit into memory", got)
        _check(min(step, num_frames) <= most, f"chunks of at most {most} frames", got)
        return chain, step, -(-num_frames // step)

    @property
    def chunk_bytes(self) -> int:
        """Bytes that a chunk decodes to at most."""
        return self.frames_per_chunk * self.wanted.frame_bytes

    def check(self, number: int) -> None:
        crc = crc32(self.chunk(number).data)
        written = int(self._sums[number])
        _check(crc == written, f"checksum {written:08x} of chunk {number}", f"{crc:08x}")

    def chunks_wanted(self) -> list[int]:
        """Numbers of the chunks that hold the wanted frames, ascending."""
        if self.wanted.indices is None:
            return list(range(len(self._sums)))
        found: list[int] = np.unique(self.wanted.indices // self.frames_per_chunk).tolist()
        return found

    def chunk(self, number: int) -> Bytes:
        return self.data[self._ends[number] : self._ends[number + 1]]

    def decode(self, number: int, out: Array) -> None:
        """Decode one chunk's frames to their places in `out`, `[count, *shape]`."""
        first = number * self.frames_per_chunk
        chosen = self.wanted.indices
        stop = min(first + self.frames_per_chunk, self.wanted.num_frames)
        try:
            if chosen is None:
                self.codec.decode(self.chunk(number), out[first:stop])
                return
            frames = self.codec.decoded(self.chunk(number), (stop - first, *out.shape[1:]), out.dtype)
        except CorruptFileError as cause:
            raise _corrupt(f"{cause.expected} in chunk {number}", cause.got) from cause
        places = np.flatnonzero((chosen >= first) & (chosen < stop))
        out[places] = frames[chosen[places] - first]


def _as_bytes(data: Any) -> Bytes:
    try:
        return np.frombuffer(data, np.uint8)
    except (TypeError, ValueError, BufferError) as cause:
        if isinstance(data, (bytes, bytearray)):  # nothing in it
            return np.zeros(0, np.uint8)
        raise UsageError("decompress images", "", "compressed_data as bytes", type(data).__name__) from cause


def _check(is_right: Any, expected: str, got: str) -> None:
    if not is_right:
        raise _corrupt(expected, got)


def _corrupt(expected: str, got: str) -> CorruptFileError:
    advice = "The blob is damaged: make it again from its source"
    return CorruptFileError("decompress images", "", expected, got, advice)
