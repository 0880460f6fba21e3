"""`ReplayBuffer` equals a list, draws uniformly, and checks arguments before it writes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from storage import BufferEmptyError, FieldTypeError, ReplayBuffer, SchemaError, UsageError


def pairs(first, count, *shape):
    """Return states first, first + 1, ...; next states are 1000 higher."""
    states = (
        torch.arange(first, first + count)
        .float()
        .reshape(-1, *([1] * len(shape)))
        .expand(count, *shape)
    )
    return states, states + 1000


@given(
    st.integers(1, 7), st.lists(st.integers(0, 20), max_size=6), st.sampled_from([(), (2,), (2, 3)])
)
def test_the_buffer_equals_sequential_insertion(size, counts, shape):
    buffer, slots, total = ReplayBuffer(shape, size), [None] * size, 0
    for count in counts:
        buffer.insert(*pairs(total, count, *shape))
        for row in range(total, total + count):
            slots[row % size] = row
        total += count
    assert buffer.step == total % size and len(buffer) == buffer.num_samples == min(total, size)
    for slot, row in enumerate(slots):
        if row is not None:
            assert (
                buffer.states[slot].eq(row).all() and buffer.next_states[slot].eq(row + 1000).all()
            )


def test_samples_are_uniform_pairs_from_valid_rows_only():
    buffer = ReplayBuffer(2, 10, generator=0)
    buffer.insert(*pairs(0, 6, 2))
    states, next_states = next(buffer.feed_forward_generator(1, 12000))
    assert torch.equal(next_states, states + 1000)
    counts = torch.bincount(states[:, 0].long(), minlength=10)
    assert not counts[6:].any() and (counts[:6] - 2000).abs().max() < 250


def test_batches_are_drawn_lazily_and_share_no_memory():
    buffer = ReplayBuffer((2,), 4, generator=0)
    buffer.insert(*pairs(0, 4, 2))
    batches = buffer.feed_forward_generator(3, 5)
    next(batches)[0].fill_(-1)
    assert buffer.states.min() >= 0
    buffer.insert(*pairs(50, 4, 2))
    assert next(batches)[0].min() >= 50
    assert len(list(batches)) == 1 and not list(buffer.feed_forward_generator(0, 5))


def test_wrong_calls_fail_at_once_and_change_nothing():
    buffer = ReplayBuffer(3, 4)
    with pytest.raises(BufferEmptyError):
        buffer.feed_forward_generator(1, 1)
    for states, later, error in [
        (torch.ones(2, 3), torch.ones(3, 3), SchemaError),
        (torch.ones(2, 4), torch.ones(2, 4), SchemaError),
        (torch.ones(2, 3), torch.ones(2, 3, dtype=torch.complex64), FieldTypeError),
    ]:
        with pytest.raises(error):
            buffer.insert(states, later)
    assert not buffer.states.any() and not len(buffer) and buffer.step == 0
    buffer.insert(*pairs(1, 2, 3))
    for arguments in ((-1, 2), (1, 0), (1.0, 2)):
        with pytest.raises(UsageError):
            buffer.feed_forward_generator(*arguments)
    with pytest.raises(UsageError, match="buffer_size must be >= 1, got 0"):
        ReplayBuffer(3, 0)


def test_states_of_other_dtypes_and_with_gradients_are_copied():
    buffer = ReplayBuffer(2, 4)
    buffer.insert(torch.ones(1, 2, requires_grad=True), torch.full((1, 2), 3, dtype=torch.int64))
    assert (
        buffer.states[0].eq(1).all()
        and buffer.next_states[0].eq(3).all()
        and not buffer.states.requires_grad
    )


def test_states_may_be_numpy_arrays_of_floats_and_integers_only():
    buffer = ReplayBuffer(np.int64(2), np.int64(4))
    buffer.insert(np.ones((3, 2)), np.full((3, 2), 2))
    assert len(buffer) == 3 and buffer.next_states[:3].eq(2).all()
    assert len(list(buffer.feed_forward_generator(np.int64(2), np.int64(3)))) == 2
    before = buffer.states.clone()
    for wrong in (
        None,
        "text",
        3,
        torch.tensor(1.0),
        torch.ones(2, 2).to_sparse(),
        torch.ones(2, 2, device="meta"),
    ):
        with pytest.raises(SchemaError, match=r"^ReplayBuffer\.insert: "):
            buffer.insert(wrong, torch.ones(2, 2))
        with pytest.raises(SchemaError, match=r"^ReplayBuffer\.insert: "):
            buffer.insert(torch.ones(2, 2), wrong)
    assert torch.equal(buffer.states, before) and buffer.step == 3


def test_an_incomplete_state_dict_changes_nothing():
    buffer = ReplayBuffer(2, 4, generator=0)
    buffer.insert(*pairs(0, 3, 2))
    state, before = buffer.state_dict(), buffer.states.clone()
    shorter = {name: x[:2] * 5 for name, x in state["tensors"].items()}
    for wrong in (
        {"tensors": shorter},
        {"tensors": {}},
        {"numbers": {}},
        {"numbers": {"total": -1}},
    ):
        with pytest.raises(SchemaError):
            buffer.load_state_dict({**state, **wrong})
    assert torch.equal(buffer.states, before) and buffer.step == 3
