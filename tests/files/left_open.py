"""Script that ends while it iterates over each kind of reader.

Arguments: a data folder, the way to end ("return", "exit" or "raise"), and "spawn" to start spawned
workers, too.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from rollout_data import RolloutDataset, WindowDataset, WindowLoader, WindowMixture, loader

SPAWNED: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": "spawn"}


def stream(path: str) -> RolloutDataset:
    return RolloutDataset(path, 2, device="cpu", num_transitions_per_env=4)


def readers(path: str, with_spawned: bool) -> Iterator[Any]:
    windows = WindowDataset(path, 4)
    mixture = WindowMixture([windows, path], length=4)
    # Processes are forked before the first thread starts.
    yield loader(stream(path), num_workers=2)
    yield DataLoader(stream(path), batch_size=None, num_workers=2)
    yield DataLoader(windows, 4, collate_fn=windows.collate, num_workers=2)
    if with_spawned:
        yield loader(stream(path), **SPAWNED)
        yield DataLoader(windows, 4, collate_fn=windows.collate, **SPAWNED)
    yield stream(path)
    yield loader(stream(path))
    yield stream(path).prefetch(3)
    yield WindowLoader(windows, 4)
    yield WindowLoader(mixture, 4)


if __name__ == "__main__":
    folder, end, *options = sys.argv[1:]
    iterators = []
    for reader in readers(folder, "spawn" in options):
        iterator = iter(reader)
        next(iterator)
        iterators.append(iterator)
    if end == "exit":
        sys.exit(3)
    if end == "raise":
        raise RuntimeError("raised by the script")
