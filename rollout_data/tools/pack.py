"""Rewrite a finished dataset into a few large blocks with contiguous trajectories."""

from __future__ import annotations

import argparse

from storage.errors import UsageError

from .packing import pack_dataset


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("data_dir", help="the data folder; nobody may be recording into it")
    parser.add_argument("out_dir", nargs="?", help="a new folder for the result")
    parser.add_argument("--in-place", action="store_true", help="replace the blocks of DATA_DIR")
    parser.add_argument("--block-mb", type=int, default=1024, help="size of a block at most (default: %(default)s)")


def run(options: argparse.Namespace) -> int:
    if bool(options.out_dir) == options.in_place:
        got = "both" if options.in_place else "neither"
        raise UsageError("pack", repr(options.data_dir), "either OUT_DIR or --in-place", got)
    summary = pack_dataset(options.data_dir, options.out_dir, options.block_mb << 20)
    print(
        f"{summary.num_trajectories:,} trajectories, {summary.num_frames:,} frames: "
        f"{summary.num_blocks_before:,} blocks became {summary.num_blocks_after:,}"
    )
    return 0
