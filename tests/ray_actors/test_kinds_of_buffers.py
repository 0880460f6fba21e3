"""Each kind of buffer in actors, with its own methods.

Buffers that cannot be divided raise an error at construction.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("ray", reason="ray is not installed: pip install 'rollout-data[ray]'")

from storage import (
    AdvancedReplayBuffer,
    BufferManager,
    EpisodeReplayBuffer,
    NaiveReplayBuffer,
    ReplayBuffer,
    RolloutStorage,
    TrajectoryDictBuffer,
    ZBuffer,
)
from storage.errors import UsageError
from storage.managed.item_store import UnknownNameError
from storage.remote import RemoteBuffer
from tests.ray_actors.actors import NO_CPUS, rows

NOW = {"prefetch": 0, **NO_CPUS}


def items(first: int, count: int) -> list[dict[str, Any]]:
    return [{"number": torch.tensor(n), "text": str(n)} for n in range(first, first + count)]


def numbers(found: list[dict[str, Any]]) -> list[int]:
    """Check that each item is complete. Return the numbers of the items."""
    assert all(item["text"] == str(int(item["number"])) for item in found)
    return [int(item["number"]) for item in found]


def test_replay_and_latent_buffers_are_sampled_from_all_shards(cluster: Any) -> None:
    with RemoteBuffer(partial(ReplayBuffer, 3, 100), 2, **NO_CPUS) as pairs:
        for first in (0, 50):
            states = torch.arange(first, first + 50.0).view(-1, 1).expand(50, 3)
            pairs.insert(states, states + 0.5)
        actual = list(pairs.feed_forward_generator(4, 300))
        assert len(pairs) == 100 and all(
            bool((following - own == 0.5).all()) for own, following in actual
        )
        assert {int(number) for own, _ in actual for number in own[:, 0]} == set(range(100))
    with RemoteBuffer(partial(ZBuffer, 100, 4), **NO_CPUS) as vectors:
        vectors.add(torch.ones(10, 4))
        assert torch.equal(vectors.sample(20), torch.ones(20, 4))


def test_ids_of_items_are_unique_across_shards_and_updates_reach_their_shard(cluster: Any) -> None:
    with RemoteBuffer(partial(NaiveReplayBuffer, 100), 2, **NOW) as uniform:
        assert uniform.sample(1) is None
        uniform.push(items(0, 20))
        uniform.extend(items(20, 20))
        uniform.flush()
        actual = uniform.sample(12) + uniform.sample(16)
        assert len(actual) == 28 and len(numbers(actual)) == 28
        assert len({item["replay_unique_id"] for item in actual}) == len(set(numbers(actual)))

    make = partial(AdvancedReplayBuffer, 100, min_sample_ratio=0, eps=0)
    with RemoteBuffer(make, 2, **NOW) as prioritized:
        for first in (0, 20):
            prioritized.push(items(first, 20))
        prioritized.flush()
        actual = prioritized.sample(600)
        assert set(numbers(actual)) == set(range(40))
        ids = [item["replay_unique_id"] for item in actual]
        prioritized.update(
            {"replay_unique_id": ids, "priority": [n % 10 == 3 for n in numbers(actual)]}
        )
        prioritized.flush()
        assert set(numbers(prioritized.sample(200))) == {3, 13, 23, 33}
        prioritized.update({"replay_unique_id": ["other_3"], "priority": [1.0]})
        with pytest.raises(UnknownNameError, match="'other_3'"):
            prioritized.flush()


def test_updates_are_not_blocked_by_waiting_pushes(cluster: Any) -> None:
    make = partial(AdvancedReplayBuffer, 1000, min_sample_ratio=0)
    limiter = {"samples_per_insert": 1.0, "tolerance": 40.0, "min_inserts": 10}
    with RemoteBuffer(make, rate_limiter=limiter, timeout_s=20.0, **NOW) as learner:
        learner.extend_tensors(rows(0, 20))
        learner.flush()
        collector = copy.copy(learner)
        collector.extend_tensors(rows(20, 20))
        collector.flush()
        collector.extend_tensors(rows(40, 50))  # waits in the actor
        for _ in range(10):
            _, weights, ids = learner.sample_tensors(10)
            learner.update_priorities(ids, weights)
        learner.flush()
        assert len(collector) == 90


def test_episodes_are_pushed_whole_and_counted_once(cluster: Any) -> None:
    limiter = {"samples_per_insert": 1.0, "tolerance": 4.0, "min_inserts": 1, "blocking": False}
    with RemoteBuffer(partial(EpisodeReplayBuffer, 100), rate_limiter=limiter, **NOW) as episodes:
        for first in (0, 10, 20):
            episodes.push(items(first, 10))  # one insertion each, not ten
        episodes.flush()
        assert len(episodes) == 3
        for episode in episodes.sample(3):
            assert numbers(episode) == list(range(numbers(episode)[0], numbers(episode)[0] + 10))

    steps = [{"observation": torch.arange(9.0).view(9, 1) + 100 * number} for number in range(3)]
    with RemoteBuffer(partial(TrajectoryDictBuffer, steps, "cpu", 3), 2, **NOW) as expert:
        expert.update_priorities(torch.tensor([0.0, 1.0, 0.0]))
        windows = expert.sample(300)["observation"].view(100, 3)
        assert bool((windows.diff(dim=1) == 1).all()) and set(
            (windows // 100).flatten().tolist()
        ) == {1}


def test_a_buffer_manager_has_one_shard(cluster: Any) -> None:
    cfg = {"buffer_name": ["near", "far"], "sample_ratio": {"near": 0.75, "far": 0.25}}
    options = {"replay_buffer_size": 100, "min_sample_ratio": 0, "eps": 0}
    make = partial(BufferManager, {**cfg, "near": options, "far": options})
    with RemoteBuffer(make, **NOW) as manager:
        manager.push_data(items(0, 20), "near")
        manager.push_data(items(50, 20), "far")
        assert len(manager) == 40
        actual = numbers(manager.sample(40))
        assert abs(sum(number < 50 for number in actual) - 30) <= 2
        assert max(numbers(manager.sample({"near": 5})["near"])) < 20
        ids = {name: part[2] for name, part in manager.sample_tensors(400).items()}
        seen = {name: (part % 20 == 7).float() for name, part in ids.items()}
        manager.update_priorities(ids, seen)
        manager.flush()
        assert {number % 10 for number in numbers(manager.sample(40))} == {7}


def test_unsupported_buffers_raise_at_construction(cluster: Any) -> None:
    manager = partial(BufferManager, {"buffer_name": ["one"], "one": {"replay_buffer_size": 9}})
    limited = partial(
        NaiveReplayBuffer, 9, rate_limiter={"samples_per_insert": 1.0, "tolerance": 9.0}
    )
    for make, num_shards, reason in (
        (
            manager,
            2,
            "a BufferManager cannot be divided into 2 shards. Create one RemoteBuffer for each",
        ),
        (limited, 1, "Pass rate_limiter to RemoteBuffer"),
        (
            partial(RolloutStorage, 1, 1, 1, None, 1),
            1,
            "a RolloutStorage has no method sample",
        ),
    ):
        with pytest.raises(UsageError, match=reason):
            RemoteBuffer(make, num_shards, **NO_CPUS)
