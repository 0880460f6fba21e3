"""The observation of a trajectory, joined from its components as batches have it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from storage.codecs.codec_chains import codec_of
from storage.core.fields import Field
from storage.core.records import as_tensor
from storage.errors import FieldTypeError, MissingFieldError, SchemaError, UsageError, in_parts

from ..blocks.row_layout import joined

_WHOLE = ("observations", "observation", "obs")


def assembled(action: str, fields: Sequence[Field], traj_data: Mapping[str, Any]) -> torch.Tensor:
    """Join components `[T, ...]` of a mapping into `[T, D]`; see `RolloutDataset.assemble_obs_components`.

    Args:
        action: The call of the user, for errors.
        fields: Fields of the observation, in order: `observation`, or `observation/<component>`.
        traj_data: The components by name.
    """
    if not isinstance(traj_data, Mapping):
        raise UsageError(
            in_parts(action, "", "traj_data as a mapping of arrays", type(traj_data).__name__)
        )
    leaves = _leaves(traj_data, "")
    parts = [_component(action, field, leaves) for field in fields]
    lengths = {field.name: len(part) for field, part in zip(fields, parts, strict=True)}
    if len(set(lengths.values())) > 1:
        raise SchemaError(
            f"cannot {action}: expected traj_data with as many frames in each component, got "
            f"{lengths}."
        )
    return joined(parts, 1)


def _leaves(tree: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return the leaves of a nested mapping by their names; names may have "/" in them already."""
    leaves: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            leaves |= _leaves(value, f"{prefix}{name}/")
        else:
            leaves[f"{prefix}{name}"] = value
    return leaves


def _component(action: str, field: Field, leaves: Mapping[str, Any]) -> torch.Tensor:
    """Return one component as `[T, *shape]` values of the field's dtype."""
    _, _, component = field.name.partition("/")
    names = (f"obs_{component}", field.name, component) if component else _WHOLE
    name = next((name for name in names if name in leaves), None)
    if name is None:
        raise MissingFieldError(
            f"cannot {action}: expected traj_data with {' or '.join(map(repr, names))}, got "
            f"{', '.join(map(repr, leaves)) or 'nothing'}."
        )
    where = f"with {name!r}"
    value = leaves[name]
    if isinstance(value, tuple) and len(value) == 1:  # the older writer stores an observation so
        value = value[0]
    if isinstance(value, torch.Tensor):
        values = value.detach()
    else:
        values = as_tensor(value, f"field {name!r}")
    if values.dim() < 1 or values.shape[1:].numel() != field.num_elements:
        raise SchemaError(
            f"cannot {action} {where}: expected shape [T, {field.num_elements}], got "
            f"{list(values.shape)}."
        )
    codec = codec_of(field)
    if codec.stored_dtype is not None and str(values.dtype) == f"torch.{codec.stored_dtype}":
        values = codec.decode(values, field.torch_dtype)
    elif not torch.can_cast(values.dtype, field.torch_dtype):
        raise FieldTypeError(in_parts(action, where, field.dtype, str(values.dtype)))
    return values.to(field.torch_dtype, copy=True).reshape(len(values), *field.shape)
