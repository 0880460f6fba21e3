"""`InfoReader`: extracts time-outs and final observations from infos.

Infos are the last value that `step()` of gymnasium returns: a mapping with arrays for all envs, or
a list with a mapping for each env. Other libraries name them `extras`.
"""

from __future__ import annotations

import warnings
from collections.abc import Container, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from storage.core.fields import map_leaves
from storage.core.memory import as_given, on_host
from storage.errors import RolloutDataWarning, SchemaError, UsageError

from .environments import FINAL, FINAL_PRIVILEGED, TIME_OUTS, final_rows, joined, time_out_flags

_RECORDED = {*TIME_OUTS, *FINAL, *FINAL_PRIVILEGED}
_ENDS = ("done", "terminated", "truncated", "timeout")


def are_infos(extras: Any) -> bool:
    """Return whether the value `extras` of a record contains infos, as in legged_gym and rsl_rl.

    This is the case if it has a key of time-outs or of final observations. Otherwise it is a mapping
    of additional fields.
    """
    if isinstance(extras, list):  # The extras of a rollout: one item per step.
        return any(map(are_infos, extras))
    return isinstance(extras, Mapping) and not _RECORDED.isdisjoint(extras)


def needed_infos(infos: Any, names: Container[str] = ()) -> Any:
    """Replace unneeded values of infos by None, so that they are not copied from a GPU.

    Needed are time-outs, final observations and the keys `names`, also in `final_info`. All keys
    remain, since a warning lists the keys that are not recorded.
    """
    if isinstance(infos, Mapping):
        needed = {}
        for key, value in infos.items():
            name = str(key).removeprefix("_")
            if key == "final_info":
                needed[key] = needed_infos(value, names)
            elif name in _RECORDED or name in names:
                needed[key] = value
            else:
                needed[key] = None
        return needed
    is_object_array = isinstance(infos, np.ndarray) and infos.dtype == object and infos.ndim > 0
    if isinstance(infos, (list, tuple)) or is_object_array:
        return [needed_infos(info, names) for info in infos]
    return infos


