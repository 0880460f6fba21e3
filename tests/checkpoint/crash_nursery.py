"""Processes that are made to be killed: one that has imported everything forks them on request.

`python -m tests.checkpoint.crash_nursery module:function` reads lines "folder seed" and answers each with
the process id of a child that calls `function(folder, seed)`, which works until it is killed.
"""

from __future__ import annotations

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


@contextmanager
def nursery(work: str) -> Iterator[subprocess.Popen]:
    command = [sys.executable, "-m", "tests.checkpoint.crash_nursery", work]
    root = Path(__file__).parents[2]
    process = subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.stdin.close()
        process.wait(10)


def kill_one(process: subprocess.Popen, folder: Path, seed: int, longest_s: float = 0.25) -> None:
    """Let a child live for a random time and kill it."""
    folder.mkdir()
    process.stdin.write(f"{folder} {seed}\n")
    process.stdin.flush()
    process_id = int(process.stdout.readline())
    time.sleep(float(np.random.default_rng(seed).random() ** 2 * longest_s))
    os.kill(process_id, signal.SIGKILL)
    while os.path.exists(f"/proc/{process_id}"):
        time.sleep(0.001)


class Counter:
    """A number in a file, that is there after a kill."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_CREAT | os.O_RDWR)

    def set(self, value: int) -> None:
        os.pwrite(self._file, value.to_bytes(8, "little"), 0)

    @staticmethod
    def read(path: Path) -> int:
        return int.from_bytes(path.read_bytes(), "little") if path.exists() else 0


def main() -> None:
    module, function = sys.argv[1].split(":")
    work = getattr(importlib.import_module(module), function)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    print("ready", flush=True)
    for line in sys.stdin:
        folder, seed = line.split()
        process_id = os.fork()
        if process_id == 0:
            try:
                work(Path(folder), int(seed))
            finally:
                os._exit(1)
        print(process_id, flush=True)


if __name__ == "__main__":
    main()
