"""LeRobot's own dataset class reads our sets with default settings. The tests of all releases share this file."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

import rollout_data
from rollout_data import RolloutWriter
from tests.readers.recordings import CAMERAS, LENGTHS, observed, record_with_gaps

FPS = 10
#: Operators that torchvision declares for; its releases for CUDA do not load them beside torch for
#: CPUs.
_OPERATORS = ("nms", "qnms")


def declare_operators() -> Any:
    """Declare operators of torchvision that reading does not call. Keep the returned object."""
    library = torch.library.Library("torchvision", "DEF")
    for name in _OPERATORS:
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


def record(folder: Path) -> Any:
    """Record three episodes of two cameras under one name. The last episode is open, without success."""
    about = {"frame_rate_hz": FPS}
    with RolloutWriter(folder, 1, durable=False, metadata=about) as writer:
        for episode, length in enumerate(LENGTHS):
            for frame in range(length):
                is_end = frame == length - 1 and episode < 2
                notes = (
                    {"episode": [{"task": f"lift {episode}", "success": episode == 0}]}
                    if is_end
                    else {}
                )
                writer.add(
                    observation=observed(episode, frame),
                    action=np.full((1, 2), 10 * episode + frame, np.float32),
                    reward=np.full(1, 10 * episode + frame, np.float32),
                    grid=np.full((1, 2, 3), episode + frame, np.float32),
                    terminated=[is_end],
                    **notes,
                )
    return rollout_data.open(folder)


def check_set(kind: Any, folder: Path, version: str) -> None:
    """Convert a recording, open it by LeRobot's class, and compare every frame."""
    rollout_data.convert(
        record(folder / "own"), folder / "set", "lerobot", version=version, progress=False
    )
    read = kind("tests/set", root=folder / "set")
    assert (read.num_episodes, len(read), read.fps) == (len(LENGTHS), sum(LENGTHS), FPS)
    rows = [(episode, frame) for episode, length in enumerate(LENGTHS) for frame in range(length)]
    for place, (episode, frame) in enumerate(rows):
        item = read[place]
        is_last = frame == LENGTHS[episode] - 1
        assert item["observation.state"].tolist() == [100 * episode + frame] * 3
        assert item["action"].tolist() == [10 * episode + frame] * 2
        assert item["grid"].tolist() == [[episode + frame] * 3] * 2
        assert item["next.done"].item() == (is_last and episode < 2)
        assert item["next.success"].item() == (is_last and episode == 0)
        assert item["task"] == (f"lift {episode}" if episode < 2 else "")
        for camera, first in CAMERAS.items():
            pixels = (item[f"observation.images.{camera}"] * 255).round()
            assert pixels.shape == (3, 40, 48)
            assert (pixels == first + 20 * episode + frame).all()
    chunks = kind(
        "tests/set", root=folder / "set", delta_timestamps={"action": [0, 1 / FPS, 2 / FPS]}
    )
    assert chunks[0]["action"][:, 0].tolist() == [0, 1, 2]
    entry = kind("tests/set", root=folder / "set", episodes=[1])
    assert len(entry) == LENGTHS[1]


def check_statistics(kind: Any, folder: Path, names: tuple[str, ...]) -> None:
    """Compare the statistics of LeRobot's class with those of the frames, after `check_set`."""
    actual = kind("tests/set", root=folder / "set").meta.stats
    frames = [
        10 * episode + frame for episode, length in enumerate(LENGTHS) for frame in range(length)
    ]
    expected = {
        "mean": np.mean(frames),
        "std": np.std(frames),
        "min": min(frames),
        "max": max(frames),
    }
    expected |= {"q01": np.quantile(frames, 0.01), "q99": np.quantile(frames, 0.99)}
    for name in names:
        np.testing.assert_allclose(actual["action"][name], [expected[name]] * 2, rtol=1e-6)
    assert {
        "timestamp",
        "frame_index",
        "episode_index",
        "index",
        "task_index",
        "next.done",
    } <= actual.keys()


