"""What a recording holds, as a dict and as text; only descriptions and rewards are read."""

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
from ...remote.locations import DataDir, RemotePath, origins_of
from ...sources.block_source import Blocks
from ...sources.episode import end_of
from ...sources.episode_table import COLUMNS
from ...sources.recording import Recording
from ...sources.source import kind_of
from ..edit.pack_folder import open_folder

#: How trajectories end: name -> flag.
ENDS = {"terminated": TERMINATED, "truncated": TRUNCATED, "open": OPEN}


def describe(data_dir: str) -> dict[str, Any]:
    """Collect counts, fields, metadata and problems of a recording of any format; of our own, blocks and codecs too."""
    origin = origins_of(data_dir)[0]
    if isinstance(origin.path, RemotePath) or kind_of(origin) not in (Blocks, None):
        return _describe_recording(data_dir)
    return _describe_blocks(data_dir)


def _describe_recording(data_dir: str) -> dict[str, Any]:
    recording = open_recording(data_dir)
    infos = [recording.info(number) for number in range(len(recording))]
    ends = Counter(end_of(info) for info in infos)
    return {
        "data_dir": str(data_dir),
        "format": recording.format,
        "total_trajectories": len(infos),
        "total_timesteps": sum(info.length for info in infos),
        "ends": dict(ends),
        "lengths": _lengths(np.array([info.length for info in infos], np.int64)),
        "with_final_observation": sum(len(info.final) > 0 for info in infos),
        "fields": recording.schema.to_json(),
        "metadata": plain(recording.metadata),
        "problems": {str(number): str(problem) for number, problem in enumerate(recording.problems)},
        "advice": [str(remark) for remark in recording.advice],
    }


def listing(source: DataDir) -> list[dict[str, Any]]:
    """Return the table of episodes of a path or `Recording` as plain dicts; None stands for what is unknown."""
    recording = source if isinstance(source, Recording) else open_recording(source)
    table = recording.table
    success = {1: True, 0: False}
    times = [None if np.isnat(time) else str(time) for time in table["time"]]
    columns = {name: table[name].tolist() for name in COLUMNS} | {"time": times}
    columns["success"] = [success.get(value) for value in columns["success"]]
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def listing_as_text(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lay `listing`'s answer out for people: a line for each episode."""
    names = ["id", "length", "return", "ends", "success", "task"]
    cells = [names, *([_cell(row[name]) for name in names] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(names))]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in cells]


def _cell(value: Any) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _lengths(lengths: np.ndarray) -> dict[str, Any]:
    if not len(lengths):
        return {}
    return {"min": int(lengths.min()), "median": float(np.median(lengths)), "max": int(lengths.max())}


def _describe_blocks(data_dir: str) -> dict[str, Any]:
    folder = open_folder(data_dir)
    index = folder.index
    blocks = [block for block in index.blocks if not block.is_edit]
    metadata = load_metadata(folder.data_dir)
    lengths = index.lengths
    is_coded = any(field.codec != "raw" for field in (folder.schema or {}).values())
    ends = {name: int(((index.flags & flag) > 0).sum()) for name, flag in ENDS.items()}
    return {
        "data_dir": str(data_dir),
        "format": FORMAT_NAME,
        "num_blocks": len(blocks),
        "num_bytes": sum(block.file_bytes for block in index.blocks),
        "num_writers": len(index.writers),
        "total_trajectories": len(index),
        "total_timesteps": index.num_frames,
        "ends": {**ends, "in_progress": int((~index.is_complete()).sum())},
        "lengths": _lengths(lengths),
        "with_final_observation": int((index.final_block >= 0).sum()),
        "num_dropped": index.num_dropped,
        "num_dropped_later": sum(len(block.fragments) for block in index.blocks if block.is_edit),
        "num_broken": index.num_broken,
        "fields": metadata.schema.to_json() if metadata else [],
        "coded": _coded([block.path for block in blocks]) if is_coded else {},
        "metadata": dict(metadata.context) if metadata else {},
        "problems": {name: str(problem) for name, problem in folder.problems.items()},
    }


def _coded(paths: list[Path]) -> dict[str, dict[str, Any]]:
    """Field with a codec -> what it is coded with, how large it is, and its largest error."""
    found: dict[str, dict[str, Any]] = {}
    for path in paths:
        header = read_header(path)
        for name, coding in header.codings.items():
            one = found.setdefault(name, {"codecs": [], "max_error": 0.0, "num_bytes": 0, "num_raw_bytes": 0})
            one["codecs"] = sorted({*one["codecs"], coding.codec})
            one["max_error"] = max(one["max_error"], coding.max_error)
            one["num_raw_bytes"] += header.num_frames * header.schema[name].row_bytes
            chunks = header.chunks[DATA].get(name)
            stored = header.num_frames * header.layouts[DATA].stored[name].row_bytes
            one["num_bytes"] += stored if chunks is None else int(chunks.places[-1] - chunks.places[0])
    return found


def as_text(about: dict[str, Any]) -> list[str]:
    """Lay `describe`'s answer out for people."""
    ends = ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in about["ends"].items() if count)
    lines = [
        f"{about['data_dir']}: {about['total_trajectories']:,} trajectories, {about['total_timesteps']:,} frames",
        f"  format: {about['format']}",
        f"  ends: {ends or 'none'}; {about['with_final_observation']:,} with a final observation",
    ]
    if "num_blocks" in about:
        blocks = f"{about['num_blocks']:,} blocks of {about['num_writers']:,} writers"
        lines[1] = f"  in {blocks}, {about['num_bytes'] / 1e6:,.1f} MB"
    if about["lengths"]:
        lines.append("  length: {min:,} to {max:,} frames, median {median:,.0f}".format(**about["lengths"]))
    if about.get("num_dropped") or about.get("num_broken"):
        later = f" ({about['num_dropped_later']:,} by edits)" if about["num_dropped_later"] else ""
        lines.append(
            f"  left out: {about['num_dropped']:,} dropped{later}, {about['num_broken']:,} with a missing part"
        )
    lines.append("  fields:")
    width = max((len(field["name"]) for field in about["fields"]), default=0)
    for field in about["fields"]:
        codec = "" if field["codec"] == "raw" else f"  {field['codec']}"
        if one := about.get("coded", {}).get(field["name"]):
            used = "" if one["codecs"] == [field["codec"]] else f" ({', '.join(one['codecs'])})"
            error = f", error up to {one['max_error']:.3g}" if one["max_error"] else ", lossless"
            codec += f"{used}: {one['num_bytes'] / max(1, one['num_raw_bytes']):.1%} of its size{error}"
        lines.append(f"    {field['name']:<{width}}  {field['dtype']}{field['shape']}{codec}")
    if about["metadata"]:
        lines.append("  metadata:")
        lines += [f"    {key}: {_short(value)}" for key, value in about["metadata"].items()]
    if about["problems"]:
        is_own = "num_blocks" in about
        said = "files left out; `rollout-data verify` says why" if is_own else "problems"
        lines.append(f"  {len(about['problems'])} {said}:")
        lines += [f"    {name if is_own else problem}" for name, problem in about["problems"].items()]
    if advice := about.get("advice"):
        lines.append("  advice:")
        lines += [f"    {remark}" for remark in advice]
    return lines


def strict_json(about: Any) -> str:
    """Write JSON; null stands for NaN and infinities, which it does not have."""
    text = json.dumps(_strict(about), indent=2, default=str, allow_nan=False)
    return text.replace("\x7f", "\\u007f")


def _strict(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _strict(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _short(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:77] + "..."
