"""Identifiable rollouts for tests: every value encodes its field, step and env."""

from __future__ import annotations

import dataclasses
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from storage import RolloutStorage, Transition

OBS, CRITIC, ACTIONS = 3, 5, 2


def value_of(field: int, step: int, num_envs: int, *shape: int) -> torch.Tensor:
    """Return `[num_envs, *shape]` of 1000 * field + step + env / 100, equal within a row."""
    rows = 1000.0 * field + step + torch.arange(num_envs) / 100
    return rows.reshape(-1, *([1] * len(shape))).expand(num_envs, *shape).clone()


def make_transition(
    step: int, num_envs: int, num_rewards: int = 1, done: Any = None, **more: Any
) -> Transition:
    """Return the transition of one step. Numbers of fields are the positions below."""
    names = (
        "observations",
        "critic_observations",
        "actions",
        "rewards",
        "values",
        "actions_log_prob",
    )
    sizes = (OBS, CRITIC, ACTIONS, num_rewards, num_rewards, 1)
    made = {
        name: value_of(i, step, num_envs, size)
        for i, (name, size) in enumerate(zip(names, sizes, strict=True))
    }
    made["action_mean"] = value_of(6, step, num_envs, ACTIONS)
    made["action_sigma"] = value_of(7, step, num_envs, ACTIONS)
    made["dones"] = torch.zeros(num_envs, 1) if done is None else torch.as_tensor(done)
    return Transition(**{**made, **more})


def make_storage(
    num_envs: int = 4, num_steps: int = 6, cls: type = RolloutStorage, **more: Any
) -> Any:
    """Create an empty storage of identifiable shapes."""
    arguments = {"critic_obs_shape": (CRITIC,), "generator": 0, **more}
    return cls(num_envs, num_steps, (OBS,), actions_shape=(ACTIONS,), **arguments)


def fill(
    storage: Any,
    dones: torch.Tensor | None = None,
    first: int = 0,
    count: int | None = None,
    **more: Any,
) -> Any:
    """Add steps `first` to `first + count` with `dones` `[count, B]`; return the storage."""
    count = storage.num_transitions_per_env if count is None else count
    for i in range(count):
        done = None if dones is None else dones[i]
        storage.add_transitions(
            make_transition(first + i, storage.num_envs, storage.num_rewards, done, **more)
        )
    return storage


def columns_of(storage: Any) -> dict[str, torch.Tensor]:
    """Copy every column, by name."""
    return {name: x for name, x in storage.state_dict()["tensors"].items() if name != "rng"}


def everything(storage: Any) -> dict[str, Any]:
    """Copy the state of a storage, to compare before and after."""
    state = storage.state_dict()
    return {**state["tensors"], **state["numbers"], "size": storage.num_transitions_per_env}


def assert_same(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Check that both copies are identical, bit by bit."""
    assert before.keys() == after.keys()
    for name, value in before.items():
        other = after[name]
        if isinstance(value, torch.Tensor):
            assert value.dtype == other.dtype and value.shape == other.shape, name
            same = torch.equal(value.nan_to_num(nan=-77.5), other.nan_to_num(nan=-77.5))
            assert same, name
        else:
            assert value == other, name


def broken(transition: Transition, name: str, value: Any) -> Transition:
    """Copy a transition with one field replaced."""
    return dataclasses.replace(transition, **{name: value})


class Wrapped(dict[Any, Any]):
    """A substitute for `TensorDict` without the package."""

    def __init__(self, tree: dict[str, torch.Tensor], batch_size: Any = None) -> None:
        super().__init__(tree)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, int):
            return Wrapped({name: leaf[key] for name, leaf in self.items()})
        return super().__getitem__(key)

    def clone(self) -> Wrapped:
        return Wrapped({name: leaf.clone() for name, leaf in self.items()})


def replace_tensordict(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `RslRlStorage` wrap its observations without the package `tensordict`."""
    monkeypatch.setitem(sys.modules, "tensordict", SimpleNamespace(TensorDict=Wrapped))
