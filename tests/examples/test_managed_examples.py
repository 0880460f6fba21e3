"""The examples of the managed buffers run, learn from both buffers, and draw their pictures."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples.running import run

#: The time-out is long, because a busy machine needs minutes for half a minute of work.
pytestmark = pytest.mark.timeout(900)


def test_dqn_learns_with_and_without_priorities(tmp_path: Path) -> None:
    pytest.importorskip("gymnasium")
    pytest.importorskip("matplotlib")
    lines = run(tmp_path, "prioritized_dqn.py", "--quick").splitlines()
    assert [line.split()[0] for line in lines[:2]] == ["uniform", "prioritized"]
    assert all("1200 transitions" in line for line in lines[:2])
    assert (tmp_path / "demo" / "prioritized_dqn.png").stat().st_size > 10_000


def test_a_manager_draws_from_the_agent_and_from_demonstrations_in_files(tmp_path: Path) -> None:
    pytest.importorskip("gymnasium")
    pytest.importorskip("matplotlib")
    lines = run(tmp_path, "two_buffers.py", "--quick").splitlines()
    assert lines[0] == "800 demonstrated transitions read from block files"
    assert lines[1].endswith("held: agent 2000") and lines[2].endswith("held: agent 2000, demo 800")
    assert (tmp_path / "demo" / "two_buffers.png").stat().st_size > 10_000
