"""The `[T, B, ...]` tensors of a rollout storage: allocate, read a step, write it, grow, roll, cut into fields.

One rule: every operation loops over the columns and acts on the time axis; none knows a column by name. A step is
read and checked completely before its first byte is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from operator import attrgetter, ne
from typing import Any, NamedTuple

import numpy as np
import torch

from ..core.buffer_pool import BufferPool
from ..core.fields import DTYPES, Field, Schema, signed
from ..core.host_arrays import as_given
from ..core.modes import lasting
from ..core.tree import check_same_names, flatten, unflatten
from ..errors import FieldTypeError, MissingFieldError, SchemaError
from .columns import Column

_ACTION = "add a transition"
_LOAD = "load a state"
_version_of = attrgetter("_version")


class _Input(NamedTuple):
    """One field that transitions bring: where it is found and what it must look like."""

    name: str
    source: str
    path: str
    is_required: bool
    #: What fits as it is: every axis written out, and `[B]` where the shape is (1,).
    shapes: tuple[torch.Size, ...]
    #: What is written as it is: all numbers of these dtypes are numbers of the field.
    dtypes: frozenset[torch.dtype]
    column: Column
    field: Field

    @property
    def where(self) -> str:
        return f"with {self.source + ('/' if self.path else '') + self.path!r}"

    @property
    def expected(self) -> str:
        shapes = " or ".join(str(list(shape)) for shape in self.shapes)
        return f"{'flags' if self.column.is_flag else self.field.dtype} of shape {shapes}"


class ColumnTable:
    """Columns of `num_rows` steps of `num_envs` envs on one device.

    Args:
        columns: What is kept; names of fields must not repeat, and none may stand above another.
        num_rows: Steps that fit.
        num_envs: Size of the second axis.
        device: Where the tensors live.
    """

    def __init__(self, columns: Sequence[Column], num_rows: int, num_envs: int, device: torch.device) -> None:
        self.columns = {column.name: column for column in columns}
        self.schema = Schema(field for column in columns for field in column.fields)
        self.num_rows = num_rows
        self.num_envs = num_envs
        self.device = device
        self.tensors: dict[str, torch.Tensor] = {}
        #: How often what is kept was changed: a reader that comes back looks whether it is the same number.
        self.num_changes = 0
        self._fills: dict[str, float] = {}
        self._inputs = [self._input(column, field) for column in columns if column.source for field in column.fields]
        self._lazy = [field for column in columns if column.is_lazy for field in column.fields]
        self._sources = {x.source for x in columns if x.source and (x.fields or x.is_ignorable)}
        self._batch_fields = [(column.batch, column.fallback) for column in columns if column.batch]
        self._rows: list[tuple[tuple[torch.Tensor, ...], ...]] | None = None
        for name in self.schema:
            if above := [other for other in self.schema if name.startswith(other + "/")]:
                expected = f"{above[0]!r} a leaf or a mapping"
                raise SchemaError("declare the fields of a storage", "", expected, repr(name))
        for column in columns:
            if not column.is_lazy and not column.is_view:
                self.allocate(column.fields)
        self.note_results(False)

    @lasting
    def allocate(self, fields: Iterable[Field], with_envs: bool = True) -> None:
        """Add tensors filled with each field's fill: `[T, B, *shape]`, or `[T, *shape]` without envs."""
        for field in fields:
            shape = (self.num_rows, self.num_envs, *field.shape) if with_envs else (self.num_rows, *field.shape)
            if self.device.type == "cpu":  # on huge pages, if it is large
                made = BufferPool(max_buffers=0).empty(shape, field.torch_dtype)
            else:
                made = torch.empty(shape, dtype=field.torch_dtype, device=self.device)
            self.tensors[field.name] = made.fill_(field.fill)
            self._fills[field.name] = field.fill
        self._rows = None

    def view(self, name: str, stop: int | None = None) -> Any:
        """Give a column's tensor, a nested dict of them, or None if it is not kept; shared memory."""
        fields = self.columns[name].fields if name in self.columns else ()
        found = {field.name: self.tensors[field.name][:stop] for field in fields if field.name in self.tensors}
        if not found:
            return None
        return found[name] if name in found else unflatten(found)[name]

    # -- one step --------------------------------------------------------------------------

    def read(self, transition: Any) -> dict[str, torch.Tensor]:
        """Check everything that `transition` brings; change nothing.

        Returns:
            By field, what can be copied into a row; without the fields that it may leave out and does.

        Raises:
            MissingFieldError, SchemaError, FieldTypeError: Naming the first field that does not fit.
        """
        for name, value in getattr(transition, "__dict__", {}).items():
            if value is not None and name not in self._sources:
                taken = ", ".join(sorted(self._sources))
                raise MissingFieldError(_ACTION, f"with {name!r}", taken, "a field that this storage does not keep")
        found: dict[str, torch.Tensor] = {}
        for wanted in self._inputs:
            name, source, path, is_required, shapes, dtypes, *_ = wanted
            value = getattr(transition, source, None)
            if value is None:
                if is_required:
                    raise MissingFieldError(_ACTION, f"without {source!r}", wanted.expected, "None")
                continue
            if path or not isinstance(value, torch.Tensor):
                value = _as_tensor(wanted, value)
            # What fits exactly passes here; the full check takes 2 microseconds more per field.
            if value.shape not in shapes or value.dtype not in dtypes or value.is_meta or value.is_sparse:
                value = _fitting(wanted, value)
            found[name] = value
        return found

    def write(self, row: int, found: Mapping[str, torch.Tensor], more: Sequence[tuple[torch.Tensor, ...]] = ()) -> None:
        """Write what `read` gave over a row, and pairs of a tensor and what to copy into it."""
        for field in self._lazy:
            if field.name in found and field.name not in self.tensors:
                self.allocate([field])
        if self._rows is None:
            self._rows = self._cut()
        targets, values = [target for target, _ in more], [value for _, value in more]
        for wanted, places in zip(self._inputs, self._rows[row], strict=True):
            value = found.get(wanted.name)
            if value is not None:
                targets.append(places[value.dim() < len(wanted.shapes[0])])
                values.append(value)
            elif len(places) > len(wanted.shapes):  # copied as all others are: to fill takes three times as long
                targets.append(places[0])
                values.append(places[-1])
        torch._foreach_copy_(targets, values)  # in half the time of a loop
        self.num_changes += 1
        self._versions = tuple(map(_version_of, self._results))

    def _input(self, column: Column, field: Field) -> _Input:
        shapes = [torch.Size((self.num_envs, *field.shape))]
        if field.shape == (1,):
            shapes.append(torch.Size((self.num_envs,)))
        dtypes = frozenset(_DTYPES) if column.is_flag else _always_fit(field.torch_dtype)
        path = field.name[len(column.name) + 1 :]
        return _Input(field.name, column.source, path, column.is_required, tuple(shapes), dtypes, column, field)

    @lasting
    def _cut(self) -> list[tuple[tuple[torch.Tensor, ...], ...]]:
        """Cut every input into rows once: `[B, *shape]`, `[B]` where the shape is (1,), and what fills a row, if any.

        Each row has an entry for each input; of what is not allocated it is empty.
        """
        cut: list[list[tuple[torch.Tensor, ...]]] = []
        for wanted in self._inputs:
            tensor = self.tensors.get(wanted.name)
            if tensor is None:
                cut.append([()] * self.num_rows)
                continue
            if wanted.column.is_flag:  # into bool any dtype copies as != 0
                tensor = tensor.view(torch.bool)
            views = [tensor, tensor.squeeze(-1)][: len(wanted.shapes)]
            rows = zip(*(view.unbind(0) for view in views), strict=True)
            is_filled = not wanted.column.is_required and not wanted.column.is_view
            fill = (torch.full_like(tensor[0], wanted.field.fill),) if is_filled else ()
            cut.append([(*row, *fill) for row in rows])
        return list(zip(*cut, strict=True))

    # -- all steps -------------------------------------------------------------------------

    @lasting
    def grow(self, num_rows: int) -> None:
        """Append `num_rows` steps, filled like new ones, to every tensor; what is written stays."""
        has_results = self.has_results
        for name, tensor in self.tensors.items():
            self.tensors[name] = torch.cat([tensor, tensor.new_full((num_rows, *tensor.shape[1:]), self._fills[name])])
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
        action, column = f"assign to {name!r}", self.columns[name]
        given, writes = flatten({name: value}), []
        check_same_names({field.name: None for field in column.fields}, given, action)
        for key, x in given.items():
            target = self.tensors.get(key)
            if not isinstance(x, torch.Tensor) or x.layout is not torch.strided or x.is_meta or x.is_quantized:
                raise FieldTypeError(action, "", "a dense tensor", type(x).__name__)
            if target is None or x.shape != target.shape:
                expected = "nothing, it is not kept yet" if target is None else str(list(target.shape))
                raise SchemaError(action, "", f"shape {expected}", str(list(x.shape)))
            # Into bool any dtype copies as != 0: flags stay 0 or 1, as everything that reads them expects.
            writes.append((target.view(torch.bool) if column.is_flag else target, x))
        self.num_changes += 1
        with torch.no_grad():
            for target, x in writes:
                target.copy_(x)

    def substitute(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Use these tensors for fields of columns that are views."""
        self.tensors.update(tensors)
        self._note_change(self.has_results)

    def kept(self) -> dict[str, torch.Tensor]:
        """List what belongs to the table: all tensors but those of columns that are views."""
        views = {field.name for column in self.columns.values() if column.is_view for field in column.fields}
        return {name: x for name, x in self.tensors.items() if name not in views}

    def replace(self, tensors: Mapping[str, torch.Tensor], num_rows: int) -> None:
        """Take other tensors of `num_rows` steps in the place of all that `kept` lists.

        Raises:
            SchemaError: One is missing, or has another shape or dtype; nothing is changed.
        """
        mine = self.kept()
        for column in self.columns.values():
            for field in () if column.is_view else column.fields:
                found, expected = tensors.get(field.name), (num_rows, self.num_envs, *field.shape)
                if found is None and field.name in mine and not column.is_lazy:
                    raise MissingFieldError(_LOAD, f"without {field.name!r}", str(list(expected)), "nothing")
                if found is not None and (tuple(found.shape) != expected or found.dtype != field.torch_dtype):
                    got = f"{found.dtype} {list(found.shape)}"
                    raise SchemaError(_LOAD, f"with {field.name!r}", f"{field.dtype} {list(expected)}", got)
        self.tensors = {name: x for name, x in self.tensors.items() if name not in mine} | dict(tensors)
        self._fills = {name: self.schema[name].fill if name in self.schema else 0 for name in tensors}
        self.num_rows = num_rows
        self._note_change()

    def _note_change(self, has_results: bool = False) -> None:
        """Other tensors are here: forget the rows that were cut of the earlier ones."""
        self.num_changes += 1
        self._rows = None
        self.note_results(has_results)

    # -- mini-batches ----------------------------------------------------------------------

    @property
    def has_results(self) -> bool:
        """Whether each column that no transition brings was computed, assigned or changed since the last step."""
        return all(map(ne, map(_version_of, self._results), self._versions))

    def note_results(self, are_new: bool) -> None:
        """Say whether the results are those of the steps; if not, wait for the next change of `_version`.

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
        found = unflatten(batch) if any("/" in name for name in batch) else dict(batch)
        for name, fallback in self._batch_fields:
            if name not in found:
                found[name] = found[fallback] if fallback else None
        return found


# -- what a transition may bring ---------------------------------------------------------------

_DTYPES = [dtype for dtype, _ in DTYPES.values()]


def _limits(dtype: torch.dtype) -> tuple[float, float]:
    if dtype is torch.bool:
        return 0, 1
    found = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    return found.min, found.max


@cache
def _always_fit(wanted: torch.dtype) -> frozenset[torch.dtype]:
    """List the dtypes all of whose numbers `wanted` can hold, rounded at most."""
    low, high = _limits(wanted)
    fitting = [x for x in _DTYPES if torch.can_cast(x, wanted) and low <= _limits(x)[0] and _limits(x)[1] <= high]
    return frozenset(fitting)


def _as_tensor(wanted: _Input, value: Any) -> torch.Tensor:
    """Find the leaf of a nested record, and view what is no tensor as one."""
    column = wanted.column
    if wanted.path:
        if not isinstance(value, Mapping):
            raise SchemaError(_ACTION, f"with {column.source!r}", "a mapping", type(value).__name__)
        if wanted.field is column.fields[0]:  # once per record
            names = {field.name[len(column.name) + 1 :]: None for field in column.fields}
            check_same_names(names, flatten(value), _ACTION)
        for key in wanted.path.split("/"):
            value = value[key]
    elif isinstance(value, Mapping):
        raise SchemaError(_ACTION, wanted.where, wanted.expected, "a mapping")
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, np.ndarray) and value.flags.behaved:
        try:
            return torch.from_numpy(value)  # in a fifth of the time of what follows
        except (TypeError, ValueError):  # byte-swapped, backwards, or of a dtype that torch has not got
            pass
    try:
        return as_given(value if isinstance(value, (int, float, bool)) else np.asarray(value))
    except (TypeError, ValueError, RuntimeError) as cause:
        got, advice = type(value).__name__, "Give a tensor or an array"
        raise FieldTypeError(_ACTION, wanted.where, wanted.expected, got, advice) from cause


