"""Environments as a recording sees them: gymnasium's, vectorized or single, stable-baselines3's and GPU simulators.

One rule: what an env returns is read by its form, arrays and tensors alike. An observation is a final one only where
the env says so or its autoreset mode does; where neither tells, the user is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from storage.core.fields import map_leaves
from storage.core.memory import as_given, on_host
from storage.errors import FieldTypeError, SchemaError, UsageError, nearest

_MODES = {mode.replace("_", ""): mode for mode in ("next_step", "same_step", "disabled")}
_FINALS = "read final observations"
#: Names in infos of final observations, and of flags of time limits.
FINAL = ("final_observation", "final_observations", "final_obs", "terminal_observation")
FINAL_PRIVILEGED = ("final_privileged_observation", "final_critic_observations")
TIME_OUTS = ("time_outs", "TimeLimit.truncated")
_PRIVILEGED_GROUPS = ("critic", "privileged")
#: What only envs of rsl_rl, legged_gym and Isaac Lab have, which are reset in the step in which their episode ends.
#: `time_outs` alone do not tell: other tasks of Isaac Gym have them too, and are reset a step later.
_SAME_STEP_ATTRIBUTES = ("get_observations", "get_privileged_observations", "episode_length_buf")
_SAME_STEP_INFOS = {*FINAL, "final_info"}


class Simulator:
    """A batch of environments under the convention that it has; the arguments are those of `RecordingWrapper`.

    A single `gymnasium.Env` is a batch of one: its values get an axis for the recording, and only there.

    Attributes:
        action: The call that records, for errors.
        seen: Copies of what the env showed last: `observation` and, if there is one, `privileged_observation`.
        is_over: `[N]` bool: envs whose episode has ended and that are not reset yet.
        infos: What a reset told beside its observation, `joined`.
    """

    def __init__(self, action: str, env: Any, autoreset: str | None = None) -> None:
        num_envs = _attribute(env, "num_envs")
        self._is_single = num_envs is None and hasattr(env, "action_space") and hasattr(env, "reset")
        if not hasattr(env, "step") or not (self._is_single or num_envs is not None):
            expected = "a gymnasium.Env, or a vectorized environment with num_envs and step()"
            raise UsageError(action, "", f"env as {expected}", type(env).__name__)
        if autoreset not in (None, *_MODES.values()):
            raise UsageError(action, "", f"autoreset {nearest(str(autoreset), _MODES.values())}", repr(autoreset))
        self.action = action
        self.env = env
        self.num_envs = 1 if self._is_single else int(num_envs)
        self.seen = dict[str, Any]()
        #: Where the env has its tensors; None where it has arrays.
        self._device: torch.device | None = None
        self.name = str(getattr(_attribute(env, "spec"), "id", None) or type(getattr(env, "unwrapped", env)).__name__)
        self.is_over = np.zeros(self.num_envs, bool)
        self.infos = dict[str, Any]()
        mode = (getattr(env, "metadata", None) or {}).get("autoreset_mode")
        mode = _MODES.get(str(getattr(mode, "value", mode)).replace("_", "").lower())
        mode = autoreset or mode or {True: "same_step", False: "disabled"}.get(_attribute(env, "auto_reset"))
        self._is_mode_told = mode is not None
        self._mode = mode or ("disabled" if self._is_single else None)
        #: Whether the space of actions is that of all envs; stable-baselines3's is that of one.
        self._is_space_of_all = self._is_single or _attribute(env, "single_action_space") is not None

    def start(self, seed: int | None) -> Any:
        """Reset all envs; give the observation as the env gives it."""
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
            raise UsageError("start", repr(self.name), "an observation of reset() or get_observations()", "none")
        return observation

    def see(self, result: Any, is_reset: np.ndarray | None = None) -> Any:
        """Take what a reset of these envs (`[N]` bool) returned, or `get_observations()`; give the observation in it.

        The privileged observation, infos or extras may stand beside it.
        """
        is_pair = isinstance(result, tuple) and len(result) == 2
        observation, beside = result if is_pair else (result, None)
        self.infos = dict(joined(beside)) if isinstance(beside, (Mapping, list)) else {}
        privileged = _critic(beside) if hasattr(beside, "items") else beside
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
        """Arguments of the reset that envs wait for; None if none waits."""
        if self._mode != "disabled" or not self.is_over.any():
            return None
        if self._is_single:
            return {}
        if isinstance(_attribute(self.env, "auto_reset"), bool):  # ManiSkill's name for the same
            return {"options": {"env_idx": self._as_env(np.flatnonzero(self.is_over))}}
        return {"options": {"reset_mask": self._as_env(self.is_over.copy())}}

    def read(self, result: Any) -> tuple[dict[str, Any], np.ndarray, Mapping[str, Any]]:
        """Read what `step()` returned: further values for `RolloutWriter.add`, the ends (`[N]` bool), `joined` infos.

        Where only some of the ends have a final observation, `lacks_final` among the values are the others.
        """
        if len(result) not in (4, 5):
            expected = "gymnasium's five values, obs, rewards, dones, infos, or these with privileged_obs after obs"
            raise UsageError("step the environments", repr(self.name), expected, f"{len(result)} values")
        if self._is_single and self.is_over[0] and not self._is_mode_told:
            advice = "Give autoreset='next_step' if the environment resets itself"
            raise UsageError("step", repr(self.name), "reset() after the end of an episode", "none", advice)
        observation, *middle, infos = result
        infos = joined(infos)
        privileged = None
        if len(middle) == 3 and not self._is_gymnasium(*middle):
            privileged, *middle = middle
        reward, *flags = middle
        ended, *truncated = (on_host(flag).reshape(self.num_envs).astype(bool) for flag in flags)
        if not truncated:
            privileged = _critic(infos) if privileged is None else privileged
            truncated = [ended & told_time_outs(infos, self.num_envs)[0]]
            ended &= ~truncated[0]
        present = ~self.is_over
        record = {"reward": self.copied(reward), "terminated": ended & present, "truncated": truncated[0] & present}
        done = record["terminated"] | record["truncated"]
        if done.any() and self._mode is None:
            self._mode = self._told_mode(observation, result[-1] or {})
        fields = self.seen = self.copied(_fields(observation, privileged))
        if self._mode in ("next_step", "disabled"):
            self.is_over = done if self._mode == "next_step" else self.is_over | done
            record["env_mask"] = present
        elif done.any():
            rows, final_privileged, lacking = final_rows(infos, observation, done)
            fields = {} if rows is None else _fields(rows, final_privileged)
            record |= {"lacks_final": lacking} if fields and lacking.any() else {}
        if done.any():
            record |= {f"final_{name}": value for name, value in fields.items()}
        return record, done, infos

    def executed(self, actions: Any) -> Any:
        """Return actions as the env takes them: tensors on its device, or arrays of its space's dtype and shape."""
        if self._device is not None:
            return mapped(self._as_env, actions)
        return _as_arrays(actions, _attribute(self.env, "action_space"), self._is_space_of_all)

    def copied(self, tree: Any) -> Any:
        """Copy mappings and tuples as dicts of `[N, ...]`; tuples (of `spaces.Tuple`) get the keys "0", "1", ..."""

        def copy(leaf: Any) -> Any:
            made = leaf.detach().clone() if isinstance(leaf, torch.Tensor) else np.array(leaf)
            return made[None] if self._is_single else made

        return map_leaves(copy, _named(tree))

    def _is_gymnasium(self, first: Any, second: Any, third: Any) -> bool:
        """Return whether these are rewards, terminated, truncated, not privileged observations, rewards, dones."""
        if first is None or hasattr(self.env, "get_privileged_observations"):
            return False
        return not _is_floating(second) or _is_floating(third)

    def _told_mode(self, observation: Any, infos: Any) -> str:
        """Return the autoreset mode by a step in which an episode ended."""
        is_told = not isinstance(infos, Mapping) or not _SAME_STEP_INFOS.isdisjoint(infos)
        is_told |= any(_attribute(self.env, name) is not None for name in _SAME_STEP_ATTRIBUTES)
        is_group = hasattr(observation, "items") and "policy" in dict(observation.items())
        if is_told or (is_group and isinstance(_leaf(observation), torch.Tensor)):
            return "same_step"
        expected = "metadata['autoreset_mode'] or infos['final_obs']"
        got = "nothing that tells when an env is reset"
        advice = "Give autoreset='next_step', 'same_step' or 'disabled'"
        raise UsageError("record the end of an episode", f"of {self.name!r}", expected, got, advice)

    def _as_env(self, value: Any) -> Any:
        return value if self._device is None else torch.as_tensor(value, device=self._device)


