"""Mini-batches need returns of the stored steps, computed or written by the trainer."""

from __future__ import annotations

import copy

import pytest
import torch

from storage import (
    ActionLabelRollout,
    QueueRolloutStorage,
    RolloutStorage,
    SarsaRolloutStorage,
    SchemaError,
    UsageError,
)
from tests.storage.rollouts import ACTIONS, make_storage, make_transition

ENVS = 3
KINDS = (RolloutStorage, QueueRolloutStorage, SarsaRolloutStorage)
MISSING = (
    "returns and advantages are older than the last step. Call compute_returns(), or write returns "
    "and advantages."
)


def make(kind, num_steps=4, **options):
    return make_storage(ENVS, num_steps, kind, **options)


def add(storage, count=None, first=0):
    for step in range(
        first, first + (storage.num_transitions_per_env - storage.step if count is None else count)
    ):
        transition = make_transition(step, ENVS)
        if isinstance(storage, SarsaRolloutStorage):
            transition.next_observations = transition.observations + 1
            transition.next_critic_observations = transition.critic_observations + 1
        if isinstance(storage, ActionLabelRollout):
            transition.action_labels = transition.actions + 0.5
        storage.add_transitions(transition)
    return storage


def compute(storage):
    storage.compute_returns(torch.zeros(ENVS), 0.9, 0.9, allow_partial=True)
    return storage


def assert_refused(storage):
    for call in (storage.mini_batch_generator, storage.recurrent_mini_batch_generator):
        with pytest.raises(UsageError) as caught:
            call(1, 1)
        assert str(caught.value) == f"{type(storage).__name__}.{call.__name__}: {MISSING}"


def drawn(storage):
    """Draw from both generators. Return the first mini-batch."""
    batches = [*storage.mini_batch_generator(1, 1), *storage.recurrent_mini_batch_generator(1, 1)]
    assert all(batch.returns is not None and batch.advantages is not None for batch in batches)
    return batches[0]


@pytest.mark.parametrize("kind", KINDS)
def test_mini_batches_of_a_rollout_without_returns_raise(kind):
    storage = add(make(kind))
    assert_refused(storage)
    drawn(compute(storage))
    drawn(storage)


@pytest.mark.parametrize("kind", KINDS)
def test_returns_of_the_earlier_rollout_do_not_count(kind):
    storage = compute(add(make(kind)))
    storage.clear()
    if kind is QueueRolloutStorage:
        drawn(storage)  # it keeps its steps, and nothing was added
    add(storage, first=4, count=4)
    assert_refused(storage)
    drawn(compute(storage))


def assign(storage):
    storage.returns, storage.advantages = storage.values + 1, storage.values + 2


def write_in_place(storage):
    for step in reversed(range(storage.num_transitions_per_env)):
        storage.returns[step] = storage.values[step] + 1
        storage.advantages[step].copy_(storage.values[step] + 2)


def write_in_inference_mode(storage):
    with torch.inference_mode():
        write_in_place(storage)


def write_and_normalize(storage):
    torch.add(storage.values, 1, out=storage.returns)
    storage.advantages = storage.returns + 5
    storage.advantages -= 4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "write", [assign, write_in_place, write_in_inference_mode, write_and_normalize]
)
def test_returns_and_advantages_written_by_a_trainer_count(kind, write):
    storage = add(make(kind))
    for first in (4, 8):
        write(storage)
        batch = drawn(storage)
        torch.testing.assert_close(batch.returns, batch.values + 1)
        torch.testing.assert_close(batch.advantages, batch.values + 2)
        storage.clear()
        add(storage, first=first, count=4)
        assert_refused(storage)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["returns", "advantages"])
def test_returns_without_advantages_and_the_reverse_are_not_enough(kind, name):
    storage = add(make(kind))
    setattr(storage, name, storage.values)
    assert_refused(storage)


@pytest.mark.parametrize("kind", KINDS)
def test_returns_written_before_the_last_step_do_not_count(kind):
    storage = add(make(kind), 3)
    held = storage.returns, storage.advantages
    write_in_place(storage)
    add(storage, 1, first=3)
    assert_refused(storage)
    for x in held:  # got before the step, written after it
        x.fill_(2.0)
    assert drawn(storage).returns.eq(2).all()


@pytest.mark.parametrize("written", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_changes_of_other_columns_do_not_matter(kind, written):
    storage = add(make(kind))
    if written:
        assign(storage)
    storage.values, storage.observations = storage.values + 1, storage.observations + 1
    storage.rewards.zero_()
    storage.get_statistics()
    with pytest.raises(SchemaError, match="field 'returns' has shape"):
        storage.returns = torch.zeros(7)
    drawn(storage) if written else assert_refused(storage)


@pytest.mark.parametrize("written", [True, False])
def test_a_queue_that_grows_and_rolls_tracks_written_returns(written):
    storage = add(make(QueueRolloutStorage, buffer_dilation_ratio=1.5))
    if written:
        assign(storage)
    storage.clear()  # grows
    drawn(storage) if written else assert_refused(storage)
    add(storage, 2, first=4), add(storage, 3, first=6)
    if written:
        write_in_place(storage)
    storage.untie_buffer_loop()  # rolls
    drawn(storage) if written else assert_refused(storage)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", [None, assign, compute])
@pytest.mark.parametrize("way", ["save", "state_dict", "copy"])
def test_a_loaded_storage_knows_whether_returns_were_computed(tmp_path, kind, how, way):
    storage = add(make(kind))
    if how is not None:
        how(storage)
    if way == "save":
        storage.save(tmp_path / "kept")
        loaded = kind.load(tmp_path / "kept")
    elif way == "copy":
        loaded = copy.deepcopy(storage)
    else:
        loaded = compute(add(make(kind)))
        loaded.load_state_dict(storage.state_dict())
    drawn(loaded) if how is not None else assert_refused(loaded)
    loaded.clear()
    add(loaded, first=4, count=1)
    if kind is QueueRolloutStorage:
        assert_refused(loaded)


def test_a_step_that_was_refused_changes_nothing():
    storage = compute(add(make(QueueRolloutStorage), 3))
    with pytest.raises(UsageError):
        storage.add_transitions(make_transition(3, ENVS, action_mean=None))
    drawn(storage)


def test_a_partial_rollout_still_needs_its_option():
    storage = add(make(RolloutStorage), 3)
    assign(storage)
    with pytest.raises(UsageError, match="the rollout has 3 of 4 steps"):
        storage.mini_batch_generator(1, 1)
    assert len(drawn(compute(storage)).returns) == 9


def test_labels_need_no_returns():
    storage = add(make(ActionLabelRollout, buffer_dilation_ratio=2.0))
    for batch in [
        *storage.mini_batch_generator(2, 2),
        *storage.recurrent_mini_batch_generator(2, 1),
    ]:
        assert (
            torch.equal(batch.action_labels, batch.actions + 0.5)
            and batch.actions.shape[-1] == ACTIONS
        )
        # Rather than those of other steps
        assert batch.returns is None and batch.advantages is None
    compute(storage)
    drawn(storage)
    storage.clear()
    add(storage, 1, first=4)
    assert all(batch.returns is None for batch in storage.mini_batch_generator(2, 1))
    assign(storage)
    drawn(storage)
