"""The killed run ends with the same state as the uninterrupted run, and the example prints this."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.examples.running import run

#: The time-out is long, because a busy machine needs minutes for half a minute of work.
pytestmark = pytest.mark.timeout(900)


def test_a_killed_and_resumed_run_ends_like_an_uninterrupted_run(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    text = run(tmp_path, "checkpoint_resume.py", "--quick")
    assert "equal to the run without a kill, bit by bit: True" in text
    assert re.search(r"killed \d times, loss [\d.]+ -> [\d.]+, checkpoint [\d,]+ bytes", text)
    assert (tmp_path / "demo" / "checkpoint_resume.png").read_bytes().startswith(b"\x89PNG")
