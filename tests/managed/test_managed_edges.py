"""Used data, limiters and threads, the order of items of a manager, and extreme weights."""

from __future__ import annotations

import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from storage import (
    AdvancedReplayBuffer,
    BufferManager,
    EpisodeReplayBuffer,
    NaiveReplayBuffer,
    PrioritizedWindows,
    RateLimitedError,
    RateLimiter,
)
from storage.errors import ClosedError, RolloutDataError, UsageError

TINY = torch.finfo(torch.float32).tiny
PATIENCE_S = 60


def item(number: int, **leaves: Any) -> dict[str, Any]:
    return {"x": torch.tensor([float(number)]), **leaves}


# Which data is used.


def test_data_ids_of_stored_items_are_not_in_used_data() -> None:
    buffer = AdvancedReplayBuffer(2, enable_track_used_data=True, generator=0)
    queue = buffer.used_data()
    buffer.push([item(0, data_id="a"), item(1, data_id="a")])
    # "a" goes twice and comes once, in one push
    buffer.push([item(2, data_id="a"), item(3, data_id="b")])
    assert list(queue) == []
    buffer.push([item(4, data_id="c")])
    assert len(queue) == 1, "nothing holds it any more"
    buffer.push([item(5, data_id="a")])  # and now something does again
    assert list(queue) == ["b"] and queue.empty()
    # X is passed by and stays
    buffer.push([item(number, data_id=name) for number, name in enumerate("xyxz")])
    assert sorted(queue) == ["a", "c", "y"]
    buffer.clear()
    assert sorted(queue) == ["x", "z"]


def test_a_data_id_is_used_only_after_all_its_items_and_samples() -> None:
    buffer = AdvancedReplayBuffer(
        4, max_use=1, min_sample_ratio=0, enable_track_used_data=True, generator=0
    )
    queue = buffer.used_data()
    buffer.push(item(0, data_id=7))
    assert len(buffer.sample(1)) == 1 and list(queue) == []  # used up, but a sample has it
    buffer.push(item(1, data_id=7))
    buffer.update({"used_id": [7]})
    assert list(queue) == []  # the sample is done, but an item has it
    assert len(buffer.sample(1)) == 1
    assert list(queue) == []
    buffer.update({"used_id": [7]})
    assert list(queue) == [7]


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_used_data_never_has_an_id_of_a_stored_item_or_an_open_sample(data: st.DataObject) -> None:
    buffer = AdvancedReplayBuffer(
        5, max_use=2, min_sample_ratio=0, enable_track_used_data=True, generator=0
    )
    queue = buffer.used_data()
    live: dict[str, str] = {}  # unique id -> data
    samples: list[set[str]] = []
    queued: set[str] = set()
    total = 0
    uses: Counter[str] = Counter()
    for _ in range(data.draw(st.integers(1, 25))):
        kind = data.draw(st.sampled_from(["push", "push", "sample", "release", "take"]))
        if kind == "push":
            names = data.draw(st.lists(st.sampled_from("abcd"), min_size=1, max_size=8))
            buffer.push([item(0, data_id=name) for name in names])
            queued -= set(names)
            for name in names:
                live[f"buffer_{total}"] = name
                live.pop(f"buffer_{total - 5}", None)
                total += 1
        elif kind == "sample" and live:
            actual = buffer.sample(data.draw(st.integers(1, 3)))
            samples.append({entry["data_id"] for entry in actual})
            uses.update(entry["replay_unique_id"] for entry in actual)
            live = {name: value for name, value in live.items() if uses[name] < 2}
        elif kind == "release" and samples:
            buffer.update(
                {"used_id": list(samples.pop(data.draw(st.integers(0, len(samples) - 1))))}
            )
        held = {*live.values(), *(name for sample in samples for name in sample)}
        waiting = set(queue.queue)
        assert not waiting & held and len(waiting) == len(queue)
        if kind == "take":
            taken = list(queue)
            assert not queued & set(taken), "each comes once"
            queued |= set(taken)
    buffer.clear()
    for sample in samples:
        buffer.update({"used_id": list(sample)})
    assert queued | set(queue) >= set(live.values()), "nothing is forgotten"


