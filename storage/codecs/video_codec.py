"""Lossy video codec for the frames of a chunk. Needs the extra `video`.

A chunk is one group of pictures that decodes independently. It consists of packets. The size of
each packet (uint32, little-endian) precedes the packet. A decoder may not allocate more pixels than
the expected pictures have.
"""

from __future__ import annotations

import importlib.util
import os
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import CorruptFileError, FieldTypeError, UsageError

#: Coders by name: encoder, decoder, options of the encoder, and the largest `crf` (lowest quality).
CODERS: dict[str, tuple[str, str, dict[str, str], int]] = {
    "h264": ("libx264", "h264", {"preset": "veryfast", "bf": "0"}, 51),
    "av1": ("libsvtav1", "libdav1d", {"preset": "8", "svtav1-params": "lp=1:pred-struct=1"}, 63),
}
_DEFAULT_CRF = 18
_NAME = re.compile(rf"({'|'.join(CODERS)})(?::crf=(\d+))?")
#: Largest accepted ratio of decoded to encoded bytes. A still picture of any size takes a few
#: hundred bytes.
MAX_EXPANSION = 1 << 16
#: Smallest height and width in pixels. Smaller pictures are padded, since encoders reject them.
_MIN_SIDE = 64
_SIZE = struct.Struct("<I")


@dataclass(frozen=True)
class Video:
    """A coder of uint8 pictures `[H, W, 3]`, `[3, H, W]`, `[H, W]` or `[H, W, 1]`.

    Attributes:
        coder: Name in `CODERS`.
        crf: Quality, 0 is best.
    """

    coder: str
    crf: int

    def encode(self, frames: npt.NDArray[np.uint8]) -> bytes:
        """Encode `[F, *shape]` frames and return the bytes."""
        pictures, pixel_format = _pictures(frames)
        height, width = (max(_MIN_SIDE, size + size % 2) for size in pictures.shape[1:3])
        padding = (0, 0), (0, height - pictures.shape[1]), (0, width - pictures.shape[2]), (0, 0)
        pictures = np.pad(pictures, padding[: pictures.ndim], mode="edge")
        av = _av()
        encoder, _, options, _ = CODERS[self.coder]
        # Without this variable, the AV1 encoder prints ten lines per chunk.
        os.environ.setdefault("SVT_LOG", "1")
        context = av.CodecContext.create(encoder, "w")
        context.width = width
        context.height = height
        context.pix_fmt = "yuv420p"
        context.thread_count = 1
        context.time_base = Fraction(1, 30)
        context.framerate = Fraction(30)
        context.options = {**options, "crf": str(self.crf), "g": str(len(frames))}
        packets: list[bytes] = []
        for number, picture in enumerate(pictures):
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format=pixel_format)
            frame = frame.reformat(format="yuv420p")
            frame.pts = number
            packets += map(bytes, context.encode(frame))
        packets += map(bytes, context.encode(None))
        return b"".join(_SIZE.pack(len(packet)) + packet for packet in packets)

    def decode(self, data: npt.NDArray[np.uint8], out: npt.NDArray[np.uint8]) -> None:
        """Decode bytes into `out`, `[F, *shape]`. After an error the content of `out` is undefined.

        Raises:
            CorruptFileError: The data are damaged or have another number of frames.
        """
        pictures, pixel_format = _pictures(out)
        height, width = pictures.shape[1:3]
        av = _av()
        decoder = CODERS[self.coder][1]
        context = av.CodecContext.create(decoder, "r")
        # The limit allows for decoders that round height and width up to blocks of 16 to 64 pixels.
        num_pixels = (height + _MIN_SIDE) * (width + _MIN_SIDE)
        context.thread_count = 1
        context.options = {"max_pixels": str(num_pixels)}
        count = 0
        try:
            for packet in [*map(av.Packet, _packets(data.tobytes())), None]:
                for frame in context.decode(packet):
                    if count < len(out) and frame.height >= height and frame.width >= width:
                        pictures[count] = frame.to_ndarray(format=pixel_format)[:height, :width]
                    count += 1
        except (av.FFmpegError, ValueError) as cause:
            raise CorruptFileError(f"the {self.coder} video is damaged: {cause}.") from cause
        if count != len(out):
            raise CorruptFileError(
                f"the {self.coder} video has {count} frames, expected {len(out)}."
            )


def video_named(stage: str) -> Video | None:
    """Return the video coder named `stage`, such as "h264:crf=18"; None for any other name.

    Raises:
        UsageError: The quality is out of range.
    """
    match = _NAME.fullmatch(stage)
    if match is None:
        return None
    crf = int(match[2] or _DEFAULT_CRF)
    worst = CODERS[match[1]][3]
    if crf > worst:
        raise UsageError(f"crf of the codec {stage!r} must be in 0:{worst + 1}, got {crf}.")
    return Video(match[1], crf)


def check_shape(shape: tuple[int, ...], dtype: str, name: str) -> None:
    """Raise `FieldTypeError` unless the field `name` contains uint8 pictures."""
    is_picture = len(shape) == 2 or (
        len(shape) == 3 and (shape[-1] in (1, 3) or shape[0] in (1, 3))
    )
    if dtype != "uint8" or not is_picture or 0 in shape:
        raise FieldTypeError(
            f"field {name!r} is {dtype} of shape {shape}. A video codec needs uint8 pictures of "
            "shape (H, W, 3), (3, H, W), (H, W) or (H, W, 1)."
        )


def check_installed(coder: str) -> None:
    """Raise `UsageError` if PyAV is not installed or lacks the encoder."""
    if importlib.util.find_spec("av") is None:
        raise UsageError(f"codec {coder!r} needs the package av. Install the extra 'video'.")
    encoder = CODERS[coder][0]
    if encoder not in _av().codecs_available:
        raise UsageError(
            f"codec {coder!r} needs the encoder {encoder}, which the installed PyAV lacks. Choose "
            "'h264'."
        )


def _av() -> Any:
    try:
        import av
    except ImportError as cause:
        raise UsageError("videos need the package av. Install the extra 'video'.") from cause
    return av


def _pictures(frames: npt.NDArray[np.uint8]) -> tuple[npt.NDArray[np.uint8], str]:
    """Return frames as a view `[F, H, W, 3]` or `[F, H, W]`, and the name of the pixel format."""
    if frames.ndim == 3:
        return frames, "gray"
    if frames.shape[-1] not in (1, 3):
        frames = np.moveaxis(frames, 1, -1)
    return (frames, "rgb24") if frames.shape[-1] == 3 else (frames[..., 0], "gray")


def _packets(data: bytes) -> Iterator[bytes]:
    """Yield the packets of a chunk. Raise `ValueError` if packets do not fill the chunk exactly."""
    start = 0
    while start < len(data):
        head = data[start : start + _SIZE.size]
        num_bytes = _SIZE.unpack(head)[0] if len(head) == _SIZE.size else 0
        start += _SIZE.size + num_bytes
        if not num_bytes or start > len(data):
            raise ValueError("its packets do not fill the chunk")
        yield data[start - num_bytes : start]
