"""Recurrent states of any structure: None, a tensor, or (named) tuples of these, to leaves and back.

One rule: the structure is fixed by the first states that come, and later ones must have it. A structure is written as
a layout, which JSON can hold: "tensor", None, or a list of layouts; a list that starts with `{"names": [...]}` is a
named tuple. Leaves are `[layers, B, *H]` and are kept in a `ColumnTable` like everything else.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterator, Mapping
from itertools import repeat
from typing import Any

import torch

from ..core.fields import REAL_DTYPES
from ..errors import SchemaError
from .column_table import ColumnTable
from .columns import HiddenStates

_LEAF = "tensor"
_COLUMN = "saved_hidden_states"
_ADD, _LOAD = "add a transition", "load a state"


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
        """Give states with these leaves; None if none ever came."""
        return _build(self.layout, iter(leaves))

    def read(self, states: Any) -> dict[str, torch.Tensor]:
        """Give the leaves of a step's states, by name in the table; refuse another structure, shape or dtype."""
        kept = self.leaves()
        if states is None and not kept:
            return {}
        layout, leaves = _layout(states), _leaves(states)
        if kept and layout != self.layout:
            raise SchemaError(_ADD, "with 'hidden_states'", f"the structure {_words(self.layout)}", _words(layout))
        for leaf, like in zip(leaves, [x[0] for x in kept] or leaves, strict=True):
            is_placed = leaf.dim() >= 3 and leaf.shape[1] == self._table.num_envs
            is_dense = leaf.layout is torch.strided and leaf.dtype in REAL_DTYPES and not leaf.is_meta
            if not (is_placed and is_dense) or leaf.shape != like.shape or leaf.dtype != like.dtype:
                dtype = str(like.dtype) if like.dtype in REAL_DTYPES else "real numbers"
                shape = str(list(like.shape)) if kept else f"[layers, {self._table.num_envs}, H]"
                got = f"{leaf.dtype} of shape {list(leaf.shape)}, {leaf.layout} on {leaf.device}"
                raise SchemaError(_ADD, "with 'hidden_states'", f"{dtype} of shape {shape}", got)
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
    raise SchemaError(_ADD, "with 'hidden_states'", "None, a tensor, or tuples of these", type(states).__name__)


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
