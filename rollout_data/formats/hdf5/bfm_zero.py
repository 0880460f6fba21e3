"""Ring buffers that BFM-Zero saves: flat datasets in `buffer.hdf5`, the place of the next write in `config.json`.

One rule: rows are given in the order in which they were written; what the configuration names is not imported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from storage.errors import CorruptFileError

from ...sources.episode_reader import EpisodeInfo
from ..format_detection import BFM_ZERO_BUFFER, BFM_ZERO_CONFIG
from ..input_checks import file_inside, read_object
from .flat_episodes import FlatReader, Part, ends_of, our_name

#: What belongs to a step although it is kept with the next observation.
_OF_THE_STEP = ("next/reward", "next/terminated", "next/truncated")


class Reader(FlatReader):
    """Episodes by their place; the first one may lack its beginning if the ring is full, the last one its end."""

    format = "bfm_zero"

    @property
    def file_path(self) -> Path:
        return self.path / BFM_ZERO_BUFFER

    def scan(self) -> Sequence[EpisodeInfo]:
        file_inside(self.path, BFM_ZERO_BUFFER)
        config = read_object(file_inside(self.path, BFM_ZERO_CONFIG))
        self.metadata = {**config, **self.metadata}
        separator = str(config.get("nested_key_separator", "")) or "-"
        with self.files.use(self.file_path) as file:
            found = file.survey("")
            names = {path: our_name(path.replace(separator, "/")) for path in self.usable(found)}
            if not names:
                raise CorruptFileError("read", file.where, "datasets of steps", "none")
            for path in [one for one, name in names.items() if name in _OF_THE_STEP]:
                if (own := names[path].removeprefix("next/")) not in names.values():
                    names[path] = own
            for part in _written(config, max(found[path].shape[0] for path in names), file.where):
                self.take(found, names, "", part)
        ends = {name: self.flags(name) for name in ("terminated", "truncated")}
        told = [flags if name in self.columns else None for name, flags in ends.items()]
        return self.cut(ends_of(ends["terminated"] | ends["truncated"]), *told)


def _written(config: Mapping[str, Any], capacity: int, where: str) -> list[Part]:
    """Return which rows were written, the oldest first."""
    at = config.get("_idx")
    is_full = config.get("_is_full")
    stated = config.get("capacity", capacity)
    if type(at) is not int or type(is_full) is not bool or not 0 <= at <= capacity or stated != capacity:
        got = f"_idx {at!r}, _is_full {is_full!r}, capacity {stated!r}"
        raise CorruptFileError("read", where, f"a place to write in {capacity} rows", got)
    older = [Part("", at, capacity - at)] if is_full and at < capacity else []
    return [*older, *([Part("", 0, at)] if at else [])]
