"""Delete the oldest blocks, down to so many trajectories, frames or bytes."""

from __future__ import annotations

import argparse

from ..writing.retention import LIMITS, prune
from .info import escaped


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("data_dir", help="the data folder; writers and readers may be at work in it")
    for name in LIMITS:
        parser.add_argument(f"--{name}", type=int, metavar="N", help=f"keep the newest N {name} and what shares blocks")
    parser.add_argument("--dry-run", action="store_true", help="say what would be deleted, and delete nothing")


def run(options: argparse.Namespace) -> int:
    limits = {name: getattr(options, name) for name in LIMITS}
    for path in (paths := prune(options.data_dir, dry_run=options.dry_run, **limits)):
        print(escaped(str(path)))
    print(f"{len(paths):,} blocks {'would be' if options.dry_run else 'were'} deleted")
    return 0
