"""Conversion of records of many types to values by name.

Records are dicts, named tuples, dataclasses, objects, batches or storages. Names of other libraries
are translated to the names of this library. Values that can be derived from recorded frames, such
as next observations, are left out. `rollout_records.py` checks the values.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from difflib import SequenceMatcher
from typing import Any

import torch

from storage.core import arguments
from storage.core.fields import map_leaves
from storage.core.memory import as_given
from storage.errors import RolloutDataWarning, SchemaError, UsageError
from storage.onpolicy.transition_columns import rollout_columns

from ..playback.transition import Transition
from .step_infos import are_infos

#: Maps names in this library to the names in Minari, gymnasium, stable-baselines3, torchrl, D4RL,
#: RLlib, tianshou and rsl_rl.
_OTHER_NAMES = {
    "observation": "observations obs",
    "privileged_observation": "privileged_observations privileged_obs critic_observations critic_obs",
    "action": "actions act",
    "reward": "rewards rew next/reward",
    "done": "dones next/done",
    "timeout": "timeouts time_outs time_out TimeLimit.truncated",
    "terminated": "terminateds termination terminations terminal terminals next/terminated",
    "truncated": "truncateds truncation truncations next/truncated",
    "final_observation": "final_observations final_obs terminal_observation terminal_obs next/observation",
    "final_privileged_observation": "final_privileged_obs next/privileged_observation",
    "policy_version": "",
    "env_mask": "valid",
    "episode": "",
    "infos": "info",
}
_ALIASES = {other: name for name, others in _OTHER_NAMES.items() for other in others.split()}
_ENDS = {"done", "terminated", "truncated", "timeout"}
#: Reason, for a warning, why values such as next observations are not recorded.
_FOLLOWS = "it is derived from the frames and final_observation"
_DERIVED = dict.fromkeys(
    ("next_observation", "next_observations", "next_obs", "new_obs", "obs_next"), _FOLLOWS
)
_DERIVED |= {"next_privileged_observation": _FOLLOWS, "is_first": _FOLLOWS}
#: Names of values in rollout storages of other libraries that do not have the shape of a field. They
#: are recorded only if the user passes them as keywords.
_CARRIED = {"hidden_states"}
_NOT_OURS = {*_DERIVED, *_ALIASES, "infos", "extras", "next"}


def is_taken(name: str) -> bool:
    """Return whether a name is reserved, so that an additional field cannot have this name."""
    return name in _NOT_OURS or name in _OTHER_NAMES or name in Transition._fields


def merged_values(transition: Any, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Merge a record (mapping, named tuple, dataclass, object with attributes) and keyword values.

    Names of other libraries are translated, such as "actions" to "action". None values are left
    out. Next observations and `is_first` are left out, since they can be derived from the frames;
    a warning is given if they are keywords. Infos are returned unchanged.

    Raises:
        UsageError: A value is passed twice, or it is unclear whether `done` of a batch marks first
            frames or ends.
    """
    passed = {name: value for name, value in keywords.items() if value is not None}
    if transition is None and _NOT_OURS.isdisjoint(passed):  # The usual case needs no merge.
        return passed
    merged: dict[str, tuple[str, Any]] = {}
    for source, ignored in (
        (_items_of(transition), _DERIVED.keys() | _CARRIED),
        (passed, set()),
    ):
        for original, value in _with_next(source).items():
            name = _ALIASES.get(original, original)
            if original == "extras" and are_infos(value):
                name = "infos"
            if value is None or name in ignored:
                continue
            if name in _DERIVED:
                text = f"{name!r} is not recorded: {_DERIVED[name]}. Rename it to record it."
                warnings.warn(text, RolloutDataWarning, stacklevel=4)
            elif name in merged:
                raise UsageError(
                    f"{merged[name][0]!r} and {original!r} both set {name!r}. Pass only one."
                )
            else:
                merged[name] = original, value
    return {name: value for name, (_, value) in merged.items()}