def check_gaps(kind: Any, folder: Path, version: str) -> None:
    """Read a set with an episode that lacks a float and a flag, and compare every frame with the source."""
    source = record_with_gaps(folder / "gaps.hdf5")
    conversion = rollout_data.convert(
        source, folder / "gaps", "lerobot", version=version, fps=FPS, progress=False
    )
    read = kind("tests/gaps", root=folder / "gaps")
    place = 0
    for number, episode in enumerate(source):
        for frame in range(episode.length):
            item = read[place]
            place += 1
            assert "count" not in item
            assert item["observation.low"].tolist() == episode["observation/low"][frame].tolist()
            if number == 1:
                assert torch.isnan(item["observation.touch"]).all()
                assert not item["observation.is_held"].item()
            else:
                assert (
                    item["observation.touch"].tolist()
                    == episode["observation/touch"][frame].tolist()
                )
                assert item["observation.is_held"].item() == episode["observation/is_held"][frame]
    assert place == len(read)
    lacking = [
        change
        for change, ids in conversion.changes.items()
        if "in episodes without it" in change and ids == [source.ids[1]]
    ]
    assert len(lacking) == 2
    known = [episode["observation/touch"] for number, episode in enumerate(source) if number != 1]
    # The class for version 2.1 averages episodes, also those of which it knows nothing
    if version == "v3.0":
        np.testing.assert_allclose(
            read.meta.stats["observation.touch"]["mean"], np.concatenate(known).mean(0)
        )
    np.testing.assert_allclose(
        read.meta.stats["observation.low"]["mean"],
        np.concatenate([entry["observation/low"] for entry in source]).mean(0),
    )


def moving(episode: int, length: int) -> dict[str, np.ndarray]:
    """Return smooth pictures of two cameras, `[length, 48, 64, 3]` uint8, which differ from frame to frame."""
    y, x = np.mgrid[:48, :64]
    result = {}
    for place, camera in enumerate(CAMERAS):
        frames = [
            np.stack([2 * y + 10 * frame, x + 60 * place, y + 40 * episode], -1)
            for frame in range(length)
        ]
        result[camera] = np.array(frames).clip(0, 255).astype(np.uint8)
    return result


def decode(
    path: Any, times_s: list[float], tolerance_s: float, backend: Any = None
) -> torch.Tensor:
    """Decode frames by their times with PyAV: torchvision no longer has a decoder."""
    av = importlib.import_module("av")
    with av.open(str(path)) as container:
        frames = {
            frame.time: frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)
        }
    result = []
    for time_s in times_s:
        nearest = min(frames, key=lambda item: abs(item - time_s))
        assert abs(nearest - time_s) < tolerance_s, (nearest, time_s)
        result.append(torch.from_numpy(frames[nearest]).permute(2, 0, 1).float() / 255)
    return torch.stack(result)


def check_video(kind: Any, folder: Path, version: str) -> None:
    """Compare the pixels of videos of all episodes, and of all but one, with those of the source."""
    lengths = (9, 4, 7)
    with RolloutWriter(folder / "own", 1, durable=False, metadata={"frame_rate_hz": FPS}) as writer:
        for episode, length in enumerate(lengths):
            images = moving(episode, length)
            for frame in range(length):
                seen = {camera: rows[frame][None] for camera, rows in images.items()}
                values = np.full((1, 2), frame, np.float32)
                writer.add(
                    observation={"images": seen}, action=values, terminated=[frame == length - 1]
                )
    own = rollout_data.open(folder / "own")
    options = {"version": version, "progress": False}
    rollout_data.convert(own, folder / "all", "lerobot", video="h264", **options)
    copied = rollout_data.open(folder / "all")
    rollout_data.convert(copied.select(["0", "2"]), folder / "some", "lerobot", **options)
    for name, episodes in (("all", (0, 1, 2)), ("some", (0, 2))):
        read = kind("tests/video", root=folder / name)
        expected = [
            (moving(episode, lengths[episode]), frame)
            for episode in episodes
            for frame in range(lengths[episode])
        ]
        assert len(read) == len(expected)
        for place, (images, frame) in enumerate(expected):
            item = read[place]
            for camera, rows in images.items():
                pixels = item[f"observation.images.{camera}"].permute(1, 2, 0).numpy() * 255
                difference = np.abs(pixels - rows[frame])
                assert difference.mean() < 2.5, (name, place, camera)
