"""States that no rollout storage can have raise an error, and change nothing."""

from __future__ import annotations

import json

import pytest
import torch

from storage import (
    HiddenStates,
    QueueRolloutStorage,
    RolloutStorage,
    SarsaRolloutStorage,
    SchemaError,
    load_store,
)
from storage.errors import CorruptFileError
from tests.saved import config_of
from tests.storage.rollouts import assert_same, everything, make_storage, make_transition

KINDS = (RolloutStorage, QueueRolloutStorage, SarsaRolloutStorage)
COUNTS = [True, 1.5, "q", 77, -1, None, [], 10**400]
LAYOUTS = [
    "tensors",
    3,
    True,
    {},
    ["q"],
    [["tensor", 5]],
    [{}],
    [{"names": ["a"]}, "tensor", "tensor"],
]
LAYOUTS += [
    [{"names": ["a", "a"]}, "tensor", "tensor"],
    [{"names": 5}, "tensor"],
    [{"names": ["class"]}, "tensor"],
]
LAYOUTS += [[{"names": ["tensor"]}], "tensor", ["tensor", "tensor", "tensor"], None]
FINALS = [[0], [0, 1, 1], [True], [9], [-1], "x", None, [0, 1, 2, 3]]
HAS_NEXT = [[1] * 4, None, "true", [True] * 5, [True, None]]


def filled(kind):
    storage = make_storage(3, 4, kind, critic_obs_shape=None)
    for step in range(3):
        states = HiddenStates(torch.full((1, 3, 2), float(step)), torch.ones(2, 3, 5))
        x = torch.full((3, 3), float(step))
        more = {
            "observations": x,
            "next_observations": x + 1,
            "hidden_states": states,
            "critic_observations": None,
        }
        storage.add_transitions(make_transition(step, 3, 1, torch.ones(3), **more))
    return storage


def refuse(storage, state, text):
    before = everything(storage)
    with pytest.raises(SchemaError, match=text):
        storage.load_state_dict(state)
    assert_same(before, everything(storage))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["step", "num_partial_rows", "num_rows"])
def test_counts_of_a_state_are_ints_in_their_range(kind, name):
    storage = filled(kind)
    state = storage.state_dict()
    for value in [*COUNTS, 3, 5] if name == "num_rows" else COUNTS:
        refuse(
            storage,
            {**state, "numbers": {**state["numbers"], name: value}},
            f"'{name}' of the state must be an integer in",
        )


@pytest.mark.parametrize("kind", KINDS)
def test_an_invalid_layout_of_hidden_states_raises(kind):
    storage = filled(kind)
    state = storage.state_dict()
    for layout in LAYOUTS:
        refuse(
            storage,
            {**state, "numbers": {**state["numbers"], "states": layout}},
            "state",
        )
    storage.load_state_dict(state)
    assert isinstance(storage.saved_hidden_states, HiddenStates)


@pytest.mark.parametrize("kind", KINDS)
def test_unknown_tensors_of_a_state_raise(kind):
    storage = filled(kind)
    state = storage.state_dict()
    for name in ("reward", "saved_hidden_states/9", "saved_hidden_states/x", "observations/a"):
        strange = {**state["tensors"], name: state["tensors"]["rewards"].clone()}
        refuse(storage, {**state, "tensors": strange}, f"'{name}'")


def test_values_of_queue_and_sarsa_states_are_checked():
    queue = filled(QueueRolloutStorage)
    state = queue.state_dict()
    for value in (1, None, "yes"):
        numbers = {**state["numbers"], "buffer_full": value}
        refuse(
            queue, {**state, "numbers": numbers}, "'buffer_full' of the state must be True or False"
        )
    sarsa = filled(SarsaRolloutStorage)
    state = sarsa.state_dict()
    for name, values in (("finals", FINALS), ("has_next", HAS_NEXT)):
        for value in values:
            refuse(
                sarsa,
                {**state, "numbers": {**state["numbers"], name: value}},
                # Another number of finals lacks fields, or has unknown ones.
                f"'{name}(' of the state|/)",
            )
    wrong = {
        "finals/0/envs": [
            torch.tensor([0, 1, 3]),
            torch.zeros(3),
            torch.tensor(0),
            torch.tensor([0, 1, -1]),
        ],
        "finals/0/of/observations": [torch.zeros(2, 3), torch.zeros(3, 3, dtype=torch.float64)],
        "finals/3/envs": [torch.tensor([0])],
        "whole/observations": [
            torch.zeros(4, 3, 3),
            torch.zeros(6, 3, 3),
            torch.zeros(5, 3, 3).double(),
        ],
        "whole/actions": [torch.zeros(5, 3, 2)],
    }
    for name, values in wrong.items():
        # Earlier saves have the prefix "whole/" instead of "all_".
        named = name.replace("whole/", "all_")
        for value in values:
            refuse(sarsa, {**state, "tensors": {**state["tensors"], name: value}}, f"'{named}")
    sarsa.load_state_dict(state)


@pytest.mark.parametrize(
    "name, value", [("step", 77), ("step", 1.5), ("num_partial_rows", True), ("states", ["q"])]
)
def test_a_folder_with_invalid_numbers_raises_as_damaged(tmp_path, name, value):
    filled(RolloutStorage).save(tmp_path / "kept")
    path = tmp_path / "kept" / "config.json"
    config = config_of(path)
    config["numbers"][name] = value
    path.write_text(json.dumps(config))
    with pytest.raises(CorruptFileError, match=f"'{name}'"):
        load_store(tmp_path / "kept")
