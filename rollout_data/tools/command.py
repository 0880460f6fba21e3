"""The command `rollout-data`: one table of commands, and what all of them have in common.

One rule: a command is a row of `COMMANDS`, a thin layer over a documented function. The function that its row names
under `run` takes the parsed options and gives an `Answer`; only this file prints. What a command needs is imported
when it runs, so that help is quick.
"""

from __future__ import annotations

import argparse
import difflib
import sys
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
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
        function: The documented function that it is a thin layer over.
        run: "module:function" below `rollout_data`: the function takes the parsed options, `options.progress` among
            them, and gives an `Answer`.
        arguments: Argument -> what `add_argument` takes; a function that gives this where it imports something. All
            commands have `--json` besides.
    """

    summary: str
    example: str
    function: str
    run: str
    arguments: Arguments | Callable[[], Arguments] = field(default_factory=dict)


_ANY: Arguments = {"data_dir": {"help": "a file or folder of any format"}}
_OWN: Arguments = {"data_dir": {"help": "a data folder"}}
#: Of all commands that work on some of the episodes; see `tools.selecting`.
SELECT: Arguments = {
    "--select": {
        "action": "append",
        "default": [],
        "metavar": "WHICH",
        "help": "an episode's id, or a condition on a column of `ls --json`, such as success=true or 'length>20'; may "
        "be given several times: one of the ids, and all of the conditions",
    }
}


def _convert_arguments() -> Arguments:
    from ..foreign.formats import EXPORTS, WRITERS
    from ..recordings.own_writer import OWN

    return {
        **_ANY,
        "target": {"help": "the new file or folder, or that of a conversion that was stopped"},
        "--to": {"default": OWN, "help": f"the format: {', '.join((OWN, *WRITERS, *EXPORTS))} (default: %(default)s)"},
        **SELECT,
        "--option": {
            "action": "append",
            "default": [],
            "metavar": "NAME=VALUE",
            "help": "an option of the format that is written; may be given several times",
        },
    }


#: The path may be left out where rules are only listed.
_DOCTOR: Arguments = {
    "data_dir": {"nargs": "?", "help": "a file or folder of any format"},
    "--only": {"metavar": "CODES", "help": "run these rules only: VAL01,TIM,..."},
    "--skip": {"metavar": "CODES", "help": "leave these rules out"},
    "--set": {"action": "append", "default": [], "metavar": "CODE.NAME=N", "help": "change a threshold of a rule"},
    "--sample": {"type": int, "metavar": "N", "help": "read the data of N episodes at most, evenly spread"},
    "--fail-on": {
        "choices": ("error", "warning", "info"),
        "default": "error",
        "help": "exit with 1 if something is found that is so severe, or more (default: %(default)s)",
    },
    "--sarif": {"action": "store_true", "help": "print SARIF 2.1.0, for the code scanning of CI systems"},
    "--list-rules": {"action": "store_true", "help": "list the rules: code, severity, what is read, repair"},
    "--explain": {"metavar": "CODES", "help": "say what rules look for, with their thresholds"},
}


def _prune_arguments() -> Arguments:
    from ..writing.retention import LIMITS

    limit = {"type": int, "metavar": "N"}
    return {
        **_OWN,
        **{f"--{name}": {**limit, "help": f"keep the newest N {name} and what shares blocks"} for name in LIMITS},
        "--dry-run": {"action": "store_true", "help": "say what would be deleted, and delete nothing"},
    }


#: Of the commands that edit: which trajectories, and taking it back.
_EDIT: Arguments = {
    **_OWN,
    "ids": {"nargs": "*", "metavar": "ID", "help": "ids as `ls` shows them"},
    **SELECT,
    "--undo": {"action": "store_true", "help": "take it back, of these ids or, without one, of all"},
}
_TO: Arguments = {"--to": {"required": True, "metavar": "NEW", "help": "a new or empty folder"}}


#: Name -> command, in the order of the help.
COMMANDS: dict[str, Command] = {
    "info": Command(
        "Say what a recording of any format holds.",
        "info walk",
        "rollout_data.tools.info.describe",
        "tools.answers:info",
        _ANY,
    ),
    "ls": Command(
        "List the episodes of a recording of any format.",
        "ls demos.hdf5 --select success=true",
        "rollout_data.tools.info.listing",
        "tools.answers:ls",
        {**_ANY, **SELECT},
    ),
    "report": Command(
        "Write one HTML page that shows a recording of any format and what the doctor finds in it.",
        "report walk --compare walk_old --out report.html",
        "rollout_data.report",
        "tools.answers:report",
        {
            **_ANY,
            "--compare": {"metavar": "OTHER", "help": "another recording, set beside it"},
            "--out": {"default": "report.html", "metavar": "FILE", "help": "the page (default: %(default)s)"},
            "--absolute-paths": {"action": "store_true", "help": "let texts name where the recording lies"},
        },
    ),
    "play": Command(
        "Draw an episode in the terminal, or write its pictures as a GIF or a video.",
        "play demos.hdf5 --episode demo_3 --field action",
        "rollout_data.tools.play.play",
        "tools.answers:play",
        {
            **_ANY,
            "--episode": {"metavar": "ID", "help": "its id, or its place, counted from 0 (default: the first)"},
            "--field": {
                "action": "append",
                "default": [],
                "metavar": "NAME",
                "help": "a field, or what its name begins with, with all its dimensions; may be given several times",
            },
            "--gif": {"metavar": "FILE", "help": "write the pictures of the field, or of the first that has some"},
            "--mp4": {"metavar": "FILE", "help": "the same as a video (extra video)"},
        },
    ),
    "convert": Command(
        "Write a recording of any format in another one; goes on where it was stopped.",
        "convert demos.hdf5 demos_lerobot --to lerobot --select 'length>20' --option fps=20",
        "rollout_data.convert",
        "tools.answers:convert",
        _convert_arguments,
    ),
    "bench": Command(
        "Measure how fast a recording streams here, beside a plain copy of the same bytes.",
        "bench walk",
        "rollout_data.tools.bench.bench",
        "tools.answers:bench",
        {
            **_ANY,
            "--seconds": {"type": float, "default": 0.2, "help": "of one of 80 measurements (default: %(default)s)"},
        },
    ),
    "verify": Command(
        "Check every block with all its checksums; repair on request.",
        "verify walk",
        "rollout_data.tools.rewrite.check_folder",
        "tools.answers:verify",
        {
            **_OWN,
            "--repair": {
                "action": "store_true",
                "help": "move damaged and foreign files to damaged/, keep their intact trajectories, renew the index",
            },
        },
    ),
    "doctor": Command(
        "Examine a recording of any format by all rules of DOCTOR.md; nothing is changed.",
        "doctor walk --skip VAL03 --fail-on warning",
        "rollout_data.doctor",
        "tools.doctoring:examine",
        _DOCTOR,
    ),
    "pack": Command(
        "Rewrite a finished dataset into a few large blocks with contiguous trajectories.",
        "pack walk walk_packed",
        "rollout_data.tools.rewrite.pack_dataset",
        "tools.answers:pack",
        {
            **_OWN,
            "out_dir": {"nargs": "?", "help": "a new folder for the result"},
            "--in-place": {"action": "store_true", "help": "replace the blocks of DATA_DIR"},
            "--block-mb": {"type": int, "default": 1024, "help": "size of a block at most (default: %(default)s)"},
        },
    ),
    "prune": Command(
        "Delete the oldest blocks, down to a number of trajectories, frames or bytes.",
        "prune walk --trajectories 1000 --dry-run",
        "rollout_data.prune",
        "tools.answers:prune",
        _prune_arguments,
    ),
    "drop": Command(
        "Leave trajectories out, for every reader; no block is touched.",
        "drop walk --select success=false",
        "rollout_data.drop",
        "tools.edit_answers:drop",
        _EDIT,
    ),
    "keep": Command(
        "Leave all other trajectories out, for every reader; no block is touched.",
        "keep walk --select 'return>100'",
        "rollout_data.keep",
        "tools.edit_answers:drop",
        _EDIT,
    ),
    "tag": Command(
        "Say something of trajectories: their task, their success, or anything else.",
        "tag walk --select 'length<20' --set success=false --set reviewer=ada",
        "rollout_data.tag",
        "tools.edit_answers:tag",
        {
            **_EDIT,
            "--set": {
                "action": "append",
                "default": [],
                "metavar": "NAME=VALUE",
                "help": "what is said, as JSON or text; may be given several times",
            },
        },
    ),
    "merge": Command(
        "Unite recordings of equal fields in a new folder, of hard links where that is possible.",
        "merge walk run --to both",
        "rollout_data.merge",
        "tools.edit_answers:merge",
        {"sources": {"nargs": "+", "metavar": "PATH", "help": "files or folders of any format"}, **_TO},
    ),
    "split": Command(
        "Divide a recording into folders, of hard links where that is possible.",
        "split walk train=0.9 val=0.1 --to walk_parts",
        "rollout_data.split",
        "tools.edit_answers:split",
        {
            **_ANY,
            "parts": {"nargs": "*", "metavar": "NAME=SHARE", "help": "default: the parts that the file itself names"},
            **_TO,
            "--seed": {"type": int, "default": 0, "help": "of the choice (default: %(default)s)"},
        },
    ),
    "repair": Command(
        "Mend in a new folder what `doctor` finds; the source is not touched.",
        "repair walk --to walk_mended --dry-run",
        "rollout_data.repair",
        "tools.edit_answers:repair",
        {
            **_ANY,
            **_TO,
            "--only": {"default": "", "metavar": "CODE,..", "help": "mend these only, info too; default: all but info"},
            "--yes": {"default": "", "metavar": "CODE,..", "help": "confirm VAL10, VAL13, IMG04 or TIM08"},
            "--dry-run": {"action": "store_true", "help": "print the plan, and write nothing"},
        },
    ),
    "push": Command(
        "Upload the blocks that are not there yet to a URL.",
        "push walk s3://bucket/walk",
        "rollout_data.push",
        "tools.answers:push",
        {**_OWN, "url": {"help": "a URL that fsspec knows, such as s3://bucket/walk"}},
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `rollout-data`; 0 if all is well, 1 if the data are not, 2 if the call is wrong, 130 after Ctrl-C."""
    prog, code = PROGRAM, 1
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
    options = _parser(command, prog).parse_args(given)
    options.progress, options.command = sys.stderr.isatty(), prog.rpartition(" ")[2]
    module, _, function = command.run.partition(":")
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: _say(f"{prog}: warning: {message}", sys.stderr)
        answer = getattr(import_module(f"rollout_data.{module}"), function)(options)
    if options.json:
        from .info import strict_json

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
        message += _nearest(wrong, known) if wrong.startswith("-") else ""
        raise SystemExit(_told(self.prog, f"{message} (see {self.prog} --help)", 2))


def _parser(command: Command, prog: str) -> argparse.ArgumentParser:
    """Make the parser of a command from its row."""
    epilog = f"example:\n  {PROGRAM} {command.example}\n\nin Python: {command.function}"
    form = argparse.RawDescriptionHelpFormatter
    parser = _Parser(prog, description=command.summary, epilog=epilog, formatter_class=form)
    arguments = command.arguments() if callable(command.arguments) else command.arguments
    for name, about in arguments.items():
        parser.add_argument(name, **about)
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else; null where nothing is known")
    return parser


def _command_named(given: Sequence[str]) -> str:
    """Give the command that is meant: the one of this name, or the only one that begins so.

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


def _nearest(word: str, known: Collection[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; expected one of {', '.join(known)}"


def _told(prog: str, text: str, code: int) -> int:
    """Tell of an error in a line; gives the exit code."""
    _say(f"{prog}: {text}", sys.stderr)
    return code


def _say(text: str, stream: TextIO) -> None:
    """Print a line; what a terminal would obey, line ends and what the stream cannot encode are escaped."""
    line = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)
    encoding = stream.encoding or "utf-8"
    print(line.encode(encoding, "backslashreplace").decode(encoding), file=stream)
