"""`RolloutStorage`, feed-forward: its contract, and errors of earlier systems."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from storage import (
    Column,
    Field,
    FieldTypeError,
    MiniBatch,
    MissingFieldError,
    QueueRolloutStorage,
    RolloutOverflowError,
    RolloutStorage,
    SchemaError,
    Transition,
    UsageError,
)
from tests.storage.rollouts import (
    ACTIONS,
    CRITIC,
    OBS,
    assert_same,
    broken,
    everything,
    fill,
    make_storage,
    make_transition,
)

REQUIRED = [name for name, value in vars(make_transition(0, 1)).items() if value is not None]


def test_tensors_have_the_shapes_and_dtypes_of_the_contract():
    storage = make_storage(4, 6, num_rewards=3)
    shapes = {
        "observations": (6, 4, OBS),
        "critic_observations": (6, 4, CRITIC),
        **dict.fromkeys(("actions", "mu", "sigma"), (6, 4, ACTIONS)),
        **dict.fromkeys(("rewards", "values", "returns", "advantages"), (6, 4, 3)),
        **dict.fromkeys(("actions_log_prob", "dones", "time_outs"), (6, 4, 1)),
    }
    for name, shape in shapes.items():
        tensor = getattr(storage, name)
        assert tuple(tensor.shape) == shape, name
        assert tensor.dtype == {"dones": torch.uint8, "time_outs": torch.bool}.get(
            name, torch.float32
        )
        assert not tensor.any()
    assert (
        storage.bootstrap_values is None
        and storage.step == 0
        and storage.num_transitions_per_env == 6
    )
    with pytest.raises(AttributeError, match="no attribute 'reward'"):
        _ = storage.reward


@pytest.mark.parametrize("absent", [None, (None,), [None]])
def test_without_critic_observations_the_batch_carries_the_observations_twice(absent):
    storage = fill(make_storage(critic_obs_shape=absent))
    assert storage.critic_observations is None
    storage.compute_returns(torch.zeros(4, 1), 0.9, 0.9)
    for batch in storage.mini_batch_generator(2, 1):
        assert batch.critic_obs is batch.obs


def test_each_added_transition_is_stored_at_its_step():
    storage = fill(make_storage())
    for step in range(6):
        expected = make_transition(step, 4)
        assert torch.equal(storage.observations[step], expected.observations)
        assert torch.equal(storage.mu[step], expected.action_mean)
        assert torch.equal(storage.actions_log_prob[step], expected.actions_log_prob)


@pytest.mark.parametrize(
    "make", [torch.Tensor.float, torch.Tensor.bool, torch.Tensor.long, torch.Tensor.to, np.asarray]
)
def test_flags_of_any_dtype_and_flat_values_are_accepted(make):
    done = make(
        torch.tensor([0, 3, 0, 1], dtype=torch.uint8),
        **({} if make is not torch.Tensor.to else {"dtype": torch.int8}),
    )
    storage = make_storage(num_steps=1)
    flat = make_transition(0, 4, done=done, time_outs=done)
    for name in ("rewards", "values", "actions_log_prob"):
        flat = broken(flat, name, getattr(flat, name).squeeze(-1))
    storage.add_transitions(flat)
    assert storage.dones.flatten().tolist() == [0, 1, 0, 1]
    assert storage.time_outs.flatten().tolist() == [False, True, False, True]
    assert torch.equal(storage.rewards[0], make_transition(0, 4).rewards)


def test_added_tensors_are_copied_never_aliased():
    storage = make_storage()
    transition = make_transition(0, 4)
    transition.observations.requires_grad_()
    storage.add_transitions(transition)
    with torch.no_grad():
        transition.observations.fill_(-1)
    assert torch.equal(storage.observations[0], make_transition(0, 4).observations)
    assert not storage.observations.requires_grad


def test_adding_to_a_full_storage_raises_and_changes_nothing():
    storage = fill(make_storage())
    before = everything(storage)
    with pytest.raises(RolloutOverflowError) as caught:
        storage.add_transitions(make_transition(9, 4))
    assert isinstance(caught.value, OverflowError) and isinstance(caught.value, AssertionError)
    assert str(caught.value) == (
        "The storage is full with 6 steps. Call clear() after each update."
    )
    assert_same(before, everything(storage))


def test_clear_moves_only_the_cursor():
    storage = fill(make_storage())
    before = everything(storage)
    storage.clear()
    assert storage.step == 0
    storage.step = 6
    assert_same(before, everything(storage))


def test_time_outs_of_an_earlier_rollout_are_cleared():
    storage = make_storage(num_steps=1)
    storage.add_transitions(make_transition(0, 4, time_outs=torch.ones(4)))
    storage.clear()
    storage.add_transitions(make_transition(0, 4))
    assert not storage.time_outs.any()


@pytest.mark.parametrize("name", REQUIRED)
def test_a_missing_required_field_raises_with_its_name(name):
    storage = make_storage()
    before = everything(storage)
    with pytest.raises(MissingFieldError) as caught:
        storage.add_transitions(broken(make_transition(0, 4), name, None))
    start = f"RolloutStorage.add_transitions: field '{name}' is missing: expected "
    assert str(caught.value).startswith(start)
    assert isinstance(caught.value, ValueError)
    assert_same(before, everything(storage))


def test_an_unknown_field_raises_with_its_name():
    storage = make_storage()
    with pytest.raises(
        MissingFieldError, match=r"unknown field 'action_labels'. This storage has the fields "
    ):
        storage.add_transitions(make_transition(0, 4, action_labels=torch.zeros(4, ACTIONS)))


def test_errors_of_shape_and_dtype_state_the_expected_value():
    storage = make_storage()
    for name, value, text in [
        (
            "rewards",
            torch.zeros(4, 2),
            "field 'rewards' has shape (4, 2), expected (4, 1) or (4,).",
        ),
        (
            "dones",
            torch.zeros(3),
            "field 'dones' has shape (3,), expected (4, 1) or (4,).",
        ),
        (
            "actions",
            torch.zeros(4),
            "field 'actions' has shape (4,), expected (4, 2).",
        ),
        (
            "values",
            torch.zeros(4, dtype=torch.complex64),
            "field 'values' has dtype complex64, expected float32. Convert the values first.",
        ),
        (
            "observations",
            {"a": torch.zeros(4, 3)},
            "field 'observations' has type dict, expected float32 of shape (4, 3).",
        ),
    ]:
        with pytest.raises(SchemaError) as caught:
            storage.add_transitions(broken(make_transition(0, 4), name, value))
        assert str(caught.value) == f"RolloutStorage.add_transitions: {text}"


BAD_VALUES = [
    torch.zeros(4, 7),
    torch.zeros(3, 2),
    torch.zeros(4, 2, 2),
    torch.zeros(0),
    torch.zeros(4, OBS, dtype=torch.complex64),
    torch.zeros(4, ACTIONS, dtype=torch.complex64),
    torch.zeros(4, 1, device="meta"),
    torch.zeros(4, ACTIONS).to_sparse(),
    torch.zeros(4, 1).to_sparse(),
    "text",
    object(),
    {"a": torch.zeros(4, 1)},
    [[1.0, 2.0], [3.0]],
    np.array(["a", "b", "c", "d"]),
]


@settings(max_examples=120, deadline=None)
@given(
    st.sampled_from([*REQUIRED, "time_outs", "bootstrap_values"]),
    st.sampled_from(range(len(BAD_VALUES))),
    st.integers(0, 3),
)
def test_a_failed_add_leaves_the_storage_bit_identical(name, bad, num_added):
    storage = fill(make_storage(), count=num_added, time_outs=torch.ones(4))
    before = everything(storage)
    with pytest.raises((SchemaError, FieldTypeError)):
        storage.add_transitions(broken(make_transition(5, 4), name, BAD_VALUES[bad]))
    assert_same(before, everything(storage))


def test_numbers_of_other_dtypes_are_converted_where_nothing_but_precision_is_lost():
    storage = make_storage()
    transition = make_transition(3, 4)
    storage.add_transitions(broken(transition, "actions", transition.actions.double()))
    storage.add_transitions(broken(transition, "actions", transition.actions.to(torch.int32)))
    storage.add_transitions(broken(transition, "actions", transition.actions.numpy()))
    assert torch.equal(storage.actions[0], transition.actions)
    assert torch.equal(storage.actions[1], transition.actions.floor())
    assert torch.equal(storage.actions[2], transition.actions)


@pytest.mark.parametrize("arguments", [(0, 5), (5, 0), (2.0, 5), (-1, 5), (True, 5), (5, "x")])
def test_impossible_sizes_are_refused(arguments):
    with pytest.raises(UsageError, match=r"^RolloutStorage: num_.* must be "):
        RolloutStorage(*arguments, (3,), None, (2,))
    with pytest.raises(
        SchemaError, match=r"^RolloutStorage: the shape of 'actions_shape' must be "
    ):
        RolloutStorage(2, 2, (3,), None, "two")


class CostStorage(RolloutStorage):
    """A subclass that adds one field in one place. The shape of the field is an argument."""

    def __init__(self, *arguments, cost_shape=(2,), **options):
        self.cost_shape = cost_shape
        super().__init__(*arguments, **options)

    def declare_columns(self):
        fields = (Field("costs", self.cost_shape),)
        return [
            *super().declare_columns(),
            Column("costs", fields, "costs", "old_costs", argument="cost_shape"),
        ]


def test_i17_a_subclass_adds_a_field_in_one_place(tmp_path):
    class CostTransition(Transition):
        costs = None

    storage = make_storage(2, 3, CostStorage)
    assert storage.costs.shape == (3, 2, 2)
    transition = CostTransition(**vars(make_transition(0, 2)))
    with pytest.raises(MissingFieldError, match="field 'costs' is missing"):
        storage.add_transitions(transition)
    transition.costs = torch.ones(2, 2)
    storage.add_transitions(transition)
    assert storage.costs[0].eq(1).all()


def test_transitions_mini_batches_and_saved_arguments_follow_from_a_column(tmp_path):
    storage = make_storage(2, 3, CostStorage, cost_shape=(4,))
    transition = storage.Transition()
    assert transition.costs is None and isinstance(transition, Transition)
    for step in range(3):
        vars(transition).update(
            vars(make_transition(step, 2)) | {"costs": torch.full((2, 4), float(step))}
        )
        storage.add_transitions(transition)
    transition.clear()
    assert transition.costs is None and not hasattr(RolloutStorage.Transition(), "costs")
    storage.compute_returns(torch.zeros(2), 0.9, 0.9)
    storage.save(tmp_path / "kept")
    loaded = CostStorage.load(tmp_path / "kept")
    assert loaded.cost_shape == (4,) and torch.equal(loaded.costs, storage.costs)
    for batch in [
        *loaded.mini_batch_generator(2, 1),
        *copy.deepcopy(loaded).recurrent_mini_batch_generator(1, 1),
    ]:
        assert batch._fields == (*RolloutStorage.MiniBatch._fields, "old_costs")
        expected = (
            batch.obs[..., :1].floor()
            if batch.masks is None
            else torch.arange(3.0).reshape(3, 1, 1)
        )
        assert torch.equal(batch.old_costs, expected.expand_as(batch.old_costs))


def test_transition_clear_resets_every_field():
    transition = make_transition(0, 2, time_outs=torch.ones(2))
    transition.clear()
    assert all(value is None for value in vars(transition).values())
    assert RolloutStorage.Transition() == Transition()


def test_fields_that_type_checkers_see_are_those_of_the_columns():
    assert (make_storage().Transition, make_storage().MiniBatch) == (Transition, MiniBatch)


def test_assigning_to_a_column_writes_into_it():
    storage = fill(make_storage())
    place = storage.returns.data_ptr()
    storage.returns = storage.values + 1
    assert torch.equal(storage.returns, storage.values + 1) and storage.returns.data_ptr() == place
    with pytest.raises(SchemaError) as caught:
        storage.returns = torch.zeros(6, 4)
    text = "RolloutStorage: field 'returns' has shape (6, 4), expected (6, 4, 1)."
    assert str(caught.value) == text


def test_a_transition_can_be_replaced_copied_and_pickled():
    transition = make_transition(1, 3)
    assert torch.equal(dataclasses.replace(transition).actions, transition.actions)


def test_sizes_may_be_numpy_integers(tmp_path):
    storage = RolloutStorage(np.int64(2), np.int32(3), np.int64(4), None, (np.int64(2),))
    storage.save(tmp_path / "kept")
    assert storage.observations.shape == (3, 2, 4) and storage.actions.shape == (3, 2, 2)


def test_flags_assigned_from_other_dtypes_are_kept_as_zero_and_one():
    storage = fill(make_storage())
    storage.dones = torch.full((6, 4, 1), 2)
    storage.time_outs = torch.full((6, 4, 1), 0.5)
    assert storage.dones.eq(1).all() and storage.time_outs.all()
    with pytest.raises(FieldTypeError, match="field 'returns' must be a dense tensor, got float"):
        storage.returns = 1.0


@pytest.mark.parametrize("how", ["assigned", "in place"])
def test_time_outs_written_by_hand_are_cleared_for_the_next_rollout(how):
    storage = fill(make_storage())
    if how == "assigned":
        storage.time_outs = torch.ones(6, 4, 1)
    else:
        storage.time_outs[:] = True
    storage.clear()
    assert not fill(storage).time_outs.any()


def test_observations_without_a_shape_and_invalid_seeds_raise():
    with pytest.raises(SchemaError, match="the shape of 'obs_shape' must be "):
        RolloutStorage(2, 3, None, None, (2,))
    with pytest.raises(UsageError, match=r"generator must be .* a seed of 64 bits, got 'x'"):
        make_storage(generator="x")


@pytest.mark.parametrize(
    "options, text",
    [
        (
            {"device": "nope"},
            "QueueRolloutStorage: device must be a torch device such as 'cpu' or 'cuda:0', got 'nope'",
        ),
        ({"device": None}, "device must be a torch device such as 'cpu' or 'cuda:0', got None"),
        (
            {"output_device": "nope"},
            "output_device must be a torch device such as 'cpu' or 'cuda:0', got 'nope'",
        ),
        ({"num_rewards": True}, "num_rewards must be an integer >= 1, got True"),
        ({"generator": 2**64}, "a seed of 64 bits, got 18446744073709551616"),
        ({"buffer_dilation_ratio": float("inf")}, "buffer_dilation_ratio must be .*>= 1, got inf"),
        ({"buffer_dilation_ratio": float("nan")}, "buffer_dilation_ratio must be .*>= 1, got nan"),
        ({"buffer_dilation_ratio": "a"}, "buffer_dilation_ratio must be .*>= 1, got 'a'"),
        ({"buffer_dilation_ratio": None}, "buffer_dilation_ratio must be .*>= 1, got None"),
    ],
)
def test_invalid_options_raise_with_their_name(options, text):
    with pytest.raises(UsageError, match=text):
        make_storage(2, 2, QueueRolloutStorage, **options)


@pytest.mark.parametrize(
    "shape, got",
    [
        ({}, "no names"),
        ({"a": {}}, "no names"),
        ({"": (3,)}, "the name ''"),
        ({5: (3,)}, "the name 5"),
        ({"a/b": (3,)}, "the name 'a/b'"),
        ({"a": (3,), "a/b": (3,)}, "the name 'a/b'"),
        ({"a": {"b/": (3,)}}, "the name 'b/'"),
    ],
)
@pytest.mark.parametrize("name", ["observations", "actions", "critic_observations"])
def test_invalid_field_names_raise_at_construction(name, shape, got):
    shapes = {"observations": (3,), "critic_observations": None, "actions": (2,), name: shape}
    if name == "critic_observations" and not shape:
        assert RolloutStorage(2, 2, *shapes.values()).critic_observations is None
        return
    argument = {"observations": "obs_shape", "actions": "actions_shape"}.get(
        name, "critic_obs_shape"
    )
    where = f"'{argument}/a'" if isinstance(shape.get("a"), dict) else f"'{argument}'"
    with pytest.raises(SchemaError) as caught:
        RolloutStorage(2, 2, *shapes.values())
    assert str(caught.value) == (
        f"RolloutStorage: the shapes of {where} have {got}. Names must be non-empty strs without '/'."
    )


def test_a_column_cannot_be_nested_below_another_column():
    class Below(RolloutStorage):
        def declare_columns(self):
            return [
                *super().declare_columns(),
                Column("more", (Field("more", ()), Field("more/x", ())), source="more"),
            ]

    with pytest.raises(
        SchemaError,
        match="'more' is a field and cannot have the field 'more/x' below it",
    ):
        make_storage(2, 2, Below)