def joined(infos: Any) -> Mapping[str, Any]:
    """Return infos as one mapping: of a list of mappings, one for each env, lists with None where an env lacks a name.

    Envs may name their final observations differently: the list of the first of these names has those of all.
    """
    if infos is None or isinstance(infos, Mapping):
        return infos or {}
    each = [info if isinstance(info, Mapping) else {} for info in infos]
    found = {name: [info.get(name) for info in each] for name in dict.fromkeys(key for info in each for key in info)}
    for names in (FINAL, FINAL_PRIVILEGED):
        first, *others = [name for name in names if name in found] or [""]
        for other in others:
            pairs = zip(found[first], found.pop(other), strict=True)
            found[first] = [later if earlier is None else earlier for earlier, later in pairs]
    return found


def told(infos: Mapping[str, Any], names: Sequence[str], num_envs: int) -> tuple[np.ndarray, np.ndarray]:
    """Tell where a flag of infos is set and where it is there, `[N]` bool each: of the first name that any env has."""
    for name in names:
        values = infos.get(name)
        array = np.empty(0) if values is None else on_host(values).reshape(-1)
        if len(array) == num_envs:
            is_told = _mask(infos, name, num_envs) & np.array([value is not None for value in array])
            if is_told.any():
                return is_told & array.astype(bool), is_told
    return np.zeros(num_envs, bool), np.zeros(num_envs, bool)


