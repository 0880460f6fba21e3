"""Processes that save a store repeatedly until they are killed, and checks of the saved folder."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from storage import ActionLabelRollout, QueueRolloutStorage, ReplayBuffer, TrajectoryDictBuffer
from storage.errors import RolloutDataError
from tests.killed import Counter

from .every_store import MAKERS, load, plain, rollout

WORK = "tests.buffers.crash:save_until_killed"
NAMES = tuple(MAKERS)
#: Stores that differ from those of `MAKERS`, for classes whose `clear` is not enough.
OTHERS: dict[str, Callable[[], Any]] = {
    "queue": lambda: rollout(QueueRolloutStorage, 3),
    "labels": lambda: rollout(ActionLabelRollout, 3),
    "replay": lambda: ReplayBuffer(3, 4, generator=0),
    "expert": lambda: TrajectoryDictBuffer(
        [{"observation": torch.zeros(4, 1)}] * 2, "cpu", 2, generator=0
    ),
}


def states_of(name: str) -> list[Any]:
    """Create two different stores of a class. Each save contains one of them."""
    store = MAKERS[name]()
    if name in OTHERS:
        return [store, OTHERS[name]()]
    other = MAKERS[name]()
    other.clear()
    return [store, other]


def save_until_killed(folder: Path, seed: int) -> None:
    torch.set_num_threads(1)
    stores, begun, written = (
        states_of(NAMES[seed % len(NAMES)]),
        Counter(folder / ".begun"),
        Counter(folder / ".written"),
    )
    count = 0
    while True:
        begun.set(count + 1)
        stores[count % 2].save(folder / "saved")
        count += 1
        written.set(count)
        if seed % 4 == 0:
            time.sleep(0.0005)  # so that most kills are between saves


def check_what_is_left(folder: Path, seed: int) -> int:
    """Check that the save is the last complete one, or a later one.

    Return the number of complete saves.
    """
    begun, written = Counter.read(folder / ".begun"), Counter.read(folder / ".written")
    name = NAMES[seed % len(NAMES)]
    stores = states_of(name)
    try:
        actual = plain(load(folder / "saved").state_dict())
    except RolloutDataError:
        assert written == 0, f"{name}: {written} saves were complete"
        return 0
    known = [plain(store.state_dict()) for store in stores]
    assert actual in [known[(number - 1) % 2] for number in range(max(written, 1), begun + 1)]
    stores[0].save(folder / "saved")
    left = {path.name for path in folder.iterdir()} - {".begun", ".written"}
    assert left == {"saved"}, f"{name}: the next save removes what the killed one left: {left}"
    return written
