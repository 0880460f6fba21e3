"""Which fields are times, quaternions, flags of success and so on: told by metadata, or by plain names.

One rule: what neither tells has no role.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from storage.core.fields import Schema

#: Role -> what the last part of a field's name matches.
_PATTERNS = {
    "time": r"((.*_)?(time|time_s|time_ns|time_stamp|stamp)|(.*_)?timestamps?(_.+)?)$",
    "success": r"(is_)?success$",
    "task_index": r"task_(index|id)$",
    "quaternion": r".*(quat|orient).*",
    "heading": r".*(yaw|heading).*",
    "frame_index": r"frame_index$",
}
_NAMES = {"timestamp": "time", "quat": "quaternion"}


def roles_of(metadata: Mapping[str, Any], schema: Schema) -> dict[str, list[str]]:
    """Return the fields of each role; `metadata["roles"]` maps fields to roles, or roles to fields."""
    told: dict[str, str] = {}
    roles = metadata.get("roles")
    for key, value in roles.items() if isinstance(roles, Mapping) else ():
        for one in value if isinstance(value, (list, tuple)) else [value]:
            field, role = (str(key), str(one)) if key in schema else (str(one), str(key))
            told[field] = _NAMES.get(role, role)
    found: dict[str, list[str]] = {role: [] for role in _PATTERNS}
    for name, item in schema.items():
        last = name.rpartition("/")[2].rpartition(".")[2].lower()
        role = told.get(name) or next((role for role, text in _PATTERNS.items() if re.match(text, last)), "")
        is_right = item.num_elements % 4 == 0 if role == "quaternion" else item.num_elements == 1
        if role and (is_right or role == "heading" or name in told):
            found.setdefault(role, []).append(name)
    return found
