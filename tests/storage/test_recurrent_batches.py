"""Recurrent mini-batches: segments, states of any structure, and a network with consistent
outputs.
"""

from __future__ import annotations

from collections import namedtuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from storage import HiddenStates, RolloutStorage, SchemaError, UsageError, unpad_trajectories
from tests.storage.rollouts import (
    ACTIONS,
    assert_same,
    broken,
    everything,
    fill,
    make_storage,
    make_transition,
)

Pair = namedtuple("Pair", ["actor", "critic"])


def state_of(step, num_envs, layers=2, size=3, offset=0.0):
    """Return `[layers, B, size]` that encodes layer, step and env."""
    layer = 10000.0 * torch.arange(layers).reshape(-1, 1, 1)
    return (
        (offset + layer + step + torch.arange(num_envs).reshape(1, -1, 1) / 100)
        .expand(layers, num_envs, size)
        .clone()
    )


STRUCTURES = {
    "gru": lambda t, n: state_of(t, n),
    "lstm": lambda t, n: (state_of(t, n), state_of(t, n, 1, 4, 0.5)),
    "actor and critic": lambda t, n: HiddenStates(state_of(t, n), state_of(t, n, 1, 2, 0.25)),
    "only actor": lambda t, n: HiddenStates(state_of(t, n), None),
    "lstm critic": lambda t, n: Pair(None, (state_of(t, n), state_of(t, n, 3))),
    "nested tuples": lambda t, n: ((state_of(t, n), state_of(t, n)), (state_of(t, n, 1), None)),
}


