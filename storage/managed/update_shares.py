"""Share out what a learner found about items of several buffers.

One rule: the ids decide; a pure function of the update.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..errors import UsageError
from .item_ids import UNIQUE_ID, listed, split_unique_id


def share_out_update(info: Any, check_name: Callable[[str], Any], tracking: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Cut an update into one per buffer, in order.

    Args:
        info: `replay_unique_id` with `priority`, and `used_id`; each may be missing.
        check_name: Raises for a name that is no buffer's.
        tracking: The buffers that are told every `used_id`.

    Raises:
        UsageError: An id is none, or there are not as many priorities.
    """
    if not isinstance(info, Mapping):
        raise UsageError("update", "", "a mapping", type(info).__name__)
    ids, priorities = listed(info.get(UNIQUE_ID)), info.get("priority")
    values = None if priorities is None else listed(priorities)
    if values is not None and len(values) != len(ids):
        raise UsageError("update", "", f"{len(ids)} priorities", str(len(values)))
    parts: dict[str, dict[str, Any]] = {}
    for place, unique_id in enumerate(ids):
        name, _ = split_unique_id(unique_id)
        check_name(name)
        part = parts.setdefault(name, {UNIQUE_ID: [], "priority": None if values is None else []})
        part[UNIQUE_ID].append(unique_id)
        if values is not None:
            part["priority"].append(values[place])
    used = listed(info.get("used_id"))
    for name in tracking if used else ():
        parts.setdefault(name, {})["used_id"] = used
    return parts
