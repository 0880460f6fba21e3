"""`common_fields`: the fields of a stream whose episodes have different fields."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from storage.core.fields import Field, Schema

#: Names of fields that batches add, so recorded fields of a stream cannot have them.
RESERVED = (
    "done", "timeout", "end_unknown", "is_first", "is_last", "valid", "mask", "next_mask", "stream_id", "extras",
    "next_observation", "next_privileged_observation",
)  # fmt: skip
FLOATS = ("float16", "bfloat16", "float32", "float64")
_NOT_SHARED = "some episodes do not have it"


class Fit(NamedTuple):
    """The chosen fields of a stream, and the episodes and fields that are left out of it.

    Attributes:
        schema: The fields of the stream.
        left_out: Maps the schemas of left-out episodes to the difference from the stream's fields.
        lacking: Maps the schemas of streamed episodes to their missing fields, which read as NaN.
        dropped: Maps the names of left-out fields to the reason.
        forms: Distinct schemas of the streamed episodes.
    """

    schema: Schema
    left_out: dict[Schema, str]
    lacking: dict[Schema, list[str]]
    dropped: dict[str, str]
    forms: list[Schema]


def common_fields(schemas: Iterable[Schema], keeps_episodes: bool = False) -> Fit:
    """Choose the fields of a stream, and the episodes and fields to leave out of it.

    Episodes whose fields contradict the fields of most episodes are left out. A field that is
    missing from some episodes becomes a float field and reads as NaN in these episodes. Integer
    fields of several axes, such as pictures, must be in all episodes.

    Args:
        schemas: The fields of each episode.
        keeps_episodes: If some episodes have no pictures, leave out the pictures instead of the
            episodes.
    """
    fields: dict[str, Field] = {}
    left_out: dict[Schema, str] = {}
    counts = Counter(schemas)
    all_names = dict.fromkeys(name for schema in counts for name in schema)
    reserved = [name for name in all_names if name.partition("/")[0] in RESERVED]
    dropped = dict.fromkeys(reserved, "its name is reserved for batches")
    # The most frequent schema comes first, so that rare schemas are compared with it.
    for schema, _ in counts.most_common():
        own_fields = {}
        for name, field in schema.items():
            if field.num_elements and name not in dropped:
                own_fields[name] = field
        missing = []
        for name, field in fields.items():
            if name not in own_fields and not _can_lack(field):
                missing.append(name)

        difference = _difference(fields, own_fields)
        if missing and not keeps_episodes:
            difference = f"no {missing[0]!r}"
        if difference:
            left_out[schema] = difference
            continue
        for name in missing:
            del fields[name]
            dropped[name] = _NOT_SHARED
        is_first = not fields
        for name, field in own_fields.items():
            if name in fields:
                continue
            if is_first or _can_lack(field):
                fields[name] = field
            else:
                dropped[name] = _NOT_SHARED

    kept = [schema for schema in counts if schema not in left_out]
    lacking_of = {schema: [name for name in fields if name not in schema] for schema in kept}
    lacking = {schema: names for schema, names in lacking_of.items() if names}
    for name in {name for names in lacking.values() for name in names}:
        if fields[name].dtype not in FLOATS:
            # Integers have no NaN. float32 is exact for integers of 16 bits.
            wide = "float64" if fields[name].numpy_dtype.itemsize > 2 else "float32"
            fields[name] = replace(fields[name], dtype=wide)
    return Fit(Schema(fields.values()), left_out, lacking, dropped, kept)


def _can_lack(field: Field) -> bool:
    """Return whether episodes may lack this field. Its values in these episodes read as NaN."""
    return field.dtype in FLOATS or len(field.shape) <= 1


def _difference(fields: Mapping[str, Field], others: Mapping[str, Field]) -> str:
    """Describe the first difference in dtype, shape or name between the fields of two episodes.

    The result is "" if the fields do not contradict each other.
    """
    for name, field in fields.items():
        other = others.get(name, field)
        if (field.dtype, field.shape) != (other.dtype, other.shape):
            return f"{name!r} as {other.dtype}{list(other.shape)} instead of {field.dtype}{list(field.shape)}"
    for known in fields:
        for name in others:
            if known.startswith(f"{name}/") or name.startswith(f"{known}/"):
                return f"{name!r} instead of {known!r}"
    return ""
