"""Records: what a caller hands to a writer, brought into one form and checked.

One rule: everything is checked here, before anything is written. A record of one step
(`[N, ...]`) becomes a rollout of one step (`[1, N, ...]`), so that all code behind it knows
one form only. Storing is elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from storage.core.fields import Field, Schema, dtype_name
from storage.core.host_arrays import on_host, viewable
from storage.core.tree import check_same_names, flatten, map_leaves
from storage.errors import FieldTypeError, MissingFieldError, SchemaError, UsageError, nearest

from .observation_parts import ObservationParts

OBSERVATION, PRIVILEGED, REWARD = "observation", "privileged_observation", "reward"
REQUIRED = (OBSERVATION, "action")
FINALS = {"final_observation": OBSERVATION, "final_privileged_observation": PRIVILEGED}
FLAGS = ("done", "timeout", "terminated", "truncated", "env_mask")


@dataclass(eq=False)  # not frozen: for each step that would take four times as long
class Rollout:
    """A checked record, time first.

    Attributes:
        fields: Field -> `[T, N, *shape]`.
        terminated, truncated, present: `[T, N]` bool arrays; an end is only where a frame is.
        policy_version: `[T, N]` int64, or one number for all.
        finals: Field -> `[k, *shape]`, one row for each end in the order of time, then env; or None.
        has_final_privileged: False if the privileged part of `finals` only stands in.
        is_plain: Known to end no trajectory and to lack no frame.
        is_kept: `[T, N]` bool: a trajectory that ends here is not dropped; None if none is.
    """

    fields: Mapping[str, torch.Tensor | np.ndarray]
    terminated: np.ndarray
    truncated: np.ndarray
    present: np.ndarray
    policy_version: np.ndarray | int
    finals: dict[str, torch.Tensor] | None
    has_final_privileged: bool = True
    is_plain: bool = False
    is_kept: np.ndarray | None = None

    @property
    def num_steps(self) -> int:
        return len(self.present)

    def steps(self, start: int, stop: int) -> Rollout:
        """Give the steps `start:stop`, sharing memory."""
        if start == 0 and stop == self.num_steps:
            return self
        part, version, finals = slice(start, stop), self.policy_version, self.finals
        if finals is not None:
            ends = (self.terminated | self.truncated).sum(axis=1)
            rows = slice(int(ends[:start].sum()), int(ends[:stop].sum()))
            finals = {name: tensor[rows] for name, tensor in finals.items()}
        return Rollout(
            {name: tensor[part] for name, tensor in self.fields.items()},
            self.terminated[part],
            self.truncated[part],
            self.present[part],
            version[part] if isinstance(version, np.ndarray) else version,
            finals,
            self.has_final_privileged,
            is_kept=None if self.is_kept is None else self.is_kept[part],
        )


def num_nonfinite(rewards: torch.Tensor | np.ndarray, present: np.ndarray) -> int:
    """Count the values of `[T, N, ...]` rewards that are NaN or infinite, where there are frames."""
    rewards = on_host(rewards)
    if rewards.dtype.kind != "f":
        return 0
    is_finite = np.isfinite(rewards)
    return 0 if is_finite.all() else int((~is_finite)[present].sum())


def unpack_storage(transition: Any, include: Sequence[str]) -> Any:
    """Give the filled steps of a `RolloutStorage` in the order of time as a mapping; anything else as it is."""
    if not hasattr(transition, "num_transitions_per_env") or not hasattr(transition, "add_transitions"):
        if include:
            raise UsageError("include fields", ", ".join(include), "a RolloutStorage", type(transition).__name__)
        return transition
    usual = ("observations", "critic_observations", "actions", "rewards", "dones", "time_outs", "policy_outputs")
    names = (*usual, *include)
    found = {name: getattr(transition, name, None) for name in names}
    for name in include:
        if found[name] is None:
            raise UsageError("include the field", repr(name), "a field of the storage", "none of that name")
    return {name: _filled(value, transition) for name, value in found.items() if value is not None}


def _filled(column: Any, storage: Any) -> Any:
    """Give the filled steps in the order of time: a queue that has come round begins at its cursor."""
    step, is_round = storage.step, getattr(storage, "buffer_full", False)
    return map_leaves(lambda x: torch.cat([x[step:], x[:step]]) if is_round else x[:step], column)


def read_rollout(
    values: Mapping[str, Any], num_envs: int, is_step: bool, parts: ObservationParts, schema: Schema | None
) -> tuple[Rollout, Schema]:
    """Check a record and bring it into form.

    Args:
        values: From `given_values`.
        num_envs: N.
        is_step: True for `[N, ...]`, False for `[T, N, ...]`.
        parts: How the observation is cut and coded.
        schema: What was declared by an earlier record; None declares it from this one.

    Returns:
        The rollout (sharing memory with the values) and its schema.

    Raises:
        SchemaError: Another field set, shape, dtype or leading size than declared.
    """
    values = dict(values)
    version = values.pop("policy_version", None)
    flags = {name: as_tensor(name, values.pop(name)) for name in FLAGS if name in values}
    flat = _flat(values)
    finals = {name: flat.pop(name) for name in list(flat) if name.split("/")[0] in FINALS}
    for name in REQUIRED:
        if not any(key == name or key.startswith(name + "/") for key in flat):
            raise MissingFieldError(
                "add a record",
                f"without the field {name!r}",
                f"a value for {name!r}",
                f"only {', '.join(flat) or 'nothing'}",
                "Give it as a keyword or in the record",
            )
    tensors = parts.split(flat, OBSERVATION, 1 if is_step else 2)
    lead = (num_envs,) if is_step else (*next(iter(tensors.values())).shape[:1], num_envs)
    for name, tensor in tensors.items():
        _check_lead(name, tensor, lead)
    schema = schema or declare(tensors, len(lead), parts)
    _check_fields(schema, tensors, lead)
    arrays = {name: _flag(name, tensor, lead) for name, tensor in flags.items()}
    terminated, truncated, present = resolve_ends(arrays, np.ones(lead if len(lead) == 2 else (1, *lead), bool))
    is_end = terminated | truncated
    rows = _final_rows(finals, parts, schema, lead, is_end) if finals else None
    tensors = {name: tensors[name].unsqueeze(0) if is_step else tensors[name] for name in schema}
    missing = [name for name in schema.below(PRIVILEGED) if rows is not None and name not in rows]
    if rows is not None and missing:
        where = tuple(torch.from_numpy(axis) for axis in np.nonzero(is_end))
        rows |= {name: tensors[name].cpu()[where] for name in missing}
    rollout = Rollout(tensors, terminated, truncated, present, _version(version, lead), rows, not missing)
    return rollout, schema


def as_tensor(name: str, value: Any) -> torch.Tensor:
    """View a tensor or array as a detached tensor; copy only what torch cannot view."""
    if isinstance(value, torch.Tensor):
        dtype_name(value.dtype, f"of {name!r}")
        if value.layout != torch.strided or value.is_meta or value.is_nested:
            kind = "a meta tensor" if value.is_meta else "a nested tensor" if value.is_nested else str(value.layout)
            raise FieldTypeError(
                "take the value of", repr(name), "a dense tensor with values", kind, "Convert it first"
            )
        return value.detach().resolve_neg()
    if isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
        advice = "Fill it, or say with env_mask which envs have no frame"
        raise SchemaError("take the value of", repr(name), "an array without masked values", "masked ones", advice)
    try:
        array = np.asarray(value)
    except ValueError as cause:
        raise SchemaError("take the value of", repr(name), "an array", str(cause)) from cause
    dtype_name(array.dtype, f"of {name!r}")
    return torch.from_numpy(viewable(array))


def declare(tensors: Mapping[str, torch.Tensor], num_lead: int, parts: ObservationParts) -> Schema:
    """Declare the schema that a first record has: observation, privileged, action, reward, extras."""
    order = [OBSERVATION, PRIVILEGED, "action", REWARD]
    ranks = {name: order.index(head) if (head := name.split("/")[0]) in order else len(order) for name in tensors}
    names = sorted(tensors, key=ranks.__getitem__)
    components = [name.removeprefix(OBSERVATION + "/") for name in names if name.startswith(OBSERVATION + "/")]
    for name in parts.codecs:
        if name not in components:
            raise SchemaError("code the component", "of obs_disassemble_mapping", nearest(name, components), repr(name))
    codecs = {f"{OBSERVATION}/{name}": codec for name, codec in parts.codecs.items()}
    return Schema(
        Field(name, tuple(tensors[name].shape[num_lead:]), dtype_name(tensors[name].dtype), codecs.get(name, "raw"))
        for name in names
    )


def _flat(values: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    flat: dict[str, torch.Tensor] = {}
    for name, value in values.items():
        leaves = flatten(value, f"{name}/") if isinstance(value, Mapping) else {name: value}
        flat.update({leaf: as_tensor(leaf, item) for leaf, item in leaves.items() if item is not None})
    return flat


def _check_lead(name: str, tensor: torch.Tensor, lead: tuple[int, ...]) -> None:
    if tuple(tensor.shape[: len(lead)]) != lead:
        axes = "num_envs" if len(lead) == 1 else "time, num_envs"
        raise SchemaError(
            "add a record", f"with the field {name!r}", f"leading size {lead} ({axes})", f"shape {tuple(tensor.shape)}"
        )


def _check_fields(schema: Schema, tensors: Mapping[str, torch.Tensor], lead: tuple[int, ...]) -> None:
    check_same_names(schema, tensors, "add a record")
    for name, field in schema.items():
        _check_row(name, field, tensors[name], len(lead))


def _check_row(name: str, field: Field, tensor: torch.Tensor, num_lead: int) -> None:
    where = f"with the field {name!r}"
    if tuple(tensor.shape[num_lead:]) != field.shape:
        raise SchemaError("add a record", where, f"rows of shape {field.shape}", f"{tuple(tensor.shape[num_lead:])}")
    if tensor.dtype != field.torch_dtype:
        got = str(tensor.dtype).removeprefix("torch.")
        raise FieldTypeError("add a record", where, f"dtype {field.dtype}, as declared by the first record", got)


def _flag(name: str, tensor: torch.Tensor, lead: tuple[int, ...]) -> np.ndarray:
    """Give a flag as a `[T, N]` bool array."""
    if tuple(tensor.shape) not in (lead, (*lead, 1)):
        raise SchemaError(
            "add a record", f"with the flag {name!r}", f"shape {lead} or {(*lead, 1)}", str(tuple(tensor.shape))
        )
    if tensor.dtype.is_floating_point and tensor.isnan().any():
        raise UsageError("add a record", f"with the flag {name!r}", "true and false values", "NaN")
    array = tensor.ne(0).cpu().numpy() if tensor.dtype != torch.bool else tensor.cpu().numpy()
    return array.reshape(lead if len(lead) == 2 else (1, *lead))


def resolve_ends(flags: Mapping[str, np.ndarray], all_present: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Resolve done, timeout, terminated and truncated into (terminated, truncated, present).

    Args:
        flags: Flag -> `[T, N]` bool.
        all_present: `[T, N]` of True.
    """
    done, timeout, terminated, truncated, mask = (flags.get(name) for name in FLAGS)
    if done is not None and mask is None and terminated is None and truncated is None:
        # A stale timeout where nothing ended is no end: simulators leave old flags standing.
        truncated = np.zeros_like(done) if timeout is None else timeout & done
        return done & ~truncated, truncated, all_present
    shape = all_present.shape
    present = all_present if mask is None else mask
    if truncated is None:
        truncated = timeout
    elif timeout is not None and (timeout & present != truncated & present).any():
        raise UsageError("add a record", "with both timeout and truncated", "the same values", "different ones")
    if done is None:
        none = np.zeros(shape, bool)
        terminated, truncated = (none if flag is None else flag for flag in (terminated, truncated))
    elif terminated is None:
        truncated = np.zeros(shape, bool) if truncated is None else truncated & done
        terminated = done & ~truncated
    elif truncated is None:
        truncated = done & ~terminated
    if done is not None and ((terminated | truncated) & present != done & present).any():
        raise UsageError(
            "add a record", "with done, terminated and truncated", "done = terminated | truncated", "a contradiction"
        )
    return terminated & present, truncated & present, present


