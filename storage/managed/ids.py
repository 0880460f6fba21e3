"""Ids of items, and checks of what buffers and their manager are asked.

One rule: an id is `<name>_<row>`, cut at its last "_", so that names may hold any character.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch

from ..core import arguments
from ..errors import MissingFieldError, SchemaError, UsageError, nearest
from ..prioritized.limits import UNKNOWN

UNIQUE_ID, SLOT = "replay_unique_id", "replay_buffer_idx"
#: Leaves that a sample has besides what was pushed; they are not stored when an item is pushed back.
_GIVEN = (UNIQUE_ID, SLOT, "staleness", "use", "IS")


class UnknownNameError(MissingFieldError):
    """An id, or a call, names a buffer that is not there (a `KeyError`)."""


class Request(NamedTuple):
    """What `sample` is asked for; see `ManagedBuffer.sample`."""

    size: int
    iteration: int = 0
    sample_range: slice | None = None
    replace: bool = False

    @classmethod
    def checked(
        cls, size: Any, iteration: Any, sample_range: Any = None, replace: Any = False, least: int = 0
    ) -> Request:
        """Check the arguments of a call; numbers of numpy become Python's."""
        size = arguments.whole("sample", "size" if least == 0 else "batch_size", size, least)
        if sample_range is not None and not isinstance(sample_range, slice):
            raise UsageError("sample", "", "sample_range as a slice or None", repr(sample_range))
        return cls(size, checked_iteration(iteration), sample_range, bool(replace))

    def among(self, num_rows: int) -> range:
        """Give the ages in the range asked for, of `num_rows` items, 0 for the oldest."""
        return range(num_rows)[self.sample_range or slice(None)]


def checked_iteration(value: Any) -> int:
    """Check a number of learner iterations; any sign."""
    if not arguments.is_whole(value):
        raise UsageError("sample", "", "cur_learner_iter as an int", repr(value))
    return int(value)


def as_items(data: Any) -> list[Any]:
    """List what was pushed: one item, or several."""
    if isinstance(data, Mapping):
        return [data]
    if isinstance(data, (str, bytes)) or not isinstance(data, Iterable):
        raise SchemaError("push", "", "an item (a mapping) or a list of items", type(data).__name__)
    return list(data)


def without_given(item: Any) -> Any:
    """Leave out what an earlier sample added."""
    if isinstance(item, Mapping) and any(name in item for name in _GIVEN):
        return {name: value for name, value in item.items() if name not in _GIVEN}
    return item


def listed(values: Any) -> list[Any]:
    """List values of any form: tensors and arrays as numbers, None as nothing, a single value as one."""
    if values is None:
        return []
    if isinstance(values, (torch.Tensor, np.ndarray)):
        return list(values.reshape(-1).tolist())
    return list(values) if isinstance(values, Iterable) and not isinstance(values, (str, bytes)) else [values]


def plain_number(value: Any) -> Any:
    """Give a single number of torch or numpy as Python's."""
    is_one = isinstance(value, (torch.Tensor, np.ndarray, np.generic)) and math.prod(value.shape) == 1
    return value.item() if is_one else value


def leading_size(batch: Mapping[str, Any]) -> int:
    """Say how many rows a batch has, before it is checked."""
    leaf: Any = batch
    while isinstance(leaf, Mapping):
        leaf = next(iter(leaf.values()), ())
    try:
        return len(leaf)
    except TypeError:
        return 0


def earliest(given: Any) -> int:
    """Read when an item was collected: an int, or several of which the least counts."""
    if given is None:
        return UNKNOWN
    values = given.tolist() if isinstance(given, (torch.Tensor, np.ndarray, np.generic)) else given
    known = [plain_number(value) for value in (values if isinstance(values, (list, tuple)) else [values])]
    known = [value for value in known if value is not None]
    if not all(arguments.is_whole(value) for value in known):
        raise UsageError("add an item", "", "a collect_iter of integers", repr(given)[:60])
    return min(known, default=UNKNOWN)


def split_unique_id(unique_id: Any) -> tuple[str, int]:
    """Cut an id at its last "_": the buffer's name and the row; raise `UsageError` if it is none."""
    name, _, row = unique_id.rpartition("_") if isinstance(unique_id, str) else ("", "", "")
    if not name or not (row.isascii() and row.isdigit()):
        raise UsageError("read an id", "", "'<name>_<row>'", repr(unique_id))
    return name, int(row)


def raise_unknown(name: Any, known: Iterable[str]) -> NoReturn:
    """Raise the error that no buffer has this name."""
    raise UnknownNameError("find a buffer", "", nearest(str(name), known), repr(name))
