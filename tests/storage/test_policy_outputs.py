"""Outputs of a policy that is not Gaussian are declared, stored, batched, saved and loaded in all
four storages.
"""

from __future__ import annotations

import copy
import json

import pytest
import torch

from storage import (
    ActionLabelRollout,
    MissingFieldError,
    QueueRolloutStorage,
    RolloutStorage,
    SarsaRolloutStorage,
    SchemaError,
    load_store,
    unpad_trajectories,
)
from tests.storage.rollouts import ACTIONS, CRITIC, OBS, value_of

OUTPUTS = {
    "logits": (7,),
    "choice": ((), torch.int64),
    "deep": {"half": ((2, 3), "float16"), "flag": ((1,), "bool")},
}
KINDS = (RolloutStorage, QueueRolloutStorage, ActionLabelRollout, SarsaRolloutStorage)
ENVS, STEPS = 4, 6


def make(kind, outputs=OUTPUTS, num_steps=STEPS, **options):
    if issubclass(kind, QueueRolloutStorage):
        options = {"buffer_dilation_ratio": 1.5, **options}
    options = {"generator": 0, **options}
    return kind(ENVS, num_steps, (OBS,), (CRITIC,), (ACTIONS,), policy_outputs=outputs, **options)


def outputs_of(step, envs=None):
    """Return values that encode step and env, as far as their dtype can."""
    envs = torch.arange(ENVS) if envs is None else envs
    number = 10 * step + envs
    return {
        "logits": number.float().unsqueeze(-1).expand(*number.shape, 7) + torch.arange(7) / 100,
        "choice": number,
        "deep": {
            "half": (number % 100).half().reshape(*number.shape, 1, 1).expand(*number.shape, 2, 3),
            "flag": (number % 2 == 1).unsqueeze(-1),
        },
    }


def transition_of(storage, step, **more):
    made = storage.Transition(
        observations=value_of(0, step, ENVS, OBS),
        critic_observations=value_of(1, step, ENVS, CRITIC),
        actions=value_of(2, step, ENVS, ACTIONS),
        rewards=value_of(3, step, ENVS, 1),
        values=value_of(4, step, ENVS, 1),
        actions_log_prob=value_of(5, step, ENVS, 1),
        dones=torch.arange(ENVS) == step % 5,
    )
    if isinstance(storage, ActionLabelRollout):
        made.action_labels = made.actions
    if isinstance(storage, SarsaRolloutStorage):
        made.next_observations, made.next_critic_observations = (
            made.observations + 1,
            made.critic_observations + 1,
        )
    made.policy_outputs = outputs_of(step)
    vars(made).update(more)
    return made


def fill(storage, first=0, count=None):
    for step in range(first, first + (storage.num_transitions_per_env if count is None else count)):
        storage.add_transitions(transition_of(storage, step))
    storage.compute_returns(torch.zeros(ENVS), 0.9, 0.9, allow_partial=True)
    return storage


def check(found, step, envs):
    """Compare outputs and their dtypes with those of these steps and envs."""
    expected = outputs_of(step, envs)
    assert found.keys() == expected.keys() and found["deep"].keys() == expected["deep"].keys()
    for mine, other in [(found[x], expected[x]) for x in ("logits", "choice")] + [
        (found["deep"][x], expected["deep"][x]) for x in ("half", "flag")
    ]:
        assert mine.dtype == other.dtype and mine.shape == other.shape and torch.equal(mine, other)


def place_of(obs):
    """Return step and env of rows, read from their observations."""
    step = obs[..., 0].floor().long()
    return step, ((obs[..., 0] - step) * 100).round().long()


