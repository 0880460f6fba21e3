"""Read frames of video files at given times with PyAV: colours, or depth coded as integers.

Files are only read as MP4, because a playlist could refer to other files. A frame of unexpected
size raises an error before memory is allocated for the frame.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from storage.core.durable_files import open_regular
from storage.errors import CorruptFileError

from ..sources.video_range import VideoRange
from .input_checks import damage_named, of_kind, optional

#: Maximum difference between the time of a frame and the requested time, in seconds.
TOLERANCE_S = 1e-4
_CODECS = ("av1", "h264", "hevc", "mpeg4", "vp9")
_PIXELS = {1: "gray", 3: "rgb24", 4: "rgba"}
#: Maximum pixels that a decoder adds to a side of a frame to pad the frame to whole blocks.
_PADDING = 128
#: Largest integer code of a depth.
_MAX_CODE = 4095
#: Seconds before the first requested frame at which decoding starts. The next larger margin is
#: tried if frames are missing, because some encoders mark frames as key frames although decoding
#: cannot start there.
_MARGINS_S = (TOLERANCE_S, 1.0, 10.0, np.inf)
Array = np.ndarray[Any, Any]


class _MissingFrameError(CorruptFileError):
    """The decoded part of a video has no frame at the requested time."""


@dataclass(frozen=True)
class DepthCoding:
    """Coding of depths as integers from 0 to 4095.

    Attributes:
        minimum, maximum, shift: Parameters of the coding, in metres.
        use_log: Whether codes are proportional to log(depth + shift) instead of depth.
        unit: Unit of decoded depths: "mm" as uint16, or "m" as float32.
    """

    minimum: float = 0.01
    maximum: float = 10.0
    shift: float = 3.5
    use_log: bool = True
    unit: str = "m"

    @property
    def dtype(self) -> str:
        """Dtype of decoded depths."""
        return "uint16" if self.unit == "mm" else "float32"

    def is_valid(self) -> bool:
        """Return whether the parameters define a finite depth for each integer code."""
        numbers = (self.minimum, self.maximum, self.shift)
        is_log = not self.use_log or self.minimum + self.shift > 0
        return all(np.isfinite(numbers)) and self.minimum < self.maximum and is_log

    def depths(self) -> Array:
        """Return the depth of each code: `[4096]`."""
        share = np.arange(_MAX_CODE + 1) / _MAX_CODE
        metres: Array = self.minimum + share * (self.maximum - self.minimum)
        if self.use_log:
            low = np.log(self.minimum + self.shift)
            high = np.log(self.maximum + self.shift)
            metres = np.exp(low + share * (high - low)) - self.shift
        metres = np.clip(metres, self.minimum, self.maximum)
        if self.unit == "mm":
            millimetres: Array = np.clip(np.rint(metres * 1000), 0, 65535)
            return millimetres.astype(self.dtype)
        return metres.astype(self.dtype)


@of_kind("undecodable")
def copy_video(source: VideoRange, target: Path) -> str:
    """Copy the encoded frames of an episode to a separate file.

    The caller has to compare copied packets with the source, because some encoders mark frames as
    key frames although decoding cannot start there.

    Returns:
        "file" if the complete file was copied, because it has only these frames. "packets" if the
        packets of the frames were copied. "" if copying is impossible, because the first frame is
        not a key frame, or because frames of other episodes are in between.
    """
    with _opened(source.path) as (_, stream):
        is_alone = stream.frames == source.num_frames and not stream.start_time
    if is_alone and source.start_s <= TOLERANCE_S:
        shutil.copyfile(source.path, target)
        return "file"
    return "packets" if _copy_packets(source, target) else ""


def _copy_packets(source: VideoRange, target: Path) -> bool:
    av = optional("av", "av", "video", "video")
    with (
        _opened(source.path) as (container, stream),
        av.open(str(target), "w", format="mp4") as out,
    ):
        # Without `opaque` PyAV looks up an encoder by the name of the decoder, which fails for AV1.
        copy = out.add_stream_from_template(stream, opaque=True)
        container.seek(int(max(0, source.start_s) / stream.time_base), stream=stream, backward=True)
        num_copied = 0
        first = 0
        for packet in container.demux(stream):
            if packet.pts is None or packet.dts is None:
                break
            position = (float(packet.pts * stream.time_base) - source.start_s) * source.rate_hz
            frame = round(position)
            is_of_episode = 0 <= frame < source.num_frames
            is_exact = abs(position - frame) <= TOLERANCE_S * 2 * source.rate_hz
            if num_copied == 0:
                if not is_of_episode:
                    continue
                if not packet.is_keyframe or frame != 0:
                    break
                first = packet.pts
            if not is_of_episode or not is_exact:
                break
            packet.pts -= first
            packet.dts -= first
            packet.stream = copy
            out.mux(packet)
            num_copied += 1
            if num_copied == source.num_frames:
                break
    return num_copied == source.num_frames


@of_kind("undecodable")
def read_frames(
    path: Path, times_s: Array, shape: tuple[int, ...], depth: DepthCoding | None = None
) -> Array:
    """Read the frames of a video at given times.

    Args:
        path: Path of an MP4 file.
        times_s: Ascending times in seconds, `[n]` with n >= 1.
        shape: Shape of a frame: `[H, W, C]` with C of 1, 3 or 4, or `[H, W]` for depth.
        depth: Coding of depth; None for colours.

    Returns:
        `[n, *shape]` uint8, or `depth.dtype`.

    Raises:
        CorruptFileError: The file is damaged, has frames of a different size, or has no frame
            within `TOLERANCE_S` of a time.
        UsageError: PyAV is missing.
    """
    for margin_s in _MARGINS_S:
        try:
            return _read_from(path, times_s, float(max(0, times_s[0] - margin_s)), shape, depth)
        except _MissingFrameError:
            if times_s[0] <= margin_s:
                raise
    raise AssertionError("the last margin is infinite")


def _read_from(
    path: Path,
    times_s: Array,
    start_s: float,
    shape: tuple[int, ...],
    depth: DepthCoding | None,
) -> Array:
    """Read the frames at given times, decoding from the last key frame before `start_s`."""
    out = np.empty((0, *shape), np.uint8 if depth is None else depth.dtype)
    depths = None if depth is None else depth.depths()
    for number, frame in enumerate(_frames_at(path, times_s, start_s, shape)):
        if depths is None:
            pixels = frame.to_ndarray(format=_PIXELS[shape[2]]).reshape(shape)
        elif frame.format.name == "gray12le":
            pixels = depths[np.minimum(frame.to_ndarray(), _MAX_CODE)]
        else:
            raise _wrong_video(path, f"pixel format {frame.format.name}", "gray12le for depth")
        if number == 0:  # Memory is allocated after the size check of the first frame.
            out = np.empty((len(times_s), *shape), out.dtype)
        out[number] = pixels
    return out


@of_kind("undecodable")
def summarize_video(path: Path) -> tuple[float, dict[str, str]]:
    """Return the end time of a video in seconds, and its codec and pixel format for LeRobot.

    The end time is 0 for a video without frames.
    """
    with _opened(path) as (_, stream):
        start = stream.start_time or 0
        duration = stream.duration or 0
        end_s = float((start + duration) * stream.time_base) if stream.frames else 0.0
        context = stream.codec_context
        metadata = {"video.codec": context.codec.canonical_name}
        if context.pix_fmt:
            metadata["video.pix_fmt"] = context.pix_fmt
        return end_s, metadata


def _frames_at(
    path: Path,
    times_s: Array,
    start_s: float,
    shape: tuple[int, ...],
) -> Iterator[Any]:
    """Yield the frame nearest to each time, decoding from the last key frame before `start_s`."""
    tolerance_s = TOLERANCE_S * (1 + 1e-6)
    with _opened(path, shape) as (container, stream):
        container.seek(int(start_s / stream.time_base), stream=stream, backward=True)
        frames = _intact_frames(container, stream)
        frame = next(frames, None)
        for time_s in times_s:
            while frame is not None and frame.time < time_s - tolerance_s:
                frame = next(frames, None)
            if frame is None or frame.time > time_s + tolerance_s:
                reason = "The video ends earlier"
                if frame is not None:
                    reason = f"The next frame is at {frame.time:.4f} s"
                raise _MissingFrameError(f"{str(path)!r} has no frame at {time_s:.4f} s. {reason}.")
            _check_size(path, frame, shape)
            yield frame


def _intact_frames(container: Any, stream: Any) -> Iterator[Any]:
    for frame in container.decode(stream):
        if frame.time is not None and not frame.is_corrupt:
            yield frame


def _check_size(path: Path, frame: Any, shape: tuple[int, ...]) -> None:
    """Raise `CorruptFileError` if the size of a frame or of the header differs from `shape`."""
    if (frame.height, frame.width) != shape[:2]:
        got = f"frames of {frame.height} x {frame.width} pixels"
        raise _wrong_video(path, got, f"{shape[0]} x {shape[1]}")


@contextmanager
def _opened(path: Path, shape: tuple[int, ...] | None = None) -> Iterator[tuple[Any, Any]]:
    """Open the first video stream of an MP4 file: (container, stream).

    Errors of PyAV become `CorruptFileError`.
    """
    av = optional("av", "av", "video", "video")
    damage = (
        av.FFmpegError,
        OSError,
        ValueError,
        LookupError,
        TypeError,
        ArithmeticError,
        EOFError,
        # PyAV raises the following errors for a file with an unknown codec or without a stream.
        AttributeError,
        RuntimeError,
        AssertionError,
    )
    with (
        damage_named(repr(str(path)), *damage),
        open(open_regular(path), "rb") as file,
        av.open(file, format="mp4") as container,
    ):
        if not container.streams.video:
            raise CorruptFileError(f"{str(path)!r} contains no video stream.")
        stream = container.streams.video[0]
        codec = stream.codec_context
        codec_name = codec.codec.canonical_name
        if codec_name not in _CODECS:
            raise _wrong_video(path, f"codec {codec_name}", f"one of {', '.join(_CODECS)}")
        if shape is not None:
            _check_size(path, codec, shape)
            max_pixels = (shape[0] + _PADDING) * (shape[1] + _PADDING)
            codec.options = {"max_pixels": str(max_pixels)}
        yield container, stream


def _wrong_video(path: Path, content: str, expected: str) -> CorruptFileError:
    return CorruptFileError(f"{str(path)!r} has {content}, expected {expected}.")
