"""Keys of a sample: leaves, by name or as tuples, and inner mappings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rollout_data.trajectories.trajectory_replay_buffer import TrajectoryReplayBuffer
from storage.errors import UsageError
from tests.trajectory_replay.recorded import equal, trajectory

KINDS = ["memory", "h5", "pt"]


def filled(kind: str, folder: Path) -> TrajectoryReplayBuffer:
    saving = (
        {}
        if kind == "memory"
        else {"auto_save": True, "auto_save_path": folder, "trajectory_format": kind}
    )
    buffer = TrajectoryReplayBuffer(seed=3, cache_size=1, **saving)
    buffer.add(trajectory(0))
    buffer.add(trajectory(1, without=["half"]))
    buffer.flush()
    return buffer


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "keys",
    [
        ["curr_obs", "rewards"],
        ("curr_obs", "rewards"),
        [("curr_obs",), ("rewards",)],
        [("curr_obs", "states"), "curr_obs", "rewards"],
        {"curr_obs", "rewards"},
    ],
)
def test_keys_may_be_tuples_and_inner_mappings(tmp_path: Path, kind: str, keys: Any) -> None:
    with filled(kind, tmp_path) as buffer:
        state = buffer.rng.get_state()
        expected = buffer.sample(40, keys=["curr_obs/images", "curr_obs/states", "rewards"])
        buffer.rng.set_state(state)
        assert equal(buffer.sample(40, keys=keys), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_invalid_keys_raise(tmp_path: Path, kind: str) -> None:
    with filled(kind, tmp_path) as buffer:
        state = buffer.rng.get_state()
        for keys in ("rewards", 3):
            with pytest.raises(
                UsageError,
                match=rf"^TrajectoryReplayBuffer.sample: keys must be a list of names, got {keys!r}",
            ):
                buffer.sample(40, keys=keys)
        for key in ((), ("curr_obs", 1), 3, None):
            with pytest.raises(UsageError, match=r"^TrajectoryReplayBuffer\.sample: "):
                buffer.sample(40, keys=["rewards", key])
        for key, name in (
            ("curr", "curr"),
            (("curr_obs", "state"), "curr_obs/state"),
            ("rewards/x", "rewards/x"),
        ):
            with pytest.raises(
                KeyError,
                match=f"TrajectoryReplayBuffer.sample: trajectory .* has no field '{name}'. The fields are ",
            ):
                buffer.sample(40, keys=[key])
        assert torch.equal(buffer.rng.get_state(), state)
