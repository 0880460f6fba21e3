"""Infos in records: time-outs and final observations under the names of stable-baselines3, gymnasium and rsl_rl."""

from __future__ import annotations

import warnings
from collections.abc import Container, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from storage.core.memory import as_given, on_host
from storage.errors import RolloutDataWarning, SchemaError, UsageError

from .environments import FINAL, FINAL_PRIVILEGED, TIME_OUTS, final_rows, joined, told_time_outs

_RECORDED = {*TIME_OUTS, *FINAL, *FINAL_PRIVILEGED}
_ENDS = ("done", "terminated", "truncated", "timeout")


def are_infos(extras: Any) -> bool:
    """Return whether `extras` of a record are infos, as those of legged_gym and rsl_rl: they hold time-outs."""
    if isinstance(extras, list):  # of each step of a rollout
        return any(map(are_infos, extras))
    return isinstance(extras, Mapping) and not _RECORDED.isdisjoint(extras)


def needed_infos(infos: Any, names: Container[str] = ()) -> Any:
    """Return infos, and `final_info` in them, with None for values that are not recorded and not in `names`."""
    if isinstance(infos, Mapping):
        needed = {}
        for key, value in infos.items():
            name = str(key).removeprefix("_")
            is_needed = name in _RECORDED or name in names
            needed[key] = needed_infos(value, names) if key == "final_info" else value if is_needed else None
        return needed
    if isinstance(infos, (list, tuple)) or (isinstance(infos, np.ndarray) and infos.dtype == object and infos.ndim):
        return [needed_infos(info, names) for info in infos]
    return infos


class InfoReader:
    """Read infos of the records of one writer; warn once of each key that is not recorded.

    Args:
        num_envs: N.
    """

    def __init__(self, num_envs: int) -> None:
        self._num_envs = num_envs
        self._warned_keys = set[str]()

    def read(
        self, action: str, infos: Any, values: Mapping[str, Any], is_step: bool
    ) -> tuple[dict[str, Any], np.ndarray | None]:
        """Return `timeout` and final observations from infos, unless they are in `values`.

        Args:
            action: The call, for errors.
            infos: Of a step: a list with a mapping for each environment, or one mapping of values of all of them.
                Of a rollout: a list of T such.
            values: The other values of the record, by our names.
            is_step: Whether the record is a step.

        Returns:
            The values, and which ends have a final observation among them, `[T, N]` bool; None without any.

        Raises:
            SchemaError: Infos are not of N environments or T steps.
            UsageError: Only some of the final observations have a privileged part.
        """
        given = [infos] if is_step else _listed(action, infos, values.get("observation"))
        steps = [joined(self._checked(action, one)) for one in given]
        self._warn_of(steps)
        found: dict[str, Any] = {}
        if values.get("timeout") is None and values.get("truncated") is None:
            flags, are_told = zip(*(told_time_outs(step, self._num_envs) for step in steps), strict=True)
            if np.any(are_told):
                found["timeout"] = flags[0] if is_step else np.stack(flags)
        ended = self._ended({**values, **found}, len(steps))
        if values.get("final_observation") is not None or ended is None or not ended.any():
            return found, None
        finals, has_final = self._finals(action, steps, values.get("observation"), ended, is_step)
        return found | finals, has_final

    def _checked(self, action: str, infos: Any) -> Any:
        if isinstance(infos, Mapping):
            return infos
        is_list = _is_list(infos) and not isinstance(infos, (str, bytes))
        if not is_list or len(infos) != self._num_envs or not all(isinstance(one, Mapping | None) for one in infos):
            got = f"{type(infos).__name__}" + (f" of {len(infos)}" if is_list else "")
            expected = f"infos as a mapping, or a list of {self._num_envs} mappings, one of each environment"
            raise SchemaError(action, "", expected, got)
        return infos

    def _warn_of(self, steps: Sequence[Mapping[str, Any]]) -> None:
        keys = {key: None for step in steps for key in step if key not in _RECORDED | self._warned_keys}
        # Gymnasium names the environments that have a value beside it: "_distance" beside "distance".
        masks = {f"_{key}" for step in steps for key in step}
        keys = {key: None for key in keys if key not in masks}
        if keys:
            self._warned_keys.update(keys)
            listed = ", ".join(map(repr, keys))
            text = f"keys of infos are not recorded: {listed}. To keep a value, give it by a name of its own"
            warnings.warn(text, RolloutDataWarning, stacklevel=6)

    def _ended(self, values: Mapping[str, Any], num_steps: int) -> np.ndarray | None:
        """Return where trajectories end, `[T, N]` bool; None if flags have a wrong size, which is found later."""
        ended = np.zeros((num_steps, self._num_envs), bool)
        names = ("done",) if values.get("done") is not None else _ENDS
        for name in names:
            if values.get(name) is not None:
                flags = on_host(values[name])
                if flags.size != ended.size:
                    return None
                ended |= flags.reshape(ended.shape) != 0
        if values.get("env_mask") is not None:
            mask = on_host(values["env_mask"])
            if mask.size != ended.size:
                return None
            ended &= mask.reshape(ended.shape) != 0
        return ended

    def _finals(
        self, action: str, steps: Sequence[Mapping[str, Any]], observation: Any, ended: np.ndarray, is_step: bool
    ) -> tuple[dict[str, Any], np.ndarray | None]:
        """Return the final observations of ends, `[k, ...]` in the order of time, then environment, and which ends."""
        rows = []
        privileged_rows = []
        has_final = np.zeros_like(ended)
        for number in np.flatnonzero(ended.any(1)).tolist():
            done = ended[number]
            now = observation if is_step else _mapped(lambda leaf, step=number: leaf[step], observation)
            found, privileged, lacking = final_rows(self._with_env_axis(steps[number], now), now, done)
            if found is not None:
                has_final[number] = done & ~lacking
                rows.append(_mapped(lambda leaf, kept=has_final[number]: _of_ends(leaf, kept), found))
                if privileged is not None:
                    kept_rows = _mapped(lambda leaf, kept=has_final[number]: _of_ends(leaf, kept), privileged)
                    privileged_rows.append(kept_rows)
        if not rows:
            return {}, None
        if len(privileged_rows) not in (0, len(rows)):
            expected = "infos with final privileged observations in each step with final observations"
            raise UsageError(action, "", expected, "some without")
        values = {"final_observation": _joined(rows)}
        if privileged_rows:
            values["final_privileged_observation"] = _joined(privileged_rows)
        return values, has_final

    def _with_env_axis(self, infos: Mapping[str, Any], observation: Any) -> Mapping[str, Any]:
        """Add to final observations of a single environment the axis of environments of its observation."""
        if self._num_envs != 1:
            return infos
        found = dict(infos)
        for name in FINAL + FINAL_PRIVILEGED:
            value = found.get(name)
            is_batched = isinstance(value, list) or (isinstance(value, np.ndarray) and value.dtype == object)
            if value is not None and not is_batched and _num_axes(value) < _num_axes(observation):
                found[name] = [value]
        return found


