"""Names of files in a checkpoint folder: trajectory files, an index and `metadata.json`.

A checkpoint of several ranks is a folder with a checkpoint folder `rank_<r>` per rank.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..recordings.natural_order import natural

INDEX_NAME = "trajectory_index.json"
#: Name of the index in checkpoints of earlier releases of RLinf.
LEGACY_INDEX_NAME = "trajector_index.json"
METADATA_NAME = "metadata.json"
#: Suffixes of trajectory files. RLinf writes "pt" and "pkl".
FORMATS = ("h5", "pt", "pkl")
#: Exclusive upper limit of trajectory ids, since file names have at most 18 digits for the id.
MAX_ID = 10**18
_FILE = re.compile(rf"trajectory_(\d{{1,18}})(?:_.*)?\.(?:{'|'.join(FORMATS)})")
_RANK = re.compile(r"rank_\d+")


def index_path(folder: Path) -> Path | None:
    """Return the path of the index file in a checkpoint folder; None if there is none."""
    for name in (INDEX_NAME, LEGACY_INDEX_NAME):
        if (folder / name).is_file():
            return folder / name
    return None


def checkpoint_folders(path: Path) -> list[Path]:
    """Return the folders of a checkpoint: `path` if it has an index, else a folder per rank.

    Folders of ranks are sorted by rank. They may have no index.
    """
    if index_path(path) is not None:
        return [path]
    if not path.is_dir():
        return []
    names = filter(_RANK.fullmatch, os.listdir(path))
    folders = [path / name for name in sorted(names, key=natural)]
    return [folder for folder in folders if folder.is_dir()]


def id_of_file(name: str) -> int | None:
    """Parse the trajectory id in the name of a trajectory file; None for other files."""
    match = _FILE.fullmatch(name)
    return int(match[1]) if match else None


def find_files(folder: Path) -> dict[int, list[Path]]:
    """Map trajectory ids, ascending, to the files in a folder whose names contain the id."""
    paths: dict[int, list[Path]] = {}
    for entry in os.scandir(folder):
        trajectory_id = id_of_file(entry.name)
        if trajectory_id is not None and entry.is_file():
            paths.setdefault(trajectory_id, []).append(folder / entry.name)
    for same_id in paths.values():
        same_id.sort(key=lambda path: natural(path.name))
    return dict(sorted(paths.items()))


def listed_entries(index: Mapping[str, Any]) -> list[tuple[int, dict[str, Any]]]:
    """Return (id, entry) for each trajectory in the order of the index. Ids may be repeated.

    A damaged index raises `LookupError`, `TypeError`, `ValueError` or `AttributeError`.
    """
    entries = index["trajectory_index"]
    ids = map(int, index["trajectory_id_list"])
    return [(trajectory_id, dict(entries.get(str(trajectory_id), {}))) for trajectory_id in ids]
