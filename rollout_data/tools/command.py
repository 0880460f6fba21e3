"""The command `rollout-data`, and every subcommand of it.

One rule: a subcommand is a function of the parsed options that calls the library, prints, and returns an exit code;
its line in `COMMANDS` is all that makes it a subcommand, and its docstring is its help. Only this file prints.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from storage.errors import RolloutDataError, UsageError

from ..foreign.formats import WRITERS
from ..recordings.converting import convert as convert_recording
from ..recordings.own_writer import OWN
from ..remote.publish import push as push_folder
from ..writing.retention import LIMITS
from ..writing.retention import prune as prune_folder
from .info import as_text, describe, listing, listing_as_text, strict_json
from .rewrite import DAMAGED_FOLDER, FolderReport, check_folder, pack_dataset, repair_folder


def ls(options: argparse.Namespace) -> int:
    """List the episodes of a recording of any format."""
    rows = listing(options.data_dir)
    if options.json:
        print(strict_json(rows))
    else:
        _print(*listing_as_text(rows))
    return 0


def convert(options: argparse.Namespace) -> int:
    """Write a recording of any format in another one; goes on where it was stopped."""
    given = dict(pair.partition("=")[::2] for pair in options.option)
    chosen = {name: _value(text) for name, text in given.items()}
    done = convert_recording(options.data_dir, options.target, options.to, progress=sys.stderr.isatty(), **chosen)
    for what, ids in done.changes.items():
        _print(f"{what}: {len(ids):,} episodes ({', '.join(ids[:3])}{', ...' if len(ids) > 3 else ''})")
    _print(*map(str, done.problems), f"{done.num_episodes:,} episodes, {done.num_present:,} of them were there")
    return 1 if done.problems else 0


def _value(text: str) -> Any:
    """Read an option as JSON, or as text where it is none."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def info(options: argparse.Namespace) -> int:
    """Say what a recording of any format holds."""
    about = describe(options.data_dir)
    if options.json:
        print(strict_json(about))
    else:
        _print(*as_text(about))
    return 0


def verify(options: argparse.Namespace) -> int:
    """Check every block with all its checksums; repair on request."""
    report = (repair_folder if options.repair else check_folder)(options.data_dir)
    for name, problem in report.problems.items():
        _print(f"{name}: {problem}")
        if name in report.salvaged:
            _print(f"  kept all but {report.salvaged[name]} of its trajectories")
    for dead in report.dead_writers:
        _print(f"writer {dead.writer} died; {dead.num_lost_frames} frames that it had not published are lost")
    _print(*(f"moved to {moved}" for moved in report.moved), _summary(report))
    return 1 if report.problems or report.num_broken else 0


def pack(options: argparse.Namespace) -> int:
    """Rewrite a finished dataset into a few large blocks with contiguous trajectories."""
    if bool(options.out_dir) == options.in_place:
        got = "both" if options.in_place else "neither"
        raise UsageError("pack", repr(options.data_dir), "either OUT_DIR or --in-place", got)
    summary = pack_dataset(options.data_dir, options.out_dir, options.block_mb << 20)
    packed = f"{summary.num_trajectories:,} trajectories, {summary.num_frames:,} frames"
    _print(f"{packed}: {summary.num_blocks_before:,} blocks became {summary.num_blocks_after:,}")
    return 0


def prune(options: argparse.Namespace) -> int:
    """Delete the oldest blocks, down to a number of trajectories, frames or bytes."""
    limits = {name: getattr(options, name) for name in LIMITS}
    paths = prune_folder(options.data_dir, dry_run=options.dry_run, **limits)
    _print(*map(str, paths), f"{len(paths):,} blocks {'would be' if options.dry_run else 'were'} deleted")
    return 0


def push(options: argparse.Namespace) -> int:
    """Upload the blocks that are not there yet to a URL."""
    _print(f"{push_folder(options.data_dir, options.url):,} blocks were uploaded")
    return 0


#: Subcommand -> its function, and its arguments besides the data folder as `add_argument` takes them.
COMMANDS: Mapping[str, tuple[Callable[[argparse.Namespace], int], Mapping[str, Mapping[str, Any]]]] = {
    "info": (
        info,
        {"--json": {"action": "store_true", "help": "print one JSON object; null where a number is not finite"}},
    ),
    "ls": (ls, {"--json": {"action": "store_true", "help": "print a JSON list of objects"}}),
    "convert": (
        convert,
        {
            "target": {"help": "the new file or folder, or that of a conversion that was stopped"},
            "--to": {"default": OWN, "help": f"the format: {', '.join((OWN, *WRITERS))} (default: %(default)s)"},
            "--option": {
                "action": "append",
                "default": [],
                "metavar": "NAME=VALUE",
                "help": "an option of the format that is written; may be given several times",
            },
        },
    ),
    "verify": (
        verify,
        {
            "--repair": {
                "action": "store_true",
                "help": f"move damaged and foreign files to {DAMAGED_FOLDER}/, keep their intact trajectories, "
                "renew the index",
            }
        },
    ),
    "pack": (
        pack,
        {
            "out_dir": {"nargs": "?", "help": "a new folder for the result"},
            "--in-place": {"action": "store_true", "help": "replace the blocks of DATA_DIR"},
            "--block-mb": {"type": int, "default": 1024, "help": "size of a block at most (default: %(default)s)"},
        },
    ),
    "prune": (
        prune,
        {
            **{
                f"--{name}": {"type": int, "metavar": "N", "help": f"keep the newest N {name} and what shares blocks"}
                for name in LIMITS
            },
            "--dry-run": {"action": "store_true", "help": "say what would be deleted, and delete nothing"},
        },
    ),
    "push": (push, {"url": {"help": "a URL that fsspec knows, such as s3://bucket/walk"}}),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `rollout-data`; 0 if all is well, 1 if the data are not, 2 if the call is wrong."""
    parser = argparse.ArgumentParser(prog="rollout-data", description="Look at, check and rewrite recorded rollouts.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (function, further) in COMMANDS.items():
        command = commands.add_parser(name, help=function.__doc__, description=function.__doc__)
        command.add_argument("data_dir", help="the data folder; of ls, info and convert a file or folder of any format")
        for argument, about in further.items():
            command.add_argument(argument, **about)
    options = parser.parse_args(arguments)
    try:
        code = COMMANDS[options.command][0](options)
        sys.stdout.flush()  # a full disk, or a reader that has left, is told here
        return code
    except (RolloutDataError, OSError) as error:
        print(_escaped(f"rollout-data {options.command}: {error}"), file=sys.stderr)
    with suppress(OSError):
        try:
            sys.stdout.flush()
        except OSError:  # otherwise the interpreter tries again, and complains, when it exits
            sys.stdout.close()
    return 1


def _print(*lines: str) -> None:
    for line in lines:
        print(_escaped(line))


def _escaped(text: str) -> str:
    """Escape what a terminal would obey, line ends, and what cannot be encoded."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def _summary(report: FolderReport) -> str:
    """Count what is intact and what is not."""
    counts = f"{report.num_blocks:,} blocks, {report.num_trajectories:,} trajectories, {report.num_frames:,} frames"
    broken = f", {report.num_broken:,} trajectories with a missing part" if report.num_broken else ""
    files = len(report.problems)
    return f"{counts} intact; {files:,} damaged or foreign {'file' if files == 1 else 'files'}{broken}"