def told_time_outs(infos: Mapping[str, Any], num_envs: int) -> tuple[np.ndarray, np.ndarray]:
    """Return where infos name a time-out, and where they say whether there was one: `[N]` bool both.

    An environment whose flag is None does not say it.

    Raises:
        SchemaError: There is not one flag for each environment, a flag is text or NaN, or two names contradict.
    """
    for name in TIME_OUTS:
        if infos.get(name) is not None:
            _check_time_outs(f"with {name!r} of infos", infos[name], _mask(infos, name, num_envs), num_envs)
    (flags, are_told), (others, are_others_told) = (told(infos, (name,), num_envs) for name in TIME_OUTS)
    differs = are_told & are_others_told & (flags != others)
    if differs.any():
        where = f"of environment {int(differs.argmax())} in infos"
        got = "a time-out by one of them, none by the other"
        raise SchemaError("read time-outs", where, f"{' and '.join(map(repr, TIME_OUTS))} that agree", got)
    return flags | others, are_told | are_others_told


def _mask(infos: Mapping[str, Any], name: str, num_envs: int) -> np.ndarray:
    """Return which environments have a value of this name by gymnasium's mask, `[N]` bool; all without a mask."""
    mask = infos.get("_" + name)
    if mask is None:
        return np.ones(num_envs, bool)
    flags = on_host(mask).reshape(-1)
    if len(flags) != num_envs or not all(flag is not None and _is_flag(flag) for flag in flags):
        expected = f"{num_envs} flags, one of each environment"
        raise SchemaError("read infos", f"with {'_' + name!r}", expected, repr(mask)[:60])
    return flags.astype(bool)


