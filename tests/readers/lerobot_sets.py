"""LeRobot's own dataset class reads our sets under its default configuration; shared by the tests of its releases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

import rollout_data
from rollout_data import RolloutWriter
from tests.readers.recordings import CAMERAS, LENGTHS, observed

FPS = 10
#: Operators that torchvision declares for; its releases for CUDA do not load them beside torch for CPUs.
_OPERATORS = ("nms", "qnms")


def declare_operators() -> Any:
    """Declare operators of torchvision that reading does not call; return what has to be kept."""
    library = torch.library.Library("torchvision", "DEF")
    for name in _OPERATORS:
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


def record(folder: Path) -> Any:
    """Record three episodes of two cameras under one name; the last one is open and tells no success."""
    about = {"frame_rate_hz": FPS}
    with RolloutWriter(folder, 1, durable=False, metadata=about) as writer:
        for episode, length in enumerate(LENGTHS):
            for frame in range(length):
                is_end = frame == length - 1 and episode < 2
                notes = {"episode": [{"task": f"lift {episode}", "success": episode == 0}]} if is_end else {}
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
    rollout_data.convert(record(folder / "own"), folder / "set", "lerobot", version=version, progress=False)
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
    chunks = kind("tests/set", root=folder / "set", delta_timestamps={"action": [0, 1 / FPS, 2 / FPS]})
    assert chunks[0]["action"][:, 0].tolist() == [0, 1, 2]
    one = kind("tests/set", root=folder / "set", episodes=[1])
    assert len(one) == LENGTHS[1]


def check_statistics(kind: Any, folder: Path, names: tuple[str, ...]) -> None:
    """Compare the statistics that LeRobot's class gives with those of the frames; call `check_set` before."""
    found = kind("tests/set", root=folder / "set").meta.stats
    frames = [10 * episode + frame for episode, length in enumerate(LENGTHS) for frame in range(length)]
    expected = {"mean": np.mean(frames), "std": np.std(frames), "min": min(frames), "max": max(frames)}
    expected |= {"q01": np.quantile(frames, 0.01), "q99": np.quantile(frames, 0.99)}
    for name in names:
        np.testing.assert_allclose(found["action"][name], [expected[name]] * 2, rtol=1e-6)
    assert {"timestamp", "frame_index", "episode_index", "index", "task_index", "next.done"} <= found.keys()
