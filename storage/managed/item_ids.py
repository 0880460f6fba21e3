"""Ids of items, and checks of what every buffer and the manager are asked.

One rule: an id is `<name>_<row>`, cut at its last "_", so that names may hold any character.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from ..errors import MissingFieldError, SchemaError, UsageError

UNIQUE_ID, SLOT = "replay_unique_id", "replay_buffer_idx"
#: Leaves that a sample brings besides what was pushed; they are not stored when an item is pushed back.
GIVEN = (UNIQUE_ID, SLOT, "staleness", "use", "IS")


class UnknownNameError(MissingFieldError):
    """An id, or a call, names a buffer that is not there (a `KeyError`)."""


def as_items(data: Any) -> list[Any]:
    """List what was pushed: one item, or several."""
    if isinstance(data, Mapping):
        return [data]
    if isinstance(data, (str, bytes)) or not isinstance(data, Iterable):
        raise SchemaError("push", "", "an item (a mapping) or a list of items", type(data).__name__)
    return list(data)


def listed(values: Any) -> list[Any]:
    """List what a learner tells of: tensors and arrays by their numbers, None as nothing, anything else as one."""
    if values is None:
        return []
    if isinstance(values, (torch.Tensor, np.ndarray)):
        return list(values.reshape(-1).tolist())
    return list(values) if isinstance(values, Iterable) and not isinstance(values, (str, bytes)) else [values]


def plain_number(value: Any) -> Any:
    """Give a single number of torch or numpy as Python's."""
    is_one = isinstance(value, (torch.Tensor, np.ndarray, np.generic)) and math.prod(value.shape) == 1
    return value.item() if is_one else value


def split_unique_id(unique_id: Any) -> tuple[str, int]:
    """Cut an id at its last "_": the buffer's name and the row.

    Raises:
        UsageError: It is no id.
    """
    name, separator, row = unique_id.rpartition("_") if isinstance(unique_id, str) else ("", "", "")
    if not separator or not name or not (row.isascii() and row.isdigit()):
        raise UsageError("read an id", "", "'<name>_<row>'", repr(unique_id))
    return name, int(row)


def finite_or_none(value: float | None) -> float | None:
    """Give a limit as JSON has it: None for no limit."""
    return None if value is None or math.isinf(value) else value


def check_iteration(value: Any) -> int:
    """Refuse what is not a number of learner iterations; give it as Python's, also one of numpy."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise UsageError("sample", "", "cur_learner_iter as an int", repr(value))
    return int(value)


def check_range(sample_range: Any) -> slice | None:
    """Refuse what is not a range by age."""
    if sample_range is not None and not isinstance(sample_range, slice):
        raise UsageError("sample", "", "sample_range as a slice or None", repr(sample_range))
    return sample_range


def without_given(item: Any) -> Any:
    """Leave out what an earlier sample added, so that it is not stored."""
    if isinstance(item, Mapping) and any(name in item for name in GIVEN):
        return {name: value for name, value in item.items() if name not in GIVEN}
    return item
