"""`QueueRolloutStorage` and `ActionLabelRollout`: growth and time order, compared with a plain
list.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from storage import (
    ActionLabelRollout,
    BufferEmptyError,
    MissingFieldError,
    QueueRolloutStorage,
    RolloutOverflowError,
    UsageError,
)
from tests.storage.rollouts import (
    ACTIONS,
    assert_same,
    broken,
    columns_of,
    everything,
    fill,
    make_storage,
    make_transition,
)


def queue(num_envs=3, num_steps=4, ratio=2.0, **more):
    return make_storage(
        num_envs, num_steps, QueueRolloutStorage, buffer_dilation_ratio=ratio, **more
    )


def roll_out(storage, first, count=None):
    """Add a rollout as a learner does: steps, then clear."""
    fill(storage, first=first, count=count or storage.num_timesteps_each_rollout)
    storage.clear()
    return storage


def steps_held(storage):
    """Return the sampled steps in time order, read from the first env's observations."""
    storage.compute_returns(torch.zeros(storage.num_envs, storage.num_rewards), 0.9, 0.9)
    (batch,) = storage.recurrent_mini_batch_generator(1, 1)
    return batch.obs[:, 0, 0].int().tolist()


@given(
    st.integers(1, 4), st.integers(1, 5), st.sampled_from([1.0, 1.1, 1.5, 2.0, 2.6, 4.0]), st.data()
)
def test_the_queue_equals_a_list_of_the_newest_steps(num_envs, num_steps, ratio, data):
    storage = queue(num_envs, num_steps, ratio)
    target = int(ratio * num_steps + 1e-9)
    added = 0
    for _ in range(data.draw(st.integers(1, 7))):
        count = num_steps
        room = storage.num_transitions_per_env - storage.step
        if storage.num_transitions_per_env < target:
            count = min(count, room)
        roll_out(storage, added, count)
        added += count
        assert steps_held(storage) == list(range(max(0, added - target), added))[-target:]
        assert storage.num_transitions_per_env <= target


@pytest.mark.parametrize(
    "ratio, sizes", [(1.0, [4, 4, 4]), (1.5, [6, 6, 6]), (2.0, [8, 8, 8]), (2.6, [8, 10, 10])]
)
def test_growth_is_one_rollout_at_a_time_up_to_the_target(ratio, sizes):
    storage = queue(ratio=ratio)
    result = []
    for rollout in range(3):
        count = (
            min(4, storage.num_transitions_per_env - storage.step) if not storage.buffer_full else 4
        )
        fill(storage, first=4 * rollout, count=count)
        storage.clear()
        result.append(storage.num_transitions_per_env)
    assert result == sizes and storage.num_timesteps_each_rollout == 4


def test_i01_growth_keeps_every_column_of_every_width():
    storage = queue(num_rewards=3)
    for step in range(4):
        hidden = torch.full((2, 3, 5), float(step))
        storage.add_transitions(
            make_transition(step, 3, 3, hidden_states=hidden, bootstrap_values=torch.ones(3, 3))
        )
    storage.compute_returns(torch.zeros(3, 3), 0.9, 0.9)
    before = columns_of(storage)
    assert storage.expand_buffer_once() == 4 and storage.expand_buffer_once() == 0
    for name, x in columns_of(storage).items():
        assert x.shape[0] == 8 and x.shape[1:] == before[name].shape[1:], name
        assert torch.equal(x[:4], before[name]) and not x[4:].nan_to_num().any(), name
    assert storage.rewards.shape == (8, 3, 3) and storage.saved_hidden_states.shape == (8, 2, 3, 5)


def test_i02_returns_follow_the_order_of_time_after_the_ring_wrapped():
    storage, plain = queue(ratio=1.5), make_storage(3, 6)
    for first in (0, 4, 6):
        roll_out(storage, first, 4 if first == 0 else 2)
    roll_out(storage, 8, 3)
    assert storage.step == 5 % 6 or storage.buffer_full
    fill(plain, first=5, count=6)
    last = torch.tensor([[1.0], [2.0], [3.0]])
    storage.compute_returns(last, 0.9, 0.8)
    plain.compute_returns(last, 0.9, 0.8)
    assert torch.equal(storage.observations, plain.observations)
    assert torch.equal(storage.returns, plain.returns) and torch.equal(
        storage.advantages, plain.advantages
    )


