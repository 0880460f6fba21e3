"""Describe a recording and list its episodes, as a dict or as text.

Only the metadata and the rewards of episodes are read, so large recordings are described fast.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...blocks.block_header import DATA, FORMAT_NAME, OPEN, TERMINATED, TRUNCATED, read_header
from ...blocks.folder_metadata import load_metadata
from ...formats.episode_writer import plain
from ...formats.open_recording import open as open_recording
from ...remote.locations import DataDir, origins_of
from ...sources.episode_info import end_of
from ...sources.episode_table import COLUMNS
from ...sources.live_source import is_block_folder
from ...sources.recordings.recording import Recording
from ..edit.pack_folder import open_folder
from .list_recordings import aligned

#: Bit flag of each kind of episode end in a block file.
ENDS = {"terminated": TERMINATED, "truncated": TRUNCATED, "open": OPEN}
#: Columns that `ls` prints without `--json`.
_LISTED = ("id", "length", "return", "ends", "success", "task")
#: Maximum number of characters that are printed of a metadata value.
_MAX_TEXT = 80


def describe(data_dir: str) -> dict[str, Any]:
    """Return the counts, fields, metadata and problems of a recording of any format.

    For a folder of block files, the result also has the number and the size of the blocks, and the
    compression of each field.
    """
    origin = origins_of(data_dir)[0]
    if is_block_folder(origin):
        return _describe_blocks(data_dir)
    return _describe_recording(data_dir)


def _describe_recording(data_dir: str) -> dict[str, Any]:
    recording = open_recording(data_dir)
    infos = [recording.info(number) for number in range(len(recording))]
    ends = Counter(end_of(info) for info in infos)
    lengths = np.array([info.length for info in infos], np.int64)
    problems = {str(number): str(problem) for number, problem in enumerate(recording.problems)}
    return {
        "data_dir": str(data_dir),
        "format": recording.format,
        "total_trajectories": len(infos),
        "total_timesteps": sum(info.length for info in infos),
        "ends": dict(ends),
        "lengths": _lengths(lengths),
        "with_final_observation": sum(len(info.final) > 0 for info in infos),
        "fields": recording.schema.to_json(),
        "metadata": plain(recording.metadata),
        "problems": problems,
        "advice": [str(remark) for remark in recording.advice],
    }


def listing(source: DataDir) -> list[dict[str, Any]]:
    """Return the metadata of each episode as a dict, such as its id, length and return.

    `source` is a path or a `Recording`. Unknown values are None.
    """
    recording = source if isinstance(source, Recording) else open_recording(source)
    table = recording.table
    success = {1: True, 0: False}
    columns = {name: table[name].tolist() for name in COLUMNS}
    columns["time"] = [None if np.isnat(time) else str(time) for time in table["time"]]
    columns["success"] = [success.get(value) for value in columns["success"]]
    rows = zip(*columns.values(), strict=True)
    return [dict(zip(columns, row, strict=True)) for row in rows]


def listing_as_text(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Convert the result of `listing` to text: a heading and one line per episode."""
    cells = [[_cell(row[name]) for name in _LISTED] for row in rows]
    return aligned([_LISTED, *cells])


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return "-" if math.isnan(value) else f"{value:.6g}"
    return str(value)


def _lengths(lengths: np.ndarray) -> dict[str, Any]:
    if not len(lengths):
        return {}
    return {
        "min": int(lengths.min()),
        "median": float(np.median(lengths)),
        "max": int(lengths.max()),
    }


def _describe_blocks(data_dir: str) -> dict[str, Any]:
    folder = open_folder(data_dir)
    index = folder.index
    data_blocks = [block for block in index.blocks if not block.is_edit]
    edit_blocks = [block for block in index.blocks if block.is_edit]
    metadata = load_metadata(folder.data_dir)
    ends = {name: int(((index.flags & flag) > 0).sum()) for name, flag in ENDS.items()}
    ends["in_progress"] = int((~index.is_complete()).sum())
    is_coded = any(field.codec != "raw" for field in (folder.schema or {}).values())
    return {
        "data_dir": str(data_dir),
        "format": FORMAT_NAME,
        "num_blocks": len(data_blocks),
        "num_bytes": sum(block.file_bytes for block in index.blocks),
        "num_writers": len(index.writers),
        "total_trajectories": len(index),
        "total_timesteps": index.num_frames,
        "ends": ends,
        "lengths": _lengths(index.lengths),
        "with_final_observation": int((index.final_block >= 0).sum()),
        "num_dropped": index.num_dropped,
        "num_dropped_later": sum(len(block.fragments) for block in edit_blocks),
        "num_broken": index.num_broken,
        "fields": metadata.schema.to_json() if metadata else [],
        "coded": _coded_fields([block.path for block in data_blocks]) if is_coded else {},
        "metadata": dict(metadata.context) if metadata else {},
        "problems": {name: str(problem) for name, problem in folder.problems.items()},
    }


