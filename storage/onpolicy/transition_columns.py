"""The columns of rollout storages, and their records `Transition` and `MiniBatch`.

Each value of on-policy learning is declared once, as a `Column`. Memory, growing, rolling,
mini-batches, recording and saved states are loops over the columns. `rollout_columns` declares the
columns of every storage. The method `declare_columns` of a storage class adds columns of that
class.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, make_dataclass
from math import nan
from typing import Any, NamedTuple

import torch

from ..core.arguments import is_whole
from ..core.fields import DTYPES, Field, dtype_name, flatten, unflatten
from ..core.object_summary import described
from ..core.records import as_tensor
from ..errors import SchemaError

#: Shape of a field, such as `(48,)` or 48, or a nested dict whose leaves are shapes or (shape,
#: dtype).
ShapeLike = int | Sequence[int] | Mapping[str, Any]
_ABSENT = object()


@dataclass(frozen=True)
class Column:
    """A value of each step, such as the actions, stored as `[T, B, *shape]` per field.

    Attributes:
        name: The attribute of the storage, and the name in saved files.
        fields: One field with the name of the column, or one field per leaf of a nested dict; () if
            not stored.
        source: Attribute of transitions that has the value; "" if the value is computed.
        batch: Field of mini-batches that has the value; "" if mini-batches do not have it.
        fallback: Mini-batch field whose value is used if the column is absent; "" uses None.
        is_required: Whether every transition must have the value. Otherwise a step without the
            value is filled with `Field.fill`.
        is_flag: Whether the value may have any dtype and is stored as `value != 0`.
        is_padded: Whether recurrent mini-batches split the column at dones: true for inputs of the
            network.
        is_lazy: Whether memory is allocated only when a transition first has the value.
        is_ignorable: Whether a transition may have the value although the column is not stored.
            Some callers set the values of all algorithms.
        is_recorded: Whether `RolloutWriter.add_rollout` records the column by default.
        view_of: Name of a column with one more step, of which this column is a view. A view is
            neither filled nor saved.
        first_row: First row of the view in the column `view_of`, 0 or 1.
        argument: Argument of the constructor with the shape of the column; "" without one.
        taken: Names of the fields whose dtype comes from the first step. Later steps must have the
            same dtype. After a floating dtype, any floating dtype is accepted, and values are
            stored as float32.
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
    is_ignorable: bool = False
    is_recorded: bool = False
    view_of: str = ""
    first_row: int = 0
    argument: str = ""
    taken: frozenset[str] = frozenset()


def input_column(name: str, shape: Any = _ABSENT, batch: str = "", **options: Any) -> Column:
    """Build a column whose values come from the attribute `name` of transitions.

    A column without a shape has no fields.
    """
    column_fields = () if shape is _ABSENT else declare_fields(name, shape)
    return Column(name, column_fields, **{"source": name, "batch": batch, **options})


