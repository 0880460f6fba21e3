"""The registry of a rollout storage: each column declared once, everything else loops.

One rule: this is the only place outside `transition.py` that names the columns of a storage.
Whoever adds a column declares a `Column`; allocation, writing, growing, rolling, saving and
mini-batches follow from that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import nan
from numbers import Integral
from typing import Any, NamedTuple

import torch

from ..core.fields import Field, Schema, dtype_name
from ..core.records import is_count
from ..core.tree import flatten, unflatten
from ..errors import SchemaError, UsageError

#: `(48,)`, 48, or a nested dict whose leaves are shapes or pairs of shape and dtype.
ShapeLike = int | Sequence[int] | Mapping[str, Any]

#: What a storage is made with -> the column that has that shape.
SHAPED = {"obs": "observations", "critic_obs": "critic_observations", "actions": "actions"}
_OUTPUTS = "policy_outputs"


@dataclass(frozen=True)
class Column:
    """One attribute of a storage, kept as `[T, B, *shape]` per field.

    Attributes:
        name: The attribute of the storage.
        fields: Its field, called like the column, or one per leaf below it; none if it is absent.
        source: Attribute of the transition that fills it; "" if it is computed.
        batch: Field of the mini-batch that carries it; "" if none does.
        fallback: Mini-batch field that stands in if the column is absent; "" for None.
        is_required: Whether every transition must bring it; otherwise rows get the field's fill.
        is_flag: Whether any dtype is taken and kept as not 0 -> 1.
        is_padded: Whether recurrent mini-batches split it at dones (what the network reads).
        is_lazy: Whether it is allocated only when a transition first brings it.
    """

    name: str
    fields: tuple[Field, ...]
    source: str = ""
    batch: str = ""
    fallback: str = ""
    is_required: bool = True
    is_flag: bool = False
    is_padded: bool = False
    is_lazy: bool = False


class Signals(NamedTuple):
    """The columns that returns are computed from and written to: `[rows, B, R]`, flags `[rows, B, 1]`."""

    rewards: torch.Tensor
    values: torch.Tensor
    dones: torch.Tensor
    time_outs: torch.Tensor
    returns: torch.Tensor
    advantages: torch.Tensor
    bootstrap_values: torch.Tensor | None


def check_sizes(sizes: Mapping[str, Any]) -> None:
    """Raise `UsageError` naming the first size that is no int of at least 1."""
    for name, size in sizes.items():
        if not is_count(size):
            raise UsageError("create a storage", "", f"{name} >= 1", repr(size))


def rollout_columns(
    obs_shape: ShapeLike,
    critic_obs_shape: ShapeLike | None,
    actions_shape: ShapeLike,
    num_rewards: int,
    policy_outputs: Mapping[str, Any] | None = None,
) -> list[Column]:
    """Declare what on-policy learning keeps of each step."""

    def like_rewards(name: str, fill: float = 0) -> tuple[Field, ...]:
        return (Field(name, (num_rewards,), fill=fill),)

    def brought(name: str, fields: tuple[Field, ...], batch: str = "", **options: Any) -> Column:
        return Column(name, fields, name, batch, **options)

    critic = () if is_absent(critic_obs_shape) else declare_fields("critic_observations", critic_obs_shape)
    return [
        brought("observations", declare_fields("observations", obs_shape), "obs", is_padded=True),
        brought("critic_observations", critic, "critic_obs", fallback="obs", is_padded=True),
        brought("actions", declare_fields("actions", actions_shape), "actions"),
        brought("rewards", like_rewards("rewards")),
        brought("dones", (Field("dones", (1,), "uint8"),), is_flag=True),
        brought("values", like_rewards("values"), "values"),
        brought("actions_log_prob", (Field("actions_log_prob", (1,)),), "old_actions_log_prob"),
        *_policy_columns(actions_shape, policy_outputs),
        Column("returns", like_rewards("returns"), batch="returns"),
        Column("advantages", like_rewards("advantages"), batch="advantages"),
        brought("time_outs", (Field("time_outs", (1,), "bool"),), is_required=False, is_flag=True),
        # NaN says that none was given, so that it cannot be used by mistake.
        brought("bootstrap_values", like_rewards("bootstrap_values", nan), is_required=False, is_lazy=True),
    ]


def _policy_columns(actions_shape: ShapeLike, outputs: Mapping[str, Any] | None) -> list[Column]:
    """Declare mean and deviation of a Gaussian policy, or what another policy gives instead."""
    gaussian = {"mu": "action_mean", "sigma": "action_sigma"}
    if outputs is None:
        columns = [Column(x, declare_fields(x, actions_shape), gaussian[x], f"old_{x}") for x in gaussian]
        return [*columns, Column(_OUTPUTS, ())]
    if not isinstance(outputs, Mapping):
        raise SchemaError("create a storage", f"with {_OUTPUTS}", "a mapping of names to shapes", repr(outputs))
    fields = declare_fields(_OUTPUTS, outputs) if outputs else ()
    absent = [Column(x, (), batch=f"old_{x}") for x in gaussian]
    return [*absent, Column(_OUTPUTS, fields, _OUTPUTS if fields else "", _OUTPUTS)]


def is_absent(shape: ShapeLike | None) -> bool:
    """Whether a shape says "no such observations": None, (None,), [None] or an empty mapping."""
    if isinstance(shape, Mapping):
        return not shape
    return shape is None or (isinstance(shape, Iterable) and list(shape) == [None])


def declare_fields(name: str, shape: Any) -> tuple[Field, ...]:
    """Declare `name` of a shape, or `name/...` for the leaves of a nested dict of shapes.

    Args:
        name: Of the column.
        shape: Sizes (float32), one size, `(sizes, dtype)`, a `Field`, or a mapping of these.
    """
    if isinstance(shape, Mapping):
        for key in shape or [None]:
            if not isinstance(key, str) or not key or "/" in key:
                expected, got = "names that are non-empty str without '/'", "nothing" if key is None else repr(key)
                raise SchemaError("declare the shape of", repr(name), expected, got)
        return tuple(field for key, below in shape.items() for field in declare_fields(f"{name}/{key}", below))
    if isinstance(shape, Field):
        return (Field(name, shape.shape, shape.dtype, fill=shape.fill),)
    sizes: Any = shape
    dtype = "float32"
    if isinstance(shape, tuple) and len(shape) == 2 and isinstance(shape[1], (str, torch.dtype)):
        sizes = shape[0]
        dtype = shape[1] if isinstance(shape[1], str) else dtype_name(shape[1], repr(name))
    sizes = (sizes,) if isinstance(sizes, Integral) else sizes
    if (
        not isinstance(sizes, Sequence)
        or isinstance(sizes, str)
        or not all(isinstance(size, Integral) for size in sizes)
    ):
        raise SchemaError("declare the shape of", repr(name), "a sequence of ints or a dict of such", repr(shape))
    return (Field(name, tuple(sizes), dtype),)


def schema_of(columns: Iterable[Column]) -> Schema:
    """List the fields of all columns; names must not repeat, and none may stand above another."""
    found = Schema(field for column in columns for field in column.fields)
    for name in found:
        parts = name.split("/")
        if above := [path for path in ("/".join(parts[:k]) for k in range(1, len(parts))) if path in found]:
            raise SchemaError("declare the fields of a storage", "", f"{above[0]!r} a leaf or a mapping", repr(name))
    return found


def shape_to_json(name: str, fields: Iterable[Field]) -> Any:
    """Write the declared shape of the column `name` as JSON; None if it is absent."""
    return [[field.name[len(name) + 1 :], list(field.shape), field.dtype] for field in fields] or None


def shape_from_json(written: Any) -> Any:
    """Read what `shape_to_json` wrote, in the form that a storage is made with."""
    if written is None:
        return None
    shapes = {path: tuple(shape) if dtype == "float32" else (tuple(shape), dtype) for path, shape, dtype in written}
    return shapes[""] if "" in shapes else unflatten(shapes)


def shapes_to_json(columns: Mapping[str, Column]) -> dict[str, Any]:
    """Write the shapes that a storage with these columns is made with."""
    fields = {short: columns[name].fields if name in columns else () for short, name in SHAPED.items()}
    shapes = {f"{short}_shape": shape_to_json(SHAPED[short], found) for short, found in fields.items()}
    if _OUTPUTS in columns and columns[_OUTPUTS].batch:  # those of a Gaussian policy are not named
        shapes[_OUTPUTS] = shape_to_json(_OUTPUTS, columns[_OUTPUTS].fields) or []
    return shapes


def shapes_from_json(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Read what `shapes_to_json` wrote."""
    shapes = {f"{short}_shape": shape_from_json(arguments[f"{short}_shape"]) for short in SHAPED}
    return shapes | ({_OUTPUTS: shape_from_json(arguments[_OUTPUTS])} if _OUTPUTS in arguments else {})


def flatten_column(name: str, value: Any) -> list[tuple[str, torch.Tensor]]:
    """List a column's leaves by flat name; none if it is absent."""
    return [] if value is None else list(flatten({name: value}).items())