def _coded_fields(paths: list[Path]) -> dict[str, dict[str, Any]]:
    """Return the compression of each encoded field in the block files `paths`.

    It consists of the names of the codecs, the number of bytes before and after encoding, and the
    largest error of a value.
    """
    fields: dict[str, dict[str, Any]] = {}
    for path in paths:
        header = read_header(path)
        for name, coding in header.codings.items():
            empty = {"codecs": [], "max_error": 0.0, "num_bytes": 0, "num_raw_bytes": 0}
            facts = fields.setdefault(name, empty)
            facts["codecs"] = sorted({*facts["codecs"], coding.codec})
            facts["max_error"] = max(facts["max_error"], coding.max_error)
            facts["num_raw_bytes"] += header.num_frames * header.schema[name].row_bytes
            chunks = header.chunks[DATA].get(name)
            if chunks is None:
                row_bytes = header.layouts[DATA].stored[name].row_bytes
                facts["num_bytes"] += header.num_frames * row_bytes
            else:
                facts["num_bytes"] += int(chunks.places[-1] - chunks.places[0])
    return fields


def as_text(about: dict[str, Any]) -> list[str]:
    """Convert the result of `describe` to lines of text."""
    is_blocks = "num_blocks" in about
    trajectories = f"{about['total_trajectories']:,} trajectories"
    lines = [f"{about['data_dir']}: {trajectories}, {about['total_timesteps']:,} frames"]
    if is_blocks:
        blocks = f"{about['num_blocks']:,} blocks of {about['num_writers']:,} writers"
        lines.append(f"  in {blocks}, {about['num_bytes'] / 1e6:,.1f} MB")
    else:
        lines.append(f"  format: {about['format']}")
    lines.append(_ends_line(about))
    if about["lengths"]:
        line = "  length: {min:,} to {max:,} frames, median {median:,.0f}"
        lines.append(line.format(**about["lengths"]))
    if about.get("num_dropped") or about.get("num_broken"):
        lines.append(_left_out_line(about))

    lines.append("  fields:")
    coded = about.get("coded", {})
    width = max((len(field["name"]) for field in about["fields"]), default=0)
    for field in about["fields"]:
        codec = _codec_text(field["codec"], coded.get(field["name"]))
        lines.append(f"    {field['name']:<{width}}  {field['dtype']}{field['shape']}{codec}")
    if about["metadata"]:
        lines.append("  metadata:")
        lines += [f"    {key}: {_short(value)}" for key, value in about["metadata"].items()]
    if about["problems"]:
        title = (
            "files skipped; run `rollout-data verify` for the reasons" if is_blocks else "problems"
        )
        lines.append(f"  {len(about['problems'])} {title}:")
        texts = about["problems"] if is_blocks else about["problems"].values()
        lines += [f"    {text}" for text in texts]
    if about.get("advice"):
        lines.append("  advice:")
        lines += [f"    {remark}" for remark in about["advice"]]
    return lines


def _ends_line(about: Mapping[str, Any]) -> str:
    texts = []
    for name, count in about["ends"].items():
        if count:
            texts.append(f"{count:,} {name.replace('_', ' ')}")
    ends = ", ".join(texts) or "none"
    return f"  ends: {ends}; {about['with_final_observation']:,} with a final observation"


def _left_out_line(about: Mapping[str, Any]) -> str:
    dropped = f"{about['num_dropped']:,} dropped"
    if about["num_dropped_later"]:
        dropped += f" ({about['num_dropped_later']:,} by edits)"
    return f"  left out: {dropped}, {about['num_broken']:,} with a missing part"


def _codec_text(codec: str, coded: Mapping[str, Any] | None) -> str:
    """Return codec, compressed size and error of a field as text; "" without a codec.

    Args:
        codec: Name of the codec in the schema.
        coded: Result of `_coded_fields` for the field; None if no block has the field encoded.
    """
    text = "" if codec == "raw" else f"  {codec}"
    if not coded:
        return text
    if coded["codecs"] != [codec]:
        text += f" ({', '.join(coded['codecs'])})"
    share = coded["num_bytes"] / max(1, coded["num_raw_bytes"])
    error = f"error up to {coded['max_error']:.3g}" if coded["max_error"] else "lossless"
    return f"{text}: {share:.1%} of its size, {error}"


def strict_json(about: Any) -> str:
    """Convert a value to JSON text. NaN and infinities become null, because JSON cannot express them."""
    text = json.dumps(_strict(about), indent=2, default=str, allow_nan=False)
    return text.replace("\x7f", "\\u007f")


def _strict(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _strict(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _short(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 3] + "..."
