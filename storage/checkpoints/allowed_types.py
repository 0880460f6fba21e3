"""Types that `load_checkpoint` loads by default: tensors, containers, numpy values and enums.

Loading runs no code of a file. Each global name in a pickle is replaced by a function of this
module. The name of an enum is replaced by a lookup in a class that the program already imported.
"""

from __future__ import annotations

import argparse
import enum
import io
import pickle
import sys
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import torch
from torch.serialization import get_safe_globals, get_unsafe_globals_in_checkpoint, safe_globals

#: Kinds of numpy dtypes that are loaded. Structured dtypes could describe memory outside the array.
_KINDS = "biufcSUmMO"
#: Types of leaves that torch loads with any value.
_PLAIN = (
    type(None),
    bool,
    float,
    complex,
    str,
    bytes,
    bytearray,
    torch.Size,
    torch.dtype,
    torch.device,
    torch.layout,
)
#: Limit of integers. pickle encodes larger integers in a form that torch does not load.
_MOST_INT = 1 << 2000
#: Function by which pickle protocol 2 refers to members of a class.
_GETATTR = "builtins.getattr"
#: A character that ends a name in a pickle, so that no name in a file contains it.
_NO_NAME = "\n"
#: Lock held while names are in torch's list of allowed names, which is global to the process.
_loading = threading.Lock()


class NotLoadedError(pickle.UnpicklingError):
    """A checkpoint contains types that are not loaded by default."""

    def __init__(self, names: list[str]) -> None:
        super().__init__(", ".join(names))
        self.names = names


@contextmanager
def allowed_globals(content: IO[bytes]) -> Iterator[bool]:
    """Add the allowed names of a checkpoint to torch's list while the block runs.

    Yields whether there are such names; the caller must then run `check_values` on the result.

    Raises:
        NotLoadedError: The checkpoint contains names that are not allowed.
    """
    with ExitStack() as held:
        # Lock first, because another load may have added names to the global list.
        held.enter_context(_loading)
        needed = get_unsafe_globals_in_checkpoint(content)
        content.seek(0)
        replacements = _meanings(needed)
        if lacking := sorted(set(needed) - replacements.keys()):
            raise NotLoadedError(lacking)
        if replacements:
            added: list[Any] = [
                (replacement, name) for name, replacement in replacements.items()
            ] + _BUILT
            known = get_safe_globals()
            held.enter_context(
                safe_globals([replacement for replacement in added if replacement not in known])
            )
        else:
            # Without such names, no lock is needed, and other loads may run at the same time.
            held.close()
        yield bool(replacements)


def _meanings(names: list[str]) -> dict[str, Any]:
    """Map each allowed name in a file to its replacement."""
    replacements: dict[str, Any] = {name: _MEANINGS[name] for name in names if name in _MEANINGS}
    inner: dict[type, Callable[..., Any]] = {}
    for name in set(names) - replacements.keys():
        imported = _imported_class(name)
        if imported is not None and issubclass(imported, enum.Enum):
            replacements[name] = partial(_member, imported)
        elif imported is not None and _GETATTR in names:
            lookups = {
                enum_class: partial(_member, enum_class) for enum_class in _enums_in(imported)
            }
            if lookups:
                inner |= lookups
                replacements[name] = _Outer(imported)
    if inner:  # A pickle refers to an enum within a class by `getattr(class, name)`.
        replacements[_GETATTR] = partial(_inner_enum, inner)
        replacements |= {
            f"{enum_class.__module__}.{enum_class.__qualname__}{_NO_NAME}": lookup
            for enum_class, lookup in inner.items()
        }
    return replacements


def _imported_class(name: str) -> type | None:
    """Return the class named `name` if the program already imported it, otherwise None."""
    module, _, attribute = name.rpartition(".")
    value = vars(sys.modules[module]).get(attribute) if module in sys.modules else None
    return value if isinstance(value, type) else None


class _Outer:
    """Replacement of a class that a file refers to only because of the enums within it."""

    def __init__(self, outer_class: type) -> None:
        self.kind = outer_class

    def __call__(self, *_: Any) -> Any:
        raise pickle.UnpicklingError(
            f"{self.kind.__module__}.{self.kind.__qualname__} is not an enum"
        )


