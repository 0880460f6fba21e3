"""The records that a writer takes, under our names: dicts, named tuples, dataclasses, objects, batches, storages.

One rule: a batch of a dataset gives what was recorded, without what only its reader added, and one table holds the
names of other libraries. Values are checked elsewhere.
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

#: Our name -> the names of Minari, gymnasium, stable-baselines3, torchrl, D4RL, RLlib, tianshou and rsl_rl.
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
#: Parts of other records that a recording does not repeat, and what to do instead.
_FOLLOWS = "it follows from the frames, and from final_observation where they end"
_DERIVED = dict.fromkeys(("next_observation", "next_observations", "next_obs", "new_obs", "obs_next"), _FOLLOWS)
_DERIVED |= {"next_privileged_observation": _FOLLOWS, "is_first": _FOLLOWS}
#: What transitions of other storages carry besides, in shapes of their own; given by keyword it is a field like others.
_CARRIED = {"hidden_states"}
_NOT_OURS = {*_DERIVED, *_ALIASES, "infos", "extras", "next"}


def is_taken(name: str) -> bool:
    """Return whether a value of this name is no extra field of a record."""
    return name in _NOT_OURS or name in _OTHER_NAMES or name in Transition._fields


def keywords_of(given: dict[str, Any]) -> dict[str, Any]:
    """Return the keyword values of `RolloutWriter.add` that were given, from its locals; None is not given."""
    extras = given.pop("extras")
    del given["self"], given["transition"]
    given.pop("include", None)
    return {name: value for name, value in (given | extras).items() if value is not None}


def given_values(action: str, transition: Any, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Merge a record (mapping, named tuple, dataclass, object with attributes) and keyword values.

    Names are brought to ours ("actions" -> "action"); None means not given. What follows from the rest is left out,
    with a warning if it was given by keyword. Infos stay as they are, for `InfoReader`.

    Raises:
        UsageError: One thing is given twice, by one name or by two; or a batch has marks not to be told from ends.
    """
    if transition is None and _NOT_OURS.isdisjoint(keywords):  # as in most steps of most loops
        return dict(keywords)
    merged: dict[str, tuple[str, Any]] = {}
    for source, carried in ((_items_of(action, transition), _DERIVED.keys() | _CARRIED), (keywords, set())):
        for given, value in _with_next(source).items():
            name = _ALIASES.get(given, given)
            if given == "extras" and are_infos(value):
                name = "infos"
            if value is None or name in carried:
                continue
            if reason := _DERIVED.get(name):
                text = f"{name!r} is not recorded: {reason}; to keep it give it another name"
                warnings.warn(text, RolloutDataWarning, stacklevel=4)
            elif name in merged:
                got = f"{merged[name][0]!r} and {given!r}"
                raise UsageError(action, f"with {name!r}", "each value once", got)
            else:
                merged[name] = given, value
    return {name: value for name, (_, value) in merged.items()}


def _with_next(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Take torchrl's "next" apart: its ends are those of the step, the ends beside it those of the step before."""
    if not isinstance(values.get("next"), Mapping):
        return values
    inner = {f"next/{_ALIASES.get(name, name)}": value for name, value in values["next"].items()}
    inner = {name: value for name, value in inner.items() if name in _ALIASES}
    left_out = {"next"} | (_ENDS if _ENDS & {_ALIASES[name] for name in inner} else set())
    return {name: value for name, value in values.items() if _ALIASES.get(name, name) not in left_out} | inner


def warn_of_misspellings(values: Mapping[str, Any]) -> None:
    """Warn of extra fields whose names are nearly the name of something that was not given."""
    missing = {known: name for known, name in (_ALIASES | {n: n for n in _OTHER_NAMES}).items() if name not in values}
    for name in sorted(values.keys() - _OTHER_NAMES.keys()):
        for known, meant in missing.items():
            ratio = SequenceMatcher(None, name.lower(), known).ratio()
            length = len(name) + len(known)
            is_close = (ratio >= 0.8 and (1 - ratio) * length < 3.5) or sorted(name) == sorted(known)
            if is_close and known not in name.split("_"):
                text = f"{name!r} is recorded as an extra field: if {meant!r} was meant, give it by that name"
                warnings.warn(text, RolloutDataWarning, stacklevel=5)
                break


def _items_of(action: str, transition: Any) -> dict[str, Any]:
    """Return the values of a record by the names that it has for them."""
    if transition is None:
        return {}
    if isinstance(transition, Mapping):
        return dict(transition)
    if isinstance(transition, Transition):
        values = {**transition._asdict(), "done": _recorded_done(action, transition)}
        del values["stream_id"], values["is_last"], values["end_unknown"]
        return {**(values.pop("extras") or {}), **values}
    if hasattr(transition, "_asdict"):
        return dict(transition._asdict())
    if is_dataclass(transition):
        return {field.name: getattr(transition, field.name) for field in fields(transition)}
    if hasattr(transition, "__dict__"):
        return {name: value for name, value in vars(transition).items() if not name.startswith("_")}
    expected = "transition as a mapping, named tuple or object with fields"
    raise UsageError(action, "", expected, type(transition).__name__)


def _recorded_done(action: str, batch: Transition) -> Any:
    """Return `done` of a batch as it was recorded: without the marks of first frames that are not the last as well."""
    if batch.done is None or batch.is_first is None:
        return batch.done
    done = as_given(batch.done)
    flags = {}
    for name in ("is_first", "is_last", "timeout", "valid"):
        if (value := getattr(batch, name)) is not None:
            flag = as_given(value)
            if flag.numel() != done.numel():
                expected = f"shape {tuple(done.shape)} as of 'done'"
                raise SchemaError(action, f"with the flag {name!r}", expected, str(tuple(flag.shape)))
            flags[name] = flag.to(done.device, torch.bool).reshape(done.shape)
    if "is_last" in flags:
        return done.masked_fill(flags["is_first"] & ~flags["is_last"], 0)
    is_unclear = done.bool() & flags["is_first"]
    if "timeout" in flags:  # only an end is a timeout
        is_unclear &= ~flags["timeout"]
    if "valid" in flags:  # what is not valid is no frame
        is_unclear &= flags["valid"]
    if is_unclear.any():
        advice = "Give it with batch._replace(is_last=...): batch.done, where no first frame is marked"
        where = "with is_first where done is true"
        raise UsageError(action, where, "is_last, which tells marked frames from ended ones", "None", advice)
    return done


def unpack_storage(action: str, transition: Any, include: Sequence[str]) -> Any:
    """Return the filled steps of a `RolloutStorage` in the order of time as a mapping; anything else as it is."""
    include = arguments.names(action, "include", include)
    if not hasattr(transition, "num_transitions_per_env") or not hasattr(transition, "add_transitions"):
        if include:
            where = f"with include={list(include)}"
            expected = "transition as a RolloutStorage"
            raise UsageError(action, where, expected, type(transition).__name__)
        return transition
    declared = transition.declare_columns() if hasattr(transition, "declare_columns") else rollout_columns(1, 1, 1, 1)
    usual = [column.name for column in declared if column.is_recorded]
    found = {name: getattr(transition, name, None) for name in (*usual, *include)}
    if missing := [name for name in include if found[name] is None]:
        raise UsageError(action, "", "include as fields of the storage", repr(missing[0]))
    step, is_round = transition.step, getattr(transition, "buffer_full", False)  # a full queue begins at its cursor

    def filled(column: torch.Tensor) -> torch.Tensor:
        return torch.cat([column[step:], column[:step]]) if is_round else column[:step]

    return {name: map_leaves(filled, value) for name, value in found.items() if value is not None}
