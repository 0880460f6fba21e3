"""Names and calls of the published descriptions of buffers, and errors with the names that the user
wrote.
"""

from __future__ import annotations

import pickle

import pytest
import torch

import storage
from storage import (
    DictBuffer,
    MissingFieldError,
    TrajectoryDictBuffer,
    TrajectoryDictBufferMultiDim,
    UsageError,
    load_buffer,
)


def rows(start: int, stop: int) -> dict:
    number = torch.arange(start, stop).unsqueeze(1)
    return {"obs": {"x": number.float(), "y": number * 10}, "done": number % 5 == 4}


def test_capacity_device_and_separator_may_be_positional() -> None:
    buffer = DictBuffer(1000, "cpu", "+")
    assert (buffer.capacity, buffer.device.type, buffer.nested_key_separator) == (1000, "cpu", "+")
    windows = TrajectoryDictBufferMultiDim(8, "cpu", seq_length=2)
    assert windows.capacity == 8 and windows.seq_length == 2


@pytest.mark.parametrize("made", [DictBuffer, TrajectoryDictBufferMultiDim])
def test_storage_is_none_before_the_first_extend(made, tmp_path) -> None:
    buffer = made(capacity=8, end_key="done", generator=0)
    assert buffer.storage is None and buffer.ind is None
    buffer.save(tmp_path / "empty")
    assert load_buffer(tmp_path / "empty").storage is None
    buffer.extend(rows(0, 3))
    assert buffer.storage["obs"]["x"][:3].flatten().tolist() == [0, 1, 2]


@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("num_rows", [6, 12, 30])
def test_ind_indexes_the_rows_of_the_last_sample_in_storage(num_envs: int, num_rows: int) -> None:
    buffer = DictBuffer(12, num_envs=num_envs, end_key="done", generator=0)
    buffer.extend(rows(0, num_rows))
    for _ in range(3):
        batch = buffer.sample(50)
        assert buffer.ind.shape == (50,) and buffer.ind.dtype is torch.int64
        for name in ("x", "y"):
            assert torch.equal(buffer.storage["obs"][name][buffer.ind], batch["obs"][name])
        assert torch.equal(buffer.storage["done"][buffer.ind], batch["done"])
    assert pickle.loads(pickle.dumps(buffer)).ind is None


@pytest.mark.parametrize("n_dim", [1, 2])
@pytest.mark.parametrize("start_mode", ["uniform", "trajectory"])
@pytest.mark.parametrize("has_finals", [False, True])
def test_ind_indexes_the_rows_of_windows(n_dim: int, start_mode: str, has_finals: bool) -> None:
    keys = [("obs", "x")]
    buffer = TrajectoryDictBufferMultiDim(
        14,
        n_dim=n_dim,
        start_mode=start_mode,
        output_key_t=keys,
        output_key_tp1=keys,
        end_key="done",
        generator=0,
    )
    for start in range(0, 40, 10):
        data = rows(start, start + 10)
        if n_dim == 2:
            lane = torch.arange(3).view(1, 3, 1)
            data = {
                "obs": {"x": data["obs"]["x"].unsqueeze(1) + 100 * lane},
                "done": data["done"].unsqueeze(1).expand(10, 3, 1),
            }
        final = {"obs": {"x": data["obs"]["x"] + 0.5}} if has_finals else None
        buffer.extend(data, final=final)
    batch = buffer.sample(3 * 40, 3)
    assert torch.equal(buffer.storage["obs"]["x"][buffer.ind], batch["obs"]["x"])


def test_the_storage_of_episodes_has_all_frames_in_order() -> None:
    episodes = [{"observation": {"q": torch.full((length, 2), float(length))}} for length in (3, 5)]
    buffer = TrajectoryDictBuffer(episodes, seq_length=2, generator=0)
    assert buffer.storage["observation"]["q"][:, 0].tolist() == [3.0] * 3 + [5.0] * 5
    assert buffer.storage["done"].flatten().nonzero().flatten().tolist() == [2, 7]


