"""Globals (classes and functions) that a pickle may name, and safe replacements of their calls.

A replacement does not create an array. It compares sizes with the bytes of the file, and returns a
description of the array or dtype. `restricted_pickle.py` executes the operations of the pickle.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from io import BufferedIOBase
from math import prod
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from storage.core.fields import MAX_DIMENSIONS
from storage.errors import CorruptFileError, DataFileError, UnsafeFileError

MAX_ARRAY_BYTES = 1 << 32
_DTYPE_CODES = ("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8")


class ByteSpan(NamedTuple):
    """Position of an unread byte string in the file, in bytes."""

    offset: int
    num_bytes: int


@dataclass(frozen=True)
class StoredArray:
    """Location of an array in a file. `read` reads the array.

    Attributes:
        dtype: Stored dtype, possibly big-endian.
        shape: Shape of the array. All bytes of the array lie inside the file.
        offset: First byte in the file.
        order: "C" or "F", the order of the stored values.
        axes: Permutation of the axes after reading; None if the axes stay in stored order.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int
    order: Literal["C", "F"] = "C"
    axes: tuple[int, ...] | None = None

    def read(self, file: BufferedIOBase, path: Path) -> np.ndarray:
        """Read the array from its open file into a new array."""
        data = bytearray(prod(self.shape) * self.dtype.itemsize)
        view = memoryview(data)
        done = 0
        file.seek(self.offset)
        while done < len(data) and (count := file.readinto(view[done:])):
            done += count
        if done < len(data):
            problem = f"the file has shrunk; {done} of {len(data)} bytes at {self.offset} are left"
            raise corrupt_pickle(path, problem)
        axes = self.axes or tuple(range(len(self.shape)))
        stored_shape = [self.shape[axes.index(axis)] for axis in range(len(axes))]
        stored: np.ndarray = np.frombuffer(data, self.dtype).reshape(stored_shape, order=self.order)
        array: np.ndarray = stored.transpose(axes)
        return array


@dataclass(eq=False)
class PickledDtype:
    """A dtype whose byte order is set by a later operation of the pickle."""

    dtype: np.dtype[Any]


@dataclass(eq=False)
class PickledArray:
    """An array of a pickle. `stored` is None until the operation BUILD sets it."""

    stored: StoredArray | None = None


class TruncatedPickleError(CorruptFileError):
    """A pickle is truncated, perhaps because it is being written."""


def corrupt_pickle(path: Path, problem: str) -> CorruptFileError:
    """Return the error of a damaged pickle."""
    return CorruptFileError(f"{str(path)!r} is damaged: {problem}.")


def truncated_pickle(path: Path, problem: str) -> TruncatedPickleError:
    """Return the error of a truncated pickle."""
    return TruncatedPickleError(f"{str(path)!r} is truncated: {problem}.")


def unsafe_pickle(path: Path, content: str) -> UnsafeFileError:
    """Return the error of a pickle that contains more than data."""
    return UnsafeFileError(
        f"{str(path)!r} contains {content}, but a pickle may only contain arrays and plain "
        "containers. No code of the file was run. Check where the file comes from."
    )


def kind(value: Any) -> str:
    """Return the type name of a value for errors, because its content may be large or hostile."""
    return value.name if isinstance(value, Global) else type(value).__name__


def set_state(path: Path, state: Any, target: Any) -> None:
    """Execute the pickle operation BUILD, which sets the content of an array or dtype."""
    if isinstance(target, PickledDtype):
        _set_dtype_state(path, target, state)
    elif isinstance(target, PickledArray) and target.stored is None:
        _, shape, dtype, is_fortran, data = state
        target.stored = _stored(path, data, dtype, shape, "F" if is_fortran is True else "C")
    else:
        raise unsafe_pickle(path, f"an assignment of attributes to a {kind(target)}")


def _set_dtype_state(path: Path, target: PickledDtype, state: Any) -> None:
    version, order, *rest = state
    plain = (None, None, None, -1, -1, 0)
    if (
        version not in (3, 4)
        or order not in ("<", ">", "|")
        or tuple(rest[:6]) != plain
        or any(rest[6:])
    ):
        raise unsafe_pickle(path, "a dtype that is not a plain number")
    if order != "|":
        target.dtype = target.dtype.newbyteorder(order)


