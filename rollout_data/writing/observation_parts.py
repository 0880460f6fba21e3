"""How an observation is cut into components.

One rule: what `obs_segments` says about a flat observation, and about components given one by
one, is decided here; codecs themselves live in `storage/codecs/codecs.py`.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch

from storage.codecs.codecs import check_writable
from storage.core.arguments import is_whole
from storage.core.tree import check_same_names
from storage.errors import SchemaError, UsageError, nearest

_MAKE = "make a RolloutWriter"


@dataclass(frozen=True)
class ObservationParts:
    """How a flat observation is cut into components, and how each is coded.

    Attributes:
        segments: Component -> shape, in the order of the flat observation; None takes the observation as it comes.
        codecs: Component -> codec name; "raw" for components not named.
    """

    segments: Mapping[str, tuple[int, ...]] | None
    codecs: Mapping[str, str]

    def split(self, flat: dict[str, Any], prefix: str, *num_leads: int) -> dict[str, Any]:
        """Replace the array or tensor at `prefix` by one per segment (views); check components given one by one.

        `num_leads` are the numbers of axes that may stand before a component's shape, the likelier one first.
        """
        if self.segments is None:
            return flat
        parts = {name: leaf for name, leaf in flat.items() if name.startswith(prefix + "/")}
        others = {name: leaf for name, leaf in flat.items() if name != prefix and name not in parts}
        if prefix in flat:
            parts = self._cut(flat[prefix], prefix)
        elif parts:
            wanted = {f"{prefix}/{name}": shape for name, shape in self.segments.items()}
            check_same_names(wanted, parts, "take the observation")
            parts = {name: _shaped(name, parts[name], shape, num_leads) for name, shape in wanted.items()}
        return {**parts, **others}

    def _cut(self, leaf: np.ndarray | torch.Tensor, prefix: str) -> dict[str, np.ndarray | torch.Tensor]:
        sizes = {name: (prod(shape), shape) for name, shape in (self.segments or {}).items()}
        width = sum(size for size, _ in sizes.values())
        if leaf.ndim < 2 or leaf.shape[-1] != width:
            expected = f"{width} values in the last dimension, as obs_segments add up to"
            raise SchemaError("split", repr(prefix), expected, f"shape {tuple(leaf.shape)}")
        parts, start = {}, 0
        for name, (size, shape) in sizes.items():
            parts[f"{prefix}/{name}"] = leaf[..., start : start + size].reshape(*leaf.shape[:-1], *shape)
            start += size
        return parts


def _shaped(name: str, leaf: Any, shape: tuple[int, ...], num_leads: tuple[int, ...]) -> Any:
    """Bring a component of shape `[..., *shape]` or flat `[..., D]` to its declared shape."""
    for num_lead in num_leads:
        if leaf.ndim >= num_lead and leaf.shape[num_lead:] in (shape, (prod(shape),)):
            return leaf.reshape(*leaf.shape[:num_lead], *shape)
    expected = f"shape [..., {shape}] as in obs_segments"
    raise SchemaError("take the component", repr(name), expected, str(tuple(leaf.shape)))


def observation_parts(
    segments: Mapping[str, Sequence[int]] | None, codecs: Mapping[str, str] | None
) -> ObservationParts:
    """Check `obs_segments` and `obs_disassemble_mapping` as far as that goes without data."""
    for what, given in (("obs_segments", segments), ("obs_disassemble_mapping", codecs)):
        if given is not None and not isinstance(given, Mapping):
            raise UsageError(_MAKE, f"with {what}", "a mapping of component names", repr(given))
    shapes = {name: _shape(shape, segments) for name, shape in (segments or {}).items()}
    for name, shape in shapes.items():
        if not name or any(size < 1 for size in shape):
            raise UsageError(_MAKE, "with obs_segments", "named, non-empty shapes", f"{name!r}: {shape}")
    for name, codec in (codecs or {}).items():
        try:
            check_writable(str(codec))
        except UsageError as error:
            where = f"with the codec of {name!r}"
            raise UsageError(_MAKE, where, error.expected, repr(codec), error.advice) from error
        if shapes and name not in shapes:
            expected = f"names of obs_segments ({nearest(name, shapes)})"
            raise UsageError(_MAKE, "with obs_disassemble_mapping", expected, repr(name))
    return ObservationParts(shapes or None, dict(codecs or {}))


def _shape(shape: Any, segments: Any) -> tuple[int, ...]:
    try:
        return (int(shape),) if is_whole(shape) else tuple(map(operator.index, shape))
    except (TypeError, ValueError):
        raise UsageError(_MAKE, "with obs_segments", "a shape for each component", repr(segments)) from None
