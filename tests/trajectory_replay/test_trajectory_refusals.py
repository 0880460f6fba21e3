"""`TrajectoryReplayBuffer`: what it refuses, and with which words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollout_data.trajectory_replay_buffer import TrajectoryReplayBuffer
from storage.errors import ClosedError, SchemaError, UsageError
from tests.trajectory_replay.recorded import trajectory


def filled(number: int = 5, **options: Any) -> TrajectoryReplayBuffer:
    buffer = TrajectoryReplayBuffer(**options)
    for one in range(number):
        buffer.add(trajectory(one, 2 + one % 3, 2), weights_version=one)
    return buffer


def test_a_closed_buffer_says_so_whatever_it_is_asked(tmp_path: Path) -> None:
    buffer = filled()
    buffer.close()
    buffer.close()
    for ask in (lambda: buffer.get(0), lambda: buffer.about(0), lambda: buffer.load_checkpoint(tmp_path / "none")):
        with pytest.raises(ClosedError, match="expected an open buffer"):
            ask()


@pytest.mark.parametrize(
    ("options", "text"),
    [({"max_trajectories": 0}, "max_trajectories >= 1, got 0"), ({"auto_save": True, "auto_save_path": None}, "none")],
)
def test_limits_and_places_that_cannot_be_are_refused(options: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        TrajectoryReplayBuffer(**options)


def test_what_is_no_trajectory_is_refused() -> None:
    for what in (5, [1, 2], None):
        with pytest.raises(SchemaError, match="leaves of a trajectory: expected a nested mapping or a dataclass"):
            filled(0).add(what)