def _check_time_outs(where: str, values: Any, mask: np.ndarray, num_envs: int) -> None:
    """Raise `SchemaError` unless there is one flag or None for each environment; `mask` is where there is one."""
    is_list = isinstance(values, (list, tuple))
    # numpy makes one text of each flag in a list that has a text.
    flags = np.array([*values, None], object)[:-1] if is_list else on_host(values).reshape(-1)
    if len(flags) != num_envs:
        expected = f"{num_envs} flags, one of each environment"
        raise SchemaError("read time-outs", where, expected, str(len(flags)))
    is_wrong = np.array([not _is_flag(flag) for flag in flags]) if flags.dtype == object else ~_are_flags(flags)
    is_wrong = is_wrong & mask
    if is_wrong.any():
        env = int(is_wrong.argmax())
        raise SchemaError("read time-outs", f"{where}, environment {env}", "a flag or None", repr(flags[env])[:60])


def _are_flags(values: np.ndarray) -> np.ndarray:
    """Return where numbers are flags; no text is one."""
    return ~np.isnan(values) if values.dtype.kind in "biuf" else np.zeros(values.shape, bool)


def _is_flag(value: Any) -> bool:
    found = on_host(value)
    return value is None or (found.size == 1 and bool(_are_flags(found).all()))


def mapped(function: Callable[[Any], Any], tree: Any) -> Any:
    """Apply a function to the leaves of nested mappings and tuples."""
    if isinstance(tree, tuple):
        return tuple(mapped(function, item) for item in tree)
    return {key: mapped(function, item) for key, item in tree.items()} if hasattr(tree, "items") else function(tree)


def _named(tree: Any) -> Any:
    if isinstance(tree, tuple):
        tree = {str(number): item for number, item in enumerate(tree)}
    return {key: _named(item) for key, item in tree.items()} if hasattr(tree, "items") else tree


def _is_floating(values: Any) -> bool:
    return values.is_floating_point() if isinstance(values, torch.Tensor) else np.asarray(values).dtype.kind == "f"


def _leaf(tree: Any) -> Any:
    while hasattr(tree, "items"):
        tree = next(iter(tree.values()))
    return tree


def _attribute(env: Any, name: str) -> Any:
    """Return an attribute of an env, or of what is in its wrappers, which do not all forward it; None without."""
    found = getattr(env, name, None)
    return getattr(getattr(env, "unwrapped", None), name, None) if found is None else found


def _critic(infos: Any) -> Any:
    groups = infos.get("observations") if isinstance(infos, Mapping) else None
    return groups.get("critic") if isinstance(groups, Mapping) else None


def _fields(observation: Any, privileged: Any = None) -> dict[str, Any]:
    """Return our fields: the groups `critic` and `privileged` of an observation are the privileged one."""
    if hasattr(observation := _named(observation), "items"):
        apart = {name: observation.pop(name) for name in _PRIVILEGED_GROUPS if name in observation}
        if apart:
            privileged = apart if len(apart) > 1 else next(iter(apart.values()))
        observation = observation["policy"] if observation.keys() == {"policy"} else observation
    return {"observation": observation} | ({} if privileged is None else {"privileged_observation": privileged})


def final_rows(infos: Mapping[str, Any], observation: Any, done: np.ndarray) -> tuple[Any, Any, np.ndarray]:
    """Find the final observations in `joined` infos.

    Args:
        infos: Of one step.
        observation: Of the same step, whose structure and dtypes the final ones get.
        done: `[N]` bool, environments whose episode ended.

    Returns:
        The final observations, of all environments or of those that have one; the privileged ones; and the
        environments that ended without one, `[N]` bool. None where infos have none.

    Raises:
        SchemaError: Final observations or their mask are not of N environments, or have another structure.
        FieldTypeError: They are no numbers, or lose something in the dtype of the observations.
    """
    name = next((name for name in FINAL if infos.get(name) is not None), "")
    found: Any = infos.get(name)
    is_given = done & (found is not None) & _mask(infos, name, len(done))
    like = _named(observation)
    if isinstance(found, tuple) and not (isinstance(like, dict) and like.keys() == _named(found).keys()):
        found = list(found)  # of environments, rather than of the parts of an observation
    if _is_listed(found):
        if len(found) != len(done):
            expected = f"{len(done)} final observations or None, one of each environment"
            raise SchemaError(_FINALS, f"with {name!r} of infos", expected, str(len(found)))
        is_given &= [row is not None for row in found]
    if not is_given.any():
        return None, None, done
    privileged = next((infos[name] for name in FINAL_PRIVILEGED if infos.get(name) is not None), None)
    rows = _rows(_named(found), like, np.flatnonzero(is_given))
    return mapped(_checked_rows, rows), mapped(_checked_rows, privileged), done & ~is_given


