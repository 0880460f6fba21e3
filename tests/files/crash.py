"""Kill recorders at random instants and look at what they left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from rollout_data.writer import RolloutWriter
from tests.files import crash_nursery
from tests.files.readback import blocks_of, end_of, trajectories_of

_PATIENCE_S = 20.0


@contextmanager
def nursery() -> Iterator[subprocess.Popen]:
    command = [sys.executable, "-m", "tests.files.crash_nursery"]
    root = Path(__file__).parents[2]
    process = subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.stdin.close()
        process.wait(10)


def stop_one(process: subprocess.Popen, folder: Path, seed: int, number: signal.Signals) -> int:
    """Let a recorder live for a random time and send it a signal; give the frames whose `add` had returned."""
    rng = np.random.default_rng(seed)
    process.stdin.write(f"{folder} {seed}\n")
    process.stdin.flush()
    process_id = int(process.stdout.readline())
    time.sleep(float(rng.random() ** 3 * 0.25))
    os.kill(process_id, number)
    end_s = time.monotonic() + _PATIENCE_S
    while not _has_ended(process_id, 0.5):
        before = acknowledged(folder)
        time.sleep(0.1)
        # Python drops a KeyboardInterrupt that falls into a callback, mostly while it starts: a user sees it
        # go on and presses again. One that is closing must be left alone.
        if acknowledged(folder) > before:
            os.kill(process_id, number)
        if time.monotonic() > end_s:
            os.kill(process_id, signal.SIGUSR1)  # it tells where it hangs
            assert _has_ended(process_id, 0.5), f"recorder {process_id} of seed {seed} does not end"
    return acknowledged(folder)


def acknowledged(folder: Path) -> int:
    """Give the frames whose `add` had returned."""
    path = Path(f"{folder}.acknowledged")
    return int.from_bytes(path.read_bytes(), "little") if path.exists() else 0


def _has_ended(process_id: int, within_s: float) -> bool:
    end_s = time.monotonic() + within_s
    while os.path.exists(f"/proc/{process_id}"):
        if time.monotonic() > end_s:
            return False
        time.sleep(0.001)
    return True


def kill_one(process: subprocess.Popen, folder: Path, seed: int) -> dict[str, int]:
    """Kill a recorder at a random instant, check everything; give what happened."""
    return check_what_is_left(folder, stop_one(process, folder, seed, signal.SIGKILL))


def interrupt_one(process: subprocess.Popen, folder: Path, seed: int) -> int:
    """Press Ctrl-C at a random instant: all that was added is published; give the number of frames."""
    added = stop_one(process, folder, seed, signal.SIGINT)
    published = check_recording(folder) if folder.exists() else 0
    assert added <= published <= added + 4, (added, published)
    left = [*folder.glob(".rollout_*"), *folder.glob(".tmp_*")]
    assert not left or not published, left  # one interrupted while it was being made may leave an empty journal
    return published


def check_what_is_left(folder: Path, added: int) -> dict[str, int]:
    published = check_recording(folder) if folder.exists() else 0
    temporaries = list(folder.glob(".tmp_*"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        writer = RolloutWriter(folder, 1)
    lost = sum(dead.num_lost_frames for dead in writer.recovered)
    assert [f"{lost} frames that it had not published" in str(one.message) for one in caught] == [True] * len(
        writer.recovered
    )
    writer.close()
    left = [path.name for path in folder.iterdir() if path.name.startswith(".") and path.name != ".index.npz"]
    assert left == [], left
    assert added <= published + lost <= added + 4, (added, published, lost)
    headers = blocks_of(folder)
    if headers:
        frame_bytes = headers[0].layouts["data"].frame_bytes
        assert lost * frame_bytes <= crash_nursery.BLOCK_BYTES, "at most one block is lost"
    return {"published": published, "lost": lost, "blocks": len(headers), "temporaries": len(temporaries)}


def check_recording(folder: Path) -> int:
    """Check every value of every frame; give the number of frames."""
    num_frames = 0
    for one in trajectories_of(folder):
        observation = one.column("observation")
        assert (observation[:, 0] == one.env).all() and (observation[:, 1] == observation[0, 1]).all()
        assert observation[:, 2].tolist() == list(range(one.length)), "no frame is torn out"
        assert one.column("action").tolist() == (observation[:, 2] * 2).tolist()
        if end_of(one) not in ("", "open"):
            assert one.finals["observation"].tolist() == [one.env, observation[0, 1], one.length]
        num_frames += one.length
    return num_frames
