"""`RolloutWriter.add_rollout` records whole rollout storages: nested observations and outputs of
the policy.
"""

from __future__ import annotations

import pytest
import torch

from rollout_data import RolloutDataset, RolloutWriter
from storage import (
    ActionLabelRollout,
    QueueRolloutStorage,
    RolloutStorage,
    SarsaRolloutStorage,
    UsageError,
)
from tests.files.readback import trajectories_of

N, STEPS = 3, 5
KINDS = (RolloutStorage, QueueRolloutStorage, ActionLabelRollout, SarsaRolloutStorage)
OBS = {"state": (4,), "camera": {"rgb": ((2, 2, 3), "uint8"), "depth": ((2, 2), "float16")}}
OUTPUTS = {"logits": (7,), "option": {"id": ((), torch.int64)}}
CRITIC = {"height": (), "terrain": {"map": (2, 3)}}


def leaf(number, step, shape, dtype=torch.float32):
    """Return values of 60 * number + 10 * step + env, which every dtype here represents exactly."""
    rows = 60 * number + 10 * step + torch.arange(N)
    return rows.reshape(-1, *[1] * len(shape)).expand(N, *shape).to(dtype)


def observed(step, shift=0):
    camera = {
        "rgb": leaf(1, step, (2, 2, 3), torch.uint8) + shift,
        "depth": leaf(2, step, (2, 2), torch.half) + shift,
    }
    return {"state": leaf(0, step, (4,)) + shift, "camera": camera}


def privileged(step, shift=0):
    return {"height": leaf(3, step, ()) + shift, "terrain": {"map": leaf(4, step, (2, 3)) + shift}}


def filled(kind, count=STEPS, obs=OBS, critic=CRITIC, **options):
    storage = kind(N, STEPS, obs, critic, ((), torch.int64), generator=0, **options)
    for step in range(count):
        made = storage.Transition(observations=observed(step), critic_observations=privileged(step))
        made.actions, made.rewards = torch.arange(N) + step, leaf(0, step, (1,))
        made.dones, made.time_outs = (
            torch.tensor([step == 1, step == 2, False]),
            torch.tensor([False, True, False]),
        )
        made.values, made.actions_log_prob = torch.zeros(N), torch.zeros(N)
        if "policy_outputs" in options:
            made.policy_outputs = {
                "logits": leaf(1, step, (7,)),
                "option": {"id": leaf(2, step, (), torch.int64)},
            }
        else:
            made.action_mean = made.action_sigma = torch.zeros(N, dtype=torch.int64)
        if kind is ActionLabelRollout:
            made.action_labels = made.actions
        if kind is SarsaRolloutStorage:
            made.next_observations, made.next_critic_observations = (
                observed(step + 1),
                privileged(step + 1),
            )
        storage.add_transitions(made)
    return storage


def record(folder, storage, **more):
    with RolloutWriter(folder, N, durable=False) as writer:
        writer.add_rollout(storage, **more)
    return trajectories_of(folder)


def frames(first, last):
    return range(first, last + 1)


#: Env, and the steps of each trajectory, in the order of the files.
CUTS = [
    (0, frames(0, 1)),
    (1, frames(0, 2)),
    (2, frames(0, 4)),
    (0, frames(2, 4)),
    (1, frames(3, 4)),
]


#: Field -> arguments of `leaf`.
NUMBERS = {
    "observation/state": 0,
    "observation/camera/rgb": 1,
    "observation/camera/depth": 2,
    "privileged_observation/height": 3,
    "privileged_observation/terrain/map": 4,
}


@pytest.mark.parametrize("kind", KINDS)
def test_nested_observations_of_policy_and_critic_are_recorded(tmp_path, kind):
    actual = record(tmp_path, filled(kind))
    assert [item.env for item in actual] == [env for env, _ in CUTS]
    for item, (env, steps) in zip(actual, CUTS, strict=True):
        for name, number in NUMBERS.items():
            column = torch.as_tensor(item.column(name)).reshape(len(steps), -1)
            expected = torch.tensor([60 * number + 10 * step + env for step in steps]).to(
                column.dtype
            )
            assert torch.equal(column, expected.unsqueeze(-1).expand_as(column)), name
        assert (
            item.column("observation/camera/rgb").dtype == "uint8"
            and item.column("observation/state").ndim == 2
        )
        assert item.column("action").tolist() == [env + step for step in steps]


@pytest.mark.parametrize("form", ["of all steps", "of the ends"])
def test_nested_final_observations_are_recorded(tmp_path, form):
    finals = {
        name: nested_stack([make(step, 5) for step in range(STEPS)], form == "of the ends")
        for name, make in (
            ("final_observation", observed),
            ("final_privileged_observation", privileged),
        )
    }
    actual = record(tmp_path, filled(RolloutStorage), **finals)
    assert [trajectory.finals is not None for trajectory in actual] == [
        True,
        True,
        False,
        False,
        False,
    ]
    for item, step in zip(actual[:2], (1, 2), strict=True):
        assert item.finals.keys() == NUMBERS.keys()
        for name, number in NUMBERS.items():
            assert (item.finals[name] == 60 * number + 10 * step + item.env + 5).all(), name


def nested_stack(trees, is_of_ends):
    if isinstance(trees[0], dict):
        return {name: nested_stack([tree[name] for tree in trees], is_of_ends) for name in trees[0]}
    return torch.stack([trees[1][0], trees[2][1]] if is_of_ends else trees)


@pytest.mark.parametrize("num_steps", [3, 5, 8, 9])
def test_a_queue_with_nested_observations_is_recorded_in_the_order_of_time(tmp_path, num_steps):
    (*_, newest) = [
        item for item in record(tmp_path, filled(QueueRolloutStorage, num_steps)) if item.env == 2
    ]
    held = range(max(0, num_steps - STEPS), num_steps)
    assert newest.column("observation/state")[:, 0].tolist() == [10 * step + 2 for step in held]
    assert newest.column("observation/camera/rgb")[:, 1, 1, 2].tolist() == [
        62 + 10 * step for step in held
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_policy_outputs_are_recorded_with_their_declared_shapes_and_dtypes(tmp_path, kind):
    actual = record(tmp_path, filled(kind, policy_outputs=OUTPUTS), include=("values",))
    for trajectory, (env, steps) in zip(actual, CUTS, strict=True):
        assert not {"mu", "sigma"} & set(trajectory.fields) and "values" in trajectory.fields
        logits, option = (
            trajectory.column("policy_outputs/logits"),
            trajectory.column("policy_outputs/option/id"),
        )
        assert str(option.dtype) == "int64" and option.tolist() == [
            120 + 10 * step + env for step in steps
        ]
        assert logits.tolist() == [[60.0 + 10 * step + env] * 7 for step in steps]


def test_policy_outputs_are_streamed_as_extras(tmp_path):
    record(tmp_path, filled(RolloutStorage, policy_outputs=OUTPUTS))
    batch = RolloutDataset(tmp_path, N, device="cpu").get_batch(2)
    assert batch.extras["policy_outputs"]["logits"].shape == (2, N, 7)
    assert batch.extras["policy_outputs"]["option"]["id"].dtype == torch.int64


def test_include_of_means_needs_a_gaussian_storage(tmp_path):
    actual = record(tmp_path / "mean", filled(RolloutStorage), include=("mu",))
    assert "mu" in actual[0].fields and not any(
        name.startswith("policy_outputs") for name in actual[0].fields
    )
    without = filled(RolloutStorage, policy_outputs=OUTPUTS)
    with pytest.raises(UsageError, match="include has 'mu', which is not a field of the storage"):
        record(tmp_path / "none", without, include=("mu",))
