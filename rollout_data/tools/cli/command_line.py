"""Parse the command line of `rollout-data`, run a command, and print its result or error.

The other modules of the command line print nothing. A module with commands is imported only when
one of its commands runs, so that help texts appear without delay.
"""

from __future__ import annotations

import argparse
import difflib
import sys
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, NoReturn, TextIO

PROGRAM = "rollout-data"
#: Map from argument name to the keyword arguments of `ArgumentParser.add_argument`.
Arguments = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Command:
    """Description of one command, such as `info`: help text, arguments and function.

    Attributes:
        summary: One sentence of help.
        example: Example call, without the name of the program.
        arguments: Arguments of the command besides `--json`, which all commands have. It is a
            function that returns the arguments if computing them imports other modules. The
            function is called only if the command runs.
        path: Name of the equivalent Python function, without "rollout_data."; "" if the function
            has the same name as the command.
        module: Module of `tools.cli` with the function that runs the command. The function has
            the name of the command. It takes the parsed options and returns an `Answer`.
    """

    summary: str
    example: str
    arguments: Arguments | Callable[[], Arguments]
    path: str = ""
    module: str = "commands"

    @property
    def name(self) -> str:
        """Name of the command: the first word of `example`."""
        return self.example.split()[0]

    @property
    def function(self) -> str:
        """Qualified name of the equivalent Python function, such as "rollout_data.report"."""
        return f"rollout_data.{self.path or self.name}"


def _flag(text: str) -> dict[str, Any]:
    return {"action": "store_true", "help": text}


def _several(metavar: str, text: str) -> dict[str, Any]:
    return {
        "action": "append",
        "default": [],
        "metavar": metavar,
        "help": f"{text}; may be given several times",
    }


_ANY: Arguments = {"data_dir": {"help": "a file or folder of any format"}}
_OWN: Arguments = {"data_dir": {"help": "a data folder"}}
#: Option `--select`, which several commands share. `select_option.py` implements it.
SELECT: Arguments = {
    "--select": _several(
        "WHICH",
        "an episode id, or a condition on a column of `ls --json`, such as success=true or "
        "'length>20'; selects the episodes with one of the ids that meet all conditions",
    ),
}
_OPEN: Arguments = {
    "--open": _several("NAME=VALUE", "an option for reading, such as on_bad_index=rebuild"),
}


def _convert_arguments() -> Arguments:
    from ...formats.block_episode_writer import OWN
    from ...formats.registry import EXPORTS, WRITERS

    formats = ", ".join((OWN, *WRITERS, *EXPORTS))
    return {
        **_ANY,
        "target": {"help": "the new file or folder, or the target of a stopped conversion"},
        "--to": {"default": OWN, "help": f"the new format: {formats} (default: %(default)s)"},
        **SELECT,
        **_OPEN,
        "--option": _several("NAME=VALUE", "an option for writing the new format, such as fps=20"),
    }


