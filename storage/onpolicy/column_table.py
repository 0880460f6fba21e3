"""The `[T, B, ...]` tensors of a rollout storage.

Operations loop over the columns and act on the time axis. No operation depends on the name of a
column. All values of a step are checked before the first byte is written.

Recurrent states are None, a tensor, or (named) tuples of these. Their leaves, `[layers, B, *H]`,
are columns too. The first states fix the structure, which is saved as a layout in JSON: "tensor",
None, or a list of layouts. A list that starts with `{"names": [...]}` is a named tuple.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import repeat
from operator import attrgetter, ne
from typing import Any, NamedTuple

import torch

from ..core.deferred import DeferredErrors
from ..core.fields import REAL_DTYPES, Field, Schema, check_same_names, flatten, unflatten
from ..core.memory import PackedCopy, filled, lasting
from ..core.records import Cast, always_fit, as_tensor, fit
from ..errors import FieldTypeError, MissingFieldError, SchemaError, nearest
from ..saving.hdf5_columns import name_of
from ..saving.saved_store import checked_tensor
from .transition_columns import Column, HiddenStates

_LEAF = "tensor"
_COLUMN = "saved_hidden_states"
_version_of = attrgetter("_version")


class ColumnTable:
    """Columns of `num_rows` steps of `num_envs` envs on one device.

    Names of fields must not repeat, and no name may be a parent of another. `earlier` are tensors
    of an earlier table by name. A field reuses the tensor of its name if dtype and number of rows
    match.
    """

    def __init__(
        self,
        columns: Sequence[Column],
        num_rows: int,
        num_envs: int,
        device: torch.device,
        earlier: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self.columns = {column.name: column for column in columns}
        self.schema = Schema(field for column in columns for field in column.fields)
        self.num_rows = num_rows
        self.num_envs = num_envs
        self.device = device
        self.tensors: dict[str, torch.Tensor] = {}
        #: Counter of writes, moves and replacements of the tensors. A reader that remembers the
        #: count detects changes of the rollout.
        self.num_changes = 0
        self._inputs = [
            (column, {field.name: _Input.of(column, field, num_envs) for field in column.fields})
            for column in columns
            if column.source and column.fields
        ]
        self._sources = {x.source for x in columns if x.source and (x.fields or x.is_ignorable)}
        viewed = {column.view_of for column in columns}
        #: Names of fields with `num_rows + 1` steps. Other columns are views of these fields.
        self._longer = {
            field.name for column in columns if column.name in viewed for field in column.fields
        }
        #: Views of the rows of a field, one per step, by field name and number of axes of the
        #: written value. Created when the first step is written.
        self._rows: dict[tuple[str, int], tuple[torch.Tensor, ...]] = {}
        #: Default rows `[B, *shape]` for steps without a value, by name of the optional field.
        self._default_rows: dict[str, torch.Tensor] = {}
        #: Objects that copy the host tensors of a step to the device in one transfer, by names
        #: and shapes of the tensors.
        self._copies: dict[tuple[tuple[str, torch.Size], ...], PackedCopy] = {}
        for name in self.schema:
            parents = [other for other in self.schema if name.startswith(other + "/")]
            if parents:
                raise SchemaError(
                    f"{parents[0]!r} is a field and cannot have the field {name!r} below it."
                )
        for column in columns:
            for field in column.fields:
                if column.is_lazy or column.view_of:
                    continue
                tensor = earlier.get(field.name) if earlier else None
                rows = num_rows + (field.name in self._longer)
                if (
                    tensor is not None
                    and tensor.dtype is field.torch_dtype
                    and tensor.shape[0] == rows
                ):
                    self.tensors[field.name] = tensor
                else:
                    self._allocate(field.name, (num_envs, *field.shape), field.torch_dtype)
        self._show_views()
        self.note_results(False)

    @lasting
    def _allocate(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        num_rows = self.num_rows + (name in self._longer)
        self.tensors[name] = filled((num_rows, *shape), self._fill_of(name), dtype, self.device)
        self._rows = {}

    @lasting
    def _show_views(self) -> None:
        for column in self.columns.values():
            if not column.view_of:
                continue
            for field in column.fields:
                whole = self.tensors[column.view_of + field.name[len(column.name) :]]
                self.tensors[field.name] = whole[column.first_row :][: self.num_rows]

    def _fill_of(self, name: str) -> float:
        return self.schema[name].fill if name in self.schema else 0

    def view(self, name: str, stop: int | None = None) -> Any:
        """Return a view of a column: a tensor, a nested dict of tensors, or None if absent."""
        fields = self.columns[name].fields if name in self.columns else ()
        leaves = {
            field.name: self.tensors[field.name][:stop]
            for field in fields
            if field.name in self.tensors
        }
        return unflatten(leaves)[name] if leaves else None

    # -- one step --------------------------------------------------------------------------

    def read(
        self, transition: Any, deferred: DeferredErrors | None = None
    ) -> dict[str, torch.Tensor]:
        """Check the values of `transition`. Return the tensors to copy into a row, by field name.

        Values on a device are checked there for numbers that are out of range. `deferred` receives
        such an error and raises it in a later call. If it is None, the host waits for the check.
        """
        for name, value in getattr(transition, "__dict__", {}).items():
            if value is not None and name not in self._sources:
                raise MissingFieldError(
                    f"unknown field {name!r}. This storage has the fields "
                    f"{', '.join(sorted(self._sources))}."
                )
        leaves: dict[str, torch.Tensor] = {}
        for column, inputs in self._inputs:
            value = getattr(transition, column.source, None)
            if value is None:
                if column.is_required:
                    expected = ", ".join(field.expected for field in inputs.values())
                    raise MissingFieldError(
                        f"field {column.source!r} is missing: expected {expected}."
                    )
                continue
            for field, leaf in _leaves_of(value, column, inputs):
                if not isinstance(leaf, torch.Tensor):
                    leaf = as_tensor(leaf, f"field {field.source.name!r}")
                # Leaves that fit exactly pass here; the full check takes 2 microseconds more per
                # field.
                is_plain = leaf.layout is torch.strided and not leaf.is_meta
                if not is_plain or leaf.shape not in field.shapes or leaf.dtype not in field.dtypes:
                    leaf = fit(
                        field.source,
                        leaf,
                        field.cast,
                        shapes=field.shapes,
                        deferred=deferred,
                    )
                leaves[field.name] = leaf
        return leaves

    def write(self, row: int, leaves: Mapping[str, torch.Tensor]) -> None:
        """Write a step to the row `row`: the result of `read`, and tensors with any other names.

        Columns for new names are allocated first.
        """
        for name, leaf in leaves.items():
            if name in self.tensors:
                continue
            if name in self.schema:
                field = self.schema[name]
                self._allocate(name, (self.num_envs, *field.shape), field.torch_dtype)
            else:
                self._allocate(name, tuple(leaf.shape), leaf.dtype)
        if not self._rows:
            self._split_rows()
        step = {**self._default_rows, **leaves}
        if self.device.type == "cuda":
            step.update(self._sent({name: x for name, x in step.items() if x.is_cpu}))
        # One call takes half the time of a loop. Fill values are copied as tensors too, since
        # `fill_` takes three times as long.
        torch._foreach_copy_(
            [self._rows[name, x.dim()][row] for name, x in step.items()], list(step.values())
        )
        self.num_changes += 1
        self._versions = tuple(map(_version_of, self._results))

    def _sent(self, leaves: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copy the host tensors of a step to the device in one transfer."""
        if not leaves:
            return {}
        form = tuple((name, x.shape) for name, x in leaves.items())
        if form not in self._copies:
            dtypes = [self._rows[name, x.dim()][0].dtype for name, x in leaves.items()]
            self._copies[form] = PackedCopy([x.shape for x in leaves.values()], dtypes, self.device)
        copies = self._copies[form](list(leaves.values()))
        return dict(zip(leaves, copies, strict=True))

    @property
    def num_buffer_waits(self) -> int:
        """Number of steps that waited because a pinned buffer was still being copied."""
        return sum(copy.num_waits for copy in self._copies.values())

    @lasting
    def _split_rows(self) -> None:
        """Split every tensor into views of its rows, `[B, *shape]`.

        A field of shape (1,) also gets views `[B]`, since transitions may have either shape.
        """
        inputs = {name: column for column, fields in self._inputs for name in fields}
        self._default_rows = {}
        for name, tensor in self.tensors.items():
            column = inputs.get(name)
            if column is None:
                self._rows[name, tensor.dim() - 1] = tensor.unbind(0)
                continue
            if column.is_flag:  # A copy of any dtype into bool is `!= 0`.
                tensor = tensor.view(torch.bool)
            self._rows[name, tensor.dim() - 1] = tensor.unbind(0)
            if tensor.dim() == 3 and tensor.shape[-1] == 1:
                self._rows[name, 1] = tensor.squeeze(-1).unbind(0)
            if not column.is_required and not column.view_of:
                self._default_rows[name] = torch.full_like(tensor[0], self._fill_of(name))

    # -- all steps -------------------------------------------------------------------------

    @lasting
    def grow(self, num_rows: int) -> None:
        """Append `num_rows` empty steps to every tensor. Written steps keep their values."""
        has_results = self.has_results
        for name, tensor in self.tensors.items():
            new = tensor.new_full((num_rows, *tensor.shape[1:]), self._fill_of(name))
            self.tensors[name] = torch.cat([tensor, new])
        self.num_rows += num_rows
        self._note_change(has_results)

    def roll(self, start: int) -> None:
        """Rotate every tensor in place so that the step at `start` becomes the first."""
        has_results = self.has_results
        for tensor in self.tensors.values():
            tensor.copy_(torch.cat([tensor[start:], tensor[:start]]))
        self.num_changes += 1
        self.note_results(has_results)

    def assign(self, name: str, value: Any) -> None:
        """Copy `[T, B, *shape]`, or a nested dict of such tensors, over a column in place."""
        column = self.columns[name]
        leaves = flatten({name: value})
        targets = []
        check_same_names({field.name: None for field in column.fields}, leaves)
        for key, x in leaves.items():
            target = self.tensors.get(key)
            if (
                not isinstance(x, torch.Tensor)
                or x.layout is not torch.strided
                or x.is_meta
                or x.is_quantized
            ):
                form = str(x.layout) if isinstance(x, torch.Tensor) else type(x).__name__
                raise FieldTypeError(f"field {key!r} must be a dense tensor, got {form}.")
            if target is None:
                raise SchemaError(f"field {key!r} has no rows yet. Add a transition first.")
            if x.shape != target.shape:
                raise SchemaError(
                    f"field {key!r} has shape {tuple(x.shape)}, expected {tuple(target.shape)}."
                )
            # A copy of any dtype into bool is `!= 0`: flags stay 0 or 1, as all readers of flags
            # expect.
            targets.append(target.view(torch.bool) if column.is_flag else target)
        self.num_changes += 1
        with torch.no_grad():
            for target, x in zip(targets, leaves.values(), strict=True):
                target.copy_(x)

    def own_tensors(self) -> dict[str, torch.Tensor]:
        """Return all tensors by name, except views of other columns."""
        views = {
            field.name
            for column in self.columns.values()
            if column.view_of
            for field in column.fields
        }
        return {name: x for name, x in self.tensors.items() if name not in views}

    def replace(self, tensors: Mapping[str, torch.Tensor], num_rows: int, others: set[str]) -> None:
        """Replace all of `own_tensors` by tensors of `num_rows` steps.

        Args:
            tensors: Tensors by name. Only tensors of fields are checked.
            num_rows: New number of steps.
            others: Names of the tensors that are no fields.
        """
        expected = {
            field.name: (
                (num_rows + (field.name in self._longer), self.num_envs, *field.shape),
                field,
            )
            for column in self.columns.values()
            for field in column.fields
            if not column.view_of and (not column.is_lazy or field.name in tensors)
        }
        for name in tensors:
            if name not in expected and name not in others:
                raise MissingFieldError(
                    f"the state has the unknown tensor {name!r}. The tensors are "
                    f"{nearest(name, expected)}."
                )
        for name, (shape, field) in expected.items():
            checked_tensor(tensors, name, field.torch_dtype, shape)
        self.tensors = dict(tensors)
        self.num_rows = num_rows
        self._show_views()
        self._note_change()

    def _note_change(self, has_results: bool = False) -> None:
        """Count a change and forget the views of rows, after the tensors were replaced."""
        self.num_changes += 1
        self._rows = {}
        self.note_results(has_results)

    # -- mini-batches ----------------------------------------------------------------------

    @property
    def has_results(self) -> bool:
        """Whether returns and other computed columns were written since the last step."""
        return all(map(ne, map(_version_of, self._results), self._versions))

    def note_results(self, are_new: bool) -> None:
        """Set whether the computed columns, such as returns, belong to the current steps.

        If `are_new` is False, the columns are outdated until all of them are written again. A write
        changes `_version`, in which torch counts writes in place through any view of a tensor.
        """
        results = [column for column in self.columns.values() if column.batch and not column.source]
        self._results = [self.tensors[x.name] for column in results for x in column.fields]
        self._versions = tuple(-1 if are_new else x._version for x in self._results)

    def batch_columns(self, rows: int) -> list[tuple[str, torch.Tensor, bool]]:
        """Return the fields that mini-batches have, as tuples (name, tensor, is_padded).

        `name` is the flat name in mini-batches. `tensor` is a view `[rows, B, ...]` of the first
        steps. `is_padded` is that of the `Column`.
        """
        has_results = self.has_results
        in_batch = []
        for column in self.columns.values():
            is_carried = column.batch and (column.source or has_results)
            if not is_carried:
                continue
            for field in column.fields:
                if field.name in self.tensors:
                    name = column.batch + field.name[len(column.name) :]
                    in_batch.append((name, self.tensors[field.name][:rows], column.is_padded))
        return in_batch

    def fill_batch(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return a batch as nested dicts, with fallbacks or None for the missing columns."""
        fields = unflatten(batch)
        for column in self.columns.values():
            if column.batch and column.batch not in fields:
                fields[column.batch] = fields[column.fallback] if column.fallback else None
        return fields


# -- fields of a transition --------------------------------------------------------------------


class _Input(NamedTuple):
    """The shapes and dtypes that a field accepts from a transition."""

    #: Name of the field in the table.
    name: str
    #: The field under the name of its value in transitions, which errors mention.
    source: Field
    cast: Cast
    #: Accepted shapes: `[B, *shape]`, and `[B]` if the shape is (1,).
    shapes: tuple[torch.Size, ...]
    #: Dtypes that are copied without a check: the field can represent all of their numbers.
    dtypes: frozenset[torch.dtype]

    @classmethod
    def of(cls, column: Column, field: Field, num_envs: int) -> _Input:
        shapes = [torch.Size((num_envs, *field.shape))]
        if field.shape == (1,):
            shapes.append(torch.Size((num_envs,)))
        source = replace(field, name=column.source + field.name[len(column.name) :])
        if column.is_flag:
            return cls(field.name, source, "flag", tuple(shapes), REAL_DTYPES)
        if field.name not in column.taken:
            return cls(field.name, source, "in range", tuple(shapes), always_fit(field.torch_dtype))
        if not field.torch_dtype.is_floating_point:
            return cls(field.name, source, "exact", tuple(shapes), frozenset([field.torch_dtype]))
        floating = frozenset(
            dtype for dtype in always_fit(field.torch_dtype) if dtype.is_floating_point
        )
        return cls(field.name, source, "floating", tuple(shapes), floating)

    @property
    def expected(self) -> str:
        return f"{self.source.dtype} of shape {tuple(self.shapes[0])}"


def _leaves_of(
    value: Any, column: Column, inputs: Mapping[str, _Input]
) -> Iterable[tuple[_Input, Any]]:
    """Return the leaves of a value for a column, each with the input of its field.

    `inputs` are the inputs of the column's fields, by field name. Raises `SchemaError` if the value
    has other leaves than the column has fields.
    """
    is_mapping = isinstance(value, Mapping)
    if is_mapping == (column.name in inputs):
        expected = inputs[column.name].expected if is_mapping else "a mapping"
        raise SchemaError(
            f"field {column.source!r} has type {type(value).__name__}, expected {expected}."
        )
    if not is_mapping:
        return ((inputs[column.name], value),)
    leaves = flatten({column.name: value})
    check_same_names(inputs, leaves)
    return [(field, leaves[name]) for name, field in inputs.items()]


class SavedStates:
    """The recurrent states before each step, stored as columns in the table of a storage."""

    def __init__(self, table: ColumnTable) -> None:
        self._table = table
        #: Layout of the stored tensors; None before the first step with states.
        self.layout: Any = None

    def leaves(self) -> list[torch.Tensor]:
        """Return the stored tensors, `[T, layers, B, *H]`, as views of the table."""
        return [x for name, x in self._table.tensors.items() if name.startswith(_COLUMN + "/")]

    def build(self, leaves: list[torch.Tensor]) -> Any:
        """Return states, nested as in the steps, from flat tensors; None without states."""
        return _build(self.layout, iter(leaves))

    def read(self, states: Any) -> dict[str, torch.Tensor]:
        """Return the states of a step as flat tensors by name in the table.

        Raises:
            SchemaError: Structure, shapes or dtypes differ from those of earlier steps.
        """
        stored = self.leaves()
        if states is None and not stored:
            return {}
        layout = _layout(states)
        leaves = _leaves(states)
        if stored and layout != self.layout:
            raise SchemaError(
                f"hidden_states have the structure {_layout_text(layout)}, expected "
                f"{_layout_text(self.layout)}."
            )
        for place, leaf in enumerate(leaves):
            self._check_leaf(leaf, stored[place][0] if stored else None)
        if leaves:
            self.layout = layout
        return {f"{_COLUMN}/{place}": leaf for place, leaf in enumerate(leaves)}

    def _check_leaf(self, leaf: torch.Tensor, stored: torch.Tensor | None) -> None:
        """Raise `SchemaError` unless a leaf is `[layers, B, *H]`, in the form of `stored`.

        `stored` is the same leaf of an earlier step, with the expected shape and dtype. It is None
        at the first step with states.
        """
        is_dense = leaf.layout is torch.strided and not leaf.is_meta
        has_envs = leaf.dim() >= 3 and leaf.shape[1] == self._table.num_envs
        is_equal = stored is None or (leaf.shape == stored.shape and leaf.dtype == stored.dtype)
        if is_dense and has_envs and is_equal and leaf.dtype in REAL_DTYPES:
            return
        if stored is not None:
            expected = f"{name_of(stored)} of shape {tuple(stored.shape)}"
        else:
            dtype = name_of(leaf) if leaf.dtype in REAL_DTYPES else "real numbers"
            expected = f"{dtype} of shape (layers, {self._table.num_envs}, H)"
        form = "" if is_dense else f" ({leaf.layout} on {leaf.device})"
        raise SchemaError(
            f"a tensor of hidden_states is {name_of(leaf)} of shape {tuple(leaf.shape)}{form}, "
            f"expected {expected}."
        )

    def check_loaded(
        self, layout: Any, tensors: Mapping[str, torch.Tensor], num_rows: int
    ) -> set[str]:
        """Check the recurrent states in a loaded state and return their names.

        Raises:
            SchemaError: The tensors are not `num_rows` steps of states with this layout.
        """
        leaves: dict[str, torch.Tensor] = {}
        while f"{_COLUMN}/{len(leaves)}" in tensors:
            name = f"{_COLUMN}/{len(leaves)}"
            leaves[name] = tensors[name]
        unused = iter(leaves.values())
        try:
            fits = _layout(_build(layout, unused)) == layout and not list(unused)
        except (AttributeError, LookupError, StopIteration, TypeError, ValueError):
            fits = False
        if not fits:
            raise SchemaError(
                f"'states' of the state must be a layout of {len(leaves)} tensors: None, "
                f"'tensor' or nested lists of these, got {layout!r}."
            )
        for x in leaves.values():
            if x.dim() < 4 or len(x) != num_rows or x.shape[2] != self._table.num_envs:
                raise SchemaError(
                    f"a tensor of {_COLUMN!r} has shape {tuple(x.shape)}, expected "
                    f"({num_rows}, layers, {self._table.num_envs}, H)."
                )
        return set(leaves)


def _layout(states: Any) -> Any:
    """Return the layout of recurrent states: "tensor", None, or a list of layouts."""
    if states is None:
        return None
    if isinstance(states, torch.Tensor):
        return _LEAF
    if isinstance(states, (tuple, list)):
        names = [{"names": list(states._fields)}] if hasattr(states, "_fields") else []
        return [*names, *map(_layout, states)]
    raise SchemaError(
        f"hidden_states must be None, a tensor or tuples of these, got {type(states).__name__}."
    )


def _leaves(states: Any) -> list[torch.Tensor]:
    if isinstance(states, torch.Tensor):
        return [states]
    return [leaf for child in states or () for leaf in _leaves(child)]


def _build(layout: Any, leaves: Iterator[Any]) -> Any:
    """Build states with a layout from the next tensors of `leaves`."""
    if not isinstance(layout, list):
        return None if layout is None else next(leaves)
    names = layout[0]["names"] if layout and isinstance(layout[0], dict) else None
    children = [_build(child, leaves) for child in layout[names is not None :]]
    if names is None:
        return tuple(children)
    has_two_networks = tuple(names) == HiddenStates._fields
    states_type: Any = HiddenStates if has_two_networks else namedtuple("States", names)
    return states_type(*children)


def _layout_text(layout: Any) -> str:
    """Return a layout as text for errors, such as "(tensor, tensor)"."""
    return str(_build(layout, repeat(_LEAF))).replace("'", "")
