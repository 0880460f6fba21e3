"""Saved rollout storages: their structure, saves while a collector runs, random states."""

from __future__ import annotations

import json
import threading

import pytest
import torch

from storage import (
    ActionLabelRollout,
    DictBuffer,
    HiddenStates,
    QueueRolloutStorage,
    ReplayBuffer,
    RolloutStorage,
    SarsaRolloutStorage,
    SchemaError,
    load_store,
)
from storage.errors import CorruptFileError, ForeignFileError, RolloutDataWarning
from storage.saving.saved_store import STORES, State, Store
from tests.saved import config_of
from tests.storage.rollouts import (
    ACTIONS,
    assert_same,
    broken,
    everything,
    make_storage,
    make_transition,
)

KINDS = {
    "plain": (RolloutStorage, {}),
    "queue": (QueueRolloutStorage, {"buffer_dilation_ratio": 1.5}),
    "labels": (ActionLabelRollout, {"buffer_dilation_ratio": 2.0}),
    "sarsa": (SarsaRolloutStorage, {"emit_next_valid": True}),
}


def advance(storage, first, count, hidden=False):
    """Add steps with flags, labels, next observations and states, where the storage takes them."""
    num_envs = storage.num_envs
    for step in range(first, first + count):
        done = torch.tensor([(step + env) % 3 == 0 for env in range(num_envs)])
        transition = make_transition(
            step, num_envs, 1, done, time_outs=done, bootstrap_values=torch.ones(num_envs)
        )
        if isinstance(storage, ActionLabelRollout):
            transition.action_labels = torch.full((num_envs, ACTIONS), float(step))
        if isinstance(storage, SarsaRolloutStorage):
            transition.next_observations = transition.observations + 1.5
            transition.next_critic_observations = transition.critic_observations + 1.5
        if hidden:
            transition.hidden_states = HiddenStates(torch.full((2, num_envs, 3), float(step)), None)
        storage.add_transitions(transition)
        if isinstance(storage, QueueRolloutStorage) and storage.step % 4 == 0:
            storage.clear()


def make(kind, state):
    cls, options = KINDS[kind]
    storage = make_storage(3, 4, cls, **options)
    count = {"empty": 0, "part": 2, "full": 4, "wrapped": 9}[state]
    if state == "wrapped" and not isinstance(storage, QueueRolloutStorage):
        advance(storage, 0, 4)
        storage.clear()
        count = 3
    advance(storage, 0, count, hidden=kind in ("plain", "queue") and state != "wrapped")
    return storage


def test_states_keep_their_structure_and_nested_observations_their_dtypes(tmp_path):
    shape = {"image": ((2, 2), "uint8"), "deep": {"half": ((3,), "bfloat16"), "id": ((), "int64")}}
    storage = RolloutStorage(2, 3, shape, None, (2,), generator=0)
    for step in range(3):
        observations = {
            "image": torch.full((2, 2, 2), step, dtype=torch.uint8),
            "deep": {
                "half": torch.full((2, 3), step + 0.5).bfloat16(),
                "id": torch.tensor([step, step + 1]),
            },
        }
        hidden = (None, (torch.ones(1, 2, 4), torch.zeros(3, 2, 5)))
        transition = make_transition(step, 2, hidden_states=hidden, critic_observations=None)
        storage.add_transitions(broken(transition, "observations", observations))
    storage.save(tmp_path / "kept")
    loaded = load_store(tmp_path / "kept")
    assert (
        type(loaded) is RolloutStorage
        and loaded.observations["deep"]["half"].dtype == torch.bfloat16
    )
    assert_same(everything(storage), everything(loaded))
    actor, (first, second) = loaded.saved_hidden_states
    assert actor is None and first.shape == (3, 1, 2, 4) and second.shape == (3, 3, 2, 5)
    assert loaded.obs_shape["image"] == ((2, 2), "uint8")


