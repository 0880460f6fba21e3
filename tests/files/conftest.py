"""Recordings that several test files look at."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.files import coded


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same steps, coded and raw; not to be changed."""
    base = tmp_path_factory.mktemp("coded")
    return coded.record(base / "coded"), coded.record(base / "raw", codecs={})


@pytest.fixture
def folder(folders: tuple[Path, Path], tmp_path: Path) -> Path:
    """A copy of the coded recording, to be changed."""
    return shutil.copytree(folders[0], tmp_path / "data")
