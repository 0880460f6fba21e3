"""Samples belong to the caller: no later sample writes into them, however the caller references
them.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from rollout_data import TrajectoryReplayBuffer
from storage import DictBuffer, TrajectoryDictBuffer, TrajectoryDictBufferMultiDim
from storage.core.fields import flatten
from tests.watch import watching

#: Rows of at least this many bytes are gathered into reused memory.
WIDTH, NUM_ROWS = 300, 256
#: Ways of keeping a part of a sample, and nothing else of it.
WAYS: list[Callable[[torch.Tensor], Any]] = [
    lambda leaf: leaf,
    lambda leaf: leaf[3:5],
    lambda leaf: leaf.detach().flatten(1),
    lambda leaf: leaf.numpy()[::3],
    lambda leaf: torch.from_dlpack(leaf),
]


def rows(num_rows: int) -> dict[str, Any]:
    return {
        "observation": {
            "state": torch.randn(num_rows, WIDTH),
            "image": torch.randint(255, (num_rows, 4, 3)).byte(),
        },
        "wide": torch.randn(num_rows, 1100),
        "half": torch.randn(num_rows, 3).bfloat16(),
        "reward": torch.randn(num_rows, 1),
        "done": torch.rand(num_rows, 1) < 0.05,
    }


def makers() -> dict[str, Callable[[bool], Callable[[int], dict[str, Any]]]]:
    def ring(contiguous: bool) -> Callable[[int], dict[str, Any]]:
        buffer = DictBuffer(capacity=2000, end_key="done", contiguous=contiguous, generator=0)
        buffer.extend(rows(2500))
        return buffer.sample

    def transitions(contiguous: bool) -> Callable[[int], dict[str, Any]]:
        buffer = DictBuffer(capacity=2000, end_key="done", contiguous=contiguous, generator=0)
        buffer.extend(rows(2500))
        return lambda size: buffer.sample_transitions(size, next_keys=("observation", "reward"))

    def windows(contiguous: bool) -> Callable[[int], dict[str, Any]]:
        buffer = TrajectoryDictBufferMultiDim(
            capacity=2000, n_dim=1, seq_length=4, end_key="done", output_key_t=["observation", "half"],
            output_key_tp1=["observation"], contiguous=contiguous, generator=0,
        )  # fmt: skip
        buffer.extend(rows(2500))
        return buffer.sample

    def episodes(contiguous: bool) -> Callable[[int], dict[str, Any]]:
        buffer = TrajectoryDictBuffer(
            [rows(200) for _ in range(4)], seq_length=4, output_key_t=["observation"], output_key_tp1=["wide"],
            split_on_end=True, contiguous=contiguous, generator=0,
        )  # fmt: skip
        return buffer.sample

    def trajectories(contiguous: bool) -> Callable[[int], dict[str, Any]]:
        buffer = TrajectoryReplayBuffer()
        for _ in range(3):
            buffer.add(unflat(rows(400)))
        return lambda size: buffer.sample(size, contiguous=contiguous)

    return {item.__name__: item for item in (ring, transitions, windows, episodes, trajectories)}


def unflat(tree: dict[str, Any]) -> dict[str, Any]:
    """View `[100 * 4, ...]` leaves as `[100, 4, ...]`."""
    return {
        name: unflat(leaf) if isinstance(leaf, dict) else leaf.unflatten(0, (100, 4))
        for name, leaf in tree.items()
    }


@pytest.mark.each_value
@pytest.mark.parametrize("contiguous", [False, True])
@pytest.mark.parametrize("kind", list(makers()))
def test_a_later_sample_does_not_write_into_an_earlier_sample(kind: str, contiguous: bool) -> None:
    sample = makers()[kind](contiguous)
    held: list[tuple[Any, Any]] = []
    for number, way in enumerate(itertools.islice(itertools.cycle(WAYS), 60)):
        leaves = list(flatten(sample(NUM_ROWS)).values())
        leaf = leaves[number % len(leaves)]
        leaf = leaf if leaf.dtype is not torch.bfloat16 else leaf.view(torch.int16)
        kept = way(leaf)
        held.append((kept, kept.clone() if isinstance(kept, torch.Tensor) else kept.copy()))
        if number % 7 == 6:  # some are dropped, so that their memory is reused
            del held[:: 1 + number % 3]
        del leaves, leaf, kept
        for item, copied in held:
            assert (item == copied).all()


def test_threads_sample_separate_buffers_with_equal_fields() -> None:
    stop, mixed = threading.Event(), []

    def work(value: float) -> None:
        buffer = TrajectoryReplayBuffer()
        for _ in range(3):
            buffer.add(
                {"rewards": torch.full((100, 4, WIDTH), value), "dones": torch.zeros(100, 4, 1)}
            )
        while not stop.is_set() and not mixed:
            if not bool((buffer.sample(4 * NUM_ROWS)["rewards"] == value).all()):
                mixed.append(value)

    threads = [threading.Thread(target=work, args=(value,)) for value in (1.0, 2.0, 3.0)]
    for thread in threads:
        thread.start()
    stop.wait(1.0)
    stop.set()
    for thread in threads:
        thread.join()
    assert not mixed


@pytest.mark.parametrize("kind", list(makers()))
def test_changing_a_sample_changes_neither_the_buffer_nor_the_next_sample(kind: str) -> None:
    make = makers()[kind]
    torch.manual_seed(1)
    ours = make(False)
    torch.manual_seed(1)
    others = make(True)
    for _ in range(6):
        samples, expected = flatten(ours(NUM_ROWS)), flatten(others(NUM_ROWS))
        for name, leaf in samples.items():
            assert torch.equal(leaf, expected[name])
            leaf.zero_()
            leaf.unsqueeze_(0)


@pytest.fixture
def mapped() -> Iterator[list[int]]:
    """Return the bytes of each new mapping of memory."""
    result: list[int] = []

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "mmap.__new__":
            result.append(arguments[1])

    with watching(note):
        yield result


def test_memory_of_samples_with_many_wide_fields_is_reused(mapped: list[int]) -> None:
    buffer = DictBuffer(capacity=100, generator=0)
    buffer.extend({str(number): torch.randn(100, 1100) for number in range(20)})
    for _ in range(3):
        buffer.sample(64)
    mapped.clear()
    for _ in range(5):
        buffer.sample(64)
    assert not mapped


def test_large_samples_of_many_sizes_retain_little_memory(mapped: list[int]) -> None:
    buffer = DictBuffer(capacity=100, generator=0)
    buffer.extend({"wide": torch.randn(100, 1100)})
    mapped.clear()
    for size in range(1000, 1200, 10):
        for _ in range(3):
            buffer.sample(size)
    assert 0 < len(mapped) <= 8
