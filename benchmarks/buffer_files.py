"""Files of buffers: save a large ring and load it again.

The limit of saving is one sequential write of the same bytes into a new file, flushed to the disk.
The limit of loading is one sequential read of these bytes from the disk into new memory. The files
are removed from the page cache before each load.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from storage import DictBuffer, load_buffer
from storage.core.durable_files import sync_path

from .data import forget
from .harness import LIMIT, OURS, PEER, Case, Contender
from .replay import rows

REACH = 1.3
CHUNK_BYTES = 8 << 20


def cases(quick: bool) -> Iterator[Case]:
    """Yield saving and loading of 2 GB."""
    capacity, step = (2_000, 2_000) if quick else (1_400_000, 10_000)
    folder = Path(
        tempfile.mkdtemp(prefix="buffer_files_", dir=os.environ.get("BENCHMARKS_FOLDER", "."))
    )
    try:
        buffer = DictBuffer(capacity=capacity, end_key=["terminated", "truncated"], generator=0)
        for _ in range(capacity // step):
            buffer.extend(rows(step))
        yield saving(buffer, folder)
        yield loading(buffer, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def saving(buffer: DictBuffer, folder: Path) -> Case:
    """Save the buffer, and flush all files to the disk."""
    num_bytes = _num_bytes(buffer)
    chunk = torch.randn(CHUNK_BYTES // 4).numpy().view("u1")

    def clear() -> None:
        for path in folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        sync_path(folder)

    def bare() -> None:
        with open(folder / "bare", "wb", buffering=0) as file:
            for start in range(0, num_bytes, CHUNK_BYTES):
                file.write(chunk[: num_bytes - start])
            os.fsync(file.fileno())

    def with_torch() -> None:
        with open(folder / "state.pt", "wb") as file:
            torch.save(buffer.state_dict(), file)
            file.flush()
            os.fsync(file.fileno())

    return Case(
        f"save {num_bytes / 1e9:.2g} GB",
        (
            Contender("write and flush", lambda: bare, LIMIT, before=clear),
            Contender(
                "save",
                lambda: lambda: buffer.save(folder / "buffer"),
                OURS,
                before=clear,
                reach=REACH,
            ),
            Contender("torch.save", lambda: with_torch, PEER, before=clear),
        ),
        num_bytes=num_bytes,
        num_repeats=5,
    )


def loading(buffer: DictBuffer, folder: Path) -> Case:
    """Load the saved buffer from the disk."""
    num_bytes = _num_bytes(buffer)
    buffer.save(folder / "buffer")
    torch.save(buffer.state_dict(), folder / "state.pt")

    def bare() -> None:
        room = memoryview(torch.empty(num_bytes, dtype=torch.uint8).numpy())
        with open(folder / "buffer" / "buffer.hdf5", "rb", buffering=0) as file:
            for start in range(0, num_bytes, CHUNK_BYTES):
                file.readinto(room[start : start + CHUNK_BYTES])

    def drop() -> None:
        forget(folder)

    return Case(
        f"load {num_bytes / 1e9:.2g} GB",
        (
            Contender("read", lambda: bare, LIMIT, before=drop),
            Contender(
                "load_buffer",
                lambda: lambda: load_buffer(folder / "buffer"),
                OURS,
                before=drop,
                reach=REACH,
            ),
            Contender(
                "torch.load", lambda: lambda: torch.load(folder / "state.pt"), PEER, before=drop
            ),
        ),
        num_bytes=num_bytes,
        num_repeats=5,
    )


def _num_bytes(buffer: DictBuffer) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in buffer.storage.values())
