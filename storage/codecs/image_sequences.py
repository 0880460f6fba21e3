"""Image sequences: compress a stack of frames, and get all or some of it back.

One rule: a thin front of the codecs that block files use; what a blob looks like is `image_blobs.py`'s.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..core.fields import DTYPES, dtype_name
from ..core.work_split import WorkSplit
from ..errors import SchemaError, UsageError
from .chunks import chunk_codec
from .codecs import chunk_frames, most_chunk_frames
from .image_blobs import ExpectedFrames, ImageBlob, as_stored, make_blob

Array = npt.NDArray[Any]


def compress_image_seq(
    images: Any, level: int = 0, *, codec: str | None = None, frames_per_chunk: int | None = None
) -> bytes:
    """Compress a stack of frames without loss.

    Args:
        images: `[num_frames, *image_shape]` tensor (any device) or array of a dtype of `storage.core.fields.DTYPES`.
        level: 0 is fast; 1 to 12 compress better and slower, and decode as fast.
        codec: A chain of `storage/codecs/chunks.py` instead of the usual one (`lz4`, or `split+lz4` for wider
            numbers); `uint16` chains lose, everything else does not.
        frames_per_chunk: Frames that are decoded together; by default at most 8, and never more than are 64 MiB.

    Returns:
        The blob.

    Raises:
        UsageError, SchemaError, FieldTypeError: No stack of frames, or a dtype, level or codec that cannot be.
    """
    array, dtype = _as_frames(images)
    if isinstance(level, bool) or level not in range(13):
        raise UsageError("compress images", "", "a level from 0 (fast) to 12", repr(level))
    if codec is None:
        codec = ("split+" if array.dtype.itemsize > 1 else "") + ("lz4hc" if level else "lz4")
    chain = chunk_codec(codec)
    chain.check_installed()
    chain.check_dtype(array.dtype if dtype != "bfloat16" else np.dtype(np.uint16))
    row_bytes = prod(array.shape[1:]) * array.itemsize
    step = chunk_frames(row_bytes, codec) if frames_per_chunk is None else operator.index(frames_per_chunk)
    if step < 1:
        raise UsageError("compress images", "", "frames_per_chunk >= 1", repr(frames_per_chunk))
    return make_blob(array, dtype, chain, min(step, most_chunk_frames(row_bytes)), level or None)


def decompress_image_seq(
    data: Any, image_shape: Sequence[int], batch_size: int, dtype: Any, indices: Any = None, num_threads: int | None = 1
) -> Any:
    """Decompress a blob, or some frames of it.

    Args:
        data: The blob, anything with a buffer.
        image_shape: Shape of one frame.
        batch_size: How many frames the blob holds.
        dtype: Of the frames. A torch dtype gives a CPU tensor, a numpy dtype (or its name) an array.
        indices: Which frames, in any order, also repeated; None gives all. Only their chunks are decoded.
        num_threads: At most so many threads, where they are faster; None takes torch's number.

    Returns:
        `[batch_size or len(indices), *image_shape]`, new memory.

    Raises:
        SchemaError: Shape, dtype or number of frames are others than those of the blob.
        UsageError: An index outside `0:batch_size`.
        CorruptFileError: The blob is truncated or damaged; known before anything is allocated.
    """
    chosen = None if indices is None else _indices(indices, batch_size)
    frames = ExpectedFrames(image_shape, batch_size, dtype)
    blob = ImageBlob(data, frames)
    count = frames.num_frames if chosen is None else len(chosen)
    pieces, split = _Pieces([blob], [chosen]), _splits(num_threads)
    pieces.check(split)
    out = frames.empty((count,))
    pieces.decode(split, [as_stored(out)])
    return out


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
        num_threads: At most so many threads; None takes torch's number of threads.
        out: Contiguous, to write to instead of new memory: `[B, n, *image_shape]` if each blob gives n frames; if
            the numbers differ `[total, *image_shape]`, where the frames of one blob follow those of the blob before.

    Returns:
        `out`, or a new one; if the numbers differ a list of B views of it, `[n_b, *image_shape]`. Either way
        `result[b]` holds the frames of blob b.

    Raises:
        As `decompress_image_seq`. UsageError: There are not B numbers, or not B lists.
    """
    given: Any = batch_size
    sizes = list(given) or [0] if np.ndim(given) else [given] * max(1, len(blobs))
    lists = list(indices) if _is_nested(indices) else [indices] * len(sizes)
    if {len(sizes), len(lists)} != {max(1, len(blobs))}:
        got = f"{len(sizes)} and {len(lists)} for {len(blobs)} blobs"
        raise UsageError("decompress images", "", "one batch_size and one list of indices per blob, or for all", got)
    frames = [ExpectedFrames(image_shape, size, dtype) for size in sizes]
    chosen = [None if one is None else _indices(one, size) for one, size in zip(lists, sizes, strict=True)]
    found = [ImageBlob(data, its) for data, its in zip(blobs, frames, strict=False)]
    pieces, split = _Pieces(found, chosen), _splits(num_threads)
    pieces.check(split)
    counts = [its.num_frames if one is None else len(one) for its, one in zip(frames, chosen, strict=True)]
    is_even = len({*counts}) == 1
    lead = (len(found), counts[0]) if is_even else (sum(counts),)
    target = frames[0].empty(lead) if out is None else frames[0].checked(out, lead)
    ends = np.cumsum(counts).tolist()
    views = target if is_even else [target[end - count : end] for end, count in zip(ends, counts, strict=True)]
    pieces.decode(split, [as_stored(view) for view in views])
    return views


