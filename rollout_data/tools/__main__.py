"""Run the command `rollout-data` as `python -m rollout_data.tools`."""

import sys

from .cli.command_line import main

if __name__ == "__main__":
    sys.exit(main())
