"""`VideoRange`: the part of a video file that belongs to one episode."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Keys of LeRobot's description of a camera that contain the properties of the video file.
_DETAILS = ("video_info", "info")


@dataclass(frozen=True)
class VideoRange:
    """The frames of a video file that belong to one episode, and properties of the file.

    Attributes:
        path: The video file.
        start_s: Time of the episode's first frame in the file, in seconds.
        num_frames: Number of frames of the episode.
        rate_hz: Frames per second.
        about: LeRobot's description of the camera, from the metadata of the dataset.
        held: Actual properties of the file, with the keys of the description: "video.codec",
            "video.pix_fmt"; empty if PyAV is not installed.
    """

    path: Path
    start_s: float
    num_frames: int
    rate_hz: float
    about: Mapping[str, Any]
    held: Mapping[str, str]

    @property
    def codec(self) -> str:
        """Name of the video codec, from the file or else from the description; "" if unknown."""
        stated = [self.about[name] for name in _DETAILS if isinstance(self.about.get(name), dict)]
        codecs = [
            statement["video.codec"]
            for statement in (self.held, *stated)
            if statement.get("video.codec")
        ]
        return str(codecs[0]) if codecs else ""

    @property
    def true_about(self) -> dict[str, Any]:
        """Description of the camera, with the actual properties of the video file."""
        about = dict(self.about)
        known = {**self.held, "video.fps": self.rate_hz}
        for name in _DETAILS:
            if isinstance(about.get(name), dict):
                about[name] = {key: known.get(key, value) for key, value in about[name].items()}
        return about

    def false_statements(self) -> list[str]:
        """Compare the description of a camera with the video file; return a text per difference.

        A text names the property, the actual value and the value in the description.
        """
        true_about = self.true_about
        statements = []
        for name in _DETAILS:
            details = self.about.get(name)
            if not isinstance(details, dict):
                continue
            for key, described in details.items():
                actual = true_about[name][key]
                if actual != described:
                    statements.append(f"{key} {actual!r} instead of {described!r}")
        return statements
