"""`EpisodeInfo`: the description of one episode, and how an episode ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from storage.core.fields import Schema

NO_FIELDS = Schema([])
#: Metadata of a converted episode: names of its fields that were False or NaN because the source
#: lacks them.
ABSENT = "absent_fields"


@dataclass(frozen=True, eq=False)
class EpisodeInfo:
    """The description of an episode, known without reading a row.

    Attributes:
        name: Name in the file: "demo_10", "17".
        length: Steps T; at least 1.
        schema: The numeric fields, one row per step: "action", "reward", "observation" where the
            file has a single array, otherwise "observation/<name>"; any other field by its name in
            the file. Names are those of the file without a leading "observation.", "observations/"
            or "obs/"; nested ones are joined by "/".
        texts: Names of the text fields, one text per step.
        final: Fields of the observation after the last step, as named in `schema` and `texts`;
            empty where the file has none. `is_text` marks a text.
        terminated, truncated: How the episode ended; None where the file does not state it.
        success: None where the file does not state it.
        task: The task in words; "" if unknown.
        metadata: Everything else about the episode: plain values, texts and small arrays.
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
    """Name how an episode ended: "terminated", "truncated", "unknown", or "open" if the recording was cut there."""
    if info.terminated or info.truncated:
        return "terminated" if info.terminated else "truncated"
    is_known = None not in (info.terminated, info.truncated) or info.metadata.get("ends") == "open"
    return "open" if is_known else "unknown"
