"""The `[T, B, ...]` tensors of a rollout storage: allocate, read a step, write it, grow, roll, cut into fields.

One rule: every operation loops over the columns and acts on the time axis; none knows a column by name. A step is
read and checked completely before its first byte is written. Recurrent states are None, a tensor, or (named) tuples
of these; the first ones fix the structure, which is written as a layout for JSON: "tensor", None, or a list of layouts;
a list that starts with `{"names": [...]}` is a named tuple. Their leaves, `[layers, B, *H]`, are columns too.
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
from ..saving.saved_store import checked_tensor
from .transition_columns import Column, HiddenStates

_ACTION = "add a transition"
_LOAD = "load a state"
_LEAF = "tensor"
_COLUMN = "saved_hidden_states"
_version_of = attrgetter("_version")


class ColumnTable:
    """Columns of `num_rows` steps of `num_envs` envs on one device.

    Names of fields must not repeat, and none may stand above another. Tensors in `kept` are used instead of new ones
    where they have the shape and dtype of the field of that name.
    """

    def __init__(
        self,
        columns: Sequence[Column],
        num_rows: int,
        num_envs: int,
        device: torch.device,
        kept: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self.columns = {column.name: column for column in columns}
        self.schema = Schema(field for column in columns for field in column.fields)
        self.num_rows = num_rows
        self.num_envs = num_envs
        self.device = device
        self.tensors: dict[str, torch.Tensor] = {}
        #: How often what is kept was changed: a reader that comes back looks whether it is the same number.
        self.num_changes = 0
        self._inputs = [
            (column, {field.name: _Input.of(column, field, num_envs) for field in column.fields})
            for column in columns
            if column.source and column.fields
        ]
        self._sources = {x.source for x in columns if x.source and (x.fields or x.is_ignorable)}
        viewed = {column.view_of for column in columns}
        #: Fields of `num_rows + 1` steps, which others show.
        self._longer = {field.name for column in columns if column.name in viewed for field in column.fields}
        #: Name and number of axes of a step's value -> the rows that it goes to; made when the first step is written.
        self._rows: dict[tuple[str, int], tuple[torch.Tensor, ...]] = {}
        #: What goes into a row that a step brings no value for.
        self._fillings: dict[str, torch.Tensor] = {}
        #: Names and shapes of the host tensors of a step -> their copy to the device.
        self._copies: dict[tuple[tuple[str, torch.Size], ...], PackedCopy] = {}
        for name in self.schema:
            if above := [other for other in self.schema if name.startswith(other + "/")]:
                expected = f"{above[0]!r} a leaf or a mapping"
                raise SchemaError("declare the fields of a storage", "", expected, repr(name))
        for column in columns:
            for field in column.fields:
                if column.is_lazy or column.view_of:
                    continue
                found = kept.get(field.name) if kept else None
                rows = num_rows + (field.name in self._longer)
                if found is not None and found.dtype is field.torch_dtype and found.shape[0] == rows:
                    self.tensors[field.name] = found
                else:
                    self._allocate(field.name, (num_envs, *field.shape), field.torch_dtype)
        self._show_views()
        self.note_results(False)

    @lasting
    def _allocate(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        whole = (self.num_rows + (name in self._longer), *shape)
        self.tensors[name] = filled(whole, self._fill_of(name), dtype, self.device)
        self._rows = {}

    @lasting
    def _show_views(self) -> None:
        for column in self.columns.values():
            for field in column.fields if column.view_of else ():
                whole = self.tensors[column.view_of + field.name[len(column.name) :]]
                self.tensors[field.name] = whole[column.first_row :][: self.num_rows]

    def _fill_of(self, name: str) -> float:
        return self.schema[name].fill if name in self.schema else 0

    def view(self, name: str, stop: int | None = None) -> Any:
        """Return a column's tensor, a nested dict of them, or None if it is not kept; shared memory."""
        fields = self.columns[name].fields if name in self.columns else ()
        found = {field.name: self.tensors[field.name][:stop] for field in fields if field.name in self.tensors}
        return unflatten(found)[name] if found else None

    # -- one step --------------------------------------------------------------------------

    def read(self, transition: Any, deferred: DeferredErrors | None = None) -> dict[str, torch.Tensor]:
        """Check everything that `transition` brings; give by field what can be copied into a row.

        `deferred` takes the errors of numbers on a device that are out of range; without it the host waits for them.
        """
        for name, value in getattr(transition, "__dict__", {}).items():
            if value is not None and name not in self._sources:
                taken = ", ".join(sorted(self._sources))
                raise MissingFieldError(_ACTION, f"with {name!r}", taken, "a field that this storage does not keep")
        found: dict[str, torch.Tensor] = {}
        for column, inputs in self._inputs:
            value = getattr(transition, column.source, None)
            if value is None:
                if column.is_required:
                    expected = ", ".join(wanted.expected for wanted in inputs.values())
                    raise MissingFieldError(_ACTION, f"without {column.source!r}", expected, "None")
                continue
            for wanted, leaf in _leaves_of(value, column, inputs):
                if not isinstance(leaf, torch.Tensor):
                    leaf = as_tensor(leaf, _ACTION, f"with {wanted.given.name!r}")
                # What fits exactly passes here; the full check takes 2 microseconds more per field.
                is_plain = leaf.layout is torch.strided and not leaf.is_meta
                if not is_plain or leaf.shape not in wanted.shapes or leaf.dtype not in wanted.dtypes:
                    leaf = fit(_ACTION, wanted.given, leaf, wanted.cast, shapes=wanted.shapes, deferred=deferred)
                found[wanted.name] = leaf
        return found

    def write(self, row: int, found: Mapping[str, torch.Tensor]) -> None:
        """Write over a row what `read` gave, and leaves of other names; what is new gets memory first."""
        for name, value in found.items():
            if name not in self.tensors:
                shape = (self.num_envs, *self.schema[name].shape) if name in self.schema else tuple(value.shape)
                self._allocate(name, shape, self.schema[name].torch_dtype if name in self.schema else value.dtype)
        if not self._rows:
            self._cut()
        given = {**self._fillings, **found}
        if self.device.type == "cuda":
            given.update(self._sent({name: x for name, x in given.items() if x.is_cpu}))
        # In half the time of a loop; fillings are copied too, as to fill takes three times as long.
        torch._foreach_copy_([self._rows[name, x.dim()][row] for name, x in given.items()], list(given.values()))
        self.num_changes += 1
        self._versions = tuple(map(_version_of, self._results))

    def _sent(self, given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copy host tensors of a step to the device in one piece."""
        if not given:
            return {}
        form = tuple((name, x.shape) for name, x in given.items())
        if form not in self._copies:
            dtypes = [self._rows[name, x.dim()][0].dtype for name, x in given.items()]
            self._copies[form] = PackedCopy([x.shape for x in given.values()], dtypes, self.device)
        return dict(zip(given, self._copies[form](list(given.values())), strict=True))

    @property
    def num_buffer_waits(self) -> int:
        """Steps whose host tensors had to wait for a pinned buffer."""
        return sum(copy.num_waits for copy in self._copies.values())

    @lasting
    def _cut(self) -> None:
        """Cut every tensor into rows: `[B, *shape]`, and `[B]` where the shape is (1,)."""
        inputs = {name: column for column, fields in self._inputs for name in fields}
        self._fillings = {}
        for name, tensor in self.tensors.items():
            column = inputs.get(name)
            if column is not None and column.is_flag:  # into bool any dtype copies as != 0
                tensor = tensor.view(torch.bool)
            self._rows[name, tensor.dim() - 1] = tensor.unbind(0)
            if column is not None and tensor.dim() == 3 and tensor.shape[-1] == 1:
                self._rows[name, 1] = tensor.squeeze(-1).unbind(0)
            if column is not None and not column.is_required and not column.view_of:
                self._fillings[name] = torch.full_like(tensor[0], self._fill_of(name))

    # -- all steps -------------------------------------------------------------------------

    @lasting
    def grow(self, num_rows: int) -> None:
        """Append `num_rows` steps, filled like new ones, to every tensor; what is written stays."""
        has_results = self.has_results
        for name, tensor in self.tensors.items():
            new = tensor.new_full((num_rows, *tensor.shape[1:]), self._fill_of(name))
            self.tensors[name] = torch.cat([tensor, new])
        self.num_rows += num_rows
        self._note_change(has_results)

    def roll(self, start: int) -> None:
        """Rotate every tensor in place so that the step at `start` comes first."""
        has_results = self.has_results
        for tensor in self.tensors.values():
            tensor.copy_(torch.cat([tensor[start:], tensor[:start]]))
        self.num_changes += 1
        self.note_results(has_results)

    def assign(self, name: str, value: Any) -> None:
        """Copy `[T, B, *shape]` (or a nested dict of such) over a whole column; its tensors stay the same."""
        action = f"assign to {name!r}"
        column = self.columns[name]
        given = flatten({name: value})
        targets = []
        check_same_names({field.name: None for field in column.fields}, given, action)
        for key, x in given.items():
            target = self.tensors.get(key)
            if not isinstance(x, torch.Tensor) or x.layout is not torch.strided or x.is_meta or x.is_quantized:
                raise FieldTypeError(action, "", "a dense tensor", type(x).__name__)
            if target is None or x.shape != target.shape:
                expected = "nothing, it is not kept yet" if target is None else str(list(target.shape))
                raise SchemaError(action, "", f"shape {expected}", str(list(x.shape)))
            # Into bool any dtype copies as != 0: flags stay 0 or 1, as everything that reads them expects.
            targets.append(target.view(torch.bool) if column.is_flag else target)
        self.num_changes += 1
        with torch.no_grad():
            for target, x in zip(targets, given.values(), strict=True):
                target.copy_(x)

    def kept(self) -> dict[str, torch.Tensor]:
        """List all tensors but those of columns that are views."""
        views = {field.name for column in self.columns.values() if column.view_of for field in column.fields}
        return {name: x for name, x in self.tensors.items() if name not in views}

    def replace(self, tensors: Mapping[str, torch.Tensor], num_rows: int, others: set[str]) -> None:
        """Take other tensors of `num_rows` steps in the place of all that `kept` lists; fields, and `others`."""
        expected = {
            field.name: ((num_rows + (field.name in self._longer), self.num_envs, *field.shape), field)
            for column in self.columns.values()
            for field in column.fields
            if not column.view_of and (not column.is_lazy or field.name in tensors)
        }
        for name in tensors:
            if name not in expected and name not in others:
                raise MissingFieldError(_LOAD, f"with the tensor {name!r}", nearest(name, expected))
        for name, (shape, field) in expected.items():
            checked_tensor(tensors, name, field.torch_dtype, shape)
        self.tensors = dict(tensors)
        self.num_rows = num_rows
        self._show_views()
        self._note_change()

    def _note_change(self, has_results: bool = False) -> None:
        """Other tensors are here: forget the rows that were cut of the earlier ones."""
        self.num_changes += 1
        self._rows = {}
        self.note_results(has_results)

    # -- mini-batches ----------------------------------------------------------------------

    @property
    def has_results(self) -> bool:
        """Whether each column that no transition brings was computed, assigned or changed since the last step."""
        return all(map(ne, map(_version_of, self._results), self._versions))

    def note_results(self, are_new: bool) -> None:
        """Return whether the results are those of the steps; if not, wait for the next change of `_version`.

        torch counts there what it writes in place, through any view, in any mode.
        """
        results = [column for column in self.columns.values() if column.batch and not column.source]
        self._results = [self.tensors[x.name] for column in results for x in column.fields]
        self._versions = tuple(-1 if are_new else x._version for x in self._results)

    def batch_columns(self, rows: int) -> list[tuple[str, torch.Tensor, bool]]:
        """List what a mini-batch carries: flat mini-batch name, `[rows, B, ...]`, and whether it is padded."""
        has_results = self.has_results
        return [
            (column.batch + field.name[len(column.name) :], self.tensors[field.name][:rows], column.is_padded)
            for column in self.columns.values()
            if column.batch and (column.source or has_results)
            for field in column.fields
            if field.name in self.tensors
        ]

    def fill_batch(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Nest what `batch_columns` named, and add what it could not give: the fallback, or None."""
        found = unflatten(batch)
        for column in self.columns.values():
            if column.batch and column.batch not in found:
                found[column.batch] = found[column.fallback] if column.fallback else None
        return found


# -- what a transition may bring ---------------------------------------------------------------


class _Input(NamedTuple):
    """What the value of one field must look like."""

    name: str
    #: The field, called as in transitions.
    given: Field
    cast: Cast
    #: What fits as it is: every axis written out, and `[B]` where the shape is (1,).
    shapes: tuple[torch.Size, ...]
    #: What is written as it is: all numbers of these dtypes are numbers of the field.
    dtypes: frozenset[torch.dtype]

    @classmethod
    def of(cls, column: Column, field: Field, num_envs: int) -> _Input:
        shapes = [torch.Size((num_envs, *field.shape))]
        if field.shape == (1,):
            shapes.append(torch.Size((num_envs,)))
        given = replace(field, name=column.source + field.name[len(column.name) :])
        if column.is_flag:
            return cls(field.name, given, "flag", tuple(shapes), REAL_DTYPES)
        if field.name in column.taken:
            if not field.torch_dtype.is_floating_point:
                return cls(field.name, given, "exact", tuple(shapes), frozenset([field.torch_dtype]))
            floating = frozenset(dtype for dtype in always_fit(field.torch_dtype) if dtype.is_floating_point)
            return cls(field.name, given, "floating", tuple(shapes), floating)
        return cls(field.name, given, "in range", tuple(shapes), always_fit(field.torch_dtype))

    @property
    def expected(self) -> str:
        return f"{self.given.dtype} of shape {list(self.shapes[0])}"


def _leaves_of(value: Any, column: Column, inputs: Mapping[str, _Input]) -> Iterable[tuple[_Input, Any]]:
    """Pair the leaves of a column's value with what they must look like; refuse others than the column has."""
    is_mapping = isinstance(value, Mapping)
    if is_mapping == (column.name in inputs):
        expected = inputs[column.name].expected if is_mapping else "a mapping"
        got = "a mapping" if is_mapping else type(value).__name__
        raise SchemaError(_ACTION, f"with {column.source!r}", expected, got)
    if not is_mapping:
        return ((inputs[column.name], value),)
    leaves = flatten({column.name: value})
    check_same_names(inputs, leaves, _ACTION)
    return [(wanted, leaves[name]) for name, wanted in inputs.items()]


class SavedStates:
    """The recurrent states before each step, in a table of their storage; nothing until some come."""

    def __init__(self, table: ColumnTable) -> None:
        self._table = table
        #: Of the leaves that are kept; None without any.
        self.layout: Any = None

    def leaves(self) -> list[torch.Tensor]:
        """List the leaves, `[T, layers, B, *H]`; they share memory with the table."""
        return [x for name, x in self._table.tensors.items() if name.startswith(_COLUMN + "/")]

    def build(self, leaves: list[torch.Tensor]) -> Any:
        """Return states with these leaves; None if none ever came."""
        return _build(self.layout, iter(leaves))

    def read(self, states: Any) -> dict[str, torch.Tensor]:
        """Return the leaves of a step's states, by name in the table; refuse another structure, shape or dtype."""
        kept = self.leaves()
        if states is None and not kept:
            return {}
        layout = _layout(states)
        leaves = _leaves(states)
        if kept and layout != self.layout:
            raise SchemaError(_ACTION, "with 'hidden_states'", f"the structure {_words(self.layout)}", _words(layout))
        for leaf, like in zip(leaves, [x[0] for x in kept] or leaves, strict=True):
            is_placed = leaf.dim() >= 3 and leaf.shape[1] == self._table.num_envs
            is_dense = leaf.layout is torch.strided and leaf.dtype in REAL_DTYPES and not leaf.is_meta
            if not (is_placed and is_dense) or leaf.shape != like.shape or leaf.dtype != like.dtype:
                dtype = str(like.dtype) if like.dtype in REAL_DTYPES else "real numbers"
                shape = str(list(like.shape)) if kept else f"[layers, {self._table.num_envs}, H]"
                got = f"{leaf.dtype} of shape {list(leaf.shape)}, {leaf.layout} on {leaf.device}"
                raise SchemaError(_ACTION, "with 'hidden_states'", f"{dtype} of shape {shape}", got)
        if leaves:
            self.layout = layout
        return {f"{_COLUMN}/{i}": leaf for i, leaf in enumerate(leaves)}

    def check_loaded(self, layout: Any, tensors: Mapping[str, torch.Tensor], num_rows: int) -> set[str]:
        """Name the leaves of a loaded state; refuse those that are not `num_rows` steps of states with this layout."""
        mine: dict[str, torch.Tensor] = {}
        while (name := f"{_COLUMN}/{len(mine)}") in tensors:
            mine[name] = tensors[name]
        waiting = iter(mine.values())
        try:
            is_right = _layout(_build(layout, waiting)) == layout and not list(waiting)
        except (AttributeError, LookupError, StopIteration, TypeError, ValueError):
            is_right = False
        if not is_right:
            expected = f"None, 'tensor', or lists of these, for {len(mine)} tensors"
            raise SchemaError(_LOAD, "with 'states'", expected, repr(layout))
        for x in mine.values():
            if x.dim() < 4 or len(x) != num_rows or x.shape[2] != self._table.num_envs:
                expected = f"shape [{num_rows}, layers, {self._table.num_envs}, H]"
                raise SchemaError(_LOAD, f"with {_COLUMN!r}", expected, str(list(x.shape)))
        return set(mine)


def _layout(states: Any) -> Any:
    if states is None:
        return None
    if isinstance(states, torch.Tensor):
        return _LEAF
    if isinstance(states, (tuple, list)):
        names = [{"names": list(states._fields)}] if hasattr(states, "_fields") else []
        return [*names, *map(_layout, states)]
    raise SchemaError(_ACTION, "with 'hidden_states'", "None, a tensor, or tuples of these", type(states).__name__)


def _leaves(states: Any) -> list[torch.Tensor]:
    if isinstance(states, torch.Tensor):
        return [states]
    return [leaf for child in states or () for leaf in _leaves(child)]


def _build(layout: Any, leaves: Iterator[Any]) -> Any:
    if not isinstance(layout, list):
        return None if layout is None else next(leaves)
    names = layout[0]["names"] if layout and isinstance(layout[0], dict) else None
    children = [_build(child, leaves) for child in layout[names is not None :]]
    if names is None:
        return tuple(children)
    kind: Any = HiddenStates if tuple(names) == HiddenStates._fields else namedtuple("States", names)
    return kind(*children)


def _words(layout: Any) -> str:
    return str(_build(layout, repeat(_LEAF))).replace("'", "")
