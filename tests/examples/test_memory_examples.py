"""The recurrent examples run and print their results. Their full runs show how well they learn."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.examples.running import run

#: The time-out is long, because a busy machine needs minutes for half a minute of work.
pytestmark = pytest.mark.timeout(900)

ROWS = {
    "recurrent_ppo": ("PPO with a GRU", "PPO without memory"),
    "distillation": ("teacher, sees velocities", "student, GRU", "random"),
}


@pytest.mark.parametrize("name", ROWS)
def test_an_example_prints_a_table_and_draws_its_curve(name: str, tmp_path: Path) -> None:
    pytest.importorskip("gymnasium")
    pytest.importorskip("matplotlib")
    text = run(tmp_path, f"{name}.py", "--quick")
    for row in ROWS[name]:
        line = next(line for line in text.splitlines() if line.startswith(row))
        mean, least, episodes = map(float, re.findall(r"[\d.]+", line[len(row) :]))
        assert 1 <= least <= mean <= 500 and episodes == 4
    assert (tmp_path / "demo" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
