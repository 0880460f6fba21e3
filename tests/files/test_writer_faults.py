"""Faults while recording: each raises one clear error, and all published data stay readable."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import subprocess
import sys
import threading
import time
from contextlib import suppress

import numpy as np
import pytest

from rollout_data import RolloutDataWarning, RolloutWriter
from rollout_data.blocks.block_folder import read_metadata
from rollout_data.blocks.folder_metadata import Metadata, publish_metadata
from storage.core.fields import Field, Schema
from storage.errors import BackgroundError, DataFileError, RolloutDataError, SchemaError, UsageError
from tests.faults import instead_of
from tests.files.readback import blocks_of, trajectories_of

N = 2


def step(t=0):
    return {
        "observation": np.full((N, 300), t, np.float32),
        "action": np.full((N, 1), t, np.float32),
    }


def frames_in(folder):
    return sum(trajectory.length for trajectory in trajectories_of(folder))


def check_left(folder, num_frames):
    assert frames_in(folder) == num_frames
    assert {path.suffix for path in folder.iterdir()} <= {".h5", ".json", ".npz"}
    assert not list(folder.glob(".tmp_*"))


@pytest.mark.parametrize("call", ["add", "flush", "discard", "close"])
def test_a_background_failure_is_raised_at_the_next_call_and_at_close(tmp_path, call):
    data, away = tmp_path / "data", tmp_path / "away"
    writer = RolloutWriter(data, N, durable=False)
    writer.add(**step(1))
    writer.flush()
    writer.add(**step(2))
    data.rename(away)
    with pytest.raises(BackgroundError):
        writer.flush()
    away.rename(data)
    calls = {
        "add": lambda: writer.add(**step(3)),
        "flush": writer.flush,
        "discard": lambda: writer.discard([0]),
    }
    if call != "close":
        with pytest.raises(BackgroundError) as caught:
            calls[call]()
        assert isinstance(caught.value, RolloutDataError) and isinstance(
            caught.value.__cause__, OSError
        )
    with pytest.raises(BackgroundError) as caught:
        writer.close()
    assert str(caught.value) == (
        f"A block could not be written to {str(data)!r}: "
        f"[Errno 2] No such file or directory: '{data}/.tmp_rollout_{writer.name}_000001.h5'. "
        "The published blocks are intact. Close this writer and create a new writer."
    )
    writer.close()
    check_left(data, N)


def test_a_full_disk_ends_in_one_error(tmp_path):
    """With a tmpfs of 1 MiB if mounting is allowed, otherwise in another process with a limit of
    file sizes.
    """
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("mounting a tmpfs is not permitted here")
    try:
        data = folder / "data"
        writer = RolloutWriter(data, N, block_bytes=400_000)
        with pytest.raises(BackgroundError, match="No space left on device"), writer:
            for t in range(10_000):
                writer.add(**step(t))
        assert len(blocks_of(data)) >= 2
        check_left(data, frames_in(data))
        with open(folder / "filler", "wb", buffering=0) as file, suppress(OSError):
            while file.write(bytes(4096)):
                pass
        with pytest.raises(DataFileError, match=r"is not writable: .*No space left on device"):
            RolloutWriter(data, N)
        check_left(data, frames_in(data))
        # Wherever it ends: journal, metadata, header, rows, checksums
        for room in range(16_384, 200_000, 16_384):
            os.truncate(folder / "filler", max(0, (folder / "filler").stat().st_size - 16_384))
            error = None
            try:
                with RolloutWriter(data, N) as writer:
                    for t in range(3):
                        writer.add(**step(t))
            except RolloutDataError as caught:
                error = caught
            check_left(data, frames_in(data))
            assert error is None or "No space left" in str(error) or room < 100_000, str(error)
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_files_that_may_not_grow_end_in_one_error(tmp_path):
    code = (
        "import resource, signal, sys\nimport numpy as np\nfrom rollout_data import RolloutWriter\n"
        "from storage.errors import BackgroundError\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "writer = RolloutWriter(sys.argv[1], 1, block_bytes=1 << 20)\n"
        "def add(t): writer.add(observation=np.full((1, 300), t, np.float32), action=np.zeros(1))\n"
        "add(0); writer.flush()\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))\n"
        "try:\n    [add(t) for t in range(5000)]; writer.close()\n"
        "except BackgroundError as error:\n    print(error)\n"
        "try:\n    writer.close()\nexcept BackgroundError as error:\n    print('at close')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert (
        "A block could not be written to" in done.stdout
        and "File too large" in done.stdout
        and "at close" in done.stdout
    )
    check_left(tmp_path, 1)


def test_a_folder_deleted_while_recording_ends_in_one_error(tmp_path):
    data = tmp_path / "data"
    writer = RolloutWriter(data, N, block_bytes=10_000)
    writer.add(**step())
    shutil.rmtree(data)
    with pytest.raises(BackgroundError, match="No such file or directory"):
        for t in range(100):
            writer.add(**step(t))
        writer.flush()
    with pytest.raises(BackgroundError):
        writer.close()
    assert not data.exists()
    writer.close()


def test_a_folder_whose_journal_cannot_be_created_raises_at_once(tmp_path):
    journal = tmp_path / ".rollout_a.journal"
    journal.mkdir()
    with pytest.raises(DataFileError) as caught:
        RolloutWriter(tmp_path, N, writer_name="a")
    assert str(caught.value) == (
        f"The data folder {str(tmp_path)!r} is not writable: "
        f"[Errno 21] Is a directory: {str(journal)!r}."
    )
    assert isinstance(caught.value.__cause__, OSError)


def test_a_read_only_mount_raises_at_once(tmp_path):
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(tmp_path)], capture_output=True
    ).returncode:
        pytest.skip("mounting a tmpfs is not permitted here")
    try:
        for folder in (tmp_path, tmp_path / "new"):
            with pytest.raises(DataFileError, match=r"is not writable: .*Read-only file system"):
                RolloutWriter(folder, N)
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_folder_that_becomes_read_only_ends_in_one_error(tmp_path):
    data = tmp_path / "data"
    writer = RolloutWriter(data, N)
    writer.add(**step(1))
    writer.flush()
    if subprocess.run(["chattr", "+i", str(data)], capture_output=True).returncode:
        writer.close()
        pytest.skip("this file system has no immutable folders")
    try:
        writer.add(**step(2))
        for call in (writer.flush, lambda: writer.add(**step(3)), writer.close):
            with pytest.raises(
                BackgroundError, match=r"A block could not be written to .*(not permitted|denied)"
            ):
                call()
        with pytest.raises(DataFileError, match="is not writable"):
            RolloutWriter(data, N)
        assert frames_in(data) == N
    finally:
        subprocess.run(["chattr", "-i", str(data)], check=True)
    with pytest.warns(RolloutDataWarning, match=f"Its last {N} frames are lost"):
        RolloutWriter(data, N).close()
    check_left(data, N)


def test_a_file_in_place_of_the_folder_raises(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataFileError, match="is not writable"):
        RolloutWriter(tmp_path / "file", N)


def test_an_unwritable_metadata_file_writes_nothing(tmp_path):
    with RolloutWriter(tmp_path, N) as writer:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
        try:
            with pytest.raises(
                DataFileError, match=r"The metadata of .* could not be written: .* File too large"
            ):
                writer.add(**step())
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        writer.add(**step())
    check_left(tmp_path, N)


def test_file_systems_without_hard_links_are_supported(tmp_path):
    def refuse(link, *paths, **options):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    for _ in range(2):
        with instead_of("link", refuse), RolloutWriter(tmp_path, N) as writer:
            writer.add(**step())
    check_left(tmp_path, 2 * N)


def test_an_exception_in_the_users_loop_still_publishes(tmp_path):
    with pytest.raises(KeyboardInterrupt), RolloutWriter(tmp_path, N) as writer:
        writer.add(**step())
        raise KeyboardInterrupt
    check_left(tmp_path, N)


@pytest.mark.parametrize("pending", [1, 2, 3])
def test_a_slow_disk_holds_the_caller_back_and_drops_nothing(tmp_path, slow_disk, pending):
    writer = RolloutWriter(tmp_path, N, block_bytes=1, max_pending_blocks=pending, durable=False)
    num_added, most_added, has_added = 0, max(0, pending - 1), threading.Event()

    def record():
        nonlocal num_added
        for t in range(8):
            if num_added == most_added:
                has_added.set()
            writer.add(**step(t))
            num_added += 1

    recorder = threading.Thread(target=record)
    recorder.start()
    assert has_added.wait(60)
    recorder.join(0.1)
    assert recorder.is_alive() and num_added == most_added, (
        "every step is a block; the caller waits"
    )
    slow_disk.set()
    recorder.join()
    writer.close()
    check_left(tmp_path, 8 * N)


def test_metadata_has_one_winner_among_writers_that_start_together(tmp_path):
    schemas = [Schema([Field("observation", (size,))]) for size in (1, 2, 3, 4)] * 4
    barrier, outcomes = threading.Barrier(len(schemas)), []

    def publish(number, schema):
        barrier.wait()
        try:
            publish_metadata(
                tmp_path, Metadata.of_schema(schema, {"by": number}), f"w{number}", durable=False
            )
            outcomes.append(schema["observation"].shape[0])
        except SchemaError:
            pass

    threads = [threading.Thread(target=publish, args=item) for item in enumerate(schemas)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outcomes) == 4 and len(set(outcomes)) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["metadata.json"]


@pytest.mark.parametrize(
    "text", [None, "", "{", '{"fields": 3}', "[1]", '{"fields": [{"name": ""}]}', "\x00\xff"]
)
def test_metadata_that_is_missing_or_damaged_is_rebuilt_from_the_blocks(tmp_path, text):
    with RolloutWriter(tmp_path, N, metadata={"env": "walk"}) as writer:
        writer.add(**{**step(), "observation": {"a": np.zeros((N, 2)), "b": np.zeros((N, 1))}})
    whole = read_metadata(tmp_path)
    assert (whole["env"], whole["total_timesteps"], whole["total_trajectories"]) == ("walk", N, N)
    path = tmp_path / "metadata.json"
    path.unlink() if text is None else path.write_text(text, encoding="latin-1")
    rebuilt = read_metadata(tmp_path)
    for name in (
        "fields",
        "obs_segments",
        "obs_disassemble_mapping",
        "total_timesteps",
        "total_trajectories",
    ):
        assert rebuilt[name] == whole[name]
    with RolloutWriter(tmp_path, N, metadata={"env": "run"}) as writer:
        with pytest.raises(SchemaError):
            writer.add(**step())
        writer.add(**{**step(), "observation": {"a": np.zeros((N, 2)), "b": np.zeros((N, 1))}})
    assert (
        read_metadata(tmp_path)["fields"] == whole["fields"]
        and read_metadata(tmp_path)["env"] == "run"
    )


def test_reading_metadata_of_an_empty_folder_raises(tmp_path):
    with pytest.raises(
        DataFileError, match=r"contains neither a metadata\.json nor a readable block"
    ):
        read_metadata(tmp_path)


def test_unknown_keys_of_metadata_are_kept(tmp_path):
    with RolloutWriter(
        tmp_path, N, metadata={"config": {"a": [1, None]}, "total_timesteps": 5}
    ) as writer:
        writer.add(**step())
    metadata = read_metadata(tmp_path)
    assert metadata["config"] == {"a": [1, None]} and metadata["total_timesteps"] == N
    assert "total_timesteps" not in (tmp_path / "metadata.json").read_text()


def test_recording_into_a_folder_of_another_format_raises(tmp_path):
    (tmp_path / "metadata.json").write_text('{"env": "Other", "total_timesteps": 3}')
    with (
        RolloutWriter(tmp_path, N) as writer,
        pytest.raises(SchemaError, match="belongs to another format"),
    ):
        writer.add(**step())
    assert (tmp_path / "metadata.json").read_text().startswith('{"env": "Other"')


@pytest.mark.parametrize("is_published", [False, True])
def test_the_next_writer_warns_of_the_frames_that_a_dead_writer_lost(tmp_path, is_published):
    """The writer is killed just before or just after its second block is renamed."""
    code = (
        "import os, sys\nimport numpy as np\nfrom rollout_data import RolloutWriter\n"
        "writer, replace = RolloutWriter(sys.argv[1], 10, writer_name='dead'), os.replace\n"
        "def add(): writer.add(observation=np.zeros((10, 1)), action=np.zeros((10, 1)))\n"
        "def die(*paths):\n    if int(sys.argv[2]): replace(*paths)\n    os._exit(1)\n"
        "for _ in range(8): add()\n"
        "writer.flush()\nos.replace = die\n[add() for _ in range(2)]\n"
        "print(flush=True)\nsys.stdin.readline()\nwriter.flush()\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path), str(int(is_published))]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        process.stdout.readline()
        (tmp_path / ".tmp_rollout_alive_000004.h5").write_bytes(b"half")
        with RolloutWriter(tmp_path, N) as writer:
            assert writer.recovered == [], "its writer lives"
        process.communicate("\n")
    num_lost, start_ns = 0 if is_published else 20, time.time_ns() - 10**11
    with pytest.warns(
        RolloutDataWarning,
        match=f"'dead' of .* ended without .* last {num_lost} frames are lost",
    ):
        writer = RolloutWriter(tmp_path, N)
    (dead,) = writer.recovered
    assert (dead.writer, dead.num_lost_frames) == (
        "dead",
        num_lost,
    ) and start_ns < dead.last_sign_ns < time.time_ns()
    writer.close()
    assert [path.name for path in tmp_path.glob(".*")] == [".tmp_rollout_alive_000004.h5"]
    assert frames_in(tmp_path) == 100 - num_lost


def test_a_writer_name_with_damaged_blocks_is_not_continued(tmp_path):
    (tmp_path / "rollout_a_000000.h5").write_bytes(b"damaged")
    with pytest.raises(UsageError, match="of writer 'a' cannot be read"):
        RolloutWriter(tmp_path, N, writer_name="a")
    assert not list(tmp_path.glob(".rollout_*"))


@pytest.mark.parametrize(
    "make", [os.mkfifo, lambda path: os.symlink("/nonexistent/block", path), os.mkdir]
)
def test_a_writer_name_whose_block_is_not_a_file_is_not_continued(tmp_path, make):
    make(tmp_path / "rollout_a_000000.h5")
    with pytest.raises(UsageError, match="of writer 'a' cannot be read"):
        RolloutWriter(tmp_path, N, writer_name="a")


def test_a_writer_does_not_wait_for_a_pipe_named_like_a_block(tmp_path):
    os.mkfifo(tmp_path / "rollout_a_000000.h5")
    with RolloutWriter(tmp_path, N, writer_name="b", durable=False) as writer:
        writer.add(**step(0))
    assert read_metadata(tmp_path)["total_timesteps"] == N


@pytest.mark.parametrize("target", ["nonexistent/metadata.json", "metadata.json"])
def test_a_dangling_link_as_metadata_is_replaced(tmp_path, target):
    os.symlink(target, tmp_path / "metadata.json")
    with RolloutWriter(tmp_path, N, durable=False) as writer:
        writer.add(**step(0))
    assert read_metadata(tmp_path)["fields"] and not (tmp_path / "metadata.json").is_symlink()
