"""The `repr` of an object: class, size, fill, device and fields. It reads nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import rollout_data as rd
import storage


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("data") / "walk"
    with rd.RolloutWriter(path, 2, durable=False) as writer:
        for t in range(20):
            observation = {"pose": np.zeros((2, 3), np.float32)}
            writer.add(
                observation=observation, action=np.zeros((2, 1)), done=[t % 5 == 4] * 2, mode="slow"
            )
    return path


def filled_rollout() -> storage.RolloutStorage:
    rollout = storage.RolloutStorage(
        4, 6, obs_shape=(3,), critic_obs_shape=None, actions_shape=(2,), generator=0
    )
    for _ in range(6):
        step = rollout.Transition()
        step.observations, step.actions, step.rewards = (
            torch.randn(4, 3),
            torch.randn(4, 2),
            torch.randn(4),
        )
        step.dones, step.values, step.actions_log_prob = (
            torch.zeros(4).bool(),
            torch.randn(4, 1),
            torch.randn(4),
        )
        step.action_mean, step.action_sigma = torch.zeros(4, 2), torch.ones(4, 2)
        rollout.add_transitions(step)
    rollout.compute_returns(last_values=torch.randn(4, 1), gamma=0.9, lam=0.9)
    return rollout


def transitions() -> storage.DictBuffer:
    buffer = storage.DictBuffer(capacity=1000)
    buffer.extend({"obs": torch.zeros(5, 3), "act": {"arm": torch.zeros(5, 2)}})
    return buffer


def prioritized() -> storage.AdvancedReplayBuffer:
    buffer = storage.AdvancedReplayBuffer(100, generator=0)
    buffer.extend_tensors({"obs": torch.randn(50, 8)})
    return buffer


BUFFERS = {
    "DictBuffer(len=5 of 1,000, num_envs=1, device=cpu": (
        transitions,
        ["obs: float32[3]", "act/arm: float32[2]"],
    ),
    "AdvancedReplayBuffer(len=50 of 100, name=buffer, device=cpu": (
        prioritized,
        ["obs: float32[8]"],
    ),
    "RolloutStorage(num_transitions_per_env=6, num_envs=4": (
        filled_rollout,
        ["observations: float32[3]"],
    ),
    "ZBuffer(len=0 of 10, dim=3": (lambda: storage.ZBuffer(10, 3), ["z: float32[3]"]),
    "TrajectoryCache(len=0 of 3": (lambda: rd.TrajectoryCache(3), []),
    "PrioritizedWindows(len=0 of 100": (lambda: storage.PrioritizedWindows(100, 4), []),
    "TrajectoryReplayBuffer(len=0": (rd.TrajectoryReplayBuffer, []),
}


@pytest.mark.parametrize("head", BUFFERS)
def test_the_repr_of_a_buffer_has_its_size_and_fields(head):
    make, fields = BUFFERS[head]
    first, *lines = repr(make()).splitlines()
    assert first.startswith(head) and len(first) < 250
    assert lines[: len(fields)] == [f"  {line}" for line in fields] and len(lines) <= 17


def test_the_repr_of_a_dataset_has_its_path_and_fields(folder):
    fields = ["  observation/pose: float32[3]", "  action: float64[1]", "  mode: texts"]
    windows = rd.WindowDataset(folder, 2)
    shown = {
        windows: f"WindowDataset(len=32, on_error=raise, data_dir={folder}",
        rd.WindowLoader(windows, 4): "WindowLoader(len=8, ba",
    }
    mixture = rd.WindowMixture([windows, windows])
    shown |= {mixture: "WindowMixture(len=64", mixture.sampler(9): "MixtureSampler(len=9"}
    shown |= {
        rd.WindowDataset(
            rd.open(folder)[:1], 2
        ): "WindowDataset(len=4, on_error=raise, data_dir=<Recording of 1 episode ("
    }
    for thing, head in shown.items():
        assert repr(thing).startswith(head) and repr(thing).splitlines()[1:] == fields
    dataset = rd.RolloutDataset(folder, 2, device="cpu")
    assert repr(dataset).startswith(
        f"RolloutDataset(data_dir={folder}, num_envs=2"
    ) and "\n" not in repr(dataset)
    dataset.get_batch(2)
    assert repr(dataset).splitlines()[1:] == fields
    assert repr(rd.RolloutDataset("there is none", 2)).startswith(
        "RolloutDataset(data_dir=there is none"
    )


def test_the_repr_of_a_batch_has_its_fields_and_no_numbers(folder):
    batches = [
        rd.RolloutDataset(folder, 2, device="cpu").get_batch(3),
        rd.WindowDataset(folder, 2).__getitems__([0, 1]),
        next(iter(filled_rollout().mini_batch_generator(2, 1))),
        storage.Transition(observations=torch.zeros(2, 3)),
    ]
    for batch, field in zip(
        batches, ("observation: ", "observation/pose: ", "obs: ", "observations: "), strict=True
    ):
        first, second, *_ = repr(batch).splitlines()
        assert first.startswith(type(batch).__name__) and second.strip().startswith(
            field + "float32["
        )
        assert "tensor(" not in repr(batch) and len(repr(batch).splitlines()) <= 18


def test_a_repr_counts_many_fields_instead_of_listing_them():
    buffer = storage.DictBuffer(capacity=10)
    buffer.extend({f"f{n}": torch.zeros(5, 1) for n in range(40)})
    assert repr(buffer).splitlines()[-1] == "  and 24 more" and len(repr(buffer).splitlines()) == 18
