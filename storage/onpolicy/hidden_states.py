"""Recurrent states of any structure: None, a tensor, or (named) tuples of these, to leaves and back.

One rule: the structure is fixed by the first states that come, and later ones must have it. A structure is written as
a layout, which JSON can hold: "tensor", None, or a list of layouts; a list that starts with `{"names": [...]}` is a
named tuple. Leaves are `[layers, B, *H]` and are kept in a `ColumnTable` like everything else.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ..core.fields import Field, dtype_name
from ..core.tree import check_same_names
from ..errors import MissingFieldError, SchemaError, nearest
from .column_table import ColumnTable
from .transition import HiddenStates

_LEAF = "tensor"
_COLUMN = "saved_hidden_states"
_ACTION = "add a transition"
_LOAD = "load a state"


class SavedStates:
    """The recurrent states before each step, in a table of their storage; nothing until some come."""

    def __init__(self, table: ColumnTable) -> None:
        self._table = table
        #: None until the first states come.
        self.layout: Any = None

    def leaves(self) -> list[torch.Tensor]:
        """List the leaves, `[T, layers, B, *H]`; they share memory with the table."""
        return [x for name, x in self._table.tensors.items() if name.startswith(_COLUMN + "/")]

    def build(self, leaves: list[torch.Tensor]) -> Any:
        """Give states with these leaves; None if none ever came."""
        return _build(self.layout, iter(leaves))

    def read(self, states: Any) -> list[torch.Tensor]:
        """List the leaves of a transition's states; refuse another structure, shape or dtype."""
        if states is None and self.layout is None:
            return []
        layout = _layout(states)
        if self.layout is not None and layout != self.layout:
            expected = f"the structure {_words(self.layout)}"
            raise SchemaError(_ACTION, "with 'hidden_states'", expected, _words(layout))
        leaves = _leaves(states)
        known = [x[0] for x in self.leaves()] if self.layout is not None else leaves
        for leaf, like in zip(leaves, known, strict=True):
            is_placed = leaf.dim() >= 3 and leaf.shape[1] == self._table.num_envs
            is_dense = leaf.layout is torch.strided and not (leaf.is_meta or leaf.is_complex() or leaf.is_quantized)
            if not (is_placed and is_dense) or leaf.shape != like.shape or leaf.dtype != like.dtype:
                dtype = "real numbers" if like.is_complex() or like.is_quantized else str(like.dtype)
                shape = f"[layers, {self._table.num_envs}, H]" if self.layout is None else str(list(like.shape))
                layout_words = "" if leaf.layout is torch.strided else f"{leaf.layout} "
                got = f"{layout_words}{leaf.dtype} of shape {list(leaf.shape)} on {leaf.device}"
                raise SchemaError(_ACTION, "with 'hidden_states'", f"{dtype} of shape {shape}", got)
        return leaves

    def places(self, states: Any, leaves: list[torch.Tensor], row: int) -> list[tuple[torch.Tensor, ...]]:
        """Pair each leaf that was read with its place in a row; allocate if they are the first that come."""
        if not leaves:
            return []
        if self.layout is None:
            self.layout = _layout(states)
            fields = [Field(f"{_COLUMN}/{i}", tuple(x.shape), dtype_name(x.dtype)) for i, x in enumerate(leaves)]
            self._table.allocate(fields, with_envs=False)
        return [(kept[row], leaf) for kept, leaf in zip(self.leaves(), leaves, strict=True)]

    def check_loaded(self, layout: Any, tensors: Mapping[str, torch.Tensor], num_rows: int) -> None:
        """Refuse tensors of a loaded state that are no columns, or not `num_rows` steps of states with this layout."""
        if not _is_layout(layout):
            raise SchemaError(_LOAD, "with 'states'", "None, 'tensor', or lists of these", repr(layout))
        mine = {name: x for name, x in tensors.items() if name.startswith(_COLUMN + "/")}
        schema = self._table.schema
        if strange := [name for name in tensors if name not in mine and name not in schema]:
            raise MissingFieldError(_LOAD, f"with the tensor {strange[0]!r}", nearest(strange[0], schema))
        check_same_names({f"{_COLUMN}/{i}": None for i in range(_num_leaves(layout))}, mine, _LOAD)
        for x in mine.values():
            if x.dim() < 4 or len(x) != num_rows or x.shape[2] != self._table.num_envs:
                expected = f"shape [{num_rows}, layers, {self._table.num_envs}, H]"
                raise SchemaError(_LOAD, f"with {_COLUMN!r}", expected, str(list(x.shape)))


def _layout(states: Any) -> Any:
    if states is None:
        return None
    if isinstance(states, torch.Tensor):
        return _LEAF
    if isinstance(states, (tuple, list)):
        names = [{"names": list(states._fields)}] if hasattr(states, "_fields") else []
        return [*names, *map(_layout, states)]
    raise SchemaError(_ACTION, "with 'hidden_states'", "None, a tensor, or tuples of these", type(states).__name__)


def _parts(layout: list[Any]) -> tuple[Any, list[Any]]:
    """Take the list of a layout apart: the names of a named tuple, or None, and the layouts below."""
    is_named = bool(layout) and isinstance(layout[0], dict)
    return (layout[0].get("names"), layout[1:]) if is_named else (None, layout)


def _is_layout(layout: Any) -> bool:
    """Whether `_layout` could have given this."""
    if not isinstance(layout, list):
        return layout is None or (isinstance(layout, str) and layout == _LEAF)
    names, below = _parts(layout)
    if below is not layout:
        try:
            named = namedtuple("States", names)  # type: ignore[misc]
        except (TypeError, ValueError):
            return False
        if not isinstance(names, list) or list(layout[0]) != ["names"] or len(named._fields) != len(below):
            return False
    return all(map(_is_layout, below))


def _num_leaves(layout: Any) -> int:
    return sum(map(_num_leaves, layout)) if isinstance(layout, list) else int(layout == _LEAF)


def _leaves(states: Any) -> list[torch.Tensor]:
    if isinstance(states, torch.Tensor):
        return [states]
    return [leaf for child in states or () for leaf in _leaves(child)]


def _build(layout: Any, leaves: Iterator[torch.Tensor]) -> Any:
    if not isinstance(layout, list):
        return None if layout is None else next(leaves)
    names, below = _parts(layout)
    children = [_build(child, leaves) for child in below]
    if names is None:
        return tuple(children)
    kind: Any = HiddenStates if tuple(names) == HiddenStates._fields else namedtuple("States", names)
    return kind(*children)


def _words(layout: Any) -> str:
    if not isinstance(layout, list):
        return str(layout)
    return "(" + ", ".join(map(_words, _parts(layout)[1])) + ")"
