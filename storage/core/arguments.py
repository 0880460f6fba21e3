"""Arguments: what each must be, and one clear error for what it is not.

One rule: an argument is checked where it is given; nothing is guessed of it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from numbers import Real
from typing import Any

import numpy as np
import torch

from ..errors import UsageError


def whole(name: str, value: Any, low: int, high: int | None = None) -> int:
    """Check a whole-number argument; bool and fractions are none."""
    limits = f">= {low}" if high is None else f"in {low}:{high + 1}"
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < low or (high is not None and number > high):
        raise UsageError(
            "open the dataset", "", f"{name} a whole number {limits}", repr(value), f"Choose another {name}"
        )
    return number


def real(name: str, value: Any, expected: str, is_right: Callable[[float], bool]) -> float:
    """Check an argument that is a number, `expected` in words."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or not is_right(float(value)):
        raise UsageError("open the dataset", "", f"{name} {expected}", repr(value), f"Choose another {name}")
    return float(value)


def flag(name: str, value: Any) -> bool:
    """Check an argument that is true or false; a text is neither."""
    if not isinstance(value, (bool, np.bool_)) and (not isinstance(value, int) or value not in (0, 1)):
        raise UsageError("open the dataset", "", f"{name} True or False", repr(value))
    return bool(value)


def torch_device(device: torch.device | str) -> torch.device:
    """Check a device."""
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as cause:
        raise UsageError("open the dataset", "", "a torch device such as 'cpu' or 'cuda:0'", repr(device)) from cause


def frame_rate(value: Any) -> float:
    """Check a number of frames per second."""
    return real("frame_rate_hz", value, "frames per second > 0", lambda rate: 0 < rate < math.inf)


def check_count(action: str, name: str, value: Any, least: int) -> int:
    """Refuse what is not a whole number of at least `least`; give it as Python's, also one of numpy."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise UsageError(action, "", f"{name} >= {least}", repr(value))
    return int(value)
