"""kill -9 at 200 random instants, while checkpoints are saved."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoint import crash
from tests.checkpoint.crash_nursery import kill_one, nursery


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_savers_killed_at_200_random_instants_leave_whole_checkpoints(tmp_path: Path) -> None:
    with nursery(crash.WORK) as process:
        steps = []
        for seed in range(1000, 1200):
            kill_one(process, tmp_path / str(seed), seed)
            steps.append(crash.check_what_is_left(tmp_path / str(seed)))
    print(f"killed {len(steps)} savers: {sum(step > 0 for step in steps)} had written, at most {max(steps)} times")
