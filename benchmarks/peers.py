"""Peers: the packages that we compare with, their installation, and their versions.

Each peer is optional. The extra `bench` in setup.cfg lists them, and constraints.txt has the
versions. This module imports nothing from this project, so that `python benchmarks/peers.py
install` runs before anything is installed.
"""

from __future__ import annotations

import configparser
import importlib
import importlib.metadata
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]

#: Distribution -> module, where the names differ.
MODULES = {
    "mosaicml-streaming": "streaming",
    "pillow": "PIL",
    "rsl-rl-lib": "rsl_rl",
    "stable-baselines3": "stable_baselines3",
}
#: Packages of the extra that the benchmarks need; not measured.
TOOLS = {"gymnasium", "matplotlib"}


class PeerMissing(Exception):
    """A peer that cannot be measured here. The text states the reason."""


def distributions() -> list[str]:
    """List the distribution names of the peers in setup.cfg."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    wanted = config["options.extras_require"]["bench"].split("\n")
    names = [re.split(r"[\[<>=!~ ]", line.strip())[0] for line in wanted if line.strip()]
    return [name for name in names if name not in TOOLS]


def load(distribution: str, submodule: str = "") -> ModuleType:
    """Import a peer. Raises `PeerMissing` with the reason if that fails."""
    name = MODULES.get(distribution, distribution)
    try:
        return importlib.import_module(f"{name}.{submodule}" if submodule else name)
    except Exception as error:  # any error is the reason to skip the peer
        text = str(error).splitlines() or [""]
        raise PeerMissing(f"{distribution}: {type(error).__name__}: {text[0]}") from error


def versions() -> dict[str, str]:
    """Return the version of each installed peer."""
    installed = {}
    for name in distributions():
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed


def install() -> None:
    """Install the peers one by one with the pinned torch. Print failures and continue."""
    names = distributions()
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    needed_pins = [pin for pin in pins if pin.split("==")[0] in {"torch", *names}]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.write("\n".join(needed_pins) + "\n")
        constraints.flush()
        for name in names:
            command = [
                sys.executable,
                "-m",
                "pip",
                "install",
                "--quiet",
                "--disable-pip-version-check",
            ]
            done = subprocess.run(
                [*command, "-c", constraints.name, name], capture_output=True, text=True
            )
            errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
            result = (
                "installed"
                if done.returncode == 0
                else f"skipped: {(errors or ['pip failed'])[-1]}"
            )
            sys.stdout.write(f"peer {name}: {result}\n")


if __name__ == "__main__":
    if sys.argv[1:] != ["install"]:
        sys.exit("usage: python benchmarks/peers.py install")
    install()
