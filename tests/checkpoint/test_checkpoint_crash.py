"""kill -9 during checkpointing: the previous state or the new one loads (200 times in the soak tests)."""

from __future__ import annotations

from pathlib import Path

from tests.checkpoint.crash import WORK, check_what_is_left
from tests.killed import kill_one_at, workers


def test_killed_savers_leave_the_previous_checkpoint_or_the_new_one(tmp_path: Path) -> None:
    with workers(WORK) as process:
        steps = []
        for seed in range(8):
            kill_one_at(process, tmp_path / str(seed), seed, tmp_path / str(seed) / ".begun")
            steps.append(check_what_is_left(tmp_path / str(seed)))
    assert any(steps)
