"""The ring equals a list after any writes. A failed write changes nothing."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from storage import DictBuffer, Field, RingStore, Schema, SchemaError

FIELDS = Schema(
    [
        Field("a", (3,)),
        Field("flag", (1,), "bool"),
        Field("deep/b", (2, 2), "int64"),
        Field("c", (1,), "uint8"),
    ]
)


def leaves(first: int, num_rows: int, lanes: int) -> list[torch.Tensor]:
    code = torch.arange(first, first + num_rows).unsqueeze(1) * 10 + torch.arange(lanes)
    code = code.unsqueeze(-1)
    return [
        (code + torch.arange(3)).float(),
        code % 3 == 0,
        (code.unsqueeze(-1) + torch.tensor([[0, 1], [2, 3]])).long(),
        (code % 251).to(torch.uint8),
    ]


def windows_of(
    ring: RingStore, places: torch.Tensor, length: int, next_names: Sequence[str] = ()
) -> dict[str, torch.Tensor]:
    """Return all fields of windows by flat name. Fields below `next` are one row later."""
    return ring.windows(
        places, length, ring.cut_of(ring.names, tuple(next_names), nested=False, apart=True)
    )


@given(
    capacity=st.integers(1, 9),
    lanes=st.integers(1, 3),
    guards=st.integers(0, 4),
    data=st.data(),
)
def test_the_ring_equals_a_list_of_rows(
    capacity: int, lanes: int, guards: int, data: st.DataObject
) -> None:
    ring = RingStore(capacity, lanes, FIELDS, num_guards=guards)
    model: list[dict[str, torch.Tensor]] = []
    for _ in range(data.draw(st.integers(1, 6))):
        num_rows = data.draw(st.integers(0, 3 * capacity))
        parts = leaves(len(model), num_rows, lanes)
        arrays = [part.numpy()[:, 0] if lanes == 1 else part.numpy() for part in parts]
        ring.write(arrays if data.draw(st.booleans()) else parts)
        model += [
            {name: part[i] for name, part in zip(FIELDS, parts, strict=True)}
            for i in range(num_rows)
        ]
        assert ring.check_valid() == (True, "")
        live = model[max(0, len(model) - capacity) :]
        assert (ring.total, ring.num_live, ring.oldest) == (
            len(model),
            len(live),
            len(model) - len(live),
        )
        for row_id in range(ring.oldest, ring.total):
            for name in FIELDS:
                assert torch.equal(ring.slots_view(name)[row_id % capacity], model[row_id][name])
        check_windows(ring, model, data)


def check_windows(
    ring: RingStore, model: list[dict[str, torch.Tensor]], data: st.DataObject
) -> None:
    if not ring.num_live:
        return
    length = data.draw(st.integers(1, ring.num_live))
    first = torch.tensor([ring.oldest, ring.total - length])
    lane = torch.tensor([0, ring.num_lanes - 1])
    actual = windows_of(ring, ring.place(lane, first), length)
    for i in range(2):
        for step in range(length):
            for name in FIELDS:
                expected = model[int(first[i]) + step][name][int(lane[i])]
                assert torch.equal(actual[name][i * length + step], expected)


@given(capacity=st.integers(1, 7), sizes=st.lists(st.integers(0, 21), min_size=1, max_size=6))
def test_a_dict_buffer_equals_a_list(capacity: int, sizes: list[int]) -> None:
    buffer = DictBuffer(capacity=capacity, generator=0)
    model: list[int] = []
    for size in sizes:
        values = torch.arange(len(model), len(model) + size)
        buffer.extend({"x": {"y": values.unsqueeze(1).float()}, "z": values.view(-1, 1, 1)})
        model += values.tolist()
        live = model[-capacity:]
        assert len(buffer) == buffer.size() == len(live)
        assert buffer._idx == len(model) % capacity and buffer._is_full == (len(model) >= capacity)
        if not live:
            assert buffer.empty()
            continue
        assert buffer.get_full_buffer("time")["z"].flatten().tolist() == live
        assert buffer.get_full_buffer()["x"]["y"].flatten().tolist() == [
            max(i for i in model if i % capacity == slot) for slot in range(len(live))
        ]
        batch = buffer.sample(50)
        assert set(batch["z"].flatten().tolist()) <= set(live)
        assert torch.equal(batch["x"]["y"].flatten().long(), batch["z"].flatten())


def test_sampling_is_uniform_over_the_rows() -> None:
    buffer = DictBuffer(capacity=7, generator=0)
    buffer.extend({"x": torch.arange(11).unsqueeze(1)})
    counts = torch.bincount(buffer.sample(70_000)["x"].flatten(), minlength=11)
    assert counts[:4].sum() == 0 and (counts[4:] - 10_000).abs().max() < 4 * 100


WRONG = {
    "a missing leaf": {"x": torch.zeros(2, 1)},
    "a new leaf": {"x": torch.zeros(2, 1), "y": torch.zeros(2, 3), "z": torch.zeros(2, 1)},
    "another event shape": {"x": torch.zeros(2, 2), "y": torch.zeros(2, 3)},
    "a dtype that would lose": {
        "x": torch.zeros(2, 1, dtype=torch.complex64),
        "y": torch.zeros(2, 3),
    },
    "leaves of different lengths": {"x": torch.zeros(2, 1), "y": torch.zeros(3, 3)},
    "no event axis": {"x": torch.zeros(2), "y": torch.zeros(2, 3)},
    "a leaf in the place of a mapping": {"x": torch.zeros(2, 1), "y": {"z": torch.zeros(2, 3)}},
    "objects": {"x": torch.zeros(2, 1), "y": [[object()] * 3] * 2},
    "no mapping": torch.zeros(2),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_failed_write_leaves_the_buffer_bit_identical(name: str) -> None:
    buffer = DictBuffer(capacity=5, generator=0)
    buffer.extend({"x": torch.rand(7, 1), "y": torch.rand(7, 3)})
    before, view = buffer.state_dict(), buffer.storage["y"].clone()
    with pytest.raises(SchemaError):
        buffer.extend(WRONG[name])
    after = buffer.state_dict()
    assert before["numbers"] == after["numbers"]
    assert all(
        torch.equal(before["tensors"][key], after["tensors"][key])
        for key in ("rng", "buffer/x", "buffer/y")
    )
    assert torch.equal(view, buffer.storage["y"])


def test_a_failed_first_write_leaves_the_buffer_without_a_schema() -> None:
    buffer = DictBuffer(capacity=5)
    with pytest.raises(SchemaError, match=r"unsqueeze\(-1\)"):
        buffer.extend({"x": torch.zeros(3, 2), "y": torch.zeros(3)})
    assert buffer.storage is None and len(buffer) == 0
    buffer.extend({"other": torch.zeros(3, 4)})
    assert len(buffer) == 3
