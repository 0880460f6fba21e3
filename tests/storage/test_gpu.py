"""The same storages on a GPU, or with a GPU as output device, return the numbers of the CPU."""

from __future__ import annotations

import pytest
import torch

from storage import QueueRolloutStorage, ReplayBuffer, RolloutStorage, SarsaRolloutStorage
from tests.storage.rollouts import make_storage, make_transition

pytestmark = pytest.mark.gpu


def filled(kind=RolloutStorage, **more):
    # The permutations of the CPU on any device.
    storage = make_storage(5, 6, kind, **{"generator": torch.Generator().manual_seed(0), **more})
    generator = torch.Generator().manual_seed(0)
    for step in range(6):
        done = torch.rand(5, generator=generator) < 0.3
        transition = make_transition(
            step, 5, 1, done, hidden_states=torch.full((2, 5, 3), float(step))
        )
        if kind is SarsaRolloutStorage:
            later = make_transition(step + 1, 5)
            transition.next_observations = later.observations
            transition.next_critic_observations = later.critic_observations
        storage.add_transitions(transition)
    storage.compute_returns(torch.ones(5, 1), 0.9, 0.8)
    return storage


def batches(storage):
    flat = [
        *storage.mini_batch_generator(2, 2),
        *storage.mini_batch_generator(3, 1, reshuffle="once"),
    ]
    return flat + list(storage.recurrent_mini_batch_generator(2, 2))


@pytest.mark.each_value
@pytest.mark.parametrize("kind", [RolloutStorage, QueueRolloutStorage, SarsaRolloutStorage])
@pytest.mark.parametrize(
    "where",
    [{"device": "cuda"}, {"output_device": "cuda"}, {"device": "cuda", "output_device": "cpu"}],
)
def test_batches_equal_those_of_the_cpu(kind, where):
    wanted = where.get("output_device", "cuda")
    for mine, other in zip(batches(filled(kind, **where)), batches(filled(kind)), strict=True):
        for x, y in zip(mine, other, strict=True):
            if isinstance(y, torch.Tensor):
                assert x.device.type == wanted
                torch.testing.assert_close(x.cpu(), y, atol=1e-5, rtol=1e-5)


def test_a_store_moves_between_devices(tmp_path):
    storage = filled(device="cuda")
    storage.save(tmp_path / "kept")
    loaded = RolloutStorage.load(tmp_path / "kept", device="cpu")
    assert torch.equal(loaded.returns, storage.returns.cpu())
    filled().load_state_dict(filled().state_dict())
    buffer = ReplayBuffer(3, 10, "cuda", generator=0)
    buffer.insert(torch.ones(4, 3), torch.ones(4, 3))
    assert next(buffer.feed_forward_generator(1, 5))[0].is_cuda


def test_steps_wait_for_batches_that_another_stream_reads():
    # The pretended device executes at once, so only a GPU can show a missing order by its values.
    # tests/storage/test_stream_order.py shows that the streams wait.
    big = RolloutStorage(64, 6, (256, 256), None, (1,), device="cuda", generator=0)
    first, second = (
        torch.zeros(64, 256, 256, device="cuda"),
        torch.ones(64, 256, 256, device="cuda"),
    )

    def add(observations):
        transition = big.Transition(
            observations=observations, actions=torch.zeros(64, 1, device="cuda")
        )
        transition.rewards = transition.dones = torch.zeros(64, device="cuda")
        transition.values = transition.actions_log_prob = torch.zeros(64, 1, device="cuda")
        transition.action_mean = transition.action_sigma = torch.zeros(64, 1, device="cuda")
        big.add_transitions(transition)

    for _ in range(6):
        add(first)
    big.compute_returns(torch.zeros(64, 1, device="cuda"), 0.9, 0.9)
    torch.cuda.synchronize()
    reader = torch.cuda.Stream()
    with torch.cuda.stream(reader):
        torch.cuda._sleep(50_000_000)  # the reads come late on their stream
        batches = list(big.mini_batch_generator(2, 1))
    big.clear()
    for _ in range(6):
        add(second)
    torch.cuda.synchronize()
    assert not any(batch.obs.any() for batch in batches)
