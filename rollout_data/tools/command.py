"""The command `rollout-data`: one file per subcommand, found through one table.

One rule: a subcommand parses, calls the library, prints, and returns an exit code; these files
are the only ones that print.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import suppress

from storage.errors import RolloutDataError

from . import info, pack, prune, verify

#: Name -> module with a docstring, `add_arguments(parser)` and `run(options) -> exit code`.
COMMANDS = {"info": info, "verify": verify, "pack": pack, "prune": prune}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `rollout-data`; 0 if all is well, 1 if the data are not, 2 if the call is wrong."""
    parser = argparse.ArgumentParser(prog="rollout-data", description="Look at, check and rewrite recorded rollouts.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        summary = (module.__doc__ or "").split("\n")[0]
        module.add_arguments(commands.add_parser(name, help=summary, description=summary))
    options = parser.parse_args(arguments)
    try:
        code = COMMANDS[options.command].run(options)
        sys.stdout.flush()  # a full disk, or a reader that has left, is told here
        return code
    except (RolloutDataError, OSError) as error:
        print(info.escaped(f"rollout-data {options.command}: {error}"), file=sys.stderr)
    with suppress(OSError):
        try:
            sys.stdout.flush()
        except OSError:  # otherwise the interpreter tries again, and complains, when it exits
            sys.stdout.close()
    return 1
