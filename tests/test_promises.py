"""Each promise of the documents names a test that exists; `tests/promises/README.md` explains the lists."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "tests" / "promises"
LISTS = sorted(path.name for path in FOLDER.glob("*.md") if path.name != "README.md")
TITLE = re.compile(r"^# Promises of `(.+)`$")
REFERENCE = re.compile(r"`((?:tests|benchmarks)/[^`]+)`")


class Promise(NamedTuple):
    """One row of a list."""

    line: int
    section: str
    text: str
    proof: str


def document_of(name: str) -> str:
    title = TITLE.match((FOLDER / name).read_text(encoding="utf-8").splitlines()[0])
    assert title, f"the first line of {name} must be: # Promises of `path of the document`"
    return title[1]


def promises_of(name: str) -> list[Promise]:
    section = ""
    promises = []
    for number, line in enumerate((FOLDER / name).read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith("## "):
            section = line[3:]
        elif line.startswith("|") and not re.match(r"\| (promise|---)|\|---", line):
            cells = re.split(r"(?<!\\)\|", line.strip())
            assert len(cells) == 4, f"{name}, line {number}: expected two columns"
            promises.append(Promise(number, section, cells[1].strip(), cells[2].strip()))
    return promises


@cache
def names_in(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    names = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ClassDef):
            names.update(
                f"{node.name}::{item.name}"
                for item in node.body
                if isinstance(item, ast.FunctionDef)
            )
    return names


def exists(reference: str) -> bool:
    """Return whether the test or benchmark of a reference exists."""
    path, _, test = reference.partition("::")
    if not (ROOT / path).is_file():
        return False
    if path.startswith("benchmarks/"):
        return not test
    return test.rpartition("::")[2].startswith("test_") and test in names_in(path)


@pytest.mark.parametrize("name", LISTS)
def test_each_list_names_a_document_and_its_headings(name: str) -> None:
    document = ROOT / document_of(name)
    assert document.is_file()
    headings = set(re.findall(r"^#+ (.+)$", document.read_text(encoding="utf-8"), re.MULTILINE))
    sections = {promise.section for promise in promises_of(name)}
    assert sections <= headings, sections - headings


@pytest.mark.parametrize("name", LISTS)
def test_each_promise_names_tests_that_exist(name: str) -> None:
    promises = promises_of(name)
    assert promises
    unproved = [
        f"line {promise.line}: {promise.text}"
        for promise in promises
        if not REFERENCE.search(promise.proof)
    ]
    assert not unproved, unproved
    wrong = [
        f"line {promise.line}: {reference}"
        for promise in promises
        for reference in REFERENCE.findall(promise.proof)
        if not exists(reference)
    ]
    assert not wrong, wrong


def test_no_document_has_two_lists() -> None:
    documents = [document_of(name) for name in LISTS]
    assert len(documents) == len(set(documents))


def test_each_document_has_a_list() -> None:
    # The guide of benchmarks reports measurements, not promises.
    folders = (ROOT, ROOT / "docs", ROOT / "rollout_data", ROOT / "storage")
    documents = {
        path.relative_to(ROOT).as_posix() for folder in folders for path in folder.glob("*.md")
    }
    assert documents - {document_of(name) for name in LISTS} == set()