def _enums_in(outer_class: type) -> list[type[enum.Enum]]:
    """Return the enums defined within a class, at any depth."""
    enums: list[type[enum.Enum]] = []
    for member in vars(outer_class).values():
        if isinstance(member, type) and member.__qualname__.startswith(
            f"{outer_class.__qualname__}."
        ):
            enums += [member] if issubclass(member, enum.Enum) else _enums_in(member)
    return enums


def _inner_enum(lookups: dict[type, Callable[..., Any]], owner: Any, name: Any) -> Any:
    """Return the replacement of the class `name` that is defined within the class of `owner`.

    For an enum, the replacement looks up its members. For a class that contains an enum, it is
    another `_Outer`.
    """
    inner = vars(owner.kind).get(name) if isinstance(owner, _Outer) else None
    if isinstance(inner, type) and inner in lookups:
        return lookups[inner]
    if isinstance(inner, type) and _enums_in(inner):
        return _Outer(inner)
    raise pickle.UnpicklingError(f"getattr(..., {name!r}) is not an enum")


def _member(enum_class: type[enum.Enum], value: Any) -> enum.Enum:
    """Return the member of `enum_class` with the value `value`.

    The class is not called, since a call could run code in its method `_missing_`.
    """
    for member in enum_class.__members__.values():
        if type(member.value) is type(value) and member.value == value:
            return member
    is_flag = issubclass(enum_class, enum.Flag) and "_missing_" not in {
        name for base in _own(enum_class) for name in vars(base)
    }
    if is_flag and type(value) is int:
        # The value may be a combination of several flags, which is not a member.
        return enum_class(value)
    raise pickle.UnpicklingError(
        f"{enum_class.__module__}.{enum_class.__qualname__} has no member with the value {value!r}"
    )


def _own(enum_class: type) -> list[type]:
    """Return the base classes of an enum that are not from the standard library."""
    return [base for base in enum_class.__mro__ if base.__module__ not in ("enum", "builtins")]


def _array() -> None:
    """Replacement of `numpy.ndarray` for files that refer to the class of an array."""


def _empty_array(array_class: Any, shape: Any, code: Any) -> npt.NDArray[Any]:
    """Return an array whose values are set later by its pickled state."""
    if array_class is not _array or shape != (0,):
        raise pickle.UnpicklingError("a subclass of numpy.ndarray")
    return np.empty(0, np.int8)


def _no_bytes() -> bytes:
    """Return empty bytes. Pickles encode empty bytes as a call of this function."""
    return b""


def _dtype(code: Any, *_: Any) -> np.dtype[Any]:
    dtype: np.dtype[Any] = (
        np.dtype(code, copy=True) if isinstance(code, str) and code.isalnum() else np.dtype("V1")
    )
    if dtype.kind not in _KINDS:
        raise pickle.UnpicklingError(f"the numpy dtype {code!r}")
    return dtype


def _scalar(dtype: Any, value: Any) -> Any:
    if (
        not isinstance(dtype, np.dtype)
        or not isinstance(value, bytes)
        or len(value) != dtype.itemsize
    ):
        raise pickle.UnpicklingError("a numpy scalar without its bytes")
    return np.frombuffer(value, dtype)[0]


#: Replacements by the name in a file. numpy 1 and 2 use different names for the same objects.
_MEANINGS: dict[str, Callable[..., Any]] = {
    "argparse.Namespace": argparse.Namespace,
    "builtins.bytes": _no_bytes,
    "numpy.ndarray": _array,
    "numpy.dtype": _dtype,
    **{f"numpy.{core}.multiarray._reconstruct": _empty_array for core in ("core", "_core")},
    **{f"numpy.{core}.multiarray.scalar": _scalar for core in ("core", "_core")},
}
_DTYPE_CLASSES: set[type] = {type(np.dtype(code)) for code in "?bBhHiIlLqQefdgFDGSUmMO"}
#: Objects whose state a file may set, with names that no file can contain.
_BUILT: list[tuple[Any, str]] = [
    (kind, f"{kind.__name__}{_NO_NAME}") for kind in {np.ndarray, *_DTYPE_CLASSES}
]


