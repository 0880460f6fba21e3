"""Write the images of an episode as a GIF or a video.

To limit memory, images are read in parts: several successive frames of at most 16 MiB.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
from tqdm import tqdm

from storage.core.durable_files import replace_file
from storage.errors import UsageError, nearest

from ...formats.encoded_images import axes_of
from ...formats.input_checks import optional
from ...formats.lerobot.lerobot_features import write_video
from ...sources.recordings.episode import Episode
from ..report.embedded_data import to_rgb

#: Maximum bytes of images in memory at once, if they were float64.
_PART_BYTES = 16 << 20
#: Maximum bytes of the images of a GIF, which are all in memory. Longer episodes are subsampled.
_MAX_GIF_BYTES = 256 << 20
Array = np.ndarray[Any, Any]


def save_mp4(
    episode: Episode,
    path: str | os.PathLike[str],
    field: str | None = None,
    *,
    rate_hz: float = 20.0,
    progress: bool = False,
) -> int:
    """Write the images of an episode as an H.264 video. Returns the number of frames.

    Args:
        episode: Episode with images `[H, W]`, `[H, W, C]` or `[C, H, W]`. Images that are not
            uint8 are scaled from [0, 1], or from the minimum and the maximum of the episode.
        path: Path of the new file. An existing file is replaced.
        field: Name of the image field; None means the first image field.
        rate_hz: Frames per second.
        progress: Show a progress bar.

    Raises:
        UsageError: The episode has no such image field, or a package is missing.
    """
    name = _picture_field(episode, field)
    parts = map(_with_even_sides, _pictures(episode, name, 1, progress))
    with replace_file(path) as new_file:
        write_video(new_file, parts, rate_hz, "h264")
    return episode.length


def save_gif(
    episode: Episode,
    path: str | os.PathLike[str],
    field: str | None = None,
    *,
    rate_hz: float = 20.0,
    progress: bool = False,
) -> int:
    """Write the images of an episode as a GIF. Returns the number of written frames.

    All images of a GIF are in memory at once. To limit memory, only every n-th frame of a long
    episode is written, and shown n times as long. For arguments and errors, see `save_mp4`.
    """
    image_module = optional("PIL.Image", "pillow", "formats", "pictures")
    name = _picture_field(episode, field)
    num_bytes = episode.length * math.prod(episode.schema[name].shape) * 3
    step = math.ceil(num_bytes / _MAX_GIF_BYTES)
    pictures = chain.from_iterable(_pictures(episode, name, step, progress))
    frames = map(image_module.fromarray, pictures)
    first = next(frames)
    with replace_file(path) as new_file:
        first.save(
            new_file,
            "GIF",
            save_all=True,
            append_images=frames,
            duration=1000 * step / rate_hz,
            loop=0,
        )
    return math.ceil(episode.length / step)


def _picture_field(episode: Episode, field: str | None) -> str:
    """Return the name of the field to write: `field`, or the first image field if it is None.

    Raises:
        UsageError: The episode has no image field, or `field` is not one of them.
    """
    names = [name for name, declared in episode.schema.items() if axes_of(declared.shape)]
    if not names or (field is not None and field not in names):
        if not names:
            raise UsageError(f"episode {episode.id!r} has no fields of pictures.")
        raise UsageError(
            f"field {field!r} of episode {episode.id!r} has no pictures. "
            f"Choose one of {nearest(field or '', names)}."
        )
    return field or names[0]


def _pictures(episode: Episode, name: str, step: int, progress: bool) -> Iterator[Array]:
    """Yield every `step`-th image of a field as RGB, several images at a time.

    Each item is uint8 `[n, H, W, 3]`.
    """
    field = episode.schema[name]
    picture_bytes = math.prod(field.shape) * 8
    size = step * max(1, _PART_BYTES // (picture_bytes * step))
    parts = []
    for start in range(0, episode.length, size):
        parts.append((start, min(start + size, episode.length)))

    low = 0.0
    high = 255.0
    if field.dtype != "uint8":
        low, high = _range_of(episode, name, parts)
    for start, stop in tqdm(parts, desc="pictures", disable=not progress):
        rows = np.asarray(episode.read(name, start, stop))
        yield to_rgb(rows[::step], low, high)


def _range_of(
    episode: Episode,
    name: str,
    parts: list[tuple[int, int]],
) -> tuple[float, float]:
    """Return the values that become black and white in the images of a field.

    They are (0, 1) if all values are in [0, 1], otherwise the minimum and the maximum. `parts` has
    the ranges of frames (start, stop) to read at a time.
    """
    minima = []
    maxima = []
    for start, stop in parts:
        rows = episode.read(name, start, stop)
        minima.append(np.min(rows))
        maxima.append(np.max(rows))
    low = float(np.min(minima))
    high = float(np.max(maxima))
    if low >= 0 and high <= 1:
        return 0.0, 1.0
    return low, high


def _with_even_sides(part: Array) -> Array:
    """Pad images to even heights and widths, as H.264 requires, by repeating the edge."""
    _, height, width, _ = part.shape
    return np.pad(part, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), mode="edge")
