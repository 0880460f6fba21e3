"""Environments as a recording sees them: gymnasium's vector API and the batched-tensor convention.

One rule: an adapter says of every step which frame each env has, how it ended, what its true last
observation was and what the policy sees next; resets and their conventions stay in here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from storage.errors import UsageError
from storage.host_arrays import as_given


@dataclass
class Step:
    """What came of one step of all envs.

    Attributes:
        record: Keyword values for `RolloutWriter.add` besides the observations before the step.
        action: The action that was executed, as recorded.
        observation, privileged_observation: What the policy sees next.
    """

    record: dict[str, Any]
    action: Any
    observation: Any
    privileged_observation: Any = None


class EnvAdapter(ABC):
    """A batch of environments under one convention.

    Attributes:
        num_envs: How many step together.
        name: For the metadata.
    """

    def __init__(self, env: Any) -> None:
        self.env = env
        self.num_envs = int(env.num_envs)
        spec = getattr(env, "spec", None)
        self.name = str(getattr(spec, "id", None) or type(getattr(env, "unwrapped", env)).__name__)

    @abstractmethod
    def start(self, seed: int | None) -> tuple[Any, Any]:
        """Reset all envs; give (observation, privileged observation or None)."""

    @abstractmethod
    def step(self, actions: Any) -> Step:
        """Step all envs."""


class GymVectorAdapter(EnvAdapter):
    """A gymnasium vector env in any of its three autoreset modes."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        mode = (getattr(env, "metadata", None) or {}).get("autoreset_mode", "NextStep")
        # Environments of gymnasium 1.0 do not say; they reset in the step after the last.
        self._mode = str(getattr(mode, "value", mode))
        self._has_dummy_step = np.zeros(self.num_envs, bool)

    def start(self, seed: int | None) -> tuple[Any, Any]:
        observation, _ = self.env.reset(seed=seed)
        self._has_dummy_step[:] = False
        return observation, None

    def step(self, actions: Any) -> Step:
        actions = self._as_executed(actions)
        observation, reward, terminated, truncated, infos = self.env.step(copied(actions))
        record = {"reward": reward, "terminated": terminated, "truncated": truncated}
        done = np.asarray(terminated, bool) | np.asarray(truncated, bool)
        if self._mode == "NextStep":
            # In the step after its last an env only resets: that step is no frame.
            record["env_mask"] = ~self._has_dummy_step
            done &= ~self._has_dummy_step
            record["final_observation"] = observation
            self._has_dummy_step = done
        elif self._mode == "SameStep":
            if done.any():
                record["final_observation"] = _final_rows(infos, done, observation)
        else:
            if done.any():
                record["final_observation"] = copied(observation)
                observation, _ = self.env.reset(options={"reset_mask": done.copy()})
        return Step(record, actions, observation)

    def _as_executed(self, actions: Any) -> Any:
        """Give actions as the space wants them: arrays of its dtype and shape."""

        def convert(value: Any, dtype: Any, shape: Any) -> np.ndarray:
            array = value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
            if shape is not None and array.shape != shape and array.size == int(np.prod(shape)):
                array = array.reshape(shape)
            return np.array(array, dtype=dtype)

        def convert_all(value: Any, space: Any) -> Any:
            if isinstance(value, Mapping):
                return {key: convert_all(item, space[key]) for key, item in value.items()}
            if isinstance(value, tuple) and isinstance(getattr(space, "spaces", None), tuple):
                return tuple(map(convert_all, value, space.spaces))
            return convert(value, getattr(space, "dtype", None), getattr(space, "shape", None))

        return convert_all(actions, getattr(self.env, "action_space", None))


def _final_rows(infos: Mapping[str, Any], done: np.ndarray, observation: Any) -> Any:
    """Stack the final observations of the envs that ended, as gymnasium hands them over env by env."""
    found = infos.get("final_obs", infos.get("final_observation"))
    if found is None:
        raise UsageError(
            "record the final observations", "", "infos['final_obs'] from an env that resets in the same step", "none"
        )
    rows = [found[env] for env in np.flatnonzero(done)] if not isinstance(found, Mapping) else None

    def gather(value: Any, path: tuple[Any, ...]) -> Any:
        if isinstance(value, Mapping):
            return {key: gather(item, (*path, key)) for key, item in value.items()}
        if isinstance(value, tuple):
            return tuple(gather(item, (*path, number)) for number, item in enumerate(value))
        if rows is None:
            return np.stack(list(_at(found, path)[done])).astype(value.dtype)
        return np.stack([np.asarray(_at(row, path), value.dtype) for row in rows])

    return gather(observation, ())