_REPORT: Arguments = {
    **_ANY,
    "--compare": {"metavar": "OTHER", "help": "a second recording to compare with the first one"},
    "--out": {
        "metavar": "FILE",
        "help": "path of the page (default: the name of the recording, such as walk.html)",
    },
    "--absolute-paths": _flag("show the full path of the recording on the page"),
}
_PLAY: Arguments = {
    **_ANY,
    "--episode": {
        "metavar": "ID",
        "help": "id of the episode, or its position, counted from 0 (default: the first)",
    },
    "--field": _several("NAME", "a field, or a group of fields, to draw with all its dimensions"),
    "--gif": {
        "metavar": "FILE",
        "help": "write the pictures of --field, or of the first field with pictures, as a GIF",
    },
    "--mp4": {
        "metavar": "FILE",
        "help": "write the same pictures as a video (needs the extra rollout-data[video])",
    },
}
#: Arguments of `doctor`. `--list-rules` and `--explain` need no recording, so its path is optional.
_DOCTOR: Arguments = {
    "data_dir": {"nargs": "?", "help": "a file or folder of any format"},
    "--only": {
        "metavar": "CODES",
        "help": "run only these rules or groups of rules, such as VAL01,TIM",
    },
    "--skip": {"metavar": "CODES", "help": "skip these rules or groups of rules"},
    "--set": _several("CODE.NAME=N", "change a threshold of a rule, such as VAL05.ranges=100"),
    "--sample": {
        "type": int,
        "metavar": "N",
        "help": "read the data of at most N evenly spaced episodes",
    },
    "--fail-on": {
        "choices": ("error", "warning", "info"),
        "default": "error",
        "help": "exit with 1 if a finding has this severity or a worse one (default: %(default)s)",
    },
    "--list-rules": _flag("list the code, severity, input and repair of each rule"),
    "--explain": {"metavar": "CODES", "help": "explain these rules and list their thresholds"},
}
_REPAIR_IN_PLACE = ", ".join(
    (
        "move damaged and foreign files to damaged/",
        "keep their intact trajectories",
        "rewrite the index",
    )
)
_PACK: Arguments = {
    **_OWN,
    "out_dir": {"nargs": "?", "help": "a new folder for the packed dataset"},
    "--in-place": _flag("replace the blocks of DATA_DIR instead of writing OUT_DIR"),
    "--block-mb": {
        "type": int,
        "default": 1024,
        "help": "maximum size of a block in MiB (default: %(default)s)",
    },
}


def _prune_arguments() -> Arguments:
    from ...writing.retention import LIMITS

    limits = {}
    for name in LIMITS:
        text = f"keep the newest N {name}, and older trajectories in the same blocks"
        limits[f"--{name}"] = {"type": int, "metavar": "N", "help": text}
    return {**_OWN, **limits, "--dry-run": _flag("print the files without deleting them")}


#: Arguments shared by the commands `drop`, `keep` and `tag`.
_EDIT: Arguments = {
    **_OWN,
    "ids": {"nargs": "*", "metavar": "ID", "help": "ids of trajectories, as `ls` shows them"},
    **SELECT,
    "--undo": _flag("undo the command for the given ids, or for all trajectories without ids"),
    "--dry-run": _flag("print the number of trajectories without changing them"),
}
#: Flags that change data, so they are never suggested for a misspelled flag.
_CHANGING = {"--undo", "--repair", "--in-place", "--set"}
_TO: Arguments = {"--to": {"required": True, "metavar": "NEW", "help": "a new or empty folder"}}
_MERGE: Arguments = {
    "sources": {"nargs": "+", "metavar": "PATH", "help": "files or folders of any format"},
    **_TO,
}
_SPLIT: Arguments = {
    **_ANY,
    "parts": {
        "nargs": "*",
        "metavar": "NAME=SHARE",
        "help": "a folder name and its share of the trajectories, such as val=0.1 "
        "(default: the splits that the recording defines)",
    },
    **_TO,
    "--seed": {
        "type": int,
        "default": 0,
        "help": "seed of the random choice (default: %(default)s)",
    },
}
_REPAIR: Arguments = {
    **_ANY,
    **_TO,
    "--only": {
        "default": "",
        "metavar": "CODE,..",
        "help": "repair only findings of these rules, also those of severity info "
        "(default: all findings except those of severity info)",
    },
    "--dry-run": _flag("print the plan without writing anything"),
}
_URL = {"help": "a URL that fsspec can open, such as s3://bucket/walk"}