def rollout_columns(
    obs_shape: ShapeLike,
    critic_obs_shape: ShapeLike | None,
    actions_shape: ShapeLike,
    num_rewards: int,
    policy_outputs: Mapping[str, Any] | None = None,
) -> list[Column]:
    """Return the columns of on-policy learning, in the order of transitions and mini-batches.

    A column without a shape has no fields in `RolloutStorage`. A subclass stores next observations
    or action labels. `SavedStates` stores the recurrent states. Masks exist only in mini-batches.
    """
    if not isinstance(policy_outputs, Mapping | None):
        raise SchemaError(
            f"policy_outputs must be a mapping of names to shapes, got {policy_outputs!r}."
        )
    heads = (num_rewards,)
    scalar = (1,)
    critic = _ABSENT if is_absent(critic_obs_shape) else critic_obs_shape
    gaussian = actions_shape if policy_outputs is None else _ABSENT
    network_input: dict[str, Any] = {"is_padded": True, "is_recorded": True}
    privileged = {
        "argument": "critic_obs_shape",
        "fallback": "obs",
        "is_ignorable": True,
        **network_input,
    }
    outputs = {"argument": "" if policy_outputs is None else "policy_outputs"}
    # Steps without a value are filled with NaN, so that a missing value is not used by mistake.
    bootstrap = Field("bootstrap_values", heads, fill=nan)
    return [
        input_column("observations", obs_shape, "obs", argument="obs_shape", **network_input),
        input_column("critic_observations", critic, "critic_obs", **privileged),
        input_column(
            "actions", actions_shape, "actions", argument="actions_shape", is_recorded=True
        ),
        input_column("rewards", heads, is_recorded=True),
        input_column("dones", (scalar, "uint8"), is_flag=True, is_recorded=True),
        input_column("values", heads, "values"),
        input_column("advantages", heads, "advantages", source=""),
        input_column("returns", heads, "returns", source=""),
        input_column("actions_log_prob", scalar, "old_actions_log_prob"),
        input_column("mu", gaussian, "old_mu", source="action_mean"),
        input_column("sigma", gaussian, "old_sigma", source="action_sigma"),
        input_column(
            "saved_hidden_states", batch="hidden_states", source="hidden_states", is_ignorable=True
        ),
        input_column("masks", batch="masks", source=""),
        input_column(
            "time_outs", (scalar, "bool"), is_required=False, is_flag=True, is_recorded=True
        ),
        input_column("bootstrap_values", bootstrap, is_required=False, is_lazy=True),
        input_column(
            "policy_outputs",
            policy_outputs or _ABSENT,
            "policy_outputs",
            **outputs,
            is_recorded=True,
        ),
        input_column("next_observations", is_ignorable=True),
        input_column("next_critic_observations", is_ignorable=True),
        input_column("action_labels"),
    ]


def replaced(columns: Iterable[Column], *others: Column) -> list[Column]:
    """Replace columns by the `others` of the same names, and append the remaining `others`."""
    by_name = {column.name: column for column in columns}
    for column in others:
        by_name[column.name] = column
    return list(by_name.values())


# -- records ---------------------------------------------------------------------------------


def transition_type(columns: Iterable[Column], base: type[Any]) -> type[Any]:
    """Return `base`, or a subclass of it that has a field for the `source` of every column.

    The subclass is a dataclass. The default of its added fields is None.
    """
    sources = [column.source for column in columns if column.source]
    added = [(source, Any, field(default=None)) for source in sources if not hasattr(base, source)]
    if not added:
        return base
    derived: type[Any] = make_dataclass(base.__name__, added, bases=(base,))
    return derived


def batch_type(columns: Iterable[Column], base: type[Any]) -> type[Any]:
    """Return `base`, or a named tuple that also has a field for the `batch` of every column.

    The default of all fields is None.
    """
    names = list(getattr(base, "_fields", ()))
    in_batch = [column.batch for column in columns if column.batch]
    added = [batch for batch in in_batch if batch not in names]
    if not added or not issubclass(base, tuple):
        return base
    return namedtuple(base.__name__, names + added, defaults=[None] * len(names + added))


# -- shapes ----------------------------------------------------------------------------------


def is_absent(shape: ShapeLike | None) -> bool:
    """Return whether a shape means no observations: None, (None,), [None] or an empty mapping."""
    if isinstance(shape, Mapping):
        return not shape
    return shape is None or (isinstance(shape, Iterable) and list(shape) == [None])


def declare_fields(name: str, shape: Any) -> tuple[Field, ...]:
    """Return the field `name` of a shape, or a field `name/...` per leaf of a nested dict.

    Args:
        name: Name of the column.
        shape: Sizes, one size (both float32), `(sizes, dtype)`, a `Field`, or a mapping of these.
    """
    if isinstance(shape, Mapping):
        for key in shape or [None]:
            if not isinstance(key, str) or not key or "/" in key:
                problem = "no names" if key is None else f"the name {key!r}"
                raise SchemaError(
                    f"the shapes of {name!r} have {problem}. Names must be non-empty strs without "
                    "'/'."
                )
        declared: list[Field] = []
        for key, below in shape.items():
            declared += declare_fields(f"{name}/{key}", below)
        return tuple(declared)
    if isinstance(shape, Field):
        return (Field(name, shape.shape, shape.dtype, fill=shape.fill),)
    sizes: Any
    sizes, dtype = shape if _is_pair(shape) else (shape, "float32")
    sizes = (sizes,) if is_whole(sizes) else sizes
    are_sizes = isinstance(sizes, Sequence) and all(is_whole(size) for size in sizes)
    if not are_sizes or isinstance(sizes, str):
        raise SchemaError(
            f"the shape of {name!r} must be a sequence of integers or a dict of sequences, got "
            f"{shape!r}."
        )
    if not isinstance(dtype, str):
        dtype = dtype_name(dtype, f"field {name!r}")
    return (Field(name, tuple(sizes), dtype),)


