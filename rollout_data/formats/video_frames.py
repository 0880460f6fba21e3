"""Frames of video files, through PyAV: those at given times, colours or log-coded depth.

One rule: a file is read as MP4 and nothing else, so that no playlist leads elsewhere, and a frame of another size than
is expected is refused before memory is taken for it.
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

#: How far the nearest frame may be from the time that is asked for, inclusive.
TOLERANCE_S = 1e-4
_CODECS = ("av1", "h264", "hevc", "mpeg4", "vp9")
_PIXELS = {1: "gray", 3: "rgb24", 4: "rgba"}
#: Decoders pad frames to whole blocks.
_PADDING = 128
_MAX_CODE = 4095
#: How far before the first frame decoding starts, until all are found: some encoders mark frames as key frames after
#: which others cannot be decoded.
_MARGINS_S = (TOLERANCE_S, 1.0, 10.0, np.inf)
Array = np.ndarray[Any, Any]


class _MissingFrameError(CorruptFileError):
    """A video has no frame at a time, as far as it was decoded."""


@dataclass(frozen=True)
class DepthCoding:
    """How depth was made codes 0 ... 4095, and what is delivered.

    Attributes:
        minimum, maximum, shift: In metres.
        use_log: Whether codes are proportional to log(depth + shift), otherwise to depth.
        unit: "mm", delivered as uint16, or "m", as float32.
    """

    minimum: float = 0.01
    maximum: float = 10.0
    shift: float = 3.5
    use_log: bool = True
    unit: str = "m"

    @property
    def dtype(self) -> str:
        """What is delivered."""
        return "uint16" if self.unit == "mm" else "float32"

    def is_valid(self) -> bool:
        """Whether codes mean depths."""
        numbers = (self.minimum, self.maximum, self.shift)
        is_log = not self.use_log or self.minimum + self.shift > 0
        return all(np.isfinite(numbers)) and self.minimum < self.maximum and is_log

    def depths(self) -> Array:
        """Return the depth of each code: `[4096]`."""
        share = np.arange(_MAX_CODE + 1) / _MAX_CODE
        metres = self.minimum + share * (self.maximum - self.minimum)
        if self.use_log:
            low = np.log(self.minimum + self.shift)
            high = np.log(self.maximum + self.shift)
            metres = np.exp(low + share * (high - low)) - self.shift
        metres = np.clip(metres, self.minimum, self.maximum)
        scaled: Array = np.clip(np.rint(metres * 1000), 0, 65535) if self.unit == "mm" else metres
        return scaled.astype(self.dtype)


@of_kind("undecodable")
def copy_video(source: VideoRange, target: Path) -> str:
    """Copy the frames of an episode to a file of their own without encoding them again.

    Returns:
        "file" if the file holds nothing else and was copied as it is, "packets" if packets were copied, or "" if the
        frames cannot stand alone: they do not start at a key frame, or other frames lie among them. Copied packets
        have to be compared: some encoders mark frames as key frames after which others cannot be decoded.
    """
    with _opened(source.path) as (_, stream):
        is_alone = stream.frames == source.num_frames and not stream.start_time
    if is_alone and source.start_s <= TOLERANCE_S:
        shutil.copyfile(source.path, target)
        return "file"
    return "packets" if _copy_packets(source, target) else ""


def _copy_packets(source: VideoRange, target: Path) -> bool:
    av = optional("av", "av", "video", "video")
    with _opened(source.path) as (container, stream), av.open(str(target), "w", format="mp4") as out:
        # Without `opaque` PyAV looks for an encoder called as the decoder, which AV1 does not have.
        copy = out.add_stream_from_template(stream, opaque=True)
        container.seek(int(max(0, source.start_s) / stream.time_base), stream=stream, backward=True)
        num_copied = 0
        first = 0
        for packet in container.demux(stream):
            if packet.pts is None or packet.dts is None:
                break
            place = (float(packet.pts * stream.time_base) - source.start_s) * source.rate_hz
            is_wanted = round(place) in range(source.num_frames)
            is_exact = abs(place - round(place)) <= TOLERANCE_S * 2 * source.rate_hz
            if not num_copied and not is_wanted:
                continue
            if not num_copied:
                if not packet.is_keyframe or round(place) != 0:
                    break
                first = packet.pts
            if not is_wanted or not is_exact:
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
def read_frames(path: Path, times_s: Array, shape: tuple[int, ...], depth: DepthCoding | None = None) -> Array:
    """Read the frames nearest to some times.

    Args:
        path: An MP4 file.
        times_s: `[n]`, rising; n is at least 1.
        shape: Of a frame: `[H, W, C]` with C of 1, 3 or 4, or `[H, W]` of depth.
        depth: How depth is coded; None for colours.

    Returns:
        `[n, *shape]` uint8, or the depth's dtype.

    Raises:
        CorruptFileError: The file is damaged, holds frames of another size, or lacks one of these times.
        UsageError: PyAV is missing.
    """
    for margin_s in _MARGINS_S:
        try:
            return _read_from(path, times_s, float(max(0, times_s[0] - margin_s)), shape, depth)
        except _MissingFrameError:
            if times_s[0] <= margin_s:
                raise
    raise AssertionError("the last margin is endless")


def _read_from(path: Path, times_s: Array, start_s: float, shape: tuple[int, ...], depth: DepthCoding | None) -> Array:
    out = np.empty((0, *shape), np.uint8 if depth is None else depth.dtype)
    depths = None if depth is None else depth.depths()
    for number, frame in enumerate(_frames_at(path, times_s, start_s, shape)):
        if depths is None:
            pixels = frame.to_ndarray(format=_PIXELS[shape[2]]).reshape(shape)
        elif frame.format.name == "gray12le":
            pixels = depths[np.minimum(frame.to_ndarray(), _MAX_CODE)]
        else:
            raise _damaged(path, "depth as gray12le", frame.format.name)
        if not number:  # only now: the first frame has the size that is expected
            out = np.empty((len(times_s), *shape), out.dtype)
        out[number] = pixels
    return out


@of_kind("undecodable")
def summarize_video(path: Path) -> tuple[float, dict[str, str]]:
    """Return when a video ends in seconds, 0 if it has no frame, and LeRobot's names of its codec and pixels."""
    with _opened(path) as (_, stream):
        start = stream.start_time or 0
        duration = stream.duration or 0
        end_s = float((start + duration) * stream.time_base) if stream.frames else 0.0
        context = stream.codec_context
        held = {"video.codec": context.codec.canonical_name}
        if context.pix_fmt:
            held["video.pix_fmt"] = context.pix_fmt
        return end_s, held


