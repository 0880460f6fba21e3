"""Errors of earlier systems, each as a named test, and the rules of the contract."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from storage import (
    AdvancedReplayBuffer,
    BufferEmptyError,
    BufferMonitor,
    NaiveReplayBuffer,
    UsageError,
)
from tests.managed.naive_model import item, number_of

KINDS = [NaiveReplayBuffer, AdvancedReplayBuffer]


def filled(kind: Any, size: int, num_items: int, **options: Any) -> Any:
    buffer = kind(size, generator=0, **options)
    buffer.push([item(number) for number in range(num_items)])
    return buffer


@pytest.mark.parametrize("kind", KINDS)
def test_a_sampled_item_equals_the_pushed_item_and_has_an_id(kind: Any) -> None:
    buffer = filled(kind, 4, 6, name="my_buffer")
    actual = buffer.sample(4)
    for x in actual:
        number = number_of(x)
        assert (
            x["replay_unique_id"] == f"my_buffer_{number}" and x["replay_buffer_idx"] == number % 4
        )
        assert isinstance(x["array"], np.ndarray) and isinstance(x["reward"], torch.Tensor)
    assert set(actual[0]) - set(item(0)) == (
        {"replay_unique_id", "replay_buffer_idx"}
        | ({"staleness", "use", "priority", "IS"} if kind is AdvancedReplayBuffer else set())
    )
    assert buffer.count() == len(buffer) == 4 and buffer.push_count == 6


@pytest.mark.parametrize("kind", KINDS)
def test_d5_samples_share_no_memory_with_the_caller_or_with_each_other(kind: Any) -> None:
    buffer, pushed = kind(3, generator=0), item(1)
    keys = set(pushed)
    buffer.append(pushed)
    pushed["sequence"][1]["deep"], pushed["array"][:], pushed["observation"]["joints"][:] = (
        "changed",
        -1,
        -1,
    )
    for _ in range(2):
        (actual,) = buffer.sample(1)
        assert number_of(actual) == 1
        actual["sequence"].append("changed")
        actual["array"][:] = -2
        actual["observation"]["joints"].fill_(-2)
        actual["observation"]["new"] = "changed"
    assert set(pushed) == keys
    buffer.append(actual)  # what a sample adds is not stored: the id is the new row's
    assert sorted(x["replay_unique_id"] for x in buffer.sample(2)) != ["buffer_0", "buffer_0"]


def test_d6_each_copy_of_an_item_in_a_sample_has_its_own_use_count() -> None:
    buffer = AdvancedReplayBuffer(1, min_sample_ratio=0, generator=0)
    buffer.append({"x": torch.zeros(1)})
    assert [x["use"] for x in buffer.sample(3)] == [1, 2, 3]
    assert [x["use"] for x in buffer.sample(2)] == [4, 5]
    first, second = buffer.sample(2)
    first["x"][0] = 7
    assert second["x"][0] == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_items", [5, 8, 13])
def test_d7_d17_sample_ranges_index_items_by_age(kind: Any, num_items: int) -> None:
    buffer = filled(kind, 8, num_items)
    alive = list(range(max(0, num_items - 8), num_items))
    for wanted in (
        slice(0, 1),
        slice(0, 3),
        slice(-3, None),
        slice(-10, None),
        slice(2, 4),
        slice(None, None, 2),
    ):
        seen = set()
        for _ in range(30):
            actual = buffer.sample(len(alive[wanted]), sample_range=wanted)
            seen |= {number_of(x) for x in actual}
        assert seen == set(alive[wanted])
        assert buffer.sample(len(alive[wanted]) + 1, sample_range=wanted) is None
    assert buffer.sample(1, sample_range=slice(100, None)) is None
    with pytest.raises(ValueError, match="sample_range"):
        buffer.sample(1, sample_range=3)


def test_a_sample_range_draws_by_priority_within_the_range() -> None:
    buffer = AdvancedReplayBuffer(6, alpha=1.0, generator=0, min_sample_ratio=0, beta=1.0)
    buffer.extend_tensors({"x": torch.arange(8.0)}, torch.tensor([9.0, 9, 9, 9, 9, 9, 1, 3]))
    actual = buffer.sample(400, sample_range=slice(-2, None))
    numbers = [int(x["x"]) for x in actual]
    assert numbers.count(6) == 100 and numbers.count(7) == 300
    assert {round(x["IS"], 9) for x in actual} == {1.0, round(1 / 3, 9)}


def test_d10_sample_of_a_buffer_without_weights_returns_none() -> None:
    buffer = filled(AdvancedReplayBuffer, 4, 4, max_use=1, enable_track_used_data=True)
    assert len(buffer.sample(4)) == 4
    assert buffer.count() == 0 and not buffer.sample_check(1) and buffer.sample(1) is None
    assert buffer.sample(0) == []
    with pytest.raises(BufferEmptyError, match="0 of 4 added items left"):
        buffer.sample_tensors(1)
    zeros = AdvancedReplayBuffer(3, generator=0)
    zeros.push([{"x": torch.zeros(1), "priority": 0.0}] * 2)
    assert zeros.count() == 2 and not zeros.sample_check(1) and zeros.sample(1) is None


def test_d9_items_are_stale_at_the_limit_in_any_order_of_collection() -> None:
    buffer = AdvancedReplayBuffer(10, max_staleness=3, generator=0)
    for collected in (5, 2, [9, 4], None):
        buffer.append(
            {"x": torch.zeros(1), **({} if collected is None else {"collect_iter": collected})}
        )
    assert buffer.sample_check(4, 4) and buffer.count() == 4
    assert not buffer.sample_check(4, 5) and buffer.count() == 3  # 5 - 2 >= 3
    assert buffer.sample(2, 7) is not None and buffer.count() == 2  # the list counts as 4
    assert sorted(x["staleness"] for x in buffer.sample(2, 7)) == [-1, 2]
    assert buffer.sample(2, 8) is None and buffer.count() == 1


def test_replay_start_size_counts_pushed_items_and_min_sample_ratio_counts_stored_items() -> None:
    buffer = AdvancedReplayBuffer(4, replay_start_size=6, min_sample_ratio=2.0, generator=0)
    buffer.push([{"x": torch.zeros(1)}] * 5)
    assert buffer.sample(1) is None and not buffer.sample_check(1)
    buffer.append({"x": torch.zeros(1)})
    assert len(buffer.sample(2)) == 2 and buffer.sample(3) is None
    few = AdvancedReplayBuffer(4, min_sample_ratio=0.5, generator=0)
    few.push([{"x": torch.zeros(1)}] * 2)
    assert len(few.sample(4)) == 4 and few.sample(5) is None


def test_samples_larger_than_the_buffer_need_replace() -> None:
    buffer = filled(NaiveReplayBuffer, 4, 3)
    assert buffer.sample(4) is None and buffer.sample(0) == [] and not buffer.sample_check(4)
    assert len(buffer.sample(20, replace=True)) == 20
    assert sorted(number_of(x) for x in buffer.sample(3)) == [0, 1, 2]
    empty = NaiveReplayBuffer(4)
    assert (
        empty.sample(1) is None and empty.sample(1, replace=True) is None and empty.sample(0) == []
    )
    assert buffer.update({"replay_unique_id": ["buffer_0"], "priority": [1.0]}) == 0


@pytest.mark.parametrize("replace", [False, True])
def test_uniform_draws_are_uniform(replace: bool) -> None:
    for num_items, size in ((20, 15), (200, 5)):
        buffer = NaiveReplayBuffer(num_items, generator=0)
        buffer.push([{"x": torch.tensor(float(number))} for number in range(num_items)])
        counts, num_rounds = np.zeros(num_items), 600
        for _ in range(num_rounds):
            numbers = [int(x["x"]) for x in buffer.sample(size, replace=replace)]
            assert replace or len(set(numbers)) == size
            counts[numbers] += 1 if not replace else 0
            np.add.at(counts, numbers, 1 if replace else 0)
        expected = num_rounds * size / num_items
        assert ((counts - expected) ** 2 / expected).sum() < num_items + 4 * math.sqrt(
            2 * num_items
        )


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -0.1, -math.inf, "high", 1j, 1e308])
def test_a_priority_that_is_not_finite_changes_nothing(wrong: Any) -> None:
    buffer = AdvancedReplayBuffer(4, alpha=1.0, generator=0)
    buffer.push([{"x": torch.zeros(1)}] * 3)
    before = buffer.state_dict()
    calls = [
        lambda: buffer.update(
            {"replay_unique_id": ["buffer_0", "buffer_1"], "priority": [1.0, wrong]}
        ),
        lambda: buffer.append({"x": torch.zeros(1), "priority": wrong}),
        lambda: buffer.push([{"x": torch.zeros(1)}, {"x": torch.zeros(1), "priority": wrong}]),
        lambda: buffer.update_priorities(torch.tensor([0, 1]), [1.0, wrong]),
        lambda: buffer.extend_tensors({"x": torch.zeros(2, 1)}, [1.0, wrong]),
        # Also where the item is long gone.
        lambda: buffer.update({"replay_unique_id": ["buffer_77"], "priority": [wrong]}),
    ]
    for call in calls:
        with pytest.raises(
            ValueError, match=r"priorities must be |the priority 1e.308 is too large"
        ):
            call()
    assert_equal_states(buffer.state_dict(), before)


def assert_equal_states(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["numbers"] == other["numbers"] and one["arguments"] == other["arguments"]
    assert set(one["tensors"]) == set(other["tensors"])
    for name, tensor in one["tensors"].items():
        assert torch.equal(tensor, other["tensors"][name]), name


def test_updates_of_negative_ids_are_counted_as_dead() -> None:
    buffer = AdvancedReplayBuffer(5, generator=0)  # so that the mark falls into an empty one
    buffer.push([{"x": torch.zeros(1)}])
    before = buffer.state_dict()
    assert buffer.update_priorities([-(1 << 62), -1, -4], [5.0, 6.0, 7.0]) == 0
    assert buffer.num_dead_updates == 3 and buffer.max_priority == 1.0
    for name, tensor in before["tensors"].items():
        assert torch.equal(tensor, buffer.state_dict()["tensors"][name]), name


def test_ids_are_split_at_the_last_underscore_and_name_this_buffer() -> None:
    buffer = AdvancedReplayBuffer(4, generator=0, name="a_b_c")
    buffer.push([{"x": torch.zeros(1)}] * 2)
    assert buffer.update({"replay_unique_id": "a_b_c_1", "priority": 2.0}) == 1
    assert buffer.update({"replay_unique_id": ["a_b_c_0", "a_b_c_9"], "priority": [3.0, 50.0]}) == 1
    assert buffer.max_priority == 3.0 and buffer.num_dead_updates == 1
    with pytest.raises(KeyError, match="a_b_c"):
        buffer.update({"replay_unique_id": ["a_b_0"], "priority": [3.0]})
    for wrong in ("a_b_c", "_3", "a_b_c_x", 3, "a_b_c_-1"):
        with pytest.raises(
            ValueError, match=r"^AdvancedReplayBuffer.update: ids must have the form"
        ):
            buffer.update({"replay_unique_id": [wrong], "priority": [3.0]})
    with pytest.raises(ValueError, match=r"expected .2."):
        buffer.update({"replay_unique_id": ["a_b_c_0", "a_b_c_1"], "priority": [3.0]})
    assert (
        buffer.update_priorities(torch.tensor([0, -1, 5, 1, 1]), torch.tensor([1.0, 2, 3, 4, 5]))
        == 3
    )
    actual = {x["replay_unique_id"]: x["priority"] for _ in range(20) for x in buffer.sample(2)}
    assert actual == pytest.approx({"a_b_c_0": 1 + 1e-5, "a_b_c_1": 5 + 1e-5})


@pytest.mark.parametrize("kind", KINDS)
def test_a_push_that_does_not_fit_adds_nothing(kind: Any) -> None:
    buffer = filled(kind, 4, 2)
    before = buffer.state_dict()
    wrong: list[Any] = [
        {k: v for k, v in item(2).items() if k != "reward"},
        {**item(2), "more": torch.zeros(1)},
        {**item(2), "reward": torch.zeros(2)},
        {**item(2), "array": np.full(2, 1j)},
        {**item(2), "a/b": 1},
        {**item(2), "": 1},
        {**item(2), 3: 1},
        "text",
        7,
    ]
    for bad in wrong:
        for call in (lambda b=bad: buffer.append(b), lambda b=bad: buffer.push([item(2), b])):
            with pytest.raises(
                (ValueError, TypeError), match=rf"^{kind.__name__}\.(append|push): "
            ):
                call()
    assert_equal_states(buffer.state_dict(), before)
    with pytest.raises(KeyError, match="reward"):
        buffer.append(wrong[0])
    buffer.push([])
    assert buffer.count() == 2


def test_items_without_tensors_and_with_mixed_leaves_are_stored() -> None:
    buffer = NaiveReplayBuffer(3, generator=0)
    buffer.extend([{"a": 1}, {"b": {"c": "x", "d": {}}}, {}, {"a": None}])
    actual = sorted((x for x in buffer.sample(3)), key=lambda x: x["replay_buffer_idx"])
    plain = [{k: v for k, v in x.items() if not k.startswith("replay_")} for x in actual]
    assert plain == [{"a": None}, {"b": {"c": "x", "d": {}}}, {}]


def test_numbers_among_objects_become_tensors_in_batches() -> None:
    buffer = AdvancedReplayBuffer(4, generator=0)
    for number in range(4):
        buffer.append(
            {
                "x": torch.tensor([float(number)]),
                "info": {"reward": 0.5 * number, "name": f"n{number}"},
            }
        )
    batch, _, ids = buffer.sample_tensors(4)
    assert torch.equal(batch["info"]["reward"], 0.5 * ids) and batch["info"]["name"] == [
        f"n{i}" for i in ids.tolist()
    ]


def test_a_monitor_counts_pushed_and_sampled_items() -> None:
    monitor = BufferMonitor()
    buffer = AdvancedReplayBuffer(8, generator=0, monitor=monitor)
    buffer.push([{"x": torch.zeros(1), "priority": 2.0, "collect_iter": 1}, {"x": torch.zeros(1)}])
    buffer.extend_tensors({"x": torch.zeros(3, 1)})
    buffer.sample(5, 5)
    buffer.sample_tensors(2)
    actual = monitor.snapshot()
    assert actual["pushed/total"] == 5 and actual["sampled/total"] == 7
    assert (
        actual["in/ticks"] == 2 and actual["in/priority_max"] == 2.0 and actual["in/size_mean"] > 0
    )
    assert (
        actual["out/ticks"] == 2 and actual["out/staleness_max"] == 4 and actual["out/use_min"] == 1
    )
    assert all(isinstance(value, (int, float)) for value in actual.values())
    assert "\n" not in monitor.text()
    monitor.reset()
    assert monitor.snapshot()["pushed/total"] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_clear_and_close(kind: Any) -> None:
    buffer = filled(kind, 4, 6)
    buffer.clear()
    assert buffer.count() == 0 and buffer.push_count == 0 and buffer.sample(1) is None
    buffer.append(item(7))
    assert buffer.sample(1)[0]["replay_unique_id"] == "buffer_0"
    with buffer:
        buffer.start()
    buffer.close()
    assert buffer.count() == 0
    for call in (lambda: buffer.append(item(1)), lambda: buffer.sample(1)):
        with pytest.raises(ValueError, match="closed"):
            call()


def test_d10_used_data_lists_an_id_once_after_its_last_sample_is_released() -> None:
    buffer = AdvancedReplayBuffer(
        3, max_use=2, min_sample_ratio=0, generator=0, enable_track_used_data=True
    )
    queue = buffer.used_data()
    for number in range(3):
        buffer.append({"x": torch.zeros(1), "data_id": f"file {number}"})
    first = buffer.sample(3)
    assert sorted(x["data_id"] for x in first) == ["file 0", "file 1", "file 2"]
    # Now each was used twice and is removed, but both samples are at work
    second = buffer.sample(3)
    assert buffer.count() == 0 and queue.empty()
    ids = [x["data_id"] for x in first]
    buffer.update({"used_id": ids})
    assert queue.empty()
    buffer.update({"used_id": [second[0]["data_id"]] * 2})  # copies in one call are one sample's
    assert list(queue) == [second[0]["data_id"]]
    buffer.update({"used_id": ids + ["unknown"]})
    assert sorted(queue) == sorted(set(ids) - {second[0]["data_id"]})
    buffer.update({"used_id": ids})
    assert queue.empty()
    # Overwritten and stale data is given out as well.
    for number in range(10, 15):
        buffer.append({"x": torch.zeros(1), "data_id": number})
    assert list(queue) == [10, 11]
    buffer.clear()
    assert sorted(queue) == [12, 13, 14]
    with pytest.raises(UsageError, match="enable_track_used_data"):
        AdvancedReplayBuffer(3).used_data()


@pytest.mark.parametrize(
    "options",
    [
        {"replay_buffer_size": 0},
        {"replay_buffer_size": 2.5},
        {"replay_start_size": -1},
        {"max_use": 0},
        {"max_staleness": -1},
        {"max_use": math.nan},
        {"min_sample_ratio": -1},
        {"alpha": -0.1},
        {"beta": 1.1},
        {"anneal_step": -1},
        {"eps": math.nan},
        {"name": ""},
        {"name": 3},
    ],
)
def test_invalid_options_of_a_buffer_raise(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^AdvancedReplayBuffer: "):
        AdvancedReplayBuffer(**{"replay_buffer_size": 4, **options})


def test_sizes_and_iterations_must_be_numbers() -> None:
    buffer = filled(AdvancedReplayBuffer, 4, 4)
    for call in (
        lambda: buffer.sample(-1),
        lambda: buffer.sample(True),
        lambda: buffer.sample(1.5),
        lambda: buffer.sample(1, "now"),
        lambda: buffer.sample_tensors(0),
        lambda: buffer.update_priorities(torch.tensor([0.5]), 1.0),
        lambda: buffer.append({**item(1), "collect_iter": "now"}),
    ):
        with pytest.raises(ValueError, match=r"^AdvancedReplayBuffer[.]"):
            call()
    assert buffer.push_count == 4
