"""Compression of a stack of frames to a blob of chunks that decode independently.

Before memory is allocated, the header is compared with its checksum, the length of the blob and the
values that the caller expects. The chunks are encoded by `codec_chains.py` in the same way as the
chunks of recorded block files.

A blob consists of these parts; numbers are little-endian:

- `rdimages`;
- the length of the header (uint32);
- the header (JSON: codec, dtype, shape, num_frames, frames_per_chunk, max_error);
- the end of each chunk, counted from the first chunk (uint64);
- the CRC-32 of each chunk (uint32);
- the CRC-32 of all bytes before it (uint32);
- the chunks.
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
from ..errors import (
    CorruptFileError,
    FieldTypeError,
    RolloutDataError,
    SchemaError,
    UsageError,
)
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
        images: `[num_frames, *image_shape]`, tensor (any device) or array with a dtype of
            `storage.core.fields.DTYPES`.
        level: 0 is fast. 1 to 12 compress better and slower, and decode as fast. 13 to 16 equal 12.
        codec: Chain of `storage/codecs/codec_chains.py`. The default is `lz4`, or `split+lz4` for
            items of several bytes. Only `uint16` chains are lossy.
        frames_per_chunk: Number of frames that are decoded together; by default at most 8. It is
            reduced if several frames take more than 64 MiB.

    Returns:
        The blob.

    Raises:
        UsageError: The level or codec is invalid, or the package of the codec is missing.
        SchemaError: `images` is a single number.
        FieldTypeError: The dtype is unknown, or the codec cannot code it.
    """
    array, dtype = _as_frames(images)
    level = check_level(level)
    if codec is None:
        codec = ("split+" if array.dtype.itemsize > 1 else "") + ("lz4hc" if level else "lz4")
    chain = chunk_codec(instance("codec", codec, "a name", str))
    check_installed(chain.packer)
    chain.check_dtype(array.dtype if dtype != "bfloat16" else np.dtype(np.uint16))
    row_bytes = prod(array.shape[1:]) * array.itemsize
    step = chunk_frames(row_bytes, codec)
    if frames_per_chunk is not None:
        step = whole("frames_per_chunk", frames_per_chunk, 1)
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
        compressed_data: Blob of `compress_image_seq`, or plain LZ4 frames with the bytes of all
            images. Any object with the buffer protocol.
        image_shape: Shape of one frame.
        batch_size: Number of frames in the blob.
        dtype: Dtype of the frames. A torch dtype returns a CPU tensor, a numpy dtype or its name an
            array.
        indices: Frames to return, in any order; a frame may be repeated. None returns all frames.
            Only chunks with these frames are decoded.
        num_threads: Maximum number of threads, used if they are faster; None uses torch's number of
            threads.

    Returns:
        `[batch_size or len(indices), *image_shape]`, new memory.

    Raises:
        SchemaError: Shape, dtype or number of frames differ from those of the blob.
        UsageError: An index is outside `0:batch_size`.
        CorruptFileError: The blob is truncated or damaged, or LZ4 frames hold another number of
            bytes.
    """
    data = _as_bytes(compressed_data)
    if data[: len(LZ4_MAGIC)].tobytes() == LZ4_MAGIC:
        return _from_lz4_frames(data, _Request.checked(image_shape, batch_size, dtype, indices))
    return decompress_many(
        [compressed_data], image_shape, [batch_size], dtype, [indices], num_threads
    )[0]


def _from_lz4_frames(data: Bytes, request: _Request) -> Any:
    """Decode plain LZ4 frames, which contain only the bytes of consecutive images."""
    num_bytes = request.num_frames * request.frame_bytes
    try:
        values = decode_exactly(data.data, num_bytes, "compressed_data")
    except CorruptFileError as cause:
        images = f"{request.num_frames} images of dtype {request.name} and shape {request.shape}"
        raise CorruptFileError(f"{cause.message} The call expects {images}.") from cause
    out = request.empty((request.count,))
    stored = _as_stored(out)
    frames = values.view(stored.dtype).reshape(request.num_frames, *request.shape)
    stored[...] = frames if request.indices is None else frames[request.indices]
    return out


#: Number of axes of the pixel array, by mode of a PIL image. These modes have uint8 pixels. The
#: shape of an array determines its mode.
_MODES = {"L": 2, "LA": 3, "RGB": 3, "RGBA": 3}


def compress_image(image: Any, level: int = 0) -> bytes:
    """Compress one image without loss.

    Args:
        image: A PIL image of mode L, LA, RGB or RGBA, or uint8 `[H, W]` or `[H, W, 1 to 4]` as
            array or tensor.
        level: As in `compress_image_seq`.

    Returns:
        A blob for `decompress_image`.

    Raises:
        UsageError: A PIL image has another mode. Convert it first.
        SchemaError: The shape is not that of an image.
        FieldTypeError: The dtype is not uint8.
    """
    mode = getattr(image, "mode", None)
    if isinstance(mode, str) and mode not in _MODES:
        raise UsageError(
            f"image has mode {mode!r}, expected {', '.join(_MODES)}. Use image.convert('RGB')."
        )
    pixels, dtype = _as_frames(image)
    if dtype != "uint8":
        raise FieldTypeError(f"image has dtype {dtype}, expected uint8.")
    if not (pixels.ndim == 2 or (pixels.ndim == 3 and 1 <= pixels.shape[2] <= 4)):
        raise SchemaError(f"image has shape {pixels.shape}, expected (H, W) or (H, W, 1 to 4).")
    return compress_image_seq(pixels[None], level)


def decompress_image(compressed_data: Any) -> Any:
    """Decompress a blob of `compress_image`.

    Returns:
        A PIL image (package `pillow`): L for one channel, LA, RGB or RGBA.

    Raises:
        CorruptFileError: The blob is truncated or damaged, or does not hold exactly one image.
    """
    from PIL import Image

    shape, num_images = stored_shape(compressed_data)
    if num_images != 1 or not (len(shape) == 2 or (len(shape) == 3 and 1 <= shape[2] <= 4)):
        raise _corrupt(f"expected one image, got {num_images} of shape {shape}")
    pixels = decompress_image_seq(compressed_data, shape, 1)[0]
    return Image.fromarray(pixels[..., 0] if shape[2:] == (1,) else pixels)


def stored_shape(compressed_data: Any) -> tuple[tuple[int, ...], int]:
    """Return the shape and number of frames in the header of a blob, without further checks."""
    data = _as_bytes(compressed_data)
    start, stop = _header_bounds(data, "compress_image")
    try:
        header = json.loads(data[start:stop].tobytes())
        shape = tuple(whole("", size, 0) for size in header["shape"])
        return shape, whole("", header["num_frames"], 0)
    except (ValueError, LookupError, TypeError, RecursionError, RolloutDataError) as cause:
        raise _corrupt(f"its header is invalid: {type(cause).__name__}: {cause}") from cause


def _header_bounds(data: Bytes, function: str) -> tuple[int, int]:
    """Return the byte range of the JSON header of a blob that `function` made."""
    start = len(_MAGIC) + _LENGTH.size
    is_blob = len(data) >= start and data[: len(_MAGIC)].tobytes() == _MAGIC
    _check(is_blob, f"it is not a blob of {function}")
    length = _LENGTH.unpack(data[len(_MAGIC) : start].data)[0]
    is_inside = length <= min(_MAX_HEADER_BYTES, len(data) - start)
    _check(is_inside, f"its header declares {length} of {len(data)} bytes")
    return start, start + length


def decompress_many(
    blobs: Sequence[Any],
    image_shape: Sequence[int],
    batch_size: int | Sequence[int],
    dtype: Any,
    indices: Any = None,
    num_threads: int | None = None,
    out: Any = None,
) -> Any:
    """Decompress blobs into one output, with threads if they are faster.

    Args:
        blobs: B blobs.
        image_shape, dtype: As in `decompress_image_seq`, the same for all blobs.
        batch_size: Number of frames in each blob: one number for all blobs, or B numbers.
        indices: Frames to return: one list for all blobs, or B lists. None, or None in place of one
            of the B lists, returns all frames.
        num_threads: Maximum number of threads; None uses torch's number of threads.
        out: Contiguous memory for the frames; None allocates it. The shape is
            `[B, n, *image_shape]` if every blob returns n frames. Otherwise it is
            `[total, *image_shape]`, and the frames of each blob follow those of the previous blob.

    Returns:
        Frames such that `result[b]` has the frames of blob b. If every blob returns n frames, the
        result is `[B, n, *image_shape]`. Otherwise it is a list of B views, `[n_b, *image_shape]`.

    Raises:
        SchemaError, CorruptFileError: As in `decompress_image_seq`.
        UsageError: As in `decompress_image_seq`, or `batch_size` or `indices` have other than B
            entries.
    """
    instance("blobs", blobs, "a list of bytes", Sequence)
    size_or_sizes: Any = batch_size
    if np.ndim(size_or_sizes):
        sizes = list(size_or_sizes) or [0]
    else:
        sizes = [size_or_sizes] * max(1, len(blobs))
    lists = list(indices) if _is_nested(indices) else [indices] * len(sizes)
    if {len(sizes), len(lists)} != {max(1, len(blobs))}:
        raise UsageError(
            "batch_size and indices must have one entry per blob, or be the same for all blobs, "
            f"got {len(sizes)} sizes and {len(lists)} lists for {len(blobs)} blobs."
        )
    requests = [
        _Request.checked(image_shape, size, dtype, blob_indices)
        for size, blob_indices in zip(sizes, lists, strict=True)
    ]
    # `requests` has one entry even without blobs. The entry determines the shape of the result.
    opened = [_Blob(data, request) for data, request in zip(blobs, requests, strict=False)]
    chunks = [
        (number, chunk) for number, blob in enumerate(opened) for chunk in blob.requested_chunks()
    ]

    def check(start: int, stop: int) -> None:
        for number, chunk in chunks[start:stop]:
            opened[number].check(chunk)

    num_coded_bytes = sum(len(opened[number].chunk(chunk)) for number, chunk in chunks)
    each_part(check, len(chunks), num_coded_bytes, num_threads)

    counts = [request.count for request in requests]
    has_equal_counts = len({*counts}) == 1
    lead = (len(opened), counts[0]) if has_equal_counts else (sum(counts),)
    target = requests[0].empty(lead) if out is None else requests[0].checked_out(out, lead)
    outs = target
    if not has_equal_counts:
        ends = np.cumsum(counts).tolist()
        outs = [target[end - count : end] for end, count in zip(ends, counts, strict=True)]
    arrays = [_as_stored(blob_out) for blob_out in outs]

    def decode(start: int, stop: int) -> None:
        for number, chunk in chunks[start:stop]:
            opened[number].decode(chunk, arrays[number])

    num_decoded_bytes = sum(opened[number].chunk_bytes for number, _ in chunks)
    each_part(decode, len(chunks), num_decoded_bytes, num_threads)
    return outs


def _is_nested(indices: Any) -> bool:
    """Return whether `indices` has a list of frames per blob, not one list for all blobs."""
    if isinstance(indices, (list, tuple)):
        return len(indices) > 0 and (indices[0] is None or np.ndim(indices[0]) > 0)
    return getattr(indices, "ndim", 1) > 1


def _as_frames(images: Any) -> tuple[Array, str]:
    """Return frames as a contiguous array of stored values, and the name of their dtype.

    The array is a view if possible. bfloat16 values are stored as uint16.
    """
    is_tensor = isinstance(images, torch.Tensor)
    array = images.detach().cpu().contiguous() if is_tensor else np.asarray(images)
    dtype = dtype_name(array.dtype, "the images")
    if array.ndim < 1:
        raise SchemaError(
            "images must be a stack of frames [num_frames, *image_shape], got a single number."
        )
    return np.ascontiguousarray(_as_stored(array), DTYPES[dtype][1]), dtype


def _as_stored(out: Any) -> Array:
    """Return a CPU tensor or an array as a view of the same bytes. bfloat16 becomes uint16."""
    if isinstance(out, torch.Tensor):
        stored: Array = (out.view(torch.uint16) if out.dtype == torch.bfloat16 else out).numpy()
        return stored
    return np.asarray(out)


def _make_blob(
    frames: Array, dtype: str, codec: ChunkCodec, frames_per_chunk: int, level: int | None
) -> bytes:
    """Build a blob from contiguous frames `[num_frames, *shape]` with the dtype named `dtype`."""
    starts = range(0, len(frames), frames_per_chunk)
    coded = [codec.encode(frames[first : first + frames_per_chunk], level) for first in starts]
    header = {
        "codec": codec.name,
        "dtype": dtype,
        "shape": list(frames.shape[1:]),
        "num_frames": len(frames),
        "frames_per_chunk": frames_per_chunk,
        "max_error": max((error for _, error in coded), default=0.0),
    }
    text = json.dumps(header).encode()
    ends = np.cumsum([len(chunk) for chunk, _ in coded], dtype="<u8")
    sums = np.array([crc32(chunk) for chunk, _ in coded], "<u4")
    head = b"".join([_MAGIC, _LENGTH.pack(len(text)), text, ends.tobytes(), sums.tobytes()])
    return b"".join([head, _LENGTH.pack(crc32(head)), *(chunk for chunk, _ in coded)])


@dataclass(frozen=True)
class _Request:
    """Expected content of a blob, and the frames that the caller requests.

    Attributes:
        dtype: Dtype as in the call.
        name: Name of the dtype in `fields.DTYPES`.
        shape: Shape of a frame.
        num_frames: Frames in the blob.
        indices: Requested frames, int64 `[n]`; None for all.
    """

    dtype: Any
    name: str
    shape: tuple[int, ...]
    num_frames: int
    indices: npt.NDArray[np.int64] | None

    @classmethod
    def checked(
        cls, image_shape: Sequence[int], batch_size: Any, dtype: Any, indices: Any
    ) -> _Request:
        """Check arguments of `decompress_image_seq`."""
        name = dtype_name(dtype, "the images")
        sizes = np.atleast_1d(image_shape).tolist()
        shape = tuple(whole("sizes of image_shape", size, 0) for size in sizes)
        num_frames = whole("batch_size", batch_size, 0)
        if indices is not None:
            if np.ndim(indices) != 1:
                raise UsageError(
                    "indices must be a list of frame numbers, got an array of "
                    f"{np.ndim(indices)} dimensions."
                )
            indices = env_ids("indices", indices, num_frames)
        return cls(dtype, name, shape, num_frames, indices)

    @property
    def count(self) -> int:
        """Number of requested frames."""
        return self.num_frames if self.indices is None else len(self.indices)

    @property
    def frame_bytes(self) -> int:
        return prod(self.shape) * DTYPES[self.name][1].itemsize

    def empty(self, lead: tuple[int, ...]) -> Any:
        """Allocate memory for frames: `[*lead, *shape]`."""
        if isinstance(self.dtype, torch.dtype):
            return torch.empty((*lead, *self.shape), dtype=self.dtype, device="cpu")
        return np.empty((*lead, *self.shape), DTYPES[self.name][1])

    def checked_out(self, out: Any, lead: tuple[int, ...]) -> Any:
        """Check that `out` is contiguous on the CPU, `[*lead, *shape]` of this dtype; return it."""
        instance("out", out, "an array or a tensor", np.ndarray, torch.Tensor)
        shape = tuple(out.shape)
        name = dtype_name(out.dtype, "the output")
        is_tensor = isinstance(out, torch.Tensor)
        is_plain = (
            out.is_contiguous() and out.device.type == "cpu" if is_tensor else out.flags.carray
        )
        if shape != (*lead, *self.shape) or name != self.name or not is_plain:
            raise SchemaError(
                f"out must be contiguous {self.name} of shape {(*lead, *self.shape)} on the CPU, "
                f"got {name} of shape {shape}."
            )
        return out


class _Blob:
    """A blob with a checked header.

    Raises:
        CorruptFileError: The header is damaged, or a size in it is impossible.
        SchemaError: Shape, dtype or number of frames differ from the request.
    """

    def __init__(self, data: Any, request: _Request) -> None:
        self.data = _as_bytes(data)
        self.request = request
        start, stop = _header_bounds(self.data, "compress_image_seq")
        self.codec, self.frames_per_chunk, num_chunks = self._header(
            self.data[start:stop].tobytes()
        )
        #: Bounds of the chunks in `data`, int64 `[num_chunks + 1]`; CRC-32 of each chunk.
        self._bounds, self._checksums = self._read_table(stop, num_chunks)
        # A decompression bomb declares more frames than its bytes can hold.
        num_bytes = int(self._bounds[-1] - self._bounds[0])
        fewest = -(-request.num_frames * request.frame_bytes // self.codec.max_expansion)
        _check(
            num_bytes >= fewest, f"its chunks have {num_bytes} bytes, expected at least {fewest}"
        )

    def _read_table(
        self, start: int, num_chunks: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint32]]:
        """Check the table of chunks at byte `start`.

        Returns the bounds of the chunks in `data`, `[num_chunks + 1]`, and their checksums.
        """
        size = len(self.data)
        checksums_start = start + 8 * num_chunks
        stop = start + 12 * num_chunks
        first_chunk = stop + _LENGTH.size
        _check(
            first_chunk <= size,
            f"the table of {num_chunks} chunks needs {first_chunk} bytes, the blob has {size}",
        )
        checksum = crc32(self.data[:stop].data)
        stored = _LENGTH.unpack(self.data[stop:first_chunk].data)[0]
        _check(checksum == stored, f"expected header checksum {stored:08x}, got {checksum:08x}")
        ends = np.append(np.uint64(0), self.data[start:checksums_start].view("<u8"))
        is_filled = int(ends[-1]) == size - first_chunk and not (ends[1:] < ends[:-1]).any()
        _check(
            is_filled,
            f"the chunks end at {int(ends.max())}, expected {size - first_chunk} bytes of chunks",
        )
        return ends.astype(np.int64) + first_chunk, self.data[checksums_start:stop].view("<u4")

    def _header(self, text: bytes) -> tuple[ChunkCodec, int, int]:
        """Check the header; return the codec, the frames per chunk and the number of chunks."""
        try:
            header = json.loads(text)
            codec, dtype, shape, num_frames, step, _ = (header[key] for key in _KEYS)
            chain = chunk_codec(str(codec))
            has_numbers = type(num_frames) is int and type(step) is int
            is_valid = has_numbers and num_frames >= 0 and step >= 1
        except (ValueError, LookupError, TypeError, RecursionError, RolloutDataError) as cause:
            raise _corrupt(f"its header is invalid: {type(cause).__name__}: {cause}") from cause
        _check(is_valid, f"its header declares {num_frames!r} frames in chunks of {step!r}")
        request = self.request
        if (dtype, shape, num_frames) != (request.name, list(request.shape), request.num_frames):
            raise SchemaError(
                f"the blob has {num_frames} frames of dtype {dtype} and shape {tuple(shape)}, "
                f"expected {request.num_frames} of dtype {request.name} and shape {request.shape}."
            )
        most = most_chunk_frames(request.frame_bytes)
        declared = f"its header declares {num_frames} frames in chunks of {step}"
        is_possible = request.frame_bytes * step <= 1 << 62 and num_frames <= 1 << 48
        _check(is_possible, f"{declared}, which do not fit into memory")
        _check(min(step, num_frames) <= most, f"{declared}, expected at most {most} per chunk")
        return chain, step, -(-num_frames // step)

    @property
    def chunk_bytes(self) -> int:
        """Maximum number of decoded bytes of a chunk."""
        return self.frames_per_chunk * self.request.frame_bytes

    def check(self, number: int) -> None:
        """Raise `CorruptFileError` if the checksum of a chunk differs."""
        checksum = crc32(self.chunk(number).data)
        stored = int(self._checksums[number])
        _check(
            checksum == stored,
            f"expected checksum {stored:08x} of chunk {number}, got {checksum:08x}",
        )

    def requested_chunks(self) -> list[int]:
        """Return the indices of the chunks with requested frames, ascending."""
        if self.request.indices is None:
            return list(range(len(self._checksums)))
        numbers: list[int] = np.unique(self.request.indices // self.frames_per_chunk).tolist()
        return numbers

    def chunk(self, number: int) -> Bytes:
        """Return a view of the encoded bytes of a chunk."""
        return self.data[self._bounds[number] : self._bounds[number + 1]]

    def decode(self, number: int, out: Array) -> None:
        """Decode the requested frames of a chunk to their positions in `out`, `[count, *shape]`."""
        first = number * self.frames_per_chunk
        indices = self.request.indices
        stop = min(first + self.frames_per_chunk, self.request.num_frames)
        try:
            if indices is None:
                self.codec.decode(self.chunk(number), out[first:stop])
                return
            frames = self.codec.decoded(
                self.chunk(number), (stop - first, *out.shape[1:]), out.dtype
            )
        except CorruptFileError as cause:
            raise _corrupt(f"chunk {number}: {cause.message.rstrip('.')}") from cause
        places = np.flatnonzero((indices >= first) & (indices < stop))
        out[places] = frames[indices[places] - first]


def _as_bytes(data: Any) -> Bytes:
    try:
        return np.frombuffer(data, np.uint8)
    except (TypeError, ValueError, BufferError) as cause:
        if isinstance(data, (bytes, bytearray)):  # numpy rejects empty bytes.
            return np.zeros(0, np.uint8)
        raise UsageError(f"compressed_data must be bytes, got {type(data).__name__}.") from cause


def _check(is_valid: Any, problem: str) -> None:
    if not is_valid:
        raise _corrupt(problem)


def _corrupt(problem: str) -> CorruptFileError:
    return CorruptFileError(f"compressed_data is damaged: {problem}. Compress the images again.")
