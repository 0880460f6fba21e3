"""The pictures of an episode as a GIF or a video, one part of them in memory at a time."""

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
from ...sources.episode import Episode
from ..report.embedded_data import to_rgb

#: A GIF is made of all its frames at once: it has every second, third, ... one where all would take more.
_PART_BYTES, _MAX_GIF_BYTES = 16 << 20, 256 << 20
Array = np.ndarray[Any, Any]


def save_mp4(
    episode: Episode,
    path: str | os.PathLike[str],
    field: str | None = None,
    *,
    rate_hz: float = 20.0,
    progress: bool = False,
) -> int:
    """Write the pictures of an episode as a video (H.264); gives how many.

    Args:
        episode: Its pictures are `[H, W]`, `[H, W, C]` or `[C, H, W]`. Those of other dtypes than uint8 are scaled:
            from [0, 1], or from the least and the largest value of the episode.
        path: The new file; one that is there is replaced.
        field: Its name; None is the first field of pictures.
        rate_hz: Frames per second.
        progress: Show a progress bar.

    Raises:
        UsageError: There is no such field, or a package is missing.
    """
    name = _picture_field(episode, field)
    with replace_file(path) as new:
        write_video(new, (_even(part) for part in _pictures(episode, name, 1, progress)), rate_hz, "h264")
    return episode.length


def save_gif(
    episode: Episode,
    path: str | os.PathLike[str],
    field: str | None = None,
    *,
    rate_hz: float = 20.0,
    progress: bool = False,
) -> int:
    """Write the pictures of an episode as a GIF; gives how many. Arguments and errors are those of `save_mp4`."""
    image = optional("PIL.Image", "pillow", "formats", "pictures")
    name = _picture_field(episode, field)
    step = -(-episode.length * math.prod(episode.schema[name].shape) * 3 // _MAX_GIF_BYTES)
    frames = map(image.fromarray, chain.from_iterable(_pictures(episode, name, step, progress)))
    about = {"save_all": True, "append_images": frames, "duration": 1000 * step / rate_hz, "loop": 0}
    with replace_file(path) as new:
        next(frames).save(new, "GIF", **about)
    return -(-episode.length // step)


def _picture_field(episode: Episode, field: str | None) -> str:
    there = [name for name, one in episode.schema.items() if axes_of(one.shape)]
    if not there or (field is not None and field not in there):
        expected = f"a field of pictures, {nearest(field or '', there)}"
        raise UsageError("show pictures", f"of episode {episode.id!r}", expected, repr(field) if field else "none")
    return field or there[0]


def _pictures(episode: Episode, name: str, step: int, progress: bool) -> Iterator[Array]:
    """Yield every `step`-th picture, as parts `[n, H, W, 3]` of uint8."""
    field = episode.schema[name]
    size = step * max(1, _PART_BYTES // (math.prod(field.shape) * 8 * step))
    parts = [(start, min(start + size, episode.length)) for start in range(0, episode.length, size)]
    low = 0.0
    high = 255.0
    if field.dtype != "uint8":
        bounds = [(np.min(part), np.max(part)) for part in (episode.read(name, *one) for one in parts)]
        low, high = (float(pick(bound)) for pick, bound in zip((np.min, np.max), np.transpose(bounds), strict=True))
        low, high = (0.0, 1.0) if low >= 0 and high <= 1 else (low, high)
    for one in tqdm(parts, desc="pictures", disable=not progress):
        rows = np.asarray(episode.read(name, *one))[::step]
        yield to_rgb(rows, low, high)


def _even(part: Array) -> Array:
    """Repeat the last row and column where their number is odd, which H.264 does not take."""
    return np.pad(part, ((0, 0), (0, part.shape[1] % 2), (0, part.shape[2] % 2), (0, 0)), mode="edge")
