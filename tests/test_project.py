"""What the repository says of itself: what it needs, what it ships, and nothing of where it was written."""

from __future__ import annotations

import configparser
import re
import subprocess

import pytest

from tests.test_house import CORE_DEPENDENCIES, FLOORS, ROOT


def test_the_repository_names_no_machine() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    own = re.compile("|".join(["/" + r"(work|root|home|Users)/\w", "--(extra-)?index" + "-url", "file:" + "///"]))
    found = []
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if path.suffix in {".py", ".md", ".cfg", ".toml", ".txt", ".json", ""} and path.is_file():
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()  # chunks of zarr have no suffix
            found += [f"{name}:{number}: {line}" for number, line in enumerate(lines, 1) if own.search(line)]
    assert found == []


def test_no_extra_is_without_code_that_imports_it() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    code = "".join(path.read_text() for folder in (*FLOORS, "examples") for path in (ROOT / folder).rglob("*.py"))
    for extra, packages in config["options.extras_require"].items():
        listed = (
            packages.strip().splitlines() if extra not in ("test", "bench", "docs") else ()
        )  # what tools and peers need
        for package in listed:
            name = re.split(r"[\[<>=]", package)[0]
            module = name.replace("-", "_")
            assert re.search(rf"\bimport {module}\b|\bfrom {module}\b|\"({module}|{name})\"", code), (
                f"{package} of {extra}"
            )


def test_the_project_declares_what_it_needs_and_ships_its_types() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    names = {re.split(r"[\[<>=]", line)[0] for line in config["options"]["install_requires"].split()}
    assert names == CORE_DEPENDENCIES
    assert config["options"]["python_requires"] == ">=3.10"
    for floor in FLOORS:
        assert (ROOT / floor / "py.typed").exists()
        assert "py.typed" in config["options.package_data"][floor]


def test_every_pin_is_exact_and_names_no_local_build() -> None:
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert "torch==2.13.0" in pins
    assert [pin for pin in pins if not re.fullmatch(r'[\w.-]+==[\w.]+( ; python_version [<>=]+ "3\.11")?', pin)] == []
