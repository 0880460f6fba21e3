"""`EpisodeInfo`: description of an episode, known without reading its rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from storage.core.fields import Schema

NO_FIELDS = Schema([])
#: Key in the metadata of a converted episode. It lists the fields that the original data do not
#: contain. Their stored values are False or NaN.
ABSENT = "absent_fields"


@dataclass(frozen=True, eq=False)
class EpisodeInfo:
    """Description of an episode: its name, length, fields, end and metadata.

    Attributes:
        name: Name in the file, such as "demo_10" or "17".
        length: Number of steps, T >= 1.
        schema: The numeric fields, one row per step: "action", "reward", and "observation" if the
            file has a single array, otherwise "observation/<name>". Other fields keep their names
            in the file, without a leading "observation.", "observations/" or "obs/". The parts of
            nested names are joined by "/".
        texts: Names of the text fields, one text per step.
        final: Fields of the observation after the last step, with the names in `schema` and
            `texts`; empty if the file has no final observation. `is_text` marks a text.
        terminated, truncated: Whether the episode was terminated or truncated; None if the file
            does not state it.
        success: Whether the episode succeeded; None if the file does not state it.
        task: Description of the task; "" if unknown.
        metadata: Further metadata: plain values, texts and small arrays.
        source: Private data with which the reader finds the episode.
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