def _fitting(wanted: _Input, value: torch.Tensor) -> torch.Tensor:
    """Give what can be copied into a row; raise if `value` does not fit."""
    dtype = wanted.field.torch_dtype
    if value.shape not in wanted.shapes:
        raise SchemaError(_ACTION, wanted.where, wanted.expected, f"shape {list(value.shape)}")
    if value.is_quantized:
        got, advice = f"a quantized one of {value.dtype}", "Dequantize it first"
        raise FieldTypeError(_ACTION, wanted.where, "a dense tensor", got, advice)
    if value.dtype not in wanted.dtypes and not torch.can_cast(value.dtype, dtype):
        raise FieldTypeError(_ACTION, wanted.where, wanted.expected, str(value.dtype), "Convert it first")
    if value.layout is not torch.strided or value.is_meta:
        raise FieldTypeError(_ACTION, wanted.where, "a dense tensor", f"{value.layout} on {value.device}")
    return value if value.dtype in wanted.dtypes else _converted(wanted, value, dtype)


def _converted(wanted: _Input, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert to `dtype`; raise if a number becomes another one by more than rounding: wrapped around, or infinite."""
    low, high = _limits(dtype)
    if dtype.is_floating_point:
        wide = value if value.is_floating_point() else value.double()
        kept = wide.to(dtype)
        if bool(kept.sum().isfinite()):  # one look, where all is well
            return kept
        is_lost = kept.isinf() & wide.isfinite()
    else:
        # Of uint64 the bits as they are: what int64 does not reach stands below 0.
        wide = signed(value) if value.dtype is torch.uint64 else value.long()
        kept, lowest = value.to(dtype), 0 if value.dtype is torch.uint64 else low
        is_lost = (wide < lowest) | (wide > min(high, 2**63 - 1))
    if bool(is_lost.any()):
        number = wide[is_lost][0].item()
        got = str(number % 2**64 if value.dtype is torch.uint64 else number)
        raise FieldTypeError(_ACTION, wanted.where, f"{wanted.field.dtype} from {low} to {high}", got)
    return kept
