"""Every failed call leaves every storage bit-identical."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from storage import (
    ActionLabelRollout,
    FieldTypeError,
    QueueRolloutStorage,
    RolloutDataError,
    RolloutStorage,
    SarsaRolloutStorage,
    SchemaError,
    UsageError,
)
from tests.storage.rollouts import (
    ACTIONS,
    CRITIC,
    OBS,
    assert_same,
    broken,
    everything,
    make_storage,
    make_transition,
)


def quantized(x: torch.Tensor) -> torch.Tensor:
    with warnings.catch_warnings():  # a later torch may not have them
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(x, 0.1, 0, torch.quint8)


KINDS = (RolloutStorage, QueueRolloutStorage, ActionLabelRollout, SarsaRolloutStorage)
WRONG = {
    "one row too many": lambda x: torch.cat([x, x[:1]]),
    "one axis too many": lambda x: x.unsqueeze(-1),
    "complex": lambda x: x.to(torch.complex64),
    "meta": lambda x: x.to("meta"),
    "sparse": lambda x: x.to_sparse(),
    "quantized": lambda x: quantized(torch.as_tensor(x).float()),
    "a mapping": lambda x: {"x": x},
    "text": lambda x: "text",
    "an object": lambda x: object(),
    "None": lambda x: None,
}
CALLS = {
    "no last values": lambda s: s.compute_returns(None, 0.9, 0.9),
    "last values of text": lambda s: s.compute_returns("text", 0.9, 0.9),
    "last values nowhere": lambda s: s.compute_returns(torch.zeros(3, 1, device="meta"), 0.9, 0.9),
    "sparse last values": lambda s: s.compute_returns(torch.zeros(3, 1).to_sparse(), 0.9, 0.9),
    "quantized last values": lambda s: s.compute_returns(
        WRONG["quantized"](torch.zeros(3, 1)), 0.9, 0.9
    ),
    "no gamma": lambda s: s.compute_returns(torch.zeros(3, 1), None, 0.9),
    "complex gamma": lambda s: s.compute_returns(torch.zeros(3, 1), 0.9 + 1j, 0.9),
    "lam of text": lambda s: s.compute_returns(torch.zeros(3, 1), 0.9, "x"),
    "normalize by a list": lambda s: s.compute_returns(torch.zeros(3, 1), 0.9, 0.9, normalize=[]),
    "truncation by a number": lambda s: s.compute_returns(
        torch.zeros(3, 1), 0.9, 0.9, truncation=3
    ),
    "no random state": lambda s: s.load_state_dict(
        {**s.state_dict(), "tensors": without(s, "rng")}
    ),
    "no numbers": lambda s: s.load_state_dict({**s.state_dict(), "numbers": {}}),
    "an empty state": lambda s: s.load_state_dict({}),
    "a step past the end": lambda s: s.load_state_dict(
        {**s.state_dict(), "numbers": {**s.state_dict()["numbers"], "step": 99}}
    ),
    "no mini-batch": lambda s: s.mini_batch_generator(0),
    "too many mini-batches": lambda s: s.mini_batch_generator(10_000),
    "too many env groups": lambda s: s.recurrent_mini_batch_generator(4),
    "no epoch": lambda s: s.recurrent_mini_batch_generator(1, 0),
    "last values": lambda s: s.compute_returns(torch.zeros(2, 1), 0.9, 0.9),
    "gamma": lambda s: s.compute_returns(torch.zeros(3, 1), -0.1, 0.9),
    "lam": lambda s: s.compute_returns(torch.zeros(3, 1), 0.9, torch.zeros(4)),
    "normalize": lambda s: s.compute_returns(torch.zeros(3, 1), 0.9, 0.9, normalize="x"),
    "truncation": lambda s: s.compute_returns(torch.zeros(3, 1), 0.9, 0.9, truncation="x"),
    "state": lambda s: s.load_state_dict({**s.state_dict(), "class": "Other"}),
}


def without(storage, name):
    """Return the tensors of a state, all doubled, without one of them."""
    doubled = {
        key: x * 2 if x.is_floating_point() else x
        for key, x in storage.state_dict()["tensors"].items()
    }
    return {key: x for key, x in doubled.items() if key != name}


def whole(step, **more):
    """Return a transition with every field of all storages."""
    filled = {
        "time_outs": torch.zeros(3, 1),
        "bootstrap_values": torch.ones(3, 1),
        "hidden_states": torch.full((2, 3, 4), float(step)),
        "next_observations": torch.full((3, OBS), float(step)),
        "next_critic_observations": torch.full((3, CRITIC), float(step)),
    }
    return make_transition(step, 3, **{**filled, **more})


def labelled(kind, transition, step):
    if kind is ActionLabelRollout:
        transition.action_labels = torch.full((3, ACTIONS), float(step))
    return transition


def filled(kind, count):
    storage = make_storage(3, 4, kind)
    for step in range(count):
        storage.add_transitions(labelled(kind, whole(step), step))
    return storage


@given(
    st.sampled_from(KINDS),
    st.integers(1, 3),
    st.sampled_from(sorted(vars(whole(0)))),
    st.sampled_from(sorted(WRONG)),
)
def test_a_transition_with_one_wrong_field_changes_nothing(kind, count, name, how):
    storage = filled(kind, count)
    good = labelled(kind, whole(count), count)
    value = getattr(good, name)
    if value is None or (how == "None" and name in ("time_outs", "bootstrap_values")):
        return
    is_next = name.startswith("next_")
    if is_next and (kind is not SarsaRolloutStorage or (how == "None" and count < 3)):
        return
    before = everything(storage)
    with pytest.raises(RolloutDataError):
        storage.add_transitions(broken(good, name, WRONG[how](value)))
    assert_same(before, everything(storage))
    storage.add_transitions(good)


@given(st.sampled_from(KINDS), st.sampled_from([0, 1, 4, 6]), st.sampled_from(sorted(CALLS)))
def test_a_wrong_call_fails_at_once_and_changes_nothing(kind, count, name):
    is_ring = issubclass(kind, QueueRolloutStorage)
    storage = filled(kind, count if is_ring else min(count, 4))
    before = everything(storage)
    with pytest.raises(RolloutDataError):
        CALLS[name](storage)
    assert_same(before, everything(storage))


STATES = {
    "text": "text",
    "a mapping": {"h": torch.ones(2, 3, 4)},
    "a number": 5,
    "an array": np.ones((2, 3, 4), np.float32),
    "text in a tuple": (torch.ones(2, 3, 4), "c"),
    "complex": torch.ones(2, 3, 4, dtype=torch.complex64),
    "sparse": torch.ones(2, 3, 4).to_sparse(),
    "quantized": quantized(torch.ones(2, 3, 4)),
    "nowhere": torch.ones(2, 3, 4, device="meta"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("states", STATES.values(), ids=STATES)
def test_wrong_first_states_change_nothing(kind, states):
    storage = filled(kind, 0)
    before = everything(storage)
    with pytest.raises(SchemaError, match="hidden_states"):
        storage.add_transitions(labelled(kind, whole(0, hidden_states=states), 0))
    assert_same(before, everything(storage))


def test_missing_bootstrap_values_leave_a_wrapped_queue_as_it_is():
    storage = filled(QueueRolloutStorage, 0)
    for step in range(6):
        cut = torch.ones(3) * (step == 5)
        storage.add_transitions(whole(step, dones=cut, time_outs=cut, bootstrap_values=None))
    before = everything(storage)
    with pytest.raises(UsageError, match="truncation 'final' needs them"):
        storage.compute_returns(torch.zeros(3), 0.9, 0.9, truncation="final")
    assert_same(before, everything(storage))


def test_a_state_without_one_of_its_tensors_changes_nothing():
    for kind in KINDS:
        storage = filled(kind, 3)
        before = everything(storage)
        for name in storage.state_dict()["tensors"]:
            if name != "bootstrap_values":  # allocated only when it first comes
                with pytest.raises(SchemaError):
                    storage.load_state_dict(
                        {**storage.state_dict(), "tensors": without(storage, name)}
                    )
                assert_same(before, everything(storage))


@pytest.mark.parametrize("kind", KINDS)
def test_nan_and_infinity_are_kept_as_they_are(kind):
    storage = make_storage(3, 1, kind)
    rewards = torch.tensor([[float("nan")], [float("inf")], [-float("inf")]])
    storage.add_transitions(labelled(kind, whole(0, rewards=rewards), 0))
    assert torch.equal(storage.rewards[0].nan_to_num(nan=7.0), rewards.nan_to_num(nan=7.0))
    storage.compute_returns(torch.zeros(3), 0.9, 0.9, normalize=None)
    assert storage.returns[0, 0].isnan() and storage.returns[0, 1] == float("inf")


#: dtype of the field, what it cannot hold, what it can.
OUT_OF_RANGE = [
    ("uint8", torch.tensor([300, 0]), r"contains 300, outside the range of uint8 \(0 to 255\)"),
    (
        "uint8",
        torch.tensor([0, -1], dtype=torch.int8),
        r"contains -1, outside the range of uint8 \(0 to 255\)",
    ),
    (
        "int8",
        torch.tensor([128, 3], dtype=torch.uint8),
        r"contains 128, outside the range of int8 \(-128 to 127\)",
    ),
    (
        "int16",
        torch.tensor([1, 2**15], dtype=torch.uint16),
        r"contains 32768, outside the range of int16 \(-32768 to 32767\)",
    ),
    (
        "int64",
        np.array([2**63, 1], np.uint64),
        "contains 922.*, outside the range of int64 .-9223372036854775808 to 9223372036854775807",
    ),
    (
        "uint64",
        torch.tensor([-1, 1]),
        "contains -1, outside the range of uint64 .0 to 18446744073709551615",
    ),
    (
        "float16",
        torch.tensor([1.0, 7e4]),
        r"contains 70000.*, outside the range of float16 \(-65504\.0 to 65504\.0",
    ),
    (
        "float16",
        torch.tensor([1, -70_000]),
        r"contains -70000.*, outside the range of float16 \(-65504\.0 to 65504\.0",
    ),
    (
        "float32",
        torch.tensor([1e39, 0.0], dtype=torch.float64),
        r"contains 1e\+39, outside the range of float32 \(-3\.40",
    ),
    (
        "bfloat16",
        torch.tensor([3.4e38, 0.0]),
        r"contains 3\.39.*, outside the range of bfloat16 \(-3\.38",
    ),
]


@pytest.mark.parametrize("dtype, values, text", OUT_OF_RANGE)
def test_numbers_that_do_not_fit_their_field_are_refused_and_nothing_is_written(
    dtype, values, text
):
    storage = SarsaRolloutStorage(2, 2, {"x": ((), dtype)}, None, (ACTIONS,), generator=0)
    zero = {"x": torch.zeros(2).to(getattr(torch, dtype))}
    good = make_transition(
        0, 2, critic_observations=None, observations=zero, next_observations=zero
    )
    before = {name: x.clone() for name, x in storage.state_dict()["tensors"].items()}
    for name in ("observations", "next_observations"):
        with pytest.raises(
            FieldTypeError, match=f"'{name}/x' {text}" if name == "observations" else text
        ):
            storage.add_transitions(broken(good, name, {"x": values}))
    after = storage.state_dict()["tensors"]
    assert all(torch.equal(after[name], x) for name, x in before.items()) and storage.step == 0
    storage.add_transitions(good)


@pytest.mark.parametrize(
    "dtype, values",
    [
        ("uint8", torch.tensor([0, 255])),
        ("int8", torch.tensor([127, 3], dtype=torch.uint8)),
        ("int64", np.array([2**63 - 1, 0], np.uint64)),
        ("uint64", torch.tensor([2**63 - 1, 0])),
        ("uint16", torch.tensor([True, False])),
        ("float16", torch.tensor([float("inf"), 65504.0])),
        ("float32", torch.tensor([float("nan"), 0.1], dtype=torch.float64)),
        ("float32", torch.tensor([2**62 + 1, -1])),
        ("bfloat16", torch.tensor([-float("inf"), 1 / 3])),
    ],
)
def test_numbers_that_fit_are_taken_from_other_dtypes_rounded_at_most(dtype, values):
    storage = RolloutStorage(2, 1, ((), dtype), None, (ACTIONS,), generator=0)
    storage.add_transitions(make_transition(0, 2, critic_observations=None, observations=values))
    expected = torch.as_tensor(values).to(getattr(torch, dtype))
    assert torch.equal(
        storage.observations[0].double().nan_to_num(7), expected.double().nan_to_num(7)
    )
