"""Two killed ranks resume on two ranks and on one, with the batches of an uninterrupted run."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from tests.examples.running import run

#: The time-out is long, because a busy machine needs minutes for half a minute of work.
pytestmark = pytest.mark.timeout(900)

NUM_STEPS, NUM_ENVS = 40, 8  # of `QUICK`


def sequence(folder: Path) -> dict[int, list[str]]:
    """Return the hashes of every env at every step. No step may differ between two lives."""
    made: dict[int, list[str]] = {}
    for num_ranks in (1, 2):
        notes: dict[int, dict[int, list[str]]] = {}
        for rank in range(num_ranks):
            path = folder / f"rank_{rank}_of_{num_ranks}.jsonl"
            for note in map(json.loads, path.read_text().splitlines() if path.exists() else []):
                assert (
                    notes.setdefault(note["step"], {}).setdefault(rank, note["envs"])
                    == note["envs"]
                )
        for step, shares in notes.items():
            if len(shares) == num_ranks:
                envs = [env for rank in range(num_ranks) for env in shares[rank]]
                assert made.setdefault(step, envs) == envs
    return made


@pytest.mark.skipif(sys.platform == "win32", reason="ranks are forked")
def test_killed_ranks_resume_with_the_same_batches_on_two_ranks_and_on_one(
    tmp_path: Path, short_folder: Path
) -> None:
    text = run(tmp_path, "distributed.py", "--quick", TMPDIR=str(short_folder))
    actual = re.search(r"killed at step (\d+); the checkpoint holds step (\d+)", text)
    assert actual and 0 <= int(actual[2]) <= int(actual[1]) < NUM_STEPS
    for num_ranks in (2, 1):
        assert (
            f"resumed on {num_ranks}: {NUM_STEPS} batches of {NUM_ENVS} envs, equal bit by bit: True"
            in text
        )
    whole, killed, item = (
        sequence(tmp_path / "demo" / "distributed" / name) for name in ("whole", "killed", "one")
    )
    assert sorted(whole) == list(range(1, NUM_STEPS + 1))
    assert all(len(envs) == NUM_ENVS for envs in whole.values())
    assert len({env for envs in whole.values() for env in envs}) > NUM_STEPS * NUM_ENVS * 0.9
    assert killed == whole and item == whole
    differences = [float(value) for value in re.findall(r"weights differ by (\S+)", text)]
    assert differences[0] == 0 and differences[1] < 1e-4
