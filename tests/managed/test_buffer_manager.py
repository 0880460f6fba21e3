"""`BufferManager`: shares, routing, all-or-nothing calls, and errors of earlier systems with
several buffers.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from storage import BufferManager, RateLimitedError
from tests.managed.naive_model import item, number_of
from tests.managed.test_managed_traps import assert_equal_states

NAMES = ["agent", "demo_of_a_human", "x_7"]


def make(
    names: list[str] = NAMES, ratio: Any = None, seed: int = 0, size: int = 20, **options: Any
) -> BufferManager:
    cfg = {
        name: {"replay_buffer_size": size, "generator": seed + i, **options}
        for i, name in enumerate(names)
    }
    return BufferManager(
        {"buffer_name": names, **({} if ratio is None else {"sample_ratio": ratio}), **cfg},
        generator=seed,
    )


def fill(manager: BufferManager, num_items: int = 20) -> None:
    for place, name in enumerate(manager.buffer_name):
        manager.push_data([item(1000 * place + number) for number in range(num_items)], name)


@pytest.mark.parametrize("num_buffers", [1, 2, 3, 5, 7])
def test_d1_a_sample_is_divided_among_any_number_of_buffers(num_buffers: int) -> None:
    names = [f"b_{place}" for place in range(num_buffers)]
    ratio = dict.fromkeys(names, 1 / num_buffers)
    manager = make(names, ratio, size=200, min_sample_ratio=0)
    fill(manager, 100)
    seen: Counter[str] = Counter()
    for _ in range(30):
        actual = manager.sample(100)
        assert len(actual) == 100
        counts = Counter(x["replay_unique_id"].rpartition("_")[0] for x in actual)
        assert all(abs(counts[name] - 100 / num_buffers) < 2 for name in names)
        assert all(number_of(x) // 1000 == int(x["replay_unique_id"].split("_")[1]) for x in actual)
        seen += counts
    assert all(abs(seen[name] - 3000 / num_buffers) <= 15 for name in names)


def test_d1_ratios_are_compared_with_a_tolerance() -> None:
    manager = make(ratio={"agent": 0.7, "demo_of_a_human": 0.2, "x_7": 0.1})
    assert manager.sample_ratio == {"agent": 0.7, "demo_of_a_human": 0.2, "x_7": 0.1}
    make(ratio={"agent": 1 / 3, "demo_of_a_human": 1 / 3, "x_7": 0.333333})
    wrong: list[Any] = [
        {"agent": 0.7, "demo_of_a_human": 0.2},
        {"agent": 0.5, "demo_of_a_human": 0.5, "x_7": 1e-5},
        {"agent": 1.2, "demo_of_a_human": -0.2},
        {"agent": float("nan"), "x_7": 1.0},
        {"agent": "1"},
        [0.7, 0.2, 0.1],
    ]
    for ratio in wrong:
        with pytest.raises(ValueError, match=r"^BufferManager: "):
            make(ratio=ratio)
    with pytest.raises(KeyError, match="'agent'"):
        make(ratio={"agents": 1.0})
    assert make(ratio={"agent": 1.0}).sample_ratio == {
        "agent": 1.0,
        "demo_of_a_human": 0.0,
        "x_7": 0.0,
    }


def test_d2_ids_are_routed_by_the_name_before_the_last_underscore() -> None:
    manager = make(["a", "a_b", "a_b_1"], {"a": 0.25, "a_b": 0.25, "a_b_1": 0.5})
    fill(manager)
    actual = manager.sample({"a": 3, "a_b": 2, "a_b_1": 4})
    mixed = [
        x
        for items in zip(actual["a_b_1"][:2], actual["a_b"], actual["a"][:2], strict=True)
        for x in items
    ]
    names = [x["replay_unique_id"] for x in mixed]
    priorities = [2.0 + place for place in range(len(mixed))]
    assert manager.update({"replay_unique_id": names, "priority": priorities}) == len(mixed)
    for name, priority in zip(names, priorities, strict=True):
        buffer, _, row = name.rpartition("_")
        kept = manager[buffer].state_dict()["tensors"]["priorities"]
        assert float(kept[int(row)]) == pytest.approx(priority + 1e-5)


def test_an_unknown_buffer_name_raises_key_error_and_changes_nothing() -> None:
    manager = make(ratio={"agent": 0.5, "x_7": 0.5})
    fill(manager)
    before = manager.state_dict()
    entry = manager.sample({"agent": 1})["agent"][0]["replay_unique_id"]
    manager.load_state_dict(before)
    calls = [
        lambda: manager.push_data(item(1), "agents"),
        lambda: manager.push_data(item(1), ["agent", "demo"]),
        lambda: manager.push_data([item(1, buffer_name="agent"), item(2, buffer_name="absent")]),
        lambda: manager.sample({"agent": 1, "absent": 2}),
        lambda: manager.sample(4, sample_ratio={"absent": 1.0}),
        lambda: manager.update({"replay_unique_id": [entry, "absent_3"], "priority": [5.0, 1.0]}),
        lambda: manager.count("absent"),
        lambda: manager.clear(["agent", "absent"]),
        lambda: manager.used_data("absent"),
        lambda: manager["absent"],
        lambda: manager.update_priorities({"absent": [1]}, {"absent": [1.0]}),
    ]
    for call in calls:
        with pytest.raises(KeyError, match=r"absent|agents|demo"):
            call()
    for bad in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="priorities must be finite and >= 0"):
            manager.update({"replay_unique_id": [entry, "x_7_1"], "priority": [5.0, bad]})
        with pytest.raises(ValueError, match="priorities must be finite and >= 0"):
            manager.update_priorities({"agent": [1], "x_7": [1]}, {"agent": [9.0], "x_7": [bad]})
    with pytest.raises(ValueError, match="one priority per id, got 1 for 2"):
        manager.update({"replay_unique_id": [entry, "x_7_1"], "priority": [5.0]})
    assert_equal_states(manager.state_dict(), before)


def test_d3_sample_ratio_of_a_call_applies_to_that_call_only() -> None:
    manager = make(ratio={"agent": 0.5, "x_7": 0.5}, min_sample_ratio=0)
    fill(manager)
    first = manager.sample(10, sample_ratio={"demo_of_a_human": 1.0})
    assert {x["replay_unique_id"].rpartition("_")[0] for x in first} == {"demo_of_a_human"}
    assert manager.sample_ratio == {"agent": 0.5, "demo_of_a_human": 0.0, "x_7": 0.5}
    assert {x["replay_unique_id"].rpartition("_")[0] for x in manager.sample(10)} == {
        "agent",
        "x_7",
    }
    with pytest.raises(ValueError, match="several buffers: 'agent', 'demo_of_a_human', 'x_7'"):
        manager.push_data(item(1))
    manager["agent"].clear()
    assert manager.count() == 0 and manager.count("x_7") == 20
    with pytest.raises(ValueError, match="sample_ratio is missing"):
        make().sample(3)
    single = make(["only"])
    single.push_data(item(1))
    single.append(item(2))
    single.extend([item(3), item(4)])
    assert single.count() == 4 and len(single.sample(4)) == 4


def test_d4_sample_draws_from_all_buffers_or_from_none() -> None:
    manager = make(
        ratio={"agent": 0.5, "demo_of_a_human": 0.25, "x_7": 0.25}, max_use=3, max_staleness=10
    )
    manager.push_data([item(n, collect_iter=0 if n < 5 else 9) for n in range(20)], "agent")
    manager.push_data([item(n, collect_iter=9) for n in range(20)], "demo_of_a_human")
    manager.push_data([item(n, collect_iter=0) for n in range(20)], "x_7")
    before = manager.state_dict()
    assert manager.sample({"agent": 5, "demo_of_a_human": 21}) is None
    assert_equal_states(manager.state_dict(), before)
    # Stale items go, in the buffer that refuses and in the others; that is all.
    assert manager.sample({"agent": 4, "x_7": 1}, 12) is None
    assert manager.count("agent") == 15 and manager.count("x_7") == 0
    state = manager.state_dict()
    assert state["numbers"]["buffers"]["agent"]["num_draws"] == 0
    assert not state["tensors"]["buffer/0/uses"].any()
    assert manager.sample_check({"agent": 15}, 12) and not manager.sample_check({"agent": 16}, 12)
    assert not manager.sample_check(8, 12) and manager.sample_check(
        8, 12, {"agent": 0.5, "demo_of_a_human": 0.5}
    )
    generator = manager.rng.get_state()
    assert manager.sample(8, 12) is None and torch.equal(manager.rng.get_state(), generator)


def test_d5_an_item_pushed_to_several_buffers_is_copied() -> None:
    manager = make()
    entry = item(3)
    manager.push_data([entry, item(4)], ["agent", "x_7"])
    assert (
        manager.count("agent") == manager.count("x_7") == 2
        and manager.count("demo_of_a_human") == 0
    )
    for actual in manager.sample({"agent": 2})["agent"]:
        actual["sequence"].append("changed")
        actual["observation"]["joints"].fill_(-1)
    assert sorted(number_of(x) for x in manager.sample({"x_7": 2})["x_7"]) == [3, 4]
    entry["sequence"].append("changed")
    assert sorted(number_of(x) for x in manager.sample({"agent": 2})["agent"]) == [3, 4]


def test_buffer_name_of_an_item_selects_its_buffer() -> None:
    manager = make()
    manager.push_data([item(1, buffer_name="x_7"), item(2, buffer_name=["agent", "x_7"])])
    manager.push_data(item(3, buffer_name="x_7"), "agent")  # who is told wins
    assert [manager.count(name) for name in NAMES] == [2, 0, 2]
    with pytest.raises(ValueError, match="Pass buffer_name"):
        manager.push_data([item(4, buffer_name="agent"), item(5)])
    assert [manager.count(name) for name in NAMES] == [2, 0, 2]


def test_a_push_that_fails_in_one_buffer_changes_no_buffer() -> None:
    manager = make()
    fill(manager, 3)
    manager["x_7"].clear()
    before = manager.state_dict()
    with pytest.raises(KeyError, match="reward"):
        manager.push_data(
            {k: v for k, v in item(9).items() if k != "reward"}, ["demo_of_a_human", "agent"]
        )
    assert_equal_states(manager.state_dict(), before)
    limited = BufferManager(
        {
            "buffer_name": ["a", "b"],
            "a": {"replay_buffer_size": 9},
            "b": {
                "replay_buffer_size": 9,
                "rate_limiter": {
                    "samples_per_insert": 1,
                    "tolerance": 2,
                    "min_inserts": 1,
                    "blocking": False,
                },
            },
        }
    )
    for _ in range(3):
        limited.push_data({"x": torch.zeros(1)}, ["a", "b"])
    with pytest.raises(RateLimitedError):
        limited.push_data({"x": torch.zeros(1)}, ["a", "b"])
    assert limited.count("a") == limited.count("b") == 3
    assert limited.sample({"a": 9, "b": 1}) is None, (
        "a refuses, and b's limiter gets back what it let pass"
    )
    assert limited["b"].rate_limiter.num_sampled == 0


def test_a_request_larger_than_a_buffer_returns_none_and_zero_returns_no_items() -> None:
    manager = make(ratio={"agent": 0.75, "demo_of_a_human": 0.25})
    fill(manager)
    assert manager.sample(40) is None and manager.sample({"agent": 21}) is None
    assert len(manager.sample(24)) == 24 and manager.sample(0) == []
    assert manager.sample({"agent": 0, "x_7": 2})["agent"] == []
    for wrong in (-1, 2.5, True, {"agent": -1}):
        with pytest.raises(ValueError, match=r"^BufferManager\.sample: "):
            manager.sample(wrong)


def test_sample_tensors_returns_batches_by_name_and_update_accepts_them() -> None:
    manager = make(ratio={"agent": 0.75, "demo_of_a_human": 0.25}, size=100)
    for place, name in enumerate(NAMES[:2]):
        manager[name].extend_tensors({"x": 1000.0 * place + torch.arange(100.0)})
    actual = manager.sample_tensors(64)
    assert set(actual) == {"agent", "demo_of_a_human"}
    assert (
        sum(len(ids) for _, _, ids in actual.values()) == 64 and 47 <= len(actual["agent"][2]) <= 49
    )
    priorities = {name: batch["x"] % 7 for name, (batch, _, _) in actual.items()}
    assert (
        manager.update_priorities({n: ids for n, (_, _, ids) in actual.items()}, priorities) == 64
    )
    assert manager.sample_tensors({"agent": 200}) is None
    with pytest.raises(ValueError, match="must have the same buffers"):
        manager.update_priorities({"agent": [1]}, {})


def test_buffers_of_a_manager_may_have_different_types() -> None:
    cfg = {
        "buffer_name": ["p", "n", "e"],
        "p": {"replay_buffer_size": 5, "enable_track_used_data": True},
        "n": {"type": "naive", "replay_buffer_size": 5},
        "e": {"type": "episode", "replay_buffer_size": 5},
        "sample_ratio": {"p": 0.5, "n": 0.5},
    }
    with BufferManager(cfg) as manager:
        manager.run()
        manager.push_data([item(n, data_id=n) for n in range(7)], ["p", "n"])
        manager.push_data([item(1), item(2)], "e")
        assert manager.count("e") == 1 and manager.count() == 1
        assert list(manager.used_data("p")) == [0, 1]
        actual = manager.sample({"p": 2, "n": 3, "e": 1})
        assert len(actual["e"][0]) == 2
        names = [x["replay_unique_id"] for x in actual["p"] + actual["n"]]
        assert (
            manager.update({"replay_unique_id": names, "priority": [1.0] * 5, "used_id": [5, 6]})
            == 2
        )
        with pytest.raises(ValueError, match="type 'advanced'"):
            manager.used_data("n")
        with pytest.raises(ValueError, match="type 'advanced'"):
            manager.sample_tensors({"n": 1})
        manager.clear("e")
        manager.clear()
        assert manager.count() == 0
    manager.close()
    for call in (lambda: manager.push_data(item(1), "p"), lambda: manager.sample({"p": 1})):
        with pytest.raises(ValueError, match="closed"):
            call()


@pytest.mark.parametrize(
    ("cfg", "text"),
    [
        ({}, "buffer_name"),
        ({"buffer_name": []}, "a list of names"),
        ({"buffer_name": "agent"}, "a list of names"),
        ({"buffer_name": ["a", "a"], "a": {"replay_buffer_size": 1}}, "the duplicate name 'a'"),
        (
            {"buffer_name": [""], "": {"replay_buffer_size": 1}},
            "must be non-empty str",
        ),
        (
            {"buffer_name": ["sample_ratio"], "sample_ratio": {"replay_buffer_size": 1}},
            "is reserved",
        ),
        ({"buffer_name": ["a"]}, "must be the arguments of the buffer"),
        (
            {"buffer_name": ["a"], "a": {"replay_buffer_size": 1, "type": "advance"}},
            "type of 'a' must be one of 'advanced'",
        ),
        ({"buffer_name": ["a"], "a": {"replay_buffer_size": 1, "size": 2}}, "AdvancedReplayBuffer"),
        (
            {"buffer_name": ["a"], "a": {"replay_buffer_size": 1}, "sample_ration": {"a": 1}},
            "'sample_ratio'",
        ),
        (None, "a mapping"),
    ],
)
def test_an_invalid_configuration_raises_with_the_reason(cfg: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        BufferManager(cfg)


def test_d12_load_state_dict_is_strict_or_by_name() -> None:
    manager = make(ratio={"agent": 1.0})
    fill(manager)
    state = manager.state_dict()
    other = make(["x_7", "new", "agent"], {"new": 1.0}, seed=3)
    before = other.state_dict()
    with pytest.raises(ValueError, match=r"^BufferManager.load_state_dict: "):
        other.load_state_dict(state)
    assert_equal_states(other.state_dict(), before)
    other.load_state_dict(state, strict=False)
    assert [other.count(name) for name in ("x_7", "new", "agent")] == [20, 0, 20]
    assert other.sample_ratio == {"x_7": 0.0, "new": 1.0, "agent": 0.0}
    assert [x["replay_unique_id"] for x in other.sample({"agent": 5})["agent"]] == [
        x["replay_unique_id"] for x in manager.sample({"agent": 5})["agent"]
    ]
    unlike = make(["agent"], alpha=0.9)
    with pytest.raises(ValueError, match="alpha"):
        unlike.load_state_dict(state, strict=False)
    broken = {
        **state,
        "tensors": {k: v for k, v in state["tensors"].items() if k != "buffer/2/weights"},
    }
    before = manager.state_dict()
    with pytest.raises(ValueError, match=r"^BufferManager.load_state_dict: "):
        manager.load_state_dict(broken)
    assert_equal_states(manager.state_dict(), before)
