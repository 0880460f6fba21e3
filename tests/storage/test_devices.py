"""Devices that do not exist: each class and function raises one error at construction."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import storage
from storage import Field, Schema
from storage.adapters.rsl_rl import RslRlStorage
from storage.errors import RolloutDataError, UsageError, WriteError

_EPISODE = {"observation": torch.zeros(3, 2), "done": torch.tensor([[False], [False], [True]])}
_ROLLOUT = {
    "num_envs": 2,
    "num_transitions_per_env": 3,
    "obs_shape": 4,
    "critic_obs_shape": None,
    "actions_shape": 2,
}
#: Class -> its arguments without a device.
ARGUMENTS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("ActionLabelRollout", "QueueRolloutStorage", "RolloutStorage"), _ROLLOUT),
    **{name: {"capacity": 8} for name in ("MaxTree", "MinTree", "SumTree", "DictBuffer")},
    **{
        name: {"capacity": 8}
        for name in ("MaxSegmentTree", "MinSegmentTree", "SegmentTree", "SumSegmentTree")
    },
    "BufferManager": {"cfg": {}},
    "CompressedTensorDict": {"tensordict": {}},
    "PipelinedDataCollector": {"base_collector": []},
    "PrioritizedWindows": {"capacity": 8, "seq_length": 2},
    "ReplayBuffer": {"obs_dim": 2, "buffer_size": 4},
    "RingStore": {"num_slots": 4, "num_lanes": 1, "schema": Schema([Field("x", (1,))])},
    "TrajectoryDictBuffer": {"episodes": [_EPISODE]},
    "TrajectoryDictBufferMultiDim": {"capacity": 8},
    "ZBuffer": {"capacity": 8, "dim": 2},
    # Their `device` is among the options.
    "AdvancedReplayBuffer": {"name": "a", "replay_buffer_size": 8},
    "EpisodeReplayBuffer": {"name": "a", "replay_buffer_size": 8},
    "NaiveReplayBuffer": {"name": "a", "replay_buffer_size": 8},
    "SarsaRolloutStorage": _ROLLOUT,
}
without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")


def test_every_class_with_a_device_is_in_the_table() -> None:
    actual = {name for name in storage.__all__ if inspect.isclass(getattr(storage, name))}
    actual = {
        name for name in actual if "device" in inspect.signature(getattr(storage, name)).parameters
    }
    assert actual <= ARGUMENTS.keys()


@without_cuda
@pytest.mark.parametrize("name", sorted(ARGUMENTS))
def test_an_unavailable_device_raises_at_construction(name: str) -> None:
    make, arguments = getattr(storage, name), ARGUMENTS[name]
    for device in ("cuda", "cuda:1", torch.device("cuda")):
        with pytest.raises(
            UsageError, match=r"device is 'cuda.*finds 0 CUDA devices. Choose 'cpu'"
        ):
            make(**arguments, device=device)
    if "output_device" in inspect.signature(make).parameters:
        with pytest.raises(UsageError, match="output_device is 'cuda', but torch finds"):
            make(**arguments, output_device="cuda")
    with pytest.raises(UsageError, match="a torch device such as 'cpu' or 'cuda:0', got 'gpu'"):
        make(**arguments, device="gpu")


@without_cuda
def test_an_unavailable_device_raises_in_adapters_and_loaders(tmp_path: Path) -> None:
    buffer = storage.DictBuffer(capacity=4)
    buffer.extend({"x": torch.zeros(2, 1)})
    buffer.save(tmp_path / "buffer")
    with storage.AsyncCheckpointSaver() as saver:
        saver.save_async({"x": torch.zeros(1)}, tmp_path / "a.pt").result()
    calls: list[Callable[[], Any]] = [
        lambda: storage.load_buffer(tmp_path / "buffer", "cuda"),
        lambda: storage.DictBuffer.load(tmp_path / "buffer", device="cuda"),
        lambda: storage.load_checkpoint(tmp_path / "a.pt", map_location="cuda"),
        lambda: storage.load_checkpoint_parallel(tmp_path / "a.pt", torch.device("cuda")),
        lambda: storage.CompressedTensorDict({"x": torch.zeros(1)}).to("cuda"),
        lambda: RslRlStorage("rl", 2, 3, {"policy": torch.zeros(2, 4)}, (2,), "cuda"),
    ]
    for call in calls:
        with pytest.raises(UsageError, match="is 'cuda', but torch finds 0 CUDA devices"):
            call()


def test_an_error_of_writing_is_an_os_error_that_survives_a_pickle() -> None:
    text = "'/x' cannot be written: No space left on device."
    error = WriteError(text, error_number=28, filename="/x")
    assert isinstance(error, (RolloutDataError, OSError)) and isinstance(error, OSError)
    copied = pickle.loads(pickle.dumps(error))
    assert (str(copied), copied.errno, copied.filename) == (str(error), 28, "/x")
    assert str(error) == text
    assert (
        str(WriteError(message="as a DataLoader raises it again"))
        == "as a DataLoader raises it again"
    )