def _is_listed(value: Any) -> bool:
    return isinstance(value, list) or (isinstance(value, np.ndarray) and value.dtype == object and value.ndim > 0)


def _rows(found: Any, like: Any, ended: np.ndarray) -> Any:
    """Stack what is listed env by env, of the envs that ended; what is batched stays as it is."""
    if _is_listed(found):
        return _stacked([_named(found[env]) for env in ended], like)
    if not isinstance(like, dict) or not isinstance(found, dict):  # an env may give its policy's group alone
        return found
    return {key: _rows(found[key], item, ended) for key, item in like.items() if key in found}


def _stacked(rows: list[Any], like: Any) -> Any:
    if isinstance(like, dict):
        for row in rows:
            if not isinstance(row, dict) or not like.keys() <= row.keys():
                expected = f"mappings with {', '.join(map(repr, like))}"
                got = ", ".join(map(repr, row)) if isinstance(row, dict) else type(row).__name__
                raise SchemaError(_FINALS, "of infos", expected, got)
        return {key: _stacked([row[key] for row in rows], item) for key, item in like.items()}
    dtype = as_given(like).dtype
    found = [_as_dtype(_numbers(row), dtype) for row in rows]
    if len({row.shape for row in found}) > 1:
        raise SchemaError(_FINALS, "of infos", "one shape", ", ".join(str(list(row.shape)) for row in found))
    return torch.stack(found)


def _numbers(values: Any) -> torch.Tensor:
    """View numbers in any form as a tensor; an array of objects may hold them too."""
    try:
        is_object = isinstance(values, np.ndarray) and values.dtype == object
        return as_given(np.array(values.tolist()) if is_object else values)
    except (TypeError, ValueError, RuntimeError) as cause:
        got = f"an array of {values.dtype}" if isinstance(values, np.ndarray) else type(values).__name__
        raise FieldTypeError(_FINALS, "of infos", "numbers", got) from cause


def _checked_rows(leaf: Any) -> Any:
    """Return final observations of several environments as they are, if they have an axis of environments."""
    if leaf is not None and not _numbers(leaf).ndim:
        raise SchemaError(_FINALS, "of infos", "a row of each environment", f"a single {type(leaf).__name__}")
    return leaf


def _as_dtype(row: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert a final observation to the dtype of the observations; integers keep their numbers."""
    if row.is_complex() and not dtype.is_complex:
        raise FieldTypeError(_FINALS, "of infos", "real numbers", str(row.dtype))
    found = row.to(dtype)
    if not dtype.is_floating_point and not torch.equal(found.to(row.dtype), row):
        expected = f"numbers that the dtype of the observations, {str(dtype).removeprefix('torch.')}, holds"
        raise FieldTypeError(_FINALS, "of infos", expected, f"others, as {row.dtype}")
    return found


def _as_arrays(value: Any, space: Any, is_of_all: bool) -> Any:
    """Return actions as arrays of the dtype of a space and, where it is one of all envs, of its shape."""
    if space is None:
        return mapped(lambda item: np.array(on_host(item)), value)
    if isinstance(value, Mapping):
        return {key: _as_arrays(item, space[key], is_of_all) for key, item in value.items()}
    if isinstance(value, tuple) and isinstance(getattr(space, "spaces", None), tuple):
        return tuple(_as_arrays(item, part, is_of_all) for item, part in zip(value, space.spaces, strict=True))
    array = on_host(value)
    shape = getattr(space, "shape", None)
    if is_of_all and shape is not None and array.shape != shape and array.size == int(np.prod(shape)):
        array = array.reshape(shape)
    return np.array(array, dtype=getattr(space, "dtype", None))
