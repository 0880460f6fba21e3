"""The run that is killed ends like the run that is not, and the example says so."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_a_killed_run_ends_like_one_that_was_left_alone(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "examples" / "checkpoint_resume.py"), "--quick"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "equal to the run without a kill, bit by bit: True" in done.stdout
    assert re.search(r"killed \d times, loss [\d.]+ -> [\d.]+, checkpoint [\d,]+ bytes", done.stdout)
    assert (tmp_path / "demo" / "checkpoint_resume.png").read_bytes().startswith(b"\x89PNG")
