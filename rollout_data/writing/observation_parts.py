"""How an observation is cut into components.

One rule: what `obs_segments` says about a flat observation, and about components given one by
one, is decided here; codecs themselves live in `storage/codecs/codecs.py`.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch

from storage.codecs.codecs import check_writable
from storage.core.tree import check_same_names
from storage.errors import SchemaError, UsageError, nearest


@dataclass(frozen=True)
class ObservationParts:
    """How a flat observation is cut into components, and how each is coded.

    Attributes:
        segments: Component -> shape, in the order of the flat observation; None takes the
            observation as it comes.
        codecs: Component -> codec name; "raw" for components not named.
    """

    segments: Mapping[str, tuple[int, ...]] | None
    codecs: Mapping[str, str]

    def split(self, flat: dict[str, torch.Tensor], prefix: str, *num_leads: int) -> dict[str, torch.Tensor]:
        """Replace the tensor at `prefix` by one per segment (views); check components given one by one.

        `num_leads` are the numbers of axes that may stand before a component's shape, the likelier one first.
        """
        if self.segments is None:
            return flat
        parts = {name: tensor for name, tensor in flat.items() if name.startswith(prefix + "/")}
        others = {name: tensor for name, tensor in flat.items() if name != prefix and name not in parts}
        if prefix in flat:
            parts = self._cut(flat[prefix], prefix)
        elif parts:
            wanted = {f"{prefix}/{name}": shape for name, shape in self.segments.items()}
            check_same_names(wanted, parts, "take the observation")
            parts = {name: _shaped(name, parts[name], shape, num_leads) for name, shape in wanted.items()}
        return {**parts, **others}

    def _cut(self, tensor: torch.Tensor, prefix: str) -> dict[str, torch.Tensor]:
        assert self.segments is not None
        width = sum(prod(shape) for shape in self.segments.values())
        if tensor.ndim < 2 or tensor.shape[-1] != width:
            expected = f"{width} values in the last dimension, as obs_segments add up to"
            raise SchemaError("split", repr(prefix), expected, f"shape {tuple(tensor.shape)}")
        parts, start = {}, 0
        for name, shape in self.segments.items():
            part = tensor[..., start : start + prod(shape)]
            parts[f"{prefix}/{name}"] = part.reshape(*tensor.shape[:-1], *shape)
            start += prod(shape)
        return parts


def _shaped(name: str, tensor: torch.Tensor, shape: tuple[int, ...], num_leads: tuple[int, ...]) -> torch.Tensor:
    """Bring a component of shape `[..., *shape]` or flat `[..., D]` to its declared shape."""
    for num_lead in num_leads:
        if tensor.ndim >= num_lead and tuple(tensor.shape[num_lead:]) in (shape, (prod(shape),)):
            return tensor.reshape(*tensor.shape[:num_lead], *shape)
    raise SchemaError(
        "take the component", repr(name), f"shape [..., {shape}] as in obs_segments", str(tuple(tensor.shape))
    )


def observation_parts(
    segments: Mapping[str, Sequence[int]] | None, codecs: Mapping[str, str] | None
) -> ObservationParts:
    """Check `obs_segments` and `obs_disassemble_mapping` as far as that goes without data."""
    for what, given in (("obs_segments", segments), ("obs_disassemble_mapping", codecs)):
        if given is not None and not isinstance(given, Mapping):
            raise UsageError("make a RolloutWriter", f"with {what}", "a mapping of component names", repr(given))
    shapes = None
    if segments:
        try:
            shapes = {
                name: (shape,) if isinstance(shape, int) else tuple(map(operator.index, shape))
                for name, shape in segments.items()
            }
        except (TypeError, ValueError):
            expected = "a shape for each component"
            raise UsageError("make a RolloutWriter", "with obs_segments", expected, repr(segments)) from None
        for name, shape in shapes.items():
            if not name or any(size < 1 for size in shape):
                raise UsageError(
                    "make a RolloutWriter", "with obs_segments", "named, non-empty shapes", f"{name!r}: {shape}"
                )
    for name, codec in (codecs or {}).items():
        try:
            check_writable(str(codec))
        except UsageError as error:
            where = f"with the codec of {name!r}"
            raise UsageError("make a RolloutWriter", where, error.expected, repr(codec), error.advice) from error
        if shapes is not None and name not in shapes:
            raise UsageError(
                "make a RolloutWriter",
                "with obs_disassemble_mapping",
                f"names of obs_segments ({nearest(name, shapes)})",
                repr(name),
            )
    return ObservationParts(shapes, dict(codecs or {}))
