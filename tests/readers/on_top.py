"""Let an environment also import the packages of the running environment, after its own."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path


def main() -> None:
    """Write a `.pth` file into the environment whose folder is the first argument."""
    below, variables = sysconfig.get_path("purelib"), {"base": sys.argv[1], "platbase": sys.argv[1]}
    packages = Path(sysconfig.get_path("purelib", vars=variables))
    (packages / "on_top.pth").write_text(f"import site; site.addsitedir({below!r})\n", "utf-8")


if __name__ == "__main__":
    main()
