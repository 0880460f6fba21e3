"""Ring buffers that BFM-Zero saves: flat datasets in `buffer.hdf5`, the place of the next write in `config.json`.

One rule: rows are given in the order in which they were written; what the configuration names is not imported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from storage.core.durable import read_text
from storage.errors import CorruptFileError, DataFileError

from ..guards import file_inside, read_object
from ..reader import EpisodeInfo
from .flat import FlatReader, Part, ends_of

_BUFFER, _CONFIG = "buffer.hdf5", "config.json"
_HEADS = {
    "observations": "observation",
    "obs": "observation",
    "actions": "action",
    "rewards": "reward",
    "terminals": "terminated",
    "timeouts": "truncated",
}
_NEXT = ("next/observation", "next_observation", "next/obs", "next_obs")


class Reader(FlatReader):
    """Episodes by their place; the first one may lack its beginning if the ring is full, the last one its end."""

    format = "bfm_zero"

    @classmethod
    def detect(cls, path: Path) -> bool:
        try:
            is_there = (path / _BUFFER).is_file() and (path / _CONFIG).is_file()
            return is_there and '"_idx"' in read_text(path / _CONFIG)
        except (DataFileError, OSError):
            return False

    @property
    def file_path(self) -> Path:
        return self.path / _BUFFER

    def scan(self) -> Sequence[EpisodeInfo]:
        file_inside(self.path, _BUFFER)
        config = read_object(file_inside(self.path, _CONFIG))
        self.metadata.update(config, lossy=[], control_mode="unknown")
        separator = config.get("nested_key_separator", "-")
        with self.files.use(self.file_path) as file:
            found = file.survey("")
            names = {path: _our_name(path, str(separator) or "-") for path in self.usable(found)}
            if not names:
                raise CorruptFileError("read", file.where, "datasets of steps", "none")
            capacity = max(found[path].shape[0] for path in names)
            parts = _written(config, capacity, file.where)
            for part in parts:
                self.take(found, names, "", part)
        nexts = [name for name in names.values() if name.startswith(_NEXT)]
        self.steps.final = {name: _observed(name) for name in nexts if _observed(name) in self.steps.fields}
        if not self.steps.num_rows:
            raise CorruptFileError("read", repr(str(self.path)), "a step", "none")
        told = [name in self.steps.fields for name in ("terminated", "truncated")]
        terminated, truncated = self.flags("terminated"), self.flags("truncated")
        return self.cut(
            ends_of(terminated | truncated), terminated if told[0] else None, truncated if told[1] else None
        )


def _written(config: Mapping[str, Any], capacity: int, where: str) -> list[Part]:
    """Say which rows were written, the oldest first."""
    at, is_full = config.get("_idx"), config.get("_is_full")
    stated = config.get("capacity", capacity)
    if type(at) is not int or type(is_full) is not bool or not 0 <= at <= capacity or stated != capacity:
        got = f"_idx {at!r}, _is_full {is_full!r}, capacity {stated!r}"
        raise CorruptFileError("read", where, f"a place to write in {capacity} rows", got)
    older = [Part("", at, capacity - at)] if is_full and at < capacity else []
    return [*older, *([Part("", 0, at)] if at else [])]


def _our_name(path: str, separator: str) -> str:
    head, *rest = path.replace(separator, "/").split("/")
    return "/".join(part for part in (_HEADS.get(head, head), *rest) if part)


def _observed(name: str) -> str:
    """Give our name of the observation that follows a step."""
    head = next(head for head in _NEXT if name.startswith(head))
    return "observation" + name.removeprefix(head)
