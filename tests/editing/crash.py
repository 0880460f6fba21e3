"""Edits that are killed before their n-th change of the disk, for every n.

A worker does a job of `WORK` and kills itself, so that the instant does not depend on the machine.
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

#: Jobs in a folder with "walk", of two writers whose first trajectories are dropped, and "hurt"
#: with a truncated block.
WORK: dict[str, Callable[[Path], Any]] = {
    "drop": lambda folder: drop(folder / "walk", ["a:3", "b:3"]),
    "undrop": lambda folder: undrop(folder / "walk"),
    "tag": lambda folder: tag(folder / "walk", ["a:2", "b:2"], task="push"),
    "merge": lambda folder: merge([folder / "walk", folder / "walk"], folder / "out"),
    "split": lambda folder: split(folder / "walk", {"x": 0.5, "y": 0.5}, folder / "out"),
    "repair": lambda folder: repair(folder / "hurt", folder / "out"),
}
#: Functions through which every visible change of the disk goes.
_CHANGES = ("open", "link", "rename", "replace", "unlink", "mkdir", "rmdir")


def made(folder: Path) -> None:
    """Write the folders that workers start from."""
    walk = folder_of(folder / "begun" / "walk", num=4, flush_every=None)
    drop(walk, ["a:0", "b:0"])
    hurt = folder_of(folder / "begun" / "hurt", num=4, flush_every=None)
    os.truncate(next(hurt.glob("rollout_a_0*.h5")), 5000)


def work(folder: Path, seed: int) -> None:
    """Do job `seed % 10`, and kill the process before change `seed // 10` of the disk."""
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
