"""The `[T, B, ...]` tensors behind a rollout storage: allocate, write a row, grow, roll.

One rule: every operation loops over the columns and acts on the time axis; none knows a column
by name. A row is checked completely before its first byte is written.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter, ne
from typing import Any

import numpy as np
import torch

from ..core.buffer_pool import BufferPool
from ..core.fields import Field, Schema, signed
from ..core.host_arrays import as_given
from ..core.modes import lasting
from ..core.tree import check_same_names, flatten, unflatten
from ..errors import FieldTypeError, MissingFieldError, SchemaError
from .columns import Column, flatten_column, schema_of

_ACTION = "add a transition"
_version_of = attrgetter("_version")


@dataclasses.dataclass(frozen=True)
class _Input:
    """One field that transitions bring: where it is found and what it must look like."""

    column: Column
    field: Field
    source: str
    path: str
    dtype: torch.dtype
    #: What fits as it is: every axis written out, and `[B]` where the shape is (1,).
    shapes: tuple[torch.Size, ...]


class ColumnTable:
    """Columns of `num_rows` steps of `num_envs` envs on one device.

    Args:
        columns: The registry; names of fields must not repeat.
        num_rows: Steps that fit.
        num_envs: Size of the second axis.
        device: Where the tensors live.
    """

    def __init__(self, columns: Sequence[Column], num_rows: int, num_envs: int, device: torch.device) -> None:
        self.columns = {column.name: column for column in columns}
        self.schema: Schema = schema_of(columns)
        self.num_rows = num_rows
        self.num_envs = num_envs
        self.device = device
        self.tensors: dict[str, torch.Tensor] = {}
        #: How often what is kept was changed, or was about to be; whoever reads it step by step looks for others.
        self.num_changes = 0
        self._fills: dict[str, float] = {}
        self._inputs = [self._input(column, field) for column in columns if column.source for field in column.fields]
        self._sources = {column.source for column in columns if column.source} | {"hidden_states"}
        self._rows: list[tuple[tuple[torch.Tensor, ...], ...]] | None = None
        #: For each input, a row of what stands where a transition brings nothing; None if it must bring something.
        self._blanks: list[torch.Tensor | None] = []
        for column in columns:
            if not column.is_lazy:
                self.allocate(column.fields)
        self.note_results(False)

    @lasting
    def allocate(self, fields: Iterable[Field], with_envs: bool = True) -> None:
        """Add tensors filled with each field's fill: `[T, B, *shape]`, or `[T, *shape]` without envs."""
        for field in fields:
            shape = (self.num_rows, self.num_envs, *field.shape) if with_envs else (self.num_rows, *field.shape)
            self.tensors[field.name] = self._empty(shape, field.torch_dtype).fill_(field.fill)
            self._fills[field.name] = field.fill
        self._rows = None

    def view(self, name: str, stop: int | None = None) -> Any:
        """Give a column's tensor, a nested dict of them, or None if it is not kept; shared memory."""
        fields = self.columns[name].fields if name in self.columns else ()
        found = {field.name: self.tensors[field.name][:stop] for field in fields if field.name in self.tensors}
        if not found:
            return None
        return found[name] if name in found else unflatten(found)[name]

    def plan(self, transition: Any, row: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Check everything that `transition` brings for `row`; change nothing.

        Returns:
            Pairs of a tensor to write and what to write there.

        Raises:
            MissingFieldError, SchemaError, FieldTypeError: Naming the first field that does not fit.
        """
        self._check_sources(transition)
        if self._rows is None:
            self._rows = self._split_rows()
        writes: list[tuple[torch.Tensor, torch.Tensor]] = []
        first_brought: list[Field] = []
        for wanted, targets, blank in zip(self._inputs, self._rows[row], self._blanks, strict=True):
            value = getattr(transition, wanted.source, None)
            if value is None:
                if wanted.column.is_required:
                    raise MissingFieldError(_ACTION, f"without {wanted.source!r}", _words(wanted), "None")
                if blank is not None:  # copied as all others are: to fill takes three times as long
                    writes.append((targets[0], blank))
                continue
            if wanted.path or not isinstance(value, torch.Tensor):
                value = self._to_tensor(wanted, value)
            shape = value.shape
            # What fits exactly passes here; 2 microseconds less per field than the full check.
            if shape not in wanted.shapes or value.dtype is not wanted.dtype or value.is_meta or value.is_sparse:
                _check(wanted, value)
            if targets:
                writes.append((targets[shape != wanted.shapes[0]], value))
            else:
                first_brought.append(wanted.field)
        if first_brought:  # allocated only now that nothing can fail any more
            self.allocate(first_brought)
            return self.plan(transition, row)
        self.num_changes += 1
        self._versions = tuple(map(_version_of, self._results))  # 0.4 of 18 microseconds
        return writes

    @lasting
    def grow(self, num_rows: int) -> None:
        """Append `num_rows` steps, filled like new ones, to every tensor; what is written stays."""
        has_results = self.has_results
        for name, tensor in self.tensors.items():
            more = torch.full((num_rows, *tensor.shape[1:]), self._fills[name], dtype=tensor.dtype, device=self.device)
            self.tensors[name] = torch.cat([tensor, more])
        self.num_rows += num_rows
        self._note_change(has_results)

    def roll(self, start: int) -> None:
        """Rotate every tensor in place so that the step at `start` comes first."""
        has_results = self.has_results
        for tensor in self.tensors.values():
            tensor.copy_(torch.cat([tensor[start:], tensor[:start]]))
        self.num_changes += 1
        self.note_results(has_results)

    def check(self, values: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Check values for columns by name, as `plan` would; give their leaves by field name."""
        found: dict[str, torch.Tensor] = {}
        for wanted in self._inputs:
            if wanted.column.name in values:
                value = self._to_tensor(wanted, values[wanted.column.name])
                _check(wanted, value)
                found[wanted.field.name] = value.view(wanted.shapes[0])
        return found

    def assign(self, name: str, value: Any) -> None:
        """Copy `[T, B, *shape]` (or a nested dict of such) over a whole column; its tensors stay the same."""
        column = self.columns[name]
        found = {field.name: self.tensors.get(field.name) for field in column.fields}
        # Into bool any dtype copies as != 0: flags stay 0 or 1, as everything that reads them expects.
        views = {key: x.view(torch.bool) if x is not None and column.is_flag else x for key, x in found.items()}
        self.write(name, views, value)

    def write(self, name: str, targets: Mapping[str, torch.Tensor | None], value: Any) -> None:
        """Copy a value, or a nested dict of such, over tensors that are kept here; all is checked before."""
        action = f"assign to {name!r}"
        given = flatten({name: value})
        check_same_names(targets, given, action)
        writes: list[tuple[torch.Tensor, torch.Tensor]] = []
        for key, target in targets.items():
            x = given[key]
            if not isinstance(x, torch.Tensor) or x.layout is not torch.strided or x.is_meta or x.is_quantized:
                raise FieldTypeError(action, "", "a dense tensor", type(x).__name__)
            shape = list(target.shape) if target is not None else "nothing, it is not kept yet"
            if target is None or x.shape != target.shape:
                raise SchemaError(action, "", f"shape {shape}", str(list(x.shape)))
            writes.append((target, x))
        self.num_changes += 1
        with torch.no_grad():
            for target, x in writes:
                target.copy_(x)

    def substitute(self, name: str, tensor: torch.Tensor) -> None:
        """Use another tensor of the same shape and dtype for a field; memory of the caller's choice."""
        self.tensors[name] = tensor
        self._note_change()

    def replace(self, tensors: Mapping[str, torch.Tensor], num_rows: int) -> None:
        """Take other tensors of `num_rows` steps in the place of all that are here.

        Raises:
            SchemaError: One is missing, or has another shape or dtype; nothing is changed.
        """
        for field in self.schema.values():
            found = tensors.get(field.name)
            expected = (num_rows, self.num_envs, *field.shape)
            if found is None and field.name in self.tensors and not self._is_lazy(field):
                raise MissingFieldError("load a state", f"without {field.name!r}", str(list(expected)), "nothing")
            if found is not None and (tuple(found.shape) != expected or found.dtype != field.torch_dtype):
                got = f"{found.dtype} {list(found.shape)}"
                raise SchemaError("load a state", f"with {field.name!r}", f"{field.dtype} {list(expected)}", got)
        ordered = [*(name for name in self.tensors if name in tensors), *tensors]
        self.tensors = {name: tensors[name] for name in ordered}
        self._fills = {name: self.schema[name].fill if name in self.schema else 0 for name in tensors}
        self.num_rows = num_rows
        self._note_change()

    @property
    def has_results(self) -> bool:
        """Whether each column that no transition brings was computed, assigned or changed since the last step."""
        return all(map(ne, map(_version_of, self._results), self._versions))

    def note_results(self, are_new: bool) -> None:
        """Say whether the results are those of the steps; if not, wait for the next change of `_version`.

        torch counts there what it writes in place, through any view, in any mode.
        """
        results = [column for column in self.columns.values() if column.batch and not column.source]
        self._results = [self.tensors[x.name] for column in results for x in column.fields if x.name in self.tensors]
        self._versions = tuple(-1 if are_new else x._version for x in self._results)

    def batch_columns(self, rows: int) -> list[tuple[str, torch.Tensor, bool]]:
        """List what a mini-batch carries: flat mini-batch name, `[rows, B, ...]`, and whether it is padded."""
        has_results = self.has_results
        return [
            (name, x, column.is_padded)
            for column in self.columns.values()
            if column.batch and (column.source or has_results)
            for name, x in flatten_column(column.batch, self.view(column.name, rows))
        ]

    def fill_batch(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Nest what `batch_columns` named, and add what it could not give: the fallback, or None."""
        found = unflatten(batch) if any("/" in name for name in batch) else dict(batch)
        for column in self.columns.values():
            if column.batch and column.batch not in found:
                found[column.batch] = found[column.fallback] if column.fallback else None
        return found

    def _note_change(self, has_results: bool = False) -> None:
        """Other tensors are here: forget the rows that were cut of the earlier ones."""
        self.num_changes += 1
        self._rows = None
        self.note_results(has_results)

    def _is_lazy(self, field: Field) -> bool:
        return self.columns[field.name.split("/")[0]].is_lazy

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Give memory for a column; on the CPU large ones lie on huge pages."""
        if self.device.type == "cpu":
            return BufferPool(max_buffers=0).empty(shape, dtype)
        return torch.empty(shape, dtype=dtype, device=self.device)

    def _input(self, column: Column, field: Field) -> _Input:
        shapes = [torch.Size((self.num_envs, *field.shape))]
        if field.shape == (1,):
            shapes.append(torch.Size((self.num_envs,)))
        path = field.name[len(column.name) + 1 :]
        return _Input(column, field, column.source, path, field.torch_dtype, tuple(shapes))

    @lasting
    def _split_rows(self) -> list[tuple[tuple[torch.Tensor, ...], ...]]:
        """Cut every written column into rows once: `[B, *shape]`, and `[B]` where the shape is (1,)."""
        cut: list[list[tuple[torch.Tensor, ...]]] = []
        self._blanks = [None] * len(self._inputs)
        for place, wanted in enumerate(self._inputs):
            tensor = self.tensors.get(wanted.field.name)
            if tensor is None:
                cut.append([()] * self.num_rows)
                continue
            if wanted.column.is_flag:  # into bool any dtype copies as != 0
                tensor = tensor.view(torch.bool)
            if not wanted.column.is_required:
                self._blanks[place] = torch.full_like(tensor[0], wanted.field.fill)
            views = [tensor] if len(wanted.shapes) == 1 else [tensor, tensor.squeeze(-1)]
            cut.append(list(zip(*(view.unbind(0) for view in views), strict=True)))
        return list(zip(*cut, strict=True))

    def _check_sources(self, transition: Any) -> None:
        ignorable = getattr(transition, "ignorable", ())
        for name, value in getattr(transition, "__dict__", {}).items():
            if value is not None and name not in self._sources and name not in ignorable:
                taken = ", ".join(sorted(self._sources))
                raise MissingFieldError(_ACTION, f"with {name!r}", taken, "a field that this storage does not keep")

    def _to_tensor(self, wanted: _Input, value: Any) -> torch.Tensor:
        if wanted.path:
            value = self._leaf(wanted, value)
        elif isinstance(value, Mapping):
            raise SchemaError(_ACTION, f"with {wanted.source!r}", _words(wanted), "a mapping")
        if isinstance(value, torch.Tensor):
            return value
        try:
            return as_given(value if isinstance(value, (int, float, bool)) else np.asarray(value))
        except (TypeError, ValueError, RuntimeError) as cause:
            got = type(value).__name__
            raise FieldTypeError(
                _ACTION, f"with {_name(wanted)!r}", _words(wanted), got, "Give a tensor or an array"
            ) from cause

    def _leaf(self, wanted: _Input, value: Any) -> Any:
        """Find a leaf of a nested record; once per record, for its first leaf, check that the names agree."""
        if not isinstance(value, Mapping):
            raise SchemaError(_ACTION, f"with {wanted.source!r}", "a mapping", type(value).__name__)
        if wanted.field is wanted.column.fields[0]:
            prefix = len(wanted.column.name) + 1
            check_same_names({field.name[prefix:]: None for field in wanted.column.fields}, flatten(value), _ACTION)
        for key in wanted.path.split("/"):
            value = value[key]
        return value


def _name(wanted: _Input) -> str:
    return wanted.source + (f"/{wanted.path}" if wanted.path else "")


def _words(wanted: _Input) -> str:
    shapes = " or ".join(str(list(shape)) for shape in wanted.shapes)
    return f"{'flags' if wanted.column.is_flag else wanted.field.dtype} of shape {shapes}"


def _check(wanted: _Input, value: torch.Tensor) -> None:
    """Raise if `value` does not fit; what fits exactly need not come here."""
    if value.shape not in wanted.shapes:
        raise SchemaError(_ACTION, f"with {_name(wanted)!r}", _words(wanted), f"shape {list(value.shape)}")
    if value.is_quantized:
        got, advice = f"a quantized one of {value.dtype}", "Dequantize it first"
        raise FieldTypeError(_ACTION, f"with {_name(wanted)!r}", "a dense tensor", got, advice)
    is_safe = not value.dtype.is_complex if wanted.column.is_flag else torch.can_cast(value.dtype, wanted.dtype)
    if not is_safe:
        raise FieldTypeError(_ACTION, f"with {_name(wanted)!r}", _words(wanted), str(value.dtype), "Convert it first")
    if value.layout is not torch.strided or value.device.type == "meta":
        got = f"{value.layout} on {value.device}"
        raise FieldTypeError(_ACTION, f"with {_name(wanted)!r}", "a dense tensor", got)
    if value.dtype is not wanted.dtype and not wanted.column.is_flag:
        _check_range(wanted, value)


def _check_range(wanted: _Input, value: torch.Tensor) -> None:
    """Raise if a number would become another one by more than rounding: wrapped around, or infinite."""
    if wanted.dtype.is_floating_point:
        limits: torch.finfo | torch.iinfo = torch.finfo(wanted.dtype)
        # Of integers only those of more than 16 bits, into float16.
        reach = torch.finfo(value.dtype).max if value.is_floating_point() else 2.0 ** (8 * value.itemsize)
        if reach <= limits.max:
            return
        wide = value if value.is_floating_point() else value.double()
        kept = wide.to(wanted.dtype)
        if bool(kept.sum().isfinite()):  # one look, where all is well
            return
        is_lost = kept.isinf() & wide.isfinite()
    else:
        limits = torch.iinfo(wanted.dtype)
        # Of uint64 the bits as they are: what int64 does not reach stands below 0.
        wide = signed(value) if value.dtype is torch.uint64 else value.long()
        lowest = 0 if value.dtype is torch.uint64 else limits.min
        is_lost = (wide < lowest) | (wide > min(limits.max, 2**63 - 1))
    if bool(is_lost.any()):
        found = wide[is_lost][0].item()
        got = str(found % 2**64 if value.dtype is torch.uint64 else found)
        expected = f"{wanted.field.dtype} from {limits.min} to {limits.max}"
        raise FieldTypeError(_ACTION, f"with {_name(wanted)!r}", expected, got)
