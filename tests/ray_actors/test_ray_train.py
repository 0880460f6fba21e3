"""The example of Ray Train runs. Two workers that stop and resume read each frame once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="ray is not installed: pip install 'rollout-data[ray]'")
pytest.importorskip("ray.train", reason="ray.train does not import")

from tests.examples.running import run


def test_two_workers_share_a_pass_and_resume_from_their_checkpoint(tmp_path: Path) -> None:
    text = run(tmp_path, "ray_train.py")
    actual = re.search(
        r"(\d+) frames recorded; workers read \[(\d+), (\d+)\], 320 before the break", text
    )
    assert actual is not None and "each frame once: True" in text
    num_frames, *shares = map(int, actual.groups())
    assert sum(shares) == num_frames and min(shares) > 0.4 * num_frames
