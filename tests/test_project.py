"""What the repository says of itself: what it needs, what it ships, and nothing of where it was written."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess

import pytest

from tests.test_house import CORE_DEPENDENCIES, FLOORS, ROOT


def test_the_repository_names_no_machine() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    own = re.compile(
        "|".join(["/" + r"(work|root|home|Users)/\w", "--(extra-)?index" + "-url", "file:" + "///"])
    )
    found = []
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if path.suffix in {".py", ".md", ".cfg", ".toml", ".txt", ".json", ""} and path.is_file():
            # Chunks of zarr have no suffix
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
            found += [
                f"{name}:{number}: {line}"
                for number, line in enumerate(lines, 1)
                if own.search(line)
            ]
    assert found == []


def test_no_extra_is_without_code_that_imports_it() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    code = "".join(
        path.read_text()
        for folder in (*FLOORS, "examples")
        for path in (ROOT / folder).rglob("*.py")
    )
    for extra, packages in config["options.extras_require"].items():
        # What tools and peers need
        listed = packages.strip().splitlines() if extra not in ("test", "bench", "docs") else ()
        for package in listed:
            name = re.split(r"[\[<>=]", package)[0]
            module = name.replace("-", "_")
            assert re.search(
                rf"\bimport {module}\b|\bfrom {module}\b|\"({module}|{name})\"", code
            ), f"{package} of {extra}"


def test_the_project_declares_what_it_needs_and_ships_its_types() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    names = {
        re.split(r"[\[<>=]", line)[0] for line in config["options"]["install_requires"].split()
    }
    assert names == CORE_DEPENDENCIES
    assert config["options"]["python_requires"] == ">=3.10"
    for floor in FLOORS:
        assert (ROOT / floor / "py.typed").exists()
        assert "py.typed" in config["options.package_data"][floor]


def test_every_pin_is_exact_and_names_no_local_build() -> None:
    pins = [
        line
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if not line.startswith("#")
    ]
    assert "torch==2.13.0" in pins
    assert [
        pin
        for pin in pins
        if not re.fullmatch(r'[\w.-]+==[\w.]+( ; python_version [<>=]+ "3\.11")?', pin)
    ] == []


def test_the_target_of_trainers_runs_every_test_that_needs_one() -> None:
    names = (ROOT / "tests/files/trainers.txt").read_text().splitlines()
    modules = [
        name.replace("rsl-rl-lib", "rsl_rl").replace("-", "_")
        for name in names
        if not name.startswith("#")
    ]
    needs = re.compile(
        rf"(importorskip|needs|find_spec)\(\s*\"({'|'.join(modules)})|^EXTRAS = ", re.MULTILINE
    )
    needing = {
        path
        for path in (ROOT / "tests").rglob("test_*.py")
        if needs.search(path.read_text(encoding="utf-8"))
    }
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", " ")
    listed = re.search(r"^TRAINER_TESTS := (.*)$", makefile, re.MULTILINE)
    assert listed and {path.relative_to(ROOT).as_posix() for path in needing} == set(
        listed[1].split()
    )
    for module in modules:
        assert re.search(rf"import [\w, ]*\b{module}\b", makefile), "the target fails without it"
    assert "make test-trainers" in (ROOT / ".ci/run").read_text()


def recipe(target: str) -> str:
    """Return the commands that make would run for a target of a fresh checkout."""
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    command = ["make", "--dry-run", "--no-print-directory", "VENV=fresh", target]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    ("target", "last"), [("demo", "record_stream_learn.py"), ("test", "-m pytest")]
)
def test_demo_and_test_install_what_they_need_first(target: str, last: str) -> None:
    commands = recipe(target)
    steps = ["-m venv fresh", "fresh/bin/python -m pip install", last]
    places = [commands.index(step) for step in steps]
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("target", "tools"),
    [
        ("lint", ["-m ruff check", "-m mypy"]),
        (
            "fuzz",
            ["-m pytest -m", "hypothesis or each_value or thorough", "--hypothesis-profile=fuzz"],
        ),
        ("test-gpu", ["-m pytest -m gpu"]),
        ("soak", ["-m pytest -m soak"]),
        ("docs", ["-m mkdocs build"]),
    ],
)
def test_each_target_of_make_runs_the_tools_that_readme_names(
    target: str, tools: list[str]
) -> None:
    commands = recipe(target)
    assert [tool for tool in tools if tool not in commands] == []


def test_each_extra_that_a_document_names_exists() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    extras = set(config["options.extras_require"])
    for folder in (".", "docs", *FLOORS):
        for path in (ROOT / folder).glob("*.md"):
            for names in re.findall(r"rollout-data\[([\w,]+)\]", path.read_text(encoding="utf-8")):
                assert set(names.split(",")) <= extras, f"{path.name}: {names}"
