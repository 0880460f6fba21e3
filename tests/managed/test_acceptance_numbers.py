"""Numbers of numpy are accepted as sizes, iterations, ranges and ratios."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

import storage
from storage import (
    AdvancedReplayBuffer,
    BufferManager,
    BufferMonitor,
    EpisodeReplayBuffer,
    NaiveReplayBuffer,
    RateLimiter,
    SumSegmentTree,
)


def _item(number: int) -> dict[str, object]:
    return {"obs": torch.full((3,), float(number)), "collect_iter": number}


@pytest.mark.parametrize("make", [NaiveReplayBuffer, AdvancedReplayBuffer])
def test_sizes_and_iterations_may_be_numpy_integers(make: Callable[..., NaiveReplayBuffer]) -> None:
    buffer = make(np.int64(5))
    buffer.extend(_item(number) for number in range(8))
    assert buffer.replay_buffer_size == 5 and type(buffer.replay_buffer_size) is int
    actual = buffer.sample(np.int64(3), np.int32(9))
    assert actual is not None and len(actual) == 3
    assert all(
        item.get("staleness", 9 - item["collect_iter"]) == 9 - item["collect_iter"]
        for item in actual
    )
    assert buffer.sample_check(np.int64(5), np.int64(9)) and not buffer.sample_check(
        np.int64(6), np.int64(9)
    )
    assert buffer.sample(np.int64(6)) is None and buffer.sample(np.int64(0)) == []


@pytest.mark.parametrize(
    "size", [True, 1.0, np.float64(1), np.bool_(True), "1", None, -1, np.int64(-1)]
)
def test_a_count_that_is_not_an_integer_raises(size: object) -> None:
    buffer = NaiveReplayBuffer(5)
    buffer.push(_item(0))
    with pytest.raises(ValueError, match=r"size must be .*>= 0"):
        buffer.sample(size)  # type: ignore[arg-type]


def test_counts_of_episodes_may_be_numpy_integers() -> None:
    buffer = EpisodeReplayBuffer(np.int64(2))
    buffer.push([_item(number) for number in range(6)])
    assert buffer.sample_windows(np.int64(4), np.int64(3))["obs"].shape == (4, 3, 3)


def test_sizes_iterations_and_ratios_of_a_manager_may_be_numpy_numbers() -> None:
    options = {
        "replay_buffer_size": np.int64(10),
        "rate_limiter": {"samples_per_insert": 100, "tolerance": 10_000},
    }
    shares = np.array([0.5, 0.5], np.float32)
    cfg = {
        "buffer_name": ["a", "b"],
        "sample_ratio": dict(zip("ab", shares, strict=True)),
        "a": options,
        "b": options,
    }
    manager = BufferManager(cfg)
    manager.push_data([_item(number) for number in range(10)], ["a", "b"])
    assert len(manager.sample(np.int64(6), np.int64(9))) == 6
    actual = manager.sample({"a": np.int64(2), "b": np.int64(3)}, np.int64(9))
    assert [len(actual[name]) for name in "ab"] == [2, 3]
    state = manager["a"].rate_limiter.state_dict()
    # So that they can be written as JSON
    assert all(type(count) is int for count in state.values())


def test_a_rate_limiter_counts_numpy_integers_like_python_integers() -> None:
    limiter = RateLimiter(2.0, 100.0)
    assert limiter.insert(np.int64(3)) and limiter.sample(np.int64(2))
    other = RateLimiter(2.0, 100.0)
    other.load_state_dict(limiter.state_dict())
    assert other.num_inserted == 3 and type(limiter.num_inserted) is int


def test_bounds_of_reduce_may_be_numpy_integers() -> None:
    tree = SumSegmentTree(4)
    tree[[0, 1, 2, 3]] = [1.0, 2.0, 3.0, 4.0]
    assert tree.reduce(np.int64(1), np.int64(3)) == 5
    with pytest.raises(IndexError):
        tree.reduce(0, 1.5)  # type: ignore[arg-type]


def test_a_push_through_a_manager_records_its_time_in_the_monitor() -> None:
    manager = BufferManager(
        {"buffer_name": ["a"], "a": {"replay_buffer_size": 4, "monitor": BufferMonitor()}}
    )
    manager.push_data(_item(0))
    actual = manager["a"].monitor.snapshot()
    assert actual["in/time_mean"] > 0 and actual["in/ticks"] == actual["in/size_max"] == 1


def test_segment_trees_are_exported() -> None:
    tree = storage.SumTree(3)
    tree.write(torch.tensor([0, 2]), torch.tensor([1.0, 2.0], dtype=torch.float64))
    assert tree.reduce() == 3.0
    assert storage.MinTree(3).reduce() == float("inf") and storage.MaxTree(3).reduce() == -float(
        "inf"
    )


@pytest.mark.parametrize(("make", "applied"), [(NaiveReplayBuffer, 0), (AdvancedReplayBuffer, 2)])
def test_ids_of_an_update_may_be_an_array(
    make: Callable[..., NaiveReplayBuffer], applied: int
) -> None:
    buffer = make(4)
    buffer.extend(_item(number) for number in range(3))
    ids = np.array(["buffer_0", "buffer_2"])
    assert buffer.update({"replay_unique_id": ids, "priority": np.array([1.0, 2.0])}) == applied
    assert buffer.update({"replay_unique_id": ids[:0], "priority": []}) == 0
    assert buffer.update({"replay_unique_id": None}) == 0
    with pytest.raises(KeyError):
        buffer.update(
            {"replay_unique_id": np.array(["other_0", "buffer_1"]), "priority": [1.0, 2.0]}
        )


def test_collect_iter_may_be_an_int_a_numpy_integer_or_a_tensor() -> None:
    buffer = AdvancedReplayBuffer(10, max_staleness=5, min_sample_ratio=0.01, generator=0)
    for collected in (torch.tensor(3), np.int64(4), 5, None):
        item = {"obs": torch.zeros(2)}
        buffer.push(item if collected is None else {**item, "collect_iter": collected})
    assert sorted({item["staleness"] for item in buffer.sample(40, cur_learner_iter=7)}) == [
        -1,
        2,
        3,
        4,
    ]
    assert {item["staleness"] for item in buffer.sample(40, cur_learner_iter=9)} == {-1, 4}
