"""Folders of pickled trajectories are read back exactly, in a fixed order."""

import itertools
import os
import pickle
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_data.blocks.block_header import OPEN, TERMINATED, TRUNCATED
from rollout_data.formats.trajectory_folders.trajectory_folder import scan_trajectory_folder
from rollout_data.formats.trajectory_folders.trajectory_listing import is_trajectory_folder
from storage.codecs.codec_chains import stored_field
from storage.errors import UsageError
from tests.formats.folders import NaiveFolder, frames_of, one_problem, read, scan_of
from tests.watch import opened

DATA_DIR = Path(__file__).parents[1] / "data"


# The samples.


def test_real_rollouts_are_read_exactly(sample: Callable[[str], Path]) -> None:
    scan = scan_of(sample("ant"))
    trajectories = read(scan)
    assert scan.problems == ()
    assert scan.metadata["env"] == "Ant-v5"
    with np.load(DATA_DIR / "mujoco" / "Ant-v5.npz") as expected:
        assert len(trajectories) == 6
        for number, got in enumerate(trajectories):
            episode = {
                name: expected[f"ep{number}/{name}"]
                for name in ("observations", "actions", "rewards")
            }
            np.testing.assert_array_equal(got["observation"], episode["observations"][:-1])
            np.testing.assert_array_equal(got["action"], episode["actions"])
            np.testing.assert_array_equal(got["reward"][:, 0], episode["rewards"])
            is_truncated = bool(expected[f"ep{number}/truncated"][-1])
            assert got["flags"] == (TRUNCATED if is_truncated else TERMINATED)


def test_components_keep_their_order_shape_and_codec(sample: Callable[[str], Path]) -> None:
    data_dir = sample("components")
    scan = scan_of(data_dir)
    assert list(scan.schema) == [
        "observation/proprio", "observation/depth", "observation/cmd", "privileged_observation", "action", "reward"
    ]  # fmt: skip
    depth = scan.schema["observation/depth"]
    assert (depth.shape, depth.dtype, depth.codec, stored_field(depth).dtype) == (
        (2, 3), "float32", "normalized_image", "uint8"
    )  # fmt: skip
    trajectories = read(scan)
    assert [(len(t["action"]), t["flags"]) for t in trajectories] == [
        (5, TRUNCATED),
        (4, TERMINATED),
    ]
    with open(data_dir / "trajectory_1" / "traj_000000_000004.pickle", "rb") as file:
        written = pickle.load(file)
    counts = written["obs_depth"].reshape(4, 2, 3)
    np.testing.assert_array_equal(
        trajectories[1]["observation/depth"], counts.astype(np.float32) / 255
    )
    np.testing.assert_array_equal(trajectories[1]["observation/cmd"], written["obs_cmd"])


def test_chunks_with_unpadded_names_are_in_numeric_order(sample: Callable[[str], Path]) -> None:
    scan = scan_of(sample("unpadded_names"))
    names = [
        "traj_0_8.pickle",
        "traj_8_12.pickle",
        "traj_12_15.pickle",
        "traj_0_9.pickle",
        "traj_9_12.pickle",
    ]
    assert [path.name for path in scan.chunk_paths] == names
    assert scan.fragments["length"].tolist() == [8, 4, 3, 9, 3]
    assert scan.problems == ()


@pytest.mark.parametrize("name", ["ant", "components", "unpadded_names"])
def test_reading_changes_nothing_on_disk(sample: Callable[[str], Path], name: str) -> None:
    data_dir = sample(name)

    def state() -> list[Any]:
        paths = sorted(data_dir.rglob("*"))
        return [(p, p.stat().st_mtime_ns, p.read_bytes() if p.is_file() else b"") for p in paths]

    before = state()
    assert is_trajectory_folder(data_dir)
    read(scan_trajectory_folder(data_dir))
    assert state() == before


# Which folders, in which order.


