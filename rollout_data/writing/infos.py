"""Infos in records: time-outs and final observations under the names of stable-baselines3, gymnasium and rsl_rl."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from storage.core.memory import as_given, on_host
from storage.errors import RolloutDataWarning, SchemaError, UsageError

from .environments import FINAL, FINAL_PRIVILEGED, TIME_OUTS, final_rows, joined, told_time_outs

_ADD = "add a record"
_RECORDED = {*TIME_OUTS, *FINAL, *FINAL_PRIVILEGED}
_KNOWN = _RECORDED | {f"_{name}" for name in _RECORDED}
_ENDS = ("done", "terminated", "truncated", "timeout")


class InfoReader:
    """Read infos of the records of one writer; warn once of each key that is not recorded.

    Args:
        num_envs: N.
    """

    def __init__(self, num_envs: int) -> None:
        self._num_envs = num_envs
        self._warned_keys = set[str]()

    def read(self, infos: Any, values: Mapping[str, Any], is_step: bool) -> dict[str, Any]:
        """Return `timeout` and final observations that infos hold and `values` lack.

        Args:
            infos: Of a step: a list with a mapping for each environment, or one mapping of values of all of them.
                Of a rollout: a list of T such.
            values: The other values of the record, by our names.
            is_step: Whether the record is a step.

        Raises:
            SchemaError: Infos are not of N environments or T steps.
            UsageError: Only some of the environments that end in a step have a final observation.
        """
        steps = [joined(self._checked(one)) for one in ([infos] if is_step else _listed(infos))]
        self._warn_of(steps)
        found: dict[str, Any] = {}
        if values.get("timeout") is None and values.get("truncated") is None:
            flags, are_told = zip(*(told_time_outs(step, self._num_envs) for step in steps), strict=True)
            if np.any(are_told):
                found["timeout"] = flags[0] if is_step else np.stack(flags)
        ended = self._ended({**values, **found}, len(steps))
        if values.get("final_observation") is None and ended is not None and ended.any():
            found |= self._finals(steps, values.get("observation"), ended, is_step)
        return found

    def _checked(self, infos: Any) -> Any:
        if isinstance(infos, Mapping):
            return infos
        is_list = isinstance(infos, (Sequence, np.ndarray)) and not isinstance(infos, (str, bytes))
        if not is_list or len(infos) != self._num_envs or not all(isinstance(one, Mapping | None) for one in infos):
            got = f"{type(infos).__name__}" + (f" of {len(infos)}" if is_list else "")
            expected = f"infos as a mapping, or a list of {self._num_envs} mappings, one of each environment"
            raise SchemaError(_ADD, "", expected, got)
        return infos

    def _warn_of(self, steps: Sequence[Mapping[str, Any]]) -> None:
        keys = {key: None for step in steps for key in step if key not in _KNOWN and key not in self._warned_keys}
        if keys:
            self._warned_keys.update(keys)
            listed = ", ".join(map(repr, keys))
            text = f"infos have {listed}, which is not recorded: to keep a value, give it by a name of its own"
            warnings.warn(text, RolloutDataWarning, stacklevel=5)

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
        self, steps: Sequence[Mapping[str, Any]], observation: Any, ended: np.ndarray, is_step: bool
    ) -> dict[str, Any]:
        """Return the final observations of the ends, `[k, ...]` in the order of time, then environment."""
        rows, privileged_rows = [], []
        for number in np.flatnonzero(ended.any(1)).tolist():
            done = ended[number]
            now = observation if is_step else _mapped(lambda leaf, step=number: leaf[step], observation)
            found, privileged, lacking = final_rows(self._with_env_axis(steps[number], now), now, done)
            if found is not None and lacking.any():
                expected = "infos with the final observation of each environment that ends in a step"
                got = f"none of environment {np.flatnonzero(lacking)[0]}"
                raise UsageError(_ADD, "", expected, got, "Add the environments that lack one alone, by env_mask")
            if found is not None:
                rows.append(_mapped(lambda leaf, kept=done: _of_ends(leaf, kept), found))
                if privileged is not None:
                    privileged_rows.append(_mapped(lambda leaf, kept=done: _of_ends(leaf, kept), privileged))
        num_steps = int(ended.any(1).sum())
        if not rows:
            return {}
        if len(rows) != num_steps or len(privileged_rows) not in (0, num_steps):
            expected, got = "infos with final observations in each step in which a trajectory ends", "some without"
            raise UsageError(_ADD, "", expected, got)
        found = {"final_observation": _joined(rows)}
        return found | ({"final_privileged_observation": _joined(privileged_rows)} if privileged_rows else {})

    def _with_env_axis(self, infos: Mapping[str, Any], observation: Any) -> Mapping[str, Any]:
        """Give final observations of a single environment the axis of environments that its observation has."""
        if self._num_envs != 1:
            return infos
        found = dict(infos)
        for name in FINAL + FINAL_PRIVILEGED:
            value = found.get(name)
            is_batched = isinstance(value, list) or (isinstance(value, np.ndarray) and value.dtype == object)
            if value is not None and not is_batched and _num_axes(value) < _num_axes(observation):
                found[name] = [value]
        return found


def _listed(infos: Any) -> list[Any]:
    if isinstance(infos, Mapping) or not isinstance(infos, (Sequence, np.ndarray)) or not len(infos):
        raise SchemaError(_ADD, "", "infos of a rollout as a list with those of each step", type(infos).__name__)
    return list(infos)


def _num_axes(tree: Any) -> int:
    while isinstance(tree, Mapping):
        tree = next(iter(tree.values()))
    return int(np.ndim(on_host(tree)))


def _mapped(function: Any, tree: Any) -> Any:
    if isinstance(tree, Mapping):
        return {key: _mapped(function, item) for key, item in tree.items()}
    return function(tree)


def _of_ends(leaf: Any, done: np.ndarray) -> np.ndarray:
    """Return the rows of environments that ended, of a leaf of all environments or of those alone."""
    rows = on_host(as_given(leaf))
    return rows[done] if len(rows) == len(done) else rows


def _joined(parts: Sequence[Any]) -> Any:
    if isinstance(parts[0], Mapping):
        return {key: _joined([part[key] for part in parts]) for key in parts[0]}
    return np.concatenate(parts)