def _version(version: Any, lead: tuple[int, ...]) -> np.ndarray | int:
    if version is None:
        return -1
    tensor = as_tensor("policy_version", version)
    if tensor.dtype.is_floating_point or tensor.dtype == torch.bool:
        raise FieldTypeError(
            "add a record", "with policy_version", "integers", str(tensor.dtype).removeprefix("torch.")
        )
    array = tensor.cpu().numpy()
    if array.dtype == np.uint64 and array.size and array.max() >= 1 << 63:
        raise FieldTypeError("add a record", "with policy_version", "numbers below 2**63", str(array.max()))
    array = array.astype(np.int64)
    if array.ndim == 0:
        return int(array)
    if len(lead) == 2 and array.shape in (lead[:1], (lead[0], 1)):
        return np.broadcast_to(array.reshape(-1, 1), lead)
    if array.shape not in (lead, (*lead, 1)):
        raise SchemaError("add a record", "with policy_version", f"one integer or shape {lead}", str(array.shape))
    return array.reshape(lead if len(lead) == 2 else (1, *lead))


def _final_rows(
    flat: dict[str, torch.Tensor], parts: ObservationParts, schema: Schema, lead: tuple[int, ...], is_end: np.ndarray
) -> dict[str, torch.Tensor]:
    """Pick the rows of the ends from `final_observation` and its privileged twin."""
    num_lead = len(lead)
    is_whole = all(tuple(tensor.shape[:num_lead]) == lead for tensor in flat.values())
    flat = parts.split(flat, "final_observation", *((num_lead, 1) if is_whole else (1, num_lead)))
    rows = {}
    for name, tensor in flat.items():
        head, _, rest = name.partition("/")
        field_name = FINALS[head] + ("/" + rest if rest else "")
        if field_name not in schema:
            raise MissingFieldError(
                "add a record", f"with the field {name!r}", nearest(field_name, schema), repr(field_name)
            )
        rows[field_name] = _ended_rows(name, tensor, schema[field_name], lead, is_end)
    for name in schema.below(OBSERVATION):
        if name not in rows:
            raise MissingFieldError(
                "add a record", f"without the final value of {name!r}", "all observation fields", ", ".join(flat)
            )
    return rows


def _ended_rows(
    name: str, tensor: torch.Tensor, field: Field, lead: tuple[int, ...], is_end: np.ndarray
) -> torch.Tensor:
    num_ends = int(is_end.sum())
    num_lead = tensor.ndim - len(field.shape)
    if num_lead == len(lead) and tuple(tensor.shape[:num_lead]) == lead:
        _check_row(name, field, tensor, num_lead)
        chosen = torch.from_numpy(np.flatnonzero(is_end)).to(tensor.device)
        return tensor.reshape(-1, *field.shape)[chosen] if num_ends else tensor.new_empty((0, *field.shape))
    if num_lead == 1 and tensor.shape[0] == num_ends:
        _check_row(name, field, tensor, 1)
        return tensor
    expected = f"shape {(*lead, *field.shape)}"
    if (num_ends,) != lead:
        expected += f", or {(num_ends, *field.shape)} for the ends of this record"
    raise SchemaError("add a record", f"with {name!r}", expected, str(tuple(tensor.shape)))
