"""Ctrl-C while a writer waits for the disk: the next `close()` publishes finished steps, and
nothing hangs.

Ctrl-C at random instants is in `test_crash.py`.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from rollout_data import RolloutWriter
from tests.files.readback import trajectories_of

pytestmark = pytest.mark.usefixtures("ctrl_c")


@pytest.fixture(autouse=True)
def no_garbage_collection() -> Iterator[None]:
    """Disable the garbage collector: Python drops a KeyboardInterrupt within its callbacks, and
    hypothesis has one.
    """
    gc.disable()
    yield
    gc.enable()


def interrupted(call: Callable[[], object]) -> None:
    """Make a call that waits, and press Ctrl-C."""
    timer = threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        call()
    timer.join()


def add(writer: RolloutWriter, step: int) -> None:
    writer.add(
        observation=np.full((1, 64), step, np.float32),
        action=np.zeros((1, 1)),
        done=[step % 2 == 1],
    )


def steps_in(folder: Path) -> list[int]:
    return sorted(
        int(step)
        for trajectory in trajectories_of(folder)
        for step in trajectory.column("observation")[:, 0]
    )


def test_close_completes_after_an_interrupted_close(tmp_path, slow_disk):
    writer = RolloutWriter(tmp_path, 1, durable=False)
    for step in range(5):
        add(writer, step)
    interrupted(writer.close)
    interrupted(writer.close)
    slow_disk.set()
    writer.close()
    assert steps_in(tmp_path) == list(range(5)) and writer.num_frames == 5
    assert not list(tmp_path.glob(".rollout_*"))


@pytest.mark.parametrize("max_pending_blocks", [1, 2, 3])
def test_recording_continues_after_an_interrupted_add(tmp_path, slow_disk, max_pending_blocks):
    writer = RolloutWriter(
        tmp_path, 1, durable=False, block_bytes=1, max_pending_blocks=max_pending_blocks
    )
    for step in range(max_pending_blocks - 1):
        add(writer, step)
    interrupted(lambda: add(writer, max_pending_blocks - 1))
    slow_disk.set()
    for step in range(max_pending_blocks, 8):
        add(writer, step)
    writer.close()
    assert set(range(8)) - set(steps_in(tmp_path)) <= {max_pending_blocks - 1}
    assert len(set(steps_in(tmp_path))) == len(steps_in(tmp_path)) == writer.num_frames


def test_a_flush_that_was_interrupted_publishes_each_step_once(tmp_path, slow_disk):
    with RolloutWriter(tmp_path, 1, durable=False) as writer:
        add(writer, 0)
        interrupted(writer.flush)
        slow_disk.set()
        add(writer, 1)
        writer.flush()
        assert steps_in(tmp_path) == [0, 1]
    assert steps_in(tmp_path) == [0, 1]


def test_every_writer_is_closed_at_exit_even_if_one_fails(tmp_path):
    code = (
        "import shutil, sys, numpy as np\nfrom rollout_data import RolloutWriter\n"
        "writers = [RolloutWriter(f'{sys.argv[1]}/{name}', 1) for name in 'abc']\n"
        "for one in writers: one.add(observation=np.zeros((1, 1)), action=np.zeros(1))\n"
        "shutil.rmtree(sys.argv[1] + '/b')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert "A block could not be written to" in done.stderr
    assert steps_in(tmp_path / "a") == steps_in(tmp_path / "c") == [0]