def test_folders_are_recognized_at_any_depth(folder: NaiveFolder, tmp_path: Path) -> None:
    assert not is_trajectory_folder(tmp_path)
    (tmp_path / "trajectory_plots").mkdir()
    (tmp_path / "trajectory_plots" / "plot.png").touch()
    assert not is_trajectory_folder(tmp_path)
    path = folder.chunk("run_a/trajectory_0", 0, 2)
    assert is_trajectory_folder(tmp_path)
    assert is_trajectory_folder(path.parent)
    assert frames_of(scan_of(tmp_path)) == frames_of(scan_of(path.parent)) == [(0, 2, OPEN)]


def test_an_empty_trajectory_folder_is_recognized_and_ignored(folder: NaiveFolder) -> None:
    (folder.data_dir / "trajectory_0").mkdir(parents=True)
    assert is_trajectory_folder(folder.data_dir)
    scan = scan_of(folder.data_dir)
    assert (len(scan.fragments), len(scan.schema), scan.problems) == (0, 0, ())


def test_a_path_that_does_not_exist_raises_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        scan_trajectory_folder(tmp_path / "nowhere")


def test_trajectories_are_ordered_by_last_chunk_then_number_then_path(folder: NaiveFolder) -> None:
    paths = {
        number: folder.chunk(name, 0, 1, actions=np.full((1, 2), 300_000 + number, np.float32))
        for number, name in enumerate(
            ["trajectory_9", "trajectory_10", "b/trajectory_2", "a/trajectory_2"]
        )
    }
    for path in paths.values():
        os.utime(path, ns=(0, 10**18))
    assert [first for first, _, _ in frames_of(scan_of(folder.data_dir))] == [3, 2, 0, 1]
    os.utime(paths[3], ns=(0, 10**18 + 5))
    assert [first for first, _, _ in frames_of(scan_of(folder.data_dir))] == [2, 0, 1, 3]
    os.utime(paths[2].parent, ns=(0, 2 * 10**18))  # the time of a folder means nothing
    scan = scan_of(folder.data_dir)
    assert [first for first, _, _ in frames_of(scan)] == [2, 0, 1, 3]
    assert scan.fragments["end_time_ns"].tolist() == [10**18, 10**18 + 1, 10**18 + 2, 10**18 + 5]


@pytest.mark.parametrize("name", ["traj_0_4.pkl", "traj_000_0000004.pickle"])
def test_names_of_any_width_and_both_endings_are_chunks(folder: NaiveFolder, name: str) -> None:
    folder.chunk(0, 0, 4, name=name)
    assert frames_of(scan_of(folder.data_dir)) == [(0, 4, OPEN)]


def test_other_files_are_left_alone_and_named(folder: NaiveFolder) -> None:
    folder.chunk(0, 0, 4)
    folder.chunk(0, 4, 8, name="traj_000004_000008.pickle.tmp")
    folder.chunk(0, 4, 8, name="backup_traj_000004_000008.pickle")
    folder.chunk(0, 4, 8, name=".hidden")
    scan = scan_of(folder.data_dir)
    assert frames_of(scan) == [(0, 4, OPEN)]
    assert one_problem(scan) == (
        "'DIR/trajectory_0' contains files that are not called traj_START_END.pickle: "
        "'backup_traj_000004_000008.pickle' and 1 more. These files are ignored."
    )


def test_a_second_scan_opens_only_new_chunks(folder: NaiveFolder) -> None:
    folder.chunk(0, 0, 4)
    damaged = folder.chunk(1, 0, 4)
    damaged.write_bytes(b"")
    first = scan_of(folder.data_dir)
    new = [folder.chunk(0, 4, 6, done=True), folder.chunk(1, 0, 4)]
    with opened(".pickle") as paths:
        second = scan_trajectory_folder(folder.data_dir, previous=first)
    assert paths == list(map(str, new))
    assert (
        frames_of(second)
        == frames_of(scan_of(folder.data_dir))
        == [(0, 6, TERMINATED), (1000, 4, OPEN)]
    )
    assert second.problems == ()


def test_a_scan_can_be_sent_to_another_process(sample: Callable[[str], Path]) -> None:
    scan = scan_of(sample("components"))
    sent = pickle.loads(pickle.dumps(scan))
    assert [t["action"].tolist() for t in read(sent)] == [t["action"].tolist() for t in read(scan)]