@pytest.mark.parametrize("wrong", [("y", [1]), torch.arange(3), np.arange(3), [4]], ids=repr)
def test_an_unhashable_data_id_raises_and_changes_nothing(wrong: Any) -> None:
    buffer = AdvancedReplayBuffer(2, min_sample_ratio=0, enable_track_used_data=True, generator=0)
    buffer.push(item(0, data_id=1))
    buffer.sample(1)
    with pytest.raises(UsageError, match="hashable"):
        buffer.push([item(1, data_id=2), {**item(2), "data_id": wrong}])
    assert buffer.count() == buffer.push_count == 1
    buffer.push([item(3, data_id=3), item(4, data_id=3)])
    with pytest.raises(UsageError, match="hashable"):
        buffer.update({"used_id": [1, wrong]})
    assert list(buffer.used_data()) == []


@pytest.mark.parametrize(
    "form",
    [list, tuple, set, frozenset, iter, np.array, torch.tensor, lambda ids: map(torch.tensor, ids)],
)
@pytest.mark.parametrize("is_managed", [False, True])
def test_used_id_accepts_any_iterable_of_data_ids(
    form: Callable[[Any], Any], is_managed: bool
) -> None:
    options = {
        "replay_buffer_size": 2,
        "min_sample_ratio": 0,
        "enable_track_used_data": True,
        "generator": 0,
    }
    manager = BufferManager({"buffer_name": ["a", "b"], "a": options, "b": options})
    manager.push_data([item(0, data_id=1), item(1, data_id=2)], ["a", "b"])
    held = sorted({item["data_id"] for item in manager.sample({"b": 8})["b"]})
    manager.clear()
    assert not set(manager.used_data("b")) & set(held)
    (manager if is_managed else manager["b"]).update({"used_id": form(held)})
    assert sorted(manager.used_data("b")) == held == [1, 2]


# Limiters and threads.


def limited(
    samples_per_insert: float = 1.0, tolerance: float = 8.0, **options: Any
) -> dict[str, Any]:
    limits = {"samples_per_insert": samples_per_insert, "tolerance": tolerance, **options}
    return {"replay_buffer_size": 50, "type": "naive", "rate_limiter": limits}