def _frames_at(path: Path, times_s: Array, start_s: float, shape: tuple[int, ...]) -> Iterator[Any]:
    """Yield the frame nearest to each time; decodes from the last key frame before `start_s` on."""
    with _opened(path, shape) as (container, stream):
        container.seek(int(start_s / stream.time_base), stream=stream, backward=True)
        frames = (frame for frame in container.decode(stream) if frame.time is not None and not frame.is_corrupt)
        frame = next(frames, None)
        for wanted in times_s:
            while frame is not None and frame.time < wanted - TOLERANCE_S * (1 + 1e-6):
                frame = next(frames, None)
            if frame is None or frame.time > wanted + TOLERANCE_S * (1 + 1e-6):
                got = "the end of the video" if frame is None else f"the next at {frame.time:.4f} s"
                raise _MissingFrameError("read", repr(str(path)), f"a frame at {wanted:.4f} s", got)
            if (frame.height, frame.width) != shape[:2]:
                raise _damaged(path, f"frames of {shape[0]} x {shape[1]} pixels", f"{frame.height} x {frame.width}")
            yield frame


@contextmanager
def _opened(path: Path, shape: tuple[int, ...] | None = None) -> Iterator[tuple[Any, Any]]:
    av = optional("av", "av", "video", "video")
    damage = (
        av.FFmpegError, OSError, ValueError, LookupError, TypeError, ArithmeticError, EOFError,
        AttributeError, RuntimeError, AssertionError,  # PyAV finds no codec, or no stream that it knows
    )  # fmt: skip
    with (
        damage_named("read", repr(str(path)), "an intact video", *damage),
        open(open_regular(path), "rb") as file,
        av.open(file, format="mp4") as container,
    ):
        if not container.streams.video:
            raise _damaged(path, "a video", "a file without one")
        stream = container.streams.video[0]
        codec = stream.codec_context
        if codec.codec.canonical_name not in _CODECS:
            raise _damaged(path, f"one of {', '.join(_CODECS)}", codec.codec.canonical_name)
        if shape is not None:
            if (codec.height, codec.width) != shape[:2]:
                raise _damaged(path, f"frames of {shape[0]} x {shape[1]} pixels", f"{codec.height} x {codec.width}")
            codec.options = {"max_pixels": str((shape[0] + _PADDING) * (shape[1] + _PADDING))}
        yield container, stream


def _damaged(path: Path, expected: str, got: str) -> CorruptFileError:
    return CorruptFileError("read", repr(str(path)), expected, got)
