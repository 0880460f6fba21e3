"""An edit that is killed at any change of the disk leaves the old or the new state, and can be repeated."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.editing.crash import WORK, made
from tests.editing.folders import content, files
from tests.killed import has_ended, workers

pytestmark = pytest.mark.filterwarnings("ignore::storage.errors.RolloutDataWarning")
#: Approximate number of tested changes of some jobs, besides their last changes. The soak tests all
#: changes of all jobs.
NUM_TRIED, NUM_LAST = 2, 2


@pytest.fixture(scope="module")
def begun(tmp_path_factory) -> Path:
    """A folder for workers, with the folders that they start from."""
    folder = tmp_path_factory.mktemp("crash")
    made(folder)
    return folder


@pytest.fixture(scope="module")
def process() -> Iterator[subprocess.Popen]:
    with workers("tests.editing.crash:work") as process:
        yield process


def state_of(folder: Path) -> list[object]:
    out = folder / "out"
    parts = (
        sorted(item for item in (out, *out.glob("[xy]")) if list(item.glob("*.h5")))
        if out.exists()
        else []
    )
    return [content(folder / "walk"), [content(part) for part in parts]]


@pytest.mark.parametrize(
    ("name", "tried"),
    [(name, NUM_TRIED) for name in ("drop", "split", "repair")]
    + [pytest.param(name, 10**6, marks=pytest.mark.soak) for name in WORK],
)
def test_a_kill_at_any_change_leaves_the_old_or_the_new_state(
    begun: Path, process, name: str, tried: int
) -> None:
    place, seen = list(WORK).index(name), []
    shutil.copytree(begun / "begun", whole := begun / f"{name}_{tried}")
    old, source = state_of(whole), files(whole / "hurt")
    WORK[name](whole)
    new = state_of(whole)
    assert old != new

    def killed_at(number: int) -> Path:
        folder = begun / f"{name}_{tried}_{number}"
        folder.mkdir()
        process.stdin.write(f"{folder} {10 * number + place}\n")
        process.stdin.flush()
        assert has_ended(int(process.stdout.readline()), 30.0)
        return folder

    num_changes = int((killed_at(10**6) / "done").read_text())
    every = range(0, num_changes, 1 + num_changes // tried)
    for number in sorted({*every, *range(max(0, num_changes - NUM_LAST), num_changes)}):
        folder = killed_at(number)
        actual = state_of(folder)
        assert actual in (old, new), number
        seen.append(actual == new)
        if not seen[-1]:
            WORK[name](folder)
            assert state_of(folder) == new
        assert not [name for name in os.listdir(folder) if name.startswith(".out")]
        assert {item: held for item, (held, _) in files(folder / "hurt").items()} == {
            item: held for item, (held, _) in source.items()
        }
    assert seen == sorted(seen) and not seen[0] and len(seen) > NUM_TRIED, (
        "there is one instant from which on it holds"
    )
