"""A wrong argument of a storage or buffer is named with the class and the call that the user wrote."""

from __future__ import annotations

import pytest
import torch

from storage import (
    AdvancedReplayBuffer,
    BufferManager,
    DictBuffer,
    EpisodeReplayBuffer,
    NaiveReplayBuffer,
    PrioritizedWindows,
    ReplayBuffer,
    RolloutStorage,
    ZBuffer,
)
from storage.errors import UsageError


def manager():
    return BufferManager({"buffer_name": ["agent"], "agent": {"replay_buffer_size": 4}})


GENERATOR = "expected generator as a torch.Generator, None or a seed"
CALLS = {
    f"create a DictBuffer: {GENERATOR}": lambda: DictBuffer(4, generator="x"),
    f"create a ReplayBuffer: {GENERATOR}": lambda: ReplayBuffer(3, 4, generator="x"),
    f"create a PrioritizedWindows: {GENERATOR}": lambda: PrioritizedWindows(4, 2, generator="x"),
    f"create a BufferManager: {GENERATOR}": lambda: BufferManager({"buffer_name": []}, generator="x"),
    f"create a NaiveReplayBuffer: {GENERATOR}": lambda: NaiveReplayBuffer(4, generator="x"),
    f"create a RolloutStorage: {GENERATOR}": lambda: RolloutStorage(2, 3, [3], None, [2], generator="x"),
    "create a RolloutStorage: expected policy_outputs": lambda: RolloutStorage(2, 3, [3], None, [2], policy_outputs=3),
    "create a ZBuffer: expected dim >= 1, got 0": lambda: ZBuffer(4, 0, "cpu"),
    "call ZBuffer.add: expected z of shape [n, 3]": lambda: ZBuffer(4, 3, "cpu").add(torch.zeros(2)),
    "call ZBuffer.sample: expected num >= 1, got 0": lambda: ZBuffer(4, 3, "cpu").sample(0),
    "call DictBuffer.sample_transitions: expected batch_size": lambda: DictBuffer(4).sample_transitions(0),
    "call ReplayBuffer.sample: expected size >= 1, got 0": lambda: ReplayBuffer(3, 4).sample(0),
    "call ReplayBuffer.feed_forward_generator: expected mini_batch_size": lambda: ReplayBuffer(
        3, 4
    ).feed_forward_generator(1, 0),
    "call NaiveReplayBuffer.sample: expected size >= 0, got -1": lambda: NaiveReplayBuffer(4).sample(-1),
    "call AdvancedReplayBuffer.sample: expected cur_learner_iter": lambda: AdvancedReplayBuffer(4).sample(1, "x"),
    "call AdvancedReplayBuffer.update of 'buffer': expected info": lambda: AdvancedReplayBuffer(4).update(3),
    "call AdvancedReplayBuffer.sample_tensors: expected batch_size": lambda: AdvancedReplayBuffer(4).sample_tensors(0),
    "call EpisodeReplayBuffer.sample_windows: expected length": lambda: EpisodeReplayBuffer(4).sample_windows(1, 0),
    "call EpisodeReplayBuffer.push of 'buffer': expected data": lambda: EpisodeReplayBuffer(4).push([3]),
    "create a BufferManager: expected cfg": lambda: BufferManager(3),
    "call BufferManager.sample: expected batch_size >= 0, got -1": lambda: manager().sample(-1),
    "call BufferManager.sample: expected sample_ratio": lambda: manager().sample(1, sample_ratio={"agent": 0.5}),
    "call BufferManager.update: expected info": lambda: manager().update(3),
}


@pytest.mark.parametrize("text", CALLS)
def test_an_error_names_the_class_the_call_and_the_argument(text):
    with pytest.raises(UsageError) as caught:
        CALLS[text]()
    assert str(caught.value).startswith(f"cannot {text}")