def _is_nested(indices: Any) -> bool:
    """Tell whether these are lists of frames, one for each blob, rather than one for all."""
    if isinstance(indices, (list, tuple)):
        return any(one is None or np.ndim(one) > 0 for one in indices[:1])
    return getattr(indices, "ndim", 1) > 1


_SPLITS: dict[int | None, WorkSplit] = {}


def _splits(num_threads: int | None) -> WorkSplit:
    if num_threads not in _SPLITS:
        _SPLITS[num_threads] = WorkSplit(num_threads)
    return _SPLITS[num_threads]


def _as_frames(images: Any) -> tuple[Array, str]:
    """View frames as an array of the bytes that are stored; give it and the dtype's name."""
    if isinstance(images, torch.Tensor):
        dtype = dtype_name(images.dtype, "of the images")
        array = as_stored(images.detach().cpu().contiguous())
    else:
        array = np.asarray(images)
        dtype = dtype_name(array.dtype, "of the images")
    if array.ndim < 1:
        raise SchemaError("compress images", "", "a stack of frames [num_frames, *image_shape]", "a single number")
    return np.ascontiguousarray(array, DTYPES[dtype][1]), dtype


def _indices(indices: Any, batch_size: int) -> npt.NDArray[np.int64]:
    found = np.asarray(indices.cpu() if isinstance(indices, torch.Tensor) else indices)
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
        raise UsageError("decompress images", "", "a list of frame numbers", f"{found.dtype} of shape {found.shape}")
    found = found.astype(np.int64)
    if len(found) and not (found.min() >= 0 and found.max() < batch_size):
        raise UsageError(
            "decompress images", "", f"frame numbers in 0:{batch_size}", f"{found.min()}:{found.max() + 1}"
        )
    return found


class _Pieces:
    """The chunks of some blobs that hold the frames chosen of each."""

    def __init__(self, blobs: Sequence[ImageBlob], chosen: Sequence[npt.NDArray[np.int64] | None]) -> None:
        self._chosen = chosen
        self._pieces = [(at, blob, number) for at, blob in enumerate(blobs) for number in blob.chunks_of(chosen[at])]

    def check(self, split: WorkSplit) -> None:
        """Check the checksums of all; nothing is allocated before that."""

        def check(start: int, stop: int) -> None:
            for _, blob, number in self._pieces[start:stop]:
                blob.check(number)

        num_bytes = sum(len(blob.chunk(number)) for _, blob, number in self._pieces)
        split.run(check, len(self._pieces), num_bytes, "check")

    def decode(self, split: WorkSplit, outs: Sequence[Array]) -> None:
        """Decode all to the output of their blob."""
        if not self._pieces:
            return
        blob = self._pieces[0][1]
        piece_bytes = max(1, blob.frames_per_chunk * blob.expected.frame_bytes)

        def decode(start: int, stop: int) -> None:
            for place, source, number in self._pieces[start:stop]:
                source.decode(number, self._chosen[place], outs[place])

        kind = (blob.codec.name, piece_bytes.bit_length())
        split.run(decode, len(self._pieces), piece_bytes * len(self._pieces), kind)
