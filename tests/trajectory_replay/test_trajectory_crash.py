"""kill -9 during asynchronous saving: the previous state or the new one loads (200 times in the soak tests)."""

from __future__ import annotations

from pathlib import Path

from tests.nursery import kill_one, nursery
from tests.trajectory_replay.crash import WORK, check_what_is_left


def test_killed_collectors_leave_folders_that_load(tmp_path: Path) -> None:
    with nursery(WORK) as process:
        held = []
        for seed in range(10):
            kill_one(process, tmp_path / str(seed), seed, longest_s=0.4)
            held.append(check_what_is_left(tmp_path / str(seed)))
    assert any(auto for auto, _ in held)
