"""Minari datasets: a folder, or its file, whatever the kind of its files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..reader import ForeignReader
from .groups import GroupReader
from .tables import TableReader


class Reader(GroupReader):
    """Episodes in the order of their numbers.

    Options:
        on_bad_index: "refuse" a dataset that does not hold what its metadata count, or "rebuild": read what is there.
    """

    def __new__(cls, path: Path, options: Mapping[str, Any]) -> ForeignReader:  # type: ignore[misc]
        return TableReader(path, options) if TableReader.detect(path) else GroupReader(path, options)

    @classmethod
    def detect(cls, path: Path) -> bool:
        return GroupReader.detect(path) or TableReader.detect(path)
