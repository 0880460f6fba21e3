"""Examples run as users run them: each in a process of its own, in a folder of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def started(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a folder; names that end in ".py" are examples, in one thread each."""
    given = {"PYTHONPATH": f"{ROOT}{os.pathsep}{EXAMPLES}", "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, "-W", "error::DeprecationWarning:__main__"]
    command += [str(EXAMPLES / one) if one.endswith(".py") else one for one in arguments]
    return subprocess.run(
        command, cwd=folder, env=os.environ | given, capture_output=True, text=True
    )


def run(folder: Path, *arguments: str, **environment: str) -> str:
    """Do what `started` does; what it printed. It must succeed."""
    done = started(folder, *arguments, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout
