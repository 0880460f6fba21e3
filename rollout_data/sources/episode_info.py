"""`EpisodeInfo`: the description of one episode, and `end_of`: how an episode ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from storage.core.fields import Schema

NO_FIELDS = Schema([])
#: Key in the metadata of a converted episode: names of fields that are False or NaN because the
#: source lacks these fields.
ABSENT = "absent_fields"


@dataclass(frozen=True, eq=False)
class EpisodeInfo:
    """The description of an episode, which is known without reading rows.

    Attributes:
        name: Name in the file: "demo_10", "17".
        length: Number of steps, T >= 1.
        schema: The numeric fields, one row per step: "action", "reward", "observation" if the file
            has a single array, otherwise "observation/<name>". Other fields have their names in the
            file, without a leading "observation.", "observations/" or "obs/". The parts of nested
            names are joined by "/".
        texts: Names of the text fields, one text per step.
        final: Fields of the observation after the last step, as named in `schema` and `texts`;
            empty if the file has no final observation. `is_text` marks a text.
        terminated, truncated: How the episode ended; None if the file does not state it.
        success: Whether the episode succeeded; None if the file does not state it.
        task: The task in words; "" if unknown.
        metadata: Further metadata: plain values, texts and small arrays.
        source: Private data of the reader, to find the episode again.
    """

    name: str
    length: int
    schema: Schema
    texts: tuple[str, ...] = ()
    final: Schema = NO_FIELDS
    terminated: bool | None = None
    truncated: bool | None = None
    success: bool | None = None
    task: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    source: Any = None


def end_of(info: EpisodeInfo) -> str:
    """Return how an episode ended: "terminated", "truncated", "open" (cut off) or "unknown"."""
    if info.terminated or info.truncated:
        return "terminated" if info.terminated else "truncated"
    is_known = None not in (info.terminated, info.truncated) or info.metadata.get("ends") == "open"
    return "open" if is_known else "unknown"
