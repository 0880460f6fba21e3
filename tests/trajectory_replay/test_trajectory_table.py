"""The numbers that are kept between windows are those that one would count anew."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rollout_data.trajectories.buffer import TrajectoryReplayBuffer
from rollout_data.trajectories.cache import TrajectoryCache
from rollout_data.trajectories.index import Entry
from rollout_data.trajectories.live import CACHED, ELSEWHERE, MAPPED, LiveTrajectories
from storage.errors import BufferEmptyError
from tests.trajectory_replay.recorded import drawn, trajectory


class KeptNumbers(RuleBasedStateMachine):
    """Do anything that moves rows; after each step the window is the one that a loop over all entries gives."""

    folders: Path

    @initialize(
        window=st.integers(0, 4),
        limit=st.sampled_from([None, 1, 3]),
        cache_size=st.integers(0, 3),
        saves=st.booleans(),
        file_format=st.sampled_from(["h5", "pt"]),
    )
    def begin(self, window: int, limit: int | None, cache_size: int, saves: bool, file_format: str) -> None:
        self.number, self.folder = 0, Path(tempfile.mkdtemp(dir=self.folders))
        saving = {"auto_save": True, "auto_save_path": self.folder / "auto"} if saves else {}
        self.buffer = TrajectoryReplayBuffer(
            cache_size=cache_size,
            sample_window_size=window,
            max_trajectories=limit,
            trajectory_format=file_format,
            **saving,
        )

    @rule(num_steps=st.integers(1, 4), without=st.sampled_from([[], ["half"]]))
    def add(self, num_steps: int, without: list[str]) -> None:
        whole = {
            name: leaf for name, leaf in trajectory(self.number, num_steps, 2, without).items() if name != "curr_obs"
        }
        self.buffer.add(whole, weights_version=self.number)
        self.number += 1

    @rule()
    def flush(self) -> None:
        self.buffer.flush()

    @precondition(lambda self: len(self.buffer))
    @rule()
    def sample(self) -> None:
        sample = self.buffer.sample(20, keys=["actions", "rewards"])
        assert torch.equal(sample["actions"][:, 0].float(), sample["rewards"][:, 0])

    @rule()
    def clear_cache(self) -> None:
        self.buffer.clear_cache()

    @rule()
    def save_and_load(self) -> None:
        self.buffer.save_checkpoint(self.folder / "checkpoint")
        self.buffer.load_checkpoint(self.folder / "checkpoint")

    @rule()
    def clear(self) -> None:
        self.buffer.clear()

    @invariant()
    def the_window_is_the_one_made_anew(self) -> None:
        if hasattr(self, "buffer"):
            for version in (None, self.number - 2):
                check_window(self.buffer, version)

    def teardown(self) -> None:
        if hasattr(self, "buffer"):
            self.buffer.close()


def check_window(buffer: TrajectoryReplayBuffer, min_weights_version: int | None) -> None:
    """Compare what is drawn from with a plain count."""
    with buffer._lock:  # the thread that saves moves rows too
        live, cache = buffer._live, buffer._live.cache
        entries = list(live.entries.values())[-buffer.sample_window_size or None :]
        entries = [one for one in entries if min_weights_version is None or one.weights_version >= min_weights_version]
        if not entries:
            with pytest.raises(BufferEmptyError):
                live.window(min_weights_version)
            return
        window = live.window(min_weights_version)
        assert window.entries == entries
        places = [place_of(one, cache) for one in entries]
        assert window.source.tolist() == [source for source, _ in places]
        starts = np.cumsum([0, *(one.num_samples for one in entries)])
        assert (window.shift + starts[:-1]).tolist() == [first for _, first in places]
        assert window.num_samples == starts[-1]
        assert window.layouts == list(dict.fromkeys(one.layout for one in entries))
        assert [window.layouts[number] for number in window.layout_number] == [one.layout for one in entries]


def place_of(entry: Entry, cache: TrajectoryCache | None) -> tuple[int, int]:
    if cache is not None and entry.trajectory_id in cache:
        return CACHED, cache.find(entry.trajectory_id)[0].first
    return (ELSEWHERE if entry.block is None else MAPPED), 0


def test_the_kept_numbers_are_those_counted_anew(tmp_path: Path) -> None:
    KeptNumbers.folders = tmp_path
    case = KeptNumbers.TestCase()
    case.settings = settings(max_examples=25, stateful_step_count=25)
    case.runTest()


def test_adding_looks_at_what_is_new_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window after each addition costs the same Python however many trajectories there are."""
    buffer, moved, looked_at = TrajectoryReplayBuffer(sample_window_size=200), LiveTrajectories.moved, []

    def noted(live: LiveTrajectories, trajectory_id: int) -> None:
        looked_at.append(trajectory_id)
        moved(live, trajectory_id)

    monkeypatch.setattr(LiveTrajectories, "moved", noted)
    buffer.clear()
    for number in range(400):
        buffer.add({"rewards": torch.zeros(1, 1, 1)})
        buffer.sample(1)
        assert set(looked_at) <= {number, number - 200} and len(looked_at) <= 3  # the oldest one goes
        looked_at.clear()


def test_layouts_that_are_equal_count_once() -> None:
    buffer = TrajectoryReplayBuffer(sample_window_size=0)
    for number in range(70):  # more than the table begins with
        buffer.add(trajectory(number, 1, 1, ["half"] if number % 2 else []))
    window = buffer._live.window()
    assert len(window.layouts) == 2
    assert "half" in window.layouts[0].names and "half" not in window.names
    assert window.layout_number.tolist() == [0, 1] * 35
    assert set((buffer.sample(3000)["rewards"].flatten() // 10_000).int().tolist()) == set(range(70))


def test_what_is_drawn_is_whole_while_the_cache_gives_up_its_oldest(tmp_path: Path) -> None:
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path, cache_size=2) as buffer:
        for number in range(12):
            buffer.add(trajectory(number, 1 + number % 3, 2))
            assert drawn(buffer, 60).max() // 10_000 <= number
