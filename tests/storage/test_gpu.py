"""The same storages on a GPU, or delivering to one, give the same numbers as on the CPU."""

from __future__ import annotations

import pytest
import torch

from storage import QueueRolloutStorage, ReplayBuffer, RolloutStorage, SarsaRolloutStorage
from tests.storage.rollouts import make_storage, make_transition

pytestmark = pytest.mark.gpu


def filled(kind=RolloutStorage, **more):
    storage = make_storage(5, 6, kind, **more)
    generator = torch.Generator().manual_seed(0)
    for step in range(6):
        done = torch.rand(5, generator=generator) < 0.3
        transition = make_transition(step, 5, 1, done, hidden_states=torch.full((2, 5, 3), float(step)))
        if kind is SarsaRolloutStorage:
            later = make_transition(step + 1, 5)
            transition.next_observations = later.observations
            transition.next_critic_observations = later.critic_observations
        storage.add_transitions(transition)
    storage.compute_returns(torch.ones(5, 1), 0.9, 0.8)
    return storage


def batches(storage):
    flat = [*storage.mini_batch_generator(2, 2), *storage.mini_batch_generator(3, 1, reshuffle="once")]
    return flat + list(storage.recurrent_mini_batch_generator(2, 2))


@pytest.mark.parametrize("kind", [RolloutStorage, QueueRolloutStorage, SarsaRolloutStorage])
@pytest.mark.parametrize(
    "where", [{"device": "cuda"}, {"output_device": "cuda"}, {"device": "cuda", "output_device": "cpu"}]
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
