"""`python -m rollout_data.tools` is `rollout-data`."""

import sys

from .cli.command_line import main

if __name__ == "__main__":
    sys.exit(main())
