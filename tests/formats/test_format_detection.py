"""A path is recognized by its content, and only the reader of its format is imported."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rollout_data import RolloutWriter
from rollout_data.formats.registry import FORMATS
from tests.formats.cases import CASES, ROOT, load, open_case

#: Module of each reader -> its format.
READERS = {
    f"rollout_data.formats.{format.reader.partition(':')[0]}": name
    for name, format in FORMATS.items()
}

#: Opens each path in a fork of one process, as importing the library takes seconds.
OPEN_AND_LIST_MODULES = """
import json, os, sys
import rollout_data
for path, options in json.loads(sys.argv[1]):
    if os.fork() == 0:
        recording = rollout_data.open(path, **options)
        print(json.dumps([recording.format, *sys.modules]), flush=True)
        os._exit(0)
    os.wait()
"""


def first_case_of_each_folder() -> list[Path]:
    first: dict[Path, Path] = {}
    for path in CASES:
        first.setdefault(path.parent, path)
    return list(first.values())


@pytest.fixture(scope="module")
def imported() -> dict[Path, list[str]]:
    """Return the format and the imported modules of each path that can be opened here."""
    cases = {}
    for path in first_case_of_each_folder():
        with contextlib.suppress(pytest.skip.Exception):
            cases[path] = load(path)
    arguments = [(str(ROOT / case["path"]), case["open"]) for case in cases.values()]
    command = [sys.executable, "-c", OPEN_AND_LIST_MODULES, json.dumps(arguments)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return {path: json.loads(line) for path, line in zip(cases, lines, strict=True)}


@pytest.mark.parametrize("path", first_case_of_each_folder(), ids=lambda path: path.parent.name)
def test_opening_a_path_imports_only_the_reader_of_its_format(
    path: Path, imported: dict[Path, list[str]]
) -> None:
    load(path)  # skips the test if a package is missing
    name, *modules = imported[path]
    readers = {READERS[module] for module in modules if module in READERS}
    assert name in readers
    assert readers <= {name, FORMATS[name].refines}


def test_playing_a_recording_of_ours_imports_no_format(tmp_path: Path) -> None:
    with RolloutWriter(tmp_path / "walk", 2, durable=False) as writer:
        for _ in range(4):
            writer.add(observation=torch.zeros(2, 3), action=torch.zeros(2, 1), done=[False] * 2)
    program = """
import sys
from rollout_data import RolloutDataset, WindowDataset
RolloutDataset(sys.argv[1], 2, device="cpu").get_batch(2)
WindowDataset(sys.argv[1], 2).batch([0])
print([name for name in sys.modules if name.startswith("rollout_data.formats")])
"""
    command = [sys.executable, "-c", program, str(tmp_path / "walk")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "[]\n"


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
