"""Run examples as users run them: each in another process and a folder of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def started(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Start Python in a folder. Names that end in ".py" are examples. Each has one thread."""
    variables = {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{EXAMPLES}",
        "OMP_NUM_THREADS": "1",
        **environment,
    }
    command = [sys.executable, "-W", "error::DeprecationWarning:__main__"]
    command += [
        str(EXAMPLES / argument) if argument.endswith(".py") else argument for argument in arguments
    ]
    return subprocess.run(
        command, cwd=folder, env=os.environ | variables, capture_output=True, text=True
    )


def run(folder: Path, *arguments: str, **environment: str) -> str:
    """Run Python as `started` does, and return its output. It must succeed."""
    done = started(folder, *arguments, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout
