"""A path is recognized by its content, and only the reader of its format is imported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rollout_data.formats.registry import FORMATS
from tests.formats.cases import CASES, ROOT, load, open_case

#: Module of each reader -> its format.
READERS = {f"rollout_data.formats.{format.module}": name for name, format in FORMATS.items()}

OPEN_AND_LIST_MODULES = """
import json, sys
import rollout_data
recording = rollout_data.open(sys.argv[1], **json.loads(sys.argv[2]))
print(json.dumps([recording.format, *sys.modules]))
"""


def first_case_of_each_folder() -> list[Path]:
    first: dict[Path, Path] = {}
    for path in CASES:
        first.setdefault(path.parent, path)
    return list(first.values())


@pytest.mark.parametrize("path", first_case_of_each_folder(), ids=lambda path: path.parent.name)
def test_opening_a_path_imports_only_the_reader_of_its_format(path: Path) -> None:
    case = load(path)
    command = [sys.executable, "-c", OPEN_AND_LIST_MODULES, str(ROOT / case["path"]), json.dumps(case["open"])]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    name, *modules = json.loads(output)
    readers = {READERS[module] for module in modules if module in READERS}
    assert name in readers
    assert readers <= {name, FORMATS[name].refines}


def test_a_format_refines_a_known_format_or_none() -> None:
    assert {format.refines for format in FORMATS.values()} <= {"", *FORMATS}


@pytest.mark.parametrize("path", first_case_of_each_folder(), ids=lambda path: path.parent.name)
def test_opening_and_reading_write_nothing_beside_the_data(path: Path) -> None:
    case = load(path)
    folder = (ROOT / case["path"]).parent
    before = [(entry, entry.stat().st_mtime_ns) for entry in sorted(folder.rglob("*"))]
    for episode in open_case(case):
        for name in episode.schema:
            episode.read(name)
    assert [(entry, entry.stat().st_mtime_ns) for entry in sorted(folder.rglob("*"))] == before
