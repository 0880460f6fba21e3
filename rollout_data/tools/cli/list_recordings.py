"""A row about each recording of a folder that holds several."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from storage.errors import RolloutDataError

from ...formats.open_recording import open as open_recording
from ...sources.block_source import Blocks

#: Columns of a row, in the order of the text.
_COLUMNS = ("name", "format", "episodes", "frames", "problems")


def row_about(path: Path) -> dict[str, Any]:
    """Describe a recording in a row; `error` says why it cannot be opened, and is None otherwise."""
    try:
        recording = open_recording(path)
        lengths = recording.column("length")
        counts = {"episodes": len(recording), "frames": int(np.sum(lengths)), "problems": len(recording.problems)}
    except (RolloutDataError, OSError) as error:
        return {"name": path.name, **dict.fromkeys(_COLUMNS[1:]), "error": str(error)}
    return {"name": path.name, "format": recording.format or Blocks.format, **counts, "error": None}


def rows_about(paths: Sequence[Path], more: Callable[[Path], Mapping[str, Any]] | None = None) -> list[dict[str, Any]]:
    """Describe recordings, one row each, with `more` columns."""
    return [{**row_about(path), **(more(path) if more else {})} for path in paths]


def as_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lay rows out for people: a line for each recording."""
    names = [name for name in rows[0] if name != "error"]
    cells = [names, *([_cell(row[name]) for name in names] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(names))]
    lines = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in cells]
    errors = ["", *(f"  {row['error']}" if row["error"] else "" for row in rows)]
    return [line + error for line, error in zip(lines, errors, strict=True)]


def _cell(value: Any) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return "-" if value is None else str(value)
