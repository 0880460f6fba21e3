"""After a fork, the child raises errors that name the owner of an object with a thread.

It ends at once, and changes nothing of the parent.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoint.forked import PROGRAMS


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_forked_child_does_not_hang_or_change_its_parent(name: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.checkpoint.forked", name, str(tmp_path / "data")]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
