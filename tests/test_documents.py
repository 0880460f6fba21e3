"""Code in README and the guides runs, and all links lead to existing files."""

from __future__ import annotations

import importlib.util
import re
import warnings
from pathlib import Path

import pytest

from rollout_data.tools.cli.command_line import COMMANDS

ROOT = Path(__file__).parents[1]
DOCUMENTS = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in [*ROOT.glob("*.md"), *ROOT.glob("*/*.md")]
    if path.parts[len(ROOT.parts)] != "tests" and not path.parts[len(ROOT.parts)].startswith(".")
}
README = DOCUMENTS["README.md"]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
BLOCKS = {name: BLOCK.findall(text) for name, text in DOCUMENTS.items()}
MAX_RECIPE_LINES = 15
#: Packages that code in the documents imports, but that `make test` does not install.
EXTRAS = {"accelerate", "lightning", "rsl_rl", "tensordict"}


def test_readme_starts_with_two_commands_and_has_six_recipes() -> None:
    first_block = re.search(r"^```\w*\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    assert first_block and [line.split("#")[0].strip() for line in first_block[1].splitlines()] == [
        "make demo",
        "make test",
    ]
    assert len(BLOCKS["README.md"]) == 6
    assert max(len(block.splitlines()) for block in BLOCKS["README.md"]) <= MAX_RECIPE_LINES


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", [name for name in BLOCKS if BLOCKS[name]])
def test_code_blocks_run_one_after_the_other(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    missing = set()
    for number, block in enumerate(BLOCKS[name], 1):
        try:
            with warnings.catch_warnings():
                if "from lightning" in block:
                    warnings.simplefilter("ignore")  # Warnings about the use of torch by Lightning.
                exec(compile(block, f"{name}, block {number}", "exec"), {"__name__": "block"})
        except ModuleNotFoundError as error:
            assert error.name in EXTRAS, error
            missing.add(error.name)
    if missing:
        pytest.skip(f"all blocks but those that need {', '.join(missing)} ran")


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_to_existing_files(name: str) -> None:
    for target in set(re.findall(r"\]\(([^)#:]+)\)", DOCUMENTS[name])):
        assert (ROOT / name).parent.joinpath(target).exists(), target


def test_every_named_make_target_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for text in DOCUMENTS.values():
        for target in set(re.findall(r"(?:^|`)make (\w+)", text, re.MULTILINE)):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def table_of_jobs() -> list[str]:
    """Return the second column of the table of jobs in README, which names classes."""
    table = README.partition("## Which class for which job")[2].partition("\n## ")[0]
    return [row.split("|")[2] for row in table.splitlines() if row.startswith("| ") and "[" in row]


def test_each_name_in_the_table_of_jobs_is_public() -> None:
    names = {
        name
        for cell in table_of_jobs()
        for name in re.findall(r"`([A-Za-z]\w+|[a-z]\w+(?:\.\w+)+)[`(]", cell)
    }
    assert {"RolloutWriter", "rollout_data.open", "drop", "storage.remote.RemoteBuffer"} <= names
    for name in names - set(COMMANDS):
        module, _, attribute = name.rpartition(".")
        places = [module] if module else ["rollout_data", "storage"]
        actual = [hasattr(importlib.import_module(place), attribute) for place in places]
        assert any(actual) or importlib.util.find_spec(name), name


def test_each_command_in_the_table_of_jobs_exists() -> None:
    cells = [
        cell.partition("`rollout-data ")[2] for cell in table_of_jobs() if "`rollout-data " in cell
    ]
    names = [name for cell in cells for name in re.findall(r"([a-z]+)`", cell)]
    assert {"doctor", "prune", "ls"} <= set(names) <= set(COMMANDS)
