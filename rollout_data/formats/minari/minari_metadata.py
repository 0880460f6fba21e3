"""The description of a Minari dataset: `metadata.json` and the gymnasium spaces in it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from ...sources.episode_info import EpisodeInfo
from ...sources.file_source import FileSource
from ..format_detection import MINARI_METADATA
from ..input_checks import file_inside, parse_json, read_object

#: Maps the HDF5 groups (or table columns) that have a row per step to the field names they become.
STEP_FIELDS = {"observations": "observation", "actions": "action", "rewards": "reward"}
#: Maps the HDF5 datasets (or table columns) of end flags to attributes of `EpisodeInfo`. The flag
#: of the last step becomes the value of the attribute.
ENDS = {"terminations": "terminated", "truncations": "truncated"}
INFOS = "infos"
#: Minimum height and width of a picture. Smaller arrays are read as numbers.
_MIN_PICTURE_SIZE = 32


@dataclass(frozen=True)
class Description:
    """The description of a dataset without its episodes.

    Attributes:
        metadata: The content of `metadata.json`, with attributes of the HDF5 file.
        spaces: Maps "observation" and "action" to Minari's JSON of the gymnasium space; {} if it is
            unknown.
    """

    metadata: dict[str, Any]
    spaces: dict[str, Any]

    @property
    def is_jpeg(self) -> bool:
        """Whether pictures are stored as JPEG files, which is Minari's default."""
        return self.metadata.get("jpeg_encoding") is not False

    def space(self, name: str) -> Mapping[str, Any]:
        """Return the space of a field, such as "observation/camera"; {} if the space is unknown."""
        head, *parts = name.split("/")
        space: Any = self.spaces.get(head)
        for part in parts:
            space = _subspaces(space).get(part)
        return space if isinstance(space, dict) else {}

    def shape_of(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a field as declared by its gymnasium space.

        If the space is unknown or has another number of elements, the stored `shape` is returned.
        """
        space_shape = _shape(self.space(name))
        if space_shape is None or prod(space_shape) != prod(shape):
            return shape
        return space_shape

    def is_picture(self, name: str) -> bool:
        """Return whether a field may be a picture according to its gymnasium space, if known."""
        space = self.space(name)
        shape = _shape(space)
        if shape is None:
            return not space
        has_axes = len(shape) in (2, 3) and min(shape[:2]) >= _MIN_PICTURE_SIZE
        return has_axes and space.get("dtype") == "uint8"


def _subspaces(space: Any) -> dict[str, Any]:
    """Map names to the parts of a composite space. Parts of a tuple are named "_index_<number>"."""
    subspaces = space.get("subspaces") if isinstance(space, dict) else None
    if isinstance(subspaces, list):
        return {f"_index_{number}": part for number, part in enumerate(subspaces)}
    return subspaces if isinstance(subspaces, dict) else {}


def _shape(space: Mapping[str, Any]) -> tuple[int, ...] | None:
    sizes = space.get("shape")
    if not isinstance(sizes, list):
        return None
    is_shape = all(type(size) is int and size >= 0 for size in sizes)
    return tuple(sizes) if is_shape else None


def read_description(
    root: Path,
    folder: Path,
    attributes: Mapping[str, Any] | None = None,
) -> Description:
    """Read the description of a dataset from `metadata.json`, if the file exists.

    Args:
        root: The opened path.
        folder: Folder of the data, in `root`.
        attributes: Metadata from the HDF5 file. Minari before 0.5 has all metadata there.

    Raises:
        DataFileError: The file is damaged, or is a link out of `root`.
    """
    path = folder / MINARI_METADATA
    metadata = dict(attributes or {})
    if path.exists():
        metadata |= read_object(file_inside(root, os.path.relpath(path, root)))
    parsed = {}
    for name in ("observation_space", "action_space", "env_spec"):
        text = metadata.get(name)
        if isinstance(text, str):
            parsed[name] = parse_json(text, path)
    spec = parsed.get("env_spec", {})
    metadata["env_spec"] = spec
    metadata["env_name"] = str(spec.get("id", "")) if isinstance(spec, dict) else ""
    spaces = {name: parsed.get(f"{name}_space", {}) for name in ("observation", "action")}
    return Description(metadata, spaces)


def check_totals(reader: FileSource, episodes: Sequence[EpisodeInfo]) -> None:
    """Compare the totals in the metadata with the episodes, unless episodes were left out.

    Raises:
        CorruptFileError: The totals differ, and `on_bad_index` is "refuse".
    """
    if reader.problems:
        return
    num_steps = sum(info.length for info in episodes)
    for name, total in (("total_episodes", len(episodes)), ("total_steps", num_steps)):
        stated = reader.metadata.get(name, total)
        if stated != total:
            reader.distrust(
                f"{str(reader.path)!r} contains {total} {name[6:]}, but {name!r} in its metadata is "
                f"{stated}. The dataset is incomplete, or was changed."
            )
