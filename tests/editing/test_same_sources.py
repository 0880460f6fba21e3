"""`merge`, `split`, `repair` and `convert` accept the same sources, and read the same episodes of them."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import rollout_data
from storage.errors import (
    DataFileError,
    ForeignFileError,
    MissingFolderError,
    RolloutDataError,
    UsageError,
)
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
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A block folder, a robomimic file, a folder with two of them, an empty folder and pipes."""
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
    yield path
    for writer in WRITERS:
        writer.close()


def in_memory(path: Path) -> str:
    fsspec = pytest.importorskip("fsspec")
    url = f"memory://{path.parent.name}/own"
    fsspec.filesystem("memory").put(str(path / "own"), url, recursive=True)
    return url


def own_copy(path: Path) -> Path:
    """Copy the block folder. Blocks keep their times."""
    return Path(shutil.copytree(path / "own", Path(tempfile.mkdtemp(dir=path)) / "own"))


def blocks_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("rollout_*.h5"))


def with_damaged_header(path: Path, count: int | None = None) -> Path:
    """Overwrite the beginning of the first blocks of a folder; None for all blocks."""
    folder = own_copy(path)
    for block in blocks_of(folder)[:count]:
        data = block.read_bytes()
        block.write_bytes(b"x" * 64 + data[64:])
    return folder


def pruned_since_opened(
    path: Path, trajectories: int, ids: list[str] | None = None
) -> rollout_data.Recording:
    folder = own_copy(path)
    recording = rollout_data.open(folder)
    chosen = recording if ids is None else recording.select(ids)
    rollout_data.prune(folder, trajectories=trajectories)
    return chosen


def without_files(path: Path) -> rollout_data.Recording:
    folder = own_copy(path)
    recording = rollout_data.open(folder)
    shutil.rmtree(folder)
    return recording


def all_dropped(path: Path) -> Path:
    folder = own_copy(path)
    rollout_data.drop(folder, rollout_data.open(folder).ids)
    return folder


def still_written(path: Path) -> Path:
    """Return a folder of a running writer, with a trajectory of 4 frames and 2 frames of the next."""
    folder = Path(tempfile.mkdtemp(dir=path)) / "live"
    writer = rollout_data.RolloutWriter(folder, 1, durable=False, writer_name="live")
    WRITERS.append(writer)
    for step in range(6):
        row = np.full((1, 2), step, np.float32)
        writer.add(observation=row, action=row, reward=row[:, 0], terminated=np.array([step == 3]))
    writer.flush()
    return folder


def without_observations(path: Path) -> Path:
    folder = Path(tempfile.mkdtemp(dir=path)) / "bare"
    with rollout_data.RolloutWriter(folder, 1, durable=False, without_observation=True) as writer:
        for step in range(6):
            row = np.full((1, 2), step, np.float32)
            writer.add(
                states=row, action=row, reward=row[:, 0], terminated=np.array([step in (3, 5)])
            )
    return folder


def damaged_demos(path: Path, names: list[str]) -> Path:
    """Copy the robomimic file. Actions of some demos get another length."""
    file = Path(tempfile.mkdtemp(dir=path)) / "own.hdf5"
    shutil.copy(path / "own.hdf5", file)
    with h5py.File(file, "r+") as opened:
        for name in names:
            del opened[f"data/{name}/actions"]
            opened[f"data/{name}/actions"] = np.zeros((2, 2), np.float32)
    return file


