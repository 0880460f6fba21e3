"""Two gloo ranks that read windows, started by `torch.distributed.run`.

Each prints its batches as one line of JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from rollout_data import WindowDataset, WindowLoader, WindowMixture
from tests.files import recorded


def main(folder: Path) -> None:
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    dataset = WindowDataset(folder, 1)
    torch.distributed.barrier()
    if rank == 1:  # it alone sees what comes later
        recorded.record(folder, [9], first_number=50, writer_name="later")
        dataset = WindowDataset(folder, 1)
    loader = WindowLoader(dataset, 4, seed=1)
    actual = {"len": len(loader), "epochs": []}
    for _ in range(2):
        batches = []
        for batch in loader:
            batches.append(batch["observation"][:, 0, 2].tolist())
            torch.distributed.barrier()  # hangs unless all ranks have equally many
        actual["epochs"].append(batches)
    mixture = WindowMixture([dataset])
    sampler = mixture.sampler(seed=1)
    batches = torch.utils.data.DataLoader(mixture, 30, sampler=sampler, collate_fn=mixture.collate)
    actual["draws"] = next(iter(batches))["observation"][:, 0, 2].tolist()
    # One write at a time: lines of ranks would mix.
    lines = [None, None]
    torch.distributed.all_gather_object(lines, actual)
    if rank == 0:
        print(json.dumps(lines))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
