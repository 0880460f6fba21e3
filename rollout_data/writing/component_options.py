"""Components of an observation: checks of the writer's options, and the split into components.

A component is a part of the observation with its own name and shape, which is stored as a field.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from math import prod
from typing import Any

from storage.codecs.codec_chains import check_writable
from storage.core.arguments import is_whole
from storage.core.fields import check_same_names
from storage.errors import SchemaError, UsageError, nearest


def _checked_components(name: str, components: Any) -> dict[str, Any]:
    if not (components is None or isinstance(components, Mapping)):
        raise UsageError(f"{name} must be a mapping with component names, got {components!r}.")
    return dict(components or {})


def checked_segments(segments: Any) -> dict[str, tuple[int, ...]]:
    """Check the argument `obs_segments`; return a mapping of components to shapes.

    The mapping is empty for None.

    Raises:
        UsageError: `segments` is no mapping, or a name or shape is invalid.
    """
    shapes = _checked_components("obs_segments", segments)
    for name, shape in shapes.items():
        try:
            shapes[name] = (int(shape),) if is_whole(shape) else tuple(map(operator.index, shape))
        except (TypeError, ValueError):
            raise UsageError(
                f"obs_segments must have a shape for each component, got {segments!r}."
            ) from None
        if not name or min(shapes[name], default=1) < 1:
            raise UsageError(
                f"obs_segments has an empty name, or a size below 1: {name!r}: {shapes[name]}."
            )
    return shapes


def checked_codecs(mapping: Any, segments: Mapping[str, Any]) -> dict[str, str]:
    """Check the argument `obs_disassemble_mapping`; return a mapping of components to codecs.

    The mapping is empty for None.

    Raises:
        UsageError: `mapping` is no mapping, a codec cannot be written, or a component is not in
            `segments`.
    """
    codecs = _checked_components("obs_disassemble_mapping", mapping)
    for name, codec in codecs.items():
        try:
            check_writable(str(codec))
        except UsageError as error:
            raise UsageError(f"obs_disassemble_mapping of {name!r}: {error.message}") from error
        if segments and name not in segments:
            raise UsageError(
                f"obs_disassemble_mapping has the name {name!r}, which is not in obs_segments "
                f"({nearest(name, segments)})."
            )
    return codecs


def split_components(
    leaves: dict[str, Any],
    head: str,
    segments: Mapping[str, tuple[int, ...]],
    *num_leads: int,
) -> dict[str, Any]:
    """Split a flat observation into one view per component.

    An observation that is a mapping of components already is only checked and reshaped.

    Args:
        leaves: Values of a record by flat name.
        head: Name of the observation.
        segments: Maps components to shapes, in the order of the flat observation.
        num_leads: Possible numbers of axes before the shape of a component. The first number that
            matches is used.

    Returns:
        All values of the record, with a value per component.

    Raises:
        SchemaError: The width, a shape or the names of the components are wrong.
    """
    wanted = {f"{head}/{name}": shape for name, shape in segments.items()}
    parts = {name: leaf for name, leaf in leaves.items() if name.partition("/")[0] == head}
    others = {name: leaf for name, leaf in leaves.items() if name not in parts}
    if head in parts:
        flat = parts[head]
        width = sum(map(prod, wanted.values()))
        if flat.ndim < 2 or flat.shape[-1] != width:
            raise SchemaError(
                f"field {head!r} has shape {tuple(flat.shape)}, expected {width} values in the "
                "last dimension, the sum of obs_segments."
            )
        parts = {}
        start = 0
        for name, shape in wanted.items():
            stop = start + prod(shape)
            parts[name] = flat[..., start:stop].reshape(*flat.shape[:-1], *shape)
            start = stop
    elif parts:
        check_same_names(wanted, parts)
        for name, shape in wanted.items():
            leaf = parts[name]
            forms = (shape, (prod(shape),))
            leads = [num for num in num_leads if leaf.ndim >= num and leaf.shape[num:] in forms]
            if not leads:
                raise SchemaError(
                    f"field {name!r} has shape {tuple(leaf.shape)}, expected [..., {shape}] as in "
                    "obs_segments."
                )
            parts[name] = leaf.reshape(*leaf.shape[: leads[0]], *shape)
        parts = {name: parts[name] for name in wanted}
    return {**parts, **others}
