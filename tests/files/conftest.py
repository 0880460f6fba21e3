"""Recordings that several test files read, and simulated properties of the machine.

Only this file simulates properties of the machine.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults import instead_of
from tests.files import coded


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same steps, coded and raw. Tests must not change these folders."""
    base = tmp_path_factory.mktemp("coded")
    return coded.record(base / "coded"), coded.record(base / "raw", codecs={})


@pytest.fixture
def folder(folders: tuple[Path, Path], tmp_path: Path) -> Path:
    """A copy of the coded recording, which a test may change."""
    return shutil.copytree(folders[0], tmp_path / "data")


@pytest.fixture
def slow_disk() -> Iterator[threading.Event]:
    """Event without which `os.replace` waits, so that no block is published."""
    gate = threading.Event()

    def wait(replace: Callable[..., None], *paths: Path) -> None:
        assert gate.wait(120)
        replace(*paths)

    with instead_of("replace", wait):
        yield gate


@pytest.fixture
def without_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A system that cannot map files side by side."""
    monkeypatch.setattr("rollout_data.sources.rows.mapped_files.is_supported", False)


@pytest.fixture
def cold_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the system report that files are not in the page cache."""
    monkeypatch.setattr(
        "rollout_data.sources.rows.mapped_files.Arena.is_resident", lambda arena, row: False
    )


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the system report 100 bytes of free memory."""
    monkeypatch.setattr("rollout_data.sources.rows.cached_rows.free_memory_bytes", lambda: 100)
