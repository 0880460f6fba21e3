"""Ids of items, and the values that items and updates may hold in several forms.

One rule: an id is `<name>_<row>`, cut at its last "_", so that names may hold any character.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import numpy as np
import torch

from ..core import arguments
from ..errors import MissingFieldError, SchemaError, UsageError, nearest
from ..prioritized.limits import UNKNOWN

UNIQUE_ID, SLOT = "replay_unique_id", "replay_buffer_idx"
#: Leaves that a sample adds to an item; they are not stored when the item is pushed back.
GIVEN = frozenset({UNIQUE_ID, SLOT, "staleness", "use", "IS"})


class UnknownNameError(MissingFieldError):
    """An id, or a call, names a buffer that is not there (a `KeyError`)."""


def raise_unknown(name: Any, known: Iterable[str]) -> NoReturn:
    """Raise the error that no buffer has this name."""
    raise UnknownNameError("find a buffer", expected=nearest(str(name), known), got=repr(name))


def split_unique_id(unique_id: Any) -> tuple[str, int]:
    """Give the buffer's name and the row of an id; raise `UsageError` if it is none."""
    name, _, row = unique_id.rpartition("_") if isinstance(unique_id, str) else ("", "", "")
    if not name or not (row.isascii() and row.isdigit()):
        raise UsageError("read an id", expected="'<name>_<row>'", got=repr(unique_id))
    return name, int(row)


def as_items(data: Any) -> list[Any]:
    """List what was pushed: one item, or several."""
    return [data] if isinstance(data, Mapping) else several(data)


def several(data: Any) -> list[Any]:
    """List several items; one item, a text or a number is an error."""
    if isinstance(data, (Mapping, str, bytes)) or not isinstance(data, Iterable):
        raise SchemaError("push", expected="a list of items", got=type(data).__name__)
    return list(data)


def listed(values: Any) -> list[Any]:
    """List values of any form: tensors and arrays as numbers, None as nothing, a single value as one."""
    if values is None:
        return []
    if isinstance(values, (torch.Tensor, np.ndarray, np.generic)):
        return list(values.reshape(-1).tolist())
    return list(values) if isinstance(values, Iterable) and not isinstance(values, (str, bytes)) else [values]


def plain_number(value: Any) -> Any:
    """Give a single number of torch or numpy as Python's."""
    is_one = isinstance(value, (torch.Tensor, np.ndarray, np.generic)) and math.prod(value.shape) == 1
    return value.item() if is_one else value


def earliest(given: Any) -> int:
    """Read when an item was collected: an int, or several of which the least counts."""
    known = [plain_number(value) for value in listed(given) if value is not None]
    if not all(map(arguments.is_whole, known)):
        raise UsageError("add an item", expected="a collect_iter of integers", got=repr(given)[:60])
    return min(known, default=UNKNOWN)
