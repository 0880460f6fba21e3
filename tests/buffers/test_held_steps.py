"""Steps that are held back are there for everybody who reads, at once and bit by bit."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from storage import DictBuffer, RingStore, TrajectoryDictBufferMultiDim
from storage.core.row_cut import Target
from storage.ring.held_steps import HeldSteps

from .test_ring_laws import FIELDS, leaves, windows_of


@pytest.fixture(autouse=True)
def few_slots_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("storage.ring.held_steps._MIN_SLOTS_PER_STEP", 1)


def expected(name: str, row_id: int, lane: int, lanes: int) -> torch.Tensor:
    return leaves(row_id, 1, lanes)[list(FIELDS).index(name)][0, lane]


@given(slots=st.integers(2, 12), lanes=st.integers(2, 3), guards=st.integers(0, 4), data=st.data())
def test_whatever_reads_sees_every_step(slots: int, lanes: int, guards: int, data: st.DataObject) -> None:
    with patch("storage.ring.held_steps._MIN_SLOTS_PER_STEP", 1):
        ring = RingStore(slots, lanes, FIELDS, num_guards=guards)
    for _ in range(data.draw(st.integers(1, 8))):
        for _ in range(data.draw(st.integers(0, 9))):
            ring.write_arrays([leaf.numpy() for leaf in leaves(ring.total, 1, lanes)])
        also = data.draw(st.sampled_from(["nothing", "nothing", "write", "write_arrays", "clear"]))
        if also == "write":
            ring.write(leaves(ring.total, 2, lanes))
        elif also == "write_arrays":
            ring.write_arrays([leaf.numpy() for leaf in leaves(ring.total, 2, lanes)])
        elif also == "clear":
            ring.clear()
        if not ring.num_live:
            continue
        length = data.draw(st.integers(1, ring.num_live))
        first = data.draw(st.sampled_from([ring.oldest, ring.total - length]))
        lane = data.draw(st.integers(0, lanes - 1))
        place = ring.place(torch.tensor([lane]), torch.tensor([first]))
        read = data.draw(st.sampled_from(["windows", "next", "pairs", "gather", "column", "slots", "copy", "check"]))
        names = list(FIELDS)
        if read == "windows":
            found = windows_of(ring, place, length)
        elif read == "next" and length > 1:
            length -= 1
            found = windows_of(ring, place, length, next_names=["a"])
            for step in range(length):
                assert torch.equal(found["next/a"][step], expected("a", first + step + 1, lane, lanes))
        elif read == "pairs" and length > 1 and guards:
            cut = ring.cut([*(Target(0, name, name) for name in names), Target(1, "deep/b", "later")], nested=False)
            found, length = cut(ring.rows(place, cut)), 1
            assert torch.equal(found["later"][0], expected("deep/b", first + 1, lane, lanes))
        elif read == "column":
            found, length = {name: ring.column(name)[place] for name in names}, 1
        elif read == "slots":
            found, length = {name: ring.slots_view(name)[first % slots, lane][None] for name in names}, 1
        elif read == "copy":
            copied = ring.copy_slots(first % slots, first % slots + 1)
            found, length = {name: copied[name][:, lane] for name in names}, 1
        else:
            assert ring.check_valid() == (True, "")
            found, length = ring.gather(place), 1
        for step in range(length):
            for name in names:
                assert torch.equal(found[name][step], expected(name, first + step, lane, lanes))


@pytest.mark.parametrize("sizes", [(1, 1, 2, 1), (1, 3, 1, 1, 2), (1,) * 20, (2, 1, 1, 9, 1)])
def test_steps_and_longer_writes_keep_their_order(sizes: tuple[int, ...]) -> None:
    ring = RingStore(12, 2, FIELDS, num_guards=0)
    for size in sizes:
        ring.write_arrays([leaf.numpy() for leaf in leaves(ring.total, size, 2)])
    for row_id in range(ring.oldest, ring.total):
        assert torch.equal(ring.slots_view("a")[row_id % 12, 0], expected("a", row_id, 0, 2))


def step(number: int) -> dict[str, torch.Tensor]:
    return {"x": torch.full((2, 1), float(number)), "done": torch.zeros(2, 1, dtype=torch.bool)}


def test_what_shares_memory_shows_steps_that_are_added_later() -> None:
    buffer = DictBuffer(capacity=40, num_envs=2, end_key="done", generator=0)
    buffer.extend(step(0))
    view = TrajectoryDictBufferMultiDim(capacity=20, n_dim=2, end_key="done", generator=0)
    view.extend({name: leaf.unsqueeze(0) for name, leaf in step(0).items()})
    shown = view.storage["x"]
    for number in range(1, 6):
        buffer.extend(step(number))
        view.extend({name: leaf.unsqueeze(0) for name, leaf in step(number).items()})
        assert shown[number].flatten().tolist() == [number] * 2
    assert buffer.storage["x"][:12].flatten().tolist() == [float(i // 2) for i in range(12)]


@pytest.mark.parametrize("slots", [1, 255, 256, 600, 5000])
def test_steps_take_next_to_no_memory_beside_the_ring(slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    ring = RingStore(slots, 4, FIELDS, num_guards=1)
    held = ring._held
    assert held is not None and 1 <= held.most <= max(1, slots // 256)
    assert held.num_bytes == held.most * 4 * ring.groups[0].row_bytes


def test_an_interrupt_loses_no_step_that_was_added(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = RingStore(12, 2, FIELDS, num_guards=0)
    held = ring._held
    assert held is not None and held.most > 3

    def add(row_id: int) -> None:
        ring.write_arrays([leaf.numpy() for leaf in leaves(row_id, 1, 2)])

    def held_and_interrupted(slot: int, arrays: list) -> None:
        HeldSteps.add(held, slot, arrays)
        raise KeyboardInterrupt

    def interrupted() -> Iterator[None]:
        raise KeyboardInterrupt
        yield

    add(0)
    add(1)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(held, "add", held_and_interrupted)
        add(50)  # whose extend() raised: it does not count
    add(2)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(held, "_moves", interrupted())
        ring.settle()
    add(3)
    for row_id in range(4):
        assert torch.equal(ring.slots_view("a")[row_id, 0], expected("a", row_id, 0, 2))
