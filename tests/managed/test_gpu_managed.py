"""On CUDA the buffers equal those on the CPU, with the same law of draws."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from storage import (
    AdvancedReplayBuffer,
    BufferManager,
    EpisodeReplayBuffer,
    NaiveReplayBuffer,
    PrioritizedWindows,
)
from tests.managed.naive_model import PriorityModel, item, number_of

pytestmark = pytest.mark.gpu


def test_priorities_and_limits_on_the_gpu_equal_the_model(tmp_path: Path) -> None:
    buffer = AdvancedReplayBuffer(
        300, device="cuda", generator=0, max_use=30, max_staleness=50, anneal_step=0
    )
    model = PriorityModel(300, 30, 50)
    for iteration in range(20):
        numbers = torch.arange(40 * iteration, 40 * iteration + 40)
        buffer.extend_tensors({"x": numbers.float().unsqueeze(1)}, collect_iter=iteration)
        for number in numbers.tolist():
            model.push(number, None, iteration)
        if iteration < 2:
            continue
        batch, weights, ids = buffer.sample_tensors(64, iteration)
        assert ids.is_cuda and torch.equal(batch["x"][:, 0].long(), ids)
        for row_id, weight in zip(ids.tolist(), weights.tolist(), strict=True):
            assert weight == pytest.approx(model.importance(row_id, 0.4), rel=1e-5)
        model.drawn(ids.tolist())
        priorities = (ids % 7).float() + 0.1
        assert buffer.update_priorities(ids, priorities) == model.update(
            ids.tolist(), priorities.double().tolist()
        )
        assert buffer.check_valid() == (True, "") and buffer.count() == len(model.rows)
    buffer.save(tmp_path / "buffer")
    loaded = AdvancedReplayBuffer.load(tmp_path / "buffer")
    assert all(
        torch.equal(buffer.sample_tensors(32)[2], loaded.sample_tensors(32)[2]) for _ in range(20)
    )
    here = AdvancedReplayBuffer.load(tmp_path / "buffer", device="cpu")
    assert here.check_valid() == (True, "") and here.sample_tensors(8)[2].device.type == "cpu"


def test_items_episodes_and_windows_are_stored_on_the_gpu() -> None:
    for kind in (NaiveReplayBuffer, AdvancedReplayBuffer):
        buffer = kind(8, device="cuda", output_device="cpu", generator=0)
        buffer.push([item(number) for number in range(13)])
        assert sorted(number_of(x) for x in buffer.sample(8)) == list(range(5, 13))
    episodes = EpisodeReplayBuffer(3, device="cuda", generator=0)
    episodes.push(
        [[item(number) for number in range(start, start + 300)] for start in (0, 1000, 2000, 3000)]
    )
    assert episodes.sample_windows(5, 20)["reward"].diff(dim=1).eq(1).all()
    assert len(episodes.sample(2)[0]) == 300
    windows = PrioritizedWindows(50, 4, device="cuda", generator=0)
    for step in range(90):
        row = torch.full((1, 3, 1), float(step))
        windows.extend({"x": row, "done": (row + torch.arange(3).view(1, 3, 1)) % 11 == 0})
    batch, _, ids = windows.sample(40)
    assert batch["x"].is_cuda and batch["x"].diff(dim=1).eq(1).all()
    assert windows.update_priorities(ids, torch.rand(40)) == 40 and windows.check_valid() == (
        True,
        "",
    )


def test_buffers_of_a_manager_may_have_different_devices() -> None:
    cfg = {
        name: {"replay_buffer_size": 20, "device": name, "generator": 0} for name in ("cuda", "cpu")
    }
    manager = BufferManager(
        {"buffer_name": ["cuda", "cpu"], "sample_ratio": {"cuda": 0.5, "cpu": 0.5}, **cfg}
    )
    manager.push_data([item(number) for number in range(20)], ["cuda", "cpu"])
    actual = manager.sample(20)
    assert sum(x["reward"].is_cuda for x in actual) == 10
