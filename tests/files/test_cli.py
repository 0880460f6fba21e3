"""`rollout-data info | verify | pack`, and retention."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys

import h5py
import numpy as np
import pytest

from rollout_data import prune
from rollout_data.blocks.block_folder import BlockFolder
from rollout_data.blocks.block_header import DROPPED, read_header
from rollout_data.blocks.trajectory_index import TrajectoryIndex
from rollout_data.tools.cli.command_line import main
from rollout_data.tools.edit.pack_folder import check_folder, pack_dataset
from rollout_data.writing.rollout_writer import RolloutWriter
from storage.errors import DataFileError, UsageError
from tests.files.readback import blocks_of, end_of, trajectories_of

N = 3


def record(folder, num_steps=60, seed=0, **options):
    rng = np.random.default_rng(seed)
    with RolloutWriter(
        folder,
        N,
        **{"block_bytes": 80_000, "durable": False, "metadata": {"env": "walk"}, **options},
    ) as writer:
        for t in range(num_steps):
            done = rng.random(N) < 0.1
            code = np.arange(N) + 10.0 * t
            writer.add(
                observation={"a": np.stack([code, code], -1), "big": np.tile(code[:, None], 600)},
                action=code.astype(np.float32),
                reward=code.astype(np.float32)[:, None],
                done=done,
                timeout=done & (rng.random(N) < 0.5),
                final_observation={
                    "a": np.stack([-code, code], -1),
                    "big": np.tile(code[:, None], 600),
                },
                policy_version=t // 20,
            )
    return folder


def in_order(folder):
    """Return trajectories in the order of completion without their numbers, as readers return
    them.
    """
    blocks = BlockFolder(folder)
    blocks.refresh()
    index = TrajectoryIndex(list(blocks.blocks.values()))
    by_key = {
        (trajectory.writer, trajectory.number): trajectory for trajectory in trajectories_of(folder)
    }
    keys = zip(index.writer.tolist(), index.number.tolist(), strict=True)
    actual = [by_key[(index.writers[writer].rpartition(":")[2], number)] for writer, number in keys]
    return [
        (
            trajectory.env,
            end_of(trajectory),
            trajectory.versions,
            trajectory.end_time_ns,
            trajectory.reward_sum.tolist(),
            {name: trajectory.column(name).tolist() for name in trajectory.fields},
            None
            if trajectory.finals is None
            else {name: value.tolist() for name, value in trajectory.finals.items()},
        )
        for trajectory in actual
    ]


def damage(path, table="data", column="frames", row=0):
    header = read_header(path)
    offset, _ = header.locations[table][column]
    with open(path, "r+b") as file:
        file.seek(offset + row * header.layouts[table].columns[column].row_bytes)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))


def test_info_prints_the_contents_of_a_folder(tmp_path, capsys):
    record(tmp_path)
    (tmp_path / "other.h5").write_bytes(b"x")
    assert main(["info", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    actual = trajectories_of(tmp_path)
    assert f"{len(actual):,} trajectories, 180 frames" in text
    assert "observation/big  float64[600]" in text and 'env: "walk"' in text and "other.h5" in text
    assert main(["info", str(tmp_path), "--json"]) == 0
    about = json.loads(capsys.readouterr().out)
    assert about["total_trajectories"] == len(actual) and about["ends"]["open"] == N
    assert list(about["problems"]) == ["other.h5"]


def test_verify_of_intact_data_is_quiet_and_changes_nothing(tmp_path, capsys):
    record(tmp_path)
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert main(["verify", str(tmp_path)]) == 0
    assert "180 frames intact; 0 damaged or foreign files" in capsys.readouterr().out
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before


def test_verify_names_every_bad_file_with_the_reason(tmp_path, capsys):
    record(tmp_path)
    paths = sorted(tmp_path.glob("rollout_*.h5"))
    damage(paths[3])
    paths[5].write_bytes(paths[5].read_bytes()[:5000])
    (tmp_path / "notes.h5").write_bytes(b"hello")
    with h5py.File(tmp_path / "foreign.hdf5", "w") as file:
        file["x"] = 1
    assert main(["verify", str(tmp_path)]) == 1
    text = capsys.readouterr().out
    for name, reason in (
        (paths[3].name, "checksum"),
        (paths[5].name, "truncated"),
        ("notes.h5", "no HDF5 file"),
        ("foreign.hdf5", "expected 'rollout-data'"),
    ):
        (line,) = [line for line in text.splitlines() if line.startswith(name + ":")]
        assert reason in line, line
    assert "4 damaged or foreign files" in text


def test_repair_sets_bad_files_aside_and_keeps_the_intact_trajectories(tmp_path, capsys):
    record(tmp_path)
    good = in_order(tmp_path)
    paths = sorted(tmp_path.glob("rollout_*.h5"))
    damage(paths[2], "data", "observation/big", row=1)
    fragment = read_header(paths[2]).fragments[
        1 if read_header(paths[2]).fragments["row"][1] == 1 else 0
    ]
    (tmp_path / "notes.h5").write_bytes(b"hello")
    assert main(["verify", "--repair", str(tmp_path)]) == 1
    text = capsys.readouterr().out
    assert (
        "kept all but 1 of its trajectories" in text
        and f"moved to {tmp_path / 'damaged' / 'notes.h5'}" in text
    )
    assert sorted(path.name for path in (tmp_path / "damaged").iterdir()) == [
        "notes.h5",
        paths[2].name,
    ]
    assert main(["verify", str(tmp_path)]) == 0
    left = in_order(tmp_path)
    (lost,) = [item for item in good if item not in left]
    assert len(left) == len(good) - 1 and lost[0] == fragment["env"]


def test_repair_of_an_unreadable_block_keeps_the_other_blocks(tmp_path, capsys):
    record(tmp_path)
    good = in_order(tmp_path)
    path = sorted(tmp_path.glob("rollout_*.h5"))[4]
    path.write_bytes(path.read_bytes()[:3000])
    assert main(["verify", "--repair", str(tmp_path)]) == 1
    assert main(["verify", str(tmp_path)]) == 1, "trajectories with a missing part are still told"
    assert "with a missing part" in capsys.readouterr().out
    report = check_folder(tmp_path)
    assert not report.problems and report.num_trajectories < len(good)


@pytest.mark.each_value
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("block_mb", [1, 1024])
def test_pack_keeps_every_trajectory_and_makes_it_contiguous(tmp_path, capsys, in_place, block_mb):
    source = record(tmp_path / "data", num_steps=120)
    record(source, num_steps=30, seed=1)
    with RolloutWriter(source, N, success_only=True, durable=False, block_bytes=1) as writer:
        big = np.zeros((N, 600))
        for t in range(4):
            values = {
                "observation": {"a": np.zeros((N, 2)), "big": big},
                "action": np.zeros(N, np.float32),
            }
            ends = {"done": [t == 2, t == 3, 0], "timeout": [0, t == 3, 0], "success": [0, 1, 0]}
            writer.add(**values, reward=np.zeros((N, 1), np.float32), **ends)
    before = in_order(source)
    target = source if in_place else tmp_path / "packed"
    where = ["--in-place"] if in_place else [str(target)]
    assert main(["pack", str(source), *where, "--block-mb", str(block_mb)]) == 0
    assert f"{len(before)} trajectories" in capsys.readouterr().out
    assert in_order(target) == before
    headers = blocks_of(target)
    assert len(headers) == (1 if block_mb > 1 else len(headers)) < 20
    for header in headers:
        keys = header.fragments["trajectory"].tolist()
        assert keys == sorted(keys)
        assert (
            header.fragments["row"].tolist()
            == np.r_[0, np.cumsum(header.fragments["length"])[:-1]].tolist()
        )
    assert json.loads((target / "metadata.json").read_text())["env"] == "walk"
    assert (target / ".index.npz").exists() and not (target / ".packing").exists()
    with RolloutWriter(target, N) as writer:  # and recording goes on
        writer.add(
            observation={"a": np.zeros((N, 2)), "big": big},
            action=np.zeros(N, np.float32),
            reward=np.zeros((N, 1), "f4"),
        )
    assert len(in_order(target)) == len(before) + N


def test_pack_refuses_full_targets_recording_folders_and_damaged_blocks(tmp_path):
    source = record(tmp_path / "data")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("")
    with pytest.raises(UsageError, match="Choose a new or empty folder"):
        pack_dataset(source, tmp_path / "full")
    with (
        RolloutWriter(source, N),
        pytest.raises(UsageError, match="a writer records into"),
    ):
        pack_dataset(source)
    damage(sorted(source.glob("rollout_*.h5"))[0])
    before = sorted(path.name for path in source.iterdir())
    with pytest.raises(DataFileError, match="verify --repair"):
        pack_dataset(source)
    assert sorted(path.name for path in source.iterdir()) == before


def test_pack_ends_the_unfinished_trajectories_of_a_dead_writer(tmp_path):
    source = record(tmp_path / "data", num_steps=20)
    last = sorted(source.glob("rollout_*.h5"))[-1]
    last.unlink()  # the block in which the recording was closed
    assert any(end_of(trajectory) == "" for trajectory in trajectories_of(source))
    pack_dataset(source, tmp_path / "packed")
    assert not any(end_of(trajectory) == "" for trajectory in trajectories_of(tmp_path / "packed"))


@pytest.mark.parametrize("keep", [7, pytest.param(1, marks=pytest.mark.thorough)])
def test_retention_keeps_the_latest_and_deletes_whole_blocks(tmp_path, keep):
    record(tmp_path, num_steps=80)
    record(tmp_path, num_steps=40, seed=2)
    before, num_blocks = in_order(tmp_path), len(blocks_of(tmp_path))
    deleted = prune(tmp_path, trajectories=keep)
    assert len(blocks_of_any(tmp_path)) == num_blocks - len(deleted) < num_blocks
    blocks = BlockFolder(tmp_path)
    blocks.refresh()
    index = TrajectoryIndex(list(blocks.blocks.values()))
    assert index.lengths[-keep:].tolist() == [len(item[2]) for item in before[-keep:]]
    assert index.end_time_ns[-keep:].tolist() == [item[3] for item in before[-keep:]]
    assert set(index.end_time_ns.tolist()) <= {item[3] for item in before}, "nothing is torn"
    assert prune(tmp_path, trajectories=keep) == []


def blocks_of_any(folder):
    return list(folder.glob("rollout_*.h5"))


def test_no_command_waits_for_a_pipe_named_like_a_block(tmp_path, capsys):
    record(tmp_path)
    (tmp_path / "metadata.json").unlink()
    os.mkfifo(tmp_path / "rollout_0_000000.h5")
    assert main(["info", str(tmp_path)]) == 0
    assert prune(tmp_path, trajectories=1000) == []
    assert main(["verify", "--repair", str(tmp_path)]) == 1
    assert (tmp_path / "damaged" / "rollout_0_000000.h5").is_fifo()
    assert main(["verify", str(tmp_path)]) == 0


def test_retention_keeps_all_trajectories_within_the_limit(tmp_path):
    record(tmp_path, num_steps=5)
    assert prune(tmp_path, trajectories=100) == []
    with pytest.raises(UsageError, match="trajectories must be >= 1, got 0"):
        prune(tmp_path, trajectories=0)


def test_retention_never_revives_a_dropped_trajectory(tmp_path):
    dropped = set()
    with RolloutWriter(tmp_path, 2, durable=False, block_bytes=1) as writer:
        for t in range(60):
            writer.add(observation=np.full((2, 1), t), action=np.zeros(2), done=[t % 5 == 4, False])
            if t % 7 == 6:
                writer.discard([1])
            if t % 10 == 9:
                writer.flush()
                for header in blocks_of(tmp_path):
                    dropped |= set(
                        header.fragments["trajectory"][
                            header.fragments["flags"] & DROPPED > 0
                        ].tolist()
                    )
                prune(tmp_path, trajectories=2)
                blocks = BlockFolder(tmp_path)
                blocks.refresh()
                assert not dropped & set(
                    TrajectoryIndex(list(blocks.blocks.values())).number.tolist()
                )
    assert len(dropped) == 8


def test_the_command_runs_as_a_module(tmp_path):
    record(tmp_path, num_steps=3)
    done = subprocess.run(
        [sys.executable, "-m", "rollout_data.tools", "verify", str(tmp_path)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "9 frames intact" in done.stdout


def run_cli(*arguments, **options):
    command = [sys.executable, "-m", "rollout_data.tools", *map(str, arguments)]
    return subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=170, **options)


def the_line(done):
    """Return the single line on stderr of a failed call."""
    assert done.returncode in (1, 2), done
    (line,) = done.stderr.splitlines()
    return line


@pytest.mark.parametrize("command", ["info", "verify", "pack"])
def test_an_error_of_the_operating_system_is_printed_in_one_line(tmp_path, capsys, command):
    record(tmp_path / "data", num_steps=3)
    more = ["--in-place"] if command == "pack" else []
    inside_a_file = tmp_path / "file" / "out"
    inside_a_file.parent.write_text("")
    no_data = "has no known format" if command == "info" else "a folder"
    cases = [("x" * 300, "File name too long"), (str(tmp_path / "data" / "metadata.json"), no_data)]
    for folder, message in cases:
        assert main([command, folder, *more]) in (1, 2)
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line
    if command == "pack":
        assert main(["pack", str(tmp_path / "data"), str(inside_a_file)]) in (1, 2)
        (line,) = capsys.readouterr().err.splitlines()
        assert "cannot be written" in line
    with open("/dev/full", "w") as full:
        assert "No space left" in the_line(run_cli(command, tmp_path / "data", *more, stdout=full))
    reader, writer = os.pipe()
    os.close(reader)
    assert "Broken pipe" in the_line(run_cli(command, tmp_path / "data", *more, stdout=writer))
    os.close(writer)


def test_a_full_disk_is_printed_in_one_line_with_the_file(tmp_path, capsys):
    record(tmp_path / "data", num_steps=3)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        assert main(["pack", str(tmp_path / "data"), str(tmp_path / "packed")]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    (line,) = capsys.readouterr().err.splitlines()
    assert "File too large" in line and "packed" in line


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is forbidden to root")
def test_an_unreadable_folder_is_printed_in_one_line(tmp_path):
    record(tmp_path / "data", num_steps=3)
    (tmp_path / "data").chmod(0)
    try:
        assert "Permission denied" in the_line(run_cli("info", tmp_path / "data"))
    finally:
        (tmp_path / "data").chmod(0o700)


@pytest.mark.parametrize(
    "content", [{}, {"a.png": b"x", "b.h5": b"y"}, {"metadata.json": b'{"name": "x"}'}]
)
@pytest.mark.parametrize(
    "call",
    ["info", "info --json", "verify", "verify --repair", "pack --in-place", "prune --frames 5"],
)
def test_a_folder_without_a_dataset_is_an_error(tmp_path, capsys, content, call):
    for name, text in content.items():
        (tmp_path / name).write_bytes(text)
    assert main([*call.split(), str(tmp_path)]) == 1
    output = capsys.readouterr()
    assert (
        output.out == ""
        and "has neither blocks (rollout_*.h5) nor a metadata.json with fields" in output.err
    )
    assert len(output.err.splitlines()) == 1


def test_info_succeeds_without_frames_without_metadata_and_with_damaged_blocks(tmp_path, capsys):
    record(tmp_path, num_steps=3)
    (tmp_path / "metadata.json").rename(tmp_path / "kept")
    assert main(["info", str(tmp_path)]) == 0 and "9 frames" in capsys.readouterr().out
    for path in tmp_path.glob("rollout_*.h5"):
        path.write_bytes(b"damaged")
    assert main(["info", str(tmp_path)]) == 0 and "2 files skipped" in capsys.readouterr().out
    for path in tmp_path.glob("rollout_*.h5"):
        path.unlink()
    (tmp_path / "kept").rename(tmp_path / "metadata.json")
    assert (
        main(["info", str(tmp_path)]) == 0 and "0 trajectories, 0 frames" in capsys.readouterr().out
    )


def test_control_characters_of_files_do_not_reach_the_terminal(tmp_path, capsys):
    evil = "a\x1b[31mb\nc\r\x07\x9b2J\u202ed\x7f\u2028"
    with RolloutWriter(
        tmp_path, 1, durable=False, metadata={evil: evil, "plain \u00e9": {evil: [evil]}}
    ) as writer:
        writer.add(observation={"f" + evil: np.zeros((1, 2))}, action=np.zeros(1), done=[True])
    (tmp_path / f"{evil.replace('/', '')}.h5").write_bytes(b"x")
    for options in ([], ["--json"]):
        assert main(["info", str(tmp_path), *options]) == 0
        text = capsys.readouterr().out
        assert all(letter.isprintable() or letter == "\n" for letter in text)
        assert ("\\x1b[31mb\\nc" if not options else "\\u001b[31mb\\nc") in text
    assert json.loads(text)["metadata"][evil] == evil
    assert main(["verify", str(tmp_path)]) == 1
    text = capsys.readouterr().out
    assert (
        all(letter.isprintable() or letter == "\n" for letter in text)
        and len(text.splitlines()) == 2
    )
    assert main(["info", str(tmp_path / evil)]) == 2
    lines = capsys.readouterr().err
    assert len(lines.splitlines()) == 1 and lines[:-1].isprintable()
    record(tmp_path / evil)
    capsys.readouterr()
    assert main(["prune", str(tmp_path / evil), "--trajectories", "1", "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 1 and all(line.isprintable() for line in lines)
