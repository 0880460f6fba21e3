"""The part of a video file that belongs to one episode."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class VideoRange:
    """The frames of an episode in a video file.

    Attributes:
        path: The file.
        start_s: Time of the first frame in seconds.
        num_frames: Frames of the episode.
        rate_hz: Frames per second.
        about: LeRobot's description of the camera.
    """

    path: Path
    start_s: float
    num_frames: int
    rate_hz: float
    about: Mapping[str, Any]

    @property
    def codec(self) -> str:
        """Name of the codec in the description of the camera; "" without one."""
        found = [self.about.get(name) for name in ("video_info", "info")]
        codecs = [one["video.codec"] for one in found if isinstance(one, dict) and one.get("video.codec")]
        return str(codecs[0]) if codecs else ""
