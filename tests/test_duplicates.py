"""Copies of every store continue like the original and independently.

Objects with files or threads cannot be copied.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout_data import RolloutWriter
from rollout_data.trajectories.trajectory_replay_buffer import TrajectoryReplayBuffer
from storage import (
    AsyncCheckpointSaver,
    DictBuffer,
    PipelinedDataCollector,
    RolloutStorage,
    UsageError,
)
from tests.test_torch_modes import CALLS, _frozen

WAYS: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda store: pickle.loads(pickle.dumps(store)),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
}
STORES = [name for name in CALLS if name != "TrajectoryReplayBuffer"]


@pytest.mark.each_value
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", STORES)
def test_a_copy_continues_like_its_store_and_independently(name: str, way: str) -> None:
    make, *calls = CALLS[name]
    for num_before in (0, 1, 2, len(calls) // 2):
        alone, store = make(None), make(None)
        for call in calls[:num_before]:
            call(alone)
            call(store)
        twin = WAYS[way](store)
        assert type(twin) is type(store)
        expected = [_frozen(call(alone)) for call in calls[num_before:]]
        # Calls of the copy must not change the original.
        assert [_frozen(call(twin)) for call in calls[num_before:]] == expected
        assert [_frozen(call(store)) for call in calls[num_before:]] == expected


def test_a_copy_does_not_use_the_default_generator() -> None:
    buffer, storage = DictBuffer(capacity=4), RolloutStorage(2, 2, (3,), None, (1,))
    drawn = torch.get_rng_state()
    for way in WAYS.values():
        way(buffer)
        way(storage)
    assert torch.equal(torch.get_rng_state(), drawn)


def test_a_copy_has_the_options_of_its_store() -> None:
    buffer = DictBuffer(
        capacity=6, num_envs=2, end_key=("a", "end"), nested_key_separator="/", output_device="cpu"
    )
    storage = RolloutStorage(2, 2, {"x": ((3,), "uint8")}, None, (1,), output_device="cpu")
    for way in WAYS.values():
        twin = way(buffer)
        assert twin.end_key == buffer.end_key and twin.nested_key_separator == "/"
        assert (twin.num_envs, twin.output_device) == (2, torch.device("cpu"))
        assert way(storage).observations["x"].dtype is torch.uint8


def test_copying_an_object_with_files_or_threads_raises(tmp_path: Path) -> None:
    with RolloutWriter(tmp_path, 2) as writer, AsyncCheckpointSaver() as saver:
        collector = PipelinedDataCollector([1, 2, 3])
        items = iter(collector)
        for item in (writer, saver, collector, items, TrajectoryReplayBuffer()):
            for way in WAYS.values():
                with pytest.raises(
                    UsageError,
                    match=f"a {type(item).__name__} owns files or threads and cannot be pickled",
                ):
                    way(item)
        assert list(items) == [1, 2, 3]
