"""A target whose files were changed after writing raises an error with its name.

Removed episodes stay removed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from unittest import mock

import h5py
import pytest

import rollout_data
from rollout_data.formats import block_episode_writer as own_writer
from rollout_data.formats.hdf5 import hdf5_writer as hdf5_file
from rollout_data.tools.edit.pack_folder import pack_dataset
from rollout_data.writing import target_files
from storage.errors import UsageError
from tests.recordings.conversions import (
    IN_HDF5,
    NOTE,
    content,
    convert,
    demos,
    every_target,
    place,
    stop_after_three,
    values,
)

states = pytest.mark.parametrize("make", [convert, stop_after_three], ids=["complete", "stopped"])


def cut(path: Path) -> None:
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size // 2)


def shorten(path: Path) -> None:
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size - 1)


def change(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x55
    path.write_bytes(data)


def change_last_row(path: Path) -> None:
    """Change a value of the first episode, which stopped targets have too."""
    with h5py.File(path, "r+") as file:
        names = list[str]()
        file.visit(
            lambda name: names.append(name) if name.rpartition("/")[2] == "actions" else None
        )
        file[min(names)][1, 0] += 1


def files_of(target: Path) -> Iterator[Path]:
    for path in sorted(target.rglob("*")):
        if path.is_file() and path.name not in (NOTE, ".index.npz"):
            yield path


@pytest.mark.each_value
@states
@every_target
def test_a_truncated_changed_or_removed_target_file_raises_with_its_name(tmp_path, name, make):
    source = demos(tmp_path / "source.hdf5")
    make(source, tmp_path / "made", name)
    files = [path.relative_to(tmp_path / "made") for path in files_of(tmp_path / "made")]
    assert files
    for file in files:
        is_hdf5 = name in IN_HDF5 and "json" not in file.name
        acts: list[Callable[[Path], None]] = [cut, shorten, change_last_row if is_hdf5 else change]
        if not is_hdf5 or (name == "minari" and make is convert):
            acts.append(Path.unlink)
        for act in acts:
            shutil.rmtree(tmp_path / "tried", ignore_errors=True)
            shutil.copytree(tmp_path / "made", tmp_path / "tried")
            act(tmp_path / "tried" / file)
            before = content(place(tmp_path / "tried", name))
            with pytest.raises(UsageError) as error:
                convert(source, tmp_path / "tried", name)
            assert str(tmp_path / "tried" / file) in str(error.value), (file, act)
            assert content(place(tmp_path / "tried", name)) == before, (file, act)


@every_target
def test_a_conversion_into_a_copied_target_is_resumed(tmp_path, name):
    source = demos(tmp_path / "source.hdf5")
    for number, (make, num_present) in enumerate(((convert, 6), (stop_after_three, 3))):
        make(source, tmp_path / "made" / str(number), name)
        shutil.copytree(
            tmp_path / "made" / str(number), tmp_path / str(number), copy_function=shutil.copyfile
        )
        done = convert(source, tmp_path / str(number), name)
        assert (done.num_episodes, done.num_present) == (6, num_present)
    # Trajectory folders are in the order of their times, which the copy of the complete one does
    # not have.
    assert sorted(values(place(tmp_path / "0", name))) == sorted(
        values(place(tmp_path / "1", name))
    )


@pytest.mark.parametrize("name", IN_HDF5)
def test_additions_to_a_complete_hdf5_target_are_accepted_and_truncation_raises(tmp_path, name):
    source = demos(tmp_path / "source.hdf5")
    convert(source, tmp_path, name)
    file = (
        place(tmp_path, name) / "data" / "main_data.hdf5"
        if name == "minari"
        else place(tmp_path, name)
    )
    with h5py.File(file, "r+") as opened:
        opened["mask/train"] = [b"demo_0"]
        opened.attrs["note"] = "split"
    assert convert(source, tmp_path, name).num_present == 6
    shorten(file)
    with pytest.raises(UsageError) as error:
        convert(source, tmp_path, name)
    assert str(file) in str(error.value)


@every_target
def test_large_files_are_read_again_only_if_their_modification_time_changed(tmp_path, name):
    source = demos(tmp_path / "source.hdf5")
    convert(source, tmp_path, name)
    files = list(files_of(tmp_path / place(tmp_path, name).relative_to(tmp_path).parts[0]))
    large = [
        mock.patch.object(module, "ALWAYS_READ_BYTES", -1) for module in (target_files, hdf5_file)
    ]
    with large[0], large[1]:
        with mock.patch.object(
            target_files, "crc32", side_effect=AssertionError("a file was read")
        ):
            assert convert(source, tmp_path, name).num_present == 6
        for file in files:
            about, whole = file.stat(), file.read_bytes()
            (change_last_row if name in IN_HDF5 and file.suffix == ".hdf5" else change)(file)
            os.utime(file, ns=(0, about.st_mtime_ns + 1))
            with pytest.raises(UsageError) as error:
                convert(source, tmp_path, name)
            assert str(file) in str(error.value)
            file.write_bytes(whole)
        assert convert(source, tmp_path, name).num_present == 6


def ids_of(target: Path) -> list[str]:
    return rollout_data.open(target).ids


#: Name -> change of a target of ours, and how many of its six episodes stay in small blocks.
EDITS: dict[str, tuple[Callable[[Path], object], int]] = {
    "drop": (lambda target: rollout_data.drop(target, ids_of(target)[1:3]), 4),
    "drop all": (lambda target: rollout_data.drop(target, ids_of(target)), 0),
    "keep": (lambda target: rollout_data.keep(target, ids_of(target)[:1]), 1),
    "tag": (
        lambda target: rollout_data.tag(target, ids_of(target)[:2], task="other", id="other"),
        6,
    ),
    "prune": (lambda target: rollout_data.prune(target, trajectories=2), 2),
    "pack": (
        lambda target: (rollout_data.drop(target, ids_of(target)[:2]), pack_dataset(target)),
        4,
    ),
}


@pytest.mark.parametrize("edit", EDITS)
def test_episodes_dropped_from_a_target_of_block_files_stay_dropped(tmp_path, edit):
    act, num_left = EDITS[edit]
    source = demos(tmp_path / "source.hdf5")
    with mock.patch.object(own_writer, "_PUBLISHED_BYTES", 1):
        convert(source, tmp_path, "rollout-data")
        target = place(tmp_path, "rollout-data")
        act(target)
        before = content(target)
        done = convert(source, tmp_path, "rollout-data")
        assert (done.num_episodes, done.num_present, done.problems) == (6, 6, [])
        assert content(target) == before and len(rollout_data.open(target)) == num_left


@pytest.mark.each_value
@pytest.mark.parametrize("edit", ["drop", "keep", "tag", "prune", "pack"])
@pytest.mark.parametrize("make", ["complete", "stopped"])
def test_dropped_episodes_stay_dropped_when_others_are_added(tmp_path, edit, make):
    source = demos(tmp_path / "source.hdf5", 6 if make == "stopped" else 4)
    num_first = 3 if make == "stopped" else 4
    with mock.patch.object(own_writer, "_PUBLISHED_BYTES", 1):
        (stop_after_three if make == "stopped" else convert)(source, tmp_path, "rollout-data")
        target = place(tmp_path, "rollout-data")
        EDITS[edit][0](target)
        left = ids_of(target)
        demos(source, 6)
        for num_present in (num_first, 6):
            done = convert(source, tmp_path, "rollout-data")
            assert (done.num_episodes, done.num_present) == (6, num_present)
            assert len(rollout_data.open(target)) == len(left) + 6 - num_first


def test_a_block_deleted_by_hand_is_reported_also_after_prune(tmp_path):
    source = demos(tmp_path / "source.hdf5")
    with mock.patch.object(own_writer, "_PUBLISHED_BYTES", 1):
        convert(source, tmp_path, "rollout-data")
        target = place(tmp_path, "rollout-data")
        rollout_data.prune(target, trajectories=3)
        lost = sorted(target.glob("rollout_*.h5"))[0]
        lost.unlink()
        with pytest.raises(UsageError, match="it was removed") as error:
            convert(source, tmp_path, "rollout-data")
        assert str(lost) in str(error.value)


@pytest.mark.parametrize(
    "name", ["rlinf", "trajectory folders", "lerobot 3.0", "lerobot 2.1", "minari"]
)
def test_a_complete_target_without_its_last_note_line_or_file_raises(tmp_path, name):
    source = demos(tmp_path / "source.hdf5")
    convert(source, tmp_path / "made", name)
    note = place(tmp_path / "made", name) / NOTE
    if name != "minari":
        whole = note.read_text()
        note.write_text(
            "".join(line for line in whole.splitlines(True) if '"demo_4", "rows"' not in line)
        )
        with pytest.raises(UsageError, match="a complete target with a damaged 'rollout_conv"):
            convert(source, tmp_path / "made", name)
        note.write_text(whole)
    last = {
        "minari": "data/metadata.json",
        "lerobot 3.0": "meta/info.json",
        "lerobot 2.1": "meta/info.json",
    }
    lost = place(tmp_path / "made", name) / last.get(name, "metadata.json")
    lost.unlink()
    with pytest.raises(UsageError) as error:
        convert(source, tmp_path / "made", name)
    assert str(lost) in str(error.value) and not lost.exists()


def test_a_pipe_or_folder_in_place_of_a_target_file_raises_without_waiting(tmp_path):
    source = demos(tmp_path / "source.hdf5")
    for number, make in enumerate((os.mkfifo, os.mkdir)):
        target = tmp_path / str(number)
        convert(source, target, "rlinf")
        file = place(target, "rlinf") / "trajectory_1_recorded.pt"
        file.unlink()
        make(file)
        with pytest.raises(UsageError, match="it is not a regular file"):
            convert(source, target, "rlinf")
        with suppress(OSError):
            file.unlink()
