"""Options of a writer for the components of an observation, and the split of flat observations."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from math import prod
from typing import Any

from storage.codecs.codec_chains import check_writable
from storage.core.arguments import is_whole
from storage.core.fields import check_same_names
from storage.errors import SchemaError, UsageError, nearest

_MAKE = "create a RolloutWriter"


def _checked_components(name: str, components: Any) -> dict[str, Any]:
    if not (components is None or isinstance(components, Mapping)):
        raise UsageError(
            f"cannot {_MAKE} with {name}: expected a mapping of component names, got "
            f"{components!r}."
        )
    return dict(components or {})


def checked_segments(segments: Any) -> dict[str, tuple[int, ...]]:
    """Return `obs_segments` as component -> shape; empty for None.

    Raises:
        UsageError: `segments` is no mapping, or a name or shape is invalid.
    """
    shapes = _checked_components("obs_segments", segments)
    for name, shape in shapes.items():
        try:
            shapes[name] = (int(shape),) if is_whole(shape) else tuple(map(operator.index, shape))
        except (TypeError, ValueError):
            raise UsageError(
                f"cannot {_MAKE} with obs_segments: expected a shape for each component, got "
                f"{segments!r}."
            ) from None
        if not name or min(shapes[name], default=1) < 1:
            raise UsageError(
                f"cannot {_MAKE} with obs_segments: expected named, non-empty shapes, got "
                f"{name!r}: {shapes[name]}."
            )
    return shapes


def checked_codecs(mapping: Any, segments: Mapping[str, Any]) -> dict[str, str]:
    """Return `obs_disassemble_mapping` as component -> codec; empty for None.

    Raises:
        UsageError: `mapping` is no mapping, a codec cannot be written, or a component is not in
            `segments`.
    """
    codecs = _checked_components("obs_disassemble_mapping", mapping)
    for name, codec in codecs.items():
        try:
            check_writable(str(codec))
        except UsageError as error:
            raise UsageError(
                f"obs_disassemble_mapping: codec {codec!r} of {name!r}: {error.message}"
            ) from error
        if segments and name not in segments:
            raise UsageError(
                f"cannot {_MAKE} with obs_disassemble_mapping: expected names of obs_segments "
                f"({nearest(name, segments)}), got {name!r}."
            )
    return codecs


def split_components(
    action: str,
    leaves: dict[str, Any],
    head: str,
    segments: Mapping[str, tuple[int, ...]],
    *num_leads: int,
) -> dict[str, Any]:
    """Replace a flat observation by one view per segment, or check the shapes of its components.

    Args:
        action: The call, for errors.
        leaves: Values of a record by flat name.
        head: Name of the observation.
        segments: Component -> shape, in order.
        num_leads: Possible numbers of axes before the shape of a component. The first that fits is
            used.

    Raises:
        SchemaError: The width, a shape or the names of the components differ.
    """
    wanted = {f"{head}/{name}": shape for name, shape in segments.items()}
    parts = {name: leaf for name, leaf in leaves.items() if name.partition("/")[0] == head}
    others = {name: leaf for name, leaf in leaves.items() if name not in parts}
    if head in parts:
        flat = parts[head]
        width = sum(map(prod, wanted.values()))
        if flat.ndim < 2 or flat.shape[-1] != width:
            expected = f"{width} values in the last dimension, the sum of obs_segments"
            raise SchemaError(
                f"cannot {action} with the field {head!r}: expected {expected}, got shape "
                f"{tuple(flat.shape)}."
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
                expected = f"shape [..., {shape}] as in obs_segments"
                raise SchemaError(
                    f"cannot {action} with the field {name!r}: expected {expected}, got "
                    f"{tuple(leaf.shape)}."
                )
            parts[name] = leaf.reshape(*leaf.shape[: leads[0]], *shape)
        parts = {name: parts[name] for name in wanted}
    return {**parts, **others}
