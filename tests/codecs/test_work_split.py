"""Work split over threads: every piece once, short work alone, failures after all have ended."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.core import work_split
from storage.core.work_split import WorkSplit
from storage.errors import UsageError


@pytest.fixture(autouse=True)
def four_processors(monkeypatch):
    monkeypatch.setattr(work_split, "num_processors", lambda: 4)


@settings(max_examples=40)
@given(st.integers(0, 30), st.integers(1, 5), st.booleans())
def test_every_piece_is_done_once(num_pieces, num_threads, is_worth_it):
    split, done = in_parts(num_threads) if is_worth_it else WorkSplit(num_threads), []
    used = split.run(lambda start, stop: done.extend(range(start, stop)), num_pieces, 100)
    assert sorted(done) == list(range(num_pieces))
    assert used == (min(num_threads, 4, num_pieces) if is_worth_it and min(num_threads, num_pieces) > 1 else 1)


def chosen(split, monkeypatch, alone_s, together_s, num_calls):
    """Run calls that take so long, and give the number of threads of each."""
    clock = {"now": 0.0}
    monkeypatch.setattr(work_split.time, "perf_counter", lambda: clock["now"])
    found = []
    for _ in range(num_calls):
        parts = []

        def work(start, stop, parts=parts):
            parts.append((start, stop))
            if start == 0:
                clock["now"] += alone_s if stop == 8 else together_s

        found.append(split.run(work, 8, 1000))
    return found


def test_short_work_is_never_split(monkeypatch):
    assert set(chosen(WorkSplit(2), monkeypatch, 0.0001, 0.00001, 40)) == {1}


def test_work_in_tiny_pieces_is_never_split(monkeypatch):
    split = WorkSplit(2)
    monkeypatch.setattr(work_split, "MIN_PIECE_S", 0.002)
    assert set(chosen(split, monkeypatch, 0.010, 0.001, 40)) == {1}, "8 pieces of 1.25 ms"


def test_the_faster_way_is_found_and_the_other_tried_again_at_times(monkeypatch):
    found = chosen(WorkSplit(2), monkeypatch, 0.010, 0.006, 100)
    assert found[0] == 1 and found[20:].count(2) >= 74
    found = chosen(WorkSplit(2), monkeypatch, 0.010, 0.012, 100)
    assert 0 < found[20:].count(2) <= 10


def test_threads_that_gain_next_to_nothing_are_not_worth_their_waiting(monkeypatch):
    found = chosen(WorkSplit(2), monkeypatch, 0.010, 0.0096, 100)
    assert 0 < found[20:].count(2) <= 10


def test_trying_several_threads_costs_next_to_nothing_where_they_are_much_slower(monkeypatch):
    found = chosen(WorkSplit(2), monkeypatch, 0.010, 0.024, 300)
    assert 0 < found[20:].count(2) <= 280 // 64 + 1


def test_a_change_of_the_machine_is_noticed(monkeypatch):
    split = WorkSplit(2)
    chosen(split, monkeypatch, 0.010, 0.030, 60)
    assert chosen(split, monkeypatch, 0.010, 0.005, 120)[-20:].count(2) >= 18
    chosen(split, monkeypatch, 0.010, 0.030, 60)
    assert chosen(split, monkeypatch, 0.010, 0.005, 120)[-20:].count(2) >= 18


def in_parts(num_threads=4):
    """A split that remembers work as so slow that it is tried with several threads, one piece at a time."""
    split = WorkSplit(num_threads)
    split._keep("", False, 1.0)
    return split


@pytest.mark.parametrize("failing", [0, 1, 3])
def test_a_failure_is_raised_when_no_part_is_under_way_any_more(failing):
    begun, ended = [], []

    def work(start, stop):
        begun.append(start)
        if start == failing:
            raise KeyError(failing)
        threading.Event().wait(0.02)
        ended.append(start)

    with pytest.raises(KeyError, match=str(failing)):
        in_parts().run(work, 4, 100)
    assert sorted(begun) == sorted([*ended, failing])


def test_a_thread_that_is_held_up_does_less():
    held, done = threading.Event(), []

    def work(start, stop):
        name = threading.current_thread().name
        if not done and not held.is_set():  # whoever comes first waits until the other has done the rest
            done.append(name)
            assert held.wait(10)
        else:
            done.append(name)
            if len(done) == 20:
                held.set()

    assert in_parts(2).run(work, 20, 100) == 2
    assert sorted(done.count(name) for name in set(done)) == [1, 19]


def test_work_goes_on_where_no_thread_takes_any(monkeypatch):
    def refuse(*_):
        raise RuntimeError("cannot schedule new futures after interpreter shutdown")

    monkeypatch.setattr(work_split._pool, "submit", refuse)
    done = []
    assert in_parts(3).run(lambda start, stop: done.extend(range(start, stop)), 9, 100) == 3
    assert sorted(done) == list(range(9))


@pytest.mark.parametrize("num_threads", [0, -1, 1.5])
def test_numbers_of_threads_that_cannot_be_are_refused(num_threads):
    with pytest.raises(UsageError, match="num_threads >= 1, or None"):
        WorkSplit(num_threads)
