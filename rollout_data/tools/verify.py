"""Check every block with all its checksums; repair on request."""

from __future__ import annotations

import argparse

from .info import escaped
from .repair import DAMAGED_FOLDER, FolderReport, check_folder, check_is_folder, repair_folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("data_dir", help="the data folder")
    parser.add_argument(
        "--repair",
        action="store_true",
        help=f"move damaged and foreign files to {DAMAGED_FOLDER}/, keep their intact trajectories, renew the index",
    )


def run(options: argparse.Namespace) -> int:
    path = check_is_folder(options.data_dir)
    report = repair_folder(path) if options.repair else check_folder(path)
    for name, problem in report.problems.items():
        print(escaped(f"{name}: {problem}"))
        if name in report.salvaged:
            print(f"  kept all but {report.salvaged[name]} of its trajectories")
    for dead in report.dead_writers:
        print(f"writer {dead.writer} died; {dead.num_lost_frames} frames that it had not published are lost")
    for moved in report.moved:
        print(escaped(f"moved to {moved}"))
    print(summary(report))
    return 1 if report.problems or report.num_broken else 0


def summary(report: FolderReport) -> str:
    """Count what is intact and what is not."""
    intact = (
        f"{report.num_blocks:,} blocks, {report.num_trajectories:,} trajectories, {report.num_frames:,} frames intact"
    )
    broken = f", {report.num_broken:,} trajectories with a missing part" if report.num_broken else ""
    files = len(report.problems)
    return f"{intact}; {files:,} damaged or foreign {'file' if files == 1 else 'files'}{broken}"
