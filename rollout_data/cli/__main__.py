"""`python -m rollout_data.cli` is `rollout-data`."""

import sys

from . import main

if __name__ == "__main__":
    sys.exit(main())
