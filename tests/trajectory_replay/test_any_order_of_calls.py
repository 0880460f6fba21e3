"""After any calls in any order, exactly the steps of the sample window are drawn, in memory and on
disk.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from rollout_data.trajectories.trajectory_replay_buffer import TrajectoryReplayBuffer
from storage.errors import BufferEmptyError
from tests.trajectory_replay.recorded import code, drawn, trajectory


class AnyOrder(RuleBasedStateMachine):
    """Make any calls that move rows.

    After each call, compare with a list of the stored trajectories.
    """

    folders: Path

    @initialize(
        window=st.integers(0, 4),
        limit=st.sampled_from([None, 1, 3]),
        cache_size=st.integers(0, 3),
        saves=st.booleans(),
        file_format=st.sampled_from(["h5", "pt"]),
    )
    def begin(
        self, window: int, limit: int | None, cache_size: int, saves: bool, file_format: str
    ) -> None:
        self.folder, self.window = Path(tempfile.mkdtemp(dir=self.folders)), window
        self.number, self.live = 0, {}
        limits = [item for item in (limit, 0 if saves else window) if item]
        self.capacity = min(limits, default=None)
        saving = {"auto_save": True, "auto_save_path": self.folder / "auto"} if saves else {}
        self.is_saving = saves
        self.buffer = TrajectoryReplayBuffer(
            cache_size=cache_size,
            sample_window_size=window,
            max_trajectories=limit,
            trajectory_format=file_format,
            **saving,
        )

    @rule(num_steps=st.integers(1, 4), without=st.sampled_from([[], ["half"]]))
    def add(self, num_steps: int, without: list[str]) -> None:
        whole = trajectory(self.number, num_steps, 2, ["curr_obs", *without])
        assert self.buffer.add(whole, weights_version=self.number) == self.number
        self.live[self.number] = num_steps
        for item in [*self.live][: -self.capacity] if self.capacity else []:
            del self.live[item]
        self.number += 1

    @rule()
    def flush(self) -> None:
        self.buffer.flush()

    @rule()
    def clear_cache(self) -> None:
        self.buffer.clear_cache()
        if not self.is_saving:
            self.live = {}

    @rule()
    def save_and_load(self) -> None:
        self.buffer.save_checkpoint(self.folder / "checkpoint")
        self.buffer.load_checkpoint(self.folder / "checkpoint")

    @rule()
    def clear(self) -> None:
        self.buffer.clear()
        self.live = {}

    @invariant()
    def exactly_the_steps_of_the_window_are_drawn(self) -> None:
        if not hasattr(self, "buffer"):
            return
        assert self.buffer.trajectory_ids == [*self.live]
        assert self.buffer.total_samples == 2 * sum(self.live.values())
        for version in (None, self.number - 2):
            window = [
                item
                for item in [*self.live][-self.window or None :]
                if version is None or item >= version
            ]
            if not window:
                with pytest.raises(BufferEmptyError):
                    self.buffer.sample(1, min_weights_version=version)
                continue
            expected = torch.cat(
                [code(item, self.live[item], 2).flatten() for item in window]
            ).tolist()
            sample = self.buffer.sample(
                12 * len(expected), ["actions", "rewards"], min_weights_version=version
            )
            values = sample["actions"][:, 0].long()
            assert torch.equal(sample["rewards"][:, 0].long(), values)
            assert set(values.tolist()) <= set(expected) and len(set(values.tolist())) > 0.9 * len(
                expected
            )

    def teardown(self) -> None:
        if hasattr(self, "buffer"):
            self.buffer.close()


def test_any_order_of_calls_equals_the_model(tmp_path: Path) -> None:
    AnyOrder.folders = tmp_path
    case = AnyOrder.TestCase()
    case.settings = settings(max_examples=10, stateful_step_count=25)
    case.runTest()


def test_many_trajectories_of_two_kinds_are_drawn() -> None:
    buffer = TrajectoryReplayBuffer(sample_window_size=0)
    for number in range(70):
        buffer.add(trajectory(number, 1, 1, ["half"] if number % 2 else []))
    sample = buffer.sample(3000)
    assert "half" not in sample and set(
        (sample["rewards"].flatten() // 10_000).int().tolist()
    ) == set(range(70))


def test_samples_are_complete_while_the_cache_drops_its_oldest_trajectories(tmp_path: Path) -> None:
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path, cache_size=2) as buffer:
        for number in range(12):
            buffer.add(trajectory(number, 1 + number % 3, 2))
            assert drawn(buffer, 60).max() // 10_000 <= number