class Thread(threading.Thread):
    """A thread that stores the result or the error of its function."""

    def __init__(self, work: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self.work, self.found, self.failure = work, None, None
        self.start()

    def run(self) -> None:
        try:
            self.found = self.work()
        except RolloutDataError as failure:
            self.failure = failure

    def result(self) -> Any:
        self.join(PATIENCE_S)
        assert not self.is_alive(), "it hangs"
        if self.failure is not None:
            raise self.failure
        return self.found


@pytest.mark.parametrize("asks", ["names", "number", "tensors"])
def test_a_waiting_sample_lets_other_threads_sample_and_push(asks: str) -> None:
    kind = {"type": "advanced"} if asks == "tensors" else {}
    manager = BufferManager(
        {
            "buffer_name": ["a", "b"],
            "sample_ratio": {"a": 1.0},
            "a": {**limited(min_inserts=4), **kind},
            "b": {**limited(), **kind},
        },
        generator=0,
    )
    manager.push_data([item(number) for number in range(6)], "b")
    method = manager.sample_tensors if asks == "tensors" else manager.sample
    waits = Thread(lambda: method(4 if asks == "number" else {"a": 2, "b": 2}))
    waits.join(0.2)
    assert waits.is_alive(), "the limiter of a lets no sample pass yet"

    def learn_and_push() -> Any:
        assert method({"b": 1}) is not None  # at once, though another thread waits in the manager
        assert manager.sample_check({"b": 1}) and not manager.sample_check({"a": 1})
        manager.push_data([item(number) for number in range(6)], "a")
        return "done"

    assert Thread(learn_and_push).result() == "done"
    actual = waits.result()
    assert len(actual) == (4 if asks == "number" else 2)


def test_a_draw_that_waits_for_one_limiter_is_not_counted_by_another() -> None:
    manager = BufferManager(
        {
            "buffer_name": ["a", "b"],
            "a": limited(tolerance=4),
            "b": limited(tolerance=4, min_inserts=3),
        },
        generator=0,
    )
    manager.push_data([item(number) for number in range(4)], "a")
    waits = Thread(lambda: manager.sample({"a": 4, "b": 1}))
    waits.join(0.2)
    assert waits.is_alive() and manager["a"].rate_limiter.num_sampled == 0
    assert len(Thread(lambda: manager.sample({"a": 4})).result()["a"]) == 4
    for _ in range(4):
        Thread(lambda: manager.push_data(item(1), ["a", "b"])).result()
    actual = waits.result()
    assert len(actual["a"]) == 4 and len(actual["b"]) == 1
    assert manager["a"].rate_limiter.num_sampled == 8 and manager["b"].rate_limiter.num_sampled == 1


def test_a_push_that_waits_for_one_limiter_is_not_counted_by_another() -> None:
    manager = BufferManager(
        {
            "buffer_name": ["a", "b"],
            "a": limited(tolerance=16, min_inserts=4),
            "b": limited(tolerance=6),
        },
        generator=0,
    )
    for number in range(6):
        manager.push_data(item(number), "b")
    pushes = Thread(lambda: manager.push_data([item(number) for number in range(4)], ["a", "b"]))
    waits = Thread(lambda: manager.sample({"a": 2}))
    pushes.join(0.2)
    assert pushes.is_alive(), "b has to be sampled first"
    assert waits.is_alive(), (
        "there is nothing in a, which is no answer of a limiter that lets others wait"
    )
    assert manager["a"].rate_limiter.num_inserted == 0
    assert len(manager.sample({"b": 4})["b"]) == 4
    pushes.result()
    assert len(waits.result()["a"]) == 2


def test_a_failed_draw_does_not_open_its_limiter() -> None:
    limits = {"samples_per_insert": 1.0, "tolerance": 4.0, "min_inserts": 0, "blocking": False}
    buffer = EpisodeReplayBuffer(2, rate_limiter=limits, generator=0)
    buffer.extend([[item(number)] for number in range(3)])
    begun, may_go_on = threading.Event(), threading.Event()

    def slow_episode() -> Any:
        begun.set()
        may_go_on.wait(PATIENCE_S)
        yield item(3)

    holds = Thread(lambda: buffer.append(slow_episode()))  # the fourth: one more may not come
    assert begun.wait(PATIENCE_S)
    refused = Thread(lambda: buffer.sample(3))
    refused.join(0.2)
    other = Thread(lambda: buffer.append([item(4)]))
    other.join(0.2)
    may_go_on.set()
    holds.result()
    assert refused.result() is None
    with pytest.raises(RateLimitedError):
        other.result()
    assert buffer.rate_limiter.balance == 4


def test_a_state_dict_during_samples_is_consistent() -> None:
    names = ["a", "b"]
    options: dict[str, Any] = {"replay_buffer_size": 50, "type": "naive"}
    cfg = {
        "buffer_name": names,
        "sample_ratio": {"a": 0.5, "b": 0.5},
        **dict.fromkeys(names, options),
    }
    manager = BufferManager(cfg, generator=0)
    manager.push_data([item(number) for number in range(50)], names)

    def drawn() -> list[str]:
        return [item["replay_unique_id"] for item in manager.sample(6)]

    is_over, interval_s = threading.Event(), sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        samples = Thread(lambda: [drawn() for _ in iter(is_over.is_set, True)])
        states = [manager.state_dict() for _ in range(200)]
        is_over.set()
        seen = [*samples.result(), drawn()]
    finally:
        sys.setswitchinterval(interval_s)
    for state in states:
        manager.load_state_dict(state)
        assert drawn() in seen


def test_a_wait_ends_at_its_time_limit_and_at_close_of_the_manager() -> None:
    manager = BufferManager(
        {"buffer_name": ["a"], "a": limited(min_inserts=9, timeout_s=0.1)}, generator=0
    )
    manager.push_data(item(0))
    before = manager.rng.get_state()
    assert Thread(lambda: manager.sample(2)).result() is None and torch.equal(
        manager.rng.get_state(), before
    )
    endless = BufferManager({"buffer_name": ["a"], "a": limited(min_inserts=9)}, generator=0)
    waits = Thread(lambda: endless.sample(2))
    waits.join(0.1)
    assert waits.is_alive()
    endless.close()
    with pytest.raises(ClosedError):
        waits.result()
    assert not endless.sample_check(1)


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from([NaiveReplayBuffer, AdvancedReplayBuffer, EpisodeReplayBuffer]),
    calls=st.lists(st.tuples(st.booleans(), st.integers(0, 6)), max_size=30),
    tolerance=st.floats(6, 12),
    min_inserts=st.integers(0, 6),
)
def test_sample_check_predicts_sample_of_a_limited_buffer(
    kind: Any, calls: list[tuple[bool, int]], tolerance: float, min_inserts: int
) -> None:
    limits = {
        "samples_per_insert": 1.0,
        "tolerance": tolerance,
        "min_inserts": min_inserts,
        "blocking": False,
    }
    buffer = kind(8, rate_limiter=limits, generator=0)
    for is_push, size in calls:
        if is_push and buffer.rate_limiter.may_insert(size):
            buffer.extend(
                [[item(n)] if kind is EpisodeReplayBuffer else item(n) for n in range(size)]
            )
        counts = buffer.rate_limiter.snapshot()
        expected = buffer.sample_check(size)
        assert buffer.rate_limiter.snapshot() == counts, "a question counts nothing"
        assert expected == (buffer.sample(size) is not None)


