"""Chunks of one folder: a gapless chain from frame 0 is read, and the other chunks are reported."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout_data.blocks.block_header import FIRST, OPEN, TERMINATED, TRUNCATED
from rollout_data.formats.trajectory_folders.trajectory_folder import read_chunk_rows
from storage.errors import CorruptFileError, DataFileError, UnsafeFileError
from tests.formats.folders import NaiveFolder, frames_of, one_problem, read, scan_of

# How chunks hang together.


def test_a_gap_keeps_the_frames_before_it(folder: NaiveFolder) -> None:
    for start, stop in ((0, 4), (4, 6), (8, 9), (9, 12)):
        folder.chunk(0, start, stop)
    scan = scan_of(folder.data_dir)
    assert frames_of(scan) == [(0, 6, OPEN)]
    assert one_problem(scan, CorruptFileError) == (
        "'DIR/trajectory_0' has no chunk that starts at frame 6. The remaining chunks are "
        "'traj_000008_000009.pickle' and 1 more. Only the first 6 frames are read."
    )


def test_a_folder_without_its_first_chunk_is_skipped(folder: NaiveFolder) -> None:
    folder.chunk(0, 4, 8, done=True)
    folder.chunk(1, 0, 2, done=True)
    scan = scan_of(folder.data_dir)
    assert frames_of(scan) == [(1000, 2, TERMINATED)]
    assert (
        "has no chunk that starts at frame 0. The remaining chunk is 'traj_000004_000008.pickle'. "
        "The folder is left out." in one_problem(scan, CorruptFileError)
    )


def test_the_newest_of_several_chunks_with_the_same_start_is_kept(folder: NaiveFolder) -> None:
    folder.chunk(0, 0, 4)
    folder.chunk(0, 4, 9, actions=np.full((5, 2), 7, np.float32))
    folder.chunk(0, 4, 8, done=True)
    scan = scan_of(folder.data_dir)
    assert frames_of(scan) == [(0, 8, TERMINATED)]
    assert one_problem(scan) == (
        "'DIR/trajectory_0/traj_000004_000009.pickle' and 'traj_000004_000008.pickle' both start "
        "at frame 4. The older file is left out."
    )


def test_the_longer_of_two_chunks_of_the_same_time_is_kept(folder: NaiveFolder) -> None:
    for path in (folder.chunk(0, 0, 6), folder.chunk(0, 0, 4)):
        os.utime(path, ns=(0, 10**18))
    assert frames_of(scan_of(folder.data_dir)) == [(0, 6, OPEN)]


def test_if_the_newest_is_damaged_the_older_one_is_kept(folder: NaiveFolder) -> None:
    folder.chunk(0, 0, 4)
    path = folder.chunk(0, 0, 6)
    path.write_bytes(b"")
    os.utime(path, ns=(0, folder.time_ns))
    scan = scan_of(folder.data_dir)
    assert frames_of(scan) == [(0, 4, OPEN)]
    assert "traj_000000_000006.pickle" in one_problem(scan, CorruptFileError)


def test_the_length_of_the_arrays_takes_precedence_over_the_file_name(folder: NaiveFolder) -> None:
    folder.chunk(0, 0, 4, name="traj_000000_000005.pickle")
    folder.chunk(0, 4, 6)
    scan = scan_of(folder.data_dir)
    assert frames_of(scan) == [(0, 6, OPEN)]
    assert (
        "has 4 frames, but 5 according to its name. The arrays are read at their full length."
        in one_problem(scan)
    )


def test_a_wrong_length_that_breaks_the_chain_is_a_gap(folder: NaiveFolder) -> None:
    folder.chunk(0, 0, 4, name="traj_000000_000005.pickle")
    folder.chunk(0, 5, 6)
    scan = scan_of(folder.data_dir)
    assert frames_of(scan) == [(0, 4, OPEN)]
    assert [type(problem) for problem in scan.problems] == [DataFileError, CorruptFileError]


def test_a_chunk_without_frames_is_left_out(folder: NaiveFolder) -> None:
    folder.chunk(0, 0, 4)
    folder.chunk(0, 4, 4)
    scan = scan_of(folder.data_dir)
    assert frames_of(scan) == [(0, 4, OPEN)]
    assert "has no frames. The file is left out." in one_problem(scan)


def test_ends_inside_a_folder_split_it(folder: NaiveFolder) -> None:
    dones = np.zeros((6, 1), np.uint8)
    dones[[1, 2]] = 1
    timeouts = np.zeros(6, bool)
    timeouts[2] = True
    folder.chunk(0, 0, 6, dones=dones, timeouts=timeouts)
    folder.chunk(0, 6, 8, done=True)
    folder.chunk(0, 8, 9)
    scan = scan_of(folder.data_dir)
    assert frames_of(scan) == [
        (0, 2, TERMINATED),
        (2, 1, TRUNCATED),
        (3, 5, TERMINATED),
        (8, 1, OPEN),
    ]
    assert one_problem(scan) == (
        "'DIR/trajectory_0' has 3 ends before its last frame, the first at frame 1. "
        "It is read as 4 trajectories."
    )
    assert scan.fragments[["trajectory", "start", "length", "row"]].tolist() == [
        (0, 0, 2, 0), (1, 0, 1, 2), (2, 0, 3, 3), (2, 3, 2, 0), (3, 0, 1, 0)
    ]  # fmt: skip


# Damage and attack.


def test_every_truncation_of_a_chunk_is_reported_and_the_rest_loads(folder: NaiveFolder) -> None:
    path = folder.chunk(0, 0, 4)
    folder.chunk(1, 0, 4, done=True)
    whole = path.read_bytes()
    for length in [*range(0, len(whole), 37), len(whole) - 1]:
        path.write_bytes(whole[:length])
        os.utime(path, ns=(0, folder.time_ns))  # long ago: no writer is at it
        scan = scan_of(folder.data_dir)
        assert frames_of(scan) == [(1000, 4, TERMINATED)]
        assert "trajectory_0/traj_000000_000004.pickle" in one_problem(scan, CorruptFileError)


def test_every_changed_byte_of_a_chunk_is_data_or_a_problem_and_never_a_crash(
    folder: NaiveFolder,
) -> None:
    path = folder.chunk(0, 0, 2)
    folder.chunk(1, 0, 4, done=True)
    whole = path.read_bytes()
    for position in range(0, len(whole), 3):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 0x15]) + whole[position + 1 :])
        scan = scan_of(folder.data_dir)
        read(scan)
        assert (4, FIRST | TERMINATED) in scan.fragments[["length", "flags"]].tolist()


class Gadget:
    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


def test_a_hostile_chunk_is_refused_and_the_good_ones_stream(
    folder: NaiveFolder, tmp_path: Path
) -> None:
    folder.chunk(0, 0, 4, infos=Gadget(f"touch {tmp_path / 'ran'}"))
    folder.chunk(1, 0, 4, done=True)
    scan = scan_of(folder.data_dir)
    assert frames_of(scan) == [(1000, 4, TERMINATED)]
    assert one_problem(scan, UnsafeFileError) == (
        "'DIR/trajectory_0/traj_000000_000004.pickle' contains the global "
        f"'{os.system.__module__}.system', but a pickle may only contain arrays and plain "
        "containers. No code of the file was run. Check where the file comes from. This chunk and "
        "the later chunks of its trajectory are left out."
    )
    assert not (tmp_path / "ran").exists()


def test_links_out_of_the_folder_raise(folder: NaiveFolder, tmp_path: Path) -> None:
    folder.chunk(0, 0, 4)
    outside = tmp_path / "outside"
    (outside / "trajectory_7").mkdir(parents=True)
    stolen = folder.chunk(7, 0, 4)
    stolen.rename(outside / "trajectory_7" / stolen.name)
    stolen.parent.rmdir()
    (folder.data_dir / "trajectory_7").symlink_to(outside / "trajectory_7")
    (folder.data_dir / "elsewhere").symlink_to(outside)
    (folder.data_dir / "trajectory_0" / "traj_000004_000008.pickle").symlink_to(
        outside / "trajectory_7" / stolen.name
    )
    (folder.data_dir / "metadata.json").symlink_to(outside / "metadata.json")
    scan = scan_of(folder.data_dir)
    assert frames_of(scan) == [(0, 4, OPEN)]
    assert [type(problem) for problem in scan.problems] == [UnsafeFileError] * 4
    assert all(
        "is a link that leads out of the data folder. It is not followed." in str(problem)
        for problem in scan.problems
    )


def test_links_inside_are_followed_for_files_and_not_for_folders(folder: NaiveFolder) -> None:
    path = folder.chunk("blobs", 0, 4, name="abc")
    folder.chunk(1, 0, 2)
    (folder.data_dir / "trajectory_0").mkdir()
    (folder.data_dir / "trajectory_0" / "traj_000000_000004.pickle").symlink_to(path)
    (folder.data_dir / "trajectory_2").symlink_to("trajectory_1")
    (folder.data_dir / "trajectory_1" / "loop").symlink_to("..")
    (folder.data_dir / "trajectory_1" / "traj_000002_000004.pickle").symlink_to("nothing")
    scan = scan_of(folder.data_dir)
    assert frames_of(scan) == [(0, 4, OPEN), (1000, 2, OPEN)]
    assert "is a link to a folder and is not followed" in str(scan.problems[0])
    assert len(scan.problems) == 2


def test_what_is_not_a_plain_file_is_not_opened(folder: NaiveFolder) -> None:
    path = folder.chunk(0, 0, 4)
    os.mkfifo(path.with_name("traj_000004_000008.pickle"))
    assert "is not a regular file and is left out." in one_problem(scan_of(folder.data_dir))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_files_without_permission_are_reported(folder: NaiveFolder) -> None:
    folder.chunk(0, 0, 4).chmod(0)
    folder.chunk(1, 0, 4).parent.chmod(0)
    assert len(scan_of(folder.data_dir).problems) == 2


def test_a_chunk_removed_or_changed_after_the_scan_raises(folder: NaiveFolder) -> None:
    path = folder.chunk(0, 0, 4)
    scan = scan_of(folder.data_dir)
    for change in ({"actions": np.zeros((3, 9), np.float32)}, {"drop": ("rewards",)}):
        folder.chunk(0, 0, 3, name=path.name, **change)
        with pytest.raises(
            CorruptFileError, match=r"has changed since it was opened\. Call refresh\(\)"
        ):
            read_chunk_rows(scan, 0)
    path.unlink()
    with pytest.raises(FileNotFoundError):
        read_chunk_rows(scan, 0)
