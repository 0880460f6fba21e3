"""Worker processes that tests kill or interrupt, to check the files that are left.

Importing the library takes long, so one process imports it and forks a worker on request.
`python -m tests.killed module:function` reads lines "folder seed" from stdin. For each line it
prints the process id of a new worker, which runs `function(folder, seed)` until it is killed or
interrupted. A worker reports its progress to the test by a `Counter`.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

_PATIENCE_S = 60.0


class Counter:
    """Number in a file, by which a killed worker has reported its progress."""

    def __init__(self, path: Path) -> None:
        self.file = os.open(path, os.O_CREAT | os.O_RDWR)

    def set(self, value: int) -> None:
        os.pwrite(self.file, value.to_bytes(8, "little"), 0)

    @staticmethod
    def read(path: Path) -> int:
        return int.from_bytes(path.read_bytes(), "little") if path.exists() else 0


@contextmanager
def workers(work: str) -> Iterator[subprocess.Popen]:
    """Start the process that forks workers, which run the function `work`: "module:function"."""
    command = [sys.executable, "-m", "tests.killed", work]
    root = Path(__file__).parents[1]
    process = subprocess.Popen(
        command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.stdin.close()
        process.wait(_PATIENCE_S)


def start_one(process: subprocess.Popen, folder: Path, seed: int, longest_s: float = 0.25) -> int:
    """Create a folder, start a worker in it, and wait for a random time.

    Returns the process id of the worker.
    """
    folder.mkdir()
    process.stdin.write(f"{folder} {seed}\n")
    process.stdin.flush()
    process_id = int(process.stdout.readline())
    time.sleep(float(np.random.default_rng(seed).random() ** 2 * longest_s))
    return process_id


def kill_one(process: subprocess.Popen, folder: Path, seed: int, longest_s: float = 0.25) -> None:
    """Start a worker in a new folder, and kill it after a random time."""
    process_id = start_one(process, folder, seed, longest_s)
    os.kill(process_id, signal.SIGKILL)
    assert has_ended(process_id, _PATIENCE_S)


def kill_one_at(
    process: subprocess.Popen, folder: Path, seed: int, progress: Path, most: int = 20
) -> None:
    """Start a worker in a new folder, and kill it when it has reported a random progress.

    A worker reports its progress by a `Counter` in the file `progress`. So it is killed during its
    work, even on a busy machine.
    """
    rng = np.random.default_rng(seed)
    process_id = start_one(process, folder, seed, 0.0)
    end_s = time.monotonic() + _PATIENCE_S
    wanted = rng.integers(most)
    while Counter.read(progress) < wanted and time.monotonic() < end_s:
        time.sleep(0.001)
    time.sleep(float(rng.random() * 0.01))
    os.kill(process_id, signal.SIGKILL)
    assert has_ended(process_id, _PATIENCE_S)


def interrupt_one(process: subprocess.Popen, folder: Path, seed: int, progress: Path) -> None:
    """Start a worker in a new folder, and send SIGINT after a random time until the worker ends.

    A running worker increments the `Counter` in the file `progress`.
    """
    process_id = start_one(process, folder, seed)
    os.kill(process_id, signal.SIGINT)
    end_s = time.monotonic() + _PATIENCE_S
    while not has_ended(process_id, 0.5):
        before = Counter.read(progress)
        time.sleep(0.1)
        # Python ignores a KeyboardInterrupt inside a callback, mostly while a worker starts. Such
        # a worker continues, so a user would press Ctrl-C again. A worker that is closing its files
        # must not be interrupted again.
        if Counter.read(progress) > before:
            os.kill(process_id, signal.SIGINT)
        if time.monotonic() > end_s:
            os.kill(process_id, signal.SIGUSR1)  # The worker prints where it hangs.
            assert has_ended(process_id, 0.5), (
                f"the worker {process_id} of seed {seed} does not end"
            )


def has_ended(process_id: int, within_s: float) -> bool:
    """Wait at most `within_s` seconds for a process to end. Return whether it has ended."""
    end_s = time.monotonic() + within_s
    while os.path.exists(f"/proc/{process_id}"):
        if time.monotonic() > end_s:
            return False
        time.sleep(0.001)
    return True


def main() -> None:
    module, function = sys.argv[1].split(":")
    work = getattr(importlib.import_module(module), function)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    # If a shell has started the tests with SIGINT ignored, an early SIGINT would be lost.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    print("ready", flush=True)
    for line in sys.stdin:
        folder, seed = line.split()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # Until the worker handles it.
        process_id = os.fork()
        if process_id == 0:
            try:
                faulthandler.register(signal.SIGUSR1, all_threads=True)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
                work(Path(folder), int(seed))
            except KeyboardInterrupt:
                pass
            finally:
                os._exit(1)
        print(process_id, flush=True)


if __name__ == "__main__":
    main()
