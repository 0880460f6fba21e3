"""What a tree of RLDS features declares, and how the values of a record become steps."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from storage.core.fields import DTYPES, MAX_DIMENSIONS

from ..encoded_images import decode_picture
from .tfrecord import BYTES, FLOATS, INTEGERS, Array, Feature, count, items, numbers

MAX_STEPS = 1 << 20
_MAX_DEPTH = 64
#: Of packed tensors at once: the first number of bytes, or the second for each packed one.
_FREE_BYTES, _MAX_EXPANSION = 1 << 28, 256
#: What a list of float32 holds of other floats; lists of int64 hold every integer.
_FLOATS = {"float16": "float16", "bfloat16": "float32", "float32": "float32", "float64": "float32"}
#: Encoding of a tensor -> kind of leaf.
_KINDS = {"none": "numbers", "bytes": "raw", "zlib": "zlib"}


@dataclass(frozen=True)
class Leaf:
    """A feature that is declared.

    Attributes:
        kind: "numbers", "text", "picture", or "raw" and "zlib", the bytes of a tensor.
        shape: Of a step; -1 where steps differ.
        declared: The dtype that was recorded.
    """

    kind: str
    shape: tuple[int, ...]
    declared: str

    @property
    def dtype(self) -> str:
        """The dtype that the file holds."""
        return _FLOATS.get(self.declared, self.declared) if self.kind == "numbers" else self.declared

    @property
    def values(self) -> int:
        """Which kind of list holds it."""
        if self.kind != "numbers":
            return BYTES
        return FLOATS if self.declared in _FLOATS else INTEGERS

    def num_steps(self, data: memoryview, feature: Feature) -> int:
        """Count the steps of a feature.

        Raises:
            ValueError: There is a part of one.
        """
        if self.values == BYTES:
            return len(items(data, feature, MAX_STEPS))
        steps, rest = divmod(count(data, feature), max(1, prod(self.shape)))
        if rest:
            raise ValueError(f"{count(data, feature)} numbers in steps of {list(self.shape)}")
        return steps

    def decode(self, data: memoryview, feature: Feature, steps: range, shape: tuple[int, ...], where: str) -> Any:
        """Read steps: `[len(steps), *shape]`, a new array; of texts a list.

        Raises:
            ValueError, CorruptFileError: They are not there.
        """
        if self.kind == "numbers":
            size = prod(shape)
            found = numbers(data, feature, steps.start * size, steps.stop * size)
            return found.reshape(len(steps), *shape).astype(self.dtype, copy=False)
        chosen = items(data, feature, MAX_STEPS)[steps.start : steps.stop]
        if len(chosen) != len(steps):
            raise ValueError(f"{steps.stop} steps expected")
        if self.kind == "text":
            return [text(item) for item in chosen]
        out = np.empty((len(steps), *shape), DTYPES[self.dtype][1])
        if self.kind == "zlib" and out.nbytes > max(_FREE_BYTES, _MAX_EXPANSION * sum(map(len, chosen))):
            raise ValueError(f"{out.nbytes} bytes of tensors expected")
        for row, item in enumerate(chosen):
            out[row] = self._tensor(item, out.shape[1:], out.dtype, f"{where}, step {steps[row]}")
        return out

    def _tensor(self, item: memoryview, shape: tuple[int, ...], dtype: np.dtype[Any], where: str) -> Array:
        if self.kind == "picture":
            is_packed = dtype == np.float32  # its bytes as the four channels of a picture
            wanted = shape if dtype == np.uint8 else (*shape[:2], 4) if is_packed else shape[:2]
            pixels = decode_picture(item, where, wanted)
            return pixels.view("<f4").reshape(shape) if is_packed else pixels.reshape(shape)
        num_bytes = prod(shape) * dtype.itemsize
        stored = zlib.decompressobj().decompress(item, num_bytes + 1) if self.kind == "zlib" else item
        if len(stored) != num_bytes:
            raise ValueError(f"{num_bytes} bytes of a tensor expected")
        return np.frombuffer(stored, dtype).reshape(shape)


def declared_leaves(
    node: Any, name: str = "", shape: tuple[int, ...] = (), depth: int = 0
) -> Iterator[tuple[str, Leaf]]:
    """Yield the features of a tree: names joined by "/", and -1 in the shape of what is ragged.

    Raises:
        ValueError, TypeError, LookupError, AttributeError: It is none.
    """
    if depth > _MAX_DEPTH:
        raise ValueError(f"more than {_MAX_DEPTH} levels")
    if "featuresDict" in node:
        for key, child in node["featuresDict"]["features"].items():
            yield from declared_leaves(child, f"{name}/{key}" if name else key, shape, depth + 1)
    elif "sequence" in node:
        length = () if name == "steps" else (int(node["sequence"].get("length", -1)),)
        yield from declared_leaves(node["sequence"]["feature"], name, (*shape, *length), depth + 1)
    else:
        yield name, _leaf(node, shape)


def _leaf(node: Mapping[str, Any], outer: tuple[int, ...]) -> Leaf:
    if "text" in node:
        return Leaf("text", outer, "string")
    if not node.keys() & {"image", "tensor", "classLabel"}:
        return Leaf("numbers", (-1,), "int64")  # of an unknown kind: left out, as what is ragged
    about = node.get("image") or node.get("tensor") or {"dtype": "int64"}
    dtype = about.get("dtype") or "uint8"
    shape = (*outer, *(int(size) for size in about.get("shape", {}).get("dimensions", ())))
    if dtype == "string":
        return Leaf("text", shape, dtype)
    if dtype not in DTYPES or len(shape) > MAX_DIMENSIONS or min(shape, default=0) < -1:
        raise ValueError(f"{dtype[:40]}{list(shape)[:8]}")
    if "image" not in node:
        return Leaf(_KINDS[about.get("encoding") or "none"], shape, dtype)
    if len(shape) != 3 or dtype not in ("uint8", "uint16", "float32"):
        shape = (-1, *shape)  # several pictures in a step
        return Leaf("numbers", shape, dtype)
    return Leaf("picture", shape, dtype)


def text(item: bytes | memoryview) -> str:
    """Decode UTF-8; other bytes are written as escapes."""
    return bytes(item).decode(errors="backslashreplace")
