"""Join the components of an observation, in the form that batches of a dataset have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from storage.codecs.codec_chains import codec_of
from storage.core.fields import Field
from storage.core.records import as_tensor
from storage.errors import FieldTypeError, MissingFieldError, SchemaError, UsageError

from ..blocks.row_layout import joined

_WHOLE = ("observations", "observation", "obs")


def join_components(fields: Sequence[Field], traj_data: Mapping[str, Any]) -> torch.Tensor:
    """Join components `[T, ...]` of a mapping into `[T, D]`; see `RolloutDataset.assemble_obs_components`.

    Args:
        fields: Fields of the observation in the dataset, in the order of joining. They are named
            `observation` or `observation/<component>`.
        traj_data: Arrays or tensors by name, possibly nested.
    """
    if not isinstance(traj_data, Mapping):
        raise UsageError(f"traj_data must be a mapping of arrays, got {type(traj_data).__name__}.")
    leaves = _leaves(traj_data, "")
    parts = [_component(field, leaves) for field in fields]
    lengths = {field.name: len(part) for field, part in zip(fields, parts, strict=True)}
    if len(set(lengths.values())) > 1:
        raise SchemaError(
            f"the components in traj_data must have the same number of frames, got {lengths}."
        )
    return joined(parts, 1)


def _leaves(tree: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return the leaves of a nested mapping by flat name. Keys may contain "/" themselves."""
    leaves: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            leaves |= _leaves(value, f"{prefix}{name}/")
        else:
            leaves[f"{prefix}{name}"] = value
    return leaves


def _component(field: Field, leaves: Mapping[str, Any]) -> torch.Tensor:
    """Return one component as `[T, *shape]` values of the field's dtype."""
    _, _, component = field.name.partition("/")
    names = (f"obs_{component}", field.name, component) if component else _WHOLE
    name = next((name for name in names if name in leaves), None)
    if name is None:
        raise MissingFieldError(
            f"traj_data has no field {' or '.join(map(repr, names))}. "
            f"It has {', '.join(map(repr, leaves)) or 'no fields'}."
        )
    value = leaves[name]
    if isinstance(value, tuple) and len(value) == 1:  # The older writer stored such tuples.
        value = value[0]
    if isinstance(value, torch.Tensor):
        values = value.detach()
    else:
        values = as_tensor(value, f"field {name!r}")
    if values.dim() < 1 or values.shape[1:].numel() != field.num_elements:
        raise SchemaError(
            f"field {name!r} of traj_data has shape {list(values.shape)}, "
            f"expected [T, {field.num_elements}]."
        )
    codec = codec_of(field)
    if codec.stored_dtype is not None and str(values.dtype) == f"torch.{codec.stored_dtype}":
        values = codec.decode(values, field.torch_dtype)
    elif not torch.can_cast(values.dtype, field.torch_dtype):
        raise FieldTypeError(
            f"field {name!r} of traj_data has dtype {values.dtype}, expected {field.dtype}."
        )
    return values.to(field.torch_dtype, copy=True).reshape(len(values), *field.shape)