def _listed(action: str, infos: Any, observation: Any) -> list[Any]:
    """Return the infos of each step of a rollout with this observation, whose leaves are `[T, N, ...]`."""
    if isinstance(infos, Mapping) or not _is_list(infos) or not len(infos):
        raise SchemaError(action, "", "infos of a rollout as a list with those of each step", type(infos).__name__)
    leaf = _first_leaf(observation)
    if leaf is not None and len(infos) != len(leaf):
        raise SchemaError(action, "", f"infos of each of {len(leaf)} steps", f"those of {len(infos)}")
    return list(infos)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) or (isinstance(value, np.ndarray) and value.ndim > 0)


def _first_leaf(tree: Any) -> Any:
    while isinstance(tree, Mapping):
        tree = next(iter(tree.values()), None)
    return tree


def _num_axes(tree: Any) -> int:
    return int(np.ndim(on_host(_first_leaf(tree))))


def _mapped(function: Any, tree: Any) -> Any:
    if isinstance(tree, Mapping):
        return {key: _mapped(function, item) for key, item in tree.items()}
    return function(tree)


def _of_ends(leaf: Any, done: np.ndarray) -> torch.Tensor:
    """Return the rows of environments that ended, of a leaf of all environments or of those alone."""
    rows = as_given(leaf).detach().cpu()
    return rows[torch.from_numpy(done)] if len(rows) == len(done) else rows


def _joined(parts: Sequence[Any]) -> Any:
    if isinstance(parts[0], Mapping):
        return {key: _joined([part[key] for part in parts]) for key in parts[0]}
    if len({part.dtype for part in parts}) == 1:  # numpy has no bfloat16
        return torch.cat(list(parts))
    return np.concatenate(list(map(on_host, parts)))  # torch rounds int64 to float32 beside float32
