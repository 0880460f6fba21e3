"""Every object, argument and default on the page "Coming from another system" exists."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "coming-from.md").read_text(encoding="utf-8")
SYSTEMS = (
    "legged_gym and instinct_rl", "BFM-Zero", "RLinf", "DI-engine", "rsl_rl", "FastTD3 and FastSAC", "torchrl",
    "stable-baselines3", "cleanrl", "LeRobot", "robomimic", "diffusion policy",
)  # fmt: skip
SPAN = re.compile(r"`([^`]+)`")
#: Optional packages that importing a name may need.
OPTIONAL = {"tensordict", "ray"}


def tables() -> dict[str, list[list[str]]]:
    """Parse the table of each system on the page. Returns lists of rows, by system."""
    result: dict[str, list[list[str]]] = {}
    for part in PAGE.split("\n## ")[1:]:
        name, _, text = part.partition("\n")
        lines = [line for line in text.splitlines() if line.startswith("|")]
        assert lines[:2] == ["| theirs | ours | what differs |", "|---|---|---|"], name
        result[name] = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    return result


ROWS = [(system, row) for system, rows in tables().items() for row in rows]
OURS = [(system, span) for system, row in ROWS for span in SPAN.findall(row[1])]


def imported(path: str) -> tuple[Any, Any]:
    """Import a dotted name. Return the object and its parent."""
    parts = path.split(".")
    for stop in range(len(parts), 0, -1):
        try:
            actual: Any = importlib.import_module(".".join(parts[:stop]))
        except ModuleNotFoundError as error:
            if error.name in OPTIONAL:
                pytest.skip(f"needs {error.name}")
            continue
        owner = None
        for name in parts[stop:]:
            owner, actual = actual, getattr(actual, name)
        return actual, owner
    raise AssertionError(path)


def parameters_of(made: Any) -> dict[str, inspect.Parameter]:
    """Return the parameters of a function or class, by name.

    The parameters of a class include those of its base classes.
    """
    actual = dict(inspect.signature(made).parameters)
    for base in made.__mro__[1:-1] if inspect.isclass(made) else ():
        further = inspect.signature(base.__init__).parameters if "__init__" in vars(base) else {}
        actual |= {name: item for name, item in further.items() if name not in actual}
    return actual


def test_there_is_a_table_for_each_system_and_a_page_in_the_navigation():
    assert tuple(tables()) == SYSTEMS and all(tables().values())
    assert "coming-from.md" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


@pytest.mark.parametrize(("system", "row"), ROWS)
def test_a_row_has_their_name_our_name_and_the_difference(system, row):
    assert len(row) == 3 and all(row), row
    assert SPAN.findall(row[1]) and re.fullmatch(r"`[^`]+`(, `[^`]+`)*", row[1]), row[1]
    assert row[2].endswith(".")


@pytest.mark.parametrize(("system", "span"), OURS)
def test_every_name_of_ours_on_the_page_exists(system, span):
    path, bracket, _ = span.partition("(")
    assert path.split(".")[0] in ("storage", "rollout_data")
    made, owner = imported(path)
    if inspect.ismodule(owner):
        name = path.rpartition(".")[2]
        # `open` is not in `__all__`, so that `from rollout_data import *` does not replace the
        # builtin function.
        assert name in [*getattr(owner, "__all__", [name]), "open"]
    if not bracket:
        return
    call = ast.parse(span, mode="eval").body
    assert isinstance(call, ast.Call)
    known = parameters_of(made)
    positional = [name for name in known if name != "self"]
    for place, argument in enumerate(call.args):
        assert isinstance(argument, ast.Name) and positional[place] == argument.id, span
    for keyword in call.keywords:
        assert keyword.arg in known, f"{span}: no argument {keyword.arg}"
        assert known[keyword.arg].default == ast.literal_eval(keyword.value), (
            f"{span}: another default"
        )