def test_i03_untying_rolls_every_column_and_is_idempotent():
    storage = queue(ratio=1.0)
    fill(storage, count=4)
    storage.compute_returns(torch.zeros(3), 0.9, 0.9)
    fill(storage, first=4, count=2)
    expected = {name: torch.roll(x, -2, 0) for name, x in columns_of(storage).items()}
    for _ in range(2):
        storage.untie_buffer_loop()
        assert storage.step == 0
        for name, x in columns_of(storage).items():
            assert torch.equal(x, expected[name]), name


def test_i04_both_generators_see_the_order_of_time():
    storage = queue(ratio=1.0)
    fill(storage, count=4)
    fill(storage, first=4, count=3)
    storage.compute_returns(torch.zeros(3), 0.9, 0.9)
    flat = sorted(int(x) for batch in storage.mini_batch_generator(2, 1) for x in batch.obs[:, 0])
    assert sorted(set(flat)) == [3, 4, 5, 6] and storage.step == 0
    fill(storage, first=7, count=1)
    storage.compute_returns(torch.zeros(3), 0.9, 0.9)
    (batch,) = storage.recurrent_mini_batch_generator(1, 1)
    assert batch.obs[:, 0, 0].int().tolist() == [4, 5, 6, 7]


def test_i05_statistics_of_a_wrapped_ring_change_nothing():
    storage = queue(num_envs=1, ratio=1.0)
    # Held: 0 0 0 1, of which the newest ends the last segment
    for step, done in enumerate([1, 0, 0, 0, 0, 1]):
        storage.add_transitions(make_transition(step, 1, 1, torch.tensor([done])))
    before = everything(storage)
    assert float(storage.get_statistics()[0]) == 4
    assert_same(before, everything(storage))


def test_i16_adding_past_a_complete_rollout_needs_clear():
    storage = fill(queue(), count=4)
    before = everything(storage)
    with pytest.raises(RolloutOverflowError):
        storage.add_transitions(make_transition(4, 3))
    assert_same(before, everything(storage))
    storage.clear()
    storage.add_transitions(make_transition(4, 3))
    assert steps_held(storage) == [0, 1, 2, 3, 4]


def test_clear_in_the_middle_of_a_rollout_discards_and_grows_nothing():
    storage = fill(queue(), count=2)
    storage.clear()
    assert storage.step == 2 and storage.num_transitions_per_env == 4


def test_an_empty_queue_and_a_ratio_below_one_raise():
    with pytest.raises(UsageError, match=r"buffer_dilation_ratio must be .*>= 1, got 0\.5"):
        queue(ratio=0.5)
    with pytest.raises(BufferEmptyError, match="the storage is empty"):
        queue().mini_batch_generator(1, 1)


# -- action labels -----------------------------------------------------------------------------


def labelled(num_steps=4, ratio=1.0):
    return make_storage(3, num_steps, ActionLabelRollout, buffer_dilation_ratio=ratio)


def test_labels_come_last_in_both_kinds_of_batches():
    storage = labelled()
    for step in range(4):
        transition = make_transition(step, 3)
        storage.add_transitions(broken(transition, "action_labels", transition.actions + 0.5))
    assert storage.MiniBatch._fields[-1] == "action_labels"
    for batch in storage.mini_batch_generator(2, 2):
        assert torch.equal(batch.action_labels, batch.actions + 0.5)
    for batch in storage.recurrent_mini_batch_generator(2, 1):
        assert batch.action_labels.shape == (4, batch.actions.shape[1], ACTIONS)
        assert torch.equal(batch.action_labels, batch.actions + 0.5)


def test_labels_are_required():
    with pytest.raises(MissingFieldError, match="field 'action_labels' is missing"):
        labelled().add_transitions(make_transition(0, 3))


def test_i15_an_overflow_leaves_the_labels_untouched():
    storage = labelled(ratio=2.0)
    fill(storage, count=4, action_labels=torch.ones(3, ACTIONS))
    before = everything(storage)
    with pytest.raises(RolloutOverflowError):
        storage.add_transitions(make_transition(4, 3, action_labels=torch.zeros(3, ACTIONS)))
    assert_same(before, everything(storage))


def test_labels_grow_and_roll_with_the_rest():
    storage = labelled(ratio=2.0)
    for first in (0, 4, 8):
        fill(storage, first=first, count=4, action_labels=torch.full((3, ACTIONS), float(first)))
        storage.clear()
    assert steps_held(storage) == list(range(4, 12))
    assert storage.action_labels[:, 0, 0].tolist() == [4.0] * 4 + [8.0] * 4