#: A call, and the text that its error must have.
WRONG_CALLS = {
    "an option of DictBuffer": (
        lambda: DictBuffer(4, nope=1),
        TypeError,
        r"^DictBuffer\.__init__\(\) got .* 'nope'",
    ),
    "a missing capacity": (
        lambda: DictBuffer(),
        TypeError,
        r"^DictBuffer\.__init__\(\) missing .* 'capacity'",
    ),
    "an option of windows": (
        lambda: TrajectoryDictBufferMultiDim(4, nope=1),
        TypeError,
        r"^TrajectoryDictBufferMultiDim\.__init__\(\) got .* 'nope'",
    ),
    "a capacity": (
        lambda: DictBuffer(0),
        UsageError,
        "^DictBuffer: capacity must be >= 1, got 0",
    ),
    "a device": (
        lambda: TrajectoryDictBufferMultiDim(4, "gpu0"),
        UsageError,
        "^TrajectoryDictBufferMultiDim: device must be a torch device .* got 'gpu0'",
    ),
    "an output device": (
        lambda: DictBuffer(4, output_device="gpu0"),
        UsageError,
        "^DictBuffer: output_device must be a torch device",
    ),
    "envs": (
        lambda: DictBuffer(5, num_envs=2),
        UsageError,
        "^DictBuffer: capacity must be a multiple of num_envs=2, got 5",
    ),
    "an option of a storage": (
        lambda: storage.ActionLabelRollout(2, 3, (4,), None, (1,), devise="cpu"),
        TypeError,
        r"^ActionLabelRollout\(\) got an unexpected argument 'devise': expected 'device', ",
    ),
    "an option of Sarsa's": (
        lambda: storage.SarsaRolloutStorage(2, 3, (4,), None, (1,), strict=True),
        TypeError,
        r"^SarsaRolloutStorage\(\) got an unexpected argument 'strict': expected 'strict_next', ",
    ),
    "an option of a managed buffer": (
        lambda: storage.AdvancedReplayBuffer(5, alfa=1),
        TypeError,
        r"^AdvancedReplayBuffer\(\) got an unexpected argument 'alfa': expected 'alpha', ",
    ),
    "a dilation": (
        lambda: storage.ActionLabelRollout(2, 3, (4,), None, (1,), buffer_dilation_ratio=0.5),
        UsageError,
        "^ActionLabelRollout: buffer_dilation_ratio must be >= 1",
    ),
}


@pytest.mark.parametrize("case", WRONG_CALLS)
def test_errors_name_the_class_and_the_argument_of_the_caller(case: str) -> None:
    call, kind, text = WRONG_CALLS[case]
    with pytest.raises(kind, match=text):
        call()


def test_errors_of_transitions_name_the_argument() -> None:
    buffer = DictBuffer(10, end_key="done", generator=0)
    buffer.extend(rows(0, 10))
    with pytest.raises(
        MissingFieldError,
        match=r"sample_transitions: next_keys 'observation' is .* 'obs/x'",
    ):
        buffer.sample_transitions(4)
    with pytest.raises(MissingFieldError, match=r"reward_key 'reward' is an unknown field"):
        buffer.sample_transitions(4, next_keys=["obs"], num_steps=2)
    with pytest.raises(
        UsageError, match=r"the option 'n_steps' is unknown\. The options are 'num_steps', "
    ):
        buffer.sample_transitions(4, next_keys=["obs"], n_steps=2)
    with pytest.raises(
        MissingFieldError, match=r"end_key 'dones' is an unknown field\. The fields are 'done', "
    ):
        DictBuffer(10, end_key="dones").extend(rows(0, 10))
    windows = TrajectoryDictBufferMultiDim(10, output_key_t=["obs"], end_key="done")
    windows.extend(rows(0, 10))
    with pytest.raises(
        MissingFieldError,
        match=r"MultiDim\.sample: output_key_tp1 'observation' is an unknown field",
    ):
        windows.sample(4)
    with pytest.raises(UsageError, match=r"DictBuffer.sample: batch_size must be >= 1, got 0"):
        buffer.sample(0)
