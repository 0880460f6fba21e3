"""Table of the recordings in a folder that contains several recordings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from storage.errors import RolloutDataError

from ...formats.open_recording import open as open_recording

#: Columns of a row in printed order, except `error`.
_COLUMNS = ("name", "format", "episodes", "frames", "problems")


def recording_row(path: Path) -> dict[str, Any]:
    """Return the table row of a recording: its counts, or `error` if it cannot be opened."""
    try:
        recording = open_recording(path)
        num_frames = int(np.sum(recording.column("length")))
    except (RolloutDataError, OSError) as error:
        unknown = dict.fromkeys(_COLUMNS[1:])
        return {"name": path.name, **unknown, "error": str(error)}
    return {
        "name": path.name,
        "format": recording.format,
        "episodes": len(recording),
        "frames": num_frames,
        "problems": len(recording.problems),
        "error": None,
    }


def recording_rows(
    paths: Sequence[Path],
    more: Callable[[Path], Mapping[str, Any]] | None = None,
) -> list[dict[str, Any]]:
    """Return the table rows of several recordings.

    Args:
        paths: Paths of the recordings.
        more: Function that takes the path of a recording and returns additional columns of its
            row.
    """
    rows = []
    for path in paths:
        row = recording_row(path)
        if more is not None:
            row.update(more(path))
        rows.append(row)
    return rows


def rows_as_text(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Convert table rows to text: a heading and one line per recording."""
    names = [name for name in rows[0] if name != "error"]
    cells = [[_cell(row[name]) for name in names] for row in rows]
    heading, *lines = aligned([names, *cells])
    texts = [heading]
    for line, row in zip(lines, rows, strict=True):
        texts.append(f"{line}  {row['error']}" if row["error"] else line)
    return texts


def aligned(cells: Sequence[Sequence[str]]) -> list[str]:
    """Join rows of cells to lines, with cells padded so that columns are aligned."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]


def _cell(value: Any) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return "-" if value is None else str(value)
