"""Types that `load_checkpoint` loads by default: tensors, containers, numpy values and enums.

A pickle refers to classes and functions by global names, such as `numpy.dtype`. torch's loader for
`weights_only=True` accepts the names in a global list, which contains an object for each name. This
module adds names to the list while a file is loaded. The object of each name is a replacement that
runs no code of the file: a function of this module, or a lookup in an enum that the program already
imported.
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

#: Kinds of numpy dtypes that are loaded.
#: Structured dtypes are refused, because they could describe memory outside of the array.
_KINDS = "biufcSUmMO"
#: Types whose values torch loads without conditions.
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
#: Integers of this size or more are refused.
#: pickle encodes very large integers in a form that torch does not load.
_MOST_INT = 1 << 2000
#: Function by which pickle protocol 2 refers to a class that is defined within another class.
_GETATTR = "builtins.getattr"
#: Character that ends each name in a pickle. No name in a file can contain this character.
_NO_NAME = "\n"
#: Lock of torch's list of allowed names, which is global to the process.
#: The lock is held while the list contains names of this module.
_loading = threading.Lock()


class NotLoadedError(pickle.UnpicklingError):
    """A checkpoint refers to classes or functions that may not be loaded.

    Attributes:
        names: Their global names, such as `os.system`.
    """

    def __init__(self, names: list[str]) -> None:
        super().__init__(", ".join(names))
        self.names = names


@contextmanager
def allowed_globals(content: IO[bytes]) -> Iterator[bool]:
    """Let torch load the harmless classes and functions in a checkpoint during the block.

    Yields whether names were added. If so, the loaded result may contain replacements, and the
    caller must pass it to `check_values`.

    Args:
        content: Zip archive of the checkpoint.

    Raises:
        NotLoadedError: The checkpoint contains names that are not allowed.
    """
    with ExitStack() as contexts:
        # Lock first, because a load in another thread may have added names to the global list.
        contexts.enter_context(_loading)
        needed = get_unsafe_globals_in_checkpoint(content)
        content.seek(0)
        replacements = _replacements(needed)
        refused = sorted(set(needed) - replacements.keys())
        if refused:
            raise NotLoadedError(refused)
        if replacements:
            added: list[Any] = [
                (replacement, name) for name, replacement in replacements.items()
            ] + _BUILT
            known = get_safe_globals()
            contexts.enter_context(
                safe_globals([replacement for replacement in added if replacement not in known])
            )
        else:
            # If no name is added, release the lock, so that other loads may run at the same time.
            contexts.close()
        yield bool(replacements)


def _replacements(names: list[str]) -> dict[str, Any]:
    """Map each allowed global name to a safe function that is called instead of it."""
    replacements: dict[str, Any] = {
        name: _FIXED_REPLACEMENTS[name] for name in names if name in _FIXED_REPLACEMENTS
    }
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
    if inner:
        # A pickle refers to an enum within a class by `getattr(class, name)`.
        replacements[_GETATTR] = partial(_inner_enum, inner)
        replacements |= {
            f"{enum_class.__module__}.{enum_class.__qualname__}{_NO_NAME}": lookup
            for enum_class, lookup in inner.items()
        }
    return replacements


def _imported_class(name: str) -> type | None:
    """Return a class by its global name if the program already imported it, otherwise None."""
    module, _, attribute = name.rpartition(".")
    value = vars(sys.modules[module]).get(attribute) if module in sys.modules else None
    return value if isinstance(value, type) else None


class _Outer:
    """Replacement, without calls, of a class within which an enum is defined."""

    def __init__(self, outer_class: type) -> None:
        self.outer_class = outer_class

    def __call__(self, *_: Any) -> Any:
        name = f"{self.outer_class.__module__}.{self.outer_class.__qualname__}"
        raise pickle.UnpicklingError(f"{name} is not an enum")


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
    """Find a class that is defined within another class, as `getattr` would.

    Pickles call this function instead of `getattr`, which could run code of the program. For an
    enum, the result is its function in `lookups`. For a class that contains an enum, it is another
    `_Outer`. Other classes raise an error.

    Args:
        lookups: Function that returns a member by its value, for each enum class.
        owner: Replacement of the other class.
        name: Name of the class within the other class.
    """
    inner = vars(owner.outer_class).get(name) if isinstance(owner, _Outer) else None
    if isinstance(inner, type) and inner in lookups:
        return lookups[inner]
    if isinstance(inner, type) and _enums_in(inner):
        return _Outer(inner)
    raise pickle.UnpicklingError(f"getattr(..., {name!r}) is not an enum")


def _member(enum_class: type[enum.Enum], value: Any) -> enum.Enum:
    """Return the member of an enum with a value.

    The enum is not called, since a call could run code in its method `_missing_`.
    """
    for member in enum_class.__members__.values():
        if type(member.value) is type(value) and member.value == value:
            return member
    is_flag = issubclass(enum_class, enum.Flag) and "_missing_" not in {
        name for base in _classes_of_program(enum_class) for name in vars(base)
    }
    if is_flag and type(value) is int:
        # A combination of several flags is not a member.
        # Calling the enum is safe here, because it has no `_missing_` of its own.
        return enum_class(value)
    raise pickle.UnpicklingError(
        f"{enum_class.__module__}.{enum_class.__qualname__} has no member with the value {value!r}"
    )


def _classes_of_program(enum_class: type) -> list[type]:
    """Return an enum class and its base classes, without those of the standard library."""
    return [base for base in enum_class.__mro__ if base.__module__ not in ("enum", "builtins")]


def _array() -> None:
    """Replacement of `numpy.ndarray`, which pickles of arrays name but do not call."""


def _empty_array(array_class: Any, shape: Any, code: Any) -> npt.NDArray[Any]:
    """Return an empty array, whose shape, dtype and values torch sets afterwards."""
    if array_class is not _array or shape != (0,):
        raise pickle.UnpicklingError("a subclass of numpy.ndarray")
    return np.empty(0, np.int8)


def _no_bytes() -> bytes:
    """Return empty bytes, which pickle protocol 2 encodes as a call of `bytes`."""
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


#: Functions that are called instead of the global names that are always allowed.
#: numpy 1 and 2 use different names for the same functions.
_FIXED_REPLACEMENTS: dict[str, Callable[..., Any]] = {
    "argparse.Namespace": argparse.Namespace,
    "builtins.bytes": _no_bytes,
    "numpy.ndarray": _array,
    "numpy.dtype": _dtype,
    **{f"numpy.{core}.multiarray._reconstruct": _empty_array for core in ("core", "_core")},
    **{f"numpy.{core}.multiarray.scalar": _scalar for core in ("core", "_core")},
}
_DTYPE_CLASSES: set[type] = {type(np.dtype(code)) for code in "?bBhHiIlLqQefdgFDGSUmMO"}
#: Classes whose objects a file may fill, but which a file must not call.
#: torch fills only objects of allowed classes. No file can contain the names in this list.
_BUILT: list[tuple[Any, str]] = [
    (kind, f"{kind.__name__}{_NO_NAME}") for kind in {np.ndarray, *_DTYPE_CLASSES}
]


# Checks of the content of a checkpoint.


def refused_part(checkpoint: Any) -> tuple[str, str] | None:
    """Return the first value in a checkpoint that `load_checkpoint` does not load by default.

    Returns:
        The path of the value, such as `checkpoint['agent'][0]`, and a description of its type.
        None if the whole checkpoint can be loaded.
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
        elif not _is_always_loaded(part):
            description = _why_refused(part)
            if description:
                return path, description
    return None


