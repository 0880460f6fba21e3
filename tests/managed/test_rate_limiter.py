"""The limiter keeps the balance within its bounds, blocks or rejects calls, and never blocks both
sides.
"""

from __future__ import annotations

import math
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from storage import AdvancedReplayBuffer, NaiveReplayBuffer, RateLimitedError, RateLimiter


@given(
    ratio=st.sampled_from([0.25, 1.0, 8.0]),
    extra=st.floats(0, 50),
    min_inserts=st.integers(0, 20),
    calls=st.lists(st.tuples(st.booleans(), st.integers(1, 6)), max_size=80),
)
def test_the_balance_stays_in_its_bounds_and_one_side_can_always_continue(
    ratio: float, extra: float, min_inserts: int, calls: list[tuple[bool, int]]
) -> None:
    limiter = RateLimiter(ratio, (ratio * 6 + 6) / 2 + extra, min_inserts, blocking=False)
    inserted = sampled = 0
    for is_insert, size in calls:
        was_filling = inserted < min_inserts
        assert limiter.may_insert(6) or limiter.may_sample(6), (
            "both sides would wait for each other"
        )
        if is_insert and limiter.insert(size):
            inserted += size
            assert was_filling or ratio * (inserted - min_inserts) - sampled <= limiter.tolerance
        elif not is_insert and limiter.sample(size):
            sampled += size
            assert (
                inserted >= min_inserts
                and ratio * (inserted - min_inserts) - sampled >= -limiter.tolerance
            )
        assert (limiter.num_inserted, limiter.num_sampled) == (inserted, sampled)
        assert limiter.balance == pytest.approx(ratio * (inserted - min_inserts) - sampled)


def test_a_blocked_side_continues_after_the_other_side_acts() -> None:
    limiter = RateLimiter(2.0, 8.0, min_inserts=1)
    order: list[str] = []

    def insert() -> None:
        for _ in range(50):
            assert limiter.insert(1)
            order.append("insert")

    def sample() -> None:
        for _ in range(25):
            assert limiter.sample(4)
            order.append("sample")

    threads = [threading.Thread(target=insert), threading.Thread(target=sample)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert limiter.snapshot() == {
        "num_inserted": 50,
        "num_sampled": 100,
        "balance": -2.0,
        "samples_per_insert": 2.0,
    }


def test_waiting_ends_at_the_time_limit_and_at_close() -> None:
    limiter = RateLimiter(1.0, 2.0, min_inserts=1, timeout_s=0.01)
    assert not limiter.sample(1)
    waiting = RateLimiter(1.0, 2.0, min_inserts=1)
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(waiting.sample(1)))
    thread.start()
    waiting.close()
    waiting.close()
    thread.join(10)
    assert answers == [False]


def test_a_batch_too_large_for_the_tolerance_raises_with_the_needed_tolerance() -> None:
    limiter = RateLimiter(2.0, 4.0)
    with pytest.raises(ValueError, match="tolerance must be at least 17"):
        limiter.sample(32)
    assert limiter.snapshot()["num_sampled"] == 0 and limiter.insert(3)
    for options in ((0, 1), (1, 0), (math.nan, 1), (1, math.inf), (1, 1, -1), (1, 1, 1, True, -1)):
        with pytest.raises(ValueError, match=r"^RateLimiter: "):
            RateLimiter(*options)


@pytest.mark.parametrize("kind", [NaiveReplayBuffer, AdvancedReplayBuffer])
def test_push_raises_and_sample_returns_none_if_the_limiter_rejects(kind: type) -> None:
    options = {"samples_per_insert": 2, "tolerance": 6, "min_inserts": 2, "blocking": False}
    buffer = kind(10, generator=0, rate_limiter=options)
    item = {"x": torch.zeros(1)}
    buffer.append(item)
    assert buffer.sample(1) is None
    buffer.push([item] * 4)
    with pytest.raises(RateLimitedError, match="rejects 1 items"):
        buffer.append(item)
    assert buffer.count() == 5 and buffer.rate_limiter.num_inserted == 5
    with pytest.raises(KeyError):
        buffer.rate_limiter.sample(2), buffer.append({"y": torch.zeros(1)})
    assert buffer.rate_limiter.num_inserted == 5, "what raised was not inserted"
    actual = [buffer.sample(2) for _ in range(7)]
    assert [x is not None for x in actual] == [True] * 5 + [False] * 2
    if kind is AdvancedReplayBuffer:
        with pytest.raises(ValueError, match="The rate limiter may also delay"):
            buffer.sample_tensors(1)
    buffer.append(item)
    other = kind(10, generator=1, rate_limiter=options)
    other.load_state_dict(buffer.state_dict())
    assert other.rate_limiter.snapshot() == buffer.rate_limiter.snapshot()
    buffer.clear()
    assert buffer.rate_limiter.num_inserted == 0
