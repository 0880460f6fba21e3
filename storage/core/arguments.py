"""Checks of single arguments: each returns the checked value or raises `UsageError`.

Every check has the form `check(name, value, ...)`. The library accepts numbers, flags and paths
only through these checks. The message is *<call>: <name> must be <condition>, got <value>.* Import
this module, not its functions: callers often have an argument `device` or `seed` of their own.
"""

from __future__ import annotations

import inspect
import math
import operator
import os
import re
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from ..errors import UsageError, nearest

Choice = TypeVar("Choice")
#: Start of a URL. A scheme has at least two letters, so that "C:/data" is a path.
#: Known schemes may be followed by a single "/", because pathlib merges "//".
_URL = re.compile(
    r"[A-Za-z][A-Za-z0-9+.:-]+://|([a-z]+::)*(s3|gs|gcs|az|abfss?|hdfs|hf|https?|s?ftp|file):/"
)


def options(owner: Any, values: Mapping[str, Any]) -> None:
    """Check the keyword arguments of a constructor; an unknown argument raises `TypeError`.

    Args:
        owner: Object whose constructor is running. Arguments of the constructors of its base
            classes are accepted too.
        values: Keyword arguments that the user passed to the constructor.

    Raises:
        TypeError: An argument is unknown. The message names the class and its arguments, the nearest
            first.
    """
    constructors = [
        vars(base)["__init__"] for base in type(owner).__mro__[:-1] if "__init__" in vars(base)
    ]
    options_of(type(owner).__name__, values, *constructors)


def options_of(
    call: str, values: Mapping[str, Any], *receivers: Callable[..., Any], but: Iterable[str] = ()
) -> None:
    """Check keyword arguments that a function passes on; an unknown one raises `TypeError`.

    Args:
        call: Name of the function that the user called, for errors.
        values: Keyword arguments that the user passed to this function.
        receivers: Functions to which this function passes the keyword arguments.
        but: Names that the user must not pass, because the called function sets them itself.

    Raises:
        TypeError: An argument is unknown. The message names `call` and the known arguments, the
            nearest first.
    """
    parameters = [
        parameter
        for receiver in receivers
        for parameter in inspect.signature(receiver).parameters.values()
    ]
    known = {
        parameter.name
        for parameter in parameters
        if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    }
    known -= {"self", *but}
    for name in values:
        if name not in known:
            raise TypeError(
                f"{call}() got an unexpected argument {name!r}: expected {nearest(name, known)}"
            )


def is_whole(value: Any) -> bool:
    """Return whether a value is an integer of Python, numpy or torch. A bool is no integer."""
    # Check Python ints first, which takes a tenth of the time of the general check.
    if type(value) is int:
        return True
    try:
        operator.index(value)
    except TypeError:
        return False
    return not _is_bool(value)


def whole(name: str, value: Any, low: int, high: int | None = None) -> int:
    """Check an integer of at least `low` and at most `high`; return a Python int."""
    if is_whole(value) and value >= low and (high is None or value <= high):
        return int(value)
    limits = f">= {low}" if high is None else f"in {low}:{high + 1}"
    description = "" if is_whole(value) else "an integer "
    raise UsageError(f"{name} must be {description}{limits}, got {value!r}.")


def is_real(value: Any) -> bool:
    """Return whether a value is a Python or numpy number in the range of float.

    Returns False for booleans and NaN.
    """
    try:
        return isinstance(value, Real) and not _is_bool(value) and not math.isnan(value)
    except OverflowError:  # The integer exceeds the range of float, as 10**400 does.
        return False


def real(name: str, value: Any, expected: str, is_right: Callable[[float], bool]) -> float:
    """Check a real number against a condition, and return it as a Python float.

    `is_right` is the condition. `expected` describes it in errors, such as ">= 0 seconds".
    """
    if is_real(value) and is_right(float(value)):
        return float(value)
    raise UsageError(f"{name} must be {expected}, got {value!r}.")


def flag(name: str, value: Any) -> bool:
    """Check a flag (a bool of Python or numpy, 0 or 1) and return it as a bool."""
    if _is_bool(value) or (is_whole(value) and value in (0, 1)):
        return bool(value)
    raise UsageError(f"{name} must be True or False, got {value!r}.")