def _with_next(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Flatten the mapping "next" of a torchrl record to names such as "next/reward".

    In torchrl, `values["next"]["done"]` is the flag of this step, and `values["done"]` the flag of
    the previous step. If the former exists, the latter is left out.
    """
    if not isinstance(values.get("next"), Mapping):
        return values
    next_values = {}
    for name, value in values["next"].items():
        flat_name = f"next/{_ALIASES.get(name, name)}"
        if flat_name in _ALIASES:
            next_values[flat_name] = value
    left_out = {"next"}
    if _ENDS & {_ALIASES[name] for name in next_values}:
        left_out |= _ENDS
    others = {
        name: value for name, value in values.items() if _ALIASES.get(name, name) not in left_out
    }
    return others | next_values


def warn_of_misspellings(values: Mapping[str, Any]) -> None:
    """Warn if the name of an extra field is similar to the name of a value that is missing."""
    names = _ALIASES | {name: name for name in _OTHER_NAMES}
    missing = {known: name for known, name in names.items() if name not in values}
    for name in sorted(values.keys() - _OTHER_NAMES.keys()):
        for known, meant in missing.items():
            ratio = SequenceMatcher(None, name.lower(), known).ratio()
            length = len(name) + len(known)
            is_close = (ratio >= 0.8 and (1 - ratio) * length < 3.5) or sorted(name) == sorted(
                known
            )
            if is_close and known not in name.split("_"):
                text = f"{name!r} is recorded as an extra field. Rename it if it is {meant!r}."
                warnings.warn(text, RolloutDataWarning, stacklevel=5)
                break


def _items_of(transition: Any) -> dict[str, Any]:
    """Return the values of a record by the names that they have in the user's library."""
    if transition is None:
        return {}
    if isinstance(transition, Mapping):
        return dict(transition)
    if isinstance(transition, Transition):
        values = {**transition._asdict(), "done": _recorded_done(transition)}
        del values["stream_id"], values["is_last"], values["end_unknown"]
        return {**(values.pop("extras") or {}), **values}
    if hasattr(transition, "_asdict"):
        return dict(transition._asdict())
    if is_dataclass(transition):
        return {field.name: getattr(transition, field.name) for field in fields(transition)}
    if hasattr(transition, "__dict__"):
        return {name: value for name, value in vars(transition).items() if not name.startswith("_")}
    raise UsageError(
        "transition must be a mapping, a named tuple or an object with fields, got "
        f"{type(transition).__name__}."
    )


def _recorded_done(batch: Transition) -> Any:
    """Return the flag `done` of a batch, with True only at the last frames of trajectories.

    A `RolloutDataset` also sets `done` at first frames. These flags are removed, except at first
    frames that are also last frames.

    Raises:
        SchemaError: A flag has another shape than `done`.
        UsageError: The batch has no `is_last`, so a True may mean a first frame or an end.
    """
    if batch.done is None or batch.is_first is None:
        return batch.done
    done = as_given(batch.done)
    flags = {}
    for name in ("is_first", "is_last", "timeout", "valid"):
        value = getattr(batch, name)
        if value is not None:
            flag = as_given(value)
            if flag.numel() != done.numel():
                raise SchemaError(
                    f"flag {name!r} has shape {tuple(flag.shape)}, expected {tuple(done.shape)}, "
                    "the shape of 'done'."
                )
            flags[name] = flag.to(done.device, torch.bool).reshape(done.shape)
    if "is_last" in flags:
        return done.masked_fill(flags["is_first"] & ~flags["is_last"], 0)
    is_unclear = done.bool() & flags["is_first"]
    if "timeout" in flags:
        # A frame with a time-out is certainly the last frame of its trajectory.
        is_unclear &= ~flags["timeout"]
    if "valid" in flags:
        # Invalid entries are not recorded, so their flags have no effect.
        is_unclear &= flags["valid"]
    if is_unclear.any():
        raise UsageError(
            "is_first and done are both true, and is_last is None. Set is_last, which separates "
            "first frames from ends, with batch._replace(is_last=...)."
        )
    return done


def unpack_storage(transition: Any, include: Sequence[str]) -> Any:
    """Convert the filled steps of a `RolloutStorage` to a mapping, in the order of time.

    Args:
        transition: A storage, or any other record, which is returned unchanged.
        include: Names of fields of the storage to add to the usual fields.
    """
    include = arguments.names("include", include)
    if not hasattr(transition, "num_transitions_per_env") or not hasattr(
        transition, "add_transitions"
    ):
        if include:
            raise UsageError(
                f"include={list(include)} needs a RolloutStorage, got {type(transition).__name__}."
            )
        return transition
    declared = (
        transition.declare_columns()
        if hasattr(transition, "declare_columns")
        else rollout_columns(1, 1, 1, 1)
    )
    usual = [column.name for column in declared if column.is_recorded]
    columns = {name: getattr(transition, name, None) for name in (*usual, *include)}
    missing = [name for name in include if columns[name] is None]
    if missing:
        raise UsageError(f"include has {missing[0]!r}, which is not a field of the storage.")
    step = transition.step
    is_full_queue = getattr(transition, "buffer_full", False)

    def filled(column: torch.Tensor) -> torch.Tensor:
        # In a full ring buffer, the next write position contains the oldest step.
        return torch.cat([column[step:], column[:step]]) if is_full_queue else column[:step]

    return {name: map_leaves(filled, value) for name, value in columns.items() if value is not None}
