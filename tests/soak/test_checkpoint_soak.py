"""kill -9 at 200 random instants, while checkpoints and trajectories are saved."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoint import crash
from tests.killed import kill_one, workers
from tests.trajectory_replay import crash as trajectory_crash


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_savers_killed_at_200_random_instants_leave_whole_checkpoints(tmp_path: Path) -> None:
    with workers(crash.WORK) as process:
        steps = []
        for seed in range(1000, 1200):
            kill_one(process, tmp_path / str(seed), seed)
            steps.append(crash.check_what_is_left(tmp_path / str(seed)))
    print(
        f"killed {len(steps)} savers: {sum(step > 0 for step in steps)} had written, at most {max(steps)} times"
    )


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_collectors_killed_at_200_random_instants_leave_folders_that_load(tmp_path: Path) -> None:
    with workers(trajectory_crash.WORK) as process:
        held = []
        for seed in range(1000, 1200):
            kill_one(process, tmp_path / str(seed), seed, longest_s=0.4)
            held.append(trajectory_crash.check_what_is_left(tmp_path / str(seed)))
    counts = [sum(number > 0 for number in column) for column in zip(*held, strict=True)]
    print(
        f"killed {len(held)} collectors: {counts[0]} folders and {counts[1]} checkpoints held trajectories"
    )
