"""`EpisodeReplayBuffer` equals a list of episodes. Its windows are uniform over all windows."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from storage import EpisodeReplayBuffer
from tests.managed.naive_model import item, number_of


def steps(episode: int, length: int) -> list[dict[str, Any]]:
    return [item(1000 * episode + step) for step in range(length)]


def stack(episode: int, length: int) -> dict[str, Any]:
    numbers = torch.arange(1000 * episode, 1000 * episode + length)
    return {"x": {"y": numbers.unsqueeze(1).float()}, "z": numbers.numpy()}


@settings(max_examples=25)
@given(data=st.data(), size=st.integers(1, 6))
def test_any_sequence_of_pushes_equals_a_list(data: st.DataObject, size: int) -> None:
    buffer, model, total = EpisodeReplayBuffer(size, name="an_episode", generator=0), [], 0
    for _ in range(data.draw(st.integers(1, 8))):
        lengths = data.draw(st.lists(st.integers(1, 200), min_size=1, max_size=4))
        new = [steps(total + place, length) for place, length in enumerate(lengths)]
        if len(new) == 1 and data.draw(st.booleans()):
            buffer.push(new[0])
        else:
            buffer.push(new)
        total += len(new)
        model = (model + lengths)[-size:]
        assert (
            buffer.episode_len == model
            and buffer.count() == len(model)
            and buffer.push_count == total
        )
    actual = buffer.sample(len(model))
    numbers = sorted(number_of(episode[0]) // 1000 for episode in actual)
    assert numbers == list(range(total - len(model), total)), "all different, all of them"
    for episode in actual:
        number = number_of(episode[0]) // 1000
        assert [number_of(step) for step in episode] == [
            1000 * number + i for i in range(len(episode))
        ]
        assert {step["replay_unique_id"] for step in episode} == {f"an_episode_{number}"}
        assert {step["replay_buffer_idx"] for step in episode} == {number % size}


def test_d13_lengths_are_known_before_the_buffer_is_full() -> None:
    buffer = EpisodeReplayBuffer(10)
    assert buffer.episode_len == [] and buffer.sample(1) is None and buffer.sample(0) == []
    buffer.push(stack(0, 7))
    assert buffer.episode_len == [7]
    buffer.extend([stack(1, 900), stack(2, 1)])
    assert buffer.episode_len == [7, 900, 1]


def test_a_stacked_episode_is_sampled_as_a_stack() -> None:
    buffer = EpisodeReplayBuffer(3, generator=0)
    for episode in range(5):
        buffer.append(stack(episode, 4 + episode))
    for actual in buffer.sample(3):
        number = int(actual["z"][0]) // 1000
        expected = stack(number, 4 + number)
        assert torch.equal(actual["x"]["y"], expected["x"]["y"]) and np.array_equal(
            actual["z"], expected["z"]
        )
        assert (
            isinstance(actual["z"], np.ndarray) and actual["replay_unique_id"] == f"buffer_{number}"
        )
        actual["x"]["y"].fill_(-1)
    assert all((actual["x"]["y"] >= 0).all() for actual in buffer.sample(3))
    assert {
        int(x["z"][0]) // 1000
        for x in buffer.sample(10, sample_range=slice(-2, None), replace=True)
    } == {3, 4}


def test_d13_d18_windows_are_uniform_and_include_the_last_window() -> None:
    buffer = EpisodeReplayBuffer(4, generator=0)
    lengths = [3, 9, 2, 6, 4, 12]
    for episode, length in enumerate(lengths):
        buffer.push(stack(episode, length))
    valid = [1000 * e + s for e, n in list(enumerate(lengths))[2:] for s in range(n - 4 + 1)]
    counts = dict.fromkeys(valid, 0)
    for _ in range(40):
        actual = buffer.sample_windows(100, 4)
        assert actual["x"]["y"].shape == (100, 4, 1) and (actual["z"].diff(dim=1) == 1).all()
        for first in actual["z"][:, 0].tolist():
            counts[first] += 1
    expected = 4000 / len(valid)
    assert sum((n - expected) ** 2 / expected for n in counts.values()) < len(
        valid
    ) + 4 * math.sqrt(2 * len(valid))
    assert buffer.sample_windows(3, 12)["z"][:, 0].tolist() == [5000] * 3
    with pytest.raises(ValueError, match=r"the longest episode of .* has 12 steps"):
        buffer.sample_windows(1, 13)
    with pytest.raises(ValueError, match=r"the longest episode of .* has 0 steps"):
        EpisodeReplayBuffer(2).sample_windows(1, 1)


def test_an_invalid_episode_raises_and_adds_nothing() -> None:
    buffer = EpisodeReplayBuffer(4)
    buffer.push(steps(0, 3))
    wrong: list[Any] = [
        [steps(1, 2), []],
        [steps(1, 2), [{**item(1), "more": torch.zeros(1)}]],
        [steps(1, 2), "text"],
        [3],
        7,
        stack(1, 2),
    ]
    for bad in wrong:
        with pytest.raises((ValueError, TypeError), match=r"^EpisodeReplayBuffer.push: "):
            buffer.push(bad)
    fresh = EpisodeReplayBuffer(4)
    with pytest.raises(ValueError, match=r"^EpisodeReplayBuffer.push: "):
        fresh.push([steps(0, 2), [{"other": torch.zeros(1)}]])
    assert buffer.episode_len == [3] and fresh.episode_len == [] and fresh.push_count == 0
    fresh.push(stack(0, 2))
    buffer.clear()
    assert buffer.episode_len == [] and buffer.push_count == 0
