"""Killed at every change of the disk, an edit leaves the state before it or the one after it, and can be repeated."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.editing.crash import WORK, made
from tests.editing.folders import content
from tests.killed import has_ended, workers


def state_of(folder: Path) -> list[object]:
    out = folder / "out"
    parts = sorted(one for one in (out, *out.glob("[xy]")) if list(one.glob("*.h5"))) if out.exists() else []
    return [content(folder / "walk"), [content(one) for one in parts]]


@pytest.mark.parametrize("name", WORK)
def test_a_kill_at_any_change_leaves_the_old_or_the_new_state(tmp_path: Path, name: str) -> None:
    made(tmp_path)
    seen = []
    (tmp_path / "whole").mkdir()
    shutil.copytree(tmp_path / "begun", tmp_path / "whole" / "walk")
    old = state_of(tmp_path / "whole")
    WORK[name](tmp_path / "whole")
    new = state_of(tmp_path / "whole")
    assert old != new
    with workers("tests.editing.crash:work") as process:

        def killed_at(number: int) -> Path:
            folder = tmp_path / str(number)
            folder.mkdir()
            process.stdin.write(f"{folder} {10 * number + list(WORK).index(name)}\n")
            process.stdin.flush()
            assert has_ended(int(process.stdout.readline()), 30.0)
            return folder

        num_changes = int((killed_at(10**6) / "done").read_text())
        for number in sorted({*range(num_changes - 6, num_changes), *range(0, num_changes, 1 + num_changes // 8)}):
            folder = killed_at(number)
            found = state_of(folder)
            assert found in (old, new), number
            seen.append(found == new)
            if not (folder / "out").exists():
                WORK[name](folder)
            assert state_of(folder) == new and not [one for one in os.listdir(folder) if one.startswith(".out")]
    assert seen == sorted(seen) and not seen[0] and len(seen) > 8, "there is one instant from which on it holds"
