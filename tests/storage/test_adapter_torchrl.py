"""The adapters for torchrl: `TensorDict`s are added to our buffers and returned by them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from storage import (
    AdvancedReplayBuffer,
    DictBuffer,
    MissingFieldError,
    PrioritizedWindows,
    SchemaError,
    UsageError,
)
from storage.adapters.torchrl import PrioritizedReplayBuffer, ReplayBuffer
from tests.test_compiled_learners import assert_one_graph

pytest.importorskip("tensordict", exc_type=ImportError)

from tensordict import TensorDict

NUM_ENVS, NUM_STEPS = 3, 10


def collected(first: int, end_at: int | None = None, device: str = "cpu") -> TensorDict:
    """Return steps `[NUM_ENVS, NUM_STEPS]` as a collector yields them.

    Observations are 100 * env + step. With `end_at`, all trajectories terminate at that step, and
    their last next observation is 0.5 higher.
    """
    number = torch.arange(first, first + NUM_STEPS) + 100 * torch.arange(NUM_ENVS).unsqueeze(1)
    number = number.float().unsqueeze(2)
    terminated = torch.zeros_like(number, dtype=torch.bool)
    following = number + 1
    if end_at is not None:
        terminated[:, end_at] = True
        following[:, end_at] += 0.5
    never = torch.zeros_like(terminated)
    root = {"observation": number, "action": -number, "done": never, "terminated": never}
    later = {"observation": following, "reward": number, "done": terminated.clone()}
    later["terminated"] = terminated
    steps = TensorDict({**root, "next": later}, batch_size=[NUM_ENVS, NUM_STEPS])
    return steps.to(device)


def pairs(device: str = "cpu", capacity: int = 100, **options: Any) -> ReplayBuffer:
    buffer = DictBuffer(
        capacity * NUM_ENVS,
        device,
        num_envs=NUM_ENVS,
        end_key=["terminated", "truncated"],
        generator=0,
    )
    return ReplayBuffer(buffer, **options)


def transitions(batch: TensorDict) -> set[tuple[float, ...]]:
    """Return (observation, next observation, terminated, truncated) of each transition."""
    following = batch["next"]
    assert torch.equal(batch["action"], -batch["observation"])
    columns = [batch["observation"], following["observation"]]
    columns += [following["terminated"].float(), following["truncated"].float()]
    return set(map(tuple, torch.cat(columns, 1).tolist()))


@pytest.mark.parametrize("is_one_step_a_call", [False, True])
def test_steps_of_collectors_are_sampled_as_transitions(is_one_step_a_call: bool) -> None:
    buffer = pairs(batch_size=400)
    for steps in (collected(0, end_at=4), collected(10)):
        parts = steps.unbind(1) if is_one_step_a_call else [steps]
        for part in parts:
            buffer.extend(part)
    batch = buffer.sample()
    assert batch.batch_size == torch.Size([400])
    assert torch.equal(batch["next", "reward"], batch["observation"])
    expected = set()
    for env in range(NUM_ENVS):
        for step in range(18):
            number = 100.0 * env + step
            is_end = step == 4
            expected.add((number, number + 1 + 0.5 * is_end, float(is_end), 0.0))
    assert transitions(batch) == expected
    assert len(buffer) == NUM_ENVS * 19


def test_a_reset_between_two_calls_truncates() -> None:
    buffer = pairs()
    buffer.extend(collected(0))
    buffer.extend(collected(50))
    actual = transitions(buffer.sample(400))
    expected = {(100.0 * env + 9, 100.0 * env + 10, 0.0, 1.0) for env in range(NUM_ENVS)}
    assert {row for row in actual if row[3]} == expected


def test_observations_are_stored_once() -> None:
    buffer = pairs()
    buffer.extend(collected(0))
    assert set(buffer.buffer.storage) == {
        "observation", "action", "reward", "done", "terminated", "truncated",
    }  # fmt: skip


def test_options_equal_those_of_sample_transitions() -> None:
    buffer = pairs(num_steps=3, gamma=0.5)
    buffer.extend(collected(0, end_at=4))
    batch = buffer.sample(200)
    first = batch["observation"] % 100
    full = first.flatten() < 2
    expected = first + (first + 1) / 2 + (first + 2) / 4
    reward = batch["next", "reward"] - 1.75 * (batch["observation"] - first)
    torch.testing.assert_close(reward[full], expected[full])
    assert torch.all(batch["discount"][full] == 0.125)


def test_a_single_environment_adds_steps_singly_or_together() -> None:
    for is_added in (False, True):
        buffer = ReplayBuffer(DictBuffer(50, end_key=["terminated", "truncated"], generator=0))
        steps = collected(0)[0]
        if is_added:
            for step in steps:
                buffer.add(step)
        else:
            buffer.extend(steps)
        assert transitions(buffer.sample(100)) == {(x, x + 1, 0, 0) for x in map(float, range(8))}


def test_rows_without_end_key_are_sampled_unchanged() -> None:
    buffer = ReplayBuffer(DictBuffer(50, generator=0), batch_size=20)
    rows = collected(0)[0]
    buffer.extend(rows)
    buffer.add(rows[0])
    assert len(buffer) == NUM_STEPS + 1
    batch = buffer.sample()
    assert set(batch.keys(True, True)) == set(rows.keys(True, True))
    assert torch.equal(batch["next", "observation"], batch["observation"] + 1)
    buffer.empty()
    assert len(buffer) == 0


def test_an_emptied_buffer_accepts_other_rows() -> None:
    buffer = pairs()
    buffer.extend(collected(0))
    buffer.empty()
    assert len(buffer) == 0
    buffer.extend(collected(30))
    assert min(row[0] for row in transitions(buffer.sample(200))) == 30


def test_rows_are_drawn_by_their_priorities() -> None:
    buffer = PrioritizedReplayBuffer(
        AdvancedReplayBuffer(50, alpha=1.0, min_sample_ratio=0, generator=0), 40
    )
    rows = collected(0)[0]
    ids = buffer.extend(rows)
    assert ids.tolist() == list(range(NUM_STEPS))
    assert buffer.add(rows[0]).tolist() == [NUM_STEPS]
    assert len(buffer) == NUM_STEPS + 1
    for _ in range(3):
        batch = buffer.sample()
        assert set(batch.keys()) == {*rows.keys(), "index", "priority_weight"}
        assert torch.equal(batch["observation"].flatten() % 10, batch["index"].float() % 10)
        batch["td_error"] = (batch["observation"] == 3).float() * 1e6
        buffer.update_tensordict_priority(batch)
    batch = buffer.sample()
    assert (batch["observation"] == 3).float().mean() > 0.9
    buffer.empty()
    assert len(buffer) == 0


def test_priorities_may_be_a_field_of_the_rows() -> None:
    buffer = PrioritizedReplayBuffer(
        AdvancedReplayBuffer(50, alpha=1.0, min_sample_ratio=0, generator=0)
    )
    rows = collected(0)[0].exclude("next")
    rows["td_error"] = (rows["observation"] == 7).float() * 1e6
    buffer.extend(rows)
    batch = buffer.sample(20)
    assert torch.all(batch["observation"] == 7)
    assert "td_error" not in batch


def test_windows_are_drawn_by_their_priorities() -> None:
    buffer = PrioritizedReplayBuffer(PrioritizedWindows(50, 4, alpha=1.0, generator=0), 40)
    steps = collected(0).exclude("next")
    assert buffer.extend(steps) is None
    assert len(buffer) == NUM_ENVS * (NUM_STEPS - 3)
    for _ in range(2):
        batch = buffer.sample()
        assert batch["observation"].shape == (40, 4, 1)
        assert torch.all(batch["observation"].diff(dim=1) == 1)
        buffer.update_priority(batch["index"], (batch["observation"][:, 0] == 103) * 1e6)
    assert (buffer.sample()["observation"][:, 0] == 103).float().mean() > 0.9


def test_a_compiled_learner_takes_batches_as_one_graph() -> None:
    buffer = pairs()
    buffer.extend(collected(0, end_at=4))
    assert_one_graph(buffer.sample(8) for _ in range(4))
    prioritized = PrioritizedReplayBuffer(AdvancedReplayBuffer(50, generator=0), 8)
    prioritized.extend(collected(0)[0])
    assert_one_graph(prioritized.sample() for _ in range(4))


def test_wrong_calls_give_clear_errors() -> None:
    with pytest.raises(UsageError, match="truncated"):
        ReplayBuffer(DictBuffer(50, end_key="done"))
    with pytest.raises(UsageError, match="DictBuffer"):
        ReplayBuffer(AdvancedReplayBuffer(50))
    with pytest.raises(UsageError, match="AdvancedReplayBuffer"):
        PrioritizedReplayBuffer(DictBuffer(50))
    buffer = pairs()
    with pytest.raises(SchemaError, match=r"\[2, 10\], expected \[3\] or \[3, T\]"):
        buffer.extend(collected(0)[:2])
    with pytest.raises(MissingFieldError, match="next"):
        buffer.extend(collected(0).exclude("next"))
    buffer.extend(collected(0))
    with pytest.raises(UsageError, match="batch_size"):
        buffer.sample()


@pytest.mark.gpu
@pytest.mark.usefixtures("any_device")
def test_no_call_waits_for_a_device() -> None:
    buffer = pairs("cuda", batch_size=50)
    prioritized = PrioritizedReplayBuffer(
        AdvancedReplayBuffer(100, device="cuda", min_sample_ratio=0, generator=0), batch_size=50
    )
    parts = [collected(first, 4, "cuda") for first in range(0, 50, 10)]

    def calls(steps: TensorDict) -> TensorDict:
        buffer.extend(steps)
        prioritized.extend(steps[0])
        batch = prioritized.sample()
        batch["td_error"] = torch.ones_like(batch["priority_weight"])
        prioritized.update_tensordict_priority(batch)
        return buffer.sample()

    for steps in parts[:2]:
        calls(steps)  # The first draws wait.
    torch.cuda.set_sync_debug_mode("error")
    try:
        batches = [calls(steps) for steps in parts[2:]]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for batch in batches:
        assert {row[1] - row[0] for row in transitions(batch)} <= {1.0, 1.5}
