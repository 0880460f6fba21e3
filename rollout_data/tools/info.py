"""What a data folder holds, as a dict and as text; only headers are read."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from ..format.header import DATA, OPEN, TERMINATED, TRUNCATED, read_header
from ..index.index import TrajectoryIndex
from ..index.metadata import load_metadata
from .rewrite import open_folder

#: How trajectories end: name -> flag.
ENDS = {"terminated": TERMINATED, "truncated": TRUNCATED, "open": OPEN}


def describe(data_dir: str) -> dict[str, Any]:
    """Collect counts, fields, codecs, metadata and problems of a data folder."""
    folder = open_folder(data_dir)
    blocks = list(folder.blocks.values())
    index = TrajectoryIndex(blocks, built=folder.built)
    metadata = load_metadata(folder.data_dir)
    lengths, is_coded = index.lengths, any(field.codec != "raw" for field in (folder.schema or {}).values())
    ends = {name: int(((index.flags & flag) > 0).sum()) for name, flag in ENDS.items()}
    return {
        "data_dir": str(data_dir),
        "num_blocks": len(blocks),
        "num_bytes": sum(block.file_bytes for block in blocks),
        "num_writers": len(index.writers),
        "total_trajectories": len(index),
        "total_timesteps": index.num_frames,
        "ends": {**ends, "in_progress": int((~index.is_complete()).sum())},
        "lengths": {"min": int(lengths.min()), "median": float(np.median(lengths)), "max": int(lengths.max())}
        if len(lengths)
        else {},
        "with_final_observation": int((index.final_block >= 0).sum()),
        "num_dropped": index.num_dropped,
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
        f"  in {about['num_blocks']:,} blocks of {about['num_writers']:,} writers, {about['num_bytes'] / 1e6:,.1f} MB",
        f"  ends: {ends or 'none'}; {about['with_final_observation']:,} with a final observation",
    ]
    if about["lengths"]:
        lines.append("  length: {min:,} to {max:,} frames, median {median:,.0f}".format(**about["lengths"]))
    if about["num_dropped"] or about["num_broken"]:
        lines.append(f"  left out: {about['num_dropped']:,} dropped, {about['num_broken']:,} with a missing part")
    lines.append("  fields:")
    width = max((len(field["name"]) for field in about["fields"]), default=0)
    for field in about["fields"]:
        codec = "" if field["codec"] == "raw" else f"  {field['codec']}"
        if one := about["coded"].get(field["name"]):
            used = "" if one["codecs"] == [field["codec"]] else f" ({', '.join(one['codecs'])})"
            error = f", error up to {one['max_error']:.3g}" if one["max_error"] else ", lossless"
            codec += f"{used}: {one['num_bytes'] / max(1, one['num_raw_bytes']):.1%} of its size{error}"
        lines.append(f"    {field['name']:<{width}}  {field['dtype']}{field['shape']}{codec}")
    if about["metadata"]:
        lines.append("  metadata:")
        lines += [f"    {key}: {_short(value)}" for key, value in about["metadata"].items()]
    if about["problems"]:
        lines.append(f"  {len(about['problems'])} files left out; `rollout-data verify` says why:")
        lines += [f"    {name}" for name in about["problems"]]
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
