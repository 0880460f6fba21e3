"""Recurrent states of any structure: None, a tensor, or (named) tuples of these, to leaves and back.

One rule: the structure is fixed by the first states that come, and later ones must have it.
Leaves are `[layers, B, *H]` and are kept in a `ColumnTable` like everything else.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Mapping
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


class StateStructure:
    """The shape of a tree of recurrent states, without its tensors.

    Args:
        layout: "tensor", None, or a list of layouts; a list that starts with a dict
            `{"names": [...]}` is a named tuple. This form can be written as JSON.
    """

    def __init__(self, layout: Any) -> None:
        self.layout = layout

    @classmethod
    def of(cls, states: Any) -> StateStructure:
        """Read the structure of `states`."""
        return cls(_layout(states))

    def leaves(self, states: Any) -> list[torch.Tensor]:
        """List the tensors of `states`, or raise `SchemaError` if it has another structure."""
        got = _layout(states)
        if got != self.layout:
            raise SchemaError(_ACTION, "with 'hidden_states'", f"the structure {_words(self.layout)}", _words(got))
        return _leaves(states)

    def build(self, leaves: list[Any]) -> Any:
        """Give the states with these leaves; the inverse of `leaves`."""
        waiting = list(leaves)
        return _build(self.layout, waiting)


class SavedStates:
    """The recurrent states before each step, in a table of their storage; nothing until some come."""

    def __init__(self, table: ColumnTable) -> None:
        self._table = table
        self.structure: StateStructure | None = None

    def owns(self, name: str) -> bool:
        """Whether a tensor of the table is one of these."""
        return name.startswith(_COLUMN + "/")

    def leaves(self) -> list[torch.Tensor]:
        """List the leaves, `[T, layers, B, *H]`; they share memory with the table."""
        return [x for name, x in self._table.tensors.items() if self.owns(name)]

    def build(self, leaves: list[torch.Tensor]) -> Any:
        """Give states with these leaves; None if none ever came."""
        return None if self.structure is None else self.structure.build(leaves)

    def check(self, states: Any) -> list[torch.Tensor]:
        """List the leaves of a transition's states; refuse another structure, shape or dtype."""
        if self.structure is None and states is None:
            return []
        leaves = (self.structure or StateStructure.of(states)).leaves(states)
        known = [x[0] for x in self.leaves()] if self.structure else leaves
        for leaf, like in zip(leaves, known, strict=True):
            is_placed = leaf.dim() >= 3 and leaf.shape[1] == self._table.num_envs
            is_dense = leaf.layout is torch.strided and not (leaf.is_meta or leaf.is_complex() or leaf.is_quantized)
            if not (is_placed and is_dense) or leaf.shape != like.shape or leaf.dtype != like.dtype:
                dtype = "real numbers" if like.is_complex() or like.is_quantized else str(like.dtype)
                shape = str(list(like.shape)) if self.structure else f"[layers, {self._table.num_envs}, H]"
                layout = "" if leaf.layout is torch.strided else f"{leaf.layout} "
                got = f"{layout}{leaf.dtype} of shape {list(leaf.shape)} on {leaf.device}"
                raise SchemaError(_ACTION, "with 'hidden_states'", f"{dtype} of shape {shape}", got)
        return leaves

    def check_kept(self, layout: Any, tensors: Mapping[str, torch.Tensor], num_rows: int) -> None:
        """Refuse tensors of a loaded state that are no columns, or not `num_rows` steps of states with this layout."""
        if not _is_layout(layout):
            raise SchemaError("load a state", "with 'states'", "None, 'tensor', or lists of these", repr(layout))
        strange = next((name for name in tensors if not self.owns(name) and name not in self._table.schema), None)
        if strange is not None:
            options = nearest(strange, self._table.schema)
            raise MissingFieldError("load a state", f"with the tensor {strange!r}", options)
        known = {f"{_COLUMN}/{i}": None for i in range(_num_leaves(layout))}
        check_same_names(known, {name: None for name in tensors if self.owns(name)}, "load a state")
        for x in (tensors[name] for name in known):
            if x.dim() < 4 or len(x) != num_rows or x.shape[2] != self._table.num_envs:
                expected = f"shape [{num_rows}, layers, {self._table.num_envs}, H]"
                raise SchemaError("load a state", f"with {_COLUMN!r}", expected, str(list(x.shape)))

    def plan(self, states: Any, leaves: list[torch.Tensor], row: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Say where checked leaves go; make room first if they are the first that come."""
        if self.structure is None and leaves:
            self.allocate(StateStructure.of(states), [(tuple(x.shape), dtype_name(x.dtype)) for x in leaves])
        return [(kept[row], leaf) for kept, leaf in zip(self.leaves(), leaves, strict=True)]

    def allocate(self, structure: StateStructure, leaves: list[tuple[tuple[int, ...], str]]) -> None:
        """Fix the structure, and the shape and dtype of each leaf."""
        self.structure = structure
        fields = [Field(f"{_COLUMN}/{i}", shape, dtype) for i, (shape, dtype) in enumerate(leaves)]
        self._table.allocate(fields, with_envs=False)


def _layout(states: Any) -> Any:
    if states is None:
        return None
    if isinstance(states, torch.Tensor):
        return _LEAF
    if isinstance(states, (tuple, list)):
        names = [{"names": list(states._fields)}] if hasattr(states, "_fields") else []
        return [*names, *(_layout(child) for child in states)]
    raise SchemaError(_ACTION, "with 'hidden_states'", "None, a tensor, or tuples of these", type(states).__name__)


def _is_layout(layout: Any) -> bool:
    """Whether `_layout` could have given this."""
    if not isinstance(layout, list):
        return layout is None or (isinstance(layout, str) and layout == _LEAF)
    names, children = (layout[0], layout[1:]) if layout and isinstance(layout[0], dict) else (None, layout)
    return all(map(_is_layout, children)) and (names is None or _are_names(names, len(children)))


def _are_names(given: dict[str, Any], count: int) -> bool:
    names: Any = given.get("names")
    try:
        namedtuple("States", names)
    except (TypeError, ValueError):
        return False
    return isinstance(names, list) and list(given) == ["names"] and len(names) == count


def _num_leaves(layout: Any) -> int:
    return sum(map(_num_leaves, layout)) if isinstance(layout, list) else int(layout == _LEAF)


def _leaves(states: Any) -> list[torch.Tensor]:
    if isinstance(states, torch.Tensor):
        return [states]
    return [leaf for child in states or () for leaf in _leaves(child)]


def _build(layout: Any, waiting: list[Any]) -> Any:
    if layout is None:
        return None
    if layout == _LEAF:
        return waiting.pop(0)
    names = layout[0]["names"] if layout and isinstance(layout[0], dict) else None
    children = [_build(child, waiting) for child in (layout[1:] if names else layout)]
    if names is None:
        return tuple(children)
    kind = HiddenStates if tuple(names) == HiddenStates._fields else namedtuple("States", names)
    return kind(*children)


def _words(layout: Any) -> str:
    if not isinstance(layout, list):
        return str(layout)
    return "(" + ", ".join(_words(child) for child in layout if not isinstance(child, dict)) + ")"
