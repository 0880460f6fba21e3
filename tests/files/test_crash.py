"""kill -9 at random instants: every published block is complete, and the next writer reports lost
frames.
"""

from __future__ import annotations

from tests.files.crash import WORK, interrupt_one, kill_one
from tests.killed import workers

#: `make soak` kills 200.
NUM_KILLS = 12


def test_a_killed_recorder_leaves_whole_blocks_and_loses_one_at_most(tmp_path):
    with workers(WORK) as process:
        outcomes = [kill_one(process, tmp_path / f"{seed}", seed) for seed in range(NUM_KILLS)]
    assert any(item["blocks"] for item in outcomes) and any(item["lost"] for item in outcomes)


def test_ctrl_c_at_any_instant_publishes_all_that_was_added(tmp_path):
    with workers(WORK) as process:
        published = [
            interrupt_one(process, tmp_path / f"{seed}", seed) for seed in range(50, 50 + NUM_KILLS)
        ]
    assert any(published)
