"""`python -m benchmarks [NAME ...]`: run the named workloads, or all workloads.

Each workload is a line of `WORKLOADS`.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import sys
import time
from collections.abc import Iterator

import torch

from . import harness, report

#: Name of a workload -> what it measures. The module of that name has `cases(quick)`.
WORKLOADS = {
    "playback": "stream recorded frames to many environments",
    "record": "write rollouts to disk",
    "startup": "open a large dataset and assign a trajectory to every environment",
    "ppo": "store rollouts, estimate advantages, draw mini-batches",
    "ppo_recurrent": "cut rollouts into padded trajectories, draw mini-batches of whole environments",
    "replay": "add transitions to a large ring and draw them back",
    "codecs": "decode image sequences, whole and in random windows",
    "windows": "draw windows of trajectories from a ring that is being written",
    "windows_disk": "read random windows of recorded trajectories in batches",
    "formats": "open, read and convert sets of other systems",
    "picture_sets": "read random windows of picture sets that are larger than the cache",
    "workers": "read batches in the process of the learner, in a thread and in workers",
    "remote": "read random windows of recorded trajectories behind a network",
    "buffer_files": "save a large buffer and load it again",
    "prioritized": "draw batches by priority and update them",
    "checkpoint": "save a training run while it goes on, and load it",
    "ray_buffers": "sample and fill buffers in actors of Ray",
    "device": "add, draw and compute with tensors on a GPU, or on the CPU without one",
    "trajectory_replay": "sample steps of trajectories in memory and on disk",
}


def cases(name: str, is_quick: bool, only: str) -> Iterator[harness.Case]:
    """Yield the cases of a workload.

    Its module is imported at the first case, so that an error ends only this workload.
    """
    for case in importlib.import_module(f"{__package__}.{name}").cases(is_quick):
        if only in case.name:
            yield case


def main(arguments: list[str] | None = None) -> int:
    """Run the named workloads.

    Return 1 if a contender of ours or a limit failed or, with `--strict`, a promise was missed.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(WORKLOADS))
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes: to see that everything runs"
    )
    parser.add_argument("--strict", action="store_true", help="fail where a promise is missed")
    parser.add_argument(
        "--threads",
        type=int,
        default=1,
        help="torch threads (default 1: several wait for busy neighbours)",
    )
    parser.add_argument(
        "--processor-time",
        action="store_true",
        help="count processor time, beside other work; not for rows with workers or fsync",
    )
    parser.add_argument(
        "--only", metavar="TEXT", default="", help="only cases whose name contains this"
    )
    options = parser.parse_args(arguments)
    unknown = set(options.names) - set(WORKLOADS)
    if unknown:
        parser.error(f"no workload {', '.join(sorted(unknown))}; there are {', '.join(WORKLOADS)}")
    torch.set_num_threads(options.threads)
    if options.processor_time:
        harness.clock = time.process_time
    has_failed = False
    for name in options.names or WORKLOADS:
        timings = harness.run(cases(name, options.quick, options.only), name)
        if options.quick:
            timings = [dataclasses.replace(timing, reach=None, reach_s=None) for timing in timings]
        label = name + ("-quick" if options.quick else "") + ("-part" if options.only else "")
        written = [report.write_json(label, timings)]
        try:
            written.append(report.draw(label, timings))
        except ImportError as error:
            sys.stdout.write(f"no chart: {error}\n")
        sys.stdout.write(f"\n{name}: {WORKLOADS[name]}\n{report.table(timings)}\n")
        sys.stdout.write("".join(f"written {path}\n" for path in written))
        sys.stdout.flush()
        has_failed |= any(timing.failed and timing.role != harness.PEER for timing in timings)
        has_failed |= options.strict and any(timing.is_reached is False for timing in timings)
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
