"""A script that torchrun starts in each rank: it streams folders one after another, and writes the
batches as JSON.

Argument: a list of readings as JSON, each the arguments of `read`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import rollout_data
from rollout_data import RolloutDataset
from tests.files.recorded import record

#: Number of batches after which new data are recorded.
NUM_WRITTEN = 40


def seen(batch):
    """Return (trajectory, frame, valid) of each env and step."""
    get = batch.__getitem__ if isinstance(batch, dict) else lambda name: getattr(batch, name)
    values = get("observation").long()
    return (
        torch.stack([values[..., 0], values[..., 1], get("valid").long()], -1)
        .flatten(0, -3)
        .tolist()
    )


def iterate(dataset, reading, num_workers, start_method):
    """Return an iterator over the dataset, for a way of reading."""
    options = {"num_workers": num_workers}
    if num_workers:
        options["multiprocessing_context"] = start_method
    if reading == "prefetch":
        return dataset.prefetch(4)
    if reading == "loader":
        return rollout_data.loader(dataset, **options)
    batch_size = 2 if reading == "accelerate-shard" else None
    batches = torch.utils.data.DataLoader(dataset, batch_size=batch_size, **options)
    if reading.startswith("accelerate"):
        from accelerate import Accelerator, DataLoaderConfiguration

        config = DataLoaderConfiguration(
            dispatch_batches=False if reading == "accelerate-shard" else None
        )
        source = rollout_data.loader(dataset) if reading == "accelerate-loader" else batches
        return Accelerator(cpu=True, dataloader_config=config).prepare(source)
    if reading.startswith("fabric"):
        from lightning.fabric import Fabric

        fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
        fabric.launch()
        return fabric.setup_dataloaders(batches)
    return batches


def read(
    data_dir,
    reading,
    num_workers=0,
    start_method="fork",
    shard="auto",
    as_dict=False,
    refresh_s=None,
):
    """Read a folder to its end, in some cases beside a writer.

    Return the batches and the error, if there is one.
    """
    rank = dist.get_rank()
    own = int(os.environ["RANK"]), 2
    dataset = RolloutDataset(
        data_dir,
        4,
        3,
        True,
        device="cpu",
        num_transitions_per_env=2,
        as_dict=as_dict,
        shard=own if shard == "own" else shard,
        refresh_s=refresh_s,
    )
    actual, error = [], None
    is_live = reading in ("prefetch", "loader")
    try:
        for number, batch in enumerate(iterate(dataset, reading, num_workers, start_method)):
            actual.append(seen(batch))
            # No rank waits for the other: they read different data.
            if is_live and rank == number % 2 and number < NUM_WRITTEN:
                record(Path(data_dir), [3, 2], first_number=100 * rank + 2 * number + 20)
    except Exception as raised:  # noqa: BLE001 - the test looks at it
        error = f"{type(raised).__name__}: {raised}"
    Path(data_dir).with_name(f"rank{rank}.json").write_text(
        json.dumps({"batches": actual, "error": error})
    )
    return error


def main() -> None:
    dist.init_process_group("gloo")
    for arguments in json.loads(sys.argv[1]):
        if read(**arguments) is not None:
            return
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