# Checks of the content of a checkpoint.


def refused_part(checkpoint: Any) -> tuple[str, str] | None:
    """Return the first part of a checkpoint that `load_checkpoint` does not load by default.

    Returns:
        The path of the part, such as `checkpoint['agent'][0]`, and its description. None if all
        parts can be loaded.
    """
    seen: set[int] = set()
    waiting: list[tuple[str, Any]] = [("checkpoint", checkpoint)]
    while waiting:
        path, part = waiting.pop()
        part_type = type(part)
        if part_type in _PLAIN or (part_type is int and abs(part) < _MOST_INT) or id(part) in seen:
            continue
        seen.add(id(part))
        inner = _parts(path, part)
        if inner is not None:
            waiting += reversed(inner)
        elif not _is_loaded_leaf(part) and (why := _why_refused(part)):
            return path, why
    return None


def check_values(loaded: Any) -> None:
    """Raise `UnpicklingError` if the result contains a replacement instead of a value."""
    seen: set[int] = set()
    waiting: list[tuple[str, Any]] = [("checkpoint", loaded)]
    while waiting:
        path, part = waiting.pop()
        if type(part) in _PLAIN or id(part) in seen:
            continue
        seen.add(id(part))
        waiting += _parts(path, part) or []
        if callable(part) and part is not argparse.Namespace:
            raise pickle.UnpicklingError(f"{path} is a class or a function")


def _parts(path: str, part: Any) -> list[tuple[str, Any]] | None:
    """Return the parts of an allowed container with their paths; None for other objects."""
    part_type = type(part)
    if part_type in (dict, OrderedDict, Counter):
        keys = [(f"key {key!r:.80} of {path}", key) for key in part]
        values = [(f"{path}[{key!r:.80}]", value) for key, value in part.items()]
        return (
            keys
            + values
            + [(f"{path}.{name}", value) for name, value in getattr(part, "__dict__", {}).items()]
        )
    if part_type in (list, tuple):
        return [(f"{path}[{place}]", value) for place, value in enumerate(part)]
    if part_type is set:
        return [(f"{path}, {value!r:.80}", value) for value in part]
    if part_type is argparse.Namespace:
        return [(f"{path}.{name}", value) for name, value in vars(part).items()]
    if part_type is np.ndarray and part.dtype.kind == "O":
        return [
            (f"{path}[{', '.join(map(str, place))}]", part[place])
            for place in np.ndindex(part.shape)
        ]
    return None


def _is_loaded_leaf(part: Any) -> bool:
    """Return whether the type of a leaf can be loaded with any value."""
    if isinstance(part, torch.Tensor):
        is_plain = type(part) in (torch.Tensor, torch.nn.Parameter) and part.layout is torch.strided
        return is_plain and not part.is_quantized and not part.is_nested and not part.__dict__
    is_numpy = type(part) is np.ndarray or (
        isinstance(part, np.generic) and type(part) is part.dtype.type
    )
    return is_numpy and part.dtype.kind in _KINDS and part.dtype.kind != "O"


def reason(cause: BaseException) -> str:
    """Return the error message of torch's loader without the advice that follows the reason."""
    text = str(cause).rpartition("WeightsUnpickler error: ")[2] or type(cause).__name__
    return text.strip().splitlines()[0]


def _why_refused(part: Any) -> str:
    """Save and load a part as a test. Returns its description if the test fails, otherwise ""."""
    type_name = f"{type(part).__module__}.{type(part).__qualname__}"
    content = io.BytesIO()
    try:
        torch.save(part, content)
        content.seek(0)
        with allowed_globals(content):
            check_values(torch.load(content, map_location="cpu", weights_only=True))
    except Exception as cause:  # noqa: BLE001 - Pickling runs code of the part.
        names = getattr(cause, "names", [])
        if names and names != [type_name]:
            return f"{type_name} (with {', '.join(names)})"
        return type_name if names else f"{type_name} ({reason(cause)[:200]})"
    return ""
