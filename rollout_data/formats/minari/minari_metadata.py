"""What a Minari dataset says of itself: `metadata.json` and the spaces in it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from ...sources.episode_reader import EpisodeInfo, ForeignReader
from ..format_detection import MINARI_METADATA
from ..input_checks import file_inside, parse_json, read_object

#: Group or column -> our name; every step has them.
STEP_FIELDS = {"observations": "observation", "actions": "action", "rewards": "reward"}
#: Group or column -> attribute of an episode: what its last row says.
ENDS = {"terminations": "terminated", "truncations": "truncated"}
INFOS = "infos"
#: Pictures are at least so high and wide.
_MIN_PICTURE = 32


@dataclass(frozen=True)
class Description:
    """A dataset without its episodes.

    Attributes:
        metadata: All that it says.
        spaces: "observation" and "action" -> description of the space, {} if it is not told.
    """

    metadata: dict[str, Any]
    spaces: dict[str, Any]

    @property
    def is_jpeg(self) -> bool:
        """Whether pictures are JPEG files; Minari takes it for granted where it is not told."""
        return self.metadata.get("jpeg_encoding") is not False

    def space(self, name: str) -> Mapping[str, Any]:
        """Find the space of a field by our name, "observation/camera"; {} if it is not told."""
        head, *parts = name.split("/")
        found: Any = self.spaces.get(head)
        for part in parts:
            below = found.get("subspaces") if isinstance(found, dict) else None
            if isinstance(below, list):  # a tuple
                below = {f"_index_{number}": one for number, one in enumerate(below)}
            found = below.get(part) if isinstance(below, dict) else None
        return found if isinstance(found, dict) else {}

    def shape_of(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a field's space if it has as many numbers as `shape`, otherwise that one."""
        told = _shape(self.space(name))
        return shape if told is None or prod(told) != prod(shape) else told

    def is_picture(self, name: str) -> bool:
        """Return whether a field is of pictures, by its space; also where that is not told."""
        space = self.space(name)
        shape = _shape(space)
        if shape is None:
            return not space
        return space.get("dtype") == "uint8" and len(shape) in (2, 3) and min(shape[:2]) >= _MIN_PICTURE


def _shape(space: Mapping[str, Any]) -> tuple[int, ...] | None:
    sizes = space.get("shape")
    is_told = isinstance(sizes, list) and all(type(size) is int and size >= 0 for size in sizes)
    return tuple(sizes) if is_told and sizes is not None else None


def describe(root: Path, folder: Path, older: Mapping[str, Any] | None = None) -> Description:
    """Read `metadata.json`, if it is there.

    Args:
        root: What was opened.
        folder: That of the data, in it.
        older: Metadata from elsewhere, where Minari before 0.5 had all of them.

    Raises:
        DataFileError: It is damaged, or leads elsewhere.
    """
    path = folder / MINARI_METADATA
    told = dict(older or {})
    if path.exists():
        told.update(read_object(file_inside(root, os.path.relpath(path, root))))
    texts = ("observation_space", "action_space", "env_spec")
    parsed = {name: parse_json(told[name], path) for name in texts if isinstance(told.get(name), str)}
    spec = told["env_spec"] = parsed.get("env_spec", {})
    told["env_name"] = str(spec.get("id", "")) if isinstance(spec, dict) else ""
    return Description(told, {name: parsed.get(f"{name}_space", {}) for name in ("observation", "action")})


def check_totals(reader: ForeignReader, episodes: Sequence[EpisodeInfo]) -> Sequence[EpisodeInfo]:
    """Compare what the dataset says of all episodes with what is there, unless some were left out; gives them.

    Raises:
        CorruptFileError: They differ, and `on_bad_index` is "refuse".
    """
    totals = {"total_episodes": len(episodes), "total_steps": sum(one.length for one in episodes)}
    for name, got in totals.items() if not reader.problems else ():
        if (told := reader.metadata.get(name, got)) != got:
            why = "It was not written to its end, or was changed"
            reader.distrust(f"{name!r} of {str(reader.path)!r}", str(told), str(got), why)
    return episodes
