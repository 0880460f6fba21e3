"""Recorders that are made to be killed: a process that has imported everything forks them on request.

`python -m tests.files.crash_nursery` reads lines "folder seed" and answers each with the process id
of a recorder, which records until it is killed and writes the number of frames whose `add` has
returned into `<folder>.acknowledged`.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

from rollout_data.writer import RolloutWriter

BLOCK_BYTES = 6000


def step_of(rng: np.random.Generator, num_envs: int, ages: np.ndarray, numbers: np.ndarray) -> dict[str, np.ndarray]:
    """Make one step in which every value tells its env, trajectory and frame; advance the counters."""
    observation = np.stack([np.arange(num_envs), numbers, ages], axis=-1).astype(np.float64)
    done = rng.random(num_envs) < 0.1
    timeout = done & (rng.random(num_envs) < 0.5)
    final = observation + [0, 0, 1]
    ages += 1
    ages[done], numbers[done] = 0, numbers[done] + 1
    values = {"observation": observation, "action": observation[:, 2] * 2, "reward": observation[:, 2]}
    return {**values, "done": done, "timeout": timeout, "final_observation": final}


def record_until_killed(folder: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_envs = int(rng.integers(1, 5))
    ages, numbers = np.zeros(num_envs, np.int64), np.zeros(num_envs, np.int64)
    acknowledged = os.open(f"{folder}.acknowledged", os.O_CREAT | os.O_WRONLY)
    options = {"block_bytes": BLOCK_BYTES, "durable": bool(seed % 2), "max_pending_blocks": 1 + seed % 3}
    count = 0
    with RolloutWriter(folder, num_envs, **options) as writer:
        while True:
            writer.add(**step_of(rng, num_envs, ages, numbers))
            count += num_envs
            os.pwrite(acknowledged, count.to_bytes(8, "little"), 0)
            if seed % 4 == 0:
                time.sleep(0.0005)  # mostly between blocks rather than mostly inside a write


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    # A shell may have started us with Ctrl-C ignored, and then one that comes early would be lost.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    print("ready", flush=True)
    for line in sys.stdin:
        folder, seed = line.split()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # until the child is ready for it
        process_id = os.fork()
        if process_id == 0:
            try:
                faulthandler.register(signal.SIGUSR1, all_threads=True)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
                record_until_killed(Path(folder), int(seed))
            except KeyboardInterrupt:
                pass
            finally:
                os._exit(1)
        print(process_id, flush=True)


if __name__ == "__main__":
    main()