def check_values(loaded: Any) -> None:
    """Check that a loaded checkpoint contains no class or function in place of a value."""
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
    """Return the items of a container with their paths, such as `checkpoint['agent'][0]`.

    `path` is the path of the container. Returns None for other objects, and for containers of types
    that `load_checkpoint` does not load by default.
    """
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


def _is_always_loaded(part: Any) -> bool:
    """Return whether a value is a tensor or a numpy value that is certainly loaded by default.

    False means that loading must be tried.
    """
    if isinstance(part, torch.Tensor):
        is_plain = type(part) in (torch.Tensor, torch.nn.Parameter) and part.layout is torch.strided
        return is_plain and not part.is_quantized and not part.is_nested and not part.__dict__
    is_numpy = type(part) is np.ndarray or (
        isinstance(part, np.generic) and type(part) is part.dtype.type
    )
    return is_numpy and part.dtype.kind in _KINDS and part.dtype.kind != "O"


def reason(cause: BaseException) -> str:
    """Return the reason in an error message of torch's loader, without its advice."""
    text = str(cause).rpartition("WeightsUnpickler error: ")[2] or type(cause).__name__
    return text.strip().splitlines()[0]


def _why_refused(part: Any) -> str:
    """Return "" if a value can be saved and loaded, otherwise a description of its type.

    The function saves the value to memory and loads it again.
    """
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