class InfoReader:
    """Reads the infos in the records of one writer. Warns once per key that is not recorded.

    Args:
        num_envs: Number of environments, N.
    """

    def __init__(self, num_envs: int) -> None:
        self._num_envs = num_envs
        self._warned_keys = set[str]()

    def read(
        self, infos: Any, values: Mapping[str, Any], is_step: bool
    ) -> tuple[dict[str, Any], np.ndarray | None]:
        """Extract time-outs and final observations from infos, unless the record contains them.

        Args:
            infos: For a step, a list with a mapping for each environment, or one mapping for all.
                For a rollout, a list of T such infos.
            values: All other values of the record, with names of this library.
            is_step: Whether the record is a single step.

        Returns:
            The extracted values; and whether each frame is the end of a trajectory with a final
            observation in infos, bool `[T, N]`, or None if there is no such frame.

        Raises:
            SchemaError: Infos are not of N environments or T steps.
            UsageError: Only some of the final observations have a privileged part.
        """
        infos_of_steps = [infos] if is_step else _listed(infos, values.get("observation"))
        steps = [joined(self._checked(step_infos)) for step_infos in infos_of_steps]
        self._warn_of(steps)
        info_values: dict[str, Any] = {}
        if values.get("timeout") is None and values.get("truncated") is None:
            flags, are_known = zip(
                *(time_out_flags(step, self._num_envs) for step in steps), strict=True
            )
            if np.any(are_known):
                info_values["timeout"] = flags[0] if is_step else np.stack(flags)
        ended = self._ended({**values, **info_values}, len(steps))
        if values.get("final_observation") is not None or ended is None or not ended.any():
            return info_values, None
        finals, has_final = self._finals(steps, values.get("observation"), ended, is_step)
        return info_values | finals, has_final

    def _checked(self, infos: Any) -> Any:
        if isinstance(infos, Mapping):
            return infos
        is_list = _is_list(infos) and not isinstance(infos, (str, bytes))
        is_of_envs = is_list and len(infos) == self._num_envs
        if not is_of_envs or not all(isinstance(env_infos, Mapping | None) for env_infos in infos):
            raise SchemaError(
                f"infos must be a mapping, or a list of {self._num_envs} mappings, one per "
                f"environment, got {type(infos).__name__}{f' of {len(infos)}' if is_list else ''}."
            )
        return infos

    def _warn_of(self, steps: Sequence[Mapping[str, Any]]) -> None:
        """Warn of keys in infos that are not recorded, once per key."""
        keys = dict.fromkeys(key for step in steps for key in step)
        # Gymnasium adds a mask for each key, such as "_distance" for "distance". Ignore the masks.
        masks = {f"_{key}" for key in keys}
        ignored = [key for key in keys if key not in _RECORDED | self._warned_keys | masks]
        if ignored:
            self._warned_keys.update(ignored)
            listed = ", ".join(map(repr, ignored))
            text = (
                f"Keys of infos are not recorded: {listed}. Pass a value as a keyword to record it."
            )
            warnings.warn(text, RolloutDataWarning, stacklevel=6)

    def _ended(self, values: Mapping[str, Any], num_steps: int) -> np.ndarray | None:
        """Return `[T, N]` bool: whether a trajectory ends at each frame.

        The result is None if a flag has a wrong size. `RolloutReader` then raises the error.
        """
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
        self,
        steps: Sequence[Mapping[str, Any]],
        observation: Any,
        ended: np.ndarray,
        is_step: bool,
    ) -> tuple[dict[str, Any], np.ndarray | None]:
        """Extract the final observations of all steps from infos.

        Args:
            steps: Infos of each step, each as one mapping.
            observation: Observations of the record.
            ended: Whether a trajectory ends, bool `[T, N]`.
            is_step: Whether the record is a single step.

        Returns:
            The final observations, `[k, ...]` in the order of time, then environment; and whether
            each frame has one, bool `[T, N]`, or None if there are no final observations.
        """
        rows = []
        privileged_rows = []
        has_final = np.zeros_like(ended)
        for number in np.flatnonzero(ended.any(1)).tolist():
            done = ended[number]
            now = observation if is_step else map_leaves(partial(_item, number), observation)
            finals, privileged, is_missing = final_rows(
                self._with_env_axis(steps[number], now), now, done
            )
            if finals is not None:
                has_final[number] = done & ~is_missing
                rows_of_ends = partial(_rows_of_ends, has_final[number])
                rows.append(map_leaves(rows_of_ends, finals))
                if privileged is not None:
                    privileged_rows.append(map_leaves(rows_of_ends, privileged))
        if not rows:
            return {}, None
        if len(privileged_rows) not in (0, len(rows)):
            raise UsageError(
                "some steps of infos have final observations without final privileged "
                "observations. Pass both in each step."
            )
        values = {"final_observation": _joined(rows)}
        if privileged_rows:
            values["final_privileged_observation"] = _joined(privileged_rows)
        return values, has_final

    def _with_env_axis(self, infos: Mapping[str, Any], observation: Any) -> Mapping[str, Any]:
        """Add a missing axis of environments to the final observations of a single env."""
        if self._num_envs != 1:
            return infos
        batched = dict(infos)
        for name in FINAL + FINAL_PRIVILEGED:
            value = batched.get(name)
            is_batched = isinstance(value, list) or (
                isinstance(value, np.ndarray) and value.dtype == object
            )
            if value is not None and not is_batched and _num_axes(value) < _num_axes(observation):
                batched[name] = [value]
        return batched


def _listed(infos: Any, observation: Any) -> list[Any]:
    """Check the infos of a rollout of T steps; return them as a list with one item per step.

    Args:
        infos: The argument `infos`.
        observation: Observations `[T, N, ...]`, or a mapping of such values.

    Raises:
        SchemaError: `infos` is no list, or has another length than T.
    """
    if isinstance(infos, Mapping) or not _is_list(infos) or not len(infos):
        raise SchemaError(
            f"infos of a rollout must be a list with one item per step, got {type(infos).__name__}."
        )
    leaf = _first_leaf(observation)
    if leaf is not None and len(infos) != len(leaf):
        raise SchemaError(f"infos have {len(infos)} steps, expected {len(leaf)}.")
    return list(infos)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) or (isinstance(value, np.ndarray) and value.ndim > 0)


def _first_leaf(tree: Any) -> Any:
    while isinstance(tree, Mapping):
        tree = next(iter(tree.values()), None)
    return tree


def _num_axes(tree: Any) -> int:
    return int(np.ndim(on_host(_first_leaf(tree))))


def _item(number: int, leaf: Any) -> Any:
    return leaf[number]


def _rows_of_ends(is_end: np.ndarray, leaf: Any) -> torch.Tensor:
    """Select the final observations of the k environments in `is_end`, bool `[N]`.

    `leaf` contains a row for each of the N environments, or already only the k selected rows.
    """
    rows = as_given(leaf).detach().cpu()
    return rows[torch.from_numpy(is_end)] if len(rows) == len(is_end) else rows


def _joined(parts: Sequence[Any]) -> Any:
    if isinstance(parts[0], Mapping):
        return {key: _joined([part[key] for part in parts]) for key in parts[0]}
    # Equal dtypes are concatenated by torch, since numpy has no bfloat16. Different dtypes are
    # concatenated by numpy: for int64 and float32, torch would round to float32, numpy uses float64.
    if len({part.dtype for part in parts}) == 1:
        return torch.cat(list(parts))
    return np.concatenate(list(map(on_host, parts)))
