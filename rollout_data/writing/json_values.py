"""Conversion of values to JSON values."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np


def plain(value: Any) -> Any:
    """Convert a value to a JSON value: arrays to lists; bytes, NaN and infinities to str."""
    if isinstance(value, Mapping):
        return {str(name): plain(part) for name, part in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(part) for part in value]
    if isinstance(value, (np.ndarray, np.generic)):
        return plain(value.tolist())
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, (str, int, float, bool, type(None))):
        return value
    return str(value)


def json_bytes(value: Any, most: int, indent: int | None = None) -> int:
    """Count the bytes of a value as JSON. Counting stops as soon as the number exceeds `most`."""
    if isinstance(value, (str, int, float)):
        return len(json.dumps(value))
    num_bytes = 0
    for part in json.JSONEncoder(indent=indent).iterencode(value):
        num_bytes += len(part)
        if num_bytes > most:
            break
    return num_bytes
