"""kill -9 at 200 random instants (see tests/files/test_crash.py)."""

from __future__ import annotations

import pytest

from tests.files.crash import WORK, kill_one
from tests.killed import workers


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_recorders_killed_at_200_random_instants_leave_whole_blocks(tmp_path):
    with workers(WORK) as process:
        outcomes = [kill_one(process, tmp_path / f"{seed}", seed) for seed in range(1000, 1200)]
    totals = {name: sum(item[name] for item in outcomes) for name in outcomes[0]}
    print(f"killed {len(outcomes)} recorders: {totals}")