def check_batches(storage):
    for batch in [
        *storage.mini_batch_generator(3, 2),
        *storage.mini_batch_generator(2, 1, reshuffle="once"),
    ]:
        check(batch.policy_outputs, *place_of(batch.obs))
        assert batch.old_mu is None and batch.old_sigma is None
    start = 0
    for batch in storage.recurrent_mini_batch_generator(2, 1):
        assert batch.policy_outputs["logits"].shape == (*batch.actions.shape[:2], 7)
        check(batch.policy_outputs, *place_of(unpad_trajectories(batch.obs, batch.masks)))
        start += batch.actions.shape[1]
        assert batch.old_mu is None and batch.old_sigma is None
    assert start == ENVS


@pytest.mark.parametrize("kind", KINDS)
def test_both_generators_return_the_declared_outputs_instead_of_mean_and_deviation(kind):
    storage = fill(make(kind))
    assert storage.mu is None and storage.sigma is None
    assert storage.policy_outputs["choice"].shape == (STEPS, ENVS)
    assert storage.policy_outputs["deep"]["half"].dtype == torch.float16
    check_batches(storage)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["save", "state_dict", "copy"])
def test_the_declaration_and_the_values_are_saved_and_loaded(tmp_path, kind, way):
    storage = fill(make(kind), count=STEPS - 1 if kind is QueueRolloutStorage else STEPS)
    if way == "save":
        storage.save(tmp_path / "kept")
        loaded = load_store(tmp_path / "kept")
    elif way == "copy":
        loaded = copy.deepcopy(storage)
    else:
        loaded = make(kind, generator=5)
        loaded.load_state_dict(storage.state_dict())
    assert type(loaded) is kind and loaded.mu is None
    check_batches(loaded)
    loaded.clear()
    fill(loaded, 30, 1)
    with pytest.raises(SchemaError, match="policy_outputs"):
        make(kind, None).load_state_dict(storage.state_dict())
    with pytest.raises(SchemaError, match="policy_outputs"):
        make(kind, {"logits": (8,)}).load_state_dict(storage.state_dict())


@pytest.mark.parametrize("kind", (QueueRolloutStorage, ActionLabelRollout))
@pytest.mark.parametrize("num_steps", [4, 7, 9, 14])
def test_a_queue_grows_and_rolls_the_outputs_with_the_rest(kind, num_steps):
    storage = make(kind, num_steps=4, buffer_dilation_ratio=2.0)
    for first in range(0, num_steps, 4):
        fill(storage, first, min(4, num_steps - first))
        storage.clear()
    check_batches(storage)
    storage.untie_buffer_loop()
    held = torch.arange(max(0, num_steps - 8), num_steps)
    assert storage.policy_outputs["choice"][: len(held), 0].tolist() == (10 * held).tolist()


def test_outputs_are_required_and_gaussian_ones_refused():
    storage = make(RolloutStorage)
    before = {name: x.clone() for name, x in storage.state_dict()["tensors"].items()}
    wrong = outputs_of(0) | {"logits": torch.zeros(ENVS, 6)}
    for more, text in [
        ({"policy_outputs": None}, "field 'policy_outputs' is missing"),
        (
            {"policy_outputs": {"logits": torch.zeros(ENVS, 7)}},
            "field 'policy_outputs/choice' is missing",
        ),
        (
            {"policy_outputs": outputs_of(0) | {"more": torch.zeros(ENVS)}},
            "unknown field 'policy_outputs/more'",
        ),
        (
            {"policy_outputs": torch.zeros(ENVS, 7)},
            "field 'policy_outputs' has type Tensor, expected a mapping",
        ),
        (
            {"policy_outputs": wrong},
            r"field 'policy_outputs/logits' has shape .*, expected \(4, 7\)",
        ),
        (
            {"policy_outputs": outputs_of(0) | {"choice": torch.zeros(ENVS)}},
            "field 'policy_outputs/choice' has dtype float32, expected int64",
        ),
        ({"action_mean": torch.zeros(ENVS, ACTIONS)}, "unknown field 'action_mean'"),
    ]:
        with pytest.raises(SchemaError, match=text):
            storage.add_transitions(transition_of(storage, 0, **more))
    assert storage.step == 0
    assert all(
        torch.equal(x.nan_to_num(), before[name].nan_to_num())
        for name, x in storage.state_dict()["tensors"].items()
    )
    gaussian = make(RolloutStorage, None)
    assert gaussian.policy_outputs is None and gaussian.mu.shape == (STEPS, ENVS, ACTIONS)
    with pytest.raises(MissingFieldError, match="'policy_outputs'"):
        gaussian.add_transitions(transition_of(gaussian, 0))
    with pytest.raises(MissingFieldError, match="field 'action_mean' is missing"):
        gaussian.add_transitions(transition_of(gaussian, 0, policy_outputs=None))


