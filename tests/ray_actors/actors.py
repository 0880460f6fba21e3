"""Helpers for tests of remote buffers: rows that encode their origin, and faults of actors."""

from __future__ import annotations

import os
import signal
from functools import partial
from typing import Any

import ray
import torch

from storage import DictBuffer
from storage.remote import RemoteBuffer

NO_CPUS = {"actor_options": {"num_cpus": 0}}
MAKE = partial(DictBuffer, capacity=100_000)


def rows(first: int, count: int) -> dict[str, Any]:
    """Rows whose every value encodes their number."""
    number = torch.arange(first, first + count)
    return {
        "number": number.view(-1, 1),
        "flag": (number % 3 == 0).view(-1, 1),
        "deep": {
            "half": (number % 100).view(-1, 1).bfloat16(),
            "wide": number.view(-1, 1) + torch.zeros(1, 1100),
        },
    }


def check_rows(found: dict[str, Any]) -> list[int]:
    """Check that each row is complete. Return the numbers of the rows."""
    number = found["number"]
    expected = {
        "number": number,
        "flag": number % 3 == 0,
        "half": (number % 100).bfloat16(),
        "wide": number.float(),
    }
    leaves = {"number": number, "flag": found["flag"], **found["deep"]}
    for name, leaf in leaves.items():
        assert leaf.dtype == expected[name].dtype and bool((leaf == expected[name]).all()), name
    return number.flatten().tolist()


def held(buffer: RemoteBuffer) -> list[int]:
    """List the numbers of all rows of all shards, sorted."""
    return sorted(
        number for part in buffer.call("get_full_buffer") if part for number in check_rows(part)
    )


def process_of(buffer: RemoteBuffer, shard: int = 0) -> int:
    """Return the process id of the actor of a shard."""
    process: int = ray.get(buffer.actors[shard].__ray_call__.remote(lambda _: os.getpid()))
    return process


def kill(buffer: RemoteBuffer, shard: int = 0) -> None:
    os.kill(process_of(buffer, shard), signal.SIGKILL)


@ray.remote(num_cpus=0)
def collect(buffer: RemoteBuffer, first: int, num_pushes: int, ends: bool = True) -> int:
    """Push 50 rows at a time from another process.

    Without `ends`, kill the process after the last answer.
    """
    for push in range(num_pushes):
        buffer.extend(rows(first + 50 * push, 50))
    buffer.flush()
    if not ends:
        os.kill(os.getpid(), signal.SIGKILL)
    buffer.close()
    return num_pushes
