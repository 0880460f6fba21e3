"""Trajectory folders for tests: the sample folders with their times, and an empty folder."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.formats.folders import NaiveFolder

DATA = Path(__file__).parents[1] / "data"


def set_times(data_dir: Path) -> None:
    """Set rising modification times in natural order, because a git checkout does not keep them."""
    numbers = {
        path: [int(word) for word in path.stem.split("_")[1:]]
        for path in data_dir.rglob("traj_*_*.p*")
    }
    for time_s, path in enumerate(
        sorted(numbers, key=lambda path: (int(path.parent.name[11:]), numbers[path]))
    ):
        os.utime(path, ns=(0, 10**18 + time_s * 10**9))


@pytest.fixture
def sample(tmp_path: Path) -> Callable[[str], Path]:
    """Copy a sample folder, with modification times in recording order."""

    def copy(name: str) -> Path:
        target = tmp_path / name
        shutil.copytree(DATA / "trajectory_folders" / name, target)
        set_times(target)
        return target

    return copy


@pytest.fixture
def folder(tmp_path: Path) -> NaiveFolder:
    return NaiveFolder(tmp_path / "data")