def _is_pair(shape: Any) -> bool:
    """Return whether a shape is a pair of shape and dtype."""
    return isinstance(shape, tuple) and len(shape) == 2 and isinstance(shape[1], (str, torch.dtype))


def undeclared_fields(name: str, shape: Any) -> set[str]:
    """Return the names of the fields of a column that have a shape but no declared dtype."""
    if isinstance(shape, Mapping):
        return {
            field
            for key, below in shape.items()
            for field in undeclared_fields(f"{name}/{key}", below)
        }
    return set() if isinstance(shape, Field) or _is_pair(shape) else {name}


def taken_dtypes(name: str, shape: Any, value: Any) -> dict[str, str]:
    """Return the dtypes of fields without a declared dtype, from the first value of a column.

    Integers and bool keep their dtype, floating numbers become float32. Values that do not fit the
    shape are left out.
    """
    dtypes = {}
    leaves = flatten({name: value}) if isinstance(value, Mapping) else {name: value}
    for field_name in undeclared_fields(name, shape) & leaves.keys():
        leaf = leaves[field_name]
        if leaf is None:
            continue
        if not isinstance(leaf, torch.Tensor):
            leaf = as_tensor(leaf, f"field {field_name!r}")
        is_whole_number = not leaf.is_floating_point() and not leaf.is_complex()
        dtypes[field_name] = (
            dtype_name(leaf.dtype, f"field {field_name!r}") if is_whole_number else "float32"
        )
    return dtypes


def with_dtypes(name: str, shape: Any, dtypes: Mapping[str, str]) -> Any:
    """Return a shape for `declare_fields` in which missing dtypes are filled in from `dtypes`."""
    if isinstance(shape, Mapping):
        return {key: with_dtypes(f"{name}/{key}", below, dtypes) for key, below in shape.items()}
    has_dtype = isinstance(shape, Field) or _is_pair(shape)
    if has_dtype or name not in dtypes:
        return shape
    return (shape, dtypes[name])


def shapes_to_json(columns: Iterable[Column]) -> dict[str, Any]:
    """Return the arguments of a storage that declare the shapes of its columns, as JSON."""
    written = {}
    for column in columns:
        if column.argument:
            leaves = [
                [x.name[len(column.name) + 1 :], list(x.shape), x.dtype] for x in column.fields
            ]
            # Absent critic observations are None, as in earlier saves. Absent policy outputs are an
            # empty list.
            written[column.argument] = None if column.is_ignorable and not leaves else leaves
    return written


def shape_from_json(written: Any) -> Any:
    """Return the argument of a storage from the result of `shapes_to_json` for one column."""
    if written is None:
        return None
    shapes = {
        path: tuple(shape) if dtype == "float32" else (tuple(shape), dtype)
        for path, shape, dtype in written
    }
    return shapes[""] if "" in shapes else unflatten(shapes)


def without_dtypes(name: str, written: list[Any], fields: set[str]) -> list[Any]:
    """Replace the dtypes of the `fields` by float32 in saved shapes.

    `written` are the shapes that `shapes_to_json` returned for the column `name`. Entries that are
    not `[path, shape, dtype]` are damaged and returned unchanged; the comparison with the shapes of
    the storage rejects them.
    """
    changed = []
    for entry in written:
        is_field = isinstance(entry, (list, tuple)) and len(entry) == 3
        if is_field:
            path, shape, dtype = entry
            field_name = f"{name}/{path}" if path else name
            changed.append([path, shape, "float32" if field_name in fields else dtype])
        else:
            changed.append(entry)
    return changed