def choice(name: str, value: Choice, options: Iterable[Choice]) -> Choice:
    """Check that a value is one of `options`; the error lists the nearest option first."""
    listed = list(options)
    if any(isinstance(value, type(option)) and value == option for option in listed):
        return value
    raise UsageError(
        f"{name} must be one of {nearest(str(value), map(str, listed))}, got {value!r}."
    )


def instance(name: str, value: Any, expected: str, *kinds: type[Any]) -> Any:
    """Check that a value is an instance of one of `kinds`.

    `expected` describes the types in errors, such as "a mapping".
    """
    if isinstance(value, kinds):
        return value
    raise UsageError(f"{name} must be {expected}, got {type(value).__name__}.")


def is_url(value: Any) -> bool:
    """Return whether a path is a URL, even if the URL was converted to a `Path`."""
    return isinstance(value, (str, os.PathLike)) and bool(_URL.match(os.fsdecode(value)))


def path(name: str, value: Any) -> Path:
    """Check a local path and return it as a `Path`. A URL is an error.

    Errors name the argument `name`, or "path" if `name` is empty.
    """
    if not isinstance(value, (str, os.PathLike)):
        raise UsageError(f"{name or 'path'} must be a str or a path object, got {value!r}.")
    text = os.fsdecode(value)
    if is_url(text):
        raise UsageError(
            f"{name or 'path'} must be a local path, got the URL {text!r}. Copy the data to "
            "this machine, or mount the store."
        )
    return Path(text)


def device(name: str, value: Any) -> torch.device:
    """Check a device of torch, or its name, that this process can use."""
    try:
        device = torch.device(value)
    except (RuntimeError, TypeError, ValueError) as cause:
        raise UsageError(
            f"{name} must be a torch device such as 'cpu' or 'cuda:0', got {value!r}."
        ) from cause
    if device.type == "cuda":
        num_devices = torch.cuda.device_count()
        if (device.index or 0) >= num_devices:
            raise UsageError(
                f"{name} is {str(device)!r}, but torch finds {num_devices} CUDA devices. "
                "Choose 'cpu' or an existing device."
            )
    elif device.type != "cpu":
        try:
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError, NotImplementedError, ImportError) as cause:
            raise UsageError(
                f"{name} is {str(device)!r}, which torch cannot use here. Choose 'cpu'."
            ) from cause
    return device


def optional_device(name: str, value: Any) -> torch.device | None:
    """Check an optional device of torch that this process can use; None stays None."""
    return None if value is None else device(name, value)


def names(name: str, value: Any) -> tuple[str, ...]:
    """Check a collection of field names and return it as a tuple. A single str is an error."""
    if isinstance(value, Iterable) and not isinstance(value, str):
        listed = tuple(value)
        if all(isinstance(item, str) for item in listed):
            return listed
    raise UsageError(f"{name} must be a collection of field names, got {value!r}.")


def seed(name: str, value: Any, expected: str = "an integer of 64 bits") -> int:
    """Check a seed for `torch.Generator`: a signed or unsigned integer of 64 bits.

    `expected` describes the valid values in errors.
    """
    if is_whole(value) and -(1 << 63) <= int(value) < 1 << 64:
        return int(value)
    raise UsageError(f"{name} must be {expected}, got {value!r}.")


def env_ids(name: str, value: Any, num_envs: int) -> npt.NDArray[np.int64]:
    """Check that ids are integers in `[0, num_envs)`; return a flat int64 array in the same order.

    `value` is one id, or a sequence, an array or a tensor of ids. The ids number environments, or
    other things such as frames.
    """
    try:
        numbers = np.asarray(value.cpu() if isinstance(value, torch.Tensor) else value).reshape(-1)
    except ValueError as cause:
        raise UsageError(f"{name} must be integer ids: {cause}.") from cause
    if numbers.size and numbers.dtype.kind not in "iu":
        advice = " For a mask, pass mask.nonzero()[0]." if numbers.dtype.kind == "b" else ""
        raise UsageError(f"{name} must be integer ids, got {numbers.dtype}.{advice}")
    ids = numbers.astype(np.int64)
    wrong = ids[(ids < 0) | (ids >= num_envs)]
    if len(wrong):
        raise UsageError(f"{name} must be in 0:{num_envs}, got {wrong[:8].tolist()}.")
    return ids


def _is_bool(value: Any) -> bool:
    return isinstance(value, (bool, np.bool_)) or (
        isinstance(value, torch.Tensor) and value.dtype is torch.bool
    )
