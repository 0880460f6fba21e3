"""What the README shows runs, and what it points to exists."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
MAX_BLOCK_LINES = 20


def test_the_two_commands_come_first_and_there_are_three_quick_starts() -> None:
    first_block = re.search(r"^```\w*\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    assert first_block and [line.split("#")[0].strip() for line in first_block[1].splitlines()] == [
        "make demo",
        "make test",
    ]
    assert len(BLOCKS) == 3
    assert max(len(block.splitlines()) for block in BLOCKS) <= MAX_BLOCK_LINES


def test_the_quick_starts_run_one_after_the_other(tmp_path: Path) -> None:
    for number, block in enumerate(BLOCKS, 1):
        command = [sys.executable, "-W", "error", "-c", block]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"block {number}:\n{done.stderr}"


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\(([^)#:]+)\)", TEXT))))
def test_a_link_of_the_readme_leads_somewhere(target: str) -> None:
    assert (ROOT / target).exists()


def test_every_make_target_of_the_readme_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in set(re.findall(r"(?:^|`)make (\w+)", TEXT, re.MULTILINE)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
