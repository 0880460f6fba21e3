"""Every promise that `tests/promises/` lists names tests that exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
#: The lists of promises. Their own README states the rules.
LISTS = sorted(path for path in (ROOT / "tests/promises").glob("*.md") if path.name != "README.md")
HEADER = "| promise | test |"
PROOF = re.compile(r"`((?:tests|benchmarks)/[\w/]+\.py)::([\w:]+)`")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


def document_of(promises: Path) -> Path:
    """Return the document of a list: `ROOT.md` lists the promises of the README of the root."""
    if promises.name == "ROOT.md":
        return ROOT / "README.md"
    places = [ROOT / folder / promises.name for folder in (".", "docs", "storage", "rollout_data")]
    documents = [path for path in places if path.exists()]
    assert len(documents) == 1, f"expected one document {promises.name}, got {documents}"
    return documents[0]


def rows_of(promises: Path) -> list[tuple[str, str]]:
    """Return the promises and the cells of their tests."""
    rows = []
    for line in promises.read_text(encoding="utf-8").splitlines():
        if not line.startswith("|") or line == HEADER or line.startswith("|---"):
            continue
        cells = re.split(r"(?<!\\)\|", line)
        assert len(cells) == 4, f"expected two cells: {line}"
        rows.append((cells[1].strip(), cells[2].strip()))
    return rows


@cache
def names_of(path: Path) -> frozenset[str]:
    """Return the functions of a file, and the methods of its classes as `TestX::test_y`."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    for name, node in classes.items():
        bases = [classes[base.id] for base in node.bases if isinstance(base, ast.Name) and base.id in classes]
        for part in [part for owner in (node, *bases) for part in owner.body]:
            if isinstance(part, ast.FunctionDef):
                names.add(f"{name}::{part.name}")
    return frozenset(names)


@pytest.mark.parametrize("promises", LISTS, ids=lambda path: path.name)
def test_every_promise_names_tests_that_exist(promises: Path) -> None:
    rows = rows_of(promises)
    assert rows
    for promise, cell in rows:
        tests = PROOF.findall(cell)
        assert promise and tests, f"no test of {promise!r}"
        assert PROOF.sub("", cell).strip(", ") == "", f"expected nothing but tests: {cell}"
    named = {proof for _, cell in rows for proof in PROOF.findall(cell)}
    missing = [f"{file}::{test}" for file, test in named if test not in names_of(ROOT / file)]
    assert missing == []


@pytest.mark.parametrize("promises", LISTS, ids=lambda path: path.name)
def test_the_sections_of_a_list_are_those_of_its_document(promises: Path) -> None:
    sections = HEADING.findall(document_of(promises).read_text(encoding="utf-8"))
    listed = HEADING.findall(promises.read_text(encoding="utf-8"))
    assert listed and [section for section in listed if section not in sections] == []