def _stored(
    path: Path, data: Any, dtype: Any, shape: Any, order: Literal["C", "F"], axes: Any = None
) -> StoredArray:
    """Return the location of an array after comparing its shape with its number of bytes."""
    if isinstance(data, list):
        raise unsafe_pickle(path, "an array of objects")
    if (
        not isinstance(data, ByteSpan)
        or not isinstance(dtype, PickledDtype)
        or type(shape) is not tuple
    ):
        raise TypeError(
            f"an array has data of type {kind(data)}, dtype {kind(dtype)} and shape {kind(shape)}"
        )
    if len(shape) > MAX_DIMENSIONS or any(type(size) is not int or size < 0 for size in shape):
        raise ValueError(f"a shape must be at most {MAX_DIMENSIONS} integers >= 0")
    if axes is not None and (type(axes) is not tuple or sorted(axes) != list(range(len(shape)))):
        raise ValueError("the axes of an array are not a permutation")
    num_bytes = prod(shape) * dtype.dtype.itemsize
    if num_bytes != data.num_bytes or num_bytes > MAX_ARRAY_BYTES:
        size = "x".join(str(size)[:20] for size in shape[:8])
        problem = f"an array of shape {size} and dtype {dtype.dtype} has {data.num_bytes} bytes"
        raise corrupt_pickle(path, problem)
    if axes is not None:
        shape = tuple(shape[axis] for axis in axes)
    return StoredArray(dtype.dtype, shape, data.offset, order, axes)


# The following functions replace calls that numpy and Python write to pickles.


def _new_array(path: Path, arguments: tuple[Any, ...]) -> PickledArray:
    subtype, _, _ = arguments
    if not isinstance(subtype, Global) or subtype.name != "numpy.ndarray":
        raise unsafe_pickle(path, f"an array of type {kind(subtype)}")
    return PickledArray()


def _array_of_buffer(path: Path, arguments: tuple[Any, ...]) -> PickledArray:
    data, dtype, shape, order, *more = arguments
    axes = more[0] if more else None
    if order not in ("C", "F", "K") or len(more) > 1 or (order == "K") != (axes is not None):
        raise ValueError("the order of an array must be C, F, or K with axes")
    return PickledArray(_stored(path, data, dtype, shape, "C" if order == "K" else order, axes))


def _scalar(path: Path, arguments: tuple[Any, ...]) -> PickledArray:
    dtype, data = arguments
    return PickledArray(_stored(path, data, dtype, (), "C"))


def _new_dtype(path: Path, arguments: tuple[Any, ...]) -> PickledDtype:
    code, _, _ = arguments
    if not isinstance(code, str):
        raise unsafe_pickle(path, f"a dtype of {kind(code)}")
    if code.startswith("O"):
        raise unsafe_pickle(path, "an array of objects")
    if code not in _DTYPE_CODES:
        raise DataFileError(
            f"{str(path)!r} has an array of dtype {code[:40]!r}, which is not supported. "
            f"Supported dtypes are {', '.join(_DTYPE_CODES)}."
        )
    return PickledDtype(np.dtype(code))


def _no_call(path: Path, arguments: tuple[Any, ...]) -> Any:
    raise unsafe_pickle(path, "a call of numpy.ndarray")


def _sequence(arguments: tuple[Any, ...]) -> list[Any]:
    (items,) = arguments or ([],)
    if type(items) not in (list, tuple):
        raise TypeError(f"a container is built from {kind(items)}")
    return list(items)


def pairs(items: list[Any]) -> dict[str, Any]:
    """Build a dict from (key, value) pairs of a pickle.

    Keys must be texts, since hashing other keys can run code.
    """
    if any(
        type(item) not in (list, tuple) or len(item) != 2 or type(item[0]) is not str
        for item in items
    ):
        raise TypeError("the keys of a dict must be texts")
    return dict(items)


def _new_dict(path: Path, arguments: tuple[Any, ...]) -> dict[str, Any]:
    if len(arguments) == 1 and type(arguments[0]) is dict:
        return dict(arguments[0])
    return pairs(_sequence(arguments))


class Global(NamedTuple):
    """A global that a pickle may name, and the function that replaces a call of it."""

    name: str
    call: Callable[[Path, tuple[Any, ...]], Any]


_CALLS: dict[tuple[str, str], Callable[[Path, tuple[Any, ...]], Any]] = {
    ("numpy", "ndarray"): _no_call,
    ("numpy", "dtype"): _new_dtype,
    ("collections", "OrderedDict"): _new_dict,
    ("builtins", "dict"): _new_dict,
    ("builtins", "list"): lambda path, arguments: _sequence(arguments),
    ("builtins", "tuple"): lambda path, arguments: tuple(_sequence(arguments)),
}
for _core in ("numpy.core", "numpy._core"):  # Names in numpy 1 and numpy 2.
    _CALLS[f"{_core}.multiarray", "_reconstruct"] = _new_array
    _CALLS[f"{_core}.multiarray", "scalar"] = _scalar
    _CALLS[f"{_core}.numeric", "_frombuffer"] = _array_of_buffer

#: Maps (module, name) to each global that a pickle may name. All others are an error.
GLOBALS = {key: Global(".".join(key), call) for key, call in _CALLS.items()}
