"""Repeated steps: a step of the same form as the one before it is taken without checking it all again.

One rule: a shortcut, never another meaning. What has exactly the names, shapes and dtypes of a step
that `read_rollout` took is what it would take; anything else is its business, errors included. It
matters because an environment that computes elsewhere leaves the processor's caches cold: then each
of the hundred small calls of a full check costs ten times what it costs in a loop (0.5 of 0.8 ms).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch

from storage.codecs.codecs import codec_of
from storage.core.fields import Schema

from .observation_parts import ObservationParts
from .record import FINALS, FLAGS, OBSERVATION, Rollout, resolve_ends

_END_FLAGS = FLAGS[:-1]  # a mask of envs leaves the common road


@dataclass(frozen=True)
class _Leaf:
    """One array of a record.

    Attributes:
        path: Where it stands in the record.
        shape, dtype: Of the array, `[N, ...]`.
        parts: (field, columns or None for all, shape) of each field that is stored of it; none for
            a final value, which is not needed where nothing ends.
    """

    path: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    parts: tuple[tuple[str, slice | None, tuple[int, ...]], ...]


class RepeatedStep:
    """The form of a step, to read further ones of that form. Made by `form_of`."""

    def __init__(self, leaves: list[_Leaf], flags: list[_Leaf], sizes: dict[tuple[str, ...], int], shape: Any) -> None:
        self._leaves, self._flags, self._sizes, self._shape = leaves, flags, sizes, shape
        self._all, self._none = np.ones(shape, bool), np.zeros(shape, bool)
        self._all.flags.writeable = self._none.flags.writeable = False
        # Compared as bytes: of the code of any(), 40 us come from memory when an environment has computed meanwhile.
        self._no_flags = bytes(self._none.size)
        # Without one of these no trajectory ends: a timeout is a kind of done, where that is given.
        names = {leaf.path[0] for leaf in flags}
        self._ending = ("done",) if "done" in names and names <= {"done", "timeout"} else tuple(names)

    def read(self, values: Mapping[str, Any]) -> Rollout | None:
        """Give the step as a rollout of one step that shares its memory, or None if it has another form."""
        version = values.get("policy_version")
        if version is None:
            version = -1
        elif type(version) is not int or not -(2**63) <= version < 2**63:
            return None
        if len(values) - ("policy_version" in values) != self._sizes[()]:
            return None
        flags: dict[str, np.ndarray] = {}
        for leaf in self._flags:
            array = self._array(values, leaf)
            if array is None:
                return None
            flags[leaf.path[0]] = array.reshape(self._shape)
        is_plain = all(flags[name].tobytes() == self._no_flags for name in self._ending)
        terminated, truncated, present = self._none, self._none, self._all
        if not is_plain:
            terminated, truncated, present = resolve_ends(flags, self._all)
        fields: dict[str, torch.Tensor | np.ndarray] = {}
        for leaf in self._leaves:
            array = self._array(values, leaf)
            if array is None or not (leaf.parts or is_plain):
                return None
            for name, columns, shape in leaf.parts:
                if columns is None and shape == leaf.shape[1:]:
                    fields[name] = array[None]
                else:
                    part = array if columns is None else array[..., columns]
                    fields[name] = part.reshape(1, self._shape[1], *shape)
        return Rollout(fields, terminated, truncated, present, version, None, is_plain=is_plain)

    def _array(self, values: Any, leaf: _Leaf) -> np.ndarray | None:
        if len(leaf.path) == 1:
            values = values.get(leaf.path[0])
        else:
            for depth, key in enumerate(leaf.path):
                if depth and (type(values) is not dict or len(values) != self._sizes[leaf.path[:depth]]):
                    return None
                values = values.get(key)
        array = _as_array(values)
        return array if array is not None and array.shape == leaf.shape and array.dtype == leaf.dtype else None


def form_of(values: Mapping[str, Any], schema: Schema, parts: ObservationParts, num_envs: int) -> RepeatedStep | None:
    """Give the form of a step that `read_rollout` has taken; None if it is not of the common kind.

    The common kind: tensors on the CPU or arrays, alone or in dicts, kept as they are until a block is
    written, with flags that are bool.
    """
    if any(codec_of(field).stored_dtype is not None for field in schema.values()):
        return None
    leaves, flags = [], []
    sizes: dict[tuple[str, ...], int] = {(): len(values) - ("policy_version" in values)}
    for path, value in _items({name: one for name, one in values.items() if name != "policy_version"}, (), sizes):
        array = _as_array(value)
        if array is None:
            return None
        if path[0] in _END_FLAGS:
            if array.dtype != bool:
                return None
            flags.append(_Leaf(path, array.shape, array.dtype, ()))
            continue
        stored = None if path[0] in FINALS else _parts("/".join(path), array, schema, parts)
        if stored is None and path[0] not in FINALS:
            return None
        leaves.append(_Leaf(path, array.shape, array.dtype, stored or ()))
    return RepeatedStep(leaves, flags, sizes, (1, num_envs))


def _items(values: Mapping[str, Any], path: tuple[str, ...], sizes: dict[tuple[str, ...], int]) -> list[Any]:
    found: list[Any] = []
    for name, value in values.items():
        place = (*path, name)
        if type(value) is dict:
            sizes[place] = len(value)
            found += _items(value, place, sizes)
        else:
            found.append((place, value))
    return found


def _as_array(value: Any) -> np.ndarray | None:
    if type(value) is torch.Tensor:
        try:
            return value.numpy()
        except (TypeError, RuntimeError):  # on a device, with a gradient, bfloat16, ...
            return None
    return value if type(value) is np.ndarray and value.dtype.isnative else None


def _parts(
    name: str, array: np.ndarray, schema: Schema, parts: ObservationParts
) -> tuple[tuple[str, slice | None, tuple[int, ...]], ...] | None:
    """Give which fields are stored of an array, or None if it must be looked at each time."""
    if name in schema:
        field = schema[name]
        fits = array.dtype == field.numpy_dtype and prod(array.shape[1:]) == field.num_elements
        return ((name, None, field.shape),) if fits else None
    if name != OBSERVATION or parts.segments is None:
        return None
    found, start = [], 0
    for segment, shape in parts.segments.items():
        found.append((f"{OBSERVATION}/{segment}", slice(start, start + prod(shape)), shape))
        start += prod(shape)
    return tuple(found)