@pytest.mark.parametrize("num_chunks", [3, 40])
def test_the_number_of_threads_changes_no_result(
    folder: NaiveFolder, num_chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(num_chunks):
        folder.chunk(number, 0, 2)
    expected = frames_of(scan_of(folder.data_dir))
    monkeypatch.setattr(time, "thread_time", lambda: 0.0)  # as if the disk were waited for
    assert (
        frames_of(scan_of(folder.data_dir))
        == expected
        == [(1000 * k, 2, OPEN) for k in range(num_chunks)]
    )


# Laws.

chunk_lengths = st.lists(st.integers(1, 5), min_size=1, max_size=4)
trajectories = st.lists(
    st.tuples(chunk_lengths, st.sampled_from([TERMINATED, TRUNCATED, OPEN])), min_size=1, max_size=5
)


@given(
    trajectories,
    st.sampled_from([3, 4, 5]),
    st.sampled_from(["traj_{:06d}_{:06d}.pickle", "traj_{}_{}.pkl"]),
    st.data(),
)
def test_rollouts_of_a_naive_writer_are_read_back(
    wanted: Any, protocol: int, name: str, data: Any
) -> None:
    from_writer = []
    with tempfile.TemporaryDirectory() as temporary:
        for number, (lengths, kind) in enumerate(wanted):
            total = sum(lengths)
            arrays = {
                "observations": np.arange(total * 3, dtype=np.float32).reshape(total, 3)
                + 1000 * number,
                "actions": np.arange(total * 2, dtype=np.float32).reshape(total, 2) - 1000 * number,
                "rewards": np.arange(total, dtype=np.float32).reshape(total, 1) / 8,
                "dones": (
                    np.arange(total)[:, None] == (total - 1 if kind != OPEN else total)
                ).astype(np.uint8),
                "timeouts": np.arange(total) == (total - 1 if kind == TRUNCATED else total),
            }
            from_writer.append((kind, arrays))
            start = 0
            for length in lengths:
                path = Path(temporary, f"trajectory_{number}", name.format(start, start + length))
                path.parent.mkdir(exist_ok=True)
                part = {key: array[start : start + length] for key, array in arrays.items()}
                path.write_bytes(pickle.dumps(part, protocol=protocol))
                start += length
        mtimes = data.draw(st.permutations(range(len(wanted))))
        for number, mtime_ns in enumerate(mtimes):
            for path in Path(temporary, f"trajectory_{number}").iterdir():
                os.utime(path, ns=(0, mtime_ns))
        scan = scan_of(Path(temporary))
        got = read(scan)
    assert scan.problems == ()
    expected = [
        item for _, item in sorted(zip(mtimes, from_writer, strict=True), key=lambda pair: pair[0])
    ]
    for trajectory, (kind, arrays) in zip(got, expected, strict=True):
        assert trajectory["flags"] == kind
        for field, key in (
            ("observation", "observations"),
            ("action", "actions"),
            ("reward", "rewards"),
        ):
            np.testing.assert_array_equal(trajectory[field], arrays[key])


@given(st.lists(st.booleans(), min_size=1, max_size=12), st.data())
def test_splitting_at_ends_loses_no_frame(dones: list[bool], data: Any) -> None:
    length = len(dones)
    cuts = sorted({0, length, *data.draw(st.lists(st.integers(0, length), max_size=3))})
    with tempfile.TemporaryDirectory() as temporary:
        for start, stop in itertools.pairwise(cuts):
            part = {
                "observations": np.arange(start, stop, dtype=np.float32)[:, None],
                "actions": np.zeros((stop - start, 1), np.float32),
                "dones": np.array(dones[start:stop], np.uint8),
            }
            path = Path(temporary, "trajectory_0", f"traj_{start}_{stop}.pickle")
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(pickle.dumps(part))
        got = read(scan_of(Path(temporary)))
    runs, run = [], []
    for frame, is_done in enumerate(dones):
        run.append(frame)
        if is_done or frame == length - 1:
            runs.append((run, TERMINATED if is_done else OPEN))
            run = []
    assert [(t["observation"][:, 0].tolist(), t["flags"]) for t in got] == runs
