"""Selecting episodes by texts, as `--select` of the command line has them."""

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
from ...sources.recording import Recording

#: Sign -> the comparison with what is wanted on the left.
_SIGNS = {
    "==": operator.eq, "!=": operator.ne, "<=": operator.ge, ">=": operator.le,
    "=": operator.eq, "<": operator.gt, ">": operator.lt,
}  # fmt: skip
_CONDITION = re.compile(rf"\s*(\w+)\s*({'|'.join(_SIGNS)})\s*(.*?)\s*", re.DOTALL)
#: Words for what `success` is in the table.
_SUCCESS = {"true": 1, "false": 0, "unknown": -1}


def selected(recording: Recording, which: Sequence[str]) -> Recording:
    """Return the episodes that have one of the ids and meet all of the conditions.

    Args:
        recording: What to select from.
        which: Ids, and conditions on columns of `Recording.table`: `success=true`, `length>20`, `task!=pick`. Signs are
            =, ==, !=, <, <=, > and >=. Without an id all are taken.

    Raises:
        UsageError: There is no such id or column, or a column is compared with something of another kind.
    """
    known = set(recording.ids) if which else set()
    conditions = {one: found for one in which if one not in known and (found := _CONDITION.fullmatch(one))}
    ids = [one for one in which if one not in conditions]
    chosen = recording.select(ids) if ids else recording
    for condition in conditions.values():
        name, sign, text = condition.groups()
        chosen = chosen.filter(**{name: partial(_SIGNS[sign], _wanted(name, text))})
    return chosen


def _wanted(name: str, text: str) -> Any:
    """Read what a column is compared with.

    Raises:
        UsageError: It is of another kind than the column.
    """
    if name not in COLUMNS:
        return text  # `Recording.filter` tells
    try:
        if name == "success":
            return _SUCCESS[text.lower()]
        if name == "time":
            return np.datetime64(text)
        return json.loads(text) + 0 if name in ("env", "length", "return") else text
    except (ValueError, TypeError, KeyError) as cause:
        kind = {"success": "true, false or unknown", "time": "a time such as 2026-05-01T12:00"}.get(name, "a number")
        raise UsageError("select episodes", f"by {name!r}", kind, repr(text)) from cause
