"""The examples of TD3 and motion imitation run, draw their pictures, and print their results."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples.running import EXAMPLES, run

#: The time-out is long, because a busy machine needs minutes for half a minute of work.
pytestmark = pytest.mark.timeout(900)


def test_td3_learns_from_a_dict_buffer_and_draws_its_curve(tmp_path: Path) -> None:
    pytest.importorskip("gymnasium")
    pytest.importorskip("matplotlib")
    text = run(tmp_path, "off_policy.py", "--quick")
    assert "transitions in memory" in text
    assert (tmp_path / "demo" / "off_policy.png").stat().st_size > 10_000


def test_hard_motions_are_drawn_more_often(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    lines = run(tmp_path, "motion_imitation.py", "--quick").splitlines()
    table = [
        line.split()
        for line in lines[
            lines.index(next(line for line in lines if line.startswith("motion"))) + 1 :
        ]
    ]
    assert len(table) == 10
    by_error = sorted(table, key=lambda row: float(row[1]))
    assert all(abs(float(row[2]) - 0.1) < 0.02 for row in table)
    assert float(by_error[-1][3]) > 1.5 * float(by_error[0][3])
    assert (tmp_path / "demo" / "motion_imitation.png").stat().st_size > 10_000


def test_motion_clips_are_beside_their_licences() -> None:
    folders = [path for path in (EXAMPLES / "data" / "motions").iterdir() if path.is_dir()]
    assert len(folders) == 2
    for folder in folders:
        assert (folder / "LICENCE.txt").exists() and (folder / "PROVENANCE.md").exists()