def _at(tree: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


class TensorEnvAdapter(EnvAdapter):
    """A batched simulator: `step(actions) -> obs, privileged_obs, rewards, dones, infos`.

    Envs reset themselves in the step in which they end. `infos["time_outs"]` marks truncations;
    `infos["final_observation"]` and `infos["final_privileged_observation"]` are recorded if given.
    """

    def start(self, seed: int | None) -> tuple[Any, Any]:
        if seed is not None and hasattr(self.env, "seed"):
            self.env.seed(seed)
        observation = privileged = None
        if hasattr(self.env, "reset"):
            observation, privileged = _pair(self.env.reset())
        if hasattr(self.env, "get_observations"):
            observation, beside = _pair(self.env.get_observations())
            privileged = beside if beside is not None else privileged
        if hasattr(self.env, "get_privileged_observations"):
            privileged = self.env.get_privileged_observations()
        if observation is None:
            raise UsageError(
                "start the environments", repr(self.name), "reset() or get_observations()", "neither gives any"
            )
        return observation, privileged

    def step(self, actions: Any) -> Step:
        executed = copied(actions)  # simulators clip in place
        outcome = self.env.step(actions)
        if len(outcome) == 5:
            observation, privileged, rewards, dones, infos = outcome
        elif len(outcome) == 4:
            observation, rewards, dones, infos = outcome
            privileged = _critic(infos)
        else:
            expected = "obs, privileged_obs, rewards, dones, infos"
            raise UsageError("step the environments", repr(self.name), expected, f"{len(outcome)} values")
        infos = {} if infos is None else infos
        record: dict[str, Any] = {"reward": rewards, "done": dones, "timeout": infos.get("time_outs")}
        for name, keys in _FINAL_KEYS.items():
            record[name] = next((infos[key] for key in keys if infos.get(key) is not None), None)
        return Step(record, executed, observation, privileged)


_FINAL_KEYS = {
    "final_observation": ("final_observation", "final_observations", "final_obs", "terminal_observation"),
    "final_privileged_observation": ("final_privileged_observation", "final_critic_observations"),
}


def copied(tree: Any) -> Any:
    """Copy the tensors and arrays of nested mappings and tuples; None stays None."""
    if tree is None:
        return None
    return _mapped(lambda leaf: leaf.detach().clone() if isinstance(leaf, torch.Tensor) else np.array(leaf), tree)


def named(tree: Any) -> Any:
    """Turn tuples (of `spaces.Tuple`), which have no names, into mappings with the keys "0", "1", ..."""
    if isinstance(tree, tuple):
        tree = {str(number): item for number, item in enumerate(tree)}
    return {key: named(item) for key, item in tree.items()} if isinstance(tree, Mapping) else tree


def _mapped(function: Callable[[Any], Any], tree: Any) -> Any:
    if isinstance(tree, Mapping):
        return {key: _mapped(function, item) for key, item in tree.items()}
    return tuple(_mapped(function, item) for item in tree) if isinstance(tree, tuple) else function(tree)


def _pair(value: Any) -> tuple[Any, Any]:
    """Read (observation, privileged) from what resets return: obs, (obs, privileged) or (obs, extras)."""
    if not isinstance(value, tuple):
        return value, None
    beside = value[1] if len(value) > 1 else None
    return value[0], _critic(beside) if isinstance(beside, Mapping) else beside


def _critic(infos: Any) -> Any:
    groups = infos.get("observations") if isinstance(infos, Mapping) else None
    return groups.get("critic") if isinstance(groups, Mapping) else None


def adapt_env(env: Any) -> EnvAdapter:
    """Find the convention of an env by what it offers."""
    if not hasattr(env, "num_envs") or not hasattr(env, "step"):
        raise UsageError(
            "record", f"from {type(env).__name__}", "a vectorized environment with num_envs and step()", "none",
            "Wrap single environments with gymnasium.vector.SyncVectorEnv",
        )  # fmt: skip
    if hasattr(env, "get_observations") or not hasattr(env, "single_action_space"):
        return TensorEnvAdapter(env)
    return GymVectorAdapter(env)


@dataclass
class PolicyAdapter:
    """A policy as a function of the observation.

    A `torch.nn.Module` is given tensors on its device and of its dtype; anything else gets the
    observation as the environment gave it. Objects are asked for `act_inference`, then `act`.
    """

    policy: Any
    act: Callable[[Any], Any] = field(init=False)
    name: str = field(init=False)

    def __post_init__(self) -> None:
        methods = (getattr(self.policy, name, None) for name in ("act_inference", "act"))
        found = next((method for method in methods if callable(method)), self.policy)
        if not callable(found):
            raise UsageError(
                "record",
                f"with {type(self.policy).__name__}",
                "a callable, or an object with act_inference or act",
                "neither",
            )
        self.act = found
        owner = getattr(self.policy, "__self__", self.policy)
        self.name = getattr(self.policy, "__name__", "") if owner is self.policy else type(owner).__name__
        self.name = self.name or type(self.policy).__name__

    @torch.no_grad()
    def __call__(self, observation: Any) -> Any:
        if not isinstance(self.policy, torch.nn.Module):
            return self.act(observation)
        parameter = next(self.policy.parameters(), torch.zeros((), device="cpu"))

        def to_tensor(value: Any) -> torch.Tensor:
            tensor = as_given(value)
            return tensor.to(parameter.device, parameter.dtype if tensor.is_floating_point() else tensor.dtype)

        return self.act(_mapped(to_tensor, observation))