@pytest.mark.parametrize("blocking", [False, True])
def test_sample_check_predicts_sample_of_a_limited_manager(blocking: bool) -> None:
    limits = {
        "samples_per_insert": 1.0,
        "tolerance": 12.0,
        "min_inserts": 3,
        "blocking": blocking,
        "timeout_s": 0.01,
    }
    entry = {"replay_buffer_size": 20, "type": "naive", "rate_limiter": limits}
    ratio = {"a": 0.37, "b": 0.63}
    manager = BufferManager(
        {"buffer_name": ["a", "b"], "sample_ratio": ratio, "a": entry, "b": entry}, generator=0
    )
    answers = Counter()
    for turn in range(150):
        if turn % 3 == 0 and all(manager[name].rate_limiter.may_insert(2) for name in "ab"):
            manager.push_data([item(turn), item(turn)], ["a", "b"])
        size = turn % 6
        expected = manager.sample_check(size)
        assert expected == (manager.sample(size) is not None)
        answers[expected] += 1
    assert min(answers.values()) > 20


def test_sample_and_sample_check_raise_if_the_tolerance_is_too_small() -> None:
    buffer = NaiveReplayBuffer(50, rate_limiter=RateLimiter(1.0, 4.0))
    buffer.push([item(number) for number in range(3)])
    for ask in (buffer.sample, buffer.sample_check):
        with pytest.raises(UsageError, match="tolerance must be at least"):
            ask(20)


# The order of a manager's list.


def test_each_position_of_a_managers_sample_has_items_of_each_buffer_by_ratio() -> None:
    shares = {"a": 0.5, "b": 0.3, "c": 0.2}
    entry = {"replay_buffer_size": 40, "type": "naive"}
    manager = BufferManager(
        {"buffer_name": [*shares], "sample_ratio": shares, "a": entry, "b": entry, "c": entry},
        generator=1,
    )
    for name in shares:
        manager.push_data([item(number) for number in range(40)], name)
    size, num_samples = 10, 2000
    at = np.zeros((size, 3))
    pairs: defaultdict[tuple[str, str], int] = defaultdict(int)
    for _ in range(num_samples):
        names = [x["replay_unique_id"][0] for x in manager.sample(size)]
        counts = Counter(names)
        assert all(abs(counts[name] - share * size) < 2 for name, share in shares.items())
        for place, name in enumerate(names):
            at[place, "abc".index(name)] += 1
        pairs[names[0], names[-1]] += 1
    expected = np.array([*shares.values()]) * num_samples
    deviation = (at - expected) / np.sqrt(expected * (1 - expected / num_samples))
    assert np.abs(deviation).max() < 4.5, "every position has every share"
    # Two positions of 5 a, 3 b, 2 c in random order: without replacement.
    for first, count in zip("abc", (5, 3, 2), strict=True):
        chance = count / 10 * (count - 1) / 9
        seen = pairs[first, first] / num_samples
        assert abs(seen - chance) < 4.5 * np.sqrt(chance * (1 - chance) / num_samples)