def test_a_state_of_another_class_or_of_other_arguments_is_refused(tmp_path):
    storage = make("plain", "full")
    before = everything(storage)
    with pytest.raises(
        SchemaError, match="the state belongs to a QueueRolloutStorage, expected a RolloutStorage"
    ):
        storage.load_state_dict(make("queue", "part").state_dict())
    with pytest.raises(SchemaError, match="the state has num_envs=4, this object has num_envs=3"):
        storage.load_state_dict(make_storage(4, 4).state_dict())
    state = make("plain", "full").state_dict()
    state["tensors"]["actions"] = state["tensors"]["actions"][:2]
    with pytest.raises(
        SchemaError, match=r"'actions' of the state is .*, expected float32 of shape \(4, 3, 2\)"
    ):
        storage.load_state_dict(state)
    assert_same(before, everything(storage))
    storage.save(tmp_path / "kept")
    with pytest.raises(ForeignFileError, match="'RolloutStorage'"):
        QueueRolloutStorage.load(tmp_path / "kept")


def test_a_state_saved_while_another_thread_adds_is_consistent(tmp_path):
    storage = make_storage(256, 64, QueueRolloutStorage, generator=0)
    is_over, added = threading.Event(), threading.Event()

    def add():
        step = 0
        while not is_over.is_set():
            x = torch.full((256, 1), float(step % 1000))
            wide = {"observations": x.expand(-1, 3), "critic_observations": x.expand(-1, 5)}
            storage.add_transitions(make_transition(0, 256, rewards=x, values=x, **wide))
            step += 1
            if step > 64:
                added.set()

    thread = threading.Thread(target=add)
    thread.start()
    try:
        added.wait(60)
        for _ in range(8):
            storage.save(tmp_path / "kept")
            loaded, tensors = (
                RolloutStorage.load(tmp_path / "kept"),
                storage.state_dict()["tensors"],
            )
            assert torch.equal(loaded.observations[:, 0, 0], loaded.values[:, 0, 0])
            assert torch.equal(tensors["observations"][:, 0, 0], tensors["values"][:, 0, 0])
    finally:
        is_over.set()
        thread.join()


def test_a_config_without_its_numbers_is_reported(tmp_path):
    make("sarsa", "full").save(tmp_path / "kept")
    path = tmp_path / "kept" / "config.json"
    path.write_text(json.dumps({**config_of(path), "numbers": {}}))
    with pytest.raises(CorruptFileError, match="is damaged: the state has no '"):
        load_store(tmp_path / "kept")


def test_i18_every_storage_has_the_attributes_that_its_methods_read(tmp_path):
    for cls in (RolloutStorage, QueueRolloutStorage, SarsaRolloutStorage, ActionLabelRollout):
        storage = make_storage(2, 2, cls)
        for name in storage.state_dict()["tensors"]:
            assert name == "rng" or getattr(storage, name.removeprefix("whole/")) is not None
        storage.save(tmp_path / cls.__name__)
        assert type(load_store(tmp_path / cls.__name__)) is cls
    ReplayBuffer(3, 4).save(tmp_path / "replay")
    assert type(load_store(tmp_path / "replay", device="cpu")) is ReplayBuffer


def test_a_store_without_the_state_methods_cannot_be_created() -> None:
    class Nameless(Store):
        def _get_state(self) -> State:
            return State({}, {}, {})

    try:
        with pytest.raises(TypeError, match=r"abstract method '?_set_state'?"):
            Nameless()
    finally:
        del STORES["Nameless"]


#: Bytes of the state of a generator on CUDA.
CUDA_STATE_BYTES = 16


def with_random_state_of_cuda(state, number):
    tensors = {
        **state["tensors"],
        "rng": torch.full((CUDA_STATE_BYTES,), number, dtype=torch.uint8),
    }
    return {**state, "tensors": tensors}


@pytest.mark.parametrize("make", [lambda: make_storage(4, 3), lambda: DictBuffer(8, generator=1)])
def test_a_random_state_of_another_device_reseeds_the_generator_with_a_warning(make):
    saved = make().state_dict()
    states = []
    for number in (1, 1, 2):
        loaded = make()
        with pytest.warns(RolloutDataWarning, match="The generator is seeded from it"):
            loaded.load_state_dict(with_random_state_of_cuda(saved, number))
        states.append(loaded.rng.get_state())
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[0], states[2])
    assert not torch.equal(states[0], make().rng.get_state())


def test_a_random_state_that_belongs_to_no_generator_is_refused():
    storage = make_storage(4, 3)
    state = storage.state_dict()
    state["tensors"]["rng"] = torch.zeros(17, dtype=torch.uint8)
    with pytest.raises(SchemaError):
        storage.load_state_dict(state)
