"""Statements of the repository about itself: dependencies, shipped files, and no local paths."""

from __future__ import annotations

import configparser
import importlib
import importlib.util
import re
import shutil
import subprocess
from types import ModuleType

import pytest

from tests.test_house import CORE_DEPENDENCIES, PACKAGES, ROOT


def test_the_repository_names_no_machine() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    own = re.compile(
        "|".join(["/" + r"(work|root|home|Users)/\w", "--(extra-)?index" + "-url", "file:" + "///"])
    )
    result = []
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if path.suffix in {".py", ".md", ".cfg", ".toml", ".txt", ".json", ""} and path.is_file():
            # Chunks of zarr have no suffix
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
            result += [
                f"{name}:{number}: {line}"
                for number, line in enumerate(lines, 1)
                if own.search(line)
            ]
    assert result == []


def test_no_extra_is_without_code_that_imports_it() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    code = "".join(
        path.read_text()
        for folder in (*PACKAGES, "examples")
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
    for floor in PACKAGES:
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
    for folder in (".", "docs", *PACKAGES):
        for path in (ROOT / folder).glob("*.md"):
            for names in re.findall(r"rollout-data\[([\w,]+)\]", path.read_text(encoding="utf-8")):
                assert set(names.split(",")) <= extras, f"{path.name}: {names}"


@pytest.fixture(scope="module")
def pages() -> ModuleType:
    """Return the module that writes the pages of the site."""
    spec = importlib.util.spec_from_file_location("pages", ROOT / "docs/pages.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_has_one_entry_for_each_public_object(pages: ModuleType) -> None:
    public = pages.public_names()
    listed = [name for _, _, names in pages.REFERENCE.values() for name in pages.paths(names)]
    assert set(listed) <= set(public)
    assert sorted(id(public[name]) for name in listed) == sorted(set(map(id, public.values())))


def test_the_menu_lists_each_page_of_the_reference_by_its_title(pages: ModuleType) -> None:
    menu = re.findall(
        r"^ +- (.+): (reference/.+)$",
        (ROOT / "mkdocs.yml").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    assert menu == [(title, page) for page, (title, *_) in pages.REFERENCE.items()]


def test_each_page_of_the_reference_begins_with_one_plain_sentence(pages: ModuleType) -> None:
    for page, (title, sentence, _) in pages.REFERENCE.items():
        assert sentence.count(".") == 1 and sentence.endswith(".") and len(sentence.split()) <= 20
        assert pages.reference(page).startswith(f"# {title}\n\n{sentence}")


def test_an_entry_has_the_methods_of_private_bases_and_no_internal_or_foreign_ones(
    pages: ModuleType,
) -> None:
    public = pages.public_names()
    shown = {name: set(pages.members(public[name])) for name in public if is_class(public[name])}
    assert {"add", "sample", "extend", "clear", "save", "load"} <= shown["storage.ZBuffer"]
    assert {"get_batch", "state_dict", "prefetch"} <= shown["rollout_data.RolloutDataset"]
    assert "plan_next" not in shown["rollout_data.RolloutDataset"]
    assert "train" not in shown["rollout_data.Normalizer"]
    assert {"keys", "count", "with_traceback"}.isdisjoint(
        shown["storage.Schema"] | shown["storage.MiniBatch"] | shown["storage.UsageError"]
    )


def test_members_of_a_public_base_are_links_to_its_entry(pages: ModuleType) -> None:
    text = pages.reference("reference/stream.md")
    (entry,) = re.findall(r"::: rollout_data\.RolloutDataset\n(.*?)(?=\n\n:::)", text, re.DOTALL)
    own, links = entry.split("Inherited from")
    assert "get_batch" in own and "get_transition_batch" not in own
    assert "[`get_transition_batch`][rollout_data.RolloutFileBase.get_transition_batch]" in links


def test_no_guide_calls_a_member_that_the_reference_leaves_out(pages: ModuleType) -> None:
    guides = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("[rs]*/*.md")]
    text = "".join(path.read_text(encoding="utf-8") for path in guides)
    classes = [each for each in pages.public_names().values() if is_class(each)]
    for path, names in pages.INTERNAL_MEMBERS.items():
        module, name = path.rsplit(".", 1)
        cls = getattr(importlib.import_module(module), name)
        users = {each.__name__ for each in classes if issubclass(each, cls)}
        for member in names.split():
            assert hasattr(cls, member), f"{path}.{member}"
            called = re.search(rf"\b({'|'.join(users)})\.{member}\b", text)
            assert called is None, called


def is_class(value: object) -> bool:
    return isinstance(value, type)