def test_policy_outputs_may_be_empty(tmp_path):
    storage = make(RolloutStorage, {})
    for step in range(STEPS):
        storage.add_transitions(transition_of(storage, step, policy_outputs=None))
    storage.compute_returns(torch.zeros(ENVS), 0.9, 0.9)
    storage.save(tmp_path / "kept")
    for either in (storage, load_store(tmp_path / "kept")):
        (batch,) = either.mini_batch_generator(1, 1)
        assert (
            batch.old_mu is batch.old_sigma is batch.policy_outputs is None
            and len(batch.actions) == 24
        )


@pytest.mark.parametrize(
    "outputs, text",
    [
        (
            (7,),
            r"policy_outputs must be a mapping of names to shapes, got \(7,\)",
        ),
        ({"a/b": (7,)}, "the shapes of 'policy_outputs' have the name 'a/b'"),
        ({"": (7,)}, "the shapes of 'policy_outputs' have the name ''"),
        ({"logits": "seven"}, "the shape of 'policy_outputs/logits' must be "),
        (
            {"logits": ((7,), "float31")},
            "field 'policy_outputs/logits' has the unknown dtype 'float31'",
        ),
        (
            {"logits": ((7,), "complex64")},
            "field 'policy_outputs/logits' has the unknown dtype 'complex64'",
        ),
    ],
)
def test_an_invalid_declaration_raises(outputs, text):
    with pytest.raises(SchemaError, match=text):
        make(RolloutStorage, outputs)


def test_actions_of_a_categorical_policy_may_be_integers(tmp_path):
    storage = RolloutStorage(
        3, 2, (2,), None, ((), torch.int64), generator=0, policy_outputs={"logits": (5,)}
    )
    floats = RolloutStorage(3, 2, (2,), None, (1,), generator=0, policy_outputs={"logits": (5,)})
    for step in range(2):
        actions = torch.tensor([step, 3, 4])
        for item, stored_actions in ((storage, actions), (floats, actions.unsqueeze(-1))):
            made = item.Transition(
                torch.zeros(3, 2),
                None,
                stored_actions,
                torch.zeros(3),
                torch.zeros(3),
                torch.zeros(3),
            )
            made.actions_log_prob, made.policy_outputs = (
                torch.zeros(3),
                {"logits": torch.ones(3, 5)},
            )
            item.add_transitions(made)
    assert (
        storage.actions.tolist() == [[0, 3, 4], [1, 3, 4]] and storage.actions.dtype == torch.int64
    )
    assert (
        floats.actions.dtype == torch.float32
        and floats.actions[..., 0].tolist() == storage.actions.tolist()
    )
    storage.save(tmp_path / "kept")
    assert load_store(tmp_path / "kept").actions.dtype == torch.int64


def test_a_gaussian_storage_is_saved_as_before(tmp_path):
    """Earlier releases read it, and their saves are read. The save contains no declaration."""
    storage = make(RolloutStorage, None)
    storage.save(tmp_path / "kept")
    arguments = json.loads((tmp_path / "kept" / "config.json").read_text())["arguments"]
    assert set(arguments) == {
        "num_envs", "num_transitions_per_env", "obs_shape", "critic_obs_shape", "actions_shape", "num_rewards"
    }  # fmt: skip
