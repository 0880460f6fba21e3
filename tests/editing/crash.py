"""Edits that are killed before their n-th change of the disk, for every n.

What a worker does stands in `WORK`; it kills itself, so that every instant is met, however busy the machine is.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollout_data import drop, merge, repair, split, tag, undrop
from tests.editing.folders import folder_of

#: What is done in a folder that holds "walk", of two writers whose first trajectories are dropped already, and
#: "hurt", of which a block is cut.
WORK: dict[str, Callable[[Path], Any]] = {
    "drop": lambda folder: drop(folder / "walk", ["a:3", "b:3"]),
    "undrop": lambda folder: undrop(folder / "walk"),
    "tag": lambda folder: tag(folder / "walk", ["a:2", "b:2"], task="push"),
    "merge": lambda folder: merge([folder / "walk", folder / "walk"], folder / "out"),
    "split": lambda folder: split(folder / "walk", {"x": 0.5, "y": 0.5}, folder / "out"),
    "repair": lambda folder: repair(folder / "hurt", folder / "out"),
}
#: Every change of the disk that others can see goes through one of these.
_CHANGES = ("open", "link", "rename", "replace", "unlink", "mkdir", "rmdir")


def made(folder: Path) -> None:
    """Record what workers begin with."""
    walk = folder_of(folder / "begun" / "walk", num=4, flush_every=None)
    drop(walk, ["a:0", "b:0"])
    hurt = folder_of(folder / "begun" / "hurt", num=4, flush_every=None)
    os.truncate(next(hurt.glob("rollout_a_0*.h5")), 5000)


def work(folder: Path, seed: int) -> None:
    """Do the work `seed % 10`, and die before change `seed // 10` of the disk."""
    shutil.copytree(folder.parent / "begun", folder, dirs_exist_ok=True)
    left = most = seed // 10

    def counted(name: str) -> Callable[..., Any]:
        function = getattr(os, name)

        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **options)

        return call

    for name in _CHANGES:
        setattr(os, name, counted(name))
    list(WORK.values())[seed % 10](folder)
    changed = most - left
    (folder / "done").write_text(str(changed))