def test_items_of_a_managers_sample_are_not_ordered_by_age() -> None:
    manager = BufferManager({"buffer_name": ["a"], "a": {"replay_buffer_size": 100}}, generator=0)
    manager.push_data([item(number) for number in range(100)])
    places = np.zeros(20)
    for _ in range(300):
        places += [float(x["x"]) for x in manager.sample(20)]
    assert np.abs(places / 300 - 49.5).max() < 4.5 * 29 / np.sqrt(300), (
        "a part of the list is like the whole"
    )


# The ends of the numbers.


@pytest.mark.parametrize("size", [1, 64, 20_000])
def test_importance_weights_are_never_0(size: int) -> None:
    buffer = AdvancedReplayBuffer(4, alpha=1.0, beta=1.0, eps=0.0, min_sample_ratio=0, generator=0)
    priorities = [1e-200, 1e-100, 1e150, 1e250]
    buffer.push([item(number, priority=priority) for number, priority in enumerate(priorities)])
    _, weights, _ = buffer.sample_tensors(size)
    assert (
        weights.dtype == torch.float32 and bool((weights > 0).all()) and bool((weights <= 1).all())
    )
    assert bool((weights >= TINY).all()), "a number that processors may take for 0"
    for actual in (buffer.sample(4), buffer.sample(4, sample_range=slice(0, 4))):
        assert all(0 < entry["IS"] <= 1 and np.float32(entry["IS"]) > 0 for entry in actual)
    windows = PrioritizedWindows(20, 2, alpha=1.0, beta=1.0, eps=0.0, generator=0)
    windows.extend({"x": torch.zeros(20, 1, 1), "done": torch.zeros(20, 1, 1)})
    _, _, ids = windows.sample(400)
    ids = ids.unique()
    windows.update_priorities(ids, torch.logspace(-150, 150, len(ids), dtype=torch.float64))
    _, weights, _ = windows.sample(size)
    assert bool((weights > 0).all()) and bool((weights <= 1).all())


def test_importance_weights_equal_the_formula_where_they_do_not_underflow() -> None:
    buffer = AdvancedReplayBuffer(3, alpha=1.0, beta=1.0, eps=0.0, generator=0)
    buffer.push(
        [item(number, priority=priority) for number, priority in enumerate([1.0, 2.0, 8.0])]
    )
    for sample_range in (None, slice(0, 3)):
        for entry in buffer.sample(3, 0, sample_range):
            assert entry["IS"] == pytest.approx(1 / entry["priority"], rel=1e-12)


@pytest.mark.parametrize("way", ["push", "extend", "update"])
def test_every_priority_above_0_can_be_drawn(way: str) -> None:
    buffer = AdvancedReplayBuffer(4, alpha=3.0, eps=0.0, min_sample_ratio=0, generator=0)
    priorities = [1e-200, 1e-150, 5e-324, 0.0]
    if way == "push":
        buffer.push([item(number, priority=priority) for number, priority in enumerate(priorities)])
    else:
        batch = {"x": torch.arange(4.0)[:, None]}
        ids = buffer.extend_tensors(
            batch, torch.tensor(priorities, dtype=torch.float64) if way == "extend" else 1.0
        )
        if way == "update":
            buffer.update_priorities(ids, torch.tensor(priorities, dtype=torch.float64))
    assert buffer.sample_check(3)
    drawn = Counter(int(item["x"]) for item in buffer.sample(30_000))
    assert drawn[3] == 0 and drawn[0] and drawn[1], drawn
    assert buffer.check_valid() == (True, "")


def test_equal_tiny_priorities_are_drawn_uniformly() -> None:
    buffer = AdvancedReplayBuffer(4, alpha=2.0, eps=0.0, generator=0)
    buffer.extend_tensors({"x": torch.arange(4.0)[:, None]}, 1e-170)
    batch, weights, _ = buffer.sample_tensors(4)
    assert batch["x"].flatten().tolist() == [0, 1, 2, 3] and bool((weights == 1).all())
