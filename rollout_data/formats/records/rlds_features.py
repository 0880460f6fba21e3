"""Features of RLDS datasets: parse their declarations, and decode their values in records."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from storage.core.fields import DTYPES, MAX_DIMENSIONS

from ..encoded_images import decode_picture
from .tfrecord import BYTES, FLOATS, INTEGERS, Array, FeatureValues, count, items, numbers

MAX_STEPS = 1 << 20
_MAX_DEPTH = 64
#: Maximum decompressed bytes of tensors per read: the larger of `_FREE_BYTES` and `_MAX_EXPANSION`
#: times the compressed bytes.
_FREE_BYTES = 1 << 28
_MAX_EXPANSION = 256
#: Maps declared float dtypes to field dtypes. Records store every float as float32.
_FLOATS = {"float16": "float16", "bfloat16": "float32", "float32": "float32", "float64": "float32"}
#: Maps declared encodings of tensors to `RldsLeaf.kind`.
_KINDS = {"none": "numbers", "bytes": "raw", "zlib": "zlib"}


@dataclass(frozen=True)
class RldsLeaf:
    """A declared feature of steps.

    Attributes:
        kind: "numbers", "text", "picture", or the encoding of a tensor: "raw" or "zlib".
        shape: Shape of a step; -1 for an axis of variable size.
        declared: Declared dtype of the recorded values.
    """

    kind: str
    shape: tuple[int, ...]
    declared: str

    @property
    def dtype(self) -> str:
        """Dtype of the field: float64 and bfloat16 become float32."""
        return (
            _FLOATS.get(self.declared, self.declared) if self.kind == "numbers" else self.declared
        )

    @property
    def values(self) -> int:
        """Kind of the values in a record: `BYTES`, `FLOATS` or `INTEGERS`."""
        if self.kind != "numbers":
            return BYTES
        return FLOATS if self.declared in _FLOATS else INTEGERS

    def num_steps(self, data: memoryview, feature: FeatureValues) -> int:
        """Return the number of steps of this feature in a record.

        Raises:
            ValueError: The last step is incomplete.
        """
        if self.values == BYTES:
            return len(items(data, feature, MAX_STEPS))
        steps, rest = divmod(count(data, feature), max(1, prod(self.shape)))
        if rest:
            raise ValueError(
                f"{count(data, feature)} numbers are not whole steps of shape {list(self.shape)}"
            )
        return steps

    def decode(
        self,
        data: memoryview,
        feature: FeatureValues,
        steps: range,
        shape: tuple[int, ...],
        where: str,
    ) -> Any:
        """Decode steps to a new array `[len(steps), *shape]`, or to a list of texts.

        Raises:
            ValueError, CorruptFileError: The feature has fewer steps, or is damaged.
        """
        if self.kind == "numbers":
            size = prod(shape)
            values = numbers(data, feature, steps.start * size, steps.stop * size)
            return values.reshape(len(steps), *shape).astype(self.dtype, copy=False)

        stored = items(data, feature, MAX_STEPS)[steps.start : steps.stop]
        if len(stored) != len(steps):
            raise ValueError(f"there are fewer than {steps.stop} steps")
        if self.kind == "text":
            return [text(item) for item in stored]

        rows = np.empty((len(steps), *shape), DTYPES[self.dtype][1])
        if self.kind == "zlib":
            num_packed_bytes = sum(map(len, stored))
            if rows.nbytes > max(_FREE_BYTES, _MAX_EXPANSION * num_packed_bytes):
                raise ValueError(
                    f"{num_packed_bytes} compressed bytes are too few for tensors of "
                    f"{rows.nbytes} bytes"
                )
        for number, item in enumerate(stored):
            rows[number] = self._tensor(item, shape, rows.dtype, f"{where}, step {steps[number]}")
        return rows

    def _tensor(
        self,
        item: memoryview,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        where: str,
    ) -> Array:
        """Decode a value that is a picture or the bytes of a tensor."""
        if self.kind == "picture":
            if dtype == np.float32:  # The bytes of a value are stored as four 8-bit channels.
                return decode_picture(item, where, (*shape[:2], 4)).view("<f4").reshape(shape)
            picture_shape = shape if dtype == np.uint8 else shape[:2]
            return decode_picture(item, where, picture_shape).reshape(shape)
        num_bytes = prod(shape) * dtype.itemsize
        stored = (
            zlib.decompressobj().decompress(item, num_bytes + 1) if self.kind == "zlib" else item
        )
        if len(stored) != num_bytes:
            raise ValueError(f"a tensor has {len(stored)} bytes, expected {num_bytes}")
        return np.frombuffer(stored, dtype).reshape(shape)


def declared_leaves(
    node: Any, name: str = "", shape: tuple[int, ...] = (), depth: int = 0
) -> Iterator[tuple[str, RldsLeaf]]:
    """Yield (name, feature) for each leaf of the declared feature tree.

    Nested names are joined by "/". A ragged axis has size -1.

    Raises:
        ValueError, TypeError, LookupError, AttributeError: The node is not a feature tree.
    """
    if depth > _MAX_DEPTH:
        raise ValueError(f"the features have more than {_MAX_DEPTH} levels")
    if "featuresDict" in node:
        for key, child in node["featuresDict"]["features"].items():
            yield from declared_leaves(child, f"{name}/{key}" if name else key, shape, depth + 1)
    elif "sequence" in node:
        length = () if name == "steps" else (int(node["sequence"].get("length", -1)),)
        yield from declared_leaves(node["sequence"]["feature"], name, (*shape, *length), depth + 1)
    else:
        yield name, _leaf(node, shape)


def _leaf(node: Mapping[str, Any], outer: tuple[int, ...]) -> RldsLeaf:
    if "text" in node:
        return RldsLeaf("text", outer, "string")
    if not node.keys() & {"image", "tensor", "classLabel"}:
        # A feature of an unknown kind is declared as ragged, because ragged features are left out.
        return RldsLeaf("numbers", (-1,), "int64")
    feature = node.get("image") or node.get("tensor") or {"dtype": "int64"}
    dtype = feature.get("dtype") or "uint8"
    sizes = feature.get("shape", {}).get("dimensions", ())
    shape = (*outer, *map(int, sizes))
    if dtype == "string":
        return RldsLeaf("text", shape, dtype)
    if dtype not in DTYPES or len(shape) > MAX_DIMENSIONS or min(shape, default=0) < -1:
        raise ValueError(f"a feature has invalid dtype {dtype[:40]} or shape {list(shape)[:8]}")
    if "image" not in node:
        return RldsLeaf(_KINDS[feature.get("encoding") or "none"], shape, dtype)
    if len(shape) != 3 or dtype not in ("uint8", "uint16", "float32"):
        # Several pictures per step are declared as ragged, because ragged features are left out.
        return RldsLeaf("numbers", (-1, *shape), dtype)
    return RldsLeaf("picture", shape, dtype)


def text(item: bytes | memoryview) -> str:
    """Decode UTF-8. Invalid bytes become backslash escapes."""
    return bytes(item).decode(errors="backslashreplace")