def checked_dtypes(written: Any) -> dict[str, str] | None:
    """Return checked dtypes by field of a loaded state; None if no step has fixed them."""
    if written is None:
        return None
    if not isinstance(written, Mapping) or not all(x in DTYPES for x in written.values()):
        raise SchemaError(
            "'taken_dtypes' of the state must be None, or map names of fields to dtypes, got "
            f"{written!r}."
        )
    return dict(written)


# -- the records of any storage ----------------------------------------------------------------


@dataclass(repr=False)
class Transition:
    """The values of one step of all envs, `[B, ...]`.

    Attributes:
        observations: Observations of the policy, `[B, *obs]`, or a dict of such tensors.
        critic_observations: Observations of the critic, `[B, *critic_obs]`, or a dict of such
            tensors.
        actions: Executed actions, `[B, *A]`.
        rewards: `[B, R]`, or `[B]` with one reward.
        dones: `[B]` or `[B, 1]` of any dtype: not 0 where this step was the last of its trajectory.
        values: `[B, R]`, or `[B]` with one reward: value of the observation.
        actions_log_prob: `[B]` or `[B, 1]`: log-probability.
        action_mean, action_sigma: `[B, *A]`: mean and standard deviation of a Gaussian policy.
        hidden_states: Recurrent states before the step: None, a `[layers, B, H]` tensor, or (named)
            tuples of such tensors.
        time_outs: `[B]` or `[B, 1]`: not 0 where the trajectory was cut and did not end by itself.
        bootstrap_values: `[B, R]`: value of the true final observation; read only where a time-out
            cut the trajectory.
        policy_outputs: Outputs of a policy that is not Gaussian, a dict of `[B, ...]`, as declared
            with the storage.
        next_observations: True next observations before any reset, as `observations`.
        next_critic_observations: True next observations of the critic, as `critic_observations`.
        action_labels: Actions of a teacher, `[B, *A]`.
    """

    observations: Any = None
    critic_observations: Any = None
    actions: Any = None
    rewards: Any = None
    dones: Any = None
    values: Any = None
    actions_log_prob: Any = None
    action_mean: Any = None
    action_sigma: Any = None
    hidden_states: Any = None
    time_outs: Any = None
    bootstrap_values: Any = None
    policy_outputs: Any = None
    next_observations: Any = None
    next_critic_observations: Any = None
    action_labels: Any = None

    __repr__ = described

    def clear(self) -> None:
        """Set every field to its default, which is None unless a subclass changes it."""
        for attribute in fields(self):
            setattr(self, attribute.name, getattr(type(self), attribute.name, None))


class MiniBatch(NamedTuple):
    """Rows for one gradient step, `[M, ...]`, or `[T, n, ...]` in recurrent batches.

    Absent values are None.

    Attributes:
        obs, actions, values, old_actions_log_prob, old_mu, old_sigma, policy_outputs: Values of the
            transitions.
        critic_obs: Observations of the critic; `obs` if the critic has no observations of its own.
        advantages, returns: Results of `compute_returns`, or values that the trainer wrote,
            `[..., R]`.
        hidden_states: In recurrent mini-batches, the states before the first step of each
            trajectory, `[layers, n_traj, H]`.
        masks: In recurrent mini-batches, bool `[T, n_traj]`, False on padding.
    """

    obs: Any = None
    critic_obs: Any = None
    actions: Any = None
    values: Any = None
    advantages: Any = None
    returns: Any = None
    old_actions_log_prob: Any = None
    old_mu: Any = None
    old_sigma: Any = None
    hidden_states: Any = None
    masks: Any = None
    policy_outputs: Any = None

    def __repr__(self) -> str:
        return described(self)


class HiddenStates(NamedTuple):
    """Recurrent states of an actor and of a critic; None for a network without states."""

    actor: Any = None
    critic: Any = None
