"""The command `rollout-data`: one table of commands, and what all of them have in common.

One rule: a command is a row of `COMMANDS`, a thin layer over a documented function. Only this file prints. What a
command needs is imported when it runs, so that help is quick.
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
Arguments = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Command:
    """A row of the table.

    Attributes:
        summary: What it does, in a line.
        example: A call, without the program's name.
        arguments: Argument -> what `add_argument` takes; a function that gives this where it imports something. All
            commands have `--json` besides.
        path: Of the function below `rollout_data` that it is a thin layer over, if that has another name.
        answers: The file of `tools` whose function of the command's name takes the parsed options, `progress` among
            them, and gives an `Answer`.
    """

    summary: str
    example: str
    arguments: Arguments | Callable[[], Arguments]
    path: str = ""
    answers: str = "commands"

    @property
    def name(self) -> str:
        """Name of the command."""
        return self.example.split()[0]

    @property
    def function(self) -> str:
        """The documented function that it is a thin layer over."""
        return f"rollout_data.{self.path or self.name}"


def _flag(text: str) -> dict[str, Any]:
    return {"action": "store_true", "help": text}


def _several(metavar: str, text: str) -> dict[str, Any]:
    return {"action": "append", "default": [], "metavar": metavar, "help": f"{text}; may be given several times"}


_ANY: Arguments = {"data_dir": {"help": "a file or folder of any format"}}
_OWN: Arguments = {"data_dir": {"help": "a data folder"}}
#: Of all commands that work on some of the episodes; see `tools.selecting`.
SELECT: Arguments = {
    "--select": _several(
        "WHICH",
        "an episode's id, or a condition on a column of `ls --json`, such as success=true or 'length>20' (one of the "
        "ids, and all of the conditions)",
    )
}


_OPEN: Arguments = {"--open": _several("NAME=VALUE", "an option of the format that is read: on_bad_index=rebuild")}


def _convert_arguments() -> Arguments:
    from ...formats.block_episode_writer import OWN
    from ...formats.registry import EXPORTS, WRITERS

    return {
        **_ANY,
        "target": {"help": "the new file or folder, or that of a conversion that was stopped"},
        "--to": {"default": OWN, "help": f"the format: {', '.join((OWN, *WRITERS, *EXPORTS))} (default: %(default)s)"},
        **SELECT,
        **_OPEN,
        "--option": _several("NAME=VALUE", "an option of the format that is written"),
    }


_REPORT: Arguments = {
    **_ANY,
    "--compare": {"metavar": "OTHER", "help": "another recording, set beside it"},
    "--out": {"metavar": "FILE", "help": "the page (default: named after the recording, as walk.html)"},
    "--absolute-paths": _flag("let texts name where the recording lies"),
}
_PLAY: Arguments = {
    **_ANY,
    "--episode": {"metavar": "ID", "help": "its id, or its place, counted from 0 (default: the first)"},
    "--field": _several("NAME", "a field, or what its name begins with, with all its dimensions"),
    "--gif": {"metavar": "FILE", "help": "write the pictures of the field, or of the first that has some"},
    "--mp4": {"metavar": "FILE", "help": "the same as a video (extra video)"},
}
#: The path may be left out where rules are only listed.
_DOCTOR: Arguments = {
    "data_dir": {"nargs": "?", "help": "a file or folder of any format"},
    "--only": {"metavar": "CODES", "help": "run these rules only: VAL01,TIM,..."},
    "--skip": {"metavar": "CODES", "help": "leave these rules out"},
    "--set": _several("CODE.NAME=N", "change a threshold of a rule"),
    "--sample": {"type": int, "metavar": "N", "help": "read the data of N episodes at most, evenly spread"},
    "--fail-on": {
        "choices": ("error", "warning", "info"),
        "default": "error",
        "help": "exit with 1 if something is found that is so severe, or more (default: %(default)s)",
    },
    "--list-rules": _flag("list the rules: code, severity, what is read, repair"),
    "--explain": {"metavar": "CODES", "help": "say what rules look for, with their thresholds"},
}
_REPAIR_IN_PLACE = "move damaged and foreign files to damaged/, keep their intact trajectories, renew the index"
_PACK: Arguments = {
    **_OWN,
    "out_dir": {"nargs": "?", "help": "a new folder for the result"},
    "--in-place": _flag("replace the blocks of DATA_DIR"),
    "--block-mb": {"type": int, "default": 1024, "help": "size of a block at most (default: %(default)s)"},
}


def _prune_arguments() -> Arguments:
    from ...writing.retention import LIMITS

    limit = {"type": int, "metavar": "N"}
    limits = {f"--{name}": {**limit, "help": f"keep the newest N {name} and what shares blocks"} for name in LIMITS}
    return {**_OWN, **limits, "--dry-run": _flag("say what would be deleted, and delete nothing")}


#: Of the commands that edit: which trajectories, and taking it back.
_EDIT: Arguments = {
    **_OWN,
    "ids": {"nargs": "*", "metavar": "ID", "help": "ids as `ls` shows them"},
    **SELECT,
    "--undo": _flag("take it back, of these ids or, without one, of all"),
    "--dry-run": _flag("say how many trajectories it concerns, and change nothing"),
}
#: Flags that change what a command does to data. None of them is suggested for a flag that is not known.
_CHANGING = {"--undo", "--repair", "--in-place", "--set"}
_TO: Arguments = {"--to": {"required": True, "metavar": "NEW", "help": "a new or empty folder"}}
_MERGE: Arguments = {"sources": {"nargs": "+", "metavar": "PATH", "help": "files or folders of any format"}, **_TO}
_SPLIT: Arguments = {
    **_ANY,
    "parts": {"nargs": "*", "metavar": "NAME=SHARE", "help": "default: the parts that the file itself names"},
    **_TO,
    "--seed": {"type": int, "default": 0, "help": "of the choice (default: %(default)s)"},
}
_REPAIR: Arguments = {
    **_ANY,
    **_TO,
    "--only": {"default": "", "metavar": "CODE,..", "help": "repair these only, info too; default: all but info"},
    "--dry-run": _flag("print the plan, and write nothing"),
}
_URL = {"help": "a URL that fsspec knows, such as s3://bucket/walk"}

_edit = partial(Command, answers="edit_commands")
#: Name -> command, in the order of the help.
COMMANDS: dict[str, Command] = {
    "info": Command("Say what a recording of any format holds.", "info walk", _ANY, "tools.cli.info_command.describe"),
    "ls": Command(
        "List the episodes of a recording of any format.",
        "ls demos.hdf5 --select success=true",
        {**_ANY, **SELECT, **_OPEN},
        "tools.cli.info_command.listing",
    ),
    "report": Command(
        "Write one HTML page that shows a recording of any format and what the doctor finds in it.",
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
        "Write a recording of any format in another one; goes on where it was stopped.",
        "convert demos.hdf5 demos_lerobot --to lerobot --select 'length>20' --option fps=20",
        _convert_arguments,
    ),
    "verify": Command(
        "Check every block with all its checksums; repair on request.",
        "verify walk",
        {**_OWN, "--repair": _flag(_REPAIR_IN_PLACE)},
        "tools.edit.pack_folder.check_folder",
    ),
    "doctor": Command(
        "Examine a recording of any format by all rules of DOCTOR.md; nothing is changed.",
        "doctor walk --skip VAL03 --fail-on warning",
        _DOCTOR,
        answers="doctor_command",
    ),
    "pack": Command(
        "Rewrite a finished dataset into a few large blocks with contiguous trajectories.",
        "pack walk walk_packed",
        _PACK,
        "tools.edit.pack_folder.pack_dataset",
    ),
    "prune": Command(
        "Delete the oldest blocks, down to a number of trajectories, frames or bytes.",
        "prune walk --trajectories 1000 --dry-run",
        _prune_arguments,
    ),
    "drop": _edit(
        "Leave trajectories out, for every reader; no block is touched.",
        "drop walk --select success=false",
        _EDIT,
    ),
    "keep": _edit(
        "Leave all other trajectories out, for every reader; no block is touched.",
        "keep walk --select 'return>100'",
        _EDIT,
    ),
    "tag": _edit(
        "Say something of trajectories: their task, their success, or anything else.",
        "tag walk --select 'length<20' --set success=false --set reviewer=ada",
        {**_EDIT, "--set": _several("NAME=VALUE", "what is said, as JSON or text")},
    ),
    "merge": _edit(
        "Unite recordings of equal fields in a new folder, of hard links where that is possible.",
        "merge walk run --to both",
        _MERGE,
    ),
    "split": _edit(
        "Divide a recording into folders, of hard links where that is possible.",
        "split walk train=0.9 val=0.1 --to walk_parts",
        _SPLIT,
    ),
    "repair": _edit(
        "Repair the findings of `doctor` in a new folder; no measured value changes.",
        "repair walk --to walk_mended --dry-run",
        _REPAIR,
    ),
    "push": Command(
        "Upload the blocks that are not there yet to a URL.",
        "push walk s3://bucket/walk",
        {**_OWN, "url": _URL},
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `rollout-data`; 0 if all is well, 1 if the data are not, 2 if the call is wrong, 130 after Ctrl-C."""
    prog = PROGRAM
    code = 1
    try:
        given = list(sys.argv[1:] if arguments is None else arguments)
        name = _command_named(given)
        prog = f"{PROGRAM} {name}"
        code = _run(COMMANDS[name], prog, given[1:])
        sys.stdout.flush()  # a full disk, or a reader that has left, is told here
        return code
    except SystemExit as done:  # help was asked for, or the call is wrong
        code = int(done.code or 0)
    except KeyboardInterrupt:
        code = _told(prog, "stopped", 130)
    except Exception as error:
        from storage.errors import RolloutDataError, UsageError

        if not isinstance(error, (RolloutDataError, OSError)):
            raise
        code = _told(prog, str(error), 2 if isinstance(error, UsageError) else 1)
    with suppress(OSError):
        try:
            sys.stdout.flush()
        except OSError:  # otherwise the interpreter tries again, and complains, when it exits
            sys.stdout.close()
    return code


