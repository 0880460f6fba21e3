"""`common_fields`: the fields of a stream of episodes that have different fields."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from storage.core.fields import Field, Schema

#: Names that batches use for their own fields.
RESERVED = (
    "done", "timeout", "end_unknown", "is_first", "is_last", "valid", "mask", "next_mask", "stream_id", "extras",
    "next_observation", "next_privileged_observation",
)  # fmt: skip
FLOATS = ("float16", "bfloat16", "float32", "float64")


class Fit(NamedTuple):
    """The fields of a stream of episodes, and the episodes and fields that do not fit.

    Attributes:
        schema: The fields of the stream.
        left_out: Schema of left-out episodes -> difference from the fields of the stream.
        lacking: Schema of streamed episodes -> names of their missing fields, which read as NaN.
        dropped: Name of a left-out field -> the reason.
        forms: Schemas of the streamed episodes, each once.
    """

    schema: Schema
    left_out: dict[Schema, str]
    lacking: dict[Schema, list[str]]
    dropped: dict[str, str]
    forms: list[Schema]


def common_fields(schemas: Iterable[Schema], keeps_episodes: bool = False) -> Fit:
    """Return the fields of a stream of episodes, and the episodes and fields that do not fit.

    Episodes that contradict the fields of most episodes are left out. A field that some episodes
    lack becomes a float field and reads as NaN in these episodes. Pictures and other integers of
    several axes must be in all episodes.

    Args:
        schemas: The fields of each episode.
        keeps_episodes: Leave out pictures that some episodes lack, instead of these episodes.
    """
    fields: dict[str, Field] = {}
    left_out: dict[Schema, str] = {}
    counts = Counter(schemas)
    all_names = dict.fromkeys(name for schema in counts for name in schema)
    taken = [name for name in all_names if name.partition("/")[0] in RESERVED]
    dropped = dict.fromkeys(taken, "its name is reserved for batches")
    for schema, _ in counts.most_common():
        own_fields = {
            name: field
            for name, field in schema.items()
            if field.num_elements and name not in dropped
        }
        missing = [
            name
            for name, field in fields.items()
            if name not in own_fields and not _can_lack(field)
        ]
        difference = (
            f"no {missing[0]!r}"
            if missing and not keeps_episodes
            else _difference(fields, own_fields)
        )
        if difference:
            left_out[schema] = difference
            continue
        for name in missing:
            del fields[name]
            dropped[name] = "some episodes do not have it"
        new = [name for name in own_fields if name not in fields]
        if fields:
            dropped |= {
                name: "some episodes do not have it"
                for name in new
                if not _can_lack(own_fields[name])
            }
        fields |= {name: own_fields[name] for name in new if name not in dropped}
    kept = [schema for schema in counts if schema not in left_out]
    lacking_of = {schema: [name for name in fields if name not in schema] for schema in kept}
    lacking = {schema: names for schema, names in lacking_of.items() if names}
    for name in {name for names in lacking.values() for name in names}:
        if fields[name].dtype not in FLOATS:
            wide = "float64" if fields[name].numpy_dtype.itemsize > 2 else "float32"
            fields[name] = replace(fields[name], dtype=wide)
    return Fit(Schema(fields.values()), left_out, lacking, dropped, kept)


def _can_lack(field: Field) -> bool:
    """Return whether a field may be missing from some episodes, where it reads as NaN."""
    return field.dtype in FLOATS or len(field.shape) <= 1


def _difference(fields: Mapping[str, Field], others: Mapping[str, Field]) -> str:
    """Return the first contradiction between the fields of an episode and `fields`, or ""."""
    for name, field in fields.items():
        other = others.get(name, field)
        if (field.dtype, field.shape) != (other.dtype, other.shape):
            return f"{name!r} as {other.dtype}{list(other.shape)} instead of {field.dtype}{list(field.shape)}"
    for known in fields:
        for name in others:
            if known.startswith(f"{name}/") or name.startswith(f"{known}/"):
                return f"{name!r} instead of {known!r}"
    return ""