def cut_set(path: Path, version: str, num: int) -> Path:
    """Convert to LeRobot, and truncate the last data files."""
    pytest.importorskip("pyarrow")
    folder = Path(tempfile.mkdtemp(dir=path)) / "set"
    rollout_data.convert(path / "own", folder, "lerobot", fps=10, version=version, progress=False)
    for file in sorted((folder / "data").rglob("*.parquet"))[-num:]:
        data = file.read_bytes()
        file.write_bytes(data[: len(data) // 2])
    return folder


#: Writers of sources that are still being written.
WRITERS: list[rollout_data.RolloutWriter] = []
#: Name -> (the source, lengths of its episodes or the error of each call).
SOURCES: dict[str, tuple[Callable[[Path], Any], list[int] | type[RolloutDataError]]] = {
    "folder": (lambda path: path / "own", [3, 4, 5, 6, 7, 9]),
    "text": (lambda path: str(path / "own"), [3, 4, 5, 6, 7, 9]),
    "list of one": (lambda path: [path / "own"], [3, 4, 5, 6, 7, 9]),
    "recording": (lambda path: rollout_data.open(path / "own"), [3, 4, 5, 6, 7, 9]),
    "selection": (lambda path: rollout_data.open(path / "own").select(["a:1", "a:2"]), [5, 7]),
    "foreign file": (lambda path: path / "own.hdf5", [3, 4, 5, 6, 7, 9]),
    "foreign selection": (
        lambda path: rollout_data.open(path / "own.hdf5").select(["demo_1"]),
        [7],
    ),
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
    "damaged block": (lambda path: with_damaged_header(path, 1), [4, 6, 9]),
    "damaged blocks only": (with_damaged_header, DataFileError),
    "pruned since it was opened": (lambda path: pruned_since_opened(path, 3), [4, 6, 9]),
    "selection of pruned episodes": (
        lambda path: pruned_since_opened(path, 3, ["a:0"]),
        DataFileError,
    ),
    "recording without files": (without_files, DataFileError),
    "still written": (still_written, [2, 4]),
    "recording of what is still written": (
        lambda path: rollout_data.open(still_written(path)),
        [2, 4],
    ),
    "foreign file with damage": (lambda path: damaged_demos(path, ["demo_1"]), [3, 4, 5, 6, 9]),
    "foreign file of damage only": (
        lambda path: damaged_demos(path, [f"demo_{n}" for n in range(NUM)]),
        DataFileError,
    ),
    "LeRobot 3.0 with a cut file": (lambda path: cut_set(path, "v3.0", 1), [3, 4, 5, 7, 9]),
    "LeRobot 2.1 with a cut file": (lambda path: cut_set(path, "v2.1", 1), [3, 4, 5, 7, 9]),
    "LeRobot 3.0 of cut files": (lambda path: cut_set(path, "v3.0", NUM), DataFileError),
    "LeRobot 2.1 of cut files": (lambda path: cut_set(path, "v2.1", NUM), DataFileError),
    "no episode": (lambda path: rollout_data.open(path / "own").select([]), DataFileError),
    "no foreign episode": (
        lambda path: rollout_data.open(path / "own.hdf5").select([]),
        DataFileError,
    ),
    "all dropped": (all_dropped, DataFileError),
    "without observations": (without_observations, [2, 4]),
    "number": (lambda path: 3, UsageError),
    "none": (lambda path: None, UsageError),
}


@pytest.mark.each_value
@pytest.mark.parametrize("call", [merged, divided, repaired, converted])
@pytest.mark.parametrize("name", SOURCES)
def test_each_call_accepts_the_same_sources(
    place: Path, tmp_path: Path, name: str, call: Any
) -> None:
    source, expected = SOURCES[name]
    if isinstance(expected, list):
        copy = rollout_data.open(call(source(place), tmp_path / "out"))
        assert sorted(episode.length for episode in copy) == expected
    else:
        with pytest.raises(expected):
            call(source(place), tmp_path / "out")
        out = tmp_path / "out"
        assert not out.exists() or [file.name for file in out.iterdir()] == [
            "rollout_conversion.jsonl"
        ]


FORMATS = ["lerobot", "robomimic", "isaaclab", "minari", "d4rl", "rlinf", "trajectory-folders"]


@pytest.mark.parametrize("format", FORMATS)
def test_each_call_reads_the_same_episodes_of_every_format(
    place: Path, tmp_path: Path, format: str
) -> None:
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
