"""The student learns from data that are recorded at the same time, and the example prints its
progress.
"""

from __future__ import annotations

import re
from pathlib import Path

from rollout_data import RolloutDataset
from tests.examples.running import run


def test_a_student_learns_while_a_collector_fills_the_folder(tmp_path: Path) -> None:
    text = run(tmp_path, "dagger.py", "--quick")
    upright = [int(steps) for steps in re.findall(r"round \d: (\d+) of 200 steps upright", text)]
    known = [
        int(number) for number in re.findall(r"([\d,]+) trajectories known", text.replace(",", ""))
    ]
    assert len(upright) == 5 and max(upright[2:]) >= 2 * upright[0]
    # The folder grew while the student learned.
    assert known == sorted(known) and known[-1] > known[0] > 0
    assert (
        RolloutDataset(tmp_path / "demo" / "dagger", 4, device="cpu").num_trajectories >= known[-1]
    )
