"""Each part of split work is done once.

An error reaches the caller after all threads have stopped.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.core.threads import MIN_BYTES, each_part, num_processors
from storage.errors import UsageError

LARGE = 64 * MIN_BYTES
is_single = pytest.mark.skipif(num_processors() < 2, reason="needs two processors")


@pytest.fixture
def torch_threads() -> Iterator[Any]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@settings(max_examples=40)
@given(
    num_pieces=st.integers(0, 300),
    num_threads=st.integers(1, 5),
    num_bytes=st.sampled_from([0, 10, LARGE]),
)
def test_every_piece_of_work_is_done_once(
    num_pieces: int, num_threads: int, num_bytes: int
) -> None:
    done: list[int] = []
    used = each_part(
        lambda start, stop: done.extend(range(start, stop)), num_pieces, num_bytes, num_threads
    )
    assert sorted(done) == list(range(num_pieces)) and 1 <= used <= num_threads


@is_single
def test_large_work_is_split_if_torch_uses_several_threads(torch_threads: Any) -> None:
    threads: set[int] = set()

    def work(start: int, stop: int) -> None:
        threads.add(threading.get_ident())

    torch_threads(1)
    assert each_part(work, 100, LARGE) == 1 and threads == {threading.get_ident()}
    torch_threads(2)
    assert each_part(work, 100, LARGE) == 2
    for num_pieces, num_bytes in ((1, LARGE), (100, MIN_BYTES), (100_000, LARGE)):
        assert each_part(work, num_pieces, num_bytes) == 1


def test_a_failure_is_raised_after_all_threads_have_finished() -> None:
    at_work: list[int] = []

    def work(start: int, stop: int) -> None:
        at_work.append(start)
        try:
            if start == 0:
                raise KeyError("mine")
        finally:
            at_work.remove(start)

    with pytest.raises(KeyError, match="mine"):
        each_part(work, 100, LARGE, 2)
    assert at_work == []


@pytest.mark.parametrize("num_threads", [0, -1, 1.5, True])
def test_an_invalid_number_of_threads_raises(num_threads: Any) -> None:
    with pytest.raises(UsageError, match=r"num_threads must be (an integer )?>= 1"):
        each_part(lambda start, stop: None, 1, 1, num_threads)