def filled(structure, num_envs=5, num_steps=6, rate=0.3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    storage = make_storage(num_envs, num_steps)
    for step in range(num_steps):
        done = torch.rand(num_envs, generator=generator) < rate
        hidden = None if structure is None else STRUCTURES[structure](step, num_envs)
        storage.add_transitions(make_transition(step, num_envs, 1, done, hidden_states=hidden))
    storage.compute_returns(torch.zeros(num_envs), 0.9, 0.9)
    return storage


def leaves_of(states):
    if states is None:
        return []
    return (
        [states]
        if isinstance(states, torch.Tensor)
        else [x for child in states for x in leaves_of(child)]
    )


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("num_mini_batches", [1, 2, 3, 5])
def test_states_are_those_of_each_trajectorys_first_step(structure, num_mini_batches):
    storage = filled(structure)
    example = STRUCTURES[structure](0, 5)
    for batch in storage.recurrent_mini_batch_generator(num_mini_batches, 2):
        first = batch.obs[0, :, 0]  # step + env / 100
        states = leaves_of(batch.hidden_states)
        assert getattr(batch.hidden_states, "_fields", None) == getattr(example, "_fields", None)
        assert len(states) == len(leaves_of(example))
        for leaf in states:
            assert leaf.is_contiguous() and leaf.shape[1] == len(first)
            offset = leaf[0, 0, 0] - first[0]
            torch.testing.assert_close(leaf[0, :, 0], first + offset, atol=1e-3, rtol=0)
            torch.testing.assert_close(
                leaf[-1, :, -1], leaf[0, :, 0] + 10000 * (len(leaf) - 1), atol=1e-2, rtol=0
            )


@given(st.integers(1, 7), st.integers(1, 6), st.sampled_from([0.0, 0.3, 1.0]), st.data())
def test_masks_cover_every_step_and_unpadding_restores_the_observations(
    num_envs, num_steps, rate, data
):
    num_mini_batches = data.draw(st.integers(1, num_envs))
    storage = filled(None, num_envs, num_steps, rate, seed=num_envs)
    sizes, total, start = [], 0, 0
    for batch in storage.recurrent_mini_batch_generator(num_mini_batches, 1):
        num = batch.actions.shape[1]
        part = slice(start, start + num)
        assert int(batch.masks.sum()) == num_steps * num
        for padded, whole in (
            (batch.obs, storage.observations),
            (batch.critic_obs, storage.critic_observations),
        ):
            assert torch.equal(unpad_trajectories(padded, batch.masks), whole[:, part])
            assert not padded[~batch.masks].any()
        for got, whole in (
            (batch.actions, storage.actions),
            (batch.values, storage.values),
            (batch.advantages, storage.advantages),
            (batch.returns, storage.returns),
            (batch.old_actions_log_prob, storage.actions_log_prob),
            (batch.old_mu, storage.mu),
            (batch.old_sigma, storage.sigma),
        ):
            assert torch.equal(got, whole[:, part])
        sizes.append(num)
        total, start = total + int(batch.masks.sum()), start + num
    assert len(sizes) == num_mini_batches and max(sizes) - min(sizes) <= 1
    assert total == num_steps * num_envs


def test_i11_no_env_is_left_out_and_more_batches_than_envs_are_refused():
    storage = filled(None, num_envs=7)
    before = everything(storage)
    assert [b.actions.shape[1] for b in storage.recurrent_mini_batch_generator(3, 2)] == [
        3,
        2,
        2,
    ] * 2
    with pytest.raises(UsageError) as caught:
        storage.recurrent_mini_batch_generator(8, 1)
    assert str(caught.value) == (
        "RolloutStorage.recurrent_mini_batch_generator: num_mini_batches must be at most 7, one env "
        "each, got 8."
    )
    assert_same(before, everything(storage))


def test_i13_without_states_the_batches_have_none():
    assert all(
        batch.hidden_states is None for batch in filled(None).recurrent_mini_batch_generator(2, 1)
    )
    storage = make_storage(2, 1)
    storage.add_transitions(make_transition(0, 2, hidden_states=(None, None)))
    assert storage.saved_hidden_states is None


@pytest.mark.parametrize("structure", [None, "lstm"])
def test_every_tensor_of_a_recurrent_batch_is_contiguous(structure):
    """Then `flatten(0, 1)` is a view, and the first layer of a network copies nothing."""
    for batch in filled(structure).recurrent_mini_batch_generator(2, 2):
        tensors = [x for x in batch if isinstance(x, torch.Tensor)] + leaves_of(batch.hidden_states)
        assert len(tensors) >= 10 and all(x.is_contiguous() for x in tensors)


def test_the_misspelled_name_still_works():
    assert len(list(filled(None).reccurent_mini_batch_generator(2, 3))) == 6


def test_batches_of_a_recurrent_epoch_share_nothing_with_the_storage():
    storage = filled("lstm")
    before = everything(storage)
    for batch in storage.recurrent_mini_batch_generator(2, 2):
        for x in (batch.obs, batch.actions, batch.advantages, *leaves_of(batch.hidden_states)):
            x.fill_(-9)
    assert_same(before, everything(storage))


def test_saved_states_have_time_first_and_the_structure_of_what_was_added():
    storage = filled("actor and critic")
    saved = storage.saved_hidden_states
    assert (
        isinstance(saved, HiddenStates)
        and saved.actor.shape == (6, 2, 5, 3)
        and saved.critic.shape == (6, 1, 5, 2)
    )
    assert torch.equal(saved.actor[3], state_of(3, 5))


@pytest.mark.parametrize(
    "wrong, text",
    [
        (None, "hidden_states have the structure None, expected (tensor, tensor)."),
        (torch.zeros(2, 5, 3), "have the structure tensor, expected (tensor, tensor)."),
        (
            (torch.zeros(2, 5, 3), None),
            "have the structure (tensor, None), expected (tensor, tensor).",
        ),
        (
            (torch.zeros(2, 4, 3), torch.zeros(1, 5, 4)),
            "is float32 of shape (2, 4, 3), expected float32 of shape (2, 5, 3).",
        ),
        (
            (torch.zeros(2, 5, 3).double(), torch.zeros(1, 5, 4)),
            "a tensor of hidden_states is float64 of shape (2, 5, 3), expected float32",
        ),
        ("text", "hidden_states must be None, a tensor or tuples of these, got str."),
    ],
)
def test_states_of_another_structure_are_refused_and_change_nothing(wrong, text):
    storage = filled("lstm")
    storage.clear()
    before = everything(storage)
    with pytest.raises(SchemaError) as caught:
        storage.add_transitions(make_transition(0, 5, hidden_states=wrong))
    assert text in str(caught.value)
    assert_same(before, everything(storage))


def test_a_failed_first_add_does_not_fix_the_structure():
    storage = make_storage(5, 6)
    with pytest.raises(SchemaError):
        storage.add_transitions(
            broken(make_transition(0, 5, hidden_states=state_of(0, 5)), "actions", None)
        )
    assert storage.saved_hidden_states is None
    with pytest.raises(SchemaError, match=r"expected float32 of shape \(layers, 5, H\)"):
        storage.add_transitions(make_transition(0, 5, hidden_states=torch.zeros(5, 3)))


@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_log_probabilities_recomputed_from_a_batch_equal_those_of_the_rollout(kind):
    torch.manual_seed(0)
    num_envs, num_steps, size = 6, 12, 8
    network = (torch.nn.GRU if kind == "gru" else torch.nn.LSTM)(3, size, num_layers=2)
    head = torch.nn.Linear(size, ACTIONS)

    def distribution(features):
        return torch.distributions.Normal(head(features), 0.5)

    storage = RolloutStorage(num_envs, num_steps, (3,), None, (ACTIONS,), generator=0)
    zero = torch.zeros(2, num_envs, size)
    states = zero if kind == "gru" else (zero, zero.clone())
    with torch.no_grad():
        for step in range(num_steps):
            observations = torch.randn(num_envs, 3)
            features, after = network(observations.unsqueeze(0), states)
            normal = distribution(features.squeeze(0))
            actions = normal.sample()
            dones = torch.rand(num_envs) < 0.25
            transition = make_transition(
                step, num_envs, 1, dones, observations=observations, actions=actions
            )
            transition = broken(transition, "actions_log_prob", normal.log_prob(actions).sum(-1))
            storage.add_transitions(broken(transition, "hidden_states", states))
            alive = (~dones).float().reshape(1, -1, 1)
            states = after * alive if kind == "gru" else tuple(x * alive for x in after)
    storage.compute_returns(torch.zeros(num_envs), 0.9, 0.9)
    for batch in storage.recurrent_mini_batch_generator(4, 2):
        features, _ = network(batch.obs, batch.hidden_states)
        normal = distribution(unpad_trajectories(features, batch.masks))
        log_prob = normal.log_prob(batch.actions).sum(-1, keepdim=True)
        torch.testing.assert_close(log_prob, batch.old_actions_log_prob, atol=1e-5, rtol=1e-5)


def test_nested_observations_are_padded_leaf_by_leaf_in_their_own_dtype():
    storage = RolloutStorage(
        3, 4, {"image": ((2, 2), "uint8"), "state": (3,)}, None, (ACTIONS,), generator=0
    )
    for step in range(4):
        observations = {
            "image": torch.full((3, 2, 2), step + 1, dtype=torch.uint8),
            "state": torch.ones(3, 3) * step,
        }
        transition = make_transition(step, 3, 1, torch.tensor([step == 1, False, step == 2]))
        storage.add_transitions(broken(transition, "observations", observations))
    (batch,) = (
        storage.recurrent_mini_batch_generator(1, 1)
        if storage.compute_returns(torch.zeros(3), 0.9, 0.9) is None
        else ()
    )
    assert batch.obs["image"].dtype == torch.uint8 and batch.obs["image"].shape == (4, 5, 2, 2)
    assert torch.equal(
        unpad_trajectories(batch.obs, batch.masks)["image"], storage.observations["image"]
    )


def test_a_rollout_of_one_step_of_one_env_is_one_trajectory():
    storage = fill(make_storage(1, 1))
    storage.compute_returns(torch.zeros(1), 0.9, 0.9)
    (batch,) = storage.recurrent_mini_batch_generator(1, 1)
    assert batch.obs.shape[:2] == (1, 1) and batch.masks.tolist() == [[True]]


def test_tensors_allocated_in_inference_mode_can_be_written_outside():
    storage = make_storage(2, 2)
    more = {"bootstrap_values": torch.ones(2), "time_outs": torch.ones(2), "done": torch.ones(2)}
    with torch.inference_mode():
        storage.add_transitions(make_transition(0, 2, hidden_states=state_of(0, 2), **more))
    storage.add_transitions(make_transition(1, 2, hidden_states=state_of(1, 2), **more))
    storage.compute_returns(torch.zeros(2), 0.9, 0.9, truncation="final")
    (batch,) = storage.recurrent_mini_batch_generator(1, 1)
    (batch.hidden_states * torch.ones(3, requires_grad=True)).sum().backward()