_edit = partial(Command, module="edit_commands")
#: All commands by name, in the order of the help text.
COMMANDS: dict[str, Command] = {
    "info": Command(
        "Print the counts, fields and metadata of a recording of any format.",
        "info walk",
        _ANY,
        "tools.cli.info_command.describe",
    ),
    "ls": Command(
        "List the episodes of a recording of any format.",
        "ls demos.hdf5 --select success=true",
        {**_ANY, **SELECT, **_OPEN},
        "tools.cli.info_command.listing",
    ),
    "report": Command(
        "Write one HTML page about a recording of any format and the findings of the doctor.",
        "report walk --compare walk_old --out report.html",
        _REPORT,
    ),
    "play": Command(
        "Draw an episode in the terminal, or write its pictures as a GIF or a video.",
        "play demos.hdf5 --episode demo_3 --field action",
        _PLAY,
        "tools.cli.play_command.play",
    ),
    "convert": Command(
        "Write a recording of any format in another format; resumes a stopped conversion.",
        "convert demos.hdf5 demos_lerobot --to lerobot --select 'length>20' --option fps=20",
        _convert_arguments,
    ),
    "verify": Command(
        "Check all checksums of every block; with --repair, move damaged files away.",
        "verify walk",
        {**_OWN, "--repair": _flag(_REPAIR_IN_PLACE)},
        "tools.edit.pack_folder.check_folder",
    ),
    "doctor": Command(
        "Examine a recording of any format for defects, by the rules in DOCTOR.md.",
        "doctor walk --skip VAL03 --fail-on warning",
        _DOCTOR,
        module="doctor_command",
    ),
    "pack": Command(
        "Rewrite a finished dataset into a few large blocks with contiguous trajectories.",
        "pack walk walk_packed",
        _PACK,
        "tools.edit.pack_folder.pack_dataset",
    ),
    "prune": Command(
        "Delete the oldest blocks, and keep a number of trajectories, frames or bytes.",
        "prune walk --trajectories 1000 --dry-run",
        _prune_arguments,
    ),
    "drop": _edit(
        "Drop trajectories, so that readers skip them; --undo restores them.",
        "drop walk --select success=false",
        _EDIT,
    ),
    "keep": _edit(
        "Drop all other trajectories, so that readers skip them; --undo restores them.",
        "keep walk --select 'return>100'",
        _EDIT,
    ),
    "tag": _edit(
        "Add metadata to trajectories, such as the task or the success.",
        "tag walk --select 'length<20' --set success=false --set reviewer=ada",
        {**_EDIT, "--set": _several("NAME=VALUE", "a metadata entry; VALUE is JSON or text")},
    ),
    "merge": _edit(
        "Merge recordings with the same fields into a new folder, by hard links if possible.",
        "merge walk run --to both",
        _MERGE,
    ),
    "split": _edit(
        "Split a recording into several folders, by hard links if possible.",
        "split walk train=0.9 val=0.1 --to walk_parts",
        _SPLIT,
    ),
    "repair": _edit(
        "Repair the findings of `doctor` in a new folder, without changing measured values.",
        "repair walk --to walk_mended --dry-run",
        _REPAIR,
    ),
    "push": Command(
        "Upload the blocks that a URL does not have yet.",
        "push walk s3://bucket/walk",
        {**_OWN, "url": _URL},
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `rollout-data` and return the exit code.

    Exit codes: 0 without problems, 1 for problems of the data, 2 for an invalid call, 130 after
    Ctrl-C.
    """
    prog = PROGRAM
    code = 1
    try:
        words = list(sys.argv[1:] if arguments is None else arguments)
        name = _command_name(words)
        prog = f"{PROGRAM} {name}"
        code = _run(COMMANDS[name], prog, words[1:])
        sys.stdout.flush()  # Raises if the disk is full or the pipe is closed.
        return code
    except SystemExit as exit_request:  # argparse printed help or an error.
        code = int(exit_request.code or 0)
    except KeyboardInterrupt:
        code = _print_error(prog, "stopped", 130)
    except Exception as error:
        from storage.errors import RolloutDataError, UsageError

        if not isinstance(error, (RolloutDataError, OSError)):
            raise
        # `str(error)` names the Python function that failed. The user typed a command instead, so
        # print the message alone.
        text = error.message if isinstance(error, RolloutDataError) else str(error)
        code = _print_error(prog, text, 2 if isinstance(error, UsageError) else 1)
    with suppress(OSError):
        try:
            sys.stdout.flush()
        except OSError:
            # Closed here, so that Python does not print a second error when it flushes at exit.
            sys.stdout.close()
    return code


def _run(command: Command, prog: str, words: Sequence[str]) -> int:
    """Parse `words` as arguments of a command, run the command and print its result."""
    options = _parser(command, prog).parse_intermixed_args(words)
    options.progress = sys.stderr.isatty()
    options.command = command.name
    module = import_module(f"rollout_data.tools.cli.{command.module}")
    function = getattr(module, command.name)

    def print_warning(message: Any, *_args: Any, **_keywords: Any) -> None:
        _print_line(f"{prog}: warning: {message}", sys.stderr)

    with warnings.catch_warnings():
        warnings.showwarning = print_warning
        answer = function(options)
    if options.json:
        from .info_command import strict_json

        print(strict_json(answer.about))
    else:
        for line in answer.lines:
            _print_line(line, sys.stdout)
    return int(answer.code)


class _Parser(argparse.ArgumentParser):
    """Argument parser that prints errors in one line and suggests a flag for a misspelled one."""

    def error(self, message: str) -> NoReturn:
        known: list[str] = []
        for action in self._actions:
            known += action.option_strings
        unknown = message.removeprefix("unrecognized arguments: ")
        flag = unknown.split(" ")[0].partition("=")[0]
        if flag.startswith("-"):
            suggested = [name for name in known if name not in _CHANGING]
            message += _nearest(flag, suggested, known)
        raise SystemExit(_print_error(self.prog, f"{message} (see {self.prog} --help)", 2))


def _parser(command: Command, prog: str) -> argparse.ArgumentParser:
    """Build the argument parser of a command."""
    epilog = f"example:\n  {PROGRAM} {command.example}\n\nin Python: {command.function}"
    parser = _Parser(
        prog,
        description=command.summary,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # A misspelled flag must not select another flag.
    )
    arguments = command.arguments
    if callable(arguments):
        arguments = arguments()
    for name, keywords in arguments.items():
        parser.add_argument(name, **keywords)
    json_help = "print JSON and nothing else; unknown values are null"
    parser.add_argument("--json", action="store_true", help=json_help)
    return parser


def _command_name(words: Sequence[str]) -> str:
    """Return the name of the command in `words[0]`, which may be an unambiguous abbreviation.

    Raises:
        SystemExit: Help was printed, or the command is unknown.
    """
    word = words[0] if words else ""
    if word in COMMANDS:
        return word
    matches = [name for name in COMMANDS if word and name.startswith(word)]
    if len(matches) == 1:
        return matches[0]

    overview = _Parser(PROGRAM, description="Show, check and rewrite recorded rollouts.")
    listed = overview.add_subparsers(metavar="COMMAND")
    for name, command in COMMANDS.items():
        listed.add_parser(name, help=command.summary)
    if word.startswith("-"):
        overview.parse_args(words[:1])
    if not word:
        overview.error("the following arguments are required: COMMAND")
    overview.error(f"invalid choice: {word!r}{_nearest(word, matches or COMMANDS)}")


def _nearest(word: str, known: Collection[str], listed: Collection[str] = ()) -> str:
    """Return the end of an error: "did you mean ..." or, without a similar name, all names.

    Args:
        word: The unknown name.
        known: Names that may be suggested.
        listed: Names to list if no name is similar; `known` if empty.
    """
    matches = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    if matches:
        return f"; did you mean {matches[0]!r}?"
    return f"; expected one of {', '.join(listed or known)}"


def _print_error(prog: str, text: str, code: int) -> int:
    """Print an error in one line to stderr, and return the exit code `code`."""
    _print_line(f"{prog}: {text}", sys.stderr)
    return code


def _print_line(text: str, stream: TextIO) -> None:
    """Print one line, with control characters, line breaks and unencodable characters escaped."""
    line = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)
    encoding = stream.encoding or "utf-8"
    print(line.encode(encoding, "backslashreplace").decode(encoding), file=stream)
