"""Commands print the output that their guides show, except for numbers and times."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from rollout_data.tools.cli.command_line import COMMANDS, main

GUIDES = Path(__file__).parents[1] / "rollout_data"
BLOCK = re.compile(r"^```(python|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)
CALL = re.compile(r"^\$ rollout-data (.*)$", re.MULTILINE)


def printed(block: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Run the commands in a console block of a guide. Returns the block with their output."""
    lines = []
    for call in CALL.findall(block):
        main(shlex.split(call))
        output = capsys.readouterr()
        lines.append(f"$ rollout-data {call}\n{output.out}{output.err}")
    return "".join(lines)


def without_figures(text: str) -> str:
    """Replace numbers and times by #, and several spaces by one, because they vary between runs."""
    return re.sub(r" +", " ", re.sub(r"\d[\d.,:T-]*(e[+-]?\d+)?", "#", text))


@pytest.mark.parametrize("guide", ["COMMANDS", "REPORT", "EDITING"])
def test_every_example_prints_what_the_guide_shows(
    guide: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in ("PIL", "av", "fsspec", "plotly"):
        pytest.importorskip(module)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    for kind, block in BLOCK.findall((GUIDES / f"{guide}.md").read_text(encoding="utf-8")):
        if kind == "python":
            exec(compile(block, guide, "exec"), {"__name__": "block"})
            capsys.readouterr()
        else:
            assert without_figures(
                printed(block, capsys).replace(f"{tmp_path}/", "")
            ) == without_figures(block)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_in_a_guide(name: str) -> None:
    guides = "".join(path.read_text(encoding="utf-8") for path in GUIDES.glob("*.md"))
    assert f"$ rollout-data {name} " in guides or f"`{name}`" in guides
