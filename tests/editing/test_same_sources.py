"""`merge`, `split`, `repair` and `convert` accept and refuse the same sources, and take the same episodes of them."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rollout_data
from storage.errors import DataFileError, ForeignFileError, MissingFolderError, RolloutDataError, UsageError
from tests.editing.folders import folder_of

pytestmark = pytest.mark.filterwarnings("ignore::storage.errors.RolloutDataWarning")
NUM = 6


def merged(source: Any, out: Path) -> Path:
    rollout_data.merge(source, out)
    return out


def divided(source: Any, out: Path) -> Path:
    rollout_data.split(source, {"all": 1.0}, out)
    return out / "all"


def repaired(source: Any, out: Path) -> Path:
    rollout_data.repair(source, out)
    return out


def converted(source: Any, out: Path) -> Path:
    rollout_data.convert(source, out, progress=False)
    return out


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of ours, a robomimic file, a folder with two of them, an empty folder and pipes."""
    path = tmp_path_factory.mktemp("sources")
    folder_of(path / "own", ("a",), NUM)
    rollout_data.convert(path / "own", path / "own.hdf5", "robomimic", progress=False)
    (path / "several").mkdir()
    for name in ("x.hdf5", "y.hdf5"):
        shutil.copy(path / "own.hdf5", path / "several" / name)
    (path / "empty").mkdir()
    folder_of(path / "mixed" / "walk", ("a",), NUM)
    shutil.copy(path / "own.hdf5", path / "mixed" / "demos.hdf5")
    folder_of(path / "parts" / "x", ("a",), NUM), folder_of(path / "parts" / "y", ("b",), NUM)
    for name in ("pipe", "pipe.h5", "mixed/pipe.h5"):
        os.mkfifo(path / name)
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path / "socket.h5"))
    (path / "dangling").symlink_to(path / "nothing")
    (path / "loop").symlink_to(path / "loop")
    return path


def in_memory(path: Path) -> str:
    fsspec = pytest.importorskip("fsspec")
    url = f"memory://{path.parent.name}/own"
    fsspec.filesystem("memory").put(str(path / "own"), url, recursive=True)
    return url


#: Name -> (the source, lengths of its episodes or the error of each call).
SOURCES: dict[str, tuple[Callable[[Path], Any], list[int] | type[RolloutDataError]]] = {
    "folder": (lambda path: path / "own", [3, 4, 5, 6, 7, 9]),
    "text": (lambda path: str(path / "own"), [3, 4, 5, 6, 7, 9]),
    "list of one": (lambda path: [path / "own"], [3, 4, 5, 6, 7, 9]),
    "recording": (lambda path: rollout_data.open(path / "own"), [3, 4, 5, 6, 7, 9]),
    "selection": (lambda path: rollout_data.open(path / "own").select(["a:1", "a:2"]), [5, 7]),
    "foreign file": (lambda path: path / "own.hdf5", [3, 4, 5, 6, 7, 9]),
    "foreign selection": (lambda path: rollout_data.open(path / "own.hdf5").select(["demo_1"]), [7]),
    "url": (in_memory, [3, 4, 5, 6, 7, 9]),
    "several": (lambda path: path / "several", ForeignFileError),
    "several of ours": (lambda path: path / "parts", UsageError),
    "several, some of ours": (lambda path: path / "mixed", UsageError),
    "socket": (lambda path: path / "socket.h5", UsageError),
    "device": (lambda path: Path("/dev/null"), UsageError),
    "dangling link": (lambda path: path / "dangling", MissingFolderError),
    "link to itself": (lambda path: path / "loop", DataFileError),
    "empty folder": (lambda path: path / "empty", ForeignFileError),
    "missing": (lambda path: path / "nothing", MissingFolderError),
    "pipe": (lambda path: path / "pipe", UsageError),
    "pipe with the name of a file": (lambda path: path / "pipe.h5", UsageError),
    "number": (lambda path: 3, UsageError),
    "none": (lambda path: None, UsageError),
}


@pytest.mark.parametrize("call", [merged, divided, repaired, converted])
@pytest.mark.parametrize("name", SOURCES)
def test_each_call_takes_the_same_sources(place: Path, tmp_path: Path, name: str, call: Any) -> None:
    source, expected = SOURCES[name]
    if isinstance(expected, list):
        copy = rollout_data.open(call(source(place), tmp_path / "out"))
        assert sorted(episode.length for episode in copy) == expected
    else:
        with pytest.raises(expected):
            call(source(place), tmp_path / "out")
        assert not (tmp_path / "out").exists()


FORMATS = ["lerobot", "robomimic", "isaaclab", "minari", "d4rl", "rlinf", "trajectory-folders"]


@pytest.mark.parametrize("format", FORMATS)
def test_each_call_takes_the_same_episodes_of_every_format(place: Path, tmp_path: Path, format: str) -> None:
    options = {"fps": 20} if format == "lerobot" else {}
    target = tmp_path / ("demos.hdf5" if format in ("robomimic", "isaaclab", "d4rl") else "demos")
    rollout_data.convert(place / "own", target, format, progress=False, **options)
    lengths = sorted(rollout_data.open(target).column("length").tolist())
    assert len(lengths) == NUM
    for source in (target, str(target), rollout_data.open(target)):
        for number, call in enumerate((merged, divided, repaired, converted)):
            out = tmp_path / "made" / str(number)
            copy = rollout_data.open(call(source, out))
            assert sorted(copy.column("length").tolist()) == lengths
            shutil.rmtree(out)


def test_repair_of_a_selection_keeps_its_edits_and_drops_the_rest(tmp_path: Path) -> None:
    own = folder_of(tmp_path / "own", ("a",), NUM)
    rollout_data.tag(own, "a:2", task="push")
    rollout_data.repair(rollout_data.open(own).select(["a:2", "a:4"]), tmp_path / "out")
    copy = rollout_data.open(tmp_path / "out")
    assert sorted(copy.ids) == ["a:2", "a:4"]
    assert copy[copy.ids.index("a:2")].task == "push"
