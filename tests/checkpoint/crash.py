"""A training loop that saves checkpoints until it is killed, and checks of its folder."""

from __future__ import annotations

from pathlib import Path

import torch

from storage import AsyncCheckpointSaver, load_checkpoint, load_checkpoint_meta
from tests.killed import Counter

WORK = "tests.checkpoint.crash:save_until_killed"


def save_until_killed(folder: Path, seed: int) -> None:
    torch.set_num_threads(1)
    compress, begun, written = (
        bool(seed % 2),
        Counter(folder / ".begun"),
        Counter(folder / ".written"),
    )
    state = {"w": [torch.zeros(100_000), torch.zeros(7, dtype=torch.int64)], "step": 0}
    with AsyncCheckpointSaver(max_queue_size=1 + seed % 3) as saver:
        step = 0
        while True:
            step += 1
            for tensor in state["w"]:
                tensor.fill_(step)
            state["step"] = step
            begun.set(step)
            future = saver.save_async(
                state, folder / "a.pt", compress=compress, meta={"step": step}
            )
            future.add_done_callback(lambda future, step=step: written.set(step))
            if seed % 5 == 0:
                future.result()


def check_what_is_left(folder: Path) -> int:
    """Check that the checkpoint is complete, and not older than the last written one.

    Return its step, or 0.
    """
    begun, written = Counter.read(folder / ".begun"), Counter.read(folder / ".written")
    if not written and not list(folder.glob("a.pt*")):
        return 0
    state = load_checkpoint(folder / "a.pt")
    step = state["step"]
    assert all((tensor == step).all() for tensor in state["w"])
    assert written <= step <= begun, (written, step, begun)
    assert load_checkpoint_meta(folder / "a.pt") == {"step": step}
    with AsyncCheckpointSaver() as saver:
        saver.save_async({"step": -1}, folder / "a.pt", compress=bool(list(folder.glob("*.lz4"))))
    names = {path.name for path in folder.iterdir()} - {".begun", ".written"}
    assert len(names) == 1, f"what the killed one left beside is removed by the next: {names}"
    return step