def _run(command: Command, prog: str, given: Sequence[str]) -> int:
    options = _parser(command, prog).parse_intermixed_args(given)
    options.progress = sys.stderr.isatty()
    options.command = command.name
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: _say(f"{prog}: warning: {message}", sys.stderr)
        answer = getattr(import_module(f"rollout_data.tools.cli.{command.answers}"), command.name)(options)
    if options.json:
        from .info_command import strict_json

        print(strict_json(answer.about))
    else:
        for line in answer.lines:
            _say(line, sys.stdout)
    return int(answer.code)


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, with the nearest match of what it does not know."""

    def error(self, message: str) -> NoReturn:
        known = [name for action in self._actions for name in action.option_strings]
        wrong = message.removeprefix("unrecognized arguments: ").split(" ")[0].partition("=")[0]
        if wrong.startswith("-"):
            message += _nearest(wrong, [name for name in known if name not in _CHANGING], known)
        raise SystemExit(_told(self.prog, f"{message} (see {self.prog} --help)", 2))


def _parser(command: Command, prog: str) -> argparse.ArgumentParser:
    """Make the parser of a command from its row."""
    epilog = f"example:\n  {PROGRAM} {command.example}\n\nin Python: {command.function}"
    form = argparse.RawDescriptionHelpFormatter
    # Without abbreviations, so that `--und` is an error and takes nothing back.
    parser = _Parser(prog, description=command.summary, epilog=epilog, formatter_class=form, allow_abbrev=False)
    arguments = command.arguments() if callable(command.arguments) else command.arguments
    for name, about in arguments.items():
        parser.add_argument(name, **about)
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else; null where nothing is known")
    return parser


def _command_named(given: Sequence[str]) -> str:
    """Return the command that is meant: the one of this name, or the only one that begins so.

    Raises:
        SystemExit: Help was asked for, or there is no such command.
    """
    overview = _Parser(PROGRAM, description="Look at, check and rewrite recorded rollouts.")
    listed = overview.add_subparsers(metavar="COMMAND")
    for name, command in COMMANDS.items():
        listed.add_parser(name, help=command.summary)
    word = given[0] if given else ""
    found = [name for name in COMMANDS if name == word] or [name for name in COMMANDS if word and name.startswith(word)]
    if len(found) == 1:
        return found[0]
    if word.startswith("-"):
        overview.parse_args(given[:1])
    if not word:
        overview.error("the following arguments are required: COMMAND")
    overview.error(f"invalid choice: {word!r}{_nearest(word, found or COMMANDS)}")


def _nearest(word: str, known: Collection[str], listed: Collection[str] = ()) -> str:
    """Suggest the nearest of some names, or list them, or those of `listed`."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; expected one of {', '.join(listed or known)}"


def _told(prog: str, text: str, code: int) -> int:
    """Print an error in one line; return the exit code."""
    _say(f"{prog}: {text}", sys.stderr)
    return code


def _say(text: str, stream: TextIO) -> None:
    """Print a line; what a terminal would obey, line ends and what the stream cannot encode are escaped."""
    line = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)
    encoding = stream.encoding or "utf-8"
    print(line.encode(encoding, "backslashreplace").decode(encoding), file=stream)
