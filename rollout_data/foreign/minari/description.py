"""What a Minari dataset says of itself: `metadata.json` and the spaces in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from storage.core.durable import read_text
from storage.errors import CorruptFileError, DataFileError

from ..guards import file_inside, parse_json, read_object
from ..reader import ForeignReader

METADATA, MAIN_FILE = "metadata.json", "main_data.hdf5"
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
        folder: That of the data.
        metadata: All that metadata.json says; {} if there is none, as before Minari 0.5.
        spaces: "observation" and "action" -> description of the space, {} if it is not told.
    """

    folder: Path
    metadata: dict[str, Any] = field(default_factory=dict)
    spaces: dict[str, Any] = field(default_factory=dict)

    @property
    def is_jpeg(self) -> bool:
        """Whether pictures are JPEG files; Minari takes it for granted where it is not told."""
        return self.metadata.get("jpeg_encoding") is not False

    def space(self, name: str) -> Mapping[str, Any]:
        """Find the space of a field by our name, "observation/camera"; {} if it is not told."""
        head, *parts = name.split("/")
        found: Any = self.spaces.get(head, {})
        for part in parts:
            below = found.get("subspaces") if isinstance(found, dict) else None
            if isinstance(below, list):
                number = part.removeprefix("_index_")
                found = below[int(number)] if number.isdecimal() and int(number) < len(below) else {}
            else:
                found = below.get(part, {}) if isinstance(below, dict) else {}
        return found if isinstance(found, dict) else {}

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Give the shape of a field's space; None if it is not told."""
        sizes = self.space(name).get("shape")
        if not isinstance(sizes, list) or not all(type(size) is int and size >= 0 for size in sizes):
            return None
        return tuple(sizes)

    def is_picture(self, name: str) -> bool:
        """Tell whether a field is of pictures, by its space; also where that is not told."""
        space, shape = self.space(name), self.shape(name)
        if shape is None:
            return not space
        return space.get("dtype") == "uint8" and len(shape) in (2, 3) and min(shape[:2]) >= _MIN_PICTURE


def data_folder(path: Path) -> Path | None:
    """Find the folder with the data of a dataset: itself, or `data` in it; None if it is none. Raises nothing."""
    for folder in (path, path / "data"):
        if (folder / MAIN_FILE).is_file():
            return folder
        if (folder / METADATA).is_file() and any(folder.glob("*/part-*")):
            try:
                return folder if '"total_episodes"' in read_text(folder / METADATA) else None
            except (DataFileError, OSError):
                return None
    return None


def describe(folder: Path) -> Description:
    """Read `metadata.json`, if it is there.

    Raises:
        DataFileError: It is damaged, or leads elsewhere.
    """
    if not (folder / METADATA).exists():
        return Description(folder)
    path = file_inside(folder, METADATA)
    told = read_object(path)
    spaces = {}
    for name in ("observation", "action"):
        text = told.get(f"{name}_space")
        spaces[name] = parse_json(text, path) if isinstance(text, str) else {}
    if isinstance(spec := told.get("env_spec"), str):
        told["env_spec"] = parse_json(spec, path)
    return Description(folder, told, spaces)


def check_totals(reader: ForeignReader, told: Mapping[str, Any], num_episodes: int, num_steps: int) -> None:
    """Compare what the dataset says of all episodes with what is there; none of them may have been left out.

    Raises:
        CorruptFileError: They differ, and `on_bad_index` is "refuse".
    """
    for name, got in (("total_episodes", num_episodes), ("total_steps", num_steps)):
        if told.get(name, got) != got:
            where, advice = f"{name!r} of {str(reader.path)!r}", "It was not written to its end, or was changed"
            error = CorruptFileError("believe", where, str(told[name]), str(got), advice).of("counts")
            if reader.options["on_bad_index"] == "refuse":
                error.advice += '. Open it with on_bad_index="rebuild" to read what is there'
                raise error
            reader.problems.append(error)
