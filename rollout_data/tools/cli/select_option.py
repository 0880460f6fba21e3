"""Implementation of the option `--select`, which chooses episodes by ids and conditions."""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from storage.errors import UsageError

from ...sources.episode_table import COLUMNS
from ...sources.recordings.recording import Recording

#: Map from each comparison sign to the function that compares. The first argument of the function is
#: the value in the condition, so the condition `length<20` is computed as `gt(20, length)`.
_SIGNS = {
    "==": operator.eq, "!=": operator.ne, "<=": operator.ge, ">=": operator.le,
    "=": operator.eq, "<": operator.gt, ">": operator.lt,
}  # fmt: skip
_CONDITION = re.compile(rf"\s*(\w+)\s*({'|'.join(_SIGNS)})\s*(.*?)\s*", re.DOTALL)
#: Words for values of the column `success` in a condition.
_SUCCESS = {"true": 1, "false": 0, "unknown": -1}
#: Columns whose values are numbers.
_NUMBERS = ("env", "length", "return")


def selected(recording: Recording, which: Sequence[str]) -> Recording:
    """Return the selection of the episodes that `--select` chooses.

    An episode is chosen if it has one of the ids and meets all conditions.

    Args:
        recording: Recording to select from.
        which: Values of `--select`: ids, and conditions on columns of `Recording.table`, such as
            `success=true`, `length>20` or `task!=pick`. The signs are =, ==, !=, <, <=, > and >=.
            Without ids, the conditions apply to all episodes.

    Raises:
        UsageError: An id or column does not exist, or a value does not fit its column.
    """
    if not which:
        return recording
    known = set(recording.ids)
    ids = []
    conditions = []
    for text in dict.fromkeys(which):
        condition = _CONDITION.fullmatch(text)
        if condition is None or text in known:
            ids.append(text)
        else:
            conditions.append(condition.groups())

    chosen = recording.select(ids) if ids else recording
    for name, sign, value in conditions:
        is_met = partial(_SIGNS[sign], _column_value(name, value))
        chosen = chosen.filter(**{name: is_met})
    return chosen


def _column_value(name: str, text: str) -> Any:
    """Parse the right side of a condition, such as "20" in `length>20`, as a value of its column.

    Raises:
        UsageError: The text is not a possible value of the column.
    """
    if name not in COLUMNS:
        return text  # `Recording.filter` raises the error, which lists the existing columns.
    try:
        if name == "success":
            return _SUCCESS[text.lower()]
        if name == "time":
            return np.datetime64(text)
        if name in _NUMBERS:
            return json.loads(text) + 0  # Adding 0 raises `TypeError` for texts and lists.
        return text
    except (ValueError, TypeError, KeyError) as cause:
        examples = {
            "success": "true, false or unknown",
            "time": "a time such as 2026-05-01T12:00",
        }
        expected = examples.get(name, "a number")
        raise UsageError(
            f"in --select, {name} must be compared with {expected}, got {text!r}."
        ) from cause
