"""Rollout storages on a GPU: host tensors, returns and mini-batches are right although nothing waits.

On the pretended device events complete late, so that host memory that is read or written too early shows.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from storage import QueueRolloutStorage, RolloutStorage, SarsaRolloutStorage
from tests.pretend_cuda import PretendCuda
from tests.storage.rollouts import columns_of, make_storage, make_transition

pytestmark = pytest.mark.gpu

KINDS = (RolloutStorage, QueueRolloutStorage, SarsaRolloutStorage)
NUM_ENVS, NUM_STEPS = 5, 6


@pytest.fixture(autouse=True)
def late_device(cuda_device: PretendCuda | None) -> PretendCuda | None:
    """The pretended device, on which events complete after 40 operations; None on a real one."""
    if cuda_device is not None:
        cuda_device.lateness = 40
    return cuda_device


def transition(step: int, kind: type = RolloutStorage) -> Any:
    made = make_transition(step, NUM_ENVS, done=torch.arange(NUM_ENVS) % 3 == step % 3)
    if step % 2:
        made.time_outs = made.dones & (torch.arange(NUM_ENVS) % 2 == 0)
    made.rewards = made.rewards.double()
    made.values = made.values.squeeze(1)
    made.hidden_states = torch.full((2, NUM_ENVS, 3), float(step))
    if kind is SarsaRolloutStorage:
        later = make_transition(step + 1, NUM_ENVS)
        made.next_observations = later.observations
        made.next_critic_observations = later.critic_observations
    return made


def tensors_of(made: Any) -> list[torch.Tensor]:
    return [value for value in vars(made).values() if isinstance(value, torch.Tensor)]


def filled(device: str, kind: type = RolloutStorage, is_on_device: bool = False, changes: bool = False) -> Any:
    storage = make_storage(NUM_ENVS, NUM_STEPS, kind, device=device)
    for step in range(NUM_STEPS):
        made = transition(step, kind)
        if is_on_device:
            made.observations = made.observations.to(device)
            made.dones = made.dones.to(device)
        storage.add_transitions(made)
        if changes:
            for tensor in tensors_of(made):
                tensor.fill_(1)
    return storage


def assert_same_columns(mine: Any, other: Any) -> None:
    expected = columns_of(other)
    found = columns_of(mine)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name].cpu(), value), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_on_device", [False, True])
def test_host_tensors_may_change_after_they_were_added(kind: type, is_on_device: bool) -> None:
    mine = filled("cuda", kind, is_on_device, changes=True)
    torch.cuda.synchronize()
    assert_same_columns(mine, filled("cpu", kind))


def test_a_step_of_host_tensors_is_one_copy_and_no_wait(late_device: PretendCuda | None) -> None:
    storage = filled("cuda")
    if late_device is None:
        pytest.skip("copies are counted on the pretended device")
    storage.clear()
    torch.cuda.synchronize()
    late_device.reset()
    storage.add_transitions(transition(0))
    counts = late_device.reset()
    assert counts.launches["copy_"] == 1
    assert counts.num_waits == counts.pageable_copies.total() == 0


def test_waits_for_busy_pinned_buffers_are_counted(late_device: PretendCuda | None) -> None:
    storage = filled("cuda")
    if late_device is not None:
        late_device.lateness = 10_000
    for _ in range(4):
        storage.clear()
        for step in range(NUM_STEPS):
            storage.add_transitions(transition(step))
    assert late_device is None or storage.num_buffer_waits > 0
    torch.cuda.synchronize()
    assert_same_columns(storage, filled("cpu"))


def test_storages_on_the_cpu_use_no_pinned_buffers() -> None:
    assert filled("cpu").num_buffer_waits == 0
