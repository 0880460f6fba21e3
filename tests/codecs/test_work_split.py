"""Work that is split is done once and whole; a failure reaches the caller when no thread works any more."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.core.threads import num_processors
from storage.core.work_split import MIN_BYTES, WorkSplit
from storage.errors import UsageError

LARGE = 64 * MIN_BYTES
is_single = pytest.mark.skipif(num_processors() < 2, reason="needs two processors")


@pytest.fixture
def torch_threads() -> Iterator[Any]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@settings(max_examples=40)
@given(num_pieces=st.integers(0, 300), num_threads=st.integers(1, 5), num_bytes=st.sampled_from([0, 10, LARGE]))
def test_every_piece_is_done_once(num_pieces: int, num_threads: int, num_bytes: int) -> None:
    done: list[int] = []
    used = WorkSplit(num_threads).run(lambda start, stop: done.extend(range(start, stop)), num_pieces, num_bytes)
    assert sorted(done) == list(range(num_pieces)) and 1 <= used <= num_threads


@is_single
def test_large_work_is_split_where_torch_is_told_to_use_threads(torch_threads: Any) -> None:
    threads: set[int] = set()

    def work(start: int, stop: int) -> None:
        threads.add(threading.get_ident())

    torch_threads(1)
    assert WorkSplit().run(work, 100, LARGE) == 1 and threads == {threading.get_ident()}
    torch_threads(2)
    assert WorkSplit().run(work, 100, LARGE) == 2
    for num_pieces, num_bytes in ((1, LARGE), (100, MIN_BYTES), (100_000, LARGE)):
        assert WorkSplit().run(work, num_pieces, num_bytes) == 1


def test_a_failure_is_raised_when_nobody_works_any_more() -> None:
    at_work: list[int] = []

    def work(start: int, stop: int) -> None:
        at_work.append(start)
        try:
            if start == 0:
                raise KeyError("mine")
        finally:
            at_work.remove(start)

    with pytest.raises(KeyError, match="mine"):
        WorkSplit(2).run(work, 100, LARGE)
    assert at_work == []


@pytest.mark.parametrize("num_threads", [0, -1, 1.5, True])
def test_a_number_of_threads_that_cannot_be_is_refused(num_threads: Any) -> None:
    with pytest.raises(UsageError, match="num_threads >= 1"):
        WorkSplit(num_threads)
