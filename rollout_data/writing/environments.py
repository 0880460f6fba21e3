"""Parsing of the results of environments: gymnasium, stable-baselines3 and GPU simulators.

The convention of an env is detected from the results of `reset` and `step`. An observation counts
as final observation only if the env marks it, or the autoreset mode of the env implies it. If
neither is known, recording raises an error that asks for `autoreset`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from storage.core import arguments
from storage.core.fields import map_leaves
from storage.core.memory import as_given, on_host
from storage.errors import FieldTypeError, SchemaError, UsageError

_MODES = {mode.replace("_", ""): mode for mode in ("next_step", "same_step", "disabled")}
#: Keys of final observations in infos.
FINAL = ("final_observation", "final_observations", "final_obs", "terminal_observation")
#: Keys of the privileged part of final observations in infos.
FINAL_PRIVILEGED = ("final_privileged_observation", "final_critic_observations")
#: Keys of time-out flags in infos.
TIME_OUTS = ("time_outs", "TimeLimit.truncated")
_PRIVILEGED_GROUPS = ("critic", "privileged")
#: Attributes by which envs of rsl_rl, legged_gym and Isaac Lab are recognized. These envs reset in
#: the step in which an episode ends. They also report `time_outs`, but so do tasks of Isaac Gym
#: that reset one step later.
_SAME_STEP_ATTRIBUTES = ("get_observations", "get_privileged_observations", "episode_length_buf")
_SAME_STEP_INFOS = {*FINAL, "final_info"}


class Simulator:
    """A batch of N environments, and the conversion of their results to values to record.

    Arguments are as in `RecordingWrapper`. A single `gymnasium.Env` is a batch of one env: only
    recorded values get an axis for envs.

    Attributes:
        seen: Copies of the last `observation` and, if there is one, `privileged_observation`.
        is_over: Whether each env needs a reset, since its episode has ended, bool `[N]`.
        infos: Infos of the last reset, as one mapping.
    """

    def __init__(self, env: Any, autoreset: str | None = None) -> None:
        num_envs = _attribute(env, "num_envs")
        self._is_single = (
            num_envs is None and hasattr(env, "action_space") and hasattr(env, "reset")
        )
        if not hasattr(env, "step") or not (self._is_single or num_envs is not None):
            raise UsageError(
                "env must be a gymnasium.Env, or a vectorized environment with num_envs and "
                f"step(), got {type(env).__name__}."
            )
        if autoreset is not None:
            arguments.choice("autoreset", autoreset, _MODES.values())
        self.env = env
        self.num_envs = 1 if self._is_single else int(num_envs)
        self.seen = dict[str, Any]()
        #: Device of the tensors that the env returns; None if it returns arrays.
        self._device: torch.device | None = None
        self.name = str(
            getattr(_attribute(env, "spec"), "id", None)
            or type(getattr(env, "unwrapped", env)).__name__
        )
        self.is_over = np.zeros(self.num_envs, bool)
        self.infos = dict[str, Any]()
        mode = autoreset or _declared_mode(env)
        self._is_mode_known = mode is not None
        self._mode = mode or ("disabled" if self._is_single else None)
        #: Whether `action_space` is the space of all envs together. In stable-baselines3 it is the
        #: space of a single env.
        self._is_space_of_all = (
            self._is_single or _attribute(env, "single_action_space") is not None
        )

    def start(self, seed: int | None) -> Any:
        """Reset all envs; return the observation as the env returns it."""
        options = {}
        observation = None
        if seed is not None and self._is_space_of_all:
            options = {"seed": seed}
        elif seed is not None and hasattr(self.env, "seed"):
            self.env.seed(seed)
        if hasattr(self.env, "reset"):
            observation = self.see(self.env.reset(**options), np.ones(self.num_envs, bool))
        if hasattr(self.env, "get_observations"):
            observation = self.see(self.env.get_observations())
        if observation is None:
            raise UsageError(
                f"neither reset() nor get_observations() of {self.name!r} returned an observation."
            )
        return observation

    def see(self, result: Any, is_reset: np.ndarray | None = None) -> Any:
        """Parse the result of `reset()` or `get_observations()`; return the observation unchanged.

        Args:
            result: The observation, or a pair with the privileged observation, infos or extras.
            is_reset: Whether each env was reset, bool `[N]`; None if no env was reset.
        """
        is_pair = isinstance(result, tuple) and len(result) == 2
        observation, second = result if is_pair else (result, None)
        self.infos = dict(joined(second)) if isinstance(second, (Mapping, list)) else {}
        privileged = _critic(second) if hasattr(second, "items") else second
        if privileged is None and hasattr(self.env, "get_privileged_observations"):
            privileged = self.env.get_privileged_observations()
        if privileged is None and not np.any(is_reset):
            privileged = self.seen.get("privileged_observation")
        if observation is not None:
            leaf = _leaf(observation)
            self._device = leaf.device if isinstance(leaf, torch.Tensor) else None
            self.seen = self.copied(_fields(observation, privileged))
        self.is_over &= True if is_reset is None else ~is_reset
        return observation

    @property
    def reset_arguments(self) -> dict[str, Any] | None:
        """Keyword arguments of the next call of `reset()`; None if no env needs a reset."""
        if self._mode != "disabled" or not self.is_over.any():
            return None
        if self._is_single:
            return {}
        # Envs of ManiSkill have the attribute `auto_reset`. They expect indices of envs to reset,
        # while envs of gymnasium expect a mask.
        if isinstance(_attribute(self.env, "auto_reset"), bool):
            return {"options": {"env_idx": self._as_env(np.flatnonzero(self.is_over))}}
        return {"options": {"reset_mask": self._as_env(self.is_over.copy())}}

    def read(self, result: Any) -> tuple[dict[str, Any], np.ndarray, Mapping[str, Any]]:
        """Parse the result of `step()`.

        Returns:
            Values for `RolloutWriter.add`; whether the episode of each env ends, bool `[N]`; and
            the infos as one mapping. If only some ending episodes have a final observation, the
            values also contain `lacks_final`: whether it is missing for each env, bool `[N]`.

        Raises:
            UsageError: The result has another form, the env needs a reset, or the autoreset mode is
                unknown.
        """
        if len(result) not in (4, 5):
            raise UsageError(
                f"step() of {self.name!r} returned {len(result)} values, expected the five values "
                "of gymnasium, or obs, [privileged_obs], rewards, dones, infos."
            )
        if self._is_single and self.is_over[0] and not self._is_mode_known:
            raise UsageError(
                f"the episode of {self.name!r} has ended. Call reset() before step(), or pass "
                "autoreset='next_step' if the environment resets itself."
            )
        observation, *middle, infos = result
        infos = joined(infos)
        privileged = None
        if len(middle) == 3 and not self._is_gymnasium(*middle):
            privileged, *middle = middle
        reward, *flags = middle
        ended, *truncated = (on_host(flag).reshape(self.num_envs).astype(bool) for flag in flags)
        if not truncated:
            privileged = _critic(infos) if privileged is None else privileged
            truncated = [ended & time_out_flags(infos, self.num_envs)[0]]
            ended &= ~truncated[0]
        present = ~self.is_over
        record = {
            "reward": self.copied(reward),
            "terminated": ended & present,
            "truncated": truncated[0] & present,
        }
        done = record["terminated"] | record["truncated"]
        if done.any() and self._mode is None:
            self._mode = self._detected_mode(observation, result[-1] or {})
        fields = self.copied(_fields(observation, privileged))
        self.seen = fields
        if self._mode in ("next_step", "disabled"):
            # The observation of this step is the final observation of the episodes that ended.
            self.is_over = done if self._mode == "next_step" else self.is_over | done
            record["env_mask"] = present
        elif done.any():
            # The env was already reset, so the observation of this step starts the next episode.
            rows, final_privileged, is_missing = final_rows(infos, observation, done)
            fields = {} if rows is None else _fields(rows, final_privileged)
            if fields and is_missing.any():
                record["lacks_final"] = is_missing
        if done.any():
            for name, value in fields.items():
                record[f"final_{name}"] = value
        return record, done, infos

    def executed(self, actions: Any) -> Any:
        """Convert actions for the env: to tensors on its device, or arrays of its action space."""
        if self._device is not None:
            return mapped(self._as_env, actions)
        return _as_arrays(actions, _attribute(self.env, "action_space"), self._is_space_of_all)

    def copied(self, tree: Any) -> Any:
        """Copy nested observations or actions, in the form in which they are recorded.

        Tuples become dicts with the keys "0", "1", ... Values of a single env get an axis for envs.
        """

        def copy(leaf: Any) -> Any:
            values = leaf.detach().clone() if isinstance(leaf, torch.Tensor) else np.array(leaf)
            return values[None] if self._is_single else values

        return map_leaves(copy, _named(tree))

    def _is_gymnasium(self, first: Any, second: Any, third: Any) -> bool:
        """Return whether three values of a step are rewards, terminated, truncated.

        Gymnasium returns them between observation and infos. Other simulators return privileged
        observations, rewards, dones instead.
        """
        if first is None or hasattr(self.env, "get_privileged_observations"):
            return False
        return not _is_floating(second) or _is_floating(third)

    def _detected_mode(self, observation: Any, infos: Any) -> str:
        """Return the autoreset mode, found from the result of a step in which an episode ended.

        Raises:
            UsageError: The mode cannot be detected.
        """
        is_same_step = not isinstance(infos, Mapping) or not _SAME_STEP_INFOS.isdisjoint(infos)
        is_same_step |= any(
            _attribute(self.env, name) is not None for name in _SAME_STEP_ATTRIBUTES
        )
        has_policy_group = hasattr(observation, "items") and "policy" in dict(observation.items())
        if is_same_step or (has_policy_group and isinstance(_leaf(observation), torch.Tensor)):
            return "same_step"
        raise UsageError(
            f"{self.name!r} has neither metadata['autoreset_mode'] nor infos['final_obs'], so the "
            "end of an episode is ambiguous. Pass autoreset='next_step', 'same_step' or "
            "'disabled'."
        )

    def _as_env(self, value: Any) -> Any:
        return value if self._device is None else torch.as_tensor(value, device=self._device)


def joined(infos: Any) -> Mapping[str, Any]:
    """Convert infos to one mapping.

    A list of mappings, one per env, becomes a mapping of lists. A list contains None for an env
    without this key. If envs use different keys for final observations, the list of the first key
    contains the final observations of all envs.
    """
    if infos is None or isinstance(infos, Mapping):
        return infos or {}
    mappings = [info if isinstance(info, Mapping) else {} for info in infos]
    all_names = dict.fromkeys(key for info in mappings for key in info)
    lists = {name: [info.get(name) for info in mappings] for name in all_names}
    for names in (FINAL, FINAL_PRIVILEGED):
        first, *others = [name for name in names if name in lists] or [""]
        for other in others:
            pairs = zip(lists[first], lists.pop(other), strict=True)
            lists[first] = [later if earlier is None else earlier for earlier, later in pairs]
    return lists


def info_flags(
    infos: Mapping[str, Any], names: Sequence[str], num_envs: int
) -> tuple[np.ndarray, np.ndarray]:
    """Read a flag of each env from infos, in which the flag may have one of several names.

    Returns:
        Whether the flag of each env is true, and whether each env has the flag; bool `[N]` each.
    """
    for name in names:
        values = infos.get(name)
        array = np.empty(0) if values is None else on_host(values).reshape(-1)
        if len(array) == num_envs:
            has_flag = _mask(infos, name, num_envs) & np.array(
                [value is not None for value in array]
            )
            if has_flag.any():
                return has_flag & array.astype(bool), has_flag
    return np.zeros(num_envs, bool), np.zeros(num_envs, bool)


def time_out_flags(infos: Mapping[str, Any], num_envs: int) -> tuple[np.ndarray, np.ndarray]:
    """Read the time-out flag of each env from infos.

    Returns:
        Whether each env has a time-out, and whether its flag is known (not None); bool `[N]` each.

    Raises:
        SchemaError: The number of flags is not N, a flag is text or NaN, or the flags of two keys
            contradict each other.
    """
    for name in TIME_OUTS:
        if infos.get(name) is not None:
            _check_time_outs(name, infos[name], _mask(infos, name, num_envs), num_envs)
    first, second = TIME_OUTS
    first_flags, has_first = info_flags(infos, (first,), num_envs)
    second_flags, has_second = info_flags(infos, (second,), num_envs)
    differs = has_first & has_second & (first_flags != second_flags)
    if differs.any():
        raise SchemaError(
            f"{first!r} and {second!r} of infos contradict each other for environment "
            f"{int(differs.argmax())}: only one of them is a time-out."
        )
    return first_flags | second_flags, has_first | has_second


def _mask(infos: Mapping[str, Any], name: str, num_envs: int) -> np.ndarray:
    """Return `[N]` bool: whether each env has a value for the key `name` of infos.

    Gymnasium states this in a mask with the key "_<name>". Without a mask, all envs have a value.
    """
    mask = infos.get("_" + name)
    if mask is None:
        return np.ones(num_envs, bool)
    flags = on_host(mask).reshape(-1)
    if len(flags) != num_envs or not all(flag is not None and _is_flag(flag) for flag in flags):
        raise SchemaError(
            f"{'_' + name!r} of infos must be {num_envs} flags, one per environment, got "
            f"{repr(mask)[:60]}."
        )
    return flags.astype(bool)


def _check_time_outs(name: str, values: Any, mask: np.ndarray, num_envs: int) -> None:
    """Raise `SchemaError` unless `values` contain a flag or None for each env in `mask`."""
    is_list = isinstance(values, (list, tuple))
    # Build an object array. Otherwise numpy would convert all flags to str if one flag is a str.
    flags = np.array([*values, None], object)[:-1] if is_list else on_host(values).reshape(-1)
    if len(flags) != num_envs:
        raise SchemaError(
            f"{name!r} of infos has {len(flags)} flags, expected {num_envs}, one per environment."
        )
    is_wrong = (
        np.array([not _is_flag(flag) for flag in flags])
        if flags.dtype == object
        else ~_are_flags(flags)
    )
    is_wrong = is_wrong & mask
    if is_wrong.any():
        env = int(is_wrong.argmax())
        raise SchemaError(
            f"{name!r} of infos must be a flag or None, got {repr(flags[env])[:60]} for "
            f"environment {env}."
        )


def _are_flags(values: np.ndarray) -> np.ndarray:
    """Return a bool array: whether each value is a valid flag, a number that is not NaN."""
    return ~np.isnan(values) if values.dtype.kind in "biuf" else np.zeros(values.shape, bool)


def _is_flag(value: Any) -> bool:
    array = on_host(value)
    return value is None or (array.size == 1 and bool(_are_flags(array).all()))


def mapped(function: Callable[[Any], Any], tree: Any) -> Any:
    """Apply a function to all leaves of nested mappings and tuples; return the same structure."""
    if isinstance(tree, tuple):
        return tuple(mapped(function, item) for item in tree)
    if hasattr(tree, "items"):
        return {key: mapped(function, item) for key, item in tree.items()}
    return function(tree)


def _named(tree: Any) -> Any:
    """Convert nested mappings and tuples to dicts; tuples get the keys "0", "1", ..."""
    if isinstance(tree, tuple):
        tree = {str(number): item for number, item in enumerate(tree)}
    return {key: _named(item) for key, item in tree.items()} if hasattr(tree, "items") else tree


def _is_floating(values: Any) -> bool:
    return (
        values.is_floating_point()
        if isinstance(values, torch.Tensor)
        else np.asarray(values).dtype.kind == "f"
    )


def _leaf(tree: Any) -> Any:
    """Return one array or tensor of nested mappings, from which device and size are read."""
    while hasattr(tree, "items"):
        tree = next(iter(tree.values()))
    return tree


def _declared_mode(env: Any) -> str | None:
    """Return the autoreset mode that an env declares; None if it declares none.

    Gymnasium declares it in `metadata`, as a text or an enum, and ManiSkill by `auto_reset`.
    """
    declared = (getattr(env, "metadata", None) or {}).get("autoreset_mode")
    text = str(getattr(declared, "value", declared))
    mode = _MODES.get(text.replace("_", "").lower())
    if mode is not None:
        return mode
    return {True: "same_step", False: "disabled"}.get(_attribute(env, "auto_reset"))


def _attribute(env: Any, name: str) -> Any:
    """Return an attribute of an env, or of the unwrapped env. The result is None if both lack it."""
    value = getattr(env, name, None)
    if value is None:
        value = getattr(getattr(env, "unwrapped", None), name, None)
    return value


def _critic(infos: Any) -> Any:
    """Return `infos["observations"]["critic"]`, the privileged observation of rsl_rl, or None."""
    groups = infos.get("observations") if isinstance(infos, Mapping) else None
    return groups.get("critic") if isinstance(groups, Mapping) else None


def _fields(observation: Any, privileged: Any = None) -> dict[str, Any]:
    """Split observations of an env into the recorded fields: a public and a privileged part.

    The groups "critic" and "privileged" of an observation become the privileged observation.
    """
    observation = _named(observation)
    if hasattr(observation, "items"):
        groups = {name: observation.pop(name) for name in _PRIVILEGED_GROUPS if name in observation}
        if groups:
            privileged = groups if len(groups) > 1 else next(iter(groups.values()))
        if observation.keys() == {"policy"}:
            observation = observation["policy"]
    fields = {"observation": observation}
    if privileged is not None:
        fields["privileged_observation"] = privileged
    return fields


def final_rows(
    infos: Mapping[str, Any], observation: Any, done: np.ndarray
) -> tuple[Any, Any, np.ndarray]:
    """Extract final observations from infos.

    Args:
        infos: Infos of one step, as `joined` returns them.
        observation: Observation of the same step. Final observations are converted to its
            structure and dtypes.
        done: Whether the episode of each env ended, bool `[N]`.

    Returns:
        The final observations, their privileged part, and whether each env ended without a final
        observation, bool `[N]`. The first two have one row per env, or only rows for envs with a
        final observation. They are None if they are missing.

    Raises:
        SchemaError: Final observations or their mask are not of N envs, or have another structure.
        FieldTypeError: Values are no numbers, or do not fit the dtype of the observations.
    """
    name = next((name for name in FINAL if infos.get(name) is not None), "")
    finals: Any = infos.get(name)
    has_final = done & (finals is not None) & _mask(infos, name, len(done))
    like = _named(observation)
    if isinstance(finals, tuple) and not (
        isinstance(like, dict) and like.keys() == _named(finals).keys()
    ):
        # The observation has another structure, so each item of the tuple belongs to one env.
        finals = list(finals)
    if _is_listed(finals):
        if len(finals) != len(done):
            raise SchemaError(
                f"{name!r} of infos has {len(finals)} final observations, expected {len(done)}, "
                "one or None per environment."
            )
        has_final &= [row is not None for row in finals]
    if not has_final.any():
        return None, None, done
    privileged = next(
        (infos[name] for name in FINAL_PRIVILEGED if infos.get(name) is not None), None
    )
    rows = _rows(_named(finals), like, np.flatnonzero(has_final))
    return mapped(_checked_rows, rows), mapped(_checked_rows, privileged), done & ~has_final


def _is_listed(value: Any) -> bool:
    return isinstance(value, list) or (
        isinstance(value, np.ndarray) and value.dtype == object and value.ndim > 0
    )


def _rows(finals: Any, like: Any, env_ids: np.ndarray) -> Any:
    """Convert final observations of several envs to arrays, nested like the observations.

    Args:
        finals: A list with one item per env, whose items `env_ids` are stacked; arrays with a row
            per env, which are returned unchanged; or a mapping of groups to such values.
        like: Observations.
        env_ids: Envs with a final observation.
    """
    if _is_listed(finals):
        return _stacked([_named(finals[env]) for env in env_ids], like)
    # Observations without groups belong to the policy. Final observations may still have groups,
    # which `Simulator.read` then separates.
    if not isinstance(like, dict) or not isinstance(finals, dict):
        return finals
    return {key: _rows(finals[key], item, env_ids) for key, item in like.items() if key in finals}


def _stacked(rows: list[Any], like: Any) -> Any:
    """Stack final observations of several envs; `like` defines their nesting and dtypes."""
    if isinstance(like, dict):
        for row in rows:
            if not isinstance(row, dict) or not like.keys() <= row.keys():
                got = ", ".join(map(repr, row)) if isinstance(row, dict) else type(row).__name__
                raise SchemaError(
                    "final observations of infos must be mappings with "
                    f"{', '.join(map(repr, like))}, got {got}."
                )
        return {key: _stacked([row[key] for row in rows], item) for key, item in like.items()}
    dtype = as_given(like).dtype
    tensors = [_as_dtype(_numbers(row), dtype) for row in rows]
    if len({tensor.shape for tensor in tensors}) > 1:
        raise SchemaError(
            "final observations of infos have different shapes: "
            f"{', '.join(str(list(tensor.shape)) for tensor in tensors)}."
        )
    return torch.stack(tensors)


def _numbers(values: Any) -> torch.Tensor:
    """Convert numbers of any type to a tensor, which is a view if possible."""
    try:
        is_object = isinstance(values, np.ndarray) and values.dtype == object
        return as_given(np.array(values.tolist()) if is_object else values)
    except (TypeError, ValueError, RuntimeError) as cause:
        got = (
            f"an array of {values.dtype}"
            if isinstance(values, np.ndarray)
            else type(values).__name__
        )
        raise FieldTypeError(f"final observations of infos must be numbers, got {got}.") from cause


def _checked_rows(leaf: Any) -> Any:
    """Return an array of final observations after checking that it has an axis of envs."""
    if leaf is not None and not _numbers(leaf).ndim:
        raise SchemaError(
            "final observations of infos must have one row per environment, got a single "
            f"{type(leaf).__name__}."
        )
    return leaf


def _as_dtype(row: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert a final observation to the dtype of the observations.

    Raises:
        FieldTypeError: The values are complex, or do not fit an integer dtype.
    """
    if row.is_complex() and not dtype.is_complex:
        raise FieldTypeError(f"final observations of infos must be real, got {row.dtype}.")
    converted = row.to(dtype)
    if not dtype.is_floating_point and not torch.equal(converted.to(row.dtype), row):
        name = str(dtype).removeprefix("torch.")
        raise FieldTypeError(
            f"final observations of infos have {row.dtype} values that do not fit {name}, the "
            "dtype of the observations."
        )
    return converted


def _as_arrays(value: Any, space: Any, is_of_all: bool) -> Any:
    """Convert actions to arrays with the dtype of a space.

    Args:
        value: Actions of all envs.
        space: An action space of gymnasium; None converts the actions to arrays only.
        is_of_all: Whether it is the space of the actions of all envs. Then the arrays also get its
            shape. Otherwise it is the space of a single env.
    """
    if space is None:
        return mapped(lambda item: np.array(on_host(item)), value)
    if isinstance(value, Mapping):
        return {key: _as_arrays(item, space[key], is_of_all) for key, item in value.items()}
    if isinstance(value, tuple) and isinstance(getattr(space, "spaces", None), tuple):
        return tuple(
            _as_arrays(item, part, is_of_all)
            for item, part in zip(value, space.spaces, strict=True)
        )
    array = on_host(value)
    shape = getattr(space, "shape", None)
    if (
        is_of_all
        and shape is not None
        and array.shape != shape
        and array.size == int(np.prod(shape))
    ):
        array = array.reshape(shape)
    return np.array(array, dtype=getattr(space, "dtype", None))
