"""Minari datasets: a folder, or its file, whatever the kind of its files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from storage.core import arguments

from ..reader import EpisodeInfo, ForeignReader
from .groups import GroupReader
from .tables import TableReader


class Reader(ForeignReader):
    """Episodes in the order of their numbers.

    Options:
        on_bad_index: "refuse" a dataset that does not hold what its metadata count, or "rebuild": read what is there.
    """

    format = "minari"
    OPTIONS: ClassVar[Mapping[str, Any]] = {"on_bad_index": "refuse"}

    @classmethod
    def detect(cls, path: Path) -> bool:
        return GroupReader.detect(path) or TableReader.detect(path)

    def scan(self) -> Sequence[EpisodeInfo]:
        choices = ("refuse", "rebuild")
        arguments.choice("open the dataset", "on_bad_index", self.options["on_bad_index"], choices)
        kind = TableReader if TableReader.detect(self.path) else GroupReader
        self._inner = kind(self.path, self.options)
        self.metadata, self.problems = self._inner.metadata, self._inner.problems
        spec = self.metadata.get("env_spec")
        self.metadata["env_name"] = str(spec.get("id", "")) if isinstance(spec, dict) else ""
        self.metadata["control_mode"] = "unknown"
        return self._inner.episodes

    def read(self, number: int, name: str, start: int, stop: int) -> Any:
        return self._inner.read(number, name, start, stop)

    def read_final(self, number: int, name: str) -> np.ndarray[Any, Any]:
        return self._inner.read_final(number, name)
