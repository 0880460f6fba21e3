"""Find the roles of fields from metadata or field names.

A role is the meaning of a field for the rules, such as "time" or "quaternion".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from storage.core.fields import Schema

#: For each role, the pattern that the last part of a field's name must match.
_PATTERNS = {
    "time": r"((.*_)?(time|time_s|time_ns|time_stamp|stamp)|(.*_)?timestamps?(_.+)?)$",
    "success": r"(is_)?success$",
    "task_index": r"task_(index|id)$",
    "quaternion": r".*(quat|orient).*",
    "heading": r".*(yaw|heading).*",
    "frame_index": r"frame_index$",
}
#: Alternative names that metadata use for roles.
_ALIASES = {"timestamp": "time", "quat": "quaternion"}


def roles_of(metadata: Mapping[str, Any], schema: Schema) -> dict[str, list[str]]:
    """Map each role to its fields. Roles in the metadata take precedence over field names.

    A quaternion field has 4 elements per quaternion. Fields of other roles, except "heading", have
    one element. A role does not apply to a field with another number of elements.

    Args:
        metadata: Metadata of the recording; "roles" maps fields to roles, or roles to fields.
        schema: Fields of the recording.
    """
    declared = _declared_roles(metadata, schema)
    fields: dict[str, list[str]] = {role: [] for role in _PATTERNS}
    for name, field in schema.items():
        role = declared.get(name) or _role_by_name(name)
        if role and _has_right_width(role, field.num_elements):
            fields.setdefault(role, []).append(name)
    return fields


def _has_right_width(role: str, num_elements: int) -> bool:
    """Return whether a field with this number of elements may have a role."""
    if role == "quaternion":
        return num_elements % 4 == 0
    is_any_width = role == "heading" or role not in _PATTERNS
    return is_any_width or num_elements == 1


def _declared_roles(metadata: Mapping[str, Any], schema: Schema) -> dict[str, str]:
    """Return the roles that the metadata declare, by field name."""
    roles = metadata.get("roles")
    if not isinstance(roles, Mapping):
        return {}
    declared: dict[str, str] = {}
    for key, value in roles.items():
        for item in value if isinstance(value, (list, tuple)) else [value]:
            field, role = (key, item) if key in schema else (item, key)
            declared[str(field)] = _ALIASES.get(str(role), str(role))
    return declared


def _role_by_name(name: str) -> str:
    """Return the role that the name of a field implies; "" without a role."""
    last_part = name.rpartition("/")[2].rpartition(".")[2].lower()
    for role, pattern in _PATTERNS.items():
        if re.match(pattern, last_part):
            return role
    return ""
